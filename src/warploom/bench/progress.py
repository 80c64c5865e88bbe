"""How a run tells its user where it is: a bar on a terminal, one plain line per case anywhere else."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from warploom.bench.records import Record


class Progress(Protocol):
    """Is told of every unit of a run, in order."""

    def begin(self, label: str) -> None:
        """A unit is about to be measured."""

    def end(self, label: str, records: Sequence[Record]) -> None:
        """A unit is finished; without records, because there was nothing to do."""


@contextmanager
def show_progress(total: int) -> Iterator[Progress]:
    """Show the progress of ``total`` units on standard error."""
    if sys.stderr.isatty():
        with _bar(total) as bar:
            yield bar
    else:
        yield _Lines(total)


@contextmanager
def _bar(total: int) -> Iterator[Progress]:
    from rich import progress
    from rich.console import Console

    columns = (
        progress.BarColumn(bar_width=24),
        progress.MofNCompleteColumn(),
        progress.TimeRemainingColumn(),
        progress.TextColumn("{task.description}"),
    )
    with progress.Progress(*columns, console=Console(stderr=True), transient=True) as shown:
        task = shown.add_task("", total=total)

        class Bar:
            def begin(self, label: str) -> None:
                shown.update(task, description=label)

            def end(self, label: str, records: Sequence[Record]) -> None:
                shown.advance(task)

        yield Bar()


class _Lines:
    def __init__(self, total: int) -> None:
        self.total = total
        self.count = 0

    def begin(self, label: str) -> None:
        pass

    def end(self, label: str, records: Sequence[Record]) -> None:
        self.count += 1
        if records:
            results = ", ".join(f"{r.provider} {_result(r)}" for r in records)
            print(f"[{self.count}/{self.total}] {label}: {results}", file=sys.stderr, flush=True)


def _result(record: Record) -> str:
    return record.status if record.ms is None else f"{record.ms:.4g} ms"
