"""Softmax over the sequence on Hopper: tiles that hold all tokens, and tiles whose programs wait for others."""

import math
from typing import Any

import pytest
import torch
from test_lrpe import random_theta, random_x
from torch import Tensor

from warploom.ops import operators
from warploom.runtime.backend import HAS_TRITON
from warploom.testing.conformance import judge

pytestmark = [
    pytest.mark.skipif(not HAS_TRITON, reason="needs Triton"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # of infinities and NaN in Triton's interpreter
]

KERNELS = ["slab_forward_kernel", "slab_backward_kernel"]
HEADS = 2
kinds = pytest.mark.parametrize("kind", ["rotate", "cosine"])
ways = pytest.mark.parametrize("tokens", [300, 700], ids=["one part", "parts"])


def random_call(kind: str, tokens: int, device: torch.device, batch: int = 1) -> tuple[Tensor, Tensor]:
    features = 128 if kind == "rotate" else 64
    return random_x(device, batch, tokens, HEADS, features), random_theta(device, HEADS, 64)


def assert_accurate(kind: str, x: Tensor, theta: Tensor, launched: list[str], **more: Any) -> None:
    """Values and gradients within the error budget of the float64 reference, on the kernels for Hopper."""
    inputs = {"x": x.requires_grad_(), "theta": theta, "activation": "softmax_sequence", "offset": 5, **more}
    judgement = judge(operators()[f"lrpe_{kind}"], inputs, "triton")
    assert judgement.fwd.ok, f"fwd: {judgement.fwd.describe()}"
    assert judgement.bwd is not None
    assert judgement.bwd.ok, f"bwd: {judgement.bwd.describe()}"
    assert launched == KERNELS


@kinds
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("tokens", [1, 255, 513, 700])
def test_values_and_gradients(
    tokens: int, dtype: torch.dtype, kind: str, launched: list[str], device: torch.device
) -> None:
    x, theta = random_call(kind, tokens, device)
    assert_accurate(kind, x.to(dtype), theta, launched)


@kinds
@ways
def test_layouts(tokens: int, kind: str, launched: list[str], device: torch.device) -> None:
    """Heads before tokens, gaps between rows that hold NaN, frequencies of all heads."""
    x, _ = random_call(kind, tokens, device, batch=2)
    memory = torch.full((2, HEADS, tokens, x.shape[3] + 16), math.nan, dtype=torch.bfloat16, device=device)
    strided = memory[..., : x.shape[3]].transpose(1, 2)
    strided.copy_(x)
    assert_accurate(kind, strided, random_theta(device, 1, 64)[0], launched)


@kinds
@ways
def test_columns_far_from_their_first_token(
    tokens: int, kind: str, launched: list[str], device: torch.device
) -> None:
    x, theta = random_call(kind, tokens, device)
    half = torch.where(torch.arange(tokens, device=device) < tokens // 2, -90.0, 90.0)[:, None]
    x[0, :, 0, 0::2] += half
    x[0, :, 0, 1::2] -= half
    x[:, :, 1, 0::2] += 200
    x[:, 0::3, 1, 1::2] -= 150
    assert_accurate(kind, x.bfloat16(), theta, launched)


@kinds
@ways
def test_tokens_of_no_weight(tokens: int, kind: str, launched: list[str], device: torch.device) -> None:
    x, theta = random_call(kind, tokens, device)
    x[0, : tokens - 1, 0, 1] = -math.inf  # whole parts of it, and the first token
    x[0, 1:, 1, 1] = -math.inf
    x[0, ::2, 1, 2] = -math.inf
    assert_accurate(kind, x.bfloat16(), theta, launched)


@kinds
@ways
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_columns_without_a_softmax_are_nan(
    value: float, tokens: int, kind: str, launched: list[str], device: torch.device
) -> None:
    x, theta = random_call(kind, tokens, device)
    x[0, slice(None) if value < 0 else tokens - 2, 1, 1] = value  # -inf takes all tokens
    assert_accurate(kind, x.bfloat16(), theta, launched)


@kinds
@ways
def test_slow_and_fast_frequencies_at_far_positions(
    tokens: int, kind: str, launched: list[str], device: torch.device
) -> None:
    x, _ = random_call(kind, tokens, device)
    theta = torch.logspace(-7, 0.5, 64, device=device)
    assert_accurate(kind, x.half(), theta, launched, offset=2**31 - tokens)


@kinds
def test_a_lone_token_has_all_the_weight(kind: str, launched: list[str], device: torch.device) -> None:
    x, theta = random_call(kind, 1, device, batch=3)
    x = (100 * x).bfloat16().requires_grad_()
    function = operators()[f"lrpe_{kind}"].function
    out = function(x, theta, offset=5, activation="softmax_sequence", backend="triton")
    assert isinstance(out, Tensor)
    (dx,) = torch.autograd.grad(out, x, torch.randn_like(out))
    assert torch.equal(dx, torch.zeros_like(x))
    assert launched == KERNELS


def test_calls_that_other_kernels_take(launched: list[str], device: torch.device) -> None:
    x, theta = random_call("rotate", 20, device)
    function = operators()["lrpe_rotate"].function
    x, calls, bounds = x.bfloat16(), [], torch.tensor([0, 5, 20], device=device)
    more: list[dict[str, Any]] = [
        {"x": x.float()}, {"interleaved": True}, {"offset": 0, "prefix": 3}, {"theta": theta.requires_grad_()},
        {"x": x[..., :64], "theta": theta[:, :32].detach()}, {"cu_seqlens": bounds},
    ]  # fmt: skip
    for each in more:
        function(**{"x": x, "theta": theta.detach(), "activation": "softmax_sequence", "backend": "triton", **each})
        calls.append(launched.pop())
    assert calls == ["sequence_forward_kernel"] * len(more)


@kinds
@pytest.mark.parametrize("multiprocessors", [1, 16, 132])
@pytest.mark.parametrize("tokens", [1, 512, 513, 8192])
def test_programs_have_one_tile_of_a_head(
    tokens: int, multiprocessors: int, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Programs wait for all parts of a slab: one that had two of them would wait for itself."""
    from warploom.ops.lrpe.call import LrpeInputs, LrpeOptions
    from warploom.ops.lrpe.softmax_sequence import engine
    from warploom.ops.lrpe.softmax_sequence.hopper import launch

    monkeypatch.setattr(engine, "takes_call", lambda call, grad: True)
    monkeypatch.setattr(launch, "multiprocessors", lambda device: multiprocessors)
    monkeypatch.setattr(engine, "multiprocessors", lambda device: multiprocessors)
    features = 128 if kind == "rotate" else 64
    x = torch.empty(3, tokens, 5, features, dtype=torch.bfloat16, device="meta")
    out = torch.empty(3, tokens, 5, 128, dtype=torch.bfloat16, device="meta")
    inputs = LrpeInputs(x, torch.empty(5, 64, device="meta"))
    for grad in (None, out):
        planned = engine.plan_sequence(grad, inputs, LrpeOptions(kind=kind, activation="softmax_sequence")).launch
        if planned.kernel.__name__.startswith("slab"):
            sizes, config = planned.arguments["sizes"], planned.arguments["config"]
            assert sizes.parts == 1 or planned.options["launch_cooperative_grid"]
            assert sizes.parts * (64 // config.W) <= planned.programs
            assert sizes.rounds * planned.programs >= sizes.tiles
        else:
            assert multiprocessors < 132
