"""Measuring from Python: the benches of an operator, or any functions that should compute the same."""

from __future__ import annotations

import functools
import shlex
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from warploom.bench.records import Record
from warploom.bench.runner import Outcome, Selection, run
from warploom.errors import ArgumentError
from warploom.ops import benches, register
from warploom.ops.spec import Bench, Case, Inputs, Operator, Outputs, Traffic
from warploom.testing.accuracy import as_tuple

Function = Callable[..., Outputs]


@dataclass(frozen=True)
class Results:
    """What a bench came to. Printed, it is its tables."""

    bench: Bench
    outcome: Outcome
    folder: Path
    """Where ``records.jsonl`` and ``environment.json`` are."""
    device: torch.device
    _kept: tempfile.TemporaryDirectory[str] | None = None

    @property
    def records(self) -> list[Record]:
        """One for each case, mode and provider, the provider ``limit`` included."""
        return self.outcome.records

    @property
    def ok(self) -> bool:
        """Whether the provider that stands for the operator was right and timed in every case."""
        return not self.outcome.left and not self.outcome.failed([self.bench], self.device.type)

    def __str__(self) -> str:
        """Tables of times and memory, sizes down and providers across, and the reasons of failures."""
        from warploom.report import terminal

        return terminal(self.records)

    def report(self, path: str | Path) -> Path:
        """Write the HTML report; needs jinja2, of the extra ``warploom[bench]``.

        Args:
            path: The file to write.

        Returns:
            The same.
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
        suite: Which of its suites.
        modes: ``fwd``, ``bwd``, and on a GPU ``fwd_graph`` (replays of a captured graph). By default its own.
        providers: Names of its providers; all by default.
        case: For a parameter of the cases, the values that are wanted.
        dtypes: Run the cases in these dtypes, not in their own.
        device: ``auto`` is the GPU if there is one.
        output: A folder for the records, which are added to what is there. By default one that lasts as long as
            what is returned.
        resume: Leave out what ``output`` has from the same code in the same environment.
        time_limit: Seconds after which no further case is begun.

    Returns:
        The results, with tables and a report.

    Raises:
        ArgumentError: The selection fits nothing, or a bench of your own takes a name of warploom's.

    Example:
        ```python
        from warploom.bench import run_bench
        from warploom.ops import benches

        rotate = benches()["lrpe-rotate"]
        results = run_bench(rotate, modes=["fwd"], providers=["torch"], case={"activation": ["silu"]})
        ```
    """
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    chosen = torch.device(device)
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
    modes: Sequence[str] = ("fwd",),
    traffic: Callable[[Case, str], Traffic] | None = None,
    device: str | torch.device = "auto",
    output: str | Path | None = None,
    resume: bool = False,
    time_limit: float | None = None,
) -> Results:
    """Time functions that should compute the same, as the benches of the operators are timed.

    A function whose results miss the error budget has no speed: its largest error against ``reference`` in
    float64 may be twice that of ``reference`` in the inputs' own dtypes, plus the rounding of the output; so
    may its root mean square, and that of a block twice as much.

    Args:
        functions: By name; each is called as ``f(**inputs)``. The first is the one that is drawn thick.
        make_inputs: Called as ``make_inputs(**case)``; returns arguments by name. Its tensors may be on the CPU
            and are moved. For the mode ``bwd``, those that want a gradient require it.
        cases: Parameters of the cases, JSON values. The first parameter runs down the tables and along the axis.
        reference: The definition in plain PyTorch; must work in float64.
        name: What the report calls it all; also the records' operator.
        modes: ``fwd``, ``bwd``, ``fwd_graph``.
        traffic: The fewest bytes of a case in a mode, and its operations. By default every input and every output
            is moved once (and in the backward pass every input and gradient), and arithmetic costs nothing.
        device: ``auto`` is the GPU if there is one.
        output: A folder for the records; by default one that lasts as long as what is returned.
        resume: Leave out what ``output`` has from the same code in the same environment.
        time_limit: Seconds after which no further case is begun.

    Returns:
        The results, with tables and a report.

    Raises:
        ArgumentError: There is no function or no case, or the name is one of warploom's benches.

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
    if not functions or not cases:
        raise ArgumentError("time_functions: functions and cases must each hold one at least")

    def inputs_of(case: Case, device: torch.device, generator: torch.Generator) -> Inputs:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(generator.initial_seed())
            made = make_inputs(**case)
        return {key: _moved(value, device) for key, value in made.items()}

    name = name.replace("_", "-")
    operator = Operator(name.replace("-", "_"), next(iter(functions.values())), reference, inputs_of, ())
    bench = Bench(
        name=name,
        operator=operator,
        suites={"quick": lambda device_type: list(cases)},
        providers={key: functools.partial(_given, function) for key, function in functions.items()},
        traffic=traffic or functools.partial(_traffic, operator),
        title=" · ".join(functions),
        x=next(iter(cases[0]), "n"),
        modes=tuple(dict.fromkeys(mode.removesuffix("_graph") for mode in modes)),
        own=next(iter(functions)),
        command=shlex.join(["python", *sys.argv]),
    )
    return run_bench(bench, modes=modes, device=device, output=output, resume=resume, time_limit=time_limit)


def _given(function: Function, case: Case) -> Function:
    return function


def _moved(value: Any, device: torch.device | str) -> Any:
    """A tensor on a device, a leaf that requires a gradient if it did; anything else as it is."""
    if not isinstance(value, torch.Tensor):
        return value
    return value.detach().to(device).requires_grad_(value.requires_grad)


def _traffic(operator: Operator, case: Case, mode: str) -> Traffic:
    """Every input and every output moved once; in the backward pass the gradients instead of the outputs."""
    inputs = operator.make_inputs(case, torch.device("cpu"), torch.Generator())
    shapes = {key: _moved(value, "meta") for key, value in inputs.items()}
    try:
        outputs = as_tuple(operator.reference(**shapes))
    except Exception as error:  # whatever the user's own code cannot do without values
        raise ArgumentError(
            f"time_functions: give traffic; sizes of the outputs cannot be worked out without values ({error})"
        ) from error
    tensors = [value for value in shapes.values() if isinstance(value, torch.Tensor)]
    read, written = _bytes(tensors), _bytes(outputs)
    if mode == "bwd":
        read, written = read + written, _bytes([tensor for tensor in tensors if tensor.requires_grad])
    return Traffic.of_bytes(read, written)


def _bytes(tensors: Sequence[torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)
