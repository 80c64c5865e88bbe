"""The tensor-product attention layer: what it computes, its cache; `test_attention_layers` has the rest."""

import pytest
import torch

from warploom import ArgumentError, DtypeError, ShapeError, lrpe_rotate
from warploom.nn import FactorCache, TensorProductAttention

Tensor = torch.Tensor


def layer(device: torch.device, **keywords: object) -> TensorProductAttention:
    sizes = {"rank_q": 3, "rank_k": 2, "rank_v": 1, "value_dim": 12, "causal": True, "backend": "torch"} | keywords
    return TensorProductAttention(24, 3, **sizes).to(device)


def features(device: torch.device, batch: int = 2, tokens: int = 11) -> Tensor:
    return torch.randn(batch, tokens, 24).to(device)


@pytest.mark.parametrize("causal", [True, False])
def test_it_is_attention_on_products_of_rotated_factors(device: torch.device, causal: bool) -> None:
    module, x = layer(device, causal=causal).double(), features(device).double()

    def product(a: torch.nn.Linear, b: torch.nn.Linear, rank: int, turned: bool) -> Tensor:
        right = b(x).unflatten(-1, (rank, -1))
        whole = a(x).unflatten(-1, (3, rank)) @ right / rank
        return lrpe_rotate(whole, module.position.theta) if turned else whole  # turning the product, not the factor

    q = product(module.aq, module.bq, 3, True)
    k = product(module.ak, module.bk, 2, True)
    v = product(module.av, module.bv, 1, False)
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    values = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)
    torch.testing.assert_close(module(x), module.out(values.transpose(1, 2).flatten(2)), rtol=1e-9, atol=1e-9)
    if not causal:
        with (
            torch.no_grad(),
            pytest.raises(ArgumentError, match="cache must be left out unless"),
        ):
            module(x, cache=FactorCache())


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
    with torch.enable_grad(), pytest.raises(ArgumentError, match="gradient"):
        FactorCache().append(*[factor.clone().requires_grad_() for factor in factors])


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
        TensorProductAttention(8, 2, **wrong)
    with pytest.raises(ArgumentError, match="head_dim"):
        TensorProductAttention(8, 2, head_dim=5)
