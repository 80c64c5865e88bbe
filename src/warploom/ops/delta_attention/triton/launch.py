"""Launches of the Triton kernels: tiles, strides, and what they write between each other."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from warploom.device.rows import StateStrides, Strides
from warploom.ops.delta_attention.call import DeltaCall
from warploom.ops.delta_attention.configs import DeltaTile, in_power_of_two, tile_of
from warploom.ops.delta_attention.triton.chunks import ChunkStrides, chunk_kernel
from warploom.ops.delta_attention.triton.encoding import EncodingStrides, decode_kernel, encode_kernel
from warploom.ops.delta_attention.triton.gradients import (
    DeltaFeatureStrides,
    DeltaPairStrides,
    feature_kernel,
    pair_kernel,
)
from warploom.ops.delta_attention.triton.scan import ScanStrides, reverse_scan_kernel, scan_kernel
from warploom.ops.delta_attention.triton.step import DeltaStepStrides, step_kernel
from warploom.ops.delta_attention.triton.tiles import DeltaConfig, DeltaSizes
from warploom.runtime.launch import Buffer, Launch
from warploom.runtime.layout import Layout, layout_of_entries

Tensor = torch.Tensor
State = Tensor | Buffer | None


class ChunkBuffers(NamedTuple):
    """Buffers (slots, H, …) of what chunks hold, in the order of `chunk_kernel`, or the tensors of a call."""

    from_start: Any
    until_end: Any
    scores: Any
    corrected: Any
    predicted: Any
    kept: Any  # None without decays
    inverse: Any  # for the backward alone, as the next
    decayed: Any

    @classmethod
    def of(cls, call: DeltaCall, backward: bool) -> ChunkBuffers:
        """Returns the buffers of a call."""
        dtype, t, d, e = call.inputs.q.dtype, call.chunk, in_power_of_two(call.features), wide_values(call)

        def rows(*shape: int, dtype: torch.dtype = dtype) -> Buffer:
            return Buffer.rows((call.slots, call.heads, *shape), dtype)

        return cls(
            rows(t, d), rows(t, d), rows(t, t), rows(t, e), rows(t, d),
            None if call.decay == "none" else rows(d if call.decay == "feature" else 1, dtype=torch.float32),
            rows(2 * t, t) if backward else None, rows(t, d) if backward else None,
        )  # fmt: skip

    def empty(self, near: Tensor) -> ChunkBuffers:
        """Returns tensors of these buffers."""
        return ChunkBuffers(*(None if buffer is None else buffer.empty(near) for buffer in self))


def wide_values(call: DeltaCall) -> int:
    """Returns the features of a value in buffers: whole blocks of every kernel."""
    return in_power_of_two(call.values) if call.values <= 64 else -(-call.values // 64) * 64


def columns_of(call: DeltaCall, kernel: str, tile: DeltaTile) -> int:
    """Returns the blocks of features that a kernel's programs divide among them."""
    if kernel == "feature":
        return -(-call.features // tile.features)
    return -(-call.values // tile.columns) if kernel in ("scan", "step") else 1


def parts_of(call: DeltaCall) -> int:
    """Returns the sums that the gradient of a head's decay comes in: of pairs, and of blocks of features."""
    return 1 + columns_of(call, "feature", tile_of("feature", call.decay, call.half, call.features, call.values))


def work_dtype(call: DeltaCall) -> torch.dtype:
    """Returns the dtype of states and corrected values between launches: float16 does not hold all of them."""
    dtype = call.inputs.q.dtype
    return dtype if dtype == torch.bfloat16 else torch.float32


def state_strides(state: State) -> StateStrides:
    """Returns the strides of a state, if there is one."""
    if state is None:
        return StateStrides(0, 0, 0, 0)
    return StateStrides(*(state.stride() if isinstance(state, Tensor) else state.stride))


def arguments_of(
    call: DeltaCall, layout: Layout, kernel: str, *, encoding: bool = False, heads: int | None = None
) -> tuple[DeltaTile, dict[str, Any]]:
    """Returns the tile of a kernel, and what it is given by name: sizes, and what it is compiled for.

    Args:
        call: The call.
        layout: Of its rows.
        kernel: Name of the tile.
        encoding: Whether the kernel encodes queries and keys.
        heads: Of those whose rows are taken; those of values by default.
    """
    q, _, _, beta, decay, theta, _, offsets, cu_seqlens = call.inputs
    tile = tile_of(kernel, call.decay, call.half, call.features, call.values)
    given = (0, 0, 0) if decay is None else decay.stride()[:3]
    sizes = DeltaSizes(
        tokens=q.shape[1], heads=call.heads if heads is None else heads, group=call.group, chunks=call.chunks,
        chunk=call.chunk, columns=columns_of(call, kernel, tile), sequences=call.sequences, scale=call.options.scale,
        cu_stride=0 if cu_seqlens is None else cu_seqlens.stride(0),
        theta_h=0 if theta is None or theta.dim() == 1 or theta.shape[0] == 1 else theta.stride(0),
        theta_f=0 if theta is None else theta.stride(-1),
        offsets_b=0 if offsets is None or offsets.dim() == 0 else offsets.stride(0),
        beta_b=beta.stride(0), beta_n=beta.stride(1), beta_h=beta.stride(2),
        decay_b=given[0], decay_n=given[1], decay_h=given[2],
        decay_f=decay.stride(3) if decay is not None and decay.dim() == 4 else 0,
    )  # fmt: skip
    kind, normalize = (call.options.kind, call.options.normalize) if encoding else ("none", False)
    config = DeltaConfig(
        KIND=kind, NORMALIZE=normalize, DECAY=call.decay, D=call.features, E=call.values,
        F=theta.shape[-1] if theta is not None and kind != "none" else 0, VEC=layout.vec, UNIT=layout.unit,
        BLOCK_T=call.chunk, LEVELS=call.chunk.bit_length() - 1, BLOCK_D=tile.features, BLOCK_E=tile.columns,
        WIDE_D=in_power_of_two(call.features), WIDE=wide_values(call), PARTS=parts_of(call),
    )  # fmt: skip
    options = {"num_warps": tile.warps, "num_stages": tile.stages, "registers": tile.registers}
    return tile, {"sizes": sizes, "config": config, **options}


_GATES = ("beta", "decay")
_PLACES = ("theta", "offsets", "cu_seqlens")


def plan_chunks(call: DeltaCall, q: Tensor, k: Tensor, encoding: bool) -> Launch:
    """Plans what chunks hold. ``encoding``: whether ``q`` and ``k`` are to be encoded."""
    layout = layout_of_entries(Strides, q, k, call.inputs.v)
    _, rest = arguments_of(call, layout, "chunk", encoding=encoding)
    return Launch(
        chunk_kernel,
        call.slots * call.heads,
        takes=("q", "k", "v", *_GATES, *_PLACES, *ChunkBuffers._fields, "offset"),
        strides=ChunkStrides(*layout.strides),
        unaligned=(*_GATES, *layout.at_any_address("q", "k", "v")),
        **rest,
    )


def plan_scan(call: DeltaCall, out: Tensor | None, initial: State, final: State) -> Launch:
    """Plans the scan over chunks; without ``out`` one that stores states and updates for the backward."""
    layout = layout_of_entries(Strides, call.inputs.v if out is None else out)
    tile, rest = arguments_of(call, layout, "scan")
    return Launch(
        scan_kernel,
        call.sequences * call.heads * columns_of(call, "scan", tile),
        takes=(
            *("from_start", "until_end", "scores", "corrected", "predicted", "kept", "initial", "out", "final"),
            *("states", "updates", "cu_seqlens"),
        ),
        strides=ScanStrides(layout.strides[0], state_strides(initial), state_strides(final)),
        unaligned=("initial",),
        **rest,
    )


def plan_reverse_scan(call: DeltaCall, grad: Tensor, last: State, first: State) -> Launch:
    """Plans the scan back over chunks."""
    layout = layout_of_entries(Strides, grad)
    tile, rest = arguments_of(call, layout, "scan")
    return Launch(
        reverse_scan_kernel,
        call.sequences * call.heads * columns_of(call, "scan", tile),
        takes=(
            *("from_start", "until_end", "scores", "predicted", "kept", "grad", "last", "first"),
            *("grad_states", "grad_updates", "cu_seqlens"),
        ),
        strides=ScanStrides(layout.strides[0], state_strides(first), state_strides(last)),
        unaligned=("last", *layout.at_any_address("grad")),
        **rest,
    )


def plan_pairs(call: DeltaCall, grad: Tensor, dv: Tensor) -> Launch:
    """Plans the gradients of values, β and pairs of tokens."""
    layout = layout_of_entries(Strides, call.inputs.v, grad, dv)
    _, rest = arguments_of(call, layout, "pair")
    return Launch(
        pair_kernel,
        call.slots * call.heads,
        takes=(
            *("v", *_GATES, "cu_seqlens", "grad", "scores", "inverse", "decayed", "states", "updates"),
            *("grad_updates", "corrections", "pairs", "dv", "dbeta", "ddecay"),
        ),
        strides=DeltaPairStrides(*layout.strides),
        unaligned=(*_GATES, *layout.at_any_address("v", "grad")),
        **rest,
    )


def plan_features(call: DeltaCall, q: Tensor, k: Tensor, grad: Tensor, outs: tuple[Tensor, ...]) -> Launch:
    """Plans the gradients ``outs``, without memory, of encoded rows ``q`` and ``k``, and those of decays."""
    layout = layout_of_entries(Strides, q, k, grad, *outs)
    tile, rest = arguments_of(call, layout, "feature")
    return Launch(
        feature_kernel,
        call.slots * call.heads * columns_of(call, "feature", tile),
        takes=(
            *("q", "k", "decay", "cu_seqlens", "grad", "states", "updates", "grad_states", "corrections"),
            *("pairs", "dq", "dk", "ddecay"),
        ),
        strides=DeltaFeatureStrides(*layout.strides),
        unaligned=("decay", *layout.at_any_address("q", "k", "grad")),
        **rest,
    )


def plan_encode(call: DeltaCall, x: Tensor, encoded: Tensor) -> Launch:
    """Plans the encoding of queries or keys."""
    layout = layout_of_entries(Strides, x, encoded)
    heads = x.shape[2]
    _, rest = arguments_of(call, layout, "encoding", encoding=True, heads=heads)
    return Launch(
        encode_kernel,
        call.slots * heads,
        takes=("x", "encoded", *_PLACES, "offset"),
        unaligned=layout.at_any_address("x"),
        strides=EncodingStrides(layout.strides[0], layout.strides[1], layout.strides[0]),
        **rest,
    )


def plan_decode(call: DeltaCall, x: Tensor, encoded: Tensor, grads: Tensor, dx: Tensor) -> Launch:
    """Plans the gradients of queries or keys, rotated as they are, from those of each head, or of each one of values."""
    layout = layout_of_entries(Strides, x, encoded, grads, dx)
    heads = x.shape[2]
    _, rest = arguments_of(call, layout, "encoding", encoding=True, heads=heads)
    rest["sizes"] = rest["sizes"]._replace(group=grads.shape[2] // heads)
    return Launch(
        decode_kernel,
        call.slots * heads,
        takes=("x", "encoded", "grads", "dx", "cu_seqlens"),
        unaligned=layout.at_any_address("x"),
        strides=EncodingStrides(*layout.strides[:3]),
        dx_strides=layout.strides[3],
        **rest,
    )


def plan_step(call: DeltaCall, out: Tensor, initial: State, final: State) -> Launch:
    """Plans a step of decoding, of the tokens of one chunk."""
    q, k, v, *_ = call.inputs
    layout = layout_of_entries(Strides, q, k, v, out)
    tile, rest = arguments_of(call, layout, "step", encoding=True)
    rest["config"] = rest["config"]._replace(BLOCK_T=1)
    return Launch(
        step_kernel,
        call.slots * call.heads * columns_of(call, "step", tile),
        takes=("q", "k", "v", "out", "initial", "final", *_GATES, "theta", "offsets", "offset"),
        strides=DeltaStepStrides(*(*layout.strides, state_strides(initial), state_strides(final))),
        unaligned=(*_GATES, "initial", *layout.at_any_address("q", "k", "v")),
        **rest,
    )
