"""What flash attention refuses, and how it says so."""

import pytest
import torch
from refusals import Change, Wrong, assert_left_to_pytorch, assert_refused, each, ones

from warploom import (
    ArgumentError,
    DeviceError,
    DtypeError,
    ShapeError,
    flash_attention,
)
from warploom.runtime.backend import HAS_TRITON

GOOD: Change = {"q": ones(2, 6, 4, 8), "k": ones(2, 5, 2, 8), "v": ones(2, 5, 2, 3)}
PACKED: Change = {"q": ones(1, 6, 4, 8), "k": ones(1, 5, 2, 8), "v": ones(1, 5, 2, 3)}
USED, TABLE = torch.tensor([1, 5]), torch.zeros(2, 3, dtype=torch.int32)
PAGED: Change = {**GOOD, "k": ones(7, 2, 2, 8), "v": ones(7, 2, 2, 3), "seqused_k": USED, "block_table": TABLE}
Q, K = torch.tensor([0, 2, 6]), torch.tensor([0, 5, 5])

WRONG: tuple[Wrong, ...] = (
    # q, k, v
    ({"q": [1.0]}, DtypeError, "q", "a tensor", "list"),
    ({"k": None}, DtypeError, "k", "a tensor", "NoneType"),
    ({"v": 1.0}, DtypeError, "v", "a tensor", "float"),
    ({"q": ones(2, 6, 4, 8, dtype=torch.int32)}, DtypeError, "q", "float16, bfloat16, float32, float64", "int32"),
    ({"k": ones(2, 5, 2, 8, dtype=torch.float16)}, DtypeError, "k", "dtype of q, float32", "float16"),
    ({"v": ones(2, 5, 2, 3, dtype=torch.bool)}, DtypeError, "v", "float16, bfloat16, float32, float64", "bool"),
    ({"k": ones(2, 5, 2, 8, device="meta")}, DeviceError, "k", "on the device of q", "meta"),
    ({"v": ones(2, 5, 2, 3, device="meta")}, DeviceError, "v", "on the device of q", "meta"),
    ({"q": ones(6, 4, 8)}, ShapeError, "q", "(B, N, Hq, D)", "(6, 4, 8)"),
    ({"q": ones(2, 6, 4, 0)}, ShapeError, "q", "D ≥ 1", "(2, 6, 4, 0)"),
    ({"k": ones(3, 5, 2, 8)}, ShapeError, "k", "B = 2, D = 8", "(3, 5, 2, 8)"),
    ({"k": ones(2, 5, 2, 7)}, ShapeError, "k", "B = 2, D = 8", "(2, 5, 2, 7)"),
    ({"k": ones(5, 2, 8)}, ShapeError, "k", "B = 2, D = 8", "(5, 2, 8)"),
    ({"k": ones(2, 5, 3, 8), "v": ones(2, 5, 3, 3)}, ShapeError, "k", "a divisor of Hq = 4", "(2, 5, 3, 8)"),
    ({"k": ones(2, 5, 8, 8), "v": ones(2, 5, 8, 3)}, ShapeError, "k", "a divisor of Hq = 4", "(2, 5, 8, 8)"),
    ({"k": ones(2, 5, 0, 8), "v": ones(2, 5, 0, 3)}, ShapeError, "k", "a divisor of Hq = 4", "(2, 5, 0, 8)"),
    ({"v": ones(2, 4, 2, 3)}, ShapeError, "v", "M = 5", "(2, 4, 2, 3)"),
    ({"v": ones(2, 5, 1, 3)}, ShapeError, "v", "Hkv = 2", "(2, 5, 1, 3)"),
    ({"v": ones(1, 5, 2, 3)}, ShapeError, "v", "B = 2", "(1, 5, 2, 3)"),
    ({"v": ones(2, 5, 2, 0)}, ShapeError, "v", "E ≥ 1", "(2, 5, 2, 0)"),
    ({"v": ones(5, 2, 3)}, ShapeError, "v", "(B, M, Hkv, E)", "(5, 2, 3)"),
    # options
    ({"causal": 1}, DtypeError, "causal", "a bool", "1"),
    ({"causal": None}, DtypeError, "causal", "a bool", "None"),
    ({"return_lse": "yes"}, DtypeError, "return_lse", "a bool", "'yes'"),
    ({"scale": "1"}, DtypeError, "scale", "a number", "'1'"),
    ({"scale": True}, DtypeError, "scale", "a number", "True"),
    ({"scale": torch.tensor(1.0)}, DtypeError, "scale", "a number", "tensor(1."),
    ({"scale": float("nan")}, ArgumentError, "scale", "finite", "nan"),
    ({"scale": float("inf")}, ArgumentError, "scale", "finite", "inf"),
    ({"window": 3}, DtypeError, "window", "a pair (left, right)", "3"),
    ({"window": (3,)}, DtypeError, "window", "a pair (left, right)", "(3,)"),
    ({"window": (1, 2, 3)}, DtypeError, "window", "a pair (left, right)", "(1, 2, 3)"),
    ({"window": (1.0, 2)}, DtypeError, "window", "ints or None", "(1.0, 2)"),
    ({"window": (True, 2)}, DtypeError, "window", "ints or None", "(True, 2)"),
    ({"window": (-1, 2)}, ArgumentError, "window", "≥ 0", "(-1, 2)"),
    ({"window": (None, -1)}, ArgumentError, "window", "≥ 0", "(None, -1)"),
    ({"window": (12, 5), "causal": True}, ArgumentError, "window", "(12, 0) or (12, None)", "(12, 5)"),
    ({"float32_precision": "exact"}, ArgumentError, "float32_precision", "highest, high, medium", "'exact'"),
    ({"float32_precision": 1}, ArgumentError, "float32_precision", "highest, high, medium", "1"),
    ({"backend": "cuda"}, ArgumentError, "backend", "auto, triton, torch", "'cuda'"),
    # packed sequences
    ({"cu_seqlens_q": Q, "cu_seqlens_k": K}, ShapeError, "q", "of batch size 1", "(2, 6, 4, 8)"),
    ({**PACKED, "cu_seqlens_q": Q}, ArgumentError, "cu_seqlens_k", "N = 6 and M = 5 differ", "None"),
    ({**PACKED, "cu_seqlens_k": K}, ArgumentError, "cu_seqlens_q", "N = 6 and M = 5 differ", "None"),
    ({**PACKED, "cu_seqlens": Q, "cu_seqlens_k": K}, ArgumentError, "cu_seqlens_k", "None with cu_seqlens", "both"),
    ({**PACKED, "cu_seqlens": Q, "cu_seqlens_q": Q}, ArgumentError, "cu_seqlens_q", "None with cu_seqlens", "both"),
    ({**PACKED, "cu_seqlens": 5}, DtypeError, "cu_seqlens", "an integer tensor", "int"),
    ({**PACKED, "cu_seqlens": K[:1]}, ShapeError, "cu_seqlens", "S ≥ 1", "(1,)"),
    ({**PACKED, "cu_seqlens_q": [0], "cu_seqlens_k": K}, DtypeError, "cu_seqlens_q", "an integer tensor", "list"),
    ({**PACKED, "cu_seqlens_q": Q, "cu_seqlens_k": 5}, DtypeError, "cu_seqlens_k", "an integer tensor", "int"),
    ({**PACKED, "cu_seqlens_q": Q.short(), "cu_seqlens_k": K}, DtypeError, "cu_seqlens_q", "int32", "int16"),
    ({**PACKED, "cu_seqlens_q": Q, "cu_seqlens_k": K.float()}, DtypeError, "cu_seqlens_k", "int32", "float32"),
    ({**PACKED, "cu_seqlens_q": Q[None], "cu_seqlens_k": K}, ShapeError, "cu_seqlens_q", "(S + 1,)", "(1, 3)"),
    ({**PACKED, "cu_seqlens_q": Q, "cu_seqlens_k": K[:1]}, ShapeError, "cu_seqlens_k", "S ≥ 1", "(1,)"),
    ({**PACKED, "cu_seqlens_q": Q, "cu_seqlens_k": K[:2]}, ShapeError, "cu_seqlens_k", "of the shape of", "(2,)"),
    (
        {**PACKED, "cu_seqlens_q": Q, "cu_seqlens_k": K.to("meta")},
        DeviceError, "cu_seqlens_k", "on the device of q", "meta",
    ),
    # logits
    ({"softcap": "30"}, DtypeError, "softcap", "a number", "'30'"),
    ({"softcap": 0.0}, ArgumentError, "softcap", "above 0", "0.0"),
    ({"softcap": -3}, ArgumentError, "softcap", "above 0", "-3"),
    ({"softcap": float("inf")}, ArgumentError, "softcap", "finite", "inf"),
    ({"sink": 1.0}, DtypeError, "sink", "a tensor", "float"),
    ({"sink": ones(4, dtype=torch.int32)}, DtypeError, "sink", "float16, bfloat16, float32, float64", "int32"),
    ({"sink": ones(2)}, ShapeError, "sink", "(Hq,) with Hq = 4", "(2,)"),
    ({"sink": ones(4, device="meta")}, DeviceError, "sink", "on the device of q", "meta"),
    # lengths of entries, and pages
    ({"seqused_k": [1, 5]}, DtypeError, "seqused_k", "an integer tensor", "list"),
    ({"seqused_k": ones(2)}, DtypeError, "seqused_k", "int32", "float32"),
    ({"seqused_k": USED[:1]}, ShapeError, "seqused_k", "(B,) with B = 2", "(1,)"),
    ({"seqused_k": USED.to("meta")}, DeviceError, "seqused_k", "on the device of q", "meta"),
    (
        {**PACKED, "cu_seqlens_q": Q, "cu_seqlens_k": K, "seqused_k": USED[:1]},
        ArgumentError, "seqused_k", "None with bounds of keys", "a tensor",
    ),
    ({**PAGED, "block_table": TABLE.long()}, DtypeError, "block_table", "int32", "int64"),
    ({**PAGED, "block_table": TABLE[0]}, ShapeError, "block_table", "(B, P) with B = 2", "(3,)"),
    ({**PAGED, "block_table": TABLE[:1]}, ShapeError, "block_table", "(B, P) with B = 2", "(1, 3)"),
    ({**PAGED, "block_table": TABLE.to("meta")}, DeviceError, "block_table", "on the device of q", "meta"),
    ({**PAGED, "cu_seqlens_q": Q}, ShapeError, "q", "of batch size 1", "(2, 6, 4, 8)"),
    ({**PAGED, "cu_seqlens_k": K}, ArgumentError, "seqused_k", "None with bounds of keys", "a tensor"),
    ({**PAGED, "seqused_k": None}, ArgumentError, "seqused_k", "given where there is a block_table", "None"),
    ({**PAGED, "k": ones(7, 0, 2, 8), "v": ones(7, 0, 2, 3)}, ShapeError, "k", "(pages, page_size", "(7, 0, 2, 8)"),
    (
        {**PAGED, "q": ones(2, 6, 4, 8).requires_grad_()},
        ArgumentError, "block_table", "None where gradients are recorded", "a tensor",
    ),
)  # fmt: skip


@each(WRONG)
def test_wrong_arguments(wrong: Wrong, device: torch.device) -> None:
    assert_refused(flash_attention, GOOD, wrong, device)


def test_a_good_call_is_none_of_them() -> None:
    assert flash_attention(**GOOD).shape == (2, 6, 4, 3)
    assert flash_attention(**PACKED, cu_seqlens_q=Q, cu_seqlens_k=K).shape == (1, 6, 4, 3)


@pytest.mark.skipif(not HAS_TRITON, reason="needs Triton")
@pytest.mark.parametrize(
    ("inputs", "reason"),
    [
        ({name: t.double() for name, t in GOOD.items()}, "float64"),
        ({"q": ones(1, 2, 1, 257), "k": ones(1, 2, 1, 257), "v": ones(1, 2, 1, 3)}, "257 features"),
        ({"q": ones(1, 2, 1, 3), "k": ones(1, 2, 1, 3), "v": ones(1, 2, 1, 300)}, "300 features"),
    ],
)
def test_what_the_kernels_cannot_do_is_said_and_done_by_pytorch(inputs: Change, reason: str) -> None:
    assert_left_to_pytorch(flash_attention, inputs, reason)
