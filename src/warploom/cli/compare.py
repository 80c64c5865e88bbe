"""``warploom compare``: two runs, two providers or two GPUs, case by case."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from warploom.cli.common import Commands, add_spec, width
from warploom.errors import ArgumentError

if TYPE_CHECKING:
    from warploom.bench.comparison import Comparison


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
    parser.add_argument("--json", action="store_true", help="as JSON")
    add_spec(parser)
    parser.set_defaults(command=_compare)


def _fraction(text: str) -> float:
    """A percentage, with or without its sign."""
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
    print(comparison.to_json() if options.json else _text(comparison, options.fail_above))
    return int(options.fail_above is not None and bool(comparison.slower(options.fail_above)))


def _text(comparison: Comparison, fail_above: float | None) -> str:
    """The summary first, then the cases."""
    from warploom.bench.comparison import case_words
    from warploom.report.table import Table, text

    lines = [f"A: {comparison.a.describe()}", f"B: {comparison.b.describe()}"]
    if comparison.unmatched:
        lines.append(f"{comparison.unmatched} cases are on one side only, or of two runs, and left out")
    if fail_above is not None:
        worse = comparison.slower(fail_above)
        lines.append(f"{len(worse)} of {len(comparison.pairs)} cases worse by more than {100 * fail_above:g} %")
    means = [
        [mean.name, str(mean.cases), f"{mean.ratio:.3f}", f"{mean.low:.3f} … {mean.high:.3f}"]
        for mean in comparison.means
    ]
    cases = []
    for pair, words in zip(comparison.pairs, case_words(comparison.pairs), strict=True):
        low, high = pair.interval
        numbers = [f"{pair.ratio:.3f}", f"{low:.3f} … {high:.3f}"] if pair.comparable else ["", ""]
        times = ["" if record.ms is None else f"{record.ms:.4g}" for record in (pair.a, pair.b)]
        cases.append([f"{pair.operator} {pair.mode} {words}", *times, *numbers, pair.verdict])
    notes = [
        f"disturbed: {pair.operator} {pair.mode} {dict(pair.case)}: {pair.disturbed}"
        for pair in comparison.pairs
        if pair.disturbed
    ]
    tables = [
        Table.of(["geometric mean", "cases", "B / A", "interval"], means),
        Table.of(["case", "A ms", "B ms", "B / A", "interval", "B is"], cases, notes=notes),
    ]
    return "\n".join([*lines, "", text(tables, width(140))]).rstrip()
