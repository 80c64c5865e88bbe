"""Rewrite results that were made before records carried a run, once: ``convert_results.py results/h200``.

Providers are renamed, and profiles become records. What was measured stays as it was. The rounds of a case had one
limit, so records of a case with the same limit are of one run, and those with another of another. Profiles say
their commit; those of one commit, length and way to compile were interleaved. Of their spread the mean and the
deviation are known; 20th and 80th percentile are those of a normal distribution.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from warploom import flash_attention
from warploom.bench.fingerprint import fingerprint, of_calls
from warploom.bench.registry import benches
from warploom.nn.transformer_lm import SIZES

NORMAL_P80 = 0.8416
MODELS = {"flash": "warploom", "plain": "torch", "tpa": "warploom_tpa"}
MODES = {"forward": "fwd", "forward-backward": "fwd_bwd", "train": "train"}


def renamed(records: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Records with their providers' new names and a run; without what they do not know."""
    limits: dict[str, list[float]] = {}
    for record in records:
        if record["provider"].startswith("triton"):
            record["provider"] = record["provider"].replace("triton", "warploom", 1)
        limit = record.get("limit_ms")
        if "run" not in record and limit is not None:
            key = json.dumps([record[name] for name in ("operator", "suite", "case", "mode")], sort_keys=True)
            known = limits.setdefault(key, [])
            known += [] if limit in known else [limit]
            record["run"] = f"before-{known.index(limit)}"
        yield {name: value for name, value in record.items() if value is not None}


def of_profile(profile: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The records that a profile becomes."""
    base, plus, ending = profile["provider"].partition("+")
    name = MODELS.get(base, base)
    commit = (profile["commit"] or "unknown")[:10]
    common = {"environment": profile["environment"], "status": profile["status"], "reason": profile["reason"]}
    common["rounds"] = profile["steps"]
    if profile["profile"] == "transformer":
        case = dict(profile["case"])
        if case["layers"] == SIZES[case["size"]]["layers"]:
            del case["layers"]
        run = f"before-{commit}-{case['context_length']}-{ending or 'eager'}-{profile['steps']}"
        limit_ms = profile["mfu"] and profile["mfu"] * profile["phases"]["step"]["mean_ms"]
        phases = {part: {"mean_ms": t["mean_ms"], "std_ms": t["std_ms"]} for part, t in profile["phases"].items()}
        details = {"phases": phases, "parts_ms": profile["parts_ms"] or None}
        details |= {key: profile[key] for key in ("tokens_per_s", "parameters", "held_memory_mib")}
        yield {
            "operator": "transformer",
            "suite": "published" if case["size"] in ("sm", "md", "lg") else "large",
            "case": case,
            "provider": f"{name}{plus}{ending}",
            "mode": MODES[profile["mode"]],
            "fingerprint": profile["fingerprint"],
            **common,
            "run": run,
            **times(profile["phases"].get("step")),
            "peak_memory_mib": profile["peak_memory_mib"],
            "flops": profile["flops"] and int(profile["flops"]),
            "limit_ms": limit_ms,
            "limit_fraction": profile["mfu"],
            "details": {key: value for key, value in details.items() if value is not None},
        }
        return
    old = profile["case"]
    case = {"batch": old["batch"], "heads": 1, "dtype": old["dtype"], "causal": old["causal"]}
    case |= {"head_dim": old["head_dim"], "n": old["n"]}
    provider = "torch_compile" if plus else name
    for phase, mode in (("forward", "fwd"), ("backward", "bwd")):
        yield {
            "operator": "flash_attention",
            "suite": "alone",
            "case": case,
            "provider": provider,
            "mode": mode,
            "fingerprint": renewed(profile, case, mode) if name == "warploom" else "",
            **common,
            "run": f"before-{commit}-{profile['steps']}",
            **times(profile["phases"].get(phase)),
            "peak_memory_mib": profile["peak_memory_mib"] if mode == "bwd" else None,
            "details": {"clock": "wall", "held_memory_mib": profile["held_memory_mib"]},
        }


def times(phase: dict[str, float] | None) -> dict[str, float]:
    """Mean and spread of a phase as a record's."""
    if phase is None:
        return {}
    mean, deviation = phase["mean_ms"], phase["std_ms"]
    low = max(mean - NORMAL_P80 * deviation, 0.0)
    return {"ms": mean, "ms_p20": low, "ms_p80": mean + NORMAL_P80 * deviation}


def renewed(profile: dict[str, Any], case: dict[str, Any], mode: str) -> str:
    """The fingerprint of a mode, where that of both directions together is still the present one."""
    was = profile["fingerprint"]

    def run() -> None:
        shape = (case["batch"], case["n"], 1, case["head_dim"])
        qkv = [torch.empty(shape, dtype=getattr(torch, case["dtype"]), requires_grad=True) for _ in range(3)]
        out = flash_attention(*qkv, causal=case["causal"], backend="triton")
        torch.autograd.grad([out], qkv, [torch.empty_like(out)])

    if of_calls(run, was) != was:
        return f"{was}-both"
    return fingerprint(benches()["flash-attention"], case, "warploom", mode, was)


def main(folder: Path) -> int:
    """Rewrite the folder; returns the exit status."""
    file, profiles = folder / "records.jsonl", folder / "profiles.jsonl"
    records = list(renamed([json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]))
    if profiles.is_file():
        latest: dict[str, dict[str, Any]] = {}
        limits: dict[str, dict[str, Any]] = {}
        for line in profiles.read_text(encoding="utf-8").splitlines():
            for record in of_profile(json.loads(line)):
                record = {name: value for name, value in record.items() if value is not None}
                unit = [record[key] for key in ("operator", "suite", "case", "mode", "environment")]
                latest[json.dumps([*unit, record["provider"]], sort_keys=True)] = record
                if record["operator"] == "transformer" and "limit_ms" in record:
                    limit = {
                        name: record[name] for name in ("operator", "suite", "case", "mode", "environment", "run")
                    }
                    limit |= {"provider": "limit", "fingerprint": "", "ms": record["limit_ms"]}
                    limits[json.dumps(unit)] = limit | {"limit_ms": record["limit_ms"], "limit_fraction": 1.0}
        added = [*latest.values(), *limits.values()]
        print(f"{len(added)} records of {profiles}")
        records += added
        profiles.unlink()
    file.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    print(f"{len(records)} records in {file}")
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
