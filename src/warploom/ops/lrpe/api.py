"""The public functions of LRPE."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Never

import torch

from warploom.ops.lrpe import reference
from warploom.ops.lrpe.call import LrpeInputs, LrpeOptions
from warploom.ops.lrpe.operator import OPERATOR
from warploom.ops.lrpe.tangent import TANGENT
from warploom.ops.lrpe.validation import Activation, check, check_values
from warploom.runtime.arguments import check_flags
from warploom.runtime.backend import Backend
from warploom.runtime.dispatch import Function, ValidatedCall
from warploom.runtime.memory_order import reorder_like
from warploom.runtime.names import hide_catch_alls, refuse_unknown
from warploom.runtime.sharding import Axes

Tensor = torch.Tensor


@hide_catch_alls
def lrpe_cosine(
    x: Tensor,
    theta: Tensor,
    *_others: Never,
    grid: Sequence[int] | None = None,
    prefix: int = 0,
    offset: int | Tensor = 0,
    position_ids: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    activation: Activation = "none",
    backend: Backend = "auto",
    **_unknown: Never,
) -> Tensor:
    """Linearized relative positional encoding, cosine form: ``[x̄ cos φ, x̄ sin φ]``.

    For any query and key, ``⟨lrpe_cosine(q), lrpe_cosine(k)⟩ = Σ_f q̄_f k̄_f cos((s_q − s_k) θ_f)``: the inner
    product of the encodings knows only the difference of the positions, which is what linear attention needs.

    Args:
        x: ``(B, N, H, D)``, tokens before heads, or ``(B, N, D)`` for a single head; float16, bfloat16, float32 or
            float64, any strides. A tensor ``(B, H, N, D)`` is given as ``x.transpose(1, 2)``.
        theta: ``(H, E)``, ``(1, E)`` or ``(E,)`` with ``E ≤ ⌈D/k⌉``, any float dtype: frequencies in radians per
            position. A token with coordinates ``s₁ … s_k`` (one, but for a ``grid`` and ``position_ids`` of several
            axes) has the angles ``φ = (s₁ θ, …, s_k θ)``, cut to ``D``, or followed by zeros up to ``D``.
            Differentiable. One number per head is ``theta.expand(H, D)``.
        grid: Sizes ``(n₁, …, n_k)`` of a grid of tokens with ``N = prefix + n₁⋯n_k``; the last axis moves fastest.
        prefix: How many leading tokens (of each packed sequence) have angle zero. Token ``prefix + i`` then stands
            at ``offset + i``, or at the coordinates of ``i`` in the grid.
        offset: Position of the first token after the prefix: an integer, with all positions below 2³¹ in size, or
            an integer tensor ``()`` or ``(B,)``, which is read on the device and may lead beyond.
        position_ids: Integers ``(N,)``, ``(B, N)`` or ``(B, N, k)``: positions given outright, instead of
            ``grid``, ``prefix`` and ``offset``, up to 2⁵³ in size.
        cu_seqlens: ``(S + 1,)`` int32 or int64, ``0 = c₀ ≤ … ≤ c_S ≤ N``, with ``B = 1``: packed sequences, each
            starting again at ``offset``. Rows behind the last become 0, and so do their gradients, whatever they
            hold.
        activation: ``none``, ``relu``, ``sigmoid``, ``silu``, ``softmax`` (over features) or ``softmax_sequence``
            (over tokens, per batch entry, head and feature, and per packed sequence), applied to ``x`` first.
        backend: ``auto`` (Triton where it can run, else PyTorch), ``triton`` or ``torch``.

    Returns:
        ``(B, N, H, 2·D)`` (or ``(B, N, 2·D)``) in the dtype and memory order of ``x``.

    Raises:
        ShapeError: A size does not fit.
        DtypeError: An argument has the wrong type.
        DeviceError: Tensors lie on different devices.
        ArgumentError: An unknown option, arguments that exclude each other, or positions or bounds that are not
            so (checked on a CPU; on a GPU see `check_values`).
        BackendError: ``backend="triton"`` cannot run this call.

    Source: Qin et al., "Linearized Relative Positional Encoding", 2023, arXiv 2307.09270, equation 9.

    Example:
        ```python
        import torch
        from warploom import lrpe_cosine

        image = torch.randn(2, 12 * 16, 4, 32)  # a grid of 12 × 16 tokens
        theta = (10000.0 ** -(torch.arange(16) / 16)).expand(4, 16)  # half of the angles for each axis
        out = lrpe_cosine(image, theta, grid=(12, 16), activation="silu")
        print(out.shape)  # torch.Size([2, 192, 4, 64])
        ```
    """
    if _others or _unknown:
        refuse_unknown(lrpe_cosine, _others, _unknown)
    return _run(_cosine, "cosine", x, theta, grid, prefix, offset, position_ids, cu_seqlens, activation, backend)


@hide_catch_alls
def lrpe_rotate(
    x: Tensor,
    theta: Tensor,
    *_others: Never,
    grid: Sequence[int] | None = None,
    prefix: int = 0,
    offset: int | Tensor = 0,
    position_ids: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    activation: Activation = "none",
    interleaved: bool = False,
    backend: Backend = "auto",
    **_unknown: Never,
) -> Tensor:
    """Linearized relative positional encoding, rotation form; with ``activation="none"`` it is RoPE.

    A pair of features turns by its angle: ``o₁ = x̄₁ cos φ − x̄₂ sin φ``, ``o₂ = x̄₁ sin φ + x̄₂ cos φ``. The pairs
    are ``(f, f + D/2)``, or ``(2f, 2f + 1)`` when ``interleaved``.

    Args:
        x: ``(B, N, H, D)``, tokens before heads, or ``(B, N, D)`` for a single head, ``D`` even; float16, bfloat16,
            float32 or float64, any strides. A tensor ``(B, H, N, D)`` is given as ``x.transpose(1, 2)``.
        theta: ``(H, E)``, ``(1, E)`` or ``(E,)`` with ``E ≤ ⌈D/2k⌉``, any float dtype: frequencies in radians per
            position. A token with coordinates ``s₁ … s_k`` (one, but for a ``grid`` and ``position_ids`` of several
            axes) has the angles ``φ = (s₁ θ, …, s_k θ)``, cut to ``D/2``, or followed by zeros up to ``D/2``
            (partial RoPE: those features are not rotated). Differentiable. One number per head is
            ``theta.expand(H, D // 2)``.
        grid: Sizes ``(n₁, …, n_k)`` of a grid of tokens with ``N = prefix + n₁⋯n_k``; the last axis moves fastest.
        prefix: How many leading tokens (of each packed sequence) have angle zero. Token ``prefix + i`` then stands
            at ``offset + i``, or at the coordinates of ``i`` in the grid.
        offset: Position of the first token after the prefix: an integer, with all positions below 2³¹ in size, or
            an integer tensor ``()`` or ``(B,)``, which is read on the device and may lead beyond.
        position_ids: Integers ``(N,)``, ``(B, N)`` or ``(B, N, k)``: positions given outright, instead of
            ``grid``, ``prefix`` and ``offset``, up to 2⁵³ in size.
        cu_seqlens: ``(S + 1,)`` int32 or int64, ``0 = c₀ ≤ … ≤ c_S ≤ N``, with ``B = 1``: packed sequences, each
            starting again at ``offset``. Rows behind the last become 0, and so do their gradients, whatever they
            hold.
        activation: ``none``, ``relu``, ``sigmoid``, ``silu``, ``softmax`` (over features) or ``softmax_sequence``
            (over tokens, per batch entry, head and feature, and per packed sequence), applied to ``x`` first.
        interleaved: Pair neighbouring features instead of halves.
        backend: ``auto`` (Triton where it can run, else PyTorch), ``triton`` or ``torch``.

    Returns:
        The shape, dtype and memory order of ``x``.

    Raises:
        ShapeError: A size does not fit.
        DtypeError: An argument has the wrong type.
        DeviceError: Tensors lie on different devices.
        ArgumentError: An unknown option, arguments that exclude each other, or positions or bounds that are not
            so (checked on a CPU; on a GPU see `check_values`).
        BackendError: ``backend="triton"`` cannot run this call.

    Source: Qin et al., "Linearized Relative Positional Encoding", 2023, arXiv 2307.09270, equation 12;
    Su et al., "RoFormer", 2021, arXiv 2104.09864.

    Example:
        ```python
        import torch
        from warploom import lrpe_rotate

        q = torch.randn(2, 128, 8, 64)
        theta = 10000.0 ** -(torch.arange(32) / 32)
        turned = lrpe_rotate(q, theta)  # RoPE
        later = lrpe_rotate(q[:, 100:], theta, offset=100)
        torch.testing.assert_close(later, turned[:, 100:])
        ```
    """
    if _others or _unknown:
        refuse_unknown(lrpe_rotate, _others, _unknown)
    check_flags("lrpe_rotate", interleaved=interleaved)
    kind = "interleaved" if interleaved else "rotate"
    return _run(_rotate, kind, x, theta, grid, prefix, offset, position_ids, cu_seqlens, activation, backend)


def _run(
    function: Function, kind: str, x: Tensor, theta: Tensor, grid: Sequence[int] | None, prefix: int,
    offset: int | Tensor, position_ids: Tensor | None, cu_seqlens: Tensor | None, activation: str, backend: str,
) -> Tensor:  # fmt: skip
    if isinstance(grid, Sequence) and type(grid) not in (tuple, str):  # one that may change
        grid = tuple(grid)
    offsets, offset = (offset, 0) if isinstance(offset, Tensor) else (None, offset)
    inputs = LrpeInputs(x, theta, position_ids, offsets, cu_seqlens)
    out: Tensor = function(backend, inputs, (kind, grid, prefix, activation), offset)
    return out


def _run_reference(inputs: LrpeInputs, offset: int, call: ValidatedCall, _: str) -> Tensor:
    inputs = call.arrange(*inputs) if call.arrange else inputs  # type: ignore[assignment]
    options: LrpeOptions = call.options
    arguments: dict[str, Any] = {
        "grid": options.grid or None, "prefix": options.prefix,
        "offset": offset if inputs.offsets is None else inputs.offsets,
        "position_ids": inputs.position_ids, "cu_seqlens": inputs.cu_seqlens, "activation": options.activation,
    }  # fmt: skip
    if options.kind == "cosine":
        out = reference.lrpe_cosine(inputs.x, inputs.theta, **arguments)
    else:
        interleaved = options.kind == "interleaved"
        out = reference.lrpe_rotate(inputs.x, inputs.theta, **arguments, interleaved=interleaved)
    return reorder_like(inputs.x, out)


def _axes(inputs: LrpeInputs, options: tuple[Any, ...]) -> Axes:
    """Returns the axes that calls are sharded over: batch entries, heads, and tokens with positions."""
    x, theta, ids, offsets = inputs.x, inputs.theta, inputs.position_ids, inputs.offsets
    _, grid, prefix, activation = options
    plain = grid is None and prefix == 0 and inputs.cu_seqlens is None and activation != "softmax_sequence"
    n = "n" if plain else "."
    of_x = f"b{n}h."[: x.dim()] if x.dim() == 4 else f"b{n}."
    of_ids = "" if ids is None else (n if ids.dim() == 1 else f"b{n}.")
    of_theta = "h." if theta.dim() == 2 and x.dim() == 4 else ".."
    of_offsets = "b" if offsets is not None and offsets.dim() else ""
    return Axes((of_x, of_theta, of_ids, of_offsets, ""), (of_x,), _move)


def _move(tensors: Sequence[Any], offset: Any, first: Any) -> tuple[Sequence[Any], Any]:
    """Returns the tensors and the offset of a shard of tokens that begins so far behind the first."""
    inputs = LrpeInputs(*tensors)
    if inputs.position_ids is not None:
        return inputs, offset
    if inputs.offsets is None:
        return inputs, offset + first
    return inputs._replace(offsets=inputs.offsets.long() + first), offset


_cosine = Function("lrpe_cosine", check, _run_reference, OPERATOR, _axes, check_values, TANGENT)
_rotate = Function("lrpe_rotate", check, _run_reference, OPERATOR, _axes, check_values, TANGENT)
