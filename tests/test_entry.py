"""Triton's short entry into a compiled kernel: recognised, or left to Triton."""

import functools
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from warploom.runtime.backend import HAS_TRITON

if not HAS_TRITON:
    pytest.skip("needs Triton", allow_module_level=True)

import triton
import triton.language as tl
from launch_cases import Sizes, Strides, Stub, adding, scale_kernel, scaling, tensors
from launches import ON_HOPPER
from triton.backends.nvidia import driver as nvidia
from triton.compiler import CompiledKernel
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from warploom.device.hopper import tma
from warploom.device.hopper.pipeline import barriers
from warploom.runtime import entry, launch
from warploom.runtime.descriptors import DescriptorTemplate
from warploom.runtime.launch import Launch, TmaTile

pytestmark = pytest.mark.stack


class CudaLauncher:
    """Stands for Triton's launcher around a function in C, which takes tensor descriptors encoded."""

    global_scratch_size = profile_scratch_size = 0
    kernel_signature = b"signature"
    packs = True
    """Whether the function takes a kernel's arguments as one tuple, as it has done since Triton 3.7."""

    def __init__(self, described: int = 0) -> None:
        self.publicly: list[Any] = []
        self.directly: list[Any] = []
        self.encoded: list[int] = []
        launcher = self.launch = self._launch
        if described:
            tensordesc_meta = [{"parameter": i} for i in range(described)]
            make_tensordesc_arg = self.encode

            def inner(*arguments: Any) -> None:
                launcher(*arguments, tensordesc_meta, make_tensordesc_arg)

            self.launch = inner  # type: ignore[method-assign, assignment]

    def encode(self, descriptor: Any, like: Any, _: Any) -> list[Any]:
        assert like == {"parameter": 0}
        self.encoded.append(descriptor.base.data_ptr())
        return [("map", descriptor.base.data_ptr()), *descriptor.shape, *descriptor.strides]

    def _launch(self, *arguments: Any) -> None:
        self.directly.append(arguments)

    def __call__(
        self, x: int, y: int, z: int, stream: int, function: int, metadata: Any, info: Any, enter: Any, leave: Any,
        *arguments: Any,
    ) -> None:  # fmt: skip
        first = (x, y, z, stream, function, False, True, metadata, info, enter, leave, self.kernel_signature)
        self.launch(*first, *((arguments,) if self.packs else arguments))


class Compiled:
    """Stands for a compiled variant."""

    function, packed_metadata = 77, (4, 1, 0)

    def __init__(self, run: Any) -> None:
        self.run = run
        self.publicly: list[Any] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *arguments: self.publicly.append((*grid, *arguments))


HANDED = (3, 1, 1, 9, 77, False, True, (4, 1, 0), None, None, None, b"signature")


@pytest.mark.parametrize("packs", [False, True])
def test_a_launcher_that_is_recognised_is_passed_by(packs: bool) -> None:
    run = CudaLauncher()
    run.packs = packs
    compiled = Compiled(run)
    for number in (5, 6):
        entry.find_entry(compiled).enqueue(3, 9, [1, 2, number])
    assert run.directly == [(*HANDED, *(([1, 2, n],) if packs else (1, 2, n))) for n in (5, 6)]
    assert not compiled.publicly


class Counts(CudaLauncher):
    """Hands over what differs from launch to launch."""

    launches = 0

    def __call__(self, *arguments: Any) -> None:
        Counts.launches += 1
        self.kernel_signature = bytes(Counts.launches)
        super().__call__(*arguments)


class Appends(CudaLauncher):
    """Hands over more arguments than the kernel is given, as for a sanitizer."""

    def __call__(self, *arguments: Any) -> None:
        super().__call__(*arguments, 4096)


class Looks(CudaLauncher):
    """Looks at the stream."""

    def __call__(self, x: int, y: int, z: int, stream: int, *arguments: Any) -> None:
        super().__call__(x, y, z, stream + 0, *arguments)


class Reorders(CudaLauncher):
    """Has the stream elsewhere."""

    def __call__(self, x: int, y: int, z: int, stream: int, function: int, *arguments: Any) -> None:
        super().__call__(x, y, z, function, stream, *arguments)


class Allocates(CudaLauncher):
    """Gives a kernel scratch memory."""

    global_scratch_size = 128


class Unknown:
    """Has nothing of what is looked for."""

    def __call__(self, *arguments: Any) -> None:
        raise AssertionError("not called")


@pytest.mark.parametrize("launcher", [Counts, Appends, Looks, Reorders, Allocates, Unknown])
def test_a_launcher_that_is_not_recognised_is_left_to_triton(launcher: type) -> None:
    compiled = Compiled(launcher())
    for _ in range(2):
        entry.find_entry(compiled).enqueue(3, 9, [1, 2, 5])
    assert compiled.publicly == [(3, 1, 1, 1, 2, 5)] * 2
    assert not getattr(compiled.run, "directly", [])


def add_tiles(x_desc, out, number: tl.int32, FLAG: tl.constexpr):  # type: ignore[no-untyped-def]
    """What takes one tensor descriptor and one pointer."""


class Tiled(Stub):
    """Stands for such a kernel in Gluon, with a launcher of Triton."""

    def __init__(self, run: CudaLauncher) -> None:
        super().__init__(add_tiles)
        self.variant = Compiled(run)

    def is_gluon(self) -> bool:
        return True

    def compile(self, found: launch.Build) -> Compiled:
        return self.variant


def adding_tiles(run: CudaLauncher) -> tuple[Launch, Compiled]:
    kernel = Tiled(run)
    x = torch.zeros(8, 64, dtype=torch.bfloat16)
    boxes = TmaTile(x, (0, 1), (4, 64))
    return Launch(kernel, 3, takes=("x_desc", "out"), x_desc=boxes, number=5, FLAG=True), kernel.variant


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors on the CPU count as on the current device."""
    monkeypatch.setattr(launch, "INTERPRETED", False)
    monkeypatch.setattr(launch, "_compiled", {})
    monkeypatch.setattr(launch, "_current_device", lambda: -1)
    monkeypatch.setattr(launch, "_current_stream", lambda device: 9)
    monkeypatch.setattr(launch.Build, "compile", lambda self: self.function.compile(self))


@pytest.mark.usefixtures("here")
def test_a_descriptor_is_encoded_once_for_an_address() -> None:
    run = CudaLauncher(1)
    add, compiled = adding_tiles(run)
    tensors = [torch.zeros(2, 8, 64, dtype=torch.bfloat16).unbind() for _ in range(2)]
    for x, y in (tensors[0], tensors[1], tensors[0], tensors[0]):
        add(x, y)
        encoded = (("map", x.data_ptr()), 8, 64, 64, 1)
        assert run.directly[-1][:13] == (*HANDED, [*encoded, y.data_ptr(), 5])
    first, second = (x.data_ptr() for x, _ in tensors)
    assert run.encoded == [first, first, second]  # the first of them to try it
    assert not compiled.publicly


@pytest.mark.usefixtures("here")
def test_encodings_are_forgotten_before_there_are_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    run = CudaLauncher(1)
    add, _ = adding_tiles(run)
    monkeypatch.setattr(launch, "MAX_ADDRESSES", 4)
    rows = torch.zeros(12, 8, 64, dtype=torch.bfloat16)
    for x in (*rows, *rows[-2:]):
        add(x, rows[0])
    ((*_, known),) = add.variant.described
    assert len(known) <= 4
    assert run.encoded[1:] == [x.data_ptr() for x in rows]
    assert [call[12][0] for call in run.directly] == [("map", x.data_ptr()) for x in (*rows, *rows[-2:])]


@pytest.mark.usefixtures("here")
def test_a_thread_uses_the_gpu_before_it_encodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also the first time, where the launcher is only tried, and where every launch encodes once more."""
    done: list[str] = []

    class Encodes(CudaLauncher):
        def encode(self, descriptor: Any, like: Any, _: Any) -> list[Any]:
            done.append("encoded")
            return super().encode(descriptor, like, _)

    monkeypatch.setattr(launch, "_ensure_context", lambda device: done.append("used"))
    add, _ = adding_tiles(Encodes(1))
    for x in torch.zeros(2, 8, 64, dtype=torch.bfloat16):
        add(x, x)
    assert done == ["used", "encoded", "used", "encoded", "used", "encoded"]


class EncodesOtherwise(CudaLauncher):
    """Makes something else of a descriptor."""

    def encode(self, descriptor: Any, like: Any, _: Any) -> list[Any]:
        return [("map", descriptor.base.data_ptr()), *descriptor.strides]


class TakesMore(CudaLauncher):
    """Needs to know more of a descriptor."""

    def encode(self, descriptor: Any, like: Any, device: Any, rank: Any) -> list[Any]:  # type: ignore[override]
        return [("map", device.index, rank), *descriptor.shape, *descriptor.strides]


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("launcher", [EncodesOtherwise, TakesMore, Appends])
def test_descriptors_that_are_not_encoded_go_to_triton(launcher: type[CudaLauncher]) -> None:
    run = launcher(1)
    add, compiled = adding_tiles(run)
    x = torch.zeros(8, 64, dtype=torch.bfloat16)
    for _ in range(2):
        add(x, x)
        *grid, descriptor, pointer, number = compiled.publicly.pop()
        assert (grid, pointer, number) == ([3, 1, 1], x.data_ptr(), 5)
        assert (descriptor.base is x, descriptor.shape, descriptor.strides) == (True, [8, 64], [64, 1])
    assert (run.directly, compiled.publicly) == ([], [])


# ----------------------------------------------------------------------------------------------------------
# The launcher of the version of Triton that is installed
# ----------------------------------------------------------------------------------------------------------


@gluon.jit
def copy_kernel(x_desc, out_desc, ROWS: gl.constexpr):
    tile = gl.allocate_shared_memory(x_desc.dtype, x_desc.block_type.shape, x_desc.layout)
    full = barriers(1)
    mbarrier.init(full.index(0), count=1)
    mbarrier.expect(full.index(0), x_desc.block_type.nbytes)
    row = gl.program_id(0) * ROWS
    tma.async_copy_global_to_shared(x_desc, [row, 0], full.index(0), tile)
    mbarrier.wait(full.index(0), 0)
    tma.async_copy_shared_to_global(out_desc, [row, 0], tile)
    tma.store_wait(0)


def copying() -> Launch:
    boxes = TmaTile(torch.zeros(256, 64, dtype=torch.bfloat16), (0, 1), (64, 64))
    return Launch(copy_kernel, 4, takes=("x_desc", "out_desc"), x_desc=boxes, out_desc=boxes, ROWS=64)


@pytest.mark.gpu
@pytest.mark.parametrize("direct", [True, False])
def test_both_ways_launch_the_same(direct: bool, monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    taken: list[Any] = []
    usual = CompiledKernel.__getitem__
    monkeypatch.setattr(CompiledKernel, "__getitem__", lambda self, grid: taken.append(grid) or usual(self, grid))
    if not direct:
        monkeypatch.setattr(entry, "_make_direct_entry", lambda compiled: None)
    scale = Launch(scale_kernel, 1, **scaling())
    add, copy = adding(), copying() if ON_HOPPER else None
    entry._find_entry.cache_clear()
    try:
        for number in range(3):
            x, out = tensors(device)
            add(x, out, number)
            assert torch.equal(out, x + number)
            x, out = torch.randn(2, 3, 8, device=device).unbind()
            scale(x, out, number)
            assert torch.equal(out, x * 0.5 + number)
            if copy is not None:
                x, out = torch.randn(2, 256, 64, device=device).bfloat16().unbind()
                copy(x, out)
                assert torch.equal(out, x)
    finally:
        entry._find_entry.cache_clear()
    assert taken == ([] if direct else [(2, 1, 1), (1, 1, 1), *([(4, 1, 1)] if copy else [])] * 3)


@pytest.mark.skipif(launch.INTERPRETED, reason="builds need compiled kernels")
def test_descriptors_are_recorded_as_triton_takes_them() -> None:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import make_backend
    from triton.runtime.jit import native_specialize_impl

    with launch.record_builds() as builds:
        copying()(*(torch.zeros(256, 64, dtype=torch.bfloat16),) * 2)
    (found,) = builds.values()
    backend = make_backend(GPUTarget("cuda", 90, 32))
    descriptor = copying().descriptions["x_desc"].of(torch.zeros(256, 64, dtype=torch.bfloat16))
    kind, _ = native_specialize_impl(backend, descriptor, False, True, True)
    assert found.signature["x_desc"] == kind


@pytest.fixture
def handed(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """What Triton's launcher hands to its function in C, where there is no driver to launch with."""
    taken: list[Any] = []

    def hand_over(*arguments: Any) -> None:
        *first, last = arguments
        # Arguments that are one sequence may be a tuple or a list.
        taken.append([*first, tuple(last)] if isinstance(last, list) else list(arguments))

    def describe(address: int, *rest: Any) -> Any:
        return ("map", address, str(rest))

    utils = SimpleNamespace(
        launch=functools.partial(hand_over),  # like a function in C no function in Python
        build_signature_metadata=lambda signature: str(signature).encode(),
        fill_tma_descriptor=describe,
        fill_tma_descriptor_tiled=describe,
    )
    # Triton 3.6 compiles a module for each kernel; later versions have one, whose types they take from it.
    monkeypatch.setattr(nvidia, "compile_module_from_src", lambda **_: utils, raising=False)
    monkeypatch.setattr(nvidia, "library_dirs", list, raising=False)
    monkeypatch.setattr(nvidia, "PyKernelArg", lambda **kind: kind, raising=False)
    driver = triton.runtime.driver
    before = driver._active
    driver.set_active(SimpleNamespace(utils=utils))
    yield taken
    driver._active = before


def loaded(signature: dict[str, Any], described: Sequence[dict[str, Any]] | None = None, **changes: Any) -> Any:
    """A variant of a kernel, as if it were on a GPU."""
    names = [*signature]
    source = SimpleNamespace(constants={}, signature=signature, fn=SimpleNamespace(arg_names=names))
    metadata = {
        "num_ctas": 1, "tensordesc_meta": described, "launch_cooperative_grid": True, "launch_pdl": True,
        "global_scratch_size": 0, "global_scratch_align": 1, "profile_scratch_size": 0, "profile_scratch_align": 1,
    }  # fmt: skip
    return Compiled(nvidia.CudaLauncher(source, SimpleNamespace(**{**metadata, **changes})))


SIGNATURE = {
    "x": "*fp32", "none": "constexpr", "sizes": Sizes("i32", "fp32", Strides("i64", "i32")), "scale": "fp32",  # type: ignore[arg-type]
    "BLOCK": "constexpr",
}  # fmt: skip

GIVEN = (4096, None, Sizes(5, 0.25, Strides(2**40, 1)), 0.5, 64)


def test_what_this_version_of_triton_hands_over_is_known(handed: list[Any]) -> None:
    compiled = loaded(SIGNATURE)
    compiled.run(3, 1, 1, 9, compiled.function, compiled.packed_metadata, None, None, None, *GIVEN)
    found = entry.find_entry(compiled)
    assert len(handed) == 1
    found.enqueue(3, 9, [*GIVEN])
    first, second = handed
    assert first == second
    assert not compiled.publicly


def test_scratch_memory_is_left_to_triton(handed: list[Any]) -> None:
    compiled = loaded(SIGNATURE, global_scratch_size=128)
    entry.find_entry(compiled).enqueue(3, 9, [*GIVEN])
    assert (handed, compiled.publicly) == ([], [(3, 1, 1, *GIVEN)])


def test_how_this_version_of_triton_encodes_descriptors_is_known(handed: list[Any]) -> None:
    described = [
        {"swizzle": i, "elem_size": 2, "elem_type": 10, "block_size": [4, 64], "fp4_padded": False} for i in (1, 2)
    ]
    tile = "tensordesc<bf16[4, 64],NVMMASharedLayout()>"
    compiled = loaded({"first": tile, "second": tile, **SIGNATURE}, described)
    bases = torch.zeros(2, 8, 64, dtype=torch.bfloat16).unbind()
    descriptors = [DescriptorTemplate(TmaTile(base, (0, 1), (4, 64))).of(base) for base in bases]
    start = (3, 1, 1, 9, compiled.function, compiled.packed_metadata)
    compiled.run(*start, None, None, None, *descriptors, *GIVEN)
    found = entry.find_entry(compiled, descriptors)
    assert found.encode is not None
    encoded = [part for encode, descriptor in zip(found.encode, descriptors) for part in encode(descriptor)]
    found.enqueue(3, 9, [*encoded, *GIVEN])
    first, second = handed
    assert first == second
    assert not compiled.publicly


def test_descriptors_lowered_to_pointers_are_left_to_triton(handed: list[Any]) -> None:
    compiled = loaded({"first": "tensordesc<bf16[4, 64]>", **SIGNATURE})
    assert entry.find_entry(compiled).encode is None
    entry.find_entry(compiled).enqueue(3, 9, ["descriptor", *GIVEN])
    assert (handed, compiled.publicly) == ([], [(3, 1, 1, "descriptor", *GIVEN)])
