"""What several commands share: devices, names, specs of other people's operators."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from warploom.errors import ArgumentError, DeviceError

if TYPE_CHECKING:
    import torch

    from warploom.bench.specs import Spec

__all__ = [
    "OPTIONAL",
    "Commands",
    "add_device",
    "add_spec",
    "install_hint",
    "names_in",
    "package",
    "pick",
    "slug",
    "the_device",
    "words",
]

OPTIONAL = frozenset({"jinja2", "matplotlib", "numpy", "plotly", "rich"})
"""Packages of the extra ``bench``, whose absence is an advice and not a crash."""

Commands = Any
"""What `argparse` returns from ``add_subparsers``; it has no public type."""


def install_hint(error: ModuleNotFoundError) -> str:
    """How to get a package that is missing."""
    return f"{package(error)} is not installed: pip install 'warploom[bench]'"


def package(error: ModuleNotFoundError) -> str:
    """The package that an import missed."""
    return (error.name or "").partition(".")[0]


def add_device(parser: argparse.ArgumentParser) -> None:
    """Add ``--device``; `the_device` reads it."""
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto", help="default: auto")


def add_spec(parser: argparse.ArgumentParser) -> None:
    """Add ``--spec``, a file that describes an operator of the user's own."""
    parser.add_argument(
        "--spec",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="a Python file with OPERATORS and BENCHES of your own, which is run as a program; may be repeated",
    )


def names_in(specs: Sequence[Spec], what: str) -> list[str]:
    """The names that a command is about when the user gives a spec and no names.

    Args:
        specs: What `load_specs` returned.
        what: ``operators`` or ``benches``.

    Raises:
        ArgumentError: There are specs, and none of them has any.
    """
    names = [one.name for spec in specs for one in getattr(spec, what)]
    if specs and not names:
        raise ArgumentError(f"--spec {specs[0].path}: defines no {what.upper()}")
    return names


def words(text: str) -> list[str]:
    """A comma-separated list, for `argparse`."""
    if names := [word.strip() for word in text.split(",") if word.strip()]:
        return names
    raise argparse.ArgumentTypeError("expected names, separated by commas")


def the_device(name: str) -> torch.device:
    """The device that ``--device`` means.

    Raises:
        DeviceError: ``cuda``, and there is none.
    """
    import torch

    available = torch.cuda.is_available()
    if name == "cuda" and not available:
        raise DeviceError("--device cuda: PyTorch finds no usable GPU here")
    return torch.device("cuda" if available and name != "cpu" else "cpu")


def slug(device: torch.device) -> str:
    """The device as part of a folder's name: ``nvidia-h200``."""
    import torch

    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    return "-".join("".join(c if c.isalnum() else " " for c in name.lower()).split())


def pick(names: Sequence[str], known: Mapping[str, Any], what: str, separator: str) -> list[str]:
    """The names asked for, all of them if none; dashes and underscores are the same here.

    Raises:
        ArgumentError: There is no such name.
    """
    picked = [name.replace("-", separator).replace("_", separator) for name in names]
    for name, typed in zip(picked, names):
        if name not in known:
            raise ArgumentError(f"no {what} {typed!r}; there are: {', '.join(known)}")
    return picked or list(known)
