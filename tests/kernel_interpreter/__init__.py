"""An interpreter for kernels in Triton and, with what they use of Hopper, in Gluon.

It computes what Triton's own interpreter does, several times faster: values are PyTorch's tensors.

In Gluon a partition of `gl.warp_specialize` of a program is a thread, of which one runs at a time; at each wait the
next is drawn at random. What hardware may do later is done at any time that the program allows: a product when it
is issued or when it is waited for, a copy at once or after others. So a missing wait, a buffer given back too early
or a wrong phase gives wrong numbers, NaN or a deadlock, which is reported. Shared memory begins as NaN, and an
address beyond a tensor's memory raises.

Layouts, registers and warps are not known here: nothing says that a kernel compiles.
"""

from __future__ import annotations

import builtins
import functools
import importlib
import pkgutil
import sys
import types
from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl
from launches import choose_as_on
from triton.experimental.gluon._runtime import GluonJITFunction
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle
from triton.runtime.jit import JITFunction

import warploom.ops
from kernel_interpreter.language import REPLACED, numbers
from kernel_interpreter.machine import Machine
from kernel_interpreter.memory import Described, Pointer
from kernel_interpreter.products import in_float32
from kernel_interpreter.values import number
from warploom.runtime.build import CONSTANT, parameters_of
from warploom.runtime.launch import Launch

TRITONS = Launch._interpret
"""What runs a launch in Triton's own interpreter."""
PROGRAMS = 3
"""Multiprocessors of a GPU: few, so that a program of a persistent kernel has several tiles."""
_HOPPERS = (
    "flash_attention.hopper.launch",
    "delta_attention.hopper.launch",
    "linear_attention.hopper.launch",
    "lrpe.softmax_sequence.hopper.launch",
    "tpa.decode.hopper.launch",
)


def use() -> None:
    """Run kernels on a CPU in this interpreter from now on."""
    Launch._interpret = interpret  # type: ignore[method-assign]
    # By default of the source of all that a kernel calls, which for Triton's interpreter is no kernel.
    GluonJITFunction.__hash__ = object.__hash__  # type: ignore[method-assign]
    _multiply_alike_in_tritons()


def _multiply_alike_in_tritons() -> None:
    """Let products of Triton's interpreter, too, have bits that do not depend on a BLAS."""
    usual = InterpreterBuilder.create_dot

    def create_dot(self: InterpreterBuilder, a: Any, b: Any, d: Any, *options: Any) -> TensorHandle:
        if d.data.dtype != np.float32 or a.data.dtype.kind != "f":
            return usual(self, a, b, d, *options)
        product = in_float32(torch.from_numpy(a.data), torch.from_numpy(b.data)).numpy()
        return TensorHandle(product + d.data, d.dtype.scalar)

    InterpreterBuilder.create_dot = create_dot


def choose_as_on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let calls on a CPU take the kernels for Hopper."""
    for name in _HOPPERS:
        choose_as_on(90, importlib.import_module(f"warploom.ops.{name}"), monkeypatch)
    # All of them: one that is imported later would keep what it finds here.
    for _, name, _ in pkgutil.walk_packages(warploom.ops.__path__, "warploom.ops."):
        module = importlib.import_module(name)
        for each in {"multiprocessors", "programs_at_once"} & set(vars(module)):
            monkeypatch.setattr(module, each, lambda device: PROGRAMS)


def interpret(launch: Launch, given: tuple[Any, ...], seed: int = 0) -> None:
    """Run a launch of a Gluon kernel on tensors of a CPU.

    Args:
        launch: The launch.
        given: What its call brings.
        seed: Of the order in which partitions and copies go on.
    """
    values: dict[str, Any] = {**launch.arguments, **dict(zip(launch.takes, given, strict=True))}
    arguments = {
        name: Described(launch.descriptions[name].of(values[name]))
        if name in launch.descriptions
        else _argument(kind, values[name])
        for name, kind in parameters_of(launch.kernel).items()
    }
    body = functools.partial(_with_translated_globals(launch.kernel.fn), **arguments)
    machine = Machine(launch.programs, seed)
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        (machine.run if isinstance(launch.kernel, GluonJITFunction) else machine.run_in_order)(body)


def _argument(kind: Any, value: Any) -> Any:
    if value is None or kind == CONSTANT:
        return value
    if isinstance(kind, tuple):
        return type(value)(*(_argument(*each) for each in zip(kind, value, strict=True)))
    if isinstance(value, torch.Tensor):
        return Pointer(value)
    return number(value, {"i64": torch.int64, "fp32": torch.float32}.get(kind, torch.int32))


@functools.cache
def _with_translated_globals(function: types.FunctionType) -> types.FunctionType:
    """A function of a kernel, as Python runs it with the names of this interpreter."""
    copied = types.FunctionType(
        function.__code__,
        _translated_globals(function.__module__),
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    copied.__kwdefaults__ = function.__kwdefaults__
    return copied


@functools.cache
def _translated_globals(module: str) -> dict[str, Any]:
    names = {name: _translated(x) for name, x in vars(sys.modules[module]).items() if not name.startswith("__")}
    return {**names, "__builtins__": {**vars(builtins), "range": numbers}}


def _translated(value: Any) -> Any:
    for original, stand_in in REPLACED:
        if value is original:
            return stand_in
    if isinstance(value, tl.constexpr):
        return value.value
    if type(value).__name__ == "ConstexprFunction":
        return value.fn
    if isinstance(value, JITFunction) or hasattr(value, "rewrite"):  # of Gluon; of Triton, in its interpreter
        return lambda *given, **named: _with_translated_globals(value.fn)(*given, **named)
    if isinstance(value, types.ModuleType) and value.__name__.startswith("warploom.ops."):
        return types.SimpleNamespace(**_translated_globals(value.__name__))
    return value
