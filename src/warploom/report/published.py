"""Figures that others have published, read from the CSV files beside this module (``published/README.md``)."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from warploom.bench.records import spell
from warploom.ops import benches
from warploom.ops.spec import SEEDS, Bench, Case
from warploom.report.labels import sort_xs
from warploom.report.panels import Panel, Section
from warploom.report.table import Table, format_number

FOLDER = Path(__file__).with_name("published")
FAILURES = ("OOM", "-1")


@dataclass(frozen=True)
class Published:
    """One published number."""

    gpu: str
    """The GPU of the publication, or ``GPU not stated``."""
    operator: str
    metric: str
    """``speed`` (milliseconds) or ``memory`` (peak MiB)."""
    mode: str
    provider: str
    value: float | None
    """The number, or None if the publication reports a failure."""
    case: Mapping[str, Any] = field(hash=False)
    """The parameters of the publication, including the one along the axis, by our names and values."""
    failure: str = ""
    """The word in place of a number: ``OOM`` for memory that ran out, or ``-1`` for an error; else empty."""

    @property
    def told(self) -> str:
        """The number or the failure as text."""
        return self.failure or format_number(self.value)

    def matches(self, operator: str, mode: str, case: Mapping[str, Any], ignore: str = "") -> bool:
        """Returns True if this is the same problem: each parameter that both have, except ``ignore``, is equal."""
        same = all(case.get(name, value) == value for name, value in self.case.items() if name != ignore)
        return same and (operator, mode) == (self.operator, self.mode)


@cache
def read_published() -> tuple[Published, ...]:
    """Read every published figure, in the order of the files and their lines."""
    return tuple(row for path in sorted(FOLDER.glob("*.csv")) for row in _read_rows(path))


@dataclass(frozen=True)
class PublishedCase:
    """One row of the published tables: a case in a mode, as the suite ``seeds`` measures it."""

    bench: Bench
    case: Case
    mode: str
    figures: tuple[Published, ...]
    """The published numbers of all providers, of speed and memory."""


def list_published_cases() -> list[PublishedCase]:
    """Returns every published row of the benches that are known, in the order of the suite ``seeds``."""
    figures: dict[tuple[str, str], list[Published]] = {}
    for row in read_published():
        figures.setdefault((row.operator, row.mode), []).append(row)
    found = []
    for bench in benches().values():
        for case in bench.suites[SEEDS]("cuda") if SEEDS in bench.suites else ():
            for mode in bench.modes:
                rows = figures.get((bench.record_name, mode), [])
                if own := tuple(row for row in rows if row.matches(bench.record_name, mode, case)):
                    found.append(PublishedCase(bench, case, mode, own))
    return found


MEASURED = ("warploom", "torch", "torch_compile")
"""Providers that stand beside published ones: ours, and those that were published under the same names."""


def make_published_table(section: Section, panel: Panel, mode: str, metric: str) -> Table | None:
    """Returns published figures of a panel's problems beside ours of the same problems.

    Args:
        section: The bench.
        panel: Its combination of parameters: all but the one along the axis are equal in what is found.
        mode: The mode.
        metric: ``speed`` (milliseconds) or ``memory`` (peak MiB).
    """
    case = {**section.constants, **panel.parameters}
    rows = [row for row in read_published() if row.metric == metric and section.x in row.case]
    rows = [row for row in rows if row.matches(section.operator, mode, case, ignore=section.x)]
    if not rows:
        return None
    cells = {(row.case[section.x], f"{row.provider} ({row.gpu})"): row.told for row in rows}
    lines, device = panel.at(mode), panel.device or section.device or "measured"
    for name in (name for name in MEASURED if name in lines):
        for x, point in lines[name].items():
            value = point.ms if metric == "speed" else point.record.peak_memory_mib if point.ms else None
            cells[x, f"{name} ({device})"] = format_number(value) or point.badge
    published = {row.case[section.x] for row in rows}
    names = list(dict.fromkeys(name for _, name in cells))
    found = [[spell(x), *(cells.get((x, name), "") for name in names)] for x in sort_xs(published)]
    return Table.of([section.x, *names], found)


def _read_rows(path: Path) -> Iterator[Published]:
    with path.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            gpu, operator, metric, mode, provider, value, *_ = row.values()
            case = {name: _read_value(text) for name, text in list(row.items())[6:] if text}
            failure = value if value in FAILURES else ""
            yield Published(gpu, operator, metric, mode, provider, None if failure else float(value), case, failure)


def _read_value(text: str) -> int | str | bool:
    return int(text) if text.isdigit() else {"true": True, "false": False}.get(text, text)
