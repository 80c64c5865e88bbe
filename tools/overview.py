"""Draw the picture of the front page: a mark for every case, at the time of its fastest alternative over ours."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from warploom.bench.comparison import Pair
from warploom.report.palette import MUTED
from warploom.report.panels import Section
from warploom.report.rivals import summarize

__all__ = ["draw_overview"]

_16, _32 = {"dtype": "bfloat16"}, {"dtype": "float32"}
ROWS: Sequence[tuple[str, str, Mapping[str, Any], str]] = (
    ("RoPE, forward", "lrpe_rope", {}, "fwd"),
    ("RoPE, backward", "lrpe_rope", {}, "bwd"),
    ("LRPE rotate, forward", "lrpe_rotate", {}, "fwd"),
    ("LRPE rotate, backward", "lrpe_rotate", {}, "bwd"),
    ("LRPE cosine, forward", "lrpe_cosine", {}, "fwd"),
    ("LRPE cosine, backward", "lrpe_cosine", {}, "bwd"),
    ("bf16 attention, forward", "flash_attention", _16, "fwd"),
    ("bf16 attention, backward", "flash_attention", _16, "bwd"),
    ("float32 attention, forward", "flash_attention", _32, "fwd"),
    ("float32 attention, backward", "flash_attention", _32, "bwd"),
    ("attention, decoding", "attention_decode", {}, "fwd"),
    ("linear attention, forward", "linear_attention", {}, "fwd"),
    ("linear attention, backward", "linear_attention", {}, "bwd"),
    ("TPA, forward", "tpa_attention", {}, "fwd"),
    ("TPA, backward", "tpa_attention", {}, "bwd"),
    ("TPA, decoding", "tpa_decode", {}, "fwd"),
    ("Transformer LM, a step", "transformer", {}, "train"),
)
"""Label, operator, parameters that the cases have, mode."""
LEAST, MOST = 0.75, 12.0
TICKS = (0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0)
LEFT, RIGHT, WIDTH, TOP = 200, 62, 620, 66
STEP, CROWDED = 23, 40
"""Heights of a row, and of one with more than 30 cases."""
LOOKS = {
    "slower": ("#1f7fc4", "ours is faster"),
    "same": (MUTED, "level, inside the spread"),
    "faster": ("#d55e00", "the alternative is faster"),
}
"""Colour and meaning by the verdict on the alternative."""


def draw_overview(sections: Sequence[tuple[Section, str]]) -> str:
    """Returns the picture of sections, each with its GPU, as an SVG file. Rows without a case are left out."""
    rows = []
    for label, operator, parameters, mode in ROWS:
        for section, gpu in sections:
            found = [s.pairs for s in summarize(section) if s.operator == operator and s.mode == mode]
            pairs = [p for pairs in found for p in pairs if parameters.items() <= dict(p.case).items()]
            if pairs:
                rows.append((label, gpu, pairs))
    usual = Counter(gpu for _, gpu, _ in rows).most_common(1)[0][0] if rows else ""
    one = _across(1.0)
    parts = [
        _text(10, 18, f"Time of the fastest alternative over ours; a mark is a case, of an {usual}", "start", 14)
    ]
    parts += [_text(one - 8, 44, "← slower", "end"), _text(one + 8, 44, "faster →", "start")]
    parts.append(_text(WIDTH - RIGHT + 10, 44, "lost / all", "start", 12))
    marks, y = [], TOP
    for label, gpu, pairs in rows:
        height = CROWDED if len(pairs) > 30 else STEP
        marks += _draw_row(y + height // 2, label if gpu == usual else f"{label} ({gpu})", pairs)
        y += height
    rules = "".join(f"M{_across(tick)} {TOP - 12}V{y}" for tick in TICKS if tick != 1.0)
    parts.append(f'<path d="{rules}" stroke="{MUTED}" stroke-opacity=".3"/>')
    parts.append(f'<path d="M{one} {TOP - 12}V{y}" stroke="{MUTED}" stroke-width="2"/>')
    parts += [_text(_across(tick), y + 17, f"{tick:g}×", "middle") for tick in TICKS]
    x = 10
    for verdict, (_, words) in LOOKS.items():
        marks += [_mark(x + 5, y + 38, verdict), _text(x + 15, y + 42, words, "start")]
        x += 40 + 7 * len(words)
    about = "How many times as long as ours the fastest alternative takes, by operator"
    head = f'viewBox="0 0 {WIDTH} {y + 52}" width="{WIDTH}" height="{y + 52}" role="img" aria-label="{about}"'
    body = "\n".join([*parts, *marks])
    return f'<svg xmlns="http://www.w3.org/2000/svg" {head} font-family="sans-serif">\n{body}\n</svg>\n'


def _draw_row(y: int, label: str, pairs: Sequence[Pair]) -> list[str]:
    """Marks of one row, those that lie close together above each other, and how many are lost."""
    levels = (0, -6, 6, -12, 12) if len(pairs) > 30 else (0, -5, 5)
    parts, last, level = [_text(LEFT - 12, y + 4, label, "end")], -99, 0
    for pair in sorted(pairs, key=lambda pair: pair.ratio):
        x = _across(pair.ratio)
        level = (level + 1) % len(levels) if x - last < 8 else 0
        last = x
        parts.append(_mark(x, y + levels[level], pair.verdict))
    lost = sum(pair.verdict == "faster" for pair in pairs)
    return [*parts, _text(WIDTH - RIGHT + 10, y + 4, f"{lost} / {len(pairs)}", "start")]


def _across(ratio: float) -> int:
    share = math.log(min(max(ratio, LEAST), MOST) / LEAST) / math.log(MOST / LEAST)
    return round(LEFT + share * (WIDTH - LEFT - RIGHT))


def _mark(x: int, y: int, verdict: str) -> str:
    """A disc, a ring or a diamond, so that colour is not needed."""
    colour = LOOKS[verdict][0]
    if verdict == "faster":
        return f'<path d="M{x} {y - 5}l5 5l-5 5l-5 -5z" fill="{colour}" fill-opacity=".8"/>'
    look = f'fill="{colour}" fill-opacity=".7"' if verdict == "slower" else f'fill="none" stroke="{colour}"'
    return f'<circle cx="{x}" cy="{y}" r="4" {look}/>'


def _text(x: int, y: int, words: str, anchor: str, points: int = 13) -> str:
    return (
        f'<text x="{x}" y="{y}" text-anchor="{anchor}" font-size="{points}" fill="{MUTED}">{escape(words)}</text>'
    )
