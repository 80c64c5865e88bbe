"""Kernels that encode queries and keys for the backward, and make of gradients of encoded rows those of the rows."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from warploom.device.chunks import locate
from warploom.device.phase import wrapping_add
from warploom.device.rows import Strides
from warploom.ops.delta_attention.triton import tiles


class EncodingStrides(NamedTuple):
    """Strides of the kernels' rows."""

    x: Strides
    encoded: Strides
    grads: Strides


@triton.jit
def encode_kernel(
    x, encoded, theta, offsets, cu_seqlens, offset: tl.int32, sizes: tiles.DeltaSizes, strides: EncodingStrides,
    config: tl.constexpr,
):  # fmt: skip
    """Writes encoded rows (B, N, Hk, D) of one chunk of one head; zeros behind the last sequence."""
    place = locate(offsets, cu_seqlens, offset, sizes)
    n = place.first + tl.arange(0, config.BLOCK_T)
    rows = tiles.head_rows(x, n, place, place.h, strides.x, config.VEC)
    position = wrapping_add(n, place.position)
    f = tl.arange(0, config.BLOCK_D)
    mask = n < place.last
    inverse = tiles.inverse_lengths(rows, mask, strides.x.f, config)
    found = tiles.load_encoded(rows, f, inverse, mask, position, theta, place.h, strides.x.f, sizes, config)
    to = tiles.head_rows(encoded, n, place, place.h, strides.encoded, config.VEC)
    owned = tiles.owned_rows(n, place, sizes)
    tiles.store_features(to, found, f, owned, strides.encoded.f, config.D, config.UNIT)


@triton.jit
def decode_kernel(
    x, encoded, grads, dx, cu_seqlens, sizes: tiles.DeltaSizes, strides: EncodingStrides, dx_strides: Strides,
    config: tl.constexpr,
):  # fmt: skip
    """Writes gradients of rows, rotated as they are: sums over the heads of values that share one of keys.

    ``grads`` (B, N, H, D) are those of encoded rows. Of a row that was divided by its length, what is along the row is
    taken out. The length is that of ``x`` before it was rotated.
    """
    place = locate(None, cu_seqlens, 0, sizes)
    n = place.first + tl.arange(0, config.BLOCK_T)
    f = tl.arange(0, config.BLOCK_D)
    mask = n < place.last
    total = tl.zeros((config.BLOCK_T, config.BLOCK_D), tl.float32)
    for i in range(sizes.group):
        rows = tiles.head_rows(grads, n, place, place.h * sizes.group + i, strides.grads, config.VEC)
        total += tiles.load_features(rows, f, mask, strides.grads.f, config.D, config.UNIT).to(tl.float32)
    if config.NORMALIZE:
        rows = tiles.head_rows(x, n, place, place.h, strides.x, config.VEC)
        inverse = tiles.inverse_lengths(rows, mask, strides.x.f, config)
        rows = tiles.head_rows(encoded, n, place, place.h, strides.encoded, config.VEC)
        unit = tiles.load_features(rows, f, mask, strides.encoded.f, config.D, config.UNIT).to(tl.float32)
        total -= unit * tl.sum(unit * total, axis=1)[:, None]
        total *= inverse[:, None]
    to = tiles.head_rows(dx, n, place, place.h, dx_strides, config.VEC)
    owned = tiles.owned_rows(n, place, sizes)
    tiles.store_features(to, total, f, owned, dx_strides.f, config.D, config.UNIT)
