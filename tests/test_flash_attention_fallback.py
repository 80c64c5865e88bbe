"""Where the kernels cannot run: PyTorch's own attention, in memory linear in the length, or a warning."""

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.nn import functional

from warploom import BackendWarning, flash_attention, tpa_attention
from warploom.ops.flash_attention import fallback, reference

Tensor = torch.Tensor
DENSE: tuple[dict[str, Any], ...] = (
    {},
    {"causal": True},
    {"window": (3, 2)},
    {"causal": True, "window": (4, None)},
    {"window": (None, 0), "scale": -0.5},
    {"window": (0, 0)},
)
SHAPES = ((9, 9, 4, 2, 8, 8), (5, 20, 4, 4, 8, 6), (20, 5, 2, 1, 6, 8), (15, 16, 2, 2, 300, 300))


@pytest.fixture(autouse=True)
def no_definition(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Small blocks, and no word of the definition."""
    monkeypatch.setattr(fallback, "BLOCK", 7)
    with warnings.catch_warnings():
        warnings.simplefilter("error", BackendWarning)
        yield


def assert_defined(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> None:
    """Outputs, lse and gradients are those of the definition, in float64."""
    for return_lse in (False, True):
        results = []
        for backend in ("auto", "torch"):
            inputs = [x.double().requires_grad_("block_table" not in options) for x in (q, k, v)]
            found: Any = flash_attention(*inputs, **options, return_lse=return_lse, backend=backend)
            outs = found if return_lse else (found,)
            weights = [torch.linspace(-1, 1, x.numel(), dtype=x.dtype).reshape(x.shape) for x in outs]
            total = sum((x * w)[x.isfinite()].sum() for x, w in zip(outs, weights))  # a row without keys: −inf
            grads = torch.autograd.grad(total, inputs) if outs[0].requires_grad else ()
            results.append([*(x.detach() for x in outs), *grads])
        for ours, expected in zip(*results, strict=True):
            torch.testing.assert_close(ours, expected, atol=1e-10, rtol=0)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("options", DENSE, ids=str)
def test_windows_and_alignments(options: dict[str, Any], shape: tuple[int, ...]) -> None:
    tokens, keys, heads, key_heads, features, values = shape
    k, v = (torch.randn(2, keys, key_heads, size) for size in (features, values))
    assert_defined(torch.randn(2, tokens, heads, features), k, v, **options)


@pytest.mark.parametrize("causal", [False, True])
def test_packed_sequences_lengths_and_pages(causal: bool) -> None:
    q, k, v = torch.randn(1, 13, 4, 8), torch.randn(1, 16, 2, 8), torch.randn(1, 16, 2, 8)
    bounds, of_keys = torch.tensor([0, 4, 4, 13]), torch.tensor([0, 0, 6, 16])
    assert_defined(q, k, v, causal=causal, cu_seqlens_q=bounds, cu_seqlens_k=of_keys)
    k, v = torch.randn(2, 3, 13, 2, 8)
    for used in ([0, 2, 13], [0, 0, 0]):
        assert_defined(torch.randn(3, 3, 4, 8), k, v, causal=causal, seqused_k=torch.tensor(used))
    k, v = torch.randn(2, 5, 4, 2, 8)
    k[2:4], v[2:4] = torch.nan, torch.nan
    table = torch.tensor([[4, 1], [0, 9]], dtype=torch.int32)
    pages = {"seqused_k": torch.tensor([7, 2]), "block_table": table}
    assert_defined(torch.randn(2, 3, 4, 8), k, v, causal=causal, **pages)


def test_masks_and_logits_are_made_again_where_they_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fallback, "KEPT", 0)
    q, k, v = torch.randn(2, 19, 2, 8), torch.randn(2, 25, 2, 8), torch.randn(2, 25, 2, 8)
    assert_defined(q, k, v, causal=True)


def test_the_definition_has_no_part_in_training(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        pytest.fail("the definition ran")

    monkeypatch.setattr(reference, "flash_attention", refuse)
    inputs = [torch.randn(1, 30, 2, 8, requires_grad=True) for _ in range(3)]
    theirs = functional.scaled_dot_product_attention(*(x.transpose(1, 2) for x in inputs), is_causal=True)
    out = flash_attention(*inputs, causal=True)
    assert torch.equal(out, theirs.transpose(1, 2))
    out.sum().backward()
    flash_attention(*inputs, causal=True, return_lse=True)[1].sum().backward()
    a, b = torch.randn(1, 30, 2, 3, requires_grad=True), torch.randn(1, 30, 3, 8, requires_grad=True)
    tpa_attention(a, a, a, b, b, b, cu_seqlens=torch.tensor([0, 11, 30])).sum().backward()


def test_second_derivatives_are_the_definitions() -> None:
    inputs = [torch.randn(1, 5, 2, 3, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    assert torch.autograd.gradgradcheck(lambda *x: flash_attention(*x, causal=True), inputs)
    assert torch.autograd.gradgradcheck(lambda *x: flash_attention(*x, causal=True, return_lse=True), inputs)


def test_numbers_that_are_not_finite_reach_what_they_reach() -> None:
    q, k, v = torch.randn(3, 1, 6, 2, 4)
    q[0, 3, 0, 0] = torch.nan
    options: dict[str, Any] = {"causal": True, "return_lse": True}
    found, expected = (flash_attention(q, k, v, **options, backend=backend) for backend in ("auto", "torch"))
    for ours, theirs in zip(found, expected):
        assert torch.equal(ours.isnan(), theirs.isnan())
        assert ours.isnan().any()
    packed: dict[str, Any] = {"cu_seqlens": torch.tensor([0, 2, 6])}  # one sequence alone has NaN
    found, expected = (flash_attention(q, k, v, **options, **packed, backend=b) for b in ("auto", "torch"))
    assert all(torch.equal(ours.isnan(), theirs.isnan()) for ours, theirs in zip(found, expected))


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"softcap": 2.0}, "does not have a cap"),
        ({"sink": torch.zeros(2)}, "does not have sinks"),
        ({"scale": 0.0}, "does not take a scale or a size of 0"),
    ],
    ids=str,
)
def test_the_definition_warns_once_a_line(options: dict[str, Any], reason: str) -> None:
    x = torch.randn(1, 6, 2, 4)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("default")
        for _ in range(2):
            flash_attention(x, x, x, **options)
        flash_attention(x, x, x, **options, backend="torch")
    assert [(w.category, w.filename) for w in seen] == [(BackendWarning, __file__)]
    assert str(seen[0].message).startswith(
        f"flash_attention: the kernels do not run here, and PyTorch's own attention {reason}; the definition"
    )


@pytest.mark.gpu
@pytest.mark.parametrize("features", [264, 300])
def test_wide_heads_on_a_gpu_take_linear_memory(features: int, device: torch.device) -> None:
    peaks = []
    for tokens in (4096, 8192):
        q, k = (
            torch.randn(1, tokens, heads, features, device=device, dtype=torch.bfloat16, requires_grad=True)
            for heads in (4, 2)
        )
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        flash_attention(q, k, k, causal=True).sum().backward()
        peaks.append(torch.cuda.max_memory_allocated() - before)
    assert peaks[1] < 2.5 * peaks[0], "four times as much, if it were quadratic"
    inputs = [x.detach().cpu()[:, :64].float() for x in (q, k, k)]
    found = flash_attention(*(x[:, :64] for x in (q, k, k)), causal=True)
    assert (found.cpu() - flash_attention(*inputs, causal=True, backend="torch")).abs().max() < 0.05


@pytest.mark.parametrize("sizes", [(0, 6, 6), (2, 0, 6), (2, 6, 0)])
def test_nothing_is_computed_without_a_warning(sizes: tuple[int, int, int]) -> None:
    batch, queries, keys = sizes
    q, k = torch.randn(batch, queries, 2, 4), torch.randn(batch, keys, 2, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(flash_attention(q, k, k), torch.zeros_like(q))
