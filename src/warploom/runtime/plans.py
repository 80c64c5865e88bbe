"""Calls that come again: what was found out about one call serves every call like it.

A call is like another if everything that its checks and its launchers look at is the same: shapes, strides, dtypes
and devices of its tensors, and its options. These make up its key. What a tensor holds and where it lies in memory
are no part of it, nor is a number that kernels take as it comes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import torch

from warploom.runtime.pytorch import make_tensor_guards as _guard

T = TypeVar("T")


class Plans:
    """What was worked out once for each key.

    There are two levels of them. The first has a key for everything about a public call that decides whether it is
    right and runs on the kernels; an entry exists only for calls that passed the checks. Such an entry has the
    second level, plans of the call's launches: forward, and backward for each layout of gradients.

    A key takes more time than all of a launch besides. The calls of the last few kinds are known without one, by
    `make_guard`.
    """

    LARGEST = 4096
    """Keys at once: a server sees many lengths, and none of them for ever."""
    MOST_RECENT = 4
    """Kinds of call that are compared before a key is made: of queries and keys, with and without gradients."""

    __slots__ = ("known", "recent")

    def __init__(self) -> None:
        self.known: dict[Hashable, Any] = {}
        self.recent: tuple[tuple[Any, ...], ...] = ()

    def forget(self) -> None:
        """Know nothing, as in a new process."""
        self.known, self.recent = {}, ()

    def remember(self, call: tuple[Any, ...]) -> None:
        """Keep what an operator compares a call with in ``recent``, in the place of the oldest there."""
        self.recent = (call, *self.recent[: self.MOST_RECENT - 1])

    def find(self, key: Hashable) -> Any:
        """What is kept for a key; None if there is nothing, or if an argument in it cannot be hashed."""
        try:
            return self.known.get(key)
        except TypeError:
            return None

    def get(self, key: Hashable, make: Callable[..., T], *arguments: Any) -> T:
        """What is kept for a key, made now from ``arguments`` if there is nothing."""
        plan: T | None = self.known.get(key)
        return self.keep(key, make(*arguments)) if plan is None else plan

    def keep(self, key: Hashable, plan: T) -> T:
        """Keep something for a key, and return it."""
        if len(self.known) >= self.LARGEST:
            self.known.clear()
        self.known[key] = plan
        return plan


ALL_PLANS: list[Plans] = []
"""The plans of every function and operator, to forget them at once."""


def make_guard(*tensors: torch.Tensor) -> Callable[..., bool] | None:
    """What says, by a function in C, whether tensors are like these in all but contents and address.

    It compares types, shapes, strides, dtypes, devices, whether they require gradients, and the dispatcher's keys
    with those of the thread: a mode, transform or subclass is noticed. It does not notice a mode for functions of
    ``torch``, a forward-mode derivative, nor, in some versions of PyTorch, whether gradients are wanted now.
    ``None`` where PyTorch has no such thing, or does not know these tensors again.
    """
    if _guard is None:
        return None
    check = _guard(*tensors)
    if not check(*tensors):  # one that comes twice it never knows again
        return None

    def like(*tensors: torch.Tensor) -> bool:
        try:
            for tensor in tensors:
                if tensor.is_nested:  # it has no sizes, and the process would end at the question
                    return False
        except AttributeError:  # no tensor
            return False
        return check(*tensors)

    return like


def tensor_key(tensor: object) -> Hashable:
    """What a key says of an argument that should be a tensor or None: all but its contents and address."""
    if tensor is None:
        return None
    if not isinstance(tensor, torch.Tensor):
        return type(tensor).__name__
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device


def keeps_plans_for(tensor: torch.Tensor) -> bool:
    """Whether plans for a tensor's device are kept: for GPUs, and for CPUs in Triton's interpreter.

    Elsewhere kernels are only recorded for a build, for one architecture after the other. Triton is not imported to
    find out: if it has not been by now, there are no plans.
    """
    if tensor.is_cuda:
        return True
    launch = sys.modules.get(f"{__package__}.launch")
    return launch is not None and launch.INTERPRETED
