"""LRPE for tests and bench: cases, inputs, providers, and the fewest bytes a case must move."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from warploom.ops.lrpe import peers, reference
from warploom.ops.lrpe.api import lrpe_cosine, lrpe_rotate
from warploom.ops.lrpe.peers import Provider
from warploom.ops.spec import (
    KERNELS,
    SEEDS,
    Bench,
    Case,
    Inputs,
    Operator,
    Traffic,
    need_cuda,
    normal,
    on_gpus,
)

Tensor = torch.Tensor

# ----------------------------------------------------------------------------------------------------------
# Inputs
# ----------------------------------------------------------------------------------------------------------


def make_inputs(case: Case, device: torch.device, generator: torch.Generator, *, paired: bool) -> Inputs:
    """Returns the inputs of a case.

    Keys: ``batch, n, heads`` (0 for a three-dimensional x), ``head_dim, dtype``; ``theta`` (``per_head``,
    ``shared`` or ``vector``), ``frequencies`` (its length, by default one per angle), ``theta_dtype``,
    ``theta_gradient``; ``offset`` (an int, or ``scalar`` or ``batch`` for a tensor); ``position_ids`` (``n``,
    ``bn``, or a number of axes); ``layout`` (``bhnd`` for heads before tokens in memory); and ``grid, prefix,
    cu_seqlens, activation, interleaved`` as in the public functions.
    """
    batch, tokens, heads, head_dim = case["batch"], case["n"], case["heads"], case["head_dim"]
    dtype = getattr(torch, case["dtype"])
    shape = (batch, tokens, heads, head_dim) if heads else (batch, tokens, head_dim)
    x = normal(shape, dtype, device, generator)
    if case.get("layout") == "bhnd":
        x = x.transpose(1, 2).contiguous().transpose(1, 2)
    features = head_dim // 2 if paired else head_dim
    axes = len(case.get("grid", ())) or 1
    frequencies = case.get("frequencies", features // axes)
    rows = {"per_head": (max(heads, 1),), "shared": (1,), "vector": ()}[case.get("theta", "per_head")]
    # RoPE's geometric frequencies, each row a little different, so that no head can stand in for another.
    theta = 10000.0 ** (-torch.arange(frequencies) / frequencies) * (
        1 + 0.1 * torch.rand((*rows, frequencies), generator=generator)
    )
    theta = theta.to(device, getattr(torch, case.get("theta_dtype", "float32")))
    inputs: Inputs = {
        "x": x.requires_grad_(),
        "theta": theta.requires_grad_(case.get("theta_gradient", False)),
        "activation": case.get("activation", "none"),
    }
    inputs |= {key: case[key] for key in ("prefix", "interleaved") if key in case}
    if "grid" in case:
        inputs["grid"] = tuple(case["grid"])
    if "cu_seqlens" in case:
        inputs["cu_seqlens"] = torch.tensor(case["cu_seqlens"], dtype=torch.int32, device=device)
    if "offset" in case:
        inputs["offset"] = _offset(case["offset"], batch, device, generator)
    if "position_ids" in case:
        form = case["position_ids"]
        sizes = {"n": (tokens,), "bn": (batch, tokens)}.get(form) or (batch, tokens, form)
        inputs["position_ids"] = torch.randint(0, 2**24, sizes, generator=generator).to(device)
    return inputs


def _offset(form: int | str, batch: int, device: torch.device, generator: torch.Generator) -> int | Tensor:
    if isinstance(form, int):
        return form
    size = () if form == "scalar" else (batch,)
    return torch.randint(0, 2**20, size, generator=generator).to(device)


# ----------------------------------------------------------------------------------------------------------
# Conformance: small, odd, and together touching every feature
# ----------------------------------------------------------------------------------------------------------

_SMALL: dict[str, Any] = {
    "batch": 3, "n": 19, "heads": 5, "head_dim": 24, "dtype": "float32", "theta_gradient": True,
}  # fmt: skip
_CHECKS: tuple[dict[str, Any], ...] = (
    {},
    {"dtype": "bfloat16", "activation": "silu"},
    {"dtype": "float16", "activation": "sigmoid", "head_dim": 64},
    {"activation": "relu", "batch": 1, "n": 1},
    {"activation": "softmax", "frequencies": 7},
    {"activation": "softmax", "dtype": "bfloat16", "head_dim": 6, "heads": 1},
    {"activation": "silu", "theta": "shared", "batch": 2, "offset": 2**24 - 7},
    {"theta": "vector", "heads": 0, "offset": 1_000_003},
    {"theta": "vector", "theta_dtype": "bfloat16", "frequencies": 5, "dtype": "bfloat16"},
    {"theta_dtype": "float64", "offset": -11},
    {"offset": "scalar", "activation": "relu"},
    {"offset": "batch", "activation": "silu", "layout": "bhnd"},
    {"offset": "batch", "theta": "shared"},
    {"layout": "bhnd", "dtype": "bfloat16", "head_dim": 128, "n": 33, "batch": 2, "heads": 2},
    {"prefix": 4, "offset": 100},
    {"grid": [19], "frequencies": 3},
    {"grid": [4, 4], "prefix": 3, "frequencies": 4, "activation": "silu"},
    {"grid": [2, 3, 3], "prefix": 1, "frequencies": 3, "theta": "shared"},
    {"grid": [2, 1, 3, 3], "prefix": 1, "frequencies": 2, "dtype": "bfloat16"},
    {"grid": [1, 2, 2, 2, 2], "prefix": 3, "frequencies": 2},
    {"grid": [3, 6], "prefix": 1, "head_dim": 26, "frequencies": 7},
    {"position_ids": "n", "activation": "softmax"},
    {"position_ids": "bn"},
    {"position_ids": 3, "frequencies": 4, "theta": "shared"},
    {"batch": 1, "cu_seqlens": [0, 5, 5, 6, 19], "offset": 9},
    {"batch": 1, "cu_seqlens": [0, 19], "prefix": 2, "activation": "silu", "theta": "vector"},
    {"batch": 0},
    {"n": 0, "activation": "softmax"},
    {"batch": 9, "heads": 7, "n": 3, "head_dim": 10},
    {"batch": 5, "dtype": "bfloat16", "head_dim": 32, "theta_gradient": False},
    {"batch": 4, "dtype": "float16", "activation": "softmax", "grid": [19], "theta_gradient": False},
    {"activation": "softmax_sequence"},
    {"activation": "softmax_sequence", "dtype": "bfloat16", "theta": "shared", "head_dim": 64, "prefix": 3},
    {"activation": "softmax_sequence", "theta": "vector", "heads": 0, "n": 2300, "batch": 2, "head_dim": 6},
    {"activation": "softmax_sequence", "n": 2200, "heads": 2, "batch": 1, "layout": "bhnd", "offset": "batch"},
    {"activation": "softmax_sequence", "n": 2100, "heads": 1, "batch": 1, "head_dim": 64, "dtype": "bfloat16"}
    | {"theta_gradient": False},
    {"activation": "softmax_sequence", "batch": 1, "cu_seqlens": [0, 5, 5, 6, 19], "offset": 9},
    {"activation": "softmax_sequence", "batch": 1, "n": 401, "heads": 1, "cu_seqlens": [0, 1, 300, 401]},
    {"activation": "softmax_sequence", "grid": [4, 4], "prefix": 3, "frequencies": 4, "dtype": "float16"},
)
_ROTATE_CHECKS: tuple[dict[str, Any], ...] = (
    {"interleaved": True, "activation": "silu"},
    {"interleaved": True, "dtype": "bfloat16", "head_dim": 128, "n": 33, "batch": 2},
    {"interleaved": True, "layout": "bhnd", "frequencies": 5, "activation": "softmax"},
    {"head_dim": 2},
    {"interleaved": True, "activation": "softmax_sequence", "dtype": "bfloat16"},
)
_COSINE_CHECKS: tuple[dict[str, Any], ...] = (
    {"head_dim": 1},
    {"head_dim": 13, "activation": "softmax"},
    {"head_dim": 25, "grid": [3, 6], "prefix": 1, "frequencies": 13},
)


def _checks(*groups: Sequence[dict[str, Any]]) -> tuple[Case, ...]:
    return tuple({**_SMALL, **change} for group in groups for change in group)


# Softmax over the sequence: the assembler stops at the registers with which a tile's programs fit, and keeps some
# numbers in local memory, but none in a loop over blocks; most for sm_100 and six programs to a multiprocessor.
_SPILLS = {"sequence_forward_kernel": 80, "sequence_backward_kernel": 80}

ROTATE = Operator(
    name="lrpe_rotate",
    function=lrpe_rotate,
    reference=reference.lrpe_rotate,
    make_inputs=functools.partial(make_inputs, paired=True),
    check_cases=_checks(_CHECKS, _ROTATE_CHECKS),
    spills=_SPILLS,
)
COSINE = Operator(
    name="lrpe_cosine",
    function=lrpe_cosine,
    reference=reference.lrpe_cosine,
    make_inputs=functools.partial(make_inputs, paired=False),
    check_cases=_checks(_CHECKS, _COSINE_CHECKS),
    spills=_SPILLS,
)
OPERATORS = (ROTATE, COSINE)

# ----------------------------------------------------------------------------------------------------------
# Providers
# ----------------------------------------------------------------------------------------------------------


def _warploom(operator: Operator, case: Case) -> Provider:
    need_cuda()
    return functools.partial(operator.function, backend="triton")  # type: ignore[return-value]


def _providers(operator: Operator) -> dict[str, Callable[[Case], Provider]]:
    theirs = peers.providers("cosine" if operator is COSINE else "rotate")
    return {"warploom": lambda case: _warploom(operator, case), **theirs}


# ----------------------------------------------------------------------------------------------------------
# Benches
# ----------------------------------------------------------------------------------------------------------

ACTIVATIONS = ("none", "silu", "softmax", "softmax_sequence")
_PUBLISHED = {"batch": 12, "heads": 12, "head_dim": 128, "dtype": "bfloat16"}
_ON_CPU = {"batch": 2, "heads": 12, "head_dim": 64, "dtype": "bfloat16"}


def _published(device: str) -> list[Case]:
    lengths = [2**k for k in range(8, 16)] if device == "cuda" else [256, 1024, 4096]
    return [_PUBLISHED | {"activation": a, "n": n} for a in ACTIVATIONS for n in lengths]


def _quick(device: str) -> list[Case]:
    if device == "cuda":
        return [_PUBLISHED | {"activation": "silu", "n": 4096}]
    return [_ON_CPU | {"activation": "silu", "n": 512}]


def _theta(device: str) -> list[Case]:
    return [case | {"theta_gradient": True} for case in map(dict, _published(device))]


def _rope(device: str, exponents: Sequence[int]) -> list[Case]:
    if device != "cuda":
        return [_ON_CPU | {"theta": "vector", "activation": "none", "n": 512}]
    return [_PUBLISHED | {"theta": "vector", "activation": "none", "n": 2**k} for k in exponents]


_ROPE_SUITES = {
    "quick": functools.partial(_rope, exponents=(12,)),
    "published": functools.partial(_rope, exponents=range(8, 16)),
}


def _grids(device: str, dims: Sequence[int], activations: Sequence[str], prefixes: Sequence[int]) -> list[Case]:
    axes = {1: [2**k for k in range(8, 16)], 2: [16, 32, 64, 128], 3: [4, 8, 16, 32]}
    shape = _PUBLISHED
    if device != "cuda":
        axes, shape = {1: [256, 1024], 2: [16, 32], 3: [4, 8]}, _ON_CPU
    return [
        shape | {"activation": a, "grid_dims": k, "grid": [size] * k, "prefix": prefix, "n": size**k + prefix}
        for a in activations
        for k in dims
        for prefix in prefixes
        for size in axes[k]
    ]


def _quick_grids(device: str) -> list[Case]:
    size = 64 if device == "cuda" else 16
    return [case for case in _grids(device, (2,), ("none",), (10,)) if case["grid"] == [size, size]]


_GRIDS: dict[str, Callable[[str], Sequence[Case]]] = {
    "published": lambda device: _grids(device, (1, 2, 3), ACTIVATIONS, (0, 10))
}
_GRID_SEEDS = {SEEDS: on_gpus(lambda device: _grids(device, (1, 2, 3), ("none",), (0, 10)))}


def traffic(case: Case, mode: str, *, paired: bool) -> Traffic:
    """Streams of the size of x: what goes in, what comes out, and x again where the backward needs it."""
    size = math.prod(case[key] for key in ("batch", "n", "heads", "head_dim"))
    stream = size * getattr(torch, case["dtype"]).itemsize
    out = 1 if paired else 2
    if mode == "fwd":
        return Traffic(1, out, stream)
    again = case["activation"] != "none" or bool(case.get("theta_gradient"))
    return Traffic(out + again, 1, stream)


_LENGTHS = {"quick": _quick, "published": _published, "theta": _theta, SEEDS: on_gpus(_published)}


def _bench(operator: Operator, name: str, suites: Any, title: str, providers: Any = None) -> Bench:
    return Bench(
        name=name,
        operator=operator,
        suites=suites,
        providers=providers or _providers(operator),
        precompiled=("torch",),
        quick=(KERNELS, "torch"),
        traffic=functools.partial(traffic, paired=operator is ROTATE),
        title=title,
    )


BENCHES = (
    _bench(ROTATE, "lrpe-rotate", _LENGTHS, "LRPE rotate (RoPE) with the activation fused in"),
    _bench(
        ROTATE,
        "lrpe-rope",
        _ROPE_SUITES,
        "RoPE: LRPE rotate with frequencies that all heads share",
        _providers(ROTATE) | peers.ROPE,
    ),
    _bench(COSINE, "lrpe-cosine", _LENGTHS, "LRPE cosine with the activation fused in"),
    _bench(
        ROTATE,
        "lrpe-rotate-md",
        {"quick": _quick_grids} | _GRIDS,
        "LRPE rotate on grids of one, two and three dimensions",
    ),
    _bench(COSINE, "lrpe-cosine-md", _GRIDS | _GRID_SEEDS, "LRPE cosine on grids of one, two and three dimensions"),
)
