"""Profiles of one case, not timed for records: a timeline, allocations, or counters of Nsight Compute."""

from __future__ import annotations

import bisect
import json
import logging
import shlex
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from warploom.bench.attempt import Failure, attempt
from warploom.bench.evaluate import Call, Unit, provider_call
from warploom.bench.runner import Selection, plan
from warploom.errors import ArgumentError, BackendError, DeviceError
from warploom.ops.spec import Bench, Unsupported

OTHER = "other"
"""The part for time of a phase that is in no range."""
_WARM_UPS = 3
_TRACED = 5
_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_LAUNCHES = ("cuda_runtime", "cuda_driver")
_RANGE = "user_annotation"

Event = Mapping[str, Any]
_log = logging.getLogger("warploom")


@dataclass(frozen=True)
class Trace:
    """The time and memory of a provider's call by kernel and part: means of some calls."""

    provider: str
    path: Path
    """The timeline."""
    kernels: dict[str, tuple[float, float]]
    """Launches and milliseconds of each kernel of a GPU, or of each of PyTorch's operators on a CPU."""
    parts: dict[tuple[str, str], float]
    """Milliseconds by phase and part; empty where the bench marks none."""
    peak_mib: float
    """The most that a call held at once of what it allocated itself."""


def one_unit(benches: Sequence[Bench], selection: Selection, device: torch.device) -> Unit:
    """Returns the one case and mode that a selection means.

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


def chrome(unit: Unit, providers: Sequence[str], device: torch.device, output: Path) -> list[Trace]:
    """Write a timeline of some calls of each provider, for Perfetto or ``chrome://tracing``, and sum it up.

    A provider that fails is said so and passed by.
    """
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    traces = []
    for name, call in _ready(unit, providers, device):
        with torch.profiler.profile(activities=activities, record_shapes=True, profile_memory=True) as profile:
            for _ in range(_TRACED):
                with torch.profiler.record_function(f"{name} {unit.mode}"):
                    call()
            torch.get_device_module(device).synchronize()
        path = output / f"trace-{name}.json"
        profile.export_chrome_trace(str(path))
        traces.append(read_trace(name, path, f"{name} {unit.mode}"))
    return traces


def read_trace(provider: str, path: Path, call: str) -> Trace:
    """Returns the sums of a timeline, in which a range named ``call`` is around each call."""
    events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    timed = [event for event in events if "dur" in event]
    ranges = [event for event in timed if event.get("cat") == _RANGE]
    calls = sum(event["name"] == call for event in ranges) or 1
    kernels = [event for event in timed if event.get("cat") in _ON_DEVICE]
    # Ranges that a compiler makes around its graphs, "## …", are no phases.
    ranges = [event for event in ranges if not event["name"].startswith("## ")]
    phases = [e for e, around in _nest(ranges) if [outer["name"] for outer in around] == [call]]
    if kernels:
        launches = [event for event in timed if event.get("cat") in _LAUNCHES]
        places = {e["args"].get("correlation"): (e, around) for e, around in _nest([*ranges, *launches])}
        spans = [(e["dur"], *places.get(e["args"]["correlation"], (e, []))) for e in kernels]
        worked = [(kernel["name"], kernel["dur"]) for kernel in kernels]
    else:
        spans = [(us, e, [*around, e]) for e, us, around in _own(ranges) if e["name"] != call]
        worked = [(e["name"], us) for e, us, _ in _own(e for e in timed if e.get("cat") == "cpu_op")]
    parts: Counter[tuple[str, str]] = Counter()
    if phases:
        starts = [phase["ts"] for phase in phases]
        for us, moment, around in spans:
            phase = phases[max(bisect.bisect_right(starts, moment["ts"]) - 1, 0)]["name"]
            inner = [e["name"] for e in around if e.get("cat") == _RANGE and e["name"] not in (call, phase)]
            parts[phase, inner[-1] if inner else OTHER] += us / 1e3 / calls
    found: dict[str, tuple[float, float]] = {}
    for name, us in worked:
        count, ms = found.get(name, (0.0, 0.0))
        found[name] = (count + 1 / calls, ms + us / 1e3 / calls)
    ordered = dict(sorted(found.items(), key=lambda item: -item[1][1]))
    return Trace(provider, path, ordered, dict(parts), _peak(events) / 2**20)


def _nest(events: Iterable[Event]) -> Iterator[tuple[Event, list[Event]]]:
    """Yields each event of a timeline with those around it on its thread, the outermost first."""
    around: dict[Any, list[Event]] = {}
    for event in sorted(events, key=lambda event: (event["ts"], -event["dur"])):
        open_ = [e for e in around.get(event["tid"], []) if e["ts"] + e["dur"] > event["ts"]]
        yield event, open_
        around[event["tid"]] = [*open_, event]


def _own(events: Iterable[Event]) -> list[tuple[Event, float, list[Event]]]:
    """Returns each event with the microseconds in which it was the innermost, and with those around it."""
    found = list(_nest(events))
    own = {id(event): event["dur"] for event, _ in found}
    for event, around in found:
        if around:
            own[id(around[-1])] -= event["dur"]
    return [(event, own[id(event)], around) for event, around in found]


def _peak(events: Iterable[Event]) -> int:
    """Returns the most bytes that were allocated at once since the beginning, on the device if there was one."""
    told = [event["args"] for event in events if event.get("name") == "[memory]"]
    device = max((each["Device Type"] for each in told), default=0)
    held = peak = 0
    for each in told:
        if each["Device Type"] == device:
            held += each["Bytes"]
            peak = max(peak, held)
    return peak


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


def memory(
    unit: Unit, providers: Sequence[str], device: torch.device, output: Path
) -> dict[Path, list[tuple[str, int, float]]]:
    """Write every allocation of one call, for pytorch.org/memory_viz.

    Returns:
        For each file the lines of Python that allocate, how often, and how many MiB; the largest first.

    Raises:
        DeviceError: Not on a GPU, whose allocations alone are recorded.
    """
    if device.type != "cuda":
        raise DeviceError("profile: only a GPU's allocations are recorded, and this is a CPU")
    written = {}
    for name, call in _ready(unit, providers, device):
        torch.cuda.memory._record_memory_history(max_entries=1_000_000)
        try:
            call()
            history = [entry for of_device in torch.cuda.memory._snapshot()["device_traces"] for entry in of_device]
            path = output / f"memory-{name}.pickle"
            torch.cuda.memory._dump_snapshot(str(path))
        finally:
            torch.cuda.memory._record_memory_history(enabled=None)
        written[path] = _by_line([entry for entry in history if entry["action"] == "alloc"])
    return written


def _by_line(allocations: Iterable[Event]) -> list[tuple[str, int, float]]:
    """Returns allocations summed by the innermost line of Python outside of PyTorch."""
    counts: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    torch_folder = str(Path(torch.__file__).parent)
    for entry in allocations:
        own = (f for f in entry.get("frames", ()) if f["filename"].endswith(".py"))
        frame = next((f for f in own if not f["filename"].startswith(torch_folder)), None)
        place = "in no line of Python"
        if frame is not None:
            place = f"{Path(frame['filename']).name}:{frame['line']} {frame['name']}"
        counts[place] += 1
        sizes[place] += entry["size"]
    return [(place, counts[place], size / 2**20) for place, size in sizes.most_common()]


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
    for command in commands.values():
        print(shlex.join(command), flush=True)
        if subprocess.run(command, check=False).returncode:
            raise BackendError(f"profile: failed, see above: {shlex.join(command)}")
    return [output / f"{name}.ncu-rep" for name in commands]


def _ready(unit: Unit, providers: Sequence[str], device: torch.device) -> list[tuple[str, Call]]:
    """Returns each provider's call, warmed up."""
    ready = []
    for name in providers:
        call = attempt(name, partial(_warm, unit, name, device))
        if isinstance(call, Failure):
            _log.warning("%s: %s: %s", name, call.status, call.reason)
        else:
            ready.append((name, call))
    return ready


def _warm(unit: Unit, name: str, device: torch.device) -> Call:
    if unit.bench.prepare is not None:
        return unit.bench.prepare(name, unit, device)
    if unit.bench.measure is not None:
        raise Unsupported(f"no profile is taken of {unit.bench.name}")
    call = provider_call(unit, name, device)
    for _ in range(_WARM_UPS):
        call()
    torch.get_device_module(device).synchronize()
    return call
