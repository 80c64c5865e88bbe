"""The names of the language, and what stands for them."""

from __future__ import annotations

import functools
import math
import operator
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
import triton.language as tl
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import ampere, hopper
from triton.language.extra import cuda

from kernel_interpreter import memory
from kernel_interpreter.machine import KernelError, current
from kernel_interpreter.memory import BARRIERS, Memory
from kernel_interpreter.products import in_float32
from kernel_interpreter.values import DTYPES, LAYOUT, Tensor, as_tensor, number, raw, together
from warploom.device.hopper import tma
from warploom.ops.flash_attention.hopper import softcap
from warploom.ops.flash_attention.hopper.backward_fused import wait_until_added


class Product(Tensor):
    """A sum of products of matrices, which may not be there yet."""

    def __init__(self, form: Callable[[], torch.Tensor], shape: tuple[int, int]) -> None:
        super().__init__(torch.empty(shape, device="meta"))
        self.compute, self.formed, self.waited_for = form, False, False

    def form(self) -> torch.Tensor:
        if not self.formed:
            self._value, self.formed = self.compute(), True
        return self._value

    @property
    def value(self) -> torch.Tensor:
        if not self.waited_for:
            raise KernelError("a product is used before it is waited for")
        return self._value


def product(a: Any, b: Memory, acc: Tensor, *, use_acc: Any = True, is_async: bool = False, **_: Any) -> Product:
    """``a · b + acc``, formed at any time until it is waited for."""
    thread = current()
    if isinstance(acc, Product) and not acc.waited_for and all(acc is not each for each in thread.products):
        raise KernelError("the sum of another partition")

    def factor(x: Any) -> torch.Tensor:
        return x.tensor if isinstance(x, Memory) else x.value

    def form() -> torch.Tensor:
        before = acc.form() if isinstance(acc, Product) else acc.value
        result = in_float32(factor(a), factor(b))
        return result + before if use_acc else result

    result = Product(form, (a.shape[0], b.shape[1]))
    if thread.machine.draw.random() < 0.5:
        result.form()
    thread.products.append(result)
    if not is_async:
        product_wait()
    return result


def product_wait(pending: int = 0, deps: Any = (), **_: Any) -> Any:
    products = current().products
    while len(products) > pending:
        first = products.pop(0)
        first.form()
        first.waited_for = True
    return deps[0] if len(deps) == 1 else tuple(deps)


def dot(a: Tensor, b: Tensor, acc: Tensor | None = None, *_: Any, **__: Any) -> Tensor:
    result = in_float32(a.value, b.value)
    return Tensor(result if acc is None else result + acc.value)


def warp_specialize(partitions: Any, *_: Any, **__: Any) -> None:
    thread = current()
    machine = thread.machine
    started = [machine.start(functools.partial(f, *arguments), thread.program) for f, arguments in partitions]
    thread.wait_for(lambda: not any(each in machine.threads for each in started), "its partitions")


def numbers(*bounds: Any, **_: Any) -> Iterator[Tensor]:
    """What a loop at run time goes over; it counts in so many bits as its bounds have."""
    begin, end, step = (0, *bounds, 1) if len(bounds) == 1 else (*bounds, 1)[:3]
    kind = functools.reduce(
        torch.promote_types, (x.value.dtype for x in bounds if isinstance(x, Tensor)), torch.int32
    )
    i, end, step = int(begin), int(end), int(step)
    while i < end if step > 0 else i > end:
        yield number(i, kind)
        i += step
        if kind == torch.int32:
            i = (i + 2**31) % 2**32 - 2**31


def elementwise(function: Callable[..., torch.Tensor]) -> Callable[..., Tensor]:
    return lambda *given, **_: Tensor(function(*(as_tensor(x) for x in given)))


def rounded_once(function: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    """A function of numbers whose bits do not depend on their place among others.

    PyTorch computes what fills a vector register otherwise than the rest; in float64 both round to one float32.
    """
    return lambda x: function(x.double()).to(x.dtype)


def binary(function: Callable[..., torch.Tensor]) -> Callable[..., Tensor]:
    return lambda x, y, **_: Tensor(function(*map(torch.as_tensor, together(x, y))))


def _least(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Passes over NaN, as hardware does."""
    return torch.fmin(x, y)


def _most(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.fmax(x, y)


def _where(condition: Any, x: Any, y: Any) -> Tensor:
    return Tensor(torch.where(as_tensor(condition), *together(x, y)))


def _extreme(function: Callable[..., torch.Tensor], nothing: float) -> Callable[..., Tensor]:
    def call(x: Tensor, axis: int | None = None, keep_dims: bool = False, **_: Any) -> Tensor:
        value = torch.where(x.value.isnan(), nothing, x.value) if x.value.is_floating_point() else x.value
        return Tensor(function(value) if axis is None else function(value, axis, keep_dims))

    return call


def _upper_half(x: Tensor, y: Tensor) -> Tensor:
    """Of the product of two numbers of 32 bits without a sign."""
    x, y = ((raw(each).numpy().astype("int64") & 0xFFFFFFFF).astype("uint64") for each in (x, y))
    return Tensor(torch.as_tensor((x * y >> 32).astype("int64")).to(torch.int32))


def _interleave(x: Tensor, y: Tensor) -> Tensor:
    return Tensor(torch.stack((x.value, y.value), -1).flatten(-2))


def _cast(x: Any, dtype: Any, bitcast: bool = False) -> Tensor:
    return Tensor(as_tensor(x)).to(dtype, bitcast)


def _cumsum(x: Tensor, axis: int, reverse: bool = False) -> Tensor:
    value = x.value.flip(axis) if reverse else x.value
    sums = value.cumsum(axis, dtype=value.dtype)
    return Tensor(sums.flip(axis) if reverse else sums)


def _scan(x: Tensor, axis: int, combine: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    found: list[Tensor] = []
    for each in x.value.unbind(axis):
        found.append(combine(found[-1], Tensor(each)) if found else Tensor(each))
    return Tensor(torch.stack([each.value for each in found], axis))


def _fma(x: Any, y: Any, z: Any) -> Tensor:
    x, y, z = (as_tensor(each).double() for each in (x, y, z))  # which hold the product exactly
    return Tensor((x * y + z).float())


def _full(shape: Any, value: Any, dtype: Any, layout: Any = None) -> Tensor:
    return Tensor(torch.full(tuple(shape), raw(value), dtype=DTYPES[dtype]))


_EXP2 = rounded_once(torch.exp2)


def _power_of_two(x: torch.Tensor) -> torch.Tensor:
    y = _EXP2(x)
    return torch.where(y < 2.0**-126, 0.0, y)


_ROUNDED = {"cvt.rn.bf16x2.f32 $0, $2, $1;": torch.bfloat16, "cvt.rn.f16x2.f32 $0, $2, $1;": torch.float16}
# What these say is tried in `test_softcap_on_hopper`.
_CAPPED = {softcap.CAPPED_32.value: False, softcap.CAPPED_64.value: False}
_CAPPED |= {softcap.EXPONENTIALS_32.value: True, softcap.EXPONENTIALS_64.value: True}
_CAPPED_WEIGHTS = (softcap.BFLOAT16_WEIGHTS.value, softcap.FLOAT16_WEIGHTS.value)


def _assembly(
    text: Any, constraints: Any, given: list[Any], dtype: Any, **_: Any
) -> Tensor | tuple[Tensor, Tensor]:
    text = getattr(text, "value", text)
    if text.startswith("prefetch."):
        return Tensor(memory.load(given[0]).value.int() * 0)  # it checks addresses
    if text == "ex2.approx.ftz.f32 $0, $1;":
        return Tensor(_power_of_two(given[0].value))
    if text in _ROUNDED:
        low, high = (each.value.to(_ROUNDED[text]).view(torch.int16).int() for each in given)
        return Tensor(low & 0xFFFF | high << 16)
    numbers = [as_tensor(each) for each in given]
    if text in _CAPPED:
        x, _, _, _, scale, cap, base = numbers
        capped = cap * rounded_once(torch.tanh)(x * scale) - base
        return Tensor(_power_of_two(capped) if _CAPPED[text] else capped)
    if text in _CAPPED_WEIGHTS:
        x, lse, cap = numbers
        weights = _power_of_two(cap * x - lse)
        return Tensor(weights.to(DTYPES[dtype[0]])), Tensor(weights * (1 - x * x))
    raise NotImplementedError(text)


LANGUAGE: dict[str, Any] = {
    **{dtype.name: dtype for dtype in DTYPES},
    **{str(name): getattr(tl, name) for name in ("float16", "bfloat16", "float32", "float64")},
    **dict.fromkeys(("SliceLayout", "BlockedLayout", "NVMMADistributedLayout", "NVMMASharedLayout"), LAYOUT),
    **dict.fromkeys(("SwizzledSharedLayout", "DotOperandLayout", "DistributedLinearLayout"), LAYOUT),
    "constexpr": lambda x: x,
    "static_range": range,
    "range": numbers,
    "debug_barrier": lambda: None,
    "max_contiguous": lambda x, _: x,
    "multiple_of": lambda x, _: x,
    "static_assert": lambda *_: None,
    "tensor": Tensor,
    "program_id": lambda axis: number(current().program),
    "num_programs": lambda axis: number(current().machine.programs),
    "num_warps": lambda: 4,
    "to_tensor": number,
    "allocate_shared_memory": memory.allocate,
    "warp_specialize": warp_specialize,
    "load": memory.load,
    "store": memory.store,
    "atomic_add": memory.atomic_add,
    "atomic_xchg": memory.atomic_xchg,
    "arange": lambda begin, end, layout=None: Tensor(torch.arange(begin, end, dtype=torch.int32)),
    "zeros": lambda shape, dtype, layout=None: _full(shape, 0, dtype),
    "full": _full,
    "where": _where,
    "minimum": binary(_least),
    "maximum": binary(_most),
    "add": binary(operator.add),
    "sub": binary(operator.sub),
    "mul": binary(operator.mul),
    "fma": _fma,
    "dot": dot,
    "sum": Tensor.sum,
    "max": _extreme(torch.amax, -math.inf),
    "min": _extreme(torch.amin, math.inf),
    "cdiv": lambda x, y: (x + (y - 1)) // y,
    "div_rn": binary(torch.div),
    "umulhi": _upper_half,
    "interleave": _interleave,
    "cast": _cast,
    "full_like": lambda x, value: Tensor(torch.full_like(x.value, value)),
    "zeros_like": lambda x: Tensor(torch.zeros_like(x.value)),
    "broadcast_to": lambda x, *shape: Tensor(as_tensor(x).broadcast_to(*shape)),
    "expand_dims": lambda x, axis: Tensor(x.value.unsqueeze(axis)),
    "permute": Tensor.permute,
    "reshape": Tensor.reshape,
    "cumsum": _cumsum,
    "associative_scan": _scan,
    "pointer_type": lambda kind: types.SimpleNamespace(element_ty=kind),
    "trans": lambda x, *order: Tensor(x.value.permute(*order) if order else x.value.T),
    "join": lambda x, y: Tensor(torch.stack((x.value, y.value), -1)),
    "split": Tensor.split,
    "convert_layout": lambda x, layout, **_: x,
    "inline_asm_elementwise": _assembly,
    "abs": elementwise(torch.abs),
    "floor": elementwise(torch.floor),
    "exp2": elementwise(_EXP2),
    "log": elementwise(rounded_once(torch.log)),
    "log2": elementwise(rounded_once(torch.log2)),
    "rsqrt": elementwise(torch.rsqrt),
    "sqrt_rn": elementwise(torch.sqrt),
    "cos": elementwise(rounded_once(torch.cos)),
    "sin": elementwise(rounded_once(torch.sin)),
}
BARRIER: dict[str, Any] = {
    "MBarrierLayout": lambda *_: BARRIERS,
    "init": memory.init,
    "arrive": memory.arrive,
    "expect": memory.expect,
    "wait": memory.wait,
}
COPIES: dict[str, Any] = {
    "async_copy_global_to_shared": memory.copy_in,
    "async_copy_shared_to_global": memory.copy_out,
    "async_add": memory.add_out,
    "matrix_in": memory.matrix_in,
    "tiles_in": memory.tiles_in,
    "boxes_in": memory.boxes_in,
    "store_wait": memory.store_wait,
    "wait_stored": memory.wait_stored,
}


class Names(types.SimpleNamespace):
    """A module of the language, with what of it is known here."""

    def __getattr__(self, name: str) -> Any:
        raise NotImplementedError(f"the interpreter knows no {name}")


def _nothing(*_: Any, **__: Any) -> None:
    """What is not known here: one thread at a time sees all memory as it is."""


_LANGUAGE = Names(**LANGUAGE)
_FUNCTIONS: list[tuple[Any, Any]] = [
    (gl, _LANGUAGE),
    (tl, _LANGUAGE),
    (hopper.mbarrier, Names(**BARRIER)),
    (tma, Names(**COPIES)),
    (hopper.warpgroup_mma, product),
    (hopper.warpgroup_mma_wait, product_wait),
    (hopper.fence_async_shared, _nothing),
    (wait_until_added, memory.wait_until_added),
    (ampere.mma_v2, dot),
    (cuda.gdc_wait, _nothing),
    (cuda.gdc_launch_dependents, _nothing),
    # Of several names in several versions of Triton.
    (getattr(gl, "barrier", None), _nothing),
    (getattr(gl, "thread_barrier", None), _nothing),
]
REPLACED = [(original, stand_in) for original, stand_in in _FUNCTIONS if original is not None]
