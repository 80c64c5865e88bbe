"""From a Triton kernel and named arguments to the GPU.

Triton's own launcher re-examines every argument on every call, which costs more than a small kernel runs. `Launch`
settles once, when a call is planned, where each argument belongs; a later call brings the addresses of its tensors,
and a number or two. A compiled kernel depends on the dtype of each pointer, on whether all are aligned (those of
integers, and the others), and on the compile-time constants. Numbers are no part of it: kernels declare their type,
so a new length, offset, stride, scale or batch compiles nothing. (A stride's divisibility, which vector loads need,
is a constant: strides travel divided by it.)
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import operator
import threading
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
import triton

from warploom.runtime.build import ALIGNMENT, CONSTANT, TYPE_NAMES, Build, flatten_argument, parameters_of
from warploom.runtime.descriptors import DescriptorTemplate, TmaTile, are_aligned, supports_tma
from warploom.runtime.entry import KernelEntry, find_entry
from warploom.runtime.gpu import capability
from warploom.runtime.pytorch import current_device as _current_device
from warploom.runtime.pytorch import current_stream as _current_stream
from warploom.runtime.pytorch import empty_strided_cuda as _empty_cuda
from warploom.runtime.pytorch import is_deterministic as _deterministic

__all__ = [
    "ALIGNMENT",
    "INTERPRETED",
    "SHARED_MEMORY",
    "Build",
    "Dense",
    "Launch",
    "TmaTile",
    "architecture",
    "are_aligned",
    "has_pdl",
    "is_recording",
    "multiprocessors",
    "recording",
    "runs_on_cpu",
    "shared_memory",
    "supports_tma",
]

INTERPRETED: bool = bool(triton.knobs.runtime.interpret)
"""Whether kernels run in Triton's interpreter (``TRITON_INTERPRET=1``), which takes CPU tensors."""

if INTERPRETED:
    from warploom.runtime.interpreter import repair, widen_declared

    repair()

MOST_ADDRESSES = 256
"""Encodings of tensor descriptors kept at once for one parameter of a launch."""

_NOWHERE = -2  # neither a GPU nor, as -1, the CPU
_thread = threading.local()  # ``has_context`` where the driver knows it
_compiled: dict[tuple[Any, ...], Any] = {}  # by device and build, for all launches
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


class _Variant(NamedTuple):
    """How a call fills in the arguments of a compiled variant.

    An index says where the call has a value, a place where the kernel has it.
    """

    entry: KernelEntry
    arguments: list[Any]
    pointers: tuple[tuple[int, int, int], ...]  # index, place, and the bits that an address must not have
    numbers: tuple[tuple[int, int], ...]  # index, place
    described: tuple[tuple[int, int, DescriptorTemplate, Any, dict[int, Any]], ...]
    """Index, place, what encodes it (None: Triton's launcher does), and encodings by address."""


class Launch:
    """A launch of which everything is settled but what each call brings.

    Made once for a call's shapes, strides, dtypes and options, and kept by the operator for calls like it
    (`warploom.runtime.plans`): what such a call then costs the host is Triton's own entry point, and little else.

        launch = Launch(kernel, programs, takes=("x", "out", "offset"), tokens=5, tile=Tile(64, 128), KIND="cosine")
        launch(x, out, 7)

    Args:
        kernel: A kernel in Triton or Gluon. It annotates numbers with their types (``tl.int32``), groups of numbers
            with a NamedTuple that does so, and compile-time constants, NamedTuples of them included, as such.
        programs: How many there are, in a grid of one dimension. With none, calls do nothing.
        takes: Names of the parameters that every call brings, in its order: tensors and numbers. The first is a
            tensor, on the launch's device. A tensor may be None, in every call or in none.
        num_warps: Of a program.
        num_stages: Of the loops that Triton pipelines.
        pdl: Programmatic dependent launch, while the launch before it on the stream still runs; see `has_pdl`.
        registers: Of a thread, at most.
        cooperative: Launch only if all programs run at once, which those that wait for each other need.
        unaligned: Names of tensors that may be anywhere: kernels know nothing of their addresses, nor does it count
            for what they know of others.
        arguments: All other parameters by name. A group of numbers may be None, which is a constant then. `TmaTile`
            stand for a tensor descriptor, whose tensor calls bring.

    Encoding a descriptor takes longer than a launch, and the allocator returns to the same addresses: encodings are
    kept by address. One holds an address, sizes and strides, so whatever lies there now is described by it.
    """

    __slots__ = (
        "arguments",
        "descriptions",
        "device",
        "kernel",
        "options",
        "programs",
        "takes",
        "unaligned",
        "variant",
        "variants",
    )

    def __init__(
        self,
        kernel: Any,
        programs: int,
        /,
        *,
        takes: Iterable[str],
        num_warps: int = 4,
        num_stages: int = 3,
        pdl: bool = False,
        registers: int | None = None,
        cooperative: bool = False,
        unaligned: Iterable[str] = (),
        **arguments: Any,
    ) -> None:
        self.kernel, self.programs, self.takes = kernel, programs, tuple(takes)
        # Interpreted kernels do not say.
        self.unaligned = {*unaligned, *getattr(kernel, "do_not_specialize_on_alignment", ())}
        self.options = {"num_warps": num_warps}
        if not _is_gluon(kernel):
            self.options["num_stages"] = num_stages
        if pdl:
            self.options["launch_pdl"] = True
        if registers is not None:
            self.options["maxnreg"] = registers
        if cooperative:
            self.options["launch_cooperative_grid"] = True
        self.descriptions = {name: DescriptorTemplate(x) for name, x in arguments.items() if isinstance(x, TmaTile)}
        self.arguments = {name: x for name, x in arguments.items() if name not in self.descriptions}
        self._check()
        self.variants: dict[tuple[Any, ...], _Variant] = {}  # by device, dtypes and alignment
        self.variant: Any = None  # that for aligned addresses on the last device
        self.device = _NOWHERE

    def _check(self) -> None:
        parameters = parameters_of(self.kernel)
        named = [*self.takes, *self.arguments]
        wrong = {
            "has no parameter": {*named, *self.descriptions} - {*parameters},
            "is given no": {*parameters} - {*named},
            "is given twice": {name for name in named if named.count(name) > 1},
            "describes but does not take": {*self.descriptions} - {*self.takes},
        }
        for name, value in self.arguments.items():
            kind = parameters.get(name, CONSTANT)
            declared = type(None) if kind is None else type(kind) if isinstance(kind, tuple) else int | float
            if isinstance(kind, tuple) and value is None:
                continue
            if kind != CONSTANT and not isinstance(value, declared):
                wrong.setdefault("is given something else than it declares for", set()).add(name)
        for name in self.takes:
            if parameters.get(name) == CONSTANT:
                wrong.setdefault("takes the constant", set()).add(name)
        if not self.takes or parameters.get(self.takes[0]) is not None:
            wrong["does not take first a tensor, but"] = set(self.takes[:1])
        for problem, names in wrong.items():
            if names:
                raise TypeError(f"{self.kernel.__name__} {problem} {', '.join(sorted(names))}")

    def __call__(self, *given: Any) -> None:
        """Launch on tensors of the dtypes, shapes and strides that this launch was made for."""
        device = given[0].get_device()
        known = device == self.device and device == _current_device() and _recorded is None
        if not (known and self._enqueue(self.variant, device, given)):
            self._launch(device, given)

    def _enqueue(self, variant: _Variant, device: int, given: tuple[Any, ...]) -> bool:
        """Launch a variant, unless it is not for such addresses."""
        entry, arguments, pointers, numbers, described = variant
        arguments = arguments.copy()
        bits = 0
        for index, place, excluded in pointers:
            address = given[index].data_ptr()
            bits |= address & excluded
            arguments[place] = address
        if bits:
            return False
        for index, place in numbers:
            arguments[place] = given[index]
        for index, place, description, encode, known in described:
            tensor = given[index]
            encoded = known.get(tensor.data_ptr())
            arguments[place] = _encoded(description, encode, known, tensor) if encoded is None else encoded
        entry.enqueue(self.programs, _current_stream(device), arguments)
        return True

    def _launch(self, device: int, given: tuple[Any, ...]) -> None:
        """Launch on tensors wherever they are, and know how to for calls like this one."""
        if self.programs == 0:
            return
        if _recorded is not None:
            build = self._build(given)
            _recorded.setdefault(build.key, build)
        elif INTERPRETED and device < 0:
            self._interpret(given)
        else:
            aligned = self._aligned(given)
            key = device, aligned, *(x.dtype if isinstance(x, torch.Tensor) else None for x in given)
            with contextlib.nullcontext() if device == _current_device() else torch.cuda.device(device):
                variant = self.variants.get(key)
                if variant is None:
                    variant = self.variants[key] = self._variant(device, given)
                if all(aligned):
                    self.variant, self.device = variant, device
                self._enqueue(variant, device, given)

    def _interpret(self, given: tuple[Any, ...]) -> None:
        values = {**self.arguments, **dict(zip(self.takes, given, strict=True))}
        arguments = [widen_declared(kind, values[n]) for n, kind in parameters_of(self.kernel).items()]
        self.kernel[(self.programs,)](*arguments, **self.options)

    def _aligned(self, given: tuple[Any, ...]) -> tuple[bool, bool]:
        """Whether all tensors whose alignment counts are aligned: those of integers, and all others.

        A variant for each tensor's own alignment would be one of hundreds.
        """
        bits = [0, 0]
        for name, value in zip(self.takes, given, strict=True):
            if isinstance(value, torch.Tensor) and name not in self.unaligned:
                bits[value.is_floating_point()] |= value.data_ptr()
        return bits[False] % ALIGNMENT == 0, bits[True] % ALIGNMENT == 0

    def _build(self, given: tuple[Any, ...]) -> Build:
        values = {**self.arguments, **dict(zip(self.takes, given, strict=True))}
        aligned = self._aligned(given)
        signature: dict[str, Any] = {}
        constexprs: dict[str, Any] = {}
        attrs: dict[tuple[int, ...], list[list[Any]]] = {}
        for index, (name, kind) in enumerate(parameters_of(self.kernel).items()):
            value = values[name]
            if kind == CONSTANT or value is None:
                signature[name] = CONSTANT
                constexprs[name] = value
            elif kind is not None:
                signature[name] = kind
            elif name in self.descriptions:
                signature[name] = self.descriptions[name].type
            else:
                signature[name] = "*" + TYPE_NAMES[value.dtype]
                if aligned[value.is_floating_point()] and name not in self.unaligned:
                    attrs[(index,)] = [["tt.divisibility", ALIGNMENT]]
        return Build(self.kernel, signature, constexprs, attrs, self.options)

    def _variant(self, device: int, given: tuple[Any, ...]) -> _Variant:
        """The variant for tensors like these, compiled now if no launch has had it compiled before."""
        build, brought = self._build(given), dict(zip(self.takes, given))
        key = (device, *build.key)
        if key not in _compiled:
            _compiled[key] = build.compile()
        descriptors = {name: each.of(brought[name]) for name, each in self.descriptions.items()}
        entry = find_entry(_compiled[key], [descriptors[name] for name in build.signature if name in descriptors])
        encoders = iter(entry.encode or ())
        arguments: list[Any] = []
        pointers, numbers = [], []
        described: list[Any] = []
        for number, (name, kind) in enumerate(build.signature.items()):
            place = len(arguments)
            if kind == CONSTANT:
                continue
            if name not in brought:
                arguments += [value for _, value in flatten_argument(kind, self.arguments[name])]
                continue
            index = self.takes.index(name)
            arguments.append(None)
            if name in descriptors:
                described.append((index, place, self.descriptions[name], next(encoders, None), {}))
                if entry.encode is not None:
                    arguments += [*descriptors[name].shape, *descriptors[name].strides]
            elif isinstance(kind, str) and kind.startswith("*"):
                pointers.append((index, place, ALIGNMENT - 1 if (number,) in build.attrs else 0))
            else:
                numbers.append((index, place))
        return _Variant(entry, arguments, tuple(pointers), tuple(numbers), tuple(described))


def _is_gluon(kernel: Any) -> bool:
    return hasattr(kernel, "is_gluon") and bool(kernel.is_gluon())


def _encoded(description: DescriptorTemplate, encode: Any, known: dict[int, Any], tensor: torch.Tensor) -> Any:
    """What stands for a described tensor among the arguments; its sizes and strides are there already."""
    descriptor = description.of(tensor)
    if encode is None:
        return descriptor
    if len(known) >= MOST_ADDRESSES:
        known.clear()
    if tensor.is_cuda and not hasattr(_thread, "has_context"):
        torch.cuda.mem_get_info()  # the driver encodes nothing for a thread that has not used the GPU
        _thread.has_context = True
    known[tensor.data_ptr()] = encoded = encode(descriptor)[0]
    return encoded


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


def has_pdl(device: torch.device) -> bool:
    """Whether a GPU has programmatic dependent launch: Hopper and later.

    A kernel launched with it is put in place while the launch before it on the stream still runs. It waits for that
    launch itself (``gdc_wait``) before it touches memory, which is cheaper than the pause between two launches. One
    that does not wait follows a launch of our own, and no allocation: memory may be filled there, by a launch too.
    """
    return architecture(device) >= 90 and not INTERPRETED


SHARED_MEMORY = {80: 163, 89: 99, 90: 227, 100: 227, 120: 99}
"""KiB of shared memory that a program may take, by compute capability times ten: of A100 (80); RTX 4090, L4 and L40
(89); H100 and H200 (90); B200 (100); RTX 5090 (120)."""


def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that a program may take; of a GPU that is not known the least."""
    return 1024 * SHARED_MEMORY.get(architecture(device), min(SHARED_MEMORY.values()))


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
