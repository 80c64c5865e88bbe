"""Delta rules of transformers' models by ours: logits, gradients and tokens equal to those of their own."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from warploom.errors import ArgumentError, ShapeError

transformers = pytest.importorskip("transformers", minversion="5.23")

from warploom.integrations import transformers as integration  # noqa: E402
from warploom.integrations.transformers import delta  # noqa: E402
from warploom.integrations.transformers.unrotated import ENDING  # noqa: E402

Model = Any
COMMON = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 61,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 6,
    "head_dim": 8,
}
MIXTURE = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "qwen3_next": (
        "Qwen3NextConfig",
        "Qwen3NextForCausalLM",
        {**LINEAR, **MIXTURE, "num_experts": 4, "shared_expert_intermediate_size": 16},
    ),
    "qwen3_5": ("Qwen3_5TextConfig", "Qwen3_5ForCausalLM", LINEAR),
    "olmo_hybrid": ("OlmoHybridConfig", "OlmoHybridForCausalLM", LINEAR),
    "kimi_linear": (
        "KimiLinearConfig",
        "KimiLinearForCausalLM",
        {
            **MIXTURE,
            "layer_types": ["linear_attention"] * 3 + ["full_attention"],
            "num_local_experts": 4,
            "linear_num_heads": 2,
            "linear_head_dim": 8,
            "kv_lora_rank": 8,
            "qk_rope_head_dim": 4,
            "qk_nope_head_dim": 8,
            "v_head_dim": 8,
            "num_key_value_heads": 4,
        },
    ),
}
models = pytest.mark.parametrize("name", MODELS)


@pytest.fixture(autouse=True)
def _registered() -> Iterator[None]:
    yield
    for name in ("warploom", "warploom" + ENDING):
        transformers.AttentionInterface._global_mapping.pop(name, None)
    transformers.AttentionMaskInterface._global_mapping.pop("warploom", None)


def pair_of(name: str) -> tuple[Model, Model]:
    """One random model twice: with its own functions, and with ours."""
    config, kind, options = MODELS[name]
    torch.manual_seed(0)
    made = getattr(transformers, config)(**{**COMMON, **options})
    own = getattr(transformers, kind)._from_config(made, attn_implementation="eager").eval()
    for (
        parameter_name,
        parameter,
    ) in own.named_parameters():  # first weights are small, and hide what attention does
        if not parameter_name.endswith(("A_log", "dt_bias")):
            torch.nn.init.normal_(parameter, std=0.3 if parameter.dim() > 1 else 1.0)
    return own, integration.apply(copy.deepcopy(own))


def ids_of(batch: int = 2, tokens: int = 14) -> torch.Tensor:
    return torch.randint(2, COMMON["vocab_size"], (batch, tokens), generator=torch.Generator().manual_seed(1))


def close(got: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(got, wanted, rtol=5e-4, atol=5e-4)


@models
@torch.no_grad()
def test_logits_and_tokens(name: str) -> None:
    own, ours = pair_of(name)
    assert sum(map(delta.is_patched, ours.modules())) == 3
    assert not any(map(delta.is_patched, own.modules()))
    ids = ids_of()
    close(ours(ids).logits, own(ids).logits)
    left = torch.ones_like(ids)
    left[1, :5] = 0
    for mask in (torch.ones_like(ids), left):
        options = {"attention_mask": mask, "max_new_tokens": 6, "do_sample": False}
        assert torch.equal(ours.generate(ids, **options), own.generate(ids, **options))


@models
@torch.no_grad()
def test_a_prompt_in_several_parts(name: str) -> None:
    results = []
    for model in pair_of(name):
        cache = transformers.DynamicCache(config=model.config)
        parts = [model(part, past_key_values=cache).logits for part in ids_of().split((6, 1, 6, 1), 1)]
        results.append(torch.cat(parts, 1))
    close(results[1], results[0])


def test_gradients() -> None:
    own, ours = pair_of("qwen3_5")
    for model in (own, ours):
        model(ids_of(), labels=ids_of()).loss.backward()
    for (name, one), other in zip(own.named_parameters(), ours.parameters(), strict=True):
        scale = one.grad.abs().max() + 1e-6
        assert ((one.grad - other.grad).abs().max() / scale) < 2e-3, name


@pytest.mark.sample(4)
@models
@torch.no_grad()
@pytest.mark.seldom(4, 33)
def test_compiled_models(name: str) -> None:
    """With a cache; what is compiled calls our functions, not those of the module that the layer is from."""
    _, ours = pair_of(name)
    ids, called = ids_of(1), torch.compile(ours, backend="aot_eager")
    results = []
    for model in (ours, called):
        cache = transformers.DynamicCache(config=ours.config)
        parts = [model(part, past_key_values=cache).logits for part in ids.split((12, 1, 1), 1)]
        results.append(torch.cat(parts, 1))
    torch._dynamo.reset()
    close(results[1], results[0])


@models
@torch.no_grad()
def test_packed_sequences_fill_a_cache_that_no_batch_continues(name: str) -> None:
    """It has a state for each of them, and one row of keys."""
    _, ours = pair_of(name)
    ids, bounds = ids_of(1), torch.tensor([0, 5, 14], dtype=torch.int32)
    positions = torch.cat([torch.arange(n) for n in (5, 9)])[None]
    lengths = {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": 9, "max_length_k": 9}
    cache = transformers.DynamicCache(config=ours.config)
    packed = ours(ids, position_ids=positions, past_key_values=cache, **lengths).logits
    close(packed, ours(ids, position_ids=positions, use_cache=False, **lengths).logits)
    with pytest.raises(ShapeError, match="delta_attention: initial_state must be"):
        ours(ids[:, :1], position_ids=positions[:, -1:] + 1, past_key_values=cache)


@torch.no_grad()
def test_packed_sequences_are_each_alone() -> None:
    """Which their own functions refuse without another package."""
    _, ours = pair_of("qwen3_next")
    ids, bounds = ids_of(1), torch.tensor([0, 5, 14], dtype=torch.int32)
    positions = torch.cat([torch.arange(n) for n in (5, 9)])[None]
    lengths = {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": 9, "max_length_k": 9}
    packed = ours(ids, position_ids=positions, use_cache=False, **lengths).logits
    close(packed[:, 5:], ours(ids[:, 5:], use_cache=False).logits)


@torch.no_grad()
def test_copies_and_the_way_back() -> None:
    own, ours = pair_of("qwen3_5")
    wanted = ours(ids_of()).logits
    for copied in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        assert sum(map(delta.is_patched, copied.modules())) == 3
        assert torch.equal(copied(ids_of()).logits, wanted)
    assert integration.patch_delta(ours) == 3  # again
    assert integration.unpatch_delta(ours) == 3
    assert integration.unpatch_delta(ours) == 0
    assert [type(m) for m in own.model.layers.modules()] == [type(m) for m in ours.model.layers.modules()]


def test_other_activations_and_marks_of_sequences() -> None:
    x, weight = torch.randn(1, 3, 7), torch.randn(3, 4)
    close(delta.convolve(x, weight, activation="gelu"), torch.nn.functional.gelu(delta.convolve(x, weight)))
    with pytest.raises(ArgumentError, match="seq_idx"):
        delta.convolve(x, weight, seq_idx=torch.zeros(1, 7, dtype=torch.int32))


def test_a_function_that_computes_something_else_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.qwen3_5 import modeling_qwen3_5 as file

    own, _ = pair_of("qwen3_5")
    monkeypatch.setattr(file, "causal_conv1d_fn", lambda x, *rest, **more: 2 * x)
    delta._patched.cache_clear()
    with pytest.raises(ArgumentError, match="causal_conv1d_fn computes"):
        integration.patch_delta(own)
    assert not any(map(delta.is_patched, own.modules()))
    delta._patched.cache_clear()
