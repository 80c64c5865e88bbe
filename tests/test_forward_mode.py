"""Forward mode of flash attention's kernel, and of whole models.

That every operator is right on each of its cases is in ``test_conformance.py``, under transforms in
``test_transforms.py``.
"""

import functools
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad

import warploom
from warploom import flash_attention
from warploom.nn import Attention, RotaryEmbedding, TransformerConfig, TransformerLM
from warploom.ops.flash_attention import reference
from warploom.runtime.backend import HAS_TRITON
from warploom.testing.accuracy import compare_each
from warploom.testing.poison import poison_allocations

Tensor = torch.Tensor
Tensors = tuple[Tensor, ...]

kernels = pytest.mark.skipif(not HAS_TRITON, reason="needs Triton")
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.jit.script. is deprecated:DeprecationWarning"),  # PyTorch's own
    pytest.mark.filterwarnings("ignore::warploom.BackendWarning"),
]


def tangents_of(attend: Callable[..., Any], inputs: Tensors, tangents: Tensors) -> Tensors:
    """Outputs, and their tangents."""
    outputs, found = torch.func.jvp(attend, inputs, tangents)
    return (*outputs, *found)


def assert_within_budget(inputs: Tensors, tangents: Tensors, device: torch.device, **options: Any) -> Tensors:
    """Compare output, lse and their tangents with float64; returns them."""
    attend = functools.partial(reference.flash_attention, return_lse=True, **options)
    exact = tangents_of(attend, tuple(x.double() for x in inputs), tuple(x.double() for x in tangents))
    eager = tangents_of(attend, inputs, tangents)
    run = functools.partial(flash_attention, return_lse=True, backend="triton", **options)
    with poison_allocations():
        found = tangents_of(run, inputs, tangents)
    for verdict in compare_each(found, exact, eager):
        assert verdict.ok, verdict.describe()
    return found


def draw(device: torch.device, dtype: torch.dtype, *shapes: tuple[int, ...]) -> Tensors:
    return tuple(torch.randn(shape).to(device, dtype) for shape in shapes)


@kernels
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("size", "shift"), [(1.0, 0.0), (6.0, 0.0), (30.0, 0.0), (4.0, 3.0)])
def test_rows_in_which_one_key_has_all_the_weight(
    size: float, shift: float, dtype: torch.dtype, device: torch.device
) -> None:
    """Their dS is large, and what remains of it around its mean is not: that is what is rounded."""
    heads = 8 if device.type == "cuda" else 2  # with which lse has the numbers that a budget takes (`FEWEST`)
    q, k, v, *tangents = draw(device, dtype, *[(1, 150, heads, 32)] * 6)
    assert_within_budget((q * size, k + shift, v), tuple(tangents), device, causal=True)


OPTIONS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window": (20, 7)},
    "left": {"causal": True, "window": (0, None)},
    "cap": {"softcap": 3.0, "causal": True},
    "negative": {"scale": -0.4, "causal": True},
    "negative_cap": {"scale": -0.4, "softcap": 2.0},
    "zero": {"scale": 0.0},
}


@kernels
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize(("n", "m"), [(70, 70), (33, 130), (100, 41), (1, 65)])
def test_options(option: str, n: int, m: int, device: torch.device) -> None:
    shapes = ((2, n, 4, 24), (2, m, 2, 24), (2, m, 2, 40))
    inputs = draw(device, torch.float32, *shapes)
    assert_within_budget(inputs, draw(device, torch.float32, *shapes), device, **OPTIONS[option])


@kernels
@pytest.mark.parametrize("wanted", list(itertools.product([False, True], repeat=4))[1:], ids=str)
def test_some_tangents_are_zero(wanted: tuple[bool, ...], device: torch.device) -> None:
    shapes = ((1, 40, 2, 16), (1, 60, 2, 16), (1, 60, 2, 16), (2,))
    inputs, tangents = (draw(device, torch.float32, *shapes) for _ in range(2))

    def some(run: Callable[..., Any], dtype: torch.dtype) -> Tensors:
        with forward_ad.dual_level():
            q, k, v, sink = (
                forward_ad.make_dual(x.to(dtype), dx.to(dtype)) if wants else x.to(dtype)
                for x, dx, wants in zip(inputs, tangents, wanted)
            )
            results = run(q, k, v, sink=sink, causal=True, softcap=4.0, return_lse=True)
            parts = [part for x in results for part in forward_ad.unpack_dual(x)]
            return tuple(parts[i - 1] * 0.0 if part is None else part for i, part in enumerate(parts))

    found = some(functools.partial(flash_attention, backend="triton"), torch.float32)
    exact = some(reference.flash_attention, torch.float64)
    for one, other in zip(found, exact):
        torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-5)


@kernels
@pytest.mark.parametrize("packed", [False, True])
def test_what_lies_behind_lengths_reaches_no_tangent(packed: bool, device: torch.device) -> None:
    inputs, tangents = (draw(device, torch.float32, *[(1, 50, 2, 16)] * 3) for _ in range(2))
    if packed:
        options: dict[str, Any] = {"cu_seqlens": torch.tensor([0, 7, 7, 30], device=device)}
        poisoned: tuple[int, ...] = (0, 1, 2)
    else:
        options, poisoned = {"seqused_k": torch.tensor([30], device=device)}, (1, 2)
    clean = [[x.clone() for x in each] for each in (inputs, tangents)]
    for i in poisoned:
        for each, kept in zip((inputs, tangents), clean):
            each[i][:, 30:] = torch.nan
            kept[i][:, 30:] = 0.0
    run = functools.partial(flash_attention, return_lse=True, backend="triton", **options)
    found, expected = tangents_of(run, inputs, tangents), tangents_of(run, *map(tuple, clean))
    for one, other in zip(found, expected):
        assert torch.equal(one, other)
        assert not one.isnan().any()
    if packed:
        out, lse, dout, dlse = found
        assert not out[:, 30:].any()
        assert not dout[:, 30:].any()
        assert not dlse[:, :, 30:].any()
        assert (lse[:, :, 30:] == -torch.inf).all()


@kernels
def test_tangents_of_other_strides(device: torch.device) -> None:
    q, k, v = draw(device, torch.float32, (2, 2, 30, 16), (2, 80, 2, 16), (2, 40, 2, 16))
    q, k = q.transpose(1, 2), k[:, ::2]
    dq, dk, dv = draw(device, torch.float32, q.shape, (1, 40, 1, 16), (2, 40, 16, 2))
    tangents = dq, dk.expand(k.shape), dv.transpose(2, 3)
    found = assert_within_budget((q, k, v), tangents, device, causal=True)
    assert found[0].stride() == q.stride()
    assert found[2].stride() == q.stride()


@kernels
def test_a_hidden_key_of_nan_reaches_no_earlier_tangent(device: torch.device) -> None:
    """A value would, as 0 · NaN is NaN; a key that is hidden does not."""
    (q, k, v), tangents = (draw(device, torch.float32, *[(1, 20, 2, 16)] * 3) for _ in range(2))
    run = functools.partial(flash_attention, causal=True, return_lse=True, backend="triton")
    expected = tangents_of(run, (q, k, v), tangents)
    k[:, 15], tangents[1][:, 17] = torch.nan, torch.nan
    for one, other in zip(tangents_of(run, (q, k, v), tangents), expected):
        earlier = (slice(None), slice(None, 15)) if one.dim() == 4 else (..., slice(None, 15))
        assert torch.equal(one[earlier], other[earlier])


@kernels
def test_a_sink_with_gaps(device: torch.device) -> None:
    q, k, v = draw(device, torch.float32, *[(1, 20, 3, 16)] * 3)
    sink = draw(device, torch.float32, (9,))[0][::3]

    def run(sink: Tensor, q: Tensor, backend: str) -> Any:
        return flash_attention(q, k.to(q.dtype), v.to(q.dtype), sink=sink, return_lse=True, backend=backend)

    dsink = draw(device, torch.float32, (9,))[0][::3]
    found = torch.func.jvp(functools.partial(run, q=q, backend="triton"), (sink,), (dsink,))[1]
    exact = torch.func.jvp(
        functools.partial(run, q=q.double(), backend="torch"), (sink.double(),), (dsink.double(),)
    )[1]
    for one, other in zip(found, exact):
        torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-5)


@kernels
@pytest.mark.parametrize("shape", [(0, 3, 4), (2, 0, 4), (2, 3, 0)])
def test_nothing_to_attend_with_or_to(shape: tuple[int, int, int], device: torch.device) -> None:
    batch, n, m = shape
    shapes = ((batch, n, 2, 8), (batch, m, 2, 8), (batch, m, 2, 8), (2,))
    inputs, tangents = (draw(device, torch.float32, *shapes) for _ in range(2))

    def run(q: Tensor, k: Tensor, v: Tensor, sink: Tensor, backend: str) -> Any:
        return flash_attention(q, k, v, sink=sink, return_lse=True, backend=backend)

    found, expected = (
        tangents_of(functools.partial(run, backend=backend), inputs, tangents) for backend in ("triton", "torch")
    )
    for one, other in zip(found, expected):
        torch.testing.assert_close(one, other)


@kernels
def test_results_and_gradients_are_those_without_tangents(device: torch.device) -> None:
    """Where gradients are wanted too, results have theirs, and tangents say that they have none."""
    q, k, v = draw(device, torch.float32, *[(1, 40, 2, 16)] * 3)
    leaf = q.clone().requires_grad_()
    expected = torch.autograd.grad(flash_attention(leaf, k, v, backend="triton").square().sum(), leaf)[0]
    with forward_ad.dual_level():
        out = flash_attention(forward_ad.make_dual(leaf, q), k, v, backend="triton")
        primal, tangent = forward_ad.unpack_dual(out)
    assert torch.equal(torch.autograd.grad(primal.square().sum(), leaf, retain_graph=True)[0], expected)
    with pytest.raises(NotImplementedError, match="forward mode, have no gradient"):
        tangent.sum().backward()


@kernels
def test_operations_are_counted(device: torch.device) -> None:
    from torch.utils.flop_counter import FlopCounterMode

    q, k, v = draw(device, torch.float32, *[(1, 40, 2, 16)] * 3)
    product = 2 * 40 * 40 * 2 * 16
    calls: tuple[tuple[Callable[..., Any], Tensors, int], ...] = (
        (lambda q, k, v: flash_attention(q, k, v, backend="triton"), (q, k, v), 6),
        (lambda v: flash_attention(q, k, v, backend="triton"), (v,), 3),
        (lambda q: flash_attention(q, k, v, backend="triton"), (q,), 4),
    )
    for attend, arguments, products in calls:
        with FlopCounterMode(display=False) as counter:
            torch.func.jvp(attend, arguments, arguments)
        assert counter.get_total_flops() == products * product


# ----------------------------------------------------------------------------------------------------------
# Masks, biases and slopes; caches
# ----------------------------------------------------------------------------------------------------------


def test_masks_biases_and_slopes(device: torch.device) -> None:
    q, k, v = draw(device, torch.float64, *[(2, 9, 2, 8)] * 3)
    bias, alibi = draw(device, torch.float64, (1, 2, 9, 9), (2,))
    mask = torch.rand(2, 1, 9, 9, device=device) < 0.7

    def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, alibi: Tensor) -> Tensors:
        return flash_attention(q, k, v, mask=mask, bias=bias, alibi=alibi, return_lse=True)  # type: ignore[return-value]

    assert_near_differences(attend, (q, k, v, bias, alibi))
    inputs = tuple(x.float() for x in (q, k, v, bias, alibi))
    if HAS_TRITON:
        masked = functools.partial(flash_attention, mask=mask, backend="triton")
        with pytest.raises(warploom.BackendError, match="forward mode"):
            torch.func.jvp(masked, inputs[:3], inputs[:3])
    found = tangents_of(attend, inputs, inputs)
    for one, other in zip(found, tangents_of(attend, *[tuple(x.double() for x in inputs)] * 2)):
        torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("pages", [False, True])
def test_keys_in_a_cache(pages: bool, device: torch.device) -> None:
    q, k, v = draw(device, torch.float64, (2, 3, 2, 8), (2, 16, 2, 8), (2, 16, 2, 8))
    used = torch.tensor([9, 16], device=device)
    options: dict[str, Any] = {"seqused_k": used, "causal": True}
    if pages:
        k, v = (x.unflatten(1, (2, 8)).flatten(0, 1) for x in (k, v))
        options["block_table"] = torch.arange(4, device=device, dtype=torch.int32).view(2, 2)
    assert_near_differences(functools.partial(flash_attention, **options), (q, k, v))


def assert_near_differences(run: Callable[..., Any], inputs: Tensors, step: float = 1e-6) -> None:
    """Compare tangents in float64 with central differences."""
    tangents = tuple(map(torch.randn_like, inputs))
    found = torch.func.jvp(run, inputs, tangents)[1]
    after, before = (run(*(x + way * step * dx for x, dx in zip(inputs, tangents))) for way in (1, -1))
    leaves = (torch.utils._pytree.tree_leaves(each) for each in (found, after, before))
    for one, upper, lower in zip(*leaves):
        torch.testing.assert_close(one, (upper - lower) / (2 * step), rtol=1e-5, atol=1e-6)


# ----------------------------------------------------------------------------------------------------------
# Layers and models
# ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("attention", ["flash", "linear", "tpa", "delta"])
def test_models(attention: str, device: torch.device) -> None:
    options = {} if attention == "flash" else {"attention": attention}
    config = TransformerConfig(vocab_size=11, d_model=32, layers=2, heads=2, **options)
    model = TransformerLM(config).to(device).double()
    tokens = torch.randint(11, (2, 7), device=device)
    names = [name for name, _ in model.named_parameters()]
    parameters = tuple(p.detach() for p in model.parameters())

    def run(*values: Tensor) -> Tensor:
        return torch.func.functional_call(model, dict(zip(names, values)), (tokens,))[0]  # type: ignore[no-any-return]

    assert_near_differences(run, parameters)


@pytest.mark.parametrize("implementation", ["flash", "plain"])
@pytest.mark.seldom(3, 3)
def test_a_layer_in_the_dtype_of_kernels(implementation: str, device: torch.device) -> None:
    """On a GPU rotary positions and attention are one operator."""
    layer = Attention(64, 2, position=RotaryEmbedding(32), implementation=implementation).to(device)
    x, dx = draw(device, torch.float32, (1, 40, 64), (1, 40, 64))
    with torch.no_grad():
        found = torch.func.jvp(layer, (x,), (dx,))[1]
        compiled = torch.compile(lambda x, dx: torch.func.jvp(layer, (x,), (dx,))[1], backend="aot_eager")(x, dx)
        exact = torch.func.jvp(layer.double(), (x.double(),), (dx.double(),))[1]
    torch.testing.assert_close(found, exact.float(), rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(compiled, exact.float(), rtol=1e-3, atol=1e-3)
    torch._dynamo.reset()
