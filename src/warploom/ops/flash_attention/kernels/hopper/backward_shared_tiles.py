"""Backward of flash attention for Hopper where two groups of warps share a tile of 64 rows.

What it computes is in `kernels.backward`. It is for two kinds of call:

- More than 128 features: a group's registers do not hold the gradients of keys and of values.
- Float32: a factor is the sum of ``TERMS`` bfloat16 tensors, which `kernels.forward.terms_kernel` makes before. Shared
  memory has no room for the rows of two groups.

One group computes weights, and the other takes them from shared memory. Each adds up one gradient, of keys or of values.
All products of terms of a tile are in flight together.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from warploom.device.hopper.attention import Options, Window, Work
from warploom.device.hopper.attention_backward.keys import KeyCopies, copy_for_keys
from warploom.device.hopper.attention_backward.shared_keys import SharedKeyGradients, compute_for_one
from warploom.device.hopper.attention_backward.shared_keys_in_pieces import compute_in_pieces
from warploom.device.hopper.attention_backward.shared_queries import (
    SharedQueryGradients,
    compute_gradient,
    compute_weights,
)
from warploom.device.hopper.attention_backward.shared_weights import new_weights, weight_buffers
from warploom.device.hopper.pipeline import (
    ROWS,
    Result,
    SplitStrides,
    barriers,
    new_ring,
    new_row_ring,
    new_scheduler,
)
from warploom.ops.flash_attention.kernels.hopper.forward import QueryCopies, copy_for_queries


@gluon.jit
def hopper_shared_key_kernel(
    q_desc, k_desc, v_desc, do_desc, dk, dv, lse, delta, inverse, counters, seqused_k, units,
    work: Work, window: Window, scale: gl.float32, grad_scale: gl.float32,
    dk_strides: SplitStrides, dv_strides: SplitStrides,
    CAUSAL: gl.constexpr, SPLIT: gl.constexpr, SOFTCAP: gl.constexpr, TERMS: gl.constexpr, STAGES: gl.constexpr,
    PIECES: gl.constexpr,
):  # fmt: skip
    """`kernels.hopper.backward.hopper_key_kernel` for tiles of 64 keys; there is no room for the next tile of them.

    TmaTile of queries and keys may be as wide as one of ``PIECES`` of a row. Then ``dk`` and ``dv`` are addresses, also of
    whole results, and ``SPLIT`` is set.

    With several ``TERMS``, there are no options, descriptors are of (TERMS · B, H, N, D), and ``dk`` and ``dv`` are parts, one or several.
    """
    gdc_wait()
    gdc_launch_dependents()
    D: gl.constexpr = q_desc.block_type.shape[3]
    E: gl.constexpr = v_desc.block_type.shape[3]
    BLOCK_M: gl.constexpr = q_desc.block_type.shape[2]
    dtype: gl.constexpr = q_desc.dtype
    k_tiles = gl.allocate_shared_memory(dtype, [TERMS * PIECES, 1, 1, ROWS, D], k_desc.layout)
    v_tiles = gl.allocate_shared_memory(dtype, [TERMS, 1, 1, ROWS, E], v_desc.layout)
    q_tiles = gl.allocate_shared_memory(dtype, [STAGES * TERMS * PIECES, 1, 1, BLOCK_M, D], q_desc.layout)
    do_tiles = gl.allocate_shared_memory(dtype, [STAGES * TERMS, 1, 1, BLOCK_M, E], do_desc.layout)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    lses = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_M], plain)
    deltas = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_M], plain)
    inverses = None
    if TERMS > 1:
        inverses = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_M], plain)
    weight_tiles = weight_buffers(STAGES, BLOCK_M)
    weights_full = barriers(STAGES) if TERMS == 1 else None
    scheduler = new_scheduler(counters, 1, 2)
    q, do = new_row_ring(q_tiles, STAGES, 2, lses), new_row_ring(do_tiles, STAGES, 2, deltas)
    weights = new_weights(weight_tiles, weights_full if TERMS == 1 else barriers(STAGES))
    fence_async_shared()
    options = Options(window, seqused_k, None, SOFTCAP, None, units)
    copies = KeyCopies(
        scheduler, (k_desc, v_desc), (k_tiles, v_tiles), q_desc, do_desc, q, do, lse, delta, inverse, inverses, work,
        options,
    )  # fmt: skip
    call = SharedKeyGradients(
        scheduler, k_tiles, v_tiles, q, do, inverses, weights,
        Result(dk, v_tiles, dk_strides), Result(dv, k_tiles, dv_strides), work, scale, grad_scale, options,
    )  # fmt: skip
    if PIECES == 1:
        gl.warp_specialize(
            [(compute_for_one, (True, CAUSAL, SPLIT, TERMS, call)),
             (compute_for_one, (False, CAUSAL, SPLIT, TERMS, call)),
             (copy_for_keys, (1, CAUSAL, TERMS, copies))],
            [4, 1], [240, 24] if TERMS == 1 else [232, 40],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [(compute_in_pieces, (True, CAUSAL, call)),
             (compute_in_pieces, (False, CAUSAL, call)),
             (copy_for_keys, (1, CAUSAL, 1, copies))],
            [4, 1], [240, 24],
        )  # fmt: skip


@gluon.jit
def hopper_shared_query_kernel(
    q_desc, k_desc, v_desc, do_desc, dq, lse, delta, inverse, counters,
    work: Work, scale: gl.float32, grad_scale: gl.float32, dq_strides: SplitStrides,
    CAUSAL: gl.constexpr, TERMS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Gradients of queries, for tiles of 64. Descriptors, boxes and parts are as in `hopper_shared_key_kernel`.

    ``counters[1]`` is zero. It runs beside `hopper_shared_key_kernel`, of which it reads nothing, and does not end before
    that has ended.
    """
    gdc_launch_dependents()
    D: gl.constexpr = q_desc.block_type.shape[3]
    BLOCK_N: gl.constexpr = k_desc.block_type.shape[2]
    dtype: gl.constexpr = q_desc.dtype
    q_tiles = gl.allocate_shared_memory(dtype, [TERMS, 1, 1, ROWS, D], q_desc.layout)
    do_tiles = gl.allocate_shared_memory(dtype, [TERMS, 1, 1, ROWS, D], do_desc.layout)
    k_tiles = gl.allocate_shared_memory(dtype, [STAGES * TERMS, 1, 1, BLOCK_N, D], k_desc.layout)
    v_tiles = gl.allocate_shared_memory(dtype, [STAGES * TERMS, 1, 1, BLOCK_N, D], v_desc.layout)
    weight_tiles = weight_buffers(STAGES, BLOCK_N)
    scheduler = new_scheduler(counters + 1, 1, 2)
    k, v = new_ring(k_tiles, STAGES, 2), new_ring(v_tiles, STAGES, 1)
    weights = new_weights(weight_tiles, barriers(STAGES))
    fence_async_shared()
    copies = QueryCopies(scheduler, (q_desc, do_desc), (q_tiles, do_tiles), k_desc, v_desc, k, v, work, Options())
    result = Result(dq, q_tiles, dq_strides)
    call = SharedQueryGradients(
        scheduler, q_tiles, do_tiles, k, v, weights, lse, delta, inverse, result, work, scale, grad_scale
    )
    gl.warp_specialize(
        [(compute_weights, (CAUSAL, TERMS, call)), (compute_gradient, (CAUSAL, TERMS, call)),
         (copy_for_queries, (1, CAUSAL, True, TERMS, copies))],
        [4, 1], [232, 40],
    )  # fmt: skip
    if gl.program_id(0) == 0:
        gdc_wait()
