"""Rotation of pairs of features by angles, and its gradients, with the activation that comes before it."""

from __future__ import annotations

import triton
import triton.language as tl

from warploom.device.activations import activate, activate_backward, softmax_pair_parts, softmax_parts


@triton.jit
def activate_input(x1, x2, spec: tl.constexpr, ACTIVATION: tl.constexpr, BLOCK_F: tl.constexpr):
    """Returns two float32 tiles and a factor, whose product is x̄: 1.0, or for softmax reciprocals of sums (R, 1)."""
    scale = 1.0
    if ACTIVATION == "softmax":
        inside = (tl.arange(0, BLOCK_F) < spec.F)[None, :]
        x1 = tl.where(inside, x1, float("-inf"))
        if spec.KIND == "cosine":
            x1, scale = softmax_parts(x1)
            x2 = x1
        else:
            x1, x2, scale = softmax_pair_parts(x1, tl.where(inside, x2, float("-inf")))
    else:
        x1 = activate(x1, ACTIVATION)
        x2 = activate(x2, ACTIVATION)
    return x1, x2, scale


@triton.jit
def rotate(x1, x2, cosine, sine, KIND: tl.constexpr):
    """Returns the rotated pair (``x1``, ``x2``), or for ``cosine`` both products of ``x1``."""
    if KIND == "cosine":
        first = x1 * cosine
        second = x1 * sine
    else:
        # Fused by hand, so that every variant of the kernel gives the same bits.
        first = tl.fma(x1, cosine, -(x2 * sine))
        second = tl.fma(x2, cosine, x1 * sine)
    return first, second


@triton.jit
def rotate_pair_back(g1, g2, cosine, sine):
    """Returns the gradients of both members of a pair. For ``cosine``: that of x̄, and that of the angle divided by x̄."""
    d1 = tl.fma(g1, cosine, g2 * sine)
    d2 = tl.fma(g2, cosine, -(g1 * sine))
    return d1, d2


@triton.jit
def rotate_backward(
    x1, x2, g1, g2, cosine, sine,
    spec: tl.constexpr, ACTIVATION: tl.constexpr, THETA: tl.constexpr, BLOCK_F: tl.constexpr,
):  # fmt: skip
    """Returns the gradients of both tiles of `load_input` and, if ``THETA``, of the angles; (R, F) each, float32."""
    d1, d2 = rotate_pair_back(g1, g2, cosine, sine)
    dphi = d2
    if ACTIVATION != "none" or THETA:
        y1, y2, scale = activate_input(x1, x2, spec, ACTIVATION, BLOCK_F)
        if ACTIVATION == "softmax":  # the sum of y · d is taken beside that of the powers, not after it
            if spec.KIND == "cosine":
                mean = tl.sum(y1 * d1, axis=1)[:, None] * scale
            else:
                mean = tl.sum(tl.fma(y1, d1, y2 * d2), axis=1)[:, None] * scale
            y1 *= scale
            y2 *= scale
        dphi = y1 * d2 if spec.KIND == "cosine" else tl.fma(y1, d2, -(y2 * d1))
        if ACTIVATION == "softmax":
            d1 = y1 * (d1 - mean)
            if spec.KIND != "cosine":
                d2 = y2 * (d2 - mean)
        else:
            d1 = activate_backward(x1, d1, ACTIVATION)
            if spec.KIND != "cosine":
                d2 = activate_backward(x2, d2, ACTIVATION)
    return d1, d2, dphi
