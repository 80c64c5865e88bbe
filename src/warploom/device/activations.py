"""Activations and their derivatives on float32 tiles (rows, features), in the few instructions they need.

Triton's ``exp`` and ``/`` guard against denormal results, which costs a comparison and two products each. Here
they flush to zero: no more than 2⁻¹²⁶ is lost, and derivatives of activations are bound by memory, not by arithmetic.
"""

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
LOG2_E = tl.constexpr(1.4426950216293335)  # log₂e in float32
LOG2_E_LOW = tl.constexpr(1.925963033500011e-08)  # log₂e less that


@triton.jit
def widen(x):
    """Returns ``x`` in float32, by one instruction for each of two bfloat16 in a register: a conversion takes two."""
    if INTERPRETED or x.dtype != tl.bfloat16:
        y = x.to(tl.float32)
    else:
        bits = tl.inline_asm_elementwise(
            "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;", "=r,=r,r", [x], dtype=tl.int32, is_pure=True, pack=2
        )
        y = bits.to(tl.float32, bitcast=True)
    return y


@triton.jit
def power_of_two(x):
    """Returns 2ˣ to 2 units in the last place; zero where the result would be denormal."""
    if INTERPRETED:  # the interpreter knows no PTX
        y = tl.exp2(x)
    else:
        y = tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    return y


@triton.jit
def exponential_float32(x):
    """Returns eˣ to about 1 unit in the last place, where `exponential` is not enough: for results in float32.

    The special function unit is 2 units off, and rounding x · log₂e costs one for each unit of its size. Here the
    exponent is kept in two parts, and 2 to the power of its fraction is a polynomial.
    """
    x = tl.where(x < -90.0, -90.0, x)  # the result is zero long before
    exponent = tl.fma(x, LOG2_E, 0.0)  # not `*`, which the compiler may fuse with what follows
    low = tl.fma(x, LOG2_E_LOW, tl.fma(x, LOG2_E, -exponent))
    whole = tl.minimum(tl.floor(exponent + 0.5), 128.0)
    f = (exponent - whole) + low
    y = tl.fma(f, 1.5252733804e-5, 1.5403530393e-4)  # ln 2ᵏ / k!, which on |f| ≤ 1/2 is 7e-9 off
    y = tl.fma(f, y, 1.3333558146e-3)
    y = tl.fma(f, y, 9.6181291076e-3)
    y = tl.fma(f, y, 5.5504108665e-2)
    y = tl.fma(f, y, 2.4022650696e-1)
    y = tl.fma(f, y, 6.9314718056e-1)
    y = tl.fma(f, y, 1.0)
    power = ((whole.to(tl.int32) + 127) << 23).to(tl.float32, bitcast=True)
    return tl.where(exponent < -126.0, 0.0, y * power)


@triton.jit
def exponential(x):
    """Returns eˣ to 2 units in the last place of the result and one of ``x``; zero where it would be denormal."""
    return power_of_two(x * LOG2_E)


@triton.jit
def reciprocal(x):
    """Returns 1 / x to 1 unit in the last place; zero for an infinite or very large x."""
    if INTERPRETED:
        y = 1.0 / x
    else:
        y = tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    return y


@triton.jit
def sigmoid(x):
    """Returns 1 / (1 + e⁻ˣ)."""
    return reciprocal(1.0 + exponential(-x))


@triton.jit
def tanh(x):
    """Returns the hyperbolic tangent, to about 3 units in the last place."""
    z = x * x
    y = tl.fma(z, -5.717033225e-3, 2.065057574e-2)  # minimax for |x| ≤ 0.625, 4e-9 off
    y = tl.fma(z, y, -5.374349415e-2)
    y = tl.fma(z, y, 1.333149123e-1)
    y = tl.fma(z, y, -3.333328392e-1)
    size = tl.abs(x)
    large = 1.0 - 2.0 * reciprocal(1.0 + exponential(2.0 * size))
    return tl.where(size < 0.625, tl.fma(y * z, x, x), tl.where(x < 0.0, -large, large))


@triton.jit
def activate(x, ACTIVATION: tl.constexpr):
    """Returns ``x`` after an elementwise activation: ``none``, ``relu``, ``sigmoid`` or ``silu``."""
    if ACTIVATION == "relu":
        x = tl.where(x < 0.0, 0.0, x)  # keeps NaN, which a maximum would drop
    elif ACTIVATION == "sigmoid":
        x = sigmoid(x)
    elif ACTIVATION == "silu":
        x = x * sigmoid(x)
    return x


@triton.jit
def activate_backward(x, dy, ACTIVATION: tl.constexpr):
    """Returns the gradient of `activate` with respect to ``x``, recomputed from ``x``."""
    if ACTIVATION == "relu":
        dy = tl.where(x <= 0.0, 0.0, dy)  # at NaN that of the identity, as the value is
    elif ACTIVATION == "sigmoid":
        y = sigmoid(x)
        dy = dy * (y * (1.0 - y))
    elif ACTIVATION == "silu":
        y = sigmoid(x)
        dy = dy * (y * (1.0 + x * (1.0 - y)))
    return dy


@triton.jit
def powers(x, row_max):
    """Returns ``exp(x − row_max)`` for the largest of each row (rows, 1), to 2 units in the last place of eˣ / Σ eˣ."""
    return exponential(x - row_max)


@triton.jit
def softmax_parts(x):
    """Returns softmax over the last axis as powers and the reciprocal of their sum (rows, 1). Masked features are −inf."""
    x = powers(x, tl.max(x, axis=1)[:, None])
    return x, reciprocal(tl.sum(x, axis=1))[:, None]


@triton.jit
def softmax_pair_parts(x1, x2):
    """Returns softmax over the last axes of two tiles together, as powers of each and the reciprocal of their sum."""
    row_max = tl.max(tl.maximum(x1, x2), axis=1)[:, None]
    x1 = powers(x1, row_max)
    x2 = powers(x2, row_max)
    return x1, x2, reciprocal(tl.sum(x1 + x2, axis=1))[:, None]
