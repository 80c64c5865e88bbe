"""The kernels. A program takes a tile of rows (R,) by channels (C,), or the states of a sequence.

An output is a sum over ``K`` taps: tap ``j`` is the input ``j`` tokens earlier, loaded anew for each tap, which a
GPU's first cache serves. With ``z_n = b + Σ_j w_{K−1−j} x_{n−j}`` and ``dz = f'(z) dy``, the backward is
``dw_{K−1−j} = Σ_n dz_n x_{n−j}`` and ``db = Σ_n dz_n``, in a kernel that writes ``dz``, and
``dx_n = Σ_j w_{K−1−j} dz_{n+j}`` in another. Inputs before the first token are the first state's, and the last
state is the last ``K − 1`` inputs.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from warploom.device.activations import activate, activate_backward
from warploom.device.packed import is_in_sequence, sequence_of
from warploom.device.product import round_to
from warploom.device.rows import Strides


class TapStrides(NamedTuple):
    """Strides of a state (S, C, K − 1)."""

    s: tl.int64
    c: tl.int64
    k: tl.int64


class ConvolutionSizes(NamedTuple):
    """Sizes and strides that are numbers of a call."""

    tokens: tl.int32
    tiles: tl.int32  # of a batch entry, each of several steps
    steps: tl.int32  # of a tile
    all_tiles: tl.int32
    blocks: tl.int32  # of channels
    sequences: tl.int32
    cu_stride: tl.int64
    weight_c: tl.int64
    weight_k: tl.int64
    bias_c: tl.int64
    initial: TapStrides
    final: TapStrides  # of the last state, or of its gradient


class ConvolutionConfig(NamedTuple):
    """Compile-time choices of the kernels."""

    ACTIVATION: str
    TAPS: int
    CHANNELS: int
    VEC: int  # divisor of strides, all but that of channels
    AXIS: str  # along which memory is adjacent: c, n, or neither
    BLOCK_T: int
    BLOCK_C: int
    BLOCK_K: int  # of a state


class ConvolutionTensors(NamedTuple):
    """Tensors of the forward."""

    x: tl.tensor
    weight: tl.tensor
    bias: tl.tensor | None
    initial: tl.tensor | None


class SequenceRows(NamedTuple):
    """Rows (R,) of a tile, and the sequences that they belong to. Tokens are counted within a batch entry."""

    b: tl.tensor
    n: tl.tensor
    used: tl.tensor
    sequence: tl.tensor
    start: tl.tensor
    end: tl.tensor


@triton.jit
def find_sequences(b, n, exists, sequence, cu_seqlens, sizes):
    """Returns rows of known sequences, of those that exist."""
    start = tl.zeros_like(n)
    end = start + sizes.tokens
    if cu_seqlens is not None:
        ptrs = cu_seqlens + sequence * sizes.cu_stride
        start = tl.load(ptrs, mask=exists, other=0).to(tl.int32)
        end = tl.load(ptrs + sizes.cu_stride, mask=exists, other=0).to(tl.int32)
        start = tl.minimum(tl.maximum(start, 0), sizes.tokens)
        end = tl.minimum(tl.maximum(end, start), sizes.tokens)
    return SequenceRows(b.to(tl.int64), n, exists, sequence, start, end)


@triton.jit
def find_rows(tile, step, cu_seqlens, sizes, config: tl.constexpr):
    """Returns the rows of a step of a tile of tokens."""
    b = tile // sizes.tiles
    n = ((tile - b * sizes.tiles) * sizes.steps + step) * config.BLOCK_T + tl.arange(0, config.BLOCK_T)
    exists = n < sizes.tokens
    sequence = tl.zeros_like(n) + b
    if cu_seqlens is not None:
        exists = exists & is_in_sequence(n, cu_seqlens, sizes.cu_stride, sizes.sequences)
        sequence = sequence_of(n, cu_seqlens, sizes.cu_stride, sizes.sequences)
    return find_sequences(b, n, exists, sequence, cu_seqlens, sizes)


@triton.jit
def find_state_rows(sequence, cu_seqlens, sizes, config: tl.constexpr):
    """Returns a row for each input of a sequence's state, counted from 0."""
    k = tl.arange(0, config.BLOCK_K)
    b = sequence if cu_seqlens is None else sequence * 0
    return find_sequences(b, k, k < config.TAPS - 1, tl.zeros_like(k) + sequence, cu_seqlens, sizes)


@triton.jit
def token_pointers(ptr, rows, n, c, strides, config: tl.constexpr):
    """Returns pointers (R, C) to the channels of tokens ``n``, in 64 bits."""
    n = n.to(tl.int64)
    n = n if config.AXIS == "n" else n * (strides.n * config.VEC)
    c = c if config.AXIS == "c" else c * strides.f
    return ptr + rows.b * (strides.b * config.VEC) + n[:, None] + c[None, :]


@triton.jit
def state_pointers(ptr, rows, k, c, strides):
    """Returns pointers (R, C) to the channels of the inputs ``k`` of states, in 64 bits."""
    first = rows.sequence.to(tl.int64) * strides.s + k.to(tl.int64) * strides.k
    return ptr + first[:, None] + (c * strides.c)[None, :]


@triton.jit
def load_rows(x, rows, n, c, strides, config: tl.constexpr):
    """Returns tokens ``n`` (R, C) of the rows' own sequences in float32, and 0 for others."""
    inside = rows.used & (n >= rows.start) & (n < rows.end)
    ptrs = token_pointers(x, rows, n, c, strides, config)
    return tl.load(ptrs, mask=inside[:, None] & (c < config.CHANNELS)[None, :], other=0.0).to(tl.float32)


@triton.jit
def load_inputs(tensors, rows, n, c, sizes, strides, config: tl.constexpr):
    """Returns inputs ``n`` (R, C) of the rows' own sequences, from states before their first tokens."""
    x = load_rows(tensors.x, rows, n, c, strides, config)
    if tensors.initial is not None:
        k = n - rows.start + (config.TAPS - 1)
        before = (rows.used & (k >= 0) & (n < rows.start))[:, None]
        ptrs = state_pointers(tensors.initial, rows, k, c, sizes.initial)
        earlier = tl.load(ptrs, mask=before & (c < config.CHANNELS)[None, :], other=0.0).to(tl.float32)
        x = tl.where(before, earlier, x)
    return x


@triton.jit
def load_weights(weight, c, sizes, config: tl.constexpr):
    """Returns the weights of a tile's channels, (1, C) for each tap, the earliest first."""
    weights = ()
    for i in tl.static_range(config.TAPS):
        ptrs = weight + c.to(tl.int64) * sizes.weight_c + i * sizes.weight_k
        weights += (tl.load(ptrs, mask=c < config.CHANNELS, other=0.0).to(tl.float32)[None, :],)
    return weights


@triton.jit
def load_taps(tensors, rows, n, c, sizes, strides, config: tl.constexpr):
    """Returns the inputs of tokens ``n``, (R, C) for each tap, the earliest first."""
    inputs = ()
    for i in tl.static_range(config.TAPS):
        inputs += (load_inputs(tensors, rows, n - (config.TAPS - 1 - i), c, sizes, strides, config),)
    return inputs


@triton.jit
def load_shift(bias, c, sizes, config: tl.constexpr):
    """Returns the bias (1, C) of a tile's channels, 0 without one."""
    shift = tl.zeros((1, c.shape[0]), tl.float32)
    if bias is not None:
        ptrs = bias + c.to(tl.int64) * sizes.bias_c
        shift += tl.load(ptrs, mask=c < config.CHANNELS, other=0.0).to(tl.float32)[None, :]
    return shift


@triton.jit
def add_taps(inputs, weights, shift):
    """Returns ``z`` (R, C) of the inputs that `load_taps` returns."""
    z = tl.zeros(inputs[0].shape, tl.float32) + shift
    for i in tl.static_range(len(inputs)):
        z += inputs[i] * weights[i]
    return z


@triton.jit
def forward_kernel(
    x, weight, bias, initial, cu_seqlens, out, final, sizes: ConvolutionSizes, x_strides: Strides,
    out_strides: Strides, config: tl.constexpr,
):  # fmt: skip
    """Writes a tile of outputs a program, and then the last state of a sequence."""
    ACTIVATION: tl.constexpr = config.ACTIVATION
    program = tl.program_id(0)
    tile = program // sizes.blocks
    c = (program - tile * sizes.blocks) * config.BLOCK_C + tl.arange(0, config.BLOCK_C)
    tensors = ConvolutionTensors(x, weight, bias, initial)
    if tile < sizes.all_tiles:
        weights, shift = load_weights(weight, c, sizes, config), load_shift(bias, c, sizes, config)
        for step in range(sizes.steps):
            rows = find_rows(tile, step, cu_seqlens, sizes, config)
            inputs = load_taps(tensors, rows, rows.n, c, sizes, x_strides, config)
            y = activate(add_taps(inputs, weights, shift), ACTIVATION)
            y = tl.where(rows.used[:, None], y, 0.0)
            ptrs = token_pointers(out, rows, rows.n, c, out_strides, config)
            inside = (rows.n < sizes.tokens)[:, None] & (c < config.CHANNELS)[None, :]
            tl.store(ptrs, round_to(y, out.dtype.element_ty), mask=inside)
    elif final is not None:
        states = find_state_rows(tile - sizes.all_tiles, cu_seqlens, sizes, config)
        last = load_inputs(tensors, states, states.end - (config.TAPS - 1) + states.n, c, sizes, x_strides, config)
        state_ptrs = state_pointers(final, states, states.n, c, sizes.final)
        state_inside = states.used[:, None] & (c < config.CHANNELS)[None, :]
        tl.store(state_ptrs, round_to(last, final.dtype.element_ty), mask=state_inside)


@triton.jit
def preactivation_kernel(
    x, weight, bias, initial, cu_seqlens, grad, dz, sums, sizes: ConvolutionSizes, x_strides: Strides,
    grad_strides: Strides, dz_strides: Strides, config: tl.constexpr,
):  # fmt: skip
    """Writes a tile of ``dz`` a program, if that is not ``grad``, and its shares of ``dw`` and ``db``.

    These go to ``sums`` (tiles, K + 1, C), if there is such a tensor.
    """
    TAPS: tl.constexpr = config.TAPS
    ACTIVATION: tl.constexpr = config.ACTIVATION
    program = tl.program_id(0)
    tile = program // sizes.blocks
    c = (program - tile * sizes.blocks) * config.BLOCK_C + tl.arange(0, config.BLOCK_C)
    tensors = ConvolutionTensors(x, weight, bias, initial)
    weights, shift = load_weights(weight, c, sizes, config), load_shift(bias, c, sizes, config)
    of_bias = tl.zeros((config.BLOCK_T, config.BLOCK_C), tl.float32)
    of_taps = ()
    for _ in tl.static_range(TAPS):
        of_taps += (of_bias,)
    for step in range(sizes.steps):
        rows = find_rows(tile, step, cu_seqlens, sizes, config)
        gradient = load_rows(grad, rows, rows.n, c, grad_strides, config)
        inputs = load_taps(tensors, rows, rows.n, c, sizes, x_strides, config)
        if ACTIVATION != "none":
            gradient = activate_backward(add_taps(inputs, weights, shift), gradient, ACTIVATION)
            gradient = tl.where(rows.used[:, None], gradient, 0.0)
            ptrs = token_pointers(dz, rows, rows.n, c, dz_strides, config)
            inside = (rows.n < sizes.tokens)[:, None] & (c < config.CHANNELS)[None, :]
            tl.store(ptrs, round_to(gradient, dz.dtype.element_ty), mask=inside)
        if sums is not None:
            of_bias += gradient
            following = ()
            for i in tl.static_range(TAPS):
                following += (of_taps[i] + gradient * inputs[i],)
            of_taps = following
    if sums is not None:
        sum_ptrs = sums + tile.to(tl.int64) * ((TAPS + 1) * config.CHANNELS) + c
        tl.store(sum_ptrs + TAPS * config.CHANNELS, tl.sum(of_bias, axis=0), mask=c < config.CHANNELS)
        for i in tl.static_range(TAPS):
            tl.store(sum_ptrs + i * config.CHANNELS, tl.sum(of_taps[i], axis=0), mask=c < config.CHANNELS)


@triton.jit
def differentiate_inputs(weights, dz, grad_final, rows, n, c, sizes, strides, config: tl.constexpr):
    """Returns the gradient (R, C) of inputs ``n``."""
    TAPS: tl.constexpr = config.TAPS
    dx = tl.zeros([n.shape[0], c.shape[0]], tl.float32)
    for j in tl.static_range(TAPS):
        dx += load_rows(dz, rows, n + j, c, strides, config) * weights[TAPS - 1 - j]
    if grad_final is not None:
        k = n - rows.end + (TAPS - 1)
        inside = (rows.used & (k >= 0) & (n < rows.end))[:, None] & (c < config.CHANNELS)[None, :]
        ptrs = state_pointers(grad_final, rows, k, c, sizes.final)
        dx += tl.load(ptrs, mask=inside, other=0.0).to(tl.float32)
    return dx


@triton.jit
def input_kernel(
    weight, cu_seqlens, dz, grad_final, dx, dinitial, sizes: ConvolutionSizes, dz_strides: Strides,
    dx_strides: Strides, dinitial_strides: TapStrides, config: tl.constexpr,
):  # fmt: skip
    """Writes a tile of ``dx`` a program, and then the gradient of the first state of a sequence."""
    TAPS: tl.constexpr = config.TAPS
    program = tl.program_id(0)
    tile = program // sizes.blocks
    c = (program - tile * sizes.blocks) * config.BLOCK_C + tl.arange(0, config.BLOCK_C)
    weights = load_weights(weight, c, sizes, config)
    if tile < sizes.all_tiles:
        for step in range(sizes.steps):
            rows = find_rows(tile, step, cu_seqlens, sizes, config)
            result = differentiate_inputs(weights, dz, grad_final, rows, rows.n, c, sizes, dz_strides, config)
            ptrs = token_pointers(dx, rows, rows.n, c, dx_strides, config)
            inside = (rows.n < sizes.tokens)[:, None] & (c < config.CHANNELS)[None, :]
            tl.store(ptrs, round_to(result, dx.dtype.element_ty), mask=inside)
    elif dinitial is not None:
        states = find_state_rows(tile - sizes.all_tiles, cu_seqlens, sizes, config)
        before = states.start - (TAPS - 1) + states.n
        dstate = differentiate_inputs(weights, dz, grad_final, states, before, c, sizes, dz_strides, config)
        state_ptrs = state_pointers(dinitial, states, states.n, c, dinitial_strides)
        state_inside = states.used[:, None] & (c < config.CHANNELS)[None, :]
        tl.store(state_ptrs, round_to(dstate, dinitial.dtype.element_ty), mask=state_inside)
