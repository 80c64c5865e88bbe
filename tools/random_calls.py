"""Random valid calls of every public function, held to the contract of all operators.

``python tools/random_calls.py lrpe_rotate --seconds 600`` draws calls for so long; a failure is printed as a line
that repeats it. See `random_cases`.

With ``--compile 90`` nothing is run: each kernel variant that the calls would launch is compiled for that GPU,
which need not be there, and held to what `testing.build` checks. One that does not compile, compiles to a trap,
takes too much shared memory or multiplies what it reads from nowhere is printed with its call. Spilled registers
fail none.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch
from random_cases import OPERATORS, Call, Fault, Outcome, Plan, Source, parse, run_calls, search, shrink, text_of
from random_cases.judging import Prepared

from warploom.cli.common import add_device, seconds, the_device
from warploom.errors import ArgumentError, WarploomError
from warploom.runtime.backend import HAS_TRITON

MOST_WORKERS = 16
"""Processes on one GPU."""
SHRUNK = 8
"""Failures that are simplified; of the rest there is a line that repeats them."""
SHRINKING = 15.0
"""Seconds for each."""
EVERY = 10.0
"""Seconds between two lines of progress."""
MULTIPROCESSORS = 132
"""Multiprocessors of the GPU that is compiled for, which some plans depend on."""


def pick_operators(names: Sequence[str]) -> tuple[str, ...]:
    """Returns the operators asked for, all of them if none.

    Raises:
        ArgumentError: There is no such operator.
    """
    for name in names:
        if name not in OPERATORS:
            raise ArgumentError(f"no operator {name!r} with random calls; there are: {', '.join(OPERATORS)}")
    return tuple(names) or OPERATORS


def can_run_kernels(device: torch.device) -> bool:
    """Returns True if Triton's kernels run there."""
    if device.type == "cuda" or not HAS_TRITON:
        return HAS_TRITON
    from warploom.runtime import launch

    return launch.runs_on_cpu()


def run_random(plan: Plan) -> int:
    """Search, print what was found, and return the exit status."""
    source = plan.source
    chosen = ("triton", None) if plan.device == "cpu" else ("triton", "auto", None)
    kernels = plan.backend in chosen and can_run_kernels(torch.device(plan.device))
    where = plan.device if kernels else f"{plan.device}, in PyTorch: no kernel runs"
    print(f"seed {source.seed}: {', '.join(source.operators)} on {where}", flush=True)
    shown, heard = 0, time.monotonic()

    def report(outcome: Outcome) -> None:
        nonlocal shown, heard
        for fault in outcome.faults[shown:]:
            print(f"FAILED {_line_of(fault)}\n  {_command(plan, fault)}", flush=True)
        shown = len(outcome.faults)
        if time.monotonic() - heard > EVERY:
            heard = time.monotonic()
            print(f"{outcome.seconds:.0f} s: {outcome.describe()}", file=sys.stderr, flush=True)

    outcome = search(plan, report)
    unknown = outcome.unknown(plan.device)
    for fault in _distinct(unknown)[:SHRUNK]:
        print(report_of(fault, plan, SHRINKING), flush=True)
    width = max(map(len, outcome.tallies), default=0)
    for operator, tally in sorted(outcome.tallies.items()):
        print(
            f"{operator:{width}}  {tally.calls:7} calls  {tally.cases:7} cases  {tally.redrawn:4} redrawn  "
            f"worst error / budget {tally.worst:.2f}"
        )
    known = f", {len(outcome.faults) - len(unknown)} of them known" if outcome.faults else ""
    print(f"seed {source.seed}, {outcome.seconds:.0f} s: {outcome.describe()}{known}")
    return int(bool(unknown))


def run_repeat(text: str, plan: Plan) -> int:
    """Run what a line of an earlier run says, and return the exit status."""
    tally, faults = run_calls(parse(text), torch.device(plan.device), plan.backend)
    for fault in _distinct(faults):
        print(f"FAILED {_line_of(fault)}")
    print(f"{tally.calls} calls, {tally.cases} cases compared with float64, {len(faults)} failed")
    return int(bool(faults))


def report_of(fault: Fault, plan: Plan, seconds: float) -> str:
    """Returns a failure, simplified: what is wrong, and the line that repeats it."""
    simple = shrink(fault, torch.device(plan.device), plan.backend, seconds)
    return f"SIMPLIFIED {_line_of(simple)}\n  {_command(plan, simple)}"


def _command(plan: Plan, fault: Fault) -> str:
    """Returns the command line that repeats a failure."""
    words = ["python", "tools/random_calls.py", "--repeat", text_of(fault.distinct), "--device", plan.device]
    words += ["--backend", plan.backend] if plan.backend else []
    interpreted = plan.device == "cpu" and os.environ.get("TRITON_INTERPRET") == "1"
    return ("TRITON_INTERPRET=1 " if interpreted else "") + shlex.join(words)


def _line_of(fault: Fault) -> str:
    return f"{fault.calls[-1].operator}: {fault.kind}: {fault.detail}"


def _distinct(faults: Sequence[Fault]) -> list[Fault]:
    """Returns one of every kind for each operator, the first found; then the others."""
    first: dict[tuple[str, str], Fault] = {}
    for fault in faults:
        first.setdefault((fault.calls[-1].operator, fault.kind), fault)
    chosen = list(first.values())
    return chosen + [fault for fault in faults if not any(fault is one for one in chosen)]


def variants_of(call: Call, arch: int) -> list[Any]:
    """Returns the kernel variants that a call would launch; none if it is refused."""
    from warploom.runtime import launch

    with launch.record_builds(arch, MULTIPROCESSORS) as builds:
        try:
            Prepared(call, torch.device("cpu"), "triton").run()
        except WarploomError:
            return []
    return list(builds.values())


def run_builds(seed: int, operators: tuple[str, ...], arch: int, seconds: float) -> int:
    """Compile what random calls would launch, and return the exit status."""
    from warploom.testing.build import ARCHITECTURES, BuildError, build

    if arch not in ARCHITECTURES:
        raise ArgumentError(f"--compile {arch}: expected one of {', '.join(map(str, ARCHITECTURES))}")
    source = Source(seed, operators, anything=True)
    index = failed = 0
    began = heard = time.monotonic()
    seen: set[tuple[Any, ...]] = set()
    while time.monotonic() - began < seconds:
        for call in source.family(index):
            for variant in variants_of(call, arch) if call.dtype != "float64" else ():
                if variant.key in seen:
                    continue
                seen.add(variant.key)
                try:
                    build(variant, arch)
                except BuildError as error:
                    failed += 1
                    print(f"FAILED {error}\n  of {text_of([call])}", flush=True)
                if time.monotonic() - heard > EVERY:
                    heard = time.monotonic()
                    print(f"{heard - began:.0f} s: {len(seen)} variants, {failed} failed", flush=True)
        index += 1
    print(f"seed {seed}: {len(seen)} variants of {index} families for sm_{arch}, {failed} failed")
    return int(failed > 0)


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
    parser.add_argument("--compile", type=int, metavar="SM", help="compile for this GPU, e.g. 90, and run nothing")
    parser.add_argument("--repeat", metavar="CALL", help="a call that failed, as it was printed")
    options = parser.parse_args(arguments)
    try:
        return _run(options)
    except WarploomError as error:
        print(f"random_calls.py: {error}", file=sys.stderr)
        return 2


def _run(options: argparse.Namespace) -> int:
    seed = int.from_bytes(os.urandom(4)) if options.seed is None else options.seed
    operators = pick_operators([name.replace("-", "_") for name in options.names])
    if options.compile:
        return run_builds(seed, operators, options.compile, options.seconds)
    device = the_device(options.device)
    on_gpu, kernels = device.type == "cuda", can_run_kernels(device)
    if not kernels:  # this operator has no other way to run
        operators = tuple(name for name in operators if name != "rotary_attention")
    source = Source(seed, operators, small=not on_gpu)  # in the interpreter sizes are small
    workers = options.workers or (min(MOST_WORKERS, os.cpu_count() or 1) if on_gpu else 1)
    plan = Plan(source, device.type, options.backend or (None if kernels else "auto"), options.seconds, workers)
    return run_repeat(options.repeat, plan) if options.repeat else run_random(plan)


if __name__ == "__main__":
    sys.exit(main())
