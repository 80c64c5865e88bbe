"""Flash attention with more than 256 features: the cache of latent attention, whose values lie in its keys."""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import seeds
import torch
from flash_cases import kernels
from planned_calls import no_plans
from refusals import assert_left_to_pytorch, ones

from warploom import BackendError, flash_attention
from warploom.ops.flash_attention import reference
from warploom.testing.accuracy import compare
from warploom.testing.poison import poison_allocations

Tensor = torch.Tensor
pytestmark = kernels


@pytest.fixture
def many_chunks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Short caches are cut into as many chunks as long ones."""
    from warploom.ops.flash_attention.triton import launch_decode as decode

    with monkeypatch.context() as patch, no_plans():
        patch.setattr(decode, "LATENT_CHUNK", 64)
        patch.setattr(decode, "HOPPER_LATENT_CHUNK", 64)
        yield


def draw_call(
    device: torch.device, n: int = 1, m: int = 200, *, heads: int = 16, key_heads: int = 1, d: int = 576,
    e: int = 512, batch: int = 2, shared: bool = True, dtype: torch.dtype = torch.bfloat16, **options: Any,
) -> dict[str, Any]:  # fmt: skip
    generator = seeds.generator(7)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    q, k = draw(batch, n, heads, d), draw(batch, m, key_heads, d)
    return {"q": q, "k": k, "v": k[..., :e] if shared else draw(batch, m, key_heads, e)} | options


def packed_call(
    device: torch.device, counts: Sequence[int], used: Sequence[int], size: int | None, *, heads: int = 16,
    dtype: torch.dtype = torch.bfloat16, d: int = 576, e: int = 512, most: int = 0, **options: Any,
) -> dict[str, Any]:  # fmt: skip
    """Queries of sequences on a cache, in pages of ``size`` if that is given; keys that are not used are NaN."""
    generator = seeds.generator(3)
    bounds = torch.tensor([0, *counts]).cumsum(0)
    q = torch.randn((1, int(bounds[-1]) + 3, heads, d), generator=generator).to(device, dtype)
    q[:, bounds[-1] :] = torch.nan
    most = max(most, *used)
    cache = torch.randn((len(counts), most, 1, d), generator=generator)
    for s, keys in enumerate(used):
        cache[s, keys:] = torch.nan
    cache = cache.to(device, dtype)
    call: dict[str, Any] = {"q": q, "cu_seqlens_q": bounds.to(device, torch.int32)}
    call["seqused_k"] = torch.tensor(used, dtype=torch.int32, device=device)
    if size is not None:
        places = -(-most // size)
        cache = torch.nn.functional.pad(cache, (0, 0, 0, 0, 0, places * size - most), value=torch.nan)
        order = torch.randperm(len(counts) * places, generator=generator)
        pool = torch.empty((len(counts) * places, size, 1, d), dtype=dtype, device=device)
        pool[order.to(device)] = cache.view(-1, size, 1, d)
        call["block_table"] = order.view(len(counts), places).to(device, torch.int32)
        cache = pool
    return call | {"k": cache, "v": cache[..., :e]} | options


def assert_right(call: dict[str, Any]) -> None:
    """Output and lse within their budgets, by the definition in float64."""
    wide = call | {name: call[name].double() for name in "qkv"}
    if "cu_seqlens_q" in call:
        wide["cu_seqlens_q"] = call["cu_seqlens_q"].tolist()
    exact, exact_lse = reference.flash_attention(**wide, return_lse=True)
    eager = reference.flash_attention(**call)
    with poison_allocations():
        out, lse = flash_attention(**call, backend="triton", return_lse=True)
    verdict = compare(out, exact, eager)
    assert verdict.ok, verdict.describe()
    torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-4, atol=1e-4)


CASES: tuple[dict[str, Any], ...] = (
    {"causal": True},
    {"heads": 40, "n": 2, "causal": True, "dtype": torch.float16},  # two tiles of 64 rows
    {"heads": 128, "batch": 1},
    {"heads": 6, "key_heads": 2, "n": 3, "causal": True},
    {"d": 288, "e": 256, "m": 130},
    {"d": 576, "e": 500, "shared": False},
    {"d": 300, "e": 300, "n": 2, "window": (70, 2)},
    {"d": 512, "e": 512},
    {"d": 64, "e": 300, "shared": False, "heads": 3},
    {"d": 511, "e": 16, "m": 9, "n": 3, "causal": True},
    {"n": 4, "window": (40, 0), "softcap": 3.0, "heads": 17},
    {"n": 30, "m": 70, "heads": 4, "causal": True, "scale": -0.05},  # more than a few queries
    {"n": 7, "m": 5, "causal": True},
)


@pytest.mark.sample(4)
@pytest.mark.usefixtures("many_chunks")
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.seldom(3, 5)
def test_one_row_for_all_heads(case: dict[str, Any], device: torch.device) -> None:
    assert_right(draw_call(device, **case))


@pytest.mark.usefixtures("many_chunks")
def test_a_sink_and_lengths(device: torch.device) -> None:
    """As if keys behind a length were not there."""
    call = draw_call(device, 2, 200, batch=4, heads=9, causal=True, sink=torch.linspace(-1, 1, 9, device=device))
    for entry, used in enumerate(lengths := [200, 0, 1, 129]):
        call["k"][entry, used:] = torch.nan
    assert_right(call | {"seqused_k": torch.tensor(lengths, device=device)})


@pytest.mark.sample(3)
@pytest.mark.usefixtures("many_chunks")
@pytest.mark.parametrize("size", [None, 16, 24, 64])
@pytest.mark.parametrize("heads", [16, 24, 70])
@pytest.mark.seldom(4, 10)
def test_a_server_s_batch(heads: int, size: int | None, device: torch.device) -> None:
    """Prompts, single tokens, a few, and none; rows behind them are 0."""
    call = packed_call(device, [5, 1, 0, 2, 1], [40, 150, 20, 2, 1], size, heads=heads, causal=True)
    assert_right(call)


@pytest.mark.usefixtures("many_chunks")
def test_a_server_s_batch_with_all_options(device: torch.device) -> None:
    options = {"window": (30, 0), "softcap": 4.0, "sink": torch.linspace(-1, 1, 20, device=device)}
    assert_right(packed_call(device, [5, 1, 12], [40, 99, 12], 16, heads=20, most=200, causal=True, **options))


@pytest.mark.usefixtures("many_chunks")
@pytest.mark.seldom(3, 3)
def test_bits_of_values_in_their_own_memory(device: torch.device) -> None:
    """Values in the memory of keys, and elsewhere: two kernels, which a plan does not confuse."""
    call = draw_call(device, m=150, batch=1, causal=True)
    inside = flash_attention(**call, backend="triton")
    apart = call | {"v": call["k"][..., :512].clone()}
    other = call | {"v": call["k"].flip(1)[..., :512]}
    as_strided = call | {"v": torch.cat((call["k"].flip(1), call["k"]))[:1, ..., :512]}
    for given in (apart, other, as_strided, call):
        assert_right(given)
    torch.testing.assert_close(flash_attention(**apart, backend="triton"), inside, rtol=0.02, atol=0.004)
    assert torch.equal(flash_attention(**call, backend="triton"), inside)


@pytest.mark.usefixtures("many_chunks")
@pytest.mark.parametrize("heads", [16, 40])
@pytest.mark.seldom(3, 5)
def test_bits_do_not_depend_on_the_batch(heads: int, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone a program takes one chunk, in a batch several or all of them."""
    from warploom.ops.flash_attention.triton import launch_decode as decode

    call = draw_call(device, m=400 if heads == 16 else 200, batch=2, heads=heads, causal=True)
    found = []
    for taken in (1, 6, 4) if heads == 16 else (1, 3):
        with no_plans():
            monkeypatch.setattr(decode, "chunks_of_program", lambda *_, taken=taken: taken)
            found.append(flash_attention(**call, backend="triton", return_lse=True))
    for out, lse in found[1:]:
        assert torch.equal(out, found[0][0])
        assert torch.equal(lse, found[0][1])


@pytest.mark.usefixtures("many_chunks")
def test_bits_do_not_depend_on_chunks_of_a_prompt(device: torch.device) -> None:
    call = packed_call(device, [7], [90], 16, causal=True, bits="chunks", backend="triton")
    whole = flash_attention(**call)
    for begin, end in ((0, 3), (3, 4), (4, 7)):
        part = call | {"q": call["q"][:, begin:end], "seqused_k": call["seqused_k"] - (7 - end)}
        part["cu_seqlens_q"] = torch.tensor([0, end - begin], dtype=torch.int32, device=device)
        assert torch.equal(flash_attention(**part), whole[:, begin:end])


def test_pages_that_a_table_does_not_have_are_not_read(device: torch.device) -> None:
    """Numbers behind the used pages may be any."""
    call = packed_call(device, [1, 1], [20, 33], 16, causal=True)
    expected = flash_attention(**call, backend="triton")
    call["block_table"][0, 2:] = 2**31 - 1
    assert torch.equal(flash_attention(**call, backend="triton"), expected)


@pytest.mark.usefixtures("many_chunks")
@pytest.mark.seldom(4, 8)
def test_bits_do_not_depend_on_the_width_of_a_table(device: torch.device) -> None:
    """Nor on the sequences whose pages are longer, and the place of a sequence among them."""
    assert_alone_as_among_others(device, heads=16)


def assert_alone_as_among_others(device: torch.device, heads: int) -> None:
    """Each sequence has its bits alone too, in tables of different widths."""
    size = 16
    counts, used = ([2, 1, 3], [150, 3300, 400]) if device.type == "cuda" else ([1, 1], [20, 130])
    call = packed_call(device, counts, used, size, heads=heads, causal=True, backend="triton", return_lse=True)
    out, lse = flash_attention(**call)
    bounds = call["cu_seqlens_q"].tolist()
    for s, (first, last) in enumerate(itertools.pairwise(bounds)):
        alone = call | {"q": call["q"][:, first:last], "seqused_k": call["seqused_k"][s : s + 1]}
        alone["cu_seqlens_q"] = torch.tensor([0, last - first], dtype=torch.int32, device=device)
        own = call["block_table"][s : s + 1, : -(-used[s] // size)]
        for more in (0, 7, 500) if device.type == "cuda" else (50,):
            alone["block_table"] = torch.nn.functional.pad(own, (0, more), value=10**9)
            found, found_lse = flash_attention(**alone)
            assert torch.equal(found, out[:, first:last]), (s, more)
            assert torch.equal(found_lse, lse[..., first:last]), (s, more)


@pytest.mark.parametrize("arch", [80, 89, 90, 100, 120])
def test_two_tiles_of_keys_fit_in_shared_memory(arch: int) -> None:
    from warploom.ops.flash_attention.triton.config import LATENT_SCRATCH, latent_tiles
    from warploom.runtime.launch import SHARED_MEMORY

    memory = 1024 * SHARED_MEMORY[arch]
    for rows in (1, 16, 17, 128):
        for features in (576, 1088):
            tiles = latent_tiles(arch, rows, 2 * 576, 2 * features, memory, in_pages=False)
            needed = 2 * (576 * tiles.block_m + 2 * features * tiles.block_n) + LATENT_SCRATCH
            assert needed <= memory, (rows, features, tiles)
            assert tiles.block_n >= 16


def test_what_has_no_kernels(device: torch.device) -> None:
    call = {"q": ones(1, 3, 4, 576).half(), "k": (k := ones(1, 3, 1, 576).half()), "v": k[..., :512]}
    for change, reason in (
        ({name: call[name].float() for name in "qkv"}, "576 features of float32"),
        ({"q": call["q"].clone().requires_grad_()}, "576 features with gradients"),
        ({"q": ones(1, 3, 4, 600).half(), "k": ones(1, 3, 1, 600).half()}, "600 features"),
        ({"v": ones(1, 3, 1, 513).half()}, "576 features do not fit"),
    ):
        assert_left_to_pytorch(flash_attention, call | change, reason)
    call = {name: call[name].to(device) for name in "qkv"}
    bounds = torch.tensor([0, 3], device=device)
    with pytest.raises(BackendError, match="576 features of packed keys"):
        flash_attention(**call, cu_seqlens=bounds, backend="triton")
    with pytest.raises(BackendError, match="more than 256 features with a mask"):
        flash_attention(**call, alibi=torch.ones(4, device=device), backend="triton")


# ----------------------------------------------------------------------------------------------------------
# The kernel for Hopper: on one, and in an interpreter
# ----------------------------------------------------------------------------------------------------------


@pytest.mark.sample(4)
@pytest.mark.usefixtures("many_chunks")
@pytest.mark.parametrize(
    "case",
    [
        {"heads": 17, "causal": True},
        {"heads": 32, "n": 2, "m": 63, "causal": True, "dtype": torch.float16},
        {"heads": 64, "m": 64},
        {"heads": 40, "n": 3, "m": 65, "window": (None, 1)},
        {"heads": 128, "batch": 1, "m": 1},
        {"heads": 60, "key_heads": 3, "n": 4, "causal": True},
        {"heads": 20, "n": 5, "m": 3, "causal": True},
    ],
    ids=str,
)
def test_hopper_on_one_piece(case: dict[str, Any], launched: list[str], device: torch.device) -> None:
    assert_right(draw_call(device, **case))
    assert set(launched) == {"hopper_latent_kernel"}


@pytest.mark.sample(4)
@pytest.mark.usefixtures("many_chunks")
@pytest.mark.parametrize("size", [None, 8, 16, 64, 256])
@pytest.mark.parametrize("heads", [24, 70])
def test_hopper_on_sequences_of_a_cache(
    heads: int, size: int | None, launched: list[str], device: torch.device
) -> None:
    """Keys that are not used are NaN."""
    sink = torch.linspace(-1, 1, heads, device=device)
    used = [0, 1, 63, 64, 65, 150]
    call = packed_call(device, [2] * len(used), used, size, heads=heads, causal=True, sink=sink)
    call["q"] = call["q"][0, :-3].view(len(used), 2, heads, 576)
    del call["cu_seqlens_q"]
    assert_right(call)
    assert set(launched) == {"hopper_latent_kernel"}


@pytest.mark.sample(3)
@pytest.mark.usefixtures("many_chunks")
@pytest.mark.parametrize("size", [None, 16, 64])
@pytest.mark.parametrize("heads", [24, 70])
def test_hopper_on_a_server_s_batch(
    heads: int, size: int | None, launched: list[str], device: torch.device
) -> None:
    sink = torch.linspace(-1, 1, heads, device=device)
    assert_right(
        packed_call(device, [5, 1, 0, 2, 1], [40, 150, 20, 2, 1], size, heads=heads, causal=True, sink=sink)
    )
    assert set(launched) == {"latent_kernel", "hopper_latent_kernel"}


@pytest.mark.usefixtures("many_chunks")
@pytest.mark.seldom(3, 4)
def test_hopper_s_bits_do_not_depend_on_the_batch(
    launched: list[str], device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alone a program takes one chunk, in a batch several or all of them."""
    from warploom.ops.flash_attention.triton import launch_decode as decode

    call = draw_call(device, m=300, batch=2, heads=40, causal=True)
    call["seqused_k"] = torch.tensor([300, 170], device=device)
    found = []
    for taken in (1, 3, 5):  # of five
        with no_plans():
            monkeypatch.setattr(decode, "chunks_of_program", lambda *_, taken=taken: taken)
            found.append(flash_attention(**call, backend="triton", return_lse=True))
    assert set(launched) == {"hopper_latent_kernel"}
    for out, lse in found[1:]:
        assert torch.equal(out, found[0][0])
        assert torch.equal(lse, found[0][1])


@pytest.mark.usefixtures("many_chunks")
@pytest.mark.seldom(4, 7)
def test_hopper_s_bits_do_not_depend_on_the_width_of_a_table(launched: list[str], device: torch.device) -> None:
    assert_alone_as_among_others(device, heads=17)
    assert "hopper_latent_kernel" in launched
