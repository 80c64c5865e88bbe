"""Sums that programs of one launch tell each other through device memory. Written in Gluon.

A program writes each of its sums as one word of 64 bits: the sum below, and above it the tag of the launch. A word has
arrived when it bears the tag, so nothing is cleared between launches, and no order of one word after another is relied
on. Words lie in rows (P, W), one for each part of a strip, and are added in an order that never varies.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

FOREVER = gl.constexpr(2**31 - 1)  # polls


def _poll(words: int) -> str:
    """PTX that reads words in pairs until all bear a tag, or so many times.

    Operands: sums, tags found, addresses, tags wanted and numbers of polls, for each word.
    """
    found, address, wanted, polls = (words * i for i in range(1, 5))
    lines = [f".reg .pred enough; .reg .b32 count; .reg .b64 word<{words}>; mov.b32 count, 0;", "again:"]
    for i in range(0, words, 2):
        lines.append(f"ld.relaxed.gpu.global.v2.b64 {{word{i}, word{i + 1}}}, [${address + i}];")
    lines += [f"mov.b64 {{${i}, ${found + i}}}, word{i};" for i in range(words)]
    lines.append(f"setp.eq.s32 enough, ${found}, ${wanted};")
    lines += [f"setp.eq.and.s32 enough, ${found + i}, ${wanted}, enough;" for i in range(1, words)]
    lines += ["@enough bra done;", "add.s32 count, count, 1;", f"setp.ge.s32 enough, count, ${polls};"]
    lines += ["@!enough bra again;", "done:"]
    return "{" + "\n".join(lines) + "}"


def _poll_types(words: int) -> str:
    """Constraints of the operands of `_poll`."""
    return ",".join(["=&r"] * (2 * words) + ["l"] * words + ["r"] * (2 * words))


POLL2, POLL4, POLL8 = (gl.constexpr(_poll(words)) for words in (2, 4, 8))
TYPES2, TYPES4, TYPES8 = (gl.constexpr(_poll_types(words)) for words in (2, 4, 8))


@gluon.jit
def places(to, P: gl.constexpr, W: gl.constexpr, LAYOUT: gl.constexpr):
    """Addresses (P, W) of words from ``to`` on."""
    member = gl.arange(0, P, gl.SliceLayout(1, LAYOUT)) * W
    return to + member[:, None] + gl.arange(0, W, gl.SliceLayout(0, LAYOUT))[None, :]


@gluon.jit
def tell(to, tag, sums, known=None):
    """Write sums (P, W) as words from ``to`` on, those that are ``known``."""
    below = sums.to(gl.int32, bitcast=True).to(gl.int64) & 0xFFFFFFFF
    LAYOUT: gl.constexpr = sums.type.layout
    cells = places(to, sums.shape[0], sums.shape[1], LAYOUT)
    gl.atomic_xchg(cells, (tag.to(gl.int64) << 32) | below, mask=known, sem="relaxed")


@gluon.jit
def read_words(cells, tag, polls, K: gl.constexpr):
    """The sums among words, and the tags above them, once these are ``tag`` or after so many polls.

    A thread reads pairs of adjacent words, ``K`` words at once.
    """
    address = cells.to(gl.int64, bitcast=True)
    tags = gl.full_like(address, 0).to(gl.int32) + tag
    POLL: gl.constexpr = POLL2 if K == 2 else POLL4 if K == 4 else POLL8
    TYPES: gl.constexpr = TYPES2 if K == 2 else TYPES4 if K == 4 else TYPES8
    return gl.inline_asm_elementwise(
        POLL, TYPES, [address, tags, tags - tag + polls], dtype=(gl.float32, gl.int32), is_pure=False, pack=K
    )


@gluon.jit
def read_block(words, first, end, tag, polls, BLOCK: gl.constexpr, P: gl.constexpr, W: gl.constexpr):
    """Rows ``first`` to ``end`` of words (…, P, W), at most ``BLOCK``, added in an order that never varies.

    Sums (P, W), and which of them are known: where a word is missing after so many polls, a sum is NaN. The words of
    a column are read by threads of one warp.
    """
    WARPS: gl.constexpr = gl.num_warps()
    VEC: gl.constexpr = P * W // (4 * WARPS)
    gl.static_assert(VEC >= 2, "words are read in pairs")
    WORDS: gl.constexpr = gl.BlockedLayout([1, 1, VEC], [8, 1, 4], [1, P, WARPS // P], [2, 1, 0])
    row = first + gl.arange(0, BLOCK, gl.SliceLayout(1, gl.SliceLayout(2, WORDS)))
    inside = row < end
    row = gl.where(inside, row, first)
    cells = places(words, P, W, gl.SliceLayout(0, WORDS))[None, :, :] + (row * (P * W))[:, None, None]
    sums, tags = read_words(cells, tag, polls, min(BLOCK // 8 * VEC, 8))
    told = tags == tag
    sums = gl.sum(gl.where(inside[:, None, None], gl.where(told, sums, float("nan")), 0.0), 0)
    return sums, gl.min(told.to(gl.int32), 0) != 0


@gluon.jit
def sum_of_parts(words, tag, patience, part, parts, BLOCK: gl.constexpr, BLOCKS: gl.constexpr, P: gl.constexpr,
                 W: gl.constexpr):  # fmt: skip
    """What all parts tell, added (P, W); NaN where a word is missing after ``patience`` polls.

    ``BLOCKS``: they are more than a block, and at most as many blocks as a block has parts. Then the first part of
    each block adds that up, and tells the sum as a word behind those of the parts.
    """
    if not BLOCKS:
        total, _ = read_block(words, 0, parts, tag, patience, BLOCK, P, W)
    else:
        told = words + parts * (P * W)
        if part % BLOCK == 0:
            sums, known = read_block(words, part, gl.minimum(part + BLOCK, parts), tag, patience, BLOCK, P, W)
            tell(told + part // BLOCK * (P * W), tag, sums, known)
        total, _ = read_block(told, 0, (parts + BLOCK - 1) // BLOCK, tag, patience, BLOCK, P, W)
    return total
