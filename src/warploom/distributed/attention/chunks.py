"""A call of plain attention on one chunk of queries and the keys that it sees: on the kernels, or in PyTorch."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from warploom.distributed.attention.plan import PlainCall
from warploom.distributed.ranks import Bounds
from warploom.ops.flash_attention import reference
from warploom.ops.flash_attention.problem import Logits, MaskSpec
from warploom.runtime.modes import read_bounds
from warploom.runtime.plans import Plans, tensor_key

Tensor = torch.Tensor


class ContextAttentionOptions(NamedTuple):
    """Options of attention over ranks."""

    left: int | None
    right: int | None
    scale: float
    precision: str | None
    softcap: float | None
    kernels: bool
    layout: str
    group: str


class ChunkInputs(NamedTuple):
    """Inputs of a call on a chunk."""

    q: Tensor
    k: Tensor
    v: Tensor
    sink: Tensor | None
    call: PlainCall
    options: ContextAttentionOptions


class ChunkResults(NamedTuple):
    """Results of a call on a chunk, and their gradients."""

    out: Tensor
    statistics: Tensor
    grad: Tensor
    grad_lse: Tensor | None


def forward_chunk(inputs: ChunkInputs, plans: Plans, out: Tensor, lse: Tensor, statistics: Tensor) -> None:
    """Write outputs, lse, and what the kernels' backward needs.

    Args:
        inputs: Of the call.
        plans: Of calls like it, for the kernels.
        out: ``(B, n, Hq, E)``, as the rest the rows of the chunk.
        lse: ``(B, Hq, n)``
        statistics: ``(2, B, Hq, n)``
    """
    if not inputs.options.kernels:
        for place, x in zip((out, lse), _attend(*inputs)):
            place.copy_(x)
        return
    from warploom.ops.flash_attention.engine import forward

    q, k, v, _, _, options = inputs
    mask, logits, known = _describe(inputs, plans)
    found = forward(q, k, v, mask, options.scale, options.precision, known, logits=logits, out=out)
    lse.copy_(found[1])
    statistics.copy_(found[2])


def backward_chunk(
    inputs: ChunkInputs, results: ChunkResults, plans: Plans, into: tuple[Tensor, Tensor, Tensor], fused: bool
) -> Any:
    """Write the gradients of q, k and v into tensors, and return that of the sink.

    Args:
        inputs: Of the call.
        results: Of the call, and their gradients.
        plans: Of calls like it, for the kernels.
        into: Where the gradients go.
        fused: Whether one kernel forms all of them, as `is_fused` says.
    """
    q, k, v, sink, call, options = inputs
    out, statistics, grad, grad_lse = results
    if options.kernels:
        from warploom.ops.flash_attention.engine import backward

        mask, logits, known = _describe(inputs, plans)
        return backward(
            grad, grad_lse, q, k, v, out, statistics.contiguous(), mask, options.scale, options.precision, known,
            results=into, logits=logits, fused=fused,
        )[3]  # fmt: skip
    with torch.enable_grad():
        leaves = [None if x is None else x.detach().requires_grad_() for x in (q, k, v, sink)]
        out, lse = _attend(*leaves, call, options)  # type: ignore[arg-type, call-arg]
        grads = (grad, torch.zeros_like(lse) if grad_lse is None else grad_lse)
        found = torch.autograd.grad((out, lse), [x for x in leaves if x is not None], grads)
    for place, gradient in zip(into, found):
        place.copy_(gradient)
    return None if sink is None else found[3]


def _attend(
    q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, call: PlainCall, options: ContextAttentionOptions
) -> tuple[Tensor, Tensor]:
    """Returns outputs and lse of a call, in PyTorch."""
    cu_seqlens_q, cu_seqlens_k = read_bounds(call.cu_seqlens_q, call.cu_seqlens_k)
    return reference.flash_attention(  # type: ignore[return-value]
        q, k, v, scale=options.scale, window=(call.left, call.right), softcap=options.softcap, sink=sink,
        cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, float32_precision=options.precision,
        return_lse=True,
    )  # fmt: skip


def _describe(inputs: ChunkInputs, plans: Plans) -> tuple[MaskSpec, Logits, Plans]:
    """Returns a call as the kernels know it, and their plans of it."""
    q, k, v, sink, call, options = inputs
    known = plans.get(
        (*map(tensor_key, (q, k, v, sink, call.cu_seqlens_q)), call.left, call.right, *options), Plans
    )
    sink = None if sink is None else sink.resolve_neg().contiguous()
    return (
        MaskSpec(call.left, call.right, call.cu_seqlens_q, call.cu_seqlens_k),
        Logits(options.softcap, sink),
        known,
    )


def is_fused(q: Tensor, k: Tensor, v: Tensor, bounds: Bounds, options: ContextAttentionOptions) -> bool:
    """Returns whether one GPU forms all gradients of the whole in one kernel: if chunks do, dq has its bits."""
    from warploom.ops.flash_attention import engine

    return engine.is_fused(q, k, v, bounds, options.left, options.right)
