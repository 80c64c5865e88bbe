"""From a Triton kernel and its arguments to the GPU.

Triton's own launcher re-examines every argument on every call, which costs more than a small kernel runs.
`Kernel` keeps what a compiled kernel really depends on, the dtype and alignment of each pointer and the
compile-time constants, as the key of a dictionary, and calls the compiled kernel directly. Numbers are
never part of the key: kernels declare their type and exclude them from specialisation, so a new length,
offset, stride, scale or batch compiles nothing. (A stride's divisibility, which vector loads need, is a
constant: strides travel divided by it.)
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import triton
from triton.runtime import driver

INTERPRETED: bool = bool(triton.knobs.runtime.interpret)
"""Whether kernels run in Triton's interpreter (``TRITON_INTERPRET=1``), which takes CPU tensors."""

ALIGNMENT = 16  # bytes; what a 128-bit load or store needs of its address

_TYPE_NAMES = {
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.int16: "i16",
    torch.int32: "i32",
    torch.int64: "i64",
}

_recorded: dict[tuple[Any, ...], Build] | None = None
_recorded_arch = 90


@dataclass(frozen=True)
class Build:
    """What it takes to compile one variant of a kernel without launching it."""

    function: Any
    signature: dict[str, str]
    constexprs: dict[str, Any]
    attrs: dict[tuple[int, ...], list[list[Any]]] = field(repr=False)
    options: dict[str, int]


class Kernel:
    """A Triton kernel with a one-dimensional grid, and the variants of it compiled so far.

    The kernel's parameters come in this order: pointers (``None`` allowed), numbers (annotated with their type
    and excluded from specialisation), compile-time constants.
    """

    def __init__(self, function: Any) -> None:
        self.function = function
        self.compiled: dict[tuple[Any, ...], Any] = {}

    def __call__(
        self,
        programs: int,
        tensors: Sequence[torch.Tensor | None],
        numbers: Sequence[int | float],
        constants: tuple[Any, ...],
        num_warps: int = 4,
        num_stages: int = 3,
    ) -> Any:
        """Launch ``programs`` programs on the current stream of the first tensor's device.

        Returns:
            The compiled variant; ``None`` where nothing was compiled (no programs, the interpreter, builds
            being recorded).
        """
        if programs == 0:
            return None
        options = {"num_warps": num_warps, "num_stages": num_stages}
        if _recorded is not None:
            self._record(_recorded, tensors, numbers, constants, options)
            return None
        first = next((t for t in tensors if t is not None), None)
        if INTERPRETED and not (first is not None and first.is_cuda):
            self.function[(programs,)](*tensors, *numbers, *constants, **options)
            return None
        device = first.get_device()  # type: ignore[union-attr]
        if device != torch.cuda.current_device():
            with torch.cuda.device(device):
                return self._launch(device, programs, tensors, numbers, constants, options)
        return self._launch(device, programs, tensors, numbers, constants, options)

    def _launch(
        self,
        device: int,
        programs: int,
        tensors: Sequence[torch.Tensor | None],
        numbers: Sequence[int | float],
        constants: tuple[Any, ...],
        options: dict[str, int],
    ) -> Any:
        addresses = [None if t is None else t.data_ptr() for t in tensors]
        kinds = [None if t is None else (t.dtype, t.data_ptr() % ALIGNMENT == 0) for t in tensors]
        key = (device, *options.values(), constants, *kinds)
        compiled = self.compiled.get(key)
        if compiled is None:
            compiled = self.compiled[key] = self.function.run(
                *tensors, *numbers, *constants, grid=(programs, 1, 1), warmup=False, **options
            )
        else:
            _enqueue(compiled, device, programs, addresses, (*numbers, *constants))
        return compiled

    def _record(
        self,
        builds: dict[tuple[Any, ...], Build],
        tensors: Sequence[torch.Tensor | None],
        numbers: Sequence[int | float],
        constants: tuple[Any, ...],
        options: dict[str, int],
    ) -> None:
        names = self.function.arg_names
        types = {p.name: p.annotation_type for p in self.function.params}
        signature: dict[str, str] = {}
        constexprs: dict[str, Any] = {}
        attrs: dict[tuple[int, ...], list[list[Any]]] = {}
        for index, (name, value) in enumerate(zip(names, (*tensors, *numbers, *constants), strict=True)):
            if isinstance(value, torch.Tensor):
                signature[name] = "*" + _TYPE_NAMES[value.dtype]
                if value.data_ptr() % ALIGNMENT == 0:
                    attrs[(index,)] = [["tt.divisibility", ALIGNMENT]]
            elif value is not None and types[name]:
                signature[name] = types[name]
            else:
                signature[name] = "constexpr"
                constexprs[name] = value
        key = (self.function, tuple(signature.items()), constants, tuple(attrs), *options.values())
        builds.setdefault(key, Build(self.function, signature, constexprs, attrs, options))


class Launch:
    """A launch of which everything is settled but the addresses and the first number.

    Made once for a call's shapes, strides, dtypes and options, and kept by the operator for calls like it: what
    such a call then costs the host is Triton's own entry point, and little else.
    """

    __slots__ = ("arguments", "compiled", "constants", "device", "kernel", "numbers", "options", "programs")

    def __init__(
        self,
        kernel: Kernel,
        programs: int,
        numbers: Sequence[int | float],
        constants: tuple[Any, ...],
        num_warps: int = 4,
        num_stages: int = 3,
    ) -> None:
        self.kernel, self.programs, self.numbers, self.constants = kernel, programs, numbers, constants
        self.options = (num_warps, num_stages)
        self.arguments = (*numbers, *constants)
        self.compiled: Any = None  # the variant for aligned addresses, and its device
        self.device = -1

    def __call__(self, tensors: Sequence[torch.Tensor | None], number: int | float) -> None:
        """Launch on tensors of the dtypes that this launch was made for; ``number`` is the kernel's first."""
        addresses: list[int | None] = []
        bits = 0
        for tensor in tensors:
            address = None if tensor is None else tensor.data_ptr()
            addresses.append(address)
            bits |= address or 0
        aligned = bits % ALIGNMENT == 0
        if aligned and self.compiled is not None and _recorded is None:
            device = tensors[0].get_device()  # type: ignore[union-attr]
            if device == self.device and device == torch.cuda.current_device():
                _enqueue(self.compiled, device, self.programs, addresses, (number, *self.arguments))
                return
        numbers = (number, *self.numbers)
        compiled = self.kernel(self.programs, tensors, numbers, self.constants, *self.options)
        if aligned and compiled is not None:
            self.compiled, self.device = compiled, tensors[0].get_device()  # type: ignore[union-attr]


def _enqueue(
    compiled: Any, device: int, programs: int, addresses: Sequence[int | None], arguments: Sequence[Any]
) -> None:
    """Put a compiled variant on the current stream of ``device``, which must be the current one."""
    compiled.run(
        programs,
        1,
        1,
        driver.active.get_current_stream(device),
        compiled.function,
        compiled.packed_metadata,
        None,  # launch metadata and hooks: for Triton's profiler, which reads them from its own launcher
        None,
        None,
        *addresses,
        *arguments,
    )


@contextlib.contextmanager
def recording(arch: int = 90) -> Iterator[dict[tuple[Any, ...], Build]]:
    """Collect what would be compiled for ``arch`` instead of launching it: no GPU needed, nothing is written."""
    global _recorded, _recorded_arch
    if INTERPRETED:
        raise RuntimeError("recording builds needs compiled kernels: unset TRITON_INTERPRET")
    previous = _recorded, _recorded_arch
    _recorded, _recorded_arch = {}, arch
    try:
        yield _recorded
    finally:
        _recorded, _recorded_arch = previous


def runs_on_cpu() -> bool:
    """Whether kernels accept CPU tensors now: in the interpreter, or while builds are being recorded."""
    return INTERPRETED or _recorded is not None


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Streaming multiprocessors of a GPU; 1 for any other device."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def architecture(device: torch.device) -> int:
    """Compute capability of a GPU, times ten; elsewhere that of the builds being recorded."""
    return _capability(device) if device.type == "cuda" else _recorded_arch


@functools.cache
def _capability(device: torch.device) -> int:
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor
