"""``warploom bench``: time operators against the hardware's limit and what else there is, or profile one case."""

from __future__ import annotations

import argparse
import functools
import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from warploom.cli.common import (
    OPTIONAL,
    Commands,
    add_device,
    add_spec,
    install_hint,
    names_in,
    package,
    pick,
    slug,
    the_device,
    words,
)
from warploom.errors import ArgumentError

if TYPE_CHECKING:
    import torch

    from warploom.bench.runner import Outcome, Selection
    from warploom.ops.spec import Bench

_SHORT_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}


def add_parser(commands: Commands) -> None:
    """Add the command."""
    parser = commands.add_parser("bench", help="time operators against the hardware's limit and what else there is")
    parser.add_argument("names", nargs="*", metavar="NAME", help="benches, e.g. lrpe-rotate (default: all)")
    add_spec(parser)
    parser.add_argument(
        "--suite", default="quick", help="quick (default) or published: the published tables' cases"
    )
    parser.add_argument("--mode", type=words, metavar="MODE[,MODE]", help="fwd, bwd (default: all), fwd_graph")
    parser.add_argument(
        "--cuda-graph", action="store_true", help="time replays of captured graphs: --mode fwd_graph"
    )
    parser.add_argument("--provider", type=words, metavar="NAME[,NAME]", help="default: all of the bench")
    parser.add_argument(
        "--dtype",
        type=words,
        metavar="NAME[,NAME]",
        help="run the cases in bf16, fp16, fp32, not in their own dtype",
    )
    parser.add_argument(
        "--case",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="only cases with this value; may be repeated, with the same key for alternatives",
    )
    add_device(parser)
    parser.add_argument("--output", type=Path, metavar="DIR", help="default: runs/DEVICE-SUITE")
    parser.add_argument(
        "--resume", action="store_true", help="keep what DIR has from the same code and environment"
    )
    parser.add_argument(
        "--time-limit", type=_duration, metavar="SECONDS", help="begin no further case after this time"
    )
    parser.add_argument("--no-report", action="store_true", help="write no HTML report")
    parser.add_argument(
        "--profile",
        choices=("chrome", "ncu", "once"),
        help="of one case, not timed: a timeline, the counters of Nsight Compute, or one marked call",
    )
    parser.set_defaults(command=_bench)


def _bench(options: argparse.Namespace) -> int:
    from warploom.bench import tables
    from warploom.bench.compile_first import compile_first
    from warploom.bench.records import RECORDS
    from warploom.bench.runner import Selection, run
    from warploom.bench.specs import load_specs
    from warploom.ops import benches

    device = the_device(options.device)
    own = names_in(load_specs(options.spec), "benches")
    known = benches()
    chosen = [known[name] for name in pick(options.names or own, known, "bench", "-")]
    dtypes = options.dtype and [_SHORT_DTYPES.get(name, name) for name in options.dtype]
    selection = Selection(options.suite, _modes(options), options.provider, _case_filter(options.case), dtypes)
    output = options.output or Path("runs") / f"{slug(device)}-{options.suite}"
    if options.profile:
        return _profile(options, chosen, selection, device, output)
    prepare = functools.partial(compile_first, device=device, specs=options.spec)
    outcome = run(
        chosen, selection, device, output, resume=options.resume, time_limit=options.time_limit, prepare=prepare
    )

    width = min(max(shutil.get_terminal_size((100, 24)).columns, 80), 120)
    print(tables.text(tables.sections(outcome.records, chosen), width))
    if outcome.reason:
        _print_left(outcome)
    if not (output / RECORDS).is_file():
        print("warploom: nothing was measured", file=sys.stderr)
        return 0
    print(f"records: {output / RECORDS}")
    if not options.no_report:
        _print_report([output], output / "report.html")
    return int(outcome.failed(chosen, device.type) or outcome.device_lost)


def _modes(options: argparse.Namespace) -> list[str] | None:
    if not options.cuda_graph:
        modes: list[str] | None = options.mode
        return modes
    return [f"{mode.removesuffix('_graph')}_graph" for mode in options.mode or ["fwd"]]


def _profile(
    options: argparse.Namespace, chosen: Sequence[Bench], selection: Selection, device: torch.device, output: Path
) -> int:
    from warploom.bench import traces

    unit = traces.one_unit(chosen, selection, device)
    providers = [name for name in unit.bench.every_provider if options.provider is None or name in options.provider]
    if options.profile == "once":
        traces.call_once(unit, providers, device)
        return 0
    if options.profile == "ncu":
        again = ["bench", unit.bench.name, *(f"--spec={spec}" for spec in options.spec)]
        again += ["--suite", unit.suite, "--mode", unit.mode, "--device", device.type]
        again += [f"--dtype={','.join(selection.dtypes)}"] if selection.dtypes else []
        again += [f"--case={name}={v if isinstance(v, str) else json.dumps(v)}" for name, v in unit.case.items()]
        written = traces.ncu(unit, providers, again, output)
    else:
        written = traces.chrome(unit, providers, device, output)
    for path in written:
        print(path)
    return int(not written)


def _print_left(outcome: Outcome) -> None:
    shown = 5
    print(f"warploom: {outcome.reason}; {len(outcome.left)} left, --resume goes on with:", file=sys.stderr)
    for label in outcome.left[:shown]:
        print(f"  {label}", file=sys.stderr)
    if len(outcome.left) > shown:
        print(f"  and {len(outcome.left) - shown} more", file=sys.stderr)


def _print_report(sources: Sequence[Path], output: Path) -> None:
    """Draw the report and print its path; a missing package costs the drawing, not the run."""
    try:
        from warploom.bench.report import write_report

        path = write_report(sources, output)
    except ModuleNotFoundError as error:
        if package(error) not in OPTIONAL:
            raise
        print(f"warploom: no report, {install_hint(error)}", file=sys.stderr)
        return
    print(f"report: {path}")


def _case_filter(texts: Sequence[str]) -> dict[str, list[Any]]:
    wanted: dict[str, list[Any]] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not (name and equals):
            raise ArgumentError(f"--case {text}: expected KEY=VALUE, e.g. --case n=4096")
        wanted.setdefault(name, []).append(_value(value))
    return wanted


def _value(text: str) -> Any:
    """A number, list or truth value as JSON writes it; any other text is itself."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _duration(text: str) -> float:
    """Seconds, for `argparse`."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"expected a number of seconds, got {text!r}")
    return value
