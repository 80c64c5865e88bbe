"""Profiles of one case: a timeline from `torch.profiler`, or the counters of one call from Nsight Compute."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from warploom.bench.attempt import Failure, attempt
from warploom.bench.evaluate import Call, Unit, provider_call
from warploom.bench.runner import Selection, plan
from warploom.bench.storage import probe
from warploom.errors import ArgumentError, BackendError, DeviceError
from warploom.ops.spec import Bench

__all__ = ["PROFILERS", "call_once", "chrome", "ncu", "one_unit"]

PROFILERS = ("chrome", "ncu", "once")
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
            f"--profile takes one case in one mode, and {len(units)} fit ({some}; …): narrow by --mode and --case"
        )
    return units[0]


def chrome(unit: Unit, providers: Sequence[str], device: torch.device, output: Path) -> list[Path]:
    """Write a timeline of some calls of each provider, to be opened in Perfetto or ``chrome://tracing``.

    Args:
        unit: The case and mode.
        providers: Which providers; one that fails is said so and passed by.
        device: Where.
        output: A folder for ``trace-PROVIDER.json``.

    Returns:
        The files written.
    """
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    probe(output)
    written = []
    for name, call in _ready(unit, providers, device):
        with torch.profiler.profile(activities=activities, record_shapes=True) as profile:
            for _ in range(_TRACED):
                with torch.profiler.record_function(f"{name} {unit.mode}"):
                    call()
            _finish(device)
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
        raise DeviceError("--profile once: the marks of a profiled region are CUDA's, and this is a CPU")
    for _, call in _ready(unit, providers, device):
        torch.cuda.profiler.start()
        call()
        torch.cuda.synchronize(device)
        torch.cuda.profiler.stop()


def ncu(unit: Unit, providers: Sequence[str], words: Sequence[str], output: Path) -> list[Path]:
    """Profile one call of each provider with ``ncu``, which must be installed; prints its command lines.

    Args:
        unit: The case and mode, for messages.
        providers: Which providers; a file for each.
        words: The arguments of ``warploom`` that select the unit, without provider and profile.
        output: A folder for ``PROVIDER.ncu-rep``.

    Returns:
        The files that were to be written.

    Raises:
        BackendError: ``ncu`` is not installed, or fails.
    """
    commands = {name: ncu_command(name, words, output) for name in providers}
    if shutil.which("ncu") is None:
        lines = "\n".join(f"  {shlex.join(command)}" for command in commands.values())
        raise BackendError(
            f"--profile ncu: ncu (NVIDIA Nsight Compute) is not on the PATH; where it is, run for {unit}\n{lines}"
        )
    probe(output)
    for command in commands.values():
        print(shlex.join(command), flush=True)
        if subprocess.run(command, check=False).returncode:
            raise BackendError(f"--profile ncu: failed, see above: {shlex.join(command)}")
    return [output / f"{name}.ncu-rep" for name in commands]


def ncu_command(provider: str, words: Sequence[str], output: Path) -> list[str]:
    """The command line that profiles one provider's call."""
    # The clocks stay as they are: locking them needs rights that containers lack, and the bench does not lock them.
    clocks = ["--clock-control", "none"]
    profiler = ["ncu", "--set", "full", "--profile-from-start", "off", *clocks, "--force-overwrite"]
    python = [sys.executable, "-m", "warploom"]
    return [
        *profiler,
        "--export",
        str(output / provider),
        *python,
        *words,
        "--provider",
        provider,
        "--profile",
        "once",
    ]


def _ready(unit: Unit, providers: Sequence[str], device: torch.device) -> list[tuple[str, Call]]:
    """Each provider's call, warmed up."""
    ready = []
    for name in providers:
        call = attempt(name, lambda name=name: _warm(unit, name, device))  # type: ignore[misc]
        if isinstance(call, Failure):
            print(f"{name}: {call.status}: {call.reason}", file=sys.stderr)
        else:
            ready.append((name, call))
    return ready


def _warm(unit: Unit, name: str, device: torch.device) -> Call:
    call = provider_call(unit, name, device)
    for _ in range(_WARM_UPS):
        call()
    _finish(device)
    return call


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
