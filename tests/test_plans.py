"""Calls that come again plan nothing: what is kept of a call, and how one like it is recognised."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from warploom import flash_attention, linear_attention, lrpe_cosine, lrpe_rotate, tpa_decode
from warploom.runtime import plans
from warploom.runtime.backend import HAS_TRITON

if not HAS_TRITON:
    pytest.skip("needs Triton", allow_module_level=True)

from planned_calls import (
    FUNCTIONS,
    OTHER_BOUNDS,
    USUAL,
    Inputs,
    attention,
    encoding,
    encoding_over_the_sequence,
    factors_with_lengths,
    linear,
    no_plans,
    packed_attention,
    packed_encoding,
    packed_linear,
    results,
    with_gaps,
)

from warploom.ops.flash_attention import engine as flash_engine
from warploom.ops.linear_attention import engine as linear_engine
from warploom.ops.lrpe import engine as launchers
from warploom.ops.lrpe.softmax_sequence import engine as launchers_sequence
from warploom.ops.tpa.decode import engine as tpa_launchers
from warploom.runtime import dispatch
from warploom.runtime.plans import Plans, make_guard

Tensor = torch.Tensor


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

    for engine in (flash_engine, linear_engine, launchers):
        watch(engine, "plan_forward")
        watch(engine, "plan_backward")
    watch(tpa_launchers, "plan_decode")
    watch(launchers_sequence, "plan_sequence")
    return made


@pytest.mark.parametrize(
    ("function", "inputs", "others"),
    [
        (flash_attention, attention, {}),
        (flash_attention, packed_attention, {"cu_seqlens_q": OTHER_BOUNDS}),
        (linear_attention, linear, {"offset": 5}),
        (linear_attention, packed_linear, {"cu_seqlens": torch.tensor([0, 8, 9]), "offset": 17}),
        (lrpe_rotate, encoding, {}),
        (lrpe_cosine, encoding, {}),
        (lrpe_rotate, packed_encoding, {"cu_seqlens": torch.tensor([0, 1, 12]), "offset": 17}),
        (lrpe_cosine, encoding_over_the_sequence, {}),
        (tpa_decode, factors_with_lengths, {"seqused_k": torch.tensor([3, 149])}),
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
        for each in FUNCTIONS:
            monkeypatch.setattr(each, "check", refuse)
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
    for function in (flash_attention, linear_attention):  # the first call registers them
        function(q, k, v, backend="triton")
    planned.clear()
    with no_plans():
        for scale in (0.5, 0.5, 0.25):
            absent, rest = (None,) * 4, (None, 0, scale, None, None, "batch")
            out, _, statistics = torch.ops.warploom.flash_attention(q, k, v, *absent, None, *rest)
            saved = (q, k, v, out, statistics, *absent)
            torch.ops.warploom.flash_attention_backward(out, None, *saved, *rest, [True] * 4)
        assert planned == ["plan_forward", "plan_backward"] * 2
        planned.clear()
        for offset in (0, 0, 5):
            absent, rest = (None,) * 5, (offset, "none", "none", True, 0.5, False)
            out, _ = torch.ops.warploom.linear_attention(q, k, v, *absent, *rest)
            torch.ops.warploom.linear_attention_backward(
                out, None, q, k, v, *absent, *rest, [True] * 3 + [False] * 3
            )
        assert planned == ["plan_forward", "plan_backward"]
        planned.clear()
        for (offset, prefix), wanted in zip(starts, expected):
            places, rest = (None, None, bounds), (offset, prefix, [], "rotate", "none", True)
            out, statistics = torch.ops.warploom.lrpe(x, theta, *places, *rest)
            assert torch.equal(out, wanted)
            saved = (x, theta, *places, statistics)
            torch.ops.warploom.lrpe_backward(out, *saved, *rest, [0, 1, 2, 3], [True, True])
        assert planned == ["plan_forward", "plan_backward"] * 2


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU, calls on a CPU run PyTorch")
def test_calls_for_pytorch_leave_nothing(device: torch.device) -> None:
    with no_plans():
        flash_attention(**attention(device), backend="torch")
        lrpe_rotate(**encoding(device), backend="torch")
        assert not any(each.plans.known for each in FUNCTIONS)


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
    like = make_guard(x, other)
    assert like is not None
    assert like(torch.zeros(3, 4), torch.zeros(5))
    assert not like(change(x), other)
    assert not like(other, x)


def test_a_tensor_that_comes_twice_is_recognised_where_it_comes_twice() -> None:
    x, y = torch.randn(3, 4), torch.randn(3, 4)
    twice, apart, outer = make_guard(x, x), make_guard(x, y), make_guard(x, y, x)
    assert twice is not None
    assert apart is not None
    assert outer is not None
    assert [twice(y, y), twice(x, y), twice(x, x.view(3, 4)), twice(x.T, x.T)] == [True, False, False, False]
    assert [apart(y, x), apart(x, x), apart(x, x.view(3, 4))] == [True, False, True]
    assert [outer(y, x, y), outer(y, y, y), outer(x, x, y), outer(x, y, y)] == [True, False, False, False]


def test_the_third_call_with_one_tensor_for_several_needs_no_key(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.randn(1, 20, 2, 16, device=device)
    with no_plans():
        expected = [flash_attention(x, x, x, backend="triton") for _ in range(2)][1]
        monkeypatch.setattr(dispatch, "tensor_key", lambda tensor: pytest.fail("made a key"))
        assert torch.equal(flash_attention(x, x, x, backend="triton"), expected)


def test_tensors_are_not_recognised_where_something_else_is_to_happen_to_them() -> None:
    x = torch.randn(3, 4, requires_grad=True)
    plain, found = make_guard(x), []
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


@pytest.mark.parametrize("name", USUAL)
def test_the_third_call_needs_no_key(name: str, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    function, make = USUAL[name]
    inputs = make(device)
    with no_plans():
        expected = [results(function, inputs) for _ in range(2)][1]
        monkeypatch.setattr(dispatch, "tensor_key", lambda tensor: pytest.fail("made a key"))
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
        assert not any(each.plans.recent for each in FUNCTIONS)
    for other in others:
        assert all(map(torch.equal, first, other))


def test_options_are_recalled_if_they_are_equal_and_of_the_same_types(monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[Any] = []

    def check(name: str, tensors: Any, options: Any, number: Any) -> dispatch.ValidatedCall:
        checked.append(options)
        return dispatch.ValidatedCall(None, numbers=(0, 3))

    twice = SimpleNamespace(specialize=None, gradient=None, forward=lambda tensors, *_: (2 * tensors[0],))
    function = dispatch.Function("f", check, lambda *_: None, twice)  # type: ignore[arg-type]
    monkeypatch.setattr(dispatch, "is_plain_eager", lambda *_: True)
    monkeypatch.setattr(dispatch, "keeps_plans_for", lambda _: True)
    monkeypatch.setattr(dispatch, "use_triton", lambda *_: True)
    x, y = torch.randn(3), torch.randn(2, 2)
    usual = (1, 0.5, "a", None, (2, None))
    for tensors, number in (((x, y), 0), ((x + 1, y + 1), 3), ((x, y), 2)):
        assert torch.equal(function("triton", tensors, usual, number), 2 * tensors[0])
    assert len(checked) == 1
    others = (
        (True, 0.5, "a", None, (2, None)),
        (1, 0.25, "a", None, (2, None)),
        (1, 0.5, "b", None, (2, None)),
        (1, 0.5, "a", None, (2.0, None)),
        (1, torch.ones(2), "a", None, (2, None)),
    )
    for count, options in enumerate(others, start=2):
        function("triton", (x, y), options)
        assert len(checked) == count
    for count, (tensors, number) in enumerate([((y, x), 0), ((x, None), 0), ((x, y), 4), ((x, y), True)], start=7):
        function("triton", tensors, usual, number)
        assert len(checked) == count
