"""Tensor-product attention on factors of any strides: expanded, of axes of one element, beyond 2³¹ elements."""

import itertools
import random
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from launches import choose_as_on, driver_accepts
from test_tpa import assert_accurate, exact, factors, strategies

from warploom import tpa_attention, tpa_decode
from warploom.ops.tpa import reference
from warploom.ops.tpa.call import DecodeInputs, DecodeOptions
from warploom.runtime.backend import HAS_TRITON
from warploom.testing.accuracy import compare_each, mean_of

if not HAS_TRITON:
    pytest.skip("needs Triton", allow_module_level=True)

import triton
import triton.language as tl

from warploom.ops.tpa.decode import engine as launchers
from warploom.ops.tpa.decode.hopper import launch as launchers_hopper
from warploom.ops.tpa.decode.triton.decode import Partials, PartialSoftmax, load_part, store_part
from warploom.runtime.launch import Launch

Tensor = torch.Tensor
NAMES = ("aq", "ak", "av", "bq", "bk", "bv")


def assert_decodes(calls: Iterable[dict[str, Any]], strategy: str) -> None:
    """All of several calls of one kind are right: a result is so small that its largest error alone is luck."""
    verdicts = []
    for x in calls:
        found = tpa_decode(**x, strategy=strategy, backend="triton")
        verdicts += compare_each(found, reference.tpa_decode(**exact(x)), reference.tpa_decode(**x))
    accuracy = mean_of(verdicts)
    assert accuracy.ok, accuracy.describe()


def assert_attends(calls: Iterable[dict[str, Any]]) -> None:
    """The same for attention and its gradients."""

    def run(function: Any, x: dict[str, Any], grad: Tensor, **options: Any) -> tuple[Tensor, ...]:
        x = {name: value.detach().requires_grad_() if name in NAMES else value for name, value in x.items()}
        out = function(**x, **options)
        return out.detach(), *torch.autograd.grad(out, [x[name] for name in NAMES], grad.to(out.dtype))

    verdicts = []
    for x in calls:
        bv = x["bv"]
        grad = torch.randn(*x["aq"].shape[:3], bv.shape[3], device=bv.device).to(bv.dtype)
        found = run(tpa_attention, x, grad, causal=True, backend="triton")
        expected, eager = (run(reference.tpa_attention, y, grad, causal=True) for y in (exact(x), x))
        verdicts.append(compare_each(found, expected, eager))
    for name, of_one in zip(("out", *NAMES), zip(*verdicts, strict=True), strict=True):
        accuracy = mean_of(of_one)
        assert accuracy.ok, f"{name}: {accuracy.describe()}"


def expanded(device: torch.device, **sizes: Any) -> Iterable[dict[str, Tensor]]:
    """Factors of which one has one number for all of an axis, for each of them and each axis that is longer."""
    for name, axis in itertools.product(NAMES, range(4)):
        x = factors(device, **sizes)
        if x[name].shape[axis] > 1:
            yield x | {name: x[name].narrow(axis, 0, 1).expand(x[name].shape)}


@pytest.mark.sample(2)
@strategies
@pytest.mark.parametrize("sizes", [{"tokens": 2, "rank_k": 2, "rank_v": 2}, {"keys": 130, "dtype": torch.bfloat16}])
def test_decoding_with_expanded_factors(device: torch.device, sizes: dict[str, Any], strategy: str) -> None:
    assert_decodes(expanded(device, **sizes), strategy)


@pytest.mark.seldom(4, 9)
@pytest.mark.sample(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_with_expanded_factors(device: torch.device, dtype: torch.dtype) -> None:
    assert_attends(expanded(device, tokens=9, keys=9, heads=2, rank_k=2, rank_v=2, dtype=dtype))


# ----------------------------------------------------------------------------------------------------------
# Axes of one element: no stride of theirs is ever taken
# ----------------------------------------------------------------------------------------------------------

ONES = [
    {"batch": 1},
    {"tokens": 1, "keys": 1},
    {"heads": 1},
    {"rank_q": 1, "rank_k": 1, "rank_v": 1},
    {"features": 1, "values": 1},
    {"batch": 1, "tokens": 1, "keys": 1, "heads": 1, "rank_q": 1, "rank_k": 1, "rank_v": 1},
    {
        "batch": 1,
        "tokens": 1,
        "keys": 1,
        "heads": 1,
        "rank_q": 1,
        "rank_k": 1,
        "rank_v": 1,
        "features": 1,
        "values": 1,
    },
]


def odd(x: Tensor, generator: random.Random) -> Tensor:
    """The same tensor, its rows a multiple of 16 bytes apart, with any strides along axes of one element."""
    room = torch.empty(*x.shape[:-1], -(-x.shape[-1] // 8) * 8, dtype=x.dtype, device=x.device)
    view = room[..., : x.shape[-1]].copy_(x)
    strides = [s if n > 1 else generator.choice((0, 1, 3, 8, 77)) for n, s in zip(view.shape, view.stride())]
    return view.as_strided(x.shape, strides)


def with_ones(device: torch.device, **sizes: Any) -> Iterable[dict[str, Tensor]]:
    generator = random.Random(0)
    for ones in ONES:
        x = factors(device, **(sizes | ones))
        yield {name: odd(factor, generator) for name, factor in x.items()}


@strategies
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_decoding_with_axes_of_one_element(device: torch.device, dtype: torch.dtype, strategy: str) -> None:
    assert_decodes(with_ones(device, rank_k=2, rank_v=2, dtype=dtype), strategy)


def test_attention_with_axes_of_one_element(device: torch.device) -> None:
    assert_attends(with_ones(device, tokens=9, keys=9, heads=2, rank_k=2, rank_v=2))


# ----------------------------------------------------------------------------------------------------------
# Descriptors of the kernels for Hopper
# ----------------------------------------------------------------------------------------------------------


def anyhow(shape: tuple[int, ...], generator: random.Random) -> Tensor:
    """Half of the time features apart from each other or not adjacent; axes in any order, with gaps or expanded."""
    order = [*generator.sample(range(3), 3), 3]
    if generator.random() < 0.2:
        order = generator.sample(range(4), 4)
    strides, step = [0] * 4, 1
    for axis in reversed(order):
        strides[axis] = generator.choice((step, step, step, step + 8, 0)) if axis != 3 else step
        step = max(step * shape[axis], generator.choice((1, 8, 16)))
    strides = [generator.choice((s, 0, 1, 5, 8)) if n == 1 else s for n, s in zip(shape, strides)]
    return torch.empty_strided(shape, strides, dtype=torch.bfloat16)


def drawn(generator: random.Random, heads: tuple[int, ...], features: tuple[int, ...]) -> dict[str, Tensor]:
    """Factors of any strides, each of which there can be descriptors of half of the time."""
    batch, keys, rank = generator.choice((1, 2)), generator.choice((1, 9)), generator.choice((1, 2))
    sizes = {"batch": batch, "keys": keys, "heads": generator.choice(heads), "rank_k": rank, "rank_v": rank}
    sizes |= {"features": generator.choice(features), "values": generator.choice(features)}
    return {name: anyhow(tuple(x.shape), generator) for name, x in factors(torch.device("cpu"), **sizes).items()}


def test_the_driver_accepts_every_descriptor_of_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    choose_as_on(90, launchers_hopper, monkeypatch)
    generator, verdicts = random.Random(0), {True: 0, False: 0}
    for _ in range(3600):  # few have entries of a batch at multiples of 16 bytes
        inputs = DecodeInputs(**drawn(generator, heads=(1, 1, 8), features=(1, 8, 64)), seqused_k=None)
        options = DecodeOptions("batch", 1.0, 1.0, 1.0, 1.0)
        launch = launchers.plan_decode(inputs, options)[1].launch
        verdicts[bool(launch.descriptions)] += 1
        assert all(driver_accepts(each.fields) for each in launch.descriptions.values()), inputs
    assert min(verdicts.values()) > 60, verdicts


# ----------------------------------------------------------------------------------------------------------
# Beyond 2³¹ elements
# ----------------------------------------------------------------------------------------------------------

FAR = 2**31 + 2**20  # elements


@pytest.fixture
def far(device: torch.device, gpu_memory: Callable[[float], None]) -> Tensor:
    """A tensor of so many elements in 16 bits, 4 GiB: on a CPU, memory only where it is written."""
    gpu_memory(6)
    try:
        return torch.empty(FAR, dtype=torch.float16, device=device)
    except RuntimeError:
        pytest.skip("needs 4 GiB of memory")


def far_apart(far: Tensor, device: torch.device, **sizes: Any) -> Iterable[dict[str, Tensor]]:
    """Factors of which one has its last element along an axis beyond 2³¹ others, for each of them and its axes."""
    for name, axis in itertools.product(NAMES, range(4)):
        x = factors(device, **sizes, dtype=torch.float16)
        size = x[name].shape[axis]
        if size == 1:
            continue
        dense = list(
            torch.empty([2 if i == axis else n for i, n in enumerate(x[name].shape)], device="meta").stride()
        )
        strides = [s if i != axis else 2**31 // (size - 1) + 8 for i, s in enumerate(dense)]
        yield x | {name: far.as_strided(x[name].shape, strides).copy_(x[name])}


@strategies
def test_decoding_with_elements_far_apart(far: Tensor, device: torch.device, strategy: str) -> None:
    assert_decodes(far_apart(far, device, tokens=2, rank_k=2, rank_v=2), strategy)


@pytest.mark.seldom(4, 8)
def test_attention_with_elements_far_apart(far: Tensor, device: torch.device) -> None:
    assert_attends(far_apart(far, device, tokens=9, keys=9, heads=2, rank_k=2, rank_v=2))


@triton.jit(do_not_specialize=["first"])
def move_part_kernel(
    x, partial, statistics, out, first: tl.int32, rows: tl.int64, R: tl.constexpr, E: tl.constexpr
):  # fmt: skip
    """A tile of rows left where a split leaves its part, and read from there."""
    row = (first + tl.arange(0, R))[:, None]
    e = tl.arange(0, E)[None, :]
    offsets = tl.arange(0, R)[:, None] * E + e
    slot = tl.program_id(0).to(tl.int64)
    number = tl.arange(0, R)[:, None].to(tl.float32)
    parts = Partials(partial, statistics, rows)
    store_part(parts, slot, row, e, row < rows, PartialSoftmax(tl.load(x + offsets), number, number), E)
    tl.debug_barrier()  # a row is read by another thread than wrote it
    part = load_part(parts, slot, row, e, row < rows, E)
    tl.store(out + offsets, part.acc + part.row_max + part.row_sum)


@pytest.mark.parametrize("features", [16, 256])
def test_parts_of_results_reach_beyond_two_to_the_31(far: Tensor, device: torch.device, features: int) -> None:
    rows, tile = 2**31 // features + 64, 32
    x = torch.randn(tile, features, device=device)
    statistics, out = torch.empty(2 * rows, device=device), torch.empty_like(x)
    first = rows - tile
    sizes = {"first": first, "rows": rows, "R": tile, "E": features}
    takes = ("x", "partial", "statistics", "out")
    Launch(move_part_kernel, 1, takes=takes, **sizes)(x, far, statistics, out)
    number = torch.arange(tile, device=device)[:, None]
    assert torch.equal(far[first * features : rows * features].view_as(x), x.half())
    assert torch.equal(out, x.half().float() + number + number)


def entry_of(x: dict[str, Tensor], entry: int) -> dict[str, Tensor]:
    return {name: factor[entry : entry + 1] for name, factor in x.items()}


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("strategy", ["batch", "split_kv"])
@pytest.mark.parametrize(("rank_k", "rank_v"), [(8, 2), (4, 8), (2, 3), (1, 1)])
def test_an_entry_at_another_address_has_the_bits_of_the_batch(
    device: torch.device, rank_k: int, rank_v: int, strategy: str, dtype: torch.dtype
) -> None:
    """Of permuted queries an entry lies at an odd address, and its factors have layouts of their own."""
    sizes = {"batch": 7, "keys": 191, "heads": 6, "rank_q": 4, "features": 128, "values": 128}
    x = factors(device, **sizes, rank_k=rank_k, rank_v=rank_v, dtype=dtype)
    x["aq"] = x["aq"].permute(1, 3, 2, 0).contiguous().permute(3, 0, 2, 1)
    x["ak"] = x["ak"][:, :1].expand(x["ak"].shape)
    assert x["aq"].stride() == (1, 168, 7, 42)
    options: dict[str, Any] = {"scale": 1.0, "scale_k": 0.3, "strategy": strategy, "backend": "triton"}
    together = tpa_decode(**x, **options)
    for entry in range(7):
        assert torch.equal(tpa_decode(**entry_of(x, entry), **options)[0], together[entry]), entry


@pytest.mark.gpu
def test_split_decoding_of_so_many_queries_and_heads(
    device: torch.device, gpu_memory: Callable[[float], None]
) -> None:
    """Two splits, whose parts have 256 · 257 · 32768 numbers in float32 each, and the output twice: 26 GiB."""
    gpu_memory(30)
    keys, tokens, heads = 256, 257, 32768
    sizes = {"batch": 1, "keys": keys, "tokens": tokens, "heads": heads, "rank_q": 1, "features": 16, "values": 256}
    x: dict[str, Any] = factors(device, **sizes, dtype=torch.bfloat16)
    x |= {"aq": None, "bq": torch.randn(1, tokens, heads, 16, dtype=torch.bfloat16, device=device)}
    split = tpa_decode(**x, strategy="split_kv", backend="triton")
    assert split.numel() > 2**31
    assert torch.equal(split, tpa_decode(**x, strategy="batch", backend="triton"))
    few = x | {"bq": x["bq"][:, -2:, -5:], "ak": x["ak"][:, :, -5:], "av": x["av"][:, :, -5:]}
    assert_accurate(split[:, -2:, -5:], few)
