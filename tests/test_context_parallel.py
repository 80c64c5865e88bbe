"""Context parallelism on two and four processes; see context_parallel_checks.py."""

import context_parallel_checks as checks
import pytest
from distributed_ranks import run_checks

NAMES = [name for name in vars(checks) if name.startswith("check_")]


@pytest.mark.parametrize("world", [2, 4])
def test_on_all_ranks(world: int) -> None:
    found = run_checks("context_parallel_checks", world)
    assert not any(found.values()), "\n".join(f"{name}: {error}" for name, error in found.items() if error)
    assert set(found) >= set(NAMES)
