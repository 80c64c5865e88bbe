"""The measured limit of a case: the time that this device needs to move the bytes, or to do the arithmetic."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable

import torch

from warploom.bench.measure import Clock
from warploom.ops.spec import Traffic, Unsupported

Call = Callable[[], object]
_SIZE = {"cuda": 8192, "cpu": 1024}


def stream_call(traffic: Traffic, device: torch.device, clock: Clock) -> Call:
    """Returns a call that moves a case's bytes in its mix of reads and writes, to be timed like any provider.

    The clock picks the best of the streaming kernel's configurations.

    Raises:
        Unsupported: The case moves nothing, or in more streams than the kernel has.
    """
    if traffic.min_bytes == 0:
        raise Unsupported("the case moves no bytes")
    # Whole multiples of 16 elements, so that every access can be 16 bytes wide.
    n = -(-traffic.stream_bytes // 64) * 16
    inputs = tuple(torch.randn(n, device=device) for _ in range(traffic.reads))
    outputs = tuple(torch.empty(n, device=device) for _ in range(traffic.writes))
    if device.type != "cuda":
        return functools.partial(_torch_stream, inputs, outputs)
    # Triton is there only where there is a GPU for it.
    from warploom.bench.stream_kernel import CONFIGURATIONS, MAX_READS, MAX_WRITES, stream

    if len(inputs) > MAX_READS or len(outputs) > MAX_WRITES:
        raise Unsupported(f"no streaming kernel for {len(inputs)} reads and {len(outputs)} writes")
    scratch = torch.empty(-(-n // min(block for block, _ in CONFIGURATIONS)), device=device)
    candidates = [
        functools.partial(stream, inputs, outputs, scratch, block, warps) for block, warps in CONFIGURATIONS
    ]
    times: list[list[float]] = [[] for _ in candidates]
    for candidate in candidates:
        candidate()  # compiles
    host_us = statistics.median(clock.host_us(candidates[0]) for _ in range(5))
    for _ in range(9):
        for candidate, samples in zip(candidates, times):
            samples.append(clock.sample(candidate, host_us).ms)
    return min(zip(candidates, times), key=lambda pair: statistics.median(pair[1]))[0]


def measure_fixed_us(device: torch.device, clock: Clock) -> float:
    """Returns the microseconds of a call that moves next to nothing: every time of a run has them in it.

    Runs on GPUs of one kind were 1.7 apart, which is a fifth of what small cases take.
    """
    call = functools.partial(torch.zeros(16, device=device).add_, 1.0)
    host_us = statistics.median(clock.host_us(call) for _ in range(5))
    return round(1e3 * statistics.median(clock.sample(call, host_us).ms for _ in range(15)), 2)


def product_call(device: torch.device) -> Call:
    """Returns a large matrix product, to be timed like any provider; `product_flops` are its operations.

    It is bfloat16 on a GPU; float32 on a CPU, many of which have no bfloat16 arithmetic.
    """
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    a, b = (torch.randn(_SIZE[device.type], _SIZE[device.type], device=device, dtype=dtype) for _ in range(2))
    return functools.partial(torch.mm, a, b, out=torch.empty_like(a))


def product_flops(device: torch.device) -> int:
    """Returns the floating-point operations of `product_call`: a multiplication and an addition for each term."""
    return 2 * _SIZE[device.type] ** 3


def _torch_stream(inputs: tuple[torch.Tensor, ...], outputs: tuple[torch.Tensor, ...]) -> None:
    """Read every input and write every output once, with PyTorch's operators."""
    reads, writes = list(inputs), list(outputs)
    if len(reads) > len(writes) > 0:
        torch.add(reads.pop(), reads.pop(), out=writes.pop())
    while reads and writes:
        writes.pop().copy_(reads.pop())
    for tensor in reads:
        tensor.sum()
    for tensor in writes:
        tensor.fill_(1.0)
