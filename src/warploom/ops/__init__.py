"""The registry: one line per operator. Tests, bench and documentation go through it."""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module
from typing import TYPE_CHECKING

from warploom.errors import ArgumentError

if TYPE_CHECKING:
    from warploom.ops.spec import Bench, Operator

FOLDERS = ("lrpe", "flash_attention", "tpa", "linear_attention")
"""The operators' folders; each has a ``bench.py`` with ``OPERATORS`` and ``BENCHES``."""


_guests: dict[str, Operator] = {}
_guest_benches: dict[str, Bench] = {}


def operators() -> dict[str, Operator]:
    """Every public operator by name, then those of `register`."""
    return _own_operators() | _guests


def benches() -> dict[str, Bench]:
    """Every bench by name, in the order of the registry, then those of `register`."""
    return _own_benches() | _guest_benches


def register(operators: Iterable[Operator] = (), benches: Iterable[Bench] = ()) -> None:
    """Add operators and benches from outside this package, for this process; a later one replaces its namesake.

    Raises:
        ArgumentError: The name is one of this package's.
    """
    for operator in operators:
        if operator.name in _own_operators():
            raise ArgumentError(f"register: {operator.name} is an operator of warploom's own; take another name")
        _guests[operator.name] = operator
    for bench in benches:
        if bench.name in _own_benches():
            raise ArgumentError(f"register: {bench.name} is a bench of warploom's own; take another name")
        _guest_benches[bench.name] = bench


def _own_operators() -> dict[str, Operator]:
    return {o.name: o for folder in FOLDERS for o in import_module(f"warploom.ops.{folder}.bench").OPERATORS}


def _own_benches() -> dict[str, Bench]:
    return {b.name: b for folder in FOLDERS for b in import_module(f"warploom.ops.{folder}.bench").BENCHES}
