"""Whether a call does what it must: its results, and what it leaves behind, against the operators' contract."""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch

from random_cases.arrays import Placed, place
from random_cases.attention import SUMS
from random_cases.calls import Call
from random_cases.cancelling import (
    FACTORS,
    cancelling,
    rounded_decays,
    rounded_logits,
    rounded_rows,
    rounded_states,
    rounded_sums,
)
from random_cases.definitions import function_of, reference_of
from warploom.errors import BackendError
from warploom.ops.flash_attention.reference import factor_of
from warploom.testing.accuracy import Accuracy, as_tuple, compare_each, mean_of
from warploom.testing.poison import poisoned_allocations

__all__ = ["Failure", "Prepared", "Verdict", "judge", "judge_entry", "repeat"]

T = TypeVar("T")
Tensor = torch.Tensor

MORE_DRAWS = {"cuda": (4, 16, 64, 256), "cpu": (2, 6, 24)}
"""Fresh draws by whose mean a call is judged that missed its budget: a number of them, then more if that fails.

The first of these is too few to clear a call, and enough where an error is large."""
INDEPENDENT_OF_BATCH = frozenset({"linear_attention", "tpa_decode"})
"""Operators that promise the same bits for a batch entry alone and in any batch."""
LARGE = 2**18
"""Elements from which on results are compared where they are."""
FLOAT32 = 3 * 2.0**-24
"""The budget of a float32 number that the eager reference has rounded once, relative to it."""
FLOAT64 = 2.0**-40
"""The budget of float64, where the definition is no more exact than what is compared with it."""
ROUNDED_TOKENS = 16
"""Tokens after which a state that decays is rounded, at the most often."""
FLUSHED = 2.0**-112
"""Below it a result of float32 arithmetic may be zero: flushed denormals are a documented limit."""
CERTAIN = 3.0
"""A mean error over the mean budget that needs no more draws."""
BEYOND_LUCK = 16.0
"""An error over the mean budget that no draw has by chance, among a million of them."""


class Failure(Exception):
    """A call did not do what it must.

    Attributes:
        kind: What was wrong, in a word or two; shrinking keeps it.
        detail: One line for a person.
        fatal: Whether the process can run nothing more.
    """

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(f"{kind}: {detail}")
        self.kind, self.detail = kind, detail
        self.fatal = "CUDA error" in detail or "Triton Error [CUDA]" in detail


@dataclass(frozen=True)
class Verdict:
    """Of a call that is right."""

    ratio: float
    """The largest error over its budget."""
    redrawn: int
    """How many results missed the budget of the first draw, and kept that of more."""
    bits: list[Tensor]
    """Of the results, for `repeat`."""


class Prepared:
    """A call with its tensors in memory."""

    def __init__(self, call: Call, device: torch.device, backend: str | None = None, draw: int = 0) -> None:
        self.call, self.device, self.backend = call, device, backend
        seed = call.seed + 1_000_003 * draw
        self.arrays = {name: place(array, name, seed, device) for name, array in call.arrays.items()}
        self.alone = False  # one entry of the batch
        self.gradients: list[Placed | None] = [
            None if array is None else place(array, f"gradient {index}", seed, device)
            for index, array in enumerate(call.gradients)
        ]
        self.options = dict(call.options)
        if backend is not None and "backend" in self.options:
            self.options["backend"] = backend

    @property
    def in_torch(self) -> bool:
        """Whether PyTorch computes the call: by its choice, or because the kernels are for GPUs or other dtypes."""
        backend = self.options.get("backend", "triton")
        on_gpu = self.device.type == "cuda" and self.call.dtype != "float64"
        return backend == "torch" or (backend == "auto" and not on_gpu)

    def drawn(self, draw: int) -> Prepared:
        """The same call with other numbers."""
        return Prepared(self.call, self.device, self.backend, draw)

    def run(self) -> tuple[list[Tensor], list[Tensor]]:
        """Outputs, and gradients of the tensors that want one."""
        given: dict[str, Tensor | None] = {name: placed.tensor for name, placed in self.arrays.items()}
        if self.call.operator.startswith("tpa") and "aq" not in given:
            given = {"aq": None, **given}
        first = list(given.values())[: self.call.positional]
        named = dict(list(given.items())[self.call.positional :])
        function = function_of(self.call.operator)
        with _setting(self.call):
            outputs = list(as_tuple(function(*first, **named, **self.options)))
            shapes = tuple(tuple(output.shape) for output in outputs)
            if shapes != self.call.outputs and not self.alone:
                raise Failure("shape", f"of the results is {shapes}, expected {self.call.outputs}")
            incoming = [None if placed is None else placed.tensor for placed in self.gradients]
            return outputs, _gradients(outputs, list(given.values()), incoming)

    def defined(self, dtype: torch.dtype | None) -> list[Tensor]:
        """Outputs and gradients by the definition, in a dtype or in that of the inputs, all in one list."""
        given = self._for_the_definition(dtype)
        # Where PyTorch computes the call, its setting is part of what it is compared with.
        with _setting(self.call if self.in_torch else replace(self.call, matmul_precision="highest")):
            # A matrix library may add up a batch in another order than one entry, and with larger errors.
            definition = reference_of(self.call.operator, whole=self.in_torch and dtype is None)
            outputs = list(as_tuple(definition(**given)))
            incoming = [
                None if placed is None else placed.dense.to(output.dtype)
                for placed, output in zip(self.gradients, outputs)
            ]
            # The gradient of the output is a factor of the backward's products, as q, k and v are of the forward's.
            if self.call.operator == "flash_attention" and dtype is None and self.call.dtype == "float32":
                precision = given["float32_precision"]
                incoming = [None if grad is None else factor_of(grad, precision) for grad in incoming]
            return outputs + _gradients(outputs, [given[name] for name in self.arrays], incoming)

    def entry(self, index: int) -> Prepared:
        """The call with one entry of its batch alone, forward."""
        alone = copy.copy(self)
        tensors = {name: placed.tensor.detach() for name, placed in self.arrays.items()}
        alone.arrays = {
            name: replace(
                self.arrays[name], tensor=tensor if _is_shared(name, tensor) else tensor[index : index + 1]
            )
            for name, tensor in tensors.items()
        }
        alone.gradients, alone.alone = [], True
        return alone

    def cancelling(self) -> list[Tensor] | None:
        """What gradients may be off where nearly equal numbers are subtracted; see `cancelling`."""
        wanted, incoming = self._wanted()
        precision = self.options.get("float32_precision", self.call.matmul_precision)
        factors = precision if self.call.dtype == "float32" else self.call.dtype
        return cancelling(self.call.operator, self._for_the_definition(torch.float64), incoming, wanted, factors)

    def rounded_logits(self) -> list[Tensor] | None:
        """What results and gradients are off where logits are rounded; see `rounded_logits`."""
        wanted, incoming = self._wanted()
        given = self._for_the_definition(torch.float64)
        found = rounded_logits(self.call.operator, given, incoming, wanted if self.gradients else [])
        return found and found[: len(self.call.outputs)] + found[2:]

    def rounded_sums(self) -> Tensor | None:
        """What an output of attention may be off where float32 numbers are added up; see `rounded_sums`."""
        if self.call.dtype != "float32":
            return None
        return rounded_sums(self.call.operator, self._for_the_definition(torch.float64))

    def rounded_states(self) -> tuple[list[Tensor], list[Tensor]] | None:
        """What a state and the gradient of the first may be off where rows are decayed; see `rounded_states`."""
        dtype = getattr(torch, self.call.dtype)
        if self.call.operator != "linear_attention" or "decay" not in self.arrays or dtype.itemsize > 2:
            return None
        incoming = self._wanted()[1] or [None]
        return rounded_states(self._for_the_definition(torch.float64), incoming, dtype)

    def rounded_decays(self) -> dict[str, Tensor]:
        """What results may be off where decays are, by name; see `rounded_decays`."""
        if self.call.operator != "linear_attention" or "decay" not in self.arrays or self.call.dtype == "float64":
            return {}
        wanted, incoming = self._wanted()
        return rounded_decays(self._for_the_definition(torch.float64), incoming, wanted)

    def rounded_rows(self) -> list[Tensor] | None:
        """What gradients may be off where rows are decayed; see `rounded_rows`."""
        dtype = getattr(torch, self.call.dtype)
        if self.call.operator != "linear_attention" or "decay" not in self.arrays or dtype.itemsize > 2:
            return None
        wanted, incoming = self._wanted()
        return rounded_rows(self._for_the_definition(torch.float64), incoming, wanted, dtype)

    def _wanted(self) -> tuple[list[str], list[Tensor | None]]:
        """Names of what wants a gradient, and the gradients of results, exact."""
        wanted = [name for name, array in self.call.arrays.items() if array.grad]
        return wanted, [None if placed is None else placed.dense.double() for placed in self.gradients]

    def _for_the_definition(self, dtype: torch.dtype | None) -> dict[str, Any]:
        """Arguments of the definition; those of a dtype that is given are exact."""
        given: dict[str, Any] = {name: _as(placed.dense, dtype) for name, placed in self.arrays.items()}
        if self.call.operator.startswith("tpa"):
            given.setdefault("aq", None)
        given |= {name: value for name, value in self.options.items() if name != "backend"}
        if dtype is not None:
            given.pop("float32_precision", None)
        elif self.call.operator == "flash_attention":
            given.setdefault("float32_precision", self.call.matmul_precision)
        return given

    def changed(self) -> list[tuple[str, Tensor]]:
        """Of every tensor that came in, whether its memory has been written to."""
        named = [*self.arrays.items(), *((f"gradient {i}", g) for i, g in enumerate(self.gradients))]
        return [(name, placed.changed()) for name, placed in named if placed is not None]


def _is_shared(name: str, tensor: Tensor) -> bool:
    """Whether an argument is the same for all entries of a batch."""
    return name == "theta" or tensor.dim() == 0 or (name == "decay" and tensor.dim() == 1)


def _as(dense: Tensor, dtype: torch.dtype | None) -> Tensor:
    if not dense.is_floating_point():
        return dense
    return dense.detach().to(dtype or dense.dtype, copy=True).requires_grad_(dense.requires_grad)


def _gradients(
    outputs: Sequence[Tensor], inputs: Sequence[Tensor | None], incoming: Sequence[Tensor | None]
) -> list[Tensor]:
    """Gradients of every input that wants one; zeros where the outputs do not depend on it."""
    wanted = [value for value in inputs if value is not None and value.requires_grad]
    if not any(grad is not None for grad in incoming):
        return []
    pairs = [(o, grad) for o, grad in zip(outputs, incoming) if grad is not None and o.requires_grad]
    if not pairs:  # lse, of values that want a gradient
        return [torch.zeros_like(value) for value in wanted]
    through, grads = zip(*pairs)
    return list(torch.autograd.grad(through, wanted, grads, materialize_grads=True))


@contextlib.contextmanager
def _setting(call: Call) -> Iterator[None]:
    """What a call runs under."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(call.matmul_precision)
    try:
        with contextlib.nullcontext() if call.recorded else torch.no_grad():
            yield
    finally:
        torch.set_float32_matmul_precision(before)


# ----------------------------------------------------------------------------------------------------------
# Judging
# ----------------------------------------------------------------------------------------------------------


def judge(prepared: Prepared) -> Verdict:
    """Run a call and hold it to its contract.

    Raises:
        Failure: What is wrong.
    """
    call = prepared.call
    results = _compared(prepared)
    accuracies = results.accuracies
    missed = [index for index, accuracy in enumerate(accuracies) if not accuracy.ok]
    for index in missed:
        if accuracies[index].problem:
            raise Failure(f"{_kind(accuracies[index].problem)} {_name(call, index)}", accuracies[index].describe())
    if missed:
        _judge_again(prepared, [(index, accuracies[index]) for index in missed])
    ratio = max((accuracy.ratio for accuracy in accuracies if accuracy.ok), default=0.0)
    return Verdict(ratio, len(missed), results.bits)


def repeat(prepared: Prepared, verdict: Verdict) -> None:
    """Run a call again, which must give the same bits.

    Raises:
        Failure: It gives others.
    """
    outputs, gradients = _guarded(prepared.run)
    found = _guarded(functools.partial(_on_cpu, [*outputs, *gradients]))
    _check_bits(prepared.call, _bits(found), verdict.bits)


def judge_entry(prepared: Prepared, verdict: Verdict) -> int:
    """Where results do not depend on the batch, run one entry of it alone, which must give the same bits.

    Returns:
        How many calls that took.

    Raises:
        Failure: It gives others.
    """
    call = prepared.call
    batch = call.outputs[0][0]
    if call.operator not in INDEPENDENT_OF_BATCH or batch < 2 or prepared.in_torch:
        return 0
    entry = call.seed % batch
    outputs = _guarded(functools.partial(_run_on_kernels, prepared.entry(entry)))
    if outputs is None:
        return 0
    (found,) = _bits(_guarded(functools.partial(_on_cpu, outputs[:1])))
    expected = verdict.bits[0][entry : entry + 1]
    if not torch.equal(found.to(expected.device), expected):
        raise Failure("batch output", f"batch entry {entry} alone gives other bits than in a batch of {batch}")
    return 1


def _run_on_kernels(prepared: Prepared) -> list[Tensor] | None:
    """Outputs; None where the kernels refuse a call, which ``auto`` leaves to PyTorch."""
    if "backend" in prepared.options:
        prepared.options = prepared.options | {"backend": "triton"}
    try:
        return prepared.run()[0]
    except BackendError:
        return None


@dataclass(frozen=True)
class _Results:
    accuracies: list[Accuracy]
    bits: list[Tensor]


def _compared(prepared: Prepared, limits: bool = False) -> _Results:
    """What one draw came to; everything but accuracy is judged.

    Args:
        prepared: The call.
        limits: Whether what is a documented limit is added to every budget, even one that is kept without.
    """
    exact, eager = (_guarded(functools.partial(prepared.defined, dtype)) for dtype in (torch.float64, None))
    with poisoned_allocations():
        outputs, gradients = _guarded(prepared.run)
    found = [*outputs, *gradients]
    if len(found) != len(exact):
        raise Failure("results", f"{len(found)} where {len(exact)} are expected")
    _check_form(prepared, outputs)
    changed = prepared.changed()
    flags = [flag.reshape(1).double() for _, flag in changed]
    on_cpu = _guarded(functools.partial(_on_cpu, [*found, *exact, *eager, *flags]))
    for (name, _), flag in zip(changed, on_cpu[3 * len(found) :]):
        if bool(flag):
            raise Failure(f"modified {name}", "its memory, or what lies around it, has been written to")
    count = len(found)
    of_found, of_exact, of_eager = (on_cpu[i * count : (i + 1) * count] for i in range(3))
    bits = _bits(of_found)
    for index, one in enumerate(of_found):
        if one.dtype == torch.float16 and _name(prepared.call, index) == "gradient of theta":
            for results in (of_found, of_exact, of_eager):
                results[index] = _within_float16(results[index])
    compared = (tuple(of_found), tuple(of_exact), tuple(of_eager))
    accuracies = compare_each(*compared)
    if limits or not all(accuracy.ok for accuracy in accuracies):
        accuracies = _with_limits(prepared, accuracies, *compared)
    return _Results(accuracies, bits)


def _judge_again(prepared: Prepared, missed: list[tuple[int, Accuracy]]) -> None:
    """Judge results that missed their budget by fresh draws alone: the first was chosen for its error.

    One error beyond `BEYOND_LUCK` times the mean budget is wrong all the same.
    """
    draws: list[list[Accuracy]] = []
    fewest, *more = MORE_DRAWS[prepared.device.type]
    for count in (fewest, *more):
        while len(draws) < count:
            draws.append(_compared(prepared.drawn(len(draws) + 1), limits=True).accuracies)
        left = []
        for index, first in missed:
            mean = mean_of([draw[index] for draw in draws])
            if not mean.ok or first.max_error > BEYOND_LUCK * max(mean.error_budget, first.error_budget):
                left.append((index, first, mean))
        if count == fewest:
            if any(mean.ratio > BEYOND_LUCK for _, _, mean in left):
                break
            continue
        if not left:
            return
        missed = [(index, first) for index, first, _ in left]
        if any(mean.problem or mean.ratio > CERTAIN for _, _, mean in left):
            break
    index, first, mean = left[0]
    detail = f"{first.describe()}; mean of {len(draws)} more draws: {mean.describe()}"
    raise Failure(f"accuracy {_name(prepared.call, index)}", detail)


def _within_float16(x: Tensor) -> Tensor:
    """A gradient of theta in float16: what is beyond its largest number counts as that, and errors as any.

    Where terms are a million times what is left of them, an error may be more than the largest number.
    """
    largest = torch.finfo(torch.float16).max
    return x.clamp(-largest, largest)


def _without_error(found: Tensor, exact: Tensor, errors: Sequence[Tensor]) -> Tensor:
    """A result without one of the errors that it may have by its roundings, or as it is: whatever is nearest."""
    may_be = [found, *((found.double() - off.to(found.device).view_as(found)).to(found.dtype) for off in errors)]
    return min(may_be, key=lambda one: float((one.double() - exact).square().nan_to_num(torch.inf).sum()))


def _sizes(x: Tensor) -> tuple[float, float]:
    """The largest absolute value and the root mean square of what is finite."""
    finite = x[x.isfinite()]
    return (float(finite.abs().max()), float(finite.square().mean().sqrt())) if finite.numel() else (0.0, 0.0)


def _is_rounded_once(exact: Tensor, eager: Tensor) -> bool:
    """Whether the eager reference is off by half a unit in the last place of the largest number at most."""
    off = (eager.double() - exact).abs().nan_to_num(0.0, 0.0, 0.0)
    return float(off.max()) <= torch.finfo(eager.dtype).eps / 2 * _sizes(exact)[0]


def _has_equal_numbers(call: Call) -> bool:
    """Whether a tensor is expanded: then numbers of a block may all have one error, which is any draw's."""
    arrays = (*call.arrays.values(), *(array for array in call.gradients if array is not None))
    return any(array.stored_shape != array.shape and "float" in array.dtype for array in arrays)


def _off_in_all(call: Call, name: str) -> float:
    """What all numbers of a result may be off besides, relative to them.

    A state that decays is rounded once a tile. Matrix units cut off what does not fit into a sum, 16 tokens at a
    time: of 1025 tokens 1.3e-6, on an H100. The gradient of a first state is divided by the scale and multiplied
    with it, where the definition may copy it. Where numbers are equal, one rounding of a factor is that of all.
    """
    off = 0.0
    if call.dtype == "float64":
        return off
    if call.operator == "linear_attention" and name in ("state", "gradient of initial_state"):
        tiles, sixteen_bits = call.arrays["q"].shape[1] / ROUNDED_TOKENS, getattr(torch, call.dtype).itemsize == 2
        off = SUMS * (math.sqrt(tiles) * ("decay" in call.arrays) + tiles / 2 * sixteen_bits + (name != "state"))
    if call.dtype == "float32" and _has_equal_numbers(call):
        off += FACTORS.get(call.options.get("float32_precision") or call.matmul_precision, 0.0)
    return off


def _are_equal(x: Tensor) -> bool:
    """Whether what is finite of it is one number."""
    finite = x[x.isfinite()]
    return finite.numel() > 0 and bool((finite.max() - finite.min()).abs() <= FLOAT64 * finite.abs().max())


def _with_limits(
    prepared: Prepared,
    accuracies: list[Accuracy],
    found: tuple[Tensor, ...],
    exact: tuple[Tensor, ...],
    eager: tuple[Tensor, ...],
) -> list[Accuracy]:
    """Larger budgets for what is a documented limit.

    These are the rounding of numbers that are too small for all bits of their dtype, or flushed to zero; one unit
    in the last place of the largest number, which eager arithmetic does not lose where it only copies, as
    attention to a single key does, and the gradient of a state without decay, or adds up equal numbers, as many
    queries may have for a gradient in float32; what `cancelling` and the functions beside it say; and that a
    gradient of theta has the accuracy of float32, whatever its dtype. Where all values are equal, so are their
    errors, and their mean may be one unit too; and what `_off_in_all` says. A call in float64 has the accuracy of
    the definition. Blocks may be off by what of this is known element by element; of numbers that are expanded
    there are no blocks. One of the errors that `rounded_states` knows is taken out before anything is compared.
    """
    outputs = len(prepared.call.outputs)
    cancelled = prepared.cancelling() if prepared.call.gradients else None
    slack = cancelled or [torch.zeros(1)] * (len(found) - outputs)
    rows = prepared.rounded_rows() if prepared.call.gradients else None
    if rows is not None:
        slack = [a.abs() + b.to(a) for a, b in zip(slack, rows)]
    rounded = None if prepared.call.dtype == "float64" else prepared.rounded_logits()
    sums = prepared.rounded_sums()
    decayed = prepared.rounded_states()
    off_decays = prepared.rounded_decays()
    if decayed is not None:
        names = [_name(prepared.call, index) for index in range(len(found))]
        known = {"state": decayed[0], "gradient of initial_state": decayed[1]}
        found = tuple(_without_error(one, two, known.get(name, [])) for name, one, two in zip(names, found, exact))
        accuracies = compare_each(found, exact, eager)
    result: list[Accuracy] = []
    spared: list[Tensor | None] = []
    for index, (accuracy, dtype) in enumerate(zip(accuracies, [one.dtype for one in found])):
        if accuracy.problem or not found[index].numel():
            result.append(accuracy)
            spared.append(None)
            continue
        name = _name(prepared.call, index)
        floor = 2.0**-25 if dtype == torch.float16 else FLUSHED
        most, mean = floor + torch.finfo(dtype).eps / 2 * _sizes(exact[index])[0], floor
        spare = torch.full_like(exact[index], floor)
        if index >= outputs and name != "gradient of initial_state":
            unit = most if dtype == torch.float32 and _is_rounded_once(exact[index], eager[index]) else 0.0
            most, mean = (2 * size + floor for size in _sizes(slack[index - outputs]))
            most += unit
            spare += 2 * slack[index - outputs].to(spare).abs().nan_to_num(0.0, 0.0)
        elif _are_equal(exact[index]):
            mean = most
            spare += most
        errors = [_off_in_all(prepared.call, name) * exact[index]]
        errors += [sums] if sums is not None and index == 0 else []
        errors += [2 * rounded[index]] if rounded is not None else []
        errors += [off_decays[name]] if name in off_decays else []
        for error in errors:
            most, mean = (a + b for a, b in zip((most, mean), _sizes(error)))
            spare += error.to(spare).abs().nan_to_num(0.0, 0.0)
        relative = FLOAT64 if prepared.call.dtype == "float64" else 0.0
        if dtype == torch.float64 and (name == "gradient of theta" or prepared.call.dtype != "float64"):
            relative = FLOAT32
        if relative:
            largest, typical = _sizes(exact[index])
            most, mean = most + relative * (1 + largest), mean + relative * (1 + typical)
            spare += relative * (1 + largest)
        error_budget, rms_budget = accuracy.error_budget + most, accuracy.rms_budget + mean
        ok = accuracy.max_error <= error_budget and accuracy.rms_error <= rms_budget
        result.append(replace(accuracy, ok=ok, error_budget=error_budget, rms_budget=rms_budget))
        spared.append(spare)
    if _has_equal_numbers(prepared.call):
        return [replace(one, block_ratio=0.0, block=()) for one in result]
    blocks = [(one.block_ratio, one.block) for one in compare_each(found, exact, eager, spared=spared)]
    return [
        replace(one, ok=one.ok and ratio <= 1, block_ratio=ratio, block=block)
        for one, (ratio, block) in zip(result, blocks)
    ]


def _check_form(prepared: Prepared, outputs: Sequence[Tensor]) -> None:
    """Memory order of the first output, and whether gradients are recorded."""
    call = prepared.call
    wanted = call.recorded and any(array.grad for array in call.arrays.values())
    if outputs[0].requires_grad != wanted:
        raise Failure("requires_grad output", f"is {outputs[0].requires_grad}, expected {wanted}")
    like = next(call.arrays[name] for name in ("x", "q", "qkv", "aq", "bq") if name in call.arrays)
    out = outputs[0]
    if out.dim() != len(like.shape) or out.numel() == 0:
        return
    axes = [axis for axis in range(out.dim()) if out.shape[axis] > 1]
    strides = {axis: stride for axis, stride in enumerate(like.memory.strides) if like.shape[axis] > 1 and stride}
    for a, b in itertools.combinations([axis for axis in axes if axis in strides], 2):
        if (strides[a] - strides[b]) * (out.stride(a) - out.stride(b)) < 0:
            detail = f"strides {out.stride()} for an input of shape {like.shape} and strides {like.memory.strides}"
            raise Failure("memory order", detail)
    extent = sum((out.shape[axis] - 1) * out.stride(axis) for axis in axes) + 1
    if extent != out.numel():
        raise Failure("memory order", f"strides {out.stride()} leave gaps in an output of shape {tuple(out.shape)}")


def _check_bits(call: Call, found: list[Tensor], expected: list[Tensor]) -> None:
    for index, (one, other) in enumerate(zip(found, expected, strict=True)):
        one = one.to(other.device)  # large results stay on theirs
        if not torch.equal(one, other):
            differing = int((one != other).sum())
            raise Failure(f"bits {_name(call, index)}", f"{differing} of {one.numel()} differ from the first run's")


def _guarded(run: Callable[[], T]) -> T:
    """Run, with any error as a failure."""
    try:
        return run()
    except Failure:
        raise
    except Exception as error:  # of any library below: each is a finding
        text = " ".join(str(error).split())[:300]
        words = " ".join(re.findall(r"[A-Za-z_]+", text)[:5])  # sizes in it change while a call is simplified
        raise Failure(f"{type(error).__name__} {words}", text) from error


def _on_cpu(tensors: list[Tensor]) -> list[Tensor]:
    """Copies on the CPU, by one transfer, of tensors that are small: a GPU takes longer for each than for all."""
    tensors = [tensor.detach() for tensor in tensors]
    if not tensors or not tensors[0].is_cuda or sum(tensor.numel() for tensor in tensors) > LARGE:
        return tensors
    flat = torch.cat([tensor.reshape(-1).double() for tensor in tensors]).cpu()
    parts = flat.split([tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape).to(tensor.dtype) for part, tensor in zip(parts, tensors)]


def _bits(results: list[Tensor]) -> list[Tensor]:
    """As integers, so that a NaN equals a NaN."""
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    same = [result.masked_fill(result.isnan(), torch.nan) for result in results]
    return [result.contiguous().view(integers[result.element_size()]) for result in same]


def _name(call: Call, index: int) -> str:
    """What a result is called."""
    outputs = ("output", "state" if call.operator == "linear_attention" else "lse")[: len(call.outputs)]
    if index < len(outputs):
        return outputs[index]
    wanted = [name for name, array in call.arrays.items() if array.grad]
    return f"gradient of {wanted[index - len(outputs)]}"


def _kind(problem: str) -> str:
    """What is wrong besides size of error, in a word or two."""
    return next((word for word in ("NaN", "infinity", "shape", "dtype") if word in problem), "problem")
