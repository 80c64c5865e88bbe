"""Small line charts as SVG, for the report and the documentation, readable on light and dark pages.

Text has the colour of the page's text, or a grey that is readable on both. The class of each line's group is ``s``
and the number of its provider, so that a page can show and hide it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import chain, groupby
from typing import Any

from warploom.bench.records import LIMIT
from warploom.report.labels import choose_range, choose_ticks, format_seconds, format_size
from warploom.report.palette import MUTED, Look
from warploom.report.panels import Panel, Section

Values = Mapping[Any, float | None]
"""A number or None at each position."""
WIDTH, HEIGHT = 460, 215
LEFT, RIGHT, TOP, BOTTOM = 56, 10, 24, 34
_SHAPES = {
    "s": "M{0} {1}h6v6h-6z",
    "d": "M{0} {1}m3 -1l4 4l-4 4l-4 -4z",
    "^": "M{0} {1}m3 -1l4 7h-8z",
    "v": "M{0} {1}m-1 0h8l-4 7z",
    "+": "M{0} {1}m2 -1h2v3h3v2h-3v3h-2v-3h-3v-2h3z",
    "x": "M{0} {1}l6 6m0 -6l-6 6",
    "o": "M{0} {1}m0 3a3 3 0 1 0 6 0a3 3 0 1 0 -6 0z",
}


@dataclass(frozen=True)
class Chart:
    """The lines of a chart by provider, over positions."""

    title: str
    xs: Sequence[Any]
    x_name: str
    lines: Mapping[str, Values]
    bands: Mapping[str, tuple[Values, Values]]
    """Lower and upper edges of the band around each line."""
    share: bool = False
    """True for a linear vertical axis in per cent, with a rule at 1; False for a logarithmic axis in seconds."""


def make_charts(section: Section, panel: Panel, mode: str) -> list[Chart]:
    """Returns charts of time and of the share of the limit over sizes; none if no provider has a speed."""
    xs, at = panel.xs(mode), panel.at(mode)
    names = [name for name in reversed(section.providers) if name in at and name != LIMIT]  # ours last, on top

    def values(name: str, field: str) -> Values:
        return {x: p.ms and (getattr(p.record, field) or 0.0) / 1e3 for x, p in at[name].items()}

    times: dict[str, Values] = {LIMIT: {x: ms / 1e3 for x, ms in panel.limits(mode).items()}}
    times |= {name: values(name, "ms") for name in names}
    bands = {name: (values(name, "ms_p20"), values(name, "ms_p80")) for name in names}
    shares = {name: {x: p.fraction for x, p in at[name].items()} for name in names}
    drawn = [Chart("time (band: 20th to 80th percentile)", xs, section.x, times, bands)]
    drawn.append(Chart("share of the measured limit", xs, section.x, shares, {}, share=True))
    return [c for c in drawn if any(any(line.values()) for name, line in c.lines.items() if name != LIMIT)]


def render_chart(chart: Chart, styles: Mapping[str, Look], numbers: Mapping[str, int] | None = None) -> str:
    """Returns a chart as an SVG element. ``numbers`` are the numbers of providers in the classes of lines."""
    return _make_element(_draw(chart, styles, numbers or {}), WIDTH, HEIGHT, chart.title)


def render_picture(
    columns: Sequence[Sequence[Chart]], heads: Sequence[str], title: str, styles: Mapping[str, Look]
) -> str:
    """Returns charts in columns with heads, a title above and a legend below, as an SVG file."""
    drawn = {n for column in columns for chart in column for n, line in chart.lines.items() if any(line.values())}
    width, legend = WIDTH * len(columns), [name for name in styles if name in drawn]
    parts = [_draw_text(width // 2, 18, title, "middle", 14)]
    for i, (head, column) in enumerate(zip(heads, columns, strict=True)):
        parts.append(_draw_text(i * WIDTH + WIDTH // 2, 42, head, "middle", 13))
        for j, chart in enumerate(column):
            parts.append(f'<g transform="translate({i * WIDTH} {50 + j * HEIGHT})">{_draw(chart, styles, {})}</g>')
    top = 50 + HEIGHT * max(map(len, columns)) + 14
    room = max([170, *(50 + 7 * len(name) for name in legend)])
    per_row = max(1, width // room)
    for i, name in enumerate(legend):
        x, y = 20 + i % per_row * room, top + i // per_row * 20
        parts.append(_draw_path(f"M{x} {y - 4}h24", styles[name]) + _draw_marks([(x + 12, y - 4)], styles[name]))
        parts.append(_draw_text(x + 30, y, name, "start", 13))
    height = top + 20 * -(-len(legend) // per_row)
    return _make_element("".join(parts), width, height, title, MUTED) + "\n"


def _make_element(body: str, width: int, height: int, title: str, colour: str = "") -> str:
    about = f'viewBox="0 0 {width} {height}" role="img" aria-label="{escape(title)}"'
    more = f' color="{colour}" width="{width}" height="{height}" font-family="sans-serif"' if colour else ""
    return f'<svg xmlns="http://www.w3.org/2000/svg" {about}{more}>{body}</svg>'


def _draw(chart: Chart, styles: Mapping[str, Look], numbers: Mapping[str, int]) -> str:
    across, ticks_x = _place_xs(chart)
    edges = chain.from_iterable(chart.bands.values())
    ys = [y for line in (*chart.lines.values(), *edges) for y in line.values() if y]
    up, ticks_y = _place_ys(chart.share, ys)
    right, low = WIDTH - RIGHT, HEIGHT - BOTTOM
    rules = "".join(f"M{LEFT} {y}H{right}" for y, _ in ticks_y) + "".join(f"M{x} {TOP}V{low}" for x, _ in ticks_x)
    parts = [f'<path d="{rules}" stroke="currentColor" stroke-opacity=".2" fill="none"/>']
    if chart.share:
        parts.append(f'<path d="M{LEFT} {up(1.0)}H{right}" stroke="currentColor" stroke-dasharray="2 3"/>')
    parts += [_draw_text(LEFT - 5, y + 4, label, "end") for y, label in ticks_y]
    parts += [_draw_text(x, low + 15, label, "middle") for x, label in ticks_x if label]
    parts += [
        _draw_text((LEFT + right) // 2, HEIGHT - 4, chart.x_name, "middle"),
        _draw_text(LEFT, 14, chart.title, "start", 12),
    ]
    for name, line in chart.lines.items():
        runs = _split_runs([(across[x], up(y) if (y := line.get(x)) else None) for x in chart.xs])
        if not runs:
            continue
        look = styles[name]
        lower, upper = chart.bands.get(name, ({}, {}))
        both = {x for x in chart.xs if lower.get(x) and upper.get(x)}
        outline = [
            _split_runs([(across[x], up(edge[x] or 0.0) if x in both else None) for x in chart.xs])
            for edge in (lower, upper)
        ]
        outlines = "".join(f"M{_join([*low, *reversed(high)])}z" for low, high in zip(*outline) if len(low) > 1)
        band = f'<path d="{outlines}" fill="{look.colour}" fill-opacity=".2"/>' if outlines else ""
        path = "".join(f"M{_join(run)}" for run in runs)
        marks = _draw_marks([point for run in runs for point in run], look)
        group = f' class="s{numbers[name]}"' if name in numbers else ""
        parts.append(f"<g{group}>{band}{_draw_path(path, look)}{marks}</g>")
    return "".join(parts)


def _split_runs(points: Sequence[tuple[int, Any]]) -> list[list[tuple[int, Any]]]:
    """Split a line at its gaps."""
    return [list(run) for there, run in groupby(points, lambda point: point[1] is not None) if there]


def _join(points: Sequence[tuple[int, int]]) -> str:
    return "L".join(f"{x} {y}" for x, y in points)


def _draw_path(path: str, look: Look) -> str:
    dots = ' stroke-dasharray="2 3"' if look.dotted else ""
    return f'<path d="{path}" stroke="{look.colour}" stroke-width="{look.width:g}" fill="none"{dots}/>'


def _draw_marks(points: Sequence[tuple[int, int]], look: Look) -> str:
    if not look.marker:
        return ""
    path = "".join(_SHAPES[look.marker].format(x - 3, y - 3) for x, y in points)
    pen = (
        f'fill="none" stroke="{look.colour}" stroke-width="1.5"' if look.marker == "x" else f'fill="{look.colour}"'
    )
    return f'<path d="{path}" {pen}/>'


def _draw_text(x: int, y: int, words: str, anchor: str, points: int = 11) -> str:
    place = f'x="{x}" y="{y}" font-size="{points}" text-anchor="{anchor}"'
    return f'<text {place} fill="currentColor">{escape(words)}</text>'


def _place_xs(chart: Chart) -> tuple[dict[Any, int], list[tuple[int, str]]]:
    """Place positions on the horizontal axis. Returns their pixels, and ticks with labels where they fit."""
    xs, width = list(chart.xs), WIDTH - LEFT - RIGHT - 24
    if all(isinstance(x, int | float) and x > 0 for x in xs) and len(xs) > 1:
        low, high = math.log(xs[0]), math.log(xs[-1])
        places = {x: LEFT + 12 + round(width * (math.log(x) - low) / (high - low)) for x in xs}
    else:
        places = {x: LEFT + 12 + round(width * (i + 0.5) / len(xs)) for i, x in enumerate(xs)}
    ticks: list[tuple[int, str]] = []
    free = WIDTH
    for x in reversed(xs):
        label = format_size(x)
        fits = places[x] + 4 * len(label) < free
        ticks.append((places[x], label if fits else ""))
        free = places[x] - 4 * len(label) if fits else free
    return places, ticks


def _place_ys(share: bool, ys: Sequence[float]) -> tuple[Callable[[float], int], list[tuple[int, str]]]:
    """Place values on the vertical axis. Returns a function from a value to its pixel, and ticks."""
    scale: Callable[[float], float] = float if share else math.log
    low, high = (0.0, 1.04 * max([1.0, *ys])) if share else map(math.log, choose_range(ys))

    def up(y: float) -> int:
        return HEIGHT - BOTTOM - round((HEIGHT - BOTTOM - TOP) * (scale(y) - low) / (high - low))

    if share:
        return up, [(up(y), f"{y:.0%}") for y in (0.0, 0.25, 0.5, 0.75, 1.0)]
    return up, [(up(y), format_seconds(y)) for y in choose_ticks(ys) if low <= math.log(y) <= high]
