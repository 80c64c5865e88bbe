"""Attention over a sequence that ranks share: `context_parallel_attention`."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Literal, TypedDict, Unpack, overload

import torch
from torch.distributed.device_mesh import DeviceMesh

from warploom.distributed.agreement import refuse, refuse_compiled, sizes_of
from warploom.distributed.attention.chunks import ContextAttentionOptions
from warploom.distributed.attention.operator import NAME, OPERATOR
from warploom.distributed.layout import Layout, check_layout
from warploom.distributed.ranks import check_device, check_packed, group_of
from warploom.errors import ShapeError, WarploomError, fault, shape_of
from warploom.ops.flash_attention.validation import FlashInputs, FlashOptions, Precision, check
from warploom.runtime.arguments import as_python
from warploom.runtime.autocast import cast_for_autocast
from warploom.runtime.backend import Backend, use_triton
from warploom.runtime.dispatch import Tensors, apply
from warploom.runtime.names import hide_catch_alls, refuse_unknown

Tensor = torch.Tensor


class ContextAttentionArguments(TypedDict, total=False):
    """All arguments of `context_parallel_attention` by name but the one that decides what it returns."""

    causal: bool
    scale: float | None
    window: Sequence[int | None] | None
    softcap: float | None
    sink: Tensor | None
    cu_seqlens: Tensor | None
    layout: Layout
    float32_precision: Precision | None
    backend: Backend


@overload
def context_parallel_attention(
    q: Tensor, k: Tensor, v: Tensor, mesh: DeviceMesh, *,
    return_lse: Literal[False] = ..., **arguments: Unpack[ContextAttentionArguments],
) -> Tensor: ...  # fmt: skip
@overload
def context_parallel_attention(
    q: Tensor, k: Tensor, v: Tensor, mesh: DeviceMesh, *,
    return_lse: Literal[True], **arguments: Unpack[ContextAttentionArguments],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def context_parallel_attention(
    q: Tensor, k: Tensor, v: Tensor, mesh: DeviceMesh, *,
    return_lse: bool, **arguments: Unpack[ContextAttentionArguments],
) -> Tensor | tuple[Tensor, Tensor]: ...  # fmt: skip
@hide_catch_alls
def context_parallel_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mesh: DeviceMesh,
    *_others: Any,
    causal: bool = False,
    scale: float | None = None,
    window: Sequence[int | None] | None = None,
    softcap: float | None = None,
    sink: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    layout: Layout = "zigzag",
    float32_precision: Precision | None = None,
    return_lse: bool = False,
    backend: Backend = "auto",
    **_unknown: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """`warploom.flash_attention` of a sequence whose tokens are shared by the ranks of a mesh.

    Outputs and the gradient of queries have the bits of one GPU's where that cuts keys into the same tiles, which
    it does in all but short calls. Gradients of keys and values are sums of those of every chunk, in float32 in a
    fixed order. All ranks must make the same call; what one of them refuses, all refuse with the same error.

    Args:
        q: ``(B, n, Hq, D)``, this rank's part of the queries ``(B, N, Hq, D)``, as `shard_sequence` cuts them;
            dtypes and strides as in `warploom.flash_attention`.
        k: ``(B, n, Hkv, D)``, this rank's part of the keys.
        v: ``(B, n, Hkv, E)``, this rank's part of the values.
        mesh: Of one dimension, over whose ranks tokens are shared.
        causal: A query sees its own token and earlier ones.
        scale: Factor of the inner products; ``D^-½`` by default.
        window: ``(left, right)``, how many keys before and behind itself a query sees at most; None for no bound.
            Only the keys that a chunk sees are sent to it, where they are few.
        softcap: As in `warploom.flash_attention`.
        sink: ``(Hq,)``, the same on every rank. Its gradient is this rank's part, to be summed over the mesh.
        cu_seqlens: ``(S + 1,)`` int32 or int64, the same on every rank, with ``B = 1``: the bounds of packed
            sequences in the whole, ``c_S ≤ N``, as in `warploom.flash_attention`. They are read by the host, once
            for each tensor.
        layout: ``zigzag``, which gives every rank the same work in causal attention, or ``contiguous``.
        float32_precision: As in `warploom.flash_attention`.
        return_lse: Also return the logarithm of the sum of exponentials of every row; it is differentiable.
        backend: ``auto``, ``triton`` or ``torch``.

    Returns:
        ``(B, n, Hq, E)``, this rank's part of the outputs; with ``return_lse`` also that of lse, ``(B, Hq, n)``.

    Raises:
        ShapeError: A size does not fit, or parts are not those of the layout.
        DtypeError: An argument has the wrong type.
        DeviceError: A tensor is not on this rank's device of the mesh.
        ArgumentError: The mesh has more dimensions, an option is unknown, bounds are not those of the whole, or
            the ranks' calls differ.
        BackendError: ``backend="triton"`` cannot run this call.

    Source: keys and values gathered, chunks in zigzag: Llama Team, "The Llama 3 Herd of Models", 2024, arXiv
    2407.21783, section 3.3.2.

    Example:
        ```python
        import torch
        from torch.distributed.device_mesh import init_device_mesh
        from warploom.distributed import context_parallel_attention, shard_sequence

        mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))    # under torchrun
        q, k, v = (shard_sequence(torch.randn(1, 64, 8, 16), mesh) for _ in range(3))
        out = context_parallel_attention(q, k, v, mesh, causal=True)             # (1, 64 / W, 8, 16)
        ```
    """
    if _others or _unknown:
        refuse_unknown(context_parallel_attention, _others, _unknown)
    q, k, v = cast_for_autocast(q, k, v)
    tensors, given = (q, k, v, sink, cu_seqlens), (causal, scale, window, float32_precision, return_lse, softcap)
    try:
        options = _validate(tensors, given, mesh, layout, backend)
    except WarploomError as error:
        if torch.compiler.is_compiling():
            return refuse_compiled(  # type: ignore[no-any-return]
                NAME, mesh, error, tensors, lambda *tensors: _validate(tensors, given, mesh, layout, backend),
                functools.partial(_shapes, return_lse),
            )  # fmt: skip
        refuse(NAME, mesh, error)
    found = apply(OPERATOR, tensors, 0, options)
    return found[:2] if return_lse else found[0]


def _validate(
    tensors: Tensors, given: tuple[Any, ...], mesh: DeviceMesh, layout: str, backend: str
) -> ContextAttentionOptions:
    """Returns the options of a call, if this rank finds nothing wrong with it."""
    group = group_of(NAME, mesh).group_name
    q, k, v, sink, cu_seqlens = tensors
    causal, scale, window, precision, return_lse, softcap = given
    window = tuple(window) if isinstance(window, list) else window
    given = as_python((causal, scale, window, precision, return_lse, softcap, "batch"))
    call = check(NAME, FlashInputs(q, k, v, sink), given, 0)
    kernels = use_triton(NAME, backend, q, call.unsupported)
    check_layout(NAME, layout)
    check_device(NAME, mesh, "q", q)
    if k.shape[1] != q.shape[1]:
        raise fault(ShapeError, NAME, "k", f"of as many tokens as q, {q.shape[1]}", shape_of(k))
    if cu_seqlens is not None:
        check_packed(NAME, cu_seqlens)
        if q.shape[0] != 1:
            raise fault(ShapeError, NAME, "q", "of batch size 1 when cu_seqlens are given", shape_of(q))
    settled: FlashOptions = call.options
    of_attention = (settled.left, settled.right, settled.scale, settled.precision, settled.softcap)
    return ContextAttentionOptions(*of_attention, kernels, layout, group)


def _shapes(return_lse: bool, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> list[tuple[int, ...]]:
    """Returns the shapes of the results of a call that may be wrong."""
    batch, tokens, heads, _features, values = sizes_of(q, k, v)
    return [(batch, tokens, heads, values), *[(batch, heads, tokens)] * bool(return_lse)]
