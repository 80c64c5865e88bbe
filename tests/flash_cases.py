"""Inputs of flash attention, and how results are judged, which its tests share."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import seeds
import torch

from warploom import flash_attention
from warploom.ops.flash_attention.bench import OPERATOR
from warploom.ops.flash_attention.reference import flash_attention as flash_attention_reference
from warploom.ops.spec import Operator
from warploom.runtime.backend import HAS_TRITON
from warploom.testing.conformance import compute_gradients, draw_like, judge_draws, upcast

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
    draw: int = 0,
    **options: Any,
) -> Inputs:
    keys, key_heads = n if m is None else m, heads if key_heads is None else key_heads
    shapes = {"q": (batch, n, heads, d), "k": (batch, keys, key_heads, d), "v": (batch, keys, key_heads, e or d)}
    generator = seeds.generator(5 + 100 * draw)
    made = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    for name in ("q", "k"):
        made[name] *= size
    return {name: t.to(device, dtype).requires_grad_() for name, t in made.items()} | options


def assert_right(
    inputs: Inputs | list[Inputs],
    backend: str,
    more: Callable[[], list[Inputs]] = list,
    operator: Operator = OPERATOR,
) -> None:
    """``inputs``: one draw of them, or several that are judged together; ``more`` as for `judge_draws`."""
    judgement = judge_draws(operator, inputs if isinstance(inputs, list) else [inputs], backend, more)
    assert judgement.fwd.ok, f"fwd: {judgement.fwd.describe()}"
    assert judgement.bwd is None or judgement.bwd.ok, f"bwd: {judgement.bwd.describe()}"
    assert not judgement.modified


class _Kept(torch.autograd.Function):
    """Outputs as they are. The output is off by ``error``, which is in ``δ = rowsum(dO ⊙ O)`` of the backward.

    There ``dS = P ⊙ (dP − δ + dlse)``: an error of δ acts as one of the gradient of lse does, with the other sign.
    """

    @staticmethod
    def forward(ctx: Any, out: Tensor, lse: Tensor, error: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(error)
        return out.clone(), lse.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor, dlse: Tensor) -> tuple[Tensor, Tensor, None]:
        (error,) = ctx.saved_tensors
        return grad, dlse - (grad * error).sum(-1).mT, None


def _keeping_the_output(**inputs: Any) -> tuple[Tensor, Tensor]:
    out, lse = flash_attention_reference(**inputs)
    if out.dtype == torch.float64:
        return out, lse
    with torch.no_grad():
        error = out.double() - flash_attention_reference(**upcast(inputs))[0]
    return _Kept.apply(out, lse, error)  # type: ignore[no-any-return]


KEEPING_THE_OUTPUT = replace(OPERATOR, reference=_keeping_the_output)
"""Whose budget is that of attention in PyTorch which keeps, of the forward, the rounded output and lse alone.

Where queries have nearly all weight on one key, that δ is of a rounded output is most of a gradient's error.
"""


def run(inputs: Inputs, backend: str) -> tuple[Tensor, ...]:
    """Output, lse, and gradients of q, k, v, where both outputs have random gradients."""
    outputs = flash_attention(**{**inputs, "return_lse": True}, backend=backend)
    found = compute_gradients(outputs, inputs, draw_like(outputs))
    return *(t.detach() for t in outputs), *found.values()


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


def assert_as_exact(found: Sequence[Tensor], eager: Sequence[Tensor], exact: Sequence[Tensor]) -> None:
    """Compare results with those in float64: errors are at most twice eager's, and 0.8 % of the largest element."""
    for number, (one, other, right) in enumerate(zip(found, eager, exact, strict=True)):
        assert torch.equal(one == -torch.inf, right == -torch.inf), number
        seen = right != -torch.inf
        error, usual = ((x.double() - right)[seen].abs().max() for x in (one, other))
        size = right[seen].abs().max()
        assert error <= 2 * usual + 8e-3 * size, (number, float(error), float(usual), float(size))
