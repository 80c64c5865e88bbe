"""What tests and bench know of tensor-product attention: cases, inputs, providers, the fewest bytes and operations."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from warploom.ops.spec import Bench, Case, Inputs, Operator, Traffic, Unsupported
from warploom.ops.tpa import reference
from warploom.ops.tpa.api import tpa_attention, tpa_decode

Tensor = torch.Tensor
Provider = Callable[..., Tensor]

# ----------------------------------------------------------------------------------------------------------
# Inputs
# ----------------------------------------------------------------------------------------------------------


def _factors(case: Case, tokens: int, keys: int, device: torch.device, generator: torch.Generator) -> Inputs:
    """The six factors.

    Keys of the case: ``batch, heads, head_dim, dtype``; ``rank`` of the queries, 0 for whole queries; ``kv_rank`` (1),
    and ``v_rank`` where that of the values differs; ``value_dim`` (``head_dim``); ``layout`` (``bhn`` for heads before
    tokens in memory).
    """
    batch, heads, features, rank = (case[key] for key in ("batch", "heads", "head_dim", "rank"))
    rank_k = case.get("kv_rank", 1)
    rank_v, values = case.get("v_rank", rank_k), case.get("value_dim", features)
    dtype = getattr(torch, case["dtype"])

    def draw(*shape: int) -> Tensor:
        numbers = _normal(shape, dtype, device, generator)
        return numbers.transpose(1, 2).contiguous().transpose(1, 2) if case.get("layout") == "bhn" else numbers

    def rank_axis(r: int) -> tuple[int, ...]:
        return () if r == 1 else (r,)  # left out at rank one

    return {
        "aq": draw(batch, tokens, heads, rank) if rank else None,
        "ak": draw(batch, keys, heads, *rank_axis(rank_k)),
        "av": draw(batch, keys, heads, *rank_axis(rank_v)),
        "bq": draw(batch, tokens, rank or heads, features),
        "bk": draw(batch, keys, *rank_axis(rank_k), features),
        "bv": draw(batch, keys, *rank_axis(rank_v), values),
    }


_PERIOD = 2**24 - 3


def _normal(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Tensor:
    """Normal numbers. A large tensor repeats them with a prime period, so that no two of its rows are alike."""
    size = math.prod(shape)
    numbers = torch.randn(min(size, _PERIOD), generator=generator).to(device, dtype)
    if size > _PERIOD:
        numbers = numbers.repeat(-(-size // _PERIOD))[:size].clone()
    return numbers.view(shape)


def _options(case: Case) -> Inputs:
    return {key: case[key] for key in ("scale", "scale_q", "scale_k", "scale_v", "causal", "strategy") if key in case}


def decode_inputs(case: Case, device: torch.device, generator: torch.Generator) -> Inputs:
    """Inputs of a decode case: those of `_factors`, ``m`` cache entries, ``tokens`` new ones (1).

    Further keys: ``cache_seqlens`` (``random``, or a list), ``strategy`` and the scales.
    """
    inputs = _factors(case, case.get("tokens", 1), case["m"], device, generator) | _options(case)
    lengths = case.get("cache_seqlens")
    if lengths == "random":
        inputs["cache_seqlens"] = torch.randint(0, case["m"] + 1, (case["batch"],), generator=generator).to(device)
    elif lengths is not None:
        inputs["cache_seqlens"] = torch.tensor(lengths, dtype=torch.int32, device=device)
    return inputs


def attention_inputs(case: Case, device: torch.device, generator: torch.Generator) -> Inputs:
    """Inputs of an attention case: those of `_factors`, ``n`` queries and ``m`` keys (as many).

    Further keys: ``cu_seqlens``, ``causal`` and the scales.
    """
    inputs = _factors(case, case["n"], case.get("m", case["n"]), device, generator)
    for factor in inputs.values():
        if factor is not None:
            factor.requires_grad_()
    inputs |= _options(case)
    if "cu_seqlens" in case:
        inputs["cu_seqlens"] = torch.tensor(case["cu_seqlens"], dtype=torch.int32, device=device)
    return inputs


# ----------------------------------------------------------------------------------------------------------
# Conformance: small, odd, and together touching every feature
# ----------------------------------------------------------------------------------------------------------

_DECODE: dict[str, Any] = {"batch": 2, "m": 37, "heads": 3, "head_dim": 16, "rank": 4, "dtype": "float32"}
_DECODE_CHECKS: tuple[dict[str, Any], ...] = (
    {},
    {"dtype": "bfloat16", "heads": 4, "head_dim": 24, "rank": 5},
    {"dtype": "float16", "kv_rank": 2, "value_dim": 20},
    {"kv_rank": 3, "v_rank": 1, "tokens": 2, "cache_seqlens": "random"},
    {"batch": 3, "kv_rank": 1, "v_rank": 4, "cache_seqlens": [0, 37, 1], "tokens": 3},
    {"batch": 1, "m": 300, "strategy": "split_kv", "heads": 2},
    {"m": 520, "strategy": "split_kv", "heads": 1, "cache_seqlens": [513, 129], "dtype": "bfloat16"},
    {"m": 300, "strategy": "batch", "heads": 2, "cache_seqlens": "random", "layout": "bhn"},
    {"strategy": "batch_head", "heads": 19, "tokens": 2},
    {"batch": 1, "heads": 31, "rank": 17, "head_dim": 129, "value_dim": 63, "m": 19},
    {"batch": 1, "kv_rank": 16, "m": 21, "heads": 2},
    {"rank": 0, "heads": 5, "scale": 0.3, "scale_q": 0.5, "scale_k": 2.0, "scale_v": -1.5},
    {"batch": 0},
    {"m": 0},
    {"tokens": 0},
    {"m": 3, "tokens": 5, "dtype": "bfloat16"},
)
_ATTENTION: dict[str, Any] = {"batch": 2, "n": 19, "heads": 2, "head_dim": 16, "rank": 3, "dtype": "float32"}
_ATTENTION_CHECKS: tuple[dict[str, Any], ...] = (
    {},
    {"dtype": "bfloat16", "kv_rank": 2, "n": 33},
    {"dtype": "float16", "heads": 3, "head_dim": 24, "value_dim": 40, "causal": False},
    {"dtype": "bfloat16", "causal": False, "m": 40},
    {"kv_rank": 2, "v_rank": 3, "rank": 17},
    {"batch": 1, "n": 40, "cu_seqlens": [0, 7, 7, 33, 40], "kv_rank": 2},
    {"batch": 1, "n": 40, "cu_seqlens": [0, 17, 40], "causal": False},
    {"n": 9, "m": 35},
    {"n": 35, "m": 9, "kv_rank": 2},
    {"rank": 0, "heads": 3, "scale": 0.3, "scale_q": 0.5, "scale_k": 2.0, "scale_v": -1.5},
    {"layout": "bhn", "dtype": "bfloat16"},
    {"batch": 1, "heads": 1, "head_dim": 129, "value_dim": 63, "n": 5},
    {"batch": 0},
    {"n": 0},
    {"m": 0},
)


def decode_definition(*, strategy: str = "auto", **inputs: Any) -> Tensor:
    """The reference, to which a strategy makes no difference."""
    return reference.tpa_decode(**inputs)


DECODE = Operator(
    name="tpa_decode",
    function=tpa_decode,
    reference=decode_definition,
    make_inputs=decode_inputs,
    check_cases=tuple({**_DECODE, **change} for change in _DECODE_CHECKS),
    length="m",
)
ATTENTION = Operator(
    name="tpa_attention",
    function=tpa_attention,
    reference=reference.tpa_attention,
    make_inputs=attention_inputs,
    check_cases=tuple({**_ATTENTION, **change} for change in _ATTENTION_CHECKS),
)
OPERATORS = (DECODE, ATTENTION)
BENCHES: tuple[Bench, ...] = ()
