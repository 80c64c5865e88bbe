"""Appending to a cache: what is written and nothing else, exact positions, refusals, bits of a sequence alone."""

import itertools
from typing import Any

import pytest
import seeds
import torch
from refusals import Wrong, assert_refused, each, ones
from strided import strided_view

from warploom import (
    ArgumentError,
    BackendError,
    DeviceError,
    DtypeError,
    ShapeError,
    append_kv,
    flash_attention,
    lrpe_rotate,
)
from warploom.ops.append_kv import reference
from warploom.ops.append_kv.validation import MAX_FEATURES
from warploom.runtime.backend import HAS_TRITON

Tensor = torch.Tensor

BACKENDS = ("torch", "triton") if HAS_TRITON else ("torch",)
backends = pytest.mark.parametrize("backend", BACKENDS)
THETA = 10000.0 ** -(torch.arange(8, dtype=torch.float64) / 8)


def draw_call(device: torch.device, dtype: torch.dtype, number: int = 0, size: int | None = 4) -> dict[str, Any]:
    """A random batch of a server: sequences that go on or begin, with any number of new tokens."""
    generator = seeds.generator(number)

    def integer(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=generator))

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    sequences, most = integer(1, 7), 23
    counts = [integer(0, 6) * integer(0, 1) for _ in range(sequences)]
    used = [count + integer(0, most - count) for count in counts]
    bounds = [sum(counts[:i]) for i in range(sequences + 1)]
    rows, columns = sequences, most
    call: dict[str, Any] = {}
    if size is not None:
        pages = -(-most // size)
        rows, columns = sequences * pages + 2, size
        table = torch.randperm(rows, generator=generator)[: sequences * pages].view(sequences, pages)
        call["block_table"] = table.to(device, torch.int32)
    tokens = bounds[-1] + integer(0, 3)
    return call | {
        "k": draw(1, tokens, 2, 16),
        "v": draw(1, tokens, 2, 24),
        "q": draw(1, tokens, 6, 16),
        "k_cache": draw(rows, columns, 2, 16),
        "v_cache": draw(rows, columns, 2, 24),
        "cu_seqlens": torch.tensor(bounds, dtype=torch.int32, device=device),
        "seqused_k": torch.tensor(used, dtype=torch.int32, device=device),
        "theta": THETA.to(device, torch.float32),
    }


def copied(call: dict[str, Any]) -> dict[str, Any]:
    return call | {name: call[name].clone() for name in ("k_cache", "v_cache")}


@backends
@pytest.mark.parametrize("size", [None, 1, 4, 32])
def test_each_new_token_is_where_its_sequence_continues(
    size: int | None, backend: str, device: torch.device
) -> None:
    """Against a loop over tokens, and attention that reads the cache next."""
    call = copied(draw_call(device, torch.float32, size=size))
    k_cache, v_cache = call["k_cache"].clone(), call["v_cache"].clone()
    bounds, used = call["cu_seqlens"].tolist(), call["seqused_k"].tolist()
    rotated = append_kv(**call, backend=backend)
    assert rotated is not None
    for s, keys in enumerate(used):
        for token in range(bounds[s], bounds[s + 1]):
            place = keys - bounds[s + 1] + token
            slot = (s, place) if size is None else (int(call["block_table"][s, place // size]), place % size)
            at = {"offset": place, "backend": "torch"}
            k_cache[slot] = lrpe_rotate(call["k"][:, token : token + 1], call["theta"], **at)[0, 0]
            v_cache[slot] = call["v"][0, token]
            q = lrpe_rotate(call["q"][:, token : token + 1], call["theta"], **at)[0, 0]
            torch.testing.assert_close(rotated[0, token], q, rtol=0, atol=3e-6)
    torch.testing.assert_close(call["k_cache"], k_cache, rtol=0, atol=3e-6)
    assert torch.equal(call["v_cache"], v_cache)
    assert not rotated[0, bounds[-1] :].any()


@pytest.mark.skipif(not HAS_TRITON, reason="needs Triton")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("number", range(6))
def test_strided_tensors_and_caches_in_gaps_of_others(
    number: int, dtype: torch.dtype, device: torch.device
) -> None:
    call = draw_call(device, dtype, number, size=(None, 4, 7)[number % 3])
    exact = {name: value.double() if value.is_floating_point() else value for name, value in copied(call).items()}
    q = reference.append_kv(**exact)
    tail = call["cu_seqlens"][-1]
    for name in ("k", "v", "q"):
        call[name][:, tail:] = torch.nan  # of no sequence
    views = {
        name: strided_view(call[name], seeds.generator(number)) for name in ("k", "v", "q", "k_cache", "v_cache")
    }
    rotated = append_kv(**call | {name: view.tensor for name, view in views.items()}, backend="triton")
    close = {"rtol": torch.finfo(dtype).eps, "atol": 3e-6, "check_dtype": False}
    for name in ("k_cache", "v_cache"):
        torch.testing.assert_close(views[name].tensor, exact[name], **close)
        assert views[name].surroundings_untouched()
    torch.testing.assert_close(rotated, q, **close)


@backends
def test_positions_are_exact_far_behind(backend: str, device: torch.device) -> None:
    """Of a long context all pages but the last are one, which is only written there."""
    page, theta = 256, THETA.to(device)
    for keys in (2**20 + 1, 2**24 + 5):
        table = torch.zeros((1, -(-keys // page)), dtype=torch.int32, device=device)
        table[0, -1] = 1
        cache = torch.zeros((2, 2, page, 1, 16), device=device)
        x = torch.randn((1, 1, 1, 16), generator=seeds.generator()).to(device)
        used = torch.tensor([keys], device=device)
        q = append_kv(x, x, *cache, q=x, seqused_k=used, block_table=table, theta=theta, backend=backend)
        exact = reference.lrpe.lrpe_rotate(x.double(), theta, offset=keys - 1)
        torch.testing.assert_close(q.double(), exact, rtol=0, atol=3e-6)
        place = (keys - 1) % page
        torch.testing.assert_close(cache[0, 1, place].double(), exact[0, 0], rtol=0, atol=3e-6)
        assert not cache[:, 0].any()


@pytest.mark.skipif(not HAS_TRITON, reason="needs Triton")
def test_tokens_without_a_place_are_not_written(device: torch.device) -> None:
    """Values on a GPU are not checked, and tables may hold anything."""
    call = draw_call(device, torch.float32) | {
        "k": torch.randn(4, 2, 2, 16, device=device),
        "v": torch.randn(4, 2, 2, 24, device=device),
        "q": None,
        "cu_seqlens": None,
        "seqused_k": torch.tensor([1, 9, 8, 0], dtype=torch.int64, device=device),
        "block_table": torch.tensor([[1, 2], [3, 4], [-7, 10**9], [5, 6]], dtype=torch.int32, device=device),
        "k_cache": torch.zeros(9, 4, 2, 16, device=device),
        "v_cache": torch.zeros(9, 4, 2, 24, device=device),
    }
    if device.type == "cpu":  # where a call like this one is refused
        from warploom.ops.append_kv.call import AppendInputs
        from warploom.ops.append_kv.operator import OPERATOR

        torch.ops.warploom.append_kv(*AppendInputs(**call), "rotate")
        assert OPERATOR.name == "append_kv"
    else:
        append_kv(**call, backend="triton")
    written = call["v_cache"].any(-1).any(-1).nonzero().tolist()
    assert written == [[1, 0], [4, 3]]  # of the second sequence only its place 7, as it has room for 8


@pytest.mark.skipif(not HAS_TRITON, reason="needs Triton")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bits_do_not_depend_on_the_batch(dtype: torch.dtype, device: torch.device) -> None:
    call = draw_call(device, dtype, number=3)
    whole = copied(call)
    q = append_kv(**whole, backend="triton")
    alone = copied(call)
    bounds = call["cu_seqlens"].tolist()
    parts = []
    for s, (first, last) in enumerate(itertools.pairwise(bounds)):
        one = {name: call[name][:, first:last] for name in ("k", "v", "q")} | {
            "cu_seqlens": None, "seqused_k": call["seqused_k"][s : s + 1],
            "block_table": call["block_table"][s : s + 1],
        }  # fmt: skip
        parts.append(append_kv(**alone | one, backend="triton"))
    assert torch.equal(torch.cat(parts, 1), q[:, : bounds[-1]])
    assert torch.equal(whole["k_cache"], alone["k_cache"])
    assert torch.equal(whole["v_cache"], alone["v_cache"])


@backends
def test_autograd_sees_that_caches_change(backend: str, device: torch.device) -> None:
    call = copied(draw_call(device, torch.float32))
    versions = call["k_cache"]._version, call["v_cache"]._version
    append_kv(**call, backend=backend)
    assert call["k_cache"]._version > versions[0]
    assert call["v_cache"]._version > versions[1]


@backends
def test_a_compiled_step_writes_the_caches_in_place(backend: str, device: torch.device) -> None:
    call = draw_call(device, torch.float32, number=1)
    eager, compiled = copied(call), copied(call)

    def step(**call: Any) -> Tensor:
        q = append_kv(**call, backend=backend)
        assert q is not None
        return q + call["v_cache"].sum()

    expected = step(**eager)
    found = torch.compile(step, fullgraph=True, backend="aot_eager")(**compiled)
    torch.testing.assert_close(found, expected)
    assert torch.equal(compiled["k_cache"], eager["k_cache"])
    assert torch.equal(compiled["v_cache"], eager["v_cache"])


@pytest.mark.gpu
def test_a_graph_serves_other_lengths(device: torch.device) -> None:
    call = draw_call(device, torch.bfloat16, number=2, size=4)
    call |= {"cu_seqlens": None, **{n: call[n].new_zeros(5, 1, *call[n].shape[2:]) for n in ("k", "v", "q")}}
    call["seqused_k"] = torch.ones(5, dtype=torch.int32, device=device)
    call["block_table"] = torch.arange(30, dtype=torch.int32, device=device).view(5, 6)
    for name in ("k_cache", "v_cache"):
        call[name] = call[name].new_zeros(30, *call[name].shape[1:])
    append_kv(**call, backend="triton")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        q = append_kv(**call, backend="triton")
    for step in range(3):
        for name in ("k", "v", "q"):
            call[name].normal_()
        call["seqused_k"].copy_(torch.tensor([1, 24, 7, 9, 16 + step]))
        call["block_table"].copy_(torch.randperm(30).view(5, 6))
        expected = copied(call)
        graph.replay()
        eager = append_kv(**expected, backend="triton")
        assert torch.equal(q, eager)
        assert torch.equal(call["k_cache"], expected["k_cache"])
        assert torch.equal(call["v_cache"], expected["v_cache"])


@backends
def test_a_prompt_in_chunks_and_single_tokens_fills_the_same_cache(backend: str, device: torch.device) -> None:
    call = draw_call(device, torch.bfloat16, size=4)
    tokens, theta = 13, call["theta"]
    k, q = torch.randn(2, 1, tokens, 2, 16, generator=seeds.generator()).to(device, torch.bfloat16)
    table = torch.randperm(6, generator=seeds.generator())[:4].to(device, torch.int32)[None]
    caches, rotated = [], []
    for chunks in ([13], [5, 1, 1, 6]):
        cache, done, parts = torch.zeros(2, 6, 4, 2, 16, device=device, dtype=torch.bfloat16), 0, []
        for chunk in chunks:
            now = slice(done, done + chunk)
            done += chunk
            used = torch.tensor([done], dtype=torch.int32, device=device)
            options = {"seqused_k": used, "block_table": table, "theta": theta, "backend": backend}
            parts.append(append_kv(k[:, now], k[:, now], *cache, q=q[:, now], **options))
        caches.append(cache)
        rotated.append(torch.cat(parts, 1))
    assert torch.equal(caches[0], caches[1])
    assert torch.equal(rotated[0], rotated[1])
    options = {"causal": True, "seqused_k": used, "block_table": table, "backend": "torch"}
    out = flash_attention(rotated[0], *caches[0], **options)
    turned = lrpe_rotate(k, theta, backend="torch")
    expected = flash_attention(lrpe_rotate(q, theta, backend="torch"), turned, k, causal=True, backend="torch")
    torch.testing.assert_close(out, expected, rtol=0.02, atol=0.02)


# ----------------------------------------------------------------------------------------------------------
# Refusals
# ----------------------------------------------------------------------------------------------------------

GOOD: dict[str, Any] = {
    "k": ones(2, 3, 2, 8),
    "v": ones(2, 3, 2, 6),
    "q": ones(2, 3, 4, 8),
    "k_cache": ones(9, 4, 2, 8),
    "v_cache": ones(9, 4, 2, 6),
    "theta": ones(4),
    "seqused_k": torch.tensor([3, 8], dtype=torch.int32),
    "block_table": torch.tensor([[0, 1], [2, 3]], dtype=torch.int32),
}
WRONG: tuple[Wrong, ...] = (
    ({"k": [1.0]}, DtypeError, "k", "a tensor", "list"),
    ({"k": ones(2, 3, 8)}, ShapeError, "k", "(B, N, Hkv, D)", "(2, 3, 8)"),
    ({"k": ones(2, 3, 0, 8)}, ShapeError, "k", "Hkv ≥ 1", "(2, 3, 0, 8)"),
    ({"v": ones(2, 3, 1, 6)}, ShapeError, "v", "Hkv = 2", "(2, 3, 1, 6)"),
    ({"v": ones(2, 3, 2, 6, dtype=torch.bfloat16)}, DtypeError, "v", "float32", "bfloat16"),
    ({"q": ones(2, 4, 4, 8)}, ShapeError, "q", "N = 3", "(2, 4, 4, 8)"),
    ({"q": ones(2, 3, 4, 6)}, ShapeError, "q", "D = 8", "(2, 3, 4, 6)"),
    ({"theta": None}, ArgumentError, "theta", "given with q", "None"),
    ({"theta": ones(5)}, ShapeError, "theta", "D/2 = 4", "(5,)"),
    ({"theta": ones(2, 4)}, ShapeError, "theta", "(1, F)", "(2, 4)"),
    ({"theta": ones(4, dtype=torch.int64)}, DtypeError, "theta", "a tensor of", "int64"),
    ({"k_cache": ones(9, 4, 2, 8, dtype=torch.float16)}, DtypeError, "k_cache", "float32", "float16"),
    ({"k_cache": ones(9, 4, 1, 8)}, ShapeError, "k_cache", "Hkv = 2", "(9, 4, 1, 8)"),
    ({"v_cache": ones(8, 4, 2, 6)}, ShapeError, "v_cache", "E = 6", "(8, 4, 2, 6)"),
    ({"v_cache": ones(9, 4, 2, 6, device="meta")}, DeviceError, "v_cache", "on the device of k", "meta"),
    ({"block_table": None}, ShapeError, "k_cache", "(S, M, Hkv, D) with S = 2", "(9, 4, 2, 8)"),
    ({"block_table": ones(2, 2, dtype=torch.int64)}, DtypeError, "block_table", "int32", "int64"),
    ({"block_table": ones(3, 2, dtype=torch.int32)}, ShapeError, "block_table", "S = 2", "(3, 2)"),
    ({"seqused_k": ones(3, dtype=torch.int32)}, ShapeError, "seqused_k", "S = 2", "(3,)"),
    ({"seqused_k": ones(2)}, DtypeError, "seqused_k", "int32", "float32"),
    ({"cu_seqlens": ones(3, dtype=torch.int32)}, ShapeError, "k", "batch size 1", "(2, 3, 2, 8)"),
    ({"cu_seqlens": ones(1, dtype=torch.int32)}, ShapeError, "cu_seqlens", "S ≥ 1", "(1,)"),
    ({"interleaved": 1}, DtypeError, "interleaved", "a bool", "1"),
    ({"k": ones(2, 3, 2, 8).requires_grad_()}, ArgumentError, "k", "without requires_grad", "requires_grad=True"),
    ({"theta": ones(4).requires_grad_()}, ArgumentError, "theta", "without requires_grad", "requires_grad=True"),
)


@each(WRONG)
def test_wrong_calls_are_refused(wrong: Wrong, device: torch.device) -> None:
    assert_refused(append_kv, GOOD, wrong, device)


VALUES: tuple[Wrong, ...] = (
    ({"seqused_k": torch.tensor([3, 9])}, ArgumentError, "seqused_k", "M = 8", "9"),
    ({"seqused_k": torch.tensor([-1, 8])}, ArgumentError, "seqused_k", "between 0", "-1"),
    (
        {"seqused_k": torch.tensor([8, 2])},
        ArgumentError,
        "seqused_k",
        "the new ones, of which sequence 1 has 3",
        "2",
    ),
    ({"seqused_k": torch.tensor([0, 8])}, ArgumentError, "seqused_k", "cache_seqlens, plus the new tokens", "0"),
    ({"block_table": torch.tensor([[0, 1], [2, 9]], dtype=torch.int32)}, ArgumentError, "block_table", "8", "9"),
    (
        {"block_table": torch.tensor([[0, 1], [2, 0]], dtype=torch.int32)},
        *(ArgumentError, "block_table", "different pages where sequences append", "page 0 of sequences 0 and 1"),
    ),
)


@each(VALUES)
def test_wrong_values_are_refused(wrong: Wrong) -> None:
    assert_refused(append_kv, GOOD, wrong, torch.device("cpu"))


def test_a_sequence_without_new_tokens_may_have_no_keys() -> None:
    k, v = torch.randn(1, 5, 2, 8), torch.randn(1, 5, 2, 8)
    caches = torch.zeros(2, 3, 8, 2, 8)
    bounds = torch.tensor([0, 4, 4, 5])
    append_kv(k, v, *caches, cu_seqlens=bounds, seqused_k=torch.tensor([4, 0, 1]), backend="torch")
    with pytest.raises(ArgumentError, match="of which sequence 2 has 1"):
        append_kv(k, v, *caches, cu_seqlens=bounds, seqused_k=torch.tensor([4, 0, 0]), backend="torch")


def test_what_is_shared_but_not_written_may_be_shared() -> None:
    """A prefix that two sequences have in common."""
    shared = torch.tensor([[0, 1], [0, 3]], dtype=torch.int32)
    call = copied(GOOD) | {"seqused_k": torch.tensor([8, 7]), "block_table": shared}
    append_kv(**call, backend="torch")


def test_transforms_and_caches_that_overlap_are_refused(device: torch.device) -> None:
    call = {name: value.to(device) for name, value in GOOD.items()}
    call["v_cache"] = ones(9, 1, 2, 6).to(device).expand(9, 4, 2, 6)
    with pytest.raises(ArgumentError, match="v_cache must be with memory for every element; got an expanded"):
        append_kv(**call)

    def one(k: Tensor) -> Tensor:
        append_kv(k, GOOD["v"], GOOD["k_cache"].clone(), GOOD["v_cache"].clone(), seqused_k=GOOD["seqused_k"],
                  block_table=GOOD["block_table"])  # fmt: skip
        return k

    with pytest.raises(ArgumentError, match="k must be outside of transforms"):
        torch.vmap(one)(GOOD["k"].expand(2, -1, -1, -1, -1))
    x, cache = ones(1, 1, 1, 8), ones(1, 4, 1, 8)
    with pytest.raises(ArgumentError, match="v_cache must be another tensor than k_cache"):
        append_kv(x, x, cache, cache, seqused_k=torch.tensor([1]))


@pytest.mark.skipif(not HAS_TRITON, reason="needs Triton")
def test_features_beyond_a_tile_are_for_pytorch(device: torch.device) -> None:
    x = torch.ones((1, 1, 1, MAX_FEATURES + 2), device=device)
    call = {"k": x, "v": x, "k_cache": x.clone(), "v_cache": x.clone()}
    used = torch.tensor([1], device=device)
    with pytest.raises(BackendError, match="does not fit in one tile"):
        append_kv(**call, seqused_k=used, backend="triton")
    append_kv(**call, seqused_k=used)
