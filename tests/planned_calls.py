"""Calls of the operators that have plans, and what they give with nothing known of any call."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from warploom import flash_attention, linear_attention, lrpe_rotate, tpa_attention, tpa_decode
from warploom.ops.flash_attention import api as flash_api
from warploom.ops.linear_attention import api as linear_api
from warploom.ops.lrpe import api as lrpe_api
from warploom.ops.tpa import api as tpa_api
from warploom.runtime.plans import ALL_PLANS

FUNCTIONS = (
    flash_api._function, linear_api._function, lrpe_api._cosine, lrpe_api._rotate, tpa_api._attention,
    tpa_api._decode,
)  # fmt: skip
Tensor = torch.Tensor
Inputs = dict[str, Any]
Change = Callable[[Inputs], Inputs]


@contextmanager
def no_plans() -> Iterator[None]:
    """Nothing is known of any call, and nothing of what happens here afterwards."""
    with pytest.MonkeyPatch.context() as patch:
        for plans in ALL_PLANS:
            patch.setattr(plans, "known", {})
            patch.setattr(plans, "recent", ())
        yield


def forget_plans() -> None:
    """Nothing is known of any call."""
    for plans in ALL_PLANS:
        plans.forget()


def results(function: Callable[..., Any], inputs: Inputs) -> tuple[Tensor, ...]:
    """Outputs and gradients.

    Gradients of outputs come in the memory order that ``inputs["grad_order"]`` says, and of as many outputs as
    ``inputs["differentiated"]`` says.
    """
    inputs = dict(inputs)
    order, differentiated = inputs.pop("grad_order", None), inputs.pop("differentiated", None)
    outputs = function(**inputs, backend="triton")
    outputs = (outputs,) if isinstance(outputs, Tensor) else outputs
    wanted = [value for value in inputs.values() if isinstance(value, Tensor) and value.requires_grad]
    if not wanted:
        return outputs
    generator = torch.Generator().manual_seed(1)
    grads = [torch.randn(o.shape, generator=generator).to(o) for o in outputs]
    if order is not None:
        inverse = [order.index(axis) for axis in range(len(order))]
        grads = [g.permute(order).contiguous().permute(inverse) if g.dim() == len(order) else g for g in grads]
    pulled_back = torch.autograd.grad(outputs[:differentiated], wanted, grads[:differentiated])
    return *(o.detach() for o in outputs), *pulled_back


def changed(change: Callable[[Tensor], Tensor], *names: str) -> Change:
    """The tensors of these names, changed, and with or without gradient as they were."""

    def make(inputs: Inputs) -> Inputs:
        new = {name: change(inputs[name].detach()).requires_grad_(inputs[name].requires_grad) for name in names}
        return {**inputs, **new}

    return make


def with_gaps(x: Tensor) -> Tensor:
    """The same values, features not adjacent."""
    return x.repeat_interleave(2, -1)[..., ::2]


def attention(device: torch.device) -> Inputs:
    batch = 2 if device.type == "cuda" else 1  # the interpreter runs one program after the other
    made = {name: torch.randn(batch, 17, 2, 16).to(device).requires_grad_() for name in "qkv"}
    return {**made, "causal": True, "return_lse": True}


def packed_attention(device: torch.device) -> Inputs:
    made = {name: torch.randn(1, 17, 2, 16).to(device).requires_grad_() for name in "qkv"}
    return {**made, "cu_seqlens_q": torch.tensor([0, 5, 17], device=device)}


OTHER_BOUNDS = torch.tensor([0, 11, 17])


def linear(device: torch.device, batch: int = 1, sequences: int = 1) -> Inputs:
    tokens, heads, features, values = 9, 1, 8, 4
    shapes = {
        "q": (batch, tokens, heads, features), "k": (batch, tokens, heads, features),
        "v": (batch, tokens, heads, values), "theta": (heads, 3), "decay": (heads,),
        "initial_state": (sequences, heads, features, values),
    }  # fmt: skip
    made: Inputs = {name: torch.randn(shape) for name, shape in shapes.items()}
    made["decay"] = -0.1 * made["decay"].abs()
    made = {name: x.to(device).requires_grad_(name != "decay") for name, x in made.items()}
    return {**made, "encoding": "rotate", "return_state": True}


def packed_linear(device: torch.device) -> Inputs:
    return {
        **linear(device, sequences=2),
        "cu_seqlens": torch.tensor([0, 3, 9], device=device),
        "offset": 3,
    }


def offset_linear(device: torch.device) -> Inputs:
    return {**linear(device, 2, 2), "offset": torch.tensor([4, 90], device=device)}


def encoding(device: torch.device) -> Inputs:
    x, theta = torch.randn(2, 12, 3, 8).to(device), torch.rand(3, 2).to(device)  # as many as two axes have
    return {"x": x.requires_grad_(), "theta": theta.requires_grad_()}


def encoding_over_the_sequence(device: torch.device) -> Inputs:
    return {**encoding(device), "activation": "softmax_sequence"}


def packed_encoding(device: torch.device) -> Inputs:
    inputs = changed(lambda x: x[:1], "x")(encoding(device))
    return {**inputs, "cu_seqlens": torch.tensor([0, 5, 12], device=device), "offset": 3}


def placed_encoding(device: torch.device) -> Inputs:
    return {**encoding(device), "position_ids": torch.arange(12, device=device)}


def offset_encoding(device: torch.device) -> Inputs:
    return {**encoding(device), "offset": torch.tensor([4, 90], device=device)}


def factors(device: torch.device) -> Inputs:
    shapes = {
        "aq": (2, 3, 4, 2), "ak": (2, 150, 4), "av": (2, 150, 4),
        "bq": (2, 3, 2, 16), "bk": (2, 150, 16), "bv": (2, 150, 16),
    }  # fmt: skip
    return {name: torch.randn(shape).to(device) for name, shape in shapes.items()}


def factors_with_lengths(device: torch.device) -> Inputs:
    return {**factors(device), "seqused_k": torch.tensor([150, 20], device=device)}


def factors_with_gradients(device: torch.device) -> Inputs:
    some = {name: (x if name[1] == "q" else x[:, :5])[:1] for name, x in factors(device).items()}
    return {name: x.clone().requires_grad_() for name, x in some.items()}


USUAL: dict[str, tuple[Callable[..., Any], Callable[[torch.device], Inputs]]] = {
    "flash_attention": (flash_attention, attention),
    "linear_attention": (linear_attention, linear),
    "lrpe_rotate": (lrpe_rotate, encoding),
    "tpa_decode": (tpa_decode, factors_with_lengths),
    "tpa_attention": (tpa_attention, factors_with_gradients),
}
"""Of each operator that has plans, a call."""
