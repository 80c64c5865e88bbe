"""Profiles as tables, in the layout of the published ones."""

from __future__ import annotations

from collections.abc import Sequence

from warploom.bench.published import published
from warploom.bench.tables import Section, markdown
from warploom.nn.transformer_lm import SIZES
from warploom.profile.parts import PARTS
from warploom.profile.records import ProfileRecord

__all__ = ["attention_sections", "profile_tables", "step_rows", "transformer_sections"]

_HEADER = (
    "model",
    "mode",
    "attention",
    "steps",
    "avg_forward_s",
    "avg_backward_s",
    "avg_optimizer_s",
    "avg_total_s",
    "std_total_s",
    "sum_total_s",
    "tokens/s",
    "peak MiB",
    "MFU",
)
_PAGE_HEADER = (
    "model",
    "mode",
    "attention",
    "forward",
    "backward",
    "optimizer",
    "step (ms)",
    "tokens/s",
    "peak MiB",
    "MFU",
)
_PUBLISHED_MODES = {"forward": "fwd", "forward-backward": "fwd_bwd"}


def transformer_sections(records: Sequence[ProfileRecord]) -> list[Section]:
    """For each context length: seconds of a step by phase, its speed and memory; then its parts where measured."""
    return [section for shape, group in _shapes(records).items() for section in _steps_and_parts(shape, group)]


def _shapes(records: Sequence[ProfileRecord]) -> dict[str, list[ProfileRecord]]:
    shapes: dict[str, list[ProfileRecord]] = {}
    for record in records:
        case = record.case
        words = (f"batch {case['batch']}", f"{case['context_length']} tokens", f"{case['dtype']}")
        shapes.setdefault("  ".join((*words, f"position {case['position']}")), []).append(record)
    return shapes


def _steps_and_parts(shape: str, records: Sequence[ProfileRecord]) -> list[Section]:
    rows = []
    for record in records:
        row = [str(record.case["size"]), record.mode, record.provider]
        if record.status != "ok":
            rows.append((*row, *[_failed(record)] * (len(_HEADER) - len(row))))
            continue
        phases, step = record.phases, record.phases["step"]
        seconds = [
            _seconds(phases[name].mean_ms if name in phases else None)
            for name in ("forward", "backward", "optimizer")
        ]
        speed = "" if record.tokens_per_s is None else f"{record.tokens_per_s:,.0f}"
        mfu = "" if record.mfu is None else f"{record.mfu:.3f}"
        row += [str(record.steps), *seconds, *map(_seconds, (step.mean_ms, step.std_ms, step.total_ms))]
        rows.append((*row, speed, _mib(record.peak_memory_mib), mfu))
    notes = (*_notes(records), *_published_steps(records))
    found = [Section(f"transformer  {shape}", _HEADER, tuple(rows), notes)]
    parts = _parts_section(shape, records)
    return found if parts is None else [*found, parts]


def _parts_section(shape: str, records: Sequence[ProfileRecord]) -> Section | None:
    rows = []
    for record in records:
        for name, parts in record.parts_ms.items():
            times = [f"{parts[part]:.3f}" if part in parts else "" for part in PARTS]
            rows.append(
                (str(record.case["size"]), record.mode, record.provider, name, *times, f"{sum(parts.values()):.3f}")
            )
    if not rows:
        return None
    header = ("model", "mode", "attention", "phase", *PARTS, "total")
    notes = ("a pass of its own with marks around modules: its total is not the step's",)
    return Section(f"transformer  parts (ms)  {shape}", header, tuple(rows), notes)


def step_rows(records: Sequence[ProfileRecord]) -> tuple[list[str], list[list[str]]]:
    """Milliseconds of a training step of every provider, side by side.

    Args:
        records: Of any profiles; only training steps are used.

    Returns:
        Heads and rows, a row for each size and context length. The last column is the time of the fastest model
        that is not ours over that of ours.
    """
    steps = [record for record in records if record.profile == "transformer" and record.mode == "train"]
    providers = list(dict.fromkeys(record.provider for record in steps))
    cells = {(r.case["size"], r.case["context_length"], r.provider): r for r in steps}
    rows = []
    for size, length in dict.fromkeys((r.case["size"], r.case["context_length"]) for r in steps):
        line = [cells.get((size, length, provider)) for provider in providers]
        times = {r.provider: r.phases["step"].mean_ms for r in line if r is not None and r.phases}
        ours = [ms for name, ms in times.items() if name.startswith("flash")]
        others = [ms for name, ms in times.items() if not name.startswith("flash")]
        ratio = f"{min(others) / min(ours):.2f}" if ours and others else ""
        rows.append([str(size), str(length), *map(_step_cell, line), ratio])
    return ["model", "tokens", *providers, "best other / ours"], rows


def _step_cell(record: ProfileRecord | None) -> str:
    if record is None:
        return ""
    return f"{record.phases['step'].mean_ms:.2f}" if record.status == "ok" else _failed(record)


def profile_tables(records: Sequence[ProfileRecord]) -> str:
    """All profiles as Markdown tables, in milliseconds and fewer columns than the published ones; empty if none."""
    models = [record for record in records if record.profile == "transformer"]
    found = []
    for shape, group in _shapes(models).items():
        rows = [_page_row(record) for record in group]
        found.append(Section(f"transformer  {shape}", _PAGE_HEADER, tuple(rows), _notes(group)))
        parts = _parts_section(shape, group)
        found += [] if parts is None else [parts]
    return markdown([*found, *attention_sections([r for r in records if r.profile == "attention"])])


def _page_row(record: ProfileRecord) -> tuple[str, ...]:
    words = (str(record.case["size"]), record.mode, record.provider)
    if record.status != "ok":
        return (*words, *[_failed(record)] * (len(_PAGE_HEADER) - len(words)))
    step, phases = record.phases["step"], record.phases
    times = [
        f"{phases[name].mean_ms:.2f}" if name in phases else "" for name in ("forward", "backward", "optimizer")
    ]
    speed = "" if record.tokens_per_s is None else f"{record.tokens_per_s:,.0f}"
    mfu = "" if record.mfu is None else f"{record.mfu:.3f}"
    whole = f"{step.mean_ms:.2f} ± {step.std_ms:.2f}"
    return (*words, *times, whole, speed, _mib(record.peak_memory_mib), mfu)


def attention_sections(records: Sequence[ProfileRecord]) -> list[Section]:
    """Forward, backward and memory, each with the providers side by side and what was published last."""
    if not records:
        return []
    providers = list(dict.fromkeys(record.provider for record in records))
    cells = {(r.case["head_dim"], r.case["n"], r.provider): r for r in records}
    places = list(dict.fromkeys((r.case["head_dim"], r.case["n"]) for r in records))
    case = records[0].case
    shape = f"batch {case['batch']}  no heads  {case['dtype']}{'  causal' if case['causal'] else ''}"
    found = []
    for title, metric, mode in (
        ("forward (ms)", "speed", "fwd"),
        ("backward (ms)", "speed", "bwd"),
        ("held before the backward (MiB)", "held", "fwd"),
    ):
        rows = []
        for head_dim, n in places:
            row = [_attention_cell(cells.get((head_dim, n, provider)), metric, mode) for provider in providers]
            rows.append((str(head_dim), str(n), *row, _published_attention(head_dim, n, metric, mode)))
        if all(not cell for row in rows for cell in row[2:-1]):
            continue  # a CPU does not count its memory
        header = ("head_dim", "seq_len", *providers, "published")
        found.append(Section(f"attention  {title}  {shape}", header, tuple(rows), _notes(records)))
    return found


def _attention_cell(record: ProfileRecord | None, metric: str, mode: str) -> str:
    if record is None:
        return ""
    if record.status != "ok":
        return _failed(record)
    if metric == "held":
        return _mib(record.held_memory_mib)
    return f"{record.phases['forward' if mode == 'fwd' else 'backward'].mean_ms:.3f}"


def _published_attention(head_dim: int, n: int, metric: str, mode: str) -> str:
    for row in published():
        case = {"head_dim": head_dim, "n": n}
        if row.metric == metric and row.matches("attention", mode, case):
            return "OOM" if row.value is None else f"{row.value:g}"
    return ""


def _published_steps(records: Sequence[ProfileRecord]) -> list[str]:
    """What was published of these sizes and modes, a line each."""
    layers = {name: size["layers"] for name, size in SIZES.items()}
    whole = [record for record in records if record.case["layers"] == layers.get(record.case["size"])]
    wanted = dict.fromkeys((record.case["size"], _PUBLISHED_MODES.get(record.mode)) for record in whole)
    steps = {(row.case["size"], row.mode): row for row in published() if row.operator == "transformer"}
    return [
        f"published, {row.gpu}: {size} {mode} {row.value / 1e3:.4f} s a step"
        for (size, mode), row in ((key, steps[key]) for key in wanted if key in steps)
        if row.value is not None
    ]


def _notes(records: Sequence[ProfileRecord]) -> tuple[str, ...]:
    """Each different failure once."""
    lines = [f"{r.provider}: {r.status}: {r.reason}" for r in records if r.status != "ok"]
    return tuple(dict.fromkeys(lines))


def _failed(record: ProfileRecord) -> str:
    return "OOM" if record.status == "oom" else "-1"


def _seconds(ms: float | None) -> str:
    return "" if ms is None else f"{ms / 1e3:.5f}"


def _mib(mib: float | None) -> str:
    return "" if mib is None else f"{mib:.0f}"
