"""``warploom check``: operators against float64 on small odd cases."""

from __future__ import annotations

import argparse
import functools
import os
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import TYPE_CHECKING

from warploom.cli.common import Commands, add_device, add_spec, describe, names_in, pick, the_device, width
from warploom.errors import BackendError, WarploomError

if TYPE_CHECKING:
    import torch

    from warploom.testing.conformance import CheckResult

MOST_PROCESSES = 8
CASES_AT_ONCE = 4
"""Neighbouring cases, which one process gets together, share kernels."""


def add_parser(commands: Commands) -> None:
    """Add the command."""
    parser = commands.add_parser("check", help="compare operators with float64 on small odd cases")
    parser.add_argument("names", nargs="*", metavar="NAME", help="operators, e.g. lrpe_rotate (default: all)")
    add_device(parser)
    parser.add_argument("--backend", choices=("auto", "triton", "torch"), help="default: auto")
    add_spec(parser)
    parser.set_defaults(command=_check)


def _check(options: argparse.Namespace) -> int:
    from rich.console import Console

    from warploom.ops import operators
    from warploom.report.table import Table, text
    from warploom.testing.specs import load_specs

    device = the_device(options.device)
    own = names_in(load_specs(options.spec), "operators")
    known = operators()
    names = pick(options.names or own, known, "operator", "_")
    backend = _backend(options.backend, device)
    print(describe(device))
    if backend == "torch":
        names = _not_the_reference(names)
        if not names:
            print("warploom: nothing was checked", file=sys.stderr)
            return 1
    else:
        print(f"Checked: backend {backend} against float64.")
    places = [(name, index) for name in names for index in range(len(known[name].check_cases))]
    began = time.monotonic()
    with Console(stderr=True).status(f"{len(places)} cases"):  # on a terminal only
        found = _results(places, options.spec, backend, device)
        results = [result for of_case in found for result in of_case]
    failures = [result for result in results if not result.ok]
    rows = []
    for key in dict.fromkeys((result.operator, result.dtype, result.mode) for result in results):
        some = [result for result in results if (result.operator, result.dtype, result.mode) == key]
        verdict = "ok" if all(result.ok for result in some) else "FAILED"
        rows.append([*key, str(len(some)), f"{max(result.ratio for result in some):.2f}", verdict])
    heads = ["operator", "dtype", "mode", "cases", "worst error / budget", ""]
    print(text([Table.of(heads, rows, words=3)], width()))
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


def _backend(asked: str | None, device: torch.device) -> str:
    """The backend that is checked, by its own name where that is known before any call."""
    if device.type == "cuda":
        return asked or "auto"
    from warploom.runtime.backend import HAS_TRITON

    if asked == "triton" and "triton" not in sys.modules:
        os.environ["TRITON_INTERPRET"] = "1"  # read when the first kernel is defined
    interpreted = HAS_TRITON and os.environ.get("TRITON_INTERPRET") == "1"
    if asked == "triton" and not interpreted:
        raise BackendError("check: --backend triton: on a CPU the kernels need Triton, for its interpreter")
    return "triton" if interpreted and asked in (None, "auto", "triton") else "torch"


def _not_the_reference(names: Sequence[str]) -> list[str]:
    """The operators whose backend torch is not their reference, which is not compared with itself; says which."""
    from warploom.ops import operators

    fused = [name for name in names if operators()[name].fused]
    same = [name for name in names if name not in fused]
    if fused:
        print(f"Checked: PyTorch's fused path against float64: {', '.join(fused)}.")
    if same:
        print(f"Not checked, backend torch is the definition itself: {', '.join(same)}.")
    print("`warploom check --backend triton` runs the kernels in Triton's interpreter, slowly.")
    return fused


def _results(
    places: Sequence[tuple[str, int]], specs: Sequence[Path], backend: str, device: torch.device
) -> Iterator[list[CheckResult]]:
    """The results of each case, in order."""
    check = functools.partial(_check_place, backend=backend, device=device)
    processes = _processes(len(places), device)
    if processes < 2:
        yield from map(check, places)
        return
    from warploom.testing.workers import workers

    with workers(processes, specs) as pool:
        try:
            yield from pool.map(check, places, chunksize=CASES_AT_ONCE)
        except BrokenProcessPool as error:
            raise WarploomError(
                "check: a process with some of the cases died; try the operators one by one"
            ) from error


def _processes(cases: int, device: torch.device) -> int:
    """How many processes share the cases: several on a GPU, where nearly every case compiles a kernel."""
    return min(MOST_PROCESSES, os.cpu_count() or 1, cases // CASES_AT_ONCE) if device.type == "cuda" else 1


def _check_place(place: tuple[str, int], backend: str, device: torch.device) -> list[CheckResult]:
    from warploom.ops import operators
    from warploom.testing.conformance import check_case

    operator = operators()[place[0]]
    return check_case(operator, operator.check_cases[place[1]], backend, device)
