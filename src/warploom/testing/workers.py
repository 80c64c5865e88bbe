"""Several processes for what one would compile kernel by kernel: checking cases, or compiling before measuring."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path


def workers(processes: int, specs: Sequence[Path]) -> ProcessPoolExecutor:
    """So many processes, each of which knows the operators that files describe (see `warploom.testing.specs`)."""
    return ProcessPoolExecutor(processes, multiprocessing.get_context("spawn"), _start, (specs,))


def _start(specs: Sequence[Path]) -> None:
    # There are processes enough: PyTorch's compiler would begin one for each core in each of them.
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    from warploom.testing.specs import load_specs

    load_specs(specs)
