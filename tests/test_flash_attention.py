"""Flash attention against its definition: sizes, masks, packed sequences, lengths, pages, caps and sinks."""

import itertools
from typing import Any

import pytest
import seeds
import torch
from flash_cases import assert_right, backends, kernels, random_inputs, run

from warploom import flash_attention
from warploom.ops.flash_attention import reference
from warploom.ops.flash_attention.peers import plain
from warploom.testing.accuracy import compare
from warploom.testing.conformance import compute_gradients, draw_like, upcast
from warploom.testing.poison import poison_allocations

Tensor = torch.Tensor


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
    window = (window[0], None) if causal and window[1] else window
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
    with poison_allocations():
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
    assert torch.equal(flash_attention(**inputs, cu_seqlens=strided, backend=backend), both)
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
    with poison_allocations():
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
        tuple(compute_gradients(result, given, draw_like(results[0])).values())
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
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sink_is_a_key_without_a_value(dtype: torch.dtype, backend: str, device: torch.device) -> None:
    """One of logit 0 and value 0, where the sink is 0; one of −inf is none; a large one takes all weight."""
    inputs = random_inputs(device, 70, heads=4, dtype=dtype)
    q, k, v = (inputs[name] for name in ("q", "k", "v"))
    more = (torch.cat((torch.zeros_like(x[:, :1]), x), 1) for x in (k, v))
    expected = flash_attention(q, *more, backend=backend, return_lse=True)
    found = flash_attention(q, k, v, sink=torch.zeros(4, device=device), backend=backend, return_lse=True)
    torch.testing.assert_close(found, expected)
    none = flash_attention(q, k, v, sink=torch.full((4,), -torch.inf, device=device), backend=backend)
    torch.testing.assert_close(none, flash_attention(q, k, v, backend=backend))
    assert flash_attention(q, k, v, sink=torch.full((4,), 1e4, device=device), backend=backend).abs().max() == 0


@backends
def test_sinks_of_any_dtype_and_strides(backend: str, device: torch.device) -> None:
    inputs = random_inputs(device, 9, heads=4)
    sink = torch.randn(4, device=device)
    wide = torch.full((4, 2), torch.nan, device=device)
    wide[:, 1] = sink
    expected = flash_attention(**inputs, sink=sink, backend=backend)
    for same in (wide[:, 1], sink.double(), torch._neg_view(-sink)):
        torch.testing.assert_close(flash_attention(**inputs, sink=same, backend=backend), expected)
    half = flash_attention(**inputs, sink=sink.bfloat16().requires_grad_(), backend=backend)
    torch.testing.assert_close(half, flash_attention(**inputs, sink=sink.bfloat16().float(), backend=backend))
    assert torch.equal(flash_attention(**inputs, sink=sink[:1].expand(4), backend=backend),
                       flash_attention(**inputs, sink=sink[:1].repeat(4), backend=backend))  # fmt: skip


@backends
@pytest.mark.parametrize("softcap", [1e-3, 0.5, 20.0, 1e6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_caps_of_logits(dtype: torch.dtype, softcap: float, backend: str, device: torch.device) -> None:
    assert_right(random_inputs(device, 45, dtype=dtype, softcap=softcap, causal=True, size=3.0), backend)


@backends
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.seldom(3, 7)
def test_entries_have_lengths_of_their_own(dtype: torch.dtype, backend: str, device: torch.device) -> None:
    """As if each were alone with its keys, whatever lies behind these; gradients there are zero."""
    used = [150, 1, 0, 64, 70]
    wide = torch.full((5, 3), 99, dtype=dtype, device=device)
    wide[:, 1] = torch.tensor(used, device=device)
    for options in ({"causal": True}, {"window": (20, 3)}, {}):
        inputs = random_inputs(device, 70, 150, batch=5, heads=4, key_heads=2, **options)
        with torch.no_grad():
            for entry, length in enumerate(used):
                inputs["k"][entry, length:] = torch.nan
                inputs["v"][entry, length:] = torch.nan
        with poison_allocations():
            found = run({**inputs, "seqused_k": wide[:, 1]}, backend)
        for entry, length in enumerate(used):
            alone = {n: x[entry : entry + 1] for n, x in inputs.items() if n == "q"}
            alone |= {n: x[entry : entry + 1, :length] for n, x in inputs.items() if n in ("k", "v")}
            alone = {n: x.detach().requires_grad_() for n, x in alone.items()}
            outputs = flash_attention(**alone, **options, return_lse=True, backend=backend)
            grads = [x[entry : entry + 1] for x in draw_like(found[:2])]
            expected = (*outputs, *compute_gradients(outputs, alone, grads).values())
            for x, y in zip(found[:2], outputs):
                torch.testing.assert_close(x[entry : entry + 1], y)
            torch.testing.assert_close(found[2][entry : entry + 1], expected[2])
            for x, y in zip(found[3:], expected[3:]):
                torch.testing.assert_close(x[entry : entry + 1, :length], y)
                assert (x[entry, length:] == 0).all()


@backends
@pytest.mark.parametrize("page_size", [1, 5, 16])
@pytest.mark.parametrize(
    "options", [{"n": 1, "causal": True}, {"n": 20, "window": (30, 3), "softcap": 3.0}], ids=str
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_keys_in_pages(
    dtype: torch.dtype, options: dict[str, Any], page_size: int, backend: str, device: torch.device
) -> None:
    """Any page holds any keys of any entry; what no table names, or lies behind the used keys, is not read."""
    inputs = random_inputs(device, m=80, batch=3, heads=4, key_heads=2, d=24, dtype=dtype, **options)
    q, k, v = (inputs.pop(name).detach() for name in ("q", "k", "v"))
    inputs |= {"seqused_k": torch.tensor([77, 5, 0], device=device), "return_lse": True, "backend": backend}
    inputs["sink"] = torch.linspace(-1, 1, 4, device=device)
    count = 3 * 80 // page_size
    order = torch.randperm(count + 2, generator=seeds.generator(7))[:count]
    wide = torch.full((3, 2 * count // 3), -7, dtype=torch.int32, device=device)
    table = wide[:, ::2]
    pages = [x.new_full((count + 2, 2, page_size, x.shape[3]), torch.nan).transpose(1, 2) for x in (k, v)]
    for entry, used in enumerate(inputs["seqused_k"].tolist()):
        for j in range(used):
            table[entry, j // page_size] = order[entry * count // 3 + j // page_size]
            for page, x in zip(pages, (k, v)):
                page[table[entry, j // page_size], j % page_size] = x[entry, j]
    expected = flash_attention(q, k, v, **inputs)
    torch.testing.assert_close(flash_attention(q, *pages, block_table=table, **inputs), expected)
    nothing = {**inputs, "seqused_k": torch.zeros_like(inputs["seqused_k"])}
    out, lse = flash_attention(q, pages[0][:0], pages[1][:0], block_table=table, **nothing)
    assert (out == 0).all()
    torch.testing.assert_close(lse, inputs["sink"][:, None].expand_as(lse))


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
    grads = draw_like(whole)
    torch.testing.assert_close(compute_gradients(merged, inputs, grads), compute_gradients(whole, inputs, grads))


@backends
@pytest.mark.parametrize("shape", [{"n": 0}, {"n": 4, "m": 0}, {"batch": 0}, {"heads": 0}, {"n": 0, "m": 0}])
def test_nothing_to_do(shape: dict[str, int], backend: str, device: torch.device) -> None:
    for causal in (False, True):
        assert_right(random_inputs(device, **shape, causal=causal, return_lse=True), backend)


@kernels
def test_float64_is_for_pytorch(device: torch.device) -> None:
    out, lse = flash_attention(**random_inputs(device, 9, dtype=torch.float64), return_lse=True)
    assert out.dtype == lse.dtype == torch.float64
