"""Names of PyTorch that are not public: what stands for one that is missing does the same."""

import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

from warploom.runtime import pytorch
from warploom.runtime.backend import HAS_TRITON

pytestmark = pytest.mark.stack
Tensor = torch.Tensor


def test_a_name_is_found_or_replaced() -> None:
    assert pytorch._find("cuda.current_device", None) is torch.cuda.current_device
    for name in ("_C._no_such_name", "_no_such_part.of_a_name"):
        assert pytorch._find(name, len) is len


class Mode(TorchDispatchMode):
    """Does nothing."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


def test_what_watches_a_call_is_noticed() -> None:
    def watched() -> tuple[bool, ...]:
        return (
            pytorch.count_dispatch_modes() > 0,
            pytorch.count_function_modes() > 0,
            pytorch.are_transforms_active(),
            pytorch.is_traced_by_jit(),
            pytorch.forward_ad._current_level >= 0,
        )

    seen = [watched()]
    with Mode():
        seen.append(watched())
    with torch.device("cpu"):
        seen.append(watched())

    def look(x: Tensor) -> Tensor:
        seen.append(watched())
        return x

    torch.vmap(look)(torch.zeros(2))
    with warnings.catch_warnings(action="ignore"):  # that tracing is deprecated
        torch.jit.trace(look, torch.zeros(2), check_trace=False)
    with forward_ad.dual_level():
        seen.append(watched())
    assert seen == [tuple(i == kind for kind in range(5)) for i in range(-1, 5)]


def test_whether_a_gradient_is_wanted() -> None:
    x = torch.zeros(2, requires_grad=True)
    for ask in (pytorch.any_requires_grad, pytorch._any_requires_grad):
        assert [ask(1, None, x), ask(x.detach(), "x", 2.0), ask()] == [True, False, False]


def test_views_begin_where_they_are_asked_to(device: torch.device) -> None:
    whole = torch.arange(24.0, device=device)[2:]
    for view in (pytorch.view, pytorch._as_strided):
        assert torch.equal(view(whole, (2, 3), (6, 2), 1), whole[1:].as_strided((2, 3), (6, 2)))


def test_the_device_and_its_stream(device: torch.device) -> None:
    if device.type == "cuda":
        assert pytorch.current_device() == torch.cuda.current_device()
        with torch.cuda.stream(torch.cuda.Stream()):
            assert pytorch.current_stream(pytorch.current_device()) == torch.cuda.current_stream().cuda_stream
        if pytorch.empty_strided_cuda is not None:
            found = pytorch.empty_strided_cuda((2, 3), (1, 2), torch.float16)
            assert (found.shape, found.stride(), found.dtype) == ((2, 3), (1, 2), torch.float16)
    assert not pytorch.is_deterministic()


class Double(torch.autograd.Function):
    """Twice a tensor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 2 * grad


def test_autograd_functions_are_applied() -> None:
    for apply in (pytorch.find_apply(Double), Double.apply):
        x = torch.ones(2, requires_grad=True)
        apply(x).sum().backward()
        assert torch.equal(x.grad, torch.full((2,), 2.0))  # type: ignore[arg-type]


def test_a_guard_that_tells_too_little_apart_is_not_used() -> None:
    class Guard:
        def __init__(self, *tensors: Tensor) -> None:
            self.shapes = [x.shape for x in tensors]

        def check(self, *tensors: Tensor) -> bool:
            return self.shapes == [x.shape for x in tensors]

    def missing(*tensors: Tensor) -> Any:
        raise AttributeError

    assert pytorch._tells_tensors_apart(pytorch._make_guard) is (pytorch.make_tensor_guards is not None)
    assert not pytorch._tells_tensors_apart(lambda *tensors: Guard(*tensors).check)
    assert not pytorch._tells_tensors_apart(lambda x: Guard(x).check)
    assert not pytorch._tells_tensors_apart(missing)


PUBLIC_ALONE = """
import importlib.util
import sys
from types import ModuleType
import torch

class Public(ModuleType):
    def __init__(self, module):
        super().__init__(module.__name__)
        self.module = module

    def __getattr__(self, name):
        if name.startswith("_"):
            raise AttributeError(name)
        found = getattr(self.module, name)
        return Public(found) if isinstance(found, ModuleType) else found

spec = importlib.util.spec_from_file_location("warploom.runtime.pytorch", sys.argv[1])
pytorch = importlib.util.module_from_spec(spec)
sys.modules["torch"] = Public(torch)
spec.loader.exec_module(pytorch)
sys.modules["torch"] = torch
assert pytorch.make_tensor_guards is pytorch.empty_strided_cuda is None
assert pytorch.count_dispatch_modes() == pytorch.count_function_modes() == pytorch.are_transforms_active() == 1
assert pytorch.forward_ad._current_level == 0
sys.modules["warploom.runtime.pytorch"] = pytorch

from warploom import flash_attention, linear_attention, lrpe_rotate, tpa_attention
device = torch.device(sys.argv[2])

def results(function, backend, inputs):
    tensors = [x.detach().clone().requires_grad_() for x in inputs]
    out = function(*tensors, backend=backend)
    return out, *torch.autograd.grad(out.square().sum(), tensors)

x, theta = torch.randn(2, 5, 3, 8, device=device), torch.rand(3, 4, device=device)
ak, bk = torch.randn(2, 5, 3, device=device), torch.randn(2, 5, 8, device=device)
aq, bq = torch.randn(2, 5, 3, 2, device=device), torch.randn(2, 5, 2, 8, device=device)
for _ in range(3):
    for function, inputs in (
        (lrpe_rotate, (x, theta)),
        (flash_attention, (x, x, x)),
        (linear_attention, (x, x, x)),
        (tpa_attention, (aq, ak, ak, bq, bk, bk)),
    ):
        for found, expected in zip(*(results(function, backend, inputs) for backend in ("triton", "torch"))):
            torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)
print("done")
"""


@pytest.mark.seldom(6, 19)
@pytest.mark.skipif(not HAS_TRITON, reason="needs Triton")
def test_operators_run_without_names_that_are_not_public(tmp_path: Path, device: torch.device) -> None:
    program = tmp_path / "public.py"
    program.write_text(PUBLIC_ALONE, encoding="utf-8")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, program, pytorch.__file__, device.type]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.stdout == "done\n", done.stderr
