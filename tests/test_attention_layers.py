"""What layers of linear and of tensor-product attention have in common: a cache, packed sequences, gradients."""

import copy
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from warploom import ArgumentError, DtypeError, ShapeError
from warploom.nn import (
    Attention,
    DeltaAttention,
    FactorCache,
    KVCache,
    LinearAttention,
    RotaryEmbedding,
    StateCache,
    TensorProductAttention,
)
from warploom.runtime.backend import HAS_TRITON

Tensor = torch.Tensor
BACKENDS = ("torch", "triton") if HAS_TRITON else ("torch",)
DIM = 24


class Kind(NamedTuple):
    make: Callable[..., torch.nn.Module]
    cache: Callable[[], Any]
    tolerance: float
    """Of outputs, relative and absolute; ten times it of gradients."""

    def layer(self, device: torch.device, **keywords: object) -> torch.nn.Module:
        return self.make(DIM, 3, value_dim=12, **keywords).to(device)

    def assert_near(self, found: Tensor, expected: Tensor) -> None:
        torch.testing.assert_close(found, expected, rtol=self.tolerance, atol=self.tolerance)


_linear = partial(LinearAttention, layer=1, layers=3)
KINDS = {
    "tpa": Kind(
        partial(TensorProductAttention, rank_q=3, rank_k=2, rank_v=1, causal=True),
        partial(FactorCache, capacity=16),
        1e-5,
    ),
    **{
        f"linear {name}": Kind(partial(_linear, position=name), StateCache, 1e-4)
        for name in ("rotate", "cosine", "none")
    },
    **{
        f"delta {decay} {position}": Kind(
            partial(DeltaAttention, key_heads=1, decay=decay, position=position), StateCache, 1e-4
        )
        for decay, position in (("none", "rotate"), ("head", "none"), ("feature", "rotate"))
    },
}
kinds = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
backends = pytest.mark.parametrize("backend", BACKENDS)


def features(device: torch.device, batch: int = 2, tokens: int = 11) -> Tensor:
    return torch.randn(batch, tokens, DIM).to(device)


@backends
@kinds
@torch.no_grad()
def test_prefill_then_decode_is_the_full_forward(device: torch.device, backend: str, kind: Kind) -> None:
    module, full, x = kind.layer(device, backend=backend), kind.layer(device, backend="torch"), features(device)
    full.load_state_dict(module.state_dict())
    expected = full(x)
    kind.assert_near(module(x), expected)
    cache = kind.cache()
    parts = [module(x[:, start:end], cache) for start, end in ((0, 5), (5, 6), (6, 10), (10, 11))]
    kind.assert_near(torch.cat(parts, dim=1), expected)
    assert cache.lengths == [11, 11]


@backends
@kinds
@torch.no_grad()
def test_entries_of_different_length(device: torch.device, backend: str, kind: Kind) -> None:
    module, x = kind.layer(device, backend=backend), features(device, batch=3, tokens=12)
    cache = kind.cache()
    module(x[:, :7], cache)
    cache.truncate([7, 0, 5])
    cache.truncate([6, 0, 5])
    for step in (2, 1):  # two new tokens at once, then one
        new = torch.stack([x[i, n : n + step] for i, n in enumerate(cache.lengths)])
        start = list(cache.lengths)
        found = module(new, cache)
        for i, n in enumerate(start):
            kind.assert_near(found[i], module(x[i : i + 1, : n + step])[0, n:])
    assert cache.seqlens.tolist() == [9, 3, 8]
    module(x[:, :2], cache)
    cache.truncate([10, 3, 9])  # from entries that differed before
    found = module(x[:, 9:10], cache)
    whole = torch.cat((x[:1, :9], x[:1, :1], x[:1, 9:10]), dim=1)
    kind.assert_near(found[0], module(whole)[0, -1:])


@backends
@kinds
@pytest.mark.parametrize(("batch", "tokens"), [(0, 3), (2, 0), (0, 0)])
def test_nothing_to_attend_with(batch: int, tokens: int, kind: Kind, backend: str, device: torch.device) -> None:
    module = kind.layer(device, backend=backend)
    x = torch.randn(batch, tokens, DIM, device=device).requires_grad_()
    (gradient,) = torch.autograd.grad(module(x).sum(), x)
    assert gradient.shape == x.shape
    with torch.no_grad():
        cache = kind.cache()
        for more in (x, x, torch.randn(batch, 1, DIM, device=device)):
            assert module(more, cache).shape == more.shape


@backends
@kinds
def test_packed_sequences_are_separate(device: torch.device, backend: str, kind: Kind) -> None:
    module, x = kind.layer(device, backend=backend), features(device, batch=1)
    packed = module(x, cu_seqlens=torch.tensor([0, 4, 11], device=device))
    kind.assert_near(packed, torch.cat((module(x[:, :4]), module(x[:, 4:])), dim=1))


@backends
@kinds
def test_gradients_reach_every_parameter(device: torch.device, backend: str, kind: Kind) -> None:
    module, exact = kind.layer(device, backend=backend, bias=True), kind.layer(device, backend="torch", bias=True)
    exact.load_state_dict(module.state_dict())
    exact.double()
    x = features(device)
    grad = torch.randn(2, 11, DIM).to(device)
    module(x).backward(grad)
    exact(x.double()).backward(grad.double())
    for (name, found), expected in zip(module.named_parameters(), exact.parameters()):
        assert found.grad is not None, name
        expected_grad = expected.grad.double()  # theta stays float32
        torch.testing.assert_close(
            found.grad.double(), expected_grad, rtol=10 * kind.tolerance, atol=10 * kind.tolerance
        )


@kinds
def test_wrong_calls_are_refused(device: torch.device, kind: Kind) -> None:
    module, x = kind.layer(device), features(device, batch=1)
    with pytest.raises(ShapeError, match="d_model"):
        module(x[..., :5])
    with pytest.raises(ArgumentError, match="cu_seqlens"):
        module(x, kind.cache(), torch.tensor([0, 11], device=device))
    with pytest.raises(ArgumentError, match="gradient"):
        module(x, kind.cache())
    with pytest.raises(ArgumentError, match="appended"):
        _ = kind.cache().seqlens
    with torch.no_grad(), pytest.raises(DtypeError, match="cache"):
        module(x, KVCache())


# ----------------------------------------------------------------------------------------------------------
# Caches, of attention too
# ----------------------------------------------------------------------------------------------------------


def _attention(*sizes: int, value_dim: int, backend: str = "auto") -> Attention:
    return Attention(DIM, 3, causal=True, position=RotaryEmbedding(8))


CACHED = {
    "attention": Kind(_attention, KVCache, 1e-5),
    **{name: KINDS[name] for name in ("tpa", "linear rotate", "delta feature rotate")},
}
cached = pytest.mark.parametrize("kind", CACHED.values(), ids=CACHED)


@cached
@pytest.mark.parametrize("modes", [(torch.inference_mode, torch.no_grad), (torch.no_grad, torch.inference_mode)])
def test_a_cache_goes_on_in_another_mode(kind: Kind, modes: tuple[Any, Any], device: torch.device) -> None:
    module, x, cache = kind.layer(device), features(device), kind.cache()
    with modes[0]():
        module(x[:, :5], cache=cache)
        cache.reorder([1, 0])
        cache.truncate([5, 4])
    with modes[1]():
        found = module(torch.stack((x[1, 5:7], x[0, 4:6])), cache=cache)
        for entry, start in ((1, 5), (0, 4)):
            expected = module(x[entry : entry + 1, : start + 2])[:, start:]
            kind.assert_near(found[1 - entry : 2 - entry], expected)


@cached
@torch.no_grad()
def test_beams_go_on_from_others(kind: Kind, device: torch.device) -> None:
    module, x, cache = kind.layer(device), features(device, batch=3), kind.cache()
    with pytest.raises(ArgumentError, match="appended to first"):
        cache.reorder([0])
    module(x[:, :6], cache=cache)
    for indices, error in (([0.5], DtypeError), ([], ShapeError), (torch.zeros(1, 1).int(), ShapeError)):
        with pytest.raises(error, match=r"reorder: indices must be"):
            cache.reorder(indices)
    for indices in ([0, 3], torch.tensor([-1])):
        with pytest.raises(ArgumentError, match="from 0 to 2"):
            cache.reorder(indices)
    cache.reorder(torch.tensor([2, 0, 0]).to(device))
    cache.reorder([0, 1, 1, 2])  # one more
    beams = [2, 0, 0, 0]
    assert cache.lengths == [6] * 4
    cache.truncate([6, 5, 6, 4])
    cache.reorder(torch.tensor([3, 2, 0], dtype=torch.int32))
    beams, lengths = [beams[i] for i in (3, 2, 0)], [4, 6, 6]
    assert cache.lengths == cache.seqlens.tolist() == lengths
    found = module(torch.stack([x[b, n : n + 1] for b, n in zip(beams, lengths)]), cache=cache)
    for entry, (beam, n) in enumerate(zip(beams, lengths)):
        kind.assert_near(found[entry], module(x[beam : beam + 1, : n + 1])[0, n:])
    cache.reorder([2, 1])
    assert cache.offset == 7, "those that are left are as long"


@cached
@torch.no_grad()
def test_a_cache_is_pickled_and_copied(kind: Kind, device: torch.device) -> None:
    module, x, cache = kind.layer(device), features(device), kind.cache()
    module(x[:, :5], cache=cache)
    copies = pickle.loads(pickle.dumps(cache)), copy.deepcopy(cache)
    module(x[:, :3], cache=cache)
    for other in copies:
        other.truncate([4, 5])
        found = module(torch.stack((x[0, 4:5], x[1, 5:6])), cache=other)
        kind.assert_near(found[0], module(x[:1, :5])[0, 4:])
        kind.assert_near(found[1], module(x[1:, :6])[0, 5:])


@pytest.mark.parametrize("name", ["attention", "linear rotate", "delta feature rotate"])
@torch.no_grad()
def test_compiled_decoding_compiles_three_times_at_most(
    name: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = CACHED[name]
    monkeypatch.setattr(KVCache, "_FIRST", 4)  # it grows twice
    torch._dynamo.reset()
    module, x, cache = kind.layer(device), features(device, tokens=10), kind.cache()
    counter = CompileCounterWithBackend("eager")
    step = torch.compile(lambda x: module(x, cache=cache), backend=counter, fullgraph=True)
    found = [step(x[:, n : n + 1]) for n in range(10)]
    kind.assert_near(torch.cat(found, dim=1), module(x))
    assert counter.frame_count <= 3
