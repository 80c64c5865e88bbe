"""The block of a Transformer, an encoder's or a decoder's."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from warploom import BlockMask
from warploom.errors import ArgumentError, DtypeError, fault
from warploom.nn.attention import Attention
from warploom.nn.common import check_sizes
from warploom.nn.mlp import SwiGLU
from warploom.runtime.names import name_arguments

Tensor = torch.Tensor


@name_arguments
class Block(nn.Module):
    """``x + attention(norm(x))``, ``x + mlp(norm(x))``, and attention to another sequence in between, if any.

    The attention layer decides which block it is: an encoder's is not causal, a decoder's is.

    Args:
        d_model: Features of the input and the output.
        d_ff: Inner features of `SwiGLU`.
        attention: an attention layer of this package, of ``d_model`` features.
        cross: `Attention` with ``context_dim``, or None.
        norm_eps: Epsilon of the norms.

    Shapes: ``(B, N, d_model)`` to ``(B, N, d_model)``.

    Raises:
        ArgumentError: A size is not positive.
        DtypeError: An argument has the wrong type.

    Example:
        ```python
        import torch
        from warploom.nn import Attention, Block

        encoder = Block(64, 256, Attention(64, heads=4))
        decoder = Block(64, 256, Attention(64, heads=4, causal=True), cross=Attention(64, heads=4, context_dim=64))
        context = encoder(torch.randn(2, 10, 64))
        print(decoder(torch.randn(2, 7, 64), context=context).shape)  # torch.Size([2, 7, 64])
        ```
    """

    def __init__(
        self,
        d_model: int,
        d_ff: int,
        attention: nn.Module,
        *,
        cross: Attention | None = None,
        norm_eps: float = 1e-5,
    ) -> None:
        super().__init__()
        check_sizes("Block", d_model=d_model, d_ff=d_ff)
        for argument, layer in (("attention", attention), ("cross", cross)):
            if layer is not None and not isinstance(layer, nn.Module):
                raise fault(DtypeError, "Block", argument, "a layer", type(layer).__name__)
        self.attention_norm = nn.RMSNorm(d_model, norm_eps)
        self.attention = attention
        self.cross = cross
        if cross is not None:
            self.cross_norm = nn.RMSNorm(d_model, norm_eps)
        self.mlp_norm = nn.RMSNorm(d_model, norm_eps)
        self.mlp = SwiGLU(d_model, d_ff)

    def forward(
        self,
        x: Tensor,
        cache: Any = None,
        position_ids: Tensor | None = None,
        *,
        context: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        cu_seqlens_k: Tensor | None = None,
        mask: BlockMask | Tensor | None = None,
        bias: Tensor | None = None,
        alibi: Tensor | None = None,
    ) -> Tensor:
        """Apply the block to tokens ``x``.

        Args:
            x: ``(B, N, d_model)``.
            cache: The cache of the attention layer.
            position_ids: Those of `Attention`.
            context: ``(B, M, context_dim)``, what ``cross`` attends to.
            cu_seqlens: Packed sequences of ``x``, see the attention layer.
            cu_seqlens_k: Those of ``context``.
            mask: The keys that ``attention`` sees, as `Attention` takes it.
            bias: Numbers added to its logits.
            alibi: Slopes of its heads.

        Returns:
            ``(B, N, d_model)``.

        Raises:
            ArgumentError: There is a context without ``cross``, or the other way round.
        """
        given: dict[str, Any] = {
            "position_ids": position_ids, "cu_seqlens": cu_seqlens, "mask": mask, "bias": bias, "alibi": alibi
        }  # fmt: skip
        given = {name: value for name, value in given.items() if value is not None}
        x = x + self.attention(self.attention_norm(x), cache=cache, **given)
        if self.cross is not None:
            bounds = {"cu_seqlens_q": cu_seqlens, "cu_seqlens_k": cu_seqlens_k}
            x = x + self.cross(self.cross_norm(x), context=context, **bounds)
        elif context is not None:
            raise fault(ArgumentError, "Block", "context", "None in a block without cross", "a tensor")
        out: Tensor = x + self.mlp(self.mlp_norm(x))
        return out
