"""How a run tells its user where it is: a bar on a terminal, one plain line per case anywhere else."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, TextIO

from warploom.bench.records import Record

if TYPE_CHECKING:
    from rich import progress


class Progress:
    """Is told of every unit of a run, in order."""

    def __init__(self, bar: progress.Progress, total: int, stream: TextIO) -> None:
        self.bar, self.stream = bar, stream
        self.task = bar.add_task("", total=total)

    def begin(self, label: str) -> None:
        """A unit is about to be measured."""
        self.bar.update(self.task, description=label)

    def end(self, label: str, records: Sequence[Record]) -> None:
        """A unit is finished; without records, because there was nothing to do."""
        self.bar.advance(self.task)
        if records and self.bar.disable:
            shown = [record for record in records if record.status != "unsupported"]
            results = ", ".join(f"{r.provider} {r.status if r.ms is None else f'{r.ms:.4g} ms'}" for r in shown)
            task = self.bar.tasks[0]
            print(f"[{task.completed:g}/{task.total:g}] {label}: {results}", file=self.stream, flush=True)


@contextmanager
def show_progress(total: int, stream: TextIO | None = None) -> Iterator[Progress]:
    """Show the progress of ``total`` units on a stream, by default standard error."""
    from rich import progress
    from rich.console import Console

    columns = (
        progress.BarColumn(bar_width=24),
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
