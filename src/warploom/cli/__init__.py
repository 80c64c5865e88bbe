"""The command line, one file for each command: ``warploom bench``, ``check``, ``profile``, ``report`` and so on.

A command's file has `add_parser`; what the command needs is imported when it runs, so that ``--help`` answers at
once.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from warploom.cli import accuracy, bench, check, compare, env, profile, report
from warploom.cli.common import OPTIONAL, install_hint, package
from warploom.errors import WarploomError
from warploom.version import __version__

__all__ = ["main"]

COMMANDS = (bench, check, accuracy, compare, profile, report, env)


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
        if package(error) not in OPTIONAL:
            raise
        print(f"warploom: {install_hint(error)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("warploom: interrupted; `bench --resume` goes on after the last finished case", file=sys.stderr)
        return 130
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="warploom", description="Check and measure warploom's operators.")
    parser.add_argument("--version", action="version", version=f"warploom {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for command in COMMANDS:
        command.add_parser(commands)
    return parser
