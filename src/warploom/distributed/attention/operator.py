"""Attention over ranks as an operator of PyTorch: agreement, messages and calls on chunks, forward and backward.

Groups of heads, of which the next was sent while one was computed, made it slower on two H200: 119 ms with one
group, 122 with two and 125 with four, for 65536 tokens and both passes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from warploom.distributed.agreement import agree
from warploom.distributed.attention.chunks import (
    ChunkInputs,
    ChunkResults,
    ContextAttentionOptions,
    backward_chunk,
    forward_chunk,
    is_fused,
)
from warploom.distributed.attention.exchange import send_gradients, send_keys
from warploom.distributed.attention.plan import ContextAttentionPlan, PlainCall, make_plan
from warploom.distributed.layout import rows_on
from warploom.distributed.ranks import Bounds, bounds_of, group_named
from warploom.errors import dtype_of
from warploom.runtime.dispatch import CustomOperator, Gradient, Tensors
from warploom.runtime.memory_order import empty_in_order_of
from warploom.runtime.plans import Plans

Tensor = torch.Tensor

NAME = "context_parallel_attention"


class AgreedCall(NamedTuple):
    """A call that the ranks have agreed on, as this rank computes it."""

    group: Any
    plan: ContextAttentionPlan
    layout_bounds: Bounds  # bounds of the sequences, the tokens behind them as one more
    tail: Tensor | None  # which tokens of this rank's part are behind the last packed sequence (n,), if any are

    @classmethod
    def of(cls, bounds: Bounds, tensors: Tensors, options: ContextAttentionOptions) -> AgreedCall:
        """Returns the call with bounds that `_agree_on` returned."""
        group, device, has_tail = group_named(options.group), tensors[0].device, False
        if tensors[4] is not None:
            has_tail = bounds[-1] > bounds[-2]
            bounds = bounds if has_tail else bounds[:-1]
        left, right, layout, world, rank = options.left, options.right, options.layout, group.size(), group.rank()
        plan = make_plan(bounds, world, rank, layout, left, right, device)
        tail = rows_on(bounds, world, layout, rank, device) >= bounds[-2] if has_tail else None
        return cls(group, plan, bounds, tail)

    def fill_tail(self, *tensors: Tensor | None) -> list[Any]:
        """Returns tensors (B, n, H, F), or (…, n), with zeros behind the last sequence."""
        if self.tail is None:
            return list(tensors)
        masks = {4: self.tail[:, None, None], 3: self.tail}
        return [None if x is None else x.masked_fill(masks[x.dim()], 0.0) for x in tensors]

    def run(self, k: Tensor, v: Tensor) -> Iterator[tuple[int, PlainCall, Tensor, Tensor]]:
        """Send keys and values; yields the number of a step, a call of this rank in it, and what that sees."""
        pending = send_keys(self.plan, [_as_rows(x) for x in (k, v)], self.group)
        for number, step in enumerate(self.plan.steps):
            pending.wait(number)
            for call in step.calls:
                keys, values = (x[call.keys].transpose(0, 1) for x in pending.rows)
                yield number, call, keys, values


def _as_rows(x: Tensor) -> Tensor:
    """Returns (B, n, H, D) as (n, B, H, D), dense."""
    return x.transpose(0, 1).contiguous()


def _agree_on(tensors: Tensors, options: ContextAttentionOptions) -> Bounds:
    """Compare the ranks' calls; returns the bounds of sequences, if they are packed and then the whole's length."""
    q, k, v, sink, cu_seqlens = tensors
    group = group_named(options.group)
    read = None if cu_seqlens is None else bounds_of(cu_seqlens)
    (batch, tokens, heads, features), values = q.shape, v.shape[3]
    call = {"B": batch, "Hq": heads, "Hkv": k.shape[2], "D": features, "E": values, "dtype": dtype_of(q)}
    call |= {"sink": sink is not None, **dict(zip(options._fields[:-2], options))}
    lengths, bounds = agree(NAME, group, "q", tokens, call, read, options.layout, tail=True)
    if 0 in lengths:  # that rank sends nothing, and NCCL waits for all ranks in the first call of a group
        dist.all_reduce(q.new_zeros(1), group=group)
    return bounds if read is None else (*read, bounds[-1])


def _forward(tensors: Tensors, _: int, options: ContextAttentionOptions, plans: Plans) -> Tensors:
    """Returns outputs, lse, statistics for the backward, and the bounds that `_agree_on` returns."""
    bounds = _agree_on(tensors, options)
    agreed, sink = AgreedCall.of(bounds, tensors, options), tensors[3]
    q, k, v = agreed.fill_tail(*tensors[:3])
    out, lse, statistics = _fake(tensors, options)[:3]
    for _, call, keys, values in agreed.run(k, v):
        rows = call.queries
        inputs = ChunkInputs(q[:, rows], keys, values, sink, call, options)
        forward_chunk(inputs, OPERATOR.plans, out[:, rows], lse[..., rows], statistics[..., rows])
    if agreed.tail is not None:
        out.masked_fill_(agreed.tail[:, None, None], 0.0)
        lse.masked_fill_(agreed.tail, -torch.inf)
    return out, lse, statistics, torch.tensor(bounds)


def _fake(tensors: Tensors, options: ContextAttentionOptions) -> Tensors:
    q, _, v, _, cu_seqlens = tensors
    (batch, tokens, heads, _), precise = q.shape, torch.promote_types(q.dtype, torch.float32)
    lse = q.new_empty((batch, heads, tokens), dtype=precise)
    statistics = lse.new_empty((2 if options.kernels else 0, *lse.shape))
    bounds = 2 if cu_seqlens is None else cu_seqlens.shape[0] + 1
    return empty_in_order_of(q, v.shape[-1]), lse, statistics, torch.empty(bounds, dtype=torch.int64)


def _save(
    tensors: Tensors, options: ContextAttentionOptions, results: Tensors, wanted: Sequence[bool]
) -> tuple[Tensors, tuple[Any, ...]]:
    """Returns this rank's parts alone."""
    out, _, statistics, bounds = results
    return (*tensors, out, statistics, bounds), ()


def _backward(
    grads: Tensors, saved: Tensors, _: int, options: ContextAttentionOptions, extra: tuple[Any, ...],
    wanted: Sequence[bool], plans: Plans,
) -> Tensors:  # fmt: skip
    """Returns gradients of q, k, v and the sink."""
    *tensors, out, statistics, bounds = saved
    agreed, sink = AgreedCall.of(tuple(bounds.tolist()), tuple(tensors), options), tensors[3]
    grad = torch.zeros_like(out) if grads[0] is None else grads[0]
    q, k, v, grad, grad_lse = agreed.fill_tail(*tensors[:3], grad, grads[1])
    plan, fused = agreed.plan, options.kernels and is_fused(q, k, v, agreed.layout_bounds, options)
    dq, dk, dv = (empty_in_order_of(x, x.shape[-1]) for x in (q, k, v))
    dsink = None if sink is None else torch.zeros_like(sink, dtype=torch.promote_types(sink.dtype, torch.float32))
    by_step: list[tuple[list[Tensor], list[Tensor]]] = [([], []) for _ in plan.steps]
    for number, call, keys, values in agreed.run(k, v):
        rows = call.queries
        into = [empty_in_order_of(x, x.shape[-1]) for x in (keys, values)]
        results = ChunkResults(
            out[:, rows], statistics[..., rows], grad[:, rows], None if grad_lse is None else grad_lse[..., rows]
        )
        inputs = ChunkInputs(q[:, rows], keys, values, sink, call, options)
        dsink_chunk = backward_chunk(inputs, results, OPERATOR.plans, (dq[:, rows], into[0], into[1]), fused)
        for each, gradient in zip(by_step[number], into):
            each.append(gradient)
        if dsink is not None:
            dsink += dsink_chunk
    _return_gradients(agreed, [[_join(g, x) for g, x in zip(each, (k, v))] for each in by_step], (dk, dv), options)
    return dq, dk, dv, None if dsink is None or sink is None else dsink.to(sink.dtype)


def _join(gradients: list[Tensor], keys: Tensor) -> Tensor:
    """Returns gradients of the keys of a step's calls as rows (M, B, H, D)."""
    if not gradients:
        return _as_rows(keys[:, :0])
    return _as_rows(gradients[0] if len(gradients) == 1 else torch.cat(gradients, dim=1))


def _return_gradients(
    agreed: AgreedCall, by_step: list[list[Tensor]], into: tuple[Tensor, Tensor], options: ContextAttentionOptions
) -> None:
    """Send gradients of keys and values to the ranks that own these, and write those of this rank's part."""
    plan = agreed.plan
    last = len(by_step) - 1
    gradients = [
        [x[step.rows] for x in by_step[last if plan.single_call else number]]
        for number, step in enumerate(plan.steps)
    ]
    if plan.whole:
        for place, gradient in zip(into, by_step[-1]):
            place[:, plan.shared :] = gradient[-plan.whole :].transpose(0, 1)
    shared = [x[:, : plan.shared].transpose(0, 1) for x in into]
    sums = [place if place.is_contiguous() else torch.empty_like(place).contiguous() for place in shared]
    send_gradients(plan, gradients, sums, agreed.group, options.kernels)
    for place, total in zip(shared, sums):
        if total is not place:
            place.copy_(total)


def _backward_fake(grads: Tensors, saved: Tensors, *_: Any) -> Tensors:
    sink = saved[3]
    dsink = None if sink is None else sink.new_empty(sink.shape)
    return *(empty_in_order_of(x, x.shape[-1]) for x in saved[:3]), dsink


_TENSORS = "Tensor q, Tensor k, Tensor v, Tensor? sink, Tensor? cu_seqlens"
OPERATOR = CustomOperator(
    name=NAME,
    any_backend=True,
    tensors=_TENSORS,
    options="SymInt? left, SymInt? right, float scale, str? precision, float? softcap, bool kernels, str layout, "
    "str group",
    num_results=4,
    options_type=ContextAttentionOptions,
    forward=_forward,
    fake=_fake,
    gradient=Gradient(
        grad_outputs="Tensor? grad, Tensor? grad_lse",
        saved=f"{_TENSORS}, Tensor out, Tensor statistics, Tensor bounds",
        num_gradients=4,
        save=_save,
        run=_backward,
        fake=_backward_fake,
    ),
)
