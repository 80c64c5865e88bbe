"""Softmax over the sequence on LRPE's kernels for Hopper: which calls take them, and that these are right there."""

import itertools
import math
import threading
from typing import Any

import pytest
import torch
from launches import assert_for_hopper_alone, choose_as_on
from test_lrpe import encode, random_theta, random_x

from warploom.ops import operators
from warploom.runtime.backend import HAS_TRITON
from warploom.testing.conformance import judge

pytestmark = pytest.mark.skipif(not HAS_TRITON, reason="needs Triton")

Tensor = torch.Tensor

KINDS = pytest.mark.parametrize("kind", ["rotate", "cosine"])
EXACT = pytest.mark.parametrize("exact", [False, True], ids=["", "theta"])
ODD = (1, 2, 63, 64, 65, 255, 257, 511, 1025, 2049, 4097, 12_345, 39_999)


# ----------------------------------------------------------------------------------------------------------
# Anywhere
# ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Choose kernels as on an H100, wherever the test runs."""
    from warploom.ops.lrpe.softmax_sequence.launches import hopper as launchers_sequence_hopper

    choose_as_on(90, launchers_sequence_hopper, monkeypatch)


def suits(
    kind: str,
    x: Tensor,
    grad: Tensor | None = None,
    exact: bool = False,
    theta: Tensor | None = None,
    **positions: Any,
) -> bool:
    from warploom.ops.lrpe import launches as launchers
    from warploom.ops.lrpe.softmax_sequence.launches import hopper as launchers_sequence_hopper
    from warploom.runtime.memory_order import layout_of

    features = x.shape[-1] if kind == "cosine" else x.shape[-1] // 2
    out = layout_of(x, 2 * features if kind == "cosine" and grad is None else x.shape[-1])
    where = launchers.Positions(**positions)
    theta = torch.empty(2, features) if theta is None else theta
    return launchers_sequence_hopper.suits(kind, where, exact, features, x, theta, grad, out) is not None


def empty(n: int = 300, heads: int = 2, d: int = 128, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(2, n, heads, d, dtype=dtype)


@KINDS
def test_the_calls_that_suit(kind: str, hopper: None) -> None:
    x = empty()
    assert suits(kind, x)
    assert suits(kind, x, empty(d=256 if kind == "cosine" else 128))
    assert suits(kind, x, offset=7)
    assert suits(kind, x, grid=(300,))
    assert suits(kind, x, grid=(10, 30))
    assert suits(kind, x, grid=(5, 6, 10))
    assert suits(kind, x, grid=(5, 2, 29), prefix=10)
    assert suits(kind, x, prefix=1)
    assert suits(kind, x, grid=(299,), prefix=1)
    assert suits(kind, x, exact=True)
    assert suits(kind, x, empty(d=256 if kind == "cosine" else 128), exact=True)
    assert suits(kind, x, exact=True, grid=(10, 30))
    assert suits(kind, empty(dtype=torch.float16))
    assert suits(kind, empty(d=64))
    assert suits(kind, empty().transpose(1, 2).contiguous().transpose(1, 2))
    assert suits(kind, torch.empty(2, 300, 3, 2, 128, dtype=torch.bfloat16)[:, :, 1])


@KINDS
def test_the_calls_that_do_not(kind: str, hopper: None) -> None:
    x = empty()
    assert not suits("interleaved", x)
    assert not suits(kind, x, empty(d=256 if kind == "cosine" else 128), exact=True, grid=(10, 30))
    assert not suits(kind, empty(dtype=torch.float32))
    assert not suits(kind, x, grid=(5, 2, 3, 10))
    assert not suits(kind, x, ids=torch.zeros(300, dtype=torch.int64))
    assert not suits(kind, x, offsets=torch.zeros(2, dtype=torch.int64))
    assert not suits(kind, x[:1], cu_seqlens=torch.tensor([0, 300]))
    assert not suits(kind, x[:, :, 0]), "no axis of heads"
    assert not suits(kind, empty(d=72)), "strips of half their width"
    assert not suits(kind, empty(d=132)[..., :128]), "rows of 264 bytes"
    assert not suits(kind, empty(d=256)[..., ::2])
    assert not suits(kind, x, empty(d=256 if kind == "cosine" else 128, dtype=torch.float32))
    assert not suits(kind, x[:1].expand(2, -1, -1, -1)), "a stride of zero"
    far = torch.empty_strided(x.shape, (2**34, 256, 128, 1), dtype=x.dtype, device="meta")
    assert not suits(kind, far), "a stride of 2³¹ units"
    assert suits(kind, far.as_strided(x.shape, (2**34 - 8, 256, 128, 1)))
    assert not suits(kind, x, theta=torch.empty_strided((2, 64), (2**31 - 63, 1), device="meta"))
    assert suits(kind, x, theta=torch.empty_strided((2, 64), (2**31 - 64, 1), device="meta"))


def test_positions_that_suit(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels count to the end of a tile: there, a position of more than 32 bits would be another one."""
    from warploom.ops.lrpe.launches import Positions
    from warploom.ops.lrpe.softmax_sequence.launches import portable as launchers_sequence

    choose_as_on(90, launchers_sequence, monkeypatch)
    x = empty()

    def are_in_reach(offset: int, prefix: int = 0) -> bool:
        return launchers_sequence._are_in_reach(Positions(offset=offset, prefix=prefix), x, x)

    assert are_in_reach(0)
    assert are_in_reach(-(2**30), 300)
    assert are_in_reach(2**31 - 1024 - 300)
    assert not are_in_reach(2**31 - 1024 - 299)
    assert not are_in_reach(2**31 - 300)
    assert not are_in_reach(1 - 2**31, 300)


@KINDS
def test_nothing_suits_another_gpu(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from warploom.ops.lrpe.softmax_sequence.launches import hopper as launchers_sequence_hopper

    x = empty()
    assert_for_hopper_alone(launchers_sequence_hopper, lambda: suits(kind, x), monkeypatch)


def test_words_are_zero_and_tags_differ() -> None:
    from warploom.ops.lrpe.softmax_sequence.launches.hopper import Words

    words = Words()
    first, tag = words.take(5, torch.empty(1))
    second, other = words.take(9, torch.empty(1))
    assert (first.numel(), second.numel()) == (5, 9)
    assert not first.any()
    assert 0 not in (tag, other)
    assert tag != other


def test_tags_begin_anew_before_an_int32_ends() -> None:
    from warploom.ops.lrpe.softmax_sequence.launches.hopper import Words

    words = Words()
    words.launches = itertools.count(2**31 - 3)
    tags = [words.take(1, torch.empty(1))[1] for _ in range(4)]
    assert tags == [2**31 - 2, 2**31 - 1, 1, 2]


# ----------------------------------------------------------------------------------------------------------
# On a Hopper GPU
# ----------------------------------------------------------------------------------------------------------


BOTH = {"hopper_sequence_forward_kernel", "hopper_sequence_backward_kernel"}


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


@pytest.mark.gpu
@KINDS
@EXACT
@pytest.mark.parametrize("n", ODD)
def test_lengths(n: int, exact: bool, kind: str, launched: list[str], device: torch.device) -> None:
    from warploom.ops.lrpe.configs import hopper_tile

    x, theta, _ = random_case(kind, n, device)
    assert_accurate(kind, x, theta.requires_grad_(exact), offset=-3)
    ways = {name: hopper_tile(kind, name == "backward", n, exact=exact) for name in ("forward", "backward")}
    assert set(launched) == {f"hopper_sequence_{name}_kernel" for name, tile in ways.items() if tile}


@pytest.mark.gpu
@KINDS
@EXACT
@pytest.mark.parametrize(
    ("n", "prefix"), [(65, 64), (100, 7), (300, 300), (1999, 10), (2100, 1100), (9001, 1)], ids=str
)
def test_a_prefix_in_a_row(
    n: int, prefix: int, exact: bool, kind: str, launched: list[str], device: torch.device
) -> None:
    """Within a step of rows, in several parts, and as long as all."""
    x, theta, _ = random_case(kind, n, device)
    assert_accurate(kind, x, theta.requires_grad_(exact), prefix=prefix, offset=100)
    assert set(launched) == BOTH


@pytest.mark.gpu
@KINDS
@pytest.mark.parametrize("size", [0.1, 1.0, 8.0])
@pytest.mark.parametrize("shared", [False, True], ids=["per head", "shared"])
def test_gradient_of_theta(shared: bool, size: float, kind: str, launched: list[str], device: torch.device) -> None:
    """In float32, of small and large entries: exponents of a hundred, and weights near one."""
    x, theta, _ = random_case(kind, 1500, device)
    theta = theta[: 1 if shared else 3, : theta.shape[1] - 5].clone().requires_grad_()
    assert_accurate(kind, (x * size).detach(), theta, offset=2**20)
    assert set(launched) == BOTH


@pytest.mark.gpu
@KINDS
@pytest.mark.parametrize("layout", ["bhnd", "view", "float16", "fewer frequencies", "64 features"])
def test_other_tensors(layout: str, kind: str, launched: list[str], device: torch.device) -> None:
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
    assert set(launched) == BOTH


@pytest.mark.gpu
@KINDS
@pytest.mark.parametrize("n", [2048, 4096])
def test_angles_to_the_ends_of_tiles(n: int, kind: str, launched: list[str], device: torch.device) -> None:
    """Each comes from the two before it: slow and fast frequencies, far positions, and results of eleven bits."""
    x = random_x(device, 1, n, 2, 128).half()
    theta = torch.logspace(-7, 0.5, 128 if kind == "cosine" else 64, device=device)
    assert_accurate(kind, x, theta, offset=2**24)
    assert set(launched) == BOTH


GRIDS = (
    ((8, 8), 0), ((7, 43), 0), ((1, 300), 0), ((300, 1), 0), ((33, 61), 3), ((45, 45), 10), ((64, 64), 0),
    ((123, 99), 5), ((4, 4, 4), 0), ((3, 7, 11), 0), ((1, 1, 500), 0), ((13, 11, 9), 10), ((16, 16, 16), 0),
    ((21, 1, 97), 2), ((19, 23, 18), 0), ((19, 23, 30), 0),
)  # fmt: skip


@pytest.mark.gpu
@KINDS
@pytest.mark.parametrize("shared", [False, True], ids=["per head", "shared"])
@pytest.mark.parametrize(("grid", "prefix"), GRIDS, ids=str)
def test_grids(
    grid: tuple[int, ...], prefix: int, shared: bool, kind: str, launched: list[str], device: torch.device
) -> None:
    """As many frequencies as fit all axes: of three, columns of one thread belong to different ones."""
    from warploom.ops.lrpe.configs import hopper_tile

    n = math.prod(grid) + prefix
    x, theta, _ = random_case(kind, n, device)
    theta = theta[: 1 if shared else 3, : theta.shape[1] // len(grid)]
    assert_accurate(kind, x, theta, grid=grid, prefix=prefix)
    ways = {name: hopper_tile(kind, name == "backward", n, len(grid)) for name in ("forward", "backward")}
    assert set(launched) == {f"hopper_sequence_{name}_kernel" for name, tile in ways.items() if tile}


@pytest.mark.gpu
@KINDS
@pytest.mark.parametrize("grid", [(40, 40), (11, 12, 13)], ids=str)
def test_coordinates_turn_by_exact_angles(
    grid: tuple[int, ...], kind: str, launched: list[str], device: torch.device
) -> None:
    """Slow and fast frequencies, results of eleven bits, and fewer of them than the axes have angles."""
    n = math.prod(grid)
    x = random_x(device, 1, n, 2, 128).half()
    features = 128 if kind == "cosine" else 64
    theta = torch.logspace(-5, 3, features // len(grid) - 2, device=device)
    assert_accurate(kind, x, theta, grid=grid)
    assert set(launched) == BOTH


@pytest.mark.gpu
@KINDS
def test_frequencies_on_a_grid_that_cannot_be_reduced(kind: str, launched: list[str], device: torch.device) -> None:
    x, theta, grad = random_case(kind, 300, device)
    theta = theta[:, : theta.shape[1] // 2].clone()
    theta[1, 5], theta[2, 7] = 3e7, math.inf
    wanted = torch.zeros(3, theta.shape[1], dtype=torch.bool, device=device)
    wanted[1, 5] = wanted[2, 7] = True
    out, dx = results(kind, x, theta, grad, grid=(15, 20))
    assert torch.equal(out.isnan(), wanted.repeat(1, 4).expand_as(out))
    assert torch.equal(dx.isnan(), wanted.repeat(1, 2 if kind == "cosine" else 4).expand_as(dx))
    assert set(launched) == BOTH


@pytest.mark.gpu
@KINDS
@EXACT
def test_frequencies_that_cannot_be_reduced(
    exact: bool, kind: str, launched: list[str], device: torch.device
) -> None:
    x, theta, grad = random_case(kind, 300, device)
    theta[1, 5], theta[2, 7] = 3e7, math.inf
    other = theta.shape[1]
    wanted = torch.zeros(3, other, dtype=torch.bool, device=device)
    wanted[1, 5] = wanted[2, 7] = True
    out, dx, *dtheta = results(kind, x, theta.requires_grad_(exact), grad)
    assert torch.equal(out.isnan(), wanted.repeat(1, 2).expand_as(out))
    assert torch.equal(dx.isnan(), wanted.repeat(1, 1 if kind == "cosine" else 2).expand_as(dx))
    assert all(torch.equal(gradient.isnan(), wanted) for gradient in dtheta)
    assert set(launched) == BOTH


@pytest.mark.gpu
@KINDS
@EXACT
@pytest.mark.parametrize("n", [200, 1500])
def test_columns_that_need_their_largest_entry(
    n: int, exact: bool, kind: str, launched: list[str], device: torch.device
) -> None:
    x, theta, _ = random_case(kind, n, device)
    rising = torch.where(torch.arange(n, device=device) < n // 2, -90.0, 90.0)[:, None]
    x[0, :, 0, 0::2] += rising
    x[1, :, 2, 1::2] += 200
    x[0, :-1, 1, 1] = -math.inf
    x[1, 1:, 1, 2] = -math.inf
    assert_accurate(kind, x, theta.requires_grad_(exact))
    assert set(launched) == BOTH


@pytest.mark.gpu
@KINDS
@EXACT
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_columns_without_a_softmax_are_nan(
    value: float, exact: bool, kind: str, launched: list[str], device: torch.device
) -> None:
    x, theta, _ = random_case(kind, 1500, device)
    if value < 0:  # it takes all of them
        x[0, :, 1, 1] = value
    else:
        x[0, 700, 1, 1] = value
    assert_accurate(kind, x, theta.requires_grad_(exact))
    assert set(launched) == BOTH


@pytest.mark.gpu
@KINDS
@pytest.mark.parametrize(
    ("grid", "prefix", "exact"),
    [((1999,), 0, False), ((1999,), 0, True), ((1979,), 20, True), ((51, 39), 0, False), ((13, 17, 9), 0, False)],
    ids=str,
)
@pytest.mark.parametrize("patience", [1, 3])
def test_sums_that_a_program_works_out_for_others_have_the_same_bits(
    patience: int,
    grid: tuple[int, ...],
    prefix: int,
    exact: bool,
    kind: str,
    launched: list[str],
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from warploom.ops.lrpe.softmax_sequence.launches import hopper as launchers_sequence_hopper

    x, theta, grad = random_case(kind, math.prod(grid) + prefix, device)
    theta = theta[:, : theta.shape[1] // len(grid)].requires_grad_(exact)
    usual = results(kind, x, theta, grad, grid=grid, prefix=prefix)
    monkeypatch.setattr(launchers_sequence_hopper, "PATIENCE", patience)
    for _ in range(3):
        assert all(map(torch.equal, results(kind, x, theta, grad, grid=grid, prefix=prefix), usual))
    assert set(launched) == BOTH


@pytest.mark.gpu
@KINDS
@EXACT
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("n", [300, 1500])
def test_a_column_without_a_softmax_reaches_no_other(
    n: int, value: float, exact: bool, kind: str, launched: list[str], device: torch.device
) -> None:
    x, theta, _ = random_case(kind, n, device)
    x[1, slice(None) if value < 0 else n - 7, 1, 5] = value
    assert_accurate(kind, x, theta.requires_grad_(exact), offset=5)
    assert set(launched) == BOTH


@pytest.mark.gpu
@KINDS
@pytest.mark.parametrize("place", [{"offset": 2**31 - 290}, {"offset": 1 - 2**31, "prefix": 7}], ids=str)
def test_positions_at_the_ends_of_32_bits(
    place: dict[str, int], kind: str, launched: list[str], device: torch.device
) -> None:
    x, theta, _ = random_case(kind, 290, device)
    assert_accurate(kind, x, theta, **place)
    assert not launched


@pytest.mark.gpu
@KINDS
def test_parts_that_do_not_fit_the_gpu(
    kind: str, launched: list[str], device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More parts of a strip than run at once end, with the bits of patience without end, and are not chosen."""
    from warploom.ops.lrpe.softmax_sequence.launches import hopper as launchers

    theta = random_theta(device, 1, 64 if kind == "cosine" else 32)
    x = random_x(device, 1, 60_001, 1, 64).bfloat16()
    tile = launchers.HopperTile(32, 64, 32)
    monkeypatch.setattr(launchers, "hopper_tile", lambda kind, backward, *rest: None if backward else tile)
    encode(kind, x[:, 1:], theta, activation="softmax_sequence", backend="triton")
    assert not launched
    monkeypatch.setattr(launchers, "_PROGRAMS", 10**6)
    found = []
    for patience in (1, launchers.PATIENCE):
        monkeypatch.setattr(launchers, "PATIENCE", patience)
        found.append(encode(kind, x, theta, activation="softmax_sequence", backend="triton"))
        torch.cuda.synchronize()
    assert launched
    assert torch.equal(*found)


@pytest.mark.gpu
@KINDS
def test_words_from_a_pool_are_for_one_launch(
    kind: str, launched: list[str], device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    from warploom.ops.lrpe.softmax_sequence.launches import hopper as launchers

    monkeypatch.setattr(launchers, "_words", launchers.Words())
    x, theta, grad = random_case(kind, 1000, device)
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):  # of this thread's allocations: not of a backward, which has one of its own
        found = encode(kind, x, theta, offset=5, activation="softmax_sequence", backend="triton")
    assert not launchers._words.known
    usual = results(kind, x, theta, grad)
    assert len(launchers._words.known) == 1
    assert torch.equal(found, usual[0])
    assert set(launched) == BOTH
    torch.cuda.synchronize()
    del found, pool


@pytest.mark.gpu
@KINDS
def test_repeated_calls_of_any_length_give_the_same_bits(
    kind: str, launched: list[str], device: torch.device
) -> None:
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
    assert set(launched) == BOTH


@pytest.mark.gpu
@KINDS
def test_two_streams_at_once(kind: str, launched: list[str], device: torch.device) -> None:
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
    assert set(launched) == BOTH


@pytest.mark.gpu
@KINDS
@EXACT
def test_a_graph_replays(exact: bool, kind: str, launched: list[str], device: torch.device) -> None:
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
    assert set(launched) == BOTH


@pytest.mark.gpu
@KINDS
def test_a_new_length_compiles_nothing(
    kind: str, launched: list[str], device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    from warploom.ops.lrpe.softmax_sequence.kernels.hopper import sequence as kernels

    for n in (300, 1100, 2000):
        results(kind, *random_case(kind, n, device))
    compilations: list[str] = []
    for kernel in (kernels.hopper_sequence_forward_kernel, kernels.hopper_sequence_backward_kernel):
        usual = kernel._do_compile

        def count(*arguments: Any, usual: Any = usual, **keywords: Any) -> Any:
            compilations.append("one")
            return usual(*arguments, **keywords)

        monkeypatch.setattr(kernel, "_do_compile", count)
    for n in (301, 497, 1203, 1999, 2047):
        results(kind, *random_case(kind, n, device))
    assert set(launched) == BOTH
    assert not compilations


@pytest.mark.gpu
def test_an_address_that_cannot_be_described(launched: list[str], device: torch.device) -> None:
    """The same shapes and strides, one element further: plans are for addresses that suit, or for any."""
    storage = random_x(device, 2 * 300 * 3 * 128 + 8).bfloat16()
    theta = random_theta(device, 3, 64)
    taken = []
    for start in (0, 1, 8):
        assert_accurate("rotate", storage[start : start + 2 * 300 * 3 * 128].view(2, 300, 3, 128).detach(), theta)
        taken.append(set(launched) == BOTH)
        launched.clear()
    assert taken == [True, False, True]
