"""What a newcomer types and reads: words that are nearly right, what there is, how long it takes, what came out."""

from __future__ import annotations

import argparse
import io
import json
import logging
import os
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import processes
import pytest
import torch
import toy

from warploom.bench import records, runner, sensors
from warploom.bench.progress import shorten, show_progress
from warploom.bench.records import Record
from warploom.bench.runner import Selection
from warploom.cli import NAMES, main, make_parser
from warploom.cli import bench as bench_command
from warploom.cli.common import select
from warploom.ops import benches, register
from warploom.testing.accuracy import compare

ROOT = Path(__file__).parents[1]
SPEC = shlex.quote(str(Path(__file__).with_name("toy_spec.py")))


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quick_measurements: None, own_registry: None) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")


def parse(words: list[str]) -> argparse.Namespace:
    return make_parser().parse_args(words)


def said(words: str, capsys: pytest.CaptureFixture[str], status: int = 0) -> str:
    try:
        found = main(shlex.split(words))
    except SystemExit as stop:
        found = int(stop.code or 0)
    out, err = capsys.readouterr()
    assert found == status, err
    return err if status else out


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        ("bnech", "bench"),
        ("help prfile", "profile"),
        ("bench lrpe-rotat", "lrpe-rotate"),
        ("bench lrpe_rotate_dm", "lrpe-rotate-md"),
        ("list flash-atention", "flash-attention"),
        ("check linear_attn", "linear_attention"),
        (f"bench --spec {SPEC} --provider trch", "torch"),
        (f"bench --spec {SPEC} --suite qick", "quick"),
        (f"bench --spec {SPEC} --mode fw", "fwd"),
        (f"bench --spec {SPEC} --dtype bfloat", "bfloat16"),
        (f"bench --spec {SPEC} --case dtyp=float32", "dtype"),
        (f"bench --spec {SPEC} --case dtype=flaot32", "float32"),
    ],
)
def test_a_word_that_is_nearly_right_is_guessed(words: str, meant: str, capsys: pytest.CaptureFixture[str]) -> None:
    err = said(words, capsys, 2)
    assert f"did you mean {meant!r}?" in err
    assert "there are: " in err
    assert len(err.splitlines()) == 1


def test_a_value_that_no_case_has_is_answered_with_those_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    err = said(f"bench --spec {SPEC} --device cpu --case n=1000000", capsys, 2)
    assert "no value of n '1000000'; there are: 64, 256" in err


def test_help_and_version_are_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert said("version", capsys) == said("--version", capsys)
    assert said("help", capsys) == said("--help", capsys)
    for name in NAMES:
        assert said(f"help {name}", capsys) == said(f"{name} --help", capsys)


def test_a_shells_completions_come_from_the_parser() -> None:
    shtab = pytest.importorskip("shtab")
    for shell in ("bash", "zsh"):
        assert "profile" in shtab.complete(make_parser(), shell)


@pytest.mark.sample(4)
@pytest.mark.parametrize("words", ["list", "list lrpe-rotate", "--help", "help bench"])
def test_a_reader_that_has_seen_enough_is_no_error(words: str) -> None:
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as gone:
        command = [sys.executable, "-m", "warploom", *words.split()]
        variables = processes.environment(PYTHONUNBUFFERED="")
        done = subprocess.run(command, stdout=gone, stderr=subprocess.PIPE, text=True, env=variables)
    assert (done.returncode, done.stderr) == (141, "")


# What there is


def test_values_are_shown_as_case_takes_them(capsys: pytest.CaptureFixture[str]) -> None:
    """Lists and null included: pasted behind --case they select the cases that have them."""
    windows = ((1023, None), None, "none", "1", 1, 0.5, False)
    cases = [{"dtype": "float32", "window": window, "n": n} for window in windows for n in (64, 256)]
    register(benches=[replace(toy.make_bench(), name="toy-window", suites={"quick": lambda device: cases})])
    (line,) = [line for line in said("list toy-window", capsys).splitlines() if line.startswith("    window: ")]
    assert line == "    window: '[1023,null]' null none '\"1\"' 1 0.5 false"
    for window, text in zip(windows, shlex.split(line)[1:], strict=True):
        _, selection = select(parse(["bench", "toy-window", "--case", f"window={text}"]), None)
        units = runner.plan([benches()["toy-window"]], selection, "cpu")
        assert {repr(unit.case["window"]) for unit in units} == {repr(window)}


def test_a_folder_of_specs_is_all_of_its_files(capsys: pytest.CaptureFixture[str]) -> None:
    every = json.loads(said(f"list --json --spec {shlex.quote(str(ROOT / 'benchmarks'))}", capsys))["benches"]
    assert set(every) == {"transformer", "llama", "context-parallel"}
    assert benches()["transformer"].command.endswith("benchmarks/transformer.py transformer")


def test_texts_that_look_like_json_stay_texts() -> None:
    assert [records.as_option(v) for v in ("silu", "1", 1, None, (1023, None), True, 0.5)] == [
        "silu", '"1"', "1", "null", "[1023,null]", "true", "0.5"
    ]  # fmt: skip


def test_the_list_as_json_has_every_case(capsys: pytest.CaptureFixture[str]) -> None:
    every = json.loads(said("list --json", capsys))
    assert set(every["benches"]) == set(benches())
    assert "lrpe_rotate" in every["operators"]
    one = json.loads(said(f"list --json --spec {SPEC}", capsys))["benches"]
    assert one["toy-scale"]["suites"]["quick"]["cpu"] == [
        {"dtype": "float32", "shape": [4, 4], "n": n} for n in (64, 256)
    ]  # fmt: skip
    assert one["toy-scale"]["axis"] == "n"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            "bench lrpe-rotate --provder torch",
            "bench: no option '--provder'; did you mean '--provider'? there are: ",
        ),
        ("report runs --outptu=x", "report: no option '--outptu'; did you mean '--output'? there are: "),
        ("version now", "version: one argument too many: 'now'"),
    ],
)
def test_an_option_that_is_misspelled_has_a_suggestion(
    words: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words.split()) == 2
    assert capsys.readouterr().err.startswith(f"warploom: {said}")


# Before and while it is measured


def test_a_run_says_how_many_cases_it_has_and_how_long_that_is(capsys: pytest.CaptureFixture[str]) -> None:
    out = said(f"bench --spec {SPEC} --device cpu --no-report --mode fwd", capsys)
    assert "2 cases (each mode counts as one): about " in out
    units = runner.plan([toy.make_bench()], Selection(), "cpu") * 100
    assert bench_command._how_long(units, "cuda").endswith(" min")


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("load", "gpu", "words"),
    [
        (0.0, ["0", "500", "80000"], ""),
        (900.0, ["0", "500", "80000"], "a load of 900.0 on"),
        (0.0, ["87", "500", "80000"], "the GPU at 87 %"),
        (0.0, ["0", "40960", "80000"], "40.0 GiB of its memory taken"),
        (0.0, [""], ""),  # no nvidia-smi
        (0.0, ["[N/A]", "[N/A]", "[N/A]"], ""),
    ],
)
def test_a_busy_machine_is_said_in_a_line(
    load: float, gpu: list[str], words: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "getloadavg", lambda: (load, 0.0, 0.0))
    monkeypatch.setattr(sensors, "read_cpu_times", lambda: None)
    monkeypatch.setattr(sensors, "nvidia_smi", lambda uuid, fields: gpu)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: toy)
    monkeypatch.setattr(toy, "uuid", "x", raising=False)
    found = sensors.others_here(torch.device("cuda"))
    assert found.startswith(words)
    assert bool(found) == bool(words)
    assert main(shlex.split(f"bench --spec {SPEC} --device cpu --no-report --mode fwd")) == 0
    lines = [line for line in capsys.readouterr().err.splitlines() if "this machine is busy" in line]
    assert len(lines) == (load > 0)


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


RECORD = Record("toy_scale", "quick", {"n": 256}, "warploom", "fwd", "", "e", ms=1.25, ms_p20=1.2, ms_p80=1.3)


def test_a_terminal_shows_bar_count_time_left_and_the_cases_that_are_finished(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TERM", "dumb")  # no colours, and no cursor that moves
    stream = Terminal()
    label = "toy-scale fwd " + " ".join(f"parameter{i}=value" for i in range(9)) + " n={}"
    others = [replace(RECORD, provider=name) for name in ("torch_compile_cache", "torch_compile", "sdpa_efficient")]
    with show_progress(4, stream) as progress:
        for n in range(3):
            progress.begin(label.format(n))
            progress.bar.refresh()
            progress.end(label.format(n), [RECORD, *others])
        bar = progress.bar.get_renderable()
        progress.bar.console.print(bar)
    lines = [line.rstrip() for line in stream.getvalue().splitlines()]
    finished = [line for line in lines if line.startswith("[")]
    assert [line[:5] for line in finished] == ["[1/4]", "[2/4]", "[3/4]"]
    for n, line in enumerate(finished):
        assert line.startswith(f"[{n + 1}/4] toy-scale fwd")
        assert f"n={n}: warploom 1.25 ms" in line
    (shown,) = [line for line in lines if "3/4" in line and not line.startswith("[")]
    assert "━" in shown
    assert ":" in shown  # time left
    assert shown.endswith("n=2")
    assert max(map(len, lines)) <= 80


def test_names_are_cut_in_their_middle() -> None:
    assert shorten("abc", 3) == "abc"
    assert [shorten("abcdefghij", most) for most in (9, 6)] == ["abcd…ghij", "ab…hij"]


# What came out


def test_an_inaccurate_result_is_said_in_words_that_need_no_page() -> None:
    exact = torch.ones(8, 8, dtype=torch.float64)
    found = compare(exact.float() * 1.5, exact, exact.float())
    words = found.describe()
    assert words.startswith("wrong in output 0 at (0, 0): largest error 5.00e-01, ")
    assert "times the 5.96e-08 allowed" in words
    assert words.endswith("(allowed: twice the error of the definition in this dtype, plus rounding)")
    right = compare(exact.float(), exact, exact.float()).describe()
    assert right.startswith("right: largest error 0.00e+00 of 5.96e-08 allowed")


def test_float64_is_refused_with_the_reason(capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("float64", "fp64"):
        err = said(f"bench --spec {SPEC} --device cpu --dtype {name}", capsys, 2)
        assert "no dtype 'float64': float64 is what results are compared with" in err
        assert "there are: bfloat16, float16, float32" in err


def made(folder: str, times: dict[int, float], **more: object) -> None:
    parameters = {"batch": 12, "heads": 12, "head_dim": 128, "dtype": "bfloat16", "window": (1023, None)}
    both = [replace(RECORD, case={**parameters, "layout": "a long word", "n": n}) for n in times]
    many = [replace(r, ms=times[n], ms_p20=0.99 * times[n], ms_p80=1.01 * times[n]) for n, r in zip(times, both)]
    records.append(Path(folder), [replace(record, case={**record.case, "m": record.case["n"]}) for record in many])


def test_two_runs_are_compared_on_one_screen(capsys: pytest.CaptureFixture[str]) -> None:
    made("a", dict.fromkeys(range(40), 1.0))
    made("b", {n: 1 + 0.04 * (n - 20) for n in range(40)} | {11: 0.1})
    out = said("compare a b", capsys)
    lines = out.splitlines()
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 80
    assert "B is, in 40 cases: 20 faster, 19 slower, 1 same" in lines
    slowest = out.split("slowest")[-1].partition("fastest")[0]
    assert [n for n in range(40) if f" n={n} " in slowest] == [35, 36, 37, 38, 39]
    assert " n=11 " in out.split("fastest")[-1]
    assert "--all shows every case" in out
    whole = said("compare a b --all", capsys)
    assert all(f" n={n} " in whole for n in range(40))
    assert max(map(len, whole.splitlines())) <= 80
    assert sum("A ms" in line for line in whole.splitlines()) == 1


def test_values_in_a_comparison_are_those_that_case_takes(capsys: pytest.CaptureFixture[str]) -> None:
    case = {"n": 1, "window": [1023, None]}
    records.append(Path("a"), [replace(RECORD, case=case), replace(RECORD, case={**case, "window": None})])
    out = said("compare a a", capsys)
    assert "window=[1023,null]" in out
    assert "window=null" in out


def test_a_file_that_holds_no_records_is_named_as_such(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    Path("notes.md").write_text("# Notes\n")
    for command in ("report", "compare notes.md"):
        err = said(f"{command} notes.md", capsys, 2)
        assert err.startswith("warploom: notes.md: no file of records, or of another version: line 1: ")
    made("a", {1: 1.0})
    with (Path("a") / records.RECORDS).open("a") as file:
        file.write('{"later": 1}\n')
    with caplog.at_level(logging.WARNING):
        assert len(records.load([Path("a")])) == 1
    assert "1 of 2 lines are left out" in caplog.text
