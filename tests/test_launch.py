"""The short cut of the launcher: straight to a compiled variant, and only for calls which that was compiled for."""

import contextlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from warploom.runtime.backend import HAS_TRITON

if not HAS_TRITON:
    pytest.skip("needs Triton", allow_module_level=True)

import triton
import triton.language as tl
from launch_cases import BLOCK, SIZE, Sizes, Strides, Stub, Tile, add, adding, scale_kernel, scaling, tensors
from triton.language.extra.cuda import gdc_wait

from warploom.runtime import entry, launch
from warploom.runtime.launch import Buffer, Launch, architecture, has_pdl, multiprocessors
from warploom.testing.poison import poison_allocations

pytestmark = pytest.mark.stack
Tensor = torch.Tensor


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
    with launch.record_builds(arch) as builds:
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
    with launch.record_builds() as builds:
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
    assert not other.attrs
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


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Stub]:
    """Makes stubs, whose variants tensors on the CPU are launched on."""
    monkeypatch.setattr(launch, "INTERPRETED", False)
    monkeypatch.setattr(launch, "_compiled", {})
    monkeypatch.setattr(launch, "_current_device", lambda: -1)
    monkeypatch.setattr(launch, "_current_stream", lambda device: 9)
    monkeypatch.setattr(launch, "find_entry", lambda compiled, descriptors: entry.KernelEntry(compiled))
    monkeypatch.setattr(launch.Build, "compile", lambda self: self.function.compile(self))
    return Stub


def test_variants_are_for_aligned_tensors_and_for_others(stub: Callable[..., Stub], ways: list[str]) -> None:
    kernel = stub(add)
    x, out = tensors(torch.device("cpu"))
    expected = []
    for launched in (Launch(kernel, 2, takes=("x", "out", "number"), size=SIZE, BLOCK=BLOCK) for _ in range(2)):
        for first, second, aligned in ((x[1:], out, []), (x, out, [0, 1]), (x, out, [0, 1]), (x, out[1:], [])):
            launched(first, second, 5)
            expected.append((aligned, 2, 9, [first.data_ptr(), second.data_ptr(), 5, SIZE]))
    assert kernel.launched == expected
    assert kernel.compiled == [[], [0, 1]]  # for both launches together
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

    launched = Launch(stub(add), 2, takes=("x", "out", "number"), size=SIZE, BLOCK=BLOCK)
    given = tensors(torch.device("cpu"))
    with monkeypatch.context() as patch:  # what follows the test needs PyTorch's own
        patch.setattr(launch, "_current_device", lambda: current[0])
        patch.setattr(torch.cuda, "device", enter)
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
    near, planned = SimpleNamespace(get_device=lambda: 0, device="cpu"), Buffer.rows((SIZE,), torch.float32)
    planned.empty(near)  # type: ignore[arg-type]
    assert quickly == [(SIZE,)]
    with poison_allocations():
        assert planned.empty(near).isnan().all()  # type: ignore[arg-type]
    current[0] = 1
    planned.empty(near)  # type: ignore[arg-type]
    planned.empty(torch.zeros(1))
    assert quickly == [(SIZE,)]


@pytest.mark.parametrize("shape", [(3,), (2, 3, 5), (4, 1, 2), (0, 3), (3, 0)])
def test_what_is_allocated(shape: tuple[int, ...], device: torch.device) -> None:
    expected = torch.empty(shape, dtype=torch.float16, device=device)
    for planned in (Buffer.rows(shape, torch.float16), Buffer.like(expected)):
        found = planned.empty(torch.zeros(1, device=device))
        assert (found.shape, found.stride()) == (expected.shape, expected.stride())
        assert (found.dtype, found.device) == (expected.dtype, expected.device)
    turned = torch.empty(2, 3, 5, device=device).transpose(0, 2)
    assert Buffer.like(turned).empty(turned).stride() == turned.stride()
    with poison_allocations():
        assert Buffer.rows(shape, torch.float16).empty(expected).isnan().all()
