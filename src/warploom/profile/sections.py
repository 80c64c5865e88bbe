"""Profiles arranged for the report, as a bench's records are: sizes along the axis, a panel for the rest."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from warploom.bench.panels import Panel, Point, Section, device_name
from warploom.bench.records import LIMIT, Record, load_environments
from warploom.profile.records import COMPILED, GRAPHS, ProfileRecord, is_stale, load_profiles
from warploom.profile.transformer import ENDINGS

__all__ = ["ProfileSection", "profile_sections"]

_TITLES = {
    "transformer": "Transformer LM: wall time of a step; the limit is a large matrix product's rate",
    "attention": "Attention without heads in float32: wall time of a pass",
}
_AXES = {"transformer": "size", "attention": "n"}
_MODES = {"forward": "fwd", "forward-backward": "fwd_bwd", "train": "train"}
_OURS = (f"flash{GRAPHS}", f"flash{COMPILED}", "flash")
"""The provider that stands for us: the first of these that was measured."""


@dataclass(frozen=True)
class ProfileSection(Section):
    """Profiles of one kind."""

    own = "flash"
    torch = "plain"
    torch_compile = f"plain{COMPILED}"

    def command(self, panel: Panel, mode: str) -> str:
        """The command line that measures a panel's mode again."""
        case = {**self.constants, **panel.parameters}
        lines = panel.at(mode)
        providers = [name for name in lines if name != LIMIT]
        words = ["warploom", "profile", self.operator]
        if self.operator == "attention":
            lengths = ",".join(str(x) for x in panel.xs(mode))
            words += ["--head-dim", str(case["head_dim"]), "--seq-len", lengths, "--attention", ",".join(providers)]
            return shlex.join([*words, *(["--causal"] if case["causal"] else [])])
        names = dict.fromkeys(name.partition("+")[0] for name in providers)
        how = [how for how, ending in ENDINGS.items() if {name + ending for name in names} & set(providers)]
        asked = next((name for name, of_bench in _MODES.items() if of_bench == mode), mode)
        words += ["--size", ",".join(map(str, panel.xs(mode))), "--mode", asked]
        words += ["--attention", ",".join(names), "--context-length", str(case["context_length"])]
        words += ["--batch", str(case["batch"]), "--dtype", {"bfloat16": "bf16"}.get(case["dtype"], "fp32")]
        words += [] if how == ["no"] else ["--compile", ",".join(how)]
        return shlex.join(words)


def profile_sections(sources: Sequence[Path]) -> list[Section]:
    """Read profiles and arrange them.

    Args:
        sources: Folders, with or without profiles; oldest first.

    Returns:
        A section for each kind of profile that there is.
    """
    known = {name: value for source in sources for name, value in load_environments(source).items()}
    records = load_profiles(sources)
    found = []
    for kind in dict.fromkeys(record.profile for record in records):
        group = [record for record in records if record.profile == kind]
        found.append(_section(kind, group, known))
    return found


def _section(kind: str, records: Sequence[ProfileRecord], environments: dict[str, dict[str, Any]]) -> Section:
    x = _AXES[kind]
    names = list(dict.fromkeys(name for record in records for name in record.case))
    names = [name for name in names if name not in (x, "layers")]  # the layers follow from the size
    constants = {
        name: records[0].case.get(name)
        for name in names
        if len({json.dumps(record.case.get(name)) for record in records}) == 1
    }
    several = len({device_name(environments.get(record.environment, {})) for record in records}) > 1
    panels: dict[str, tuple[dict[str, Any], str, list[Point]]] = {}
    for record in records:
        chosen = {name: record.case.get(name) for name in names if name not in constants}
        device = device_name(environments.get(record.environment, {})) if several else ""
        _, _, points = panels.setdefault(json.dumps([device, chosen]), (chosen, device, []))
        state = "stale" if is_stale(record) else record.status
        points += [Point(one, record.case[x], state) for one in _as_bench_records(record)]
    providers = {record.provider for record in records}
    return ProfileSection(
        operator=kind,
        title=_TITLES[kind],
        x=x,
        constants=constants,
        panels=tuple(Panel(chosen, device, tuple(points)) for chosen, device, points in panels.values()),
        emphasis=next((name for name in _OURS if name in providers), records[0].provider),
    )


def _as_bench_records(record: ProfileRecord) -> Iterator[Record]:
    """A profile in the form of the bench's records: of a step, or of each pass of attention; and the limit's."""
    blank = Record(
        operator=record.profile,
        suite="profile",
        case=record.case,
        provider=record.provider,
        mode=_MODES.get(record.mode, record.mode),
        fingerprint=record.fingerprint,
        environment=record.environment,
        status=record.status,
        reason=record.reason,
        flops=None if record.flops is None else int(record.flops),
        peak_memory_mib=record.peak_memory_mib,
    )
    if record.profile == "attention":
        for phase, mode in (("forward", "fwd"), ("backward", "bwd")):
            ms = record.phases[phase].mean_ms if record.phases else None
            peak = record.peak_memory_mib if mode == "bwd" else None
            yield replace(blank, mode=mode, ms=ms, peak_memory_mib=peak)
        return
    ms = record.phases["step"].mean_ms if record.phases else None
    limit_ms = None if ms is None or record.mfu is None else record.mfu * ms
    yield replace(blank, ms=ms, limit_ms=limit_ms, limit_fraction=record.mfu)
    if limit_ms is not None:
        yield replace(
            blank, provider=LIMIT, ms=limit_ms, limit_ms=limit_ms, limit_fraction=1.0, peak_memory_mib=None
        )
