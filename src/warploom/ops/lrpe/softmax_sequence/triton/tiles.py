"""Tiles of softmax over the sequence: which tokens and features they are, how they are read, and what programs publish.

A column is a feature of one (batch entry or packed sequence, head). A feature slab has ``W`` angles of a head, and so the
columns of P members. Its tokens are cut into parts. A tile is a part of a slab; tiles are numbered (batch entry, head,
part, slab), slabs fastest. Of packed sequences a tile holds several runs.

What is known of columns is (1, P · W) in float32, members alternating. Programs publish it in slots, float32
(B · H · slabs, slots, KINDS, P · W): one for each part; of packed sequences, part + sequence: both only grow from token
to token, so no two runs share one.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from warploom.device.activations import widen
from warploom.device.packed import sequence_of
from warploom.device.phase import cos_sin
from warploom.device.rotation import rotate
from warploom.device.rows import RowSpec, load_input, store_input, store_pair
from warploom.ops.lrpe.triton.angles import Angles, divide, token_positions
from warploom.ops.lrpe.triton.rows import RowStrides


class SequenceSizes(NamedTuple):
    """Sizes of a call and of its parts; the inverses are for `divide`."""

    tokens: tl.int32
    heads: tl.int32
    heads_inverse: tl.int64
    parts: tl.int32
    parts_inverse: tl.int64
    part_tokens: tl.int32
    slots: tl.int32
    tiles: tl.int32
    rounds: tl.int32
    lag: tl.int32


class SequenceConfig(NamedTuple):
    """Compile-time choices of a kernel."""

    spec: RowSpec
    P: int  # members of an angle: 1 for ``cosine``, 2 for the pairs of ``rotate``
    EXACT: int  # results in float32: 1 for those of 16-bit numbers, 2 for those of float32
    EXACT_SUMS: int  # sums over columns in float32, on which theta's gradient rests, by the same numbers
    STEPPED: bool  # whether rows of a block are a constant angle from those of the one before
    R: int  # rows of a block
    W: int  # angles of a block
    STAGES: int  # loads under way at once in loops over a tile


class SequenceCall(NamedTuple):
    """Arguments of a kernel. ``out`` is the gradient of x in a backward, and ``grad`` None in a forward."""

    x: tl.tensor
    grad: tl.tensor
    out: tl.tensor
    statistics: tl.tensor
    partial: tl.tensor  # None where a tile holds all tokens
    arrived: tl.tensor  # (B · H · slabs,), zeros; None where a tile holds all tokens
    dtheta: tl.tensor
    cu_seqlens: tl.tensor
    angles: Angles
    sizes: SequenceSizes
    x_strides: RowStrides
    grad_strides: RowStrides
    out_strides: RowStrides


class SlabTile(NamedTuple):
    """Tokens ``start`` to ``end`` of a slab, whose angles begin with ``first``, and the groups that they belong to."""

    b: tl.tensor
    h: tl.tensor
    first: tl.tensor
    part: tl.tensor
    slab: tl.tensor  # its number among those of all heads
    start: tl.tensor
    end: tl.tensor
    first_group: tl.tensor
    last_group: tl.tensor


class Run(NamedTuple):
    """The tokens of one group, a batch entry or a packed sequence, in a tile."""

    start: tl.tensor
    end: tl.tensor
    group: tl.tensor
    group_start: tl.tensor
    first_slot: tl.tensor  # of the group
    slot: tl.tensor  # of the run
    slots: tl.tensor  # of the group: how many


@triton.jit
def tile_of(number, call, config: tl.constexpr):
    """Returns the tile of a number."""
    SLABS: tl.constexpr = (config.spec.F + config.W - 1) // config.W
    sizes = call.sizes
    rest = number // SLABS
    unit = divide(rest, sizes.parts_inverse)
    part = rest - unit * sizes.parts
    b = divide(unit, sizes.heads_inverse)
    start = part * sizes.part_tokens
    end = tl.minimum(start + sizes.part_tokens, sizes.tokens)
    first_group = b
    last_group = b
    if call.cu_seqlens is not None:
        ends = start + tl.arange(0, 2) * (end - 1 - start)
        numbers = call.angles.numbers
        touched = sequence_of(ends, call.cu_seqlens, numbers.cu_stride, numbers.sequences)
        first_group = tl.min(touched, axis=0)
        last_group = tl.max(touched, axis=0)
    slab = number - rest * SLABS
    return SlabTile(
        b.to(tl.int64), (unit - b * sizes.heads).to(tl.int64), slab * config.W, part, unit * SLABS + slab, start, end,
        first_group, last_group,
    )  # fmt: skip


@triton.jit
def run_of(group, tile, call):
    """Returns the tokens of a group in a tile."""
    sizes = call.sizes
    group = tile.start * 0 + group
    start, end, group_start, group_end = tile.start, tile.end, tile.start * 0, sizes.tokens
    first_slot = tile.start * 0
    slot = tile.part
    if call.cu_seqlens is not None:
        bounds = call.cu_seqlens + group * call.angles.numbers.cu_stride
        group_start = tl.load(bounds).to(tl.int32)
        group_end = tl.load(bounds + call.angles.numbers.cu_stride).to(tl.int32)
        group_start = tl.minimum(tl.maximum(group_start, 0), sizes.tokens)
        group_end = tl.minimum(tl.maximum(group_end, group_start), sizes.tokens)
        # Behind the end if there are no tokens.
        start = tl.minimum(tl.maximum(start, group_start), sizes.tokens - 1)
        end = tl.minimum(end, group_end)
        first_slot = group_start // sizes.part_tokens + group
        slot += group
    slots = (group_end + sizes.part_tokens - 1) // sizes.part_tokens - group_start // sizes.part_tokens
    return Run(start, end, group.to(tl.int64), group_start, first_slot, slot, slots)


@triton.jit
def slab_rows(base, strides, tile, VEC: tl.constexpr):
    """Returns token 0 of a tile's batch entry and head, (1, 1)."""
    return base + (tile.b * (strides.s * VEC) + tile.h * (strides.u * VEC) + tl.zeros((1, 1), tl.int64))


@triton.jit
def block_rows(row, run, R: tl.constexpr):
    """Returns tokens of a block (R,), and which of them are the run's."""
    n = row + tl.arange(0, R)
    return n, n < run.end


@triton.jit
def zero_rows_past_end(tile, call, config: tl.constexpr):
    """Writes zeros, output or gradient, to a tile's rows behind the last sequence."""
    spec: tl.constexpr = config.spec
    numbers = call.angles.numbers
    behind = tl.load(call.cu_seqlens + numbers.sequences * numbers.cu_stride).to(tl.int32)
    rows = slab_rows(call.out, call.out_strides, tile, spec.VEC)
    zeros = tl.zeros((config.R, config.W), tl.float32)
    for row in range(tl.maximum(tile.start, behind), tile.end, config.R):
        n = row + tl.arange(0, config.R)
        to = rows + n.to(tl.int64)[:, None] * (call.out_strides.n * spec.VEC)
        if call.grad is None:
            store_pair(to, zeros, zeros, n < tile.end, call.out_strides.f, tile.first, spec, config.W)
        else:
            store_input(to, zeros, zeros, n < tile.end, call.out_strides.f, tile.first, spec, config.W)


@triton.jit
def load_x(row, run, tile, call, config: tl.constexpr):
    """Returns both members of a block of ``x`` in float32, (R, W) each. Rows behind the run's last token are as that."""
    spec: tl.constexpr = config.spec
    n, _ = block_rows(row, run, config.R)
    n = tl.minimum(n, run.end - 1).to(tl.int64)[:, None]
    rows = slab_rows(call.x, call.x_strides, tile, spec.VEC) + n * (call.x_strides.n * spec.VEC)
    mask = tl.full((config.R,), True, tl.int1)
    x1, x2 = load_input(rows, mask, call.x_strides.f, tile.first, spec, config.W)
    return widen(x1), widen(x2)


@triton.jit
def block_angles(row, run, tile, call, steps, EXACT: tl.constexpr, config: tl.constexpr):
    """Returns positions (R, 1 or W) of a block's tokens, and their angles' cosines and sines (R, W)."""
    n, mask = block_rows(row, run, config.R)
    axis = (tile.first + tl.arange(0, config.W)) // config.spec.E
    place = n if call.angles.position_ids is not None else n - run.group_start
    position = token_positions(place, mask, tile.b, tl.zeros_like(n) + tile.h, axis, call.angles, config.spec.AXES)
    cosine, sine = cos_sin(position, steps, not EXACT)
    return position, cosine, sine


class SteppedAngles(NamedTuple):
    """Cosines and sines of a block's rows, and of the angles by which all rows rotate from one block to the next."""

    cosine: tl.tensor
    sine: tl.tensor
    step_cosine: tl.tensor
    step_sine: tl.tensor


@triton.jit
def first_angles(run, tile, call, steps, EXACT: tl.constexpr, config: tl.constexpr):
    """Returns what `next_angles` takes for a run's first block: a `SteppedAngles`, or nothing of use unless ``STEPPED``."""
    if config.STEPPED:
        _, cosine, sine = block_angles(run.start, run, tile, call, steps, EXACT, config)
        step_cosine, step_sine = cos_sin(tl.full((1, 1), config.R, tl.int32), steps, not EXACT)
        rotation = SteppedAngles(cosine, sine, step_cosine, step_sine)
    else:
        rotation = (run.start,)
    return rotation


@triton.jit
def next_angles(rotation, row, run, tile, call, steps, EXACT: tl.constexpr, config: tl.constexpr):
    """Returns a block's positions, unless ``STEPPED``, its cosines and sines (R, W), and what the next block takes.

    To rotate on takes half the instructions of a new angle, and none of the special function unit. Rounding errors grow
    with the number of steps: 1e-4 after 128. For results in float32 each fourth block has new angles.
    """
    position = 0
    if config.STEPPED:
        cosine, sine = rotation.cosine, rotation.sine
        if EXACT:
            if (row - run.start) // config.R % 4 == 0:
                _, cosine, sine = block_angles(row, run, tile, call, steps, EXACT, config)
        next_cosine, next_sine = rotate(cosine, sine, rotation.step_cosine, rotation.step_sine, "rotate")
        rotation = SteppedAngles(next_cosine, next_sine, rotation.step_cosine, rotation.step_sine)
    else:
        position, cosine, sine = block_angles(row, run, tile, call, steps, EXACT, config)
    return position, cosine, sine, rotation


# ----------------------------------------------------------------------------------------------------------
# What programs tell each other
# ----------------------------------------------------------------------------------------------------------


@triton.jit
def slot_pointers(call, slot, tile, config: tl.constexpr):
    """Returns a slot's first kind of columns, (1, P · W)."""
    KINDS: tl.constexpr = 2 if call.grad is None else 1
    c = tl.arange(0, config.P * config.W)[None, :]
    return call.partial + (tile.slab.to(tl.int64) * call.sizes.slots + slot) * (KINDS * config.P * config.W) + c


@triton.jit
def arrive(call, tile):
    """Publishes what the program has written: count one more tile of the slab as reduced."""
    tl.debug_barrier()
    tl.atomic_add(call.arrived + tile.slab, 1, sem="release")


@triton.jit
def wait(call, tile):
    """Waits until all tiles of the slab have been reduced: by programs that run, in rounds that wait for no later one."""
    while tl.atomic_add(call.arrived + tile.slab, 0, sem="acquire") < call.sizes.parts:
        pass
    tl.debug_barrier()
