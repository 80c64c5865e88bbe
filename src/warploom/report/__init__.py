"""Tables of records for a terminal, and the report: one HTML file without dependencies."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from warploom.bench.records import Record, as_paths
from warploom.bench.storage import replace_text
from warploom.report.table import render_text
from warploom.report.tables import make_tables

__all__ = ["render_terminal", "write_report"]


def render_terminal(records: Sequence[Record], width: int = 80) -> str:
    """Returns tables of new records as text, for a terminal of some width."""
    return render_text(make_tables(records), width)


def write_report(sources: str | Path | Iterable[str | Path], output: str | Path) -> Path:
    """Write the report of records as an HTML file. Needs jinja2.

    Args:
        sources: Record files, or folders with a ``records.jsonl`` and an ``environment.json``; one, or several with
            the oldest first.
        output: The HTML file to write. Its folder is made if needed.

    Returns:
        ``output``. Without records the page says so.

    Raises:
        WarploomError: A source has no records file, or one that cannot be read, or ``output`` cannot be written.
    """
    from warploom.report.page import render

    output = Path(output)
    replace_text(output, render(as_paths(sources)))
    return output
