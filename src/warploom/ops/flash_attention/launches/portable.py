"""Launchers of flash attention's kernels: sizes, strides, tiles, splits. No validation, no autograd.

What a call allocates and launches is its plan, which depends on shapes, strides, dtypes and options alone. Plans
are kept by whoever calls (`warploom.runtime.plans`): a call like an earlier one only allocates and launches.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from warploom.ops.flash_attention.configs import Configuration, are_few_and_short, are_tiny, configuration
from warploom.ops.flash_attention.kernels.backward import key_kernel, prepare_kernel, query_kernel, sum_kernel
from warploom.ops.flash_attention.kernels.forward import combine_kernel, forward_kernel, pieces_kernel
from warploom.ops.flash_attention.launches import small
from warploom.ops.flash_attention.launches.order import launch_forward, launch_prepare, launch_walk
from warploom.ops.flash_attention.problem import (
    L2_SHARE,
    Access,
    Costs,
    Geometry,
    Mask,
    access_to,
    best_parts,
    bounds,
    in_powers_of_two,
    is_plain,
    programs_at_once,
    walks,
)
from warploom.runtime.launch import (
    ALIGNMENT,
    INTERPRETED,
    Dense,
    Launch,
    architecture,
    may_start_early,
    multiprocessors,
)
from warploom.runtime.memory_order import layout_of
from warploom.runtime.plans import Plans

if TYPE_CHECKING:
    from warploom.ops.flash_attention.launches import hopper

Tensor = torch.Tensor

PRODUCTS = {"highest": "bf16x6", "high": "tf32", "medium": "bf16"}
"""How float32 factors are multiplied, for each of PyTorch's names of a precision."""

_LONG: dict[str, dict[str, dict[int, int]]] = {
    "pieces": {
        "forward": {16: 2048, 32: 2048, 64: 2048, 128: 2048},
        "backward": {16: 1024, 32: 1024, 64: 1024, 128: 512},
    },
    "pairs": {"forward": {64: 4096, 128: 512}, "backward": {64: 4096, 128: 512}},
}
"""Of float32 tensors of so many rows, by features, pieces are made once, before they are walked over; of shorter
ones, where they are used, and for ``high`` precision not at all."""

TICKETS = Dense.rows((2,), torch.int32)
"""By which programs take tiles on Hopper: one for each kernel of the backward, the first for the forward."""


def has_few_short_walks(kernel: str, geometry: Geometry, mask: Mask, scale: float, q: Tensor) -> bool:
    """Whether a kernel's walks are few and short: see `configs.are_few_and_short`."""
    features, plain = max(geometry.block_d, geometry.block_e), is_plain(geometry, mask, scale)
    extent = _extent(kernel, geometry, q)
    return are_few_and_short(kernel, architecture(q.device), q.dtype, features, plain, *extent)


def _extent(kernel: str, geometry: Geometry, q: Tensor) -> tuple[int, int, int]:
    """Tiles of 64 rows of a kernel, rows that they walk over, and how many can run at the same time."""
    own, walk, heads = geometry.tokens, geometry.keys, geometry.heads
    if kernel == "key":
        own, walk, heads = geometry.keys, geometry.tokens * geometry.group, geometry.key_heads
    return -(-own // 64) * geometry.entries * heads, walk, programs_at_once(q.device)


def _tiles(kernel: str, geometry: Geometry, mask: Mask, scale: float, product: str, q: Tensor) -> Configuration:
    features, plain = max(geometry.block_d, geometry.block_e), is_plain(geometry, mask, scale)
    few = has_few_short_walks(kernel, geometry, mask, scale, q)
    tiny = are_tiny(kernel, *_extent(kernel, geometry, q))
    return configuration(kernel, architecture(q.device), q.dtype, features, product, plain, few, tiny)


def _geometry(q: Tensor, k: Tensor, v: Tensor) -> Geometry:
    entries, tokens, heads, features = q.shape
    return Geometry(entries, tokens, k.shape[1], heads, k.shape[2], features, v.shape[3])


class _Grid(NamedTuple):
    """How many programs walk: tiles of queries (or keys) of every head, and parts of each walk."""

    blocks: int
    rows: int
    splits: int
    short: bool  # whether walks are so short that one loop is faster than three

    @property
    def programs(self) -> int:
        """All of them."""
        return self.blocks * self.rows * self.splits


_RATES = {"pieces": 0.5, "pairs": 1.0, "cut": 0.2, "bf16x6": 0.25, "tf32": 0.7, "bf16": 2.0, "ieee": 0.1}
_HALF_RATE = 3.0
"""What a multiprocessor does of float32 products, and of those of 16 bits: 10¹² operations a second, about."""

_PRODUCTS = {"forward": 2, "key": 4, "query": 3}
_LATENCY_US = 0.5  # of a step of up to 64 rows, besides its operations
_START_US = 2.0  # of a walk
_MERGE_US = 1.5  # to launch what merges parts
_SHORT = 8
"""Steps of all walks together, for each multiprocessor, up to which one loop with masks is faster than three."""


def _costs(kernel: str, geometry: Geometry, tiles: Configuration, product: str, dtype: torch.dtype) -> Costs:
    """What walks of the kernels for every GPU cost, from the time that a step takes on an H200, roughly."""
    rate = _RATES[product] if dtype == torch.float32 else _HALF_RATE
    features = (geometry.block_d + geometry.block_e) / 2
    rows = tiles.block_m if kernel == "key" else tiles.block_n
    step_us = _PRODUCTS[kernel] * 2e-6 * tiles.block_m * tiles.block_n * features / rate
    step_us += _LATENCY_US * max(rows / 64, 1)
    merged = 2e5 if kernel == "forward" and dtype != torch.float32 else 1e5  # elements a microsecond
    return Costs(_START_US / step_us, _MERGE_US / step_us, merged * step_us)


def _grid(
    kernel: str, geometry: Geometry, mask: Mask, tiles: Configuration, product: str, q: Tensor, elements: int
) -> _Grid:
    """How a kernel for every GPU cuts a call with results of so many elements."""
    own, step = (tiles.block_n, tiles.block_m) if kernel == "key" else (tiles.block_m, tiles.block_n)
    length, heads = (geometry.keys, geometry.key_heads) if kernel == "key" else (geometry.tokens, geometry.heads)
    rows = geometry.entries * heads
    cu_seqlens = mask.cu_seqlens_k if kernel == "key" else mask.cu_seqlens_q
    if cu_seqlens is not None:
        # See device/packed.py: the lengths of packed sequences are known on the device alone.
        blocks = length // own + cu_seqlens.shape[0] - 1
        steps = walks(kernel, geometry, Mask(), length, step) * blocks  # as if there were one sequence
    else:
        steps = walks(kernel, geometry, mask, own, step)
    costs = _costs(kernel, geometry, tiles, product, q.dtype)
    programs = multiprocessors(q.device)
    beside = _beside(tiles, geometry, q.dtype)
    parts = 1 if tiles.whole else best_parts(steps, rows, beside * programs, elements, costs)
    return _Grid(len(steps), rows, parts, sum(steps) * rows <= _SHORT * programs)


def _beside(tiles: Configuration, geometry: Geometry, dtype: torch.dtype) -> int:
    """How many programs share a multiprocessor, where they hide each other's latency."""
    if tiles.warps > 4 or (dtype == torch.float32 and geometry.block_d > 64):
        return 1
    return 2 if dtype == torch.float32 else 3


def _numbers(
    geometry: Geometry, mask: Mask, scale: float, grid: _Grid, itemsize: int, heads_per_walk: int
) -> dict[str, Any]:
    """Numbers that all kernels take."""
    features = geometry.features + geometry.value_features
    head_bytes = geometry.keys * features * itemsize
    section = max(L2_SHARE // head_bytes, 1) * heads_per_walk
    cu_q, cu_k = mask.cu_seqlens_q, mask.cu_seqlens_k
    left, right = bounds(geometry, mask)
    return {
        "tokens": geometry.tokens, "keys": geometry.keys, "heads": geometry.heads, "group": geometry.group,
        "blocks": grid.blocks, "section": min(section, grid.rows), "splits": grid.splits,
        "sequences": 0 if cu_q is None else cu_q.shape[0] - 1,
        "cu_q_stride": 0 if cu_q is None else cu_q.stride(0),
        "cu_k_stride": 0 if cu_k is None else cu_k.stride(0),
        "left": left, "right": right, "scale": in_powers_of_two(scale), "entries": geometry.entries,
    }  # fmt: skip


def _precision(q: Tensor, precision: str | None) -> str:
    """The precision of a call's products: that asked for, PyTorch's setting, or the one there is for 16 bits."""
    if q.dtype != torch.float32:
        return "highest"
    return precision or torch.get_float32_matmul_precision()


def _product(way: str, q: Tensor, geometry: Geometry, mask: Mask, scale: float, precision: str) -> str:
    """How factors are multiplied, ``forward`` or ``backward``: see `warploom.device.product`."""
    if precision == "medium" or q.dtype != torch.float32:
        return PRODUCTS[precision]
    wide = max(geometry.block_d, geometry.block_e) > 128
    if wide and precision == "highest":
        return "ieee"  # three parts of such rows do not fit in registers
    if wide or not (architecture(q.device) == 90 and is_plain(geometry, mask, scale)):
        return PRODUCTS[precision]
    pieces, short = ("pairs", PRODUCTS["high"]) if precision == "high" else ("pieces", "cut")
    least = _LONG[pieces][way].get(geometry.block_d)
    return short if least is None or min(geometry.tokens, geometry.keys) < least else pieces


def _constants(
    geometry: Geometry, mask: Mask, scale: float, access: Access, product: str, tiles: Configuration
) -> dict[str, Any]:
    """Constants that all kernels take."""
    return {
        "HAS_LEFT": mask.left is not None, "HAS_RIGHT": mask.right is not None, "NEGATIVE": scale < 0,
        "VEC": access.vec, "UNIT": access.unit, "WIDE": access.wide,
        "D": geometry.features, "E": geometry.value_features, "PRECISION": product,
        "BLOCK_M": tiles.block_m, "BLOCK_N": tiles.block_n,
        "BLOCK_D": geometry.block_d, "BLOCK_E": geometry.block_e,
    }  # fmt: skip


class _Pieces(NamedTuple):
    """What makes pieces of float32 tensors before the walks: of q, k and v, and in the backward of the gradient."""

    launch: Launch
    all: tuple[Dense | None, ...]  # those of each tensor
    like: tuple[Tensor, ...]  # one of each tensor, without memory

    def __call__(self, *tensors: Tensor | None) -> tuple[Tensor, ...]:
        """The pieces (three or two, …) of those of q, k, v and grad that are given."""
        pieces = [None if x is None or all is None else all.empty(x) for x, all in zip(tensors, self.all)]
        self.launch(*tensors, *pieces)
        return tuple(x for x in pieces if x is not None)


_PIECES = {"pieces": 3, "pairs": 2}
"""Of a factor, where they are made before they are walked over."""


def _plan_pieces(
    product: str, geometry: Geometry, q: Tensor, k: Tensor, v: Tensor, grad: Tensor | None, overlap: bool
) -> _Pieces:
    tensors = q, k, v, grad
    block_r = max(2048 // max(geometry.block_d, geometry.block_e), 1)
    blocks = [0 if x is None else -(-x.numel() // (x.shape[-1] * block_r)) for x in tensors]
    names = ("q", "k", "v", "grad")
    strides = {
        f"{name}_{axis}": stride
        for name, x in zip(names, tensors)
        for axis, stride in zip("bnhf", (0,) * 4 if x is None else x.stride())
    }
    launch = Launch(
        pieces_kernel,
        sum(blocks),
        takes=(*names, *(f"{name}_pieces" for name in names)),
        early=overlap,
        tokens=geometry.tokens, keys=geometry.keys, heads=geometry.heads, key_heads=geometry.key_heads,
        entries=geometry.entries, D=geometry.features, E=geometry.value_features, PIECES=_PIECES[product],
        BLOCK_R=block_r, BLOCK_D=geometry.block_d, BLOCK_E=geometry.block_e, OVERLAP=overlap, **strides,
    )  # fmt: skip
    given = [x for x in tensors if x is not None]
    return _Pieces(
        launch,
        tuple(None if x is None else Dense.rows((_PIECES[product], *x.shape), torch.bfloat16) for x in tensors),
        tuple(torch.empty(x.shape, dtype=torch.bfloat16, device="meta") for x in given),
    )


class _Forward(NamedTuple):
    """Plan of a forward."""

    out: Dense
    lse: Dense
    statistics: Dense
    launch: Launch | None  # None where there is nothing to attend with or to
    combine: Launch | None = None  # of the parts, where walks are split
    parts: tuple[Dense, ...] = ()  # of the output, all in one, and of the statistics
    counted: bool = False  # whether tiles are counted, with tickets that must be zero
    pieces: _Pieces | None = None  # of keys and values, where they are walked over in pieces


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask,
    scale: float,
    precision: str | None,
    plans: Plans,
    tickets: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Run the forward kernel.

    ``plans`` are those of earlier calls that were the same in all but addresses, what ``cu_seqlens`` hold, and
    precision. ``tickets``: `TICKETS` that are zero, if there are any already.

    Returns:
        Attention (B, N, Hq, E); lse (B, Hq, N) in float32; and what the backward computes the weights again from,
        (2, B, Hq, N) in float32.
    """
    precision = _precision(q, precision)
    aligned = _are_aligned(q, k, v)
    plan = plans.get((precision, aligned), plan_forward, q, k, v, mask, scale, precision, aligned)
    out = plan.out.empty(q)
    lse, statistics = plan.lse.empty(q), plan.statistics.empty(q)
    cu_seqlens = mask.cu_seqlens_q, mask.cu_seqlens_k
    if plan.launch is None:
        return out.zero_(), lse.fill_(-torch.inf), statistics.zero_()
    target, target_statistics = out, statistics
    if plan.combine is not None:
        target, target_statistics = (part.empty(q) for part in plan.parts)
    if plan.pieces:
        q, k, v = plan.pieces(q, k, v, None)
    if plan.launch.descriptions:
        if tickets is None:
            tickets = TICKETS.empty(q)
            if plan.counted:
                tickets.zero_()
        launch_forward(plan.launch, q, k, v, target, lse, target_statistics, tickets)
    else:
        plan.launch(q, k, v, target, lse if plan.combine is None else None, target_statistics, *cu_seqlens)
    if plan.combine is not None:
        plan.combine(target, target_statistics, out, lse, statistics)
    return out, lse, statistics


def _are_aligned(*tensors: Tensor) -> bool:
    """Whether the tensors' addresses suit descriptors, which is asked where kernels might use them."""
    if tensors[0].dtype == torch.float32 or architecture(tensors[0].device) != 90:
        return False
    bits = 0
    for tensor in tensors:
        bits |= tensor.data_ptr()
    return bits % ALIGNMENT == 0


def _tiled(
    name: str, geometry: Geometry, mask: Mask, scale: float, tensors: tuple[Tensor, ...]
) -> hopper.Plan | None:
    """The launch of the kernel for Hopper, if there is one and it takes the call."""
    if INTERPRETED:
        return None
    from warploom.ops.flash_attention.launches import hopper

    if not hopper.suit(name, geometry, mask, scale, *tensors):
        return None
    return hopper.plan(name, geometry, mask, scale, tensors)


def plan_forward(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float, precision: str, aligned: bool
) -> _Forward:
    """Plan of `forward`."""
    geometry = _geometry(q, k, v)
    out = layout_of(q, geometry.value_features)
    lse = (geometry.entries, geometry.heads, geometry.tokens)
    plan = _Forward(Dense.like(out), Dense.rows(lse, torch.float32), Dense.rows((2, *lse), torch.float32), None)
    if geometry.empty():
        return plan
    rows = geometry.entries * geometry.heads
    few = has_few_short_walks("forward", geometry, mask, scale, q)
    tiled = _tiled("forward", geometry, mask, scale, (q, k, v, out)) if aligned and not few else None
    if tiled is not None:
        plan = plan._replace(launch=tiled.launch, counted=tiled.counted)
        splits = tiled.parts
    else:
        product = _product("forward", q, geometry, mask, scale, precision)
        tiles = _tiles("forward", geometry, mask, scale, product, q)
        grid = _grid("forward", geometry, mask, tiles, product, q, out.numel())
        splits = grid.splits
        factors: tuple[Tensor, ...] = (q, k, v)
        if product in _PIECES:
            pieces = _plan_pieces(product, geometry, q, k, v, None, False)
            plan, factors = plan._replace(pieces=pieces), pieces.like
        access = access_to(*factors, out)
        launch = Launch(
            forward_kernel,
            grid.programs,
            takes=("q", "k", "v", "out", "lse", "statistics", "cu_seqlens_q", "cu_seqlens_k"),
            num_warps=tiles.warps,
            num_stages=tiles.stages,
            out_split=out.numel() // access.vec if splits > 1 else 0,  # from one part to the next
            SHORT=grid.short,
            OVERLAP=may_start_early(q.device),
            **_numbers(geometry, mask, scale, grid, q.itemsize, geometry.group),
            **_constants(geometry, mask, scale, access, product, tiles),
            **access.of("q", "k", "v", "out"),
        )
        plan = plan._replace(launch=launch)
    if splits == 1:
        return plan
    block_r = max(1024 // geometry.block_e, 1)
    lse_elements = rows * geometry.tokens
    early, access = may_start_early(q.device), access_to(out)
    combine = Launch(
        combine_kernel,
        -(-lse_elements // block_r),
        takes=("part", "part_statistics", "out", "lse", "statistics"),
        early=early,
        rows=lse_elements, tokens=geometry.tokens, heads=geometry.heads, splits=splits,
        out_split=out.numel() // access.vec, VEC=access.vec, UNIT=access.unit, E=geometry.value_features,
        BLOCK_R=block_r, BLOCK_E=geometry.block_e, EARLY=early, **access.of("out"),
    )  # fmt: skip
    sizes = ((splits * out.numel(),), (splits, 2, *lse))
    return plan._replace(combine=combine, parts=tuple(Dense.rows(size, torch.float32) for size in sizes))


class _Walk(NamedTuple):
    """Plan of one of the backward kernels."""

    kernel: str  # of `_RESULTS`
    launch: Launch
    splits: int
    parts: tuple[Dense, ...] = ()  # of each result, all in one, where walks are split


_RESULTS = {"key": (1, 2), "query": (0,)}
"""Which of the gradients of q, k and v a backward kernel writes, in the order of its parameters."""


class _Backward(NamedTuple):
    """Plan of a backward."""

    results: tuple[Dense, Dense, Dense]  # dq, dk, dv
    rows: Dense  # a number for each query and head
    prepare: Launch | None = None  # None where there is nothing to attend with or to
    walks: tuple[_Walk, ...] = ()
    few: Launch | None = None  # of the kernel for few short walks, instead of those
    pieces: _Pieces | None = None  # of q, k, v and the gradient, where they are walked over in pieces
    counted: bool = False  # whether walks count their tiles, with tickets that the first kernel makes zero
    sums: Launch | None = None  # of the parts, where walks are split
    apart: bool = False  # whether gradients are made apart and copied to where they shall be


def backward(
    grad: Tensor,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    statistics: Tensor,
    mask: Mask,
    scale: float,
    precision: str | None,
    plans: Plans,
    results: tuple[Tensor, Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Run the backward kernels: gradients of ``q``, ``k`` and ``v``, each in the memory order of its tensor.

    ``grad`` (B, N, Hq, E) and ``grad_lse`` (B, Hq, N), which may be None for zero, have any strides; ``out`` and
    ``statistics`` are what `forward` returned for the other arguments. ``plans``: those that `forward` took.
    ``results``: where the gradients shall be written, with any strides.
    """
    precision = _precision(q, precision)
    # Strides, because what autograd saved may come back with others: from the host's memory, for one.
    aligned = _are_aligned(q, k, v, grad, *(results or ()))
    key = (
        precision, aligned, grad.dtype, grad.stride(),
        None if grad_lse is None else (grad_lse.dtype, grad_lse.stride()),
        q.stride(), k.stride(), v.stride(), out.stride(),
        None if results is None else (results[0].stride(), results[1].stride(), results[2].stride()),
    )  # fmt: skip
    plan = plans.get(key, plan_backward, grad, grad_lse, q, k, v, out, mask, scale, precision, aligned, results)
    if results is None or plan.apart:
        dq, dk, dv = (result.empty(q) for result in plan.results)
    else:
        dq, dk, dv = results
    if plan.prepare is None:
        return dq.zero_(), dk.zero_(), dv.zero_()
    # Two tensors, not two halves of one: the second half's alignment would depend on the length.
    shift, delta = plan.rows.empty(q), plan.rows.empty(q)
    inverse = plan.rows.empty(q) if q.dtype == torch.float32 else None
    tickets = TICKETS.empty(q) if plan.counted else None
    launch_prepare(plan.prepare, out, grad, statistics, grad_lse, shift, delta, inverse, tickets)
    if plan.few is not None:
        plan.few(q, k, v, grad, shift, delta, dq, dk, dv)
    numbers, gradients = (shift, delta, inverse), (dq, dk, dv)
    factors = (q, k, v, grad) if plan.pieces is None else plan.pieces(q, k, v, grad)
    # A walk starts where the one before leaves multiprocessors idle; sums are added up when all are done.
    parts: list[Tensor | None] = [None] * 3
    for walk in plan.walks:
        _walk(walk, factors, numbers, gradients, parts, mask, tickets)
    if plan.sums is not None:
        given = [(part, None if part is None else x) for x, part in zip(gradients, parts)]
        plan.sums(*(x for pair in given for x in pair if x is not None))
    if results is not None and plan.apart:
        for result, gradient in zip(results, gradients):
            result.copy_(gradient)
        return results
    return dq, dk, dv


def _walk(
    walk: _Walk,
    factors: tuple[Tensor, ...],
    numbers: tuple[Tensor | None, ...],
    gradients: tuple[Tensor, ...],
    parts: list[Tensor | None],
    mask: Mask,
    tickets: Tensor | None,
) -> None:
    """Run one of the backward kernels. It writes gradients or, if its walks are split, new ``parts`` of them."""
    targets = [gradients[i] for i in _RESULTS[walk.kernel]]
    if walk.parts:
        targets = [part.empty(gradients[0]) for part in walk.parts]
        for index, target in zip(_RESULTS[walk.kernel], targets):
            parts[index] = target
    if walk.launch.descriptions:
        launch_walk(walk.launch, factors, targets, numbers, tickets)
    else:
        walk.launch(*factors, *numbers, *targets, mask.cu_seqlens_q, mask.cu_seqlens_k)


def plan_backward(
    grad: Tensor,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    mask: Mask,
    scale: float,
    precision: str,
    aligned: bool,
    results: tuple[Tensor, Tensor, Tensor] | None,
) -> _Backward:
    """Plan of `backward`."""
    geometry = _geometry(q, k, v)
    dq, dk, dv = results or (layout_of(t, t.shape[-1]) for t in (q, k, v))
    rows = Dense.rows((geometry.entries, geometry.heads, geometry.tokens), torch.float32)
    plan = _Backward((Dense.like(dq), Dense.like(dk), Dense.like(dv)), rows)
    if geometry.empty():
        return plan
    access = access_to(out, grad)
    block_r = min(4096 // geometry.block_e, 64)
    elements = geometry.entries * geometry.heads * geometry.tokens
    overlap = may_start_early(q.device)
    lse_b, lse_h, lse_n = (0, 0, 0) if grad_lse is None else grad_lse.stride()
    prepare = Launch(
        prepare_kernel,
        -(-elements // block_r),
        takes=("out", "grad", "statistics", "dlse", "shift", "delta", "inverse", "tickets"),
        rows=elements, tokens=geometry.tokens, heads=geometry.heads,
        dlse_b=lse_b, dlse_h=lse_h, dlse_n=lse_n,
        VEC=access.vec, UNIT=access.unit, E=geometry.value_features, BLOCK_R=block_r, BLOCK_E=geometry.block_e,
        OVERLAP=overlap, **access.of("out", "grad"),
    )  # fmt: skip
    if small.suits_backward(geometry, mask, scale, q, k, v, grad, dq, dk, dv):
        few = small.plan_backward(geometry, mask, scale, q, k, v, grad, dq, dk, dv)
        return plan._replace(prepare=prepare, few=few)
    product = _product("backward", q, geometry, mask, scale, precision)
    if product in _PIECES:
        plan = plan._replace(pieces=_plan_pieces(product, geometry, q, k, v, grad, overlap))
    factors = (q, k, v, grad) if plan.pieces is None else plan.pieces.like
    call = geometry, mask, scale, product, aligned, q
    planned = _plan_walk("key", factors, (dk, dv), *call), _plan_walk("query", factors, (dq,), *call)
    sums = _plan_sums(planned, (dq, dk, dv), overlap)
    if sums is not None and results is not None:  # parts are without gaps, and so is what they are added up in
        plan = plan_backward(grad, grad_lse, q, k, v, out, mask, scale, precision, aligned, None)
        return plan._replace(apart=True)
    counted = any(walk.launch.descriptions for walk in planned)
    return plan._replace(prepare=prepare, walks=planned, counted=counted, sums=sums)


def _tiled_pieces(
    kernel: str,
    geometry: Geometry,
    mask: Mask,
    scale: float,
    factors: tuple[Tensor, ...],
    pieces: int,
    results: tuple[Tensor, ...],
    device: torch.device,
) -> hopper.Plan | None:
    """The launch of the kernel for Hopper for factors in pieces, if there is one and it takes the call."""
    if INTERPRETED:
        return None
    from warploom.ops.flash_attention.launches import hopper

    if not hopper.suit_pieces(geometry, pieces, device, results):
        return None
    return hopper.plan_pieces(kernel, geometry, mask, scale, factors, pieces, results, device)


def _plan_walk(
    kernel: str,
    factors: tuple[Tensor, ...],
    results: tuple[Tensor, ...],
    geometry: Geometry,
    mask: Mask,
    scale: float,
    product: str,
    aligned: bool,
    q: Tensor,
) -> _Walk:
    """Plan of one of the backward kernels. Other than ``q``, tensors may be without memory, and on no GPU."""
    sizes = [x.numel() for x in results]
    tiled = _tiled(kernel, geometry, mask, scale, (*factors, *results)) if aligned else None
    if product in _PIECES:
        tiled = _tiled_pieces(kernel, geometry, mask, scale, factors, _PIECES[product], results, q.device)
    if tiled is not None:
        return _Walk(kernel, tiled.launch, tiled.parts, _parts(sizes, tiled.parts))
    tiles = _tiles(kernel, geometry, mask, scale, product, q)
    grid = _grid(kernel, geometry, mask, tiles, product, q, sum(sizes))
    heads_per_walk = 1 if kernel == "key" else geometry.group
    access = access_to(*factors, *results)
    overlap = may_start_early(q.device)
    names = ("dk", "dv") if kernel == "key" else ("dq",)
    inputs = ("q", "k", "v", "grad")
    launch = Launch(
        key_kernel if kernel == "key" else query_kernel,
        grid.programs,
        takes=(*inputs, "shift", "delta", "inverse", *names, "cu_seqlens_q", "cu_seqlens_k"),
        num_warps=tiles.warps,
        num_stages=tiles.stages,
        early=overlap,
        slope=scale,
        SHORT=grid.short,
        OVERLAP=overlap,
        **{f"{n}_split": x.numel() // access.vec if grid.splits > 1 else 0 for n, x in zip(names, results)},
        **_numbers(geometry, mask, scale, grid, q.itemsize, heads_per_walk),
        **_constants(geometry, mask, scale, access, product, tiles),
        **access.of(*inputs, *names),
    )
    return _Walk(kernel, launch, grid.splits, _parts(sizes, grid.splits))


def _parts(sizes: list[int], splits: int) -> tuple[Dense, ...]:
    """The parts of results of so many elements, all of each in one; none where walks are whole."""
    return tuple(Dense.rows((splits * size,), torch.float32) for size in sizes) if splits > 1 else ()


def _plan_sums(walks: Sequence[_Walk], gradients: tuple[Tensor, ...], early: bool) -> Launch | None:
    """What sums the parts of gradients, if any of them is in parts."""
    splits = [1, 1, 1]
    for walk in walks:
        for index in _RESULTS[walk.kernel]:
            splits[index] = walk.splits
    if max(splits) == 1:
        return None
    sizes = [x.numel() for x in gradients]
    programs = sum(-(-size // 1024) for size, parts in zip(sizes, splits) if parts > 1)
    numbers: dict[str, Any] = {}
    takes: list[str] = []
    for name, size, parts in zip(("dq", "dk", "dv"), sizes, splits):
        numbers |= {f"{name}_size": size, f"{name}_splits": parts}
        if parts > 1:
            takes += [f"{name}_parts", name]
        else:
            numbers |= {f"{name}_parts": None, name: None}
    return Launch(sum_kernel, programs, takes=takes, early=early, BLOCK=1024, EARLY=early, **numbers)
