"""warploom's attention in models of transformers: logits, gradients and tokens equal to those of ``eager``."""

from __future__ import annotations

import copy
import inspect
import pickle
import random
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from warploom import append_kv, flash_attention
from warploom.errors import ArgumentError, BackendError, DtypeError

transformers = pytest.importorskip("transformers", minversion="5.20")

from transformers import masking_utils  # noqa: E402

from warploom.integrations import transformers as integration  # noqa: E402
from warploom.integrations.transformers import paged  # noqa: E402
from warploom.integrations.transformers.unrotated import ENDING, Unrotated  # noqa: E402

Model = Any
COMMON = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 61,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
GROUPED = {**COMMON, "num_key_value_heads": 2}
WINDOW = 5
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", GROUPED),
    "mistral": ("Mistral", {**GROUPED, "sliding_window": WINDOW, "head_dim": 12}),
    "qwen3": (
        "Qwen3",
        {**GROUPED, "head_dim": 16, "use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
    ),
    "phi": ("Phi", {**GROUPED, "partial_rotary_factor": 0.5}),
    "gemma2": ("Gemma2", {**GROUPED, "head_dim": 16, "sliding_window": WINDOW, "attn_logit_softcapping": 2.0}),
    "gpt_oss": (
        "GptOss",
        {
            **GROUPED,
            "head_dim": 16,
            "sliding_window": WINDOW,
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        },
    ),
    "gpt_neox": ("GPTNeoX", {**COMMON, "rotary_pct": 0.25}),
}
TOKENS = 14


@pytest.fixture(autouse=True)
def _registered() -> Iterator[None]:
    integration.register()
    yield
    for name in ("warploom", "warploom" + ENDING):
        transformers.AttentionInterface._global_mapping.pop(name, None)
    transformers.AttentionMaskInterface._global_mapping.pop("warploom", None)


def pair_of(name: str, seed: int = 0, **changes: Any) -> tuple[Model, Model]:
    """One random model twice: with ``eager`` attention, and with ours."""
    family, options = MODELS[name]
    torch.manual_seed(seed)
    config = getattr(transformers, f"{family}Config")(**{**options, **changes})
    kind = getattr(transformers, f"{family}ForCausalLM")
    eager = kind._from_config(config, attn_implementation="eager").eval()
    for parameter in eager.parameters():  # the first weights are small, and hide what attention does
        torch.nn.init.normal_(parameter, std=0.3 if parameter.dim() > 1 else 1.0)
    ours = kind._from_config(copy.deepcopy(config), attn_implementation="warploom").eval()
    ours.load_state_dict(eager.state_dict())
    return eager, ours


def ids_of(batch: int = 2, tokens: int = TOKENS, seed: int = 1) -> torch.Tensor:
    return torch.randint(2, COMMON["vocab_size"], (batch, tokens), generator=torch.Generator().manual_seed(seed))


def padding(side: str, batch: int = 2, tokens: int = TOKENS) -> torch.Tensor:
    """Masks of entries of several lengths."""
    there = torch.ones(batch, tokens, dtype=torch.long)
    for entry in range(1, batch):
        gone = min(2 + 2 * entry, tokens - 1)
        there[entry, :gone] = 0
        if side == "right":
            there[entry] = there[entry].flip(0)
    return there


PLACES: dict[str, dict[str, Any]] = {
    "plain": {},
    "left": {"attention_mask": padding("left")},
    "right": {"attention_mask": padding("right")},
    "packed": {"position_ids": torch.cat([torch.arange(n) for n in (3, 9, 2)]).expand(2, -1)},
    "packed differently": {
        "position_ids": torch.stack([torch.cat([torch.arange(n) for n in ns]) for ns in ((6, 8), (1, 1, 12))])
    },
    "gaps": {"attention_mask": torch.tensor([[1] * 7 + [0] * 2 + [1] * 5, [0, 1, 1] + [0, 1] * 5 + [1]])},
}


def close(got: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(got, wanted, rtol=2e-4, atol=2e-4)


def loss_of(model: Model, ids: torch.Tensor, given: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of the tokens that are there, and a loss of all of them."""
    logits = model(ids, **given, use_cache=False).logits
    there = given.get("attention_mask", torch.ones_like(ids)).bool()
    weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(3))
    return logits[there], (logits * weights)[there].sum()


@pytest.mark.sample(3)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", MODELS)
def test_logits_and_gradients(name: str, place: str) -> None:
    eager, ours = pair_of(name)
    ids, given = ids_of(), PLACES[place]
    wanted, loss = loss_of(eager, ids, given)
    loss.backward()
    got, loss = loss_of(ours, ids, given)
    loss.backward()
    close(got, wanted)
    for (parameter, x), y in zip(eager.named_parameters(), ours.parameters()):
        scale = x.grad.abs().max() + 1e-6
        assert ((x.grad - y.grad).abs().max() / scale) < 1e-3, parameter


@pytest.mark.sample(3)
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("side", ["none", "left", "right"])
@pytest.mark.parametrize("name", MODELS)
def test_tokens_of_generate(name: str, side: str, cache: str) -> None:
    """Behind right padding tokens come with a gap: an error, and no other token."""
    eager, ours = pair_of(name)
    ids = ids_of(3, 7)
    mask = torch.ones_like(ids) if side == "none" else padding(side, 3, 7)
    options = {"attention_mask": mask, "max_new_tokens": 9, "do_sample": False, "cache_implementation": cache}
    if side == "right":
        with pytest.raises(ArgumentError, match="without gaps"):
            ours.generate(ids, **options)
        return
    assert torch.equal(ours.generate(ids, **options), eager.generate(ids, **options))


def test_a_prompt_in_several_parts() -> None:
    """Queries that extend a cache see all of it."""
    for name in ("llama", "mistral"):
        eager, ours = pair_of(name)
        ids = ids_of()
        results = []
        for model in (eager, ours):
            cache = transformers.DynamicCache(config=model.config)
            parts = [model(part, past_key_values=cache).logits for part in ids.split((6, 7, 1), 1)]
            results.append(torch.cat(parts, 1))
        close(results[1], results[0])


def test_packed_sequences_as_the_collator_gives_them() -> None:
    """``cu_seq_lens_*`` are taken as they are, whatever positions say."""
    eager, ours = pair_of("llama")
    ids = ids_of(1)
    positions = torch.cat([torch.arange(n) for n in (5, 9)])[None]
    bounds = torch.tensor([0, 5, 14], dtype=torch.int32)
    lengths = {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": 9, "max_length_k": 9}
    wanted = eager(ids, position_ids=positions, use_cache=False).logits
    close(ours(ids, position_ids=positions, use_cache=False, **lengths).logits, wanted)


def test_a_row_that_is_longer_than_its_sequences() -> None:
    """Tokens behind the last of ``cu_seq_lens_q`` are padding: they see nothing, and gradients are without them."""
    _, ours = pair_of("llama")
    ids, bounds = ids_of(1), torch.tensor([0, 5, 11], dtype=torch.int32)
    positions = torch.cat([torch.arange(n) for n in (5, 6, 3)])[None]
    gradients = []
    for tokens in (11, TOKENS):
        ours.zero_grad()
        given = {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "position_ids": positions[:, :tokens]}
        logits = ours(ids[:, :tokens], **given, use_cache=False).logits
        assert logits.isfinite().all()
        logits[:, :11].sin().sum().backward()
        gradients.append([p.grad.clone() for p in ours.parameters()])
    for x, y in zip(*gradients):
        close(y / (x.abs().max() + 1e-6), x / (x.abs().max() + 1e-6))
    q, visible = torch.randn(1, 4, TOKENS, 8), integration.Visible(True, None, TOKENS, TOKENS)
    out, _ = integration.attention(torch.nn.Module(), q, q, q, visible, cu_seq_lens_q=bounds)
    assert not out[:, 11:].any()


def test_full_attention_of_a_decoder() -> None:
    eager, ours = pair_of("llama", is_causal=False)
    ids = ids_of()
    mask = padding("left")
    wanted = eager(ids, attention_mask=mask, use_cache=False).logits[mask.bool()]
    close(ours(ids, attention_mask=mask, use_cache=False).logits[mask.bool()], wanted)


@pytest.mark.sample(6)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.seldom(4, 9)
def test_training_with_checkpoints_and_a_compiler(place: str) -> None:
    eager, ours = pair_of("llama")
    ids, given = ids_of(), PLACES[place]
    _, loss = loss_of(eager.train(), ids, given)
    loss.backward()
    ours.train().gradient_checkpointing_enable({"use_reentrant": False})
    compiled = torch.compile(ours, backend="aot_eager")
    _, loss = loss_of(compiled, ids, given)
    loss.backward()
    for x, y in zip(eager.parameters(), ours.parameters()):
        assert ((x.grad - y.grad).abs().max() / (x.grad.abs().max() + 1e-6)) < 1e-3


@pytest.mark.parametrize("side", ["none", "left"])
@pytest.mark.seldom(3, 9)
def test_a_compiled_step_with_a_static_cache(side: str) -> None:
    """As ``generate`` compiles it on a GPU: masks are made ahead, and the step is one graph."""
    eager, ours = pair_of("llama")
    ids = ids_of(2, 7)
    mask = torch.ones_like(ids) if side == "none" else padding(side, 2, 7)
    options = {"attention_mask": mask, "max_new_tokens": 4, "do_sample": False, "cache_implementation": "static"}
    wanted = eager.generate(ids, **options)
    compiled = transformers.CompileConfig(fullgraph=True, backend="aot_eager", mode=None)
    compiled._compile_all_devices = True
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    assert torch.equal(ours.generate(ids, **options, compile_config=compiled), wanted)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def draw_requests() -> list[list[int]]:
    """Prompts of several lengths; the last two begin like each other, with more than a page."""
    prompts = [ids_of(1, n, seed=n)[0].tolist() for n in (3, 17, 9, 1, 12, 22, 23)]
    prompts[-1][:20] = prompts[-2][:20]
    return prompts


@pytest.mark.sample(5)
@pytest.mark.parametrize("rotary", [False, True])
@pytest.mark.parametrize("name", ["llama", "mistral", "qwen3", "gemma2", "gpt_oss"])
def test_tokens_of_continuous_batching(name: str, rotary: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens equal those of one request after another; full layers read pages, also those of earlier requests."""
    eager, ours = pair_of(name)
    if rotary:
        integration.patch_rotary(ours)
    in_pages: list[bool] = []
    cached: list[int] = []
    rotating: list[bool] = []

    def attend(*args: Any, **options: Any) -> torch.Tensor:
        in_pages.append("block_table" in options)
        return flash_attention(*args, **options)

    def append(*args: Any, **options: Any) -> torch.Tensor | None:
        rotating.append("theta" in options)
        return append_kv(*args, **options)

    from transformers.generation.continuous_batching import PagedAttentionCache as Cache

    search = Cache.search_prefix_match
    monkeypatch.setattr(paged, "flash_attention", attend)
    monkeypatch.setattr(paged, "append_kv", append)
    monkeypatch.setattr(Cache, "search_prefix_match", lambda *args: cached.append(search(*args)) or cached[-1])
    prompts = draw_requests()
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    served = ours.generate_batch(
        prompts,
        generation_config=transformers.GenerationConfig(**options),
        continuous_batching_config=transformers.ContinuousBatchingConfig(
            page_size=16, num_blocks=64, max_batch_tokens=16, use_async_batching=False, use_cuda_graph=False
        ),
        progress_bar=False,
    )
    assert ours.config._attn_implementation == "warploom"
    assert any(in_pages) == (name != "mistral")  # which has sliding layers alone
    assert rotating == [rotary] * len(rotating)
    assert max(cached, default=0) == (
        16 if name == "llama" else 0
    )  # transformers shares prefixes if all layers are full
    tokens = {tuple(x.prompt_ids): x.generated_tokens for x in served.values()}
    for prompt in prompts:
        alone = eager.generate(torch.tensor([prompt]), **options)[0, len(prompt) :]
        assert tokens[tuple(prompt)] == alone.tolist()


def test_operations_before_the_cache_take_rotated_features() -> None:
    """As where a model normalises queries and keys behind its rotation."""
    q, k, theta = torch.randn(1, 4, 3, 8), torch.randn(1, 2, 3, 8), torch.rand(4)
    asked: list[torch.Tensor] = []
    query = Unrotated(q, theta, False, lambda x: asked.append(x) or 2 * x)
    key = Unrotated(k, theta, False, lambda x: asked.append(x) or 2 * x, query)
    assert (key.shape, key.dtype, key.device, key.stride()) == (k.shape, k.dtype, k.device, k.stride())
    assert not asked
    assert torch.equal(query + 1, 2 * q + 1)
    assert torch.equal(torch.cat((key, key), 2), torch.cat((2 * k, 2 * k), 2))
    key *= 3
    assert torch.equal(key.resolve(), 6 * k)
    assert type(key.transpose(1, 2)) is torch.Tensor
    assert asked[0] is q
    assert asked[1] is k
    assert len(asked) == 2


def test_pages_of_a_batch_are_found_in_every_forward() -> None:
    """The first layer of a kind finds them, also if the batch's tensors are those of the forward before."""
    full = SimpleNamespace(index=0, layer_indices=[1, 3], layer_type="full_attention", tokens_per_page=4)
    cache = SimpleNamespace()
    slots = torch.tensor([8, 9, 10, 11, 28, 40, 41])
    given = {
        "read_index": [slots],
        "cu_seq_lens_k": {"full_attention": torch.tensor([0, 5, 7, 7], dtype=torch.int32)},
        "max_length_k": {"full_attention": 5},
    }
    first = paged._find_pages(cache, full, 1, given)
    assert first["seqused_k"].tolist() == [5, 2, 0]
    assert first["block_table"][0].tolist() == [2, 7]
    assert first["block_table"][1, 0] == 10
    assert first["block_table"].dtype == torch.int32
    assert paged._find_pages(cache, full, 3, given) is first
    slots += 4
    assert paged._find_pages(cache, full, 1, given)["block_table"][0].tolist() == [3, 8]
    other = given | {"read_index": [slots + 4]}
    assert paged._find_pages(cache, full, 3, other)["block_table"][0].tolist() == [4, 9]


@pytest.mark.gpu
@pytest.mark.parametrize("rotary", [False, True])
@pytest.mark.parametrize("name", ["llama", "gemma2", "qwen3"])
def test_continuous_batching_in_cuda_graphs(name: str, rotary: bool) -> None:
    eager, ours = (model.cuda() for model in pair_of(name))
    if rotary:
        integration.patch_rotary(ours)
    prompts = draw_requests()
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    served = ours.generate_batch(
        prompts,
        generation_config=transformers.GenerationConfig(**options),
        continuous_batching_config=transformers.ContinuousBatchingConfig(
            page_size=16, num_blocks=64, max_batch_tokens=16, use_cuda_graph=True
        ),
        progress_bar=False,
    )
    tokens = {tuple(x.prompt_ids): x.generated_tokens for x in served.values()}
    for prompt in prompts:
        alone = eager.generate(torch.tensor([prompt], device="cuda"), **options)[0, len(prompt) :]
        assert tokens[tuple(prompt)] == alone.tolist()


REFUSED: dict[str, tuple[Callable[[], dict[str, Any]], type[Exception], str]] = {
    "a mask of another shape": (
        lambda: {"attention_mask": torch.ones(2, 1, TOKENS, TOKENS - 1, dtype=torch.bool)}, ArgumentError,
        r"attention_mask must be \(B, M\), or \(B or 1, H or 1, N or 1, M\) = \(2, 4, 14, 14\); got a tensor",
    ),
    "a mask of integers": (
        lambda: {"attention_mask": torch.ones(2, 1, TOKENS, TOKENS, dtype=torch.long)}, ArgumentError,
        "boolean, or of floats to add; got torch.int64",
    ),
    "a matrix beside packed sequences": (
        lambda: {
            "attention_mask": torch.rand(1, 1, TOKENS, TOKENS) < 0.5,
            "cu_seq_lens_q": torch.tensor([0, 5, TOKENS], dtype=torch.int32),
        }, ArgumentError, "cu_seq_lens_q must be None"
    ),
    "weights": (lambda: {"output_attentions": True}, ValueError, "output_attentions"),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_what_it_cannot_do_it_refuses(what: str) -> None:
    given, error, message = REFUSED[what]
    _, ours = pair_of("mistral")
    with pytest.raises(error, match=message):
        ours(ids_of(), **given())


LOWEST = torch.finfo(torch.float32).min


def table(*shape: int, seed: int = 0) -> torch.Tensor:
    """Random keys for every query, and always its own."""
    seen = torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < 0.5
    return seen | torch.eye(shape[-1], dtype=torch.bool)


def added(seen: torch.Tensor, lowest: float = LOWEST) -> torch.Tensor:
    return torch.zeros(seen.shape).masked_fill(~seen, lowest)


CAUSAL = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()
RANDOM = torch.randn(2, 4, TOKENS, TOKENS, generator=torch.Generator().manual_seed(7))
MATRICES: dict[str, tuple[torch.Tensor, torch.Tensor]] = {  # ours, and what eager adds
    "boolean": (table(2, 1, TOKENS, TOKENS), added(table(2, 1, TOKENS, TOKENS))),
    "of heads": (table(1, 4, TOKENS, TOKENS), added(table(1, 4, TOKENS, TOKENS))),
    "the lowest number": (added(table(2, 1, TOKENS, TOKENS)),) * 2,
    "infinite": (added(table(2, 1, TOKENS, TOKENS), -torch.inf),) * 2,
    "causal": (CAUSAL[None, None], added(CAUSAL[None, None])),
    "causal, added": (added(CAUSAL[None, None].expand(2, -1, -1, -1)),) * 2,
    "of keys": (added(padding("left")[:, None, None].bool()),) * 2,
    "numbers": (RANDOM + added(CAUSAL),) * 2,
    "numbers of keys": (RANDOM[:, :1, :1],) * 2,
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("what", MATRICES)
@pytest.mark.parametrize("name", ["llama", "mistral", "gpt_oss"])
def test_masks_that_are_matrices(name: str, what: str) -> None:
    eager, ours = pair_of(name)
    matrix, numbers = MATRICES[what]
    ids, results = ids_of(), []
    for model, mask in ((eager, numbers), (ours, matrix)):
        logits = model(ids, attention_mask=mask.clone(), use_cache=False).logits
        logits.sin().sum().backward()
        results.append(logits)
    close(*reversed(results))
    for (parameter, x), y in zip(eager.named_parameters(), ours.parameters()):
        assert ((x.grad - y.grad).abs().max() / (x.grad.abs().max() + 1e-6)) < 1e-3, parameter


def test_matrices_are_read_once_and_known_masks_stay_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """All layers are given the same matrix; one that is changed is read again."""
    given: list[dict[str, Any]] = []
    attend = lambda *args, **options: given.append(options) or flash_attention(*args, **options)  # noqa: E731
    monkeypatch.setitem(integration.attention.__globals__, "flash_attention", attend)
    _, ours = pair_of("llama")
    packed = torch.block_diag(torch.ones(5, 5), torch.ones(9, 9)).bool() & CAUSAL
    for seen, expected in ((CAUSAL, "causal"), (CAUSAL & CAUSAL.triu(-3), "window"), (packed, "cu_seqlens_q")):
        matrix = added(seen[None, None])
        ours(ids_of(), attention_mask=matrix, use_cache=False)
        assert all(options["mask"] is None and options["bias"] is None for options in given)
        assert given[-1]["causal"]
        assert given[-1][expected] is not None
    matrix[..., 0] = 0.0  # all see the first token
    ours(ids_of(), attention_mask=matrix, use_cache=False)
    assert given[-1]["mask"] is given[-2]["mask"]
    assert bool(given[-1]["mask"].dense()[..., 0].all())


@pytest.mark.seldom(6, 20)
def test_a_matrix_in_a_compiled_model_and_in_inference_mode() -> None:
    eager, ours = pair_of("llama")
    compiled = torch.compile(ours, backend="aot_eager", fullgraph=True)
    for matrix, numbers in (MATRICES["boolean"], MATRICES["numbers"]):
        wanted = eager(ids_of(), attention_mask=numbers, use_cache=False).logits
        close(compiled(ids_of(), attention_mask=matrix, use_cache=False).logits, wanted)
        with torch.inference_mode():
            close(ours(ids_of(), attention_mask=matrix.clone(), use_cache=False).logits, wanted)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_tokens_behind_a_gap(cache: str) -> None:
    """A gap in a prompt stays one while tokens are generated."""
    eager, ours = pair_of("llama")
    mask = torch.tensor([[1, 1, 0, 0, 1, 1, 1], [1] * 7, [0, 1, 0, 1, 1, 1, 1]])
    options = {"attention_mask": mask, "max_new_tokens": 5, "do_sample": False, "cache_implementation": cache}
    assert torch.equal(ours.generate(ids_of(3, 7), **options), eager.generate(ids_of(3, 7), **options))


BIASED = {
    "vocab_size": 61, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_decoder_layers": 2,
    "num_heads": 4, "relative_attention_num_buckets": 8, "relative_attention_max_distance": 12, "pad_token_id": 0,
    "decoder_start_token_id": 1, "eos_token_id": None, "dropout_rate": 0.0,
}  # fmt: skip


@pytest.fixture(params=["T5", "MT5", "SwitchTransformers"])
def biased(request: pytest.FixtureRequest) -> tuple[Model, Model]:
    """A random model twice whose layers add a bias by position: with ``eager`` attention, and with ours."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{request.param}Config")(**BIASED)
    kind = getattr(transformers, f"{request.param}ForConditionalGeneration")
    eager = kind._from_config(config, attn_implementation="eager").eval()
    for parameter in eager.parameters():
        torch.nn.init.normal_(parameter, std=0.3 if parameter.dim() > 1 else 1.0)
    ours = kind._from_config(copy.deepcopy(config), attn_implementation="warploom").eval()
    ours.load_state_dict(eager.state_dict())
    return eager, ours


@pytest.mark.sample(3)
@pytest.mark.parametrize("side", ["none", "left", "right"])
def test_biases_by_position(biased: tuple[Model, Model], side: str) -> None:
    """Of T5's encoder and decoder; gradients of the table of biases are among those of all parameters."""
    ids, targets = ids_of(), ids_of(2, 9, seed=5)
    there = torch.ones_like(ids) if side == "none" else padding(side)
    results = []
    for model in biased:
        logits = model(ids, attention_mask=there, decoder_input_ids=targets, use_cache=False).logits
        logits.sin().sum().backward()
        results.append(logits)
    close(*reversed(results))
    for (parameter, x), y in zip(*(model.named_parameters() for model in biased)):
        if x.grad is not None:
            assert ((x.grad - y[1].grad).abs().max() / (x.grad.abs().max() + 1e-6)) < 1e-3, parameter


@pytest.mark.sample(3)
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("side", ["none", "left"])
def test_tokens_of_models_with_biases(biased: tuple[Model, Model], side: str, cache: str) -> None:
    ids = ids_of(2, 7)
    options = {"max_new_tokens": 6, "do_sample": False, "cache_implementation": cache}
    if side == "left":
        options["attention_mask"] = padding("left", 2, 7)
    wanted, got = (model.generate(ids, **options) for model in biased)
    assert torch.equal(got, wanted)


@pytest.mark.parametrize("queries", [TOKENS, 3, 1])
def test_a_bias_beside_packed_sequences_and_windows(queries: int) -> None:
    """Where a `Visible` packs sequences or reorders keys, a bias has their places."""
    bias = RANDOM[:, :, :queries]
    q, k, v = torch.randn(3, 2, 4, TOKENS, 8).unbind()
    q = q[:, :, :queries]
    given = (padding("left"), padding("right"), None) if queries == TOKENS else (padding("left"), None)
    for there in given:
        for kind in ("causal", "sliding_window_causal", "bidirectional"):
            cache = None if queries == TOKENS else Cache(TOKENS - queries, TOKENS)
            if kind == "bidirectional" and cache is not None:
                continue
            positions = PACKED if there is None and cache is None and kind != "bidirectional" else None
            extra = {} if kind == "bidirectional" else {"position_ids": positions}
            seen, visible = masks_of(kind, queries, there, cache, **extra)
            got, _ = integration.attention(torch.nn.Module(), q, k, v, visible, position_bias=bias)
            logits = (q @ k.mT * 8**-0.5 + bias).masked_fill(~seen[:, None], -torch.inf)
            wanted = (logits.softmax(-1).nan_to_num(0.0) @ v).transpose(1, 2)
            real = torch.ones(2, queries, dtype=torch.bool) if there is None else there[:, -queries:].bool()
            close(got[real], wanted[real])


def test_dropout_is_refused() -> None:
    _, ours = pair_of("llama", attention_dropout=0.1)
    ours(ids_of())
    with pytest.raises(ArgumentError, match="dropout"):
        ours.train()(ids_of())


class Cache:
    """As much of a cache as masks ask for: where queries begin, and how many keys there are from which."""

    is_compileable = False

    def __init__(self, q_offset: int | torch.Tensor, kv_length: int, kv_offset: int = 0) -> None:
        self.q_offset, self.sizes = q_offset, (kv_length, kv_offset)

    def get_query_offset(self, layer_idx: int = 0) -> int | torch.Tensor:
        return self.q_offset

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return self.sizes


def masks_of(
    kind: str, tokens: int, there: torch.Tensor | None, cache: Any = None, device: Any = "cpu", **given: Any
) -> tuple[Any, Any]:
    """A mask of transformers as a boolean matrix (B, N, M), and as ours."""
    create = getattr(masking_utils, f"create_{kind}_mask")
    config = transformers.LlamaConfig(**GROUPED)
    config.sliding_window, config.attention_chunk_size = WINDOW, 4
    made = []
    for name in ("eager", "warploom"):
        config._attn_implementation = name
        cache_name = next(n for n in ("cache", "past_key_values") if n in inspect.signature(create).parameters)
        given[cache_name] = cache
        x = torch.zeros(2, tokens, 1, device=device)
        made.append(create(config, inputs_embeds=x, attention_mask=there, **given))
    full = torch.ones(2, tokens, tokens, dtype=torch.bool)
    return full if made[0] is None else made[0][:, 0].cpu() == 0, made[1]


def seen_by(visible: Any, batch: int, queries: int, keys: int, device: Any = "cpu") -> torch.Tensor:
    """The keys that each query sees, (B, N, M): those whose values come out of attention."""
    q, k = (torch.zeros(batch, 1, n, 16, device=device) for n in (queries, keys))
    v = torch.eye(keys, device=device).repeat(batch, 1, 1, 1)
    return (integration.attention(torch.nn.Module(), q, k, v, visible)[0][:, :, 0] > 0).cpu()


PACKED = torch.stack([torch.cat([torch.arange(n) for n in ns]) for ns in ((6, 8), (1, 5, 8))])
KINDS = ("causal", "sliding_window_causal", "chunked_causal", "bidirectional", "bidirectional_sliding_window")


@pytest.mark.parametrize("kind", KINDS)
def test_masks_are_what_their_function_shows(kind: str, device: torch.device) -> None:
    """With padding, packed sequences, and caches that hold more than is used or begin later."""
    caches = [
        (TOKENS, None), (1, Cache(13, 14)), (1, Cache(13, WINDOW, 14 - WINDOW)), (3, Cache(11, 14)),
        (1, Cache(torch.tensor(9), 14)), (4, Cache(torch.tensor(0), 14)),
    ]  # fmt: skip
    nothing = torch.stack((torch.zeros(14), torch.ones(14))).long()
    for there in (None, padding("left"), padding("right"), nothing):
        for tokens, cache in caches:
            if cache is not None and kind.startswith("bidirectional"):
                continue
            wanted, visible = masks_of(kind, tokens, there, cache, device)
            got = seen_by(visible, 2, *wanted.shape[1:], device)
            real = torch.ones(2, tokens, dtype=torch.bool)
            if there is not None and kind != "bidirectional":  # padded queries count nowhere
                offset = 0 if cache is None else int(cache.q_offset)
                real = there[:, offset : offset + tokens].bool()
                assert not got[~real].any()
            assert torch.equal(got[real], wanted[real]), (there, tokens, cache and cache.__dict__)
    if not kind.startswith("bidirectional"):
        wanted, visible = masks_of(kind, TOKENS, None, None, device, position_ids=PACKED.to(device))
        assert torch.equal(seen_by(visible, 2, TOKENS, TOKENS, device), wanted)


def test_masks_that_a_function_changes() -> None:
    """What comes down to another mask is that; the rest is a mask by tiles."""
    wanted, visible = masks_of("causal", TOKENS, None, or_mask_function=lambda b, h, q, k: k < TOKENS)
    assert not visible.causal
    assert torch.equal(seen_by(visible, 2, TOKENS, TOKENS), wanted)
    images = torch.full((2, TOKENS), -1)
    images[1, 3:6] = 0  # see themselves in both directions
    for given in (
        {"or_mask_function": lambda b, h, q, k: k < 3},
        {"and_mask_function": lambda b, h, q, k: (q != 9) | (k != 4)},
        {"block_sequence_ids": images},
    ):
        for there in (None, padding("left"), PLACES["gaps"]["attention_mask"]):
            wanted, visible = masks_of("causal", TOKENS, there, **given)
            assert visible.mask is not None
            real = wanted.any(-1)
            assert torch.equal(seen_by(visible, 2, TOKENS, TOKENS)[real], wanted[real])


def test_any_table_of_a_mask() -> None:
    """Masks of a few tokens, plain ones and such as differ in one pair."""
    draw, tiles = random.Random(0), 0
    for _ in range(150):
        queries = draw.randint(1, 5)
        offset = draw.choice([0, 0, 2])
        keys = queries + offset + draw.choice([0, 0, 1])
        q, k = torch.arange(queries)[:, None] + offset, torch.arange(keys)[None]
        left, right, chunk = (draw.choice([0, 1, 2, 9]) for _ in range(3))
        table = ((q - k <= left) & (k - q <= right)).expand(2, -1, -1).clone()
        if draw.random() < 0.5:
            table &= q // (chunk + 1) == k // (chunk + 1)
        if draw.random() < 0.5:
            table[draw.randrange(2), draw.randrange(queries), draw.randrange(keys)] ^= True
        function = lambda b, h, q, k, table=table, offset=offset: table[b, q - offset, k]  # noqa: E731
        visible = integration.mask(2, queries, keys, offset, mask_function=function)
        tiles += visible.mask is not None
        assert torch.equal(seen_by(visible, 2, queries, keys), table), table
    assert 20 < tiles < 90


def test_masks_without_tensors_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    masks_of("sliding_window_causal", 11, None)
    read, calls = masking_utils.sdpa_mask, []
    monkeypatch.setattr(masking_utils, "sdpa_mask", lambda *a, **o: calls.append(a) or read(*a, **o))
    masks_of("sliding_window_causal", 11, padding("left", 2, 11))
    assert len(calls) == 1  # that of eager
    masks_of("sliding_window_causal", 11, None, position_ids=torch.arange(22).view(2, 11) % 7)
    assert len(calls) == 3


def test_long_masks_are_read_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("warploom.integrations.transformers.masks._PAIRS", 64)
    wanted, visible = masks_of("chunked_causal", TOKENS, padding("left"), position_ids=None)
    real = padding("left").bool()
    assert torch.equal(seen_by(visible, 2, TOKENS, TOKENS)[real], wanted[real])


def test_keys_that_the_mask_does_not_know_are_refused() -> None:
    """Of a layer that adds some: compressed keys, a memory."""
    visible = masks_of("causal", 6, None)[1]
    q, k = torch.randn(2, 4, 6, 16), torch.randn(2, 2, 9, 16)
    with pytest.raises(ArgumentError, match="of 6 queries and 9 keys, which Module has; got 6 and 6"):
        integration.attention(torch.nn.Module(), q, k, k, visible)
    with pytest.raises(ArgumentError, match="of 5 queries and 6 keys"):
        integration.attention(torch.nn.Module(), q[:, :, :5], k[:, :, :6], k[:, :, :6], visible)
    sizes = {
        "vocab_size": 61, "hidden_size": 32, "moe_intermediate_size": 16, "num_hidden_layers": 1,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "q_lora_rank": 8, "o_lora_rank": 8,
        "o_groups": 2, "num_experts_per_tok": 1, "n_routed_experts": 2, "sliding_window": 5, "index_n_heads": 2,
        "index_head_dim": 16, "index_topk": 4, "layer_types": ["compressed_sparse_attention"],
        "mlp_layer_types": ["moe"], "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    config = transformers.DeepseekV4Config(**sizes)
    model = transformers.DeepseekV4ForCausalLM._from_config(config, attn_implementation="warploom")
    with pytest.raises(ArgumentError, match="which DeepseekV4Attention has"):
        model(ids_of(), use_cache=False)


@pytest.mark.parametrize(("family", "error"), [("Bloom", BackendError), ("Falcon", KeyError)])
def test_models_with_attention_of_their_own_say_so_once(family: str, error: type[Exception]) -> None:
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1, "vocab_size": 61}
    kind = getattr(transformers, f"{family}ForCausalLM")
    config = getattr(transformers, f"{family}Config")(**sizes)
    integration._warned.clear()

    def run() -> None:
        kind._from_config(config, attn_implementation="warploom")(ids_of())

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            with pytest.raises(error):
                run()
    said = [str(w.message) for w in caught if "does not use" in str(w.message)]
    assert len(said) == 1
    assert said[0].startswith(f"{family}ForCausalLM")


@pytest.mark.parametrize("name", ["eager", "my_flash"])
def test_names_that_transformers_takes_for_others(name: str) -> None:
    with pytest.raises(ArgumentError, match="name"):
        integration.register(name)


def test_another_name() -> None:
    integration.register("loom")
    _, ours = pair_of("llama")
    wanted = ours(ids_of()).logits
    ours.set_attn_implementation("loom")
    assert torch.equal(ours(ids_of()).logits, wanted)
    transformers.AttentionInterface._global_mapping.pop("loom")
    transformers.AttentionMaskInterface._global_mapping.pop("loom")


@pytest.mark.sample(3)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", ["llama", "qwen3", "phi", "gpt_neox"])
def test_rotary_positions(name: str, place: str) -> None:
    eager, ours = pair_of(name)
    assert integration.patch_rotary(ours) == 1
    assert integration.patch_rotary(ours) == 1  # and again
    ids, given = ids_of(), PLACES[place]
    wanted, loss = loss_of(eager, ids, given)
    loss.backward()
    got, loss = loss_of(ours, ids, given)
    loss.backward()
    close(got, wanted)
    for x, y in zip(eager.parameters(), ours.parameters()):
        assert ((x.grad - y.grad).abs().max() / (x.grad.abs().max() + 1e-6)) < 1e-3


@pytest.mark.seldom(4, 8)
def test_rotary_positions_of_generated_tokens_and_compiled_layers() -> None:
    eager, ours = pair_of("llama", rope_parameters={"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4})
    integration.patch_rotary(ours)
    ids, options = ids_of(2, 7), {"max_new_tokens": 5, "do_sample": False}
    assert torch.equal(ours.generate(ids, **options), eager.generate(ids, **options))
    compiled = torch.compile(ours, backend="aot_eager")
    close(compiled(ids, use_cache=False).logits, eager(ids, use_cache=False).logits)


MLA = {
    "moe_intermediate_size": 16, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8,
    "v_head_dim": 8, "head_dim": 8, "n_routed_experts": 2, "num_experts_per_tok": 1, "n_group": 1, "topk_group": 1,
    "first_k_dense_replace": 2,
}  # fmt: skip
SECTIONS = {
    "head_dim": 16,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]},
}
TURNED: dict[str, tuple[str, dict[str, Any]]] = {
    "neighbouring pairs": ("Cohere", GROUPED),
    "neighbouring pairs that become halves": ("DeepseekV3", {**COMMON, **MLA}),
    "half of the cosines": MODELS["gpt_oss"],
    "two embeddings": ("Gemma3Text", {**GROUPED, "head_dim": 16, "sliding_window": WINDOW, "layer_types": [
        "sliding_attention", "full_attention"]}),
    "three axes in sections": ("Qwen2_5_VLText", {**GROUPED, **SECTIONS, "hidden_size": 64}),
    "three axes in turns": ("Qwen3VLText", {**GROUPED, **SECTIONS}),
    "three axes of a part of the features": ("Qwen3_5Text", {
        **GROUPED, "head_dim": 32, "layer_types": ["full_attention"] * 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5,
                            "mrope_section": [4, 2, 2], "mrope_interleaved": True}}),
}  # fmt: skip


@pytest.mark.parametrize("what", TURNED)
def test_rotary_positions_of_other_forms(what: str) -> None:
    """And back: `unpatch_rotary` gives the model what it had."""
    family, options = TURNED[what]
    torch.manual_seed(0)
    model = transformers.AutoModel.from_config(getattr(transformers, f"{family}Config")(**options)).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3 if parameter.dim() > 1 else 1.0)
    ids, names = ids_of(), set(model.state_dict())
    given: list[dict[str, Any]] = [{}, {"position_ids": torch.arange(TOKENS).expand(2, -1) + 3}]
    if "axes" in what:
        draw = torch.Generator().manual_seed(4)
        given.append({"position_ids": torch.randint(0, 30, (3, 2, TOKENS), generator=draw)})
    wanted = [model(ids, **each, use_cache=False).last_hidden_state for each in given]
    embeddings = [m for m in model.modules() if "Rotary" in type(m).__name__]
    assert integration.patch_rotary(model) == 1
    assert not torch.equal(model(ids, use_cache=False).last_hidden_state, wanted[0])  # other roundings
    for each, x in zip(given, wanted):
        close(model(ids, **each, use_cache=False).last_hidden_state / x.abs().max(), x / x.abs().max())
    assert set(model.state_dict()) == names
    assert integration.unpatch_rotary(model) == 1
    assert [m for m in model.modules() if "Rotary" in type(m).__name__] == embeddings
    assert torch.equal(model(ids, use_cache=False).last_hidden_state, wanted[0])
    assert integration.unpatch_rotary(model) == 0


def test_rotary_positions_that_it_cannot_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing has been changed after an error."""
    with pytest.raises(ArgumentError, match="with a rotary embedding"):
        integration.patch_rotary(torch.nn.Linear(2, 2))
    _, ours = pair_of("llama", rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4})
    with pytest.raises(ArgumentError, match="one of default"):
        integration.patch_rotary(ours)
    _, ours = pair_of("qwen3")
    file = sys.modules[type(ours).__module__]
    backwards = lambda q, k, cos, sin, unsqueeze_dim=1: turn(q, k, cos, -sin, unsqueeze_dim)  # noqa: E731
    turn = getattr(file.apply_rotary_pos_emb, "of_cosines", file.apply_rotary_pos_emb)
    monkeypatch.setattr(file, "apply_rotary_pos_emb", backwards)
    modules = list(ours.modules())
    with pytest.raises(ArgumentError, match=r"pairs \(f, f"):
        integration.patch_rotary(ours)
    assert list(ours.modules()) == modules
    assert file.apply_rotary_pos_emb is backwards


@pytest.mark.sample(3)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", ["llama", "gpt_oss"])
def test_attention_and_rotary_positions_at_once(name: str, place: str) -> None:
    eager, _ = pair_of(name)
    ours = copy.deepcopy(eager)
    assert integration.apply(ours) is ours
    integration.apply(ours)  # and again
    assert ours.config._attn_implementation == "warploom"
    assert sum(type(module).__name__ == "PatchedRotary" for module in ours.modules()) == 1
    wanted, got = (loss_of(model, ids_of(), PLACES[place])[0] for model in (eager, ours))
    close(got, wanted)
    if place == "plain":
        options = {"max_new_tokens": 6, "do_sample": False}
        assert torch.equal(ours.generate(ids_of(), **options), eager.generate(ids_of(), **options))
        integration.unpatch_rotary(ours)
        ours.set_attn_implementation("eager")
        assert torch.equal(loss_of(ours, ids_of(), {})[0], wanted)


def test_models_that_attention_and_rotary_positions_cannot_be_applied_to() -> None:
    with pytest.raises(DtypeError, match="apply: model must be a model of transformers; got Linear"):
        integration.apply(torch.nn.Linear(2, 2))
    sizes = {"num_attention_heads": 2, "num_hidden_layers": 1, "vocab_size": 61}
    bloom = transformers.BloomForCausalLM(transformers.BloomConfig(hidden_size=16, **sizes))
    with pytest.raises(ArgumentError, match="uses transformers' attention interface; got BloomForCausalLM"):
        integration.apply(bloom)
    gpt2 = transformers.GPT2LMHeadModel(transformers.GPT2Config(hidden_size=16, **sizes))
    before = gpt2.config._attn_implementation
    with pytest.raises(ArgumentError, match="with a rotary embedding"):
        integration.apply(gpt2)
    assert gpt2.config._attn_implementation == before


@pytest.mark.parametrize("after", [False, True])
def test_rotary_frequencies_of_a_model_that_is_cast(after: bool) -> None:
    """Before the patch or after it: they stay in float32."""
    _, ours = pair_of("llama")
    exact = ours.model.rotary_emb.inv_freq.clone()
    ours = ours if after else ours.bfloat16()
    integration.patch_rotary(ours)
    ours.bfloat16()
    turn, _ = ours.model.rotary_emb(torch.zeros(1, 1, 32, dtype=torch.bfloat16), torch.tensor([[1000]]))
    assert torch.equal(turn.theta, exact)
    assert ours(ids_of()).logits.dtype == torch.bfloat16


def test_rotary_positions_of_copies() -> None:
    """A copy reads its own frequencies; a pickled model turns in a process where none was patched."""
    eager, ours = pair_of("llama")
    integration.patch_rotary(ours)
    twin = copy.deepcopy(ours)
    for model in (eager, twin):
        model.model.rotary_emb.inv_freq.mul_(0.5)
    close(twin(ids_of()).logits, eager(ids_of()).logits)
    pickled = pickle.dumps(ours)
    file = sys.modules[type(ours).__module__]
    file.apply_rotary_pos_emb = file.apply_rotary_pos_emb.of_cosines
    assert torch.equal(pickle.loads(pickled)(ids_of()).logits, ours(ids_of()).logits)


def test_the_example_of_a_trainer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its loss falls as with attention and positions of transformers."""
    pytest.importorskip("accelerate")
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "examples"))
    monkeypatch.setattr(sys, "argv", ["trainer.py"])
    import trainer

    quick = ["--steps", "12", "--width", "32", "--batch", "4", "--length", "64", "--output", str(tmp_path)]
    losses = [trainer.main([*quick, "--attention", name]) for name in ("warploom", "eager")]
    assert losses[0] < 5.2  # of ln 256 = 5.55
    assert abs(losses[0] - losses[1]) < 1e-3
