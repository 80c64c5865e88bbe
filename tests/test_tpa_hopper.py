"""Tensor-product attention with flash attention's kernels for Hopper."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from launches import large
from test_tpa import factors

from warploom import tpa_attention
from warploom.ops.tpa import reference
from warploom.runtime.backend import HAS_TRITON
from warploom.testing.accuracy import compare
from warploom.testing.poison import poison_allocations

pytestmark = pytest.mark.skipif(not HAS_TRITON, reason="needs Triton")

Tensor = torch.Tensor


def run(inputs: dict[str, Any], grad: Tensor, function: Any, **options: Any) -> tuple[Tensor, ...]:
    """The output, and the gradients of all factors."""
    out = function(**inputs, **options)
    wanted = [value for value in inputs.values() if isinstance(value, Tensor)]
    return out.detach(), *torch.autograd.grad(out, wanted, grad.to(out.dtype))


def assert_right(inputs: dict[str, Any], grad: Tensor | None = None, **options: Any) -> None:
    """Output and all gradients are within the budget that the reference in the inputs' dtype sets."""
    options = {"causal": True} | options
    inputs = {name: None if x is None else x.detach().requires_grad_() for name, x in inputs.items()}
    double = {name: None if x is None else x.detach().double().requires_grad_() for name, x in inputs.items()}
    if grad is None:
        aq, bq, bv = inputs["aq"], inputs["bq"], inputs["bv"]
        grad = torch.randn(*(bq if aq is None else aq).shape[:3], bv.shape[3], device=bq.device, dtype=bq.dtype)
    with poison_allocations():
        found = run(inputs, grad, tpa_attention, backend="triton", **options)
    expected = run(double, grad, reference.tpa_attention, **options)
    accuracy = compare(found, expected, run(inputs, grad, reference.tpa_attention, **options))
    assert accuracy.ok, accuracy.describe()


@pytest.mark.sample(5)
@pytest.mark.parametrize("rank", [1, 2, 17])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("tokens", "keys", "heads", "features", "values", "dtype"),
    [
        large(1000, 1000, 16, 128, 128, torch.bfloat16),
        large(777, 777, 12, 64, 64, torch.float16),
        large(300, 900, 7, 128, 128, torch.float16),
        large(700, 333, 6, 64, 64, torch.bfloat16),
        (1, 500, 5, 128, 128, torch.bfloat16),
        (500, 3, 3, 128, 128, torch.bfloat16),
        large(385, 257, 20, 80, 96, torch.bfloat16),
        (200, 257, 4, 80, 96, torch.bfloat16),
        (65, 63, 1, 128, 40, torch.float16),
        large(1000, 60, 24, 64, 64, torch.bfloat16),  # tiles of one step, several a program
    ],
)
def test_values_and_gradients(
    tokens: int, keys: int, heads: int, features: int, values: int, dtype: torch.dtype, causal: bool, rank: int,
    launched: list[str], device: torch.device,
) -> None:  # fmt: skip
    sizes = {"tokens": tokens, "keys": keys, "heads": heads, "features": features, "values": values}
    inputs = factors(device, **sizes, rank_k=rank, rank_v=rank, dtype=dtype)
    assert_right(inputs, causal=causal)
    assert launched


@pytest.mark.seldom(6, 24)
@pytest.mark.sample(3)
@pytest.mark.parametrize("rank", [1, 2, 17])
def test_scales_and_whole_queries(rank: int, launched: list[str], device: torch.device) -> None:
    sizes = {"tokens": 200, "keys": 300, "rank_k": rank, "rank_v": rank, "features": 64, "values": 64}
    inputs = factors(device, **sizes, dtype=torch.bfloat16)
    scales = {"scale": 0.2, "scale_q": 0.5, "scale_k": -0.7, "scale_v": 1.5}
    assert_right(inputs, **scales)
    whole = torch.randn(2, 200, 3, 64, device=device, dtype=torch.bfloat16)
    assert_right(inputs | {"aq": None, "bq": whole}, **scales)
    assert launched


@pytest.mark.gpu
def test_strides_of_factors_and_gradient(launched: list[str], device: torch.device) -> None:
    sizes = {"tokens": 200, "keys": 200, "heads": 4, "rank_k": 2, "rank_v": 2, "features": 64, "values": 64}
    inputs = factors(device, **sizes, dtype=torch.bfloat16)
    inputs = {name: x.transpose(1, 2).contiguous().transpose(1, 2) for name, x in inputs.items()}
    inputs["ak"] = torch.stack((inputs["ak"], inputs["ak"]), -1)[..., 1]
    wide = torch.randn(2, 200, 4, 130, device=device, dtype=torch.bfloat16)
    for grad in (wide[..., 1:65], wide[..., ::2][..., :64], wide[:, :, :1, :1].expand(2, 200, 4, 64)):
        assert_right(inputs, grad)
    assert launched


@pytest.mark.gpu
@pytest.mark.parametrize("rank", [1, 2, 17])
def test_the_same_bits_twice(rank: int, launched: list[str], device: torch.device) -> None:
    sizes = {"tokens": 1500, "keys": 1500, "heads": 16, "rank_k": rank, "rank_v": rank}
    inputs = factors(device, **sizes, features=128, values=128, dtype=torch.bfloat16)
    inputs = {name: x.requires_grad_() for name, x in inputs.items()}
    grad = torch.randn(2, 1500, 16, 128, device=device, dtype=torch.bfloat16)
    first, second = (run(inputs, grad, tpa_attention, causal=True, backend="triton") for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second))
    assert "hopper_forward_kernel" in launched


def alone(patch: pytest.MonkeyPatch) -> None:
    """Let every launch end before the next."""
    from warploom.runtime.launch import Launch

    def wait(usual: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            torch.cuda.synchronize()
            result = usual(*arguments, **options)
            torch.cuda.synchronize()
            return result

        return call

    patch.setattr(Launch, "__call__", wait(Launch.__call__))


@pytest.mark.gpu
@pytest.mark.parametrize("whole", [False, True], ids=["factors", "whole queries"])
@pytest.mark.parametrize(
    ("tokens", "keys", "heads", "rank"),
    [(300, 300, 2, 1), (2048, 2048, 16, 1), (100, 3000, 5, 4), (2500, 2500, 20, 2)],
)
def test_launches_that_overlap_give_the_bits_of_those_that_do_not(
    tokens: int, keys: int, heads: int, rank: int, whole: bool,
    launched: list[str], device: torch.device, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    # Memory that a launch did not wait for holds NaN, or what a call with other inputs left there.
    sizes = {"tokens": tokens, "keys": keys, "heads": heads, "rank_k": rank, "rank_v": rank}
    calls = []
    for _ in range(3):
        inputs: dict[str, Any] = factors(device, **sizes, features=128, values=128, dtype=torch.bfloat16)
        if whole:
            inputs |= {"aq": None, "bq": torch.randn(2, tokens, heads, 128, device=device, dtype=torch.bfloat16)}
        inputs = {name: None if x is None else x.requires_grad_() for name, x in inputs.items()}
        calls.append((inputs, torch.randn(2, tokens, heads, 128, device=device, dtype=torch.bfloat16)))
    with monkeypatch.context() as patch:
        alone(patch)
        expected = [run(*call, tpa_attention, causal=True, backend="triton") for call in calls]
    for memory in (nullcontext(), poison_allocations()):
        with memory:
            found = [run(*call, tpa_attention, causal=True, backend="triton") for call in 4 * calls]
        for results, wanted in zip(found, 4 * expected):
            assert all(torch.equal(a, b) for a, b in zip(results, wanted, strict=True))
    assert launched


@pytest.mark.gpu
def test_a_graph_of_launches_that_overlap_replays(launched: list[str], device: torch.device) -> None:
    sizes = {"tokens": 1000, "keys": 1000, "heads": 16, "features": 128, "values": 128}
    inputs = {n: x.requires_grad_() for n, x in factors(device, **sizes, dtype=torch.bfloat16).items()}
    grad = torch.randn(2, 1000, 16, 128, device=device, dtype=torch.bfloat16)
    run(inputs, grad, tpa_attention, causal=True, backend="triton")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run(inputs, grad, tpa_attention, causal=True, backend="triton")
    with torch.no_grad():
        for x in inputs.values():
            x.mul_(0.5).add_(0.125)
    for _ in range(3):
        graph.replay()
    found = run(inputs, grad, tpa_attention, causal=True, backend="triton")
    assert all(torch.equal(a, b) for a, b in zip(captured, found, strict=True))
    assert "hopper_forward_kernel" in launched


@pytest.mark.gpu
def test_other_batches_and_later_keys_do_not_matter(launched: list[str], device: torch.device) -> None:
    sizes = {"tokens": 600, "keys": 600, "heads": 16, "rank_k": 2, "rank_v": 2, "features": 128, "values": 128}
    inputs = factors(device, **sizes, dtype=torch.bfloat16)
    clean = tpa_attention(**inputs, causal=True, backend="triton")
    for name in ("ak", "av", "bk", "bv"):
        inputs[name][1] = torch.nan
        inputs[name][0, 599:] = torch.nan
    out = tpa_attention(**inputs, causal=True, backend="triton")
    assert torch.equal(out[0, :512], clean[0, :512])
    assert launched == ["hopper_forward_kernel"] * 2
