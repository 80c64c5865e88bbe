"""Runs of the bench: the accuracy gate, failures, resuming, time limits, what is selected."""

from __future__ import annotations

import gc
import json
import re
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import toy

from warploom.bench import evaluate, measure, records, runner
from warploom.bench.attempt import DeviceLostError, Failure, attempt
from warploom.bench.compile_first import Ahead
from warploom.bench.records import LIMIT, Record
from warploom.bench.runner import Outcome, Selection
from warploom.errors import ArgumentError
from warploom.ops.spec import Bench, Case
from warploom.report import render_terminal

pytestmark = pytest.mark.usefixtures("quick_measurements")

CPU = torch.device("cpu")


def run(bench: Bench, output: Path, selection: Selection | None = None, **options: object) -> Outcome:
    return runner.run([bench], selection or Selection(), CPU, output, **options)  # type: ignore[arg-type]


def by_provider(outcome: Outcome, n: int = 64, mode: str = "fwd") -> dict[str, Record]:
    return {r.provider: r for r in outcome.records if r.case["n"] == n and r.mode == mode}


def test_every_provider_and_the_limit_get_a_full_record(tmp_path: Path) -> None:
    outcome = run(toy.make_bench(), tmp_path)
    assert len(outcome.records) == 2 * 2 * 2  # sizes, modes, providers
    assert records.load([tmp_path]) == outcome.records
    for record in outcome.records:
        assert record.status == "ok"
        assert 0 < record.ms_p20 <= record.ms <= record.ms_p80  # type: ignore[operator]
        assert record.host_us is not None
        assert record.host_us > 0
        assert record.limit_ms is not None
        assert record.limit_fraction == pytest.approx(record.limit_ms / record.ms)  # type: ignore[operator]
        assert record.peak_memory_mib is None
        assert record.min_bytes == record.case["n"] * 64 * (2 if record.mode == "fwd" else 3)
        assert record.case["shape"] == [4, 4]
    ours = by_provider(outcome)["torch"]
    assert ours.max_error is not None
    assert ours.error_budget is not None
    assert ours.max_error <= ours.error_budget
    assert by_provider(outcome)[LIMIT].limit_fraction == 1.0
    environments = json.loads((tmp_path / "environment.json").read_text())
    assert set(environments) == {record.environment for record in outcome.records}


@pytest.mark.parametrize("frozen", [0, 5])
def test_what_a_caller_froze_stays_so(frozen: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise every later collection of garbage looks through all modules: half a second among the tests."""
    thawed: list[int] = []
    monkeypatch.setattr(gc, "get_freeze_count", lambda: frozen)
    monkeypatch.setattr(gc, "unfreeze", lambda: thawed.append(frozen))
    run(toy.make_bench(), tmp_path)
    assert thawed == ([] if frozen else [0])


@pytest.mark.parametrize("mode", ["fwd", "bwd"])
def test_another_function_has_its_own_inputs_definition_and_bytes_and_no_limit(tmp_path: Path, mode: str) -> None:
    bench = replace(toy.make_bench(), others=(toy.make_other(),))
    found = by_provider(run(bench, tmp_path), mode=mode)
    assert {name: record.status for name, record in found.items()} == {
        "torch": "ok",
        "squared": "ok",
        "squared_wrong": "incorrect",
        LIMIT: "ok",
    }
    streams = 2 if mode == "fwd" else 3
    assert {name: record.min_bytes for name, record in found.items()} == {
        "torch": 64 * 64 * streams,
        "squared": 64 * 640 * streams,
        "squared_wrong": 64 * 640 * streams,
        LIMIT: 64 * 64 * streams,
    }
    assert found["squared"].ms is not None
    assert found["squared"].limit_ms is None
    assert found["squared"].limit_fraction is None
    assert found["torch"].limit_ms == found[LIMIT].ms
    printed = render_terminal(list(found.values()))
    assert re.search(r"\bsquared\b", printed)


def test_another_function_can_be_selected_and_run_alone(tmp_path: Path) -> None:
    bench = replace(toy.make_bench(), others=(toy.make_other(),))
    outcome = run(bench, tmp_path, Selection(modes=["fwd"], providers=["squared"]))
    assert {record.provider for record in outcome.records} == {"squared", LIMIT}
    unit = runner.plan([bench], Selection(modes=["fwd"]), "cpu")[0]
    call = evaluate.provider_call(unit, "squared", CPU)
    assert call().shape == (64, 160)  # type: ignore[attr-defined]


@pytest.mark.parametrize("mode", ["fwd", "bwd"])
def test_failures_are_rows_and_leave_the_others_their_times(tmp_path: Path, mode: str) -> None:
    bench = toy.make_bench(
        wrong=toy.wrong,
        impossible=toy.impossible,
        broken=toy.broken,
        hungry=toy.hungry,
        torch=lambda case: toy.reference,
    )
    found = by_provider(run(bench, tmp_path), mode=mode)
    assert {name: record.status for name, record in found.items()} == {
        "wrong": "incorrect",
        "impossible": "unsupported",
        "broken": "error",
        "hungry": "oom",
        "torch": "ok",
        LIMIT: "ok",
    }
    assert found["broken"].reason == "ValueError: two lines of trouble"
    assert found["impossible"].reason == "needs a quantum computer"
    assert "largest error" in str(found["wrong"].reason)
    assert found["wrong"].max_error is not None
    for name in ("wrong", "impossible", "broken", "hungry"):
        assert found[name].ms is None
    for name in ("torch", LIMIT):
        assert found[name].ms is not None


def test_a_provider_that_returns_nan_is_incorrect_and_its_record_is_valid_json(tmp_path: Path) -> None:
    bench = toy.make_bench(torch=lambda case: lambda x, weight: toy.reference(x, weight) * float("nan"))
    record = by_provider(run(bench, tmp_path))["torch"]
    assert record.status == "incorrect"
    assert record.max_error is None
    assert "NaN" in str(record.reason)


def test_a_wrong_gradient_withholds_only_the_backward_speed(tmp_path: Path) -> None:
    def detached(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x.detach() * weight * toy.FACTOR

    outcome = run(toy.make_bench(torch=lambda case: detached), tmp_path)
    assert by_provider(outcome, mode="fwd")["torch"].status == "ok"
    assert by_provider(outcome, mode="bwd")["torch"].status == "incorrect"


def test_without_a_reference_nothing_has_a_speed(tmp_path: Path) -> None:
    def no_room(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError("wanted 1 TiB")

    bench = toy.make_bench()
    bench = replace(bench, operator=replace(bench.operator, reference=no_room))
    record = by_provider(run(bench, tmp_path))["torch"]
    assert record.status == "error"
    assert record.reason == "not checked, the reference failed: wanted 1 TiB"


def test_a_bench_without_gradients_says_so(tmp_path: Path) -> None:
    def plain_inputs(*arguments: object) -> dict[str, torch.Tensor]:
        return {name: tensor.detach() for name, tensor in toy.make_inputs(*arguments).items()}  # type: ignore[arg-type]

    bench = toy.make_bench()
    bench = replace(bench, operator=replace(bench.operator, make_inputs=plain_inputs))
    outcome = run(bench, tmp_path)
    assert by_provider(outcome, mode="fwd")["torch"].status == "ok"
    assert by_provider(outcome, mode="bwd")["torch"].status == "unsupported"


def test_a_provider_with_no_room_beside_the_others_is_timed_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone: list[list[str]] = []
    interleaved = evaluate.time_interleaved

    def crowded(
        calls: dict[str, object], clock: measure.Clock, case_ms: float | None
    ) -> dict[str, measure.Timing | Failure]:
        alone.append(list(calls))
        results = interleaved(calls, clock, case_ms)  # type: ignore[arg-type]
        return results | {"torch": Failure("oom", "no room")} if len(calls) > 1 else results

    monkeypatch.setattr(evaluate, "time_interleaved", crowded)
    outcome = run(toy.make_bench(), tmp_path, Selection(modes=["fwd"], case={"n": [64]}))
    assert by_provider(outcome)["torch"].status == "ok"
    assert alone == [["torch", LIMIT], ["torch"]]


def test_what_is_missing_is_prepared_before_anything_is_measured(tmp_path: Path) -> None:
    bench = toy.make_bench(**{name: lambda case: toy.reference for name in ("torch", "other", "third")})
    prepared: list[set[Any]] = []

    def prepare(units: list[tuple[evaluate.Unit, list[str]]], seconds: float | None) -> Any:
        assert seconds is None
        assert not (tmp_path / records.RECORDS).exists() or prepared
        prepared.append({(unit.case["n"], *names) for unit, names in units})
        return nullcontext(Ahead())

    run(bench, tmp_path, Selection(modes=["fwd"], providers=["torch"]), prepare=prepare)
    run(bench, tmp_path, Selection(modes=["fwd"]), resume=True, prepare=prepare)
    run(bench, tmp_path, Selection(modes=["fwd"]), resume=True, prepare=prepare)
    every = "torch", "other", "third"  # what has a time is timed again beside the rest
    assert prepared == [{(64, "torch"), (256, "torch")}, {(64, *every), (256, *every)}, set()]


def test_cases_are_measured_as_their_kernels_are_there_and_shown_in_their_order(tmp_path: Path) -> None:
    units = runner.plan([toy.make_bench()], Selection(), "cpu")
    pending = {str(unit): [Future[None]()] for unit in units[:2]}
    wanted = [str(unit) for unit in (*units[2:], units[1], units[0])]

    class Spy(Ahead):
        def first(self, units: Sequence[evaluate.Unit]) -> int:
            if len(units) <= 2:  # others are measured by now
                pending[str(units[-1])][0].set_result(None)
            place = super().first(units)
            seen.append(str(units[place]))
            return place

    seen: list[str] = []
    outcome = run(toy.make_bench(), tmp_path, prepare=lambda *_: nullcontext(Spy(pending)))
    assert seen == wanted
    assert [(r.case["n"], r.mode) for r in outcome.records[::2]] == [(u.case["n"], u.mode) for u in units]


def test_the_quick_suite_has_fewer_providers_and_modes_unless_they_are_named(tmp_path: Path) -> None:
    names = ("torch", "slow", "brief")
    bench = replace(
        toy.make_bench(**{name: lambda case: toy.reference for name in names}),
        modes=("fwd", "bwd", "fwd_bwd"),
        quick=("torch", "brief"),
    )
    assert bench.providers_of("quick") == ["torch", "brief"]
    assert bench.providers_of("published") == [*names]
    found = run(bench, tmp_path, Selection(case={"n": [64]})).records
    assert {(r.provider, r.mode) for r in found} == {
        (name, mode) for name in (*bench.quick, LIMIT) for mode in ("fwd", "bwd")
    }
    named = Selection(case={"n": [64]}, providers=["slow"], modes=["fwd_bwd"])
    assert [(r.provider, r.mode) for r in run(bench, tmp_path, named).records] == [
        ("slow", "fwd_bwd"),
        (LIMIT, "fwd_bwd"),
    ]


@pytest.mark.seldom(3, 4)
def test_resume_measures_only_what_is_missing_or_stale(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[tuple[str, tuple[str, ...]]] = []
    whole = runner.evaluate

    def spy(unit: evaluate.Unit, providers: list[str], *rest: object) -> list[Record]:
        measured.append((str(unit), tuple(providers)))
        return whole(unit, providers, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(runner, "evaluate", spy)
    one = toy.make_bench()
    first = run(one, tmp_path, Selection(modes=["fwd"]))
    assert len(measured) == 2
    measured.clear()
    assert run(one, tmp_path, Selection(modes=["fwd"]), resume=True).records == first.records
    assert measured == []

    two = toy.make_bench(**one.providers, wrong=toy.wrong)
    outcome = run(two, tmp_path, Selection(modes=["fwd"]), resume=True)
    assert [providers for _, providers in measured] == [("torch", "wrong"), ("torch", "wrong")]
    found = by_provider(outcome)
    assert found["torch"].run == found["wrong"].run == found[LIMIT].run != by_provider(first)["torch"].run
    assert found["wrong"].status == "incorrect"
    measured.clear()
    assert run(two, tmp_path, Selection(modes=["fwd"]), resume=True).records == outcome.records
    assert measured == []

    earlier = replace(by_provider(outcome)["torch"], run="of another day")
    records.append(tmp_path, [earlier])
    again = run(two, tmp_path, Selection(modes=["fwd"]), resume=True)
    assert measured == [("toy-scale fwd dtype=float32 shape=[4,4] n=64", ("torch",))]  # the wrong one has no time
    assert by_provider(again)["torch"].run == by_provider(again)[LIMIT].run
    measured.clear()

    monkeypatch.setattr(runner, "fingerprint", lambda *_: "other code")
    outcome = run(one, tmp_path, Selection(modes=["fwd"]), resume=True)
    assert len(measured) == 2
    assert {record.fingerprint for record in outcome.records} == {"other code"}
    measured.clear()

    newer = {"torch": "newer code"}
    monkeypatch.setattr(runner, "fingerprint", lambda bench, case, name, *_: newer.get(name, "other code"))
    outcome = run(one, tmp_path, Selection(modes=["fwd"]), resume=True)
    assert by_provider(outcome)["torch"].fingerprint == "newer code"
    assert [providers for _, providers in measured] == [("torch",), ("torch",)]
    assert {r.fingerprint for r in records.load([tmp_path]) if r.provider == LIMIT} == {"other code"}
    assert len({r.run for r in outcome.records}) == 1


def test_a_time_limit_stops_between_cases_and_says_what_is_left(tmp_path: Path) -> None:
    outcome = run(toy.make_bench(), tmp_path, time_limit=0.0)
    assert outcome.records == []
    assert len(outcome.left) == 4
    assert outcome.left[0] == "toy-scale fwd dtype=float32 shape=[4,4] n=64"
    assert "time limit of 0 s" in outcome.reason
    assert not run(toy.make_bench(), tmp_path, resume=True).left


def test_preparing_takes_no_more_than_half_of_the_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now, given = [0.0], []

    def prepare(units: object, seconds: float | None) -> Any:
        given.append(seconds)
        now[0] += 0.0 if seconds is None else seconds
        return nullcontext(Ahead())

    monkeypatch.setattr(runner.time, "monotonic", lambda: now[0])
    outcome = run(toy.make_bench(), tmp_path, time_limit=900.0, prepare=prepare)
    assert given == [450.0]
    assert len(outcome.records) > 0
    assert not outcome.left


def test_a_lost_device_stops_the_run_and_blames_one_provider(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lose(*arguments: object) -> list[Record]:
        raise DeviceLostError("broken", "illegal access")

    bench = toy.make_bench(broken=toy.broken, torch=lambda case: toy.reference)
    monkeypatch.setattr(runner, "evaluate", lose)
    outcome = run(bench, tmp_path, Selection(modes=["fwd"]))
    assert outcome.device_lost
    assert len(outcome.left) == 1
    assert [(r.provider, r.status) for r in outcome.records] == [("broken", "error")]
    monkeypatch.undo()
    outcome = run(bench, tmp_path, Selection(modes=["fwd"]), resume=True)
    assert "illegal access" in str(by_provider(outcome)["broken"].reason)
    assert by_provider(outcome)["torch"].status == "ok"


def test_an_error_that_takes_the_device_along_is_not_a_providers_failure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail() -> None:
        raise RuntimeError("illegal access")

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", fail)
    with pytest.raises(DeviceLostError, match="torch: RuntimeError: illegal access"):
        attempt("torch", fail)


@pytest.mark.gpu
@pytest.mark.alone
def test_on_a_gpu_memory_is_the_inputs_and_what_the_call_takes(tmp_path: Path) -> None:
    held: list[torch.Tensor] = []

    def with_table(case: Case) -> Callable[..., torch.Tensor]:
        held.append(torch.zeros(2**20, dtype=torch.uint8, device="cuda"))
        return toy.reference

    bench = toy.make_bench(torch=lambda case: toy.reference, table=with_table)
    selection = Selection(modes=["fwd"], case={"n": [256]})
    found = by_provider(runner.run([bench], selection, torch.device("cuda"), tmp_path), n=256)
    tensor, weight = 256 * 16 * 4, 512  # the allocator counts in blocks of 512 bytes
    # x, weight, the product and the result; nothing of the limit, the cache flush or the other's table.
    assert found["torch"].peak_memory_mib == pytest.approx((3 * tensor + weight) / 2**20)
    assert found["table"].peak_memory_mib == pytest.approx((3 * tensor + weight) / 2**20 + 1)
    for record in found.values():
        assert record.ms is not None
        assert 0 < record.ms < 1


@pytest.mark.gpu
@pytest.mark.alone
def test_on_a_gpu_host_time_is_not_device_time() -> None:
    clock = measure.make_clock(torch.device("cuda"))
    x = torch.randn(2**16, device="cuda")

    def slow_to_launch() -> None:
        for _ in range(20):
            time.sleep(1e-4)
            x.mul_(1.0)

    host_us = clock.host_us(slow_to_launch)
    assert host_us > 2000
    assert clock.sample(slow_to_launch, host_us).ms < 0.5
    assert clock.sample(slow_to_launch, host_us / 5).ms < 0.5  # the first wait is too short


def test_selection_keeps_what_it_names(tmp_path: Path) -> None:
    bench = toy.make_bench(torch=lambda case: toy.reference, wrong=toy.wrong)
    chosen = Selection(modes=["bwd"], providers=["torch"], case={"n": [256], "shape": [[4, 4]]})
    outcome = run(bench, tmp_path, chosen)
    assert [(r.provider, r.mode, r.case["n"]) for r in outcome.records] == [
        ("torch", "bwd", 256),
        (LIMIT, "bwd", 256),
    ]


@pytest.mark.parametrize(
    ("selection", "message"),
    [
        (Selection(suite="slow"), "no suite 'slow'; there are: quick"),
        (Selection(modes=["sideways"]), "no mode 'sideways'"),
        (Selection(providers=["cuda"]), "no provider 'cuda'; there are: torch, limit"),
        (Selection(case={"m": [1]}), "no case parameter 'm'; there are: dtype, shape, n"),
        (Selection(case={"n": [1]}), "no value of n '1'; there are: 64, 256"),
        (Selection(case={"n": [64], "shape": [[4, 4]]}, modes=[]), "no case of suite quick on cpu fits"),
    ],
)
def test_a_selection_that_fits_nothing_says_what_there_is(selection: Selection, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        runner.plan([toy.make_bench()], selection, "cpu")
