"""Launches of the Triton kernels: tiles, strides, and the alignment of addresses."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from warploom.device.rows import RowSpec, StateStrides, Strides
from warploom.ops.linear_attention.call import PLACES, LinearCall
from warploom.ops.linear_attention.configs import (
    DECAY_CHUNK,
    WIDE_PIECE,
    LinearTile,
    in_power_of_two,
    is_held,
    piece_of,
    step_tile,
    tile_of,
)
from warploom.ops.linear_attention.triton.decay import DecayStrides, decay_kernel
from warploom.ops.linear_attention.triton.product import ProductConfig, ProductStrides, product_kernel
from warploom.ops.linear_attention.triton.states import SumsStrides, scan_kernel, sums_kernel
from warploom.ops.linear_attention.triton.step import StepStrides, step_kernel
from warploom.ops.linear_attention.triton.tiles import LinearConfig, LinearSizes, StateScales
from warploom.runtime.launch import Buffer, Launch, architecture, shared_memory
from warploom.runtime.layout import Layout, layout_of_entries

Tensor = torch.Tensor
State = Tensor | Buffer | None

_STATE_VEC = 4
"""The number that strides of states are divided by where they can be: 16 bytes of float32."""
_SCAN_BLOCK = 1024
_SCAN_AHEAD = 8
"""States of which a scan has the loads under way together."""


# ----------------------------------------------------------------------------------------------------------
# Arguments that kernels share
# ----------------------------------------------------------------------------------------------------------


def sizes_of(call: LinearCall, columns: int) -> LinearSizes:
    """Returns the sizes of a launch of so many blocks of columns."""
    q, _, _, theta, decay, _, offsets, cu_seqlens = call.inputs
    return LinearSizes(
        tokens=q.shape[1], heads=q.shape[2], chunks=call.chunks,
        chunk=call.chunk if call.chunks > 1 else 2**30, columns=columns, sequences=call.sequences,
        cu_stride=0 if cu_seqlens is None else cu_seqlens.stride(0),
        theta_h=0 if theta is None or theta.dim() == 1 or theta.shape[0] == 1 else theta.stride(0),
        theta_f=0 if theta is None else theta.stride(-1),
        offsets_b=0 if offsets is None or offsets.dim() == 0 else offsets.stride(0),
        decay_b=0 if decay is None or decay.dim() == 1 else decay.stride(0),
        decay_n=0 if decay is None or decay.dim() == 1 else decay.stride(1),
        decay_h=0 if decay is None else decay.stride(-1),
    )  # fmt: skip


def state_strides(state: State) -> StateStrides:
    """Returns the strides of a state, if there is one."""
    if state is None:
        return StateStrides(0, 0, 0, 0)
    return StateStrides(*(state.stride() if isinstance(state, Tensor) else state.stride))


def scales_of(call: LinearCall, initial: State, reverse: bool) -> StateScales:
    """Returns the scales of a product: a state from the caller is not over the scale, one of ours is."""
    scale = call.state_scale if reverse else 1.0
    return StateScales(call.options.scale, 1.0 / scale if isinstance(initial, Tensor) else 1.0, scale)


def is_wide(call: LinearCall) -> bool:
    """Returns whether gradients of encoded rows are made with pieces of `WIDE_PIECE`."""
    return call.half and call.values <= WIDE_PIECE and architecture(call.inputs.q.device) >= 90


class Blocks(NamedTuple):
    """Features of tiles: those of φ (or of each part), those of a value, and the pieces of the side added over."""

    f: int
    e: int
    pieces: int

    @classmethod
    def of_values(cls, call: LinearCall, tile: LinearTile) -> Blocks:
        """Returns the tiles of states with all features of φ, in pieces, and a block of a value's."""
        block = piece_of(call.features)
        return cls(block, tile.columns, -(-call.features // block))

    @classmethod
    def of_features(cls, call: LinearCall, block_f: int) -> Blocks:
        """Returns the tiles of states with all features of a value, in pieces, and a block of each part of φ."""
        block = piece_of(call.values, is_wide(call))
        return cls(block_f, block, -(-call.values // block))


def arguments_of(
    call: LinearCall, layout: Layout, tile: LinearTile, columns: int, blocks: Blocks, kind: type, **states: State
) -> dict[str, Any]:
    """Returns the arguments that all kernels take: sizes, strides of a ``kind``, and compile-time choices."""
    strides = {name: state_strides(state) for name, state in states.items()}
    vec = int(all(state is None or strides[name].e == 1 for name, state in states.items()))
    known = layout.vec > 1  # where rows may lie at any address, the kernel knows no other address either
    if vec and known and all(n % _STATE_VEC == 0 for each in strides.values() for n in each[:3]):
        vec = _STATE_VEC
    divisor = max(vec, 1)
    theta, encoding = call.inputs.theta, call.options.kind
    frequencies = 1 if theta is None else theta.shape[-1]
    return {
        "strides": kind(
            *layout.strides,
            *(each._replace(s=each.s // divisor, h=each.h // divisor, f=each.f // divisor) for each in strides.values()),
        ),
        "sizes": sizes_of(call, columns),
        # Without encoding rows are loaded as for ``cosine``.
        "spec": RowSpec(
            "cosine" if encoding == "none" else encoding, 1, layout.vec, 1, layout.unit, call.features, frequencies
        ),
        "config": LinearConfig(
            encoding, call.options.activation, call.decay, call.options.causal, call.values, tile.tokens, *blocks, vec
        ),
        "num_warps": tile.warps,
        "num_stages": tile.stages,
        # An entry of a batch may be at an address that says less than the batch's. Where distances do not tell,
        # nothing may be known of either: rows would be added up in another order.
        "unaligned": ("decay",) if vec == _STATE_VEC else ("decay", *states),
    }  # fmt: skip


# ----------------------------------------------------------------------------------------------------------
# Launches
# ----------------------------------------------------------------------------------------------------------


def plan_scan(call: LinearCall, initial: State, final: Buffer | None, reverse: bool) -> Launch:
    """Plans the scan that hands states over from chunk to chunk."""
    sequences, heads, features, values = call.state_shape
    blocks = -(-features * values // _SCAN_BLOCK)
    scale = call.state_scale if reverse else 1.0
    return Launch(
        scan_kernel,
        sequences * heads * blocks,
        takes=("states", "totals", "initial", "final", "cu_seqlens"),
        sizes=sizes_of(call, blocks),
        initial_strides=state_strides(initial),
        final_strides=state_strides(final),
        into=1.0 / scale, out_of=scale, F=features, E=values, BLOCK=_SCAN_BLOCK, AHEAD=_SCAN_AHEAD, REVERSE=reverse,
    )  # fmt: skip


def plan_sums(call: LinearCall, b: Tensor, c: Tensor, states: Buffer, reverse: bool) -> Launch:
    """Plans the sums of chunks, of rows to be encoded and others."""
    tile = tile_of("sums", call.half, call.parts * call.features, call.values, call.inputs.q.shape[1])
    columns = -(-call.values // tile.columns)
    layout = layout_of_entries(Strides, b, c)
    return Launch(
        sums_kernel,
        call.slots * call.heads * columns,
        takes=("b", "c", "states", "totals", *PLACES),
        REVERSE=reverse,
        **arguments_of(call, layout, tile, columns, Blocks.of_values(call, tile), SumsStrides, states=states),
    )


class ProductRows(NamedTuple):
    """Rows that a product goes over: see `triton.product`."""

    a: Tensor
    b: Tensor
    c: Tensor
    x: Tensor | None
    out: Tensor  # without memory


def plan_product(
    call: LinearCall, rows: ProductRows, initial: State, final: Buffer | None, *, decoded: bool, reverse: bool
) -> Launch:
    """Plans a product. ``decoded``: whether the result is the gradient of what is encoded."""
    tokens = int(call.inputs.q.shape[1])
    if decoded:
        tile = tile_of("wide" if is_wide(call) else "decoded", call.half, call.values, call.features, tokens)
        block_f = tile.columns
        if call.options.activation == "softmax":  # whose gradient takes whole rows
            block_f = in_power_of_two(call.features)
        columns, blocks = -(-call.features // block_f), Blocks.of_features(call, block_f)
    else:
        tile = tile_of("outputs", call.half, call.parts * call.features, call.values, tokens)
        columns, blocks = -(-call.values // tile.columns), Blocks.of_values(call, tile)
    layout = layout_of_entries(Strides, rows.a, rows.b, rows.c, rows.a if rows.x is None else rows.x, rows.out)
    numbers = call.parts * blocks.pieces * blocks.f * blocks.e
    loaded = not call.options.causal and not is_held(numbers, call.half, shared_memory(rows.a.device))
    return Launch(
        product_kernel,
        call.slots * call.heads * columns,
        takes=("a", "b", "c", "x", "out", "initial", "final", "partial", *PLACES),
        scales=scales_of(call, initial, reverse),
        product=ProductConfig(decoded, reverse, loaded),
        **arguments_of(call, layout, tile, columns, blocks, ProductStrides, initial=initial, final=final),
    )


def plan_step(call: LinearCall, out: Tensor, initial: Tensor | None, final: Buffer | None) -> Launch:
    """Plans a step of decoding."""
    q, k, v, *_ = call.inputs
    layout = layout_of_entries(Strides, q, k, v, out)
    block = in_power_of_two(call.features)
    tile = step_tile(call.parts * block, call.values)
    columns = -(-call.values // tile.columns)
    return Launch(
        step_kernel,
        call.slots * call.heads * columns,
        takes=("q", "k", "v", "out", "initial", "final", *PLACES),
        scale=call.options.scale,
        **arguments_of(
            call, layout, tile, columns, Blocks(block, tile.columns, 1), StepStrides, initial=initial, final=final
        ),
    )


class DecayGradient(NamedTuple):
    """Plan of the gradient of decays."""

    out: Buffer
    launch: Launch
    by_head: bool

    @classmethod
    def of(cls, call: LinearCall, grad: Tensor, states: Buffer) -> DecayGradient:
        """Plans the gradient of decays, for chunks of `DECAY_CHUNK` tokens."""
        q, k, v, *_ = call.inputs
        by_head = call.decay == "head"
        shape = (call.slots, call.heads) if by_head else tuple(q.shape[:3])
        tile = tile_of("decays", call.half, call.parts * call.features, call.values, DECAY_CHUNK)
        layout = layout_of_entries(Strides, q, k, v, grad)
        launch = Launch(
            decay_kernel,
            call.slots * call.heads,
            takes=("q", "k", "v", "grad", "states", "grad_states", "out", *PLACES),
            scale=call.options.scale,
            BY_HEAD=by_head,
            **arguments_of(call, layout, tile, 1, Blocks.of_values(call, tile), DecayStrides, states=states),
        )
        return cls(Buffer.rows(shape, torch.float32), launch, by_head)
