"""Cases, inputs, providers and fewest bytes of appending to a cache, for tests and bench."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from warploom.ops.append_kv import peers, reference
from warploom.ops.append_kv.api import append_kv
from warploom.ops.append_kv.peers import Provider
from warploom.ops.spec import Bench, Case, Inputs, Operator, Traffic, is_recording, need_cuda, normal

Tensor = torch.Tensor


def make_inputs(case: Case, device: torch.device, generator: torch.Generator) -> Inputs:
    """Returns the inputs of a case.

    Keys: ``batch, n, heads, kv_heads, head_dim, dtype``, ``used`` (keys of the sequences, new ones included) and
    ``capacity`` (keys of a sequence of a dense cache); ``value_dim`` (``head_dim``); ``page_size`` for a paged
    cache, with pages in random order; ``cu_seqlens`` of packed tokens, with ``batch`` 1; ``frequencies``, 0 for no
    rotation (half of ``head_dim``); ``interleaved``; ``layout`` (``bhnd`` for heads before tokens in memory).
    """
    batch, n, heads, kv_heads, features = (case[key] for key in ("batch", "n", "heads", "kv_heads", "head_dim"))
    values, dtype = case.get("value_dim", features), getattr(torch, case["dtype"])

    def draw(*shape: int) -> Tensor:
        numbers = normal(shape, dtype, device, generator)
        return numbers.transpose(1, 2).contiguous().transpose(1, 2) if case.get("layout") == "bhnd" else numbers

    used = list(case["used"])
    if "cu_seqlens" not in case:
        used = (used * batch)[:batch]
    inputs: Inputs = {"k": draw(batch, n, kv_heads, features), "v": draw(batch, n, kv_heads, values)}
    rows, columns = len(used), case["capacity"]
    if (size := case.get("page_size")) is not None:
        places = -(-case["capacity"] // size)
        rows, columns = len(used) * places + 3, size
        order = torch.randperm(rows, generator=generator)[: len(used) * places]
        inputs["block_table"] = order.view(len(used), places).to(device, torch.int32)
    inputs["k_cache"] = draw(rows, columns, kv_heads, features)
    inputs["v_cache"] = draw(rows, columns, kv_heads, values)
    inputs["seqused_k"] = torch.tensor(used, dtype=torch.int32, device=device)
    if "cu_seqlens" in case:
        inputs["cu_seqlens"] = torch.tensor(case["cu_seqlens"], dtype=torch.int32, device=device)
    if frequencies := case.get("frequencies", features // 2):
        inputs["theta"] = 10000.0 ** -(torch.arange(frequencies, dtype=torch.float32, device=device) / frequencies)
        inputs["q"] = draw(batch, n, heads, features)
    if "interleaved" in case:
        inputs["interleaved"] = case["interleaved"]
    return inputs


_BASE: dict[str, Any] = {
    "batch": 2, "n": 3, "heads": 4, "kv_heads": 2, "head_dim": 16, "dtype": "float32",
    "used": [7, 3], "capacity": 9,
}  # fmt: skip
_CHECKS: tuple[dict[str, Any], ...] = (
    {},
    {"dtype": "bfloat16", "page_size": 4, "value_dim": 24},
    {"dtype": "float16", "batch": 1, "n": 11, "cu_seqlens": [0, 5, 5, 6, 9], "used": [5, 0, 9, 4], "page_size": 5},
    {"batch": 1, "n": 7, "cu_seqlens": [0, 4, 7], "used": [9, 3], "interleaved": True, "kv_heads": 1},
    {"used": [3, 9], "frequencies": 5},
    {"frequencies": 0, "head_dim": 7, "value_dim": 5, "dtype": "bfloat16"},
    {"layout": "bhnd", "dtype": "bfloat16", "head_dim": 64, "page_size": 3},
    {"batch": 1, "heads": 5, "kv_heads": 5, "head_dim": 130, "used": [9], "n": 9, "dtype": "float16"},
    {"batch": 0},
    {"n": 0},
    {"batch": 70, "n": 1, "head_dim": 128, "heads": 3, "kv_heads": 1, "dtype": "bfloat16"},
)


def _clone_caches(function: Callable[..., Tensor | None]) -> Callable[..., tuple[Tensor, ...]]:
    """Returns a function that appends to copies of the caches, and returns these, and queries if there are."""

    @functools.wraps(function)
    def append(*, k_cache: Tensor, v_cache: Tensor, **rest: Any) -> tuple[Tensor, ...]:
        copy = torch.empty_like if is_recording() else torch.clone  # some caches have GiB, and nothing reads them
        k_cache, v_cache = copy(k_cache), copy(v_cache)
        q = function(k_cache=k_cache, v_cache=v_cache, **rest)
        return (k_cache, v_cache) if q is None else (k_cache, v_cache, q)

    return append


OPERATOR = Operator(
    name="append_kv",
    function=_clone_caches(append_kv),
    reference=_clone_caches(reference.append_kv),
    make_inputs=make_inputs,
    check_cases=tuple({**_BASE, **change} for change in _CHECKS),
)
OPERATORS = (OPERATOR,)


def _warploom(case: Case) -> Provider:
    need_cuda()

    def append(k_cache: Tensor, v_cache: Tensor, **rest: Any) -> tuple[Tensor, ...]:
        q = append_kv(k_cache=k_cache, v_cache=v_cache, **rest, backend="triton")
        return k_cache, v_cache, q  # type: ignore[return-value]

    return append


def traffic(case: Case, mode: str) -> Traffic:
    """Returns the bytes of every new row, read once and written once."""
    row = (2 * case["kv_heads"] + case["heads"]) * case["head_dim"]
    return Traffic(1, 1, case["batch"] * case["n"] * row * getattr(torch, case["dtype"]).itemsize)


_LLAMA = {"heads": 32, "kv_heads": 8, "head_dim": 128, "dtype": "bfloat16", "page_size": 16}


def _batch(prompts: int, prompt: int, decoding: int, length: int) -> dict[str, Any]:
    """Returns a server's batch: whole prompts, and sequences of one new token each."""
    counts = [prompt] * prompts + [1] * decoding
    bounds = [sum(counts[:i]) for i in range(len(counts) + 1)]
    used = [prompt] * prompts + [length] * decoding
    return {"batch": 1, "n": bounds[-1], "cu_seqlens": bounds, "used": used, "capacity": max(used)}


def _cases(device: str) -> list[Case]:
    if device != "cuda":
        return [_LLAMA | {"heads": 8, "kv_heads": 2, "head_dim": 64} | _batch(1, 64, 7, 128)]
    batches = (_batch(0, 0, 64, 2048), _batch(1, 8192, 63, 2048), _batch(4, 2048, 0, 0), _batch(0, 0, 256, 1024))
    return [_LLAMA | batch for batch in batches]


BENCHES = (
    Bench(
        name="append-kv",
        operator=OPERATOR,
        suites={"quick": lambda device: _cases(device)[:2], "serving": _cases},
        providers={"warploom": _warploom, **peers.PROVIDERS},
        traffic=traffic,
        title="Rotary positions and the copy of keys and values to a paged cache",
        modes=("fwd",),
        precompiled=("torch",),
        quick=("warploom", "torch"),
    ),
)
