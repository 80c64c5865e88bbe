"""A model of transformers as a bench: Llama-3-8B's layers with random weights, by implementation of attention.

One model serves all providers, one after the other: ``eager`` and ``sdpa`` are transformers' own, ``warploom`` is
`warploom.integrations.transformers`; ``+compile`` is the compiled model, in decoding with a static cache. Times are
by the wall clock with the device idle before and after. A provider whose decoded tokens in float32 are not those of
``eager`` is incorrect. What attention takes of a step is by how much it is longer than one in which queries are
passed on as its result.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

import torch

from warploom.bench import limits
from warploom.bench.attempt import Failure, attempt
from warploom.bench.evaluate import Unit
from warploom.bench.fingerprint import LIMIT
from warploom.bench.measure import Clock, interleave, release_memory
from warploom.bench.records import Record
from warploom.ops.spec import KERNELS, Case, Inputs, Traffic, Unsupported, compile_at_best

from . import _steps as steps

SHAPES: dict[str, dict[str, Any]] = {
    "8B": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
    },
    "trial": {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 128,
    },
}
COMPILE = "+compile"
WITHOUT = "warploom_without"
"""An implementation of attention that passes queries on."""
TOKENS, CHECKED = 200, 32
"""Tokens that a step decodes, and tokens that are compared with those of ``eager``."""
ROUNDS = {"prefill": 10, "train": 10, "decode": 3}


def _model(case: Case, device: torch.device, dtype: torch.dtype) -> Any:
    torch.manual_seed(0)
    with torch.device(device):
        model = steps.llama(
            "transformers",
            **SHAPES[case["size"]],
            num_hidden_layers=case["layers"],
            max_position_embeddings=case["context_length"] + 2 * TOKENS,
            pad_token_id=0,
            bos_token_id=None,
            eos_token_id=None,
        ).to(dtype)
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    from warploom.integrations import transformers as integration

    integration.register()
    AttentionInterface.register(WITHOUT, lambda module, query, *args, **kwargs: (query.transpose(1, 2), None))
    AttentionMaskInterface.register(WITHOUT, lambda *args, **kwargs: None)
    return model


def make_inputs(case: Case, device: torch.device, generator: torch.Generator) -> Inputs:
    """Returns random tokens (B, N)."""
    shape = (case["batch"], case["context_length"])
    return {"tokens": torch.randint(SHAPES[case["size"]]["vocab_size"], shape, generator=generator).to(device)}


def _decode(model: Any, tokens: torch.Tensor, count: int, static: bool) -> torch.Tensor:
    """Returns the tokens behind a prompt, each that of the largest logit."""
    options = {"cache_implementation": "static"} if static else {}
    mask = torch.ones_like(tokens)
    with torch.no_grad():
        out: torch.Tensor = model.generate(
            tokens, attention_mask=mask, max_new_tokens=count, min_new_tokens=count, do_sample=False, **options
        )
    return out[:, tokens.shape[1] :]


def _check_tokens(case: Case, providers: Sequence[str], device: torch.device) -> dict[str, bool]:
    """Returns for each implementation if it decodes the tokens that ``eager`` decodes, in float32."""
    model = _model(case, device, torch.float32)
    tokens = make_inputs(case, device, torch.Generator().manual_seed(1))["tokens"][:, :256]
    names = dict.fromkeys(name.removesuffix(COMPILE) for name in providers)
    found = {}
    for name in ("eager", *names):
        model.set_attn_implementation(name)
        found[name] = _decode(model, tokens, CHECKED, False)
    return {name: bool(torch.equal(found[name.removesuffix(COMPILE)], found["eager"])) for name in providers}


def measure(
    unit: Unit, providers: Sequence[str], device: torch.device, clock: Clock, blank: Record
) -> list[Record]:
    """Measure all implementations, interleaved, as `warploom.bench.evaluate.evaluate` does providers."""
    traffic = _count_traffic(unit.case, unit.mode)
    blank = replace(blank, flops=traffic.flops, min_bytes=traffic.min_bytes)
    right = attempt("eager", functools.partial(_check_tokens, unit.case, providers, device))
    release_memory(device)
    if isinstance(right, Failure):
        return steps.step_records(blank, dict.fromkeys((*providers, LIMIT), right))
    model = _model(unit.case, device, getattr(torch, unit.case["dtype"]))
    tokens = make_inputs(unit.case, device, torch.Generator().manual_seed(0))["tokens"]
    names = [*providers, *([WITHOUT] if unit.mode != "decode" else [])]
    started = {name: attempt(name, functools.partial(_start, model, name, unit.mode, tokens)) for name in names}
    started[LIMIT] = attempt(LIMIT, functools.partial(_limit, unit, traffic, device, clock))
    rounds = ROUNDS[unit.mode] if device.type == "cuda" else 2
    samples = interleave(started, dict.fromkeys(started, rounds))
    without = samples.pop(WITHOUT, None)
    for name in providers:
        if not (right[name] or isinstance(samples[name], Failure)):
            samples[name] = Failure("incorrect", "its tokens in float32 are not those of eager")
    records = steps.step_records(blank, samples)
    if not isinstance(without, list):
        return records
    return [
        replace(r, details={"attention_ms": r.ms - median(without)})
        if r.ms and r.provider != LIMIT and not r.provider.endswith(COMPILE)
        else r
        for r in records
    ]


def _start(model: Any, provider: str, mode: str, tokens: torch.Tensor) -> Callable[[], float]:
    """Returns a provider's step, compiled; the step chooses its attention first and returns its milliseconds."""
    name, device = provider.removesuffix(COMPILE), tokens.device
    compiles = provider.endswith(COMPILE)
    optimizer = None
    if mode == "train":
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, fused=device.type == "cuda")
    model.set_attn_implementation(name)
    run = compile_at_best(model) if compiles and mode != "decode" else model

    def step(count: int = TOKENS + 1) -> None:
        model.set_attn_implementation(name)
        if mode == "decode":
            _decode(model, tokens, count, compiles)
        elif optimizer is None:
            with torch.no_grad():
                run(input_ids=tokens, use_cache=False, logits_to_keep=1)
        else:
            run(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    def timed() -> float:
        ms = steps.wall_ms(step, device)
        # What comes before the second token is no part of it.
        return ms - steps.wall_ms(functools.partial(step, 1), device) if mode == "decode" else ms

    for _ in range(2):
        timed()
    return timed


def _limit(unit: Unit, traffic: Traffic, device: torch.device, clock: Clock) -> Callable[[], float]:
    """Returns a function that measures the limit in ms: a matrix product, or a stream of weights and cache."""
    if unit.mode == "decode":
        return steps.repeated_ms(limits.stream_call(traffic, device, clock), TOKENS, clock)
    return steps.product_ms(traffic.flops, device, clock)


def _count_traffic(case: Case, mode: str) -> Traffic:
    """Returns the operations of a step, or the bytes of weights and keys of a decoded token."""
    shape, layers, n = SHAPES[case["size"]], case["layers"], case["context_length"]
    width, heads = shape["hidden_size"], shape["num_attention_heads"]
    kv = 2 * width * shape["num_key_value_heads"] // heads
    weights = layers * (width * (2 * width + kv) + 3 * width * shape["intermediate_size"])
    head = width * shape["vocab_size"]
    if mode == "decode":
        itemsize = getattr(torch, case["dtype"]).itemsize
        cache = layers * case["batch"] * (n + TOKENS // 2) * kv
        return Traffic(1, 0, (weights + head + cache) * itemsize)
    attention = 2 * layers * n * width  # two products of half the keys, for each token
    logits = head if mode == "train" else head // n  # of a prompt the last ones alone
    forward = case["batch"] * n * (2 * (weights + logits) + attention)
    return Traffic(0, 0, 0, forward * (3 if mode == "train" else 1))


def launch(case: Case, provider: str) -> None:
    """Launch the kernels of ours that attention of a layer launches, forward and backward."""
    from warploom import flash_attention

    if not provider.startswith(KERNELS):
        raise Unsupported("launches nothing of ours")
    shape = SHAPES[case["size"]]
    heads, dtype = shape["num_attention_heads"], getattr(torch, case["dtype"])
    features = shape["hidden_size"] // heads
    q, k, v = (
        torch.empty(case["batch"], case["context_length"], count, features, dtype=dtype, requires_grad=True)
        for count in (heads, shape["num_key_value_heads"], shape["num_key_value_heads"])
    )
    out = flash_attention(q, k, v, causal=True, backend="triton")
    torch.autograd.grad([out], [q, k, v], [torch.empty_like(out)])


def _cases(device: str, layers: int) -> list[Case]:
    shape = {"size": "8B", "layers": layers, "batch": 1, "dtype": "bfloat16"}
    return [{**shape, "context_length": n} for n in (4096, 8192)] if device == "cuda" else []


TRIAL = {"size": "trial", "layers": 2, "batch": 1, "dtype": "float32", "context_length": 32}
"""A model of two thin layers, for tests."""
BENCH = steps.model_bench(
    "llama",
    make_inputs,
    providers=("warploom", "sdpa", "eager", "warploom+compile", "sdpa+compile"),
    suites={
        "quick": lambda device: [],
        "published": functools.partial(_cases, layers=4),
        "trial": lambda device: [TRIAL],
    },
    traffic=_count_traffic,
    title="Llama of transformers, by its attention: wall time of a prompt, a training step, 200 decoded tokens",
    x="context_length",
    modes=("prefill", "train", "decode"),
    measure=measure,
    launches=launch,
)
BENCHES = (BENCH,)
