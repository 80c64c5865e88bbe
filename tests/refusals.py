"""Calls that a public function refuses, or leaves to PyTorch, before any kernel runs."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch

from warploom import BackendError, WarploomError
from warploom.runtime.backend import HAS_TRITON

Tensor = torch.Tensor
Change = dict[str, Any]
Wrong = tuple[Change, type[WarploomError], str, str, str]
"""What is changed in a good call, the error, its argument, and words of what was expected and what came."""


def ones(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Tensor:
    return torch.ones(shape, dtype=dtype, device=device)


def describe(change: Change) -> str:
    return ",".join(
        f"{name}={value.dtype}{[*value.shape]}" if isinstance(value, Tensor) else f"{name}={value!r}"[:40]
        for name, value in change.items()
    ).replace("torch.", "")


def each(rows: tuple[Wrong, ...]) -> pytest.MarkDecorator:
    """A test of every row, which it gets as ``wrong``."""
    return pytest.mark.parametrize("wrong", rows, ids=[describe(change) for change, *_ in rows])


@contextmanager
def no_kernels() -> Iterator[None]:
    """In which a launch is a failure."""
    if not HAS_TRITON:
        yield
        return
    with mock.patch("warploom.runtime.launch.Launch.__call__", side_effect=AssertionError("a kernel was launched")):
        yield


def assert_refused(function: Callable[..., Any], good: Change, wrong: Wrong, device: torch.device) -> None:
    """The error says which argument, what was expected and what came; no input is changed."""
    change, error, argument, expected, got = wrong
    call = {
        name: value.to(device) if isinstance(value, Tensor) and not value.is_meta else value
        for name, value in {**good, **change}.items()
    }
    tensors = {name: value for name, value in call.items() if isinstance(value, Tensor) and not value.is_meta}
    before = {name: (value.detach().clone(), value._version) for name, value in tensors.items()}
    with no_kernels(), pytest.raises(error) as caught:
        function(**call)
    assert type(caught.value) is error
    assert isinstance(caught.value, ValueError)
    wording = rf"{function.__name__}: {argument} must be .*{re.escape(expected)}.*; got .*{re.escape(got)}"
    assert re.match(wording, str(caught.value), re.DOTALL), str(caught.value)
    for name, value in tensors.items():
        assert torch.equal(value, before[name][0])
        assert value._version == before[name][1]


def assert_left_to_pytorch(function: Callable[..., Any], call: Change, reason: str) -> None:
    """What the kernels cannot do is refused where they are asked for by name, and done by PyTorch otherwise."""
    refusal = rf"^{function.__name__}: backend 'triton' cannot run this call: .*{reason}"
    with no_kernels():
        with pytest.raises(BackendError, match=refusal):
            function(**call, backend="triton")
        assert torch.equal(function(**call), function(**call, backend="torch"))
