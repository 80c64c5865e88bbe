"""Linear attention's kernels for Hopper: in an interpreter on a CPU, and on a Hopper GPU."""

from typing import Any

import pytest
import torch

from warploom.ops.linear_attention.bench import OPERATOR
from warploom.runtime.backend import HAS_TRITON
from warploom.testing.conformance import check_case

pytestmark = pytest.mark.skipif(not HAS_TRITON, reason="needs Triton")

STATES = {"initial_state": True, "return_state": True}
CASES: list[dict[str, Any]] = [
    {},
    {"n": 64},
    {"n": 64, "decay": "token", **STATES},
    {"n": 129, "decay": "head", "activation": "silu"},
    {"n": 192, "offset": "batch", "layout": "bhnd"},
    {"n": 1100, "batch": 1, "heads": 2, "decay": "head", **STATES},
    {"n": 300, "theta": "vector", "offset": 2**24 + 7},
    {"n": 300, "frequencies": 20, "decay": "head", "scale": -0.25, **STATES},
]
"""Of several tiles each, whole ones and one that is not, with every decay, states and places of tokens."""
ANGLES = {"theta", "frequencies", "offset"}


ENCODED = [(encoding, case) for encoding in ("none", "rotate", "cosine") for case in CASES]
ENCODED = [(encoding, case) for encoding, case in ENCODED if encoding != "none" or not ANGLES & case.keys()]


@pytest.mark.sample(2)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(("encoding", "case"), ENCODED, ids=str)
def test_values_and_gradients(
    encoding: str, case: dict[str, Any], head_dim: int, launched: list[str], device: torch.device
) -> None:
    whole = {
        "batch": 2,
        "n": 200,
        "heads": 2,
        "dtype": "bfloat16",
        "head_dim": head_dim,
        "encoding": encoding,
        **case,
    }
    results = check_case(OPERATOR, whole, "triton", device)
    assert {result.mode for result in results} == {"fwd", "bwd"}
    assert not [result.detail for result in results if not result.ok]
    kernel = "hopper_product_kernel"
    if encoding == "cosine":
        kernel = "hopper_parts_kernel" if head_dim == 128 else "hopper_cosine_kernel"
    assert kernel in launched
