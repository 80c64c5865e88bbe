"""Draw the pictures of pipelines: ``python tools/diagrams.py`` writes them to ``docs/figures``.

They are readable on light and dark pages: the background is the page's, and text has a grey for both.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Mapping
from html import escape
from pathlib import Path

import torch

from warploom import BlockMask, block_mask
from warploom.bench.storage import replace_text
from warploom.report.palette import MUTED

__all__ = ["DIAGRAMS"]

FIGURES = Path(__file__).parents[1] / "docs" / "figures"
BLUE, ORANGE, GREEN, GREY = "#1f7fc4", "#d55e00", "#009e73", "#808080"
"""Products on tensor cores, other arithmetic, copies, memory."""


class Drawing:
    """Boxes, words and arrows on a page of a size."""

    def __init__(self, width: int, height: int, about: str) -> None:
        self.width, self.height, self.about = width, height, about
        self.parts: list[str] = []

    def words(
        self, x: float, y: float, words: str, anchor: str = "start", points: int = 13, bold: bool = False
    ) -> None:
        """Write a line of text."""
        weight = ' font-weight="bold"' if bold else ""
        look = f'text-anchor="{anchor}" font-size="{points}" fill="{MUTED}"{weight}'
        self.parts.append(f'<text x="{x:g}" y="{y:g}" {look}>{escape(words)}</text>')

    def box(self, x: float, y: float, width: float, height: float, colour: str, *lines: str) -> None:
        """Draw a box with lines of text in its middle."""
        place = f'x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="4"'
        self.parts.append(f'<rect {place} fill="{colour}" fill-opacity=".15" stroke="{colour}"/>')
        for index, line in enumerate(lines):
            middle = y + height / 2 + 4.5 + 16 * (index - (len(lines) - 1) / 2)
            self.words(x + width / 2, middle, line, "middle")

    def card(self, x: float, y: float, width: float, height: float, colour: str, title: str, *lines: str) -> None:
        """Draw a box with a title and lines of text at its left."""
        self.box(x, y, width, height, colour)
        self.words(x + 12, y + 22, title, points=14, bold=True)
        for index, line in enumerate(lines):
            self.words(x + 12, y + 41 + 17 * index, line, points=12)

    def arrow(self, *points: tuple[float, float], colour: str = MUTED, dashed: bool = False) -> None:
        """Draw a line through points with a head at its end."""
        path = "M" + "L".join(f"{x:g} {y:g}" for x, y in points)
        (x0, y0), (x, y) = points[-2:]
        length = ((x - x0) ** 2 + (y - y0) ** 2) ** 0.5
        dx, dy = (x - x0) / length, (y - y0) / length
        left, right = (x - 8 * dx - 4 * dy, y - 8 * dy + 4 * dx), (x - 8 * dx + 4 * dy, y - 8 * dy - 4 * dx)
        head = f"M{x:g} {y:g}L{left[0]:g} {left[1]:g}L{right[0]:g} {right[1]:g}z"
        dots = ' stroke-dasharray="4 3"' if dashed else ""
        self.parts.append(f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="1.5"{dots}/>')
        self.parts.append(f'<path d="{head}" fill="{colour}"/>')

    def render(self) -> str:
        """Returns the file."""
        size = f'viewBox="-2 0 {self.width + 4} {self.height}" width="{self.width}" height="{self.height}"'
        head = f'{size} role="img" aria-label="{escape(self.about)}" font-family="sans-serif"'
        return f'<svg xmlns="http://www.w3.org/2000/svg" {head}>\n' + "\n".join(self.parts) + "\n</svg>\n"


def draw_hopper_forward() -> str:
    """Three roles over time: while one group has its softmax, the products of the other run."""
    d = Drawing(
        720,
        208,
        "The forward on Hopper: a warp copies, two groups of warps multiply and have their softmax in turns",
    )
    step, left = 112, 130
    for y, name, more in (
        (44, "copying warp", "TMA"),
        (92, "warp group 0", "64 queries"),
        (140, "warp group 1", "64 queries"),
    ):
        d.words(0, y + 13, name, bold=True)
        d.words(0, y + 29, more, points=12)
    for i in range(5):
        x = left + i * step
        d.box(x, 44, step - 34, 34, GREEN, f"K{9 - i}, V{9 - i}")
        d.words(x + step - 30, 66, "…" if i == 4 else "", points=12)
        groups = (92, 140) if i % 2 == 0 else (140, 92)
        d.box(x, groups[0], step - 4, 34, ORANGE, "softmax")
        d.box(x, groups[1], step - 4, 34, BLUE, "Q Kᵀ, P V")
    d.words(
        left,
        24,
        "Q Kᵀ is of the next tile, P V of the last: both are in flight during the other's softmax",
        points=12,
    )
    d.arrow((left, 192), (700, 192))
    d.words(0, 196, "time")
    return d.render()


def draw_hopper_backward() -> str:
    """The kernel of five products, for one tile of queries in the loop of a program."""
    d = Drawing(
        720, 330, "The backward on Hopper in one kernel: five products, and sums of dQ that are added in order"
    )
    d.words(0, 16, "Loop over tiles of queries, from the last to the first; a program owns 128 keys", bold=True)
    d.box(0, 34, 110, 44, GREEN, "copying warp", "Q, dO by TMA")
    for y, name, keys in ((100, "group 0", "64 keys"), (200, "group 1", "64 keys")):
        d.words(0, y + 22, name, bold=True)
        d.words(0, y + 38, f"{keys}: K, V in", points=12)
        d.words(0, y + 54, "shared memory", points=12)
        d.box(120, y, 104, 66, BLUE, "(1) S = Q Kᵀ", "(2) dP = dO Vᵀ")
        d.box(250, y, 112, 66, ORANGE, "P = exp(S − lse)", "dS = P ⊙ (dP − δ)")
        d.box(388, y, 128, 66, BLUE, "(3) dV += Pᵀ dO", "(4) dK += dSᵀ Q")
        d.box(560, y, 150, 66, BLUE, "(5) half of dQ tile", "dS K, a step later")
        d.arrow((224, y + 33), (250, y + 33))
        d.arrow((362, y + 33), (388, y + 33))
        d.arrow((516, y + 33), (560, y + 33))
    d.arrow((110, 48), (172, 48), (172, 100))
    d.arrow((110, 64), (115, 64), (115, 184), (172, 184), (172, 200))
    d.words(392, 189, "dSᵀ of both groups, by shared memory", "end", 12)
    d.arrow((400, 184), (538, 184), (538, 146), (560, 146), colour=ORANGE, dashed=True)
    d.arrow((538, 184), (538, 220), (560, 220), colour=ORANGE, dashed=True)
    d.box(388, 286, 128, 36, GREY, "dK, dV at the end")
    d.box(560, 286, 150, 36, GREY, "dQ, float32, L2")
    d.arrow((452, 266), (452, 286))
    d.arrow((635, 266), (635, 286))
    d.words(370, 302, "a warp adds by TMA when the counter of the", "end", 12)
    d.words(370, 317, "tile has its number: always the same order", "end", 12)
    return d.render()


def draw_chunks() -> str:
    """The cache of one request, cut into chunks that are joined in a fixed order."""
    d = Drawing(
        720,
        236,
        "Decoding: a cache is cut into chunks by its length, which are joined in an order that no batch changes",
    )
    d.words(0, 16, "Keys and values of one request, cut by its own length alone", bold=True)
    for i in range(8):
        x = i * 88
        d.box(x, 30, 82, 32, GREEN, f"chunk {i}")
        d.arrow((x + 41, 62), (x + 41, 82))
        d.box(x, 82, 82, 32, ORANGE, "m, l, o")
    for i in range(2):
        x = i * 352
        for j in range(4):
            d.arrow((x + j * 88 + 41, 114), (x + 173, 150))
        d.box(x + 116, 150, 114, 32, BLUE, "join, in order")
        d.arrow((x + 173, 182), (349, 206))
    d.box(292, 206, 114, 28, BLUE, "join: the result")
    d.words(420, 224, "one program or many: the same joins, the same bits", points=12)
    return d.render()


def draw_linear_chunk() -> str:
    """A tile of linear attention: pairs within, the state for what was before."""
    d = Drawing(
        720,
        250,
        "Linear attention: a tile sees itself as pairs, what was before as a state, and hands the state on",
    )
    d.words(60, 16, "one tile of tokens", bold=True)
    d.box(60, 30, 104, 40, GREEN, "load q, k, v")
    d.box(204, 30, 160, 40, ORANGE, "encode: φ(q), φ(k)")
    d.box(440, 30, 200, 40, BLUE, "S ← λ S + φ(K)ᵀ V")
    d.box(0, 104, 92, 44, GREY, "state S", "registers")
    d.box(130, 104, 140, 44, BLUE, "φ(Q) S", "what was before")
    d.box(300, 104, 160, 44, BLUE, "(φ(Q) φ(K)ᵀ ⊙ λ) V", "within the tile")
    d.box(490, 104, 100, 44, GREY, "state for", "the next tile")
    d.box(235, 178, 100, 34, ORANGE, "o = sum")
    d.arrow((164, 50), (204, 50))
    d.arrow((364, 50), (440, 50))
    d.arrow((250, 70), (200, 104))
    d.arrow((318, 70), (380, 104))
    d.arrow((92, 126), (130, 126))
    d.arrow((200, 148), (265, 178))
    d.arrow((380, 148), (305, 178))
    d.arrow((540, 70), (540, 104))
    d.words(
        0,
        240,
        "Where heads are few, chunks run in parallel: a kernel makes the sum of each, a scan hands states over.",
        points=12,
    )
    return d.render()


def draw_factors() -> str:
    """Attention over factors: formed once, attended, and taken back to factors."""
    d = Drawing(
        720, 236, "Tensor-product attention in training: factors are formed to Q, K, V for the time of a call"
    )
    d.words(0, 16, "forward", bold=True)
    d.box(0, 30, 130, 56, GREY, "six factors", "kept by autograd")
    d.box(178, 30, 140, 56, ORANGE, "product_kernel", "one launch")
    d.box(366, 30, 118, 56, GREY, "Q, K, V", "for this call")
    d.box(532, 30, 188, 56, BLUE, "flash attention's", "forward kernel → o")
    d.words(0, 130, "backward", bold=True)
    d.box(0, 144, 130, 56, GREY, "gradients of", "six factors")
    d.box(178, 144, 140, 56, ORANGE, "factor_kernel")
    d.box(366, 144, 118, 56, GREY, "dQ, dK, dV", "Q, K, V again")
    d.box(532, 144, 188, 56, BLUE, "flash attention's", "backward kernels ← do")
    for x, width in ((130, 48), (318, 48), (484, 48)):
        d.arrow((x, 58), (x + width, 58))
        d.arrow((x + width, 172), (x, 172))
    d.arrow((626, 86), (626, 144), dashed=True)
    d.words(618, 120, "o, row_max, row_sum", "end", 12)
    d.words(
        0, 228, "Both kernels of ours are bound by memory; nothing is of the size of queries by keys.", points=12
    )
    return d.render()


def draw_architecture() -> str:
    """The way of one call to the GPU and back."""
    d = Drawing(900, 520, "A call's way from lrpe_rotate to the GPU and back through autograd")
    d.card(0, 8, 250, 62, BLUE, "lrpe_rotate(x, theta)", "ops/lrpe/api.py: signature, docstring")
    d.card(
        0,
        112,
        250,
        172,
        BLUE,
        "Function",
        "runtime/dispatch.py",
        "1  guard: like one of the last calls?",
        "2  key: like an earlier kind of call?",
        "3  validation.py: is the call right,",
        "     and can the kernels run it?",
        "4  backend.py: which backend?",
    )
    d.card(340, 8, 230, 62, GREY, "Reference", "ops/lrpe/reference.py, in PyTorch")
    d.card(340, 112, 230, 62, GREY, "torch.ops.warploom.lrpe", "registered: schema, fake, vmap")
    d.card(340, 214, 230, 70, BLUE, "Operator", "ops/lrpe/operator.py: forward,", "what is saved, backward")
    d.card(
        0,
        346,
        250,
        86,
        BLUE,
        "Launch plans",
        "ops/lrpe/engine.py, configs.py:",
        "sizes, strides, tiles; kept in",
        "runtime/plans.py",
    )
    d.card(
        340,
        346,
        230,
        86,
        BLUE,
        "Launch",
        "runtime/launch.py: arguments by",
        "name; runtime/entry.py: Triton's",
        "short entry",
    )
    d.card(660, 346, 236, 86, GREEN, "Kernels", "ops/lrpe/triton/", "device/: what operators share")
    d.card(
        660,
        112,
        236,
        172,
        ORANGE,
        "Autograd",
        "runtime/dispatch.py: one function",
        "for all operators. It saves what",
        "the operator says, and hands the",
        "gradient to the operator's",
        "backward, plain or registered",
    )
    d.arrow((125, 70), (125, 112))
    d.arrow((250, 132), (296, 132), (296, 39), (340, 39))
    d.words(304, 98, "backend torch", points=12)
    d.arrow((250, 152), (340, 152))
    d.arrow((250, 249), (340, 249))
    d.words(262, 243, "plain", points=12)
    d.arrow((455, 174), (455, 214))
    d.words(463, 190, "under a compiler,", points=12)
    d.words(463, 205, "a mode or a transform", points=12)
    d.arrow((455, 284), (455, 316), (125, 316), (125, 346))
    d.words(190, 310, "an unknown call: planned once", points=12)
    d.arrow((250, 389), (340, 389))
    d.arrow((570, 389), (660, 389))
    d.words(596, 383, "GPU", points=12)
    d.arrow((660, 249), (570, 249), colour=ORANGE, dashed=True)
    d.arrow((778, 346), (778, 284), colour=ORANGE, dashed=True)
    d.words(786, 320, "results", points=12)
    d.words(
        0,
        474,
        "Solid: a call on its way to the GPU. Dashed: results, and the gradient on its way back by the operator,",
    )
    d.words(
        0,
        494,
        "the same plans and the same launches. A call like one of the last few goes from 1 straight to the launch.",
    )
    return d.render()


def draw_layouts() -> str:
    """Which rank holds which part of a sequence."""
    d = Drawing(720, 236, "Layouts of a sequence over four ranks: zigzag in eight chunks, contiguous in four")
    colours = (BLUE, ORANGE, GREEN, GREY)
    d.words(0, 16, "zigzag", bold=True)
    d.words(64, 16, "a rank has an early chunk and a late one: the same work in causal attention", points=12)
    for chunk in range(8):
        rank = min(chunk, 7 - chunk)
        d.box(chunk * 90, 28, 86, 50, colours[rank], f"chunk {chunk}", f"rank {rank}")
    d.words(0, 116, "contiguous", bold=True)
    d.words(
        88, 116, "a rank has one chunk: linear attention, and windows that are short against a chunk", points=12
    )
    for rank in range(4):
        d.box(rank * 180, 128, 176, 50, colours[rank], f"chunk {rank}", f"rank {rank}")
    d.arrow((0, 206), (716, 206))
    d.words(0, 228, "tokens of the sequence", points=12)
    return d.render()


def draw_rounds() -> str:
    """Softmax over the sequence: a tile is reduced in one round, and applied some rounds later from the cache."""
    d = Drawing(
        720, 216, "Softmax over the sequence: every round a program reduces one tile and applies an earlier one"
    )
    d.words(0, 16, "one program, here with a lag of two rounds", bold=True)
    d.words(0, 62, "reduce a tile", points=13)
    d.words(0, 78, "read from memory", points=12)
    d.words(0, 140, "apply to a tile", points=13)
    d.words(0, 156, "read from the L2 cache", points=12)
    for i in range(5):
        x = 150 + i * 114
        d.words(x + 52, 34, f"round {i}", "middle", 12)
        d.box(x, 44, 104, 44, GREEN, f"tile {i}: sums,", "counter + 1")
        if i >= 2:
            d.box(x, 122, 104, 44, BLUE, f"tile {i - 2}: wait,", "y = p / sum")
        if i + 2 < 5:
            d.arrow((x + 80, 88), (x + 2 * 114 + 24, 122), dashed=True)
    d.words(
        0,
        198,
        "A tile waits until the counter of its slab has the number of parts. All programs run at once, and each",
        points=12,
    )
    d.words(0, 213, "reduces before it waits: so waiting ends.", points=12)
    return d.render()


CELLS = 8
"""Cells of a tile's picture, to a side."""


def _fill(d: Drawing, x: float, y: float, side: float, cells: torch.Tensor, colour: str, opacity: float) -> None:
    """Fill cells (rows, columns) of a grid that are True, neighbours in a row at once."""
    runs = []
    for row, line in enumerate(cells.tolist()):
        for there, run in itertools.groupby(enumerate(line), key=lambda cell: cell[1]):
            if there:
                columns = [column for column, _ in run]
                runs.append(f"M{x + columns[0] * side:g} {y + row * side:g}h{len(columns) * side:g}v{side:g}")
                runs[-1] += f"h{-len(columns) * side:g}z"
    if runs:
        d.parts.append(f'<path d="{"".join(runs)}" fill="{colour}" fill-opacity="{opacity:g}"/>')


def _draw_grid(d: Drawing, x: float, y: float, side: float, rows: int, columns: int) -> None:
    width, height = columns * side, rows * side
    lines = [f"M{x + i * side:g} {y:g}v{height:g}" for i in range(columns + 1)]
    lines += [f"M{x:g} {y + i * side:g}h{width:g}" for i in range(rows + 1)]
    d.parts.append(f'<path d="{"".join(lines)}" stroke="{MUTED}" stroke-opacity=".35" fill="none"/>')


def _draw_tiles(d: Drawing, x: float, y: float, side: float, mask: BlockMask) -> None:
    """Draw the tiles of a mask: those that see all, those that see some with what they see, and no others."""
    tiles, seen = mask.tiles[0, 0], mask.dense()[0, 0].float()
    some = tiles >= 0
    cells = torch.nn.functional.avg_pool2d(seen[None], 128 // CELLS)[0] >= 0.5
    cells &= some.repeat_interleave(CELLS, 0).repeat_interleave(CELLS, 1)
    _fill(d, x, y, side, tiles == -1, BLUE, 0.55)
    _fill(d, x, y, side, some, ORANGE, 0.15)
    _fill(d, x, y, side / CELLS, cells, ORANGE, 0.65)
    _draw_grid(d, x, y, side, *tiles.shape)


def draw_masks() -> str:
    """Masks of 1024 tokens by tiles, and a tree of proposed tokens by tokens."""
    d = Drawing(
        720, 596, "Masks by tiles of 128 queries and keys: documents, a prefix, a window with global tokens, …"
    )
    d.words(
        0,
        16,
        "Queries downwards, keys to the right. Blue: seen, no bits are read. Orange: bits. Empty: skipped.",
    )
    document = (torch.arange(1024)[:, None] >= torch.tensor([400, 560, 900])).sum(1)
    block = torch.rand(8, 8, generator=torch.Generator().manual_seed(3)) < 0.3
    masks: dict[str, Callable[..., torch.Tensor]] = {
        "causal": lambda b, h, i, j: j <= i,
        "documents, causal": lambda b, h, i, j: (document[i] == document[j]) & (j <= i),
        "prefix of 300": lambda b, h, i, j: (j <= i) | (j < 300),
        "window of 200, 32 global": lambda b, h, i, j: (j <= i) & ((i - j < 200) | (j < 32)),
        "random blocks": lambda b, h, i, j: block[i // 128, j // 128] | (i // 128 == j // 128),
    }
    side = 27.5
    for index, (name, function) in enumerate(masks.items()):
        x, y = index % 3 * 250, 56 + index // 3 * 280
        mask = block_mask(function, N=1024, M=1024)
        d.words(x, y - 8, name, bold=True)
        _draw_tiles(d, x, y, side, mask)
        whole, some = int((mask.tiles == -1).sum()), int((mask.tiles >= 0).sum())
        d.words(x, y + 8 * side + 16, f"{whole} tiles see all, {some} some, {64 - whole - some} none", points=12)
    parents, cache = [-1, 0, 0, 0, 1, 1, 2, 3, 4, 6, 6, 9], 9
    seen = torch.eye(len(parents), dtype=torch.bool)
    for token, parent in enumerate(parents[1:], 1):
        seen[token] |= seen[parent]
    x, y, side = 500, 336, 220 / (cache + len(parents))
    d.words(x, y - 8, "a tree behind a cache", bold=True)
    _fill(d, x, y, side, torch.ones(len(parents), cache, dtype=torch.bool), BLUE, 0.55)
    _fill(d, x + cache * side, y, side, seen, ORANGE, 0.8)
    _draw_grid(d, x, y, side, len(parents), cache + len(parents))
    lines = (
        "12 proposed tokens, a cell each: all see",
        "the cache (blue) and their own path",
        "from the root (orange)",
    )
    for line, text in enumerate(lines):
        d.words(x, y + 12 * side + 17 + 16 * line, text, points=12)
    return d.render()


LEVELS = 10
"""Shades of a colour."""


def draw_biases() -> str:
    """Numbers that are added to the logits of one head: slopes, and a bias by the bucket of the distance."""
    d = Drawing(
        720, 300, "Biases of one head: ALiBi falls with the distance, T5's is learned for buckets of distances"
    )
    n, side = 32, 7
    distance = torch.arange(n) - torch.arange(n)[:, None]
    causal, all_seen = distance <= 0, torch.ones(n, n, dtype=torch.bool)
    learned = torch.randn(12, generator=torch.Generator().manual_seed(5))
    bucket = distance.abs().clamp(min=1).log2().ceil().int() + 6 * (distance > 0)
    keys = learned[torch.arange(n) % 11].expand(n, n)
    for x, title, more, numbers, seen in (
        (0, "alibi, causal", "−slope · distance: far keys count less", distance * 0.1, causal),
        (250, "bias by buckets, as in T5", "a learned number for each bucket", learned[bucket], all_seen),
        (500, "bias of keys", "a number of each key, for all queries", keys, all_seen),
    ):
        d.words(x, 16, title, bold=True)
        levels = (numbers / numbers.abs().max() * LEVELS).round()
        for level in range(-LEVELS, LEVELS + 1):
            colour = BLUE if level > 0 else ORANGE
            _fill(d, x, 28, side, (levels == level) & seen, colour, 0.05 + 0.08 * abs(level))
        _draw_grid(d, x, 28, n * side, 1, 1)
        d.words(x, 28 + n * side + 17, more, points=12)
    d.words(
        0,
        292,
        "Blue is added, orange taken away; hidden keys are empty. Queries downwards, keys to the right.",
        points=12,
    )
    return d.render()


DIAGRAMS: Mapping[str, Callable[[], str]] = {
    "architecture": draw_architecture,
    "hopper_forward": draw_hopper_forward,
    "hopper_backward": draw_hopper_backward,
    "decoding_chunks": draw_chunks,
    "linear_attention_tile": draw_linear_chunk,
    "tpa_factors": draw_factors,
    "context_parallel_layouts": draw_layouts,
    "softmax_sequence_rounds": draw_rounds,
    "masks": draw_masks,
    "biases": draw_biases,
}


def main() -> int:
    """Write all; returns the exit status."""
    for name, draw in DIAGRAMS.items():
        replace_text(FIGURES / f"{name}.svg", draw())
    return 0


if __name__ == "__main__":
    sys.exit(main())
