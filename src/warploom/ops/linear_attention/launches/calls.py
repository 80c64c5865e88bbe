"""A call of linear attention apart from what tensors hold: sizes, strides, and how it is cut into chunks."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

from warploom.device.rows import Strides
from warploom.ops.linear_attention.configs import (
    DECAY_CHUNK,
    WIDE_PIECE,
    Tile,
    chunk_of,
    piece_of,
)
from warploom.ops.linear_attention.kernels.tiles import Sizes, StateStrides, Variant
from warploom.ops.linear_attention.problem import Inputs, Options
from warploom.ops.lrpe.kernels.angles import RowSpec
from warploom.runtime.build import ALIGNMENT
from warploom.runtime.launch import Dense, architecture, multiprocessors
from warploom.runtime.layout import Layout, layout_for

Tensor = torch.Tensor
State = Tensor | Dense | None

_STATE_VEC = 4
"""By which strides of states are divided where they can be: 16 bytes of float32."""


PLACES = ("theta", "offsets", "cu_seqlens", "decay", "offset")


class Call(NamedTuple):
    """A call apart from what tensors hold: sizes, and how sequences are cut into chunks."""

    inputs: Inputs
    options: Options
    chunk: int

    @classmethod
    def of(cls, inputs: Inputs, options: Options, decay_gradient: bool = False, summed: bool = False) -> Call:
        """The call on these tensors, of whose chunks the sums may be wanted in any case."""
        tokens, heads, values = inputs.q.shape[1], inputs.q.shape[2], inputs.v.shape[3]
        chunk = chunk_of(tokens, heads, values, multiprocessors(inputs.q.device), summed)
        return cls(inputs, options, DECAY_CHUNK if decay_gradient else chunk)

    @property
    def features(self) -> int:
        """Of a part of φ."""
        features = int(self.inputs.q.shape[3])
        return features if self.options.kind in ("none", "cosine") else features // 2

    @property
    def parts(self) -> int:
        """Of φ."""
        return 1 if self.options.kind == "none" else 2

    @property
    def sequences(self) -> int:
        """Packed sequences, or batch entries."""
        cu_seqlens = self.inputs.cu_seqlens
        return int(self.inputs.q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1)

    @property
    def chunks(self) -> int:
        """Of a batch entry."""
        return max(-(-int(self.inputs.q.shape[1]) // self.chunk), 1)

    @property
    def slots(self) -> int:
        """Chunks of all sequences; see `warploom.device.packed`."""
        if self.inputs.cu_seqlens is None:
            return self.sequences * self.chunks
        return self.sequences if self.chunks == 1 else int(self.inputs.q.shape[1]) // self.chunk + self.sequences

    @property
    def most_slots(self) -> int:
        """No less than `slots`, for any number of tokens."""
        _, heads, _, values = self.state_shape
        return self.sequences * max(multiprocessors(self.inputs.q.device) // max(heads * -(-values // 128), 1), 1)

    @property
    def state_shape(self) -> tuple[int, int, int, int]:
        """Of a state of every sequence."""
        heads, values = self.inputs.q.shape[2], self.inputs.v.shape[3]
        return (self.sequences, heads, self.parts * self.features, values)

    @property
    def half(self) -> bool:
        """Whether numbers have 16 bits."""
        return self.inputs.q.dtype != torch.float32

    @property
    def wide(self) -> bool:
        """Whether gradients of encoded rows are made with pieces of `WIDE_PIECE`."""
        fits = self.inputs.v.shape[3] <= WIDE_PIECE
        return bool(self.half and fits and architecture(self.inputs.q.device) >= 90)

    @property
    def state_scale(self) -> float:
        """What gradients of states are kept over; without tokens or causality they are kept as they are."""
        return self.options.scale if self.options.causal and self.inputs.q.shape[1] else 1.0

    def sizes(self, columns: int) -> Sizes:
        """Sizes of a launch of so many blocks of columns."""
        q, theta, decay, cu_seqlens = self.inputs.q, self.inputs.theta, self.inputs.decay, self.inputs.cu_seqlens
        offsets = self.inputs.offsets
        return Sizes(
            tokens=q.shape[1], heads=q.shape[2], chunks=self.chunks,
            chunk=self.chunk if self.chunks > 1 else 2**30, columns=columns, sequences=self.sequences,
            cu_stride=0 if cu_seqlens is None else cu_seqlens.stride(0),
            theta_h=0 if theta is None or theta.dim() == 1 or theta.shape[0] == 1 else theta.stride(0),
            theta_f=0 if theta is None else theta.stride(-1),
            offsets_b=0 if offsets is None or offsets.dim() == 0 else offsets.stride(0),
            decay_b=0 if decay is None or decay.dim() == 1 else decay.stride(0),
            decay_n=0 if decay is None or decay.dim() == 1 else decay.stride(1),
            decay_h=0 if decay is None else decay.stride(-1),
        )  # fmt: skip

    def spec(self, layout: Layout) -> RowSpec:
        """What LRPE's functions for rows are compiled for. Without encoding rows are loaded as for ``cosine``."""
        theta, kind = self.inputs.theta, self.options.kind
        frequencies = 1 if theta is None else theta.shape[-1]
        return RowSpec(
            "cosine" if kind == "none" else kind, 1, layout.vec, 1, layout.unit, self.features, frequencies
        )

    def variant(self, tile: Tile, block_f: int, block_e: int, pieces: int, state_vec: int) -> Variant:
        """What a kernel is compiled for."""
        decay = self.inputs.decay
        kind = "none" if decay is None else "head" if decay.dim() == 1 else "token"
        options = self.options
        return Variant(
            options.kind, options.activation, kind, options.causal, self.inputs.v.shape[3], tile.tokens, block_f,
            block_e, pieces, state_vec,
        )  # fmt: skip

    def on_values(self, layout: Layout, tile: Tile, columns: int, **states: State) -> dict[str, Any]:
        """What kernels are launched with whose states have all features of φ in pieces, and some of a value's."""
        block = piece_of(self.features)
        return self.common(layout, tile, columns, block, tile.columns, -(-self.features // block), **states)

    def on_features(
        self, layout: Layout, tile: Tile, columns: int, block_f: int, **states: State
    ) -> dict[str, Any]:
        """And those whose states have all features of a value in pieces, and some of each part of φ."""
        values = self.inputs.v.shape[3]
        block = piece_of(values, self.wide)
        return self.common(layout, tile, columns, block_f, block, -(-values // block), **states)

    def common(
        self, layout: Layout, tile: Tile, columns: int, block_f: int, block_e: int, pieces: int,
        **states: State,
    ) -> dict[str, Any]:  # fmt: skip
        """What both take."""
        strides = {f"{name}_strides": state_strides(state) for name, state in states.items()}
        vec = int(all(state is None or strides[f"{name}_strides"].e == 1 for name, state in states.items()))
        known = layout.vec > 1  # where rows may lie at any address, the kernel knows no other address either
        if vec and known and all(n % _STATE_VEC == 0 for each in strides.values() for n in each[:3]):
            vec = _STATE_VEC
        divisor = max(vec, 1)
        # An entry of a batch may be at an address that says less than the batch's. Where distances do not tell,
        # nothing may be known of either: rows would be added up in another order.
        unaligned = ("decay",) if vec == _STATE_VEC else ("decay", *states)
        return {
            **{
                name: each._replace(s=each.s // divisor, h=each.h // divisor, f=each.f // divisor)
                for name, each in strides.items()
            },
            "sizes": self.sizes(columns),
            "spec": self.spec(layout),
            "variant": self.variant(tile, block_f, block_e, pieces, vec),
            "num_warps": tile.warps,
            "num_stages": tile.stages,
            "unaligned": unaligned,
        }


def layout_of_rows(*tensors: Tensor) -> Layout:
    """Strides as the kernels take them, and what is known of addresses, which is the same of each entry of a batch.

    The compiler picks layouts by it, and with them the order in which features are added up. So it knows nothing
    where entries lie at other distances than multiples of 16 bytes, also where there is one entry.
    """
    layout = layout_for(Strides, *tensors)
    vec = math.gcd(layout.vec, *(x.stride(0) for x in tensors))
    if any(x.stride(0) * x.element_size() % ALIGNMENT for x in tensors):
        vec = 1
    more = layout.vec // vec
    strides = [each._replace(b=each.b * more, n=each.n * more, h=each.h * more) for each in layout.strides]
    return layout._replace(vec=vec, strides=strides)


def state_strides(state: State) -> StateStrides:
    """Strides of a state, if there is one."""
    if state is None:
        return StateStrides(0, 0, 0, 0)
    return StateStrides(*(state.stride() if isinstance(state, Tensor) else state.stride))
