"""Launchers of the attention kernels for Hopper: which calls they take, and how these are cut into tiles.

They take 16-bit factors of rank one, two or four, the same for keys and values, with 33 to 128 features (what is
missing to 64 or 128 is filled with zeros), in causal and full attention with any number of tokens and keys. Other
ranks and packed sequences stay with the kernels for every GPU.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from warploom.device.hopper.pipeline import ROWS
from warploom.ops.tpa.attention.kernels.hopper.backward import tpa_hopper_key_kernel, tpa_hopper_query_kernel
from warploom.ops.tpa.attention.kernels.hopper.forward import tpa_hopper_forward_kernel
from warploom.ops.tpa.attention.problem import PROGRAMS, Call
from warploom.ops.tpa.problem import NARROW, Operands, logit_unit, named
from warploom.runtime.launch import (
    ALIGNMENT,
    INTERPRETED,
    Boxes,
    Launch,
    architecture,
    can_be_copied,
    multiprocessors,
)
from warploom.runtime.memory_order import layout_of
from warploom.runtime.plans import Plans, are_kept, metadata

Tensor = torch.Tensor

_ROWS = ROWS.value
_BLOCK = 2 * _ROWS  # queries of a tile of the forward and the query kernel, keys of one of the key kernel
_FEATURES = range(33, 129)  # fewer would leave tiles of 64 half empty
_LONGEST = 2**31  # strides travel in 32 bits
_FACTOR_ROWS = 64  # rows of a tile of feature factors, all ranks together


class Tiles(NamedTuple):
    """How a kernel that walks over keys cuts its work."""

    keys: int
    stages: int  # tiles of keys, and as many of values
    factor_stages: int  # tiles of feature factors of each


RANKS = (1, 2, 4)  # a tile of feature factors has _FACTOR_ROWS
TILES = Tiles(64, 2, 2)
"""Of the forward and the query kernel; measured on an H200, as the key kernel's are."""

KEY_TILE = 64  # queries
KEY_STAGES = 3

_plans = Plans()


def suit(factors: Operands, call: Call) -> bool:
    """Whether the kernels take a call."""
    aq, ak, av, bq, bk, bv = factors
    if INTERPRETED or architecture(bq.device) != 90 or bq.dtype == torch.float32:
        return False
    if call.cu_seqlens is not None or call.scale <= 0 or 0 in (*bq.shape, *ak.shape):
        return False
    if ak.shape[3] != av.shape[3] or ak.shape[3] not in RANKS:
        return False
    features, values = bq.shape[3], bv.shape[3]
    if max(features, values) not in _FEATURES or features % 8 or values % 8:
        return False
    out = layout_of(bq if aq is None else aq, values)  # if that can be copied, so can a gradient of whole queries
    if not all(map(can_be_copied, (bk, bv, out))) or (bk.data_ptr() | bv.data_ptr()) % ALIGNMENT:
        return False
    if max(ak.numel(), av.numel()) >= _LONGEST:  # their gradients are dense, whatever their own strides
        return False
    return all(max(b.stride()) < _LONGEST and b.stride(1) < NARROW for b in (bk, bv))


def copyable(grad: Tensor) -> Tensor:
    """``grad``, or a copy of it where the tensor memory accelerator cannot read it."""
    if can_be_copied(grad) and grad.data_ptr() % ALIGNMENT == 0:
        return grad
    return grad.clone(memory_format=torch.contiguous_format)


def _launch(name: str, make: Callable[[], Launch], call: Call, tensors: Sequence[Tensor]) -> None:
    """Launch on ``tensors`` what ``make`` returned for the first call like this one."""
    if are_kept(tensors[0]):
        launch = _plans.get((name, call, *map(metadata, tensors)), make)
    else:
        launch = make()
    launch(*tensors)


def _boxes(q: Tensor, values: Tensor, rank: int) -> tuple[Callable[[Tensor], Boxes], ...]:
    """Boxes of Q (B, H, N, D), of results (B, N, H, D), and of feature factors (B, M, R, D)."""
    width = 64 if max(q.shape[3], values.shape[3]) <= 64 else 128
    tile = (1, 1, _ROWS, width)
    factor = (1, rank, _FACTOR_ROWS // rank, width)
    boxes = ((0, 1, 2, 3), tile), ((0, 2, 1, 3), tile), ((0, 2, 1, 3), factor)
    return tuple(functools.partial(lambda order, tile, x: Boxes(x, order, tile), *box) for box in boxes)


def _exact(call: Call) -> bool:
    """Whether head factors keep all their bits when they are scaled and rounded back: scales are powers of two."""
    return all(math.frexp(scale)[0] in (-0.5, 0.0, 0.5) for scale in (call.scale_k, call.scale_v))


def tickets(near: Tensor) -> Tensor:
    """By which programs take tiles: the forward's and the key kernel's, and the query kernel's. Not zero yet."""
    return torch.empty(2, dtype=torch.int32, device=near.device)


# The launches below start early: see `attention.launches.portable.backward`.


def forward(
    q: Tensor, tickets: Tensor, ak: Tensor, av: Tensor, bk: Tensor, bv: Tensor, out: Tensor, call: Call
) -> Tensor:  # fmt: skip
    """Write the output; return the statistics (B, H, 2, N).

    ``q`` is (B, H, N, D), dense. ``ak`` and ``av`` have their heads first, and include the scales of K and V.
    """
    batch, heads, tokens, _ = q.shape
    rank, keys = bk.shape[2], bk.shape[1]
    lse = torch.empty((batch, heads, tokens), dtype=torch.float32, device=q.device)
    statistics = torch.empty((2, batch, heads, tokens), dtype=torch.float32, device=q.device)

    def make() -> Launch:
        own, result, factor = _boxes(q, bv, rank)
        blocks, rows = -(-tokens // _BLOCK), batch * heads
        return Launch(
            tpa_hopper_forward_kernel,
            min(multiprocessors(q.device), blocks * rows),
            takes=("q_desc", "bk_desc", "bv_desc", "out_desc", "ak", "av", "lse", "statistics", "tickets"),
            early=True,
            q_desc=own(q), bk_desc=factor(bk), bv_desc=factor(bv), out_desc=result(out),
            tokens=tokens, keys=keys, heads=heads, rows=rows, blocks=blocks, stride=ak.shape[3],
            scale=call.scale * logit_unit(q.dtype), RANK=rank, CAUSAL=call.causal, BLOCK_N=TILES.keys,
            STAGES=TILES.stages, F_STAGES=TILES.factor_stages, EXACT=_exact(call),
        )  # fmt: skip

    _launch("forward", make, call, (q, bk, bv, out, ak, av, lse, statistics, tickets))
    return statistics.permute(1, 2, 0, 3).contiguous()


def query_gradient(
    q: Tensor, tickets: Tensor, shift: Tensor, delta: Tensor, grad: Tensor,
    ak: Tensor, av: Tensor, bk: Tensor, bv: Tensor, dq: Tensor, scale: float, call: Call,
) -> None:  # fmt: skip
    """Write ``scale · dQ`` to ``dq`` (B, N, H, D). Factors are as in `forward`; ``shift``, ``delta`` (B, H, N)."""
    batch, heads, tokens, _ = q.shape
    rank, keys = bk.shape[2], bk.shape[1]

    def make() -> Launch:
        own, result, factor = _boxes(q, bv, rank)
        blocks, rows = -(-tokens // _BLOCK), batch * heads
        return Launch(
            tpa_hopper_query_kernel,
            min(multiprocessors(q.device), blocks * rows),
            takes=("q_desc", "bk_desc", "bv_desc", "do_desc", "dq_desc", "ak", "av", "shift", "delta", "tickets"),
            early=True,
            q_desc=own(q), bk_desc=factor(bk), bv_desc=factor(bv), do_desc=result(grad), dq_desc=result(dq),
            tokens=tokens, keys=keys, heads=heads, rows=rows, blocks=blocks, stride=ak.shape[3],
            scale=call.scale * logit_unit(q.dtype), slope=scale * call.scale, RANK=rank, CAUSAL=call.causal,
            BLOCK_N=TILES.keys, STAGES=TILES.stages, F_STAGES=TILES.factor_stages, EXACT=_exact(call),
        )  # fmt: skip

    _launch(f"query {scale}", make, call, (q, bk, bv, grad, dq, ak, av, shift, delta, tickets))


def key_sums(bk: Tensor, bv: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    """Where `key_gradients` leaves the gradients of ``bk`` and ``bv`` in float32, each share of the heads' own."""
    blocks = -(-bk.shape[1] // _BLOCK)
    most = PROGRAMS * multiprocessors(bk.device) // (blocks * bk.shape[0])
    shares = max(n for n in range(1, heads + 1) if heads % n == 0 and n <= max(most, 1))
    sums_k, sums_v = (torch.empty((shares, *b.shape), dtype=torch.float32, device=b.device) for b in (bk, bv))
    return sums_k, sums_v


def key_gradients(
    q: Tensor, tickets: Tensor, shift: Tensor, delta: Tensor, grad: Tensor, ak: Tensor, av: Tensor, bk: Tensor,
    bv: Tensor, dak: Tensor, dav: Tensor, sums: tuple[Tensor, Tensor], call: Call,
) -> None:  # fmt: skip
    """Write ``dak``, ``dav`` and ``sums``."""
    batch, heads, tokens, features = q.shape
    rank, keys = bk.shape[2], bk.shape[1]
    blocks, shares = -(-keys // _BLOCK), sums[0].shape[0]

    def make() -> Launch:
        own, result, _ = _boxes(q, bv, rank)
        rows = batch * shares
        bk_bmr, bv_bmr = (tuple(stride // 8 for stride in b.stride()[:3]) for b in (bk, bv))
        return Launch(
            tpa_hopper_key_kernel,
            min(multiprocessors(q.device), blocks * rows),
            takes=(
                "q_desc", "do_desc", "ak", "av", "bk", "bv", "shift", "delta", "dak", "dav", "k_sums", "v_sums",
                "tickets",
            ),
            early=True,
            q_desc=own(q), do_desc=result(grad),
            tokens=tokens, keys=keys, heads=heads, shares=shares, rows=rows, blocks=blocks, stride=ak.shape[3],
            zero=0,
            **named(bk_bmr=bk_bmr, bv_bmr=bv_bmr, dak_bmhr=dak.stride(), dav_bmhr=dav.stride()),
            scale=call.scale * logit_unit(q.dtype), slope=float(call.scale), k_slope=float(call.scale_k),
            v_slope=float(call.scale_v),
            RANK=rank, D=features, E=bv.shape[3], CAUSAL=call.causal, STAGES=KEY_STAGES,
        )  # fmt: skip

    _launch("key", make, call, (q, grad, ak, av, bk, bv, shift, delta, dak, dav, *sums, tickets))
