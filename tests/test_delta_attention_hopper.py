"""The delta rule's kernels for Hopper: in an interpreter on a CPU, and on a Hopper GPU."""

from typing import Any

import pytest
import torch
from planned_calls import forget_plans

from warploom import delta_attention
from warploom.ops.delta_attention.bench import OPERATOR
from warploom.ops.delta_attention.hopper import launch
from warploom.runtime.backend import HAS_TRITON
from warploom.testing.conformance import check_case

pytestmark = pytest.mark.skipif(not HAS_TRITON, reason="needs Triton")

STATES = {"initial_state": True, "return_state": True}
CASES: list[dict[str, Any]] = [
    {},
    {"n": 64},
    {"n": 129, "decay": "head", "normalize": True},
    {"n": 130, "decay": "head", "normalize": True, **STATES},
    {"n": 130, "encoding": "rotate", "normalize": True, "key_heads": 1, "offset": 5, "decay": "head"},
    {"n": 70, "encoding": "rotate", "interleaved": True, "layout": "bhnd", "value_dim": 192, **STATES},
    {"n": 400, "decay": "head", "normalize": True, "batch": 1, "heads": 1, "key_heads": 1, **STATES},
    {"n": 100, "decay": "head", "normalize": True, "batch": 1, "heads": 6, "key_heads": 2},
]


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_values(case: dict[str, Any], head_dim: int, launched: list[str], device: torch.device) -> None:
    whole = {"batch": 2, "n": 200, "heads": 2, "dtype": "bfloat16", "head_dim": head_dim, **case}
    results = check_case(OPERATOR, whole, "triton", device)
    assert not [result.detail for result in results if not result.ok]
    assert "hopper_scan_kernel" in launched


def tensors(device: torch.device, tokens: int, batch: int = 1, heads: int = 4, d: int = 64) -> dict[str, Any]:
    """Arguments of a call: two heads of values for each of keys, and decays of a head."""
    q, k = (torch.randn(batch, tokens, heads // 2, d).to(device, torch.bfloat16) for _ in range(2))
    v = torch.randn(batch, tokens, heads, d).to(device, torch.bfloat16)
    beta, decay = (torch.rand(batch, tokens, heads).to(device) for _ in range(2))
    return {"q": q, "k": k, "v": v, "beta": beta, "decay": -0.3 * decay, "normalize": True, "backend": "triton"}


@pytest.mark.seldom(3, 4)
def test_decays_may_be_of_any_strength(launched: list[str], device: torch.device) -> None:
    """Borders at both ends of a chunk and of its halves, and many in a row: what follows begins anew."""
    call = tensors(device, 200)
    forgets = torch.tensor([-0.1, -90.0, -1e6, -3e38], device=device)
    for n in (31, 32, 63, 64, 100, 127):
        strong = call["decay"].clone()
        strong[:, max(n - 40, 0) : n + 1] = forgets
        whole = {**call, "decay": strong, "return_state": True}
        out, state = delta_attention(**whole)
        later = {name: whole[name][:, n:] for name in ("q", "k", "v", "beta", "decay")}
        alone, last = delta_attention(**{**whole, **later})
        for h in (1, 2, 3):
            for one, other in ((out[:, n:, h], alone[:, :, h]), (state[:, h], last[:, h])):
                assert float((one - other).abs().max()) <= 3e-2 * float(other.abs().max()), (n, h)
    assert "hopper_scan_kernel" in launched


@pytest.mark.parametrize("beta", [0.0, 1.0])
def test_keys_that_are_all_the_same(beta: float, launched: list[str], device: torch.device) -> None:
    """Nothing is learned, or the last value alone is known. The inverse has entries of one size."""
    k = torch.full((1, 150, 1, 64), 0.125, device=device, dtype=torch.bfloat16)
    v = torch.randn(1, 150, 1, 64).to(device, torch.bfloat16)
    out = delta_attention(k, k, v, torch.full((1, 150, 1), beta, device=device), scale=1.0, backend="triton")
    torch.testing.assert_close(out.float(), beta * v.float(), rtol=8e-2, atol=8e-2)
    assert "hopper_scan_kernel" in launched


def test_bits_do_not_depend_on_the_batch_or_on_the_run(launched: list[str], device: torch.device) -> None:
    call = tensors(device, 150, batch=3)
    whole = delta_attention(**call)
    for _ in range(20 if device.type == "cuda" else 1):
        assert torch.equal(delta_attention(**call), whole)
    one = {name: call[name][1:2] for name in ("q", "k", "v", "beta", "decay")}
    assert torch.equal(delta_attention(**{**call, **one}), whole[1:2])
    assert set(launched) == {"hopper_matrix_kernel", "hopper_scan_kernel"}


@pytest.mark.parametrize("group", [3, 4])
def test_heads_that_share_a_key_are_divided_among_programs(
    group: int, launched: list[str], device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bits are those of one program that takes all of them, also where the last one takes fewer."""
    call = tensors(device, 150, heads=2 * group)
    call |= {name: call[name][:, :, :2] for name in ("q", "k")}
    monkeypatch.setattr(launch, "FEW", 1)
    whole = delta_attention(**call)
    forget_plans()
    monkeypatch.setattr(launch, "FEW", 1000)
    assert torch.equal(delta_attention(**call), whole)
    assert launched.count("hopper_matrix_kernel") == 2


def test_what_the_kernels_do_not_take(launched: list[str], device: torch.device) -> None:
    """Rows that are not aligned, few tokens, packed sequences, decays of features."""
    call = tensors(device, 70)
    usual = delta_attention(**call)
    assert launched.count("hopper_scan_kernel") == 1
    shifted = torch.empty(call["q"].numel() + 1, dtype=torch.bfloat16, device=device)[1:].view(call["q"].shape)
    found = delta_attention(**{**call, "q": shifted.copy_(call["q"])})
    torch.testing.assert_close(found.float(), usual.float(), rtol=3e-2, atol=3e-2)
    few = {name: call[name][:, :40] for name in ("q", "k", "v", "beta", "decay")}
    torch.testing.assert_close(
        delta_attention(**{**call, **few}).float(), usual[:, :40].float(), rtol=3e-2, atol=3e-2
    )
    packed = delta_attention(**call, cu_seqlens=torch.tensor([0, 70], dtype=torch.int32, device=device))
    torch.testing.assert_close(packed.float(), usual.float(), rtol=3e-2, atol=3e-2)
    delta_attention(**{**call, "decay": call["decay"][..., None].expand(-1, -1, -1, 64)})
    assert launched.count("hopper_scan_kernel") == 1


CARRY = {"hopper_carry_kernel", "hopper_carry_back_kernel"}
GRADIENTS = {"hopper_states_kernel", "hopper_reverse_kernel", "hopper_gradient_kernel"}
CARRIED: list[dict[str, Any]] = [
    {"n": 64, "decay": "feature"},
    {"n": 64},
    {"n": 140, "heads": 6, "key_heads": 2, "batch": 1, **STATES},
    {"n": 530, "decay": "head", "heads": 3, "batch": 1, "value_dim": 64, **STATES},
    {"n": 577, "decay": "head", "heads": 4, "batch": 1, "encoding": "rotate", "normalize": True, "key_heads": 2},
    {"n": 520, "decay": "head", "normalize": True, "batch": 1, "key_heads": 1, **STATES},
    {"n": 130, "decay": "feature", "normalize": True, **STATES},
    {"n": 513, "decay": "feature", "batch": 1, "heads": 1, "encoding": "rotate", "normalize": True},
    {"n": 100, "layout": "bhnd", "value_dim": 192, **STATES},
]


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("case", CARRIED, ids=str)
def test_values_and_gradients(
    case: dict[str, Any], head_dim: int, launched: list[str], device: torch.device
) -> None:
    """Of more chunks than buffers, too; gradients of decays of short sequences take states in float32."""
    whole = {"batch": 2, "heads": 2, "dtype": "bfloat16", "head_dim": head_dim, **case}
    results = check_case(OPERATOR, whole, "triton", device)
    assert {result.mode for result in results} == {"fwd", "bwd"}
    assert not [result.detail for result in results if not result.ok]
    if "decay" not in case or case["n"] > 512:
        carried = case.get("decay") == "feature" or case.get("value_dim") == 192
        assert (CARRY if carried else GRADIENTS) <= set(launched)
        assert not (GRADIENTS if carried else CARRY) & set(launched)
    assert ("hopper_carry_kernel" if case.get("decay") == "feature" else "hopper_scan_kernel") in launched
