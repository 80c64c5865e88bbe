"""Gradients of LRPE: right, of any memory order, beyond 32 bits, and in PyTorch's modes."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from launches import ON_GPU
from lrpe_cases import GRADIENT, LAYOUTS, kernels
from test_lrpe import (
    AMOUNTS,
    BATCH,
    FEATURES,
    HEADS,
    TOKENS,
    amounts,
    assert_near,
    backends,
    encode,
    exact_gradients,
    kinds,
    most_frequencies,
    place,
    random_theta,
    random_x,
)

from warploom import lrpe_rotate

Tensor = torch.Tensor

THETAS: dict[str, Callable[[Tensor], Tensor]] = {
    "per_head": lambda theta: theta,
    "shared": lambda theta: theta[:1],
    "vector": lambda theta: theta[0],
    "half": lambda theta: theta.half(),
    "bfloat16": lambda theta: theta.bfloat16(),
    "float64": lambda theta: theta.double(),
    "every_second_frequency": lambda theta: theta.repeat_interleave(2, dim=1)[:, ::2],
    "frequencies_first": lambda theta: theta.mT.contiguous().mT,
    "vector_backwards_in_steps": lambda theta: theta.mT.contiguous()[:, 1],
    "heads_expanded": lambda theta: theta[:1].expand(HEADS, -1),
    "frequencies_expanded": lambda theta: theta[:, :1].expand(-1, 4),
}


@backends
@kinds
@pytest.mark.parametrize("form", THETAS)
def test_gradients(form: str, kind: str, backend: str, device: torch.device) -> None:
    x = random_x(device).requires_grad_()
    theta = THETAS[form](random_theta(device)).detach().requires_grad_()
    keywords: dict[str, Any] = {"offset": 40, "activation": "silu"}
    out = encode(kind, x, theta, **keywords, backend=backend)
    grad = random_x(device, *out.shape)
    given = grad.clone()
    out.backward(grad)
    assert x.grad is not None
    assert theta.grad is not None
    assert (x.grad.dtype, x.grad.shape) == (x.dtype, x.shape)
    assert (theta.grad.dtype, theta.grad.shape) == (theta.dtype, theta.shape)
    assert torch.equal(grad, given)
    dx, dtheta = exact_gradients(kind, x, theta, grad, **keywords)
    assert_near(x.grad, dx, GRADIENT)
    assert_near(theta.grad, dtheta, max(GRADIENT, torch.finfo(theta.dtype).eps))  # with one rounding to its dtype


@backends
@kinds
@pytest.mark.parametrize("name", ["prefix", "offset_per_entry", "grid_3d", "ids_of_three_axes", "packed"])
@amounts
def test_gradients_by_place(amount: str, name: str, kind: str, backend: str, device: torch.device) -> None:
    batch, where = place(name, device)
    frequencies = AMOUNTS[amount](most_frequencies(kind, where))
    x, theta = random_x(device, batch, TOKENS, HEADS, FEATURES), random_theta(device, HEADS, frequencies)
    out = encode(kind, x.requires_grad_(), theta.requires_grad_(), **where, backend=backend)
    grad = random_x(device, *out.shape)
    found = torch.autograd.grad(out, (x, theta), grad)
    for one, exact in zip(found, exact_gradients(kind, x, theta, grad, **where)):
        assert_near(one, exact, GRADIENT)


@backends
@kinds
def test_only_what_requires_a_gradient_gets_one(kind: str, backend: str, device: torch.device) -> None:
    x, theta = random_x(device), random_theta(device)
    both = [t.clone().requires_grad_() for t in (x, theta)]
    out = encode(kind, *both, activation="silu", backend=backend)
    grad = random_x(device, *out.shape)
    out.backward(grad)
    for i in range(2):
        one = [t.clone().requires_grad_(i == k) for k, t in enumerate((x, theta))]
        encode(kind, *one, activation="silu", backend=backend).backward(grad)
        assert_near(one[i].grad, both[i].grad)
        assert one[1 - i].grad is None


@backends
@kinds
def test_gradients_accumulate(kind: str, backend: str, device: torch.device) -> None:
    x, theta = random_x(device).requires_grad_(), random_theta(device).requires_grad_()
    out = encode(kind, x, theta, activation="silu", backend=backend)
    grad = random_x(device, *out.shape)
    out.backward(grad, retain_graph=True)
    once = [t.grad.clone() for t in (x, theta)]
    out.backward(grad)
    encode(kind, x, theta, activation="silu", backend=backend).backward(grad)
    for leaf, first in zip((x, theta), once):
        assert_near(leaf.grad, 3 * first)


@backends
@kinds
@pytest.mark.parametrize("rows", [(0, 4), (1, 4), (4,)])
@pytest.mark.parametrize("activation", ["none", "softmax", "softmax_sequence"])
def test_gradients_without_heads(
    activation: str, rows: tuple[int, ...], kind: str, backend: str, device: torch.device
) -> None:
    x, theta = random_x(device, 2, 5, 0, 8).requires_grad_(), random_theta(device, *rows).requires_grad_()
    out = encode(kind, x, theta, activation=activation, backend=backend)
    assert out.shape == (2, 5, 0, 16 if kind == "cosine" else 8)
    dx, dtheta = torch.autograd.grad(out, (x, theta), out.detach())
    assert dx.shape == x.shape
    assert torch.equal(dtheta, torch.zeros_like(theta))


UPSTREAM: dict[str, Callable[[Tensor], Tensor]] = {
    "one_number": lambda grad: grad.flatten()[0].expand(grad.shape),  # what out.sum().backward() hands down
    "expanded_over_tokens": lambda grad: grad[:, :1].expand(grad.shape),
    "heads_first": lambda grad: grad.transpose(1, 2).contiguous().transpose(1, 2),
    "features_first": lambda grad: grad.movedim(-1, 0).contiguous().movedim(0, -1),
    "every_second_feature": lambda grad: grad.repeat_interleave(2, dim=-1)[..., ::2],
}


@backends
@kinds
@pytest.mark.parametrize("upstream", UPSTREAM)
def test_any_strides_of_the_incoming_gradient(upstream: str, kind: str, backend: str, device: torch.device) -> None:
    x, theta = random_x(device).requires_grad_(), random_theta(device).requires_grad_()
    out = encode(kind, x, theta, offset=5, backend=backend)
    grad = UPSTREAM[upstream](random_x(device, *out.shape))
    assert not grad.is_contiguous()
    found = torch.autograd.grad(out, (x, theta), grad)
    for one, exact in zip(found, exact_gradients(kind, x, theta, grad, offset=5)):
        assert_near(one, exact, GRADIENT)


@backends
@kinds
@pytest.mark.parametrize("loss", ["linear", "cubic"])
def test_second_derivatives_are_right_or_refused(loss: str, kind: str, backend: str, device: torch.device) -> None:
    def penalty(x: Tensor, theta: Tensor, backend: str) -> None:
        out = encode(kind, x, theta, backend=backend)
        first = torch.autograd.grad(
            out.sum() if loss == "linear" else out.pow(3).sum(), (x, theta), create_graph=True
        )
        # The first derivatives themselves, not only their gradients, keep the graph from being empty.
        (x.sum() + theta.sum() + sum(g.square().sum() for g in first)).backward()

    x, theta = random_x(device).requires_grad_(), random_theta(device).requires_grad_()
    if backend == "triton":  # a silent omission would train something else than what was written
        with pytest.raises(RuntimeError, match=r"(?i)second deriv|differentiate twice"):
            penalty(x, theta, backend)
        return
    penalty(x, theta, backend)
    exact = [t.detach().double().requires_grad_() for t in (x, theta)]
    penalty(*exact, backend)
    for leaf, wanted in zip((x, theta), exact):
        assert_near(leaf.grad, wanted.grad, 4 * GRADIENT)


@backends
@kinds
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("features", [FEATURES, 16])
def test_memory_order(features: int, layout: str, kind: str, backend: str, device: torch.device) -> None:
    arrange, order = LAYOUTS[layout]
    x, theta = arrange(random_x(device, BATCH, 5, HEADS, features)), random_theta(device, HEADS, 4)
    out = encode(kind, x, theta, activation="relu", backend=backend)
    assert torch.equal(out, encode(kind, x.contiguous(), theta, activation="relu", backend=backend))
    fastest_last = sorted("BNHD", key=lambda axis: -out.stride("BNHD".index(axis)))
    assert out.permute(["BNHD".index(axis) for axis in fastest_last]).is_contiguous()
    assert "".join(axis for axis in fastest_last if axis in order) == order
    assert fastest_last[-1] == order[-1]
    if kind != "cosine":
        assert out.stride() == torch.empty_like(x).stride()


@kernels
@kinds
def test_addresses_beyond_32_bits(kind: str, device: torch.device, gpu_memory: Callable[[float], None]) -> None:
    """Axes whose far ends lie 2³¹ elements and more apart, in memory of which little is ever touched."""
    # Triton's interpreter holds a small integer in 32 bits whatever type the kernel declares, so that a stride
    # which travels divided by 16 would overflow there when it is multiplied again.
    features, far = 8, 2**31 + (16 if device.type == "cuda" else 8)

    def spread(values: Tensor, axis: int) -> Tensor:
        stride = [64, 32, 16, 1]
        stride[axis] = far
        size = 2 * values.element_size() * far
        if device.type == "cuda":
            gpu_memory(3 * size / 2**30)
        return (
            torch.empty(far + 256, dtype=values.dtype, device=device).as_strided(values.shape, stride).copy_(values)
        )

    theta = random_theta(device, 2, 4)
    for axis in range(3):
        x = random_x(device, 2, 2, 2, features).bfloat16()
        grad = random_x(device, *encode(kind, x, theta, backend="triton").shape).bfloat16()
        results = []
        for arrange in (lambda t: t, lambda t, axis=axis: spread(t, axis)):
            leaves = arrange(x).detach().requires_grad_(), theta.clone().requires_grad_()
            out = encode(kind, *leaves, backend="triton")
            results.append((out, *torch.autograd.grad(out, leaves, arrange(grad))))
        (out, dx, dtheta), (far_out, far_dx, far_dtheta) = results
        assert torch.equal(far_out, out)
        assert torch.equal(far_dx, dx)
        assert_near(far_dtheta, dtheta)


@kernels
def test_the_gradient_of_theta_counts_rows_to_the_end_of_32_bits(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One program of a backward, which does the first and the last of its tiles. All rows lie at the same place."""
    from warploom.ops.lrpe import engine as launchers
    from warploom.ops.lrpe.call import LrpeInputs, LrpeOptions

    rows, block = 2**31 - 5000, 128
    tiles = -(-rows // block)
    x, grad, dx = (t.expand(1, rows, 1, 2) for t in random_x(device, 3, 1, 1, 1, 2))
    inputs = LrpeInputs(x, random_theta(device, 1))
    monkeypatch.setattr(launchers, "_theta_chunks", lambda *arguments: tiles - 1)
    plan = launchers.plan_backward(grad, inputs, LrpeOptions(), True, dx)
    assert block == plan.launch.arguments["config"].R
    plan.launch.programs = 1
    partial = torch.zeros(1, 1, 1, dtype=torch.float64, device=device)
    plan.launch(*inputs, grad, dx, partial, 0)
    n = torch.cat((torch.arange(block), torch.arange((tiles - 1) * block, rows))).double()
    assert_near(partial[0, 0, 0], theta_gradient(n, x, inputs.theta, grad), 1e-4)  # of angles that are 2e-6 off


def theta_gradient(n: Tensor, x: Tensor, theta: Tensor, grad: Tensor) -> Tensor:
    """The gradient of one frequency from tokens at positions ``n``, which all have the same x and gradient."""
    (x1, x2), (g1, g2) = x[0, 0, 0].double(), grad[0, 0, 0].double()
    phi = n.to(x.device) * theta.double()
    turned = (g2 * x1 - g1 * x2) * phi.cos() - (g1 * x1 + g2 * x2) * phi.sin()
    return (n.to(x.device) * turned).sum()


@pytest.mark.gpu
def test_a_gradient_of_2_31_rows(device: torch.device, gpu_memory: Callable[[float], None]) -> None:
    """The result and the gradient of x have 2³² elements each, theirs have two: 17 GB."""
    gpu_memory(20)
    rows, part = 2**31 - 5000, 2**24
    x, grad = (torch.tensor(t, device=device).half().expand(1, rows, 1, 2) for t in ([1.0, 0.5], [-0.25, 2.0]))
    theta = torch.full((1,), 2.0**-33, device=device, requires_grad=True)  # no turn, in which terms would cancel
    out = lrpe_rotate(x, theta, backend="triton")
    (found,) = torch.autograd.grad(out, theta, grad)
    parts = (torch.arange(n, min(n + part, rows), device=device) for n in range(0, rows, part))
    assert_near(found[0], sum(theta_gradient(n.double(), x, theta.detach(), grad) for n in parts), GRADIENT)


@pytest.mark.skipif(ON_GPU, reason="starts a program in the middle of a grid, as the interpreter alone can")
@kernels
def test_places_of_sums_beyond_32_bits(checked_integers: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last head of so many that their frequencies, or their columns' statistics, are 2³¹ numbers."""
    from triton.runtime import interpreter

    from warploom.ops.lrpe.call import LrpeInputs, LrpeOptions
    from warploom.ops.lrpe.softmax_sequence import engine as launchers_sequence
    from warploom.ops.lrpe.triton.backward import reduce_kernel
    from warploom.runtime.launch import Launch

    def run_last(heads: int, launch: Launch, *tensors: Any) -> None:
        builder = interpreter.interpreter_builder
        monkeypatch.setattr(
            builder, "set_grid_idx", lambda x, y, z: setattr(builder, "grid_idx", (heads - 1, y, z))
        )
        launch.programs = 1
        launch(*tensors)

    features, heads = 8, 2**28
    partial, dtheta = torch.empty(2, heads * features, dtype=torch.float16)
    partial[-features:] = torch.arange(features)
    constants = {"AXES": 1, "F": features, "E": features, "BLOCK_P": 64, "BLOCK_E": 16, "PDL": False}
    launch = Launch(reduce_kernel, heads, takes=("partial", "dtheta"), heads=heads, parts=1, **constants)
    run_last(heads, launch, partial, dtheta)
    assert torch.equal(dtheta[-features:], torch.arange(features).half())

    heads = 2**27  # of two statistics a feature
    x, theta = torch.arange(features).half().expand(1, 1, heads, features), torch.zeros(features)
    inputs = LrpeInputs(x, theta)
    plan = launchers_sequence.plan_sequence(None, inputs, LrpeOptions(kind="cosine"))
    out, statistics = plan.result.empty(x), dtheta
    run_last(heads, plan.launch, *inputs, out, statistics, None, None, 0)
    assert torch.equal(statistics[-2 * features :], torch.cat((x[0, 0, 0], torch.ones(features).half())))
    assert torch.equal(out[0, 0, -1], torch.cat((torch.ones(features), torch.zeros(features))).half())


@backends
@kinds
def test_modes_of_pytorch(kind: str, backend: str, device: torch.device) -> None:
    x, theta = random_x(device).requires_grad_(), random_theta(device).requires_grad_()
    expected = encode(kind, x, theta, activation="silu", backend=backend)
    assert expected.requires_grad
    with torch.no_grad():
        plain = encode(kind, x, theta, activation="silu", backend=backend)
    assert plain.grad_fn is None
    assert not plain.requires_grad
    assert torch.equal(plain, expected)
    with torch.inference_mode():
        inferred = encode(kind, x, theta, activation="silu", backend=backend)
        assert inferred.is_inference()
        assert torch.equal(inferred, expected)
    with torch.autocast(device.type, torch.bfloat16):
        assert torch.equal(encode(kind, x, theta, activation="silu", backend=backend), expected)
        half = encode(kind, x.bfloat16(), theta, activation="softmax", backend=backend)
    assert half.dtype == torch.bfloat16
    assert encode(kind, x.detach(), theta.detach(), backend=backend).grad_fn is None
