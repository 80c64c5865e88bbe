"""The linear attention layer: what it computes, decoding from its state, training."""

import pytest
import torch

from warploom import ArgumentError, DtypeError, ShapeError
from warploom.nn import KVCache, LinearAttention, StateCache
from warploom.ops.linear_attention import reference
from warploom.runtime.backend import HAS_TRITON

Tensor = torch.Tensor
BACKENDS = ("torch", "triton") if HAS_TRITON else ("torch",)
backends = pytest.mark.parametrize("backend", BACKENDS)
positions = pytest.mark.parametrize("position", ["rotate", "cosine", "none"])


def layer(device: torch.device, backend: str = "torch", **keywords: object) -> LinearAttention:
    options = {"value_dim": 12, "layer": 1, "layers": 3, "backend": backend} | keywords
    return LinearAttention(24, 3, 8, **options).to(device)


def features(device: torch.device, batch: int = 2, tokens: int = 11) -> Tensor:
    return torch.randn(batch, tokens, 24).to(device)


def assert_near(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


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


@backends
@positions
@torch.no_grad()
def test_prefill_then_decode_is_the_full_forward(device: torch.device, backend: str, position: str) -> None:
    module, x = layer(device, backend, position=position), features(device)
    expected = module(x)
    cache = StateCache()
    parts = [module(x[:, start:end], cache) for start, end in ((0, 5), (5, 6), (6, 10), (10, 11))]
    assert_near(torch.cat(parts, dim=1), expected)
    assert cache.lengths == [11, 11]
    assert cache.state is not None
    assert cache.state.shape == (2, 3, 16 if position == "cosine" else 8, 12)


@backends
@torch.no_grad()
def test_entries_of_different_length(device: torch.device, backend: str) -> None:
    module, x = layer(device, backend), features(device, batch=3, tokens=12)
    cache = StateCache()
    module(x[:, :7], cache)
    cache.truncate([7, 0, 5])
    cache.truncate([6, 0, 5])
    for step in (2, 1):  # two new tokens at once, then one
        new = torch.stack([x[i, n : n + step] for i, n in enumerate(cache.lengths)])
        start = list(cache.lengths)
        found = module(new, cache)
        for i, n in enumerate(start):
            assert_near(found[i], module(x[i : i + 1, : n + step])[0, n:])
    assert cache.seqlens.tolist() == [9, 3, 8]
    module(x[:, :2], cache)
    cache.truncate([10, 3, 9])  # from entries that differed before
    found = module(x[:, 9:10], cache)
    whole = torch.cat((x[:1, :9], x[:1, :1], x[:1, 9:10]), dim=1)
    assert_near(found[0], module(whole)[0, -1:])


@torch.no_grad()
def test_what_the_cache_refuses(device: torch.device) -> None:
    module, x, cache = layer(device), features(device), StateCache()
    with pytest.raises(ArgumentError, match="appended"):
        _ = cache.seqlens
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
    with pytest.raises(DtypeError, match="cache"):
        module(x, KVCache())
    with torch.enable_grad(), pytest.raises(ArgumentError, match="gradient"):
        module(x, StateCache())


@backends
@pytest.mark.parametrize(("batch", "tokens"), [(0, 3), (2, 0), (0, 0)])
def test_nothing_to_attend_with(batch: int, tokens: int, backend: str, device: torch.device) -> None:
    module = layer(device, backend)
    x = torch.randn(batch, tokens, 24, device=device).requires_grad_()
    (gradient,) = torch.autograd.grad(module(x).sum(), x)
    assert gradient.shape == x.shape
    with torch.no_grad():
        cache = StateCache()
        for more in (x, x, torch.randn(batch, 1, 24, device=device)):
            assert module(more, cache).shape == more.shape


@backends
def test_packed_sequences_are_separate(device: torch.device, backend: str) -> None:
    module, x = layer(device, backend), features(device, batch=1)
    packed = module(x, cu_seqlens=torch.tensor([0, 4, 11], device=device))
    assert_near(packed, torch.cat((module(x[:, :4]), module(x[:, 4:])), dim=1))


@backends
@positions
def test_gradients_reach_every_parameter(device: torch.device, backend: str, position: str) -> None:
    module = layer(device, backend, bias=True, position=position)
    exact = layer(device, bias=True, position=position)
    exact.load_state_dict(module.state_dict())
    exact.double()
    x = features(device)
    grad = torch.randn(2, 11, 24).to(device)
    module(x).backward(grad)
    exact(x.double()).backward(grad.double())
    for (name, found), expected in zip(module.named_parameters(), exact.parameters()):
        assert found.grad is not None, name
        torch.testing.assert_close(found.grad.double(), expected.grad.double(), rtol=1e-3, atol=1e-3)


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
        LinearAttention(8, 2, 4, **{"layers": 3, **wrong})
    with pytest.raises(ArgumentError, match="head_dim"):
        LinearAttention(8, 2, 5)


def test_wrong_calls_are_refused(device: torch.device) -> None:
    module, x = layer(device), features(device, batch=1)
    with pytest.raises(ShapeError, match="dim"):
        module(x[..., :5])
    with pytest.raises(ArgumentError, match="cu_seqlens"):
        module(x, StateCache(), torch.tensor([0, 11], device=device))
