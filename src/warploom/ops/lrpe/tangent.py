"""LRPE in forward mode, on kernels."""

from __future__ import annotations

from typing import Any

import torch

from warploom.ops.lrpe import reference
from warploom.ops.lrpe.call import LrpeInputs, LrpeOptions
from warploom.ops.lrpe.operator import OPERATOR
from warploom.runtime.dispatch import Tangent, apply_registered, differentiate_forward

Tensor = torch.Tensor


def _differentiate(inputs: LrpeInputs, tangents: Any, offset: int, options: LrpeOptions) -> tuple[Tensor]:
    """Returns the tangent of the encoding: that of x encoded, and of angles times the encoding a right angle on.

    Several parts are in float32, and rounded once. What an activation makes of x is differentiated in PyTorch.
    """
    x, dx, dtheta = inputs.x, tangents.x, tangents.theta
    wide = torch.promote_types(x.dtype, torch.float32)
    if options.activation != "none":
        linear = options._replace(activation="none")

        def encode_active(x: Tensor, theta: Tensor) -> Tensor:
            whole = x if x.dim() == 4 else x.unsqueeze(2)
            active = reference.activate(whole, options.activation, inputs.cu_seqlens).view(x.shape)
            out: Tensor = apply_registered(OPERATOR, inputs._replace(x=active, theta=theta), offset, linear)[0]
            return out.to(x.dtype)

        return differentiate_forward(encode_active, (x, inputs.theta), (dx, dtheta))[1]  # type: ignore[return-value]

    def encode(x: Tensor) -> Tensor:
        out: Tensor = apply_registered(OPERATOR, inputs._replace(x=x), offset, options)[0]
        return out

    if dtheta is None:
        return (encode(dx),)
    encoded = encode(x.to(wide))
    encoded = encoded if x.dim() == 4 else encoded.unsqueeze(2)
    places = inputs.offsets if inputs.offsets is not None else offset
    s = reference.coordinates(
        x, options.grid or None, options.prefix, places, inputs.position_ids, inputs.cu_seqlens
    )
    members = 1 if options.kind == "cosine" else 2
    dphi = reference.angles(s.double(), dtheta.double(), x.shape[-1] // members).to(wide)
    if options.kind == "interleaved":
        first, second = encoded[..., 0::2], encoded[..., 1::2]
        turned = torch.stack((-second * dphi, first * dphi), -1).flatten(-2)
    else:
        first, second = encoded.chunk(2, -1)
        turned = torch.cat((-second * dphi, first * dphi), -1)
    turned = turned if x.dim() == 4 else turned.squeeze(2)
    return ((turned if dx is None else turned + encode(dx.to(wide))).to(x.dtype),)


TANGENT = Tangent(_differentiate)
