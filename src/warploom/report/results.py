"""Measuring from Python: the benches of an operator, or any functions with the same results."""

from __future__ import annotations

import functools
import inspect
import shlex
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from warploom.bench.records import LIMIT, Record
from warploom.bench.runner import Outcome, Selection, run
from warploom.errors import ArgumentError, DtypeError, fault, unknown
from warploom.ops import benches, register
from warploom.ops.spec import Bench, Case, Inputs, Operator, Outputs, Traffic
from warploom.testing.accuracy import as_tuple

Function = Callable[..., Outputs]
TIMED = ("fwd", "bwd", "fwd_bwd", "fwd_graph")
"""The modes of functions that are not an operator's."""


@dataclass(frozen=True)
class Results:
    """The results of a bench. Printed, they are tables; in a notebook, a table and a chart."""

    bench: Bench
    outcome: Outcome
    folder: Path
    """The folder of ``records.jsonl`` and ``environment.json``."""
    device: torch.device
    _kept: tempfile.TemporaryDirectory[str] | None = None

    @property
    def records(self) -> list[Record]:
        """A record for each case, mode and provider, including the provider ``limit``."""
        return self.outcome.records

    @property
    def ok(self) -> bool:
        """True if the operator's own provider was right and timed in every case."""
        return not self.outcome.left and not self.outcome.failed([self.bench], self.device.type)

    def __repr__(self) -> str:
        """Returns one line: the bench, how many results there are, and how many of them are wrong or failed."""
        counts = Counter(record.status for record in self.records if record.provider != LIMIT)
        states = ", ".join(f"{count} {status}" for status, count in counts.items())
        return f"<Results of {self.bench.name} on {self.device}: {states or 'none'}>"

    def __str__(self) -> str:
        """Returns tables of times and memory, by size and provider, and the reasons of failures."""
        from warploom.report import render_terminal

        return render_terminal(self.records)

    def _repr_html_(self) -> str:
        """Returns tables and charts, for a notebook."""
        from warploom.report import render_notebook

        return render_notebook(self.records)

    def report(self, path: str | Path) -> Path:
        """Write the HTML report. Needs jinja2, of the extra ``warploom[bench]``.

        Args:
            path: The file to write.

        Returns:
            The file's path.
        """
        from warploom.report import write_report

        return write_report([self.folder], Path(path))


def run_bench(
    bench: Bench,
    *,
    suite: str = "quick",
    modes: Sequence[str] | None = None,
    providers: Sequence[str] | None = None,
    case: Mapping[str, Sequence[Any]] | None = None,
    dtypes: Sequence[str] | None = None,
    device: str | torch.device = "auto",
    output: str | Path | None = None,
    resume: bool = False,
    time_limit: float | None = None,
) -> Results:
    """Measure a bench: every provider is checked against float64, then timed beside the others and the limit.

    Args:
        bench: One of `warploom.ops.benches`, or your own.
        suite: The name of one of its suites.
        modes: ``fwd``, ``bwd``, and on a GPU ``fwd_graph`` (replays of a captured graph); its own by default.
        providers: Names of its providers; all by default.
        case: Values of parameters, to select cases.
        dtypes: Dtypes to run the cases in, instead of their own.
        device: The device; ``auto`` for the GPU if there is one.
        output: A folder for the records, which are added to those in it. By default a temporary folder, which is
            deleted with the results.
        resume: Skip what ``output`` already has from the same code in the same environment.
        time_limit: Seconds after which no further case is started.

    Returns:
        The results, with tables and a report.

    Raises:
        ArgumentError: The selection is empty, or a bench of your own has a name of warploom's.

    Example:
        ```python
        from warploom.bench import run_bench
        from warploom.ops import benches

        rotate = benches()["lrpe-rotate"]
        results = run_bench(rotate, modes=["fwd"], providers=["torch"], case={"activation": ["silu"]})
        ```
    """
    chosen = _read_device(device)
    if benches().get(bench.name) is not bench:
        register([], [bench])
    kept = None if output else tempfile.TemporaryDirectory(prefix="warploom-")
    folder = Path(output or kept.name)  # type: ignore[union-attr]
    selection = Selection(suite, modes, providers, case or {}, dtypes)
    outcome = run([bench], selection, chosen, folder, resume=resume, time_limit=time_limit)
    return Results(bench, outcome, folder, chosen, kept)


def time_functions(
    functions: Mapping[str, Function],
    make_inputs: Callable[..., Inputs],
    cases: Sequence[Case],
    *,
    reference: Function,
    name: str = "functions",
    modes: str | Sequence[str] = ("fwd",),
    traffic: Callable[[Case, str], Traffic] | None = None,
    device: str | torch.device = "auto",
    output: str | Path | None = None,
    resume: bool = False,
    time_limit: float | None = None,
) -> Results:
    """Time functions that should compute the same, as the benches of the operators are timed.

    A function whose results exceed the error budget has no speed. Its largest error against ``reference`` in
    float64 may be twice that of ``reference`` in the inputs' own dtypes, plus the rounding of the output. The same
    holds for its root-mean-square error, and, with twice the budget, for that of each block.

    Args:
        functions: The functions by name, called as ``f(**inputs)``. The first is drawn thick.
        make_inputs: Returns arguments by name, called as ``make_inputs(**case)``. Its tensors are moved to the
            device. For the mode ``bwd``, tensors that need a gradient require it.
        cases: Parameters of the cases, JSON values. The first parameter is that of the rows and of the axis.
        reference: The definition in plain PyTorch, which must work in float64.
        name: The name in the report and in the records.
        modes: ``fwd``, ``bwd``, ``fwd_bwd``, ``fwd_graph``; one or several.
        traffic: Returns the least bytes and the operations of a case in a mode. By default every input and output
            is moved once (in the backward every input and gradient, in ``fwd_bwd`` both), and operations are not
            counted.
        device: The device; ``auto`` for the GPU if there is one.
        output: A folder for the records; by default a temporary folder, which is deleted with the results.
        resume: Skip what ``output`` already has from the same code in the same environment.
        time_limit: Seconds after which no further case is started.

    Returns:
        The results, with tables and a report.

    Raises:
        ArgumentError: There is no function or no case, a mode or device is none, or the name is one of warploom's
            benches.
        DtypeError: An argument has another type than is written here.

    Example:
        ```python
        import torch
        from warploom.bench import time_functions

        functions = {"relu": torch.relu, "clamp": lambda input: input.clamp(min=0)}
        results = time_functions(
            functions, lambda n: {"input": torch.randn(n)}, [{"n": 2**10}], reference=torch.relu, name="rectifier"
        )
        print(results)  # tables of all times
        print(results.ok)  # True
        ```
    """
    _check(isinstance(functions, Mapping), "functions", "a dict of functions by name", functions)
    listed = isinstance(cases, Iterable) and not isinstance(cases, str | Mapping)
    _check(listed, "cases", "a list of dicts of parameters by name", cases)
    cases, modes = list(cases), [modes] if isinstance(modes, str) else list(modes)
    if not functions or not cases or not modes:
        raise ArgumentError("time_functions: functions, cases and modes must each hold one at least")
    for case in cases:
        _check(isinstance(case, Mapping), "cases", "a list of dicts of parameters by name", case)
    for key, function in {**functions, "make_inputs": make_inputs, "reference": reference}.items():
        _check(callable(function), key, "a function", function)
    _check(traffic is None or callable(traffic), "traffic", "a function or None", traffic)
    _check(isinstance(name, str), "name", "a text", name)
    for mode in modes:
        if mode not in TIMED:
            raise ArgumentError(f"time_functions: {unknown('mode', str(mode), TIMED)}")

    def inputs_of(case: Case, device: torch.device, generator: torch.Generator) -> Inputs:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(generator.initial_seed())
            made = make_inputs(**case)
        _check(isinstance(made, Mapping), "make_inputs", "a function that returns a dict", made)
        _check_reference(reference, made)
        return {key: _move(value, device) for key, value in made.items()}

    name = name.replace("_", "-")
    operator = Operator(name.replace("-", "_"), next(iter(functions.values())), reference, inputs_of, ())
    bench = Bench(
        name=name,
        operator=operator,
        suites={"quick": lambda device_type: list(cases)},
        providers={key: functools.partial(_return_function, function) for key, function in functions.items()},
        traffic=traffic or functools.partial(_count_traffic, operator),
        title=" · ".join(functions),
        x=next(iter(cases[0]), "n"),
        modes=tuple(dict.fromkeys(mode.removesuffix("_graph") for mode in modes)),
        own=next(iter(functions)),
        command=shlex.join(["python", *sys.argv]),
    )
    return run_bench(bench, modes=modes, device=device, output=output, resume=resume, time_limit=time_limit)


def _check(right: bool, argument: str, expected: str, got: object) -> None:
    if not right:
        raise fault(DtypeError, "time_functions", argument, expected, f"{type(got).__name__}: {got!r:.80}")


def _check_reference(reference: Function, inputs: Mapping[str, object]) -> None:
    """Raise if the definition cannot be called with these arguments by name, as far as it says."""
    try:
        signature = inspect.signature(reference)
    except (TypeError, ValueError):  # written in C
        return
    try:
        signature.bind(**inputs)
    except TypeError as error:
        said = f"functions are called with what make_inputs returns, by name: {', '.join(inputs)}"
        raise ArgumentError(f"time_functions: reference: {error}; {said}") from None


def _read_device(device: str | torch.device) -> torch.device:
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        return torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise fault(ArgumentError, "bench", "device", "auto, cpu, cuda or cuda:N", repr(device)) from error


def _return_function(function: Function, case: Case) -> Function:
    return function


def _move(value: Any, device: torch.device | str) -> Any:
    """Returns a tensor as a leaf on a device, which requires a gradient as before; any other value as it is."""
    if not isinstance(value, torch.Tensor):
        return value
    return value.detach().to(device).requires_grad_(value.requires_grad)


def _count_traffic(operator: Operator, case: Case, mode: str) -> Traffic:
    """Returns the bytes of moving every input and output once; in the backward gradients instead of outputs."""
    inputs = operator.make_inputs(case, torch.device("cpu"), torch.Generator())
    shapes = {key: _move(value, "meta") for key, value in inputs.items()}
    try:
        outputs = as_tuple(operator.reference(**shapes))
    except Exception as error:  # the user's code may need values
        raise ArgumentError(
            f"time_functions: give traffic; sizes of the outputs cannot be worked out without values ({error})"
        ) from error
    tensors = [value for value in shapes.values() if isinstance(value, torch.Tensor)]
    read, written = _count_bytes(tensors), _count_bytes(outputs)
    back, gradients = read + written, _count_bytes([tensor for tensor in tensors if tensor.requires_grad])
    if mode == "fwd_bwd":
        return Traffic.of_bytes(read + back, written + gradients)
    return Traffic.of_bytes(back, gradients) if mode == "bwd" else Traffic.of_bytes(read, written)


def _count_bytes(tensors: Sequence[torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)
