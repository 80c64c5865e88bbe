"""Linear attention's kernels for Hopper: in an interpreter on a CPU, and on a Hopper GPU."""

import functools
from typing import Any

import pytest
import torch

from warploom import linear_attention
from warploom.ops.linear_attention.bench import OPERATOR
from warploom.ops.linear_attention.reference import linear_attention as linear_attention_in_pytorch
from warploom.runtime.backend import HAS_TRITON
from warploom.testing.conformance import check_case, make_inputs, upcast

pytestmark = pytest.mark.skipif(not HAS_TRITON, reason="needs Triton")

STATES = {"initial_state": True, "return_state": True}
CASES: list[dict[str, Any]] = [
    {},
    {"n": 64},
    {"n": 64, "decay": "token", **STATES},
    {"n": 129, "decay": "head", "activation": "silu"},
    {"n": 192, "offset": "batch", "layout": "bhnd"},
    {"n": 1100, "batch": 1, "heads": 2, "decay": "head", **STATES},
    {"n": 300, "theta": "vector", "offset": 2**24 + 7},
    {"n": 300, "frequencies": 20, "decay": "head", "scale": -0.25, **STATES},
    {"n": 300, "theta_gradient": True, "decay": "head", "activation": "silu"},
    {"n": 150, "theta_gradient": True, "theta": "vector", "offset": "batch", "layout": "bhnd"},
    {"n": 200, "theta_gradient": True, "theta": "shared", "frequencies": 20, "decay": "token", "offset": 2**24 + 7},
]
"""Of several tiles each, whole ones and one that is not, with every decay, states and places of tokens."""
ANGLES = {"theta", "frequencies", "offset", "theta_gradient"}


ENCODED = [(encoding, case) for encoding in ("none", "rotate", "cosine") for case in CASES]
ENCODED = [(encoding, case) for encoding, case in ENCODED if encoding != "none" or not ANGLES & case.keys()]


def assert_right(case: dict[str, Any], device: torch.device) -> None:
    """Values and gradients, against float64."""
    whole = {"batch": 2, "n": 200, "heads": 2, "dtype": "bfloat16", **case}
    results = check_case(OPERATOR, whole, "triton", device)
    assert {result.mode for result in results} == {"fwd", "bwd"}
    assert not [result.detail for result in results if not result.ok]


@pytest.mark.sample(3)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(("encoding", "case"), ENCODED, ids=str)
def test_values_and_gradients(
    encoding: str, case: dict[str, Any], head_dim: int, launched: list[str], device: torch.device
) -> None:
    assert_right({"encoding": encoding, "head_dim": head_dim, **case}, device)
    kernel = "hopper_product_kernel"
    if encoding == "cosine":
        kernel = "hopper_parts_kernel" if head_dim == 128 else "hopper_cosine_kernel"
    assert kernel in launched
    if encoding == "rotate":
        assert "hopper_key_kernel" in launched
        assert ("backward_kernel" in launched) == bool({"theta_gradient", "activation"} & case.keys())


@pytest.mark.parametrize("by_head", [False, True], ids=["token", "head"])
@pytest.mark.parametrize(("encoding", "head_dim"), [("none", 64), ("rotate", 64), ("cosine", 64), ("cosine", 128)])
def test_decays_may_be_of_any_strength(
    encoding: str, head_dim: int, by_head: bool, launched: list[str], device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Borders at both ends of a tile, within it, and many in a row, in each head others."""
    from warploom.ops.linear_attention import engine

    monkeypatch.setattr(engine, "chunk_of", lambda *sizes: 64 if encoding == "none" else 2**20)
    forgets = torch.tensor([-30.0, -104.0, -3e38], device=device)
    case = {"batch": 1, "n": 130, "heads": 3, "dtype": "bfloat16", "head_dim": head_dim, "encoding": encoding}
    inputs = make_inputs(OPERATOR, {**case, "decay": "head" if by_head else "token", **STATES}, device)
    with torch.no_grad():
        if by_head:
            inputs["decay"].copy_(forgets)
        else:
            for n in (0, 20, 63, 64, *range(70, 127)):
                inputs["decay"][:, n] = forgets
    results: list[list[torch.Tensor]] = []
    for given, function in (
        (upcast(inputs), linear_attention_in_pytorch), (inputs, linear_attention_in_pytorch),
        (inputs, functools.partial(linear_attention, backend="triton")),
    ):  # fmt: skip
        outs = function(**given)
        torch.manual_seed(1)
        grads = [torch.randn(x.shape).to(device, torch.bfloat16).to(x.dtype) for x in outs]
        of = [given[name] for name in ("q", "k", "v", "initial_state")]
        results.append([x.detach().double() for x in (*outs, *torch.autograd.grad(outs, of, grads))])
    for n, (exact, usual, found) in enumerate(zip(*results, strict=True)):
        heads = 1 if n in (1, 5) else 2
        for right, one, other in zip(exact.unbind(heads), usual.unbind(heads), found.unbind(heads), strict=True):
            size = float(right.abs().max())
            off, allowed = float((other - right).abs().max()), 2 * float((one - right).abs().max())
            assert off <= allowed + 2**-8 * size, (n, off / max(size, 1e-30))
    assert any(kernel.startswith("hopper") for kernel in launched)


CHUNKED: list[dict[str, Any]] = [
    {},
    {"decay": "head"},
    {"decay": "token", **STATES},
    {"n": 200, "decay": "head", "activation": "sigmoid", **STATES},
    {"n": 1200, "decay": "token", "batch": 1, "heads": 1},
    {"n": 1090, "decay": "head", "batch": 1, "heads": 1, "chunk": 576},
    {"n": 700, "batch": 1, "chunk": 640},
    {"causal": False},
    {"causal": False, "activation": "silu"},
    {"offset": "batch", "decay": "head", "theta": "vector"},
]
"""Of two chunks and more, of more than a scan loads together, and of many tiles; the last whole or not."""


@pytest.mark.sample(5)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(
    ("encoding", "case"),
    [(encoding, case) for encoding in ("none", "rotate", "cosine") for case in CHUNKED
     if encoding != "none" or not ANGLES & case.keys()],
    ids=str,
)  # fmt: skip
def test_sums_of_chunks(
    encoding: str, case: dict[str, Any], head_dim: int, launched: list[str], device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    from warploom.ops.linear_attention import engine

    chunk = case.get("chunk", 128)
    monkeypatch.setattr(engine, "chunk_of", lambda *sizes: chunk)
    assert_right({"encoding": encoding, "head_dim": head_dim, "n": 384, **case}, device)
    assert "hopper_sums_kernel" in launched


@pytest.mark.parametrize("apart", [0, 1], ids=["aligned", "not_aligned"])
def test_the_last_state_alone(
    apart: int, launched: list[str], device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What ranks hand over. Addresses that cannot be copied from take other kernels."""
    from warploom.ops.linear_attention import engine
    from warploom.ops.linear_attention.call import LinearInputs, LinearOptions
    from warploom.ops.linear_attention.operator import OPERATOR as KERNELS

    monkeypatch.setattr(engine, "chunk_of", lambda *sizes: 128)
    k, v = (torch.randn(apart + 300 * 2 * 64, device=device).bfloat16() for _ in range(2))
    k, v = (x[apart:].view(1, 300, 2, 64) for x in (k, v))
    inputs = LinearInputs(k, k, v, None, None, None, None, None)
    state = engine.last_state(inputs, LinearOptions("none", "none", True, 1.0, True), 0, KERNELS.plans)
    expected = torch.einsum("bnhf,bnhe->bhfe", k.double(), v.double())
    torch.testing.assert_close(state.double(), expected, rtol=0, atol=1e-4)
    assert launched == ([] if apart else ["hopper_sums_kernel"])


@pytest.mark.parametrize("encoding", ["none", "rotate", "cosine"])
def test_the_gradient_of_the_first_state_alone(encoding: str, launched: list[str], device: torch.device) -> None:
    """What ranks hand over in the backward takes sums, and no products."""
    case = {"batch": 2, "n": 200, "heads": 2, "dtype": "bfloat16", "head_dim": 64, "decay": "head", **STATES}
    inputs = make_inputs(OPERATOR, {**case, "encoding": encoding}, device)
    for name in ("q", "k", "v"):
        inputs[name] = inputs[name].detach()
    exact = upcast(inputs)
    expected = linear_attention_in_pytorch(**exact)
    grads = [torch.randn_like(x) for x in expected]
    (right,) = torch.autograd.grad(expected, exact["initial_state"], grads)
    found = linear_attention(**inputs, backend="triton")
    launched.clear()
    (state,) = torch.autograd.grad(found, inputs["initial_state"], [g.to(x.dtype) for g, x in zip(grads, found)])
    assert launched == ["hopper_sums_kernel"]
    assert (state - right).norm() <= 4e-3 * right.norm()  # rounding of encoded queries and of weighed gradients
