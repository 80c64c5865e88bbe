"""Plant faults in a copy of the source tree, one at a time, and see whether the tests find them.

``python tools/mutate.py`` runs those that a CPU finds, ``--gpu`` those that only a GPU finds. A mutant is an entry
of ``tools/mutants.toml``: a file, a text that occurs exactly once in it, what stands there instead, and the tests
that shall fail. These run first; if they pass, so do the ``wider`` ones, and if these pass too the mutant has
survived: a test is missing.

The test that failed is run once more without the fault, since one that fails anyway kills nothing.

Exit status: 0 if every mutant that ran was killed, 1 if one survived, 2 if one cannot be judged: its text is not
there exactly once (the code has moved), or its tests fail without it, are not there, or are all skipped.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MUTANTS = Path(__file__).with_name("mutants.toml")
COPIED = ("src", "tests", "examples", "tools", "docs", "results", "pyproject.toml", "mkdocs.yml", "README.md")
"""What of the tree the tests need."""
NEEDS = ("cpu", "gpu")
SECONDS = 1800.0
"""After which tests are stopped: a mutant that never ends is killed."""


class MutantError(Exception):
    """A mutant that cannot be judged; the text says why."""


@dataclass(frozen=True)
class Mutant:
    """A fault, and the tests that shall find it."""

    name: str
    file: str
    """Below the root of the repository."""
    old: str
    """Occurs exactly once in the file."""
    new: str
    what: str
    """The fault, in a few words."""
    tests: tuple[str, ...]
    """Arguments of pytest: files and tests."""
    select: str = ""
    """What ``-k`` selects among them."""
    wider: tuple[str, ...] = ()
    """Run if the others pass."""
    needs: str = "cpu"
    """``cpu`` or ``gpu``: where the fault can be found."""


@dataclass(frozen=True)
class Verdict:
    """What became of a mutant."""

    name: str
    what: str
    status: str
    """``killed``, ``survived``, ``needs a GPU``, or ``error``."""
    by: str = ""
    """The first test that failed, or what is wrong."""
    seconds: float = 0.0


@dataclass(frozen=True)
class Run:
    """What a run of pytest came to."""

    status: str
    """``passed``, ``failed`` or ``error``."""
    detail: str = ""
    """What failed, or what is wrong."""
    test: str = ""
    """The one that failed, if that is known."""


def read_mutants(path: Path = MUTANTS) -> list[Mutant]:
    """All mutants of a file.

    Raises:
        MutantError: Two have one name, or one has a field that does not exist or lacks one that must be there.
    """
    mutants = []
    for entry in tomllib.loads(path.read_text(encoding="utf-8"))["mutant"]:
        lists = {name: tuple(entry.get(name, ())) for name in ("tests", "wider")}
        try:
            mutants.append(Mutant(**{**entry, **lists}))
        except TypeError as error:
            raise MutantError(f"{path.name}: {entry.get('name', 'a mutant without a name')}: {error}") from error
    names = [mutant.name for mutant in mutants]
    for mutant in mutants:
        if names.count(mutant.name) > 1 or mutant.needs not in NEEDS or not mutant.tests:
            raise MutantError(f"{path.name}: {mutant.name}: a name of its own, tests, and needs of {NEEDS} wanted")
    return mutants


def mutated(mutant: Mutant, root: Path) -> str:
    """The text of a mutant's file with the fault in it.

    Raises:
        MutantError: The file is not there, or the old text does not occur exactly once in it.
    """
    file = root / mutant.file
    text = file.read_text(encoding="utf-8") if file.is_file() else ""
    found = text.count(mutant.old)
    if found != 1 or mutant.old == mutant.new:
        raise MutantError(f"{mutant.file}: expected the old text once, found it {found} times: the code has moved")
    return text.replace(mutant.old, mutant.new)


def copy_tree(folder: Path) -> Path:
    """A copy of what the tests need."""
    ignore = shutil.ignore_patterns("__pycache__", "*.pyc", "*.egg-info")
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=ignore)
        else:
            shutil.copy2(source, folder / name)
    return folder


def run_tests(tree: Path, tests: Sequence[str], select: str, seconds: float) -> Run:
    """Run tests of a tree on its own sources, up to the first that fails."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
    command += ["-k", select] if select else []
    environment = {**os.environ, "PYTHONPATH": str(tree / "src"), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(
            command, cwd=tree, env=environment, capture_output=True, text=True, timeout=seconds, check=False
        )
    except subprocess.TimeoutExpired:
        return Run("failed", f"not done after {seconds:.0f} s")
    text = done.stdout + done.stderr
    if done.returncode < 0:
        return Run("failed", f"ended by signal {-done.returncode}")
    failed = re.search(r"^(?:FAILED|ERROR) (\S+::\S.*?)(?: - |$)", text, re.MULTILINE)
    if done.returncode == 1 and failed:
        return Run("failed", failed[1], failed[1])
    if done.returncode == 0 and re.search(r"\d+ passed", text):
        return Run("passed")
    if done.returncode == 0:
        return Run("error", "every test was skipped")
    return Run("error", f"pytest ended with {done.returncode}: {text.strip()[-400:]}")


def judge(mutant: Mutant, tree: Path, seconds: float, trust: bool = False) -> Verdict:
    """Plant a mutant in a tree, run its tests, and take it out again.

    ``trust``: what fails with the fault is taken to pass without it.
    """
    start = time.monotonic()

    def verdict(status: str, by: str = "") -> Verdict:
        return Verdict(mutant.name, mutant.what, status, by, time.monotonic() - start)

    try:
        text = mutated(mutant, tree)
    except MutantError as error:
        return verdict("error", str(error))
    file = tree / mutant.file
    right = file.read_text(encoding="utf-8")
    for tests, select in ((mutant.tests, mutant.select), (mutant.wider, "")):
        if not tests:
            continue
        file.write_text(text, encoding="utf-8")
        try:
            run = run_tests(tree, tests, select, seconds)
        finally:
            file.write_text(right, encoding="utf-8")
        if run.status == "failed" and not trust:
            again = (
                run_tests(tree, (run.test,), "", seconds) if run.test else run_tests(tree, tests, select, seconds)
            )
            if again.status != "passed":
                return verdict("error", f"without the fault too: {again.detail}")
        if run.status != "passed":
            return verdict("killed" if run.status == "failed" else "error", run.detail)
    return verdict("survived", ", ".join((*mutant.tests, *mutant.wider)))


def has_gpu() -> bool:
    """Whether PyTorch sees a GPU, asked in a process of its own."""
    probe = "import sys, torch; sys.exit(0 if torch.cuda.is_available() else 1)"
    return subprocess.run([sys.executable, "-c", probe], check=False).returncode == 0


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", metavar="NAME", help="this mutant; may be given several times")
    parser.add_argument("--gpu", action="store_true", help="those that only a GPU finds")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="mutants at a time; 1 by default")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="limit for the tests of one mutant")
    parser.add_argument("--check", action="store_true", help="only see whether every mutant still applies")
    parser.add_argument("--trust", action="store_true", help="do not run what failed once more without the fault")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the verdicts as JSON")
    options = parser.parse_args(arguments)
    try:
        mutants = read_mutants()
    except MutantError as error:
        parser.error(str(error))
    unknown = set(options.only or ()) - {mutant.name for mutant in mutants}
    if unknown:
        parser.error(f"no mutant {', '.join(sorted(unknown))}")
    if options.check:
        return check(mutants)
    wanted = [m for m in mutants if m.name in options.only] if options.only else mutants
    gpu = has_gpu()
    here = [m for m in wanted if options.only or m.needs == ("gpu" if options.gpu else "cpu")]
    verdicts = [Verdict(m.name, m.what, "needs a GPU") for m in wanted if m.needs == "gpu" and not gpu]
    here = [m for m in here if gpu or m.needs == "cpu"]
    verdicts += judge_all(here, options.jobs, options.seconds, options.trust)
    if options.output:
        options.output.write_text(json.dumps([asdict(v) for v in verdicts], indent=2) + "\n", encoding="utf-8")
    counts = {status: sum(v.status == status for v in verdicts) for status in ("killed", "survived", "error")}
    waiting = sum(v.status == "needs a GPU" for v in verdicts)
    print(
        f"{len(verdicts)} mutants: {counts['killed']} killed, {counts['survived']} survived, "
        f"{counts['error']} not judged, {waiting} need a GPU"
    )
    return 2 if counts["error"] else 1 if counts["survived"] else 0


def check(mutants: Sequence[Mutant]) -> int:
    """Say which mutants no longer apply to the sources as they are now."""
    wrong = 0
    for mutant in mutants:
        try:
            mutated(mutant, ROOT)
        except MutantError as error:
            wrong += 1
            print(f"{mutant.name}: {error}")
    print(f"{len(mutants)} mutants, {wrong} of which no longer apply")
    return 2 if wrong else 0


def judge_all(mutants: Sequence[Mutant], jobs: int, seconds: float, trust: bool) -> list[Verdict]:
    """Judge mutants, ``jobs`` at a time, and print each verdict as it is there."""
    verdicts: list[Verdict] = []
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        trees: queue.Queue[Path] = queue.Queue()
        for job in range(jobs):
            trees.put(copy_tree(Path(folder) / str(job)))

        def one(mutant: Mutant) -> Verdict:
            tree = trees.get()
            try:
                return judge(mutant, tree, seconds, trust)
            finally:
                trees.put(tree)

        with ThreadPoolExecutor(jobs) as pool:
            for verdict in pool.map(one, mutants):
                verdicts.append(verdict)
                words = f"{verdict.status:<9} {verdict.name:<34} {verdict.seconds:6.0f} s"
                print(f"{words}  {verdict.what}: {verdict.by}", flush=True)
    return verdicts


if __name__ == "__main__":
    sys.exit(main())
