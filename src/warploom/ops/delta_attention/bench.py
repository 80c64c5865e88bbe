"""Delta rule attention for tests and bench: cases, inputs, providers, operations and bytes."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from warploom.ops.delta_attention import peers, reference
from warploom.ops.delta_attention.api import delta_attention
from warploom.ops.delta_attention.peers import Provider
from warploom.ops.flash_attention import bench as flash_attention
from warploom.ops.flash_attention import peers as softmax_peers
from warploom.ops.linear_attention import bench as linear_attention
from warploom.ops.spec import Bench, Case, Inputs, Operator, Other, Traffic, need_cuda, normal, on_gpus

Tensor = torch.Tensor

# ----------------------------------------------------------------------------------------------------------
# Inputs
# ----------------------------------------------------------------------------------------------------------


def make_inputs(case: Case, device: torch.device, generator: torch.Generator) -> Inputs:
    """Returns the inputs of a case.

    Keys: ``batch, n, heads, head_dim, dtype``; ``key_heads`` (by default heads), ``value_dim`` (head_dim);
    ``encoding``, ``theta`` (``per_head``, ``shared`` or ``vector``), ``frequencies`` (its length, by default
    head_dim / 2), ``theta_gradient``; ``decay`` (``head`` or ``feature``), ``strength`` (of decays, 0.3 by
    default); ``gates`` (dtype of decays and β, float32 by default); ``initial_state`` (whether there is one);
    ``offset`` (an int, or ``scalar`` or ``batch`` for a tensor); ``layout`` (``bhnd`` for heads before tokens in
    memory); and ``interleaved, normalize, scale, return_state, cu_seqlens`` as in the public function. Without
    ``normalize`` keys have length 1 as they are drawn.
    """
    batch, tokens, heads, head_dim = case["batch"], case["n"], case["heads"], case["head_dim"]
    key_heads, values = case.get("key_heads", heads), case.get("value_dim", head_dim)
    dtype, encoding = getattr(torch, case["dtype"]), case.get("encoding", "none")
    gates = getattr(torch, case.get("gates", "float32"))
    inputs: Inputs = {}
    for name, count, features in (("q", key_heads, head_dim), ("k", key_heads, head_dim), ("v", heads, values)):
        x = normal((batch, tokens, count, features), dtype, device, generator)
        if name == "k" and not case.get("normalize"):
            x = torch.nn.functional.normalize(x, dim=-1)
        if case.get("layout") == "bhnd":
            x = x.transpose(1, 2).contiguous().transpose(1, 2)
        inputs[name] = x.requires_grad_()
    beta = torch.rand((batch, tokens, heads), generator=generator)
    inputs["beta"] = beta.to(device, gates).requires_grad_()
    if "decay" in case:
        shape = (batch, tokens, heads, head_dim)[: 3 if case["decay"] == "head" else 4]
        decay = -case.get("strength", 0.3) * torch.rand(shape, generator=generator) ** 2
        inputs["decay"] = decay.to(device, gates).requires_grad_()
    if encoding != "none":
        features = case.get("frequencies", head_dim // 2)
        forms: dict[str, tuple[int, ...]] = {"per_head": (key_heads,), "shared": (1,), "vector": ()}
        rows = forms[case.get("theta", "per_head")]
        theta = 10000.0 ** (-torch.arange(features) / features) * (
            1 + 0.1 * torch.rand((*rows, features), generator=generator)
        )
        inputs["theta"] = theta.to(device).requires_grad_(case.get("theta_gradient", False))
    names = ("encoding", "interleaved", "normalize", "scale", "return_state")
    inputs |= {name: case[name] for name in names if name in case}
    sequences = len(case["cu_seqlens"]) - 1 if "cu_seqlens" in case else batch
    if case.get("initial_state"):
        dtype = torch.float64 if case["initial_state"] == "float64" else torch.float32
        inputs["initial_state"] = normal(
            (sequences, heads, head_dim, values), dtype, device, generator
        ).requires_grad_()
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
_ROTATE: dict[str, Any] = {"encoding": "rotate", "normalize": True}
_CHECKS: tuple[dict[str, Any], ...] = (
    {},
    {"decay": "head", "n": 70, **_STATES},
    {"decay": "feature", "n": 70, **_STATES},
    {"dtype": "bfloat16", "head_dim": 64, "n": 130, "decay": "head", **_STATES},
    {"dtype": "bfloat16", "head_dim": 64, "n": 100, "decay": "feature", "value_dim": 40, **_STATES},
    {"dtype": "float16", "head_dim": 32, "n": 70, "decay": "head", "value_dim": 80, **_STATES},
    {"dtype": "bfloat16", "head_dim": 34, "n": 40, "value_dim": 65, **_STATES},
    {"head_dim": 129, "n": 20, "batch": 1, "heads": 1, "value_dim": 35},
    {"dtype": "float16", "head_dim": 17, "n": 40, "decay": "feature", **_STATES},
    {**_ROTATE, "decay": "head", "heads": 4, "key_heads": 2, "offset": 1_000_003},
    {**_ROTATE, "decay": "feature", "interleaved": True, "theta": "vector", "offset": "scalar"},
    {**_ROTATE, "dtype": "bfloat16", "head_dim": 32, "n": 70, "frequencies": 7, "theta": "shared", "key_heads": 1},
    {**_ROTATE, "dtype": "float16", "n": 40, "theta_gradient": True, "key_heads": 1},
    {"encoding": "rotate", "theta_gradient": True, "n": 40, "head_dim": 16, "batch": 1, **_STATES},
    {**_ROTATE, "theta_gradient": True, "n": 40, "head_dim": 16, "offset": "batch", "decay": "head"},
    {"normalize": True, "dtype": "bfloat16", "layout": "bhnd", "heads": 3, "key_heads": 1, "n": 40},
    {"layout": "bhnd", "decay": "feature", "gates": "bfloat16", "head_dim": 8},
    {"decay": "head", "strength": 300.0, "n": 70, **_STATES},
    {"decay": "feature", "strength": 300.0, "n": 70, "dtype": "bfloat16", **_STATES},
    {"head_dim": 1, "value_dim": 1, "decay": "head"},
    {"head_dim": 5, "value_dim": 33, "decay": "feature", "scale": -0.25},
    {"head_dim": 128, "dtype": "bfloat16", "batch": 1, "heads": 1, "n": 70, "decay": "head"},
    {"head_dim": 128, "dtype": "bfloat16", "batch": 1, "heads": 1, "n": 40, "decay": "feature"},
    {"head_dim": 256, "value_dim": 256, "dtype": "bfloat16", "batch": 1, "heads": 1, "n": 33, "decay": "head"},
    {"head_dim": 256, "value_dim": 3, "batch": 1, "heads": 1, "n": 33, "decay": "feature"},
    {"n": 40, "initial_state": "float64", "return_state": True},
    {"batch": 1, "cu_seqlens": [0, 5, 5, 6, 19], "decay": "head", **_STATES},
    {
        "batch": 1,
        "n": 15,
        "dtype": "bfloat16",
        "cu_seqlens": [0, 5],
        "decay": "feature",
        "strength": 0.02,
        **_STATES,
    },
    {"batch": 1, "n": 90, "cu_seqlens": [0, 1, 67, 80], "decay": "feature", **_ROTATE, "offset": 11},
    {"batch": 1, "n": 70, "dtype": "bfloat16", "cu_seqlens": [0, 40, 70], "key_heads": 1, **_STATES},
    {"n": 1, "decay": "head", **_ROTATE, "offset": 77, "dtype": "bfloat16", "head_dim": 64, **_STATES},
    {"n": 3, "decay": "feature", **_ROTATE, "offset": "batch", "heads": 4, "key_heads": 2, **_STATES},
    {"n": 1, "batch": 1, "cu_seqlens": [0, 1], **_STATES},
    {"batch": 0, "decay": "head"},
    {"n": 0, **_STATES},
)

OPERATOR = Operator(
    name="delta_attention",
    function=delta_attention,
    reference=reference.delta_attention,
    make_inputs=make_inputs,
    check_cases=tuple({**_SMALL, **change} for change in _CHECKS),
    autocasts=("q", "k", "v"),
    spills={
        "chunk_kernel": 500,
        "hopper_gradient_kernel": 400,
        "hopper_matrix_kernel": 264,
        "scan_kernel": 1000,
        "reverse_scan_kernel": 500,
        "feature_kernel": 400,
        "pair_kernel": 100,
    },
)
OPERATORS = (OPERATOR,)

# ----------------------------------------------------------------------------------------------------------
# Bench
# ----------------------------------------------------------------------------------------------------------


def _warploom(case: Case) -> Provider:
    need_cuda()
    return functools.partial(delta_attention, backend="triton")


_PROVIDERS: dict[str, Callable[[Case], Provider]] = {"warploom": _warploom, **peers.PROVIDERS}
_ON_CPU: dict[str, Any] = {
    "batch": 1, "heads": 2, "head_dim": 64, "dtype": "float32", "normalize": True, "decay": "head",
}  # fmt: skip


def _case(batch: int, n: int, key_heads: int, heads: int, decay: str | None, head_dim: int = 128) -> Case:
    more = {} if decay is None else {"decay": decay}
    return {
        "batch": batch, "n": n, "heads": heads, "key_heads": key_heads, "head_dim": head_dim, "dtype": "bfloat16",
        "normalize": True, **more,
    }  # fmt: skip


def _quick(device: str) -> list[Case]:
    if device != "cuda":
        return [_ON_CPU | {"n": 256}]
    return [_case(1, 1024, 16, 32, "head")]


GATED_HEADS = ((16, 64), (16, 48), (16, 32), (16, 16), (8, 32), (8, 24), (4, 16), (2, 8))
"""Heads of keys and of values in the tables of FlashQLA and FlashInfer: models of Qwen3.5, whole and divided."""
GATED_LENGTHS = ((16384,), (2048,), (8192,) * 4, (28672, 4096))
"""Lengths of sequences in these tables, each with the first and the third of the heads, beside two with all."""
KIMI = ((2048, 12, 1), (2048, 16, 1), (4096, 8, 1), (4096, 12, 1), (8192, 12, 4), (8192, 16, 1), (1024, 4, 1),
        (3072, 10, 1), (8192, 24, 1), (16384, 16, 8))  # fmt: skip
"""Tokens, heads and packed sequences in the tables of cuDNN."""


def _packed(lengths: tuple[int, ...], key_heads: int, heads: int, decay: str) -> Case:
    """Returns a case of packed sequences, or of one."""
    case = _case(1, sum(lengths), key_heads, heads, decay)
    return case if len(lengths) == 1 else {**case, "cu_seqlens": [0, *itertools.accumulate(lengths)]}


def _gated(device: str) -> list[Case]:
    """Returns cases of Gated DeltaNet."""
    cases = [_case(1, n, *heads, "head") for n in (32768, 8192) for heads in GATED_HEADS]
    return cases + [_packed(each, *heads, "head") for each in GATED_LENGTHS for heads in GATED_HEADS[:3:2]]


def _kimi(device: str) -> list[Case]:
    """Returns cases of Kimi Delta Attention."""
    return [_packed((tokens // count,) * count, heads, heads, "feature") for tokens, heads, count in KIMI]


def _published(device: str) -> list[Case]:
    """Returns shapes of the tables of FlashQLA and FlashInfer, all of cuDNN's, and one of DeltaNet."""
    if device != "cuda":
        return _quick(device)
    return [*_gated(device), *_kimi(device), _case(1, 8192, 16, 16, None)]


def _decode(device: str) -> list[Case]:
    more = {"initial_state": True, "return_state": True}
    if device != "cuda":
        return [_ON_CPU | more | {"n": 1}]
    return [{**_case(b, 1, 16, 32, decay), **more} for b in (1, 8, 64) for decay in ("head", "feature")]


def _quick_decode(device: str) -> list[Case]:
    return [case for case in _decode(device) if case["batch"] == 8 or device != "cuda"][:1]


def traffic(case: Case, mode: str) -> Traffic:
    """Returns the bytes of every tensor moved once, states too, and the operations of chunks of 64 tokens."""
    tokens, heads, head_dim = case["batch"] * case["n"], case["heads"], case["head_dim"]
    values, itemsize = case.get("value_dim", head_dim), getattr(torch, case["dtype"]).itemsize
    rows = 2 * case.get("key_heads", heads) * head_dim + heads * values
    gates = heads * {None: 1, "head": 2, "feature": 1 + head_dim}[case.get("decay")]
    inputs = tokens * (rows * itemsize + 4 * gates)
    out = tokens * heads * values * itemsize
    state = case["batch"] * heads * head_dim * values * 4 if case.get("initial_state") else 0
    flops = 2 * tokens * heads * (64 * (2 * head_dim + values) + 3 * head_dim * values)
    forward = Traffic.of_bytes(inputs + state, out + state, flops)
    backward = Traffic.of_bytes(inputs + out, inputs, 3 * flops)
    if mode == "fwd_bwd":
        return Traffic.of_bytes(2 * inputs + out + state, inputs + out + state, 4 * flops)
    return forward if mode == "fwd" else backward


def _linear_case(case: Case) -> Case:
    """Returns the case of linear attention of the same shape, with a decay for every token if there are decays."""
    more = {name: case[name] for name in ("cu_seqlens",) if name in case}
    return {**_shape(case), **more, **({"decay": "token"} if "decay" in case else {})}


def _softmax_case(case: Case) -> Case:
    """Returns the case of causal softmax attention of the same shape."""
    more = {"cu_seqlens_q": case["cu_seqlens"]} if "cu_seqlens" in case else {}
    return {**_shape(case), **more, "causal": True}


def _shape(case: Case) -> dict[str, Any]:
    return {name: case[name] for name in ("batch", "n", "heads", "head_dim", "dtype")}


def _other(
    operator: Operator, convert: Callable[[Case], Case], make: Callable[..., Inputs],
    count: Callable[[Case, str], Traffic], providers: dict[str, Callable[[Case], Provider]],
) -> Other:  # fmt: skip
    """Returns another function, whose case ``convert`` makes of one of ours."""
    return Other(
        operator=replace(operator, make_inputs=lambda case, *where: make(convert(case), *where)),
        providers=providers,
        traffic=lambda case, mode: count(convert(case), mode),
    )


def _ours(function: Callable[..., Any], **options: Any) -> Callable[[Case], Provider]:
    def build(case: Case) -> Provider:
        need_cuda()
        return functools.partial(function, **options, backend="triton")

    return build


_OTHERS = (
    _other(
        linear_attention.OPERATOR, _linear_case, linear_attention.make_inputs, linear_attention.traffic,
        {"warploom_linear": _ours(linear_attention.OPERATOR.function)},
    ),
    _other(
        flash_attention.OPERATOR, _softmax_case, flash_attention.make_inputs, flash_attention.traffic,
        {"warploom_softmax": _ours(flash_attention.OPERATOR.function)},
    ),
    _other(
        flash_attention.OPERATOR, _softmax_case, flash_attention.make_inputs, flash_attention.traffic,
        {"softmax_sdpa_flash": softmax_peers.PROVIDERS["sdpa_flash"]},
    ),
)  # fmt: skip
"""Linear and causal softmax attention of the same shape: what a layer of delta rule attention stands beside."""

BENCHES = (
    Bench(
        name="delta-attention",
        operator=OPERATOR,
        suites={
            "quick": _quick,
            "gated": on_gpus(_gated),
            "kimi": on_gpus(_kimi),
            "published": _published,
        },
        providers=_PROVIDERS,
        precompiled=("torch", "softmax_sdpa_flash"),
        quick=("warploom", "torch", "softmax_sdpa_flash"),
        others=_OTHERS,
        traffic=traffic,
        title="Delta rule attention",
        modes=("fwd", "bwd", "fwd_bwd"),
    ),
    Bench(
        name="delta-attention-decode",
        operator=OPERATOR,
        suites={"quick": _quick_decode, "published": _decode},
        providers=_PROVIDERS,
        precompiled=("torch",),
        quick=("warploom", "torch"),
        traffic=traffic,
        title="Delta rule attention, a step of decoding",
        x="batch",
        modes=("fwd",),
    ),
)
