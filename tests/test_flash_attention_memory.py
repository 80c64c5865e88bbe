"""Flash attention of any strides, and of tensors beyond 32 bits."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from flash_cases import LAYOUTS, assert_right, backends, kernels, random_inputs, run

from warploom import BackendError, flash_attention
from warploom.ops.flash_attention import reference
from warploom.testing.accuracy import compare, compare_each
from warploom.testing.conformance import find_leaves, upcast

Tensor = torch.Tensor


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
    found = torch.autograd.grad(out.sum() + lse.sum(), tuple(find_leaves(expanded).values()))
    wanted = torch.autograd.grad(expected.sum() + expected_lse.sum(), tuple(find_leaves(expanded).values()))
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
