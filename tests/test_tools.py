"""The commands of `tools/`: what they read, how they judge, and that their lists are complete."""

from __future__ import annotations

import fnmatch
import re
import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import processes
import pytest

from warploom.bench.records import Record, append, load, load_environments, save_environment
from warploom.ops import benches
from warploom.runtime.backend import HAS_TRITON

ROOT = Path(__file__).parents[1]
TOOLS = ROOT / "tools"
sys.path.insert(0, str(TOOLS))

import absolute_links  # noqa: E402
import merge_records  # noqa: E402
import mutate  # noqa: E402
import sanitize  # noqa: E402

# ----------------------------------------------------------------------------------------------------------
# Sanitizers: reports, and what explains them
# ----------------------------------------------------------------------------------------------------------

KERNEL = sanitize.Kernel("warploom.ops.flash_attention.triton.backward", "prepare_kernel", False, ("hopper",))
OTHER = sanitize.Kernel("warploom.ops.flash_attention.hopper.forward", "hopper_forward_kernel", True)


def line_of(file: str, text: str) -> int:
    lines = (ROOT / "src/warploom" / file).read_text().splitlines()
    return next(number for number, line in enumerate(lines, start=1) if text in line)


LOAD = line_of("ops/flash_attention/triton/backward.py", "tl.load(out_ptrs")
FULL, EMPTY = (line_of("device/hopper/pipeline.py", f"def wait_{state}(") for state in ("full", "empty"))
INITCHECK = f"""========= COMPUTE-SANITIZER
========= Uninitialized __global__ memory read of size 16 bytes
=========     at prepare_kernel+0x3b0 in backward.py:{LOAD}
=========     by thread (0,0,0) in block (0,0,0)
=========     Address 0x7f0000000000
=========
========= Uninitialized __global__ memory read of size 16 bytes
=========     at prepare_kernel+0x3b0 in backward.py:{LOAD}
=========     by thread (1,0,0) in block (0,0,0)
=========     Address 0x7f0000000010
=========
========= Host API memory access error at host access to 0x7f00 of size 16 bytes
=========     Uninitialized access at 0x7f00 on access by cudaMemcpy source
=========
========= ERROR SUMMARY: 3 errors
"""
RACECHECK = f"""========= COMPUTE-SANITIZER
========= Error: Race reported between Write access at hopper_forward_kernel+0x2a0 in pipeline.py:{FULL}
=========     and Read access at hopper_forward_kernel+0x1b10 in pipeline.py:{EMPTY} [128 hazards]
=========
========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)
"""


def found(tool: str, log: str, *calls: str) -> list[sanitize.Finding]:
    task = sanitize.Task(tool, "flash_attention", calls or ("one", "two"))
    return sanitize.findings_of(task, sanitize.reports(log), [KERNEL, OTHER])


def test_reports_of_one_kind_and_place_are_one_finding() -> None:
    load, copy = found("initcheck", INITCHECK, "hopper")
    assert (load.kernel, load.count, load.call) == ("prepare_kernel", 2, "hopper")
    assert load.kind == "Uninitialized __global__ memory read of size 16 bytes"
    assert load.places == (
        sanitize.Place("src/warploom/ops/flash_attention/triton/backward.py", LOAD, load.places[0].text),
    )
    assert "tl.load(out_ptrs" in load.places[0].text
    assert (copy.kernel, copy.count, copy.places) == ("", 1, ())
    assert copy.kind.startswith("Host API memory access error")


def test_a_race_has_both_of_its_places() -> None:
    (race,) = found("racecheck", RACECHECK)
    assert (race.kernel, race.count, race.call) == ("hopper_forward_kernel", 128, "")
    assert [(place.file, place.line) for place in race.places] == [
        ("src/warploom/device/hopper/pipeline.py", FULL),
        ("src/warploom/device/hopper/pipeline.py", EMPTY),
    ]


def test_a_clean_log_has_no_findings() -> None:
    assert found("memcheck", "========= COMPUTE-SANITIZER\n========= ERROR SUMMARY: 0 errors\n") == []


def test_only_what_is_explained_is_known() -> None:
    known = sanitize.read_known()
    load, copy = sanitize.explained(found("initcheck", INITCHECK, "hopper"), known)
    assert load.known
    assert copy.known
    elsewhere = INITCHECK.replace(f":{LOAD}", f":{LOAD + 1}")  # another line of the same kernel
    assert not sanitize.explained(found("initcheck", elsewhere, "hopper"), known)[0].known
    for finding in (*found("initcheck", INITCHECK, "few"), *found("memcheck", INITCHECK, "hopper")):
        assert not sanitize.explained([finding], known)[0].known


def test_every_place_of_a_report_must_be_explained() -> None:
    (race,) = found("racecheck", RACECHECK)
    write, read = (place.text for place in race.places)
    one = sanitize.Explanation("racecheck", "why", kernel=race.kernel, where=(write,))
    both = sanitize.Explanation("racecheck", "why", kernel=race.kernel, where=(write, read))
    assert not one.explains(race)
    assert both.explains(race)


def test_what_an_explanation_names_is_there() -> None:
    for known in sanitize.read_known():
        package = ROOT / "src" / "warploom"
        files = [*package.glob(f"ops/{known.group}/**/*.py"), *package.glob("device/**/*.py")]
        sources = "".join(file.read_text() for file in files)
        kernels = re.findall(r"def (\w+_kernel)\(", sources)
        assert not known.kernel or fnmatch.filter(kernels, known.kernel)
        assert all(text in sources for text in known.where), known


def test_what_nothing_explains_is_printed_whole() -> None:
    load, copy = sanitize.explained(found("initcheck", INITCHECK, "hopper"), sanitize.read_known())
    text = sanitize.summary([replace(load, known=""), copy])
    assert load.report in text
    assert f"      {load.places[0].file}:{LOAD}: {load.places[0].text}" in text
    assert copy.report not in text
    assert f"known, 1 times, initcheck flash_attention/hopper: {copy.known}" in text
    assert text.endswith("2 findings, 1 of which nothing explains")


def test_calls_that_an_explanation_names_run_alone() -> None:
    calls = [
        ("one", "flash_attention"),
        ("hopper", "flash_attention"),
        ("two", "flash_attention"),
        ("stream", "bench"),
    ]
    known = sanitize.read_known()

    def processes(tool: str) -> list[tuple[str, ...]]:
        return [task.calls for task in sanitize.tasks_of(tool, calls, known)]

    assert processes("memcheck") == [("one", "hopper", "two"), ("stream",)]
    assert processes("initcheck") == [("hopper",), ("one", "two"), ("stream",)]
    assert processes(sanitize.PLAIN) == [("one",), ("hopper",), ("two",), ("stream",)]


LAUNCHED = """
import sys
import sanitize, torch
from sanitizer_calls import CALLS
from warploom.runtime import launch

kernels = sanitize.package_kernels()
with launch.record_builds(90, 132) as builds:
    for call in CALLS:
        if call.group != "bench":
            call.run(torch.device("cpu"))
done = {(build.function.__module__, build.function.__name__) for build in builds.values()}
names = [call.name for call in CALLS]
if len(names) > len(set(names)):
    sys.exit("two calls have one name")
missing = [str(k) for k in kernels if (k.module, k.name) not in done and k.group != "bench"]
sys.exit(f"no call launches {', '.join(missing)}" if missing or len(kernels) < 30 else 0)
"""


@pytest.mark.skipif(not HAS_TRITON, reason="needs Triton")
@pytest.mark.seldom(2, 9)
def test_the_calls_launch_every_kernel_for_hopper() -> None:
    environment = processes.environment(TOOLS)
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-c", LAUNCHED]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


# ----------------------------------------------------------------------------------------------------------
# Mutants
# ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A small repository: a module and its tests, one of which looks at nothing."""
    (tmp_path / "src").mkdir()
    (tmp_path / "src/small.py").write_text("def double(x):\n    return 2 * x\n")
    (tmp_path / "test_small.py").write_text(
        "import pytest\nfrom small import double\n"
        "def test_value():\n    assert double(3) == 6\n"
        "def test_nothing():\n    double(3)\n"
        "@pytest.mark.skip\ndef test_skipped():\n    pass\n"
    )
    return tmp_path


@pytest.mark.parametrize(
    ("test", "old", "status", "by"),
    [
        ("test_value", "2 * x", "killed", "test_small.py::test_value"),
        ("test_nothing", "2 * x", "survived", "test_small.py::test_nothing"),
        ("test_skipped", "2 * x", "error", "every test was skipped"),
        ("test_missing", "2 * x", "error", "pytest ended with 4"),
        ("test_value", "4 * x", "error", "the code has moved"),
    ],
)
def test_a_mutant_is_killed_or_survives_or_cannot_be_judged(
    test: str, old: str, status: str, by: str, tree: Path
) -> None:
    before = (tree / "src/small.py").read_text()
    mutant = mutate.Mutant("name", "src/small.py", old, "3 * x", "what", (f"test_small.py::{test}",))
    verdict = mutate.judge(mutant, tree)
    assert verdict.status == status, verdict
    assert by in verdict.by
    assert (tree / "src/small.py").read_text() == before


def test_a_test_that_fails_anyway_kills_nothing(tree: Path) -> None:
    (tree / "test_wrong.py").write_text("def test_wrong():\n    assert False\n")
    mutant = mutate.Mutant("name", "src/small.py", "2 * x", "3 * x", "what", ("test_wrong.py",))
    verdict = mutate.judge(mutant, tree)
    assert (verdict.status, verdict.by) == ("error", "without the fault too: test_wrong.py::test_wrong")


def test_the_wider_tests_run_if_the_first_pass(tree: Path) -> None:
    first, wider = ("test_small.py::test_nothing",), ("test_small.py",)
    mutant = mutate.Mutant("name", "src/small.py", "2 * x", "3 * x", "what", first, wider=wider)
    verdict = mutate.judge(mutant, tree)
    assert (verdict.status, verdict.by) == ("killed", "test_small.py::test_value")


def test_mutants_have_names_tests_and_places() -> None:
    mutants = mutate.read_mutants()
    assert len({mutant.name for mutant in mutants}) == len(mutants) >= 40
    for mutant in mutants:
        assert mutant.needs in ("cpu", "gpu")
        assert mutant.tests
        assert mutant.old != mutant.new
        assert (ROOT / mutant.file).read_text(encoding="utf-8").count(mutant.old) == 1, mutant.name
        for test in (*mutant.tests, *mutant.wider):
            file, _, name = test.partition("[")[0].partition("::")
            assert f"def {name}(" in (ROOT / file).read_text() if name else (ROOT / file).is_file(), mutant.name


# ----------------------------------------------------------------------------------------------------------
# Releases
# ----------------------------------------------------------------------------------------------------------

REPOSITORY = "https://example.org/owner/name"


def test_the_links_of_a_release_lead_to_the_repository() -> None:
    readme = absolute_links.absolute((ROOT / "README.md").read_text(encoding="utf-8"), REPOSITORY, "v1")
    links = re.findall(r"\]\(([^)#\s]+)\)", readme)
    assert links
    assert all(link.startswith("https://") for link in links)
    ours = [link.removeprefix(f"{REPOSITORY}/").split("/", 2) for link in links if link.startswith(REPOSITORY)]
    for kind, revision, path in ours:
        assert revision == "v1"
        assert (ROOT / path).is_dir() if kind == "tree" else (ROOT / path).is_file()


def test_a_release_knows_its_repository() -> None:
    project = tomllib.loads(absolute_links.with_urls((ROOT / "pyproject.toml").read_text(), REPOSITORY))["project"]
    assert project["urls"]["Source"] == REPOSITORY
    assert project["scripts"] == {"warploom": "warploom.cli:main"}


def test_actions_are_pinned() -> None:
    for file in (ROOT / ".github" / "workflows").glob("*.yml"):
        used = re.findall(r"uses: (\S+)", file.read_text(encoding="utf-8"))
        assert used
        assert all(re.fullmatch(r"[\w/-]+@[0-9a-f]{40}", action) for action in used), file


# ----------------------------------------------------------------------------------------------------------
# Results
# ----------------------------------------------------------------------------------------------------------

CASE = {
    "batch": 1, "heads": 2, "head_dim": 64, "dtype": "bfloat16", "theta": "vector", "activation": "none", "n": 256,
}  # fmt: skip


def measured(folder: Path, run: str, *records: Record, dirty: bool = False) -> Path:
    folder.mkdir()
    append(folder, (replace(record, run=run) for record in records))
    save_environment(folder, "gpu", {"device": "cuda", "commit": "0" * 40, "dirty": dirty}, run)
    return folder


def record_of(provider: str, ms: float, n: int = 256, **more: Any) -> Record:
    return Record("lrpe_rope", "quick", {**CASE, "n": n}, provider, "fwd", "", "gpu", ms=ms, **more)


def times(folder: Path) -> set[tuple[str, int, str, float | None]]:
    return {(r.provider, r.case["n"], r.run, r.ms) for r in load([folder])}


def test_a_case_is_replaced_whole_by_that_of_a_later_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Record, "is_stale", property(lambda record: record.case["n"] == 1024))
    ours = [record_of("warploom", 2.0, n) for n in (256, 512, 1024)]
    results = measured(tmp_path / "results", "a", *ours, record_of("liger", 3.0), record_of("liger", 3.0, 1024))
    later = measured(
        tmp_path / "later", "b",
        record_of("warploom", 1.0), record_of("fla", 4.0),
        record_of("warploom", 1.0, 512, disturbed="the clock"), record_of("fla", 4.0, 512),
        record_of("fla", 4.0, 2048),
    )  # fmt: skip
    assert merge_records.merge(results, [later]) == (2, 4, 0)
    assert times(results) == {
        ("warploom", 256, "b", 1.0), ("fla", 256, "b", 4.0),  # not liger, which was not in this run
        ("warploom", 512, "a", 2.0),  # undisturbed
    }  # fmt: skip
    assert set(load_environments(results)["gpu"]["runs"]) == {"a", "b"}


def test_cases_are_in_the_order_of_their_suite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Record, "is_stale", False)
    cases = {case["n"]: dict(case) for case in benches()["lrpe-rope"].suites["published"]("cuda")}
    made = {n: replace(record_of("warploom", 1.0), suite="published", case=case) for n, case in cases.items()}
    results = measured(tmp_path / "results", "a", made[32768])
    merge_records.merge(results, [measured(tmp_path / "later", "b", made[4096], made[512])])
    assert [r.case["n"] for r in load([results])] == [512, 4096, 32768]


def test_records_of_no_clean_commit_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Record, "is_stale", False)
    results = measured(tmp_path / "results", "a", record_of("warploom", 2.0), record_of("liger", 3.0))
    append(results, [record_of("warploom", 2.0, 512, run="before-0"), record_of("liger", 3.0, 512)])
    assert merge_records.main([str(results)]) == 0
    assert capsys.readouterr().out == "0 records came, 2 went, 2 of them of no clean commit\n"
    assert times(results) == {("warploom", 256, "a", 2.0), ("liger", 256, "a", 3.0)}


def test_results_take_no_run_of_changed_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = measured(tmp_path / "results", "a", record_of("warploom", 2.0))
    later = measured(tmp_path / "later", "b", record_of("warploom", 1.0), dirty=True)
    assert merge_records.main([str(results), str(later)]) == 2
    assert "run b is of no clean commit" in capsys.readouterr().err
    assert times(results) == {("warploom", 256, "a", 2.0)}


def test_a_commit_that_was_named_must_be_of_the_code_that_ran(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Record, "is_stale", False)
    monkeypatch.setattr(merge_records, "tree_at", {"1" * 40: "a", "0" * 40: ""}.__getitem__)
    results = measured(tmp_path / "results", "a", record_of("warploom", 2.0))
    for number, (commit, tree, status) in enumerate((("1", "a", 0), ("1", "b", 2), ("1", None, 2), ("0", "a", 2))):
        later = measured(tmp_path / str(number), "b", record_of("warploom", 1.0))
        run = {"commit": commit * 40, "commit_given": True, "dirty": False} | ({"tree": tree} if tree else {})
        save_environment(later, "gpu", {"device": "cuda", **run}, "b")
        assert merge_records.main([str(results), str(later)]) == status
    assert "run b is not of the code of 0000000000" in capsys.readouterr().err


def test_the_package_of_a_commit_is_looked_up() -> None:
    assert re.fullmatch("[0-9a-f]{40}", merge_records.tree_at("HEAD"))
    assert merge_records.tree_at("0" * 40) == ""
