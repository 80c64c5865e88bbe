"""Host time of each operator: from the call until its launches are queued, in microseconds.

``python tools/host_times.py --output results/h200/host.json`` needs a GPU. Tensors are small, so that the device
never holds the host up. The minimum is what the code costs; the median tells what else the machine was doing.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F

import warploom

CALLS = 500
ROUNDS = 3
"""Times that all of them are measured, so that a slow moment of the machine falls on no one provider."""
TOGETHER = 20
"""Calls that are queued before the device is waited for."""

Call = Callable[[], object]


def samples(call: Call) -> list[float]:
    """Microseconds of each call."""
    for _ in range(30):
        call()
    found = []
    for _ in range(CALLS // TOGETHER):
        torch.cuda.synchronize()
        for _ in range(TOGETHER):
            entered = time.perf_counter_ns()
            call()
            found.append((time.perf_counter_ns() - entered) / 1e3)
    torch.cuda.synchronize()
    return found


def random(*shape: int) -> torch.Tensor:
    """Random numbers in bfloat16 on the GPU."""
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def operators() -> dict[str, tuple[tuple[torch.Tensor, ...], Call]]:
    """By name: a call, and its inputs that may want gradients."""
    b, n, h, d = 1, 128, 4, 64
    x, theta = random(b, n, h, d), torch.rand(d // 2, device="cuda")
    q, k, v = (random(b, n, h, d) for _ in range(3))
    query, key, value = (random(b, 1, h, d) for _ in range(3))
    state = random(b, h, d, d)
    aq, bq, ak, av, bk, bv = (random(b, n, *rest) for rest in ((h, 8), (8, d), (h,), (h,), (d,), (d,)))
    first_a, first_b = aq[:, :1], bq[:, :1]
    return {
        "x + x": ((x,), lambda: x + x),
        "sdpa": ((q, k, v), lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True)),
        "lrpe_rotate": ((x,), lambda: warploom.lrpe_rotate(x, theta)),
        "lrpe_rotate, softmax over the sequence": (
            (x,),
            lambda: warploom.lrpe_rotate(x, theta, activation="softmax_sequence"),
        ),
        "lrpe_cosine": ((x,), lambda: warploom.lrpe_cosine(x, theta)),
        "flash_attention": ((q, k, v), lambda: warploom.flash_attention(q, k, v, causal=True)),
        "flash_attention, one token": ((query, k, v), lambda: warploom.flash_attention(query, k, v, causal=True)),
        "linear_attention": ((q, k, v), lambda: warploom.linear_attention(q, k, v)),
        "linear_attention, one token": (
            (),
            lambda: warploom.linear_attention(query, key, value, initial_state=state, return_state=True),
        ),
        "tpa_decode": ((), lambda: warploom.tpa_decode(first_a, ak, av, first_b, bk, bv)),
        "tpa_attention": ((aq, ak, bq, bk), lambda: warploom.tpa_attention(aq, ak, av, bq, bk, bv, causal=True)),
    }


def main() -> None:
    """Print the times, and write them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--output", type=Path, help="a JSON file")
    path = parser.parse_args().output
    times: dict[str, list[float]] = {}
    for _ in range(ROUNDS):
        for name, (inputs, call) in operators().items():
            times.setdefault(name, []).extend(samples(call))
            for tensor in inputs:
                tensor.requires_grad_()
            if inputs:
                times.setdefault(f"{name}, with gradients", []).extend(samples(call))
            for tensor in inputs:  # others take it as well
                tensor.requires_grad_(False)
    found: dict[str, dict[str, float]] = {}
    for name, some in times.items():
        least, middle = min(some), statistics.median(some)
        found[name] = {"minimum_us": round(least, 2), "median_us": round(middle, 2)}
        print(f"{name:60} {least:8.2f} {middle:8.2f}", flush=True)
    if path:
        versions = {
            "torch": torch.__version__,
            "gpu": torch.cuda.get_device_name(),
            "warploom": warploom.__version__,
        }
        path.write_text(json.dumps({**versions, "calls": CALLS, "times": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
