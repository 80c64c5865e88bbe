"""Records as tables in the layout of the published ones: sizes down, providers across, −1 for a failure."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from warploom.bench.records import LIMIT, Record, operator_name
from warploom.ops.spec import Bench

__all__ = ["Section", "markdown", "own_provider", "sections", "text"]

_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float64": "fp64"}
_METRICS = {"ms": "Speed (ms)", "peak_memory_mib": "Memory (MiB)"}
_LONGEST_NOTE = 200


@dataclass(frozen=True)
class Section:
    """One table: a bench, a metric, a mode, and a combination of all parameters but the one down the rows."""

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...]
    """Why there is −1 or a star somewhere, a line each."""


def own_provider(records: Iterable[Record], named: str = "") -> str:
    """The provider that stands for the operator: the one named, else ``triton`` where it can run, else ``torch``.

    Args:
        records: Of one bench.
        named: The bench's own choice, `Bench.own`.
    """
    ours = [record for record in records if record.provider == "triton"]
    return named or ("triton" if any(record.status != "unsupported" for record in ours) else "torch")


def sections(records: Sequence[Record], benches: Iterable[Bench] = ()) -> list[Section]:
    """Arrange records in tables.

    Args:
        records: In the order in which tables and their columns should come.
        benches: What they are of: its parameter ``x`` runs down the rows. Where one is missing, it is ``n``.
    """
    known = {operator_name(bench): bench for bench in benches}
    x = {name: bench.x for name, bench in known.items()}
    groups: dict[tuple[str, ...], list[Record]] = {}
    for record in records:
        rest = {name: value for name, value in record.case.items() if name != x.get(record.operator, "n")}
        key = (record.operator, record.environment, record.suite, json.dumps(rest), record.mode)
        groups.setdefault(key, []).append(record)
    several = len({record.environment for record in records}) > 1
    found = []
    for group in groups.values():
        for metric in _METRICS:
            operator = group[0].operator
            own = own_provider(group, known[operator].own if operator in known else "")
            section = _section(group, metric, x.get(operator, "n"), own, several)
            if section is not None:
                found.append(section)
    return found


def _section(records: Sequence[Record], metric: str, x: str, own: str, name_environment: bool) -> Section | None:
    cells = {(_cell_name(record.case.get(x)), record.provider): record for record in records}
    providers = list(dict.fromkeys(record.provider for record in records if record.provider != LIMIT))
    if metric == "ms" and any(record.provider == LIMIT for record in records):
        providers.append(LIMIT)
    measured = {record.provider for record in records if getattr(record, metric) is not None}
    failed = {record.provider for record in records if record.status != "ok"}
    if metric != "ms" and not measured:
        return None  # a CPU does not count its memory
    shown = [provider for provider in providers if provider in measured | failed]
    with_fraction = metric == "ms" and own in shown and LIMIT in shown
    header = [x, *shown]
    if with_fraction:
        header.append("limit fraction" if own == "triton" else f"limit fraction ({own})")
    rows = []
    for value in sorted({record_x for record_x, _ in cells}, key=_natural):
        row = [value, *(_cell(cells.get((value, provider)), metric) for provider in shown)]
        if with_fraction:
            mine = cells.get((value, own))
            row.append("" if mine is None or mine.limit_fraction is None else f"{mine.limit_fraction:.2f}")
        rows.append(tuple(row))
    return Section(_title(records[0], metric, x, name_environment), tuple(header), tuple(rows), _notes(records, x))


def _title(record: Record, metric: str, x: str, name_environment: bool) -> str:
    parameters = {name: value for name, value in record.case.items() if name != x and value is not None}
    dtype = str(parameters.pop("dtype", ""))
    parts = [record.operator, _METRICS[metric], record.mode, _DTYPES.get(dtype, dtype)]
    parts += [f"{name} {_cell_name(value)}" for name, value in parameters.items()]
    if name_environment:
        parts.append(f"environment {record.environment}")
    return "  ".join(part for part in parts if part)


def _cell_name(value: Any) -> str:
    if isinstance(value, list | tuple):
        return "×".join(str(item) for item in value)
    return str(value)


def _natural(name: str) -> tuple[int, float, str]:
    """Numbers by size, before names."""
    try:
        return 0, float(name), name
    except ValueError:
        return 1, 0.0, name


def _cell(record: Record | None, metric: str) -> str:
    if record is None:
        return ""
    value: float | None = getattr(record, metric)
    if record.status != "ok":
        return "-1"
    star = "*" if metric == "ms" and record.disturbed else ""
    return "" if value is None else _number(value) + star


def _number(value: float) -> str:
    """Four significant digits, never an exponent."""
    magnitude = math.floor(math.log10(value)) if value > 0 else 0
    return f"{value:.{min(max(3 - magnitude, 0), 6)}f}"


def _notes(records: Sequence[Record], x: str) -> tuple[str, ...]:
    """One line for each different failure or disturbance, with the sizes it befell."""
    failures: dict[tuple[str, str, str], list[str]] = {}
    for record in records:
        if record.status != "ok":
            key = (record.provider, record.status, record.reason or "")
            failures.setdefault(key, []).append(_cell_name(record.case.get(x)))
        elif record.disturbed and record.provider != LIMIT:
            key = (record.provider, "disturbed", record.disturbed)
            failures.setdefault(key, []).append(f"{_cell_name(record.case.get(x))}*")
    notes = []
    for (provider, status, reason), sizes in failures.items():
        if len(reason) > _LONGEST_NOTE:
            reason = reason[: _LONGEST_NOTE - 1] + "…"
        notes.append(f"{provider}, {x} = {', '.join(sizes)}: {status}: {reason}")
    return tuple(notes)


def text(tables: Sequence[Section], width: int = 100) -> str:
    """Tables for a terminal of some width; long headers are folded."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    out = io.StringIO()
    console = Console(file=out, width=width, color_system=None, markup=False, highlight=False)
    for section in tables:
        table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 0, 0, 1))
        for name in section.header:
            table.add_column(_folded(name), justify="right", overflow="fold")
        for row in section.rows:
            table.add_row(*row)
        out.write(section.title + "\n")
        console.print(table)
        out.writelines(f"  {note}\n" for note in section.notes)
        out.write("\n")
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


def _folded(name: str, longest: int = 11) -> str:
    """A column's name, broken before its last word where it is long."""
    start, gap, end = name.rpartition(" " if " " in name else "_")
    return f"{start}{gap.strip()}\n{end}" if gap and len(name) > longest else name


def markdown(tables: Sequence[Section]) -> str:
    """The same tables in GitHub's Markdown."""
    lines: list[str] = []
    for section in tables:
        lines += [f"**{_escape(section.title)}**", ""]
        lines.append(_markdown_row(section.header))
        lines.append("|" + " ---: |" * len(section.header))
        lines += [_markdown_row(row) for row in section.rows]
        lines.append("")
        lines += [f"- {_escape(note)}" for note in section.notes]
        lines += [""] if section.notes else []
    return "\n".join(lines)


def _markdown_row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(_escape(cell) for cell in cells) + " |"


def _escape(cell: str) -> str:
    return cell.replace("|", r"\|").replace("_", r"\_").replace("*", r"\*").replace("<", "&lt;")
