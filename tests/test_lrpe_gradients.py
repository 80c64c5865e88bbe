"""LRPE as a citizen of PyTorch: gradients, transforms, memory order, modes, and what is launched."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_lrpe import (
    BATCH,
    FEATURES,
    HEADS,
    TOKENS,
    assert_near,
    backends,
    encode,
    exact_gradients,
    kinds,
    place,
    random_theta,
    random_x,
)

from warploom.backend import HAS_TRITON
from warploom.plans import Plans

Tensor = torch.Tensor

kernels = pytest.mark.skipif(not HAS_TRITON, reason="needs Triton")

# ----------------------------------------------------------------------------------------------------------
# Gradients
# ----------------------------------------------------------------------------------------------------------

# Gradients multiply once more than the forward does, and that of theta adds many such products.
GRADIENT = 2e-6

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
@pytest.mark.parametrize("frequencies", [1, 3, 10])  # partial; partial or cut, by the number of axes; cut
def test_gradients_by_place(frequencies: int, name: str, kind: str, backend: str, device: torch.device) -> None:
    batch, where = place(name, device)
    x, theta = random_x(device, batch, TOKENS, HEADS, FEATURES), random_theta(device, HEADS, frequencies)
    out = encode(kind, x.requires_grad_(), theta.requires_grad_(), **where, backend=backend)
    grad = random_x(device, *out.shape)
    found = torch.autograd.grad(out, (x, theta), grad)
    for one, exact in zip(found, exact_gradients(kind, x, theta, grad, **where)):
        assert_near(one, exact, GRADIENT)
    angles = FEATURES if kind == "cosine" else FEATURES // 2
    assert not found[1][:, angles:].any()  # frequencies that no feature uses


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
def test_gradients_without_heads(rows: tuple[int, ...], kind: str, backend: str, device: torch.device) -> None:
    x, theta = random_x(device, 2, 5, 0, 8).requires_grad_(), random_theta(device, *rows).requires_grad_()
    out = encode(kind, x, theta, backend=backend)
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


# ----------------------------------------------------------------------------------------------------------
# Transforms
# ----------------------------------------------------------------------------------------------------------


@backends
@kinds
def test_func_grad(kind: str, backend: str, device: torch.device) -> None:
    x, theta = random_x(device), random_theta(device)
    weight = random_x(device, *encode(kind, x, theta, backend=backend).shape)

    def loss(x: Tensor, theta: Tensor) -> Tensor:
        return (encode(kind, x, theta, activation="silu", prefix=2, backend=backend) * weight).sum()

    found = torch.func.grad(loss, argnums=(0, 1))(x, theta)
    for one, exact in zip(found, exact_gradients(kind, x, theta, weight, activation="silu", prefix=2)):
        assert_near(one, exact, GRADIENT)


@backends
@kinds
@pytest.mark.parametrize("mapped", ["x", "theta", "offset", "x theta offset"])
def test_vmap(mapped: str, kind: str, backend: str, device: torch.device) -> None:
    samples = {
        "x": random_x(device, BATCH, 3, 6, HEADS, FEATURES),
        "theta": random_theta(device, HEADS, 3, 4),
        "offset": torch.tensor([0, 70, 900], device=device),
    }
    axes = {name: {"x": 1, "theta": 1, "offset": 0}[name] for name in mapped.split()}
    fixed = {name: t.select(min(t.dim() - 1, 1), 0) for name, t in samples.items() if name not in axes}

    def function(*values: Tensor) -> Tensor:
        return encode(kind, **fixed, **dict(zip(axes, values)), backend=backend)

    found = torch.func.vmap(function, in_dims=tuple(axes.values()))(*(samples[name] for name in axes))
    for i, one in enumerate(found):
        assert_near(one, function(*(samples[name].select(axis, i) for name, axis in axes.items())))


@backends
@kinds
def test_vmap_with_a_grid(kind: str, backend: str, device: torch.device) -> None:
    x, theta = random_x(device, 3, BATCH, 6, HEADS, FEATURES), random_theta(device)
    found = torch.func.vmap(lambda x: encode(kind, x, theta, grid=(2, 3), backend=backend))(x)
    for one, sample in zip(found, x, strict=True):
        assert_near(one, encode(kind, sample, theta, grid=(2, 3), backend=backend))


@backends
@kinds
def test_gradients_per_sample(kind: str, backend: str, device: torch.device) -> None:
    x, theta = random_x(device, 3, 1, 5, HEADS, FEATURES), random_theta(device)

    def loss(theta: Tensor, x: Tensor) -> Tensor:
        return encode(kind, x, theta, activation="silu", backend=backend).pow(4).sum()

    found = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(theta, x)
    for one, sample in zip(found, x, strict=True):
        assert_near(one, torch.func.grad(loss)(theta, sample), GRADIENT)


@backends
@kinds
@pytest.mark.parametrize("api", ["func", "dual"])
@pytest.mark.filterwarnings("ignore:.*torch.jit.script. is deprecated:DeprecationWarning")  # PyTorch's own
def test_forward_mode_is_right_or_refused(api: str, kind: str, backend: str, device: torch.device) -> None:
    x, theta, tangent = random_x(device), random_theta(device), random_x(device)

    def derivative() -> Tensor | None:
        def function(x: Tensor) -> Tensor:
            return encode(kind, x, theta, offset=3, backend=backend)

        if api == "func":
            return torch.func.jvp(function, (x,), (tangent,))[1]
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(x, tangent)
            return torch.autograd.forward_ad.unpack_dual(function(dual)).tangent

    if backend == "triton":
        with pytest.raises(RuntimeError, match=r"(?i)jvp|forward.?mode|forward AD"):
            derivative()
        return
    found = derivative()
    assert found is not None
    assert_near(found, encode(kind, tangent.double(), theta, offset=3, backend=backend))  # linear in x


# ----------------------------------------------------------------------------------------------------------
# Memory order and modes
# ----------------------------------------------------------------------------------------------------------

# How to lay x out, and its axes from the slowest to the fastest in memory.
LAYOUTS: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "contiguous": (lambda x: x, "BNHD"),
    "heads_first": (lambda x: x.transpose(1, 2).contiguous().transpose(1, 2), "BHND"),
    "tokens_first": (lambda x: x.transpose(0, 1).contiguous().transpose(0, 1), "NBHD"),
    "features_before_heads": (lambda x: x.mT.contiguous().mT, "BNDH"),
    "every_second_head": (lambda x: x.repeat_interleave(2, dim=2)[:, :, ::2], "BNHD"),
    "every_second_feature": (lambda x: x.repeat_interleave(2, dim=3)[..., ::2], "BNHD"),
    "every_second_token": (lambda x: x.repeat_interleave(2, dim=1)[:, ::2], "BNHD"),
    "misaligned": (lambda x: torch.cat((x.new_zeros(1), x.flatten()))[1:].view(x.shape), "BNHD"),
    # An expanded axis has no place of its own in memory, but must not come between the features.
    "batch_expanded": (lambda x: x[:1].expand(BATCH, -1, -1, -1), "NHD"),
    "heads_expanded": (lambda x: x[:, :, :1].expand(-1, -1, HEADS, -1), "BND"),
    "heads_first_and_batch_expanded": (
        lambda x: x[:1].transpose(1, 2).contiguous().transpose(1, 2).expand(BATCH, -1, -1, -1),
        "HND",
    ),
}


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


# ----------------------------------------------------------------------------------------------------------
# Launches
# ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, int, dict[str, Any]]]:
    """What is launched during a test: function, number of programs, compile-time constants by name."""
    from warploom.launch import Kernel
    from warploom.ops.lrpe import api

    launched, call = [], Kernel.__call__

    def record(kernel: Any, programs: int, tensors: Any, integers: Any, constants: Any, *rest: Any) -> None:
        names = kernel.function.arg_names[-len(constants) :]
        launched.append((kernel.function, programs, dict(zip(names, constants))))
        call(kernel, programs, tensors, integers, constants, *rest)

    monkeypatch.setattr(Kernel, "__call__", record)
    monkeypatch.setattr(api, "_on_kernels", Plans())  # a launch like an earlier one does not pass by here
    return launched


@kernels
@kinds
def test_no_length_is_a_constant(kind: str, launches: list[Any], device: torch.device) -> None:
    theta = random_theta(device, HEADS, 4).requires_grad_()
    groups: list[list[tuple[tuple[int, int], dict[str, Any]]]] = [
        [((b, n), {"offset": o, "prefix": p}) for b, n, o, p in ((2, 5, 0, 0), (3, 16, 7, 2), (9, 1, 2**24, 1))],
        [((2, 6), {"grid": (2, 3)}), ((3, 7), {"grid": (1, 5), "prefix": 2})],
        [((1, 6), {"cu_seqlens": torch.tensor(c, device=device)}) for c in ([0, 6], [0, 2, 2, 5, 6])],
    ]
    for group in groups:
        launches.clear()
        for (batch, tokens), where in group:
            x = random_x(device, batch, tokens, HEADS, 16).requires_grad_()
            encode(kind, x, theta, **where, backend="triton").sum().backward()
        compiled = {(function, tuple(constants.items())) for function, _, constants in launches}
        assert len(compiled) == 3  # forward, backward, and the sum of theta's gradient


@kernels
@kinds
@pytest.mark.parametrize("rows", [1, HEADS])
def test_the_launch_covers_every_row_once(rows: int, kind: str, launches: list[Any], device: torch.device) -> None:
    x = random_x(device, 5, 97, HEADS, FEATURES)
    encode(kind, x, random_theta(device, rows, 4), backend="triton")
    ((_, programs, constants),) = launches
    unique, shared = (HEADS, 5) if rows > 1 else (5, HEADS)  # see kernels.py: what shares a row's angles
    row_tiles = math.ceil(97 * unique / constants["BLOCK_R"])
    assert programs == row_tiles * math.ceil(shared / constants["BLOCK_S"])
