"""LRPE on kernels: what dispatch asks of the operator ``torch.ops.warploom.lrpe`` and of its backward."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from warploom.ops.lrpe.problem import Positions, reads_x, statistics_shape
from warploom.ops.lrpe.validation import Options
from warploom.runtime.dispatch import Gradient, Late, Operator, Tensors, apply
from warploom.runtime.memory_order import empty_in_order, empty_in_order_of, memory_order
from warploom.runtime.plans import Plans

if TYPE_CHECKING:
    from warploom.ops.lrpe import launches
    from warploom.ops.lrpe.softmax_sequence import launches as over_sequence
else:
    launches = Late(".launches", __package__)
    over_sequence = Late(".softmax_sequence.launches", __package__)

Tensor = torch.Tensor


def _positions(tensors: Sequence[Tensor | None], offset: int, options: Options) -> Positions:
    ids, offsets, cu_seqlens = tensors
    return Positions(ids, offsets, cu_seqlens, offset, options.prefix, options.grid)


def forward(tensors: Tensors, offset: int, options: Options, plans: Plans, **variant: Any) -> Tensors:
    """The encoding and, of softmax over the sequence, its statistics. ``variant``: see `variant_of`."""
    x, theta, *places = tensors
    positions = _positions(places, offset, options)
    if options.activation == "softmax_sequence":
        return over_sequence.forward(x, theta, positions, options.kind, options.theta_gradient, plans, **variant)
    table = variant.get("table")
    return launches.forward(x, theta, positions, options.kind, options.activation, table, plans), None


def _fake(tensors: Tensors, options: Options) -> Tensors:
    x, _, *places = tensors
    out = empty_in_order_of(x, 2 * x.shape[-1] if options.kind == "cosine" else x.shape[-1])
    if options.activation != "softmax_sequence":
        return out, None
    shape = statistics_shape(x, _positions(places, 0, options))
    return out, x.new_empty(shape, dtype=torch.float32)


def _save(
    tensors: Tensors, options: Options, results: Tensors, wanted: Sequence[bool]
) -> tuple[Tensors, tuple[Any, ...]]:
    """The tensors among the positions are saved, so that autograd sees when one is changed in place."""
    x, *others = tensors
    kept = x if reads_x(options.activation, wanted[1]) else None
    return (kept, *others, results[1]), (memory_order(x),)


def backward(
    grads: Tensors, saved: Tensors, offset: int, options: Options, extra: tuple[Any, ...], wanted: Sequence[bool],
    plans: Plans, **variant: Any,
) -> Tensors:  # fmt: skip
    """Gradients of x and theta."""
    (grad,), (x, theta, *places, statistics) = grads, saved
    result = None
    if x is None:  # of which only the gradient's layout is needed
        x = result = _empty_gradient(grad, extra[0], options.kind)
    positions = _positions(places, offset, options)
    kind, activation = options.kind, options.activation
    if activation == "softmax_sequence":
        return over_sequence.backward(grad, x, theta, positions, kind, statistics, wanted[1], plans, **variant)
    table = variant.get("table")
    return launches.backward(grad, x, theta, positions, kind, activation, wanted[1], table, plans, result)


def _backward_fake(
    grads: Tensors, saved: Tensors, options: Options, extra: tuple[Any, ...], wanted: Sequence[bool]
) -> Tensors:
    theta = saved[1]
    return _empty_gradient(grads[0], extra[0], options.kind), theta.new_empty(theta.shape) if wanted[1] else None


def _empty_gradient(grad: Tensor, order: Sequence[int], kind: str) -> Tensor:
    """Uninitialised gradient of x, from that of the result and from the order of x's axes in memory."""
    features = grad.shape[-1] // 2 if kind == "cosine" else grad.shape[-1]
    return empty_in_order(grad, (*grad.shape[:-1], features), order)


_PLACES = "Tensor? position_ids, Tensor? offsets, Tensor? cu_seqlens"
GRADIENT = Gradient(
    grads="Tensor grad",
    saved=f"Tensor? x, Tensor theta, {_PLACES}, Tensor? statistics",
    extra="int[] order",
    gradients=2,
    save=_save,
    run=backward,
    fake=_backward_fake,
)
OPERATOR = Operator(
    name="lrpe",
    tensors=f"Tensor x, Tensor theta, {_PLACES}",
    number="SymInt offset",
    options="SymInt prefix, SymInt[] grid, str kind, str activation, bool theta_gradient",
    results=2,  # the second is the statistics of softmax over the sequence, which its backward takes
    options_type=Options,
    forward=forward,
    fake=_fake,
    gradient=GRADIENT,
    differentiated=lambda options, wanted: options._replace(theta_gradient=wanted[1]),
)


def variant_of(**variant: Any) -> Callable[..., Tensor]:
    """A variant of LRPE for measurements, which no public call takes: plain eager calls, with a plain backward.

    Args:
        variant: ``table``, from `angle_table`, in the place of angles; ``block_parallel=True``, softmax over the
            sequence that cuts short sequences too.

    Returns:
        A function of x, theta, an offset, and options.
    """
    operator, plans = copy.copy(OPERATOR), Plans()
    operator.forward = partial(forward, **variant)
    operator.gradient = GRADIENT._replace(run=partial(backward, **variant))

    def run(x: Tensor, theta: Tensor, offset: int, options: Options) -> Tensor:
        out: Tensor = apply(operator, (x, theta, None, None, None), offset, options, plans)[0]
        return out

    return run


def angle_table(x: Tensor, theta: Tensor, positions: Positions, kind: str) -> Tensor:
    """Cosines and sines (N, 1 or H, 2·F) in float32 of every angle in a call, for positions that batches share."""
    features = x.shape[-1] if kind == "cosine" else x.shape[-1] // 2
    heads = theta.shape[0] if theta.dim() == 2 else 1
    ones = torch.ones((1, x.shape[1], heads, features), dtype=torch.float32, device=x.device)
    return launches.forward(ones, theta.detach(), positions, "cosine", "none", None, Plans())[0]
