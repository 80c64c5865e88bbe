"""Records of the bench: kept, read again, known to be stale, and where they were made."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import pytest
import torch
import toy

from warploom.bench import records
from warploom.bench.environment import describe_environment, environment_id
from warploom.bench.records import Record
from warploom.errors import WarploomError
from warploom.ops import benches

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
