"""The kernels of softmax over the sequence, and how their programs share the work.

Softmax over the tokens needs two looks at ``x``: one for each column's sum, one to apply it. Only the first should
reach device memory. Every program takes each ``programs``-th tile. In a round it reduces one to partial sums, publishes
these, and applies the softmax to the tile that it reduced ``lag`` rounds before. By then all tiles of that sequence have
been reduced in the same or an earlier round, so that programs hardly wait for each other, and little has been read
since: the tile comes from the L2 cache. Programs that wait are launched cooperatively: all of them run. Where a tile
holds all tokens nobody waits, and nothing is published.

Statistics are float32 (groups, H, 2, P, F): a shift, and the reciprocal of the sum of e^(x − shift). A group is a batch
entry or a packed sequence. Programs publish a shift and a sum forward, and the sum of y · dy backward.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from warploom.ops.lrpe.kernels.angles import AngleNumbers, Angles, Inverses, load_frequencies
from warploom.ops.lrpe.kernels.rows import Strides
from warploom.ops.lrpe.softmax_sequence.kernels.backward import apply_gradient, sum_gradients
from warploom.ops.lrpe.softmax_sequence.kernels.columns import (
    combine_statistics,
    combine_sums,
    members,
    statistics_pointers,
)
from warploom.ops.lrpe.softmax_sequence.kernels.forward import apply_softmax, column_statistics
from warploom.ops.lrpe.softmax_sequence.kernels.tiles import (
    Call,
    Sizes,
    arrive,
    clear_tail,
    run_of,
    slot_pointers,
    tile_of,
    wait,
)


class Statistics(NamedTuple):
    """Of both members' columns, (1, W) each, the scales as `weights` take them."""

    shift1: tl.tensor
    shift2: tl.tensor
    scale1: tl.tensor
    scale2: tl.tensor


@triton.jit
def prepared(shift, scale, EXACT: tl.constexpr, variant: tl.constexpr):
    """`Statistics` from shifts and reciprocal sums (1, P · W)."""
    shift1, shift2 = members(shift, variant.P, variant.W)
    scale1, scale2 = members(scale if EXACT else tl.log2(scale), variant.P, variant.W)
    return Statistics(shift1, shift2, scale1, scale2)


@triton.jit
def load_statistics(group, tile, EXACT: tl.constexpr, call, variant: tl.constexpr):
    """`Statistics` that a forward has stored."""
    ptrs, mask = statistics_pointers(call, group, tile, variant)
    shift = tl.load(ptrs, mask=mask, other=0.0)
    scale = tl.load(ptrs + variant.P * variant.spec.F, mask=mask, other=0.0)
    return prepared(shift, scale, EXACT, variant)


@triton.jit
def reduce_run(group, tile, call, variant: tl.constexpr):
    """Publish the sums of a run."""
    C: tl.constexpr = variant.P * variant.W
    run = run_of(group, tile, call)
    to = slot_pointers(call, run.slot, tile, variant)
    if call.grad is None:
        shift, total = column_statistics(run, tile, call, variant)
        tl.store(to, shift)
        tl.store(to + C, total)
    else:
        known = load_statistics(run.group, tile, variant.EXACT_SUMS, call, variant)
        tl.store(to, sum_gradients(group, run, tile, known, call, variant))


@triton.jit
def finish_run(group, tile, steps, call, variant: tl.constexpr):
    """Write the result of a run, and forward in the first of a group its statistics."""
    C: tl.constexpr = variant.P * variant.W
    ALONE: tl.constexpr = call.partial is None
    run = run_of(group, tile, call)
    if call.grad is None:
        if ALONE:
            shift, total = column_statistics(run, tile, call, variant)
        else:
            slots = slot_pointers(call, run.first_slot, tile, variant)
            shift, total = combine_statistics(slots, run.slots, C, variant.EXACT_SUMS)
        ptrs, mask = statistics_pointers(call, run.group, tile, variant)
        scale = tl.div_rn(1.0, tl.where(mask & (total != 0.0), total, 1.0))
        if run.slot == run.first_slot:
            tl.store(ptrs, shift, mask=mask)
            tl.store(ptrs + variant.P * variant.spec.F, scale, mask=mask)
        apply_softmax(run, tile, prepared(shift, scale, variant.EXACT, variant), steps, call, variant)
    else:
        # A lone token's gradient is zero if both are taken alike: its weight is one, its sum is what reaches it.
        EXACT: tl.constexpr = variant.EXACT_SUMS if ALONE else variant.EXACT
        known = load_statistics(run.group, tile, EXACT, call, variant)
        if ALONE:
            c = sum_gradients(group, run, tile, known, call, variant)
        else:
            c = combine_sums(slot_pointers(call, run.first_slot, tile, variant), run.slots, C, variant.EXACT_SUMS)
        c1, c2 = members(c, variant.P, variant.W)
        apply_gradient(run, tile, known, c1, c2, steps, EXACT, call, variant)


@triton.jit
def reduce_tile(tile, call, variant: tl.constexpr):
    """Publish the sums of a tile's runs."""
    for group in range(tile.first_group, tile.last_group + 1):
        reduce_run(group, tile, call, variant)
    arrive(call, tile)


@triton.jit
def run_rounds(call, variant: tl.constexpr):
    """All rounds of a program."""
    ALONE: tl.constexpr = call.partial is None
    sizes = call.sizes
    for i in range(sizes.rounds + sizes.lag):
        number = i * tl.num_programs(0) + tl.program_id(0)
        if not ALONE:
            if number < sizes.tiles:
                reduce_tile(tile_of(number, call, variant), call, variant)
            number -= sizes.lag * tl.num_programs(0)
        if (number >= 0) & (number < sizes.tiles):
            tile = tile_of(number, call, variant)
            if call.cu_seqlens is not None:
                clear_tail(tile, call, variant)
            steps = load_frequencies(call.angles, tile.h, tile.first, variant.spec, variant.W)
            if not ALONE:
                wait(call, tile)
            for group in range(tile.first_group, tile.last_group + 1):
                finish_run(group, tile, steps, call, variant)


@triton.jit
def sequence_forward_kernel(
    x, out, statistics, partial, arrived, theta, ids, offsets, cu_seqlens, offset: tl.int32, sizes: Sizes,
    numbers: AngleNumbers, inverses: Inverses, x_strides: Strides, out_strides: Strides, variant: tl.constexpr,
):  # fmt: skip
    """Output and statistics."""
    angles = Angles(theta, ids, offsets, None, None, offset, numbers, inverses)
    call = Call(
        x, None, out, statistics, partial, arrived, None, cu_seqlens, angles, sizes, x_strides, x_strides, out_strides,
    )  # fmt: skip
    run_rounds(call, variant)


@triton.jit
def sequence_backward_kernel(
    x, grad, dx, statistics, partial, arrived, dtheta, theta, ids, offsets, cu_seqlens, offset: tl.int32, sizes: Sizes,
    numbers: AngleNumbers, inverses: Inverses, x_strides: Strides, grad_strides: Strides, dx_strides: Strides,
    variant: tl.constexpr,
):  # fmt: skip
    """Gradient of x, and partial sums of theta's, ``dtheta``, or None."""
    angles = Angles(theta, ids, offsets, None, None, offset, numbers, inverses)
    call = Call(
        x, grad, dx, statistics, partial, arrived, dtheta, cu_seqlens, angles, sizes, x_strides, grad_strides, dx_strides,
    )  # fmt: skip
    run_rounds(call, variant)
