"""Numbers and tensors in registers, with the arithmetic of the language."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch
import triton.language as tl

DTYPES = {
    tl.int1: torch.bool,
    tl.int8: torch.int8,
    tl.uint8: torch.uint8,
    tl.int16: torch.int16,
    tl.int32: torch.int32,
    tl.uint32: torch.int64,  # numbers of 32 bits without a sign
    tl.int64: torch.int64,
    tl.float16: torch.float16,
    tl.bfloat16: torch.bfloat16,
    tl.float32: torch.float32,
    tl.float64: torch.float64,
}
KINDS = {torch_dtype: dtype for dtype, torch_dtype in DTYPES.items() if dtype != tl.uint32}


class Layout:
    """Any layout: none is known."""

    def __call__(self, *_: Any, **__: Any) -> Layout:
        return self

    def __getattr__(self, name: str) -> Layout:
        return self


LAYOUT = Layout()


class Tensor:
    """A tensor in registers; a number is one without axes."""

    def __init__(self, value: torch.Tensor) -> None:
        self._value = value

    @property
    def value(self) -> torch.Tensor:
        return self._value

    @property
    def shape(self) -> list[int]:
        return list(self._value.shape)

    @property
    def dtype(self) -> Any:
        return KINDS[self._value.dtype]

    @property
    def type(self) -> Any:
        return types.SimpleNamespace(layout=LAYOUT, shape=self.shape)

    def __int__(self) -> int:
        return int(self.value.item())

    __index__ = __int__

    def __bool__(self) -> bool:
        return bool(self.value.item())

    def __getitem__(self, index: Any) -> Tensor:
        return Tensor(self.value[index])

    def __neg__(self) -> Tensor:
        return Tensor(-self.value)

    def __invert__(self) -> Tensor:
        return Tensor(~self.value)

    def to(self, dtype: Any, bitcast: bool = False, **_: Any) -> Tensor:
        kind, value = DTYPES[dtype], self.value
        if not bitcast:
            return Tensor(value.to(kind))
        if value.dtype == torch.int64:
            value = (value << 32 >> 32).to(torch.int32)
        return Tensor(value.view(torch.int32).to(kind) & 0xFFFFFFFF if kind == torch.int64 else value.view(kind))

    def reshape(self, *shape: Any) -> Tensor:
        return Tensor(self.value.reshape(*shape))

    def permute(self, *order: Any) -> Tensor:
        return Tensor(self.value.permute(*order))

    def split(self) -> tuple[Tensor, Tensor]:
        return Tensor(self.value[..., 0]), Tensor(self.value[..., 1])

    def sum(self, axis: int | None = None, keep_dims: bool = False, **_: Any) -> Tensor:
        value = self.value.int() if self.value.dtype == torch.bool else self.value
        whole = value.flatten() if axis is None else value
        # In float64, whose order is not seen: PyTorch's depends on what lies beside the numbers.
        wide = torch.float64 if value.is_floating_point() else value.dtype
        return Tensor(whole.sum(0 if axis is None else axis, keep_dims, dtype=wide).to(value.dtype))

    @property
    def T(self) -> Tensor:
        return Tensor(self.value.T)


def number(value: float, dtype: torch.dtype = torch.int32) -> Tensor:
    """A number that a kernel works with at run time."""
    return Tensor(torch.tensor(value, dtype=dtype))


def raw(x: Any) -> Any:
    """A PyTorch tensor, or a number that is known when a kernel is compiled."""
    return x.value if isinstance(x, Tensor) else x


def as_tensor(x: Any) -> torch.Tensor:
    """A PyTorch tensor, also of a number that is known when a kernel is compiled."""
    x = raw(x)
    return x if isinstance(x, torch.Tensor) else torch.as_tensor(x)


def together(x: Any, y: Any) -> tuple[Any, Any]:
    """Two operands as PyTorch takes them: a tensor without axes counts for its dtype, unlike in PyTorch."""
    x, y = raw(x), raw(y)
    if isinstance(x, torch.Tensor) and isinstance(y, torch.Tensor) and x.dtype != y.dtype:
        kind = torch.promote_types(x.dtype, y.dtype)
        return x.to(kind), y.to(kind)
    return x, y


def _binary(function: Callable[[Any, Any], torch.Tensor], swapped: bool = False) -> Callable[..., Any]:
    def method(x: Tensor, y: Any) -> Any:
        if not isinstance(y, (Tensor, int, float)):
            return NotImplemented
        return Tensor(function(*together(y, x) if swapped else together(x, y)))

    return method


def _quotient(x: Any, y: Any) -> torch.Tensor:
    """That of C."""
    return torch.div(torch.as_tensor(x), torch.as_tensor(y), rounding_mode="trunc")


def _remainder(x: Any, y: Any) -> torch.Tensor:
    return torch.fmod(torch.as_tensor(x), torch.as_tensor(y))


def _give_arithmetic() -> None:
    names = ("add", "sub", "mul", "truediv", "and", "or", "xor", "lshift", "rshift")
    for name in (*names, "lt", "le", "gt", "ge", "eq", "ne"):
        special = f"__{name}__"
        setattr(Tensor, special, _binary(getattr(torch.Tensor, special)))
    for name in names:
        special = f"__{name}__"
        method = _binary(lambda x, y, special=special: getattr(torch.as_tensor(x), special)(y), swapped=True)
        setattr(Tensor, f"__r{name}__", method)
    for name, function in (("floordiv", _quotient), ("mod", _remainder)):
        setattr(Tensor, f"__{name}__", _binary(function))
        setattr(Tensor, f"__r{name}__", _binary(function, swapped=True))


_give_arithmetic()
