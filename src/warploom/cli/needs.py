"""Checks, before any work is done, that a machine has what kernels need."""

from __future__ import annotations

import importlib.util
import os
import shutil
from pathlib import Path

from warploom.errors import BackendError, WarploomError

COMPILERS = ("gcc", "clang", "cc")


def check_compilers() -> None:
    """Check that kernels can be compiled for the GPU here.

    Raises:
        BackendError: There is no C compiler, which Triton's launchers need.
        WarploomError: The cache of compiled kernels cannot be written.
    """
    if importlib.util.find_spec("triton") is None:
        return
    if not os.environ.get("CC") and not any(map(shutil.which, COMPILERS)):
        raise BackendError(
            "no C compiler here, which Triton needs: install gcc (apt install gcc, dnf install gcc), or name a "
            "compiler in CC"
        )
    import triton

    cache = Path(triton.knobs.cache.dir)
    check_folder(cache, says="kernels are compiled into it: name another folder in TRITON_CACHE_DIR")


def check_folder(folder: Path, *names: str, says: str) -> None:
    """Check that a folder, and files in it, can be written.

    Raises:
        WarploomError: It cannot; with what the user can do about it.
    """
    from warploom.bench.storage import probe

    try:
        probe(folder, *names)
    except WarploomError as error:
        raise WarploomError(f"{error}; {says}") from error
