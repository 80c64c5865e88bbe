"""The forward of flash attention for Hopper, written for its asynchronous units in Gluon.

One warp copies tiles. Groups of four warps each own 64 queries, and find tiles of keys and values in rings of buffers (see
`warploom.device.hopper.pipeline`). A group keeps two products in flight: while the logits of one tile of keys become
weights, the weights of the tile before are multiplied with their values. The KV loop goes from the last keys to the first,
so that the masked tiles come first.
"""

from __future__ import annotations

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents

from warploom.device.hopper import tma
from warploom.device.hopper.pipeline import (
    Ring,
    barriers,
    copy_tile,
    init_each,
    matrix,
    new_ring,
    wait_empty,
    wait_full,
)
from warploom.ops.flash_attention.hopper.bias import (
    Bias,
    BiasSteps,
    clear_hidden_values,
    load_bias,
    prefetch_bias,
)
from warploom.ops.flash_attention.hopper.masks import first_key, own_queries, tile_of_step, without_first_step
from warploom.ops.flash_attention.hopper.softmax import (
    LN_2,
    add_row_slopes,
    exponent_base,
    in_powers,
    softmax_step,
    with_sink,
)
from warploom.ops.flash_attention.hopper.tile_mask import (
    TILE,
    TileMask,
    TileMaskSizes,
    clear_unseen,
    key_at,
    load_words,
    row_list,
)
from warploom.ops.flash_attention.hopper.tiles import (
    NARROW_HEAD,
    ROWS,
    Result,
    SplitStrides,
    clear_rows,
    copy_own,
    pack_16bit,
    pieces_of,
    product_layout,
    product_transposed,
    store_tile,
    store_tile_or_rows,
    unpack_as_operand,
)
from warploom.ops.flash_attention.hopper.work import (
    Alibi,
    AlibiStrides,
    AttentionCall,
    Schedule,
    Scheduler,
    SeqLens,
    Window,
    broadcast,
    broadcast_end,
    new_scheduler,
    next_tile,
    receive,
    tile_place,
    tiles_of,
    with_blocks,
)


class State(NamedTuple):
    """The softmax of a group's 64 queries so far, and its place in the rings."""

    acc: gl.tensor  # (64, E): weighted sums of values
    weights: gl.tensor  # of the last tile of keys, by `pack_16bit`, not in ``acc`` yet
    row_sum: gl.tensor  # (64,): of exponentials
    row_max: gl.tensor  # (64,): the largest logits, in powers of two
    tile: gl.int32  # number of the last tile
    starts: gl.int32  # how often the group was let start its products


class QueryKernel(NamedTuple):
    """Tensors and buffers of a kernel whose groups of warps own queries; None where it has no use for them."""

    scheduler: Scheduler
    q_tiles: gl.shared_memory_descriptor  # GROUPS for each stage of the scheduler
    do_tiles: gl.shared_memory_descriptor | None  # as many
    k: Ring
    v: Ring
    go: (
        gl.shared_memory_descriptor | None
    )  # a barrier for each group: of three, one starts its products after the other
    weights: gl.tuple | None  # see `backward_shared.Weights`
    out: Result | None
    lse: gl.tensor
    statistics: gl.tensor | None
    delta: gl.tensor | None
    inverse: gl.tensor | None
    dq: Result | None
    own_descs: gl.tuple  # of the queries, and what comes with them
    own_tiles: gl.tuple
    k_desc: gl.tensor
    v_desc: gl.tensor
    call: AttentionCall


@gluon.jit
def zero_rows_past_end(ring, count, n, seq):
    """Make tile number ``count`` of packed values zero behind its sequence, as NaN there times a weight of 0 is NaN.

    ``n`` is the number of its first key.
    """
    if n + ring.tiles.shape[3] > seq.keys:
        clear_rows(matrix(ring.tiles, wait_full(ring.full, count)), seq.keys - n)


@gluon.jit
def clear_unseen_values(ring, count, n, tiles):
    """Make values in tile number ``count`` zero whose keys no query sees. A tile of a mask that sees all has none."""
    clear_unseen(matrix(ring.tiles, wait_full(ring.full, count)), n, tiles)


@gluon.jit
def attend(
    state, q_pieces, queries, begin, end, kernel, own: gl.constexpr, MASKED: gl.constexpr, config: gl.constexpr,
    tiles=None,
):  # fmt: skip
    """KV loop of group number ``own`` over tiles ``end − 1 … begin``, or those steps of a list of tiles."""
    k, v, go, call = kernel.k, kernel.v, kernel.go, kernel.call
    STAGES: gl.constexpr = config.STAGES
    BLOCK_N: gl.constexpr = k.tiles.shape[3]
    GROUPS: gl.constexpr = config.GROUPS
    LAYOUT: gl.constexpr = product_layout(BLOCK_N)
    OUT_LAYOUT: gl.constexpr = product_layout(v.tiles.shape[4])
    for i in range(end - begin):
        count, starts = state.tile, state.starts
        if GROUPS > 2:
            mbarrier.wait(go.index(own), starts & 1)
            starts += 1
        logits = product_transposed(q_pieces, k, count + 1, LAYOUT)  # S = Q Kᵀ
        slot = wait_full(v.full, count)
        factor = unpack_as_operand(state.weights, v.tiles.dtype, OUT_LAYOUT)
        acc = warpgroup_mma(factor, matrix(v.tiles, slot), state.acc, is_async=True)  # O += P V, of the tile before
        if GROUPS > 2:
            mbarrier.arrive(go.index((own + 1) % GROUPS))
        words = None
        if tiles is not None:  # while products run
            n = key_at(tiles, end - 1 - i, queries, BLOCK_N)
            if MASKED:
                words = load_words(tiles, call.tiles, queries.m, n, BLOCK_N, LAYOUT)
        added = None
        if call.bias is not None:
            n = first_key(end - 1 - i, queries.seq, call, BLOCK_N)
            added = load_bias(n, queries, BLOCK_N, LAYOUT)
        logits = warpgroup_mma_wait(1, deps=[logits])
        mbarrier.arrive(k.empty.index((count + 1) % STAGES))
        if tiles is None:
            n = first_key(end - 1 - i, queries.seq, call, BLOCK_N)
        weights, row_sum, row_max, rescale = softmax_step(  # P = 2^(S − row_max)
            logits, state.row_sum, state.row_max, n, queries, call, MASKED, LAYOUT, config, words, added
        )
        acc, factor = warpgroup_mma_wait(0, deps=[acc, factor])
        mbarrier.arrive(v.empty.index(slot))
        # Without a window the first step has the end of the sequence.
        if MASKED and call.units is not None and call.window is not None:
            zero_rows_past_end(v, count + 1, n, queries.seq)
        if MASKED and tiles is not None:
            clear_unseen_values(v, count + 1, n, tiles)
        if call.bias is not None:
            clear_hidden_values(v, count + 1, n, queries.bias.seen)
        if call.base is None:
            acc = acc * gl.convert_layout(rescale, gl.SliceLayout(1, OUT_LAYOUT))[:, None]
        state = State(acc, pack_16bit(weights, v.tiles.dtype), row_sum, row_max, count + 1, starts)
    return state


@gluon.jit
def compute_tiles(own: gl.constexpr, config: gl.constexpr, kernel):
    """Run group number ``own`` of warps of `hopper_forward_kernel`."""
    scheduler, q_tiles, k, v = kernel.scheduler, kernel.q_tiles, kernel.k, kernel.v
    call, schedule = kernel.call, kernel.call.schedule
    GROUPS: gl.constexpr = config.GROUPS
    STAGES: gl.constexpr = config.STAGES
    PIECES: gl.constexpr = config.PIECES
    CAUSAL: gl.constexpr = config.CAUSAL
    LAST_FIRST: gl.constexpr = CAUSAL or call.tiles is not None
    BLOCK_N: gl.constexpr = k.tiles.shape[3]
    E: gl.constexpr = v.tiles.shape[4]
    OWN_BUFFERS: gl.constexpr = scheduler.full.shape[0] > 1
    LAYOUT: gl.constexpr = product_layout(BLOCK_N)
    OUT_LAYOUT: gl.constexpr = product_layout(E)
    ROW_LAYOUT: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    if own == GROUPS - 1:  # group 0 starts first
        mbarrier.arrive(kernel.go.index(0))
    tiles = tiles_of(schedule)
    count = 0
    starts = 0
    work = receive(scheduler, gl.to_tensor(0))
    while work.tile < tiles:
        place = tile_place(work.tile, schedule, LAST_FIRST)  # the last queries see the most keys
        batch, head = place.row // schedule.heads, place.row % schedule.heads
        queries = own_queries(place, own, kernel, config)
        seq = queries.seq
        m = queries.m
        q_pieces = pieces_of(q_tiles, work.slot * GROUPS + own, PIECES)
        if call.units is not None and call.softcap is not None:  # see `softmax_step`
            if m + ROWS > seq.tokens:
                clear_rows(q_pieces[0], seq.tokens - m)
        if call.sink is not None:  # it is there when the loop has ended
            sink = gl.load(call.sink + head).to(gl.float32)
            if call.units is not None:  # rows behind the last sequence have none
                sink = gl.where(seq.keys < seq.first_key, float("-inf"), sink)
        acc = gl.zeros([ROWS, E], gl.float32, OUT_LAYOUT)
        row_sum = gl.zeros([ROWS], gl.float32, ROW_LAYOUT)
        row_max = gl.full([ROWS], float("-inf"), gl.float32, ROW_LAYOUT)

        logits = product_transposed(q_pieces, k, count, LAYOUT)
        logits = warpgroup_mma_wait(0, deps=[logits])
        mbarrier.arrive(k.empty.index(count % STAGES))
        first = tile_of_step(0, queries, call)
        tiles_of_row = call.tiles
        words = None
        if call.tiles is None:
            n = first_key(first, seq, call, BLOCK_N)
        else:
            tiles_of_row = row_list(call.tiles, batch, head, m // TILE)
            n = key_at(tiles_of_row, first, queries, BLOCK_N)
            words = load_words(tiles_of_row, call.tiles, m, n, BLOCK_N, LAYOUT)
        added = None
        if call.bias is not None:
            added = load_bias(n, queries, BLOCK_N, LAYOUT)
        queries = without_first_step(queries, call)
        weights, row_sum, row_max, _ = softmax_step(
            logits, row_sum, row_max, n, queries, call, True, LAYOUT, config, words, added
        )
        if call.units is not None:
            zero_rows_past_end(v, count, n, seq)
        if call.tiles is not None:
            clear_unseen_values(v, count, n, tiles_of_row)
        if call.bias is not None:
            clear_hidden_values(v, count, n, queries.bias.seen)
        state = State(acc, pack_16bit(weights, v.tiles.dtype), row_sum, row_max, count, starts)
        if CAUSAL or call.window is not None or call.tiles is not None:  # otherwise the first step alone has a mask
            state = attend(
                state, q_pieces, queries, queries.full, queries.end, kernel, own, True, config, tiles_of_row
            )
        state = attend(
            state, q_pieces, queries, queries.low, queries.full, kernel, own, False, config, tiles_of_row
        )
        if call.window is not None:
            state = attend(state, q_pieces, queries, queries.begin, queries.low, kernel, own, True, config)
        if OWN_BUFFERS:
            mbarrier.arrive(scheduler.empty.index(work.slot))
        row_sum, row_max = state.row_sum, state.row_max
        slot = wait_full(v.full, state.tile)
        factor = unpack_as_operand(state.weights, v.tiles.dtype, OUT_LAYOUT)
        acc = warpgroup_mma(factor, matrix(v.tiles, slot), state.acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(v.empty.index(slot))
        count = state.tile + 1
        starts = state.starts

        if call.bias is not None:
            row_max = in_powers(row_max)
        if call.alibi is not None:
            row_max = add_row_slopes(row_max, queries, LAYOUT)
        if call.base is not None:
            row_max = gl.where(row_sum == 0.0, float("-inf"), call.base)
        if call.sink is not None:
            row_sum, row_max, rescale = with_sink(row_sum, row_max, sink)
        some = gl.where(row_sum == 0.0, 1.0, row_sum)  # where no key was seen: 0 / 1, and lse −inf + 0
        inverse = 1.0 / some
        if call.sink is not None:
            inverse = inverse * rescale
        acc = acc * gl.convert_layout(inverse, gl.SliceLayout(1, OUT_LAYOUT))[:, None]
        if call.tiles is not None or call.bias is not None:
            # A row that sees nothing has 0, whatever the tile holds that it did not see.
            empty = gl.convert_layout(row_sum == 0.0, gl.SliceLayout(1, OUT_LAYOUT))
            acc = gl.where(empty[:, None], 0.0, acc)
        if OWN_BUFFERS:
            tma.store_wait(0)  # until the tile before is stored from its buffer
        # Of queries in pieces, the first tile of results within the group's own.
        OUT_SLOT: gl.constexpr = (
            own if OWN_BUFFERS else (own * q_tiles.shape[0] // GROUPS * q_tiles.shape[4] + E - 1) // E
        )
        tokens = call.lengths.tokens
        end_row = tokens
        if call.units is not None:
            m -= seq.query_shift
            end_row = seq.tokens - seq.query_shift
            store_tile_or_rows(kernel.out, acc, OUT_SLOT, place.split, batch, head, m, end_row, OUT_LAYOUT)
        else:
            store_tile(kernel.out, acc, OUT_SLOT, place.split, batch, head, m, end_row, OUT_LAYOUT)
        if not OWN_BUFFERS:
            tma.store_wait(0)
            mbarrier.arrive(scheduler.empty.index(work.slot))

        local = gl.arange(0, ROWS, ROW_LAYOUT)
        mask = m + local < end_row
        offsets = place.row.to(gl.int64) * tokens + m + local
        size = schedule.rows.to(gl.int64) * tokens
        gl.store(kernel.statistics + place.split * 2 * size + offsets, row_max, mask=mask)
        gl.store(kernel.statistics + (place.split * 2 + 1) * size + offsets, row_sum, mask=mask)
        if not config.SPLIT:
            gl.store(kernel.lse + offsets, (row_max + gl.log2(some)) * LN_2, mask=mask)
        work = receive(scheduler, work.number + 1)
    tma.store_wait(0)


MOST_FIXED_TILES = gl.constexpr(6)  # of a program; see `are_counted`


@gluon.constexpr_function
def loops_are_even(causal, has_window, has_lengths, is_packed, has_tiles):
    """Returns whether the KV loops of all tiles are equally long."""
    return not (causal or has_window or has_lengths or is_packed or has_tiles)


@gluon.jit
def are_counted(tiles, programs):
    """Returns whether programs take tiles from a counter though loops are even: otherwise each has a fixed share of them.

    Few even tiles gain nothing by a counter, which costs a launch that makes it zero.
    """
    return tiles > MOST_FIXED_TILES * programs


@gluon.jit
def cache_places(n, seq, call, desc, KEYS: gl.constexpr):
    """Returns page and row of each box of the ``KEYS`` keys from ``n`` on; or sequence and row of a cache in one piece.

    Behind the sequence's keys, where a table may hold anything, it is page −1: what is copied of it is zeros.
    """
    BOX: gl.constexpr = desc.block_type.shape[2]
    places = ()
    for i in gl.static_range(KEYS // BOX):
        row = n + i * BOX
        page = seq.number
        if call.block_table is not None:
            page_size = BOX if BOX < KEYS else desc.shape[2]
            pages = call.block_table + seq.number.to(gl.int64) * (call.lengths.keys // page_size)
            page = gl.load(pages + row // page_size, mask=row < seq.keys, other=-1).to(gl.int32)
            row = row % page_size
        places += ((page, row),)
    return places


@gluon.jit
def copy_cached(desc, places, head, ring, count):
    """Copy the tile number ``count``, box by box, from its `cache_places`, once its buffer is empty."""
    BOXES: gl.constexpr = len(places)
    WIDTH: gl.constexpr = desc.block_type.shape[3]
    PIECES: gl.constexpr = ring.tiles.shape[4] // WIDTH
    boxes = tma.boxes_in(ring.tiles, desc)
    slot = wait_empty(ring.empty, count)
    full = ring.full.index(slot)
    mbarrier.expect(full, PIECES * BOXES * desc.block_type.nbytes)
    for i in gl.static_range(BOXES):
        page, row = places[i]
        for piece in gl.static_range(PIECES):
            box = boxes.index((slot * PIECES + piece) * BOXES + i)
            tma.async_copy_global_to_shared(desc, [page, head, row, piece * WIDTH], full, box)


@gluon.jit
def copy_for_queries(COUNTED: gl.constexpr, config: gl.constexpr, kernel):
    """The copying warp of a kernel that owns tiles of queries and has a KV loop.

    Its tiles are ``COUNTED``, or loops are even and `are_counted` says whether they are.
    """
    scheduler, k, v = kernel.scheduler, kernel.k, kernel.v
    call, schedule = kernel.call, kernel.call.schedule
    TERMS: gl.constexpr = config.TERMS
    LAST_FIRST: gl.constexpr = config.CAUSAL or call.tiles is not None
    BLOCK_N: gl.constexpr = k.tiles.shape[3]
    batch_size = schedule.rows // schedule.heads
    tiles = tiles_of(schedule)
    tile = gl.program_id(0)
    count = 0
    done = 0
    while tile < tiles:
        slot = broadcast(scheduler, tile, done)
        place = tile_place(tile, schedule, LAST_FIRST)
        batch, head = place.row // schedule.heads, place.row % schedule.heads
        queries = own_queries(place, 0, kernel, config)
        query_shift, key_shift = 0, 0
        if call.units is not None:
            query_shift, key_shift = queries.seq.query_shift, queries.seq.key_shift
        copy_own(kernel, batch, head, queries.m - query_shift, slot, batch_size, config)
        if call.tiles is not None:
            tiles_of_row = row_list(call.tiles, batch, head, queries.m // TILE)
        for i in range(queries.end - queries.begin):
            step = tile_of_step(i, queries, call)
            if call.tiles is None:
                n = first_key(step, queries.seq, call, BLOCK_N) - key_shift
            else:
                n = key_at(tiles_of_row, step, queries, BLOCK_N)
            if call.bias is not None:
                prefetch_bias(call.bias, batch, head, queries.m, n, call, config.GROUPS * ROWS, BLOCK_N)
            if config.CACHE is not None:
                places = cache_places(n, queries.seq, call, kernel.k_desc, config.CACHE)
                copy_cached(kernel.k_desc, places, head // schedule.group, k, count)
                copy_cached(kernel.v_desc, places, head // schedule.group, v, count)
            else:
                copy_tile(kernel.k_desc, batch, head // schedule.group, n, k, count, batch_size, TERMS)
                copy_tile(kernel.v_desc, batch, head // schedule.group, n, v, count, batch_size, TERMS)
            count += 1
        done += 1
        if COUNTED:
            tile = next_tile(scheduler, tiles)
        elif are_counted(tiles, gl.num_programs(0)):
            tile = next_tile(scheduler, tiles)
        else:
            tile += gl.num_programs(0)
    broadcast_end(scheduler, tile, done)


@gluon.jit
def hopper_forward_kernel(
    q_desc, k_desc, v_desc, out, lse, statistics, counter, seqused_k, block_table, units, shifts, out_rows, sink,
    tiles, listed, bits, column_bits, alibi, bias, seen, lengths: SeqLens, schedule: Schedule, right: gl.int32, window: Window,
    scale: gl.float32, out_strides: SplitStrides, mask_sizes: TileMaskSizes, alibi_strides: AlibiStrides, bias_strides: BiasSteps,
    config: gl.constexpr,
):  # fmt: skip
    """Attention for tiles of GROUPS · 64 queries, one after the other.

    Descriptors are of (B, H, N, D), with boxes of (1, 1, 64, D) for queries and results and (1, 1, BLOCK_N, D) for
    keys and values; those of queries and keys may be as wide as one of ``PIECES`` of a row. ``counter`` (1,) is zero
    where there are more tiles than programs, unless these have fixed shares (`are_counted`). With ``units`` and
    ``shifts`` sequences are packed, and ``out_rows`` is the address of ``out``. Keys in a ``CACHE`` have boxes of
    (1, 1, rows, 64), pages in ``block_table`` if there is one, and behind the counter stands how many units there
    are. The sink (H,) comes with one split alone. Writes what `triton.forward.forward_kernel` writes: if ``SPLIT``, ``out`` is the address of the parts, and
    otherwise a descriptor.
    """
    SPLIT: gl.constexpr = config.SPLIT
    GROUPS: gl.constexpr = config.GROUPS
    STAGES: gl.constexpr = config.STAGES
    PIECES: gl.constexpr = config.PIECES
    SOFTCAP: gl.constexpr = config.SOFTCAP
    CAUSAL: gl.constexpr = config.CAUSAL
    if SPLIT:  # what merges parts is put in place while this still runs, and waits for it
        gdc_launch_dependents()
    D: gl.constexpr = q_desc.block_type.shape[3]
    CACHED: gl.constexpr = config.CACHE is not None
    E: gl.constexpr = D if CACHED else v_desc.block_type.shape[3]
    BLOCK_N: gl.constexpr = config.CACHE if CACHED else k_desc.block_type.shape[2]
    K_LAYOUT: gl.constexpr = q_desc.layout if CACHED else k_desc.layout
    V_LAYOUT: gl.constexpr = q_desc.layout if CACHED else v_desc.layout
    dtype: gl.constexpr = q_desc.dtype
    # Tiles of queries: one that attends, and the next, where there is room for it.
    Q_STAGES: gl.constexpr = 2 if PIECES * D <= NARROW_HEAD else 1
    q_tiles = gl.allocate_shared_memory(dtype, [Q_STAGES * GROUPS * PIECES, 1, 1, ROWS, D], q_desc.layout)
    k_tiles = gl.allocate_shared_memory(dtype, [STAGES * PIECES, 1, 1, BLOCK_N, D], K_LAYOUT)
    v_tiles = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BLOCK_N, E], V_LAYOUT)
    out_tiles = None
    if not SPLIT:
        if PIECES * D > NARROW_HEAD:
            out_tiles = tma.tiles_in(q_tiles, E, out.layout)
        else:
            out_tiles = gl.allocate_shared_memory(dtype, [GROUPS, 1, 1, ROWS, E], out.layout)
    scheduler = new_scheduler(counter, Q_STAGES, GROUPS)
    k, v = new_ring(k_tiles, STAGES, GROUPS), new_ring(v_tiles, STAGES, GROUPS)
    go = barriers(GROUPS)
    init_each(go)
    fence_async_shared()
    if CACHED:
        schedule = with_blocks(schedule, gl.load(counter + 1))
    UNEVEN: gl.constexpr = not loops_are_even(
        CAUSAL, window is not None, seqused_k is not None, units is not None, tiles is not None
    )
    tile_mask = tiles
    if tiles is not None:
        tile_mask = TileMask(tiles, listed, bits, column_bits, mask_sizes)
    slopes = alibi
    if alibi is not None:
        slopes = Alibi(alibi, alibi_strides)
    biases = bias
    if bias is not None:
        biases = Bias(bias, seen, bias_strides)
    call = AttentionCall(
        lengths, schedule, right, scale, None, window, seqused_k, sink, SOFTCAP,
        exponent_base(SOFTCAP, dtype), units, shifts, block_table, tile_mask, slopes, biases,
    )  # fmt: skip
    result = Result(out, out_tiles, out_strides, out_rows)
    kernel = QueryKernel(
        scheduler, q_tiles, None, k, v, go, None, result, lse, statistics, None, None, None,
        (q_desc,), (q_tiles,), k_desc, v_desc, call,
    )  # fmt: skip
    if GROUPS == 2:
        gl.warp_specialize(
            [(compute_tiles, (0, config, kernel)), (compute_tiles, (1, config, kernel)), (copy_for_queries, (UNEVEN, config, kernel))],
            [4, 1], [240, 24],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [(compute_tiles, (0, config, kernel)), (compute_tiles, (1, config, kernel)), (compute_tiles, (2, config, kernel)),
             (copy_for_queries, (UNEVEN, config, kernel))],
            [4, 4, 1], [160, 160, 32],
        )  # fmt: skip
