"""Caps of logits as attention on Hopper works them out, in assembly, beside float64."""

import ptx
import pytest
import seeds
import torch

from warploom.runtime.backend import HAS_TRITON

pytestmark = pytest.mark.skipif(not HAS_TRITON, reason="needs Triton")


def scalars(scale: float, softcap: float, base: float) -> tuple[float, ...]:
    """What `softcap.capped` hands to its assembly besides logits."""
    from warploom.ops.flash_attention.hopper import softcap as caps

    first, square = softcap * scale, scale * scale
    return first, caps.FIRST.value * first * square, caps.SECOND.value * first * square**2, scale, softcap, base


@pytest.mark.parametrize("size", [0.02, 0.1, 0.3, 1.0, 30.0])
@pytest.mark.parametrize(("softcap", "scale"), [(11.1, 0.0025), (2.9, 0.1), (0.0015, 100.0), (1e5, 1e-6)])
@pytest.mark.parametrize("pack", [32, 64])
def test_capped_logits(pack: int, softcap: float, scale: float, size: float) -> None:
    """And two to the power of them."""
    from warploom.ops.flash_attention.hopper import softcap as caps

    x = torch.randn(64, 128, generator=seeds.generator()) * size / scale
    x[5, 3], x[6, 2] = torch.inf, -1e30
    given = [x, *(torch.full_like(x, each) for each in scalars(scale, softcap, 15.0))]
    right = softcap * torch.tanh(x.double() * scale) - 15
    text, power = (caps.CAPPED_32, caps.EXPONENTIALS_32) if pack == 32 else (caps.CAPPED_64, caps.EXPONENTIALS_64)
    operands = caps.OPERANDS_32 if pack == 32 else caps.OPERANDS_64
    (found,) = ptx.run(text.value, operands.value, given, [torch.float32], pack)
    error = 5e-7 * (right + 15).abs() + 2e-6
    assert (found - right).abs().le(error).all()
    if softcap < 1e5:
        (found,) = ptx.run(power.value, operands.value, given, [torch.float32], pack)
        assert (found / torch.exp2(right) - 1).abs().le(error).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [0.02, 0.1, 0.3, 1.0, 30.0])
@pytest.mark.parametrize(("softcap", "scale"), [(11.1, 0.0025), (2.9, 0.1), (0.0015, 100.0)])
@pytest.mark.parametrize("pack", [32, 64])
def test_weights_of_capped_logits(pack: int, softcap: float, scale: float, size: float, dtype: torch.dtype) -> None:
    """And these times the derivative of the cap; nothing where a key is not seen."""
    from warploom.ops.flash_attention.hopper import softcap as caps

    generator = seeds.generator()
    x = torch.randn(64, 128, generator=generator) * size / scale
    hidden = torch.rand(64, 128, generator=generator) < 0.1
    lse = torch.randn(64, 128, generator=generator)
    text, operands = (caps.CAPPED_32, caps.OPERANDS_32) if pack == 32 else (caps.CAPPED_64, caps.OPERANDS_64)
    given = [x, *(torch.full_like(x, each) for each in scalars(scale, 1.0, 0.0))]
    (tangents,) = ptx.run(text.value, operands.value, given, [torch.float32], pack)
    tangents[hidden] = caps.HIDDEN.value
    text = caps.BFLOAT16_WEIGHTS if dtype == torch.bfloat16 else caps.FLOAT16_WEIGHTS
    given = [tangents, lse, torch.full_like(x, softcap)]
    weights, slopes = ptx.run(text.value, caps.WEIGHTS_OPERANDS.value, given, [dtype, torch.float32], 2)
    capped = torch.tanh(x.double() * scale)
    right = torch.where(hidden, 0.0, torch.exp2(softcap * capped - lse))
    assert (weights - right).abs().le((torch.finfo(dtype).eps + 2e-5) * right + 1e-7).all()
    assert (slopes - right * (1 - capped**2)).abs().le(2e-5 * right).all()
