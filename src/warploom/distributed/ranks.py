"""Meshes, groups of ranks, and what a rank checks of its own part."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.weak import WeakTensorKeyDictionary

from warploom.errors import ArgumentError, DeviceError, DtypeError, ShapeError, fault, shape_of
from warploom.runtime.names import refuse_missing

P = ParamSpec("P")
T = TypeVar("T")
Tensor = torch.Tensor
Bounds = tuple[int, ...]
"""Offsets at which packed sequences begin and end, ``0 = c₀ ≤ … ≤ c_S``."""

all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""Tensors of all ranks one behind the other; the second is its name in versions of PyTorch before 2.13."""


def as_bytes(x: Tensor) -> Tensor:
    """Returns a dense tensor as bytes (·,), which every backend can send."""
    return x.view(-1).view(torch.uint8)


def gather(x: Tensor, group: Any) -> Tensor:
    """Returns the tensors of all ranks, (W, …)."""
    every: Tensor = x.new_empty((group.size(), *x.shape))
    if x.numel():
        all_gather(as_bytes(every), as_bytes(x.contiguous()), group=group)
    return every


_bounds: Any = WeakTensorKeyDictionary()


def remember(most: int) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Remember what a function returns, for so many calls, as tensors that any later call can take.

    They are made on the host whatever PyTorch's default device is, and outside of inference mode, whose tensors
    autograd refuses.
    """

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        @functools.lru_cache(most)
        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> T:
            with torch.inference_mode(False), torch.device("cpu"):
                return function(*args, **kwargs)

        return call  # type: ignore[return-value]

    return decorate


def group_of(function: str, mesh: object) -> Any:
    """Returns the process group of a mesh of one dimension that this rank is in.

    Raises:
        DtypeError: It is no mesh.
        ArgumentError: It has more dimensions, or other ranks only.
    """
    if not isinstance(mesh, DeviceMesh):
        refuse_missing(function, "mesh", mesh)
        raise fault(DtypeError, function, "mesh", "a DeviceMesh", type(mesh).__name__)
    dimensions = len(mesh.shape)
    if dimensions != 1:
        names = f" ({', '.join(mesh.mesh_dim_names)})" if mesh.mesh_dim_names else ""
        expected = 'of one dimension, such as mesh["cp"]'
        raise fault(ArgumentError, function, "mesh", expected, f"{dimensions} dimensions{names}")
    if mesh.get_coordinate() is None:
        raise fault(ArgumentError, function, "mesh", "one that this rank is in", mesh)
    return mesh.get_group()


def group_named(name: str) -> Any:
    """Returns the group of this name: operators of PyTorch know groups by name."""
    known: Any = dist.distributed_c10d
    return known._resolve_process_group(name)


def device_of(mesh: DeviceMesh) -> torch.device:
    """Returns this rank's device: of GPUs the current one, as in `torch.distributed`."""
    kind = mesh.device_type
    return torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)


def check_device(function: str, mesh: DeviceMesh, argument: str, tensor: Tensor) -> None:
    """Raise unless a tensor is on this rank's device of the mesh.

    Raises:
        DeviceError: It is not.
    """
    device = device_of(mesh)
    if tensor.device != device:
        raise fault(DeviceError, function, argument, f"on this rank's device of the mesh, {device}", tensor.device)


def check_packed(function: str, cu_seqlens: object) -> None:
    """Raise unless `bounds_of` can read the bounds of packed sequences, whatever they are.

    Raises:
        DtypeError: It is no tensor of int32 or int64.
        ShapeError: It is not ``(S + 1,)``.
        DeviceError: It holds nothing.
    """
    if not isinstance(cu_seqlens, Tensor) or cu_seqlens.dtype not in (torch.int32, torch.int64):
        got = getattr(cu_seqlens, "dtype", type(cu_seqlens).__name__)
        raise fault(DtypeError, function, "cu_seqlens", "a tensor of int32, int64", got)
    if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 2:
        raise fault(ShapeError, function, "cu_seqlens", "(S + 1,) with S ≥ 1", shape_of(cu_seqlens))
    if cu_seqlens.is_meta:
        raise fault(DeviceError, function, "cu_seqlens", "on a device that holds its numbers", cu_seqlens.device)


def bounds_of(cu_seqlens: Tensor) -> Bounds:
    """Returns the bounds of packed sequences, read from the device once for each tensor."""
    if cu_seqlens.is_inference():  # which does not say whether it has been changed
        return tuple(cu_seqlens.tolist())
    known = _bounds.get(cu_seqlens)
    if known is None or known[0] != cu_seqlens._version:
        known = (cu_seqlens._version, tuple(cu_seqlens.tolist()))
        _bounds[cu_seqlens] = known
    return known[1]  # type: ignore[no-any-return]


def format_bounds(bounds: Bounds | None) -> str:
    """Returns bounds as an error shows them: the first and the last, and a checksum of all where there are many."""
    if bounds is None:
        return "None"
    few = bounds if len(bounds) < 9 else (*bounds[:4], "…", bounds[-1])
    rest = "" if len(bounds) < 9 else f" of {len(bounds)} with checksum {zlib.crc32(repr(bounds).encode()):08x}"
    return f"({', '.join(map(str, few))}){rest}"
