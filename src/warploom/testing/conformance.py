"""Whether a backend keeps the accuracy promise on an operator's own cases, forward and backward.

The same walk serves the test suite, the ``check`` command on a user's machine and, piece by piece, the bench.
It knows operators only through their `warploom.ops.spec.Operator`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch

from warploom.errors import WarploomError
from warploom.ops.spec import Case, Inputs, Operator, Outputs
from warploom.testing.accuracy import Accuracy, compare
from warploom.testing.poison import poisoned_allocations

__all__ = [
    "SEED",
    "CheckResult",
    "Judgement",
    "as_tuple",
    "check_case",
    "check_operator",
    "gradients",
    "judge",
    "leaves",
    "make_inputs",
    "modified",
    "random_like",
    "upcast",
]

SEED = 2718
"""Seed of every case's inputs; results differ from machine to machine only by what is being checked."""


@dataclass(frozen=True)
class CheckResult:
    """The verdict on one case in one mode."""

    operator: str
    case: dict[str, Any]
    mode: str
    """``fwd`` or ``bwd``."""
    dtype: str
    ok: bool
    ratio: float
    """Error over budget: at most 1 when right, infinite when the result cannot be compared."""
    detail: str
    """One line for a person."""


@dataclass(frozen=True)
class Judgement:
    """What one run on given inputs came to; ``bwd`` is None when no input requires a gradient."""

    fwd: Accuracy
    bwd: Accuracy | None
    modified: tuple[str, ...]
    """Names of the inputs that the run changed: always a fault."""


def check_operator(operator: Operator, backend: str, device: torch.device) -> list[CheckResult]:
    """Check every case of an operator.

    Args:
        operator: From `warploom.ops.operators`.
        backend: ``triton``, ``torch`` or ``auto``.
        device: Where to run.

    Returns:
        A result per case and mode. A case that raises one of PyTorch's, Triton's or warploom's errors is a
        result as well, so that one failure does not hide the others.
    """
    return [r for case in operator.check_cases for r in check_case(operator, case, backend, device)]


def check_case(operator: Operator, case: Case, backend: str, device: torch.device) -> list[CheckResult]:
    """Check one case: the forward result, and the backward one if an input requires a gradient; or its failure."""
    try:
        return _compared(operator, case, backend, device)
    except _failures() as error:
        dtype, detail = str(case.get("dtype", "")), f"{type(error).__name__}: {error}"
        return [CheckResult(operator.name, dict(case), "fwd", dtype, False, math.inf, detail)]


def _compared(operator: Operator, case: Case, backend: str, device: torch.device) -> list[CheckResult]:
    inputs = make_inputs(operator, case, device)
    judgement = judge(operator, inputs, backend)
    dtype = next(str(t.dtype) for t in inputs.values() if _is_floating(t)).removeprefix("torch.")
    results = []
    for mode, accuracy in (("fwd", judgement.fwd), ("bwd", judgement.bwd)):
        if accuracy is None:
            continue
        ok, ratio, detail = accuracy.ok, accuracy.ratio, accuracy.describe()
        if judgement.modified:
            ok, ratio, detail = False, math.inf, f"modified its inputs: {', '.join(judgement.modified)}"
        results.append(CheckResult(operator.name, dict(case), mode, dtype, ok, ratio, detail))
    return results


def make_inputs(operator: Operator, case: Case, device: torch.device) -> Inputs:
    """The inputs of a case, the same on every machine."""
    return operator.make_inputs(case, device, torch.Generator().manual_seed(SEED))


def judge(operator: Operator, inputs: Inputs, backend: str) -> Judgement:
    """Run a backend on inputs, with poisoned allocations, and compare with the float64 reference.

    The gradient of the output is random, and the same number for number in all three computations.
    """
    exact_inputs = upcast(inputs)
    exact = operator.reference(**exact_inputs)
    eager = operator.reference(**inputs)
    grad_outputs = random_like(eager)

    before = {name: (t._version, t.detach().clone()) for name, t in inputs.items() if _is_tensor(t)}
    with poisoned_allocations():
        output = operator.function(**inputs, backend=backend)
    fwd = compare(output, exact, eager)
    bwd = None
    if leaves(inputs) and fwd.max_error < math.inf:  # a result of another shape has no gradient to compare
        with poisoned_allocations():
            output_gradients = gradients(output, inputs, grad_outputs)
        bwd = compare(
            tuple(output_gradients.values()),
            tuple(gradients(exact, exact_inputs, grad_outputs).values()),
            tuple(gradients(eager, inputs, grad_outputs).values()),
        )
    return Judgement(fwd, bwd, modified(inputs, before))


def upcast(inputs: Inputs) -> Inputs:
    """The inputs with every floating tensor in float64: new leaves, requiring gradients as before."""
    return {
        name: t.detach().to(torch.float64, copy=True).requires_grad_(t.requires_grad) if _is_floating(t) else t
        for name, t in inputs.items()
    }


def leaves(inputs: Inputs) -> dict[str, torch.Tensor]:
    """The tensors that want a gradient, by argument name."""
    return {name: t for name, t in inputs.items() if _is_tensor(t) and t.requires_grad}


def gradients(outputs: Outputs, inputs: Inputs, grad_outputs: tuple[torch.Tensor, ...]) -> dict[str, torch.Tensor]:
    """Gradients of every leaf by argument name; zeros for one that the outputs do not depend on.

    Args:
        outputs: A tensor or several, computed from ``inputs``.
        inputs: Arguments; `leaves` says which of them get a gradient.
        grad_outputs: One per output; cast to the outputs' dtypes.
    """
    wanted = leaves(inputs)
    differentiable = as_tuple(outputs)
    given = [grad.to(output.dtype) for grad, output in zip(grad_outputs, differentiable, strict=True)]
    found = torch.autograd.grad(differentiable, tuple(wanted.values()), given, materialize_grads=True)
    return dict(zip(wanted, found, strict=True))


def random_like(outputs: Outputs) -> tuple[torch.Tensor, ...]:
    """Normal random tensors of the outputs' shapes and dtypes, the same on every device."""
    generator = torch.Generator().manual_seed(SEED)
    return tuple(
        torch.randn(output.shape, generator=generator).to(output.device, output.dtype)
        for output in as_tuple(outputs)
    )


def modified(inputs: Inputs, before: dict[str, tuple[int, torch.Tensor]]) -> tuple[str, ...]:
    """Names of the tensors that differ from what they were: ``(version, copy)`` by argument name."""
    return tuple(
        name
        for name, (version, copy) in before.items()
        if inputs[name]._version != version or not torch.equal(inputs[name], copy)
    )


def as_tuple(outputs: Outputs) -> tuple[torch.Tensor, ...]:
    """One output or several as a tuple."""
    return (outputs,) if isinstance(outputs, torch.Tensor) else outputs


def _is_tensor(value: object) -> TypeGuard[torch.Tensor]:
    return isinstance(value, torch.Tensor)


def _is_floating(value: object) -> TypeGuard[torch.Tensor]:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _failures() -> tuple[type[Exception], ...]:
    """The errors by which a case may fail: warploom's, PyTorch's (out of memory among them) and Triton's."""
    try:
        from triton.errors import TritonError
    except ModuleNotFoundError:  # without Triton there is only the torch backend
        return WarploomError, RuntimeError
    return WarploomError, RuntimeError, TritonError
