"""Delta rule attention: its definition, states, chunks, decoding, and what its kernels compute."""

from typing import Any

import pytest
import torch

from warploom.ops.delta_attention import reference

Tensor = torch.Tensor


def tensors(
    device: torch.device,
    batch: int = 2,
    tokens: int = 37,
    heads: int = 4,
    key_heads: int = 2,
    head_dim: int = 8,
    values: int = 5,
    decay: str | None = "head",
    strength: float = 0.3,
    dtype: torch.dtype = torch.float32,
    encoding: str = "rotate",
) -> dict[str, Any]:
    """Arguments of a call, drawn anew for every test; decays of all strengths up to the given one."""
    drawn: dict[str, Any] = {
        name: torch.randn(batch, tokens, key_heads, head_dim).to(device, dtype) for name in ("q", "k")
    }
    drawn["v"] = torch.randn(batch, tokens, heads, values).to(device, dtype)
    drawn["beta"] = torch.rand(batch, tokens, heads).to(device)
    if decay is not None:
        shape = (batch, tokens, heads, head_dim)[: 3 if decay == "head" else 4]
        drawn["decay"] = -strength * (torch.rand(shape) ** 8).to(device)
    if encoding == "rotate":
        drawn |= {"encoding": "rotate", "theta": torch.rand(key_heads, head_dim // 2).to(device)}
    return drawn | {"normalize": True}


def leaves(call: dict[str, Any]) -> dict[str, Any]:
    """The call with floating tensors that require gradients."""
    return {
        name: x.detach().clone().requires_grad_() if isinstance(x, Tensor) and x.is_floating_point() else x
        for name, x in call.items()
    }


def in_float64(call: dict[str, Any]) -> dict[str, Any]:
    return {name: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for name, x in call.items()}


def by_recurrence(call: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Outputs and the last state, token after token."""
    v, decay = call["v"], call.get("decay")
    place = {"theta": call.get("theta"), "encoding": call.get("encoding", "none"), "normalize": call["normalize"]}
    place |= {"interleaved": call.get("interleaved", False), "offset": call.get("offset", 0)}
    q, k = (
        reference.features(call[name], **place).repeat_interleave(v.shape[2] // call[name].shape[2], 2)
        for name in ("q", "k")
    )
    g = torch.zeros_like(call["beta"])[..., None] if decay is None else decay
    g = g[..., None] if g.dim() == 3 else g
    state = call.get("initial_state")
    if state is None:
        state = v.new_zeros((v.shape[0], v.shape[2], q.shape[3], v.shape[3]))
    rows = (x.transpose(1, 2) for x in (q, k, v, call["beta"][..., None], g))
    out, state = reference.recurrence(*rows, state)
    return out.transpose(1, 2) * call["scale"], state


@pytest.mark.parametrize("strength", [0.3, 1e3, 1e30])
@pytest.mark.parametrize("decay", [None, "head", "feature"])
@pytest.mark.parametrize("tokens", [1, 19, 64, 150])
def test_chunks_are_the_recurrence(tokens: int, decay: str | None, strength: float) -> None:
    """Values, states, and gradients of all inputs."""
    call = tensors(torch.device("cpu"), tokens=tokens, decay=decay, strength=strength)
    call |= {"initial_state": torch.randn(2, 4, 8, 5), "offset": 5, "scale": 0.3}
    call = leaves(in_float64(call))
    wanted = [x for x in call.values() if isinstance(x, Tensor)]
    found, expected = reference.delta_attention(**call, return_state=True), by_recurrence(call)
    grads = [torch.randn_like(x) for x in expected]
    found += torch.autograd.grad(found, wanted, grads)
    expected += torch.autograd.grad(expected, wanted, grads)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)
