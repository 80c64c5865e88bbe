"""Products of float32 tiles, each of which is the sum of ``TERMS`` bfloat16 tiles."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from warploom.device.hopper.pipeline import as_factor, matrix, wait_full
from warploom.ops.flash_attention.hopper.tiles import ROWS


@gluon.jit
def own_terms_in_registers(tiles, TERMS: gl.constexpr, LAYOUT: gl.constexpr):
    """The terms of own rows, in registers."""
    terms = ()
    for i in gl.static_range(TERMS):
        terms += (matrix(tiles, i).load(gl.DotOperandLayout(0, LAYOUT, 2)),)
    return terms


@gluon.jit
def product_of_terms(
    a_terms, b_tiles, slot, TERMS: gl.constexpr, LAYOUT: gl.constexpr, SWAPPED: gl.constexpr = False
):
    """Start ``a · bᵀ`` of own rows and of a tile of a ring, the smallest products first.

    ``SWAPPED``: in the order that the same products have in ``b · aᵀ``, so that the bits are the same.
    """
    N: gl.constexpr = b_tiles.shape[3]
    acc = gl.zeros([ROWS, N], gl.float32, LAYOUT)
    for left_out in gl.static_range(TERMS):
        for i in gl.static_range(TERMS - left_out):
            if SWAPPED:
                a, of_b = a_terms[i], TERMS - 1 - left_out - i
            else:
                a, of_b = a_terms[TERMS - 1 - left_out - i], i
            b = matrix(b_tiles, slot * TERMS + of_b).permute([1, 0])
            acc = warpgroup_mma(a, b, acc, use_acc=left_out + i > 0, is_async=True)
    return acc


@gluon.jit
def add_product(acc, tile, ring, count, TERMS: gl.constexpr, LAYOUT: gl.constexpr):
    """``acc + tile · b`` with the tile number ``count`` of a ring, which is empty then.

    Of several terms, the sum is formed outside of matrix units, which drop bits where they add.
    """
    if TERMS == 1:
        factor = as_factor(tile, ring.tiles.dtype, LAYOUT)
        slot = wait_full(ring.full, count)
        acc = warpgroup_mma(factor, matrix(ring.tiles, slot), acc, is_async=True)
        acc, factor = warpgroup_mma_wait(0, deps=[acc, factor])
    else:
        slot = wait_full(ring.full, count)
        factors = ()
        for _ in gl.static_range(TERMS):
            term = tile.to(ring.tiles.dtype)
            factors += (gl.convert_layout(term, gl.DotOperandLayout(0, LAYOUT, 2)),)
            tile = tile - term.to(gl.float32)
        D: gl.constexpr = ring.tiles.shape[4]
        whole = gl.zeros([ROWS, D], gl.float32, LAYOUT)
        for left_out in gl.static_range(TERMS):
            for i in gl.static_range(TERMS - left_out):
                b = matrix(ring.tiles, slot * TERMS + i)
                whole = warpgroup_mma(
                    factors[TERMS - 1 - left_out - i], b, whole, use_acc=left_out + i > 0, is_async=True
                )
        if TERMS == 3:
            whole, _, _, _ = warpgroup_mma_wait(0, deps=[whole, factors[0], factors[1], factors[2]])
        else:
            whole, _, _ = warpgroup_mma_wait(0, deps=[whole, factors[0], factors[1]])
        acc = acc + whole
    mbarrier.arrive(ring.empty.index(slot))
    return acc
