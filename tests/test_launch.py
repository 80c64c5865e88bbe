"""The short cut of the launcher: straight to a compiled variant, and only for calls which that was compiled for."""

from typing import Any

import pytest
import torch

from warploom.backend import HAS_TRITON

if not HAS_TRITON:
    pytest.skip("needs Triton", allow_module_level=True)

import triton
import triton.language as tl

from warploom import launch
from warploom.launch import Kernel, Launch

Tensor = torch.Tensor
SIZE, BLOCK = 100, 64


@triton.jit(do_not_specialize=["number", "size"])
def add_kernel(x, out, number: tl.int32, size: tl.int32, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, tl.load(x + i, mask=i < size) + number, mask=i < size)


def adding() -> Launch:
    return Launch(Kernel(add_kernel), -(-SIZE // BLOCK), (SIZE,), (BLOCK,))


def tensors(device: torch.device, first: int = 0) -> tuple[Tensor, Tensor]:
    """Where to read and to write; misaligned unless ``first`` is a multiple of four."""
    x, out = torch.randn(2, SIZE + 4, device=device).unbind()
    return x[first : first + SIZE], out[first : first + SIZE]


def test_every_call_uses_its_own_tensors_and_number(device: torch.device) -> None:
    add = adding()
    for number, first in ((1, 0), (2, 0), (3, 1), (-4, 4), (5, 3), (6, 0)):
        x, out = tensors(device, first)
        add((x, out), number)
        assert torch.equal(out, x + number)


@pytest.fixture
def ways(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The way that each launch took."""
    taken: list[str] = []
    call, enqueue = Kernel.__call__, launch._enqueue

    def slowly(kernel: Kernel, *arguments: Any) -> Any:
        before = len(taken)
        compiled = call(kernel, *arguments)
        taken[before:] = ["slow"]
        return compiled

    def directly(*arguments: Any) -> None:
        taken.append("direct")
        enqueue(*arguments)

    monkeypatch.setattr(Kernel, "__call__", slowly)
    monkeypatch.setattr(launch, "_enqueue", directly)
    return taken


@pytest.mark.gpu
def test_aligned_tensors_take_the_short_cut(ways: list[str], device: torch.device) -> None:
    add = adding()
    for first in (1, 0, 0, 3, 4):
        x, out = tensors(device, first)
        add((x, out), 7)
        assert torch.equal(out, x + 7)
    assert ways == ["slow", "slow", "direct", "slow", "direct"]


@pytest.mark.gpu
def test_another_device_takes_the_slow_way(ways: list[str]) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs a second GPU")
    add = adding()
    for index in (0, 0, 1, 1, 0):  # GPU 0 is the current one
        x, out = tensors(torch.device("cuda", index))
        add((x, out), 7)
        assert torch.equal(out, x + 7)
    assert ways == ["slow", "direct", "slow", "slow", "slow"]


class Stub:
    """Stands for a kernel and its compiled variant, where there is no GPU to compile for."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []

    def __call__(self, programs: int, tensors: Any, numbers: Any, constants: Any, *options: int) -> object:
        self.calls.append(("slow", (programs, *numbers, *constants, *options)))
        return self

    def enqueue(self, compiled: Any, device: int, programs: int, addresses: Any, arguments: Any) -> None:
        assert compiled is self
        self.calls.append(("direct", (programs, *addresses, *arguments)))


def test_when_the_short_cut_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    stub, current = Stub(), [-1]  # -1 is the device of a tensor on the CPU
    monkeypatch.setattr(launch, "_enqueue", stub.enqueue)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[0])
    add = Launch(stub, 2, (SIZE,), (BLOCK,), 8, 1)  # type: ignore[arg-type]
    x, out = tensors(torch.device("cpu"))
    slow = ("slow", (2, 5, SIZE, BLOCK, 8, 1))

    add((x[1:], out), 5)  # misaligned: its variant is not kept
    add((x, out), 5)
    assert stub.calls == [slow, slow]
    add((x, out), 6)
    assert stub.calls[2:] == [("direct", (2, x.data_ptr(), out.data_ptr(), 6, SIZE, BLOCK))]
    add((x, None), 6)
    assert stub.calls[3:] == [("direct", (2, x.data_ptr(), None, 6, SIZE, BLOCK))]
    add((x, out[1:]), 5)
    current[0] = 0
    add((x, out), 5)
    assert stub.calls[4:] == [slow, slow]


def test_a_launch_takes_as_many_first_numbers_as_it_was_made_without(monkeypatch: pytest.MonkeyPatch) -> None:
    stub = Stub()
    monkeypatch.setattr(launch, "_enqueue", stub.enqueue)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: -1)
    x, _ = tensors(torch.device("cpu"))
    settled = Launch(stub, 2, (5, SIZE), (BLOCK,))  # type: ignore[arg-type]
    for first in ((), (), (6,), (7, 8)):
        settled((x,), *first)
    assert stub.calls == [
        ("slow", (2, 5, SIZE, BLOCK, 4, 3)),
        *(("direct", (2, x.data_ptr(), *first, 5, SIZE, BLOCK)) for first in ((), (6,), (7, 8))),
    ]
