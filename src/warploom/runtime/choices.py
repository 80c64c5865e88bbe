"""Which kernels calls take, and why, for a person who asks: see ``warploom list --explain``."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

_notes: list[tuple[str, str]] | None = None


def note(step: str, text: str) -> None:
    """Keep what was decided on a step of a call, where someone asks; a call that is planned decides nothing."""
    if _notes is not None:
        _notes.append((step, text))


@contextlib.contextmanager
def noting() -> Iterator[list[tuple[str, str]]]:
    """Collect what is noted meanwhile, each as the step and a text."""
    global _notes
    previous, _notes = _notes, []
    try:
        yield _notes
    finally:
        _notes = previous
