"""Records for a reader: tables for a terminal and texts, and the report, one HTML file that needs nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from warploom.bench.records import Record
from warploom.bench.storage import replace_text
from warploom.report.table import text
from warploom.report.tables import tables_of

__all__ = ["terminal", "write_report"]


def terminal(records: Sequence[Record], width: int = 80) -> str:
    """Tables of records that were just made, for a terminal of some width."""
    return text(tables_of(records), width)


def write_report(sources: Sequence[Path], output: Path) -> Path:
    """Write the report of some records; needs jinja2.

    Args:
        sources: Folders with a ``records.jsonl`` and an ``environment.json``, or such record files; oldest first.
        output: The HTML file to write. Its folder is made if it is not there.

    Returns:
        ``output``. Without any records it holds a page that says so.

    Raises:
        WarploomError: A source holds no records file or one that cannot be read, or ``output`` cannot be written.
    """
    from warploom.report.page import render

    replace_text(output, render(sources))
    return output
