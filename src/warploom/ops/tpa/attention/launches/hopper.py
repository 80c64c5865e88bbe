"""Launches of the attention kernels for Hopper: which calls they take, and how these are cut into tiles.

They take 16-bit factors of rank one, two or four, the same for keys and values, with 33 to 128 features (what is
missing to 64 or 128 is filled with zeros), in causal and full attention with any number of tokens and keys. Other
ranks and packed sequences stay with the kernels for every GPU.

All launches but the first of a call start early: see `attention.launches.portable.backward`.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

from warploom.device.hopper.pipeline import ROWS
from warploom.ops.tpa.attention.configs import (
    HOPPER,
    HOPPER_FACTOR_ROWS,
    HOPPER_FEATURES,
    HOPPER_KEY_STAGES,
    HOPPER_RANKS,
    PROGRAMS,
)
from warploom.ops.tpa.attention.kernels.hopper.backward import (
    FactorStrides,
    GradientStrides,
    KeyScales,
    KeySizes,
    tpa_hopper_key_kernel,
    tpa_hopper_query_kernel,
)
from warploom.ops.tpa.attention.kernels.hopper.forward import tpa_hopper_forward_kernel
from warploom.ops.tpa.attention.launches.common import HeadRows, plan_prepare, queries, row_length
from warploom.ops.tpa.attention.problem import Call
from warploom.ops.tpa.problem import NARROW, Operands, logit_unit
from warploom.runtime.launch import (
    INTERPRETED,
    Boxes,
    Dense,
    Launch,
    architecture,
    are_aligned,
    can_be_copied,
    multiprocessors,
)
from warploom.runtime.memory_order import layout_of

Tensor = torch.Tensor

COUNTERS = Dense((2,), (1,), torch.int32)
"""With which programs take tiles: the forward's and the key kernel's, and the query kernel's. Not zero yet."""
_ROWS = ROWS.value
_BLOCK = 2 * _ROWS  # queries of a tile of the forward and the query kernel, keys of one of the key kernel
_LONGEST = 2**31  # strides travel in 32 bits


class Forward(NamedTuple):
    """What a forward allocates and launches."""

    tensors: tuple[Dense, ...]  # the output, Q, lse, statistics and counters
    ak: HeadRows
    av: HeadRows
    prepare: Launch
    launch: Launch

    def run(self, factors: Operands, call: Call) -> tuple[Tensor, Tensor]:
        """The output, and the statistics of every softmax (B, H, 2, N), in memory (2, B, H, N)."""
        aq, ak, av, bq, bk, bv = factors
        out, q, lse, statistics, counters = [like.empty(bq) for like in self.tensors]
        ak_rows, av_rows = self.ak(ak), self.av(av)
        self.prepare(bq, aq, None, None, None, q, None, None, counters)
        self.launch(q, bk, bv, out, ak_rows, av_rows, lse, statistics, counters)
        return out, statistics


def suit(factors: Operands, call: Call) -> bool:
    """Whether the kernels take a call."""
    aq, ak, av, bq, bk, bv = factors
    if INTERPRETED or architecture(bq.device) != 90 or bq.dtype == torch.float32:
        return False
    if call.cu_seqlens is not None or call.scale <= 0 or 0 in (*bq.shape, *ak.shape):
        return False
    if ak.shape[3] != av.shape[3] or ak.shape[3] not in HOPPER_RANKS:
        return False
    features, values = bq.shape[3], bv.shape[3]
    if max(features, values) not in HOPPER_FEATURES or features % 8 or values % 8:
        return False
    out = layout_of(bq if aq is None else aq, values)  # if that can be copied, so can a gradient of whole queries
    if not can_be_copied(out) or not (can_read(bk) and can_read(bv)):
        return False
    if max(ak.numel(), av.numel()) >= _LONGEST:  # their gradients are dense, whatever their own strides
        return False
    return all(max(b.stride()) < _LONGEST and b.stride(1) < NARROW for b in (bk, bv))


def can_read(tensor: Tensor) -> bool:
    """Whether the tensor memory accelerator can copy tiles of a tensor."""
    return can_be_copied(tensor) and are_aligned(tensor)


class _Boxes(NamedTuple):
    """How the kernels copy tensors: the order of their axes, and tiles."""

    queries: tuple[tuple[int, ...], tuple[int, ...]]  # Q (B, H, N, D)
    results: tuple[tuple[int, ...], tuple[int, ...]]  # and gradients (B, N, H, D)
    factors: tuple[tuple[int, ...], tuple[int, ...]]  # feature factors (B, M, R, D)


def _boxes(factors: Operands) -> _Boxes:
    rank, width = factors.bk.shape[2], 64 if max(factors.bq.shape[3], factors.bv.shape[3]) <= 64 else 128
    tile, factor = (1, 1, _ROWS, width), (1, rank, HOPPER_FACTOR_ROWS // rank, width)
    return _Boxes(((0, 1, 2, 3), tile), ((0, 2, 1, 3), tile), ((0, 2, 1, 3), factor))


def _formed(factors: Operands) -> Tensor:
    """Q (B, H, N, D), without memory."""
    like = queries(factors)
    return torch.empty(like.shape, dtype=like.dtype, device="meta")


def _for_queries(factors: Operands, call: Call) -> tuple[int, dict[str, Any]]:
    """Programs and arguments of a kernel that owns tiles of queries."""
    _, ak, _, bq, bk, bv = factors
    batch, keys, heads, rank = ak.shape
    tokens, boxes = bq.shape[1], _boxes(factors)
    blocks, rows = -(-tokens // _BLOCK), batch * heads
    exact = all(math.frexp(scale)[0] in (-0.5, 0.0, 0.5) for scale in (call.scale_k, call.scale_v))
    arguments = {
        "q_desc": Boxes(_formed(factors), *boxes.queries),
        "bk_desc": Boxes(bk, *boxes.factors),
        "bv_desc": Boxes(bv, *boxes.factors),
        "tokens": tokens,
        "keys": keys,
        "heads": heads,
        "rows": rows,
        "blocks": blocks,
        "stride": row_length(keys),
        "scale": call.scale * logit_unit(bq.dtype),
        "RANK": rank,
        "CAUSAL": call.causal,
        "BLOCK_N": HOPPER.keys,
        "STAGES": HOPPER.stages,
        "F_STAGES": HOPPER.factor_stages,
        "EXACT": exact,  # head factors keep all their bits when they are scaled, by powers of two, and rounded back
    }
    return min(multiprocessors(bq.device), blocks * rows), arguments


def plan_forward(factors: Operands, call: Call, out: Tensor) -> Forward:
    """The plan of a call that suits. ``out`` is a tensor like the output."""
    _, ak, av, bq, _, _ = factors
    batch, heads, tokens = bq.shape[0], ak.shape[2], bq.shape[1]
    lse = Dense.rows((batch, heads, tokens), torch.float32)
    strides = (heads * tokens, tokens, batch * heads * tokens, 1)
    statistics = Dense((batch, heads, 2, tokens), strides, torch.float32)
    programs, arguments = _for_queries(factors, call)
    launch = Launch(
        tpa_hopper_forward_kernel,
        programs,
        takes=("q_desc", "bk_desc", "bv_desc", "out_desc", "ak", "av", "lse", "statistics", "counters"),
        pdl=True,
        out_desc=Boxes(out, *_boxes(factors).results),
        **arguments,
    )
    return Forward(
        (Dense.like(out), queries(factors), lse, statistics, COUNTERS),
        HeadRows.of(ak, call.scale_k),
        HeadRows.of(av, call.scale_v),
        plan_prepare(factors, call, bq, bq, pdl=True),
        launch,
    )


def plan_query(factors: Operands, call: Call, grad: Tensor, dq: Tensor, scale: float) -> Launch:
    """The launch that writes ``scale · dQ`` to tensors like ``dq`` (B, N, H, D)."""
    programs, arguments = _for_queries(factors, call)
    results = _boxes(factors).results
    return Launch(
        tpa_hopper_query_kernel,
        programs,
        takes=("q_desc", "bk_desc", "bv_desc", "do_desc", "dq_desc", "ak", "av", "lse", "delta", "counters"),
        pdl=True,
        do_desc=Boxes(grad, *results),
        dq_desc=Boxes(dq, *results),
        grad_scale=scale * call.scale,
        **arguments,
    )


def groups(factors: Operands) -> int:
    """The number of groups of heads; each has its own sums of the gradients of ``bk`` and ``bv``."""
    batch, keys, heads, _ = factors.ak.shape
    most = PROGRAMS * multiprocessors(factors.bk.device) // (-(-keys // _BLOCK) * batch)
    return max(n for n in range(1, heads + 1) if heads % n == 0 and n <= max(most, 1))


def plan_key(factors: Operands, call: Call, grad: Tensor, like: Operands, groups: int) -> Launch:
    """The launch that writes the gradients of the factors of keys and values, to tensors like ``like``."""
    _, ak, _, bq, bk, bv = factors
    batch, keys, heads, rank = ak.shape
    blocks, rows, boxes = -(-keys // _BLOCK), batch * groups, _boxes(factors)
    bk_strides, bv_strides = (FactorStrides(*(stride // 8 for stride in b.stride()[:3])) for b in (bk, bv))
    return Launch(
        tpa_hopper_key_kernel,
        min(multiprocessors(bq.device), blocks * rows),
        takes=(
            *("q_desc", "do_desc", "ak", "av", "bk", "bv", "lse", "delta"),
            *("dak", "dav", "k_sums", "v_sums", "counters"),
        ),
        pdl=True,
        q_desc=Boxes(_formed(factors), *boxes.queries),
        do_desc=Boxes(grad, *boxes.results),
        sizes=KeySizes(bq.shape[1], keys, heads, groups, rows, blocks, row_length(keys), 0),
        bk_strides=bk_strides,
        bv_strides=bv_strides,
        dak_strides=GradientStrides(*like.ak.stride()),
        dav_strides=GradientStrides(*like.av.stride()),
        scales=KeyScales(call.scale * logit_unit(bq.dtype), *map(float, (call.scale, call.scale_k, call.scale_v))),
        RANK=rank,
        D=bq.shape[3],
        E=bv.shape[3],
        CAUSAL=call.causal,
        STAGES=HOPPER_KEY_STAGES,
    )
