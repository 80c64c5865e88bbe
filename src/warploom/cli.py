"""The command line: ``warploom bench | check | profile | report | env``.

What a command needs is imported when it runs, so that ``--help`` answers at once.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from warploom.errors import ArgumentError, DeviceError, WarploomError
from warploom.profile.command import add_arguments as add_profile_arguments
from warploom.version import __version__

if TYPE_CHECKING:
    import torch

    from warploom.bench.runner import Outcome

__all__ = ["main"]

_OPTIONAL = frozenset({"jinja2", "matplotlib", "numpy", "plotly", "rich"})


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        arguments: Words after the program's name; ``None`` for those of the process.

    Returns:
        The exit status: 0, 1 when something measured or checked is wrong, 2 when the command is.
    """
    options = _parser().parse_args(arguments)
    try:
        status: int = options.command(options)
    except WarploomError as error:
        print(f"warploom: {error}", file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:
        if _package(error) not in _OPTIONAL:
            raise
        print(f"warploom: {_install_hint(error)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("warploom: interrupted; `bench --resume` goes on after the last finished case", file=sys.stderr)
        return 130
    return status


def _install_hint(error: ModuleNotFoundError) -> str:
    return f"{_package(error)} is not installed: pip install 'warploom[bench]'"


def _package(error: ModuleNotFoundError) -> str:
    return (error.name or "").partition(".")[0]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="warploom", description="Check and measure warploom's operators.")
    parser.add_argument("--version", action="version", version=f"warploom {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    bench = commands.add_parser("bench", help="time operators against the hardware's limit and what else there is")
    bench.add_argument("names", nargs="*", metavar="NAME", help="benches, e.g. lrpe-rotate (default: all)")
    bench.add_argument("--suite", default="quick", help="quick (default) or published: the published tables' cases")
    bench.add_argument("--mode", type=_words, metavar="MODE[,MODE]", help="fwd, bwd (default: all of the bench)")
    bench.add_argument("--provider", type=_words, metavar="NAME[,NAME]", help="default: all of the bench")
    bench.add_argument(
        "--case",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="only cases with this value; may be repeated, with the same key for alternatives",
    )
    _add_device(bench)
    bench.add_argument("--output", type=Path, metavar="DIR", help="default: runs/DEVICE-SUITE")
    bench.add_argument("--resume", action="store_true", help="keep what DIR has from the same code and environment")
    bench.add_argument("--time-limit", type=float, metavar="SECONDS", help="begin no further case after this time")
    bench.add_argument("--no-report", action="store_true", help="write no HTML report")
    bench.set_defaults(command=_bench)

    check = commands.add_parser("check", help="compare operators with float64 on small odd cases")
    check.add_argument("names", nargs="*", metavar="NAME", help="operators, e.g. lrpe_rotate (default: all)")
    _add_device(check)
    check.add_argument("--backend", choices=("auto", "triton", "torch"), default="auto")
    check.set_defaults(command=_check)

    report = commands.add_parser("report", help="draw recorded runs as one HTML file")
    report.add_argument(
        "paths", nargs="+", type=Path, metavar="PATH", help="folders of runs, or records.jsonl files"
    )
    report.add_argument("-o", "--output", type=Path, metavar="FILE", help="default: report.html beside the first")
    report.add_argument("--pictures", type=Path, metavar="DIR", help="also draw an SVG of each bench there")
    report.add_argument("--readme", type=Path, metavar="FILE", help="also rewrite the table of speeds in this file")
    report.set_defaults(command=_report)

    profile = commands.add_parser("profile", help="where a model's time and memory go")
    add_profile_arguments(profile)
    profile.set_defaults(command=_profile)

    env = commands.add_parser("env", help="show what a measurement here depends on")
    _add_device(env)
    env.add_argument("--json", action="store_true", help="as JSON")
    env.set_defaults(command=_env)
    return parser


def _add_device(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto", help="default: auto")


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def _bench(options: argparse.Namespace) -> int:
    from warploom.bench import tables
    from warploom.bench.records import RECORDS, operator_name
    from warploom.bench.runner import Selection, run
    from warploom.ops import benches

    device = _device(options.device)
    known = benches()
    chosen = [known[name] for name in _pick(options.names, known, "bench", "-")]
    selection = Selection(options.suite, options.mode, options.provider, _case_filter(options.case))
    output = options.output or Path("runs") / f"{_slug(device)}-{options.suite}"
    outcome = run(chosen, selection, device, output, resume=options.resume, time_limit=options.time_limit)

    x = {operator_name(bench): bench.x for bench in chosen}
    width = min(max(shutil.get_terminal_size((100, 24)).columns, 80), 120)
    print(tables.text(tables.sections(outcome.records, x), width))
    if outcome.reason:
        _print_left(outcome)
    print(f"records: {output / RECORDS}")
    if not options.no_report:
        _print_report([output], output / "report.html")
    ours = "triton" if device.type == "cuda" else "torch"
    wrong = any(r.provider == ours and r.status in ("incorrect", "error") for r in outcome.records)
    return int(wrong or outcome.device_lost)


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
        if _package(error) not in _OPTIONAL:
            raise
        print(f"warploom: no report, {_install_hint(error)}", file=sys.stderr)
        return
    print(f"report: {path}")


def _check(options: argparse.Namespace) -> int:
    from rich.console import Console
    from rich.table import Table

    from warploom.ops import operators
    from warploom.testing.conformance import check_operator

    device = _device(options.device)
    known = operators()
    table = Table("operator", "dtype", "mode", "cases", "worst error / budget", "")
    failures = []
    for name in _pick(options.names, known, "operator", "_"):
        results = check_operator(known[name], options.backend, device)
        failures += [result for result in results if not result.ok]
        for dtype, mode in dict.fromkeys((result.dtype, result.mode) for result in results):
            rows = [result for result in results if (result.dtype, result.mode) == (dtype, mode)]
            worst = max(result.ratio for result in rows)
            verdict = "ok" if all(result.ok for result in rows) else "FAILED"
            table.add_row(name, dtype, mode, str(len(rows)), f"{worst:.2f}", verdict)
    Console().print(table)
    for failure in failures:
        parameters = " ".join(f"{name}={value}" for name, value in failure.case.items())
        print(f"{failure.operator} {failure.mode} {parameters}: {failure.detail}")
    return int(bool(failures))


def _report(options: argparse.Namespace) -> int:
    from warploom.bench.report import write_report

    first = options.paths[0]
    beside = first if first.is_dir() else first.parent
    if options.pictures:
        from warploom.bench.plots import write_pictures

        for picture in write_pictures(options.paths, options.pictures):
            print(picture)
    if options.readme:
        from warploom.bench.readme import update

        update(options.readme, options.paths)
        print(options.readme)
    print(write_report(options.paths, options.output or beside / "report.html"))
    return 0


def _profile(options: argparse.Namespace) -> int:
    from warploom.profile.command import run

    device = _device(options.device)
    output = options.output or Path("runs") / f"{_slug(device)}-profile-{options.profile}"
    return run(options, device, output)


def _env(options: argparse.Namespace) -> int:
    from warploom.bench.environment import describe_environment, environment_id

    environment = describe_environment(_device(options.device))
    environment = {"id": environment_id(environment), **environment}
    if options.json:
        print(json.dumps(environment, indent=2))
    else:
        width = max(map(len, environment))
        for name, value in environment.items():
            print(f"{name:{width}}  {value}")
    return 0


def _device(name: str) -> torch.device:
    import torch

    available = torch.cuda.is_available()
    if name == "cuda" and not available:
        raise DeviceError("--device cuda: PyTorch finds no usable GPU here")
    return torch.device("cuda" if available and name != "cpu" else "cpu")


def _slug(device: torch.device) -> str:
    """The device as part of a folder's name: ``nvidia-h200``."""
    import torch

    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    return "-".join("".join(c if c.isalnum() else " " for c in name.lower()).split())


def _pick(names: Sequence[str], known: Mapping[str, Any], what: str, separator: str) -> list[str]:
    """The names asked for, all of them if none; dashes and underscores are the same here."""
    picked = [name.replace("-", separator).replace("_", separator) for name in names]
    for name, typed in zip(picked, names):
        if name not in known:
            raise ArgumentError(f"no {what} {typed!r}; there are: {', '.join(known)}")
    return picked or list(known)


def _case_filter(words: Sequence[str]) -> dict[str, list[Any]]:
    wanted: dict[str, list[Any]] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not (name and equals):
            raise ArgumentError(f"--case {word}: expected KEY=VALUE, e.g. --case n=4096")
        wanted.setdefault(name, []).append(_value(value))
    return wanted


def _value(text: str) -> Any:
    """A number, list or truth value as JSON writes it; any other text is itself."""
    try:
        return json.loads(text)
    except ValueError:
        return text
