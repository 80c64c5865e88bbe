"""Validation of arguments of tensor-product attention. `check_values` and `check_cache_values` read data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, get_args

import torch

from warploom.errors import ArgumentError, DtypeError, ShapeError, dtype_of, fault, shape_of
from warploom.ops.flash_attention.validation import MAX_FEATURES, MAX_PLACES, beyond_kernels
from warploom.ops.tpa.call import AttentionInputs, AttentionOptions, DecodeInputs, DecodeOptions
from warploom.runtime.arguments import (
    COUNTS,
    FLOATS,
    check_choice,
    check_cu_seqlens,
    check_device,
    check_flags,
    check_number,
    check_tensor,
    is_within,
)
from warploom.runtime.dispatch import ValidatedCall
from warploom.runtime.values import check_bounds, check_lengths

Tensor = torch.Tensor


Strategy = Literal["auto", "batch", "batch_head", "split_kv"]
STRATEGIES: tuple[str, ...] = get_args(Strategy)
MAX_RANK = 16
"""Largest rank of keys and of values that the kernels for decoding hold on chip."""
_STEP = 16  # heads or ranks that a program of products takes at least


def check_attention(name: str, inputs: AttentionInputs, options: tuple[Any, ...], _: int) -> ValidatedCall:
    """Validates a call of attention.

    Args:
        name: Of the public function.
        inputs: Its tensors.
        options: causal and the four scales.
    """
    aq, ak, av, bq, bk, bv, cu_seqlens = inputs
    causal, *given = options
    sizes = _check_factors(name, aq, ak, av, bq, bk, bv)
    scales = _fill_scales(name, aq, sizes, given)
    check_flags(name, causal=causal)
    if cu_seqlens is not None:
        _check_cu_seqlens(name, sizes, cu_seqlens, bq)
    return ValidatedCall(AttentionOptions(causal, *scales), _beyond_attention(sizes))


def check_decode(name: str, inputs: DecodeInputs, options: tuple[Any, ...], _: int) -> ValidatedCall:
    """Validates a call for decoding.

    Args:
        name: Of the public function.
        inputs: Its tensors.
        options: strategy and the four scales.
    """
    aq, ak, av, bq, bk, bv, seqused_k = inputs
    strategy, *given = options
    sizes = _check_factors(name, aq, ak, av, bq, bk, bv)
    scales = _fill_scales(name, aq, sizes, given)
    check_choice(name, "strategy", strategy, STRATEGIES)
    if seqused_k is not None:
        _check_lengths(name, "seqused_k", seqused_k, bq)
        if tuple(seqused_k.shape) != (sizes.batch,):
            raise fault(ShapeError, name, "seqused_k", f"(B,) with B = {sizes.batch}", shape_of(seqused_k))
    if torch.is_grad_enabled():
        factors = {"aq": aq, "ak": ak, "av": av, "bq": bq, "bk": bk, "bv": bv}
        for argument in (a for a, factor in factors.items() if factor is not None and factor.requires_grad):
            expected = "without requires_grad (or the call under torch.no_grad(); tpa_attention has gradients)"
            raise fault(ArgumentError, name, argument, expected, "requires_grad=True")
    return ValidatedCall(DecodeOptions(strategy, *scales), _beyond_decoding(sizes))


def check_values(name: str, inputs: AttentionInputs) -> None:
    """Checks what tensors of a valid call of attention hold."""
    check_bounds(name, "cu_seqlens", inputs.cu_seqlens, inputs.bq.shape[1])


def check_cache_values(name: str, inputs: DecodeInputs) -> None:
    """Checks what tensors of a valid call for decoding hold."""
    check_lengths(name, "seqused_k", inputs.seqused_k, inputs.ak.shape[1])


class _Sizes(NamedTuple):
    """Sizes of a call, from checked factors."""

    batch: int
    tokens: int
    keys: int
    heads: int
    rank_q: int
    rank_k: int
    rank_v: int
    features: int
    value_features: int


def _check_factors(
    name: str, aq: Tensor | None, ak: Tensor, av: Tensor, bq: Tensor, bk: Tensor, bv: Tensor
) -> _Sizes:
    factors = {"bq": bq, "aq": aq, "ak": ak, "bk": bk, "av": av, "bv": bv}
    for argument, factor in factors.items():
        if factor is None and argument == "aq":
            continue
        factor = check_tensor(name, argument, factor, FLOATS)
        if factor.dtype != bq.dtype:
            raise fault(DtypeError, name, argument, f"of the dtype of bq, {dtype_of(bq)}", dtype_of(factor))
        check_device(name, argument, factor, "bq", bq)
    if bq.dim() != 4 or 0 in bq.shape[2:]:
        expected = "(B, N, H, D) without aq" if aq is None else "(B, N, Rq, D)"
        raise fault(ShapeError, name, "bq", f"{expected}, with no size of 0 but B and N", shape_of(bq))
    batch, tokens, rank_q, features = bq.shape
    heads = rank_q
    if aq is not None:
        if aq.dim() != 4 or aq.shape[:2] != bq.shape[:2] or aq.shape[3] != rank_q or aq.shape[2] == 0:
            expected = f"(B, N, H, Rq) with B = {batch}, N = {tokens}, Rq = {rank_q} as in bq, H ≥ 1"
            raise fault(ShapeError, name, "aq", expected, shape_of(aq))
        heads = aq.shape[2]
    if ak.dim() not in (3, 4) or ak.shape[0] != batch or ak.shape[2] != heads or 0 in ak.shape[3:]:
        expected = f"(B, M, H) or (B, M, H, Rk) with B = {batch}, H = {heads}"
        raise fault(ShapeError, name, "ak", expected, shape_of(ak))
    keys = ak.shape[1]
    rank_k = _rank(ak)
    _check_features(name, "bk", bk, batch, keys, rank_k, "Rk", "D")
    if bk.shape[-1] != features:
        raise fault(ShapeError, name, "bk", f"of D = {features} features, as bq", shape_of(bk))
    if av.dim() not in (3, 4) or av.shape[:3] != ak.shape[:3] or 0 in av.shape[3:]:
        expected = f"(B, M, H) or (B, M, H, Rv) with B = {batch}, M = {keys}, H = {heads}"
        raise fault(ShapeError, name, "av", expected, shape_of(av))
    rank_v = _rank(av)
    _check_features(name, "bv", bv, batch, keys, rank_v, "Rv", "E")
    return _Sizes(batch, tokens, keys, heads, rank_q, rank_k, rank_v, features, bv.shape[-1])


def _rank(a: Tensor) -> int:
    return a.shape[3] if a.dim() == 4 else 1


def _check_features(
    name: str, argument: str, b: Tensor, batch: int, keys: int, rank: int, rank_letter: str, letter: str
) -> None:
    fits = b.dim() in (3, 4) and b.shape[0] == batch and b.shape[1] == keys and b.shape[-1] > 0
    if not fits or (b.shape[2] if b.dim() == 4 else 1) != rank:
        short = f"(B, M, {letter}) or " if rank == 1 else ""
        expected = f"{short}(B, M, {rank_letter}, {letter}) with B = {batch}, M = {keys}, {rank_letter} = {rank}"
        raise fault(ShapeError, name, argument, expected, shape_of(b))


def _fill_scales(name: str, aq: Tensor | None, sizes: _Sizes, given: Sequence[float | None]) -> list[float]:
    """Returns the four scales as numbers, with defaults for those that are left out."""
    of_queries = 1.0 if aq is None else 1 / sizes.rank_q
    defaults = (sizes.features**-0.5, of_queries, 1 / sizes.rank_k, 1 / sizes.rank_v)
    for argument, value in zip(("scale", "scale_q", "scale_k", "scale_v"), given):
        if value is not None:
            check_number(name, argument, value)
    return [default if value is None else float(value) for value, default in zip(given, defaults)]


def _check_cu_seqlens(name: str, sizes: _Sizes, cu_seqlens: Tensor, bq: Tensor) -> None:
    check_cu_seqlens(name, "cu_seqlens", cu_seqlens, "bq", bq)
    if sizes.batch != 1:
        raise fault(ShapeError, name, "bq", "of batch size 1 when cu_seqlens is given", shape_of(bq))
    if sizes.tokens != sizes.keys:
        expected = f"of as many keys as queries, N = {sizes.tokens}, when cu_seqlens is given"
        raise fault(ShapeError, name, "ak", expected, f"M = {sizes.keys}")


def _check_lengths(name: str, argument: str, lengths: Tensor, bq: Tensor) -> None:
    check_tensor(name, argument, lengths, COUNTS)
    check_device(name, argument, lengths, "bq", bq)


def _beyond_attention(sizes: _Sizes) -> str | None:
    """Returns why the Triton kernels for attention do not take this call, or None."""
    features = max(sizes.features, sizes.value_features)
    limit = beyond_kernels(sizes.batch, sizes.tokens, sizes.keys, sizes.heads, sizes.heads, features)
    steps = -(-max(sizes.heads, sizes.rank_q, sizes.rank_k, sizes.rank_v) // _STEP)
    programs = sizes.batch * (2 * sizes.keys + sizes.tokens) * steps
    if limit is None and not is_within(programs, MAX_PLACES):
        return f"products of factors take {programs} programs ({MAX_PLACES} at most)"
    return limit


def _beyond_decoding(sizes: _Sizes) -> str | None:
    """Returns why the Triton kernels for decoding do not take this call, or None."""
    if max(sizes.rank_k, sizes.rank_v) > MAX_RANK:
        return f"ranks of keys and values up to {MAX_RANK}; these are {sizes.rank_k} and {sizes.rank_v}"
    if max(sizes.features, sizes.value_features) > MAX_FEATURES:
        return f"up to {MAX_FEATURES} features a head; these are {sizes.features} and {sizes.value_features}"
    return None
