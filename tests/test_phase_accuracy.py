"""The table of angles at large positions: what it measures, and that the guide shows the stored one."""

from __future__ import annotations

from pathlib import Path

import phase_accuracy
import pytest
import torch

from warploom import linear_attention, lrpe_cosine, lrpe_rotate
from warploom.errors import ArgumentError
from warploom.runtime.backend import HAS_TRITON

needs_triton = pytest.mark.skipif(not HAS_TRITON, reason="needs Triton")
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
    phase_accuracy.update(copy, ROOT / "results" / "h100" / phase_accuracy.FILE)
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

    copy.write_text("no marks", encoding="utf-8")
    with pytest.raises(ArgumentError, match="must hold the marks"):
        phase_accuracy.main(tmp_path, "torch")


FAR = (2**31 - 2, 2**31 + 5, -(2**32) - 3, 2**33 + 7)


def place(how: str, base: int, device: torch.device) -> dict[str, torch.Tensor]:
    """Positions of two batch entries of four tokens, from ``base`` and from 3 on, in tensors."""
    if how == "ids":
        starts = torch.tensor([[base], [3]], device=device)
        return {"position_ids": starts + torch.arange(4, device=device)}
    dtype = torch.int32 if base < 2**31 - 1 and base > 0 else torch.int64
    starts = torch.tensor([base, 3], dtype=dtype, device=device)
    return {"offset": starts if how == "entries" else starts[0]}


@needs_triton
@pytest.mark.parametrize("base", FAR)
@pytest.mark.parametrize("how", ["one", "entries", "ids"])
def test_positions_in_tensors_are_not_cut_to_32_bits(how: str, base: int, device: torch.device) -> None:
    """Values and theta's gradient, of every kernel that makes angles, with 32 and with 16 bits."""
    # What remains of an angle of so many turns: the definition has 53 bits of it, the kernels 48.
    error = 2e-6 + abs(base) * 2.0**-48
    theta = (10000.0 ** -(torch.arange(8) / 8)).to(device)
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.randn(2, 4, 1, 16, device=device).to(dtype)
        calls = [(lrpe_rotate, (x,), {}), (lrpe_cosine, (x,), {"activation": "softmax_sequence"})]
        if how != "ids":
            calls += [(linear_attention, (x, x, x), {"encoding": "rotate"})]
        for function, tensors, options in calls:
            expected, found = [], []
            for backend, results in (("torch", expected), ("triton", found)):
                angles = theta.clone().requires_grad_()
                out = function(*tensors, theta=angles, **options, **place(how, base, device), backend=backend)
                results.append(out.detach())
                if dtype == torch.float32 and function is not linear_attention:  # whose two nearly cancel
                    results.append(torch.autograd.grad(out.square().cos().sum(), angles)[0] / abs(base))
            rounding = torch.finfo(dtype).eps if dtype != torch.float32 else 0
            for a, b in zip(found, expected, strict=True):
                assert (a - b).abs().max() <= 8 * (rounding + error) * max(float(b.abs().max()), 1), (
                    function,
                    dtype,
                )
