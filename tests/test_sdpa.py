"""warploom as an implementation of PyTorch's flash attention: the functions that stand for PyTorch's operators."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import seeds
import torch
import torch.nn.functional as F

from warploom import flash_attention
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


@pytest.fixture
def _active_everywhere(_everywhere: None) -> Iterator[None]:
    """PyTorch's attention is ours for tensors on a CPU too."""
    library = torch.library.Library("aten", "IMPL")
    for key in ("AutogradCPU", "CPU", "AutogradCUDA", "CUDA"):
        library.impl(sdpa._ATTENTION, sdpa._attend, key)
    yield
    library._destroy()


def window_of(tokens: int, keys: int) -> Tensor:
    """A boolean mask (N, M) whose first row sees nothing."""
    seen = (torch.arange(keys) - torch.arange(tokens)[:, None]).abs() < 6
    seen[0] = False
    return seen


LENGTHS = 20, 37
NUMBERS = torch.randn(2, 4, *LENGTHS, generator=torch.Generator().manual_seed(1))
MASKS: dict[str, Tensor] = {
    "boolean": window_of(*LENGTHS),
    "of entries": torch.stack([window_of(*LENGTHS), window_of(*LENGTHS).flip(1)])[:, None],
    "of keys": torch.arange(37).expand(2, 1, 1, 37) < torch.tensor([30, 5]).view(2, 1, 1, 1),
    "of queries": (torch.arange(20) > 3)[:, None],
    "numbers": NUMBERS,
    "of heads": NUMBERS[0].masked_fill(~window_of(*LENGTHS), -torch.inf),
    "of one row": NUMBERS[:, :1, :1],
    "of one column": NUMBERS[:1, :, :, :1],
}


def both(*inputs: Any, grad: Tensor, **options: Any) -> Iterator[list[Tensor]]:
    """Yields output and gradients of PyTorch's attention by PyTorch's matrices, and as it is."""
    leaves = [x for x in inputs if x.requires_grad]
    for backends in (["MATH"], ["FLASH_ATTENTION", "EFFICIENT_ATTENTION", "MATH"]):
        with torch.nn.attention.sdpa_kernel([getattr(torch.nn.attention.SDPBackend, b) for b in backends]):
            out = F.scaled_dot_product_attention(*inputs, **options)
            yield [out, *torch.autograd.grad(out, leaves, grad)]


@kernels
@pytest.mark.usefixtures("_active_everywhere")
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_masks(mask: Tensor, dtype: torch.dtype, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Masks of every shape that broadcasts, and gradients of those that have one."""
    ran: list[Any] = []
    monkeypatch.setattr(
        sdpa, "flash_attention", lambda *args, **options: ran.append(options) or flash_attention(*args, **options)
    )
    shapes = (2, 4, 20, 16), (2, 2, 37, 16), (2, 2, 37, 24), (2, 4, 20, 24)
    q, k, v, grad = (x.to(dtype) for x in drawn(device, *shapes))
    mask = mask.to(device)
    if mask.dtype != torch.bool:
        mask = mask.to(dtype).requires_grad_()
    leaves = [x.requires_grad_() for x in (q, k, v)]
    wanted, found = both(*leaves, mask, grad=grad, enable_gqa=True, scale=0.3)
    assert len(ran) == 1
    for one, other in zip(found, wanted):
        assert one.shape == other.shape
        close(one, other)


@kernels
@pytest.mark.usefixtures("_active_everywhere")
def test_masks_in_inference_mode_and_compiled(device: torch.device, fresh_dynamo: None) -> None:
    q, k, v = drawn(device, *[(1, 2, 20, 16)] * 3)
    mask = window_of(20, 20).to(device)
    expected = F.scaled_dot_product_attention(q.float(), k.float(), v.float(), mask.float().log())
    with torch.inference_mode():
        close(F.scaled_dot_product_attention(q.clone(), k.clone(), v.clone(), mask), expected)
    compiled = torch.compile(F.scaled_dot_product_attention, backend="aot_eager", fullgraph=True)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = compiled(*leaves, mask)
    close(out, expected)
    found = torch.autograd.grad(out.sum(), leaves)
    again = torch.autograd.grad(F.scaled_dot_product_attention(*leaves, mask).sum(), leaves)
    torch.testing.assert_close(found, again)


@pytest.mark.usefixtures("_active_everywhere")
@pytest.mark.parametrize(
    ("shapes", "options"),
    [
        ([(2, 4, 8, 16)] * 3, {"dropout_p": 1e-9}),
        ([(4, 8, 16)] * 3, {}),
        ([(2, 4, 8, 16), (1, 4, 8, 16), (1, 4, 8, 16)], {}),
        ([(1, 1, 8, 264)] * 3, {}),
        ([(2, 4, 8, 16), (2, 1, 8, 16), (2, 1, 8, 16)], {}),
    ],
    ids=["dropout", "three axes", "entries that broadcast", "wide", "heads that broadcast"],
)
def test_masks_that_the_kernels_do_not_take_are_pytorchs(
    shapes: Any, options: dict[str, Any], device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sdpa, "flash_attention", None)
    q, k, v = drawn(device, *shapes)
    mask = torch.ones(8, 8, dtype=torch.bool, device=device).tril()
    out = F.scaled_dot_product_attention(q, k, v, mask, **options)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        close(out, F.scaled_dot_product_attention(q, k, v, mask))


@pytest.mark.usefixtures("_active_everywhere")
@pytest.mark.parametrize(
    ("mask", "options"),
    [
        (torch.ones(8, 9), {}),
        (torch.ones(8, 8, dtype=torch.int32), {}),
        (torch.ones(1, 2, 1, 8, 8), {}),
    ],
    ids=["size", "integers", "axes"],
)
def test_wrong_masks_are_pytorchs_errors(mask: Tensor, options: dict[str, Any], device: torch.device) -> None:
    (q,) = drawn(device, (1, 2, 8, 16))
    with pytest.raises(RuntimeError, match=r"mask|size|shape"):
        F.scaled_dot_product_attention(q, q, q, mask.to(device), **options)


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
