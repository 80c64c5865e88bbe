"""Tables: rows of cells, for a terminal and for the page's template."""

from __future__ import annotations

import io
import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape


@dataclass(frozen=True)
class Cell:
    """One cell."""

    text: str
    state: str = ""
    """The badge of a result without a speed, or with a doubtful one; else empty."""
    reason: str = ""
    ours: bool = False
    peer: bool = False
    """True for a provider that is not of warploom: its failure is no alarm."""
    share: float | None = None
    """The length of the cell's shading, from 0 to 1."""


@dataclass(frozen=True)
class Table:
    """Column heads and rows. The first cells of a row are words, the others numbers."""

    heads: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    title: str = ""
    notes: Sequence[str] = ()
    """Lines of text below the table."""
    words: int = 1
    """The number of columns of words."""

    @classmethod
    def of(cls, heads: Sequence[str], rows: Sequence[Sequence[str]], **more: object) -> Table:
        """Returns a table of plain texts."""
        return cls(heads, [[Cell(text) for text in row] for row in rows], **more)  # type: ignore[arg-type]

    def drop_empty_columns(self) -> Table:
        """Returns the table without its empty columns."""
        keep = [i for i in range(len(self.heads)) if any(row[i].text or row[i].state for row in self.rows)]
        rows = [[row[i] for i in keep] for row in self.rows]
        return Table([self.heads[i] for i in keep], rows, self.title, self.notes, self.words)


def format_number(value: float | None) -> str:
    """Returns a number with four significant digits and no exponent, as text; empty for None."""
    if value is None:
        return ""
    magnitude = math.floor(math.log10(value)) if value > 0 else 0
    return f"{value:.{min(max(3 - magnitude, 0), 6)}f}"


def render_text(tables: Sequence[Table], width: int = 80) -> str:
    """Returns tables as text for a terminal of some width. Columns that do not fit are put below the others."""
    from rich import box
    from rich.console import Console, JustifyMethod
    from rich.table import Table as Drawn

    out = io.StringIO()
    console = Console(file=out, width=width, color_system=None, markup=False, highlight=False)
    for table in tables:
        if table.title:
            out.write(textwrap.fill(table.title, width, subsequent_indent="  ") + "\n")
        for columns in _group_columns(table, width):
            drawn = Drawn(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 0, 0, 1))
            for column in columns:
                wordy = any(not _is_number(row[column].text) for row in table.rows)
                side: JustifyMethod = "left" if column < table.words and wordy else "right"
                drawn.add_column(_fold(table.heads[column]), justify=side, overflow="fold")
            for row in table.rows:
                drawn.add_row(*(format_cell(row[column]) for column in columns))
            console.print(drawn)
        for note in table.notes:
            out.write(textwrap.fill(note, width, initial_indent="  ", subsequent_indent="    ") + "\n")
        out.write("\n")
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


def render_badge(state: str, words: str = "", peer: bool = False) -> str:
    """Returns a state as HTML, with other words if given."""
    return f'<span class="badge {state}{" peer" * peer}">{escape(words or state)}</span>'


def render_html(table: Table, kind: str = "") -> str:
    """Returns a table as HTML, of a class. The first column of a row is its head."""

    def draw(cell: Cell) -> str:
        about = ' class="ours"' * cell.ours
        about += "" if cell.share is None else f' style="--share:{cell.share:.2f}"'
        about += f' title="{escape(cell.reason)}"' if cell.reason else ""
        parts = [escape(cell.text)] if cell.text else []
        parts += [render_badge(cell.state, peer=cell.peer)] if cell.state else []
        return f"<td{about}>{' '.join(parts)}</td>"

    heads = "".join(f"<th>{escape(head)}</th>" for head in table.heads)
    rows = "\n".join(f"<tr><th>{escape(row[0].text)}</th>{''.join(map(draw, row[1:]))}</tr>" for row in table.rows)
    notes = "".join(f'<p class="note">{escape(note)}</p>' for note in table.notes)
    body = f'<table class="{kind}"><thead><tr>{heads}</tr></thead><tbody>\n{rows}\n</tbody></table>'
    return f'<div class="scroll">{body}</div>{notes}'


def _group_columns(table: Table, width: int) -> list[list[int]]:
    """Returns columns in groups that fit the width, each with the columns of words first."""
    lengths = [
        max(map(len, "\n".join([_fold(head), *(format_cell(row[i]) for row in table.rows)]).split("\n"))) + 2
        for i, head in enumerate(table.heads)
    ]
    first = list(range(table.words))
    groups, used = [list(first)], sum(lengths[: table.words])
    for i in range(table.words, len(table.heads)):
        if used + lengths[i] > width and len(groups[-1]) > len(first):
            groups.append(list(first))
            used = sum(lengths[: table.words])
        groups[-1].append(i)
        used += lengths[i]
    return groups


def format_cell(cell: Cell) -> str:
    """Returns a cell's text, or its state if it has none."""
    return cell.text + ("*" if cell.state == "disturbed" else "") if cell.text else cell.state


def _is_number(words: str) -> bool:
    return words.replace(".", "", 1).isdigit()


def _fold(name: str) -> str:
    """Returns a column's name, broken before its last word if it is long."""
    start, gap, end = name.rpartition(" " if " " in name else "_")
    return f"{start}{gap.strip()}\n{end}" if gap and len(name) > 11 else name
