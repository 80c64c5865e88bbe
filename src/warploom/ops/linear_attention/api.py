"""The public function of linear attention."""

from __future__ import annotations

from typing import Any, Literal, TypedDict, Unpack, overload

import torch

from warploom.ops.linear_attention import reference
from warploom.ops.linear_attention.call import LinearInputs, LinearOptions
from warploom.ops.linear_attention.operator import OPERATOR
from warploom.ops.linear_attention.tangent import TANGENT
from warploom.ops.linear_attention.validation import NAME, Activation, Encoding, check, check_values
from warploom.ops.lrpe.api import lrpe_cosine, lrpe_rotate
from warploom.ops.lrpe.reference import activate
from warploom.runtime.autocast import cast_for_autocast
from warploom.runtime.backend import Backend
from warploom.runtime.dispatch import Function, ValidatedCall
from warploom.runtime.memory_order import make_dense, reorder_like
from warploom.runtime.modes import is_plain_eager
from warploom.runtime.names import hide_catch_alls, refuse_unknown
from warploom.runtime.sharding import Axes

Tensor = torch.Tensor


class LinearArguments(TypedDict, total=False):
    """Arguments of `linear_attention` by name, all but the one that decides what it returns."""

    decay: Tensor | None
    theta: Tensor | None
    encoding: Encoding
    activation: Activation
    interleaved: bool
    offset: int | Tensor
    causal: bool
    scale: float | None
    initial_state: Tensor | None
    cu_seqlens: Tensor | None
    backend: Backend


@overload
def linear_attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_state: Literal[False] = ..., **arguments: Unpack[LinearArguments]
) -> Tensor: ...
@overload
def linear_attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_state: Literal[True], **arguments: Unpack[LinearArguments]
) -> tuple[Tensor, Tensor]: ...
@overload
def linear_attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_state: bool, **arguments: Unpack[LinearArguments]
) -> Tensor | tuple[Tensor, Tensor]: ...
@hide_catch_alls
def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *_others: Any,
    decay: Tensor | None = None,
    theta: Tensor | None = None,
    encoding: Encoding = "none",
    activation: Activation = "none",
    interleaved: bool = False,
    offset: int | Tensor = 0,
    causal: bool = True,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    return_state: bool = False,
    cu_seqlens: Tensor | None = None,
    backend: Backend = "auto",
    **_unknown: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """Linear attention with relative positions, ``S_t = λ_t S_{t−1} + φ(k_t) v_tᵀ``, ``o_t = scale · φ(q_t)ᵀ S_t``.

    ``φ`` is an activation and then `lrpe_rotate` or `lrpe_cosine`, computed where a token is loaded: encoded
    queries and keys are never in memory. With a state handed in and out, ``N = 1`` is a step of decoding.

    Args:
        q: ``(B, N, H, D)``, tokens before heads; float16, bfloat16, float32 or float64, any strides. A tensor
            ``(B, H, N, D)`` is given as ``x.transpose(1, 2)``; as it is, its heads are taken for tokens.
        k: As ``q``.
        v: ``(B, N, H, E)`` in the dtype of ``q``, any strides.
        decay: Logarithms of decays λ: ``(H,)``, or ``(B, N, H)`` with one for every token; any float dtype.
            Any finite numbers ≤ 0. Differentiable.
        theta: ``(H, F)``, ``(1, F)`` or ``(F,)``, frequencies in radians per position, as in `lrpe_rotate` and
            `lrpe_cosine`: at most ``D/2`` for ``rotate`` and ``D`` for ``cosine``. Differentiable.
        encoding: ``none``, ``rotate`` or ``cosine``, whose ``φ`` has ``2·D`` features.
        activation: ``none``, ``relu``, ``sigmoid``, ``silu`` or ``softmax`` (over features), applied to ``q`` and
            ``k`` before the encoding.
        interleaved: Of ``rotate``: pair neighbouring features instead of halves.
        offset: Position of the first token: an integer, with all positions below 2³¹ in size, or an integer tensor
            ``()`` or ``(B,)``, which is read on the device and may lead beyond.
        causal: Without it every token sees all, ``o_t = scale · φ(q_t)ᵀ Σ_s φ(k_s) v_sᵀ``, and there is neither
            decay nor state.
        scale: Any finite number; ``D^-½`` by default.
        initial_state: ``(S, H, F, E)``, any float dtype and strides: ``S₀``, zero by default. ``S`` is ``B`` or the
            number of packed sequences, ``F`` the features of ``φ``. Differentiable.
        return_state: Also return the state after the last token; it is differentiable.
        cu_seqlens: ``(S + 1,)`` int32 or int64, ``0 = c₀ ≤ … ≤ c_S ≤ N``, with ``B = 1``: packed sequences, each
            starting again at ``offset`` with a state of its own.
        backend: ``auto`` (Triton where it can run, else PyTorch; large calls in float32 without ``causal`` take
            PyTorch's products), ``triton`` or ``torch``.

    Returns:
        ``(B, N, H, E)`` in the dtype and memory order of ``q``; with ``return_state`` also the state,
        ``(S, H, F, E)`` in float32 (float64 for float64 inputs). Rows behind the last packed sequence are 0. Under
        autocast ``q``, ``k`` and ``v`` are cast as for PyTorch's own attention.

    Raises:
        ShapeError: A size does not fit.
        DtypeError: An argument has the wrong type.
        DeviceError: Tensors lie on different devices.
        ArgumentError: An unknown option, arguments that exclude each other, or decays, positions or bounds that
            are not so (checked on a CPU; on a GPU see `check_values`).
        BackendError: ``backend="triton"`` cannot run this call.

    Source: Qin et al., "Linearized Relative Positional Encoding", 2023, arXiv 2307.09270; Qin et al., "Lightning
    Attention-2", 2024, arXiv 2401.04658; Sun et al., "Retentive Network", 2023, arXiv 2307.08621.

    Example:
        ```python
        import torch
        from warploom import linear_attention

        q, k, v = torch.randn(3, 2, 100, 4, 32)
        place = {"theta": torch.rand(16), "encoding": "rotate", "decay": torch.full((4,), -0.01)}
        out, state = linear_attention(q, k, v, **place, return_state=True)
        new = torch.randn(3, 2, 1, 4, 32)  # the next token
        out, state = linear_attention(*new, **place, offset=100, initial_state=state, return_state=True)
        print(out.shape, state.shape)  # torch.Size([2, 1, 4, 32]) torch.Size([2, 4, 32, 32])
        ```
    """
    if _others or _unknown:
        refuse_unknown(linear_attention, _others, _unknown)
    q, k, v = cast_for_autocast(q, k, v)
    offsets, offset = (offset, 0) if isinstance(offset, Tensor) else (None, offset)
    inputs = LinearInputs(q, k, v, theta, decay, initial_state, offsets, cu_seqlens)
    options = (encoding, activation, interleaved, causal, scale, return_state)
    return _function(backend, inputs, options, offset)  # type: ignore[no-any-return]


def _run_reference(
    inputs: LinearInputs, offset: int, call: ValidatedCall, backend: str
) -> Tensor | tuple[Tensor, Tensor]:
    q, k, v, theta, decay, initial_state, offsets, cu_seqlens = inputs
    options: LinearOptions = call.options
    if call.prefers_torch and backend == "auto":
        return reorder_like(q, _multiply_all(inputs, offset, options))
    results = reference.linear_attention(
        q, k, v,
        decay=decay, theta=theta, encoding="rotate" if options.kind == "interleaved" else options.kind,
        activation=options.activation, interleaved=options.kind == "interleaved",
        offset=offset if offsets is None else offsets, causal=options.causal, scale=options.scale,
        initial_state=initial_state, return_state=options.return_state, cu_seqlens=cu_seqlens,
        longest=longest_of(cu_seqlens),
    )  # fmt: skip
    if isinstance(results, Tensor):
        return reorder_like(q, results)
    return reorder_like(q, results[0]), make_dense(results[1])


def _multiply_all(inputs: LinearInputs, offset: int, options: LinearOptions) -> Tensor:
    """Returns outputs (B, N, H, E) without causality: rows are encoded in memory, and PyTorch multiplies them."""
    # Its gradients by queries and by keys grow with positions, and nearly cancel: they are added before rounding.
    theta = None if inputs.theta is None else inputs.theta.double()
    offsets = offset if inputs.offsets is None else inputs.offsets
    same: dict[str, Any] = {"offset": offsets, "activation": options.activation}

    def encode(x: Tensor) -> Tensor:
        if theta is None:
            return activate(x, options.activation, None)
        if options.kind == "cosine":
            return lrpe_cosine(x, theta, **same)
        return lrpe_rotate(x, theta, interleaved=options.kind == "interleaved", **same)

    state = torch.einsum("bnhf,bnhe->bhfe", encode(inputs.k), inputs.v)
    return torch.einsum("bnhf,bhfe->bnhe", encode(inputs.q), state * options.scale)


def longest_of(cu_seqlens: Tensor | None) -> int | None:
    """Returns the length of the longest packed sequence, where it can be seen without waiting for a device."""
    if cu_seqlens is None or not cu_seqlens.is_cpu or not is_plain_eager(cu_seqlens):
        return None
    return int(cu_seqlens.diff().max())


def _axes(inputs: LinearInputs, options: tuple[object, ...]) -> Axes:
    """Returns the axes that calls are sharded over: batch entries, if not packed, and heads."""
    theta, decay, offsets = inputs.theta, inputs.decay, inputs.offsets
    states = "bh.." if inputs.cu_seqlens is None else ".h.."
    of_theta = "h." if theta is not None and theta.dim() == 2 else "."
    of_decay = "h" if decay is not None and decay.dim() == 1 else "b.h"
    of_offsets = "b" if offsets is not None and offsets.dim() else ""
    given = ("b.h.", "b.h.", "b.h.", of_theta, of_decay, states, of_offsets, "")
    return Axes(given, ("b.h.", states) if options[5] else ("b.h.",))


_function = Function(NAME, check, _run_reference, OPERATOR, _axes, check_values, TANGENT)
