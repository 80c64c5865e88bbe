"""A board: memory of one host in which its ranks read what the others have to say.

A message through gloo wakes threads on every rank, which takes half a millisecond or more. In a model every layer
of attention has one, and its GPU waits for it. Ranks of one host write two words instead, and read the others'.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import mmap
import os
import secrets
import tempfile
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist

__all__ = ["Board", "make_board"]

MEMORY = "/dev/shm"
"""Where files are memory, on Linux."""
PATIENT = 0.002
"""Seconds after which a rank that waits leaves its processor to others."""
PAUSE = 1e-4
"""For so many seconds each time."""

_VALUE = 48
"""Bits of a word for what it says; those above are the number of its call."""
_NUMBERS = 2**16
_TOKEN = 16  # bytes at the beginning, which tell that a file is the one meant


class Board:
    """Two words of each rank for a call, and as many for the next: its digest, and a number.

    A word holds the number of its call, so none is taken for that of another call: a rank writes those of the call
    after the next where those of a call were, and does so when all ranks have begun the next and so have read them.

    Args:
        memory: Of the board, the same on all ranks.
        rank: This one.
        processes: Of the ranks, by number of the process.
    """

    def __init__(self, memory: mmap.mmap, rank: int, processes: list[int]) -> None:
        self._words = memoryview(memory)[_TOKEN:].cast("Q")
        self._rank, self._processes = rank, processes
        self._call = 0

    def write(self, message: bytes, number: int) -> None:
        """Begin a call.

        Args:
            message: What this rank has to say.
            number: Below 2⁴⁸.
        """
        self._call += 1
        self._stamp = self._call % _NUMBERS
        world = len(self._processes)
        self._first = self._call % 2 * 2 * world
        for place, value in ((self._rank, _digest(message)), (world + self._rank, number)):
            self._words[self._first + place] = self._stamp << _VALUE | value

    def is_full(self, seconds: float) -> bool:
        """Wait for every rank to have begun the call.

        Args:
            seconds: For how long.

        Raises:
            RuntimeError: The process of one that has not begun it has ended.
        """
        began = time.monotonic()
        while missing := [place for place, word in enumerate(self._of_call()) if word >> _VALUE != self._stamp]:
            waited = time.monotonic() - began
            if waited > seconds:
                for rank in (place % len(self._processes) for place in missing):
                    if not _runs(self._processes[rank]):
                        raise RuntimeError(f"rank {rank} of the group has ended")
                return False
            time.sleep(PAUSE if waited > PATIENT else 0)
        return True

    def read(self) -> tuple[bool, list[int]]:
        """Whether all ranks said the same, and the number of each; once the board is full."""
        values, world = [word % 2**_VALUE for word in self._of_call()], len(self._processes)
        return len(set(values[:world])) == 1, values[world:]

    def _of_call(self) -> list[int]:
        return self._words[self._first : self._first + 2 * len(self._processes)].tolist()


def make_board(group: Any) -> Board | None:
    """A board of the ranks of a group, which all call this; None unless all are processes of one host.

    Args:
        group: Of gloo.
    """
    if os.name != "posix":  # elsewhere a process cannot be asked whether it runs
        return None
    size, memory = _TOKEN + 8 * 4 * group.size(), None
    path, token = "", secrets.token_bytes(_TOKEN)
    if group.rank() == 0:
        with contextlib.suppress(OSError):  # without a file there is no board, which all must hear
            file, path = tempfile.mkstemp(prefix="warploom-", dir=MEMORY if os.access(MEMORY, os.W_OK) else None)
            with os.fdopen(file, "wb") as writing:
                writing.write(token.ljust(size, b"\0"))
    told = _gathered((path, token, os.getpid()), group)
    path, token, _ = told[0]
    try:
        with Path(path).open("r+b") as reading:
            memory = mmap.mmap(reading.fileno(), size)
    except (OSError, ValueError):  # of another host
        memory = None
    processes = [process for _, _, process in told]
    seen = memory is not None and memory[:_TOKEN] == token and all(map(_runs, processes))
    everybody = all(_gathered(seen, group))
    if group.rank() == 0 and path:
        Path(path).unlink()  # those that have it keep it
    return Board(memory, group.rank(), processes) if everybody and memory is not None else None


def _gathered(mine: Any, group: Any) -> list[Any]:
    found = [None] * group.size()
    dist.all_gather_object(found, mine, group=group)
    return found


def _runs(process: int) -> bool:
    """Whether there is a process of this number here."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


@functools.lru_cache(256)
def _digest(message: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(message, digest_size=_VALUE // 8).digest(), "little")
