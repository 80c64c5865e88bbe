"""Random valid calls of every public function, held to the contract of all operators.

``python tools/random_calls.py lrpe_rotate --seconds 600`` draws calls for so long; a failure is printed as a line
that repeats it. See `random_cases`.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from random_cases import command
from random_cases.searching import Plan

from warploom.cli.common import add_device, seconds, the_device
from warploom.errors import WarploomError

MOST_WORKERS = 16
"""Processes on one GPU."""


def _count(text: str) -> int:
    """A number of processes."""
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a number from 1, got {text!r}")
    return int(text)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="random_calls.py", description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="operators, e.g. lrpe_rotate (default: all)")
    add_device(parser)
    parser.add_argument("--backend", choices=("auto", "triton", "torch"), help="default: each call's own")
    parser.add_argument("--seconds", type=seconds, default=60.0, help="how long (default: 60)")
    parser.add_argument("--seed", type=int, metavar="N", help="where the calls come from (default: a new one)")
    parser.add_argument(
        "--workers", type=_count, metavar="K", help="processes (default: up to 16 on a GPU, else 1)"
    )
    parser.add_argument("--repeat", metavar="CALL", help="a call that failed, as it was printed")
    options = parser.parse_args(arguments)
    try:
        return _run(options)
    except WarploomError as error:
        print(f"random_calls.py: {error}", file=sys.stderr)
        return 2


def _run(options: argparse.Namespace) -> int:
    device = the_device(options.device)
    seed = int.from_bytes(os.urandom(4)) if options.seed is None else options.seed
    operators = command.pick_operators([name.replace("-", "_") for name in options.names])
    source = command.source_of(seed, operators, device)
    workers = options.workers or (min(MOST_WORKERS, os.cpu_count() or 1) if device.type == "cuda" else 1)
    backend = options.backend
    if backend is None and not command.can_run_kernels(device):
        backend = "auto"
    plan = Plan(source, device.type, backend, options.seconds, workers)
    return command.run_repeat(options.repeat, plan) if options.repeat else command.run_random(plan)


if __name__ == "__main__":
    sys.exit(main())
