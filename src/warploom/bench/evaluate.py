"""Evaluates a case in a mode: checks every provider, measures its memory, and times it beside the others."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from warploom.bench import limits
from warploom.bench.attempt import Failure, attempt
from warploom.bench.graphs import GRAPH, replayed
from warploom.bench.measure import (
    BRIEF_CASE_MS,
    Clock,
    Timing,
    allocated_bytes,
    peak_bytes,
    release_memory,
    time_interleaved,
)
from warploom.bench.records import LIMIT, Record, as_option
from warploom.ops.spec import QUICK, Bench, Case, Inputs, Outputs, Unsupported
from warploom.testing.accuracy import Accuracy, as_tuple, compare
from warploom.testing.conformance import SEED, find_leaves, make_inputs, upcast

PRODUCT = "matrix product"
"""The name under which the large product is timed whose rate bounds arithmetic."""
Function = Callable[..., Outputs]
Tensors = tuple[torch.Tensor, ...]
Call = Callable[[], object]


@dataclass(frozen=True)
class Unit:
    """All providers of one case in one mode, which are measured together."""

    bench: Bench
    suite: str
    case: Case
    mode: str
    """``fwd``, ``bwd`` or ``fwd_graph``."""

    @property
    def work(self) -> str:
        """The passes that are computed: ``fwd``, ``bwd`` or ``fwd_bwd``, replayed from a graph or not."""
        return self.mode.removesuffix(GRAPH)

    @property
    def replayed(self) -> bool:
        """True if replays of a captured graph are timed."""
        return self.mode.endswith(GRAPH)

    @property
    def is_brief(self) -> bool:
        """True if it belongs to the suite that a person waits for."""
        return self.suite == QUICK and bool(self.bench.quick)

    @property
    def parts(self) -> list[Unit]:
        """One unit for each function that is measured, its own and others, each with its own providers."""
        bench = replace(self.bench, others=())
        others = (
            replace(bench, operator=other.operator, providers=other.providers, traffic=other.traffic)
            for other in self.bench.others
        )
        return [replace(self, bench=part) for part in (bench, *others)]

    def __str__(self) -> str:
        parameters = " ".join(f"{name}={as_option(value)}" for name, value in self.case.items())
        return f"{self.bench.name} {self.mode} {parameters}"


def evaluate(
    unit: Unit, providers: Sequence[str], device: torch.device, clock: Clock, blank: Record
) -> list[Record]:
    """Measure providers on one case in one mode, and the limit with them.

    Args:
        unit: The case and the mode.
        providers: Names of the bench's providers.
        device: Where.
        clock: The device's clock.
        blank: A record of this unit; a copy is filled in for each provider, and one for the limit.

    Raises:
        DeviceLostError: A provider left the device unusable.
    """
    moved = [part.bench.traffic(unit.case, unit.work) for part in unit.parts]
    traffic = moved[0]
    records: dict[str, Record] = {}
    starts: dict[str, Callable[[], Call]] = {}
    with torch.set_grad_enabled(unit.work != "fwd"), _buffers_kept():
        for part, least in zip(unit.parts, moved, strict=True):
            own = replace(blank, min_bytes=least.min_bytes, flops=least.flops)
            of_part = {name: replace(own, provider=name) for name in providers if name in part.bench.providers}
            if of_part:
                starts |= _check_and_measure_memory(part, device, of_part)
                records |= of_part
        starts[LIMIT] = functools.partial(limits.stream_call, traffic, device, clock)
        if traffic.flops:
            starts[PRODUCT] = functools.partial(limits.product_call, device)
        timings = _time(starts, device, clock, BRIEF_CASE_MS if unit.is_brief else None)
    product = timings.pop(PRODUCT, None)
    if isinstance(product, Timing):
        product = product.scaled(traffic.flops / limits.product_flops(device))
    timings[LIMIT] = _slower(timings[LIMIT], product)
    records[LIMIT] = replace(blank, provider=LIMIT, min_bytes=traffic.min_bytes, flops=traffic.flops)
    return with_times(records, timings, unit.bench.other_names)


def _buffers_kept() -> Any:
    """Let what is compiled here run its backward again and again on one graph, as it is timed."""
    config: Any = getattr(torch._functorch, "config", None)
    return config.patch(donated_buffer=False) if hasattr(config, "donated_buffer") else contextlib.nullcontext()


@dataclass(frozen=True)
class _Subject:
    """The inputs of a unit. It runs functions on them."""

    inputs: Inputs
    grad_outputs: Tensors | None
    """Gradients for a backward pass, one for each differentiable output of the reference."""
    whole: bool = False
    """True if the forward pass belongs to the call where there is a backward pass."""

    def start(self, function: Function) -> Call:
        """Returns the call to be timed: the function, the backward pass of a graph built here, or both passes."""
        if self.grad_outputs is None:
            return functools.partial(function, **self.inputs)
        if self.whole:
            return functools.partial(self._both_passes, function)
        outputs, wanted = _graph(function, self.inputs)
        return functools.partial(
            torch.autograd.grad, outputs, wanted, self.grad_outputs, retain_graph=True, materialize_grads=True
        )

    def _both_passes(self, function: Function) -> Tensors:
        outputs, wanted = _graph(function, self.inputs)
        return torch.autograd.grad(outputs, wanted, self.grad_outputs, materialize_grads=True)

    def run(self, function: Function) -> Tensors:
        """Returns outputs of the function, or its gradients with respect to every leaf."""
        result: Any = self.start(function)()
        return as_tuple(result)


def _graph(function: Function, inputs: Inputs) -> tuple[Tensors, Tensors]:
    """Returns the differentiable outputs of a function, and the leaves among its inputs."""
    wanted = tuple(find_leaves(inputs).values())
    if not wanted:
        raise Unsupported("no input of this case wants a gradient")
    return tuple(output for output in as_tuple(function(**inputs)) if output.requires_grad), wanted


def _check_and_measure_memory(
    unit: Unit, device: torch.device, records: dict[str, Record]
) -> dict[str, Callable[[], Call]]:
    """Fill in accuracy and peak memory; return how to start each provider that is fit to be timed."""
    release_memory(device)
    before = allocated_bytes(device)
    inputs = attempt("inputs", functools.partial(make_inputs, unit.bench.operator, unit.case, device))
    if isinstance(inputs, Failure):
        _fail(records, inputs.status, f"inputs: {inputs.reason}")
        return {}
    held_by_inputs = allocated_bytes(device) - before
    subject, checked = _check(unit, inputs, device, records)
    held_by_inputs += sum(grad.nbytes for grad in subject.grad_outputs or ())
    starts: dict[str, Callable[[], Call]] = {
        name: functools.partial(subject.start, function) for name, (function, _) in checked.items()
    }
    for name, (_, held) in checked.items() if not unit.replayed else ():  # a graph's memory is its own pool's
        # What is there now beside the inputs and this provider's own is the clock's buffer, which stays for
        # the whole run, and other providers' tables: it is subtracted.
        release_memory(device)
        others = allocated_bytes(device) - held_by_inputs - held
        peak = attempt(name, lambda start=starts[name]: peak_bytes(start(), device))  # type: ignore[misc]
        if isinstance(peak, Failure):
            records[name] = replace(records[name], **vars(peak))
            del starts[name]
        elif peak is not None:
            records[name] = replace(records[name], peak_memory_mib=(peak - others) / 2**20)
    return starts


def _fail(records: dict[str, Record], status: str, reason: str) -> None:
    for name, record in records.items():
        records[name] = replace(record, status=status, reason=reason)


def _check(
    unit: Unit, inputs: Inputs, device: torch.device, records: dict[str, Record]
) -> tuple[_Subject, dict[str, tuple[Function, int]]]:
    """Build the providers and keep those within the error budget, with the bytes that each holds on to.

    The float64 reference is large; nothing of it is left when this returns.
    """
    truth = attempt("reference", functools.partial(_reference_results, unit, inputs))
    checked: dict[str, tuple[Function, int]] = {}
    if isinstance(truth, Failure):
        # Without a reference nothing is known about the providers, so they have no speed either.
        status = "unsupported" if truth.status == "unsupported" else "error"
        _fail(records, status, f"not checked, the reference failed: {truth.reason}")
        return _Subject(inputs, None), checked
    subject, exact, eager = truth
    for name in records:
        before = allocated_bytes(device)
        verdict = attempt(name, functools.partial(_judge, unit, name, subject, exact, eager))
        if isinstance(verdict, Failure):
            records[name] = replace(records[name], **vars(verdict))
            continue
        function, accuracy = verdict
        records[name] = replace(records[name], **describe_accuracy(accuracy))
        if accuracy.ok:
            checked[name] = function, allocated_bytes(device) - before
    return subject, checked


def _reference_results(unit: Unit, inputs: Inputs) -> tuple[_Subject, Tensors, Tensors]:
    """Returns the subject, and the reference's results on it in float64 and in the inputs' own dtypes."""
    reference = unit.bench.operator.reference
    if unit.work == "fwd":
        subject = _Subject(inputs, None)
        return subject, _Subject(upcast(inputs), None).run(reference), subject.run(reference)
    outputs, wanted = _graph(reference, inputs)
    # Drawn on the device, since they are large; in the outputs' memory order, as a next layer's would be.
    generator = torch.Generator(outputs[0].device).manual_seed(SEED)
    grads = tuple(torch.empty_like(output).normal_(generator=generator) for output in outputs)
    eager = torch.autograd.grad(outputs, wanted, grads, materialize_grads=True)
    del outputs
    exact = _Subject(upcast(inputs), tuple(grad.double() for grad in grads)).run(reference)
    return _Subject(inputs, grads, unit.work == "fwd_bwd"), exact, eager


def provider_call(unit: Unit, name: str, device: torch.device) -> Call:
    """Returns a provider's call on a unit's inputs as it is timed, unchecked: to profile it, or to compile it."""
    unit = next(part for part in unit.parts if name in part.bench.providers)
    inputs = make_inputs(unit.bench.operator, unit.case, device)
    with torch.set_grad_enabled(unit.work != "fwd"), _buffers_kept():
        function, grads = _function(unit, name), None
        if unit.work != "fwd":
            outputs, _ = _graph(function, inputs)
            grads = tuple(torch.randn_like(output) for output in outputs)
        return _Subject(inputs, grads, unit.work == "fwd_bwd").start(function)


def _function(unit: Unit, name: str) -> Function:
    function = unit.bench.providers[name](unit.case)
    return replayed(function) if unit.replayed else function


def _judge(unit: Unit, name: str, subject: _Subject, exact: Tensors, eager: Tensors) -> tuple[Function, Accuracy]:
    function = _function(unit, name)
    return function, compare(subject.run(function), exact, eager, unit.bench.budgets.get(name, 1.0))


def _time(
    starts: Mapping[str, Callable[[], Call]], device: torch.device, clock: Clock, case_ms: float | None
) -> dict[str, Timing | Failure]:
    """Time calls side by side; those for which there is no room beside the others, alone."""
    release_memory(device)
    calls = {name: attempt(name, start) for name, start in starts.items()}
    results = time_interleaved(calls, clock, case_ms)
    if len(starts) > 1:
        calls.clear()
        for name, result in list(results.items()):
            if isinstance(result, Failure) and result.status == "oom":
                results |= _time({name: starts[name]}, device, clock, case_ms)
    return results


def _slower(stream: Timing | Failure, product: Timing | Failure | None) -> Timing | Failure:
    """Returns the limit: the larger of the streaming time and the arithmetic's, both of the same rounds."""
    if product is None or isinstance(product, Failure):
        return product or stream
    if isinstance(stream, Failure):
        return product if stream.status == "unsupported" else stream
    larger = {name: max(getattr(stream, name), getattr(product, name)) for name in ("ms", "ms_p20", "ms_p80")}
    return replace(stream, **larger, late=stream.late + product.late)


def with_times(
    records: Mapping[str, Record], timings: Mapping[str, Timing | Failure], others: Sequence[str] = ()
) -> list[Record]:
    """Fill in times and shares of the limit, which is no limit of ``others``, the providers of other functions."""
    limit = timings.get(LIMIT)
    limit_ms = limit.ms if isinstance(limit, Timing) else None
    finished = []
    for name, record in records.items():
        timing = timings.get(name)
        if isinstance(timing, Failure):
            record = replace(record, **vars(timing))
        elif timing is not None:
            bound = None if name in others else limit_ms
            fraction = None if bound is None else bound / timing.ms
            record = replace(record, **vars(timing), limit_ms=bound, limit_fraction=fraction)
        finished.append(record)
    return finished


def describe_accuracy(accuracy: Accuracy) -> dict[str, Any]:
    """Returns the fields of a record for the accuracy of a provider."""
    # JSON has no infinity; where an error is infinite or NaN, the reason says so.
    error, budget = (v if math.isfinite(v) else None for v in (accuracy.max_error, accuracy.error_budget))
    found = {"max_error": error, "error_budget": budget}
    return found if accuracy.ok else {**found, "status": "incorrect", "reason": accuracy.describe()}
