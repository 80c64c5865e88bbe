"""The tensor-product attention layer: what it computes, decoding from its cache, training."""

import pytest
import torch

from warploom import ArgumentError, DtypeError, ShapeError, lrpe_rotate
from warploom.nn import FactorCache, KVCache, TensorProductAttention
from warploom.runtime.backend import HAS_TRITON

Tensor = torch.Tensor
BACKENDS = ("torch", "triton") if HAS_TRITON else ("torch",)
backends = pytest.mark.parametrize("backend", BACKENDS)


def layer(device: torch.device, backend: str = "torch", **keywords: object) -> TensorProductAttention:
    sizes = {"rank_q": 3, "rank_k": 2, "rank_v": 1, "value_dim": 12, "backend": backend} | keywords
    return TensorProductAttention(24, 3, 8, **sizes).to(device)


def features(device: torch.device, batch: int = 2, tokens: int = 11) -> Tensor:
    return torch.randn(batch, tokens, 24).to(device)


def assert_near(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_it_is_attention_on_products_of_rotated_factors(device: torch.device) -> None:
    module, x = layer(device).double(), features(device).double()

    def product(a: torch.nn.Linear, b: torch.nn.Linear, rank: int, turned: bool) -> Tensor:
        right = b(x).unflatten(-1, (rank, -1))
        whole = a(x).unflatten(-1, (3, rank)) @ right / rank
        return lrpe_rotate(whole, module.position.theta) if turned else whole  # turning the product, not the factor

    q = product(module.aq, module.bq, 3, True)
    k = product(module.ak, module.bk, 2, True)
    v = product(module.av, module.bv, 1, False)
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    values = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(module(x), module.out(values.transpose(1, 2).flatten(2)), rtol=1e-9, atol=1e-9)


@backends
@torch.no_grad()
def test_prefill_then_decode_is_the_full_forward(device: torch.device, backend: str) -> None:
    module, x = layer(device, backend), features(device)
    full = layer(device)
    full.load_state_dict(module.state_dict())
    expected = full(x)
    cache = FactorCache()
    parts = [module(x[:, start:end], cache) for start, end in ((0, 5), (5, 6), (6, 10), (10, 11))]
    assert_near(torch.cat(parts, dim=1), expected)
    assert cache.lengths == [11, 11]


@backends
@torch.no_grad()
def test_entries_of_different_length(device: torch.device, backend: str) -> None:
    module, x = layer(device, backend), features(device, batch=3, tokens=12)
    lengths = [7, 2, 5]
    cache = FactorCache(capacity=16)
    module(x[:, :7], cache)
    cache.truncate(lengths)
    for step in (2, 1):  # two new tokens at once, then one
        new = torch.stack([x[i, n : n + step] for i, n in enumerate(cache.lengths)])
        start = list(cache.lengths)
        found = module(new, cache)
        for i, n in enumerate(start):
            assert_near(found[i], module(x[i : i + 1, : n + step])[0, n:])
    assert cache.seqlens.tolist() == [10, 5, 8]


@torch.no_grad()
def test_the_cache_grows_and_keeps_what_it_has(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FactorCache, "_FIRST", 2)
    cache = FactorCache()
    sizes = ((3, 4), (3, 2), (4, 6), (2, 5))
    pieces = [[torch.randn(2, n, *size).to(device) for size in sizes] for n in (1, 2, 4, 1)]
    for piece in pieces:
        held = cache.append(*piece)
    for index, store in enumerate(held):
        assert torch.equal(store, torch.cat([piece[index] for piece in pieces], dim=1))


@torch.no_grad()
def test_what_the_cache_refuses(device: torch.device) -> None:
    cache = FactorCache(capacity=4)
    with pytest.raises(ArgumentError, match="appended"):
        _ = cache.seqlens
    factors = [torch.zeros(2, 3, *size).to(device) for size in ((3, 4), (3, 2), (4, 6), (2, 5))]
    cache.append(*factors)
    with pytest.raises(ArgumentError, match="capacity"):
        cache.append(*factors)
    one = [factor[:, :1] for factor in factors]
    wrong = {
        "ak": (ShapeError, [factor[:1] for factor in one]),
        "av": (ShapeError, [one[0], one[1][:, :, :2], *one[2:]]),
        "bk": (ShapeError, [*one[:2], one[2][:, :, :1], one[3]]),
        "bv": (ShapeError, [*one[:3], one[3][0]]),
        "ak must be of the dtype held": (DtypeError, [factor.double() for factor in one]),
        "bv must be of the dtype held": (DtypeError, [*one[:3], one[3].half()]),
        "bk must be a tensor": (DtypeError, [*one[:2], None, one[3]]),
    }
    for argument, (error, appended) in wrong.items():
        with pytest.raises(error, match=f"append: {argument}"):
            cache.append(*appended)
    assert cache.lengths == [3, 3]
    for lengths in ([4, 1], [1], [-1, 2]):
        with pytest.raises(ArgumentError, match="lengths"):
            cache.truncate(lengths)
    with pytest.raises(ArgumentError, match="capacity"):
        FactorCache(capacity=0)
    with pytest.raises(DtypeError, match="cache"):
        layer(device)(features(device), KVCache())
    with torch.enable_grad(), pytest.raises(ArgumentError, match="gradient"):
        FactorCache().append(*[factor.clone().requires_grad_() for factor in factors])


@backends
@pytest.mark.parametrize(("batch", "tokens"), [(0, 3), (2, 0), (0, 0)])
def test_nothing_to_attend_with(batch: int, tokens: int, backend: str, device: torch.device) -> None:
    module = layer(device, backend)
    x = torch.randn(batch, tokens, 24, device=device).requires_grad_()
    (gradient,) = torch.autograd.grad(module(x).sum(), x)
    assert gradient.shape == x.shape
    with torch.no_grad():
        cache = FactorCache()
        for more in (x, x, torch.randn(batch, 1, 24, device=device)):
            assert module(more, cache).shape == more.shape


@backends
def test_packed_sequences_are_separate(device: torch.device, backend: str) -> None:
    module, x = layer(device, backend), features(device, batch=1)
    packed = module(x, cu_seqlens=torch.tensor([0, 4, 11], device=device))
    assert_near(packed, torch.cat((module(x[:, :4]), module(x[:, 4:])), dim=1))


@backends
def test_gradients_reach_every_parameter(device: torch.device, backend: str) -> None:
    module, exact = layer(device, backend, bias=True), layer(device, bias=True)
    exact.load_state_dict(module.state_dict())
    exact.double()
    x = features(device)
    grad = torch.randn(2, 11, 24).to(device)
    module(x).backward(grad)
    exact(x.double()).backward(grad.double())
    for (name, found), expected in zip(module.named_parameters(), exact.parameters()):
        assert found.grad is not None, name
        torch.testing.assert_close(found.grad.double(), expected.grad, rtol=1e-4, atol=1e-4)


def test_it_learns_what_another_layer_does(device: torch.device) -> None:
    teacher, module = layer(device), layer(device)
    x = features(device, batch=4)
    target = teacher(x).detach()
    optimiser = torch.optim.Adam(module.parameters(), lr=1e-2)
    losses = []
    for _ in range(200):
        loss = (module(x) - target).square().mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert losses[-1] < 0.05 * losses[0], (losses[0], losses[-1])


def test_the_state_dict_is_as_documented(device: torch.device) -> None:
    shapes = {name: tuple(value.shape) for name, value in layer(device).state_dict().items()}
    assert shapes == {
        "aq.weight": (9, 24),
        "bq.weight": (24, 24),
        "ak.weight": (6, 24),
        "bk.weight": (16, 24),
        "av.weight": (3, 24),
        "bv.weight": (12, 24),
        "out.weight": (24, 36),
    }


@pytest.mark.parametrize("wrong", [{"rank_k": 0}, {"value_dim": -1}, {"base": 0.0}])
def test_wrong_sizes_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ArgumentError, match=next(iter(wrong))):
        TensorProductAttention(8, 2, 4, **wrong)
    with pytest.raises(ArgumentError, match="head_dim"):
        TensorProductAttention(8, 2, 5)


def test_wrong_calls_are_refused(device: torch.device) -> None:
    module, x = layer(device), features(device, batch=1)
    with pytest.raises(ShapeError, match="dim"):
        module(x[..., :5])
    with pytest.raises(ArgumentError, match="cu_seqlens"):
        module(x, FactorCache(), torch.tensor([0, 11], device=device))
    with pytest.raises(ArgumentError, match="gradient"):
        module(x, FactorCache())
