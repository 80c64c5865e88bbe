"""What tests of several operators know of launches: where they run, which kernels merge parts, for which GPU."""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch

ON_GPU = torch.cuda.is_available()
"""Otherwise kernels run in Triton's interpreter, where a case takes seconds, and fewer of them say as much."""
ON_HOPPER = ON_GPU and torch.cuda.get_device_capability()[0] == 9

MERGING = frozenset({"combine_kernel", "combine_chunks_kernel", "sum_kernel"})
"""Kernels that split KV loops need besides: they merge the parts."""


def large(*case: Any) -> Any:
    """A case that takes too long in an interpreter."""
    return pytest.param(*case, marks=pytest.mark.gpu)


def constants_of(launch: Any) -> dict[str, Any]:
    """Compile-time constants of a launch by name; the fields of tuples by their own."""
    from warploom.runtime.build import CONSTANT, parameters_of

    parameters, constants = parameters_of(launch.kernel), {}
    for name, value in launch.arguments.items():
        if parameters[name] == CONSTANT:
            constants |= value._asdict() if isinstance(value, tuple) else {name: value}
    return constants


def choose_as_on(arch: int, launchers: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let launchers of kernels for one architecture choose as on a GPU of ``arch``, wherever the test runs."""
    monkeypatch.setattr(launchers, "INTERPRETED", False)
    monkeypatch.setattr(launchers, "architecture", lambda device: arch)


def assert_for_hopper_alone(
    launchers: ModuleType, suits: Callable[[], bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call that suits kernels for Hopper suits them on no GPU before or after it."""
    for arch in (80, 89, 90, 100, 120):
        choose_as_on(arch, launchers, monkeypatch)
        assert suits() == (arch == 90), arch


def driver_accepts(description: dict[str, Any]) -> bool:
    """Whether the driver would encode a tensor descriptor at an address of a multiple of 16 bytes.

    These are the requirements of ``cuTensorMapEncodeTiled`` as NVIDIA documents them, on all that it is given: an
    axis of one element is no exception.
    """
    shape, strides, box = description["shape"], description["strides"], description["block_shape"]
    element = description["base"].element_size()
    return (
        1 <= len(shape) <= 5
        and len(shape) == len(strides) == len(box)
        and strides[-1] == 1
        and all(1 <= size <= 2**32 for size in shape)
        and all(stride * element % 16 == 0 and 0 <= stride * element < 2**40 for stride in strides[:-1])
        and all(1 <= size <= 256 for size in box)
        and box[-1] * element % 16 == 0
    )
