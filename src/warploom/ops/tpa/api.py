"""The public functions of tensor-product attention."""

from __future__ import annotations

import functools
from typing import Any, Never

import torch

from warploom.ops.flash_attention import fallback
from warploom.ops.flash_attention.validation import FlashInputs, FlashOptions
from warploom.ops.tpa import reference
from warploom.ops.tpa.attention.operator import OPERATOR as ATTENTION
from warploom.ops.tpa.call import AttentionInputs, AttentionOptions, DecodeInputs, DecodeOptions
from warploom.ops.tpa.decode.operator import OPERATOR as DECODE
from warploom.ops.tpa.tangent import TANGENT
from warploom.ops.tpa.validation import (
    Strategy,
    check_attention,
    check_cache_values,
    check_decode,
    check_values,
)
from warploom.runtime.arguments import bounds_of_itself
from warploom.runtime.autocast import cast_for_autocast
from warploom.runtime.backend import Backend
from warploom.runtime.dispatch import Function, ValidatedCall
from warploom.runtime.memory_order import reorder_like
from warploom.runtime.modes import read_bounds
from warploom.runtime.names import hide_catch_alls, refuse_unknown
from warploom.runtime.sharding import Axes

Tensor = torch.Tensor


@hide_catch_alls
def tpa_attention(
    aq: Tensor | None,
    ak: Tensor,
    av: Tensor,
    bq: Tensor,
    bk: Tensor,
    bv: Tensor,
    *_others: Never,
    causal: bool = False,
    scale: float | None = None,
    scale_q: float | None = None,
    scale_k: float | None = None,
    scale_v: float | None = None,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    backend: Backend = "auto",
    **_unknown: Never,
) -> Tensor:
    """Tensor-product attention for training and prefill: softmax attention on factored queries, keys, values.

    With ``Q = scale_q · A_Q B_Q``, ``K = scale_k · A_K B_K`` and ``V = scale_v · A_V B_V`` for every token (matrix
    products ``H×R · R×D``), the result is ``softmax(scale · Q Kᵀ) V`` for every head. Q, K and V are in memory for
    the time of a call; what autograd keeps are the factors. Differentiable in all six factors.

    Args:
        aq: ``(B, N, H, Rq)``, head factors of the queries, or ``None`` where ``bq`` holds whole queries.
        ak: ``(B, M, H)`` or ``(B, M, H, Rk)``, head factors of the keys.
        av: ``(B, M, H)`` or ``(B, M, H, Rv)``, head factors of the values.
        bq: ``(B, N, Rq, D)``, feature factors of the queries; ``(B, N, H, D)``, the queries, without ``aq``.
        bk: ``(B, M, D)`` or ``(B, M, Rk, D)``, feature factors of the keys.
        bv: ``(B, M, E)`` or ``(B, M, Rv, E)``, feature factors of the values. All six are of one dtype, float16,
            bfloat16, float32 or float64, on one device, of any strides. Under autocast they are cast as
            those of PyTorch's own attention.
        causal: Hide keys ahead of the query, as in a decoder; the last query stands at the last key (query ``i`` at
            ``i + M − N``). A query that sees no key gives 0.
        scale: Factor of the logits; ``D^-½`` by default.
        scale_q: Factor of the queries; ``1 / Rq`` by default, 1 without ``aq``.
        scale_k: Factor of the keys; ``1 / Rk`` by default.
        scale_v: Factor of the values; ``1 / Rv`` by default.
        cu_seqlens: ``(S + 1,)`` int32 or int64, ``0 = c₀ ≤ … ≤ c_S ≤ N``, with ``B = 1`` and ``M = N``: packed
            sequences that do not see each other. Rows behind the last become 0, and so do their gradients, whatever
            they hold.
        cu_seqlens_q: Another name for ``cu_seqlens``, as in `warploom.flash_attention`; one of the names is given.
        cu_seqlens_k: Likewise. With ``cu_seqlens_q`` it must be the same tensor.
        backend: ``auto`` (Triton where it can run, else PyTorch), ``triton`` or ``torch``.

    Returns:
        ``(B, N, H, E)`` in the dtype of the factors and the memory order of ``aq`` (of ``bq`` without it).

    Raises:
        ShapeError: A size does not fit.
        DtypeError: An argument has the wrong type.
        DeviceError: Tensors lie on different devices.
        ArgumentError: An unknown option, or bounds that are not so (checked on a CPU; on a GPU see
            `check_values`).
        BackendError: ``backend="triton"`` cannot run this call.

    Source: Zhang et al., "Tensor Product Attention Is All You Need", 2025, arXiv 2501.06425.

    Example:
        ```python
        import torch
        from warploom import tpa_attention

        aq, bq = torch.randn(2, 100, 8, 6), torch.randn(2, 100, 6, 64)  # queries of rank 6
        ak, av = torch.randn(2, 2, 100, 8, 2)  # keys and values of rank 2
        bk, bv = torch.randn(2, 2, 100, 2, 64)
        out = tpa_attention(aq, ak, av, bq, bk, bv, causal=True)
        print(out.shape)  # torch.Size([2, 100, 8, 64])
        ```
    """
    if _others or _unknown:
        refuse_unknown(tpa_attention, _others, _unknown)
    if cu_seqlens_q is not None or cu_seqlens_k is not None:
        cu_seqlens = bounds_of_itself("tpa_attention", cu_seqlens, cu_seqlens_q, cu_seqlens_k)
    aq, ak, av, bq, bk, bv = cast_for_autocast(aq, ak, av, bq, bk, bv)
    options = (causal, scale, scale_q, scale_k, scale_v)
    return _attention(backend, AttentionInputs(aq, ak, av, bq, bk, bv, cu_seqlens), options)  # type: ignore[no-any-return]


@hide_catch_alls
def tpa_decode(
    aq: Tensor | None,
    ak: Tensor,
    av: Tensor,
    bq: Tensor,
    bk: Tensor,
    bv: Tensor,
    *_others: Never,
    scale: float | None = None,
    scale_q: float | None = None,
    scale_k: float | None = None,
    scale_v: float | None = None,
    seqused_k: Tensor | None = None,
    strategy: Strategy = "auto",
    backend: Backend = "auto",
    **_unknown: Never,
) -> Tensor:
    """Tensor-product attention of a few new tokens on a cache of factors, without forming keys and values.

    For rank one, ``logit[h, m] = ak[m, h] · (Q[h] · bk[m])`` and ``o[h] = Σ_m p[h, m] av[m, h] bv[m]``: the
    cache is read once for all heads. The new tokens are in the cache already and are its last ``N`` valid entries:
    query ``i`` sees the entries ``j ≤ L − N + i`` of the ``L`` valid ones. A query that sees none gives 0.

    The result of one batch entry depends on nothing but its own factors, not on the batch, the capacity of
    the cache or other entries' lengths, bit for bit. There is no gradient: `tpa_attention` is for training.

    Args:
        aq: ``(B, N, H, Rq)``, head factors of the queries, or ``None`` where ``bq`` holds whole queries.
        ak: ``(B, M, H)`` or ``(B, M, H, Rk)``, head factors of the keys.
        av: ``(B, M, H)`` or ``(B, M, H, Rv)``, head factors of the values.
        bq: ``(B, N, Rq, D)``, feature factors of the queries; ``(B, N, H, D)``, the queries, without ``aq``.
        bk: ``(B, M, D)`` or ``(B, M, Rk, D)``, feature factors of the keys.
        bv: ``(B, M, E)`` or ``(B, M, Rv, E)``, feature factors of the values. All six are of one dtype, float16,
            bfloat16, float32 or float64, on one device, of any strides. Under autocast they are cast as
            those of PyTorch's own attention.
        scale: Factor of the logits; ``D^-½`` by default.
        scale_q: Factor of the queries; ``1 / Rq`` by default, 1 without ``aq``.
        scale_k: Factor of the keys; ``1 / Rk`` by default.
        scale_v: Factor of the values; ``1 / Rv`` by default.
        seqused_k: ``(B,)`` int32 or int64, how many entries of the cache are valid for each batch entry, new
            tokens included, from 0 to ``M``; all ``M`` by default. On a GPU, where they are not checked, more than
            ``M`` counts as ``M``, and less than 0 as 0. What lies behind the valid entries is never looked at.
        strategy: How the kernels share the work: ``batch`` (one program per batch entry, all heads),
            ``batch_head`` (one per batch entry and few heads), ``split_kv`` (the cache is split, and a second
            kernel combines the parts in float32) or ``auto``, which picks the faster of ``batch`` and ``split_kv``.
            The torch backend has one way.
        backend: ``auto`` (Triton where it can run, else PyTorch), ``triton`` or ``torch``.

    Returns:
        ``(B, N, H, E)`` in the dtype of the factors and the memory order of ``aq`` (of ``bq`` without it).

    Raises:
        ShapeError: A size does not fit.
        DtypeError: An argument has the wrong type.
        DeviceError: Tensors lie on different devices.
        ArgumentError: An unknown option, a factor that wants a gradient while gradients are being recorded, or
            lengths that are not so (checked on a CPU; on a GPU see `check_values`).
        BackendError: ``backend="triton"`` cannot run this call.

    Source: Zhang et al., "Tensor Product Attention Is All You Need", 2025, arXiv 2501.06425.

    Example:
        ```python
        import torch
        from warploom import tpa_decode

        aq, bq = torch.randn(2, 1, 8, 6), torch.randn(2, 1, 6, 64)  # a new token, queries of rank 6
        ak, av = torch.randn(2, 2, 256, 8)  # a cache of rank one with room for 256 tokens
        bk, bv = torch.randn(2, 2, 256, 64)
        out = tpa_decode(aq, ak, av, bq, bk, bv, seqused_k=torch.tensor([200, 37]))
        print(out.shape)  # torch.Size([2, 1, 8, 64])
        ```
    """
    if _others or _unknown:
        refuse_unknown(tpa_decode, _others, _unknown)
    aq, ak, av, bq, bk, bv = cast_for_autocast(aq, ak, av, bq, bk, bv)
    options = (strategy, scale, scale_q, scale_k, scale_v)
    return _decode(backend, DecodeInputs(aq, ak, av, bq, bk, bv, seqused_k), options)  # type: ignore[no-any-return]


def _attention_in_torch(inputs: AttentionInputs, _: int, call: ValidatedCall, backend: str) -> Tensor:
    aq, ak, av, bq, bk, bv, cu_seqlens = inputs
    options: AttentionOptions = call.options
    (bounds,) = read_bounds(cu_seqlens)
    if backend == "auto" and not bq.is_meta:
        rows = bounds[-1] if isinstance(bounds, list) else None  # products of what is behind may be NaN
        q, k, v = (
            x.to(bq.dtype)
            for x in (
                reference.queries(None if aq is None else aq[:, :rows], bq[:, :rows], options.scale_q),
                reference.product(ak[:, :rows], bk[:, :rows], options.scale_k),
                reference.product(av[:, :rows], bv[:, :rows], options.scale_v),
            )
        )
        formed = FlashInputs(q, k, v, cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens)
        own = FlashOptions(None, 0 if options.causal else None, options.scale, None)
        reason = fallback.obstacle(formed, own)
        if reason is None:
            out = fallback.attend(formed, own, False)
            if rows is not None and rows < bq.shape[1]:
                out = torch.cat((out, out.new_zeros((1, bq.shape[1] - rows, *out.shape[2:]))), 1)
            return reorder_like(bq if aq is None else aq, out)
        fallback.warn_of_definition("tpa_attention", reason)
    out = reference.tpa_attention(aq, ak, av, bq, bk, bv, **options._asdict(), cu_seqlens=bounds)
    return reorder_like(bq if aq is None else aq, out)


def _decode_in_torch(inputs: DecodeInputs, _: int, call: ValidatedCall, backend: str) -> Tensor:
    aq, ak, av, bq, bk, bv, seqused_k = inputs
    options: DecodeOptions = call.options
    scales: dict[str, Any] = options._asdict()
    del scales["strategy"]  # which is of the kernels
    out = reference.tpa_decode(aq, ak, av, bq, bk, bv, **scales, seqused_k=seqused_k)
    return reorder_like(bq if aq is None else aq, out)


def _axes(of_lengths: str, inputs: AttentionInputs | DecodeInputs, options: tuple[Any, ...]) -> Axes:
    """Returns the axes that calls are sharded over: batch entries, if not packed, and heads."""
    queries = "b.h." if inputs.aq is None else "b..."
    return Axes(("b.h.", "b.h.", "b.h.", queries, "b...", "b...", of_lengths), ("b.h.",))


_attention = Function(
    "tpa_attention",
    check_attention,
    _attention_in_torch,
    ATTENTION,
    functools.partial(_axes, ""),
    check_values,
    TANGENT,
)
_decode = Function(
    "tpa_decode", check_decode, _decode_in_torch, DECODE, functools.partial(_axes, "b"), check_cache_values
)
