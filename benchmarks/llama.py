"""A model of transformers as a bench: Llama-3-8B's layers with random weights, by implementation of attention.

One model serves all providers, one after the other: ``eager`` and ``sdpa`` are transformers' own, ``warploom`` is
`warploom.integrations.transformers`; ``+compile`` is the compiled model, in decoding with a static cache. Times are
by the wall clock with the device idle before and after. A provider whose decoded tokens in float32 are not those of
``eager`` is incorrect. What attention takes of a step is by how much it is longer than one in which queries are
passed on as its result.

``serve`` answers requests with prompts of different lengths by transformers' continuous batching, which takes them
into one packed batch on a paged cache, each implementation with the options that transformers chooses for it, and
``warploom`` with its rotation, by the launch that writes keys. A record has the requests that are answered and the
tokens that are generated in a second.
"""

from __future__ import annotations

import faulthandler
import functools
import time
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
REQUESTS, ANSWER = 32, 64
"""Prompts that are served, from an eighth of a case's length to all of it, and tokens of each answer."""
SECONDS = 20
"""Time that requests get; what is not answered then is given up."""
ROUNDS = {"prefill": 10, "train": 10, "decode": 3, "serve": 2}


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


def _prompts(tokens: torch.Tensor, first: int = 0) -> list[list[int]]:
    """Returns prompts from an eighth of the tokens to all of them, none of which begins as another one."""
    longest = tokens.shape[1]
    lengths = [longest - i * (longest - longest // 8) // REQUESTS for i in range(REQUESTS)]
    return [tokens[0].roll(first + i)[:n].tolist() for i, n in enumerate(lengths)]


def _serve(model: Any, rounds: Sequence[list[list[int]]], count: int) -> tuple[list[list[int]], list[float]]:
    """Returns so many tokens behind each prompt of the last round, and the milliseconds of every round.

    In the first one CUDA graphs are captured. A round ends after `SECONDS`. If the server does not stop soon, as a
    GPU answers nothing, say, the process ends, and prints in which lines its threads are.

    Raises:
        RuntimeError: An answer is missing. The message has the rate up to the end of its round.
    """
    from transformers import ContinuousBatchingConfig, GenerationConfig

    from warploom.integrations import transformers as integration

    if model.config._attn_implementation == "warploom":
        integration.patch_rotary(model)
    # A switch to flash attention would look for its kernels on the network, and wait long where there is none.
    config = ContinuousBatchingConfig(
        max_batch_tokens=2048, max_requests_per_batch=len(rounds[0]), auto_switch_to_flash=False
    )
    config.num_blocks = 2 * sum(-(-(len(prompt) + count) // config.page_size) for prompt in rounds[0])
    options = GenerationConfig(max_new_tokens=count, do_sample=False, eos_token_id=-1, pad_token_id=0)
    faulthandler.dump_traceback_later(len(rounds) * SECONDS + 30, exit=True)
    server = model.init_continuous_batching(options, config)
    server.start()
    seconds: list[float] = []
    try:
        for prompts in rounds:
            begun = time.perf_counter()
            answers: dict[str, Any] = {}
            names = server.add_requests(prompts, max_new_tokens=count)
            while len(answers) < len(names) and time.perf_counter() - begun < SECONDS and server.is_running():
                if answer := server.get_result(timeout=0.1):
                    answers[answer.request_id] = answer
            seconds.append(time.perf_counter() - begun)
            if len(answers) < len(names):
                break
    finally:
        server.stop(hard_stop=True)
        integration.unpatch_rotary(model)
        faulthandler.cancel_dump_traceback_later()
    while answer := server.get_result():  # what there is of the other answers
        answers[answer.request_id] = answer
    whole = [len(answer.generated_tokens) for answer in answers.values() if answer.error is None]
    if len(whole) < len(names):
        made = sum(len(answer.generated_tokens) for answer in answers.values())
        errors = ", ".join({answer.error for answer in answers.values() if answer.error})
        raise RuntimeError(
            f"{len(whole)} of {len(names)} requests were answered in {seconds[-1]:.1f} s, "
            f"{made / seconds[-1]:.0f} tokens a second: {errors}"
        )
    return [answers[name].generated_tokens for name in names], [1000 * each for each in seconds]


def _check_tokens(case: Case, mode: str, providers: Sequence[str], device: torch.device) -> dict[str, bool]:
    """Returns for each implementation if it finds the tokens that ``eager`` decodes, in float32.

    Of requests to a server ``eager`` has each alone.
    """
    model = _model(case, device, torch.float32)
    tokens = make_inputs(case, device, torch.Generator().manual_seed(1))["tokens"][:, :256]
    prompts = [torch.tensor([p], device=device) for p in _prompts(tokens)[::8]] if mode == "serve" else [tokens]

    def decode(name: str) -> list[list[int]]:
        model.set_attn_implementation(name)
        if mode == "serve" and name != "eager":
            return _serve(model, [[p[0].tolist() for p in prompts]], CHECKED)[0]
        return [answer.tolist() for p in prompts for answer in _decode(model, p, CHECKED, False)]

    expected = decode("eager")
    names = dict.fromkeys(name.removesuffix(COMPILE) for name in providers)
    found = {name: attempt(name, functools.partial(decode, name)) for name in names}
    return {name: found[name.removesuffix(COMPILE)] == expected for name in providers}


def measure(
    unit: Unit, providers: Sequence[str], device: torch.device, clock: Clock, blank: Record
) -> list[Record]:
    """Measure all implementations, interleaved, as `warploom.bench.evaluate.evaluate` does providers."""
    traffic = _count_traffic(unit.case, unit.mode)
    blank = replace(blank, flops=traffic.flops, min_bytes=traffic.min_bytes)
    right = attempt("eager", functools.partial(_check_tokens, unit.case, unit.mode, providers, device))
    release_memory(device)
    if isinstance(right, Failure):
        return steps.step_records(blank, dict.fromkeys((*providers, LIMIT), right))
    model = _model(unit.case, device, getattr(torch, unit.case["dtype"]))
    tokens = make_inputs(unit.case, device, torch.Generator().manual_seed(0))["tokens"]
    names = [*providers, *([WITHOUT] if unit.mode in ("prefill", "train") else [])]
    started = {name: attempt(name, functools.partial(_start, model, name, unit.mode, tokens)) for name in names}
    started[LIMIT] = attempt(LIMIT, functools.partial(_limit, unit, traffic, device, clock))
    rounds = ROUNDS[unit.mode] if device.type == "cuda" else 2
    samples = interleave(started, dict.fromkeys(started, rounds))
    without = samples.pop(WITHOUT, None)
    for name in providers:
        if not (right[name] or isinstance(samples[name], Failure)):
            samples[name] = Failure("incorrect", "its tokens in float32 are not those of eager")
    records = steps.step_records(blank, samples)
    if unit.mode == "serve":
        rates = {"requests_per_second": 1000 * REQUESTS, "tokens_per_second": 1000 * REQUESTS * ANSWER}
        return [replace(r, details={n: x / r.ms for n, x in rates.items()}) if r.ms else r for r in records]
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
    if mode == "serve":
        if compiles or name == "eager":
            raise Unsupported("a server's batch is too large for all logits, and it compiles by options of its own")
        samples: list[float] = []

        def serve() -> float:
            """Returns the time of another round; all are served by one server, one behind the other."""
            if not samples:
                model.set_attn_implementation(name)
                rounds = [_prompts(tokens, number * REQUESTS) for number in range(ROUNDS["serve"] + 1)]
                samples.extend(_serve(model, rounds, ANSWER)[1][1:])
            return samples.pop()

        return serve
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
    """Returns a function that measures the limit in ms: a matrix product, or a stream of weights and cache.

    Of requests it is that of the generated tokens alone, without the prompts.
    """
    if unit.mode in ("decode", "serve"):
        count = TOKENS if unit.mode == "decode" else ANSWER
        return steps.repeated_ms(limits.stream_call(traffic, device, clock), count, clock)
    return steps.product_ms(traffic.flops, device, clock)


def _count_traffic(case: Case, mode: str) -> Traffic:
    """Returns the operations of a step, or the bytes of weights and keys that are read for the next tokens."""
    shape, layers, n = SHAPES[case["size"]], case["layers"], case["context_length"]
    width, heads = shape["hidden_size"], shape["num_attention_heads"]
    kv = 2 * width * shape["num_key_value_heads"] // heads
    weights = layers * (width * (2 * width + kv) + 3 * width * shape["intermediate_size"])
    head = width * shape["vocab_size"]
    if mode in ("decode", "serve"):
        itemsize = getattr(torch, case["dtype"]).itemsize
        keys = n + TOKENS // 2 if mode == "decode" else REQUESTS * (n * 9 // 16 + ANSWER // 2)
        cache = layers * case["batch"] * keys * kv
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
    title="Llama of transformers, by its attention: wall time of a prompt, a training step, 200 tokens, requests",
    x="context_length",
    modes=("prefill", "train", "decode", "serve"),
    measure=measure,
    launches=launch,
)
BENCHES = (BENCH,)
