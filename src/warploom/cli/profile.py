"""``warploom profile``: where the time and memory of one case go."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from warploom.cli.common import Commands, add_selection, select, slug, the_device, width
from warploom.cli.quiet import quiet

if TYPE_CHECKING:
    from warploom.bench.traces import Trace
    from warploom.report.table import Table

KINDS = ("chrome", "memory", "ncu", "once")
EXAMPLES = """kinds:
  chrome   a timeline of some calls, for Perfetto, and what took the time in it
  memory   every allocation of one call on a GPU, for pytorch.org/memory_viz
  ncu      every counter of one call from Nsight Compute
  once     one call between the marks that a profiler around this process looks for

examples:
  warploom profile lrpe-rotate --mode fwd --case n=4096 --case activation=none
  warploom profile lrpe-rotate --mode fwd --case n=4096 --case activation=none --kind ncu
"""
MOST_ROWS = 10
WRITTEN = {"chrome": "timelines, for ui.perfetto.dev:", "memory": "allocations, for pytorch.org/memory_viz:"}


def add_parser(commands: Commands) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "profile",
        help="where the time and memory of one case go",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_selection(parser)
    parser.add_argument("--kind", choices=KINDS, default="chrome", help="default: chrome")
    parser.add_argument("--output", type=Path, metavar="DIR", help="for files; default: runs/DEVICE-profile")
    parser.set_defaults(command=_profile)


def _profile(options: argparse.Namespace) -> int:
    from warploom.bench import traces
    from warploom.bench.progress import shorten
    from warploom.bench.records import as_option
    from warploom.bench.storage import probe
    from warploom.report.table import Table, render_text

    device = the_device(options.device)
    chosen, selection = select(options, options.mode)
    unit = traces.one_unit(chosen, selection, device)
    every = list(unit.bench.every_provider)
    providers = [name for name in every if name in (options.provider or every)]
    if options.kind == "once":
        traces.call_once(unit, providers, device)
        return 0
    output = options.output or Path("runs") / f"{slug(device)}-profile"
    probe(output)
    tables: list[Table] = []
    if options.kind == "ncu":
        again = ["profile", unit.bench.name, *(f"--spec={spec}" for spec in options.spec)]
        again += ["--suite", unit.suite, "--mode", unit.mode, "--device", device.type]
        again += [f"--dtype={','.join(selection.dtypes)}"] if selection.dtypes else []
        again += [f"--case={name}={as_option(value)}" for name, value in unit.case.items()]
        written = traces.ncu(unit, providers, again, output)
    elif options.kind == "memory":
        lines = traces.memory(unit, providers, device, output)
        written, room = list(lines), width() - 30
        for path, found in lines.items():
            rows = [[shorten(place, room), str(count), f"{mib:.1f}"] for place, count, mib in found[:MOST_ROWS]]
            tables.append(Table.of(["line that allocates", "times", "MiB"], rows, title=path.stem))
    else:
        with quiet(output / "profile.log"):
            timelines = traces.chrome(unit, providers, device, output)
        written = [trace.path for trace in timelines]
        tables = [table for trace in timelines for table in _tables(trace, device.type)]
    if tables:
        print(render_text(tables, width()))
    if written and options.kind in WRITTEN:
        print(WRITTEN[options.kind])
    for path in written:
        print(path)
    return int(not written)


def _tables(trace: Trace, device_type: str) -> list[Table]:
    """Returns the kernels of a timeline that took the time, and its parts if it has any."""
    from warploom.bench.progress import shorten
    from warploom.report.table import Table

    total = sum(ms for _, ms in trace.kernels.values())
    entries = list(trace.kernels.items())
    shown = entries[: MOST_ROWS if len(entries) > MOST_ROWS + 1 else None]
    if rest := entries[len(shown) :]:
        calls, ms = (sum(values) for values in zip(*(value for _, value in rest)))
        shown.append((f"{len(rest)} others", (calls, ms)))
    rows = [
        [shorten(name, width() - 30), f"{calls:.0f}", f"{ms:.4f}", f"{ms / (total or 1):.0%}"]
        for name, (calls, ms) in shown
    ]
    what = "kernel" if device_type == "cuda" else "operator of PyTorch"
    title = f"{trace.provider}: {total:.4g} ms a call; allocates {trace.peak_mib:.1f} MiB at most"
    tables = [Table.of([what, "times", "ms", "share"], rows, title=title)]
    if trace.parts:
        cells = [[phase, part, f"{ms:.3f}"] for (phase, part), ms in trace.parts.items()]
        notes = ["marks around parts cost the host time: the total is not a step's"]
        title = f"{trace.provider}: parts"
        tables.append(Table.of(["phase", "part", "ms"], cells, title=title, notes=notes, words=2))
    return tables
