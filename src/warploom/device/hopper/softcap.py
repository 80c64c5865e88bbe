"""Caps of logits on Hopper: cap · tanh(x / cap) for whole tiles, mostly without special functions.

Special functions are what attention is short of, since each weight takes one. But most logits are small beside their cap,
and then the hyperbolic tangent is a short polynomial. A warp tests all its entries of a tile together, once, since every test
costs the latency of a branch. If one entry is not small, all are computed with a longer polynomial, and if one is large, with
exponentials.

Both functions are one block of assembly for all entries of a thread, from logits to weights: tensors in between would be held
for the whole tile.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

_LEAST, _MORE = 0.2, 0.75  # of |x / cap|, up to which the first and the second polynomial do
# Minimax polynomials in u² for tanh(u) / u and for 1 − tanh²(u).
FIRST, SECOND = gl.constexpr(-0.3332970780), gl.constexpr(0.1303831709)  # |u| ≤ 0.2, 1.3e-7 off
FIRST_SLOPE, SECOND_SLOPE = gl.constexpr(-0.9997480596), gl.constexpr(0.6461245117)  # 9e-7 off
_LONG = (1.0, -0.3333308229, 0.1332675978, -0.05340301511, 0.01969182342, -0.004789073399)  # |u| ≤ 0.75, 3e-8 off
_CHAINS = 8  # of maxima: one would have the latency of all

UNSEEN = gl.constexpr(-3.1415927e38)
"""A logit of `capped_weights` that has no weight."""

_ANY = "vote.sync.any.pred large, large, -1;"
_BEGIN = f"{{ .reg .pred large; .reg .f32 size, u, e, t0, t1, {', '.join(f'm{i}' for i in range(_CHAINS))};"


def _operands(results: list[str], pack: int, tensors: int, scalars: int) -> str:
    """Constraints: of results, of the logits, in whose place the last of them come, and of all that is given besides."""
    tied = [str(len(results) - pack + i) for i in range(pack)]
    return ",".join([*results, *tied, *["f"] * ((tensors + scalars) * pack)])


def _most(x: list[str], scale: str, unseen: bool) -> list[str]:
    """Make ``m0`` the largest entry of a thread, without those that are not seen if there may be any."""
    lines = [f"mov.f32 m{i}, 0.0;" for i in range(_CHAINS)]
    for i, each in enumerate(x):
        lines += [f"abs.f32 size, {each};"]
        lines += (
            [f"setp.eq.f32 large, {each}, {UNSEEN.value};", "selp.f32 size, 0.0, size, large;"] if unseen else []
        )
        lines += [f"max.f32 m{i % _CHAINS}, m{i % _CHAINS}, size;"]
    for half in (4, 2, 1):
        lines += [f"max.f32 m{i}, m{i}, m{i + half};" for i in range(half)]
    return [*lines, f"mul.f32 m0, m0, {scale};"]


def _go_if_above(limit: float, label: str) -> list[str]:
    """Go on at a label if ``m0`` is above a limit in any thread."""
    return [f"setp.gt.f32 large, m0, {limit};", _ANY, f"@large bra.uni {label};"]


def _tanh(x: str, t: str, scale: str, exact: bool) -> list[str]:
    """The hyperbolic tangent of an entry, by the second polynomial, and where that does not do by exponentials."""
    lines = [f"mul.f32 u, {x}, {scale};", "mul.f32 e, u, u;", f"mov.f32 {t}, {_LONG[-1]};"]
    lines += [f"fma.rn.f32 {t}, e, {t}, {factor};" for factor in reversed(_LONG[:-1])]
    lines += [f"mul.f32 {t}, {t}, u;"]
    if exact:
        lines += [
            "abs.f32 size, u;",
            "mul.f32 e, size, 2.8853900818;",  # 2 · log₂e
            "ex2.approx.ftz.f32 e, e;",
            "add.f32 e, e, 1.0;",
            "rcp.approx.ftz.f32 e, e;",
            "fma.rn.f32 e, e, -2.0, 1.0;",
            f"setp.gt.f32 large, size, {_MORE};",
            f"@large copysign.f32 {t}, u, e;",
        ]
    return lines


def _capped(pack: int, exponentials: bool) -> tuple[str, str]:
    """PTX and constraints of `capped`."""
    x = [f"${i}" for i in range(pack)]
    first, second, third, scale, cap, base = (f"${(2 + k) * pack}" for k in range(6))
    lines = [_BEGIN, *_most(x, scale, False), *_go_if_above(_LEAST, "LARGE")]
    for each in x:
        lines += [f"mul.f32 e, {each}, {each};", f"fma.rn.f32 u, e, {third}, {second};", f"neg.f32 size, {base};"]
        lines += [f"fma.rn.f32 u, e, u, {first};", f"fma.rn.f32 {each}, {each}, u, size;"]
        lines += [f"ex2.approx.ftz.f32 {each}, {each};"] if exponentials else []
    lines += ["bra.uni END;", "LARGE:", *_go_if_above(_MORE, "EXACT")]
    for exact in (False, True):
        for each in x:
            lines += [*_tanh(each, "t0", scale, exact), f"neg.f32 size, {base};"]
            lines += [f"fma.rn.f32 {each}, t0, {cap}, size;"]
            lines += [f"ex2.approx.ftz.f32 {each}, {each};"] if exponentials else []
        lines += [] if exact else ["bra.uni END;", "EXACT:"]
    return " ".join([*lines, "END: }"]), _operands(["=f"] * pack, pack, 0, 6)


def _weights(pack: int, dtype: str) -> tuple[str, str]:
    """PTX and constraints of `capped_weights`."""
    half = pack // 2
    x, lse = ([f"${half + k * pack + i}" for i in range(pack)] for k in (0, 2))
    first, second, third, slope, bend, scale, cap = (f"${half + (3 + k) * pack}" for k in range(7))
    rounded = [f"cvt.rn.{dtype}x2.f32 ${i}, t1, t0;" for i in range(half)]
    lines = [_BEGIN, *_most(x, scale, False), *_go_if_above(_LEAST, "LARGE")]
    for i, each in enumerate(x):
        t = f"t{i % 2}"
        lines += [f"mul.f32 e, {each}, {each};", f"fma.rn.f32 u, e, {third}, {second};"]
        lines += [f"fma.rn.f32 u, e, u, {first};", f"neg.f32 size, {lse[i]};", f"fma.rn.f32 {t}, {each}, u, size;"]
        lines += [f"fma.rn.f32 u, e, {bend}, {slope};", f"fma.rn.f32 {each}, e, u, 1.0;"]
        lines += [f"ex2.approx.ftz.f32 {t}, {t};", f"mul.f32 {each}, {each}, {t};"]
        lines += [rounded[i // 2]] if i % 2 else []
    lines += ["bra.uni END;", "LARGE:", *_most(x, scale, True), *_go_if_above(_MORE, "EXACT")]
    for exact in (False, True):
        for i, each in enumerate(x):
            t = f"t{i % 2}"
            lines += _tanh(each, t, scale, exact)
            lines += [f"neg.f32 e, {lse[i]};", f"fma.rn.f32 u, {t}, {cap}, e;", "ex2.approx.ftz.f32 u, u;"]
            lines += [
                f"setp.eq.f32 large, {each}, {UNSEEN.value};",
                f"neg.f32 e, {t};",
                f"fma.rn.f32 e, {t}, e, 1.0;",
            ]
            lines += [f"selp.f32 {t}, 0.0, u, large;", "mul.f32 e, e, u;", f"selp.f32 {each}, 0.0, e, large;"]
            lines += [rounded[i // 2]] if i % 2 else []
        lines += [] if exact else ["bra.uni END;", "EXACT:"]
    return " ".join([*lines, "END: }"]), _operands(["=&r"] * half + ["=f"] * pack, pack, 1, 7)


# fmt: off
CAPPED_32, CAPPED_OPERANDS_32 = map(gl.constexpr, _capped(32, False))
CAPPED_64, CAPPED_OPERANDS_64 = map(gl.constexpr, _capped(64, False))
EXPONENTIALS_32, EXPONENTIALS_64 = (gl.constexpr(_capped(pack, True)[0]) for pack in (32, 64))
BFLOAT16_WEIGHTS_32, WEIGHTS_OPERANDS_32 = map(gl.constexpr, _weights(32, "bf16"))
BFLOAT16_WEIGHTS_64, WEIGHTS_OPERANDS_64 = map(gl.constexpr, _weights(64, "bf16"))
FLOAT16_WEIGHTS_32, FLOAT16_WEIGHTS_64 = (gl.constexpr(_weights(pack, "f16")[0]) for pack in (32, 64))
# fmt: on


@gluon.jit
def capped(x, scale, softcap, base, EXPONENTIALS: gl.constexpr):
    """``softcap · tanh(x · scale) − base``, to about 4 units in the last place, or 2 to the power of it."""
    first = softcap * scale
    square = scale * scale
    PACK: gl.constexpr = x.shape[0] * x.shape[1] // 128  # entries of a thread
    arguments = [x, first, FIRST * first * square, SECOND * first * square * square, scale, softcap, base]
    if EXPONENTIALS:
        return gl.inline_asm_elementwise(
            EXPONENTIALS_64 if PACK == 64 else EXPONENTIALS_32,
            CAPPED_OPERANDS_64 if PACK == 64 else CAPPED_OPERANDS_32,
            arguments, dtype=gl.float32, is_pure=True, pack=PACK,
        )  # fmt: skip
    else:
        return gl.inline_asm_elementwise(
            CAPPED_64 if PACK == 64 else CAPPED_32,
            CAPPED_OPERANDS_64 if PACK == 64 else CAPPED_OPERANDS_32,
            arguments, dtype=gl.float32, is_pure=True, pack=PACK,
        )  # fmt: skip


@gluon.jit
def capped_weights(x, lse, scale, softcap, dtype: gl.constexpr):
    """2 to the power of ``softcap · tanh(x · scale) − lse``, rounded to a 16-bit type, and times 1 − tanh², not rounded."""
    first = softcap * scale
    square = scale * scale
    PACK: gl.constexpr = x.shape[0] * x.shape[1] // 128  # entries of a thread
    OPERANDS: gl.constexpr = WEIGHTS_OPERANDS_64 if PACK == 64 else WEIGHTS_OPERANDS_32
    arguments = [
        x, lse, first, FIRST * first * square, SECOND * first * square * square,
        FIRST_SLOPE * square, SECOND_SLOPE * square * square, scale, softcap,
    ]  # fmt: skip
    if dtype == gl.bfloat16:
        weights, slopes = gl.inline_asm_elementwise(
            BFLOAT16_WEIGHTS_64 if PACK == 64 else BFLOAT16_WEIGHTS_32, OPERANDS, arguments,
            dtype=(gl.bfloat16, gl.float32), is_pure=True, pack=PACK,
        )  # fmt: skip
    else:
        weights, slopes = gl.inline_asm_elementwise(
            FLOAT16_WEIGHTS_64 if PACK == 64 else FLOAT16_WEIGHTS_32, OPERANDS, arguments,
            dtype=(gl.float16, gl.float32), is_pure=True, pack=PACK,
        )  # fmt: skip
    return weights, slopes
