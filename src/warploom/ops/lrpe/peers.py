"""Other implementations of LRPE: plain PyTorch, compiled and with tables, and other libraries' RoPE.

Nothing here runs a kernel of ours, so that records of these providers outlast a change to one.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch

from warploom.ops.lrpe import reference
from warploom.ops.spec import Case, Unsupported, compile_at_best, need_cuda

Tensor = torch.Tensor
Provider = Callable[..., Tensor]


def plain(kind: str) -> Provider:
    """Returns LRPE as a careful user writes it in PyTorch: float32 angles, computed anew in every call."""

    def encode(x: Tensor, theta: Tensor, activation: str, grid: Any = None, prefix: int = 0) -> Tensor:
        s = reference.coordinates(x, grid, prefix, 0, None, None).float()
        if kind == "cosine":
            return reference.encode_cosine(x, reference.angles(s, theta, x.shape[-1]), activation, None)
        return reference.encode_rotate(x, reference.angles(s, theta, x.shape[-1] // 2), activation, None, False)

    return encode


def _compiled_cache(kind: str, case: Case) -> Provider:
    """Returns the compiled form with cosines and sines from a float32 table, made once, outside the timing."""
    if case.get("theta_gradient"):
        raise Unsupported("a table of cosines has no gradient for theta")

    def encode(x: Tensor, cosine: Tensor, sine: Tensor, activation: str) -> Tensor:
        value = reference.activate(x, activation, None)
        if kind == "cosine":
            return torch.cat((value * cosine, value * sine), dim=-1).to(x.dtype)
        first, second = value.chunk(2, dim=-1)
        return torch.cat((first * cosine - second * sine, first * sine + second * cosine), dim=-1).to(x.dtype)

    compiled = compile_at_best(encode)
    table: list[Tensor] = []

    def cached(x: Tensor, theta: Tensor, activation: str, grid: Any = None, prefix: int = 0) -> Tensor:
        if not table:
            features = x.shape[-1] if kind == "cosine" else x.shape[-1] // 2
            s = reference.coordinates(x, grid, prefix, 0, None, None).double()
            phi = reference.angles(s, theta.double(), features)
            table.extend((phi.cos().float(), phi.sin().float()))
        out: Tensor = compiled(x, *table, activation)
        return out

    return cached


def providers(kind: str) -> dict[str, Callable[[Case], Provider]]:
    """Returns builders by name, for ``cosine`` or ``rotate``."""
    return {
        "torch": lambda case: plain(kind),
        "torch_compile": lambda case: compile_at_best(plain(kind)),
        "torch_compile_cache": functools.partial(_compiled_cache, kind),
    }


# Other libraries' RoPE. Their heads share one row of frequencies, of which they take cosines and sines from tables.


def _table(x: Tensor, theta: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Returns cosines and sines (N, F) for frequencies (F,)."""
    phi = torch.outer(torch.arange(x.shape[1], device=x.device).double(), theta.double())
    return phi.cos().to(dtype), phi.sin().to(dtype)


def _rotary(package: str, module: str, name: str, case: Case) -> Provider:
    """Returns a function of x and of tables in its dtype, which is what the package's own module keeps."""
    need_cuda("the package")
    try:
        function = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise Unsupported(f"{package} is not installed") from error
    table: list[Tensor] = []

    def rotate(x: Tensor, theta: Tensor, activation: str) -> Tensor:
        if not table:
            table.extend(_table(x, theta, x.dtype))
        out: Tensor = function(x, *table)
        return out

    return rotate


def _liger(case: Case) -> Provider:
    """Returns Liger-Kernel's RoPE with float32 tables. It rotates queries and keys at once: halves of the batch.

    And it overwrites them. What it is given are copies of x and of its gradient, made once: the first result is
    theirs, later ones are turned further, in the same time.
    """
    need_cuda("the package")
    if case["batch"] % 2:
        raise Unsupported("turns two tensors of one size at once: the batch must be even")
    try:
        kernels: Any = importlib.import_module("liger_kernel.ops.rope")
    except ImportError as error:
        raise Unsupported("liger_kernel is not installed") from error
    table: list[Tensor] = []
    copies: dict[Any, Tensor] = {}

    def turn(function: Any, x: Tensor) -> Tensor:
        if function not in copies:
            copies[function] = x.clone()
        function(*copies[function].transpose(1, 2).chunk(2), *table)
        return copies[function].detach()

    class Rotation(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return turn(kernels.rope_forward, x)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return turn(kernels.rope_backward, grad)

    def rotate(x: Tensor, theta: Tensor, activation: str) -> Tensor:
        if not table:
            table.extend(half.repeat(1, 2) for half in _table(x, theta, torch.float32))
        out: Tensor = Rotation.apply(x)
        return out

    return rotate


ROPE: dict[str, Callable[[Case], Provider]] = {
    "liger": _liger,
    "fla": functools.partial(_rotary, "flash-linear-attention", "fla.modules.rotary", "rotary_embedding"),
    "flash_attn": functools.partial(_rotary, "flash_attn", "flash_attn.layers.rotary", "apply_rotary_emb"),
}
"""Builders by name, for `lrpe_rotate` with frequencies that all heads share."""
