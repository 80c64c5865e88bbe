"""Cosine and sine of ``position × frequency``, exact for every 32-bit position, and right for those of 64 bits.

A float32 product of a position and a frequency keeps 24 bits, of which the whole turns eat the leading ones:
at position 10⁶ the angle is already wrong by 0.06 rad. Here an angle is a fixed-point fraction of a turn, in
units of 2⁻³² turns. The angle gained per position is kept in two words: an integer, whose product with the
position wraps modulo 2³² exactly as the angle wraps modulo one turn, and a float32 remainder below one unit,
whose product with the position is small. Together they hold 48 bits behind the leading one of the frequency.
A position of 64 bits wraps as well: its lower 32 bits are the factor of the integer.
Integers that wrap are added and multiplied by `wrapping_add` and `wrapping_mul`, which no debug mode checks.
"""

from typing import NamedTuple

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))

# 1 / 2π in float32, what float32 leaves of it, and in float64.
INVERSE_TURN_HIGH = tl.constexpr(0.15915493667125702)
INVERSE_TURN_LOW = tl.constexpr(6.420638316600317e-09)
INVERSE_TURN = tl.constexpr(0.15915494309189535)
TWO_POW_32 = tl.constexpr(4294967296.0)
TWO_POW_MINUS_32 = tl.constexpr(2.3283064365386963e-10)
TURN = tl.constexpr(6.283185307179586)
ROUND = tl.constexpr(12582912.0)  # 1.5 · 2²³: a float32 this large has no fraction, so adding it rounds
ROUND_22 = tl.constexpr(3.0)  # the same to 22 bits of a fraction, and to 32
ROUND_32 = tl.constexpr(1.5 * 2.0**-9)
ROUND_32_AS_BITS = tl.constexpr(0x3B400000)
LARGEST = tl.constexpr(16777216.0)  # radians per position
EIGHTH_TURN = tl.constexpr(1 << 29)  # in units of 2⁻³² turns
QUARTER_TURN = tl.constexpr(1 << 30)
WITHIN_QUADRANT = tl.constexpr((1 << 30) - 1)
SIGN = tl.constexpr(-(2**31))
HALF_TURN_AND_HALF_A_BIT = tl.constexpr(-(2**31) + 2**8)  # of 23 bits
ONE_AS_BITS = tl.constexpr(0x3F800000)

# sin(2πr) / r and (cos(2πr) − 1) / r² in powers of r², minimax on |r| ≤ 1/8: 2e-9 and 5e-11 absolute.
S0 = tl.constexpr(6.28318529)
S1 = tl.constexpr(-41.34166263)
S2 = tl.constexpr(81.59255354)
S3 = tl.constexpr(-75.4020678)
C1 = tl.constexpr(-19.73920869)
C2 = tl.constexpr(64.93932647)
C3 = tl.constexpr(-85.44374173)
C4 = tl.constexpr(59.24596422)


@triton.jit
def wrapping_add(a, b):
    """Returns ``a + b`` modulo 2³²."""
    return tl.add(a, b, sanitize_overflow=False)


@triton.jit
def wrapping_mul(a, b):
    """Returns ``a · b`` modulo 2³²."""
    return tl.mul(a, b, sanitize_overflow=False)


class PhaseStep(NamedTuple):
    """An angle gained per position, in turns: ``whole · unit + rest``.

    Rest and unit are NaN where the angle is too large to be reduced, infinite or NaN.
    """

    whole: tl.tensor  # int32
    rest: tl.tensor  # float32
    unit: tl.tensor  # 2⁻³², float32


@triton.jit
def phase_step(theta):
    """Returns the `PhaseStep` of frequencies in radians per position."""
    if theta.dtype == tl.float64:
        turns = theta.to(tl.float64) * INVERSE_TURN
        turns -= tl.floor(turns + 0.5)
        high = turns.to(tl.float32)
        low = (turns - high.to(tl.float64)).to(tl.float32)
    else:
        theta = theta.to(tl.float32)
        high = tl.fma(theta, INVERSE_TURN_HIGH, 0.0)  # not `*`, which the compiler may fuse with what follows
        low = tl.fma(theta, INVERSE_TURN_LOW, tl.fma(theta, INVERSE_TURN_HIGH, -high))
        high -= (high + ROUND) - ROUND
        sum_ = high + low  # where theta is large, all of its fraction is in the low word
        low += high - sum_
        high = sum_
    # Rounded by adding a number whose last bit is what to round to, not by converting to integers: that runs at the rate
    # of sines and exponentials. The upper 22 bits, then the lower 10 with what the low word carries over, so that the
    # rest times a position still fits an int32. The bits of a sum are the integer; those of 3.0 leave no trace of it.
    upper = high + ROUND_22
    rest = high - (upper - ROUND_22)
    lower = rest + (low + ROUND_32)
    rest = (rest - (lower - ROUND_32)) + low
    whole = upper.to(tl.int32, bitcast=True) << 10
    whole = wrapping_add(whole, tl.sub(lower.to(tl.int32, bitcast=True), ROUND_32_AS_BITS, sanitize_overflow=False))
    known = tl.abs(theta) < LARGEST
    rest = tl.where(known, rest, float("nan"))
    unit = tl.where(known, TWO_POW_MINUS_32, float("nan")).to(tl.float32)
    return PhaseStep(whole, rest, unit)


@triton.jit
def fast_cos_sin(angle):
    """Returns the cosine and sine of float32 radians within half a turn, by the special function unit."""
    if INTERPRETED:
        cosine = tl.cos(angle)
        sine = tl.sin(angle)
    else:
        cosine = tl.inline_asm_elementwise(
            "cos.approx.ftz.f32 $0, $1;", "=f,f", [angle], dtype=tl.float32, is_pure=True, pack=1
        )
        sine = tl.inline_asm_elementwise(
            "sin.approx.ftz.f32 $0, $1;", "=f,f", [angle], dtype=tl.float32, is_pure=True, pack=1
        )
    return cosine, sine


@triton.jit
def cos_sin(position, step, HALF: tl.constexpr):
    """Returns the cosine and sine at integer positions of 32 or 64 bits, for a `PhaseStep`, in float32.

    Below 2e-7 off for positions to 2²⁴. With ``HALF``, for results that will be rounded to 16 bits, the special
    function unit does what is left after the exact reduction, and is at most 9e-7 off.
    """
    low = position.to(tl.int32)
    if HALF:
        # The upper 23 bits of the phase, half a turn ahead, are the fraction of a float32 in [1, 2). Conversions
        # from and to integers would cost as much as the sine itself, and the rest is small enough for float32.
        bits = wrapping_add(wrapping_mul(low, step.whole), HALF_TURN_AND_HALF_A_BIT)
        turns = ((bits.to(tl.uint32, bitcast=True) >> 9) | ONE_AS_BITS).to(tl.float32, bitcast=True) - 1.5
        angle = tl.fma(position.to(tl.float32), step.rest, turns) * TURN
        cosine, sine = fast_cos_sin(angle)
    else:
        # An eighth of a turn ahead, so that the upper two bits are the quadrant whose axis is nearest.
        phase = wrapping_mul(low, step.whole)
        if position.dtype == tl.int64:
            gain = position.to(tl.float32) * step.rest
            gain -= (gain + ROUND) - ROUND  # whole turns, from position 2³² on
            gain *= TWO_POW_32
        else:
            gain = (position.to(tl.float32) * TWO_POW_32) * step.rest
        phase = wrapping_add(phase, gain.to(tl.int32))
        phase = wrapping_add(phase, EIGHTH_TURN)
        r = ((phase & WITHIN_QUADRANT) - EIGHTH_TURN).to(tl.float32) * step.unit
        z = r * r
        s = r * (S0 + z * (S1 + z * (S2 + z * S3)))
        c = 1.0 + z * (C1 + z * (C2 + z * (C3 + z * C4)))
        odd = (phase & QUARTER_TURN) != 0
        cosine = tl.where(odd, s, c)
        sine = tl.where(odd, c, s)
        # The sign bit of a phase is that of its sine, and a quarter of a turn on, that of its cosine.
        cosine = (cosine.to(tl.int32, bitcast=True) ^ (wrapping_add(phase, QUARTER_TURN) & SIGN)).to(
            tl.float32, bitcast=True
        )
        sine = (sine.to(tl.int32, bitcast=True) ^ (phase & SIGN)).to(tl.float32, bitcast=True)
    return cosine, sine
