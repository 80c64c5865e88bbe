"""Checks of arguments that the operators share. None reads a tensor's data or touches the device."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch

from warploom.errors import ArgumentError, DeviceError, DtypeError, ShapeError, dtype_of, fault, shape_of
from warploom.runtime.names import refuse_missing

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
COUNTS = (torch.int32, torch.int64)
"""The dtypes of bounds and lengths."""
INTEGERS = (torch.int8, torch.uint8, torch.int16, *COUNTS)
"""The dtypes of positions."""
LARGEST = 2**31 - 1
"""The largest position, and the greatest length."""


def check_tensor(function: str, argument: str, value: object, dtypes: tuple[torch.dtype, ...]) -> torch.Tensor:
    """Returns a value if it is a dense tensor of one of these dtypes.

    Raises:
        DtypeError: It is no tensor, of another dtype, sparse, or nested.
        TypeError: The call lacks the argument.
    """
    if not isinstance(value, torch.Tensor):
        refuse_missing(function, argument, value)
        expected = "a tensor" if dtypes is FLOATS else "an integer tensor"
        raise fault(DtypeError, function, argument, expected, type(value).__name__)
    if value.dtype not in dtypes:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise fault(DtypeError, function, argument, f"a tensor of {names}", dtype_of(value))
    if value.is_nested or value.layout is not torch.strided:
        got = "a nested tensor" if value.is_nested else f"one of the layout {value.layout}"
        raise fault(DtypeError, function, argument, "a dense tensor", got)
    return value


def check_device(function: str, argument: str, tensor: torch.Tensor, name: str, first: torch.Tensor) -> None:
    """Check that a tensor lies on the device of the first tensor of a call, which has a name.

    Raises:
        DeviceError: It does not.
    """
    if tensor.device != first.device:
        raise fault(DeviceError, function, argument, f"on the device of {name}, {first.device}", tensor.device)


def check_alike(function: str, **tensors: object) -> None:
    """Check that all are tensors of floats, of the dtype of the first and on its device.

    Raises:
        DtypeError: One is no such tensor.
        DeviceError: One lies elsewhere.
    """
    name, first = next(iter(tensors.items()))
    for argument, value in tensors.items():
        tensor = check_tensor(function, argument, value, FLOATS)
        like = check_tensor(function, name, first, FLOATS)
        if tensor.dtype != like.dtype:
            expected = f"a tensor of the dtype of {name}, {dtype_of(like)}"
            raise fault(DtypeError, function, argument, expected, dtype_of(tensor))
        check_device(function, argument, tensor, name, like)


def check_cu_seqlens(function: str, argument: str, bounds: object, name: str, first: torch.Tensor) -> None:
    """Check that bounds of packed sequences are ``(S + 1,)``, and on the device of the first tensor of a call.

    Raises:
        DtypeError: They are no tensor of int32 or int64.
        ShapeError: They have another shape.
        DeviceError: They lie elsewhere.
    """
    tensor = check_tensor(function, argument, bounds, COUNTS)
    if tensor.dim() != 1 or tensor.shape[0] < 2:
        raise fault(ShapeError, function, argument, "(S + 1,) with S ≥ 1", shape_of(tensor))
    check_device(function, argument, tensor, name, first)


def check_flags(function: str, **flags: object) -> None:
    """Raise a DtypeError unless all are bools."""
    for argument, flag in flags.items():
        if not isinstance(flag, bool):
            raise fault(DtypeError, function, argument, "a bool", repr(flag))


def check_choice(function: str, argument: str, value: object, known: Sequence[str]) -> None:
    """Raise an ArgumentError unless a value is a known one."""
    if value not in known:
        raise fault(ArgumentError, function, argument, f"one of {', '.join(known)}", repr(value))


def check_theta(function: str, theta: object | None, encoding: str, q: torch.Tensor, heads: str = "H") -> None:
    """Check the frequencies of linear attention: none, for pairs of features to rotate, or for features.

    ``heads`` is the letter of the number of heads of ``q``.
    """
    if encoding == "none":
        if theta is not None:
            raise fault(ArgumentError, function, "theta", 'left out when encoding="none"', "both")
        return
    if theta is None:
        raise fault(ArgumentError, function, "theta", f'given when encoding="{encoding}"', None)
    tensor = check_tensor(function, "theta", theta, FLOATS)
    count, features = q.shape[2:]
    if encoding == "rotate":
        if features % 2:
            raise fault(ShapeError, function, "q", "of an even number of features D", shape_of(q))
        features //= 2
    rows = tensor.shape[0] if tensor.dim() == 2 else 1
    if tensor.dim() not in (1, 2) or 1 != rows != count or not 1 <= tensor.shape[-1] <= features:
        expected = f"({heads}, F), (1, F) or (F,) with {heads} = {count} and 1 ≤ F ≤ {features}"
        raise fault(ShapeError, function, "theta", expected, shape_of(tensor))
    check_device(function, "theta", tensor, "q", q)


def check_state(function: str, state: object | None, axes: str, shape: tuple[int, ...], q: torch.Tensor) -> None:
    """Check the first state of linear attention, if it is given."""
    if state is not None:
        tensor = check_tensor(function, "initial_state", state, FLOATS)
        if tuple(tensor.shape) != shape:
            raise fault(ShapeError, function, "initial_state", f"{axes} = {shape}", shape_of(tensor))
        check_device(function, "initial_state", tensor, "q", q)


def check_offset(function: str, offset: Any, offsets: object | None, name: str, first: torch.Tensor) -> None:
    """Check the position of the first token of a tensor ``(B, N, …)``: a number, or ``offsets``, a tensor.

    Raises:
        DtypeError: It is neither.
        ShapeError: The tensor is neither ``()`` nor ``(B,)``.
        DeviceError: It lies on another device.
        ArgumentError: Positions do not fit in 32 bits.
    """
    batch, tokens = first.shape[:2]
    if offsets is not None:
        tensor = check_tensor(function, "offset", offsets, INTEGERS)
        if tensor.dim() > 1 or (tensor.dim() == 1 and tensor.shape[0] != batch):
            raise fault(ShapeError, function, "offset", f"() or (B,) with B = {batch}", shape_of(tensor))
        check_device(function, "offset", tensor, name, first)
    elif not is_int(offset):
        raise fault(DtypeError, function, "offset", "an int or an integer tensor", repr(offset))
    elif not (offset >= -LARGEST and is_within(offset + tokens - 1, LARGEST)):
        expected = "such that all positions are below 2**31 in size"
        raise fault(ArgumentError, function, "offset", expected, format_value(offset))


def check_one_form(
    function: str, cu_seqlens: object | None, cu_seqlens_q: object | None, cu_seqlens_k: object | None
) -> None:
    """Raise if bounds of packed sequences are given both for all and for queries or keys.

    Raises:
        ArgumentError: They are.
    """
    if cu_seqlens is not None and (cu_seqlens_q is not None or cu_seqlens_k is not None):
        argument = "cu_seqlens_k" if cu_seqlens_q is None else "cu_seqlens_q"
        raise fault(ArgumentError, function, argument, "None with cu_seqlens, which stands for both", "both forms")


def bounds_of_itself(function: str, cu_seqlens: Any, cu_seqlens_q: Any, cu_seqlens_k: Any) -> Any:
    """Returns bounds of packed sequences that attend to themselves, under whichever name they are given, or None.

    Raises:
        ArgumentError: Both forms are given, or queries and keys have different tensors.
    """
    check_one_form(function, cu_seqlens, cu_seqlens_q, cu_seqlens_k)
    if cu_seqlens_q is not None and cu_seqlens_k is not None and cu_seqlens_q is not cu_seqlens_k:
        expected = "None or the tensor that is cu_seqlens_q: each sequence attends to itself"
        raise fault(ArgumentError, function, "cu_seqlens_k", expected, "another tensor")
    return first_given(cu_seqlens, cu_seqlens_q, cu_seqlens_k)


def first_given(*values: Any) -> Any:
    """Returns the first of these values that is not None, if there is one."""
    return next((value for value in values if value is not None), None)


def as_python(value: Any) -> Any:
    """Returns a number of numpy's as Python's, in a tuple or NamedTuple too; all else as it is."""
    if isinstance(value, tuple):
        return getattr(value, "_make", tuple)([as_python(each) for each in value])
    numpy = sys.modules.get("numpy")
    # In traced code a number of numpy's is a tensor, or a constant that PyTorch has made Python's.
    if numpy is None or torch.compiler.is_dynamo_compiling() or not isinstance(value, numpy.generic):
        return value
    return value.item()


def is_int(value: object) -> bool:
    """Returns True if a value is an integer, or a symbol for one in traced code, and no bool."""
    return isinstance(value, int | torch.SymInt) and not isinstance(value, bool)


def is_within(size: int, largest: int) -> bool:
    """Returns True if a size is at most the largest, or is not known yet because a program is exported."""
    return torch.compiler.is_exporting() or size <= largest


def check_number(function: str, argument: str, value: object) -> None:
    """Raise unless a value is a finite number.

    Raises:
        DtypeError: The value is no number.
        ArgumentError: The value is not finite, or beyond what a float holds.
    """
    if isinstance(value, bool) or not isinstance(value, int | float | torch.SymInt | torch.SymFloat):
        raise fault(DtypeError, function, argument, "a number", repr(value))
    # The largest float, written out: `torch.compile` takes one with a name for an input.
    if isinstance(value, int | float) and not abs(value) <= 1.7976931348623157e308:
        raise fault(ArgumentError, function, argument, "finite", format_value(value))


def format_value(value: object) -> str:
    """Returns a value as text for an error, also an integer of thousands of digits, which Python does not print."""
    try:
        return repr(value)
    except ValueError:
        return f"{type(value).__name__} of too many digits"
