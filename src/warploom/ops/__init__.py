"""The registry: one line per operator. Tests, bench and documentation walk over it."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from warploom.ops.spec import Bench, Operator

FOLDERS = ("lrpe", "flash_attention", "tpa")
"""The operators' folders; each has a ``spec.py`` with ``OPERATORS`` and ``BENCHES``."""


def operators() -> dict[str, Operator]:
    """Every public operator by name."""
    return {o.name: o for folder in FOLDERS for o in import_module(f"warploom.ops.{folder}.spec").OPERATORS}


def benches() -> dict[str, Bench]:
    """Every bench by name, in the order of the registry."""
    return {b.name: b for folder in FOLDERS for b in import_module(f"warploom.ops.{folder}.spec").BENCHES}
