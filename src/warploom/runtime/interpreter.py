"""Triton's interpreter, made to compute as a GPU does.

Imported where kernels run in it (``TRITON_INTERPRET=1``). In some versions of Triton

- its fused product and sum rounds the product as well, and then every error-free transformation loses what it is
  written for;
- what it makes bfloat16 it cuts off;
- a comparison of scalars keeps their type instead of becoming a truth value, and is no mask once it is broadcast;
- a number that a kernel computed is no bound of a loop, with recent versions of NumPy.

Each is mended where it is found wrong. A version whose interpreter is built otherwise is left as it is.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter

_Builder = interpreter.InterpreterBuilder
_Handle = interpreter.TensorHandle


def repair() -> list[str]:
    """Mend what the interpreter of this version of Triton does wrong, and name it."""
    mended = []
    for is_right, mend in _REPAIRS:
        try:
            right = is_right()
        except (AttributeError, TypeError, ValueError):  # other insides
            continue
        if not right:
            mend()
            mended.append(mend.__name__.strip("_"))
    return mended


def _floats(*values: float) -> Any:
    return _Handle(np.array(values, np.float32), tl.float32)


def _fma_rounds_once() -> bool:
    x = _floats(1 + 2**-12)
    return _Builder().create_fma(x, x, _floats(-1 - 2**-11)).data.tolist() == [2.0**-24]  # type: ignore[no-any-return]


def _round_fma_once() -> None:
    # float64 holds the product of two float32 factors exactly; it is rounded once, with the sum.
    def create_fma(self: object, x: Any, y: Any, z: Any) -> Any:
        exact = x.data.astype("float64") * y.data + z.data
        return _Handle(exact.astype(z.data.dtype), z.dtype.scalar)

    _Builder.create_fma = create_fma


def _bfloat16_is_nearest() -> bool:
    found = _Builder().create_fp_trunc(_floats(1 + 2**-8 + 2**-16, 1 + 2**-8), tl.bfloat16).data
    return found.tolist() == [0x3F81, 0x3F80]  # type: ignore[no-any-return]


def _round_bfloat16_to_nearest() -> None:
    cast = _Builder.cast_impl

    def create_fp_trunc(self: Any, value: Any, dtype: Any) -> Any:
        if value.dtype.scalar != tl.float32 or dtype.scalar != tl.bfloat16:
            return cast(self, value, dtype)
        bits = np.ascontiguousarray(value.data).view(np.uint32)
        nearest = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16  # of two as near, the even one
        result = np.where(np.isnan(value.data), bits >> 16 | 0x40, nearest)
        return _Handle(result.astype(np.uint16), dtype.scalar)

    _Builder.create_fp_trunc = create_fp_trunc


def _comparisons_are_truth_values() -> bool:
    return _Builder().create_fcmpOLT(_floats(1), _floats(2)).dtype == tl.int1  # type: ignore[no-any-return]


def _compare_to_truth_values() -> None:
    usual = _Builder.binary_op

    def binary_op(self: Any, lhs: Any, rhs: Any, op: Any) -> Any:
        result = usual(self, lhs, rhs, op)
        if result.data.dtype == np.bool_:
            result.dtype = tl.int1
        return result

    _Builder.binary_op = binary_op


def _scalars_bound_loops() -> bool:
    scalar = tl.tensor(_Handle(np.array([3], np.int32), tl.int32), tl.int32)
    scope = interpreter._LangPatchScope()
    interpreter._patch_lang_tensor(tl.tensor, scope)
    try:
        return len(range(scalar)) == 3
    except TypeError:
        return False
    finally:
        scope.restore()


def _let_scalars_bound_loops() -> None:
    usual = interpreter._patch_lang_tensor

    def patch(tensor: Any, scope: Any) -> None:
        usual(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patch


_REPAIRS = (
    (_fma_rounds_once, _round_fma_once),
    (_bfloat16_is_nearest, _round_bfloat16_to_nearest),
    (_comparisons_are_truth_values, _compare_to_truth_values),
    (_scalars_bound_loops, _let_scalars_bound_loops),
)


def widen_declared(kind: Any, value: Any) -> Any:
    """A kernel's argument, 64 bits wide where ``kind``, from `parameters_of`, says so.

    The interpreter makes integers 32 bits wide where their values allow it, and then a product of one overflows.
    """
    if value is None:  # of any kind: what a call has not
        return None
    if isinstance(kind, tuple):
        return type(kind)(*map(widen_declared, kind, value))
    return _wide(value) if kind == "i64" else value


def _wide(number: int | float) -> Any:
    return tl.tensor(_Handle(np.array([number], np.int64), tl.int64), tl.int64)
