"""The public function that appends to a cache of keys and values."""

from __future__ import annotations

from typing import Any, Never

import torch

from warploom.ops.append_kv import reference
from warploom.ops.append_kv.call import AppendInputs
from warploom.ops.append_kv.operator import OPERATOR
from warploom.ops.append_kv.validation import check, check_values
from warploom.runtime.backend import Backend
from warploom.runtime.dispatch import Function, ValidatedCall
from warploom.runtime.memory_order import reorder_like
from warploom.runtime.names import hide_catch_alls, refuse_unknown

Tensor = torch.Tensor


@hide_catch_alls
def append_kv(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *_others: Never,
    seqused_k: Tensor,
    cu_seqlens: Tensor | None = None,
    block_table: Tensor | None = None,
    theta: Tensor | None = None,
    interleaved: bool = False,
    q: Tensor | None = None,
    backend: Backend = "auto",
    **_unknown: Never,
) -> Tensor | None:
    """Appends keys and values of new tokens to a cache, rotated at their positions, and rotates their queries.

    One launch does what a server does between the projections and attention: rotary positions of queries and keys,
    and the copy of keys and values to where their sequences continue, in a dense or a paged cache. **The caches are
    written in place**; they are the only inputs of this library that are.

    Token ``i`` of the ``n`` new ones of sequence ``s`` has place ``seqused_k[s] − n + i``: lengths count the new
    tokens, as `flash_attention` takes them next. The place is the position of the token too, exact wherever it is.
    A token whose place is outside of the cache, or of the pages of its table, is not written. Lengths, bounds and
    pages are read on the device: a CUDA graph of one step serves all.

    Args:
        k: ``(B, N, Hkv, D)``, keys of the new tokens; float16, bfloat16, float32 or float64, any strides.
        v: ``(B, N, Hkv, E)``, their values.
        k_cache: ``(S, M, Hkv, D)``, room for ``M`` keys of every sequence, or with ``block_table``
            ``(pages, page_size, Hkv, D)``. Of the dtype of ``k``, any strides without overlap. Written.
        v_cache: The same with ``E`` features. Written.
        seqused_k: ``(S,)`` int32 or int64: keys of each sequence, **with** the new ones, up to ``M``: lengths
            before them, such as ``cache_seqlens`` of flash-attn, plus the number of new tokens.
        cu_seqlens: ``(S + 1,)`` int32 or int64, ``0 = c₀ ≤ … ≤ c_S ≤ N``, with ``B = 1``: new tokens of several
            sequences, any number of each. Without it ``S = B``, and each sequence has ``N`` new ones.
        block_table: ``(S, P)`` int32: the page that holds keys ``p · page_size …`` of a sequence is
            ``block_table[s, p]``. Two sequences may share pages, but not those that this call writes.
        theta: ``(F,)`` or ``(1, F)`` with ``F ≤ D/2``, any float dtype: frequencies in radians per position, as of
            `lrpe_rotate`. None for keys that are stored as they are.
        interleaved: Rotate neighbouring features, instead of those of both halves.
        q: ``(B, N, Hq, D)``, queries of the new tokens, to be rotated; with ``theta`` only.
        backend: ``auto`` (Triton where it can run, else PyTorch), ``triton`` or ``torch``.

    Returns:
        The rotated queries in the memory order of ``q``, a new tensor, with zeros in rows behind the last sequence;
        None without ``q``.

    Raises:
        ShapeError: A size does not fit.
        DtypeError: An argument has the wrong type, or a cache another dtype than ``k``.
        DeviceError: Tensors lie on different devices.
        ArgumentError: ``q`` without ``theta``, a cache that overlaps with itself, a tensor that wants a gradient
            while gradients are being recorded, or lengths, bounds or pages that are not so (checked on a CPU; on a
            GPU see `check_values`, and nothing outside of the caches is written).
        BackendError: ``backend="triton"`` cannot run this call.

    Source: Kwon et al., "Efficient Memory Management for Large Language Model Serving with PagedAttention", 2023,
    arXiv 2309.06180; Su et al., "RoFormer", 2021, arXiv 2104.09864.

    Example:
        ```python
        import torch
        from warploom import append_kv, flash_attention

        k_cache, v_cache = torch.zeros(2, 64, 4, 16, 32)  # 64 pages of 4 keys
        table = torch.randperm(64)[:16].view(2, 8).int()  # of two sequences, 32 keys each at most
        theta = 10000.0 ** -(torch.arange(16) / 16)
        q, k, v = torch.randn(2, 1, 32, 32), *torch.randn(2, 2, 1, 16, 32)  # a new token of each
        used = torch.tensor([9, 1], dtype=torch.int32)  # keys with the new ones
        with torch.no_grad():
            q = append_kv(k, v, k_cache, v_cache, seqused_k=used, block_table=table, theta=theta, q=q)
            out = flash_attention(q, k_cache, v_cache, causal=True, seqused_k=used, block_table=table)
        print(out.shape)  # torch.Size([2, 1, 32, 32])
        ```
    """
    if _others or _unknown:
        refuse_unknown(append_kv, _others, _unknown)
    inputs = AppendInputs(k, v, q, k_cache, v_cache, theta, cu_seqlens, seqused_k, block_table)
    rotated: Tensor | None = _append(backend, inputs, (interleaved,))
    return None if q is None else rotated  # a registered operator always returns a tensor


def _run_reference(inputs: AppendInputs, _: int, call: ValidatedCall, backend: str) -> Any:
    given = inputs._asdict()
    rotated = reference.append_kv(**given, interleaved=call.options.kind == "interleaved")
    return None if rotated is None else reorder_like(given["q"], rotated)


_append = Function("append_kv", check, _run_reference, OPERATOR, check_values=check_values)
