"""Operators and benches from outside this package, described in a Python file as `spec.py` does inside it."""

from __future__ import annotations

import importlib
import importlib.util
import os
import shlex
import sys
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType

from warploom.errors import ArgumentError
from warploom.ops import register
from warploom.ops.spec import Bench, Operator

__all__ = ["Spec", "load_specs"]


@dataclass(frozen=True)
class Spec:
    """What one file describes."""

    path: Path
    operators: tuple[Operator, ...]
    benches: tuple[Bench, ...]


def load_specs(paths: Iterable[Path]) -> list[Spec]:
    """Run files that describe operators, and make these known to bench, check, report and compare.

    Args:
        paths: Python files with ``OPERATORS`` (a sequence of `Operator`), ``BENCHES`` (of `Bench`) or both. One
            in a folder with an ``__init__.py`` is imported as part of that package, so that it may import its
            neighbours relatively; any other finds its neighbours as a script does.

    Returns:
        What each describes.

    Raises:
        ArgumentError: No such file, it describes nothing, or it takes a name that warploom has.
    """
    return [_load(path) for path in paths]


def _load(path: Path) -> Spec:
    path = path.resolve()
    if not path.is_file():
        raise ArgumentError(f"--spec {path}: no such file")
    module = _run(path)
    operators = tuple(getattr(module, "OPERATORS", ()))
    benches = tuple(getattr(module, "BENCHES", ()))
    if not operators and not benches:
        raise ArgumentError(f"--spec {path}: defines neither OPERATORS nor BENCHES")
    if not all(isinstance(o, Operator) for o in operators) or not all(isinstance(b, Bench) for b in benches):
        raise ArgumentError(f"--spec {path}: OPERATORS must hold Operator, BENCHES Bench (warploom.bench)")
    run = f"warploom bench --spec {shlex.quote(os.path.relpath(path))}"
    owned = (replace(bench, command=f"{run} {bench.name}") for bench in benches)
    spec = Spec(path, operators, tuple(owned))
    register(spec.operators, spec.benches)
    return spec


def _is_package(path: Path) -> bool:
    return (path.parent / "__init__.py").is_file()


def _run(path: Path) -> ModuleType:
    folder = path.parent.parent if _is_package(path) else path.parent
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    if _is_package(path):
        return importlib.import_module(f"{path.parent.name}.{path.stem}")
    found = importlib.util.spec_from_file_location(f"warploom_spec_{path.stem}", path)
    if found is None or found.loader is None:
        raise ArgumentError(f"--spec {path}: not a Python file")
    module = importlib.util.module_from_spec(found)
    sys.modules[found.name] = module
    found.loader.exec_module(module)
    return module
