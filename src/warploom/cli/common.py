"""Options and names that several commands share: devices, selections, specs."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from warploom.errors import ArgumentError, DeviceError, unknown

if TYPE_CHECKING:
    import torch

    from warploom.bench.runner import Selection
    from warploom.ops.spec import Bench
    from warploom.testing.specs import SpecFile

Commands = Any
"""The type of `argparse`'s ``add_subparsers``, which is not public."""


def add_device(parser: argparse.ArgumentParser) -> None:
    """Add ``--device``; `the_device` reads it."""
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto", help="default: auto")


def add_spec(parser: argparse.ArgumentParser) -> None:
    """Add ``--spec``, a file that describes an operator of the user's own."""
    what = "a Python file with OPERATORS and BENCHES, or a folder of such, which is run as a program; repeatable"
    parser.add_argument("--spec", type=Path, action="append", default=[], metavar="FILE", help=what)


_SHORT_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}


def add_selection(parser: argparse.ArgumentParser) -> None:
    """Add what `select` reads: names of benches, suite, mode, provider, dtype, case, device and spec."""
    parser.add_argument("names", nargs="*", metavar="NAME", help="benches, e.g. lrpe-rotate (default: all)")
    add_spec(parser)
    several: dict[str, Any] = {"action": "extend", "type": words}  # given twice, none is dropped
    parser.add_argument("--mode", **several, metavar="MODE[,MODE]", help="fwd, bwd, … (default: the bench's)")
    parser.add_argument("--provider", **several, metavar="NAME[,NAME]", help="default: all of the bench")
    dtypes = "run the cases in bf16, fp16, fp32, not in their own dtype"
    parser.add_argument("--dtype", **several, metavar="NAME[,NAME]", help=dtypes)
    add_cases(parser)
    add_device(parser)


def add_cases(parser: argparse.ArgumentParser) -> None:
    """Add what says which cases of a bench a command is about."""
    parser.add_argument("--suite", default="quick", help="default: quick; `warploom list` shows them")
    case = "only cases with this value; may be repeated, with the same key for alternatives"
    parser.add_argument("--case", action="append", default=[], metavar="KEY=VALUE", help=case)


def select(options: argparse.Namespace, modes: list[str] | None) -> tuple[list[Bench], Selection]:
    """Returns the benches that a command is about, and the selection of their cases."""
    from warploom.bench.runner import Selection
    from warploom.ops import benches
    from warploom.testing.specs import load_specs

    own = names_in(load_specs(options.spec), "benches")
    known = benches()
    chosen = [known[name] for name in pick(options.names or own, known, "bench", "-")]
    dtypes = options.dtype and [_SHORT_DTYPES.get(name, name) for name in options.dtype]
    return chosen, Selection(options.suite, modes, options.provider, filter_cases(options.case), dtypes)


def filter_cases(texts: Sequence[str]) -> dict[str, list[Any]]:
    """Returns values by key: a number, list or truth value as JSON writes it; any other text is itself."""
    wanted: dict[str, list[Any]] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not (name and equals):
            raise ArgumentError(f"--case {text}: expected KEY=VALUE, e.g. --case n=4096")
        values = wanted.setdefault(name, [])
        try:
            values.append(json.loads(value))
        except (ValueError, RecursionError):
            values.append(value)
    return wanted


def describe(device: torch.device, backend: str = "torch") -> str:
    """Returns one line about a device and what runs there, which commands print first."""
    import torch

    from warploom.runtime.backend import HAS_TRITON

    kernels = f"Triton {importlib.metadata.version('triton')}" if HAS_TRITON else "PyTorch alone, Triton is missing"
    if device.type == "cpu":
        runs = f"{kernels}'s interpreter" if backend == "triton" else "no kernel runs here"
        return f"device: CPU, PyTorch {torch.__version__}; {runs}"
    return f"device: {torch.cuda.get_device_name(device)}, PyTorch {torch.__version__}; backend: {kernels}"


def width(most: int = 120) -> int:
    """Returns the columns of the terminal, ``most`` at most; 80 where there is none."""
    return min(max(shutil.get_terminal_size((80, 24)).columns, 80), most)


def seconds(text: str) -> float:
    """Returns a number of seconds, for `argparse`."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"expected a number of seconds, got {text!r}")
    return value


def names_in(specs: Sequence[SpecFile], what: str) -> list[str]:
    """Returns the names of the ``operators`` or ``benches`` of specs: the default of a command's names."""
    names = [one.name for spec in specs for one in getattr(spec, what)]
    if specs and not names:
        raise ArgumentError(f"--spec {specs[0].path}: defines no {what.upper()}")
    return names


def words(text: str) -> list[str]:
    """Returns the items of a comma-separated list, for `argparse`."""
    if names := [word.strip() for word in text.split(",") if word.strip()]:
        return names
    raise argparse.ArgumentTypeError("expected names, separated by commas")


def the_device(name: str) -> torch.device:
    """Returns the device that ``--device`` means; ``cuda`` where there is none is refused."""
    import torch

    available = torch.cuda.is_available()
    if name == "cuda" and not available:
        raise DeviceError("--device cuda: PyTorch finds no usable GPU here")
    return torch.device("cuda" if available and name != "cpu" else "cpu")


def slug(device: torch.device) -> str:
    """Returns the device as part of a folder's name: ``nvidia-h200``."""
    import torch

    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    return "-".join("".join(c if c.isalnum() else " " for c in name.lower()).split())


def pick(names: Sequence[str], known: Mapping[str, Any], what: str, separator: str) -> list[str]:
    """Returns the names asked for, or all if there are none; dashes and underscores are the same here."""
    picked = [name.replace("-", separator).replace("_", separator) for name in names]
    for name in picked:
        if name not in known:
            raise ArgumentError(unknown(what, name, known))
    return picked or list(known)
