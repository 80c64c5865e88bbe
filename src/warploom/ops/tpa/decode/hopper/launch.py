"""The launcher of the decode kernel for Hopper: which calls it takes, its buffers, its costs.

It takes one new token a batch entry on 16-bit factors whose rows the tensor memory accelerator can copy, multiples
of 16 bytes: up to 32 heads and 128 features, up to 16 ranks of the query, one rank, 1, 2 or 4, of keys and values.
The batch and the length never decide, since kernels differ in the last bit. The rest stays with the kernel for
every GPU.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton

from warploom.ops.tpa.call import Factors
from warploom.ops.tpa.decode.chunks import ChunkTree
from warploom.runtime.launch import INTERPRETED, Launch, TmaTile, architecture, multiprocessors, supports_tma
from warploom.runtime.layout import TILE_STRIDE_LIMIT
from warploom.runtime.memory_order import layout_of

Tensor = torch.Tensor

MOST_HEADS = 32
"""Rows of a tile; more would need more registers for their sums than there are."""
MOST_RANKS = 16
"""The most ranks of the queries, whose factors are multiplied at once."""
_BLOCK_M = 64
_LONGEST = 2**31  # strides are passed in 32 bits
_SHARED_BYTES = 225 * 1024
"""Shared memory of a program, but for its barriers."""
_BUFFER_BYTES = {1: 96 * 1024, 2: 128 * 1024, 4: 128 * 1024}
"""The most shared memory for both rings of buffers, by rank."""
CHUNKS = ChunkTree(shortest=128, longest=1024, wanted=64, widths=(1, 2, 4, 8, 16))
_PENDING = CHUNKS.all_levels
"""Levels of the tree at which a softmax may be pending until its neighbour is computed."""
ONE_PROGRAM = 44e3
"""Bytes of the cache that a program takes in a microsecond where memory keeps up. This and the next three come from
49 cases on an H200, one to 128 batch entries, 256 to 524288 keys, ranks 1, 2 and 4: what they choose took at most
1.03 times as long as the best choice."""
ALL_PROGRAMS = 3.7e6
"""Bytes that all programs together take in a microsecond."""
START = 3.0
"""Microseconds that a split costs its program besides."""
JOIN = 0.06
"""Microseconds that each part of a batch entry costs the second kernel, whose launch hides behind the first."""


class Rings(NamedTuple):
    """Buffers of the decode kernel."""

    head_tiles: int
    feature_tiles: int


def rings(rank: int, rows: int, width: int) -> Rings:
    """Returns the numbers of buffers that fit, up to a limit: of as many bytes for head as for feature factors.

    ``rows`` and ``width`` of a tile are heads and features, as blocks.
    """
    head_bytes, feature_bytes = _BLOCK_M * rows * rank * 2, _BLOCK_M * width * 2
    pending = _PENDING * 4 * rows * (width + 2)
    queries_and_weights = 2 * (width * rows + MOST_RANKS * (rows + width) + rank * _BLOCK_M * rows)
    left = min(_SHARED_BYTES - pending - queries_and_weights, _BUFFER_BYTES[rank])
    head_tiles = max(left // (head_bytes + rank * feature_bytes), 2)
    return Rings(head_tiles, (left - head_tiles * head_bytes) // feature_bytes)


def suit(factors: Factors, lengths: Tensor | None = None) -> bool:
    """Returns whether the kernel takes a call with these factors and lengths, apart from their addresses."""
    aq, ak, av, bq, bk, bv = factors
    if INTERPRETED or architecture(bq.device) != 90 or bq.dtype not in (torch.float16, torch.bfloat16):
        return False
    batch, keys, heads, rank = ak.shape
    if bq.shape[1] != 1 or heads > MOST_HEADS or rank not in (1, 2, 4) or bv.shape[2] != rank or 0 in (batch, keys):
        return False
    if max(bk.shape[3], bv.shape[3]) > 128 or (aq is not None and bq.shape[2] > MOST_RANKS):
        return False
    if lengths is not None and lengths.stride(0) >= _LONGEST:
        return False
    for x in (aq, bq, layout_of(bq if aq is None else aq, bv.shape[3])):
        if x is not None and (x.stride(0) >= _LONGEST or max(x.stride()[2:]) >= TILE_STRIDE_LIMIT):
            return False
    dense = all(rank == 1 or a.stride()[2:] == (rank, 1) for a in (ak, av))
    return dense and all(map(supports_tma, (ak.flatten(2), av.flatten(2), bk, bv)))


def plan(
    factors: Factors,
    out: Tensor,
    lengths_stride: int,
    splits: int,
    levels: int,
    scales: tuple[float, float, float],
) -> Launch:
    """Returns the launch on factors like these, which suit, and ``splits`` splits of ``levels`` levels of the tree of chunks.

    ``scales`` are of logits, queries and values. It is launched on the output, partial results, their
    statistics, and the call's tensors.
    """
    from warploom.ops.tpa.decode.hopper.decode import (
        HopperDecodeConfig,
        SplitSizes,
        TokenFeatureStrides,
        TokenHeadStrides,
        hopper_decode_kernel,
    )
    from warploom.ops.tpa.decode.triton.decode import ChunkLengths, DecodeScales

    aq, ak, av, bq, bk, bv = factors
    batch, keys, heads, rank = ak.shape
    features, values = bk.shape[3], bv.shape[3]
    rows = max(16, triton.next_power_of_2(heads))
    width = 64 if max(features, values) <= 64 else 128
    head_box, feature_box = (1, 1, _BLOCK_M, rows * rank), (1, 1, _BLOCK_M, width)
    heads_k, heads_v = (TmaTile(a.flatten(2)[:, None], (0, 1, 2, 3), head_box) for a in (ak, av))
    features_k, features_v = (TmaTile(b, (0, 2, 1, 3), feature_box) for b in (bk, bv))
    aq_bhr, bq_brf, out_bhf = (
        (0, 0, 0) if x is None else (x.stride(0), *x.stride()[2:]) for x in (aq, bq, out)
    )  # one token
    work_items = batch * splits
    split_chunks = CHUNKS.widths[levels] if splits > 1 else 1  # one split is all keys
    ring = rings(rank, rows, width)
    return Launch(
        hopper_decode_kernel,
        min(multiprocessors(bq.device), work_items),
        takes=("out", "partial", "statistics", "aq", "ak_desc", "av_desc", "bq", "bk_desc", "bv_desc", "seqused_k"),
        ak_desc=heads_k, av_desc=heads_v, bk_desc=features_k, bv_desc=features_v,
        sizes=SplitSizes(lengths_stride, work_items, keys, splits, split_chunks),
        aq_strides=TokenHeadStrides(*aq_bhr), bq_strides=TokenFeatureStrides(*bq_brf),
        out_strides=TokenFeatureStrides(*out_bhf),
        scales=DecodeScales(*scales),
        config=HopperDecodeConfig(
            heads, bq.shape[2], rank, features, values, ring.head_tiles, ring.feature_tiles, splits == 1,
            ChunkLengths(*CHUNKS[:3]), _PENDING,
        ),
    )  # fmt: skip


def microseconds(tiles: int, splits: int, entry_bytes: int, device: torch.device) -> float:
    """Returns the estimated time: of the program that reads most or of all together, and of the second kernel after it."""
    rounds = -(-tiles * splits // multiprocessors(device))
    reading = rounds * (entry_bytes / splits / ONE_PROGRAM + START)
    return max(reading, tiles * entry_bytes / ALL_PROGRAMS) + (splits * JOIN if splits > 1 else 0.0)
