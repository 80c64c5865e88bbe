"""The interpreter of the tests computes what Triton's does, and finds what hardware does not forgive."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from planned_calls import forget_plans

from warploom import flash_attention, linear_attention, lrpe_rotate, tpa_attention, tpa_decode
from warploom.runtime.backend import HAS_TRITON
from warploom.testing.conformance import draw_like

if not HAS_TRITON or torch.cuda.is_available():
    pytest.skip("needs Triton, and no GPU", allow_module_level=True)

import kernel_interpreter
import seeds
from kernel_interpreter.machine import KernelError
from kernel_interpreter.products import in_float32
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from warploom.device.hopper import tma
from warploom.ops.flash_attention.hopper.backward_fused import count_added, wait_until_added
from warploom.runtime.launch import Launch, TmaTile

Tensor = torch.Tensor
SEEDS = range(20)


KEYS, CACHE, FACTORS = (1, 50, 2, 16), (2, 150, 2, 16), (2, 90, 3, 2)
CALLS: dict[str, tuple[Callable[..., Tensor], list[tuple[int, ...] | None], dict[str, Any]]] = {
    "lrpe": (lrpe_rotate, [(2, 21, 3, 16), (8,)], {"activation": "silu"}),
    "lrpe, far": (lrpe_rotate, [(1, 40, 2, 22), (11,)], {"offset": 2**24}),
    "flash attention": (flash_attention, [KEYS] * 3, {"causal": True, "softcap": 3.0}),
    "decoding": (flash_attention, [(2, 1, 4, 16), CACHE, CACHE], {}),
    "linear attention": (linear_attention, [KEYS] * 3, {"encoding": "rotate", "theta": torch.rand(2, 8)}),
    "tpa_decode": (tpa_decode, [(2, 1, 3, 2), FACTORS, FACTORS, (2, 1, 2, 16), *[(2, 90, 2, 16)] * 2], {}),
    "tpa_attention": (tpa_attention, [(2, 9, 3, 2), *[(2, 9, 3, 2)] * 2, *[(2, 9, 2, 16)] * 3], {}),
    "tpa_attention, whole queries": (
        tpa_attention,
        [None, *[(2, 9, 3, 2)] * 2, (2, 9, 3, 16), *[(2, 9, 2, 16)] * 2],
        {},
    ),
}


def results(name: str) -> list[Tensor]:
    """The output of a call, and the gradients of its inputs."""
    forget_plans()
    function, shapes, options = CALLS[name]
    generator = seeds.generator(1)
    inputs = [
        None
        if shape is None
        else torch.randn(shape, generator=generator).requires_grad_(function is not tpa_decode)
        for shape in shapes
    ]
    out = function(*inputs, **options, backend="triton")
    wanted = [x for x in inputs if x is not None]
    grads = torch.autograd.grad(out, wanted, draw_like((out,))) if out.requires_grad else ()
    return [out.detach(), *grads]


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", CALLS)
def test_tritons_interpreter_computes_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = results(name)
    monkeypatch.setattr(Launch, "_interpret", kernel_interpreter.TRITONS)
    for one, other in zip(found, results(name), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5 * other.abs().max().item())


@gluon.jit
def copying_kernel(
    x_desc, out_desc, ARRIVALS: gl.constexpr, WAIT: gl.constexpr, PHASE: gl.constexpr, SLOT: gl.constexpr
):
    tiles = gl.allocate_shared_memory(gl.float32, [1, 16, 16], x_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    mbarrier.init(full.index(0), count=ARRIVALS)
    mbarrier.expect(full.index(0), x_desc.block_type.nbytes)
    tma.async_copy_global_to_shared(x_desc, [0, 0], full.index(0), tiles.index(SLOT))
    if WAIT:
        mbarrier.wait(full.index(0), PHASE)
    tile = tiles.index(0).load(gl.BlockedLayout([1, 1], [2, 16], [4, 1], [1, 0]))
    tiles.index(0).store(tile * 2.0)
    tma.async_copy_shared_to_global(out_desc, [0, 0], tiles.index(0))
    tma.store_wait(0)


def run(seed: int, **change: Any) -> bool:
    """Whether a copy comes out right."""
    x, out = torch.arange(12.0 * 16).view(12, 16), torch.full((12, 16), torch.nan)
    constants = {"ARRIVALS": 1, "WAIT": True, "PHASE": 0, "SLOT": 0} | change
    boxes = {name: TmaTile(like, (0, 1), (16, 16)) for name, like in (("x_desc", x), ("out_desc", out))}
    launch = Launch(copying_kernel, 1, takes=("x_desc", "out_desc"), **boxes, **constants)
    kernel_interpreter.interpret(launch, (x, out), seed)
    return torch.equal(out, 2 * x)


def test_copies() -> None:
    assert all(run(seed) for seed in SEEDS)
    right = {run(seed, WAIT=False) for seed in SEEDS}
    assert False in right, "what is not waited for comes at once every time"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ARRIVALS": 2}, "all wait"),
        ({"PHASE": 1, "ARRIVALS": 2}, None),  # the phase before is over: nothing is waited for
        ({"ARRIVALS": 0}, "more arrivals"),
        ({"SLOT": 1}, "buffer 1 of 1"),
    ],
)
def test_barriers_and_buffers(change: dict[str, int], message: str | None) -> None:
    if message is None:
        assert not all(run(seed, **change) for seed in SEEDS)
    else:
        with pytest.raises(KernelError, match=message):
            run(0, **change)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_bits_of_products_do_not_depend_on_the_order_of_a_sum(dtype: torch.dtype) -> None:
    """Nor on the shapes of tiles; one that is a number of float32 is that number."""
    generator = seeds.generator(4)
    a, b = torch.randn(3, 40, 64, generator=generator), torch.randn(64, 50, generator=generator)
    a[1] = (20 * a[1]).softmax(-1)  # numbers far apart
    a[2, 3, 5], a[2, 4, :], b[:, 7] = torch.inf, 0, 0
    a, b = a.to(dtype), b.to(dtype)
    for sheet in a:
        found = in_float32(sheet, b)
        for _ in range(5):
            order = torch.randperm(64, generator=generator)
            other = in_float32(sheet[:, order], b[order])
            assert torch.equal(found.nan_to_num(7), other.nan_to_num(7))
        transposed = in_float32(b.mT[5:9], sheet.mT[:, :3]).mT
        torch.testing.assert_close(found[:3, 5:9], transposed, rtol=0, atol=0, equal_nan=True)
        torch.testing.assert_close(found.double(), sheet.double() @ b.double(), rtol=1e-6, atol=0, equal_nan=True)
    assert torch.equal(in_float32(torch.eye(64), b), b.float())


@gluon.jit
def product_kernel(x, out, WAIT: gl.constexpr, OVERWRITE: gl.constexpr, BEYOND: gl.constexpr):
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    row = gl.arange(0, 64, gl.SliceLayout(1, LAYOUT))
    column = gl.arange(0, 64, gl.SliceLayout(0, LAYOUT))
    offsets = row[:, None] * 64 + column[None, :]
    tile = gl.load(x + offsets + BEYOND)
    shared = gl.allocate_shared_memory(
        gl.bfloat16, [64, 64], gl.NVMMASharedLayout.get_default_for([64, 64], gl.bfloat16)
    )
    shared.store(tile)
    acc = warpgroup_mma(shared, shared, gl.zeros([64, 64], gl.float32, LAYOUT), is_async=True)
    if OVERWRITE:
        shared.store(tile * 0.0)
    if WAIT:
        acc = warpgroup_mma_wait(0, deps=[acc])
    gl.store(out + offsets, acc)


def multiply(seed: int, **change: Any) -> bool:
    """Whether a product comes out right."""
    x, out = torch.randn(64, 64, generator=seeds.generator(2)).bfloat16(), torch.empty(64, 64)
    constants = {"WAIT": True, "OVERWRITE": False, "BEYOND": 0} | change
    kernel_interpreter.interpret(Launch(product_kernel, 1, takes=("x", "out"), **constants), (x, out), seed)
    return torch.equal(out, in_float32(x, x))


def test_products() -> None:
    assert all(multiply(seed) for seed in SEEDS)
    assert not all(multiply(seed, OVERWRITE=True) for seed in SEEDS), "factors are read at once every time"
    with pytest.raises(KernelError, match="before it is waited for"):
        multiply(0, WAIT=False)
    with pytest.raises(KernelError, match="beyond a tensor's memory"):
        multiply(0, BEYOND=1)


@gluon.jit
def adding_kernel(x_desc, out_desc, counter, SKIPPED: gl.constexpr, WAIT: gl.constexpr, STORED: gl.constexpr):
    tile = gl.allocate_shared_memory(gl.float32, [16, 16], x_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    mbarrier.init(full.index(0), count=1)
    mbarrier.expect(full.index(0), x_desc.block_type.nbytes)
    program = gl.program_id(0)
    tma.async_copy_global_to_shared(x_desc, [program * 16, 0], full.index(0), tile)
    mbarrier.wait(full.index(0), 0)
    if WAIT:
        wait_until_added(counter, program + SKIPPED)
    if program == 0:
        tma.async_copy_shared_to_global(out_desc, [0, 0], tile)
    else:
        tma.async_add(out_desc, [0, 0], tile)
    tma.store_wait(0)
    if STORED:
        tma.wait_stored()
    count_added(counter)


def add(seed: int, **change: Any) -> bool:
    """Whether programs add tiles to the first of them in their order, which the sum's bits depend on."""
    x, out = torch.randn(6 * 16, 16, generator=seeds.generator(3)), torch.full((16, 16), torch.nan)
    constants = {"SKIPPED": 0, "WAIT": True, "STORED": True} | change
    boxes = {name: TmaTile(like, (0, 1), (16, 16)) for name, like in (("x_desc", x), ("out_desc", out))}
    launch = Launch(adding_kernel, 6, takes=("x_desc", "out_desc", "counter"), **boxes, **constants)
    kernel_interpreter.interpret(launch, (x, out, torch.zeros(1, dtype=torch.int32)), seed)
    first, *rest = x.view(6, 16, 16)
    return torch.equal(out, functools.reduce(torch.add, rest, first))


def test_ordered_sums() -> None:
    assert all(add(seed) for seed in SEEDS)
    assert not all(add(seed, WAIT=False) for seed in SEEDS), "programs run in the order of their numbers every time"
    assert not all(add(seed, STORED=False) for seed in SEEDS), "what is read is in memory at once every time"
    with pytest.raises(KernelError, match="all wait"):
        add(0, SKIPPED=1)
