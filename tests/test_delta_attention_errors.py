"""What delta rule attention refuses, and how it says so."""

import pytest
import torch
from refusals import Change, Wrong, assert_left_to_pytorch, assert_refused, each, ones

from warploom import ArgumentError, DeviceError, DtypeError, ShapeError, UnknownArgumentError, delta_attention
from warploom.runtime.backend import HAS_TRITON

GOOD: Change = {
    "q": ones(2, 6, 2, 8), "k": ones(2, 6, 2, 8), "v": ones(2, 6, 4, 3), "beta": ones(2, 6, 4), "normalize": True,
}  # fmt: skip
ROTATE: Change = {"encoding": "rotate", "theta": ones(2, 4)}
PACKED: Change = {"q": ones(1, 6, 2, 8), "k": ones(1, 6, 2, 8), "v": ones(1, 6, 4, 3), "beta": ones(1, 6, 4)}
CU = torch.tensor([0, 2, 6])

WRONG: tuple[Wrong, ...] = (
    # q, k, v
    ({"q": [1.0]}, DtypeError, "q", "a tensor", "list"),
    ({"v": None}, DtypeError, "v", "a tensor", "NoneType"),
    ({"q": ones(2, 6, 2, 8, dtype=torch.int32)}, DtypeError, "q", "float16, bfloat16, float32, float64", "int32"),
    ({"k": ones(2, 6, 2, 8, dtype=torch.float16)}, DtypeError, "k", "dtype of q, float32", "float16"),
    ({"v": ones(2, 6, 4, 3, device="meta")}, DeviceError, "v", "on the device of q", "meta"),
    ({"q": ones(6, 2, 8)}, ShapeError, "q", "(B, N, Hk, D)", "(6, 2, 8)"),
    ({"q": ones(2, 6, 2, 0)}, ShapeError, "q", "D ≥ 1", "(2, 6, 2, 0)"),
    ({"k": ones(2, 6, 4, 8)}, ShapeError, "k", "(2, 6, 2, 8)", "(2, 6, 4, 8)"),
    ({"v": ones(2, 5, 4, 3)}, ShapeError, "v", "N = 6", "(2, 5, 4, 3)"),
    ({"v": ones(2, 6, 3, 3)}, ShapeError, "v", "H a multiple of Hk = 2", "(2, 6, 3, 3)"),
    ({"v": ones(2, 6, 1, 3)}, ShapeError, "v", "H a multiple of Hk = 2", "(2, 6, 1, 3)"),
    ({"v": ones(2, 6, 4, 0)}, ShapeError, "v", "E ≥ 1", "(2, 6, 4, 0)"),
    ({"k": ones(2, 6, 2, 8, device="meta")}, DeviceError, "k", "on the device of q", "meta"),
    ({"q": ones(2, 6, 0, 8)}, ShapeError, "q", "Hk ≥ 1", "(2, 6, 0, 8)"),
    # beta and decay
    ({"beta": ones(2, 6, 4, dtype=torch.bool)}, DtypeError, "beta", "float16", "bool"),
    ({"decay": -ones(2, 6, 4, device="meta")}, DeviceError, "decay", "on the device of q", "meta"),
    ({"beta": 0.5}, DtypeError, "beta", "a tensor", "float"),
    ({"beta": ones(2, 6, 2)}, ShapeError, "beta", "(B, N, H) with B = 2, N = 6, H = 4", "(2, 6, 2)"),
    ({"beta": ones(2, 4, 6)}, ShapeError, "beta", "(B, N, H) with B = 2, N = 6, H = 4", "(2, 4, 6)"),
    ({"beta": ones(2, 6, 4, 1)}, ShapeError, "beta", "(B, N, H)", "(2, 6, 4, 1)"),
    ({"beta": ones(2, 6, 4, device="meta")}, DeviceError, "beta", "on the device of q", "meta"),
    ({"decay": -0.1}, DtypeError, "decay", "a tensor", "float"),
    ({"decay": -ones(4)}, ShapeError, "decay", "(B, N, H) or (B, N, H, D)", "(4,)"),
    ({"decay": -ones(2, 6, 2, 8)}, ShapeError, "decay", "H = 4, D = 8", "(2, 6, 2, 8)"),
    ({"decay": -ones(2, 6, 4, 3)}, ShapeError, "decay", "H = 4, D = 8", "(2, 6, 4, 3)"),
    ({"decay": ones(2, 6, 4, dtype=torch.int32)}, DtypeError, "decay", "float16", "int32"),
    # options
    ({"normalize": 1}, DtypeError, "normalize", "a bool", "1"),
    ({"return_state": None}, DtypeError, "return_state", "a bool", "None"),
    ({"interleaved": True}, ArgumentError, "interleaved", 'unless encoding="rotate"', "none"),
    ({"encoding": "cosine"}, ArgumentError, "encoding", "none, rotate", "'cosine'"),
    ({"scale": "1"}, DtypeError, "scale", "a number", "'1'"),
    ({"scale": float("nan")}, ArgumentError, "scale", "finite", "nan"),
    ({"backend": "cuda"}, ArgumentError, "backend", "auto, triton, torch", "'cuda'"),
    ({"scale": float("inf")}, ArgumentError, "scale", "finite", "inf"),
    # theta and positions
    ({"encoding": "rotate", "theta": 1.0}, DtypeError, "theta", "a tensor", "float"),
    ({"encoding": "rotate", "theta": ones(2, 4, device="meta")}, DeviceError, "theta", "device of q", "meta"),
    ({**ROTATE, "interleaved": 1}, DtypeError, "interleaved", "a bool", "1"),
    ({**ROTATE, "offset": ones(2)}, DtypeError, "offset", "int32", "float32"),
    ({**ROTATE, "offset": ones(2, device="meta").long()}, DeviceError, "offset", "on the device of q", "meta"),
    ({"theta": ones(2, 4)}, ArgumentError, "theta", 'left out when encoding="none"', "both"),
    ({"encoding": "rotate"}, ArgumentError, "theta", 'given when encoding="rotate"', "None"),
    ({**ROTATE, "theta": ones(2, 5)}, ShapeError, "theta", "1 ≤ F ≤ 4", "(2, 5)"),
    ({**ROTATE, "theta": ones(4, 4)}, ShapeError, "theta", "Hk = 2", "(4, 4)"),
    ({**ROTATE, "q": ones(2, 6, 2, 7), "k": ones(2, 6, 2, 7)}, ShapeError, "q", "even number", "(2, 6, 2, 7)"),
    ({**ROTATE, "offset": 1.5}, DtypeError, "offset", "an int or an integer tensor", "1.5"),
    ({**ROTATE, "offset": 2**31}, ArgumentError, "offset", "below 2**31", "2147483648"),
    ({**ROTATE, "offset": ones(3).long()}, ShapeError, "offset", "B = 2", "(3,)"),
    ({"cu_seqlens": CU}, ShapeError, "q", "of batch size 1", "(2, 6, 2, 8)"),
    ({**PACKED, "cu_seqlens": CU.float()}, DtypeError, "cu_seqlens", "int32", "float32"),
    ({**PACKED, "cu_seqlens": CU[:1]}, ShapeError, "cu_seqlens", "S ≥ 1", "(1,)"),
    ({**PACKED, "cu_seqlens": [0, 6]}, DtypeError, "cu_seqlens", "an integer tensor", "list"),
    ({**PACKED, "cu_seqlens": torch.tensor([0, 6], device="meta")}, DeviceError, "cu_seqlens", "of q", "meta"),
    # states
    ({"initial_state": 0.0}, DtypeError, "initial_state", "a tensor", "float"),
    ({"initial_state": ones(2, 4, 8, 3).long()}, DtypeError, "initial_state", "float16", "int64"),
    ({"initial_state": ones(2, 4, 8, 3, device="meta")}, DeviceError, "initial_state", "device of q", "meta"),
    ({"initial_state": ones(2, 4, 8, 4)}, ShapeError, "initial_state", "(2, 4, 8, 3)", "(2, 4, 8, 4)"),
    ({"initial_state": ones(2, 2, 8, 3)}, ShapeError, "initial_state", "(2, 4, 8, 3)", "(2, 2, 8, 3)"),
    ({"initial_state": ones(2, 4, 3, 8)}, ShapeError, "initial_state", "(2, 4, 8, 3)", "(2, 4, 3, 8)"),
    (
        {**PACKED, "cu_seqlens": CU, "initial_state": ones(1, 4, 8, 3)},
        ShapeError, "initial_state", "(2, 4, 8, 3)", "(1, 4, 8, 3)",
    ),
)  # fmt: skip


@each(WRONG)
def test_wrong_arguments(wrong: Wrong, device: torch.device) -> None:
    assert_refused(delta_attention, GOOD, wrong, device)


VALUES: tuple[Wrong, ...] = (
    ({"decay": ones(2, 6, 4)}, ArgumentError, "decay", "of logarithms ≤ 0", "1.0"),
    ({"decay": ones(2, 6, 4, 8)}, ArgumentError, "decay", "of logarithms ≤ 0", "1.0"),
    (
        {**PACKED, "cu_seqlens": torch.tensor([0, 4, 2, 6])},
        ArgumentError,
        "cu_seqlens",
        "that do not decrease",
        "4, 2",
    ),
    ({**ROTATE, "offset": torch.tensor([0, -(2**54)])}, ArgumentError, "offset", "at most 2**53", str(-(2**54))),
    ({**PACKED, "cu_seqlens": torch.tensor([0, 7])}, ArgumentError, "cu_seqlens", "up to N = 6", "7"),
    ({**PACKED, "cu_seqlens": torch.tensor([1, 6])}, ArgumentError, "cu_seqlens", "of a first number 0", "1"),
)


@each(VALUES)
def test_wrong_values_on_a_cpu(wrong: Wrong) -> None:
    assert_refused(delta_attention, GOOD, wrong, torch.device("cpu"))


def test_a_good_call_is_none_of_them() -> None:
    assert delta_attention(**GOOD).shape == (2, 6, 4, 3)
    out, state = delta_attention(**PACKED, **ROTATE, cu_seqlens=CU, decay=-ones(1, 6, 4), return_state=True)
    assert (out.shape, state.shape) == ((1, 6, 4, 3), (2, 4, 8, 3))


def test_a_name_of_another_library_is_answered() -> None:
    with pytest.raises(UnknownArgumentError, match="scale"):
        delta_attention(**GOOD, softmax_scale=1.0)  # type: ignore[call-overload]


@pytest.mark.skipif(not HAS_TRITON, reason="needs Triton")
@pytest.mark.parametrize(
    ("inputs", "reason"),
    [
        ({name: t.double() if isinstance(t, torch.Tensor) else t for name, t in GOOD.items()}, "float64"),
        ({**dict.fromkeys("qk", ones(1, 2, 1, 257)), "v": ones(1, 2, 1, 3), "beta": ones(1, 2, 1)}, "257 features"),
        ({**dict.fromkeys("qk", ones(1, 2, 1, 3)), "v": ones(1, 2, 1, 300), "beta": ones(1, 2, 1)}, "300 features"),
        ({**GOOD, "scale": 2.0**-70}, "scale"),
    ],
)
def test_what_the_kernels_cannot_do_is_said_and_done_by_pytorch(inputs: Change, reason: str) -> None:
    assert_left_to_pytorch(delta_attention, inputs, reason)
