"""The top of the report: a sentence and a row of dots for each operator on each device. A dot is a case."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from warploom.report.labels import format_seconds
from warploom.report.panels import STATES, Section
from warploom.report.rivals import Case, format_ratio, list_rivals, summarize
from warploom.report.table import Cell, Table, format_number

RESULTS = {"slower": "faster", "same": "level", "faster": "slower"}
"""The operator's result by the verdict about the alternative."""
_TICKS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 0.8, 1, 1.5, 2, 3, 5, 10, 20, 50, 100, 200, 500, 1000)
_APART = 7
"""The per cent of the width that must be between two ticks."""
_LANES, _NEAR = (0, 1, -1, 2, -2, 3, -3, 4, -4), 1.7
"""The rows that dots may lie in, and the per cent of the width within which two dots of a row would overlap."""


@dataclass(frozen=True)
class Dot:
    """A case that has an alternative."""

    x: float
    """Per cent of the width."""
    lane: int
    result: str
    """``faster``, ``level`` or ``slower``."""
    words: str
    """The case and both times, a line each."""


@dataclass(frozen=True)
class Row:
    """An operator on a device."""

    operator: str
    device: str
    sentence: str
    note: str
    """Cases that the sentence leaves out."""
    dots: Sequence[Dot]
    cases: Sequence[Case]
    ours: bool
    """True if kernels of warploom ran."""
    definition: bool
    """True if PyTorch's definition stands for the operator."""

    @property
    def place(self) -> str:
        """The device's name without its maker and memory."""
        return re.sub(r"^NVIDIA | \d+GB.*$", "", self.device)

    @property
    def height(self) -> int:
        """Pixels."""
        return 12 + 16 * max((abs(dot.lane) for dot in self.dots), default=0)


@dataclass(frozen=True)
class Overview:
    """The rows, and ticks of their common axis: their place in per cent, and their label."""

    rows: Sequence[Row]
    ticks: Sequence[tuple[float, str]]

    @property
    def counts(self) -> dict[str, int]:
        """The number of cases of warploom's kernels by result."""
        counted = Counter(dot.result for row in self.rows if row.ours for dot in row.dots)
        return {result: counted[result] for result in RESULTS.values()}

    @property
    def foreign(self) -> bool:
        """True if PyTorch's definition stands for every operator, as on a CPU; the page asks."""
        return bool(self.rows) and all(row.definition for row in self.rows)

    @property
    def losses(self) -> str:
        """The operators that have cases in which an alternative is faster, and how many."""
        ours = [(row.operator, dot.result) for row in self.rows if row.ours for dot in row.dots]
        counted = Counter(operator for operator, result in ours if result == "slower")
        return ", ".join(f"{operator} ({count})" for operator, count in counted.most_common())


def make_overview(sections: Iterable[Section]) -> Overview:
    """Returns the overview of sections. Rows that can be compared come first."""
    rows = []
    for section in sections:
        found: dict[str, list[Case]] = {}
        for summary in summarize(section):
            found.setdefault(summary.device, []).extend(summary.cases)
        rows += [(section, device, cases) for device, cases in found.items() if cases]
    rows.sort(key=lambda row: not any(case.pair for case in row[2]))
    ratios = [case.pair.ratio for _, _, cases in rows for case in cases if case.pair]
    low, high = math.log(min([0.75, *ratios]) / 1.05), math.log(max([1.5, *ratios]) * 1.05)

    def place(ratio: float) -> float:
        return 100 * (math.log(ratio) - low) / (high - low)

    made = []
    for section, device, cases in rows:
        sentence, note = describe(section, cases)
        dots = _place_dots(cases, place)
        whose = section.subject == "ours", section.definition
        made.append(Row(section.operator, device, sentence, note, dots, cases, *whose))
    ticks: list[tuple[float, str]] = []
    for x, tick in [(place(tick), tick) for tick in _TICKS if low <= math.log(tick) <= high]:
        if tick == 1 or (abs(x - place(1)) >= _APART and (not ticks or x - ticks[-1][0] >= _APART)):
            ticks.append((x, f"{tick:g}×"))
    return Overview(made, ticks)


def describe(section: Section, cases: Sequence[Case]) -> tuple[str, str]:
    """Returns how an operator does on a device, losses included, and which cases that leaves out."""
    compared = [(case, case.pair) for case in cases if case.pair]
    won = sorted(pair.ratio for _, pair in compared if pair.verdict == "slower")
    level = [pair.ratio for _, pair in compared if pair.verdict == "same"]
    lost = [(case, pair) for case, pair in compared if pair.verdict == "faster"]
    shares = [p.fraction for p in (case.point for case in cases) if p.fraction and p.badge == "ok"]
    parts = []
    if compared:
        every = "1 case" if len(compared) == 1 else f"{len(compared)} cases"
        times = f", {' to '.join(dict.fromkeys(map(format_ratio, (won[0], won[-1]))))} times" if won else ""
        parts.append(f"faster than the fastest alternative in {len(won)} of {every}{times}")
    if level:
        below = sum(ratio < 1 for ratio in level)
        ends = " to ".join(dict.fromkeys(map(format_ratio, (min(level), max(level)))))
        parts.append(f"level in {len(level)} ({ends}{f'; {below} nominally slower' if below else ''})")
    if lost:
        case, pair = min(lost, key=lambda entry: entry[1].ratio)
        most = f"up to {format_ratio(1 / pair.ratio)} times the time of {pair.b.provider}"
        parts.append(f"slower in {len(lost)}, {most} ({case.mode}, {case.words})")
    parts += (
        [f"{100 * median(shares):.{0 if median(shares) > 0.01 else 2}f}\N{NO-BREAK SPACE}% of the limit"]
        if shares
        else []
    )
    who = "" if section.subject == "ours" else f"{section.subject}: "
    if section.definition:
        who = "PyTorch's definition: "
    text = f"{who}{'; '.join(parts) or 'no time of the present code'}."
    alone = sum(bool(case.point.ms) and case.point.badge == "ok" and case.pair is None for case in cases)
    states = Counter(case.point.badge for case in cases)
    notes = [f"{alone} without an alternative in the same run"] if alone else []
    said_as = {"stale": "measured with earlier code"}
    notes += [f"{states[state]} {said_as.get(state, state)}" for state in STATES[1:] if states[state]]
    said = [f"Not counted: {', '.join(notes)}." if compared else f"{', '.join(notes)}."] if notes else []
    timed = Counter(name for case in cases if case.point.ms for name, absent in list_rivals(case) if not absent)
    if any(count < sum(bool(case.point.ms) for case in cases) for count in timed.values()):
        said.append(f"Cases with each of the others: {', '.join(f'{n} {c}' for n, c in timed.most_common())}.")
    return text if who else text[0].upper() + text[1:], " ".join(said)


def make_case_table(overview: Overview) -> Table:
    """Returns a table of every case, with the operator's time and that of the fastest alternative."""
    heads = ["operator", "device", "mode", "case", "ms", "of the limit", "fastest alternative", "its ms"]
    rows = []
    for row in overview.rows:
        for case in row.cases:
            pair, point = case.pair, case.point
            words = [row.operator, row.place, case.mode, case.words, format_number(point.ms)]
            words.append(f"{point.fraction:.0%}" if point.fraction else "")
            other = (pair.b.provider, format_number(pair.b.ms), format_ratio(pair.ratio)) if pair else ("", "", "")
            state = point.badge if point.badge != "ok" else ""
            result = Cell(RESULTS[pair.verdict] if pair else "", state, point.reason if state else "")
            rows.append([*map(Cell, [*words, *other]), result])
    return Table([*heads, "times as long", "result"], rows, words=4)


def _place_dots(cases: Sequence[Case], place: Callable[[float], float]) -> list[Dot]:
    """Returns a dot for each case that can be compared, in a lane in which it overlaps no other if there is one."""
    dots: list[Dot] = []
    ends = dict.fromkeys(_LANES, -math.inf)
    compared = [(case, case.pair) for case in cases if case.pair]
    for case, pair in sorted(compared, key=lambda entry: entry[1].ratio):
        x = place(pair.ratio)
        free = (lane for lane in _LANES if x - ends[lane] >= _NEAR)
        lane = next(free, min(_LANES, key=lambda lane: ends[lane]))
        ends[lane] = x
        low, high = map(format_ratio, pair.interval)
        times = [f"{record.provider}: {format_seconds((record.ms or 0.0) / 1e3)}" for record in (pair.a, pair.b)]
        result = RESULTS[pair.verdict]
        words = [f"{pair.operator} {pair.mode}", case.words, *times]
        words.append(f"{format_ratio(pair.ratio)}× ({low} … {high}): {result}")
        dots.append(Dot(x, lane, result, "\n".join(words)))
    return dots
