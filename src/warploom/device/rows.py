"""Rows of tensors (B, N, H, F), as kernels address them."""

from __future__ import annotations

from typing import NamedTuple

import triton.language as tl


class Strides(NamedTuple):
    """Strides of a tensor (B, N, H, F). With a ``VEC``, all but that of features come divided by it."""

    b: tl.int64
    n: tl.int64
    h: tl.int64
    f: tl.int64
