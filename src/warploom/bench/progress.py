"""The progress of a run: finished cases above a bar on a terminal, one plain line per case anywhere else."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, TextIO

from warploom.bench.records import Record

if TYPE_CHECKING:
    from rich import progress


BESIDE = 12 + 2 * 4 + 1 + 8 + 4
"""Columns that bar, count and time left take beside the name of a case."""


class Progress:
    """The display of a run's progress."""

    def __init__(self, bar: progress.Progress, total: int, stream: TextIO) -> None:
        self.bar, self.stream = bar, stream
        self.task = bar.add_task("", total=total)

    def begin(self, label: str) -> None:
        """Show the unit that is about to be measured."""
        self.bar.update(self.task, description=shorten(label, self.bar.console.width - BESIDE))

    def end(self, label: str, records: Sequence[Record]) -> None:
        """Show a finished unit; one without records had nothing to do."""
        self.bar.advance(self.task)
        if not records:
            return
        shown = [record for record in records if record.status != "unsupported"]
        results = ", ".join(f"{r.provider} {r.status if r.ms is None else f'{r.ms:.4g} ms'}" for r in shown)
        task = self.bar.tasks[0]
        place = f"[{task.completed:g}/{task.total:g}]"
        if self.bar.disable:
            print(f"{place} {label}: {results}", file=self.stream, flush=True)
            return
        room = self.bar.console.width - len(place) - 3
        results = results if len(results) <= room // 2 else f"{results[: room // 2 - 1]}…"
        line = f"{place} {shorten(label, room - len(results))}: {results}"
        self.bar.console.print(line, markup=False, highlight=False, no_wrap=True)


def shorten(text: str, most: int) -> str:
    """Returns a text that is too long without its middle."""
    return text if len(text) <= most else f"{text[: (most - 1) // 2]}…{text[len(text) - most // 2 :]}"


@contextmanager
def show_progress(total: int, stream: TextIO | None = None) -> Iterator[Progress]:
    """Show the progress of ``total`` units on a stream, by default standard error."""
    from rich import progress
    from rich.console import Console

    columns = (
        progress.BarColumn(bar_width=12),
        progress.MofNCompleteColumn(),
        progress.TimeRemainingColumn(),
        progress.TextColumn("{task.description}"),
    )
    stream = stream or sys.stderr
    terminal = stream.isatty()
    bar = progress.Progress(
        *columns,
        console=Console(file=stream),
        transient=True,
        disable=not terminal,
        redirect_stdout=False,  # what others print is not shown above the bar
        redirect_stderr=False,
    )
    with bar if terminal else nullcontext():
        yield Progress(bar, total, stream)
