"""The figures that others published, read from the CSV files beside this module (``published/README.md``)."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from warploom.bench.records import spell
from warploom.report.labels import sort_xs
from warploom.report.panels import Panel, Section
from warploom.report.table import Table, number

__all__ = ["Published", "published", "published_table"]

FOLDER = Path(__file__).with_name("published")

_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
_LONG_FORM = ("batch", "heads", "head_dim", "rank", "dtype", "activation", "grid_dims", "prefix")


@dataclass(frozen=True)
class Published:
    """One published number."""

    gpu: str
    """Their GPU; ``GPU not stated`` where they do not say."""
    operator: str
    metric: str
    """``speed`` (milliseconds) or ``memory`` (peak MiB)."""
    mode: str
    provider: str
    value: float | None
    """``None`` where they report an error."""
    case: Mapping[str, Any] = field(hash=False)
    """The parameters they state, the one along the axis included, under our names and values."""

    def matches(self, operator: str, mode: str, case: Mapping[str, Any], ignore: str = "") -> bool:
        """Say whether this is about the same problem: every parameter that both name has the same value.

        Args:
            operator: The record's operator.
            mode: The record's mode.
            case: The record's case.
            ignore: A parameter that need not agree: the one along the axis, when a whole line is matched.
        """
        if operator != self.operator or mode != self.mode:
            return False
        return all(case.get(name, value) == value for name, value in self.case.items() if name != ignore)


@cache
def published() -> tuple[Published, ...]:
    """Read every published figure that belongs to a bench.

    Returns:
        All of them, in the order of the files and their lines.
    """
    return tuple(row for path in sorted(FOLDER.glob("*.csv")) for row in _READERS.get(path.stem, _long_form)(path))


def published_table(section: Section, panel: Panel, mode: str) -> Table | None:
    """Published times of a panel's problems, in which every parameter but the one along the axis agrees."""
    case = {**section.constants, **panel.parameters}
    rows = [row for row in published() if row.metric == "speed" and section.x in row.case]
    rows = [row for row in rows if row.matches(section.operator, mode, case, ignore=section.x)]
    if not rows:
        return None
    cells = {(row.case[section.x], f"{row.provider} ({row.gpu})"): row.value for row in rows}
    names = list(dict.fromkeys(name for _, name in cells))
    found = [
        [spell(x), *("" if (x, name) not in cells else number(cells[x, name]) or "failed" for name in names)]
        for x in sort_xs(x for x, _ in cells)
    ]
    return Table.of([section.x, *names], found)


def _rows(path: Path) -> Iterator[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        yield from csv.DictReader(file)


def _long_form(path: Path) -> Iterator[Published]:
    for row in _rows(path):
        case = {name: _value(row[name]) for name in _LONG_FORM if row[name]}
        size = int(row["x"])
        if row["grid_dims"]:  # theirs is the size of each axis, ours the number of tokens
            size = size ** int(row["grid_dims"]) + int(row["prefix"])
        case[row["x_name"]] = size
        yield Published(
            row["gpu"],
            row["operator"],
            row["metric"],
            row["mode"],
            row["provider"],
            _number(row["value"]),
            case,
        )


def _flash_attention(path: Path) -> Iterator[Published]:
    for row in _rows(path):
        case = {
            "batch": 1,
            "heads": 1,
            "n": int(row["seq_len"]),
            "head_dim": int(row["head_dim"]),
            "dtype": _value(row["dtype"]),
        }
        yield Published(
            "GPU not stated",
            "flash_attention",
            "speed",
            row["mode"],
            row["provider"],
            _number(row["ms"]),
            case,
        )


def _attention(path: Path) -> Iterator[Published]:
    """Attention without heads."""
    for row in _rows(path):
        case: dict[str, Any] = {"batch": 8, "heads": 1, "n": int(row["seq_len"]), "head_dim": int(row["head_dim"])}
        case |= {"dtype": "float32", "causal": False}
        for mode in ("fwd", "bwd"):
            value = _number(row[f"{mode}_ms"])
            yield Published("GPU not stated", "flash_attention", "speed", mode, "torch", value, case)


def _transformer(path: Path) -> Iterator[Published]:
    for row in _rows(path):
        case = {"size": row["model"], "steps": int(row["steps"])}
        # With a backward, their "forward" is the whole step: it is the forward row's time plus the backward's.
        mode = "fwd_bwd" if row["avg_backward_s"] else "fwd"
        step = float(row["avg_forward_s"]) * 1e3
        yield Published("GPU not stated", "transformer", "speed", mode, "torch", step, case)


_READERS = {"flash_attention": _flash_attention, "attention": _attention, "transformer": _transformer}


def _value(text: str) -> int | str:
    return int(text) if text.isdigit() else _DTYPES.get(text, text)


def _number(text: str) -> float | None:
    return None if text in ("OOM", "") or float(text) < 0 else float(text)
