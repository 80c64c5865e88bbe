"""Timing: device time with a cold cache, host time, peak memory; several providers side by side."""

from __future__ import annotations

import functools
import gc
import itertools
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol, TypeVar

import torch

from warploom.bench.attempt import Failure, attempt

Call = Callable[[], object]
T = TypeVar("T")

TARGET_MS = 25.0
"""Time to accumulate of the fastest call of a case, from which the number of rounds follows."""
MIN_ROUNDS, MAX_ROUNDS = 15, 200
CASE_MS = 20_000.0
"""Milliseconds that all calls of a case may take together."""
BRIEF_CASE_MS = 300.0
"""Milliseconds that all calls of a case may take in the suite ``quick``, which has fewer rounds."""
SAMPLE_MS = 1.5
"""Milliseconds that a sample of a call takes besides the call: caches are overwritten, and the host waits."""
HOST_SHARE = 1 / 100
"""The part of a case's time that each call may take to find its host time."""
FLOOR_ROUNDS = 3
"""The least rounds of a call that is too slow for ``MIN_ROUNDS``."""
FLUSH_BYTES = 256 * 2**20
SETTLE_S = 0.15
"""Seconds that a GPU needs, after idling or computing in float64, to reach the clocks of what is timed."""


@dataclass(frozen=True)
class Timing:
    """The time of a call: the median and the spread of its repetitions."""

    ms: float
    ms_p20: float
    ms_p80: float
    host_us: float | None
    rounds: int
    late: int = 0
    """Repetitions for which the host was not ahead of the device."""

    @classmethod
    def of(cls, samples: Sequence[float], host_us: float | None = None, late: int = 0) -> Timing:
        """Returns the timing of the milliseconds of every repetition."""
        low, middle, high = percentiles(samples)
        return cls(middle, low, high, host_us, len(samples), late)

    def scaled(self, factor: float) -> Timing:
        """Returns the time of ``factor`` times the work."""
        return replace(self, ms=factor * self.ms, ms_p20=factor * self.ms_p20, ms_p80=factor * self.ms_p80)


class Sample(NamedTuple):
    """One repetition."""

    ms: float
    ahead: bool = True
    """True if the host had queued the whole call before the device began with it."""


def wall_us(call: Call) -> float:
    """Returns the wall time from entering a call to its return."""
    entered = time.perf_counter_ns()
    call()
    return (time.perf_counter_ns() - entered) / 1e3


class Clock(Protocol):
    """Times calls on one kind of device."""

    def host_us(self, call: Call) -> float:
        """Returns the wall time from entering a call to its return, with nothing queued before it."""

    def sample(self, call: Call, host_us: float) -> Sample:
        """Time one call on the device, with a cold cache; queueing it takes ``host_us``."""

    def settle(self, samplers: Sequence[Callable[[], object]]) -> None:
        """Time calls in vain until a device's clocks are those of such work. What follows counts."""
        return


class CudaClock:
    """Times a call between two device events, after the L2 cache has been filled with something else."""

    def __init__(self, device: torch.device) -> None:
        l2 = torch.cuda.get_device_properties(device).L2_cache_size
        self.flush = torch.empty(max(FLUSH_BYTES, 4 * l2), dtype=torch.uint8, device=device)
        self.start = torch.cuda.Event(enable_timing=True)
        self.end = torch.cuda.Event(enable_timing=True)
        cycles = 2_000_000
        self.cycles_per_us = cycles / (1e3 * min(self._spin_ms(cycles) for _ in range(3)))

    def _spin_ms(self, cycles: int) -> float:
        self.start.record()
        torch.cuda._sleep(cycles)
        self.end.record()
        self.end.synchronize()
        return float(self.start.elapsed_time(self.end))

    def host_us(self, call: Call) -> float:
        """See `Clock.host_us`."""
        torch.cuda.synchronize()
        found = wall_us(call)
        torch.cuda.synchronize()
        return found

    def sample(self, call: Call, host_us: float) -> Sample:
        """See `Clock.sample`."""
        # The device waits until the host has queued the whole call; otherwise gaps between its launches,
        # which are the host's time, would be counted as the device's. When it did not wait long enough, once
        # more and longer; a call that itself waits for the device never lets the host get ahead.
        for longer in (1, 3, 9):
            self.flush.zero_()
            torch.cuda._sleep(int(longer * (2 * host_us + 20) * self.cycles_per_us))
            self.start.record()
            call()
            self.end.record()
            host_was_ahead = not self.start.query()
            self.end.synchronize()
            if host_was_ahead:
                break
        return Sample(float(self.start.elapsed_time(self.end)), host_was_ahead)

    def settle(self, samplers: Sequence[Callable[[], object]]) -> None:
        """See `Clock.settle`."""
        end = time.monotonic() + SETTLE_S
        for sampler in itertools.cycle(samplers):
            sampler()
            if time.monotonic() >= end:
                break


class CpuClock(Clock):
    """Times a call with the wall clock, after the caches have been filled with something else."""

    def __init__(self) -> None:
        self.flush = torch.empty(32 * 2**20, dtype=torch.uint8)

    def host_us(self, call: Call) -> float:
        """See `Clock.host_us`."""
        return wall_us(call)

    def sample(self, call: Call, host_us: float) -> Sample:
        """See `Clock.sample`; there is no queue to wait for."""
        self.flush.zero_()
        return Sample(wall_us(call) / 1e3)


def make_clock(device: torch.device) -> Clock:
    """Returns the clock for a device."""
    return CudaClock(device) if device.type == "cuda" else CpuClock()


def percentiles(samples: Sequence[float]) -> tuple[float, float, float]:
    """Returns the 20th, 50th and 80th percentile, interpolated."""
    low, middle, high = torch.tensor(samples, dtype=torch.float64).quantile(
        torch.tensor([0.2, 0.5, 0.8], dtype=torch.float64)
    )
    return float(low), float(middle), float(high)


def interleave(
    calls: Mapping[str, Callable[[], T] | Failure], rounds: Mapping[str, int]
) -> dict[str, list[T] | Failure]:
    """Make calls round by round, so that a drift of the clocks meets all of them alike.

    Each round begins with another call, so that none always comes behind the same one.

    A call that fails is not made again, and its failure is its result; one that failed before stays as it is.
    """
    found: dict[str, list[T] | Failure] = {
        n: call if isinstance(call, Failure) else [] for n, call in calls.items()
    }
    names = list(rounds)
    for number in range(max(rounds.values(), default=0)):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            call, results = calls[name], found[name]
            if isinstance(call, Failure) or isinstance(results, Failure) or number >= rounds[name]:
                continue
            result = attempt(name, call)
            if isinstance(result, Failure):
                found[name] = result
            else:
                results.append(result)
    return found


def time_interleaved(
    calls: Mapping[str, Call | Failure], clock: Clock, case_ms: float | None = None
) -> dict[str, Timing | Failure]:
    """Returns a timing or the failure of each call, by provider, interleaved; earlier failures stay as they are.

    All have the same number of rounds, but those that are too slow for it: together they take ``case_ms``, or
    `CASE_MS`.
    """
    host_us: dict[str, float] = {}
    estimate_ms: dict[str, float] = {}
    samplers: dict[str, Callable[[], Sample] | Failure] = {}
    for name, call in calls.items():
        if isinstance(call, Failure):
            samplers[name] = call
            continue
        warm = attempt(name, functools.partial(_warm_up, call, clock, 1e3 * HOST_SHARE * (case_ms or CASE_MS)))
        if isinstance(warm, Failure):
            samplers[name] = warm
        else:
            host_us[name], estimate_ms[name] = warm
            samplers[name] = functools.partial(clock.sample, call, host_us[name])
    clock.settle(
        [functools.partial(attempt, name, s) for name, s in samplers.items() if not isinstance(s, Failure)]
    )
    results: dict[str, Timing | Failure] = {}
    for name, samples in interleave(samplers, _rounds(estimate_ms, case_ms or CASE_MS)).items():
        if isinstance(samples, Failure):
            results[name] = samples
        else:
            late = sum(not sample.ahead for sample in samples)
            results[name] = Timing.of([sample.ms for sample in samples], host_us[name], late)
    return results


def _warm_up(call: Call, clock: Clock, most_us: float) -> tuple[float, float]:
    """Run a call for its first-time costs. Returns its host time and an estimate of its device time."""
    call()
    host: list[float] = []
    while len(host) < 3 or (len(host) < 20 and sum(host) < most_us):
        host.append(clock.host_us(call))
    host_us = statistics.median(host)
    return host_us, statistics.median(clock.sample(call, host_us).ms for _ in range(3))


def _rounds(estimate_ms: Mapping[str, float], case_ms: float) -> dict[str, int]:
    """Returns rounds for each call: as many as the fastest needs and the time allows, fewer for the slowest."""
    share_ms = case_ms / max(len(estimate_ms), 1)  # what one call may take
    quick = {name: ms for name, ms in estimate_ms.items() if ms * MIN_ROUNDS <= share_ms}
    wanted = math.ceil(TARGET_MS / max(min(quick.values(), default=1.0), 1e-3))
    affordable = int(case_ms / max(sum(quick.values()) + SAMPLE_MS * len(quick), 1e-3))
    rounds = min(max(MIN_ROUNDS, min(wanted, affordable)), MAX_ROUNDS)
    return {
        name: rounds if name in quick else max(FLOOR_ROUNDS, int(share_ms / ms)) for name, ms in estimate_ms.items()
    }


def allocated_bytes(device: torch.device) -> int:
    """Returns the bytes that tensors hold on a GPU; 0 on a CPU, where they are not counted."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def release_memory(device: torch.device) -> None:
    """Give back what nothing refers to any more."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()


def peak_bytes(call: Call, device: torch.device) -> int | None:
    """Returns the most bytes allocated at once while a call runs, the call's and all others; ``None`` on a CPU."""
    if device.type != "cuda":
        return None
    release_memory(device)
    torch.cuda.reset_peak_memory_stats(device)
    result = call()
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device)
    del result
    return peak
