"""LRPE with softmax over the sequence where programs run at once and wait for each other: beside others too."""

import math
import threading
from typing import Any

import pytest
import torch
from test_lrpe import encode, random_theta, random_x

from warploom.ops import operators
from warploom.runtime.backend import HAS_TRITON
from warploom.testing.conformance import judge

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HAS_TRITON, reason="needs Triton")]

Tensor = torch.Tensor

KINDS = pytest.mark.parametrize("kind", ["rotate", "cosine"])
EXACT = pytest.mark.parametrize("exact", [False, True], ids=["", "theta"])
ODD = (1, 2, 63, 64, 65, 255, 257, 511, 1025, 2049, 4097, 12_345, 39_999)


def assert_accurate(kind: str, x: Tensor, theta: Tensor, **keywords: Any) -> None:
    """Values, the gradient of x, and of theta if it wants one, within the error budget of the float64 reference."""
    inputs = {"x": x.requires_grad_(), "theta": theta, "activation": "softmax_sequence", **keywords}
    judgement = judge(operators()[f"lrpe_{kind}"], inputs, "triton")
    assert judgement.fwd.ok, f"fwd: {judgement.fwd.describe()}"
    assert judgement.bwd is not None
    assert judgement.bwd.ok, f"bwd: {judgement.bwd.describe()}"


def results(kind: str, x: Tensor, theta: Tensor, grad: Tensor, **positions: Any) -> tuple[Tensor, ...]:
    """The encoding, and the gradients of x, and of theta if it wants one."""
    x = x.detach().requires_grad_()
    positions = positions or {"offset": 5}
    out = encode(kind, x, theta, activation="softmax_sequence", backend="triton", **positions)
    return out.detach(), *torch.autograd.grad(out, (x, theta) if theta.requires_grad else (x,), grad)


def random_case(kind: str, n: int, device: torch.device, d: int = 128) -> tuple[Tensor, Tensor, Tensor]:
    """``x``, theta, and a gradient of the encoding."""
    x = random_x(device, 2, n, 3, d).bfloat16()
    grad = random_x(device, 2, n, 3, 2 * d if kind == "cosine" else d).bfloat16()
    return x, random_theta(device, 3, d if kind == "cosine" else d // 2), grad


@KINDS
@EXACT
@pytest.mark.parametrize("n", ODD)
def test_lengths(n: int, exact: bool, kind: str, device: torch.device) -> None:
    x, theta, _ = random_case(kind, n, device)
    assert_accurate(kind, x, theta.requires_grad_(exact), offset=-3)


@KINDS
@EXACT
@pytest.mark.parametrize(
    ("n", "prefix"), [(65, 64), (100, 7), (300, 300), (1999, 10), (2100, 1100), (9001, 1)], ids=str
)
def test_a_prefix_in_a_row(n: int, prefix: int, exact: bool, kind: str, device: torch.device) -> None:
    """Within a step of rows, in several parts, and as long as all."""
    x, theta, _ = random_case(kind, n, device)
    assert_accurate(kind, x, theta.requires_grad_(exact), prefix=prefix, offset=100)


@KINDS
@pytest.mark.parametrize("size", [0.1, 1.0, 8.0])
@pytest.mark.parametrize("shared", [False, True], ids=["per head", "shared"])
def test_gradient_of_theta(shared: bool, size: float, kind: str, device: torch.device) -> None:
    """In float32, of small and large entries: exponents of a hundred, and weights near one."""
    x, theta, _ = random_case(kind, 1500, device)
    theta = theta[: 1 if shared else 3, : theta.shape[1] - 5].clone().requires_grad_()
    assert_accurate(kind, (x * size).detach(), theta, offset=2**20)


@KINDS
@pytest.mark.parametrize("layout", ["bhnd", "view", "float16", "fewer frequencies", "64 features"])
def test_other_tensors(layout: str, kind: str, device: torch.device) -> None:
    d = 64 if layout == "64 features" else 128
    x, theta, _ = random_case(kind, 700, device, d)
    if layout == "bhnd":
        x = x.transpose(1, 2).contiguous().transpose(1, 2)
    elif layout == "view":
        x = torch.stack((x, x, x), dim=3)[:, :, :, 1].requires_grad_().detach()
    elif layout == "float16":
        x = x.half()
    elif layout == "fewer frequencies":
        theta = theta[:1, : theta.shape[1] // 2 - 3].contiguous()
    assert_accurate(kind, x, theta)


@KINDS
@pytest.mark.parametrize("n", [2048, 4096])
def test_angles_to_the_ends_of_tiles(n: int, kind: str, device: torch.device) -> None:
    """Turned on from block to block: slow and fast frequencies, far positions, and results of eleven bits."""
    x = random_x(device, 1, n, 2, 128).half()
    theta = torch.logspace(-7, 0.5, 128 if kind == "cosine" else 64, device=device)
    assert_accurate(kind, x, theta, offset=2**24)


GRIDS = (
    ((8, 8), 0), ((7, 43), 0), ((1, 300), 0), ((300, 1), 0), ((33, 61), 3), ((45, 45), 10), ((64, 64), 0),
    ((123, 99), 5), ((4, 4, 4), 0), ((3, 7, 11), 0), ((1, 1, 500), 0), ((13, 11, 9), 10), ((16, 16, 16), 0),
    ((21, 1, 97), 2), ((19, 23, 18), 0), ((19, 23, 30), 0),
)  # fmt: skip


@KINDS
@pytest.mark.parametrize("shared", [False, True], ids=["per head", "shared"])
@pytest.mark.parametrize(("grid", "prefix"), GRIDS, ids=str)
def test_grids(grid: tuple[int, ...], prefix: int, shared: bool, kind: str, device: torch.device) -> None:
    """As many frequencies as fit all axes: of three, columns of one thread belong to different ones."""
    n = math.prod(grid) + prefix
    x, theta, _ = random_case(kind, n, device)
    theta = theta[: 1 if shared else 3, : theta.shape[1] // len(grid)]
    assert_accurate(kind, x, theta, grid=grid, prefix=prefix)


@KINDS
@pytest.mark.parametrize("grid", [(40, 40), (11, 12, 13)], ids=str)
def test_coordinates_turn_by_exact_angles(grid: tuple[int, ...], kind: str, device: torch.device) -> None:
    """Slow and fast frequencies, results of eleven bits, and fewer of them than the axes have angles."""
    n = math.prod(grid)
    x = random_x(device, 1, n, 2, 128).half()
    features = 128 if kind == "cosine" else 64
    theta = torch.logspace(-5, 3, features // len(grid) - 2, device=device)
    assert_accurate(kind, x, theta, grid=grid)


@KINDS
def test_frequencies_on_a_grid_that_cannot_be_reduced(kind: str, device: torch.device) -> None:
    x, theta, grad = random_case(kind, 300, device)
    theta = theta[:, : theta.shape[1] // 2].clone()
    theta[1, 5], theta[2, 7] = 3e7, math.inf
    wanted = torch.zeros(3, theta.shape[1], dtype=torch.bool, device=device)
    wanted[1, 5] = wanted[2, 7] = True
    out, dx = results(kind, x, theta, grad, grid=(15, 20))
    assert torch.equal(out.isnan(), wanted.repeat(1, 4).expand_as(out))
    assert torch.equal(dx.isnan(), wanted.repeat(1, 2 if kind == "cosine" else 4).expand_as(dx))


@KINDS
@EXACT
def test_frequencies_that_cannot_be_reduced(exact: bool, kind: str, device: torch.device) -> None:
    x, theta, grad = random_case(kind, 300, device)
    theta[1, 5], theta[2, 7] = 3e7, math.inf
    other = theta.shape[1]
    wanted = torch.zeros(3, other, dtype=torch.bool, device=device)
    wanted[1, 5] = wanted[2, 7] = True
    out, dx, *dtheta = results(kind, x, theta.requires_grad_(exact), grad)
    assert torch.equal(out.isnan(), wanted.repeat(1, 2).expand_as(out))
    assert torch.equal(dx.isnan(), wanted.repeat(1, 1 if kind == "cosine" else 2).expand_as(dx))
    assert all(torch.equal(gradient.isnan(), wanted) for gradient in dtheta)


@KINDS
@EXACT
@pytest.mark.parametrize("n", [200, 1500])
def test_columns_that_need_their_largest_entry(n: int, exact: bool, kind: str, device: torch.device) -> None:
    x, theta, _ = random_case(kind, n, device)
    rising = torch.where(torch.arange(n, device=device) < n // 2, -90.0, 90.0)[:, None]
    x[0, :, 0, 0::2] += rising
    x[1, :, 2, 1::2] += 200
    x[0, :-1, 1, 1] = -math.inf
    x[1, 1:, 1, 2] = -math.inf
    assert_accurate(kind, x, theta.requires_grad_(exact))


@KINDS
@EXACT
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_columns_without_a_softmax_are_nan(value: float, exact: bool, kind: str, device: torch.device) -> None:
    x, theta, _ = random_case(kind, 1500, device)
    if value < 0:  # it takes all of them
        x[0, :, 1, 1] = value
    else:
        x[0, 700, 1, 1] = value
    assert_accurate(kind, x, theta.requires_grad_(exact))


@KINDS
@EXACT
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("n", [300, 1500])
def test_a_column_without_a_softmax_reaches_no_other(
    n: int, value: float, exact: bool, kind: str, device: torch.device
) -> None:
    x, theta, _ = random_case(kind, n, device)
    x[1, slice(None) if value < 0 else n - 7, 1, 5] = value
    assert_accurate(kind, x, theta.requires_grad_(exact), offset=5)


@KINDS
@pytest.mark.parametrize("place", [{"offset": 2**31 - 290}, {"offset": 1 - 2**31, "prefix": 7}], ids=str)
def test_positions_at_the_ends_of_32_bits(place: dict[str, int], kind: str, device: torch.device) -> None:
    x, theta, _ = random_case(kind, 290, device)
    assert_accurate(kind, x, theta, **place)


@KINDS
def test_repeated_calls_of_any_length_give_the_same_bits(kind: str, device: torch.device) -> None:
    grids: list[tuple[int, ...]] = [(1999,), (130,), (1025,), (2048,), (45, 45), (12, 12, 13)]
    cases = []
    for grid in grids:
        x, theta, grad = random_case(kind, math.prod(grid), device)
        theta = theta[:, : theta.shape[1] // len(grid)]
        cases.append((x, theta.requires_grad_(len(grid) == 1), grad))
    usual = [results(kind, *case, grid=grid) for case, grid in zip(cases, grids)]
    for _ in range(20):
        for case, grid, wanted in zip(cases, grids, usual):
            assert all(map(torch.equal, results(kind, *case, grid=grid), wanted))


@KINDS
def test_two_streams_at_once(kind: str, device: torch.device) -> None:
    cases = [random_case(kind, n, device) for n in (2047, 1500)]
    usual = [results(kind, *case) for case in cases]
    found: list[list[tuple[Tensor, ...]]] = [[], []]
    torch.cuda.synchronize()

    def work(i: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(50):
                found[i].append(results(kind, *cases[i]))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.cuda.synchronize()
    for some, wanted in zip(found, usual):
        assert len(some) == 50
        assert all(all(map(torch.equal, one, wanted)) for one in some)


@KINDS
@EXACT
def test_a_graph_replays(exact: bool, kind: str, device: torch.device) -> None:
    x, theta, grad = random_case(kind, 2001, device)
    results(kind, x, theta.requires_grad_(exact), grad)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = results(kind, x, theta, grad)
    for _ in range(3):
        x.copy_(torch.randn_like(x))
        graph.replay()
        assert all(map(torch.equal, found, results(kind, x, theta, grad)))


@KINDS
def test_a_graph_replays_beside_other_launches(kind: str, device: torch.device) -> None:
    """On another stream than it was captured on, while calls of the same shapes and other kernels run."""
    x, theta, grad = random_case(kind, 2001, device)
    usual = results(kind, x, theta, grad)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = results(kind, x, theta, grad)
    replays, others = torch.cuda.Stream(), torch.cuda.Stream()
    matrix = torch.randn(4096, 4096, device=device, dtype=torch.bfloat16)
    torch.cuda.synchronize()
    found = []
    for _ in range(20):
        with torch.cuda.stream(others):
            product = matrix @ matrix
        with torch.cuda.stream(replays):
            graph.replay()
        found.append(results(kind, x, theta, grad))
    torch.cuda.synchronize()
    assert product.isfinite().all()
    assert all(map(torch.equal, captured, usual))
    assert all(all(map(torch.equal, one, usual)) for one in found)


@KINDS
def test_parts_of_more_blocks_than_angles_are_turned_on(kind: str, device: torch.device) -> None:
    from warploom.ops.lrpe.configs import MOST_PARTS, MOST_STEPS

    n = 64 * MOST_PARTS * MOST_STEPS + 7
    x = random_x(device, 1, n, 1, 64).bfloat16()
    assert_accurate(kind, x, random_theta(device, 1, 64 if kind == "cosine" else 32))


@KINDS
def test_a_new_length_compiles_nothing(kind: str, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    from warploom.ops.lrpe.softmax_sequence.triton import rounds

    for n in (300, 1100, 9000):
        results(kind, *random_case(kind, n, device))
    compilations: list[str] = []
    for kernel in (rounds.sequence_forward_kernel, rounds.sequence_backward_kernel):
        usual = kernel._do_compile

        def count(*arguments: Any, usual: Any = usual, **keywords: Any) -> Any:
            compilations.append("one")
            return usual(*arguments, **keywords)

        monkeypatch.setattr(kernel, "_do_compile", count)
    for n in (301, 497, 1203, 1999, 2047, 9999, 20_000):
        results(kind, *random_case(kind, n, device))
    assert not compilations


def test_an_address_of_another_alignment(device: torch.device) -> None:
    """The same shapes and strides, one element further."""
    storage = random_x(device, 2 * 900 * 3 * 128 + 8).bfloat16()
    theta = random_theta(device, 3, 64)
    for start in (0, 1, 8):
        assert_accurate("rotate", storage[start : start + 2 * 900 * 3 * 128].view(2, 900, 3, 128).detach(), theta)
