"""Failures as values, so that a provider that fails does not cost the others their results."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch

from warploom.ops.spec import Unsupported

T = TypeVar("T")


@dataclass(frozen=True)
class Failure:
    """The status of a record, and the reason, for a provider without a result."""

    status: str
    reason: str


class DeviceLostError(RuntimeError):
    """Raised when the device answers nothing any more, after an illegal access, say: all later calls would fail."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"{name}: {reason}")
        self.name = name
        self.reason = reason


def attempt(name: str, call: Callable[[], T]) -> T | Failure:
    """Run what belongs to one provider; its failure becomes a value, so that the others keep their results.

    Raises:
        DeviceLostError: The failure took the device with it.
    """
    try:
        return call()
    except Unsupported as finding:
        return Failure("unsupported", _one_line(str(finding)))
    except (torch.OutOfMemoryError, MemoryError) as error:
        # The rest of the text is the allocator's state, different at every size.
        return Failure("oom", _one_line(str(error)).partition(" GPU ")[0] or "out of memory")
    except Exception as error:
        # A provider is other people's code, a compiler included: it may raise anything.
        reason = _one_line(f"{type(error).__name__}: {error}")
    if torch.cuda.is_initialized():
        try:
            torch.cuda.synchronize()
        except RuntimeError as error:
            # The first line names the fault; the others advise on debugging.
            raise DeviceLostError(name, reason.partition(" Search for ")[0]) from error
    # On a CPU running out of memory has no exception type of its own.
    return Failure("oom" if "DefaultCPUAllocator: can't allocate memory" in reason else "error", reason)


def _one_line(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 500 else line[:499] + "…"
