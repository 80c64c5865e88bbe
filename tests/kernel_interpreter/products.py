"""Products of matrices with bits that do not depend on a BLAS."""

from __future__ import annotations

import math

import numpy as np
import torch


def in_float32(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Returns ``a · b`` (…, M, N) of factors (…, M, K) and (…, K, N) that float32 holds: exact, and rounded once.

    float64 holds the products of two such numbers. In whatever order a BLAS adds them, a sum is off by less than
    ``error``. Where that leaves two float32 to round to, it is formed anew, in as many bits as it takes.
    """
    x, y = a.double().numpy(), b.double().numpy()
    with np.errstate(invalid="ignore", over="ignore"):
        sums = x @ y
        rows, columns = np.sqrt(np.einsum("...mk,...mk->...m", x, x)), np.sqrt(np.einsum("...kn,...kn->...n", y, y))
        error = rows[..., :, None] * (columns * (x.shape[-1] * 2.0**-52))[..., None, :]
        result = sums.astype(np.float32)
        unsure = (sums - error).astype(np.float32) != (sums + error).astype(np.float32)
        if unsure.any():
            terms = x.shape[-1] * 2.0 ** (_bits(a) + _bits(b) - 53)
            exact = _range(x, -1)[..., :, None] * (_range(y, -2) * terms)[..., None, :] <= 1
            *batch, m, n = np.nonzero(unsure & ~exact & np.isfinite(error))
            rows_of_terms = x[(*batch, m)] * y.swapaxes(-1, -2)[(*batch, n)]
            result[(*batch, m, n)] = [math.fsum(terms) for terms in rows_of_terms.tolist()]
        return torch.from_numpy(result + np.float32(0))  # no zero has a sign


def _bits(x: torch.Tensor) -> int:
    """Returns how many bits the significands of numbers have: bfloat16's, float16's or float32's."""
    if x.dtype in (torch.bfloat16, torch.float16):
        return 8 if x.dtype == torch.bfloat16 else 11
    below = int(np.bitwise_or.reduce(np.ascontiguousarray(x.float().numpy()).view(np.int32), axis=None))
    return 8 if below & 0xFFFF == 0 else 11 if below & 0x1FFF == 0 else 24


def _range(x: np.ndarray, axis: int) -> np.ndarray:
    """Returns the largest number of each row or column over its smallest but zeros."""
    size = np.abs(x)
    return size.max(axis) / np.where(size == 0, np.inf, size).min(axis)
