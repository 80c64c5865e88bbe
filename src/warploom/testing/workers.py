"""Worker processes, to check cases or compile kernels in parallel."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path


def start_workers(processes: int, specs: Sequence[Path]) -> ProcessPoolExecutor:
    """Start worker processes that know the operators that files describe (see `warploom.testing.specs`)."""
    return ProcessPoolExecutor(processes, multiprocessing.get_context("spawn"), _start, (specs,))


def _start(specs: Sequence[Path]) -> None:
    # By default PyTorch's compiler would start a process for each core in every worker.
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    from warploom.testing.specs import load_specs

    load_specs(specs)
