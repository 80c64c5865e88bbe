"""Tables of a panel's measurements."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from warploom.bench.records import LIMIT, USUAL_CORES, Record, spell
from warploom.report.labels import sort_xs
from warploom.report.panels import Panel, Point, Section, arrange
from warploom.report.rivals import format_ratio
from warploom.report.table import Cell, Table, format_number

_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float64": "fp64"}
_LONGEST_NOTE = 200


@dataclass(frozen=True)
class FailureGroup:
    """Results of one provider without a speed, or with a doubtful one, for the same reason."""

    state: str
    provider: str
    places: str
    reason: str
    peer: bool
    """True if the provider is not of warploom."""


def make_tables(records: Sequence[Record]) -> list[Table]:
    """Returns tables of new records: times, and memory if it was measured."""
    found = []
    for section in arrange(records):
        for panel in section.panels:
            for mode in panel.modes:
                title = _make_title(section, panel, mode)
                time = make_time_table(section, panel, mode)
                notes = [*time.notes, *_make_notes(section, panel, mode)]
                found.append(replace(time, title=f"{title}  ms", notes=notes))
                memory = make_metric_table(section, panel, mode, "peak_memory_mib")
                found += [] if memory is None else [replace(memory, title=f"{title}  peak MiB")]
    return found


def _make_notes(section: Section, panel: Panel, mode: str) -> list[str]:
    """Returns a line for each different failure or disturbance."""
    several: dict[tuple[str, str], list[str]] = {}
    for failure in group_failures(section, panel, mode):
        everywhere = failure.places == ", ".join(map(spell, panel.xs(mode)))
        place = failure.provider if everywhere else f"{failure.provider} at {section.x} = {failure.places}"
        several.setdefault((failure.state, failure.reason), []).append(place)
    notes = [f"{state}: {', '.join(places)}: {reason}" for (state, reason), places in several.items()]
    return [note if len(note) <= _LONGEST_NOTE else f"{note[: _LONGEST_NOTE - 1]}…" for note in notes]


def _make_title(section: Section, panel: Panel, mode: str) -> str:
    parameters = {**section.constants, **panel.parameters}
    dtype = str(parameters.pop("dtype", ""))
    words = [f"{name} {spell(value)}" for name, value in parameters.items() if value is not None]
    return "  ".join(filter(None, [section.operator, mode, _DTYPES.get(dtype, dtype), *words, panel.device]))


def make_time_table(section: Section, panel: Panel, mode: str) -> Table:
    """Returns a table of every provider's median time, the limit, and our share, rates and fastest alternative.

    A result without a speed is shown by its badge.
    """
    lines = panel.at(mode)
    limits = panel.limits(mode)

    def cell(point: Point) -> Cell:
        details = point.record.details or {}
        time = format_number(point.ms) + "¹" * ("host_cores" in details)
        if point.badge != "ok":
            return Cell(time, point.badge, point.reason)
        if point.record.late:
            late = f"the host was not ahead in {point.record.late} of {point.record.rounds} rounds"
            return Cell(f"{time}†", reason=late)
        return Cell(time + "‡" * (details.get("clock") == "wall"))

    table = _make_table(section, panel, mode, cell)
    rows = []
    for x, row in zip(panel.xs(mode), table.rows, strict=True):
        ours = next((lines[name][x] for name in section.own_names if x in lines.get(name, {})), None)
        pair = panel.rival(mode, x, section)
        verdict = {"faster": "", "same": " level"}.get(pair.verdict, "") if pair else ""
        best = Cell(f"{pair.b.provider} {format_ratio(pair.ratio)}{verdict}" if pair else "")
        # The rates that were reached: least bytes over time, and operations over time.
        rates = [_format_rate(ours, "min_bytes", 1e6), _format_rate(ours, "flops", 1e9)]
        share = (ours and ours.fraction) or None
        shaded = Cell(f"{share:.0%}", share=min(share, 1.0)) if share else Cell("")
        rows.append([*row, Cell(format_number(limits.get(x))), shaded, best, *rates])
    heads = [*table.heads, LIMIT, "of the limit", f"fastest other / {section.subject}", "GB/s", "TFLOP/s"]
    marks = {"†": "the host was not always ahead of the device", "‡": "by the wall clock, the host's time included"}
    marks["¹"] = f"on a host with more than {USUAL_CORES} cores, which adds about 1.7 µs"
    notes = [f"{mark} {words}" for mark, words in marks.items() if any(mark in c.text for row in rows for c in row)]
    return replace(Table(heads, rows).drop_empty_columns(), notes=notes)


def make_metric_table(section: Section, panel: Panel, mode: str, metric: str) -> Table | None:
    """Returns a table of ``peak_memory_mib``, ``min_bytes`` or ``accuracy``; None if no provider has it.

    Accuracy is the largest error against float64 over its budget.
    """

    def cell(point: Point) -> Cell:
        record = point.record
        if metric == "accuracy":
            state = "" if point.state == "ok" else point.state
            if record.max_error is None or not record.error_budget:
                return Cell("", state, point.reason if state else "")
            reason = f"{record.max_error:.2e} of {record.error_budget:.2e} allowed"
            return Cell(f"{record.max_error / record.error_budget:.2f}", state, reason)
        value = getattr(record, metric)
        return Cell("") if value is None else Cell(f"{value / 2**20 if metric == 'min_bytes' else value:,.1f}")

    table = _make_table(section, panel, mode, cell)
    return table.drop_empty_columns() if any(cell.text for row in table.rows for cell in row[1:]) else None


def make_history_table(
    section: Section, panel: Panel, mode: str, runs: Mapping[str, Mapping[str, Any]]
) -> Table | None:
    """Returns a table of the operator's times in several runs, oldest first; None if no case has several.

    Times of earlier code are among them: a history is there to show what changed.
    """
    times: dict[str, dict[str, str]] = {}
    for x, point in panel.at(mode).get(section.emphasis, {}).items():
        records = [r for r in (*point.earlier, point.record) if r.run and r.status == "ok" and r.ms]
        if len({record.run for record in records}) > 1:
            for record in records:
                times.setdefault(record.run, {})[f"ms at {section.x} = {spell(x)}"] = format_number(record.ms)
    if not times:
        return None
    started = {run: str(runs.get(run, {}).get("started", "")) for run in times}
    names = list(dict.fromkeys(name for run in times.values() for name in run))
    rows = [
        [started[run][5:19].replace("T", " ") or run, str(runs.get(run, {}).get("commit", ""))[:10]]
        + [times[run].get(name, "") for name in names]
        for run in sorted(times, key=lambda run: started[run])
    ]
    return Table.of(["run", "commit", *names], rows, words=2)


def group_failures(section: Section, panel: Panel, mode: str) -> list[FailureGroup]:
    """Group the results without a speed, or with a doubtful one, by reason."""
    found: dict[tuple[str, str, str], list[Any]] = {}
    for point in panel.points:
        if point.record.mode == mode and point.badge != "ok":
            found.setdefault((point.badge, point.record.provider, point.reason), []).append(point.x)
    return [
        FailureGroup(state, provider, ", ".join(map(spell, sort_xs(places))), reason, section.is_peer(provider))
        for (state, provider, reason), places in found.items()
    ]


def _make_table(section: Section, panel: Panel, mode: str, cell: Callable[[Point], Cell]) -> Table:
    lines = panel.at(mode)
    names = [
        name
        for name in section.providers
        if name != LIMIT and any(point.state != "unsupported" for point in lines.get(name, {}).values())
    ]
    rows = []
    for x in panel.xs(mode):
        cells = [cell(lines[name][x]) if x in lines[name] else Cell("") for name in names]
        ours = section.emphasis if not section.definition else None
        marked = [
            replace(c, ours=name == ours, peer=section.is_peer(name)) for name, c in zip(names, cells, strict=True)
        ]
        rows.append([Cell(spell(x)), *marked])
    return Table([section.x, *names], rows)


def _format_rate(point: Point | None, field: str, scale: float) -> Cell:
    value = getattr(point.record, field) if point and point.ms else None
    rate = value / point.ms / scale if point and point.ms and value else 0.0
    return Cell((f"{rate:.3g}" if rate < 999.5 else f"{rate:.0f}") if rate else "")
