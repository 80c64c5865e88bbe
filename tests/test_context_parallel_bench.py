"""The bench of context parallelism: it starts the ranks itself, and its records are the house's."""

import subprocess
from pathlib import Path

import pytest
import torch

from benchmarks import context_parallel
from warploom.bench import Record, run_bench


@pytest.mark.seldom(6, 26)
def test_a_trial_on_two_ranks(tmp_path: Path, quick_measurements: None, own_registry: None) -> None:
    results = run_bench(
        context_parallel.BENCH,
        suite="trial",
        modes=["fwd_bwd"],
        providers=["warploom", "allgather_sdpa"],
        device="cpu",
        output=tmp_path,
    )
    records = {record.provider: record for record in results.records if record.case["kind"] == "causal"}
    delta = {record.provider: record for record in results.records if record.case["kind"] == "delta"}
    assert delta["warploom"].status == "ok", delta["warploom"].reason
    assert delta["warploom"].max_error <= delta["warploom"].error_budget
    assert set(delta["warploom"].details["bits_of_one_gpu"]) == {"out", "dq", "dk", "dv", "dbeta", "ddecay"}
    assert delta["allgather_sdpa"].status == "unsupported"
    assert set(records) == {"warploom", "allgather_sdpa", "limit"}
    ours = records["warploom"]
    assert (ours.status, records["limit"].status) == ("ok", "ok"), [r.reason for r in records.values()]
    assert records["allgather_sdpa"].ms is not None or records["allgather_sdpa"].status == "incorrect"
    assert ours.case["gpus"] == 2
    assert ours.max_error is not None
    assert ours.error_budget is not None
    assert ours.max_error <= ours.error_budget
    assert ours.limit_fraction == pytest.approx(ours.limit_ms / ours.ms)
    assert set(ours.details["bits_of_one_gpu"]) == {"out", "dq", "dk", "dv"}


def test_ranks_that_fail_leave_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    told = "Traceback …\n  in main\n[rank1]: RuntimeError: no such thing\nRuntimeError: later"
    failed = subprocess.CompletedProcess([], 1, stdout="", stderr=told)
    monkeypatch.setattr(subprocess, "run", lambda *arguments, **options: failed)
    case = context_parallel._trial("cpu")[0]
    found, reason = context_parallel._on_ranks(case, "fwd", ["warploom"], torch.device("cpu"))
    assert found == {}
    assert reason == "[rank1]: RuntimeError: no such thing"


def test_gpus_that_are_not_there_are_no_failure() -> None:
    bench = context_parallel.BENCH
    case = bench.suites["published"]("cuda")[-1]
    unit = context_parallel.Unit(bench, "published", case, "fwd")
    blank = Record(bench.record_name, "published", dict(case), "limit", "fwd", "", "")
    if torch.cuda.device_count() >= case["gpus"]:
        pytest.skip("they are there")
    records = bench.measure(unit, ["warploom"], torch.device("cuda"), None, blank)
    assert {record.status for record in records} == {"unsupported"}
    assert "4 GPUs are needed" in records[0].reason


def test_operations_of_causal_attention() -> None:
    case = {"kind": "causal", "gpus": 2, "batch": 1, "heads": 2, "kv_heads": 1, "head_dim": 8, "n": 64}
    assert context_parallel.count_flops(case, "fwd") == 4 * 64 * 64 // 2 * 16
