"""``warploom list``: benches with their suites, providers and cases."""

from __future__ import annotations

import argparse
import json
import re
import shlex
import shutil
import textwrap
from typing import TYPE_CHECKING, Any

from warploom.cli.common import Commands, add_cases, add_spec, filter_cases, names_in, pick

if TYPE_CHECKING:
    from warploom.ops.spec import Bench


def add_parser(commands: Commands) -> None:
    """Add the command."""
    parser = commands.add_parser("list", help="show benches, their suites, providers and cases")
    parser.add_argument("names", nargs="*", metavar="NAME", help="benches (default: all, in a line each)")
    add_spec(parser)
    parser.add_argument("--json", action="store_true", help="as JSON, with every case")
    explain = "say which kernels the cases take, and why no others"
    parser.add_argument("--explain", action="store_true", help=explain)
    add_cases(parser)
    gpu = "with --explain: compute capability and multiprocessors of a GPU (default: an H100's, sm_90/132)"
    parser.add_argument("--gpu", default="sm_90/132", metavar="sm_90/132", help=gpu)
    parser.set_defaults(command=_list)


def _list(options: argparse.Namespace) -> int:
    from warploom.ops import benches, operators
    from warploom.testing.specs import load_specs

    own = names_in(load_specs(options.spec), "benches")
    known = benches()
    names = pick(options.names or own, known, "bench", "-")
    if options.explain:
        _explain([known[name] for name in names], options)
    elif options.json:
        described = {name: _describe(known[name]) for name in names}
        print(json.dumps({"benches": described, "operators": [*operators()]}))
    elif options.names or own:
        for name in names:
            _show(known[name])
    else:
        for bench in known.values():
            suites = ", ".join(f"{suite} ({len(cases('cuda'))})" for suite, cases in bench.suites.items())
            _say(f"{bench.name}: {bench.title}")
            _say(f"  suites (cases on a GPU): {suites}; modes {', '.join(bench.modes)}")
        _say(f"operators, for `warploom check`: {', '.join(operators())}")
    return 0


def _describe(bench: Bench) -> dict[str, Any]:
    suites = {s: {kind: [*map(dict, cases(kind))] for kind in ("cuda", "cpu")} for s, cases in bench.suites.items()}
    found = {"title": bench.title, "modes": bench.modes, "providers": [*bench.every_provider], "suites": suites}
    return found | {"axis": bench.x}


def _explain(chosen: list[Bench], options: argparse.Namespace) -> None:
    """Print what operators decide on cases as for a GPU, of which there need not be one, and what they launch."""
    from warploom.bench.fingerprint import builds_of
    from warploom.bench.records import as_option
    from warploom.bench.runner import Selection, plan
    from warploom.errors import ArgumentError
    from warploom.ops.spec import KERNELS, Unsupported
    from warploom.runtime.choices import collect_notes

    if not re.fullmatch(r"sm_\d+/\d+", options.gpu):
        raise ArgumentError(f"--gpu {options.gpu}: expected compute capability and multiprocessors, as sm_90/132")
    units = plan(chosen, Selection(options.suite, None, None, filter_cases(options.case)), "cuda")
    for bench, case in {(unit.bench.name, str(unit.case)): (unit.bench, unit.case) for unit in units}.values():
        _say(" ".join([bench.name, *(shlex.quote(f"{key}={as_option(case[key])}") for key in case)]))
        mode = "fwd_bwd" if "bwd" in bench.modes else "fwd"
        with collect_notes() as notes:
            try:
                builds = builds_of(bench, case, bench.own or KERNELS, mode, options.gpu, drawn=False)
            except Unsupported as reason:
                _say(f"  no kernels: {reason}")
                continue
        for step, text in notes:
            _say(f"  {step}: {text}")
        _say(f"  kernels: {', '.join(dict.fromkeys(build.function.__name__ for build in builds.values()))}")


def _show(bench: Bench) -> None:
    from warploom.bench.records import as_option

    _say(f"{bench.name}: {bench.title}")
    _say(f"  modes: {', '.join(bench.modes)}")
    _say(f"  providers: {', '.join(bench.every_provider)}")
    for suite, cases_on in bench.suites.items():
        cases = cases_on("cuda")
        count = f"{len(cases)} case{'s' * (len(cases) != 1)}"
        _say(f"  suite {suite}: {count} on a GPU, {len(cases_on('cpu'))} on a CPU")
        for key in dict.fromkeys(key for case in cases for key in case):
            values = dict.fromkeys(shlex.quote(as_option(case[key])) for case in cases if key in case)
            _say(f"    {key}: {' '.join(values)}")
    _say("  one value: --case KEY=VALUE; several: --case again")


def _say(line: str) -> None:
    """Print a line, folded where the terminal ends."""
    indent = " " * (len(line) - len(line.lstrip()) + 4)
    width = shutil.get_terminal_size().columns
    fold = textwrap.TextWrapper(width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
    print(fold.fill(line))
