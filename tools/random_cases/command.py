"""``tools/random_calls.py``: what it prints."""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Sequence

import torch

from random_cases.calls import OPERATORS
from random_cases.families import Fault, Source, parse, run_calls, text_of
from random_cases.searching import Outcome, Plan, search
from random_cases.shrinking import shrink
from warploom.errors import ArgumentError
from warploom.runtime.backend import HAS_TRITON

__all__ = ["pick_operators", "report_of", "run_random", "run_repeat"]

SHRUNK = 8
"""Failures that are simplified; of the rest there is a line that repeats them."""
SHRINKING = 15.0
"""Seconds for each."""
EVERY = 10.0
"""Seconds between two lines of progress."""


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


def source_of(seed: int, operators: Sequence[str], device: torch.device) -> Source:
    """Returns where families come from on a device: in the interpreter they are small."""
    chosen = tuple(operators)
    if not can_run_kernels(device):  # this operator has no other way to run
        chosen = tuple(name for name in chosen if name != "rotary_attention")
    return Source(seed, chosen, small=device.type != "cuda")


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
