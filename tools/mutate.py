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
import os
import queue
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
MUTANTS = Path(__file__).with_name("mutants.toml")
COPIED = ("src", "tests", "examples", "tools", "docs", "results", "pyproject.toml", "mkdocs.yml", "README.md")
"""The files and folders of the tree that the tests need."""
SECONDS = 1800.0
"""After which tests are stopped: a mutant that never ends is killed."""


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
    tests: Sequence[str]
    """Arguments of pytest: files and tests."""
    select: str = ""
    """The expression by which ``-k`` selects among them."""
    wider: Sequence[str] = ()
    """Run if the others pass."""
    needs: str = "cpu"
    """``cpu`` or ``gpu``: where the fault can be found."""


class Verdict(NamedTuple):
    """The result of a mutant, or of a run of tests."""

    status: str
    """``killed``, ``survived`` or ``error``."""
    by: str = ""
    """The first test that failed, or what is wrong."""


def read_mutants() -> list[Mutant]:
    """All mutants of the list."""
    return [Mutant(**entry) for entry in tomllib.loads(MUTANTS.read_text(encoding="utf-8"))["mutant"]]


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


def run_tests(tree: Path, tests: Sequence[str], select: str) -> Verdict:
    """Run tests of a tree on its own sources, up to the first that fails."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests, "-k", select]
    environment = {**os.environ, "PYTHONPATH": str(tree / "src"), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(
            command, cwd=tree, env=environment, capture_output=True, text=True, timeout=SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return Verdict("killed", f"not done after {SECONDS:.0f} s")
    text = done.stdout + done.stderr
    if done.returncode < 0:
        return Verdict("killed", f"ended by signal {-done.returncode}")
    failed = re.search(r"^(?:FAILED|ERROR) (\S+::\S.*?)(?: - |$)", text, re.MULTILINE)
    if done.returncode == 1 and failed:
        return Verdict("killed", failed[1])
    if done.returncode == 0:
        passed = re.search(r"\d+ passed", text)
        return Verdict("survived", ", ".join(tests)) if passed else Verdict("error", "every test was skipped")
    return Verdict("error", f"pytest ended with {done.returncode}: {text.strip()[-400:]}")


def judge(mutant: Mutant, tree: Path) -> Verdict:
    """Plant a mutant in a tree, run its tests, and take it out again."""
    file = tree / mutant.file
    right = file.read_text(encoding="utf-8")
    if right.count(mutant.old) != 1:
        return Verdict("error", f"{mutant.file}: expected the old text once: the code has moved")
    found = Verdict("error", "no tests")
    for tests, select in ((mutant.tests, mutant.select), (mutant.wider, "")):
        if not tests:
            break
        file.write_text(right.replace(mutant.old, mutant.new), encoding="utf-8")
        try:
            found = run_tests(tree, tests, select)
        finally:
            file.write_text(right, encoding="utf-8")
        if found.status == "killed":
            again = run_tests(tree, (found.by,), "") if "::" in found.by else run_tests(tree, tests, select)
            if again.status != "survived":
                return Verdict("error", f"without the fault too: {again.by}")
        if found.status != "survived":
            break
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", metavar="NAME", help="this mutant; may be given several times")
    parser.add_argument("--gpu", action="store_true", help="those that only a GPU finds")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="mutants at a time; 1 by default")
    options = parser.parse_args(arguments)
    mutants = read_mutants()
    unknown = set(options.only or ()) - {mutant.name for mutant in mutants}
    if unknown:
        parser.error(f"no mutant {', '.join(sorted(unknown))}")
    needs = "gpu" if options.gpu else "cpu"
    chosen = [m for m in mutants if (m.name in options.only if options.only else m.needs == needs)]
    counts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder, ThreadPoolExecutor(options.jobs) as pool:
        trees: queue.Queue[Path] = queue.Queue()
        for job in range(options.jobs):
            trees.put(copy_tree(Path(folder) / str(job)))

        def judge_in_tree(mutant: Mutant) -> tuple[Mutant, Verdict, float]:
            tree, start = trees.get(), time.monotonic()
            try:
                return mutant, judge(mutant, tree), time.monotonic() - start
            finally:
                trees.put(tree)

        for mutant, (status, by), seconds in pool.map(judge_in_tree, chosen):
            counts[status] += 1
            print(f"{status:<9} {mutant.name:<34} {seconds:6.0f} s  {mutant.what}: {by}", flush=True)
    print(f"{counts['killed']} killed, {counts['survived']} survived, {counts['error']} not judged")
    return 2 if counts["error"] else 1 if counts["survived"] else 0


if __name__ == "__main__":
    sys.exit(main())
