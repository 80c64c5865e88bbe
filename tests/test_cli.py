"""The command line, end to end on the toy operator."""

from __future__ import annotations

import argparse
import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import processes
import pytest
import torch
import toy

import warploom.ops
from warploom.bench import environment, records
from warploom.cli import bench, check, main
from warploom.ops.spec import Bench, Case
from warploom.report import panels


@pytest.fixture(autouse=True)
def _toys(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, quick_measurements: None) -> None:
    monkeypatch.chdir(tmp_path)
    register(monkeypatch, toy.make_bench())
    fused = replace(toy.OPERATOR, fused=True)
    monkeypatch.setattr(warploom.ops, "operators", lambda: {fused.name: fused})


def register(monkeypatch: pytest.MonkeyPatch, bench: Bench) -> None:
    for module in (warploom.ops, records, panels):
        monkeypatch.setattr(module, "benches", lambda: {bench.name: bench})


def test_bench_prints_tables_then_where_things_are(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("jinja2")
    assert main(["bench", "toy_scale", "--device", "cpu"]) == 0
    out, err = capsys.readouterr()
    lines = out.rstrip().splitlines()
    assert lines[0].startswith("device: CPU, PyTorch")
    assert "no kernel runs here" in lines[0]
    assert lines[1] == "On a CPU PyTorch is timed; --provider adds compiled peers."
    assert "toy_scale  fwd  fp32  ms" in lines
    assert max(map(len, lines)) <= 80
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
    for module in [name for name in sys.modules if name.startswith(("jinja2", "warploom.report.page"))]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "jinja2", None)
    monkeypatch.setattr(bench.importlib.util, "find_spec", lambda name: None)
    assert main(["bench", "--device", "cpu", "--mode", "fwd"]) == 0
    out, err = capsys.readouterr()
    assert out.rstrip().endswith("records: runs/cpu-quick/records.jsonl")
    assert err.startswith("warploom: no report: jinja2 is missing: pip install 'warploom[bench]'")
    assert main(["report", "runs/cpu-quick"]) == 2
    assert "jinja2 is not installed: pip install 'warploom[bench]'" in capsys.readouterr().err


def test_an_option_that_is_given_twice_has_both_values() -> None:
    from warploom.cli.common import add_selection

    parser = argparse.ArgumentParser()
    add_selection(parser)
    words = "--mode fwd,bwd --mode fwd_bwd --provider torch --provider limit --dtype fp32"
    given = parser.parse_args(words.split())
    assert given.mode == ["fwd", "bwd", "fwd_bwd"]
    assert given.provider == ["torch", "limit"]
    assert given.dtype == ["fp32"]
    assert parser.parse_args([]).mode is None


def test_an_interrupted_run_says_how_to_go_on(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(device: torch.device) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr(bench, "describe", interrupt)
    assert main(["bench", "--device", "cpu"]) == 130
    assert "--resume" in capsys.readouterr().err


def test_bench_resumes(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["bench", "--device", "cpu", "--no-report", "--resume"]
    assert main([*words, "--time-limit", "0"]) == 1
    assert "the time limit of 0 s is reached; 4 left, --resume goes on with:" in capsys.readouterr().err
    assert main(["bench", "--device", "cpu", "--output", "empty", "--time-limit", "0"]) == 1
    assert "nothing was measured" in capsys.readouterr().err
    assert main(words) == 0
    first = capsys.readouterr()
    assert main(words) == 0
    second = capsys.readouterr()
    assert first.out == second.out
    assert second.err == ""


def test_bench_fails_where_no_chosen_provider_has_a_time(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    register(monkeypatch, toy.make_bench(quantum=toy.impossible, torch=lambda case: toy.reference))
    words = ["bench", "--device", "cpu", "--no-report", "--mode", "fwd", "--provider"]
    assert main([*words, "quantum"]) == 1
    said = "warploom: nothing was measured but the limit; quantum: needs a quantum computer"
    assert said in capsys.readouterr().err
    assert main([*words, "limit"]) == 0
    assert main([*words, "quantum,torch"]) == 0


def test_bench_fails_when_our_own_provider_is_wrong(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["bench", "--device", "cpu", "--no-report"]
    register(monkeypatch, toy.make_bench(torch=toy.wrong))
    assert main(words) == 1
    assert "incorrect: torch at n = 64: wrong in" in capsys.readouterr().out
    register(monkeypatch, toy.make_bench(torch=toy.broken))
    assert main(words) == 1
    register(monkeypatch, toy.make_bench(other=toy.wrong, torch=lambda case: toy.reference))
    assert main(words) == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("bench nothing", "warploom: no bench 'nothing'; there are: toy-scale"),
        ("bench --case n", "warploom: --case n: expected KEY=VALUE, e.g. --case n=4096"),
        ("bench --case m=1", "warploom: bench: no case parameter 'm'; there are: dtype, shape, n"),
        ("bench --suite slow", "warploom: bench: no suite 'slow'; there are: quick"),
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
    pytest.importorskip("jinja2")
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

    wrong = replace(toy.OPERATOR, function=off, fused=True)
    monkeypatch.setattr(warploom.ops, "operators", lambda: {"toy": wrong})
    assert main(["check", "toy", "--device", "cpu"]) == 1
    assert "FAILED" in capsys.readouterr().out


def test_env_as_text_and_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["env", "--json", "--device", "cpu"]) == 0
    environment = json.loads(capsys.readouterr().out)
    assert main(["env", "--device", "cpu"]) == 0
    assert environment["id"] in capsys.readouterr().out


def test_report_draws_recorded_runs(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("jinja2")
    assert main(["bench", "--device", "cpu", "--no-report", "--output", "here"]) == 0
    capsys.readouterr()
    assert main(["report", "here", "-o", "drawn.html"]) == 0
    assert capsys.readouterr().out.strip().endswith("drawn.html")
    assert (tmp_path / "drawn.html").is_file()


def test_help_needs_no_pytorch_and_answers_at_once() -> None:
    variables = processes.environment()
    seconds = []
    for _ in range(3):
        before = os.times()
        words = [sys.executable, "-m", "warploom", "bench", "--help"]
        done = subprocess.run(words, capture_output=True, text=True, check=True, env=variables)
        after = os.times()
        assert "examples:" in done.stdout
        seconds.append(after.children_user + after.children_system - before.children_user - before.children_system)
    assert min(seconds) < 0.3, "PyTorch alone takes seconds"


IMPORTS = """
import sys, warploom
assert {"lrpe_rotate", "nn", "bench", "integrations", "distributed"} <= set(dir(warploom)) >= set(warploom.__all__)
assert not {"sys", "Any", "Path"} & set(dir(warploom))
assert "warploom.nn" not in sys.modules
import warploom.cli, warploom.bench
assert {"rich", "jinja2", "triton"}.isdisjoint(sys.modules)
print(warploom.nn.LRPE, warploom.bench.time_functions, warploom.integrations, warploom.distributed)
print(*[getattr(warploom, name) for name in warploom.__all__])
"""


def test_what_is_imported_is_there_and_nothing_heavy_with_it() -> None:
    """Completion shows operators and subpackages. PyTorch is not imported before, as it is in the tests."""
    command, variables = [sys.executable, "-c", IMPORTS], processes.environment()
    done = subprocess.run(command, capture_output=True, text=True, env=variables)
    assert done.returncode == 0, done.stderr
    assert "function lrpe_rotate" in done.stdout
    assert all(callable(getattr(warploom, name)) for name in warploom.__all__ if name.startswith("lrpe"))


def test_the_list_shows_what_there_is_to_measure(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list"]) == 0
    assert capsys.readouterr().out.startswith(
        "toy-scale: Toy\n  suites (cases on a GPU): quick (2); modes fwd, bwd\n"
    )
    assert main(["list", "toy_scale"]) == 0
    out = capsys.readouterr().out
    assert "providers: torch\n" in out
    assert "suite quick: 2 cases on a GPU, 2 on a CPU" in out
    assert "    n: 64 256\n" in out


def test_records_of_results_are_of_a_clean_commit(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["bench", "--device", "cpu", "--no-report", "--mode", "fwd", "--output", "results/here"]
    for found in ({"commit": "0" * 40, "dirty": True}, {}):
        monkeypatch.setattr(environment, "_checkout", lambda folder, found=found: found)
        assert main(words) == 2
        assert "takes records of a clean commit alone" in capsys.readouterr().err
    monkeypatch.setattr(environment, "_checkout", lambda folder: {"commit": "0" * 40, "dirty": False})
    assert main(words) == 0
    (run,) = {record.run for record in records.load([Path("results/here")])}
    (known,) = records.load_environments(Path("results/here")).values()
    assert known["runs"][run]["commit"] == "0" * 40
    assert "commit" not in {name for name in known if name != "runs"}


def test_a_check_compares_no_reference_with_itself(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(warploom.ops, "operators", lambda: {"toy": toy.OPERATOR})
    assert main(["check", "--device", "cpu", "--backend", "torch"]) == 1
    out, err = capsys.readouterr()
    assert "no kernel runs here" in out.splitlines()[0]
    assert "Not checked, backend torch is the definition itself: toy." in out
    assert "comparisons" not in out
    assert err == "warploom: nothing was checked\n"


@pytest.mark.parametrize("name", ["first", "sec_ond", "sec-ond"])
def test_a_check_on_a_cpu_is_of_a_few_cases_of_each_operator_and_says_so(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(check, "SAMPLE_SECONDS", 0)
    many = replace(toy.OPERATOR, check_cases=toy.OPERATOR.check_cases * 4)
    known = {each: replace(many, name=each, fused=each == "sec_ond") for each in ("first", "sec_ond")}
    monkeypatch.setattr(warploom.ops, "operators", lambda: known)
    assert main(["check", "--device", "cpu"]) == 0
    out = capsys.readouterr().out
    assert "2 of 16 cases of the kernels" in out
    assert "PyTorch's fused path: sec_ond." in out
    assert f"{2 * 2 + 8 * 2} comparisons with float64" in out, (
        "each operator's first case, and the fused path's all"
    )
    assert main(["check", name, "--device", "cpu"]) == 0
    assert "1 of 8 cases of the kernels" in capsys.readouterr().out
    assert main(["check", name, "--device", "cpu", "--backend", "triton"]) == 0
    assert "16 comparisons" in capsys.readouterr().out


def test_cases_that_are_checked_by_turns_are_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = {"one": 5, "two": 9, "none": 0}
    cases = toy.OPERATOR.check_cases[:1]
    known = {name: replace(toy.OPERATOR, check_cases=cases * count) for name, count in counts.items()}
    monkeypatch.setattr(warploom.ops, "operators", lambda: known)
    found = check._spread(list(counts))
    assert found[:4] == [("one", 0), ("two", 0), ("one", 2), ("two", 5)]
    assert sorted(found) == sorted(check._in_order(list(counts)))


def test_what_others_print_goes_to_a_log_that_is_named(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python, C and other processes; what is ours is still shown."""

    def noisy(case: Case) -> Callable[..., torch.Tensor]:
        print("a line of Python")
        print("a warning", file=sys.stderr)
        os.write(1, b"a line of C\n")
        subprocess.run([sys.executable, "-S", "-c", "import os; os.write(2, b'of another process\\n')"], check=True)
        logging.getLogger("warploom").warning("what you should know")
        return toy.reference

    register(monkeypatch, toy.make_bench(torch=noisy))
    with os.fdopen(1, "w", closefd=False) as stdout, os.fdopen(2, "w", 1, closefd=False) as stderr:
        monkeypatch.setattr(sys, "stdout", stdout)
        monkeypatch.setattr(sys, "stderr", stderr)
        assert main(["bench", "--device", "cpu", "--no-report", "--mode", "fwd", "--case", "n=64"]) == 0
    out, err = capfd.readouterr()
    log = Path("runs/cpu-quick/bench.log")
    assert out.splitlines()[-2:] == [f"log: {log}", "records: runs/cpu-quick/records.jsonl"]
    lines = err.splitlines()
    assert lines[0] == "what you should know"
    assert lines[1].startswith("[1/1] toy-scale fwd")
    assert len(lines) == 2
    for words in ("a line of Python", "a warning", "a line of C", "of another process"):
        assert words in log.read_text()
        assert words not in out


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"PATH": "", "CC": ""}, "no C compiler here, which Triton needs: install gcc"),
        ({"TRITON_CACHE_DIR": "/proc/nowhere"}, "name another folder in TRITON_CACHE_DIR"),
    ],
)
def test_what_kernels_need_of_a_machine_is_a_sentence(
    variables: dict[str, str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("triton")
    monkeypatch.setenv("CC", "cc")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    for module in (bench, check):
        monkeypatch.setattr(module, "the_device", lambda name: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "GPU")
    for command in ("bench", "check"):
        assert main([command]) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert err.startswith("warploom: ")
        assert len(err.splitlines()) == 1
        assert message in err


def test_one_refusal_is_one_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(x: torch.Tensor, weight: torch.Tensor, backend: str) -> torch.Tensor:
        raise warploom.BackendError("toy: not here")

    monkeypatch.setattr(warploom.ops, "operators", lambda: {"toy": replace(toy.OPERATOR, function=refuse)})
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert main(["check", "--device", "cpu"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert sum("not here" in line for line in lines) == 1
    assert any("(and 1 more): BackendError: toy: not here" in line for line in lines)
