"""Context parallelism on two and four processes, which run context_parallel_checks and …_refusals."""

from types import SimpleNamespace
from typing import Any

import context_parallel_checks
import context_parallel_refusals
import pytest
import torch
from distributed_ranks import run_checks

import warploom
from warploom.distributed import ranks


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("checks", [context_parallel_checks, context_parallel_refusals])
def test_on_all_ranks(checks: Any, world: int) -> None:
    found = run_checks(checks.__name__, world)
    assert not any(found.values()), "\n".join(f"{name}: {error}" for name, error in found.items() if error)
    assert set(found) >= {name for name in vars(checks) if name.startswith("check_")}


def test_a_tensor_on_the_gpu_of_another_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    mesh: Any = SimpleNamespace(device_type="cuda")
    mine, other = (SimpleNamespace(device=torch.device("cuda", index)) for index in (1, 0))
    ranks.check_device("attend", mesh, "q", mine)  # type: ignore[arg-type]
    with pytest.raises(
        warploom.DeviceError, match="q must be on this rank's device of the mesh, cuda:1; got cuda:0"
    ):
        ranks.check_device("attend", mesh, "q", other)  # type: ignore[arg-type]
