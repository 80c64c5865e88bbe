"""The ways in which flash attention runs on kernels, each a callable with its own launches and buffers.

`choose` says which a call takes. A forward's variant writes the output, lse and statistics that it is given. A
backward's writes the gradients, and returns δ = rowsum(dO ⊙ O) − dlse.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import torch

from warploom.ops.flash_attention.hopper.launch_varlen import CacheUnits, Copy, Spread
from warploom.ops.flash_attention.problem import LOG2_E, Masking, MaskSpec
from warploom.ops.flash_attention.triton.launch import Terms
from warploom.runtime.launch import Buffer, Launch

Tensor = torch.Tensor
Tensors: TypeAlias = tuple[Tensor, ...]
Gradients: TypeAlias = tuple[Tensor, Tensor, Tensor]
"""Gradients of q, k and v."""

Tangents: TypeAlias = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]
"""Tangents of q, k, v and the sink, each None for zero."""

COUNTERS = Buffer.rows((2,), torch.int32)
"""Counters of the tiles that programs take on Hopper: two for kernels of the backward, the first for a forward."""


# ----------------------------------------------------------------------------------------------------------
# Forward
# ----------------------------------------------------------------------------------------------------------


class ForwardInputs(NamedTuple):
    """Tensors of a forward."""

    q: Tensor  # (B, N, Hq, D)
    k: Tensor  # (B, M, Hkv, D)
    v: Tensor  # (B, M, Hkv, E)
    mask: MaskSpec
    sink: Tensor | None
    counters: Tensor | None  # `COUNTERS` that are zero, if there are any already


class NothingForward(NamedTuple):
    """Nothing attends, or is attended to: the output is 0, and lse is the sink, or −inf."""

    def __call__(self, inputs: ForwardInputs, out: Tensor, lse: Tensor, statistics: Tensor) -> None:
        q, sink, cu_seqlens = inputs.q, inputs.sink, inputs.mask.cu_seqlens_q
        out.zero_()
        if sink is None:
            lse.fill_(-torch.inf)
            statistics.zero_()
            return
        lse.copy_(sink[:, None])
        statistics[0], statistics[1] = lse * LOG2_E, 1.0
        if cu_seqlens is not None:
            tail = torch.arange(q.shape[1], device=q.device) >= cu_seqlens[-1]
            lse.masked_fill_(tail, -torch.inf)
            statistics[1].masked_fill_(tail, 0.0)


class TritonForward(NamedTuple):
    """The kernel in Triton, for every GPU and call."""

    launch: Launch

    def __call__(self, inputs: ForwardInputs, out: Tensor, lse: Tensor | None, statistics: Tensor) -> None:
        q, k, v, mask, sink, _ = inputs
        self.launch(
            q, k, v, out, lse, statistics, sink,
            mask.cu_seqlens_q, mask.cu_seqlens_k, mask.seqused_k, mask.block_table,
        )  # fmt: skip

    def write_parts(self, inputs: ForwardInputs, part: Tensor, lse: Tensor, statistics: Tensor) -> None:
        """Launch on buffers of the parts of a split KV loop."""
        self(inputs._replace(sink=None), part, None, statistics)


class HopperForward(NamedTuple):
    """The kernel in Gluon, for Hopper."""

    launch: Launch
    counted: bool  # whether programs take tiles from a counter, which must be zero

    def __call__(self, inputs: ForwardInputs, out: Tensor, lse: Tensor, statistics: Tensor) -> None:
        q, k, v, mask, sink, counters = inputs
        if counters is None:
            counters = COUNTERS.empty(q)
            if self.counted:
                counters.zero_()
        packed = None if mask.shifts is None else out
        self.launch(
            q, k, v, out, lse, statistics, counters, mask.seqused_k, None, mask.units_q, mask.shifts, packed, sink
        )

    def write_parts(self, inputs: ForwardInputs, part: Tensor, lse: Tensor, statistics: Tensor) -> None:
        """Launch on buffers of the parts of a split KV loop."""
        self(inputs._replace(sink=None), part, lse, statistics)


class VarlenForward(NamedTuple):
    """The kernel for Hopper on packed sequences."""

    inner: HopperForward
    spread: Spread  # where rows would be if they were spread

    def __call__(self, inputs: ForwardInputs, out: Tensor, lse: Tensor, statistics: Tensor) -> None:
        places = self.spread.places(inputs.mask, out)
        self.inner(inputs._replace(mask=self.spread.packed_mask(places)), out, lse, statistics)


class SplitForward(NamedTuple):
    """A kernel whose KV loops are split, and what merges their parts."""

    inner: TritonForward | HopperForward | HopperMaskedForward
    combine: Launch
    part: Buffer  # outputs of all parts, in one
    part_statistics: Buffer

    def __call__(
        self, inputs: ForwardInputs, out: Tensor, lse: Tensor, statistics: Tensor, *masking: Masking
    ) -> None:
        part, part_statistics = self.part.empty(out), self.part_statistics.empty(out)
        self.inner.write_parts(inputs, part, lse, part_statistics, *masking)
        bounds = None if inputs.sink is None else inputs.mask.cu_seqlens_q
        self.combine(part, part_statistics, out, lse, statistics, inputs.sink, bounds)


class TermsForward(NamedTuple):
    """A Triton kernel on terms of float32 tensors, which another makes before."""

    terms: Terms
    inner: TritonForward | SplitForward

    def __call__(self, inputs: ForwardInputs, out: Tensor, lse: Tensor, statistics: Tensor) -> None:
        q, k, v = self.terms(inputs.q, inputs.k, inputs.v, None, into=self.terms.empty(out))
        self.inner(inputs._replace(q=q, k=k, v=v), out, lse, statistics)


class MaskedForward(NamedTuple):
    """The Triton kernel for masks by tiles, biases and slopes."""

    launch: Launch

    def __call__(
        self, inputs: ForwardInputs, out: Tensor, lse: Tensor, statistics: Tensor, masking: Masking
    ) -> None:
        q, k, v, mask, sink, _ = inputs
        self.launch(q, k, v, out, lse, statistics, sink, mask.seqused_k, *masking.rows)


class JvpForward(NamedTuple):
    """The Triton kernel for forward mode: attention and lse, with their tangents."""

    launch: Launch

    def __call__(self, inputs: ForwardInputs, tangents: Tangents, results: Tensors) -> None:
        q, k, v, mask, sink, _ = inputs
        dq, dk, dv, dsink = tangents
        out, lse, dout, dlse = results
        bounds = mask.cu_seqlens_q, mask.cu_seqlens_k, mask.seqused_k
        self.launch(q, k, v, dq, dk, dv, out, lse, dout, dlse, sink, dsink, *bounds)


class NothingJvp(NamedTuple):
    """Nothing attends, or is attended to: the tangent of the output is 0, and that of lse is the sink's."""

    def __call__(self, inputs: ForwardInputs, tangents: Tangents, results: Tensors) -> None:
        out, lse, dout, dlse = results
        NothingForward()(inputs, out, lse, lse.new_empty((2, *lse.shape)))
        dout.zero_(), dlse.zero_()
        if tangents[3] is not None:
            dlse.copy_(tangents[3][:, None]).masked_fill_(lse == -torch.inf, 0.0)


class SeenKeys(NamedTuple):
    """The launch that finds keys which a bias hides from all queries, of those that are not finite."""

    launch: Launch
    words: Buffer

    def __call__(self, k: Tensor, v: Tensor, bias: Tensor | None) -> Tensor:
        words = self.words.empty(k)
        self.launch(k, v, bias, words)
        return words


class HopperMaskedForward(NamedTuple):
    """The kernel for Hopper on masks by tiles, with slopes, or with a bias."""

    launch: Launch
    counted: bool  # whether programs take tiles from a counter, which must be zero
    seen: SeenKeys | None  # with a bias

    def __call__(
        self, inputs: ForwardInputs, out: Tensor, lse: Tensor, statistics: Tensor, masking: Masking
    ) -> None:
        q, k, v, _, sink, _ = inputs
        counters = COUNTERS.empty(q)
        if self.counted:
            counters.zero_()
        seen = () if self.seen is None else (self.seen(k, v, masking.bias),)
        self.launch(q, k, v, out, lse, statistics, counters, sink, *masking.of_rows_alone, *seen)

    def write_parts(
        self, inputs: ForwardInputs, part: Tensor, lse: Tensor, statistics: Tensor, masking: Masking
    ) -> None:
        """Launch on buffers of the parts of a split KV loop."""
        self(inputs._replace(sink=None), part, lse, statistics, masking)


class DecodeForward(NamedTuple):
    """The Triton kernel for few queries."""

    launch: Launch

    def __call__(self, inputs: ForwardInputs, out: Tensor, lse: Tensor | None, statistics: Tensor) -> None:
        q, k, v, mask, sink, _ = inputs
        self.launch(
            q, k, v, out, lse, statistics, sink, mask.seqused_k, mask.block_table, mask.cu_seqlens_q
        )  # fmt: skip


class HopperLatentForward(NamedTuple):
    """The kernel for Hopper for few queries on a latent cache."""

    launch: Launch
    whole: Buffer | None  # where programs join chunks

    def __call__(self, inputs: ForwardInputs, out: Tensor, lse: Tensor | None, statistics: Tensor) -> None:
        q, k, _, mask, sink, _ = inputs
        whole = None if self.whole is None else self.whole.empty(out)
        self.launch(q, k, out, lse, statistics, whole, sink, mask.seqused_k, mask.block_table, mask.cu_seqlens_q)


class SplitDecodeForward(NamedTuple):
    """A kernel for few queries, on chunks of the keys, and what joins these."""

    inner: DecodeForward | HopperLatentForward
    combine: Launch
    part: Buffer  # outputs of all chunks, in one
    part_statistics: Buffer

    def __call__(self, inputs: ForwardInputs, out: Tensor, lse: Tensor, statistics: Tensor) -> None:
        part, part_statistics = self.part.empty(out), self.part_statistics.empty(out)
        self.inner(inputs._replace(sink=None), part, None, part_statistics)
        self.combine(part, part_statistics, out, lse, statistics, inputs.sink, inputs.mask.cu_seqlens_q)


class HopperCacheForward(NamedTuple):
    """The kernel for Hopper on packed queries and a cache, except for sequences of few queries."""

    units: CacheUnits
    launch: Launch

    def __call__(self, inputs: ForwardInputs, out: Tensor, lse: Tensor, statistics: Tensor) -> None:
        q, k, v, mask, sink, _ = inputs
        units, shifts, counts = self.units(mask, out)
        self.launch(
            q, k, v, out, lse, statistics, counts, None, mask.block_table, units, shifts, out, sink
        )  # fmt: skip


class PackedCacheForward(NamedTuple):
    """Two kernels on packed queries and a cache: one for prompts and chunks, one for few queries."""

    many: TritonForward | HopperCacheForward | DecodeForward
    few: DecodeForward | HopperLatentForward | SplitDecodeForward

    def __call__(self, inputs: ForwardInputs, out: Tensor, lse: Tensor, statistics: Tensor) -> None:
        self.many(inputs, out, lse, statistics)
        self.few(inputs, out, lse, statistics)


ForwardVariant: TypeAlias = (
    NothingForward
    | TritonForward
    | HopperForward
    | HopperCacheForward
    | VarlenForward
    | SplitForward
    | TermsForward
    | DecodeForward
    | HopperLatentForward
    | SplitDecodeForward
    | PackedCacheForward
)


# ----------------------------------------------------------------------------------------------------------
# Backward
# ----------------------------------------------------------------------------------------------------------


class BackwardInputs(NamedTuple):
    """Tensors of a backward; the output and statistics are those of the forward."""

    grad: Tensor  # of the output (B, N, Hq, E)
    grad_lse: Tensor | None  # (B, Hq, N), or None for zero
    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    statistics: Tensor
    mask: MaskSpec


class BackwardRows(NamedTuple):
    """Numbers of queries (B, Hq, N) that the kernels of a backward read, and their counters."""

    lse: Tensor
    delta: Tensor
    inverse: Tensor | None  # 1 / row_sum, of float32
    counters: Tensor | None


class NothingBackward(NamedTuple):
    """Nothing attends, or is attended to: all gradients are 0."""

    def __call__(self, inputs: BackwardInputs, gradients: Gradients) -> None:
        for gradient in gradients:
            gradient.zero_()


class Preprocess(NamedTuple):
    """The kernel that all others follow. It finds lse and δ of each query, and clears counters."""

    launch: Launch
    rows: Buffer  # a number for each query and head

    def __call__(
        self,
        inputs: BackwardInputs,
        inverse: Tensor | None = None,
        counters: Tensor | None = None,
        tiles_added: Tensor | None = None,
    ) -> BackwardRows:
        grad, grad_lse, out, statistics = inputs.grad, inputs.grad_lse, inputs.out, inputs.statistics
        # Two tensors, not two halves of one: the second half's alignment would depend on the length.
        lse, delta = self.rows.empty(out), self.rows.empty(out)
        self.launch(out, grad, statistics, grad_lse, lse, delta, inverse, counters, tiles_added)
        return BackwardRows(lse, delta, inverse, counters)


class SmallBackward(NamedTuple):
    """The Triton kernel for small problems, which forms all gradients."""

    preprocess: Preprocess
    launch: Launch

    def __call__(self, inputs: BackwardInputs, gradients: Gradients) -> Tensor:
        lse, delta, _, _ = self.preprocess(inputs)
        self.launch(inputs.q, inputs.k, inputs.v, inputs.grad, lse, delta, *gradients)
        return delta


class MaskedBackward(NamedTuple):
    """The Triton kernels for masks by tiles, biases and slopes."""

    preprocess: Preprocess
    has_inverse: bool  # whether weights are formed without a logarithm
    query: Launch
    key: Launch
    bias: Launch | None

    def __call__(
        self, inputs: BackwardInputs, gradients: Gradients, dbias: Tensor | None, masking: Masking
    ) -> Tensor:
        q, k, v, grad, used = inputs.q, inputs.k, inputs.v, inputs.grad, inputs.mask.seqused_k
        inverse = self.preprocess.rows.empty(q) if self.has_inverse else None
        numbers = self.preprocess(inputs, inverse)
        rows = q, k, v, grad, numbers.lse, numbers.delta, inverse
        dq, dk, dv = gradients
        self.query(*rows, dq, used, *masking.rows)
        self.key(*rows, dk, dv, used, *masking.columns)
        if self.bias is not None:
            self.bias(*rows, dbias, used, masking.tiles, masking.bits, masking.bias, masking.alibi)
        return numbers.delta


class BiasGradient(NamedTuple):
    """The gradient of a bias from the kernel for Hopper: in parts, which are summed, or at once.

    What no query sees by its place of a bias of keys is in no part, which are sums then.
    """

    parts: Buffer | None
    sums: Launch | None

    def begin(self, dbias: Tensor) -> Tensor | None:
        """Returns the memory that the kernel writes."""
        if self.parts is None:
            return dbias
        written = self.parts.empty(dbias)
        return written.zero_() if dbias.shape[2] == 1 else written

    def finish(
        self, written: Tensor | None, dbias: Tensor, inputs: BackwardInputs, rows: BackwardRows, masking: Masking
    ) -> None:
        """Sum the parts."""
        if self.sums is not None:
            self.sums(written, dbias)


class SeparateBiasGradient(NamedTuple):
    """The kernel in Triton for the gradient of a bias alone."""

    launch: Launch

    def begin(self, dbias: Tensor) -> Tensor | None:
        """Returns None: the kernel for Hopper writes nothing of it."""
        return None

    def finish(
        self, written: Tensor | None, dbias: Tensor, inputs: BackwardInputs, rows: BackwardRows, masking: Masking
    ) -> None:
        """Form the gradient."""
        q, k, v, grad, used = inputs.q, inputs.k, inputs.v, inputs.grad, inputs.mask.seqused_k
        factors = q, k, v, grad, rows.lse, rows.delta, rows.inverse
        self.launch(*factors, dbias, used, masking.tiles, masking.bits, masking.bias, masking.alibi)


class HopperMaskedBackward(NamedTuple):
    """The kernel for Hopper that forms all gradients with masks by tiles, slopes or a bias, and what rounds dq."""

    preprocess: Preprocess
    launch: Launch
    rounds: Launch
    added: Buffer  # dq, without the scale
    tiles_added: Buffer  # how many tiles of keys, at each tile of queries
    seen: SeenKeys | None  # with a bias
    bias: BiasGradient | SeparateBiasGradient | None

    def __call__(
        self, inputs: BackwardInputs, gradients: Gradients, dbias: Tensor | None, masking: Masking
    ) -> Tensor:
        q, k, v, (dq, dk, dv) = inputs.q, inputs.k, inputs.v, gradients
        counters, tiles_added, added = COUNTERS.empty(q), self.tiles_added.empty(q), self.added.empty(q)
        masks: tuple[Tensor | None, ...] = masking.of_columns_alone
        written = None if self.bias is None or dbias is None else self.bias.begin(dbias)
        if self.seen is not None:
            masks = masking.bias, self.seen(k, v, masking.bias), written
        rows = self.preprocess(inputs, None, counters, tiles_added)
        self.launch(q, k, v, inputs.grad, dk, dv, added, rows.lse, rows.delta, counters, tiles_added, *masks)
        self.rounds(added, tiles_added, dq)
        if self.bias is not None and dbias is not None:
            self.bias.finish(written, dbias, inputs, rows, masking)
        return rows.delta


class TritonGradient(NamedTuple):
    """The kernel in Triton for dk and dv, or for dq, for every GPU and call."""

    launch: Launch

    def __call__(self, factors: Tensors, targets: Tensors, rows: BackwardRows, mask: MaskSpec) -> None:
        bounds = mask.cu_seqlens_q, mask.cu_seqlens_k
        self.launch(*factors, rows.lse, rows.delta, rows.inverse, *targets, *bounds, mask.seqused_k)


class UsedKeysGradient(NamedTuple):
    """The kernel in Triton for dk and dv, which does not write those of keys that are not used."""

    inner: TritonGradient

    def __call__(self, factors: Tensors, targets: Tensors, rows: BackwardRows, mask: MaskSpec) -> None:
        for target in targets:
            target.zero_()
        self.inner(factors, targets, rows, mask)


class HopperGradient(NamedTuple):
    """The kernel in Gluon for dk and dv, or for dq, for Hopper."""

    launch: Launch
    keys: bool  # whether it is for dk and dv

    def __call__(self, factors: Tensors, targets: Tensors, rows: BackwardRows, mask: MaskSpec) -> None:
        units = mask.units_k if self.keys else mask.units_q
        self.launch(*factors, *targets, rows.lse, rows.delta, rows.counters, mask.seqused_k, units)


class HopperTermsGradient(NamedTuple):
    """The kernel in Gluon for dk and dv, or for dq, of float32 in terms, for Hopper."""

    launch: Launch

    def __call__(self, factors: Tensors, targets: Tensors, rows: BackwardRows, mask: MaskSpec) -> None:
        self.launch(*factors, *targets, *rows)


Gradient: TypeAlias = TritonGradient | UsedKeysGradient | HopperGradient | HopperTermsGradient


class AsGiven(NamedTuple):
    """Factors as they are given, where `Terms` would make terms of them."""

    def empty(self, near: Tensor) -> tuple[Tensor | None, ...]:
        """Allocate nothing."""
        return ()

    def __call__(self, *tensors: Tensor, into: tuple[Tensor | None, ...]) -> Tensors:
        return tensors


class SeparateBackward(NamedTuple):
    """Two kernels, one for dk and dv and one for dq, which starts where the first leaves multiprocessors idle.

    All memory is allocated before the first launch. With PyTorch's deterministic algorithms it is filled as it is
    allocated, by a launch. A kernel that does not wait for the launch before it must not follow such a one: its
    numbers may arrive first, and be filled over.
    """

    preprocess: Preprocess
    factors: Terms | AsGiven
    key: Gradient
    query: Gradient
    counted: bool  # whether programs of one of them take tiles from a counter

    def __call__(self, inputs: BackwardInputs, gradients: Gradients) -> Tensor:
        q = inputs.q
        inverse = self.preprocess.rows.empty(q) if q.dtype == torch.float32 else None
        counters = COUNTERS.empty(q) if self.counted else None
        terms = self.factors.empty(q)
        rows = self.preprocess(inputs, inverse, counters)
        factors = self.factors(q, inputs.k, inputs.v, inputs.grad, into=terms)
        self.run(factors, rows, inputs.mask, gradients)
        return rows.delta

    def run(self, factors: Tensors, rows: BackwardRows, mask: MaskSpec, gradients: Gradients) -> None:
        """Launch what follows the preprocess."""
        dq, dk, dv = gradients
        self.key(factors, (dk, dv), rows, mask)
        self.query(factors, (dq,), rows, mask)


class FusedBackward(NamedTuple):
    """The kernel for Hopper that forms all gradients, and what rounds dq, which it adds up in float32."""

    preprocess: Preprocess
    launch: Launch
    rounds: Launch
    added: Buffer  # dq, without the scale
    tiles_added: Buffer  # how many tiles of keys, at each tile of queries

    def __call__(self, inputs: BackwardInputs, gradients: Gradients) -> Tensor:
        q = inputs.q
        counters, tiles_added, added = COUNTERS.empty(q), self.tiles_added.empty(q), self.added.empty(q)
        rows = self.preprocess(inputs, None, counters, tiles_added)
        factors = q, inputs.k, inputs.v, inputs.grad
        self._launch(factors, rows, tiles_added, added, inputs.mask, gradients)
        return rows.delta

    def run(self, factors: Tensors, rows: BackwardRows, mask: MaskSpec, gradients: Gradients) -> None:
        """Launch what follows a preprocess of fewer rows."""
        tiles_added, added = self.tiles_added.empty(rows.lse).zero_(), self.added.empty(rows.lse)
        self._launch(factors, rows, tiles_added, added, mask, gradients)

    def _launch(
        self,
        factors: Tensors,
        rows: BackwardRows,
        tiles_added: Tensor,
        added: Tensor,
        mask: MaskSpec,
        gradients: Gradients,
    ) -> None:
        dq, dk, dv = gradients
        lse, delta, _, counters = rows
        self.launch(
            *factors, dk, dv, added, lse, delta, counters, tiles_added, mask.seqused_k, mask.units_k
        )  # fmt: skip
        self.rounds(added, tiles_added, dq)


class VarlenBackward(NamedTuple):
    """The kernels for Hopper on packed sequences, whose rows are copied to be spread."""

    preprocess: Preprocess
    spread: Spread
    inputs: tuple[Copy, ...]  # q, k, v and the gradient of the output
    rows: tuple[Copy, ...]  # lse and δ
    results: tuple[Copy, ...]  # dq, dk, dv
    inner: SeparateBackward | FusedBackward

    def __call__(self, inputs: BackwardInputs, gradients: Gradients) -> Tensor:
        q, counters = inputs.q, COUNTERS.empty(inputs.q)
        lse, delta, _, _ = self.preprocess(inputs, None, counters)
        places = self.spread.places(inputs.mask, lse)
        given = zip(self.inputs, (q, inputs.k, inputs.v, inputs.grad))
        factors = tuple([copy.spread_out(x, places) for copy, x in given])
        spread_lse, spread_delta = (copy.spread_out(x, places) for copy, x in zip(self.rows, (lse, delta)))
        rows = BackwardRows(spread_lse, spread_delta, None, counters)
        dq, dk, dv = (copy.spread.empty(q) for copy in self.results)
        self.inner.run(factors, rows, self.spread.mask(places), (dq, dk, dv))
        for copy, spread, gradient in zip(self.results, (dq, dk, dv), gradients):
            copy.pack(spread, gradient, places)
        return delta


class SplitBackward(NamedTuple):
    """Two kernels of which some loops are split, and what sums their parts."""

    inner: SeparateBackward
    parts: tuple[Buffer | None, ...]  # of dq, dk and dv, all of each in one, where loops are split
    sums: Launch

    def __call__(self, inputs: BackwardInputs, gradients: Gradients) -> Tensor:
        near = inputs.q
        dq, dk, dv = (x if part is None else part.empty(near) for part, x in zip(self.parts, gradients))
        delta = self.inner(inputs, (dq, dk, dv))
        sums: list[Tensor] = []
        for part, target, gradient in zip(self.parts, (dq, dk, dv), gradients):
            if part is not None:
                sums += target, gradient
        self.sums(*sums)
        return delta


class CopiedBackward(NamedTuple):
    """A backward whose gradients have no gaps, and are copied to where they shall be."""

    inner: BackwardVariant
    gradients: tuple[Buffer, Buffer, Buffer]

    def __call__(self, inputs: BackwardInputs, gradients: Gradients) -> Tensor | None:
        dq, dk, dv = (each.empty(inputs.q) for each in self.gradients)
        delta = self.inner(inputs, (dq, dk, dv))
        for gradient, x in zip(gradients, (dq, dk, dv)):
            gradient.copy_(x)
        return delta


BackwardVariant: TypeAlias = (
    NothingBackward
    | SmallBackward
    | SeparateBackward
    | FusedBackward
    | VarlenBackward
    | SplitBackward
    | CopiedBackward
)


class SinkGradient(NamedTuple):
    """The kernel for the gradient of sinks."""

    launch: Launch

    def __call__(self, sink: Tensor, inputs: BackwardInputs, delta: Tensor | None) -> Tensor:
        dsink = torch.empty_like(sink)
        self.launch(sink, inputs.statistics, delta, dsink)
        return dsink


class LoneSinkGradient(NamedTuple):
    """The gradient of sinks where there are no keys, and lse is the sink."""

    def __call__(self, sink: Tensor, inputs: BackwardInputs, delta: Tensor | None) -> Tensor:
        if inputs.grad_lse is None:
            return torch.zeros_like(sink)
        return inputs.grad_lse.masked_fill(inputs.statistics[1] == 0, 0.0).sum((0, 2)).to(sink.dtype)
