"""Flash attention on tensors that are checked, forward and backward: what other operators import of it.

There is no validation here, and no autograd. What a call allocates and launches, its plan, depends on shapes,
strides, dtypes and options alone. Plans are kept by the caller (`warploom.runtime.plans`): a call like an earlier
one only allocates and launches.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from warploom.ops.flash_attention.choose import (
    BackwardTensors,
    ForwardTensors,
    choose_backward,
    choose_forward,
    choose_masked_backward,
    choose_masked_forward,
    plan_jvp,
    plan_preprocess,
    plan_sink_gradient,
)
from warploom.ops.flash_attention.hopper.launch import is_fused_faster
from warploom.ops.flash_attention.hopper.launch_varlen import spread_rows
from warploom.ops.flash_attention.problem import (
    PLAIN,
    WIDEST,
    Call,
    Logits,
    Masking,
    MaskSpec,
    Shape,
    begins_with,
)
from warploom.ops.flash_attention.triton.launch import precision_of
from warploom.ops.flash_attention.variants import (
    COUNTERS,
    BackwardInputs,
    BackwardVariant,
    ForwardInputs,
    ForwardVariant,
    FusedBackward,
    Gradients,
    HopperForward,
    HopperGradient,
    HopperMaskedForward,
    JvpForward,
    LoneSinkGradient,
    MaskedForward,
    NothingBackward,
    NothingForward,
    NothingJvp,
    SeparateBackward,
    SinkGradient,
    SplitForward,
    Tangents,
)
from warploom.runtime.launch import Buffer, are_aligned
from warploom.runtime.memory_order import layout_of
from warploom.runtime.plans import Plans

__all__ = [
    "COUNTERS",
    "PLAIN",
    "BackwardInputs",
    "BackwardPlan",
    "ForwardInputs",
    "ForwardPlan",
    "FusedBackward",
    "HopperForward",
    "HopperGradient",
    "Logits",
    "MaskSpec",
    "SeparateBackward",
    "backward",
    "forward",
    "is_fused",
    "jvp",
    "masked_backward",
    "masked_forward",
    "plan_backward",
    "plan_forward",
]

Tensor = torch.Tensor


class ForwardPlan(NamedTuple):
    """Results of a forward, and the variant that writes them."""

    out: Buffer
    lse: Buffer
    statistics: Buffer
    variant: ForwardVariant


class MaskedForwardPlan(NamedTuple):
    """Results of a forward with a mask, a bias or slopes, and the variant that writes them."""

    out: Buffer
    lse: Buffer
    statistics: Buffer
    variant: MaskedForward | HopperMaskedForward | SplitForward | NothingForward


class BackwardPlan(NamedTuple):
    """Results of a backward, and the variants that write them."""

    gradients: tuple[Buffer, Buffer, Buffer]  # dq, dk, dv
    variant: BackwardVariant
    sink: SinkGradient | LoneSinkGradient | None  # None where there is no sink


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: MaskSpec,
    scale: float,
    precision: str | None,
    plans: Plans,
    counters: Tensor | None = None,
    logits: Logits = PLAIN,
    out: Tensor | None = None,
    chunks: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute attention.

    ``plans`` are those of earlier calls that were the same in all but addresses, what ``cu_seqlens`` hold, and
    precision. ``counters``: `COUNTERS` that are zero, if there are any already. ``out``: where attention shall be
    written, with any strides. ``chunks``: of packed queries on a cache, a query's bits are those that it has with
    any number of others of its sequence.

    Returns:
        Attention (B, N, Hq, E); lse (B, Hq, N) in float32; and what the backward computes the weights again from,
        (2, B, Hq, N) in float32.
    """
    precision = precision_of(q, precision)
    aligned = are_aligned(q, k, v) if out is None else are_aligned(q, k, v, out)
    shared = q.shape[3] > WIDEST and begins_with(k, v)
    key = (precision, aligned, None if out is None else out.stride(), shared)
    plan = plans.known.get(key)
    if plan is None:
        plan = plans.keep(key, plan_forward(q, k, v, mask, scale, precision, aligned, logits, out, chunks, shared))
    if out is None:
        out = plan.out.empty(q)
    lse, statistics = plan.lse.empty(q), plan.statistics.empty(q)
    plan.variant(ForwardInputs(q, k, v, mask, logits.sink, counters), out, lse, statistics)
    return out, lse, statistics


def plan_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: MaskSpec,
    scale: float,
    precision: str,
    aligned: bool,
    logits: Logits = PLAIN,
    out: Tensor | None = None,
    chunks: bool = False,
    shared: bool = False,
) -> ForwardPlan:
    """Returns the plan of `forward`; ``shared``: values are the first features of keys, in their memory."""
    call = Call.of(q, k, v, mask, scale, logits.softcap)
    call = call._replace(precision=precision, aligned=aligned, has_sink=logits.sink is not None, chunks=chunks)
    shape = call.shape
    call = call._replace(shared=shared and shape.block_e == shape.block_d)
    out = layout_of(q, shape.value_dim) if out is None else out
    lse = (shape.batch_size, shape.heads, shape.tokens)
    variant = choose_forward(call, ForwardTensors(q, k, v, out))
    return ForwardPlan(
        Buffer.like(out), Buffer.rows(lse, torch.float32), Buffer.rows((2, *lse), torch.float32), variant
    )


def backward(
    grad: Tensor,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    statistics: Tensor,
    mask: MaskSpec,
    scale: float,
    precision: str | None,
    plans: Plans,
    results: Gradients | None = None,
    logits: Logits = PLAIN,
    fused: bool | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Returns gradients of ``q``, ``k`` and ``v``, each in the memory order of its tensor, and of the sink, if any.

    ``grad`` (B, N, Hq, E) and ``grad_lse`` (B, Hq, N), which may be None for zero, have any strides; ``out`` and
    ``statistics`` are what `forward` returned for the other arguments. ``plans``: those that `forward` took.
    ``results``: where the gradients shall be written, with any strides. ``fused``: whether one kernel forms all
    gradients, where there is one that can; by default whichever is faster. They add up dq in different orders.
    """
    precision = precision_of(q, precision)
    # Strides, because what autograd saved may come back with others: from the host's memory, for one.
    aligned = are_aligned(q, k, v, grad, *(results or ()))
    key = (
        precision, aligned, grad.dtype, grad.stride(),
        None if grad_lse is None else (grad_lse.dtype, grad_lse.stride()),
        q.stride(), k.stride(), v.stride(), out.stride(),
        None if results is None else (results[0].stride(), results[1].stride(), results[2].stride()), fused,
    )  # fmt: skip
    plan = plans.known.get(key)
    if plan is None:
        rest = (mask, scale, precision, aligned, results, logits, fused)
        plan = plans.keep(key, plan_backward(grad, grad_lse, q, k, v, out, *rest))
    dq, dk, dv = (gradient.empty(q) for gradient in plan.gradients) if results is None else results
    inputs = BackwardInputs(grad, grad_lse, q, k, v, out, statistics, mask)
    delta = plan.variant(inputs, (dq, dk, dv))
    if plan.sink is None or logits.sink is None:
        return dq, dk, dv, None
    return dq, dk, dv, plan.sink(logits.sink, inputs, delta)


class JvpPlan(NamedTuple):
    """Results of a forward with tangents, and the variant that writes them."""

    out: Buffer
    lse: Buffer
    variant: JvpForward | NothingJvp


def jvp(
    q: Tensor, k: Tensor, v: Tensor, tangents: Tangents, mask: MaskSpec, scale: float, precision: str | None,
    plans: Plans, logits: Logits = PLAIN,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Returns attention and lse as `forward` does, and their tangents, given those of q, k, v and the sink."""
    if scale == 0.0:  # logits do not change
        tangents = (None, None, *tangents[2:])
    (q, dq), (k, dk), (v, dv) = (_with_equal_strides(x, dx) for x, dx in zip((q, k, v), tangents))
    given = (dq, dk, dv, tangents[3])
    precision = precision_of(q, precision)
    aligned = are_aligned(*(x for x in (q, k, v, *given[:3]) if x is not None))
    key = ("jvp", precision, aligned, q.stride(), k.stride(), v.stride(), *(x is None for x in given))
    plan = plans.known.get(key)
    if plan is None:
        call = Call.of(q, k, v, mask, scale, logits.softcap)
        call = call._replace(precision=precision, aligned=aligned, has_sink=logits.sink is not None)
        out = layout_of(q, v.shape[3])
        lse = Buffer.rows((q.shape[0], q.shape[2], q.shape[1]), torch.float32)
        plan = plans.keep(key, JvpPlan(Buffer.like(out), lse, plan_jvp(call, ForwardTensors(q, k, v, out))))
    out, dout = plan.out.empty(q), plan.out.empty(q)
    results = out, plan.lse.empty(q), dout, plan.lse.empty(q)
    plan.variant(ForwardInputs(q, k, v, mask, logits.sink, None), given, results)
    return results


def _with_equal_strides(x: Tensor, tangent: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Returns a tensor and its tangent with the same strides: as they are, or copies without gaps."""
    if tangent is None or x.stride() == tangent.stride():
        return x, tangent
    return x.contiguous(), tangent.contiguous()


def masked_forward(
    q: Tensor, k: Tensor, v: Tensor, mask: MaskSpec, masking: Masking, scale: float, precision: str | None,
    plans: Plans, logits: Logits,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Compute attention with a mask, a bias or slopes; for the rest see `forward`."""
    precision = precision_of(q, precision)
    aligned = are_aligned(q, k, v)
    key = ("masked", precision, aligned)
    plan = plans.known.get(key)
    if plan is None:
        call = Call.of(q, k, v, mask, scale, logits.softcap)
        call = call._replace(precision=precision, aligned=aligned, has_sink=logits.sink is not None)
        plan = plans.keep(
            key, _plan_masked_forward(call, masking, ForwardTensors(q, k, v, layout_of(q, v.shape[3])))
        )
    out, lse, statistics = plan.out.empty(q), plan.lse.empty(q), plan.statistics.empty(q)
    inputs = ForwardInputs(q, k, v, mask, logits.sink, None)
    if isinstance(plan.variant, NothingForward):
        plan.variant(inputs, out, lse, statistics)
    else:
        plan.variant(inputs, out, lse, statistics, masking)
    return out, lse, statistics


def _plan_masked_forward(call: Call, masking: Masking, tensors: ForwardTensors) -> MaskedForwardPlan:
    shape = call.shape
    lse = (shape.batch_size, shape.heads, shape.tokens)
    variant = NothingForward() if shape.empty() else choose_masked_forward(call, masking, tensors)
    return MaskedForwardPlan(
        Buffer.like(tensors.out), Buffer.rows(lse, torch.float32), Buffer.rows((2, *lse), torch.float32), variant
    )


def masked_backward(
    grad: Tensor, grad_lse: Tensor | None, inputs: BackwardInputs, masking: Masking, scale: float,
    precision: str | None, plans: Plans, logits: Logits, wants_bias: bool,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Returns gradients of q, k, v, the sink and the bias of `masked_forward`, all without gaps."""
    q, k, v = inputs.q, inputs.k, inputs.v
    precision = precision_of(q, precision)
    # Strides, because what autograd saved may come back with others: from the host's memory, for one.
    given = (grad, grad_lse, q, k, v, inputs.out, masking.bias, masking.alibi)
    strides = tuple([None if x is None else x.stride() for x in given])
    aligned = are_aligned(q, k, v, grad, *(() if masking.bias is None else (masking.bias,)))
    dtypes = grad.dtype, None if grad_lse is None else grad_lse.dtype
    key = ("masked", precision, aligned, dtypes, strides, wants_bias)
    plan = plans.known.get(key)
    if plan is None:
        call = Call.of(q, k, v, inputs.mask, scale, logits.softcap)._replace(precision=precision, aligned=aligned)
        variant = None
        if not call.shape.empty():
            preprocess = plan_preprocess(call, grad, grad_lse, inputs.out)
            tensors = BackwardTensors(q, k, v, grad, *(x.new_empty(x.shape, device="meta") for x in (q, k, v)))
            variant = choose_masked_backward(call, masking, tensors, preprocess, wants_bias)
        plan = plans.keep(key, (variant, None if logits.sink is None else plan_sink_gradient(call)))
    variant, sink = plan
    bias = masking.bias if wants_bias else None
    dq, dk, dv, *dbias = (x.new_empty(x.shape) for x in (q, k, v, bias) if x is not None)
    delta = None
    if variant is None:
        for x in (dq, dk, dv, *dbias):
            x.zero_()
    else:
        delta = variant(inputs, (dq, dk, dv), dbias[0] if dbias else None, masking)
    dsink = None if sink is None or logits.sink is None else sink(logits.sink, inputs, delta)
    return dq, dk, dv, dsink, dbias[0] if dbias else None


def plan_backward(
    grad: Tensor,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    mask: MaskSpec,
    scale: float,
    precision: str,
    aligned: bool,
    results: Gradients | None,
    logits: Logits = PLAIN,
    fused: bool | None = None,
) -> BackwardPlan:
    """Returns the plan of `backward`."""
    call = Call.of(q, k, v, mask, scale, logits.softcap)
    has_sink = logits.sink is not None
    call = call._replace(precision=precision, aligned=aligned, has_sink=has_sink, fused=fused)
    tensors = BackwardTensors(q, k, v, grad, *(results or (q, k, v)))
    tensors = tensors.dense() if results is None else tensors
    variant: BackwardVariant = NothingBackward()
    if not call.shape.empty():
        preprocess = plan_preprocess(call, grad, grad_lse, out)
        variant = choose_backward(call, tensors, preprocess, placed=results is not None)
    dq, dk, dv = map(Buffer.like, (tensors.dq, tensors.dk, tensors.dv))
    return BackwardPlan((dq, dk, dv), variant, plan_sink_gradient(call) if has_sink else None)


def is_fused(q: Tensor, k: Tensor, v: Tensor, bounds: Sequence[int], left: int | None, right: int | None) -> bool:
    """Returns whether the backward of sequences between ``bounds`` forms all gradients in one kernel."""
    rows, sequences = bounds[-1], len(bounds) - 1
    rows = spread_rows(rows, sequences) if sequences > 1 else rows
    shape = Shape.of(q, k, v)._replace(tokens=rows, keys=rows)
    return is_fused_faster(shape, MaskSpec(left, right), q.device)
