"""Steps of a Transformer LM, timed: forward, forward and backward, or a whole training step with AdamW.

Every phase of every step is timed by the wall clock with the device idle before and after, as in the published
table: what a GPU waits for the host is in it. Python collects its garbage before the measured steps and not during
them, as in `timeit`. Forward alone runs without autograd; the others with it.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import statistics
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from warploom.bench.attempt import Failure, attempt
from warploom.bench.limits import compute_ms
from warploom.bench.measure import allocated_bytes, make_clock, release_memory
from warploom.errors import ArgumentError, fault
from warploom.nn import TransformerConfig
from warploom.ops.spec import Traffic
from warploom.profile import models
from warploom.profile.parts import Timeline, hooked
from warploom.profile.records import COMPILED, GRAPHS, ProfileRecord, Writer, phase

__all__ = ["ENDINGS", "MODES", "Plan", "Unit", "run"]

MODES = ("forward", "forward-backward", "train")
ENDINGS = {"no": "", "yes": COMPILED, "graphs": GRAPHS}
"""By how a model is compiled, the ending of its provider's name."""
MIB = 2**20
TURN = 5
"""Measured steps of a model before it is another's turn."""
PART_STEPS = 3
TRACE_STEPS = 2


@dataclass(frozen=True)
class Unit:
    """One configuration in one mode."""

    size: str
    context_length: int
    provider: str
    ending: str
    """One of `ENDINGS`."""
    mode: str

    @property
    def label(self) -> str:
        """The provider's name in records."""
        return self.provider + self.ending


@dataclass(frozen=True)
class Plan:
    """What to measure, and how."""

    units: tuple[Unit, ...]
    dtype: torch.dtype
    """``bfloat16`` by autocast over float32 parameters, or ``float32``."""
    batch: int = 4
    layers: int | None = None
    """Instead of the size's own."""
    position: str = "rotate"
    warm_up: int = 5
    steps: int = 10
    in_turn: bool = False
    """Whether all providers of a configuration are in memory at once, and take their measured steps in turn."""
    parts: bool = True
    chrome_trace: Path | None = None
    memory_snapshot: Path | None = None

    def config(self, unit: Unit) -> TransformerConfig:
        """The configuration of a unit's model.

        Raises:
            ArgumentError: There is no such model.
        """
        if unit.provider == models.LLAMA and self.position != "rotate":
            raise fault(ArgumentError, "profile", "position", "rotate for llama", repr(self.position))
        changes: dict[str, Any] = {"context_length": unit.context_length, "position": self.position}
        changes |= {} if self.layers is None else {"layers": self.layers}
        if unit.provider != models.LLAMA:
            changes["attention"] = unit.provider
        return TransformerConfig.size(unit.size, **changes)

    def case(self, unit: Unit) -> dict[str, Any]:
        """What a record says of a unit besides provider and mode."""
        return {
            "size": unit.size,
            "batch": self.batch,
            "context_length": unit.context_length,
            "layers": self.config(unit).layers,
            "position": self.position,
            "dtype": str(self.dtype).removeprefix("torch."),
        }

    def groups(self) -> list[tuple[Unit, ...]]:
        """Units that are measured together, in order: by ones, or all that differ in the provider alone."""
        groups: dict[object, list[Unit]] = {}
        for unit in self.units:
            together = (unit.size, unit.context_length, unit.ending, unit.mode)
            groups.setdefault(together if self.in_turn else unit, []).append(unit)
        return [tuple(group) for group in groups.values()]

    def file(self, path: Path, unit: Unit) -> Path:
        """Where a unit's trace goes: with its name in it where there are several."""
        if len(self.units) == 1:
            return path
        several = len({other.context_length for other in self.units}) > 1
        name = f"{unit.size}-{unit.context_length}" if several else unit.size
        return path.with_name(f"{path.stem}.{name}-{unit.label}-{unit.mode}{path.suffix}")


@dataclass
class Stepper:
    """A model that takes steps in a mode, and the wall time of each phase of them."""

    model: nn.Module
    loss: models.Loss
    plan: Plan
    unit: Unit
    device: torch.device
    optimizer: torch.optim.Optimizer | None = None
    samples_ms: dict[str, list[float]] = field(default_factory=dict)
    timeline: Timeline | None = None
    """Told where phases begin and end, in the pass that splits them."""
    parts_ms: dict[str, list[dict[str, float]]] = field(default_factory=dict)
    held_bytes: int = 0
    """What was allocated between forward and backward of the last step."""
    held_mib: float | None = None
    """On a GPU, as in the records, and so is the next."""
    peak_mib: float | None = None

    def __post_init__(self) -> None:
        config = self.plan.config(self.unit)
        generator = torch.Generator().manual_seed(0)
        shape = (self.plan.batch, config.context_length + 1)
        text = torch.randint(config.vocab_size, shape, generator=generator)
        text = text.to(self.device)
        self.tokens, self.targets = text[:, :-1].contiguous(), text[:, 1:].contiguous()
        if self.unit.mode == "train":
            fused = self.device.type == "cuda"
            self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=fused)

    def step(self) -> None:
        """One step; its phases' times are added to ``samples_ms``."""
        self.model.zero_grad(set_to_none=True)
        if self.unit.ending == GRAPHS:
            torch.compiler.cudagraph_mark_step_begin()  # what the last step returned may be written anew
        grad = torch.no_grad() if self.unit.mode == "forward" else contextlib.nullcontext()
        low = torch.autocast(self.device.type, self.plan.dtype, enabled=self.plan.dtype != torch.float32)
        with self._phase("forward"), grad, low:
            loss = self.loss(self.tokens, self.targets)
        self.held_bytes = allocated_bytes(self.device)
        if self.unit.mode != "forward":
            with self._phase("backward"):
                loss.backward()
        if self.optimizer is not None:
            with self._phase("optimizer"):
                self.optimizer.step()

    @contextlib.contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        self._wait()
        mark = torch.cuda.nvtx.range(name) if self.device.type == "cuda" else contextlib.nullcontext()
        started = time.perf_counter()
        with mark, torch.profiler.record_function(name):
            if self.timeline is not None:
                self.timeline.begin()
            yield
            if self.timeline is not None:
                self.parts_ms.setdefault(name, []).append(self.timeline.end())
            self._wait()
        self.samples_ms.setdefault(name, []).append((time.perf_counter() - started) * 1e3)

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def run(plan: Plan, device: torch.device, writer: Writer) -> list[ProfileRecord]:
    """Measure every unit of a plan; the failure of one, out of memory say, is its record and costs no other.

    Args:
        plan: What to measure.
        device: Where.
        writer: Gets a record for each unit as soon as there is one.

    Returns:
        The records, in the order in which they were measured.

    Raises:
        ArgumentError: There is no model for one of the units; nothing has been measured then.
        DeviceLostError: The device answers no more; what was measured is written.
    """
    cases = {unit: plan.case(unit) for unit in plan.units}
    operations = 10**12
    reference_ms = compute_ms(Traffic(0, 0, 0, operations), device, make_clock(device))
    written: list[ProfileRecord] = []
    for group in plan.groups():
        found = _measure(group, plan, device, operations / reference_ms)
        for unit, figures in zip(group, found, strict=True):
            record = writer.write("transformer", cases[unit], unit.label, unit.mode, figures)
            written.append(record)
            step = record.phases.get("step")
            result = f"{record.status}: {record.reason}" if step is None else f"{step.mean_ms:.4g} ms"
            name = f"{unit.size} {unit.context_length} {unit.label} {unit.mode}"
            print(f"[{len(written)}/{len(plan.units)}] {name}: {result}", file=sys.stderr, flush=True)
    release_memory(device)
    return written


def _measure(
    group: tuple[Unit, ...], plan: Plan, device: torch.device, flops_per_ms: float
) -> list[Mapping[str, Any] | Failure]:
    """The measured fields of the records of units that are measured together, or why there are none."""
    release_memory(device)
    if group[0].ending:
        torch.compiler.reset()
    steppers = [attempt(unit.label, functools.partial(_prepare, unit, plan, device)) for unit in group]
    with _no_collections():
        left = plan.steps
        while left > 0:
            for place, stepper in enumerate(steppers):
                if isinstance(stepper, Stepper):
                    steps = functools.partial(_take, stepper, min(left, TURN))
                    steppers[place] = attempt(stepper.unit.label, steps)
            left -= TURN
    return [
        attempt(unit.label, functools.partial(_figures, stepper, flops_per_ms))
        if isinstance(stepper, Stepper)
        else stepper
        for unit, stepper in zip(group, steppers, strict=True)
    ]


def _prepare(unit: Unit, plan: Plan, device: torch.device) -> Stepper:
    """A model that has warmed up, and what a step of it allocates besides what was there."""
    release_memory(device)
    before = allocated_bytes(device)
    model, loss = models.build(unit.provider, plan.config(unit), device, unit.ending)
    stepper = Stepper(model, loss, plan, unit, device)
    for _ in range(plan.warm_up):
        stepper.step()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        stepper.step()
        stepper.peak_mib = (torch.cuda.max_memory_allocated(device) - before) / MIB
        stepper.held_mib = (stepper.held_bytes - before) / MIB
    stepper.samples_ms.clear()
    return stepper


def _take(stepper: Stepper, steps: int) -> Stepper:
    """Measured steps, and no gradients kept while others take theirs."""
    for _ in range(steps):
        stepper.step()
    stepper.model.zero_grad(set_to_none=True)
    return stepper


def _figures(stepper: Stepper, flops_per_ms: float) -> Mapping[str, Any]:
    """The measured fields of a unit's record."""
    unit, plan = stepper.unit, stepper.plan
    config = plan.config(unit)
    step_ms = [sum(phases) for phases in zip(*stepper.samples_ms.values())]
    phases = {name: phase(samples) for name, samples in (*stepper.samples_ms.items(), ("step", step_ms))}
    tokens = plan.batch * unit.context_length
    flops = models.flops_per_step(config, tokens, backward=unit.mode != "forward")
    mean_ms = phases["step"].mean_ms
    # A compiled model has no borders between its modules, and another's modules are not known here.
    ours = unit.provider != models.LLAMA and not unit.ending
    parts = _parts(stepper) if plan.parts and ours else {}
    if plan.chrome_trace is not None:
        _trace(stepper, plan.file(plan.chrome_trace, unit), ranges=ours)
    if plan.memory_snapshot is not None:
        _snapshot(stepper, plan.file(plan.memory_snapshot, unit))
    return {
        "steps": plan.steps,
        "phases": phases,
        "tokens_per_s": tokens / mean_ms * 1e3,
        "peak_memory_mib": stepper.peak_mib,
        "held_memory_mib": stepper.held_mib,
        "parameters": sum(parameter.numel() for parameter in stepper.model.parameters()),
        "flops": flops,
        "mfu": flops / flops_per_ms / mean_ms,
        "parts_ms": parts,
    }


@contextlib.contextmanager
def _no_collections() -> Iterator[None]:
    """Collect garbage now and none inside: what compilers leave behind takes longer to look through than a step."""
    gc.collect()
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _parts(stepper: Stepper) -> dict[str, dict[str, float]]:
    """Milliseconds by phase and part, the mean of a few steps with hooks."""
    stepper.timeline = timeline = Timeline(stepper.device)
    with hooked(stepper.model, timeline.enter, timeline.leave):
        for _ in range(1 + PART_STEPS):  # the first warms up the hooks
            stepper.step()
    stepper.timeline = None
    measured = {name: steps[1:] for name, steps in stepper.parts_ms.items() if name != "optimizer"}
    return {
        name: {part: statistics.fmean(step[part] for step in steps) for part in steps[0]}
        for name, steps in measured.items()
    }


def _trace(stepper: Stepper, file: Path, ranges: bool) -> None:
    """A trace for Perfetto or chrome://tracing, with ranges for phases and, if wanted, for parts."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if stepper.device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    file.parent.mkdir(parents=True, exist_ok=True)
    marks: list[Any] = []

    def enter(part: str) -> None:
        marks.append(torch.profiler.record_function(part))
        marks[-1].__enter__()

    def leave(part: str) -> None:
        marks.pop().__exit__(None, None, None)

    around = hooked(stepper.model, enter, leave) if ranges else contextlib.nullcontext()
    with around, torch.profiler.profile(activities=activities) as profiler:
        for _ in range(TRACE_STEPS):
            stepper.step()
    profiler.export_chrome_trace(str(file))


def _snapshot(stepper: Stepper, file: Path) -> None:
    """Every allocation of one step, for pytorch.org/memory_viz."""
    file.parent.mkdir(parents=True, exist_ok=True)
    torch.cuda.memory._record_memory_history(max_entries=1_000_000)
    try:
        stepper.step()
        torch.cuda.memory._dump_snapshot(str(file))
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
