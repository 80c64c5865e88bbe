"""Tensor-product attention: its definition, its strategies, batches that do not matter, caches with rubbish behind.

`tests/test_conformance.py` compares backends with the reference; here the reference is on trial as well.
"""

import functools
import importlib
import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from planned_calls import forget_plans

from warploom import ArgumentError, tpa_attention, tpa_decode
from warploom.ops.tpa import reference
from warploom.runtime.backend import HAS_TRITON
from warploom.testing.accuracy import compare, compare_each, mean_of, worst_of

Tensor = torch.Tensor
STRATEGIES = ("batch", "batch_head", "split_kv", "auto")
BACKENDS = ("torch", "triton") if HAS_TRITON else ("torch",)

backends = pytest.mark.parametrize("backend", BACKENDS)
strategies = pytest.mark.parametrize("strategy", STRATEGIES)
needs_triton = pytest.mark.skipif(not HAS_TRITON, reason="needs Triton")


def factors(
    device: torch.device,
    *,
    batch: int = 2,
    tokens: int = 1,
    keys: int = 20,
    heads: int = 3,
    rank_q: int = 3,
    rank_k: int = 1,
    rank_v: int = 1,
    features: int = 8,
    values: int = 8,
    dtype: torch.dtype = torch.float32,
) -> dict[str, Tensor]:
    shapes = {
        "aq": (batch, tokens, heads, rank_q),
        "ak": (batch, keys, heads, rank_k),
        "av": (batch, keys, heads, rank_v),
        "bq": (batch, tokens, rank_q, features),
        "bk": (batch, keys, rank_k, features),
        "bv": (batch, keys, rank_v, values),
    }
    return {name: torch.randn(shape).to(device, dtype) for name, shape in shapes.items()}


def exact(inputs: dict[str, Any]) -> dict[str, Any]:
    return {
        name: value.double() if isinstance(value, Tensor) and value.is_floating_point() else value
        for name, value in inputs.items()
    }


def assert_accurate(found: Tensor, inputs: dict[str, Any], definition: Any = reference.tpa_decode) -> None:
    accuracy = compare(found, definition(**exact(inputs)), definition(**inputs))
    assert accuracy.ok, accuracy.describe()


def lengths(device: torch.device, *values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


# ----------------------------------------------------------------------------------------------------------
# The definition
# ----------------------------------------------------------------------------------------------------------


def test_the_reference_is_softmax_attention_written_with_loops(device: torch.device) -> None:
    x = factors(device, tokens=4, keys=6, rank_k=2, rank_v=3, dtype=torch.float64)
    found = reference.tpa_attention(**x, causal=True, scale=0.7, scale_k=0.9)
    for b, i, h in itertools.product(range(2), range(4), range(3)):
        q = sum(x["aq"][b, i, h, r] * x["bq"][b, i, r] for r in range(3)) / 3
        weights, values = [], []
        for j in range(6 - 4 + i + 1):
            k = sum(x["ak"][b, j, h, r] * x["bk"][b, j, r] for r in range(2)) * 0.9
            weights.append(math.exp(0.7 * float(q @ k)))
            values.append(sum(x["av"][b, j, h, r] * x["bv"][b, j, r] for r in range(3)) / 3)
        expected = sum(w * v for w, v in zip(weights, values)) / sum(weights)
        torch.testing.assert_close(found[b, i, h], expected)


def attended_unformed(x: dict[str, Any], first: Tensor, last: Tensor) -> Tensor:
    """Attention on the factors as they are, to keys ``first`` to ``last`` - 1: no key or value is formed."""
    q = reference.queries(x["aq"], x["bq"], None) / (x["bq"].shape[-1] ** 0.5 * x["ak"].shape[-1])
    scores = torch.einsum("bnhd,bmrd,bmhr->bhnm", q, x["bk"], x["ak"])
    weights, _ = reference.softmax(scores, first[:, None], last[:, None])
    return torch.einsum("bhnm,bmhr,bmre->bnhe", weights, x["av"], x["bv"]) / x["av"].shape[-1]


@pytest.mark.parametrize("seqused_k", [None, (0, 13)])
def test_decoding_is_attention_on_unformed_factors(device: torch.device, seqused_k: tuple[int, int] | None) -> None:
    x: dict[str, Any] = factors(device, tokens=3, rank_k=2, rank_v=3, dtype=torch.float64)
    x["seqused_k"] = seqused_k and lengths(device, *seqused_k)
    visible = reference.visible_in_decode(x["bq"], x["bk"], x["seqused_k"])
    torch.testing.assert_close(attended_unformed(x, *visible), reference.tpa_decode(**x))


def test_attention_is_that_on_unformed_factors(device: torch.device) -> None:
    x: dict[str, Any] = factors(device, batch=1, tokens=9, keys=9, rank_k=2, rank_v=3, dtype=torch.float64)
    for causal, cu_seqlens in ((False, None), (True, lengths(device, 0, 4, 9))):
        visible = reference.visible_in_attention(x["bq"], x["bk"], causal, cu_seqlens)
        expected = reference.tpa_attention(**x, causal=causal, cu_seqlens=cu_seqlens)
        torch.testing.assert_close(attended_unformed(x, *visible), expected)


def test_blocks_of_queries_change_nothing(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    x = factors(device, tokens=9, keys=9, rank_k=2, dtype=torch.float64)
    wanted = [value.requires_grad_() for value in x.values()]
    whole = reference.tpa_attention(**x, causal=True)
    grad = torch.randn_like(whole)
    expected = torch.autograd.grad(whole, wanted, grad)
    monkeypatch.setattr(reference, "BLOCK_SCORES", 2 * 3 * 9 * 2)  # two queries at a time
    blocked = reference.tpa_attention(**x, causal=True)
    torch.testing.assert_close(blocked, whole)
    torch.testing.assert_close(torch.autograd.grad(blocked, wanted, grad), expected)


@backends
def test_the_last_tokens_of_attention_are_decoding(device: torch.device, backend: str) -> None:
    x = factors(device, tokens=11, keys=11, rank_k=2, dtype=torch.float32)
    whole = tpa_attention(**x, causal=True, backend=backend)
    new = {name: value[:, 8:] if name in ("aq", "bq") else value for name, value in x.items()}
    torch.testing.assert_close(tpa_decode(**new, backend=backend), whole[:, 8:], rtol=1e-5, atol=1e-5)


@backends
def test_whole_queries_are_the_product_of_their_factors(device: torch.device, backend: str) -> None:
    x = factors(device)
    whole = x | {"aq": None, "bq": x["aq"] @ x["bq"] / 3}
    found = tpa_decode(**whole, backend=backend)
    torch.testing.assert_close(found, tpa_decode(**x, backend=backend), rtol=1e-5, atol=1e-5)


# ----------------------------------------------------------------------------------------------------------
# Decoding: every strategy, batches that do not matter, rubbish behind the valid entries
# ----------------------------------------------------------------------------------------------------------


@needs_triton
@strategies
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("rank_k", "rank_v"), [(1, 1), (2, 3), (4, 1)])
def test_every_strategy_is_accurate(
    device: torch.device, strategy: str, dtype: torch.dtype, rank_k: int, rank_v: int
) -> None:
    inputs: dict[str, Any] = factors(device, tokens=2, keys=290, rank_k=rank_k, rank_v=rank_v, dtype=dtype)
    inputs["seqused_k"] = lengths(device, 290, 257)
    assert_accurate(tpa_decode(**inputs, strategy=strategy, backend="triton"), inputs)


@needs_triton
@pytest.mark.parametrize("rank", [1, 2, 4])
@pytest.mark.parametrize(("features", "values"), [(96, 64), (64, 64), (16, 16)])
def test_a_single_key_is_the_output(device: torch.device, features: int, values: int, rank: int) -> None:
    """Its weight is one to the bit, however large its logit is: numerator and denominator hold the same number."""
    sizes = {"batch": 8, "keys": 31, "heads": 12, "rank_k": rank, "rank_v": rank, "features": features}
    inputs = factors(device, values=values, **sizes)
    inputs["bk"] *= 20
    found = tpa_decode(**inputs, scale=1.0, seqused_k=lengths(device, *[1] * 8), backend="triton")
    first = (inputs[name][:, :1].double() for name in ("av", "bv"))
    expected = torch.einsum("bmhr,bmre->bmhe", *first) / rank
    assert (found - expected).abs().max() <= 2**-22 * expected.abs().max()


@needs_triton
@pytest.mark.parametrize(("features", "values", "rank"), [(64, 64, 1), (96, 64, 2), (128, 128, 2), (256, 16, 1)])
def test_large_logits_have_the_accuracy_of_float32(
    device: torch.device, features: int, values: int, rank: int
) -> None:
    """A weight's relative error is the absolute one of its logit, and two keys have nearly all of the weight.

    Of the errors of all requests together: the largest of them is one row's, and luck.
    """
    sizes = {"keys": 31, "heads": 12, "rank_k": rank, "rank_v": rank, "features": features, "values": values}
    inputs = factors(device, batch=512 if device.type == "cuda" else 16, **sizes)
    scales = {"scale": 1.0, "scale_q": 1.0, "scale_k": 1.0}
    found = tpa_decode(**inputs, **scales, backend="triton")
    eager, expected = (reference.tpa_decode(**x, **scales) for x in (inputs, exact(inputs)))
    error, usual = ((x - expected).square().mean().sqrt() for x in (found, eager))
    assert error <= 2 * usual + 2**-24 * expected.square().mean().sqrt()


@needs_triton
def test_sums_over_many_blocks_are_made_in_parts(device: torch.device) -> None:
    """Blocks of high rank hold few keys. Added up one after another, their sum would be rounded as often."""
    keys = 129
    sizes = {"keys": keys, "heads": 7, "rank_k": 16, "rank_v": 2, "features": 192, "values": 192}
    inputs = factors(device, batch=1, **sizes)
    found = tpa_decode(**inputs, scale_q=0.0, scale_v=1.0, backend="triton")  # equal weights
    values = inputs["av"].double() @ inputs["bv"].double()
    expected = values.mean(1)[:, None]
    chain = torch.zeros_like(found[:, 0])
    for value in values.float().unbind(1):
        chain += value
    error, of_chain = ((x - expected).square().mean().sqrt() for x in (found, (chain / keys)[:, None]))
    assert error <= 0.75 * of_chain


@needs_triton
@pytest.mark.parametrize("keys", [1, 127, 128, 129, 600])
def test_split_and_whole_have_the_same_bits(device: torch.device, keys: int) -> None:
    inputs = factors(device, keys=keys, heads=2, rank_k=2, dtype=torch.bfloat16)
    whole, split, auto = (
        tpa_decode(**inputs, strategy=strategy, backend="triton") for strategy in ("batch", "split_kv", "auto")
    )
    assert torch.equal(whole, split)
    assert torch.equal(whole, auto)


@needs_triton
@strategies
def test_a_request_has_the_same_bits_in_any_batch_and_cache(device: torch.device, strategy: str) -> None:
    inputs = factors(device, batch=3, keys=600, heads=2)
    valid = (300, 17, 600)
    together = tpa_decode(**inputs, seqused_k=lengths(device, *valid), strategy=strategy, backend="triton")
    for i, length in enumerate(valid):
        alone = {name: value[i : i + 1] for name, value in inputs.items()}
        for capacity in {length, min(length + 40, 600)}:  # a cache that ends with the request, or not
            cut = {n: v[:, :capacity] if n in ("ak", "av", "bk", "bv") else v for n, v in alone.items()}
            found = tpa_decode(**cut, seqused_k=lengths(device, length), strategy=strategy, backend="triton")
            assert torch.equal(found[0], together[i])


@needs_triton
@pytest.mark.parametrize("module", ["engine", "hopper.launch"])
def test_chunks_depend_on_the_valid_keys_alone(module: str) -> None:
    chunks = importlib.import_module(f"warploom.ops.tpa.decode.{module}").CHUNKS

    def chunk(length: int) -> int:
        size: int = chunks.shortest
        while size * chunks.wanted < length and size < chunks.longest:
            size *= 2
        return size

    for levels in range(chunks.all_levels):
        most = 1
        for keys in range(0, 700_000, 997):
            most = max(most, -(-keys // (chunk(keys) * chunks.widths[levels])))
            assert most <= chunks.splits(keys, levels)
    assert chunks.splits(10**6, chunks.all_levels) == 1
    assert chunks.splits(128, 0) == 1
    assert chunks.splits(129, 0) == 2
    assert chunks.splits(chunks.widths[1] * 128, 1) == 1


@needs_triton
@pytest.mark.parametrize("keys", [600, 1100])
def test_a_program_may_take_any_part_of_the_tree(
    device: torch.device, keys: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from warploom.ops.tpa.decode import chunks as launchers_chunks
    from warploom.ops.tpa.decode import engine as launchers

    inputs: dict[str, Any] = factors(device, keys=keys, heads=2, rank_k=2, dtype=torch.bfloat16)
    inputs["seqused_k"] = lengths(device, keys, keys // 3)
    found = []
    for levels in range(launchers.CHUNKS.all_levels + 1):
        forget_plans()  # none with other levels
        monkeypatch.setattr(launchers_chunks.ChunkTree, "levels", lambda *arguments, levels=levels: levels)
        found.append(tpa_decode(**inputs, backend="triton"))
    assert_accurate(found[0], inputs)
    assert all(torch.equal(found[0], other) for other in found[1:])


@backends
@strategies
def test_nothing_behind_the_valid_entries_is_looked_at(device: torch.device, backend: str, strategy: str) -> None:
    inputs: dict[str, Any] = factors(device, batch=3, tokens=2, keys=290, heads=2, rank_k=2, rank_v=1)
    inputs["seqused_k"] = lengths(device, 5, 0, 270)
    expected = tpa_decode(**inputs, strategy=strategy, backend=backend)
    assert torch.equal(expected[1], torch.zeros_like(expected[1]))
    for name in ("ak", "av", "bk", "bv"):
        for i, length in enumerate((5, 0, 270)):
            inputs[name][i, length:] = math.nan
    assert torch.equal(tpa_decode(**inputs, strategy=strategy, backend=backend), expected)


@needs_triton
def test_new_tokens_do_not_see_those_behind_them(device: torch.device) -> None:
    inputs: dict[str, Any] = factors(device, tokens=5, keys=30)
    inputs["seqused_k"] = lengths(device, 20, 3)  # in the second, two of the five have no token of their own
    found = tpa_decode(**inputs, backend="triton")
    assert_accurate(found, inputs)
    assert torch.equal(found[1, :2], torch.zeros_like(found[1, :2]))
    for name in ("ak", "av", "bk", "bv"):
        inputs[name][:, 18:20] = 7.0  # the last two new tokens of the first entry
    assert torch.equal(tpa_decode(**inputs, backend="triton")[0, :3], found[0, :3])


@needs_triton
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_lengths_of_both_integer_types_and_any_stride(device: torch.device, dtype: torch.dtype) -> None:
    inputs: dict[str, Any] = factors(device)
    spaced = torch.tensor([7, 99, 20, 99], dtype=dtype, device=device)[::2]
    found = tpa_decode(**inputs, seqused_k=spaced, backend="triton")
    assert torch.equal(found, tpa_decode(**inputs, seqused_k=lengths(device, 7, 20), backend="triton"))


@needs_triton
@pytest.mark.usefixtures("unchecked_values")
def test_more_than_the_capacity_counts_as_the_capacity(device: torch.device) -> None:
    inputs = factors(device)
    found = tpa_decode(**inputs, seqused_k=lengths(device, 1000, -3), backend="triton")
    assert torch.equal(found[0], tpa_decode(**inputs, backend="triton")[0])
    assert torch.equal(found[1], torch.zeros_like(found[1]))


@pytest.mark.usefixtures("unchecked_values")
@pytest.mark.parametrize("backend", ["torch", pytest.param("triton", marks=needs_triton)])
@pytest.mark.parametrize("strategy", ["batch", "split_kv"])
def test_lengths_beyond_the_cache_leave_new_tokens_at_its_end(
    strategy: str, backend: str, device: torch.device
) -> None:
    """Several new tokens stand behind each other wherever the cache ends, and not where a length says."""
    inputs = factors(device, tokens=4, keys=20)
    options = {"strategy": strategy, "backend": backend}
    found = tpa_decode(**inputs, seqused_k=lengths(device, 23, 2**31 - 1), **options)
    expected = tpa_decode(**inputs, seqused_k=lengths(device, 20, 20), **options)
    assert torch.equal(found, expected)
    assert_accurate(found, inputs)


def one_after_another(a: Tensor, b: Tensor) -> Tensor:
    """``a · b`` in float32 with its terms added up in their order, as a GPU's threads do."""
    a, b = a.float(), b.float()
    terms = (a[..., i : i + 1] * b[..., i : i + 1, :] for i in range(b.shape[-2]))
    return functools.reduce(torch.add, terms, a.new_zeros(*a.shape[:-1], b.shape[-1]))


def test_auto_splits_where_there_are_few_programs() -> None:
    if not HAS_TRITON:
        pytest.skip("needs Triton")
    from warploom.ops.tpa.decode import engine as launchers

    def levels(strategy: str, batch: int, keys: int) -> int:
        def microseconds(splits: int) -> float:
            return launchers._microseconds(batch, splits, keys * 640, torch.device("cpu"))

        return launchers.CHUNKS.levels(strategy, keys, microseconds)

    assert levels("auto", 1, 128) == 0  # one multiprocessor
    assert levels("batch", 1, 32768) == launchers.CHUNKS.all_levels
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launchers, "multiprocessors", lambda device: 132)
        assert levels("auto", 128, 256) == 1  # all of two chunks
        assert levels("auto", 1, 32768) == 0
        assert levels("auto", 8, 32768) == 0
        assert levels("auto", 32, 32768) == 1
        assert levels("split_kv", 8, 256) == 0


def test_decoding_has_no_gradient_and_says_so(device: torch.device) -> None:
    inputs = factors(device)
    inputs["bk"].requires_grad_()
    with pytest.raises(ArgumentError, match=r"tpa_decode: bk .*tpa_attention"):
        tpa_decode(**inputs)
    with torch.no_grad():
        assert not tpa_decode(**inputs).requires_grad


# ----------------------------------------------------------------------------------------------------------
# Attention
# ----------------------------------------------------------------------------------------------------------


@backends
@pytest.mark.parametrize("causal", [True, False])
def test_packed_sequences_are_as_if_alone(device: torch.device, backend: str, causal: bool) -> None:
    inputs = factors(device, batch=1, tokens=40, keys=40, rank_k=2)
    bounds = (0, 3, 3, 36, 40)
    packed = tpa_attention(**inputs, causal=causal, cu_seqlens=lengths(device, *bounds), backend=backend)
    for start, end in itertools.pairwise(bounds):
        alone = {name: value[:, start:end] for name, value in inputs.items()}
        expected = tpa_attention(**alone, causal=causal, backend=backend)
        torch.testing.assert_close(packed[:, start:end], expected, rtol=1e-5, atol=1e-5)


Place = Callable[[Tensor], Tensor]


def unaligned(x: Tensor) -> Tensor:
    """The same numbers, which begin one element behind a multiple of 16 bytes."""
    memory = torch.empty(x.numel() + 1, dtype=x.dtype, device=x.device)
    return memory[1:].view(x.shape).copy_(x)


@pytest.mark.sample(4)
@needs_triton
@pytest.mark.parametrize(
    ("features", "values", "place"),
    [
        *((128, 5, torch.clone), (128, 17, torch.clone), (64, 3, torch.clone), (20, 64, torch.clone)),
        *((128, 4, torch.clone), (32, 1, unaligned), (64, 8, unaligned)),
    ],
)
@pytest.mark.parametrize("rank", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_narrow_keys_or_values(
    device: torch.device, dtype: torch.dtype, rank: int, features: int, values: int, place: Place
) -> None:
    """Rows less than 4 bytes apart, or anywhere, cannot be copied ahead: kernels store their tiles themselves."""
    tokens = 70 if device.type == "cuda" else 33
    sizes = {
        "tokens": tokens,
        "keys": tokens,
        "rank_k": rank,
        "rank_v": rank,
        "features": features,
        "values": values,
    }

    def run(inputs: dict[str, Any], function: Any, grad: Tensor) -> tuple[Tensor, ...]:
        out = function(**inputs)
        return out.detach(), *torch.autograd.grad(out, list(inputs.values()), grad)

    definition, verdicts = functools.partial(reference.tpa_attention, causal=True), []
    for _ in range(3):  # the largest error of a few hundred numbers is one draw's luck
        inputs = {name: place(x).requires_grad_() for name, x in factors(device, dtype=dtype, **sizes).items()}
        grad = torch.randn(2, tokens, 3, values).to(device, dtype)
        wide = {name: x.detach().double().requires_grad_() for name, x in inputs.items()}
        found = run(inputs, functools.partial(tpa_attention, causal=True, backend="triton"), grad)
        expected, eager = run(wide, definition, grad.double()), run(inputs, definition, grad)
        verdicts.append(compare_each(found, expected, eager))
    accuracy = worst_of([mean_of(of_one) for of_one in zip(*verdicts, strict=True)])
    assert accuracy.ok, accuracy.describe()


@pytest.mark.sample(2)
@needs_triton
@pytest.mark.parametrize("rank", [1, 3])
@pytest.mark.parametrize("features", [16, 64])
def test_weights_that_cannot_change_have_no_gradient(device: torch.device, features: int, rank: int) -> None:
    """Sequences of one token: every weight is one, whatever the logits. In float32 only roundings are left."""
    sizes = {"tokens": 37, "keys": 37, "rank_k": rank, "rank_v": rank, "features": features, "values": features}
    inputs = {name: x.requires_grad_() for name, x in factors(device, batch=1, **sizes).items()}
    out = tpa_attention(**inputs, cu_seqlens=torch.arange(38, device=device, dtype=torch.int32), backend="triton")
    gradients = torch.autograd.grad(out, [inputs["aq"], inputs["bq"]], torch.randn_like(out))
    roundoff = torch.finfo(torch.float32).eps * features
    assert all(x.abs().max() <= 8 * roundoff for x in gradients)


@pytest.mark.seldom(4, 4)
@pytest.mark.sample(2)
@needs_triton
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("heads", "rank_q", "rank_k", "rank_v", "features", "values"), [(19, 20, 17, 5, 8, 24), (1, 1, 70, 1, 200, 3)]
)
def test_attention_of_many_heads_and_ranks(
    device: torch.device, heads: int, rank_q: int, rank_k: int, rank_v: int, features: int, values: int,
    dtype: torch.dtype,
) -> None:  # fmt: skip
    """More heads and ranks than a step takes, and float32 rows of more than 128 features."""
    ranks = {"rank_q": rank_q, "rank_k": rank_k, "rank_v": rank_v}
    verdicts = []
    for _ in range(5):  # a gradient has a few hundred elements, and one draw of them sets a budget by luck
        sizes = {"tokens": 20, "keys": 20, "heads": heads, "features": features, "values": values}
        inputs = factors(device, batch=1, **sizes, **ranks, dtype=dtype)
        wanted = [value.requires_grad_() for value in inputs.values()]
        double = {name: value.detach().double().requires_grad_() for name, value in inputs.items()}
        options = {"causal": bool(rank_k % 2)}
        out = tpa_attention(**inputs, **options, backend="triton")
        grad = torch.randn_like(out)
        found = torch.autograd.grad(out, wanted, grad)
        eager = torch.autograd.grad(reference.tpa_attention(**inputs, **options), wanted, grad)
        definition = reference.tpa_attention(**double, **options)
        expected = torch.autograd.grad(definition, list(double.values()), grad.double())
        verdicts.append(compare_each(found, expected, eager))
    accuracy = worst_of([mean_of(of_one) for of_one in zip(*verdicts, strict=True)])
    assert accuracy.ok, accuracy.describe()


@needs_triton
@pytest.mark.parametrize("values", [17, 127, 256])
def test_gradients_of_head_factors_are_short_sums(
    device: torch.device, values: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over features: 127 added up one after another are off by 3.4 units, and in parts of 16 by 1.5.

    Weights are equal, and two queries see all keys or all but one: little else is rounded.
    """
    monkeypatch.setattr("kernel_interpreter.language.in_float32", one_after_another)
    inputs = factors(device, tokens=2, keys=9, heads=5, rank_v=16, features=3, values=values)
    av, bv = inputs["av"].requires_grad_(), inputs["bv"].double()
    out = tpa_attention(**inputs, causal=True, scale=0.0, backend="triton")
    grad = torch.randn_like(out)
    (found,) = torch.autograd.grad(out, av, grad)
    first, second = grad.double().unbind(1)  # (B, H, E)
    of_values = (first / 8 + second / 9)[:, None].repeat(1, 9, 1, 1)
    of_values[:, 8] = second / 9  # which the first does not see
    expected = of_values @ bv.mT / 16
    error, size = (x.square().mean().sqrt() for x in (found - expected, expected))
    assert error <= 3 * 2**-24 * size


@needs_triton
def test_only_the_gradients_that_are_wanted_come_back(device: torch.device) -> None:
    inputs = factors(device, tokens=5, keys=5)
    inputs["av"].requires_grad_()
    tpa_attention(**inputs, backend="triton").sum().backward()
    assert inputs["av"].grad is not None
    assert all(value.grad is None for name, value in inputs.items() if name != "av")


@needs_triton
def test_a_second_derivative_is_refused(device: torch.device) -> None:
    inputs = factors(device, tokens=4, keys=4)
    bk = inputs["bk"].requires_grad_()
    out = tpa_attention(**inputs, backend="triton")
    (first,) = torch.autograd.grad(out.square().sum(), bk, create_graph=True)
    with pytest.raises(NotImplementedError, match="second derivative"):
        first.sum().backward()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_backward_takes_the_mean_gradient_of_scores_from_the_rounded_output(
    dtype: torch.dtype, device: torch.device
) -> None:
    scores = torch.randn(2, 3, 5, dtype=torch.float64, device=device, requires_grad=True)
    values, grad = (torch.randn(2, n, 4, dtype=torch.float64, device=device) for n in (5, 3))
    weights = torch.softmax(scores, -1)
    out = weights @ values
    found = reference.with_rounded_mean(out, torch.logsumexp(scores, -1, keepdim=True), dtype)
    assert torch.equal(found, out)
    mean = (grad * out.to(dtype).double()).sum(-1, keepdim=True)
    expected = weights * (grad @ values.mT - mean)
    torch.testing.assert_close(torch.autograd.grad(found, scores, grad)[0], expected)
