"""Attention alone, over a grid of head dimensions and lengths: the published cases, in float32, without heads.

Each pass is timed by the wall clock with the device idle before and after, forward and backward apart.
"""

from __future__ import annotations

import functools
import itertools
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F

from warploom import flash_attention
from warploom.bench.attempt import attempt
from warploom.bench.measure import allocated_bytes, release_memory
from warploom.profile.records import ProfileRecord, Writer, phase

__all__ = [
    "HEAD_DIMS",
    "LENGTHS",
    "PASSES",
    "PROVIDERS",
    "QUICK_HEAD_DIMS",
    "QUICK_LENGTHS",
    "QUICK_PASSES",
    "Grid",
    "run",
]

Tensor = torch.Tensor
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]

HEAD_DIMS = (16, 32, 64, 128)
LENGTHS = (256, 1024, 4096, 8192, 16384)
PASSES = 100
QUICK_HEAD_DIMS, QUICK_LENGTHS, QUICK_PASSES = (16, 64), (256, 1024), 10
WARM_UP = 5
MIB = 2**20


@dataclass(frozen=True)
class Grid:
    """What to measure."""

    providers: tuple[str, ...]
    head_dims: tuple[int, ...] = HEAD_DIMS
    lengths: tuple[int, ...] = LENGTHS
    batch: int = 8
    passes: int = PASSES
    causal: bool = False


def plain(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """Attention written out, (B, N, D) each: the matrix of weights is formed and kept for the backward."""
    scores = q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5
    if causal:
        index = torch.arange(q.shape[1], device=q.device)
        scores = scores.masked_fill(index > index[:, None], -torch.inf)
    out: Tensor = scores.softmax(dim=-1) @ v
    return out


def _compiled(causal: bool) -> Attend:
    attend: Attend = torch.compile(functools.partial(plain, causal=causal), dynamic=False)
    return attend


def _flash(causal: bool) -> Attend:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flash_attention(q.unsqueeze(2), k.unsqueeze(2), v.unsqueeze(2), causal=causal).squeeze(2)

    return attend


def _sdpa(causal: bool) -> Attend:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (t.unsqueeze(1) for t in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal).squeeze(1)

    return attend


PROVIDERS: Mapping[str, Callable[[bool], Attend]] = {
    "plain": lambda causal: functools.partial(plain, causal=causal),
    "plain+compile": _compiled,
    "flash": _flash,
    "sdpa": _sdpa,
}


def run(grid: Grid, device: torch.device, writer: Writer) -> list[ProfileRecord]:
    """Measure the grid; where memory runs out, that is the record.

    Args:
        grid: What to measure.
        device: Where.
        writer: Gets a record for each case and provider as soon as there is one.

    Returns:
        The records, by head dimension, then length, then provider.
    """
    cases = list(itertools.product(grid.head_dims, grid.lengths, grid.providers))
    written = []
    for number, (head_dim, n, provider) in enumerate(cases, start=1):
        release_memory(device)
        if provider == "plain+compile":
            torch.compiler.reset()
        attend = PROVIDERS[provider](grid.causal)
        figures = attempt(provider, functools.partial(_measure, attend, grid, head_dim, n, device))
        case = {"batch": grid.batch, "head_dim": head_dim, "n": n, "dtype": "float32", "causal": grid.causal}
        record = writer.write("attention", case, provider, "forward-backward", figures)
        written.append(record)
        times = ", ".join(f"{name} {p.mean_ms:.4g} ms" for name, p in record.phases.items() if name != "step")
        result = times or f"{record.status}: {record.reason}"
        name = f"head_dim {head_dim} n {n} {provider}"
        print(f"[{number}/{len(cases)}] {name}: {result}", file=sys.stderr, flush=True)
    release_memory(device)
    return written


def _measure(attend: Attend, grid: Grid, head_dim: int, n: int, device: torch.device) -> dict[str, Any]:
    """The measured fields of a record."""
    generator = torch.Generator().manual_seed(0)
    q, k, v, grad = (torch.randn(grid.batch, n, head_dim, generator=generator).to(device) for _ in range(4))
    inputs = [t.requires_grad_() for t in (q, k, v)]
    samples: dict[str, list[float]] = {"forward": [], "backward": []}
    held = 0
    for turn in range(WARM_UP + grid.passes):
        for tensor in inputs:
            tensor.grad = None
        if turn == WARM_UP and device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        times = [_now(device)]
        out = attend(q, k, v)
        times.append(_now(device))
        held = allocated_bytes(device)
        out.backward(grad)
        times.append(_now(device))
        if turn >= WARM_UP:
            for name, start, stop in zip(samples, times, times[1:]):
                samples[name].append((stop - start) * 1e3)
    cuda = device.type == "cuda"
    step = [sum(both) for both in zip(*samples.values())]
    return {
        "steps": grid.passes,
        "phases": {name: phase(values) for name, values in (*samples.items(), ("step", step))},
        "held_memory_mib": held / MIB if cuda else None,
        "peak_memory_mib": torch.cuda.max_memory_allocated(device) / MIB if cuda else None,
    }


def _now(device: torch.device) -> float:
    """Seconds on the wall clock once the device is idle."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
