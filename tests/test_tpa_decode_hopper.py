"""The decode kernel for Hopper: which calls take it, and that they are right there, whatever stands beside them."""

import math
from typing import Any

import pytest
import torch
from launches import ON_HOPPER, assert_for_hopper_alone, choose_as_on
from planned_calls import forget_plans
from test_tpa import assert_accurate, factors, lengths

from warploom import tpa_decode
from warploom.runtime.backend import HAS_TRITON
from warploom.testing.poison import poison_allocations

pytestmark = pytest.mark.skipif(not HAS_TRITON, reason="needs Triton")

Tensor = torch.Tensor
CACHE = ("ak", "av", "bk", "bv")

on_hopper = pytest.mark.skipif(not ON_HOPPER, reason="needs a Hopper GPU")
ranks = pytest.mark.parametrize("rank", [1, 2, 4])


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Choose kernels as on an H100, wherever the test runs."""
    from warploom.ops.tpa.decode.hopper import launch as launchers_hopper

    choose_as_on(90, launchers_hopper, monkeypatch)


def suits(cut: Any = lambda name, factor: factor, **shape: Any) -> bool:
    from warploom.ops.tpa.call import Factors
    from warploom.ops.tpa.decode.hopper import launch as launchers_hopper

    sizes = {"keys": 200, "heads": 32, "rank_q": 16, "features": 128, "values": 128, "dtype": torch.bfloat16}
    made = factors(torch.device("cpu"), **{**sizes, **shape})
    return launchers_hopper.suit(Factors(**{name: cut(name, factor) for name, factor in made.items()}))


@pytest.fixture
def model() -> Any:
    """Factors of a model that the kernel takes, with changes."""

    def make(device: torch.device, rank: int, **shape: Any) -> dict[str, Any]:
        sizes = {"heads": 32, "rank_q": 16, "features": 128, "values": 128, "dtype": torch.bfloat16}
        made = factors(device, **{**sizes, "rank_k": rank, "rank_v": rank, **shape})
        return dict(made)

    return make


def taken(inputs: dict[str, Any]) -> bool:
    from warploom.ops.tpa.call import Factors
    from warploom.ops.tpa.decode.hopper import launch as launchers_hopper

    return launchers_hopper.suit(Factors(**{name: inputs[name] for name in Factors._fields}))


@ranks
def test_the_calls_that_suit(hopper: None, rank: int) -> None:
    both = {"rank_k": rank, "rank_v": rank}
    assert suits(**both)
    assert suits(**both, dtype=torch.float16)
    assert suits(**both, heads=8, features=40, values=64, rank_q=3)
    assert suits(**both, batch=1, keys=1)
    assert suits(lambda name, f: torch.stack((f, f), 1)[:, 1] if name in CACHE else f, **both)
    assert suits(lambda name, f: f.transpose(0, 1).contiguous().transpose(0, 1), **both)  # tokens first


def test_the_calls_that_do_not(hopper: None) -> None:
    assert not suits(dtype=torch.float32)
    assert not suits(tokens=2)
    assert not suits(heads=40), "more heads than rows"
    assert not suits(heads=12), "rows of 24 bytes"
    assert not suits(features=136)
    assert not suits(features=100), "rows of 200 bytes"
    assert not suits(rank_k=3, rank_v=3)
    assert not suits(rank_k=2, rank_v=1)
    assert not suits(rank_q=17)
    assert not suits(batch=0)
    assert not suits(keys=0)
    assert not suits(lambda name, f: f[:1].expand(2, -1, -1, -1) if name == "bk" else f), "a stride of zero"
    assert not suits(lambda name, f: torch.stack((f, f), -1)[..., 0] if name == "bv" else f), "features apart"


def test_nothing_suits_another_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    from warploom.ops.tpa.decode.hopper import launch as launchers_hopper

    assert_for_hopper_alone(launchers_hopper, suits, monkeypatch)


def test_neither_batch_nor_length_decides(hopper: None) -> None:
    """Kernels differ in the last bit, and a request must not depend on what stands beside it."""
    for shape in ({"batch": 1}, {"batch": 64}, {"keys": 1}, {"keys": 5000}):
        assert suits(**shape)
        assert not suits(**shape, tokens=2)


@pytest.mark.parametrize("levels", range(5))
def test_what_programs_left_is_joined_whatever_they_took(device: torch.device, levels: int) -> None:
    """The second kernel, for few parts and for many, of two requests, one of which fills its part of the tree."""
    from warploom.ops.tpa.decode.configs import COMBINE_FEW, COMBINE_MANY
    from warploom.ops.tpa.decode.hopper.launch import CHUNKS
    from warploom.ops.tpa.decode.triton.decode import ChunkLengths, DecodeSizes, combine_kernel
    from warploom.ops.tpa.triton.factors import FeatureStrides
    from warploom.runtime.launch import Launch

    valid, width, heads, features = (40 * 128, 23 * 128 - 5), CHUNKS.widths[levels], 3, 16
    splits = CHUNKS.splits(max(valid), levels)
    partial = torch.randn(2, splits, heads, features, device=device)
    statistics = torch.stack((torch.randn(2, splits, heads) * 4, torch.rand(2, splits, heads) + 0.5), 2).to(device)
    for i, length in enumerate(valid):  # what no program writes
        partial[i, -(-length // (128 * width)) :] = math.nan
        statistics[i, -(-length // (128 * width)) :] = math.nan
    found = []
    for tile in (COMBINE_FEW, COMBINE_MANY):
        out = torch.empty(2, 1, heads, features, device=device)
        combine = Launch(
            combine_kernel,
            2 * -(-heads // tile.rows),
            takes=("partial", "statistics", "seqused_k", "out"),
            num_warps=tile.warps,
            sizes=DecodeSizes(1, max(valid), splits, 1), out_strides=FeatureStrides(*out.stride()), scale_v=0.5,
            H=heads, E=features, BLOCK_R=tile.rows, BLOCK_E=features, AHEAD=tile.ahead,
            CHUNKS=ChunkLengths(*CHUNKS[:3]), WIDTH=width, GROUP=CHUNKS.widths[-1] // width, PAIRS=True,
            BESIDE=tile.beside, PDL=False,
        )  # fmt: skip
        copies = partial.clone(), statistics.clone()  # groups take the places of parts
        combine(*copies, lengths(device, *valid), out)
        found.append(out)
    assert torch.equal(*found)
    for i, length in enumerate(valid):
        parts = -(-length // (128 * width))
        tops, totals = (statistics[i, :parts, k].double() for k in range(2))
        shares = torch.exp(tops - tops.max(0).values)
        joined = (partial[i, :parts].double() * shares[..., None]).sum(0) / (totals * shares).sum(0)[:, None]
        torch.testing.assert_close(found[0][i, 0].double(), 0.5 * joined, rtol=1e-5, atol=1e-5)


@on_hopper
@ranks
@pytest.mark.parametrize("keys", [1, 63, 64, 130, 1000, 9001])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_it_is_accurate(device: torch.device, model: Any, rank: int, keys: int, dtype: torch.dtype) -> None:
    inputs = model(device, rank, keys=keys, dtype=dtype)
    assert taken(inputs)
    with poison_allocations():
        found = tpa_decode(**inputs, backend="triton")
    assert_accurate(found, inputs)


@ranks
@pytest.mark.parametrize(
    "shape",
    [
        {"heads": 8, "features": 64, "values": 40, "rank_q": 5},
        {"heads": 24, "features": 96, "values": 128, "rank_q": 16},
        {"heads": 16, "features": 40, "values": 64, "rank_q": 9, "batch": 5},
    ],
)
def test_sizes_that_fill_no_tile(
    device: torch.device, model: Any, rank: int, shape: dict[str, int], launched: list[str]
) -> None:
    inputs = model(device, rank, keys=777, **shape)
    assert taken(inputs)
    assert_accurate(tpa_decode(**inputs, backend="triton"), inputs)
    whole = inputs | {"aq": None, "bq": (inputs["aq"] @ inputs["bq"] / shape["rank_q"])}
    assert_accurate(tpa_decode(**whole, backend="triton"), whole)


@pytest.mark.sample(3)
@ranks
@pytest.mark.seldom(4, 10)
def test_nothing_behind_the_valid_entries_is_looked_at(
    device: torch.device, model: Any, rank: int, launched: list[str]
) -> None:
    valid = (0, 1, 64, 300, 2999, 3001)
    inputs = model(device, rank, batch=len(valid), keys=3001)
    inputs["seqused_k"] = lengths(device, *valid)
    expected = tpa_decode(**inputs, backend="triton")
    assert_accurate(expected, inputs)
    assert torch.equal(expected[0], torch.zeros_like(expected[0]))
    for name in CACHE:
        for i, length in enumerate(valid):
            inputs[name][i, length:] = math.nan
    for strategy in ("auto", "batch", "split_kv"):
        assert torch.equal(tpa_decode(**inputs, strategy=strategy, backend="triton"), expected)


@on_hopper
@ranks
def test_a_request_has_the_same_bits_in_any_batch_and_cache(device: torch.device, model: Any, rank: int) -> None:
    valid = (4000, 17, 20000, 777, 9000)
    inputs = model(device, rank, batch=len(valid), keys=20000)
    together = tpa_decode(**inputs, seqused_k=lengths(device, *valid), backend="triton")
    for i, length in enumerate(valid):
        alone = {name: value[i : i + 1] for name, value in inputs.items()}
        for capacity in {length, min(length + 1000, 20000)}:
            cut = {n: v[:, :capacity] if n in CACHE else v for n, v in alone.items()}
            found = tpa_decode(**cut, seqused_k=lengths(device, length), backend="triton")
            assert torch.equal(found[0], together[i])


@on_hopper
@ranks
def test_a_program_may_take_any_part_of_the_tree(
    device: torch.device, model: Any, rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from warploom.ops.tpa.decode import chunks as launchers_chunks
    from warploom.ops.tpa.decode.hopper import launch as launchers_hopper

    inputs = model(device, rank, keys=20001)
    inputs["seqused_k"] = lengths(device, 20001, 6000)
    found = []
    for levels in range(launchers_hopper.CHUNKS.all_levels + 1):
        forget_plans()  # none with other levels
        monkeypatch.setattr(
            launchers_chunks.ChunkTree,
            "levels",
            lambda self, *arguments, levels=levels: min(levels, self.all_levels),
        )
        found.append(tpa_decode(**inputs, backend="triton"))
    assert_accurate(found[0], inputs)
    assert all(torch.equal(found[0], other) for other in found[1:])


@on_hopper
@ranks
def test_calls_that_go_to_the_other_kernel_are_right_beside_it(device: torch.device, model: Any, rank: int) -> None:
    """Several new tokens; and the same shapes at another address, for which there is a plan already."""
    several = model(device, rank, keys=500, tokens=3)
    several["seqused_k"] = lengths(device, 500, 123)
    assert_accurate(tpa_decode(**several, backend="triton"), several)
    inputs = model(device, rank, keys=300)
    moved = dict(inputs)
    room = torch.empty(inputs["bk"].numel() + 1, dtype=torch.bfloat16, device=device)
    moved["bk"] = room[1:].view_as(inputs["bk"]).copy_(inputs["bk"])  # 2 bytes off a multiple of 16
    for _ in range(2):
        assert_accurate(tpa_decode(**inputs, backend="triton"), inputs)
        assert_accurate(tpa_decode(**moved, backend="triton"), moved)


@on_hopper
@ranks
def test_a_cache_with_room_between_its_entries(device: torch.device, model: Any, rank: int) -> None:
    inputs = model(device, rank, keys=600, batch=3)
    for name in CACHE:
        inputs[name] = torch.stack((torch.full_like(inputs[name], math.nan), inputs[name]), 2)[:, :, 1]
    assert taken(inputs)
    assert_accurate(tpa_decode(**inputs, backend="triton"), inputs)


@on_hopper
@ranks
def test_it_can_be_captured(device: torch.device, model: Any, rank: int) -> None:
    inputs = model(device, rank, keys=3000)
    expected = tpa_decode(**inputs, backend="triton")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = tpa_decode(**inputs, backend="triton")
    inputs["bq"].neg_()
    again = tpa_decode(**inputs, backend="triton")
    for wanted in (again, expected):
        found.fill_(math.nan)
        graph.replay()
        assert torch.equal(found, wanted)
        inputs["bq"].neg_()
