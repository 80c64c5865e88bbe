"""Launchers of the decode kernels: sizes, strides, tiles, strategy. No validation, no autograd."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton

from warploom.launch import Kernel, Launch, may_start_early, multiprocessors
from warploom.layout import layout_of
from warploom.ops.tpa.kernels import combine_kernel, decode_kernel
from warploom.plans import Plans

Tensor = torch.Tensor

decode_launch = Kernel(decode_kernel)
combine_launch = Kernel(combine_kernel)


class Chunks(NamedTuple):
    """Into what chunks the valid keys of a batch entry are cut: the same everywhere, since results depend on it."""

    shortest: int = 128
    longest: int = 1024
    wanted: int = 32
    """Chunks double in length before there are more than these."""

    def spans(self, keys: int, levels: int) -> int:
        """The most spans of a chunk (``levels`` 0), four (1) or all (2) among all lengths up to ``keys``."""
        if levels == ALL:
            return 1
        chunks = max(min(-(-keys // self.shortest), self.wanted), -(-keys // self.longest), 1)
        return -(-chunks // (4 if levels == 1 else 1))


class DecodeConfiguration(NamedTuple):
    """Tiles of the decode kernel."""

    factor_rows: int
    """Rows of feature factors in a block of keys: keys times rank."""
    least_rows: int
    most_rows: int
    """Rows (query, head) in a tile: 64 are what a warp group takes, 16 what a warp takes."""
    warps: int
    stages: int


CHUNKS = Chunks()
HEADS_OF_BATCH_HEAD = 16
"""Rows of a tile under the strategy ``batch_head``."""
NARROW = 2**22
"""Strides of tokens and ranks below this keep offsets within a tile, of at most 256 rows, in 32 bits."""
COMBINE_ROWS = 2
COMBINE_AHEAD = 16
"""Rows that a program combines, and parts whose loads it starts at once: a multiple of four."""
ALL = 2
"""Levels of the tree of chunks that a program joins which takes all keys; four chunks are one level."""
ONE_PROGRAM = 21e3
"""Bytes of the cache that a program reads in a microsecond, alone on its multiprocessor. This and the next four
come from 86 cases on an H200, one to 128 batch entries, 256 to 524288 keys, ranks 1, 2 and 4: what they choose took
at most 1.02 times as long as the best choice."""
ONE_MULTIPROCESSOR = 22.5e3
"""Bytes in a microsecond for a multiprocessor that runs two programs."""
START = 0.6
"""Microseconds that a program costs its multiprocessor besides."""
SECOND_LAUNCH = 3.5
"""Microseconds that a second kernel costs."""
JOIN = 0.06
"""Microseconds that each part of a batch entry costs the second kernel."""


def _decode_configuration(dtype: torch.dtype, rank: int, features: int, rows: int) -> DecodeConfiguration:
    """Tiles for the larger of both ranks and of D and E (as blocks), and as many rows (query, head) as there are.

    Never for the batch: results must not depend on it.
    """
    if dtype == torch.float32:
        return DecodeConfiguration(32 if features <= 128 else 16, 16, 16, 4 if features <= 64 else 8, 1)
    if features <= 128:
        return DecodeConfiguration(16 if rank == 2 else 32, 16, 64, 8 if rows > 32 else 4, 4 if rank == 2 else 3)
    return DecodeConfiguration(64, 16, 32, 8, 2)


def _levels(strategy: str, tiles: int, keys: int, key_bytes: int, device: torch.device) -> int:
    """How much of the tree of chunks a program takes: what is fastest under a strategy."""
    one = next(levels for levels in range(ALL + 1) if CHUNKS.spans(keys, levels) == 1)
    if strategy in ("batch", "batch_head") or one == 0:
        return one
    choices = range(one if strategy == "split_kv" else one + 1)
    return min(
        choices, key=lambda levels: _microseconds(tiles, CHUNKS.spans(keys, levels), keys * key_bytes, device)
    )


def _microseconds(tiles: int, spans: int, entry_bytes: int, device: torch.device) -> float:
    """What the multiprocessor takes that has most to read, and then the second kernel."""
    programs = -(-tiles * spans // multiprocessors(device))
    span = entry_bytes / spans
    reading = max(programs * span / ONE_MULTIPROCESSOR, -(-programs // 2) * span / ONE_PROGRAM) + programs * START
    return reading + (SECOND_LAUNCH + spans * JOIN if spans > 1 else 0.0)


def logit_unit(dtype: torch.dtype) -> float:
    """What a logit is multiplied by so that `power` of the kernels is its exponential."""
    return 1.0 if dtype == torch.float32 else math.log2(math.e)


def _vector(*strides: int) -> int:
    """Largest divisor up to 8 elements that all strides share: wide loads rest on it."""
    return math.gcd(8, *strides)


def strides_of(tensor: Tensor | None) -> tuple[int, int, int, int]:
    """Strides in elements; an axis of size one gets stride 0, since it is never taken, but 1 if it is the last."""
    if tensor is None:
        return 0, 0, 0, 0
    *outer, last = (stride if size > 1 else None for stride, size in zip(tensor.stride(), tensor.shape))
    return *(stride or 0 for stride in outer), 1 if last is None else last  # type: ignore[return-value]


def _divided(strides: tuple[int, int, int, int], vector: int) -> tuple[int, int, int, int]:
    """Feature strides with the outer three divided."""
    b, n, r, d = strides
    return b // vector, n // vector, r // vector, d


class Operands(NamedTuple):
    """The six factors of a call, with their rank axis."""

    aq: Tensor | None
    ak: Tensor
    av: Tensor
    bq: Tensor
    bk: Tensor
    bv: Tensor


class Factors(NamedTuple):
    """Strides of factors as the kernels take them, and the constants that go with them."""

    vector: int
    flag: bool
    """Features are adjacent in memory, or heads and ranks, and offsets within a tile fit in 32 bits."""
    strides: tuple[tuple[int, int, int, int], ...]


def feature_factors(*factors: Tensor) -> Factors:
    """Strides of feature factors, and whether features are adjacent in all of them."""
    strides = tuple(map(strides_of, factors))
    unit = all(s[3] == 1 and max(s[1:3]) < NARROW for s in strides)
    vector = _vector(*(v for s in strides for v in s[:3])) if unit else 1
    return Factors(vector, unit, tuple(_divided(s, vector) for s in strides))


def head_factors(*factors: Tensor) -> Factors:
    """Strides of head factors, and whether heads and ranks are adjacent in all of them."""
    strides = tuple(map(strides_of, factors))
    dense = all(s[3] == 1 and s[2] in (0, f.shape[3]) and s[1] < NARROW for s, f in zip(strides, factors))
    vector = _vector(*(v for s in strides for v in s[:2])) if dense else 1
    return Factors(vector, dense, tuple((s[0] // vector, s[1] // vector, s[2], s[3]) for s in strides))


class _Decode(NamedTuple):
    """What a call allocates and launches."""

    shape: tuple[int, ...]  # of the result
    stride: tuple[int, ...]
    launch: Launch
    combine: Launch | None  # where the cache is split
    partial: tuple[int, int, int, int] | None  # shape of partial results in float32, where there are any
    statistics: tuple[int, int, int, int] | None


def decode(
    aq: Tensor | None,
    ak: Tensor,
    av: Tensor,
    bq: Tensor,
    bk: Tensor,
    bv: Tensor,
    cache_seqlens: Tensor | None,
    strategy: str,
    scale: float,
    scale_q: float,
    scale_k: float,
    scale_v: float,
    plans: Plans,
) -> Tensor:
    """Run the decode kernel, and where the cache is split the second one.

    Factors have their rank axis; they may be without it where ``plans`` are those of an earlier call, with it, that
    was the same in all but addresses and numbers in tensors.
    """
    plan = plans.get(
        "decode", _plan_decode,
        aq, ak, av, bq, bk, bv, cache_seqlens, strategy, scale, scale_q, scale_k, scale_v,
    )  # fmt: skip
    out = bq.new_empty_strided(plan.shape, plan.stride)
    partial = None if plan.partial is None else bq.new_empty(plan.partial, dtype=torch.float32)
    statistics = None if plan.statistics is None else bq.new_empty(plan.statistics, dtype=torch.float32)
    plan.launch((aq, bq, ak, bk, av, bv, cache_seqlens, out, partial, statistics))
    if plan.combine is not None:
        plan.combine((partial, statistics, cache_seqlens, out))
    return out


def _plan_decode(
    aq: Tensor | None,
    ak: Tensor,
    av: Tensor,
    bq: Tensor,
    bk: Tensor,
    bv: Tensor,
    cache_seqlens: Tensor | None,
    strategy: str,
    scale: float,
    scale_q: float,
    scale_k: float,
    scale_v: float,
) -> _Decode:
    batch, tokens, rank_q, features = bq.shape
    keys, heads, rank_k = ak.shape[1:]
    rank_v, values = bv.shape[2:]
    out = layout_of(bq if aq is None else aq, values)
    block_d, block_e = (max(16, triton.next_power_of_2(f)) for f in (features, values))
    block_rk, block_rv = triton.next_power_of_2(rank_k), triton.next_power_of_2(rank_v)
    rank = max(block_rk, block_rv)
    features_block, rows = max(block_d, block_e), triton.next_power_of_2(max(heads * tokens, 1))
    factor_rows, least_rows, most_rows, warps, stages = _decode_configuration(bq.dtype, rank, features_block, rows)
    block_m = factor_rows // rank
    block_rv = max(block_rv, 16 // block_m)  # a matrix product adds up 16 factor rows at least
    if strategy == "batch_head":
        least_rows = most_rows = HEADS_OF_BATCH_HEAD
    block_h = min(triton.next_power_of_2(heads), most_rows)
    block_n = min(triton.next_power_of_2(max(tokens, 1)), most_rows // block_h)
    block_h = max(block_h, least_rows // block_n)
    row_blocks = -(-heads // block_h) * -(-tokens // block_n)
    key_bytes = (heads * (rank_k + rank_v) + rank_k * features + rank_v * values) * bq.element_size()
    levels = _levels(strategy, batch * row_blocks, keys, key_bytes, bq.device)
    spans = CHUNKS.spans(keys, levels)
    whole = spans == 1
    partial = statistics = None
    if not whole:
        partial = (batch, spans, tokens * heads, values)
        statistics = (batch, spans, 2, tokens * heads)
    q, a, b = feature_factors(bq), head_factors(ak, av), feature_factors(bk, bv)
    lengths_b = 0 if cache_seqlens is None else cache_seqlens.stride(0)
    launch = Launch(
        decode_launch,
        batch * row_blocks * spans,
        (
            tokens, keys, spans, lengths_b, *strides_of(aq), *q.strides[0], *a.strides[0], *b.strides[0],
            *a.strides[1], *b.strides[1], *strides_of(out),
            scale * scale_k * logit_unit(bq.dtype), scale_q, scale_v,
        ),
        (
            heads, rank_q, rank_k, rank_v, features, values,
            block_n, block_h, block_m, 16, block_rk, block_rv, block_d, block_e,
            *CHUNKS, levels, whole,
            q.vector, q.flag, a.vector, a.flag, b.vector, b.flag,
        ),
        warps,
        stages,
    )  # fmt: skip
    combine = None
    if not whole:
        early = may_start_early(bq.device)
        combine = Launch(
            combine_launch,
            batch * -(-tokens * heads // COMBINE_ROWS),
            (tokens, keys, spans, lengths_b, *strides_of(out), scale_v),
            (heads, values, COMBINE_ROWS, block_e, COMBINE_AHEAD, *CHUNKS, levels, early),
            2,
            early=early,
        )
    return _Decode(tuple(out.shape), out.stride(), launch, combine, partial, statistics)
