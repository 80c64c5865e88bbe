"""Models over several GPUs: their sequences and their matrices; the rest is for PyTorch's `fully_shard`."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from warploom.distributed.attention import context_parallel_attention
from warploom.distributed.delta_attention import context_parallel_delta_attention
from warploom.distributed.layout import Layout, check_layout
from warploom.distributed.linear_attention import context_parallel_linear_attention
from warploom.distributed.ranks import group_of
from warploom.distributed.segments import LAYOUT
from warploom.distributed.short_convolution import context_parallel_short_convolution
from warploom.errors import ArgumentError, DtypeError, fault
from warploom.nn import Attention, DeltaAttention, LinearAttention, SwiGLU, TransformerLM
from warploom.runtime.sharding import Axes, is_sharded, run_on_shards

Tensor = torch.Tensor

FEATURES = 32
"""Inner features of a SwiGLU that stay together on a rank, where they are divisible so."""


def shard_context(model: nn.Module, mesh: DeviceMesh, *, layout: Layout = "zigzag") -> None:
    """Let the attention layers of a model compute on this rank's part of sequences that a mesh shares.

    Queries and keys of `warploom.nn.Attention` must know where they stand, by ``position_ids``; linear and delta
    rule attention know by themselves.

    Args:
        model: Changed in place: its layers `warploom.nn.Attention`, `warploom.nn.LinearAttention` and
            `warploom.nn.DeltaAttention`.
        mesh: Of one dimension.
        layout: Of the parts; ``contiguous`` for linear and delta rule attention.

    Raises:
        ArgumentError: A layer cannot be shared so, the mesh has more dimensions, or the layout is unknown.
        DtypeError: ``mesh`` is no mesh.

    Example:
        ```python
        import torch
        from torch.distributed.device_mesh import init_device_mesh
        from warploom.distributed import local_position_ids, shard_context, shard_sequence

        mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))    # under torchrun
        from warploom.nn import TransformerConfig, TransformerLM

        model = TransformerLM(TransformerConfig(vocab_size=256, d_model=32, d_ff=64, layers=2, heads=4))
        shard_context(model, mesh)
        text = shard_sequence(torch.randint(256, (1, 65))[:, :64], mesh)
        logits = model(text, position_ids=local_position_ids(64, mesh)).logits      # (1, 64 / W, 256)
        ```
    """
    name = "shard_context"
    group_of(name, mesh)
    check_layout(name, layout)
    found = 0
    for layer in model.modules():
        if isinstance(layer, TransformerLM):
            layer.over_ranks = True
        elif isinstance(layer, Attention):
            if layer.implementation != "flash":
                raise fault(ArgumentError, name, "model", "of attention 'flash'", layer.implementation)
            layer.attend, found = functools.partial(_attend, mesh, layout), found + 1
        elif isinstance(layer, LinearAttention | DeltaAttention):
            if layout != LAYOUT:
                kind = "linear" if isinstance(layer, LinearAttention) else "delta rule"
                raise fault(ArgumentError, name, "layout", f"{LAYOUT!r} for {kind} attention", repr(layout))
            found += 1
            if isinstance(layer, LinearAttention):
                layer.attend = functools.partial(context_parallel_linear_attention, mesh=mesh)
            else:
                layer.attend = functools.partial(context_parallel_delta_attention, mesh=mesh)
                layer.convolve = functools.partial(context_parallel_short_convolution, mesh=mesh)
    if not found:
        expected = "one with layers Attention, LinearAttention or DeltaAttention"
        raise fault(ArgumentError, name, "model", expected, type(model).__name__)


def _attend(mesh: DeviceMesh, layout: Layout, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
    """Returns attention over a mesh, on heads that another mesh may shard."""

    def call(tensors: Any, _: int) -> Any:
        q, k, v = tensors
        return context_parallel_attention(q, k, v, mesh, layout=layout, **options)

    tensors = (q, k, v)
    if is_sharded(tensors):
        return run_on_shards("context_parallel_attention", Axes(("b.h.",) * 3, ("b.h.",)), tensors, 0, call)
    return call(tensors, 0)


def shard_matrices(model: TransformerLM, mesh: DeviceMesh) -> None:
    """Shard the matrices of a model's layers over a mesh: tensor parallelism.

    Every rank computes its heads and its inner features of all tokens; sums are made behind attention and behind
    SwiGLU. Rows of the fused projections are put in an order that does not depend on the number of ranks, so that a
    checkpoint fits any: see `warploom.nn.Attention` and `warploom.nn.SwiGLU`.

    Args:
        model: Of attention ``flash``, ``sdpa`` or ``plain``; changed in place, before `fully_shard`.
        mesh: Of one dimension. With one rank, rows are put in their order, and nothing else.

    Raises:
        ArgumentError: The mesh has more dimensions, or the model's heads or inner features are not divisible by it.
        DtypeError: ``model`` or ``mesh`` is something else.

    Example:
        ```python
        import torch
        from torch.distributed.device_mesh import init_device_mesh
        from warploom.distributed import shard_matrices

        mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))    # under torchrun
        from warploom.nn import TransformerConfig, TransformerLM

        model = TransformerLM(TransformerConfig(vocab_size=256, d_model=32, d_ff=128, layers=2, heads=4))
        shard_matrices(model, mesh)
        logits = model(torch.randint(256, (1, 64))).logits                          # (1, 64, 256)
        ```
    """
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    name = "shard_matrices"
    group_of(name, mesh)
    if not isinstance(model, TransformerLM):
        raise fault(DtypeError, name, "model", "a TransformerLM", type(model).__name__)
    ranks, config = mesh.size(), model.config
    features = math.gcd(config.d_ff, FEATURES)
    for block in model.blocks:
        attention, mlp = block.attention, block.mlp
        if not isinstance(attention, Attention):
            raise fault(ArgumentError, name, "model", "of attention 'flash', 'sdpa' or 'plain'", config.attention)
        if attention.kv_heads % ranks:
            raise fault(ArgumentError, name, "model", f"of kv_heads divisible by {ranks} ranks", attention.kv_heads)
        if not isinstance(mlp, SwiGLU) or (config.d_ff // features) % ranks:
            expected = f"of d_ff divisible by {features} · {ranks} ranks"
            raise fault(ArgumentError, name, "model", expected, config.d_ff)
    sharded: dict[str, Any] = {
        "attention.qkv": ColwiseParallel(use_local_output=False),
        "attention.out": RowwiseParallel(),
        "mlp.gate_up": ColwiseParallel(use_local_output=False),
        "mlp.down": RowwiseParallel(),
    }
    blocks: Any = model.blocks
    for block in blocks:
        block.attention.group()
        block.mlp.group(features)
        if ranks > 1:
            parallelize_module(block, mesh, sharded)
    if ranks > 1 and not config.tie:
        parallelize_module(model.head, mesh, ColwiseParallel(output_layouts=Replicate()))
