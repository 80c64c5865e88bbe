"""Cosine and sine of ``position × frequency``, exact for every 32-bit position.

A float32 product of a position and a frequency keeps 24 bits, of which the whole turns eat the leading ones:
at position 10⁶ the angle is already wrong by 0.06 rad. Here an angle is a fixed-point fraction of a turn in
64 bits. Integer multiplication wraps modulo 2⁶⁴ exactly as the angle wraps modulo one turn, so the reduction
costs nothing and loses nothing: the step of one position is known to 2⁻⁵³ turns, and position 2²⁴ adds an
error of 2⁻²⁹ turns.
"""

import triton
import triton.language as tl

INVERSE_TURN = tl.constexpr(0.15915494309189535)  # 1 / 2π in float64
TWO_POW_64 = tl.constexpr(18446744073709551616.0)
TWO_POW_MINUS_32 = tl.constexpr(2.3283064365386963e-10)
EIGHTH_TURN = tl.constexpr(1 << 29)  # in units of 2⁻³² turns

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
def phase_step(theta):
    """Angle gained per position, as a 64-bit fraction of a turn, and the unit 2⁻³² (NaN where theta is not finite).

    The unit carries what fixed point cannot: a NaN or infinite frequency still gives NaN.
    """
    turns = theta.to(tl.float64) * INVERSE_TURN
    turns -= tl.floor(turns + 0.5)
    step = (turns * TWO_POW_64).to(tl.int64)
    unit = theta.to(tl.float32) * 0.0 + TWO_POW_MINUS_32
    return step, unit


@triton.jit
def cos_sin(position, step, unit):
    """Cosine and sine at an integer position; ``step`` and ``unit`` from `phase_step`. Float32, below 1e-7 off."""
    phase = ((position.to(tl.int64) * step) >> 32).to(tl.int32)  # 2⁻³² turns, in [−½, ½)
    quadrant = (phase + EIGHTH_TURN) >> 30
    r = (phase - (quadrant << 30)).to(tl.float32) * unit  # within an eighth of a turn of the quadrant's axis
    z = r * r
    s = r * (S0 + z * (S1 + z * (S2 + z * S3)))
    c = 1.0 + z * (C1 + z * (C2 + z * (C3 + z * C4)))
    odd = (quadrant & 1) != 0
    cosine = tl.where(odd, s, c)
    sine = tl.where(odd, c, s)
    cosine = tl.where(((quadrant + 1) & 2) != 0, -cosine, cosine)
    sine = tl.where((quadrant & 2) != 0, -sine, sine)
    return cosine, sine
