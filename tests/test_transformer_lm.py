"""The language model: what it computes, that its variants agree, decoding, sampling and files."""

import dataclasses
import itertools
import json
import sys
from functools import partial
from pathlib import Path

import pytest
import seeds
import torch
from torch.utils.flop_counter import FlopCounterMode

from warploom import (
    ArgumentError,
    BackendError,
    DtypeError,
    ShapeError,
    WarploomError,
    block_mask,
    flash_attention,
    lrpe_rotate,
)
from warploom.nn import PageTable, TransformerConfig, TransformerLM, attention
from warploom.nn.transformer_lm import SIZES, _sample
from warploom.runtime.backend import HAS_TRITON

VOCABULARY = 61
HYBRID = ("delta", "flash")
TINY = {
    "vocab_size": VOCABULARY,
    "context_length": 48,
    "d_model": 24,
    "d_ff": 40,
    "layers": 2,
    "heads": 4,
    "kv_heads": 2,
}


def make(device: torch.device | str = "cpu", **changes) -> TransformerLM:
    """A small model whose weights are large enough for every part to matter."""
    torch.manual_seed(1000 * seeds.seed() + 1)
    own = {"kv_heads": None} if changes.get("attention") in ("tpa", "linear", "delta") else {}
    model = TransformerLM(TransformerConfig(**{**TINY, **own, **changes}))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2 and parameter.std() < 0.1:
                parameter.mul_(12)
            parameter.add_(0.2 * torch.rand_like(parameter))
    return model.to(device)


def text(batch: int, tokens: int, device: torch.device | str = "cpu", seed: int = 2) -> torch.Tensor:
    generator = seeds.generator(seed)
    return torch.randint(VOCABULARY, (batch, tokens), generator=generator).to(device)


# ----------------------------------------------------------------------------------------------------------
# What it computes
# ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", SIZES)
def test_sizes_have_the_parameters_of_the_published_table(size: str) -> None:
    width, inner, layers, heads = {
        "sm": (768, 3072, 12, 12),
        "md": (1024, 4096, 24, 16),
        "lg": (1280, 5120, 36, 20),
        "xl": (1600, 6400, 48, 25),
        "2.7B": (2560, 10240, 32, 32),
    }[size]
    config = TransformerConfig.size(size)
    assert (config.heads, config.vocab_size, config.tie) == (heads, 10_000, False)
    with torch.device("meta"):
        model = TransformerLM(config)
    block = 4 * width**2 + 3 * width * inner + 2 * width
    assert model.parameter_count() == layers * block + width + 2 * 10_000 * width
    assert not model.state_dict().keys() - {name for name, _ in model.named_parameters()}


def test_logits_are_those_of_the_definition(device: torch.device) -> None:
    model = make(device, attention="plain").double()
    tokens = text(2, 11, device)
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weights[f"{name}.weight"]

    x = weights["embedding.weight"][tokens]
    for layer in range(2):
        here = f"blocks.{layer}"
        qkv = (norm(x, f"{here}.attention_norm") @ weights[f"{here}.attention.qkv.weight"].T).unflatten(-1, (8, 6))
        theta = model.blocks[layer].attention.position.theta
        q, k = (lrpe_rotate(t, theta, backend="torch") for t in (qkv[:, :, :4], qkv[:, :, 4:6]))
        k, v = (t.repeat_interleave(2, dim=2) for t in (k, qkv[:, :, 6:]))
        scores = torch.einsum("bnhd,bmhd->bhnm", q, k) / 6**0.5
        scores = scores + torch.full((11, 11), -torch.inf, dtype=torch.float64, device=device).triu(1)
        mixed = torch.einsum("bhnm,bmhd->bnhd", scores.softmax(-1), v).flatten(2)
        x = x + mixed @ weights[f"{here}.attention.out.weight"].T
        gate, up = (norm(x, f"{here}.mlp_norm") @ weights[f"{here}.mlp.gate_up.weight"].T).chunk(2, dim=-1)
        x = x + (gate * gate.sigmoid() * up) @ weights[f"{here}.mlp.down.weight"].T
    expected = norm(x, "norm") @ weights["head.weight"].T
    logits, loss = model(tokens, tokens)
    torch.testing.assert_close(logits, expected, rtol=1e-9, atol=1e-9)
    by_hand = -expected.log_softmax(-1).gather(-1, tokens[..., None]).mean()
    torch.testing.assert_close(loss.double(), by_hand, rtol=1e-5, atol=1e-5)


def test_ignored_targets_take_no_part(device: torch.device) -> None:
    model, tokens = make(device), text(2, 9, device)
    targets = text(2, 9, device, seed=5)
    targets[:, 4:] = -100
    whole = model(tokens, targets)
    half = model(tokens[:, :4], targets[:, :4])
    torch.testing.assert_close(whole.loss, half.loss, rtol=1e-5, atol=1e-6)
    assert model(tokens).loss is None


@pytest.mark.parametrize("checkpoint", [False, True])
def test_documents_of_a_mask_are_each_alone(checkpoint: bool, device: torch.device) -> None:
    model, tokens = make(device, checkpoint=checkpoint), text(2, 20, device)
    document = torch.arange(20, device=device) // 9
    mask = block_mask(lambda b, h, i, j: document[i] == document[j], N=20, M=20, device=device)
    together = model(tokens, mask=mask).logits
    alone = torch.cat([model(part).logits for part in tokens.split(9, 1)], 1)
    torch.testing.assert_close(together, alone, rtol=1e-3, atol=1e-3)
    parameters = list(model.parameters())
    found, expected = (torch.autograd.grad(x.sin().sum(), parameters) for x in (together, alone))
    for one, other in zip(found, expected):
        assert (one - other).norm() <= 1e-3 * other.norm()


@torch.no_grad()
def test_a_tree_of_tokens_behind_a_cache_is_each_of_its_paths(device: torch.device) -> None:
    """As speculative decoding checks what a smaller model proposes, all paths in one call."""
    model, prompt, proposed = make(device), text(2, 7, device), text(2, 5, device, seed=3)
    parents = [-1, 0, 0, 1, 2]  # two paths behind the first token
    paths: list[list[int]] = []
    for node, parent in enumerate(parents):
        paths.append([*([] if parent < 0 else paths[parent]), node])
    seen = torch.zeros(5, 12, dtype=torch.bool, device=device)
    seen[:, :7] = True
    for node, path in enumerate(paths):
        seen[node, [7 + i for i in path]] = True
    cache = model.make_cache()
    model(prompt, cache=cache)
    places = torch.tensor([7 + len(path) - 1 for path in paths], device=device)
    logits = model(proposed, cache=cache, mask=seen[None, None], position_ids=places).logits
    for node, path in enumerate(paths):
        alone = model(torch.cat((prompt, proposed[:, path]), 1)).logits[:, -1]
        torch.testing.assert_close(logits[:, node], alone, rtol=1e-3, atol=1e-3)


def test_biases_and_slopes_reach_all_layers(device: torch.device) -> None:
    """Slopes are a bias that falls with the distance."""
    model, tokens = make(device, position="none"), text(2, 11, device)
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625], device=device)
    place = torch.arange(11, device=device)
    bias = (slopes[:, None, None] * (place - place[:, None]))[None].requires_grad_()
    logits = model(tokens, bias=bias).logits
    torch.testing.assert_close(model(tokens, alibi=slopes).logits, logits, rtol=1e-3, atol=1e-3)
    assert not torch.allclose(model(tokens).logits, logits, atol=1e-2)
    logits.sum().backward()
    assert bias.grad.abs().max() > 0
    for kind in ("sdpa", "tpa", HYBRID):
        other = make(device, attention=kind, **({"kv_heads": None} if kind == "tpa" else {}))
        for argument in ("mask", "bias", "alibi"):
            with pytest.raises(ArgumentError, match=f"{argument} must be None with attention"):
                other(tokens, **{argument: slopes})


def test_tensor_product_attention_is_attention_of_its_products(device: torch.device) -> None:
    """The same model with queries, keys and values written out from their factors."""
    model, tokens = make(device, attention="tpa", layers=1), text(2, 11, device)
    layer = model.blocks[0].attention
    x = model.blocks[0].attention_norm(model.embedding(tokens))
    made = []
    for a, b, rank in ((layer.aq, layer.bq, 6), (layer.ak, layer.bk, 2), (layer.av, layer.bv, 2)):
        rows = b(x).unflatten(-1, (rank, 6))
        if b is not layer.bv:
            rows = lrpe_rotate(rows, layer.position.theta, backend="torch")
        made.append(torch.einsum("bnhr,bnrd->bnhd", a(x).unflatten(-1, (4, rank)), rows) / rank)
    mixed = attention.plain_attention(*made, 6**-0.5, attention.causal_mask(*made[:2]))
    expected = layer.out(mixed.flatten(2))
    torch.testing.assert_close(layer(x), expected, rtol=1e-4, atol=1e-4)
    found = losses(model, device, texts=1)
    assert found[-1] < found[0] - 0.1


def losses(model: TransformerLM, device: torch.device, steps: int = 5, texts: int = 5) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    found = []
    for step in range(steps):
        tokens = text(2, 13, device, seed=step % texts)
        loss = model(tokens[:, :-1], tokens[:, 1:]).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


@pytest.mark.parametrize("position", ["rotate", "cosine", "none"])
def test_attentions_train_alike_in_float32(position: str, device: torch.device) -> None:
    found = {a: losses(make(device, attention=a, position=position), device) for a in ("plain", "flash", "sdpa")}
    assert found["plain"][0] - found["plain"][-1] > 0.1  # it learns something
    for name in ("flash", "sdpa"):
        assert found[name] == pytest.approx(found["plain"], rel=2e-4), name


@pytest.mark.skipif(not HAS_TRITON, reason="needs Triton")
@pytest.mark.parametrize(
    ("name", "position"),
    [("flash", "rotate"), ("flash", "cosine"), ("tpa", "rotate"), ("linear", "cosine"), ("delta", "rotate")],
)
def test_kernels_train_like_the_reference(
    name: str, position: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Positions, with learnable frequencies, and attention: on the GPU's kernels, or in the interpreter."""
    found = {}
    for backend in ("torch", "triton"):
        model = make(device, attention=name, layers=1, position=position, learnable_positions=name != "tpa")
        layer = model.blocks[0].attention
        if name in ("tpa", "linear", "delta"):
            layer.backend = backend
        else:
            monkeypatch.setattr(attention, "flash_attention", partial(flash_attention, backend=backend))
            layer.position.forward = partial(layer.position.forward, backend=backend)
        found[backend] = losses(model, device, steps=3)
    assert found["triton"] == pytest.approx(found["torch"], rel=1e-4)


def test_checkpointing_changes_no_gradient(device: torch.device) -> None:
    tokens = text(2, 12, device)
    gradients = []
    for again in (False, True):
        model = make(device, checkpoint=again)
        model(tokens, tokens).loss.backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("name", "position"),
    [("flash", "rotate"), ("flash", "cosine"), ("tpa", "rotate"), ("linear", "rotate"), ("delta", "none")],
)
@pytest.mark.seldom(3, 5)
def test_the_compiler_sees_one_graph(name: str, position: str, device: torch.device) -> None:
    model, tokens = make(device, attention=name, layers=1, position=position), text(2, 12, device)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    expected = model(tokens, tokens)
    got = compiled(tokens, tokens)
    torch.testing.assert_close(got.logits, expected.logits, rtol=1e-5, atol=1e-5)
    got.loss.backward()


def test_autocast_trains_in_bfloat16_with_float32_parameters(device: torch.device) -> None:
    model, tokens = make(device), text(2, 12, device)
    precise = model(tokens, tokens).loss
    with torch.autocast(device.type, torch.bfloat16):
        logits, loss = model(tokens, tokens)
    assert (logits.dtype, loss.dtype) == (torch.bfloat16, torch.float32)
    assert loss.item() == pytest.approx(precise.item(), rel=0.03)
    loss.backward()
    assert all(parameter.grad.dtype == torch.float32 for parameter in model.parameters())


@pytest.mark.parametrize(("name", "position"), [("plain", "rotate"), ("plain", "cosine"), ("tpa", "rotate")])
def test_flops_are_those_that_a_counter_finds(name: str, position: str) -> None:
    model = make(attention=name, position=position)
    n = 16
    with FlopCounterMode(display=False) as counter:
        model(text(1, n))
    features = model.config.head_dim * (3 if position == "cosine" else 2)
    unseen = 2 * 2 * 4 * features * (n - (n + 1) / 2)  # plain attention computes what the mask then hides
    if name == "tpa":  # and forms queries, keys and values of their factors by products
        ranks = model.config.rank_q + model.config.rank_k + model.config.rank_v
        unseen += 2 * 2 * 4 * model.config.head_dim * ranks
    assert counter.get_total_flops() == pytest.approx(n * (model.flops_per_token(n) + unseen))
    assert model.flops_per_token(n, training=True) == 3 * model.flops_per_token(n)


def test_flops_of_linear_attention_do_not_grow_with_length() -> None:
    for position, features in (("rotate", 6), ("cosine", 12), ("none", 6)):
        model = make(attention="linear", position=position)
        products = sum(m.weight.numel() for m in model.modules() if isinstance(m, torch.nn.Linear))
        expected = 2 * products + 2 * 4 * 4 * features * 6  # per layer and head: added to and read
        assert model.flops_per_token(10) == model.flops_per_token(1000) == expected


def test_flops_of_the_delta_rule_and_of_hybrids() -> None:
    delta, flash, both = (make(attention=a, kv_heads=None) for a in ("delta", "flash", HYBRID))
    products = sum(m.weight.numel() for m in delta.modules() if isinstance(m, torch.nn.Linear))
    assert delta.flops_per_token(10) == delta.flops_per_token(1000) == 2 * products + 2 * 2 * 4 * 3 * 6 * 6
    assert both.flops_per_token(10) == (delta.flops_per_token(10) + flash.flops_per_token(10)) / 2


def test_attention_differs_from_layer_to_layer(tmp_path: Path) -> None:
    model = make(attention=HYBRID, layers=4)
    kinds = [type(block.attention).__name__ for block in model.blocks]
    assert kinds == ["DeltaAttention", "Attention"] * 2
    with pytest.raises(ArgumentError, match="position_ids"):
        model(text(1, 3), position_ids=torch.arange(3))
    with pytest.raises(ArgumentError, match="'flash'"):
        model.make_paged_cache(PageTable(4))
    model.save(tmp_path / "model.safetensors")
    again = TransformerLM.load(tmp_path / "model.safetensors")
    assert again.config == model.config
    assert hash(again.config) == hash(model.config)


# ----------------------------------------------------------------------------------------------------------
# Decoding and sampling
# ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "position"),
    [
        *itertools.product(("flash", "plain", "sdpa"), ("rotate", "cosine", "none")),
        ("tpa", "rotate"),
        ("linear", "cosine"),
        ("delta", "rotate"),
        ("delta", "none"),
        (HYBRID, "rotate"),
    ],
)
@torch.no_grad()
def test_decoding_through_the_cache_is_the_full_forward(name: str, position: str, device: torch.device) -> None:
    model, tokens = make(device, attention=name, position=position), text(3, 20, device)
    full = model(tokens).logits
    for capacity in (None, 20):
        cache = model.make_cache(capacity)
        pieces = [
            model(tokens[:, a:b], cache=cache).logits for a, b in ((0, 7), (7, 8), (8, 13), (13, 19), (19, 20))
        ]
        torch.testing.assert_close(torch.cat(pieces, dim=1), full, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["flash", "plain", "sdpa", "tpa", "linear", "delta", HYBRID])
def test_prompts_of_different_lengths_go_on_as_each_alone(name: str, device: torch.device) -> None:
    model, prompt, lengths = make(device, attention=name), text(4, 17, device), [17, 3, 1, 11]
    together = model.generate(prompt, 6, temperature=0, lengths=lengths)
    alone = [model.generate(prompt[i : i + 1, :n], 6, temperature=0) for i, n in enumerate(lengths)]
    assert torch.equal(together, torch.cat(alone))
    # Greedy by definition: each token is the most likely after all before it.
    whole = torch.cat((prompt[:1], together[:1]), dim=1)
    assert torch.equal(model(whole).logits.argmax(-1)[0, 16:-1], together[0])


def test_sampling_is_the_generators(device: torch.device) -> None:
    model, prompt = make(device), text(3, 5, device)

    def sample(seed: int, **options: float) -> torch.Tensor:
        return model.generate(prompt, 12, generator=torch.Generator(device).manual_seed(seed), **options)

    assert torch.equal(sample(1, temperature=3.0), sample(1, temperature=3.0))
    assert not torch.equal(sample(1, temperature=3.0), sample(2, temperature=3.0))
    greedy = model.generate(prompt, 12, temperature=0)
    for nearly in ({"top_p": 1e-9}, {"temperature": 1e-40}, {"temperature": 0.0, "top_p": 0.5}):
        assert torch.equal(sample(3, **nearly), greedy)
    assert model.generate(prompt, 0).shape == (3, 0)
    assert model.generate(prompt.int(), 2).dtype == torch.int32
    assert model.training  # left as it was


def test_sequences_end_with_their_stop_tokens(device: torch.device) -> None:
    model, prompt = make(device), text(3, 5, device)
    whole = model.generate(prompt, 12, temperature=0)
    assert torch.equal(torch.stack(list(model.stream(prompt, 12, temperature=0)), 1), whole)
    first, second = int(whole[0, 3]), int(whole[1, 6])
    found = model.generate(prompt, 12, temperature=0, stop=[first, second])
    for row, expected in zip(found, whole):
        ended = torch.isin(expected, torch.tensor([first, second], device=device)).nonzero().flatten()
        end = int(ended[0]) if len(ended) else 12
        assert torch.equal(row[: end + 1], expected[: end + 1][: len(row)])
        assert (row[end:] == row[end]).all() if end < len(row) else True
    alone = model.generate(prompt[:1], 12, temperature=0, stop=first)
    assert alone.shape[1] <= 4
    assert alone[0, -1] == first
    stream = model.stream(prompt, 12, temperature=0)
    assert torch.equal(next(stream), whole[:, 0])
    assert torch.is_grad_enabled(), "the caller's mode between steps is its own"
    assert torch.equal(next(stream), whole[:, 1])
    assert not list(model.stream(prompt, 0))


def test_top_p_keeps_the_smallest_set_that_reaches_it() -> None:
    logits = torch.tensor([0.4, 0.1, 0.3, 0.2]).log().expand(20_000, -1)
    generator = seeds.generator()
    for top_p, kept in ((0.39, [0]), (0.41, [0, 2]), (0.69, [0, 2]), (0.71, [0, 2, 3]), (1.0, [0, 1, 2, 3])):
        found = torch.bincount(_sample(logits, top_p=top_p, generator=generator).flatten(), minlength=4) / len(
            logits
        )
        weights = torch.zeros(4)
        weights[kept] = torch.tensor([0.4, 0.1, 0.3, 0.2])[kept]
        torch.testing.assert_close(found, weights / weights.sum(), rtol=0, atol=0.02)
    for top_k, top_p, kept in ((1, 1.0, [0]), (2, 1.0, [0, 2]), (3, 0.69, [0, 2]), (9, 1.0, [0, 1, 2, 3])):
        options = {"top_k": top_k, "top_p": top_p, "generator": generator}
        found = torch.bincount(_sample(logits, **options).flatten(), minlength=4) / len(logits)
        weights = torch.zeros(4)
        weights[kept] = torch.tensor([0.4, 0.1, 0.3, 0.2])[kept]
        torch.testing.assert_close(found, weights / weights.sum(), rtol=0, atol=0.02)
    cold = torch.bincount(_sample(logits, 0.5, generator=generator).flatten(), minlength=4) / len(logits)
    torch.testing.assert_close(cold, torch.tensor([16, 1, 9, 4]) / 30, rtol=0, atol=0.02)


# ----------------------------------------------------------------------------------------------------------
# Files
# ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tie", [False, True])
def test_a_saved_model_comes_back(tie: bool, device: torch.device, tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    model = make(device, tie=tie, position="cosine", learnable_positions=True)
    assert (model.head.weight is model.embedding.weight) == tie
    model.save(tmp_path / "model.safetensors")
    again = TransformerLM.load(tmp_path / "model.safetensors", device=device)
    assert again.config == model.config
    assert again.parameter_count() == model.parameter_count()
    assert (again.head.weight is again.embedding.weight) == tie
    tokens = text(2, 9, device)
    assert torch.equal(again(tokens).logits, model(tokens).logits)
    plain = TransformerLM.load(tmp_path / "model.safetensors", device=device, attention="plain")
    assert plain.config == dataclasses.replace(model.config, attention="plain")
    torch.testing.assert_close(plain(tokens).logits, model(tokens).logits, rtol=1e-4, atol=1e-4)


def test_other_files_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    path = tmp_path / "model.safetensors"
    safetensors.save_file({"x": torch.zeros(1)}, path)
    with pytest.raises(WarploomError, match="not a file that TransformerLM"):
        TransformerLM.load(path)
    make().save(path)
    with pytest.raises(WarploomError, match="size mismatch"):
        TransformerLM.load(path, d_ff=41)
    with pytest.raises(WarploomError, match="there is no argument width"):
        TransformerLM.load(path, width=41)
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    with pytest.raises(BackendError, match=r"TransformerLM.load: safetensors is not installed"):
        TransformerLM.load(path)
    with pytest.raises(BackendError, match=r"pip install 'warploom\[lm\]'"):
        make().save(path)


def test_a_configuration_is_json() -> None:
    config = TransformerConfig.size("sm", position="cosine", kv_heads=4)
    assert TransformerConfig(**json.loads(json.dumps(dataclasses.asdict(config)))) == config


# ----------------------------------------------------------------------------------------------------------
# Errors
# ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"layers": 0}, "layers"),
        ({"d_model": 24.0}, "d_model"),
        ({"vocab_size": True}, "vocab_size"),
        ({"heads": 5}, "heads"),
        ({"kv_heads": 3}, "kv_heads"),
        ({"heads": 8, "kv_heads": 8}, "even for position 'rotate'"),
        ({"attention": "quick"}, "attention must be one of flash, "),
        (
            {"attention": "tpa", "kv_heads": None, "position": "cosine"},
            "position must be 'rotate' with attention 'tpa'",
        ),
        ({"attention": "tpa"}, "kv_heads must be None"),
        ({"attention": "linear"}, "kv_heads must be None"),
        ({"attention": ("linear", "delta")}, "kv_heads must be None"),
        ({"attention": "delta", "kv_heads": None, "position": "cosine"}, "position must be 'rotate' or 'none'"),
        ({"attention": ("delta", "quick")}, "attention must be one of flash, "),
        ({"attention": ("delta", "flash", "flash")}, "attention must be one name, or several whose number divides"),
        ({"attention": ()}, "attention must be one name"),
        ({"attention": "tpa", "kv_heads": None, "learnable_positions": True}, "learnable_positions must be False"),
        ({"rank_v": 0}, "rank_v"),
        ({"position": "sine"}, "position must be one of none, rotate, cosine"),
    ],
)
def test_a_wrong_configuration_is_named(changes: dict, named: str) -> None:
    with pytest.raises(ArgumentError, match=named):
        TransformerConfig(**{**TINY, **changes})


def test_an_unknown_size_is_named() -> None:
    with pytest.raises(ArgumentError, match=r"one of sm, md, lg, xl, 2.7B; got 'xs'"):
        TransformerConfig.size("xs")


def test_wrong_calls_are_named() -> None:
    model, tokens = make(), text(2, 5)
    for wrong in (tokens[0], tokens[:, :0]):
        with pytest.raises(ShapeError, match="tokens"):
            model(wrong)
    with pytest.raises(DtypeError, match="tokens"):
        model(tokens.float())
    with pytest.raises(ShapeError, match="targets"):
        model(tokens, tokens[:, 1:])
    with pytest.raises(DtypeError, match="targets"):
        model(tokens, tokens.float())
    with pytest.raises(ArgumentError, match="context_length = 48"):
        model(text(1, 49))
    with torch.no_grad():
        cache = model.make_cache()
        model(text(2, 45), cache=cache)
        with pytest.raises(ArgumentError, match="context_length = 48"):
            model(tokens, cache=cache)
        with pytest.raises(ArgumentError, match="cache must be of 2 layers"):
            model(tokens, cache=cache[:1])
    for options, named in (
        ({"max_new_tokens": 44}, "between 0 and context_length − N = 43"),
        ({"max_new_tokens": -1}, "max_new_tokens"),
        ({"max_new_tokens": 1, "temperature": -0.1}, "temperature"),
        ({"max_new_tokens": 1, "temperature": float("nan")}, "temperature"),
        ({"max_new_tokens": 1, "top_p": 0.0}, "top_p"),
        ({"max_new_tokens": 1, "top_p": 1.1}, "top_p"),
        ({"max_new_tokens": 1, "top_k": 0}, "top_k must be at least 1"),
        ({"max_new_tokens": 1, "top_k": 2.0}, "top_k must be an int"),
        ({"max_new_tokens": 1, "top_p": "most"}, "top_p must be a number"),
        ({"max_new_tokens": 1.5}, "max_new_tokens must be an int"),
        ({"max_new_tokens": 1, "temperature": "hot"}, "temperature must be a number"),
        (
            {"max_new_tokens": 1, "stop": [3, model.config.vocab_size]},
            "stop must be of tokens ≥ 0 and below vocab_size",
        ),
        ({"max_new_tokens": 1, "stop": ["."]}, "stop must be an int"),
        ({"max_new_tokens": 1, "lengths": [5]}, "lengths"),
        ({"max_new_tokens": 1, "lengths": [5, 6]}, "lengths"),
        ({"max_new_tokens": 1, "lengths": [5, 0]}, "lengths"),
    ):
        for sample in (model.generate, model.stream):  # which refuses before its first step
            with pytest.raises(WarploomError, match=named):
                sample(tokens, **options)
    with pytest.raises(DtypeError, match="prompt must be an integer tensor"):
        model.generate([1, 2], 3)
