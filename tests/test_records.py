"""Records of the bench: kept, read again, known to be stale, and where they were made."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import toy
from full_disk import room_for

from warploom.bench import environment, records
from warploom.bench.environment import describe_environment, environment_id
from warploom.bench.fingerprint import fingerprint
from warploom.bench.records import Record
from warploom.errors import ArgumentError, WarploomError

CPU = torch.device("cpu")
RECORD = Record(
    operator="toy_scale",
    suite="quick",
    case={"dtype": "bfloat16", "n": 256, "activation": "silu"},
    provider="warploom",
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


def test_a_torn_line_is_cut_off_and_nothing_before_it_is_written_again(tmp_path: Path) -> None:
    written = [replace(RECORD, provider=f"p{number}") for number in range(300)]
    records.append(tmp_path, written)
    file = tmp_path / records.RECORDS
    with file.open("ab") as torn:
        torn.write(b"x" * 200_000)
    full = pytest.raises(WarploomError, match=r"records.jsonl: cannot be written: File too large")
    with room_for(8192), full:
        records.append(tmp_path, [RECORD])
    assert records.load([tmp_path]) == written
    records.append(tmp_path, [RECORD])
    assert records.load([tmp_path]) == [*written, RECORD]
    file.write_bytes(b"torn")
    records.append(tmp_path, [RECORD])
    assert records.load([tmp_path]) == [RECORD]


def test_an_import_on_a_full_disk_leaves_no_half_of_a_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "long_module.py"
    source.write_text(f"TEXT = {'x' * 10_000!r}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    monkeypatch.setattr(sys, "pycache_prefix", None)
    with room_for(100):
        importlib.import_module("long_module")
    assert not list(tmp_path.rglob("*.pyc"))
    del sys.modules["long_module"]
    importlib.import_module("long_module")
    assert list(tmp_path.rglob("*.pyc"))


def test_several_processes_write_into_one_folder(tmp_path: Path) -> None:
    def write(process: int) -> None:
        for n in range(20):
            case = {"process": process, "n": n, "padding": "x" * 10_000}
            records.append(tmp_path, [replace(RECORD, case=case, provider=name) for name in ("warploom", "torch")])
            records.save_environment(tmp_path, f"{process}-{n}", {"gpu": "one of two that are equal"})

    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=write, args=(number,)) for number in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * 4
    every = {(process, n) for process in range(4) for n in range(20)}
    found = [(record.case["process"], record.case["n"]) for record in records.load([tmp_path])]
    assert len(found) == 2 * len(every)
    assert set(found) == every
    assert set(records.load_environments(tmp_path)) == {f"{process}-{n}" for process, n in every}
    assert not list(tmp_path.glob("*.tmp"))


def test_a_later_record_replaces_an_earlier_one_of_its_key(tmp_path: Path) -> None:
    other = replace(RECORD, mode="bwd")
    again = replace(RECORD, ms=1.0)
    records.append(tmp_path, [RECORD, other, again])
    assert records.load([tmp_path]) == [other, again]


def test_a_line_that_is_no_record_is_named(tmp_path: Path) -> None:
    (tmp_path / records.RECORDS).write_text('{"operator": "x"}\n')
    with pytest.raises(WarploomError, match=r"records.jsonl: no file of records.*line 1: without suite, case"):
        records.load([tmp_path])
    with pytest.raises(WarploomError, match="no records here"):
        records.load([tmp_path / "nowhere"])


def test_key_is_the_same_for_a_tuple_and_the_list_it_becomes() -> None:
    assert replace(RECORD, case={"a": (1, 2), "b": 1}).key == replace(RECORD, case={"b": 1, "a": [1, 2]}).key


def test_a_record_is_stale_when_its_kernels_are_others(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = toy.make_bench()
    monkeypatch.setattr(records, "benches", lambda: {bench.name: bench})
    source = fingerprint(bench, RECORD.case, RECORD.provider, "fwd", "")
    assert not replace(RECORD, fingerprint=source).is_stale
    assert replace(RECORD, fingerprint="other").is_stale
    assert replace(RECORD, fingerprint=source, operator="gone").is_stale


def test_a_record_is_clean_when_its_run_is_known_and_had_no_changes() -> None:
    commit = {"commit": "0" * 40}
    environments = {
        "e": {"runs": {"clean": commit | {"dirty": False}, "dirty": commit | {"dirty": True}, "copy": {}}}
    }
    clean = {name: records.is_clean(replace(RECORD, run=name), environments) for name in ("clean", "dirty", "copy")}
    assert clean == {"clean": True, "dirty": False, "copy": False}
    assert not records.is_clean(replace(RECORD, run="before-0"), environments)
    assert not records.is_clean(replace(RECORD, run="clean", environment="other"), environments)
    assert not records.is_clean(RECORD, {"e": {}})


# Environment


def test_environment_id_is_stable_and_ignores_what_passes() -> None:
    here = describe_environment(CPU)
    assert here["torch"] == torch.__version__
    assert environment_id(here) == environment_id(describe_environment(CPU))
    passing = here | {"temperature_c": 80, "sm_clock_mhz": 1, "commit": "abc", "dirty": True}
    assert environment_id(here) == environment_id(passing)
    assert environment_id(here) != environment_id(here | {"torch": "0"})


def test_the_environment_has_the_versions_of_what_is_measured_beside_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "_version", lambda name: {"flash-attn-4": "4.1", "fla-core": "0.4"}.get(name))
    assert describe_environment(CPU)["packages"] == "fla-core 0.4, flash-attn-4 4.1"
    monkeypatch.setattr(environment, "_version", lambda name: None)
    assert "packages" not in describe_environment(CPU)


def test_environment_takes_nothing_from_a_tool_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    device = SimpleNamespace(
        name="A GPU", major=9, minor=0, multi_processor_count=1, total_memory=2**30, L2_cache_size=2**20, uuid="1"
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: device)
    monkeypatch.setattr(environment, "_output", lambda _: "580.1, ERR!, 1980, N/A, Unknown Error, [N/A], 40")
    found = environment._gpu(torch.device("cuda"))
    assert (found["driver"], found["max_sm_clock_mhz"], found["temperature_c"]) == ("580.1", 1980, 40)
    assert {"power_limit_w", "max_memory_clock_mhz", "sm_clock_mhz", "memory_clock_mhz"}.isdisjoint(found)
    monkeypatch.undo()
    assert environment._output([sys.executable, "-c", "import os; os.write(1, bytes([255]))"]) == "\ufffd"


def test_environment_needs_neither_git_nor_nvidia_smi(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(environment.COMMIT, raising=False)
    with_tools = describe_environment(CPU)
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("WARPLOOM_COMMIT", raising=False)
    without = describe_environment(CPU)
    assert "commit" not in without
    assert environment_id(with_tools) == environment_id(without)


@pytest.mark.parametrize("tools", ["", os.environ["PATH"]], ids=["a copy", "a checkout"])
def test_a_commit_that_is_named_goes_before_what_git_says(monkeypatch: pytest.MonkeyPatch, tools: str) -> None:
    """A copy may travel with a repository that is older than it."""
    monkeypatch.setenv("PATH", tools)
    monkeypatch.delenv(environment.COMMIT, raising=False)
    plain = describe_environment(CPU)
    monkeypatch.setenv(environment.COMMIT, "0123456789" * 4)
    named = describe_environment(CPU)
    assert (named["commit"], named["commit_given"], named["dirty"]) == ("0123456789" * 4, True, False)
    assert environment_id(named) == environment_id(plain)
    assert "commit_given" not in plain
    for wrong in ("0123456789", "main", "0123456789" * 4 + "0", "G123456789" * 4):
        monkeypatch.setenv(environment.COMMIT, wrong)
        with pytest.raises(ArgumentError, match="40 hexadecimal digits"):
            describe_environment(CPU)
    monkeypatch.setenv(environment.COMMIT, "")
    assert environment_id(describe_environment(CPU)) == environment_id(plain)
