"""The short convolution as the conformance suite and the bench know it: inputs, cases, providers and traffic."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from warploom.ops.short_convolution import peers, reference
from warploom.ops.short_convolution.api import short_convolution
from warploom.ops.spec import Bench, Case, Inputs, Operator, Outputs, Traffic, need_cuda, normal

Provider = Callable[..., Outputs]


def make_inputs(case: Case, device: torch.device, generator: torch.Generator) -> Inputs:
    """Makes inputs of a case.

    A case has ``batch, n, channels, taps, dtype`` and options of the function; ``bias`` and ``initial_state`` if
    there are any, ``weights`` for their dtype, and ``layout`` ``bcn`` for channels before tokens in memory.
    """
    batch, tokens, channels, taps = (case[name] for name in ("batch", "n", "channels", "taps"))
    dtype, weights = getattr(torch, case["dtype"]), getattr(torch, case.get("weights", case["dtype"]))
    x = normal((batch, tokens, channels), dtype, device, generator)
    if case.get("layout") == "bcn":
        x = x.mT.contiguous().mT
    weight = taps**-0.5 * torch.randn((channels, taps), generator=generator)
    inputs: Inputs = {"x": x.requires_grad_(), "weight": weight.to(device, weights).requires_grad_()}
    if case.get("bias"):
        inputs["bias"] = torch.randn(channels, generator=generator).to(device, weights).requires_grad_()
    inputs |= {name: case[name] for name in ("activation", "return_state") if name in case}
    if case.get("initial_state"):
        sequences = len(case["cu_seqlens"]) - 1 if "cu_seqlens" in case else batch
        state = normal((sequences, channels, taps - 1), dtype, device, generator)
        inputs["initial_state"] = state.requires_grad_()
    if "cu_seqlens" in case:
        inputs["cu_seqlens"] = torch.tensor(case["cu_seqlens"], dtype=torch.int32, device=device)
    return inputs


# ----------------------------------------------------------------------------------------------------------
# Conformance: small, odd, and together touching every feature
# ----------------------------------------------------------------------------------------------------------

_SMALL: dict[str, Any] = {"batch": 2, "n": 19, "channels": 24, "taps": 4, "dtype": "float32"}
_STATES: dict[str, Any] = {"initial_state": True, "return_state": True}
_CHECKS: tuple[dict[str, Any], ...] = (
    {},
    {"activation": "silu", "bias": True, **_STATES},
    {"activation": "silu", "dtype": "bfloat16", "n": 70, "channels": 136, **_STATES},
    {"activation": "silu", "dtype": "float16", "n": 130, "channels": 65, "weights": "float32", "taps": 3},
    {"taps": 2, "channels": 1, "bias": True, **_STATES},
    {"taps": 8, "dtype": "bfloat16", "activation": "silu", "n": 5, **_STATES},
    {"layout": "bcn", "activation": "silu", "n": 40, **_STATES},
    {"n": 1, "activation": "silu", "bias": True, "channels": 600, **_STATES},
    {"n": 2, "return_state": True},
    {"batch": 1, "cu_seqlens": [0, 5, 5, 6, 19], "activation": "silu", "bias": True, **_STATES},
    {"batch": 1, "n": 90, "cu_seqlens": [0, 1, 67, 80], "dtype": "bfloat16", "activation": "silu"},
    {"batch": 0},
    {"n": 0, **_STATES},
)

OPERATOR = Operator(
    name="short_convolution",
    function=short_convolution,
    reference=reference.short_convolution,
    make_inputs=make_inputs,
    check_cases=tuple({**_SMALL, **change} for change in _CHECKS),
    autocasts=("x",),
)
OPERATORS = (OPERATOR,)

# ----------------------------------------------------------------------------------------------------------
# Bench
# ----------------------------------------------------------------------------------------------------------


def _warploom(case: Case) -> Provider:
    need_cuda()
    return functools.partial(short_convolution, backend="triton")


_ON_CPU: dict[str, Any] = {"batch": 1, "channels": 256, "taps": 4, "dtype": "bfloat16", "activation": "silu"}
_ON_GPU: dict[str, Any] = {**_ON_CPU, "channels": 8192}
"""The channels of queries, keys and values of Qwen3-Next."""


def _quick(device: str) -> list[Case]:
    return [_ON_GPU | {"n": 8192}] if device == "cuda" else [_ON_CPU | {"n": 256}]


def _published(device: str) -> list[Case]:
    if device != "cuda":
        return _quick(device)
    cases = [_ON_GPU | {"n": n} for n in (2048, 8192, 32768)]
    return [*cases, _ON_GPU | {"n": 8192, "channels": 2048, "batch": 4}, _ON_GPU | {"n": 8192, "layout": "bcn"}]


def _decode(device: str) -> list[Case]:
    step = {"n": 1, "initial_state": True, "return_state": True}
    if device != "cuda":
        return [_ON_CPU | step]
    return [_ON_GPU | step | {"batch": batch} for batch in (1, 8, 64)]


def traffic(case: Case, mode: str) -> Traffic:
    """Returns the bytes of inputs, outputs and gradients moved once, and those of states."""
    channels, itemsize = case["channels"], getattr(torch, case["dtype"]).itemsize
    rows = case["batch"] * case["n"] * channels * itemsize
    state = case["batch"] * channels * (case["taps"] - 1) * itemsize if case.get("initial_state") else 0
    if mode == "fwd":
        return Traffic.of_bytes(rows + state, rows + state)
    if mode == "bwd":
        return Traffic.of_bytes(2 * rows + state, rows + state)
    return Traffic.of_bytes(3 * rows + 2 * state, 2 * rows + 2 * state)


_PROVIDERS: dict[str, Callable[[Case], Provider]] = {"warploom": _warploom, **peers.PROVIDERS}
BENCHES = (
    Bench(
        name="short-convolution",
        operator=OPERATOR,
        suites={"quick": _quick, "published": _published},
        providers=_PROVIDERS,
        precompiled=("torch",),
        quick=("warploom", "torch"),
        traffic=traffic,
        title="Short causal convolution",
    ),
    Bench(
        name="short-convolution-decode",
        operator=OPERATOR,
        suites={"quick": lambda device: _decode(device)[:1], "published": _decode},
        providers=_PROVIDERS,
        precompiled=("torch",),
        quick=("warploom", "torch"),
        traffic=traffic,
        title="Short causal convolution, a step of decoding",
        x="batch",
        modes=("fwd",),
    ),
)
