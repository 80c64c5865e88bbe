"""LRPE as a citizen of PyTorch: gradients, transforms, memory order, modes, and what is launched."""

import gc
import itertools
import math
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from launches import ON_GPU, constants_of
from planned_calls import forget_plans
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
from warploom.runtime.backend import HAS_TRITON

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
    x, theta = random_x(device, 3, BATCH, 6, HEADS, FEATURES), random_theta(device)[..., : FEATURES // 4]
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
# What is kept for the backward
# ----------------------------------------------------------------------------------------------------------


def vjp(function: Callable[..., Tensor], x: Tensor, theta: Tensor) -> object:
    """The pullback of those that require a gradient."""
    wanted = [t for t in (x, theta) if t.requires_grad]
    fixed = [t.detach() for t in (x, theta)]

    def of_wanted(*given: Tensor) -> Tensor:
        rest = iter(given)
        return function(*(next(rest) if t.requires_grad else one for t, one in zip((x, theta), fixed)))

    return torch.func.vjp(of_wanted, *(t.detach() for t in wanted))


KEEPING: dict[str, Callable[[Callable[..., Tensor], Tensor, Tensor], object]] = {
    "eager": lambda function, x, theta: function(x, theta),
    "tensor": lambda function, x, theta: function(x, theta, offset=torch.tensor([3, 9], device=x.device)),
    "compiled": lambda function, x, theta: compiled(function)(x, theta),
    "vjp": vjp,
}


def compiled(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A function as PyTorch compiles it, with nothing left of what it compiled for other tests."""
    torch._dynamo.reset()
    return torch.compile(function, backend="aot_eager", fullgraph=True)


@pytest.mark.turns(3)
@kernels
@pytest.mark.parametrize("kind", ["cosine", "rotate"])
@pytest.mark.parametrize("way", KEEPING)
@pytest.mark.parametrize(
    ("activation", "differentiated", "kept"),
    [("none", "x", False), ("none", "theta", True), ("none", "x theta", True), ("silu", "x", True)],
)
def test_x_is_kept_where_the_backward_reads_it(
    activation: str, differentiated: str, kept: bool, way: str, kind: str, device: torch.device
) -> None:
    leaf = random_x(device).requires_grad_("x" in differentiated)
    theta = random_theta(device).requires_grad_("theta" in differentiated)
    seen: list[Any] = []

    def function(x: Tensor, theta: Tensor, **keywords: Any) -> Tensor:
        return encode(kind, x, theta, activation=activation, backend="triton", **keywords)

    def watched(x: Tensor, theta: Tensor) -> object:
        x = x + 0  # which only the graph may keep
        inner = x
        while torch._C._functorch.is_functorch_wrapped_tensor(inner):
            inner = torch._C._functorch.get_unwrapped(inner)
        seen.append(weakref.ref(inner.untyped_storage()))
        return KEEPING[way](function, x, theta) if way != "vjp" else function(x, theta)

    for _ in range(4 if way == "eager" else 1):  # an unknown call, one that is known, and two that are prepared
        graph = vjp(watched, leaf, theta) if way == "vjp" else watched(leaf, theta)  # type: ignore[arg-type]
        gc.collect()
        is_kept = seen[-1]() is not None
        assert is_kept == kept
        del graph


@kernels
@kinds
@pytest.mark.parametrize("layout", ["contiguous", "heads_first", "every_second_feature", "batch_expanded"])
def test_gradients_without_x(layout: str, kind: str, device: torch.device) -> None:
    """Their order in memory is that of x all the same, which is not there."""
    x, theta = LAYOUTS[layout][0](random_x(device)).requires_grad_(), random_theta(device)
    grad = (
        random_x(device, *encode(kind, x, theta, backend="triton").shape)
        .transpose(1, 2)
        .contiguous()
        .transpose(1, 2)
    )
    (exact, _) = exact_gradients(kind, x, theta, grad, offset=5)

    def function(x: Tensor) -> Tensor:
        return encode(kind, x, theta, offset=5, backend="triton")

    ways = [function] * 3 + [compiled(function)] * (kind != "interleaved")
    found = [torch.autograd.grad(way(x), x, grad)[0] for way in ways]
    found.append(torch.func.vjp(function, x.detach())[1](grad)[0])
    for dx in found:
        assert_near(dx, exact, GRADIENT)
        assert dx.stride() == torch.empty_like(x).stride()


def gradient_by_way(way: str, function: Callable[..., Tensor], theta: Tensor, x: Tensor, grad: Tensor) -> Tensor:
    """The gradient of theta from that of ``function(theta, x)``."""

    def loss(theta: Tensor, x: Tensor = x) -> Tensor:
        return (function(theta, x).float() * grad.float()).sum()

    leaf = theta.clone().requires_grad_()
    if way == "eager":
        return torch.autograd.grad(function(leaf, x), leaf, grad)[0]
    if way == "compiled":  # a theta that only the compiled code has
        run = compiled(lambda leaf: function(leaf * 1.0, x))
        return torch.autograd.grad(run(leaf), leaf, grad)[0]
    if way == "vjp":
        return torch.func.vjp(lambda theta: function(theta, x), theta)[1](grad)[0]
    if way == "captured":
        torch.func.vjp(lambda x, theta: function(theta, x), x, leaf)[0].backward(grad)
        assert leaf.grad is not None
        return leaf.grad
    if way == "grad of vmap":
        return torch.func.grad(lambda theta: torch.func.vmap(loss)(theta[None], x[None]).sum())(theta)
    if way == "vmap of grad":
        return torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(theta, x[None])[0]
    if way == "nested":  # in a transform that wraps theta and does not differentiate it
        inner = torch.func.grad_and_value(lambda x, theta: loss(theta, x))
        return torch.func.grad(lambda theta: inner(x, theta)[1])(theta)
    return getattr(torch.func, way)(loss)(theta)  # type: ignore[no-any-return]


@kernels
@kinds
def test_statistics_are_exact_for_a_gradient_of_theta(kind: str, launches: list[Any], device: torch.device) -> None:
    """That gradient is in float32, and rests on the statistics of a softmax over the sequence; others do not."""
    x, theta = random_x(device, 1, TOKENS, HEADS, FEATURES).bfloat16(), random_theta(device)
    grad = random_x(device, *encode(kind, x, theta, backend="triton").shape).bfloat16()

    def function(theta: Tensor, x: Tensor) -> Tensor:
        return encode(kind, x, theta, offset=5, activation="softmax_sequence", backend="triton")

    def forwards() -> list[bool]:
        found = [
            constants["EXACT_SUMS"]
            for kernel, _, constants in launches
            if kernel.__name__ == "sequence_forward_kernel"
        ]
        launches.clear()
        return found

    usual = gradient_by_way("eager", function, theta, x, grad)
    assert forwards()[-1:] == [True]
    ways = ("compiled", "vjp", "grad", "jacrev", "captured", "nested", "grad of vmap", "vmap of grad")
    for way in ways:
        assert torch.equal(gradient_by_way(way, function, theta, x, grad), usual), way
        assert all(forwards()), way

    learnable = theta.clone().requires_grad_()
    with torch.no_grad():
        function(learnable, x)
    function(theta, x.clone().requires_grad_())
    torch.func.vjp(lambda x: function(theta, x), x)
    torch.func.vmap(function, in_dims=(None, 0))(theta, x[None])
    compiled(function)(theta, x.clone().requires_grad_())
    assert forwards() == [False] * 5


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


def wrapping_range(start: int, stop: int, step: int) -> Iterator[int]:
    """`range` as a GPU counts, in 32 bits: past their end it goes on below zero."""
    counter = int(start)
    for _ in range(10):  # turns that a test expects, and some more
        if not counter < int(stop):
            return
        yield counter
        counter = (counter + int(step) + 2**31) % 2**32 - 2**31
    pytest.fail("a kernel has counted past its last row")


@kernels
def test_the_gradient_of_theta_counts_rows_to_the_end_of_32_bits(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One program of a backward, which does the first and the last of its tiles. All rows lie at the same place."""
    from warploom.ops.lrpe import launches as launchers
    from warploom.ops.lrpe.kernels import backward as kernels

    rows, block = 2**31 - 5000, 128
    tiles = -(-rows // block)
    x, grad, dx = (t.expand(1, rows, 1, 2) for t in random_x(device, 3, 1, 1, 1, 2))
    theta, positions = random_theta(device, 1), launchers.Positions()
    monkeypatch.setattr(launchers, "_theta_chunks", lambda *arguments: tiles - 1)
    plan = launchers.plan_backward(grad, x, theta, positions, "rotate", "none", True, None, dx)
    assert block == plan.launch.arguments["blocks"].R
    plan.launch.programs = 1
    if not ON_GPU:  # the interpreter counts on and on
        monkeypatch.setattr(kernels, "range", wrapping_range, raising=False)
    partial = torch.zeros(1, 1, 1, dtype=torch.float64, device=device)
    launchers.launch_backward(plan.launch, x, grad, dx, theta, positions, partial)
    n = torch.cat((torch.arange(block), torch.arange((tiles - 1) * block, rows))).double()
    assert_near(partial[0, 0, 0], theta_gradient(n, x, theta, grad), 1e-4)  # of angles that are 2e-6 off


def theta_gradient(n: Tensor, x: Tensor, theta: Tensor, grad: Tensor) -> Tensor:
    """The gradient of one frequency from tokens at positions ``n``, which all have the same x and gradient."""
    (x1, x2), (g1, g2) = x[0, 0, 0].double(), grad[0, 0, 0].double()
    phi = n.to(x.device) * theta.double()
    turned = (g2 * x1 - g1 * x2) * phi.cos() - (g1 * x1 + g2 * x2) * phi.sin()
    return (n.to(x.device) * turned).sum()


@pytest.mark.gpu
def test_a_gradient_of_2_31_rows(device: torch.device) -> None:
    """The result and the gradient of x have 2³² elements each, theirs have two: 17 GB."""
    if torch.cuda.mem_get_info()[0] < 20e9:
        pytest.skip("needs more GPU memory")
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

    from warploom.ops.lrpe.kernels.backward import reduce_kernel
    from warploom.ops.lrpe.launches import Positions
    from warploom.ops.lrpe.softmax_sequence import launches as launchers_sequence
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
    plan = launchers_sequence._plan(None, x, theta, Positions(), "cosine", False, False)
    out, statistics = plan.result.empty(x), dtheta
    run_last(heads, plan.launch, x, out, statistics, None, None, theta, None, None, None, 0)
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


# ----------------------------------------------------------------------------------------------------------
# Launches
# ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, int, dict[str, Any]]]:
    """What is launched during a test: function, number of programs, compile-time constants by name."""
    from warploom.runtime.launch import Launch

    launched, call = [], Launch.__call__

    def record(self: Launch, *given: Any) -> None:
        if not self.descriptions:
            launched.append((self.kernel, self.programs, constants_of(self)))
        call(self, *given)

    monkeypatch.setattr(Launch, "__call__", record)
    forget_plans()  # plans are made anew
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
@pytest.mark.parametrize("activation", ["none", "silu", "softmax", "softmax_sequence"])
def test_no_tile_reaches_from_the_last_row_beyond_32_bits(
    activation: str, kind: str, launches: list[Any], device: torch.device
) -> None:
    """The shorter a row, the more there are in a tile."""
    from warploom.ops.lrpe.operator import variant_of
    from warploom.ops.lrpe.validation import MAX_ROWS, Options

    features = 1 if kind == "cosine" else 2
    for wants_theta, dtype, in_blocks in itertools.product(
        (False, True), (torch.float32, torch.float16), (False, True)
    ):
        x = random_x(device, 4, 3, 2, features).to(dtype).requires_grad_()
        theta = random_theta(device, 2, 1).requires_grad_(wants_theta)
        variant = {"block_parallel": True} if in_blocks else {}
        variant_of(**variant)(x, theta, 0, Options(0, (), kind, activation)).sum().backward()
    sizes = [constants.get("R", 0) for _, _, constants in launches]
    assert 64 <= max(sizes) <= 2**31 - MAX_ROWS


@kernels
@kinds
@pytest.mark.parametrize("rows", [1, HEADS])
def test_the_launch_covers_every_row_once(rows: int, kind: str, launches: list[Any], device: torch.device) -> None:
    x = random_x(device, 5, 97, HEADS, FEATURES)
    encode(kind, x, random_theta(device, rows, 4), backend="triton")
    ((_, programs, constants),) = launches
    row_axis, broadcast_axis = (HEADS, 5) if rows > 1 else (5, HEADS)  # see kernels/rows.py
    row_tiles = math.ceil(97 * row_axis / constants["R"])
    assert programs == row_tiles * math.ceil(broadcast_axis / constants["S"])
