"""The short cut of the launcher: straight to a compiled variant, and only for calls which that was compiled for."""

from typing import Any

import pytest
import torch

from warploom import lrpe_rotate
from warploom.backend import HAS_TRITON

if not HAS_TRITON:
    pytest.skip("needs Triton", allow_module_level=True)

import triton
import triton.language as tl

from warploom import launch
from warploom.launch import Kernel, Launch
from warploom.ops.lrpe import launchers, launchers_sequence

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


def test_a_plan_is_made_once_for_a_key_and_not_kept_without_one() -> None:
    plans, made = launchers.Plans(), []
    make = lambda: made.append(object()) or made[-1]  # noqa: E731
    assert plans.get("one", make) is plans.get("one", make)
    assert plans.get("other", make) is made[1]
    assert plans.get(None, make) is not plans.get(None, make)
    assert len(made) == 4
    for i in range(2 * plans.LARGEST):
        plans.get(i, make)
    assert len(plans.known) <= plans.LARGEST


@pytest.mark.gpu
@pytest.mark.parametrize("activation", ["silu", "softmax_sequence"])
def test_a_call_like_an_earlier_one_plans_nothing(
    activation: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.randn(2, 11, 3, 8, device=device, requires_grad=True)
    theta = torch.rand(3, 4, device=device, requires_grad=True)
    grad = torch.randn(2, 11, 3, 8, device=device)

    def gradients(offset: int) -> tuple[Tensor, ...]:
        out = lrpe_rotate(x, theta, offset=offset, activation=activation)
        return out.detach(), *torch.autograd.grad(out, (x, theta), grad)

    first, expected = gradients(3), gradients(4)

    def refuse(*arguments: Any) -> None:
        pytest.fail("planned again")

    for name in ("_plan_forward", "_plan_backward"):
        monkeypatch.setattr(launchers, name, refuse)
    monkeypatch.setattr(launchers_sequence._Planner, "plan", refuse)
    for found, wanted in zip((*gradients(3), *gradients(4)), (*first, *expected)):
        assert torch.equal(found, wanted)
