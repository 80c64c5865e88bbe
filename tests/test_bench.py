"""The bench: records, resuming, the accuracy gate, failures, timing, tables, the streaming kernel."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
import toy

from warploom.bench import evaluate, limits, measure, records, runner, tables
from warploom.bench.attempt import DeviceLostError, Failure, attempt
from warploom.bench.environment import describe_environment, environment_id
from warploom.bench.records import LIMIT, Record
from warploom.bench.runner import Outcome, Selection
from warploom.errors import ArgumentError, WarploomError
from warploom.ops import benches
from warploom.ops.spec import Bench, Case, Traffic, Unsupported

pytestmark = pytest.mark.usefixtures("quick_measurements")

CPU = torch.device("cpu")
RECORD = Record(
    operator="toy_scale",
    suite="quick",
    case={"dtype": "bfloat16", "n": 256, "activation": "silu"},
    provider="triton",
    mode="fwd",
    source_digest="d",
    environment="e",
    ms=0.01024,
    ms_p20=0.01,
    ms_p80=0.011,
    peak_memory_mib=18.0,
    limit_ms=0.0089,
    limit_fraction=0.87,
)


def run(bench: Bench, output: Path, selection: Selection | None = None, **options: object) -> Outcome:
    return runner.run([bench], selection or Selection(), CPU, output, **options)  # type: ignore[arg-type]


def by_provider(outcome: Outcome, n: int = 64, mode: str = "fwd") -> dict[str, Record]:
    return {r.provider: r for r in outcome.records if r.case["n"] == n and r.mode == mode}


# Records


def test_records_come_back_as_they_were_written(tmp_path: Path) -> None:
    written = [RECORD, replace(RECORD, provider="torch", status="oom", reason="no room", ms=None)]
    records.append(tmp_path, written[:1])
    records.append(tmp_path, written[1:])
    assert records.load([tmp_path]) == written
    assert records.load([tmp_path / records.RECORDS]) == written


def test_a_torn_last_line_is_dropped_and_written_over(tmp_path: Path) -> None:
    records.append(tmp_path, [RECORD])
    file = tmp_path / records.RECORDS
    whole = file.read_bytes()
    file.write_bytes(whole + whole[: len(whole) // 2])
    assert records.load([tmp_path]) == [RECORD]
    other = replace(RECORD, provider="torch")
    records.append(tmp_path, [other])
    assert records.load([tmp_path]) == [RECORD, other]


def test_a_later_record_replaces_an_earlier_one_of_its_key(tmp_path: Path) -> None:
    other = replace(RECORD, mode="bwd")
    again = replace(RECORD, ms=1.0)
    records.append(tmp_path, [RECORD, other, again])
    assert records.load([tmp_path]) == [other, again]


def test_a_line_that_is_no_record_is_named(tmp_path: Path) -> None:
    (tmp_path / records.RECORDS).write_text('{"operator": "x"}\n')
    with pytest.raises(WarploomError, match=r"records.jsonl:1: not a record"):
        records.load([tmp_path])
    with pytest.raises(WarploomError, match="no records here"):
        records.load([tmp_path / "nowhere"])


def test_key_is_the_same_for_a_tuple_and_the_list_it_becomes() -> None:
    assert replace(RECORD, case={"a": (1, 2), "b": 1}).key == replace(RECORD, case={"b": 1, "a": [1, 2]}).key


def test_digest_follows_the_operators_code(tmp_path: Path) -> None:
    (tmp_path / "kernels.py").write_text("a = 1\n")
    before = records.source_digest(tmp_path)
    assert before == records.source_digest(tmp_path)
    (tmp_path / "README.md").write_text("words\n")
    assert before == records.source_digest(tmp_path)
    (tmp_path / "kernels.py").write_text("a = 2\n")
    assert before != records.source_digest(tmp_path)


def test_digest_follows_what_the_operator_imports_and_nothing_else() -> None:
    folder = Path(records.__file__).parents[1] / "ops" / "lrpe"
    package = folder.parents[1]
    imported = {file.relative_to(package).as_posix() for file in records._imported(folder.glob("*.py"), ())}
    assert {"launch.py", "layout.py", "errors.py", "backend.py", "device/phase.py"} <= imported
    assert "ops/spec.py" not in imported
    assert not any(name.startswith(("bench/", "testing/")) for name in imported)


def test_staleness_is_a_digest_that_is_not_the_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = toy.make_bench()
    monkeypatch.setattr(records, "benches", lambda: {bench.name: bench})
    records._digests.cache_clear()
    assert not records.is_stale(replace(RECORD, source_digest=records.current_digest(bench)))
    assert records.is_stale(RECORD)
    assert records.is_stale(replace(RECORD, operator="gone"))
    records._digests.cache_clear()


def test_records_outlast_a_change_to_what_their_case_does_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = benches()["lrpe-rotate"]
    kinds = {bench.unused({"activation": name}) for name in ("none", "silu", "softmax")}
    assert len(kinds) == 1
    (left_out,) = kinds
    assert bench.unused({"activation": "softmax_sequence"}) == ()
    folder = Path(records.__file__).parents[1] / "ops" / "lrpe"
    without = {file.name for file in folder.glob("*.py") if not records._fits(file, left_out)}
    assert {"api.py", "autograd.py", "kernels.py", "launchers.py"} <= without
    imported = records._imported([folder / name for name in without], left_out)
    assert not any("sequence" in file.name for file in imported)
    assert records.current_digest(bench, left_out) != records.current_digest(bench)


def test_a_case_runs_nothing_of_the_files_that_it_leaves_unused(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    from warploom.ops.lrpe import launchers_sequence
    from warploom.testing.conformance import judge

    def fail(*arguments: object, **keywords: object) -> NoReturn:
        raise AssertionError("softmax over the sequence")

    for name in ("forward", "backward", "statistics_shape"):
        monkeypatch.setattr(launchers_sequence, name, fail)
    for name in ("lrpe-rotate", "lrpe-cosine-md"):
        bench = benches()[name]
        cases = [dict(case) for suite in bench.suites.values() for case in suite("cuda") if bench.unused(case)]
        for activation in {case["activation"] for case in cases}:
            small = {"batch": 1, "heads": 1, "head_dim": 8, "dtype": "float32", "activation": activation, "n": 5}
            inputs = bench.operator.make_inputs(small, device, torch.Generator())
            assert judge(bench.operator, inputs, "triton").fwd.ok
    inputs["activation"] = "softmax_sequence"
    with pytest.raises(AssertionError, match="over the sequence"):
        bench.operator.function(**inputs, backend="triton")


def test_records_of_peers_outlast_a_change_to_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = benches()["lrpe-rope"]
    before = records.current_digests(bench)
    assert before["triton"] == before["limit"] == records.current_digest(bench)
    assert before["torch"] == before["torch_compile_cache"] == before["liger"] != before["triton"]
    monkeypatch.setattr(records, "source_digest", lambda folder, leave_out=(): "changed")
    after = records.current_digests(bench)
    assert {name for name in after if after[name] == before[name]} == {
        "torch",
        "torch_compile",
        "torch_compile_cache",
        "liger",
        "fla",
        "flash_attn",
    }


# Environment


def test_environment_id_is_stable_and_ignores_what_passes() -> None:
    environment = describe_environment(CPU)
    assert environment["torch"] == torch.__version__
    assert environment_id(environment) == environment_id(describe_environment(CPU))
    passing = environment | {"temperature_c": 80, "sm_clock_mhz": 1, "commit": "abc", "dirty": True}
    assert environment_id(environment) == environment_id(passing)
    assert environment_id(environment) != environment_id(environment | {"torch": "0"})


def test_environment_needs_neither_git_nor_nvidia_smi(monkeypatch: pytest.MonkeyPatch) -> None:
    with_tools = describe_environment(CPU)
    monkeypatch.setenv("PATH", "")
    without = describe_environment(CPU)
    assert "commit" not in without
    assert environment_id(with_tools) == environment_id(without)


# Runs


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
    printed = tables.text(tables.sections(list(found.values()), [bench]))
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
    assert "max error" in str(found["wrong"].reason)
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

    def crowded(calls: dict[str, object], clock: measure.Clock) -> dict[str, measure.Timing | Failure]:
        alone.append(list(calls))
        results = interleaved(calls, clock)  # type: ignore[arg-type]
        return results | {"torch": Failure("oom", "no room")} if len(calls) > 1 else results

    monkeypatch.setattr(evaluate, "time_interleaved", crowded)
    outcome = run(toy.make_bench(), tmp_path, Selection(modes=["fwd"], case={"n": [64]}))
    assert by_provider(outcome)["torch"].status == "ok"
    assert alone == [[LIMIT, "torch"], ["torch"]]


def test_what_is_missing_is_prepared_before_anything_is_measured(tmp_path: Path) -> None:
    bench = toy.make_bench(**{name: lambda case: toy.reference for name in ("torch", "other", "third")})
    prepared: list[set[Any]] = []

    def prepare(units: list[tuple[evaluate.Unit, list[str]]], seconds: float | None) -> None:
        assert seconds is None
        assert not (tmp_path / records.RECORDS).exists() or prepared
        prepared.append({(unit.case["n"], *names) for unit, names in units})

    run(bench, tmp_path, Selection(modes=["fwd"], providers=["torch"]), prepare=prepare)
    run(bench, tmp_path, Selection(modes=["fwd"]), resume=True, prepare=prepare)
    run(bench, tmp_path, Selection(modes=["fwd"]), resume=True, prepare=prepare)
    others = "other", "third"
    assert prepared == [{(64, "torch"), (256, "torch")}, {(64, *others), (256, *others)}, set()]


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

    two = toy.make_bench(torch=lambda case: toy.reference, wrong=toy.wrong)
    outcome = run(two, tmp_path, Selection(modes=["fwd"]), resume=True)
    assert [providers for _, providers in measured] == [("wrong",), ("wrong",)]
    assert by_provider(outcome)["torch"] == by_provider(first)["torch"]
    assert by_provider(outcome)["wrong"].status == "incorrect"
    measured.clear()

    names = (*one.providers, LIMIT)
    monkeypatch.setattr(runner, "current_digests", lambda *_: dict.fromkeys(names, "other code"))
    outcome = run(one, tmp_path, Selection(modes=["fwd"]), resume=True)
    assert len(measured) == 2
    assert {record.source_digest for record in outcome.records} == {"other code"}
    measured.clear()

    changed = {name: "newer code" if name == "torch" else "other code" for name in names}
    monkeypatch.setattr(runner, "current_digests", lambda *_: changed)
    assert (
        by_provider(run(one, tmp_path, Selection(modes=["fwd"]), resume=True))["torch"].source_digest
        == "newer code"
    )
    assert [providers for _, providers in measured] == [("torch",), ("torch",)]
    assert {r.source_digest for r in records.load([tmp_path]) if r.provider == LIMIT} == {"other code"}


def test_a_time_limit_stops_between_cases_and_says_what_is_left(tmp_path: Path) -> None:
    outcome = run(toy.make_bench(), tmp_path, time_limit=0.0)
    assert outcome.records == []
    assert len(outcome.left) == 4
    assert outcome.left[0] == "toy-scale fwd dtype=float32 shape=(4, 4) n=64"
    assert "time limit of 0 s" in outcome.reason
    assert not run(toy.make_bench(), tmp_path, resume=True).left


def test_preparing_takes_no_more_than_half_of_the_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now, given = [0.0], []

    def prepare(units: object, seconds: float | None) -> None:
        given.append(seconds)
        now[0] += 0.0 if seconds is None else seconds

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
def test_on_a_gpu_host_time_is_not_device_time() -> None:
    clock = measure.make_clock(torch.device("cuda"))
    x = torch.randn(2**16, device="cuda")

    def slow_to_launch() -> None:
        for _ in range(20):
            time.sleep(1e-4)
            x.mul_(1.0)

    host_us = clock.host_us(slow_to_launch)
    assert host_us > 2000
    assert clock.sample(slow_to_launch, host_us) < 0.5
    assert clock.sample(slow_to_launch, host_us / 5) < 0.5  # the first wait is too short


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
        (Selection(suite="slow"), "no suite 'slow' here; there are: quick"),
        (Selection(modes=["sideways"]), "no mode 'sideways'"),
        (Selection(providers=["cuda"]), "no provider 'cuda' here; there are: torch, limit"),
        (Selection(case={"m": [1]}), "no case parameter 'm' here; there are: dtype, shape, n"),
        (Selection(case={"n": [1]}), "no case of suite quick on cpu fits"),
    ],
)
def test_a_selection_that_fits_nothing_says_what_there_is(selection: Selection, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        runner.plan([toy.make_bench()], selection, "cpu")


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

        def sample(self, call: measure.Call, host_us: float) -> float:
            self.order.append(str(call()))
            return 0.02

    left = iter(range(8))

    def failing() -> str:
        return "b" if next(left) < 6 else 1 / 0  # type: ignore[return-value]

    clock = Ticks()
    results = measure.time_interleaved({"a": lambda: "a", "b": failing, "c": lambda: "c"}, clock)
    assert results["a"] == measure.Timing(0.02, 0.02, 0.02, 1.0)
    assert isinstance(results["b"], Failure)
    assert clock.order[9:] == ["a", "b", "c", "a", "b", "c", "a", "c", "a", "c", "a", "c"]


def test_slow_cases_get_fewer_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "CASE_MS", 100.0)
    assert measure._rounds({"a": 90.0, "b": 1e-4}) == {"a": 3, "b": 3}
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


def test_the_limit_of_heavy_arithmetic_is_a_matrix_products_rate() -> None:
    clock = measure.CpuClock()
    one, two = (limits.compute_ms(Traffic(1, 1, 4, flops=flops), CPU, clock) for flops in (10**9, 2 * 10**9))
    assert two == pytest.approx(2 * one)
    assert limits.compute_ms(Traffic(1, 1, 4), CPU, clock) == 0.0


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


# Tables


def test_tables_have_sizes_down_and_providers_across() -> None:
    torch_record = replace(RECORD, provider="torch", ms=0.333, limit_fraction=0.03, peak_memory_mib=99.0)
    limit = replace(RECORD, provider=LIMIT, ms=0.0089, limit_fraction=1.0, peak_memory_mib=None)
    larger = [
        replace(r, case=RECORD.case | {"n": 1024}) for r in (RECORD, replace(torch_record, ms=12.3456), limit)
    ]
    failed = replace(
        torch_record,
        case=RECORD.case | {"n": 2048},
        status="oom",
        reason="no room",
        ms=None,
        peak_memory_mib=None,
    )
    found = tables.sections([*larger, RECORD, torch_record, limit, failed], [toy.make_bench()])
    speed, memory = found
    assert speed.title == "toy_scale  Speed (ms)  fwd  bf16  activation silu"
    assert speed.header == ("n", "triton", "torch", "limit", "limit fraction")
    assert speed.rows == (
        ("256", "0.01024", "0.3330", "0.008900", "0.87"),
        ("1024", "0.01024", "12.35", "0.008900", "0.87"),
        ("2048", "", "-1", "", ""),
    )
    assert speed.notes == ("torch, n = 2048: oom: no room",)
    assert memory.title == "toy_scale  Memory (MiB)  fwd  bf16  activation silu"
    assert memory.header == ("n", "triton", "torch")
    assert memory.rows[0] == ("256", "18.00", "99.00")

    plain = tables.text(found, 80)
    assert "\n  torch, n = 2048: oom: no room\n" in plain
    assert all(len(line) <= 80 for line in plain.splitlines())

    table = tables.markdown(found).splitlines()
    assert table[0] == r"**toy\_scale  Speed (ms)  fwd  bf16  activation silu**"
    assert table[2:5] == [
        "| n | triton | torch | limit | limit fraction |",
        "| ---: | ---: | ---: | ---: | ---: |",
        "| 256 | 0.01024 | 0.3330 | 0.008900 | 0.87 |",
    ]


def test_long_headers_fold_between_words() -> None:
    names = ("triton", "triton_cache", "torch", "torch_compile", "torch_compile_cache", LIMIT)
    plain = tables.text(tables.sections([replace(RECORD, provider=name) for name in names]), 80)
    lines = plain.splitlines()
    assert lines[1].split() == ["triton_", "torch_", "torch_compile_", "limit"]
    assert lines[2].split() == ["n", "triton", "cache", "torch", "compile", "cache", LIMIT, "fraction"]
    assert all(len(line) <= 80 for line in lines)


def test_tables_part_by_the_other_parameters_mode_and_environment() -> None:
    others = [
        replace(RECORD, case=RECORD.case | {"activation": "none"}),
        replace(RECORD, mode="bwd"),
        replace(RECORD, environment="f"),
    ]
    found = tables.sections([RECORD, *others])
    assert len(found) == 8
    assert found[0].title.endswith("environment e")


def test_equal_reasons_share_a_line() -> None:
    failures = [
        replace(RECORD, status="error", reason="boom", ms=None, case=RECORD.case | {"n": n}) for n in (1, 2)
    ]
    assert tables.sections(failures)[0].notes == ("triton, n = 1, 2: error: boom",)


def test_the_fraction_is_torchs_where_triton_cannot_run() -> None:
    triton = replace(RECORD, status="unsupported", reason="no GPU", ms=None, limit_fraction=None)
    plain = replace(RECORD, provider="torch", limit_fraction=0.5)
    found = tables.sections([triton, plain, replace(RECORD, provider=LIMIT)])[0]
    assert found.header[-1] == "limit fraction (torch)"
    assert found.rows[0][1] == "-1"
    assert found.rows[0][-1] == "0.50"
