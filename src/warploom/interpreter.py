"""Triton's interpreter, made to round as a GPU does.

Imported where kernels run in it (``TRITON_INTERPRET=1``). Its fused product and sum rounds the product as well, and
then every error-free transformation loses what it is written for; and what it makes bfloat16 it cuts off. Here the
product of float32 factors, which float64 holds exactly, is rounded once, with the sum; and bfloat16 is the nearest.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter

_cast = interpreter.InterpreterBuilder.cast_impl


def _create_fma(self: object, x: Any, y: Any, z: Any) -> Any:
    exact = x.data.astype("float64") * y.data + z.data
    return interpreter.TensorHandle(exact.astype(z.data.dtype), z.dtype.scalar)


def _create_fp_trunc(self: Any, value: Any, dtype: Any) -> Any:
    if value.dtype.scalar != tl.float32 or dtype.scalar != tl.bfloat16:
        return _cast(self, value, dtype)
    bits = np.ascontiguousarray(value.data).view(np.uint32)
    nearest = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16  # of two as near, the even one
    result = np.where(np.isnan(value.data), bits >> 16 | 0x40, nearest)
    return interpreter.TensorHandle(result.astype(np.uint16), dtype.scalar)


interpreter.InterpreterBuilder.create_fma = _create_fma
interpreter.InterpreterBuilder.create_fp_trunc = _create_fp_trunc
