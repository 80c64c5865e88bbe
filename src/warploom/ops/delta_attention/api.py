"""The public function of delta rule attention."""

from __future__ import annotations

from typing import Any, Literal, TypedDict, Unpack, overload

import torch

from warploom.ops.delta_attention import reference
from warploom.ops.delta_attention.call import DeltaInputs, DeltaOptions
from warploom.ops.delta_attention.operator import OPERATOR
from warploom.ops.delta_attention.validation import NAME, Encoding, check, check_values
from warploom.runtime.autocast import cast_for_autocast
from warploom.runtime.backend import Backend
from warploom.runtime.dispatch import Function, ValidatedCall
from warploom.runtime.memory_order import make_dense, reorder_like
from warploom.runtime.modes import is_plain_eager
from warploom.runtime.names import hide_catch_alls, refuse_unknown
from warploom.runtime.sharding import Axes

Tensor = torch.Tensor


class DeltaArguments(TypedDict, total=False):
    """Arguments of `delta_attention` by name, all but the one that decides what it returns."""

    decay: Tensor | None
    theta: Tensor | None
    encoding: Encoding
    interleaved: bool
    offset: int | Tensor
    normalize: bool
    scale: float | None
    initial_state: Tensor | None
    cu_seqlens: Tensor | None
    backend: Backend


@overload
def delta_attention(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, *, return_state: Literal[False] = ...,
    **arguments: Unpack[DeltaArguments],
) -> Tensor: ...  # fmt: skip
@overload
def delta_attention(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, *, return_state: Literal[True],
    **arguments: Unpack[DeltaArguments],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def delta_attention(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, *, return_state: bool, **arguments: Unpack[DeltaArguments]
) -> Tensor | tuple[Tensor, Tensor]: ...
@hide_catch_alls
def delta_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    *_others: Any,
    decay: Tensor | None = None,
    theta: Tensor | None = None,
    encoding: Encoding = "none",
    interleaved: bool = False,
    offset: int | Tensor = 0,
    normalize: bool = False,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    return_state: bool = False,
    cu_seqlens: Tensor | None = None,
    backend: Backend = "auto",
    **_unknown: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """Linear attention that corrects its state: DeltaNet, Gated DeltaNet and Kimi Delta Attention.

    ``S_t = (I − β_t k̂_t k̂_tᵀ) Diag(exp(g_t)) S_{t−1} + β_t k̂_t v_tᵀ``, ``o_t = scale · q̂_tᵀ S_t``, with ``g`` the
    decay. A new value takes the place of what the state returns for its key. With a state handed in and out,
    ``N = 1`` is a step of decoding.

    Args:
        q: ``(B, N, Hk, D)``, tokens before heads; float16, bfloat16, float32 or float64, any strides. A tensor
            ``(B, H, N, D)`` is given as ``x.transpose(1, 2)``; as it is, its heads are taken for tokens.
        k: As ``q``.
        v: ``(B, N, H, E)`` in the dtype of ``q``, with ``H`` a multiple of ``Hk``: head ``h`` takes the queries and
            keys of head ``h // (H / Hk)``.
        beta: ``(B, N, H)``, any float dtype: how much of a correction is made, usually between 0 and 1.
        decay: Logarithms of decays: ``(B, N, H)``, one for a head (Gated DeltaNet), or ``(B, N, H, D)``, one for
            each feature of a key (Kimi Delta Attention); any float dtype, any finite numbers ≤ 0.
        theta: ``(Hk, F)``, ``(1, F)`` or ``(F,)`` with ``F ≤ D/2``, frequencies in radians per position, as in
            `lrpe_rotate`.
        encoding: ``none`` or ``rotate``, which rotates queries and keys as `lrpe_rotate` does.
        interleaved: Of ``rotate``: pair neighbouring features instead of halves.
        offset: Position of the first token: an integer, with all positions below 2³¹ in size, or an integer tensor
            ``()`` or ``(B,)``, which is read on the device and may lead beyond.
        normalize: Divide each query and key by ``sqrt(Σx² + 1e-6)`` before it is rotated. Keys must be of length 1,
            or at least ``β |k|² ≤ 2``, for states not to grow without bounds.
        scale: Any finite number; ``D^-½`` by default.
        initial_state: ``(S, H, D, E)``, any float dtype and strides: ``S₀``, zero by default. ``S`` is ``B`` or the
            number of packed sequences.
        return_state: Also return the state after the last token; it is differentiable.
        cu_seqlens: ``(S + 1,)`` int32 or int64, ``0 = c₀ ≤ … ≤ c_S ≤ N``, with ``B = 1``: packed sequences, each
            starting again at ``offset`` with a state of its own.
        backend: ``auto`` (Triton where it can run, else PyTorch), ``triton`` or ``torch``.

    Returns:
        ``(B, N, H, E)`` in the dtype of ``q`` and the memory order of ``v``; with ``return_state`` also the state,
        ``(S, H, D, E)`` in float32 (float64 for float64 inputs). Rows behind the last packed sequence are 0. All
        tensors but ``offset`` and ``cu_seqlens`` have gradients, which are the same in every run. Under autocast
        ``q``, ``k`` and ``v`` are cast as for PyTorch's own attention.

    Raises:
        ShapeError: A size does not fit.
        DtypeError: An argument has the wrong type.
        DeviceError: Tensors lie on different devices.
        ArgumentError: An unknown option, arguments that exclude each other, or decays, positions or bounds that
            are not so (checked on a CPU; on a GPU see `check_values`).
        BackendError: ``backend="triton"`` cannot run this call.

    Source: Yang et al., "Parallelizing Linear Transformers with the Delta Rule", 2024, arXiv 2406.06484; Yang et
    al., "Gated Delta Networks", 2024, arXiv 2412.06464; Kimi Team, "Kimi Linear", 2025, arXiv 2510.26692.

    Example:
        ```python
        import torch
        from warploom import delta_attention

        q, k = torch.randn(2, 2, 100, 4, 32)
        v, beta, decay = torch.randn(2, 100, 8, 32), torch.rand(2, 100, 8), -0.1 * torch.rand(2, 100, 8)
        out, state = delta_attention(q, k, v, beta, decay=decay, normalize=True, return_state=True)
        q, k = torch.randn(2, 2, 1, 4, 32)  # a new token, from the state of the others
        v, beta, decay = torch.randn(2, 1, 8, 32), torch.rand(2, 1, 8), -0.1 * torch.rand(2, 1, 8)
        again = {"initial_state": state, "return_state": True}
        out, state = delta_attention(q, k, v, beta, decay=decay, normalize=True, **again)
        print(out.shape, state.shape)  # torch.Size([2, 1, 8, 32]) torch.Size([2, 8, 32, 32])
        ```
    """
    if _others or _unknown:
        refuse_unknown(delta_attention, _others, _unknown)
    q, k, v = cast_for_autocast(q, k, v)
    offsets, offset = (offset, 0) if isinstance(offset, Tensor) else (None, offset)
    inputs = DeltaInputs(q, k, v, beta, decay, theta, initial_state, offsets, cu_seqlens)
    return _function(backend, inputs, (encoding, interleaved, normalize, scale, return_state), offset)  # type: ignore[no-any-return]


def _run_reference(inputs: DeltaInputs, offset: int, call: ValidatedCall, _: str) -> Tensor | tuple[Tensor, Tensor]:
    q, k, v, beta, decay, theta, initial_state, offsets, cu_seqlens = inputs
    options: DeltaOptions = call.options
    longest = None
    if cu_seqlens is not None and cu_seqlens.is_cpu and is_plain_eager(cu_seqlens):
        longest = int(cu_seqlens.diff().max())
    results = reference.delta_attention(
        q, k, v, beta,
        decay=decay, theta=theta, encoding="rotate" if options.kind == "interleaved" else options.kind,
        interleaved=options.kind == "interleaved", offset=offset if offsets is None else offsets,
        normalize=options.normalize, scale=options.scale, initial_state=initial_state,
        return_state=options.return_state, cu_seqlens=cu_seqlens, longest=longest,
    )  # fmt: skip
    if isinstance(results, Tensor):
        return reorder_like(v, results)
    return reorder_like(v, results[0]), make_dense(results[1])


def _axes(inputs: DeltaInputs, options: tuple[object, ...]) -> Axes:
    """Returns the axes that calls are sharded over: batch entries, if not packed, and heads."""
    decay, theta, offsets = inputs.decay, inputs.theta, inputs.offsets
    states = "bh.." if inputs.cu_seqlens is None else ".h.."
    of_decay = "b.h." if decay is not None and decay.dim() == 4 else "b.h"
    of_theta = "h." if theta is not None and theta.dim() == 2 else "."
    of_offsets = "b" if offsets is not None and offsets.dim() else ""
    given = ("b.h.", "b.h.", "b.h.", "b.h", of_decay, of_theta, states, of_offsets, "")
    return Axes(given, ("b.h.", states) if options[4] else ("b.h.",))


_function = Function(NAME, check, _run_reference, OPERATOR, _axes, check_values)
