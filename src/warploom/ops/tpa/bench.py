"""Tensor-product attention for tests and bench: cases, inputs, providers, fewest bytes and operations."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from warploom.ops.flash_attention import bench as flash_attention
from warploom.ops.spec import SEEDS, Bench, Case, Inputs, Operator, Other, Traffic, need_cuda, normal, on_gpus
from warploom.ops.tpa import peers, reference
from warploom.ops.tpa.api import tpa_attention, tpa_decode
from warploom.ops.tpa.peers import Provider

Tensor = torch.Tensor

# ----------------------------------------------------------------------------------------------------------
# Inputs
# ----------------------------------------------------------------------------------------------------------


def _factors(case: Case, tokens: int, keys: int, device: torch.device, generator: torch.Generator) -> Inputs:
    """Returns the six factors.

    Keys of the case: ``batch, heads, head_dim, dtype``; ``rank`` of the queries, 0 for whole queries; ``kv_rank``
    (1), and ``v_rank`` where that of the values differs; ``value_dim`` (``head_dim``); ``layout`` (``bhn`` for
    heads before tokens in memory).
    """
    batch, heads, features, rank = (case[key] for key in ("batch", "heads", "head_dim", "rank"))
    rank_k = case.get("kv_rank", 1)
    rank_v, values = case.get("v_rank", rank_k), case.get("value_dim", features)
    dtype = getattr(torch, case["dtype"])

    def draw(*shape: int) -> Tensor:
        numbers = normal(shape, dtype, device, generator)
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


def _options(case: Case) -> Inputs:
    return {
        key: case[key] for key in ("scale", "scale_q", "scale_k", "scale_v", "causal", "strategy") if key in case
    }


def decode_inputs(case: Case, device: torch.device, generator: torch.Generator) -> Inputs:
    """Returns the inputs of a decode case: those of `_factors`, ``m`` cache entries, ``tokens`` new ones (1).

    Further keys: ``seqused_k`` (``random``, or a list), ``strategy`` and the scales.
    """
    inputs = _factors(case, case.get("tokens", 1), case["m"], device, generator) | _options(case)
    lengths = case.get("seqused_k")
    if lengths == "random":
        inputs["seqused_k"] = torch.randint(0, case["m"] + 1, (case["batch"],), generator=generator).to(device)
    elif lengths is not None:
        inputs["seqused_k"] = torch.tensor(lengths, dtype=torch.int32, device=device)
    return inputs


def attention_inputs(case: Case, device: torch.device, generator: torch.Generator) -> Inputs:
    """Returns the inputs of an attention case: those of `_factors`, ``n`` queries and ``m`` keys (as many).

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
    {"kv_rank": 3, "v_rank": 1, "tokens": 2, "seqused_k": "random"},
    {"batch": 3, "kv_rank": 1, "v_rank": 4, "seqused_k": [0, 37, 1], "tokens": 3},
    {"batch": 1, "m": 300, "strategy": "split_kv", "heads": 2},
    {"m": 520, "strategy": "split_kv", "heads": 1, "seqused_k": [513, 129], "dtype": "bfloat16"},
    {"m": 300, "strategy": "batch", "heads": 2, "seqused_k": "random", "layout": "bhn"},
    {"strategy": "batch_head", "heads": 19, "tokens": 2},
    {"batch": 1, "heads": 31, "rank": 17, "head_dim": 129, "value_dim": 63, "m": 19},
    {"batch": 1, "kv_rank": 16, "m": 21, "heads": 2},
    {"rank": 0, "heads": 5, "scale": 0.3, "scale_q": 0.5, "scale_k": 2.0, "scale_v": -1.5},
    {"batch": 0},
    {"m": 0},
    {"tokens": 0},
    {"m": 3, "tokens": 5, "dtype": "bfloat16"},
    {"m": 5, "tokens": 2, "heads": 12, "rank": 0, "head_dim": 255, "kv_rank": 1, "v_rank": 2, "dtype": "bfloat16"},
    # What the kernel for Hopper takes.
    {"m": 300, "heads": 8, "head_dim": 64, "kv_rank": 2, "strategy": "split_kv", "dtype": "bfloat16"}
    | {"seqused_k": "random"},
    {"m": 70, "heads": 16, "head_dim": 40, "value_dim": 64, "dtype": "float16"},
    # Logits so large that weights take all their bits.
    {"m": 31, "heads": 12, "head_dim": 96, "value_dim": 64, "kv_rank": 2, "scale": 2.0},
)
_ATTENTION: dict[str, Any] = {
    "batch": 2, "n": 19, "heads": 2, "head_dim": 16, "rank": 3, "dtype": "float32", "causal": True,
}  # fmt: skip
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
    {"batch": 1, "heads": 1, "head_dim": 129, "value_dim": 63, "n": 5, "dtype": "bfloat16"},
    {"batch": 0},
    {"n": 0},
    {"m": 0},
)


def decode_definition(*, strategy: str = "auto", **inputs: Any) -> Tensor:
    """Computes the reference, for any strategy."""
    return _entry_by_entry(reference.tpa_decode, inputs)


def _entry_by_entry(function: Provider, inputs: Inputs) -> Tensor:
    """Returns ``function(**inputs)``, one batch entry at a time: float64 keys and values of all do not fit."""
    tensors = {name: value for name, value in inputs.items() if isinstance(value, Tensor)}
    batch = len(next(iter(tensors.values())))
    if batch <= 1:
        return function(**inputs)
    entries = (inputs | {name: value[b : b + 1] for name, value in tensors.items()} for b in range(batch))
    return torch.cat([function(**entry) for entry in entries])


_FACTORS = ("aq", "ak", "av", "bq", "bk", "bv")
DECODE = Operator(
    name="tpa_decode",
    function=tpa_decode,
    reference=decode_definition,
    make_inputs=decode_inputs,
    check_cases=tuple({**_DECODE, **change} for change in _DECODE_CHECKS),
    autocasts=_FACTORS,
    length="m",
    # Float32 with 129 features alone spills much; 16-bit factors, which are what a cache holds, nothing. To count
    # rows of partial results in 64 bits takes two registers too many on sm_100.
    spills={"decode_kernel": 752, "combine_kernel": 8},
)
ATTENTION = Operator(
    name="tpa_attention",
    function=tpa_attention,
    reference=reference.tpa_attention,
    make_inputs=attention_inputs,
    check_cases=tuple({**_ATTENTION, **change} for change in _ATTENTION_CHECKS),
    autocasts=_FACTORS,
    spills={**flash_attention.OPERATOR.spills, "factor_kernel": 8},  # in float32, an address
)
OPERATORS = (DECODE, ATTENTION)

# ----------------------------------------------------------------------------------------------------------
# Providers
# ----------------------------------------------------------------------------------------------------------


def _warploom(function: Provider, case: Case, **options: Any) -> Provider:
    need_cuda()
    return functools.partial(function, backend="triton", **options)


_DECODE_PROVIDERS: dict[str, Callable[[Case], Provider]] = {
    "warploom": lambda case: _warploom(tpa_decode, case),
    "warploom_batch": lambda case: _warploom(tpa_decode, case, strategy="batch"),
    "warploom_batch_head": lambda case: _warploom(tpa_decode, case, strategy="batch_head"),
    "warploom_split_kv": lambda case: _warploom(tpa_decode, case, strategy="split_kv"),
    **peers.DECODE,
}
_ATTENTION_PROVIDERS: dict[str, Callable[[Case], Provider]] = {
    "warploom": lambda case: _warploom(tpa_attention, case),
    **peers.ATTENTION,
}


def _on_whole_keys(name: str, make_inputs: Callable[..., Inputs], traffic: Callable[[Case, str], Traffic]) -> Other:
    attend = flash_attention.OPERATOR.function
    operator = Operator(name, attend, peers.whole_cache_definition, make_inputs, check_cases=(), length="m")
    return Other(operator, {name: lambda case: _warploom(attend, case)}, traffic)  # type: ignore[arg-type]


_OTHERS = (
    *peers.OTHERS,
    _on_whole_keys(
        "warploom_mqa",
        functools.partial(peers.whole_cache_inputs, peers.ALL),
        functools.partial(peers.whole_cache_traffic, peers.ALL),
    ),
    _on_whole_keys("warploom_mla", peers.latent_inputs, peers.latent_traffic),
)
"""Attention on whole keys by our own kernels too: of one head of keys, and latent attention, absorbed."""

# ----------------------------------------------------------------------------------------------------------
# Benches
# ----------------------------------------------------------------------------------------------------------

_PUBLISHED = {"heads": 32, "head_dim": 128, "rank": 16, "dtype": "bfloat16"}
_ON_CPU = {"heads": 8, "head_dim": 64, "rank": 16, "dtype": "float32"}


def _decode_cases(device: str, batches: Sequence[int], lengths: Sequence[int], **more: Any) -> list[Case]:
    shape = _PUBLISHED
    if device != "cuda":
        shape, batches, lengths = _ON_CPU, (2,), (256, 1024)
    return [{"batch": b, **shape, **more, "m": m} for b in batches for m in lengths]


_POWERS = tuple(2**k for k in range(8, 16))
_DECODE_SUITES: dict[str, Callable[[str], Sequence[Case]]] = {
    "quick": lambda device: _decode_cases(device, (8,), (32768,))[-1:],
    "published": lambda device: _decode_cases(device, (8, 32), _POWERS),
    SEEDS: on_gpus(lambda device: _decode_cases(device, (8, 32), _POWERS)),
    "ranks": lambda device: [
        case for rank in (1, 2, 4) for case in _decode_cases(device, (8, 32), (1024, 8192, 32768), kv_rank=rank)
    ],
    "wide": lambda device: [
        *_decode_cases(device, (1,), [2**k for k in range(10, 20)]),
        *_decode_cases(device, (128,), [2**k for k in range(8, 16)]),
    ],
}


def _attention_cases(device: str, lengths: Sequence[int], models: Sequence[tuple[int, int, int]]) -> list[Case]:
    """Returns cases for ``models``: heads, rank of the queries, rank of keys and values."""
    shape = {"batch": 1, "head_dim": 128, "dtype": "bfloat16"}
    if device != "cuda":
        shape, lengths, models = {"batch": 1, "head_dim": 32, "dtype": "float32"}, (128, 256), [(4, 6, 2)]
    return [
        shape | {"heads": heads, "rank": rank, "kv_rank": kv_rank, "causal": True, "n": n}
        for heads, rank, kv_rank in models
        for n in lengths
    ]


_ATTENTION_SUITES: dict[str, Callable[[str], Sequence[Case]]] = {
    "quick": lambda device: _attention_cases(device, (4096,), [(16, 6, 2)])[-1:],
    "published": lambda device: _attention_cases(
        device, (1024, 2048, 4096, 8192, 16384), [(heads, 6, rank) for heads in (16, 32) for rank in (2, 1)]
    ),
}


def decode_traffic(case: Case, mode: str) -> Traffic:
    """Returns the bytes of every factor of the cache, read once, and of queries and output, which are few."""
    batch, heads, features, rank = (case[key] for key in ("batch", "heads", "head_dim", "rank"))
    size = getattr(torch, case["dtype"]).itemsize
    kv = 2 * case["m"] * case.get("kv_rank", 1) * (heads + features)
    # One stream of all that is read; what is written is too little for a stream of its own size.
    return Traffic(1, 0, batch * (kv + rank * (heads + features) + heads * features) * size)


def attention_traffic(case: Case, mode: str) -> Traffic:
    """Returns the operations of attention on whole keys and values, and the fewest bytes, with gradients."""
    batch, n, heads, features, rank = (case[key] for key in ("batch", "n", "heads", "head_dim", "rank"))
    size = getattr(torch, case["dtype"]).itemsize
    factors = batch * n * (rank + 2 * case["kv_rank"]) * (heads + features) * size
    out = batch * n * heads * features * size
    products = 2 if mode == "fwd" else 5
    flops = products * 2 * batch * heads * n * n * features // (2 if case["causal"] else 1)
    if mode == "fwd":
        return Traffic(1, 0, factors + out, flops)
    return Traffic(1, 0, 2 * factors + 2 * out, flops)


BENCHES = (
    Bench(
        name="tpa-decode",
        operator=DECODE,
        suites=_DECODE_SUITES,
        providers=_DECODE_PROVIDERS,
        precompiled=("torch_naive", "torch", "sdpa_gqa", "sdpa_mha"),
        quick=("warploom", "torch_naive", "torch", "sdpa_gqa", "sdpa_mha"),
        traffic=decode_traffic,
        title="Tensor-product attention: one new token on a cache of factors",
        x="m",
        modes=("fwd",),
        others=_OTHERS,
    ),
    Bench(
        name="tpa-attention",
        operator=ATTENTION,
        suites=_ATTENTION_SUITES,
        providers=_ATTENTION_PROVIDERS,
        precompiled=("torch_naive",),
        quick=("warploom", "torch_naive"),
        traffic=attention_traffic,
        title="Tensor-product attention for training and prefill",
    ),
)
