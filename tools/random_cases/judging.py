"""Judges if a call does what it must: its results, and what it leaves behind, against the operators' contract."""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch

from random_cases.arrays import Placed, place
from random_cases.calls import Call
from random_cases.definitions import function_of, reference_of
from warploom.errors import BackendError
from warploom.ops.flash_attention.reference import factor_of
from warploom.testing.accuracy import Accuracy, as_tuple, compare_each, mean_of
from warploom.testing.poison import poison_allocations

__all__ = ["Failure", "Prepared", "Verdict", "gradients_of", "judge", "judge_entry", "repeat"]

T = TypeVar("T")
Tensor = torch.Tensor

LUCK = 16.0
"""An error over the mean budget that no draw has by chance."""
STAGES = {"cuda": ((4, LUCK), (16, 3.0), (64, 3.0), (256, 1.0)), "cpu": ((2, LUCK), (6, 3.0), (24, 1.0))}
"""Fresh draws by whose mean a call is judged that missed its budget, and the ratio that needs no more of them."""
FEW = 4
"""Draws that clear no call."""
EQUAL = 4.0
"""Budgets of a call whose tensors are expanded: numbers that are equal all have one error."""
LEFT = 64.0
"""Roundings of a factor that may be left where the terms of a gradient cancel."""
NOTHING = 1e-12
"""The largest number of a result of which nothing is left."""
ROUNDED = {"float64": 2.0**-40, "float32": 2.0**-20, "float16": 2.0**-16, "bfloat16": 2.0**-16}
"""The accuracy of float32 and float64 results of a call in a dtype, relative to the largest number.

Sums over tokens have no more: matrix units cut off what does not fit, and a state is rounded with each tile. The
gradient of theta has that of float32 at the best."""
FACTORS = {"float64": 2.0**-40, "highest": 2.0**-24, "high": 2.0**-11, "float16": 2.0**-11}
"""Rounding of a factor of a product, by dtype or by precision; otherwise 2⁻⁹."""
FLUSHED = 2.0**-112
"""Below it a result may be zero: flushed denormals are a documented limit."""
INDEPENDENT_OF_BATCH = frozenset({"linear_attention", "delta_attention", "short_convolution", "tpa_decode"})
"""Operators that promise the same bits for a batch entry alone and in any batch."""
LARGE = 2**18
"""Elements from which on results are compared where they are."""


class Failure(Exception):
    """A call did not do what it must.

    Attributes:
        kind: What was wrong, in a word or two; shrinking keeps it.
        detail: One line for a person.
        fatal: True if the process can run nothing more.
    """

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(f"{kind}: {detail}")
        self.kind, self.detail = kind, detail
        self.fatal = "CUDA error" in detail or "Triton Error [CUDA]" in detail


@dataclass(frozen=True)
class Verdict:
    """The figures of a call that is right."""

    ratio: float
    """The largest error over its budget."""
    redrawn: int
    """The number of results that missed the budget of the first draw, and kept that of more."""
    bits: list[Tensor]
    """Bits of the results, for `repeat`."""


class Prepared:
    """A call with its tensors in memory."""

    def __init__(self, call: Call, device: torch.device, backend: str | None = None, draw: int = 0) -> None:
        self.call, self.device, self.backend = call, device, backend
        seed = call.seed + 1_000_003 * draw
        self.arrays = {name: place(array, name, seed, device) for name, array in call.arrays.items()}
        for name, array in call.arrays.items():
            if array.within:
                self.arrays[name] = self.arrays[array.within].first_features(array.shape[-1])
        self.alone = False  # one entry of the batch
        self.gradients: list[Placed | None] = [
            None if array is None else place(array, f"gradient {index}", seed, device)
            for index, array in enumerate(call.gradients)
        ]
        self.options = dict(call.options)
        if backend is not None and "backend" in self.options:
            self.options["backend"] = backend
            if backend != "triton":
                self.options.pop("bits", None)

    @property
    def in_torch(self) -> bool:
        """True if PyTorch computes the call: by its choice, or as kernels are for GPUs and other dtypes."""
        backend = self.options.get("backend", "triton")
        on_gpu = self.device.type == "cuda" and self.call.dtype != "float64"
        return backend == "torch" or (backend == "auto" and not on_gpu)

    def drawn(self, draw: int) -> Prepared:
        """Returns the same call with other numbers."""
        return Prepared(self.call, self.device, self.backend, draw)

    def run(self) -> tuple[list[Tensor], list[Tensor]]:
        """Returns outputs, and gradients of the tensors that want one."""
        given: dict[str, Tensor | None] = {"aq": None} if self.call.lacks_aq else {}
        given |= {name: placed.tensor for name, placed in self.arrays.items()}
        first = list(given.values())[: self.call.positional]
        named = {**dict(list(given.items())[self.call.positional :]), **self.options}
        if "out" in named:
            named["out"] = self.place_for_results(given["q"])
        with _setting(self.call):
            function = function_of(self.call.operator)
            if self.call.forward_mode:
                return self.differentiate(function, given, self.options)
            outputs = list(as_tuple(function(*first, **named)))
            shapes = tuple(tuple(output.shape) for output in outputs)
            if shapes != self.call.outputs and not self.alone:
                raise Failure("shape", f"of the results is {shapes}, expected {self.call.outputs}")
            incoming = [None if placed is None else placed.tensor for placed in self.gradients]
            return outputs, gradients_of(outputs, given.values(), incoming)

    def differentiate(
        self, function: Callable[..., Any], given: dict[str, Any], options: dict[str, Any]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Returns outputs of a function and their tangents, for random ones of what would want a gradient."""
        wanted = [name for name, x in given.items() if torch.is_tensor(x) and x.requires_grad]
        generator = torch.Generator().manual_seed(self.call.seed)
        # PyTorch's own views of lazily negated tensors fail with a tangent.
        primals = [given[name].detach().resolve_neg() for name in wanted]
        tangents = [torch.randn(x.shape, generator=generator, dtype=torch.float64) for x in primals]
        # Of frequencies, at positions of millions, they are as small as these make it necessary.
        sizes = [2.0**-24 if name == "theta" else 1.0 for name in wanted]
        own = [self.arrays[name].tensor.dtype for name in wanted]  # in which they are rounded
        tangents = [
            (dx * size).to(dtype).to(x.device, x.dtype) for dx, size, dtype, x in zip(tangents, sizes, own, primals)
        ]

        def run(*values: Tensor) -> Any:
            return function(**{**given, **dict(zip(wanted, values)), **options})

        try:
            found = torch.func.jvp(run, tuple(primals), tuple(tangents))
        except BackendError as error:
            if "forward mode" not in str(error):
                raise
            return self.differentiate(function, given, {**options, "backend": "auto"})
        return list(as_tuple(found[0])), list(as_tuple(found[1]))

    def place_for_results(self, q: Tensor | None) -> Tensor:
        """Returns a tensor of NaN, with heads before tokens in memory and gaps between rows."""
        assert q is not None
        *rest, features = self.call.outputs[0]
        batch, tokens, heads = (q.shape[0], *rest[1:])
        whole = q.new_full((batch, heads, tokens, features + 3), torch.nan)
        return whole[..., :features].transpose(1, 2)

    def define(self, dtype: torch.dtype | None) -> list[Tensor]:
        """Returns outputs and gradients by the definition, in a dtype or in that of the inputs."""
        given: dict[str, Any] = {"aq": None} if self.call.lacks_aq else {}
        given |= {name: _as(placed.dense, dtype) for name, placed in self.arrays.items()}
        given |= {n: value for n, value in self.options.items() if n not in ("backend", "bits", "out")}
        rounded = self.call.operator == "flash_attention" and dtype is None
        if not rounded:
            given.pop("float32_precision", None)
        else:
            given.setdefault("float32_precision", self.call.matmul_precision)
        # Where PyTorch computes the call, its setting is part of what it is compared with.
        with _setting(self.call if self.in_torch else replace(self.call, matmul_precision="highest")):
            # A matrix library may add up a batch in another order than one entry, and with larger errors.
            definition = reference_of(self.call.operator, whole=self.in_torch and dtype is None)
            if self.call.forward_mode:
                outputs, tangents = self.differentiate(definition, given, {})
                return outputs + tangents
            outputs = list(as_tuple(definition(**given)))
            incoming = [
                None if placed is None else placed.dense.to(output.dtype)
                for placed, output in zip(self.gradients, outputs)
            ]
            # The gradient of the output is a factor of the backward's products, as q, k and v are of the forward's.
            if rounded and self.call.dtype == "float32":
                incoming = [g if g is None else factor_of(g, given["float32_precision"]) for g in incoming]
            return outputs + gradients_of(outputs, given.values(), incoming)

    def entry(self, index: int) -> Prepared:
        """Returns the call with one entry of its batch alone, forward, at the strides that it has in the batch.

        PyTorch copies what is yet to be negated, and a batch in another order than an entry.
        """
        alone = copy.copy(self)
        tensors = {name: placed.tensor.detach().resolve_neg() for name, placed in self.arrays.items()}
        whole = ("theta", "weight", *(("bias",) if self.call.operator == "short_convolution" else ()))
        axes = {"decay": 2, "alibi": 2}  # with an axis of the batch
        shared = [name for name, x in tensors.items() if name in whole or x.dim() < axes.get(name, 1)]
        shared += [name for name in ("mask", "bias") if name in tensors and tensors[name].shape[0] == 1]
        parts = {name: x if name in shared else x[index : index + 1] for name, x in tensors.items()}
        alone.arrays = {name: replace(self.arrays[name], tensor=part) for name, part in parts.items()}
        alone.gradients, alone.alone = [], True
        return alone

    def changed(self) -> dict[str, Tensor]:
        """Returns, for every tensor that came in, if its memory has been written to."""
        named = [*self.arrays.items(), *((f"gradient {i}", g) for i, g in enumerate(self.gradients))]
        return {name: placed.changed() for name, placed in named if placed is not None}


def _as(dense: Tensor, dtype: torch.dtype | None) -> Tensor:
    if not dense.is_floating_point():
        return dense
    return dense.detach().to(dtype or dense.dtype, copy=True).requires_grad_(dense.requires_grad)


def gradients_of(
    outputs: Sequence[Tensor], inputs: Iterable[Any], incoming: Sequence[Tensor | None]
) -> list[Tensor]:
    """Returns gradients of every input that wants one; zeros where the outputs do not depend on it."""
    wanted = [value for value in inputs if torch.is_tensor(value) and value.requires_grad]
    if not any(grad is not None for grad in incoming):
        return []
    pairs = [(o, grad) for o, grad in zip(outputs, incoming) if grad is not None and o.requires_grad]
    if not pairs:  # lse, of values that want a gradient
        return [torch.zeros_like(value) for value in wanted]
    through, grads = zip(*pairs)
    return list(torch.autograd.grad(through, wanted, grads, materialize_grads=True))


@contextlib.contextmanager
def _setting(call: Call) -> Iterator[None]:
    """Set what a call runs under."""
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
    accuracies, bits = _compare(prepared)
    missed = {index: accuracy for index, accuracy in enumerate(accuracies) if not accuracy.ok}
    for index, accuracy in missed.items():
        if accuracy.problem:
            kinds = (word for word in ("NaN", "infinity", "dtype", "shape") if word in accuracy.problem)
            raise Failure(f"{next(kinds, 'problem')} {prepared.call.name_of(index)}", accuracy.describe())
    if missed:
        _judge_again(prepared, missed)
    return Verdict(max((one.ratio for one in accuracies if one.ok), default=0.0), len(missed), bits)


def _judge_again(prepared: Prepared, missed: dict[int, Accuracy]) -> None:
    """Judge results that missed their budget by fresh draws alone, since the first was chosen for its error."""
    draws: list[list[Accuracy]] = []
    for count, certain in STAGES[prepared.device.type]:
        while len(draws) < count:
            draws.append(_compare(prepared.drawn(len(draws) + 1))[0])
        means = {index: mean_of([draw[index] for draw in draws]) for index in missed}
        if any(_is_no_luck(missed[index], mean, certain) for index, mean in means.items()):
            break
        if draws[FEW:]:
            missed = {index: missed[index] for index, mean in means.items() if not mean.ok}
        if not missed:
            return
    index, first = max(missed.items(), key=lambda one: means[one[0]].ratio)
    detail = f"{first.describe()}; mean of {len(draws)} more draws: {means[index].describe()}"
    raise Failure(f"accuracy {prepared.call.name_of(index)}", detail)


def _is_no_luck(first: Accuracy, mean: Accuracy, certain: float) -> bool:
    """Returns True if a result that missed its budget needs no more draws."""
    beyond = first.max_error > LUCK * max(mean.error_budget, first.error_budget)
    return beyond or bool(mean.problem) or mean.ratio > certain


def repeat(prepared: Prepared, verdict: Verdict) -> None:
    """Run a call again, which must give the same bits.

    Raises:
        Failure: It gives others.
    """
    outputs, gradients = _guard(prepared.run)
    found = _bits(_guard(lambda: _on_cpu([*outputs, *gradients])))
    for index, (one, other) in enumerate(zip(found, verdict.bits, strict=True)):
        if not torch.equal(one.to(other.device), other):  # large results stay on their device
            differing = int((one.to(other.device) != other).sum())
            detail = f"{differing} of {one.numel()} differ from the first run's"
            raise Failure(f"bits {prepared.call.name_of(index)}", detail)


def judge_entry(prepared: Prepared, verdict: Verdict) -> int:
    """Where results do not depend on the batch, run one entry of it alone, which must give the same bits.

    Returns:
        How many calls that took.

    Raises:
        Failure: It gives others.
    """
    call, batch = prepared.call, prepared.call.outputs[0][0]
    if call.operator not in INDEPENDENT_OF_BATCH or batch < 2 or prepared.in_torch or call.forward_mode:
        return 0  # an entry alone has no tangents, with which outputs may come from elsewhere
    alone = prepared.entry(call.seed % batch)
    alone.options = alone.options | {"backend": "triton"}
    try:
        outputs = _guard(lambda: alone.run()[0])
    except Failure as failure:
        if isinstance(failure.__cause__, BackendError):  # ``auto`` leaves the call to PyTorch
            return 0
        raise
    (found,) = _bits(_guard(lambda: _on_cpu(outputs[:1])))
    expected = verdict.bits[0][call.seed % batch][None]
    if not torch.equal(found.to(expected.device), expected):
        detail = f"batch entry {call.seed % batch} alone gives other bits than in a batch of {batch}"
        raise Failure("batch output", detail)
    return 1


def _compare(prepared: Prepared) -> tuple[list[Accuracy], list[Tensor]]:
    """Returns what one draw came to, and its bits; everything but accuracy is judged."""
    call = prepared.call
    exact, eager = (_guard(functools.partial(prepared.define, dtype)) for dtype in (torch.float64, None))
    with poison_allocations():
        outputs, gradients = _guard(prepared.run)
    found = [*outputs, *gradients]
    if len(found) != len(exact):
        raise Failure("results", f"{len(found)} where {len(exact)} are expected")
    _check_form(call, outputs)
    changed = prepared.changed()
    flags = [flag.reshape(1).double() for flag in changed.values()]
    on_cpu = _guard(lambda: _on_cpu([*found, *exact, *eager, *flags]))
    for name, flag in zip(changed, on_cpu[3 * len(found) :]):
        if bool(flag):
            raise Failure(f"modified {name}", "its memory, or what lies around it, has been written to")
    results = [on_cpu[i * len(found) : (i + 1) * len(found)] for i in range(3)]
    of_theta = [call.name_of(index) == "gradient of theta" for index in range(len(found))]
    accuracies = [_compare_one(call, *each) for each in zip(of_theta, *results)]
    return accuracies, _bits(results[0])


def _compare_one(call: Call, of_theta: bool, found: Tensor, exact: Tensor, eager: Tensor) -> Accuracy:
    """Returns how far a result is off; of a degenerate call it must be finite where the definition is."""
    if found.shape != eager.shape or found.dtype != eager.dtype:
        return compare_each(found, exact, eager)[0]
    if call.numbers == "degenerate":
        asked = exact.to(eager.dtype).isfinite() & eager.isfinite()
        if eager.dtype == torch.float16:  # numbers within 6 % of its largest may be rounded to infinity
            asked &= exact.abs() <= 15 * 2.0**12
        found, exact, eager = (x.masked_fill(~asked, 0.0) for x in (found, exact, eager))
        verdict = compare_each(found, exact, eager)[0]
        return replace(verdict, ok=not verdict.problem, block_ratio=0.0)
    if eager.dtype == torch.float16:  # a gradient beyond the largest number counts as that
        found, exact, eager = (x.clamp(-65504.0, 65504.0) for x in (found, exact, eager))
    verdict = compare_each(found, exact, eager, EQUAL if call.has_equal_numbers else 1.0)[0]
    if verdict.ok or verdict.problem:
        return verdict
    spare = FLUSHED
    if verdict.size <= NOTHING:
        precision = call.options.get("float32_precision", call.matmul_precision)
        spare = LEFT * FACTORS.get(precision if call.dtype == "float32" else call.dtype, 2.0**-9)
    elif eager.dtype.itemsize > 2:
        spare += ROUNDED["float32" if of_theta and call.dtype == "float64" else call.dtype] * verdict.size
    spares = [torch.full_like(exact, spare)]
    verdict = compare_each(found, exact, eager, EQUAL if call.has_equal_numbers else 1.0, spares)[0]
    most, mean = verdict.error_budget + spare, verdict.rms_budget + spare
    block = 0.0 if call.has_equal_numbers else verdict.block_ratio
    ok = verdict.max_error <= most and verdict.rms_error <= mean and block <= 1
    return replace(verdict, ok=ok, error_budget=most, rms_budget=mean, block_ratio=block)


def _check_form(call: Call, outputs: Sequence[Tensor]) -> None:
    """Check that the first output records gradients if it should, and its memory order, which `out` may decide."""
    out, wanted = outputs[0], call.recorded and not call.forward_mode and any(a.grad for a in call.arrays.values())
    if out.requires_grad != wanted:
        raise Failure("requires_grad output", f"is {out.requires_grad}, expected {wanted}")
    names = ("v",) if call.operator == "delta_attention" else ("x", "q", "qkv", "aq", "bq")
    like = next(call.arrays[name] for name in names if name in call.arrays)
    if out.dim() != len(like.shape) or out.numel() == 0 or "out" in call.options:
        return
    axes = [axis for axis in range(out.dim()) if out.shape[axis] > 1]
    strides = {axis: stride for axis, stride in enumerate(like.memory.strides) if like.shape[axis] > 1 and stride}
    for a, b in itertools.combinations([axis for axis in axes if axis in strides], 2):
        if (strides[a] - strides[b]) * (out.stride(a) - out.stride(b)) < 0:
            detail = f"strides {out.stride()} for an input of shape {like.shape} and strides {like.memory.strides}"
            raise Failure("memory order", detail)
    if sum((out.shape[axis] - 1) * out.stride(axis) for axis in axes) + 1 != out.numel():
        raise Failure("memory order", f"strides {out.stride()} leave gaps in an output of shape {tuple(out.shape)}")


def _guard(run: Callable[[], T]) -> T:
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
    """Returns small tensors on the CPU, by one transfer: a GPU takes longer for each than for all."""
    tensors = [tensor.detach() for tensor in tensors]
    if not tensors or not tensors[0].is_cuda or sum(tensor.numel() for tensor in tensors) > LARGE:
        return tensors
    flat = torch.cat([tensor.reshape(-1).double() for tensor in tensors]).cpu()
    parts = flat.split([tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape).to(tensor.dtype) for part, tensor in zip(parts, tensors)]


def _bits(results: Sequence[Tensor]) -> list[Tensor]:
    """Returns the bits as integers, so that a NaN equals a NaN."""
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    same = [result.masked_fill(result.isnan(), torch.nan) for result in results]
    return [result.contiguous().view(integers[result.element_size()]) for result in same]
