"""What a run leaves behind: one `Record` per (case, provider, mode), a line of JSON each.

Records are only ever appended. A later record with the same key replaces an earlier one when they are read,
so a run that is resumed or repeated needs to rewrite nothing, and a killed run loses at most its last line.
"""

from __future__ import annotations

import ast
import fnmatch
import functools
import hashlib
import json
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from warploom.errors import WarploomError
from warploom.ops import benches, register
from warploom.ops.spec import Bench, Operator

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

__all__ = [
    "LIMIT",
    "RECORDS",
    "Key",
    "Record",
    "adopt",
    "append",
    "current_digest",
    "current_digests",
    "is_stale",
    "load",
    "load_environments",
    "operator_name",
    "save_environment",
    "source_digest",
]

RECORDS = "records.jsonl"
ENVIRONMENTS = "environment.json"
LIMIT = "limit"
"""The provider's name under which the measured ceiling is recorded."""

_PACKAGE = Path(__file__).parents[1]
_PEERS = "peers.py"
_CONTRACT = ("warploom.ops", "warploom.ops.spec")
"""Descriptions for tests and bench: imported by operators, but nothing of what their kernels do."""

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
    source_digest: str
    """Of the code that the provider runs; see `current_digests`."""
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
    """Add records to a file of a folder, by default ``records.jsonl``, and flush them to disk, each a whole line.

    A torn last line, left by a run that was killed while writing, is removed first.
    """
    folder.mkdir(parents=True, exist_ok=True)
    file_path = folder / file_name
    if file_path.is_file():
        written = file_path.read_bytes()
        if not written.endswith(b"\n"):
            file_path.write_bytes(written[: written.rfind(b"\n") + 1])
    with file_path.open("ab") as file:
        for record in records:
            file.write(json.dumps(asdict(record), allow_nan=False).encode() + b"\n")
            file.flush()


def load(paths: Iterable[Path]) -> list[Record]:
    """Read records, in the order they were written; of those with one key in one file, the last.

    Args:
        paths: Folders that hold ``records.jsonl``, or such files.

    Raises:
        WarploomError: A path holds no records, or a line before the last is not a record.
    """
    records: list[Record] = []
    for path in paths:
        file = path / RECORDS if path.is_dir() else path
        if not file.is_file():
            raise WarploomError(f"{path}: no records here ({RECORDS} is written by `warploom bench`)")
        # What follows the last line break is empty, or the torn line of a killed run.
        lines = file.read_text(encoding="utf-8", errors="replace").split("\n")[:-1]
        latest: dict[Key, Record] = {}
        for number, line in enumerate(lines, start=1):
            record = _parse(line, f"{file}:{number}")
            latest.pop(record.key, None)
            latest[record.key] = record
        records += latest.values()
    return records


def _parse(line: str, where: str) -> Record:
    try:
        return Record(**json.loads(line))
    except (ValueError, TypeError) as error:
        raise WarploomError(f"{where}: not a record of this version: {error}") from error


def save_environment(folder: Path, identifier: str, environment: Mapping[str, Any]) -> None:
    """Put an environment into a folder's ``environment.json``, in the place of an earlier one with its id."""
    folder.mkdir(parents=True, exist_ok=True)
    known = load_environments(folder) | {identifier: dict(environment)}
    file = folder / ENVIRONMENTS
    fresh = file.with_suffix(".tmp")
    fresh.write_text(json.dumps(known, indent=2) + "\n", encoding="utf-8")
    fresh.replace(file)


def load_environments(path: Path) -> dict[str, dict[str, Any]]:
    """Environments by id, of a folder of records or of the folder that a records file is in."""
    file = (path if path.is_dir() else path.parent) / ENVIRONMENTS
    if not file.is_file():
        return {}
    environments: dict[str, dict[str, Any]] = json.loads(file.read_text(encoding="utf-8"))
    return environments


def source_digest(folder: Path, leave_out: Sequence[str] = ()) -> str:
    """Fingerprint of an operator's folder and of the modules here that it imports.

    Args:
        folder: The operator's.
        leave_out: Patterns for the names of files that do not count, nor what only they import.
    """
    return _digest(sorted(folder.rglob("*.py")), folder, leave_out)


def _fits(file: Path, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatch(file.name, pattern) for pattern in patterns)


def _digest(own: Sequence[Path], folder: Path, leave_out: Sequence[str] = ()) -> str:
    digest = hashlib.sha256()
    own = [file for file in own if not _fits(file, leave_out)]
    for root, files in ((folder, own), (_PACKAGE, sorted(_imported(own, leave_out) - set(own)))):
        for file in files:
            digest.update(f"{file.relative_to(root).as_posix()}\n{file.stat().st_size}\n".encode())
            digest.update(file.read_bytes())
    return digest.hexdigest()


def _imported(files: Iterable[Path], leave_out: Sequence[str]) -> set[Path]:
    """Modules of this package that files import, and what those import in turn; of those with other names."""
    found: set[Path] = set()
    waiting = list(files)
    while waiting:
        for node in ast.walk(ast.parse(waiting.pop().read_bytes())):
            names: list[str] = []
            if isinstance(node, ast.ImportFrom):
                names = [f"{node.module}", *(f"{node.module}.{alias.name}" for alias in node.names)]
            elif isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            for name in names:
                file = _PACKAGE.parent.joinpath(*name.split(".")).with_suffix(".py")
                if not name.startswith("warploom.") or name in _CONTRACT or _fits(file, leave_out):
                    continue
                if file.is_file() and file not in found:
                    found.add(file)
                    waiting.append(file)
    return found


def current_digest(bench: Bench, leave_out: Sequence[str] = ()) -> str:
    """`source_digest` of a bench's operator as its code is now."""
    if bench.sources:
        folder = Path(os.path.commonpath([file.parent for file in bench.sources]))
        return _digest(sorted(bench.sources), folder, leave_out)
    source = sys.modules[bench.operator.reference.__module__].__file__
    if source is None:
        raise WarploomError(f"{bench.name}: its reference comes from no file, so its code has no digest")
    return source_digest(Path(source).parent, leave_out)


def current_digests(bench: Bench, leave_out: Sequence[str] = ()) -> dict[str, str]:
    """`current_digest` for each provider of a bench, and the limit; without what ``bench.unused`` says of a case.

    Of the operator, a provider from its ``peers.py`` runs nothing else, and its records outlast a change to the
    kernels.
    """
    whole, found = current_digest(bench, leave_out), {}
    for name, builder in bench.every_provider.items():
        module = getattr(builder, "func", builder).__module__  # of a partial, what it completes
        file = Path(getattr(sys.modules[module], "__file__", None) or "")
        found[name] = _file_digest(file) if file.name == _PEERS else whole
    return {**found, LIMIT: whole}


@functools.cache
def _file_digest(file: Path) -> str:
    return _digest([file], file.parent)


def is_stale(record: Record) -> bool:
    """Whether the code is no longer the code that was measured."""
    bench = _bench_of(record.operator)
    if bench is None:
        return True
    digests = _digests(record.operator, bench.unused(record.case))
    return record.source_digest != digests.get(record.provider, digests[LIMIT])


def _bench_of(operator: str) -> Bench | None:
    return next((bench for bench in benches().values() if operator_name(bench) == operator), None)


def adopt(operators: Iterable[Operator], benches: Iterable[Bench]) -> None:
    """`warploom.ops.register`, after which records of these benches are known to be fresh or stale."""
    register(operators, benches)
    _digests.cache_clear()


@functools.cache
def _digests(operator: str, leave_out: tuple[str, ...]) -> dict[str, str]:
    """Digests of a registered bench, read once: a report asks for thousands of records."""
    bench = _bench_of(operator)
    return {} if bench is None else current_digests(bench, leave_out)
