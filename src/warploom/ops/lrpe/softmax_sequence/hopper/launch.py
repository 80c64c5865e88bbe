"""Launches of softmax over the sequence for Hopper: which calls they take, and how sequences are cut."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton

from warploom.device.rows import RowSpec
from warploom.ops.lrpe.call import LrpeCall, LrpeInputs
from warploom.ops.lrpe.configs import slab_shape
from warploom.ops.lrpe.softmax_sequence.hopper.slabs import (
    VEC,
    WARPS,
    SlabConfig,
    slab_backward_kernel,
    slab_forward_kernel,
)
from warploom.ops.lrpe.softmax_sequence.triton.tiles import SequenceSizes
from warploom.runtime.launch import (
    INTERPRETED,
    Buffer,
    Launch,
    TmaTile,
    architecture,
    are_aligned,
    multiprocessors,
    supports_tma,
)

Tensor = torch.Tensor

_REGISTERS = 65_536  # of a multiprocessor
_BOX = 256  # tokens that are copied at once
_MOST_TOKENS = 8192  # in longer sequences programs wait longer than a second read takes


def takes_call(call: LrpeCall, grad: Tensor | None) -> bool:
    """Returns whether the kernels for Hopper take a call: 16-bit rows that TMA copies, positions in a line."""
    x, options = call.inputs.x, call.options
    if INTERPRETED or architecture(x.device) != 90 or x.dim() != 4 or x.element_size() != 2:
        return False
    if options.theta_gradient or options.kind == "interleaved" or options.prefix or options.grid:
        return False
    if x.shape[1] > _MOST_TOKENS or call.angles % 64 or any(each is not None for each in call.inputs[2:]):
        return False
    described = [x] if grad is None else [x, grad]
    return all(t.dtype == x.dtype and supports_tma(t) and are_aligned(t) for t in described)


def plan_slabs(
    call: LrpeCall, grad: Tensor | None, spec: RowSpec, arguments: dict[str, Any], inverse_of: Callable[[int], int]
) -> tuple[Launch, Buffer | None] | None:
    """Plans a call that `takes_call` allows: the launch, and the words that programs tell each other, zeros.

    Returns None if rows of the result are not aligned, or a head has more tiles than there are programs.
    ``spec`` and ``arguments``: `lrpe.engine.row_arguments`. ``inverse_of``: that of the engine.
    """
    x, backward = call.inputs.x, grad is not None
    batch, tokens, heads, _ = x.shape
    shape = slab_shape(call.options.kind, backward, tokens)
    slabs, parts = call.angles // shape.width, triton.cdiv(tokens, shape.tokens)
    tiles = batch * heads * parts * slabs
    programs = shape.programs * multiprocessors(x.device)
    if spec.VEC == 1 or parts * slabs > programs:
        return None
    programs = min(tiles, programs - programs % (parts * slabs))  # so that no head waits for a later round
    rows = 32 * WARPS.value * VEC.value // shape.width
    box = (0, 2, 1, 3), (1, 1, min(shape.tokens, _BOX), shape.width)
    described: dict[str, Any] = {"x": TmaTile(x, *box)}
    if grad is not None:
        described["grad"] = TmaTile(grad, *box)
    takes = ("grad", "dx", "statistics", "partial", "words", "dtheta", "offset")
    strides = "dx_strides" if backward else "out_strides"
    launch = Launch(
        slab_backward_kernel if backward else slab_forward_kernel,
        programs,
        takes=(*LrpeInputs._fields, *(takes if backward else ("out", *takes[2:5], "offset"))),
        num_warps=WARPS.value,
        registers=min(255, _REGISTERS // (shape.programs * WARPS.value * 32) // 8 * 8),
        cooperative=parts > 1,
        sizes=SequenceSizes(
            tokens, heads, inverse_of(heads), parts, inverse_of(parts), shape.tokens, parts, tiles,
            triton.cdiv(tiles, programs), lag=0,
        ),
        numbers=arguments["numbers"],
        config=SlabConfig(spec, call.members, shape.tokens, rows, shape.width),
        **{strides: arguments[strides]},
        **described,
    )  # fmt: skip
    return launch, None if parts == 1 else Buffer.rows((tiles * call.members * shape.width,), torch.int64)
