"""Checks of a backend against the accuracy promise, on an operator's own cases, forward and backward.

The test suite, the ``check`` command and the bench use the same checks. They know an operator only by its
`warploom.ops.spec.Operator`.
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
from warploom.testing.poison import poison_allocations

SEED = 2718
"""Seed of every case's inputs, which are the same on all machines."""

FEWEST = 1000
"""The elements of a result that make a budget reliable. A smaller result needs more draws; see
`accuracy.mean_of`."""
MOST_DRAWS = 16
"""The most draws of inputs of one case, for results of a few elements, such as gradients of frequencies."""
MOST_IN_DOUBT = 64
"""The most draws on a GPU after an error beyond its budget: with 16 single numbers a mean error is out by a
quarter."""


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
    """Error over budget: at most 1 if right, infinite if the result cannot be compared."""
    detail: str
    """A description, in one line."""


@dataclass(frozen=True)
class Judgement:
    """The verdicts on the runs on given inputs."""

    fwd: Accuracy
    bwd: Accuracy | None
    """None if no input requires a gradient."""
    modified: tuple[str, ...]
    """Names of the inputs that a run changed, which is always a fault."""


def check_operator(operator: Operator, backend: str, device: torch.device) -> list[CheckResult]:
    """Check every case of an operator from `warploom.ops.operators`. Returns a result for each case and mode.

    A case that raises an error of PyTorch's, Triton's or warploom's is a result too, and the others still run.
    """
    return [r for case in operator.check_cases for r in check_case(operator, case, backend, device)]


def check_case(operator: Operator, case: Case, backend: str, device: torch.device) -> list[CheckResult]:
    """Check one case, forward, and backward if an input requires a gradient. An error is a result too."""
    try:
        return _compare_case(operator, case, backend, device)
    except _list_errors() as error:
        dtype, detail = str(case.get("dtype", "")), f"{type(error).__name__}: {error}"
        return [CheckResult(operator.name, dict(case), "fwd", dtype, False, math.inf, detail)]


def _compare_case(operator: Operator, case: Case, backend: str, device: torch.device) -> list[CheckResult]:
    draws = make_draws(operator, case, device)
    judgement = judge_draws(operator, draws, backend, lambda: make_more_draws(operator, case, device, draws))
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
    """Returns the inputs of a case, the same on every machine. Another index gives other values."""
    return operator.make_inputs(case, device, torch.Generator().manual_seed(SEED + index))


def make_more_draws(operator: Operator, case: Case, device: torch.device, draws: Sequence[Inputs]) -> list[Inputs]:
    """Returns the inputs of a case that come after those of `make_draws`, up to `MOST_IN_DOUBT` in all on a GPU."""
    most = MOST_IN_DOUBT if device.type == "cuda" else MOST_DRAWS
    return [make_inputs(operator, case, device, index) for index in range(len(draws), most)]


def make_draws(operator: Operator, case: Case, device: torch.device) -> list[Inputs]:
    """Returns inputs of a case: on a GPU so many draws that every result has `FEWEST` elements in all.

    There are at most `MOST_DRAWS`. In Triton's interpreter there is one, since a case takes seconds there, and
    rounding is the same on every machine.
    """
    first = make_inputs(operator, case, device)
    if device.type != "cuda":
        return [first]
    with torch.no_grad():
        results = (*as_tuple(operator.reference(**first)), *find_leaves(first).values())
    fewest = min(result.numel() for result in results)
    count = min(-(-FEWEST // fewest), MOST_DRAWS) if fewest > 0 else 1
    return [first, *(make_inputs(operator, case, device, index) for index in range(1, count))]


def judge(operator: Operator, inputs: Inputs, backend: str) -> Judgement:
    """Run a backend on inputs, with poisoned allocations, and compare it with the float64 reference.

    The gradient of the output is random, and has the same values in all three computations.
    """
    return judge_draws(operator, [inputs], backend)


class _DrawRun(NamedTuple):
    """Three computations on the same inputs: by the backend, and by the reference in float64 and in their dtype."""

    inputs: Inputs
    exact_inputs: Inputs
    output: Outputs
    exact: Outputs
    eager: Outputs
    before: dict[str, tuple[int, torch.Tensor]]
    """The version and a copy of each tensor before the backend ran, by argument name."""

    @classmethod
    def of(cls, operator: Operator, inputs: Inputs, backend: str) -> _DrawRun:
        exact_inputs = upcast(inputs)
        exact = operator.reference(**exact_inputs)
        eager = operator.reference(**inputs)
        before = {
            name: (t._version, t.detach().clone()) for name, t in inputs.items() if isinstance(t, torch.Tensor)
        }
        with poison_allocations():
            output = operator.function(**inputs, backend=backend)
        return cls(inputs, exact_inputs, output, exact, eager, before)

    def gradients(self) -> tuple[Outputs, Outputs, Outputs]:
        """Returns the gradients of the backend, of the exact reference and of the eager reference."""
        grad_outputs = draw_like(self.eager)
        with poison_allocations():
            found = compute_gradients(self.output, self.inputs, grad_outputs)
        exact = compute_gradients(self.exact, self.exact_inputs, grad_outputs)
        eager = compute_gradients(self.eager, self.inputs, grad_outputs)
        return tuple(found.values()), tuple(exact.values()), tuple(eager.values())


def judge_draws(
    operator: Operator, draws: Sequence[Inputs], backend: str, more: Callable[[], Sequence[Inputs]] = list
) -> Judgement:
    """Judge several inputs of one kind, as `judge` does one, by the means of errors and budgets.

    Args:
        operator: The operator to judge.
        draws: The inputs.
        backend: The backend to run.
        more: Makes more inputs of the kind. They are judged together with the first if an error of these is beyond
            its budget and nothing else is wrong, as a budget of a few numbers can be small by chance.
    """
    judgement = _judge_once(operator, draws, backend)
    verdicts = [verdict for verdict in (judgement.fwd, judgement.bwd) if verdict is not None]
    if judgement.modified or any(v.problem for v in verdicts) or all(v.ok for v in verdicts):
        return judgement
    others = more()
    return _judge_once(operator, [*draws, *others], backend) if others else judgement


def _judge_once(operator: Operator, draws: Sequence[Inputs], backend: str) -> Judgement:
    runs = [_DrawRun.of(operator, inputs, backend) for inputs in draws]
    fwd = _compare_all((run.output, run.exact, run.eager) for run in runs)
    bwd = None
    if find_leaves(draws[0]) and fwd.max_error < math.inf:  # a result of another shape has no gradient to compare
        bwd = _compare_all(run.gradients() for run in runs)
    changed = {name for run in runs for name in find_modified(run.inputs, run.before)}
    return Judgement(fwd, bwd, tuple(name for name in draws[0] if name in changed))


def _compare_all(results: Iterable[tuple[Outputs, Outputs, Outputs]]) -> Accuracy:
    """Returns the verdict on several runs: that of the worst output."""
    by_run = [compare_each(*run) for run in results]
    return worst_of([mean_of(of_output) for of_output in zip(*by_run, strict=True)])


def upcast(inputs: Inputs) -> Inputs:
    """Returns the inputs with every floating tensor in float64, as new leaves that require gradients as before."""
    return {
        name: t.detach().to(torch.float64, copy=True).requires_grad_(t.requires_grad) if _is_floating(t) else t
        for name, t in inputs.items()
    }


def find_leaves(inputs: Inputs) -> dict[str, torch.Tensor]:
    """Returns the tensors that require a gradient, by argument name."""
    return {name: t for name, t in inputs.items() if isinstance(t, torch.Tensor) and t.requires_grad}


def compute_gradients(
    outputs: Outputs, inputs: Inputs, grad_outputs: tuple[torch.Tensor, ...]
) -> dict[str, torch.Tensor]:
    """Returns the gradients of inputs by argument name; zeros for an input that the outputs do not depend on.

    There is one tensor of ``grad_outputs`` for each output. It is cast to the output's dtype.
    """
    wanted = find_leaves(inputs)
    differentiable = as_tuple(outputs)
    given = [grad.to(output.dtype) for grad, output in zip(grad_outputs, differentiable, strict=True)]
    found = torch.autograd.grad(differentiable, tuple(wanted.values()), given, materialize_grads=True)
    return dict(zip(wanted, found, strict=True))


def draw_like(outputs: Outputs) -> tuple[torch.Tensor, ...]:
    """Returns normal random tensors of the outputs' shapes and dtypes, the same on every device."""
    generator = torch.Generator().manual_seed(SEED)
    return tuple(
        torch.randn(output.shape, generator=generator).to(output.device, output.dtype)
        for output in as_tuple(outputs)
    )


def find_modified(inputs: Inputs, before: dict[str, tuple[int, torch.Tensor]]) -> tuple[str, ...]:
    """Returns the names of tensors that were changed, given their versions and copies before."""
    return tuple(
        name
        for name, (version, copy) in before.items()
        if inputs[name]._version != version or not _are_equal(inputs[name], copy)
    )


def _are_equal(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Returns True if two tensors are equal, and have NaN in the same places."""
    return bool(((x == y) | (x.isnan() & y.isnan())).all())


def _is_floating(value: object) -> TypeGuard[torch.Tensor]:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _list_errors() -> tuple[type[Exception], ...]:
    """Returns the errors by which a case may fail: warploom's, PyTorch's (out of memory too) and Triton's."""
    try:
        from triton.errors import TritonError
    except ModuleNotFoundError:  # without Triton there is only the torch backend
        return WarploomError, RuntimeError
    return WarploomError, RuntimeError, TritonError
