"""What LRPE keeps for its backward, and what it launches."""

import gc
import itertools
import math
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from launches import constants_of
from lrpe_cases import GRADIENT, LAYOUTS, kernels
from planned_calls import forget_plans
from test_lrpe import FEATURES, HEADS, TOKENS, assert_near, encode, exact_gradients, kinds, random_theta, random_x

Tensor = torch.Tensor


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


@pytest.mark.sample(3)
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
    from warploom.ops.lrpe.validation import MAX_ROWS

    features = 1 if kind == "cosine" else 2
    for wants_theta, dtype in itertools.product((False, True), (torch.float32, torch.float16)):
        x = random_x(device, 4, 3, 2, features).to(dtype).requires_grad_()
        theta = random_theta(device, 2, 1).requires_grad_(wants_theta)
        encode(kind, x, theta, activation=activation, backend="triton").sum().backward()
    sizes = [constants.get("R", 0) for _, _, constants in launches]
    assert 64 <= max(sizes) <= 2**31 - MAX_ROWS


@kernels
@kinds
@pytest.mark.parametrize("rows", [1, HEADS])
def test_the_launch_covers_every_row_once(rows: int, kind: str, launches: list[Any], device: torch.device) -> None:
    x = random_x(device, 5, 97, HEADS, FEATURES)
    encode(kind, x, random_theta(device, rows, 4), backend="triton")
    ((_, programs, constants),) = launches
    row_axis, broadcast_axis = (HEADS, 5) if rows > 1 else (5, HEADS)  # see triton/rows.py
    row_tiles = math.ceil(97 * row_axis / constants["R"])
    assert programs == row_tiles * math.ceil(broadcast_axis / constants["S"])
