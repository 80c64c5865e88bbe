"""The report's charts, as plotly.js figures in plain dictionaries.

They carry no text or page colours: the page's script lays its light or dark theme over them. Each trace names its
series in ``meta``, so that a click on the legend shows or hides it in all charts of a section at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from warploom.bench.palette import LIMIT, Look
from warploom.bench.panels import Panel, Point, Section, sort_xs
from warploom.bench.published import Published, published

Figure = dict[str, Any]

_DASHES = ("dash", "dashdot", "longdash", "longdashdot")
_HEADROOM = 1.04


@dataclass(frozen=True)
class Chart:
    """One chart with its heading."""

    title: str
    figure: Figure = field(hash=False)


def charts(section: Section, panel: Panel, mode: str, styles: Mapping[str, Look]) -> list[Chart]:
    """Draw a mode of a panel.

    Args:
        section: The bench.
        panel: One of its panels.
        mode: One of the panel's modes.
        styles: A look for every provider, published ones included.

    Returns:
        Time, share of the limit, speed-up and memory against size; without those that have nothing to show.
    """
    xs = panel.xs(mode)
    ours = section.emphasis
    lines = {name: panel.at(mode)[name] for name in section.providers if name in panel.at(mode)}
    rows = related(section, panel, mode)
    time = _band_traces(lines, styles)
    time += _line_traces(
        {name: {x: p.ms / 1e3 for x, p in points.items() if p.ms} for name, points in lines.items() if name != LIMIT},
        styles,
        xs,
        "%{y:.3s}s",
    )
    time += _limit_trace({x: ms / 1e3 for x, ms in panel.limits(mode).items()}, styles)
    time += _published_traces(rows, "speed", section.x, styles, 1e-3, "%{y:.3s}s")
    shares = {name: {x: p.fraction for x, p in points.items() if p.fraction} for name, points in lines.items()}
    gains = {name: panel.speedups(mode, ours, name) for name in section.baselines()}
    memory = _line_traces(
        {name: {x: p.record.peak_memory_mib for x, p in ps.items() if p.ms} for name, ps in lines.items() if name != LIMIT},
        styles,
        xs,
        "%{y:,.3~r} MiB",
    )
    memory += _published_traces(rows, "memory", section.x, styles, 1, "%{y:,.3~r} MiB")
    share_traces = _line_traces(shares, styles, xs, "%{y:.1%}")
    return [
        Chart(title, _figure(traces, section.x, sort_xs([*xs, *_shown(rows, section.x)]), axis))
        for title, traces, axis in (
            ("Time (band: 20th to 80th percentile)", time, {"type": "log", "tickformat": "~s", "ticksuffix": "s"}),
            (
                "Share of the measured limit",
                share_traces,
                {"tickformat": ".0%", "range": [0, _HEADROOM * max([1.0, *_ys(share_traces)])]},
            ),
            (
                f"Speed-up of {ours} over each baseline",
                _line_traces(gains, styles, xs, "%{y:.2f}×"),
                {"type": "log", "tickformat": ",.3~r", "ticksuffix": "×"},
            ),
            ("Peak memory (MiB)", memory, {"type": "log", "tickformat": ",.3~r"}),
        )
        if any(not trace["meta"]["published"] for trace in traces)
    ]


def related(section: Section, panel: Panel, mode: str) -> list[Published]:
    """Find the published figures of the same problems: all parameters but the one along the axis agree."""
    case = {**section.constants, **panel.parameters}
    return [row for row in published() if row.matches(section.operator, mode, case, ignore=section.x)]


def series_name(row: Published) -> str:
    """Name the line that a published figure belongs to."""
    return f"{row.provider} ({row.gpu}, published)"


def dash(row: Published) -> str:
    """Return the dashes that tell one GPU's published lines from another's."""
    gpus = list(dict.fromkeys(other.gpu for other in published()))
    return _DASHES[gpus.index(row.gpu) % len(_DASHES)]


def _band_traces(lines: Mapping[str, Mapping[Any, Point]], styles: Mapping[str, Look]) -> list[Figure]:
    """Outline the 20–80 % band of each provider, broken where a case has no speed."""
    traces = []
    for name, points in lines.items():
        xs: list[Any] = []
        ys: list[float | None] = []
        for run in _runs(points):
            low = [p.record.ms_p20 / 1e3 for p in run if p.record.ms_p20]
            high = [p.record.ms_p80 / 1e3 for p in run if p.record.ms_p80]
            if name != LIMIT and len(low) == len(high) == len(run):
                places = [p.x for p in run]
                xs += [*places, *reversed(places), None]
                ys += [*low, *reversed(high), None]
        if xs:
            traces.append(
                {
                    "type": "scatter",
                    "mode": "lines",
                    "x": xs[:-1],
                    "y": ys[:-1],
                    "fill": "toself",
                    "fillcolor": styles[name].fill(0.22),
                    "line": {"width": 0},
                    "hoverinfo": "skip",
                    "meta": {"series": name, "published": False},
                }
            )
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


def _line_traces(
    lines: Mapping[str, Mapping[Any, float | None]], styles: Mapping[str, Look], xs: Sequence[Any], hover: str
) -> list[Figure]:
    traces = []
    for name, values in reversed(lines.items()):  # the emphasised one comes first and is drawn last, on top
        if any(value is not None for value in values.values()):
            look = styles[name]
            traces.append(
                {
                    "type": "scatter",
                    "mode": "lines+markers",
                    "name": name,
                    "x": list(xs),
                    "y": [values.get(x) for x in xs],
                    "line": {"color": look.colour, "width": look.width, "dash": look.dash},
                    "marker": {"color": look.colour, "symbol": look.marker, "size": 5 + look.width},
                    "hovertemplate": hover,
                    "meta": {"series": name, "published": False},
                }
            )
    return traces


def _limit_trace(limits: Mapping[Any, float], styles: Mapping[str, Look]) -> list[Figure]:
    traces = _line_traces({LIMIT: limits}, styles, list(limits), "%{y:.3s}s")
    return [{**trace, "mode": "lines"} for trace in traces]


def _published_traces(
    rows: Sequence[Published], metric: str, x: str, styles: Mapping[str, Look], scale: float, hover: str
) -> list[Figure]:
    traces = []
    for name in dict.fromkeys(series_name(row) for row in rows):
        line = sorted((r for r in rows if series_name(r) == name and r.metric == metric), key=lambda r: r.case[x])
        if line:
            look = styles[line[0].provider]
            traces.append(
                {
                    "type": "scatter",
                    "mode": "lines+markers",
                    "name": name,
                    "x": [row.case[x] for row in line],
                    "y": [None if row.value is None else row.value * scale for row in line],
                    "line": {"color": look.colour, "width": 1.5, "dash": dash(line[0])},
                    "marker": {"color": look.colour, "symbol": f"{look.marker}-open", "size": 6},
                    "hovertemplate": hover,
                    "visible": False,
                    "meta": {"series": name, "published": True},
                }
            )
    return traces


def _shown(rows: Sequence[Published], x: str) -> list[Any]:
    return [row.case[x] for row in rows]


def _ys(traces: Sequence[Figure]) -> list[float]:
    return [y for trace in traces for y in trace["y"] if y is not None]


def _figure(traces: list[Figure], x: str, xs: Sequence[Any], axis: Figure) -> Figure:
    numeric = all(isinstance(value, (int, float)) and value > 0 for value in xs)
    horizontal: Figure = {"title": {"text": x}, "type": "log" if numeric else "category", "fixedrange": True}
    if numeric:
        horizontal |= {"tickvals": list(xs), "ticktext": [size(value) for value in xs]}
    return {
        "data": traces,
        "layout": {"xaxis": horizontal, "yaxis": {"fixedrange": True, "automargin": True, **axis}},
    }


def size(value: float) -> str:
    """Write a size as in an axis: thousands of 1024 as ``k``."""
    return f"{value // 1024:g}k" if value >= 1024 and value % 1024 == 0 else f"{value:g}"
