"""``warploom check``: operators against float64 on small odd cases."""

from __future__ import annotations

import argparse
import functools
import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from typing import TYPE_CHECKING

from warploom.cli.common import Commands, add_device, add_spec, names_in, pick, the_device
from warploom.errors import WarploomError

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
    parser.add_argument("--backend", choices=("auto", "triton", "torch"), default="auto")
    add_spec(parser)
    parser.set_defaults(command=_check)


def _check(options: argparse.Namespace) -> int:
    from rich.console import Console
    from rich.table import Table

    from warploom.bench.specs import load_specs
    from warploom.ops import operators

    device = the_device(options.device)
    own = names_in(load_specs(options.spec), "operators")
    known = operators()
    names = pick(options.names or own, known, "operator", "_")
    places = [(name, index) for name in names for index in range(len(known[name].check_cases))]
    began = time.monotonic()
    with Console(stderr=True).status(f"{len(places)} cases"):  # on a terminal only
        results = [result for of_case in _results(places, options, device) for result in of_case]
    failures = [result for result in results if not result.ok]
    table = Table("operator", "dtype", "mode", "cases", "worst error / budget", "")
    for key in dict.fromkeys((result.operator, result.dtype, result.mode) for result in results):
        rows = [result for result in results if (result.operator, result.dtype, result.mode) == key]
        worst = max(result.ratio for result in rows)
        verdict = "ok" if all(result.ok for result in rows) else "FAILED"
        table.add_row(*key, str(len(rows)), f"{worst:.2f}", verdict)
    Console().print(table)
    print(f"{len(results)} comparisons with float64 in {time.monotonic() - began:.0f} s, {len(failures)} failed")
    for failure in failures:
        parameters = " ".join(f"{name}={value}" for name, value in failure.case.items())
        print(f"{failure.operator} {failure.mode} {parameters}: {failure.detail}")
    return int(bool(failures))


def _results(
    places: Sequence[tuple[str, int]], options: argparse.Namespace, device: torch.device
) -> Iterator[list[CheckResult]]:
    """The results of each case, in order."""
    check = functools.partial(_check_place, backend=options.backend, device=device)
    processes = _processes(len(places), device)
    if processes < 2:
        yield from map(check, places)
        return
    from warploom.bench.workers import workers

    with workers(processes, options.spec) as pool:
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
