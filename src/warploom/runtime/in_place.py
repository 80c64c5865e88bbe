"""Checks of calls that write some of the tensors that they are given."""

from __future__ import annotations

import torch

from warploom.errors import ArgumentError, fault
from warploom.runtime.pytorch import are_transforms_active, is_wrapped
from warploom.runtime.sharding import is_sharded


def check_takes_part(name: str, argument: str, tensor: torch.Tensor) -> None:
    """Check that a tensor can be an argument of a call that writes: no gradient is wanted, and no one else sees it.

    Raises:
        ArgumentError: Gradients are recorded, it is a DTensor, or one of a transform of `torch.func`.
    """
    if torch.is_grad_enabled() and tensor.requires_grad:
        expected = "without requires_grad (or the call under torch.no_grad())"
        raise fault(ArgumentError, name, argument, expected, "requires_grad=True")
    if is_sharded((tensor,)):
        raise fault(ArgumentError, name, argument, "a plain tensor: of a DTensor its local part", "a DTensor")
    if not torch.compiler.is_compiling() and are_transforms_active() and is_wrapped(tensor):
        expected = "outside of transforms of torch.func, which cannot write a tensor"
        raise fault(ArgumentError, name, argument, expected, "a tensor of one")


def check_memory(name: str, argument: str, tensor: torch.Tensor) -> None:
    """Check that a tensor that is written has memory for every element.

    Raises:
        ArgumentError: It is expanded.
    """
    if any(size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride())):
        raise fault(ArgumentError, name, argument, "with memory for every element", "an expanded tensor")


def check_address(name: str, argument: str, tensor: torch.Tensor, **others: torch.Tensor) -> None:
    """Check that a tensor that is written does not begin where another begins, which is read.

    Raises:
        ArgumentError: It does.
    """
    for other, read in others.items():
        if tensor.numel() and tensor.data_ptr() == read.data_ptr():
            raise fault(
                ArgumentError, name, argument, f"memory of its own, not that of {other}", "the same address"
            )
