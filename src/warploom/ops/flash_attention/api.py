"""The public function of flash attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, TypedDict, Unpack, overload

import torch

from warploom.errors import BackendError
from warploom.ops.flash_attention import fallback
from warploom.ops.flash_attention.block_mask import BlockMask, block_mask
from warploom.ops.flash_attention.operator import OPERATOR, OPERATOR_INTO, OPERATOR_MASKED
from warploom.ops.flash_attention.tangent import TANGENT
from warploom.ops.flash_attention.validation import (
    NAME,
    Bits,
    FlashInputs,
    MaskedInputs,
    Precision,
    check,
    check_into,
    check_masked,
    check_masked_values,
    check_values,
    check_values_into,
    masked_inputs,
)
from warploom.runtime.arguments import check_one_form
from warploom.runtime.autocast import cast_for_autocast
from warploom.runtime.backend import Backend
from warploom.runtime.dispatch import Function, Tensors, ValidatedCall
from warploom.runtime.memory_order import make_dense, reorder_like
from warploom.runtime.names import hide_catch_alls, refuse_unknown
from warploom.runtime.sharding import Axes, is_sharded

__all__ = ["BlockMask", "block_mask", "flash_attention"]

Tensor = torch.Tensor


class _Arguments(TypedDict, total=False):
    """All arguments of `flash_attention` by name but the one that decides what it returns."""

    causal: bool
    scale: float | None
    window: Sequence[int | None] | None
    softcap: float | None
    sink: Tensor | None
    cu_seqlens: Tensor | None
    cu_seqlens_q: Tensor | None
    cu_seqlens_k: Tensor | None
    seqused_k: Tensor | None
    block_table: Tensor | None
    mask: BlockMask | Tensor | None
    bias: Tensor | None
    alibi: Tensor | None
    float32_precision: Precision | None
    bits: Bits
    out: Tensor | None
    backend: Backend


@overload
def flash_attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: Literal[False] = ..., **arguments: Unpack[_Arguments]
) -> Tensor: ...
@overload
def flash_attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: Literal[True], **arguments: Unpack[_Arguments]
) -> tuple[Tensor, Tensor]: ...
@overload
def flash_attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: bool, **arguments: Unpack[_Arguments]
) -> Tensor | tuple[Tensor, Tensor]: ...
@hide_catch_alls
def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *_others: Any,
    causal: bool = False,
    scale: float | None = None,
    window: Sequence[int | None] | None = None,
    softcap: float | None = None,
    sink: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
    mask: BlockMask | Tensor | None = None,
    bias: Tensor | None = None,
    alibi: Tensor | None = None,
    float32_precision: Precision | None = None,
    bits: Bits = "batch",
    out: Tensor | None = None,
    return_lse: bool = False,
    backend: Backend = "auto",
    **_unknown: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """Exact attention, ``softmax(scale · q kᵀ) v``, in memory linear in the length.

    ``flash_attention(q, k, v, causal=True)`` is a decoder's attention. With ``Hkv < Hq`` heads of keys and values
    it is grouped-query attention, and query head ``h`` reads key head ``h // (Hq / Hkv)``.

    Args:
        q: ``(B, N, Hq, D)``, tokens before heads; float16, bfloat16, float32 or float64, any strides. A tensor
            ``(B, H, N, D)`` is given as ``x.transpose(1, 2)``; as it is, its heads are taken for tokens.
        k: ``(B, M, Hkv, D)`` in the dtype of ``q``, any strides; ``Hq`` a multiple of ``Hkv``.
        v: ``(B, M, Hkv, E)`` in the dtype of ``q``, any strides.
        causal: Query ``i`` sees key ``j`` if ``j ≤ i + M − N``: the last query is aligned with the last key, so
            that queries that extend a cache of keys see all of it. For ``N > M`` the first queries see nothing.
        scale: Factor of the inner products, any finite number; ``D^-½`` by default.
        window: ``(left, right)``, each a number of keys ≥ 0 or None for no bound: query ``i`` sees key ``j`` if
            ``−left ≤ j − (i + M − N) ≤ right``. With ``causal``, ``right`` is 0 or None: it sees no later key.
        softcap: Logits ``z = scale · q kᵀ`` become ``softcap · tanh(z / softcap)``; above 0. None for no cap.
        sink: ``(Hq,)``, any float dtype: one more logit in the sum of every row of a head, without a value. It
            takes part in lse, and has a gradient.
        cu_seqlens: ``(S + 1,)`` int32 or int64, ``0 = c₀ ≤ … ≤ c_S ≤ N``, with ``B = 1``: packed sequences, each of
            which attends to itself. Rows behind the last, as of padding to a fixed size, become 0 with an lse of
            −inf, and so do their gradients, whatever they hold.
        cu_seqlens_q: Bounds of the queries alone, where sequences attend to other keys, each with its own
            alignment. Not with ``cu_seqlens``. With ``seqused_k`` it is a server's batch: sequence ``s`` has any
            number of queries, which are its newest, and its keys in row ``s`` of a cache or in its pages.
        cu_seqlens_k: Bounds of the keys, ``c_S ≤ M``. If ``N = M``, either of the two stands for both.
        seqused_k: ``(B,)`` int32 or int64: batch entry ``b`` has its first ``seqused_k[b] ≤ M`` keys. What lies
            behind them is not read into a result, ``causal`` and ``window`` align with the last used key, and
            gradients there are 0. With ``cu_seqlens_q`` it is ``(S,)``, ``k`` and ``v`` have ``S`` entries, and
            there are no gradients. Not with bounds of keys.
        block_table: ``(B, P)`` int32, for keys in pages: then ``k`` is ``(pages, page_size, Hkv, D)``, ``v``
            likewise, and key ``j`` of batch entry ``b`` lies in page ``block_table[b, j // page_size]``. With
            ``seqused_k``; without gradients. Numbers of pages that hold no used key may be any.
        mask: What `block_mask` makes, or a boolean tensor ``(B or 1, Hq or 1, N, M)``, true where a key is seen.
            ``causal``, ``window`` and lengths hide keys besides. Not for packed queries on a cache, keys in pages
            or with ``out``, as is true of ``bias`` and ``alibi``.
        bias: ``(B or 1, Hq or 1, N or 1, M)``, any float dtype and strides: added to the logits, behind the cap. A
            key is hidden where it is −inf. It has a gradient, summed over the axes of size 1.
        alibi: ``(Hq,)`` or ``(B, Hq)``, any float dtype: slopes. ``alibi_h · (j − i − (M − N))`` is added to the
            logits: a key ``d`` places before its query gets ``−slope · d``. Without a gradient.
        float32_precision: How products of float32 tensors are computed by the kernels: ``highest`` (as exact as
            float32), ``high`` (TensorFloat-32, or two parts of a factor in bfloat16) or ``medium`` (bfloat16); the
            current value of ``torch.get_float32_matmul_precision()`` by default. Other dtypes have one way only.
        bits: What the bits of a query's results may depend on. ``batch``: on its sequence, and on how many queries
            that has; never on other sequences, padding or pages. ``chunks``, of packed queries on a cache: nor on
            that number, so that a prompt in chunks, a cached prefix and single tokens give the bits of the prompt
            in one call. Single tokens take longer then. The kernels alone promise this.
        out: ``(B, N, Hq, E)`` in the dtype of ``q``, any strides: where the result is written, which is returned.
            It shares no memory with other arguments, and nothing has a gradient.
        return_lse: Also return the logarithm of the sum of exponentials of every row; it is differentiable, in
            forward mode too.
        backend: ``auto`` (Triton where it can run, else PyTorch), ``triton`` or ``torch``.

    Returns:
        ``(B, N, Hq, E)`` in the dtype and memory order of ``q``; with ``return_lse`` also ``(B, Hq, N)`` float32
        (float64 for float64 inputs). A query that sees no key has output 0, lse ``−inf`` (or its sink), and
        gradients 0.
        Under autocast ``q``, ``k`` and ``v`` are cast as for PyTorch's own attention.

    Raises:
        ShapeError: A size does not fit.
        DtypeError: An argument has the wrong type.
        DeviceError: Tensors, or those of a mask, lie on different devices.
        ArgumentError: An unknown option, arguments that exclude each other, or bounds, lengths or pages that are
            not so (checked on a CPU; on a GPU see `check_values`).
        BackendError: ``backend="triton"`` cannot run this call, or kernels are needed for ``bits``.

    Source: Dao, "FlashAttention-2", 2023, arXiv 2307.08691, algorithms 1 and 2; Shah et al., "FlashAttention-3",
    2024, arXiv 2407.08608.

    Example:
        ```python
        import torch
        from warploom import flash_attention

        q = torch.randn(2, 128, 8, 64)  # (batch, sequence, heads, features)
        k, v = torch.randn(2, 2, 128, 2, 64)  # two heads of keys and values
        out = flash_attention(q, k, v, causal=True)
        out, lse = flash_attention(q, k, v, causal=True, window=(32, 0), return_lse=True)
        print(out.shape, lse.shape)  # torch.Size([2, 128, 8, 64]) torch.Size([2, 8, 128])
        ```
    """
    if _others or _unknown:
        refuse_unknown(flash_attention, _others, _unknown)
    if cu_seqlens is not None:
        check_one_form(NAME, cu_seqlens, cu_seqlens_q, cu_seqlens_k)
        cu_seqlens_q = cu_seqlens_k = cu_seqlens
    q, k, v = cast_for_autocast(q, k, v)
    if isinstance(window, list):
        window = tuple(window)
    inputs = FlashInputs(q, k, v, sink, cu_seqlens_q, cu_seqlens_k, seqused_k, block_table)
    options = (causal, scale, window, float32_precision, return_lse, softcap, bits)
    if mask is not None or bias is not None or alibi is not None:
        masking = masked_inputs(inputs, mask, bias, alibi, out)
        if is_sharded(masking):
            raise BackendError(f"{NAME}: a mask, bias or slopes are not for tensors that are sharded over a mesh")
        return _function_masked(backend, masking, options)  # type: ignore[no-any-return]
    if out is not None:
        results = _function_into(backend, (*inputs, out), options)
        return (out, *results) if return_lse else out
    return _function(backend, inputs, options)  # type: ignore[no-any-return]


def _run_reference(
    inputs: FlashInputs | MaskedInputs, _: int, call: ValidatedCall, backend: str
) -> Tensor | tuple[Tensor, Tensor]:
    inputs = call.arrange(*inputs) if call.arrange else inputs  # type: ignore[assignment]
    q, options, return_lse = inputs.q, call.options, call.num_results == 2
    if options.bits == "chunks":
        raise BackendError(f"{NAME}: bits='chunks' is a promise of the kernels, which do not run here")
    way: Any = fallback.MASKED if isinstance(inputs, MaskedInputs) else fallback.UNMASKED
    compute = way.define
    if backend == "auto" and not q.is_meta:
        reason = way.obstacle(inputs, options)
        if reason is None:
            compute = way.attend
        elif 0 not in (*q.shape, *inputs.k.shape):
            fallback.warn_of_definition(NAME, reason)
    results = compute(inputs, options, return_lse)
    if isinstance(results, Tensor):
        return reorder_like(q, results)
    return reorder_like(q, results[0]), make_dense(results[1])


def _run_reference_into(tensors: Tensors, number: int, call: ValidatedCall, backend: str) -> Tensors:
    """Write attention, and return lse if that is asked for."""
    *given, out = call.arrange(*tensors) if call.arrange else tensors
    results = _run_reference(FlashInputs(*given), number, call._replace(arrange=None), backend)
    attention, *rest = (results,) if isinstance(results, Tensor) else results
    out.copy_(attention)
    return tuple(rest)


def _axes(inputs: FlashInputs, options: tuple[object, ...]) -> Axes:
    """Returns the axes that calls are sharded over: batch entries, if not packed or in pages, and heads."""
    on_cache, return_lse = inputs.on_cache, options[4]
    keys = "..h." if on_cache or inputs.block_table is not None else "b.h."
    of_entries = ("", "") if on_cache else ("b", "b.")
    return Axes(("b.h.", keys, keys, "h", "", "", *of_entries), ("b.h.", "bh.") if return_lse else ("b.h.",))


_function = Function(NAME, check, _run_reference, OPERATOR, _axes, check_values, TANGENT)
_function_masked = Function(NAME, check_masked, _run_reference, OPERATOR_MASKED, check_values=check_masked_values)
_function_into = Function(NAME, check_into, _run_reference_into, OPERATOR_INTO, check_values=check_values_into)
