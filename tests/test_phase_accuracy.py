"""The table of angles at large positions: what it measures, and that the guide shows the stored one."""

from __future__ import annotations

import json
from pathlib import Path

import phase_accuracy
import pytest
import torch

from warploom.errors import ArgumentError

ROOT = Path(__file__).parents[1]
GUIDE = phase_accuracy.GUIDE


@pytest.fixture(scope="module")
def measured(device: torch.device) -> dict[str, object]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(phase_accuracy, "WINDOW", 4 if device.type == "cpu" else phase_accuracy.WINDOW)
        return phase_accuracy.measure_phase(device, "triton")


def test_exact_phase_stays_exact_where_a_float32_product_does_not(measured: dict[str, object]) -> None:
    rows = {(row["base"], row["position"]): row for row in measured["rows"]}
    assert len(rows) == 10
    for row in rows.values():
        assert row["warploom"] < 1e-6
        assert row["bfloat16_cache"] > 1e-3
    for base in phase_accuracy.BASES:
        errors = [rows[base, position]["float32"] for position in phase_accuracy.POSITIONS]
        assert errors == sorted(errors)
        assert errors[0] < 1e-4
        assert errors[-1] > 0.05


def test_it_says_what_ran(measured: dict[str, object], device: torch.device) -> None:
    assert measured["backend"] == ("triton" if device.type == "cuda" else "triton, interpreted")
    assert phase_accuracy.measure_phase(torch.device("cpu"), "torch")["backend"] == "torch"


def test_the_guide_shows_what_is_stored(tmp_path: Path) -> None:
    committed = GUIDE.read_text(encoding="utf-8")
    copy = tmp_path / "README.md"
    copy.write_text(committed, encoding="utf-8")
    phase_accuracy.update(copy, [ROOT / "results" / "h200" / phase_accuracy.FILE])
    assert copy.read_text(encoding="utf-8") == committed


def test_the_command_stores_the_table_and_rewrites_the_section(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path / "README.md"
    copy.write_text(GUIDE.read_text(encoding="utf-8"), encoding="utf-8")
    monkeypatch.setattr(phase_accuracy, "GUIDE", copy)
    assert phase_accuracy.main(tmp_path, "torch") == 0
    out = capsys.readouterr().out
    assert "| 500,000 | 16,777,216 |" in out
    assert "backend torch" in out
    text = copy.read_text(encoding="utf-8")
    assert out.split("\n\n")[0] in text

    file = tmp_path / phase_accuracy.FILE
    stale = json.loads(file.read_text(encoding="utf-8")) | {"fingerprint": "other"}
    phase_accuracy.save_phase(tmp_path, stale)
    monkeypatch.setattr(phase_accuracy, "_fingerprint", lambda: "present")  # in the interpreter it is not known
    phase_accuracy.update(copy, [file])
    assert "There is no measurement of the present code yet" in copy.read_text(encoding="utf-8")
    copy.write_text("no marks", encoding="utf-8")
    with pytest.raises(ArgumentError, match="must hold the marks"):
        phase_accuracy.main(tmp_path, "torch")
