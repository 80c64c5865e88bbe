"""Weights of tiles from their logits and the lse of their rows, as the backward needs them."""

from __future__ import annotations

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
    logits, lse, n, queries, call, dtype: gl.constexpr, MASKED: gl.constexpr, LAYOUT: gl.constexpr,
    config: gl.constexpr,
):  # fmt: skip
    """Weights of the keys ``n …`` for 64 queries.

    With a cap, times its derivative: these weights are only for gradients of logits.
    """
    if call.softcap is not None:
        logits = capped(logits, call.scale, 1.0, 0.0, False)
        if MASKED:
            logits = gl.where(visible(n, queries, call, logits.shape[1], LAYOUT, config), logits, HIDDEN)
        _, weights = capped_weights(logits, lse[:, None], call.softcap, dtype)
    else:
        weights = power_of_two(logits * call.scale - lse[:, None])
        if MASKED:
            weights = gl.where(visible(n, queries, call, logits.shape[1], LAYOUT, config), weights, 0.0)
    return weights


@gluon.jit
def transposed_weights_of(
    logits, lse, m, keys, call, dtype: gl.constexpr, MASKED: gl.constexpr, LAYOUT: gl.constexpr,
    config: gl.constexpr, inverse=None,
):  # fmt: skip
    """Weights of 64 keys for the queries ``m …``, and these times the cap's derivative.

    If there is a cap, the first are rounded.
    """
    if call.softcap is not None:
        logits = capped(logits, call.scale, 1.0, 0.0, False)
        if MASKED:
            logits = visible_weights(logits, m, keys, LAYOUT, config, HIDDEN)
        weights, slopes = capped_weights(logits, lse[None, :], call.softcap, dtype)
    else:
        weights = power_of_two(logits * call.scale - lse[None, :])
        if inverse is not None:
            weights = weights * inverse[None, :]
        if MASKED:
            weights = visible_weights(weights, m, keys, LAYOUT, config)
        slopes = weights
    return weights, slopes


@gluon.jit
def weights_and_slopes(
    logits, lses, m, keys, call, dtype: gl.constexpr, LAYOUT: gl.constexpr, config: gl.constexpr
):
    """`transposed_weights_of` for tile number ``m`` of queries, which may have a mask.

    ``lses`` are in shared memory: with a cap they come into registers behind its branches.
    """
    BLOCK_M: gl.constexpr = logits.shape[1]
    MASKS: gl.constexpr = config.CAUSAL or keys.reach is not None or keys.used is not None
    if call.softcap is not None:
        logits = capped(logits, call.scale, 1.0, 0.0, False)
        if MASKS:
            if (m < keys.full) | (m >= keys.high):
                logits = visible_weights(logits, m * BLOCK_M, keys, LAYOUT, config, HIDDEN)
        row_lse = lses.load(gl.SliceLayout(0, LAYOUT))
        weights, slopes = capped_weights(logits, row_lse[None, :], call.softcap, dtype)
    else:
        row_lse = lses.load(gl.SliceLayout(0, LAYOUT))
        weights = power_of_two(logits * call.scale - row_lse[None, :])
        if MASKS:
            if (m < keys.full) | (m >= keys.high):
                weights = visible_weights(weights, m * BLOCK_M, keys, LAYOUT, config)
        slopes = weights
    return weights, slopes
