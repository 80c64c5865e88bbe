"""Private names of PyTorch, looked up once, each with a public fallback.

They save host time, and nothing else depends on them. Where PyTorch cannot say whether a mode or transform is
active, the answer is yes, and the call goes through the dispatcher, which is right for every call.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

Guard = Callable[..., bool]


def _find(name: str, otherwise: Any) -> Any:
    """Returns an attribute of ``torch`` by its dotted name, or the fallback."""
    try:
        return operator.attrgetter(name)(torch)
    except AttributeError:
        return otherwise


def _any_requires_grad(*arguments: Any) -> bool:
    return any(isinstance(a, torch.Tensor) and a.requires_grad for a in arguments)


def _as_strided(whole: torch.Tensor, shape: Any, stride: Any, offset: int) -> torch.Tensor:
    return whole.as_strided(shape, stride, whole.storage_offset() + offset)


# Devices and memory. Where PyTorch is for CPUs, some are missing.
current_device: Callable[[], int] = _find("_C._cuda_getDevice", torch.cuda.current_device)
current_stream: Callable[[int], int] = _find(
    "_C._cuda_getCurrentRawStream", lambda device: torch.cuda.current_stream(device).cuda_stream
)
is_deterministic: Callable[[], bool] = _find(
    "_C._get_deterministic_algorithms", torch.are_deterministic_algorithms_enabled
)
empty_strided_cuda: Callable[..., torch.Tensor] | None = None
"""The allocation of compiled code, on the current GPU, in half the time of `torch.empty_strided`."""
if torch.backends.cuda.is_built():
    empty_strided_cuda = _find("_C._dynamo.guards._empty_strided_cuda", None)
view: Callable[..., torch.Tensor] = _find("_C._dynamo.guards._reinterpret_tensor", _as_strided)
"""The view of compiled code, in half the time of ``as_strided``, given a tensor, sizes, strides, and an offset from
the tensor's first element."""

# Modes, transforms and tracers.
count_dispatch_modes: Callable[[], int] = _find("_C._len_torch_dispatch_stack", lambda: 1)
count_function_modes: Callable[[], int] = _find("_C._len_torch_function_stack", lambda: 1)
are_transforms_active: Callable[[], bool] = _find("_C._are_functorch_transforms_active", lambda: True)
is_traced_by_jit: Callable[[], bool] = _find("_C._is_tracing", _find("jit.is_tracing", lambda: True))
is_batched: Callable[[torch.Tensor], bool] = _find("_C._functorch.is_legacy_batchedtensor", lambda tensor: True)
"""True for an incoming gradient of ``torch.autograd.grad(is_grads_batched=True)``, which is older than
``torch.func``."""
is_wrapped: Callable[[torch.Tensor], bool] = _find("_C._functorch.is_functorch_wrapped_tensor", lambda tensor: True)
unwrap: Callable[[torch.Tensor], Any] = _find(
    "_C._functorch.get_unwrapped", lambda tensor: SimpleNamespace(requires_grad=True)
)
"""Returns the tensor that a transform of ``torch.func`` wraps. The fallback says that its gradient is wanted."""
dispatch_modes: Callable[[], list[Any]] = _find("utils._python_dispatch._get_current_dispatch_mode_stack", list)
any_requires_grad: Callable[..., bool] = _find("_C._any_requires_grad", _any_requires_grad)
forward_ad: Any = torch.autograd.forward_ad
"""Has ``_current_level``, negative where there are no forward-mode derivatives."""
if not hasattr(forward_ad, "_current_level"):
    forward_ad = SimpleNamespace(
        _current_level=0, unpack_dual=forward_ad.unpack_dual, make_dual=forward_ad.make_dual
    )


def _refuse_forward(enabled: bool) -> Any:
    raise NotImplementedError("this version of PyTorch has no forward mode inside of an autograd function's own")


set_forward_enabled: Callable[[bool], Any] = _find("autograd.forward_ad._set_fwd_grad_enabled", _refuse_forward)
"""A context in which operations have tangents, also inside of the ``jvp`` of an autograd function."""


def find_apply(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """Returns the function that applies an autograd function where no transform of ``torch.func`` is active."""
    return getattr(super(torch.autograd.Function, function), "apply", None) or function.apply


def _make_guard(*tensors: torch.Tensor) -> Guard:
    return torch._C._dynamo.guards.TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check


def _tells_tensors_apart(make: Callable[..., Guard]) -> bool:
    x = torch.zeros(2, 3)
    others = (x.half(), x.t(), x[:1], torch.zeros(3, 2).t(), torch.zeros(2, 3, requires_grad=True), x.to("meta"))
    try:
        check = make(x, x)
        return check(x, torch.ones(2, 3)) and not any(check(x, other) for other in others)
    except (AttributeError, TypeError, RuntimeError):
        return False


make_tensor_guards: Callable[..., Guard] | None = _make_guard if _tells_tensors_apart(_make_guard) else None
"""The guard of compiled code: made from tensors, it is True for tensors like them, in all but values and
addresses."""
