"""The gated feed-forward layer."""

from __future__ import annotations

import torch
from torch import nn


class SwiGLU(nn.Module):
    """``down(silu(gate(x)) ⊙ up(x))``, with gate and up in one matrix product.

    Args:
        d_model: Features of the input and the output.
        d_ff: Features in between; the layer has ``3 · d_model · d_ff`` parameters.

    Shapes: ``(…, d_model)`` to ``(…, d_model)``.

    Source: Shazeer, "GLU Variants Improve Transformer", 2020, arXiv 2002.05202.

    Example:
        ```python
        import torch
        from warploom.nn import SwiGLU

        out = SwiGLU(d_model=64, d_ff=256)(torch.randn(2, 10, 64))
        ```
    """

    def __init__(self, d_model: int, d_ff: int) -> None:
        super().__init__()
        self.gate_up = nn.Linear(d_model, 2 * d_ff, bias=False)
        self.down = nn.Linear(d_ff, d_model, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the layer to every token on its own."""
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        out: torch.Tensor = self.down(nn.functional.silu(gate) * up)
        return out

    def extra_repr(self) -> str:
        """What the layer was built with."""
        return f"d_model={self.down.out_features}, d_ff={self.down.in_features}"
