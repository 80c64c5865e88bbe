"""LRPE under the transforms of torch.func, and in forward mode."""

import pytest
import torch
from lrpe_cases import GRADIENT
from test_lrpe import (
    BATCH,
    FEATURES,
    HEADS,
    assert_near,
    backends,
    encode,
    exact_gradients,
    kinds,
    random_theta,
    random_x,
)

Tensor = torch.Tensor


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
def test_forward_mode(api: str, kind: str, backend: str, device: torch.device) -> None:
    x, theta, tangent = random_x(device), random_theta(device), random_x(device)

    def derivative() -> Tensor | None:
        def function(x: Tensor) -> Tensor:
            return encode(kind, x, theta, offset=3, backend=backend)

        if api == "func":
            return torch.func.jvp(function, (x,), (tangent,))[1]
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(x, tangent)
            return torch.autograd.forward_ad.unpack_dual(function(dual)).tangent

    found = derivative()
    assert found is not None
    assert_near(found, encode(kind, tangent.double(), theta, offset=3, backend="torch"))  # linear in x
