"""Positions and attention in one operator: to the last bit what the two operators give one after the other."""

from collections.abc import Callable

import pytest
import torch
from launches import choose_as_on, driver_accepts
from strided import strided_view

from warploom import flash_attention, lrpe_rotate
from warploom.nn import Attention, RotaryEmbedding
from warploom.runtime.backend import HAS_TRITON

if not HAS_TRITON:
    pytest.skip("needs Triton", allow_module_level=True)

from warploom.ops.flash_attention.hopper import launch as launchers_hopper
from warploom.ops.flash_attention.triton import launch as tiling
from warploom.ops.flash_attention.triton import launch_small as launchers_small
from warploom.ops.rotary_attention import engine as module
from warploom.ops.rotary_attention.api import rotary_attention
from warploom.ops.rotary_attention.call import RotaryInputs, RotaryOptions
from warploom.testing.poison import poison_allocations

Tensor = torch.Tensor
SCALE = 0.3


def one_after_the_other(qkv: Tensor, theta: Tensor, heads: int, interleaved: bool) -> Tensor:
    kv_heads = (qkv.shape[2] - heads) // 2
    qk, v = qkv.split((heads + kv_heads, kv_heads), dim=2)
    q, k = lrpe_rotate(qk, theta, interleaved=interleaved, backend="triton").split((heads, kv_heads), dim=2)
    out = flash_attention(q, k, v, causal=True, scale=SCALE, backend="triton")
    assert isinstance(out, Tensor)
    return out


def both(qkv: Tensor, theta: Tensor, heads: int, interleaved: bool) -> Tensor:
    return rotary_attention(qkv, theta, heads, SCALE, interleaved=interleaved)


def compiled(qkv: Tensor, theta: Tensor, heads: int, interleaved: bool) -> Tensor:
    torch.compiler.reset()
    return torch.compile(both, fullgraph=True, backend="aot_eager")(qkv, theta, heads, interleaved)


def results(attend: Callable[..., Tensor], *inputs: Tensor, heads: int, interleaved: bool = False) -> list[Tensor]:
    """Attention and the gradients of the inputs that want one, on poisoned memory."""
    with poison_allocations():
        out = attend(*inputs, heads, interleaved)
        grad = torch.linspace(-1, 1, out.numel(), device=out.device).view_as(out).to(out.dtype)
        return [out, *torch.autograd.grad(out, [x for x in inputs if x.requires_grad], grad)]


def assert_same(found: list[Tensor], expected: list[Tensor]) -> None:
    assert len(found) == len(expected)
    assert found[0].stride() == expected[0].stride()
    for one, other in zip(found, expected):
        assert one.dtype == other.dtype
        assert not one.isnan().any()
        assert torch.equal(one, other)


def inputs(
    dtype: torch.dtype, tokens: int, heads: int, features: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    qkv = torch.randn(2, tokens, heads, features, dtype=dtype, device=device).requires_grad_()
    return qkv, torch.rand(1, features // 2, device=device)


@pytest.mark.sample(2)
@pytest.mark.parametrize("attend", [both, compiled])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("heads", "kv_heads", "features"), [(2, 2, 16), (4, 2, 6), (3, 1, 8)])
@pytest.mark.parametrize("learnable", [False, True])
def test_it_is_the_two_operators(
    attend: Callable[..., Tensor],
    dtype: torch.dtype,
    heads: int,
    kv_heads: int,
    features: int,
    learnable: bool,
    device: torch.device,
) -> None:
    qkv, theta = inputs(dtype, 19, heads + 2 * kv_heads, features, device)
    theta.requires_grad_(learnable)
    expected = results(one_after_the_other, qkv, theta, heads=heads, interleaved=learnable)
    for _ in range(2):  # the second time it is known how
        assert_same(results(attend, qkv, theta, heads=heads, interleaved=learnable), expected)


def test_split_kv_loops(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiling, "best_splits", lambda *arguments: 3)
    qkv, theta = inputs(torch.float32, 150, 3, 16, device)
    assert_same(results(both, qkv, theta, heads=1), results(one_after_the_other, qkv, theta, heads=1))


def test_any_strides(device: torch.device) -> None:
    qkv, theta = inputs(torch.float32, 11, 4, 8, device)
    view = strided_view(qkv.detach(), torch.Generator().manual_seed(0)).tensor.requires_grad_()
    assert_same(results(both, view, theta, heads=2), results(one_after_the_other, view, theta, heads=2))


@pytest.mark.parametrize(("heads", "kv_heads", "features"), [(2, 2, 64), (4, 2, 40)])
@pytest.mark.parametrize("sliced", [False, True])
@pytest.mark.parametrize("together", [False, True])
def test_kernels_for_hopper_read_parts_of_larger_tensors(
    heads: int, kv_heads: int, features: int, sliced: bool, together: bool, launched: list[str],
    device: torch.device, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(launchers_hopper, "_SHORT", 0)  # short loops too
    monkeypatch.setattr(launchers_hopper, "_FUSED", 0 if together else 2**31)
    monkeypatch.setattr(launchers_small, "suits_backward", lambda *arguments: False)  # small problems too
    monkeypatch.setattr(tiling, "is_small_for", lambda *arguments: False)
    qkv, theta = inputs(torch.float16, 70, heads + 2 * kv_heads + 9, features, device)
    qkv = (qkv.detach()[:, :, 8:-1] if sliced else qkv.detach()[:, :, 9:].clone()).requires_grad_()
    expected = results(one_after_the_other, qkv, theta, heads=heads)
    launched.clear()
    for _ in range(2):  # the second time it is known how
        assert_same(results(both, qkv, theta, heads=heads), expected)
        attention = [name for name in launched if name.startswith("hopper")]
        backward = ["hopper_backward_kernel"] if together else ["hopper_key_kernel", "hopper_query_kernel"]
        assert attention == ["hopper_forward_kernel", *backward]
        launched.clear()
        assert module.plan_forward(RotaryInputs(qkv, theta), RotaryOptions(heads, "rotate", SCALE))


@pytest.mark.parametrize("features", [36, 40])
@pytest.mark.parametrize("tokens", [17, 300])  # up to 16 have a kernel of their own
def test_plans_for_hopper_want_aligned_parts(tokens: int, features: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The strides of one head are never taken and say nothing of where the other heads lie."""
    from warploom.ops.flash_attention.hopper import launch as launchers_hopper

    choose_as_on(90, launchers_hopper, monkeypatch)
    monkeypatch.setattr(tiling, "architecture", lambda device: 90)
    qkv = torch.zeros(1, tokens, 3, features, dtype=torch.bfloat16)
    given, options = RotaryInputs(qkv, torch.rand(1, features // 2)), RotaryOptions(1, "rotate", SCALE)
    forward = module.plan_forward(given, options)
    assert bool(forward) == (features == 40)
    turned, out = qkv[:, :, :2].contiguous(), qkv[:, :, :1].contiguous()
    backward = module.plan_backward(out, given, module.RotaryResults(out, turned, out), options)
    assert not backward or features == 40
    for plan, whole in ((forward, qkv), (backward, qkv)):
        parts = [part for part in plan or () if isinstance(part, module.Part)]
        assert all(part.offset * whole.element_size() % 16 == 0 for part in parts)


def by_two_operators(layer: Attention, qkv: torch.Tensor) -> torch.Tensor:
    """A layer's output from its projection, with positions and attention one after the other."""
    q, k, v = layer._encode(qkv, {"offset": 0})
    out: torch.Tensor = layer.out(layer._attend(q, k, v, None).flatten(2))
    return out


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 2])
@pytest.mark.parametrize(("heads", "features"), [(1, 36), (1, 4), (2, 36), (1, 72), (3, 100)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_one_token_of_any_width(
    dtype: torch.dtype, heads: int, features: int, tokens: int, device: torch.device
) -> None:
    layer = Attention(heads * features, heads, causal=True, position=RotaryEmbedding(features)).to(device, dtype)
    x = torch.randn(1, tokens, heads * features, dtype=dtype, device=device).requires_grad_()
    expected = by_two_operators(layer, layer.qkv(x).unflatten(-1, (-1, features)))
    for _ in range(2):  # the second time it is known how
        found = layer(x)
        assert torch.equal(found, expected)
    assert torch.equal(*(torch.autograd.grad(out.sum(), x, retain_graph=True)[0] for out in (found, expected)))


@pytest.mark.parametrize("tokens", [17, 18])
@pytest.mark.parametrize("features", [36, 40, 44, 48])
@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (2, 1), (2, 2)])
def test_plans_for_hopper_read_where_descriptors_can_point(
    heads: int, kv_heads: int, features: int, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Heads lie one behind the other."""
    choose_as_on(90, launchers_hopper, monkeypatch)
    monkeypatch.setattr(tiling, "architecture", lambda device: 90)
    qkv = torch.randn(1, tokens, heads + 2 * kv_heads, features, dtype=torch.float16)
    given = RotaryInputs(qkv, torch.rand(1, features // 2))
    plan = module.plan_forward(given, RotaryOptions(heads, "rotate", SCALE))
    assert bool(plan) == (features % 8 == 0)
    if plan:
        assert all(part.offset * 2 % 16 == 0 for part in (plan.k, plan.v))
        assert all(driver_accepts(each.fields) for each in plan.attend.launch.descriptions.values())


def test_no_tokens(device: torch.device) -> None:
    qkv, theta = inputs(torch.float32, 0, 3, 8, device)
    out, gradient = results(both, qkv, theta, heads=1)
    assert out.shape == (2, 0, 1, 8)
    assert gradient.shape == qkv.shape


def test_no_gradient_is_kept_without_need(device: torch.device) -> None:
    qkv, theta = inputs(torch.float32, 9, 3, 8, device)
    with torch.no_grad():
        assert rotary_attention(qkv, theta, 1, SCALE).grad_fn is None
    assert rotary_attention(qkv.detach(), theta, 1, SCALE).grad_fn is None


def test_a_second_derivative_is_refused(device: torch.device) -> None:
    qkv, theta = inputs(torch.float32, 9, 3, 8, device)
    (gradient,) = torch.autograd.grad(rotary_attention(qkv, theta, 1, SCALE).sum(), qkv, create_graph=True)
    with pytest.raises(NotImplementedError, match="second derivative"):
        gradient.sum().backward()


def test_the_registered_operator(device: torch.device) -> None:
    qkv, theta = inputs(torch.float32, 9, 4, 8, device)
    arguments = (qkv, theta.requires_grad_(), 2, "rotate", SCALE)
    torch.library.opcheck(torch.ops.warploom.rotary_attention.default, arguments)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [300, 4096])
def test_attention_on_a_gpu_takes_it(tokens: int, device: torch.device) -> None:
    """The layer's outputs and gradients are those without it, where the kernels for Hopper run too."""
    layer = Attention(256, 4, kv_heads=2, causal=True, position=RotaryEmbedding(64)).to(device, torch.bfloat16)
    x = torch.randn(2, tokens, 256, dtype=torch.bfloat16, device=device).requires_grad_()
    qkv = layer.qkv(x).unflatten(-1, (-1, 64))
    assert layer._attend_fused(qkv) is not None
    found = layer(x)
    expected = by_two_operators(layer, qkv)
    assert torch.equal(found, expected)
    grad = torch.randn_like(found)
    assert torch.equal(*(torch.autograd.grad(out, x, grad)[0] for out in (found, expected)))


@pytest.mark.gpu
@pytest.mark.parametrize("features", [36, 40])
def test_one_head_of_one_token_on_a_gpu(features: int, device: torch.device) -> None:
    layer = Attention(features, 1, causal=True, position=RotaryEmbedding(features)).to(device, torch.bfloat16)
    x = torch.randn(1, 1, features, dtype=torch.bfloat16, device=device).requires_grad_()
    assert layer._attend_fused(layer.qkv(x).unflatten(-1, (-1, features))) is not None
    for _ in range(2):
        found = layer(x)
        torch.testing.assert_close(found, layer.out(layer.qkv(x)[..., 2 * features :]))  # it sees itself alone
        found.sum().backward()
