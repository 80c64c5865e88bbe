"""`torch.autocast` for operators that multiply matrices: it casts their inputs, and nothing inside them."""

from __future__ import annotations

import contextlib
from typing import Any

import torch

Tensor = torch.Tensor


def is_autocast(x: object) -> bool:
    """Returns True if autocast is on for the device of a tensor."""
    # By name, because neither `torch.compile` nor a meta tensor can ask which devices have an autocast.
    if not isinstance(x, Tensor) or not (x.is_cuda or x.is_cpu):
        return False
    return torch.is_autocast_enabled("cuda" if x.is_cuda else "cpu")


def cast_for_autocast(*tensors: Any) -> tuple[Any, ...]:
    """Returns tensors cast as autocast casts those of PyTorch's attention, if it is on for the last of them.

    Floating tensors are cast, except float64. None stays None.
    """
    last = tensors[-1]
    if not is_autocast(last):
        return tensors
    dtype = torch.get_autocast_dtype(last.device.type)
    return tuple([_cast(x, dtype) for x in tensors])


def disable_autocast(x: object) -> contextlib.AbstractContextManager[Any]:
    """Returns a context without autocast, in which float32 stays float32."""
    if not is_autocast(x):
        return contextlib.nullcontext()
    return torch.autocast(x.device.type, enabled=False)  # type: ignore[attr-defined]


def _cast(x: Any, dtype: torch.dtype) -> Any:
    if isinstance(x, Tensor) and x.is_floating_point() and x.dtype != torch.float64:
        return x.to(dtype)
    return x
