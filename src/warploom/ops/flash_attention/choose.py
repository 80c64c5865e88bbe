"""Chooses the kernels that a call of flash attention takes, and plans their launches.

`FORWARD` and `BACKWARD` are the operator's one decision table. They are tried from the first to the last: each
makes a variant of a call, or says why it does not. ``warploom list --explain`` prints what came of that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from warploom.device.rows import Strides
from warploom.ops.flash_attention import variants
from warploom.ops.flash_attention.hopper import launch as hopper
from warploom.ops.flash_attention.hopper import launch_varlen as varlen
from warploom.ops.flash_attention.problem import WIDEST, Call, Masking, Shape
from warploom.ops.flash_attention.triton import launch as tiling
from warploom.ops.flash_attention.triton import launch_decode as decode
from warploom.ops.flash_attention.triton import launch_jvp, launch_masked
from warploom.ops.flash_attention.triton import launch_small as small
from warploom.ops.flash_attention.triton.backward import (
    KeyParts,
    StatisticStrides,
    key_kernel,
    prepare_kernel,
    query_kernel,
    round_kernel,
    sink_kernel,
    sum_kernel,
)
from warploom.ops.flash_attention.triton.forward import Packing, combine_kernel, forward_kernel
from warploom.ops.flash_attention.triton.launch import TERMS
from warploom.ops.flash_attention.triton.tiles import PARTS_AHEAD, BackwardStrides, ForwardStrides, RowTiles
from warploom.ops.flash_attention.variants import BackwardVariant, ForwardVariant
from warploom.runtime.choices import note
from warploom.runtime.launch import Buffer, Launch, has_pdl
from warploom.runtime.layout import layout_for
from warploom.runtime.memory_order import layout_of

Tensor = torch.Tensor


class ForwardTensors(NamedTuple):
    """Tensors like those of a forward, which may have no memory."""

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor


class BackwardTensors(NamedTuple):
    """Tensors like those of a backward, which may have no memory."""

    q: Tensor
    k: Tensor
    v: Tensor
    grad: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor

    @property
    def factors(self) -> tuple[Tensor, ...]:
        """The tensors that kernels multiply."""
        return self[:4]

    def dense(self) -> BackwardTensors:
        """Returns the same with gradients without gaps."""
        dq, dk, dv = (layout_of(x, x.shape[-1]) for x in (self.q, self.k, self.v))
        return self._replace(dq=dq, dk=dk, dv=dv)


def choose_forward(call: Call, tensors: ForwardTensors) -> ForwardVariant:
    """Returns the variant that is the fastest for a call, by the first of `FORWARD` that takes it."""
    if call.shape.empty() or 0 in tensors.k.shape:
        return variants.NothingForward()
    return _first("forward", FORWARD, call, tensors)  # type: ignore[no-any-return]


def choose_backward(
    call: Call, tensors: BackwardTensors, preprocess: variants.Preprocess, placed: bool
) -> BackwardVariant:
    """Returns the variant that is the fastest for a call, by the first of `BACKWARD` that takes it.

    ``placed``: gradients go to where the caller says, and may have gaps.
    """
    variant = _first("backward", BACKWARD, call, tensors, preprocess)
    if placed and isinstance(variant, variants.SplitBackward):
        # Parts are without gaps, and so is what they are added up in.
        tensors = tensors.dense()
        dq, dk, dv = map(Buffer.like, (tensors.dq, tensors.dk, tensors.dv))
        variant = _first("backward", BACKWARD, call, tensors, preprocess)
        variant = variants.CopiedBackward(variant, (dq, dk, dv))
    return variant  # type: ignore[no-any-return]


def _first(step: str, table: Sequence[Any], *arguments: Any) -> Any:
    """Returns the first variant that a table makes of a call; the last of a table takes every call."""
    for each in table:
        variant = each(*arguments)
        if not isinstance(variant, str):
            break
        note(step, f"not {variant}")
    note(step, _describe(variant))
    return variant


def _describe(variant: Any) -> str:
    """Returns the names of a variant and of those in it, and what the innermost is."""
    names, inner = [type(variant).__name__], variant
    while hasattr(inner, "inner"):
        inner = inner.inner
        names.append(type(inner).__name__)
    parts = [type(x).__name__ for x in inner if type(x).__module__ == variants.__name__]
    more = f" of {', '.join(name for name in parts if name.endswith('Gradient'))}" if len(parts) > 2 else ""
    return f"{'('.join(names)}{')' * (len(names) - 1)}{more}: {str(type(inner).__doc__).splitlines()[0]}"


# ----------------------------------------------------------------------------------------------------------
# Forward
# ----------------------------------------------------------------------------------------------------------


def _decode_forward(call: Call, tensors: ForwardTensors) -> ForwardVariant | str:
    if not decode.suits(call):
        packed = call.mask.cu_seqlens_q is not None
        what = "sequences are packed" if packed else f"{call.shape.tokens} queries, at most {decode.MOST_TOKENS}"
        return f"DecodeForward: {what}"
    return _plan_decode(call, tensors)


def _plan_decode(
    call: Call, tensors: ForwardTensors
) -> variants.DecodeForward | variants.HopperLatentForward | variants.SplitDecodeForward:
    """Returns the kernel for few queries, with the launch that joins its chunks if there are several."""
    plan = decode.plan(call, call.precision, tensors, has_pdl(call.device))
    inner: variants.DecodeForward | variants.HopperLatentForward = variants.DecodeForward(plan.launch)
    if plan.for_hopper:
        inner = variants.HopperLatentForward(plan.launch, plan.sums)
    if plan.combine is None:
        return inner
    return variants.SplitDecodeForward(inner, plan.combine, *_forward_parts(plan.shape, plan.parts))


def _packed_cache_forward(call: Call, tensors: ForwardTensors) -> ForwardVariant | str:
    if not call.mask.on_cache:
        return "PackedCacheForward: queries are not packed on a cache"
    many: Any = _first("forward, more queries", _CACHE_FORWARD, call, tensors)
    if call.chunks:
        return many  # type: ignore[no-any-return]
    return variants.PackedCacheForward(many, _plan_decode(call, tensors))


def _latent_cache_forward(call: Call, tensors: ForwardTensors) -> ForwardVariant | str:
    cu_seqlens = call.mask.cu_seqlens_q
    if cu_seqlens is None or not call.shape.is_latent:
        return f"DecodeForward: rows of {WIDEST} features at most"
    return variants.DecodeForward(decode.plan_many(call, call.precision, tensors, cu_seqlens))


def _hopper_cache_forward(call: Call, tensors: ForwardTensors) -> ForwardVariant | str:
    if not call.aligned:
        return "HopperCacheForward: an address is no multiple of 16 bytes"
    units = varlen.plan_cache_units(call, decode.few_queries(call), tensors.out)
    if isinstance(units, str):
        return f"HopperCacheForward: {units}"
    on_units = units.call
    obstacle = hopper.obstacle("forward", on_units.shape, on_units.mask, call.scale, *tensors)
    if obstacle := obstacle or hopper.cache_obstacle(on_units, call.mask.block_table, tensors.k):
        return f"HopperCacheForward: {obstacle}"
    return variants.HopperCacheForward(units, hopper.plan_cache(on_units, call.mask.block_table, tensors))


def _hopper_forward(call: Call, tensors: ForwardTensors) -> ForwardVariant | str:
    if tiling.is_small_for("forward", call):
        return "HopperForward: the problem is small"
    if _is_decoding(call):
        return "HopperForward: few queries, with a window, cap, sink or lengths"
    if not call.aligned:
        return "HopperForward: an address is no multiple of 16 bytes"
    of_hopper, spread = call, None
    if varlen.suits("forward", call, *tensors):
        spread = varlen.plan(call)
        of_hopper = call._replace(mask=spread.packed_mask(spread.nowhere))
    if obstacle := hopper.obstacle("forward", of_hopper.shape, of_hopper.mask, call.scale, *tensors):
        return f"HopperForward: {obstacle}"
    plan = hopper.plan("forward", of_hopper, tensors)
    inner = variants.HopperForward(plan.launch, plan.counted)
    if spread is not None:
        return variants.VarlenForward(inner, spread)
    return inner if plan.splits == 1 else _split_forward(call, tensors.out, inner, plan.splits)


def _triton_forward(call: Call, tensors: ForwardTensors) -> ForwardVariant:
    shape = call.shape
    q, k, v, out = tensors
    product = tiling.product_of("forward", call, call.precision)
    terms = tiling.plan_terms(product, shape, q, k, v, None, False) if product in TERMS else None
    layout = layout_for(Strides, *((q, k, v) if terms is None else terms.like), out)
    grid = tiling.grid_of("forward", call, product, out.numel(), call.aligned and layout.vec > 1)
    pages = 0 if call.mask.block_table is None else k.shape[0]
    launch = Launch(
        forward_kernel,
        grid.programs,
        takes=(
            *("q", "k", "v", "out", "lse", "statistics", "sink"),
            *("cu_seqlens_q", "cu_seqlens_k", "seqused_k", "block_table"),
        ),
        out_split=out.numel() // layout.vec if grid.splits > 1 else 0,  # from one part to the next
        strides=ForwardStrides(*layout.strides),
        PDL=has_pdl(call.device),
        **tiling.arguments_of(call, grid, layout, product, shape.group, pages, decode.few_queries(call)),
    )
    variant: Any = variants.TritonForward(launch)
    if grid.splits > 1:
        variant = _split_forward(call, out, variant, grid.splits)
    return variant if terms is None else variants.TermsForward(terms, variant)


def plan_jvp(call: Call, tensors: ForwardTensors) -> variants.JvpForward | variants.NothingJvp:
    """Returns the forward of a call with tangents, which have the strides of their tensors."""
    if call.shape.empty():
        return variants.NothingJvp()
    note("jvp", "JvpForward: forward mode has a kernel in Triton alone")
    return variants.JvpForward(launch_jvp.plan_jvp(call, *tensors))


_CACHE_FORWARD = (_latent_cache_forward, _hopper_cache_forward, _triton_forward)
FORWARD = (_packed_cache_forward, _decode_forward, _hopper_forward, _triton_forward)
"""Makers of variants of a forward, in the order in which they are tried. The last takes every call."""


def _is_decoding(call: Call) -> bool:
    """Returns whether a call has options, and so few queries that the Triton kernels are faster."""
    options = call.softcap is not None or call.has_sink or call.mask.left is not None
    few = call.shape.tokens * call.shape.group <= hopper.FEW
    return few and (options or call.mask.seqused_k is not None)


def _forward_parts(shape: Shape, splits: int) -> tuple[Buffer, Buffer]:
    """Returns the buffers of the parts of an output, all in one, and of their statistics."""
    elements = shape.batch_size * shape.tokens * shape.heads * shape.value_dim
    statistics = (splits, 2, shape.batch_size, shape.heads, shape.tokens)
    return Buffer.rows((splits * elements,), torch.float32), Buffer.rows(statistics, torch.float32)


def _split_forward(
    call: Call, out: Tensor,
    inner: variants.TritonForward | variants.HopperForward | variants.HopperMaskedForward, splits: int,
) -> variants.SplitForward:  # fmt: skip
    """Returns a kernel whose KV loops are split, with the launch that merges its parts."""
    shape, pdl = call.shape, has_pdl(call.device)
    block_r = max(1024 // shape.block_e, 1)
    rows = tiling.lse_rows(shape)
    layout = layout_for(Strides, out)
    cu_q = call.mask.cu_seqlens_q if call.has_sink else None
    packing = None if cu_q is None else Packing(cu_q.shape[0] - 1, cu_q.stride(0))
    combine = Launch(
        combine_kernel,
        -(-rows.count // block_r),
        takes=("part", "part_statistics", "out", "lse", "statistics", "sink", "cu_seqlens_q"),
        pdl=pdl,
        lse_rows=rows,
        splits=splits,
        out_split=out.numel() // layout.vec,
        packing=packing,
        tiles=RowTiles(layout.vec, layout.unit, shape.value_dim, block_r, shape.block_e),
        AHEAD=PARTS_AHEAD.value,
        PDL=pdl,
        **layout.of("out"),
    )
    return variants.SplitForward(inner, combine, *_forward_parts(call.shape, splits))


# ----------------------------------------------------------------------------------------------------------
# Backward
# ----------------------------------------------------------------------------------------------------------


def choose_masked_forward(
    call: Call, masking: Masking, tensors: ForwardTensors
) -> variants.MaskedForward | variants.HopperMaskedForward | variants.SplitForward:
    """Returns the forward of a call with a mask, a bias or slopes."""
    return _first("forward", MASKED_FORWARD, call, masking, tensors)  # type: ignore[no-any-return]


def _hopper_masked_forward(
    call: Call, masking: Masking, tensors: ForwardTensors
) -> variants.HopperMaskedForward | variants.SplitForward | str:
    if obstacle := hopper.mask_obstacle("forward", call, masking, *tensors):
        return f"HopperMaskedForward: {obstacle}"
    plan = hopper.plan_masked_forward(call, masking, tensors)
    seen = _plan_seen(call, masking, tensors.k, tensors.v)
    inner = variants.HopperMaskedForward(plan.launch, plan.counted, seen)
    return inner if plan.splits == 1 else _split_forward(call, tensors.out, inner, plan.splits)


def _plan_seen(call: Call, masking: Masking, k: Tensor, v: Tensor) -> variants.SeenKeys | None:
    return None if masking.bias is None else variants.SeenKeys(*hopper.plan_seen_keys(call, masking.bias, k, v))


def _masked_forward(call: Call, masking: Masking, tensors: ForwardTensors) -> variants.MaskedForward:
    return variants.MaskedForward(launch_masked.plan_forward(call, masking, *tensors))


MASKED_FORWARD = (_hopper_masked_forward, _masked_forward)
"""Makers of variants of a forward with a mask, a bias or slopes. The last takes every call."""


def choose_masked_backward(
    call: Call, masking: Masking, tensors: BackwardTensors, preprocess: variants.Preprocess, wants_bias: bool
) -> variants.MaskedBackward | variants.HopperMaskedBackward:
    """Returns the backward of a call with a mask, a bias or slopes, whose gradients have no gaps."""
    return _first("backward", MASKED_BACKWARD, call, masking, tensors, preprocess, wants_bias)  # type: ignore[no-any-return]


def _hopper_masked_backward(
    call: Call, masking: Masking, tensors: BackwardTensors, preprocess: variants.Preprocess, wants_bias: bool
) -> variants.HopperMaskedBackward | str:
    described = (*tensors.factors, tensors.dk, tensors.dv)
    if obstacle := hopper.mask_obstacle("backward", call, masking, *described):
        return f"HopperMaskedBackward: {obstacle}"
    added, tiles_added = _sums_of(call.shape)
    bias, written = masking.bias, None
    of_bias: variants.BiasGradient | variants.SeparateBiasGradient | None = None
    if wants_bias and bias is not None:
        sums = hopper.plan_bias_sums(call, bias)
        if isinstance(sums, str):
            note("backward", f"not BiasGradient: {sums}")
            rows: Any = tensors.factors
            of_bias = variants.SeparateBiasGradient(launch_masked.plan_bias(call, masking, bias, rows))
        else:
            written, of_bias = sums, variants.BiasGradient(sums.parts, sums.sums)
    launch = hopper.plan_masked_backward(call, masking, described, added, written)
    return variants.HopperMaskedBackward(
        preprocess,
        launch,
        _plan_rounds(call, tensors.dq, masking.bias),
        Buffer.like(added),
        tiles_added,
        _plan_seen(call, masking, tensors.k, tensors.v),
        of_bias,
    )


def _masked_backward(
    call: Call, masking: Masking, tensors: BackwardTensors, preprocess: variants.Preprocess, wants_bias: bool
) -> variants.MaskedBackward:
    bias = masking.bias if wants_bias else None
    rows: Any = tensors.factors
    return variants.MaskedBackward(
        preprocess,
        # A row of the smallest numbers alone has an lse that has no room for its sum.
        has_inverse=call.dtype == torch.float32 or masking.bias is not None,
        query=launch_masked.plan_query(call, masking, rows),
        key=launch_masked.plan_key(call, masking, rows),
        bias=None if bias is None else launch_masked.plan_bias(call, masking, bias, rows),
    )


MASKED_BACKWARD = (_hopper_masked_backward, _masked_backward)
"""Makers of variants of a backward with a mask, a bias or slopes. The last takes every call."""


def plan_preprocess(call: Call, grad: Tensor, grad_lse: Tensor | None, out: Tensor) -> variants.Preprocess:
    """Returns the launch that all backward kernels follow."""
    shape = call.shape
    layout = layout_for(Strides, out, grad)
    # Rows at any address have an address for each element.
    block_r = min((4096 if layout.vec > 1 else 1024) // shape.block_e, 64)
    rows = tiling.lse_rows(shape)
    launch = Launch(
        prepare_kernel,
        -(-rows.count // block_r),
        takes=("out", "grad", "statistics", "dlse", "lse", "delta", "inverse", "counters", "tiles_added"),
        lse_rows=rows,
        dlse_strides=StatisticStrides(*((0, 0, 0) if grad_lse is None else grad_lse.stride())),
        tiles=RowTiles(layout.vec, layout.unit, shape.value_dim, block_r, shape.block_e),
        PRECISION=tiling.product_of("backward", call, call.precision),
        PDL=has_pdl(call.device),
        **layout.of("out", "grad"),
    )
    return variants.Preprocess(launch, Buffer.rows((shape.batch_size, shape.heads, shape.tokens), torch.float32))


def plan_sink_gradient(call: Call) -> variants.SinkGradient | variants.LoneSinkGradient:
    """Returns what forms the gradient of sinks, of one head a program."""
    shape = call.shape
    if shape.empty():
        return variants.LoneSinkGradient()
    launch = Launch(
        sink_kernel,
        shape.heads,
        takes=("sink", "statistics", "delta", "dsink"),
        num_warps=8,
        lse_rows=tiling.lse_rows(shape),
        in_head=shape.batch_size * shape.tokens,
        BLOCK=4096,
    )
    return variants.SinkGradient(launch)


def _small_backward(
    call: Call, tensors: BackwardTensors, preprocess: variants.Preprocess
) -> variants.SmallBackward | str:
    given = call.shape, call.mask, call.scale, *tensors
    if call.softcap is not None or not small.suits_backward(*given):
        return "SmallBackward: the problem is large, or its kernel does not take it"
    return variants.SmallBackward(preprocess, small.plan_backward(*given))


def _varlen_backward(
    call: Call, tensors: BackwardTensors, preprocess: variants.Preprocess
) -> variants.VarlenBackward | str:
    if not call.aligned or not varlen.suits("backward", call, *tensors):
        none = call.mask.cu_seqlens_q is None
        return f"VarlenBackward: {'no packed sequences' if none else 'short sequences, or rows of odd strides'}"
    spread = varlen.plan(call)
    on_rows = spread.call._replace(precision="highest", aligned=True, has_sink=False)
    if obstacle := hopper.obstacle("key", on_rows.shape, on_rows.mask, call.scale, *tensors.factors):
        return f"VarlenBackward: {obstacle}"
    given = zip(tensors.factors, (False, True, True, False))
    inputs = tuple(varlen.plan_copy(x, spread, keys=keys) for x, keys in given)
    q, k, v, grad = (copy.spread.empty(tensors.q) for copy in inputs)
    wide = BackwardTensors(q, k, v, grad, q, k, v).dense()
    inner = _first("backward, spread", _ON_ROWS, on_rows, wide, preprocess)
    if isinstance(inner, variants.SeparateBackward):
        for_hopper = all(isinstance(x, variants.HopperGradient) for x in (inner.key, inner.query))
    else:
        for_hopper = isinstance(inner, variants.FusedBackward)
    if not for_hopper:
        return "VarlenBackward: its kernels are for Hopper"
    row = varlen.of_rows(call.shape.heads, call.shape.tokens)
    rows = tuple(varlen.plan_copy(row, spread, keys=False, fill=fill) for fill in (float("inf"), 0.0))
    results = tuple(
        varlen.plan_copy(x, spread, keys=keys, back_from=Buffer.like(from_))
        for x, keys, from_ in zip(tensors[4:], (False, True, True), wide[4:])
    )
    return variants.VarlenBackward(preprocess, spread, inputs, rows, results, inner)


def _fused_backward(
    call: Call, tensors: BackwardTensors, preprocess: variants.Preprocess
) -> variants.FusedBackward | str:
    shape = call.shape
    if tiling.product_of("backward", call, call.precision) in TERMS:
        return "FusedBackward: float32"
    if not call.aligned:
        return "FusedBackward: an address is no multiple of 16 bytes"
    described = (*tensors.factors, tensors.dk, tensors.dv)
    if obstacle := hopper.obstacle("backward", shape, call.mask, call.scale, *described):
        return f"FusedBackward: {obstacle}"
    if not (hopper.is_fused_faster(shape, call.mask, call.device) if call.fused is None else call.fused):
        return "FusedBackward: two kernels are faster"
    added, tiles_added = _sums_of(shape)
    launch = hopper.plan_fused(call, described, added).launch
    return variants.FusedBackward(
        preprocess, launch, _plan_rounds(call, tensors.dq), Buffer.like(added), tiles_added
    )


def _sums_of(shape: Shape) -> tuple[Tensor, Buffer]:
    """Returns a tensor like the one in which one kernel adds up dq, and the buffer of how many tiles it added."""
    added = torch.empty((shape.batch_size, shape.heads, shape.tokens, shape.head_dim), device="meta")
    return added, Buffer.rows((2, shape.batch_size, shape.heads, shape.tokens), torch.int32)


def _separate_backward(
    call: Call, tensors: BackwardTensors, preprocess: variants.Preprocess
) -> variants.SeparateBackward | variants.SplitBackward:
    product = tiling.product_of("backward", call, call.precision)
    q, k, v, grad, dq, dk, dv = tensors
    factors: Any = variants.AsGiven()
    like = tensors.factors
    if product in TERMS:
        factors = tiling.plan_terms(product, call.shape, q, k, v, grad, has_pdl(call.device))
        like = factors.like
    key, key_splits = _plan_gradient("key", call, product, like, {"dk": dk, "dv": dv})
    query, query_splits = _plan_gradient("query", call, product, like, {"dq": dq})
    counted = any(isinstance(x, variants.HopperGradient | variants.HopperTermsGradient) for x in (key, query))
    whole = variants.SeparateBackward(preprocess, factors, key, query, counted)
    splits = {"dq": query_splits, "dk": key_splits, "dv": key_splits}
    if max(splits.values()) == 1:
        return whole
    gradients = {"dq": dq, "dk": dk, "dv": dv}
    sums = _plan_sums(splits, gradients, has_pdl(call.device))
    parts = tuple(
        Buffer.rows((splits[name] * x.numel(),), torch.float32) if splits[name] > 1 else None
        for name, x in gradients.items()
    )
    return variants.SplitBackward(whole, parts, sums)


BACKWARD = (_small_backward, _varlen_backward, _fused_backward, _separate_backward)
"""Makers of variants of a backward, in the order in which they are tried. The last takes every call."""
_ON_ROWS = (_small_backward, _fused_backward, _separate_backward)
"""Makers that are tried on the spread rows of packed sequences."""


def _plan_gradient(
    kernel: str, call: Call, product: str, factors: tuple[Tensor, ...], results: dict[str, Tensor]
) -> tuple[variants.Gradient, int]:
    """Returns the kernel ``key`` or ``query`` of a backward, and into how many splits it cuts loops."""
    if product in TERMS:
        if obstacle := hopper.terms_obstacle(call.shape, TERMS[product], call.device, results.values()):
            note("backward", f"not HopperTermsGradient of {kernel}: {obstacle}")
        else:
            plan = hopper.plan_terms(kernel, call, factors, TERMS[product], results)
            return variants.HopperTermsGradient(plan.launch), plan.splits
    else:
        described = (*factors, *results.values())
        obstacle = hopper.obstacle(kernel, call.shape, call.mask, call.scale, *described)
        if not call.aligned:
            obstacle = "an address is no multiple of 16 bytes"
        if obstacle is None:
            plan = hopper.plan(kernel, call, described)
            return variants.HopperGradient(plan.launch, kernel == "key"), plan.splits
        note("backward", f"not HopperGradient of {kernel}: {obstacle}")
    return _plan_triton_gradient(kernel, call, product, factors, results)


def _plan_triton_gradient(
    kernel: str, call: Call, product: str, factors: tuple[Tensor, ...], results: dict[str, Tensor]
) -> tuple[variants.Gradient, int]:
    """Returns what `_plan_gradient` does, in Triton."""
    layout = layout_for(Strides, *factors, *results.values())
    elements = sum(x.numel() for x in results.values())
    grid = tiling.grid_of(kernel, call, product, elements, call.aligned and layout.vec > 1)
    pdl = has_pdl(call.device)
    distances = [x.numel() // layout.vec if grid.splits > 1 else 0 for x in results.values()]  # between parts
    parts: dict[str, Any] = {"parts": KeyParts(*distances)} if kernel == "key" else {"dq_split": distances[0]}
    inputs = ("q", "k", "v", "grad")
    launch = Launch(
        key_kernel if kernel == "key" else query_kernel,
        grid.programs,
        takes=(*inputs, "lse", "delta", "inverse", *results, "cu_seqlens_q", "cu_seqlens_k", "seqused_k"),
        pdl=pdl,
        grad_scale=call.scale,
        PDL=pdl,
        strides=BackwardStrides(*layout.strides[:4]),
        **parts,
        **tiling.arguments_of(call, grid, layout, product, 1 if kernel == "key" else call.shape.group),
        **{f"{name}_strides": strides for name, strides in zip(results, layout.strides[4:])},
    )
    gradient = variants.TritonGradient(launch)
    if kernel == "key" and call.mask.seqused_k is not None:
        return variants.UsedKeysGradient(gradient), grid.splits
    return gradient, grid.splits


def _plan_rounds(call: Call, dq: Tensor, bias: Tensor | None = None) -> Launch:
    """Returns what rounds the gradient of queries that was added up in device memory, with a bias or without."""
    shape, pdl = call.shape, has_pdl(call.device)
    layout = layout_for(Strides, dq)
    block_r = min(4096 // shape.block_d, 64)
    rows = tiling.lse_rows(shape)
    return Launch(
        round_kernel,
        -(-rows.count // block_r),
        takes=("added", "tiles_added", "dq"),
        pdl=pdl,
        lse_rows=rows,
        scale=call.scale,
        tiles=RowTiles(layout.vec, layout.unit, shape.head_dim, block_r, shape.block_d),
        BLOCK_M=hopper.queries_of_a_sum(shape, bias),
        PDL=pdl,
        **layout.of("dq"),
    )


def _plan_sums(splits: dict[str, int], gradients: dict[str, Tensor], pdl: bool) -> Launch:
    """Returns what sums the parts of those gradients that are in parts."""
    programs = sum(-(-x.numel() // 1024) for name, x in gradients.items() if splits[name] > 1)
    arguments: dict[str, Any] = {}
    takes: list[str] = []
    for name, x in gradients.items():
        arguments |= {f"{name}_size": x.numel(), f"{name}_splits": splits[name]}
        if splits[name] > 1:
            takes += [f"{name}_parts", name]
        else:
            arguments |= {f"{name}_parts": None, name: None}
    return Launch(sum_kernel, programs, takes=takes, pdl=pdl, BLOCK=1024, PDL=pdl, **arguments)
