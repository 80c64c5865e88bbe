"""The public functions of LRPE: documentation, validation, choice of backend."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch

from warploom.errors import ArgumentError, DeviceError, DtypeError, ShapeError, fault, shape_of
from warploom.ops.lrpe import reference
from warploom.runtime.arguments import FLOATS, LARGEST, checked_tensor, is_int, is_within, shown
from warploom.runtime.backend import use_triton
from warploom.runtime.eager import is_plain_eager, is_watched
from warploom.runtime.memory_order import in_order_of
from warploom.runtime.plans import Plans, are_kept, metadata, recognise

Tensor = torch.Tensor

ACTIVATIONS = ("none", "relu", "sigmoid", "silu", "softmax", "softmax_sequence")
_INTEGERS = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)
MAX_FEATURES = 8192
"""Features of one head that the kernels hold on chip at once."""
MAX_ROWS = 2**31 - 2**12
"""Rows of features (batch · tokens · heads) that the kernels count in 32 bits, to the end of the last tile."""
MAX_SEQUENCES = 2**30
"""Packed sequences among which the kernels search."""


def lrpe_cosine(
    x: Tensor,
    theta: Tensor,
    *,
    grid: Sequence[int] | None = None,
    prefix: int = 0,
    offset: int | Tensor = 0,
    position_ids: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    activation: str = "none",
    backend: str = "auto",
) -> Tensor:
    """Linearized relative positional encoding, cosine form: ``[x̄ cos φ, x̄ sin φ]``.

    For any query and key, ``⟨lrpe_cosine(q), lrpe_cosine(k)⟩ = Σ_f q̄_f k̄_f cos((s_q − s_k) θ_f)``: the inner
    product of the encodings knows only the difference of the positions, which is what linear attention needs.

    Args:
        x: ``(B, N, H, D)``, or ``(B, N, D)`` for a single head; float16, bfloat16, float32 or float64, any strides.
        theta: ``(H, E)``, ``(1, E)`` or ``(E,)`` with ``E ≤ ⌈D/k⌉``, any float dtype: frequencies in radians per
            position. A token with coordinates ``s₁ … s_k`` (one, but for a ``grid`` and ``position_ids`` of several
            axes) has the angles ``φ = (s₁ θ, …, s_k θ)``, cut to ``D``, or followed by zeros up to ``D``.
            Differentiable. One number per head is ``theta.expand(H, D)``.
        grid: Sizes ``(n₁, …, n_k)`` of a grid of tokens with ``N = prefix + n₁⋯n_k``; the last axis moves fastest.
        prefix: How many leading tokens (of each packed sequence) have angle zero. Token ``prefix + i`` then stands
            at ``offset + i``, or at the coordinates of ``i`` in the grid.
        offset: Position of the first token after the prefix: an integer, or an integer tensor ``()`` or ``(B,)``,
            which is read on the device.
        position_ids: Integers ``(N,)``, ``(B, N)`` or ``(B, N, k)``: positions given outright, instead of
            ``grid``, ``prefix`` and ``offset``. Below 2³¹ in size; values are not checked.
        cu_seqlens: ``(S + 1,)`` int32 or int64, ``0 = c₀ ≤ … ≤ c_S = N``, with ``B = 1``: packed sequences, each
            starting again at ``offset``. Values are not checked.
        activation: ``none``, ``relu``, ``sigmoid``, ``silu``, ``softmax`` (over features) or ``softmax_sequence``
            (over tokens, per batch entry, head and feature, and per packed sequence), applied to ``x`` first.
        backend: ``auto`` (Triton where it can run, else PyTorch), ``triton`` or ``torch``.

    Returns:
        ``(B, N, H, 2·D)`` (or ``(B, N, 2·D)``) in the dtype and memory order of ``x``.

    Raises:
        ShapeError: A size does not fit.
        DtypeError: An argument has the wrong type.
        DeviceError: Tensors lie on different devices.
        ArgumentError: An unknown option, or arguments that exclude each other.
        BackendError: ``backend="triton"`` cannot run this call.

    Source: Qin et al., "Linearized Relative Positional Encoding", 2023, arXiv 2307.09270, equation 9.
    """
    return _run(
        "lrpe_cosine", "cosine", x, theta, grid, prefix, offset, position_ids, cu_seqlens, activation, backend
    )


def lrpe_rotate(
    x: Tensor,
    theta: Tensor,
    *,
    grid: Sequence[int] | None = None,
    prefix: int = 0,
    offset: int | Tensor = 0,
    position_ids: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    activation: str = "none",
    interleaved: bool = False,
    backend: str = "auto",
) -> Tensor:
    """Linearized relative positional encoding, rotation form; with ``activation="none"`` it is RoPE.

    A pair of features turns by its angle: ``o₁ = x̄₁ cos φ − x̄₂ sin φ``, ``o₂ = x̄₁ sin φ + x̄₂ cos φ``. The pairs
    are ``(f, f + D/2)``, or ``(2f, 2f + 1)`` when ``interleaved``.

    Args:
        x: ``(B, N, H, D)``, or ``(B, N, D)`` for a single head, ``D`` even; float16, bfloat16, float32 or float64,
            any strides.
        theta: ``(H, E)``, ``(1, E)`` or ``(E,)`` with ``E ≤ ⌈D/2k⌉``, any float dtype: frequencies in radians per
            position. A token with coordinates ``s₁ … s_k`` (one, but for a ``grid`` and ``position_ids`` of several
            axes) has the angles ``φ = (s₁ θ, …, s_k θ)``, cut to ``D/2``, or followed by zeros up to ``D/2``
            (partial RoPE: those features are not rotated). Differentiable. One number per head is
            ``theta.expand(H, D // 2)``.
        grid: Sizes ``(n₁, …, n_k)`` of a grid of tokens with ``N = prefix + n₁⋯n_k``; the last axis moves fastest.
        prefix: How many leading tokens (of each packed sequence) have angle zero. Token ``prefix + i`` then stands
            at ``offset + i``, or at the coordinates of ``i`` in the grid.
        offset: Position of the first token after the prefix: an integer, or an integer tensor ``()`` or ``(B,)``,
            which is read on the device.
        position_ids: Integers ``(N,)``, ``(B, N)`` or ``(B, N, k)``: positions given outright, instead of
            ``grid``, ``prefix`` and ``offset``. Below 2³¹ in size; values are not checked.
        cu_seqlens: ``(S + 1,)`` int32 or int64, ``0 = c₀ ≤ … ≤ c_S = N``, with ``B = 1``: packed sequences, each
            starting again at ``offset``. Values are not checked.
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
        ArgumentError: An unknown option, or arguments that exclude each other.
        BackendError: ``backend="triton"`` cannot run this call.

    Source: Qin et al., "Linearized Relative Positional Encoding", 2023, arXiv 2307.09270, equation 12;
    Su et al., "RoFormer", 2021, arXiv 2104.09864.
    """
    if not isinstance(interleaved, bool):
        raise fault(DtypeError, "lrpe_rotate", "interleaved", "a bool", repr(interleaved))
    kind = "interleaved" if interleaved else "rotate"
    return _run("lrpe_rotate", kind, x, theta, grid, prefix, offset, position_ids, cu_seqlens, activation, backend)


class _Arguments(NamedTuple):
    """The arguments that both functions share; the grid is a tuple when they have been checked."""

    x: Tensor
    theta: Tensor
    grid: Sequence[int] | None
    prefix: int
    offset: int | Tensor
    position_ids: Tensor | None
    cu_seqlens: Tensor | None
    activation: str


_on_kernels = Plans()
"""Of each kind of call that was found right: what runs it on the kernels, and what that takes besides tensors."""


def _run(
    name: str, kind: str, x: Tensor, theta: Tensor, grid: Sequence[int] | None, prefix: int, offset: int | Tensor,
    position_ids: Tensor | None, cu_seqlens: Tensor | None, activation: str, backend: str,
) -> Tensor:  # fmt: skip
    if position_ids is None and cu_seqlens is None and type(offset) is int and not is_watched():
        for like, kind_, grid_, prefix_, activation_, backend_, first, last, run in _on_kernels.recent:
            if (
                kind_ is kind and grid_ is grid and prefix_ is prefix and activation_ is activation
                and backend_ is backend and first <= offset <= last and like(x, theta)
            ):  # fmt: skip
                return run(x, theta, offset)  # type: ignore[no-any-return]
    key = _key(kind, x, theta, grid, prefix, offset, position_ids, cu_seqlens, activation, backend)
    if key is not None:
        known = _on_kernels.find(key)
        if known is not None:
            ways, call = known
            # Options are remembered by identity: a grid that can be changed is not.
            immutable = grid is None or type(grid) is tuple
            if position_ids is None and cu_seqlens is None and type(offset) is int and immutable:
                _remember(x, theta, (kind, grid, prefix, activation, backend), ways.prepared(x, theta, call))
            return ways.apply(x, theta, _placed(call, offset, position_ids, cu_seqlens))  # type: ignore[no-any-return]
    given = _Arguments(x, theta, grid, prefix, offset, position_ids, cu_seqlens, activation)
    return _run_unknown(name, kind, given, backend, key)


def _remember(x: Tensor, theta: Tensor, options: tuple[Any, ...], run: Callable[..., Tensor]) -> None:
    """Know the next call like this one without a key: its options by identity, its offset by where it may lie."""
    like = recognise(x, theta)
    if like is not None:
        _, grid, *_ = options
        first, last = (-LARGEST, LARGEST + 1 - x.shape[1]) if grid is None else (0, 0)
        _on_kernels.remember((like, *options, first, last, run))


def _run_unknown(name: str, kind: str, given: _Arguments, backend: str, key: Hashable | None) -> Tensor:
    """Run a call like no earlier one, and remember how under the ``key``."""
    _check(name, kind, given)
    if given.grid is not None:
        given = given._replace(grid=tuple(given.grid))
    if not use_triton(name, backend, given.x, _beyond_kernels(given)):
        return _run_reference(kind, given)
    from warploom.ops.lrpe import launches as launchers
    from warploom.ops.lrpe import operator as autograd

    ids, prefix, grid = given.position_ids, given.prefix, tuple(given.grid or ())
    if len(grid) > launchers.MAX_AXES:
        ids = reference.coordinates(given.x, grid, prefix, 0, None, None).expand(given.x.shape[0], -1, -1)
        call = autograd.Call(launchers.Positions(ids), kind, given.activation)
        return autograd.apply(given.x, given.theta, call)
    positions = launchers.Positions(prefix=prefix, grid=grid)
    call = autograd.Call(positions, kind, given.activation, None if key is None else Plans())
    if key is not None:
        _on_kernels.keep(key, (autograd, call))
    return autograd.apply(given.x, given.theta, _placed(call, given.offset, ids, given.cu_seqlens))


def _placed(call: Any, offset: int | Tensor, ids: Tensor | None, cu_seqlens: Tensor | None) -> Any:
    """A call of `autograd` at the positions that calls of a kind do not share: the offset, and those in tensors."""
    if ids is None and cu_seqlens is None and type(offset) is int:
        return call.at(offset)
    offsets, offset = (offset, 0) if isinstance(offset, Tensor) else (None, offset)
    positions = call.positions._replace(ids=ids, offsets=offsets, cu_seqlens=cu_seqlens, offset=offset)
    return call._replace(positions=positions)


def _key(
    kind: str, x: Tensor, theta: Tensor, grid: Sequence[int] | None, prefix: int, offset: int | Tensor,
    ids: Tensor | None, cu_seqlens: Tensor | None, activation: str, backend: str,
) -> Hashable | None:  # fmt: skip
    """All that the checks and the launchers look at, of a plain eager call; ``None`` for any other call.

    Numbers in tensors and the offset itself are not part of it.
    """
    places = (t for t in (offset, ids, cu_seqlens) if isinstance(t, Tensor))
    if not (is_plain_eager(x, theta, *places) and (x.is_cuda or are_kept(x))):
        return None
    start: Hashable
    if type(offset) is int:
        start = offset == 0
        if not start and (x.dim() < 2 or not -LARGEST <= offset <= LARGEST + 1 - x.shape[1]):
            return None
    elif isinstance(offset, Tensor):
        start = metadata(offset)
    else:
        return None
    sizes = grid if type(grid) is tuple or not isinstance(grid, Sequence) else tuple(grid)
    return (
        kind, x.shape, x.stride(), x.dtype, x.device, theta.shape, theta.stride(), theta.dtype, theta.device,
        start, prefix, activation, backend, sizes,
        None if ids is None else metadata(ids), None if cu_seqlens is None else metadata(cu_seqlens),
        # True equals 1, and is not as good.
        type(prefix), tuple(map(type, sizes)) if isinstance(sizes, tuple) else None,
    )  # fmt: skip


def _run_reference(kind: str, given: _Arguments) -> Tensor:
    keywords = given._asdict()
    x, theta = keywords.pop("x"), keywords.pop("theta")
    if kind == "cosine":
        out = reference.lrpe_cosine(x, theta, **keywords)
    else:
        out = reference.lrpe_rotate(x, theta, interleaved=kind == "interleaved", **keywords)
    return in_order_of(x, out)


def _beyond_kernels(given: _Arguments) -> str | None:
    """What the Triton kernels do not do in this call, if anything."""
    features = given.x.shape[-1]
    if features > MAX_FEATURES:
        return f"a row of {features} features does not fit in one tile ({MAX_FEATURES} at most)"
    rows = math.prod(given.x.shape[:-1])
    if not is_within(rows, MAX_ROWS):
        return f"x has {rows} rows of features ({MAX_ROWS} at most)"
    if given.cu_seqlens is not None and not is_within(given.cu_seqlens.shape[0], MAX_SEQUENCES):
        return f"cu_seqlens bounds {given.cu_seqlens.shape[0] - 1} sequences ({MAX_SEQUENCES - 1} at most)"
    return None


# ----------------------------------------------------------------------------------------------------------
# Validation: nothing here touches a tensor's data or the device.
# ----------------------------------------------------------------------------------------------------------


def _check(name: str, kind: str, given: _Arguments) -> None:
    x, theta, grid, prefix, offset, position_ids, cu_seqlens, activation = given
    _check_x_theta(name, x, theta)
    if kind != "cosine" and x.shape[-1] % 2:
        raise fault(ShapeError, name, "x", "of an even number of features D", shape_of(x))
    if activation not in ACTIVATIONS:
        raise fault(ArgumentError, name, "activation", f"one of {', '.join(ACTIVATIONS)}", repr(activation))
    tokens = x.shape[1]
    if not is_int(prefix):
        raise fault(DtypeError, name, "prefix", "an int", repr(prefix))
    if prefix != 0 and not 0 <= prefix <= tokens:
        raise fault(ArgumentError, name, "prefix", f"between 0 and N = {tokens}", shown(prefix))
    if isinstance(offset, Tensor):
        _check_offset_tensor(name, x, offset)
    elif not is_int(offset):
        raise fault(DtypeError, name, "offset", "an int or an integer tensor", repr(offset))
    elif not (offset >= -LARGEST and is_within(offset + tokens - 1, LARGEST)):
        raise fault(ArgumentError, name, "offset", "such that all positions are below 2**31 in size", shown(offset))
    if position_ids is not None:
        _check_position_ids(name, x, position_ids)
        others = {"grid": grid is not None, "prefix": prefix != 0, "offset": _given(offset)}
        for argument in (argument for argument, there in others.items() if there):
            raise fault(ArgumentError, name, argument, "left out when position_ids are given", "both")
    if cu_seqlens is not None:
        _check_cu_seqlens(name, x, cu_seqlens)
        if grid is not None:
            raise fault(ArgumentError, name, "grid", "left out when cu_seqlens is given", "both")
    if grid is not None:
        _check_grid(name, grid, prefix, tokens)
        if _given(offset):
            raise fault(ArgumentError, name, "offset", "left out when a grid is given", "both")
    _check_frequencies(name, kind, given)


def _check_x_theta(name: str, x: Tensor, theta: Tensor) -> None:
    for argument, tensor in (("x", x), ("theta", theta)):
        checked_tensor(name, argument, tensor, FLOATS)
    if x.dim() not in (3, 4) or x.shape[-1] == 0:
        raise fault(ShapeError, name, "x", "(B, N, H, D) or (B, N, D) with D ≥ 1", shape_of(x))
    heads = x.shape[2] if x.dim() == 4 else 1
    rows = theta.shape[0] if theta.dim() == 2 else 1
    if theta.dim() not in (1, 2) or theta.shape[-1] == 0 or rows not in (1, heads):
        expected = f"(H, E), (1, E) or (E,) with H = {heads} and E ≥ 1"
        raise fault(ShapeError, name, "theta", expected, shape_of(theta))
    _check_device(name, "theta", theta, x)


def _check_frequencies(name: str, kind: str, given: _Arguments) -> None:
    """No axis has a frequency that no feature takes: what is left out in silence was meant otherwise."""
    features = given.x.shape[-1] if kind == "cosine" else given.x.shape[-1] // 2
    ids, axes = given.position_ids, len(given.grid or (0,))
    if ids is not None and ids.dim() == 3:
        axes = ids.shape[2]
    most = -(-features // axes)
    if given.theta.shape[-1] > most:
        expected = f"of E ≤ {most} = ⌈F/k⌉ frequencies, with F = {features} and k = {axes}"
        raise fault(ShapeError, name, "theta", expected, shape_of(given.theta))


def _check_offset_tensor(name: str, x: Tensor, offset: Tensor) -> None:
    checked_tensor(name, "offset", offset, _INTEGERS)
    if offset.dim() > 1 or (offset.dim() == 1 and offset.shape[0] != x.shape[0]):
        raise fault(ShapeError, name, "offset", f"() or (B,) with B = {x.shape[0]}", shape_of(offset))
    _check_device(name, "offset", offset, x)


def _check_position_ids(name: str, x: Tensor, position_ids: Tensor) -> None:
    checked_tensor(name, "position_ids", position_ids, _INTEGERS)
    batch, tokens = x.shape[:2]
    shape = tuple(position_ids.shape)
    if shape != (tokens,) and (len(shape) not in (2, 3) or shape[:2] != (batch, tokens) or 0 in shape[2:]):
        expected = f"(N,), (B, N) or (B, N, k) with B = {batch}, N = {tokens}"
        raise fault(ShapeError, name, "position_ids", expected, shape)
    _check_device(name, "position_ids", position_ids, x)


def _check_cu_seqlens(name: str, x: Tensor, cu_seqlens: Tensor) -> None:
    checked_tensor(name, "cu_seqlens", cu_seqlens, (torch.int32, torch.int64))
    if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 2:
        raise fault(ShapeError, name, "cu_seqlens", "(S + 1,) with S ≥ 1", shape_of(cu_seqlens))
    if x.shape[0] != 1:
        raise fault(ShapeError, name, "x", "of batch size 1 when cu_seqlens is given", shape_of(x))
    _check_device(name, "cu_seqlens", cu_seqlens, x)


def _check_grid(name: str, grid: Sequence[int], prefix: int, tokens: int) -> None:
    if not isinstance(grid, Sequence) or not grid or not all(is_int(size) for size in grid):
        raise fault(DtypeError, name, "grid", "a sequence of ints, one per axis", shown(grid))
    if any(size < 1 for size in grid):
        raise fault(ArgumentError, name, "grid", "of positive sizes", shown(tuple(grid)))
    if prefix + math.prod(grid) != tokens:
        expected, got = f"such that prefix + n₁⋯n_k = N = {tokens}", shown(tuple(grid))
        raise fault(ShapeError, name, "grid", expected, f"{prefix} + {shown(math.prod(grid))} for {got}")


def _check_device(name: str, argument: str, tensor: Tensor, x: Tensor) -> None:
    if tensor.device != x.device:
        raise fault(DeviceError, name, argument, f"on the device of x, {x.device}", tensor.device)


def _given(offset: int | Tensor) -> bool:
    return isinstance(offset, Tensor) or offset != 0
