"""How positions, times and parameters are written, and where the ticks of a logarithmic axis stand."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from typing import Any

__all__ = ["log_range", "log_ticks", "mode_title", "seconds", "size", "sort_xs", "spell"]

MODES = {
    "fwd": "Forward",
    "bwd": "Backward",
    "fwd_bwd": "Forward and backward",
    "train": "Training step: forward, backward and AdamW",
    "fwd_graph": "Forward, replayed from a CUDA graph",
}

_STEPS = ((1, 2, 5), (1,))
_MOST = 12
_MARGIN = 1.15


def log_ticks(shown: Sequence[float], also: Sequence[float] = ()) -> list[float]:
    """Choose round ticks for a logarithmic axis.

    Args:
        shown: The positive values that are in sight; how dense the ticks are follows from these.
        also: Values that may come into sight later and want ticks as well.

    Returns:
        Ascending ticks, the first at most the smallest value and the last at least the largest.
    """
    dense = next((steps for steps in _STEPS if len(_between(shown, steps)) <= _MOST), _STEPS[-1])
    return _between([*shown, *also], dense)


def log_range(values: Sequence[float]) -> tuple[float, float]:
    """Choose the ends of a logarithmic axis: the values and a margin, and so far that two ticks are seen."""
    low, high = min(values) / _MARGIN, max(values) * _MARGIN
    ticks = log_ticks(values)
    if sum(low <= tick <= high for tick in ticks) < 2:
        low, high = min(low, ticks[0]), max(high, ticks[-1])
    return low, high


def _between(values: Sequence[float], steps: tuple[int, ...]) -> list[float]:
    low, high = min(values), max(values)
    decades = range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 2)
    ticks = [float(f"{step}e{decade}") for decade in decades for step in steps]
    first = max(i for i, tick in enumerate(ticks) if tick <= low)
    last = min(i for i, tick in enumerate(ticks) if tick >= high)
    return ticks[first : last + 1]


def seconds(value: float) -> str:
    """Write a time, given in seconds, with the unit that suits it."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if value >= scale * 0.9999:
            return f"{value / scale:.4g} {unit}"
    return f"{value / 1e-9:.4g} ns"


def size(value: float) -> str:
    """Write a size, with ``k`` for multiples of 1024."""
    return f"{value // 1024:g}k" if value >= 1024 and value % 1024 == 0 else f"{value:g}"


def sort_xs(values: Iterable[Any]) -> list[Any]:
    """Sort positions, each once: numbers by size, other values behind them in the order in which they come."""
    return sorted(dict.fromkeys(values), key=lambda x: (0, x) if isinstance(x, int | float) else (1, 0))


def spell(value: Any) -> str:
    """Write a parameter's value for a reader."""
    if isinstance(value, list | tuple):
        return "×".join(spell(item) for item in value)
    return value if isinstance(value, str) else json.dumps(value)


def mode_title(mode: str) -> str:
    """Write a mode for a reader."""
    return MODES.get(mode, mode)
