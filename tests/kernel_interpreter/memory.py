"""Device memory, shared memory, barriers, and what moves between them."""

from __future__ import annotations

import math
import types
from typing import Any

import torch

from kernel_interpreter.machine import KernelError, current
from kernel_interpreter.values import DTYPES, KINDS, LAYOUT, Layout, Tensor, as_tensor, raw

BARRIERS = Layout()
"""The layout of barriers."""
JUNK = 0x5A
"""What integers are where nothing is known of them; floating numbers are NaN."""
BEYOND = "an address beyond a tensor's memory"


class Pointer:
    """An address in device memory: a tensor's, and how many elements behind it."""

    def __init__(self, tensor: torch.Tensor, offset: Any = 0) -> None:
        self.tensor, self.offset = tensor, offset

    def __add__(self, offset: Any) -> Pointer:
        return Pointer(self.tensor, self.offset + offset)

    def __sub__(self, offset: Any) -> Pointer:
        return Pointer(self.tensor, self.offset - offset)

    def __getitem__(self, index: Any) -> Pointer:
        return Pointer(self.tensor, self.offset[index])

    def to(self, kind: Any, bitcast: bool = False) -> Pointer:
        """The same address, of numbers of another kind."""
        (dtype,) = (dtype for dtype, known in KINDS.items() if known == kind.element_ty)
        bytes_before = (self.offset + self.tensor.storage_offset()) * self.tensor.element_size()
        whole = self.memory()
        size = dtype.itemsize // self.tensor.element_size() or 1
        whole = whole[: len(whole) // size * size].view(dtype)
        if not bitcast or bool(torch.as_tensor(raw(bytes_before) % dtype.itemsize).any()):
            raise KernelError("an address that is not a multiple of the size of its numbers")
        return Pointer(whole, bytes_before // dtype.itemsize)

    @property
    def dtype(self) -> Any:
        return types.SimpleNamespace(element_ty=KINDS[self.tensor.dtype])

    @property
    def shape(self) -> list[int]:
        return list(raw(self.offset).shape) if isinstance(self.offset, Tensor) else []

    def memory(self) -> torch.Tensor:
        """All memory of the tensor, of which offsets are from its own place on."""
        size = self.tensor.untyped_storage().nbytes() // self.tensor.element_size()
        return torch.as_strided(self.tensor.detach(), (size,), (1,), 0)

    def places(self) -> torch.Tensor:
        """Where in `memory`."""
        offset = as_tensor(self.offset).long()
        first = self.tensor.storage_offset()
        return offset + first if first else offset


def load(pointer: Pointer, mask: Any = None, other: Any = None, volatile: bool = False, **_: Any) -> Tensor:
    if volatile:  # a program that waits for others
        current().wait_for(lambda: True, "a word")
    memory, offset = pointer.memory(), pointer.places()
    if mask is None:
        return Tensor(_taken(memory, offset))
    offset, chosen = torch.broadcast_tensors(offset, as_tensor(mask))
    if bool(chosen.all()):
        return Tensor(_taken(memory, offset))
    nothing = (math.nan if memory.is_floating_point() else JUNK) if other is None else raw(other)
    values = torch.as_tensor(nothing, dtype=memory.dtype).expand(offset.shape)
    if bool(chosen.any()):
        values = torch.where(chosen, _taken(memory, torch.where(chosen, offset, 0)), values)
    return Tensor(values)


def store(pointer: Pointer, value: Any, mask: Any = None, **_: Any) -> None:
    memory, offset = pointer.memory(), pointer.places()
    given = as_tensor(value).to(memory.dtype)
    if mask is None:
        offset, given = torch.broadcast_tensors(offset, given)
    else:
        offset, given, chosen = torch.broadcast_tensors(offset, given, as_tensor(mask))
        if not bool(chosen.all()):
            (places,) = chosen.reshape(-1).nonzero(as_tuple=True)
            offset, given = (x.reshape(-1).index_select(0, places) for x in (offset, given))
    try:
        memory.index_copy_(0, offset.reshape(-1), given.reshape(-1))
    except IndexError as error:
        raise KernelError(BEYOND) from error


def _taken(memory: torch.Tensor, offset: torch.Tensor) -> torch.Tensor:
    """Returns copies of numbers of ``memory``, in the shape of ``offset``."""
    try:
        return memory.index_select(0, offset.reshape(-1)).view(offset.shape)
    except IndexError as error:
        raise KernelError(BEYOND) from error


def atomic_add(pointer: Pointer, value: Any, **_: Any) -> Tensor:
    before = load(pointer)
    store(pointer, before + value)
    return before


def atomic_xchg(pointer: Pointer, value: Any, **_: Any) -> Tensor:
    before = load(pointer)
    store(pointer, value)
    return before


class Memory:
    """Shared memory, or a look at some of it."""

    layout = LAYOUT

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    @property
    def shape(self) -> list[int]:
        return list(self.tensor.shape)

    @property
    def dtype(self) -> Any:
        return KINDS[self.tensor.dtype]

    def index(self, i: Any) -> Memory:
        return Memory(self.tensor[_buffer(i, self.tensor.shape[0])])

    def slice(self, start: Any, length: Any, dim: int = 0) -> Memory:
        return Memory(self.tensor.narrow(dim, int(start), int(length)))

    def permute(self, order: Any) -> Memory:
        return Memory(self.tensor.permute(*order))

    def reshape(self, shape: Any) -> Memory:
        return Memory(self.tensor.view(*shape))

    def load(self, layout: Any = None) -> Tensor:
        return Tensor(self.tensor.clone())

    def store(self, value: Tensor) -> None:
        if value.shape != self.shape:
            raise KernelError(f"{value.shape} into a buffer {self.shape}")
        self.tensor.copy_(value.value)


def matrix_in(tile: Memory, layout: Any) -> Memory:
    return Placed(tile, layout) if hasattr(layout, "offset_bases") else Memory(tile.tensor[0, 0])


class Placed(Memory):
    """A tile of 64 · 64 float32 that leaves by the tensor memory accelerator, in another layout."""

    BASES = ([0, 1], [0, 2], [0, 4], [0, 8], [0, 16], [1, 4], [2, 8], [4, 16], [8, 0], [16, 0], [32, 0], [0, 32])
    """Where the accelerator takes the 1st, 2nd, 4th, 8th … number from: rows of 128 bytes, swizzled."""

    def __init__(self, memory: Memory, layout: Any) -> None:
        super().__init__(memory.tensor[0, 0])
        self.bases = layout.offset_bases

    def store(self, value: Tensor) -> None:
        self.tensor[_places(self.BASES)] = value.value[_places(self.bases)]


def _places(bases: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Row and column of each number of a tile, in the order of memory."""
    number = torch.arange(2 ** len(bases))
    row, column = torch.zeros_like(number), torch.zeros_like(number)
    for bit, (rows, columns) in enumerate(bases):
        row, column = row ^ (number >> bit & 1) * rows, column ^ (number >> bit & 1) * columns
    return row, column


def _buffer(i: Any, count: int) -> int:
    if not 0 <= int(i) < count:
        raise KernelError(f"buffer {int(i)} of {count}")
    return int(i)


class Barrier:
    """A barrier in shared memory."""

    def __init__(self) -> None:
        self.count = self.pending = self.bytes = self.phase = 0

    def arrive(self) -> None:
        if self.pending == 0:
            raise KernelError("a barrier is not initialised, or has more arrivals than it expects")
        self.pending -= 1
        self.advance()

    def advance(self) -> None:
        """Go on to the next phase where nothing is missing."""
        if self.pending == 0 and self.bytes == 0:
            self.phase, self.pending = self.phase ^ 1, self.count


class Barriers:
    """Barriers in shared memory."""

    def __init__(self, count: int) -> None:
        self.each = [Barrier() for _ in range(count)]
        self.shape = [count, 1]

    def index(self, i: Any) -> Barrier:
        return self.each[_buffer(i, len(self.each))]


def allocate(dtype: Any, shape: Any, layout: Any = None, value: Tensor | None = None) -> Any:
    if layout is BARRIERS:
        return Barriers(shape[0])
    kind = DTYPES[dtype]
    memory = Memory(torch.full(tuple(shape), math.nan if kind.is_floating_point else JUNK, dtype=kind))
    if value is not None:
        memory.store(value)
    return memory


def tiles_in(tiles: Memory, width: int, layout: Any) -> Memory:
    rows, columns = tiles.shape[3:]
    return Memory(tiles.tensor.view(tiles.shape[0] * columns // width, 1, 1, rows, width))


def boxes_in(tiles: Memory, desc: Described) -> Any:
    """Buffers as the boxes of a descriptor; those as wide as the buffers may hold several of them."""
    shape = desc.block_type.shape
    return Memory(tiles.tensor.view(-1, *shape)) if tiles.shape[4] == shape[3] else Boxes(tiles, desc)


class Boxes:
    """Buffers as the boxes of a descriptor: those of a buffer one below the other, then beside these."""

    def __init__(self, tiles: Memory, desc: Described) -> None:
        self.tensor, (self.height, self.width) = tiles.tensor, desc.block_type.shape[2:]

    def index(self, i: Any) -> Memory:
        count, _, _, rows, columns = self.tensor.shape
        below, beside = rows // self.height, columns // self.width
        place = _buffer(i, count * below * beside)
        buffer = self.tensor[place // (below * beside)]
        box = buffer.narrow(2, place % below * self.height, self.height)
        return Memory(box.narrow(3, place // below % beside * self.width, self.width))


def init(barrier: Barrier, count: int) -> None:
    barrier.count = barrier.pending = count


def arrive(barrier: Barrier, *, count: int = 1, pred: Any = True) -> None:
    for _ in range(count if pred else 0):
        barrier.arrive()


def expect(barrier: Barrier, size: int, pred: Any = True) -> None:
    if pred:
        barrier.bytes += size
        barrier.arrive()


def wait(barrier: Barrier, phase: Any, pred: Any = True, **_: Any) -> None:
    if pred:
        parity = int(phase)
        current().wait_for(lambda: barrier.phase != parity, f"the end of phase {parity} of a barrier")


class Described:
    """A tensor descriptor."""

    layout = LAYOUT

    def __init__(self, descriptor: Any) -> None:
        base, shape = descriptor.base.detach(), list(descriptor.block_shape)
        self.shape = list(descriptor.shape)
        self.tensor = torch.as_strided(base, descriptor.shape, descriptor.strides, base.storage_offset())
        self.dtype = KINDS[base.dtype]
        self.block_type = types.SimpleNamespace(shape=shape, nbytes=math.prod(shape) * base.element_size())

    def box(self, coordinates: Any, memory: Memory) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
        """Where a box is in the tensor, and where what of it is there lies in the box."""
        if memory.shape != self.block_type.shape:
            raise KernelError(f"a box {self.block_type.shape} and a buffer {memory.shape}")
        there, here = [], []
        for first, length, size in zip(map(int, coordinates), memory.shape, self.tensor.shape, strict=True):
            begin = min(max(first, 0), size)
            end = max(min(first + length, size), begin)
            there.append(slice(begin, end))
            here.append(slice(begin - first, end - first) if end > begin else slice(0, 0))
        return tuple(there), tuple(here)


def copy_in(desc: Described, coordinates: Any, barrier: Barrier, result: Memory, pred: Any = True) -> None:
    there, here = desc.box(coordinates, result)

    def copy() -> None:
        result.tensor.zero_()
        result.tensor[here] = desc.tensor[there]
        barrier.bytes -= desc.block_type.nbytes
        barrier.advance()

    if pred:
        current().machine.copies.append(copy)


class Store:
    """A copy out of shared memory, which is read first, and in device memory later."""

    def __init__(self, desc: Described, coordinates: Any, source: Memory, adds: bool = False) -> None:
        self.desc, self.source, self.adds, self.written = desc, source, adds, False
        self.there, self.here = desc.box(coordinates, source)

    def read(self) -> None:
        self.tile = self.source.tensor[self.here].clone()

    def write(self) -> None:
        before = self.desc.tensor[self.there]
        self.desc.tensor[self.there] = before + self.tile if self.adds else self.tile
        self.written = True


def copy_out(desc: Described, coordinates: Any, source: Memory) -> None:
    current().stores.append(Store(desc, coordinates, source))


def add_out(desc: Described, coordinates: Any, source: Memory) -> None:
    current().stores.append(Store(desc, coordinates, source, adds=True))


def store_wait(pending: int) -> None:
    thread = current()
    while len(thread.stores) > pending:
        store = thread.stores.pop(0)
        store.read()
        thread.read.append(store)
        thread.machine.copies.append(store.write)


def wait_stored() -> None:
    """Wait until all that has been stored is in device memory."""
    store_wait(0)
    read, current().read = current().read, []
    current().wait_for(lambda: all(store.written for store in read), "what it stores")


def wait_until_added(counter: Pointer, before: Any) -> None:
    wanted = int(before)
    current().wait_for(lambda: int(load(counter)) == wanted, f"{wanted} to be added")
