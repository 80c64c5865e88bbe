"""Tables of speeds, written between two marks of a text from records, so that no number is typed by hand."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from warploom.bench.records import LIMIT, Record, is_stale, load, operator_name
from warploom.bench.storage import read_text, replace_text
from warploom.errors import ArgumentError
from warploom.ops import benches
from warploom.profile.records import is_stale as is_stale_profile
from warploom.profile.records import load_profiles
from warploom.profile.tables import profile_tables, step_rows

__all__ = ["markdown_table", "replace_between", "speed_table", "step_table", "update"]

BEGIN = "<!-- speeds: written by `warploom report` from records; do not edit -->"
END = "<!-- end of speeds -->"
_NOTHING = "There are no records of the present code yet."
_BASELINES = ("torch_compile", "torch", "sdpa_cudnn", "sdpa_flash", "flex_attention", "sdpa_gqa", "sdpa_mha")
_HEADER = (
    "operator",
    "kind",
    "mode",
    "largest case",
    "ms",
    "limit ms",
    "of the limit (worst … best)",
)


def update(readme: Path, sources: Sequence[Path]) -> None:
    """Rewrite the tables that a file has marks for: ``speeds`` of operators, ``steps`` of models, all ``profiles``.

    Args:
        readme: A file with the marks of one table or more.
        sources: Folders of records, or records files.

    Raises:
        ArgumentError: The file lacks a mark.
    """
    text = read_text(readme)
    asked = [name for name in _TABLES if BEGIN.replace("speeds", name) in text]
    for name in asked or ["speeds"]:
        begin, end = (mark.replace("speeds", name) for mark in (BEGIN, END))
        replace_between(readme, begin, end, _TABLES[name](sources))


def replace_between(file: Path, begin: str, end: str, body: str) -> None:
    """Put a text between two marks of a file, in the place of what stands there.

    Raises:
        ArgumentError: The file lacks a mark.
    """
    before, first, rest = read_text(file).partition(begin)
    _, last, after = rest.partition(end)
    if not first or not last:
        raise ArgumentError(f"{file} must hold the marks {begin} and {end}")
    replace_text(file, f"{before}{begin}\n\n{body}\n\n{end}{after}")


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]], words: int) -> str:
    """A Markdown table whose first ``words`` columns are words, and the others numbers."""
    rule = ["---"] * words + ["---:"] * (len(header) - words)
    return "\n".join(_line(row) for row in (header, rule, *rows))


def speed_table(records: Sequence[Record]) -> str:
    """One Markdown row per operator, activation and mode; records of other code, or disturbed, are left out."""
    fresh = [r for r in records if not is_stale(r) and r.status == "ok" and r.ms and not r.disturbed]
    groups: dict[tuple[str, str, str], list[Record]] = {}
    for record in fresh:
        # What makes a case another kind of work, not another size of it.
        kind = record.case.get("activation") or record.case.get("dtype", "")
        suite = "" if record.suite in ("quick", "published") else f" ({record.suite})"
        key = (record.operator, f"{kind}{suite}", record.mode)
        groups.setdefault(key, []).append(record)
    rows = [_row(key, group) for key, group in groups.items()]
    if not any(rows):
        return _NOTHING
    return markdown_table((*_HEADER, "times as fast as"), [row for row in rows if row], words=4)


def _row(key: tuple[str, str, str], group: Sequence[Record]) -> list[str] | None:
    ours = [record for record in group if record.provider == "triton" and record.limit_fraction is not None]
    if not ours:
        return None
    largest = max(ours, key=lambda record: (_is_compared(record, group), record.min_bytes or 0))
    fractions = sorted(record.limit_fraction or 0.0 for record in ours)
    beside = {record.provider: record for record in group if record.case == largest.case}
    limit = beside[LIMIT].ms if LIMIT in beside else None
    operator, activation, mode = key
    along = next(bench.x for bench in benches().values() if operator_name(bench) == operator)
    return [
        operator,
        activation,
        mode,
        f"{along} = {largest.case.get(along, '–')}",
        _number(largest.ms),
        _number(limit),
        f"{fractions[0]:.2f} … {fractions[-1]:.2f}, median {statistics.median(fractions):.2f}",
        ", ".join(filter(None, (_speed_up(beside.get(name), largest) for name in _BASELINES))) or "–",
    ]


def _is_compared(ours: Record, group: Sequence[Record]) -> bool:
    """Whether a baseline was measured in the same case: not all of them take, or reach, the largest."""
    return any(record.provider in _BASELINES and record.case == ours.case for record in group)


def _speed_up(baseline: Record | None, ours: Record) -> str:
    if baseline is None or not baseline.ms or not ours.ms:
        return ""
    return f"{baseline.provider} {baseline.ms / ours.ms:.1f}"


def step_table(sources: Sequence[Path]) -> str:
    """One Markdown row per size and context length: a training step of every provider, of the present code."""
    header, rows = step_rows([record for record in load_profiles(sources) if not is_stale_profile(record)])
    return markdown_table(header, rows, words=1) if rows else _NOTHING


def _profile_table(sources: Sequence[Path]) -> str:
    return profile_tables([record for record in load_profiles(sources) if not is_stale_profile(record)]) or _NOTHING


_TABLES: Mapping[str, Callable[[Sequence[Path]], str]] = {
    "speeds": lambda sources: speed_table(load(sources)),
    "steps": step_table,
    "profiles": _profile_table,
}


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"
