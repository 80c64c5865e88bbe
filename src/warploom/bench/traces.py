"""Profiles of one case, not timed for records: a timeline, parts, allocations, or counters of Nsight Compute."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from warploom.bench import transformer
from warploom.bench.attempt import Failure, attempt
from warploom.bench.evaluate import Call, Unit, provider_call
from warploom.bench.parts import Timeline, hooked
from warploom.bench.runner import Selection, plan
from warploom.bench.storage import probe
from warploom.errors import ArgumentError, BackendError, DeviceError
from warploom.nn import TransformerLM
from warploom.ops.spec import Bench

_WARM_UPS = 3
_TRACED = 5


def one_unit(benches: Sequence[Bench], selection: Selection, device: torch.device) -> Unit:
    """The one case and mode that a selection means.

    Raises:
        ArgumentError: It means none, or several.
    """
    units = plan(benches, selection, device.type)
    if len(units) > 1:
        some = "; ".join(map(str, units[:3]))
        raise ArgumentError(
            f"profile: takes one case in one mode, and {len(units)} fit ({some}; …): narrow by --mode and --case"
        )
    return units[0]


def chrome(unit: Unit, providers: Sequence[str], device: torch.device, output: Path) -> list[Path]:
    """Write a timeline of some calls of each provider, for Perfetto or ``chrome://tracing``, and name the files.

    A provider that fails is said so and passed by.
    """
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    probe(output)
    written = []
    for name, call in _ready(unit, providers, device):
        with _ranges(call), torch.profiler.profile(activities=activities, record_shapes=True) as profile:
            for _ in range(_TRACED):
                with torch.profiler.record_function(f"{name} {unit.mode}"):
                    call()
            torch.get_device_module(device).synchronize()
        path = output / f"trace-{name}.json"
        profile.export_chrome_trace(str(path))
        written.append(path)
    return written


def call_once(unit: Unit, providers: Sequence[str], device: torch.device) -> None:
    """Run one call of each provider between the marks that tell a profiler around this process to look.

    Raises:
        DeviceError: Not on a GPU, which has the marks.
    """
    if device.type != "cuda":
        raise DeviceError("profile: the marks of a profiled region are CUDA's, and this is a CPU")
    for _, call in _ready(unit, providers, device):
        torch.cuda.profiler.start()
        call()
        torch.cuda.synchronize(device)
        torch.cuda.profiler.stop()


def parts(unit: Unit, providers: Sequence[str], device: torch.device) -> list[tuple[str, str, dict[str, float]]]:
    """Split steps of models by their parts, through marks around modules, which cost time themselves.

    Models that are not ours or compiled have no borders between their modules that are known, and are left out.

    Returns:
        Provider, phase, and milliseconds of each part, means of a few steps.

    Raises:
        ArgumentError: The bench is of an operator, which has no parts.
    """
    if unit.bench.measure is None:
        raise ArgumentError(f"profile: parts are those of a model, and {unit.bench.name} is an operator")
    found = []
    known = [name for name in providers if name != transformer.LLAMA and "+" not in name]
    for name, call in _ready(unit, known, device):
        stepper: transformer.Stepper = call.__self__  # type: ignore[attr-defined]
        stepper.timeline = timeline = Timeline(device)
        with hooked(stepper.model, timeline.enter, timeline.leave):
            for _ in range(1 + transformer.PART_STEPS):  # the first warms up the hooks
                call()
        for phase, steps in stepper.parts_ms.items():
            if phase != "optimizer":
                found.append((name, phase, {part: fmean(step[part] for step in steps[1:]) for part in steps[0]}))
    return found


def memory(unit: Unit, providers: Sequence[str], device: torch.device, output: Path) -> list[Path]:
    """Write every allocation of one call, for pytorch.org/memory_viz.

    Raises:
        DeviceError: Not on a GPU, whose allocations alone are recorded.
    """
    if device.type != "cuda":
        raise DeviceError("profile: only a GPU's allocations are recorded, and this is a CPU")
    probe(output)
    written = []
    for name, call in _ready(unit, providers, device):
        torch.cuda.memory._record_memory_history(max_entries=1_000_000)
        try:
            call()
            written.append(output / f"memory-{name}.pickle")
            torch.cuda.memory._dump_snapshot(str(written[-1]))
        finally:
            torch.cuda.memory._record_memory_history(enabled=None)
    return written


def ncu(unit: Unit, providers: Sequence[str], words: Sequence[str], output: Path) -> list[Path]:
    """Profile one call of each provider with ``ncu``, which must be installed; prints its command lines.

    Args:
        unit: The case and mode, for messages.
        providers: Which providers; a file ``PROVIDER.ncu-rep`` for each.
        words: The arguments of ``warploom`` that select the unit, without provider and profile.
        output: A folder for the files.

    Raises:
        BackendError: ``ncu`` is not installed, or fails.
    """
    # The clocks stay as they are: locking them needs rights that containers lack, and the bench does not lock them.
    options = ["ncu", "--set", "full", "--profile-from-start", "off", "--clock-control", "none"]
    options += ["--force-overwrite", "--export"]
    once = [sys.executable, "-m", "warploom", *words, "--provider"]
    commands = {name: [*options, str(output / name), *once, name, "--kind", "once"] for name in providers}
    if shutil.which("ncu") is None:
        lines = "\n".join(f"  {shlex.join(command)}" for command in commands.values())
        raise BackendError(
            f"profile: ncu (NVIDIA Nsight Compute) is not on the PATH; where it is, run for {unit}\n{lines}"
        )
    probe(output)
    for command in commands.values():
        print(shlex.join(command), flush=True)
        if subprocess.run(command, check=False).returncode:
            raise BackendError(f"profile: failed, see above: {shlex.join(command)}")
    return [output / f"{name}.ncu-rep" for name in commands]


@contextmanager
def _ranges(call: Call) -> Iterator[None]:
    """Ranges of a timeline for the parts of a model, where its modules run one by one."""
    stepper = getattr(call, "__self__", None)
    marks: list[Any] = []

    def enter(part: str) -> None:
        marks.append(torch.profiler.record_function(part))
        marks[-1].__enter__()

    def leave(part: str) -> None:
        marks.pop().__exit__(None, None, None)

    model = getattr(stepper, "model", None)
    with hooked(model, enter, leave) if isinstance(model, TransformerLM) else nullcontext():
        yield


def _ready(unit: Unit, providers: Sequence[str], device: torch.device) -> list[tuple[str, Call]]:
    """Each provider's call, warmed up."""
    ready = []
    for name in providers:
        call = attempt(name, partial(_warm, unit, name, device))
        if isinstance(call, Failure):
            print(f"{name}: {call.status}: {call.reason}", file=sys.stderr)
        else:
            ready.append((name, call))
    return ready


def _warm(unit: Unit, name: str, device: torch.device) -> Call:
    if unit.bench.measure is not None:
        return transformer.prepare(name, unit, device).step
    call = provider_call(unit, name, device)
    for _ in range(_WARM_UPS):
        call()
    torch.get_device_module(device).synchronize()
    return call
