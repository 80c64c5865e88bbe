"""``warploom profile``: where a model's time and memory go."""

from __future__ import annotations

import argparse
from pathlib import Path

from warploom.cli.common import Commands, slug, the_device
from warploom.profile.command import add_arguments


def add_parser(commands: Commands) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser("profile", help="where a model's time and memory go")
    add_arguments(parser)
    parser.set_defaults(command=_profile)


def _profile(options: argparse.Namespace) -> int:
    from warploom.profile.command import run

    device = the_device(options.device)
    return run(options, device, options.output or Path("runs") / f"{slug(device)}-profile-{options.profile}")
