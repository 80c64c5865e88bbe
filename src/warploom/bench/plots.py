"""Pictures for READMEs: an SVG for each bench, drawn to be read on a light and on a dark page.

They need matplotlib, which is imported only when one is drawn.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from warploom.bench.labels import log_range, log_ticks, mode_title, seconds, size, sort_xs
from warploom.bench.palette import MUTED, Look, looks
from warploom.bench.panels import Panel, Section, load_sections
from warploom.bench.records import LIMIT
from warploom.bench.storage import probe, replace_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["figure_svg", "write_pictures"]

MODES = ("fwd", "bwd")
CASES = {
    "activation": ("none", "silu"),
    "theta_gradient": (None,),
    "head_dim": (128,),
    "dtype": ("bfloat16",),
    "batch": (4, 8, 32),
    "kv_rank": (None,),
}
"""What the pictures show of a bench that has these parameters. The first is what stands for one that has none."""

_MOST_PANELS = 2
_MARKERS = {
    "circle": "o",
    "square": "s",
    "diamond": "D",
    "triangle-up": "^",
    "triangle-down": "v",
    "triangle-left": "<",
    "triangle-right": ">",
    "cross": "P",
    "x": "X",
    "hexagon": "h",
    "star": "*",
    "pentagon": "p",
}
_STYLE: Any = {  # matplotlib's own type for it differs from version to version
    "svg.hashsalt": "warploom",  # the same records give the same file
    "font.size": 13,
    "axes.titlesize": 13,
    "text.color": MUTED,
    "axes.labelcolor": MUTED,
    "axes.edgecolor": MUTED,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "axes.titlecolor": MUTED,
    "grid.color": MUTED,
    "grid.alpha": 0.25,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "savefig.transparent": True,
}


def write_pictures(sources: Sequence[Path], directory: Path) -> list[Path]:
    """Draw each bench of some records.

    Args:
        sources: Folders with a ``records.jsonl``, or such files; oldest first.
        directory: Where the pictures go, named ``OPERATOR.svg``. It is made if it is not there.

    Returns:
        The files written; a bench without a speed from the present code has none.

    Raises:
        WarploomError: A source holds no records file or one that cannot be read, or nothing can be written.
    """
    probe(directory)
    written = []
    for section in load_sections(sources):
        panels = _chosen(section)
        if any(point.ms and point.record.mode in MODES for panel in panels for point in panel.points):
            path = directory / f"{section.operator}.svg"
            replace_text(path, figure_svg(section, panels))
            written.append(path)
    return written


def figure_svg(section: Section, panels: Sequence[Panel], modes: Sequence[str] = MODES) -> str:
    """Draw the share of the limit above the time, a column for each panel and mode.

    Args:
        section: The bench.
        panels: Which of its panels.
        modes: Which modes; those that a panel lacks are left out.

    Returns:
        An SVG with a transparent ground.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure

    columns = [(panel, mode) for panel in panels for mode in modes if mode in panel.modes]
    styles = looks([*sorted(section.providers), LIMIT], section.emphasis)
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(1.2 + 2.8 * len(columns), 6.4), layout="constrained")
        grid = figure.subplots(2, len(columns), sharey="row", sharex="col", squeeze=False)
        common = dict(set.intersection(*(set(panel.labels.items()) for panel in panels)))
        figure.suptitle(_words({name: common[name] for name in panels[0].labels if name in common}), fontsize=13)
        for (panel, mode), share, time in zip(columns, *grid):
            own = _words({name: value for name, value in panel.labels.items() if name not in common})
            share.set_title("\n".join(filter(None, (mode_title(mode), own))))
            _draw_share(share, section, panel, mode, styles)
            _draw_time(time, section, panel, mode, styles)
            _size_ticks(time, section.x, _places(panel.xs(mode)))
        grid[0][0].set_ylabel("share of the limit")
        grid[1][0].set_ylabel("time")
        _scales(grid[0][0], grid[1][0], columns)
        drawn = {label: handle for axes in grid[1] for handle, label in zip(*axes.get_legend_handles_labels())}
        names = [name for name in section.providers if name in drawn]
        figure.legend(
            [drawn[name] for name in names],
            names,
            loc="outside lower center",
            ncols=max(2, min(6, 3 * len(columns) // 2)),  # as many names as fit
            frameon=False,
        )
        out = io.StringIO()
        figure.savefig(out, format="svg", metadata={"Date": None})
    return out.getvalue()


def _chosen(section: Section) -> list[Panel]:
    """The panels that `CASES` names, of the first device; where it names none, the first ones."""
    first = [panel for panel in section.panels if panel.device == section.panels[0].device]
    wanted = [
        panel
        for panel in first
        if all(panel.parameters.get(name, values[0]) in values for name, values in CASES.items())
    ]
    return (wanted or first)[:_MOST_PANELS]


def _words(labels: Mapping[str, str]) -> str:
    return " · ".join(f"{name} = {value}" for name, value in labels.items())


def _draw_share(axes: Axes, section: Section, panel: Panel, mode: str, styles: Mapping[str, Look]) -> None:
    for name, line in reversed(list(_lines(section, panel, mode).items())):
        _plot(axes, name, {x: point.fraction for x, point in line.items()}, styles[name])
    axes.axhline(1.0, color=styles[LIMIT].colour, linestyle=":")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    axes.grid(True)


def _draw_time(axes: Axes, section: Section, panel: Panel, mode: str, styles: Mapping[str, Look]) -> None:
    _plot(axes, LIMIT, {x: ms / 1e3 for x, ms in panel.limits(mode).items()}, styles[LIMIT])
    for name, line in reversed(list(_lines(section, panel, mode).items())):
        _plot(axes, name, {x: point.ms and point.ms / 1e3 for x, point in line.items()}, styles[name])
    axes.set_yscale("log")
    axes.grid(True)


def _lines(section: Section, panel: Panel, mode: str) -> dict[str, dict[Any, Any]]:
    at = panel.at(mode)
    return {name: at[name] for name in section.providers if name in at and name != LIMIT}


def _places(values: Iterable[Any]) -> list[Any]:
    """Positions, ascending. Where they are numbers, one that is none (of a record without it) has no place."""
    xs = sort_xs(values)
    return [x for x in xs if isinstance(x, int | float)] or xs


def _plot(axes: Axes, name: str, values: Mapping[Any, float | None], look: Look) -> None:
    xs = _places(values)
    ys = [float("nan") if (value := values[x]) is None else value for x in xs]
    if any(y == y for y in ys):
        marker = _MARKERS.get(look.marker, "")
        dash = ":" if look.dash == "dot" else "-"
        axes.plot(xs, ys, dash, label=name, color=look.colour, linewidth=look.width, marker=marker, markersize=5)


def _size_ticks(axes: Axes, x: str, xs: Sequence[Any]) -> None:
    axes.set_xlabel(x)
    if all(isinstance(value, int | float) and value > 0 for value in xs):
        every = -(-len(xs) // 4)  # four labels fit
        axes.set_xscale("log")
        axes.set_xticks(xs, minor=True, labels=[])
        labelled = xs[::-every]
        axes.set_xticks(labelled, labels=[size(value) for value in labelled])


def _scales(share: Axes, time: Axes, columns: Sequence[tuple[Panel, str]]) -> None:
    """Set the scales that the axes of a row have in common."""
    points = [p for panel, mode in columns for line in panel.at(mode).values() for p in line.values()]
    share.set_ylim(0, 1.04 * max([1.0, *(p.fraction for p in points if p.fraction)]))
    times = [p.ms / 1e3 for p in points if p.ms]
    if times:
        ticks = log_ticks(times)
        time.set_yticks(ticks, labels=[seconds(tick) for tick in ticks])
        time.set_yticks([], minor=True)
        time.set_ylim(*log_range(times))
