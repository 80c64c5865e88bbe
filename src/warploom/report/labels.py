"""Labels of positions, times and modes, and ticks of logarithmic axes."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from typing import Any

MODES = {
    "fwd": "Forward",
    "bwd": "Backward",
    "fwd_bwd": "Forward and backward",
    "train": "Training step: forward, backward and AdamW",
    "fwd_graph": "Forward, replayed from a CUDA graph",
}

_MOST = 9
_MARGIN = 1.15


def choose_ticks(shown: Sequence[float]) -> list[float]:
    """Choose round ticks for a logarithmic axis of positive values. The first is at most the smallest value."""
    low, high = min(shown), max(shown)
    decades = range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 2)
    ticks: list[float] = []
    for steps in ((1, 2, 5), (1,)):
        every = [float(f"{step}e{decade}") for decade in decades for step in steps]
        ticks = every[bisect_right(every, low) - 1 : bisect_left(every, high) + 1]
        if len(ticks) <= _MOST:
            break
    return ticks


def choose_range(values: Sequence[float]) -> tuple[float, float]:
    """Choose the ends of a logarithmic axis, with a margin around the values, and so that two ticks are visible."""
    low, high = min(values) / _MARGIN, max(values) * _MARGIN
    ticks = choose_ticks(values)
    if sum(low <= tick <= high for tick in ticks) < 2:
        low, high = min(low, ticks[0]), max(high, ticks[-1])
    return low, high


def format_seconds(value: float) -> str:
    """Write a time, given in seconds, with the unit that suits it."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if value >= scale * 0.9999:
            return f"{value / scale:.4g} {unit}"
    return f"{value / 1e-9:.4g} ns"


def format_mib(value: float) -> str:
    """Write memory, given in MiB, with the unit that suits it."""
    return f"{value / 1024:.4g} GiB" if value >= 1024 else f"{value:.4g} MiB"


def format_size(value: Any) -> str:
    """Write a size, with ``k`` for multiples of 1024."""
    if not isinstance(value, int | float):
        return str(value)
    return f"{value // 1024:g}k" if value >= 1024 and value % 1024 == 0 else f"{value:g}"


def sort_xs(values: Iterable[Any]) -> list[Any]:
    """Sort positions, each once: numbers by size, then other values in the order given."""
    return sorted(dict.fromkeys(values), key=lambda x: (0, x) if isinstance(x, int | float) else (1, 0))


def format_mode(mode: str) -> str:
    """Write a mode for a reader."""
    return MODES.get(mode, mode)
