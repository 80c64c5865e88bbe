"""The report's charts, as plotly.js figures in plain dictionaries.

They carry no text or page colours: the page's script lays its light or dark theme over them. Each trace names
its series in ``meta``, so that a click on the legend shows or hides it in all charts of a section at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from warploom.bench.labels import log_range, log_ticks, seconds, size, sort_xs
from warploom.bench.palette import MUTED, Look
from warploom.bench.panels import Panel, Point, Section
from warploom.bench.published import Published, published
from warploom.bench.records import LIMIT

__all__ = ["Chart", "Figure", "charts", "dash", "related", "series_name"]

Figure = dict[str, Any]
Values = Mapping[Any, float | None]
"""A number, or none, at each position."""

_DASHES = ("dash", "dashdot", "longdash", "longdashdot")


@dataclass(frozen=True)
class Chart:
    """One chart with its heading."""

    title: str
    figure: Figure


def charts(section: Section, panel: Panel, mode: str, styles: Mapping[str, Look]) -> list[Chart]:
    """Draw a mode of a panel.

    Args:
        section: The bench.
        panel: One of its panels.
        mode: One of the panel's modes.
        styles: A look for every provider, published ones included.

    Returns:
        Time, share of the limit, speed-up and memory against size; without those that have nothing to show,
        and none if no provider has a speed.
    """
    xs = panel.xs(mode)
    at = panel.at(mode)
    rows = related(section, panel, mode)
    lines = {name: at[name] for name in section.providers if name in at and name != LIMIT}
    times = {name: {x: p.ms / 1e3 for x, p in line.items() if p.ms} for name, line in lines.items()}
    limits = {LIMIT: {x: ms / 1e3 for x, ms in panel.limits(mode).items()}}
    shares = {name: {x: p.fraction for x, p in line.items()} for name, line in lines.items()}
    gains = {name: panel.speedups(mode, section.emphasis, name) for name in section.baselines}
    peaks = {name: {x: p.record.peak_memory_mib for x, p in line.items() if p.ms} for name, line in lines.items()}

    time = [
        *_bands(lines, styles),
        *_lines({**times, **limits}, styles, xs, "%{y:.3s}s"),
        *_published_lines(rows, "speed", section.x, styles, 1e-3, "%{y:.3s}s"),
    ]
    share = _lines(shares, styles, xs, "%{y:.1%}")
    gain = _lines(gains, styles, xs, "%{y:.2f}×")
    memory = [
        *_lines(peaks, styles, xs, "%{y:,.1f} MiB"),
        *_published_lines(rows, "memory", section.x, styles, 1.0, "%{y:,.1f} MiB"),
    ]
    gain_title = f"Speed-up of {section.emphasis} over each baseline"
    drawn: tuple[tuple[str, list[Figure], Figure, list[Figure]], ...] = (
        ("Time (band: 20th to 80th percentile)", time, _log_axis(time, seconds), []),
        ("Share of the measured limit", share, _share_axis(share), [_rule(1.0)]),
        (gain_title, gain, _log_axis(gain, "{:g}×".format, 1.0), [_rule(1.0)]),
        ("Peak memory (MiB)", memory, _log_axis(memory, "{:,g}".format), []),
    )
    across = _size_axis(section.x, sort_xs([*xs, *(row.case[section.x] for row in rows)]))
    return [
        Chart(
            title,
            {
                "data": traces,
                "layout": {"xaxis": across, "yaxis": axis, "shapes": rules, "meta": _wide(traces)},
            },
        )
        for title, traces, axis, rules in drawn
        if _ys(traces) and any(times.values())
    ]


def related(section: Section, panel: Panel, mode: str) -> list[Published]:
    """The published figures of the same problems: every parameter but the one along the axis agrees."""
    case = {**section.constants, **panel.parameters}
    rows = [row for row in published() if row.matches(section.operator, mode, case, ignore=section.x)]
    return [row for row in rows if section.x in row.case]


def series_name(row: Published) -> str:
    """The name of the line that a published figure belongs to."""
    return f"{row.provider} ({row.gpu}, published)"


def dash(row: Published) -> str:
    """The dashes that tell one GPU's published lines from another's."""
    gpus = list(dict.fromkeys(other.gpu for other in published()))
    return _DASHES[gpus.index(row.gpu) % len(_DASHES)]


def _bands(lines: Mapping[str, Mapping[Any, Point]], styles: Mapping[str, Look]) -> list[Figure]:
    """Outline the 20–80 % band of each provider, broken where a case has no speed."""
    traces = []
    for name, points in lines.items():
        xs: list[Any] = []
        ys: list[float | None] = []
        for run in _runs(points):
            low = [p.record.ms_p20 / 1e3 for p in run if p.record.ms_p20]
            high = [p.record.ms_p80 / 1e3 for p in run if p.record.ms_p80]
            if len(low) == len(high) == len(run):
                places = [p.x for p in run]
                xs += [*places, *reversed(places), None]
                ys += [*low, *reversed(high), None]
        if xs:
            band = {"fill": "toself", "fillcolor": styles[name].fill(0.25), "line": {"width": 0}}
            traces.append({**_trace(name, xs[:-1], ys[:-1]), **band, "mode": "lines", "hoverinfo": "skip"})
    return traces


def _runs(points: Mapping[Any, Point]) -> Iterable[list[Point]]:
    run: list[Point] = []
    for x in sort_xs(points):
        if points[x].ms:
            run.append(points[x])
        elif run:
            yield run
            run = []
    if run:
        yield run


def _lines(lines: Mapping[str, Values], styles: Mapping[str, Look], xs: Sequence[Any], hover: str) -> list[Figure]:
    return [
        {**_trace(name, xs, [values.get(x) for x in xs]), **_drawn_as(styles[name], hover)}
        for name, values in reversed(
            list(lines.items())
        )  # the emphasised one comes first; drawn last, it is on top
        if any(value is not None for value in values.values())
    ]


def _published_lines(
    rows: Sequence[Published], metric: str, x: str, styles: Mapping[str, Look], scale: float, hover: str
) -> list[Figure]:
    lines: dict[str, list[Published]] = {}
    for row in sorted((row for row in rows if row.metric == metric), key=lambda row: row.case[x]):
        lines.setdefault(series_name(row), []).append(row)
    traces = []
    for name, line in lines.items():
        look = styles[line[0].provider]
        look = Look(look.colour, f"{look.marker}-open", dash(line[0]), 1.5)
        values = [None if row.value is None else row.value * scale for row in line]
        trace = _trace(name, [row.case[x] for row in line], values, published=True)
        traces.append({**trace, **_drawn_as(look, hover), "visible": False})
    return traces


def _trace(series: str, xs: Sequence[Any], ys: Sequence[float | None], published: bool = False) -> Figure:
    meta = {"series": series, "published": published}
    short = [y and float(f"{y:.5g}") for y in ys]  # more digits only make the file larger
    return {"type": "scatter", "name": series, "x": list(xs), "y": short, "meta": meta}


def _drawn_as(look: Look, hover: str) -> Figure:
    drawn: Figure = {
        "mode": "lines+markers" if look.marker else "lines",
        "line": {"color": look.colour, "width": look.width, "dash": look.dash},
        "hovertemplate": hover,
    }
    if look.marker:
        drawn["marker"] = {"color": look.colour, "symbol": look.marker, "size": 5 + look.width}
    return drawn


def _ys(traces: Sequence[Figure], published: bool = False) -> list[float]:
    found = [trace["y"] for trace in traces if trace["meta"]["published"] == published]
    return [y for ys in found for y in ys if y]


def _size_axis(x: str, places: Sequence[Any]) -> Figure:
    axis: Figure = {"title": {"text": x}, "fixedrange": True}
    if all(isinstance(place, (int, float)) and place > 0 for place in places):
        return axis | {"type": "log", "tickvals": list(places), "ticktext": [size(place) for place in places]}
    return axis | {"type": "category", "categoryarray": list(places)}


def _share_axis(traces: Sequence[Figure]) -> Figure:
    top = 1.04 * max([1.0, *_ys(traces)])
    return {"fixedrange": True, "automargin": True, "tickformat": ".0%", "range": [0, top]}


def _log_axis(traces: Sequence[Figure], text: Callable[[float], str], *include: float) -> Figure:
    """Make a logarithmic axis with round ticks for the measured lines and, should they be shown, others'."""
    axis: Figure = {"fixedrange": True, "automargin": True, "type": "log"}
    shown = [*_ys(traces), *include]
    if not shown:
        return axis
    ticks = log_ticks(shown, _ys(traces, published=True))
    axis |= {"tickvals": ticks, "ticktext": [text(tick) for tick in ticks]}
    return axis | {"range": [math.log10(end) for end in log_range(shown)]}


def _wide(traces: Sequence[Figure]) -> Figure:
    """Note the range that also holds the published lines; the page's script takes it when one is shown."""
    others = _ys(traces, published=True)
    return {"wide": [math.log10(end) for end in log_range([*_ys(traces), *others])]} if others else {}


def _rule(y: float) -> Figure:
    """Draw a line across the chart: as fast as the baseline, or as the limit."""
    line = {"color": MUTED, "width": 1, "dash": "dot"}
    return {
        "type": "line",
        "xref": "paper",
        "x0": 0,
        "x1": 1,
        "y0": y,
        "y1": y,
        "line": line,
        "layer": "below",
    }
