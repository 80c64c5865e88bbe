"""What tests of several operators know of launches: where they run, which kernels merge parts, for which GPU."""

from collections.abc import Callable
from types import ModuleType

import pytest
import torch

ON_GPU = torch.cuda.is_available()
"""Otherwise kernels run in Triton's interpreter, where a case takes seconds, and fewer of them say as much."""
ON_HOPPER = ON_GPU and torch.cuda.get_device_capability()[0] == 9

MERGING = frozenset({"combine_kernel", "sum_kernel"})
"""Kernels that longer walks need besides, once they are split: they merge the parts."""


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
