"""Where NaN and infinities in a token of tensor-product attention end up: in the rows that they reach, no others.

A query reaches its own row, a key or value the rows that see it. Where a tile of pairs is multiplied, a hidden pair
takes part with the weight 0, and 0 · NaN is NaN: the README says under "Limits" what is reached so.
"""

import math
from typing import Any, NamedTuple

import pytest
import torch
from test_tpa import BACKENDS, factors, lengths

from warploom import tpa_attention, tpa_decode
from warploom.runtime.backend import HAS_TRITON

pytestmark = pytest.mark.filterwarnings("ignore:(invalid value|All-NaN):RuntimeWarning")

Tensor = torch.Tensor
NAMES = ("aq", "ak", "av", "bq", "bk", "bv")
NEAR = 512
"""Places beyond what a mask shows within which the kernels multiply hidden pairs."""


def with_number(x: dict[str, Tensor], name: str, entry: int, token: int, number: float) -> dict[str, Tensor]:
    """The same tensors, but for the first number of a token."""
    spoiled = x[name].clone()
    spoiled[entry, token].view(-1)[0] = number
    return x | {name: spoiled}


def assert_contained(found: Tensor, usual: Tensor, must: Tensor, may: Tensor, number: float) -> None:
    """A result differs from the usual where it ``may``; NaN is where it ``must`` be, in the shape of its rows."""
    different = (found != usual).any(-1).cpu()  # NaN differs from all
    assert not (different & ~may).any(), f"reached: {(different & ~may).nonzero()[:5].tolist()}"
    if math.isnan(number):
        lost = must & ~found.isnan().any(-1).cpu()
        assert not lost.any(), f"no NaN in {lost.nonzero()[:5].tolist()}"


@pytest.mark.parametrize("function", [tpa_decode, tpa_attention])
@pytest.mark.parametrize("backend", BACKENDS)
def test_scores_beyond_the_numbers_of_float16(function: Any, backend: str, device: torch.device) -> None:
    x = factors(device, tokens=3, keys=3, heads=2, dtype=torch.float16)
    x = x | {name: torch.full_like(x[name], 16.0) for name in ("aq", "ak", "bq", "bk")}
    exact = function(**{name: value.double() for name, value in x.items()}, backend="torch")
    torch.testing.assert_close(function(**x, backend=backend).double(), exact, atol=2e-3, rtol=2e-3)


# ----------------------------------------------------------------------------------------------------------
# Decoding: rows of several tokens and heads share a tile, and a hidden value reaches none of them
# ----------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not HAS_TRITON, reason="needs Triton")
@pytest.mark.parametrize(
    ("strategy", "tokens", "heads", "dtype"),
    [
        ("batch", 1, 8, torch.bfloat16),
        ("batch", 3, 3, torch.float32),
        ("batch_head", 3, 18, torch.float32),
        ("split_kv", 5, 2, torch.float16),
    ],
)
@pytest.mark.parametrize("name", NAMES)
def test_decoding(
    device: torch.device, name: str, strategy: str, tokens: int, heads: int, dtype: torch.dtype
) -> None:
    """With one token, 64 features and heads in eights, on Hopper the kernel that there is for it."""
    keys, valid = (140, 133) if strategy == "split_kv" else (70, 65)
    features = 64 if tokens == 1 else 8
    sizes = {"tokens": tokens, "heads": heads, "keys": keys, "features": features, "values": features}
    x = factors(device, **sizes, rank_k=2, rank_v=2, dtype=dtype)
    options: dict[str, Any] = {"seqused_k": lengths(device, valid, keys), "strategy": strategy}
    usual = tpa_decode(**x, **options, backend="triton")
    of_queries = name in ("aq", "bq")
    for token in {0, tokens - 1} if of_queries else {valid - tokens, valid - 1, valid}:
        # The valid keys in front of the last ones, which are the queries' own, are seen by all queries.
        rows = torch.arange(tokens) == token if of_queries else torch.arange(tokens) >= token - (valid - tokens)
        if not of_queries and token == valid:
            rows = torch.zeros_like(rows)
        reached = torch.zeros(usual.shape[:3], dtype=torch.bool)
        reached[0, rows, slice(1 if name.startswith("a") else None)] = True
        for number in (math.nan, math.inf):
            found = tpa_decode(**with_number(x, name, 0, token, number), **options, backend="triton")
            assert_contained(found, usual, reached, reached, number)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_query_that_sees_no_key(device: torch.device, dtype: torch.dtype, backend: str) -> None:
    """Its output is zero, whatever it is."""
    x = factors(device, batch=2, tokens=1, heads=2, keys=5, features=8, values=8, dtype=dtype)
    usual = tpa_decode(**x, seqused_k=lengths(device, 0, 4), backend=backend)
    for number in (math.nan, math.inf):
        spoiled = with_number(x, "bq", 0, 0, number)
        out = tpa_decode(**spoiled, seqused_k=lengths(device, 0, 4), backend=backend)
        assert torch.equal(out, usual)
        assert not out[0].any()


# ----------------------------------------------------------------------------------------------------------
# Attention
# ----------------------------------------------------------------------------------------------------------


class Setting(NamedTuple):
    """A call of one batch entry with as many queries as keys, and the token of it that goes bad."""

    tokens: int
    bad: int
    causal: bool = True
    bounds: tuple[int, ...] = ()  # of packed sequences
    rank: int = 1
    features: int = 8
    dtype: torch.dtype = torch.float32

    def sees(self, more: int = 0) -> Tensor:
        """Which keys each query sees (N, N), with a mask that shows so many places more."""
        token = torch.arange(self.tokens)
        sequence = torch.bucketize(token, torch.tensor(self.bounds[1:]), right=True)
        seen = sequence[:, None] == sequence
        return seen & (token[:, None] + more >= token) if self.causal else seen

    def options(self, device: torch.device) -> dict[str, Any]:
        packed = {"cu_seqlens": lengths(device, *self.bounds)} if self.bounds else {}
        return {"causal": self.causal, **packed}


SETTINGS = {
    "causal": Setting(20, 10, rank=2),
    "full": Setting(20, 10, causal=False, dtype=torch.bfloat16),
    "packed": Setting(20, 10, bounds=(0, 7, 7, 16, 20), dtype=torch.bfloat16),
    "packed_full": Setting(20, 10, causal=False, bounds=(0, 7, 16, 20), rank=2),
}
LONG = {
    "long": Setting(1500, 600, rank=3, dtype=torch.bfloat16),
    "long_packed": Setting(1500, 600, bounds=(0, 500, 1100, 1500), dtype=torch.bfloat16, features=64),
    "wide": Setting(1500, 600, rank=1, dtype=torch.bfloat16, features=64),
    "wide_ranks": Setting(1500, 600, rank=2, dtype=torch.bfloat16, features=128),
    "wide_full": Setting(1500, 600, causal=False, rank=2, dtype=torch.bfloat16, features=64),
}


def run(setting: Setting, x: dict[str, Tensor], backend: str) -> dict[str, Tensor]:
    """The output, and the gradients of all factors by their names."""
    leaves = {name: x[name].clone().requires_grad_() for name in NAMES}
    out = tpa_attention(**leaves, **setting.options(x["grad"].device), backend=backend)
    gradients = torch.autograd.grad(out, list(leaves.values()), x["grad"])
    return {"out": out.detach(), **dict(zip(NAMES, gradients, strict=True))}


def reached(setting: Setting, which: str, backend: str) -> dict[str, tuple[Tensor, Tensor]]:
    """Of each result, the tokens that must and those that may be reached by a number in a token of ``which``."""
    sees, near = setting.sees(), setting.sees(NEAR)
    if backend == "torch":
        near = torch.ones_like(near)
    none = torch.zeros(setting.tokens, dtype=torch.bool)
    own = none.clone()
    own[setting.bad] = True
    if which in ("aq", "bq", "grad"):
        seen, hidden = sees[setting.bad], near[setting.bad]
        of_query, of_keys = (own, own), (seen, hidden)
        of_values = (seen, hidden) if which == "grad" else (seen, seen)
        out = (none, none) if which == "grad" else of_query
    else:
        seen, hidden = sees[:, setting.bad], near[:, setting.bad]
        beside = sees[seen].any(0)  # the keys of the queries that see it
        out = of_query = (seen, hidden)
        of_keys, of_values = (beside, near[hidden].any(0)), (none, own)
        if which in ("ak", "bk"):
            out, of_values = (seen, seen), (beside, beside)
            of_keys = beside, near[seen].any(0) | own
    results = {"out": out}
    for letter, tokens in (("q", of_query), ("k", of_keys), ("v", of_values)):
        results |= {"a" + letter: tokens, "b" + letter: tokens}
    return results


def check(setting: Setting, which: str, backend: str, device: torch.device) -> None:
    sizes = {"batch": 1, "tokens": setting.tokens, "keys": setting.tokens, "heads": 2}
    ranks = {"rank_k": setting.rank, "rank_v": setting.rank}
    x = factors(device, **sizes, **ranks, features=setting.features, values=setting.features, dtype=setting.dtype)
    x["grad"] = torch.randn(1, setting.tokens, 2, setting.features).to(device, setting.dtype)
    usual = run(setting, x, backend)
    for number in (math.nan, math.inf):
        found = run(setting, with_number(x, which, 0, setting.bad, number), backend)
        for name, (must, may) in reached(setting, which, backend).items():
            result, before = found[name].flatten(2), usual[name].flatten(2)  # of any head or rank
            assert_contained(result, before, must[None], may[None], number)


@pytest.mark.sample(3)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("which", [*NAMES, "grad"])
def test_attention(which: str, name: str, backend: str, device: torch.device) -> None:
    check(SETTINGS[name], which, backend, device)


@pytest.mark.gpu
@pytest.mark.parametrize("name", LONG)
@pytest.mark.parametrize("which", [*NAMES, "grad"])
def test_long_attention(which: str, name: str, device: torch.device) -> None:
    check(LONG[name], which, "triton", device)
