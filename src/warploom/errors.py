"""The errors a user can meet. Each names the function, the argument, what was expected and what came.

They are raised before any kernel runs; nothing has been modified when one arrives.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["ArgumentError", "BackendError", "DeviceError", "DtypeError", "ShapeError", "WarploomError"]


class WarploomError(ValueError):
    """Base of every error raised by warploom on purpose.

    Example:
        ```python
        import torch
        import warploom

        try:
            warploom.lrpe_rotate(torch.randn(2, 10, 4, 7), torch.ones(3))
        except warploom.ShapeError as error:  # which is a WarploomError, and a ValueError
            print(error)  # names the argument, what was expected and what came
        ```
    """


class ArgumentError(WarploomError):
    """An argument has a value, or a combination of arguments, that the operator does not define."""


class ShapeError(WarploomError):
    """A tensor has the wrong number of dimensions or a size that does not fit the others."""


class DtypeError(WarploomError, TypeError):
    """An argument has the wrong type, or a tensor the wrong dtype."""


class DeviceError(WarploomError):
    """A tensor is on another device than the rest of the arguments."""


class BackendError(WarploomError, RuntimeError):
    """The backend that was asked for by name cannot run this call here. There is no fallback."""


def fault(error: type[WarploomError], function: str, argument: str, expected: str, got: object) -> WarploomError:
    """Build an error in the house's one wording: ``function: argument must be EXPECTED; got GOT``."""
    return error(f"{function}: {argument} must be {expected}; got {got}")


def shape_of(tensor: Tensor) -> tuple[int, ...]:
    """A tensor's shape as an error shows it."""
    return tuple(tensor.shape)


def dtype_of(tensor: Tensor) -> str:
    """A tensor's dtype as an error shows it, e.g. ``bfloat16``."""
    return str(tensor.dtype).removeprefix("torch.")
