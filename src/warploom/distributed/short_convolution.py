"""The short convolution of a sequence that ranks share: `context_parallel_short_convolution`.

An output takes the few inputs before its own. Those before a part are the last rows of the ranks before it, which
all ranks gather once, and once more their gradients in the backward. A plain call that begins with them does the
rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh

from warploom.distributed.agreement import agree, refuse, refuse_compiled
from warploom.distributed.plain_calls import PlainOperator
from warploom.distributed.ranks import (
    Bounds,
    bounds_of,
    check_device,
    check_packed,
    gather,
    group_named,
    group_of,
    remember,
)
from warploom.distributed.segments import LAYOUT
from warploom.errors import WarploomError, dtype_of
from warploom.ops.short_convolution import operator as plain
from warploom.ops.short_convolution import reference
from warploom.ops.short_convolution.call import ConvolutionInputs, ConvolutionOptions
from warploom.ops.short_convolution.validation import Activation, check
from warploom.runtime.arguments import as_python
from warploom.runtime.autocast import cast_for_autocast
from warploom.runtime.backend import Backend, use_triton
from warploom.runtime.dispatch import CustomOperator, Gradient, Tensors, apply
from warploom.runtime.memory_order import empty_in_order_of
from warploom.runtime.names import hide_catch_alls, refuse_unknown
from warploom.runtime.plans import Plans

Tensor = torch.Tensor

NAME = "context_parallel_short_convolution"
DIFFERENTIABLE = 3  # the first inputs


@hide_catch_alls
def context_parallel_short_convolution(
    x: Tensor,
    weight: Tensor,
    mesh: DeviceMesh,
    *_others: Any,
    bias: Tensor | None = None,
    activation: Activation = "none",
    cu_seqlens: Tensor | None = None,
    backend: Backend = "auto",
    **_unknown: Any,
) -> Tensor:
    """Compute `warploom.short_convolution` of a sequence whose tokens are shared by the ranks of a mesh.

    Parts are contiguous: rank ``r`` of ``W`` holds the ``r``-th of as many, of lengths that differ by one at most.
    The last ``K − 1`` tokens of every part are all-gathered once, and their gradients once in the backward. All
    ranks must make the same call; what one of them refuses, all refuse with the same error.

    Args:
        x: ``(B, n, C)``, this rank's part, as `shard_sequence` cuts it in the layout ``contiguous``; dtypes and
            strides as in `warploom.short_convolution`.
        weight: ``(C, K)``, the same on every rank.
        mesh: Of one dimension, over whose ranks tokens are shared.
        bias: ``(C,)``, the same on every rank.
        activation: ``none`` or ``silu``.
        cu_seqlens: ``(S + 1,)``, the same on every rank, with ``B = 1``: the bounds of packed sequences in the
            whole, ``c_S = N``. They are read by the host, once for each tensor.
        backend: ``auto``, ``triton`` or ``torch``.

    Returns:
        ``(B, n, C)``, this rank's part of the outputs. Gradients of ``weight`` and ``bias`` are this rank's part,
        to be summed over the mesh.

    Raises:
        ShapeError: A size does not fit, or parts are not those of the layout.
        DtypeError: An argument has the wrong type.
        DeviceError: A tensor is not on this rank's device of the mesh.
        ArgumentError: The mesh has more dimensions, an option is unknown, bounds are not those of the whole, or
            the ranks' calls differ.
        BackendError: ``backend="triton"`` cannot run this call.

    Example:
        ```python
        import torch
        from torch.distributed.device_mesh import init_device_mesh
        from warploom.distributed import context_parallel_short_convolution, shard_sequence

        mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))    # under torchrun
        x = shard_sequence(torch.randn(1, 64, 8), mesh, layout="contiguous")
        y = context_parallel_short_convolution(x, torch.randn(8, 4), mesh, activation="silu")    # (1, 64 / W, 8)
        ```
    """
    if _others or _unknown:
        refuse_unknown(context_parallel_short_convolution, _others, _unknown)
    (x,) = cast_for_autocast(x)
    tensors = (x, weight, bias, cu_seqlens)
    try:
        options = _validate(tensors, activation, mesh, backend)
    except WarploomError as error:
        if torch.compiler.is_compiling():
            return refuse_compiled(  # type: ignore[no-any-return]
                NAME, mesh, error, tensors, lambda *tensors: _validate(tensors, activation, mesh, backend),
                lambda x, *_: [tuple(x.shape) if isinstance(x, Tensor) else (0, 0, 0)],
            )  # fmt: skip
        refuse(NAME, mesh, error)
    return apply(OPERATOR, tensors, 0, options)[0]  # type: ignore[no-any-return]


class ContextConvolutionOptions(NamedTuple):
    """Options of the short convolution over ranks."""

    activation: str
    kernels: bool
    group: str


def _validate(tensors: Tensors, activation: str, mesh: DeviceMesh, backend: str) -> ContextConvolutionOptions:
    """Returns the options of a call, if this rank finds nothing wrong with it."""
    group = group_of(NAME, mesh).group_name
    x, weight, bias, cu_seqlens = tensors
    one, limit, *_ = check(
        NAME, ConvolutionInputs(x, weight, bias, None, cu_seqlens), (as_python(activation), False), 0
    )
    kernels = use_triton(NAME, backend, x, limit)
    check_device(NAME, mesh, "x", x)
    if cu_seqlens is not None:
        check_packed(NAME, cu_seqlens)
    return ContextConvolutionOptions(one.activation, kernels, group)


# What travels


class EdgePiece(NamedTuple):
    """Rows among the last ones of a part, which come before a later part."""

    sender: int
    receiver: int
    sent: slice  # of the sender's last rows
    before: slice  # of the rows before the receiver's part
    rows: slice  # of the sender's part


class Edges(NamedTuple):
    """Pieces of all ranks, and the sequences of this rank's part."""

    pieces: tuple[EdgePiece, ...]
    continued: slice  # the sequences that go on here
    cu_seqlens: Tensor | None  # (S + 1,), of all sequences, in this rank's part


@remember(64)
def find_edges(
    bounds: Bounds, packed: bool, batch: int, rows: int, world: int, rank: int, device: torch.device
) -> Edges:
    """Returns the edges of a rank's part, of which so many rows before it are wanted."""
    edges = [each * bounds[-1] // world for each in range(world + 1)]
    pieces, continued = [], slice(0, 0)
    for receiver, edge in enumerate(edges[:-1]):
        number = next((n for n in range(len(bounds) - 1) if bounds[n] < edge < bounds[n + 1]), None)
        if number is None:
            continue
        if receiver == rank:
            continued = slice(number, number + 1) if packed else slice(0, batch)
        for sender in range(receiver):
            first = max(bounds[number], edge - rows, edges[sender])
            last, end = min(edge, edges[sender + 1]), edges[sender + 1]
            if first < last:
                places = [slice(first - start, last - start) for start in (end - rows, edge - rows, edges[sender])]
                pieces.append(EdgePiece(sender, receiver, *places))
    cut = torch.tensor(bounds).sub(edges[rank]).clamp(0, edges[rank + 1] - edges[rank])
    return Edges(tuple(pieces), continued, cut.to(device, torch.int32) if packed else None)


def _edges_of(x: Tensor, weight: Tensor, cu_seqlens: Tensor | None, group: Any, bounds: Bounds) -> Edges:
    packed, rows = cu_seqlens is not None, weight.shape[1] - 1
    return find_edges(bounds, packed, x.shape[0], rows, group.size(), group.rank(), x.device)


def gather_before(x: Tensor, rows: int, sequences: int, edges: Edges, group: Any) -> Tensor:
    """Returns the inputs before this rank's part, as states of all sequences (S, C, K − 1); else 0."""
    batch, tokens, channels = x.shape
    tail, there = x.new_zeros((batch, rows, channels)), min(rows, tokens)
    tail[:, rows - there :] = x[:, tokens - there :]
    every = gather(tail, group)
    before = x.new_zeros((sequences, channels, rows))
    for piece in edges.pieces:
        if piece.receiver == group.rank():
            before[edges.continued, :, piece.before] = every[piece.sender, :, piece.sent].mT
    return before


def return_gradients(grad: Tensor, of_before: Tensor, edges: Edges, group: Any) -> None:
    """Add the gradients of later parts' first states to those of the rows ``grad`` that they are.

    ``of_before`` is that of this rank's, (S, C, K − 1).
    """
    own = (
        of_before[edges.continued].mT
        if edges.continued.stop
        else of_before.new_zeros((grad.shape[0], *of_before.mT.shape[1:]))
    )
    every = gather(own, group)
    for piece in edges.pieces:
        if piece.sender == group.rank():
            grad[:, piece.rows] += every[piece.receiver, :, piece.before]


# The operator


def _run_reference(inputs: ConvolutionInputs, _: int, options: ConvolutionOptions) -> Any:
    x, weight, bias, initial_state, cu_seqlens = inputs
    return reference.short_convolution(
        x, weight, bias=bias, activation=options.activation, initial_state=initial_state, cu_seqlens=cu_seqlens
    )


PLAIN = PlainOperator(plain.OPERATOR, _run_reference, DIFFERENTIABLE + 1)


def _forward(tensors: Tensors, _: int, options: ContextConvolutionOptions, plans: Plans) -> Tensors:
    """Returns outputs; for the backward the inputs before this rank's part, and bounds."""
    x, weight, bias, cu_seqlens = tensors
    group, (batch, tokens, channels) = group_named(options.group), x.shape
    read = None if cu_seqlens is None else bounds_of(cu_seqlens)
    call = {"B": batch, "C": channels, "K": weight.shape[1], "dtype": dtype_of(x), "bias": bias is not None}
    call |= {"activation": options.activation, "kernels": options.kernels}
    bounds = agree(NAME, group, "x", tokens, call, read, LAYOUT).bounds
    edges = _edges_of(x, weight, cu_seqlens, group, bounds)
    sequences = batch if cu_seqlens is None else len(bounds) - 1
    before = gather_before(x, weight.shape[1] - 1, sequences, edges, group)
    inputs = ConvolutionInputs(x, weight, bias, before, edges.cu_seqlens)
    found, _state = PLAIN.run(inputs, 0, ConvolutionOptions(options.activation, False), options.kernels)
    return _in_order_of(x, found), before, torch.tensor(bounds)


def _in_order_of(x: Tensor, found: Tensor) -> Tensor:
    """Returns a tensor in the memory order of ``x``, as `_fake` says."""
    out = empty_in_order_of(x, x.shape[2])
    return found if found.stride() == out.stride() else out.copy_(found)


def _fake(tensors: Tensors, options: ContextConvolutionOptions) -> Tensors:
    x, weight, _, cu_seqlens = tensors
    sequences = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    before = x.new_empty((sequences, x.shape[2], weight.shape[1] - 1))
    bounds = torch.empty(2 if cu_seqlens is None else cu_seqlens.shape[0], dtype=torch.int64)
    return empty_in_order_of(x, x.shape[2]), before, bounds


def _save(
    tensors: Tensors, options: ContextConvolutionOptions, results: Tensors, wanted: Sequence[bool]
) -> tuple[Tensors, tuple[Any, ...]]:
    """Returns this rank's part, and what `_forward` returns for the backward."""
    return (*tensors, *results[1:]), ()


def _backward(
    grads: Tensors, saved: Tensors, _: int, options: ContextConvolutionOptions, extra: tuple[Any, ...],
    wanted: Sequence[bool], plans: Plans,
) -> Tensors:  # fmt: skip
    """Returns gradients of x, weight and bias."""
    x, weight, bias, cu_seqlens, before, bounds = saved
    group = group_named(options.group)
    edges = _edges_of(x, weight, cu_seqlens, group, tuple(bounds.tolist()))
    inputs = ConvolutionInputs(x, weight, bias, before, edges.cu_seqlens)
    given = (inputs, 0, ConvolutionOptions(options.activation, False), options.kernels)
    dx, dweight, dbias, of_before = PLAIN.differentiate(grads[0], None, *given, [True, *wanted[1:], True])
    dx = _in_order_of(x, dx)  # type: ignore[arg-type]
    return_gradients(dx, of_before, edges, group)  # type: ignore[arg-type]
    return dx, dweight, dbias


def _backward_fake(
    grads: Tensors,
    saved: Tensors,
    options: ContextConvolutionOptions,
    extra: tuple[Any, ...],
    wanted: Sequence[bool],
) -> Tensors:
    x, *rest = saved[:DIFFERENTIABLE]
    others = (t.new_empty(t.shape) if t is not None and wants else None for t, wants in zip(rest, wanted[1:]))
    return empty_in_order_of(x, x.shape[2]), *others


_TENSORS = "Tensor x, Tensor weight, Tensor? bias, Tensor? cu_seqlens"
OPERATOR = CustomOperator(
    name=NAME,
    any_backend=True,
    tensors=_TENSORS,
    options="str activation, bool kernels, str group",
    num_results=3,
    options_type=ContextConvolutionOptions,
    forward=_forward,
    fake=_fake,
    gradient=Gradient(
        grad_outputs="Tensor? grad",
        saved=f"{_TENSORS}, Tensor before, Tensor bounds",
        num_gradients=DIFFERENTIABLE,
        save=_save,
        run=_backward,
        fake=_backward_fake,
    ),
)
