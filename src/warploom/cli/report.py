"""``warploom report``: recorded runs as one HTML file, pictures and the README's table."""

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
    parser.add_argument("--pictures", type=Path, metavar="DIR", help="also draw an SVG of each bench there")
    parser.add_argument(
        "--readme",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="also rewrite the tables in this file; may be repeated",
    )
    add_spec(parser)
    parser.set_defaults(command=_report)


def _report(options: argparse.Namespace) -> int:
    from warploom.bench.report import write_report
    from warploom.bench.specs import load_specs

    load_specs(options.spec)
    first = options.paths[0]
    beside = first if first.is_dir() else first.parent
    if options.pictures:
        from warploom.bench.plots import write_pictures

        for picture in write_pictures(options.paths, options.pictures):
            print(picture)
    for readme in options.readme:
        from warploom.bench.readme import update

        update(readme, options.paths)
        print(readme)
    print(write_report(options.paths, options.output or beside / "report.html"))
    return 0
