"""The accuracy promise as a test: at most twice the eager low-precision reference's error, plus rounding.

Every output is compared with the float64 reference in three ways, and all must hold:

- its largest error with the largest error of the eager reference in the input's dtype, which finds one wrong
  element;
- its root-mean-square error with that of the eager reference, which finds a small bias everywhere;
- the root-mean-square errors of each block, which finds faults where values are small. Late rows of causal
  attention
  are averages of many values: a lost key there changes less than rounding does in early rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import NamedTuple

import torch

Tensor = torch.Tensor
CHUNK = 2**26
"""Elements that are compared at a time. A float64 temporary then takes half a gigabyte."""

BLOCK = 4096
"""The most elements of a block of neighbouring rows: enough for a stable root mean square. Less than half a block
at the end of an axis belongs to the block before."""
UNEVEN = 2.0
"""The factor by which a block's error may exceed its share: gradients of factors are small in most rows, large in
some."""
LEAST = 1 / 16
"""The share of the whole tensor's error that every block is allowed. A gradient can be zero because its terms
cancel, as that of a query which sees one key; rounding then leaves less than this."""
ROW = 512
"""The longest last axis that is one row, of features, and is not divided into blocks."""

UNLUCKY = 4.0
"""The largest error over the mean budget that chance explains. The worst of 180 gradients of 76 elements was
2.2."""
FEW_WITHIN = 1 / 4
"""The least share of runs within their own budgets if the others are chance. Results of two elements have 7 of
16."""

Tensors = Tensor | tuple[Tensor, ...]


@dataclass(frozen=True)
class Accuracy:
    """The errors of an output against the float64 reference, and their budgets.

    For several outputs, the figures are those of the output that is worst relative to its budget.
    """

    ok: bool
    """True when both errors are within their budgets and nothing else is wrong."""
    max_error: float
    """Largest absolute error; infinite if ``problem`` says why there is none."""
    error_budget: float
    """Twice the largest error of the eager reference plus half an epsilon of the largest value."""
    rms_error: float
    """Root-mean-square error."""
    rms_budget: float
    """Twice the root-mean-square error of the eager reference plus half an epsilon of the root-mean-square
    value."""
    worst: tuple[int, ...] = ()
    """Index of the element with the largest error, or of the first NaN or infinity out of place."""
    output: int = 0
    """Index of the output that the figures belong to, where there are several."""
    problem: str = ""
    """A fault other than the size of errors: shape, dtype, NaN or infinities out of place."""
    block_ratio: float = 0.0
    """Root-mean-square error over its budget in the worst block; 0 if the output is one block."""
    block: tuple[int, ...] = ()
    """Index at which the worst block begins."""
    size: float = 0.0
    """The largest absolute value of the reference."""

    @property
    def ratio(self) -> float:
        """The largest ratio of an error to its budget; at most 1 if all are within budget."""
        pairs = (self.max_error, self.error_budget), (self.rms_error, self.rms_budget)
        whole = [error and (error / budget if budget > 0 else math.inf) for error, budget in pairs]
        return max(*whole, self.block_ratio)

    def describe(self) -> str:
        """Returns one line of text: the problem, or the errors beside their budgets."""
        where = f"output {self.output} at {self.worst}"
        if self.problem:
            return f"{self.problem} ({where})" if self.worst else self.problem
        errors = {"largest": (self.max_error, self.error_budget), "rms": (self.rms_error, self.rms_budget)}
        over = [
            f"{name} error {error:.2e}, {error / budget if budget else math.inf:.3g} times the {budget:.2e} allowed"
            for name, (error, budget) in errors.items()
            if error > budget
        ]
        if self.block_ratio > 1:
            over.append(f"rms error in the block at {self.block} {self.block_ratio:.3g} times what it may be")
        if not over:
            return f"right: largest error {self.max_error:.2e} of {self.error_budget:.2e} allowed ({where})"
        allowed = "allowed: twice the error of the definition in this dtype, plus rounding"
        return f"wrong in {where}: {'; '.join(over)} ({allowed})"


def compare(output: Tensors, reference: Tensors, eager: Tensors, factor: float = 1.0) -> Accuracy:
    """Judge an output by the accuracy promise.

    Args:
        output: The backend's output: a tensor or a tuple of tensors, of any strides, on any device.
        reference: The reference in float64 on the same inputs, of the same shapes.
        eager: The reference in the inputs' own dtype. It sets the budget and the expected dtype.
        factor: Scales the budget; more than 1 for others' kernels that round more.

    Returns:
        The verdict; for several outputs, that of the worst. Wrong shapes, dtypes and numbers of outputs are
        verdicts too, not exceptions. Tensors without elements pass.
    """
    return worst_of(compare_each(output, reference, eager, factor))


@torch.no_grad()
def compare_each(
    output: Tensors, reference: Tensors, eager: Tensors, factor: float = 1.0, spared: Sequence[Tensor | None] = ()
) -> list[Accuracy]:
    """Judge every output as `compare` does. Returns a verdict for each, or a single one if their number is wrong.

    ``spared`` are errors, for each element, that are known to be usual. They are added to the budgets of blocks.
    """
    outputs, references, eagers = map(as_tuple, (output, reference, eager))
    if not len(outputs) == len(references) == len(eagers):
        return [_fail(f"{len(outputs)} outputs where the reference has {len(references)}", 0)]
    spared = spared or [None] * len(outputs)
    compared = enumerate(zip(outputs, references, eagers, spared))
    return [_compare_one(out, ref, low, index, factor, spare) for index, (out, ref, low, spare) in compared]


def worst_of(verdicts: Sequence[Accuracy]) -> Accuracy:
    """Returns the verdict on several outputs: that of the worst, relative to its budget."""
    return max(verdicts, key=lambda verdict: (not verdict.ok, verdict.ratio))


def mean_of(verdicts: Sequence[Accuracy]) -> Accuracy:
    """Returns one verdict on several runs, on inputs of one kind: mean errors are compared with mean budgets.

    The largest error of a few numbers can be small by chance. It is then a bad budget for another largest error,
    and the mean over several runs is a good one. A run fails by itself if chance does not explain it: if it has a
    ``problem``, a block beyond its budget, an error beyond `UNLUCKY` times the mean budget (scaled to the size of
    its values), or if fewer than `FEW_WITHIN` of the runs are within their own budgets. The verdict is then that on
    such a run.
    """
    worst = max(verdicts, key=lambda verdict: (bool(verdict.problem), verdict.ratio))
    if len(verdicts) == 1 or worst.problem:
        return worst
    block = max(verdicts, key=lambda verdict: verdict.block_ratio)
    if block.block_ratio > 1:
        return block
    max_error, error_budget = (
        fmean([getattr(v, name) for v in verdicts]) for name in ("max_error", "error_budget")
    )
    rms_error, rms_budget = (
        math.sqrt(fmean([getattr(v, name) ** 2 for v in verdicts])) for name in ("rms_error", "rms_budget")
    )
    ok = max_error <= error_budget and rms_error <= rms_budget
    size = fmean([verdict.size for verdict in verdicts])
    most = [UNLUCKY * error_budget * (max(verdict.size / size, 1.0) if size else 1.0) for verdict in verdicts]
    unlucky, allowed = max(zip(verdicts, most), key=lambda one: one[0].max_error - one[1])
    if ok and unlucky.max_error > allowed:
        return replace(unlucky, ok=False, error_budget=allowed)
    beyond = sorted((verdict for verdict in verdicts if not verdict.ok), key=lambda verdict: verdict.ratio)
    if ok and len(beyond) > (1 - FEW_WITHIN) * len(verdicts):
        return beyond[len(beyond) // 2]
    return Accuracy(ok, max_error, error_budget, rms_error, rms_budget, worst.worst, worst.output, size=size)


def _compare_one(
    output: Tensor, reference: Tensor, eager: Tensor, index: int, factor: float, spared: Tensor | None
) -> Accuracy:
    if output.shape != reference.shape:
        expected, got = tuple(reference.shape), tuple(output.shape)
        return _fail(f"output {index} has shape {got}; expected {expected}", index)
    if eager.shape != reference.shape:
        expected, got = tuple(reference.shape), tuple(eager.shape)
        return _fail(f"eager output {index} has shape {got}; the float64 reference's is {expected}", index)
    if output.dtype != eager.dtype:
        return _fail(f"output {index} has dtype {output.dtype}; expected {eager.dtype}", index)

    parts: list[_PieceSums] = []
    for start, piece in _split(tuple(output.shape)):
        spare = None if spared is None else spared[piece]
        parts.append(_measure(output[piece], reference[piece], eager[piece], start, spare))
        if parts[-1].problem:
            return _fail(f"output {index} has {parts[-1].problem}", index, parts[-1].worst)

    blocks = [part.blocks for part in parts if part.blocks is not None]
    parts = parts or [_PieceSums()]
    count = max(sum(part.elements for part in parts), 1)
    half_epsilon = torch.finfo(output.dtype).eps / 2
    max_error, max_eager, max_size = map(max, zip(*(part.largest for part in parts)))
    max_budget = factor * (2 * max_eager + half_epsilon * max_size)
    rms_error, rms_eager, rms_size = (math.sqrt(sum(each) / count) for each in zip(*(p.squares for p in parts)))
    rms_budget = factor * (2 * rms_eager + half_epsilon * rms_size)
    ok = max_error <= max_budget and rms_error <= rms_budget
    worst = max(parts, key=lambda part: part.largest[0]).worst
    found = Accuracy(ok, max_error, max_budget, rms_error, rms_budget, worst, index, size=max_size)
    if sum(each.squares[0].numel() for each in blocks) < 2:
        return found
    # Relative to its values, a block may have the error that is usual in the whole output, even if the eager
    # reference has less there: the first row of causal attention is exact.
    usual = rms_eager / rms_size if rms_size else 0.0
    least = LEAST * rms_eager
    worsts = (each.worst(factor, usual, least, half_epsilon) for each in blocks)
    ratio, place = max(worsts, key=lambda worst: worst[0])
    return replace(found, ok=ok and ratio <= 1, block_ratio=ratio, block=place)


@dataclass(frozen=True)
class _Blocks:
    """Sums of squares over each block of a piece of a tensor."""

    start: tuple[int, ...]
    """Index at which the piece begins."""
    sizes: tuple[int, ...]
    """Size of a block along each axis."""
    squares: tuple[Tensor, ...]
    """The sums for errors, eager's errors, values of the reference, and spared errors if there are any."""

    @classmethod
    def of(cls, start: tuple[int, ...], squares: Sequence[Tensor]) -> _Blocks:
        """Add up squares in blocks of rows. Blocks come from halving the longest axis."""
        sizes = list(squares[0].shape)
        first = sizes[:-1] if sizes[-1:] <= [ROW] else sizes
        while math.prod(sizes) > BLOCK and max(first) > 1:
            axis = first.index(max(first))
            first[axis] = sizes[axis] = -(-sizes[axis] // 2)
        return cls(start, tuple(sizes), tuple(_block_sums(each, sizes) for each in squares))

    def worst(
        self, factor: float, usual: float, least: float, half_epsilon: float
    ) -> tuple[float, tuple[int, ...]]:
        """Returns the largest ratio of a block's error to its budget, and the index at which that block begins."""
        error, eager, size, *spared = (squares.sqrt() for squares in self.squares)
        expected = torch.maximum(eager, usual * size).clamp(min=least * math.sqrt(math.prod(self.sizes)))
        budget = UNEVEN * (factor * (2 * expected + half_epsilon * size) + sum(spared))
        ratios = torch.where(error == 0, 0.0, error / budget)
        place = _find_index(ratios, (0,) * ratios.dim())
        corner = tuple(first + step * size for first, step, size in zip(self.start, place, self.sizes))
        return float(ratios[place]), corner


def _block_sums(values: Tensor, sizes: Sequence[int]) -> Tensor:
    for axis, size in enumerate(sizes):
        missing = -values.shape[axis] % size
        if missing:
            shape = [*values.shape[:axis], missing, *values.shape[axis + 1 :]]
            values = torch.cat((values, values.new_zeros(shape)), dim=axis)
        values = values.unflatten(axis, (-1, size)).sum(axis + 1)
        if 2 * missing > size and values.shape[axis] > 1:
            # A short rest belongs to the block before: a single row has too few numbers for a stable mean.
            *whole, rest = values.unbind(axis)
            whole[-1] = whole[-1] + rest
            values = torch.stack(whole, axis)
    return values


class _PieceSums(NamedTuple):
    """Figures of a piece of a tensor, over the elements whose expected value is finite."""

    elements: int = 0
    largest: tuple[float, ...] = (0.0, 0.0, 0.0)
    """The largest error, error of eager, and value of the reference."""
    squares: tuple[float, ...] = (0.0, 0.0, 0.0)
    """The sums of squares of errors, eager's errors, and values of the reference."""
    worst: tuple[int, ...] = ()
    problem: str = ""
    blocks: _Blocks | None = None


def _measure(
    output: Tensor, reference: Tensor, eager: Tensor, start: tuple[int, ...], spared: Tensor | None
) -> _PieceSums:
    """Returns the figures of the piece that begins at index ``start``, and of its blocks."""
    expected = reference.to(output.dtype)  # a perfect result: it decides where infinities belong
    wrong_nan = output.isnan() != expected.isnan()
    if bool(wrong_nan.any()):
        return _PieceSums(worst=_find_index(wrong_nan, start), problem="NaN out of place")
    wrong_infinity = (output != expected) & (output.isinf() | expected.isinf())
    if bool(wrong_infinity.any()):
        problem = "an infinity out of place or of the wrong sign"
        return _PieceSums(worst=_find_index(wrong_infinity, start), problem=problem)

    finite = expected.isfinite()
    # Where the eager reference itself overflows it sets no budget.
    eager_error = (eager.double() - reference).abs_().masked_fill_(~(finite & eager.isfinite()), 0.0)
    error = (output.double() - reference).abs_().masked_fill_(~finite, 0.0)
    size = reference.double().abs().masked_fill_(~finite, 0.0)
    worst = _find_index(error, start)
    # Largest values before squares, which are taken in place; one transfer for all the figures.
    largest = [values.max() for values in (error, eager_error, size)]
    squares = [values.square_().sum() for values in (error, eager_error, size)]
    count, *figures = torch.stack([finite.sum().double(), *largest, *squares]).tolist()
    blocks = _Blocks.of(start, (error, eager_error, size, *([] if spared is None else [spared.square()])))
    return _PieceSums(int(count), tuple(figures[:3]), tuple(figures[3:]), worst, blocks=blocks)


def _find_index(values: Tensor, start: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the index, in the whole tensor, of the largest value of the piece that begins at ``start``."""
    flat = int((values.int() if values.dtype == torch.bool else values).argmax())
    within = []  # `torch.unravel_index` imports SymPy, which takes seconds
    for size in reversed(values.shape):
        flat, step = divmod(flat, size)
        within.append(step)
    return tuple(first + step for first, step in zip(start, reversed(within)))


def _split(shape: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], tuple[slice, ...]]]:
    """Yield boxes of at most ``CHUNK`` elements that cover a shape: the index where each starts, and its slices.

    Unlike flattening, slicing never copies.
    """
    boxes = [tuple((0, size) for size in shape)]
    while boxes:
        box = boxes.pop()
        sizes = [stop - start for start, stop in box]
        if math.prod(sizes) == 0:
            continue
        if math.prod(sizes) <= CHUNK:
            yield tuple(start for start, _ in box), tuple(slice(*bounds) for bounds in box)
            continue
        axis = sizes.index(max(sizes))
        start, stop = box[axis]
        middle = (start + stop) // 2
        boxes += [(*box[:axis], half, *box[axis + 1 :]) for half in ((middle, stop), (start, middle))]


def _fail(problem: str, index: int, worst: tuple[int, ...] = ()) -> Accuracy:
    return Accuracy(False, math.inf, 0.0, math.inf, 0.0, worst, index, problem)


def as_tuple(tensors: Tensors) -> tuple[Tensor, ...]:
    """Returns one output or several as a tuple."""
    return (tensors,) if isinstance(tensors, Tensor) else tuple(tensors)
