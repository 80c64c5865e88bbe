"""Flash attention of few queries on many keys: rows of a group in one tile, chunks of keys, lengths, pages."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import seeds
import torch
from compiling import output_of
from flash_cases import assert_right, kernels, random_inputs
from launches import ON_GPU
from planned_calls import forget_plans, no_plans

from warploom import flash_attention
from warploom.ops.flash_attention import reference
from warploom.testing.accuracy import compare
from warploom.testing.poison import poison_allocations

Tensor = torch.Tensor
pytestmark = kernels

SHORT_CHUNK = 32
LONG = 700 if ON_GPU else 170


@pytest.fixture
def many_chunks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Short caches are cut into as many chunks as long ones."""
    from warploom.ops.flash_attention.triton import launch_decode as decode

    with monkeypatch.context() as patch, no_plans():
        patch.setattr(decode, "DECODE_CHUNK", SHORT_CHUNK)
        yield


@pytest.mark.sample(3)
@pytest.mark.usefixtures("many_chunks")
@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 16])
@pytest.mark.parametrize(("heads", "key_heads"), [(2, 2), (3, 1), (8, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_a_group_share_a_tile(
    dtype: torch.dtype, heads: int, key_heads: int, n: int, device: torch.device
) -> None:
    options: dict[str, Any] = {"causal": True, "return_lse": True, "batch": 4, "d": 24, "e": 40}
    inputs = random_inputs(device, n, LONG, heads=heads, key_heads=key_heads, dtype=dtype, **options)
    if not ON_GPU:  # where gradients take most of the time
        inputs |= {name: inputs[name].detach() for name in "qkv"}
    with poison_allocations():
        assert_right(inputs, "triton")


CASES: tuple[dict[str, Any], ...] = (
    {"d": 64, "dtype": torch.float16},
    {"d": 128, "dtype": torch.bfloat16, "n": 3},
    {"d": 129, "e": 7, "dtype": torch.bfloat16},
    {"d": 200, "e": 256, "n": 2},
    {"n": 16, "heads": 16, "key_heads": 2, "dtype": torch.bfloat16},  # two tiles of rows
    {"n": 4, "window": (70, 2)},
    {"n": 4, "window": (None, 3), "m": 3},
    {"n": 5, "window": (20, None), "dtype": torch.bfloat16},
    {"n": 3, "window": (1, 0), "softcap": 2.0, "sink": torch.tensor([0.5, -2.0, 3.0, 0.0]), "heads": 4},
    {"sink": torch.tensor([1.0, -1.0]), "size": 3.0, "dtype": torch.bfloat16},
    {"scale": -0.3, "softcap": 5.0, "n": 2},
    {"scale": 0.0},
    {"n": 7, "m": 5},
    {"float32_precision": "high"},
    {"float32_precision": "medium", "n": 4, "heads": 4, "key_heads": 2},
)


@pytest.mark.sample(3)
@pytest.mark.usefixtures("many_chunks")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_few_queries(case: dict[str, Any], device: torch.device) -> None:
    chosen = {"n": 1, "m": 190, "causal": "window" not in case, "return_lse": True, **case}
    inputs = random_inputs(device, **chosen)
    if "sink" in case:
        inputs["sink"] = case["sink"].to(device)
    with poison_allocations():
        assert_right(inputs, "triton")


@pytest.mark.usefixtures("many_chunks")
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lengths_of_entries(dtype: torch.dtype, n: int, device: torch.device) -> None:
    """As if each were alone with its keys, whatever lies behind these."""
    lengths = [LONG, 0, 1, 2, 64, 65, 131]
    inputs = random_inputs(device, n, LONG, batch=len(lengths), heads=6, key_heads=2, dtype=dtype, d=40)
    q, k, v = (x.detach() for x in inputs.values())
    k_filled, v_filled = k.clone(), v.clone()
    for entry, length in enumerate(lengths):
        k_filled[entry, length:] = torch.nan
        v_filled[entry, length:] = torch.nan
    options = {"causal": True, "return_lse": True, "backend": "triton"}
    used = torch.tensor(lengths, device=device)
    with poison_allocations():
        out, lse = flash_attention(q, k_filled, v_filled, seqused_k=used, **options)

    def alone(entry: int, keys: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
        its = (x[entry : entry + 1].to(dtype) for x in (q, k[:, :keys], v[:, :keys]))
        return reference.flash_attention(*its, causal=True, return_lse=True)

    for entry, length in enumerate(lengths):
        exact, eager = alone(entry, length, torch.float64), alone(entry, length, dtype)
        found = out[entry : entry + 1], lse[entry : entry + 1]
        if length == 1:  # a weight over the sum of weights: the definition has no error to allow twice
            rounding = 2 * torch.finfo(dtype).eps
            torch.testing.assert_close(found[0].double(), exact[0], rtol=rounding, atol=0.0)
            found, exact, eager = found[1:], exact[1:], eager[1:]
        verdict = compare(found, exact, eager)
        assert verdict.ok, f"{length} keys: {verdict.describe()}"
        if length > n:
            lost = tuple(x.to(y.dtype) for x, y in zip(alone(entry, length - 1, torch.float64), eager))
            assert not compare(lost, exact, eager).ok, f"a lost key of {length} would pass"


def paged(x: Tensor, table: Tensor, page_size: int, pages: int, lengths: list[int]) -> Tensor:
    """Keys or values (B, M, H, F) in pages, with NaN wherever no key is that an entry uses."""
    pool = x.new_full((pages, page_size, *x.shape[2:]), torch.nan)
    for entry, length in enumerate(lengths):
        for start in range(0, length, page_size):
            stop = min(start + page_size, length)
            pool[table[entry, start // page_size], : stop - start] = x[entry, start:stop]
    return pool


@pytest.mark.sample(3)
@pytest.mark.usefixtures("many_chunks")
@pytest.mark.parametrize("page_size", [16, 77, 128, 256])
@pytest.mark.parametrize("options", [{"n": 1}, {"n": 4, "window": (90, 0), "softcap": 3.0}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pages(dtype: torch.dtype, options: dict[str, Any], page_size: int, device: torch.device) -> None:
    """The bits of a dense cache as long as the table, with numbers behind the used pages that no page has."""
    lengths = [LONG, 0, 1, 150, 128]
    count = -(-LONG // page_size)
    rest = {"batch": len(lengths), "heads": 6, "key_heads": 2, "dtype": dtype, "d": 64, "causal": True}
    inputs = random_inputs(device, m=count * page_size, **rest, **options)
    q, k, v = (inputs.pop(name).detach() for name in "qkv")
    inputs |= {"seqused_k": torch.tensor(lengths, device=device, dtype=torch.int32), "return_lse": True}
    inputs |= {"backend": "triton"}
    pages = count * len(lengths) + 3
    order = torch.randperm(pages, generator=seeds.generator(3)).int().to(device)
    table = torch.full((len(lengths), count), 2**31 - 1, dtype=torch.int32, device=device)
    for entry, length in enumerate(lengths):
        some = -(-length // page_size)
        table[entry, :some] = order[entry * count : entry * count + some]
    pools = [paged(x, table, page_size, pages, lengths) for x in (k, v)]
    expected = flash_attention(q, k, v, **inputs)
    with poison_allocations():
        found = flash_attention(q, *pools, block_table=table, **inputs)
    assert all(map(torch.equal, found, expected))


@pytest.mark.usefixtures("many_chunks")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.seldom(3, 3)
def test_caches_with_any_strides(dtype: torch.dtype, device: torch.device) -> None:
    inputs = random_inputs(device, 2, LONG, batch=3, heads=6, key_heads=2, dtype=dtype, d=32)
    q, k, v = (x.detach() for x in inputs.values())
    used = torch.tensor([LONG, 5, 129], device=device)

    def found(*tensors: Tensor) -> tuple[Tensor, ...]:
        options = {"causal": True, "return_lse": True, "backend": "triton", "seqused_k": used}
        with poison_allocations():
            return flash_attention(*tensors, **options)

    expected = found(q, k, v)
    gaps = [torch.full((3, LONG + 3, 2, 70), torch.nan, dtype=dtype, device=device) for _ in "kv"]
    for gap, x in zip(gaps, (k, v)):
        gap[:, 3:, :, 1:65:2] = x
    heads_first = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (k, v)]
    features_apart = [gap[:, 3:, :, 1:65:2] for gap in gaps]
    odd_address = [torch.cat((x.new_zeros(1), x.flatten()))[1:].view(x.shape) for x in (k, v)]
    negated = [torch._neg_view(-x) for x in (k, v)]
    for same in (heads_first, features_apart, odd_address, negated, (heads_first[0], features_apart[1])):
        for a, b in zip(found(q, *same), expected):
            torch.testing.assert_close(a, b)
    expanded = [x[:1, :, :1].expand_as(x) for x in (k, v)]
    for a, b in zip(found(q, *expanded), found(q, *(x.contiguous() for x in expanded))):
        torch.testing.assert_close(a, b)


@pytest.mark.sample(2)
@pytest.mark.usefixtures("many_chunks")
@pytest.mark.parametrize("kind", ["dense", "lengths", "pages"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bits_do_not_depend_on_the_batch(
    dtype: torch.dtype, kind: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alone a loop is cut into chunks, in small batches programs take several, in large ones all of them."""
    from warploom.ops.flash_attention.triton import launch_decode as decode

    batch, m, key_heads = (128, 2048, 4) if ON_GPU else (16, 320, 1)
    heads, shape = 3 * key_heads, (batch, m, key_heads, 64)
    generator = seeds.generator(11)
    k, v = (torch.randn(shape, generator=generator).to(device, dtype) for _ in "kv")
    q = torch.randn((batch, 2, heads, 64), generator=generator).to(device, dtype)
    table = torch.arange(batch * m // 32, dtype=torch.int32, device=device).reshape(batch, -1).flip(1)
    lengths = torch.randint(0, m + 1, (batch,), generator=generator).to(device)
    cut: list[int] = []

    def chunks_of_program(call: Any, tiles: Any, chunks: int, loops: int) -> int:
        cut.append(chunks)
        return {batch: chunks, 1: 1}.get(call.shape.batch_size, 3)

    monkeypatch.setattr(decode, "chunks_of_program", chunks_of_program)

    def found(entries: slice) -> tuple[Tensor, ...]:
        options: dict[str, Any] = {"causal": True, "return_lse": True, "backend": "triton"}
        tensors = [q[entries], k[entries], v[entries]]
        if kind != "dense":
            options["seqused_k"] = lengths[entries]
        if kind == "pages":
            tensors[1:] = (x.reshape(-1, 32, key_heads, 64) for x in (k, v))
            options["block_table"] = table[entries]
        return flash_attention(*tensors, **options)

    whole = found(slice(None))
    for width in (1, 20 if ON_GPU else 6):
        for first in (0, batch // 2, batch - width):
            entries = slice(first, first + width)
            assert all(torch.equal(a, b[entries]) for a, b in zip(found(entries), whole))
    assert len({*cut}) == 1
    assert cut[0] > 6


@pytest.mark.parametrize("kind", ["dense", "lengths"])
def test_programs_take_as_many_chunks_as_leave_work_for_all(kind: str) -> None:
    """On 132 multiprocessors: 16 chunks of 512 keys for each of 8 heads, of one to 32 batch entries."""
    from warploom.ops.flash_attention.problem import Call, MaskSpec
    from warploom.ops.flash_attention.triton import launch_decode as decode

    one = torch.empty(1, 1, 1, 1, dtype=torch.bfloat16)
    found = {}
    for batch in (1, 8, 32):
        q, k = one.expand(batch, 1, 32, 128), one.expand(batch, 8192, 8, 128)
        lengths = torch.zeros(batch, dtype=torch.int32) if kind == "lengths" else None
        call = Call.of(q, k, k, MaskSpec(right=0, seqused_k=lengths), 1.0)
        tiles = decode.decode_tiles(90, call.dtype, 128, 128, 4)
        assert decode.chunks_of(call, tiles, 1) == 16
        found[batch] = decode.chunks_of_program(call, tiles, 16, batch * 8)
    assert found == {1: 1, 8: 8 if kind == "dense" else 1, 32: 16}


@pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
def test_a_graph_follows_lengths_and_pages(device: torch.device) -> None:
    """Lengths and pages are read on the device: a graph of a call serves every step of decoding."""
    forget_plans()
    q, k, v = random_inputs(device, 1, 4096, batch=4, heads=8, key_heads=2, d=128, dtype=torch.bfloat16).values()
    q, k, v = q.detach(), k.detach(), v.detach()
    used = torch.full((4,), 9, dtype=torch.int32, device=device)
    table = torch.arange(4 * 16, dtype=torch.int32, device=device).reshape(4, 16)
    pools = [x.reshape(-1, 256, 2, 128) for x in (k, v)]
    options: dict[str, Any] = {"causal": True, "return_lse": True, "seqused_k": used, "block_table": table}
    flash_attention(q, *pools, **options)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = flash_attention(q, *pools, **options)
    generator = seeds.generator(2)
    for _ in range(5):
        used.copy_(torch.randint(0, 4097, (4,), generator=generator))
        table.copy_(torch.randperm(64, generator=generator).reshape(4, 16))
        q.copy_(torch.randn(q.shape, generator=generator))
        graph.replay()
        assert all(map(torch.equal, found, flash_attention(q, *pools, **options)))


# ----------------------------------------------------------------------------------------------------------
# Narrow values that the loop itself stores in shared memory
# ----------------------------------------------------------------------------------------------------------

NARROW = """
import torch
from triton.backends.compiler import GPUTarget
from warploom import flash_attention
from warploom.runtime import launch
from warploom.testing.descriptors import disassemble, find_lost_addresses

def zeros(tokens, heads, features):
    return torch.zeros(1, tokens, heads, features, dtype=torch.float16)

for values in (16, 32):
    for tokens, group in ((16, 4), (40, 1)):
        with launch.record_builds(90, 132) as builds:
            q, k, v = zeros(tokens, group, 33), zeros(300, 1, 33), zeros(300, 1, values)
            flash_attention(q, k, v, backend="triton", seqused_k=torch.tensor([299], dtype=torch.int32))
        (build,) = (build for build in builds.values() if "combine" not in build.function.__name__)
        built = build.compile(GPUTarget("cuda", 90, 32))
        lost = find_lost_addresses(disassemble(built.asm["cubin"])) if "wgmma" in built.asm["ptx"] else []
        print(build.function.__name__, len(lost))
"""


@pytest.mark.seldom(4, 6)
def test_narrow_values_are_read_from_shared_memory(tmp_path: Path) -> None:
    """Compiled for Hopper: rows at odd places, of which the assembler loses the address in tiles of 64 queries."""
    printed = output_of(NARROW, tmp_path)
    expected = [f"{name}_kernel 0" for _ in range(2) for name in ("decode", "forward")]
    assert printed.splitlines() == expected


@pytest.mark.parametrize("e", [12, 16, 32])
@pytest.mark.parametrize("group", [3, 4])
def test_narrow_values_at_odd_places(e: int, group: int, device: torch.device) -> None:
    options: dict[str, Any] = {"batch": 2, "d": 33, "e": e, "causal": True, "dtype": torch.float16}
    inputs = random_inputs(device, 16, 90, heads=2 * group, key_heads=2, **options)
    inputs["v"] = torch.cat((inputs["v"].detach(),) * 3, 2)[:, :, 1:3].requires_grad_()
    with poison_allocations():
        assert_right(inputs, "triton")
