"""How a provider looks: one colour, line and marker for it in every plot, table and legend.

The colours have a contrast of about 3 : 1 or more against white *and* against a dark page, so that a line is
the same on both, and they stay apart for the common colour-vision deficiencies (after Okabe and Ito); the
marker says it once more.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from warploom.bench.records import LIMIT

__all__ = ["MUTED", "Look", "looks", "ordered"]

MUTED = "#787878"
"""For text and rules of pictures that must read on both pages."""


@dataclass(frozen=True)
class Look:
    """Colour, line and marker of one provider; dashes and markers under plotly's names."""

    colour: str
    marker: str
    dash: str = "solid"
    width: float = 2.0

    def fill(self, alpha: float) -> str:
        """The colour, let through by ``alpha``, as CSS."""
        red, green, blue = (int(self.colour[i : i + 2], 16) for i in (1, 3, 5))
        return f"rgba({red},{green},{blue},{alpha})"


_KNOWN = {
    LIMIT: Look("#808080", "", "dot"),
    "triton": Look("#d55e00", "circle"),
    "torch": Look("#009e73", "diamond"),
    "torch_compile": Look("#1f7fc4", "square"),
    "triton_cache": Look("#9a6bc2", "triangle-up"),
    "torch_compile_cache": Look("#2f8f9d", "triangle-down"),
}
_MODELS = {"flash": "#d55e00", "plain": "#009e73", "sdpa": "#1f7fc4", "llama": "#9a6bc2", "tpa": "#c0589a"}
"""Colours of profiled models, by their attention."""
_COMPILED = {"": "circle", "compile": "square", "graphs": "diamond"}
"""Their markers, by how they are compiled: what stands behind the plus in their names."""
_OTHERS = (
    Look("#c0589a", "hexagon"),
    Look("#a6761d", "cross"),
    Look("#6b8e23", "x"),
    Look("#5f6caf", "star"),
    Look("#b5485d", "pentagon"),
    Look("#8a7f00", "triangle-left"),
    Look("#7a5cff", "triangle-right"),
)


def looks(providers: Iterable[str], emphasis: str) -> dict[str, Look]:
    """Give every provider its look.

    Args:
        providers: The names. Those that are not known here take turns in this order.
        emphasis: The provider whose line is drawn thick.

    Returns:
        A look for each name; known names always get the same.
    """
    names = list(dict.fromkeys(providers))
    chosen = {name: look for name in names if (look := _known(name))}
    strangers = [name for name in names if name not in chosen]
    chosen |= {name: _OTHERS[i % len(_OTHERS)] for i, name in enumerate(strangers)}
    if emphasis in chosen:
        chosen[emphasis] = replace(chosen[emphasis], width=3.5)
    return chosen


def _known(name: str) -> Look | None:
    base, _, how = name.partition("+")
    if base in _MODELS and how in _COMPILED:
        return Look(_MODELS[base], _COMPILED[how])
    return _KNOWN.get(name)


def ordered(providers: Iterable[str], emphasis: str) -> list[str]:
    """Sort providers for a reader: the emphasised one, ours, the baselines, others, and the limit last."""
    first = (emphasis, "triton", "torch_compile", "torch")

    def rank(name: str) -> tuple[int, str]:
        if name == LIMIT:
            return len(first) + 2, name
        if name in first:
            return first.index(name), name
        return len(first) + (not name.startswith("triton")), name

    return sorted(set(providers), key=rank)
