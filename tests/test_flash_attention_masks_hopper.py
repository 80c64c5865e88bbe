"""Masks by tiles on the kernels for Hopper: against the definition in float64, on one GPU."""

from typing import Any

import pytest
import torch

from warploom import block_mask, flash_attention
from warploom.runtime.choices import collect_notes

pytestmark = pytest.mark.gpu


def documents(tokens: int) -> torch.Tensor:
    """Three packed documents, the second of which is as long as a tile of a mask, and not at its place."""
    document = torch.zeros(tokens, dtype=torch.long)
    document[tokens // 3 :] = 1
    document[tokens // 3 + 128 :] = 2
    return (document[:, None] == document[None, :])[None, None]


def blocks(*shape: int) -> torch.Tensor:
    """A mask of tiles of all kinds; queries 5 and 130 see nothing, and no query sees keys 64 … 70."""
    generator = torch.Generator().manual_seed(sum(shape))
    tiles = torch.rand((*shape[:2], -(-shape[2] // 128), -(-shape[3] // 128)), generator=generator)
    kinds = tiles.repeat_interleave(128, 2).repeat_interleave(128, 3)[:, :, : shape[2], : shape[3]]
    mask = (kinds < 0.4) | ((kinds < 0.7) & (torch.rand(shape, generator=generator) < 0.3))
    mask[:, :, [5, 130]] = False
    mask[..., 64:71] = False
    return mask


def tree(tokens: int, keys: int) -> torch.Tensor:
    """Proposed tokens, of which each sees some before it, and all but the first see the cache."""
    generator = torch.Generator().manual_seed(tokens)
    mask = torch.rand(tokens, keys, generator=generator) < 0.4
    mask[1:, : keys - tokens] = True
    mask[0] = False
    return mask[None, None]


CASES: dict[str, tuple[tuple[int, ...], torch.Tensor, dict[str, Any]]] = {
    "documents": ((2, 700, 700, 4, 2), documents(700), {"causal": True}),
    "blocks": ((2, 700, 900, 4, 4), blocks(2, 4, 700, 900), {}),
    "blocks of entries": ((2, 333, 1000, 4, 1), blocks(2, 1, 333, 1000), {"causal": True}),
    "blocks of heads": ((1, 640, 512, 4, 4), blocks(1, 4, 640, 512), {"sink": True}),
    "bands": (
        (1, 1500, 1500, 2, 2),
        ((torch.arange(1500)[:, None] - torch.arange(1500)[None, :]).abs() % 400 < 50)[None, None],
        {"scale": 0.3},
    ),
    "few queries": ((1, 40, 3000, 4, 2), tree(40, 3000), {"sink": True}),
    "few queries of causal attention": (
        (2, 128, 2500, 4, 4),
        blocks(2, 1, 260, 2500)[:, :, :128],
        {"causal": True},
    ),
    "nothing": ((1, 256, 256, 2, 2), torch.zeros(1, 1, 256, 256, dtype=torch.bool), {}),
}


def results_of(
    tensors: list[torch.Tensor], options: dict[str, Any], mask: Any, backend: Any
) -> tuple[torch.Tensor, ...]:
    """Output, lse and gradients."""
    wanted = [x.requires_grad_() for x in tensors]
    names = ("q", "k", "v", "sink")
    out, lse = flash_attention(**dict(zip(names, wanted)), mask=mask, return_lse=True, backend=backend, **options)
    finite = lse.masked_fill(lse == -torch.inf, 0.0)
    generator = torch.Generator(out.device).manual_seed(7)
    weight = torch.randn(out.shape, generator=generator, device=out.device).to(out.dtype)
    gradients = torch.autograd.grad((out * weight).double().sum() + finite.double().sin().sum(), wanted)
    return out.detach(), lse.detach(), *gradients


def draw(sizes: tuple[int, ...], width: tuple[int, int], dtype: torch.dtype, sink: bool) -> list[torch.Tensor]:
    batch, tokens, keys, heads, key_heads = sizes
    generator = torch.Generator("cuda").manual_seed(4)
    shapes: list[tuple[int, ...]] = [
        (batch, tokens, heads, width[0]), (batch, keys, key_heads, width[0]), (batch, keys, key_heads, width[1]),
    ]  # fmt: skip
    tensors = [torch.randn(s, generator=generator, device="cuda").to(dtype) for s in shapes]
    return [*tensors, torch.randn(heads, generator=generator, device="cuda")] if sink else tensors


@pytest.mark.parametrize("width", [(64, 64), (128, 128), (40, 56), (256, 256), (192, 128)], ids=str)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_they_agree_with_the_definition(
    case: tuple[tuple[int, ...], torch.Tensor, dict[str, Any]], width: tuple[int, int]
) -> None:
    sizes, dense, options = case
    options = dict(options)
    tensors = draw(sizes, width, torch.bfloat16, options.pop("sink", False))
    mask = block_mask(dense.cuda())
    found = results_of([x.clone() for x in tensors], options, mask, "triton")
    again = results_of([x.clone() for x in tensors], options, mask, "triton")
    for one, other in zip(found, again):
        assert torch.equal(one, other)
    wide = [x.double() for x in tensors]
    expected = results_of(wide, options, dense.cuda(), "torch")
    for one, other in zip(found, expected):
        size = other[other.isfinite()].abs().max() if other.isfinite().any() else torch.zeros(())
        torch.testing.assert_close(one.double(), other, rtol=0.0, atol=2e-2 * float(size) + 1e-6)


@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
@pytest.mark.parametrize("width", [64, 128])
def test_keys_that_no_query_sees_reach_nothing(width: int, poison: float) -> None:
    sizes, dense, options = CASES["blocks of entries"]
    mask, results = block_mask(dense.cuda()), []
    for value in (0.0, poison):
        q, k, v = draw(sizes, (width, width), torch.bfloat16, False)
        k[:, 64:71], v[:, 64:71] = value, value
        results.append(results_of([q, k, v], options, mask, "triton"))
    for one, other in zip(*results):
        assert torch.equal(one, other)


@pytest.mark.parametrize("width", [64, 128, 256])
def test_they_are_chosen(width: int) -> None:
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs a Hopper GPU")
    sizes, dense, _ = CASES["documents"]
    tensors = [x.requires_grad_() for x in draw(sizes, (width, width), torch.bfloat16, False)]
    with collect_notes() as notes:
        out = flash_attention(*tensors, mask=block_mask(dense.cuda()), scale=0.2 + width / 1e5)
        torch.autograd.grad(out.square().sum(), tensors)
    text = str(notes)
    assert "HopperMaskedForward: The kernel" in text
    assert ("HopperMaskedBackward: The kernel" in text) == (width <= 128)
