"""What a profile leaves behind: one `ProfileRecord` per configuration and mode, a line of JSON each."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from warploom import flash_attention, lrpe_rotate
from warploom.bench import records
from warploom.bench.attempt import Failure
from warploom.bench.environment import describe_environment, environment_id
from warploom.bench.fingerprint import UNKNOWN, differs, gpu_of, of_calls
from warploom.bench.storage import load_lines, probe, typed
from warploom.nn import TransformerConfig
from warploom.runtime.backend import HAS_TRITON

__all__ = [
    "COMPILED",
    "GRAPHS",
    "PROFILES",
    "Phase",
    "ProfileRecord",
    "Writer",
    "current_fingerprint",
    "is_stale",
    "load_profiles",
    "phase",
]

PROFILES = "profiles.jsonl"
COMPILED, GRAPHS = "+compile", "+graphs"
"""End the name of a provider that runs under `torch.compile`, without and with CUDA graphs."""
_CASES = {
    "transformer": (("size", "batch", "context_length", "layers", "position", "dtype"), ("step",)),
    "attention": (("batch", "head_dim", "n", "dtype", "causal"), ("forward", "backward")),
}
"""For each profile, the parameters of its cases and the phases that were measured of one without failure."""
_SCALARS = (str, int, float, bool, type(None))


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
    fingerprint: str
    """Of the kernels that were measured, see `current_fingerprint`."""
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
    """Appends records to a folder as they come, with the environment beside them.

    Raises:
        WarploomError: The folder cannot be written.
    """

    def __init__(self, folder: Path, device: torch.device) -> None:
        probe(folder, PROFILES)
        environment = describe_environment(device)
        self.folder = folder
        self.environment, self.gpu = environment_id(environment), gpu_of(environment)
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
        print_ = current_fingerprint(profile, provider, case, self.gpu)
        record = ProfileRecord(
            profile, dict(case), provider, mode, self.environment, print_, self.commit, **figures
        )
        records.append(self.folder, [record], PROFILES)
        self.records.append(record)
        return record


def current_fingerprint(profile: str, provider: str, case: Mapping[str, Any], gpu: str) -> str:
    """What the attention of a model launches of ours on a GPU (see `warploom.bench.fingerprint`); empty if nothing.

    The rest of a model is PyTorch's.
    """
    name = provider.partition("+")[0]
    if not gpu or name == "llama" or (profile == "attention" and name != "flash"):
        return ""
    if not HAS_TRITON:
        return UNKNOWN

    from warploom.ops.rotary_attention.api import rotary_attention

    def run() -> None:
        if profile == "attention":
            qkv = [_leaf(case["batch"], case["n"], 1, case["head_dim"], dtype=case["dtype"]) for _ in range(3)]
            out = flash_attention(*qkv, causal=case["causal"], backend="triton")
        else:
            config = TransformerConfig.size(case["size"], context_length=case["context_length"])
            heads, head_dim = config.heads, config.d_model // config.heads
            rows, theta = (3 if name == "flash" else 2) * heads, torch.empty(head_dim // 2)
            qkv = [_leaf(case["batch"], case["context_length"], rows, head_dim, dtype=case["dtype"])]
            if name == "flash":
                out = rotary_attention(qkv[0], theta, heads, head_dim**-0.5)
            else:
                out = lrpe_rotate(qkv[0], theta, backend="triton")
        torch.autograd.grad([out], qkv, [torch.empty_like(out)])

    return of_calls(run, gpu)


def _leaf(*shape: int, dtype: str) -> torch.Tensor:
    return torch.empty(shape, dtype=getattr(torch, dtype), requires_grad=True)


def is_stale(record: ProfileRecord) -> bool:
    """Whether the kernels that were measured are others now; not, where that cannot be found out."""
    was = record.fingerprint
    return differs(was, lambda: current_fingerprint(record.profile, record.provider, record.case, was))


def load_profiles(sources: Iterable[Path]) -> list[ProfileRecord]:
    """Read profiles; of those of one case, provider, mode and environment the last, in the place of the first.

    Args:
        sources: Folders; one without profiles has none.

    Returns:
        The profiles. Lines that are none of this version are left out, with a warning that counts them.

    Raises:
        WarploomError: No line of a file is a profile.
    """
    found: dict[tuple[str, ...], ProfileRecord] = {}
    for source in sources:
        file = source / PROFILES
        if not file.is_file():
            continue
        for record in load_lines(file, _from_json, "profile"):
            case = json.dumps(record.case, sort_keys=True)
            found[record.profile, case, record.provider, record.mode, record.environment] = record
    return list(found.values())


def _from_json(values: object) -> ProfileRecord:
    """A record with everything that tables and the report read of one; raises where something is missing."""
    fields = typed(ProfileRecord, values)
    phases = {name: Phase(**typed(Phase, phase)) for name, phase in fields.pop("phases", {}).items()}
    record = ProfileRecord(**fields, phases=phases)
    if record.profile not in _CASES:
        raise ValueError(f"unknown profile {record.profile!r}")
    parameters, needed = _CASES[record.profile]
    missing = [name for name in parameters if record.case.get(name) is None]
    missing += [name for name in needed if record.status == "ok" and name not in phases]
    if missing:
        raise ValueError(f"without {', '.join(missing)}")
    if not all(isinstance(value, _SCALARS) for value in record.case.values()):
        raise ValueError("a parameter of the case is no number or text")
    if not all(isinstance(ms, int | float) for parts in record.parts_ms.values() for ms in parts.values()):
        raise ValueError("a time of parts_ms is no number")
    return record
