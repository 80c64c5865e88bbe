"""Disturbances of what is timed: a GPU's clocks, temperature and slowdowns, and other programs on a CPU.

Those of a GPU are sampled between repetitions. They come from NVML (the package ``nvidia-ml-py``), or from
``nvidia-smi``, which is slower and asked less often.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from warploom.bench import measure
from warploom.bench.environment import nvidia_smi
from warploom.bench.measure import Call, Clock, CpuClock

SLOWDOWNS = {
    0x08: "hardware slowdown",
    0x20: "thermal slowdown by the driver",
    0x40: "thermal slowdown by the hardware",
    0x80: "power brake",
}
"""NVML's reasons for lower clocks that make a time doubtful."""
POWER_CAP = 0x04
"""NVML's reason for lower clocks under heavy arithmetic. That is how the chip works, and part of the result."""
BUSY = 10
"""The percentage of a GPU's time or memory, or of a CPU's time, from which it counts as used by somebody else."""
LOOK_S = 0.2
"""Seconds for which use of a CPU is looked at; its counters move 100 times a second."""
CLOCK_RANGE = 1.1
"""The largest ratio of the highest to the lowest clock of an undisturbed case."""


@dataclass(frozen=True)
class Reading:
    """A reading of the sensors."""

    sm_mhz: int
    celsius: int
    reasons: int
    """NVML's bits for what lowers the clocks."""


@dataclass(frozen=True)
class Reader:
    """Reads the sensors of a device."""

    read: Callable[[], Reading | None]
    """Returns None when they do not answer."""
    every_s: float
    """Seconds between two readings, so that reading disturbs nothing itself."""


class CpuTimes(NamedTuple):
    """Seconds since an earlier moment."""

    wall: float
    everyone: float
    """The time of all processors in all programs."""
    own: float
    """The same, in this process and in those of its children that have ended."""


class WatchedClock:
    """A clock that looks at the sensors between repetitions that count, never while one runs."""

    def __init__(self, clock: Clock, reader: Reader | None) -> None:
        self.clock = clock
        self.reader = reader
        self.samples, self.next_s, self.counts = list[Reading](), 0.0, False
        self.cpu_times: CpuTimes | None = None

    def host_us(self, call: Call) -> float:
        """See `Clock.host_us`."""
        return self.clock.host_us(call)

    def sample(self, call: Call, host_us: float) -> measure.Sample:
        """See `Clock.sample`."""
        taken = self.clock.sample(call, host_us)
        if self.counts and self.reader is not None and time.monotonic() >= self.next_s:
            seen = self.reader.read()
            if seen is not None:
                self.samples.append(seen)
            self.next_s = time.monotonic() + self.reader.every_s
        return taken

    def settle(self, samplers: Sequence[Callable[[], object]]) -> None:
        """See `Clock.settle`."""
        self.clock.settle(samplers)
        self.counts = True
        self.cpu_times = read_cpu_times() if isinstance(self.clock, CpuClock) else None

    def begin(self) -> None:
        """Forget what was seen: another case begins."""
        self.samples.clear()
        self.next_s = 0.0
        self.counts = False
        self.cpu_times = None

    def disturbance(self) -> str | None:
        """Returns the events since `begin` that make its times doubtful, if there were any."""
        bits = 0
        for seen in self.samples:
            bits |= seen.reasons
        found = [name for bit, name in SLOWDOWNS.items() if bits & bit]
        # The first look may find the device still waking up.
        clocks = [seen.sm_mhz for seen in self.samples[1:] if not seen.reasons & POWER_CAP]
        if clocks and max(clocks) > CLOCK_RANGE * min(clocks):
            found.append(f"the SM clock went from {min(clocks)} to {max(clocks)} MHz")
        if found:
            found.append(f"at {max(seen.celsius for seen in self.samples)} °C")
        return ", ".join([*found, *_other_programs(self.cpu_times)]) or None


def others_here(device: torch.device) -> str:
    """Returns what else uses this machine now, in words; empty where nothing does, or nobody knows."""
    earlier = read_cpu_times()
    if earlier is None:
        load, cores = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0, os.cpu_count() or 1
        found = [f"a load of {load:.1f} on {cores} cores"] if load > cores / 2 else []
    else:
        time.sleep(LOOK_S)
        found = _other_programs(earlier)
    if device.type == "cuda":
        uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
        with contextlib.suppress(ValueError):  # a GPU that does not say
            used, held, whole = map(float, nvidia_smi(uuid, "utilization.gpu,memory.used,memory.total"))
            found += [f"the GPU at {used:.0f} %"] if used >= BUSY else []
            found += [f"{held / 1024:.1f} GiB of its memory taken"] if 100 * held >= BUSY * whole else []
    return ", ".join(found)


def read_cpu_times() -> CpuTimes | None:
    """Returns the time that processors have worked so far; None on a system that does not say."""
    try:
        first = Path("/proc/stat").read_text(encoding="ascii").split("\n", 1)[0]
        user, nice, system, _, _, irq, softirq, steal = map(int, first.split()[1:9])
    except (OSError, ValueError):
        return None
    everyone = (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")
    return CpuTimes(time.monotonic(), everyone, sum(os.times()[:4]))


def _other_programs(earlier: CpuTimes | None) -> list[str]:
    """Returns how much other programs have used the processors since an earlier moment, if that is much."""
    now = read_cpu_times()
    if earlier is None or now is None or now.wall - earlier.wall < LOOK_S:
        return []
    of_others = (now.everyone - earlier.everyone) - (now.own - earlier.own)
    percent = min(100.0, 100 * of_others / ((now.wall - earlier.wall) * (os.cpu_count() or 1)))
    return [f"other programs used {percent:.0f} % of the processors"] if percent >= BUSY else []


def make_reader(device: torch.device) -> Reader | None:
    """Returns a reader of a device's sensors; None for a CPU, or where there are none."""
    if device.type != "cuda":
        return None
    uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
    for make in (_nvml_reader, _smi_reader):
        reader = make(uuid)
        if reader is not None and reader.read() is not None:
            return reader
    return None


def _nvml_reader(uuid: str) -> Reader | None:
    try:
        nvml = importlib.import_module("pynvml")
    except ModuleNotFoundError:
        return None
    try:
        nvml.nvmlInit()
        handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
    except nvml.NVMLError:  # no driver, or one that does not know this GPU
        return None

    def read() -> Reading | None:
        try:
            return Reading(
                nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM),
                nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU),
                nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle),
            )
        except nvml.NVMLError:
            return None

    return Reader(read, 0.05)


def _smi_reader(uuid: str) -> Reader | None:
    def read() -> Reading | None:
        try:
            clock, celsius, reasons = nvidia_smi(uuid, "clocks.sm,temperature.gpu,clocks_event_reasons.active")
            return Reading(int(clock), int(celsius), int(reasons, 16))
        except ValueError:
            return None

    return Reader(read, 2.0)
