"""Errors of cosines and sines at large positions against float64: the kernels' exact phase and what is common.

A position and a frequency that are exact in float32 have a product that is exact in float64, so float64 is the
truth here to about 1e-16 of a radian times the angle.

``python tools/phase_accuracy.py results/h100 [BACKEND]`` measures, writes ``accuracy.json`` there, and rewrites the
table in the guide of LRPE.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from texts import markdown_table, replace_between

from warploom import lrpe_cosine
from warploom.bench.environment import describe_environment, device_name, environment_id
from warploom.bench.storage import replace_text
from warploom.runtime.backend import Backend, use_triton

__all__ = ["FILE", "GUIDE", "measure_phase", "update"]

GUIDE = Path(__file__).parents[1] / "src" / "warploom" / "ops" / "lrpe" / "README.md"
FILE = "accuracy.json"
POSITIONS = (10**3, 10**4, 10**5, 10**6, 2**24)
BASES = (1e4, 5e5)
HEAD_DIM = 128
WINDOW = 256
"""Positions looked at: so many, the last of which is the one that the table names."""

BEGIN = "<!-- accuracy: written by tools/phase_accuracy.py; do not edit -->"
END = "<!-- end of accuracy -->"
_METHODS = {
    "warploom": "warploom",
    "float32": "float32 product",
    "bfloat16_cache": "float32 product, kept in bfloat16",
}


def measure_phase(device: torch.device, backend: Backend = "auto") -> dict[str, Any]:
    """Measure the largest error of cosine and sine over all frequencies, around every position.

    Args:
        device: Where.
        backend: Of `lrpe_cosine`.

    Returns:
        JSON values: where it was measured and with what, and ``rows`` with the position, the base of the
        frequencies, and the error of each method.

    Raises:
        BackendError: ``backend="triton"`` cannot run here.
    """
    environment = describe_environment(device)
    x = torch.ones(1, WINDOW, 1, HEAD_DIM // 2, device=device)
    triton = use_triton("lrpe_cosine", backend, x)
    ran = "torch" if not triton else "triton" if device.type == "cuda" else "triton, interpreted"
    return {
        "backend": ran,
        "device": device_name(environment),
        "head_dim": HEAD_DIM,
        "window": WINDOW,
        "commit": environment.get("commit", "unknown"),
        "environment": environment_id(environment),
        "rows": [_row(x, base, position, backend) for base in BASES for position in POSITIONS],
    }


def _row(x: torch.Tensor, base: float, last: int, backend: Backend) -> dict[str, Any]:
    theta = (base ** -(torch.arange(x.shape[-1], dtype=torch.float64) / x.shape[-1])).float().to(x.device)
    first = last - WINDOW + 1
    position = torch.arange(first, last + 1, device=x.device)
    truth = _cos_sin(position.double()[:, None] * theta.double())
    product = _cos_sin(position.float()[:, None] * theta)
    ours = lrpe_cosine(x, theta, offset=first, backend=backend)[0, :, 0]
    found = {"warploom": ours, "float32": product, "bfloat16_cache": product.bfloat16()}
    errors = {name: float((value.double() - truth).abs().max()) for name, value in found.items()}
    return {"base": base, "position": last, **errors}


def _cos_sin(angle: torch.Tensor) -> torch.Tensor:
    return torch.cat((angle.cos(), angle.sin()), dim=-1)


def phase_table(measured: dict[str, Any]) -> str:
    """One measurement as Markdown, and a line that says what it is."""
    rows = [
        [f"{row['base']:,.0f}", f"{row['position']:,}", *(f"{row[name]:.1e}" for name in _METHODS)]
        for row in measured["rows"]
    ]
    said = (
        f"Largest error of cosine and sine against float64, over the {measured['head_dim'] // 2} frequencies of "
        f"{measured['head_dim']} features and the {measured['window']} positions up to the one named. "
        f"warploom: `lrpe_cosine` in float32, backend {measured['backend']}, {measured['device']}, "
        f"commit {measured['commit'][:7]}."
    )
    return f"{markdown_table(['base', 'position', *_METHODS.values()], rows, words=0)}\n\n{said}"


def update(readme: Path, file: Path) -> None:
    """Rewrite the section between the marks of a text by what is stored in a file.

    Raises:
        ArgumentError: The text lacks a mark.
    """
    replace_between(readme, BEGIN, END, phase_table(json.loads(file.read_text(encoding="utf-8"))))


def main(folder: Path, backend: Any = "auto") -> int:
    """Measure, and write what was measured; returns the exit status."""
    measured = measure_phase(torch.device("cuda" if torch.cuda.is_available() else "cpu"), backend)
    print(phase_table(measured))
    replace_text(folder / FILE, json.dumps(measured, indent=2) + "\n")
    update(GUIDE, folder / FILE)
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), *sys.argv[2:]))
