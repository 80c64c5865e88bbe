"""A disk that is nearly full."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest


@contextmanager
def room_for(size: int) -> Iterator[None]:
    """Let no file grow beyond a size.

    Modules that are imported meanwhile are not written as byte code: half of a file would stay, and every later
    import of that module would fail, in other processes too.
    """
    resource = pytest.importorskip("resource")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "dont_write_bytecode", True)
        patch.setitem(os.environ, "PYTHONDONTWRITEBYTECODE", "1")  # of processes that are started
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
