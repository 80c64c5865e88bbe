"""Launchers of flash attention's kernels: sizes, strides, tiles, splits. No validation, no autograd.

What a call allocates and launches is its plan, which depends on shapes, strides, dtypes and options alone. Plans
are kept by whoever calls (`warploom.plans`): a call like an earlier one only allocates and launches.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from warploom.launch import (
    ALIGNMENT,
    INTERPRETED,
    Kernel,
    Launch,
    TiledLaunch,
    architecture,
    may_start_early,
    multiprocessors,
)
from warploom.layout import layout_of
from warploom.ops.flash_attention.kernels import combine_kernel, forward_kernel
from warploom.ops.flash_attention.kernels_backward import key_kernel, prepare_kernel, query_kernel, sum_kernel
from warploom.plans import Plans

if TYPE_CHECKING:
    from warploom.ops.flash_attention import launchers_hopper

Tensor = torch.Tensor

forward_launch = Kernel(forward_kernel)
combine_launch = Kernel(combine_kernel)
prepare_launch = Kernel(prepare_kernel)
key_launch = Kernel(key_kernel)
query_launch = Kernel(query_kernel)
sum_launch = Kernel(sum_kernel)

PRODUCTS = {"highest": "bf16x6", "high": "tf32", "medium": "bf16"}
"""How float32 factors are multiplied, for each of PyTorch's names of a precision."""

L2_SHARE = 2**25
"""Bytes of keys and values that programs running together may read again and again from the L2 cache."""

MAX_SPLITS = 64
"""Parts of a walk at most: each is written and read once more in float32."""

SPLIT_STEPS = 4
"""Steps of its walk that a part of a split has at least."""

UNBOUNDED = 2**30  # a bound of the window that no distance reaches
LOG2_E = 1.4426950408889634
_NARROW = 2**22  # strides of rows and features below this keep a tile within 32 bits
_TINY = torch.finfo(torch.float32).tiny


class Mask(NamedTuple):
    """Which keys a query sees: what the public arguments come down to."""

    left: int | None = None
    right: int | None = None  # 0 for causal
    cu_seqlens_q: Tensor | None = None  # (S + 1,), as is the next
    cu_seqlens_k: Tensor | None = None


class Configuration(NamedTuple):
    """Tile sizes and launch options of one kernel."""

    block_m: int
    block_n: int
    warps: int
    stages: int


def configuration(
    kernel: str, arch: int, dtype: torch.dtype, features: int, precision: str, plain: bool
) -> Configuration:
    """The pinned tiles of a kernel: ``forward``, ``key`` (gradients of k and v) or ``query`` (gradient of q).

    Args:
        kernel: Which.
        arch: Compute capability times ten.
        dtype: Of the tensors.
        features: The larger of D and E, up to a power of two, 16 at least.
        precision: A key of `PRODUCTS`; float32 alone has several.
        plain: Whether masks are those of a causal or full attention and D and E equal powers of two: what such
            kernels save in registers, larger tiles take.
    """
    tuned = plain and 90 <= arch < 120
    if dtype == torch.float32 and tuned and features <= 128:
        return (_PLAIN_90_FLOAT32 if precision == "highest" else _PLAIN_90_TF32)[kernel][features]
    if dtype == torch.float32:
        return _FLOAT32[kernel][features]
    if tuned:
        return _PLAIN_90[kernel][features]
    return _HALF[kernel][features]


_PLAIN_90: dict[str, dict[int, Configuration]] = {
    "forward": {
        16: Configuration(64, 64, 4, 3),
        32: Configuration(64, 64, 4, 3),
        64: Configuration(64, 64, 4, 3),
        128: Configuration(128, 128, 8, 3),
        256: Configuration(128, 64, 8, 2),
    },
    "key": {
        16: Configuration(64, 64, 4, 3),
        32: Configuration(64, 64, 4, 3),
        64: Configuration(64, 64, 4, 3),
        128: Configuration(32, 64, 4, 3),
        256: Configuration(32, 32, 4, 2),
    },
    "query": {
        16: Configuration(64, 64, 4, 3),
        32: Configuration(64, 64, 4, 3),
        64: Configuration(64, 64, 4, 3),
        128: Configuration(128, 128, 8, 2),
        256: Configuration(128, 64, 8, 1),
    },
}
_PLAIN_90_FLOAT32: dict[str, dict[int, Configuration]] = {
    "forward": {
        16: Configuration(64, 64, 4, 3),
        32: Configuration(64, 64, 4, 3),
        64: Configuration(64, 64, 4, 2),
        128: Configuration(64, 32, 4, 2),
    },
    "key": {
        16: Configuration(64, 64, 4, 2),
        32: Configuration(64, 64, 4, 2),
        64: Configuration(32, 64, 4, 1),
        128: Configuration(32, 32, 4, 2),
    },
    "query": {
        16: Configuration(64, 64, 4, 2),
        32: Configuration(64, 64, 4, 2),
        64: Configuration(64, 32, 4, 3),
        128: Configuration(64, 16, 4, 1),
    },
}
_PLAIN_90_TF32: dict[str, dict[int, Configuration]] = {
    "forward": {
        16: Configuration(64, 64, 4, 3),
        32: Configuration(64, 64, 4, 3),
        64: Configuration(128, 64, 8, 1),
        128: Configuration(128, 32, 8, 2),
    },
    "key": {
        16: Configuration(64, 64, 4, 2),
        32: Configuration(64, 64, 4, 2),
        64: Configuration(32, 128, 8, 1),
        128: Configuration(16, 128, 8, 1),
    },
    "query": {
        16: Configuration(64, 64, 4, 2),
        32: Configuration(64, 64, 4, 2),
        64: Configuration(128, 32, 8, 2),
        128: Configuration(128, 16, 8, 1),
    },
}
_HALF: dict[str, dict[int, Configuration]] = {
    "forward": {
        16: Configuration(64, 64, 4, 2),
        32: Configuration(64, 64, 4, 2),
        64: Configuration(64, 64, 4, 2),
        128: Configuration(64, 64, 8, 2),
        256: Configuration(64, 32, 8, 2),
    },
    "key": {
        16: Configuration(32, 64, 4, 2),
        32: Configuration(32, 64, 4, 2),
        64: Configuration(32, 64, 4, 2),
        128: Configuration(32, 64, 8, 2),
        256: Configuration(32, 32, 8, 1),
    },
    "query": {
        16: Configuration(64, 32, 4, 2),
        32: Configuration(64, 32, 4, 2),
        64: Configuration(64, 32, 4, 2),
        128: Configuration(64, 32, 8, 2),
        256: Configuration(32, 32, 8, 1),
    },
}
_FLOAT32: dict[str, dict[int, Configuration]] = {
    "forward": {
        16: Configuration(32, 32, 8, 2),
        32: Configuration(32, 32, 8, 2),
        64: Configuration(32, 32, 8, 2),
        128: Configuration(16, 32, 4, 1),
        256: Configuration(16, 16, 8, 1),
    },
    "key": {
        16: Configuration(16, 32, 4, 2),
        32: Configuration(16, 32, 4, 2),
        64: Configuration(32, 32, 8, 2),
        128: Configuration(16, 16, 4, 1),
        256: Configuration(16, 16, 8, 1),
    },
    "query": {
        16: Configuration(32, 32, 8, 2),
        32: Configuration(32, 32, 8, 2),
        64: Configuration(32, 32, 4, 2),
        128: Configuration(16, 32, 4, 1),
        256: Configuration(16, 16, 8, 1),
    },
}


def _tile_features(features: int) -> int:
    """Features of a tile: a power of two that matrix instructions take."""
    return max(1 << (features - 1).bit_length(), 16)


class Geometry(NamedTuple):
    """Sizes of a call."""

    entries: int
    tokens: int
    keys: int
    heads: int
    key_heads: int
    features: int  # D
    value_features: int  # E

    @property
    def group(self) -> int:
        """Query heads to a key head."""
        return self.heads // max(self.key_heads, 1)

    @property
    def block_d(self) -> int:
        """Features of a tile of queries or keys."""
        return _tile_features(self.features)

    @property
    def block_e(self) -> int:
        """Features of a tile of values."""
        return _tile_features(self.value_features)

    def empty(self) -> bool:
        """Whether there is nothing to attend with or to."""
        return 0 in (self.entries, self.tokens, self.keys, self.heads)


def _tiles(kernel: str, geometry: Geometry, mask: Mask, scale: float, precision: str, q: Tensor) -> Configuration:
    block_d, block_e = geometry.block_d, geometry.block_e
    plain = mask.left is None and mask.cu_seqlens_q is None and scale >= 0
    plain = plain and block_d == block_e and geometry.features == geometry.value_features == block_d
    return configuration(kernel, architecture(q.device), q.dtype, max(block_d, block_e), precision, plain)


def _geometry(q: Tensor, k: Tensor, v: Tensor) -> Geometry:
    entries, tokens, heads, features = q.shape
    return Geometry(entries, tokens, k.shape[1], heads, k.shape[2], features, v.shape[3])


class _Access(NamedTuple):
    """How kernels address a group of tensors."""

    vec: int  # common divisor of strides, which vector access rests on
    unit: bool  # whether features are adjacent everywhere
    wide: bool  # whether offsets within a tile need 64 bits
    strides: list[int]  # of every tensor, all but those of features divided by vec


def _access(*tensors: Tensor) -> _Access:
    """Strides as the kernels take them. An axis of size one gets stride 0, since it is never taken."""
    strides = [[s if n > 1 else 0 for n, s in zip(t.shape, t.stride())] for t in tensors]
    unit = all(t.shape[3] == 1 or s[3] == 1 for t, s in zip(tensors, strides))
    divisors = (16, 8, 4) if unit else ()
    vec = next((d for d in divisors if all(s % d == 0 for b, n, h, _ in strides for s in (b, n, h))), 1)
    wide = any(max(abs(n), abs(f)) >= _NARROW for _, n, _, f in strides)
    return _Access(vec, unit, wide, [s for b, n, h, f in strides for s in (b // vec, n // vec, h // vec, f)])


class _Grid(NamedTuple):
    """How many programs walk: tiles of queries (or keys) of every head, and parts of each walk."""

    blocks: int
    rows: int
    splits: int

    @property
    def programs(self) -> int:
        """All of them."""
        return self.blocks * self.rows * self.splits


def _grid(device: torch.device, length: int, block: int, rows: int, steps: int, cu_seqlens: Tensor | None) -> _Grid:
    """Cut walks of ``steps`` steps into parts where there are fewer tiles than multiprocessors."""
    # See device/packed.py: the lengths of packed sequences are known on the device alone.
    blocks = -(-length // block) if cu_seqlens is None else length // block + cu_seqlens.shape[0] - 1
    splits = min(multiprocessors(device) // max(blocks * rows, 1), steps // SPLIT_STEPS, MAX_SPLITS)
    return _Grid(blocks, rows, max(splits, 1))


def _numbers(
    geometry: Geometry, mask: Mask, scale: float, grid: _Grid, itemsize: int, heads_per_walk: int
) -> tuple[int | float, ...]:
    """Arguments ``tokens … scale`` of a kernel."""
    features = geometry.features + geometry.value_features
    head_bytes = geometry.keys * features * itemsize
    section = max(L2_SHARE // head_bytes, 1) * heads_per_walk
    cu_q, cu_k = mask.cu_seqlens_q, mask.cu_seqlens_k
    return (
        geometry.tokens, geometry.keys, geometry.heads, geometry.group, grid.blocks, min(section, grid.rows),
        grid.splits,
        0 if cu_q is None else cu_q.shape[0] - 1, 0 if cu_q is None else cu_q.stride(0),
        0 if cu_k is None else cu_k.stride(0),
        min(mask.left or 0, UNBOUNDED), min(mask.right or 0, UNBOUNDED),
        # Never zero: a logit of −inf, which is what a hidden key has, must stay −inf.
        max(abs(scale), _TINY) * LOG2_E,
        geometry.entries,
    )  # fmt: skip


def _precision(q: Tensor, precision: str | None) -> str:
    """The precision of a call's products: that asked for, PyTorch's setting, or the one there is for 16 bits."""
    if q.dtype != torch.float32:
        return "highest"
    return precision or torch.get_float32_matmul_precision()


def _product(geometry: Geometry, precision: str) -> str:
    """How factors are multiplied. Long rows of float32 split in parts do not fit in registers; they go unsplit."""
    long = max(geometry.block_d, geometry.block_e) > 128
    return "ieee" if long and precision == "highest" else PRODUCTS[precision]


def _constants(
    geometry: Geometry, mask: Mask, scale: float, access: _Access, precision: str, tiles: Configuration
) -> tuple[object, ...]:
    """Arguments ``HAS_LEFT … BLOCK_E`` of a kernel."""
    return (
        mask.left is not None, mask.right is not None, scale < 0, access.vec, access.unit, access.wide,
        geometry.features, geometry.value_features, _product(geometry, precision),
        tiles.block_m, tiles.block_n, geometry.block_d, geometry.block_e,
    )  # fmt: skip


class _Dense(NamedTuple):
    """A tensor to allocate: sizes, and strides without gaps."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]

    def empty(self, q: Tensor) -> Tensor:
        """In the dtype of ``q``, on its device."""
        return q.new_empty_strided(self.shape, self.stride)


def _dense(like: Tensor) -> _Dense:
    return _Dense(tuple(like.shape), like.stride())


class _Forward(NamedTuple):
    """Plan of a forward."""

    out: _Dense
    lse: tuple[int, int, int]  # its shape
    launch: Launch | TiledLaunch | None  # None where there is nothing to attend with or to
    combine: Launch | None = None  # of the parts, where walks are split
    part_elements: int = 0  # of all parts of the output together, in float32
    part_statistics: tuple[int, ...] = ()  # shape
    counted: bool = False  # whether tiles are counted, with tickets that must be zero


def forward(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float, precision: str | None, plans: Plans
) -> tuple[Tensor, Tensor, Tensor]:
    """Run the forward kernel.

    ``plans`` are those of earlier calls that were the same in all but addresses, what ``cu_seqlens`` hold, and
    precision.

    Returns:
        Attention (B, N, Hq, E); lse (B, Hq, N) in float32; and what the backward computes the weights again from,
        (2, B, Hq, N) in float32.
    """
    precision = _precision(q, precision)
    aligned = _are_aligned(q, k, v)
    plan = plans.get((precision, aligned), _plan_forward, q, k, v, mask, scale, precision, aligned)
    out = plan.out.empty(q)
    lse = torch.empty(plan.lse, dtype=torch.float32, device=q.device)
    statistics = torch.empty((2, *plan.lse), dtype=torch.float32, device=q.device)
    cu_seqlens = mask.cu_seqlens_q, mask.cu_seqlens_k
    if plan.launch is None:
        return out.zero_(), lse.fill_(-torch.inf), statistics.zero_()
    target, target_statistics = out, statistics
    if plan.combine is not None:
        target = torch.empty(plan.part_elements, dtype=torch.float32, device=q.device)
        target_statistics = torch.empty(plan.part_statistics, dtype=torch.float32, device=q.device)
    if isinstance(plan.launch, TiledLaunch):
        make = torch.zeros if plan.counted else torch.empty
        tickets = make(1, dtype=torch.int32, device=q.device)
        plan.launch((q, k, v, target, lse, target_statistics, tickets))
    else:
        plan.launch((q, k, v, target, lse if plan.combine is None else None, target_statistics, *cu_seqlens))
    if plan.combine is not None:
        plan.combine((target, target_statistics, out, lse, statistics))
    return out, lse, statistics


def _are_aligned(*tensors: Tensor) -> bool:
    """Whether the tensors' addresses suit descriptors, which is asked where kernels might use them."""
    if tensors[0].dtype == torch.float32 or not 90 <= architecture(tensors[0].device) < 100:
        return False
    bits = 0
    for tensor in tensors:
        bits |= tensor.data_ptr()
    return bits % ALIGNMENT == 0


def _tiled(
    name: str, geometry: Geometry, mask: Mask, scale: float, tensors: tuple[Tensor, ...]
) -> launchers_hopper.Plan | None:
    """The launch of the kernel for Hopper, if there is one and it takes the call."""
    if INTERPRETED:
        return None
    from warploom.ops.flash_attention import launchers_hopper

    if not launchers_hopper.suit(name, geometry, mask, scale, *tensors):
        return None
    return launchers_hopper.plan(name, geometry, mask, scale, tensors)


def _plan_forward(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float, precision: str, aligned: bool
) -> _Forward:
    geometry = _geometry(q, k, v)
    out = layout_of(q, geometry.value_features)
    plan = _Forward(_dense(out), (geometry.entries, geometry.heads, geometry.tokens), None)
    if geometry.empty():
        return plan
    rows = geometry.entries * geometry.heads
    tiled = _tiled("forward", geometry, mask, scale, (q, k, v, out)) if aligned else None
    if tiled is not None:
        plan = plan._replace(launch=tiled.launch, counted=tiled.counted)
        splits = tiled.parts
    else:
        tiles = _tiles("forward", geometry, mask, scale, precision, q)
        steps = -(-geometry.keys // tiles.block_n)
        grid = _grid(q.device, geometry.tokens, tiles.block_m, rows, steps, mask.cu_seqlens_q)
        splits = grid.splits
        access = _access(q, k, v, out)
        launch = Launch(
            forward_launch,
            grid.programs,
            (
                *_numbers(geometry, mask, scale, grid, q.itemsize, geometry.group),
                out.numel() // access.vec if splits > 1 else 0,  # from one part to the next
                *access.strides,
            ),
            _constants(geometry, mask, scale, access, precision, tiles),
            tiles.warps,
            tiles.stages,
        )
        plan = plan._replace(launch=launch)
    if splits == 1:
        return plan
    block_r = max(2048 // geometry.block_e, 1)
    lse_elements = rows * geometry.tokens
    early = may_start_early(q.device)
    combine = Launch(
        combine_launch,
        -(-lse_elements // block_r),
        (
            lse_elements, geometry.tokens, geometry.heads, splits, out.numel(), *out.stride(), *out.stride(),
        ),
        (geometry.value_features, block_r, geometry.block_e, early),
        early=early,
    )  # fmt: skip
    return plan._replace(
        combine=combine, part_elements=splits * out.numel(), part_statistics=(splits, 2, *plan.lse)
    )


class _Walk(NamedTuple):
    """Plan of one of the two backward kernels."""

    launch: Launch | TiledLaunch
    sums: tuple[Launch, ...] = ()  # one for each result, where walks are split
    part_elements: tuple[int, ...] = ()  # of all parts of each result, in float32


class _Backward(NamedTuple):
    """Plan of a backward."""

    results: tuple[_Dense, _Dense, _Dense]  # dq, dk, dv
    rows: tuple[int, int, int]  # shape of a number for each query and head
    prepare: Launch | None = None  # None where there is nothing to attend with or to
    key: _Walk | None = None
    query: _Walk | None = None


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
) -> tuple[Tensor, Tensor, Tensor]:
    """Run the backward kernels: gradients of ``q``, ``k`` and ``v``, each in the memory order of its tensor.

    ``grad`` (B, N, Hq, E) and ``grad_lse`` (B, Hq, N), which may be None for zero, have any strides; ``out`` and
    ``statistics`` are what `forward` returned for the other arguments. ``plans``: those that `forward` took.
    """
    precision = _precision(q, precision)
    # Strides, because what autograd saved may come back with others: from the host's memory, for one.
    aligned = _are_aligned(q, k, v, grad)
    key = (
        precision, aligned, grad.dtype, grad.stride(),
        None if grad_lse is None else (grad_lse.dtype, grad_lse.stride()),
        q.stride(), k.stride(), v.stride(), out.stride(),
    )  # fmt: skip
    plan = plans.get(key, _plan_backward, grad, grad_lse, q, k, v, out, mask, scale, precision, aligned)
    dq, dk, dv = (result.empty(q) for result in plan.results)
    if plan.prepare is None or plan.key is None or plan.query is None:
        return dq.zero_(), dk.zero_(), dv.zero_()
    # Two tensors, not two halves of one: the second half's alignment would depend on the length.
    shift = torch.empty(plan.rows, dtype=torch.float32, device=q.device)
    delta = torch.empty(plan.rows, dtype=torch.float32, device=q.device)
    inverse = torch.empty_like(shift) if q.dtype == torch.float32 else None
    tickets = torch.empty(2, dtype=torch.int32, device=q.device) if aligned else None
    plan.prepare((out, grad, statistics, grad_lse, shift, delta, inverse, tickets))
    tensors, numbers = (q, k, v, grad), (shift, delta, inverse)
    _walk(plan.key, tensors, numbers, (dk, dv), mask, tickets)
    _walk(plan.query, tensors, numbers, (dq,), mask, tickets)
    return dq, dk, dv


def _walk(
    walk: _Walk,
    tensors: tuple[Tensor, ...],
    numbers: tuple[Tensor | None, ...],
    results: tuple[Tensor, ...],
    mask: Mask,
    tickets: Tensor | None,
) -> None:
    """Run one of the two backward kernels, and sum its parts if its walks are split."""
    device = results[0].device
    targets = results
    if walk.sums:
        targets = tuple(torch.empty(size, dtype=torch.float32, device=device) for size in walk.part_elements)
    if isinstance(walk.launch, TiledLaunch):
        shift, delta, _ = numbers
        walk.launch((*tensors, *targets, shift, delta, tickets))
    else:
        walk.launch((*tensors, *numbers, *targets, mask.cu_seqlens_q, mask.cu_seqlens_k))
    for add, part, result in zip(walk.sums, targets, results):
        add((part, result))


def _plan_backward(
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
) -> _Backward:
    geometry = _geometry(q, k, v)
    dq, dk, dv = (layout_of(t, t.shape[-1]) for t in (q, k, v))
    rows = (geometry.entries, geometry.heads, geometry.tokens)
    plan = _Backward((_dense(dq), _dense(dk), _dense(dv)), rows)
    if geometry.empty():
        return plan
    access = _access(out, grad)
    block_r = min(4096 // geometry.block_e, 64)
    elements = geometry.entries * geometry.heads * geometry.tokens
    prepare = Launch(
        prepare_launch,
        -(-elements // block_r),
        (
            elements, geometry.tokens, geometry.heads, *((0, 0, 0) if grad_lse is None else grad_lse.stride()),
            *access.strides,
        ),
        (access.vec, access.unit, geometry.value_features, block_r, geometry.block_e),
    )  # fmt: skip
    tensors = (q, k, v, grad)
    return plan._replace(
        prepare=prepare,
        key=_plan_walk("key", key_launch, tensors, (dk, dv), geometry, mask, scale, precision, aligned),
        query=_plan_walk("query", query_launch, tensors, (dq,), geometry, mask, scale, precision, aligned),
    )


def _plan_walk(
    name: str,
    kernel: Kernel,
    tensors: tuple[Tensor, ...],
    results: tuple[Tensor, ...],
    geometry: Geometry,
    mask: Mask,
    scale: float,
    precision: str,
    aligned: bool,
) -> _Walk:
    tiled = _tiled(name, geometry, mask, scale, (*tensors, *results)) if aligned else None
    sizes = [result.numel() for result in results]
    if tiled is not None:
        return _Walk(tiled.launch, *_sums(sizes, tiled.parts, tensors[0].device))
    first = tensors[0]
    tiles = _tiles(name, geometry, mask, scale, precision, first)
    if name == "key":
        heads, heads_per_walk = geometry.entries * geometry.key_heads, 1
        steps = -(-geometry.tokens // tiles.block_m)
        grid = _grid(first.device, geometry.keys, tiles.block_n, heads, steps, mask.cu_seqlens_k)
    else:
        heads, heads_per_walk = geometry.entries * geometry.heads, geometry.group
        steps = -(-geometry.keys // tiles.block_n)
        grid = _grid(first.device, geometry.tokens, tiles.block_m, heads, steps, mask.cu_seqlens_q)
    access = _access(*tensors, *results)
    launch = Launch(
        kernel,
        grid.programs,
        (
            *_numbers(geometry, mask, scale, grid, first.itemsize, heads_per_walk), scale,
            *(size // access.vec if grid.splits > 1 else 0 for size in sizes), *access.strides,
        ),
        _constants(geometry, mask, scale, access, precision, tiles),
        tiles.warps,
        tiles.stages,
    )  # fmt: skip
    return _Walk(launch, *_sums(sizes, grid.splits, first.device))


def _sums(sizes: list[int], splits: int, device: torch.device) -> tuple[tuple[Launch, ...], tuple[int, ...]]:
    """What sums the parts of results of so many elements, and how many elements these have together."""
    if splits == 1:
        return (), ()
    early = may_start_early(device)
    sums = tuple(Launch(sum_launch, -(-size // 1024), (size, splits), (1024, early), early=early) for size in sizes)
    return sums, tuple(splits * size for size in sizes)
