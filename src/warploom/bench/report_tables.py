"""The report's tables, as rows of cells for the template."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from warploom.bench.labels import sort_xs, spell
from warploom.bench.panels import UNSET, Panel, Point, Section
from warploom.bench.records import LIMIT

__all__ = [
    "Cell",
    "Failure",
    "Table",
    "accuracy_table",
    "bytes_table",
    "failures",
    "memory_table",
    "overviews",
    "time_table",
]


@dataclass(frozen=True)
class Cell:
    """One cell."""

    text: str
    state: str = ""
    """The badge of a result that is not a speed, or a doubtful one; empty for one that is."""
    reason: str = ""
    ours: bool = False
    note: str = ""
    """Small print under the text."""
    share: float | None = None
    """Shades the cell, from 0 to 1."""


@dataclass(frozen=True)
class Table:
    """Column heads and rows; the first cell of a row is its head."""

    heads: Sequence[str]
    rows: Sequence[Sequence[Cell]]


@dataclass(frozen=True)
class Failure:
    """Results without a speed, or with a doubtful one, that share their reason."""

    state: str
    provider: str
    places: str
    reason: str


def overviews(section: Section) -> list[Table]:
    """Show the emphasised provider's share of the limit in every case of a section.

    Returns:
        A table for all panels with the same positions, with a row for each panel and mode; none if there is
        no limit.
    """
    groups: dict[tuple[Any, ...], list[list[Cell]]] = {}
    for panel in section.panels:
        for mode in panel.modes:
            points = panel.at(mode).get(section.emphasis, {})
            xs = panel.xs(mode)
            heads = [Cell(panel.labels.get(name, UNSET)) for name in section.choices]
            row = [*heads, Cell(mode), *(_share_cell(points.get(x)) for x in xs)]
            groups.setdefault(tuple(xs), []).append(row)
    if not any(cell.share for rows in groups.values() for row in rows for cell in row):
        return []
    return [Table([*section.choices, "mode", *map(spell, xs)], rows) for xs, rows in groups.items()]


def time_table(section: Section, panel: Panel, mode: str) -> Table:
    """Show every provider's median, the limit, and the emphasised provider's share of it and rates.

    What has no speed is −1 with a badge.
    """
    limits = panel.limits(mode)
    ours = panel.at(mode).get(section.emphasis, {})

    def cell(point: Point) -> Cell:
        if point.badge == "disturbed":
            return Cell(_number(point.ms), point.badge, point.reason)
        return _failed(point) if point.state != "ok" else Cell(_number(point.ms))

    table = _by_provider(section, panel, mode, cell)
    heads = [*table.heads, "limit", f"{section.emphasis} / limit", "GB/s", "TFLOP/s"]
    rows = [
        [*row, Cell(_number(limits.get(x))), _share_cell(ours.get(x)), *_rates(ours.get(x))]
        for x, row in zip(panel.xs(mode), table.rows)
    ]
    return _without_empty(Table(heads, rows))


def bytes_table(section: Section, panel: Panel, mode: str) -> Table | None:
    """Show the fewest bytes that every provider must move; None if no other function stands beside the bench's."""
    points = [point for point in panel.points if point.record.mode == mode]
    if not any(point.record.provider in section.others for point in points):
        return None

    def cell(point: Point) -> Cell:
        moved = point.record.min_bytes
        return Cell("" if moved is None else f"{moved / 2**20:,.1f}")

    return _by_provider(section, panel, mode, cell)


def memory_table(section: Section, panel: Panel, mode: str) -> Table | None:
    """Show every provider's peak memory; None if none was measured."""
    if not any(point.record.peak_memory_mib for point in panel.points if point.record.mode == mode):
        return None

    def cell(point: Point) -> Cell:
        peak = point.record.peak_memory_mib
        return _failed(point) if point.state != "ok" else Cell("" if peak is None else f"{peak:,.1f}")

    return _by_provider(section, panel, mode, cell)


def accuracy_table(section: Section, panel: Panel, mode: str) -> Table | None:
    """Show every provider's largest error against float64 over its budget; None if no error was measured."""
    points = [point for point in panel.points if point.record.mode == mode]
    if all(point.record.max_error is None for point in points):
        return None

    def cell(point: Point) -> Cell:
        error, budget = point.record.max_error, point.record.error_budget
        state = "" if point.state == "ok" else point.state
        if error is None:
            return Cell("", state, point.reason if state else "")
        ratio = f"{error / budget:.2f}" if budget else "–"
        return Cell(ratio, state, note=f"{error:.2e} / {budget or 0:.2e}")

    return _by_provider(section, panel, mode, cell)


def failures(panel: Panel, mode: str) -> list[Failure]:
    """List what has no speed or a doubtful one, and why."""
    found: dict[tuple[str, str, str], list[Any]] = {}
    for point in panel.points:
        if point.record.mode == mode and point.badge != "ok":
            found.setdefault((point.badge, point.record.provider, point.reason), []).append(point.x)
    return [
        Failure(state, provider, ", ".join(spell(x) for x in sort_xs(places)), reason)
        for (state, provider, reason), places in found.items()
    ]


def _by_provider(section: Section, panel: Panel, mode: str, cell: Callable[[Point], Cell]) -> Table:
    lines = panel.at(mode)
    names = [name for name in section.providers if name in lines and name != LIMIT]
    rows = []
    for x in panel.xs(mode):
        cells = [cell(lines[name][x]) if x in lines[name] else Cell("") for name in names]
        marked = [replace(c, ours=name == section.emphasis) for name, c in zip(names, cells)]
        rows.append([Cell(spell(x)), *marked])
    return Table([section.x, *names], rows)


def _share_cell(point: Point | None) -> Cell:
    if point is None:
        return Cell("")
    if point.state != "ok":
        return _failed(point)
    return Cell(f"{point.fraction:.0%}" if point.fraction else "", share=min(point.fraction or 0.0, 1.0))


def _failed(point: Point) -> Cell:
    return Cell("−1", point.state, point.reason)


def _rates(point: Point | None) -> tuple[Cell, Cell]:
    """Show what was reached: the fewest bytes over the time, the fewest operations over the time."""
    if point is None or not point.ms:
        return Cell(""), Cell("")
    moved, done = point.record.min_bytes, point.record.flops
    return (
        Cell(f"{moved / point.ms / 1e6:,.0f}" if moved else ""),
        Cell(f"{done / point.ms / 1e9:.3g}" if done else ""),
    )


def _without_empty(table: Table) -> Table:
    """Leave out the columns in which nothing stands."""
    keep = [i for i in range(len(table.heads)) if any(row[i].text or row[i].state for row in table.rows)]
    return Table([table.heads[i] for i in keep], [[row[i] for i in keep] for row in table.rows])


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:#.4g}".removesuffix(".")
