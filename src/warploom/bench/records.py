"""What a run leaves behind: one `Record` per (case, provider, mode), a line of JSON each.

Records are only ever appended. A later record with the same key replaces an earlier one when they are read,
so a run that is resumed or repeated needs to rewrite nothing, and a killed run loses at most its last line.
Several runs may write into one folder at once.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from warploom.bench.fingerprint import LIMIT, differs, fingerprint
from warploom.bench.storage import append_lines, load_lines, locked, read_text, replace_text, typed
from warploom.errors import WarploomError
from warploom.ops import benches
from warploom.ops.spec import Bench

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

__all__ = [
    "LIMIT",
    "RECORDS",
    "Key",
    "Record",
    "append",
    "is_stale",
    "load",
    "load_environments",
    "operator_name",
    "save_environment",
]

RECORDS = "records.jsonl"
ENVIRONMENTS = "environment.json"
Key = tuple[str, str, str, str, str]


@dataclass(frozen=True)
class Record:
    """One provider's result on one case in one mode. ``None`` stands for what was not measured."""

    operator: str
    """The bench's name with underscores."""
    suite: str
    case: dict[str, Any]
    provider: str
    mode: str
    """``fwd``, ``bwd``, or ``fwd_graph`` for the forward replayed from a CUDA graph."""
    fingerprint: str
    """Of the kernels that the provider launches; see `warploom.bench.fingerprint`."""
    environment: str
    """Id into ``environment.json``."""
    status: str = "ok"
    """``ok``, ``incorrect``, ``oom``, ``unsupported`` or ``error``."""
    reason: str | None = None
    """Why the status is not ``ok``, in one line."""
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
    """What ``max_error`` may be."""
    host_us: float | None = None
    """Median wall time from entering the call to its return."""
    disturbed: str | None = None
    """What happened to the GPU while the case was timed that makes the time doubtful, in one line."""

    @property
    def key(self) -> Key:
        """What makes two records the same measurement."""
        case = json.dumps(self.case, sort_keys=True)
        return self.operator, self.suite, case, self.provider, self.mode


def operator_name(bench: Bench) -> str:
    """A bench's name as records carry it."""
    return bench.name.replace("-", "_")


def append(folder: Path, records: Iterable[DataclassInstance], file_name: str = RECORDS) -> None:
    """Add records to a file of a folder, by default ``records.jsonl``, each a whole line; see `append_lines`.

    Raises:
        WarploomError: The file cannot be written.
    """
    append_lines(folder / file_name, (json.dumps(asdict(record), allow_nan=False) for record in records))


def load(paths: Iterable[Path]) -> list[Record]:
    """Read records, in the order they were written; of those with one key in one file, the last.

    Args:
        paths: Folders that hold ``records.jsonl``, or such files.

    Returns:
        The records. Lines that are none of this version are left out, with a warning that counts them.

    Raises:
        WarploomError: A path holds no records, or no line of it is a record.
    """
    records: list[Record] = []
    for path in paths:
        file = path / RECORDS if path.is_dir() else path
        if not file.is_file():
            raise WarploomError(f"{path}: no records here ({RECORDS} is written by `warploom bench`)")
        latest: dict[Key, Record] = {}
        for record in load_lines(file, lambda fields: Record(**typed(Record, fields)), "record"):
            latest.pop(record.key, None)
            latest[record.key] = record
        records += latest.values()
    return records


def save_environment(folder: Path, identifier: str, environment: Mapping[str, Any]) -> None:
    """Put an environment into a folder's ``environment.json``, in the place of an earlier one with its id.

    Raises:
        WarploomError: The file cannot be written, or what is there is no such file.
    """
    with locked(folder):
        known = load_environments(folder) | {identifier: dict(environment)}
        replace_text(folder / ENVIRONMENTS, json.dumps(known, indent=2) + "\n")


def load_environments(path: Path) -> dict[str, dict[str, Any]]:
    """Environments by id, of a folder of records or of the folder that a records file is in.

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


def is_stale(record: Record) -> bool:
    """Whether the kernels that were measured are others now; not, where that cannot be found out."""
    bench = next((bench for bench in benches().values() if operator_name(bench) == record.operator), None)
    if bench is None or bench.x not in record.case:
        return True
    was = record.fingerprint
    return differs(was, lambda: fingerprint(bench, record.case, record.provider, record.mode, was))
