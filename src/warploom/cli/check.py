"""``warploom check``: operators against float64 on small odd cases."""

from __future__ import annotations

import argparse
import time

from warploom.cli.common import Commands, add_device, add_spec, names_in, pick, the_device


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
    from warploom.testing.conformance import check_operator

    device = the_device(options.device)
    own = names_in(load_specs(options.spec), "operators")
    known = operators()
    table = Table("operator", "dtype", "mode", "cases", "worst error / budget", "")
    failures = []
    began = time.monotonic()
    total = 0
    for name in pick(options.names or own, known, "operator", "_"):
        with Console(stderr=True).status(f"{name}: {len(known[name].check_cases)} cases"):  # on a terminal only
            results = check_operator(known[name], options.backend, device)
        total += len(results)
        failures += [result for result in results if not result.ok]
        for dtype, mode in dict.fromkeys((result.dtype, result.mode) for result in results):
            rows = [result for result in results if (result.dtype, result.mode) == (dtype, mode)]
            worst = max(result.ratio for result in rows)
            verdict = "ok" if all(result.ok for result in rows) else "FAILED"
            table.add_row(name, dtype, mode, str(len(rows)), f"{worst:.2f}", verdict)
    Console().print(table)
    print(f"{total} comparisons with float64 in {time.monotonic() - began:.0f} s, {len(failures)} failed")
    for failure in failures:
        parameters = " ".join(f"{name}={value}" for name, value in failure.case.items())
        print(f"{failure.operator} {failure.mode} {parameters}: {failure.detail}")
    return int(bool(failures))
