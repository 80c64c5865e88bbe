"""What stands beside tensor-product attention in its benches: that it computes what it says, on as many bytes."""

import pytest
import torch
from test_tpa import exact, factors

from warploom.ops.tpa import peers, reference
from warploom.testing.conformance import make_inputs

Tensor = torch.Tensor
CASE = {"batch": 2, "heads": 8, "head_dim": 16, "rank": 3, "dtype": "float64", "m": 37}
FUSED = CASE | {"dtype": "bfloat16"}  # for PyTorch's fused kernels on a GPU


@pytest.mark.parametrize("rank", [1, 2])
@pytest.mark.parametrize("provider", [peers.naive_decode, peers.factored_decode])
def test_plain_decoding_is_right(device: torch.device, provider: peers.Provider, rank: int) -> None:
    inputs = factors(device, rank_k=rank, rank_v=rank, dtype=torch.float64)
    torch.testing.assert_close(provider(**inputs), reference.tpa_decode(**inputs))


def test_plain_attention_is_right(device: torch.device) -> None:
    inputs = factors(device, tokens=9, keys=9, rank_k=2, rank_v=2, dtype=torch.float64)
    for causal in (False, True):
        found, expected = (f(**inputs, causal=causal) for f in (peers.naive_attention, reference.tpa_attention))
        torch.testing.assert_close(found, expected)


def test_decoding_on_formed_keys_is_decoding_on_their_factors(device: torch.device) -> None:
    """With as many heads of keys as of queries, and with groups where head factors are alike in a group."""
    for group in (1, 4):
        x = factors(device, heads=8, rank_k=2, rank_v=3, dtype=torch.float64)
        for name in ("ak", "av"):
            x[name] = x[name][:, :, ::group].repeat_interleave(group, 2)
        q, k, v = x["aq"] @ x["bq"] / 3, x["ak"] @ x["bk"] / 2, x["av"] @ x["bv"] / 3
        whole = {"q": q, "k": k[:, :, ::group], "v": v[:, :, ::group]}
        torch.testing.assert_close(peers.whole_cache_definition(**whole), reference.tpa_decode(**x))


@pytest.mark.parametrize("other", peers.OTHERS, ids=lambda other: other.operator.name)
def test_other_functions_are_right_and_as_large_as_they_say(device: torch.device, other: peers.Other) -> None:
    operator, case = other.operator, FUSED if device.type == "cuda" else CASE
    inputs = make_inputs(operator, case, device)
    wanted = operator.reference(**exact(inputs))
    close = {"rtol": 0.02, "atol": 0.02} if case is FUSED else {}
    for build in other.providers.values():
        torch.testing.assert_close(build(case)(**inputs), wanted, check_dtype=False, **close)
    moved = sum(x.numel() for x in inputs.values()) + wanted.numel()
    assert other.traffic(case, "fwd").min_bytes == inputs["q"].element_size() * moved


def test_heads_that_share_keys_may_be_given_as_tokens(device: torch.device) -> None:
    inputs = peers.whole_cache_inputs(4, CASE, device, torch.Generator().manual_seed(0))
    found = peers._sdpa(None, True, **inputs)
    torch.testing.assert_close(found, peers.whole_cache_definition(**inputs))
    assert found.shape == (2, 1, 8, 16)
