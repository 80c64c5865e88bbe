"""``warploom compare``: two runs, two providers or two GPUs, case by case."""

from __future__ import annotations

import argparse
import math
import textwrap
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from warploom.cli.common import Commands, add_spec, width
from warploom.errors import ArgumentError

if TYPE_CHECKING:
    from warploom.bench.comparison import Comparison, Pair
    from warploom.report.table import Table

MOST_CASES = 5
"""The number of slowest, and of fastest, cases that are shown."""
WIDE = 110
"""The least width of a terminal, in columns, for the intervals of cases."""


def add_parser(commands: Commands) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "compare",
        help="compare the times of two runs, providers or GPUs",
        description="Ratios are time of B over time of A: above 1, B is slower.",
    )
    parser.add_argument(
        "a", metavar="A", help="a folder of records or a records file; PATH:PROVIDER for a provider"
    )
    parser.add_argument("b", metavar="B", nargs="?", help="the other one; left out with --providers")
    parser.add_argument("--providers", nargs=2, metavar=("A", "B"), help="two providers of the records in A")
    parser.add_argument(
        "--fail-above",
        type=_fraction,
        metavar="PERCENT",
        help="exit with 1 if a case is slower by more than this (5%%) and significantly so, or fails only in B",
    )
    parser.add_argument("--all", action="store_true", help="show every case, not the slowest and fastest alone")
    parser.add_argument("--json", action="store_true", help="as JSON")
    add_spec(parser)
    parser.set_defaults(command=_compare)


def _fraction(text: str) -> float:
    """Returns the fraction that a percentage is, with or without its sign."""
    try:
        value = float(text.removesuffix("%")) / 100
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"expected a percentage like 5%, got {text!r}")
    return value


def _compare(options: argparse.Namespace) -> int:
    from warploom.bench.comparison import compare, read_side
    from warploom.testing.specs import load_specs

    load_specs(options.spec)
    if (options.b is None) == (options.providers is None):
        raise ArgumentError("compare: give either A and B, or A and --providers with two names")
    if options.providers:
        sides = [read_side(options.a, provider) for provider in options.providers]
    else:
        sides = [read_side(options.a), read_side(options.b)]
    comparison = compare(*sides)
    print(comparison.to_json() if options.json else _text(comparison, options.fail_above, options.all))
    return int(options.fail_above is not None and bool(comparison.slower(options.fail_above)))


def _text(comparison: Comparison, fail_above: float | None, every: bool) -> str:
    """Returns the summary: counts, means, and the slowest and fastest cases, or every case."""
    from warploom.report.table import Table, render_text

    sides = (f"A: {comparison.a.describe()}", f"B: {comparison.b.describe()}")
    lines = [textwrap.fill(side, width(140), subsequent_indent="   ", break_on_hyphens=False) for side in sides]
    if comparison.unmatched:
        lines.append(f"{comparison.unmatched} cases are on one side only, or of two runs, and left out")
    counts = Counter(pair.verdict if pair.comparable else "without two times" for pair in comparison.pairs)
    said = ", ".join(f"{count} {verdict}" for verdict, count in counts.most_common())
    lines.append(f"B is, in {len(comparison.pairs)} cases: {said}")
    if counts["disturbed"]:
        lines.append("cases that were disturbed while they were timed have no interval, and are in no mean")
    if fail_above is not None:
        worse = comparison.slower(fail_above)
        lines.append(f"{len(worse)} of {len(comparison.pairs)} cases worse by more than {100 * fail_above:g} %")
    means = [
        [mean.name, str(mean.cases), f"{mean.ratio:.3f}", f"{mean.low:.3f} … {mean.high:.3f}"]
        for mean in comparison.means
    ]
    tables = [Table.of(["geometric mean", "cases", "B / A", "interval"], means)] if means else []
    ranked = sorted(comparison.pairs, key=lambda pair: pair.ratio if pair.comparable else math.inf, reverse=True)
    if every or len(ranked) <= 2 * MOST_CASES:
        tables.append(_cases("case", comparison, comparison.pairs))
    else:
        tables.append(_cases("slowest", comparison, ranked[:MOST_CASES]))
        tables.append(_cases("fastest", comparison, ranked[: -MOST_CASES - 1 : -1]))
        lines.append("the slowest and the fastest cases of B are below; --all shows every case")
    return "\n".join([*lines, "", render_text(tables, width(140))]).rstrip()


def _cases(head: str, comparison: Comparison, pairs: Sequence[Pair]) -> Table:
    """Returns a table of some pairs, with their intervals if the terminal is wide."""
    from warploom.bench.comparison import case_words
    from warploom.report.table import Table

    said = dict(zip(map(id, comparison.pairs), case_words(comparison.pairs), strict=True))
    wide = width(140) >= WIDE
    room = width(140) - (52 if wide else 36)
    rows = []
    for pair in pairs:
        low, high = pair.interval
        numbers = [
            f"{pair.ratio:.3f}" if pair.comparable else "",
            "" if math.isnan(low) else f"{low:.3f} … {high:.3f}",
        ]
        times = ["" if record.ms is None else f"{record.ms:.4g}" for record in (pair.a, pair.b)]
        name = textwrap.fill(f"{pair.operator} {pair.mode} {said[id(pair)]}", room, break_on_hyphens=False)
        rows.append([name, *times, *numbers[: 2 if wide else 1], pair.verdict])
    disturbed = (pair for pair in pairs if pair.disturbed)
    notes = [f"disturbed: {pair.operator} {pair.mode} {said[id(pair)]}: {pair.disturbed}" for pair in disturbed]
    heads = [head, "A ms", "B ms", "B / A", *(["interval"] if wide else []), "B is"]
    return Table.of(heads, rows, notes=notes)
