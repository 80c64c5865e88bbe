"""The command line on bad arguments, files and disks: one line on standard error and status 2, and nothing lost."""

from __future__ import annotations

import functools
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import processes
import pytest
from full_disk import room_for

from warploom.bench import records, runner, storage
from warploom.bench.records import Record
from warploom.cli import main
from warploom.report.panels import load_sections

SPEC = Path(__file__).with_name("toy_spec.py")
MODEL = shlex.quote(str(Path(__file__).parents[1] / "benchmarks" / "transformer.py"))
BENCH = f"bench --device cpu --no-report --spec {shlex.quote(str(SPEC))}"
PROFILE = f"profile --device cpu --spec {shlex.quote(str(SPEC))} --mode fwd --case n=64"
RECORD = Record(
    operator="toy_scale",
    suite="quick",
    case={"dtype": "bfloat16", "n": 256},
    provider="warploom",
    mode="fwd",
    fingerprint="d",
    environment="e",
    ms=1.0,
    ms_p20=0.9,
    ms_p80=1.1,
)
TOY = "import toy\nfrom dataclasses import replace\n"

SUITE = f"{TOY}BENCHES = [replace(toy.make_bench(), name='b', suites=dict(quick=lambda device: {{}}))]\n"
FILES: dict[str, str | bytes] = {
    "text": "hello\n",
    "empty": "",
    "binary": bytes(range(256)) * 4 + b"\n",
    "shapes": '[1]\n"x"\n3\nnull\n{"a": 1}\n',
    "types": json.dumps({**asdict(RECORD), "ms": "fast"}) + "\n",
    "numbers": json.dumps({**asdict(RECORD), "ms": float("nan")}) + "\n",
    "deep": "[" * 100_000 + "\n",
    "huge": '{"' + "x" * 10**6 + '": 1}\n',
    "torn": '{"operator": "to',
    "binary.py": bytes(range(256)),
    "syntax.py": "OPERATORS = (\n",
    "imports.py": "import json\nimport no_such_module\n",
    "raises.py": "\n\n1 / 0\n",
    "exits.py": "import sys\nsys.exit(0)\n",
    "number.py": "OPERATORS = 3\n",
    "nothing.py": "x = 1\n",
    "suite.py": SUITE.format("1 / 0"),
    "case.py": SUITE.format("[{'n': device.join}]"),
}


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quick_measurements: None, own_registry: None) -> None:
    monkeypatch.chdir(tmp_path)
    for name, content in FILES.items():
        Path(name).write_bytes(content.encode() if isinstance(content, str) else content)
    Path("folder").mkdir()
    Path("loop").symlink_to("loop")
    records.append(Path("run"), [RECORD])
    for folder, text in (("broken", "{"), ("list", "[]"), ("values", '{"e": 1}'), ("bytes", "\udcff")):
        records.append(Path(folder), [RECORD])
        (Path(folder) / "environment.json").write_text(text, errors="surrogateescape")
    (Path("folders") / records.RECORDS).mkdir(parents=True)
    (Path("old") / records.RECORDS).parent.mkdir()
    (Path("old") / records.RECORDS).write_text(str(FILES["shapes"]))


def status_of(words: str) -> int:
    try:
        return main(shlex.split(words))
    except SystemExit as stop:
        return int(stop.code or 0)


READ = {
    "missing": "missing: no records here",
    "folder": "folder: no records here",
    "loop": "loop: no records here",
    "text": "text: no file of records, or of another version: line 1: Expecting value",
    "binary": "binary: no file of records, or of another version: line 1: ",
    "shapes": "shapes: no file of records, or of another version: line 1: not a JSON object",
    "types": "types: no file of records, or of another version: line 1: ms is 'fast'",
    "numbers": "numbers: no file of records, or of another version: line 1: not a finite number: NaN",
    "deep": "deep: no file of records, or of another version: line 1: ",
    "huge": "huge: no file of records, or of another version: line 1: unknown field 'xxx",
    "old": "records.jsonl: no file of records, or of another version: line 1: ",
    "broken": "environment.json: not JSON",
    "list": "environment.json: expected an object",
    "values": "environment.json: expected an object",
    "bytes": "environment.json: not a text",
    "/proc/self/mem": "/proc/self/mem: cannot be read: Input/output error",
    "x" * 300: "File name too long",
    "\x1b[31m": "\\x1b[31m: no records here",
}
WRITTEN = {
    "text": "text: cannot be written: a file has this name",
    "text/below": "text/below: cannot be written: Not a directory",
    "/proc/nowhere": "/proc/nowhere: cannot be written: No such file or directory",
    "loop": "loop: cannot be written",
    "x" * 300: "File name too long",
}
SPECS = {
    "missing.py": "no such file",
    "folder": "no such file",
    "loop": "no such file",
    "text": "ImportError: not a Python file",
    "binary.py": "binary.py: ",
    "syntax.py": "SyntaxError: '(' was never closed (syntax.py, line 1)",
    "imports.py": "ModuleNotFoundError: No module named 'no_such_module' (line 2)",
    "raises.py": "ZeroDivisionError: division by zero (line 3)",
    "exits.py": "SystemExit: 0 (line 2)",
    "number.py": "OPERATORS must hold Operator",
    "nothing.py": "defines neither OPERATORS nor BENCHES",
}
MISTAKES = [
    *((f"report {shlex.quote(path)}", message) for path, message in READ.items()),
    *((f"compare run:warploom {shlex.quote(path)}", message) for path, message in READ.items()),
    ("compare text run", "text: no file of records"),
    ("compare missing:warploom run", "missing: no records here"),
    ("compare empty run", "empty has no records of its own; there are: none"),
    ("compare torn run", "there are: none"),
    ("compare run run --providers warploom torch", "give either A and B"),
    *((f"{BENCH} --output {path}", message) for path, message in WRITTEN.items()),
    *((f"{PROFILE} --output {path}", message) for path, message in WRITTEN.items()),
    (f"{BENCH} --output folders", "records.jsonl: cannot be written: Is a directory"),
    *((f"{BENCH} --output {name}", "environment.json: ") for name in ("broken", "list", "values", "bytes")),
    (f"{BENCH} --output old --resume", "records.jsonl: no file of records"),
    ("report run -o folder", "folder: cannot be written: Is a directory"),
    ("report run -o text/below.html", "cannot be written: a file has this name"),
    ("report run -o /proc/nowhere/report.html", "cannot be written: No such file"),
    (f"profile --spec {MODEL} --device cpu --suite trial", "profile: takes one case in one mode, and 3 fit"),
    (f"{PROFILE} --kind memory", "profile: only a GPU's allocations are recorded"),
    (f"{PROFILE} --kind once", "profile: the marks of a profiled region are CUDA's"),
    *((f"check --spec {path}", message) for path, message in SPECS.items()),
    *((f"{command} --spec raises.py", "ZeroDivision") for command in ("bench", "report run", "compare run run")),
    ("bench --device cpu --spec suite.py", "suite quick of b: ZeroDivisionError: division by zero"),
    ("bench --device cpu --spec case.py", "suite quick of b: TypeError: Object of type"),
    (f"{BENCH} --case n={'[' * 100_000}", "no value of n '[[["),
    (f"{BENCH} '\x1b[31m'", "no bench"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("words", "message"), MISTAKES, ids=[words.replace(BENCH, "bench")[:60] for words, _ in MISTAKES]
)
def test_what_cannot_be_used_is_one_line_and_status_2(
    words: str, message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure(*arguments: object, **options: object) -> None:
        raise AssertionError("measured before its output was known to be writable")

    monkeypatch.setattr(runner, "evaluate", measure)
    monkeypatch.setattr("benchmarks.transformer.prepare", measure)
    if "/proc/" in words and not Path("/proc/self/mem").exists():
        pytest.skip("this system has no /proc")
    assert status_of(words) == 2
    out, err = capsys.readouterr()
    assert len(out.splitlines()) <= 3  # the device, what a CPU is for, and how long it will take
    assert err.startswith("warploom: ")
    assert len(err.splitlines()) == 1
    assert message in err
    assert len(err) < 1000
    assert "\x1b" not in err


@pytest.mark.parametrize(
    "words",
    [
        "",
        "frobnicate",
        "env extra",
        "env --device tpu",
        "report",
        "compare",
        "compare run run --fail-above nan",
        "bench --time-limit nan",
        "bench --time-limit -1",
        "bench --time-limit soon",
        "bench --mode ,",
        "bench --dtype ''",
        "profile --kind everything",
        "profile --mode ,",
        "list --device cpu",
    ],
)
def test_arguments_that_mean_nothing_are_status_2(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert status_of(words) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "Traceback" not in err
    assert "_" not in err.splitlines()[-1]  # the name of no function of ours


def test_the_statuses_and_that_a_spec_is_run_are_in_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert status_of("--help") == 0
    assert "2    the command is wrong, or what it needs cannot be used" in capsys.readouterr().out
    for command in ("bench", "check", "report", "compare"):
        assert status_of(f"{command} --help") == 0
        assert "which is run as a program" in " ".join(capsys.readouterr().out.split())


def test_a_fault_of_our_own_is_not_status_1(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object) -> None:
        raise RuntimeError("a fault")

    monkeypatch.setattr("warploom.bench.environment.describe_environment", fail)
    assert status_of("env --device cpu") == 3
    assert "RuntimeError: a fault" in capsys.readouterr().err


def test_names_that_no_terminal_and_no_page_expects(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("jinja2")
    names = ("<script>alert(1)</script>", "</script>", "[bold]", "a\nb", "../../up", "\x1b[31m", "%s{0}", "ключ")
    odd = [replace(RECORD, provider=name, operator=name, case={name: name, "n": name}) for name in names]
    records.append(Path("odd"), [*odd, *(replace(RECORD, provider=name) for name in names)])
    folder = os.fsdecode(b"\xff<b>")
    assert main(["report", "odd", "-o", f"{folder}/report.html"]) == 0
    page = (Path(folder) / "report.html").read_text()
    assert "<script>alert" not in page
    assert page.count("</script>") == page.count("<script")
    assert main(["compare", "odd", "--providers", "<script>alert(1)</script>", "a\nb"]) == 0
    assert not (tmp_path.parent / "up").exists()


# Records of other versions


def test_records_that_lack_a_parameter_of_today_are_shown_as_stale(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("jinja2")
    pytest.importorskip("triton")
    monkeypatch.setattr(
        "warploom.runtime.launch.INTERPRETED", False
    )  # so that the launches of every case are planned
    case = {"dtype": "bfloat16", "batch": 2, "heads": 2, "head_dim": 64, "n": 256, "activation": "none"}
    cases = [case, *({key: case[key] for key in case if key != name} for name in case), {}]
    older = replace(RECORD, operator="lrpe_rotate", fingerprint="sm_90/132/0")
    old = [replace(older, case=one, mode=mode) for one in cases for mode in ("fwd", "bwd")]
    records.append(Path("older"), old)
    assert main(["report", "older"]) == 0
    (section,) = load_sections([Path("older")])
    assert [point.state for point in section.points] == ["stale"] * len(old)
    assert main(["compare", "older", "older"]) == 0
    assert f"{len(old)} of {len(old)} records from other code" in " ".join(capsys.readouterr().out.split())


def test_records_of_other_shapes_are_left_out_and_counted(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("jinja2")
    fields = asdict(RECORD)
    others = [{**fields, **change} for change in ({"new": 1}, {"case": 3}, {"ms": -1.0})]
    others.append({name: fields[name] for name in fields if name != "mode"})
    with (Path("run") / records.RECORDS).open("a") as file:
        file.writelines(json.dumps(other) + "\n" for other in others)
    assert len(records.load([Path("run")])) == 1
    assert main(["compare", "run", "run"]) == 0
    assert main(["report", "run"]) == 0
    said = "run/records.jsonl:line 2: unknown field 'new'"
    assert set(caplog.messages) == {f"4 of 5 lines are left out, as of another version: {said}"}


def test_an_interval_without_percentiles_is_everything(capsys: pytest.CaptureFixture[str]) -> None:
    records.append(Path("bare"), [replace(RECORD, ms_p20=None, ms_p80=None)])
    assert main(["compare", "bare", "bare", "--json"]) == 0
    (mean, _) = json.loads(capsys.readouterr().out)["means"]
    assert (mean["ratio"], mean["low"], mean["high"]) == (1.0, 0.0, None)
    assert main(["compare", "bare", "bare"]) == 0


# Disks and signals


def test_a_full_disk_is_known_before_anything_is_measured(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "evaluate", lambda *_: pytest.fail("measured"))
    with room_for(storage.PROBE_BYTES // 2):
        assert main([*shlex.split(BENCH), "--output", "here"]) == 2
    assert "warploom: here: cannot be written: File too large" in capsys.readouterr().err
    assert not list(Path("here").iterdir())


def test_a_disk_that_fills_during_a_run_keeps_what_was_written(capsys: pytest.CaptureFixture[str]) -> None:
    whole = [replace(RECORD, provider=f"p{number}") for number in range(100)]
    records.append(Path("here"), whole)
    file = Path("here") / records.RECORDS
    with room_for(file.stat().st_size + 700):  # a part of the first case
        assert main([*shlex.split(BENCH), "--output", "here", "--mode", "fwd"]) == 2
    err = capsys.readouterr().err
    assert "records.jsonl: cannot be written: File too large; what was measured before is kept, and --resume" in err
    assert "Traceback" not in err
    assert records.load([Path("here")])[:100] == whole
    assert main([*shlex.split(BENCH), "--output", "here", "--mode", "fwd", "--resume"]) == 0
    assert len(records.load([Path("here")])) == 100 + 4


def test_standard_output_on_a_full_disk(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("this system has no /dev/full")
    with Path("/dev/full").open("w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert main(["env", "--device", "cpu"]) == 2
        assert capsys.readouterr().err == "warploom: No space left on device\n"


SLOW = """
import time
from pathlib import Path
import toy
from warploom.bench.sensors import WatchedClock

WatchedClock.disturbance = lambda self: None  # what other programs disturb is measured again


def slow(case):
    while case["n"] == 256 and not Path("go").exists():
        Path("reached").touch()
        time.sleep(0.05)
    return toy.reference


BENCHES = (toy.make_bench(torch=slow),)
"""


@pytest.mark.seldom(4, 9)
def test_a_run_that_is_killed_torn_and_interrupted_goes_on_where_it_was() -> None:
    Path("slow.py").write_text(SLOW)
    words = shlex.split("bench --device cpu --spec slow.py --no-report --mode fwd --output here --resume")
    environment = processes.environment(Path(__file__).parent, OMP_NUM_THREADS="1")
    command = [sys.executable, "-m", "warploom", *words]

    def stopped_by(number: signal.Signals) -> tuple[int, str]:
        """Start the run, wait until it is in its second case, and send it a signal."""
        Path("reached").unlink(missing_ok=True)
        # A shell's background jobs ignore Ctrl-C, and so do their children, unless they are told otherwise.
        heed = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
        process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True, preexec_fn=heed)
        wait_until(lambda: Path("reached").exists() or process.poll() is not None)
        process.send_signal(number)
        _, err = process.communicate(timeout=60)
        return process.returncode, err

    assert stopped_by(signal.SIGKILL)[0] == -signal.SIGKILL
    first = records.load([Path("here")])
    assert [(record.case["n"], record.provider) for record in first] == [(64, "torch"), (64, "limit")]
    with (Path("here") / records.RECORDS).open("a") as file:
        file.write('{"operator": "toy_sc')
    code, err = stopped_by(signal.SIGINT)
    said = "warploom: interrupted; `bench --resume` goes on after the last finished case"
    assert (code, err.splitlines()[-1]) == (130, said)
    Path("go").touch()
    subprocess.run(command, env=environment, check=True, capture_output=True)
    assert records.load([Path("here")])[:2] == first
    assert len(records.load([Path("here")])) == 4


def wait_until(true: Callable[[], bool], seconds: float = 120.0) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.05)
