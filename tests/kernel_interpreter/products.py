"""Products of matrices with bits that do not depend on a BLAS."""

from __future__ import annotations

import math

import numpy as np
import torch

OFF_TIES = 1 + 2.0**-24 / 10
"""A tenth of the last bit of float32: sums of a few bits, as of bfloat16, are not halfway between two float32."""


def in_float32(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Returns ``a · b`` (…, M, N) of factors (…, M, K) and (…, K, N) that float32 holds.

    float64 holds the products of two such numbers. In whatever order a BLAS adds them, a sum is off by less than
    ``error``. Where that leaves two float32 to round to, in about one of a million, it is formed exactly.
    """
    x, y = a.double().numpy(), b.double().numpy()
    with np.errstate(invalid="ignore", over="ignore"):
        sums = x @ y * OFF_TIES
        rows, columns = np.sqrt(np.einsum("...mk,...mk->...m", x, x)), np.sqrt(np.einsum("...kn,...kn->...n", y, y))
        error = rows[..., :, None] * (columns * ((x.shape[-1] + 2) * 2.0**-52))[..., None, :]
        result = (sums - error).astype(np.float32)
        unsure = result != (sums + error).astype(np.float32)
        if unsure.any():
            finite = np.isfinite(error)
            result = np.where(finite, result, sums.astype(np.float32))
            *batch, m, n = np.nonzero(unsure & finite)
            products = x[(*batch, m)] * y.swapaxes(-1, -2)[(*batch, n)]
            result[(*batch, m, n)] = [math.fsum(each) * OFF_TIES for each in products.tolist()]
        return torch.from_numpy(result + np.float32(0))  # no zero has a sign
