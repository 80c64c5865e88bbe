"""Linear attention for tests and bench: cases, inputs, providers, operations and bytes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from warploom.ops.flash_attention import bench as flash_attention
from warploom.ops.flash_attention import peers as softmax_peers
from warploom.ops.linear_attention import peers, reference
from warploom.ops.linear_attention.api import linear_attention
from warploom.ops.linear_attention.peers import Provider
from warploom.ops.spec import Bench, Case, Inputs, Operator, Other, Traffic, need_cuda, normal

Tensor = torch.Tensor

# ----------------------------------------------------------------------------------------------------------
# Inputs
# ----------------------------------------------------------------------------------------------------------


def make_inputs(case: Case, device: torch.device, generator: torch.Generator) -> Inputs:
    """Returns the inputs of a case.

    Keys: ``batch, n, heads, head_dim, dtype``; ``value_dim`` (by default head_dim), ``encoding``; ``theta``
    (``per_head``, ``shared`` or ``vector``), ``frequencies`` (its length, by default one per angle),
    ``theta_gradient``; ``decay`` (``head`` or ``token``) and ``decay_gradient``; ``initial_state`` (whether there
    is one); ``offset`` (an int, or ``scalar`` or ``batch`` for a tensor); ``layout`` (``bhnd`` for heads before
    tokens in memory); and ``activation, interleaved, causal, scale, return_state, cu_seqlens`` as in the public
    function.
    """
    batch, tokens, heads, head_dim = case["batch"], case["n"], case["heads"], case["head_dim"]
    dtype, encoding = getattr(torch, case["dtype"]), case.get("encoding", "none")
    values = case.get("value_dim", head_dim)
    inputs: Inputs = {}
    for name, features in (("q", head_dim), ("k", head_dim), ("v", values)):
        x = normal((batch, tokens, heads, features), dtype, device, generator)
        if case.get("layout") == "bhnd":
            x = x.transpose(1, 2).contiguous().transpose(1, 2)
        inputs[name] = x.requires_grad_()
    inputs |= {"encoding": encoding, "activation": case.get("activation", "none")}
    inputs |= {name: case[name] for name in ("interleaved", "causal", "scale", "return_state") if name in case}
    if encoding != "none":
        features = case.get("frequencies", head_dim // 2 if encoding == "rotate" else head_dim)
        forms: dict[str, tuple[int, ...]] = {"per_head": (heads,), "shared": (1,), "vector": ()}
        rows = forms[case.get("theta", "per_head")]
        theta = 10000.0 ** (-torch.arange(features) / features) * (
            1 + 0.1 * torch.rand((*rows, features), generator=generator)
        )
        inputs["theta"] = theta.to(device).requires_grad_(case.get("theta_gradient", False))
    if "decay" in case:
        of_decay = (heads,) if case["decay"] == "head" else (batch, tokens, heads)
        decay = -0.3 * torch.rand(of_decay, generator=generator) ** 2
        inputs["decay"] = decay.to(device).requires_grad_(case.get("decay_gradient", False))
    sequences = len(case["cu_seqlens"]) - 1 if "cu_seqlens" in case else batch
    if case.get("initial_state"):
        shape = (sequences, heads, 2 * head_dim if encoding == "cosine" else head_dim, values)
        dtype = torch.float64 if case["initial_state"] == "float64" else torch.float32
        inputs["initial_state"] = normal(shape, dtype, device, generator).requires_grad_()
    if "cu_seqlens" in case:
        inputs["cu_seqlens"] = torch.tensor(case["cu_seqlens"], dtype=torch.int32, device=device)
    if "offset" in case:
        form = case["offset"]
        size = () if form == "scalar" else (batch,)
        inputs["offset"] = (
            form if isinstance(form, int) else torch.randint(0, 2**20, size, generator=generator).to(device)
        )
    return inputs


# ----------------------------------------------------------------------------------------------------------
# Conformance: small, odd, and together touching every feature
# ----------------------------------------------------------------------------------------------------------

_SMALL: dict[str, Any] = {"batch": 2, "n": 19, "heads": 2, "head_dim": 24, "dtype": "float32"}
_STATES: dict[str, Any] = {"initial_state": True, "return_state": True}
_GRADIENTS: dict[str, Any] = {"theta_gradient": True, "decay_gradient": True}
_CHECKS: tuple[dict[str, Any], ...] = (
    {},
    {"encoding": "rotate", "decay": "head", **_STATES, **_GRADIENTS},
    {"encoding": "rotate", "decay": "token", "n": 70, "interleaved": True, "offset": 1_000_003, **_STATES},
    {"encoding": "rotate", "dtype": "bfloat16", "head_dim": 64, "n": 130, "decay": "head", "theta_gradient": True},
    {"encoding": "rotate", "dtype": "float16", "head_dim": 32, "value_dim": 80, "decay": "token", **_STATES},
    {"n": 40, "decay": "head", "initial_state": "float64", "return_state": True},
    {"encoding": "cosine", "activation": "silu", "value_dim": 5, "decay": "token", **_GRADIENTS},
    {"encoding": "cosine", "dtype": "bfloat16", "head_dim": 128, "heads": 1, "activation": "relu", **_STATES},
    {"encoding": "cosine", "head_dim": 5, "activation": "sigmoid", "layout": "bhnd", "theta": "shared"},
    {"encoding": "cosine", "head_dim": 3, "activation": "softmax", "theta": "vector", "theta_gradient": True},
    {"encoding": "rotate", "activation": "softmax", "frequencies": 7, "offset": "scalar"},
    {"encoding": "rotate", "offset": "batch", "layout": "bhnd", "dtype": "bfloat16", "decay": "head"},
    {"activation": "softmax", "head_dim": 17, "value_dim": 33},
    {"activation": "sigmoid", "head_dim": 7, "decay": "token", "decay_gradient": True, **_STATES},
    {"head_dim": 256, "value_dim": 256, "dtype": "bfloat16", "batch": 1, "heads": 1, "n": 33},
    {"encoding": "rotate", "head_dim": 256, "value_dim": 3, "batch": 1, "heads": 1, "n": 20},
    {"head_dim": 1, "value_dim": 1, "decay": "head"},
    {"scale": -0.25, "encoding": "rotate", **_STATES},
    {"causal": False, "encoding": "cosine", "theta_gradient": True},
    {"causal": False, "dtype": "bfloat16", "activation": "relu"},
    {"causal": False, "encoding": "rotate", "activation": "softmax", "head_dim": 160, "batch": 1, "heads": 1},
    {"causal": False, "encoding": "cosine", "head_dim": 128, "heads": 1, "n": 33},
    {"causal": False, "encoding": "rotate", "dtype": "bfloat16", "head_dim": 64, "n": 70},
    {"batch": 1, "encoding": "rotate", "cu_seqlens": [0, 5, 5, 6, 19], "decay": "token", **_STATES, **_GRADIENTS},
    {"batch": 1, "encoding": "cosine", "n": 90, "cu_seqlens": [0, 70, 90], "decay": "head", "offset": 11},
    {"batch": 1, "dtype": "float16", "cu_seqlens": [0, 1, 19], "decay": "token", "decay_gradient": True, **_STATES},
    {"batch": 1, "causal": False, "encoding": "rotate", "cu_seqlens": [0, 0, 12, 19]},
    {"n": 1, "encoding": "rotate", "decay": "head", "offset": 77, "dtype": "bfloat16", "head_dim": 64, **_STATES},
    {"n": 3, "encoding": "cosine", "offset": "batch", **_STATES},
    {"batch": 0, "encoding": "rotate", "decay": "head"},
    {"n": 0, "encoding": "rotate", **_STATES},
    {"encoding": "rotate", "dtype": "bfloat16", "head_dim": 64, "n": 130, "decay": "token", "offset": 7, **_STATES},
    {"encoding": "cosine", "dtype": "bfloat16", "head_dim": 64, "n": 100, "decay": "head", **_STATES},
    {"encoding": "cosine", "dtype": "bfloat16", "head_dim": 128, "heads": 1, "n": 100, "decay": "token", **_STATES},
    {"dtype": "bfloat16", "head_dim": 128, "n": 70, "batch": 1, "heads": 1},
    {"n": 600, "batch": 1, "heads": 1, "head_dim": 16, "dtype": "bfloat16", "decay": "head", "encoding": "rotate"},
)

OPERATOR = Operator(
    name="linear_attention",
    function=linear_attention,
    reference=reference.linear_attention,
    make_inputs=make_inputs,
    check_cases=tuple({**_SMALL, **change} for change in _CHECKS),
    autocasts=("q", "k", "v"),
    # The most are float32 with 128 features and theta's gradient, or 256 features; 16-bit numbers with 64 and 128
    # spill next to nothing. What the last spills with states, nearly all outside of its loop, are addresses.
    spills={
        "product_kernel": 648,
        "sums_kernel": 16,
        "decay_kernel": 120,
        "hopper_product_kernel": 24,
        "hopper_key_kernel": 80,
        "hopper_cosine_kernel": 144,
        "hopper_parts_kernel": 224,
    },
)
OPERATORS = (OPERATOR,)

# ----------------------------------------------------------------------------------------------------------
# Bench
# ----------------------------------------------------------------------------------------------------------


def _warploom(case: Case) -> Provider:
    need_cuda()
    return functools.partial(linear_attention, backend="triton")


_PROVIDERS: dict[str, Callable[[Case], Provider]] = {"warploom": _warploom, **peers.PROVIDERS}
_ON_CPU: dict[str, Any] = {"batch": 1, "heads": 2, "head_dim": 64, "dtype": "float32", "encoding": "rotate"}


def _case(batch: int, n: int, heads: int, head_dim: int, encoding: str, **more: Any) -> Case:
    return {
        "batch": batch, "n": n, "heads": heads, "head_dim": head_dim, "dtype": "bfloat16", "encoding": encoding,
        "theta": "vector", **more,
    }  # fmt: skip


def _quick(device: str) -> list[Case]:
    if device != "cuda":
        return [_ON_CPU | {"n": 512}]
    return [_case(1, 8192, 32, 128, "rotate", decay="head")]


def _published(device: str) -> list[Case]:
    """Returns the cases of the tables of flash-linear-attention and cuLA, and one of them without decays."""
    if device != "cuda":
        return _quick(device)
    sizes = [(1, 8192, 96, 128), (1, 16384, 64, 128), (2, 8192, 64, 128), (2, 16384, 64, 128), (4, 2048, 16, 64)]
    sizes += [(8, 4096, 16, 64), (1, 32768, 8, 128), (1, 131072, 4, 64), (2, 16384, 64, 64)]
    encodings = ("none", "rotate", "cosine")
    whole = [_case(b, n, h, d, encoding, decay="head") for b, n, h, d in sizes for encoding in encodings]
    return whole + [_case(2, 16384, 64, 128, encoding) for encoding in encodings]


def _layer(device: str) -> list[Case]:
    """Returns the calls of `nn.LinearAttention` in training: activations, and frequencies of every head."""
    more: dict[str, Any] = {"activation": "silu", "theta": "per_head", "theta_gradient": True, "decay": "head"}
    if device != "cuda":
        return [_ON_CPU | more | {"n": 128}]
    sizes = [(2, 16384, 64, 128), (2, 16384, 64, 64), (8, 4096, 16, 64), (1, 32768, 8, 128)]
    return [{**_case(b, n, h, d, encoding), **more} for b, n, h, d in sizes for encoding in ("rotate", "cosine")]


def _decode(device: str) -> list[Case]:
    more = {"offset": 4096, "initial_state": True, "return_state": True, "decay": "head"}
    if device != "cuda":
        return [_ON_CPU | more | {"n": 1}]
    sizes = [(batch, heads, d) for batch in (1, 8, 64) for heads, d in ((32, 64), (64, 128))]
    encodings = ("rotate", "cosine")
    return [_case(b, 1, h, d, encoding, **more) for b, h, d in sizes for encoding in encodings]


def _quick_decode(device: str) -> list[Case]:
    wanted = {"batch": 8, "encoding": "rotate", "heads": 64} if device == "cuda" else {}
    return [case for case in _decode(device) if all(case[name] == value for name, value in wanted.items())]


def traffic(case: Case, mode: str) -> Traffic:
    """Returns the bytes of every tensor, states included, moved once, and the operations of chunks of 64 tokens."""
    rows, values = case["batch"] * case["n"] * case["heads"], case.get("value_dim", case["head_dim"])
    features = case["head_dim"] * (2 if case.get("encoding") == "cosine" else 1)
    itemsize = getattr(torch, case["dtype"]).itemsize
    inputs = rows * (2 * case["head_dim"] + values) * itemsize
    out = rows * values * itemsize
    state = case["batch"] * case["heads"] * features * values * 4 if case.get("initial_state") else 0
    flops = 2 * rows * (64 * (features + values) + 2 * features * values)
    forward = Traffic.of_bytes(inputs + state, out + state, flops)
    backward = Traffic.of_bytes(inputs + out, inputs, 5 * flops // 2)
    if mode == "fwd_bwd":
        return Traffic.of_bytes(2 * inputs + out + state, inputs + out + state, 7 * flops // 2)
    return forward if mode == "fwd" else backward


def _softmax_inputs(case: Case, device: torch.device, generator: torch.Generator) -> Inputs:
    shape = {key: case[key] for key in ("batch", "n", "heads", "head_dim", "dtype")}
    return flash_attention.make_inputs(shape | {"causal": True}, device, generator)


_SOFTMAX = Other(
    operator=replace(flash_attention.OPERATOR, make_inputs=_softmax_inputs),
    providers={"softmax_sdpa_flash": softmax_peers.PROVIDERS["sdpa_flash"]},
    traffic=lambda case, mode: flash_attention.traffic({**case, "causal": True}, mode),
)
"""Causal softmax attention of the same shape, by PyTorch's fused kernel."""

BENCHES = (
    Bench(
        name="linear-attention",
        operator=OPERATOR,
        suites={"quick": _quick, "published": _published, "layer": _layer},
        providers=_PROVIDERS,
        precompiled=("torch", *_SOFTMAX.providers),
        quick=("warploom", "torch", *_SOFTMAX.providers),
        others=(_SOFTMAX,),
        traffic=traffic,
        title="Linear attention with LRPE",
        modes=("fwd", "bwd", "fwd_bwd"),
    ),
    Bench(
        name="linear-attention-decode",
        operator=OPERATOR,
        suites={"quick": _quick_decode, "published": _decode},
        providers=_PROVIDERS,
        precompiled=("torch",),
        quick=("warploom", "torch"),
        traffic=traffic,
        title="Linear attention with LRPE, a step of decoding",
        x="batch",
        modes=("fwd",),
    ),
)
