"""Operators on DTensors, and sharded models, on two and four processes; see sharding_checks.py."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import processes
import pytest
import sharding_checks as checks
import torch
from distributed_ranks import run_checks

NAMES = [name for name in vars(checks) if name.startswith("check_")]
EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("training")
    functions = (f"import m{i % 7}\n\ndef f{i % 11}(x):\n    return x + {i}\n" for i in range(10**4))
    (made / "text.py").write_text("".join(functions))
    return made


def losses(folder: Path) -> list[tuple[float, ...]]:
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return [
        (line["step"], line["loss"], line["held_out_loss"] if line["step"] in (3, 6) else 0.0) for line in lines
    ]


@pytest.mark.seldom(6, 53)
def test_on_four_and_then_two_ranks(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All checks, one of which trains: four ranks begin, two go on, with the losses of one."""
    for world in (4, 2):
        found = run_checks("sharding_checks", world, folder)
        assert not any(found.values()), "\n".join(f"{name}: {error}" for name, error in found.items() if error)
        assert set(found) >= set(NAMES)
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import train_lm

    train_lm.main([*checks.WORDS.split(), "--text", str(folder / "text.py"), "--output", str(folder / "one")])
    expected = losses(folder / "one")
    assert len(expected) == 6
    torch.testing.assert_close(torch.tensor(losses(folder / "ranks")), torch.tensor(expected), rtol=1e-4, atol=0.0)
    with pytest.raises(SystemExit, match="was made under torchrun"):
        train_lm.main([*checks.WORDS.split(), "--text", str(folder / "text.py"), "--output", str(folder / "ranks")])
    torch.set_float32_matmul_precision("highest")


@pytest.mark.seldom(6, 16)
def test_a_killed_rank_ends_the_run_and_leaves_whole_checkpoints(folder: Path) -> None:
    output = folder / "killed"
    words = [*checks.WORDS.split(), "--steps", "100000", "--text", str(folder / "text.py"), "--output", str(output)]
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = processes.environment(OMP_NUM_THREADS="1")
    command = [sys.executable, *launcher, str(EXAMPLES / "train_lm.py"), *words, "--cp", "2"]
    run = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    until = time.monotonic() + 120
    while not (output / "step-00000002").is_dir() and run.poll() is None and time.monotonic() < until:
        time.sleep(0.2)
    ranks = Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split()
    os.kill(int(ranks[1]), signal.SIGKILL)
    told, _ = run.communicate(timeout=60)
    assert run.returncode != 0
    assert "SIGKILL" in told, told[-2000:]  # torchrun's own report says which rank was the first to fail
    whole = [path for path in output.glob("step-*") if path.suffix != ".partial"]
    assert whole
    assert all((path / "state.pt").is_file() and (path / "sharded" / ".metadata").is_file() for path in whole)
