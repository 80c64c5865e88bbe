"""How the bench times, and the limits that it measures: streams and matrix products."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import toy

from benchmarks import llama, transformer
from warploom.bench import limits, measure
from warploom.bench.attempt import Failure
from warploom.bench.evaluate import Unit, evaluate, provider_call
from warploom.bench.records import LIMIT, Record
from warploom.ops import benches
from warploom.ops.spec import Traffic, Unsupported
from warploom.testing.specs import load_specs

pytestmark = pytest.mark.usefixtures("quick_measurements")

CPU = torch.device("cpu")


# Timing


def test_percentiles_are_ordered_and_interpolated() -> None:
    assert measure.percentiles([5.0, 1.0, 2.0, 4.0, 3.0]) == pytest.approx((1.8, 3.0, 4.2))
    assert measure.percentiles([7.0]) == (7.0, 7.0, 7.0)


def test_calls_are_interleaved_and_a_failing_one_leaves_the_others() -> None:
    class Ticks:
        def __init__(self) -> None:
            self.order: list[str] = []

        def host_us(self, call: measure.Call) -> float:
            return 1.0

        def sample(self, call: measure.Call, host_us: float) -> measure.Sample:
            self.order.append(str(call()))
            return measure.Sample(0.02, ahead=len(self.order) != 10)

        def settle(self, samplers: object) -> None:
            pass

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
    assert measure._rounds({"a": 5.0, "b": 1e-4}, 100.0) == {"a": 5, "b": 5}
    assert measure._rounds({"a": 90.0, "b": 1e-4}, 100.0) == {"a": 3, "b": 5}
    assert measure._rounds({"b": 1e-4}, 100.0) == {"b": 5}
    assert measure._rounds({}, 100.0) == {}


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


# What would make every share of the limit look better than it is


BYTES_PER_MS = 1e6
FLOPS_PER_MS = 1e9


class Exact:
    """A clock of a device that moves so many bytes and does so many operations in a millisecond, no more."""

    def host_us(self, call: measure.Call) -> float:
        return 1.0

    def sample(self, call: measure.Call, host_us: float) -> measure.Sample:
        function, *_ = (getattr(call, "func", call),)
        if function is torch.mm:
            a, b = call.args  # type: ignore[attr-defined]
            return measure.Sample(2 * a.shape[0] * a.shape[1] * b.shape[1] / FLOPS_PER_MS)
        if function is limits._torch_stream:
            inputs, outputs = call.args  # type: ignore[attr-defined]
            return measure.Sample(sum(t.nbytes for t in (*inputs, *outputs)) / BYTES_PER_MS)
        return measure.Sample(1000.0)

    def settle(self, samplers: object) -> None:
        pass


@pytest.mark.parametrize(("mbytes", "mflops", "limit_ms"), [(3.0, 0, 3.0), (3.0, 2000, 3.0), (3.0, 5000, 5.0)])
def test_the_limit_is_what_the_device_needs_for_the_bytes_or_the_operations(
    mbytes: float, mflops: int, limit_ms: float
) -> None:
    """Fails when the limit streams twice the bytes, and when the matrix product's rate is halved."""
    traffic = Traffic(2, 1, int(mbytes * 1e6 / 3) // 64 * 64, mflops * 10**6)
    bench = replace(toy.make_bench(), traffic=lambda case, mode: traffic)
    unit = Unit(bench, "quick", {"dtype": "float32", "n": 64}, "fwd")
    records = evaluate(unit, ["torch"], CPU, Exact(), Record("toy", "quick", {}, LIMIT, "fwd", "", "e"))
    found = {record.provider: record for record in records}
    assert found[LIMIT].ms == pytest.approx(limit_ms, rel=1e-3)
    assert found["torch"].limit_ms == found[LIMIT].ms
    assert found["torch"].limit_fraction == pytest.approx(limit_ms / 1000, rel=1e-3)


@pytest.mark.skipif(torch.cuda.is_available(), reason="counts what the interpreter loads")
@pytest.mark.parametrize(("reads", "writes"), [(1, 1), (2, 1), (3, 2)])
def test_the_streaming_kernel_moves_every_element_once(
    reads: int, writes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    from warploom.bench.stream_kernel import stream

    moved = {"load": 0, "store": 0}
    for kind in moved:
        name = f"create_masked_{kind}"
        usual = getattr(interpreter.InterpreterBuilder, name)

        def counted(self, ptrs, *rest, kind=kind, usual=usual):
            moved[kind] += ptrs.data.size
            return usual(self, ptrs, *rest)

        monkeypatch.setattr(interpreter.InterpreterBuilder, name, counted)
    inputs = tuple(torch.randn(1024) for _ in range(reads))
    outputs = tuple(torch.empty(1024) for _ in range(writes))
    stream(inputs, outputs, torch.empty(4), 256, 4)
    assert moved == {"load": 1024 * reads, "store": 1024 * writes}


def test_the_caches_are_filled_with_something_else_before_every_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    assert measure.FLUSH_BYTES >= 4 * 60 * 2**20  # an H200 has 60 MiB of cache
    ticks = iter(range(100))
    event = SimpleNamespace(
        record=lambda: None, query=lambda: False, synchronize=lambda: None, elapsed_time=lambda end: next(ticks)
    )
    gpu = measure.CudaClock.__new__(measure.CudaClock)
    gpu.flush, gpu.start, gpu.end, gpu.cycles_per_us = torch.ones(64, dtype=torch.uint8), event, event, 1.0
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: None)
    cpu = measure.CpuClock()
    assert cpu.flush.nbytes >= 32 * 2**20
    for clock in (gpu, cpu):
        seen: list[int] = []
        for _ in range(3):
            clock.flush.fill_(1)
            clock.sample(lambda clock=clock, seen=seen: seen.append(int(clock.flush.any())), 1.0)  # type: ignore[misc]
        assert seen == [0, 0, 0]


def test_a_sample_says_whether_the_host_was_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: waited.append(cycles))
    for answers, expected, waits in (([False], True, 1), ([True, False], True, 2), ([True] * 3, False, 3)):
        waited: list[int] = []
        left = list(answers)
        start = SimpleNamespace(
            record=lambda: None, query=lambda left=left: left.pop(0), elapsed_time=lambda end: 1.0
        )
        gpu = measure.CudaClock.__new__(measure.CudaClock)
        gpu.flush, gpu.start, gpu.cycles_per_us = torch.ones(8, dtype=torch.uint8), start, 1.0
        gpu.end = SimpleNamespace(record=lambda: None, synchronize=lambda: None)
        assert gpu.sample(lambda: None, 10.0) == measure.Sample(1.0, expected)
        assert len(waited) == waits
        assert waited == sorted(waited)


# Peers


MASKED = {"torch", "torch_compile", "sdpa_cudnn", "sdpa_flash", "sdpa_efficient", "flex_attention"}
PEERS = {
    "flash-attention": {
        "torch", "torch_compile", "sdpa_cudnn", "sdpa_flash", "sdpa_efficient", "flex_attention", "flash_attn",
        "flash_attn_4", "flash_attn_4_deterministic", "cudnn_deterministic", "torch_varlen",
    },
    "lrpe-rope": {"torch", "torch_compile", "torch_compile_cache", "liger", "fla", "flash_attn"},
    "lrpe-rotate": {"torch", "torch_compile", "torch_compile_cache"},
    "lrpe-cosine": {"torch", "torch_compile", "torch_compile_cache"},
    "lrpe-rotate-md": {"torch", "torch_compile", "torch_compile_cache"},
    "lrpe-cosine-md": {"torch", "torch_compile", "torch_compile_cache"},
    "attention-decode": {"torch", "torch_compile", "sdpa_cudnn", "sdpa_flash", "sdpa_efficient"},
    "attention-masks": MASKED,
    "attention-biases": MASKED,
    "attention-trees": MASKED,
    "attention-serving": {"torch", "torch_varlen", "torch_varlen_invariant", "torch_varlen_gathered"},
    "attention-jvp": {"torch", "torch_compile"},
    "tpa-decode": {"torch", "torch_compile", "torch_naive", "sdpa_gqa", "sdpa_mha", "sdpa_mqa"},
    "tpa-attention": {"torch_naive", "torch_naive_compile"},
    "linear-attention": {"torch", "torch_compile", "fla", "softmax_sdpa_flash"},
    "linear-attention-decode": {"torch", "torch_compile", "fla"},
    "delta-attention": {"torch", "torch_compile", "fla", "flash_qla", "softmax_sdpa_flash"},
    "delta-attention-decode": {"torch", "torch_compile"},
    "short-convolution": {"torch", "torch_compile", "causal_conv1d", "fla"},
    "short-convolution-decode": {"torch", "torch_compile", "causal_conv1d", "fla"},
    "append-kv": {"torch", "torch_compile"},
    "transformer": {name + ending for name in ("sdpa", "torch", "llama") for ending in transformer.ENDINGS},
    "llama": {"eager", "sdpa", "sdpa+compile"},
    "context-parallel": {"allgather_sdpa", "sdpa_context_parallel"},
}  # fmt: skip


@pytest.fixture
def models(own_registry: None) -> None:
    load_specs([Path(__file__).parents[1] / "benchmarks"])


def test_peers_of_every_bench_are_named(models: None) -> None:
    assert set(PEERS) == set(benches())


@pytest.mark.parametrize("name", PEERS)
def test_no_peer_is_dropped_from_a_bench(name: str, models: None) -> None:
    bench = benches()[name]
    assert PEERS[name] <= {name for name in bench.every_provider if not bench.runs_kernels(name)}


PEERS_ON_A_CPU = {
    "flash-attention": ["torch", "sdpa_flash"],
    "attention-decode": ["torch", "sdpa_flash"],
    "attention-masks": ["torch", "sdpa_flash"],
    "attention-biases": ["torch", "sdpa_flash"],
    "attention-trees": ["torch", "sdpa_flash"],
    "attention-serving": ["torch"],  # PyTorch's own attention, sequence by sequence
    "tpa-decode": ["torch_naive", "torch", "sdpa_gqa", "sdpa_mha"],
    "tpa-attention": ["torch_naive"],  # which forms factors, and calls PyTorch's own attention
    "linear-attention": ["torch", "softmax_sdpa_flash"],
    "delta-attention": ["torch", "softmax_sdpa_flash"],
}


@pytest.mark.parametrize("name", [bench.name for bench in benches().values() if "quick" in bench.suites])
def test_the_first_suite_has_peers_on_a_cpu(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    bench, there = benches()[name], []
    for provider in bench.providers_of("quick"):
        try:
            bench.every_provider[provider](bench.suites["quick"]("cpu")[0])
        except Unsupported:
            continue
        there.append(provider)
    there = [provider for provider in there if "compile" not in provider]  # which takes long on a CPU
    assert there == PEERS_ON_A_CPU.get(name, ["torch"])


COMPILED = {
    (name, peer) for name, peers in PEERS.items() for peer in peers if "compile" in peer or "+graphs" in peer
}


@pytest.mark.parametrize(("name", "peer"), sorted(COMPILED))
def test_compiled_peers_get_their_best_settings(
    name: str, peer: str, models: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[dict[str, object]] = []
    monkeypatch.setattr(torch, "compile", lambda function, **options: asked.append(options) or function)
    monkeypatch.setattr(transformer, "need_cuda", lambda what="": None)
    monkeypatch.setattr("benchmarks._steps.llama", lambda extra, **config: torch.nn.Identity())
    bench = benches()[name]
    if name == "transformer":
        transformer.build(peer, bench.suites["trial"]("cpu")[0], CPU)
    elif name == "llama":
        llama._start(mock.MagicMock(), peer, "prefill", torch.zeros(1, 4, dtype=torch.long))
    else:
        suite, *_ = bench.suites.values()
        bench.providers[peer](suite("cuda")[0])
    mode = "max-autotune" if peer.endswith("+graphs") else "max-autotune-no-cudagraphs"
    assert asked == [{"dynamic": False, "mode": mode}]


def test_what_is_compiled_keeps_its_buffers_for_another_backward() -> None:
    """A compiled backward may give its buffers away, and then refuses the second run on one graph."""
    config = pytest.importorskip("torch._functorch.config")
    if not hasattr(config, "donated_buffer"):
        pytest.skip("this PyTorch gives no buffers away")
    seen: list[bool] = []

    def watched(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        seen.append(config.donated_buffer)
        return toy.reference(x, weight)

    unit = Unit(toy.make_bench(watched=lambda case: watched), "quick", {"dtype": "float32", "n": 64}, "bwd")
    before = config.donated_buffer
    provider_call(unit, "watched", CPU)()
    evaluate(unit, ["watched"], CPU, measure.CpuClock(), Record("toy", "quick", {}, LIMIT, "bwd", "", "e"))
    assert len(seen) > 1
    assert not any(seen)
    assert config.donated_buffer == before
