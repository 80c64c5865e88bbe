"""The report's page: it prepares records for the template."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from warploom.bench.environment import device_name
from warploom.bench.records import LIMIT, Record, load_environments, spell
from warploom.report.chart import make_charts, make_history, render_chart, render_key, render_legend
from warploom.report.labels import format_mode
from warploom.report.overview import make_case_table, make_overview
from warploom.report.palette import Look, choose_looks
from warploom.report.panels import STATES, UNSET, Panel, Section, load_sections
from warploom.report.published import make_published_table
from warploom.report.table import Table, render_badge, render_html
from warploom.report.tables import group_failures, make_history_table, make_metric_table, make_time_table

TITLE = "warploom report"
VERSIONS = {"torch": "PyTorch", "triton": "Triton"}
PUBLISHED = {
    "speed": "Published by others on their GPUs, and measured here: no comparison (ms)",
    "memory": "Published by others, and measured here: peak memory (MiB)",
}
"""Titles of the tables of published figures, by metric."""


def render(sources: Sequence[Path]) -> str:
    """Returns the page of records as HTML; see `warploom.report.write_report`."""
    sections = load_sections(sources)
    points = [point for section in sections for point in section.points]
    known = {name: value for source in sources for name, value in load_environments(source).items()}
    used = {name: known[name] for point in points if (name := point.record.environment) in known}
    runs = {run: about for one in known.values() for run, about in one.get("runs", {}).items()}
    facts = [fact for environment in used.values() for fact in environment if fact != "runs"]
    overview = make_overview(sections)
    loader = FileSystemLoader(Path(__file__).parent)
    how: dict[str, Any] = {"undefined": StrictUndefined, "trim_blocks": True, "lstrip_blocks": True}
    environment = Environment(loader=loader, autoescape=True, **how)
    environment.filters["table"] = lambda table, kind="": Markup(render_html(table, kind))
    environment.globals["badge"] = lambda *given, **named: Markup(render_badge(*given, **named))
    page: str = environment.get_template("report.html.j2").render(
        title=TITLE,
        sources=[str(source) for source in sources],
        versions=list(dict.fromkeys(_describe(one) for one in used.values())),
        measured={point.record.run for point in points},
        warnings=_make_warnings([point.record for point in points], used),
        environments=used,
        facts=list(dict.fromkeys(facts)),
        overview=overview,
        cases=make_case_table(overview),
        outcomes=_count_outcomes(sections),
        total=len(points),
        sections=[_prepare_section(section, runs) for section in sections],
    )
    return page


def _describe(environment: Mapping[str, Any]) -> str:
    """Returns an environment's device and the versions that matter most."""
    versions = [f"{title} {environment[name]}" for name, title in VERSIONS.items() if environment.get(name)]
    return " · ".join([device_name(environment), *versions])


def _count_outcomes(sections: Iterable[Section]) -> list[tuple[str, str, bool]]:
    """Count results by state. Returns the state, its number and providers in words, and True for peers."""
    points = [
        (section, point) for section in sections for point in section.points if point.record.provider != LIMIT
    ]
    found = []
    for peer, state in itertools.product((False, True), STATES):
        counts = Counter(
            point.record.provider
            for section, point in points
            if point.badge == state and section.is_peer(point.record.provider) == peer
        )
        names = ", ".join(f"{name} {count}" for name, count in counts.most_common())
        found += [(state, f"{counts.total()} {state}: {names}", peer)] if counts else []
    return found


def _make_warnings(records: Sequence[Record], environments: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Returns warnings against comparing numbers of different environments or runs."""
    environment = f"The records are of {len(environments)} environments: compare times within a run alone."
    runs = len({record.run for record in records if record.ms})
    run = f"The times are of {runs} runs. Ratios are of one run each; what was measured in another has none."
    return [environment] * (len(environments) > 1) + [run] * (runs > 1)


def _prepare_section(section: Section, runs: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Prepare a section for the template."""
    styles = choose_looks(sorted([*section.providers, LIMIT]), section.emphasis)
    numbers = {name: i for i, name in enumerate(section.providers)}
    modes = list(dict.fromkeys(mode for panel in section.panels for mode in panel.modes))
    choices = {**section.choices, "mode": modes}
    panels = [
        _prepare_panel(section, panel, mode, styles, numbers, runs)
        for panel in section.panels
        for mode in panel.modes
    ]
    panels.sort(key=lambda panel: panel["alone"])  # the first is shown first
    return {
        "name": section.operator,
        "title": section.title,
        "choices": {name: values for name, values in choices.items() if len(values) > 1},
        "constants": ", ".join(f"{name} = {spell(value)}" for name, value in section.constants.items()),
        "x": section.x,
        "others": [name for name in section.others if name in section.providers],
        "legend": [(numbers[name], render_key(styles[name]), name) for name in section.providers],
        "panels": panels,
    }


def _prepare_panel(
    section: Section,
    panel: Panel,
    mode: str,
    styles: Mapping[str, Look],
    numbers: Mapping[str, int],
    runs: Mapping[str, Mapping[str, Any]],
) -> dict[str, Any]:
    labels = {name: panel.labels.get(name, UNSET) for name in section.choices} | {"mode": mode}
    others = any(name in section.others for name in panel.at(mode))
    more: list[tuple[str, Table | None]] = [
        (
            "Bytes that must be moved (MiB)",
            make_metric_table(section, panel, mode, "min_bytes") if others else None,
        ),
        (
            "Accuracy: largest error against float64 over its budget",
            make_metric_table(section, panel, mode, "accuracy"),
        ),
        *((title, make_published_table(section, panel, mode, metric)) for metric, title in PUBLISHED.items()),
    ]
    past = make_history_table(section, panel, mode, runs)
    return {
        "values": labels,
        "label": " · ".join([format_mode(mode), *([panel.label] if panel.labels else [])]),
        "charts": [render_chart(chart, styles, numbers) for chart in make_charts(section, panel, mode)],
        "history": past and render_chart(make_history(past), choose_looks(past.heads[2:], "")),
        "runs": past and render_legend(choose_looks(past.heads[2:], "")),
        "past": past,
        "alone": not any(panel.rival(mode, x, section) for x in panel.xs(mode)),
        "command": section.command(panel, mode),
        "time": make_time_table(section, panel, mode),
        "memory": make_metric_table(section, panel, mode, "peak_memory_mib"),
        "failures": group_failures(section, panel, mode),
        "more": [(title, table) for title, table in more if table is not None],
    }
