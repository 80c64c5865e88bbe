"""Activations and their derivatives, on float32 tiles. The last axis is the features."""

import triton
import triton.language as tl


@triton.jit
def activate(x, ACTIVATION: tl.constexpr):
    """An elementwise activation: ``none``, ``relu``, ``sigmoid`` or ``silu``."""
    if ACTIVATION == "relu":
        x = tl.where(x < 0.0, 0.0, x)  # keeps NaN, which a maximum would drop
    elif ACTIVATION == "sigmoid":
        x = tl.sigmoid(x)
    elif ACTIVATION == "silu":
        x = x * tl.sigmoid(x)
    return x


@triton.jit
def activate_backward(x, dy, ACTIVATION: tl.constexpr):
    """Gradient of `activate` with respect to ``x``, recomputed from ``x``."""
    if ACTIVATION == "relu":
        dy = tl.where(x > 0.0, dy, 0.0)
    elif ACTIVATION == "sigmoid":
        y = tl.sigmoid(x)
        dy = dy * y * (1.0 - y)
    elif ACTIVATION == "silu":
        y = tl.sigmoid(x)
        dy = dy * y * (1.0 + x * (1.0 - y))
    return dy


@triton.jit
def softmax(x):
    """Softmax over the last axis of a 3-D tile. Masked features must be −inf."""
    x = tl.exp(x - tl.max(x, axis=2, keep_dims=True))
    return x / tl.sum(x, axis=2, keep_dims=True)


@triton.jit
def softmax_pair(x1, x2):
    """Softmax over the last axes of two 3-D tiles taken as one row. Masked features must be −inf."""
    top = tl.max(tl.maximum(x1, x2), axis=2, keep_dims=True)
    x1 = tl.exp(x1 - top)
    x2 = tl.exp(x2 - top)
    total = tl.sum(x1 + x2, axis=2, keep_dims=True)
    return x1 / total, x2 / total
