"""warploom as an implementation of PyTorch's flash attention: the functions that stand for PyTorch's operators."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import seeds
import torch
import torch.nn.functional as F

from warploom.errors import ArgumentError, BackendError
from warploom.integrations import sdpa
from warploom.runtime.backend import HAS_TRITON

Tensor = torch.Tensor
registry = pytest.mark.skipif(
    not hasattr(torch.nn.attention, "register_flash_attention_impl"), reason="needs PyTorch's registry"
)
kernels = pytest.mark.skipif(not HAS_TRITON, reason="needs Triton")


@pytest.fixture
def _everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU, in Triton's interpreter, too."""
    monkeypatch.setattr(sdpa, "use_triton", lambda *_: True)


@pytest.fixture
def _inactive() -> Iterator[None]:
    from torch.nn.attention import _registry

    yield
    _registry.restore_flash_attention_impl(_raise_warn=False)
    _registry._FLASH_ATTENTION_IMPLS.pop("warploom", None)


def drawn(device: torch.device, *shapes: tuple[int, ...]) -> list[Tensor]:
    generator = seeds.generator(3)
    return [torch.randn(shape, generator=generator).to(device, torch.bfloat16) for shape in shapes]


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found.float(), expected.float(), rtol=2e-2, atol=2e-2)


@kernels
@pytest.mark.usefixtures("_everywhere")
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_dense(is_causal: bool, scale: float | None, device: torch.device) -> None:
    """Output, lse and gradients as PyTorch's operators return and take them."""
    q, k, v, grad = drawn(device, (2, 4, 20, 16), (2, 2, 20, 16), (2, 2, 20, 16), (2, 4, 20, 16))
    leaves = [t.float().requires_grad_() for t in (q, k, v)]
    expected = F.scaled_dot_product_attention(*leaves, is_causal=is_causal, scale=scale, enable_gqa=True)
    out, lse, *rest = sdpa._dense(q, k, v, 0.0, is_causal, scale=scale)
    assert len(rest) == 7
    assert rest[2:4] == [20, 20]
    close(out, expected)
    logits = leaves[0] @ leaves[1].repeat_interleave(2, 1).mT * (scale or 0.25)
    logits = (
        logits.masked_fill(~torch.ones(20, 20, device=device).tril().bool(), -torch.inf) if is_causal else logits
    )
    close(lse, logits.logsumexp(-1))
    found = sdpa._dense_backward(
        grad, q, k, v, out, lse, None, None, 20, 20, 0.0, is_causal, *rest[4:6], scale=scale
    )
    for one, other in zip(found, torch.autograd.grad(expected, leaves, grad.float())):
        assert one.shape == other.shape
        close(one, other)


@kernels
@pytest.mark.usefixtures("_everywhere")
@pytest.mark.parametrize("window", [(-1, -1), (3, 0), (None, None)])
def test_packed(window: tuple[int | None, int | None], device: torch.device) -> None:
    """Each sequence as if it were alone."""
    q, k, v, grad = drawn(device, *[(19, 2, 16)] * 4)
    bounds = torch.tensor([0, 5, 19], dtype=torch.int32, device=device)
    sides = {"window_size_left": window[0], "window_size_right": window[1]}
    out, lse, *rest = sdpa._attend_packed(q, k, v, bounds, bounds, 14, 14, 0.0, True, False, **sides)
    found = sdpa._attend_packed_backward(
        grad, q, k, v, out, lse, bounds, bounds, 14, 14, 0.0, True, *rest[:2], **sides
    )  # fmt: skip
    assert lse.shape == (2, 19)
    for first, last in ((0, 5), (5, 19)):
        part = slice(first, last)
        leaves = [t[None, part].transpose(1, 2).float().requires_grad_() for t in (q, k, v)]
        place = torch.arange(last - first, device=device)
        distance = place[:, None] - place
        left = 99 if window[0] in (None, -1) else window[0]
        expected = F.scaled_dot_product_attention(*leaves, attn_mask=(distance >= 0) & (distance <= left))
        close(out[part], expected[0].transpose(0, 1))
        wanted = torch.autograd.grad(expected, leaves, grad[None, part].transpose(1, 2).float())
        for one, other in zip(found, wanted):
            close(one[part], other[0].transpose(0, 1))


@pytest.mark.usefixtures("_everywhere")
def test_what_the_kernels_do_not_take_is_pytorchs(device: torch.device) -> None:
    q, wide = drawn(device, (1, 2, 8, 16), (1, 2, 8, 264))
    assert sdpa._dense(q, q, q, 0.1) is None
    assert sdpa._dense(q, q, q, 0.0, False, True) is None
    assert sdpa._dense(wide, wide, wide) is None
    packed = (q, q, q, None, None, 8, 8, 0.0, False, False)
    for name in ("seqused_k", "alibi_slopes", "block_table"):
        assert sdpa._attend_packed(*packed, **{name: torch.ones(1, device=device)}) is None
    with pytest.raises(BackendError, match="no flash attention of its own"):
        sdpa._prefer(lambda *_: None, None)(None)


@registry
@pytest.mark.usefixtures("_inactive")
def test_the_registry_knows_it() -> None:
    has: Any = torch._C._dispatch_has_kernel_for_dispatch_key
    before = has(f"aten::{sdpa._DENSE}", "CUDA")  # in a build for CUDA, with a GPU or without
    sdpa.register()
    assert "warploom" in torch.nn.attention.list_flash_attention_impls()
    torch.nn.attention.activate_flash_attention_impl("warploom")
    assert torch.nn.attention.current_flash_attention_impl() == "warploom"
    assert has(f"aten::{sdpa._DENSE}", "CUDA")
    torch.nn.attention.restore_flash_attention_impl()
    assert torch.nn.attention.current_flash_attention_impl() is None
    assert has(f"aten::{sdpa._DENSE}", "CUDA") == before


@registry
@pytest.mark.gpu
@pytest.mark.usefixtures("_inactive")
def test_attention_of_pytorch_runs_the_kernels(device: torch.device) -> None:
    """With dropout it runs PyTorch's own, and when it is restored."""
    q, k, v = (t.requires_grad_() for t in drawn(device, *[(2, 4, 200, 64)] * 3))
    sdpa.register()
    results = []
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
        for active in (False, True):
            if active:
                torch.nn.attention.activate_flash_attention_impl("warploom")
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            results.append((out, *torch.autograd.grad(out, (q, k, v), torch.ones_like(out))))
            dropped = F.scaled_dot_product_attention(q, k, v, dropout_p=0.5)
            torch.autograd.grad(dropped, (q, k, v), torch.ones_like(out))
        with torch.profiler.profile() as profile:
            F.scaled_dot_product_attention(q, k, v, is_causal=True)
    for one, other in zip(*results):
        close(one, other)
    assert any("forward_kernel" in event.name for event in profile.events())


@pytest.mark.parametrize("name", ["FA4", 3])
def test_names(name: Any) -> None:
    with pytest.raises(ArgumentError, match="name"):
        sdpa.register(name)


def test_a_pytorch_without_a_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.nn.attention, "register_flash_attention_impl", raising=False)
    with pytest.raises(BackendError, match="no registry"):
        sdpa.register()
