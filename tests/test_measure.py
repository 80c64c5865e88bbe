"""How the bench times, and the limits that it measures: streams and matrix products."""

from __future__ import annotations

import pytest
import torch

from warploom.bench import limits, measure
from warploom.bench.attempt import Failure
from warploom.ops.spec import Traffic, Unsupported

pytestmark = pytest.mark.usefixtures("quick_measurements")

CPU = torch.device("cpu")


# Timing


def test_percentiles_are_ordered_and_interpolated() -> None:
    assert measure.percentiles([5.0, 1.0, 2.0, 4.0, 3.0]) == pytest.approx((1.8, 3.0, 4.2))
    assert measure.percentiles([7.0]) == (7.0, 7.0, 7.0)


def test_calls_take_turns_and_a_failing_one_leaves_the_others() -> None:
    class Ticks:
        def __init__(self) -> None:
            self.order: list[str] = []

        def host_us(self, call: measure.Call) -> float:
            return 1.0

        def sample(self, call: measure.Call, host_us: float) -> measure.Sample:
            self.order.append(str(call()))
            return measure.Sample(0.02, ahead=len(self.order) != 10)

    left = iter(range(8))

    def failing() -> str:
        return "b" if next(left) < 6 else 1 / 0  # type: ignore[return-value]

    clock = Ticks()
    results = measure.time_interleaved({"a": lambda: "a", "b": failing, "c": lambda: "c"}, clock)
    assert results["a"] == measure.Timing(0.02, 0.02, 0.02, 1.0, rounds=5, late=1)
    assert results["c"] == measure.Timing(0.02, 0.02, 0.02, 1.0, rounds=5)
    assert isinstance(results["b"], Failure)
    # Each round begins with another call; the second fails in its third.
    assert "".join(clock.order[9:]) == "abc" + "bca" + "ca" + "ac" + "ca"


def test_all_have_the_same_rounds_but_what_is_too_slow_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "CASE_MS", 100.0)
    assert measure._rounds({"a": 5.0, "b": 1e-4}) == {"a": 5, "b": 5}
    assert measure._rounds({"a": 90.0, "b": 1e-4}) == {"a": 3, "b": 5}
    assert measure._rounds({"b": 1e-4}) == {"b": 5}
    assert measure._rounds({}) == {}


# The limit


@pytest.mark.parametrize(("reads", "writes"), [(0, 1), (1, 0), (1, 1), (1, 2), (2, 1), (4, 3), (3, 1)])
def test_the_limit_on_a_cpu_reads_and_writes_every_stream(reads: int, writes: int) -> None:
    call = limits.stream_call(Traffic(reads, writes, 1000), CPU, measure.CpuClock())
    outputs = call.args[1]  # type: ignore[attr-defined]
    for output in outputs:
        output.fill_(torch.nan)
    call()
    assert all(bool(output.isfinite().all()) for output in outputs)


def test_the_product_that_bounds_arithmetic_counts_multiplications_and_additions() -> None:
    a, b = limits.product_call(CPU).args  # type: ignore[attr-defined]
    assert limits.product_flops(CPU) == 2 * a.shape[0] * a.shape[1] * b.shape[1]


@pytest.mark.parametrize(("reads", "writes"), [(1, 0), (1, 1), (2, 1), (4, 3)])
def test_the_limit_moves_as_many_bytes_as_its_case(reads: int, writes: int) -> None:
    traffic = Traffic(reads, writes, 300_000)
    call = limits.stream_call(traffic, CPU, measure.CpuClock())
    inputs, outputs = call.args  # type: ignore[attr-defined]
    assert (len(inputs), len(outputs)) == (reads, writes)
    for tensor in (*inputs, *outputs):  # in whole multiples of 64 bytes
        assert 0 <= tensor.nbytes - traffic.stream_bytes < 64


def test_a_case_that_moves_nothing_has_no_limit() -> None:
    with pytest.raises(Unsupported):
        limits.stream_call(Traffic(1, 1, 0), CPU, measure.CpuClock())


@pytest.mark.parametrize(("reads", "writes"), [(0, 1), (1, 0), (1, 1), (1, 2), (2, 1), (3, 2), (4, 3), (4, 0)])
@pytest.mark.parametrize("n", [77, 512])
def test_streaming_kernel_sums_its_inputs(reads: int, writes: int, n: int, device: torch.device) -> None:
    from warploom.bench.stream_kernel import stream

    block = 256
    inputs = tuple(torch.randn(n, device=device) for _ in range(reads))
    outputs = tuple(torch.full((n,), torch.nan, device=device) for _ in range(writes))
    scratch = torch.full((-(-n // block),), torch.nan, device=device)
    stream(inputs, outputs, scratch, block, 4)
    total = sum(inputs, torch.zeros(n, device=device))
    for output in outputs:
        torch.testing.assert_close(output, total)
    if not writes:
        torch.testing.assert_close(scratch.sum(), total.sum(), rtol=1e-4, atol=1e-4)
