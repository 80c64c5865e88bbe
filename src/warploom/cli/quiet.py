"""Leads what compilers, libraries and other processes print to a file, and not to the terminal."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from warploom.errors import WarploomError

_STREAMS = (1, 2)
"""The file descriptors of standard output and standard error, also for C libraries and for other processes."""


@contextlib.contextmanager
def quiet(log: Path) -> Iterator[TextIO]:
    """Append to a file what is written to standard output and standard error.

    warploom's own warnings are shown.

    Args:
        log: The file. It is removed in the end if nothing is in it.

    Yields:
        What still reaches standard error.

    Raises:
        WarploomError: The file cannot be written.
    """
    try:
        file = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    except OSError as error:
        raise WarploomError(f"{log}: cannot be written: {error.strerror or error}") from error
    with contextlib.ExitStack() as stack:
        stack.callback(_remove_if_empty, log)
        stack.callback(os.close, file)
        shown = stack.enter_context(_duplicate(sys.stderr))
        for stream in _STREAMS:
            stack.enter_context(_redirect(stream, file))
        warnings = logging.StreamHandler(shown)
        logger = logging.getLogger("warploom")
        logger.addHandler(warnings)
        stack.callback(logger.removeHandler, warnings)
        try:
            yield shown
        finally:
            for written in (sys.stdout, sys.stderr):
                with contextlib.suppress(OSError):  # no space for the log
                    written.flush()


@contextlib.contextmanager
def _duplicate(stream: TextIO) -> Iterator[TextIO]:
    """Yields a stream that goes where another one goes now; that one itself if it is no file, as in tests."""
    try:
        number = stream.fileno()
    except (OSError, io.UnsupportedOperation):
        number = -1
    if number not in _STREAMS:
        yield stream
        return
    with os.fdopen(os.dup(number), "w", 1, encoding=stream.encoding, errors="backslashreplace") as copy:
        yield copy


@contextlib.contextmanager
def _redirect(stream: int, file: int) -> Iterator[None]:
    """Lead a file descriptor to a file for a time."""
    sys.stdout.flush()
    try:
        kept = os.dup(stream)
    except OSError:  # it is closed
        yield
        return
    os.dup2(file, stream)
    try:
        yield
    finally:
        os.dup2(kept, stream)
        os.close(kept)


def _remove_if_empty(log: Path) -> None:
    with contextlib.suppress(OSError):
        if log.stat().st_size == 0:
            log.unlink()
