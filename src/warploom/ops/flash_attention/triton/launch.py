"""Launches of the Triton kernels: how calls are cut into tiles, and what their launches have in common."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from warploom.device.rows import Strides
from warploom.ops.flash_attention.problem import (
    LOG2_E,
    Call,
    Costs,
    MaskSpec,
    Shape,
    best_splits,
    bounds,
    heads_of_section,
    in_powers_of_two,
    loop_steps,
    programs_at_once,
)
from warploom.ops.flash_attention.triton.config import (
    LONG,
    UNALIGNED_VALUES,
    Configuration,
    configuration,
    is_small,
    is_tiny,
)
from warploom.ops.flash_attention.triton.terms import TermsSizes, TermsTiles, terms_kernel
from warploom.ops.flash_attention.triton.tiles import BackwardStrides, LseRows, Sizes, TritonConfig
from warploom.runtime.launch import Buffer, Launch, architecture, multiprocessors
from warploom.runtime.layout import Layout

Tensor = torch.Tensor

PRODUCTS = {"highest": "bf16x6", "high": "tf32", "medium": "bf16"}
"""Products of float32 factors, for each of PyTorch's names of a precision."""
TERMS = {"3-term": 3, "2-term": 2}
"""Terms of a factor, where they are made before the loops."""
_RATES = {"3-term": 0.5, "2-term": 1.0, "3-term here": 0.2, "bf16x6": 0.25, "tf32": 0.7, "bf16": 2.0, "ieee": 0.1}
_HALF_RATE = 3.0
"""Rates of a multiprocessor, of float32 products and of those of 16 bits: 10¹² operations a second, about."""
_PRODUCTS = {"forward": 2, "key": 4, "query": 3}
_LATENCY_US = 0.5  # of a step of up to 64 rows, besides its operations
_START_US = 2.0  # of a loop
_MERGE_US = 1.5  # to launch what merges parts
SHORT = 8
"""Steps of all loops together, for each multiprocessor, up to which one loop with masks is faster than three."""


class Grid(NamedTuple):
    """Numbers of programs: tiles of queries (or keys) of every head, and splits of each loop."""

    tiles: Configuration
    blocks: int
    rows: int
    splits: int
    short: bool  # whether loops are so short that one is faster than three

    @property
    def programs(self) -> int:
        """All of them."""
        return self.blocks * self.rows * self.splits


def precision_of(q: Tensor, precision: str | None) -> str:
    """Returns the precision of a call's products: that asked for, PyTorch's setting, or the one there is for 16 bits."""
    if q.dtype != torch.float32:
        return "highest"
    return precision or torch.get_float32_matmul_precision()


def product_of(direction: str, call: Call, precision: str) -> str:
    """Returns how factors are multiplied, ``forward`` or ``backward``: see `warploom.device.product`."""
    shape = call.shape
    if precision == "medium" or call.dtype != torch.float32:
        return PRODUCTS[precision]
    wide = shape.width > 128
    if wide and precision == "highest":
        return "ieee"  # three terms of such rows do not fit in registers
    if wide or not (architecture(call.device) == 90 and call.plain):
        return PRODUCTS[precision]
    terms, short = ("2-term", PRODUCTS["high"]) if precision == "high" else ("3-term", "3-term here")
    least = LONG[terms][direction].get(shape.block_d)
    return short if least is None or min(shape.tokens, shape.keys) < least else terms


def is_small_for(kernel: str, call: Call) -> bool:
    """Returns whether a call is a small problem for a kernel: see `config.is_small`."""
    return is_small(
        kernel, architecture(call.device), call.dtype, call.shape.width, call.plain, *_extent(kernel, call)
    )


def _extent(kernel: str, call: Call) -> tuple[int, int, int]:
    """Returns the tiles of 64 rows of a kernel, rows that their loops go over, and how many programs run at the same time."""
    shape = call.shape
    own, loop, heads = shape.tokens, shape.keys, shape.heads
    if kernel == "key":
        own, loop, heads = shape.keys, shape.tokens * shape.group, shape.key_heads
    return -(-own // 64) * shape.batch_size * heads, loop, programs_at_once(call.device)


def _costs(kernel: str, call: Call, tiles: Configuration, product: str) -> Costs:
    """Returns what loops of the Triton kernels cost, from the time that a step takes on an H200, roughly."""
    rate = _RATES[product] if call.dtype == torch.float32 else _HALF_RATE
    features = (call.shape.block_d + call.shape.block_e) / 2
    rows = tiles.block_m if kernel == "key" else tiles.block_n
    step_us = _PRODUCTS[kernel] * 2e-6 * tiles.block_m * tiles.block_n * features / rate
    step_us += _LATENCY_US * max(rows / 64, 1)
    merged = 2e5 if kernel == "forward" and call.dtype != torch.float32 else 1e5  # elements a microsecond
    return Costs(_START_US / step_us, _MERGE_US / step_us, merged * step_us)


def _beside(tiles: Configuration, call: Call) -> int:
    """Returns how many programs share a multiprocessor, where they hide each other's latency."""
    if tiles.warps > 4 or (call.dtype == torch.float32 and call.shape.block_d > 64):
        return 1
    return 2 if call.dtype == torch.float32 else 3


def grid_of(kernel: str, call: Call, product: str, elements: int, copied: bool) -> Grid:
    """Returns how a Triton kernel cuts a call with results of so many elements.

    ``copied``: rows begin at multiples of several elements, so that loads can run ahead through shared memory.
    """
    shape, mask = call.shape, call.mask
    tiny = is_tiny(kernel, *_extent(kernel, call))
    arch = architecture(call.device)
    tiles = configuration(
        kernel, arch, call.dtype, shape.width, product, call.plain, is_small_for(kernel, call), tiny
    )
    if kernel == "forward" and arch == 90 and not copied and shape.block_e <= 32 and call.dtype.itemsize == 2:
        tiles = UNALIGNED_VALUES
    own, step = (tiles.block_n, tiles.block_m) if kernel == "key" else (tiles.block_m, tiles.block_n)
    length, heads = (shape.keys, shape.key_heads) if kernel == "key" else (shape.tokens, shape.heads)
    rows = shape.batch_size * heads
    cu_seqlens = mask.cu_seqlens_k if kernel == "key" else mask.cu_seqlens_q
    if cu_seqlens is not None:
        # See device/packed.py: the lengths of packed sequences, and of the tail, are known on the device alone.
        sequences = cu_seqlens.shape[0] - 1
        blocks = -(-length // own) + sequences
        # As if there were one sequence, and no tail.
        steps = loop_steps(kernel, shape, MaskSpec(), length, step) * (length // own + sequences)
    else:
        steps = loop_steps(kernel, shape, mask, own, step)
        blocks = len(steps)
    costs = _costs(kernel, call, tiles, product)
    programs = multiprocessors(call.device)
    whole = tiles.whole or mask.on_cache
    splits = 1 if whole else best_splits(steps, rows, _beside(tiles, call) * programs, elements, costs)
    return Grid(tiles, blocks, rows, splits, sum(steps) * rows <= SHORT * programs)


def arguments_of(
    call: Call, grid: Grid, layout: Layout, product: str, heads_per_loop: int, pages: int = 0, few: int = 0
) -> dict[str, Any]:
    """Returns what all Triton kernels are launched with.

    Args:
        call: The call.
        grid: Its programs.
        layout: The layout of its tensors.
        product: How factors are multiplied.
        heads_per_loop: Heads that share keys.
        pages: How many there are, where keys lie in such.
        few: Queries of a packed sequence on a cache that another kernel takes, at most.
    """
    shape, mask, tiles = call.shape, call.mask, grid.tiles
    head_bytes = shape.keys * (shape.head_dim + shape.value_dim) * call.dtype.itemsize
    section = heads_of_section(grid.rows // heads_per_loop, head_bytes) * heads_per_loop
    cu_q, cu_k = mask.cu_seqlens_q, mask.cu_seqlens_k
    scale, cap = in_powers_of_two(call.scale), None
    if call.softcap is not None:
        scale, cap = abs(call.scale) / call.softcap, call.softcap * LOG2_E
    sizes = Sizes(
        shape.tokens, shape.keys, shape.heads, shape.group, grid.blocks, section, grid.splits,
        0 if cu_q is None else cu_q.shape[0] - 1, 0 if cu_q is None else cu_q.stride(0),
        pages if cu_k is None else cu_k.stride(0), *bounds(shape, mask), scale, shape.batch_size,
    )  # fmt: skip
    config = TritonConfig(
        mask.left is not None, mask.right is not None, call.scale < 0, layout.vec, layout.unit, layout.wide,
        shape.head_dim, shape.value_dim, product, tiles.block_m, tiles.block_n, shape.block_d, shape.block_e,
        grid.short, cap, None if mask.block_table is None else shape.keys // mask.block_table.shape[1],
        few if mask.on_cache else None,
    )  # fmt: skip
    options = {"num_warps": tiles.warps, "num_stages": tiles.stages}
    return {"sizes": sizes, "config": config, **options}


def lse_rows(shape: Shape) -> LseRows:
    """Returns the rows of a call's results, as kernels count them."""
    return LseRows(shape.batch_size * shape.heads * shape.tokens, shape.tokens, shape.heads)


class Terms(NamedTuple):
    """A launch that makes terms of float32 tensors before the loops: of q, k and v, and in the backward of the gradient."""

    launch: Launch
    all: tuple[Buffer | None, ...]  # those of each tensor
    like: tuple[Tensor, ...]  # one of each tensor, without memory

    def empty(self, near: Tensor) -> tuple[Tensor | None, ...]:
        """Allocate them, on the device of another tensor."""
        return tuple(None if all is None else all.empty(near) for all in self.all)

    def __call__(self, *tensors: Tensor | None, into: tuple[Tensor | None, ...]) -> tuple[Tensor, ...]:
        """Write the terms (TERMS, …) of those of q, k, v and grad that are given into what `empty` returned."""
        self.launch(*tensors, *into)
        return tuple(x for x in into if x is not None)


def plan_terms(
    product: str, shape: Shape, q: Tensor, k: Tensor, v: Tensor, grad: Tensor | None, pdl: bool
) -> Terms:
    """Returns what makes the terms for a product."""
    tensors = {"q": q, "k": k, "v": v, "grad": grad}
    given = [x for x in tensors.values() if x is not None]
    block_r = max(2048 // shape.width, 1)
    strides = (Strides(*((0,) * 4 if x is None else x.stride())) for x in tensors.values())
    launch = Launch(
        terms_kernel,
        sum(-(-x.numel() // (x.shape[-1] * block_r)) for x in given),
        takes=(*tensors, *(f"{name}_terms" for name in tensors)),
        pdl=pdl,
        sizes=TermsSizes(shape.tokens, shape.keys, shape.heads, shape.key_heads, shape.batch_size),
        strides=BackwardStrides(*strides),
        tiles=TermsTiles(shape.head_dim, shape.value_dim, TERMS[product], block_r, shape.block_d, shape.block_e),
        PDL=pdl,
    )
    return Terms(
        launch,
        tuple(
            None if x is None else Buffer.rows((TERMS[product], *x.shape), torch.bfloat16) for x in tensors.values()
        ),
        tuple(torch.empty(x.shape, dtype=torch.bfloat16, device="meta") for x in given),
    )
