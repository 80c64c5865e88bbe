"""What ranks tell each other before they compute: that their calls fit, so that an error is everybody's."""

from __future__ import annotations

import functools
import itertools
import zlib
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.weak import WeakTensorKeyDictionary

from warploom import errors
from warploom.errors import ArgumentError, DeviceError, DtypeError, ShapeError, WarploomError, fault, shape_of

Tensor = torch.Tensor
Bounds = tuple[int, ...]
"""Where packed sequences begin and end, ``0 = c₀ ≤ … ≤ c_S``."""

all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""Tensors of all ranks one behind the other; the second is its name in versions of PyTorch before 2.13."""

_MESSAGE = 1024  # bytes, of which the first eight are a length
_hosts: dict[str, tuple[Any, Any]] = {}  # by name: a group, and the same ranks for messages between hosts
_groups: dict[str, Any] = {}
_bounds: Any = WeakTensorKeyDictionary()


def group_of(function: str, mesh: object) -> Any:
    """The process group of a mesh of one dimension that this rank is in.

    Raises:
        DtypeError: It is no mesh.
        ArgumentError: It has more dimensions, or other ranks only.
    """
    if not isinstance(mesh, DeviceMesh):
        raise fault(DtypeError, function, "mesh", "a DeviceMesh", type(mesh).__name__)
    if mesh.ndim != 1:
        names = ", ".join(mesh.mesh_dim_names or ())
        expected = 'of one dimension, such as mesh["cp"]'
        raise fault(
            ArgumentError, function, "mesh", expected, f"{mesh.ndim} dimensions" + f" ({names})" * bool(names)
        )
    if mesh.get_coordinate() is None:
        raise fault(ArgumentError, function, "mesh", "one that this rank is in", mesh)
    return _known(mesh)


def _known(mesh: DeviceMesh) -> Any:
    group = mesh.get_group()
    if not torch.compiler.is_compiling():  # PyTorch 2.11 cannot trace that a group is kept
        _groups[group.group_name] = group
    return group


def group_named(name: str) -> Any:
    """The group of this name that `group_of` has returned: operators of PyTorch know groups by name."""
    if name not in _groups:  # every call so far was compiled
        known: Any = dist.distributed_c10d
        _groups[name] = known._resolve_process_group(name)
    return _groups[name]


def check_device(function: str, mesh: DeviceMesh, argument: str, tensor: Tensor) -> None:
    """Raise unless a tensor is on a device of the mesh's kind.

    Raises:
        DeviceError: It is not.
    """
    if tensor.device.type != mesh.device_type:
        raise fault(DeviceError, function, argument, f"on a device of the mesh, {mesh.device_type}", tensor.device)


def _host_group(group: Any) -> Any:
    """A group of the same ranks whose messages are between hosts: waiting for one waits for no GPU."""
    if dist.get_backend(group) == "gloo":
        return group
    known = _hosts.get(group.group_name)
    if known is None or known[0] is not group:
        ranks = dist.get_process_group_ranks(group)
        host = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
        known = _hosts[group.group_name] = (group, host)
    return known[1]


def _exchange(group: Any, length: int, message: bytes) -> Tensor:
    """What every rank has to say, (W, ·) bytes."""
    mine = torch.zeros(_MESSAGE, dtype=torch.uint8)
    mine[:8] = torch.tensor([length]).view(torch.uint8)
    mine[8 : 8 + len(message)] = torch.frombuffer(bytearray(message), dtype=torch.uint8)
    host = _host_group(group)
    everyone = torch.empty(host.size() * _MESSAGE, dtype=torch.uint8)
    all_gather(everyone, mine, group=host)
    return everyone.view(-1, _MESSAGE)


@functools.lru_cache(256)
def _encoded(kind: str, text: str) -> bytes:
    """A call, or the name and the text of an error."""
    return f"{kind}|{text}".encode()[: _MESSAGE - 8]


def agree(group: Any, function: str, length: int, call: str) -> list[int]:
    """Compare this rank's call with those of the others, which call this too.

    Args:
        group: The ranks.
        function: The public function, for errors.
        length: Of this rank's part.
        call: What must be the same on every rank, in words.

    Returns:
        The length of every rank's part.

    Raises:
        WarploomError: Of the kind that a rank refused its own call with, on every rank.
        ArgumentError: Calls differ.
    """
    everyone = _exchange(group, length, _encoded(function, call))
    calls = everyone[:, 8:]
    if not torch.equal(calls, calls[group.rank()].expand_as(calls)):
        texts = [bytes(row.tolist()).rstrip(b"\0").decode(errors="replace").partition("|") for row in calls]
        for rank, (kind, _, text) in enumerate(texts):
            if kind in errors.__all__:
                raise getattr(errors, kind)(f"{text} (on rank {rank})")
        mine, other = texts[group.rank()], next(text for text in texts if text != texts[group.rank()])
        got = f"{other[0]}: {other[2]} on rank {texts.index(other)}"
        raise fault(ArgumentError, function, "a call", f"the same on every rank, {mine[0]}: {mine[2]}", got)
    return everyone[:, :8].contiguous().view(torch.int64).flatten().tolist()


def refuse(group: Any, error: WarploomError) -> None:
    """Let ranks that call `agree` raise the error of this one."""
    _exchange(group, 0, _encoded(type(error).__name__, str(error)))


def check_lengths(function: str, argument: str, lengths: list[int], expected: list[int], layout: str) -> None:
    """Raise on every rank unless all have the parts that a layout gives them.

    Raises:
        ShapeError: They do not.
    """
    if lengths != expected:
        what = f"the ranks' parts of a {layout} layout of {sum(lengths)} tokens, of lengths {expected}"
        raise fault(ShapeError, function, argument, what, f"{lengths}")


def bounds_of(function: str, cu_seqlens: object) -> Bounds:
    """The bounds of packed sequences, read from the device once for each tensor.

    Raises:
        DtypeError: It is no tensor of int32 or int64.
        ShapeError: It is not ``(S + 1,)``.
    """
    if not isinstance(cu_seqlens, Tensor) or cu_seqlens.dtype not in (torch.int32, torch.int64):
        got = getattr(cu_seqlens, "dtype", type(cu_seqlens).__name__)
        raise fault(DtypeError, function, "cu_seqlens", "a tensor of int32, int64", got)
    if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 2:
        raise fault(ShapeError, function, "cu_seqlens", "(S + 1,) with S ≥ 1", shape_of(cu_seqlens))
    if cu_seqlens.is_inference():  # which does not say whether it has been changed
        return tuple(cu_seqlens.tolist())
    known = _bounds.get(cu_seqlens)
    if known is None or known[0] != cu_seqlens._version:
        known = (cu_seqlens._version, tuple(cu_seqlens.tolist()))
        _bounds[cu_seqlens] = known
    return known[1]  # type: ignore[no-any-return]


def check_bounds(function: str, bounds: Bounds, length: int) -> None:
    """Raise unless bounds are those of a whole sequence of a length.

    Raises:
        ArgumentError: They are not.
    """
    if bounds[0] != 0 or bounds[-1] != length or any(a > b for a, b in itertools.pairwise(bounds)):
        expected = (
            f"the bounds of the whole, from 0 to {length}, the tokens of all ranks, none below the one before"
        )
        raise fault(ArgumentError, function, "cu_seqlens", expected, shown(bounds))


def shown(bounds: Bounds | None) -> str:
    """Bounds as an error shows them: the first and the last, and a checksum of all where there are many."""
    if bounds is None:
        return "None"
    few = bounds if len(bounds) < 9 else (*bounds[:4], "…", bounds[-1])
    rest = "" if len(bounds) < 9 else f" of {len(bounds)} with checksum {zlib.crc32(repr(bounds).encode()):08x}"
    return f"({', '.join(map(str, few))}){rest}"
