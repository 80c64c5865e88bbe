"""The README's tables of speeds, written between two marks from records, so that no number is typed by hand."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

from warploom.bench.records import LIMIT, Record, is_stale, load
from warploom.errors import ArgumentError

__all__ = ["speed_table", "update"]

BEGIN = "<!-- speeds: written by `warploom report` from records; do not edit -->"
END = "<!-- end of speeds -->"
_BASELINES = ("torch_compile_cache", "torch_compile", "torch")
_HEADER = ("operator", "activation", "mode", "largest case", "ms", "limit ms", "of the limit (worst … best)")


def update(readme: Path, sources: Sequence[Path]) -> None:
    """Rewrite what stands between the marks of a file.

    Args:
        readme: A file with both marks.
        sources: Folders of records, or records files.

    Raises:
        ArgumentError: The file lacks a mark.
    """
    text = readme.read_text(encoding="utf-8")
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ArgumentError(f"report: {readme} must hold the marks {BEGIN} and {END}")
    table = speed_table(load(sources))
    readme.write_text(f"{before}{BEGIN}\n\n{table}\n\n{END}{after}", encoding="utf-8")


def speed_table(records: Sequence[Record]) -> str:
    """One Markdown row per operator, activation and mode; records of other code, or disturbed, are left out."""
    fresh = [r for r in records if not is_stale(r) and r.status == "ok" and r.ms and not r.disturbed]
    groups: dict[tuple[str, str, str], list[Record]] = {}
    for record in fresh:
        key = (record.operator, str(record.case.get("activation", "")), record.mode)
        groups.setdefault(key, []).append(record)
    rows = [_row(key, group) for key, group in groups.items()]
    if not any(rows):
        return "There are no records of the present code yet."
    header = (*_HEADER, *(f"over {name}" for name in _BASELINES))
    lines = [_line(header), _line(["---"] * 4 + ["---:"] * (len(header) - 4)), *(_line(row) for row in rows if row)]
    return "\n".join(lines)


def _row(key: tuple[str, str, str], group: Sequence[Record]) -> list[str] | None:
    ours = [record for record in group if record.provider == "triton" and record.limit_fraction is not None]
    if not ours:
        return None
    largest = max(ours, key=lambda record: record.min_bytes or 0)
    fractions = sorted(record.limit_fraction or 0.0 for record in ours)
    beside = {record.provider: record for record in group if record.case == largest.case}
    limit = beside[LIMIT].ms if LIMIT in beside else None
    operator, activation, mode = key
    return [
        operator,
        activation,
        mode,
        f"n = {largest.case['n']}",
        _number(largest.ms),
        _number(limit),
        f"{fractions[0]:.2f} … {fractions[-1]:.2f}, median {statistics.median(fractions):.2f}",
        *(_speed_up(beside.get(name), largest) for name in _BASELINES),
    ]


def _speed_up(baseline: Record | None, ours: Record) -> str:
    if baseline is None or not baseline.ms or not ours.ms:
        return "–"
    return f"{baseline.ms / ours.ms:.1f} ×"


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"
