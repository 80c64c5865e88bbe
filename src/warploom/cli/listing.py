"""``warploom list``: benches with their suites, providers and cases."""

from __future__ import annotations

import argparse
import json
import shlex
import shutil
import textwrap
from typing import TYPE_CHECKING, Any

from warploom.cli.common import Commands, add_spec, names_in, pick

if TYPE_CHECKING:
    from warploom.ops.spec import Bench


def add_parser(commands: Commands) -> None:
    """Add the command."""
    parser = commands.add_parser("list", help="show benches, their suites, providers and cases")
    parser.add_argument("names", nargs="*", metavar="NAME", help="benches (default: all, in a line each)")
    add_spec(parser)
    parser.add_argument("--json", action="store_true", help="as JSON, with every case")
    parser.set_defaults(command=_list)


def _list(options: argparse.Namespace) -> int:
    from warploom.ops import benches, operators
    from warploom.testing.specs import load_specs

    own = names_in(load_specs(options.spec), "benches")
    known = benches()
    names = pick(options.names or own, known, "bench", "-")
    if options.json:
        described = {name: _described(known[name]) for name in names}
        print(json.dumps({"benches": described, "operators": [*operators()]}))
    elif options.names or own:
        for name in names:
            _show(known[name])
    else:
        for bench in known.values():
            suites = ", ".join(f"{suite} ({len(cases('cuda'))})" for suite, cases in bench.suites.items())
            _say(f"{bench.name}: {bench.title}")
            _say(f"  suites (cases on a GPU) {suites}; modes {', '.join(bench.modes)}")
        _say(f"operators, for `warploom check`: {', '.join(operators())}")
    return 0


def _described(bench: Bench) -> dict[str, Any]:
    suites = {s: {kind: [*map(dict, cases(kind))] for kind in ("cuda", "cpu")} for s, cases in bench.suites.items()}
    found = {"title": bench.title, "modes": bench.modes, "providers": [*bench.every_provider], "suites": suites}
    return found | {"axis": bench.x}


def _show(bench: Bench) -> None:
    from warploom.bench.records import as_option

    _say(f"{bench.name}: {bench.title}")
    _say(f"  modes: {', '.join(bench.modes)}")
    _say(f"  providers: {', '.join(bench.every_provider)}")
    for suite, cases_on in bench.suites.items():
        cases = cases_on("cuda")
        _say(f"  suite {suite}: {len(cases)} cases on a GPU, {len(cases_on('cpu'))} on a CPU")
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
