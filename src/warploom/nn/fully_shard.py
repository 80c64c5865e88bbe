"""Learnable frequencies under `torch.distributed.fsdp.fully_shard`, where they stay float32.

FSDP casts all parameters that it gathers together, and does not gather parameters of two dtypes. Frequencies would
be rounded, or a model in bfloat16 would not run. So FSDP is given a placeholder without a gradient, which it may
cast. The real parameter, which optimizers and state dicts see, is sharded as FSDP shards it. Each forward gathers
it in float32, and its gradient is averaged over the ranks, as FSDP averages those of other parameters.
"""

from __future__ import annotations

import sys
from typing import Any, cast

import torch
from torch import nn

Tensor = torch.Tensor


def is_called_by_fsdp() -> bool:
    """Returns True if FSDP calls the caller of this function."""
    return str(sys._getframe(2).f_globals.get("__name__")).startswith("torch.distributed.fsdp")


class ShardedFrequencies(nn.Module):
    """A module of frequencies that FSDP has sharded; see the file."""

    def __getattr__(self, name: str) -> Any:
        if name == "theta" and is_called_by_fsdp():
            return self.__dict__["_stand_in"]
        return super().__getattr__(name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "theta" and is_called_by_fsdp():
            self.__dict__["_stand_in"] = value
        else:
            super().__setattr__(name, value)

    def _apply(self, *arguments: Any, **keywords: Any) -> Any:
        result = super()._apply(*arguments, **keywords)
        self.__dict__["_stand_in"] = nn.Parameter(self._parameters["theta"].detach(), requires_grad=False)  # type: ignore[union-attr]
        return result


_classes: dict[type, type] = {}


def shard(module: nn.Module, theta: nn.Parameter) -> None:
    """Make a parameter that FSDP has sharded the module's frequencies, and give FSDP a placeholder for it."""
    kind = type(module)
    if kind not in _classes:
        _classes[kind] = type(kind.__name__, (ShardedFrequencies, kind), {})
    module.__class__ = _classes[kind]
    module._parameters["theta"] = nn.Parameter(theta.detach(), requires_grad=theta.requires_grad)
    module.__dict__["_stand_in"] = theta.requires_grad_(False)


def gather(theta: Tensor) -> Tensor:
    """Returns a parameter of `shard` whole on every rank."""
    from torch.distributed.tensor import Partial

    sharded: Any = theta
    mesh = sharded.device_mesh
    whole = cast(Tensor, sharded.full_tensor(grad_placements=[Partial()] * mesh.ndim))
    if whole.requires_grad:
        whole.register_hook(lambda gradient: gradient / mesh.size())
    return whole


def shard_like(values: Tensor, theta: Tensor) -> Tensor:
    """Returns values that every rank has whole, sharded like a parameter of `shard`."""
    from torch.distributed.tensor import DTensor, Replicate

    sharded: Any = theta
    mesh = sharded.device_mesh
    whole = DTensor.from_local(values.contiguous(), mesh, [Replicate()] * mesh.ndim, run_check=False)
    return whole.redistribute(mesh, sharded.placements)
