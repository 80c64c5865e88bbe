"""The public function of flash attention: documentation, validation, choice of backend."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Hashable, Sequence
from typing import Any, Literal, NamedTuple, overload

import torch

from warploom.errors import ArgumentError, DeviceError, DtypeError, ShapeError, dtype_of, fault, shape_of
from warploom.ops.flash_attention import reference
from warploom.runtime.arguments import FLOATS, LARGEST, check_number, checked_tensor, is_int, is_within, shown
from warploom.runtime.backend import use_triton
from warploom.runtime.eager import is_plain_eager, is_watched
from warploom.runtime.memory_order import dense, in_order_of
from warploom.runtime.plans import Plans, are_kept, metadata

Tensor = torch.Tensor

NAME = "flash_attention"
PRECISIONS = ("highest", "high", "medium")
MAX_FEATURES = 256
"""Features of a query, key or value that the kernels hold on chip at once."""
MAX_PLACES = 2**31 - 2**10
"""Queries and keys together, whose places the kernels count in 32 bits, and tiles, each of which is a program."""
_LEAST_TILE = 16  # rows


@overload
def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = ...,
    scale: float | None = ...,
    window: Sequence[int | None] | None = ...,
    cu_seqlens_q: Tensor | None = ...,
    cu_seqlens_k: Tensor | None = ...,
    float32_precision: str | None = ...,
    return_lse: Literal[False] = ...,
    backend: str = ...,
) -> Tensor: ...


@overload
def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = ...,
    scale: float | None = ...,
    window: Sequence[int | None] | None = ...,
    cu_seqlens_q: Tensor | None = ...,
    cu_seqlens_k: Tensor | None = ...,
    float32_precision: str | None = ...,
    return_lse: bool,
    backend: str = ...,
) -> Tensor | tuple[Tensor, Tensor]: ...


def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    window: Sequence[int | None] | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    float32_precision: str | None = None,
    return_lse: bool = False,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Exact attention, ``softmax(scale · q kᵀ) v``, in memory linear in the length.

    ``flash_attention(q, k, v, causal=True)`` is a decoder's attention. With ``Hkv < Hq`` heads of keys and values
    it is grouped-query attention, and query head ``h`` reads key head ``h // (Hq / Hkv)``.

    Args:
        q: ``(B, N, Hq, D)``; float16, bfloat16, float32 or float64, any strides.
        k: ``(B, M, Hkv, D)`` in the dtype of ``q``, any strides; ``Hq`` a multiple of ``Hkv``.
        v: ``(B, M, Hkv, E)`` in the dtype of ``q``, any strides.
        causal: Query ``i`` sees key ``j`` if ``j ≤ i + M − N``: the last query is aligned with the last key, so
            that queries that extend a cache of keys see all of it. For ``N > M`` the first queries see nothing.
        scale: Factor of the inner products, any finite number; ``D^-½`` by default.
        window: ``(left, right)``, each a number of keys ≥ 0 or None for no bound: query ``i`` sees key ``j`` if
            ``−left ≤ j − (i + M − N) ≤ right``. With ``causal`` both conditions hold.
        cu_seqlens_q: ``(S + 1,)`` int32 or int64, ``0 = c₀ ≤ … ≤ c_S = N``, with ``B = 1``: packed sequences, each
            of which attends to its own keys with its own alignment. Values are read on the device and not checked.
        cu_seqlens_k: The same for the keys, ``c_S = M``. If ``N = M``, either of the two stands for both.
        float32_precision: How products of float32 tensors are computed by the kernels: ``highest`` (as exact as
            float32), ``high`` (TensorFloat-32, or two parts of a factor in bfloat16) or ``medium`` (bfloat16); the
            current value of ``torch.get_float32_matmul_precision()`` by default. Other dtypes have one way only.
        return_lse: Also return the logarithm of the sum of exponentials of every row; it is differentiable.
        backend: ``auto`` (Triton where it can run, else PyTorch), ``triton`` or ``torch``.

    Returns:
        ``(B, N, Hq, E)`` in the dtype and memory order of ``q``; with ``return_lse`` also ``(B, Hq, N)`` float32
        (float64 for float64 inputs). A query that sees no key has output 0, lse ``−inf``, and gradients 0.
        Under autocast the inputs are cast as for PyTorch's own attention.

    Raises:
        ShapeError: A size does not fit.
        DtypeError: An argument has the wrong type.
        DeviceError: Tensors lie on different devices.
        ArgumentError: An unknown option, or arguments that exclude each other.
        BackendError: ``backend="triton"`` cannot run this call.

    Source: Dao, "FlashAttention-2", 2023, arXiv 2307.08691, algorithms 1 and 2; Shah et al., "FlashAttention-3",
    2024, arXiv 2407.08608.
    """
    autocast = _autocast(q)
    if autocast:
        dtype = torch.get_autocast_dtype(q.device.type)
        q, k, v = _cast(q, dtype), _cast(k, dtype), _cast(v, dtype)
    key = None
    if not is_watched():
        bounds = tuple(window) if isinstance(window, list) else window
        options: tuple[object, ...] = (causal, scale, float32_precision, return_lse, backend, bounds)
        if isinstance(bounds, tuple):
            options += bounds  # once more, for their types
        packed = cu_seqlens_q is not None or cu_seqlens_k is not None
        run = None if packed else _on_kernels.recall(options, q, k, v)
        if run is not None:
            return run(q, k, v)  # type: ignore[no-any-return]
        key = _key(q, k, v, cu_seqlens_q, cu_seqlens_k, options)
        known = None if key is None else _on_kernels.find(key)
        if known is not None:
            ways, call = known
            if not packed:
                _on_kernels.learn(options, (q, k, v), ways.prepared(q, k, v, call))
            return ways.apply(q, k, v, _with_sequences(call, cu_seqlens_q, cu_seqlens_k))  # type: ignore[no-any-return]
    _check_tensors(q, k, v)
    left, right = _checked_window(window)
    for argument, flag in (("causal", causal), ("return_lse", return_lse)):
        if not isinstance(flag, bool):
            raise fault(DtypeError, NAME, argument, "a bool", repr(flag))
    if causal:
        right = 0
    scale = _checked_scale(scale, q)
    cu_seqlens_q, cu_seqlens_k = _checked_sequences(q, k, cu_seqlens_q, cu_seqlens_k)
    if float32_precision is not None and float32_precision not in PRECISIONS:
        expected = f"None or one of {', '.join(PRECISIONS)}"
        raise fault(ArgumentError, NAME, "float32_precision", expected, repr(float32_precision))
    call = _Call(q, k, v, scale, left, right, cu_seqlens_q, cu_seqlens_k, float32_precision, return_lse)
    if use_triton(NAME, backend, q, _beyond_kernels(call)):
        return _run_kernels(call, key)
    if backend == "auto" and _is_plain(call):
        return in_order_of(q, _fused_by_torch(call))
    # The inputs have been cast; what is float32 inside stays float32.
    with torch.autocast(q.device.type, enabled=False) if autocast else contextlib.nullcontext():
        results = reference.flash_attention(
            q, k, v,
            scale=scale, window=(left, right), cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k,
            float32_precision=float32_precision, return_lse=return_lse,
        )  # fmt: skip
    if isinstance(results, Tensor):
        return in_order_of(q, results)
    return in_order_of(q, results[0]), dense(results[1])


class _Call(NamedTuple):
    """Checked arguments, ``causal`` being a bound of the window."""

    q: Tensor
    k: Tensor
    v: Tensor
    scale: float
    left: int | None
    right: int | None
    cu_seqlens_q: Tensor | None
    cu_seqlens_k: Tensor | None
    float32_precision: str | None
    return_lse: bool


_on_kernels = Plans()
"""Of each kind of call that was found right: what runs it on the kernels, and what that takes besides tensors."""


def _key(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None,
    options: tuple[object, ...],
) -> Hashable | None:  # fmt: skip
    """All that the checks and the launchers look at, of a plain eager call; None for any other."""
    sequences = (t for t in (cu_seqlens_q, cu_seqlens_k) if t is not None)
    if not (is_plain_eager(q, k, v, *sequences) and are_kept(q)):
        return None
    # With types: True equals 1, and is not as good.
    return (*map(metadata, (q, k, v, cu_seqlens_q, cu_seqlens_k)), *options, *map(type, options))


def _with_sequences(call: Any, cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None) -> Any:
    """A call of `autograd` with these packed sequences, where one of the two may stand for both."""
    if cu_seqlens_q is None and cu_seqlens_k is None:
        return call
    q = cu_seqlens_k if cu_seqlens_q is None else cu_seqlens_q
    k = cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k
    return call._replace(mask=call.mask._replace(cu_seqlens_q=q, cu_seqlens_k=k))


def _run_kernels(call: _Call, key: Hashable | None) -> Tensor | tuple[Tensor, Tensor]:
    from warploom.ops.flash_attention import operator as autograd
    from warploom.ops.flash_attention.problem import Mask

    mask = Mask(call.left, call.right)
    plans = None if key is None else Plans()
    settled = autograd.Call(mask, call.scale, call.float32_precision, call.return_lse, plans)
    if key is not None:
        _on_kernels.keep(key, (autograd, settled))
    return autograd.apply(call.q, call.k, call.v, _with_sequences(settled, call.cu_seqlens_q, call.cu_seqlens_k))


def _beyond_kernels(call: _Call) -> str | None:
    """What the Triton kernels do not do in this call, if anything."""
    features = max(call.q.shape[-1], call.v.shape[-1])
    if features > MAX_FEATURES:
        return f"{features} features do not fit in one tile ({MAX_FEATURES} at most)"
    (batch, tokens, heads, _), (_, keys, key_heads, _) = call.q.shape, call.k.shape
    if not is_within(tokens + keys, MAX_PLACES):
        return f"{tokens} queries and {keys} keys are more than {MAX_PLACES}"
    for tiles in (batch * heads * -(-tokens // _LEAST_TILE), batch * key_heads * -(-keys // _LEAST_TILE)):
        if not is_within(tiles, MAX_PLACES):
            return f"{batch} batch entries are {tiles} tiles ({MAX_PLACES} at most)"
    return None


def _is_plain(call: _Call) -> bool:
    """Whether PyTorch's own fused attention for CPUs computes this call.

    Its backward misses the error budget for large inner products, and a scale of zero or below is not for it. It
    turns some rows of NaN into zeros: it is for finite numbers, which compiled code cannot look at.
    """
    if torch.is_grad_enabled() and any(t.requires_grad for t in call[:3]):
        return False
    tokens, keys = call.q.shape[1], call.k.shape[1]
    masked = call.left is not None or (call.right is not None and (call.right != 0 or tokens != keys))
    packed = call.cu_seqlens_q is not None
    special = call.return_lse or call.float32_precision not in (None, "highest")
    if call.q.device.type != "cpu" or keys == 0 or call.scale <= 0 or masked or packed or special:
        return False
    return is_plain_eager(*call[:3]) and all(bool(t.isfinite().all()) for t in call[:3])


def _fused_by_torch(call: _Call) -> Tensor:
    q, k, v = (t.transpose(1, 2) for t in (call.q, call.k, call.v))
    grouped = q.shape[1] != k.shape[1]
    attend = torch.nn.functional.scaled_dot_product_attention
    out: Tensor = attend(q, k, v, is_causal=call.right == 0, scale=call.scale, enable_gqa=grouped)
    return out.transpose(1, 2)


def _autocast(x: object) -> bool:
    """Whether autocast is on for tensors like this one."""
    # By name, because neither `torch.compile` nor a meta tensor can ask which devices have an autocast.
    if not isinstance(x, Tensor) or not (x.is_cuda or x.is_cpu):
        return False
    return torch.is_autocast_enabled("cuda" if x.is_cuda else "cpu")


def _cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """As autocast casts: floating tensors, float64 excepted."""
    if isinstance(x, Tensor) and x.is_floating_point() and x.dtype != torch.float64:
        return x.to(dtype)
    return x


# ----------------------------------------------------------------------------------------------------------
# Validation: nothing here touches a tensor's data or the device.
# ----------------------------------------------------------------------------------------------------------


def _check_tensors(q: Tensor, k: Tensor, v: Tensor) -> None:
    for argument, tensor in (("q", q), ("k", k), ("v", v)):
        checked_tensor(NAME, argument, tensor, FLOATS)
        if tensor.dtype != q.dtype:
            raise fault(DtypeError, NAME, argument, f"a tensor of the dtype of q, {dtype_of(q)}", dtype_of(tensor))
        if tensor.device != q.device:
            raise fault(DeviceError, NAME, argument, f"on the device of q, {q.device}", tensor.device)
    if q.dim() != 4 or q.shape[-1] == 0:
        raise fault(ShapeError, NAME, "q", "(B, N, Hq, D) with D ≥ 1", shape_of(q))
    batch, _, heads, features = q.shape
    if k.dim() != 4 or k.shape[0] != batch or k.shape[3] != features:
        raise fault(ShapeError, NAME, "k", f"(B, M, Hkv, D) with B = {batch}, D = {features}", shape_of(k))
    key_heads = k.shape[2]
    if heads != key_heads and (key_heads == 0 or heads % key_heads != 0):
        raise fault(ShapeError, NAME, "k", f"of Hkv heads such that Hq = {heads} is a multiple", shape_of(k))
    if v.dim() != 4 or v.shape[:3] != k.shape[:3] or v.shape[3] == 0:
        expected = f"(B, M, Hkv, E) with B = {batch}, M = {k.shape[1]}, Hkv = {key_heads}, E ≥ 1"
        raise fault(ShapeError, NAME, "v", expected, shape_of(v))


def _checked_window(window: Sequence[int | None] | None) -> tuple[int | None, int | None]:
    if window is None:
        return None, None
    if not isinstance(window, tuple | list) or len(window) != 2:
        raise fault(DtypeError, NAME, "window", "None or a pair (left, right)", repr(window))
    for bound in window:
        if bound is not None and not is_int(bound):
            raise fault(DtypeError, NAME, "window", "a pair of ints or None", shown(window))
        if bound is not None and bound < 0:
            raise fault(ArgumentError, NAME, "window", "of bounds ≥ 0, or None for no bound", shown(window))
    left, right = (None if isinstance(bound, int) and bound > LARGEST else bound for bound in window)
    return left, right


def _checked_scale(scale: float | None, q: Tensor) -> float:
    if scale is None:
        return 1.0 / math.sqrt(q.shape[-1])
    check_number(NAME, "scale", scale)
    return scale


def _checked_sequences(
    q: Tensor, k: Tensor, cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """Both or neither: where there are as many queries as keys, one stands for both."""
    if cu_seqlens_q is None and cu_seqlens_k is None:
        return None, None
    for argument, tensor in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        if tensor is None:
            if q.shape[1] != k.shape[1]:
                expected = f"given where the other is, since N = {q.shape[1]} and M = {k.shape[1]} differ"
                raise fault(ArgumentError, NAME, argument, expected, None)
            continue
        checked_tensor(NAME, argument, tensor, (torch.int32, torch.int64))
        if tensor.dim() != 1 or tensor.shape[0] < 2:
            raise fault(ShapeError, NAME, argument, "(S + 1,) with S ≥ 1", shape_of(tensor))
        if tensor.device != q.device:
            raise fault(DeviceError, NAME, argument, f"on the device of q, {q.device}", tensor.device)
    if q.shape[0] != 1:
        raise fault(ShapeError, NAME, "q", "of batch size 1 when cu_seqlens are given", shape_of(q))
    cu_seqlens_q = cu_seqlens_k if cu_seqlens_q is None else cu_seqlens_q
    cu_seqlens_k = cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k
    if cu_seqlens_q is not None and cu_seqlens_k is not None and cu_seqlens_q.shape != cu_seqlens_k.shape:
        expected = f"of the shape of cu_seqlens_q, {shape_of(cu_seqlens_q)}"
        raise fault(ShapeError, NAME, "cu_seqlens_k", expected, shape_of(cu_seqlens_k))
    return cu_seqlens_q, cu_seqlens_k
