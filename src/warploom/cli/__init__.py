"""The command line, one file for each command: ``warploom bench``, ``check``, ``profile``, ``report`` and so on.

A command's file has `add_parser`; what the command needs is imported when it runs, so that ``--help`` answers at
once. What a command cannot read or write is a line on standard error and the exit status 2.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import re
import sys
import traceback
from collections.abc import Mapping, Sequence

from warploom.cli import bench, check, compare, env, listing, profile, report
from warploom.errors import ArgumentError, WarploomError, unknown
from warploom.version import __version__

__all__ = ["main"]

COMMANDS = {
    "bench": bench,
    "check": check,
    "compare": compare,
    "profile": profile,
    "report": report,
    "list": listing,
    "env": env,
}
NAMES = (*COMMANDS, "help", "version")
STATUSES = """exit status:
  0    done
  1    something is wrong, failed, or slower than --fail-above allows;
       or nothing was measured or checked
  2    the command is wrong, or what it needs cannot be used: a file, folder,
       package or device
  3    warploom itself failed, and shows where
  130  interrupted; what was measured is kept
  141  what its output was for has ended, as with `| head`
"""
COMPLETION = """shell completion, written by the package shtab:
  shtab --shell bash warploom.cli.make_parser > ~/.local/share/bash-completion/completions/warploom
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
    try:
        words = list(sys.argv[1:] if arguments is None else arguments)
        if words and not words[0].startswith("-") and words[0] not in NAMES:
            raise ArgumentError(unknown("command", words[0], NAMES))
        try:
            parser, commands = _make_parsers()
            options, others = parser.parse_known_args(words)
            if others:
                raise ArgumentError(f"{words[0]}: {_describe_unknown(others[0], commands[words[0]])}")
            status: int = options.command(options)
        finally:  # where --help ends the process too
            sys.stdout.flush()
    except WarploomError as error:
        return _refuse(str(error))
    except BrokenPipeError:
        _drop_output()
        return 128 + 13  # as of a program that SIGPIPE ends
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
    """Print in a line why a command cannot be done. Names in it may come from any file: no escape sequences."""
    shown = "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in message)
    print(f"warploom: {shown}", file=sys.stderr)
    return 2


def _drop_output() -> None:
    """Discard what Python would write at its end to a standard output that takes nothing more."""
    try:
        sys.stdout.flush()
    except OSError:
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def make_parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line, of which ``shtab`` makes completions for a shell."""
    return _make_parsers()[0]


def _describe_unknown(word: str, command: argparse.ArgumentParser) -> str:
    """Returns the words for an argument that a command does not have."""
    if not word.startswith("-"):
        return f"one argument too many: {word!r}"
    options = dict.fromkeys(re.findall(r"--[a-z][\w-]*", command.format_help()))
    return unknown("option", word.partition("=")[0], options)


def _make_parsers() -> tuple[argparse.ArgumentParser, Mapping[str, argparse.ArgumentParser]]:
    """Returns the parser of the command line, and those of the commands."""
    parser = argparse.ArgumentParser(
        prog="warploom",
        description="Check and measure warploom's operators.",
        epilog=f"{STATUSES}\n{COMPLETION}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"warploom {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for command in COMMANDS.values():
        command.add_parser(commands)
    helped = commands.add_parser("help", help="show the help of a command")
    helped.add_argument("of", nargs="?", metavar="COMMAND")
    helped.set_defaults(command=_help)
    commands.add_parser("version", help="show the version").set_defaults(command=_version)
    return parser, commands.choices


def _help(options: argparse.Namespace) -> int:
    if options.of not in (None, *NAMES):
        raise ArgumentError(unknown("command", options.of, NAMES))
    with contextlib.suppress(SystemExit):
        make_parser().parse_args([*([options.of] if options.of else []), "--help"])
    return 0


def _version(options: argparse.Namespace) -> int:
    print(f"warploom {__version__}")
    return 0
