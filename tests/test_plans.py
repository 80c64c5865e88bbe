"""Calls that come again: they plan nothing, and never run on the plan of a call that was different."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from warploom import WarploomError, flash_attention, lrpe_cosine, lrpe_rotate, plans, tpa_attention, tpa_decode
from warploom.backend import HAS_TRITON

if not HAS_TRITON:
    pytest.skip("needs Triton", allow_module_level=True)

from warploom.ops.flash_attention import api as flash_api
from warploom.ops.flash_attention import autograd as flash_autograd
from warploom.ops.flash_attention import launchers as flash_launchers
from warploom.ops.lrpe import api as lrpe_api
from warploom.ops.lrpe import autograd as lrpe_autograd
from warploom.ops.lrpe import launchers, launchers_sequence
from warploom.ops.tpa import api as tpa_api
from warploom.ops.tpa import autograd as tpa_autograd
from warploom.ops.tpa import launchers as tpa_launchers
from warploom.plans import Plans, recognise

Tensor = torch.Tensor
Inputs = dict[str, Any]
Change = Callable[[Inputs], Inputs]


def test_a_plan_is_made_once_for_a_key() -> None:
    known, made = Plans(), []

    def make(*arguments: int) -> tuple[int, ...]:
        made.append(arguments)
        return arguments

    assert known.find("one") is None
    assert known.get("one", make, 1, 2) is known.get("one", make, 3) is known.find("one")
    assert known.get("other", make) == ()
    assert made == [(1, 2), ()]
    assert known.find(["cannot be hashed"]) is None  # type: ignore[arg-type]
    for i in range(2 * known.LARGEST):
        known.get(i, make, i)
    assert len(known.known) <= known.LARGEST


def test_a_plan_that_cannot_be_made_is_not_kept() -> None:
    known = Plans()
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            known.get("key", lambda: 1 // 0)
    assert known.get("key", lambda: 1) == 1


def test_only_the_last_few_calls_are_recognised() -> None:
    known = Plans()
    for i in range(2 * known.MOST_RECENT):
        known.remember((i,))
    assert known.recent == tuple((i,) for i in reversed(range(known.MOST_RECENT, 2 * known.MOST_RECENT)))


# ----------------------------------------------------------------------------------------------------------
# Results: those of a call that is planned anew, to the last bit
# ----------------------------------------------------------------------------------------------------------


@contextmanager
def no_plans() -> Iterator[None]:
    """Nothing is known of any call, and nothing of what happens here afterwards."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (flash_api, lrpe_api, tpa_api):
            patch.setattr(module, "_on_kernels", Plans())
        for module in (flash_autograd, lrpe_autograd, tpa_autograd):
            patch.setattr(module, "_plans", Plans())
        yield


def results(function: Callable[..., Any], inputs: Inputs) -> tuple[Tensor, ...]:
    """Outputs and gradients.

    Gradients of outputs come in the memory order that ``inputs["grad_order"]`` says, and of as many outputs as
    ``inputs["differentiated"]`` says.
    """
    inputs = dict(inputs)
    order, differentiated = inputs.pop("grad_order", None), inputs.pop("differentiated", None)
    outputs = function(**inputs, backend="triton")
    outputs = (outputs,) if isinstance(outputs, Tensor) else outputs
    wanted = [value for value in inputs.values() if isinstance(value, Tensor) and value.requires_grad]
    if not wanted:
        return outputs
    generator = torch.Generator().manual_seed(1)
    grads = [torch.randn(o.shape, generator=generator).to(o) for o in outputs]
    if order is not None:
        inverse = [order.index(axis) for axis in range(len(order))]
        grads = [g.permute(order).contiguous().permute(inverse) if g.dim() == len(order) else g for g in grads]
    pulled_back = torch.autograd.grad(outputs[:differentiated], wanted, grads[:differentiated])
    return *(o.detach() for o in outputs), *pulled_back


def set_to(**values: Any) -> Change:
    return lambda inputs: {**inputs, **values}


def changed(change: Callable[[Tensor], Tensor], *names: str) -> Change:
    """The tensors of these names, changed, and with or without gradient as they were."""

    def make(inputs: Inputs) -> Inputs:
        new = {name: change(inputs[name].detach()).requires_grad_(inputs[name].requires_grad) for name in names}
        return {**inputs, **new}

    return make


def without_gradient(*names: str) -> Change:
    return lambda inputs: {**inputs, **{name: inputs[name].detach() for name in names}}


def heads_first(x: Tensor) -> Tensor:
    """The same values, heads before tokens in memory."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def with_gaps(x: Tensor) -> Tensor:
    """The same values, features not adjacent."""
    return x.repeat_interleave(2, -1)[..., ::2]


def misaligned(x: Tensor) -> Tensor:
    """The same values and strides, at an address that vectors cannot be read from."""
    return torch.cat((x.flatten()[:1], x.flatten()))[1:].view(x.shape)


def one_head(x: Tensor) -> Tensor:
    return x[:, :, :1].expand(x.shape)


def one_more_key(inputs: Inputs) -> Inputs:
    return changed(lambda x: torch.cat((x, x[:, :1]), 1), "k", "v")(inputs)


def attention(device: torch.device) -> Inputs:
    batch = 2 if device.type == "cuda" else 1  # the interpreter runs one program after the other
    made = {name: torch.randn(batch, 17, 2, 16).to(device).requires_grad_() for name in "qkv"}
    return {**made, "causal": True, "return_lse": True}


def packed_attention(device: torch.device) -> Inputs:
    made = {name: torch.randn(1, 17, 2, 16).to(device).requires_grad_() for name in "qkv"}
    return {**made, "cu_seqlens_q": torch.tensor([0, 5, 17], device=device)}


OTHER_BOUNDS = torch.tensor([0, 11, 17])

ATTENTION: dict[str, Change] = {
    "nothing": set_to(),
    "full": set_to(causal=False),
    "window": set_to(window=(3, None)),
    "right_of_window": set_to(causal=False, window=(None, 4)),
    "window_as_a_list": set_to(window=[3, None]),
    "scale": set_to(scale=0.7),
    "negative_scale": set_to(scale=-0.3),
    "without_lse": set_to(return_lse=False),
    "precision": set_to(float32_precision="medium"),
    "dtype": changed(torch.Tensor.bfloat16, "q", "k", "v"),
    "order_of_q": changed(heads_first, "q"),
    "order_of_k": changed(heads_first, "k"),
    "gaps_in_v": changed(with_gaps, "v"),
    "one_head_of_k": changed(one_head, "k"),
    "address_of_q": changed(misaligned, "q"),
    "address_of_v": changed(misaligned, "v"),
    "one_more_key": one_more_key,
    "one_query": changed(lambda x: x[:, :1], "q"),
    "grouped": changed(lambda x: x[:, :, :1], "k", "v"),
    "order_of_gradients": set_to(grad_order=(0, 2, 1, 3)),
    "no_gradient_of_lse": set_to(differentiated=1),
    "no_gradient_of_k": without_gradient("k"),
    "no_gradients": without_gradient("q", "k", "v"),
}
PACKED_ATTENTION: dict[str, Change] = {
    "values": changed(lambda bounds: OTHER_BOUNDS.to(bounds), "cu_seqlens_q"),
    "dtype": changed(torch.Tensor.int, "cu_seqlens_q"),
    "stride": changed(with_gaps, "cu_seqlens_q"),
    "sequences": changed(lambda bounds: torch.cat((bounds, bounds[-1:])), "cu_seqlens_q"),
    "one_for_both": lambda inputs: {**inputs, "cu_seqlens_q": None, "cu_seqlens_k": inputs["cu_seqlens_q"]},
    "of_the_keys": lambda inputs: {**inputs, "cu_seqlens_k": OTHER_BOUNDS.to(inputs["q"].device)},
    "none": set_to(cu_seqlens_q=None),
}


def encoding(device: torch.device) -> Inputs:
    x, theta = torch.randn(2, 12, 3, 8).to(device), torch.rand(3, 4).to(device)
    return {"x": x.requires_grad_(), "theta": theta.requires_grad_()}


def encoding_over_the_sequence(device: torch.device) -> Inputs:
    return {**encoding(device), "activation": "softmax_sequence"}


def packed_encoding(device: torch.device) -> Inputs:
    inputs = changed(lambda x: x[:1], "x")(encoding(device))
    return {**inputs, "cu_seqlens": torch.tensor([0, 5, 12], device=device), "offset": 3}


def placed_encoding(device: torch.device) -> Inputs:
    return {**encoding(device), "position_ids": torch.arange(12, device=device)}


def offset_encoding(device: torch.device) -> Inputs:
    return {**encoding(device), "offset": torch.tensor([4, 90], device=device)}


ENCODING: dict[str, Change] = {
    "nothing": set_to(),
    "offset": set_to(offset=7),
    "prefix": set_to(prefix=2),
    "grid": set_to(grid=(3, 4)),
    "grid_as_a_list": set_to(grid=[2, 6]),
    "long_grid": set_to(grid=(3, 1, 2, 1, 2)),
    "interleaved": set_to(interleaved=True),
    "activation": set_to(activation="silu"),
    "over_the_sequence": set_to(activation="softmax_sequence"),
    "dtype": changed(torch.Tensor.bfloat16, "x"),
    "dtype_of_theta": changed(torch.Tensor.double, "theta"),
    "shared_theta": changed(lambda theta: theta[:1], "theta"),
    "order_of_x": changed(heads_first, "x"),
    "gaps_in_x": changed(with_gaps, "x"),
    "gaps_in_theta": changed(with_gaps, "theta"),
    "expanded_theta": changed(lambda theta: theta[:1].expand(3, -1), "theta"),
    "address_of_x": changed(misaligned, "x"),
    "address_of_theta": changed(misaligned, "theta"),
    "fewer_tokens": changed(lambda x: x[:, :5], "x"),
    "order_of_gradients": set_to(grad_order=(0, 2, 1, 3)),
    "no_gradient_of_theta": without_gradient("theta"),
    "no_gradient_of_x": without_gradient("x"),
    "no_gradients": without_gradient("x", "theta"),
}
OVER_THE_SEQUENCE = {
    name: ENCODING[name]
    for name in (
        "offset", "prefix", "dtype", "order_of_x", "address_of_x", "fewer_tokens", "order_of_gradients",
        "no_gradient_of_theta",
    )
}  # fmt: skip
PACKED_ENCODING: dict[str, Change] = {
    "values": changed(lambda bounds: torch.tensor([0, 9, 12]).to(bounds), "cu_seqlens"),
    "dtype": changed(torch.Tensor.int, "cu_seqlens"),
    "stride": changed(with_gaps, "cu_seqlens"),
    "sequences": changed(lambda bounds: torch.cat((bounds, bounds[-1:])), "cu_seqlens"),
    "offset": set_to(offset=4),
    "over_the_sequence": set_to(activation="softmax_sequence"),
}
PLACED_ENCODING: dict[str, Change] = {
    "values": changed(lambda ids: ids.flip(0), "position_ids"),
    "for_each_entry": changed(lambda ids: torch.stack((ids, ids + 5)), "position_ids"),
    "two_axes": changed(lambda ids: torch.stack((ids, ids + 5), -1).expand(2, -1, -1), "position_ids"),
    "dtype": changed(torch.Tensor.int, "position_ids"),
    "stride": changed(with_gaps, "position_ids"),
}
OFFSET_ENCODING: dict[str, Change] = {
    "values": changed(lambda offsets: offsets + 3, "offset"),
    "one_for_all": changed(lambda offsets: offsets[0], "offset"),
    "stride": changed(with_gaps, "offset"),
    "int": set_to(offset=4),
}


def factors(device: torch.device) -> Inputs:
    shapes = {
        "aq": (2, 3, 4, 2), "ak": (2, 150, 4), "av": (2, 150, 4),
        "bq": (2, 3, 2, 16), "bk": (2, 150, 16), "bv": (2, 150, 16),
    }  # fmt: skip
    return {name: torch.randn(shape).to(device) for name, shape in shapes.items()}


def factors_with_lengths(device: torch.device) -> Inputs:
    return {**factors(device), "cache_seqlens": torch.tensor([150, 20], device=device)}


def factors_with_gradients(device: torch.device) -> Inputs:
    some = {name: (x if name[1] == "q" else x[:, :5])[:1] for name, x in factors(device).items()}
    return {name: x.clone().requires_grad_() for name, x in some.items()}


ALL_FACTORS = ("aq", "ak", "av", "bq", "bk", "bv")
DECODE: dict[str, Change] = {
    "nothing": set_to(),
    "lengths": changed(lambda lengths: lengths - 7, "cache_seqlens"),
    "dtype_of_lengths": changed(torch.Tensor.int, "cache_seqlens"),
    "stride_of_lengths": changed(with_gaps, "cache_seqlens"),
    "no_lengths": set_to(cache_seqlens=None),
    "strategy": set_to(strategy="batch_head"),
    "split": set_to(strategy="split_kv"),
    "scale": set_to(scale=0.3),
    "scale_k": set_to(scale_k=0.3),
    "scale_v": set_to(scale_v=-2),
    "whole_queries": lambda inputs: {**inputs, "aq": None, "bq": inputs["bq"].repeat(1, 1, 2, 1)},
    "dtype": changed(torch.Tensor.bfloat16, *ALL_FACTORS),
    "rank_axis": changed(lambda a: a[..., None], "ak"),
    "higher_rank": lambda inputs: {
        **inputs, "ak": torch.stack([inputs["ak"]] * 2, -1), "bk": torch.stack([inputs["bk"]] * 2, 2),
    },
    "order_of_bk": changed(lambda b: b.mT.contiguous().mT, "bk"),
    "gaps_in_av": changed(with_gaps, "av"),
    "address_of_bv": changed(misaligned, "bv"),
    "order_of_aq": changed(heads_first, "aq"),
    "one_query": changed(lambda x: x[:, :1], "aq", "bq"),
    "one_more_key": changed(lambda x: torch.cat((x, x[:, :1]), 1), "ak", "av", "bk", "bv"),
}  # fmt: skip
TPA_ATTENTION: dict[str, Change] = {
    "causal": set_to(causal=False),
    "scale": set_to(scale=0.3),
    "order_of_bk": changed(lambda b: b.mT.contiguous().mT, "bk"),
    "no_gradient_of_bk": without_gradient("bk"),
    "no_gradients": without_gradient(*ALL_FACTORS),
    "whole_queries": lambda inputs: {
        **inputs, "aq": None, "bq": inputs["bq"].detach().repeat(1, 1, 2, 1).requires_grad_(),
    },
}  # fmt: skip

USUAL: dict[str, tuple[Callable[..., Any], Callable[[torch.device], Inputs]]] = {
    "flash_attention": (flash_attention, attention),
    "lrpe_rotate": (lrpe_rotate, encoding),
    "tpa_decode": (tpa_decode, factors_with_lengths),
    "tpa_attention": (tpa_attention, factors_with_gradients),
}
"""Of each operator that has plans, a call."""
with_gradients = pytest.mark.parametrize("name", [name for name in USUAL if name != "tpa_decode"])

SITUATIONS = [
    pytest.param(function, make, change, id=f"{make.__name__}-{name}")
    for function, make, changes in (
        (flash_attention, attention, ATTENTION),
        (flash_attention, packed_attention, PACKED_ATTENTION),
        (lrpe_rotate, encoding, ENCODING),
        (lrpe_rotate, encoding_over_the_sequence, OVER_THE_SEQUENCE),
        (lrpe_rotate, packed_encoding, PACKED_ENCODING),
        (lrpe_rotate, placed_encoding, PLACED_ENCODING),
        (lrpe_rotate, offset_encoding, OFFSET_ENCODING),
        (tpa_decode, factors_with_lengths, DECODE),
        (tpa_attention, factors_with_gradients, TPA_ATTENTION),
    )
    for name, change in changes.items()
]


@pytest.mark.parametrize(("function", "make", "change"), SITUATIONS)
def test_a_call_like_no_earlier_one_is_planned_anew(
    function: Callable[..., Any], make: Callable[[torch.device], Inputs], change: Change, device: torch.device
) -> None:
    one = make(device)
    other = change(one)
    expected = []
    for inputs in (one, other):
        with no_plans():
            expected.append(results(function, inputs))
    with no_plans():
        for inputs, wanted in zip((one, other) * 3, expected * 3):  # planned, known by key, and recognised
            found = results(function, inputs)
            assert len(found) == len(wanted)
            for a, b in zip(found, wanted):
                assert (a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype)
                assert torch.equal(a, b)


def test_the_precision_of_float32_products_may_change_between_calls(device: torch.device) -> None:
    inputs = attention(device)
    before = torch.get_float32_matmul_precision()
    try:
        expected = {}
        for precision in ("highest", "medium"):
            torch.set_float32_matmul_precision(precision)
            with no_plans():
                expected[precision] = results(flash_attention, inputs)
        assert not torch.equal(expected["highest"][0], expected["medium"][0])
        with no_plans():
            for precision in ("highest", "medium", "highest") * 3:
                torch.set_float32_matmul_precision(precision)
                for a, b in zip(results(flash_attention, inputs), expected[precision]):
                    assert torch.equal(a, b)
    finally:
        torch.set_float32_matmul_precision(before)


def test_autocast_may_begin_and_end_between_calls(device: torch.device) -> None:
    inputs = {**attention(device), "backend": "triton"}
    for times in (1, 1, 3, 3):  # planned, known by key, and recognised
        for _ in range(times):
            assert flash_attention(**inputs)[0].dtype == torch.float32
        with torch.autocast(device.type, torch.bfloat16):
            for _ in range(times):
                assert flash_attention(**inputs)[0].dtype == torch.bfloat16


@pytest.fixture
def deterministic() -> Iterator[Callable[[bool], None]]:
    """Switches PyTorch's deterministic algorithms on and off, and in the end to what they were."""
    before = torch.are_deterministic_algorithms_enabled()
    yield torch.use_deterministic_algorithms
    torch.use_deterministic_algorithms(before)


@pytest.mark.parametrize("name", ["flash_attention", "lrpe_rotate", "tpa_decode", "tpa_attention"])
def test_deterministic_algorithms_may_be_asked_for_between_calls(
    name: str, deterministic: Callable[[bool], None], device: torch.device
) -> None:
    function, make = USUAL[name]
    inputs = make(device)
    with no_plans():
        expected = results(function, inputs)
        for wanted in (True, False, True, False, True, False):
            deterministic(wanted)
            assert all(map(torch.equal, results(function, inputs), expected))


@pytest.mark.parametrize(
    ("function", "make", "names"),
    [(flash_attention, attention, "qkv"), (lrpe_rotate, encoding, ("x", "theta")),
     (lrpe_rotate, encoding_over_the_sequence, ("x", "theta"))],
)  # fmt: skip
def test_saved_tensors_may_come_back_with_other_strides(
    function: Callable[..., Any], make: Callable[[torch.device], Inputs], names: Any, device: torch.device
) -> None:
    inputs = changed(lambda x: x.mT.contiguous().mT, *names)(make(device))
    expected = results(function, inputs)
    for _ in range(2):
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x, torch.Tensor.contiguous):
            found = results(function, inputs)
        for a, b in zip(found, expected):  # other strides are read by another variant, which adds in its own order
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


# ----------------------------------------------------------------------------------------------------------
# What happens once
# ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Plans made during a test."""
    made: list[str] = []

    def watch(thing: Any, name: str) -> None:
        make = getattr(thing, name)

        def plan(*arguments: Any) -> Any:
            made.append(name)
            return make(*arguments)

        monkeypatch.setattr(thing, name, plan)

    for module in (flash_launchers, launchers):
        for name in ("plan_forward", "plan_backward"):
            watch(module, name)
    watch(tpa_launchers, "_plan_decode")
    watch(launchers_sequence._Planner, "plan")
    return made


@pytest.mark.parametrize(
    ("function", "inputs", "others"),
    [
        (flash_attention, attention, {}),
        (flash_attention, packed_attention, {"cu_seqlens_q": OTHER_BOUNDS}),
        (lrpe_rotate, encoding, {}),
        (lrpe_cosine, encoding, {}),
        (lrpe_rotate, packed_encoding, {"cu_seqlens": torch.tensor([0, 1, 12]), "offset": 17}),
        (lrpe_cosine, encoding_over_the_sequence, {}),
        (tpa_decode, factors_with_lengths, {"cache_seqlens": torch.tensor([3, 149])}),
    ],
)
def test_a_call_like_an_earlier_one_is_neither_checked_nor_planned(
    function: Callable[..., Any],
    inputs: Callable[[torch.device], Inputs],
    others: Inputs,
    planned: list[str],
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*arguments: Any) -> None:
        pytest.fail("checked again")

    one = inputs(device)
    two = inputs(device) | {name: v.to(device) if isinstance(v, Tensor) else v for name, v in others.items()}
    with no_plans():
        expected = results(function, two)
    planned.clear()
    with no_plans():
        results(function, one)
        assert len(planned) == (1 if function is tpa_decode else 2)
        made = list(planned)
        monkeypatch.setattr(flash_api, "_check_tensors", refuse)
        monkeypatch.setattr(lrpe_api, "_check", refuse)
        monkeypatch.setattr(tpa_api, "_check_factors", refuse)
        for a, b in zip(results(function, two), expected):
            assert torch.equal(a, b)
        assert planned == made


def test_registered_operators_plan_once(planned: list[str], device: torch.device) -> None:
    q, k, v = (torch.randn(2, 9, 2, 16, device=device) for _ in range(3))
    x, theta, bounds = q[:1], torch.rand(2, 8, device=device), torch.tensor([0, 4, 9], device=device)
    starts = ((0, 0), (5, 0), (6, 0), (6, 2))
    expected = [
        lrpe_rotate(x, theta, cu_seqlens=bounds, offset=offset, prefix=prefix, backend="triton")
        for offset, prefix in starts
    ]
    planned.clear()
    with no_plans():
        for scale in (0.5, 0.5, 0.25):
            rest = (None, None, None, 0, scale, None)
            out, _, statistics = torch.ops.warploom.flash_attention(q, k, v, *rest)
            torch.ops.warploom.flash_attention_backward(out, None, q, k, v, out, statistics, *rest)
        assert planned == ["plan_forward", "plan_backward"] * 2
        planned.clear()
        for (offset, prefix), wanted in zip(starts, expected):
            places = (None, None, bounds, offset, prefix, [], "rotate", "none")
            out, statistics = torch.ops.warploom.lrpe(x, theta, *places)
            assert torch.equal(out, wanted)
            torch.ops.warploom.lrpe_backward(out, x, theta, *places, statistics, True)
        assert planned == ["plan_forward", "plan_backward"] * 2


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU, calls on a CPU run PyTorch")
def test_calls_for_pytorch_leave_nothing(device: torch.device) -> None:
    with no_plans():
        flash_attention(**attention(device), backend="torch")
        lrpe_rotate(**encoding(device), backend="torch")
        assert not flash_api._on_kernels.known
        assert not lrpe_api._on_kernels.known


# ----------------------------------------------------------------------------------------------------------
# What is recognised without a key
# ----------------------------------------------------------------------------------------------------------


class Watching(TorchDispatchMode):
    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


class Mine(torch.Tensor):
    pass


UNLIKE: dict[str, Callable[[Tensor], Tensor]] = {
    "shape": lambda x: x[:, :2],
    "stride": with_gaps,
    "order": lambda x: x.mT.contiguous().mT,
    "dtype": torch.Tensor.half,
    "axes": lambda x: x[None],
    "meta": lambda x: x.to("meta"),
    "parameter": torch.nn.Parameter,
    "subclass": lambda x: x.as_subclass(Mine),
    "gradient": lambda x: x.clone().requires_grad_(),
    "negated": torch._neg_view,
}


@pytest.mark.parametrize("change", [pytest.param(change, id=name) for name, change in UNLIKE.items()])
def test_a_tensor_that_is_different_is_not_recognised(change: Callable[[Tensor], Tensor]) -> None:
    x, other = torch.randn(3, 4), torch.rand(5)
    like = recognise(x, other)
    assert like is not None
    assert like(torch.zeros(3, 4), torch.zeros(5))
    assert not like(change(x), other)
    assert not like(other, x)


def test_tensors_are_not_recognised_where_something_else_is_to_happen_to_them() -> None:
    x = torch.randn(3, 4, requires_grad=True)
    plain, found = recognise(x), []
    assert plain is not None

    def look(y: Tensor) -> Tensor:
        found.append(plain(x) or plain(y))
        return y.sum()

    assert plain(x)
    with torch.inference_mode():
        look(x)
    with Watching():
        look(x)
    torch.vmap(look)(x)
    torch.func.grad(look)(x)
    torch.func.jvp(look, (x,), (x,))
    assert found == [False] * 5
    assert plain(x)


@pytest.mark.parametrize("wanted_first", [False, True])
@with_gradients
def test_gradients_may_be_wanted_and_not_wanted_by_turns(
    name: str, wanted_first: bool, device: torch.device
) -> None:
    function, make = USUAL[name]
    inputs = make(device)
    with no_plans():
        for wanted in (wanted_first, not wanted_first) * 3:
            for _ in range(3):
                with torch.set_grad_enabled(wanted):
                    outputs = function(**inputs, backend="triton")
                outputs = (outputs,) if isinstance(outputs, Tensor) else outputs
                assert all(output.requires_grad is wanted for output in outputs)


def test_decoding_is_refused_a_gradient_that_was_not_wanted_before(device: torch.device) -> None:
    inputs = factors_with_lengths(device)
    wanted = changed(torch.Tensor.clone, "bk")({**inputs, "bk": inputs["bk"].requires_grad_()})
    with no_plans():
        for _ in range(3):
            for _ in range(3):
                with torch.no_grad():
                    tpa_decode(**wanted, backend="triton")
            with pytest.raises(WarploomError, match="bk must be without requires_grad"):
                tpa_decode(**wanted, backend="triton")


@pytest.mark.parametrize("name", USUAL)
def test_the_third_call_needs_no_key(name: str, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    function, make = USUAL[name]
    inputs = make(device)
    with no_plans():
        expected = [results(function, inputs) for _ in range(2)][1]
        for module in (flash_api, lrpe_api, tpa_api):
            monkeypatch.setattr(module, "_key", lambda *arguments: pytest.fail("made a key"))
        assert all(map(torch.equal, results(function, inputs), expected))


@pytest.mark.parametrize("name", USUAL)
def test_without_what_recognises_tensors_calls_are_known_by_their_keys(
    name: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plans, "_guard", None)
    function, make = USUAL[name]
    inputs = make(device)
    with no_plans():
        first, *others = (results(function, inputs) for _ in range(3))
        assert not any(module._on_kernels.recent for module in (flash_api, lrpe_api, tpa_api))
    for other in others:
        assert all(map(torch.equal, first, other))


def test_a_list_that_is_changed_between_calls(device: torch.device) -> None:
    inputs, window = set_to(window=(3, None))(attention(device)), [3, None]
    with no_plans():
        expected = [results(flash_attention, {**inputs, "window": (left, None)}) for left in (3, 1)]
    with no_plans():
        for left, wanted in zip((3, 1) * 3, expected * 3):
            window[0] = left
            assert all(map(torch.equal, results(flash_attention, {**inputs, "window": window}), wanted))


def test_options_are_recalled_if_they_are_equal_and_of_the_same_types() -> None:
    known, x, y = Plans(), torch.randn(3), torch.randn(2, 2)
    known.learn((1, 0.5, "a", None), (x, y), max)
    known.learn((1, 0.5, "a"), (x,), min)
    assert known.recall((1, 0.5, "a", None), x, y) is known.recall((1, 1 / 2, "a", None), x + 1, y + 1) is max
    assert known.recall((1, 0.5, "a"), x) is min
    for options in (
        (True, 0.5, "a", None),
        (1, 0.25, "a", None),
        (1, 0.5, "b", None),
        (1, torch.ones(2), "a", None),
    ):
        assert known.recall(options, x, y) is None
    assert known.recall((1, 0.5, "a", None), y, x) is None
    assert known.recall((1, 0.5, "a", None), x, None) is None  # type: ignore[arg-type]


# ----------------------------------------------------------------------------------------------------------
# Errors
# ----------------------------------------------------------------------------------------------------------

# What is right, and what is wrong though equal to it.
LOOKALIKES = [
    pytest.param(function, make, good, bad, id=f"{next(iter(bad))}={next(iter(bad.values()))!r}")
    for function, make, good, bad in (
        (flash_attention, attention, {"causal": True}, {"causal": 1}),
        (flash_attention, attention, {"causal": False}, {"causal": 0}),
        (flash_attention, attention, {"return_lse": False}, {"return_lse": 0.0}),
        (flash_attention, attention, {"scale": 1.0}, {"scale": True}),
        (flash_attention, attention, {"window": (1, 0)}, {"window": (True, 0)}),
        (flash_attention, attention, {"window": (1, 0)}, {"window": [1, False]}),
        (flash_attention, attention, {"window": (1, 0)}, {"window": (1.0, 0)}),
        (flash_attention, attention, {}, {"window": (1, 2, 3)}),
        (flash_attention, attention, {}, {"cu_seqlens_q": [0, 17]}),
        (flash_attention, packed_attention, {}, {"cu_seqlens_q": torch.tensor([0.0, 5.0, 17.0])}),
        (lrpe_rotate, encoding, {"prefix": 1}, {"prefix": True}),
        (lrpe_rotate, encoding, {"prefix": 0}, {"prefix": 0.0}),
        (lrpe_rotate, encoding, {"offset": 0}, {"offset": False}),
        (lrpe_rotate, encoding, {"offset": 1}, {"offset": 1.0}),
        (lrpe_rotate, encoding, {"offset": 1}, {"offset": 2**31 - 11}),
        (lrpe_rotate, encoding, {"grid": (12, 1)}, {"grid": (12, True)}),
        (lrpe_rotate, encoding, {"grid": (12, 1)}, {"grid": [12.0, 1]}),
        (lrpe_rotate, encoding, {"grid": (12, 1), "offset": 0}, {"grid": (12, 1), "offset": 1}),
        (lrpe_rotate, encoding, {"interleaved": False}, {"interleaved": 0}),
        (lrpe_rotate, encoding, {"activation": "none"}, {"activation": ["none"]}),
        (tpa_decode, factors, {"scale": 1.0}, {"scale": True}),
        (tpa_decode, factors, {"strategy": "batch"}, {"strategy": ["batch"]}),
        (tpa_decode, factors, {}, {"bk": torch.zeros(2, 150, 16, requires_grad=True)}),
        (tpa_decode, factors, {}, {"cache_seqlens": torch.tensor([1.0, 2.0])}),
        (tpa_attention, factors_with_gradients, {"causal": True}, {"causal": 1}),
    )
]


@pytest.mark.parametrize(("function", "make", "good", "bad"), LOOKALIKES)
def test_what_is_refused_is_refused_after_a_call_that_is_equal_and_right(
    function: Callable[..., Any],
    make: Callable[[torch.device], Inputs],
    good: Inputs,
    bad: Inputs,
    device: torch.device,
) -> None:
    inputs = {**make(device), "backend": "triton"}
    with no_plans():
        for _ in range(2):
            function(**{**inputs, **good})
            with pytest.raises(WarploomError):
                function(**{**inputs, **{n: v.to(device) if isinstance(v, Tensor) else v for n, v in bad.items()}})
        assert sum(len(module._on_kernels.known) for module in (flash_api, lrpe_api, tpa_api)) == 1
