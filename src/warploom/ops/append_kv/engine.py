"""The launch: sizes, strides, tiles. No validation, no autograd."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton

from warploom.device.rows import RowSpec, Strides
from warploom.ops.append_kv.call import AppendInputs, AppendOptions
from warploom.ops.append_kv.triton import AppendConfig, AppendSizes, AppendStrides, append_kernel
from warploom.runtime.launch import Buffer, Launch
from warploom.runtime.layout import layout_for
from warploom.runtime.memory_order import layout_of
from warploom.runtime.plans import Plans

Tensor = torch.Tensor

TILE_BYTES = 2048
"""Bytes of a tile: a vector of 16 for each of 128 threads."""


class AppendPlan(NamedTuple):
    """Plan of a call: what it allocates and launches."""

    out: Buffer | None  # rotated queries
    launch: Launch


def append(inputs: AppendInputs, options: AppendOptions, plans: Plans) -> Tensor | None:
    """Runs the kernel. ``plans``: of earlier calls that were the same in all but data."""
    plan = plans.get("append", plan_append, inputs, options)
    out = None if plan.out is None else plan.out.empty(inputs.k)
    plan.launch(*inputs, out)
    torch.autograd.graph.increment_version((inputs.k_cache, inputs.v_cache))
    return out


def plan_append(inputs: AppendInputs, options: AppendOptions) -> AppendPlan:
    """Plans a call."""
    k, v, q, k_cache, v_cache, theta, cu_seqlens, seqused_k, table = inputs
    batch, tokens, heads, features = k.shape
    out = None if q is None else layout_of(q, features)
    tensors = {"k": k, "v": v, "q": q, "out": out, "k_cache": k_cache, "v_cache": v_cache}
    given = {name: x for name, x in tensors.items() if x is not None}
    layout = layout_for(Strides, *given.values())
    strides = dict.fromkeys(tensors, Strides(0, 0, 0, 0)) | dict(zip(given, layout.strides))
    pairs = features // 2
    widest = triton.next_power_of_2(max(features, v.shape[-1]))
    rows = max(TILE_BYTES // (widest * k.element_size()), 1)
    block_h = min(triton.next_power_of_2(heads), rows)
    tile_tokens = rows // block_h
    q_heads = 0 if q is None else q.shape[2]
    jobs = 2 * -(-heads // block_h) + -(-q_heads // block_h)
    launch = Launch(
        append_kernel,
        -(-batch * tokens // tile_tokens) * jobs,
        takes=(*AppendInputs._fields, "out"),
        sizes=AppendSizes(
            tokens=tokens,
            all_tokens=batch * tokens,
            sequences=seqused_k.shape[0],
            cache_rows=k_cache.shape[0],
            cache_columns=k_cache.shape[1],
            pages=1 if table is None else table.shape[1],
        ),
        strides=AppendStrides(
            **strides,
            theta=0 if theta is None else theta.stride(-1),
            cu_seqlens=0 if cu_seqlens is None else cu_seqlens.stride(0),
            seqused_k=seqused_k.stride(0),
            table_s=0 if table is None else table.stride(0),
            table_p=0 if table is None else table.stride(1),
        ),
        config=AppendConfig(
            spec=RowSpec(
                KIND=options.kind,
                AXES=1,
                VEC=layout.vec,
                THETA_VEC=1,
                UNIT=layout.unit,
                F=pairs,
                E=0 if theta is None else theta.shape[-1],
            ),
            HEADS=heads,
            Q_HEADS=q_heads,
            D=features,
            E=v.shape[-1],
            BLOCK_F=triton.next_power_of_2(max(pairs, 1)),
            BLOCK_H=block_h,
            TOKENS=tile_tokens,
        ),
    )
    return AppendPlan(None if out is None else Buffer.like(out), launch)
