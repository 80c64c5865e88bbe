"""``warploom report``: recorded runs as one HTML file."""

from __future__ import annotations

import argparse
from pathlib import Path

from warploom.cli.common import Commands, add_spec


def add_parser(commands: Commands) -> None:
    """Add the command."""
    parser = commands.add_parser("report", help="draw recorded runs as one HTML file")
    parser.add_argument(
        "paths", nargs="+", type=Path, metavar="PATH", help="folders of runs, or records.jsonl files"
    )
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="default: report.html beside the first")
    add_spec(parser)
    parser.set_defaults(command=_report)


def _report(options: argparse.Namespace) -> int:
    from warploom.report import write_report
    from warploom.testing.specs import load_specs

    load_specs(options.spec)
    first = options.paths[0]
    beside = first if first.is_dir() else first.parent
    print(write_report(options.paths, options.output or beside / "report.html"))
    return 0
