"""What flash attention computes: the definition itself, masks, packing, grouping, layouts."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import seeds
import torch

from warploom import BackendError, flash_attention
from warploom.ops.flash_attention import reference
from warploom.ops.flash_attention.bench import OPERATOR
from warploom.ops.flash_attention.peers import plain
from warploom.runtime.backend import HAS_TRITON
from warploom.testing.accuracy import compare, compare_each
from warploom.testing.conformance import gradients, judge_draws, leaves, random_like, upcast
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
    generator = seeds.generator(5)
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


def attend_slowly(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    window: tuple[int | None, int | None],
    softcap: float = torch.inf,
    sink: Tensor | None = None,
    used: Sequence[int] | None = None,
) -> Any:
    batch, tokens, heads, _ = q.shape
    out, lse = q.new_zeros(batch, tokens, heads, v.shape[3]), q.new_full((batch, heads, tokens), -torch.inf)
    sinks = lse[0, :, 0].clone() if sink is None else sink
    left, right = window
    for b, i, h in itertools.product(range(batch), range(tokens), range(heads)):
        keys = k.shape[1] if used is None else used[b]
        place, g = i + keys - tokens, h * k.shape[2] // heads
        seen = [
            j
            for j in range(keys)
            if not (causal and j > place)
            and (left is None or j >= place - left)
            and (right is None or j <= place + right)
        ]
        logits = k[b, seen, g] @ q[b, i, h] * q.shape[3] ** -0.5
        if softcap < torch.inf:
            logits = softcap * (logits / softcap).tanh()
        lse[b, h, i] = torch.cat((logits, sinks[h, None])).logsumexp(0)
        if seen:
            out[b, i, h] = (logits - lse[b, h, i]).exp() @ v[b, seen, g]
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


@pytest.mark.parametrize(
    "options",
    [
        {"softcap": 0.7},
        {"sink": torch.tensor([0.5, -2.0, 3.0, 0.0], dtype=torch.float64)},
        {"seqused_k": torch.tensor([5, 2])},
        {"seqused_k": torch.tensor([0, 4]), "sink": torch.full((4,), 1.5, dtype=torch.float64), "softcap": 2.0},
    ],
    ids=lambda options: ",".join(options),
)
@pytest.mark.parametrize("window", [(None, None), (2, 1)])
def test_the_definition_of_caps_sinks_and_lengths(window: Any, options: dict[str, Any]) -> None:
    inputs = random_inputs(torch.device("cpu"), 4, 6, heads=4, key_heads=2, d=3, e=2, dtype=torch.float64, size=2)
    inputs |= {name: x.clone().requires_grad_() for name, x in options.items() if name == "sink"}
    slowly = {"softcap": options.get("softcap", torch.inf), "used": options.get("seqused_k")}
    q, k, v = (inputs[name] for name in ("q", "k", "v"))
    expected = attend_slowly(q, k, v, True, window, sink=inputs.get("sink"), **slowly)
    found = reference.flash_attention(**{**options, **inputs}, causal=True, window=window, return_lse=True)
    torch.testing.assert_close(found, expected)
    out_only = (expected[0], expected[1].masked_fill(expected[1] == -torch.inf, 0.0))
    wanted = gradients(out_only, inputs, random_like(expected))
    found = (found[0], found[1].masked_fill(found[1] == -torch.inf, 0.0))
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
        with poisoned_allocations():
            found = run({**inputs, "seqused_k": wide[:, 1]}, backend)
        for entry, length in enumerate(used):
            alone = {n: x[entry : entry + 1] for n, x in inputs.items() if n == "q"}
            alone |= {n: x[entry : entry + 1, :length] for n, x in inputs.items() if n in ("k", "v")}
            alone = {n: x.detach().requires_grad_() for n, x in alone.items()}
            outputs = flash_attention(**alone, **options, return_lse=True, backend=backend)
            grads = [x[entry : entry + 1] for x in random_like(found[:2])]
            expected = (*outputs, *gradients(outputs, alone, grads).values())
            for x, y in zip(found[:2], outputs):
                torch.testing.assert_close(x[entry : entry + 1], y)
            torch.testing.assert_close(found[2][entry : entry + 1], expected[2])
            for x, y in zip(found[3:], expected[3:]):
                torch.testing.assert_close(x[entry : entry + 1, :length], y)
                assert (x[entry, length:] == 0).all()


@backends
@pytest.mark.parametrize("page_size", [1, 5, 16])
@pytest.mark.parametrize("options", [{"n": 1}, {"n": 20, "window": (30, 3), "softcap": 3.0}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_keys_in_pages(
    dtype: torch.dtype, options: dict[str, Any], page_size: int, backend: str, device: torch.device
) -> None:
    """Any page holds any keys of any entry; what no table names, or lies behind the used keys, is not read."""
    inputs = random_inputs(device, m=80, batch=3, heads=4, key_heads=2, d=24, causal=True, dtype=dtype, **options)
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
def test_addresses_beyond_32_bits(axis: int, device: torch.device, gpu_memory: Callable[[float], None]) -> None:
    gpu_memory(16)

    def spread(x: Tensor) -> Tensor:
        stride = [4096, 512, 64, 1]
        stride[axis] = 2**31 + 16
        size = sum((n - 1) * s for n, s in zip(x.shape, stride)) + 1
        return x.new_empty(size).as_strided(x.shape, stride).copy_(x)

    inputs = random_inputs(device, 2, 2, dtype=torch.bfloat16, d=32)
    far = {name: spread(t.detach()).requires_grad_() for name, t in inputs.items()}
    assert all(torch.equal(a, b) for a, b in zip(run(inputs, "triton"), run(far, "triton")))


@kernels
def test_a_window_wider_than_32_bits_reach(device: torch.device) -> None:
    """Keys so many that their places and the window's bounds add up to 2³¹; they take one element of memory."""
    tokens, keys = 40, 2**30 + 70
    q, one = torch.randn(1, tokens, 1, 16).to(device), torch.ones(1, 1, 1, 1).to(device)
    k, v = one.expand(1, keys, 1, 16), one.expand(1, keys, 1, 16)
    for window in ((9, 2**30), (9, 2**31 - 1)):
        out, lse = flash_attention(q, k, v, window=window, scale=0.0, return_lse=True, backend="triton")
        torch.testing.assert_close(out, torch.ones_like(out), rtol=0, atol=3e-7)
        seen = torch.arange(tokens, 0, -1, device=device) + 9  # those behind a query, and nine before it
        torch.testing.assert_close(lse[0, 0], seen.float().log())


@kernels
def test_lengths_beyond_32_bits_are_not_for_the_kernels(device: torch.device) -> None:
    one = torch.zeros(1, 1, 1, 1, dtype=torch.float16, device=device)
    for n, m, heads in ((2**31, 1, 1), (2**30, 2**30, 1), (1, 2**31 + 5, 1), (1, 1, 2**32)):
        q, k = one.expand(1, n, heads, 1), one.expand(1, m, heads, 1)
        with pytest.raises(BackendError, match=r"at most|more than"):
            flash_attention(q, k, k, backend="triton")


LARGE: dict[str, tuple[dict[str, Any], int]] = {
    "batch": ({"n": 128, "batch": 2**15 + 2, "heads": 8, "d": 64, "causal": True}, 42),
    "batch_wide": ({"n": 64, "batch": 2**14 + 2, "heads": 9, "d": 256, "causal": True}, 48),
    "narrow": ({"n": 2048, "batch": 2**13 + 2, "heads": 8, "d": 16, "window": (70, 0)}, 44),
    "length": ({"n": 2**25 + 64, "batch": 1, "heads": 1, "d": 64, "window": (70, 0)}, 42),
    "packed": ({"n": 2**25 + 64, "batch": 1, "heads": 1, "d": 64, "window": (70, 0), "packed": True}, 42),
    "float32": ({"n": 2048, "batch": 2**10 + 1, "heads": 8, "key_heads": 1, "d": 128, "window": (70, 0),
                 "dtype": torch.float32}, 66),
}  # fmt: skip
"""Calls on more than 2³¹ elements, and the GiB that they take."""


@pytest.mark.gpu
@pytest.mark.parametrize("name", LARGE)
def test_more_elements_than_32_bits_count(
    name: str, device: torch.device, gpu_memory: Callable[[float], None]
) -> None:
    """The last tokens of the last batch entry are as exact as of a small call; gradients too."""
    (options, gib), last = LARGE[name], 200
    gpu_memory(gib)
    options = dict(options)
    n, batch, heads, d = (options.pop(size) for size in ("n", "batch", "heads", "d"))
    key_heads, dtype = options.pop("key_heads", heads), options.pop("dtype", torch.bfloat16)
    packed = {}
    if options.pop("packed", False):
        packed = {"cu_seqlens_q": torch.tensor([0, 7, n - 2 * last, n], device=device)}
    shapes = {"q": heads, "k": key_heads, "v": key_heads, "grad": heads}
    made = {x: torch.randn(batch, n, h, d, device=device, dtype=dtype) for x, h in shapes.items()}
    assert made["q"].numel() > 2**31
    grad = made.pop("grad")
    end = slice(-2 * last, None) if n > 2 * last else slice(None)
    # A copy, so that the small call knows nothing of the large tensors.
    small = {name: x[-1:, end].clone().requires_grad_() for name, x in made.items()}
    leaves_ = [x.requires_grad_() for x in made.values()]
    out, lse = flash_attention(*leaves_, **options, **packed, return_lse=True)
    found = [x[-1:, end].clone() for x in torch.autograd.grad(out, leaves_, grad)]
    found = [out.detach()[-1:, end].clone(), lse[-1:, :, end].clone().mT, *found]
    grad = grad[-1:, end].clone()
    del out, lse, leaves_, made
    torch.cuda.empty_cache()
    results = []
    for inputs in (upcast(small), small):
        out, lse = reference.flash_attention(**inputs, **options, return_lse=True)
        results.append([out, lse.mT, *torch.autograd.grad(out, tuple(inputs.values()), grad.to(out.dtype))])
    known = slice(-last, None) if n > 2 * last else slice(None)  # these see no token before the small call's first
    found, *results = ([x.detach()[:, known] for x in each] for each in (found, *results))
    lse, exact_lse, _ = (each.pop(1) for each in (found, *results))
    # Matrix units add in fewer bits than float32.
    torch.testing.assert_close(lse.double(), exact_lse, rtol=0, atol=1e-4)
    for what, verdict in zip(("out", "dq", "dk", "dv"), compare_each(*map(tuple, (found, *results))), strict=True):
        assert verdict.ok, f"{what}: {verdict.describe()}"


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
