"""What a profile leaves behind: one `ProfileRecord` per configuration and mode, a line of JSON each."""

from __future__ import annotations

import functools
import hashlib
import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from warploom.bench import records
from warploom.bench.attempt import Failure
from warploom.bench.environment import describe_environment, environment_id
from warploom.errors import WarploomError
from warploom.ops import benches

__all__ = [
    "COMPILED",
    "GRAPHS",
    "PROFILES",
    "Phase",
    "ProfileRecord",
    "Writer",
    "current_digest",
    "is_stale",
    "load_profiles",
    "phase",
]

PROFILES = "profiles.jsonl"
COMPILED, GRAPHS = "+compile", "+graphs"
"""End the name of a provider that runs under `torch.compile`, without and with CUDA graphs."""
_PACKAGE = Path(__file__).parents[1]
_OPERATORS = {"flash": ("flash_attention",), "tpa": ("tpa",)}
"""Folders of the operators by which a provider attends; positions are LRPE's in every model of ours."""


@dataclass(frozen=True)
class Phase:
    """Wall time of one part of a step, the device idle before and after, over the measured steps."""

    mean_ms: float
    std_ms: float
    """Standard deviation over the steps; 0 for a single one."""
    total_ms: float


def phase(samples_ms: Sequence[float]) -> Phase:
    """Mean, deviation and sum of samples in milliseconds."""
    deviation = statistics.stdev(samples_ms) if len(samples_ms) > 1 else 0.0
    return Phase(statistics.fmean(samples_ms), deviation, sum(samples_ms))


@dataclass(frozen=True)
class ProfileRecord:
    """One configuration in one mode. ``None`` or an absent key stands for what was not measured."""

    profile: str
    """``transformer`` or ``attention``."""
    case: dict[str, Any]
    """Everything that defines the configuration but the provider: size, batch, lengths, dtype."""
    provider: str
    """The attention: ``flash``, ``plain``, …, with ``+compile`` or ``+graphs`` under `torch.compile`."""
    mode: str
    """``forward``, ``forward-backward`` or ``train`` (with the optimizer)."""
    environment: str
    """Id into ``environment.json``."""
    source_digest: str
    """Of the code that was measured, see `current_digest`."""
    commit: str | None
    """Of the checkout, with ``-dirty`` where it was changed."""
    status: str = "ok"
    """``ok``, ``oom``, ``unsupported`` or ``error``."""
    reason: str | None = None
    steps: int | None = None
    """Measured steps, after the warm-up."""
    phases: dict[str, Phase] = field(default_factory=dict)
    """``forward``, ``backward``, ``optimizer``, and ``step``, their sum step by step."""
    tokens_per_s: float | None = None
    peak_memory_mib: float | None = None
    """The most that was allocated during a step after the warm-up, weights included."""
    held_memory_mib: float | None = None
    """What was allocated between forward and backward."""
    parameters: int | None = None
    flops: float | None = None
    """Operations of a step: the matrix products and attention, backward included where there is one."""
    mfu: float | None = None
    """The step's share of the rate of a large matrix product measured here: bfloat16, or float32 on a CPU."""
    parts_ms: dict[str, dict[str, float]] = field(default_factory=dict)
    """From a pass of its own: milliseconds of each part of the model in each phase."""


class Writer:
    """Appends records to a folder as they come, with the environment beside them."""

    def __init__(self, folder: Path, device: torch.device) -> None:
        environment = describe_environment(device)
        self.folder = folder
        self.environment = environment_id(environment)
        commit = environment.get("commit")
        self.commit = f"{commit}-dirty" if commit and environment.get("dirty") else commit
        self.records: list[ProfileRecord] = []
        records.save_environment(folder, self.environment, environment)

    def write(
        self, profile: str, case: Mapping[str, Any], provider: str, mode: str, figures: Mapping[str, Any] | Failure
    ) -> ProfileRecord:
        """Append one record: its measured fields, or why there are none."""
        if isinstance(figures, Failure):
            figures = {"status": figures.status, "reason": figures.reason}
        digest = current_digest(profile, provider)
        record = ProfileRecord(
            profile, dict(case), provider, mode, self.environment, digest, self.commit, **figures
        )
        records.append(self.folder, [record], PROFILES)
        self.records.append(record)
        return record


@functools.cache
def current_digest(profile: str, provider: str) -> str:
    """Fingerprint of what warploom has in a provider as its code is now: the modules, and the operators they call.

    Empty where there is nothing of ours, as in transformers' Llama or in plain attention by itself.
    """
    name = provider.partition("+")[0]
    folders = [_PACKAGE / "ops" / operator for operator in _OPERATORS.get(name, ())]
    if profile == "transformer" and name != "llama":
        folders += [_PACKAGE / "nn", _PACKAGE / "ops" / "lrpe"]
    if not folders:
        return ""
    # What no model uses: there is no activation in positions.
    without = ("spec.py", "peers.py", *benches()["lrpe-rotate"].unused({"activation": "none"}))
    digests = [records.source_digest(folder, without) for folder in folders]
    return hashlib.sha256("".join(digests).encode()).hexdigest()


def is_stale(record: ProfileRecord) -> bool:
    """Whether the code is no longer the code that was measured."""
    return record.source_digest != current_digest(record.profile, record.provider)


def load_profiles(sources: Iterable[Path]) -> list[ProfileRecord]:
    """Read profiles; of those of one case, provider, mode and environment the last, in the place of the first.

    Args:
        sources: Folders; one without profiles has none.

    Raises:
        WarploomError: A line before the last is not a profile.
    """
    found: dict[tuple[str, ...], ProfileRecord] = {}
    for source in sources:
        file = source / PROFILES
        if not file.is_file():
            continue
        # What follows the last line break is empty, or the torn line of a killed run.
        for number, line in enumerate(file.read_text(encoding="utf-8").split("\n")[:-1], start=1):
            try:
                fields = json.loads(line)
                phases = {name: Phase(**values) for name, values in fields.pop("phases").items()}
                record = ProfileRecord(**fields, phases=phases)
            except (ValueError, TypeError, KeyError) as error:
                raise WarploomError(f"{file}:{number}: not a profile of this version: {error}") from error
            case = json.dumps(record.case, sort_keys=True)
            found[record.profile, case, record.provider, record.mode, record.environment] = record
    return list(found.values())
