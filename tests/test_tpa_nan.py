"""Tensor-product attention: NaN and infinities reach what the definition says, and nothing beside it in a tile."""

import math
from typing import Any

import pytest
import torch
from test_tpa import exact, factors, lengths, needs_triton
from test_tpa_strides import NAMES

from warploom import tpa_attention, tpa_decode
from warploom.ops.tpa import reference
from warploom.testing.accuracy import Accuracy, compare_each, mean_of

pytestmark = [needs_triton, pytest.mark.filterwarnings("ignore:(invalid value|All-NaN):RuntimeWarning")]

Tensor = torch.Tensor
values = pytest.mark.parametrize("value", [math.nan, math.inf])


def with_one(x: dict[str, Tensor], name: str, entry: int, token: int, value: float) -> dict[str, Tensor]:
    """The same factors, but for the first number of a token."""
    spoiled = x[name].clone()
    spoiled[entry, token].view(-1)[0] = value
    return x | {name: spoiled}


def judged(found: Tensor, expected: Tensor, eager: Tensor, reached: Tensor, value: float) -> Accuracy:
    """The verdict on rows that are not ``reached`` (of the shape of all axes but the last); the others are NaN."""
    nan = found.isnan().any(-1)
    assert not (nan & ~reached).any(), "reached"
    if math.isnan(value):
        assert nan[reached].all(), "lost"
    return compare_each(found[~reached], expected[~reached], eager[~reached])[0]


def assert_right(verdicts: list[Accuracy]) -> None:
    accuracy = mean_of(verdicts)
    assert accuracy.ok, accuracy.describe()


# ----------------------------------------------------------------------------------------------------------
# Decoding
# ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("strategy", "tokens", "heads", "dtype", "value"),
    [
        ("batch", 3, 3, torch.float32, math.nan),
        ("batch", 2, 3, torch.bfloat16, math.inf),
        ("batch_head", 3, 18, torch.float32, math.nan),
        ("split_kv", 5, 2, torch.float16, math.nan),
    ],
)
def test_decoding(
    device: torch.device, strategy: str, tokens: int, heads: int, dtype: torch.dtype, value: float
) -> None:
    keys, valid = (140, 133) if strategy == "split_kv" else (40, 37)
    sizes = {"tokens": tokens, "heads": heads, "keys": keys, "rank_k": 2, "rank_v": 2}
    x = factors(device, **sizes, dtype=dtype)
    options: dict[str, Any] = {"cache_seqlens": lengths(device, valid, keys)}
    expected, eager = reference.tpa_decode(**exact(x), **options), reference.tpa_decode(**x, **options)
    verdicts = []
    for name in NAMES:
        # Queries see all keys before the last ones, which are their own.
        for token in (0, 1) if name in ("aq", "bq") else (valid - tokens, valid - 1, valid):
            spoiled = with_one(x, name, 0, token, value)
            found = tpa_decode(**spoiled, **options, strategy=strategy, backend="triton")
            reached = torch.zeros(found.shape[:3], dtype=torch.bool, device=device)
            some = slice(1) if name.startswith("a") else slice(None)
            if name in ("aq", "bq"):
                reached[0, token, some] = True
            elif token < valid:
                reached[0, token - (valid - tokens) :, some] = True
            verdicts.append(judged(found, expected, eager, reached, value))
    assert_right(verdicts)


@values
def test_decoding_one_token(device: torch.device, value: float) -> None:
    """On Hopper a kernel of its own, which takes several batch entries in turn."""
    sizes = {
        "batch": 3,
        "heads": 8,
        "keys": 70,
        "rank_q": 4,
        "rank_k": 2,
        "rank_v": 2,
        "features": 64,
        "values": 64,
    }
    x = factors(device, **sizes, dtype=torch.bfloat16)
    options: dict[str, Any] = {"cache_seqlens": lengths(device, 70, 33, 65)}
    expected, eager = reference.tpa_decode(**exact(x), **options), reference.tpa_decode(**x, **options)
    verdicts = []
    for name in NAMES:
        for token in (0,) if name in ("aq", "bq") else (32, 33):  # the second is not valid
            found = tpa_decode(**with_one(x, name, 1, token, value), **options, backend="triton")
            reached = torch.zeros(found.shape[:3], dtype=torch.bool, device=device)
            if token < 33:
                reached[1, :, slice(1) if name.startswith("a") else slice(None)] = True
            verdicts.append(judged(found, expected, eager, reached, value))
    assert_right(verdicts)


# ----------------------------------------------------------------------------------------------------------
# Attention
# ----------------------------------------------------------------------------------------------------------


def run(function: Any, x: dict[str, Tensor], grad: Tensor, **options: Any) -> tuple[Tensor, ...]:
    """The output, and the gradients of all factors, in the order of `NAMES`."""
    x = {name: factor.detach().requires_grad_() for name, factor in x.items()}
    out = function(**x, **options)
    return out.detach(), *torch.autograd.grad(out, [x[name] for name in NAMES], grad.to(out.dtype))


def reach(name: str, token: int, sees: Tensor) -> tuple[Tensor, ...]:
    """Which tokens a number of one of them reaches, in each result of `run`. ``sees``: (queries, keys).

    A query reaches its output, and the gradients of the keys that it sees. A key reaches the queries that see it,
    and through their weights the gradients of all keys that these see. So does a value, but for gradients of
    values, for which weights are all that counts: those of its own factors alone, each of which is the other's
    derivative.
    """
    alone = torch.zeros_like(sees[0])
    alone[token] = True
    if name in ("aq", "bq", "grad"):
        out, queries, keys = alone, alone, sees[token]
        out = torch.zeros_like(alone) if name == "grad" else out
        of_values = keys
    else:
        out = queries = sees[:, token]
        keys = of_values = sees[out].any(0)
        if name in ("av", "bv"):
            of_values = alone
    return out, queries, keys, of_values, queries, keys, of_values


@values
@pytest.mark.parametrize("bounds", [None, (0, 7, 20)], ids=["causal", "packed"])
@pytest.mark.parametrize(("dtype", "rank"), [(torch.float32, 2), (torch.bfloat16, 1)])
def test_attention(
    device: torch.device, dtype: torch.dtype, rank: int, bounds: tuple[int, ...] | None, value: float
) -> None:
    x = factors(device, batch=1, tokens=20, keys=20, heads=2, rank_k=rank, rank_v=rank, dtype=dtype)
    token = torch.arange(20, device=device)
    sees = token[:, None] >= token
    options: dict[str, Any] = {}
    if bounds is not None:
        options = {"cu_seqlens": lengths(device, *bounds), "causal": False}
        sees = (token[:, None] >= bounds[1]) == (token >= bounds[1])
    assert_stays(x, sees, (*NAMES, "grad"), value, **options)


def assert_stays(
    x: dict[str, Tensor], sees: Tensor, names: tuple[str, ...], value: float, token: int = 10, **options: Any
) -> None:
    """NaN or an infinity in one of ``names``, of one token, reaches no other result."""
    bv = x["bv"]
    grad = torch.randn(*x["aq"].shape[:3], bv.shape[3], device=bv.device).to(bv.dtype)
    expected, eager = (run(reference.tpa_attention, y, grad, **options) for y in (exact(x), x))
    verdicts: list[list[Accuracy]] = [[] for _ in expected]
    for name in names:
        spoiled = with_one(x | {"grad": grad}, name, 0, token, value)
        found = run(tpa_attention, spoiled, spoiled.pop("grad"), backend="triton", **options)
        results = zip(found, expected, eager, reach(name, token, sees), strict=True)
        for index, (result, right, low, tokens) in enumerate(results):
            reached = tokens.view(1, -1, *[1] * (result.dim() - 3)).expand(result.shape[:-1])
            # The gradient of a factor of values is a sum over features or heads, of which one may be reached.
            some = name in ("av", "bv") and index in (3, 6)
            if result.isnan().any(-1)[~reached].any():
                raise AssertionError(f"{name} reaches {('out', *NAMES)[index]}")
            if math.isnan(value) and not some:
                nan = result.isnan().flatten(2).any(-1)[0]
                assert nan[tokens].all(), f"{name} is lost in {('out', *NAMES)[index]}"
            verdicts[index] += compare_each(result[~reached], right[~reached], low[~reached])
    for of_result in verdicts:
        assert_right(of_result)


@pytest.mark.gpu
@values
@pytest.mark.parametrize("rank", [1, 2])
def test_attention_on_hopper(device: torch.device, rank: int, value: float, launched: list[str]) -> None:
    """Those of queries: values that are NaN may reach other queries of a tile there."""
    sizes = {"batch": 1, "tokens": 300, "keys": 300, "heads": 2, "rank_k": rank, "rank_v": rank}
    x = factors(device, **sizes, features=64, values=64, dtype=torch.bfloat16)
    token = torch.arange(300, device=device)
    assert_stays(x, token[:, None] >= token, ("aq", "bq"), value, token=100)
    assert len(set(launched)) == 3
