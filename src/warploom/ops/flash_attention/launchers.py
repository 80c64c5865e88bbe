"""Launchers of flash attention's kernels: sizes, strides, tiles, splits. No validation, no autograd."""

from __future__ import annotations

from typing import NamedTuple

import torch

from warploom.launch import Kernel, architecture, multiprocessors
from warploom.layout import empty_in_order_of
from warploom.ops.flash_attention.kernels import combine_kernel, forward_kernel
from warploom.ops.flash_attention.kernels_backward import key_kernel, prepare_kernel, query_kernel, sum_kernel

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

_UNBOUNDED = 2**30  # a bound of the window that no distance reaches
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
        min(mask.left or 0, _UNBOUNDED), min(mask.right or 0, _UNBOUNDED),
        # Never zero: a logit of −inf, which is what a hidden key has, must stay −inf.
        max(abs(scale), _TINY) * 1.4426950408889634,
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


def _part_like(out: Tensor, splits: int) -> tuple[Tensor, int]:
    """Where the parts of a split go, in float32 and in the memory order of ``out``, and their distance.

    Where there is one part only, that is ``out`` itself.
    """
    if splits == 1:
        return out, 0
    parts = torch.empty(splits * out.numel(), dtype=torch.float32, device=out.device)
    return parts.as_strided(out.shape, out.stride()), out.numel()


def forward(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float, precision: str | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Run the forward kernel.

    Returns:
        Attention (B, N, Hq, E); lse (B, Hq, N) in float32; and what the backward computes the weights again from,
        (2, B, Hq, N) in float32.
    """
    geometry = _geometry(q, k, v)
    precision = _precision(q, precision)
    out = empty_in_order_of(q, geometry.value_features)
    lse = torch.empty((geometry.entries, geometry.heads, geometry.tokens), dtype=torch.float32, device=q.device)
    statistics = lse.new_empty((2, *lse.shape))
    if geometry.empty():
        return out.zero_(), lse.fill_(-torch.inf), statistics.zero_()
    tiles = _tiles("forward", geometry, mask, scale, precision, q)
    rows = geometry.entries * geometry.heads
    steps = -(-geometry.keys // tiles.block_n)
    grid = _grid(q.device, geometry.tokens, tiles.block_m, rows, steps, mask.cu_seqlens_q)
    part, part_split = _part_like(out, grid.splits)
    split = grid.splits > 1
    part_statistics = lse.new_empty((grid.splits, *statistics.shape)) if split else statistics
    access = _access(q, k, v, part)
    forward_launch(
        grid.programs,
        (q, k, v, part, None if split else lse, part_statistics, mask.cu_seqlens_q, mask.cu_seqlens_k),
        (
            *_numbers(geometry, mask, scale, grid, q.itemsize, geometry.group),
            part_split // access.vec,
            *access.strides,
        ),
        _constants(geometry, mask, scale, access, precision, tiles),
        tiles.warps,
        tiles.stages,
    )
    if split:
        block_r = max(2048 // geometry.block_e, 1)
        combine_launch(
            -(-lse.numel() // block_r),
            (part, part_statistics, out, lse, statistics),
            (
                lse.numel(), geometry.tokens, geometry.heads, grid.splits, part_split,
                *part.stride(), *out.stride(),
            ),
            (geometry.value_features, block_r, geometry.block_e),
        )  # fmt: skip
    return out, lse, statistics


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
) -> tuple[Tensor, Tensor, Tensor]:
    """Run the backward kernels: gradients of ``q``, ``k`` and ``v``, each in the memory order of its tensor.

    ``grad`` (B, N, Hq, E) and ``grad_lse`` (B, Hq, N), which may be None for zero, have any strides; ``out`` and
    ``statistics`` are what `forward` returned for the other arguments.
    """
    geometry = _geometry(q, k, v)
    precision = _precision(q, precision)
    dq, dk, dv = (empty_in_order_of(t, t.shape[-1]) for t in (q, k, v))
    if geometry.empty():
        return dq.zero_(), dk.zero_(), dv.zero_()
    # Two tensors, not two halves of one: the second half's alignment would depend on the length.
    shift, delta = (statistics.new_empty(statistics.shape[1:]) for _ in range(2))
    inverse = torch.empty_like(shift) if q.dtype == torch.float32 else None
    access = _access(out, grad)
    block_r = min(4096 // geometry.block_e, 64)
    prepare_launch(
        -(-delta.numel() // block_r),
        (out, grad, statistics, grad_lse, shift, delta, inverse),
        (
            delta.numel(), geometry.tokens, geometry.heads, *((0, 0, 0) if grad_lse is None else grad_lse.stride()),
            *access.strides,
        ),
        (access.vec, access.unit, geometry.value_features, block_r, geometry.block_e),
    )  # fmt: skip
    tensors, rows = (q, k, v, grad), (shift, delta, inverse)
    _launch_backward("key", key_launch, tensors, rows, (dk, dv), geometry, mask, scale, precision)
    _launch_backward("query", query_launch, tensors, rows, (dq,), geometry, mask, scale, precision)
    return dq, dk, dv


def _launch_backward(
    name: str,
    launch: Kernel,
    tensors: tuple[Tensor, ...],
    rows: tuple[Tensor | None, ...],
    results: tuple[Tensor, ...],
    geometry: Geometry,
    mask: Mask,
    scale: float,
    precision: str,
) -> None:
    """Run one of the two backward kernels, and sum its parts if its walks are split."""
    first = results[0]
    tiles = _tiles(name, geometry, mask, scale, precision, first)
    if name == "key":
        heads, heads_per_walk = geometry.entries * geometry.key_heads, 1
        steps = -(-geometry.tokens // tiles.block_m)
        grid = _grid(first.device, geometry.keys, tiles.block_n, heads, steps, mask.cu_seqlens_k)
    else:
        heads, heads_per_walk = geometry.entries * geometry.heads, geometry.group
        steps = -(-geometry.keys // tiles.block_n)
        grid = _grid(first.device, geometry.tokens, tiles.block_m, heads, steps, mask.cu_seqlens_q)
    parts = [_part_like(result, grid.splits) for result in results]
    access = _access(*tensors, *(part for part, _ in parts))
    launch(
        grid.programs,
        (*tensors, *rows, *(part for part, _ in parts), mask.cu_seqlens_q, mask.cu_seqlens_k),
        (
            *_numbers(geometry, mask, scale, grid, first.itemsize, heads_per_walk), scale,
            *(step // access.vec for _, step in parts), *access.strides,
        ),
        _constants(geometry, mask, scale, access, precision, tiles),
        tiles.warps,
        tiles.stages,
    )  # fmt: skip
    if grid.splits > 1:
        for (part, size), result in zip(parts, results):
            sum_launch(-(-size // 1024), (part, result), (size, grid.splits), (1024,))
