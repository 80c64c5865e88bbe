"""Other implementations of the short convolution: PyTorch's `conv1d`, causal_conv1d and flash-linear-attention.

Nothing here runs a kernel of ours, so that records of these providers outlast a change to one.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch

from warploom.ops.short_convolution.reference import short_convolution
from warploom.ops.spec import Case, Outputs, Unsupported, compile_at_best, need_cuda

Tensor = torch.Tensor
Provider = Callable[..., Outputs]


def _conv1d(
    x: Tensor,
    weight: Tensor,
    *,
    bias: Tensor | None = None,
    activation: str = "none",
    initial_state: Tensor | None = None,
    return_state: bool = False,
) -> Outputs:
    """Returns outputs as models compute them: `torch.nn.functional.conv1d`, and then an activation."""
    taps, tokens = weight.shape[1], x.shape[1]
    rows = x.mT if initial_state is None else torch.cat((initial_state.to(x.dtype), x.mT), -1)
    padding = taps - 1 if initial_state is None else 0
    dtype = x.dtype
    own = None if bias is None else bias.to(dtype)
    out = torch.nn.functional.conv1d(rows, weight[:, None].to(dtype), own, padding=padding, groups=x.shape[2])
    out = out[..., :tokens].mT
    out = torch.nn.functional.silu(out) if activation == "silu" else out
    if not return_state:
        return out
    return out, torch.nn.functional.pad(rows, (max(taps - 1 - rows.shape[2], 0), 0))[..., 1 - taps :]


def _torch(case: Case) -> Provider:
    return short_convolution if "cu_seqlens" in case else _conv1d


def _causal_conv1d(case: Case) -> Provider:
    """Returns the function of the package causal-conv1d, which takes (B, C, N)."""
    need_cuda("the package")
    if "cu_seqlens" in case or case.get("return_state"):
        raise Unsupported("it takes packed sequences and states in other forms")
    try:
        function = importlib.import_module("causal_conv1d").causal_conv1d_fn
    except (ImportError, AttributeError) as error:
        raise Unsupported("causal-conv1d is not installed") from error

    def run(x: Tensor, weight: Tensor, *, bias: Tensor | None = None, activation: str = "none") -> Tensor:
        out: Tensor = function(x.mT, weight, bias, activation=None if activation == "none" else activation)
        return out.mT

    return run


def _fla(case: Case) -> Provider:
    """Returns the function of flash-linear-attention."""
    need_cuda("the package")
    try:
        function = importlib.import_module("fla.modules.convolution").causal_conv1d
    except (ImportError, AttributeError) as error:
        raise Unsupported("flash-linear-attention is not installed") from error

    def run(x: Tensor, weight: Tensor, **options: Any) -> Outputs:
        activation = options.get("activation", "none")
        out, state = function(
            x, weight, options.get("bias"), initial_state=options.get("initial_state"),
            output_final_state=options.get("return_state", False), cu_seqlens=options.get("cu_seqlens"),
            activation=None if activation == "none" else activation,
        )  # fmt: skip
        return (out, state[..., 1:]) if options.get("return_state") else out

    return run


PROVIDERS: dict[str, Callable[[Case], Provider]] = {
    "torch": _torch,
    "torch_compile": lambda case: compile_at_best(_torch(case)),
    "causal_conv1d": _causal_conv1d,
    "fla": _fla,
}
