"""The report: everything that was measured, as one HTML file that needs nothing else."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from plotly.offline import get_plotlyjs

from warploom.bench.charts import Figure, charts, dash, related, series_name
from warploom.bench.palette import LIMIT, Look, looks
from warploom.bench.panels import STATES, Panel, Point, Section, mode_title, sections, spell
from warploom.bench.records import load, load_environments
from warploom.bench.report_tables import accuracy_table, failures, memory_table, overview, time_table

__all__ = ["write_report"]

TITLE = "warploom report"

_GLYPHS = {
    "circle": "●",
    "square": "■",
    "diamond": "◆",
    "triangle-up": "▲",
    "triangle-down": "▼",
    "cross": "✚",
    "x": "✖",
    "hexagon": "⬢",
    "star": "★",
    "pentagon": "⬟",
}
_LINES = {"solid": "solid", "dot": "dotted"}  # CSS knows one kind of dashes; the name says the rest


def write_report(sources: Sequence[Path], output: Path) -> Path:
    """Write the report of some records.

    Args:
        sources: Folders with a ``records.jsonl`` and an ``environment.json``, or such record files; oldest first.
        output: The HTML file to write. Its folder is made if it is not there.

    Returns:
        ``output``. Without any records it holds a page that says so.

    Raises:
        WarploomError: A source holds no records file, or one that cannot be read.
    """
    environments: dict[str, dict[str, Any]] = {}
    for source in sources:
        environments |= load_environments(source)
    records = load(sources)
    used = {name: environments[name] for name in dict.fromkeys(r.environment for r in records) if name in environments}
    arranged = sections([(record, _device(environments.get(record.environment, {}))) for record in records])
    figures: dict[str, Figure] = {}
    points = [point for section in arranged for point in section.points]
    page = _templates().get_template("report.html.j2")
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(
        page.render(
            title=TITLE,
            sources=[str(source) for source in sources],
            headlines=[_headline(environment) for environment in used.values()],
            environments=used,
            facts=list(dict.fromkeys(fact for environment in used.values() for fact in environment)),
            summary=[row for section in arranged for row in _summary(section)],
            total=len(points),
            states=_counts(points),
            sections=[_section_view(section, figures) for section in arranged],
            figures=figures,
            plotlyjs=get_plotlyjs(),
        ),
        encoding="utf-8",
    )
    return output


def _templates() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["percent"] = lambda value: "–" if value is None else f"{value:.0%}"
    environment.filters["times"] = lambda value: "–" if value is None else f"{value:.2f}×"
    environment.filters["number"] = lambda value: "–" if value is None else f"{value:.3g}"
    return environment


def _device(environment: Mapping[str, Any]) -> str:
    return str(environment.get("gpu") or environment.get("cpu") or "device not recorded")


def _headline(environment: Mapping[str, Any]) -> str:
    words = [_device(environment)]
    names = {"driver": "driver", "cuda": "CUDA", "torch": "PyTorch", "triton": "Triton", "warploom": "warploom"}
    words += [f"{title} {environment[name]}" for name, title in names.items() if environment.get(name)]
    if commit := environment.get("commit"):
        words.append(f"commit {str(commit)[:10]}{' with changes' if environment.get('dirty') else ''}")
    return " · ".join(words)


def _counts(points: Iterable[Point]) -> dict[str, int]:
    counted = Counter(point.state for point in points)
    return {state: counted[state] for state in STATES if counted[state]}


@dataclass(frozen=True)
class SummaryRow:
    """What a reader in a hurry reads about a mode of a bench on a device; None where nothing was measured."""

    operator: str
    mode: str
    device: str
    provider: str
    median_share: float | None
    worst_share: float | None
    worst_at: str
    over_compile: float | None
    over_torch: float | None
    over_best: float | None
    """Median speed-up over the fastest, case by case, of the providers that are not ours."""
    host_us: float | None
    counts: dict[str, int]


def _summary(section: Section) -> list[SummaryRow]:
    devices = dict.fromkeys(panel.device for panel in section.panels)
    modes = dict.fromkeys(mode for panel in section.panels for mode in panel.modes)
    rows = []
    for device in devices:
        for mode in modes:
            panels = [panel for panel in section.panels if panel.device == device and mode in panel.modes]
            if panels:
                rows.append(_summary_row(section, panels, device, mode))
    return rows


def _summary_row(section: Section, panels: Sequence[Panel], device: str, mode: str) -> SummaryRow:
    ours = section.emphasis
    own = [(panel, point) for panel in panels for point in panel.at(mode).get(ours, {}).values()]
    shares = [(point.fraction, panel, point) for panel, point in own if point.fraction]
    worst = min(shares, key=lambda entry: entry[0]) if shares else None
    gains = {
        name: [panel.speedups(mode, ours, name) for panel in panels]
        for name in section.baselines()
        if not name.startswith("triton")
    }
    best = [min(at[x] for at in found if x in at) for found in zip(*gains.values()) for x in {x for at in found for x in at}]
    hosts = [point.record.host_us for _, point in own if point.ms and point.record.host_us]
    return SummaryRow(
        operator=section.operator,
        mode=mode,
        device=device,
        provider=ours,
        median_share=median(share for share, _, _ in shares) if shares else None,
        worst_share=worst[0] if worst else None,
        worst_at=_place(section, worst[1], worst[2]) if worst else "",
        over_compile=_median(gains.get("torch_compile", [])),
        over_torch=_median(gains.get("torch", [])),
        over_best=median(best) if best else None,
        host_us=median(hosts) if hosts else None,
        counts=_counts(point for _, point in own),
    )


def _median(gains: Sequence[Mapping[Any, float]]) -> float | None:
    values = [value for at in gains for value in at.values()]
    return median(values) if values else None


def _place(section: Section, panel: Panel, point: Point) -> str:
    words = [f"{section.x} = {spell(point.x)}"]
    return ", ".join([*words, panel.label] if len(section.panels) > 1 else words)


def _section_view(section: Section, figures: dict[str, Figure]) -> dict[str, Any]:
    """Prepare a section for the template, and put its figures into ``figures``."""
    rows = [row for panel in section.panels for mode in panel.modes for row in related(section, panel, mode)]
    styles = looks([*section.providers, *(row.provider for row in rows)], section.emphasis)
    legend = [_legend_entry(name, styles[name], name == section.emphasis) for name in section.providers if name != LIMIT]
    if any(panel.limits(mode) for panel in section.panels for mode in panel.modes):
        legend.append(_legend_entry(LIMIT, looks([LIMIT], "")[LIMIT], ours=False))
    for name, row in {series_name(row): row for row in rows}.items():
        look = Look(styles[row.provider].colour, "", dash(row), 1.5)
        legend.append({**_legend_entry(name, look, ours=False), "published": True})
    return {
        "name": section.operator,
        "title": section.title,
        "x": section.x,
        "emphasis": section.emphasis,
        "constants": ", ".join(f"{name} = {spell(value)}" for name, value in section.constants.items()),
        "overview": overview(section),
        "legend": legend,
        "panels": [
            {
                "id": f"{section.operator}-{number}",
                "label": panel.label,
                "modes": [
                    _mode_view(section, panel, mode, f"{section.operator}-{number}-{mode}", styles, figures)
                    for mode in panel.modes
                ],
            }
            for number, panel in enumerate(section.panels)
        ],
    }


def _legend_entry(name: str, look: Look, ours: bool) -> dict[str, Any]:
    return {
        "name": name,
        "colour": look.colour,
        "width": look.width,
        "line": _LINES.get(look.dash, "dashed"),
        "glyph": _GLYPHS.get(look.marker, ""),
        "ours": ours,
        "published": False,
    }


def _mode_view(
    section: Section, panel: Panel, mode: str, name: str, styles: Mapping[str, Look], figures: dict[str, Figure]
) -> dict[str, Any]:
    drawn = charts(section, panel, mode, styles)
    figures |= {f"{name}-{number}": chart.figure for number, chart in enumerate(drawn)}
    return {
        "name": mode,
        "title": mode_title(mode),
        "charts": [{"title": chart.title, "id": f"{name}-{number}"} for number, chart in enumerate(drawn)],
        "command": section.command(panel, mode),
        "time": time_table(section, panel, mode),
        "failures": failures(panel, mode),
        "accuracy": accuracy_table(section, panel, mode),
        "memory": memory_table(section, panel, mode),
    }
