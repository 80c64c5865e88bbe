"""A bias on the kernels for Hopper: in an interpreter on a CPU, and on a Hopper GPU."""

from typing import Any

import flash_cases
import pytest
import torch

from warploom import flash_attention
from warploom.runtime.backend import HAS_TRITON
from warploom.testing.poison import poison_allocations

pytestmark = pytest.mark.skipif(not HAS_TRITON, reason="needs Triton")

SINK = torch.tensor([0.5, -0.25, 1.0, 0.0])
CASES: dict[str, tuple[tuple[int, ...], tuple[int, int], tuple[int, ...], torch.dtype, dict[str, Any]]] = {
    "whole": ((2, 150, 208, 4, 2), (128, 128), (2, 4, 150, 208), torch.bfloat16, {"causal": True}),
    "odd": ((1, 130, 261, 2, 2), (128, 128), (1, 2, 130, 261), torch.float32, {}),
    "of entries": ((2, 130, 140, 2, 1), (128, 128), (2, 1, 130, 140), torch.bfloat16, {"causal": True}),
    "of heads": ((2, 70, 333, 4, 2), (64, 64), (1, 4, 70, 333), torch.bfloat16, {"sink": SINK}),
    "of keys": ((2, 140, 200, 4, 1), (64, 64), (1, 1, 1, 200), torch.float16, {"scale": 0.2}),
    "keys of heads": ((1, 130, 136, 4, 2), (64, 64), (1, 4, 1, 136), torch.bfloat16, {"causal": True}),
    "keys of entries": ((2, 130, 200, 2, 2), (128, 128), (2, 1, 1, 200), torch.float32, {"causal": True}),
    "narrow": ((1, 260, 140, 2, 1), (40, 56), (1, 2, 260, 140), torch.float32, {"causal": True, "sink": SINK[:2]}),
    "in pieces": ((1, 150, 200, 2, 1), (192, 128), (1, 2, 150, 200), torch.bfloat16, {"causal": True}),
    "float32 of entries": ((2, 140, 150, 2, 1), (64, 64), (2, 1, 140, 150), torch.float32, {}),
    "all": ((2, 192, 140, 2, 2), (128, 128), (1, 1, 192, 140), torch.float16, {}),
    "256": ((1, 140, 140, 2, 2), (256, 256), (1, 2, 140, 140), torch.bfloat16, {}),
}  # fmt: skip


def draw(
    sizes: tuple[int, ...], width: tuple[int, int], axes: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> list[torch.Tensor]:
    """Returns q, k, v and a bias, whose rows begin at multiples of 8 and have NaN behind them."""
    batch, tokens, keys, heads, key_heads = sizes
    generator = torch.Generator().manual_seed(tokens)
    shapes = (
        (batch, tokens, heads, width[0]),
        (batch, keys, key_heads, width[0]),
        (batch, keys, key_heads, width[1]),
    )
    rows = [torch.randn(shape, generator=generator).to(device, torch.bfloat16) for shape in shapes]
    bias = 2 * torch.randn(axes, generator=generator)
    bias.masked_fill_(torch.rand(axes, generator=generator) < 0.2, -torch.inf)
    if axes[2] > 5:
        bias[..., 3, :] = -torch.inf
        bias[..., 5, :] += 300.0
    memory = torch.full((*axes[:3], -(-keys // 8) * 8), torch.nan, device=device, dtype=dtype)
    memory[..., :keys] = bias.to(device, dtype)
    return [*rows, memory[..., :keys]]


def results_of(
    tensors: list[torch.Tensor], options: dict[str, Any], backend: Any, of_bias: bool
) -> list[torch.Tensor]:
    """Returns the output, lse, and all gradients."""
    *rows, bias = tensors
    wanted = [x.requires_grad_() for x in rows]
    bias = bias.detach().requires_grad_(of_bias)
    options = dict(options)
    if of_bias:
        wanted.append(bias)
    if "sink" in options:
        options["sink"] = options["sink"].detach().clone().requires_grad_()
        wanted.append(options["sink"])
    out, lse = flash_attention(*rows, bias=bias, return_lse=True, backend=backend, **options)
    generator = torch.Generator().manual_seed(7)
    weights = torch.randn(out.shape, generator=generator).to(out.device, torch.bfloat16)
    finite = lse.masked_fill(lse == -torch.inf, 0.0).clamp(-400.0, 400.0)
    gradients = torch.autograd.grad((out * weights).double().sum() + finite.double().sin().sum(), wanted)
    return [out.detach(), lse.detach(), *gradients]


@pytest.mark.parametrize("of_bias", [False, True], ids=["read", "with a gradient"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_they_agree_with_the_definition(
    case: Any, of_bias: bool, launched: list[str], device: torch.device
) -> None:
    sizes, width, axes, dtype, options = case
    options = {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in options.items()}
    tensors = draw(sizes, width, axes, dtype, device)
    with poison_allocations():
        found = results_of(tensors, options, "triton", of_bias)
    backward = {"hopper_biased_backward_kernel"}
    if max(width) > 128:
        backward = {"masked_query_kernel", "masked_key_kernel", *(["masked_bias_kernel"] if of_bias else [])}
    assert set(launched) - {"sink_kernel"} == {"hopper_forward_kernel", "seen_keys_kernel", *backward}
    wide = {name: x.double() if isinstance(x, torch.Tensor) else x for name, x in options.items()}
    eager = results_of(tensors, options, "torch", of_bias)
    exact = results_of([x.detach().double() for x in tensors], wide, "torch", of_bias)
    flash_cases.assert_as_exact(found, eager, exact)


@pytest.mark.parametrize("name", ["whole", "of entries", "of keys", "keys of entries", "float32 of entries"])
def test_the_same_bits_twice(name: str, launched: list[str], device: torch.device) -> None:
    sizes, width, axes, dtype, options = CASES[name]
    tensors = draw(sizes, width, axes, dtype, device)
    one, other = (results_of(tensors, options, "triton", True) for _ in range(2))
    assert all(torch.equal(x, y) for x, y in zip(one, other))
    assert "hopper_biased_backward_kernel" in launched


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_of_the_smallest_numbers_has_equal_weights(
    dtype: torch.dtype, launched: list[str], device: torch.device
) -> None:
    q, k, v, bias = draw((1, 70, 264, 2, 2), (64, 64), (1, 1, 70, 264), dtype, device)
    bias = torch.zeros_like(bias)
    bias[..., 7, :] = torch.finfo(dtype).min
    bias[..., 9, :200] = torch.finfo(dtype).min
    out, lse = flash_attention(q, k, v, bias=bias, return_lse=True, backend="triton")
    assert "hopper_forward_kernel" in launched
    torch.testing.assert_close(out[:, 7].float(), v.float().mean(1), atol=1e-2, rtol=0.0)
    alone = flash_attention(q[:, 9:10].double(), k[:, 200:].double(), v[:, 200:].double(), backend="torch")
    torch.testing.assert_close(out[:, 9:10].double(), alone, atol=1e-2, rtol=0.0)
    assert lse.isfinite().all()


@pytest.mark.parametrize("number", [-1e9, torch.finfo(torch.float32).min])
def test_a_row_of_large_numbers_has_the_gradients_of_equal_weights(
    number: float, launched: list[str], device: torch.device
) -> None:
    q, k, v, bias = draw((1, 70, 264, 2, 2), (64, 64), (1, 1, 70, 264), torch.float32, device)
    bias = torch.zeros_like(bias)
    bias[..., 7, :] = number
    out = flash_attention(q, k, v.requires_grad_(), bias=bias, backend="triton")
    (gradient,) = torch.autograd.grad(out[:, 7].float().sum(), v)
    assert "hopper_biased_backward_kernel" in launched
    torch.testing.assert_close(gradient.float(), torch.full_like(gradient, 1 / 264).float(), atol=0.0, rtol=1e-2)


@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_keys_hidden_from_all_reach_nothing(
    poison: float, causal: bool, launched: list[str], device: torch.device
) -> None:
    """A key that one query sees gives it NaN, and one that none sees gives nothing."""
    results = []
    for value in (0.0, poison):
        q, k, v, bias = draw((2, 140, 200, 4, 2), (64, 64), (2, 4, 140, 200), torch.bfloat16, device)
        bias = bias.clamp(min=-5.0)
        bias[1, :, :, 70:73] = -torch.inf
        bias[1, :2, :, 160:] = -torch.inf
        if causal:
            bias[0, :, -40:, 165] = -torch.inf  # which queries before do not see either
            bias[0, :, 100, 165] = 1.0
            v[0, 165] = value
        k[1, 70:72, 0], v[1, 71:73], k[1, 161, 0] = value, value, value
        results.append(results_of([q, k, v, bias], {"causal": causal}, "triton", True))
    for one, other in zip(*results):
        assert torch.equal(one, other)
    assert {"hopper_forward_kernel", "seen_keys_kernel"} <= set(launched)


def test_rows_in_one_place(launched: list[str], device: torch.device) -> None:
    """A bias of keys that is expanded to rows has a gradient of each row, by another kernel."""
    q, k, v, bias = draw((1, 130, 144, 2, 1), (64, 64), (1, 2, 1, 144), torch.bfloat16, device)
    tensors = [q, k, v, bias.expand(1, 2, 130, 144)]
    results_of(tensors, {}, "triton", False)
    assert "hopper_biased_backward_kernel" in launched
    found = results_of(tensors, {}, "triton", True)
    exact = results_of([x.detach().double() for x in tensors], {}, "torch", True)
    flash_cases.assert_as_exact(found, results_of(tensors, {}, "torch", True), exact)
    assert {"hopper_biased_backward_kernel", "masked_bias_kernel"} <= set(launched)


def test_axes_of_stride_zero_and_large_numbers(launched: list[str], device: torch.device) -> None:
    """A bias that is the same for all heads and batch entries by its strides has a gradient of each."""
    q, k, v, bias = draw((2, 130, 144, 2, 1), (64, 64), (1, 1, 130, 144), torch.float32, device)
    bias = bias * torch.tensor([1.0, 1e4, 1e30], device=device).repeat(48)
    tensors = [q, k, v, bias.expand(2, 2, 130, 144)]
    found = results_of(tensors, {}, "triton", True)
    exact = results_of([x.detach().double() for x in tensors], {}, "torch", True)
    assert found[-1].shape == (2, 2, 130, 144)
    for one, right in zip(found, exact):
        seen = right != -torch.inf
        most = 1e-2 * right[seen].abs().max() + 1e-5  # where one key has all the weight, gradients of queries are 0
        assert (one.double() - right)[seen].abs().max() <= most, right.shape
    assert {"hopper_forward_kernel", "hopper_biased_backward_kernel"} <= set(launched)


@pytest.mark.parametrize(
    ("tokens", "make", "options"),
    [
        (70, lambda bias: bias[..., :65].contiguous(), {}),
        (70, lambda bias: bias.double(), {}),
        (70, lambda bias: bias.mT.contiguous().mT, {}),
        (63, lambda bias: bias[:, :, :63], {}),
        (70, lambda bias: bias, {"alibi": SINK[:2]}),
        (70, lambda bias: bias, {"softcap": 5.0}),
        (70, lambda bias: bias, {"window": (20, 0)}),
        (70, lambda bias: bias, {"seqused_k": torch.tensor([50])}),
        (70, lambda bias: bias, {"mask": torch.ones(1, 1, 70, 64).bool()}),
    ],
    ids=["odd rows", "float64", "strided keys", "few queries", "alibi", "softcap", "window", "seqused_k", "mask"],
)
def test_other_biases_take_other_kernels(
    tokens: int, make: Any, options: dict[str, Any], launched: list[str], device: torch.device
) -> None:
    options = {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in options.items()}
    q, k, v = (torch.randn(1, n, 2, 64, device=device, dtype=torch.bfloat16) for n in (tokens, 64, 64))
    bias = make(torch.randn(1, 2, 70, 72, device=device))[..., :64]
    flash_attention(q, k, v, bias=bias, backend="triton", **options)
    assert launched == ["masked_forward_kernel"]
