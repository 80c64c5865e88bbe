"""Flash attention in PyTorch: transforms, modes, autocast, and as the core of other people's functions."""

from typing import Any

import pytest
import torch
from flash_cases import BACKENDS, backends, kernels, random_inputs

from warploom import flash_attention
from warploom.ops.flash_attention import reference
from warploom.testing.conformance import compute_gradients, draw_like, upcast

Tensor = torch.Tensor


# ----------------------------------------------------------------------------------------------------------
# The usual adapter: one head, (batch, n, d), as a function with gradients
# ----------------------------------------------------------------------------------------------------------


class Attention(torch.autograd.Function):
    """Attention of (batch, n, d) tensors with a backward of its own, on top of the public function."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> Tensor:
        ctx.is_causal = is_causal
        ctx.save_for_backward(q, k, v)
        return attention(q, k, v, is_causal)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        leaves = tuple(t.detach().requires_grad_() for t in ctx.saved_tensors)
        with torch.enable_grad():
            out = attention(*leaves, ctx.is_causal)
        return *torch.autograd.grad(out, leaves, grad), None


def attention(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, backend: str = "auto") -> Tensor:
    q, k, v = (t.unsqueeze(2) for t in (q, k, v))
    return flash_attention(q, k, v, causal=is_causal, backend=backend).squeeze(2)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("backend", [*BACKENDS, "function"])
def test_an_adapter_for_one_head(backend: str, is_causal: bool, device: torch.device) -> None:
    batch, tokens = (4, 128) if device.type == "cuda" else (2, 40)  # less for the interpreter
    q, k, v = (torch.randn(batch, tokens, 64, device=device, requires_grad=True) for _ in range(3))
    grad = torch.randn(batch, tokens, 64, device=device)
    apply = Attention.apply if backend == "function" else lambda *a: attention(*a, backend=backend)
    out = apply(q, k, v, is_causal)
    logits = q @ k.mT / 8
    if is_causal:
        logits = logits.masked_fill(torch.ones(tokens, tokens, device=device).triu(1).bool(), -1e6)
    expected = logits.softmax(-1) @ v
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)
    found, wanted = (torch.autograd.grad(o, (q, k, v), grad) for o in (out, expected))
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


# ----------------------------------------------------------------------------------------------------------
# Which gradients
# ----------------------------------------------------------------------------------------------------------


@backends
@pytest.mark.parametrize("wanted", ["q", "k", "v", "qv"])
def test_only_some_gradients(wanted: str, backend: str, device: torch.device) -> None:
    inputs = random_inputs(device, 17, causal=True)
    everything = compute_gradients(out := flash_attention(**inputs, backend=backend), inputs, draw_like(out))
    some = {n: t.detach().requires_grad_(n in wanted) if isinstance(t, Tensor) else t for n, t in inputs.items()}
    out = flash_attention(**some, backend=backend)
    for name, grad in compute_gradients(out, some, draw_like(out)).items():
        assert torch.equal(grad, everything[name])


@backends
@pytest.mark.parametrize("through", ["out", "lse"])
def test_gradient_through_one_output(through: str, backend: str, device: torch.device) -> None:
    inputs = random_inputs(device, 17, 23, causal=True)
    exact = upcast(inputs)
    found, wanted = (
        torch.autograd.grad(
            dict(zip(("out", "lse"), results))[through].square().sum(),
            [given[n] for n in "qkv"],
            materialize_grads=True,
        )
        for given, results in (
            (inputs, flash_attention(**inputs, return_lse=True, backend=backend)),
            (exact, reference.flash_attention(**exact, return_lse=True)),
        )
    )  # fmt: skip
    torch.testing.assert_close(found, tuple(grad.float() for grad in wanted), rtol=1e-4, atol=1e-5)


@backends
def test_second_derivatives_are_right_or_refused(backend: str, device: torch.device) -> None:
    inputs = random_inputs(device, 5)
    out = flash_attention(**inputs, backend=backend)
    (dq,) = torch.autograd.grad(out.pow(3).sum(), inputs["q"], create_graph=True)
    loss = dq.square().sum() + inputs["q"].sum()
    if backend == "triton":
        with pytest.raises(RuntimeError, match=r"second deriv"):
            loss.backward()
        return
    loss.backward()
    exact = upcast(inputs)
    (dq,) = torch.autograd.grad(reference.flash_attention(**exact).pow(3).sum(), exact["q"], create_graph=True)
    (dq.square().sum() + exact["q"].sum()).backward()
    torch.testing.assert_close(inputs["q"].grad, exact["q"].grad.float(), rtol=1e-4, atol=1e-4)


@kernels
@pytest.mark.filterwarnings("ignore:.*torch.jit.script. is deprecated:DeprecationWarning")  # PyTorch's own
def test_forward_mode(device: torch.device) -> None:
    q, k, v = (t.detach() for t in random_inputs(device, 5).values())
    found = torch.func.jvp(lambda q: flash_attention(q, k, v, backend="triton"), (q,), (q,))
    exact = torch.func.jvp(
        lambda q: reference.flash_attention(q, k.double(), v.double()), (q.double(),), (q.double(),)
    )
    torch.testing.assert_close(found, tuple(x.float() for x in exact), rtol=1e-4, atol=1e-4)


# ----------------------------------------------------------------------------------------------------------
# Transforms and modes
# ----------------------------------------------------------------------------------------------------------


@backends
def test_vmap_and_gradients_per_sample(backend: str, device: torch.device) -> None:
    q, k, v = (torch.randn(3, 1, 7, 2, 16, device=device) for _ in range(3))

    def loss(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out, lse = flash_attention(q, k, v, causal=True, return_lse=True, backend=backend)
        return out.square().sum() + lse.sum()

    found = torch.func.vmap(torch.func.grad(loss, argnums=(0, 1, 2)), in_dims=(0, 0, None))(q, k, v[0])
    for i in range(3):
        one = torch.func.grad(loss, argnums=(0, 1, 2))(q[i], k[i], v[0])
        torch.testing.assert_close(tuple(f[i] for f in found), one)


@backends
def test_modes_of_pytorch(backend: str, device: torch.device) -> None:
    inputs = random_inputs(device, 19, causal=True)
    out, lse = flash_attention(**inputs, return_lse=True, backend=backend)
    assert out.requires_grad
    assert lse.requires_grad
    with torch.no_grad():
        plain = flash_attention(**inputs, backend=backend)
    assert not plain.requires_grad
    assert torch.equal(plain, out)
    with torch.inference_mode():
        assert torch.equal(flash_attention(**inputs, backend=backend), out)


@backends
def test_autocast_casts_as_for_pytorchs_own_attention(backend: str, device: torch.device) -> None:
    inputs = random_inputs(device, 19, causal=True)
    mixed = {**inputs, "v": inputs["v"].detach().bfloat16().requires_grad_()}
    with torch.autocast(device.type, torch.bfloat16):
        out, lse = flash_attention(**mixed, return_lse=True, backend=backend)
        theirs = torch.nn.functional.scaled_dot_product_attention(
            *(t.transpose(1, 2) for t in (mixed["q"], mixed["k"], mixed["v"])), is_causal=True
        )
    low = {n: t.detach().bfloat16() if isinstance(t, Tensor) else t for n, t in inputs.items()}
    assert out.dtype == theirs.dtype == torch.bfloat16
    assert lse.dtype == torch.float32
    assert torch.equal(out, flash_attention(**low, backend=backend))
    found = compute_gradients(out, mixed, draw_like(out))
    assert found["q"].dtype == torch.float32
    assert found["v"].dtype == torch.bfloat16
    with torch.autocast(device.type, torch.bfloat16):
        exact = flash_attention(**upcast(inputs))
    assert exact.dtype == torch.float64


# ----------------------------------------------------------------------------------------------------------
# Weights of the backward
# ----------------------------------------------------------------------------------------------------------


@kernels
@pytest.mark.parametrize(("features", "options"), [(33, {}), (64, {}), (100, {"softcap": 1e4}), (200, {})])
def test_a_single_key_has_all_of_the_weight_in_the_backward(
    features: int, options: dict[str, Any], device: torch.device
) -> None:
    """Its weight is one to the bit, however large its logit is: forward and backward form the same logits."""
    batch, tokens = (8, 64) if device.type == "cuda" else (1, 40)
    q, k, v, grad = (torch.randn(batch, tokens, 4, features, device=device) for _ in range(4))
    v.requires_grad_()
    for keys, window in ((tokens, (0, 0)), (1, None)):
        of_keys = [x[:, :keys] for x in (q, k, v)]
        given = {**options, "scale": 20.0, "window": window, "float32_precision": "highest"}
        out = flash_attention(*of_keys, **given, backend="triton")
        (found,) = torch.autograd.grad(out, v, grad[:, :keys])
        torch.testing.assert_close(out, v[:, :keys], rtol=2**-22, atol=0.0)
        torch.testing.assert_close(found[:, :keys], grad[:, :keys], rtol=2**-22, atol=0.0)
