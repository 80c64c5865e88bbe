"""Triton kernels of LRPE.

Shapes. A tile is (R, F): R rows of F angles each. A program computes the angles of its rows once, for the S
vectors of ``x`` that share each row's. Which axis of ``x`` is shared depends on theta. With one frequency
row per head the batch is shared: S runs over the batch and a row is a (token, head), heads fastest. With one row
for all heads the heads are: S runs over the heads and a row is a (batch entry, token), tokens fastest. Either way
neighbouring rows are neighbours in memory. The kernels only see strides; ``u`` stands for the head or the batch
entry of a row, ``s`` for the other of the two.

An angle turns a pair of numbers. For ``rotate`` the pair is two features of ``x``, (f, f + F) or (2f, 2f + 1),
going in and coming out. For ``cosine`` one feature goes in and the pair (f, f + F) comes out.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from warploom.device.activations import activate, activate_backward, softmax_pair_parts, softmax_parts, widen
from warploom.device.packed import sequence_of
from warploom.device.phase import cos_sin, phase_step, wrapping_add, wrapping_mul

# ----------------------------------------------------------------------------------------------------------
# Device functions
# ----------------------------------------------------------------------------------------------------------


@triton.jit
def divide(n, inverse):
    """``n // d`` for 0 ≤ n < 2³¹, by the number that `warploom.ops.lrpe.launches.inverse_of` makes of d.

    The processor has no instruction for it: what the compiler makes of ``//`` is a chain of thirty or so, through the
    slowest of its units, which everything that a program reads would wait for.
    """
    twice = wrapping_mul(n, 2).to(tl.uint32)  # which holds it
    return (tl.umulhi(twice, (inverse >> 5).to(tl.uint32)) >> (inverse & 31).to(tl.int32)).to(tl.int32)


@triton.jit
def divide_with_rest(n, by, inverse):
    """``n // by`` and ``n % by``, for n ≥ 0; by `divide` if there is an ``inverse``."""
    quotient = n // by if inverse is None else divide(n, inverse)
    return quotient, n - quotient * by


@triton.jit
def token_positions(
    n, mask, s, u, axis, ids, offsets, cu_seqlens,
    ids_s, ids_n, ids_u, ids_k, offsets_s, offsets_u,
    offset, prefix, size1, size2, size3, sequences, cu_stride,
    AXES: tl.constexpr, inverse1=None, inverse2=None, inverse3=None,
):  # fmt: skip
    """Coordinates of tokens ``n`` (R,): int32 (R, 1), or (R, F) in several dimensions, where ``axis`` is (F,).

    ``inverse1`` and so on are what `divide` takes for the sizes of a grid's axes, if it shall.
    """
    if ids is not None:
        rows = ids + s * ids_s + u * ids_u + n.to(tl.int64) * ids_n
        if AXES == 1:
            position = tl.load(rows, mask=mask, other=0).to(tl.int32)[:, None]
        else:
            pointers = rows[:, None] + (axis * ids_k)[None, :]
            position = tl.load(pointers, mask=mask[:, None] & (axis < AXES)[None, :], other=0).to(tl.int32)
    else:
        i = n - prefix
        if cu_seqlens is not None:
            sequence = sequence_of(n, cu_seqlens, cu_stride, sequences)
            start = tl.load(cu_seqlens + sequence * cu_stride, mask=mask, other=0)
            i -= start.to(tl.int32)
        if AXES == 1:
            if offsets is not None:
                offset = tl.load(offsets + s * offsets_s + u * offsets_u, mask=mask, other=0).to(tl.int32)
            # Tokens of the prefix, and those behind the last, may have no position of 32 bits: these are not used.
            position = tl.where(i >= 0, wrapping_add(i, offset), 0)[:, None]
        else:  # row-major coordinates in the grid; the prefix sits at the origin
            i = tl.maximum(i, 0)
            if AXES == 4:
                i, c3 = divide_with_rest(i, size3, inverse3)
            if AXES >= 3:
                i, c2 = divide_with_rest(i, size2, inverse2)
            c0, c1 = divide_with_rest(i, size1, inverse1)
            a = axis[None, :]
            position = tl.where(a == 0, c0[:, None], c1[:, None])
            if AXES >= 3:
                position = tl.where(a == 2, c2[:, None], position)
            if AXES == 4:
                position = tl.where(a == 3, c3[:, None], position)
    return position


@triton.jit
def load_angles(
    n, u, mask, s, theta, ids, offsets, cu_seqlens, table,
    theta_u, theta_f, ids_s, ids_n, ids_u, ids_k, offsets_s, offsets_u, table_n, table_u,
    offset, prefix, size1, size2, size3, sequences, cu_stride, inverse1, inverse2, inverse3,
    AXES: tl.constexpr, F: tl.constexpr, E: tl.constexpr, THETA_VEC: tl.constexpr, BLOCK_F: tl.constexpr,
):  # fmt: skip
    """What the angles of the rows (``n``, ``u``) for entry ``s`` are made of.

    Positions (R, 1 or F), and frequencies (R, F) twice, or the stored cosines and sines.
    """
    f = tl.arange(0, BLOCK_F)
    axis = f // E
    turned = (axis < AXES) & (f < F)
    if table is not None:
        cells = table + (n.to(tl.int64) * table_n + u * table_u)[:, None] + f[None, :]
        first = tl.load(cells, mask=mask[:, None] & (f < F)[None, :], other=1.0)
        second = tl.load(cells + F, mask=mask[:, None] & (f < F)[None, :], other=0.0)
    else:
        e = f if E >= F else f % E
        if THETA_VEC == 1:
            # Not so where E is odd. It makes neighbouring threads read neighbouring frequencies, in the layout of x;
            # each is read by itself all the same, since nothing is known of the alignment.
            e = tl.max_contiguous(e * theta_f, 2)
        cells = theta + (u * (theta_u * THETA_VEC))[:, None] + e[None, :]
        first = tl.load(cells, mask=mask[:, None] & turned[None, :], other=0.0)
        second = first
    position = token_positions(
        n, mask, s, u, axis, ids, offsets, cu_seqlens, ids_s, ids_n, ids_u, ids_k, offsets_s, offsets_u,
        offset, prefix, size1, size2, size3, sequences, cu_stride, AXES, inverse1, inverse2, inverse3,
    )  # fmt: skip
    return position, first, second


@triton.jit
def angles(position, first, second, table, HALF: tl.constexpr):
    """Cosine and sine (R, F) from what `load_angles` fetched."""
    if table is not None:
        cosine, sine = first, second
    else:
        whole, rest, unit = phase_step(first)
        cosine, sine = cos_sin(position, whole, rest, unit, HALF)
    return cosine, sine


@triton.jit
def angles_behind_loads(
    n, u, mask, s, theta, ids, offsets, cu_seqlens, table,
    theta_u, theta_f, ids_s, ids_n, ids_u, ids_k, offsets_s, offsets_u, table_n, table_u,
    offset, prefix, size1, size2, size3, sequences, cu_stride, inverse1, inverse2, inverse3,
    AXES: tl.constexpr, F: tl.constexpr, E: tl.constexpr, THETA_VEC: tl.constexpr, BLOCK_F: tl.constexpr,
    HALF: tl.constexpr,
):  # fmt: skip
    """Cosine and sine (R, F) of the rows (``n``, ``u``) for entry ``s``, read when the loads before are under way.

    Without the barrier the assembler moves those loads behind what is computed from the frequencies: they would wait
    for these to come from memory.
    """
    tl.debug_barrier()
    position, first, second = load_angles(
        n, u, mask, s, theta, ids, offsets, cu_seqlens, table,
        theta_u, theta_f, ids_s, ids_n, ids_u, ids_k, offsets_s, offsets_u, table_n, table_u,
        offset, prefix, size1, size2, size3, sequences, cu_stride,
        inverse1, inverse2, inverse3, AXES, F, E, THETA_VEC, BLOCK_F,
    )  # fmt: skip
    return angles(position, first, second, table, HALF)


@triton.jit
def load_frequencies(theta, h, first, theta_u, theta_f, AXES: tl.constexpr, F: tl.constexpr, E: tl.constexpr,
                     THETA_VEC: tl.constexpr, BLOCK_F: tl.constexpr):  # fmt: skip
    """Phase steps of a head (1, F): see `phase_step`."""
    f = first + tl.arange(0, BLOCK_F)
    turned = (f // E < AXES) & (f < F)
    e = f if E >= F else f % E
    cells = theta + h * (theta_u * THETA_VEC) + (e if THETA_VEC > 1 else e * theta_f)
    return phase_step(tl.load(cells, mask=turned, other=0.0)[None, :])


@triton.jit
def split_program(blocks, inverse, TOKENS_INNER: tl.constexpr):
    """Block of S and block of rows of this program. Whatever lies closer together in memory moves faster.

    That is S where it runs over the heads of a token, and the rows where S runs over the batch: a copy kernel
    that walks over the batch first takes 590 µs for what takes 578 µs this way and 570 µs without a batch axis.
    ``blocks`` is how many there are of the faster, and ``inverse`` what `divide` takes for it.
    """
    program = tl.program_id(0)
    slow = divide(program, inverse)
    fast = program - slow * blocks
    if TOKENS_INNER:
        s_block, row_block = fast, slow
    else:
        s_block, row_block = slow, fast
    return s_block, row_block


@triton.jit
def rows_of(first_row, tokens, unique, inverse, BLOCK_R: tl.constexpr, TOKENS_INNER: tl.constexpr):
    """Token (int32), ``u`` (int64) and validity of the rows of a tile, (R,) each.

    ``inverse``: that of the faster of ``tokens`` and ``unique``, for `divide`. The last tile may reach beyond 2³¹,
    and rows become negative there.
    """
    row = first_row + tl.arange(0, BLOCK_R)
    slow = divide(row, inverse)
    if TOKENS_INNER:
        n, u = row - slow * tokens, slow
        mask = (u < unique) & (row >= 0)
    else:
        n, u = slow, row - slow * unique
        mask = (n < tokens) & (row >= 0)
    return n, u.to(tl.int64), mask


@triton.jit
def row_pointers(base, n, u, stride_n, stride_u, VEC: tl.constexpr):
    """Pointers (R, 1) to feature 0 of every row of entry s = 0, in 64 bits. Strides come divided by ``VEC``."""
    return base + (n.to(tl.int64) * (stride_n * VEC) + u * (stride_u * VEC))[:, None]


@triton.jit
def load_pair(rows, mask, stride, first, UNIT: tl.constexpr, INTERLEAVED: tl.constexpr,
              F: tl.constexpr, BLOCK_F: tl.constexpr):  # fmt: skip
    """Both members of the pairs from angle ``first`` on, (R, F) each, in the dtype of memory.

    ``rows`` (R, 1) point at feature 0.
    """
    if INTERLEAVED:
        f = 2 * first + tl.arange(0, 2 * BLOCK_F)
        inside = mask[:, None] & (f < 2 * F)[None, :]
        both = tl.load(rows + (f if UNIT else f * stride)[None, :], mask=inside, other=0.0)
        one, two = tl.split(both.reshape(rows.shape[0], BLOCK_F, 2))
    else:
        f = first + tl.arange(0, BLOCK_F)
        inside = mask[:, None] & (f < F)[None, :]
        one = tl.load(rows + (f if UNIT else f * stride)[None, :], mask=inside, other=0.0)
        two = tl.load(rows + ((f + F) if UNIT else (f + F) * stride)[None, :], mask=inside, other=0.0)
    return one, two


@triton.jit
def store_pair(rows, one, two, mask, stride, first, UNIT: tl.constexpr, INTERLEAVED: tl.constexpr,
               F: tl.constexpr, BLOCK_F: tl.constexpr):  # fmt: skip
    """The inverse of `load_pair`; rounds to the dtype of memory."""
    dtype = rows.dtype.element_ty
    if INTERLEAVED:
        f = 2 * first + tl.arange(0, 2 * BLOCK_F)
        both = tl.join(one.to(dtype), two.to(dtype)).reshape(rows.shape[0], 2 * BLOCK_F)
        tl.store(rows + (f if UNIT else f * stride)[None, :], both, mask=mask[:, None] & (f < 2 * F)[None, :])
    else:
        f = first + tl.arange(0, BLOCK_F)
        inside = mask[:, None] & (f < F)[None, :]
        tl.store(rows + (f if UNIT else f * stride)[None, :], one.to(dtype), mask=inside)
        tl.store(rows + ((f + F) if UNIT else (f + F) * stride)[None, :], two.to(dtype), mask=inside)


@triton.jit
def load_input(rows, mask, stride, first, KIND: tl.constexpr, UNIT: tl.constexpr,
               F: tl.constexpr, BLOCK_F: tl.constexpr):  # fmt: skip
    """``x`` from angle ``first`` on as two tiles (R, F): its pairs, or for ``cosine`` its features twice."""
    if KIND == "cosine":
        f = first + tl.arange(0, BLOCK_F)
        inside = mask[:, None] & (f < F)[None, :]
        one = tl.load(rows + (f if UNIT else f * stride)[None, :], mask=inside, other=0.0)
        two = one
    else:
        one, two = load_pair(rows, mask, stride, first, UNIT, KIND == "interleaved", F, BLOCK_F)
    return one, two


@triton.jit
def store_input(rows, one, two, mask, stride, first, KIND: tl.constexpr, UNIT: tl.constexpr,
                F: tl.constexpr, BLOCK_F: tl.constexpr):  # fmt: skip
    """The inverse of `load_input`; rounds to the dtype of memory."""
    if KIND == "cosine":
        f = first + tl.arange(0, BLOCK_F)
        inside = mask[:, None] & (f < F)[None, :]
        tl.store(rows + (f if UNIT else f * stride)[None, :], one.to(rows.dtype.element_ty), mask=inside)
    else:
        store_pair(rows, one, two, mask, stride, first, UNIT, KIND == "interleaved", F, BLOCK_F)


@triton.jit
def activate_input(x1, x2, KIND: tl.constexpr, ACTIVATION: tl.constexpr, F: tl.constexpr, BLOCK_F: tl.constexpr):
    """x̄ of both tiles of `load_input`, in float32, over a factor of each row (R, 1) that is 1.0 but for softmax."""
    scale = 1.0
    if ACTIVATION == "softmax":
        inside = (tl.arange(0, BLOCK_F) < F)[None, :]
        x1 = tl.where(inside, x1, float("-inf"))
        if KIND == "cosine":
            x1, scale = softmax_parts(x1)
            x2 = x1
        else:
            x1, x2, scale = softmax_pair_parts(x1, tl.where(inside, x2, float("-inf")))
    else:
        x1 = activate(x1, ACTIVATION)
        x2 = activate(x2, ACTIVATION)
    return x1, x2, scale


@triton.jit
def turn(x1, x2, cosine, sine, KIND: tl.constexpr):
    """The pair that comes out, from x̄."""
    if KIND == "cosine":
        first = x1 * cosine
        second = x1 * sine
    else:
        # Fused by hand, so that every variant of the kernel gives the same bits.
        first = tl.fma(x1, cosine, -(x2 * sine))
        second = tl.fma(x2, cosine, x1 * sine)
    return first, second


@triton.jit
def store_turned(
    rows, tile, cosine, sine, mask, stride,
    KIND: tl.constexpr, ACTIVATION: tl.constexpr, UNIT: tl.constexpr, F: tl.constexpr, BLOCK_F: tl.constexpr,
):  # fmt: skip
    """Activate one of the forward's vectors, as `load_input` gave it, and store it turned."""
    x1, x2, scale = activate_input(widen(tile[0]), widen(tile[1]), KIND, ACTIVATION, F, BLOCK_F)
    o1, o2 = turn(x1 * scale, x2 * scale, cosine, sine, KIND)
    store_pair(rows, o1, o2, mask, stride, 0, UNIT, KIND == "interleaved", F, BLOCK_F)


@triton.jit
def pair_gradient(g1, g2, cosine, sine):
    """What reaches x̄ through `turn`; for ``cosine`` the first alone, and the second is that of the angle over x̄."""
    d1 = tl.fma(g1, cosine, g2 * sine)
    d2 = tl.fma(g2, cosine, -(g1 * sine))
    return d1, d2


@triton.jit
def turn_backward(
    x1, x2, g1, g2, cosine, sine,
    KIND: tl.constexpr, ACTIVATION: tl.constexpr, THETA: tl.constexpr, F: tl.constexpr, BLOCK_F: tl.constexpr,
):  # fmt: skip
    """Gradients of both tiles of `load_input` and, if ``THETA``, of the angles; (R, F) each, float32."""
    d1, d2 = pair_gradient(g1, g2, cosine, sine)
    dphi = d2
    if ACTIVATION != "none" or THETA:
        y1, y2, scale = activate_input(x1, x2, KIND, ACTIVATION, F, BLOCK_F)
        if ACTIVATION == "softmax":  # the sum of y · d is taken beside that of the powers, not after it
            if KIND == "cosine":
                mean = tl.sum(y1 * d1, axis=1)[:, None] * scale
            else:
                mean = tl.sum(tl.fma(y1, d1, y2 * d2), axis=1)[:, None] * scale
            y1 *= scale
            y2 *= scale
        dphi = y1 * d2 if KIND == "cosine" else tl.fma(y1, d2, -(y2 * d1))
        if ACTIVATION == "softmax":
            d1 = y1 * (d1 - mean)
            if KIND != "cosine":
                d2 = y2 * (d2 - mean)
        else:
            d1 = activate_backward(x1, d1, ACTIVATION)
            if KIND != "cosine":
                d2 = activate_backward(x2, d2, ACTIVATION)
    return d1, d2, dphi


@triton.jit
def store_gradient(
    rows, tile, grad, cosine, sine, mask, stride,
    KIND: tl.constexpr, ACTIVATION: tl.constexpr, UNIT: tl.constexpr, THETA: tl.constexpr, F: tl.constexpr,
    BLOCK_F: tl.constexpr,
):  # fmt: skip
    """Store the gradient of one of the backward's vectors; that of its angles (R, F), float32."""
    d1, d2, dphi = turn_backward(
        widen(tile[0]), widen(tile[1]), widen(grad[0]), widen(grad[1]), cosine, sine,
        KIND, ACTIVATION, THETA, F, BLOCK_F,
    )  # fmt: skip
    store_input(rows, d1, d2, mask, stride, 0, KIND, UNIT, F, BLOCK_F)
    return dphi


# ----------------------------------------------------------------------------------------------------------
# Kernels
# ----------------------------------------------------------------------------------------------------------

# Every integer is a run-time value of declared width: none of them ever causes a compilation. The offset, which
# changes from call to call, comes first.
_INTEGERS = (
    "offset tokens unique shared theta_u theta_f ids_s ids_n ids_u ids_k offsets_s offsets_u table_n table_u "
    "prefix size1 size2 size3 sequences cu_stride inverse1 inverse2 inverse3 blocks blocks_inverse rows_inverse"
).split()
_FORWARD_INTEGERS = [*_INTEGERS, *"x_s x_n x_u x_f out_s out_n out_u out_f".split()]
_BACKWARD_INTEGERS = [
    *_INTEGERS,
    *"chunks x_s x_n x_u x_f grad_s grad_n grad_u grad_f dx_s dx_n dx_u dx_f".split(),
]


@triton.jit(do_not_specialize=_FORWARD_INTEGERS)
def forward_kernel(
    x, out, theta, ids, offsets, cu_seqlens, table, tickets,
    offset: tl.int32, tokens: tl.int32, unique: tl.int32, shared: tl.int32, theta_u: tl.int64, theta_f: tl.int64,
    ids_s: tl.int64, ids_n: tl.int64, ids_u: tl.int64, ids_k: tl.int64,
    offsets_s: tl.int64, offsets_u: tl.int64, table_n: tl.int64, table_u: tl.int64,
    prefix: tl.int32, size1: tl.int32, size2: tl.int32, size3: tl.int32, sequences: tl.int32,
    cu_stride: tl.int64,
    inverse1: tl.int64, inverse2: tl.int64, inverse3: tl.int64,
    blocks: tl.int32, blocks_inverse: tl.int64, rows_inverse: tl.int64,
    x_s: tl.int64, x_n: tl.int64, x_u: tl.int64, x_f: tl.int64,
    out_s: tl.int64, out_n: tl.int64, out_u: tl.int64, out_f: tl.int64,
    KIND: tl.constexpr, ACTIVATION: tl.constexpr, AXES: tl.constexpr,
    VEC: tl.constexpr, THETA_VEC: tl.constexpr, UNIT: tl.constexpr, F: tl.constexpr, E: tl.constexpr,
    TOKENS_INNER: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_F: tl.constexpr,
):  # fmt: skip
    """``out = turn(activation(x), φ)``: one tile of rows a program, for ``BLOCK_S`` of the entries that share it.

    ``tickets`` (2,) are set to zero, if there are any, for a kernel that counts its tiles and is launched next.
    """
    if tickets is not None and tl.program_id(0) == 0:
        tl.store(tickets + tl.arange(0, 2), tl.zeros((2,), dtype=tl.int32))
    s_block, row_block = split_program(blocks, blocks_inverse, TOKENS_INNER)
    s_first = s_block * BLOCK_S
    n, u, mask = rows_of(row_block * BLOCK_R, tokens, unique, rows_inverse, BLOCK_R, TOKENS_INNER)
    x_rows = row_pointers(x, n, u, x_n, x_u, VEC) + s_first.to(tl.int64) * (x_s * VEC)
    out_rows = row_pointers(out, n, u, out_n, out_u, VEC) + s_first.to(tl.int64) * (out_s * VEC)

    tiles = ()
    for i in tl.static_range(BLOCK_S):
        ahead = mask & (s_first + i < shared)
        tiles = tiles + (load_input(x_rows + i * (x_s * VEC), ahead, x_f, 0, KIND, UNIT, F, BLOCK_F),)
    cosine, sine = angles_behind_loads(
        n, u, mask, s_first.to(tl.int64), theta, ids, offsets, cu_seqlens, table,
        theta_u, theta_f, ids_s, ids_n, ids_u, ids_k, offsets_s, offsets_u, table_n, table_u,
        offset, prefix, size1, size2, size3, sequences, cu_stride,
        inverse1, inverse2, inverse3, AXES, F, E, THETA_VEC, BLOCK_F, out.dtype.element_ty.primitive_bitwidth == 16,
    )  # fmt: skip
    # Without branches the sums of one vector's softmax across threads take place while those of another do.
    STRAIGHT: tl.constexpr = ACTIVATION == "softmax"
    GUARDED: tl.constexpr = BLOCK_S - 1 if STRAIGHT else BLOCK_S
    full = s_first + BLOCK_S <= shared if STRAIGHT else False
    if full:
        for i in tl.static_range(BLOCK_S):
            store_turned(
                out_rows + i * (out_s * VEC),
                tiles[i],
                cosine,
                sine,
                mask,
                out_f,
                KIND,
                ACTIVATION,
                UNIT,
                F,
                BLOCK_F,
            )
    else:
        for i in tl.static_range(GUARDED):
            if s_first + i < shared:
                store_turned(
                    out_rows + i * (out_s * VEC), tiles[i], cosine, sine, mask, out_f,
                    KIND, ACTIVATION, UNIT, F, BLOCK_F,
                )  # fmt: skip


@triton.jit(do_not_specialize=_BACKWARD_INTEGERS)
def backward_kernel(
    x, grad, dx, partial, theta, ids, offsets, cu_seqlens, table,
    offset: tl.int32, tokens: tl.int32, unique: tl.int32, shared: tl.int32, theta_u: tl.int64, theta_f: tl.int64,
    ids_s: tl.int64, ids_n: tl.int64, ids_u: tl.int64, ids_k: tl.int64,
    offsets_s: tl.int64, offsets_u: tl.int64, table_n: tl.int64, table_u: tl.int64,
    prefix: tl.int32, size1: tl.int32, size2: tl.int32, size3: tl.int32, sequences: tl.int32,
    cu_stride: tl.int64,
    inverse1: tl.int64, inverse2: tl.int64, inverse3: tl.int64,
    blocks: tl.int32, blocks_inverse: tl.int64, rows_inverse: tl.int64,
    chunks: tl.int32,
    x_s: tl.int64, x_n: tl.int64, x_u: tl.int64, x_f: tl.int64,
    grad_s: tl.int64, grad_n: tl.int64, grad_u: tl.int64, grad_f: tl.int64,
    dx_s: tl.int64, dx_n: tl.int64, dx_u: tl.int64, dx_f: tl.int64,
    KIND: tl.constexpr, ACTIVATION: tl.constexpr, AXES: tl.constexpr,
    VEC: tl.constexpr, THETA_VEC: tl.constexpr, UNIT: tl.constexpr, F: tl.constexpr, E: tl.constexpr,
    TOKENS_INNER: tl.constexpr, ONE_THETA: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_F: tl.constexpr,
):  # fmt: skip
    """Gradient of ``x``, and with ``partial`` sums for that of theta.

    Without ``partial`` a program does one tile of rows. With it a program does every so many-th tile of those that
    share a row of theta, and adds position × (gradient of the angle) in registers, so that few partial sums leave
    the chip, in a fixed order: one (F,) a program. Where each head has a row of theta, the tiles are of its tokens.
    """
    THETA: tl.constexpr = partial is not None
    HALF: tl.constexpr = dx.dtype.element_ty.primitive_bitwidth == 16 and not THETA
    NEEDS_X: tl.constexpr = THETA or ACTIVATION != "none"
    INTERLEAVED: tl.constexpr = KIND == "interleaved"
    BY_HEAD: tl.constexpr = THETA and not ONE_THETA
    STRAIGHT: tl.constexpr = ACTIVATION == "softmax"  # as in the forward
    GUARDED: tl.constexpr = BLOCK_S - 1 if STRAIGHT else BLOCK_S
    s_block, chunk = split_program(blocks, blocks_inverse, TOKENS_INNER)
    s_first = s_block * BLOCK_S
    total = tl.zeros((BLOCK_R, BLOCK_F), tl.float64)  # positions are large, and their terms cancel
    head = 0
    first_chunk = chunk
    rows = tokens * unique
    if BY_HEAD:
        first_chunk, head = divide_with_rest(chunk, unique, rows_inverse)
        rows = tokens
    first = first_chunk * BLOCK_R
    # Constant bounds where there is one turn: the compiler moves nothing before a loop that it does not see. Turns
    # count up to zero: a counter of rows would step past the last, where 32 bits may have no number.
    for turn in range(first - rows if THETA else 0, 0 if THETA else 1, chunks * BLOCK_R if THETA else 1):
        first_row = rows + turn if THETA else first
        if BY_HEAD:
            n = first_row + tl.arange(0, BLOCK_R)
            u = (head + tl.zeros((BLOCK_R,), tl.int32)).to(tl.int64)
            mask = n < tokens
        else:
            n, u, mask = rows_of(first_row, tokens, unique, rows_inverse, BLOCK_R, TOKENS_INNER)
        x_rows = row_pointers(x, n, u, x_n, x_u, VEC) + s_first.to(tl.int64) * (x_s * VEC)
        grad_rows = row_pointers(grad, n, u, grad_n, grad_u, VEC) + s_first.to(tl.int64) * (grad_s * VEC)
        dx_rows = row_pointers(dx, n, u, dx_n, dx_u, VEC) + s_first.to(tl.int64) * (dx_s * VEC)
        grads = ()
        tiles = ()
        for i in tl.static_range(BLOCK_S):
            ahead = mask & (s_first + i < shared)
            pair = load_pair(grad_rows + i * (grad_s * VEC), ahead, grad_f, 0, UNIT, INTERLEAVED, F, BLOCK_F)
            grads = grads + (pair,)
            if NEEDS_X:
                pair = load_input(x_rows + i * (x_s * VEC), ahead, x_f, 0, KIND, UNIT, F, BLOCK_F)
            tiles = tiles + (pair,)
        if THETA:
            tl.debug_barrier()  # the first turn's loads do not wait for frequencies; other turns find these in cache
            whole, rest, unit = load_frequencies(theta, head, 0, theta_u, theta_f, AXES, F, E, THETA_VEC, BLOCK_F)
            position = token_positions(
                n, mask, s_first.to(tl.int64), u, tl.arange(0, BLOCK_F) // E, ids, offsets, cu_seqlens,
                ids_s, ids_n, ids_u, ids_k, offsets_s, offsets_u,
                offset, prefix, size1, size2, size3, sequences, cu_stride, AXES, inverse1, inverse2, inverse3,
            )  # fmt: skip
            cosine, sine = cos_sin(position, whole, rest, unit, HALF)
        else:
            cosine, sine = angles_behind_loads(
                n, u, mask, s_first.to(tl.int64), theta, ids, offsets, cu_seqlens, table,
                theta_u, theta_f, ids_s, ids_n, ids_u, ids_k, offsets_s, offsets_u, table_n, table_u,
                offset, prefix, size1, size2, size3, sequences, cu_stride,
                inverse1, inverse2, inverse3, AXES, F, E, THETA_VEC, BLOCK_F, HALF,
            )  # fmt: skip
        row_total = tl.zeros((BLOCK_R, BLOCK_F), tl.float32)
        full = s_first + BLOCK_S <= shared if STRAIGHT else False
        if full:
            for i in tl.static_range(BLOCK_S):
                row_total += store_gradient(
                    dx_rows + i * (dx_s * VEC), tiles[i], grads[i], cosine, sine, mask, dx_f,
                    KIND, ACTIVATION, UNIT, THETA, F, BLOCK_F,
                )  # fmt: skip
        else:
            for i in tl.static_range(GUARDED):
                if s_first + i < shared:
                    row_total += store_gradient(
                        dx_rows + i * (dx_s * VEC), tiles[i], grads[i], cosine, sine, mask, dx_f,
                        KIND, ACTIVATION, UNIT, THETA, F, BLOCK_F,
                    )  # fmt: skip
        if THETA:  # outside the tensor grad was loaded as zero, and so is the gradient of the angle
            total += position.to(tl.float64) * row_total.to(tl.float64)
    if THETA:
        f = tl.arange(0, BLOCK_F)
        tl.store(partial + tl.program_id(0).to(tl.int64) * F + f, tl.sum(total, axis=0), mask=f < F)


@triton.jit(do_not_specialize=["parts", "heads"])
def reduce_kernel(
    partial, dtheta, parts: tl.int32, heads: tl.int32,
    AXES: tl.constexpr, F: tl.constexpr, E: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_E: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Sums (parts, heads, F) over parts, and over the axes of a grid, which share frequencies: (heads, E)."""
    if EARLY:
        gdc_wait()
    E_BLOCKS: tl.constexpr = (E + BLOCK_E - 1) // BLOCK_E
    head = (tl.program_id(0) // E_BLOCKS).to(tl.int64)
    e = tl.program_id(0) % E_BLOCKS * BLOCK_E + tl.arange(0, BLOCK_E)
    total = tl.zeros((BLOCK_P, BLOCK_E), tl.float64)
    for first in range(0, parts, BLOCK_P):
        part = first + tl.arange(0, BLOCK_P)
        rows = (part.to(tl.int64) * heads + head) * F
        for axis in tl.static_range(AXES):
            mask = (part < parts)[:, None] & ((e < E) & (axis * E + e < F))[None, :]
            total += tl.load(partial + rows[:, None] + (axis * E + e)[None, :], mask=mask, other=0.0)
    tl.store(dtheta + head * E + e, tl.sum(total, axis=0).to(dtheta.dtype.element_ty), mask=e < E)
