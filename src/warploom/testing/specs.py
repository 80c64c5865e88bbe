"""Operators and benches from outside this package, described in a Python file.

Such a file is a program. It runs with the rights of the user who loads it.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import shlex
import sys
import traceback
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import TypeVar

from warploom.errors import ArgumentError
from warploom.ops import register
from warploom.ops.spec import Bench, Operator

T = TypeVar("T")


@dataclass(frozen=True)
class SpecFile:
    """A file with its operators and benches."""

    path: Path
    operators: tuple[Operator, ...]
    benches: tuple[Bench, ...]


def load_specs(paths: Iterable[Path]) -> list[SpecFile]:
    """Run files that describe operators, and register these for bench, check, report and compare.

    Args:
        paths: Python files with ``OPERATORS`` (a sequence of `Operator`), ``BENCHES`` (of `Bench`) or both; a
            folder means all of its files whose names do not begin with an underscore. A file in a folder with an
            ``__init__.py`` is imported as part of that package, so that it may import its neighbours relatively;
            any other finds its neighbours as a script does.

    Returns:
        The operators and benches of each file.

    Raises:
        ArgumentError: There is no such file, it fails, it describes nothing, or it uses a name of warploom's.
    """
    files = (sorted(path.glob("[!_]*.py")) or [path] if path.is_dir() else [path] for path in paths)
    return [_load(file) for several in files for file in several]


def _load(path: Path) -> SpecFile:
    path = Path(os.path.realpath(path))
    if not path.is_file():
        raise ArgumentError(f"--spec {path}: no such file")
    try:
        module = _run(path)
    except (Exception, SystemExit) as error:
        raise ArgumentError(f"--spec {path}: {_reason(error, path)}") from error
    operators, benches = _read_items(module, "OPERATORS", Operator), _read_items(module, "BENCHES", Bench)
    if operators is None or benches is None:
        raise ArgumentError(f"--spec {path}: OPERATORS must hold Operator, BENCHES Bench (warploom.bench)")
    if not operators and not benches:
        raise ArgumentError(f"--spec {path}: defines neither OPERATORS nor BENCHES")
    run = f"warploom bench --spec {shlex.quote(os.path.relpath(path))}"
    owned = (replace(bench, command=f"{run} {bench.name}") for bench in benches)
    spec = SpecFile(path, operators, tuple(owned))
    register(spec.operators, spec.benches)
    return spec


def _read_items(module: ModuleType, name: str, kind: type[T]) -> tuple[T, ...] | None:
    """Returns the items of a module's attribute; None if one is of another kind."""
    items = getattr(module, name, ())
    found = tuple(items) if isinstance(items, Iterable) else (items,)
    return found if all(isinstance(item, kind) for item in found) else None


def _reason(error: BaseException, path: Path) -> str:
    """Returns why a file failed, and in which of its lines, as one line of text."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    words = " ".join(f"{type(error).__name__}: {error}".split())
    return f"{words} (line {lines[-1]})" if lines else words


def _run(path: Path) -> ModuleType:
    is_package = (path.parent / "__init__.py").is_file()
    folder = path.parent.parent if is_package else path.parent
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    if is_package:
        return importlib.import_module(f"{path.parent.name}.{path.stem}")
    found = importlib.util.spec_from_file_location(f"warploom_spec_{path.stem}", path)
    if found is None or found.loader is None:
        raise ImportError("not a Python file")
    module = importlib.util.module_from_spec(found)
    sys.modules[found.name] = module
    found.loader.exec_module(module)
    return module
