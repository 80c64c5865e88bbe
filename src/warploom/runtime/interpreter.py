"""Repairs of Triton's interpreter, so that it computes as a GPU does.

Imported where kernels run in the interpreter (``TRITON_INTERPRET=1``). In some versions of Triton

- a fused multiply-add rounds the product too, and error-free transformations are no longer exact;
- a cast to bfloat16 truncates instead of rounding to nearest;
- a comparison of scalars has their type instead of int1, and cannot be broadcast to a mask;
- with recent versions of NumPy, a number that a kernel computed cannot be the bound of a loop.

Each is tested for and repaired. A version whose interpreter is built differently is left as it is.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter

_Builder = interpreter.InterpreterBuilder
_Handle = interpreter.TensorHandle


def repair() -> list[str]:
    """Repair the faults of this version's interpreter. Returns the names of the repairs."""
    repaired = []
    for is_right, mend in _REPAIRS:
        try:
            right = is_right()
        except (AttributeError, TypeError, ValueError):  # built differently
            continue
        if not right:
            mend()
            repaired.append(mend.__name__.strip("_"))
    return repaired


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
        nearest = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16  # ties to even
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
    """Returns a kernel's argument, with 64 bits where its declared kind (`parameters_of`) says so.

    The interpreter gives an integer 32 bits if its value fits, and products of it may then overflow.
    """
    if value is None:  # an optional argument that the call does not have
        return None
    if isinstance(kind, tuple):
        return type(kind)(*map(widen_declared, kind, value))
    return _wide(value) if kind == "i64" else value


def _wide(number: int | float) -> Any:
    return tl.tensor(_Handle(np.array([number], np.int64), tl.int64), tl.int64)
