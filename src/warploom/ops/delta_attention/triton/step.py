"""The kernel of a step of decoding: few tokens, and a state that is read and written once."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from warploom.device.chunks import locate
from warploom.device.decays import exp
from warploom.device.phase import wrapping_add
from warploom.device.rows import StateStrides, Strides
from warploom.ops.delta_attention.triton import tiles


class DeltaStepStrides(NamedTuple):
    """Strides of the kernel's tensors."""

    q: Strides
    k: Strides
    v: Strides
    out: Strides
    initial: StateStrides
    final: StateStrides


@triton.jit
def state_pointers(ptr, place, strides, config: tl.constexpr):
    """Returns pointers (D, E) to the program's columns of a state (S, H, D, E), and which of them there are."""
    e = place.column * config.BLOCK_E + tl.arange(0, config.BLOCK_E)
    f = tl.arange(0, config.BLOCK_D)
    head = ptr + place.sequence * strides.s + place.h * strides.h
    ptrs = head + (f.to(tl.int64) * strides.f)[:, None] + (e.to(tl.int64) * strides.e)[None, :]
    return ptrs, (f < config.D)[:, None] & (e < config.E)[None, :]


@triton.jit
def step_kernel(
    q, k, v, out, initial, final, beta, decay, theta, offsets, offset: tl.int32, sizes: tiles.DeltaSizes,
    strides: DeltaStepStrides, config: tl.constexpr,
):  # fmt: skip
    """Computes a block of columns of outputs and state of a head, token by token.

    ``initial`` and ``final`` (S, H, D, E) are the states before the first token and behind the last.
    """
    place = locate(offsets, None, offset, sizes)
    h = place.h
    of_keys = h // sizes.group
    e = place.column * config.BLOCK_E + tl.arange(0, config.BLOCK_E)
    f = tl.arange(0, config.BLOCK_D)
    if initial is None:
        state = tl.zeros((config.BLOCK_D, config.BLOCK_E), tl.float32)
    else:
        ptrs, there = state_pointers(initial, place, strides.initial, config)
        state = tl.load(ptrs, mask=there, other=0.0).to(tl.float32)
    for t in range(place.first, place.last):
        n = t + tl.arange(0, 1)
        mask = n < place.last
        position = wrapping_add(n, place.position)
        k_rows = tiles.head_rows(k, n, place, of_keys, strides.k, config.VEC)
        q_rows = tiles.head_rows(q, n, place, of_keys, strides.q, config.VEC)
        v_rows = tiles.head_rows(v, n, place, h, strides.v, config.VEC)
        inverse = tiles.inverse_lengths(k_rows, mask, strides.k.f, config)
        key = tl.trans(
            tiles.load_encoded(k_rows, f, inverse, mask, position, theta, of_keys, strides.k.f, sizes, config)
        )
        inverse = tiles.inverse_lengths(q_rows, mask, strides.q.f, config)
        query = tl.trans(
            tiles.load_encoded(q_rows, f, inverse, mask, position, theta, of_keys, strides.q.f, sizes, config)
        )
        value = tiles.load_features(v_rows, e, mask, strides.v.f, config.E, config.UNIT).to(tl.float32)
        b = tiles.load_beta(beta, n, mask, place, sizes)
        if config.DECAY == "head":
            state *= exp(tiles.load_decays(decay, n, f, mask, place, sizes, config), False)[:, None]
        elif config.DECAY == "feature":
            state *= tl.trans(exp(tiles.load_decays(decay, n, f, mask, place, sizes, config), False))
        wanted = value - tl.sum(key * state, axis=0)[None, :]
        state += key * (wanted * b[:, None])
        result = tl.sum(query * state, axis=0)[None, :] * sizes.scale
        rows = tiles.head_rows(out, n, place, h, strides.out, config.VEC)
        tiles.store_features(rows, result, e, mask, strides.out.f, config.E, config.UNIT)
    if final is not None:
        ptrs, there = state_pointers(final, place, strides.final, config)
        tl.store(ptrs, state, mask=there)
