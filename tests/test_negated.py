"""Tensors whose sign is yet to be changed in memory, such as the imaginary part of a conjugate: right everywhere.

Autograd of complex numbers hands such gradients to a backward.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from warploom import flash_attention, linear_attention, lrpe_cosine, lrpe_rotate, tpa_attention, tpa_decode
from warploom.runtime.backend import HAS_TRITON

if not HAS_TRITON:
    pytest.skip("needs Triton", allow_module_level=True)

from planned_calls import (
    Inputs,
    attention,
    encoding,
    encoding_over_the_sequence,
    factors_with_gradients,
    factors_with_lengths,
    linear,
    no_plans,
    offset_encoding,
    packed_attention,
    packed_encoding,
    placed_encoding,
)

from warploom.ops.rotary_attention.api import rotary_attention

Tensor = torch.Tensor
Make = Callable[[torch.device], Inputs]


def turned(qkv: Tensor, theta: Tensor, backend: str = "triton") -> Tensor:
    return rotary_attention(qkv, theta, 2, 0.5)


def projection(device: torch.device) -> Inputs:
    return {"qkv": torch.randn(1, 9, 4, 8).to(device).requires_grad_(), "theta": torch.rand(1, 4).to(device)}


CALLS: dict[str, tuple[Callable[..., Any], Make]] = {
    "flash_attention": (flash_attention, attention),
    "flash_attention_packed": (flash_attention, packed_attention),
    "linear_attention": (linear_attention, linear),
    "lrpe_rotate": (lrpe_rotate, encoding),
    "lrpe_cosine_packed": (lrpe_cosine, packed_encoding),
    "lrpe_cosine_placed": (lrpe_cosine, placed_encoding),
    "lrpe_rotate_offset": (lrpe_rotate, offset_encoding),
    "lrpe_over_the_sequence": (lrpe_rotate, encoding_over_the_sequence),
    "tpa_attention": (tpa_attention, factors_with_gradients),
    "tpa_decode": (tpa_decode, factors_with_lengths),
    "rotary_attention": (turned, projection),
}
WITH_GRADIENT = [name for name in CALLS if name != "tpa_decode"]
tensors = pytest.mark.parametrize(
    ("name", "argument"),
    [
        pytest.param(name, argument, id=f"{name}-{argument}")
        for name, (_, make) in CALLS.items()
        for argument, value in make(torch.device("cpu")).items()
        if isinstance(value, Tensor)
    ],
)


def lazily(x: Tensor) -> Tensor:
    """The same values, in memory with the other sign."""
    if not x.is_floating_point():
        return torch._neg_view(-x)
    return torch.conj(torch.complex(torch.zeros_like(x), -x)).imag


def negated(inputs: Inputs, *names: str) -> Inputs:
    new = {name: lazily(inputs[name].detach()).requires_grad_(inputs[name].requires_grad) for name in names}
    return {**inputs, **new}


def results(function: Callable[..., Any], inputs: Inputs, change: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """Outputs, and gradients from gradients of the outputs that ``change`` has made."""
    outputs = function(**inputs, backend="triton")
    outputs = (outputs,) if isinstance(outputs, Tensor) else outputs
    wanted = [value for value in inputs.values() if isinstance(value, Tensor) and value.requires_grad]
    if not wanted:
        return list(outputs)
    grads = [torch.linspace(-1, 2, o.numel(), device=o.device).view_as(o) for o in outputs]
    return [*(o.detach() for o in outputs), *torch.autograd.grad(outputs, wanted, [change(g) for g in grads])]


def assert_equal(found: list[Tensor], expected: list[Tensor]) -> None:
    assert len(found) == len(expected)
    assert all(map(torch.equal, found, expected))


def as_they_are(x: Tensor) -> Tensor:
    return x


@pytest.mark.sample(2)
@tensors
def test_an_argument(name: str, argument: str, device: torch.device) -> None:
    function, make = CALLS[name]
    inputs = make(device)
    with no_plans():
        expected = results(function, inputs, as_they_are)
    other = negated(inputs, argument)
    assert other[argument].is_neg()
    with no_plans():  # planned, known by key, and recognised
        for each in (inputs, other) * 3:
            assert_equal(results(function, each, as_they_are), expected)
    with no_plans():
        for each in (other, other, other, inputs):
            assert_equal(results(function, each, as_they_are), expected)


@pytest.mark.parametrize("precision", ["highest", "high", "medium"])
def test_precisions_of_pytorch(precision: str, device: torch.device) -> None:
    q = torch.conj(torch.randn(1, 5, 2, 8, dtype=torch.complex64).to(device)).imag
    found, expected = (flash_attention(x, x, x, float32_precision=precision, backend="torch") for x in (q, +q))
    assert q.is_neg()
    assert torch.equal(found, expected)


@pytest.mark.parametrize("name", WITH_GRADIENT)
def test_gradients(name: str, device: torch.device) -> None:
    function, make = CALLS[name]
    inputs = make(device)
    with no_plans():
        expected = results(function, inputs, as_they_are)
        for _ in range(3):
            assert_equal(results(function, inputs, lazily), expected)
            assert_equal(results(function, inputs, as_they_are), expected)


@pytest.mark.parametrize("name", ["flash_attention", "linear_attention", "lrpe_rotate"])
def test_gradients_from_complex_numbers(name: str, device: torch.device) -> None:
    function, make = CALLS[name]
    inputs = {key: value for key, value in make(device).items() if not key.startswith("return_")}
    wanted = [value for value in inputs.values() if isinstance(value, Tensor) and value.requires_grad]
    handed_over = []

    def run() -> Tensor:
        out = function(**inputs, backend="triton")
        out.register_hook(lambda grad: handed_over.append(grad.is_neg()))
        return out

    out = run()
    one, i = torch.ones_like(out), torch.complex(torch.zeros_like(out), torch.ones_like(out))
    product = torch.complex(one, out).conj() * i  # o + i
    found = torch.autograd.grad(product.real, wanted, one)
    assert handed_over == [True]
    assert_equal(list(found), list(torch.autograd.grad(run(), wanted, one)))


@pytest.mark.sample(2)
@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize(
    "name",
    [
        "flash_attention", "linear_attention", "lrpe_cosine_placed", "tpa_attention", "tpa_decode",
        "rotary_attention",
    ],
)  # fmt: skip
def test_compiled(name: str, device: torch.device) -> None:
    function, make = CALLS[name]
    inputs = make(device)
    arguments = [key for key, value in inputs.items() if isinstance(value, Tensor)]
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    expected = results(function, inputs, as_they_are)
    assert_equal(results(compiled, inputs, lazily), expected)
    assert_equal(results(compiled, negated(inputs, *arguments), lazily), expected)

    def within(**given: Any) -> Any:
        made = {key: lazily(value) if key in arguments[:1] else value for key, value in given.items()}
        return function(**made)

    assert_equal(results(torch.compile(within, fullgraph=True, backend="aot_eager"), inputs, as_they_are), expected)


@pytest.mark.parametrize("name", WITH_GRADIENT)
def test_torch_func(name: str, device: torch.device) -> None:
    function, make = CALLS[name]
    inputs = make(device)
    wanted = {
        key: value.detach() for key, value in inputs.items() if isinstance(value, Tensor) and value.requires_grad
    }
    expected = results(function, inputs, as_they_are)

    def run(given: Inputs) -> tuple[Tensor, ...]:
        outputs = function(**{**inputs, **given}, backend="triton")
        return (outputs,) if isinstance(outputs, Tensor) else outputs

    outputs, pull_back = torch.func.vjp(run, negated(wanted, *wanted))
    grads = [torch.linspace(-1, 2, o.numel(), device=o.device).view_as(o) for o in outputs]
    (found,) = pull_back(tuple(map(lazily, grads)))
    assert_equal([*outputs, *(found[key] for key in wanted)], expected)
