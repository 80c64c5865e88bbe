"""The public functions of tensor-product attention: documentation, validation, choice of backend."""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple

import torch

from warploom.errors import ArgumentError, DeviceError, DtypeError, ShapeError, dtype_of, fault, shape_of
from warploom.ops.tpa import reference
from warploom.runtime.arguments import FLOATS, check_number, checked_tensor
from warploom.runtime.backend import use_triton
from warploom.runtime.eager import is_plain_eager, is_watched
from warploom.runtime.memory_order import in_order_of
from warploom.runtime.plans import Plans, are_kept, metadata

Tensor = torch.Tensor

STRATEGIES = ("auto", "batch", "batch_head", "split_kv")
MAX_RANK = 16
"""Largest rank of keys and of values that the kernels hold on chip."""
MAX_FEATURES = 256
"""Most features D and E of one head that the kernels hold on chip."""
MAX_FEATURES_FLOAT32 = 128
"""The same for `tpa_attention` in float32."""


def tpa_attention(
    aq: Tensor | None,
    ak: Tensor,
    av: Tensor,
    bq: Tensor,
    bk: Tensor,
    bv: Tensor,
    *,
    causal: bool = True,
    scale: float | None = None,
    scale_q: float | None = None,
    scale_k: float | None = None,
    scale_v: float | None = None,
    cu_seqlens: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """Tensor-product attention for training and prefill: softmax attention on factored queries, keys, values.

    With ``Q = scale_q · A_Q B_Q``, ``K = scale_k · A_K B_K`` and ``V = scale_v · A_V B_V`` for every token (matrix
    products ``H×R · R×D``), the result is ``softmax(scale · Q Kᵀ) V`` for every head. The kernels never hold K and
    V in device memory. Differentiable in all six factors.

    Args:
        aq: ``(B, N, H, Rq)``, head factors of the queries, or ``None`` where ``bq`` holds whole queries.
        ak: ``(B, M, H)`` or ``(B, M, H, Rk)``, head factors of the keys.
        av: ``(B, M, H)`` or ``(B, M, H, Rv)``, head factors of the values.
        bq: ``(B, N, Rq, D)``, feature factors of the queries; ``(B, N, H, D)``, the queries, without ``aq``.
        bk: ``(B, M, D)`` or ``(B, M, Rk, D)``, feature factors of the keys.
        bv: ``(B, M, E)`` or ``(B, M, Rv, E)``, feature factors of the values. All six are of one dtype, float16,
            bfloat16, float32 or float64, on one device, of any strides.
        causal: Hide keys ahead of the query; the last query stands at the last key (query ``i`` at
            ``i + M − N``). A query that sees no key gives 0.
        scale: Factor of the logits; ``D^-½`` by default.
        scale_q: Factor of the queries; ``1 / Rq`` by default, 1 without ``aq``.
        scale_k: Factor of the keys; ``1 / Rk`` by default.
        scale_v: Factor of the values; ``1 / Rv`` by default.
        cu_seqlens: ``(S + 1,)`` int32 or int64, ``0 = c₀ ≤ … ≤ c_S = N``, with ``B = 1`` and ``M = N``: packed
            sequences that do not see each other. Values are not checked.
        backend: ``auto`` (Triton where it can run, else PyTorch), ``triton`` or ``torch``.

    Returns:
        ``(B, N, H, E)`` in the dtype of the factors and the memory order of ``aq`` (of ``bq`` without it).

    Raises:
        ShapeError: A size does not fit.
        DtypeError: An argument has the wrong type.
        DeviceError: Tensors lie on different devices.
        ArgumentError: An unknown option, or arguments that exclude each other.
        BackendError: ``backend="triton"`` cannot run this call.

    Source: Zhang et al., "Tensor Product Attention Is All You Need", 2025, arXiv 2501.06425.
    """
    name = "tpa_attention"
    scales_given = (scale, scale_q, scale_k, scale_v)
    key = None
    if not is_watched():
        options = (name, *scales_given, causal, backend, aq is None, cu_seqlens is None)
        tensors = _given(aq, ak, av, bq, bk, bv, cu_seqlens)
        run = _on_kernels.recall(options, *tensors)
        if run is not None:
            (ak, bk), (av, bv) = reference.ranked(ak, bk), reference.ranked(av, bv)
            return run(aq, ak, av, bq, bk, bv, cu_seqlens)  # type: ignore[no-any-return]
        key = _key(tensors, options)
        known = None if key is None else _on_kernels.find(key)
        if known is not None:
            ways, scales = known
            _on_kernels.learn(options, tensors, ways.prepared_attention(tensors, causal, *scales))
            (ak, bk), (av, bv) = reference.ranked(ak, bk), reference.ranked(av, bv)
            return ways.attention(aq, ak, av, bq, bk, bv, cu_seqlens, causal, *scales)  # type: ignore[no-any-return]
    sizes = _check_factors(name, aq, ak, av, bq, bk, bv)
    scales = _scales(name, aq, sizes, *scales_given)
    if not isinstance(causal, bool):
        raise fault(DtypeError, name, "causal", "a bool", repr(causal))
    if cu_seqlens is not None:
        _check_cu_seqlens(name, sizes, cu_seqlens, bq)
    most = MAX_FEATURES_FLOAT32 if bq.dtype == torch.float32 else MAX_FEATURES
    if use_triton(name, backend, bq, _beyond_kernels(sizes, most)):
        from warploom.ops.tpa import operator as autograd

        if key is not None:
            _on_kernels.keep(key, (autograd, scales))
        (ak, bk), (av, bv) = reference.ranked(ak, bk), reference.ranked(av, bv)
        return autograd.attention(aq, ak, av, bq, bk, bv, cu_seqlens, causal, *scales)
    out = reference.tpa_attention(
        aq, ak, av, bq, bk, bv, causal=causal, **scales._asdict(), cu_seqlens=cu_seqlens
    )  # fmt: skip
    return in_order_of(bq if aq is None else aq, out)


def tpa_decode(
    aq: Tensor | None,
    ak: Tensor,
    av: Tensor,
    bq: Tensor,
    bk: Tensor,
    bv: Tensor,
    *,
    scale: float | None = None,
    scale_q: float | None = None,
    scale_k: float | None = None,
    scale_v: float | None = None,
    cache_seqlens: Tensor | None = None,
    strategy: str = "auto",
    backend: str = "auto",
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
            bfloat16, float32 or float64, on one device, of any strides.
        scale: Factor of the logits; ``D^-½`` by default.
        scale_q: Factor of the queries; ``1 / Rq`` by default, 1 without ``aq``.
        scale_k: Factor of the keys; ``1 / Rk`` by default.
        scale_v: Factor of the values; ``1 / Rv`` by default.
        cache_seqlens: ``(B,)`` int32 or int64, how many entries of the cache are valid for each batch entry, new
            tokens included; all ``M`` by default. It is read on the device; more than ``M`` counts as ``M``, and
            less than 0 as 0. What lies behind the valid entries is never looked at.
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
        ArgumentError: An unknown option, or a factor that wants a gradient while gradients are being recorded.
        BackendError: ``backend="triton"`` cannot run this call.

    Source: Zhang et al., "Tensor Product Attention Is All You Need", 2025, arXiv 2501.06425.
    """
    name = "tpa_decode"
    scales_given = (scale, scale_q, scale_k, scale_v)
    key = None
    if not is_watched():
        options = (name, *scales_given, strategy, backend, aq is None, cache_seqlens is None)
        tensors = _given(aq, ak, av, bq, bk, bv, cache_seqlens)
        run = _on_kernels.recall(options, *tensors)
        if run is None:
            key = _key(tensors, options)
            run = None if key is None else _on_kernels.find(key)
            if run is not None and not any(tensor.requires_grad for tensor in tensors):  # else it may be refused
                _on_kernels.learn(options, tensors, run)
        if run is not None:
            return run(aq, ak, av, bq, bk, bv, cache_seqlens)  # type: ignore[no-any-return]
    sizes = _check_factors(name, aq, ak, av, bq, bk, bv)
    scales = _scales(name, aq, sizes, *scales_given)
    if strategy not in STRATEGIES:
        raise fault(ArgumentError, name, "strategy", f"one of {', '.join(STRATEGIES)}", repr(strategy))
    if cache_seqlens is not None:
        _check_lengths(name, "cache_seqlens", cache_seqlens, bq)
        if tuple(cache_seqlens.shape) != (sizes.batch,):
            raise fault(ShapeError, name, "cache_seqlens", f"(B,) with B = {sizes.batch}", shape_of(cache_seqlens))
    if torch.is_grad_enabled():
        factors = {"aq": aq, "ak": ak, "av": av, "bq": bq, "bk": bk, "bv": bv}
        for argument in (a for a, factor in factors.items() if factor is not None and factor.requires_grad):
            expected = "without requires_grad (or the call under torch.no_grad(); tpa_attention has gradients)"
            raise fault(ArgumentError, name, argument, expected, "requires_grad=True")
    if use_triton(name, backend, bq, _beyond_kernels(sizes, MAX_FEATURES)):
        from warploom.ops.tpa import operator as autograd

        (ak, bk), (av, bv) = reference.ranked(ak, bk), reference.ranked(av, bv)
        if key is None:
            return autograd.decode(aq, ak, av, bq, bk, bv, cache_seqlens, strategy, *scales)
        run = autograd.prepared_decode(strategy, *scales)
        out: Tensor = run(aq, ak, av, bq, bk, bv, cache_seqlens)
        _on_kernels.keep(key, run)  # now that it has a plan, which a call without the rank axis cannot make
        return out
    out = reference.tpa_decode(aq, ak, av, bq, bk, bv, **scales._asdict(), cache_seqlens=cache_seqlens)
    return in_order_of(bq if aq is None else aq, out)


_on_kernels = Plans()
"""Of each kind of call that was found right: for attention, what runs it on the kernels, with which scales; for
decoding, a function of all its tensors."""


def _given(
    aq: Tensor | None, ak: Tensor, av: Tensor, bq: Tensor, bk: Tensor, bv: Tensor, lengths: Tensor | None
) -> tuple[Tensor, ...]:
    """The tensors of a call, ``bq`` first."""
    factors = (bq, ak, av, bk, bv) if aq is None else (bq, ak, av, bk, bv, aq)
    return factors if lengths is None else (*factors, lengths)


def _key(tensors: tuple[Tensor, ...], options: tuple[object, ...]) -> Hashable | None:
    """All that the checks and the launchers look at, of a plain eager call; None for any other."""
    if not (is_plain_eager(*tensors) and are_kept(tensors[0])):
        return None
    gradients = False
    if torch.is_grad_enabled():
        for tensor in tensors:
            gradients = gradients or tensor.requires_grad
    # With types: True equals 1, and is not as good.
    return (*map(metadata, tensors), gradients, *options, *map(type, options))


# ----------------------------------------------------------------------------------------------------------
# Validation: nothing here touches a tensor's data or the device.
# ----------------------------------------------------------------------------------------------------------


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


class _Scales(NamedTuple):
    """The keyword arguments of these names, as numbers."""

    scale: float
    scale_q: float
    scale_k: float
    scale_v: float


def _check_factors(
    name: str, aq: Tensor | None, ak: Tensor, av: Tensor, bq: Tensor, bk: Tensor, bv: Tensor
) -> _Sizes:
    factors = {"bq": bq, "aq": aq, "ak": ak, "bk": bk, "av": av, "bv": bv}
    for argument, factor in factors.items():
        if factor is None and argument == "aq":
            continue
        factor = checked_tensor(name, argument, factor, FLOATS)
        if factor.dtype != bq.dtype:
            raise fault(DtypeError, name, argument, f"of the dtype of bq, {dtype_of(bq)}", dtype_of(factor))
        if factor.device != bq.device:
            raise fault(DeviceError, name, argument, f"on the device of bq, {bq.device}", factor.device)
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


def _scales(
    name: str,
    aq: Tensor | None,
    sizes: _Sizes,
    scale: float | None,
    scale_q: float | None,
    scale_k: float | None,
    scale_v: float | None,
) -> _Scales:
    return _Scales(
        _number(name, "scale", scale, sizes.features**-0.5),
        _number(name, "scale_q", scale_q, 1.0 if aq is None else 1 / sizes.rank_q),
        _number(name, "scale_k", scale_k, 1 / sizes.rank_k),
        _number(name, "scale_v", scale_v, 1 / sizes.rank_v),
    )


def _number(name: str, argument: str, value: float | None, default: float) -> float:
    if value is None:
        return default
    check_number(name, argument, value)
    return float(value)


def _check_cu_seqlens(name: str, sizes: _Sizes, cu_seqlens: Tensor, bq: Tensor) -> None:
    _check_lengths(name, "cu_seqlens", cu_seqlens, bq)
    if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 2:
        raise fault(ShapeError, name, "cu_seqlens", "(S + 1,) with S ≥ 1", shape_of(cu_seqlens))
    if sizes.batch != 1:
        raise fault(ShapeError, name, "bq", "of batch size 1 when cu_seqlens is given", shape_of(bq))
    if sizes.tokens != sizes.keys:
        expected = f"of as many keys as queries, N = {sizes.tokens}, when cu_seqlens is given"
        raise fault(ShapeError, name, "ak", expected, f"M = {sizes.keys}")


def _check_lengths(name: str, argument: str, lengths: Tensor, bq: Tensor) -> None:
    checked_tensor(name, argument, lengths, (torch.int32, torch.int64))
    if lengths.device != bq.device:
        raise fault(DeviceError, name, argument, f"on the device of bq, {bq.device}", lengths.device)


def _beyond_kernels(sizes: _Sizes, most: int) -> str | None:
    """What the Triton kernels do not do in this call, if anything."""
    if max(sizes.rank_k, sizes.rank_v) > MAX_RANK:
        return f"ranks of keys and values up to {MAX_RANK}; these are {sizes.rank_k} and {sizes.rank_v}"
    if max(sizes.features, sizes.value_features) > most:
        return f"up to {most} features a head; these are {sizes.features} and {sizes.value_features}"
    return None
