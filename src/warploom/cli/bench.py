"""``warploom bench``: time operators against the hardware's limit and what else there is."""

from __future__ import annotations

import argparse
import functools
import importlib.util
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from warploom.cli.common import Commands, add_selection, describe, seconds, select, slug, the_device, width
from warploom.cli.needs import check_compilers, check_folder
from warploom.cli.quiet import quiet
from warploom.errors import ArgumentError

if TYPE_CHECKING:
    import torch

    from warploom.bench.evaluate import Unit
    from warploom.bench.records import Record
    from warploom.ops.spec import Bench

LOG = "bench.log"
"""The file, beside the records, for what compilers and libraries print."""
SECONDS = {"cuda": {True: 3.0, False: 4.0}, "cpu": {True: 2.0, False: 10.0}}
"""Seconds of a case in one mode, by device and by whether its suite is brief: means, compiling included."""
EXAMPLES = """examples:
  warploom bench                                  the quick suite of every operator
  warploom bench lrpe-rotate --suite published    one bench, the published cases
  warploom bench lrpe-rotate --case n=4096 --case n=8192 --mode fwd
  warploom bench flash-attention --provider warploom,sdpa_cudnn --resume
  warploom bench --spec benchmarks/transformer.py a model's steps, in a checkout
  warploom list lrpe-rotate                       its suites and cases
"""


def add_parser(commands: Commands) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "bench",
        help="time operators against the hardware's limit and what else there is",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_selection(parser)
    add = parser.add_argument
    add("--cuda-graph", action="store_true", help="time replays of captured graphs: --mode fwd_graph")
    add("--output", type=Path, metavar="DIR", help="default: runs/DEVICE-SUITE")
    resume = "leave out the cases that DIR has whole, from the same code and environment"
    add("--resume", action="store_true", help=resume)
    add("--time-limit", type=seconds, metavar="SECONDS", help="begin no further case after this time")
    add("--no-report", action="store_true", help="write no HTML report")
    parser.set_defaults(command=_bench)


def _bench(options: argparse.Namespace) -> int:
    from warploom.bench.compile_first import compile_first
    from warploom.bench.records import RECORDS
    from warploom.bench.runner import plan, run
    from warploom.report import render_terminal

    device = the_device(options.device)
    graphs = [f"{mode.removesuffix('_graph')}_graph" for mode in options.mode or ["fwd"]]
    chosen, selection = select(options, graphs if options.cuda_graph else options.mode)
    units = plan(chosen, selection, device.type)
    output = options.output or Path("runs") / f"{slug(device)}-{options.suite}"
    _check_commit(output, device)
    check_folder(output, RECORDS, says="--output names another folder")
    if device.type == "cuda":
        check_compilers()
    print(describe(device), flush=True)
    if device.type == "cpu" and options.provider is None:
        print("On a CPU PyTorch is timed; --provider adds compiled peers.", flush=True)
    report = not options.no_report and importlib.util.find_spec("jinja2") is not None
    if not options.no_report and not report:
        print("warploom: no report: jinja2 is missing: pip install 'warploom[bench]'", file=sys.stderr)
    more = "" if device.type == "cpu" or options.provider else _more(chosen, options.suite)
    if device.type == "cpu" and options.provider is None:
        chosen = [_without_compilers(bench) for bench in chosen]
    prepare = functools.partial(compile_first, device=device, specs=options.spec)
    limits: dict[str, Any] = {"resume": options.resume, "time_limit": options.time_limit}
    log = output / LOG
    print(_how_long(units, device.type), flush=True)
    with quiet(log) as shown:
        outcome = run(chosen, selection, device, output, prepare=prepare, terminal=shown, **limits)

    print(render_terminal(outcome.records, width()))
    if outcome.reason:
        some, rest = outcome.left[:5], len(outcome.left) - 5
        lines = [*some, *([f"and {rest} more"] if rest > 0 else [])]
        head = f"warploom: {outcome.reason}; {len(outcome.left)} left, --resume goes on with:"
        print("\n  ".join([head, *lines]), file=sys.stderr)
    if more:
        print(textwrap.fill(more, width(), subsequent_indent="  ", break_on_hyphens=False))
    if log.exists():
        print(f"log: {log}")
    if why := _why_nothing(outcome.records):
        print(f"warploom: {why}", file=sys.stderr)
        return 1
    print(f"records: {output / RECORDS}")
    if report:
        from warploom.report import write_report

        print(f"report: {write_report([output], output / 'report.html')}")
    return int(outcome.failed(chosen, device.type) or outcome.device_lost)


def _why_nothing(records: Sequence[Record]) -> str:
    """Returns the reason if no provider has a time, but for the limit of others; empty if one has."""
    from warploom.bench.records import LIMIT

    timed = {record.provider for record in records if record.ms}
    if timed - {LIMIT} or (timed and {record.provider for record in records} == {LIMIT}):
        return ""
    reasons = dict.fromkeys(f"{record.provider}: {record.reason}" for record in records if record.reason)
    return "; ".join(["nothing was measured" + " but the limit" * bool(timed), *reasons])


def _how_long(units: Sequence[Unit], device_type: str) -> str:
    """Returns the number of cases, and roughly the time that they take."""
    seconds = sum(SECONDS[device_type][unit.is_brief] for unit in units)
    time = f"{-(-seconds // 60):.0f} min" if seconds > 90 else f"{-(-seconds // 10) * 10:.0f} s"
    cases = "1 case" if len(units) == 1 else f"{len(units)} cases"
    idle = "" if device_type == "cuda" else " if no other program computes"
    return f"{cases} (each mode counts as one): about {time}{idle}"


def _more(chosen: Sequence[Bench], suite: str) -> str:
    """Returns how to measure the providers that a suite leaves out, if it does."""
    measured = {name for bench in chosen for name in bench.providers_of(suite)}
    others = {name for bench in chosen for name in bench.every_provider if not bench.runs_kernels(name)}
    names = ", ".join(sorted(others - measured))
    return f"more with --suite published: {names}" if suite == "quick" and names else ""


def _without_compilers(bench: Bench) -> Bench:
    """Returns a bench without the providers that compile for a minute, if it says which do not."""
    kept = {name: build for name, build in bench.providers.items() if name in bench.precompiled}
    others = tuple(other for other in bench.others if set(other.providers) <= set(bench.precompiled))
    return replace(bench, providers=kept, others=others) if kept else bench


def _check_commit(output: Path, device: torch.device) -> None:
    """Raise an error if records under ``results`` would be of a commit that cannot be found again."""
    if "results" not in Path.cwd().joinpath(output).parts:
        return
    from warploom.bench.environment import COMMIT, describe_environment

    environment = describe_environment(device)
    if environment.get("dirty") or "commit" not in environment:
        found = "it has changes" if environment.get("dirty") else f"it is not known ({COMMIT} may say it)"
        raise ArgumentError(f"bench: {output} takes records of a clean commit alone, and {found}")
