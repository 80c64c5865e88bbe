"""Random calls of every public function, a new seed each day; and what draws, judges and simplifies them.

``--seed`` sets another, ``WARPLOOM_RANDOM_SECONDS`` for how long calls are run, all operators together: 20 seconds
on a CPU by default, a minute with ``--all`` or on a GPU.
"""

from __future__ import annotations

import inspect
import math
import os
import re
import shlex
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import random_calls
import seeds
import torch
from launches import ON_GPU
from random_cases import (
    OPERATORS,
    Call,
    Fault,
    Plan,
    Source,
    arrays,
    attention,
    cancelling,
    command,
    families,
    function_of,
    judging,
    parse,
    python_of,
    reference_of,
    run_calls,
    run_family,
    search,
    searching,
    shrink,
    text_of,
)
from random_cases.arrays import KINDS, Array, Memory
from random_cases.calls import make_call
from random_cases.choices import Choices
from random_cases.command import report_of
from random_cases.families import FAMILIES

from warploom.errors import ArgumentError
from warploom.runtime.backend import HAS_TRITON

Tensor = torch.Tensor
CPU = torch.device("cpu")
SEED = seeds.seed() or seeds.day()
SECONDS = os.environ.get("WARPLOOM_RANDOM_SECONDS")
RUNNABLE = OPERATORS if HAS_TRITON else tuple(name for name in OPERATORS if name != "rotary_attention")
BACKEND = None if HAS_TRITON else "auto"


@pytest.mark.parametrize("operator", RUNNABLE)
def test_random_calls_are_right(operator: str, request: pytest.FixtureRequest) -> None:
    usual = 60 if ON_GPU or request.config.getoption("--all") else 20
    source = Source(SEED, (operator,), small=not ON_GPU)
    plan = Plan(source, "cuda" if ON_GPU else "cpu", BACKEND, float(SECONDS or usual) / len(RUNNABLE))
    outcome = search(plan)
    print(f"seed {SEED}: {outcome.describe()}")
    faults = outcome.unknown(plan.device)
    assert not faults, report_of(faults[0], plan, seconds=20.0)
    assert sum(tally.cases for tally in outcome.tallies.values()) > 0


# ----------------------------------------------------------------------------------------------------------
# What is drawn
# ----------------------------------------------------------------------------------------------------------


def drawn(operator: str, count: int = 400, **options: Any) -> list[Call]:
    return [make_call(operator, Choices(f"{operator}:{index}", **options)) for index in range(count)]


@pytest.fixture(scope="module")
def calls() -> dict[str, list[Call]]:
    return {operator: drawn(operator) for operator in OPERATORS}


@pytest.mark.parametrize("operator", RUNNABLE)
def test_every_argument_is_drawn(operator: str, calls: dict[str, list[Call]]) -> None:
    given = {name for call in calls[operator] for name in (*call.arrays, *call.options)}
    assert given == set(inspect.signature(function_of(operator)).parameters)


@pytest.mark.parametrize("operator", OPERATORS)
def test_optional_arguments_are_left_out_too(operator: str, calls: dict[str, list[Call]]) -> None:
    required = {"x", "theta", "q", "k", "v", "qkv", "heads", "ak", "av", "bq", "bk", "bv", "backend", "activation"}
    given = Counter(name for call in calls[operator] for name in (*call.arrays, *call.options))
    always = {name for name, count in given.items() if count == len(calls[operator])}
    assert always <= required | ({"scale"} if operator == "rotary_attention" else set())


@pytest.mark.parametrize("operator", OPERATORS)
def test_every_kind_of_memory_is_drawn_for_every_tensor(operator: str, calls: dict[str, list[Call]]) -> None:
    floating = [
        (name, call.answers[f"{name}.memory"], array)
        for call in calls[operator]
        for name, array in call.arrays.items()
        if array.dtype.startswith(("float", "bfloat"))
    ]
    for name in {name for name, _, _ in floating}:
        assert {kind for other, kind, _ in floating if other == name} == set(KINDS), name
    memories = [array.memory for _, _, array in floating]
    assert any(memory.negated for memory in memories)
    assert any(0 in memory.strides for memory in memories)
    assert any(memory.offset % 2 for memory in memories)
    incoming = [array for call in calls[operator] for array in call.gradients if array is not None]
    if operator == "tpa_decode":  # has no gradient
        assert not incoming
        return
    assert any(array.memory.negated for array in incoming)
    assert any(0 in array.memory.strides for array in incoming)


@pytest.mark.parametrize("operator", OPERATORS)
def test_sizes_dtypes_and_gradients_vary(operator: str, calls: dict[str, list[Call]]) -> None:
    some = calls[operator]
    assert {"float16", "bfloat16", "float32"} <= {call.dtype for call in some}
    sizes = {size for call in some for array in call.arrays.values() for size in array.shape}
    assert {0, 1, 7, 15, 16, 17, 31, 32, 33, 63, 64, 65} <= sizes
    assert max(sizes) > 250
    wanted = {frozenset(name for name, array in call.arrays.items() if array.grad) for call in some}
    assert len(wanted) > 3
    assert {call.recorded for call in some} == {True, False}
    assert {bool(call.gradients) for call in some} >= {False}


def test_attention_is_drawn_with_all_that_changes_its_gradients(calls: dict[str, list[Call]]) -> None:
    differentiated = {
        tuple(gradient is not None for gradient in call.gradients)
        for call in calls["flash_attention"]
        if len(call.outputs) == 2
    }
    assert {(True, True), (True, False), (False, True)} <= differentiated
    assert any(call.arrays["q"].row_of_nan for call in calls["flash_attention"])
    assert any(call.arrays["ak"].ends for call in calls["tpa_decode"])


def test_the_interpreter_gets_small_sizes() -> None:
    for operator in OPERATORS:
        for call in drawn(operator, 100, small=True):
            assert all(size < 100 for array in call.arrays.values() for size in array.shape)


@pytest.mark.parametrize("small", [False, True])
def test_the_same_index_is_the_same_family(small: bool) -> None:
    source, same = (Source(5, small=small) for _ in range(2))
    for index in (0, 1, FAMILIES, 3 * FAMILIES + 5):
        assert source.family(index) == same.family(index)
        assert source.family(index) != Source(6, small=small).family(index)
        assert source.family(index) != source.family(index + 1)


def test_siblings_differ_from_their_call_in_little() -> None:
    for index in range(60):
        first, *siblings = Source(5, small=True).family(index)
        assert siblings
        for sibling in siblings:
            shared = first.answers.keys() & sibling.answers.keys()
            assert sum(first.answers[name] != sibling.answers[name] for name in shared) <= 4


def test_families_in_a_run_share_what_kernels_are_compiled_for() -> None:
    source = Source(7)
    for run in range(12):
        some = [source.family(run * FAMILIES + place)[0] for place in range(8)]
        assert len({call.operator for call in some}) == 1
        for name in ("dtype", "D", "angles", "activation", "Rk"):
            assert len({call.answers[name] for call in some if name in call.answers}) <= 1, name
        assert len({call.answers.get("N", call.outputs[0][1]) for call in some}) > 1


def test_workers_and_shards_share_the_families() -> None:
    plans = [Plan(Source(0), "cpu", workers=2, shard=(index, 3)) for index in range(3)]
    found = [
        index for plan in plans for worker in range(2) for index, _ in zip(plan.indices(worker), range(FAMILIES))
    ]
    assert sorted(found) == list(range(6 * FAMILIES))


@pytest.mark.parametrize("operator", OPERATORS)
def test_a_line_of_text_is_the_call_again(operator: str) -> None:
    for call in (*drawn(operator, 40), *drawn(operator, 40, small=True)):
        assert parse(text_of([call])) == [call]
    some = drawn(operator, 3)
    assert parse(text_of(some)) == some


@pytest.mark.parametrize(
    "text", ["", "{}", "[1]", '["no_operator",{}]', '["lrpe_rotate"]', "[[]]", '["lrpe_rotate",{"no_choice":1}]']
)
def test_other_text_is_no_call(text: str) -> None:
    with pytest.raises(ArgumentError, match="--repeat"):
        parse(text)


# ----------------------------------------------------------------------------------------------------------
# Memory
# ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("operator", OPERATORS)
def test_tensors_hold_their_numbers_and_nan_lies_around(operator: str, device: torch.device) -> None:
    for call in drawn(operator, 60, small=True):
        for name, array in call.arrays.items():
            placed = arrays.place(array, name, call.seed, device)
            assert placed.tensor.shape == array.shape
            if not array.memory.negated and placed.tensor.numel():
                strides = zip(array.shape, placed.tensor.stride(), array.memory.strides)
                assert all(size == 1 or found == stride for size, found, stride in strides)
            assert placed.tensor.is_neg() == array.memory.negated
            assert torch.equal(placed.tensor.nan_to_num(7.0), placed.dense.nan_to_num(7.0))
            if placed.storage.is_floating_point() and not (array.row_of_nan or array.ends):
                held = torch.zeros(array.stored_shape).numel()
                assert int((~placed.storage.isnan()).sum()) == held
            assert not placed.changed()


def test_a_write_anywhere_in_the_storage_is_seen() -> None:
    array = Array((2, 3), "float16", Memory((8, 2), 3, 40))
    for index in (0, 3, 4, 39):
        placed = arrays.place(array, "x", 0, CPU)
        placed.storage[index] = 1.0
        assert placed.changed()


# ----------------------------------------------------------------------------------------------------------
# Faults that are planted
# ----------------------------------------------------------------------------------------------------------


def plant(monkeypatch: pytest.MonkeyPatch, change: Callable[..., Any]) -> None:
    """Let every operator's function be its definition, its results changed."""

    def function(operator: str) -> Callable[..., Any]:
        def run(*given: Any, backend: str = "auto", strategy: str = "auto", **named: Any) -> Any:
            names = list(inspect.signature(reference_of(operator)).parameters)
            if operator == "tpa_decode":
                names = ["aq", "ak", "av", "bq", "bk", "bv"]
            named |= dict(zip(names, given))
            named = {name: v.resolve_neg() if isinstance(v, Tensor) else v for name, v in named.items()}
            outputs = reference_of(operator)(**named)
            first = outputs if isinstance(outputs, Tensor) else outputs[0]
            changed = change(first, named)
            return changed if isinstance(outputs, Tensor) else (changed, *outputs[1:])

        return run

    monkeypatch.setattr(judging, "function_of", function)


def found(operators: Sequence[str] = ("lrpe_rotate", "flash_attention"), most: int = 60) -> Fault | None:
    source = Source(3, tuple(operators), small=True)
    for index in range(most):
        _, faults = run_family(source, index, CPU, None)
        faults = [fault for fault in faults if fault.kind != "memory order"]  # the definition has its own
        if faults:
            return faults[0]
    return None


def test_the_definition_itself_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, lambda out, named: out)
    assert found() is None


PLANTED: dict[str, tuple[str, Callable[[Tensor, dict[str, Any]], Tensor]]] = {
    "a factor": ("accuracy", lambda out, named: out * 1.02),
    "a factor in one dtype": ("accuracy", lambda out, named: out * 1.02 if out.dtype == torch.float16 else out),
    "the last column": ("accuracy", lambda out, named: torch.cat((out[..., :-1], out[..., -1:] * 1.5), -1)),
    "a tail": (
        "accuracy",
        lambda out, named: torch.cat((out[:, :16], out[:, 16:] + 0.5), 1) if out.shape[1] > 16 else out,
    ),
    "NaN": ("NaN", lambda out, named: out.masked_fill(torch.arange(out.shape[-1]) == 2, torch.nan)),
    "a dtype": ("dtype", lambda out, named: out.double()),
    "a shape": ("shape", lambda out, named: out[..., :-1] if out.shape[-1] > 1 else out),
    "a gradient": ("accuracy gradient", lambda out, named: out + 0.02 * (out - out.detach())),
    "a gradient in one place": (
        "accuracy gradient",
        lambda out, named: out + 0.1 * (out - out.detach()) * (torch.arange(out.shape[-1]) == 3),
    ),
    "no gradient": ("requires_grad", lambda out, named: out.detach()),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_fault_is_found_and_simplified(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, change = PLANTED[name]
    plant(monkeypatch, change)
    fault = found()
    assert fault is not None
    assert fault.kind.startswith(kind)
    simple = shrink(fault, CPU, None, seconds=5.0)
    assert simple.kind == fault.kind
    assert len(simple.calls) == 1
    assert len(simple.calls[0].record) <= len(fault.calls[-1].record)
    _, again = run_calls(parse(text_of(simple.calls)), CPU, None)
    assert [other.kind for other in again][:1] == [fault.kind]


def test_writing_to_an_input_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def write(out: Tensor, named: dict[str, Any]) -> Tensor:
        x = next(value for value in named.values() if isinstance(value, Tensor))
        if x.numel():
            torch.as_strided(x.detach(), (1,), (1,), 0).zero_()  # the first of its storage, in it or not
        return out

    plant(monkeypatch, write)
    fault = found(["lrpe_rotate"])
    assert fault is not None
    assert fault.kind == "modified x"


def test_other_bits_in_a_later_run_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = []

    def drift(out: Tensor, named: dict[str, Any]) -> Tensor:
        runs.append(None)
        return out * (1 + 1e-7) if len(runs) % 7 == 6 else out

    plant(monkeypatch, drift)
    fault = found(["lrpe_cosine"])
    assert fault is not None
    assert fault.kind.startswith("bits")


@pytest.mark.parametrize("operator", sorted(judging.INDEPENDENT_OF_BATCH))
@pytest.mark.parametrize(("backend", "expected"), [("triton", "batch output"), ("auto", None), ("torch", None)])
def test_other_bits_in_a_batch_are_found_on_the_kernels(
    backend: str, expected: str | None, operator: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def drift(out: Tensor, named: dict[str, Any]) -> Tensor:
        return torch.nextafter(out, torch.full_like(out, torch.inf)) if len(out) > 1 else out

    plant(monkeypatch, drift)
    sizes = {"tpa_decode": {"M": 7, "D": 8}, "linear_attention": {"N": 7, "angles": 8, "decay": "token"}}[operator]
    call = make_call(operator, Choices(given={"B": 3, "backend": backend, **sizes}))
    assert call.options["backend"] == backend
    _, faults = run_calls([call], CPU, None)
    assert [fault.kind for fault in faults] == ([] if expected is None else [expected])


@pytest.mark.skipif(not HAS_TRITON, reason="needs Triton")
def test_what_the_kernels_refuse_may_depend_on_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """By ``auto``, PyTorch computes it."""
    monkeypatch.setattr(judging.Prepared, "in_torch", False)
    entries = []
    for rank, backend in ((2, "triton"), (17, "auto")):
        sizes = {"B": 3, "M": 7, "D": 8, "Rk": rank, "Rv=Rk": True}
        prepared = judging.Prepared(make_call("tpa_decode", Choices(given={**sizes, "backend": backend})), CPU)
        outputs, _ = prepared.run()
        entries.append(judging.judge_entry(prepared, judging.Verdict(0.0, 0, judging._bits(outputs))))
    assert entries == [1, 0]


def test_a_fault_that_needs_a_call_before_it_keeps_both(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a plan does that is taken for another call: the result is wrong where the dtype changed before."""
    dtypes: list[torch.dtype] = []

    def confuse(out: Tensor, named: dict[str, Any]) -> Tensor:
        dtypes.append(out.dtype)
        return out * 2 if dtypes[-2:] == [torch.float32, torch.float16] else out

    plant(monkeypatch, confuse)
    monkeypatch.setattr(families, "forget_plans", dtypes.clear)
    calls = [
        make_call("lrpe_rotate", Choices(given={"dtype": d, "N": 5})) for d in ("float32", "bfloat16", "float16")
    ]
    calls = [calls[0], calls[2]]
    _, faults = run_calls(calls, CPU, None)
    assert faults
    from random_cases import shrinking

    monkeypatch.setattr(shrinking, "forget_plans", dtypes.clear)
    simple = shrink(faults[0], CPU, None, seconds=5.0)
    assert [call.dtype for call in simple.calls] == ["float32", "float16"]


def test_shrinking_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, lambda out, named: out + 1)
    fault = found()
    assert fault is not None
    simple = shrink(fault, CPU, None, seconds=60.0)
    assert simple.calls[0].record == {}  # everything fails, so that the simplest call is left


def test_a_result_that_is_unlucky_is_drawn_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """One number has an error that is small beside that of most draws; the budget of a draw may be smaller."""
    generator = torch.Generator().manual_seed(0)

    def noisy(out: Tensor, named: dict[str, Any]) -> Tensor:
        if out.dtype != torch.float32:
            return out
        noise = torch.randn(out.shape, generator=generator) * 5e-8
        return out + (out.abs() * noise).detach()

    plant(monkeypatch, noisy)
    monkeypatch.setattr(families, "ROUNDS", 1)
    call = make_call("lrpe_rotate", Choices(given={"angles": 1, "activation": "sigmoid", "offset": 5}))
    tally = families.Tally()
    for seed in range(60):
        one, faults = run_calls([replace(call, seed=seed)], CPU, None)
        tally.add(one)
        assert not faults, faults[0].detail
    assert tally.redrawn > 0


@pytest.mark.parametrize("operator", ["flash_attention", "tpa_attention", "tpa_decode", "rotary_attention"])
def test_what_cancels_is_estimated_on_the_attention_of_the_definition(operator: str) -> None:
    for call in drawn(operator, 120, small=True):
        prepared = judging.Prepared(call, CPU)
        given = prepared._for_the_definition(torch.float64)
        _, _, out, lse = attention.attend(attention.ATTENTION[operator](given))
        expected = judging.as_tuple(reference_of(operator)(**given))
        some = ~lse.isnan()
        assert torch.allclose(out, expected[0], rtol=1e-9, atol=1e-9, equal_nan=True)
        if len(expected) == 2:
            hidden = expected[1].isinf()
            assert torch.allclose(lse[some & ~hidden], expected[1][some & ~hidden], rtol=1e-9, atol=1e-9)
        off = prepared.cancelling() if call.gradients else None
        if off is not None:
            assert [tuple(each.shape) for each in off] == [a.shape for a in call.arrays.values() if a.grad]


def term_after_term(q: Tensor, k: Tensor) -> Tensor:
    """Products (B, H, N, M) of queries (B, N, H, D) and keys (B, M, H, D), each sum in the order of features."""
    products = q.new_zeros(q.shape[0], q.shape[2], q.shape[1], k.shape[1])
    for a, b in zip(q.unbind(-1), k.unbind(-1)):
        products = products + torch.einsum("bnh,bmh->bhnm", a, b)
    return products


def attention_of(logits: Tensor, v: Tensor) -> Tensor:
    return torch.einsum("bhnm,bmhe->bnhe", logits.softmax(-1), v).contiguous()


def attention_with(change: Callable[[Tensor], Tensor]) -> Callable[[Tensor, dict[str, Any]], Tensor]:
    """A change of the result: attention in float32 with ``change`` made to queries."""

    def changed(out: Tensor, named: dict[str, Any]) -> Tensor:
        q, k, v = (named[name] for name in "qkv")
        return attention_of(term_after_term(change(q), k) * named["scale"], v)

    return changed


def upper_bits(x: Tensor) -> Tensor:
    """Two bfloat16 terms of a float32 number."""
    upper = x.bfloat16().float()
    return upper + (x - upper).bfloat16().float()


LARGE_LOGITS: dict[str, Any] = {"dtype": "float32", "Hkv": 3, "D": 100, "N": 12, "M=N": True}
LARGE_LOGITS |= {"size": 3.0, "scale": 1.0, "backend": "triton"}
LARGE_LOGITS |= {"q.grad": False, "k.grad": False, "v.grad": True}


def faults_of_large_logits(**more: Any) -> list[Fault]:
    call = make_call("flash_attention", Choices(given=LARGE_LOGITS | more))
    return [fault for seed in range(12) for fault in run_calls([replace(call, seed=seed)], CPU, None)[1]]


def test_logits_may_be_off_by_what_float32_rounds() -> None:
    """Sums term after term are off by as much as is estimated."""
    q, k, v = (3 * torch.randn(2, 40, 3, 100) for _ in range(3))
    attended = attention.Attended(q, k, v, 0.7, torch.ones(40, 40, dtype=torch.bool))
    exact = torch.einsum("bnhd,bmhd->bhnm", q.double(), k.double())
    error = 0.7 * (term_after_term(q, k) - exact).square().mean().sqrt()
    estimate = attention.rounding_of_logits(attended)
    usual = (estimate * attention.signs(estimate)).square().mean().sqrt()
    assert 0.5 * usual < error < usual


def test_large_logits_in_another_order_of_sums_are_right(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where those of eager arithmetic are exact."""
    defined = judging.Prepared.defined

    def eager(prepared: judging.Prepared, dtype: torch.dtype | None) -> list[Tensor]:
        if dtype is torch.float64:
            return defined(prepared, dtype)
        q, k, v = (prepared.arrays[name].dense for name in "qkv")
        v = v.detach().requires_grad_()
        out = attention_of(term_after_term(q.double(), k.double()).float(), v)
        (grad,) = prepared.gradients
        return [out, *torch.autograd.grad(out, v, grad and grad.dense)]

    monkeypatch.setattr(judging.Prepared, "defined", eager)
    plant(monkeypatch, attention_with(lambda q: q))
    assert not faults_of_large_logits()


def test_large_logits_of_rounded_queries_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, attention_with(upper_bits))
    faults = faults_of_large_logits()
    assert len(faults) > 6
    assert {fault.kind for fault in faults} == {"accuracy output"}


def test_weights_of_a_backward_that_are_not_the_forwards_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a single key, that of the forward is one; of a logit of 300, two roundings leave as much as this."""
    given = {"window": True, "windowleft": 0, "windowright": 0}
    assert not faults_of_large_logits(**given)
    plant(monkeypatch, lambda out, named: (out + 3e-5 * (out - out.detach())).contiguous())
    assert {fault.kind for fault in faults_of_large_logits(**given)} == {"accuracy gradient of v"}


def test_the_mean_error_of_equal_numbers_is_that_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """All lse of a zero scale are the same, and so is what they are off."""
    given = {"dtype": "float32", "D": 4, "N": 9, "M": 511, "scale": 0.0, "return_lse": True, "backend": "triton"}
    call = make_call("flash_attention", Choices(given=given))
    run = judging.Prepared.run
    for units, wrong in ((1, False), (2, True)):

        def off(prepared: judging.Prepared, by: float = units * 2**-21) -> tuple[list[Tensor], list[Tensor]]:
            (out, lse), gradients = run(prepared)
            return [out, torch.full_like(lse, math.log(511)) + by], gradients

        monkeypatch.setattr(judging.Prepared, "run", off)
        _, faults = run_calls([call], CPU, None)
        assert [fault.kind for fault in faults] == ["accuracy lse"] * wrong


@pytest.mark.parametrize(("operator", "features"), [("lrpe_cosine", "x"), ("linear_attention", "q")])
def test_the_softmax_of_one_feature_is_held_to_the_rounding_of_its_terms(operator: str, features: str) -> None:
    """It is one whatever the feature, whose gradient is zero, and eager arithmetic gives no other."""
    given = {"B": 2, "N": 20, "angles": 1, "encoding": "cosine", "activation": "softmax", "backend": "triton"}
    call = make_call(operator, Choices(given={**given, f"{features}.grad": True}))
    for seed in range(4):
        _, faults = run_calls([replace(call, seed=seed)], CPU, None)
        assert not faults, faults[0].detail
    prepared = judging.Prepared(call, CPU)
    assert not prepared.defined(torch.float64)[-1].any()
    assert 0 < (prepared.cancelling() or [])[0].abs().max() < 1e-4


EXPANDED = {f"{name}.memory": "expanded" for name in ("x", "q", "k", "gradient")}
EQUAL_PAIRS = {
    "lrpe_rotate": {"three_dimensions": True, "x.expand2": True, "gradient.expand2": True},
    "linear_attention": {"encoding": "rotate", "q.expand3": True, "k.expand3": True},
}


@pytest.mark.parametrize(
    ("operator", "options"),
    [
        ("lrpe_rotate", {}),
        ("lrpe_rotate", {"activation": "softmax_sequence", "x.grad": True}),
        ("lrpe_rotate", {"positions": "grid", "grid.axes": 2, "grid0": 3, "grid1": 3}),
        ("linear_attention", {}),
        ("linear_attention", {"decay": "token", "activation": "silu", "q.grad": True}),
    ],
)
def test_equal_pairs_are_held_to_the_rounding_of_their_terms(operator: str, options: dict[str, Any]) -> None:
    """Expanded features: both terms of theta's gradient are equal, and eager arithmetic rounds them alike."""
    sizes = {"B": 2, "N": 9, "angles": 8, "offset": 1000, "interleaved": True, "backend": "triton"}
    theta = {"theta.values": "zeros", "theta.grad": True}
    given = {**sizes, **theta, **EXPANDED, **EQUAL_PAIRS[operator], **options}
    call = make_call(operator, Choices(given=given))
    for seed in range(4):
        _, faults = run_calls([replace(call, seed=seed)], CPU, None)
        assert not faults, faults[0].detail
    prepared = judging.Prepared(call, CPU)
    index = [name for name, array in call.arrays.items() if array.grad].index("theta")
    assert prepared.defined(torch.float64)[len(call.outputs) + index].abs().max() < 1e-9
    off = (prepared.cancelling() or [])[index].abs().max()
    assert 0 < off < 1e-6 * 2 * 9 * 1008  # of batch, tokens and positions


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_rounded_output_may_be_off_the_same_way_in_all_features(dtype: torch.dtype) -> None:
    """Where features are copies of one, so are roundings: their sum in δ grows as their number does."""
    torch.manual_seed(0)
    given: dict[str, Any] = {name: torch.randn(1, 1, 2, 8, dtype=torch.float64).to(dtype).double() for name in "qk"}
    given["v"] = torch.full((1, 1, 2, 64), 1 / 3, dtype=torch.float64)
    leaves = [given[name].requires_grad_() for name in "qkv"]
    grad = torch.ones(1, 1, 2, 64, dtype=torch.float64)
    off_q, off_k, _ = cancelling.cancelling("flash_attention", given, [grad], "qkv", str(dtype)[6:]) or []
    off_delta = 64 * (given["v"].to(dtype).double() - given["v"])[..., :1].detach()
    q, k, _ = (leaf.detach() for leaf in leaves)
    for off, other in ((off_q, k), (off_k, q)):
        expected = (off_delta * other).abs() * 8**-0.5
        torch.testing.assert_close(off.detach(), expected, rtol=1e-3, atol=0.0)


def test_a_forward_may_round_a_feature_either_way() -> None:
    """One whose exact sum lies in the middle of two numbers; where all weight is on a key, none does."""
    logits = torch.tensor([0.0, -6.9], dtype=torch.float64)
    weights = logits.softmax(0)
    v = torch.ones(1, 2, 1, 4, dtype=torch.float64)
    v[0, 1, 0] += torch.tensor([1.0, 1.0001, 1.1, 0.0]) * 2.0**-11 / weights[1]
    q, k = torch.ones(1, 1, 1, 1, dtype=torch.float64), logits.view(1, 2, 1, 1)
    for scale, expected in ((1.0, [2.0**-10, 2.0**-10, 0.0, 0.0]), (5.0, [0.0] * 4)):
        attended = attention.Attended(q, k, v, scale, torch.ones(1, 2, dtype=torch.bool))
        _, shares, out, _ = attention.attend(attended)
        assert cancelling._other_roundings(attended, logits, shares, out, "float16").flatten().tolist() == expected


def test_the_largest_weight_is_summed_before_it_is_rounded() -> None:
    """It is off by the rounding of a large maximum, and what its key shares with another, as light as that, too."""
    q, k = torch.ones(1, 1, 1, 1, dtype=torch.float64), torch.tensor([500.0, 491.4], dtype=torch.float64)
    v = torch.ones(1, 2, 1, 3, dtype=torch.float64)
    weights = k.softmax(0)
    v[0, 1, 0] += torch.tensor([1.0, 1.04, 1.2]) * 2.0**-11 / weights[1]  # a sum in the middle, near it, and beyond
    for shift, expected in ((0.0, [2.0**-10, 2.0**-10, 0.0]), (-500.0, [2.0**-10, 0.0, 0.0])):
        attended = attention.Attended(q, (k + shift).view(1, 2, 1, 1), v, 1.0, torch.ones(1, 2, dtype=torch.bool))
        logits, shares, out, _ = attention.attend(attended)
        found = cancelling._other_roundings(attended, logits, shares, out, "float16")
        assert found.flatten().tolist() == expected


def with_another_delta(prepared: judging.Prepared, factor: float) -> list[Tensor]:
    """Attention by its definition, with gradients of queries and keys whose δ is multiplied by a factor."""
    outputs = prepared.defined(None)
    q, k, v, out = (x.detach().double() for x in (*(prepared.arrays[name].dense for name in "qkv"), outputs[0]))
    (grad,) = prepared.gradients
    assert grad is not None
    weights = (torch.einsum("bnhd,bmhd->bhnm", q, k) * q.shape[-1] ** -0.5).softmax(-1)
    dweights = torch.einsum("bnhe,bmhe->bhnm", grad.dense.double(), v)
    delta = factor * (grad.dense * out).sum(-1).transpose(1, 2).unsqueeze(-1)
    dlogits = weights * (dweights - delta) * q.shape[-1] ** -0.5
    dq, dk = torch.einsum("bhnm,bmhd->bnhd", dlogits, k), torch.einsum("bhnm,bnhd->bmhd", dlogits, q)
    return [outputs[0], dq.to(outputs[0].dtype), dk.to(outputs[0].dtype), *outputs[3:]]


@pytest.mark.parametrize(("size", "keys", "off"), [(1.0, 3, 2**-8), (1.0, 40, 2**-6), (3.0, 40, 2**-8)])
def test_a_less_exact_delta_is_found(size: float, keys: int, off: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients are a few budgets off by it."""
    given = {"dtype": "float16", "B": 2, "Hkv": 2, "D": 32, "E=D": True, "N": 40, "M": keys, "size": size}
    given |= {"scale": None, "backend": "triton", "q.grad": True, "k.grad": True, "v.grad": True}
    call = make_call("flash_attention", Choices(given=given))
    for factor, expected in ((1.0, []), (1.0 + off, ["accuracy gradient of q"])):

        def run(prepared: judging.Prepared, factor: float = factor) -> tuple[list[Tensor], list[Tensor]]:
            out, *gradients = with_another_delta(prepared, factor)
            return [out.detach()], gradients

        monkeypatch.setattr(judging.Prepared, "run", run)
        monkeypatch.setattr(judging, "_check_form", lambda prepared, outputs: None)
        _, faults = run_calls([call], CPU, None)
        assert [fault.kind for fault in faults] == expected


EQUAL_TOKENS: dict[str, Any] = {
    f"{name}.{key}": value
    for name in ("q", "k", "v", "decay", "gradient")
    for key, value in (("memory", "expanded"), ("expand1", True))
}
DECAYED: dict[str, Any] = {"H": 2, "angles": 4, "decay": "token", "initial_state": True, "return_state": True}
DECAYED |= {"dtype": "bfloat16", "backend": "triton", "initial_state.grad": True, "causal": True}


@pytest.mark.skipif(not HAS_TRITON, reason="needs Triton")
@pytest.mark.parametrize("positions", ["", "cu_seqlens"])
def test_the_error_of_a_state_of_equal_tokens_is_that_of_its_tiles(positions: str) -> None:
    given = {**DECAYED, **EQUAL_TOKENS, "N": 100, "positions": positions}
    prepared = judging.Prepared(make_call("linear_attention", Choices(given=given)), CPU)
    (_, state), gradients = prepared.run()
    _, exact, *others = prepared.defined(torch.float64)
    names = [name for name, array in prepared.call.arrays.items() if array.grad]
    index = names.index("initial_state")
    known = prepared.rounded_states()
    assert known is not None
    for result, right, errors in zip((state, gradients[index]), (exact, others[index]), known):
        off = result.detach().double() - right.detach()
        assert (off - errors[0]).norm() < 0.01 * off.norm()  # tiles of 16 tokens, whose values are rounded


def test_a_state_is_held_to_errors_of_its_shape() -> None:
    for call in drawn("linear_attention", 150, small=True):
        prepared = judging.Prepared(call, CPU)
        known = prepared.rounded_states()
        if known is not None and len(call.outputs) == 2:
            assert {tuple(error.shape) for errors in known for error in errors} == {call.outputs[1]}


def test_a_state_without_part_of_a_token_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where tokens are equal."""
    run = judging.Prepared.run

    def less(prepared: judging.Prepared) -> tuple[list[Tensor], list[Tensor]]:
        (out, state), gradients = run(prepared)
        key, value = (prepared.arrays[name].dense[:, -1].double() for name in "kv")
        return [out, (state - torch.einsum("bhf,bhe->bhfe", key, value) / 16).to(state.dtype)], gradients

    plant(monkeypatch, lambda out, named: out)
    monkeypatch.setattr(judging, "_check_form", lambda prepared, outputs: None)
    for tokens in ({}, EQUAL_TOKENS):
        given = {**DECAYED, **tokens, "N": 100, "encoding": "none"}
        call = make_call("linear_attention", Choices(given=given))
        assert not run_calls([call], CPU, None)[1]
        with monkeypatch.context() as patched:
            patched.setattr(judging.Prepared, "run", less)
            assert [fault.kind for fault in run_calls([call], CPU, None)[1]] == ["accuracy state"]


def test_equal_decays_of_tiles_are_rounded_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """64 of them are off by up to 32 units in the last place; twice what a unit of each is worth is found."""
    plant(monkeypatch, lambda out, named: out)
    monkeypatch.setattr(judging, "_check_form", lambda prepared, outputs: None)
    given = {**DECAYED, "N": 1024, "decay": "head", "encoding": "none", "gradient.none": True}
    call = make_call("linear_attention", Choices(given=given))
    run = judging.Prepared.run
    unit = 1024 / 16 * 2.0**-24
    for error, expected in ((unit / 2, []), (2.5 * unit, ["accuracy gradient of initial_state"])):

        def off(prepared: judging.Prepared, error: float = error) -> tuple[list[Tensor], list[Tensor]]:
            outputs, gradients = run(prepared)
            return outputs, [gradient * (1 + error) for gradient in gradients]

        monkeypatch.setattr(judging.Prepared, "run", off)
        assert [fault.kind for fault in run_calls([call], CPU, None)[1]] == expected
    monkeypatch.setattr(judging.Prepared, "run", run)
    prepared = judging.Prepared(call, CPU)
    arguments, (wanted, incoming) = prepared._for_the_definition(torch.float64), prepared._wanted()
    off = cancelling.rounded_decays(arguments, incoming, wanted)
    exact = prepared.defined(torch.float64)[-1]
    torch.testing.assert_close(off["gradient of initial_state"], unit * exact, rtol=1e-3, atol=0.0)
    arguments["decay"] = -torch.rand(call.arrays["q"].shape[:3], dtype=torch.float64)  # of tokens, all different
    assert not any(each.any() for each in cancelling.rounded_decays(arguments, incoming, wanted).values())


def test_outputs_read_states_whose_decays_are_rounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """What that is worth is known, and four times as much is found."""
    monkeypatch.setattr(judging, "_check_form", lambda prepared, outputs: None)
    given = {"N": 1024, "H": 8, "angles": 2, "decay": "head", "activation": "sigmoid", "backend": "torch"}
    call = make_call("linear_attention", Choices(given={**given, "q.grad": True, "v.grad": True}))
    known = judging.Prepared(call, CPU).rounded_decays()
    assert known.keys() == {"output", "state", "gradient of q", "gradient of v"}
    run, rounded_decays = judging.Prepared.run, judging.Prepared.rounded_decays

    def kinds(share: float) -> list[str]:
        def rounded(prepared: judging.Prepared) -> tuple[list[Tensor], list[Tensor]]:
            off = rounded_decays(prepared)
            outputs, gradients = run(prepared)
            more = [off[name] for name in ("gradient of q", "gradient of v")]
            outputs = [outputs[0] + (share * off["output"]).to(outputs[0])]
            return outputs, [a + (share * b).to(a) for a, b in zip(gradients, more)]

        with monkeypatch.context() as patched:
            patched.setattr(judging.Prepared, "run", rounded)
            return [fault.kind for fault in run_calls([call], CPU, None, rounds=1)[1]]

    assert kinds(0.9) == []
    assert kinds(4.0) == ["accuracy output"]
    monkeypatch.setattr(judging.Prepared, "rounded_decays", lambda prepared: {})
    assert kinds(0.9) == ["accuracy output"]


def test_a_first_states_gradient_is_divided_by_the_scale_and_multiplied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no decay changes it and no query adds to it, the definition copies it."""
    plant(monkeypatch, lambda out, named: out)
    monkeypatch.setattr(judging, "_check_form", lambda prepared, outputs: None)
    state = {name: value for name, value in DECAYED.items() if name != "decay"} | {"angles": 32, "E": 32}
    call = make_call(
        "linear_attention", Choices(given={**state, "N": 9, "encoding": "none", "gradient.none": True})
    )
    run = judging.Prepared.run
    for units, expected in ((1, []), (4, ["accuracy gradient of initial_state"])):

        def off(prepared: judging.Prepared, units: int = units) -> tuple[list[Tensor], list[Tensor]]:
            outputs, gradients = run(prepared)
            scaled = [(gradient.float() / 0.3).float() * 0.3 for gradient in gradients]
            return outputs, [units * (a - b) + b for a, b in zip(scaled, gradients)]

        monkeypatch.setattr(judging.Prepared, "run", off)
        assert [fault.kind for fault in run_calls([call], CPU, None)[1]] == expected


def test_expanded_numbers_are_judged_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block of them is off by one draw's error, which may be as large as the whole may be off; not larger."""
    plant(monkeypatch, lambda out, named: out)
    monkeypatch.setattr(judging, "_check_form", lambda prepared, outputs: None)
    run = judging.Prepared.run
    sizes = {"dtype": "bfloat16", "B": 4, "N": 64, "M=N": True, "Hkv": 8, "D": 64, "E=D": True, "causal": True}
    expanded = {"v.memory": "expanded", "v.expand0": True}
    for given, units, expected in ((sizes, 1.2, 1), (sizes | expanded, 1.2, 0), (sizes | expanded, 20.0, 1)):

        def off(prepared: judging.Prepared, units: float = units) -> tuple[list[Tensor], list[Tensor]]:
            (out, *others), gradients = run(prepared)
            exact, eager = (prepared.defined(dtype)[0].double() for dtype in (torch.float64, None))
            out[0, -4:] = (exact[0, -4:] + units * (eager - exact).abs().max()).to(out.dtype)
            return [out, *others], gradients

        monkeypatch.setattr(judging.Prepared, "run", off)
        faults = run_calls([make_call("flash_attention", Choices(given=given))], CPU, None)[1]
        assert len(faults) == expected, (given, units)


def test_matrix_units_cut_what_does_not_fit_into_a_sum() -> None:
    """A sum of 1025 tokens, 16 at a time, whose last bits are cut off; of states that decay it is a part."""
    given = {"dtype": "float16", "N": 1025, "H": 1, "angles": 4, "return_state": True, "encoding": "none"}
    call = make_call("linear_attention", Choices(given=given))
    parts = torch.randn(64, 16, 2000, dtype=torch.float64).sum(1)
    total = torch.zeros(2000, dtype=torch.float64)
    for part in parts:
        whole = total + part
        unit = 2.0 ** (whole.abs().log2().floor() - 23)
        total = (whole / unit).trunc() * unit
    exact = parts.sum(0)
    off, size = ((x.square().mean().sqrt()) for x in (total - exact, exact))
    assert 0.3 * judging._off_in_all(call, "state") < off / size < judging._off_in_all(call, "state")
    assert judging._off_in_all(call, "output") == 0.0
    exact_call = make_call("linear_attention", Choices(given={**given, "dtype": "float64", "decay": "token"}))
    assert judging._off_in_all(exact_call, "state") == 0.0
    decayed = make_call("linear_attention", Choices(given={**given, "decay": "token"}))
    assert judging._off_in_all(decayed, "state") > judging._off_in_all(call, "state")


def test_one_rounding_may_be_that_of_all_equal_numbers() -> None:
    given = {"N": 9, "M=N": True, "float32_precision": "medium"}
    equal = {**given, "gradient.memory": "expanded", "gradient.expand1": True, "v.grad": True}
    usual, alike = (make_call("flash_attention", Choices(given=each)) for each in (given, equal))
    assert judging._off_in_all(usual, "output") == 0.0
    assert judging._off_in_all(alike, "gradient of v") == 2.0**-9


def test_sums_in_a_row_are_as_far_off_as_is_said() -> None:
    given = {
        "dtype": "float32",
        "B": 4,
        "N": 1,
        "M": 600,
        "Hkv": 4,
        "D": 64,
        "E=D": True,
        "causal": False,
        "size": 0.01,
    }
    prepared = judging.Prepared(make_call("flash_attention", Choices(given=given)), CPU)
    exact = prepared.defined(torch.float64)[0]
    values = prepared.arrays["v"].dense
    total = torch.zeros_like(values[:, 0])
    for key in range(600):  # of equal weights, nearly
        total = total + values[:, key]
    weights = values.double().mean(1)
    off = (total.double() / 600 - weights).square().mean().sqrt()
    known = prepared.rounded_sums()
    assert known is not None
    assert known.shape == exact.shape
    assert 0.7 * off < known.square().mean().sqrt() < 1.5 * off


def test_equal_numbers_are_rounded_alike() -> None:
    x = torch.randn(1000, dtype=torch.float64)
    found = attention.signs(x)
    assert torch.equal(found, attention.signs(-x.flip(0)).flip(0))
    assert found.abs().max() <= 1
    assert abs(float(found.mean())) < 0.1
    assert abs(float((found * attention.signs(x, 1)).mean())) < 0.1
    assert 0.5 < float(found.square().mean() * 3) < 1.5


def test_float16_has_few_bits_near_zero() -> None:
    x = torch.tensor([1.0, -1e-6, 1e-9, 0.0], dtype=torch.float64)
    for factors, expected in (
        ("float16", [2.0**-11, -(2.0**-25), 1e-9, 0.0]),
        ("bfloat16", (x * 2.0**-9).tolist()),
    ):
        assert cancelling._rounding_of(x, factors).tolist() == expected


@pytest.mark.parametrize("activation", ["none", "silu"])
def test_heads_that_are_equal_have_errors_of_one_angle(activation: str) -> None:
    """The gradient of theta in float32, with a cosine that is off by a unit in the last place."""
    same = {"x.memory": "expanded", "x.expand0": True, "x.expand2": True, "x.grad": False}
    given = {**same, "dtype": "bfloat16", "H": 12, "B": 3, "angles": 16, "N": 60, "theta.grad": True}
    call = make_call("lrpe_rotate", Choices(given={**given, "theta.rows": "shared", "activation": activation}))
    prepared = judging.Prepared(call, CPU)
    known: Any = prepared.cancelling()
    exact, eager = (prepared.defined(dtype)[-1] for dtype in (torch.float64, None))
    usual = torch.nn.functional.mse_loss(eager.double(), exact).sqrt()
    size = known[[name for name, array in call.arrays.items() if array.grad].index("theta")].square().mean().sqrt()
    assert usual / 8 < size < 8 * usual


def test_rounded_rows_tell_in_gradients_where_features_are_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, lambda out, named: out)
    monkeypatch.setattr(judging, "_check_form", lambda prepared, outputs: None)
    same = {"v.memory": "expanded", "v.expand3": True, "E=D": True, "gradient.none": True}
    given = {
        **DECAYED,
        **same,
        "encoding": "rotate",
        "dtype": "float16",
        "N": 40,
        "angles": 40,
        "return_state": True,
    }
    call = make_call("linear_attention", Choices(given={**given, "theta.grad": True, "decay.grad": True}))
    prepared = judging.Prepared(call, CPU)
    off = prepared.rounded_rows()
    assert off is not None
    names = [name for name, array in call.arrays.items() if array.grad]
    sizes = {name: float(each.square().mean().sqrt()) for name, each in zip(names, off)}
    assert {name for name, size in sizes.items() if size} == {"theta", "decay"}
    run = judging.Prepared.run
    for factor, expected in ((1.0, []), (8.0, ["accuracy gradient of theta"])):

        def moved(prepared: judging.Prepared, factor: float = factor) -> tuple[list[Tensor], list[Tensor]]:
            outputs, gradients = run(prepared)
            known: Any = prepared.rounded_rows()
            return outputs, [x + (factor * each).to(x) for x, each in zip(gradients, known)]

        monkeypatch.setattr(judging.Prepared, "run", moved)
        assert [fault.kind for fault in run_calls([call], CPU, None)[1]] == expected


def test_sums_of_equal_numbers_may_lose_a_unit_in_the_last_place() -> None:
    exact = torch.tensor([16.1, 31.0, 2.5], dtype=torch.float64)
    assert judging._is_rounded_once(exact, exact.float())
    assert not judging._is_rounded_once(exact, exact.float() + 2.0**-18)


@pytest.mark.parametrize(("off", "allowed"), [(1e4, False), (4e4, True)])
@pytest.mark.parametrize(("exact", "found"), [(25.0, float("inf")), (70_000.0, 0.0), (70_000.0, float("inf"))])
def test_theta_may_overflow_where_the_definition_is_off_by_as_much(
    exact: float, found: float, off: float, allowed: bool
) -> None:
    """Its numbers in float16 end with the largest."""
    right = torch.tensor([exact, -3.0], dtype=torch.float64)
    results = (torch.tensor([found, -3.0]).half(), right, (right - torch.tensor([off, 0.0])).half())
    (accuracy,) = judging.compare_each(*((judging._within_float16(x),) for x in results))
    assert not accuracy.problem
    assert accuracy.ok is (allowed or (exact == 70_000.0 and found > 0))


def test_pytorch_is_held_to_its_own_sums_of_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A matrix library may add up a batch in another order than one entry; faults are found all the same."""
    from warploom.ops.tpa import reference

    definition, function = reference.tpa_decode, function_of("tpa_decode")

    def less_exact_of_a_batch(*factors: Tensor, **named: Any) -> Tensor:
        out = definition(*factors, **named)
        return out * (1 + 2.0**-19) if out.dtype == torch.float32 and len(out) > 1 else out

    def without_the_last_key(aq: Tensor, ak: Tensor, av: Tensor, *, bk: Tensor, bv: Tensor, **named: Any) -> Tensor:
        ak, av, bk, bv = (factor[:, :-1] for factor in (ak, av, bk, bv))
        return function(aq, ak, av, bk=bk, bv=bv, **named)  # type: ignore[no-any-return]

    monkeypatch.setattr(reference, "tpa_decode", less_exact_of_a_batch)
    sizes = {"B": 4, "M": 65, "D": 40, "dtype": "float32", "backend": "torch", "positional": 3}
    call = make_call("tpa_decode", Choices(given=sizes))
    judging.judge(judging.Prepared(call, CPU))
    for faulty in (lambda *given, **named: 1.004 * function(*given, **named), without_the_last_key):
        monkeypatch.setattr(judging, "function_of", lambda operator, faulty=faulty: faulty)
        with pytest.raises(judging.Failure, match="accuracy output"):
            judging.judge(judging.Prepared(call, CPU))
    monkeypatch.setattr(judging, "function_of", function_of)
    monkeypatch.setattr(judging.Prepared, "in_torch", False)  # kernels are held to the sums of one entry
    with pytest.raises(judging.Failure, match="accuracy output"):
        judging.judge(judging.Prepared(call, CPU))


# ----------------------------------------------------------------------------------------------------------
# What is printed
# ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("operator", RUNNABLE)
def test_the_python_of_a_call_runs_and_is_the_call(
    operator: str, device: torch.device, capsys: pytest.CaptureFixture[str]
) -> None:
    for index in range(4):
        call = make_call(operator, Choices(f"{operator} {index}", small=True))
        names: dict[str, Any] = {}
        precision = torch.get_float32_matmul_precision()
        try:
            exec(python_of([call], device.type, BACKEND), names)
        finally:
            torch.set_float32_matmul_precision(precision)
        assert "largest error" in capsys.readouterr().out
        for name, array in call.arrays.items():
            placed = arrays.place(array, name, call.seed, device)
            assert torch.equal(names[name].nan_to_num(7.0), placed.tensor.nan_to_num(7.0))
            assert names[name].stride() == placed.tensor.stride()
            assert names[name].data_ptr() % 16 == placed.tensor.data_ptr() % 16


def test_what_fails_prints_a_line_that_repeats_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plant(monkeypatch, lambda out, named: out * 1.5)
    words = "lrpe_rotate lrpe-cosine --seconds 1 --seed 4 --device cpu"
    assert random_calls.main(words.split()) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("seed 4: lrpe_rotate, lrpe_cosine on cpu")
    repeats = [line for line in lines if "random_calls.py" in line]
    assert repeats
    for line in (repeats[0], repeats[-1], next(line for line in repeats if "[" in line)):
        *_, command = line.partition("random_calls.py ")
        assert random_calls.main(shlex.split(command)) == 1
        assert "FAILED" in capsys.readouterr().out
    plant(monkeypatch, lambda out, named: out)
    assert random_calls.main(shlex.split(command)) == 0


@pytest.mark.parametrize("backend", ["--backend torch", "--backend auto", ""])
def test_a_search_that_finds_nothing_ends_well(
    backend: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU, of which no kernel is asked."""
    if not backend:
        monkeypatch.setattr(command, "can_run_kernels", lambda device: False)
    words = f"lrpe_cosine --seconds 0.5 --seed 4 {backend} --device cpu"
    assert random_calls.main(words.split()) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0] == "seed 4: lrpe_cosine on cpu, in PyTorch: no kernel runs"
    assert "lrpe_cosine" in out[1]
    assert out[-1].startswith("seed 4, ")
    assert out[-1].endswith(", 0 failed")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("nothing", "no operator 'nothing' with random calls"),
        ("--repeat 3", "expected SEED:INDEX"),
        ("--repeat 3:x", "expected SEED:INDEX"),
        ("--repeat [3]", "no calls of an operator"),
    ],
)
def test_mistakes_are_status_2(words: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert random_calls.main(words.split()) == 2
    assert message in capsys.readouterr().err


@pytest.mark.seldom(3)
@pytest.mark.skipif(not HAS_TRITON, reason="needs Triton")
def test_kernels_of_random_calls_are_compiled() -> None:
    tool = Path(__file__).parents[1] / "tools" / "random_builds.py"
    environment = {**os.environ, "TRITON_INTERPRET": "0"}

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, tool, *words]
        return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)

    done = run("lrpe-cosine", "--seconds", "1", "--seed", "1")
    found = re.fullmatch(r"seed 1: (\d+) variants of \d+ families for sm_90, 0 failed", done.stdout.strip())
    assert found is not None, done.stdout + done.stderr
    assert int(found[1]) > 0
    assert done.returncode == 0
    assert run("flash").returncode == 2


def test_several_processes(capsys: pytest.CaptureFixture[str]) -> None:
    plan = Plan(Source(1, ("lrpe_rotate", "tpa_decode"), small=True), "cpu", "torch", seconds=1.0, workers=2)
    seen: list[int] = []
    outcome = search(plan, lambda outcome: seen.append(len(outcome.tallies)))
    assert outcome.tallies.keys() <= {"lrpe_rotate", "tpa_decode"}
    assert sum(tally.cases for tally in outcome.tallies.values()) >= 2
    assert seen


@pytest.mark.skipif(ON_GPU, reason="needs a device that is not there")
def test_a_fault_of_the_checker_costs_its_family_alone() -> None:
    plan = Plan(Source(1, ("lrpe_rotate",)), "cuda", seconds=1.0, workers=1)
    results = list(searching._in_processes(plan))
    assert results
    for index, (operator, tally, faults) in enumerate(results):
        assert (operator, tally.calls) == ("lrpe_rotate", 0)
        assert [(fault.kind, fault.index) for fault in faults] == [("checker", index)]
        assert "(" in faults[0].detail  # where


def test_definitions_fit_in_memory() -> None:
    """Where there are as many keys as queries too: a matrix of their products has 256 MB in float64."""
    seen = set()
    for operator in ("flash_attention", "tpa_attention"):
        for index in range(600):
            call = make_call(operator, Choices(f"{operator}:{index}"))
            batch, queries, heads, _ = call.outputs[0]
            keys = call.arrays["k" if "k" in call.arrays else "ak"].shape[1]
            if queries == keys > 1:
                assert batch * heads * queries * keys <= 2**25
                seen.add(operator)
    assert len(seen) == 2


@pytest.mark.parametrize("lacking", [1, 100])
def test_a_family_without_memory_is_run_again(lacking: int, monkeypatch: pytest.MonkeyPatch) -> None:
    source = Source(1, ("lrpe_rotate",), small=True)
    lack = Fault(tuple(source.family(0)), "RuntimeError Triton Error", "Triton Error [CUDA]: out of memory")
    runs: list[int] = []

    def run_family(source: Source, index: int, *rest: object) -> tuple[families.Tally, list[Fault]]:
        runs.append(index)
        return families.Tally(3, 1), [lack] * (len(runs) <= lacking)

    monkeypatch.setattr(searching, "run_family", run_family)
    monkeypatch.setattr(searching.time, "sleep", lambda seconds: None)
    tally, faults = searching._with_room(Plan(source, "cpu", "torch"), 7, CPU)
    assert (tally.calls, len(faults)) == (3, int(lacking > 1))  # what never has room is told
    assert runs == [7] * min(lacking + 1, len(searching.PAUSES))


def test_a_process_that_dies_costs_its_family_alone() -> None:
    plan = Plan(Source(1, ("lrpe_rotate",), small=True), "cpu", "torch", seconds=60.0, workers=1)
    for _ in range(5):  # it may be ended between two families
        worker = searching._Worker(plan, 0, end=0.0)
        while worker.running is None and worker.alive:
            list(worker.results())
        worker.process.kill()
        faults = []
        while worker.alive:
            faults += [fault for _, _, faults in worker.results() for fault in faults]
        if faults:
            break
    assert [fault.kind for fault in faults] == ["process"]
    assert "died (exit code -9)" in faults[0].detail
    assert shrink(faults[0], CPU, None, 1.0).calls == faults[0].calls[-1:]  # not run again here


@pytest.mark.gpu
def test_large_results_are_compared_where_they_are(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    call = make_call(
        "tpa_decode", Choices(given={"B": 3, "M": 7, "D": 8, "dtype": "bfloat16", "backend": "triton"})
    )
    for large in (0, 3 * 8 * 3, 10**9):
        monkeypatch.setattr(judging, "LARGE", large)
        tally, faults = run_calls([call], device, None)
        assert (tally.cases, faults) == (1, [])
