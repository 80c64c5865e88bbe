"""What PyTorch does around a call: what watches it, how its operations are counted, and a batching rule."""

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
    """Whether something watches calls that `warploom.runtime.plans.make_guard` does not notice."""
    return _is_traced_by_dynamo() or _function_modes() > 0 or forward_ad._current_level >= 0


def is_plain_eager(*tensors: torch.Tensor) -> bool:
    """Whether nothing watches a call on these tensors, and they hold in memory what they mean.

    No compiler or tracer, tensor subclass, mode, meta tensor, function transform or forward-mode derivative, no
    sparse or nested tensor, and none whose sign is yet to be changed: only then may a call go to its launchers
    without the dispatcher, which sees to all of these.
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
    """Whether a tensor has its numbers in memory, and may be asked for them: it is not fake, traced or wrapped."""
    if type(tensor) not in _PLAIN or tensor.is_meta or _is_compiling() or _is_traced_by_jit():
        return False
    return not (_transforms() and _is_wrapped(tensor))


def is_plain_backward(*gradients: torch.Tensor) -> bool:
    """Whether a backward that was handed these gradients may go to its launchers without the dispatcher.

    Not where someone wants a graph of it, nor where autograd runs it for many gradients at once.
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
    """Bounds of packed sequences as ints, where all may be read without harm, and otherwise as they are."""
    for each in cu_seqlens:
        if each is None:
            continue
        if not holds_data(each) or _dispatch_modes():
            return cu_seqlens
        if each.is_cuda and torch.cuda.is_current_stream_capturing():
            return cu_seqlens
    return tuple(None if each is None else each.tolist() for each in cu_seqlens)


def is_differentiated(tensor: torch.Tensor) -> bool:
    """Whether a gradient of a tensor may be asked for later, at any level of `torch.func`'s transforms."""
    if not torch.is_grad_enabled():
        return False
    if _transforms():
        if _is_compiling():  # cannot look through what a transform has wrapped
            return True
        while not tensor.requires_grad and _is_wrapped(tensor):
            tensor = _unwrapped(tensor)
    return tensor.requires_grad


def count_flops(operator: Any, flops: Callable[..., int]) -> None:
    """Let `torch.utils.flop_counter.FlopCounterMode` count an operator, in counters at work too."""
    from torch.utils.flop_counter import register_flop_formula  # imports Triton

    formula: Any = register_flop_formula(operator, get_raw=True)(flops)
    # A counter made before has a copy of all formulas.
    for mode in dispatch_modes():
        registry = getattr(getattr(mode, "counter", None), "flop_registry", None)
        if isinstance(registry, dict):
            registry[operator] = formula


def count_attention_pairs(
    q: torch.Tensor, k: torch.Tensor, cu_seqlens_q: torch.Tensor | None, cu_seqlens_k: torch.Tensor | None
) -> int:
    """Pairs of a query and a key over the batch (B, N, …) and (B, M, …), to count operations.

    Those of the same packed sequence, if the bounds can be read.
    """
    if cu_seqlens_q is None or cu_seqlens_k is None or type(cu_seqlens_q) not in _PLAIN or cu_seqlens_q.is_meta:
        return q.shape[0] * q.shape[1] * k.shape[1]
    return int((cu_seqlens_q.diff() * cu_seqlens_k.diff()).sum())


def run_per_sample(call: Callable[..., Any], size: int, in_dims: tuple[Any, ...], inputs: tuple[Any, ...]) -> Any:
    """One call after another, run_per_sample: ``vmap`` of an operator whose kernels take their own batch."""

    def sample(index: int) -> Any:
        return call(*(v.select(d, index) if isinstance(d, int) else v for v, d in zip(inputs, in_dims)))

    if size == 0:  # one call on zeros, of which only the shape is kept
        zeros = (v.sum(d, dtype=v.dtype) if isinstance(d, int) else v for v, d in zip(inputs, in_dims))
        outputs = [call(*zeros)]
    else:
        outputs = [sample(i) for i in range(size)]
    if isinstance(outputs[0], torch.Tensor):
        return torch.stack(outputs)[:size], 0
    return tuple(torch.stack(each)[:size] for each in zip(*outputs)), (0,) * len(outputs[0])
