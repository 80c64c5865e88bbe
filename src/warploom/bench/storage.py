"""Files that several processes may write at once: lines are appended under a lock, whole files replaced.

An operating system that cannot read or write raises `OSError`, here a `WarploomError` that names the file.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import mmap
import os
import types
import typing
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from filelock import FileLock

from warploom.errors import WarploomError

LOCK = ".lock"
LOCK_SECONDS = 60.0
"""Seconds to wait for a lock, which is held for milliseconds: a file system without locks leaves one behind."""
PROBE_BYTES = 16 * 1024
_LONGEST_REASON = 200

T = TypeVar("T")
_log = logging.getLogger("warploom")


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        reason = "a file has this name" if isinstance(error, FileExistsError) else error.strerror or error
        raise WarploomError(f"{path}: cannot be written: {reason}") from error


@contextmanager
def lock(folder: Path) -> Iterator[None]:
    """Make a folder, and keep other processes from writing to it through this module."""
    with _writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(str(folder / LOCK), timeout=LOCK_SECONDS):
            yield


def probe(folder: Path, *names: str) -> None:
    """Find out, before any work is done, whether its results can be written.

    Args:
        folder: Made if it is not there. A small file is written, flushed to disk and removed.
        names: Files of the folder that will be written; those that are there are opened, and not changed.
    """
    with _writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        _write_new(folder, bytes(PROBE_BYTES)).unlink()
    for name in names:
        with _writing(folder / name):
            if (folder / name).exists():
                (folder / name).open("r+b").close()


def append_lines(path: Path, lines: Iterable[str]) -> None:
    """Append lines to a file in one write, and flush them to disk.

    What follows the last line break, left by a process that was killed while writing, is cut off first. Where the
    file cannot be written, lines that were there before stay.
    """
    text = "".join(f"{line}\n" for line in lines).encode()
    with lock(path.parent), _writing(path), path.open("a+b") as file:
        size = file.seek(0, os.SEEK_END)
        if size:
            with mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ) as there:
                whole = there.rfind(b"\n") + 1
            file.truncate(whole)
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def replace_text(path: Path, text: str) -> None:
    """Write a file so that a reader, or a process killed in between, finds the old text or the new one."""
    with _writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        target = Path(os.path.realpath(path))  # a link stays a link
        content = text.encode("utf-8", "backslashreplace")
        if target.exists() and not target.is_file():
            target.write_bytes(content)  # a device or a pipe; a folder fails here
            return
        fresh = _write_new(target.parent, content)
        try:
            fresh.replace(target)
        except OSError:
            fresh.unlink()
            raise


def _write_new(folder: Path, content: bytes) -> Path:
    """Write a new file under a name that no other process takes, and flush it; leave none that is not whole."""
    path = folder / f".{uuid.uuid4().hex}.tmp"
    try:
        with path.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
    except BaseException:  # an interrupt leaves no file behind either
        path.unlink(missing_ok=True)
        raise
    return path


def read_text(path: Path) -> str:
    """Read a text in UTF-8."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise WarploomError(f"{path}: cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise WarploomError(f"{path}: not a text in UTF-8") from error


def load_lines(path: Path, parse: Callable[[Any], T], what: str) -> list[T]:
    """Read a file with a JSON value on every line. What follows the last line break is torn, and left out.

    Args:
        path: The file.
        parse: Makes a record of a value; raises where it cannot.
        what: What the lines should be, for messages.

    Returns:
        The records. Lines that are none are left out, with a warning that counts them; a file of none is an error.
    """
    try:
        lines = path.read_bytes().decode("utf-8", "replace").split("\n")[:-1]
    except OSError as error:
        raise WarploomError(f"{path}: cannot be read: {error.strerror or error}") from error
    records: list[T] = []
    bad: list[str] = []
    for number, line in enumerate(lines, start=1):
        try:
            records.append(parse(_from_json(line)))
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
            bad.append(f"{path}:line {number}: {str(error)[:_LONGEST_REASON]}")
    if bad and not records:
        raise WarploomError(f"{path}: no file of {what}s, or of another version: {bad[0].removeprefix(f'{path}:')}")
    if bad:
        _log.warning("%d of %d lines are left out, as of another version: %s", len(bad), len(lines), bad[0])
    return records


def _from_json(text: str) -> Any:
    """Returns a JSON value in which every number is finite, and every text can be written as UTF-8."""
    value = json.loads(text, parse_float=_finite, parse_constant=_finite, parse_int=_whole)
    if "\\u" in text:
        json.dumps(value, ensure_ascii=False).encode()  # half of a surrogate pair cannot
    return value


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"not a finite number: {text}")
    return value


def _whole(text: str) -> int:
    _finite(text)
    return int(text)


def check_types(kind: type, fields: object) -> dict[str, Any]:
    """Returns fields of a dataclass that came from JSON; `ValueError` for another name or type, or less than 0."""
    if not isinstance(fields, Mapping):
        raise ValueError("not a JSON object")
    known = _types(kind)
    for name, value in fields.items():
        if name not in known:
            raise ValueError(f"unknown field {name!r}")
        if type(value) not in known[name] or (isinstance(value, int | float) and value < 0):
            raise ValueError(f"{name} is {value!r}")
    required = [field.name for field in dataclasses.fields(kind) if field.default is dataclasses.MISSING]
    if missing := [name for name in required if name not in fields]:
        raise ValueError(f"without {', '.join(missing)}")
    return dict(fields)


@cache
def _types(kind: type) -> dict[str, tuple[type, ...]]:
    """Returns the types that JSON values of a dataclass's fields may have."""
    known: dict[str, tuple[type, ...]] = {}
    for name, hint in typing.get_type_hints(kind).items():
        parts = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
        found = [typing.get_origin(part) or part for part in parts]
        known[name] = (*found, int) if float in found else tuple(found)
    return known
