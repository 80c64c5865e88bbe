"""The definition in plain PyTorch: any device, any float dtype. This file is the specification."""

import torch


def rms_norm(x: torch.Tensor, weight: torch.Tensor, *, eps: float = 1e-6) -> torch.Tensor:
    """``x · weight / sqrt(mean(x²) + eps)`` over the features: (B, N, D) to (B, N, D)."""
    value = x.to(torch.promote_types(x.dtype, torch.float32))
    scale = torch.rsqrt(value.square().mean(dim=-1, keepdim=True) + eps)
    return (value * scale * weight).to(x.dtype)
