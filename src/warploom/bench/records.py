"""Records of runs: one `Record` per (case, provider, mode), a line of JSON each.

Records are only ever appended. A later record with the same key replaces an earlier one when they are read,
so a run that is resumed or repeated needs to rewrite nothing, and a killed run loses at most its last line.
Several runs may write into one folder at once.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from warploom.bench.environment import split
from warploom.bench.fingerprint import LIMIT as LIMIT
from warploom.bench.fingerprint import differs, fingerprint
from warploom.bench.host_code import code_of
from warploom.bench.storage import append_lines, check_types, load_lines, lock, read_text, replace_text
from warploom.errors import WarploomError
from warploom.ops import benches
from warploom.ops.spec import KERNELS

RECORDS = "records.jsonl"
ENVIRONMENTS = "environment.json"
USUAL_CORES, SHORT_MS = 16, 0.1
"""Hosts with more cores add about 1.7 µs to each time of a GPU: 2 % and more of a time below the second number."""
Key = tuple[str, str, str, str, str]


@dataclass(frozen=True)
class Record:
    """A provider's result on one case in one mode. ``None`` stands for a figure that was not measured."""

    operator: str
    """Name of the bench, with underscores."""
    suite: str
    case: dict[str, Any]
    provider: str
    mode: str
    """``fwd``, ``bwd``, ``fwd_bwd``, ``train``, or ``fwd_graph`` for the forward replayed from a CUDA graph."""
    fingerprint: str
    """Fingerprint of the kernels that the provider launches; see `warploom.bench.fingerprint`."""
    environment: str
    """Id into ``environment.json``."""
    run: str = ""
    """Id into the environment's ``runs``. Only times of one run are compared; empty for none of it."""
    status: str = "ok"
    """``ok``, ``incorrect``, ``oom``, ``unsupported`` or ``error``."""
    reason: str | None = None
    """The reason for a status other than ``ok``, in one line."""
    ms: float | None = None
    """Median time on the device."""
    ms_p20: float | None = None
    ms_p80: float | None = None
    peak_memory_mib: float | None = None
    """Peak device memory of one call, inputs included."""
    min_bytes: int | None = None
    """The fewest bytes the case must move."""
    flops: int | None = None
    """The fewest floating-point operations the case must do."""
    limit_ms: float | None = None
    """Time of the measured ceiling in the same rounds."""
    limit_fraction: float | None = None
    """``limit_ms / ms``; 1 is the ceiling."""
    max_error: float | None = None
    """Largest absolute error against float64."""
    error_budget: float | None = None
    """The most that ``max_error`` may be."""
    host_us: float | None = None
    """Median wall time from entering the call to its return."""
    disturbed: str | None = None
    """The event during the timing that makes the time doubtful, in one line: a GPU's slowdown, other programs."""
    rounds: int | None = None
    """Timed repetitions."""
    late: int | None = None
    """Repetitions for which the host was not ahead of the device: their times have the host's gaps in them."""
    code: str | None = None
    """Digest of the host code that its time depends on; see `warploom.bench.host_code`."""
    details: dict[str, Any] | None = None
    """Further figures of steps of models: ``phases`` (mean_ms, std_ms), ``tokens_per_s``, ``parameters``,
    ``held_memory_mib`` between forward and backward. ``host_cores`` is put there by `mark_large_hosts`."""

    @property
    def key(self) -> Key:
        """The fields that two records of the same measurement share."""
        case = json.dumps(self.case, sort_keys=True)
        return self.operator, self.suite, case, self.provider, self.mode

    @functools.cached_property
    def is_stale(self) -> bool:
        """True if what was measured is other code now; False if that cannot be found out.

        It plans the launches of a case, which takes time, and so does it once for a record.
        """
        bench = next((bench for bench in benches().values() if bench.record_name == self.operator), None)
        if bench is None or bench.x not in self.case:
            return True
        was, code = self.fingerprint, self.code
        if code and differs(code, lambda: code_of(bench, self.provider)):
            return True
        return differs(was, lambda: fingerprint(bench, self.case, self.provider, self.mode, was))


def own_provider(records: Iterable[Record], named: str = "") -> str:
    """Returns the provider that stands for an operator: `Bench.own`, ``warploom`` if it can run, else ``torch``."""
    ran = any(record.provider == KERNELS and record.status != "unsupported" for record in records)
    return named or (KERNELS if ran else "torch")


def spell(value: Any) -> str:
    """Write a parameter's value for a reader."""
    if isinstance(value, list | tuple):
        return "×".join(spell(item) for item in value)
    return value if isinstance(value, str) else json.dumps(value)


def as_option(value: Any) -> str:
    """Write a parameter's value as ``--case`` takes it: JSON, and a text that is none as it is."""
    if isinstance(value, str):
        try:
            json.loads(value)
        except ValueError:
            return value
    return json.dumps(value, separators=(",", ":"))


def append(folder: Path, records: Iterable[Record]) -> None:
    """Add records to ``records.jsonl`` of a folder, each a whole line; see `append_lines`."""
    known = ({name: value for name, value in asdict(r).items() if value is not None} for r in records)
    append_lines(folder / RECORDS, (json.dumps(fields, allow_nan=False) for fields in known))


def as_paths(paths: str | Path | Iterable[str | Path]) -> list[Path]:
    """Returns one path, or several, as a list."""
    return [Path(path) for path in ([paths] if isinstance(paths, str | Path) else paths)]


def load(paths: str | Path | Iterable[str | Path], *, every: bool = False) -> list[Record]:
    """Read records, in the order they were written; of those with one key in one file, the last.

    Args:
        paths: Folders that hold ``records.jsonl``, or such files; one or several.
        every: Return the earlier records of a key too.

    Returns:
        The records. Lines that are none of this version are left out, with a warning that counts them.

    Raises:
        WarploomError: A path holds no records, or no line of it is a record.

    Example:
        ```python
        from warploom.bench import load

        times = {(r.operator, r.mode, r.provider): r.ms for r in load("results/h200") if r.status == "ok"}
        ```
    """
    records: list[Record] = []
    for path in as_paths(paths):
        file = path / RECORDS if path.is_dir() else path
        if not file.is_file():
            raise WarploomError(f"{path}: no records here ({RECORDS} is written by `warploom bench`)")
        latest: dict[Key, Record] = {}
        found = load_lines(file, lambda fields: Record(**check_types(Record, fields)), "record")
        for record in found:
            latest.pop(record.key, None)
            latest[record.key] = record
        records += found if every else latest.values()
    return records


def save_environment(folder: Path, identifier: str, environment: Mapping[str, Any], run: str = "") -> None:
    """Put an environment into a folder's ``environment.json``, and among its ``runs`` what passes with this one.

    Args:
        folder: Of the records.
        identifier: From `environment_id`.
        environment: From `describe_environment`.
        run: The run's id; its commit, GPU, clocks and temperature are kept under it.
    """
    lasting, passing = split(environment)
    with lock(folder):
        known = load_environments(folder)
        runs = known.get(identifier, {}).get("runs", {}) | ({run: passing} if run else {})
        known[identifier] = {**known.get(identifier, {}), **lasting, "runs": runs}
        replace_text(folder / ENVIRONMENTS, json.dumps(known, indent=2) + "\n")


def load_environments(path: Path) -> dict[str, dict[str, Any]]:
    """Returns environments by id, of a folder of records or of the folder that a records file is in.

    Raises:
        WarploomError: The file holds something else.
    """
    file = (path if path.is_dir() else path.parent) / ENVIRONMENTS
    if not file.is_file():
        return {}
    text = read_text(file)
    try:
        environments = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise WarploomError(f"{file}: not JSON: {error}; mend it or move it away") from error
    if not isinstance(environments, dict) or not all(isinstance(one, dict) for one in environments.values()):
        raise WarploomError(f"{file}: expected an object of environments by id; mend it or move it away")
    return environments


def mark_large_hosts(records: Iterable[Record], environments: Mapping[str, Mapping[str, Any]]) -> list[Record]:
    """Returns records; a short time that was taken on a host of many cores has their number in its details."""
    marked = []
    for record in records:
        about = environments.get(record.environment, {})
        cores = about.get("host_cores") or about.get("cpu_cores") or 0
        if about.get("device") == "cuda" and cores > USUAL_CORES and record.ms and record.ms < SHORT_MS:
            record = replace(record, details={**(record.details or {}), "host_cores": cores})
        marked.append(record)
    return marked


def is_clean(record: Record, environments: Mapping[str, Mapping[str, Any]]) -> bool:
    """Returns True if a record's run is known in its environment, and was of a commit without changes."""
    run = environments.get(record.environment, {}).get("runs", {}).get(record.run, {})
    return "commit" in run and not run.get("dirty")
