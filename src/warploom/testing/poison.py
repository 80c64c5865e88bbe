"""Allocations filled with NaN: a result shows memory that a kernel left unwritten, or should not have read."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def poison_allocations() -> Iterator[None]:
    """Let ``torch.empty``, ``empty_like``, ``new_empty`` and ``empty_strided`` fill new tensors with NaN.

    This is PyTorch's own setting for uninitialised memory, and no dispatch mode: operators take the same path as in
    plain eager code. Operations of PyTorch use their deterministic variants meanwhile.
    """
    deterministic = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    settings: Any = torch.utils.deterministic  # a module with properties
    fill = settings.fill_uninitialized_memory
    with warnings.catch_warnings():
        # Operations without a deterministic variant would warn.
        warnings.filterwarnings("ignore", message=".*determinis")
        torch.use_deterministic_algorithms(True, warn_only=True)
        settings.fill_uninitialized_memory = True
        try:
            yield
        finally:
            settings.fill_uninitialized_memory = fill
            torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
