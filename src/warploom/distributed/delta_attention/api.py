"""Delta rule attention over a sequence that ranks share: `context_parallel_delta_attention`."""

from __future__ import annotations

import functools
from typing import Any, Literal, Unpack, overload

import torch
from torch.distributed.device_mesh import DeviceMesh

from warploom.distributed.agreement import refuse, refuse_compiled
from warploom.distributed.delta_attention.calls import ContextDeltaOptions
from warploom.distributed.delta_attention.operator import NAME, OPERATOR
from warploom.distributed.ranks import check_device, check_packed, group_of
from warploom.errors import WarploomError
from warploom.ops.delta_attention.api import DeltaArguments
from warploom.ops.delta_attention.call import DeltaInputs
from warploom.ops.delta_attention.validation import Encoding, check, check_values
from warploom.runtime.arguments import as_python
from warploom.runtime.autocast import cast_for_autocast
from warploom.runtime.backend import Backend, use_triton
from warploom.runtime.dispatch import Tensors, apply
from warploom.runtime.names import hide_catch_alls, refuse_unknown
from warploom.runtime.values import reads_values_of

Tensor = torch.Tensor


@overload
def context_parallel_delta_attention(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, mesh: DeviceMesh, *,
    return_state: Literal[False] = ..., **arguments: Unpack[DeltaArguments],
) -> Tensor: ...  # fmt: skip
@overload
def context_parallel_delta_attention(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, mesh: DeviceMesh, *,
    return_state: Literal[True], **arguments: Unpack[DeltaArguments],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def context_parallel_delta_attention(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, mesh: DeviceMesh, *,
    return_state: bool, **arguments: Unpack[DeltaArguments],
) -> Tensor | tuple[Tensor, Tensor]: ...  # fmt: skip
@hide_catch_alls
def context_parallel_delta_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    mesh: DeviceMesh,
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
    """`warploom.delta_attention` of a sequence whose tokens are shared by the ranks of a mesh.

    Parts are contiguous: rank ``r`` of ``W`` holds the ``r``-th of as many, of lengths that differ by one at most.
    What a part makes of the state before it, ``M S + U`` with ``(S, H, D, E + D)`` numbers, is all-gathered once,
    and once more with gradients in the backward. All ranks must make the same call; what one of them refuses, all
    refuse with the same error. Results are the same in every run.

    Args:
        q: ``(B, n, Hk, D)``, this rank's part of the queries, as `shard_sequence` cuts them in the layout
            ``contiguous``; dtypes and strides as in `warploom.delta_attention`.
        k: As ``q``.
        v: ``(B, n, H, E)``, this rank's part of the values.
        beta: ``(B, n, H)``, this rank's part.
        mesh: Of one dimension, over whose ranks tokens are shared.
        decay: ``(B, n, H)`` or ``(B, n, H, D)``, this rank's part.
        theta: As in `warploom.delta_attention`, the same on every rank.
        encoding: As in `warploom.delta_attention`; likewise the rest.
        interleaved: Of ``rotate``.
        offset: Position of the first token of the whole, or of each packed sequence.
        normalize: Divide queries and keys by their lengths.
        scale: ``D^-½`` by default.
        initial_state: ``(S, H, D, E)``, before the whole; the same on every rank.
        return_state: Also return the state after the whole, on every rank.
        cu_seqlens: ``(S + 1,)``, the same on every rank, with ``B = 1``: the bounds of packed sequences in the
            whole, ``c_S = N``. They are read by the host, once for each tensor.
        backend: ``auto``, ``triton`` or ``torch``.

    Returns:
        ``(B, n, H, E)``, this rank's part of the outputs; with ``return_state`` also the states ``(S, H, D, E)``.
        Gradients of ``theta`` and of ``initial_state`` are this rank's part, to be summed over the mesh; that of
        the state is summed here.

    Raises:
        ShapeError: A size does not fit, or parts are not those of the layout.
        DtypeError: An argument has the wrong type.
        DeviceError: A tensor is not on this rank's device of the mesh.
        ArgumentError: The mesh has more dimensions, an option is unknown, a decay is above 0 (checked on a CPU),
            bounds are not those of the whole, or the ranks' calls differ.
        BackendError: ``backend="triton"`` cannot run this call.

    Source: Yang et al., "Gated Delta Networks", 2024, arXiv 2412.06464, for the operator.

    Example:
        ```python
        import torch
        from torch.distributed.device_mesh import init_device_mesh
        from warploom.distributed import context_parallel_delta_attention, shard_sequence

        mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))    # under torchrun
        whole = (*torch.randn(3, 1, 64, 8, 16), torch.rand(1, 64, 8))
        parts = [shard_sequence(x, mesh, layout="contiguous") for x in whole]
        out = context_parallel_delta_attention(*parts, mesh, normalize=True)            # (1, 64 / W, 8, 16)
        ```
    """
    if _others or _unknown:
        refuse_unknown(context_parallel_delta_attention, _others, _unknown)
    q, k, v = cast_for_autocast(q, k, v)
    offsets, offset = (offset, 0) if isinstance(offset, Tensor) else (None, as_python(offset))
    tensors = (q, k, v, beta, decay, theta, initial_state, offsets, cu_seqlens)
    given = (encoding, interleaved, normalize, scale, return_state)
    try:
        options = _validate(tensors, given, offset, mesh, backend)
    except WarploomError as error:
        if torch.compiler.is_compiling():
            return refuse_compiled(  # type: ignore[no-any-return]
                NAME, mesh, error, tensors, lambda *tensors: _validate(tensors, given, offset, mesh, backend),
                functools.partial(_shapes, return_state),
            )  # fmt: skip
        refuse(NAME, mesh, error)
    out, state, *_ = apply(OPERATOR, tensors, offset, options)
    return (out, state) if return_state else out


def _validate(
    tensors: Tensors, given: tuple[Any, ...], offset: int, mesh: DeviceMesh, backend: str
) -> ContextDeltaOptions:
    """Returns the options of a call, if this rank finds nothing wrong with it."""
    group, inputs = group_of(NAME, mesh).group_name, DeltaInputs(*tensors)
    one, limit, *_ = check(NAME, inputs, as_python(given), offset)
    kernels = use_triton(NAME, backend, inputs.q, limit)
    check_device(NAME, mesh, "q", inputs.q)
    if inputs.cu_seqlens is not None:
        check_packed(NAME, inputs.cu_seqlens)
    if reads_values_of(inputs.q):
        check_values(NAME, inputs._replace(cu_seqlens=None))
    kind, normalize, scale, return_state = one
    return ContextDeltaOptions(kind, normalize, scale, return_state, kernels, group)


def _shapes(return_state: bool, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> list[tuple[int, ...]]:
    """Returns the shapes of the results of a call that may be wrong."""
    rows = [x for x in (v, q) if isinstance(x, Tensor) and x.dim() == 4]
    batch, tokens, heads, values = rows[0].shape if rows else (0,) * 4
    features = rows[-1].shape[3] if rows else 0
    return [(batch, tokens, heads, values), *[(batch, heads, features, values)] * bool(return_state)]
