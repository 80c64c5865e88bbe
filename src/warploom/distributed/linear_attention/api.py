"""Linear attention over a sequence that ranks share: `context_parallel_linear_attention`."""

from __future__ import annotations

import functools
from typing import Any, Literal, Unpack, overload

import torch
from torch.distributed.device_mesh import DeviceMesh

from warploom.distributed.agreement import refuse, refuse_compiled, sizes_of
from warploom.distributed.linear_attention.calls import ContextLinearOptions
from warploom.distributed.linear_attention.operator import NAME, OPERATOR
from warploom.distributed.ranks import check_device, check_packed, group_of
from warploom.errors import WarploomError
from warploom.ops.linear_attention.api import LinearArguments
from warploom.ops.linear_attention.call import LinearInputs
from warploom.ops.linear_attention.validation import Activation, Encoding, check
from warploom.runtime.arguments import as_python
from warploom.runtime.autocast import cast_for_autocast
from warploom.runtime.backend import Backend, use_triton
from warploom.runtime.dispatch import Tensors, apply
from warploom.runtime.names import hide_catch_alls, refuse_unknown

Tensor = torch.Tensor


@overload
def context_parallel_linear_attention(
    q: Tensor, k: Tensor, v: Tensor, mesh: DeviceMesh, *,
    return_state: Literal[False] = ..., **arguments: Unpack[LinearArguments],
) -> Tensor: ...  # fmt: skip
@overload
def context_parallel_linear_attention(
    q: Tensor, k: Tensor, v: Tensor, mesh: DeviceMesh, *,
    return_state: Literal[True], **arguments: Unpack[LinearArguments],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def context_parallel_linear_attention(
    q: Tensor, k: Tensor, v: Tensor, mesh: DeviceMesh, *,
    return_state: bool, **arguments: Unpack[LinearArguments],
) -> Tensor | tuple[Tensor, Tensor]: ...  # fmt: skip
@hide_catch_alls
def context_parallel_linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mesh: DeviceMesh,
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
    """`warploom.linear_attention` of a sequence whose tokens are shared by the ranks of a mesh.

    Parts are contiguous: rank ``r`` of ``W`` holds the ``r``-th of as many, of lengths that differ by one at most.
    States ``(S, H, F, E)`` and decays are all-gathered once, and their gradients once in the backward. All
    ranks must make the same call; what one of them refuses, all refuse with the same error.

    Args:
        q: ``(B, n, H, D)``, this rank's part of the queries, as `shard_sequence` cuts them in the layout
            ``contiguous``; dtypes and strides as in `warploom.linear_attention`.
        k: As ``q``.
        v: ``(B, n, H, E)``, this rank's part of the values.
        mesh: Of one dimension, over whose ranks tokens are shared.
        decay: ``(H,)``, the same on every rank, or ``(B, n, H)``, this rank's part.
        theta: As in `warploom.linear_attention`, the same on every rank.
        encoding: As in `warploom.linear_attention`; likewise the rest.
        activation: Of queries and keys.
        interleaved: Of ``rotate``.
        offset: Position of the first token of the whole, or of each packed sequence.
        causal: Without it every token sees all tokens of all ranks.
        scale: ``D^-½`` by default.
        initial_state: ``(S, H, F, E)``, before the whole; the same on every rank.
        return_state: Also return the state after the whole, on every rank.
        cu_seqlens: ``(S + 1,)``, the same on every rank, with ``B = 1``: the bounds of packed sequences in the
            whole, ``c_S = N``. They are read by the host, once for each tensor.
        backend: ``auto``, ``triton`` or ``torch``.

    Returns:
        ``(B, n, H, E)``, this rank's part of the outputs; with ``return_state`` also the states ``(S, H, F, E)``.
        Gradients of ``theta``, of ``decay`` per head and of ``initial_state`` are this rank's part, to be summed
        over the mesh; that of the state is summed here.

    Raises:
        ShapeError: A size does not fit, or parts are not those of the layout.
        DtypeError: An argument has the wrong type.
        DeviceError: A tensor is not on this rank's device of the mesh.
        ArgumentError: The mesh has more dimensions, an option is unknown, bounds are not those of the whole, or
            the ranks' calls differ.
        BackendError: ``backend="triton"`` cannot run this call.

    Source: Sun et al., "Linear Attention Sequence Parallelism", 2024, arXiv 2404.02882, with a gather in the place
    of its ring.

    Example:
        ```python
        import torch
        from torch.distributed.device_mesh import init_device_mesh
        from warploom.distributed import context_parallel_linear_attention, shard_sequence

        mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))    # under torchrun
        q, k, v = (shard_sequence(torch.randn(1, 64, 8, 16), mesh, layout="contiguous") for _ in range(3))
        out = context_parallel_linear_attention(q, k, v, mesh, decay=-torch.rand(8))    # (1, 64 / W, 8, 16)
        ```
    """
    if _others or _unknown:
        refuse_unknown(context_parallel_linear_attention, _others, _unknown)
    q, k, v = cast_for_autocast(q, k, v)
    offsets, offset = (offset, 0) if isinstance(offset, Tensor) else (None, as_python(offset))
    tensors = (q, k, v, theta, decay, initial_state, offsets, cu_seqlens)
    given = (encoding, activation, interleaved, causal, scale, return_state)
    try:
        options = _validate(tensors, given, offset, mesh, backend)
    except WarploomError as error:
        if torch.compiler.is_compiling():
            return refuse_compiled(  # type: ignore[no-any-return]
                NAME, mesh, error, tensors, lambda *tensors: _validate(tensors, given, offset, mesh, backend),
                functools.partial(_shapes, encoding, return_state),
            )  # fmt: skip
        refuse(NAME, mesh, error)
    out, state, *_ = apply(OPERATOR, tensors, offset, options)
    return (out, state) if return_state else out


def _validate(
    tensors: Tensors, given: tuple[Any, ...], offset: int, mesh: DeviceMesh, backend: str
) -> ContextLinearOptions:
    """Returns the options of a call, if this rank finds nothing wrong with it."""
    group = group_of(NAME, mesh).group_name
    q, *_, cu_seqlens = tensors
    one, limit, *_ = check(NAME, LinearInputs(*tensors), as_python(given), offset)
    kernels = use_triton(NAME, backend, q, limit)
    check_device(NAME, mesh, "q", q)
    if cu_seqlens is not None:
        check_packed(NAME, cu_seqlens)
    kind, activation, causal, scale, return_state = one
    return ContextLinearOptions(kind, activation, causal, scale, return_state, kernels, group)


def _shapes(kind: str, return_state: bool, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> list[tuple[int, ...]]:
    """Returns the shapes of the results of a call that may be wrong."""
    batch, tokens, heads, features, values = sizes_of(q, k, v)
    state = (batch, heads, features * (2 if kind == "cosine" else 1), values)
    return [(batch, tokens, heads, values), *[state] * bool(return_state)]
