"""LRPE against its formulas, its properties, exact angles, and what a caller may hand it.

`tests/test_conformance.py` compares backends with the reference; here the reference is on trial as well.
"""

import itertools
import math
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from launches import ON_GPU

from warploom import lrpe_cosine, lrpe_rotate
from warploom.ops.lrpe import reference
from warploom.runtime.backend import HAS_TRITON

Tensor = torch.Tensor

KINDS = ("cosine", "rotate", "interleaved")
BACKENDS = ("torch", "triton") if HAS_TRITON else ("torch",)
BATCH, TOKENS, HEADS, FEATURES = 2, 13, 3, 8

kinds = pytest.mark.parametrize("kind", KINDS)
backends = pytest.mark.parametrize("backend", BACKENDS)


def encode(kind: str, x: Tensor, theta: Tensor, **keywords: Any) -> Tensor:
    if kind == "cosine":
        return lrpe_cosine(x, theta, **keywords)
    return lrpe_rotate(x, theta, interleaved=kind == "interleaved", **keywords)


def random_x(device: torch.device, *shape: int) -> Tensor:
    return torch.randn(shape or (BATCH, TOKENS, HEADS, FEATURES)).to(device)


def random_theta(device: torch.device, *shape: int) -> Tensor:
    return torch.rand(shape or (HEADS, FEATURES // 2)).to(device)


def exact_gradients(kind: str, x: Tensor, theta: Tensor, grad: Tensor, **keywords: Any) -> tuple[Tensor, ...]:
    """Gradients of x and theta, by PyTorch through the reference in float64."""
    exact = [t.detach().double().requires_grad_() for t in (x, theta)]
    if kind == "cosine":
        out = reference.lrpe_cosine(*exact, **keywords)
    else:
        out = reference.lrpe_rotate(*exact, interleaved=kind == "interleaved", **keywords)
    return torch.autograd.grad(out, exact, grad.double())


def pairs(kind: str, out: Tensor) -> Tensor:
    """What comes out of an encoding, (…, 2, F): cosine and sine parts, or the members of the pairs."""
    return out.unflatten(-1, (-1, 2)).mT if kind == "interleaved" else out.unflatten(-1, (2, -1))


def assert_near(found: Tensor, exact: Any, relative: float = 1e-6) -> None:
    """Near on the scale of the largest value.

    The default is float32 arithmetic: a cosine and a sine 2e-7 off, times a pair of values, and four roundings
    of 6e-8, come to 8e-7 of the larger value of the pair at worst.
    """
    exact = torch.as_tensor(exact, dtype=torch.float64)
    error = (found.detach().double().cpu() - exact.detach().cpu()).abs().max().item()
    assert found.shape == exact.shape
    assert error <= relative * exact.abs().max().item()


# ----------------------------------------------------------------------------------------------------------
# The definition, written down a second time: loops over tokens, in float64
# ----------------------------------------------------------------------------------------------------------

ACTIVATIONS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "none": lambda x: x,
    "relu": lambda x: np.maximum(x, 0),
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "silu": lambda x: x / (1 + np.exp(-x)),
    "softmax": lambda x: np.exp(x) / np.exp(x).sum(-1, keepdims=True),
    "softmax_sequence": lambda x: np.exp(x) / np.exp(x).sum(1, keepdims=True),
}


def coordinates(
    b: int,
    n: int,
    grid: tuple[int, ...] | None = None,
    prefix: int = 0,
    offset: int | Tensor = 0,
    position_ids: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[int, ...]:
    """Where token ``n`` of batch entry ``b`` stands."""
    if position_ids is not None:
        own = position_ids[n] if position_ids.dim() == 1 else position_ids[b, n]
        return tuple(own.reshape(-1).tolist())
    if cu_seqlens is not None:
        n -= max(start for start in cu_seqlens.tolist() if start <= n)
    i = n - prefix
    if grid is not None:
        return tuple(int(c) for c in np.unravel_index(i, grid)) if i >= 0 else (0,) * len(grid)
    start = offset if isinstance(offset, int) else int(offset if offset.dim() == 0 else offset[b])
    return (start + i,) if i >= 0 else (0,)


def define(kind: str, x: Tensor, theta: Tensor, activation: str = "none", **where: Any) -> np.ndarray:
    values = ACTIVATIONS[activation](x.detach().double().cpu().numpy())
    frequencies = theta.detach().double().cpu().numpy()
    batch, tokens, heads, features = values.shape
    angles = features if kind == "cosine" else features // 2
    out = np.empty((batch, tokens, heads, 2 * angles))
    for b, n, h in np.ndindex(batch, tokens, heads):
        row = frequencies if frequencies.ndim == 1 else frequencies[h % len(frequencies)]
        phi = np.concatenate([s * row for s in coordinates(b, n, **where)] + [np.zeros(angles)])[:angles]
        v = values[b, n, h]
        if kind == "cosine":
            out[b, n, h] = np.concatenate([v * np.cos(phi), v * np.sin(phi)])
            continue
        first = np.arange(angles) * (2 if kind == "interleaved" else 1)
        second = first + (1 if kind == "interleaved" else angles)
        out[b, n, h, first] = v[first] * np.cos(phi) - v[second] * np.sin(phi)
        out[b, n, h, second] = v[first] * np.sin(phi) + v[second] * np.cos(phi)
    return out


IDS = torch.randint(-999, 999, (BATCH, TOKENS, 3), generator=torch.Generator().manual_seed(1))
PLACES: dict[str, dict[str, Any]] = {
    "default": {},
    "offset": {"offset": 1000},
    "offset_behind_zero": {"offset": -5},
    "offset_tensor": {"offset": torch.tensor(77)},
    "offset_per_entry": {"offset": torch.tensor([3, -900], dtype=torch.int32)},
    "prefix": {"prefix": 4, "offset": 6},
    "prefix_of_everything": {"prefix": TOKENS},
    "grid_1d": {"grid": (TOKENS,)},
    "grid_2d": {"grid": (2, 5), "prefix": 3},
    "grid_3d": {"grid": [3, 2, 2], "prefix": 1},
    "grid_5d": {"grid": (1, 2, 1, 3, 2), "prefix": 1},
    "ids": {"position_ids": IDS[0, :, 0]},
    "ids_per_entry": {"position_ids": IDS[..., 1].to(torch.int16)},
    "ids_of_one_axis": {"position_ids": IDS[..., :1]},
    "ids_of_three_axes": {"position_ids": IDS.to(torch.int32)},
    "packed": {"cu_seqlens": torch.tensor([0, 4, 4, 5, TOKENS]), "offset": 2},
    "packed_with_prefix": {"cu_seqlens": torch.tensor([0, 1, 6, TOKENS], dtype=torch.int32), "prefix": 2},
}


def place(name: str, device: torch.device) -> tuple[int, dict[str, Any]]:
    """A batch size, and the arguments that say where tokens stand."""
    where = {key: value.to(device) if isinstance(value, Tensor) else value for key, value in PLACES[name].items()}
    return 1 if "cu_seqlens" in where else BATCH, where


def most_frequencies(kind: str, where: dict[str, Any]) -> int:
    """As many as no axis has too many of: together they may be cut."""
    ids, axes = where.get("position_ids"), len(where.get("grid", "n"))
    if ids is not None and ids.dim() == 3:
        axes = ids.shape[2]
    return math.ceil((FEATURES if kind == "cosine" else FEATURES // 2) / axes)


AMOUNTS: dict[str, Callable[[int], int]] = {
    "one": lambda most: 1,
    "fewer": lambda most: max(most - 1, 1),
    "most": lambda most: most,
}
amounts = pytest.mark.parametrize("amount", AMOUNTS)


@backends
@kinds
@amounts
@pytest.mark.parametrize("name", PLACES)
def test_definition(name: str, amount: str, kind: str, backend: str, device: torch.device) -> None:
    batch, where = place(name, device)
    frequencies = AMOUNTS[amount](most_frequencies(kind, where))
    x, theta = random_x(device, batch, TOKENS, HEADS, FEATURES), random_theta(device, HEADS, frequencies)
    assert_near(encode(kind, x, theta, **where, backend=backend), define(kind, x, theta, **where))


@backends
@kinds
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_definition_of_activations(activation: str, kind: str, backend: str, device: torch.device) -> None:
    x, theta = 3 * random_x(device), random_theta(device, 1, FEATURES // 2)
    found = encode(kind, x, theta, activation=activation, backend=backend)
    assert_near(found, define(kind, x, theta, activation))


@backends
@kinds
def test_definition_without_a_head_axis(kind: str, backend: str, device: torch.device) -> None:
    x, theta = random_x(device, BATCH, TOKENS, FEATURES), random_theta(device, 4)
    found = encode(kind, x, theta, offset=3, backend=backend)
    assert_near(found, define(kind, x[:, :, None], theta, offset=3)[:, :, 0])


# ----------------------------------------------------------------------------------------------------------
# Properties
# ----------------------------------------------------------------------------------------------------------


@backends
@kinds
@pytest.mark.parametrize("shift", [1000, -12345, 2**24 - 20])
def test_inner_products_know_only_the_difference(shift: int, kind: str, backend: str, device: torch.device) -> None:
    q, k, theta = random_x(device), random_x(device), random_theta(device)

    def inner(offset: int) -> Tensor:
        o_q, o_k = (encode(kind, t, theta, offset=offset, backend=backend).double() for t in (q, k))
        return torch.einsum("bnhd,bmhd->bhnm", o_q, o_k)

    assert_near(inner(shift), inner(0))
    if kind == "cosine":  # the features without a frequency stand still
        turns = torch.nn.functional.pad(theta.double(), (0, FEATURES // 2))
        n = torch.arange(TOKENS, device=device)
        weight = ((n[:, None] - n)[..., None, None] * turns).cos()
        assert_near(inner(shift), torch.einsum("bnhd,bmhd,nmhd->bhnm", q.double(), k.double(), weight))


@backends
@pytest.mark.parametrize("kind", ["rotate", "interleaved"])
def test_a_rotation_keeps_lengths_and_can_be_undone(kind: str, backend: str, device: torch.device) -> None:
    x, theta = random_x(device), 7 * random_theta(device)
    out = encode(kind, x, theta, offset=100_000, backend=backend)

    def lengths(t: Tensor) -> Tensor:
        return pairs(kind, t.double()).square().sum(-2)

    assert_near(lengths(out), lengths(x))
    assert_near(encode(kind, out, -theta, offset=100_000, backend=backend), x, 2e-6)  # two rotations


@backends
@kinds
def test_forms_of_a_position_agree(kind: str, backend: str, device: torch.device) -> None:
    x, theta, start = random_x(device), random_theta(device), 1_000_003
    ids = torch.arange(start, start + TOKENS, device=device)
    forms: list[dict[str, Any]] = [
        {"offset": torch.tensor(start, device=device)},
        {"offset": torch.tensor([start] * BATCH, dtype=torch.int32, device=device)},
        {"position_ids": ids},
        {"position_ids": ids.to(torch.int32).expand(BATCH, -1)},
        {"position_ids": ids[None, :, None].expand(BATCH, -1, -1)},
    ]
    expected = encode(kind, x, theta, offset=start, backend=backend)
    for form in forms:
        assert torch.equal(encode(kind, x, theta, **form, backend=backend), expected), form
    plain = encode(kind, x, theta, backend=backend)
    assert torch.equal(encode(kind, x, theta, grid=(TOKENS,), backend=backend), plain)


@backends
@kinds
def test_batch_entries_and_packed_sequences_equal_calls_of_their_own(
    kind: str, backend: str, device: torch.device
) -> None:
    x, theta = random_x(device), random_theta(device)
    offsets = torch.tensor([5, 7000], device=device)
    out = encode(kind, x, theta, offset=offsets, prefix=2, backend=backend)
    for b, offset in enumerate(offsets.tolist()):
        own = encode(kind, x[b : b + 1], theta, offset=offset, prefix=2, backend=backend)
        assert torch.equal(out[b : b + 1], own)

    bounds = [0, 3, 3, 4, 11, TOKENS]
    packed = torch.tensor(bounds, device=device)
    out = encode(kind, x[:1], theta, cu_seqlens=packed, offset=9, prefix=1, backend=backend)
    for start, stop in itertools.pairwise(bounds):
        own = encode(kind, x[:1, start:stop], theta, offset=9, prefix=min(1, stop - start), backend=backend)
        assert torch.equal(out[:, start:stop], own)


@backends
def test_packed_softmax_over_the_sequence_equals_calls_of_their_own(backend: str, device: torch.device) -> None:
    x, theta, bounds = random_x(device, 1, TOKENS, HEADS, FEATURES), random_theta(device), [0, 5, 5, 6, TOKENS]
    keywords: dict[str, Any] = {"activation": "softmax_sequence", "prefix": 1, "backend": backend}
    out = lrpe_rotate(x, theta, cu_seqlens=torch.tensor(bounds, device=device), **keywords)
    for start, stop in ((0, 5), (5, 6), (6, TOKENS)):
        assert_near(out[:, start:stop], lrpe_rotate(x[:, start:stop], theta, **keywords))


@backends
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("where", [{"prefix": 5, "offset": 7}, {"prefix": 3, "grid": (2, 5)}])
def test_the_prefix_is_not_rotated(
    where: dict[str, Any], dtype: torch.dtype, backend: str, device: torch.device
) -> None:
    x, prefix = random_x(device).to(dtype), where["prefix"]
    theta = random_theta(device, HEADS, most_frequencies("rotate", where))
    out = lrpe_rotate(x, theta, **where, backend=backend)
    assert torch.equal(out[:, :prefix], x[:, :prefix])
    assert not torch.equal(out[:, -1], x[:, -1])


@backends
@kinds
def test_shapes_of_theta_agree(kind: str, backend: str, device: torch.device) -> None:
    x, theta = random_x(device), random_theta(device, 3)
    grad = torch.randn_like(encode(kind, x, theta, backend=backend))
    outs, grads = [], []
    for form in (theta, theta[None], theta.expand(HEADS, -1), theta.expand(HEADS, -1).clone()):
        leaf = form.detach().requires_grad_()
        out = encode(kind, x, leaf, offset=50, backend=backend)
        found = torch.autograd.grad(out, leaf, grad)[0]
        assert found.shape == form.shape
        outs.append(out)
        grads.append(found.reshape(-1, 3).double().sum(0))
    for other, found in zip(outs[1:], grads[1:]):
        assert torch.equal(other, outs[0])
        assert_near(found, grads[0])
    one = torch.tensor([[0.5], [0.25], [2.0]], device=device)  # a number per head
    one = one.expand(-1, most_frequencies(kind, {}))
    assert_near(encode(kind, x, one, backend=backend), define(kind, x, one))


# ----------------------------------------------------------------------------------------------------------
# Exact phase
# ----------------------------------------------------------------------------------------------------------

TWO_PI = 2 * Fraction("3.14159265358979323846264338327950288419716939937510582097494459")
_STEPS = torch.arange(8) / 8
FREQUENCIES = torch.cat(
    (
        10_000.0**-_STEPS,
        500_000.0**-_STEPS,
        # The float32 next to π and 2π, where a turn's fraction is next to a half and to none; either side of
        # both; several turns a position; nothing at all; so many turns that float32 has no fraction of one left.
        torch.tensor([math.pi, 2 * math.pi, 3.25, 3.0, 6.5, 6.25, 7.75, 0.0, -1.25, -math.pi]),
        torch.tensor([12_345.678, -3_000_000.25, 16_000_001.0]),
    )
)


def exact_cosine_sine(positions: list[int]) -> Tensor:
    """[cos, sin] (N, 2·F) from exact products of position and frequency, reduced as fractions."""
    rest = [[float(s * Fraction(theta) % TWO_PI) for theta in FREQUENCIES.tolist()] for s in positions]
    angle = torch.tensor(rest, dtype=torch.float64)
    return torch.cat((angle.cos(), angle.sin()), dim=-1)


@backends
@pytest.mark.parametrize("theta_dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "start",
    [0, 1000, 100_000, 1_000_000, 2**24 - 8, 2**31 - 13, -8, -1_000_000, -(2**24), 1 - 2**31],
)
def test_angles_are_exact(start: int, theta_dtype: torch.dtype, backend: str, device: torch.device) -> None:
    theta, tokens = FREQUENCIES.to(device, theta_dtype), torch.arange(start, start + 13)
    ones = torch.ones((1, len(tokens), 1, len(theta)), device=device)
    out = lrpe_cosine(ones, theta, offset=start, backend=backend)[0, :, 0]
    error = (out.double().cpu() - exact_cosine_sine(tokens.tolist())).abs()
    # The angle gained per position is known to 48 bits. To 2²⁴ this is below 1e-6 for every frequency here, where
    # a product in float32 would be off by 1; at 2³¹ it is below 1e-5 for frequencies to 1, and 7e-5 for 7.75.
    bound = 5e-7 + 2.0**-48 * (tokens[:, None] * FREQUENCIES.double()).abs().repeat(1, 2)
    assert (error / bound).max().item() <= 1
    ids = tokens.to(device)
    assert torch.equal(lrpe_cosine(ones, theta, position_ids=ids, backend=backend)[0, :, 0], out)


@backends
@pytest.mark.parametrize("start", [0, 1_000_000, 2**24 - 8, 2**31 - 13, -(2**24)])
def test_angles_of_16_bit_results_are_off_by_their_rounding(start: int, backend: str, device: torch.device) -> None:
    theta, tokens = FREQUENCIES.to(device), torch.arange(start, start + 13)
    ones = torch.ones((1, len(tokens), 1, len(theta)), dtype=torch.float16, device=device)
    out = lrpe_cosine(ones, theta, offset=start, backend=backend)[0, :, 0]
    error = (out.double().cpu() - exact_cosine_sine(tokens.tolist())).abs()
    # Rounding to float16, 23 bits of a turn, the special function unit; and what is known of the angle.
    bound = 2.0**-12 + 2e-6 + 2.0**-48 * (tokens[:, None] * FREQUENCIES.double()).abs().repeat(1, 2)
    assert (error / bound).max().item() <= 1


@backends
@kinds
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # NumPy, in Triton's interpreter
def test_a_frequency_that_is_not_finite_gives_nan(kind: str, backend: str, device: torch.device) -> None:
    theta = torch.tensor([math.nan, math.inf, -math.inf, 0.5], device=device)
    x = random_x(device, BATCH, 5, HEADS, 4 if kind == "cosine" else 8)
    out = pairs(kind, encode(kind, x, theta, offset=-2, backend=backend))
    assert out[..., :3].isnan().all()  # at position zero too: 0 · ∞ has no value
    finite = torch.from_numpy(define(kind, x, theta.nan_to_num(0.0, 0.0, 0.0), offset=-2))
    assert_near(out[..., 3], pairs(kind, finite)[..., 3])


@backends
@kinds
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # NumPy, in Triton's interpreter
def test_softmax_of_the_largest_and_of_missing_entries(kind: str, backend: str, device: torch.device) -> None:
    most, none = torch.finfo(torch.float32).max, -math.inf
    rows = [
        [most, 1.0, -most, most, none, 0.0],
        [-most, -most, none, -most, none, none],
        [none, 1e38, none, none, 0.9e38, none],
        [80.0, -80.0, none, 79.0, 81.0, 0.5],
    ]
    x = torch.tensor(rows, device=device)[None, :, None]
    theta = random_theta(device, 1, 3)
    exact = x.double().softmax(-1)
    grad = random_x(device, 1, len(rows), 1, 12 if kind == "cosine" else 6)
    out = encode(kind, x.requires_grad_(), theta, activation="softmax", backend=backend)
    assert_near(out, define(kind, exact, theta))
    wanted = exact_gradients(kind, exact, theta, grad)[0]
    wanted = exact * (wanted - (exact * wanted).sum(-1, keepdim=True))
    assert_near(torch.autograd.grad(out, x, grad)[0], wanted)


@backends
@kinds
def test_softmax_of_equal_entries_is_one_number(kind: str, backend: str, device: torch.device) -> None:
    """Whatever they are: what rounding takes off the largest entry would add up in the gradient of theta."""
    x = torch.tensor([0.0, 0.1, -7.3, 33.3, 1e5, -1e30], device=device)[None, :, None, None].expand(1, 6, 1, 6)
    out = encode(kind, x, torch.zeros(1, 3, device=device), activation="softmax", backend=backend)
    assert torch.equal(out, out[:, :1].expand_as(out))


@pytest.mark.sample(2)
@pytest.mark.skipif(not HAS_TRITON, reason="needs Triton")
@kinds
@pytest.mark.parametrize("of", ["x", "grad"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy, in Triton's interpreter
def test_what_is_not_finite_stays_where_the_definition_takes_it(
    activation: str, of: str, kind: str, device: torch.device
) -> None:
    """One entry reaches itself, its pair, row or column, and the gradient of that head's frequency."""
    packed = torch.tensor((0, 7, 7, 17, 24), device=device)
    wheres: list[tuple[int, int, dict[str, Any]]] = [
        (BATCH, HEADS, {"offset": 3}),
        (1, 1, {"prefix": 2, "cu_seqlens": packed}),
    ]
    dtypes = (torch.float32, torch.bfloat16) if ON_GPU else (torch.float32,)
    for (batch, rows, where), value, dtype in itertools.product(wheres, (math.nan, math.inf, -math.inf), dtypes):
        x, grad = random_x(device, batch, 24, HEADS, 6), random_x(device, batch, 24, HEADS, 12)
        grad = grad if kind == "cosine" else grad[..., :6]
        x, grad, theta = x.to(dtype), grad.to(dtype), random_theta(device, rows, 2)

        def results(x: Tensor, theta: Tensor, grad: Tensor, backend: str, where: Any = where) -> list[Tensor]:
            leaves = [t.detach().requires_grad_() for t in (x, theta)]
            out = encode(kind, *leaves, activation=activation, **where, backend=backend)
            return [out.detach().double(), *(t.double() for t in torch.autograd.grad(out, leaves, grad))]

        usual = results(x.double(), theta.double(), grad.double(), "torch")
        (x if of == "x" else grad)[-1, 9, 1, 1] = value
        wanted = results(x.double(), theta.double(), grad.double(), "torch")
        for one, exact, size in zip(results(x, theta, grad, "triton"), wanted, usual, strict=True):
            finite = exact.isfinite()
            assert torch.equal(one.isfinite(), finite)
            assert bool(finite.any()) or rows == 1
            error = (one - exact)[finite].abs()
            assert bool((error <= max(4e-6, torch.finfo(dtype).eps) * size.abs().max()).all())


# ----------------------------------------------------------------------------------------------------------
# Sizes
# ----------------------------------------------------------------------------------------------------------


def sizes() -> Iterator[tuple[str, tuple[int, ...]]]:
    """Kinds and shapes: long rows, one head, one token, one of everything."""
    long = {"cosine": (2048, 4096, 3000), "rotate": (2048, 4096, 6000), "interleaved": (2048, 6000)}
    for kind in KINDS:
        yield from ((kind, (1, 2, 2, features)) for features in long[kind])
        yield from ((kind, shape) for shape in ((2, 5, 1, 8), (4, 1, 3, 8), (1, 1, 1, 2)))


@backends
@pytest.mark.parametrize(("kind", "shape"), [*sizes()])
def test_sizes(kind: str, shape: tuple[int, ...], backend: str, device: torch.device) -> None:
    x, theta = random_x(device, *shape), random_theta(device, shape[2], max(shape[3] // 2 - 1, 1))
    offsets = torch.arange(shape[0], device=device) + 1000  # decoding: every sequence is at its own position
    keywords: dict[str, Any] = {"offset": offsets, "activation": "softmax"}
    out = encode(kind, x.requires_grad_(), theta.requires_grad_(), **keywords, backend=backend)
    assert_near(out, define(kind, x, theta, **keywords))
    grad = random_x(device, *out.shape)
    exact = exact_gradients(kind, x, theta, grad, **keywords)
    # A product more than forward, and softmax's difference of like numbers, which two features may cancel.
    for found, wanted in zip(torch.autograd.grad(out, (x, theta), grad), exact):
        assert_near(found, wanted, 2e-6 if shape[3] > 2 else 1e-4)


@pytest.mark.skipif(not HAS_TRITON, reason="needs Triton")
def test_division_by_a_multiplication_and_a_shift_is_exact() -> None:
    from warploom.ops.lrpe.engine import inverse_of

    generator = np.random.default_rng(0)
    largest = 2**31 - 1
    for d in (*range(1, 300), *(2**k + i for k in range(9, 31) for i in (-1, 0, 1)), largest):
        multiplier, shift = divmod(inverse_of(d), 32)
        assert multiplier < 2**32
        multiples = d * generator.integers(0, largest // d + 1, 20)
        for n in (0, largest, *(m + i for m in map(int, multiples) for i in (-1, 0, d - 1))):
            if 0 <= n <= largest:
                assert (2 * n * multiplier >> 32) >> shift == n // d


@pytest.mark.skipif(not HAS_TRITON, reason="needs Triton")
@kinds
@pytest.mark.parametrize("tile", [(4, 4, 4), (3, 4, 8), (2, 4, 8), (1, 1, 16)])
def test_tiles_make_no_difference(
    kind: str, tile: tuple[int, ...], device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    from warploom.ops.lrpe import engine as launchers
    from warploom.ops.lrpe.call import LrpeInputs, LrpeOptions
    from warploom.runtime.plans import Plans

    x = random_x(device, 5, 6, HEADS, 20).bfloat16()
    grad = random_x(device, 5, 6, HEADS, 40 if kind == "cosine" else 20).bfloat16()
    call = LrpeInputs(x, random_theta(device, HEADS, 5)), 0, LrpeOptions(0, (2, 3), kind, "silu")

    def results() -> tuple[Tensor, Tensor]:
        return launchers.forward(*call, Plans()), launchers.backward(grad, *call, False, Plans())[0]

    expected = results()
    monkeypatch.setattr(launchers, "tile_of", lambda *arguments: launchers.LrpeTile(*tile))
    for found, wanted in zip(results(), expected):
        assert torch.equal(found, wanted)
