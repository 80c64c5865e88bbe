"""The kernels as an operator of PyTorch: what it returns, what it saves for the backward."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from warploom.runtime.dispatch import CustomOperator, Gradient, LazyModule, Tensors
from warploom.runtime.plans import Plans

if TYPE_CHECKING:
    from . import kernels
else:
    kernels = LazyModule(".kernels", __package__)  # imports Triton


class RmsNormInputs(NamedTuple):
    """The tensors of a call, by the same names from the public function to the kernels."""

    x: torch.Tensor
    weight: torch.Tensor


class RmsNormOptions(NamedTuple):
    """The options of a call."""

    eps: float


def forward(inputs: RmsNormInputs, _: int, options: RmsNormOptions, plans: Plans) -> Tensors:
    """Returns the result. Where nothing needs to be planned ahead, ``plans`` stay empty."""
    return (kernels.forward(inputs.x, inputs.weight, options.eps),)


def save(
    inputs: RmsNormInputs, options: RmsNormOptions, results: Tensors, wanted: Sequence[bool]
) -> tuple[Tensors, Any]:
    """Returns the tensors that the backward takes: the inputs. It has no options of its own."""
    return inputs, ()


def backward(
    grads: Tensors,
    saved: Tensors,
    _: int,
    options: RmsNormOptions,
    extra: Any,
    wanted: Sequence[bool],
    plans: Plans,
) -> Tensors:
    """Returns the gradients of x and weight."""
    inputs = RmsNormInputs(*saved)
    return kernels.backward(grads[0], inputs.x, inputs.weight, options.eps)


OPERATOR = CustomOperator(
    name="rms_norm",
    tensors="Tensor x, Tensor weight",
    options="float eps",
    num_results=1,
    inputs_type=RmsNormInputs,
    options_type=RmsNormOptions,
    forward=forward,
    fake=lambda inputs, options: (torch.empty_like(inputs.x),),
    gradient=Gradient(
        grad_outputs="Tensor grad",
        saved="Tensor x, Tensor weight",
        num_gradients=2,
        save=save,
        run=backward,
        fake=lambda grads, saved, *_: tuple(map(torch.empty_like, saved)),
    ),
)
