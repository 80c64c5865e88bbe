"""``warploom accuracy``: cosines and sines of large positions against float64."""

from __future__ import annotations

import argparse
from pathlib import Path

from warploom.cli.common import Commands, add_device, slug, the_device


def add_parser(commands: Commands) -> None:
    """Add the command."""
    parser = commands.add_parser("accuracy", help="show how exact angles at large positions are")
    add_device(parser)
    parser.add_argument("--backend", choices=("auto", "triton", "torch"), default="auto")
    parser.add_argument("--output", type=Path, metavar="DIR", help="write accuracy.json here; default: runs/DEVICE")
    parser.add_argument(
        "--readme", type=Path, metavar="FILE", help="also rewrite the table between the marks there"
    )
    parser.set_defaults(command=_accuracy)


def _accuracy(options: argparse.Namespace) -> int:
    from warploom.bench.phase_accuracy import FILE, measure_phase, phase_table, save_phase, update
    from warploom.bench.storage import probe

    device = the_device(options.device)
    output = options.output or Path("runs") / slug(device)
    probe(output, FILE)
    measured = measure_phase(device, options.backend)
    print(phase_table(measured))
    file = save_phase(output, measured)
    print(file)
    if options.readme:
        update(options.readme, [file])
        print(options.readme)
    return 0
