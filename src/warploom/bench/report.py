"""The report: everything that was measured, as one HTML file that needs nothing else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from plotly import offline

from warploom.bench.charts import Figure, charts, dash, related, series_name
from warploom.bench.labels import mode_title, seconds, spell
from warploom.bench.palette import Look, looks
from warploom.bench.panels import UNSET, Panel, Section, device_name, load_sections
from warploom.bench.published import published
from warploom.bench.records import LIMIT, RECORDS, load_environments
from warploom.bench.report_summary import counts, summary_rows
from warploom.bench.report_tables import (
    accuracy_table,
    bytes_table,
    failures,
    memory_table,
    overviews,
    time_table,
)
from warploom.bench.storage import replace_text
from warploom.profile.records import PROFILES
from warploom.profile.sections import profile_sections

__all__ = ["write_report"]

TITLE = "warploom report"

_GLYPHS = {
    "circle": "●",
    "square": "■",
    "diamond": "◆",
    "triangle-up": "▲",
    "triangle-down": "▼",
    "triangle-left": "◀",
    "triangle-right": "▶",
    "cross": "✚",
    "x": "✖",
    "hexagon": "⬢",
    "star": "★",
    "pentagon": "⬟",
}
_LINES = {"solid": "solid", "dot": "dotted"}
"""CSS's names of plotly's lines; all others are dashes, of which CSS knows one kind."""


def write_report(sources: Sequence[Path], output: Path) -> Path:
    """Write the report of some records.

    Args:
        sources: Folders with a ``records.jsonl`` or a ``profiles.jsonl`` and an ``environment.json``, or such
            record files; oldest first.
        output: The HTML file to write. Its folder is made if it is not there.

    Returns:
        ``output``. Without any records it holds a page that says so.

    Raises:
        WarploomError: A source holds no records file or one that cannot be read, or ``output`` cannot be written.
    """
    measured = [source for source in sources if (source / RECORDS).is_file() or not (source / PROFILES).is_file()]
    arranged = [*load_sections(measured), *profile_sections(sources)]
    points = [point for section in arranged for point in section.points]
    names = sorted({name for section in arranged for name in section.providers})
    names += sorted({row.provider for row in published()})
    known = {name: value for source in sources for name, value in load_environments(source).items()}
    used = {name: known[name] for point in points if (name := point.record.environment) in known}
    figures: dict[str, Figure] = {}
    page = _templates().get_template("report.html.j2")
    text = page.render(
        title=TITLE,
        sources=[str(source) for source in sources],
        headlines=[_headline(environment) for environment in used.values()],
        environments=used,
        facts=list(dict.fromkeys(fact for environment in used.values() for fact in environment)),
        summary=[row for section in arranged for row in summary_rows(section)],
        total=len(points),
        states=counts(points),
        sections=[_section_view(section, names, figures) for section in arranged],
        figures=figures,
        plotlyjs=offline.get_plotlyjs(),
    )
    replace_text(output, text)
    return output


def _templates() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        keep_trailing_newline=True,
    )
    environment.filters["percent"] = lambda value: "–" if value is None else f"{value:.0%}"
    environment.filters["times"] = lambda value: "–" if value is None else f"{value:.2f}×"
    environment.filters["microseconds"] = lambda value: (
        "–" if value is None else seconds(float(f"{value:.3g}") * 1e-6)
    )
    return environment


def _headline(environment: Mapping[str, Any]) -> str:
    names = {
        "driver": "driver",
        "cuda": "CUDA",
        "torch": "PyTorch",
        "triton": "Triton",
        "warploom": "warploom",
    }
    words = [f"{title} {environment[name]}" for name, title in names.items() if environment.get(name)]
    if commit := environment.get("commit"):
        words.append(f"commit {str(commit)[:10]}{' with changes' if environment.get('dirty') else ''}")
    return " · ".join([device_name(environment), *words])


def _section_view(section: Section, names: Sequence[str], figures: dict[str, Figure]) -> dict[str, Any]:
    """Prepare a section for the template, and put its figures into ``figures``."""
    rows = [row for panel in section.panels for mode in panel.modes for row in related(section, panel, mode)]
    lines = {series_name(row): row for row in rows}
    styles = looks([*names, LIMIT], section.emphasis)
    shown = [name for name in section.providers if name != LIMIT]
    if any(panel.limits(mode) for panel in section.panels for mode in panel.modes):
        shown.append(LIMIT)
    return {
        "name": section.operator,
        "title": section.title,
        "x": section.x,
        "choices": section.choices,
        "emphasis": section.emphasis,
        "others": section.others,
        "constants": ", ".join(f"{name} = {spell(value)}" for name, value in section.constants.items()),
        "overviews": overviews(section),
        "legend": [_legend_entry(name, name, styles[name], name == section.emphasis) for name in shown],
        "published": [
            _legend_entry(
                name,
                f"{row.provider}, {row.gpu}",
                replace(styles[row.provider], width=1.5, dash=dash(row)),
                ours=False,
            )
            for name, row in lines.items()
        ],
        "panels": [
            {
                "id": f"{section.operator}-{number}",
                "label": panel.label,
                "values": [panel.labels.get(choice, UNSET) for choice in section.choices],
                "modes": [
                    _mode_view(section, panel, mode, f"{section.operator}-{number}-{mode}", styles, figures)
                    for mode in panel.modes
                ],
            }
            for number, panel in enumerate(section.panels)
        ],
    }


def _legend_entry(series: str, label: str, look: Look, ours: bool) -> dict[str, Any]:
    return {
        "series": series,
        "label": label,
        "colour": look.colour,
        "width": look.width,
        "line": _LINES.get(look.dash, "dashed"),
        "glyph": _GLYPHS.get(look.marker, ""),
        "ours": ours,
    }


def _mode_view(
    section: Section,
    panel: Panel,
    mode: str,
    name: str,
    styles: Mapping[str, Look],
    figures: dict[str, Figure],
) -> dict[str, Any]:
    drawn = charts(section, panel, mode, styles)
    figures |= {f"{name}-{number}": chart.figure for number, chart in enumerate(drawn)}
    return {
        "name": mode,
        "title": mode_title(mode),
        "charts": [{"title": chart.title, "id": f"{name}-{i}"} for i, chart in enumerate(drawn)],
        "command": section.command(panel, mode),
        "time": time_table(section, panel, mode),
        "failures": failures(panel, mode),
        "accuracy": accuracy_table(section, panel, mode),
        "bytes": bytes_table(section, panel, mode),
        "memory": memory_table(section, panel, mode),
    }
