"""warploom's attention in models of transformers: logits, gradients and tokens equal to those of ``eager``."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from warploom.errors import ArgumentError, BackendError

transformers = pytest.importorskip("transformers", minversion="5")

from warploom.integrations import transformers as integration  # noqa: E402

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
    transformers.AttentionInterface._global_mapping.pop("warploom", None)
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
}


def close(got: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(got, wanted, rtol=2e-4, atol=2e-4)


def loss_of(model: Model, ids: torch.Tensor, given: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of the tokens that are there, and a loss of all of them."""
    logits = model(ids, **given, use_cache=False).logits
    there = given.get("attention_mask", torch.ones_like(ids)).bool()
    weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(3))
    return logits[there], (logits * weights)[there].sum()


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


def test_full_attention_of_a_decoder() -> None:
    eager, ours = pair_of("llama", is_causal=False)
    ids = ids_of()
    mask = padding("left")
    wanted = eager(ids, attention_mask=mask, use_cache=False).logits[mask.bool()]
    close(ours(ids, attention_mask=mask, use_cache=False).logits[mask.bool()], wanted)


@pytest.mark.sample(2)
@pytest.mark.parametrize("place", PLACES)
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
def test_a_compiled_step_with_a_static_cache(side: str) -> None:
    """As ``generate`` compiles it on a GPU: masks are made ahead, and the step is one graph."""
    eager, ours = pair_of("llama")
    ids = ids_of(2, 7)
    mask = torch.ones_like(ids) if side == "none" else padding(side, 2, 7)
    options = {"attention_mask": mask, "max_new_tokens": 4, "do_sample": False, "cache_implementation": "static"}
    wanted = eager.generate(ids, **options)
    step = torch.compile(ours.forward, backend="aot_eager", fullgraph=True)
    forward = ours.forward

    def call(*args: Any, **kwargs: Any) -> Any:
        is_step = kwargs["input_ids"].shape[1] == 1
        return (step if is_step else forward)(*args, **kwargs)

    ours.forward = call
    assert torch.equal(ours.generate(ids, **options), wanted)


REFUSED: dict[str, tuple[Callable[[], dict[str, Any]], type[Exception], str]] = {
    "a mask of another shape": (
        lambda: {"attention_mask": torch.ones(2, 1, TOKENS, TOKENS, dtype=torch.bool).tril()}, ArgumentError,
        "attention_mask must be",
    ),
    "weights": (lambda: {"output_attentions": True}, ValueError, "output_attentions"),
    "gaps": (
        lambda: {"attention_mask": torch.tensor([[1] * 7 + [0] * 2 + [1] * 5] * 2)}, ArgumentError, "without gaps"
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_what_it_cannot_do_it_refuses(what: str) -> None:
    given, error, message = REFUSED[what]
    _, ours = pair_of("mistral")
    with pytest.raises(error, match=message):
        ours(ids_of(), **given())


def test_dropout_is_refused() -> None:
    _, ours = pair_of("llama", attention_dropout=0.1)
    ours(ids_of())
    with pytest.raises(ArgumentError, match="dropout"):
        ours.train()(ids_of())


def test_masks_that_a_function_changes_are_refused() -> None:
    from transformers.masking_utils import create_causal_mask

    _, ours = pair_of("llama")
    arguments = (ours.config, torch.zeros(2, TOKENS, 32), None, None)
    create_causal_mask(*arguments)
    with pytest.raises(BackendError, match="cannot do the mask"):
        create_causal_mask(*arguments, or_mask_function=lambda batch, head, q, k: k < 3)
    with pytest.raises(BackendError, match="cannot do the mask"):
        create_causal_mask(*arguments, block_sequence_ids=torch.zeros(2, TOKENS, dtype=torch.long))


def test_chunks_that_hold_the_sequence_are_causal() -> None:
    from transformers.masking_utils import create_chunked_causal_mask

    _, ours = pair_of("llama")
    arguments = (ours.config, torch.zeros(2, TOKENS, 32), None, None)
    ours.config.attention_chunk_size = TOKENS
    assert create_chunked_causal_mask(*arguments).causal
    ours.config.attention_chunk_size = TOKENS - 1
    with pytest.raises(BackendError, match="cannot do the mask"):
        create_chunked_causal_mask(*arguments)


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


def test_rotary_positions_of_generated_tokens_and_compiled_layers() -> None:
    eager, ours = pair_of("llama", rope_parameters={"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4})
    integration.patch_rotary(ours)
    ids, options = ids_of(2, 7), {"max_new_tokens": 5, "do_sample": False}
    assert torch.equal(ours.generate(ids, **options), eager.generate(ids, **options))
    compiled = torch.compile(ours, backend="aot_eager")
    close(compiled(ids, use_cache=False).logits, eager(ids, use_cache=False).logits)


def test_rotary_positions_that_it_cannot_turn() -> None:
    with pytest.raises(ArgumentError, match="with a rotary embedding"):
        integration.patch_rotary(torch.nn.Linear(2, 2))
    _, ours = pair_of("llama", rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4})
    with pytest.raises(ArgumentError, match="one of default"):
        integration.patch_rotary(ours)
    config = transformers.CohereConfig(**GROUPED)  # neighbours are pairs
    with pytest.raises(ArgumentError, match=r"pairs \(f, f"):
        integration.patch_rotary(transformers.CohereForCausalLM(config))


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
