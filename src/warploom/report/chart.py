"""Small charts as SVG, for the report and the documentation, readable on light and dark pages.

A chart has lines over sizes, or bars for a single case. Text has the colour of the page's text, or a grey that is
readable on both. The class of each line's group is ``s`` and the number of its provider, so that a page can show
and hide it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import chain, groupby
from typing import Any

from warploom.bench.records import LIMIT
from warploom.report.labels import choose_range, choose_ticks, format_mib, format_seconds, format_size
from warploom.report.palette import MUTED, Look
from warploom.report.panels import Panel, Section
from warploom.report.table import Table

Values = Mapping[Any, float | None]
"""A number or None at each position."""
WIDTH, HEIGHT = 460, 215
LEFT, RIGHT, TOP, BOTTOM = 56, 10, 24, 34
NAMES, VALUES = 136, 74
"""The width of names before bars, and of values after them."""
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
    unit: str = "s"
    """``share`` for a linear axis in per cent, with a rule at 1; ``s`` and ``MiB`` for a logarithmic axis."""

    @property
    def format(self) -> Callable[[float], str]:
        """The function that writes a value."""
        return {"s": format_seconds, "MiB": format_mib, "share": "{:.0%}".format}[self.unit]


def make_charts(section: Section, panel: Panel, mode: str) -> list[Chart]:
    """Returns charts of time, of the share of the limit and of memory over sizes: those that have values."""
    xs, at = panel.xs(mode), panel.at(mode)
    names = [name for name in reversed(section.providers) if name in at and name != LIMIT]  # ours last, on top

    def values(name: str, field: str) -> Values:
        return {x: p.ms and (getattr(p.record, field) or 0.0) / 1e3 for x, p in at[name].items()}

    times: dict[str, Values] = {LIMIT: {x: ms / 1e3 for x, ms in panel.limits(mode).items()}}
    times |= {name: values(name, "ms") for name in names}
    bands = {name: (values(name, "ms_p20"), values(name, "ms_p80")) for name in names}
    shares = {name: {x: p.fraction for x, p in at[name].items()} for name in names}
    memory = {name: {x: p.ms and p.record.peak_memory_mib for x, p in at[name].items()} for name in names}
    drawn = [Chart("time (band: 20th to 80th percentile)", xs, section.x, times, bands)]
    drawn.append(Chart("share of the measured limit", xs, section.x, shares, {}, "share"))
    drawn.append(Chart("peak memory, inputs included", xs, section.x, memory, {}, "MiB"))
    return [c for c in drawn if any(any(line.values()) for name, line in c.lines.items() if name != LIMIT)]


def make_history(table: Table) -> Chart:
    """Returns a chart of times in several runs over that in the first, a line a case, of a table of them."""
    lines = {}
    for i, name in enumerate(table.heads[2:], start=2):
        times = {row[0].text: float(row[i].text) for row in table.rows if row[i].text}
        lines[name] = {run: ms / next(iter(times.values())) for run, ms in times.items()}
    runs = [row[0].text for row in table.rows]
    return Chart("time in each run, over that in the first", runs, "run", lines, {}, "share")


def render_chart(chart: Chart, styles: Mapping[str, Look], numbers: Mapping[str, int] | None = None) -> str:
    """Returns a chart as an SVG element. ``numbers`` are the numbers of providers in the classes of lines."""
    places = [WIDTH // 2] if len(chart.xs) == 1 else _place_xs(chart)[0].values()
    more, height = f' data-x="{",".join(map(str, places))}"', HEIGHT
    if len(chart.xs) == 1:
        more, height = (
            f'{more} class="bars"',
            min(HEIGHT, TOP + 10 + 22 * sum(any(line.values()) for line in chart.lines.values())),
        )
    return _make_element(_draw(chart, styles, numbers or {}), WIDTH, height, chart.title, more)


def render_key(look: Look) -> str:
    """Returns a piece of a provider's line, for a legend, as an SVG element."""
    body = _draw_path("M0 5H26", look) + _draw_marks([(13, 5)], look)
    return f'<svg viewBox="0 0 26 10" width="26" height="10" aria-hidden="true">{body}</svg>'


def render_legend(styles: Mapping[str, Look]) -> str:
    """Returns the keys and names of providers as HTML."""
    keys = (
        f'<span style="white-space: nowrap">{render_key(look)} {escape(name)}</span>'
        for name, look in styles.items()
    )
    return f"<p>{' '.join(keys)}</p>"


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
    more = f' color="{MUTED}" width="{width}" height="{height}" font-family="sans-serif"'
    return _make_element("".join(parts), width, height, title, more) + "\n"


def _make_element(body: str, width: int, height: int, title: str, more: str) -> str:
    about = f'viewBox="0 0 {width} {height}" role="img" aria-label="{escape(title)}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {about}{more}>{body}</svg>'


def _draw(chart: Chart, styles: Mapping[str, Look], numbers: Mapping[str, int]) -> str:
    return (_draw_bars if len(chart.xs) == 1 else _draw_lines)(chart, styles, numbers)


def _draw_bars(chart: Chart, styles: Mapping[str, Look], numbers: Mapping[str, int]) -> str:
    """Draw the single case of a chart: a bar from 0 for each provider, the first on top."""
    (x,) = chart.xs
    shown = {name: value for name, line in [*chart.lines.items()][::-1] if (value := line.get(x))}
    ends = {
        name: chart.bands[name][1].get(x) or value if name in chart.bands else value
        for name, value in shown.items()
    }
    longest: float = max([1.0 if chart.unit == "share" else 0.0, *shown.values(), *ends.values()])
    step = min(22, (HEIGHT - TOP - 10) // max(1, len(shown)))

    def along(value: float) -> int:
        return NAMES + round((WIDTH - NAMES - VALUES) * min(value / longest, 1.0))

    parts = [_draw_text(LEFT, 14, f"{chart.title}, {chart.x_name} = {format_size(x)}", "start", 12)]
    for i, (name, value) in enumerate(shown.items()):
        y, look = TOP + 4 + i * step, styles[name]
        bar = f'<rect x="{NAMES}" y="{y}" width="{along(value) - NAMES}" height="{step - 5}" fill="{look.colour}"/>'
        lower, upper = (edge.get(x) for edge in chart.bands.get(name, ({}, {})))
        if lower and upper:
            bar += f'<path d="M{along(lower)} {y + step // 2 - 3}H{along(upper)}" stroke="currentColor"/>'
        words = _draw_text(NAMES - 6, y + step // 2 + 1, name, "end")
        words += _draw_text(along(max(value, ends[name])) + 5, y + step // 2 + 1, chart.format(value), "start")
        group = f' class="s{numbers[name]}"' if name in numbers else ""
        parts.append(f"<g{group}>{bar}{words}</g>")
    if chart.unit == "share":
        rule = f"M{along(1.0)} {TOP}V{TOP + 4 + step * len(shown)}"
        parts.append(f'<path d="{rule}" stroke="currentColor" stroke-dasharray="2 3"/>')
    return "".join(parts)


def _draw_lines(chart: Chart, styles: Mapping[str, Look], numbers: Mapping[str, int]) -> str:
    across, ticks_x = _place_xs(chart)
    edges = chain.from_iterable(chart.bands.values())
    ys = [y for line in (*chart.lines.values(), *edges) for y in line.values() if y]
    up, ticks_y = _place_ys(chart, ys)
    right, low = WIDTH - RIGHT, HEIGHT - BOTTOM
    rules = "".join(f"M{LEFT} {y}H{right}" for y, _ in ticks_y) + "".join(f"M{x} {TOP}V{low}" for x, _ in ticks_x)
    parts = [f'<path d="{rules}" stroke="currentColor" stroke-opacity=".2" fill="none"/>']
    if chart.unit == "share":
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


def _place_ys(chart: Chart, ys: Sequence[float]) -> tuple[Callable[[float], int], list[tuple[int, str]]]:
    """Place values on the vertical axis. Returns a function from a value to its pixel, and ticks."""
    share = chart.unit == "share"
    scale: Callable[[float], float] = float if share else math.log
    if share:
        low, high, ticks = 0.0, 1.04 * max([1.0, *ys]), [0.0, 0.25, 0.5, 0.75, 1.0]
    elif chart.unit == "MiB":  # between powers of two
        first, last = math.floor(math.log2(min(ys) / 1.1)), math.ceil(math.log2(max(ys) * 1.1))
        ticks = [2.0**i for i in range(first, last + 1, -(-(last - first) // 6))]
        low, high = math.log(2.0**first), math.log(2.0**last)
    else:
        low, high = map(math.log, choose_range(ys))
        ticks = [y for y in choose_ticks(ys) if low <= math.log(y) <= high]

    def up(y: float) -> int:
        return HEIGHT - BOTTOM - round((HEIGHT - BOTTOM - TOP) * (scale(y) - low) / (high - low))

    return up, [(up(y), chart.format(y)) for y in ticks]
