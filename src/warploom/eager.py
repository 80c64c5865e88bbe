"""What the operators' ways into PyTorch share: when the dispatcher can be bypassed, and a batching rule."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd import forward_ad

_PLAIN = (torch.Tensor, torch.nn.Parameter)
_is_compiling = torch.compiler.is_compiling
_dispatch_modes = torch._C._len_torch_dispatch_stack
_function_modes = torch._C._len_torch_function_stack
_transforms = torch._C._are_functorch_transforms_active


def is_plain_eager(*tensors: torch.Tensor) -> bool:
    """Whether nothing watches a call on these tensors.

    No compiler, tensor subclass, mode, meta tensor, function transform or forward-mode derivative: only then may a
    call go to its launchers without the dispatcher.
    """
    if _is_compiling():
        return False
    for tensor in tensors:
        if type(tensor) not in _PLAIN:
            return False
    return not (
        tensors[0].is_meta
        or _dispatch_modes()
        or _function_modes()
        or _transforms()
        or forward_ad._current_level >= 0
    )


def stack_over_batch(function: Any, info: Any, in_dims: tuple[int | None, ...], inputs: tuple[Any, ...]) -> Any:
    """One call after another, stacked: ``vmap`` of an autograd function whose kernels take their own batch."""
    slices = (
        function.apply(*(v.select(d, i) if isinstance(d, int) else v for v, d in zip(inputs, in_dims)))
        for i in range(info.batch_size)
    )
    outputs = list(slices)
    if isinstance(outputs[0], torch.Tensor):
        return torch.stack(outputs), 0
    return tuple(torch.stack(parts) for parts in zip(*outputs)), (0,) * len(outputs[0])
