"""Validation of the arguments of `append_kv`. Only `check_values` reads data of tensors."""

from __future__ import annotations

from typing import Any

import torch

from warploom.errors import ArgumentError, DtypeError, ShapeError, dtype_of, fault, shape_of
from warploom.ops.append_kv.call import AppendInputs, AppendOptions
from warploom.runtime.arguments import (
    COUNTS,
    FLOATS,
    check_cu_seqlens,
    check_device,
    check_flags,
    check_tensor,
    is_within,
)
from warploom.runtime.dispatch import ValidatedCall
from warploom.runtime.in_place import check_memory, check_takes_part
from warploom.runtime.values import check_bounds, check_lengths, check_pages, is_readable

Tensor = torch.Tensor

MAX_FEATURES = 8192
"""Features of a head that the kernel holds on chip at once."""
MAX_ROWS = 2**31 - 2**12
"""Rows of features that the kernel counts in 32 bits, to the end of the last tile."""


def check(name: str, inputs: AppendInputs, options: tuple[Any, ...], _: int) -> ValidatedCall:
    """Validates a call.

    Args:
        name: Of the public function.
        inputs: Its tensors.
        options: interleaved.
    """
    k, v, q, theta = inputs.k, inputs.v, inputs.q, inputs.theta
    (interleaved,) = options
    check_flags(name, interleaved=interleaved)
    _check_floats(name, inputs)
    _check_new(name, k, v, q, theta)
    _check_sequences(name, k, inputs.cu_seqlens, inputs.seqused_k)
    _check_caches(name, inputs)
    kind = "none" if theta is None else "interleaved" if interleaved else "rotate"
    features = max(k.shape[-1], v.shape[-1])
    limit = None
    if features > MAX_FEATURES:
        limit = f"a row of {features} features does not fit in one tile ({MAX_FEATURES} at most)"
    rows = k.shape[0] * k.shape[1] * (2 * k.shape[2] + (0 if q is None else q.shape[2]))
    if not is_within(rows, MAX_ROWS):
        limit = f"the new tokens have {rows} rows of features ({MAX_ROWS} at most)"
    return ValidatedCall(AppendOptions(kind), limit)


def check_values(name: str, inputs: AppendInputs) -> None:
    """Checks what tensors of a valid call hold."""
    k, *_, k_cache, _, _, cu_seqlens, seqused_k, table = inputs
    pages, size = k_cache.shape[:2]
    check_bounds(name, "cu_seqlens", cu_seqlens, k.shape[1])
    check_lengths(name, "seqused_k", seqused_k, size if table is None else size * table.shape[1])
    if not is_readable(seqused_k) or (cu_seqlens is not None and not is_readable(cu_seqlens)):
        return
    counts = [k.shape[1]] * k.shape[0] if cu_seqlens is None else cu_seqlens.diff().tolist()
    for sequence, (used, count) in enumerate(zip(seqused_k.tolist(), counts)):
        if used < count:
            expected = f"of keys with the new ones, of which sequence {sequence} has {count} (lengths before them, "
            expected += "as flash-attn's cache_seqlens, plus the new tokens)"
            raise fault(ArgumentError, name, "seqused_k", expected, used)
    if not is_readable(table):
        return
    check_pages(name, table, seqused_k, pages, size)
    written: dict[int, int] = {}
    for sequence, (row, used, count) in enumerate(zip(table.tolist(), seqused_k.tolist(), counts)):
        for page in row[max(used - count, 0) // size : -(-used // size)] if count else []:
            if written.setdefault(page, sequence) != sequence:
                expected = "of different pages where sequences append"
                got = f"page {page} of sequences {written[page]} and {sequence}"
                raise fault(ArgumentError, name, "block_table", expected, got)


def _check_floats(name: str, inputs: AppendInputs) -> None:
    """Checks types and devices, and that nothing wants a gradient."""
    k = inputs.k
    for argument in ("k", "v", "q", "k_cache", "v_cache", "theta"):
        tensor = getattr(inputs, argument)
        if tensor is None and argument in ("q", "theta"):
            continue
        check_tensor(name, argument, tensor, FLOATS)
        if argument != "theta" and tensor.dtype != k.dtype:
            raise fault(DtypeError, name, argument, f"of the dtype of k, {dtype_of(k)}", dtype_of(tensor))
        check_device(name, argument, tensor, "k", k)
        check_takes_part(name, argument, tensor)


def _check_new(name: str, k: Tensor, v: Tensor, q: Tensor | None, theta: Tensor | None) -> None:
    """Checks the new tokens, and the frequencies that rotate them."""
    if k.dim() != 4 or 0 in k.shape[2:]:
        raise fault(ShapeError, name, "k", "(B, N, Hkv, D) with Hkv ≥ 1 and D ≥ 1", shape_of(k))
    batch, tokens, heads, features = k.shape
    if v.dim() != 4 or v.shape[:3] != k.shape[:3] or v.shape[3] == 0:
        expected = f"(B, N, Hkv, E) with B = {batch}, N = {tokens}, Hkv = {heads}, E ≥ 1"
        raise fault(ShapeError, name, "v", expected, shape_of(v))
    if q is not None:
        if theta is None:
            raise fault(ArgumentError, name, "theta", "given with q, which is returned rotated", None)
        if q.dim() != 4 or q.shape[:2] != k.shape[:2] or q.shape[2] == 0 or q.shape[3] != features:
            expected = f"(B, N, Hq, D) with B = {batch}, N = {tokens}, Hq ≥ 1, D = {features}"
            raise fault(ShapeError, name, "q", expected, shape_of(q))
    if theta is not None:
        if features % 2:
            raise fault(ShapeError, name, "k", "of an even number of features D where there is theta", shape_of(k))
        most = features // 2
        if theta.dim() not in (1, 2) or theta.shape[:-1] not in ((), (1,)) or not 1 <= theta.shape[-1] <= most:
            expected = f"(F,) or (1, F) with 1 ≤ F ≤ D/2 = {most}"
            raise fault(ShapeError, name, "theta", expected, shape_of(theta))


def _check_sequences(name: str, k: Tensor, cu_seqlens: Tensor | None, seqused_k: Tensor) -> None:
    """Checks bounds and lengths."""
    check_device(name, "seqused_k", check_tensor(name, "seqused_k", seqused_k, COUNTS), "k", k)
    sequences = k.shape[0]
    if cu_seqlens is not None:
        check_cu_seqlens(name, "cu_seqlens", cu_seqlens, "k", k)
        if k.shape[0] != 1:
            raise fault(ShapeError, name, "k", "of batch size 1 when cu_seqlens is given", shape_of(k))
        sequences = cu_seqlens.shape[0] - 1
    if tuple(seqused_k.shape) != (sequences,):
        raise fault(ShapeError, name, "seqused_k", f"(S,) with S = {sequences}", shape_of(seqused_k))


def _check_caches(name: str, inputs: AppendInputs) -> None:
    """Checks the caches and the table."""
    k, v, _, k_cache, v_cache, _, _, seqused_k, table = inputs
    sequences, heads = seqused_k.shape[0], k.shape[2]
    if table is not None:
        check_tensor(name, "block_table", table, (torch.int32,))
        if table.dim() != 2 or table.shape[0] != sequences:
            raise fault(ShapeError, name, "block_table", f"(S, P) with S = {sequences}", shape_of(table))
        check_device(name, "block_table", table, "k", k)
    for argument, cache, features in (("k_cache", k_cache, k.shape[3]), ("v_cache", v_cache, v.shape[3])):
        letter = "D" if cache is k_cache else "E"
        fits = cache.dim() == 4 and cache.shape[2] == heads and cache.shape[3] == features
        if table is None:
            expected = f"(S, M, Hkv, {letter}) with S = {sequences}, Hkv = {heads}, {letter} = {features}"
            fits = fits and cache.shape[0] == sequences
        else:
            expected = f"(pages, page_size, Hkv, {letter}) with page_size ≥ 1, Hkv = {heads}, {letter} = {features}"
            fits = fits and cache.shape[1] > 0
        if not fits or cache.shape[:2] != k_cache.shape[:2]:
            raise fault(ShapeError, name, argument, expected, shape_of(cache))
        check_memory(name, argument, cache)
    if k_cache is v_cache:
        raise fault(ArgumentError, name, "v_cache", "another tensor than k_cache", "the same")
