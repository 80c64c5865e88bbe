"""How workers share a GPU: each has an equal part of its memory, or one has all of it while the others wait."""

import fcntl
import gc
import os
import tempfile
from functools import cache
from pathlib import Path
from typing import IO

import torch

LEAST = 6 * 2**30
"""Bytes of GPU memory for which there is a worker: its tensors, its context, and programs that it starts."""
FOR_TENSORS = 0.75
"""What of a worker's part its own tensors may take."""
WORKERS = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))

_alone = WORKERS == 1


@cache
def _lock(name: str) -> IO[str]:
    """A file that all workers share, to be locked."""
    return (Path(tempfile.gettempdir()) / f"warploom-tests-{os.getuid()}-{name}").open("w")


def is_alone() -> bool:
    return _alone or not torch.cuda.is_available()


def enter(alone: bool) -> None:
    """Wait until a test may run: beside others that do not need the GPU for themselves, or alone."""
    global _alone
    if WORKERS == 1:
        return
    fcntl.flock(_lock("door"), fcntl.LOCK_EX)  # who waits to be alone lets no other pass
    fcntl.flock(_lock("room"), fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
    fcntl.flock(_lock("door"), fcntl.LOCK_UN)
    _alone = alone
    torch.cuda.set_per_process_memory_fraction(1.0 if alone else FOR_TENSORS / WORKERS)


def leave() -> None:
    """Let others in, and have what was allocated."""
    if _alone or torch.cuda.memory_reserved() > 2**28:
        gc.collect()
        torch.cuda.empty_cache()
    if WORKERS > 1:
        fcntl.flock(_lock("room"), fcntl.LOCK_UN)
