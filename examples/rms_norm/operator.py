"""The kernels as an operator of PyTorch: what it returns, what it saves for the backward."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from warploom.runtime.dispatch import Gradient, Late, Operator, Tensors
from warploom.runtime.plans import Plans

if TYPE_CHECKING:
    from . import kernels
else:
    kernels = Late(".kernels", __package__)  # imports Triton


class Options(NamedTuple):
    """Options of the operator."""

    eps: float


def forward(tensors: Tensors, _: int, options: Options, plans: Plans) -> Tensors:
    """The result. Where nothing needs to be planned ahead, ``plans`` stay empty."""
    return (kernels.forward(*tensors, options.eps),)


def save(tensors: Tensors, options: Options, results: Tensors, wanted: Sequence[bool]) -> tuple[Tensors, Any]:
    """The tensors that the backward takes: the inputs. It has no options of its own."""
    return tensors, ()


def backward(
    grads: Tensors, saved: Tensors, _: int, options: Options, extra: Any, wanted: Sequence[bool], plans: Plans
) -> Tensors:
    """Gradients of x and weight."""
    return kernels.backward(*grads, *saved, options.eps)


OPERATOR = Operator(
    name="rms_norm",
    tensors="Tensor x, Tensor weight",
    options="float eps",
    results=1,
    options_type=Options,
    forward=forward,
    fake=lambda tensors, options: (torch.empty_like(tensors[0]),),
    gradient=Gradient(
        grads="Tensor grad",
        saved="Tensor x, Tensor weight",
        gradients=2,
        save=save,
        run=backward,
        fake=lambda grads, saved, *_: tuple(map(torch.empty_like, saved)),
    ),
)
