"""What LRPE refuses, and how it says so."""

from typing import Any

import pytest
import torch
from refusals import Change, Wrong, assert_left_to_pytorch, assert_refused, each, ones
from test_lrpe import BACKENDS, encode

from warploom import (
    ArgumentError,
    BackendError,
    DeviceError,
    DtypeError,
    ShapeError,
    WarploomError,
    lrpe_cosine,
    lrpe_rotate,
)
from warploom.ops.lrpe import validation
from warploom.runtime.backend import HAS_TRITON

Tensor = torch.Tensor

TOKENS = 6
IDS = torch.arange(TOKENS)
BOUNDS = torch.tensor([0, 2, TOKENS])
THETA = torch.rand(3, 4)


ONE_ENTRY = ones(1, TOKENS, 3, 8)

WRONG: tuple[Wrong, ...] = (
    # x
    ({"x": [1.0, 2.0]}, DtypeError, "x", "a tensor", "list"),
    ({"x": None}, DtypeError, "x", "a tensor", "NoneType"),
    ({"x": ones(2, 6, 3, 8, dtype=torch.int64)}, DtypeError, "x", "float16, bfloat16, float32", "int64"),
    ({"x": ones(2, 6, 3, 8, dtype=torch.bool)}, DtypeError, "x", "float16, bfloat16, float32", "bool"),
    ({"x": ones(2, 6, 3, 8, dtype=torch.complex64)}, DtypeError, "x", "float16, bfloat16, float32", "complex64"),
    ({"x": ones()}, ShapeError, "x", "(B, N, H, D) or (B, N, D)", "()"),
    ({"x": ones(6, 8)}, ShapeError, "x", "(B, N, H, D) or (B, N, D)", "(6, 8)"),
    ({"x": ones(1, 2, 6, 3, 8)}, ShapeError, "x", "(B, N, H, D) or (B, N, D)", "(1, 2, 6, 3, 8)"),
    ({"x": ones(2, 6, 3, 0)}, ShapeError, "x", "D ≥ 1", "(2, 6, 3, 0)"),
    # theta
    ({"theta": 0.5}, DtypeError, "theta", "a tensor", "float"),
    ({"theta": None}, DtypeError, "theta", "a tensor", "NoneType"),
    ({"theta": torch.ones(3, 4, dtype=torch.int32)}, DtypeError, "theta", "float16, bfloat16, float32", "int32"),
    ({"theta": torch.tensor(0.5)}, ShapeError, "theta", "(H, E), (1, E) or (E,)", "()"),
    ({"theta": torch.ones(1, 3, 4)}, ShapeError, "theta", "(H, E), (1, E) or (E,)", "(1, 3, 4)"),
    ({"theta": torch.ones(2, 4)}, ShapeError, "theta", "H = 3", "(2, 4)"),
    ({"theta": torch.ones(3, 0)}, ShapeError, "theta", "E ≥ 1", "(3, 0)"),
    ({"theta": torch.ones(0)}, ShapeError, "theta", "E ≥ 1", "(0,)"),
    ({"x": ones(2, 6, 8)}, ShapeError, "theta", "H = 1", "(3, 4)"),
    ({"theta": THETA.to("meta")}, DeviceError, "theta", "on the device of x", "meta"),
    ({"theta": torch.ones(3, 9)}, ShapeError, "theta", "k = 1", "(3, 9)"),
    ({"theta": torch.ones(9)}, ShapeError, "theta", "k = 1", "(9,)"),
    ({"theta": torch.ones(5), "grid": (2, 3)}, ShapeError, "theta", "k = 2", "(5,)"),
    ({"theta": torch.ones(1, 4), "grid": (1, 2, 3)}, ShapeError, "theta", "k = 3", "(1, 4)"),
    ({"theta": torch.ones(9), "position_ids": IDS.expand(2, -1)}, ShapeError, "theta", "k = 1", "(9,)"),
    (
        {"theta": torch.ones(3, 3), "position_ids": IDS[:, None].expand(2, -1, 4)},
        ShapeError, "theta", "E ≤ ", "(3, 3)",
    ),
    # activation, backend
    ({"activation": "gelu"}, ArgumentError, "activation", "none, relu, sigmoid, silu, softmax", "'gelu'"),
    ({"activation": "SiLU"}, ArgumentError, "activation", "none, relu, sigmoid, silu, softmax", "'SiLU'"),
    ({"activation": ""}, ArgumentError, "activation", "none, relu, sigmoid, silu, softmax", "''"),
    ({"activation": None}, ArgumentError, "activation", "none, relu, sigmoid, silu, softmax", "None"),
    ({"activation": torch.relu}, ArgumentError, "activation", "none, relu, sigmoid, silu, softmax", "relu"),
    ({"activation": ["silu"]}, ArgumentError, "activation", "none, relu, sigmoid, silu, softmax", "['silu']"),
    ({"backend": "cuda"}, ArgumentError, "backend", "auto, triton, torch", "'cuda'"),
    ({"backend": None}, ArgumentError, "backend", "auto, triton, torch", "None"),
    # grid
    ({"grid": (2, 2)}, ShapeError, "grid", "N = 6", "0 + 4 for (2, 2)"),
    ({"grid": (2, 3), "prefix": 1}, ShapeError, "grid", "N = 6", "1 + 6 for (2, 3)"),
    ({"grid": (0, 3)}, ArgumentError, "grid", "positive", "(0, 3)"),
    ({"grid": (-2, -3)}, ArgumentError, "grid", "positive", "(-2, -3)"),
    ({"grid": (2.0, 3)}, DtypeError, "grid", "a sequence of ints", "(2.0, 3)"),
    ({"grid": (True, 6)}, DtypeError, "grid", "a sequence of ints", "(True, 6)"),
    ({"grid": ()}, DtypeError, "grid", "a sequence of ints", "()"),
    ({"grid": 6}, DtypeError, "grid", "a sequence of ints", "6"),
    ({"grid": "ab"}, DtypeError, "grid", "a sequence of ints", "'ab'"),
    ({"grid": torch.tensor([2, 3])}, DtypeError, "grid", "a sequence of ints", "tensor"),
    ({"grid": (2, 3), "offset": 1}, ArgumentError, "offset", "left out when a grid is given", "both"),
    ({"grid": (2, 3), "offset": torch.tensor(0)}, ArgumentError, "offset", "left out when a grid is given", "both"),
    # prefix
    ({"prefix": -1}, ArgumentError, "prefix", "between 0 and N = 6", "-1"),
    ({"prefix": 7}, ArgumentError, "prefix", "between 0 and N = 6", "7"),
    ({"prefix": 1.0}, DtypeError, "prefix", "an int", "1.0"),
    ({"prefix": 0.0}, DtypeError, "prefix", "an int", "0.0"),
    ({"prefix": True}, DtypeError, "prefix", "an int", "True"),
    ({"prefix": False}, DtypeError, "prefix", "an int", "False"),
    ({"prefix": None}, DtypeError, "prefix", "an int", "None"),
    ({"prefix": "1"}, DtypeError, "prefix", "an int", "'1'"),
    ({"prefix": torch.tensor(1)}, DtypeError, "prefix", "an int", "tensor"),
    ({"prefix": torch.tensor(0)}, DtypeError, "prefix", "an int", "tensor"),
    ({"prefix": torch.tensor([1, 2])}, DtypeError, "prefix", "an int", "tensor"),
    # offset
    ({"offset": 1.0}, DtypeError, "offset", "an int or an integer tensor", "1.0"),
    ({"offset": 0.0}, DtypeError, "offset", "an int or an integer tensor", "0.0"),
    ({"offset": True}, DtypeError, "offset", "an int or an integer tensor", "True"),
    ({"offset": None}, DtypeError, "offset", "an int or an integer tensor", "None"),
    ({"offset": [1, 2]}, DtypeError, "offset", "an int or an integer tensor", "[1, 2]"),
    ({"offset": torch.tensor(1.0)}, DtypeError, "offset", "int32, int64", "float32"),
    ({"offset": torch.tensor(True)}, DtypeError, "offset", "int32, int64", "bool"),
    ({"offset": torch.tensor([1, 2, 3])}, ShapeError, "offset", "() or (B,) with B = 2", "(3,)"),
    ({"offset": torch.tensor([1])}, ShapeError, "offset", "() or (B,) with B = 2", "(1,)"),
    ({"offset": torch.ones(2, 1, dtype=torch.int64)}, ShapeError, "offset", "() or (B,) with B = 2", "(2, 1)"),
    ({"offset": 2**31}, ArgumentError, "offset", "below 2**31", "2147483648"),
    ({"offset": 2**31 - TOKENS + 1}, ArgumentError, "offset", "below 2**31", "2147483643"),
    ({"offset": -(2**31)}, ArgumentError, "offset", "below 2**31", "-2147483648"),
    ({"offset": torch.tensor(1, device="meta")}, DeviceError, "offset", "on the device of x", "meta"),
    # position_ids
    ({"position_ids": [0, 1, 2, 3, 4, 5]}, DtypeError, "position_ids", "an integer tensor", "list"),
    ({"position_ids": IDS.float()}, DtypeError, "position_ids", "int32, int64", "float32"),
    ({"position_ids": IDS.bool()}, DtypeError, "position_ids", "int32, int64", "bool"),
    ({"position_ids": torch.tensor(3)}, ShapeError, "position_ids", "(N,), (B, N) or (B, N, k)", "()"),
    ({"position_ids": IDS[:5]}, ShapeError, "position_ids", "N = 6", "(5,)"),
    ({"position_ids": IDS.expand(3, -1)}, ShapeError, "position_ids", "B = 2, N = 6", "(3, 6)"),
    ({"position_ids": IDS.expand(1, -1)}, ShapeError, "position_ids", "B = 2, N = 6", "(1, 6)"),
    ({"position_ids": IDS[:5].expand(2, -1)}, ShapeError, "position_ids", "B = 2, N = 6", "(2, 5)"),
    ({"position_ids": IDS[:, None]}, ShapeError, "position_ids", "B = 2, N = 6", "(6, 1)"),
    ({"position_ids": IDS.expand(2, -1)[..., None][..., :0]}, ShapeError, "position_ids", "k", "(2, 6, 0)"),
    ({"position_ids": IDS.expand(2, -1)[..., None, None]}, ShapeError, "position_ids", "k", "(2, 6, 1, 1)"),
    ({"position_ids": IDS.to("meta")}, DeviceError, "position_ids", "on the device of x", "meta"),
    ({"position_ids": IDS, "grid": (2, 3)}, ArgumentError, "grid", "left out when position_ids", "both"),
    ({"position_ids": IDS, "prefix": 1}, ArgumentError, "prefix", "left out when position_ids", "both"),
    ({"position_ids": IDS, "offset": 1}, ArgumentError, "offset", "left out when position_ids", "both"),
    (
        {"position_ids": IDS, "offset": torch.tensor(0)},
        ArgumentError, "offset", "left out when position_ids", "both",
    ),
    # cu_seqlens
    ({"cu_seqlens": BOUNDS}, ShapeError, "x", "of batch size 1 when cu_seqlens", "(2, 6, 3, 8)"),
    ({"x": ONE_ENTRY, "cu_seqlens": [0, 6]}, DtypeError, "cu_seqlens", "an integer tensor", "list"),
    ({"x": ONE_ENTRY, "cu_seqlens": BOUNDS.float()}, DtypeError, "cu_seqlens", "int32, int64", "float32"),
    ({"x": ONE_ENTRY, "cu_seqlens": BOUNDS.short()}, DtypeError, "cu_seqlens", "int32, int64", "int16"),
    ({"x": ONE_ENTRY, "cu_seqlens": BOUNDS[None]}, ShapeError, "cu_seqlens", "(S + 1,) with S ≥ 1", "(1, 3)"),
    ({"x": ONE_ENTRY, "cu_seqlens": BOUNDS[:1]}, ShapeError, "cu_seqlens", "(S + 1,) with S ≥ 1", "(1,)"),
    ({"x": ONE_ENTRY, "cu_seqlens": BOUNDS.to("meta")}, DeviceError, "cu_seqlens", "on the device of x", "meta"),
    (
        {"x": ONE_ENTRY, "cu_seqlens": BOUNDS, "grid": (2, 3)},
        ArgumentError, "grid", "left out when cu_seqlens", "both",
    ),
)  # fmt: skip

WRONG_FOR_ROTATE: tuple[Wrong, ...] = (
    ({"theta": torch.ones(3, 8)}, ShapeError, "theta", "E ≤ 4 = ⌈F/k⌉ frequencies, with F = 4 and k = 1", "(3, 8)"),
    ({"theta": torch.ones(3), "grid": (2, 3)}, ShapeError, "theta", "E ≤ 2 = ⌈F/k⌉", "(3,)"),
    ({"theta": torch.ones(2), "grid": (1, 1, 1, 2, 3)}, ShapeError, "theta", "E ≤ 1 = ⌈F/k⌉", "(2,)"),
    ({"x": ones(2, 6, 3, 7)}, ShapeError, "x", "an even number of features D", "(2, 6, 3, 7)"),
    ({"x": ones(2, 6, 3, 1)}, ShapeError, "x", "an even number of features D", "(2, 6, 3, 1)"),
    ({"interleaved": 1}, DtypeError, "interleaved", "a bool", "1"),
    ({"interleaved": None}, DtypeError, "interleaved", "a bool", "None"),
    ({"interleaved": "yes"}, DtypeError, "interleaved", "a bool", "'yes'"),
)


def good(backend: str) -> Change:
    return {"x": ones(2, TOKENS, 3, 8), "theta": THETA.clone(), "backend": backend}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("function", [lrpe_cosine, lrpe_rotate], ids=lambda function: function.__name__)
@each(WRONG)
def test_wrong_arguments(function: Any, wrong: Wrong, backend: str, device: torch.device) -> None:
    assert_refused(function, good(backend), wrong, device)


@pytest.mark.parametrize("backend", BACKENDS)
@each(WRONG_FOR_ROTATE)
def test_wrong_arguments_of_rotate(wrong: Wrong, backend: str, device: torch.device) -> None:
    assert_refused(lrpe_rotate, good(backend), wrong, device)


@pytest.mark.skipif(not HAS_TRITON, reason="needs Triton")
@pytest.mark.parametrize("kind", ["cosine", "rotate", "interleaved"])
@pytest.mark.parametrize(
    ("x", "missing"),
    [
        (ones(2, TOKENS, 3, 8, dtype=torch.float64), "float16, bfloat16 and float32; the tensors are float64"),
        (ones(1, 1, 1, 8194), "8194 features"),
    ],
    ids=["float64", "long_row"],
)
def test_what_the_kernels_cannot_do_is_refused_by_name_only(
    x: Tensor, missing: str, kind: str, device: torch.device
) -> None:
    function, options = (lrpe_cosine, {}) if kind == "cosine" else (lrpe_rotate, {"interleaved": kind != "rotate"})
    assert_left_to_pytorch(function, {"x": x.to(device), "theta": THETA[:1].to(device), **options}, missing)


@pytest.mark.skipif(not HAS_TRITON, reason="needs Triton")
def test_what_32_bits_cannot_count_is_refused(device: torch.device) -> None:
    x, bounds = ones(1, 1, 1, 2).to(device), torch.zeros(1, dtype=torch.int32, device=device)
    rows, sequences = validation.MAX_ROWS + 1, validation.MAX_SEQUENCES
    with pytest.raises(BackendError, match=rf"{rows} rows of features \({rows - 1} at most\)"):
        encode("rotate", x.expand(1, rows, 1, 2), THETA[:1, :1].to(device), backend="triton")
    with pytest.raises(BackendError, match=rf"{sequences} sequences \({sequences - 1} at most\)"):
        encode(
            "rotate", x, THETA[:1, :1].to(device), cu_seqlens=bounds.expand(sequences + 1), backend="triton"
        )  # fmt: skip


def test_errors_are_also_pythons_own() -> None:
    assert issubclass(WarploomError, ValueError)
    assert issubclass(DtypeError, TypeError)
    assert issubclass(BackendError, RuntimeError)
    for error in (ArgumentError, BackendError, DeviceError, DtypeError, ShapeError):
        assert issubclass(error, WarploomError)
