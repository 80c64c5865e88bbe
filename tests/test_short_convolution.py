"""The short convolution: its definition, states, packed sequences, strides, bits, and what it refuses."""

import itertools
from typing import Any

import pytest
import seeds
import torch
from refusals import Change, Wrong, assert_left_to_pytorch, assert_refused, each, ones
from strided import strided_view

from warploom import ArgumentError, DeviceError, DtypeError, ShapeError, short_convolution
from warploom.ops import operators
from warploom.runtime.backend import HAS_TRITON
from warploom.testing.conformance import check_case, compute_gradients, draw_like

Tensor = torch.Tensor
BACKENDS = ("torch", "triton") if HAS_TRITON else ("torch",)
backends = pytest.mark.parametrize("backend", BACKENDS)
needs_triton = pytest.mark.skipif(not HAS_TRITON, reason="needs Triton")


def tensors(
    device: torch.device, batch: int = 2, tokens: int = 37, channels: int = 9, taps: int = 4, sequences: int = 0,
    dtype: torch.dtype = torch.float32,
) -> dict[str, Any]:  # fmt: skip
    """Arguments of a call, drawn anew for every test."""
    shapes = {"x": (batch, tokens, channels), "initial_state": (sequences or batch, channels, taps - 1)}
    drawn: dict[str, Any] = {name: torch.randn(shape).to(device, dtype) for name, shape in shapes.items()}
    drawn |= {"weight": torch.randn(channels, taps, device=device), "bias": torch.randn(channels, device=device)}
    return drawn | {"activation": "silu", "return_state": True}


def results_of(call: dict[str, Any], backend: str, grads: Any = None) -> tuple[Tensor, ...]:
    """Outputs, states and gradients."""
    given = {
        name: x.detach().requires_grad_() if isinstance(x, Tensor) and x.is_floating_point() else x
        for name, x in call.items()
    }
    outs = short_convolution(**given, backend=backend)
    found = compute_gradients(outs, given, draw_like(outs) if grads is None else grads)
    return *(x.detach() for x in outs), *(found[name] for name in sorted(found))


def assert_near(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("taps", [2, 4, 9])
def test_the_definition_is_that_of_pytorch(taps: int) -> None:
    call = tensors(torch.device("cpu"), taps=taps, dtype=torch.float64)
    rows = torch.cat((call["initial_state"], call["x"].mT), -1)
    weight, bias = call["weight"].double(), call["bias"].double()
    expected = torch.nn.functional.silu(torch.nn.functional.conv1d(rows, weight[:, None], bias, groups=9)).mT
    out, state = short_convolution(**call, backend="torch")
    torch.testing.assert_close(out, expected)
    assert torch.equal(state, rows[..., 1 - taps :])


@backends
@pytest.mark.parametrize("cut", [1, 2, 36])
def test_halves_are_the_whole_bit_by_bit(cut: int, backend: str, device: torch.device) -> None:
    call = tensors(device, dtype=torch.bfloat16) | {"backend": backend}
    whole, last = short_convolution(**call)
    first, state = short_convolution(**call | {"x": call["x"][:, :cut]})
    second, end = short_convolution(**call | {"x": call["x"][:, cut:], "initial_state": state})
    assert torch.equal(torch.cat((first, second), 1), whole)
    assert torch.equal(end, last)


@backends
def test_steps_of_a_token_are_prefill(backend: str, device: torch.device) -> None:
    call = tensors(device, tokens=9) | {"backend": backend}
    whole, last = short_convolution(**call)
    state, steps = call["initial_state"], []
    for n in range(9):
        out, state = short_convolution(**call | {"x": call["x"][:, n : n + 1], "initial_state": state})
        steps.append(out)
    assert torch.equal(torch.cat(steps, 1), whole)
    assert torch.equal(state, last)


@backends
@pytest.mark.parametrize("given", [True, False])
def test_packed_sequences_are_each_alone(given: bool, backend: str, device: torch.device) -> None:
    """With rows of NaN behind the last, which are zero in all results, and have no gradient."""
    bounds = [0, 33, 33, 34, 36, 97]
    call = tensors(device, batch=1, tokens=120, sequences=5)
    states = call.pop("initial_state")
    call["x"][:, 97:] = torch.nan
    packed = call | {"cu_seqlens": torch.tensor(bounds, device=device, dtype=torch.int32)}
    packed |= {"initial_state": states} if given else {}
    grads = torch.randn(1, 120, 9, device=device), torch.randn(5, 9, 3, device=device)
    names = sorted({"x", "weight", "bias", *(["initial_state"] if given else [])})
    out, last, *found = results_of(packed, backend, grads)
    of = dict(zip(names, found, strict=True))
    assert not out[:, 97:].any()
    assert not of["x"][:, 97:].any()
    summed = {name: torch.zeros_like(call[name]) for name in ("weight", "bias")}
    for s, (first, end) in enumerate(itertools.pairwise(bounds)):
        one = call | {"x": call["x"][:, first:end]} | ({"initial_state": states[s : s + 1]} if given else {})
        own = grads[0][:, first:end], grads[1][s : s + 1]
        alone, state, *found = results_of(one, backend, own)
        each_of = dict(zip(names, found, strict=True))
        if backend == "triton":  # PyTorch's convolution promises no bits
            assert torch.equal(alone, out[:, first:end])
        assert_near(alone, out[:, first:end])
        assert torch.equal(state, last[s : s + 1])
        assert_near(of["x"][:, first:end], each_of["x"])
        if given:
            assert_near(of["initial_state"][s : s + 1], each_of["initial_state"])
        for name, total in summed.items():
            total += each_of[name]
    for name, total in summed.items():
        assert_near(of[name], total)


@needs_triton
@pytest.mark.parametrize("part", range(4))
def test_random_cases(part: int, device: torch.device) -> None:
    """Sizes and options at random, forward and backward, against float64."""
    generator = seeds.generator(120 + part)

    def one_of(*options: Any) -> Any:
        return options[int(torch.randint(len(options), (), generator=generator))]

    for _ in range(8):
        case = {
            "batch": one_of(1, 3), "n": one_of(1, 2, 3, 31, 64, 65, 130), "channels": one_of(3, 7, 64, 130),
            "taps": one_of(2, 3, 4, 4, 5, 8), "dtype": one_of("float32", "bfloat16", "float16"),
            "activation": one_of("none", "silu"), "bias": one_of(True, False), "layout": one_of("bnc", "bcn"),
            "initial_state": one_of(True, False), "return_state": one_of(True, False),
        }  # fmt: skip
        if case["batch"] == 1 and one_of(True, False):
            case["cu_seqlens"] = [0, case["n"] // 3, case["n"] // 3, case["n"] - case["n"] // 4]
        for result in check_case(operators()["short_convolution"], case, "triton", device):
            assert result.ok, f"{case}: {result.mode} {result.detail}"


@needs_triton
def test_any_strides_among_nan(device: torch.device) -> None:
    generator = seeds.generator(5)
    for _ in range(4):
        call = tensors(device, tokens=20)
        expected = results_of(call, "triton")
        placed = {name: strided_view(x, generator) for name, x in call.items() if isinstance(x, Tensor)}
        grads = tuple(strided_view(x, generator).tensor for x in draw_like(expected[:2]))
        found = results_of(call | {name: each.tensor for name, each in placed.items()}, "triton", grads)
        for one, other in zip(found, expected, strict=True):
            assert_near(one, other)
        assert all(each.surroundings_untouched() for each in placed.values())
    one = call["x"][:, :1].expand(2, 20, 9)
    assert_near(
        short_convolution(**call | {"x": one}, backend="triton")[0],
        short_convolution(**call | {"x": one}, backend="torch")[0],
    )


@needs_triton
def test_bits_do_not_depend_on_the_batch_or_the_run(device: torch.device) -> None:
    for tokens in (1, 70):
        call = tensors(device, batch=3, tokens=tokens, channels=16, dtype=torch.bfloat16)
        whole = results_of(call, "triton")
        for one, other in zip(results_of(call, "triton"), whole, strict=True):
            assert torch.equal(one, other)
        alone = call | {"x": call["x"][1:2], "initial_state": call["initial_state"][1:2]}
        for one, other in zip(short_convolution(**alone, backend="triton"), whole):
            assert torch.equal(one, other[1:2])


@backends
def test_the_gradient_of_a_state_alone(backend: str, device: torch.device) -> None:
    call = tensors(device, tokens=2)
    x, state = call["x"].requires_grad_(), call["initial_state"].requires_grad_()
    _, last = short_convolution(**call, backend=backend)
    dx, dstate = torch.autograd.grad(last.square().sum(), (x, state))
    assert_near(dx, 2 * x)
    assert_near(dstate, torch.nn.functional.pad(2 * state[..., 2:], (2, 0)))


# ----------------------------------------------------------------------------------------------------------
# What is refused
# ----------------------------------------------------------------------------------------------------------

GOOD: Change = {"x": ones(2, 6, 8), "weight": ones(8, 4)}
CU = torch.tensor([0, 2, 6])

WRONG: tuple[Wrong, ...] = (
    ({"x": [1.0]}, DtypeError, "x", "a tensor", "list"),
    ({"x": ones(2, 6, 8, dtype=torch.int32)}, DtypeError, "x", "float16, bfloat16, float32, float64", "int32"),
    ({"x": ones(6, 8)}, ShapeError, "x", "(B, N, C)", "(6, 8)"),
    ({"x": ones(2, 6, 0)}, ShapeError, "x", "C ≥ 1", "(2, 6, 0)"),
    ({"weight": ones(6, 4)}, ShapeError, "weight", "C = 8", "(6, 4)"),
    ({"weight": ones(8, 1)}, ShapeError, "weight", "K ≥ 2", "(8, 1)"),
    ({"weight": ones(8, 1, 4)}, ShapeError, "weight", "K ≥ 2, as weight[:, 0] of a Conv1d is", "(8, 1, 4)"),
    ({"weight": None}, DtypeError, "weight", "a tensor", "NoneType"),
    ({"weight": ones(8, 4, device="meta")}, DeviceError, "weight", "on the device of x", "meta"),
    ({"bias": ones(4)}, ShapeError, "bias", "C = 8", "(4,)"),
    ({"bias": 1.0}, DtypeError, "bias", "a tensor", "float"),
    ({"activation": "relu"}, ArgumentError, "activation", "none, silu", "'relu'"),
    ({"activation": None}, ArgumentError, "activation", "none, silu", "None"),
    ({"return_state": 1}, DtypeError, "return_state", "a bool", "1"),
    ({"initial_state": ones(2, 8, 4)}, ShapeError, "initial_state", "(2, 8, 3)", "(2, 8, 4)"),
    ({"cu_seqlens": CU}, ShapeError, "x", "of batch size 1", "(2, 6, 8)"),
    ({"x": ones(1, 6, 8), "cu_seqlens": CU.float()}, DtypeError, "cu_seqlens", "int32", "float32"),
    (
        {"x": ones(1, 6, 8), "cu_seqlens": CU, "initial_state": ones(1, 8, 3)},
        ShapeError, "initial_state", "(2, 8, 3)", "(1, 8, 3)",
    ),
    ({"backend": "cuda"}, ArgumentError, "backend", "auto, triton, torch", "'cuda'"),
)  # fmt: skip


@each(WRONG)
def test_wrong_arguments(wrong: Wrong, device: torch.device) -> None:
    assert_refused(short_convolution, GOOD, wrong, device)


@each(
    (({"x": ones(1, 6, 8), "cu_seqlens": torch.tensor([0, 7])}, ArgumentError, "cu_seqlens", "up to N = 6", "7"),)
)
def test_wrong_values_on_a_cpu(wrong: Wrong) -> None:
    assert_refused(short_convolution, GOOD, wrong, torch.device("cpu"))


@needs_triton
@pytest.mark.parametrize(
    ("change", "reason"), [({"weight": ones(8, 9)}, "9 tokens"), ({"x": ones(2, 6, 8).double()}, "float64")]
)
def test_what_the_kernels_cannot_do_is_said_and_done_by_pytorch(change: Change, reason: str) -> None:
    assert_left_to_pytorch(short_convolution, GOOD | change, reason)
