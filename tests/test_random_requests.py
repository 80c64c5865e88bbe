"""The tool that answers random requests as a server does, and alone."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from warploom import flash_attention
from warploom.runtime.backend import HAS_TRITON

sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))
import random_requests

pytestmark = pytest.mark.skipif(not HAS_TRITON, reason="needs Triton")
WORDS = ["--small", "--requests", "5", "--seed", "5"]


@pytest.mark.seldom(3, 5)
@pytest.mark.parametrize("bits", ["batch", "chunks"])
def test_bits_are_those_of_requests_alone(bits: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert random_requests.main([*WORDS, "--bits", bits]) == 0
    counted = json.loads(capsys.readouterr().out)
    assert counted["requests"] >= 5
    assert counted["requests_that_differ"] == 0
    assert (counted["bits"], counted["seed"]) == (bits, 5)


@pytest.mark.seldom(3, 5)
def test_what_depends_on_the_batch_is_found(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def attend(*tensors: torch.Tensor, cu_seqlens_q: torch.Tensor, **options: Any) -> torch.Tensor:
        return flash_attention(*tensors, cu_seqlens_q=cu_seqlens_q, **options) * (1 + 0.01 * len(cu_seqlens_q))

    monkeypatch.setattr(random_requests, "flash_attention", attend)
    assert random_requests.main(WORDS) == 1
    assert json.loads(capsys.readouterr().out)["requests_that_differ"] > 0
