"""LRPE with softmax over the sequence: columns of any size, in one part and in several.

How a call is cut depends on its length: short sequences are one part, whose program waits for no other, and longer
ones are cut into parts. Those of packed sequences may hold several of them.
"""

import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from compiling import output_of
from launches import ON_GPU
from test_lrpe import HEADS, assert_near, encode, exact_gradients, kinds, random_theta, random_x

from warploom.ops import operators
from warploom.runtime import dispatch
from warploom.runtime.backend import HAS_TRITON
from warploom.testing.accuracy import compare, mean_of
from warploom.testing.conformance import MOST_DRAWS, judge, judge_draws

pytestmark = [
    pytest.mark.skipif(not HAS_TRITON, reason="needs Triton"),
    # NumPy speaks of infinities and NaN in Triton's interpreter: they are what is tried here.
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]

Tensor = torch.Tensor

FEATURES = 16  # enough that the largest error among the gradients of their frequencies is not a matter of luck
# The interpreter takes seconds for a long case: there, pairs of one order stand for those of the other.
LONG = 2100 if ON_GPU else 564
LAST = 1460 if ON_GPU else 560
WAYS: dict[str, dict[str, Any]] = {
    "one part": {"tokens": 40},
    "parts": {"tokens": LONG},
    # The second sequence ends in the part that holds the two after it, and one is empty.
    "packed": {"tokens": LAST + 40, "cu_seqlens": (0, 3, LAST, LAST, LAST + 10, LAST + 40)},
}

ways = pytest.mark.parametrize("way", WAYS)
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
some_kinds = kinds if ON_GPU else pytest.mark.parametrize("kind", ["rotate", "cosine"])


def sequences(way: str) -> list[slice]:
    """The tokens of each sequence that has any."""
    bounds = WAYS[way].get("cu_seqlens", (0, WAYS[way]["tokens"]))
    return [slice(start, stop) for start, stop in itertools.pairwise(bounds) if start < stop]


def assert_accurate(kind: str, x: Tensor, theta: Tensor, way: str) -> None:
    """Values and gradients within the error budget of the float64 reference."""
    inputs: dict[str, Any] = {
        "x": x.requires_grad_(),
        "theta": theta.requires_grad_(),
        "activation": "softmax_sequence",
        "offset": 5,
    }
    if kind == "interleaved":
        inputs["interleaved"] = True
    if "cu_seqlens" in WAYS[way]:
        inputs["cu_seqlens"] = torch.tensor(WAYS[way]["cu_seqlens"], device=x.device)

    def more() -> list[dict[str, Any]]:
        """Calls at other frequencies, of which there are few: one draw sets a budget for their gradient by luck."""
        thetas = (torch.rand(theta.shape).to(theta).requires_grad_() for _ in range(MOST_DRAWS - 1))
        return [{**inputs, "theta": other} for other in thetas]

    operator = operators()["lrpe_cosine" if kind == "cosine" else "lrpe_rotate"]
    judgement = judge_draws(operator, [inputs], "triton", more)
    assert judgement.fwd.ok, f"fwd: {judgement.fwd.describe()}"
    assert judgement.bwd is not None
    assert judgement.bwd.ok, f"bwd: {judgement.bwd.describe()}"


@ways
@dtypes
@some_kinds
def test_columns_that_leave_their_first_token_far_behind(
    kind: str, dtype: torch.dtype, way: str, device: torch.device
) -> None:
    # Powers are taken relative to a column's first token, unless that overflows.
    x = random_x(device, 1, WAYS[way]["tokens"], 2, FEATURES)
    for tokens in sequences(way):
        length = tokens.stop - tokens.start
        rising = torch.where(torch.arange(length, device=device) < length // 2, -90.0, 90.0)[:, None]
        x[0, tokens, 0, 0::2] += rising
        x[0, tokens, 1, 1::2] -= rising
    assert_accurate(kind, x.to(dtype), random_theta(device, 2, FEATURES // 2), way)


@ways
@dtypes
@some_kinds
def test_columns_of_large_entries(kind: str, dtype: torch.dtype, way: str, device: torch.device) -> None:
    # Multiplied by log₂e, entries of this size have lost the digits that decide between them, unless they cancel.
    x = random_x(device, 1, WAYS[way]["tokens"], 2, FEATURES)
    x[:, :, 0] += 200
    x[:, :, 1, 0::2] -= 150
    x[:, 0::3, 1, 1::2] += 200
    x[:, 1::3, 1, 1::2] -= 150
    assert_accurate(kind, x.to(dtype), random_theta(device, 2, FEATURES // 2), way)


@ways
@dtypes
@some_kinds
def test_tokens_of_no_weight(kind: str, dtype: torch.dtype, way: str, device: torch.device) -> None:
    x = random_x(device, 1, WAYS[way]["tokens"], 2, FEATURES) - 20  # far below a shift of zero
    for tokens in sequences(way):
        entries = x[0, tokens]
        entries[: len(entries) - 1, 0, 1] = -math.inf  # whole parts of it, and the first token
        entries[1:, 1, 1] = -math.inf
        entries[::2, 1, 2] = -math.inf
    assert_accurate(kind, x.to(dtype), random_theta(device, 2, FEATURES // 2), way)


@ways
@some_kinds
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_columns_without_a_softmax_are_nan(value: float, kind: str, way: str, device: torch.device) -> None:
    x = random_x(device, 1, WAYS[way]["tokens"], 2, FEATURES)
    last = sequences(way)[-1]
    if value < 0:  # it takes all of them
        x[0, last, 1, 1] = value
    else:
        x[0, last.stop - 2, 1, 1] = value
    assert_accurate(kind, x, random_theta(device, 2, FEATURES // 2), way)


@some_kinds
def test_a_single_token_has_all_the_weight(kind: str, device: torch.device) -> None:
    x, theta = 100 * random_x(device, 2, 1, HEADS, FEATURES), random_theta(device, HEADS, FEATURES // 2)
    x.requires_grad_()
    out = encode(kind, x, theta, offset=5, activation="softmax_sequence", backend="triton")
    assert torch.equal(out, encode(kind, torch.ones_like(x), theta, offset=5, backend="triton"))
    (dx,) = torch.autograd.grad(out, x, torch.randn_like(out))
    assert torch.equal(dx, torch.zeros_like(x))


@some_kinds
def test_one_part_and_several_agree(kind: str, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    from warploom.ops.lrpe.softmax_sequence import engine

    x = random_x(device, 1, 200, 2, FEATURES).requires_grad_()
    theta = random_theta(device, 2, FEATURES // 2).requires_grad_()
    place: dict[str, Any] = {"offset": 5, "activation": "softmax_sequence"}
    usual = encode(kind, x, theta, **place, backend="triton")
    grad = random_x(device, *usual.shape)
    exact = exact_gradients(kind, x, theta, grad, **place)
    monkeypatch.setattr(engine, "SHORT_TOKENS", 0)
    monkeypatch.setattr(engine, "MOST_PARTS", 4)
    usual_tile = engine.sequence_tile
    monkeypatch.setattr(engine, "sequence_tile", lambda *call: usual_tile(*call)._replace(tokens=1))
    for plans in dispatch.ALL_PLANS:
        plans.forget()
    in_parts = encode(kind, x, theta, **place, backend="triton")
    assert not torch.equal(in_parts, usual)  # sums of other terms
    assert_near(in_parts, usual.double())
    for out in (usual, in_parts):
        for found, wanted in zip(torch.autograd.grad(out, (x, theta), grad), exact):
            assert_near(found, wanted, 2e-6)


@some_kinds
@pytest.mark.parametrize("way", ["one part", "parts"])
def test_angles_turned_from_block_to_block(way: str, kind: str, device: torch.device) -> None:
    """Slow and fast frequencies, far positions, results of eleven bits; blocks, and what is left behind them."""
    tokens = 300 if way == "one part" else LONG
    x = random_x(device, 1, tokens, 1, 128).half().requires_grad_()
    theta = torch.logspace(-7, 0.5, 128 if kind == "cosine" else 64, device=device)
    inputs: dict[str, Any] = {"x": x, "theta": theta, "activation": "softmax_sequence", "offset": 2**24}
    if kind == "interleaved":
        inputs["interleaved"] = True
    judgement = judge(operators()["lrpe_cosine" if kind == "cosine" else "lrpe_rotate"], inputs, "triton")
    assert judgement.fwd.ok, f"fwd: {judgement.fwd.describe()}"
    assert judgement.bwd is not None
    assert judgement.bwd.ok, f"bwd: {judgement.bwd.describe()}"


@some_kinds
@pytest.mark.parametrize("way", ["one part", "parts"])
def test_far_from_the_first_token_in_float32(way: str, kind: str, device: torch.device) -> None:
    """Differences of up to sixteen are rounded by 5e-7, which must not be seen in the largest weights."""
    x = torch.rand(1, WAYS[way]["tokens"], 1, FEATURES).to(device) * 3.9 + 3
    x[:, ::8] = -9
    theta = random_theta(device, 1, FEATURES // 2)
    found, wanted = (
        encode(kind, x.to(dtype), theta.to(dtype), activation="softmax_sequence", backend=backend)
        for dtype, backend in ((torch.float32, "triton"), (torch.float64, "torch"))
    )
    assert (found - wanted).abs().max() <= 3e-7 * wanted.abs().max()


@some_kinds
@pytest.mark.parametrize("way", ["one part", "parts"])
def test_gradient_of_theta_by_angles_turned_on(way: str, kind: str, device: torch.device) -> None:
    """Of 16-bit numbers: positions weigh what angles are off."""
    tokens = 300 if way == "one part" else LONG
    x = random_x(device, 1, tokens, 1, 64).bfloat16()
    theta = random_theta(device, 1, 64 if kind == "cosine" else 32)
    grad = random_x(device, 1, tokens, 1, 128 if kind == "cosine" else 64).bfloat16()

    def gradient(backend: str, dtype: torch.dtype) -> Tensor:
        frequencies = theta.to(torch.promote_types(dtype, torch.float32)).requires_grad_()
        out = encode(kind, x.to(dtype), frequencies, offset=5, activation="softmax_sequence", backend=backend)
        return torch.autograd.grad(out, frequencies, grad.to(out.dtype))[0]

    wanted = gradient("torch", torch.float64)
    error = (gradient("triton", torch.bfloat16) - wanted).abs().max()
    assert error <= 6e-7 * wanted.abs().max()


def test_gradient_of_theta_of_equal_tokens(device: torch.device) -> None:
    """Their weights have no error in eager arithmetic, and angles are most of what is left."""
    verdicts = []
    for _ in range(24):
        x = random_x(device, 1, 1, 1, 64).bfloat16().expand(1, 257, 1, 64)
        theta = random_theta(device, 1, 32)
        grad = random_x(device, 1, 257, 1, 64).bfloat16()
        found = []
        for backend, dtype in (("triton", x.dtype), ("torch", torch.float64), ("torch", x.dtype)):
            frequencies = theta.to(torch.promote_types(dtype, torch.float32)).requires_grad_()
            out = encode("interleaved", x.to(dtype), frequencies, activation="softmax_sequence", backend=backend)
            found += torch.autograd.grad(out, frequencies, grad.to(dtype))
        verdicts.append(compare(*found))
    whole = mean_of(verdicts)
    assert whole.ok, whole.describe()


@some_kinds
def test_frequencies_that_cannot_be_reduced(kind: str, device: torch.device) -> None:
    x = random_x(device, 1, 300, 2, FEATURES).bfloat16()
    theta = random_theta(device, 2, FEATURES if kind == "cosine" else FEATURES // 2)
    theta[0, 5], theta[1, 7] = 3e7, math.inf
    out = encode(kind, x, theta, offset=5, activation="softmax_sequence", backend="triton")
    nan = torch.zeros(theta.shape, dtype=torch.bool, device=device)
    nan[0, 5] = nan[1, 7] = True
    wanted = nan.repeat_interleave(2, dim=1) if kind == "interleaved" else nan.repeat(1, 2)
    assert torch.equal(out.isnan(), wanted.expand_as(out))


@pytest.mark.parametrize("place", [{"offset": 2**31 - 290}, {"offset": 1 - 2**31, "prefix": 7}], ids=str)
def test_positions_at_the_ends_of_32_bits(place: dict[str, int], device: torch.device) -> None:
    """Blocks reach beyond the last token, where positions have more bits."""
    x = random_x(device, 1, 290, 1, 128).bfloat16().requires_grad_()
    inputs = {"x": x, "theta": random_theta(device, 1, 64), "activation": "softmax_sequence", **place}
    judgement = judge(operators()["lrpe_rotate"], inputs, "triton")
    assert judgement.fwd.ok, f"fwd: {judgement.fwd.describe()}"
    assert judgement.bwd is not None
    assert judgement.bwd.ok, f"bwd: {judgement.bwd.describe()}"


@pytest.mark.parametrize("multiprocessors", [1, 16, 132])
@pytest.mark.parametrize("tokens", [513, 4096, 40_000, 10**6])
def test_no_program_waits_for_a_later_round(
    tokens: int, multiprocessors: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the round in which a tile is applied, the programs have reduced all tiles that it waits for."""
    from warploom.ops.lrpe.call import LrpeInputs, LrpeOptions
    from warploom.ops.lrpe.softmax_sequence import engine

    monkeypatch.setattr(engine, "INTERPRETED", False)
    monkeypatch.setattr(engine, "multiprocessors", lambda device: multiprocessors)
    monkeypatch.setattr(engine, "takes_call", lambda call, grad: False)  # kernels for Hopper have no later round
    x = torch.empty(3, tokens, 5, 128, dtype=torch.bfloat16, device="meta")
    theta = torch.empty(5, 64, device="meta")
    options = LrpeOptions(kind="rotate", activation="softmax_sequence")
    launch = engine.plan_sequence(None, LrpeInputs(x, theta), options).launch
    sizes, programs = launch.arguments["sizes"], launch.programs
    assert launch.options["launch_cooperative_grid"]
    assert sizes.rounds * programs >= sizes.tiles
    together = sizes.tiles // (3 * 5)  # tiles of a head, whose slabs' parts alternate
    for tile in range(sizes.tiles):
        last = tile // together * together + together - 1
        assert last // programs <= tile // programs + sizes.lag


FITTING = """
import torch
from warploom import lrpe_cosine, lrpe_rotate
from warploom.ops.lrpe.softmax_sequence import engine
from warploom.runtime import launch
from warploom.testing.build import build

made, plan = [], engine.plan_sequence
engine.plan_sequence = lambda *arguments: made.append(plan(*arguments)) or made[-1]
for function, features in ((lrpe_rotate, 64), (lrpe_cosine, 128)):
    for dtype, exact in ((torch.bfloat16, False), (torch.bfloat16, True), (torch.float32, True)):
        with launch.record_builds(89, 2) as builds:
            x = torch.zeros(2, 20000, 2, 128, dtype=dtype, requires_grad=True)
            theta = torch.zeros(2, features, requires_grad=exact)
            out = function(x, theta, activation="softmax_sequence", backend="triton")
            out.backward(torch.empty_like(out))  # whose rows are read in vectors
        for one, kernel in zip(made[-2:], ("sequence_forward_kernel", "sequence_backward_kernel")):
            (variant,) = (each for each in builds.values() if each.function.fn.__name__ == kernel)
            needs = build(variant, 89)
            print(kernel, one.launch.programs // 2, one.launch.options["num_warps"], needs.registers, needs.shared)
"""


@pytest.mark.seldom(6, 22)
def test_programs_that_wait_fit_the_smallest_gpu(tmp_path: Path) -> None:
    """More programs than run at once are refused: 64 K registers, 100 KiB of shared memory."""
    printed = output_of(FITTING, tmp_path)
    lines = [line.split()[1:] for line in printed.splitlines()]
    assert len(lines) == 12
    for programs, warps, registers, shared in (map(int, line) for line in lines):
        assert programs * warps * 32 * (-(-registers // 8) * 8) <= 2**16
        assert programs * (shared + 1024) <= 100 * 1024


@some_kinds
@pytest.mark.parametrize("shape", [(2, 0, 3), (0, 5, 3), (2, 5, 0), (1, 0, 0)], ids=str)
def test_nothing_to_encode(shape: tuple[int, int, int], kind: str, device: torch.device) -> None:
    x = torch.empty(*shape, FEATURES, device=device, requires_grad=True)
    theta = random_theta(device, 1, FEATURES // 2).requires_grad_()
    out = encode(kind, x, theta, activation="softmax_sequence", backend="triton")
    assert out.shape == (*shape, 2 * FEATURES if kind == "cosine" else FEATURES)
    dx, dtheta = torch.autograd.grad(out.sum(), (x, theta))
    assert dx.shape == x.shape
    assert torch.equal(dtheta, torch.zeros_like(theta))
