"""Scaled RoPE frequencies for sequences longer than those of training, by the names of transformers.

Letters: ``θ_f = base ** (-f / F)`` for ``f = 0 … F − 1``, ``s`` the factor of lengths, ``L`` the length trained on.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from warploom.errors import ArgumentError, fault

Tensor = torch.Tensor
Scaling = Mapping[str, Any]

_LENGTH = "original_max_position_embeddings"
_NEEDED = {
    "default": (),
    "linear": ("factor",),
    "proportional": (),
    "dynamic": ("factor", "max_position_embeddings"),
    "yarn": (_LENGTH,),
    "longrope": ("short_factor", "long_factor", _LENGTH),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", _LENGTH),
}
_TAKEN = {
    "proportional": ("factor", "partial_rotary_factor"),
    "dynamic": (_LENGTH,),
    "yarn": (
        *("factor", "attention_factor", "mscale", "mscale_all_dim", "beta_fast", "beta_slow", "truncate"),
        "max_position_embeddings",
    ),
    "longrope": ("factor", "attention_factor", "max_position_embeddings"),
}
_EVERYWHERE = ("rope_type", "type", "rope_theta", "partial_rotary_factor")


def check_scaling(name: str, scaling: Scaling, features: int) -> None:
    """Raise unless a scaling has all entries that its kind needs, and no unknown ones.

    Raises:
        ArgumentError: An entry is missing, unknown or out of range.
    """
    kind = kind_of(scaling)
    if kind not in _NEEDED:
        raise fault(ArgumentError, name, "scaling", f"of a rope_type of {', '.join(_NEEDED)}", repr(kind))
    needed, known = _NEEDED[kind], (*_NEEDED[kind], *_TAKEN.get(kind, ()), *_EVERYWHERE)
    missing = [key for key in needed if scaling.get(key) is None]
    if missing:
        raise fault(ArgumentError, name, "scaling", f"with {', '.join(needed)} for {kind}", f"no {missing[0]}")
    unknown = [key for key, value in scaling.items() if key not in known and value is not None]
    if unknown:
        raise fault(ArgumentError, name, "scaling", f"with {', '.join(known)} for {kind}", repr(unknown[0]))
    if kind in ("yarn", "longrope") and scaling.get("factor") is None is scaling.get("max_position_embeddings"):
        raise fault(ArgumentError, name, "scaling", f"with factor or max_position_embeddings for {kind}", "neither")
    if kind != "proportional" and scaling.get("partial_rotary_factor") not in (None, 1, 1.0):
        raise fault(ArgumentError, name, "scaling", "without partial_rotary_factor (see rotary_dim)", "one")
    for key in ("short_factor", "long_factor") if kind == "longrope" else ():
        if len(scaling[key]) != features:
            expected = f"with a {key} for each of F = {features} frequencies"
            raise fault(ArgumentError, name, "scaling", expected, len(scaling[key]))


def kind_of(scaling: Scaling) -> Any:
    """Returns the name of a scaling's kind."""
    return scaling.get("rope_type", scaling.get("type", "default"))


def scale_frequencies(scaling: Scaling, base: float, features: int, length: int | None) -> tuple[Tensor, float]:
    """Returns the frequencies (F,) float64, and the factor of queries and keys.

    Args:
        scaling: A scaling that `check_scaling` accepts.
        base: The base of the frequencies.
        features: The number of frequencies ``F``.
        length: Tokens of the longest sequence, for ``dynamic`` and ``longrope``.

    Sources: "linear", Chen et al., 2023, arXiv 2306.15595; "yarn" and "dynamic", Peng et al., 2023, arXiv
    2309.00071; "longrope", Ding et al., 2024, arXiv 2402.13753; "llama3", Llama Team, 2024, arXiv 2407.21783.
    """
    kind = kind_of(scaling)
    theta = base ** (-torch.arange(features, dtype=torch.float64) / features)
    factor = scaling.get("factor") or 1.0
    if kind == "linear":
        return theta / factor, 1.0
    if kind == "proportional":
        rotary = int((scaling.get("partial_rotary_factor") or 1.0) * features)
        return torch.where(torch.arange(features) < rotary, theta / factor, 0.0), 1.0
    if kind == "dynamic":
        return _dynamic(scaling, base, features, length), 1.0
    if kind == "llama3":
        return _llama3(scaling, theta), 1.0
    if kind == "default":
        return theta, 1.0
    if scaling.get("factor") is None:
        factor = scaling["max_position_embeddings"] / scaling[_LENGTH]
    if kind == "yarn":
        return _yarn(scaling, theta, base, factor), _yarn_attention(scaling, factor)
    trained = scaling[_LENGTH]
    is_long = length is not None and length > trained
    stretch = torch.tensor(scaling["long_factor" if is_long else "short_factor"], dtype=torch.float64)
    attention = scaling.get("attention_factor")
    if attention is None:
        attention = math.sqrt(1 + math.log(factor) / math.log(trained)) if factor > 1 else 1.0
    return theta / stretch, float(attention)


def _dynamic(scaling: Scaling, base: float, features: int, length: int | None) -> Tensor:
    """Returns frequencies of a larger base, the lowest divided by ``s · length / L − (s − 1)``."""
    factor, trained = float(scaling["factor"]), int(scaling["max_position_embeddings"])
    times = max(length or trained, trained) / trained
    base *= float((factor * times - (factor - 1)) ** (features / (features - 1)))
    return base ** (-torch.arange(features, dtype=torch.float64) / features)


def _llama3(scaling: Scaling, theta: Tensor) -> Tensor:
    """Returns frequencies divided by s if they turn seldom in L, unchanged if often, with a ramp between."""
    turns = theta * (int(scaling[_LENGTH]) / (2 * math.pi))
    factor, low, high = (float(scaling[key]) for key in ("factor", "low_freq_factor", "high_freq_factor"))
    stays: Tensor = ((turns - low) / (high - low)).clamp(0, 1)
    return theta * (stays + (1 - stays) / factor)


def _yarn(scaling: Scaling, theta: Tensor, base: float, factor: float) -> Tensor:
    """Returns frequencies divided by s below ``beta_slow`` turns in L, unchanged above ``beta_fast``."""
    features = len(theta)

    def index_of(turns: float) -> float:
        return features * math.log(scaling[_LENGTH] / (turns * 2 * math.pi)) / math.log(base)

    first, last = index_of(scaling.get("beta_fast") or 32), index_of(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * features - 1)
    last += 0.001 if first == last else 0.0
    divided = ((torch.arange(features, dtype=torch.float64) - first) / (last - first)).clamp(0, 1)
    return theta * (1 - divided + divided / factor)


def _yarn_attention(scaling: Scaling, factor: float) -> float:
    """Returns the temperature ``0.1 · ln s + 1``, or a ratio of two such."""
    given, scale, whole = (scaling.get(key) for key in ("attention_factor", "mscale", "mscale_all_dim"))
    if given is not None:
        return float(given)
    growth = 0.1 * math.log(factor) if factor > 1 else 0.0
    return (growth * scale + 1) / (growth * whole + 1) if scale and whole else growth + 1
