"""What the operators' ways into PyTorch share: registration, when to bypass the dispatcher, a batching rule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import forward_ad

_PLAIN = (torch.Tensor, torch.nn.Parameter)
_is_compiling = torch.compiler.is_compiling
_is_traced_by_dynamo = torch.compiler.is_dynamo_compiling
_dispatch_modes = torch._C._len_torch_dispatch_stack
_function_modes = torch._C._len_torch_function_stack
_transforms = torch._C._are_functorch_transforms_active
_is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor
_unwrapped = torch._C._functorch.get_unwrapped


def is_watched() -> bool:
    """Whether something watches calls that `warploom.plans.recognise` does not notice."""
    return _is_traced_by_dynamo() or _function_modes() > 0 or forward_ad._current_level >= 0


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


def is_differentiated(tensor: torch.Tensor) -> bool:
    """Whether a gradient of a tensor may be asked for later, at any level of `torch.func`'s transforms."""
    if not torch.is_grad_enabled():
        return False
    while not tensor.requires_grad and _is_wrapped(tensor):
        tensor = _unwrapped(tensor)
    return tensor.requires_grad


def register(
    library: torch.library.Library,
    name: str,
    schema: str,
    run: Callable[..., Any],
    fake: Callable[..., Any],
    backward: Callable[..., Any],
    setup_context: Callable[..., None] = lambda ctx, inputs, output: None,
) -> None:
    """Register an operator, as ``name`` with a gradient and as ``name_launch`` without.

    Compiled code has forward and backward apart and calls the second. After `torch.library.register_autograd` it
    would call the first, which enters Python twice, once to find that nobody wants a gradient: half a launch.

    Args:
        library: Of the namespace ``warploom``.
        name: Of the operator.
        schema: Its arguments and results.
        run: Computes it, on a GPU or in Triton's interpreter.
        fake: Allocates its results.
        backward: Its gradient, as of a `torch.autograd.Function`.
        setup_context: What that saves.
    """
    for each in (name, f"{name}_launch"):
        library.define(f"{each}{schema}")
        for device in ("CUDA", "CPU"):  # on a CPU the kernels run in Triton's interpreter
            library.impl(each, run, device)
        torch.library.register_fake(f"warploom::{each}", fake, lib=library)
    launch = getattr(torch.ops.warploom, f"{name}_launch").default
    methods = {"forward": launch, "setup_context": setup_context, "backward": backward}
    function: Any = type(name, (torch.autograd.Function,), {k: staticmethod(v) for k, v in methods.items()})

    def differentiable(*arguments: Any) -> Any:
        if torch.is_grad_enabled() and torch._C._any_requires_grad(*arguments):
            return function.apply(*arguments)
        return launch(*arguments)

    library.impl(name, differentiable, "Autograd")


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
