"""Sums along an axis of a tile with the same bits in every layout.

``tl.sum`` adds up in an order that follows from the layout: first what a thread holds, then across threads. The compiler
picks layouts by what it knows of addresses, and knows other things of a batch than of one entry of it.
"""

import triton
import triton.language as tl


@triton.jit
def product_by_itself(x, y):
    """Returns ``x · y`` in float32, rounded before anything is added to it; ``y`` is broadcast."""
    return tl.fma(x, tl.broadcast_to(y, x.shape), 0.0)


@triton.constexpr_function
def with_axis(shape, axis, *sizes):
    """Returns a shape with other axes in the place of one."""
    return (*shape[:axis], *sizes, *shape[axis + 1 :])


@triton.jit
def sum_of_pairs(x, axis: tl.constexpr):
    """Returns ``tl.sum(x, axis)`` of 2ᵏ terms: neighbours are added up, then neighbouring sums, and so on.

    A sum of two has the same bits either way round. Terms that are products come from `product_by_itself`: the first
    sum would be fused with one of two, or with none.
    """
    if x.shape[axis] == 1:
        y = x.reshape(with_axis(x.shape, axis))
    else:
        pairs = x.reshape(with_axis(x.shape, axis, x.shape[axis] // 2, 2))
        y = sum_of_pairs(tl.sum(pairs, axis=axis + 1), axis)
    return y
