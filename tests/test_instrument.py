"""The instrument in other people's hands: the API, spec files, dtypes, graphs, disturbances, profiles."""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import toy

import warploom.ops
from warploom.bench import Traffic, compare, measure, records, run_bench, runner, sensors, time_functions, traces
from warploom.bench.evaluate import Unit
from warploom.bench.fingerprint import fingerprint, source_of
from warploom.bench.runner import Selection
from warploom.bench.sensors import Reader, Reading, WatchedClock, read_cpu_times
from warploom.cli import main
from warploom.errors import ArgumentError, DtypeError
from warploom.report import write_report
from warploom.report.panels import Point, load_sections
from warploom.report.tables import make_tables
from warploom.testing.specs import load_specs

CPU = torch.device("cpu")
TOY = "import toy\nfrom dataclasses import replace\n"
SPEC = str(Path(__file__).with_name("toy_spec.py"))


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, quick_measurements: None, own_registry: None) -> None:
    monkeypatch.chdir(tmp_path)


# The API


def scaled(x: torch.Tensor, factor: float) -> torch.Tensor:
    return x * factor


def scaled_inputs(n: int) -> dict[str, object]:
    return {"x": torch.randn(n, 8, requires_grad=True), "factor": 1.5}


def test_functions_are_checked_and_timed_as_operators_are(tmp_path: Path) -> None:
    functions = {"mine": scaled, "wrong": lambda x, factor: x * (factor + 0.1), "slow": lambda x, factor: 1 / 0}
    results = time_functions(
        functions, scaled_inputs, [{"n": 16}, {"n": 64}], reference=scaled, modes=("fwd", "bwd"), device="cpu"
    )
    found = {r.provider: r.status for r in results.records if r.case == {"n": 64} and r.mode == "bwd"}
    assert found == {"mine": "ok", "wrong": "incorrect", "slow": "error", "limit": "ok"}
    assert results.ok
    assert "functions  fwd  ms" in str(results)
    assert re.search(r"n +mine +slow +wrong +limit", str(results))
    assert not any(record.is_stale for record in results.records)
    assert {r.min_bytes for r in results.records if r.case == {"n": 64} and r.mode == "fwd"} == {2 * 64 * 8 * 4}
    assert {r.min_bytes for r in results.records if r.case == {"n": 64} and r.mode == "bwd"} == {3 * 64 * 8 * 4}
    pytest.importorskip("jinja2")
    page = results.report(tmp_path / "report.html").read_text(encoding="utf-8")
    assert "<td>functions" not in page
    assert page.count('class="badge stale"') == 1  # where badges are explained


def test_the_first_function_stands_for_the_operator() -> None:
    results = time_functions(
        {"mine": lambda x, factor: x, "torch": scaled}, scaled_inputs, [{"n": 16}], reference=scaled, device="cpu"
    )
    assert not results.ok
    with pytest.raises(ArgumentError, match="must each hold one"):
        time_functions({}, scaled_inputs, [{"n": 16}], reference=scaled)


@pytest.mark.parametrize(
    ("changes", "error", "match"),
    [
        ({"modes": ("forward",)}, ArgumentError, "no mode 'forward'; did you mean 'fwd'?"),
        ({"modes": ()}, ArgumentError, "modes must each hold one"),
        ({"functions": [scaled]}, DtypeError, "functions must be a dict of functions by name; got list"),
        ({"functions": {"mine": 3}}, DtypeError, "mine must be a function; got int: 3"),
        ({"cases": {"n": 16}}, DtypeError, "cases must be a list of dicts of parameters by name; got dict"),
        ({"cases": [(16,)]}, DtypeError, "cases must be a list of dicts of parameters by name; got tuple"),
        ({"cases": "n=16"}, DtypeError, "cases must be a list"),
        ({"make_inputs": lambda n: (torch.randn(n, 8), 1.5)}, DtypeError, "that returns a dict; got tuple"),
        ({"reference": "scaled"}, DtypeError, "reference must be a function; got str"),
        ({"reference": lambda y, factor: y}, ArgumentError, "what make_inputs returns, by name: x, factor"),
        ({"traffic": 3}, DtypeError, "traffic must be a function or None"),
        ({"name": 3}, DtypeError, "name must be a text"),
        ({"device": "gpu"}, ArgumentError, "device must be auto, cpu, cuda or cuda:N; got 'gpu'"),
    ],
)
def test_wrong_arguments_have_typed_errors(changes: dict[str, Any], error: type[Exception], match: str) -> None:
    arguments = {"functions": {"mine": scaled}, "make_inputs": scaled_inputs, "cases": [{"n": 16}]}
    with pytest.raises(error, match=re.escape(match)):
        time_functions(**{**arguments, "reference": scaled, "device": "cpu", **changes})


def test_one_mode_cases_of_a_generator_and_paths_as_texts_are_taken(tmp_path: Path) -> None:
    folder = str(tmp_path / "run")
    results = time_functions(
        {"mine": scaled, "wrong": lambda x, factor: x},
        scaled_inputs,
        ({"n": n} for n in (16, 64)),
        reference=scaled,
        modes="fwd_bwd",
        device="cpu",
        output=folder,
    )
    assert repr(results) == "<Results of functions on cpu: 2 ok, 2 incorrect>"
    shown = results._repr_html_()
    assert "functions, fwd_bwd, all cases: ms" in shown
    assert shown.count("<table") == 1
    assert shown.count("data-x=") == 2
    assert "</svg> mine</span>" in shown
    assert 'class="badge incorrect peer"' in shown
    assert {r.min_bytes for r in results.records if r.case == {"n": 16}} == {(1 + 1 + 2 + 1) * 16 * 8 * 4}
    assert records.load(folder) == records.load([folder]) == records.load(Path(folder))
    assert repr(compare(folder, f"{folder}:mine")) == f"<Comparison of {folder} and {folder}: 2 cases>"
    pytest.importorskip("jinja2")
    assert write_report(folder, str(tmp_path / "report.html")) == tmp_path / "report.html"


def test_inputs_are_the_same_in_every_run() -> None:
    drawn: list[torch.Tensor] = []

    def seen(x: torch.Tensor, factor: float) -> torch.Tensor:
        drawn.append(x.detach().clone())
        return scaled(x, factor)

    for _ in range(2):
        time_functions({"mine": seen}, scaled_inputs, [{"n": 16}], reference=scaled, device="cpu")
    assert all(torch.equal(drawn[0], other) for other in drawn)


def test_a_reference_that_needs_values_needs_its_traffic_said() -> None:
    def positive(x: torch.Tensor, factor: float) -> torch.Tensor:
        return x[x > 0] * factor

    arguments = ({"mine": positive}, scaled_inputs, [{"n": 16}])
    with pytest.raises(ArgumentError, match="give traffic"):
        time_functions(*arguments, reference=positive, device="cpu")
    results = time_functions(
        *arguments, reference=positive, device="cpu", traffic=lambda case, mode: Traffic(1, 1, 64)
    )
    assert results.ok


@pytest.mark.parametrize(
    ("read", "written", "mix"),
    [
        (8, 8, (1, 1)),
        (8, 16, (1, 2)),
        (1000, 1, (4, 1)),
        (0, 8, (0, 1)),
        (8, 0, (1, 0)),
        (9, 6, (3, 2)),
        (0, 0, (0, 1)),
    ],
)
def test_traffic_of_bytes_keeps_the_bytes_and_comes_close_to_the_mix(
    read: int, written: int, mix: tuple[int, int]
) -> None:
    traffic = Traffic.of_bytes(read, written, flops=3)
    assert (traffic.reads, traffic.writes) == mix
    assert read + written <= traffic.min_bytes < read + written + sum(mix)
    assert traffic.flops == 3


def test_a_bench_of_ones_own_runs_and_is_known_afterwards(tmp_path: Path) -> None:
    bench = toy.make_bench()
    results = run_bench(bench, modes=["fwd"], case={"n": [64]}, device="cpu", output=tmp_path / "run")
    assert {(r.provider, r.case["n"]) for r in results.records} == {("torch", 64), ("limit", 64)}
    assert not any(record.is_stale for record in results.records)
    assert warploom.ops.benches()["toy-scale"] is bench
    with pytest.raises(ArgumentError, match="lrpe-rotate is a bench of warploom's own"):
        run_bench(replace(bench, name="lrpe-rotate"), device="cpu")


# Spec files


interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="beside a GPU no kernel runs on the CPU")


@interpreted
def test_a_spec_file_is_benched_checked_and_reported(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["bench", "--spec", SPEC, "--device", "cpu", "--no-report", "--output", "here"]) == 0
    assert "toy_scale  fwd  fp32  ms" in capsys.readouterr().out
    assert main(["check", "--spec", SPEC, "--device", "cpu"]) == 0
    out = capsys.readouterr().out
    assert "toy" in out
    assert "lrpe" not in out
    assert "4 comparisons with float64 in" in out
    assert main(["compare", "here", "here", "--spec", SPEC]) == 0
    assert "other code" not in capsys.readouterr().out
    pytest.importorskip("jinja2")
    assert main(["report", "here", "--spec", SPEC]) == 0
    page = (tmp_path / "here" / "report.html").read_text().split("<main>")[1]
    assert 'class="badge ok"' in page
    spec = os.path.relpath(SPEC)
    assert f"warploom bench --spec {spec} toy-scale --suite quick --mode fwd" in page


def test_the_fingerprint_of_a_provider_of_ones_own_is_of_its_source(tmp_path: Path) -> None:
    (tmp_path / "odd_spec.py").write_text(
        "import toy\nfrom dataclasses import replace\nFACTOR = 2\n"
        "def double(x):\n    return FACTOR * x\n"
        "def mine(case):\n    return double\n"
        "OPERATORS = ()\nBENCHES = (replace(toy.make_bench(mine=mine), name='odd'),)\n"
    )
    (spec,) = load_specs([tmp_path / "odd_spec.py"])
    before = fingerprint(spec.benches[0], {}, "mine", "fwd", "")
    assert before == fingerprint(spec.benches[0], {}, "mine", "bwd", "sm_90/132") != ""
    sys.modules["warploom_spec_odd_spec"].FACTOR = 3
    source_of.cache_clear()
    assert fingerprint(spec.benches[0], {}, "mine", "fwd", "") != before


def test_a_spec_in_a_package_may_import_its_neighbours_relatively(tmp_path: Path) -> None:
    folder = tmp_path / "odd_package"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "names.py").write_text("NAME = 'odd-package'\n")
    (folder / "spec.py").write_text(
        "import toy\nfrom dataclasses import replace\nfrom .names import NAME\n"
        "BENCHES = (replace(toy.make_bench(), name=NAME),)\n"
    )
    load_specs([folder / "spec.py"])
    assert "odd-package" in warploom.ops.benches()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "no such file"),
        ("x = 1\n", "defines neither OPERATORS nor BENCHES"),
        ("BENCHES = (1,)\n", "OPERATORS must hold Operator"),
        (f"{TOY}BENCHES = (replace(toy.make_bench(), name='lrpe-rotate'),)\n", "a bench of warploom's own"),
        (f"{TOY}OPERATORS = (replace(toy.OPERATOR, name='lrpe_rotate'),)\n", "an operator of warploom's own"),
    ],
)
def test_a_spec_that_describes_nothing_says_so(
    text: str | None, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if text is not None:
        (tmp_path / "bad_spec.py").write_text(text)
    assert main(["bench", "--spec", "bad_spec.py", "--device", "cpu"]) == 2
    assert message in capsys.readouterr().err


def test_a_spec_without_what_the_command_is_about_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "half_spec.py").write_text(f"{TOY}BENCHES = (replace(toy.make_bench(), name='half'),)\n")
    assert main(["check", "--spec", "half_spec.py", "--device", "cpu"]) == 2
    assert "defines no OPERATORS" in capsys.readouterr().err


@pytest.mark.seldom(6, 12)
@interpreted
def test_check_in_several_processes_says_the_same(
    tritons_interpreter: None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from warploom.cli import check

    root = Path(__file__).parents[1]
    words = ["check", "--device", "cpu", "--spec", str(root / "examples/rms_norm/spec.py")]
    monkeypatch.setattr(check, "CASES_AT_ONCE", 1)
    assert main(words) == 0
    alone = capsys.readouterr().out
    monkeypatch.setattr(check, "_processes", lambda cases, device: 2)
    assert main(words) == 0
    assert re.sub(r"in \d+ s", "", capsys.readouterr().out) == re.sub(r"in \d+ s", "", alone)


# Dtypes and graphs


def test_cases_run_in_other_dtypes(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["bench", "--spec", SPEC, "--device", "cpu", "--no-report", "--mode", "fwd", "--output", "here"]
    assert main([*words, "--dtype", "bf16,fp16"]) == 0
    assert {r.case["dtype"] for r in records.load([Path("here")])} == {"bfloat16", "float16"}
    (section,) = load_sections([Path("here")])
    again = section.command(section.panels[0], "fwd")
    assert "--dtype bfloat16 --case dtype=bfloat16" in again
    assert main([*shlex.split(again)[1:], "--device", "cpu", "--no-report", "--output", "there"]) == 0
    assert {r.case["dtype"] for r in records.load([Path("there")])} == {"bfloat16"}
    assert main([*words, "--dtype", "int4"]) == 2
    assert "no dtype 'int4'; there are: bfloat16" in capsys.readouterr().err
    bare = replace(toy.make_bench(), suites={"quick": lambda device: [{"n": 1}]})
    with pytest.raises(ArgumentError, match="no dtype to replace"):
        runner.plan([bare], Selection(dtypes=["float16"]), "cpu")


def test_replays_are_planned_only_when_asked_for_and_only_on_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    bench = toy.make_bench()
    assert {unit.mode for unit in runner.plan([bench], Selection(), "cuda")} == {"fwd", "bwd"}
    (unit, _) = runner.plan([bench], Selection(modes=["fwd_graph"]), "cuda")
    assert (unit.mode, unit.work, unit.replayed) == ("fwd_graph", "fwd", True)
    assert main(["bench", "--spec", SPEC, "--device", "cpu", "--cuda-graph"]) == 2
    assert "no mode 'fwd_graph'; there are: fwd, bwd" in capsys.readouterr().err


@pytest.mark.gpu
@pytest.mark.alone
def test_a_replayed_graph_is_checked_and_timed() -> None:
    def by_hand(x: torch.Tensor, factor: float) -> torch.Tensor:
        for _ in range(20):
            x = x * 1.0
        return x * factor

    def waits_on_the_stream(x: torch.Tensor, factor: float) -> torch.Tensor:
        torch.cuda.current_stream().synchronize()
        return x * factor

    waits = {"waits": lambda x, factor: x * factor * bool(x.sum().item() + 1), "waits_too": waits_on_the_stream}
    results = time_functions(
        {"mine": by_hand, **waits},
        scaled_inputs,
        [{"n": 64}],
        reference=scaled,
        modes=("fwd", "fwd_graph"),
        device="cuda",
    )
    found = {(r.provider, r.mode): r for r in results.records}
    assert found["mine", "fwd_graph"].status == "ok"
    assert found["mine", "fwd_graph"].peak_memory_mib is None
    assert found["waits", "fwd_graph"].status == found["waits_too", "fwd_graph"].status == "error"
    assert "synchronizing" in found["waits", "fwd_graph"].reason
    torch.rand(1, device="cuda")  # raises if a failed capture has left the generator as it was
    assert (found["mine", "fwd_graph"].host_us or 0) < (found["mine", "fwd"].host_us or 0)


# Disturbances


class Still:
    """A clock that measures nothing."""

    def host_us(self, call: measure.Call) -> float:
        return 1.0

    def sample(self, call: measure.Call, host_us: float) -> measure.Sample:
        call()
        return measure.Sample(1.0)

    def settle(self, samplers: Sequence[Callable[[], object]]) -> None:
        for sampler in samplers:
            sampler()


def watched(*samples: Reading) -> WatchedClock:
    """A clock that has seen these samples, one after each repetition."""
    left = list(samples)
    clock = WatchedClock(Still(), Reader(lambda: left.pop(0) if left else None, 0.0))
    clock.begin()
    clock.settle([])
    for _ in range(len(samples) + 2):
        clock.sample(lambda: None, 1.0)
    return clock


STEADY = Reading(1980, 50, 0)


@pytest.mark.parametrize(
    ("samples", "found"),
    [
        ([STEADY] * 5, None),
        ([], None),
        ([Reading(345, 30, 1), STEADY, STEADY], None),  # it woke up
        ([STEADY, STEADY, Reading(1900, 51, 0)], None),
        ([STEADY, STEADY, Reading(1500, 70, 0)], "the SM clock went from 1500 to 1980 MHz, at 70 °C"),
        ([STEADY, STEADY, Reading(1500, 70, sensors.POWER_CAP)], None),
        (
            [STEADY, Reading(1980, 88, 0x20 | 0x40)],
            "thermal slowdown by the driver, thermal slowdown by the hardware",
        ),
    ],
)
def test_a_disturbance_is_a_slowdown_or_a_clock_that_moves(samples: list[Reading], found: str | None) -> None:
    clock = watched(*samples)
    assert (clock.disturbance() or "").startswith(found or "")
    assert (clock.disturbance() is None) == (found is None)
    clock.begin()
    assert clock.disturbance() is None


def test_sensors_are_read_no_more_often_than_they_may() -> None:
    reads: list[int] = []

    def read() -> Reading:
        reads.append(1)
        return STEADY

    clock = WatchedClock(Still(), Reader(read, 60.0))
    clock.begin()
    clock.settle([lambda: clock.sample(lambda: None, 1.0)] * 2)
    assert not reads  # what does not count is not looked at
    for _ in range(5):
        clock.sample(lambda: None, 1.0)
    assert len(reads) == 1
    assert sensors.make_reader(CPU) is None


def test_nvidia_smi_is_read_and_its_absence_is_no_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    reader = sensors._smi_reader("GPU-1")
    assert reader is not None
    monkeypatch.setenv("PATH", str(tmp_path))
    assert reader.read() is None
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho '1980, 45, 0x0000000000000004'\n")
    tool.chmod(0o755)
    assert reader.read() == Reading(1980, 45, sensors.POWER_CAP)
    tool.write_text("#!/bin/sh\necho '[N/A], 45, [N/A]'\n")
    assert reader.read() is None


def test_a_disturbed_case_is_marked_shown_and_measured_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    hot = Reader(lambda: Reading(1980, 90, 0x40), 0.0)
    monkeypatch.setattr(runner, "make_reader", lambda device: hot)
    bench = toy.make_bench(torch=lambda case: toy.reference, broken=toy.broken)
    selection = Selection(modes=["fwd"], case={"n": [64]})
    first = runner.run([bench], selection, CPU, tmp_path)
    by_name = {r.provider: r for r in first.records}
    assert by_name["torch"].disturbed == "thermal slowdown by the hardware, at 90 °C"
    assert by_name["limit"].disturbed
    assert by_name["broken"].disturbed is None
    (table,) = make_tables(first.records)
    assert table.rows[0][1].state == "disturbed"
    assert table.rows[0][1].text
    assert "disturbed: torch, limit: thermal slowdown by the hardware, at 90 °C" in table.notes
    assert Point(by_name["torch"], 64, "ok").badge == "disturbed"
    assert Point(by_name["torch"], 64, "stale").badge == "stale"

    monkeypatch.setattr(runner, "make_reader", lambda device: None)
    again = runner.run([bench], selection, CPU, tmp_path, resume=True)
    assert {r.disturbed for r in again.records} == {None}
    assert {r.provider: r for r in records.load([tmp_path])}["torch"].disturbed is None


class Cpus:
    """Processors of which other programs use so many."""

    def __init__(self, others: float) -> None:
        self.others, self.wall = others, 0.0

    def read(self) -> sensors.CpuTimes:
        self.wall += 1.0
        return sensors.CpuTimes(self.wall, self.wall * (1.0 + self.others), self.wall)


@pytest.mark.usefixtures("quick_measurements")
@pytest.mark.seldom(3, 4)
def test_other_programs_on_a_cpu_are_said_and_disturb_what_is_timed_from_python(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cores = os.cpu_count() or 1
    for percent in (50, 5, 130):
        monkeypatch.setattr(sensors, "read_cpu_times", Cpus(cores * percent / 100).read)
        results = time_functions(
            {"relu": torch.relu, "clamp": lambda input: input.clamp(min=0)},
            lambda n: {"input": torch.randn(n)},
            [{"n": 64}],
            reference=torch.relu,
            device="cpu",
        )
        said = f"other programs used {min(percent, 100)} % of the processors" if percent >= 10 else None
        assert {record.disturbed for record in results.records} == {said}
        warned = f"warploom: this machine is busy ({said}): times may be too long"
        assert (warned in capsys.readouterr().err) == (said is not None)
        assert (str(said) in str(results)) == (said is not None)


def test_the_use_of_processors_is_read() -> None:
    earlier = read_cpu_times()
    if earlier is None:
        pytest.skip("this system does not say")
    end = time.process_time() + 0.3
    while time.process_time() < end:
        pass
    now = read_cpu_times()
    assert now is not None
    assert now.own - earlier.own >= 0.25
    assert now.everyone - earlier.everyone >= 0.2
    assert now.wall > earlier.wall


def test_records_of_before_there_were_disturbances_still_load(tmp_path: Path) -> None:
    outcome = runner.run([toy.make_bench()], Selection(modes=["fwd"]), CPU, tmp_path)
    file = tmp_path / records.RECORDS
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    file.write_text(
        "".join(json.dumps({k: v for k, v in line.items() if k != "disturbed"}) + "\n" for line in lines)
    )
    assert records.load([tmp_path]) == outcome.records


# Profiles


def test_a_timeline_of_each_provider(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words = ["profile", "--spec", SPEC, "--device", "cpu", "--output", "here", "--kind", "chrome"]
    assert main([*words, "--mode", "bwd", "--case", "n=64"]) == 0
    out = capsys.readouterr().out
    assert "aten::mul" in out
    assert out.split()[-1] == "here/trace-torch.json"
    trace = (tmp_path / "here" / "trace-torch.json").read_text()
    assert trace.count('"torch bwd"') >= 5
    assert not (tmp_path / "here" / records.RECORDS).exists()
    assert main(words) == 2
    assert "profile: takes one case in one mode, and 4 fit (toy-scale fwd" in capsys.readouterr().err


def test_a_provider_that_fails_is_passed_by_in_a_profile(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    bench = toy.make_bench(broken=toy.broken, torch=lambda case: toy.reference)
    unit = Unit(bench, "quick", {"dtype": "float32", "n": 64}, "fwd")
    (trace,) = traces.chrome(unit, ["broken", "torch"], CPU, tmp_path)
    assert trace.path == tmp_path / "trace-torch.json"
    assert trace.parts == {}
    assert "broken: error: ValueError" in caplog.text


def test_nsight_compute_is_run_or_its_command_said(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    words = ["profile", "--spec", SPEC, "--device", "cpu", "--output", "here", "--mode", "fwd", "--case", "n=64"]
    assert main([*words, "--kind", "ncu"]) == 2
    said = capsys.readouterr().err
    assert "ncu (NVIDIA Nsight Compute) is not on the PATH; where it is, run for toy-scale fwd" in said
    assert "ncu --set full --profile-from-start off" in said
    assert "-m warploom profile toy-scale" in said
    assert "--provider torch --kind once" in said

    tool = tmp_path / "ncu"
    tool.write_text('#!/bin/sh\necho "$@" > called\n')
    tool.chmod(0o755)
    assert main([*words, "--kind", "ncu"]) == 0
    command, report = capsys.readouterr().out.splitlines()
    assert report == "here/torch.ncu-rep"
    assert (tmp_path / "called").is_file()
    again = shlex.split(command.partition(" -m warploom ")[2])
    assert main(again) == 2  # the same command line, which only a GPU can run
    assert "profile: the marks of a profiled region are CUDA's" in capsys.readouterr().err
    tool.write_text("#!/bin/sh\nexit 3\n")
    assert main([*words, "--kind", "ncu"]) == 2
