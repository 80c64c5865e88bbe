"""Compiling before measuring: what is compiled, by how many processes, and how long it may take."""

from __future__ import annotations

import concurrent.futures
import multiprocessing
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import toy

from warploom.bench import compile_first
from warploom.bench.evaluate import Unit
from warploom.ops import benches
from warploom.testing.specs import load_specs

CPU, GPU = torch.device("cpu"), torch.device("cuda")
NAMES = ("warploom", "torch", "torch_compile", "third")


class Here:
    """A pool of processes that is none: the work is done where it is given."""

    def __init__(self) -> None:
        self.processes = 0
        self.groups: list[Any] = []

    def __call__(self, processes: int, specs: Sequence[Path]) -> Here:
        self.processes = processes
        return self

    def __enter__(self) -> Here:
        return self

    def __exit__(self, *error: object) -> None: ...

    def submit(self, function: Callable[..., None], *arguments: Any) -> Future[None]:
        self.groups.append(arguments[0])
        future: Future[None] = Future()
        future.set_result(function(*arguments))
        return future


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> Here:
    here = Here()
    monkeypatch.setattr(compile_first, "workers", here)
    monkeypatch.setattr(compile_first.os, "cpu_count", lambda: 4)
    return here


def test_every_provider_that_compiles_is_called_once_as_it_will_be_timed(
    pool: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU, and for many units alone."""

    def call(unit: Unit, name: str, device: torch.device) -> Callable[[], object]:
        called.append((unit.mode, unit.case["n"], name, torch.is_grad_enabled()))
        if name == "third":
            raise ValueError("trouble")
        return lambda: None

    def compile_all(units: Sequence[tuple[Unit, Sequence[str]]], device: torch.device = GPU) -> None:
        pool.processes = 0
        called.clear()
        assert compile_first.compile_first(units, None, device=device)

    called: list[Any] = []
    monkeypatch.setattr(compile_first, "provider_call", call)
    bench = benches()["lrpe-rotate"]
    cases = [{"n": n, "activation": a} for a in ("none", "silu") for n in (64, 128, 256, 512)]
    units = [(Unit(bench, "s", case, mode), NAMES) for case in cases for mode in ("fwd", "bwd")]
    compile_all(units)
    assert pool.processes == 4
    assert len(pool.groups) == 4, "one for each activation and mode"
    assert sorted(called) == sorted(
        (u.mode, u.case["n"], name, u.mode == "bwd") for u, _ in units for name in NAMES if name != "torch"
    )

    compile_all(units, CPU)
    compile_all(units[:8])
    compile_all([(unit, bench.precompiled) for unit, _ in units])
    compile_all(
        [(replace(unit, bench=replace(bench, title="no process would know it")), NAMES) for unit, _ in units]
    )
    assert not pool.processes
    assert not called


def test_which_providers_compile_is_for_their_bench_to_say(pool: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_first, "provider_call", lambda unit, name, device: lambda: called.add(name))
    for precompiled in ((), ("warploom", "third")):
        called: set[str] = set()
        bench = replace(toy.make_bench(), precompiled=precompiled)
        monkeypatch.setattr(compile_first, "benches", lambda bench=bench: {bench.name: bench})
        cases = [{"n": 64, "size": size} for size in range(compile_first.LEAST_UNITS)]
        units = [(Unit(bench, "quick", case, "fwd"), NAMES) for case in cases]
        assert compile_first.compile_first(units, None, device=GPU)
        assert called == set(NAMES) - set(precompiled)


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


@pytest.mark.parametrize("late", ["before anything is compiled", "while the processes start", "in a unit"])
def test_processes_are_ended_when_the_time_is_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own_registry: None, late: str
) -> None:
    def wait(futures: list[Future[None]], timeout: float) -> object:
        given_up = time.monotonic() + 120
        while late == "in a unit" and not list(tmp_path.glob("began-*")) and time.monotonic() < given_up:
            time.sleep(0.05)
        return concurrent.futures.wait(futures, timeout)

    monkeypatch.setattr(compile_first, "wait", wait)
    monkeypatch.setattr(compile_first.os, "cpu_count", lambda: 2)
    monkeypatch.syspath_prepend(Path(toy.__file__).parent)
    file = tmp_path / "slow_spec.py"
    file.write_text(SLOW_SPEC)
    ((bench,),) = (spec.benches for spec in load_specs([file]))
    units = [(Unit(bench, "quick", {"size": size}, "fwd"), ["torch"]) for size in range(compile_first.LEAST_UNITS)]
    before, began = set(multiprocessing.active_children()), time.monotonic()
    seconds = 0.0 if late == "before anything is compiled" else 0.5
    assert not compile_first.compile_first(units, seconds, device=GPU, specs=[file])
    assert time.monotonic() - began < 180, "an hour if it waits for a unit"
    assert set(multiprocessing.active_children()) == before
    assert any(tmp_path.glob("began-*")) or late != "in a unit"
