"""Whether a backend keeps the accuracy promise on an operator's own cases, forward and backward.

The same checks serve the test suite, the ``check`` command on a user's machine and, piece by piece, the bench.
It knows operators only through their `warploom.ops.spec.Operator`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeGuard

import torch

from warploom.errors import WarploomError
from warploom.ops.spec import Case, Inputs, Operator, Outputs
from warploom.testing.accuracy import Accuracy, as_tuple, compare_each, mean_of, worst_of
from warploom.testing.poison import poisoned_allocations

SEED = 2718
"""Seed of every case's inputs; results differ from machine to machine only by what is being checked."""

FEWEST = 1000
"""Elements of a result with which one draw of inputs sets a budget that is not luck; see `accuracy.mean_of`."""
MOST_DRAWS = 16
"""Of inputs of one case: some results have a few elements alone, as the gradient of frequencies."""


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
    """What runs on given inputs came to; ``bwd`` is None when no input requires a gradient."""

    fwd: Accuracy
    bwd: Accuracy | None
    modified: tuple[str, ...]
    """Names of the inputs that a run changed: always a fault."""


def check_operator(operator: Operator, backend: str, device: torch.device) -> list[CheckResult]:
    """Check every case of an operator from `warploom.ops.operators`: a result per case and mode.

    A case that raises one of PyTorch's, Triton's or warploom's errors is a result as well, so that one failure does
    not hide the others.
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
    draws = make_draws(operator, case, device)
    judgement = judge_draws(operator, draws, backend, lambda: more_draws(operator, case, device, draws))
    dtype = next(str(t.dtype) for t in draws[0].values() if _is_floating(t)).removeprefix("torch.")
    results = []
    for mode, accuracy in (("fwd", judgement.fwd), ("bwd", judgement.bwd)):
        if accuracy is None:
            continue
        ok, ratio, detail = accuracy.ok, accuracy.ratio, accuracy.describe()
        if judgement.modified:
            ok, ratio, detail = False, math.inf, f"modified its inputs: {', '.join(judgement.modified)}"
        results.append(CheckResult(operator.name, dict(case), mode, dtype, ok, ratio, detail))
    return results


def make_inputs(operator: Operator, case: Case, device: torch.device, index: int = 0) -> Inputs:
    """The inputs of a case, the same on every machine; others for another index."""
    return operator.make_inputs(case, device, torch.Generator().manual_seed(SEED + index))


def more_draws(operator: Operator, case: Case, device: torch.device, draws: Sequence[Inputs]) -> list[Inputs]:
    """The inputs of a case that come after those of `make_draws`, up to `MOST_DRAWS` in all."""
    return [make_inputs(operator, case, device, index) for index in range(len(draws), MOST_DRAWS)]


def make_draws(operator: Operator, case: Case, device: torch.device) -> list[Inputs]:
    """The inputs of a case and, on a GPU, so many more of the kind that every result has `FEWEST` elements in all.

    There are `MOST_DRAWS` at most, and one in Triton's interpreter, where a case takes seconds, and rounding is the
    same everywhere.
    """
    first = make_inputs(operator, case, device)
    if device.type != "cuda":
        return [first]
    with torch.no_grad():
        results = (*as_tuple(operator.reference(**first)), *leaves(first).values())
    fewest = min(result.numel() for result in results)
    count = min(-(-FEWEST // fewest), MOST_DRAWS) if fewest > 0 else 1
    return [first, *(make_inputs(operator, case, device, index) for index in range(1, count))]


def judge(operator: Operator, inputs: Inputs, backend: str) -> Judgement:
    """Run a backend on inputs, with poisoned allocations, and compare with the float64 reference.

    The gradient of the output is random, and the same number for number in all three computations.
    """
    return judge_draws(operator, [inputs], backend)


class _Run(NamedTuple):
    """Three computations on the same inputs, and what these were before: ``(version, copy)`` by argument name."""

    inputs: Inputs
    exact_inputs: Inputs
    output: Outputs
    exact: Outputs
    eager: Outputs
    before: dict[str, tuple[int, torch.Tensor]]

    @classmethod
    def of(cls, operator: Operator, inputs: Inputs, backend: str) -> _Run:
        exact_inputs = upcast(inputs)
        exact = operator.reference(**exact_inputs)
        eager = operator.reference(**inputs)
        before = {
            name: (t._version, t.detach().clone()) for name, t in inputs.items() if isinstance(t, torch.Tensor)
        }
        with poisoned_allocations():
            output = operator.function(**inputs, backend=backend)
        return cls(inputs, exact_inputs, output, exact, eager, before)

    def gradients(self) -> tuple[Outputs, Outputs, Outputs]:
        """Those of what was computed, of what is exact, and of what sets the budget."""
        grad_outputs = random_like(self.eager)
        with poisoned_allocations():
            found = gradients(self.output, self.inputs, grad_outputs)
        exact = gradients(self.exact, self.exact_inputs, grad_outputs)
        eager = gradients(self.eager, self.inputs, grad_outputs)
        return tuple(found.values()), tuple(exact.values()), tuple(eager.values())


def judge_draws(
    operator: Operator, draws: Sequence[Inputs], backend: str, more: Callable[[], Sequence[Inputs]] = list
) -> Judgement:
    """Judge several inputs of one kind as `judge` does one, by the means of errors and budgets.

    Args:
        operator: What computes.
        draws: The inputs.
        backend: Which of its backends.
        more: Makes more inputs of the kind, which are judged together with the first where an error of these is
            beyond its budget and nothing else is wrong: a few numbers may have been drawn with a small budget.
    """
    judgement = _judged(operator, draws, backend)
    verdicts = [verdict for verdict in (judgement.fwd, judgement.bwd) if verdict is not None]
    if judgement.modified or any(v.problem for v in verdicts) or all(v.ok for v in verdicts):
        return judgement
    others = more()
    return _judged(operator, [*draws, *others], backend) if others else judgement


def _judged(operator: Operator, draws: Sequence[Inputs], backend: str) -> Judgement:
    runs = [_Run.of(operator, inputs, backend) for inputs in draws]
    fwd = _compare_all((run.output, run.exact, run.eager) for run in runs)
    bwd = None
    if leaves(draws[0]) and fwd.max_error < math.inf:  # a result of another shape has no gradient to compare
        bwd = _compare_all(run.gradients() for run in runs)
    changed = {name for run in runs for name in modified(run.inputs, run.before)}
    return Judgement(fwd, bwd, tuple(name for name in draws[0] if name in changed))


def _compare_all(results: Iterable[tuple[Outputs, Outputs, Outputs]]) -> Accuracy:
    """The verdict on what several runs computed: that of the worst output."""
    by_run = [compare_each(*run) for run in results]
    return worst_of([mean_of(of_output) for of_output in zip(*by_run, strict=True)])


def upcast(inputs: Inputs) -> Inputs:
    """The inputs with every floating tensor in float64: new leaves, requiring gradients as before."""
    return {
        name: t.detach().to(torch.float64, copy=True).requires_grad_(t.requires_grad) if _is_floating(t) else t
        for name, t in inputs.items()
    }


def leaves(inputs: Inputs) -> dict[str, torch.Tensor]:
    """The tensors that want a gradient, by argument name."""
    return {name: t for name, t in inputs.items() if isinstance(t, torch.Tensor) and t.requires_grad}


def gradients(outputs: Outputs, inputs: Inputs, grad_outputs: tuple[torch.Tensor, ...]) -> dict[str, torch.Tensor]:
    """Gradients of the `leaves` of inputs by argument name; zeros for one that the outputs do not depend on.

    There is one of ``grad_outputs`` for each output; it is cast to its dtype.
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
        if inputs[name]._version != version or not _same(inputs[name], copy)
    )


def _same(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Whether two tensors are equal, NaN included."""
    return bool(((x == y) | (x.isnan() & y.isnan())).all())


def _is_floating(value: object) -> TypeGuard[torch.Tensor]:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _failures() -> tuple[type[Exception], ...]:
    """The errors by which a case may fail: warploom's, PyTorch's (out of memory among them) and Triton's."""
    try:
        from triton.errors import TritonError
    except ModuleNotFoundError:  # without Triton there is only the torch backend
        return WarploomError, RuntimeError
    return WarploomError, RuntimeError, TritonError
