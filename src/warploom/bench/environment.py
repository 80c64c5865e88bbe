"""The environment of a measurement: the GPU, its driver and clocks, the CPU, and the versions of what ran."""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import importlib.metadata
import json
import os
import platform
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from warploom.errors import ArgumentError, fault
from warploom.version import __version__

_PASSING = frozenset(
    {"sm_clock_mhz", "memory_clock_mhz", "temperature_c", "gpu_uuid", "commit", "commit_given", "dirty", "started"}
    | {"fixed_us", "tree"}
)
"""Fields of a run, not of its environment. The commit is one of them: a record's ``fingerprint`` says which kernels
were measured, and a commit to anything else changes no measurement."""
COMMIT = "WARPLOOM_COMMIT"
"""Names the commit of a copy without its repository or with an older one, which is not asked then."""

PACKAGES = (
    "causal-conv1d", "fla-core", "flash-attn", "flash-attn-3", "flash-attn-4", "flash-linear-attention",
    "flash-qla", "flashinfer-python", "liger-kernel", "nvidia-cudnn-frontend", "nvidia-cutlass-dsl",
    "quack-kernels", "tilelang", "transformers",
)  # fmt: skip
"""Distributions whose kernels are measured beside ours, or that theirs are compiled with."""

_NVIDIA_SMI = {
    "driver": ("driver_version", str),
    "power_limit_w": ("power.limit", float),
    "max_sm_clock_mhz": ("clocks.max.sm", int),
    "max_memory_clock_mhz": ("clocks.max.mem", int),
    "sm_clock_mhz": ("clocks.sm", int),
    "memory_clock_mhz": ("clocks.mem", int),
    "temperature_c": ("temperature.gpu", int),
}


def describe_environment(device: torch.device) -> dict[str, Any]:
    """Returns what a measurement can depend on of this machine and installation: JSON values by name.

    A CPU has none of the GPU's fields; what a tool that is not there would have told is left out.
    """
    environment: dict[str, Any] = {
        "device": device.type,
        "cpu": _cpu_model(),
        # That this process may run on: half of a machine's for a process bound to that half.
        "cpu_cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "cpu_threads": torch.get_num_threads(),
        "host_cores": os.cpu_count(),
        "os": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": _version("triton"),
        "warploom": __version__,
    }
    if others := {name: version for name in PACKAGES if (version := _version(name))}:
        environment["packages"] = ", ".join(f"{name} {version}" for name, version in others.items())
    if device.type == "cuda":
        environment |= _gpu(device) | {"cudnn": torch.backends.cudnn.version()}
    started = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    return environment | _checkout(Path(__file__).parent) | {"started": started}


def split(environment: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns an environment's lasting fields, and those of a run: commit, GPU, clocks, temperature."""
    lasting = {name: value for name, value in environment.items() if name not in _PASSING}
    return lasting, {name: value for name, value in environment.items() if name in _PASSING}


def environment_id(environment: Mapping[str, Any]) -> str:
    """Returns a short id of an environment, the same for every run on machines that are alike."""
    return hashlib.sha256(json.dumps(split(environment)[0], sort_keys=True).encode()).hexdigest()[:12]


def device_name(environment: Mapping[str, Any]) -> str:
    """Name the device of an environment."""
    return str(environment.get("gpu") or environment.get("cpu") or "device not recorded")


def _gpu(device: torch.device) -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(device)
    known: dict[str, Any] = {
        "gpu": properties.name,
        "compute_capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "memory_mib": properties.total_memory // 2**20,
        "l2_mib": properties.L2_cache_size // 2**20,
        "gpu_uuid": str(properties.uuid),
    }
    values = nvidia_smi(f"GPU-{properties.uuid}", ",".join(field for field, _ in _NVIDIA_SMI.values()))
    if len(values) == len(_NVIDIA_SMI):
        for (name, (_, parse)), value in zip(_NVIDIA_SMI.items(), values):
            if not value.startswith("["):  # "[N/A]", "[Not Supported]"
                with contextlib.suppress(ValueError):  # "ERR!", "N/A", "Unknown Error"
                    known[name] = parse(value)
    return known


def nvidia_smi(uuid: str, fields: str) -> list[str]:
    """Returns nvidia-smi's fields of a GPU, by UUID: its indices are not CUDA's if some devices are hidden."""
    answer = _output(["nvidia-smi", f"--id={uuid}", f"--query-gpu={fields}", "--format=csv,noheader,nounits"])
    return [value.strip() for value in (answer or "").split(",")]


def _cpu_model() -> str:
    listing = Path("/proc/cpuinfo")
    text = listing.read_text(encoding="utf-8", errors="replace") if listing.is_file() else ""
    found = re.search(r"^model name\s*:(.*)$", text, re.MULTILINE)
    return found[1].strip() if found else platform.processor() or platform.machine()


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _checkout(folder: Path) -> dict[str, Any]:
    """Returns the commit of this package: the one that the user names, else that of its checkout.

    With one that is named goes the hash of the package's folder, by which it can be verified.
    """
    if said := os.environ.get(COMMIT):
        if not re.fullmatch("[0-9a-f]{40}", said):
            raise fault(ArgumentError, "bench", COMMIT, "a commit of 40 hexadecimal digits", repr(said))
        return {"commit": said, "commit_given": True, "dirty": False, "tree": tree_of(folder.parent)}
    git = ["git", "-C", str(folder)]
    # An installed copy may lie inside somebody else's repository, which does not track it.
    if _output([*git, "ls-files", "--error-unmatch", Path(__file__).name]) is None:
        return {}
    commit = _output([*git, "rev-parse", "HEAD"])
    changes = _output([*git, "status", "--porcelain", "--", str(folder.parent)])
    return {} if commit is None else {"commit": commit, "dirty": bool(changes)}


def tree_of(folder: Path) -> str:
    """Returns the hash that Git gives to a folder as it is here, but for what Python compiled in it."""
    entries = []
    for path in folder.iterdir():
        if path.name == "__pycache__" or path.suffix == ".pyc":
            continue
        if path.is_dir() and not path.is_symlink():
            # Git sorts folders as if their names ended in a slash.
            entries.append((f"{path.name}/".encode(), b"40000", tree_of(path)))
            continue
        content = str(path.readlink()).encode() if path.is_symlink() else path.read_bytes()
        mode = b"120000" if path.is_symlink() else b"100755" if path.stat().st_mode & 0o100 else b"100644"
        entries.append((path.name.encode(), mode, _git_hash(b"blob", content)))
    lines = (mode + b" " + name.rstrip(b"/") + b"\0" + bytes.fromhex(of) for name, mode, of in sorted(entries))
    return _git_hash(b"tree", b"".join(lines))


def _git_hash(kind: bytes, content: bytes) -> str:
    return hashlib.sha1(b"%s %d\0%s" % (kind, len(content), content), usedforsecurity=False).hexdigest()


def _output(command: list[str]) -> str | None:
    """Returns the standard output of a command; ``None`` if it is not there, fails, or hangs."""
    try:
        done = subprocess.run(command, capture_output=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.decode("utf-8", "replace").strip()
