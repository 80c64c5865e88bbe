"""The ledger of known failures, a table in ``docs/what-was-tried.md``, as the tests and random calls read it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

__all__ = ["LEDGER", "Known", "call_of", "entries", "known_call", "known_test"]

LEDGER = Path(__file__).parents[1] / "docs" / "what-was-tried.md"
HEAD = "| what is wrong | shown by | where |"
PLACES = ("everywhere", "gpu", "cpu")
_ROW = re.compile(r"^\| (?P<what>.+?) \| `(?P<shown_by>.+)` \| (?P<where>\w+) \|$")


class Known(NamedTuple):
    """An entry of the ledger."""

    what: str
    shown_by: str
    """A test's name, or the JSON of a call."""
    where: str
    """One of `PLACES`."""


def entries(text: str | None = None) -> list[Known]:
    """Returns the entries of the ledger, or of a text like it.

    Raises:
        ValueError: There is no such table, or a line of it is no entry.
    """
    lines = (LEDGER.read_text(encoding="utf-8") if text is None else text).splitlines()
    if HEAD not in lines:
        raise ValueError(f"{LEDGER.name}: no table with the head {HEAD}")
    rows = [*takewhile(lambda line: line.startswith("|"), lines[lines.index(HEAD) :])][2:]
    found = [_ROW.match(row) for row in rows]
    for row, match in zip(rows, found):
        if match is None or match["where"] not in PLACES:
            raise ValueError(f"{LEDGER.name}: no entry: {row}")
    return [Known(**match.groupdict()) for match in found if match]


def known_test(known: list[Known], name: str, where: str) -> Known | None:
    """Returns the entry of a test, or of all cases of a test, for ``gpu`` or ``cpu``."""
    names = (name, name.partition("[")[0])
    return next((k for k in known if k.shown_by in names and k.where in ("everywhere", where)), None)


def call_of(known: Known) -> tuple[str, dict[str, Any]] | None:
    """Returns operator and choices of an entry that is a call."""
    if not known.shown_by.startswith("["):
        return None
    operator, record = json.loads(known.shown_by)
    return operator, record


def known_call(known: list[Known], operator: str, record: Mapping[str, Any], where: str) -> Known | None:
    """Returns the entry whose choices a call has all made."""
    plain = json.loads(json.dumps(record))
    for entry in known:
        call = call_of(entry)
        if call is None or call[0] != operator or entry.where not in ("everywhere", where):
            continue
        if all(name in plain and plain[name] == value for name, value in call[1].items()):
            return entry
    return None
