"""Flash attention on kernels: what dispatch asks of ``torch.ops.warploom.flash_attention`` and of its backward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from warploom.ops.flash_attention.problem import Logits, Masking, MaskSpec
from warploom.ops.flash_attention.validation import FlashInputs, FlashOptions, MaskedInputs
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


class Saved(NamedTuple):
    """The tensors that a backward takes."""

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    statistics: Tensor
    sink: Tensor | None
    cu_seqlens_q: Tensor | None
    cu_seqlens_k: Tensor | None
    seqused_k: Tensor | None


def _forward(inputs: FlashInputs, _: int, options: FlashOptions, plans: Plans) -> Tensors:
    """Returns attention, lse, and the statistics from which the backward computes the weights again."""
    return _write(inputs, None, options, plans)


def _write(inputs: FlashInputs, out: Tensor | None, options: FlashOptions, plans: Plans) -> Tensors:
    """Returns attention, in ``out`` if that is given, lse and statistics."""
    mask, logits = _mask_and_logits(options, inputs, inputs.block_table)
    rest = (mask, options.scale, options.precision, plans, None, logits, out, options.bits == "chunks")
    return engine.forward(inputs.q, inputs.k, inputs.v, *rest)


def _mask_and_logits(
    options: FlashOptions, inputs: FlashInputs | Saved | DualInputs, block_table: Tensor | None
) -> tuple[MaskSpec, Logits]:
    """Returns mask and logits for the kernels, which read numbers of heads or batch entries as adjacent ones."""
    seqused_k, sink = inputs.seqused_k, inputs.sink
    if seqused_k is not None:
        seqused_k = seqused_k.contiguous()
    if block_table is not None:
        block_table = block_table.contiguous()
    if sink is not None:
        sink = sink.resolve_neg().contiguous()
    bounds = inputs.cu_seqlens_q, inputs.cu_seqlens_k
    return MaskSpec(options.left, options.right, *bounds, seqused_k, block_table), Logits(options.softcap, sink)


def _fake(inputs: FlashInputs, options: FlashOptions) -> Tensors:
    q = inputs.q
    lse = q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=torch.float32)
    return empty_in_order_of(q, inputs.v.shape[-1]), lse, lse.new_empty((2, *lse.shape))


def _forward_into(tensors: Tensors, number: int, options: FlashOptions, plans: Plans) -> Tensors:
    """Write attention, and return lse, of which a call takes none or the first."""
    *given, out = tensors
    inputs = FlashInputs(*given)
    check_address("flash_attention", "out", out, q=inputs.q, k=inputs.k, v=inputs.v)
    _, lse, _ = _write(inputs, out, options, plans)
    torch.autograd.graph.increment_version(out)
    return (lse,)


def _fake_into(tensors: Tensors, options: FlashOptions) -> Tensors:
    return _fake(FlashInputs(*tensors[:-1]), options)[1:2]


def _save(
    inputs: FlashInputs, options: FlashOptions, results: Tensors, wanted: Sequence[bool]
) -> tuple[Tensors, tuple[Any, ...]]:
    """Save bounds of sequences with the tensors, so that autograd sees when they are changed in place."""
    out, _, statistics = results
    bounds = inputs.cu_seqlens_q, inputs.cu_seqlens_k, inputs.seqused_k
    return (inputs.q, inputs.k, inputs.v, out, statistics, inputs.sink, *bounds), ()


def _backward(
    grads: Tensors, saved: Tensors, _: int, options: FlashOptions, extra: tuple[Any, ...], wanted: Sequence[bool],
    plans: Plans,
) -> Tensors:  # fmt: skip
    """Returns the gradients of q, k, v and the sink."""
    (grad, grad_lse), kept = grads, Saved(*saved)
    grad = torch.zeros_like(kept.out) if grad is None else grad
    mask, logits = _mask_and_logits(options, kept, None)
    rest = (kept.out, kept.statistics, mask, options.scale, options.precision, plans)
    return engine.backward(grad, grad_lse, kept.q, kept.k, kept.v, *rest, logits=logits)


def _backward_fake(grads: Tensors, saved: Tensors, *_: Any) -> Tensors:
    kept = Saved(*saved)
    dsink = None if kept.sink is None else kept.sink.new_empty(kept.sink.shape)
    return *(empty_in_order_of(x, x.shape[-1]) for x in (kept.q, kept.k, kept.v)), dsink


def _flops(inputs: FlashInputs, options: FlashOptions) -> int:
    """Returns the operations of two products of every query and key, hidden or not, as PyTorch counts them."""
    q, k, v, table = inputs.q, inputs.k, inputs.v, inputs.block_table
    if table is not None or inputs.on_cache:
        keys = k.shape[1] * (1 if table is None else table.shape[1])
        return 2 * int(q.shape[0] * q.shape[1] * keys * q.shape[2] * (q.shape[3] + v.shape[3]))
    pairs = count_attention_pairs(q, k, inputs.cu_seqlens_q, inputs.cu_seqlens_k)
    return 2 * pairs * int(q.shape[2] * (q.shape[3] + v.shape[3]))


def _backward_flops(grads: Tensors, saved: Tensors, options: FlashOptions) -> int:
    """Returns the operations of five products: q kᵀ again, and the gradients of the weights, v, q and k."""
    kept = Saved(*saved)
    pairs = count_attention_pairs(kept.q, kept.k, kept.cu_seqlens_q, kept.cu_seqlens_k)
    return 2 * pairs * int(kept.q.shape[2] * (3 * kept.q.shape[3] + 2 * kept.v.shape[3]))


_BOUNDS = "Tensor? sink, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? seqused_k"
_TENSORS = f"Tensor q, Tensor k, Tensor v, {_BOUNDS}, Tensor? block_table"
_OPTIONS = "SymInt? left, SymInt? right, float scale, str? precision, float? softcap, str bits"
OPERATOR = CustomOperator(
    name="flash_attention",
    tensors=_TENSORS,
    options=_OPTIONS,
    num_results=3,
    inputs_type=FlashInputs,
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


class MaskedSaved(NamedTuple):
    """The tensors that the backward of a call takes with a mask, a bias or slopes."""

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    statistics: Tensor
    sink: Tensor | None
    bias: Tensor | None
    alibi: Tensor | None
    seqused_k: Tensor | None
    tiles: Tensor | None
    row_lists: Tensor | None
    column_lists: Tensor | None
    bits: Tensor | None
    column_bits: Tensor | None


def _masking_of(inputs: MaskedInputs | MaskedSaved, options: FlashOptions) -> tuple[MaskSpec, Logits, Masking]:
    """Returns bounds, logits and masks, biases and slopes, for the kernels."""
    seqused_k = None if inputs.seqused_k is None else inputs.seqused_k.contiguous()
    sink, bias, alibi = (None if x is None else x.resolve_neg() for x in (inputs.sink, inputs.bias, inputs.alibi))
    mask = MaskSpec(options.left, options.right, seqused_k=seqused_k)
    sink = None if sink is None else sink.contiguous()
    lists = (None if x is None else x.contiguous() for x in inputs[9:])
    return mask, Logits(options.softcap, sink), Masking(bias, alibi, *lists)


def _masked_forward(inputs: MaskedInputs, _: int, options: FlashOptions, plans: Plans) -> Tensors:
    mask, logits, masking = _masking_of(inputs, options)
    rest = (options.scale, options.precision, plans, logits)
    return engine.masked_forward(inputs.q, inputs.k, inputs.v, mask, masking, *rest)


def _masked_save(
    inputs: MaskedInputs, options: FlashOptions, results: Tensors, wanted: Sequence[bool]
) -> tuple[Tensors, tuple[Any, ...]]:
    out, _, statistics = results
    rest = (inputs.sink, inputs.bias, inputs.alibi, *inputs[8:])
    return (inputs.q, inputs.k, inputs.v, out, statistics, *rest), ()


def _masked_backward(
    grads: Tensors, saved: Tensors, _: int, options: FlashOptions, extra: tuple[Any, ...], wanted: Sequence[bool],
    plans: Plans,
) -> Tensors:  # fmt: skip
    """Returns the gradients of q, k, v, the sink and the bias."""
    (grad, grad_lse), kept = grads, MaskedSaved(*saved)
    grad = torch.zeros_like(kept.out) if grad is None else grad
    mask, logits, masking = _masking_of(kept, options)
    inputs = engine.BackwardInputs(grad, grad_lse, kept.q, kept.k, kept.v, kept.out, kept.statistics, mask)
    rest = (options.scale, options.precision, plans, logits, bool(wanted[4]))
    return engine.masked_backward(grad, grad_lse, inputs, masking, *rest)


def _masked_backward_fake(
    grads: Tensors, saved: Tensors, options: Any, extra: Any, wanted: Sequence[bool]
) -> Tensors:
    kept = MaskedSaved(*saved)
    bias = kept.bias if wanted[4] else None
    return tuple(None if x is None else x.new_empty(x.shape) for x in (kept.q, kept.k, kept.v, kept.sink, bias))


def _masked_backward_flops(grads: Tensors, saved: Tensors, options: FlashOptions) -> int:
    kept = MaskedSaved(*saved)
    pairs = count_attention_pairs(kept.q, kept.k, None, None)
    return 2 * pairs * int(kept.q.shape[2] * (3 * kept.q.shape[3] + 2 * kept.v.shape[3]))


_MASK = ", ".join(f"Tensor? {name}" for name in MaskedInputs._fields[9:])
OPERATOR_MASKED = CustomOperator(
    name="flash_attention_masked",
    tensors="Tensor q, Tensor k, Tensor v, Tensor? sink, Tensor? bias, Tensor? alibi, Tensor? cu_seqlens_q, "
    f"Tensor? cu_seqlens_k, Tensor? seqused_k, {_MASK}",
    options=_OPTIONS,
    num_results=3,
    inputs_type=MaskedInputs,
    options_type=FlashOptions,
    forward=_masked_forward,
    fake=lambda inputs, options: _fake(inputs.unmasked, options),
    flops=lambda inputs, options: _flops(inputs.unmasked, options),
    gradient=Gradient(
        grad_outputs="Tensor? grad, Tensor? grad_lse",
        saved="Tensor q, Tensor k, Tensor v, Tensor out, Tensor statistics, Tensor? sink, Tensor? bias, "
        f"Tensor? alibi, Tensor? seqused_k, {_MASK}",
        num_gradients=5,
        save=_masked_save,
        run=_masked_backward,
        fake=_masked_backward_fake,
        flops=_masked_backward_flops,
    ),
)


class DualInputs(NamedTuple):
    """The tensors of a call in forward mode, with their tangents, which are None for zero."""

    q: Tensor
    k: Tensor
    v: Tensor
    sink: Tensor | None
    cu_seqlens_q: Tensor | None
    cu_seqlens_k: Tensor | None
    seqused_k: Tensor | None
    dq: Tensor | None
    dk: Tensor | None
    dv: Tensor | None
    dsink: Tensor | None


def _forward_dual(inputs: DualInputs, _: int, options: FlashOptions, plans: Plans) -> Tensors:
    """Returns attention and lse, and their tangents."""
    mask, logits = _mask_and_logits(options, inputs, None)
    dsink = None if inputs.dsink is None else inputs.dsink.contiguous()
    tangents = inputs.dq, inputs.dk, inputs.dv, dsink
    return engine.jvp(inputs.q, inputs.k, inputs.v, tangents, mask, options.scale, options.precision, plans, logits)


def _fake_dual(inputs: DualInputs, options: FlashOptions) -> Tensors:
    out, lse, _ = _fake(FlashInputs(*inputs[:7]), options)
    return out, lse, torch.empty_like(out), torch.empty_like(lse)


def _dual_flops(inputs: DualInputs, options: FlashOptions) -> int:
    """Returns the operations of two products as in `_flops`, and of one or two for each tangent."""
    q, k, v = inputs[:3]
    pairs = count_attention_pairs(q, k, inputs.cu_seqlens_q, inputs.cu_seqlens_k)
    of_logits = (inputs.dq is not None) + (inputs.dk is not None)
    of_values = (of_logits > 0) + (inputs.dv is not None)
    return 2 * pairs * int(q.shape[2] * ((1 + of_logits) * q.shape[3] + (1 + of_values) * v.shape[3]))


OPERATOR_DUAL = CustomOperator(
    name="flash_attention_jvp",
    tensors=f"Tensor q, Tensor k, Tensor v, {_BOUNDS}, Tensor? dq, Tensor? dk, Tensor? dv, Tensor? dsink",
    options=_OPTIONS,
    num_results=4,
    inputs_type=DualInputs,
    options_type=FlashOptions,
    forward=_forward_dual,
    fake=_fake_dual,
    flops=_dual_flops,
    why_no_gradient="tangents of flash_attention, which kernels compute in forward mode, have no gradient; "
    'call with backend="torch" for one',
)

OPERATOR_INTO = CustomOperator(
    name="flash_attention_into",
    tensors=f"{_TENSORS}, Tensor(a!) out",
    options=_OPTIONS,
    num_results=1,
    options_type=FlashOptions,
    forward=_forward_into,
    fake=_fake_into,
    flops=lambda tensors, options: _flops(FlashInputs(*tensors[:-1]), options),
    why_no_gradient="flash_attention with out= has no gradient; call it under torch.no_grad()",
)
