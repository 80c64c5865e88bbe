"""The public function of the short convolution."""

from __future__ import annotations

from typing import Any, Literal, TypedDict, Unpack, overload

import torch

from warploom.ops.short_convolution import reference
from warploom.ops.short_convolution.call import ConvolutionInputs
from warploom.ops.short_convolution.operator import OPERATOR
from warploom.ops.short_convolution.validation import NAME, Activation, check, check_values
from warploom.runtime.autocast import cast_for_autocast
from warploom.runtime.backend import Backend
from warploom.runtime.dispatch import Function, ValidatedCall
from warploom.runtime.memory_order import make_dense, reorder_like
from warploom.runtime.names import hide_catch_alls, refuse_unknown
from warploom.runtime.sharding import Axes

Tensor = torch.Tensor


class ConvolutionArguments(TypedDict, total=False):
    """Arguments of `short_convolution` by name, all but the one that decides what it returns."""

    bias: Tensor | None
    activation: Activation
    initial_state: Tensor | None
    cu_seqlens: Tensor | None
    backend: Backend


@overload
def short_convolution(
    x: Tensor, weight: Tensor, *, return_state: Literal[False] = ..., **arguments: Unpack[ConvolutionArguments]
) -> Tensor: ...
@overload
def short_convolution(
    x: Tensor, weight: Tensor, *, return_state: Literal[True], **arguments: Unpack[ConvolutionArguments]
) -> tuple[Tensor, Tensor]: ...
@overload
def short_convolution(
    x: Tensor, weight: Tensor, *, return_state: bool, **arguments: Unpack[ConvolutionArguments]
) -> Tensor | tuple[Tensor, Tensor]: ...
@hide_catch_alls
def short_convolution(
    x: Tensor,
    weight: Tensor,
    *_others: Any,
    bias: Tensor | None = None,
    activation: Activation = "none",
    initial_state: Tensor | None = None,
    return_state: bool = False,
    cu_seqlens: Tensor | None = None,
    backend: Backend = "auto",
    **_unknown: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """Causal convolution of each channel with the few tokens before it, as before linear attention.

    ``y_n = f(b + Σ_k w_k x_{n−K+1+k})`` for ``k = 0 … K − 1``: the last weight is that of the token itself. With a
    state handed in and out, ``N = 1`` is a step of decoding.

    Args:
        x: ``(B, N, C)``; float16, bfloat16, float32 or float64, any strides.
        weight: ``(C, K)`` with ``K ≥ 2``, any float dtype and strides; the kernels take ``K ≤ 8``.
        bias: ``(C,)``, any float dtype.
        activation: ``none`` or ``silu``, applied to the sum.
        initial_state: ``(S, C, K − 1)``, any float dtype and strides: the inputs before the first token, the latest
            one last; zero by default. ``S`` is ``B`` or the number of packed sequences.
        return_state: Also return the last ``K − 1`` inputs; they are differentiable.
        cu_seqlens: ``(S + 1,)`` int32 or int64, ``0 = c₀ ≤ … ≤ c_S ≤ N``, with ``B = 1``: packed sequences, of
            which none sees another.
        backend: ``auto`` (Triton where it can run, else PyTorch), ``triton`` or ``torch``.

    Returns:
        ``(B, N, C)`` in the dtype and the memory order of ``x``; with ``return_state`` also the state,
        ``(S, C, K − 1)`` in the dtype of ``x``. Rows behind the last packed sequence are 0. All tensors but
        ``cu_seqlens`` have gradients, which are the same in every run. Under autocast ``x`` is cast as for
        PyTorch's convolutions.

    Raises:
        ShapeError: A size does not fit.
        DtypeError: An argument has the wrong type.
        DeviceError: Tensors lie on different devices.
        ArgumentError: An unknown option, or bounds that are not so (checked on a CPU; on a GPU see
            `check_values`).
        BackendError: ``backend="triton"`` cannot run this call.

    Source: Poli et al., "Hyena Hierarchy", 2023, arXiv 2302.10866; Gu and Dao, "Mamba", 2023, arXiv 2312.00752.

    Example:
        ```python
        import torch
        from warploom import short_convolution

        x, weight = torch.randn(2, 100, 64), torch.randn(64, 4)
        y, state = short_convolution(x, weight, activation="silu", return_state=True)
        x = torch.randn(2, 1, 64)  # a new token
        y, state = short_convolution(x, weight, activation="silu", initial_state=state, return_state=True)
        print(y.shape, state.shape)  # torch.Size([2, 1, 64]) torch.Size([2, 64, 3])
        ```
    """
    if _others or _unknown:
        refuse_unknown(short_convolution, _others, _unknown)
    (x,) = cast_for_autocast(x)
    inputs = ConvolutionInputs(x, weight, bias, initial_state, cu_seqlens)
    return _function(backend, inputs, (activation, return_state))  # type: ignore[no-any-return]


def _run_reference(
    inputs: ConvolutionInputs, _: int, call: ValidatedCall, __: str
) -> Tensor | tuple[Tensor, Tensor]:
    x, weight, bias, initial_state, cu_seqlens = inputs
    activation, return_state = call.options
    results = reference.short_convolution(
        x, weight, bias=bias, activation=activation, initial_state=initial_state, return_state=return_state,
        cu_seqlens=cu_seqlens,
    )  # fmt: skip
    if isinstance(results, Tensor):
        return reorder_like(x, results)
    return reorder_like(x, results[0]), make_dense(results[1])


def _axes(inputs: ConvolutionInputs, options: tuple[object, ...]) -> Axes:
    """Returns the axes that calls are sharded over: batch entries, if not packed, and channels."""
    states = "bc." if inputs.cu_seqlens is None else ".c."
    return Axes(("b.c", "c.", "c", states, ""), ("b.c", states) if options[1] else ("b.c",))


_function = Function(NAME, check, _run_reference, OPERATOR, _axes, check_values)
