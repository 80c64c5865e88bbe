"""The short cut of the launcher: straight to a compiled variant, and only for calls which that was compiled for."""

import contextlib
import functools
import random
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from launches import driver_accepts

from warploom.runtime.backend import HAS_TRITON

if not HAS_TRITON:
    pytest.skip("needs Triton", allow_module_level=True)

import triton
import triton.language as tl
from launches import ON_HOPPER
from triton.backends.nvidia import driver as nvidia
from triton.compiler import CompiledKernel
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.language.extra.cuda import gdc_wait

from warploom.device.hopper import tma
from warploom.device.hopper.pipeline import barriers
from warploom.runtime import entry, launch
from warploom.runtime.descriptors import Description, descriptor_strides
from warploom.runtime.launch import (
    Boxes,
    Dense,
    Launch,
    architecture,
    can_be_copied,
    has_pdl,
    multiprocessors,
)
from warploom.testing.poison import poisoned_allocations

pytestmark = pytest.mark.stack
Tensor = torch.Tensor
SIZE, BLOCK = 100, 64


@triton.jit
def add_kernel(x, out, number: tl.int32, size: tl.int32, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, tl.load(x + i, mask=i < size) + number, mask=i < size)


def adding(size: int = SIZE) -> Launch:
    return Launch(add_kernel, -(-size // BLOCK), takes=("x", "out", "number"), size=size, BLOCK=BLOCK)


def tensors(device: torch.device, first: int = 0) -> tuple[Tensor, Tensor]:
    """Where to read and to write; misaligned unless ``first`` is a multiple of four."""
    x, out = torch.randn(2, SIZE + 4, device=device).unbind()
    return x[first : first + SIZE], out[first : first + SIZE]


def test_every_call_uses_its_own_tensors_and_number(device: torch.device) -> None:
    add = adding()
    for number, first in ((1, 0), (2, 0), (3, 1), (-4, 4), (5, 3), (6, 0)):
        x, out = tensors(device, first)
        add(x, out, number)
        assert torch.equal(out, x + number)


@pytest.fixture
def ways(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The way that each launch took."""
    taken: list[str] = []
    call, find = Launch.__call__, Launch._launch

    def directly(self: Launch, *given: Any) -> None:
        taken.append("direct")
        call(self, *given)

    def slowly(self: Launch, *arguments: Any) -> None:
        taken[-1] = "slow"
        find(self, *arguments)

    monkeypatch.setattr(Launch, "__call__", directly)
    monkeypatch.setattr(Launch, "_launch", slowly)
    return taken


@pytest.mark.gpu
def test_aligned_tensors_take_the_short_cut(ways: list[str], device: torch.device) -> None:
    add = adding()
    for first in (1, 0, 0, 3, 4):
        x, out = tensors(device, first)
        add(x, out, 7)
        assert torch.equal(out, x + 7)
    assert ways == ["slow", "slow", "direct", "slow", "direct"]


@pytest.mark.gpu
def test_another_device_takes_the_slow_way(ways: list[str]) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs a second GPU")
    add = adding()
    for index in (0, 0, 1, 1, 0):  # GPU 0 is the current one
        x, out = tensors(torch.device("cuda", index))
        add(x, out, 7)
        assert torch.equal(out, x + 7)
    assert ways == ["slow", "direct", "slow", "slow", "slow"]


@triton.jit
def reverse_kernel(x, out, size: tl.int32, BLOCK: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        gdc_wait()
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, tl.load(x + size - 1 - i, mask=i < size), mask=i < size)


def reversing(size: int, pdl: bool) -> Launch:
    takes = ("x", "out")
    return Launch(reverse_kernel, -(-size // BLOCK), takes=takes, pdl=pdl, size=size, BLOCK=BLOCK, PDL=pdl)


@pytest.mark.parametrize("size", [SIZE, pytest.param(2**24 + 4, marks=pytest.mark.gpu)])
def test_an_early_launch_sees_what_the_one_before_it_wrote(size: int, device: torch.device) -> None:
    # The first programs of the second launch read what the last ones of the first write.
    pdl = has_pdl(device)
    add, reverse = adding(size), reversing(size, pdl)
    x = torch.randint(-100, 100, (size,), device=device, dtype=torch.float32)
    for number in range(1 if size == SIZE else 20):
        between, out = torch.full_like(x, float("nan")), torch.full_like(x, float("nan"))
        add(x, between, number)
        reverse(between, out)
        assert torch.equal(out, (x + number).flip(0))


@pytest.mark.skipif(launch.INTERPRETED, reason="builds need compiled kernels")
@pytest.mark.parametrize(("arch", "pdl"), [(80, False), (90, True), (100, True)])
def test_dependent_launches_are_for_hopper_and_later(arch: int, pdl: bool) -> None:
    with launch.recording(arch) as builds:
        assert has_pdl(torch.device("cpu")) is pdl
        reversing(SIZE, pdl)(*tensors(torch.device("cpu")))
    (found,) = builds.values()
    assert found.options.get("launch_pdl", False) is pdl


@pytest.mark.parametrize("ask", [architecture, multiprocessors, has_pdl])
def test_tensors_without_memory_are_on_no_gpu(ask: Callable[[torch.device], int]) -> None:
    with pytest.raises(ValueError, match="meta"):
        ask(torch.device("meta"))


# ----------------------------------------------------------------------------------------------------------
# Names
# ----------------------------------------------------------------------------------------------------------


class Strides(NamedTuple):
    n: tl.int64
    f: tl.int32


class Sizes(NamedTuple):
    tokens: tl.int32
    scale: tl.float32
    strides: Strides


class Tile(NamedTuple):
    ROWS: int
    COLUMNS: int
    NEGATE: bool = False


@triton.jit
def scaled(pointer, at, sizes, tile: tl.constexpr):
    value = tl.load(pointer + at, mask=at < sizes.tokens * sizes.strides.n) * sizes.scale
    return -value if tile.NEGATE else value


@triton.jit
def scale_kernel(
    x, out, offset: tl.int32, sizes: Sizes, tile: tl.constexpr, bias=None, KIND: tl.constexpr = "plain"
):
    """``out = x · scale``, a row of features for each token. ``bias`` is one number."""
    n = tl.arange(0, tile.ROWS)[:, None].to(tl.int64)
    at = n * sizes.strides.n + tl.arange(0, tile.COLUMNS)[None, :] * sizes.strides.f
    value = scaled(x, at, sizes, tile) + offset
    if KIND == "biased":
        value += tl.load(bias)
    tl.store(out + at, value, mask=at < sizes.tokens * sizes.strides.n)


def scaling(**changes: Any) -> dict[str, Any]:
    sizes, tile = Sizes(3, 0.5, Strides(8, 1)), Tile(4, 8)
    given = {"takes": ("x", "out", "offset"), "sizes": sizes, "tile": tile, "bias": None, "KIND": "plain"}
    return {name: value for name, value in {**given, **changes}.items() if value is not ...}


@pytest.mark.parametrize("negate", [False, True])
def test_tuples_of_numbers_and_of_constants(negate: bool, device: torch.device) -> None:
    x, out = torch.randn(2, 3, 8, device=device).unbind()
    scale = Launch(scale_kernel, 1, **scaling(tile=Tile(4, 8, negate)))
    for offset in (2, 5):
        scale(x, out, offset)
        assert torch.equal(out, (-x if negate else x) * 0.5 + offset)


def test_a_tensor_that_only_some_launches_have(device: torch.device) -> None:
    x, out, bias = (torch.randn(3, 8, device=device) for _ in range(3))
    takes = ("x", "out", "bias", "offset")
    for given, kind, expected in ((None, "plain", x * 0.5 + 1), (bias, "biased", x * 0.5 + 1 + bias[0, 0])):
        for _ in range(2):
            Launch(scale_kernel, 1, **scaling(takes=takes, bias=..., KIND=kind))(x, out, given, 1)
            assert torch.equal(out, expected)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"size": 3}, "scale_kernel has no parameter size"),
        ({"takes": ("x", "out", "offset", "y")}, "scale_kernel has no parameter y"),
        ({"sizes": ..., "KIND": ...}, "scale_kernel is given no KIND, sizes"),
        ({"offset": 3}, "scale_kernel is given twice offset"),
        ({"takes": ("x", "out", "x", "offset")}, "scale_kernel is given twice x"),
        ({"bias": 3}, "scale_kernel is given something else than it declares for bias"),
        ({"sizes": (3, 0.5, (8, 1))}, "scale_kernel is given something else than it declares for sizes"),
        (
            {"offset": None, "takes": ("x", "out")},
            "scale_kernel is given something else than it declares for offset",
        ),
        ({"takes": ("x", "out", "offset", "tile"), "tile": ...}, "scale_kernel takes the constant tile"),
        ({"takes": ("offset", "x", "out")}, "scale_kernel does not take first a tensor, but offset"),
    ],
)
def test_arguments_that_do_not_fit(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=f"^{message}$"):
        Launch(scale_kernel, 1, **scaling(**changes))


@pytest.mark.parametrize("given", [2, 4])
def test_a_call_brings_as_many_arguments_as_it_said(given: int, device: torch.device) -> None:
    x = torch.zeros(3, 8, device=device)
    with pytest.raises(ValueError, match="zip"):
        Launch(scale_kernel, 1, **scaling())(*(x, x, 1, 1)[:given])


@triton.jit
def square_kernel(out, sizes: Sizes):
    tl.store(out, sizes.strides.n * sizes.strides.n)
    tl.store(out + 1, sizes.tokens * sizes.tokens)


def test_numbers_in_tuples_have_their_declared_width(device: torch.device) -> None:
    out = torch.zeros(2, dtype=torch.int64, device=device)
    Launch(square_kernel, 1, takes=["out"], sizes=Sizes(2**15, 1.0, Strides(2**20, 1)))(out)
    assert out.tolist() == [2**40, 2**30]


@pytest.mark.skipif(launch.INTERPRETED, reason="builds need compiled kernels")
def test_what_a_launch_is_compiled_from() -> None:
    x, out = torch.zeros(2, 3, 8)
    with launch.recording() as builds:
        for n, tokens in ((8, 3), (2**40, 1)):  # a variant for any value
            sizes = Sizes(tokens, 1.0, Strides(n, 1))
            Launch(scale_kernel, 1, num_warps=2, **scaling(sizes=sizes))(x, out, n // 8)
        Launch(scale_kernel, 1, **scaling())(x, out.flatten()[1:], 1)
        Launch(scale_kernel, 0, **scaling())(x.half(), out, 1)
    first, other = builds.values()
    assert first.signature == {
        "x": "*fp32", "out": "*fp32", "offset": "i32", "sizes": Sizes("i32", "fp32", Strides("i64", "i32")),  # type: ignore[arg-type]
        "tile": "constexpr", "bias": "constexpr", "KIND": "constexpr",
    }  # fmt: skip
    assert first.constexprs == {"tile": Tile(4, 8), "bias": None, "KIND": "plain"}
    assert first.attrs == {(i,): [["tt.divisibility", 16]] for i in range(2)}
    assert [*other.attrs] == [(0,)]
    assert (first.options, other.options) == ({"num_warps": 2, "num_stages": 3}, {"num_warps": 4, "num_stages": 3})
    from triton.backends.compiler import GPUTarget

    compiled = first.compile(GPUTarget("cuda", 90, 32))
    assert ".entry scale_kernel" in compiled.asm["ptx"]
    # The launcher unpacks nothing, and is handed no constants.
    assert [*compiled.src.signature.values()] == ["*fp32", "*fp32", "i32", "i32", "fp32", "i64", "i32"]


def test_names_of_tuples_are_no_part_of_a_variant() -> None:
    class Other(NamedTuple):
        first: int
        second: int
        third: bool

    def variant(tile: Any) -> str:
        return launch.Build(scale_kernel, {"tile": "constexpr"}, {"tile": tile}, {}, {}).variant

    assert variant(Tile(4, 8)) == variant(Other(4, 8, False)) != variant(Tile(4, 8, True))


# ----------------------------------------------------------------------------------------------------------
# Which variant a call launches
# ----------------------------------------------------------------------------------------------------------


class Stub:
    """Stands for a kernel, where there is no GPU to compile for."""

    def __init__(self, function: Any, not_aligned: Sequence[str] = ()) -> None:
        self.fn, self.__name__, self.do_not_specialize_on_alignment = function, function.__name__, not_aligned
        self.compiled: list[list[int]] = []  # of each variant, the parameters that it takes for aligned
        self.launched: list[Any] = []

    def compile(self, found: launch.Build) -> Any:
        aligned = [i for (i,) in found.attrs]
        self.compiled.append(aligned)
        return lambda *arguments: self.launched.append((aligned, *arguments))


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Stub]:
    """Makes stubs, whose variants tensors on the CPU are launched on."""
    monkeypatch.setattr(launch, "INTERPRETED", False)
    monkeypatch.setattr(launch, "_compiled", {})
    monkeypatch.setattr(launch, "_current_device", lambda: -1)
    monkeypatch.setattr(launch, "_current_stream", lambda device: 9)
    monkeypatch.setattr(launch, "entry_of", lambda compiled, descriptors: entry.Entry(compiled))
    monkeypatch.setattr(launch.Build, "compile", lambda self: self.function.compile(self))
    return Stub


def add(x, out, number: tl.int32, size: tl.int32, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """What a stub stands for."""


def test_a_variant_is_compiled_for_each_alignment(stub: Callable[..., Stub], ways: list[str]) -> None:
    kernel = stub(add)
    x, out = tensors(torch.device("cpu"))
    expected = []
    for launched in (Launch(kernel, 2, takes=("x", "out", "number"), size=SIZE, BLOCK=BLOCK) for _ in range(2)):
        for first, second, aligned in ((x[1:], out, [1]), (x, out, [0, 1]), (x, out, [0, 1]), (x, out[1:], [0])):
            launched(first, second, 5)
            expected.append((aligned, 2, 9, [first.data_ptr(), second.data_ptr(), 5, SIZE]))
    assert kernel.launched == expected
    assert kernel.compiled == [[1], [0, 1], [0]]  # for both launches together
    assert ways == ["slow", "slow", "direct", "slow"] * 2


def test_a_pointer_whose_alignment_does_not_count(stub: Callable[..., Stub], ways: list[str]) -> None:
    kernel = stub(add, ["out"])
    launched = Launch(kernel, 2, takes=("x", "out", "number"), size=SIZE, BLOCK=BLOCK)
    x, out = tensors(torch.device("cpu"))
    for first, second in ((x, out), (x, out[1:]), (x[1:], out)):
        launched(first, second, 5)
    assert kernel.compiled == [[0], []]
    assert ways == ["slow", "direct", "slow"]


def test_the_order_of_a_call_is_its_own(stub: Callable[..., Stub]) -> None:
    kernel = stub(add)
    x, out = tensors(torch.device("cpu"))
    launched = Launch(kernel, 2, takes=("out", "size", "x", "number"), BLOCK=BLOCK)
    for size in (7, 8):
        launched(out, size, x, 5)
        assert kernel.launched.pop()[3] == [x.data_ptr(), out.data_ptr(), 5, size]
    without = Launch(kernel, 2, takes=("x", "out", "number"), size=SIZE, BLOCK=BLOCK)
    for number in (5, 6):
        without(x, None, number)
        assert kernel.launched.pop()[3] == [x.data_ptr(), number, SIZE]


def test_no_programs_are_no_launch(stub: Callable[..., Stub]) -> None:
    kernel = stub(add)
    Launch(kernel, 0, takes=("x", "out", "number"), size=0, BLOCK=BLOCK)(*tensors(torch.device("cpu")), 5)
    assert (kernel.compiled, kernel.launched) == ([], [])


def test_tensors_of_another_device_take_the_slow_way(
    stub: Callable[..., Stub], ways: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    current, entered = [-1], []

    @contextlib.contextmanager
    def enter(device: int) -> Iterator[None]:
        entered.append(device)
        current[0], before = device, current[0]
        yield
        current[0] = before

    monkeypatch.setattr(launch, "_current_device", lambda: current[0])
    monkeypatch.setattr(torch.cuda, "device", enter)
    launched = Launch(stub(add), 2, takes=("x", "out", "number"), size=SIZE, BLOCK=BLOCK)
    given = tensors(torch.device("cpu"))
    launched(*given, 5)
    current[0] = 0
    launched(*given, 5)
    current[0] = -1
    launched(*given, 5)
    assert (ways, entered) == (["slow", "slow", "direct"], [-1])


def test_when_a_result_is_allocated_quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    current, quickly = [0], []

    def allocate(shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        quickly.append(shape)
        return torch.empty_strided(shape, stride, dtype=dtype)

    monkeypatch.setattr(launch, "_current_device", lambda: current[0])
    monkeypatch.setattr(launch, "_empty_cuda", allocate)
    near, planned = SimpleNamespace(get_device=lambda: 0, device="cpu"), Dense.rows((SIZE,), torch.float32)
    planned.empty(near)  # type: ignore[arg-type]
    assert quickly == [(SIZE,)]
    with poisoned_allocations():
        assert planned.empty(near).isnan().all()  # type: ignore[arg-type]
    current[0] = 1
    planned.empty(near)  # type: ignore[arg-type]
    planned.empty(torch.zeros(1))
    assert quickly == [(SIZE,)]


@pytest.mark.parametrize("shape", [(3,), (2, 3, 5), (4, 1, 2), (0, 3), (3, 0)])
def test_what_is_allocated(shape: tuple[int, ...], device: torch.device) -> None:
    expected = torch.empty(shape, dtype=torch.float16, device=device)
    for planned in (Dense.rows(shape, torch.float16), Dense.like(expected)):
        found = planned.empty(torch.zeros(1, device=device))
        assert (found.shape, found.stride()) == (expected.shape, expected.stride())
        assert (found.dtype, found.device) == (expected.dtype, expected.device)
    turned = torch.empty(2, 3, 5, device=device).transpose(0, 2)
    assert Dense.like(turned).empty(turned).stride() == turned.stride()
    with poisoned_allocations():
        assert Dense.rows(shape, torch.float16).empty(expected).isnan().all()


# ----------------------------------------------------------------------------------------------------------
# Triton's entry points
# ----------------------------------------------------------------------------------------------------------


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
        entry.entry_of(compiled).enqueue(3, 9, [1, 2, number])
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
        entry.entry_of(compiled).enqueue(3, 9, [1, 2, 5])
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
    boxes = Boxes(x, (0, 1), (4, 64))
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
    monkeypatch.setattr(launch, "MOST_ADDRESSES", 4)
    rows = torch.zeros(12, 8, 64, dtype=torch.bfloat16)
    for x in (*rows, *rows[-2:]):
        add(x, rows[0])
    ((*_, known),) = add.variant.described
    assert len(known) <= 4
    assert run.encoded[1:] == [x.data_ptr() for x in rows]
    assert [call[12][0] for call in run.directly] == [("map", x.data_ptr()) for x in (*rows, *rows[-2:])]


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
    boxes = Boxes(torch.zeros(256, 64, dtype=torch.bfloat16), (0, 1), (64, 64))
    return Launch(copy_kernel, 4, takes=("x_desc", "out_desc"), x_desc=boxes, out_desc=boxes, ROWS=64)


@pytest.mark.gpu
@pytest.mark.parametrize("direct", [True, False])
def test_both_ways_launch_the_same(direct: bool, monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    taken: list[Any] = []
    usual = CompiledKernel.__getitem__
    monkeypatch.setattr(CompiledKernel, "__getitem__", lambda self, grid: taken.append(grid) or usual(self, grid))
    if not direct:
        monkeypatch.setattr(entry, "_direct_entry", lambda compiled: None)
    scale = Launch(scale_kernel, 1, **scaling())
    add, copy = adding(), copying() if ON_HOPPER else None
    entry._entry_of.cache_clear()
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
        entry._entry_of.cache_clear()
    assert taken == ([] if direct else [(2, 1, 1), (1, 1, 1), *([(4, 1, 1)] if copy else [])] * 3)


@pytest.mark.skipif(launch.INTERPRETED, reason="builds need compiled kernels")
def test_descriptors_are_recorded_as_triton_takes_them() -> None:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import make_backend
    from triton.runtime.jit import native_specialize_impl

    with launch.recording() as builds:
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
    found = entry.entry_of(compiled)
    assert len(handed) == 1
    found.enqueue(3, 9, [*GIVEN])
    first, second = handed
    assert first == second
    assert not compiled.publicly


def test_scratch_memory_is_left_to_triton(handed: list[Any]) -> None:
    compiled = loaded(SIGNATURE, global_scratch_size=128)
    entry.entry_of(compiled).enqueue(3, 9, [*GIVEN])
    assert (handed, compiled.publicly) == ([], [(3, 1, 1, *GIVEN)])


def test_how_this_version_of_triton_encodes_descriptors_is_known(handed: list[Any]) -> None:
    described = [
        {"swizzle": i, "elem_size": 2, "elem_type": 10, "block_size": [4, 64], "fp4_padded": False} for i in (1, 2)
    ]
    tile = "tensordesc<bf16[4, 64],NVMMASharedLayout()>"
    compiled = loaded({"first": tile, "second": tile, **SIGNATURE}, described)
    bases = torch.zeros(2, 8, 64, dtype=torch.bfloat16).unbind()
    descriptors = [Description(Boxes(base, (0, 1), (4, 64))).of(base) for base in bases]
    start = (3, 1, 1, 9, compiled.function, compiled.packed_metadata)
    compiled.run(*start, None, None, None, *descriptors, *GIVEN)
    found = entry.entry_of(compiled, descriptors)
    assert found.encode is not None
    encoded = [part for encode, descriptor in zip(found.encode, descriptors) for part in encode(descriptor)]
    found.enqueue(3, 9, [*encoded, *GIVEN])
    first, second = handed
    assert first == second
    assert not compiled.publicly


def test_descriptors_lowered_to_pointers_are_left_to_triton(handed: list[Any]) -> None:
    compiled = loaded({"first": "tensordesc<bf16[4, 64]>", **SIGNATURE})
    assert entry.entry_of(compiled).encode is None
    entry.entry_of(compiled).enqueue(3, 9, ["descriptor", *GIVEN])
    assert (handed, compiled.publicly) == ([], [(3, 1, 1, "descriptor", *GIVEN)])


# ----------------------------------------------------------------------------------------------------------
# Which tensors there can be descriptors of
# ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "strides", "expected"),
    [
        ((2, 9, 3, 64), (1728, 192, 64, 1), (1728, 192, 64, 1)),
        ((1, 1, 1, 36), (108, 108, 36, 1), (16, 16, 16, 1)),  # what is never taken may be anything
        ((1, 5, 1, 64), (1, 64, 0, 1), (16, 64, 16, 1)),
        ((1, 1, 1, 1), (1, 1, 1, 1), (16, 16, 16, 1)),
        ((1, 1, 1, 1), (3, 3, 3, 3), (16, 16, 16, 1)),
        ((2, 9, 1), (9, 1, 9), None),  # keys are adjacent, and are no features
        ((2, 9, 1), (72, 8, 5), (72, 8, 1)),
        ((2, 9, 8), (72, 8, 2), None),
        ((2, 9, 8), (72, 12, 1), None),  # 24 bytes
        ((2, 9, 8), (0, 8, 1), None),
        ((2, 9, 8), (2**39, 8, 1), None),
        ((2, 9, 8), (2**39 - 8, 8, 1), (2**39 - 8, 8, 1)),
        ((1, 9, 8), (2**39, 8, 1), (16, 8, 1)),
        ((2, 0, 8), (8, 8, 1), None),
        ((2, 2**32 + 1, 8), (8, 8, 1), None),
    ],
)
def test_strides_that_a_descriptor_holds(shape: Any, strides: Any, expected: Any) -> None:
    assert descriptor_strides(shape, strides, 2) == expected


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_driver_accepts_every_descriptor_of_what_can_be_copied(dtype: torch.dtype) -> None:
    draw = random.Random(0)
    verdicts = {True: 0, False: 0}
    for _ in range(4000):
        shape = [draw.choice((1, 1, 2, 5, 64)) for _ in range(4)]
        *outer, last = (draw.choice((1, 3, 4, 8, 24, 64, 4096, 2**37, 2**38, 2**39)) for _ in range(4))
        strides = [*outer, draw.choice((1, 1, 1, last))]
        x = torch.empty_strided(shape, strides, dtype=dtype, device="meta")
        order = [*draw.sample(range(3), 3), 3]
        boxes = Boxes(x, tuple(order), (1, 1, 64, 64))
        taken = can_be_copied(x)
        verdicts[taken] += 1
        if taken:
            description = Description(boxes).fields
            assert driver_accepts(description), description
            for size, stride, axis in zip(description["shape"], description["strides"], order):
                assert size == x.shape[axis]
                assert size == 1 or stride == x.stride(axis)
        else:
            with pytest.raises(ValueError, match="no descriptor"):
                Description(boxes)
            apart = x.shape[-1] > 1 and x.stride(-1) != 1
            honest = [stride if size > 1 else 16 for size, stride in zip(shape, strides)]
            description = {"base": x, "shape": shape, "strides": [*honest[:3], 1], "block_shape": [1, 1, 64, 64]}
            assert apart or not driver_accepts(description), description
    assert min(verdicts.values()) > 400
