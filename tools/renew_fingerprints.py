"""Keep records whose kernels changed in their source and not in their machine code.

``python tools/renew_fingerprints.py BEFORE results/h200`` plans every record's case with the code of an earlier
checkout BEFORE and with this one, and compares what each of them would launch, as `compare_builds` does. A record
that was fresh in BEFORE, and whose launches compile to the same, gets the present fingerprint. The others stay as
they are: stale. It takes no GPU, and some minutes.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from compare_builds import digest

ROOT = Path(__file__).parents[1]
FILE = "records.jsonl"


def key_of(record: dict[str, Any]) -> str:
    """Returns the fields of a record that decide what it launches."""
    names = ("operator", "case", "provider", "mode")
    return json.dumps([record.get(name) for name in names], sort_keys=True)


def plan(checkout: Path, folder: Path) -> tuple[dict[str, tuple[str, list[Any]]], dict[str, Any]]:
    """Returns the fingerprint and the names of builds by record, with the code that is imported; and the builds."""
    from warploom.bench import fingerprint as module
    from warploom.ops import benches
    from warploom.runtime import launch
    from warploom.testing.specs import load_specs

    load_specs([checkout / "benchmarks"])
    builds: dict[str, Any] = {}
    launched: list[str] = []
    usual = launch.record_builds

    @contextlib.contextmanager
    def record_builds(*gpu: int) -> Iterator[Any]:
        with usual(*gpu) as found:
            yield found
        for build in found.values():
            name = f"{module.source_of(build.function)} {build.variant} {gpu[0]}"
            builds[name] = (build, gpu[0])
            launched.append(name)

    launch.record_builds = record_builds  # type: ignore[assignment]
    registry = {bench.record_name: bench for bench in benches().values()}
    planned: dict[str, tuple[str, list[Any]]] = {}
    for line in (folder / FILE).read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        key, gpu = key_of(record), record["fingerprint"]
        if key in planned or not gpu.startswith("sm_"):
            continue
        launched.clear()
        with contextlib.suppress(KeyError, ValueError):  # a provider or a case that is no more
            rest = (record["case"], record["provider"], record["mode"], gpu)
            planned[key] = (module.fingerprint(registry[record["operator"]], *rest), list(launched))
    return planned, builds


_builds: dict[str, Any] = {}


def _compile(name: str) -> tuple[str, str]:
    try:
        return name, digest(*_builds[name])
    except Exception as error:  # of the compiler: what does not compile equals nothing
        return name, f"{type(error).__name__} {os.getpid()} {name}"


Described = dict[str, tuple[str, list[str]]]
"""By record its fingerprint, and a name or the digest of the code of each build that it launches."""


def describe(checkout: Path, folder: Path, jobs: int, same: set[str] | None) -> Described:
    """Plan the records of a folder; compile what they launch, except ``same``, or nothing if that is None."""
    planned, builds = plan(checkout, folder)
    codes = {name: name for name in builds}
    if same is not None:
        _builds.update({name: build for name, build in builds.items() if name not in same})
        with multiprocessing.get_context("fork").Pool(jobs) as pool:
            codes |= dict(pool.imap_unordered(_compile, _builds))
    return {key: (found, [codes[name] for name in names]) for key, (found, names) in planned.items()}


def _launched(described: Described) -> set[str]:
    return {name for _, names in described.values() for name in names}


def _describe_in(checkout: Path, folder: Path, jobs: int, same: set[str] | None = None) -> Described:
    """`describe` with the code of a checkout, in a process of its own."""
    path = os.pathsep.join(filter(None, (str(checkout / "src"), os.environ.get("PYTHONPATH", ""))))
    environment = {**os.environ, "PYTHONPATH": path, "TRITON_DISABLE_LINE_INFO": "1"}
    environment.pop("TRITON_INTERPRET", None)
    with tempfile.NamedTemporaryFile("w+", suffix=".json") as file:
        json.dump(None if same is None else sorted(same), file)
        file.flush()
        words = [sys.executable, __file__, str(checkout), str(folder), "--jobs", str(jobs), "--describe", file.name]
        subprocess.run(words, env=environment, check=True)
        file.seek(0)
        found: Described = json.load(file)
    return found


def renew(before: Path, folder: Path, jobs: int) -> tuple[int, int, int]:
    """Write present fingerprints; returns how many records were renewed, were fresh already, and stay stale."""
    # What has the same source and variant in both need not be compiled.
    same = set.intersection(*(_launched(_describe_in(checkout, folder, jobs)) for checkout in (before, ROOT)))
    earlier, present = (_describe_in(checkout, folder, jobs, same) for checkout in (before, ROOT))
    renewed = fresh = stale = 0
    lines = []
    for line in (folder / FILE).read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        was, now = earlier.get(key_of(record)), present.get(key_of(record))
        if was and now and record["fingerprint"] == was[0] != now[0] and was[1] == now[1] != []:
            record["fingerprint"] = now[0]
            line = json.dumps(record)
            renewed += 1
        elif now:
            fresh, stale = (fresh + 1, stale) if record["fingerprint"] == now[0] else (fresh, stale + 1)
        lines.append(line)
    (folder / FILE).write_text("\n".join(lines) + "\n", encoding="utf-8")
    return renewed, fresh, stale


def main() -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path, help="a checkout of the code that the records are of")
    parser.add_argument("folder", type=Path, help="a folder of records")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="compilations at a time")
    parser.add_argument("--describe", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.describe:
        same = json.loads(options.describe.read_text(encoding="utf-8"))
        described = describe(options.before, options.folder, options.jobs, None if same is None else set(same))
        options.describe.write_text(json.dumps(described), encoding="utf-8")
        return 0
    renewed, fresh, stale = renew(options.before, options.folder, options.jobs)
    print(f"{renewed} records renewed, {fresh} were fresh, {stale} stay stale")
    return 0


if __name__ == "__main__":
    sys.exit(main())
