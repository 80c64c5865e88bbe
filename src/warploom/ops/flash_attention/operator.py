"""Flash attention on kernels: what dispatch asks of ``torch.ops.warploom.flash_attention`` and of its backward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from warploom.ops.flash_attention.problem import Logits, MaskSpec
from warploom.ops.flash_attention.validation import FlashOptions
from warploom.runtime.dispatch import CustomOperator, Gradient, LazyModule, Tensors
from warploom.runtime.in_place import check_address
from warploom.runtime.memory_order import empty_in_order_of
from warploom.runtime.modes import count_attention_pairs
from warploom.runtime.plans import Plans

if TYPE_CHECKING:
    from warploom.ops.flash_attention import engine
else:
    engine = LazyModule(".engine", __package__)

Tensor = torch.Tensor


def _forward(tensors: Tensors, _: int, options: FlashOptions, plans: Plans) -> Tensors:
    """Returns attention, lse, and the statistics from which the backward computes the weights again."""
    return _write(tensors, None, options, plans)


def _write(tensors: Tensors, out: Tensor | None, options: FlashOptions, plans: Plans) -> Tensors:
    """Returns attention, in ``out`` if that is given, lse and statistics."""
    q, k, v, *rest = tensors
    mask, logits = _mask_and_logits(options, *rest)
    chunks = options.bits == "chunks"
    return engine.forward(q, k, v, mask, options.scale, options.precision, plans, None, logits, out, chunks)


def _mask_and_logits(
    options: FlashOptions,
    sink: Tensor | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    seqused_k: Tensor | None,
    block_table: Tensor | None = None,
) -> tuple[MaskSpec, Logits]:
    """Returns mask and logits for the kernels, which read numbers of heads or batch entries as adjacent ones."""
    if seqused_k is not None:
        seqused_k = seqused_k.contiguous()
    if block_table is not None:
        block_table = block_table.contiguous()
    if sink is not None:
        sink = sink.resolve_neg().contiguous()
    mask = MaskSpec(options.left, options.right, cu_seqlens_q, cu_seqlens_k, seqused_k, block_table)
    return mask, Logits(options.softcap, sink)


def _fake(tensors: Tensors, options: FlashOptions) -> Tensors:
    q, _, v, *_ = tensors
    batch, tokens, heads, _ = q.shape
    lse = q.new_empty((batch, heads, tokens), dtype=torch.float32)
    return empty_in_order_of(q, v.shape[-1]), lse, lse.new_empty((2, *lse.shape))


def _forward_into(tensors: Tensors, number: int, options: FlashOptions, plans: Plans) -> Tensors:
    """Write attention, and return lse, of which a call takes none or the first."""
    out = tensors[-1]
    check_address("flash_attention", "out", out, q=tensors[0], k=tensors[1], v=tensors[2])
    _, lse, _ = _write(tensors[:-1], out, options, plans)
    torch.autograd.graph.increment_version(out)
    return (lse,)


def _fake_into(tensors: Tensors, options: FlashOptions) -> Tensors:
    return _fake(tensors[:-1], options)[1:2]


def _save(
    tensors: Tensors, options: FlashOptions, results: Tensors, wanted: Sequence[bool]
) -> tuple[Tensors, tuple[Any, ...]]:
    """Save bounds of sequences with the tensors, so that autograd sees when they are changed in place."""
    q, k, v, sink, *bounds, _ = tensors
    out, _, statistics = results
    return (q, k, v, out, statistics, sink, *bounds), ()


def _backward(
    grads: Tensors, saved: Tensors, _: int, options: FlashOptions, extra: tuple[Any, ...], wanted: Sequence[bool],
    plans: Plans,
) -> Tensors:  # fmt: skip
    """Returns the gradients of q, k, v and the sink."""
    (grad, grad_lse), (q, k, v, out, statistics, sink, *bounds) = grads, saved
    grad = torch.zeros_like(out) if grad is None else grad
    mask, logits = _mask_and_logits(options, sink, *bounds)
    rest = (mask, options.scale, options.precision, plans)
    return engine.backward(grad, grad_lse, q, k, v, out, statistics, *rest, logits=logits)


def _backward_fake(grads: Tensors, saved: Tensors, *_: Any) -> Tensors:
    sink = saved[5]
    dsink = None if sink is None else sink.new_empty(sink.shape)
    return *(empty_in_order_of(x, x.shape[-1]) for x in saved[:3]), dsink


def _flops(tensors: Tensors, options: FlashOptions) -> int:
    """Returns the operations of two products of every query and key, hidden or not, as PyTorch counts them."""
    q, k, v, _, *cu_seqlens, seqused_k, block_table = tensors
    if block_table is not None or (cu_seqlens[0] is not None and seqused_k is not None):
        keys = k.shape[1] * (1 if block_table is None else block_table.shape[1])
        return 2 * int(q.shape[0] * q.shape[1] * keys * q.shape[2] * (q.shape[3] + v.shape[3]))
    return 2 * count_attention_pairs(q, k, *cu_seqlens) * int(q.shape[2] * (q.shape[3] + v.shape[3]))


def _backward_flops(grads: Tensors, saved: Tensors, options: FlashOptions) -> int:
    """Returns the operations of five products: q kᵀ again, and the gradients of the weights, v, q and k."""
    q, k, v, _, _, _, *cu_seqlens, _ = saved
    return 2 * count_attention_pairs(q, k, *cu_seqlens) * int(q.shape[2] * (3 * q.shape[3] + 2 * v.shape[3]))


_BOUNDS = "Tensor? sink, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? seqused_k"
_TENSORS = f"Tensor q, Tensor k, Tensor v, {_BOUNDS}, Tensor? block_table"
_OPTIONS = "SymInt? left, SymInt? right, float scale, str? precision, float? softcap, str bits"
OPERATOR = CustomOperator(
    name="flash_attention",
    tensors=_TENSORS,
    options=_OPTIONS,
    num_results=3,
    options_type=FlashOptions,
    forward=_forward,
    fake=_fake,
    flops=_flops,
    gradient=Gradient(
        grad_outputs="Tensor? grad, Tensor? grad_lse",
        saved=f"Tensor q, Tensor k, Tensor v, Tensor out, Tensor statistics, {_BOUNDS}",
        num_gradients=4,
        save=_save,
        run=_backward,
        fake=_backward_fake,
        flops=_backward_flops,
    ),
)

OPERATOR_INTO = CustomOperator(
    name="flash_attention_into",
    tensors=f"{_TENSORS}, Tensor(a!) out",
    options=_OPTIONS,
    num_results=1,
    options_type=FlashOptions,
    forward=_forward_into,
    fake=_fake_into,
    flops=lambda tensors, options: _flops(tensors[:-1], options),
    why_no_gradient="flash_attention with out= has no gradient; call it under torch.no_grad()",
)
