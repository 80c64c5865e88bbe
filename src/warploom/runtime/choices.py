"""Notes on the choice of kernels for a call, for ``warploom list --explain``."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

_notes: list[tuple[str, str]] | None = None


def note(step: str, text: str) -> None:
    """Note the decision on a step of a call, if notes are collected. A call that is planned makes no decisions."""
    if _notes is not None:
        _notes.append((step, text))


@contextlib.contextmanager
def collect_notes() -> Iterator[list[tuple[str, str]]]:
    """Collect notes, each a step and a text, within a context."""
    global _notes
    previous, _notes = _notes, []
    try:
        yield _notes
    finally:
        _notes = previous
