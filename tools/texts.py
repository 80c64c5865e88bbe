"""Write the tables and pictures of README and documentation from records, so that no number is typed by hand.

``python tools/texts.py results/h200 results/h100`` rewrites what stands between the marks of ``TEXTS``, and the
pictures in ``docs/figures``. No number mixes GPUs: a row of README and a picture are of the first folder with the
typical case, other tables have rows for each. Records of other code or of no clean commit are left out. Of training
over several GPUs there are no records, but logs in ``RESULTS``.
"""

from __future__ import annotations

import json
import re
import statistics
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from overview import draw_overview

from warploom.bench.environment import device_name
from warploom.bench.records import LIMIT, Record, is_clean, load, load_environments, mark_large_hosts
from warploom.bench.storage import load_lines, read_text, replace_text
from warploom.errors import ArgumentError
from warploom.ops import FOLDERS, benches
from warploom.ops.spec import KERNELS, Case
from warploom.report.chart import make_charts, render_picture
from warploom.report.labels import format_mode, format_size, sort_xs
from warploom.report.palette import choose_looks
from warploom.report.panels import Panel, Section, arrange
from warploom.report.published import MEASURED, PublishedCase, list_published_cases
from warploom.report.rivals import Summary, format_ratio, summarize, summarize_mode
from warploom.report.table import Table, format_cell, format_number
from warploom.testing.specs import load_specs

__all__ = ["ROWS", "markdown_table", "replace_between", "speed_table", "update"]

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "results"
WRITTEN = "written by tools/texts.py from records; do not edit"
GUIDES = tuple(
    str(text.relative_to(ROOT))
    for text in sorted(ROOT.glob("src/warploom/ops/*/*.md"))
    if WRITTEN in text.read_text(encoding="utf-8")
)
TEXTS = (
    "README.md",
    "docs/results.md",
    "docs/published-tables.md",
    "docs/transformer.md",
    "docs/many-gpus.md",
    "docs/serving.md",
    *GUIDES,
)
MARK = f"<!-- {{}}: {WRITTEN} -->"
END = "<!-- end of {} -->"
NOTHING = "There are no records of the present code yet."


def markdown(tables: Sequence[Table]) -> str:
    """Tables in GitHub's Markdown."""
    lines: list[str] = []
    for table in tables:
        lines += [f"**{_escape(table.title)}**", ""] if table.title else []
        lines.append(_line(table.heads))
        lines.append("|" + " --- |" * table.words + " ---: |" * (len(table.heads) - table.words))
        lines += [_line([format_cell(cell) for cell in row]) for row in table.rows]
        lines += ["", *(f"- {_escape(note)}" for note in table.notes)] if table.notes else []
        lines.append("")
    return "\n".join(lines).rstrip("\n")


def markdown_table(heads: Sequence[str], rows: Sequence[Sequence[str]], words: int = 1) -> str:
    """A Markdown table whose first ``words`` columns are words, and the others numbers; `NOTHING` without rows."""
    return markdown([Table.of(heads, rows, words=words)]) if rows else NOTHING


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(map(_escape, cells)) + " |"


def _escape(cell: str) -> str:
    return cell.replace("|", r"\|").replace("_", r"\_").replace("*", r"\*").replace("<", "&lt;")


@dataclass(frozen=True)
class Row:
    """One row of the README: a kind of work, and the case that stands for it."""

    name: str
    operator: str
    mode: str
    kind: Mapping[str, Any]
    """Parameters that all its cases have."""
    typical: Mapping[str, Any]
    """Further parameters of the case whose time is shown."""
    shape: str
    suite: str = ""
    """Only the cases of this one."""


_LRPE = "12 × 4k × 12 × 128, bf16"
_TRAINED = "4 × 8k × 16 × 128, causal, bf16"
_BF16, _SILU, _ROTATE = {"dtype": "bfloat16"}, {"activation": "silu"}, {"encoding": "rotate"}
_TRAINING = {"batch": 4, "heads": 16, "causal": True, "n": 8192, "head_dim": 128}
_FLOAT32 = {"head_dim": 128, "n": 8192, "float32_precision": "highest"}
_DECODE = {"batch": 8, "m": 8192, "key_heads": 8, "cache": "dense"}
_LINEAR = {"batch": 1, "n": 8192, "heads": 96, "head_dim": 128, "decay": "head"}
_FACTORS = {"batch": 8, "m": 32768, "kv_rank": None}
_TPA = {"heads": 16, "kv_rank": 2, "n": 8192}
_STEP = {"size": "md", "context_length": 512}
ROWS = (
    Row("RoPE", "lrpe_rope", "fwd", {}, {"n": 4096}, _LRPE),
    Row("LRPE rotate + SiLU", "lrpe_rotate", "fwd", _SILU, {"n": 4096}, _LRPE),
    Row("the same", "lrpe_rotate", "bwd", _SILU, {"n": 4096}, _LRPE),
    Row("LRPE cosine", "lrpe_cosine", "fwd", {"activation": "none"}, {"n": 4096}, _LRPE),
    Row("flash attention, training", "flash_attention", "fwd", _BF16, _TRAINING, _TRAINED, "training"),
    Row("the same", "flash_attention", "bwd", _BF16, _TRAINING, _TRAINED, "training"),
    Row("flash attention, float32", "flash_attention", "fwd", {}, _FLOAT32, "1 × 8k × 1 × 128, causal", "float32"),
    Row("attention, decoding", "attention_decode", "fwd", {}, _DECODE, "8 × 8k cache, 32:8 heads of 128"),
    Row("linear attention, rotate", "linear_attention", "fwd", _ROTATE, _LINEAR, "1 × 8k × 96 × 128, decays, bf16"),
    Row("TPA decode", "tpa_decode", "fwd", {}, _FACTORS, "8 × 32k cache, 32 heads"),
    Row("TPA attention", "tpa_attention", "fwd", {}, _TPA, "1 × 8k × 16 × 128, rank 2, bf16"),
    Row("Transformer, training step", "transformer", "train", {}, _STEP, "md, 4 × 512 tokens, bf16"),
)
COMPARED = (
    "fastest alternative",
    "its time / ours",
    "lost / level (below 1: least) / compared",
    "measured / in suites",
)
"""Heads of the cells that `_compared` returns."""
UNCOUNTED = ("quick", "trial")
"""Suites whose cases are others' or nobody's: for a first look, and for tests."""


def by_gpu(records: Sequence[Record], devices: Mapping[str, str]) -> dict[str, list[Record]]:
    """Records by the names of their GPUs, the first folder's first."""
    found: dict[str, list[Record]] = {}
    for record in records:
        found.setdefault(devices[record.environment], []).append(record)
    return found


def gpu_of(section: Section, devices: Mapping[str, str], panel_device: str = "") -> str:
    """The model of the GPU, ``H100`` of ``NVIDIA H100 80GB HBM3``, of a section that has one or of some panels."""
    device = panel_device or devices[section.points[0].record.environment]
    return next((word for word in device.split() if any(map(str.isdigit, word))), device)


def speed_table(records: Sequence[Record], devices: Mapping[str, str]) -> str:
    """Kinds of work: a typical time, its share of the limit, and all cases beside the fastest alternative."""
    rows = [cells for row in ROWS if (cells := _row(row, records, devices))]
    heads = ["operator", "typical shape", "mode", "GPU", "ms", "of the limit", *COMPARED]
    return markdown_table(heads, rows, words=4)


def speed_peers(records: Sequence[Record], devices: Mapping[str, str]) -> str:
    """The peers of each row of `speed_table`, and those that were not there."""
    lines, name = [], ""
    for row in ROWS:
        name = name if row.name == "the same" else row.name
        section, found = _summary(row, records, devices)
        if section and found and found.counts:
            lines.append(f"- **{name}, {row.mode}, {gpu_of(section, devices)}.** {_peers([found])}")
    return "\n".join(lines) or NOTHING


def _row(row: Row, records: Sequence[Record], devices: Mapping[str, str]) -> list[str]:
    """Cells of a row; none without a time of ours."""
    section, found = _summary(row, records, devices)
    if section is None or found is None or not found.counts:  # of the others alone
        return []
    chosen = [point.record for point in section.points]
    ours = [record for record in chosen if _is_typical(row, record) and record.provider in section.own_names]
    typical = min(ours, key=lambda record: section.own_names.index(record.provider), default=None)
    ms, share = (_ms(typical), _percent(typical.limit_fraction)) if typical else ("–", "–")
    way = typical.provider.removeprefix(KERNELS).lstrip("+") if typical else ""
    shape = f"{row.shape}, {way}" if way else row.shape
    compared = _compared(found, lambda case: _has(case, row.kind), row.suite)
    if not typical and not found.pairs:
        compared[0] = "its kernels have changed since it was measured"
    return [row.name, shape, row.mode, gpu_of(section, devices), ms, share, *compared]


def _ms(record: Record) -> str:
    """Returns a time, marked where something disturbed it or where a large host adds to it."""
    large = "host_cores" in (record.details or {})
    return format_number(record.ms) + "*" * bool(record.disturbed) + "¹" * large


def _summary(
    row: Row, records: Sequence[Record], devices: Mapping[str, str]
) -> tuple[Section, Summary] | tuple[None, None]:
    """Returns what the first GPU that timed the typical case has of a row, else the first with any."""
    chosen = [
        record
        for record in records
        if record.operator == row.operator
        and record.mode == row.mode
        and (not row.suite or record.suite == row.suite)
        and _has(record.case, row.kind)
    ]
    if not chosen:
        return None, None
    chosen = max(by_gpu(chosen, devices).values(), key=lambda own: any(_is_typical(row, record) for record in own))
    (section,) = arrange(chosen, devices)
    return section, summarize_mode(section, section.panels, "", row.mode)


def _has(case: Mapping[str, Any], parameters: Mapping[str, Any]) -> bool:
    return all(case.get(name) == value for name, value in parameters.items())


def _is_typical(row: Row, record: Record) -> bool:
    """Returns True for a time of ours of the case that is shown."""
    ours = record.provider.startswith(KERNELS) and bool(record.ms)
    return ours and record.mode == row.mode and _has(record.case, row.kind) and _has(record.case, row.typical)


def _compared(found: Summary, belongs: Callable[[Case], bool] = lambda case: True, suite: str = "") -> list[str]:
    """Cells on alternatives, and on how many of the cases that suites have were measured.

    Args:
        found: What was measured.
        belongs: Returns True for a case of the suites that belongs to it.
        suite: The only suite that counts; all but `UNCOUNTED` if it is empty.
    """
    cases = f"{sum(found.counts.values())} / {_count_in_suites(found, belongs, suite)}"
    if disturbed := found.counts.get("disturbed"):
        cases += f", {disturbed} disturbed"
    if not found.pairs:
        return ["none in the same run", "–", "–", cases]
    return [found.alternatives, found.ratios, f"{found.lost} / {found.level_told} / {len(found.pairs)}", cases]


def _peers(summaries: Sequence[Summary]) -> str:
    """Names the peers, with the number of cases in which they were timed, and why in others they were not."""
    timed, absent = Counter[str](), dict[str, Counter[str]]()
    for found in summaries:
        timed += found.peers
        for name, reasons in found.absent.items():
            for reason, count in reasons.items():
                absent.setdefault(" ".join(reason.split()), Counter())[name] += count
    cases = sum(len(found.cases) for found in summaries)
    told = {f"Of {cases} case{'s' * (cases != 1)} timed beside ours": timed} | absent
    return "; ".join(f"{_cut(what)}: {_with_counts(names) or 'nobody'}" for what, names in told.items()) + "."


def _cut(words: str) -> str:
    return _escape(words if len(words) <= 100 else f"{words[:99]}…")


def _with_counts(names: Counter[str]) -> str:
    return ", ".join(f"`{name}` {count}" for name, count in names.most_common())


def _count_in_suites(found: Summary, belongs: Callable[[Case], bool], suite: str) -> int:
    """The number of cases that the suites of a bench have on a GPU in a mode, at least as many as were measured."""
    bench = benches().get(found.operator.replace("_", "-"))
    mode = found.mode.removesuffix("_graph")
    names = [suite] if suite else [name for name in bench.suites if name not in UNCOUNTED] if bench else []
    cases = [case for name in names if bench and mode in bench.modes for case in bench.suites[name]("cuda")]
    own = [case.point.record.case for case in found.cases]
    return len({json.dumps(dict(case), sort_keys=True) for case in [*own, *filter(belongs, cases)]})


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:.0f} %"


def _spread(shares: Sequence[float]) -> str:
    """The median of shares of the limit, the least and the most; empty without one."""
    median, least, most = (_percent(f(shares)) if shares else "" for f in (statistics.median, min, max))
    return f"{median} ({least} … {most})" if shares else ""


def whole_tables(records: Sequence[Record], devices: Mapping[str, str]) -> str:
    """Every bench of the first GPU: a table with a row for each combination of parameters and mode."""
    return "\n\n".join(_whole(records, devices, name, "##") for name in [*by_gpu(records, devices)][:1]) or NOTHING


TITLES = {
    "lrpe_rope": "RoPE",
    "lrpe_rotate": "LRPE rotate",
    "lrpe_cosine": "LRPE cosine",
    "lrpe_rotate_md": "LRPE rotate on grids",
    "lrpe_cosine_md": "LRPE cosine on grids",
    "flash_attention": "Flash attention",
    "attention_decode": "Attention, decoding",
    "attention_serving": "Attention, serving",
    "attention_masks": "Attention with masks",
    "attention_biases": "Attention with biases",
    "attention_trees": "Attention of proposed tokens",
    "attention_jvp": "Attention, forward mode",
    "linear_attention": "Linear attention",
    "tpa_attention": "Tensor-product attention",
    "tpa_decode": "Tensor-product attention, decoding",
    "context_parallel": "Attention over several GPUs",
    "llama": "Llama of transformers",
    "transformer": "Transformer LM",
}
"""Names of benches for a reader."""


def menu(records: Sequence[Record], devices: Mapping[str, str]) -> str:
    """A table of what the page has, an operator in a row with a link for each GPU."""
    gpus = [*by_gpu(records, devices)]
    sections = {
        gpu: {s.operator: s for s in arrange(own, devices)} for gpu, own in by_gpu(records, devices).items()
    }
    rows = []
    known = dict.fromkeys([*TITLES, *(name for found in sections.values() for name in found)])
    for operator in (name for name in known if any(name in found for found in sections.values())):
        cells = [TITLES.get(operator, operator), f"`{operator}`"]
        for gpu in gpus:
            section = sections[gpu].get(operator)
            cells.append(f"[{_count_cases(section)}](#{_anchor(operator, gpu)})" if section else "–")
        rows.append(cells)
    models = [next((word for word in gpu.split() if any(map(str.isdigit, word))), gpu) for gpu in gpus]
    heads = ["what is measured", "bench", *(f"cases on {model}, of all modes" for model in models)]
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) if rows else NOTHING


def _count_cases(section: Section) -> int:
    """The number of cases of all modes that have our time."""
    return sum(sum(found.counts.values()) for found in summarize(section))


def _anchor(operator: str, gpu: str) -> str:
    """The place of a heading, as the site makes it and GitHub does."""
    return re.sub(r"\s+", "-", re.sub(r"[^\w\s-]", "", _heading(operator, gpu)).strip().lower())


def _heading(operator: str, gpu: str) -> str:
    return f"{TITLES.get(operator, operator)}, {gpu}"


def elsewhere_tables(records: Sequence[Record], devices: Mapping[str, str]) -> str:
    """Every bench of the other GPUs: tables as `whole_tables` writes them."""
    return "\n\n".join(_whole(records, devices, name, "###") for name in [*by_gpu(records, devices)][1:]) or NOTHING


def _whole(records: Sequence[Record], devices: Mapping[str, str], gpu: str, level: str) -> str:
    own = by_gpu(records, devices)[gpu]
    drawn = {record.operator for record in pictured(records, devices) if devices[record.environment] == gpu}
    texts = []
    for section in arrange(own, devices):
        parts = [f"{level} {_heading(section.operator, gpu)}", _about(section)]
        if section.operator in drawn and draw(section, gpu):
            parts.append(f"![share of the limit and time](figures/{section.operator}.svg)")
        peers = _peers([summarize_mode(section, section.panels, "", mode) for mode in _modes(section)])
        texts.append("\n\n".join([*parts, markdown([_whole_table(section)]), peers]))
    return "\n\n".join(texts)


def _modes(section: Section) -> list[str]:
    return list(dict.fromkeys(mode for panel in section.panels for mode in panel.modes))


def _about(section: Section) -> str:
    constants = ", ".join(f"{name} {value}" for name, value in section.constants.items())
    return f"{section.title}." + (f" Every case: {constants}." if constants else "")


def _whole_table(section: Section) -> Table:
    heads = ["case", "mode", f"largest {section.x}", "ms", "of the limit (least … most)", *COMPARED]
    rows = []
    for panel in section.panels:
        for mode in panel.modes:
            found = summarize_mode(section, [panel], "", mode)
            if not found.counts:
                continue
            own = [panel.at(mode).get(name, {}) for name in section.own_names]
            firsts = (next((each[x] for each in own if x in each and each[x].ms), None) for x in panel.xs(mode))
            last = next(reversed([point for point in firsts if point]), None)
            place = [format_size(last.x), _ms(last.record)] if last else ["", ""]
            compared = _compared(found, partial(_is_of_panel, section, panel))
            rows.append([panel.label, mode, *place, _spread(found.shares), *compared])
    return Table.of(heads, rows, words=3)


def _is_of_panel(section: Section, panel: Panel, case: Case) -> bool:
    """Returns True if a case has the parameters of a panel, and no others but that of the axis and lists."""
    known = {**dict.fromkeys(section.choices), **section.constants, **panel.parameters}
    rest = {name: value for name, value in case.items() if name != section.x and not isinstance(value, list)}
    return _has(case, known) and set(rest) <= set(known)


def published_tables(records: Sequence[Record], devices: Mapping[str, str]) -> str:
    """Every published row beside our record of its case: a table for each bench and GPU of the publication."""
    found: dict[tuple[str, str], dict[str, Record]] = {}
    for record in records:
        found.setdefault((devices[record.environment], _name(record)), {})[record.provider] = record
    tables: dict[tuple[str, str], list[PublishedCase]] = {}
    for row in list_published_cases():
        for gpu in dict.fromkeys(figure.gpu for figure in row.figures):
            tables.setdefault((row.bench.record_name, gpu), []).append(row)
    parts = [_count_published(found, [*by_gpu(records, devices)])]
    for (operator, gpu), rows in tables.items():
        names = {_name_published(row): row for row in rows}
        counts = {mine: sum((mine, name) in found for name in names) for mine in by_gpu(records, devices)}
        mine = max(counts, key=lambda each: counts[each], default="")
        parts.append(f"## {TITLES.get(operator, operator)}, {gpu}")
        parts.append(markdown([_published_table(names, gpu, mine, found)]))
    return "\n\n".join(parts)


def _name(record: Record) -> str:
    """Returns the operator, the mode and the case of a record as a text."""
    return json.dumps([record.operator, record.mode, record.case], sort_keys=True)


def _name_published(row: PublishedCase) -> str:
    return json.dumps([row.bench.record_name, row.mode, row.case], sort_keys=True)


def _count_published(found: Mapping[tuple[str, str], Mapping[str, Record]], gpus: Sequence[str]) -> str:
    """Returns how many of the published rows have a time of ours on each GPU, as a sentence."""
    names = [_name_published(row) for row in list_published_cases()]
    counts = [(sum(KERNELS in found.get((gpu, name), {}) for name in names), gpu) for gpu in gpus]
    told = " and ".join(f"records of {count} on {gpu}" for count, gpu in counts) or "no records"
    return f"Of {len(names)} published rows the present code has {told}."


def _published_table(
    rows: Mapping[str, PublishedCase], gpu: str, mine: str, found: Mapping[tuple[str, str], Mapping[str, Record]]
) -> Table:
    """Returns the times that were published for ``gpu``, and those of ``mine``."""
    cases = [row.case for row in rows.values()]
    varied = [
        name
        for name in dict.fromkeys(name for case in cases for name in case)
        if name != "grid" and len({json.dumps(case.get(name)) for case in cases}) > 1
    ]
    speeds = [figure for row in rows.values() for figure in row.figures if figure.metric == "speed"]
    theirs = list(dict.fromkeys(figure.provider for figure in speeds if figure.gpu == gpu))
    measured = [name for name in MEASURED if any(name in found.get((mine, row), {}) for row in rows)]
    lines = []
    for name, row in rows.items():
        published = {f.provider: f for f in row.figures if f.gpu == gpu and f.metric == "speed"}
        ours = found.get((mine, name), {})
        cells = [format_size(row.case[each]) if each in row.case else "" for each in varied]
        cells += [published[each].told if each in published else "" for each in theirs]
        cells += [_time(ours[each]) if each in ours else "–" for each in measured]
        lines.append([*cells[: len(varied)], row.mode, *cells[len(varied) :]])
    here = next((word for word in mine.split() if any(map(str.isdigit, word))), mine)
    heads = [*varied, "mode", *(f"published: {name}" for name in theirs), *(f"{here}: {name}" for name in measured)]
    return Table.of(heads, lines, words=len(varied) + 1)


def _time(record: Record) -> str:
    """Returns the time of a record, or why it has none."""
    return _ms(record) if record.ms else {"oom": "out of memory"}.get(record.status, record.status)


def step_tables(records: Sequence[Record], devices: Mapping[str, str]) -> str:
    """Steps of models: a table for each context length and mode."""
    found = []
    for section in arrange([record for record in records if record.operator == "transformer"], devices):
        for panel in section.panels:
            gpu = gpu_of(section, devices, panel.device)
            found += [_step_table(section, panel, mode, gpu) for mode in panel.modes]
    return markdown(found) or NOTHING


def _step_table(section: Section, panel: Panel, mode: str, gpu: str) -> Table:
    """Milliseconds of a step with their spread, phases, tokens a second and memory."""
    heads = ["model", "provider", "step (ms)", "20 … 80 %", "forward", "backward", "optimizer", "tokens/s"]
    heads += ["peak MiB", "of the limit"]
    rows = []
    for x in panel.xs(mode):
        for name in section.providers:
            point = panel.at(mode).get(name, {}).get(x)
            if point is None or name == LIMIT or point.state == "unsupported":
                continue
            if not point.ms:
                rows.append([str(x), name, point.state, *[""] * (len(heads) - 3)])
                continue
            record, details = point.record, point.record.details or {}
            phases = [details.get("phases", {}).get(phase) for phase in ("forward", "backward", "optimizer")]
            times = ["" if phase is None else f"{phase['mean_ms']:.2f}" for phase in phases]
            spread = f"{record.ms_p20 or 0:.2f} … {record.ms_p80 or 0:.2f}"
            speed, peak = details.get("tokens_per_s"), record.peak_memory_mib
            more = ["" if value is None else f"{value:,.0f}" for value in (speed, peak)]
            rows.append([str(x), name, f"{point.ms:.2f}", spread, *times, *more, _percent(record.limit_fraction)])
        pair = panel.rival(mode, x, section)
        if pair is not None:
            verdict = {"faster": "it is ahead", "same": "level", "slower": "ours is ahead"}[pair.verdict]
            rows.append(
                [str(x), f"{pair.b.provider} / {pair.a.provider}", format_ratio(pair.ratio), verdict, *[""] * 6]
            )
    return Table.of(heads, rows, title=f"{format_mode(mode)}, {panel.label}, {gpu}", words=2)


# ----------------------------------------------------------------------------------------------------------
# Guides of operators
# ----------------------------------------------------------------------------------------------------------

Cell = Callable[[Section, Panel, str, Any], str]


def guide_table(folder: str, records: Sequence[Record], devices: Mapping[str, str]) -> str:
    """All benches of an operator's folder in a row for each mode and GPU."""
    heads = ["bench", "mode", "GPU", "of the limit: median (least … most)", *COMPARED]
    names = {b.record_name for b in benches().values() if f".{folder}." in f"{b.operator.function.__module__}."}
    rows = []
    for section in arrange([record for record in records if record.operator in names], devices):
        for found in summarize(section):
            if found.shares:
                place = [section.operator, format_mode(found.mode), gpu_of(section, devices, found.device)]
                rows.append([*place, _spread(found.shares), *_compared(found)])
    return markdown_table(heads, rows, words=3)


def grid(
    operator: str,
    kind: Mapping[str, Any],
    suites: Sequence[str],
    cell: Cell,
    records: Sequence[Record],
    devices: Mapping[str, str],
) -> str:
    """Cases of one length in a column, a cell for the forward and one for the backward; in the corner the GPU."""
    chosen = [
        record
        for record in records
        if record.operator == operator and record.suite in suites and _has(record.case, kind)
    ]
    rows, heads = [], []
    for section in arrange(chosen, devices):
        columns = sort_xs({point.x for point in section.points})
        heads = ["" if section.panels[0].device else gpu_of(section, devices), *map(format_size, columns)]
        for panel in section.panels:
            cells = [[cell(section, panel, mode, x) or "–" for mode in MODES] for x in columns]
            if any(set(pair) != {"–"} for pair in cells):
                rows.append([panel.label or "all", *(" / ".join(pair).replace("– / –", "–") for pair in cells)])
    return markdown_table(heads, rows)


def _ours(section: Section, panel: Panel, mode: str, x: Any) -> Record | None:
    points = (panel.at(mode).get(name, {}).get(x) for name in section.own_names)
    return next((point.record for point in points if point and point.ms), None)


def _measured(
    records: Sequence[Record], devices: Mapping[str, str], modes: Sequence[str]
) -> Iterator[tuple[Section, Panel, str, Any, Record]]:
    """Our records that have a time, with their place."""
    for section in arrange(records, devices):
        for panel, mode in product(section.panels, modes):
            for x in panel.xs(mode):
                if record := _ours(section, panel, mode, x):
                    yield section, panel, mode, x, record


def rate(section: Section, panel: Panel, mode: str, x: Any) -> str:
    """Operations a second, in units of 10¹²."""
    record = _ours(section, panel, mode, x)
    if not record or not record.flops or not record.ms:
        return ""
    return f"{record.flops / record.ms / 1e9:.0f}" + "*" * bool(record.disturbed)


def ratio(section: Section, panel: Panel, mode: str, x: Any) -> str:
    """The fastest alternative's time over ours."""
    pair = panel.rival(mode, x, section)
    return format_ratio(pair.ratio) if pair else ""


def decoding_table(records: Sequence[Record], devices: Mapping[str, str]) -> str:
    """A new token: ours, the limit, what else computes it, and the other functions beside it."""
    kind = [record for record in records if record.operator == "tpa_decode" and "kv_rank" not in record.case]
    kind = [record for record in kind if record.suite in ("quick", "published")]
    heads = ["requests, cached tokens", "GPU", "ms", "of the limit", "fastest alternative", "its time / ours"]
    heads += [f"{name} ms" for section in arrange(kind, devices) for name in section.others]
    rows = []
    for section, panel, mode, x, record in _measured(kind, devices, ("fwd",)):
        pair = panel.rival(mode, x, section)
        beside = (panel.at(mode).get(name, {}).get(x) for name in section.others)
        rival = [pair.b.provider, format_ratio(pair.ratio)] if pair else ["none in the same run", ""]
        place = f"{panel.parameters.get('batch', section.constants.get('batch'))}, {format_size(x)}"
        times = [_ms(point.record) if point and point.ms else "" for point in beside]
        cells = [place, gpu_of(section, devices, panel.device), _ms(record)]
        rows.append([*cells, _percent(record.limit_fraction), *rival, *times])
    return markdown([Table.of(heads, rows, words=2).drop_empty_columns()]) if rows else NOTHING


def below_target(records: Sequence[Record], devices: Mapping[str, str]) -> str:
    """Counts the cases of LRPE that have a smaller share of the limit than was aimed at, and names the least."""
    found: dict[tuple[str, str, str], list[tuple[float, bool, str]]] = {}
    lrpe = [record for record in records if record.operator.startswith("lrpe_")]
    for section, panel, mode, x, record in _measured(lrpe, devices, MODES):
        share, theta = record.limit_fraction, mode == "bwd" and panel.parameters.get("theta_gradient")
        if share and not record.disturbed and record.case["activation"] != "softmax_sequence":
            is_low = share < (0.85 if theta else 0.97 if x >= 2048 else 0.92)
            key = section.operator, gpu_of(section, devices, panel.device), mode
            place = f"{section.x} = {format_size(x)}, {replace(panel, device='').label}"
            found.setdefault(key, []).append((share, is_low, place))
    rows = []
    for (operator, gpu, mode), shares in found.items():
        low = [(share, place) for share, is_low, place in shares if is_low]
        share, place = min(low, default=(None, ""))
        rows.append([operator, format_mode(mode), gpu, f"{len(low)} / {len(shares)}", _percent(share), place])
    return markdown_table(["bench", "mode", "GPU", "below / measured", "least", "at"], rows, words=3)


SERVED = {
    ("attention_decode", "fwd"): "a step of decoding",
    ("attention_serving", "fwd"): "attention of a batch",
    ("append_kv", "fwd"): "rotation and appending",
    ("llama", "serve"): "requests to a model of transformers",
}
"""What a server calls, by bench and mode."""


def serving_table(records: Sequence[Record], devices: Mapping[str, str]) -> str:
    """A row for each case of what a server calls, and what of it has no records."""
    kind = [record for record in records if (record.operator, record.mode) in SERVED]
    heads = ["measured", "batch", "GPU", "ms", "of the limit", "fastest alternative", "its time / ours"]
    heads += ['time with `bits="chunks"` / ours']
    rows = []
    for section, panel, mode, x, record in _measured(kind, devices, ("fwd", "serve")):
        pair = panel.rival(mode, x, section)
        rival = [pair.b.provider, format_ratio(pair.ratio)] if pair else ["none in the same run", ""]
        times = [_ms(record), _percent(record.limit_fraction)]
        chunks = panel.at(mode).get("warploom_chunks", {}).get(x)
        ratio = format_ratio(chunks.ms / record.ms) if chunks and chunks.ms and record.ms else ""
        gpu = gpu_of(section, devices, panel.device)
        rows.append([SERVED[section.operator, mode], _batch_of(record), gpu, *times, *rival, ratio])
    found = {(record.operator, record.mode) for record in kind}
    absent = [
        f"{what} (`{name.replace('_', '-')}`)" for (name, mode), what in SERVED.items() if (name, mode) not in found
    ]
    parts = [markdown_table(heads, rows, words=3)] if rows else []
    parts += [f"There are no records of the present code yet of {', '.join(absent)}."] if absent else []
    return "\n\n".join(parts)


def _batch_of(record: Record) -> str:
    """Returns a case of a server's bench in words."""
    case = record.case
    if record.operator == "llama":
        rate = (record.details or {}).get("tokens_per_second")
        return f"prompts of up to {case['context_length']} tokens" + (
            f", {rate:.0f} tokens a second" if rate else ""
        )
    if record.operator == "append_kv":
        return f"{case['n']} tokens of {len(case['used'])} sequences"
    of_mix = case.get("mix") or f"{case['batch']} × {format_size(case['m'])}, {case['cache']}"
    pages = f", pages of {case['page_size']}" if "page_size" in case else ""
    latent = ", latent" if case.get("latent") else ""
    return f"{of_mix}{pages}, {case['heads']}:{case['key_heads']} heads{latent}"


# ----------------------------------------------------------------------------------------------------------
# Several GPUs
# ----------------------------------------------------------------------------------------------------------

COMPUTED = {
    "causal": "causal attention",
    "packed": "packed sequences",
    "full": "full attention",
    "window": "attention with a window",
    "linear": "linear attention",
}
"""The kinds of cases of the bench, in the order of the rows."""
MODES_OVER_GPUS = ("fwd", "fwd_bwd")


def context_table(records: Sequence[Record], devices: Mapping[str, str]) -> str:
    """Calls over several GPUs beside one GPU's time over their number, and which results had one GPU's bits."""
    heads = ["computed", "mode", "GPU", "GPUs", "tokens", "one GPU / GPUs (ms)", "ms", "share"]
    heads += ["fastest alternative", "its ms", "one GPU's bits"]
    found: list[tuple[tuple[int, ...], list[str]]] = []
    kind = [record for record in records if record.operator == "context_parallel"]
    for section, panel, mode, x, record in _measured(kind, devices, MODES_OVER_GPUS):
        computed, gpus, pair = record.case["kind"], record.case["gpus"], panel.rival(mode, x, section)
        times = format_number(record.limit_ms), format_number(record.ms), _share(record.limit_fraction)
        rival = [pair.b.provider, format_number(pair.b.ms)] if pair else ["none in the same run", ""]
        cells = [COMPUTED[computed], format_mode(mode), gpu_of(section, devices, panel.device), str(gpus), str(x)]
        place = [*COMPUTED].index(computed), x, gpus, MODES_OVER_GPUS.index(mode)
        found.append((place, [*cells, *times, *rival, _same_bits(record)]))
    rows = [cells for _, cells in sorted(found, key=lambda entry: entry[0])]
    return markdown_table(heads, rows, words=3)


def _share(fraction: float | None) -> str:
    """A share with two digits behind the point, below 1 wherever something is missing."""
    if fraction is None:
        return "–"
    return f"{fraction if fraction >= 1 else min(fraction, 0.99):.2f}"


def _same_bits(record: Record) -> str:
    """Names the results, of the output and the gradient of queries, that had the bits of one GPU's."""
    same = (record.details or {}).get("bits_of_one_gpu", {})
    return ", ".join(f"{'' if same[name] else 'not '}{name}" for name in ("out", "dq") if name in same)


def training_table(*_: object) -> str:
    """Training steps of ``lg`` by the logs of ``examples/train_lm.py``; their first rate includes warming up.

    A log is ``lg-<sequences>x<tokens of one>x<GPUs>.jsonl``.
    """
    heads = ["GPU", "GPUs", "sequences", "tokens of each", "step (ms)", "share of ideal"]
    heads += ["tokens/s: median (least … most)", "losses after steps", "held-out loss"]
    logs: dict[tuple[int, int, str, int], list[dict[str, Any]]] = {}
    for file in RESULTS.glob("*/training/lg-*.jsonl"):
        sequences, tokens, gpus = map(int, file.stem.removeprefix("lg-").split("x"))
        logs[sequences, tokens, file.parents[1].name.upper(), gpus] = load_lines(file, dict, "log entry")
    medians = {key: statistics.median(_rates(entries)) for key, entries in logs.items()}
    rows = []
    for (sequences, tokens, gpu, gpus), entries in sorted(logs.items()):
        rates, median = _rates(entries), medians[sequences, tokens, gpu, gpus]
        alone = medians.get((sequences, tokens, gpu, 1))
        share = "–" if alone is None or gpus == 1 else f"{median / alone / gpus:.2f}"
        step = format_number(1e3 * sequences * tokens / median)
        speed = f"{median:,.0f} ({min(rates):,.0f} … {max(rates):,.0f})"
        losses = ", ".join(f"{entry['step']}: {entry['loss']:.4f}" for entry in entries)
        held_out = [f"{entry['held_out_loss']:.4f}" for entry in entries if "held_out_loss" in entry]
        cells = [gpu, str(gpus), str(sequences), str(tokens), step, share, speed, losses]
        rows.append([*cells, *(held_out[-1:] or ["–"])])
    return markdown_table(heads, rows)


def _rates(entries: Sequence[Mapping[str, Any]]) -> list[float]:
    """Tokens a second, without the first."""
    return [entry["tokens_per_s"] for entry in entries[1:]]


# ----------------------------------------------------------------------------------------------------------
# Pictures
# ----------------------------------------------------------------------------------------------------------

MODES = ("fwd", "bwd")
SHOWN = {
    "activation": ("none",),
    "theta_gradient": (None,),
    "head_dim": (128, 64),
    "dtype": ("bfloat16",),
    "batch": (4, 8),
    "kv_rank": (None,),
    "encoding": ("rotate",),
}
"""Values of parameters that pictures show. The first stands for a bench that does not have the parameter."""


def pictured(records: Sequence[Record], devices: Mapping[str, str]) -> list[Record]:
    """Returns each bench's records of the first GPU that timed its typical case, else of the first with any."""

    def stands(record: Record) -> bool:
        rows = [row for row in ROWS if row.operator == record.operator]
        if rows:
            return any(_is_typical(row, record) for row in rows)
        shown = ((record.case.get(name, values[0]), values) for name, values in SHOWN.items() if name != "batch")
        return all(value in values for value, values in shown)

    chosen: list[Record] = []
    for operator in dict.fromkeys(record.operator for record in records):
        own = by_gpu([record for record in records if record.operator == operator], devices)
        chosen += max(own.values(), key=lambda each: any(map(stands, each)))
    return chosen


def _times(panel: Panel, section: Section) -> int:
    """Counts the times of ours in a panel."""
    return sum(bool(p.ms) for mode in panel.modes for p in panel.at(mode).get(section.emphasis, {}).values())


def draw(section: Section, gpu: str) -> str:
    """The share of the limit above the time, a column for each mode of one panel; empty without a speed.

    The panel has most times of ours, and of such the widest heads; one that is to be `SHOWN`, of any batch if that
    were a point.
    """
    if section.operator == "transformer":
        return ""  # steps by the wall clock, one size in many ways: a table says more
    for parts in (SHOWN, {name: values for name, values in SHOWN.items() if name != "batch"}):
        wanted = [p for p in section.panels if all(p.parameters.get(name, v[0]) in v for name, v in parts.items())]
        if any(len(panel.xs(mode)) > 1 for panel in wanted for mode in panel.modes):
            break
    several = wanted or section.panels
    panel = max(several, key=lambda panel: (_times(panel, section), panel.parameters.get("head_dim", 0)))
    columns = {}
    for mode in (mode for mode in MODES if mode in panel.modes):
        if charts := [chart for chart in make_charts(section, panel, mode)[::-1] if chart.unit != "MiB"]:
            columns[format_mode(mode)] = charts
    if not columns:
        return ""
    title = section.title
    if panel.labels:  # one column has no room for both
        title = panel.label if len(columns) == 1 else f"{title}: {panel.label}"
    styles = choose_looks(sorted(section.providers), section.emphasis)
    return render_picture([*columns.values()], [*columns], f"{title}, {gpu}", styles)


# ----------------------------------------------------------------------------------------------------------
# Texts
# ----------------------------------------------------------------------------------------------------------

TABLES: Mapping[str, Callable[[Sequence[Record], Mapping[str, str]], str]] = {
    "speeds": speed_table,
    "peers of speeds": speed_peers,
    "results": whole_tables,
    "menu of results": menu,
    "results on other GPUs": elsewhere_tables,
    "published rows": published_tables,
    "steps": step_tables,
    **{f"speed of {folder}": partial(guide_table, folder) for folder in FOLDERS},
    "rates of flash_attention": partial(grid, "flash_attention", {"dtype": "bfloat16"}, ("training",), rate),
    "ratios of flash_attention": partial(grid, "flash_attention", {"dtype": "bfloat16"}, ("training",), ratio),
    "ratios of flash_attention in float32": partial(
        grid, "flash_attention", {"float32_precision": "highest"}, ("float32",), ratio
    ),
    "decoding of tpa": decoding_table,
    "rates of tpa": partial(grid, "tpa_attention", {}, ("quick", "published"), rate),
    "ratios of tpa": partial(grid, "tpa_attention", {}, ("quick", "published"), ratio),
    "below the target of lrpe": below_target,
    "serving": serving_table,
    "context parallel": context_table,
    "training over GPUs": training_table,
}


def update(text: Path, records: Sequence[Record], devices: Mapping[str, str]) -> None:
    """Rewrite the tables that a file has marks for.

    Raises:
        ArgumentError: The file has no mark, or one without its end.
    """
    asked = [name for name in TABLES if MARK.format(name) in read_text(text)]
    if not asked:
        raise ArgumentError(f"{text} has none of the marks {', '.join(map(MARK.format, TABLES))}")
    for name in asked:
        replace_between(text, MARK.format(name), END.format(name), TABLES[name](records, devices))


def _place(record: Record) -> tuple[str, ...]:
    """Returns what the records of all providers in one case of a GPU have in common."""
    case = json.dumps(record.case, sort_keys=True)
    return record.operator, record.suite, record.mode, case, record.environment


def fresh(sources: Sequence[Path]) -> tuple[list[Record], dict[str, str]]:
    """The records of the present code and of clean commits, and names of devices by environment."""
    records: list[Record] = []
    devices: dict[str, str] = {}
    for source in sources:
        environments = load_environments(source)
        devices |= {name: device_name(value) for name, value in environments.items()}
        every = mark_large_hosts(load([source]), environments)
        clean = [record for record in every if is_clean(record, environments)]
        stale = {id(record) for record in clean if record.is_stale}
        # Where our own record is of other code, the others have nobody beside them.
        former = {_place(record) for record in clean if id(record) in stale and record.provider == KERNELS}
        records += [record for record in clean if id(record) not in stale and _place(record) not in former]
    return records, devices


def replace_between(file: Path, begin: str, end: str, body: str) -> None:
    """Put a text between two marks of a file, in the place of what stands there.

    Raises:
        ArgumentError: The file lacks a mark.
    """
    before, first, rest = read_text(file).partition(begin)
    _, last, after = rest.partition(end)
    if not first or not last:
        raise ArgumentError(f"{file} must hold the marks {begin} and {end}")
    replace_text(file, f"{before}{begin}\n\n{body}\n\n{end}{after}")


def main(sources: Sequence[Path]) -> int:
    """Rewrite all; returns the exit status."""
    load_specs([Path(__file__).parents[1] / "benchmarks"])
    records, devices = fresh(sources)
    for name in TEXTS:
        update(ROOT / name, records, devices)
    figures = ROOT / "docs" / "figures"
    sections = [(section, gpu_of(section, devices)) for section in arrange(pictured(records, devices), devices)]
    for section, gpu in sections:
        if drawn := draw(section, gpu):
            replace_text(figures / f"{section.operator}.svg", drawn)
    replace_text(figures / "overview.svg", draw_overview(sections))
    return 0


if __name__ == "__main__":
    sys.exit(main([Path(word) for word in sys.argv[1:]]))
