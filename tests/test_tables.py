"""Tables of the bench's records."""

from __future__ import annotations

from dataclasses import replace

import toy
from test_records import RECORD

from warploom.bench import tables
from warploom.bench.records import LIMIT


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
