"""Launches of flash attention's kernels for Hopper: which calls they take, and how these are cut into tiles.

They take 16-bit tensors whose rows the tensor memory accelerator can copy, with 33 to 256 features (what is
missing to 64, 128 or 256 is filled with zeros), with any window, cap, sink or lengths, and any number of heads to
a key head. Packed sequences, keys in pages, scales that are not positive and short backward loops stay with the
kernels for every GPU (`suit`), and so do calls of few queries (decoding) with a window, cap, sink or lengths.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

from warploom.device.hopper.attention import Window, Work
from warploom.device.hopper.pipeline import NARROW_HEAD, ROWS, SplitStrides
from warploom.ops.flash_attention.configs import HOPPER, HOPPER_PARTS, HOPPER_SMALLER, HOPPER_TERMS, HopperTiles
from warploom.ops.flash_attention.kernels.hopper import backward, backward_shared_tiles, forward
from warploom.ops.flash_attention.launches.tiling import strides_of
from warploom.ops.flash_attention.problem import (
    HOPPER_MULTIPROCESSORS,
    L2_SHARE,
    LOG2_E,
    Costs,
    Mask,
    Shape,
    best_splits,
    bounds,
    in_powers_of_two,
    loop_steps,
    programs_at_once,
)
from warploom.runtime.launch import INTERPRETED, Boxes, Launch, architecture, can_be_copied

Tensor = torch.Tensor

_ROWS = ROWS.value
_LEAST_FEATURES = 32  # up to here, tiles of 64 features would be half empty

_SMALLER_STEP = 0.81
"""Of the time of a step with three groups, whose tiles take the time of one more step to start; from 2 and 4 × 16
heads of 1024 and 2048 tokens on an H200."""

COSTS = {"forward": Costs(6, 5, 5e5), "key": Costs(1.5, 2, 2e5), "query": Costs(0.5, 3, 3e5)}
"""Fitted to one head of 1024 … 65536 tokens on an H200: what they choose takes at most 1.06 times as long as the
best number of splits, for the gradient of queries 1.17."""

_NARROW_WINDOW = 4096
"""Keys of a window up to which the smaller tiles are taken, which hold fewer keys beyond their queries' windows."""

FEW = 64
"""Queries of a key head (tokens times heads that read it) up to which a forward with options is a decoding step."""

_TOGETHER = 4.0
"""Tiles of keys for each multiprocessor from which on one kernel forms all gradients: programs that add to the same
queries wait for each other, and with fewer tiles long loops begin at the end."""
_EVEN = 0.45
"""This share of them is enough where all loops are equally long, as in full attention: 1.8 tiles."""

_SHORT = 2048  # backward loops that would be split and are shorter than this stay with the kernels for every GPU

DESCRIBED = {
    "forward": ("q_desc", "k_desc", "v_desc", "out"),
    "key": ("q_desc", "k_desc", "v_desc", "do_desc", "dk", "dv"),
    "query": ("q_desc", "k_desc", "v_desc", "do_desc", "dq"),
    "backward": ("q_desc", "k_desc", "v_desc", "do_desc", "dk", "dv", "added"),
}
"""Parameters that are described, the results as long as they are whole."""
_LOOPED = {
    "forward": ("k_desc", "v_desc"),
    "key": ("q_desc", "do_desc"),
    "query": ("k_desc", "v_desc"),
    "backward": ("q_desc", "do_desc"),
}
"""Those that a loop goes over; a group of warps owns rows of the others."""


class Plan(NamedTuple):
    """A launch of a kernel, and into how many splits it cuts loops."""

    launch: Launch
    splits: int
    counted: bool  # whether its tiles are counted, with counters that must be zero


def _width(shape: Shape) -> int:
    """Features of a tile."""
    features = max(shape.head_dim, shape.value_dim)
    return next(width for width in (64, 128, 256) if features <= width)


def _tiles(name: str, shape: Shape, mask: Mask) -> HopperTiles:
    width = _width(shape)
    tiles = HOPPER[name][width]
    if width != 64 or name not in HOPPER_SMALLER:
        return tiles
    smaller, programs = HOPPER_SMALLER[name], HOPPER_MULTIPROCESSORS
    count, more = (
        -(-shape.tokens // (x.groups * _ROWS)) * shape.batch_size * shape.heads for x in (tiles, smaller)
    )
    if None not in (mask.left, mask.right) and min(sum(bounds(shape, mask)), shape.keys) < _NARROW_WINDOW:
        return smaller
    if mask.right is None and mask.left is None:  # loops are equal, and so is every program's share: whole waves
        steps = -(-shape.keys // tiles.box)
        time = -(-count // programs) * (steps + 1)
        shorter = -(-more // programs) * steps * _SMALLER_STEP
        whole = name == "forward" and _best_splits(name, shape, mask, tiles, programs) == 1
        return smaller if whole and shorter < time else tiles
    few = 2 * programs if name == "forward" else programs // 2
    return smaller if count < few or (name == "forward" and shape.keys < 4096) else tiles


def queries_of_a_sum(shape: Shape) -> int:
    """Queries of the tiles in which ``backward`` adds up their gradients."""
    return HOPPER["backward"][_width(shape)].box


def _blocks(name: str, shape: Shape, block: int) -> tuple[int, int]:
    """Tiles of ``block`` rows of a kernel along the sequence, and along batch entries and heads."""
    if name in ("key", "backward"):
        return -(-shape.keys // block), shape.batch_size * shape.key_heads
    return -(-shape.tokens // block), shape.batch_size * shape.heads


def suit(name: str, shape: Shape, mask: Mask, scale: float, *tensors: Tensor) -> bool:
    """Whether the kernel ``name`` takes a call with these tensors, apart from their addresses."""
    first = tensors[0]
    if INTERPRETED or architecture(first.device) != 90:
        return False
    if mask.cu_seqlens_q is not None or mask.block_table is not None or scale <= 0:
        return False
    if not _LEAST_FEATURES < max(shape.head_dim, shape.value_dim) <= max(HOPPER[name]):
        return False
    if any(t.dtype not in (torch.float16, torch.bfloat16) or t.dtype != first.dtype for t in tensors):
        return False
    blocks, rows = _blocks(name, shape, _tiles(name, shape, mask).groups * _ROWS)
    looped = shape.tokens if name in ("key", "backward") else shape.keys
    if name != "forward" and looped < _SHORT and blocks * rows < programs_at_once(first.device) // 2:
        return False
    return all(map(can_be_copied, tensors))


def _suit_together(shape: Shape, mask: Mask, device: torch.device) -> bool:
    """Whether one kernel for all gradients is faster than two."""
    width = max(shape.head_dim, shape.value_dim)
    if width > NARROW_HEAD.value:
        return False
    blocks, rows = _blocks("backward", shape, HOPPER["backward"][_width(shape)].groups * _ROWS)
    least = _TOGETHER * (_EVEN if mask.left is None and mask.right is None else 1)
    return blocks * rows >= least * programs_at_once(device)


def splits_of(name: str, shape: Shape, mask: Mask, device: torch.device) -> int:
    """Into how many splits loops are cut."""
    return _best_splits(name, shape, mask, _tiles(name, shape, mask), programs_at_once(device))


def _best_splits(name: str, shape: Shape, mask: Mask, tiles: HopperTiles, programs: int) -> int:
    """Into how many splits loops are best cut with such tiles."""
    steps = loop_steps(name, shape, mask, tiles.groups * _ROWS, tiles.box)
    rows = shape.batch_size * (shape.key_heads if name == "key" else shape.heads)
    elements = shape.batch_size * max(
        shape.tokens * shape.heads * (shape.value_dim if name == "forward" else shape.head_dim),
        shape.keys * shape.key_heads * (shape.head_dim + shape.value_dim),
    )
    return best_splits(steps, rows, programs, elements, COSTS[name])


def _work(name: str, shape: Shape, mask: Mask, tiles: HopperTiles, splits: int, itemsize: int) -> Work:
    blocks, rows = _blocks(name, shape, tiles.groups * _ROWS)
    # Heads are taken in sections: see `kernels.forward.program_order`.
    length = shape.keys if name in ("forward", "query") else shape.tokens
    head_bytes = length * (shape.head_dim + shape.value_dim) * itemsize
    if name == "backward":  # and the sums of their gradients
        head_bytes += length * shape.head_dim * 4
    section = max(L2_SHARE // head_bytes, 1) * (shape.group if name in ("forward", "query") else 1)
    right = bounds(shape, mask)[1]
    return Work(shape.tokens, shape.keys, shape.heads, shape.group, rows, blocks, min(section, rows), splits, right)


def _boxes(name: str, tensors: Iterable[Tensor], tiles: HopperTiles, width: int) -> dict[str, Any]:
    """Descriptors of the tensors of `DESCRIBED`, by name."""
    return {
        each: Boxes(x, (0, 2, 1, 3), (1, 1, tiles.box if each in _LOOPED[name] else _ROWS, width))
        for each, x in zip(DESCRIBED[name], tensors)
    }


def _counted(name: str, mask: Mask, tiles: int, programs: int) -> bool:
    """Whether programs take tiles from a counter, which must be zero."""
    causal, window, lengths = (x is not None for x in (mask.right, mask.left, mask.seqused_k))
    if name == "forward" and forward.loops_are_even(causal, window, lengths):
        return bool(forward.are_counted.fn(tiles, programs))
    return tiles > programs


def plan(
    name: str, shape: Shape, mask: Mask, scale: float, tensors: tuple[Tensor, ...], softcap: float | None = None
) -> Plan | None:
    """The launch of a kernel, ``forward``, ``key``, ``query`` or ``backward``, if it suits.

    ``tensors``, (q, k, v, out), (q, k, v, grad, dk, dv) or (q, k, v, grad, dq), are like those that it will be
    launched on; if loops are split, results will be parts, all in one float32 tensor, each in its result's memory
    order. Behind them come lse and statistics, or lse and δ, then counters, lengths of entries, and in the forward
    the sink. For ``backward`` they are (q, k, v, grad, dk, dv) and what is added up to dq (B, H, N, D), in float32;
    how many tiles were added comes behind the counters.
    """
    together = name == "backward"
    if together and not _suit_together(shape, mask, tensors[0].device):
        return None
    given = tensors[:-1] if together else tensors  # the last has another dtype
    if not suit(name, shape, mask, scale, *given):
        return None
    width, tiles = _width(shape), _tiles(name, shape, mask)
    splits = 1 if together else splits_of(name, shape, mask, tensors[0].device)
    work = _work(name, shape, mask, tiles, splits, tensors[0].element_size())
    results = dict(
        list(zip(DESCRIBED[name], tensors[:-1] if together else tensors))[3 if name == "forward" else 4 :]
    )
    whole = len(DESCRIBED[name]) - together
    boxes = _boxes(name, tensors[: whole if splits == 1 else whole - len(results)], tiles, width)
    strides: dict[str, Any] = {
        f"{each}_strides": SplitStrides(*((x.numel(), *x.stride()[:3], x.shape[3]) if splits > 1 else [0] * 5))
        for each, x in results.items()
    }
    rest: dict[str, Any] = {"GROUPS": tiles.groups}
    split: dict[str, Any] = {"SPLIT": splits > 1}
    function: Any = forward.hopper_forward_kernel
    if name != "forward":
        rest["grad_scale"] = scale
        function = backward.hopper_key_kernel if name == "key" else backward.hopper_query_kernel
    if together:
        boxes["added"] = Boxes(tensors[-1], (0, 1, 2, 3), (1, 1, _ROWS, _ROWS))
        strides, split = {}, {}
        rest["PARTS"] = HOPPER_PARTS[width]
        function = backward.hopper_backward_kernel
    if name == "key" and width > NARROW_HEAD.value:
        function = backward_shared_tiles.hopper_shared_key_kernel
        rest = {"grad_scale": scale, "inverse": None, "TERMS": 1}
    last: tuple[str, ...] = ("lse", "delta", "counters", "seqused_k")
    if name == "forward":
        last = ("lse", "statistics", "counter", "seqused_k", "sink")
    elif together:
        last = ("lse", "delta", "counters", "tiles_added", "seqused_k")
    count = work.blocks * work.rows * splits
    programs = min(programs_at_once(tensors[0].device), count)
    launch = Launch(
        function,
        programs,
        takes=(*DESCRIBED[name], *last),
        pdl=name != "forward",
        work=work, window=None if mask.left is None else Window(bounds(shape, mask)[0]),
        scale=scale * LOG2_E if softcap is None else scale / softcap,
        CAUSAL=mask.right is not None, SOFTCAP=None if softcap is None else softcap * LOG2_E,
        STAGES=tiles.stages, **rest, **split, **boxes, **strides,
    )  # fmt: skip
    return Plan(launch, splits, together or _counted(name, mask, count, programs))


_MOST_STRIDE = 2**31  # strides and places of rows in results travel in 32 bits

TERMS_COSTS = Costs(1, 2, 1e5)
_TERMS_SPLITS = (2, 3, 4, 6)
_TERMS_LEAST = 128
"""Fitted to one head of 512 … 8192 tokens with 64 and 128 features on an H200: where two splits of every loop or
more run at the same time, as many as do, up to six, of so many rows at least of the longest loop."""


def suit_terms(shape: Shape, terms: int, device: torch.device, results: Iterable[Tensor]) -> bool:
    """Whether the backward kernels for factors in terms take a call that is plain otherwise."""
    if INTERPRETED or architecture(device) != 90 or shape.block_d not in HOPPER_TERMS[terms]:
        return False
    rows = max(shape.tokens, shape.keys)
    return all(s.f == 1 and max(s.b, rows * s.n, s.h) < _MOST_STRIDE for s in map(strides_of, results))


def _splits_of_terms(steps: list[int], step: int, rows: int, programs: int, elements: int) -> int:
    """Into how many splits loops with steps of ``step`` rows are cut; see `problem.best_splits`."""
    most = min(programs // (len(steps) * rows), max(steps) * step // _TERMS_LEAST)
    fit = [splits for splits in _TERMS_SPLITS if splits <= most]
    return max(fit) if fit else best_splits(steps, rows, programs, elements, TERMS_COSTS)


def plan_terms(
    name: str,
    shape: Shape,
    mask: Mask,
    scale: float,
    factors: tuple[Tensor, ...],
    terms: int,
    results: dict[str, Tensor],
    device: torch.device,
) -> Plan | None:
    """The launch of a backward kernel, ``key`` or ``query``, on terms of q, k, v and the gradient, if it suits.

    ``factors`` are like one term of each. Behind all terms come the results, in float32, or their parts, then
    lse, δ, inverse and counters.
    """
    if not suit_terms(shape, terms, device, results.values()):
        return None
    tiles = HOPPER_TERMS[terms][shape.block_d]
    programs = programs_at_once(device)
    steps = loop_steps(name, shape, mask, _ROWS, tiles.box)
    rows = _blocks(name, shape, _ROWS)[1]
    splits = _splits_of_terms(steps, tiles.box, rows, programs, sum(x.numel() for x in results.values()))
    work = _work(name, shape, mask, tiles, splits, 2 * terms)
    strides: dict[str, Any] = {
        f"{each}_strides": SplitStrides(x.numel() if splits > 1 else 0, *strides_of(x)[:3], x.shape[3])
        for each, x in results.items()
    }
    split: dict[str, Any] = {}
    takes = (*DESCRIBED[name], "lse", "delta", "inverse", "counters")
    if name == "key":
        split, takes = {"SPLIT": True, "SOFTCAP": None, "window": None}, (*takes, "seqused_k")
    count = work.blocks * rows * splits
    kernels = backward_shared_tiles
    launch = Launch(
        kernels.hopper_shared_key_kernel if name == "key" else kernels.hopper_shared_query_kernel,
        min(programs, count),
        takes=takes,
        pdl=True,
        work=work, scale=in_powers_of_two(scale), grad_scale=scale,
        CAUSAL=mask.right is not None, TERMS=terms, STAGES=tiles.stages, **split, **strides,
        **_boxes(name, (x.repeat(terms, 1, 1, 1) for x in factors), tiles, shape.block_d),
    )  # fmt: skip
    return Plan(launch, splits, programs < count)
