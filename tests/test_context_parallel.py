"""Context parallelism on two and four processes; see context_parallel_checks.py."""

import context_parallel_checks as checks
import pytest
from distributed_ranks import run_checks

NAMES = [name for name in vars(checks) if name.startswith("check_")]


@pytest.fixture(scope="module", params=[2, 4])
def found(request: pytest.FixtureRequest) -> dict[str, str]:
    return run_checks("context_parallel_checks", request.param)


@pytest.mark.parametrize("name", [*NAMES, "ranks"])
def test_on_all_ranks(name: str, found: dict[str, str]) -> None:
    assert name in found or name == "ranks", found.get("ranks", "")
    assert found.get(name, "") == "", found[name]
