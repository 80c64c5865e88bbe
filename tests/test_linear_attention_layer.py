"""The linear attention layer: what it computes, and its state; `test_attention_layers` has the rest."""

import pytest
import torch

from warploom import ArgumentError, DtypeError, ShapeError
from warploom.nn import LinearAttention, StateCache
from warploom.ops.linear_attention import reference

Tensor = torch.Tensor
positions = pytest.mark.parametrize("position", ["rotate", "cosine", "none"])


def layer(device: torch.device, **keywords: object) -> LinearAttention:
    options = {"value_dim": 12, "layer": 1, "layers": 3, "backend": "torch"} | keywords
    return LinearAttention(24, 3, **options).to(device)


def features(device: torch.device, batch: int = 2, tokens: int = 11) -> Tensor:
    return torch.randn(batch, tokens, 24).to(device)


@positions
@pytest.mark.parametrize("activation", ["silu", "none"])
def test_it_is_a_recurrence_on_encoded_tokens(position: str, activation: str, device: torch.device) -> None:
    module = layer(device, position=position, activation=activation).double()
    x = features(device).double()
    q, k, v = (linear(x).unflatten(-1, (3, -1)) for linear in (module.q, module.k, module.v))
    place = {"encoding": position, "activation": activation, "interleaved": False, "offset": 0, "cu_seqlens": None}
    theta = None if module.position is None else module.position.theta
    q, k = (reference.features(t, theta=theta, **place) for t in (q, k))
    decay = -(2.0 ** (-8.0 * torch.arange(1, 4, device=device).double() / 3)) * (1 - 1 / 3)
    start = torch.zeros(2, 3, q.shape[-1], 12, device=device, dtype=torch.float64)
    values, _ = reference.recurrence(q, k, v, decay.expand(2, 11, 3), start)
    values = torch.nn.functional.rms_norm(values * 8**-0.5, (12,), eps=1e-5)
    expected = module.out(values.flatten(2) * torch.nn.functional.silu(module.gate(x)))
    torch.testing.assert_close(module(x), expected, rtol=1e-6, atol=1e-6)


@torch.no_grad()
def test_what_the_cache_refuses(device: torch.device) -> None:
    module, x, cache = layer(device), features(device), StateCache()
    module(x[:, :4], cache)
    module(x[:, 4:6], cache)
    for lengths in ([7, 1], [6], [-1, 2], [3, 6]):
        with pytest.raises(ArgumentError, match="lengths"):
            cache.truncate(lengths)
    with pytest.raises(DtypeError, match="lengths"):
        cache.truncate(5.0)
    assert cache.lengths == [6, 6]
    with pytest.raises(ShapeError, match="initial_state"):
        module(features(device, batch=3), cache)
    with pytest.raises(ShapeError, match="put: state"):
        cache.put(torch.zeros(2, 3, 8, 5), 1, lambda entry, tokens: torch.zeros(1))


@positions
@torch.no_grad()
def test_the_state_has_the_features_of_an_encoded_key(position: str, device: torch.device) -> None:
    cache = StateCache()
    layer(device, position=position)(features(device), cache)
    assert cache.state is not None
    assert cache.state.shape == (2, 3, 16 if position == "cosine" else 8, 12)


def test_the_state_dict_is_as_documented(device: torch.device) -> None:
    shapes = {name: tuple(value.shape) for name, value in layer(device).state_dict().items()}
    assert shapes == {
        "q.weight": (24, 24),
        "k.weight": (24, 24),
        "v.weight": (36, 24),
        "gate.weight": (36, 24),
        "out.weight": (24, 36),
        "norm.weight": (12,),
        "decay": (3,),
        "position.theta": (3, 4),
    }


def test_later_layers_forget_more_slowly(device: torch.device) -> None:
    decays = torch.stack([layer(device, layer=i).decay for i in range(3)])
    assert (decays < 0).all()
    assert (decays.diff(dim=0) > 0).all()
    assert (decays.diff(dim=1) > 0).all()


@pytest.mark.parametrize(
    "wrong", [{"value_dim": 0}, {"base": 0.0}, {"position": "sine"}, {"layer": 3}, {"layer": -1}, {"layers": 0}]
)
def test_wrong_sizes_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ArgumentError, match=next(iter(wrong))):
        LinearAttention(8, 2, **{"layers": 3, **wrong})
    with pytest.raises(ArgumentError, match="head_dim"):
        LinearAttention(8, 2, head_dim=5)
