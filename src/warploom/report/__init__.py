"""Tables of records for a terminal and a notebook, and the report: one HTML file without dependencies."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

from warploom.bench.records import Record, as_paths
from warploom.bench.storage import replace_text
from warploom.report.chart import make_charts, render_chart, render_legend
from warploom.report.palette import choose_looks
from warploom.report.panels import arrange
from warploom.report.table import render_html, render_text
from warploom.report.tables import make_tables, make_time_table

__all__ = ["render_notebook", "render_terminal", "write_report"]

_SHOWN = 4
"""The number of combinations of parameters and modes that a notebook shows."""


def render_terminal(records: Sequence[Record], width: int = 80) -> str:
    """Returns tables of new records as text, for a terminal of some width."""
    return render_text(make_tables(records), width)


def render_notebook(records: Sequence[Record]) -> str:
    """Returns tables and charts of new records as HTML: of the first combinations of parameters and modes."""
    shown = [
        (section, panel, mode) for section in arrange(records) for panel in section.panels for mode in panel.modes
    ]
    parts = []
    for section, panel, mode in shown[:_SHOWN]:
        looks = choose_looks(sorted(section.providers), section.emphasis)
        charts = [render_chart(chart, looks) for chart in make_charts(section, panel, mode)[:2]]
        parts.append(f"<b>{escape(section.operator)}, {escape(mode)}, {escape(panel.label)}: ms</b>")
        parts.append(render_html(make_time_table(section, panel, mode)))
        boxes = "".join(f'<div style="flex: 0 1 440px">{chart}</div>' for chart in charts)
        parts.append(f'<div style="display: flex; flex-wrap: wrap; gap: 1em">{boxes}</div>')
        parts.append(render_legend({name: looks[name] for name in section.providers}))
    if len(shown) > _SHOWN:
        parts.append(f"<p>{len(shown) - _SHOWN} more tables: print the results, or write their report.</p>")
    return "".join(parts)


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
