"""``warploom profile``: where the time and memory of one case go."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from warploom.cli.common import Commands, add_selection, select, slug, the_device, width

KINDS = ("parts", "chrome", "memory", "ncu", "once")
EXAMPLES = """kinds:
  parts    milliseconds of each part of a model, forward and backward
  chrome   a timeline of some calls, for Perfetto
  memory   every allocation of one call on a GPU, for pytorch.org/memory_viz
  ncu      every counter of one call from Nsight Compute
  once     one call between the marks that a profiler around this process looks for

examples:
  warploom profile transformer --case size=sm --mode train --provider warploom,sdpa
  warploom profile lrpe-rotate --mode fwd --case n=4096 --case activation=none --kind ncu
"""


def add_parser(commands: Commands) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "profile",
        help="where the time and memory of one case go",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_selection(parser)
    parser.add_argument("--kind", choices=KINDS, help="default: parts of a model, chrome of an operator")
    parser.add_argument("--output", type=Path, metavar="DIR", help="for files; default: runs/DEVICE-profile")
    parser.set_defaults(command=_profile)


def _profile(options: argparse.Namespace) -> int:
    from warploom.bench import traces
    from warploom.report.table import text
    from warploom.report.tables import parts_table

    device = the_device(options.device)
    chosen, selection = select(options, options.mode)
    unit = traces.one_unit(chosen, selection, device)
    output = options.output or Path("runs") / f"{slug(device)}-profile"
    kind = options.kind or ("chrome" if unit.bench.measure is None else "parts")
    own = ("warploom",) if kind == "parts" and unit.bench.measure is not None else tuple(unit.bench.every_provider)
    providers = [name for name in unit.bench.every_provider if name in (options.provider or own)]
    written = []
    if kind == "parts":
        rows = traces.parts(unit, providers, device)
        print(text([parts_table(f"{unit}  parts in ms", rows)], width()))
        return int(not rows)
    if kind == "once":
        traces.call_once(unit, providers, device)
        return 0
    if kind == "ncu":
        again = ["profile", unit.bench.name, *(f"--spec={spec}" for spec in options.spec)]
        again += ["--suite", unit.suite, "--mode", unit.mode, "--device", device.type]
        again += [f"--dtype={','.join(selection.dtypes)}"] if selection.dtypes else []
        again += [f"--case={name}={v if isinstance(v, str) else json.dumps(v)}" for name, v in unit.case.items()]
        written = traces.ncu(unit, providers, again, output)
    elif kind == "memory":
        written = traces.memory(unit, providers, device, output)
    else:
        written = traces.chrome(unit, providers, device, output)
    for path in written:
        print(path)
    return int(not written)
