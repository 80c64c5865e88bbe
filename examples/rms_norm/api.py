"""The public function, and what must hold of its arguments."""

from typing import Any

import torch

from warploom.errors import DeviceError, DtypeError, ShapeError, fault
from warploom.runtime.backend import Backend
from warploom.runtime.dispatch import Function, ValidatedCall
from warploom.runtime.sharding import Axes

from . import reference
from .operator import OPERATOR, RmsNormInputs, RmsNormOptions

MAX_FEATURES = 16384
"""Features of a row that the kernels hold on chip."""


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, *, eps: float = 1e-6, backend: Backend = "auto"
) -> torch.Tensor:
    """Root-mean-square normalization: ``x · weight / sqrt(mean(x²) + eps)`` over the features.

    Args:
        x: ``(B, N, D)``; float16, bfloat16 or float32 (float64 in PyTorch), any strides.
        weight: ``(D,)``, contiguous, any float dtype. Differentiable.
        eps: Keeps rows of zeros finite.
        backend: ``auto`` (Triton where it can run, else PyTorch), ``triton`` or ``torch``.

    Returns:
        The shape and dtype of ``x``.

    Raises:
        ShapeError: A size does not fit.
        DtypeError: A tensor is not of a float dtype.
        DeviceError: Tensors lie on different devices.
        BackendError: ``backend="triton"`` cannot run this call.

    Source: Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019, arXiv 1910.07467, equation 4.
    """
    return _function(backend, RmsNormInputs(x, weight), RmsNormOptions(eps))


def _check(name: str, inputs: RmsNormInputs, options: RmsNormOptions, _: int) -> ValidatedCall:
    x, weight = inputs
    if x.dim() != 3:
        raise fault(ShapeError, name, "x", "(B, N, D)", tuple(x.shape))
    if weight.shape != x.shape[-1:] or not weight.is_contiguous():
        raise fault(ShapeError, name, "weight", f"contiguous, ({x.shape[-1]},)", tuple(weight.shape))
    for argument, tensor in (("x", x), ("weight", weight)):
        if not tensor.is_floating_point():
            raise fault(DtypeError, name, argument, "of a float dtype", tensor.dtype)
    if weight.device != x.device:
        raise fault(DeviceError, name, "weight", f"on the device of x, {x.device}", weight.device)
    limit = f"rows of {x.shape[-1]} features, {MAX_FEATURES} at most" if x.shape[-1] > MAX_FEATURES else None
    return ValidatedCall(options, limit)


def _run_reference(inputs: RmsNormInputs, _: int, call: ValidatedCall, backend: str) -> torch.Tensor:
    return reference.rms_norm(inputs.x, inputs.weight, eps=call.options.eps)


def _axes(*_: Any) -> Axes:
    """Batch entries and tokens, each of which is normalized by itself, may be sharded over GPUs."""
    return Axes(("bn.", "."), ("bn.",))


_function = Function("rms_norm", _check, _run_reference, OPERATOR, _axes)
