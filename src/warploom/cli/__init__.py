"""The command line, one file for each command: ``warploom bench``, ``check``, ``profile``, ``report`` and so on.

A command's file has `add_parser`; what the command needs is imported when it runs, so that ``--help`` answers at
once. What a command cannot read or write is a line on standard error and the exit status 2.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import sys
import traceback
from collections.abc import Sequence

from warploom.cli import bench, check, compare, env, listing, profile, report
from warploom.errors import WarploomError
from warploom.version import __version__

__all__ = ["main"]

COMMANDS = (bench, check, compare, profile, report, listing, env)
STATUSES = """exit status:
  0    done
  1    something is wrong, failed, or slower than --fail-above allows;
       or nothing was measured or checked
  2    the command is wrong, or what it needs cannot be used: a file, folder,
       package or device
  3    warploom itself failed, and shows where
  130  interrupted; what was measured is kept
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        arguments: Words after the program's name; ``None`` for those of the process.

    Returns:
        The exit status, one of `STATUSES`.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a name that the terminal's encoding lacks ends nothing
    options = _parser().parse_args(arguments)
    try:
        status: int = options.command(options)
        sys.stdout.flush()
    except WarploomError as error:
        return _refuse(str(error))
    except OSError as error:
        _drop_output()
        return _refuse(f"{error.filename}: {error.strerror}" if error.filename else f"{error.strerror or error}")
    except KeyboardInterrupt:
        print("warploom: interrupted; `bench --resume` goes on after the last finished case", file=sys.stderr)
        return 130
    except Exception as error:  # a mistake of ours has an exit status of its own
        if isinstance(error, ModuleNotFoundError) and (error.name or "").startswith("jinja2"):
            return _refuse("jinja2 is not installed: pip install 'warploom[bench]'")
        traceback.print_exc()
        return 3
    return status


def _refuse(message: str) -> int:
    """Say in a line why a command cannot be done. Names in it may come from any file: no escape sequences."""
    shown = "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in message)
    print(f"warploom: {shown}", file=sys.stderr)
    return 2


def _drop_output() -> None:
    """Where standard output takes nothing more, leave nothing for Python to write there at its end."""
    try:
        sys.stdout.flush()
    except OSError:
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="warploom",
        description="Check and measure warploom's operators.",
        epilog=STATUSES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"warploom {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for command in COMMANDS:
        command.add_parser(commands)
    return parser
