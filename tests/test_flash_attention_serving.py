"""A server's batch in one call: packed queries on a cache, dense or in pages, any number of queries a sequence."""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import seeds
import torch
from refusals import Wrong, assert_refused, each, ones

from warploom import ArgumentError, BackendError, ShapeError, flash_attention
from warploom.ops.flash_attention import reference
from warploom.runtime.backend import HAS_TRITON
from warploom.testing.accuracy import compare

Tensor = torch.Tensor

BACKENDS = ("torch", "auto", "triton") if HAS_TRITON else ("torch", "auto")
backends = pytest.mark.parametrize("backend", BACKENDS)
needs_triton = pytest.mark.skipif(not HAS_TRITON, reason="needs Triton")

OPTIONS: dict[str, dict[str, Any]] = {
    "causal": {"causal": True},
    "full": {},
    "window": {"causal": True, "window": (9, 0), "softcap": 3.0},
    "sink": {"causal": True, "sink": 4, "scale": -0.3},
}


def draw_call(
    device: torch.device, dtype: torch.dtype, number: int = 0, heads: int = 4, key_heads: int = 2, most: int = 41,
    size: int | None = 4, features: int = 24, values: int = 16, counts: Sequence[int] = (),
) -> dict[str, Any]:  # fmt: skip
    """A random batch: prompts, chunks, single tokens and nothing. Keys that are not used are NaN."""
    generator = seeds.generator(number)

    def integer(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=generator))

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    counts = counts or [integer(0, 30), 1, 0, integer(1, 4), integer(2, 20), 1]
    used = [count + integer(0, most - count) for count in counts]
    bounds = [*itertools.accumulate(counts, initial=0)]
    q = draw(1, bounds[-1] + 3, heads, features)
    q[:, bounds[-1] :] = torch.nan
    call: dict[str, Any] = {"q": q}
    rows, columns = len(counts), most
    if size is not None:
        places = -(-most // size)
        rows, columns = len(counts) * places + 2, size
        table = torch.randperm(rows, generator=generator)[: len(counts) * places].view(len(counts), places)
        call["block_table"] = table.to(device, torch.int32)
    call["k"], call["v"] = draw(rows, columns, key_heads, features), draw(rows, columns, key_heads, values)
    for s, keys in enumerate(used):
        for place in range(keys, most):
            slot = (s, place) if size is None else (int(call["block_table"][s, place // size]), place % size)
            call["k"][slot] = call["v"][slot] = torch.nan
    call["cu_seqlens_q"] = torch.tensor(bounds, dtype=torch.int32, device=device)
    call["seqused_k"] = torch.tensor(used, dtype=torch.int32, device=device)
    return call


def with_options(call: dict[str, Any], name: str) -> dict[str, Any]:
    options = dict(OPTIONS[name])
    if "sink" in options:
        options["sink"] = torch.linspace(-1, 1, call["q"].shape[2], device=call["q"].device)
    return call | options


def exactly(call: dict[str, Any]) -> tuple[Tensor, Tensor]:
    wide = {name: call[name].double() for name in ("q", "k", "v")}
    return reference.flash_attention(
        **call | wide | {"cu_seqlens_q": call["cu_seqlens_q"].tolist()}, return_lse=True
    )


def assert_right(call: dict[str, Any], backend: str) -> None:
    """Output and lse within their budgets, by sequence after sequence in float64."""
    exact, exact_lse = exactly(call)
    eager = reference.flash_attention(**call)
    out, lse = flash_attention(**call, backend=backend, return_lse=True)
    verdict = compare(out, exact, eager)
    assert verdict.ok, verdict.describe()
    torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-5, atol=1e-5)
    assert not out[:, call["cu_seqlens_q"][-1] :].any()


@backends
@pytest.mark.parametrize("size", [None, 1, 4, 16])
@pytest.mark.parametrize("options", OPTIONS)
def test_every_sequence_is_a_call_of_its_own(
    options: str, size: int | None, backend: str, device: torch.device
) -> None:
    assert_right(with_options(draw_call(device, torch.float32, size=size), options), backend)


@needs_triton
@pytest.mark.parametrize(("heads", "key_heads"), [(1, 1), (8, 1), (6, 3), (32, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_groups_of_heads(heads: int, key_heads: int, dtype: torch.dtype, device: torch.device) -> None:
    """Of how many queries a sequence is decoded depends on the group."""
    call = draw_call(device, dtype, heads=heads, key_heads=key_heads, size=7)
    assert_right(with_options(call, "causal"), "triton")


@needs_triton
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_loops_that_are_split(options: str, dtype: torch.dtype, device: torch.device) -> None:
    """A cache so long that the few queries of a sequence are decoded in chunks, which are joined."""
    call = draw_call(device, dtype, number=1, most=700, size=16, key_heads=1)
    assert_right(with_options(call, options), "triton")


PROMPTS = [300, 1, 0, 129, 40, 2]
"""Queries of sequences, some of which take several tiles."""


@pytest.mark.gpu
@pytest.mark.parametrize("features", [64, 80, 128])
@pytest.mark.parametrize("size", [None, 8, 16, 32, 64, 128, 256, 24])
@pytest.mark.parametrize("options", OPTIONS)
def test_prompts_of_several_tiles(options: str, size: int | None, features: int, device: torch.device) -> None:
    """On Hopper tiles are copied page by page, where these divide a tile or are a multiple of it."""
    shape: dict[str, Any] = {"most": 900, "features": features, "values": features, "counts": PROMPTS}
    call = draw_call(device, torch.bfloat16, number=2, size=size, **shape)
    assert_right(with_options(call, options), "triton")


@pytest.mark.gpu
def test_bits_do_not_depend_on_the_size_of_pages(device: torch.device) -> None:
    shape: dict[str, Any] = {"most": 900, "features": 128, "values": 128, "counts": PROMPTS}
    call = with_options(draw_call(device, torch.bfloat16, size=128, **shape), "causal")
    out = flash_attention(**call, backend="triton")
    size = call["k"].shape[1]
    for smaller in (8, 16, 64):
        parts = size // smaller
        table = call["block_table"][..., None] * parts + torch.arange(parts, device=device)
        other = call | {"block_table": table.flatten(1).int()}
        other |= {name: call[name].unflatten(1, (parts, smaller)).flatten(0, 1) for name in ("k", "v")}
        assert torch.equal(flash_attention(**other, backend="triton"), out)
    dense = call | {"block_table": None}
    dense |= {name: call[name][call["block_table"].long()].flatten(1, 2) for name in ("k", "v")}
    assert torch.equal(flash_attention(**dense, backend="triton"), out)


@needs_triton
@pytest.mark.parametrize(
    ("most", "shape"), [(41, {}), (700, {}), (900, {"features": 64, "values": 64, "counts": PROMPTS})]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.seldom(3, 5)
def test_bits_do_not_depend_on_the_batch(
    dtype: torch.dtype, most: int, shape: dict[str, Any], device: torch.device
) -> None:
    """Alone, in a table of its own size, among others, in another order and on other pages."""
    if shape and device.type == "cpu":
        pytest.skip("takes a GPU")
    call = with_options(
        draw_call(device, dtype, most=most, key_heads=1, size=16 if shape else 4, **shape), "causal"
    )
    out = flash_attention(**call, backend="triton")
    bounds = call["cu_seqlens_q"].tolist()
    for s, (first, last) in enumerate(itertools.pairwise(bounds)):
        alone = call | {
            "q": call["q"][:, first:last],
            "cu_seqlens_q": torch.tensor([0, last - first], dtype=torch.int32, device=device),
            "seqused_k": call["seqused_k"][s : s + 1],
            "block_table": call["block_table"][s : s + 1],
        }
        assert torch.equal(flash_attention(**alone, backend="triton"), out[:, first:last])
        own = -(-int(call["seqused_k"][s]) // call["k"].shape[1])
        for more in (0, most):
            table = torch.nn.functional.pad(alone["block_table"][:, :own], (0, more), value=10**9)
            found = flash_attention(**alone | {"block_table": table}, backend="triton")
            assert torch.equal(found, out[:, first:last]), (s, more)
    order = [4, 1, 5, 0, 2, 3]
    pages = torch.randperm(call["k"].shape[0], generator=seeds.generator(9)).to(device)
    moved = call | {
        "q": torch.cat([call["q"][:, bounds[s] : bounds[s + 1]] for s in order], 1),
        "cu_seqlens_q": torch.tensor(
            [*itertools.accumulate((bounds[s + 1] - bounds[s] for s in order), initial=0)], device=device
        ),
        "seqused_k": call["seqused_k"][order],
        "block_table": pages.argsort()[call["block_table"][order].long()].int(),
        "k": call["k"][pages],
        "v": call["v"][pages],
    }
    expected = torch.cat([out[:, bounds[s] : bounds[s + 1]] for s in order], 1)
    assert torch.equal(flash_attention(**moved, backend="triton"), expected)


def in_chunks(call: dict[str, Any], most: int) -> Iterator[tuple[slice, dict[str, Any]]]:
    """Calls with at most so many more queries of each sequence, and which rows of the whole call these are."""
    bounds, used = call["cu_seqlens_q"].tolist(), call["seqused_k"].tolist()
    for s, (first, last) in enumerate(itertools.pairwise(bounds)):
        for begin in range(first, last, most):
            end = min(begin + most, last)
            # Behind other sequences' queries, so that tiles hold other rows of it.
            yield (
                slice(begin, end),
                call
                | {
                    "q": torch.cat([call["q"][:, : most // 3], call["q"][:, begin:end]], 1),
                    "cu_seqlens_q": torch.tensor([0, most // 3, most // 3 + end - begin], device=call["q"].device),
                    "seqused_k": torch.tensor([used[0], used[s] - (last - end)], device=call["q"].device),
                    "block_table": call["block_table"][[0, s]],
                },
            )


@needs_triton
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("most", "shape"), [(41, {}), (900, {"features": 128, "values": 128, "counts": PROMPTS})])
def test_bits_do_not_depend_on_chunks(
    most: int, shape: dict[str, Any], dtype: torch.dtype, options: str, device: torch.device
) -> None:
    if shape and device.type == "cpu":
        pytest.skip("takes a GPU")
    call = with_options(draw_call(device, dtype, most=most, size=16 if shape else 4, **shape), options)
    if options == "full":  # earlier queries see the same keys, which is so for a causal call alone
        call["window"] = (None, 0)
    call = call | {"bits": "chunks", "backend": "triton"}
    whole, whole_lse = flash_attention(**call, return_lse=True)
    for size in (1, 7, 129) if shape else (1, 7):
        for rows, part in in_chunks(call, size):
            out, lse = flash_attention(**part, return_lse=True)
            assert torch.equal(out[:, size // 3 :], whole[:, rows])
            assert torch.equal(lse[..., size // 3 :], whole_lse[..., rows])


@backends
def test_chunks_are_a_promise_of_kernels(backend: str, device: torch.device) -> None:
    call = with_options(draw_call(device, torch.float32), "causal") | {"bits": "chunks"}
    if backend == "torch" or (backend == "auto" and device.type == "cpu"):
        with pytest.raises(BackendError, match="bits='chunks' is a promise of the kernels"):
            flash_attention(**call, backend=backend)
        return
    eager, _ = exactly({name: value for name, value in call.items() if name != "bits"})
    torch.testing.assert_close(flash_attention(**call, backend=backend).double(), eager, rtol=1e-4, atol=1e-4)


@needs_triton
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("number", [10**9, -(10**9)])
@pytest.mark.parametrize("bad", ["bounds", "lengths", "pages"])
def test_numbers_that_are_not_so_read_nothing_outside(
    bad: str, number: int, dtype: torch.dtype, device: torch.device
) -> None:
    """On a GPU numbers are not checked; a compiled or recorded call is not either."""
    call = draw_call(device, dtype, size=16, features=64 if device.type == "cuda" else 24)
    numbers = {"bounds": "cu_seqlens_q", "lengths": "seqused_k", "pages": "block_table"}[bad]
    call[numbers] = torch.full_like(call[numbers], number)
    arguments = [call["q"], call["k"], call["v"], None, call["cu_seqlens_q"], None, call["seqused_k"]]
    torch.ops.warploom.flash_attention(*arguments, call["block_table"], None, 0, 0.3, None, None, "batch")
    if device.type == "cuda":
        torch.cuda.synchronize()


@pytest.mark.gpu
def test_a_graph_serves_other_batches(device: torch.device) -> None:
    """Lengths, bounds and pages change behind one graph; bits are those of a call."""
    call = with_options(draw_call(device, torch.bfloat16, most=700, size=16, features=64), "causal")
    call["q"] = torch.randn(1, 90, 4, 64, device=device, dtype=torch.bfloat16)
    call |= {name: call[name].nan_to_num() for name in ("k", "v")}
    flash_attention(**call, backend="triton")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = flash_attention(**call, backend="triton")
    for bounds, used in (
        ([0, 1, 2, 3, 4, 5, 6], [700, 3, 90, 640, 1, 33]),
        ([0, 80, 80, 81, 83, 84, 85], [80, 0, 9, 2, 7, 600]),
    ):
        call["cu_seqlens_q"].copy_(torch.tensor(bounds))
        call["seqused_k"].copy_(torch.tensor(used))
        call["block_table"].copy_(call["block_table"].flip(0))
        graph.replay()
        assert torch.equal(out, flash_attention(**call, backend="triton"))


GOOD: dict[str, Any] = {
    "q": ones(1, 5, 4, 8),
    "k": ones(9, 4, 2, 8),
    "v": ones(9, 4, 2, 6),
    "cu_seqlens_q": torch.tensor([0, 3, 5], dtype=torch.int32),
    "seqused_k": torch.tensor([3, 8], dtype=torch.int32),
    "block_table": torch.tensor([[0, 1], [2, 3]], dtype=torch.int32),
}
WRONG: tuple[Wrong, ...] = (
    ({"q": ones(2, 5, 4, 8)}, ShapeError, "q", "batch size 1", "(2, 5, 4, 8)"),
    ({"block_table": None}, ShapeError, "k", "(S, M, Hkv, D) with S = 2", "(9, 4, 2, 8)"),
    ({"seqused_k": ones(3, dtype=torch.int32)}, ShapeError, "seqused_k", "(S,) with S = 2", "(3,)"),
    ({"block_table": ones(3, 2, dtype=torch.int32)}, ShapeError, "block_table", "(S, P) with S = 2", "(3, 2)"),
    ({"cu_seqlens_k": torch.tensor([0, 4, 8])}, ArgumentError, "seqused_k", "None with bounds", "a tensor"),
    ({"bits": "all"}, ArgumentError, "bits", "batch, chunks", "'all'"),
    ({"k": ones(9, 4, 2, 8).requires_grad_()}, ArgumentError, "block_table", "gradients are recorded", "a tensor"),
)  # fmt: skip


@each(WRONG)
def test_wrong_calls_are_refused(wrong: Wrong, device: torch.device) -> None:
    assert_refused(flash_attention, GOOD, wrong, device)


@each(
    (
        ({"seqused_k": torch.tensor([3, 9])}, ArgumentError, "seqused_k", "M = 8", "9"),
        ({"cu_seqlens_q": torch.tensor([0, 3, 6])}, ArgumentError, "cu_seqlens_q", "N = 5", "6"),
        (
            {"block_table": torch.tensor([[0, 1], [2, 9]], dtype=torch.int32)},
            *(ArgumentError, "block_table", "between 0 and 8", "9"),
        ),
    )
)
def test_wrong_values_are_refused(wrong: Wrong) -> None:
    assert_refused(flash_attention, GOOD, wrong, torch.device("cpu"))
