"""Comparing runs, providers and GPUs: the interval, the verdicts, the command and its exit status."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from warploom.bench import measure
from warploom.bench.comparison import Pair, compare, read_side
from warploom.bench.records import Record, append, save_environment
from warploom.cli import main
from warploom.errors import ArgumentError

SIZES = (64, 256)


def record(n: int, ms: float, provider: str = "warploom", spread: float = 0.02, **changes: object) -> Record:
    made = Record(
        operator="toy",
        suite="quick",
        case={"dtype": "float32", "n": n},
        provider=provider,
        mode="fwd",
        fingerprint="d",
        environment="e",
        ms=ms,
        ms_p20=ms * (1 - spread),
        ms_p80=ms * (1 + spread),
    )
    return replace(made, **changes)


def save(folder: Path, records: list[Record], gpu: str = "NVIDIA H200") -> str:
    append(folder, records)
    save_environment(folder, "e", {"gpu": gpu})
    return str(folder)


@pytest.fixture
def runs(tmp_path: Path) -> tuple[str, str]:
    """A run, and a later one that is level at one size and 20 % slower at the other."""
    before = [record(n, 1.0) for n in SIZES] + [record(n, 4.0, "torch") for n in SIZES]
    after = [record(64, 1.01), record(256, 1.2), record(1024, 1.0)]
    return save(tmp_path / "before", before), save(tmp_path / "after", after, "NVIDIA B200")


def test_what_is_fixed_in_the_times_of_each_side_is_said(tmp_path: Path) -> None:
    """Small cases of two runs differ by that alone."""
    for side, fixed in (("a", (2.8,)), ("b", (4.5, 4.3))):
        append(tmp_path / side, [record(n, 1.0, run=f"{side}{n % len(fixed)}") for n in (64, 255)])
        for n, us in enumerate(fixed):
            save_environment(tmp_path / side, "e", {"gpu": "NVIDIA H200", "fixed_us": us}, f"{side}{n}")
    assert ", 2.8 µs of each time are fixed" in read_side(tmp_path / "a").describe()
    assert ", 4.3 to 4.5 µs of each time are fixed" in read_side(tmp_path / "b").describe()


def test_the_band_of_a_record_covers_its_true_median_as_often_as_is_said() -> None:
    def coverage(n: int) -> float:
        """At least: how often n coins show so many heads that the true median lies in the 20 to 80 % band."""
        rank = math.ceil(0.2 * (n - 1)) + 1  # p20 is at most the sample of this rank
        return 1 - 2 * sum(math.comb(n, k) for k in range(rank)) / 2**n

    assert min(map(coverage, range(measure.MIN_ROUNDS, 40))) > 0.95
    assert min(map(coverage, range(40, measure.MAX_ROUNDS + 1))) > 0.999
    samples = torch.randn(4000, measure.MIN_ROUNDS, dtype=torch.float64).exp()  # far from normal; true median 1
    low, _, high = zip(*(measure.percentiles(row.tolist()) for row in samples))
    inside = sum(a < 1 < b for a, b in zip(low, high)) / len(samples)
    assert inside > 0.94


def test_a_pair_has_a_ratio_its_interval_and_a_verdict() -> None:
    pair = Pair("toy", "fwd", {}, record(64, 1.0), record(64, 1.2))
    assert pair.ratio == pytest.approx(1.2)
    assert pair.interval == pytest.approx((1.2 * 0.98 / 1.02, 1.2 * 1.02 / 0.98))
    assert (pair.significant, pair.verdict) == (True, "slower")
    assert Pair("toy", "fwd", {}, record(64, 1.2), record(64, 1.0)).verdict == "faster"
    wide = Pair("toy", "fwd", {}, record(64, 1.0, spread=0.2), record(64, 1.2, spread=0.2))
    assert (wide.significant, wide.verdict, wide.worse_by(0.05)) == (False, "same", False)
    shaken = Pair("toy", "fwd", {}, record(64, 1.0), record(64, 2.0, disturbed="thermal"))
    assert (shaken.significant, shaken.verdict, shaken.worse_by(0.05)) == (False, "disturbed", False)
    assert shaken.ratio == 2.0
    assert all(map(math.isnan, shaken.interval))


def test_disturbed_cases_have_no_interval_and_are_in_no_mean(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "140")
    before = save(tmp_path / "before", [record(n, 1.0) for n in SIZES])
    shaken = record(256, 2.0, disturbed="other programs used 50 % of the processors")
    some = save(tmp_path / "some", [record(64, 1.1), shaken])
    assert [mean.cases for mean in compare(before, some).means] == [1, 1]
    assert main(["compare", before, some]) == 0
    out = capsys.readouterr().out
    assert "1 disturbed" in out
    assert "have no interval, and are in no mean" in out
    (line,) = (line for line in out.splitlines() if "n=256" in line and "…" not in line and "2.000" in line)
    assert line.split()[-1] == "disturbed"
    every = save(tmp_path / "every", [shaken])
    assert not compare(before, every).means
    assert main(["compare", before, every]) == 0
    assert "geometric mean" not in capsys.readouterr().out
    assert main(["compare", before, every, "--json"]) == 0
    (pair,) = json.loads(capsys.readouterr().out)["pairs"]
    assert (pair["low"], pair["high"], pair["ratio"]) == (None, None, 2.0)


def test_a_failure_on_one_side_has_no_ratio_and_is_worse() -> None:
    failed = Pair("toy", "fwd", {}, record(64, 1.0), replace(record(64, 1.0), ms=None, status="incorrect"))
    assert math.isnan(failed.ratio)
    assert failed.verdict == "B incorrect"
    assert failed.worse_by(0.5)
    mended = Pair("toy", "fwd", {}, replace(record(64, 1.0), ms=None, status="error"), record(64, 1.0))
    assert mended.verdict == "A error"
    assert not mended.worse_by(0.0)


def test_the_mean_is_geometric_and_per_operator_and_mode(runs: tuple[str, str]) -> None:
    comparison = compare(*map(read_side, runs))
    assert [pair.case["n"] for pair in comparison.pairs] == [64, 256]
    assert comparison.unmatched == 1
    assert [mean.name for mean in comparison.means] == ["toy fwd", "all"]
    mean = comparison.means[0]
    assert mean.ratio == pytest.approx(math.sqrt(1.01 * 1.2))
    assert mean.low < mean.ratio < mean.high


def test_the_command_prints_a_table_and_fails_above_a_threshold(
    runs: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compare", *runs]) == 0
    out = capsys.readouterr().out
    assert "NVIDIA H200, 2 of 2 records from other code" in out.replace("\n", " ")
    assert "NVIDIA B200" in out
    assert [line.split()[-1] for line in out.splitlines() if "n=" in line] == ["same", "slower"]
    assert "1 cases are on one side only" in out
    assert main(["compare", *runs, "--fail-above", "5%"]) == 1
    assert "1 of 2 cases worse by more than 5 %" in capsys.readouterr().out
    assert main(["compare", *runs, "--fail-above", "25"]) == 0
    assert main(["compare", *reversed(runs), "--fail-above", "5%"]) == 0


def test_providers_of_one_run_and_json(runs: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", runs[0], "--providers", "warploom", "torch", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert [pair["ratio"] for pair in facts["pairs"]] == pytest.approx([4.0, 4.0])
    assert facts["means"][-1]["name"] == "all"
    assert (facts["a"]["provider"], facts["b"]["provider"]) == ("warploom", "torch")
    assert main(["compare", f"{runs[0]}:torch", f"{runs[1]}:warploom", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["pairs"][0]["verdict"] == "faster"
    assert facts["a"]["stale"] == 2


def test_providers_of_one_set_are_compared_within_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = [record(64, 1.0, run="r"), record(256, 1.0, run="r"), record(64, 2.0, "torch", run="r")]
    folder = save(tmp_path / "run", [*made, record(256, 0.5, "torch", run="s")])
    assert main(["compare", folder, "--providers", "warploom", "torch"]) == 0
    out = capsys.readouterr().out
    assert "1 cases are on one side only, or of two runs, and left out" in " ".join(out.split())
    assert "0.500" not in out
    other = save(tmp_path / "other", [record(256, 0.5, run="t")])
    assert [pair.ratio for pair in compare(read_side(folder), read_side(other)).pairs] == [0.5]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("compare {a}", "give either A and B, or A and --providers"),
        ("compare {a} {b} --providers warploom torch", "give either A and B"),
        ("compare {a} --providers warploom nobody", "has no records of nobody; there are: torch, warploom"),
        ("compare {a} nowhere", "nowhere: no records here"),
    ],
)
def test_mistakes(words: str, message: str, runs: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words.format(a=runs[0], b=runs[1]).split()) == 2
    assert message in capsys.readouterr().err


def test_nothing_in_common_is_a_mistake(tmp_path: Path) -> None:
    one = save(tmp_path / "one", [record(64, 1.0)])
    two = save(tmp_path / "two", [record(65, 1.0)])
    with pytest.raises(ArgumentError, match="no case in common"):
        compare(read_side(one), read_side(two))
    with pytest.raises(SystemExit):
        main(["compare", one, two, "--fail-above", "fast"])
