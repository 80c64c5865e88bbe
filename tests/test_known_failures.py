"""The ledger of known failures: each entry names a test or a call that there is, and that fails."""

from __future__ import annotations

import ast
from pathlib import Path

import known_failures
import pytest
import torch
from known_failures import Known, known_call, known_test
from random_cases import parse, run_calls

ROOT = Path(__file__).parents[1]
LEDGER = known_failures.entries()
TABLE = """
| what is wrong | shown by | where |
|---|---|---|
| a case | `tests/test_x.py::test_y[a-1]` | everywhere |
| a call | `["lrpe_rotate",{"dtype":"float16","shape":[1,2]}]` | gpu |
"""


def test_the_ledger_is_read() -> None:
    case, call = known = known_failures.entries(TABLE)
    assert case == Known("a case", "tests/test_x.py::test_y[a-1]", "everywhere")
    assert known_test(known, case.shown_by, "cpu") is case
    assert known_test(known, "tests/test_x.py::test_y[a-2]", "cpu") is None
    record = {"dtype": "float16", "shape": (1, 2), "offset": 3}
    assert known_call(known, "lrpe_rotate", record, "gpu") is call
    assert known_call(known, "lrpe_rotate", record, "cpu") is None
    assert known_call(known, "lrpe_cosine", record, "gpu") is None
    assert known_call(known, "lrpe_rotate", record | {"dtype": "float32"}, "gpu") is None
    assert known_failures.entries(f"{TABLE}\n| another table |\n|---|\n| of the page |\n") == known
    with pytest.raises(ValueError, match="no table"):
        known_failures.entries("nothing")
    with pytest.raises(ValueError, match="no entry"):
        known_failures.entries(TABLE + "| a case | somewhere | gpu |")


TESTS, CALLS = ([k for k in LEDGER if (known_failures.call_of(k) is None) is test] for test in (True, False))


@pytest.mark.parametrize("known", TESTS, ids=lambda k: k.shown_by)
def test_a_test_of_the_ledger_is_there(known: Known) -> None:
    """It fails: `conftest.py` expects that, and counts a pass as a failure."""
    path, _, name = known.shown_by.partition("::")
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    assert name.partition("[")[0] in {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("known", CALLS, ids=lambda k: k.what)
def test_a_call_of_the_ledger_fails(known: Known, device: torch.device) -> None:
    if known.where not in ("everywhere", "gpu" if device.type == "cuda" else "cpu"):
        pytest.skip(f"on a {known.where}")
    _, faults = run_calls(parse(known.shown_by), device, None)
    assert faults, "it is mended: its line goes"
