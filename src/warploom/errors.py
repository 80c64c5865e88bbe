"""The errors and warnings of warploom. An error names function and argument, what was expected and what was given.

Errors are raised before any kernel runs and before anything is modified.
"""

from __future__ import annotations

import sys
import warnings
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable
    from types import FrameType

    from torch import Tensor

__all__ = [
    "ArgumentError",
    "BackendError",
    "BackendWarning",
    "DeviceError",
    "DtypeError",
    "LayoutWarning",
    "ShapeError",
    "UnknownArgumentError",
    "WarploomError",
]


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


class UnknownArgumentError(ArgumentError, TypeError):
    """A call has an argument that the function does not have. The text gives its name in warploom, if any."""


class ShapeError(WarploomError):
    """A tensor has the wrong number of dimensions or a size that does not fit the others."""


class DtypeError(WarploomError, TypeError):
    """An argument has the wrong type, or a tensor the wrong dtype."""


class DeviceError(WarploomError):
    """A tensor is on another device than the rest of the arguments."""


class BackendError(WarploomError, RuntimeError):
    """The backend that was chosen by name cannot run this call here. There is no fallback."""


class LayoutWarning(UserWarning):
    """Tensors have sizes or strides as if heads came before tokens. Here tokens come before heads."""


class BackendWarning(UserWarning):
    """A call takes much more time or memory than on another backend. The text says why."""


_PACKAGE = __name__.rpartition(".")[0]


def warn(category: type[Warning], message: str, unless_from: tuple[str, ...] = ()) -> None:
    """Warn about the line of code that called warploom; by default Python shows a warning once for each line.

    There is no warning if the call came through one of the subpackages ``unless_from``.
    """
    frame: FrameType | None = sys._getframe(1)
    level = 2
    while frame is not None and (names := frame.f_globals.get("__name__", "").split("."))[0] == _PACKAGE:
        if names[1:2] and names[1] in unless_from:
            return
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)


def fault(error: type[WarploomError], function: str, argument: str, expected: str, got: object) -> WarploomError:
    """Returns an error with the text ``function: argument must be EXPECTED; got GOT``."""
    return error(f"{function}: {argument} must be {expected}; got {got}")


def unknown(what: str, name: str, known: Iterable[str]) -> str:
    """Returns the words for a name that is none of those known, with the nearest of them first."""
    import difflib

    names = list(known)
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    hint = f" did you mean {near[0]!r}?" if near else ""
    shown = name if len(name) <= 80 else f"{name[:79]}…"
    return f"no {what} {shown!r};{hint} there are: {', '.join(names) or 'none'}"


def shape_of(tensor: Tensor) -> tuple[int, ...]:
    """Returns a tensor's shape, for an error."""
    return tuple(tensor.shape)


def dtype_of(tensor: Tensor) -> str:
    """Returns a tensor's dtype as text for an error, e.g. ``bfloat16``."""
    return str(tensor.dtype).removeprefix("torch.")
