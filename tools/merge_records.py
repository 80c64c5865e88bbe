"""Put what runs measured into results, in the place of former records of the same cases.

``python tools/merge_records.py results/h200 RUN ...`` takes folders that ``warploom bench --output`` wrote, the
last one last. Times are compared within a run, so a case is replaced whole, with everything that was measured
beside it. One that was disturbed does not replace one that was not. A commit that was named to a run is looked up
here: the package that ran must be that commit's. Records of no clean commit go, and cases of kernels that are
others now, with or without a RUN; where only sources have changed, ``tools/renew_fingerprints.py`` keeps them if
it comes first.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from warploom.bench.records import ENVIRONMENTS, RECORDS, Record, is_clean, load, load_environments
from warploom.bench.storage import lock, replace_text
from warploom.errors import WarploomError
from warploom.ops import benches
from warploom.ops.spec import KERNELS
from warploom.testing.specs import load_specs

ROOT = Path(__file__).parents[1]
Case = tuple[str, str, str, str]


def case_of(record: Record) -> Case:
    """Returns what the records of all providers in one case have in common."""
    return record.operator, record.suite, json.dumps(record.case, sort_keys=True), record.mode


def own_of(records: Sequence[Record]) -> dict[Case, Record]:
    """Our record of every case that has a time of ours."""
    named = {bench.record_name: bench.own for bench in benches().values()}
    return {case_of(r): r for r in records if r.provider == (named.get(r.operator) or KERNELS) and r.ms}


def merged(present: Sequence[Record], new: Sequence[Record]) -> list[Record]:
    """``present`` with the cases of ``new`` that have a time of ours."""
    before = own_of(present)
    taken = {
        case
        for case, record in own_of(new).items()
        if not (record.disturbed and case in before and not before[case].disturbed)
    }
    kept = [record for record in present if case_of(record) not in taken]
    return kept + [record for record in new if case_of(record) in taken]


def fresh(records: Sequence[Record]) -> list[Record]:
    """Records but those of cases whose own is stale; see `Record.is_stale`."""
    gone = {case for case, record in own_of(records).items() if record.is_stale}
    return [record for record in records if case_of(record) not in gone]


def in_order(records: Sequence[Record]) -> list[Record]:
    """Records in the order of the suites, whenever they came: tables have their rows in it."""
    places: dict[tuple[str, ...], int] = {}
    for bench in benches().values():
        for suite, cases in bench.suites.items():
            for case in cases("cuda"):
                key = bench.record_name, suite, json.dumps(dict(case), sort_keys=True)
                places.setdefault(key, len(places))
    return sorted(records, key=lambda record: places.get(case_of(record)[:3], len(places)))


def load_clean(folder: Path, environments: dict[str, dict[str, Any]]) -> list[Record]:
    """Records of a folder that a bench wrote.

    Raises:
        WarploomError: The folder holds none, or one of no clean commit, or of other code than the commit's.
    """
    records = load([folder])
    for record in {record.run: record for record in records}.values():
        if not is_clean(record, environments):
            raise WarploomError(f"{folder}: run {record.run} is of no clean commit")
        run = environments[record.environment]["runs"][record.run]
        if run.get("commit_given") and run.get("tree") != tree_at(run["commit"]):
            raise WarploomError(
                f"{folder}: run {record.run} is not of the code of {run['commit'][:10]}, as it says"
            )
    return records


def tree_at(commit: str) -> str:
    """Returns the hash of the package's folder in a commit; empty where that is not known."""
    words = ["git", "-C", str(ROOT), "rev-parse", f"{commit}:src/warploom"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""


def merge(results: Path, runs: Sequence[Path]) -> tuple[int, int, int]:
    """Merge runs into results; returns how many records came, went, and went because they are of no clean commit.

    Raises:
        WarploomError: A folder holds no records, or a run is of no clean commit.
    """
    with lock(results):
        before = load([results])
        environments = load_environments(results)
        records = before
        for run in runs:
            found = load_environments(run)
            records = merged(records, load_clean(run, found))
            for name, fields in found.items():
                known = environments.setdefault(name, fields)
                known["runs"] = {**known.get("runs", {}), **fields.get("runs", {})}
        clean = [record for record in records if is_clean(record, environments)]
        unclean = len(records) - len(clean)
        records = in_order(fresh(clean))
        lines = [{name: value for name, value in asdict(r).items() if value is not None} for r in records]
        replace_text(results / RECORDS, "".join(json.dumps(line) + "\n" for line in lines))
        replace_text(results / ENVIRONMENTS, json.dumps(environments, indent=2) + "\n")
    was, now = ({(record.key, record.run) for record in each} for each in (before, records))
    return len(now - was), len(was - now), unclean


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("results", type=Path, help="a folder of records, which is changed")
    parser.add_argument("runs", type=Path, nargs="*", metavar="RUN", help="folders that a bench wrote")
    options = parser.parse_args(arguments)
    load_specs([Path(__file__).parents[1] / "benchmarks"])
    try:
        came, went, unclean = merge(options.results, options.runs)
    except WarploomError as error:
        print(f"merge_records.py: {error}", file=sys.stderr)
        return 2
    print(f"{came} records came, {went} went, {unclean} of them of no clean commit")
    return 0


if __name__ == "__main__":
    sys.exit(main())
