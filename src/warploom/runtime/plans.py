"""Plans of calls: the result of validating and planning a call, kept for calls like it.

Two calls are alike if their tensors have the same shapes, strides, dtypes and devices, and their options are equal.
These make up the key of a call. Values and addresses of tensors are not in it, nor is the operator's number.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import torch

from warploom.runtime.pytorch import make_tensor_guards as _guard

T = TypeVar("T")


class Plans:
    """A cache of plans by key.

    There are two levels. A public function keeps a prepared call for each kind of call that was validated. Each
    prepared call keeps the plans of its launches: of the forward, and of the backward for each layout of gradients.

    To make a key takes longer than the rest of a launch. So a function compares a call with the last few kinds
    first, by a guard (`make_guard`).
    """

    LARGEST = 4096
    """The most keys at once. A server sees many lengths, and few of them again."""
    MOST_RECENT = 4
    """The number of kinds of call with a guard: for queries and for keys, with and without gradients."""

    __slots__ = ("known", "recent")

    def __init__(self) -> None:
        self.known: dict[Hashable, Any] = {}
        self.recent: tuple[tuple[Any, ...], ...] = ()

    def forget(self) -> None:
        """Forget all plans, as in a new process."""
        self.known, self.recent = {}, ()

    def remember(self, call: tuple[Any, ...]) -> None:
        """Put a call with its guard first in ``recent``, and drop the oldest."""
        self.recent = (call, *self.recent[: self.MOST_RECENT - 1])

    def find(self, key: Hashable) -> Any:
        """Returns the plan for a key; None if there is none, or if the key cannot be hashed."""
        try:
            return self.known.get(key)
        except TypeError:
            return None

    def get(self, key: Hashable, make: Callable[..., T], *arguments: Any) -> T:
        """Returns the plan for a key, made now from ``arguments`` if there is none."""
        plan: T | None = self.known.get(key)
        return self.keep(key, make(*arguments)) if plan is None else plan

    def keep(self, key: Hashable, plan: T) -> T:
        """Keep a plan for a key, and return it."""
        if len(self.known) >= self.LARGEST:
            self.known.clear()
        self.known[key] = plan
        return plan


ALL_PLANS: list[Plans] = []
"""The plans of every function and operator, to forget them at once."""


def make_guard(*tensors: torch.Tensor) -> Callable[..., bool] | None:
    """Returns a function in C that is True for tensors like these, in all but values and addresses.

    It compares types, shapes, strides, dtypes, devices, ``requires_grad``, and the dispatcher's keys of tensors and
    thread, and so notices a dispatch mode, transform or subclass. It does not notice a function mode, a
    forward-mode derivative, nor, in some versions of PyTorch, ``torch.no_grad``. A tensor that comes several times
    has to come in the same places. None where PyTorch has no such function, or where it does not recognise these
    tensors themselves.
    """
    if _guard is None:
        return None
    places = [next(i for i, first in enumerate(tensors) if first is tensor) for tensor in tensors]
    distinct = sorted({*places})
    check = _guard(*(tensors[i] for i in distinct))  # which never recognises a tensor that comes twice
    if not check(*(tensors[i] for i in distinct)):
        return None

    def like(*tensors: torch.Tensor) -> bool:
        try:
            for tensor in tensors:
                if tensor.is_nested:  # it has no sizes, and the process would end at the question
                    return False
        except AttributeError:  # no tensor
            return False
        return check(*tensors)

    if len(distinct) == len(tensors):
        return like
    again = [(i, place) for i, place in enumerate(places) if place != i]

    def like_again(*tensors: torch.Tensor) -> bool:
        for i, place in again:
            if tensors[i] is not tensors[place]:
                return False
        return like(*[tensors[i] for i in distinct])

    return like_again


def tensor_key(tensor: object) -> Hashable:
    """Returns the part of a key for an argument that should be a tensor or None."""
    if tensor is None:
        return None
    if not isinstance(tensor, torch.Tensor):
        return type(tensor).__name__
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device


def keeps_plans_for(tensor: torch.Tensor) -> bool:
    """Returns True if plans are kept for a tensor's device: a GPU, or a CPU in Triton's interpreter.

    On a CPU without the interpreter kernels are only recorded, for one architecture after the other. This imports
    no Triton: before that is imported there are no plans.
    """
    if tensor.is_cuda:
        return True
    launch = sys.modules.get(f"{__package__}.launch")
    return launch is not None and launch.INTERPRETED
