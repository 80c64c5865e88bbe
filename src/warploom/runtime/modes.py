"""The state of PyTorch around a call: tracers, modes and transforms, counters of operations, and ``vmap``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from warploom.runtime.pytorch import are_transforms_active as _transforms
from warploom.runtime.pytorch import count_dispatch_modes as _dispatch_modes
from warploom.runtime.pytorch import count_function_modes as _function_modes
from warploom.runtime.pytorch import dispatch_modes, forward_ad
from warploom.runtime.pytorch import is_batched as _is_batched
from warploom.runtime.pytorch import is_traced_by_jit as _is_traced_by_jit
from warploom.runtime.pytorch import is_wrapped as _is_wrapped
from warploom.runtime.pytorch import unwrap as _unwrapped

_PLAIN = (torch.Tensor, torch.nn.Parameter)
_strided = torch.strided
_is_compiling = torch.compiler.is_compiling
_is_traced_by_dynamo = torch.compiler.is_dynamo_compiling


def is_watched() -> bool:
    """Returns True if a tracer, function mode or forward-mode derivative is active, which guards do not notice."""
    return _is_traced_by_dynamo() or _function_modes() > 0 or forward_ad._current_level >= 0


def is_plain_eager(*tensors: torch.Tensor) -> bool:
    """Returns True if a call on these tensors may launch its kernels without PyTorch's dispatcher.

    That is so without a compiler or tracer, tensor subclass, mode, meta tensor, function transform or forward-mode
    derivative, and if no tensor is sparse, nested or lazily negated. The dispatcher takes care of all of these.
    """
    if _is_compiling() or _is_traced_by_jit():
        return False
    for tensor in tensors:
        if type(tensor) not in _PLAIN or tensor.is_nested or tensor.layout is not _strided or tensor.is_neg():
            return False
    return not (
        tensors[0].is_meta
        or _dispatch_modes()
        or _function_modes()
        or _transforms()
        or forward_ad._current_level >= 0
    )


def holds_data(tensor: torch.Tensor) -> bool:
    """Returns True if a tensor has values in memory that may be read: it is not fake, traced or wrapped."""
    if type(tensor) not in _PLAIN or tensor.is_meta or _is_compiling() or _is_traced_by_jit():
        return False
    return not (_transforms() and _is_wrapped(tensor))


def is_plain_backward(*gradients: torch.Tensor) -> bool:
    """Returns True if a backward with these incoming gradients may launch its kernels without PyTorch's dispatcher.

    It may not if the backward is differentiated itself, or if autograd runs it for a batch of gradients.
    """
    if torch.is_grad_enabled() or is_watched() or _dispatch_modes() or _transforms():
        return False
    for gradient in gradients:
        if type(gradient) not in _PLAIN or gradient.layout is not _strided or gradient.is_neg():
            return False
        if _is_batched(gradient):
            return False
    return True


def read_bounds(*cu_seqlens: torch.Tensor | None) -> tuple[Any, ...]:
    """Returns bounds of packed sequences as lists of ints if all may be read, and otherwise as they are."""
    for each in cu_seqlens:
        if each is None:
            continue
        if not holds_data(each) or _dispatch_modes():
            return cu_seqlens
        if each.is_cuda and torch.cuda.is_current_stream_capturing():
            return cu_seqlens
    return tuple(None if each is None else each.tolist() for each in cu_seqlens)


def is_differentiated(tensor: torch.Tensor) -> bool:
    """Returns True if a gradient of a tensor may be asked for, at any level of `torch.func`'s transforms."""
    if not torch.is_grad_enabled():
        return False
    if _transforms():
        if _is_compiling():  # traced code cannot unwrap a tensor
            return True
        while not tensor.requires_grad and _is_wrapped(tensor):
            tensor = _unwrapped(tensor)
    return tensor.requires_grad


def is_forward_mode() -> bool:
    """Returns True if eager tensors may have tangents; what compiled code enters is not seen here."""
    return not _is_traced_by_dynamo() and forward_ad._current_level >= 0


def has_tangent(argument: object) -> bool:
    """Returns True if an argument is a tensor with a tangent of forward mode, or may be one, as in ``vmap``."""
    if not isinstance(argument, torch.Tensor) or not argument.is_floating_point():
        return False
    try:
        # There is one level, and compiled code does not enter it in Python.
        return forward_ad.unpack_dual(argument, level=0).tangent is not None
    except RuntimeError:
        return True


def count_flops(operator: Any, flops: Callable[..., int]) -> None:
    """Let `torch.utils.flop_counter.FlopCounterMode` count an operator, in active counters too."""
    from torch.utils.flop_counter import register_flop_formula  # imports Triton

    formula: Any = register_flop_formula(operator, get_raw=True)(flops)
    # An active counter has a copy of the formulas.
    for mode in dispatch_modes():
        registry = getattr(getattr(mode, "counter", None), "flop_registry", None)
        if isinstance(registry, dict):
            registry[operator] = formula


def count_attention_pairs(
    q: torch.Tensor, k: torch.Tensor, cu_seqlens_q: torch.Tensor | None, cu_seqlens_k: torch.Tensor | None
) -> int:
    """Returns the number of pairs of a query and a key, over the batch (B, N, …) and (B, M, …).

    Pairs within the same packed sequence are counted, if the bounds can be read; otherwise all pairs.
    """
    if cu_seqlens_q is None or cu_seqlens_k is None or type(cu_seqlens_q) not in _PLAIN or cu_seqlens_q.is_meta:
        return q.shape[0] * q.shape[1] * k.shape[1]
    return int((cu_seqlens_q.diff() * cu_seqlens_k.diff()).sum())


def run_per_sample(call: Callable[..., Any], size: int, in_dims: tuple[Any, ...], inputs: tuple[Any, ...]) -> Any:
    """Run one call per sample and stack the results: ``vmap`` of an operator that has a batch of its own."""

    def sample(index: int) -> Any:
        return call(*(v.select(d, index) if isinstance(d, int) else v for v, d in zip(inputs, in_dims)))

    if size == 0:  # one call on zeros gives the shape of the results
        zeros = (v.sum(d, dtype=v.dtype) if isinstance(d, int) else v for v, d in zip(inputs, in_dims))
        outputs = [call(*zeros)]
    else:
        outputs = [sample(i) for i in range(size)]
    if isinstance(outputs[0], torch.Tensor):
        return torch.stack(outputs)[:size], 0
    return tuple(torch.stack(each)[:size] for each in zip(*outputs)), (0,) * len(outputs[0])
