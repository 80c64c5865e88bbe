"""The choice of a call's backend: by ``auto``, or by name. A backend chosen by name runs or raises."""

from __future__ import annotations

import functools
import importlib.util
from typing import Literal, get_args

import torch

from warploom.errors import ArgumentError, BackendError, fault
from warploom.runtime.gpu import capability

KERNEL_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
Backend = Literal["auto", "triton", "torch"]
BACKENDS: tuple[str, ...] = get_args(Backend)
HAS_TRITON = importlib.util.find_spec("triton") is not None
"""True if Triton is installed. It is imported when it is first needed."""
OLDEST_CAPABILITY = 80
"""The oldest compute capability, times ten, that the kernels run on: NVIDIA's Ampere."""


def use_triton(function: str, backend: str, x: torch.Tensor, unsupported: str | None = None) -> bool:
    """Returns True if the Triton kernels run this call.

    Args:
        function: Name of the public function, for the error.
        backend: ``auto``, ``triton`` or ``torch``.
        x: The tensor that decides device and dtype.
        unsupported: The reason why the kernels cannot run this call; None if they can.

    Raises:
        ArgumentError: There is no backend of this name.
        BackendError: The backend is ``triton`` and cannot run here. The text says what is missing.
    """
    if backend == "auto":
        runs = x.is_cuda and x.dtype in KERNEL_DTYPES and unsupported is None and HAS_TRITON
        return runs and _examine_device(x.device) is None
    if backend == "torch":
        return False
    if backend != "triton":
        raise fault(ArgumentError, function, "backend", f"one of {', '.join(BACKENDS)}", repr(backend))
    missing = _find_missing(x, unsupported)
    if missing is not None:
        raise BackendError(f"{function}: backend 'triton' cannot run this call: {missing}")
    return True


def _find_missing(x: torch.Tensor, unsupported: str | None) -> str | None:
    if not HAS_TRITON:
        return "Triton is not installed"
    if unsupported is not None:
        return unsupported
    if x.dtype not in KERNEL_DTYPES:
        return (
            f"the kernels take float16, bfloat16 and float32; the tensors are {str(x.dtype).removeprefix('torch.')}"
        )
    if x.is_cuda:
        return _examine_device(x.device)
    if not x.is_meta and not _runs_on_cpu():
        return f"the tensors are on {x.device}, and the kernels need an NVIDIA GPU (or TRITON_INTERPRET=1 on a CPU)"
    return None


def _examine_device(device: torch.device) -> str | None:
    """Returns why the kernels cannot run on a device that PyTorch calls ``cuda``; None if they can."""
    return _examine(device)


# Dynamo takes the result for a constant, as after `torch.compiler.assume_constant_result`; that would import Dynamo
# here. A version that does not know this mark traces the function, to the same result.
_examine_device._dynamo_marked_constant = True  # type: ignore[attr-defined]


@functools.cache
def _examine(device: torch.device) -> str | None:
    if not torch.cuda.is_available():
        return None  # a fake tensor, for a GPU of another machine
    found = capability(device)
    if found >= OLDEST_CAPABILITY:
        return None
    if found == 0:
        return f"the tensors are on {device}, a GPU of AMD, and the kernels need one of NVIDIA"
    has, need = (f"{number // 10}.{number % 10}" for number in (found, OLDEST_CAPABILITY))
    return f"the tensors are on {device} of compute capability {has}, and the kernels need {need} or later"


def _runs_on_cpu() -> bool:
    from warploom.runtime import launch

    return launch.runs_on_cpu()
