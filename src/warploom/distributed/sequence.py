"""A sequence cut into the ranks' parts and put together again, and where the tokens of a part stand."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from warploom.distributed.agreement import agree, refuse, remember_whole
from warploom.distributed.layout import (
    Layout,
    check_layout,
    chunks_of,
    close_bounds,
    expand_ranges,
    places,
    rows_on,
)
from warploom.distributed.ranks import (
    Bounds,
    all_gather,
    as_bytes,
    bounds_of,
    check_device,
    check_packed,
    device_of,
    group_of,
    remember,
)
from warploom.errors import ArgumentError, DtypeError, ShapeError, WarploomError, dtype_of, fault, shape_of
from warploom.runtime.arguments import as_python, is_int

Tensor = torch.Tensor


@remember(8)
def _places_on(bounds: Bounds, world: int, layout: str, device: torch.device) -> Tensor:
    """Returns `places` on a device."""
    return places(chunks_of(bounds, world, layout)).to(device)


def _whole(function: str, length: int, cu_seqlens: Tensor | None) -> Bounds:
    """Returns the bounds of a whole of a length that is known."""
    if cu_seqlens is not None:
        check_packed(function, cu_seqlens)
    return close_bounds(function, None if cu_seqlens is None else bounds_of(cu_seqlens), length, tail=True)


def _check_dim(function: str, x: object, dim: int) -> int:
    if not isinstance(x, Tensor):
        raise fault(DtypeError, function, "x", "a tensor", type(x).__name__)
    dim = as_python(dim)
    if not is_int(dim) or not -x.dim() <= dim < x.dim():
        raise fault(ShapeError, function, "dim", f"an axis of x, of shape {shape_of(x)}", repr(dim))
    return dim % x.dim()


def shard_sequence(
    x: Tensor, mesh: DeviceMesh, *, dim: int = 1, layout: Layout = "zigzag", cu_seqlens: Tensor | None = None
) -> Tensor:
    """Cut out this rank's part of a sequence that every rank has whole.

    Nothing is sent, but every rank is to call this, as ranks remember how long parts are. In the backward the
    gradient is this rank's own part, zero elsewhere.

    Args:
        x: Of any shape and dtype, the same on every rank.
        mesh: Of one dimension.
        dim: The axis of tokens, of ``N``.
        layout: ``zigzag`` or ``contiguous``, see `warploom.distributed.layout`.
        cu_seqlens: ``(S + 1,)`` int32 or int64, the bounds of packed sequences in all of ``x``, ``c_S ≤ N``.

    Returns:
        ``x`` with this rank's tokens alone. Parts have equal lengths where ``N``, or the length of every packed
        sequence, is a multiple of twice the number of ranks.

    Raises:
        ShapeError: There is no such axis.
        DtypeError: An argument has the wrong type.
        DeviceError: ``x`` is not on this rank's device of the mesh.
        ArgumentError: The mesh has more dimensions, the layout is unknown, or bounds are not those of ``x``.

    Example:
        ```python
        import torch
        from torch.distributed.device_mesh import init_device_mesh
        from warploom.distributed import shard_sequence

        mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))    # under torchrun
        tokens = shard_sequence(torch.arange(64)[None], mesh)     # (1, 64) to (1, 64 / W)
        ```
    """
    name = "shard_sequence"
    group = group_of(name, mesh)
    check_layout(name, layout)
    dim = _check_dim(name, x, dim)
    check_device(name, mesh, "x", x)
    bounds = _whole(name, x.shape[dim], cu_seqlens)
    remember_whole(group, bounds, layout)
    return x.index_select(dim, rows_on(bounds, group.size(), layout, group.rank(), x.device))


def unshard_sequence(
    x: Tensor, mesh: DeviceMesh, *, dim: int = 1, layout: Layout = "zigzag", cu_seqlens: Tensor | None = None
) -> Tensor:
    """Put the whole sequence together on every rank, from the ranks' parts: the inverse of `shard_sequence`.

    In the backward every rank takes its own part of its gradient: what follows is taken to be the same computation
    on all of them.

    Args:
        x: This rank's part, of any shape and dtype.
        mesh: As in `shard_sequence`; likewise the rest.
        dim: The axis of tokens.
        layout: That of the parts.
        cu_seqlens: The bounds of packed sequences in the whole.

    Returns:
        ``x`` with all tokens in their order.

    Raises:
        ShapeError: Parts are not those of the layout.
        DtypeError: An argument has the wrong type.
        DeviceError: ``x`` is not on this rank's device of the mesh.
        ArgumentError: The mesh has more dimensions, the layout is unknown, bounds are not those of the whole, or
            calls of the ranks differ.

    Example:
        ```python
        import torch
        from torch.distributed.device_mesh import init_device_mesh
        from warploom.distributed import shard_sequence, unshard_sequence

        mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))    # under torchrun
        tokens = torch.arange(64)[None]
        print(torch.equal(unshard_sequence(shard_sequence(tokens, mesh), mesh), tokens))  # True
        ```
    """
    name = "unshard_sequence"
    try:
        group = group_of(name, mesh)
        check_layout(name, layout)
        dim = _check_dim(name, x, dim)
        check_device(name, mesh, "x", x)
        if cu_seqlens is not None:
            check_packed(name, cu_seqlens)
    except WarploomError as error:
        refuse(name, mesh, error)
    read = None if cu_seqlens is None else bounds_of(cu_seqlens)
    rest = tuple(size for axis, size in enumerate(x.shape) if axis != dim)
    call = {"dtype": dtype_of(x), "sizes": rest, "dim": dim}
    bounds = agree(name, group, "x", x.shape[dim], call, read, layout).bounds
    whole: Tensor = _Whole.apply(x.movedim(dim, 0), group, bounds, layout)
    return whole.movedim(0, dim)


class _Whole(torch.autograd.Function):
    """Gathers parts (n, …) into the whole (N, …)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any, bounds: Bounds, layout: str) -> Tensor:
        ctx.part = (bounds, group.size(), layout, group.rank(), x.device)
        longest = max(chunks_of(bounds, group.size(), layout).lengths)
        parts = x.new_empty((group.size() * longest, *x.shape[1:]))
        all_gather(as_bytes(parts), as_bytes(pad_rows(x, longest)), group=group)
        return parts.index_select(0, _places_on(bounds, group.size(), layout, x.device))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad.index_select(0, rows_on(*ctx.part)), None, None, None


def pad_rows(x: Tensor, rows: int) -> Tensor:
    """Returns ``x`` (n, …), dense, filled up to so many rows."""
    if x.shape[0] == rows:
        return x.contiguous()
    filled = x.new_zeros((rows, *x.shape[1:]))
    filled[: x.shape[0]] = x
    return filled


def local_position_ids(
    length: int, mesh: DeviceMesh, *, layout: Layout = "zigzag", cu_seqlens: Tensor | None = None
) -> Tensor:
    """Returns where the tokens of this rank's part stand, for the ``position_ids`` of LRPE and RoPE.

    Args:
        length: ``N``, tokens of the whole sequence.
        mesh: As in `shard_sequence`; likewise the rest.
        layout: That of the parts.
        cu_seqlens: The bounds of packed sequences in the whole; positions start again with each.

    Returns:
        ``(n,)`` int64 on the mesh's device.

    Raises:
        DtypeError: An argument has the wrong type.
        ArgumentError: The length is negative, the mesh has more dimensions, the layout is unknown, or bounds are
            not those of the length.

    Example:
        ```python
        import torch
        from torch.distributed.device_mesh import init_device_mesh
        from warploom.distributed import local_position_ids, shard_sequence

        mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))    # under torchrun
        from warploom import lrpe_rotate

        q = shard_sequence(torch.randn(1, 64, 8, 16), mesh)
        q = lrpe_rotate(q, 10000.0 ** -(torch.arange(8) / 8), position_ids=local_position_ids(64, mesh))
        ```
    """
    name = "local_position_ids"
    group = group_of(name, mesh)
    check_layout(name, layout)
    length = as_python(length)
    if not is_int(length):
        raise fault(DtypeError, name, "length", "an int", repr(length))
    if length < 0:
        raise fault(ArgumentError, name, "length", "at least 0", length)
    bounds = _whole(name, length, cu_seqlens)
    remember_whole(group, bounds, layout)
    return _positions_on(bounds, group.size(), layout, group.rank(), device_of(mesh)).clone()


@remember(8)
def _positions_on(bounds: Bounds, world: int, layout: str, rank: int, device: torch.device) -> Tensor:
    chunks = chunks_of(bounds, world, layout)
    own = chunks.owned(rank)
    first, last = ((edges - chunks.starts)[:, own].t().flatten() for edges in (chunks.first, chunks.last))
    return expand_ranges(first, last).to(device)
