"""``warploom check``: operators against float64 on small odd cases."""

from __future__ import annotations

import argparse
import functools
import importlib.util
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import TYPE_CHECKING, Any

from warploom.cli.common import Commands, add_device, add_spec, describe, names_in, pick, the_device, width
from warploom.cli.needs import check_compilers
from warploom.errors import BackendError, WarploomError

if TYPE_CHECKING:
    import torch

    from warploom.testing.conformance import CheckResult

MOST_PROCESSES = 8
CASES_AT_ONCE = 4
"""Neighbouring cases that a process gets together: they share kernels."""
SAMPLE_SECONDS = 35
"""The time for cases in Triton's interpreter, a second or several each, unless all are asked for."""
_GOLDEN = 0.618
"""The fractional parts of its multiples are spread evenly from 0 to 1."""


def add_parser(commands: Commands) -> None:
    """Add the command."""
    parser = commands.add_parser("check", help="compare operators with float64 on small odd cases")
    parser.add_argument("names", nargs="*", metavar="NAME", help="operators, e.g. lrpe_rotate (default: all)")
    add_device(parser)
    parser.add_argument("--backend", choices=("auto", "triton", "torch"), help="default: auto")
    add_spec(parser)
    parser.set_defaults(command=_check)


def _check(options: argparse.Namespace) -> int:
    device = the_device(options.device)
    backend = _backend(options.backend, device)

    from rich.console import Console

    from warploom.ops import operators
    from warploom.report.table import Table, render_text
    from warploom.testing.specs import load_specs

    own = names_in(load_specs(options.spec), "operators")
    known = operators()
    names = pick(options.names or own, known, "operator", "_")
    if device.type == "cuda" and backend != "torch":
        check_compilers()
    sample = device.type == "cpu" and backend == "triton" and options.backend != "triton"
    print(describe(device, backend))
    fused = [name for name in names if known[name].fused]
    if backend == "torch" and device.type == "cpu":
        _say_what_is_checked(names, fused)
        names = fused
        if not names:
            print("warploom: nothing was checked", file=sys.stderr)
            return 1
    elif sample:
        print(
            f"Checked against float64: cases of the kernels for about {SAMPLE_SECONDS} s, in Triton's interpreter"
        )
        print("(`warploom check --backend triton` checks every case)." + _mention_fused(fused), flush=True)
    else:
        print(f"Checked: backend {backend} against float64.", flush=True)
    places = _spread(names) if sample else _in_order(names)
    began = time.monotonic()
    with Console(stderr=True).status(f"{len(places)} cases"):  # on a terminal only
        seconds = SAMPLE_SECONDS if sample else None
        found = list(_results(places, options.spec, backend, device, seconds, len(names)))
        count = len(found)
        if sample:
            found += _results(_in_order(fused), options.spec, "torch", device)
        results = [result for of_case in found for result in of_case]
    failures = [result for result in results if not result.ok]
    rows = []
    for key in sorted(
        {(result.operator, result.dtype, result.mode) for result in results}, key=_reading_order(names)
    ):
        some = [result for result in results if (result.operator, result.dtype, result.mode) == key]
        verdict = "ok" if all(result.ok for result in some) else "FAILED"
        rows.append([*key, str(len(some)), f"{max(result.ratio for result in some):.2f}", verdict])
    heads = ["operator", "dtype", "mode", "cases", "worst error / budget", ""]
    print(render_text([Table.of(heads, rows, words=3)], width()))
    if count < len(places):
        print(f"{count} of {len(places)} cases of the kernels")
    print(f"{len(results)} comparisons with float64 in {time.monotonic() - began:.0f} s, {len(failures)} failed")
    reasons: dict[str, list[CheckResult]] = {}
    for failure in failures:
        reasons.setdefault(failure.detail, []).append(failure)
    for reason, of_reason in reasons.items():
        first = of_reason[0]
        parameters = " ".join(f"{name}={value}" for name, value in first.case.items())
        more = f" (and {len(of_reason) - 1} more)" if len(of_reason) > 1 else ""
        print(f"{first.operator} {first.mode} {parameters}{more}: {reason}")
    return int(bool(failures))


def _reading_order(names: Sequence[str]) -> Callable[[tuple[str, str, str]], tuple[Any, ...]]:
    """Returns the order of rows: operators as they were named, the forward before the backward."""
    return lambda key: (names.index(key[0]), key[1], key[2] != "fwd")


def _backend(asked: str | None, device: torch.device) -> str:
    """Returns the backend that is checked, by its own name where that is known before any call.

    Nothing that defines a kernel may have been imported: on a CPU kernels run in Triton's interpreter.
    """
    if device.type == "cuda" or asked == "torch":
        return asked or "auto"
    from warploom.runtime.backend import HAS_TRITON

    if HAS_TRITON and importlib.util.find_spec("numpy") is None:
        raise BackendError(
            "check: on a CPU kernels run in Triton's interpreter, which needs numpy: pip install numpy"
        )
    if "triton" not in sys.modules:
        os.environ["TRITON_INTERPRET"] = "1"  # read when the first kernel is defined
    interpreted = HAS_TRITON and os.environ.get("TRITON_INTERPRET") == "1"
    if asked == "triton" and not interpreted:
        raise BackendError("check: --backend triton: on a CPU the kernels need Triton, for its interpreter")
    return "triton" if interpreted else "torch"


def _say_what_is_checked(names: Sequence[str], fused: Sequence[str]) -> None:
    """Print which operators are checked: where the backend torch is the reference, there is nothing to compare."""
    same = [name for name in names if name not in fused]
    if fused:
        print(f"Checked: PyTorch's fused path against float64: {', '.join(fused)}.")
    if same:
        print(f"Not checked, backend torch is the definition itself: {', '.join(same)}.")


def _mention_fused(fused: Sequence[str]) -> str:
    return f" PyTorch's fused path: {', '.join(fused)}." if fused else ""


def _in_order(names: Sequence[str]) -> list[tuple[str, int]]:
    from warploom.ops import operators

    return [(name, index) for name in names for index in range(len(operators()[name].check_cases))]


def _spread(names: Sequence[str]) -> list[tuple[str, int]]:
    """Returns the cases of operators by turns: any first few are of every operator, spread over its cases."""
    from warploom.ops import operators

    counts = {name: len(operators()[name].check_cases) for name in names}
    orders = {name: sorted(range(count), key=lambda i: i * _GOLDEN % 1) for name, count in counts.items()}
    most = max(counts.values(), default=0)
    return [(name, orders[name][turn]) for turn in range(most) for name in names if turn < counts[name]]


def _results(
    places: Sequence[tuple[str, int]],
    specs: Sequence[Path],
    backend: str,
    device: torch.device,
    seconds: float | None = None,
    fewest: int = 0,
) -> Iterator[list[CheckResult]]:
    """Yields the results of each case, in order; ends after ``seconds``, but not before ``fewest`` cases."""
    check = functools.partial(_check_place, backend=backend, device=device)
    processes = _processes(len(places), device)
    if processes < 2:
        began = time.monotonic()
        for number, place in enumerate(places):
            if seconds is not None and number >= fewest and time.monotonic() - began > seconds:
                return
            yield check(place)
        return
    from warploom.testing.workers import start_workers

    with start_workers(processes, specs) as pool:
        try:
            yield from pool.map(check, places, chunksize=CASES_AT_ONCE)
        except BrokenProcessPool as error:
            raise WarploomError(
                "check: a process with some of the cases died; try the operators one by one"
            ) from error


def _processes(cases: int, device: torch.device) -> int:
    """Returns the number of processes: several on a GPU, where nearly every case compiles a kernel."""
    return min(MOST_PROCESSES, os.cpu_count() or 1, cases // CASES_AT_ONCE) if device.type == "cuda" else 1


def _check_place(place: tuple[str, int], backend: str, device: torch.device) -> list[CheckResult]:
    from warploom.ops import operators
    from warploom.testing.conformance import check_case

    operator = operators()[place[0]]
    return check_case(operator, operator.check_cases[place[1]], backend, device)
