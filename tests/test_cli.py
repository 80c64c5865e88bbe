"""The command line, end to end on the toy operator."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import toy

import warploom.ops
from warploom.bench import records
from warploom.cli import main
from warploom.ops.spec import Bench


@pytest.fixture(autouse=True)
def _toys(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, quick_measurements: None) -> None:
    monkeypatch.chdir(tmp_path)
    register(monkeypatch, toy.make_bench())
    monkeypatch.setattr(warploom.ops, "operators", lambda: {toy.OPERATOR.name: toy.OPERATOR})


def register(monkeypatch: pytest.MonkeyPatch, bench: Bench) -> None:
    monkeypatch.setattr(warploom.ops, "benches", lambda: {bench.name: bench})
    monkeypatch.setattr(records, "benches", lambda: {bench.name: bench})


def test_bench_prints_tables_then_where_things_are(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("plotly")
    assert main(["bench", "toy_scale", "--device", "cpu"]) == 0
    out, err = capsys.readouterr()
    lines = out.rstrip().splitlines()
    assert lines[0] == "toy_scale  Speed (ms)  fwd  fp32  shape 4×4"
    assert lines[-2] == "records: runs/cpu-quick/records.jsonl"
    assert lines[-1] == "report: runs/cpu-quick/report.html"
    assert "[1/4] toy-scale fwd" in err
    assert len(records.load([tmp_path / "runs/cpu-quick"])) == 8
    assert "toy_scale" in (tmp_path / "runs/cpu-quick/report.html").read_text()


def test_bench_without_a_report_and_with_a_selection(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words = "bench --device cpu --mode fwd --case n=64 --case n=1 --case shape=[4,4] --output here --no-report"
    assert main(words.split()) == 0
    assert capsys.readouterr().out.rstrip().endswith("records: here/records.jsonl")
    assert not (tmp_path / "here/report.html").exists()
    assert {(r.mode, r.case["n"]) for r in records.load([tmp_path / "here"])} == {("fwd", 64)}


def test_without_the_reports_packages_a_run_still_ends_well(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in [name for name in sys.modules if name.startswith(("plotly", "warploom.bench.report"))]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "plotly", None)
    assert main(["bench", "--device", "cpu", "--mode", "fwd"]) == 0
    out, err = capsys.readouterr()
    assert out.rstrip().endswith("records: runs/cpu-quick/records.jsonl")
    assert "no report, plotly is not installed: pip install 'warploom[bench]'" in err
    assert main(["report", "runs/cpu-quick"]) == 2


def test_an_interrupted_run_says_how_to_go_on(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt() -> dict[str, Bench]:
        raise KeyboardInterrupt

    monkeypatch.setattr(warploom.ops, "benches", interrupt)
    assert main(["bench", "--device", "cpu"]) == 130
    assert "--resume" in capsys.readouterr().err


def test_bench_resumes(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["bench", "--device", "cpu", "--no-report", "--resume"]
    assert main([*words, "--time-limit", "0"]) == 0
    assert "the time limit of 0 s is reached; 4 left, --resume goes on with:" in capsys.readouterr().err
    assert main(["bench", "--device", "cpu", "--output", "empty", "--time-limit", "0"]) == 0
    assert "nothing was measured" in capsys.readouterr().err
    assert main(words) == 0
    first = capsys.readouterr()
    assert main(words) == 0
    second = capsys.readouterr()
    assert first.out == second.out
    assert second.err == ""


def test_bench_fails_when_our_own_provider_is_wrong(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["bench", "--device", "cpu", "--no-report"]
    register(monkeypatch, toy.make_bench(torch=toy.wrong))
    assert main(words) == 1
    assert "torch, n = 64: incorrect: max error" in capsys.readouterr().out
    register(monkeypatch, toy.make_bench(torch=toy.broken))
    assert main(words) == 1
    register(monkeypatch, toy.make_bench(other=toy.wrong, torch=lambda case: toy.reference))
    assert main(words) == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("bench nothing", "warploom: no bench 'nothing'; there are: toy-scale"),
        ("bench --case n", "warploom: --case n: expected KEY=VALUE, e.g. --case n=4096"),
        ("bench --case m=1", "warploom: bench: no case parameter 'm' here; there are: dtype, shape, n"),
        ("bench --suite slow", "warploom: bench: no suite 'slow' here; there are: quick"),
        ("check nothing", "warploom: no operator 'nothing'; there are: toy"),
    ],
)
def test_mistakes_are_one_line_and_status_2(words: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words.split()) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert len(err.splitlines()) == 1
    assert message in err


def test_a_report_of_nothing_is_a_mistake_too(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("plotly")
    assert main(["report", "nowhere"]) == 2
    assert capsys.readouterr().err.startswith("warploom: nowhere: no records here")


def test_check_reports_each_dtype_and_mode(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["check", "--device", "cpu"]) == 0
    out = capsys.readouterr().out
    for word in ("toy", "float32", "bfloat16", "fwd", "bwd", "ok"):
        assert word in out

    def off(x: torch.Tensor, weight: torch.Tensor, backend: str) -> torch.Tensor:
        return toy.reference(x, weight) * 1.25

    wrong = replace(toy.OPERATOR, function=off)
    monkeypatch.setattr(warploom.ops, "operators", lambda: {"toy": wrong})
    assert main(["check", "toy", "--device", "cpu"]) == 1
    assert "FAILED" in capsys.readouterr().out


def test_env_as_text_and_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["env", "--json", "--device", "cpu"]) == 0
    environment = json.loads(capsys.readouterr().out)
    assert main(["env", "--device", "cpu"]) == 0
    assert environment["id"] in capsys.readouterr().out


def test_report_draws_recorded_runs(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("plotly")
    assert main(["bench", "--device", "cpu", "--no-report", "--output", "here"]) == 0
    capsys.readouterr()
    assert main(["report", "here", "-o", "drawn.html"]) == 0
    assert capsys.readouterr().out.strip().endswith("drawn.html")
    assert (tmp_path / "drawn.html").is_file()


def test_the_command_line_and_the_bench_import_nothing_heavy() -> None:
    program = "import sys, warploom.cli, warploom.bench; print(*sys.modules)"
    root = Path(__file__).parents[1]
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=root)
    assert {"rich", "plotly", "jinja2", "triton"}.isdisjoint(done.stdout.split())
