"""Backward of flash attention for Hopper, in the manner of `kernels.hopper.forward`.

What it computes is in `kernels.backward`. A group of warps owns 64 queries and loops over the keys
(`hopper_query_kernel`), or 64 keys and loops over the queries of all heads that read them, for their gradients
(`hopper_key_kernel`) or for all (`hopper_backward_kernel`): see `warploom.device.hopper.attention_backward`.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from warploom.device.hopper.attention import Options, Window, Work
from warploom.device.hopper.attention_backward.all_gradients import AllGradients, compute_all
from warploom.device.hopper.attention_backward.exchange import new_exchange
from warploom.device.hopper.attention_backward.keys import (
    OWN_STAGES,
    KeyCopies,
    KeyGradients,
    compute_for_keys,
    copy_for_keys,
)
from warploom.device.hopper.attention_backward.queries import (
    QueryGradients,
    compute_for_queries,
    compute_for_wide_queries,
)
from warploom.device.hopper.attention_backward.query_sums import Additions, add_query_gradients
from warploom.device.hopper.pipeline import (
    NARROW_HEAD,
    ROWS,
    Result,
    SplitStrides,
    new_ring,
    new_row_ring,
    new_scheduler,
)
from warploom.ops.flash_attention.kernels.hopper.forward import QueryCopies, copy_for_queries


@gluon.jit
def hopper_query_kernel(
    q_desc, k_desc, v_desc, do_desc, dq, lse, delta, counters, seqused_k, units,
    work: Work, window: Window, scale: gl.float32, grad_scale: gl.float32, dq_strides: SplitStrides,
    CAUSAL: gl.constexpr, SPLIT: gl.constexpr, SOFTCAP: gl.constexpr, GROUPS: gl.constexpr, STAGES: gl.constexpr,
    PIECES: gl.constexpr,
):  # fmt: skip
    """Gradients of queries. Descriptors, boxes and parts are as in `kernels.hopper.forward.hopper_forward_kernel`.

    Of queries in ``PIECES``, ``dq`` is an address, also of a whole result, and ``SPLIT`` is set.

    ``counters[1]`` is zero. It runs beside `hopper_key_kernel`, of which it reads nothing, and does not end before that
    has ended.
    """
    if SPLIT:  # what sums up parts is put in place while this still runs, and waits for it
        gdc_launch_dependents()
    D: gl.constexpr = q_desc.block_type.shape[3]
    E: gl.constexpr = v_desc.block_type.shape[3]
    BLOCK_N: gl.constexpr = k_desc.block_type.shape[2]
    dtype: gl.constexpr = q_desc.dtype
    q_tiles = gl.allocate_shared_memory(dtype, [GROUPS * PIECES, 1, 1, ROWS, D], q_desc.layout)
    do_tiles = gl.allocate_shared_memory(dtype, [GROUPS, 1, 1, ROWS, E], do_desc.layout)
    k_tiles = gl.allocate_shared_memory(dtype, [STAGES * PIECES, 1, 1, BLOCK_N, D], k_desc.layout)
    V_STAGES: gl.constexpr = STAGES if D <= NARROW_HEAD else STAGES - 1  # there is no room for as many wide ones
    v_tiles = gl.allocate_shared_memory(dtype, [V_STAGES, 1, 1, BLOCK_N, E], v_desc.layout)
    if SPLIT or D > NARROW_HEAD:
        dq_tiles = q_tiles  # of parts not used: they go from registers to memory
    else:
        dq_tiles = gl.allocate_shared_memory(dtype, [GROUPS, 1, 1, ROWS, D], dq.layout)
    scheduler = new_scheduler(counters + 1, 1, GROUPS)
    k, v = new_ring(k_tiles, STAGES, GROUPS), new_ring(v_tiles, V_STAGES, GROUPS)
    fence_async_shared()
    options = Options(window, seqused_k, None, SOFTCAP, None, units)
    copies = QueryCopies(scheduler, (q_desc, do_desc), (q_tiles, do_tiles), k_desc, v_desc, k, v, work, options)
    result = Result(dq, dq_tiles, dq_strides)
    call = QueryGradients(scheduler, q_tiles, do_tiles, k, v, lse, delta, result, work, scale, grad_scale, options)
    if D > NARROW_HEAD:
        gl.warp_specialize(
            [(compute_for_wide_queries, (0, CAUSAL, SPLIT, call)),
             (compute_for_wide_queries, (1, CAUSAL, SPLIT, call)),
             (copy_for_queries, (GROUPS, CAUSAL, True, 1, copies))],
            [4, 1], [240, 24],
        )  # fmt: skip
    elif GROUPS == 2:
        gl.warp_specialize(
            [(compute_for_queries, (0, PIECES == 1, CAUSAL, SPLIT, call)),
             (compute_for_queries, (1, PIECES == 1, CAUSAL, SPLIT, call)),
             (copy_for_queries, (GROUPS, CAUSAL, True, 1, copies))],
            [4, 1], [240, 24],
        )  # fmt: skip
    else:  # three groups leave no registers for queries
        gl.warp_specialize(
            [(compute_for_queries, (0, False, CAUSAL, SPLIT, call)),
             (compute_for_queries, (1, False, CAUSAL, SPLIT, call)),
             (compute_for_queries, (2, False, CAUSAL, SPLIT, call)),
             (copy_for_queries, (GROUPS, CAUSAL, True, 1, copies))],
            [4, 4, 1], [160, 160, 32],
        )  # fmt: skip
    if gl.program_id(0) == 0:
        gdc_wait()


@gluon.jit
def hopper_key_kernel(
    q_desc, k_desc, v_desc, do_desc, dk, dv, lse, delta, counters, seqused_k, units,
    work: Work, window: Window, scale: gl.float32, grad_scale: gl.float32,
    dk_strides: SplitStrides, dv_strides: SplitStrides,
    CAUSAL: gl.constexpr, SPLIT: gl.constexpr, SOFTCAP: gl.constexpr, GROUPS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Gradients of keys and values, for tiles of GROUPS · 64 keys, 64 for each of two groups of warps.

    Descriptors are of (B, H, N, D), with boxes of (1, 1, BLOCK_M, D) for queries and their gradients and of
    (1, 1, 64, D) for keys, values and results; boxes of values are as wide as those of keys. ``counters[0]`` is zero.
    Parts are as in `kernels.hopper.forward.hopper_forward_kernel`. It waits for the launch before it, and the one after it, of
    `hopper_query_kernel`, starts where this one leaves multiprocessors idle.
    """
    gdc_wait()
    gdc_launch_dependents()
    D: gl.constexpr = q_desc.block_type.shape[3]
    BLOCK_M: gl.constexpr = q_desc.block_type.shape[2]
    dtype: gl.constexpr = q_desc.dtype
    k_tiles = gl.allocate_shared_memory(dtype, [OWN_STAGES * GROUPS, 1, 1, ROWS, D], k_desc.layout)
    v_tiles = gl.allocate_shared_memory(dtype, [OWN_STAGES * GROUPS, 1, 1, ROWS, D], v_desc.layout)
    q_tiles = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BLOCK_M, D], q_desc.layout)
    do_tiles = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BLOCK_M, D], do_desc.layout)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    lses = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_M], plain)
    deltas = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_M], plain)
    scheduler = new_scheduler(counters, OWN_STAGES, GROUPS)
    q, do = new_row_ring(q_tiles, STAGES, GROUPS, lses), new_row_ring(do_tiles, STAGES, GROUPS, deltas)
    fence_async_shared()
    options = Options(window, seqused_k, None, SOFTCAP, None, units)
    copies = KeyCopies(
        scheduler, (k_desc, v_desc), (k_tiles, v_tiles), q_desc, do_desc, q, do, lse, delta, None, None, work, options,
    )  # fmt: skip
    dk_result = Result(dk, k_tiles, dk_strides)
    dv_result = Result(dv, v_tiles, dv_strides)
    call = KeyGradients(scheduler, k_tiles, v_tiles, q, do, dk_result, dv_result, work, scale, grad_scale, options)
    gl.warp_specialize(
        [(compute_for_keys, (0, GROUPS, CAUSAL, SPLIT, call)),
         (compute_for_keys, (1, GROUPS, CAUSAL, SPLIT, call)),
         (copy_for_keys, (GROUPS, CAUSAL, 1, copies))],
        [4, 1], [240, 24],
    )  # fmt: skip


@gluon.jit
def hopper_backward_kernel(
    q_desc, k_desc, v_desc, do_desc, dk, dv, added, lse, delta, counters, tiles_added, seqused_k, units,
    work: Work, window: Window, scale: gl.float32, grad_scale: gl.float32,
    CAUSAL: gl.constexpr, ENDS: gl.constexpr, SOFTCAP: gl.constexpr, GROUPS: gl.constexpr, STAGES: gl.constexpr,
    PARTS: gl.constexpr,
):  # fmt: skip
    """All gradients with five products, for tiles of GROUPS · 64 keys, 64 for each of two groups of warps.

    Tensors are as in `hopper_key_kernel`. The gradient of queries is ``added`` up, without the scale, in a descriptor of
    (B, H, N, D) float32, which may hold anything. ``tiles_added`` (GROUPS, B, H, N) are zero, and afterwards say at the first
    query of a tile how many tiles of keys were added there. ``PARTS`` are buffers of each group, in which its sums leave.
    ``ENDS``: see `compute_all`.

    The same inputs give the same bits: tiles of keys are added to a tile of queries in one order (`query_in_order`), and a
    warp of each group waits until those before have been added. The waiting ends:

    - Programs take every tile from one counter (`take_tile`). So tiles are taken in their order, by programs that run.
    - A program finishes its tiles in the order in which it takes them.
    - A tile waits only for tiles before it.

    So the first tile that is not finished waits for none: its program runs, and has finished all that it took before. No
    number of programs has to run at the same time, and what else runs on the GPU does not matter.
    """
    gdc_wait()
    gdc_launch_dependents()
    D: gl.constexpr = q_desc.block_type.shape[3]
    BLOCK_M: gl.constexpr = q_desc.block_type.shape[2]
    dtype: gl.constexpr = q_desc.dtype
    k_tiles = gl.allocate_shared_memory(dtype, [GROUPS, 1, 1, ROWS, D], k_desc.layout)
    v_tiles = gl.allocate_shared_memory(dtype, [GROUPS, 1, 1, ROWS, D], v_desc.layout)
    q_tiles = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BLOCK_M, D], q_desc.layout)
    do_tiles = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BLOCK_M, D], do_desc.layout)
    swizzled: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    dlogits = gl.allocate_shared_memory(dtype, [2 * GROUPS, ROWS, BLOCK_M], swizzled)
    parts = gl.allocate_shared_memory(gl.float32, [PARTS * GROUPS, 1, 1, ROWS, ROWS], added.layout)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    lses = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_M], plain)
    deltas = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_M], plain)
    scheduler = new_scheduler(counters, 1, 2 * GROUPS)
    q, do = new_row_ring(q_tiles, STAGES, GROUPS, lses), new_row_ring(do_tiles, STAGES, GROUPS, deltas)
    exchange = new_exchange(dlogits, k_tiles, v_tiles, parts)
    fence_async_shared()
    options = Options(window, seqused_k, None, SOFTCAP, None, units)
    copies = KeyCopies(
        scheduler, (k_desc, v_desc), (k_tiles, v_tiles), q_desc, do_desc, q, do, lse, delta, None, None, work, options,
    )  # fmt: skip
    additions = Additions(
        scheduler, parts, exchange.part_full, exchange.part_empty, added, tiles_added, work, options
    )
    dk_result, dv_result = Result(dk, k_tiles, None), Result(dv, v_tiles, None)
    call = AllGradients(scheduler, q, do, exchange, dk_result, dv_result, work, scale, grad_scale, options)
    gl.warp_specialize(
        [(compute_all, (0, CAUSAL, ENDS, call)),
         (compute_all, (1, CAUSAL, ENDS, call)),
         (copy_for_keys, (GROUPS, CAUSAL, 1, copies, True)),
         (add_query_gradients, (0, GROUPS, CAUSAL, BLOCK_M, additions)),
         (add_query_gradients, (1, GROUPS, CAUSAL, BLOCK_M, additions))],
        [4, 1, 1, 1], [240, 24, 24, 24],
    )  # fmt: skip
