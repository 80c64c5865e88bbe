"""Records of the bench: kept, read again, known to be stale, and where they were made."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import toy

from warploom.bench import records
from warploom.bench.environment import describe_environment, environment_id
from warploom.bench.fingerprint import fingerprint
from warploom.bench.records import Record
from warploom.errors import WarploomError

CPU = torch.device("cpu")
RECORD = Record(
    operator="toy_scale",
    suite="quick",
    case={"dtype": "bfloat16", "n": 256, "activation": "silu"},
    provider="triton",
    mode="fwd",
    fingerprint="d",
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


def test_a_record_is_stale_when_its_kernels_are_others(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = toy.make_bench()
    monkeypatch.setattr(records, "benches", lambda: {bench.name: bench})
    source = fingerprint(bench, RECORD.case, RECORD.provider, "fwd", "")
    assert not records.is_stale(replace(RECORD, fingerprint=source))
    assert records.is_stale(replace(RECORD, fingerprint="other"))
    assert records.is_stale(replace(RECORD, fingerprint=source, operator="gone"))


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
