"""Caps of logits on Hopper: cap · tanh(x / cap) for whole tiles, mostly without special functions.

Special functions are what attention is short of, since each weight takes one. But most logits are small beside their cap,
and then the hyperbolic tangent is a short polynomial. A warp tests all its entries of a tile together, once, since every test
costs the latency of a branch. If one entry is not small, all are computed with a longer polynomial, and if one is large, with
exponentials.

Forward, all from logits to weights is one block of assembly for all entries of a thread: tensors in between would be held for
the whole tile. Backward, where lse and gradients of weights need registers too, the logits of a tile become hyperbolic
tangents, and these weights in pairs.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

_LEAST, _MORE = 0.2, 0.75  # of |x / cap|, up to which the first and the second polynomial do
# Minimax polynomials in u² for tanh(u) / u.
FIRST, SECOND = gl.constexpr(-0.3332970780), gl.constexpr(0.1303831709)  # |u| ≤ 0.2, 1.3e-7 off
_LONG = (1.0, -0.3333308229, 0.1332675978, -0.05340301511, 0.01969182342, -0.004789073399)  # |u| ≤ 0.75, 3e-8 off
_CHAINS = 8  # of maxima: one would have the latency of all

HIDDEN = gl.constexpr(-1e18)
"""A hyperbolic tangent in `cap_weights` that has no weight."""

_ANY = "vote.sync.any.pred large, large, -1;"
_BEGIN = f"{{ .reg .pred large; .reg .f32 size, u, e, t, {', '.join(f'm{i}' for i in range(_CHAINS))};"


def _most(x: list[str], scale: str) -> list[str]:
    """Make ``m0`` the largest entry of a thread."""
    lines = [f"mov.f32 m{i}, 0.0;" for i in range(_CHAINS)]
    for i, each in enumerate(x):
        lines += [f"abs.f32 size, {each};", f"max.f32 m{i % _CHAINS}, m{i % _CHAINS}, size;"]
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


def _write_ptx(pack: int, exponentials: bool) -> tuple[str, str]:
    """PTX and constraints of `cap`.

    Results have registers of their own. Written over the logits, which are the sums of a product, they would make the
    assembler serialize all products of a kernel that is short of registers.
    """
    results, x = ([f"${k * pack + i}" for i in range(pack)] for k in range(2))
    first, second, third, scale, cap, base = (f"${(2 + k) * pack}" for k in range(6))
    lines = [_BEGIN, *_most(x, scale), *_go_if_above(_LEAST, "LARGE")]
    for each, to in zip(x, results):
        lines += [f"mul.f32 e, {each}, {each};", f"fma.rn.f32 u, e, {third}, {second};", f"neg.f32 size, {base};"]
        lines += [f"fma.rn.f32 u, e, u, {first};", f"fma.rn.f32 {to}, {each}, u, size;"]
        lines += [f"ex2.approx.ftz.f32 {to}, {to};"] if exponentials else []
    lines += ["bra.uni END;", "LARGE:", *_go_if_above(_MORE, "EXACT")]
    for exact in (False, True):
        for each, to in zip(x, results):
            lines += [*_tanh(each, "t", scale, exact), f"neg.f32 size, {base};"]
            lines += [f"fma.rn.f32 {to}, t, {cap}, size;"]
            lines += [f"ex2.approx.ftz.f32 {to}, {to};"] if exponentials else []
        lines += [] if exact else ["bra.uni END;", "EXACT:"]
    return " ".join([*lines, "END: }"]), ",".join(["=&f"] * pack + ["f"] * (7 * pack))


def _weights(dtype: str) -> str:
    """PTX of `cap_weights`, for two entries."""
    lines = ["{ .reg .f32 e0, e1, t0, t1;"]
    for i, (x, lse) in enumerate((("$3", "$5"), ("$4", "$6"))):
        lines += [f"neg.f32 e{i}, {lse};", f"fma.rn.f32 e{i}, {x}, $7, e{i};", f"ex2.approx.ftz.f32 e{i}, e{i};"]
        lines += [f"neg.f32 t{i}, {x};", f"fma.rn.f32 t{i}, t{i}, {x}, 1.0;"]
    return " ".join([*lines, f"cvt.rn.{dtype}x2.f32 $0, e1, e0; mul.f32 $1, e0, t0; mul.f32 $2, e1, t1; }}"])


# fmt: off
CAPPED_32, OPERANDS_32 = map(gl.constexpr, _write_ptx(32, False))
CAPPED_64, OPERANDS_64 = map(gl.constexpr, _write_ptx(64, False))
EXPONENTIALS_32, EXPONENTIALS_64 = (gl.constexpr(_write_ptx(pack, True)[0]) for pack in (32, 64))
BFLOAT16_WEIGHTS, FLOAT16_WEIGHTS = (gl.constexpr(_weights(dtype)) for dtype in ("bf16", "f16"))
WEIGHTS_OPERANDS = gl.constexpr("=&r,=&f,=&f,f,f,f,f,f,f")
# fmt: on


@gluon.jit
def cap(x, scale, softcap, base, EXPONENTIALS: gl.constexpr):
    """``softcap · tanh(x · scale) − base``, to about 4 units in the last place, or 2 to the power of it."""
    first = softcap * scale
    square = scale * scale
    PACK: gl.constexpr = x.shape[0] * x.shape[1] // 128  # entries of a thread
    arguments = [x, first, FIRST * first * square, SECOND * first * square * square, scale, softcap, base]
    OF_32: gl.constexpr = EXPONENTIALS_32 if EXPONENTIALS else CAPPED_32
    OF_64: gl.constexpr = EXPONENTIALS_64 if EXPONENTIALS else CAPPED_64
    return gl.inline_asm_elementwise(
        OF_64 if PACK == 64 else OF_32, OPERANDS_64 if PACK == 64 else OPERANDS_32, arguments,
        dtype=gl.float32, is_pure=True, pack=PACK,
    )  # fmt: skip


@gluon.jit
def cap_weights(x, lse, softcap, dtype: gl.constexpr):
    """2 to the power of ``softcap · x − lse``, rounded to a 16-bit type, and times 1 − x², not rounded.

    ``x`` are hyperbolic tangents, or `HIDDEN`.
    """
    TEXT: gl.constexpr = BFLOAT16_WEIGHTS if dtype == gl.bfloat16 else FLOAT16_WEIGHTS
    return gl.inline_asm_elementwise(
        TEXT, WEIGHTS_OPERANDS, [x, lse, softcap], is_pure=True, pack=2,
        dtype=(gl.bfloat16 if dtype == gl.bfloat16 else gl.float16, gl.float32),
    )  # fmt: skip
