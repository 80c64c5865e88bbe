"""Launchers of the decode kernels: sizes, strides, tiles, strategy. No validation, no autograd."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton

from warploom.launch import Kernel, multiprocessors
from warploom.layout import empty_in_order_of
from warploom.ops.tpa.kernels import combine_kernel, decode_kernel

Tensor = torch.Tensor

decode_launch = Kernel(decode_kernel)
combine_launch = Kernel(combine_kernel)


class Chunks(NamedTuple):
    """Into what chunks the valid keys of a batch entry are cut: the same everywhere, since results depend on it."""

    shortest: int = 256
    longest: int = 4096
    wanted: int = 32
    """Chunks double in length before there are more than these."""

    def most(self, keys: int) -> int:
        """The largest number of chunks among all lengths up to ``keys``."""
        return max(min(-(-keys // self.shortest), self.wanted), -(-keys // self.longest))


class DecodeConfiguration(NamedTuple):
    """Tiles of the decode kernel."""

    factor_rows: int
    """Rows of feature factors in a block of keys: keys times rank."""
    most_rows: int
    """Rows (query, head) in a tile, at most."""
    warps: int
    stages: int


CHUNKS = Chunks()
HEADS_OF_BATCH_HEAD = 16
"""Rows of a tile under the strategy ``batch_head``."""
COMBINE_ROWS = 4
COMBINE_AHEAD = 8
"""Rows that a program combines, and chunks whose loads it starts at once."""
ONE_PROGRAM = 60e3
"""Bytes of the cache that a program reads in a microsecond, alone on its multiprocessor."""
ONE_MULTIPROCESSOR = 31e3
"""Bytes in a microsecond for each multiprocessor when all of them read."""
SECOND_LAUNCH = 4.0
"""Microseconds that a second kernel costs."""


def _decode_configuration(dtype: torch.dtype, rank: int, features: int, rows: int) -> DecodeConfiguration:
    """Tiles for the larger of both ranks and of D and E (as blocks), and as many rows (query, head) as there are.

    Never for the batch: results must not depend on it.
    """
    most_rows = 16 if dtype == torch.float32 else 64 if features <= 128 else 32
    rows = min(rows, most_rows)
    if dtype == torch.float32:
        return DecodeConfiguration(32 if features <= 128 else 16, most_rows, 4 if features <= 64 else 8, 1)
    if features <= 128:
        return DecodeConfiguration(32, most_rows, 8 if rows > 32 else 4, 4)
    return DecodeConfiguration(32 if rows > 32 else 64, most_rows, 8, 2)


def _strategy(batch: int, row_blocks: int, keys: int, key_bytes: int, device: torch.device) -> str:
    """The faster of ``batch`` and ``split_kv``, which give the same bits, from the time that reading takes."""
    spans = CHUNKS.most(keys)
    processors = multiprocessors(device)

    def reading(programs: int, bytes_each: float) -> float:
        waves = -(-programs // processors)
        return max(programs * bytes_each / (processors * ONE_MULTIPROCESSOR), waves * bytes_each / ONE_PROGRAM)

    whole = reading(batch * row_blocks, keys * key_bytes)
    split = reading(batch * row_blocks * spans, keys * key_bytes / max(spans, 1))
    return "batch" if whole <= split + SECOND_LAUNCH else "split_kv"


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


class Factors(NamedTuple):
    """Strides of factors as the kernels take them, and the constants that go with them."""

    vector: int
    flag: bool
    """Features adjacent in memory, or heads and ranks."""
    strides: tuple[tuple[int, int, int, int], ...]


def feature_factors(*factors: Tensor) -> Factors:
    """Strides of feature factors, and whether features are adjacent in all of them."""
    strides = tuple(map(strides_of, factors))
    unit = all(s[3] == 1 for s in strides)
    vector = _vector(*(v for s in strides for v in s[:3])) if unit else 1
    return Factors(vector, unit, tuple(_divided(s, vector) for s in strides))


def head_factors(*factors: Tensor) -> Factors:
    """Strides of head factors, and whether heads and ranks are adjacent in all of them."""
    strides = tuple(map(strides_of, factors))
    dense = all(s[3] == 1 and s[2] in (0, f.shape[3]) for s, f in zip(strides, factors))
    vector = _vector(*(v for s in strides for v in s[:2])) if dense else 1
    return Factors(vector, dense, tuple((s[0] // vector, s[1] // vector, s[2], s[3]) for s in strides))


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
) -> Tensor:
    """Run the decode kernel, and where the cache is split the second one; factors have their rank axis."""
    batch, tokens, rank_q, features = bq.shape
    keys, heads, rank_k = ak.shape[1:]
    rank_v, values = bv.shape[2:]
    out = empty_in_order_of(bq if aq is None else aq, values)
    block_d, block_e = (max(16, triton.next_power_of_2(f)) for f in (features, values))
    block_rk, block_rv = triton.next_power_of_2(rank_k), triton.next_power_of_2(rank_v)
    rank = max(block_rk, block_rv)
    features_block, rows = max(block_d, block_e), triton.next_power_of_2(max(heads * tokens, 1))
    factor_rows, most_rows, warps, stages = _decode_configuration(bq.dtype, rank, features_block, rows)
    block_m = factor_rows // rank
    block_rv = max(block_rv, 16 // block_m)  # a matrix product adds up 16 factor rows at least
    if strategy == "batch_head":
        most_rows = HEADS_OF_BATCH_HEAD
    block_h = min(triton.next_power_of_2(heads), most_rows)
    block_n = min(triton.next_power_of_2(max(tokens, 1)), most_rows // block_h)
    block_h = max(block_h, 16 // block_n)
    row_blocks = -(-heads // block_h) * -(-tokens // block_n)
    if strategy == "auto":
        key_bytes = (heads * (rank_k + rank_v) + rank_k * features + rank_v * values) * bq.element_size()
        strategy = _strategy(batch, row_blocks, keys, key_bytes, bq.device)
    spans = CHUNKS.most(keys) if strategy == "split_kv" else 1
    partial = statistics = None
    if spans > 1:
        partial = torch.empty((batch, spans, tokens * heads, values), dtype=torch.float32, device=bq.device)
        statistics = torch.empty((batch, spans, 2, tokens * heads), dtype=torch.float32, device=bq.device)
    q, a, b = feature_factors(bq), head_factors(ak, av), feature_factors(bk, bv)
    lengths_b = 0 if cache_seqlens is None else cache_seqlens.stride(0)
    decode_launch(
        batch * row_blocks * max(spans, 1),
        (aq, bq, ak, bk, av, bv, cache_seqlens, out, partial, statistics),
        (
            tokens, keys, max(spans, 1), lengths_b, *strides_of(aq), *q.strides[0], *a.strides[0], *b.strides[0],
            *a.strides[1], *b.strides[1], *strides_of(out),
            scale * scale_k, scale_q, scale_v,
        ),
        (
            heads, rank_q, rank_k, rank_v, features, values,
            block_n, block_h, block_m, 16, block_rk, block_rv, block_d, block_e,
            CHUNKS.shortest, CHUNKS.longest, CHUNKS.wanted,
            q.vector, q.flag, a.vector, a.flag, b.vector, b.flag,
        ),
        warps,
        stages,
    )  # fmt: skip
    if partial is not None:
        combine_launch(
            batch * -(-tokens * heads // COMBINE_ROWS),
            (partial, statistics, cache_seqlens, out),
            (tokens, keys, spans, lengths_b, *strides_of(out), scale_v),
            (heads, values, COMBINE_ROWS, block_e, COMBINE_AHEAD, CHUNKS.shortest, CHUNKS.longest, CHUNKS.wanted),
        )
    return out
