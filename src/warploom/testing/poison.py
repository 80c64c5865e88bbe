"""Memory filled with NaN: what a kernel leaves unwritten or reads out of bounds shows in its result."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def poisoned_allocations() -> Iterator[None]:
    """Fill what ``torch.empty``, ``empty_like``, ``new_empty`` and ``empty_strided`` return: NaN.

    This is PyTorch's own mode for uninitialised memory. No dispatch mode is involved, so operators take the
    same path as in plain eager code. Operations of PyTorch that have a deterministic variant use it here.
    """
    deterministic = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    settings: Any = torch.utils.deterministic  # a module with properties
    fill = settings.fill_uninitialized_memory
    with warnings.catch_warnings():
        # Only the fill is wanted: an operation without a deterministic variant is no concern here.
        warnings.filterwarnings("ignore", message=".*determinis")
        torch.use_deterministic_algorithms(True, warn_only=True)
        settings.fill_uninitialized_memory = True
        try:
            yield
        finally:
            settings.fill_uninitialized_memory = fill
            torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
