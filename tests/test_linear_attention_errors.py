"""What linear attention refuses, and how it says so."""

import pytest
import torch
from refusals import Change, Wrong, assert_left_to_pytorch, assert_refused, each, ones

from warploom import (
    ArgumentError,
    DeviceError,
    DtypeError,
    ShapeError,
    linear_attention,
)
from warploom.runtime.backend import HAS_TRITON

GOOD: Change = {"q": ones(2, 6, 4, 8), "k": ones(2, 6, 4, 8), "v": ones(2, 6, 4, 3)}
ROTATE: Change = {"encoding": "rotate", "theta": ones(4, 4)}
PACKED: Change = {"q": ones(1, 6, 4, 8), "k": ones(1, 6, 4, 8), "v": ones(1, 6, 4, 3)}
CU = torch.tensor([0, 2, 6])

WRONG: tuple[Wrong, ...] = (
    # q, k, v
    ({"q": [1.0]}, DtypeError, "q", "a tensor", "list"),
    ({"v": None}, DtypeError, "v", "a tensor", "NoneType"),
    ({"q": ones(2, 6, 4, 8, dtype=torch.int32)}, DtypeError, "q", "float16, bfloat16, float32, float64", "int32"),
    ({"k": ones(2, 6, 4, 8, dtype=torch.float16)}, DtypeError, "k", "dtype of q, float32", "float16"),
    ({"v": ones(2, 6, 4, 3, device="meta")}, DeviceError, "v", "on the device of q", "meta"),
    ({"q": ones(6, 4, 8)}, ShapeError, "q", "(B, N, H, D)", "(6, 4, 8)"),
    ({"q": ones(2, 6, 4, 0)}, ShapeError, "q", "D ≥ 1", "(2, 6, 4, 0)"),
    ({"k": ones(2, 6, 2, 8)}, ShapeError, "k", "(2, 6, 4, 8)", "(2, 6, 2, 8)"),
    ({"k": ones(2, 5, 4, 8)}, ShapeError, "k", "(2, 6, 4, 8)", "(2, 5, 4, 8)"),
    ({"v": ones(2, 5, 4, 3)}, ShapeError, "v", "N = 6", "(2, 5, 4, 3)"),
    ({"v": ones(2, 6, 4, 0)}, ShapeError, "v", "E ≥ 1", "(2, 6, 4, 0)"),
    # options
    ({"causal": 1}, DtypeError, "causal", "a bool", "1"),
    ({"return_state": None}, DtypeError, "return_state", "a bool", "None"),
    ({"interleaved": "yes"}, DtypeError, "interleaved", "a bool", "'yes'"),
    ({"interleaved": True}, ArgumentError, "interleaved", 'unless encoding="rotate"', "none"),
    ({"encoding": "rope"}, ArgumentError, "encoding", "none, rotate, cosine", "'rope'"),
    ({"activation": "gelu"}, ArgumentError, "activation", "none, relu, sigmoid, silu, softmax", "'gelu'"),
    ({"activation": "softmax_sequence"}, ArgumentError, "activation", "softmax", "'softmax_sequence'"),
    ({"scale": "1"}, DtypeError, "scale", "a number", "'1'"),
    ({"scale": float("nan")}, ArgumentError, "scale", "finite", "nan"),
    ({"backend": "cuda"}, ArgumentError, "backend", "auto, triton, torch", "'cuda'"),
    # theta
    ({"theta": ones(4, 4)}, ArgumentError, "theta", 'left out when encoding="none"', "both"),
    ({"encoding": "rotate"}, ArgumentError, "theta", 'given when encoding="rotate"', "None"),
    ({**ROTATE, "theta": ones(4, 5)}, ShapeError, "theta", "1 ≤ F ≤ 4", "(4, 5)"),
    ({**ROTATE, "theta": ones(3, 4)}, ShapeError, "theta", "H = 4", "(3, 4)"),
    ({**ROTATE, "theta": ones(4, 0)}, ShapeError, "theta", "1 ≤ F", "(4, 0)"),
    ({**ROTATE, "theta": ones(1, 4, 4)}, ShapeError, "theta", "(F,)", "(1, 4, 4)"),
    ({"encoding": "cosine", "theta": ones(9)}, ShapeError, "theta", "1 ≤ F ≤ 8", "(9,)"),
    ({**ROTATE, "theta": ones(4, 4, device="meta")}, DeviceError, "theta", "on the device of q", "meta"),
    ({**ROTATE, "theta": ones(4, 4, dtype=torch.int64)}, DtypeError, "theta", "float16", "int64"),
    ({**ROTATE, "q": ones(2, 6, 4, 7), "k": ones(2, 6, 4, 7)}, ShapeError, "q", "even number", "(2, 6, 4, 7)"),
    # positions
    ({**ROTATE, "offset": 1.5}, DtypeError, "offset", "an int or an integer tensor", "1.5"),
    ({**ROTATE, "offset": 2**31}, ArgumentError, "offset", "below 2**31", "2147483648"),
    ({**ROTATE, "offset": ones(3).long()}, ShapeError, "offset", "B = 2", "(3,)"),
    ({**ROTATE, "offset": ones(2)}, DtypeError, "offset", "int", "float32"),
    ({"cu_seqlens": CU}, ShapeError, "q", "of batch size 1", "(2, 6, 4, 8)"),
    ({**PACKED, "cu_seqlens": CU.float()}, DtypeError, "cu_seqlens", "int32", "float32"),
    ({**PACKED, "cu_seqlens": CU[:1]}, ShapeError, "cu_seqlens", "S ≥ 1", "(1,)"),
    ({**PACKED, "cu_seqlens": CU.to("meta")}, DeviceError, "cu_seqlens", "on the device of q", "meta"),
    # decay and states
    ({"decay": ones(3)}, ShapeError, "decay", "(H,) or (B, N, H)", "(3,)"),
    ({"decay": ones(2, 6)}, ShapeError, "decay", "(H,) or (B, N, H)", "(2, 6)"),
    ({"decay": ones(2, 5, 4)}, ShapeError, "decay", "N = 6", "(2, 5, 4)"),
    ({"decay": ones(4, dtype=torch.int32)}, DtypeError, "decay", "float16", "int32"),
    ({"decay": -0.1}, DtypeError, "decay", "a tensor", "float"),
    ({"initial_state": ones(2, 4, 8, 4)}, ShapeError, "initial_state", "(2, 4, 8, 3)", "(2, 4, 8, 4)"),
    (
        {"encoding": "cosine", "theta": ones(8), "initial_state": ones(2, 4, 8, 3)},
        ShapeError, "initial_state", "(2, 4, 16, 3)", "(2, 4, 8, 3)",
    ),
    (
        {**PACKED, "cu_seqlens": CU, "initial_state": ones(1, 4, 8, 3)},
        ShapeError, "initial_state", "(2, 4, 8, 3)", "(1, 4, 8, 3)",
    ),
    ({"causal": False, "decay": ones(4)}, ArgumentError, "decay", "left out when causal=False", "both"),
    (
        {"causal": False, "initial_state": ones(2, 4, 8, 3)},
        ArgumentError, "initial_state", "left out when causal=False", "both",
    ),
    ({"causal": False, "return_state": True}, ArgumentError, "return_state", "left out when causal=False", "both"),
)  # fmt: skip


@each(WRONG)
def test_wrong_arguments(wrong: Wrong, device: torch.device) -> None:
    assert_refused(linear_attention, GOOD, wrong, device)


def test_a_good_call_is_none_of_them() -> None:
    assert linear_attention(**GOOD).shape == (2, 6, 4, 3)
    out, state = linear_attention(**PACKED, **ROTATE, cu_seqlens=CU, decay=-ones(1, 6, 4), return_state=True)
    assert (out.shape, state.shape) == ((1, 6, 4, 3), (2, 4, 8, 3))


@pytest.mark.skipif(not HAS_TRITON, reason="needs Triton")
@pytest.mark.parametrize(
    ("inputs", "reason"),
    [
        ({name: t.double() for name, t in GOOD.items()}, "float64"),
        ({"q": ones(1, 2, 1, 257), "k": ones(1, 2, 1, 257), "v": ones(1, 2, 1, 3)}, "257 features"),
        ({"q": ones(1, 2, 1, 3), "k": ones(1, 2, 1, 3), "v": ones(1, 2, 1, 300)}, "300 features"),
        (
            {
                **dict.fromkeys("qk", ones(1, 2, 1, 129)),
                "v": ones(1, 2, 1, 3),
                "encoding": "cosine",
                "theta": ones(129),
            },
            "258 features",
        ),
        ({**GOOD, "scale": 2.0**-70}, "scale"),
    ],
)
def test_what_the_kernels_cannot_do_is_said_and_done_by_pytorch(inputs: Change, reason: str) -> None:
    assert_left_to_pytorch(linear_attention, inputs, reason)
