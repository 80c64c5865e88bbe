"""The gated feed-forward layer."""

from __future__ import annotations

import torch
from torch import nn

from warploom.nn.common import check_sizes
from warploom.runtime.names import name_arguments


@name_arguments
class SwiGLU(nn.Module):
    """``down(silu(gate(x)) ⊙ up(x))``, with gate and up in one matrix product.

    Args:
        d_model: Features of the input and the output.
        d_ff: Features in between; the layer has ``3 · d_model · d_ff`` parameters.

    Attributes:
        grouped: The number of rows after which ``gate_up`` alternates between gate and up, see `group`; 0 if all
            rows of gate come first.

    Shapes: ``(…, d_model)`` to ``(…, d_model)``.

    Raises:
        ArgumentError: A size is not positive.
        DtypeError: A size is not an int.

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
        check_sizes("SwiGLU", d_model=d_model, d_ff=d_ff)
        self.gate_up = nn.Linear(d_model, 2 * d_ff, bias=False)
        self.down = nn.Linear(d_ff, d_model, bias=False)
        self.grouped = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the layer to every token on its own."""
        if self.grouped:
            pairs = self.gate_up(x).unflatten(-1, (-1, 2, self.grouped))
            gate, up = pairs.unbind(pairs.dim() - 2)  # at -2, DTensor of PyTorch 2.11 stacks the gradients wrongly
            return self.down((nn.functional.silu(gate) * up).flatten(-2))  # type: ignore[no-any-return]
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        out: torch.Tensor = self.down(nn.functional.silu(gate) * up)
        return out

    @torch.no_grad()
    def group(self, features: int) -> None:
        """Order the rows in alternating blocks of gate and up, of so many rows each; with 0, all of gate first.

        A shard of the rows is then a layer of fewer inner features.
        """
        weight, size = self.gate_up.weight, self.down.in_features
        before, after = self.grouped or size, features or size
        halves = weight.unflatten(0, (-1, 2, before)).transpose(0, 1).flatten(1, 2)  # gate, and up
        weight.copy_(halves.unflatten(1, (-1, after)).transpose(0, 1).flatten(0, 2))
        self.grouped = features

    def extra_repr(self) -> str:
        """Returns the layer's arguments."""
        return f"d_model={self.down.out_features}, d_ff={self.down.in_features}"
