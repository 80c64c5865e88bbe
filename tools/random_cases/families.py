"""Families: a call and a few that differ from it in one thing, run one by one, so that plans meet them all."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import torch

from random_cases.calls import OPERATORS, Call, make_call
from random_cases.choices import Choices, as_tuples
from random_cases.judging import Failure, Prepared, Verdict, judge, judge_entry, repeat
from warploom.errors import ArgumentError
from warploom.runtime.plans import ALL_PLANS

__all__ = ["FAMILIES", "Fault", "Source", "Tally", "forget_plans", "parse", "run_calls", "text_of"]

FAMILIES = 256
"""That share the options which kernels are compiled for: a run of them."""
ROUNDS = 3


@dataclass(frozen=True)
class Source:
    """Where families come from: a family is the same for the same source and index, on any machine."""

    seed: int
    operators: tuple[str, ...] = OPERATORS
    small: bool = False
    """Sizes that suit Triton's interpreter."""
    anything: bool = False
    """No options are shared between families, so that nearly every call compiles kernels of its own."""

    def operator(self, index: int) -> str:
        """Returns that of a family: where kernels are compiled, the same for a run of them."""
        at_random = self.anything or self.small
        return self.operators[(index if at_random else index // FAMILIES) % len(self.operators)]

    def family(self, index: int) -> list[Call]:
        """Returns the calls of a family: the first, and its siblings."""
        operator = self.operator(index)
        seed = f"{self.seed}:{operator}:{index}"
        settled = None if self.anything or self.small else f"{self.seed}:{operator}:{index // FAMILIES}"
        first = make_call(operator, Choices(seed, settled=settled, small=self.small))
        calls, random = [first], Random(seed)
        for sibling in range(random.choice((1, 2, 3))):
            other = random.choice([name for name, options in first.varied.items() if options > 1])
            choices = Choices(f"{seed}:{sibling}", first.answers, settled=settled, other=other, small=self.small)
            calls.append(make_call(operator, choices))
        return calls


@dataclass
class Tally:
    """The counts of what was run."""

    calls: int = 0
    """Calls of an operator, forward and, where a gradient is asked for, backward."""
    cases: int = 0
    """Calls that differ, each compared with float64."""
    redrawn: int = 0
    """Results that missed the budget of one draw and kept that of more."""
    worst: float = 0.0
    """The largest error over its budget."""

    def add(self, other: Tally) -> None:
        """Add up."""
        self.calls += other.calls
        self.cases += other.cases
        self.redrawn += other.redrawn
        self.worst = max(self.worst, other.worst)


@dataclass(frozen=True)
class Fault:
    """A call that failed, among others that were run before it."""

    calls: tuple[Call, ...]
    """Those that were run, up to the one that failed."""
    kind: str
    detail: str
    fatal: bool = False
    """True if the process can run nothing more."""
    rounds: int = field(default=1, compare=False)
    """The number of times that the calls were run until it showed."""

    @property
    def distinct(self) -> list[Call]:
        """The calls, each once."""
        return [call for place, call in enumerate(self.calls) if call not in self.calls[:place]]


def run_calls(
    calls: Sequence[Call], device: torch.device, backend: str | None, rounds: int | None = None
) -> tuple[Tally, list[Fault]]:
    """Run calls one after the other, and all of them again; the first time each is compared with float64.

    Args:
        calls: Of any operators.
        device: Where to run them.
        backend: What every call runs on; None for its own choice.
        rounds: How many times; `ROUNDS` by default.
    """
    tally, faults = Tally(), []
    known: dict[int, tuple[Prepared, Verdict]] = {}
    so_far: list[Call] = []
    for round_ in range(rounds or ROUNDS):
        for number, call in enumerate(calls):
            if round_ and number not in known:
                continue
            so_far.append(call)
            tally.calls += 1
            try:
                if round_ == 0:
                    tally.cases += 1
                    prepared = Prepared(call, device, backend)
                    verdict = judge(prepared)
                    known[number] = prepared, verdict
                    tally.redrawn += verdict.redrawn
                    tally.worst = max(tally.worst, verdict.ratio)
                elif round_ == 1:
                    repeat(*known[number])
                else:
                    tally.calls += judge_entry(*known[number])
                    repeat(Prepared(call, device, backend), known[number][1])  # at other addresses
            except Failure as failure:
                known.pop(number, None)
                found = Fault(tuple(so_far), failure.kind, failure.detail, failure.fatal, rounds=round_ + 1)
                faults.append(found)
                if failure.fatal:
                    return tally, faults
    return tally, faults


def forget_plans() -> None:
    """Let nothing be known of any call, as in a new process."""
    for plans in ALL_PLANS:
        plans.forget()


def text_of(calls: Sequence[Call]) -> str:
    """Returns calls as one line of JSON, from which `parse` makes them again."""
    told = [[call.operator, call.record] for call in calls]
    return json.dumps(told[0] if len(told) == 1 else told, separators=(",", ":"))


def parse(text: str) -> list[Call]:
    """Returns calls from a line of `text_of`.

    Raises:
        ArgumentError: It is not such a line.
    """
    try:
        told: Any = json.loads(text)
        told = [told] if isinstance(told[0], str) else told
        given = [(operator, as_tuples(record)) for operator, record in told]
        calls = [make_call(operator, Choices(given=record)) for operator, record in given]
    except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
        raise ArgumentError(f"--repeat: no calls of an operator: {error}") from error
    for call, (_, record) in zip(calls, given):
        for name in (name for name, value in record.items() if call.record.get(name) != value):
            raise ArgumentError(
                f"--repeat: {call.operator}: {name}={record[name]!r} does not fit the other choices"
            )
    return calls
