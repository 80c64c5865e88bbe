"""Weights of tiles from their logits and the lse of their rows, as the backward needs them."""

from __future__ import annotations

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from warploom.device.hopper.pipeline import power_of_two
from warploom.ops.flash_attention.hopper.masks import visible, visible_weights
from warploom.ops.flash_attention.hopper.softcap import HIDDEN, capped, capped_weights
from warploom.ops.flash_attention.hopper.tiles import ROWS


@gluon.jit
def load_row_values(values, row, m, tokens, other, LAYOUT: gl.constexpr):
    """One value for each of 64 queries of a head, from query ``m`` on; ``other`` behind the last query."""
    local = m + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    return gl.load(values + row.to(gl.int64) * tokens + local, mask=local < tokens, other=other)


@gluon.jit
def weights_of(
    logits, lse, n, first, work, options, scale, dtype: gl.constexpr,
    MASKED: gl.constexpr, CAUSAL: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Weights of the keys ``n …`` for 64 queries, of which the first stands at the key ``first``.

    With a cap, times its derivative: these weights are only for gradients of logits.
    """
    if options.softcap is not None:
        logits = capped(logits, scale, 1.0, 0.0, False)
        if MASKED:
            mask = visible(n, first, work, options, logits.shape[1], CAUSAL, LAYOUT)
            logits = gl.where(mask, logits, HIDDEN)
        _, weights = capped_weights(logits, lse[:, None], options.softcap, dtype)
    else:
        weights = power_of_two(logits * scale - lse[:, None])
        if MASKED:
            mask = visible(n, first, work, options, logits.shape[1], CAUSAL, LAYOUT)
            weights = gl.where(mask, weights, 0.0)
    return weights


@gluon.jit
def transposed_weights_of(
    logits, lse, m, first, scale, dtype: gl.constexpr, MASKED: gl.constexpr, LAYOUT: gl.constexpr,
    inverse=None, reach=None, softcap=None, CAUSAL: gl.constexpr = True,
):  # fmt: skip
    """Weights of 64 keys for the queries ``m …``, and these times the cap's derivative; see `visible_weights`.

    If there is a cap, the first are rounded.
    """
    if softcap is not None:
        logits = capped(logits, scale, 1.0, 0.0, False)
        if MASKED:
            logits = visible_weights(logits, m, first, reach, None, CAUSAL, LAYOUT, HIDDEN)
        weights, slopes = capped_weights(logits, lse[None, :], softcap, dtype)
    else:
        weights = power_of_two(logits * scale - lse[None, :])
        if inverse is not None:
            weights = weights * inverse[None, :]
        if MASKED:
            weights = visible_weights(weights, m, first, reach, None, CAUSAL, LAYOUT)
        slopes = weights
    return weights, slopes


class KeyMask(NamedTuple):
    """Which of 64 keys queries see."""

    full: gl.int32  # the first tile of queries without a mask
    high: gl.int32  # the first tile behind those, with a mask again
    first: gl.int32  # as in `masks.visible_weights`
    used: gl.int32 | None  # as in `masks.visible_weights`
    reach: gl.int32 | None  # as in `masks.visible_weights`


@gluon.jit
def weights_and_slopes(
    logits, lses, m, mask, scale, softcap, dtype: gl.constexpr, CAUSAL: gl.constexpr, LAYOUT: gl.constexpr
):  # fmt: skip
    """Weights of 64 keys for tile number ``m`` of queries, rounded if there is a cap, and these times the cap's derivative.

    ``lses`` are in shared memory: with a cap they come into registers behind its branches.
    """
    full, high, first, used, reach = mask.full, mask.high, mask.first, mask.used, mask.reach
    BLOCK_M: gl.constexpr = logits.shape[1]
    MASKS: gl.constexpr = CAUSAL or reach is not None or used is not None
    if softcap is not None:
        logits = capped(logits, scale, 1.0, 0.0, False)
        if MASKS:
            if (m < full) | (m >= high):
                logits = visible_weights(logits, m * BLOCK_M, first, reach, used, CAUSAL, LAYOUT, HIDDEN)
        row_lse = lses.load(gl.SliceLayout(0, LAYOUT))
        weights, slopes = capped_weights(logits, row_lse[None, :], softcap, dtype)
    else:
        row_lse = lses.load(gl.SliceLayout(0, LAYOUT))
        weights = power_of_two(logits * scale - row_lse[None, :])
        if MASKS:
            if (m < full) | (m >= high):
                weights = visible_weights(weights, m * BLOCK_M, first, reach, used, CAUSAL, LAYOUT)
        slopes = weights
    return weights, slopes
