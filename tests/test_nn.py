"""The modules below the language model: positions, attention and its cache, the feed-forward layer."""

import inspect
import json
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

import warploom
from warploom import ArgumentError, DeviceError, DtypeError, ShapeError, block_mask, lrpe_cosine, lrpe_rotate, nn
from warploom.nn import (
    LRPE,
    Attention,
    FactorCache,
    KVCache,
    PagedKVCache,
    PageTable,
    RotaryEmbedding,
    SwiGLU,
)
from warploom.ops.flash_attention import reference as definition

IMPLEMENTATIONS = ("flash", "plain", "sdpa")


def random(*shape: int, device: torch.device) -> torch.Tensor:
    return torch.randn(shape).to(device)


@pytest.mark.parametrize("name", nn.__all__)
def test_public_classes_are_documented(name: str) -> None:
    thing = getattr(nn, name)
    assert thing.__doc__
    if issubclass(thing, torch.nn.Module):
        assert "Args:" in thing.__doc__
        arguments = list(inspect.signature(thing).parameters)
        assert not [argument for argument in arguments if f"{argument}:" not in thing.__doc__]
        assert inspect.getdoc(thing.forward)


# ----------------------------------------------------------------------------------------------------------
# Positions
# ----------------------------------------------------------------------------------------------------------


def test_rotary_is_lrpe_rotate_with_its_frequencies(device: torch.device) -> None:
    x = random(2, 7, 3, 10, device=device)
    rotary = RotaryEmbedding(10, base=100.0, rotary_dim=6).to(device)
    theta = (100.0 ** (-torch.arange(3, dtype=torch.float64) / 3)).float()
    torch.testing.assert_close(rotary.theta.cpu(), theta[None], rtol=0, atol=0)
    ids = torch.tensor([5, 0, 9, 2, 2, 7, 100_000]).to(device)
    for positions in ({}, {"offset": 3}, {"offset": torch.tensor([1, 70]).to(device)}, {"position_ids": ids}):
        torch.testing.assert_close(rotary(x, **positions), lrpe_rotate(x, theta.to(device), **positions))
    interleaved = RotaryEmbedding(10, interleaved=True).to(device)
    expected = lrpe_rotate(x, interleaved.theta, interleaved=True)
    torch.testing.assert_close(interleaved(x), expected, rtol=0, atol=0)


@pytest.mark.parametrize("learnable", [False, True])
def test_frequencies_stay_exact_when_a_model_is_cast_or_allocated_late(learnable: bool) -> None:
    rotary = RotaryEmbedding(64, learnable=learnable)
    before = rotary.theta.detach().clone()
    for cast in (rotary.bfloat16(), rotary.half(), rotary.double()):
        assert cast.theta.dtype == torch.float32
        assert torch.equal(cast.theta, before)
    with torch.device("meta"):
        late = RotaryEmbedding(64, learnable=learnable)
    assert torch.equal(late.to_empty(device="cpu").theta, before)


@pytest.mark.parametrize("when", ["before", "between", "after"])
@pytest.mark.parametrize("cast", [torch.nn.Module.bfloat16, torch.nn.Module.half, torch.nn.Module.double])
def test_frequencies_are_trained_whenever_a_model_is_cast(cast, when: str, device: torch.device) -> None:
    x = random(2, 5, 2, 8, device=device)
    module = torch.nn.Sequential(LRPE(2, 8, kind="rotate")).to(device)
    theta = module[0].theta
    optimizer = torch.optim.AdamW([theta], lr=0.1)
    if when == "before":
        cast(module)
    module(x).sum().backward()
    gradient = theta.grad.clone()
    if when == "between":
        cast(module)
    assert module[0].theta is theta
    assert theta.dtype == theta.grad.dtype == torch.float32
    assert torch.equal(theta.grad, gradient)
    before = theta.detach().clone()
    optimizer.step()
    assert (theta - before).abs().min() > 0.05
    if when == "after":
        cast(module)
    optimizer.zero_grad()
    module(x).sum().backward()
    optimizer.step()
    assert theta.dtype == theta.grad.dtype == torch.float32


def test_frequencies_are_float32_whatever_the_default_dtype_is() -> None:
    before = LRPE(2, 8).theta.detach().clone()
    usual = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.bfloat16)
        assert torch.equal(LRPE(2, 8).theta, before)
    finally:
        torch.set_default_dtype(usual)


@pytest.mark.parametrize("learnable", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("way", ["assign", "to_empty", "to_empty of memory", "without theta"])
def test_a_model_without_memory_gets_its_frequencies(
    way: str, dtype: torch.dtype, learnable: bool, device: torch.device
) -> None:
    def make() -> torch.nn.ModuleList:
        return torch.nn.ModuleList(
            [RotaryEmbedding(8, learnable=learnable), LRPE(2, 8, learnable=learnable), torch.nn.Linear(2, 2)]
        )

    model = make()
    state = {name: t.to(device, dtype) for name, t in model.state_dict().items()}
    if way == "without theta":
        state = {name: t for name, t in state.items() if "theta" not in name}
    with torch.device(device if way == "to_empty of memory" else "meta"):
        late = make()
    if way.startswith("to_empty"):
        late.to_empty(device=device)
        late.load_state_dict(state)
    else:
        late.load_state_dict(state, assign=True, strict=way == "assign")
    for one, other in zip(late[:2], model):
        assert not one.theta.is_meta
        assert one.theta.dtype == torch.float32
        assert isinstance(one.theta, torch.nn.Parameter) == learnable
        expected = other.theta.to(dtype) if learnable and way != "without theta" else other.theta
        assert torch.equal(one.theta.cpu(), expected.float())
    late.to(device)
    x = random(2, 5, 2, 8, device=device)
    assert late[1](late[0](x)).shape == (2, 5, 2, 8)


def test_fixed_frequencies_follow_what_they_encode() -> None:
    """A state dict on a GPU that is assigned leaves them on the CPU, since it has none for them."""
    rotary = RotaryEmbedding(8)
    assert rotary(torch.empty(2, 5, 3, 8, device="meta")).is_meta
    assert rotary.theta.device.type == "cpu", "what passes without memory takes nothing along"


@pytest.mark.gpu
def test_fixed_frequencies_follow_to_the_gpu(device: torch.device) -> None:
    rotary, x = RotaryEmbedding(8), random(2, 5, 3, 8, device=device)
    expected = RotaryEmbedding(8).to(device)(x)
    assert torch.equal(rotary(x), expected)
    assert rotary.theta.is_cuda
    with pytest.raises(DeviceError, match="theta"):
        LRPE(3, 8)(x)


@pytest.mark.parametrize("kind", ["cosine", "rotate"])
def test_positions_of_several_axes(kind: str, device: torch.device) -> None:
    """Of a grid behind a class token, and the same given outright."""
    layer = LRPE(2, 12, kind=kind, axes=2).to(device)
    x = random(2, 1 + 3 * 5, 4, 12, device=device)
    theta = layer.theta.repeat_interleave(2, dim=0)
    assert theta.shape == (4, 6 if kind == "cosine" else 3)
    function = lrpe_cosine if kind == "cosine" else lrpe_rotate
    expected = function(x, theta, grid=(3, 5), prefix=1)
    assert torch.equal(layer(x, grid=(3, 5), prefix=1), expected)
    rows, columns = torch.meshgrid(torch.arange(3), torch.arange(5), indexing="ij")
    places = torch.cat((torch.zeros(1, 2, dtype=torch.int64), torch.stack((rows, columns), -1).flatten(0, 1)))
    torch.testing.assert_close(layer(x, position_ids=places.to(device).expand(2, -1, -1)), expected)
    assert torch.equal(layer(x, grid=[3, 5], prefix=1), expected)
    for wrong in ({}, {"grid": (15,), "prefix": 1}, {"position_ids": torch.zeros(2, 16, 3, dtype=torch.int64)}):
        got = "neither" if not wrong else "1 axis" if "grid" in wrong else "3 axes"
        with pytest.raises(ShapeError, match=f"LRPE: grid or position_ids must be of 2 axes; got {got}"):
            layer(x, **wrong)
    with pytest.raises(ShapeError, match="must be left out, or of 1 axis; got 2 axes"):
        LRPE(2, 12, kind=kind).to(device)(x, grid=(3, 5), prefix=1)
    with pytest.raises(ArgumentError, match="axes must be positive"):
        LRPE(2, 12, axes=0)


def test_frequencies_whose_data_was_cast_are_refused() -> None:
    module = LRPE(2, 8)
    module.theta.data = module.theta.data.bfloat16()
    with pytest.raises(DtypeError, match="LRPE: theta must be float32"):
        module(torch.randn(1, 2, 2, 8))


@pytest.mark.parametrize("make", [RotaryEmbedding, lambda d: LRPE(2, d), lambda d: LRPE(2, d, kind="cosine")])
@pytest.mark.parametrize("size", [4, 16])
def test_positions_that_do_not_fit_a_head_are_refused(size: int, make, device: torch.device) -> None:
    """Those of fewer features would turn a part of each head."""
    with pytest.raises(ArgumentError, match=f"Attention: position .*head_dim = 8.* got head_dim = {size}"):
        Attention(16, 2, causal=True, position=make(size))
    layer = Attention(16, 2, causal=True, position=make(8)).to(device)
    layer.position = make(size).to(device)
    with pytest.raises(ShapeError, match=f"x must be of heads of head_dim = {size} features"):
        layer(random(2, 3, 16, device=device))


def test_a_part_of_a_head_turns_where_it_is_asked_for(device: torch.device) -> None:
    x = random(2, 3, 16, device=device)
    layer = Attention(16, 2, causal=True, position=RotaryEmbedding(8, rotary_dim=4)).to(device)
    q, k, v = layer.qkv(x).unflatten(-1, (6, 8)).split(2, dim=2)
    q, k = (lrpe_rotate(t, layer.position.theta) for t in (q, k))
    expected = layer.out(warploom.flash_attention(q, k, v, causal=True).flatten(2))
    torch.testing.assert_close(layer(x), expected)


@pytest.mark.parametrize("rows", [3, 8])
def test_rows_of_frequencies_that_do_not_fit_the_heads_are_refused(rows: int) -> None:
    with pytest.raises(ArgumentError, match=f"kv_heads = 4, or a divisor; got heads = {rows}"):
        Attention(64, 8, kv_heads=4, causal=True, position=LRPE(rows, 8))


def test_learnable_frequencies_get_a_gradient(device: torch.device) -> None:
    for module in (RotaryEmbedding(8, learnable=True), LRPE(2, 8, kind="cosine"), LRPE(2, 8, activation="silu")):
        module.to(device)
        module(random(2, 5, 2, 8, device=device)).square().sum().backward()  # of a rotation: constant in theta
        module(random(2, 5, 2, 8, device=device)).sum().backward()
        assert module.theta.grad is not None
        assert module.theta.grad.abs().max() > 1e-3
    assert not list(RotaryEmbedding(8).parameters())


def test_lrpe_cosine_knows_only_differences_of_positions_and_shares_rows_among_groups(device: torch.device) -> None:
    module = LRPE(2, 6, kind="cosine").to(device)
    with torch.no_grad():
        module.theta.copy_(torch.rand(2, 6))
    q, k = random(1, 1, 4, 6, device=device), random(1, 1, 2, 6, device=device)
    scores = []
    for shift in (0, 1000):
        keys = module(k, offset=2 + shift).repeat_interleave(2, dim=2)
        scores.append((module(q, offset=9 + shift) * keys).sum(-1))
    torch.testing.assert_close(*scores, rtol=1e-4, atol=1e-4)
    theta = module.theta.detach().repeat_interleave(2, dim=0)
    expected = (q * k.repeat_interleave(2, dim=2) * torch.cos(7 * theta)).sum(-1)
    torch.testing.assert_close(scores[0], expected, rtol=1e-4, atol=1e-4)
    assert module.out_features == module(q).shape[-1] == 12
    with pytest.raises(ShapeError, match="theta"):
        module(random(1, 1, 3, 6, device=device))


@pytest.mark.parametrize(
    ("make", "argument"),
    [
        (lambda: RotaryEmbedding(7), "head_dim"),
        (lambda: RotaryEmbedding(8, rotary_dim=10), "rotary_dim"),
        (lambda: RotaryEmbedding(8, base=0.0), "base"),
        (lambda: LRPE(2, 8, kind="sine"), "kind"),
        (lambda: LRPE(0, 8), "heads"),
        (lambda: LRPE(2, 7), "head_dim"),
        (lambda: Attention(10, 3), "heads"),
        (lambda: Attention(12, 6, kv_heads=4), "kv_heads"),
        (lambda: Attention(12, 6, implementation="fast"), "implementation"),
        (lambda: Attention(0, 1), "d_model"),
        (lambda: Attention(12, 6, head_dim=0), "head_dim"),
        (lambda: Attention(12, 6, causal=True, position=LRPE(6, 2, activation="softmax_sequence")), "position"),
        (lambda: KVCache(0), "capacity"),
    ],
)
def test_wrong_arguments_are_named(make, argument: str) -> None:
    with pytest.raises(ArgumentError, match=argument):
        make()


@pytest.mark.parametrize("capacity", [2.0, True, "8"])
def test_a_capacity_is_an_int(capacity: object) -> None:
    with pytest.raises(DtypeError, match="capacity"):
        KVCache(capacity)


def test_a_cache_and_a_model_take_sizes_of_numpys() -> None:
    numpy = pytest.importorskip("numpy")
    assert type(KVCache(numpy.int64(8)).capacity) is int
    config = nn.TransformerConfig(heads=numpy.int32(12), base=numpy.float32(100))
    assert config == nn.TransformerConfig(heads=12, base=100.0)
    assert json.dumps(vars(config))


# ----------------------------------------------------------------------------------------------------------
# The cache
# ----------------------------------------------------------------------------------------------------------


def keys_values(tokens: int, device: torch.device, batch: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    return random(batch, tokens, 2, 5, device=device), random(batch, tokens, 2, 4, device=device)


@pytest.mark.parametrize("capacity", [None, 700])
def test_a_cache_returns_what_was_appended(capacity: int | None, device: torch.device) -> None:
    cache = KVCache(capacity)
    pieces = [keys_values(tokens, device) for tokens in (1, 255, 1, 0, 443)]  # past the first allocation
    for k, v in pieces:
        seen_k, seen_v = cache.append(k, v)
    assert cache.lengths == [700, 700, 700]
    assert cache.offset == 700
    assert not cache.ragged
    assert torch.equal(seen_k, torch.cat([k for k, _ in pieces], dim=1))
    assert torch.equal(seen_v, torch.cat([v for _, v in pieces], dim=1))


def test_entries_of_different_lengths(device: torch.device) -> None:
    cache = KVCache()
    k, v = keys_values(6, device)
    cache.append(k, v)
    cache.truncate([6, 1, 3])
    assert cache.ragged
    assert cache.offset.tolist() == [6, 1, 3]
    more_k, more_v = keys_values(2, device)
    seen_k, seen_v = cache.append(more_k, more_v)
    assert cache.lengths == [8, 3, 5]
    packed_k, packed_v, starts = cache.packed()
    assert starts.tolist() == [0, 8, 11, 16]
    assert starts.dtype == torch.int32
    for entry, kept in enumerate((6, 1, 3)):
        expected_k, expected_v = (
            torch.cat(t) for t in ((k[entry, :kept], more_k[entry]), (v[entry, :kept], more_v[entry]))
        )
        own = slice(starts[entry], starts[entry + 1])
        assert torch.equal(packed_k[0, own], expected_k)
        assert torch.equal(packed_v[0, own], expected_v)
        assert torch.equal(seen_k[entry, : kept + 2], expected_k)
        assert torch.equal(seen_v[entry, : kept + 2], expected_v)
    cache.truncate(3)
    assert cache.offset == 3
    assert not cache.ragged


def test_a_cache_refuses_what_does_not_fit(device: torch.device) -> None:
    cache = KVCache(capacity=4)
    k, v = keys_values(3, device)
    with pytest.raises(ArgumentError, match="an empty one"):
        cache.packed()
    with pytest.raises(ShapeError, match="append: v"):
        cache.append(k, v[:2])
    with pytest.raises(ArgumentError, match="capacity 4"):
        cache.append(*keys_values(5, device))
    with pytest.raises(ArgumentError, match="an empty one"):  # nothing was kept of what was refused
        cache.packed()
    assert cache.lengths == []
    cache.append(k, v)
    with pytest.raises(ArgumentError, match="capacity 4"):
        cache.append(k, v)
    for wrong in ((k[:2], v[:2]), (k, v[..., :3]), (k[:, :1], v[:, :0]), (k[:, :, :1], v), (k[0], v[0])):
        with pytest.raises(ShapeError, match=r"append: [kv] must be \(B, N, Hkv, [DE]\) with "):
            cache.append(*wrong)
    k, v = k[:, :1], v[:, :1]
    for wrong in ((k.double(), v), (k, v.half()), (k.double(), v.double()), (k, v.long()), (k, None)):
        with pytest.raises(DtypeError, match=r"append: [kv] must be"):
            cache.append(*wrong)
    with pytest.raises(DeviceError, match="append: k must be on the device held"):
        cache.append(k.to("meta"), v.to("meta"))
    with pytest.raises(DeviceError, match="append: v must be on the device of k"):
        KVCache().append(k, v.to("meta"))
    for lengths in (1.5, [1.0, 1, 1], True, torch.tensor([1, 1, 1])):
        with pytest.raises(DtypeError, match="lengths"):
            cache.truncate(lengths)
    for lengths in (4, -1, [3, 3, 4], [1, 2]):
        with pytest.raises(ArgumentError, match="lengths"):
            cache.truncate(lengths)
    with pytest.raises(ArgumentError, match="gradient"):
        cache.append(k, v.requires_grad_())
    assert cache.lengths == [3, 3, 3]


def test_heads_of_keys_and_values_are_as_many(device: torch.device) -> None:
    k, v = keys_values(3, device)
    cache = KVCache()
    with pytest.raises(ShapeError, match=r"append: v must be .* with B = 3, N = 3, Hkv = 2"):
        cache.append(k, v[:, :, :1])
    assert cache.lengths == []
    assert not cache._is_filled


# ----------------------------------------------------------------------------------------------------------
# Layers
# ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (3, 1)])
def test_attention_is_its_definition(implementation: str, heads: int, kv_heads: int, device: torch.device) -> None:
    width, head_dim = 24, 10
    layer = Attention(
        width,
        heads,
        kv_heads=kv_heads,
        causal=True,
        head_dim=head_dim,
        position=RotaryEmbedding(head_dim),
        implementation=implementation,
    ).to(device)
    x = random(2, 9, width, device=device)
    weights = layer.qkv.weight.detach().double().split([heads * head_dim, kv_heads * head_dim, kv_heads * head_dim])
    q, k, v = ((x.double() @ w.T).unflatten(-1, (-1, head_dim)) for w in weights)
    q, k = (lrpe_rotate(t, layer.position.theta, backend="torch") for t in (q, k))
    out = torch.zeros(2, 9, heads, head_dim, dtype=torch.float64, device=device)
    for head in range(heads):
        group = head // (heads // kv_heads)
        for row in range(9):
            scores = torch.einsum("bd,bmd->bm", q[:, row, head], k[:, : row + 1, group]) * head_dim**-0.5
            out[:, row, head] = torch.einsum("bm,bmd->bd", scores.softmax(-1), v[:, : row + 1, group])
    expected = out.flatten(2) @ layer.out.weight.detach().double().T
    torch.testing.assert_close(layer(x).double(), expected, rtol=1e-5, atol=2e-6)
    ids = torch.arange(9, device=device) + 40  # attention knows only differences
    torch.testing.assert_close(layer(x, position_ids=ids).double(), expected, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@torch.no_grad()
def test_entries_of_different_lengths_attend_as_each_alone(implementation: str, device: torch.device) -> None:
    layer = Attention(
        24, 4, kv_heads=2, causal=True, position=LRPE(2, 6, kind="cosine"), implementation=implementation
    ).to(device)
    prompt, more, lengths = random(3, 5, 24, device=device), random(3, 2, 24, device=device), [5, 1, 3]
    cache = KVCache()
    layer(prompt, cache=cache)
    cache.truncate(lengths)
    together = layer(more, cache=cache)
    for entry, length in enumerate(lengths):
        whole = layer(torch.cat((prompt[entry : entry + 1, :length], more[entry : entry + 1]), dim=1))
        torch.testing.assert_close(together[entry], whole[0, length:], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@torch.no_grad()
def test_what_lies_behind_the_lengths_does_not_matter(implementation: str, device: torch.device) -> None:
    layer = Attention(
        24, 4, kv_heads=2, causal=True, position=RotaryEmbedding(6), implementation=implementation
    ).to(device)
    prompt, more, lengths = random(3, 5, 24, device=device), random(3, 2, 24, device=device), [5, 1, 3]
    results = []
    for padding in (0.0, math.nan, math.inf):
        for entry, length in enumerate(lengths):
            prompt[entry, length:] = padding
        cache = KVCache()
        layer(prompt, cache=cache)
        cache.truncate(lengths)
        results.append(layer(more, cache=cache))
    assert results[0].isfinite().all()
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("position", [None, RotaryEmbedding(8), LRPE(2, 8), LRPE(2, 8, kind="cosine")])
@pytest.mark.parametrize(("batch", "tokens"), [(0, 3), (2, 0), (0, 0)])
def test_nothing_to_attend_with(
    batch: int, tokens: int, position: torch.nn.Module | None, implementation: str, device: torch.device
) -> None:
    layer = Attention(32, 4, kv_heads=2, causal=True, position=position, implementation=implementation).to(device)
    x = random(batch, tokens, 32, device=device).requires_grad_()
    out = layer(x)
    assert out.shape == x.shape
    assert torch.autograd.grad(out.sum(), x)[0].shape == x.shape
    with torch.no_grad():
        cache = KVCache()
        for more in (x, x, random(batch, 1, 32, device=device)):
            assert layer(more, cache=cache).shape == more.shape
        assert cache.lengths == [2 * tokens + 1] * batch
        _, _, starts = cache.packed()
        assert starts.tolist() == [(2 * tokens + 1) * entry for entry in range(batch + 1)]


OPTIONS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "window": {"causal": True, "window": (3, None)},
    "cap_and_sink": {"softcap": 2.0, "sink": True},
    "normed": {"qk_norm": True, "bias": True},
    "all": {"causal": True, "window": (4, 0), "softcap": 2.0, "sink": True, "qk_norm": True, "bias": True},
}


def defined(layer: Attention, x: torch.Tensor, context: torch.Tensor | None = None, **hiding: Any) -> torch.Tensor:
    """The layer by its definition: projections, norms, positions, and attention's reference."""
    if context is None:
        q, kv = layer.qkv(x).split((layer.heads * layer.head_dim, 2 * layer.kv_heads * layer.head_dim), -1)
    else:
        q, kv = layer.q(x), layer.kv(context)
    q = q.unflatten(-1, (layer.heads, layer.head_dim))
    k, v = kv.unflatten(-1, (2, layer.kv_heads, layer.head_dim)).unbind(2)
    if layer.qk_norm:
        q, k = (t * (t.square().mean(-1, keepdim=True) + 1e-6).rsqrt() for t in (q, k))
        q, k = q * layer.q_norm.weight, k * layer.k_norm.weight
    if layer.position is not None:
        q, k = (lrpe_rotate(t, layer.position.theta, backend="torch") for t in (q, k))
    options = {"causal": layer.causal, "sink": layer.sink, **layer.options, **hiding}
    return layer.out(definition.flash_attention(q, k, v, **options).flatten(2))


def with_drawn_parameters(layer: Attention, device: torch.device) -> Attention:
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            if name.endswith(("sink", "norm.weight", "bias")):
                parameter.copy_(torch.randn(parameter.shape))
    return layer.double().to(device)


@pytest.mark.parametrize("name", OPTIONS)
def test_options_of_attention(name: str, device: torch.device) -> None:
    position = RotaryEmbedding(6)
    layer = with_drawn_parameters(Attention(24, 4, kv_heads=2, position=position, **OPTIONS[name]), device)
    x = random(1, 11, 24, device=device).double().requires_grad_()
    whole = layer(x)
    torch.testing.assert_close(whole, defined(layer, x))
    grad = torch.randn_like(whole)
    wanted = [x, *layer.parameters()]
    found, expected = (torch.autograd.grad(out, wanted, grad) for out in (whole, defined(layer, x)))
    torch.testing.assert_close(found, expected)
    bounds = torch.tensor([0, 4, 4, 11], device=device)
    alone = torch.cat((layer(x[:, :4]), layer(x[:, 4:])), 1)
    torch.testing.assert_close(layer(x, cu_seqlens=bounds), alone)
    torch.testing.assert_close(layer(x, cu_seqlens_q=bounds), alone)
    layer.group()
    torch.testing.assert_close(layer(x), whole)
    layer.group(False)
    if layer.causal:
        with torch.no_grad():
            cache = KVCache()
            parts = [layer(x[:, start:end], cache=cache) for start, end in ((0, 7), (7, 8), (8, 11))]
            torch.testing.assert_close(torch.cat(parts, 1), whole)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("causal", [False, True])
def test_keys_of_another_sequence(implementation: str, causal: bool, device: torch.device) -> None:
    layer = Attention(
        24, 4, kv_heads=2, context_dim=10, causal=causal, position=RotaryEmbedding(6), implementation=implementation
    ).double()
    layer.to(device)
    x, context = random(2, 5, 24, device=device).double(), random(2, 8, 10, device=device).double()
    torch.testing.assert_close(layer(x, context=context), defined(layer, x, context))
    assert {"q.weight", "kv.weight", "out.weight"} <= set(layer.state_dict())
    if implementation == "flash":
        q, k = torch.tensor([0, 2, 5], device=device), torch.tensor([0, 7, 8], device=device)
        packed = layer(x[:1], context=context[:1], cu_seqlens_q=q, cu_seqlens_k=k)
        alone = [layer(x[:1, a:b], context=context[:1, c:d]) for a, b, c, d in ((0, 2, 0, 7), (2, 5, 7, 8))]
        torch.testing.assert_close(packed, torch.cat(alone, 1))


@pytest.mark.parametrize("name", ["full", "all"])
@pytest.mark.parametrize("cross", [False, True])
def test_masks_biases_and_slopes_of_attention(name: str, cross: bool, device: torch.device) -> None:
    options = {**OPTIONS[name], **({"context_dim": 10} if cross else {})}
    layer = with_drawn_parameters(
        Attention(24, 4, kv_heads=2, position=RotaryEmbedding(6), **options), device
    )  # fmt: skip
    x = random(2, 11, 24, device=device).double()
    context = random(2, 8, 10, device=device).double() if cross else None
    keys = 8 if cross else 11
    seen = (random(2, 1, 11, keys, device=device) > 0) | (torch.arange(keys, device=device) == 0)
    bias = random(1, 4, 11, keys, device=device).double().requires_grad_()
    slopes = random(2, 4, device=device).double()
    for hiding in (
        {"mask": seen},
        {"bias": bias},
        {"alibi": slopes},
        {"mask": seen, "bias": bias, "alibi": slopes},
    ):
        found, expected = layer(x, context=context, **hiding), defined(layer, x, context, **hiding)
        torch.testing.assert_close(found, expected)
        if "bias" in hiding:
            torch.testing.assert_close(*(torch.autograd.grad(out.sin().sum(), bias) for out in (found, expected)))
    if not cross:
        layer.group()
        torch.testing.assert_close(layer(x, mask=block_mask(seen), bias=bias), defined_as(layer, x, seen, bias))
        block = nn.Block(24, 48, layer).double().to(device)
        after = x + layer(block.attention_norm(x), mask=seen)
        torch.testing.assert_close(block(x, mask=seen), after + block.mlp(block.mlp_norm(after)))
    if not cross and layer.causal:
        with torch.no_grad():
            cache = KVCache()
            parts = [
                layer(x[:, a:b], cache=cache, mask=seen[:, :, a:b, :b], bias=bias[:, :, a:b, :b])
                for a, b in ((0, 7), (7, 8), (8, 11))
            ]
            torch.testing.assert_close(torch.cat(parts, 1), layer(x, mask=seen, bias=bias))


def defined_as(layer: Attention, x: torch.Tensor, seen: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """The definition of a layer in groups, which is that of the layer in its other order."""
    layer.group(False)
    out = defined(layer, x, mask=seen, bias=bias)
    layer.group()
    return out


def test_blocks_of_an_encoder_and_a_decoder(device: torch.device) -> None:
    encoder = nn.Block(24, 48, Attention(24, 4)).to(device)
    cross = Attention(24, 4, context_dim=24)
    decoder = nn.Block(24, 48, Attention(24, 4, causal=True), cross=cross).to(device)
    x, y = random(1, 6, 24, device=device), random(1, 5, 24, device=device)
    context = encoder(x)
    found = decoder(y, context=context)
    after = y + decoder.attention(decoder.attention_norm(y))
    after = after + cross(decoder.cross_norm(after), context=context)
    torch.testing.assert_close(found, after + decoder.mlp(decoder.mlp_norm(after)))
    later = torch.cat((y[:, :4], y[:, :1]), 1)
    torch.testing.assert_close(decoder(later, context=context)[:, :4], found[:, :4])
    other = torch.cat((x[:, :4], x[:, :2]), 1)
    assert not torch.allclose(encoder(other)[:, :4], context[:, :4])
    bounds = torch.tensor([0, 2, 5], device=device), torch.tensor([0, 3, 6], device=device)
    packed = decoder(y, context=context, cu_seqlens=bounds[0], cu_seqlens_k=bounds[1])
    alone = [decoder(y[:, a:b], context=context[:, c:d]) for a, b, c, d in ((0, 2, 0, 3), (2, 5, 3, 6))]
    torch.testing.assert_close(packed, torch.cat(alone, 1))
    with pytest.raises(ArgumentError, match="Block: context must be None in a block without cross"):
        encoder(x, context=context)
    with pytest.raises(ArgumentError, match=r"context must be \(B, M, context_dim\)"):
        decoder(y)


def test_what_options_exclude(device: torch.device) -> None:
    for options in ({"window": (1, 1)}, {"softcap": 1.0}, {"sink": True}):
        for implementation in ("sdpa", "plain"):
            with pytest.raises(ArgumentError, match="implementation must be 'flash' with a window"):
                Attention(12, 2, implementation=implementation, **options)
    x, bounds = random(1, 3, 12, device=device), torch.tensor([0, 3], device=device)
    full, causal = Attention(12, 2).to(device), Attention(12, 2, causal=True).to(device)
    cross = Attention(12, 2, causal=True, context_dim=12).to(device)
    sdpa, seen = Attention(12, 2, implementation="sdpa").to(device), torch.ones(1, 1, 3, 3, device=device).bool()
    calls: dict[str, Callable[[], Any]] = {
        "cache must be left out unless the layer is causal": lambda: full(x, cache=KVCache()),
        "cu_seqlens must be left out with a cache": lambda: causal(x, cache=KVCache(), cu_seqlens_k=bounds),
        "cu_seqlens_q must be None with cu_seqlens": lambda: full(x, cu_seqlens=bounds, cu_seqlens_q=bounds),
        "cu_seqlens_k must be None or the tensor": lambda: full(
            x, cu_seqlens_q=bounds, cu_seqlens_k=bounds.clone()
        ),
        "context must be None": lambda: full(x, context=x),
        "cache must be None with a context": lambda: cross(x, context=x, cache=KVCache()),
        "cu_seqlens must be None but": lambda: sdpa(x, cu_seqlens=bounds),
        "mask must be None but with implementation 'flash'; got one with 'sdpa'": lambda: sdpa(x, mask=seen),
        "bias must be None but": lambda: sdpa(x, bias=seen.float()),
        "alibi must be None but": lambda: sdpa(x, alibi=torch.ones(2, device=device)),
    }
    for message, call in calls.items():
        with torch.no_grad(), pytest.raises(ArgumentError, match=f"Attention: {message}"):
            call()
    with pytest.raises(ShapeError, match=r"context must be .* with context_dim = 12"):
        cross(x, context=x[..., :5])


def test_what_attention_refuses(device: torch.device) -> None:
    layer = Attention(12, 2, causal=True).to(device)
    x = random(2, 3, 12, device=device)
    for wrong in (x[0], x[..., :6], x[None]):
        with pytest.raises(ShapeError, match=r"x must be \(B, N, d_model\) with d_model = 12"):
            layer(wrong)
    with pytest.raises(ArgumentError, match="position_ids"):
        layer(x, position_ids=torch.arange(3, device=device))
    with torch.no_grad(), pytest.raises(DtypeError, match="cache"):
        layer(x, cache=FactorCache())
    with pytest.raises(DtypeError, match="position"):
        Attention(12, 2, position="rotary")


def test_swiglu_is_its_definition(device: torch.device) -> None:
    layer = SwiGLU(6, 10).to(device)
    x = random(2, 3, 6, device=device)
    gate, up = layer.gate_up.weight.detach().double().split(10)
    a = x.double() @ gate.T
    expected = (a / (1 + (-a).exp()) * (x.double() @ up.T)) @ layer.down.weight.detach().double().T
    torch.testing.assert_close(layer(x).double(), expected, rtol=1e-5, atol=1e-6)
    assert sum(p.numel() for p in layer.parameters()) == 3 * 6 * 10


def test_what_a_module_was_built_with_is_in_its_repr() -> None:
    rope = RotaryEmbedding(16, base=500.0, rotary_dim=8, interleaved=True)
    assert repr(rope) == "RotaryEmbedding(head_dim=16, rotary_dim=8, base=500.0, learnable=False, interleaved=True)"
    words = "heads=2, head_dim=16, kind='rotate', activation='relu', base=10.0, learnable=True"
    assert repr(LRPE(2, 16, activation="relu", base=10.0)) == f"LRPE({words})"
    words = "heads=2, head_dim=16, axes=2, kind='cosine', out_features=32, activation='none', base=10.0"
    assert repr(LRPE(2, 16, kind="cosine", axes=2, base=10.0)) == f"LRPE({words}, learnable=True)"
    config = nn.TransformerConfig(vocab_size=8, context_length=4, d_model=32, d_ff=64, layers=1, heads=2)
    texts = {
        SwiGLU(32, 64): "d_model=32, d_ff=64",
        Attention(32, 4, kv_heads=2, position=None, implementation="sdpa"): (
            "d_model=32, heads=4, kv_heads=2, head_dim=8, causal=False, implementation='sdpa'"
        ),
        nn.TensorProductAttention(32, 4, rank_q=3, value_dim=6, backend="torch"): (
            "d_model=32, heads=4, head_dim=8, value_dim=6, rank_q=3, rank_k=2, rank_v=2, causal=False, "
            "backend='torch'"
        ),
        nn.LinearAttention(32, 4, activation="relu", layer=1, layers=3): (
            "d_model=32, heads=4, head_dim=8, value_dim=8, activation='relu', layer=1, layers=3, backend='auto'"
        ),
        nn.TransformerLM(config): repr(config),
    }
    for module, text in texts.items():
        assert repr(module).splitlines()[1].strip() == text
    assert repr(KVCache(8)) == "KVCache(capacity=8, lengths=[])"
    assert repr(nn.StateCache()) == "StateCache(lengths=[])"


# Pages


@pytest.mark.parametrize("options", [{}, {"window": (5, 0), "sink": True, "qk_norm": True}])
def test_a_paged_cache(options: dict[str, Any], device: torch.device) -> None:
    """Prompts, chunks, single tokens and nothing in one call have the results of each sequence alone."""
    torch.manual_seed(0)
    layer = Attention(32, 4, kv_heads=2, position=RotaryEmbedding(8), causal=True, **options).to(device)
    table = PageTable(pages=24, page_size=4)
    cache = PagedKVCache(table)
    x = {name: torch.randn(1, 30, 32, device=device) for name in "abc"}
    x["c"][:, :8] = x["a"][:, :8]
    steps: list[dict[str, int]] = [{"a": 9, "b": 1}, {"a": 1, "b": 13}, {"b": 1, "a": 0, "c": 12}, {"c": 1, "a": 3}]
    got: dict[str, list[torch.Tensor]] = {name: [] for name in x}
    with torch.no_grad():
        for step in steps:
            for name in step.keys() - table.lengths.keys():
                table.add(name, ("a", 8) if name == "c" else None)
            places = {name: table.lengths[name] for name in step}
            table.extend(step, device)
            new = [x[name][:, place : place + step[name]] for name, place in places.items()]
            out = layer(torch.cat(new, 1), cache=cache).split(list(step.values()), 1)
            for name, part in zip(step, out):
                got[name].append(part)
        for name, parts in got.items():
            wanted = layer(x[name][:, : table.lengths[name]])[:, 8 if name == "c" else 0 :]
            torch.testing.assert_close(torch.cat(parts, 1), wanted, rtol=1e-4, atol=1e-5)
        for argument, value in (("mask", torch.ones(1, 1, 1, 24).bool()), ("alibi", torch.ones(4))):
            table.extend({"a": 1}, device)
            with pytest.raises(ArgumentError, match=f"{argument} must be None with block_table"):
                layer(x["a"][:, :1], cache=cache, **{argument: value.to(device)})
    assert cache.longest == 21


def test_pages_are_shared_and_come_back() -> None:
    table = PageTable(pages=4, page_size=4)
    table.add("a")
    table.extend({"a": 9})
    table.add("b", ("a", 8))
    assert (table.free_pages, table.count_new_pages("b", 1), table.count_new_pages("a", 3)) == (1, 1, 0)
    table.extend({"b": 4})
    assert table.block_table[0, :2].tolist() == table._pages["a"][:2]
    assert (table.position_ids.tolist(), table.seqused_k.tolist()) == ([[8, 9, 10, 11]], [12])
    wrong: dict[str, Callable[[], Any]] = {
        "such that 0 free pages hold them": lambda: table.extend({"a": 1, "b": 1}),
        "tokens must be at least 0": lambda: table.extend({"a": -1}),
        "sequence must be a new name": lambda: table.add("a"),
        "a multiple of 4 of its tokens": lambda: table.add("c", ("a", 6)),
        "sequence must be one of the table": lambda: table.remove("c"),
        "page_size must be positive": lambda: PageTable(4, 0),
    }
    for message, call in wrong.items():
        with pytest.raises(ArgumentError, match=message):
            call()
    assert table.lengths == {"a": 9, "b": 12}
    table.remove("a")
    assert table.free_pages == 1
    table.remove("b")
    assert table.free_pages == 4
    sdpa = Attention(32, 4, causal=True, implementation="sdpa")
    with torch.no_grad(), pytest.raises(ArgumentError, match="a PagedKVCache with 'sdpa'"):
        sdpa(torch.randn(1, 1, 32), cache=PagedKVCache(table))
