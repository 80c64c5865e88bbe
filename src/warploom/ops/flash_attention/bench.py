"""Flash attention for tests and bench: cases, inputs, providers, operations and bytes."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any

import torch

from warploom.ops.flash_attention import patterns, peers, peers_masked, reference
from warploom.ops.flash_attention.api import BlockMask, flash_attention
from warploom.ops.flash_attention.peers import Provider
from warploom.ops.spec import (
    SEEDS,
    Bench,
    Case,
    Inputs,
    Operator,
    Outputs,
    Traffic,
    Unsupported,
    need_cuda,
    normal,
    on_gpus,
)

Tensor = torch.Tensor

# ----------------------------------------------------------------------------------------------------------
# Inputs
# ----------------------------------------------------------------------------------------------------------


def make_inputs(case: Case, device: torch.device, generator: torch.Generator) -> Inputs:
    """Returns the inputs of a case.

    Keys: ``batch, n, heads, head_dim, dtype``; ``m`` (keys, by default n), ``key_heads`` (by default heads),
    ``value_dim`` (by default head_dim); ``size`` (of the numbers in q and k, by default 1), ``layout`` (``bhnd``
    for heads before tokens in memory); ``pattern``, ``bias`` and ``alibi``, see `patterns.add_masks`; ``sink``
    (whether there is one), ``cu_seqlens_q``, ``cu_seqlens_k`` and ``seqused_k`` as lists; with the first and the
    last, or with a ``mix`` (of `peers.MIXES`) in their place, queries are packed on a cache, in random pages if
    there is a ``page_size``; ``latent`` (whether values are the first features of keys, in their memory, and
    nothing has a gradient); ``packing`` (of `peers.PACKINGS`); ``cache`` (``lengths`` for entries of m/2 … m keys,
    ``pages`` for these in pages of `PAGE` keys); and ``causal, scale, window, softcap, float32_precision,
    return_lse`` as in the public function.
    """
    if "mix" in case:
        counts, used = zip(*peers.MIXES[case["mix"]])
        case = {**case, "cu_seqlens_q": [0, *itertools.accumulate(counts)], "seqused_k": used}
    batch, tokens, heads, head_dim = case["batch"], case["n"], case["heads"], case["head_dim"]
    keys, key_heads = case.get("m", tokens), case.get("key_heads", heads)
    on_cache = "cu_seqlens_q" in case and "seqused_k" in case
    entries = len(case["seqused_k"]) if on_cache else batch
    dtype = getattr(torch, case["dtype"])
    shapes = {
        "q": (batch, tokens, heads, head_dim),
        "k": (entries, keys, key_heads, head_dim),
        "v": (entries, keys, key_heads, case.get("value_dim", head_dim)),
    }
    inputs: Inputs = {}
    for name, shape in shapes.items():
        x = normal(shape, dtype, device, generator)
        if "size" in case and name != "v":
            x *= case["size"]
        if case.get("layout") == "bhnd":
            x = x.transpose(1, 2).contiguous().transpose(1, 2)
        inputs[name] = x.requires_grad_(not on_cache and not case.get("latent"))
    if case.get("latent"):
        inputs["v"] = inputs["k"][..., : case["value_dim"]]
    options = ("causal", "scale", "window", "softcap", "float32_precision", "return_lse")
    inputs |= {name: case[name] for name in options if name in case}
    if case.get("sink"):
        inputs["sink"] = normal((heads,), torch.float32, device, generator).requires_grad_()
    for name in ("cu_seqlens_q", "cu_seqlens_k", "seqused_k"):
        if name in case:
            inputs[name] = torch.tensor(case[name], dtype=torch.int32, device=device)
    if "page_size" in case:
        pages = torch.randperm(entries * keys // case["page_size"], generator=generator)
        inputs["block_table"] = pages.reshape(entries, -1).to(device, torch.int32)
        inputs |= {
            name: inputs[name].reshape(-1, case["page_size"], *inputs[name].shape[2:]) for name in ("k", "v")
        }
    if "packing" in case:
        bounds = [0, *itertools.accumulate(peers.PACKINGS[case["packing"]])]
        inputs["cu_seqlens_q"] = torch.tensor(bounds, dtype=torch.int32, device=device)
    if "cache" in case:
        return _cache_keys(inputs, case, generator)
    return patterns.add_masks(inputs, case, generator)


PAGE = 256


def _lengths(case: Case) -> list[int]:
    """Returns the number of keys of each batch entry."""
    batch, keys = case["batch"], int(case.get("m", case["n"]))
    if case.get("cache") in ("lengths", "pages"):
        return [keys - keys * i // (2 * batch) for i in range(batch)]
    return list(case.get("seqused_k", [keys] * batch))


def _cache_keys(inputs: Inputs, case: Case, generator: torch.Generator) -> Inputs:
    """Returns the inputs of a decoding step: nothing wants a gradient, keys are in a cache."""
    device = inputs["q"].device
    inputs |= {name: inputs[name].detach() for name in ("q", "k", "v")}
    if case["cache"] == "dense":
        return inputs
    inputs["seqused_k"] = torch.tensor(_lengths(case), dtype=torch.int32, device=device)
    if case["cache"] == "pages":
        pages = case["batch"] * case["m"] // PAGE
        places = torch.randperm(pages, generator=generator).to(device)
        inputs |= {name: inputs[name].reshape(pages, PAGE, *inputs[name].shape[2:]) for name in ("k", "v")}
        inputs["block_table"] = places.reshape(case["batch"], -1).int()
    return inputs


# ----------------------------------------------------------------------------------------------------------
# Conformance: small, odd, and together touching every feature
# ----------------------------------------------------------------------------------------------------------

_LATENT: dict[str, Any] = {
    "head_dim": 576, "value_dim": 512, "key_heads": 1, "latent": True, "dtype": "bfloat16",
}  # fmt: skip
_SMALL: dict[str, Any] = {"batch": 2, "n": 19, "heads": 2, "head_dim": 24, "dtype": "float32"}
_CHECKS: tuple[dict[str, Any], ...] = (
    {},
    {"causal": True, "return_lse": True},
    {"causal": True, "dtype": "bfloat16", "head_dim": 64, "n": 70},
    {"dtype": "float16", "head_dim": 32, "value_dim": 16, "return_lse": True},
    {"causal": True, "m": 45, "heads": 6, "key_heads": 2},
    {"causal": True, "n": 70, "m": 50},
    {"m": 33, "heads": 4, "key_heads": 1, "value_dim": 5, "return_lse": True},
    {"head_dim": 1, "value_dim": 3},
    {"head_dim": 80, "causal": True, "dtype": "bfloat16", "layout": "bhnd"},
    {"head_dim": 96, "value_dim": 64, "dtype": "float16", "n": 150, "m": 70, "batch": 1, "return_lse": True},
    {
        "head_dim": 128,
        "dtype": "bfloat16",
        "n": 150,
        "m": 210,
        "batch": 1,
        "heads": 4,
        "key_heads": 2,
        "causal": True,
        "return_lse": True,
    },
    {"head_dim": 129, "value_dim": 1, "batch": 1},
    {"head_dim": 33, "value_dim": 1, "dtype": "bfloat16", "n": 70},
    {"head_dim": 64, "value_dim": 17, "dtype": "float16", "n": 70, "m": 300, "causal": True},
    {"head_dim": 256, "dtype": "bfloat16", "batch": 1, "n": 33, "causal": True},
    {"window": [3, None], "n": 70, "batch": 1},
    {"window": [4, 2], "m": 25, "return_lse": True},
    {"window": [None, 5], "dtype": "bfloat16"},
    {"window": [6, 0], "causal": True, "heads": 4, "key_heads": 2},
    {"window": [1, 1], "m": 5, "dtype": "bfloat16"},
    {"scale": 0.0, "causal": True},
    {"scale": -0.25},
    {"size": 3.0, "dtype": "bfloat16", "head_dim": 16, "causal": True},
    {"float32_precision": "high", "causal": True},
    {"float32_precision": "medium"},
    {"batch": 1, "cu_seqlens_q": [0, 5, 5, 6, 19], "causal": True, "return_lse": True},
    {
        "batch": 1,
        "n": 60,
        "cu_seqlens_q": [0, 27, 27, 60],
        "m": 75,
        "cu_seqlens_k": [0, 20, 37, 75],
        "causal": True,
    },
    {"batch": 1, "n": 40, "cu_seqlens_q": [0, 1, 40], "window": [5, 3], "heads": 4, "key_heads": 2},
    {"batch": 1, "cu_seqlens_k": [0, 19, 19], "dtype": "bfloat16"},
    {"softcap": 1.5, "causal": True, "return_lse": True},
    {
        "softcap": 30.0,
        "scale": -0.25,
        "dtype": "bfloat16",
        "size": 6.0,
        "window": [6, 1],
        "heads": 4,
        "key_heads": 2,
    },
    {"sink": True, "return_lse": True, "m": 33},
    {"sink": True, "window": [4, 0], "dtype": "bfloat16", "head_dim": 64, "n": 70, "heads": 4, "key_heads": 2},
    {"seqused_k": [21, 33], "m": 40, "causal": True, "return_lse": True},
    {"seqused_k": [0, 19], "window": [3, 2], "sink": True, "softcap": 2.0, "return_lse": True},
    {"batch": 1, "cu_seqlens_q": [0, 5, 5, 19], "causal": True, "sink": True, "softcap": 5.0},
    {"n": 1, "m": 150, "seqused_k": [97, 150], "causal": True, "dtype": "bfloat16", "sink": True},
    {"batch": 1, "n": 24, "m": 40, "cu_seqlens_q": [0, 9, 9, 10, 21], "seqused_k": [12, 0, 40, 30], "key_heads": 1}
    | {"causal": True, "return_lse": True},
    {"batch": 1, "n": 18, "m": 48, "cu_seqlens_q": [0, 1, 18], "seqused_k": [48, 17], "dtype": "bfloat16"}
    | {"causal": True, "head_dim": 64, "page_size": 8, "sink": True},
    {"n": 1, "m": 150, "causal": True, "return_lse": True, "heads": 16} | _LATENT,
    {"n": 3, "m": 40, "causal": True, "heads": 18} | _LATENT,
    {"batch": 1, "n": 9, "m": 48, "cu_seqlens_q": [0, 1, 8], "seqused_k": [48, 17], "heads": 24, "page_size": 8}
    | {"causal": True, "sink": True}
    | _LATENT,
    {"batch": 0},
    {"n": 0},
    {"n": 3, "m": 0, "sink": True, "return_lse": True},
    {"n": 3, "m": 0, "causal": True},
    {"n": 1, "m": 150, "causal": True},
    {"n": 150, "batch": 1, "heads": 1, "causal": True, "dtype": "bfloat16", "layout": "bhnd"},
    # So few queries for so many keys that the KV loop is split.
    {"n": 33, "m": 300, "batch": 1, "heads": 1, "causal": True, "dtype": "bfloat16", "sink": True}
    | {"return_lse": True},
)


@functools.wraps(reference.flash_attention)
def _define(*tensors: Tensor, mask: BlockMask | Tensor | None = None, **inputs: Any) -> Outputs:
    """Returns the definition's result, which takes a mask as a matrix."""
    mask = mask.dense() if isinstance(mask, BlockMask) else mask
    return reference.flash_attention(*tensors, **inputs, mask=mask)


OPERATOR = Operator(
    name="flash_attention",
    function=flash_attention,
    reference=_define,
    make_inputs=make_inputs,
    check_cases=tuple({**_SMALL, **change} for change in _CHECKS),
    autocasts=("q", "k", "v"),
    fused=True,
    # On an H200 the fastest tiles spill a little; those that spill nothing are smaller, and were slower. The most
    # are float32 with 128 features in the key kernel, and bfloat16 with 128 and 256 in the other two.
    spills={
        "forward_kernel": 192,  # 8 more for sums that are shrunk by exactly one, which float32's accuracy needs
        "decode_kernel": 64,  # float32 with 128 features
        "latent_kernel": 768,  # 64 rows: outside of the loop, and sums of chunks before; 16 rows spill nothing
        "hopper_latent_kernel": 48,  # outside of the loop; 8 bytes of them in it where a program joins chunks
        "key_kernel": 376,
        "query_kernel": 224,
        "backward_small_kernel": 64,
        "hopper_forward_kernel": 88,  # with masks and 256 features, outside of its loops; without 80
        "hopper_backward_kernel": 112,  # packed, with a cap and 64 features; without either 64, outside of its loop
        "hopper_biased_backward_kernel": 208,  # a bias of keys and 64 features; with one of rows 72
        "hopper_key_kernel": 128,  # with a cap and 64 features, still faster than `key_kernel`; otherwise 64
        "hopper_shared_key_kernel": 40,  # with a cap; otherwise 16
        "hopper_shared_query_kernel": 16,
        "hopper_query_kernel": 80,  # with a cap and 256 features; else 64, outside of its loops
        # With a bias, and most on sm_120; tiles of these are not chosen by measurements yet.
        "masked_forward_kernel": 400,
        "masked_query_kernel": 240,
        "masked_key_kernel": 264,
        "masked_bias_kernel": 184,
    },
)
OPERATORS = (OPERATOR,)

# ----------------------------------------------------------------------------------------------------------
# Providers
# ----------------------------------------------------------------------------------------------------------


def _warploom(case: Case) -> Provider:
    need_cuda("the Triton kernels")
    return functools.partial(flash_attention, backend="triton")


_PROVIDERS: dict[str, Callable[[Case], Provider]] = {
    "warploom": _warploom,
    **peers.PROVIDERS,
}

# ----------------------------------------------------------------------------------------------------------
# Bench
# ----------------------------------------------------------------------------------------------------------

_ONE_HEAD: dict[str, Any] = {"batch": 1, "heads": 1, "causal": True}
_ON_CPU: dict[str, Any] = {"batch": 1, "heads": 4, "head_dim": 64, "dtype": "float32", "causal": True}


def _published(device: str) -> list[Case]:
    if device != "cuda":
        return [_ON_CPU | {"n": n} for n in (128, 512, 1024)]
    return [
        _ONE_HEAD | {"head_dim": head_dim, "dtype": dtype, "n": 2**k}
        for dtype in ("bfloat16", "float32")
        for head_dim in (16, 32, 64, 128)
        for k in range(7, 17)
    ]


def _seeds(device: str) -> list[Case]:
    """Returns the cases of one head and of attention without heads that others have published."""
    heads = [case for case in _published(device) if case["head_dim"] <= 64 and case["n"] <= 2**15]
    return heads + _alone(device)


def _quick(device: str) -> list[Case]:
    if device != "cuda":
        return [_ON_CPU | {"n": 512}]
    return [_training_case(4, 16, 16, 128, 4096, True)]


def _training_case(batch: int, heads: int, key_heads: int, head_dim: int, n: int, causal: bool) -> Case:
    case: dict[str, Any] = {
        "batch": batch,
        "heads": heads,
        "head_dim": head_dim,
        "dtype": "bfloat16",
        "causal": causal,
        "n": n,
    }
    return case if key_heads == heads else case | {"key_heads": key_heads}


def _training(device: str) -> list[Case]:
    if device != "cuda":
        return _quick(device)
    whole = [
        _training_case(batch, 16, 16, head_dim, n, causal)
        for batch in (4, 2)
        for head_dim in (64, 128, 256)
        for causal in (True, False)
        for n in (1024, 2048, 4096, 8192, 16384)
    ]
    return whole + [_training_case(2, 32, 8, 128, n, True) for n in (2048, 8192)]


def _float32(device: str) -> list[Case]:
    if device != "cuda":
        return [_ON_CPU | {"n": 512}]
    return [
        _ONE_HEAD | {"head_dim": head_dim, "dtype": "float32", "n": n, "float32_precision": precision}
        for precision in ("highest", "high")
        for head_dim in (64, 128)
        for n in (2048, 8192, 32768)
    ]


def _alone(device: str) -> list[Case]:
    """Returns cases of one head and many sequences, in float32 and without a mask: attention without heads."""
    shape = {"batch": 8, "heads": 1, "dtype": "float32", "causal": False}
    if device != "cuda":
        return [shape | {"head_dim": head_dim, "n": n} for head_dim in (16, 64) for n in (256, 1024)]
    return [
        shape | {"head_dim": head_dim, "n": n}
        for head_dim in (16, 32, 64, 128)
        for n in (256, 1024, 4096, 8192, 16384)
    ]


def _shapes(device: str) -> list[Case]:
    """Returns cases of causal attention of other widths, with windows, and of one long sequence of few heads."""
    if device != "cuda":
        return [_ON_CPU | {"n": 256} | change for change in ({"head_dim": 96}, {"head_dim": 192, "value_dim": 128})]
    plain = _training_case(2, 16, 16, 128, 8192, True)
    changes: tuple[dict[str, Any], ...] = (
        {"head_dim": 96},
        {"head_dim": 96, "causal": False},
        {"head_dim": 192, "value_dim": 128},
        {"window": [1023, None]},
        {"window": [4095, None]},
        {"batch": 1, "n": 32768},
        {"batch": 1, "heads": 1, "n": 32768},
        {"batch": 1, "heads": 1, "n": 32768, "head_dim": 64},
        {"heads": 64, "key_heads": 8, "batch": 1},
    )
    return [{**plain, **change} for change in changes]


def _packed(device: str) -> list[Case]:
    """Returns cases of causal attention of packed sequences, of equal and of unequal lengths."""
    if device != "cuda":
        return [_ON_CPU | {"n": 256, "packing": "two"}]
    return [
        {**_training_case(1, 16, 16, head_dim, 32768, True), "packing": packing}
        for head_dim in (64, 128)
        for packing in ("8 × 4096", "uneven", "32 × 1024")
    ]


def _options(device: str) -> list[Case]:
    """Returns cases of what current models add to causal attention, each beside the plain call."""
    if device != "cuda":
        return [_ON_CPU | {"n": 256} | change for change in ({"softcap": 50.0}, {"sink": True})]
    changes: tuple[dict[str, Any], ...] = ({}, {"softcap": 50.0}, {"sink": True}, {"window": [1023, None]})
    return [
        {**_training_case(2, 32, 8, head_dim, n, True), **change}
        for head_dim in (64, 128)
        for n in (2048, 8192)
        for change in (*changes, {"seqused_k": [n, n]}, {"sink": True, "window": [127, None]})
    ]


def _decode(device: str) -> list[Case]:
    """Returns cases of a step of decoding: one query on many keys, with grouped heads and with as many."""
    shape: dict[str, Any] = {"heads": 32, "head_dim": 128, "dtype": "bfloat16", "n": 1, "causal": True}
    if device != "cuda":
        shape |= {"heads": 4, "key_heads": 2, "dtype": "float32"}
        return [{"batch": 2, "m": 1024, **shape, "cache": cache} for cache in ("dense", "lengths", "pages")]
    latent: list[Case] = [
        {"batch": batch, "m": m, **shape, **_LATENT, "heads": heads, "cache": cache}
        for heads in (16, 128)
        for batch, m in ((1, 65536), (8, 8192), (32, 8192), (128, 2048))
        for cache in ("dense", "pages")
    ]
    return [
        {"batch": batch, "m": m, **shape, "key_heads": key_heads, "cache": cache}
        for key_heads in (8, 32)
        for batch, m in ((1, 8192), (1, 32768), (1, 131072), (8, 8192), (32, 8192), (128, 2048))
        for cache in ("dense", "lengths", "pages")
    ] + latent


def _quick_decode(device: str) -> list[Case]:
    wanted = {"batch": 8, "m": 8192, "key_heads": 8, "cache": "pages"} if device == "cuda" else {"cache": "dense"}
    return [case for case in _decode(device) if all(case[name] == value for name, value in wanted.items())]


def _decode_traffic(case: Case, mode: str) -> Traffic:
    """Returns the bytes of every used key and value, read once, and the operations on them."""
    keys, queries = sum(_lengths(case)) * case["key_heads"], case["batch"] * case["heads"]
    return _cache_traffic(case, keys, queries, sum(_lengths(case)))


def _cache_traffic(case: Case, keys: int, queries: int, pairs: int) -> Traffic:
    """Returns the bytes of keys, values, queries and outputs, and the operations on pairs of each query head."""
    size, features = getattr(torch, case["dtype"]).itemsize, case["head_dim"]
    values = case.get("value_dim", features)
    row = features if case.get("latent") else features + values
    flops = 2 * (features + values) * pairs * case["heads"]
    return Traffic.of_bytes((keys * row + queries * features) * size, queries * values * size, flops)


def _serving(device: str) -> list[Case]:
    """Returns cases of a server's batch: prompts, a chunk and single tokens, dense and in pages of all sizes."""
    if device != "cuda":
        mixes: tuple[tuple[str, int, tuple[int | None, ...]], ...] = (
            ("prompt of 70, 3 decoding", 2, (16, None)),
            ("chunk of 16 on 96", 4, (16,)),
        )
        shape = _ON_CPU
    else:
        mixes = (
            ("prompt of 8k, 63 decoding at 2k", 8, (16, 64, 256, None)),
            ("prompt of 8k", 8, (16, 256, None)),
            ("8 prompts of 1k", 8, (16,)),
            ("chunk of 512 on 32k", 8, (16, 256)),
            ("64 decoding at 2k", 8, (16, 64, 256)),
            ("256 decoding at 1k", 8, (16,)),
            ("4 decoding at 32k", 8, (16,)),
            ("8 prompts of 1k", 32, (16,)),
            ("64 decoding at 2k", 32, (16,)),
        )
        shape = {"batch": 1, "heads": 32, "head_dim": 128, "dtype": "bfloat16", "causal": True}
    cases: list[Case] = []
    for mix, key_heads, page_sizes in mixes:
        counts, used = zip(*peers.MIXES[mix])
        case = {"mix": mix, "n": sum(counts), "m": max(used), **shape, "key_heads": key_heads}
        cases += [case if size is None else case | {"page_size": size} for size in page_sizes]
    if device == "cuda":
        for mix in (
            "64 decoding at 2k",
            "4 decoding at 32k",
            "chunk of 512 on 32k",
            "prompt of 8k, 63 decoding at 2k",
        ):
            counts, used = zip(*peers.MIXES[mix])
            case = {"mix": mix, "n": sum(counts), "m": max(used), **shape, "page_size": 64}
            cases.append(case | {"heads": 64, "key_heads": 8})
            of_heads = (16, 128) if max(counts) == 1 else (16,)
            cases += [case | _LATENT | {"heads": heads} for heads in of_heads]
    return cases


def _quick_serving(device: str) -> list[Case]:
    return _serving(device)[:1]


def _by_sequence(**inputs: Any) -> Outputs:
    """Returns the definition's result of packed sequences, one call after another instead of one with a mask."""
    return reference.flash_attention(**inputs | {"cu_seqlens_q": inputs["cu_seqlens_q"].tolist()})


def _serving_traffic(case: Case, mode: str) -> Traffic:
    """Returns the bytes of every used key and value, of queries and of outputs, and the operations."""
    mix = peers.MIXES[case["mix"]]
    keys, queries = sum(used for _, used in mix) * case["key_heads"], case["n"] * case["heads"]
    return _cache_traffic(case, keys, queries, sum(n * used - n * (n - 1) // 2 for n, used in mix))


def _make_tangents(case: Case, device: torch.device, generator: torch.Generator) -> Inputs:
    """Returns the inputs of a case in forward mode: none wants a gradient, and each has a tangent."""
    inputs = make_inputs(case, device, generator)
    factors = {name: inputs[name].detach() for name in ("q", "k", "v")}
    drawn = {f"d{name}": normal(tuple(x.shape), x.dtype, device, generator) for name, x in factors.items()}
    return inputs | factors | drawn


def _attend_forward(q: Tensor, k: Tensor, v: Tensor, dq: Tensor, dk: Tensor, dv: Tensor, **options: Any) -> Any:
    attend = functools.partial(flash_attention, **options)
    return peers.differentiate_forward(attend)(q, k, v, dq, dk, dv)


def _define_forward(q: Tensor, k: Tensor, v: Tensor, dq: Tensor, dk: Tensor, dv: Tensor, **options: Any) -> Any:
    attend = functools.partial(reference.flash_attention, **options)
    return peers.differentiate_forward(attend)(q, k, v, dq, dk, dv)


def _jvp_warploom(case: Case) -> Provider:
    need_cuda("the Triton kernels")
    return functools.partial(_attend_forward, backend="triton")


def _jvp(device: str) -> list[Case]:
    """Returns cases in forward mode."""
    if device != "cuda":
        return [_ON_CPU | {"n": n} for n in (128, 256)]
    return [
        _training_case(batch, 16, 16, head_dim, n, causal)
        for head_dim in (64, 128)
        for causal in (True, False)
        for batch, n in ((8, 1024), (4, 4096), (1, 8192), (4, 8192))
    ]


def _jvp_traffic(case: Case, mode: str) -> Traffic:
    """Returns the operations of six products: q kᵀ, its two tangents, and the sums with v and with its tangent."""
    forward = traffic(case, "fwd")
    return Traffic(2, 1, 2 * forward.stream_bytes, 3 * forward.flops)


def visible_pairs(case: Case) -> int:
    """Returns the number of pairs of a query and a key that it sees, of one head."""
    if "packing" in case:
        rest = {name: value for name, value in case.items() if name != "packing"}
        return sum(visible_pairs(rest | {"n": length}) for length in peers.PACKINGS[case["packing"]])
    n = int(case["n"])
    if not case["causal"]:
        return n * n
    left = case.get("window", (None,))[0]
    seen = n if left is None else min(left + 1, n)  # by the last query
    return seen * (seen + 1) // 2 + (n - seen) * seen


def traffic(case: Case, mode: str) -> Traffic:
    """Returns the operations of two products forward and five backward, and the bytes of all tensors."""
    heads, key_heads = case["heads"], case.get("key_heads", case["heads"])
    head_dim = case["head_dim"]
    value_dim = case.get("value_dim", head_dim)
    pairs = 2 * visible_pairs(case) * heads * case["batch"]
    # Products with head_dim: of q and k, and for dq and dk; with value_dim: of weights and v, and for dp and dv.
    forward_flops, backward_flops = (head_dim + value_dim) * pairs, (3 * head_dim + 2 * value_dim) * pairs
    row_bytes = case["batch"] * case["n"] * (head_dim + value_dim) * getattr(torch, case["dtype"]).itemsize
    # Forward: q, k, v in and o out. Backward: q, k, v, o, do in and dq, dk, dv out. The stream has equal parts.
    forward_bytes = row_bytes * (heads + key_heads)
    backward_bytes = row_bytes * (2 * heads + 2 * key_heads)
    flops = {"fwd": forward_flops, "bwd": backward_flops, "fwd_bwd": forward_flops + backward_flops}[mode]
    moved = {"fwd": forward_bytes, "bwd": backward_bytes, "fwd_bwd": forward_bytes + backward_bytes}[mode]
    return Traffic(2, 1, moved // 3, flops)


# ----------------------------------------------------------------------------------------------------------
# Masks, biases and slopes
# ----------------------------------------------------------------------------------------------------------

_PATTERNS = ("causal", "documents", "prefix", "sliding + global")
_RANDOM = tuple(f"random {share} %" for share in range(10, 91, 20))


def _masks(device: str) -> list[Case]:
    """Returns cases of causal attention as a mask, beside masks of every kind, of all shares of visible tiles."""
    if device != "cuda":
        return [_ON_CPU | {"n": 512, "causal": False, "pattern": name} for name in (*_PATTERNS, _RANDOM[0])]
    return [
        {**_training_case(2, 16, 16, head_dim, 8192, False), "pattern": name}
        for head_dim in (64, 128)
        for name in (*_PATTERNS, *_RANDOM)
    ]


def _biases(device: str) -> list[Case]:
    """Returns cases of causal attention with a bias of heads or of keys, or slopes, each beside the plain call."""
    plain: list[Case] = [_ON_CPU | {"n": 256}]
    if device == "cuda":
        plain = [_training_case(2, 16, 16, head_dim, n, True) for head_dim in (64, 128) for n in (2048, 4096)]
    changes: tuple[dict[str, Any], ...] = ({}, {"bias": "heads"}, {"bias": "keys"}, {"alibi": True})
    return [{**case, **change} for change in changes for case in plain]


def _quick_masks(device: str) -> list[Case]:
    case = [case for case in _masks(device) if case["pattern"] == "documents"][-1]
    return [{**case, "n": 4096 if device == "cuda" else 512}]


def _trees(device: str) -> list[Case]:
    """Returns cases of a step of speculative decoding: the tree of what another model proposes, behind a cache."""
    shape: dict[str, Any] = {"heads": 32, "key_heads": 8, "head_dim": 128, "dtype": "bfloat16", "causal": False}
    if device != "cuda":
        return [_ON_CPU | {"causal": False, "key_heads": 2, "n": 16, "m": 512, "pattern": "tree"}]
    return [
        {"batch": batch, "m": m, "n": n, **shape, "pattern": "tree"}
        for n in (16, 64)
        for batch, m in ((1, 8192), (1, 32768), (8, 8192))
    ]


def _warploom_chunks(case: Case) -> Provider:
    """Returns the call whose bits do not depend on with how many others of its sequence a query comes."""
    need_cuda("the Triton kernels")
    return functools.partial(flash_attention, backend="triton", bits="chunks")


def _warploom_causal(case: Case) -> Provider:
    """Returns the call without a mask that shows what a mask of causal attention does: its rate is the aim."""
    if case.get("pattern") != "causal":
        raise Unsupported("it is for masks that a causal call shows too")
    need_cuda("the Triton kernels")
    return lambda q, k, v, **_: flash_attention(q, k, v, causal=True, backend="triton")


BENCHES = (
    Bench(
        name="flash-attention",
        operator=OPERATOR,
        suites={
            "quick": _quick,
            "published": _published,
            "training": _training,
            "float32": _float32,
            "alone": _alone,
            "shapes": _shapes,
            "options": _options,
            "packed": _packed,
            SEEDS: on_gpus(_seeds),
        },
        providers=_PROVIDERS,
        precompiled=("torch", "sdpa_cudnn", "sdpa_flash", "sdpa_efficient", "flash_attn"),
        quick=("warploom", "torch", "sdpa_cudnn", "sdpa_flash"),
        traffic=traffic,
        title="Flash attention",
        modes=("fwd", "bwd", "fwd_bwd"),
        budgets=peers.BUDGETS,
    ),
    Bench(
        name="attention-decode",
        operator=OPERATOR,
        suites={
            "quick": _quick_decode,
            "published": _decode,
        },
        providers={"warploom": _warploom, **peers.DECODERS},
        precompiled=("torch", "sdpa_cudnn", "sdpa_flash", "sdpa_efficient"),
        quick=("warploom", "torch", "sdpa_cudnn", "sdpa_flash"),
        traffic=_decode_traffic,
        title="Attention of one query on a cache",
        x="m",
        modes=("fwd",),
        budgets=peers.BUDGETS | peers.DECODER_BUDGETS,
    ),
    Bench(
        name="attention-serving",
        operator=dataclasses.replace(OPERATOR, reference=_by_sequence),
        suites={
            "quick": _quick_serving,
            "published": _serving,
        },
        providers={"warploom": _warploom, "warploom_chunks": _warploom_chunks, **peers.SERVERS},
        precompiled=tuple(name for name in peers.SERVERS if name.startswith("torch")),
        quick=("warploom", *(name for name in peers.SERVERS if name.startswith("torch"))),
        traffic=_serving_traffic,
        title="Attention of a server's batch on a cache",
        x="n",
        modes=("fwd",),
        budgets=peers.BUDGETS,
    ),
    Bench(
        name="attention-masks",
        operator=OPERATOR,
        suites={
            "quick": _quick_masks,
            "published": _masks,
        },
        providers={"warploom": _warploom, "warploom_causal": _warploom_causal, **peers_masked.PROVIDERS},
        precompiled=("torch", "sdpa_cudnn", "sdpa_flash", "sdpa_efficient"),
        quick=("warploom", "torch", "sdpa_cudnn", "sdpa_flash", "sdpa_efficient"),
        traffic=patterns.masked_traffic,
        title="Attention with masks",
        x="pattern",
        budgets=peers.BUDGETS,
    ),
    Bench(
        name="attention-biases",
        operator=OPERATOR,
        suites={"published": _biases},
        providers={"warploom": _warploom, **peers_masked.PROVIDERS},
        precompiled=("torch", "sdpa_cudnn", "sdpa_flash", "sdpa_efficient"),
        traffic=patterns.masked_traffic,
        title="Attention with biases and slopes",
        budgets=peers_masked.BUDGETS,
    ),
    Bench(
        name="attention-trees",
        operator=OPERATOR,
        suites={"published": _trees},
        providers={"warploom": _warploom, **peers_masked.PROVIDERS},
        precompiled=("torch", "sdpa_cudnn", "sdpa_flash", "sdpa_efficient"),
        traffic=patterns.masked_traffic,
        title="Attention of a tree of tokens on a cache",
        x="m",
        modes=("fwd",),
        budgets=peers_masked.BUDGETS,
    ),
    Bench(
        name="attention-jvp",
        operator=dataclasses.replace(
            OPERATOR, function=_attend_forward, reference=_define_forward, make_inputs=_make_tangents
        ),
        suites={"published": _jvp},
        providers={"warploom": _jvp_warploom, **peers.FORWARD_MODE},
        precompiled=("torch",),
        traffic=_jvp_traffic,
        title="Attention in forward mode",
        modes=("fwd",),
    ),
)
