"""Slopes on the kernels for Hopper: in an interpreter on a CPU, and on a Hopper GPU."""

from typing import Any

import flash_cases
import pytest
import torch

from warploom import flash_attention
from warploom.runtime.backend import HAS_TRITON
from warploom.testing.poison import poison_allocations

pytestmark = pytest.mark.skipif(not HAS_TRITON, reason="needs Triton")

SLOPES = torch.tensor([[0.5, 0.02, 0.0, 2.0], [1.0, 0.125, -0.03, 0.25]])
CASES: dict[str, tuple[tuple[int, ...], tuple[int, int], dict[str, Any]]] = {
    "causal": ((2, 200, 200, 4, 2), (128, 128), {"alibi": SLOPES[0], "causal": True}),
    "entries": ((2, 150, 330, 4, 4), (128, 128), {"alibi": SLOPES, "causal": True, "sink": SLOPES[1]}),
    "full": ((1, 130, 250, 4, 1), (64, 64), {"alibi": SLOPES[1:].expand(1, 4), "scale": 0.2}),
    "narrow": ((2, 260, 140, 4, 2), (40, 56), {"alibi": SLOPES.double().t().contiguous().t(), "causal": True}),
    "full and wide": ((1, 65, 300, 2, 2), (128, 128), {"alibi": -SLOPES[0, :2].half(), "sink": SLOPES[0, :2]}),
    "in pieces": ((1, 150, 200, 2, 1), (192, 128), {"alibi": SLOPES[0, ::2], "causal": True}),
    "256": ((1, 140, 140, 2, 2), (256, 256), {"alibi": SLOPES[0, 1:3], "causal": True}),
}


def draw(sizes: tuple[int, ...], width: tuple[int, int], device: torch.device) -> list[torch.Tensor]:
    batch, tokens, keys, heads, key_heads = sizes
    generator = torch.Generator().manual_seed(tokens)
    shapes = (
        (batch, tokens, heads, width[0]),
        (batch, keys, key_heads, width[0]),
        (batch, keys, key_heads, width[1]),
    )
    return [torch.randn(shape, generator=generator).to(device, torch.bfloat16) for shape in shapes]


def results_of(tensors: list[torch.Tensor], options: dict[str, Any], backend: Any) -> list[torch.Tensor]:
    """Returns the output, lse, and all gradients."""
    options, wanted = dict(options), [x.requires_grad_() for x in tensors]
    if "sink" in options:
        options["sink"] = options["sink"].detach().clone().requires_grad_()
        wanted.append(options["sink"])
    out, lse = flash_attention(*tensors, return_lse=True, backend=backend, **options)
    generator = torch.Generator().manual_seed(7)
    weights = torch.randn(out.shape, generator=generator).to(out.device, torch.bfloat16)
    finite = lse.masked_fill(lse == -torch.inf, 0.0)
    gradients = torch.autograd.grad((out * weights).double().sum() + finite.double().sin().sum(), wanted)
    return [out.detach(), lse.detach(), *gradients]


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_they_agree_with_the_definition(
    case: tuple[tuple[int, ...], tuple[int, int], dict[str, Any]], launched: list[str], device: torch.device
) -> None:
    sizes, width, options = case
    options = {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in options.items()}
    tensors = draw(sizes, width, device)
    found = results_of([x.clone() for x in tensors], options, "triton")
    with poison_allocations():
        again = results_of([x.clone() for x in tensors], options, "triton")
    assert all(torch.equal(one, other) for one, other in zip(found, again))
    backward = ["hopper_backward_kernel"] if max(width) <= 128 else ["masked_query_kernel", "masked_key_kernel"]
    assert set(launched) - {"sink_kernel"} == {"hopper_forward_kernel", *backward}
    wide = {name: x.double() if isinstance(x, torch.Tensor) else x for name, x in options.items()}
    eager = results_of([x.clone() for x in tensors], options, "torch")
    expected = results_of([x.double() for x in tensors], wide, "torch")
    flash_cases.assert_as_exact(found, eager, expected)


@pytest.mark.parametrize("slope", [torch.nan, torch.inf])
def test_a_slope_that_is_not_finite_stays_in_its_head(
    slope: float, launched: list[str], device: torch.device
) -> None:
    results = []
    for value in (0.25, slope):
        options = {"alibi": torch.tensor([0.5, value], device=device), "causal": True}
        out, lse, *gradients = results_of(draw((1, 130, 130, 2, 2), (128, 128), device), options, "triton")
        results.append((out[:, :, 0], lse[:, 0], *(x[:, :, 0] for x in gradients)))
    assert all(torch.equal(one, other) for one, other in zip(*results))
    assert out[:, :, 1].isnan().all()
    assert "hopper_forward_kernel" in launched


@pytest.mark.parametrize(
    "options",
    [
        {"softcap": 5.0},
        {"window": (20, 0)},
        {"seqused_k": torch.tensor([70])},
        {"mask": torch.ones(1, 1, 80, 80).bool()},
    ],
    ids=lambda options: next(iter(options)),
)
def test_other_options_take_other_kernels(
    options: dict[str, Any], launched: list[str], device: torch.device
) -> None:
    options = {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in options.items()}
    q, k, v = draw((1, 80, 80, 2, 2), (64, 64), device)
    flash_attention(q, k, v, alibi=SLOPES[0, :2].to(device), backend="triton", **options)
    assert launched == ["masked_forward_kernel"]
