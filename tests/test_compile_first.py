"""Compiling before measuring: what is compiled, by how many processes, and how long it may take."""

from __future__ import annotations

import concurrent.futures
import multiprocessing
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import toy

from warploom.bench import compile_first
from warploom.bench.compile_first import Ahead
from warploom.bench.evaluate import Unit
from warploom.bench.fingerprint import builds_of
from warploom.ops import benches
from warploom.ops.spec import Bench, Case
from warploom.testing.specs import load_specs

CPU, GPU = torch.device("cpu"), torch.device("cuda")
NAMES = ("warploom", "warploom_broken", "torch", "torch_compile", "third")


class Here:
    """A pool of processes that is none: the work is done where it is given."""

    def __init__(self) -> None:
        self.processes = 0
        self.groups: list[Any] = []
        self.called: list[Any] = []
        self.built: list[Any] = []
        self.targets: list[Any] = []
        self.mixes: list[Any] = []

    def __call__(self, processes: int, specs: Sequence[Path]) -> Here:
        self.processes = processes
        self.groups.clear()
        return self

    def shutdown(self, cancel_futures: bool) -> None: ...

    def submit(self, function: Callable[..., None], *arguments: Any) -> Future[None]:
        if isinstance(arguments[0], list):
            self.groups.append(arguments[0])
        future: Future[None] = Future()
        future.set_result(function(*arguments))
        return future


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> Here:
    here = Here()
    monkeypatch.setattr(compile_first, "start_workers", here)
    monkeypatch.setattr(compile_first.os, "cpu_count", lambda: 4)
    return here


@pytest.fixture
def compile_all(pool: Here, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Ahead]:
    """Compile what some units run; the calls that are made are in ``pool.called``."""

    def call(unit: Unit, name: str, device: torch.device) -> Callable[[], object]:
        pool.called.append((unit.mode, unit.case["n"], name, torch.is_grad_enabled()))
        if name == "third":
            raise ValueError("trouble")
        return lambda: None

    def builds(bench: Bench, case: Case, name: str, mode: str, gpu: str) -> dict[str, Any]:
        pool.built.append((mode, case["n"], name, gpu))
        if name == "warploom_broken":
            raise ValueError("trouble")
        return {name: SimpleNamespace(compile=lambda target: pool.targets.append((target.backend, target.arch)))}

    def compile_them(units: Sequence[tuple[Unit, Sequence[str]]], device: torch.device = GPU) -> Ahead:
        pool.processes = 0
        for made in (pool.called, pool.built, pool.targets, pool.mixes):
            made.clear()
        with compile_first.compile_first(units, None, device=device) as ahead:
            return ahead

    pytest.importorskip("triton")
    gpu = SimpleNamespace(major=9, minor=0, multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    monkeypatch.setattr(compile_first, "provider_call", call)
    monkeypatch.setattr(compile_first, "builds_of", builds)
    monkeypatch.setattr(compile_first, "_compile_limit", lambda *mix: pool.mixes.append(mix))
    return compile_them


def test_kernels_are_compiled_without_a_gpu_and_what_others_compile_is_called_as_it_will_be_timed(
    pool: Here, compile_all: Callable[..., Ahead]
) -> None:
    """On a GPU, and for many units alone."""
    bench = benches()["lrpe-rotate"]
    shape = {"batch": 1, "heads": 2, "head_dim": 8, "dtype": "float32"}
    cases = [{**shape, "n": n, "activation": a} for a in ("none", "silu") for n in (64, 128, 256, 512)]
    units = [(Unit(bench, "s", case, mode), NAMES) for case in cases for mode in ("fwd", "bwd")]
    ahead = compile_all(units)
    assert pool.processes == 4
    assert len(pool.groups) == 8, "one for each activation and mode, of kernels and of others"
    assert sorted(pool.called) == sorted(
        (u.mode, u.case["n"], name, u.mode == "bwd") for u, _ in units for name in ("torch_compile", "third")
    )
    ours = ("warploom", "warploom_broken")
    assert sorted(pool.built) == sorted((u.mode, u.case["n"], name, "sm_90/132") for u, _ in units for name in ours)
    assert pool.targets == [("cuda", 90)] * 4, "in each group once"
    assert pool.mixes == [(1, 1), (2, 1)]
    assert {len(ahead.pending[str(unit)]) for unit, _ in units} == {2}
    assert ahead.first([unit for unit, _ in units]) == 0

    others = [(replace(unit, bench=replace(bench, title="no process would know it")), NAMES) for unit, _ in units]
    for some, device in (
        (units, CPU),
        (units[:7], GPU),
        ([(unit, bench.precompiled) for unit, _ in units], GPU),
        (others, GPU),
    ):
        compile_all(some, device)
        assert not pool.processes
        assert not pool.called
        assert not pool.built


def test_what_is_compiled_ahead_is_what_a_launch_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels of a case, from its recorded launches, for the GPU that is named."""
    launch = pytest.importorskip("warploom.runtime.launch")
    monkeypatch.setattr(launch, "INTERPRETED", False)
    bench = benches()["lrpe-rope"]
    (case, *_) = bench.suites["quick"]("cuda")
    found = [
        {build.function.__name__ for build in builds_of(bench, case, "warploom", mode, "sm_90/132").values()}
        for mode in ("fwd", "bwd")
    ]
    assert found == [{"forward_kernel"}, {"forward_kernel", "backward_kernel"}]


@pytest.mark.gpu
def test_the_limits_kernel_is_found_where_it_was_compiled_ahead() -> None:
    from warploom.bench import stream_kernel

    stream_kernel.compile_only(1, 2)
    known = dict(stream_kernel.stream_kernel.device_caches[torch.cuda.current_device()][0])
    x, y, z, scratch = (torch.zeros(2**12, device="cuda") for _ in range(4))
    for block, warps in stream_kernel.CONFIGURATIONS:
        stream_kernel.stream((x,), (y, z), scratch, block, warps)
    assert set(stream_kernel.stream_kernel.device_caches[torch.cuda.current_device()][0]) == set(known)


@pytest.mark.parametrize("name", benches())
def test_what_a_bench_calls_precompiled_is_among_its_providers(name: str) -> None:
    bench = benches()[name]
    assert set(bench.precompiled) <= set(bench.every_provider)
    assert not [provider for provider in bench.precompiled if provider.startswith("triton")]
    assert len(bench.precompiled) > 0, "PyTorch's own is beside every one"


SLOW_SPEC = '''
"""A bench whose inputs take an hour."""

import time
from dataclasses import replace
from pathlib import Path

import toy


def make_inputs(case, device, generator):
    (Path(__file__).parent / f"began-{case['size']}").touch()
    time.sleep(3600)


OPERATOR = replace(toy.OPERATOR, name="slow", make_inputs=make_inputs)
BENCHES = (replace(toy.make_bench(), name="slow", operator=OPERATOR),)
'''


@pytest.mark.sample(3)
@pytest.mark.parametrize("late", ["before anything is compiled", "while the processes start", "in a unit"])
def test_processes_are_ended_when_the_time_is_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own_registry: None, late: str
) -> None:
    def wait(futures: list[Future[None]], timeout: float) -> Any:
        given_up = time.monotonic() + 120
        while late == "in a unit" and not list(tmp_path.glob("began-*")) and time.monotonic() < given_up:
            time.sleep(0.05)
        return concurrent.futures.wait(futures, timeout)

    pytest.importorskip("triton")
    gpu = SimpleNamespace(major=9, minor=0, multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    monkeypatch.setattr(compile_first, "wait", wait)
    monkeypatch.setattr(compile_first.os, "cpu_count", lambda: 2)
    monkeypatch.syspath_prepend(Path(toy.__file__).parent)
    file = tmp_path / "slow_spec.py"
    file.write_text(SLOW_SPEC)
    ((bench,),) = (spec.benches for spec in load_specs([file]))
    units = [(Unit(bench, "quick", {"size": size}, "fwd"), ["torch"]) for size in range(compile_first.LEAST_UNITS)]
    before, began = set(multiprocessing.active_children()), time.monotonic()
    seconds = 0.0 if late == "before anything is compiled" else 0.5
    with compile_first.compile_first(units, seconds, device=GPU, specs=[file]) as ahead:
        assert not ahead.pending
    assert time.monotonic() - began < 180, "an hour if it waits for a unit"
    assert set(multiprocessing.active_children()) == before
    assert any(tmp_path.glob("began-*")) or late != "in a unit"
