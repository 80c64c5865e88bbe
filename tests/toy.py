"""A small operator with providers that are right, wrong or unable, for the tests of the bench."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from warploom.ops.spec import Bench, Case, Inputs, Operator, Other, Traffic, Unsupported

FACTOR = 1.5


def reference(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * weight * FACTOR


def function(x: torch.Tensor, weight: torch.Tensor, backend: str = "auto") -> torch.Tensor:
    return reference(x, weight)


def make_inputs(case: Case, device: torch.device, generator: torch.Generator) -> Inputs:
    dtype = getattr(torch, case["dtype"])
    x = torch.randn(case["n"], 16, generator=generator).to(device, dtype).requires_grad_()
    weight = torch.randn(16, generator=generator).to(device, dtype).requires_grad_()
    return {"x": x, "weight": weight}


def wrong(case: Case) -> Callable[..., Any]:
    return lambda x, weight: reference(x, weight) * 1.25


def impossible(case: Case) -> Callable[..., Any]:
    raise Unsupported("needs a quantum computer")


def broken(case: Case) -> Callable[..., Any]:
    def run(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        raise ValueError("two\nlines of trouble")

    return run


def hungry(case: Case) -> Callable[..., Any]:
    def run(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError("wanted 1 TiB")

    return run


def cases(device_type: str) -> list[Case]:
    return [{"dtype": "float32", "shape": (4, 4), "n": n} for n in (64, 256)]


OPERATOR = Operator(
    name="toy",
    function=function,
    reference=reference,
    make_inputs=make_inputs,
    check_cases=({"dtype": "float32", "n": 5}, {"dtype": "bfloat16", "n": 3}),
)


def make_bench(**providers: Callable[[Case], Callable[..., Any]]) -> Bench:
    """A bench of the toy operator; without arguments, one provider that is right."""
    return Bench(
        name="toy-scale",
        operator=OPERATOR,
        suites={"quick": cases},
        providers=providers or {"torch": lambda case: reference},
        traffic=lambda case, mode: Traffic(1 if mode == "fwd" else 2, 1, case["n"] * 64, flops=0),
        title="Toy",
    )


def squared(y: torch.Tensor) -> torch.Tensor:
    return y * y


def make_other() -> Other:
    """Another function of its own inputs, ten times as many, with a provider that is right and a wrong one."""
    return Other(
        operator=Operator(
            name="squared",
            function=squared,
            reference=squared,
            make_inputs=lambda case, device, generator: {
                "y": torch.randn(case["n"], 160, generator=generator).to(device).requires_grad_()
            },
            check_cases=(),
        ),
        providers={
            "squared": lambda case: lambda y: y.square(),
            "squared_wrong": lambda case: lambda y: y * 1.5,
        },
        traffic=lambda case, mode: Traffic(1 if mode == "fwd" else 2, 1, case["n"] * 640),
    )
