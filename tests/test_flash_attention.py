"""What flash attention computes: the definition itself, masks, packing, grouping, splits, layouts, launches."""

import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from launches import MERGING

from warploom import flash_attention
from warploom.backend import HAS_TRITON
from warploom.ops.flash_attention import reference
from warploom.ops.flash_attention.peers import plain
from warploom.ops.flash_attention.spec import OPERATOR
from warploom.plans import Plans
from warploom.testing.accuracy import compare
from warploom.testing.conformance import gradients, judge_draws, leaves, make_draws, random_like, upcast
from warploom.testing.poison import poisoned_allocations

Tensor = torch.Tensor
Inputs = dict[str, Any]

BACKENDS = ("torch", "triton") if HAS_TRITON else ("torch",)
backends = pytest.mark.parametrize("backend", BACKENDS)
kernels = pytest.mark.skipif(not HAS_TRITON, reason="needs Triton")


def random_inputs(
    device: torch.device,
    n: int = 21,
    m: int | None = None,
    *,
    batch: int = 2,
    heads: int = 2,
    key_heads: int | None = None,
    d: int = 16,
    e: int | None = None,
    dtype: torch.dtype = torch.float32,
    size: float = 1.0,
    **options: Any,
) -> Inputs:
    keys, key_heads = n if m is None else m, heads if key_heads is None else key_heads
    shapes = {"q": (batch, n, heads, d), "k": (batch, keys, key_heads, d), "v": (batch, keys, key_heads, e or d)}
    generator = torch.Generator().manual_seed(5)
    made = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    for name in ("q", "k"):
        made[name] *= size
    return {name: t.to(device, dtype).requires_grad_() for name, t in made.items()} | options


def assert_right(inputs: Inputs | list[Inputs], backend: str) -> None:
    """``inputs``: one draw of them, or several that are judged together."""
    judgement = judge_draws(OPERATOR, inputs if isinstance(inputs, list) else [inputs], backend)
    assert judgement.fwd.ok, f"fwd: {judgement.fwd.describe()}"
    assert judgement.bwd is None or judgement.bwd.ok, f"bwd: {judgement.bwd.describe()}"
    assert not judgement.modified


def run(inputs: Inputs, backend: str) -> tuple[Tensor, ...]:
    """Output, lse, and gradients of q, k, v, where both outputs have random gradients."""
    outputs = flash_attention(**{**inputs, "return_lse": True}, backend=backend)
    found = gradients(outputs, inputs, random_like(outputs))
    return *(t.detach() for t in outputs), *found.values()


# ----------------------------------------------------------------------------------------------------------
# The definition, once more, one query and one key at a time
# ----------------------------------------------------------------------------------------------------------


def attend_slowly(q: Tensor, k: Tensor, v: Tensor, causal: bool, window: tuple[int | None, int | None]) -> Any:
    (batch, tokens, heads, _), keys = q.shape, k.shape[1]
    out, lse = q.new_zeros(batch, tokens, heads, v.shape[3]), q.new_full((batch, heads, tokens), -torch.inf)
    left, right = window
    for b, i, h in itertools.product(range(batch), range(tokens), range(heads)):
        place, g = i + keys - tokens, h * k.shape[2] // heads
        seen = [
            j
            for j in range(keys)
            if not (causal and j > place)
            and (left is None or j >= place - left)
            and (right is None or j <= place + right)
        ]
        if seen:
            logits = k[b, seen, g] @ q[b, i, h] * q.shape[3] ** -0.5
            lse[b, h, i] = logits.logsumexp(0)
            out[b, i, h] = logits.softmax(0) @ v[b, seen, g]
    return out, lse


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [(None, None), (2, None), (None, 1), (1, 3), (0, 0)])
@pytest.mark.parametrize(("n", "m"), [(5, 5), (3, 7), (7, 3)])
def test_the_definition(n: int, m: int, window: tuple[int | None, int | None], causal: bool) -> None:
    inputs = random_inputs(torch.device("cpu"), n, m, heads=4, key_heads=2, d=3, e=2, dtype=torch.float64)
    expected = attend_slowly(inputs["q"], inputs["k"], inputs["v"], causal, window)
    found = reference.flash_attention(**inputs, causal=causal, window=window, return_lse=True)
    torch.testing.assert_close(found, expected)
    wanted = gradients(expected, inputs, random_like(expected))
    torch.testing.assert_close(gradients(found, inputs, random_like(found)), wanted)


def test_the_definition_in_blocks_of_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = random_inputs(torch.device("cpu"), 19, 11, dtype=torch.float64, causal=True, return_lse=True)
    whole = reference.flash_attention(**inputs)
    monkeypatch.setattr(reference, "BLOCK_WEIGHTS", 200)
    blocks = reference.flash_attention(**inputs)
    torch.testing.assert_close(blocks, whole)
    grads = random_like(whole)
    torch.testing.assert_close(gradients(blocks, inputs, grads), gradients(whole, inputs, grads))


# ----------------------------------------------------------------------------------------------------------
# Right results
# ----------------------------------------------------------------------------------------------------------


@backends
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("d", "e"), [(1, 1), (5, 80), (80, 5), (129, 16), (16, 256), (256, 129)])
def test_any_number_of_features(d: int, e: int, causal: bool, backend: str, device: torch.device) -> None:
    options = {"causal": causal, "return_lse": True}
    assert_right(random_inputs(device, 40, batch=1, d=d, e=e, dtype=torch.bfloat16, **options), backend)


@backends
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("n", "m"), [(70, 133), (133, 70), (1, 130), (130, 9), (64, 64)])
def test_lengths_of_queries_and_keys(
    n: int, m: int, dtype: torch.dtype, backend: str, device: torch.device
) -> None:
    options = {"causal": True, "return_lse": True}
    assert_right(random_inputs(device, n, m, batch=1, heads=2, dtype=dtype, **options), backend)


@backends
@pytest.mark.parametrize("window", [(0, 0), (40, 3), (3, 40), (None, 30), (30, None), (1000, 1000)])
@pytest.mark.parametrize("causal", [False, True])
def test_windows(window: Any, causal: bool, backend: str, device: torch.device) -> None:
    options = {"window": window, "causal": causal, "return_lse": True, "dtype": torch.bfloat16}
    assert_right(random_inputs(device, 150, 170, batch=1, heads=1, **options), backend)


@backends
@pytest.mark.parametrize("key_heads", [1, 2, 3, 6])
def test_a_group_of_queries_shares_a_head_of_keys(key_heads: int, backend: str, device: torch.device) -> None:
    inputs = random_inputs(device, 33, heads=6, key_heads=key_heads, causal=True, dtype=torch.bfloat16)
    assert_right(inputs, backend)
    repeated = {
        name: t if name == "q" else t.detach().repeat_interleave(6 // key_heads, dim=2)
        for name, t in inputs.items()
        if isinstance(t, Tensor)
    }
    torch.testing.assert_close(
        flash_attention(**inputs, backend=backend), flash_attention(**repeated, causal=True, backend=backend)
    )


@backends
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_packed_sequences_are_each_its_own(
    dtype: torch.dtype, causal: bool, backend: str, device: torch.device
) -> None:
    bounds_q, bounds_k = [0, 0, 33, 34, 34, 100, 140], [0, 7, 40, 60, 64, 100, 100]
    inputs = random_inputs(device, 140, 100, batch=1, heads=4, key_heads=2, causal=causal, dtype=torch.bfloat16)
    packed = {
        "cu_seqlens_q": torch.tensor(bounds_q, dtype=dtype, device=device),
        "cu_seqlens_k": torch.tensor(bounds_k, dtype=dtype, device=device),
    }
    assert_right({**inputs, **packed, "return_lse": True}, backend)
    with poisoned_allocations():
        out, lse = flash_attention(**inputs, **packed, return_lse=True, backend=backend)
    for (q0, q1), (k0, k1) in zip(itertools.pairwise(bounds_q), itertools.pairwise(bounds_k)):
        part = {"q": inputs["q"][:, q0:q1], "k": inputs["k"][:, k0:k1], "v": inputs["v"][:, k0:k1]}
        one, one_lse = flash_attention(**part, causal=causal, return_lse=True, backend=backend)
        torch.testing.assert_close(out[:, q0:q1], one)
        torch.testing.assert_close(lse[..., q0:q1], one_lse)


@backends
def test_one_packing_stands_for_both(backend: str, device: torch.device) -> None:
    inputs = random_inputs(device, 30, batch=1, causal=True)
    bounds = torch.tensor([0, 11, 30], device=device)
    strided = torch.stack((bounds, bounds + 1000), dim=1)[:, 0]
    both = flash_attention(**inputs, cu_seqlens_q=bounds, cu_seqlens_k=bounds, backend=backend)
    assert torch.equal(flash_attention(**inputs, cu_seqlens_q=strided, backend=backend), both)
    assert torch.equal(flash_attention(**inputs, cu_seqlens_k=bounds, backend=backend), both)


@backends
@pytest.mark.parametrize(
    "empty",
    [
        {"m": 9, "causal": True},
        {"m": 9, "window": (3, 2)},
        {"m": 0},
        {"batch": 1, "m": 9, "cu_seqlens_q": [0, 10, 21, 30], "cu_seqlens_k": [0, 0, 9, 9]},
    ],
    ids=["causal", "window", "no_keys", "packed"],
)  # fmt: skip
def test_rows_without_keys(empty: dict[str, Any], backend: str, device: torch.device) -> None:
    packed = {name: torch.tensor(empty[name], device=device) for name in empty if name.startswith("cu_")}
    inputs = random_inputs(device, 30, **{**empty, **packed})
    with poisoned_allocations():
        out, lse, dq, dk, dv = run(inputs, backend)
    none = lse == -torch.inf
    assert none.any()
    assert (out.transpose(1, 2)[none] == 0).all()
    assert (dq.transpose(1, 2)[none] == 0).all()
    assert lse[~none].isfinite().all()
    assert all(t.isfinite().all() for t in (out, dq, dk, dv))
    expected, _ = reference.flash_attention(**inputs, return_lse=True)
    torch.testing.assert_close(out, expected.detach())


@backends
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_large_logits(dtype: torch.dtype, backend: str, device: torch.device) -> None:
    inputs = random_inputs(device, 70, batch=1, dtype=dtype, size=10.0, causal=True)  # 100 times the usual
    assert_right({n: t.detach() if isinstance(t, Tensor) else t for n, t in inputs.items()}, backend)
    # Where one weight is nearly 1, gradients are differences of nearly equal numbers, one of which comes from the
    # rounded output: attention as it is written in PyTorch, in the inputs' own dtype, sets the budget.
    exact_inputs = upcast(inputs)
    results = [plain(**inputs), plain(**exact_inputs), flash_attention(**inputs, backend=backend)]
    eager, exact, found = (
        tuple(gradients(result, given, random_like(results[0])).values())
        for result, given in zip(results, (inputs, exact_inputs, inputs))
    )
    accuracy = compare(found, exact, eager)
    assert all(grad.isfinite().all() for grad in found)
    assert accuracy.ok or dtype == torch.float32, accuracy.describe()


@backends
def test_scale(backend: str, device: torch.device) -> None:
    for scale in (0.0, -0.25, 0.1, 1):
        assert_right(random_inputs(device, 37, scale=scale, causal=True, dtype=torch.bfloat16), backend)
    inputs = random_inputs(device, 9, scale=0.0)
    mean = inputs["v"].mean(1, keepdim=True).expand(-1, 9, -1, -1)
    torch.testing.assert_close(flash_attention(**inputs, backend=backend), mean)


@backends
def test_attention_over_parts_of_the_keys_merges_by_lse(backend: str, device: torch.device) -> None:
    """As in ring attention; gradients of the whole flow through both outputs of both parts."""
    inputs = random_inputs(device, 20, 50)
    q, k, v = inputs.values()
    parts = [
        flash_attention(q, k[:, part], v[:, part], return_lse=True, backend=backend)
        for part in (slice(0, 17), slice(17, 50))
    ]
    lse = torch.logaddexp(parts[0][1], parts[1][1])
    merged = sum(out * (part_lse - lse).exp().transpose(1, 2).unsqueeze(-1) for out, part_lse in parts)
    whole = flash_attention(q, k, v, backend=backend)
    torch.testing.assert_close(merged, whole)
    grads = random_like(whole)
    torch.testing.assert_close(gradients(merged, inputs, grads), gradients(whole, inputs, grads))


@backends
@pytest.mark.parametrize("shape", [{"n": 0}, {"n": 4, "m": 0}, {"batch": 0}, {"heads": 0}, {"n": 0, "m": 0}])
def test_nothing_to_do(shape: dict[str, int], backend: str, device: torch.device) -> None:
    for causal in (False, True):
        assert_right(random_inputs(device, **shape, causal=causal, return_lse=True), backend)


@kernels
def test_float64_is_for_pytorch(device: torch.device) -> None:
    out, lse = flash_attention(**random_inputs(device, 9, dtype=torch.float64), return_lse=True)
    assert out.dtype == lse.dtype == torch.float64


# ----------------------------------------------------------------------------------------------------------
# Splits
# ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def many_splits(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Walks cut into as many parts as there are steps."""
    from warploom.ops.flash_attention import api, launchers

    with monkeypatch.context() as patch:
        patch.setattr(api, "_on_kernels", Plans())  # none but those of this test
        patch.setattr(launchers, "best_parts", lambda steps, *rest: max(steps))
        yield


SPLIT_CASES: tuple[dict[str, Any], ...] = (
    {"causal": True},
    {"window": (30, 5)},
    {"causal": True, "heads": 4, "key_heads": 2, "n": 70},
    {"n": 1, "m": 300},
    {"n": 3, "causal": True, "dtype": torch.float32},
)


@kernels
@pytest.mark.usefixtures("many_splits")
@pytest.mark.parametrize("case", SPLIT_CASES, ids=str)
def test_a_split_is_right_and_gives_the_same_bits_twice(case: dict[str, Any], device: torch.device) -> None:
    inputs = random_inputs(device, **{"n": 150, "m": 190, "batch": 1, "heads": 1, "dtype": torch.bfloat16, **case})
    assert_right({**inputs, "return_lse": True}, "triton")
    first = run(inputs, "triton")
    with poisoned_allocations():
        assert all(torch.equal(a, b) for a, b in zip(first, run(inputs, "triton")))


@kernels
@pytest.mark.usefixtures("many_splits")
def test_parts_of_results_whose_features_are_not_adjacent(device: torch.device) -> None:
    inputs = random_inputs(device, 70, d=24, e=5, batch=1, causal=True, return_lse=True)
    for name in ("q", "k", "v"):
        inputs[name] = inputs[name].detach().transpose(1, 3).contiguous().transpose(1, 3).requires_grad_()
    assert_right(inputs, "triton")


@kernels
def test_packed_sequences_split(many_splits: None, device: torch.device) -> None:
    bounds = torch.tensor([0, 100, 100, 130, 200], device=device)
    inputs = random_inputs(device, 200, batch=1, heads=1, causal=True, cu_seqlens_q=bounds, dtype=torch.bfloat16)
    assert_right({**inputs, "return_lse": True}, "triton")


# ----------------------------------------------------------------------------------------------------------
# Tiles
# ----------------------------------------------------------------------------------------------------------


@kernels
@pytest.mark.parametrize("case", [case for case in OPERATOR.check_cases if case["n"] > 3], ids=str)
def test_kernels_of_long_walks_where_walks_are_few_and_short(
    case: Any, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cases are small, and such calls have kernels or loops of their own: here they get those of large ones."""
    from warploom.ops.flash_attention import api, launchers, launchers_few

    monkeypatch.setattr(launchers_few, "suits_backward", lambda *arguments: False)
    monkeypatch.setattr(launchers, "has_few_short_walks", lambda *arguments: False)
    monkeypatch.setattr(launchers, "_SHORT", 0)
    monkeypatch.setattr(api, "_on_kernels", Plans())  # none but those of this test
    assert_right(make_draws(OPERATOR, case, device, seed=3), "triton")


@kernels
def test_which_walks_are_few_and_short() -> None:
    from warploom.ops.flash_attention import launchers, launchers_few

    def few(n: int, heads: int = 1, d: int = 64, dtype: torch.dtype = torch.bfloat16, **mask: Any) -> list[bool]:
        x = torch.empty(1, n, heads, d, dtype=dtype)
        call = launchers._geometry(x, x, x), launchers.Mask(**mask), 0.1
        tiles = [launchers.has_few_short_walks(kernel, *call, x) for kernel in ("forward", "key", "query")]
        return [launchers_few.suits_backward(*call, x, x), *tiles]

    kernel, tiles = [True, True, False, False], [False, True, True, True]
    assert few(128) == few(1024, right=0) == few(1000) == few(128, heads=16) == kernel
    assert few(128, d=128) == few(1024, d=128, right=0) == tiles
    assert few(8192) == few(4096, d=128) == [False, True, False, False]
    for other in (
        few(8200),
        few(128, heads=80),
        few(128, d=256),
        few(128, d=72),
        few(4100, d=128),
        few(128, left=3),
    ):
        assert not any(other)
    assert few(1024, dtype=torch.float32) == few(4096, dtype=torch.float32) == [False, False, True, True]
    assert not any(few(1024, d=128, dtype=torch.float32) + few(4100, dtype=torch.float32))


@kernels
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("n", "m", "heads", "key_heads", "d"),
    [(300, 300, 1, 1, 64), (70, 290, 2, 1, 32), (290, 70, 2, 1, 16), (1, 17, 3, 3, 128), (33, 40, 4, 2, 128)],
)
@pytest.mark.parametrize("parts", [1, 3])
def test_few_short_walks(
    n: int,
    m: int,
    heads: int,
    key_heads: int,
    d: int,
    parts: int,
    causal: bool,
    launches: list[Any],
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from warploom.ops.flash_attention import api, launchers

    monkeypatch.setattr(launchers, "best_parts", lambda *arguments: parts)  # more than some walks have steps
    monkeypatch.setattr(api, "_on_kernels", Plans())  # none but those of this test
    options = {"heads": heads, "key_heads": key_heads, "d": d, "causal": causal, "batch": 1, "return_lse": True}
    with poisoned_allocations():
        assert_right(random_inputs(device, n, m, dtype=torch.bfloat16, **options), "triton")
    merge = ["combine_kernel"] if parts > 1 else []
    backward = ["backward_few_kernel"] if d <= 64 else ["key_kernel", "query_kernel"]
    assert {name for name, _ in launches} == {"forward_kernel", *merge, "prepare_kernel", *backward}


@kernels
@pytest.mark.parametrize(
    ("case", "precision", "product"),
    [
        ({"n": 19, "m": 37, "heads": 4, "key_heads": 2, "causal": True}, "highest", "pieces"),
        ({"n": 40, "d": 32, "return_lse": True}, "highest", "pieces"),
        ({"n": 33, "m": 20, "d": 64, "heads": 1, "causal": True}, "highest", "pieces"),
        ({"n": 17, "d": 128, "batch": 1, "causal": True}, "highest", "pieces"),
        ({"n": 19, "m": 37, "d": 64, "heads": 4, "key_heads": 2, "causal": True}, "high", "pairs"),
        ({"n": 17, "d": 128, "batch": 1}, "high", "pairs"),
    ],
    ids=str,
)
@pytest.mark.parametrize("parts", [1, 2])
def test_float32_factors_in_pieces_before_the_walk(
    case: dict[str, Any],
    precision: str,
    product: str,
    parts: int,
    launches: list[Any],
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Long float32 tensors are split in pieces once; here short ones are, and walk on the kernels for every GPU."""
    from warploom.ops.flash_attention import api, launchers

    any_length = dict.fromkeys(("forward", "backward"), dict.fromkeys((16, 32, 64, 128), 1))
    monkeypatch.setattr(launchers, "_LONG", {"pieces": any_length, "pairs": any_length})
    monkeypatch.setattr(launchers, "_tiled_pieces", lambda *arguments: None)
    monkeypatch.setattr(launchers, "best_parts", lambda *arguments: parts)
    monkeypatch.setattr(api, "_on_kernels", Plans())  # none but those of this test
    with poisoned_allocations():
        assert_right({**random_inputs(device, **case), "float32_precision": precision}, "triton")
    assert {constants["PRECISION"] for _, constants in launches if "PRECISION" in constants} == {product}
    names = [name for name, _ in launches]
    merged = ["sum_kernel"] if parts > 1 else []
    backward = ["prepare_kernel", "pieces_kernel", "key_kernel", "query_kernel", *merged]
    assert names == ["pieces_kernel", "forward_kernel", *["combine_kernel"] * len(merged), *backward]


# ----------------------------------------------------------------------------------------------------------
# Memory
# ----------------------------------------------------------------------------------------------------------

LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "heads_first": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "tokens_first": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "every_second_feature": lambda x: x.repeat_interleave(2, dim=3)[..., ::2],
    "features_before_heads": lambda x: x.mT.contiguous().mT,
    "every_second_token": lambda x: x.repeat_interleave(2, dim=1)[:, ::2],
    "misaligned": lambda x: torch.cat((x.new_zeros(1), x.flatten()))[1:].view(x.shape),
    "slice_of_qkv": lambda x: torch.cat((x, x), dim=-1)[..., : x.shape[-1]],
    "far_apart": lambda x: x.new_zeros(x.shape[1] * 2**22).as_strided(x.shape, (512, 2**22, 64, 1)).copy_(x),
}


@backends
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout: str, backend: str, device: torch.device) -> None:
    inputs = random_inputs(device, 5, 5, heads=2, d=32, e=16, causal=True)
    moved = {
        name: LAYOUTS[layout](t.detach()).requires_grad_() if isinstance(t, Tensor) else t
        for name, t in inputs.items()
    }
    assert not all(moved[name].is_contiguous() for name in "qkv") or layout == "misaligned"
    usual, results = run(inputs, backend), run(moved, backend)
    for one, other in zip(usual, results):
        torch.testing.assert_close(one, other)
    for tensor, like in zip((results[0], *results[2:]), (moved["q"], moved["q"], moved["k"], moved["v"])):
        if backend == "triton" or tensor is results[0]:
            assert tensor.shape[-1] != like.shape[-1] or tensor.stride() == torch.empty_like(like).stride()


@backends
def test_expanded_keys_and_gradients(backend: str, device: torch.device) -> None:
    inputs = random_inputs(device, 25, heads=4)
    expanded = {
        name: t.detach()[:, :, :1].expand(-1, -1, 4, -1).requires_grad_() if name != "q" else t
        for name, t in inputs.items()
    }
    assert_right(expanded, backend)
    out, lse = flash_attention(**expanded, return_lse=True, backend=backend)
    expected, expected_lse = reference.flash_attention(**expanded, return_lse=True)
    found = torch.autograd.grad(out.sum() + lse.sum(), tuple(leaves(expanded).values()))
    wanted = torch.autograd.grad(expected.sum() + expected_lse.sum(), tuple(leaves(expanded).values()))
    torch.testing.assert_close(found, wanted)


@pytest.mark.gpu
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_addresses_beyond_32_bits(axis: int, device: torch.device) -> None:
    if torch.cuda.mem_get_info()[0] < 80 * 2**30:
        pytest.skip("needs 80 GiB of free GPU memory")

    def spread(x: Tensor) -> Tensor:
        stride = [4096, 512, 64, 1]
        stride[axis] = 2**31 + 16
        size = sum((n - 1) * s for n, s in zip(x.shape, stride)) + 1
        return x.new_empty(size).as_strided(x.shape, stride).copy_(x)

    inputs = random_inputs(device, 2, 2, dtype=torch.bfloat16, d=32)
    far = {name: spread(t.detach()).requires_grad_() for name, t in inputs.items()}
    assert all(torch.equal(a, b) for a, b in zip(run(inputs, "triton"), run(far, "triton")))


@pytest.mark.gpu
def test_long_sequences_at_training_size(device: torch.device) -> None:
    inputs = random_inputs(device, 4096, heads=4, key_heads=2, d=128, dtype=torch.bfloat16, causal=True)
    assert_right(inputs, "triton")
    # Matrix units add in fewer bits than float32, which lse shows: it is held to what PyTorch's own kernel makes.
    q, k = (inputs[name].transpose(1, 2).double() for name in ("q", "k"))
    logits = (q @ k.repeat_interleave(2, dim=1).transpose(-1, -2)) * 128**-0.5
    exact = logits.masked_fill(torch.ones_like(logits[0, 0]).triu(1).bool(), -torch.inf).logsumexp(-1)
    kernel = torch.ops.aten._scaled_dot_product_flash_attention
    heads = (
        t.transpose(1, 2).repeat_interleave(4 // t.shape[2], dim=1) for t in (inputs["q"], inputs["k"], inputs["v"])
    )
    eager = kernel(*heads, 0.0, True, False, scale=128**-0.5)[1]
    lse = flash_attention(**inputs, return_lse=True)[1]
    assert compare(lse, exact, eager).rms_error <= 2 * (eager - exact).pow(2).mean().sqrt()
    assert (lse - exact).abs().max() < 8e-6
    assert_right(random_inputs(device, 3000, batch=1, heads=1, d=64, causal=True), "triton")


# ----------------------------------------------------------------------------------------------------------
# Launches
# ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict[str, Any]]]:
    """What is launched during a test: name, and compile-time constants by name."""
    from warploom.launch import Kernel
    from warploom.ops.flash_attention import api

    launched, call = [], Kernel.__call__

    def record(kernel: Any, programs: int, tensors: Any, numbers: Any, constants: Any, *rest: Any) -> None:
        names = kernel.function.arg_names[-len(constants) :]
        launched.append((kernel.function.__name__, dict(zip(names, constants))))
        call(kernel, programs, tensors, numbers, constants, *rest)

    monkeypatch.setattr(Kernel, "__call__", record)
    monkeypatch.setattr(api, "_on_kernels", Plans())  # a launch like an earlier one does not pass by here
    return launched


@kernels
@pytest.mark.parametrize("short", [0, 2**30])
def test_no_length_batch_window_or_scale_is_a_constant(
    short: int, launches: list[Any], device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    from warploom.ops.flash_attention import launchers

    monkeypatch.setattr(launchers, "_SHORT", short)  # short walks and long ones have loops of their own
    kinds: list[list[dict[str, Any]]] = [
        [{"n": 5}, {"n": 16, "m": 33, "batch": 1}, {"n": 70, "scale": 0.3, "heads": 4, "key_heads": 2}],
        [{"n": 20, "window": (3, 4)}, {"n": 16, "window": (100, 0)}],
        [{"n": 20, "batch": 1, "cu_seqlens_q": torch.tensor(c, device=device)} for c in ([0, 20], [0, 3, 9, 20])],
    ]
    for kind in kinds:
        launches.clear()
        for case in kind:
            run(random_inputs(device, **case), "triton")
        used = {(name, tuple(constants.items())) for name, constants in launches if name not in MERGING}
        assert len(used) == 4


@kernels
@pytest.mark.parametrize("precision", ["highest", "high", "medium"])
def test_precision_of_float32_products(precision: str, launches: list[Any], device: torch.device) -> None:
    from warploom.launch import architecture
    from warploom.ops.flash_attention.launchers import PRODUCTS

    product = PRODUCTS[precision]
    if precision == "highest" and 90 <= architecture(device) < 100:
        product = "cut"  # of short tensors

    def used() -> set[str]:
        return {constants["PRECISION"] for _, constants in launches if "PRECISION" in constants}

    inputs = random_inputs(device, 70)
    assert_right({**inputs, "float32_precision": precision}, "triton")
    assert used() == {product}
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision(precision)
        launches.clear()
        flash_attention(**inputs, backend="triton")
        assert used() == {product}
    finally:
        torch.set_float32_matmul_precision(before)
    launches.clear()
    run(random_inputs(device, 9, d=24, dtype=torch.bfloat16, float32_precision=precision), "triton")
    assert used() == {PRODUCTS["highest"]}  # one way only: nothing compiles twice


@kernels
def test_causal_walks_skip_what_is_hidden(device: torch.device) -> None:
    """A NaN among the keys that no query sees must not be read, or at least not be felt."""
    inputs = random_inputs(device, 40, 200, window=(20, None), causal=True)
    clean = flash_attention(**inputs, backend="triton")
    with torch.no_grad():
        inputs["k"][:, :100] = math.nan
        inputs["v"][:, :100] = math.nan
    assert torch.equal(flash_attention(**inputs, backend="triton"), clean)
