"""Caps of logits on Hopper: cap · tanh(x / cap) for whole tiles, mostly without special functions.

These are what attention is short of, since each weight takes one. But logits are mostly small beside their cap, and then the
hyperbolic tangent is a short polynomial. A warp looks at several entries of each of its threads together, and where one of
them is not small it works all of them out again, with a longer polynomial, or with exponentials where that does not do either.

Both functions are one piece of assembly for so many entries, from logits to what is kept of them: as tensors, what lies
between would be held for the whole tile.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

_LEAST, _MORE = 0.2, 0.75  # of |x / cap|, up to which the first and the second polynomial do
# Minimax polynomials in u² for tanh(u) / u and for 1 − tanh²(u).
FIRST, SECOND = gl.constexpr(-0.3332970780), gl.constexpr(0.1303831709)  # |u| ≤ 0.2, 1.3e-7 off
FIRST_SLOPE, SECOND_SLOPE = gl.constexpr(-0.9997480596), gl.constexpr(0.6461245117)  # 9e-7 off
_LONG = (1.0, -0.3333308229, 0.1332675978, -0.05340301511, 0.01969182342, -0.004789073399)  # |u| ≤ 0.75, 3e-8 off

UNSEEN = gl.constexpr(-3.1415927e38)
"""A logit of `capped_weights` that has no weight."""


def _operands(results: list[str], pack: int, tensors: int, scalars: int) -> str:
    """Constraints: of results, of the logits, in whose place the last of them come, and of all that is given besides."""
    tied = [str(len(results) - pack + i) for i in range(pack)]
    return ",".join([*results, *tied, *["f"] * ((tensors + scalars) * pack)])


def _most(x: list[str], scale: str) -> list[str]:
    """The largest of these, and whether that is large in any thread."""
    lines = ["abs.f32 most, " + x[0] + ";"]
    for each in x[1:]:
        lines += [f"abs.f32 size, {each};", "max.f32 most, most, size;"]
    return [
        *lines,
        f"mul.f32 most, most, {scale};",
        f"setp.gt.f32 large, most, {_LEAST};",
        *_ANY,
        "@large bra.uni LARGE;",
    ]


_ANY = ["vote.sync.any.pred large, large, -1;"]


def _tanh(x: list[str], scale: str) -> list[str]:
    """Hyperbolic tangents of entries, ``t0 …``, by the second polynomial, or with exponentials where it does not do."""
    lines = []
    for i, each in enumerate(x):
        lines += [f"mul.f32 u, {each}, {scale};", "mul.f32 e, u, u;", f"mov.f32 t{i}, {_LONG[-1]};"]
        lines += [f"fma.rn.f32 t{i}, e, t{i}, {factor};" for factor in reversed(_LONG[:-1])]
        lines += [f"mul.f32 t{i}, t{i}, u;"]
    lines += [f"setp.gt.f32 large, most, {_MORE};", *_ANY, "@!large bra.uni MORE;"]
    for i, each in enumerate(x):
        lines += [
            f"mul.f32 u, {each}, {scale};",
            "abs.f32 size, u;",
            "mul.f32 e, size, 2.8853900818;",  # 2 · log₂e
            "ex2.approx.ftz.f32 e, e;",
            "add.f32 e, e, 1.0;",
            "rcp.approx.ftz.f32 e, e;",
            "fma.rn.f32 e, e, -2.0, 1.0;",
            f"setp.gt.f32 large, size, {_MORE};",
            f"@large copysign.f32 t{i}, u, e;",
        ]
    return [*lines, "MORE:"]


def _begin(pack: int) -> str:
    registers = ", ".join(f"t{i}" for i in range(pack))
    return f"{{ .reg .pred large; .reg .f32 most, size, u, e, {registers};"


def _capped(pack: int) -> tuple[str, str]:
    """PTX and constraints of `capped`."""
    x = [f"${i}" for i in range(pack)]
    first, second, third, scale, cap, base = (f"${(2 + k) * pack}" for k in range(6))
    lines = [_begin(pack), *_most(x, scale), f"neg.f32 size, {base};"]
    for each in x:
        lines += [f"mul.f32 e, {each}, {each};", f"fma.rn.f32 u, e, {third}, {second};"]
        lines += [f"fma.rn.f32 u, e, u, {first};", f"fma.rn.f32 {each}, {each}, u, size;"]
    lines += ["bra.uni END;", "LARGE:", *_tanh(x, scale), f"neg.f32 size, {base};"]
    lines += [f"fma.rn.f32 {each}, t{i}, {cap}, size;" for i, each in enumerate(x)]
    return " ".join([*lines, "END: }"]), _operands(["=f"] * pack, pack, 0, 6)


def _weights(pack: int, dtype: str) -> tuple[str, str]:
    """PTX and constraints of `capped_weights`."""
    half = pack // 2
    weights = [f"${i}" for i in range(half)]
    x, lse = ([f"${half + k * pack + i}" for i in range(pack)] for k in (0, 2))
    first, second, third, slope, bend, scale, cap = (f"${half + (3 + k) * pack}" for k in range(7))
    lines = [_begin(pack), *_most(x, scale)]
    for i, each in enumerate(x):
        lines += [f"mul.f32 e, {each}, {each};", f"fma.rn.f32 u, e, {third}, {second};"]
        lines += [f"fma.rn.f32 u, e, u, {first};", f"neg.f32 size, {lse[i]};", f"fma.rn.f32 t{i}, {each}, u, size;"]
        lines += [f"fma.rn.f32 u, e, {bend}, {slope};", f"fma.rn.f32 {each}, e, u, 1.0;"]
        lines += [f"ex2.approx.ftz.f32 t{i}, t{i};", f"mul.f32 {each}, {each}, t{i};"]
    lines += ["bra.uni END;", "LARGE:", "mov.f32 most, 0.0;"]  # without what is not seen
    for each in x:
        lines += [f"setp.eq.f32 large, {each}, {UNSEEN.value};", f"abs.f32 size, {each};"]
        lines += ["@!large max.f32 most, most, size;"]
    lines += [f"mul.f32 most, most, {scale};", *_tanh(x, scale)]
    for i, each in enumerate(x):
        lines += [f"neg.f32 e, {lse[i]};", f"fma.rn.f32 u, t{i}, {cap}, e;", "ex2.approx.ftz.f32 u, u;"]
        lines += [
            f"setp.eq.f32 large, {each}, {UNSEEN.value};",
            f"neg.f32 e, t{i};",
            f"fma.rn.f32 e, t{i}, e, 1.0;",
        ]
        lines += [f"selp.f32 t{i}, 0.0, u, large;", "mul.f32 e, e, u;", f"selp.f32 {each}, 0.0, e, large;"]
    lines += ["END:"]
    lines += [f"cvt.rn.{dtype}x2.f32 {weights[i]}, t{2 * i + 1}, t{2 * i};" for i in range(half)]
    return " ".join([*lines, "}"]), _operands(["=&r"] * half + ["=f"] * pack, pack, 1, 7)


CAPPED_PACK, WEIGHTS_PACK = gl.constexpr(16), gl.constexpr(8)
_CAPPED, _BFLOAT16, _FLOAT16 = _capped(16), _weights(8, "bf16"), _weights(8, "f16")
CAPPED, CAPPED_OPERANDS = gl.constexpr(_CAPPED[0]), gl.constexpr(_CAPPED[1])
BFLOAT16_WEIGHTS, WEIGHTS_OPERANDS = gl.constexpr(_BFLOAT16[0]), gl.constexpr(_BFLOAT16[1])
FLOAT16_WEIGHTS = gl.constexpr(_FLOAT16[0])


@gluon.jit
def capped(x, scale, softcap, base):
    """``softcap · tanh(x · scale) − base``, to about 4 units in the last place."""
    first = softcap * scale
    square = scale * scale
    return gl.inline_asm_elementwise(
        CAPPED, CAPPED_OPERANDS, [x, first, FIRST * first * square, SECOND * first * square * square, scale, softcap, base],
        dtype=gl.float32, is_pure=True, pack=CAPPED_PACK,
    )  # fmt: skip


@gluon.jit
def capped_weights(x, lse, scale, softcap, dtype: gl.constexpr):
    """2 to the power of ``softcap · tanh(x · scale) − lse``, rounded to a 16-bit type, and times 1 − tanh², not rounded."""
    first = softcap * scale
    square = scale * scale
    arguments = [
        x, lse, first, FIRST * first * square, SECOND * first * square * square,
        FIRST_SLOPE * square, SECOND_SLOPE * square * square, scale, softcap,
    ]  # fmt: skip
    if dtype == gl.bfloat16:
        weights, slopes = gl.inline_asm_elementwise(
            BFLOAT16_WEIGHTS, WEIGHTS_OPERANDS, arguments,
            dtype=(gl.bfloat16, gl.float32), is_pure=True, pack=WEIGHTS_PACK,
        )  # fmt: skip
    else:
        weights, slopes = gl.inline_asm_elementwise(
            FLOAT16_WEIGHTS, WEIGHTS_OPERANDS, arguments,
            dtype=(gl.float16, gl.float32), is_pure=True, pack=WEIGHTS_PACK,
        )  # fmt: skip
    return weights, slopes
