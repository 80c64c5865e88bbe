"""Function transforms, forward mode and second derivatives: the right result, or a clear error.

Kernels give under a transform what they give without, to the last bit. In PyTorch all of it is right, in float64.
"""

import functools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad

from warploom import (
    BackendError,
    BackendWarning,
    flash_attention,
    linear_attention,
    lrpe_cosine,
    lrpe_rotate,
    tpa_attention,
    tpa_decode,
)
from warploom.runtime.backend import HAS_TRITON

Tensor = torch.Tensor
Tensors = tuple[Tensor, ...]
Run = Callable[..., Any]

BACKENDS = ("torch", "triton") if HAS_TRITON else ("torch",)
# Of each call its function, the shapes of its factors, and its options.
QKV = ((1, 3, 2, 4), (1, 3, 1, 4), (1, 3, 1, 4))
FACTORS = ((1, 2, 2, 2), (1, 3, 2), (1, 3, 2), (1, 2, 2, 4), (1, 3, 4), (1, 3, 4))
ALIKE = ((1, 3, 1, 4), (1, 3, 1, 4), (1, 3, 1, 5))
BOUNDS = torch.tensor([0, 1, 3])


def _linear_attention(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, theta: Tensor, state: Tensor, **options: Any
) -> Tensors:
    places = {"decay": decay, "theta": theta, "initial_state": state, "return_state": True}
    return linear_attention(q, k, v, **places, **options)  # type: ignore[return-value, misc]


CALLS: dict[str, tuple[Run, tuple[tuple[int, ...], ...], dict[str, Any]]] = {
    "flash_attention": (flash_attention, QKV, {"causal": True}),
    "flash_attention_with_lse": (flash_attention, QKV, {"window": (1, 1), "return_lse": True}),
    "flash_attention_packed": (flash_attention, QKV, {"cu_seqlens_q": BOUNDS}),
    "linear_attention": (_linear_attention, (*ALIKE, (1,), (1, 2), (1, 1, 4, 5)), {"encoding": "rotate"}),
    "linear_attention_packed": (linear_attention, ALIKE, {"cu_seqlens": BOUNDS, "activation": "silu"}),
    "linear_attention_plain": (linear_attention, ALIKE, {"causal": False}),
    "lrpe_rotate": (lrpe_rotate, ((2, 3, 2, 4), (2, 2)), {"offset": 3}),
    "lrpe_cosine": (lrpe_cosine, ((2, 3, 2, 4), (2, 4)), {"prefix": 1, "activation": "sigmoid"}),
    "lrpe_cosine_grid": (lrpe_cosine, ((1, 4, 2, 4), (1, 2)), {"grid": (2, 2)}),
    "lrpe_over_the_sequence": (lrpe_rotate, ((1, 3, 2, 4), (2, 2)), {"activation": "softmax_sequence"}),
    "tpa_attention": (tpa_attention, FACTORS, {}),
    "tpa_decode": (tpa_decode, FACTORS, {}),
    "rotary_attention": (lambda *_, **__: None, ((1, 3, 4, 4), (1, 2)), {}),
}
FORWARD_ON_KERNELS = {"lrpe_rotate", "lrpe_cosine", "lrpe_cosine_grid", "lrpe_over_the_sequence"}
FORWARD_ON_KERNELS |= {"linear_attention_plain", "rotary_attention", "tpa_attention"}
FORWARD_ON_KERNELS |= {name for name in CALLS if name.startswith("flash_attention")}
TANGENTS_WITH_GRADIENTS = {name for name in FORWARD_ON_KERNELS if name.startswith(("lrpe", "linear"))}
DIFFERENTIABLE = [name for name in CALLS if name != "tpa_decode"]
ON_BOTH = [
    (name, backend) for name in CALLS for backend in BACKENDS if (name, backend) != ("rotary_attention", "torch")
]
calls = pytest.mark.parametrize(("name", "backend"), ON_BOTH)
differentiable_calls = pytest.mark.parametrize(
    ("name", "backend"), [(name, backend) for name, backend in ON_BOTH if name in DIFFERENTIABLE]
)
kernels = pytest.mark.parametrize("name", [name for name, backend in ON_BOTH if backend == "triton"])
in_pytorch = pytest.mark.parametrize("name", [name for name, backend in ON_BOTH if backend == "torch"])
quietly = pytest.mark.filterwarnings("ignore:.*torch.jit.script. is deprecated:DeprecationWarning")  # PyTorch's own


def call(name: str, backend: str, device: torch.device) -> tuple[Run, Tensors]:
    """A function of tensors, and the tensors: in float64 for PyTorch, whose results differ by rounding alone."""
    function, shapes, options = CALLS[name]
    dtype = torch.float64 if backend == "torch" else torch.float32
    inputs = tuple(torch.randn(shape, dtype=torch.float64).to(device, dtype) for shape in shapes)
    if name == "rotary_attention":
        from warploom.ops.rotary_attention.api import rotary_attention

        return lambda qkv, theta: rotary_attention(qkv, theta, 2, 0.5), inputs
    options = {key: value.to(device) if isinstance(value, Tensor) else value for key, value in options.items()}
    return lambda *tensors: function(*tensors, **options, backend=backend), inputs


def as_tuple(outputs: Any) -> Tensors:
    return (outputs,) if isinstance(outputs, Tensor) else tuple(outputs)


def loss_of(run: Run) -> Run:
    return lambda *inputs: torch.stack([(o * o * o).sum() for o in as_tuple(run(*inputs))]).sum()


def gradients_of(run: Run, inputs: Tensors) -> Tensors:
    leaves = tuple(x.detach().clone().requires_grad_() for x in inputs)
    return torch.autograd.grad(loss_of(run)(*leaves), leaves)


def assert_same(found: Any, expected: Any, backend: str) -> None:
    found, expected = as_tuple(found), as_tuple(expected)
    assert len(found) == len(expected)
    for one, other in zip(found, expected):
        if backend == "triton":
            assert one.dtype == other.dtype
            assert torch.equal(one, other)
        else:
            torch.testing.assert_close(one, other)


def samples(inputs: Tensors, count: int = 2) -> Tensors:
    return tuple(torch.stack([x * (1 - i / 4) for i in range(count)], 1) for x in inputs)


# ----------------------------------------------------------------------------------------------------------
# vmap
# ----------------------------------------------------------------------------------------------------------


@calls
def test_vmap_is_one_call_after_another(name: str, backend: str, device: torch.device) -> None:
    run, inputs = call(name, backend, device)
    many = samples(inputs)
    found = as_tuple(torch.func.vmap(run, in_dims=1)(*many))
    for i in range(2):
        assert_same(tuple(f[i] for f in found), run(*(x[:, i] for x in many)), backend)
    in_dims = (1, *[None] * (len(inputs) - 1))
    found = as_tuple(torch.func.vmap(run, in_dims=in_dims)(many[0], *inputs[1:]))
    for i in range(2):
        assert_same(tuple(f[i] for f in found), run(many[0][:, i], *inputs[1:]), backend)


@differentiable_calls
def test_gradients_per_sample(name: str, backend: str, device: torch.device) -> None:
    run, inputs = call(name, backend, device)
    many, argnums = samples(inputs), tuple(range(len(inputs)))
    found = torch.func.vmap(torch.func.grad(loss_of(run), argnums), in_dims=1)(*many)
    for i in range(2):
        assert_same(tuple(f[i] for f in found), gradients_of(run, tuple(x[:, i] for x in many)), backend)


@calls
def test_vmap_over_nothing(name: str, backend: str, device: torch.device) -> None:
    run, inputs = call(name, backend, device)
    nothing = tuple(x[:, :0] for x in samples(inputs))
    one = as_tuple(run(*inputs))
    found = as_tuple(torch.func.vmap(run, in_dims=1)(*nothing))
    assert [(f.shape, f.dtype) for f in found] == [((0, *o.shape), o.dtype) for o in one]
    if name in DIFFERENTIABLE:
        summed = torch.func.grad(lambda *xs: as_tuple(run(*xs))[0].sum(), tuple(range(len(inputs))))
        found = torch.func.vmap(summed, in_dims=1)(*nothing)
        assert [f.shape for f in found] == [(0, *x.shape) for x in inputs]


# ----------------------------------------------------------------------------------------------------------
# Gradients
# ----------------------------------------------------------------------------------------------------------


@differentiable_calls
def test_gradients_by_torch_func(name: str, backend: str, device: torch.device) -> None:
    run, inputs = call(name, backend, device)
    found = torch.func.grad(loss_of(run), tuple(range(len(inputs))))(*inputs)
    assert_same(found, gradients_of(run, inputs), backend)


@differentiable_calls
@pytest.mark.parametrize("way", ["jacrev", "batched"])
def test_many_gradients_at_once(way: str, name: str, backend: str, device: torch.device) -> None:
    """`torch.func.jacrev`, and ``is_grads_batched``, which is older and vectorises by other means."""
    run, inputs = call(name, backend, device)

    def few(*tensors: Tensor) -> Tensor:
        return as_tuple(run(*tensors))[0][:, 1].flatten()[:2]

    expected = []
    for i in range(2):
        leaves = tuple(x.clone().requires_grad_() for x in inputs)
        expected.append(torch.autograd.grad(few(*leaves)[i], leaves))
    if way == "jacrev":
        found = torch.func.jacrev(few, tuple(range(len(inputs))))(*inputs)
    else:
        leaves = tuple(x.clone().requires_grad_() for x in inputs)
        every = torch.eye(2, dtype=inputs[0].dtype, device=device)
        found = torch.autograd.grad(few(*leaves), leaves, every, is_grads_batched=True)
    for one, *others in zip(found, *expected):
        assert_same(tuple(one), tuple(others), backend)


def jvp_of(run: Run, *inputs: Tensor) -> Any:
    return torch.func.jvp(run, inputs, inputs)


def dual_of(run: Run, *inputs: Tensor) -> Any:
    with forward_ad.dual_level():
        outputs = as_tuple(run(*(forward_ad.make_dual(x, x) for x in inputs)))
        return [part for x in outputs for part in forward_ad.unpack_dual(x)]


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("name", "backend"),
    [(name, b) for name, b in ON_BOTH if name in ("flash_attention", "linear_attention", "lrpe_rotate")],
)
@pytest.mark.seldom(3, 8)
def test_compiled_transforms(name: str, backend: str, device: torch.device) -> None:
    run, inputs = call(name, backend, device)
    torch._dynamo.reset()
    gradient = torch.func.grad(loss_of(run))
    for of in (jvp_of, dual_of):  # where there are no kernels, compiled code has the definition's tangents
        found = torch.compile(functools.partial(of, run), fullgraph=True, backend="aot_eager")(*inputs)
        exact_run, exact_inputs = in_float64(name, inputs)
        assert_near(found, of(exact_run, *exact_inputs))
    for transformed, given in ((gradient, inputs), (torch.func.vmap(gradient, in_dims=1), samples(inputs))):
        found = torch.compile(transformed, fullgraph=True, backend="aot_eager")(*given)
        torch.testing.assert_close(found, transformed(*given))
    torch._dynamo.reset()


# ----------------------------------------------------------------------------------------------------------
# Forward mode, and derivatives of derivatives
# ----------------------------------------------------------------------------------------------------------


def dual_in_one(run: Run, inputs: Tensors) -> Any:
    with forward_ad.dual_level(), torch.no_grad():
        outputs = as_tuple(run(*inputs[:-1], forward_ad.make_dual(inputs[-1], inputs[-1])))
        found = [(x, forward_ad.unpack_dual(x).tangent) for x in outputs]
        return [torch.zeros_like(x) if tangent is None else tangent for x, tangent in found]


def dual_gradient(run: Run, inputs: Tensors) -> Any:
    leaves = tuple(x.clone().requires_grad_() for x in inputs)
    outputs = as_tuple(run(*leaves))
    with forward_ad.dual_level():
        return torch.autograd.grad(
            outputs[0], leaves, forward_ad.make_dual(outputs[0].detach(), outputs[0].detach())
        )


FORWARD: dict[str, Callable[[Run, Tensors], Any]] = {
    "jvp": lambda run, inputs: jvp_of(run, *inputs),
    "jacfwd": lambda run, inputs: torch.func.jacfwd(run)(*inputs),
    "linearize": lambda run, inputs: torch.func.linearize(run, *inputs),
    "dual": lambda run, inputs: dual_of(run, *inputs),
    "dual_in_one": dual_in_one,
    "vmap of jvp": lambda run, inputs: torch.func.vmap(lambda *xs: torch.func.jvp(run, xs, xs), 1)(
        *samples(inputs)
    ),
}
FORWARD_OF_BACKWARD: dict[str, Callable[[Run, Tensors], Any]] = {
    "jvp of grad": lambda run, inputs: torch.func.jvp(torch.func.grad(loss_of(run)), inputs, inputs),
    "grad of jvp": lambda run, inputs: torch.func.grad(lambda *xs: torch.func.jvp(loss_of(run), xs, xs)[1])(
        *inputs
    ),
    "hessian": lambda run, inputs: torch.func.hessian(loss_of(run))(*inputs),
    "dual gradient": dual_gradient,
}
SECOND: dict[str, Callable[[Run, Tensors], Any]] = {
    "grad of grad": lambda run, inputs: torch.func.grad(
        lambda x: torch.func.grad(loss_of(run))(x, *inputs[1:]).sum()
    )(inputs[0]),
    "jacrev of jacrev": lambda run, inputs: torch.func.jacrev(
        torch.func.jacrev(lambda x: as_tuple(run(x, *inputs[1:]))[0].flatten()[:2])
    )(inputs[0]),
}


DEFINED: dict[str, Run] = {
    "rotary_attention": lambda qkv, theta, **_: flash_attention(
        *lrpe_rotate(qkv[:, :, :3], theta, backend="torch").split((2, 1), 2), qkv[:, :, 3:],
        causal=True, scale=0.5, backend="torch",
    )
}  # fmt: skip
"""Definitions of what has kernels alone."""


def in_float64(name: str, inputs: Tensors) -> tuple[Run, Tensors]:
    """The definition of a call, and its inputs in float64."""
    function, _, options = CALLS[name]
    run = DEFINED.get(name, functools.partial(function, **options, backend="torch"))
    return run, tuple(x.cpu().double() for x in inputs)


def assert_near(found: Any, exact: Any) -> None:
    found, exact = torch.utils._pytree.tree_leaves(found), torch.utils._pytree.tree_leaves(exact)
    assert len(found) == len(exact)
    for one, other in zip(found, exact):
        if isinstance(one, Tensor):
            torch.testing.assert_close(one.cpu().double(), other.double(), rtol=1e-4, atol=1e-4)


@quietly
@kernels
@pytest.mark.parametrize("way", FORWARD)
def test_kernels_in_forward_mode(way: str, name: str, device: torch.device) -> None:
    run, inputs = call(name, "triton", device)
    exact_run, exact_inputs = in_float64(name, inputs)
    try:
        found = FORWARD[way](run, inputs)
    except BackendError as error:  # some tangents of linear attention alone are of the kernels
        if name in FORWARD_ON_KERNELS or "forward mode" not in str(error):
            raise
        return
    if way == "linearize":
        assert_near(found[1](*inputs), torch.func.jvp(exact_run, exact_inputs, exact_inputs)[1])
    else:
        assert_near(found, FORWARD[way](exact_run, exact_inputs))


@quietly
@kernels
@pytest.mark.parametrize("way", FORWARD_OF_BACKWARD)
def test_kernels_refuse_forward_mode_of_a_backward(way: str, name: str, device: torch.device) -> None:
    if name == "tpa_decode":
        pytest.skip("it has no backward")
    run, inputs = call(name, "triton", device)
    if way == "grad of jvp" and name in TANGENTS_WITH_GRADIENTS:
        assert_near(FORWARD_OF_BACKWARD[way](run, inputs), FORWARD_OF_BACKWARD[way](*in_float64(name, inputs)))
        return
    with pytest.raises((NotImplementedError, BackendError), match="forward mode"):
        FORWARD_OF_BACKWARD[way](run, inputs)


@quietly
@pytest.mark.parametrize("way", FORWARD)
@pytest.mark.parametrize("name", CALLS)
def test_any_backend_in_forward_mode(way: str, name: str, device: torch.device) -> None:
    """Where the kernels have no tangents, a call whose backend is not named is the definition's."""
    if name == "rotary_attention" or way == "linearize":
        pytest.skip("tested above")
    _, inputs = call(name, "triton", device)
    function, _, options = CALLS[name]
    options = {key: value.to(device) if isinstance(value, Tensor) else value for key, value in options.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BackendWarning)
        found = FORWARD[way](functools.partial(function, **options), inputs)
    assert_near(found, FORWARD[way](*in_float64(name, inputs)))


@kernels
@pytest.mark.parametrize("way", [*SECOND, "create_graph"])
def test_kernels_refuse_second_derivatives(way: str, name: str, device: torch.device) -> None:
    if name == "tpa_decode":
        pytest.skip("it has no first one")
    run, inputs = call(name, "triton", device)
    if way in SECOND:
        if way == "jacrev of jacrev" and name in ("lrpe_rotate", "lrpe_cosine_grid"):  # linear in x
            assert not SECOND[way](run, inputs).any()
            return
        with pytest.raises(NotImplementedError, match="second derivative"):
            SECOND[way](run, inputs)
        return
    leaves = tuple(x.clone().requires_grad_() for x in inputs)
    for gradient in torch.autograd.grad(loss_of(run)(*leaves), leaves, create_graph=True):
        with pytest.raises(NotImplementedError, match="second derivative"):
            gradient.sum().backward(retain_graph=True)


@quietly
@in_pytorch
def test_forward_mode_and_second_derivatives_in_pytorch(name: str) -> None:
    run, inputs = call(name, "torch", torch.device("cpu"))
    if name == "tpa_decode":
        found = torch.func.jvp(run, inputs, inputs)[1]
        step = 1e-6
        ends = (run(*(x * (1 + way * step) for x in inputs)) for way in (1, -1))
        torch.testing.assert_close(found, (next(ends) - next(ends)) / (2 * step), rtol=1e-6, atol=1e-8)
        return
    leaves = tuple(x.clone().requires_grad_() for x in inputs)
    assert torch.autograd.gradcheck(run, leaves, check_forward_ad=True, check_batched_grad=True, fast_mode=True)
    assert torch.autograd.gradgradcheck(run, leaves, fast_mode=True)


# ----------------------------------------------------------------------------------------------------------
# The registered operators, called by their own names
# ----------------------------------------------------------------------------------------------------------


def ranked(factors: Tensors) -> Tensors:
    """Factors with the rank axes that the public functions add."""
    aq, ak, av, bq, bk, bv = factors
    return aq, ak[..., None], av[..., None], bq, bk[:, :, None], bv[:, :, None]


def registered(name: str, device: torch.device) -> tuple[Run, Tensors]:

    ops, (_, inputs) = torch.ops.warploom, call(name, "triton", device)
    return {
        "flash_attention": lambda *qkv: ops.flash_attention(*qkv, *[None] * 6, 0, 0.5, None, None, "batch")[:2],
        "linear_attention": lambda q, k, v, decay, theta, state: ops.linear_attention(
            q, k, v, theta, decay, state, None, None, 0, "rotate", "none", True, 0.5, True
        ),
        "lrpe_rotate": lambda x, theta: ops.lrpe(x, theta, None, None, None, 3, 0, [], "rotate", "none", True)[0],
        "tpa_attention": lambda *factors: ops.tpa_attention(*ranked(factors), None, True, 0.5, 0.5, 1, 1)[0],
        "tpa_decode": lambda *factors: ops.tpa_decode(*ranked(factors), None, "auto", 0.5, 0.5, 1, 1),
        "rotary_attention": lambda qkv, theta: ops.rotary_attention(qkv, theta, 2, "rotate", 0.5)[0],
    }[name], inputs


def definition_of_registered(name: str, inputs: Tensors) -> tuple[Run, Tensors]:
    """The public function with the options of `registered`, and its inputs in float64."""
    scales = {"scale": 0.5, "scale_q": 0.5, "scale_k": 1, "scale_v": 1}
    run = {
        "flash_attention": functools.partial(flash_attention, causal=True, scale=0.5, return_lse=True),
        "linear_attention": functools.partial(_linear_attention, encoding="rotate", scale=0.5),
        "lrpe_rotate": functools.partial(lrpe_rotate, offset=3),
        "tpa_attention": functools.partial(tpa_attention, causal=True, **scales),
        "tpa_decode": functools.partial(tpa_decode, **scales),
        "rotary_attention": DEFINED["rotary_attention"],
    }[name]
    return functools.partial(run, backend="torch"), tuple(x.cpu().double() for x in inputs)


@quietly
@pytest.mark.skipif(not HAS_TRITON, reason="the registered operators run Triton kernels")
@pytest.mark.parametrize(
    "name",
    ["flash_attention", "linear_attention", "lrpe_rotate", "tpa_attention", "tpa_decode", "rotary_attention"],
)
def test_registered_operators(name: str, device: torch.device) -> None:
    run, inputs = registered(name, device)
    for way in ("jvp", "dual", "vmap of jvp"):
        found = FORWARD[way](run, inputs)
        assert_near(found, FORWARD[way](*definition_of_registered(name, inputs)))
    many = samples(inputs)
    found = as_tuple(torch.func.vmap(run, in_dims=1)(*many))
    for i in range(2):
        assert_same(tuple(f[i] for f in found), run(*(x[:, i] for x in many)), "triton")
    if name == "tpa_decode":
        leaves = tuple(x.clone().requires_grad_() for x in inputs)
        with pytest.raises(NotImplementedError, match="tpa_decode has no gradient"):
            run(*leaves).sum().backward()
        return
    found = torch.func.grad(loss_of(run), tuple(range(len(inputs))))(*inputs)
    assert_same(found, gradients_of(run, inputs), "triton")
    with pytest.raises(NotImplementedError, match="second derivative"):
        SECOND["grad of grad"](run, inputs)
