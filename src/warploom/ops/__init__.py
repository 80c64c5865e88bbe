"""The registry of operators, a folder for each. Tests, benches and documentation find operators here."""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module
from typing import TYPE_CHECKING

from warploom.errors import ArgumentError

if TYPE_CHECKING:
    from warploom.ops.spec import Bench, Operator

FOLDERS = (
    "lrpe", "flash_attention", "tpa", "linear_attention", "delta_attention", "short_convolution", "append_kv",
)  # fmt: skip
"""The operators' folders; each has a ``bench.py`` with ``OPERATORS`` and ``BENCHES``."""


_registered_operators: dict[str, Operator] = {}
_registered_benches: dict[str, Bench] = {}


def operators() -> dict[str, Operator]:
    """Returns every operator by name: warploom's, then those added by `register`."""
    return _own_operators() | _registered_operators


def benches() -> dict[str, Bench]:
    """Returns every bench by name: warploom's, in the order of the registry, then those added by `register`."""
    return _own_benches() | _registered_benches


def register(operators: Iterable[Operator] = (), benches: Iterable[Bench] = ()) -> None:
    """Add operators and benches to the registry, for this process. A later one replaces one of the same name.

    Raises:
        ArgumentError: The name is that of an operator or bench of warploom's.
    """
    for operator in operators:
        if operator.name in _own_operators():
            raise ArgumentError(f"register: {operator.name} is an operator of warploom's own; take another name")
        _registered_operators[operator.name] = operator
    for bench in benches:
        if bench.name in _own_benches():
            raise ArgumentError(f"register: {bench.name} is a bench of warploom's own; take another name")
        _registered_benches[bench.name] = bench


def _own_operators() -> dict[str, Operator]:
    return {o.name: o for folder in FOLDERS for o in import_module(f"warploom.ops.{folder}.bench").OPERATORS}


def _own_benches() -> dict[str, Bench]:
    return {b.name: b for folder in FOLDERS for b in import_module(f"warploom.ops.{folder}.bench").BENCHES}
