"""``warploom env``: what a measurement here depends on."""

from __future__ import annotations

import argparse
import json

from warploom.cli.common import Commands, add_device, the_device


def add_parser(commands: Commands) -> None:
    """Add the command."""
    parser = commands.add_parser("env", help="show what a measurement here depends on")
    add_device(parser)
    parser.add_argument("--json", action="store_true", help="as JSON")
    parser.set_defaults(command=_env)


def _env(options: argparse.Namespace) -> int:
    from warploom.bench.environment import describe_environment, environment_id

    environment = describe_environment(the_device(options.device))
    environment = {"id": environment_id(environment), **environment}
    if options.json:
        print(json.dumps(environment, indent=2))
    else:
        width = max(map(len, environment))
        for name, value in environment.items():
            print(f"{name:{width}}  {value}")
    return 0
