"""The report's page: it prepares records for the template."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from warploom.bench.environment import device_name
from warploom.bench.records import LIMIT, Record, load_environments, spell
from warploom.report.chart import make_charts, render_chart
from warploom.report.labels import format_mode
from warploom.report.palette import Look, choose_looks
from warploom.report.panels import UNSET, Panel, Section, load_sections
from warploom.report.published import make_published_table
from warploom.report.rivals import count_states, make_summary_table, summarize
from warploom.report.table import Table
from warploom.report.tables import group_failures, make_metric_table, make_time_table

TITLE = "warploom report"


def render(sources: Sequence[Path]) -> str:
    """Returns the page of records as HTML; see `warploom.report.write_report`."""
    sections = load_sections(sources)
    points = [point for section in sections for point in section.points]
    known = {name: value for source in sources for name, value in load_environments(source).items()}
    used = {name: known[name] for point in points if (name := point.record.environment) in known}
    facts = [fact for environment in used.values() for fact in environment if fact != "runs"]
    loader = FileSystemLoader(Path(__file__).parent)
    how: dict[str, Any] = {"undefined": StrictUndefined, "trim_blocks": True, "lstrip_blocks": True}
    page: str = (
        Environment(loader=loader, autoescape=True, **how)
        .get_template("report.html.j2")
        .render(
            title=TITLE,
            sources=[str(source) for source in sources],
            headlines=_make_headlines(used.values(), {point.record.run for point in points}),
            warnings=_make_warnings([point.record for point in points], used),
            environments=used,
            facts=list(dict.fromkeys(facts)),
            summary=make_summary_table([row for section in sections for row in summarize(section)]),
            states=count_states(points),
            total=len(points),
            sections=[_prepare_section(section) for section in sections],
        )
    )
    return page


def _make_headlines(environments: Iterable[Mapping[str, Any]], measured: Collection[str]) -> list[str]:
    """Returns a line for each device with its versions, and the commits of the runs that were measured there."""
    names = {"driver": "driver", "cuda": "CUDA", "torch": "PyTorch", "triton": "Triton", "warploom": "warploom"}
    marks = {"dirty": " with changes", "commit_given": " as given"}
    found: dict[str, set[str]] = {}
    for one in environments:
        words = [f"{title} {one[name]}" for name, title in names.items() if one.get(name)]
        runs = [run for name, run in one.get("runs", {}).items() if name in measured] or [one]
        commits = found.setdefault(" · ".join([device_name(one), *words]), set())
        for run in runs:
            if run.get("commit"):
                commits.add(run["commit"][:10] + "".join(marks[mark] for mark in marks if run.get(mark)))
    return [f"{line} · commit {', '.join(sorted(commits))}" if commits else line for line, commits in found.items()]


def _make_warnings(records: Sequence[Record], environments: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Returns warnings against comparing numbers of different environments or runs."""
    environment = f"The records are of {len(environments)} environments: compare times within a run alone."
    runs = len({record.run for record in records if record.ms})
    run = f"The times are of {runs} runs. Ratios are of one run each; what was measured in another has none."
    return [environment] * (len(environments) > 1) + [run] * (runs > 1)


def _prepare_section(section: Section) -> dict[str, Any]:
    """Prepare a section for the template."""
    styles = choose_looks(sorted([*section.providers, LIMIT]), section.emphasis)
    numbers = {name: i for i, name in enumerate(section.providers)}
    modes = list(dict.fromkeys(mode for panel in section.panels for mode in panel.modes))
    choices = {**section.choices, "mode": modes}
    panels = [
        _prepare_panel(section, panel, mode, styles, numbers) for panel in section.panels for mode in panel.modes
    ]
    return {
        "name": section.operator,
        "title": section.title,
        "choices": {name: values for name, values in choices.items() if len(values) > 1},
        "constants": ", ".join(f"{name} = {spell(value)}" for name, value in section.constants.items()),
        "x": section.x,
        "others": [name for name in section.others if name in section.providers],
        "legend": [{"name": name, "number": numbers[name], **vars(styles[name])} for name in section.providers],
        "panels": panels,
    }


def _prepare_panel(
    section: Section, panel: Panel, mode: str, styles: Mapping[str, Look], numbers: Mapping[str, int]
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
        ("Peak memory (MiB)", make_metric_table(section, panel, mode, "peak_memory_mib")),
        ("Published: by others on their GPUs (ms), not to be compared", make_published_table(section, panel, mode)),
    ]
    return {
        "values": labels,
        "label": " · ".join([format_mode(mode), *([panel.label] if panel.labels else [])]),
        "charts": [render_chart(chart, styles, numbers) for chart in make_charts(section, panel, mode)],
        "command": section.command(panel, mode),
        "time": make_time_table(section, panel, mode),
        "failures": group_failures(panel, mode),
        "more": [(title, table) for title, table in more if table is not None],
    }
