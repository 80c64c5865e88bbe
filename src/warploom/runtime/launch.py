"""The launch of a Triton kernel with named arguments.

Triton's own launcher examines every argument on every call, which takes longer than a small kernel runs. A `Launch`
resolves its arguments once, when a call is planned. A later call only fills in the addresses of its tensors, and a
number or two.

A compiled kernel depends on the dtype of each pointer, on whether all pointers are aligned (those of integers, and
the others), and on the compile-time constants. It does not depend on numbers, whose types kernels declare: a new
length, offset, stride, scale or batch compiles nothing. (Vector loads need to know by what a stride is divisible.
That is a compile-time constant, and the stride is passed divided by it.)
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
    "Buffer",
    "Build",
    "Launch",
    "TmaTile",
    "architecture",
    "are_aligned",
    "has_pdl",
    "is_recording",
    "multiprocessors",
    "record_builds",
    "runs_on_cpu",
    "shared_memory",
    "supports_tma",
]

INTERPRETED: bool = bool(triton.knobs.runtime.interpret)
"""True if kernels run in Triton's interpreter (``TRITON_INTERPRET=1``), on CPU tensors."""

if INTERPRETED:
    from warploom.runtime.interpreter import repair, widen_declared

    repair()

MAX_ADDRESSES = 256
"""The most encoded tensor descriptors that are kept for one parameter of a launch."""

_NO_DEVICE = -2  # neither a GPU nor the CPU, which is -1
_thread = threading.local()  # ``has_context`` where the driver knows it
_compiled: dict[tuple[Any, ...], Any] = {}  # by device and build, for all launches
_recorded: dict[tuple[Any, ...], Build] | None = None
_recorded_arch, _recorded_multiprocessors = 90, 1


class Buffer(NamedTuple):
    """A tensor without gaps that a call allocates: its shape, strides and dtype."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def like(cls, tensor: torch.Tensor) -> Buffer:
        """Returns a buffer with the shape, strides and dtype of a tensor."""
        return cls(tuple(tensor.shape), tensor.stride(), tensor.dtype)

    @classmethod
    def rows(cls, shape: tuple[int, ...], dtype: torch.dtype) -> Buffer:
        """Returns a row-major buffer of a shape of at least one axis."""
        strides = itertools.accumulate((max(n, 1) for n in reversed(shape[1:])), operator.mul, initial=1)
        return cls(shape, tuple(strides)[::-1], dtype)

    @property
    def order(self) -> list[int]:
        """The axes from the slowest to the fastest in memory."""
        return sorted(range(len(self.shape)), key=lambda axis: -self.stride[axis])

    def empty(self, near: torch.Tensor) -> torch.Tensor:
        """Returns an uninitialised tensor on the device of another."""
        device = near.get_device()  # negative for a CPU
        if _empty_cuda is None or device < 0 or device != _current_device() or _deterministic():
            return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=near.device)
        return _empty_cuda(self.shape, self.stride, self.dtype)


class _Variant(NamedTuple):
    """A compiled kernel, and the arguments of it that a call fills in.

    An index is the position of a value in the call, a place its position among the kernel's arguments.
    """

    entry: KernelEntry
    arguments: list[Any]
    """All arguments of the kernel, with None where the call fills one in."""
    pointers: tuple[tuple[int, int, int], ...]
    """Index, place, and the bits that must be 0 in the address."""
    numbers: tuple[tuple[int, int], ...]
    """Index and place."""
    described: tuple[tuple[int, int, DescriptorTemplate, Any, dict[int, Any]], ...]
    """Index, place, template, encoder (None where Triton's launcher encodes), and encodings by address."""


class Launch:
    """A kernel with all arguments but those that change from call to call.

    It is made once for a call's shapes, strides, dtypes and options, and kept for calls like it
    (`warploom.runtime.plans`). Calling it then costs the host little more than Triton's entry into the kernel.

        launch = Launch(kernel, programs, takes=("x", "out", "offset"), tokens=5, tile=Tile(64, 128), KIND="cosine")
        launch(x, out, 7)

    Args:
        kernel: A kernel in Triton or Gluon. It annotates numbers with their types (``tl.int32``), a group of
            numbers with a NamedTuple that does so, and compile-time constants with ``tl.constexpr``, alone or in a
            NamedTuple.
        programs: The number of programs, in a grid of one dimension. With 0, calls do nothing.
        takes: Names of the parameters that a call passes, in its order: tensors and numbers. The first is a tensor
            on the launch's device. A tensor may be None, in every call or in none.
        num_warps: Warps of a program.
        num_stages: Stages of the loops that Triton pipelines.
        pdl: Programmatic dependent launch, while the launch before it on the stream still runs; see `has_pdl`.
        registers: The most registers of a thread.
        cooperative: Launch only if all programs run at once, for programs that wait for each other.
        unaligned: Names of tensors that need not be aligned. The kernel is compiled without a word on their
            addresses, and they do not count for the alignment of the others.
        arguments: All other parameters by name. A group of numbers may be None, which is a constant then. A
            `TmaTile` is a tensor descriptor, whose tensor a call passes.

    Encoding a descriptor takes longer than a launch, and the allocator returns the same addresses again. So
    encodings are kept by address. An encoding holds only address, sizes and strides, and is right for any tensor
    there.
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
        # Interpreted kernels lack this attribute.
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
        self.variant: Any = None  # the variant for aligned addresses on the last device
        self.device = _NO_DEVICE

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
        """Launch on tensors of the dtypes, shapes and strides of this plan."""
        device = given[0].get_device()
        known = device == self.device and device == _current_device() and _recorded is None
        if not (known and self._enqueue(self.variant, device, given)):
            self._launch(device, given)

    def _enqueue(self, variant: _Variant, device: int, given: tuple[Any, ...]) -> bool:
        """Launch a variant, and return True; return False if the addresses are not aligned as it needs."""
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
            arguments[place] = _encode(description, encode, known, tensor) if encoded is None else encoded
        entry.enqueue(self.programs, _current_stream(device), arguments)
        return True

    def _launch(self, device: int, given: tuple[Any, ...]) -> None:
        """Launch on tensors on any device, and keep the variant for calls like this one."""
        if self.programs == 0:
            return
        if _recorded is not None:
            build = self._make_build(given)
            _recorded.setdefault(build.key, build)
        elif INTERPRETED and device < 0:
            self._interpret(given)
        else:
            aligned = self._check_alignment(given)
            key = device, aligned, *(x.dtype if isinstance(x, torch.Tensor) else None for x in given)
            with contextlib.nullcontext() if device == _current_device() else torch.cuda.device(device):
                variant = self.variants.get(key)
                if variant is None:
                    variant = self.variants[key] = self._make_variant(device, given)
                if all(aligned):
                    self.variant, self.device = variant, device
                self._enqueue(variant, device, given)

    def _interpret(self, given: tuple[Any, ...]) -> None:
        values = {**self.arguments, **dict(zip(self.takes, given, strict=True))}
        arguments = [widen_declared(kind, values[n]) for n, kind in parameters_of(self.kernel).items()]
        self.kernel[(self.programs,)](*arguments, **self.options)

    def _check_alignment(self, given: tuple[Any, ...]) -> tuple[bool, bool]:
        """Returns if all tensors of integers are aligned, and if all others are.

        Variants for the alignment of each single tensor would be hundreds.
        """
        bits = [0, 0]
        for name, value in zip(self.takes, given, strict=True):
            if isinstance(value, torch.Tensor) and name not in self.unaligned:
                bits[value.is_floating_point()] |= value.data_ptr()
        return bits[False] % ALIGNMENT == 0, bits[True] % ALIGNMENT == 0

    def _make_build(self, given: tuple[Any, ...]) -> Build:
        values = {**self.arguments, **dict(zip(self.takes, given, strict=True))}
        aligned = self._check_alignment(given)
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

    def _make_variant(self, device: int, given: tuple[Any, ...]) -> _Variant:
        """Returns the variant for tensors like these, compiled now if no launch has compiled it before."""
        build, passed = self._make_build(given), dict(zip(self.takes, given))
        key = (device, *build.key)
        if key not in _compiled:
            _compiled[key] = build.compile()
        descriptors = {name: each.of(passed[name]) for name, each in self.descriptions.items()}
        if descriptors:
            _ensure_context(device)
        entry = find_entry(_compiled[key], [descriptors[name] for name in build.signature if name in descriptors])
        encoders = iter(entry.encode or ())
        arguments: list[Any] = []
        pointers, numbers = [], []
        described: list[Any] = []
        for number, (name, kind) in enumerate(build.signature.items()):
            place = len(arguments)
            if kind == CONSTANT:
                continue
            if name not in passed:
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


def _encode(description: DescriptorTemplate, encode: Any, known: dict[int, Any], tensor: torch.Tensor) -> Any:
    """Returns the argument for a tensor's descriptor, to go before its sizes and strides, and keep it."""
    _ensure_context(tensor.get_device())
    descriptor = description.of(tensor)
    if encode is None:
        return descriptor
    if len(known) >= MAX_ADDRESSES:
        known.clear()
    known[tensor.data_ptr()] = encoded = encode(descriptor)[0]
    return encoded


def _ensure_context(device: int) -> None:
    """Make the current GPU known to this thread: the driver encodes no descriptor in one that has not used it."""
    if device >= 0 and not hasattr(_thread, "has_context"):
        torch.cuda.mem_get_info()
        _thread.has_context = True


@contextlib.contextmanager
def record_builds(arch: int = 90, multiprocessors: int = 1) -> Iterator[dict[tuple[Any, ...], Build]]:
    """Record the builds that launches would compile for a GPU, and launch nothing. It needs no GPU.

    Args:
        arch: The GPU's compute capability, times ten.
        multiprocessors: The number of its multiprocessors, on which some plans depend.
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
    """Returns True while launches are recorded instead of made."""
    return _recorded is not None


def runs_on_cpu() -> bool:
    """Returns True while kernels accept CPU tensors: in the interpreter, or while builds are recorded."""
    return INTERPRETED or _recorded is not None


def multiprocessors(device: torch.device) -> int:
    """Returns the number of a GPU's multiprocessors, or that of `record_builds` for a CPU. Raises for "meta"."""
    return _multiprocessors(device) if _is_gpu(device) else _recorded_multiprocessors


def has_pdl(device: torch.device) -> bool:
    """Returns True if a GPU has programmatic dependent launch (PDL): Hopper and later.

    A kernel launched with PDL is set up while the launch before it on the stream still runs. It waits for that
    launch itself (``gdc_wait``) before it accesses memory, which is cheaper than the pause between two launches. A
    kernel that does not wait must follow a launch of ours without an allocation between, which may launch a fill.
    """
    return architecture(device) >= 90 and not INTERPRETED


SHARED_MEMORY = {80: 163, 89: 99, 90: 227, 100: 227, 120: 99}
"""KiB of shared memory that a program may take, by compute capability times ten: of A100 (80); RTX 4090, L4 and L40
(89); H100 and H200 (90); B200 (100); RTX 5090 (120)."""


def shared_memory(device: torch.device) -> int:
    """Returns the bytes of shared memory that a program may use; for an unknown GPU the least of all."""
    return 1024 * SHARED_MEMORY.get(architecture(device), min(SHARED_MEMORY.values()))


def architecture(device: torch.device) -> int:
    """Returns a GPU's compute capability, times ten (0 for one of AMD); for a CPU that of `record_builds`.

    Raises:
        ValueError: The device is "meta". Plans use meta tensors for layouts, and must ask for the GPU by the
            tensors of the call.
    """
    return capability(device) if _is_gpu(device) else _recorded_arch


def _is_gpu(device: torch.device) -> bool:
    if device.type == "meta":
        raise ValueError("device: expected that of a tensor with memory, got meta")
    return device.type == "cuda"


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
