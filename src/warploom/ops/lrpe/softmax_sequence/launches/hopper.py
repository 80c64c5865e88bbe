"""Launchers of LRPE with softmax over the sequence for Hopper: which calls they take, and how they are cut.

They take 16-bit tensors whose rows the tensor memory accelerator can copy, and positions that count from an
offset or lie in a grid of two or three axes, behind a prefix or not. The gradient of frequencies they make where
tokens stand in a row. All other calls stay with the kernels for every GPU.
"""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import torch

from warploom.ops.lrpe.configs import HopperTile, hopper_tile
from warploom.ops.lrpe.launches import Positions, inverse_of
from warploom.ops.lrpe.softmax_sequence.kernels.hopper import sequence
from warploom.ops.lrpe.softmax_sequence.kernels.hopper.angles import MOST_AXES, Grid
from warploom.ops.lrpe.softmax_sequence.kernels.hopper.sequence import UNIT
from warploom.runtime.launch import INTERPRETED, Boxes, Launch, architecture, can_be_copied, multiprocessors

Tensor = torch.Tensor

_UNIT = UNIT.value
_BLOCKS = (8, 16, 32)  # parts whose sums are read at once
_TAGS = 2**31 - 1  # an int32 that is positive
_MOST_BOX = 256  # tokens that are copied at once
_FAR = 2**31  # what no number in the kernels reaches: strides in units, and places of frequencies


PATIENCE = 10_000
"""Polls after which a program no longer waits for sums: a few milliseconds."""

_PROGRAMS = 2
"""Programs of any tile that a multiprocessor holds at once, at least: 75 KB, 128 registers of 128 threads."""


class Words:
    """Memory in which parts of a strip tell each other their sums.

    A launch tells its words from those of earlier ones by a tag that no other has. Each stream has memory of its
    own, since two launches at once would overwrite each other's. A CUDA graph that is being captured gets words
    that each replay makes zero, because all its replays bear the same tag. Where allocations go to a pool of
    somebody's own, who may take it back or hand it out again (as PyTorch's graph trees do when they warm up), words
    are for one launch.
    """

    def __init__(self) -> None:
        self.known: dict[tuple[int, int], Tensor] = {}  # by device and stream
        self.launches = itertools.count()

    def take(self, count: int, near: Tensor) -> tuple[Tensor, int]:
        """So many words on the device of a tensor, for a launch on the current stream, and its tag."""
        launch = next(self.launches)
        tag = 1 + launch % _TAGS
        if not near.is_cuda or torch.cuda.is_current_stream_capturing():
            return near.new_zeros(count, dtype=torch.int64), tag
        if tag == 1 and launch:  # tags begin anew, and must not meet the words they left
            self.known.clear()
        key = near.get_device(), torch.cuda.current_stream(near.device).cuda_stream
        words = self.known.get(key)
        if words is None or words.numel() < count:
            words = near.new_zeros(count, dtype=torch.int64)
            if _is_in_common_pool(words):
                self.known[key] = words
        return words, tag


def _is_in_common_pool(tensor: Tensor) -> bool:
    """Whether a tensor of a GPU lies in the pool that PyTorch allocates from by default. Takes milliseconds."""
    if torch.cuda.get_allocator_backend() != "native":  # others may not say
        return False
    address = tensor.data_ptr()
    for segment in torch.cuda.memory_snapshot():
        if segment["address"] <= address < segment["address"] + segment["total_size"]:
            return tuple(segment["segment_pool_id"]) == (0, 0)
    return False


_words = Words()


class Plan(NamedTuple):
    """A launch, and how many words its parts tell each other."""

    launch: Launch
    words: int

    def __call__(
        self,
        described: tuple[Tensor, ...],
        out: Tensor,
        statistics: Tensor,
        theta: Tensor,
        offset: int,
        dtheta: Tensor | None,
    ) -> None:
        """Launch on ``described`` tensors, x and in a backward the gradient. ``dtheta``: for its partial sums."""
        words, tag = _words.take(self.words, out)
        sums = () if len(described) == 1 else (dtheta,)
        self.launch(*described, *described, out, statistics, words, theta, *sums, offset, tag, PATIENCE)


def suits(
    kind: str,
    positions: Positions,
    exact: bool,
    features: int,
    x: Tensor,
    theta: Tensor,
    grad: Tensor | None,
    out: Tensor,
) -> HopperTile | None:
    """The tile with which the kernels for Hopper take a call, apart from addresses and offset; None if they do not.

    ``exact``: for theta's gradient. ``features``: angles of a head.
    """
    if INTERPRETED or architecture(x.device) != 90 or kind == "interleaved" or x.dim() != 4:
        return None
    if x.element_size() != 2:
        return None
    counted = positions.ids is None and positions.offsets is None and positions.cu_seqlens is None
    axes = positions.axes()
    if not counted or axes > MOST_AXES.value:
        return None
    tensors = (x, out) if grad is None else (x, grad, out)
    tile = hopper_tile(kind, grad is not None, x.shape[1], axes, exact)
    if tile is None or features % tile.width or any(t.dtype != x.dtype or not can_be_copied(t) for t in tensors):
        return None
    if any(stride >= _FAR * _UNIT for t in tensors for stride in t.stride()):
        return None
    if sum((size - 1) * stride for size, stride in zip(theta.shape, theta.stride())) >= _FAR:
        return None
    parts = -(-x.shape[1] // tile.tokens)
    # In either order of programs, the parts of a strip are in flight together if those of all strips of a head are.
    fits = not x.is_cuda or features // tile.width * parts <= _PROGRAMS * multiprocessors(x.device)
    return tile if fits and parts <= _BLOCKS[-1] ** 2 else None


def plan(
    tile: HopperTile,
    kind: str,
    positions: Positions,
    exact: bool,
    features: int,
    x: Tensor,
    theta: Tensor,
    grad: Tensor | None,
    out: Tensor,
) -> Plan:
    """The launch of the kernel on tensors like these; ``tile`` from `suits`."""
    batch, tokens, heads, _ = x.shape
    strips, parts = features // tile.width, -(-tokens // tile.tokens)
    block = next((size for size in _BLOCKS if parts <= size), None)
    block = block or next(size for size in _BLOCKS if parts <= size**2)  # two levels: as few as suffice
    kernel, described, sums = sequence.hopper_sequence_forward_kernel, {"x": x}, []
    if grad is not None:
        kernel, described, sums = sequence.hopper_sequence_backward_kernel, {"x": x, "grad": grad}, ["dtheta"]
    box = (0, 2, 1, 3), (1, 1, min(tile.tokens, _MOST_BOX), tile.width)
    descriptors: dict[str, Any] = {f"{name}_desc": Boxes(tensor, *box) for name, tensor in described.items()}
    strides: dict[str, Any] = {
        f"{name}_strides": sequence.Strides(*(stride // _UNIT for stride in tensor.stride()[:3]))
        for name, tensor in (*described.items(), ("out", out))
    }
    inner = (*positions.grid[1:], 1, 1)[:2]
    theta_u = theta.stride(0) if theta.dim() == 2 and theta.shape[0] > 1 else 0
    axes = positions.axes()
    launch = Launch(
        kernel,
        batch * heads * strips * parts,
        takes=(*descriptors, *described, "out", "statistics", "words", "theta", *sums, "offset", "tag", "patience"),
        num_warps=tile.warps,
        registers=tile.registers,
        sizes=sequence.Sizes(inverse_of(parts), inverse_of(heads), tokens, heads, parts),
        theta_strides=sequence.ThetaStrides(theta_u, theta.stride(-1)),
        grid=Grid(positions.prefix, *inner, *map(inverse_of, inner)),
        spec=sequence.Spec(kind, axes, features, theta.shape[-1], axes == 1 and positions.prefix > 0, exact),
        tile=sequence.Tile(tile.tokens, tile.piece, tile.vec, block, parts > block, tile.parts_first),
        **descriptors,
        **strides,
    )
    members = 1 if kind == "cosine" else 2
    rows = parts + -(-parts // block)  # of words: parts, and blocks of them
    return Plan(launch, batch * heads * strips * rows * members * tile.width)
