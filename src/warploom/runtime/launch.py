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
import itertools
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import triton

from warploom.runtime.entry import Entry, entry_of
from warploom.runtime.gpu import capability
from warploom.runtime.pytorch import current_device as _current_device
from warploom.runtime.pytorch import current_stream as _current_stream
from warploom.runtime.pytorch import empty_strided_cuda as _empty_cuda
from warploom.runtime.pytorch import is_deterministic as _deterministic

INTERPRETED: bool = bool(triton.knobs.runtime.interpret)
"""Whether kernels run in Triton's interpreter (``TRITON_INTERPRET=1``), which takes CPU tensors."""

if INTERPRETED:
    from warploom.runtime.interpreter import in_declared_widths, repair

    repair()

COMPILED_WITH = {"enable_fp_fusion": True}
"""Options of every kernel: products and sums may be one operation, whatever a version of Triton does by default."""
ALIGNMENT = 16  # bytes; what a 128-bit load or store needs of its address
_MOST_BYTES = 2**40  # a stride in a tensor descriptor is shorter
_MOST_SIZE = 2**32  # of an axis in one

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
_recorded_arch, _recorded_multiprocessors = 90, 1


class Dense(NamedTuple):
    """A tensor without gaps that a call allocates."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def like(cls, tensor: torch.Tensor) -> Dense:
        """One laid out like a tensor."""
        return cls(tuple(tensor.shape), tensor.stride(), tensor.dtype)

    @classmethod
    def rows(cls, shape: tuple[int, ...], dtype: torch.dtype) -> Dense:
        """One of at least one axis, the last of which moves fastest, and the one before it next."""
        strides = itertools.accumulate((max(n, 1) for n in reversed(shape[1:])), operator.mul, initial=1)
        return cls(shape, tuple(strides)[::-1], dtype)

    @property
    def order(self) -> list[int]:
        """Its axes from the slowest to the fastest in memory."""
        return sorted(range(len(self.shape)), key=lambda axis: -self.stride[axis])

    def empty(self, near: torch.Tensor) -> torch.Tensor:
        """Allocate it, uninitialised, on the device of another tensor."""
        device = near.get_device()  # negative for a CPU
        if _empty_cuda is None or device < 0 or device != _current_device() or _deterministic():
            return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=near.device)
        return _empty_cuda(self.shape, self.stride, self.dtype)


@dataclass(frozen=True)
class Build:
    """What it takes to compile one variant of a kernel without launching it."""

    function: Any
    signature: dict[str, str]
    constexprs: dict[str, Any]
    attrs: dict[tuple[int, ...], list[list[Any]]] = field(repr=False)
    options: dict[str, int]

    @property
    def variant(self) -> str:
        """What tells it from other builds of its function, the same in every version of Triton."""
        types = [kind.partition("]")[0] for kind in self.signature.values()]  # a descriptor's layout has versions
        return f"{types} {list(self.constexprs.values())} {sorted(self.attrs)} {sorted(self.options.items())}"


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
        early: bool = False,
    ) -> Any:
        """Launch ``programs`` programs on the current stream of the first tensor's device.

        ``early``: while the launch before it on the stream still runs; see `may_start_early`.

        Returns:
            The compiled variant; ``None`` where nothing was compiled (no programs, the interpreter, builds
            being recorded).
        """
        if programs == 0:
            return None
        options = {"num_warps": num_warps, "num_stages": num_stages}
        if early:
            options["launch_pdl"] = True
        if _recorded is not None:
            self._record(_recorded, tensors, numbers, constants, options)
            return None
        first = next((t for t in tensors if t is not None), None)
        if INTERPRETED and not (first is not None and first.is_cuda):
            numbers = in_declared_widths(self.function, len(tensors), numbers)
            self.function[(programs,)](*tensors, *numbers, *constants, **options)
            return None
        device = first.get_device()  # type: ignore[union-attr]
        if device != _current_device():
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
                *tensors, *numbers, *constants, grid=(programs, 1, 1), warmup=False, **COMPILED_WITH, **options
            )
        else:
            entry_of(compiled).enqueue(programs, _current_stream(device), addresses, (*numbers, *constants))
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
    """A launch of which everything is settled but the addresses, and the kernel's first numbers if they vary.

    Made once for a call's shapes, strides, dtypes and options, and kept by the operator for calls like it
    (`warploom.runtime.plans`): what such a call then costs the host is Triton's own entry point, and little else.
    """

    __slots__ = (
        "arguments",
        "constants",
        "device",
        "entry",
        "first",
        "kernel",
        "numbers",
        "options",
        "programs",
    )

    def __init__(
        self,
        kernel: Kernel,
        programs: int,
        numbers: Sequence[int | float],
        constants: tuple[Any, ...],
        num_warps: int = 4,
        num_stages: int = 3,
        early: bool = False,
    ) -> None:
        self.kernel, self.programs, self.numbers, self.constants = kernel, programs, numbers, constants
        self.options = (num_warps, num_stages, early)
        self.arguments = (*numbers, *constants)
        self.entry: Entry | None = None  # of the variant for aligned addresses, and its device
        self.device = -1
        self.first = 0  # which of the tensors is the first that is given

    def __call__(self, tensors: Sequence[torch.Tensor | None], *numbers: int | float) -> None:
        """Launch on tensors of the dtypes that this launch was made for, None where it was made for None.

        ``numbers``: the kernel's first, as many of them as were not given when this launch was made.
        """
        arguments: list[Any] = []
        bits = 0
        for tensor in tensors:
            address = None
            if tensor is not None:
                address = tensor.data_ptr()
                bits |= address
            arguments.append(address)
        aligned = bits % ALIGNMENT == 0
        if aligned and self.entry is not None and _recorded is None:
            device = tensors[self.first].get_device()  # type: ignore[union-attr]
            if device == self.device and device == _current_device():
                arguments += numbers
                self.entry.enqueue(self.programs, _current_stream(device), arguments, self.arguments)
                return
        numbers = (*numbers, *self.numbers)
        compiled = self.kernel(self.programs, tensors, numbers, self.constants, *self.options)
        if aligned and compiled is not None:
            self.first, first = next((i, t) for i, t in enumerate(tensors) if t is not None)
            self.entry, self.device = entry_of(compiled), first.get_device()


def producing(
    launch: Launch, result: Dense, absent: int
) -> Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor]:
    """Allocate and launch in one step: `Launch` and `Dense.empty` without what both look at.

    Args:
        launch: Of a kernel whose pointers are an input, the result, another input, and ``absent`` times None, and
            whose first number varies.
        result: What it writes.
        absent: Pointers that are not given.

    Returns:
        What computes the result from both inputs and the number. They are on the launch's device.
    """
    shape, stride, dtype = result
    none = (None,) * absent

    def produce(x: torch.Tensor, y: torch.Tensor, number: int) -> torch.Tensor:
        entry = launch.entry
        if entry is not None and _empty_cuda is not None and _recorded is None and not _deterministic():
            device = launch.device
            if device == _current_device():
                out = _empty_cuda(shape, stride, dtype)
                first, second, third = x.data_ptr(), out.data_ptr(), y.data_ptr()
                if (first | second | third) % ALIGNMENT == 0:
                    addresses = (first, second, third, *none, number)
                    entry.enqueue(launch.programs, _current_stream(device), addresses, launch.arguments)
                    return out
        out = result.empty(x)
        launch((x, out, y, *none), number)
        return out

    return produce


class Boxes(NamedTuple):
    """How a kernel copies tiles of a tensor: the order of the tensor's axes, and the sizes of a tile along them."""

    order: tuple[int, ...]
    tile: tuple[int, ...]


def descriptor_strides(shape: Sequence[int], strides: Sequence[int], element_size: int) -> tuple[int, ...] | None:
    """Strides, in elements, that a tensor descriptor holds for such a tensor; None if there can be no descriptor.

    The driver refuses a descriptor unless

    - the address is a multiple of 16 bytes, which callers check, since plans serve many addresses;
    - sizes are 1 to 2³²;
    - features, on the last axis, are adjacent: their stride is not encoded;
    - the other strides are multiples of 16 bytes, and less than 2⁴⁰ bytes. Those of axes of size one are encoded
      too. They are never taken, so they may be anything, and one that the driver accepts stands for them here;
    - a box has 1 to 256 elements along each axis, and a multiple of 16 bytes along the last: kernels have such.

    A stride of zero along an axis that has more than one element is refused here.
    """
    if not all(0 < size <= _MOST_SIZE for size in shape):
        return None
    encoded = [stride if size > 1 else ALIGNMENT for size, stride in zip(shape[:-1], strides[:-1])]
    if not all(0 < s * element_size < _MOST_BYTES and s * element_size % ALIGNMENT == 0 for s in encoded):
        return None
    return (*encoded, 1) if shape[-1] == 1 or strides[-1] == 1 else None


def can_be_copied(tensor: torch.Tensor) -> bool:
    """Whether there can be a descriptor of a tensor, apart from its address; see `descriptor_strides`."""
    return descriptor_strides(tensor.shape, tensor.stride(), tensor.element_size()) is not None


class TiledLaunch:
    """A prepared launch of a kernel whose first parameters are tensor descriptors; see `Launch`.

    Written in Gluon, such a kernel copies whole tiles through the tensor memory accelerator of Hopper and later.
    The caller sees to it that there can be descriptors: `can_be_copied`, and addresses of a multiple of 16 bytes.

    Encoding a descriptor takes longer than a launch, and the allocator returns to the same addresses: encodings are
    kept by address. One holds an address, sizes and strides, so whatever lies there now is described by it.
    """

    MOST_ADDRESSES = 256
    """Encodings kept at once for one parameter."""

    __slots__ = ("arguments", "described", "device", "encoded", "entry", "function", "options", "programs")

    def __init__(
        self,
        function: Any,
        programs: int,
        boxes: Sequence[tuple[torch.Tensor, Boxes]],
        numbers: Sequence[int | float],
        constants: tuple[Any, ...],
        num_warps: int = 4,
        early: bool = False,
        registers: int | None = None,
    ) -> None:
        self.function, self.programs = function, programs
        self.options = {"num_warps": num_warps, **({"launch_pdl": True} if early else {})}
        if registers is not None:
            self.options["maxnreg"] = registers
        self.described = [_description(like, box) for like, box in boxes]
        self.arguments = (*numbers, *constants)
        self.entry: Entry | None = None  # of the last device
        self.device = -1
        self.encoded: list[dict[int, list[Any]]] = [{} for _ in boxes]  # of each parameter, by address

    def __call__(self, tensors: Sequence[torch.Tensor | None], *numbers: int | float) -> None:
        """Launch on tensors like those that this launch was made for, the described ones first.

        The others may be None, always the same ones; the kernel must not be specialised on their alignment unless
        it is always the same. ``numbers``: the kernel's first, as many of them as were not given when this launch
        was made.
        """
        if _recorded is not None:
            self._record(_recorded, tensors[len(self.encoded) :], numbers)
            return
        device, entry = tensors[0].get_device(), self.entry  # type: ignore[union-attr]
        if entry is None or device != self.device or device != _current_device():
            with torch.cuda.device(device):
                self._start(device, tensors, numbers)
            return
        arguments: list[Any] = []
        for index, (known, tensor) in enumerate(zip(self.encoded, tensors)):
            encoded = known.get(tensor.data_ptr())  # type: ignore[union-attr]
            arguments += self._encode(entry, index, tensor) if encoded is None else encoded
        for pointer in tensors[len(self.encoded) :]:
            arguments.append(None if pointer is None else pointer.data_ptr())
        arguments += numbers
        entry.enqueue(self.programs, _current_stream(device), arguments, self.arguments)

    def _start(self, device: int, tensors: Sequence[torch.Tensor | None], numbers: tuple[int | float, ...]) -> None:
        """The first launch on a device, which compiles the kernel if that has not been done."""
        descriptors = [self._descriptor(i, tensor) for i, tensor in zip(range(len(self.encoded)), tensors)]
        compiled = self.function.run(
            *descriptors, *tensors[len(descriptors) :], *numbers, *self.arguments,
            grid=(self.programs, 1, 1), warmup=False, **COMPILED_WITH, **self.options,
        )  # fmt: skip
        self.entry, self.device = entry_of(compiled, descriptors), device

    def _encode(self, entry: Entry, index: int, tensor: Any) -> list[Any]:
        """What stands for a described tensor among the arguments."""
        descriptor = self._descriptor(index, tensor)
        if entry.encode is None:
            return [descriptor]
        known = self.encoded[index]
        if len(known) >= self.MOST_ADDRESSES:
            known.clear()
        known[tensor.data_ptr()] = encoded = entry.encode[index](descriptor)
        return encoded

    def _descriptor(self, index: int, tensor: torch.Tensor | None) -> Any:
        from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

        descriptor = object.__new__(TensorDescriptor)  # its constructor would check again what the plan settled
        descriptor.__dict__.update(self.described[index], base=tensor)
        return descriptor

    def _record(
        self,
        builds: dict[tuple[Any, ...], Build],
        pointers: Sequence[torch.Tensor | None],
        numbers: tuple[int | float, ...],
    ) -> None:
        names = iter(self.function.arg_names)
        parameters = {p.name: p for p in self.function.params}
        constexprs: dict[str, Any] = {}
        signature: dict[str, str] = {}
        for described in self.described:
            base, tile, layout = described["base"], described["block_shape"], described["layout"]
            signature[next(names)] = f"tensordesc<{_TYPE_NAMES[base.dtype]}{tile},{layout!r}>"
        attrs: dict[tuple[int, ...], list[list[Any]]] = {}
        for pointer in pointers:
            name = next(names)
            if pointer is None:
                constexprs[name] = None
                signature[name] = "constexpr"
                continue
            if not parameters[name].do_not_specialize_on_alignment:
                attrs[(len(signature),)] = [["tt.divisibility", ALIGNMENT]]
            signature[name] = "*" + _TYPE_NAMES[pointer.dtype]
        for name, value in zip(names, (*numbers, *self.arguments), strict=True):
            if parameters[name].is_constexpr:
                constexprs[name] = value
                signature[name] = "constexpr"
            else:
                kind = "fp32" if isinstance(value, float) else "i32"
                signature[name] = parameters[name].annotation_type or kind
        key = (self.function, tuple(signature.items()), tuple(constexprs.items()))
        builds.setdefault(key, Build(self.function, signature, constexprs, attrs, self.options))


def _description(like: torch.Tensor, box: Boxes) -> dict[str, Any]:
    """What a tensor descriptor says of every tensor like this one."""
    import triton.language as tl
    from triton.experimental.gluon.language import NVMMASharedLayout

    shape = [like.shape[axis] for axis in box.order]
    strides = descriptor_strides(shape, [like.stride(axis) for axis in box.order], like.element_size())
    if strides is None:
        raise ValueError(f"there can be no descriptor of a tensor {tuple(like.shape)} of strides {like.stride()}")
    tile = list(box.tile)
    layout = NVMMASharedLayout.get_default_for(tile, tl.dtype(_TYPE_NAMES[like.dtype]))
    base = like.new_empty(0, device="meta")
    return {
        "base": base, "shape": shape, "strides": list(strides), "block_shape": tile, "layout": layout,
        "padding": "zero",
    }  # fmt: skip


@contextlib.contextmanager
def recording(arch: int = 90, multiprocessors: int = 1) -> Iterator[dict[tuple[Any, ...], Build]]:
    """Collect what would be compiled for a GPU instead of launching it: no GPU needed, nothing is written.

    Args:
        arch: The GPU's compute capability, times ten.
        multiprocessors: How many it has, which some plans depend on.
    """
    global _recorded, _recorded_arch, _recorded_multiprocessors
    if INTERPRETED:
        raise RuntimeError("recording builds needs compiled kernels: unset TRITON_INTERPRET")
    previous = _recorded, _recorded_arch, _recorded_multiprocessors
    _recorded, _recorded_arch, _recorded_multiprocessors = {}, arch, multiprocessors
    try:
        yield _recorded
    finally:
        _recorded, _recorded_arch, _recorded_multiprocessors = previous


def is_recording() -> bool:
    """Whether launches are recorded now, and not made."""
    return _recorded is not None


def runs_on_cpu() -> bool:
    """Whether kernels accept CPU tensors now: in the interpreter, or while builds are being recorded."""
    return INTERPRETED or _recorded is not None


def multiprocessors(device: torch.device) -> int:
    """Streaming multiprocessors of a GPU; for a CPU those of `recording`. A `ValueError` for "meta"."""
    return _multiprocessors(device) if _is_gpu(device) else _recorded_multiprocessors


def may_start_early(device: torch.device) -> bool:
    """Whether a kernel may be launched ``early``: put in place while the launch before it on the stream still runs.

    Such a kernel waits for that launch itself (``gdc_wait``) before it touches memory, which is cheaper than the
    pause between two launches. Hopper and later (programmatic dependent launch).
    """
    return architecture(device) >= 90 and not INTERPRETED


def architecture(device: torch.device) -> int:
    """Compute capability of a GPU, times ten (0 for one of AMD); for a CPU that of the builds being recorded.

    Raises:
        ValueError: for the device "meta". Tensors without memory stand for others in plans, and what runs on which
            GPU must be decided by the others.
    """
    return capability(device) if _is_gpu(device) else _recorded_arch


def _is_gpu(device: torch.device) -> bool:
    if device.type == "meta":
        raise ValueError("device: expected that of a tensor with memory, got meta")
    return device.type == "cuda"


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
