"""The look of providers: each has the same colour, line and marker in every picture.

The colours have a contrast of about 3 : 1 or more against a white *and* a dark page, and differ for the common
colour-vision deficiencies (after Okabe and Ito). Markers differ too.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from warploom.bench.records import LIMIT
from warploom.ops.spec import KERNELS

MUTED = "#787878"
"""The colour of text and rules that must be readable on light and dark pages."""


@dataclass(frozen=True)
class Look:
    """Colour, marker and line of one provider."""

    colour: str
    marker: str
    """``o``, ``s`` (square), ``d`` (diamond), ``^``, ``v``, ``+``, ``x``, or empty for none."""
    width: float = 1.6
    dotted: bool = False


_KNOWN = {
    LIMIT: Look("#808080", "", dotted=True),
    KERNELS: Look("#d55e00", "o"),
    "torch": Look("#009e73", "d"),
    "torch_compile": Look("#1f7fc4", "s"),
    "torch_compile_cache": Look("#2f8f9d", "v"),
}
_OTHERS = ("#c0589a", "#a6761d", "#6b8e23", "#5f6caf", "#b5485d", "#8a7f00", "#7a5cff", "#1f7fc4")
_MARKERS = {"": "o", "compile": "s", "graphs": "d"}
"""Markers of models by how they are compiled, which follows the plus in their names."""


def choose_looks(providers: Iterable[str], emphasis: str) -> dict[str, Look]:
    """Choose the look of every provider: always the same for a known name. The line of ``emphasis`` is thick."""
    chosen: dict[str, Look] = {}
    strangers: list[str] = []
    for name in dict.fromkeys(providers):
        base, plus, how = name.partition("+")
        look = _KNOWN.get(base)
        if look is None:
            if base not in strangers:
                strangers.append(base)
            at = strangers.index(base)
            look = Look(_OTHERS[at % len(_OTHERS)], "x+^vsdo"[at % 7])
        chosen[name] = replace(look, marker=_MARKERS.get(how, "x")) if plus else look
    if emphasis in chosen:
        chosen[emphasis] = replace(chosen[emphasis], width=3.0)
    return chosen


def sort_providers(providers: Iterable[str], emphasis: str) -> list[str]:
    """Sort providers for a reader: the emphasised one, ours, the baselines, others, and the limit last."""
    first = (emphasis, KERNELS, "torch_compile", "torch")

    def rank(name: str) -> tuple[int, str]:
        if name == LIMIT:
            return len(first) + 2, name
        if name in first:
            return first.index(name), name
        return len(first) + (not name.startswith(KERNELS)), name

    return sorted(set(providers), key=rank)
