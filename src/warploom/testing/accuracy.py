"""The accuracy promise as a test: at most twice the eager low-precision reference's error, plus rounding.

Every output is compared with the float64 reference three times over: its largest error against the largest error
of the eager reference in the input's own dtype, its root-mean-square error against theirs, and the same block by
block. The first catches one wrong element, the second a small bias everywhere, and the third what is wrong where
values are small: late rows of causal attention are averages of many values, and a lost key there is less than what
rounding does to early rows. All must hold.
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
"""Elements compared at a time: the float64 temporaries stay near half a gigabyte each."""

BLOCK = 4096
"""Elements of a block at most, in rows that are neighbours: so many that their root mean square is no luck. Less
than half a block at the end of an axis belongs to the block before."""
UNEVEN = 2.0
"""How much more a block may be off than its share: gradients of factors are small in most rows, large in some."""
LEAST = 1 / 16
"""Of the whole tensor's usual error, what a block may always be off. A gradient can be zero where its terms cancel:
that of a query which sees one key is, and rounding leaves less than this of it."""
ROW = 512
"""Elements along the last axis up to which they are one row, of features, and stay together."""

UNLUCKY = 4.0
"""A largest error over the mean budget that is no luck: of 180 gradients with 76 elements, 2.2 was the worst."""
FEW_WITHIN = 1 / 4
"""The share of runs within their own budgets below which the others are no luck: two elements are in 7 of 16."""

Tensors = Tensor | tuple[Tensor, ...]


@dataclass(frozen=True)
class Accuracy:
    """How far an output is from the float64 reference, and how far it may be.

    For several outputs, the figures are those of the output that is worst relative to its budget.
    """

    ok: bool
    """True when both errors are within their budgets and nothing else is wrong."""
    max_error: float
    """Largest absolute error; infinite when ``problem`` says why errors have no meaning."""
    error_budget: float
    """Twice the largest error of the eager reference plus half an epsilon of the largest value."""
    rms_error: float
    """Root-mean-square error."""
    rms_budget: float
    """The same budget with root mean squares in the place of maxima."""
    worst: tuple[int, ...] = ()
    """Index of the element with the largest error, or of the first NaN or infinity out of place."""
    output: int = 0
    """Which output these figures belong to, where there are several."""
    problem: str = ""
    """What is wrong besides size of error: shape, dtype, NaN or infinities out of place."""
    block_ratio: float = 0.0
    """Root-mean-square error over its budget in the worst block; 0 where the whole output is one."""
    block: tuple[int, ...] = ()
    """Index at which that block begins."""
    size: float = 0.0
    """The largest absolute value of the reference."""

    @property
    def ratio(self) -> float:
        """Error over budget, the worst of all; at most 1 when within budget."""
        pairs = (self.max_error, self.error_budget), (self.rms_error, self.rms_budget)
        whole = [error and (error / budget if budget > 0 else math.inf) for error, budget in pairs]
        return max(*whole, self.block_ratio)

    def describe(self) -> str:
        """One line for a person: what is wrong, or the errors beside their budgets."""
        where = f"output {self.output} at {self.worst}"
        if self.problem:
            return f"{self.problem} ({where})" if self.worst else self.problem
        block = f", {self.block_ratio:.2f} of that in the block at {self.block}" if self.block_ratio > 1 else ""
        return (
            f"max error {self.max_error:.3e} of {self.error_budget:.3e} allowed ({where}), "
            f"rms error {self.rms_error:.3e} of {self.rms_budget:.3e} allowed{block}"
        )


def compare(output: Tensors, reference: Tensors, eager: Tensors, factor: float = 1.0) -> Accuracy:
    """Judge an output by the accuracy promise.

    Args:
        output: What the backend computed; a tensor or a tuple of tensors, any strides, any device.
        reference: The same computed in float64 from the same inputs.
        eager: The reference run in the inputs' own dtype; it sets the budget and the dtype expected.
        factor: How many times the promised budget is allowed: more than 1 for others' kernels that round more.

    Returns:
        The verdict; for several outputs, that of the worst. Wrong shapes, dtypes and numbers of outputs are
        verdicts as well, not exceptions. Tensors without elements pass.
    """
    return worst_of(compare_each(output, reference, eager, factor))


@torch.no_grad()
def compare_each(
    output: Tensors, reference: Tensors, eager: Tensors, factor: float = 1.0, spared: Sequence[Tensor | None] = ()
) -> list[Accuracy]:
    """What `compare` does, with a verdict for every output; a single one if their number is wrong.

    ``spared`` are errors that are known to be usual, element by element: a block may be off by theirs too.
    """
    outputs, references, eagers = map(as_tuple, (output, reference, eager))
    if not len(outputs) == len(references) == len(eagers):
        return [_failure(f"{len(outputs)} outputs where the reference has {len(references)}", 0)]
    spared = spared or [None] * len(outputs)
    compared = enumerate(zip(outputs, references, eagers, spared))
    return [_compare_one(out, ref, low, index, factor, spare) for index, (out, ref, low, spare) in compared]


def worst_of(verdicts: Sequence[Accuracy]) -> Accuracy:
    """The verdict on several outputs: that of the worst, relative to its budget."""
    return max(verdicts, key=lambda verdict: (not verdict.ok, verdict.ratio))


def mean_of(verdicts: Sequence[Accuracy]) -> Accuracy:
    """One verdict on the same output of several runs on inputs of one kind: errors and budgets are averaged.

    The largest error of a few numbers may be small by chance: then it is no measure of another largest error, and
    the mean of several is. The mean budget is that of values of mean size: some gradients of theta are ten times
    others. What is wrong besides size of error is wrong, and so is what luck does not explain: a block beyond its
    budget, an error beyond `UNLUCKY` times the mean budget, or errors beyond their own budgets in all but
    `FEW_WITHIN` of the runs. The verdict is then that on such a run.
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
        return _failure(f"output {index} has shape {got}; expected {expected}", index)
    if eager.shape != reference.shape:
        expected, got = tuple(reference.shape), tuple(eager.shape)
        return _failure(f"eager output {index} has shape {got}; the float64 reference's is {expected}", index)
    if output.dtype != eager.dtype:
        return _failure(f"output {index} has dtype {output.dtype}; expected {eager.dtype}", index)

    parts: list[_Sums] = []
    for start, piece in _pieces(tuple(output.shape)):
        spare = None if spared is None else spared[piece]
        parts.append(_measure(output[piece], reference[piece], eager[piece], start, spare))
        if parts[-1].problem:
            return _failure(f"output {index} has {parts[-1].problem}", index, parts[-1].worst)

    blocks = [part.blocks for part in parts if part.blocks is not None]
    parts = parts or [_Sums()]
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
    # Relative to its values, a block's error may be what is usual in the whole output, where eager's happens to be
    # less: the first row of causal attention is exact.
    usual = rms_eager / rms_size if rms_size else 0.0
    least = LEAST * rms_eager
    worsts = (each.worst(factor, usual, least, half_epsilon) for each in blocks)
    ratio, place = max(worsts, key=lambda worst: worst[0])
    return replace(found, ok=ok and ratio <= 1, block_ratio=ratio, block=place)


@dataclass(frozen=True)
class _Blocks:
    """Sums of squares over the blocks of a piece: of its errors, eager's, the reference, and what is spared."""

    start: tuple[int, ...]
    sizes: tuple[int, ...]
    """Of a block, axis by axis."""
    squares: tuple[Tensor, ...]

    @classmethod
    def of(cls, start: tuple[int, ...], squares: Sequence[Tensor]) -> _Blocks:
        """Add up squares in blocks of rows, which are halves of halves of the longest axis."""
        sizes = list(squares[0].shape)
        first = sizes[:-1] if sizes[-1:] <= [ROW] else sizes
        while math.prod(sizes) > BLOCK and max(first) > 1:
            axis = first.index(max(first))
            first[axis] = sizes[axis] = -(-sizes[axis] // 2)
        return cls(start, tuple(sizes), tuple(_block_sums(each, sizes) for each in squares))

    def worst(
        self, factor: float, usual: float, least: float, half_epsilon: float
    ) -> tuple[float, tuple[int, ...]]:
        """The largest ratio of an error to its budget, and where that block begins."""
        error, eager, size, *spared = (squares.sqrt() for squares in self.squares)
        expected = torch.maximum(eager, usual * size).clamp(min=least * math.sqrt(math.prod(self.sizes)))
        budget = UNEVEN * (factor * (2 * expected + half_epsilon * size) + sum(spared))
        ratios = torch.where(error == 0, 0.0, error / budget)
        place = _index(ratios, (0,) * ratios.dim())
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
            # A short rest belongs to the block before: one row alone is a draw of one number a head.
            *whole, rest = values.unbind(axis)
            whole[-1] = whole[-1] + rest
            values = torch.stack(whole, axis)
    return values


class _Sums(NamedTuple):
    """What is added up over a piece of a tensor, over the elements where a finite value is expected."""

    elements: int = 0
    largest: tuple[float, ...] = (0.0, 0.0, 0.0)
    """Errors, eager's errors, and the reference's values."""
    squares: tuple[float, ...] = (0.0, 0.0, 0.0)
    """The sums of theirs."""
    worst: tuple[int, ...] = ()
    problem: str = ""
    blocks: _Blocks | None = None


def _measure(
    output: Tensor, reference: Tensor, eager: Tensor, start: tuple[int, ...], spared: Tensor | None
) -> _Sums:
    """Sums over the piece that begins at index ``start``, and over its blocks."""
    expected = reference.to(output.dtype)  # a perfect result: it decides where infinities belong
    wrong_nan = output.isnan() != expected.isnan()
    if bool(wrong_nan.any()):
        return _Sums(worst=_index(wrong_nan, start), problem="NaN out of place")
    wrong_infinity = (output != expected) & (output.isinf() | expected.isinf())
    if bool(wrong_infinity.any()):
        problem = "an infinity out of place or of the wrong sign"
        return _Sums(worst=_index(wrong_infinity, start), problem=problem)

    finite = expected.isfinite()
    # Where the eager reference itself overflows it sets no budget.
    eager_error = (eager.double() - reference).abs_().masked_fill_(~(finite & eager.isfinite()), 0.0)
    error = (output.double() - reference).abs_().masked_fill_(~finite, 0.0)
    size = reference.double().abs().masked_fill_(~finite, 0.0)
    worst = _index(error, start)
    # Largest values before squares, which are taken in place; one transfer for all the figures.
    largest = [values.max() for values in (error, eager_error, size)]
    squares = [values.square_().sum() for values in (error, eager_error, size)]
    count, *figures = torch.stack([finite.sum().double(), *largest, *squares]).tolist()
    blocks = _Blocks.of(start, (error, eager_error, size, *([] if spared is None else [spared.square()])))
    return _Sums(int(count), tuple(figures[:3]), tuple(figures[3:]), worst, blocks=blocks)


def _index(values: Tensor, start: tuple[int, ...]) -> tuple[int, ...]:
    """Index, in the whole tensor, of the largest value of the piece that begins at ``start``."""
    flat = int((values.int() if values.dtype == torch.bool else values).argmax())
    within = []  # `torch.unravel_index` imports SymPy, which takes seconds
    for size in reversed(values.shape):
        flat, step = divmod(flat, size)
        within.append(step)
    return tuple(first + step for first, step in zip(start, reversed(within)))


def _pieces(shape: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], tuple[slice, ...]]]:
    """Boxes of at most ``CHUNK`` elements that cover a shape: where each starts, and its slices.

    Slicing needs no copy whatever the strides, which flattening would.
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


def _failure(problem: str, index: int, worst: tuple[int, ...] = ()) -> Accuracy:
    return Accuracy(False, math.inf, 0.0, math.inf, 0.0, worst, index, problem)


def as_tuple(tensors: Tensors) -> tuple[Tensor, ...]:
    """One output or several as a tuple."""
    return (tensors,) if isinstance(tensors, Tensor) else tuple(tensors)
