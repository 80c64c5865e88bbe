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

from warploom.ops.lrpe.softmax_sequence.triton.backward import apply_gradient, sum_gradients
from warploom.ops.lrpe.softmax_sequence.triton.columns import (
    combine_statistics,
    combine_sums,
    split_members,
    statistics_pointers,
)
from warploom.ops.lrpe.softmax_sequence.triton.forward import apply_softmax, column_statistics
from warploom.ops.lrpe.softmax_sequence.triton.tiles import (
    SequenceCall,
    SequenceSizes,
    arrive,
    run_of,
    slot_pointers,
    tile_of,
    wait,
    zero_rows_past_end,
)
from warploom.ops.lrpe.triton.angles import AngleNumbers, Angles, Inverses, load_frequencies
from warploom.ops.lrpe.triton.rows import RowStrides


class Statistics(NamedTuple):
    """Statistics of both members' columns, (1, W) each, the scales as `weights` take them."""

    shift1: tl.tensor
    shift2: tl.tensor
    scale1: tl.tensor
    scale2: tl.tensor


@triton.jit
def prepare_statistics(shift, scale, EXACT: tl.constexpr, config: tl.constexpr):
    """Returns `Statistics` from shifts and reciprocal sums (1, P · W)."""
    shift1, shift2 = split_members(shift, config.P, config.W)
    scale1, scale2 = split_members(scale if EXACT else tl.log2(scale), config.P, config.W)
    return Statistics(shift1, shift2, scale1, scale2)


@triton.jit
def load_statistics(group, tile, EXACT: tl.constexpr, call, config: tl.constexpr):
    """Returns `Statistics` that a forward has stored."""
    ptrs, mask = statistics_pointers(call, group, tile, config)
    shift = tl.load(ptrs, mask=mask, other=0.0)
    scale = tl.load(ptrs + config.P * config.spec.F, mask=mask, other=0.0)
    return prepare_statistics(shift, scale, EXACT, config)


@triton.jit
def reduce_run(group, tile, call, config: tl.constexpr):
    """Publishes the sums of a run."""
    C: tl.constexpr = config.P * config.W
    run = run_of(group, tile, call)
    to = slot_pointers(call, run.slot, tile, config)
    if call.grad is None:
        shift, total = column_statistics(run, tile, call, config)
        tl.store(to, shift)
        tl.store(to + C, total)
    else:
        known = load_statistics(run.group, tile, config.EXACT_SUMS, call, config)
        tl.store(to, sum_gradients(group, run, tile, known, call, config))


@triton.jit
def finish_run(group, tile, steps, call, config: tl.constexpr):
    """Writes the result of a run, and forward in the first of a group its statistics."""
    C: tl.constexpr = config.P * config.W
    ALONE: tl.constexpr = call.partial is None
    run = run_of(group, tile, call)
    if call.grad is None:
        if ALONE:
            shift, total = column_statistics(run, tile, call, config)
        else:
            slots = slot_pointers(call, run.first_slot, tile, config)
            shift, total = combine_statistics(slots, run.slots, C, config.EXACT_SUMS)
        ptrs, mask = statistics_pointers(call, run.group, tile, config)
        scale = tl.div_rn(1.0, tl.where(mask & (total != 0.0), total, 1.0))
        if run.slot == run.first_slot:
            tl.store(ptrs, shift, mask=mask)
            tl.store(ptrs + config.P * config.spec.F, scale, mask=mask)
        apply_softmax(run, tile, prepare_statistics(shift, scale, config.EXACT, config), steps, call, config)
    else:
        # A lone token's gradient is zero if both are taken alike: its weight is one, its sum is what reaches it.
        EXACT: tl.constexpr = config.EXACT_SUMS if ALONE else config.EXACT
        known = load_statistics(run.group, tile, EXACT, call, config)
        if ALONE:
            c = sum_gradients(group, run, tile, known, call, config)
        else:
            c = combine_sums(slot_pointers(call, run.first_slot, tile, config), run.slots, C, config.EXACT_SUMS)
        c1, c2 = split_members(c, config.P, config.W)
        apply_gradient(run, tile, known, c1, c2, steps, EXACT, call, config)


@triton.jit
def reduce_tile(tile, call, config: tl.constexpr):
    """Publishes the sums of a tile's runs."""
    for group in range(tile.first_group, tile.last_group + 1):
        reduce_run(group, tile, call, config)
    arrive(call, tile)


@triton.jit
def run_rounds(call, config: tl.constexpr):
    """Runs all rounds of a program."""
    ALONE: tl.constexpr = call.partial is None
    spec: tl.constexpr = config.spec
    sizes = call.sizes
    for i in range(sizes.rounds + sizes.lag):
        number = i * tl.num_programs(0) + tl.program_id(0)
        if not ALONE:
            if number < sizes.tiles:
                reduce_tile(tile_of(number, call, config), call, config)
            number -= sizes.lag * tl.num_programs(0)
        if (number >= 0) & (number < sizes.tiles):
            tile = tile_of(number, call, config)
            if call.cu_seqlens is not None:
                zero_rows_past_end(tile, call, config)
            steps = load_frequencies(call.angles, tile.h, tile.first, spec, config.W)
            if not ALONE:
                wait(call, tile)
            for group in range(tile.first_group, tile.last_group + 1):
                finish_run(group, tile, steps, call, config)


@triton.jit
def sequence_forward_kernel(
    x, out, statistics, partial, arrived, theta, position_ids, offsets, cu_seqlens, offset: tl.int32, sizes: SequenceSizes,
    numbers: AngleNumbers, inverses: Inverses, x_strides: RowStrides, out_strides: RowStrides, config: tl.constexpr,
):  # fmt: skip
    """Computes the output and statistics."""
    angles = Angles(theta, position_ids, offsets, None, offset, numbers, inverses)
    call = SequenceCall(
        x, None, out, statistics, partial, arrived, None, cu_seqlens, angles, sizes, x_strides, x_strides, out_strides,
    )  # fmt: skip
    run_rounds(call, config)


@triton.jit
def sequence_backward_kernel(
    x, grad, dx, statistics, partial, arrived, dtheta, theta, position_ids, offsets, cu_seqlens, offset: tl.int32, sizes: SequenceSizes,
    numbers: AngleNumbers, inverses: Inverses, x_strides: RowStrides, grad_strides: RowStrides, dx_strides: RowStrides,
    config: tl.constexpr,
):  # fmt: skip
    """Computes the gradient of x, and partial sums of theta's, ``dtheta``, or None."""
    angles = Angles(theta, position_ids, offsets, None, offset, numbers, inverses)
    call = SequenceCall(
        x, grad, dx, statistics, partial, arrived, dtheta, cu_seqlens, angles, sizes, x_strides, grad_strides, dx_strides,
    )  # fmt: skip
    run_rounds(call, config)
