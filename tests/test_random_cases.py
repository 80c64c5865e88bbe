"""Random calls of every public function, a new seed each day; and what draws, judges and simplifies them.

``--seed`` sets another, ``WARPLOOM_RANDOM_SECONDS`` for how long calls are run, all operators together: 20 seconds
on a CPU by default, a minute with ``--all`` or on a GPU.
"""

from __future__ import annotations

import functools
import inspect
import os
import re
import shlex
import subprocess
import sys
import time
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
    families,
    function_of,
    judging,
    parse,
    reference_of,
    run_calls,
    search,
    searching,
    shrink,
    shrinking,
    text_of,
)
from random_cases.arrays import KINDS, Array, Memory
from random_cases.calls import make_call
from random_cases.choices import Choices
from random_cases.families import FAMILIES

from warploom.errors import ArgumentError
from warploom.ops.tpa import reference as tpa
from warploom.runtime.backend import HAS_TRITON

Tensor = torch.Tensor
CPU = torch.device("cpu")
SEED = seeds.seed() or seeds.day()
SECONDS = os.environ.get("WARPLOOM_RANDOM_SECONDS")
RUNNABLE = OPERATORS if HAS_TRITON else tuple(name for name in OPERATORS if name != "rotary_attention")
BACKEND = None if HAS_TRITON else "auto"


@pytest.mark.parametrize("operator", RUNNABLE)
def test_random_calls_are_right(operator: str, request: pytest.FixtureRequest) -> None:
    usual = 60 if ON_GPU or request.config.getoption("--all") else 12
    source = Source(SEED, (operator,), small=not ON_GPU)
    plan = Plan(source, "cuda" if ON_GPU else "cpu", BACKEND, float(SECONDS or usual) / len(RUNNABLE))
    outcome = search(plan)
    print(f"seed {SEED}: {outcome.describe()}")
    faults = outcome.unknown(plan.device)
    assert not faults, random_calls.report_of(faults[0], plan, seconds=20.0)
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
    required |= {"beta", "weight"}
    given = Counter(name for call in calls[operator] for name in (*call.arrays, *call.options))
    always = {name for name, count in given.items() if count == len(calls[operator])}
    assert always <= required | ({"scale"} if operator == "rotary_attention" else set())


@pytest.mark.parametrize("operator", OPERATORS)
def test_every_kind_of_memory_is_drawn_for_every_tensor(operator: str, calls: dict[str, list[Call]]) -> None:
    given = [(name, call, x) for call in calls[operator] for name, x in call.arrays.items() if not x.within]
    for name in {name for name, _, array in given if array.is_floating}:
        assert {call.answers[f"{name}.memory"] for other, call, _ in given if other == name} == set(KINDS), name
    arguments = [array.memory for _, _, array in given]
    incoming = [array.memory for call in calls[operator] for array in call.gradients if array is not None]
    assert bool(incoming) == (operator != "tpa_decode")  # has no gradient
    for memories in (arguments, incoming or arguments):
        assert any(memory.negated for memory in memories)
        assert any(0 in memory.strides for memory in memories)
        assert any(memory.offset % 2 for memory in memories)


@pytest.mark.parametrize("operator", OPERATORS)
def test_sizes_dtypes_and_gradients_vary(operator: str, calls: dict[str, list[Call]]) -> None:
    some = calls[operator]
    assert {"float16", "bfloat16", "float32"} <= {call.dtype for call in some}
    sizes = {size for call in some for array in call.arrays.values() for size in array.shape}
    assert {0, 1, 7, 15, 16, 17, 31, 32, 33, 63, 64, 65} <= sizes
    assert max(sizes) > 250
    assert len({tuple(call.wanted) for call in some}) > 3
    assert {call.recorded for call in some} == {True, False}
    assert {call.forward_mode for call in some} == ({False} if operator == "tpa_decode" else {True, False})


def test_most_calls_are_well_conditioned(calls: dict[str, list[Call]]) -> None:
    """Their logits are of size one; few calls have expanded numbers, and fewer are degenerate."""
    kinds = Counter(call.numbers for some in calls.values() for call in some)
    total = sum(kinds.values())
    assert 0.8 < kinds["usual"] / total < 0.9
    assert 0.03 < kinds["degenerate"] / total < 0.07
    for some in calls.values():
        assert not any(call.has_equal_numbers for call in some if call.numbers == "usual")
        assert any(call.has_equal_numbers for call in some)
        scales = {array.scale for call in some if call.numbers == "degenerate" for array in call.arrays.values()}
        assert {1e-30, 1e4} <= {float(f"{scale:.0e}") for scale in scales}
    for call in calls["flash_attention"]:
        if call.numbers != "degenerate":
            q, k = (call.arrays[name] for name in "qk")
            scale = abs(call.options.get("scale", q.shape[-1] ** -0.5))
            assert scale * q.scale * k.scale * q.shape[-1] ** 0.5 < 1.1


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


def test_workers_share_the_families() -> None:
    plan = Plan(Source(0), "cpu", workers=6)
    found = [index for worker in range(6) for index, _ in zip(plan.indices(worker), range(FAMILIES))]
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
        def run(*given: Any, **named: Any) -> Any:
            named = {name: v for name, v in named.items() if name not in ("backend", "strategy", "bits", "out")}
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
        _, faults = run_calls(source.family(index), CPU, None)
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
    sizes = {
        "tpa_decode": {"M": 7, "D": 8},
        "linear_attention": {"N": 7, "angles": 8, "decay": "token"},
        "delta_attention": {"N": 7, "D": 8, "decay": "feature"},
        "short_convolution": {"N": 7, "C": 8, "bias": True},
    }[operator]
    call = make_call(operator, Choices(given={"B": 3, "backend": backend, **sizes}))
    assert call.options["backend"] == backend
    _, faults = run_calls([call], CPU, None)
    assert [fault.kind for fault in faults] == ([] if expected is None else [expected])


@pytest.mark.skipif(not HAS_TRITON or ON_GPU, reason="kernels are interpreted on a CPU")
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
    calls = [make_call("lrpe_rotate", Choices(given={"dtype": d, "N": 5})) for d in ("float32", "float16")]
    _, faults = run_calls(calls, CPU, None)
    assert faults
    monkeypatch.setattr(shrinking, "forget_plans", dtypes.clear)
    simple = shrink(faults[0], CPU, None, seconds=5.0)
    assert [call.dtype for call in simple.calls] == ["float32", "float16"]


def test_shrinking_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, lambda out, named: out + 1)
    fault = found()
    assert fault is not None
    simple = shrink(fault, CPU, None, seconds=60.0)
    assert simple.calls[0].record == {}  # everything fails, so that the simplest call is left


LARGER: dict[str, Any] = {"Hkv": 2, "D": 32, "E=D": True, "N": 40, "M=N": True, "backend": "triton", "B": 2}


def faults_of(call: Call) -> list[str]:
    return [fault.kind for fault in run_calls([call], CPU, None, rounds=1)[1]]


def replace_run(monkeypatch: pytest.MonkeyPatch, change: Callable[[list[Tensor], list[Tensor]], None]) -> None:
    """Let every call be its definition, its outputs and gradients changed in place."""

    def run(prepared: judging.Prepared) -> tuple[list[Tensor], list[Tensor]]:
        results = [result.detach() for result in prepared.define(None)]
        count = len(prepared.call.outputs)
        outputs, gradients = results[:count], results[count:]
        change(outputs, gradients)
        return outputs, gradients

    monkeypatch.setattr(judging.Prepared, "run", run)
    monkeypatch.setattr(judging, "_check_form", lambda call, outputs: None)


@pytest.mark.parametrize(("dtype", "off"), [("float32", 2**-16), ("float16", 2**-7), ("bfloat16", 2**-5)])
@pytest.mark.parametrize("place", ["output", "gradient of q", "gradient of k", "gradient of v"])
def test_a_lack_of_bits_is_found(dtype: str, off: float, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In any result, and no more than a few budgets of it."""
    grads = dict.fromkeys(("q.grad", "k.grad", "v.grad"), True)
    call = make_call("flash_attention", Choices(given={**LARGER, **grads, "dtype": dtype}))
    index = [call.name_of(index) for index in range(4)].index(place)

    def change(outputs: list[Tensor], gradients: list[Tensor]) -> None:
        result = [*outputs, *gradients][index]
        result += off * result.std() * torch.randn_like(result)

    replace_run(monkeypatch, lambda outputs, gradients: None)
    assert faults_of(call) == []
    replace_run(monkeypatch, change)
    assert faults_of(call) == [f"accuracy {place}"]


def test_a_state_without_part_of_a_token_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"H": 2, "angles": 4, "decay": "token", "return_state": True, "dtype": "bfloat16", "N": 100}
    call = make_call("linear_attention", Choices(given={**given, "encoding": "none", "backend": "triton"}))
    key, value = (judging.Prepared(call, CPU).arrays[name].dense[:, -1].float() for name in "kv")

    def change(outputs: list[Tensor], gradients: list[Tensor]) -> None:
        outputs[1] -= torch.einsum("bhf,bhe->bhfe", key, value) / 16

    replace_run(monkeypatch, change)
    monkeypatch.setattr(judging, "STAGES", {"cpu": ((2, 1.0),)})  # other draws have other tokens
    assert faults_of(call) == ["accuracy state"]


def test_equal_numbers_are_judged_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them may have the error of one, which is any draw's; wrong strides are off by more."""
    sizes = LARGER | {"B": 4, "N": 64, "Hkv": 8, "D": 64, "dtype": "bfloat16"}
    equal = sizes | {"numbers": "equal", "v.memory": "expanded", "v.expand0": True}
    for given, off, expected in ((sizes, 0.1, 1), (equal, 0.1, 0), (equal, 2.0, 1)):
        call = make_call("flash_attention", Choices(given=given))
        assert call.has_equal_numbers == (given is equal)

        def change(outputs: list[Tensor], gradients: list[Tensor], off: float = off) -> None:
            outputs[0][0, -4:] += off * outputs[0].std()

        replace_run(monkeypatch, change)
        assert len(faults_of(call)) == expected, (given, off)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64"])
def test_a_gradient_of_which_nothing_is_left_has_the_rounding_of_its_terms(
    dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A query of a single key has no gradient, and eager arithmetic gives no other."""
    call = make_call("flash_attention", Choices(given={"dtype": dtype, "N": 9, "D": 8, "q.grad": True}))
    unit = judging.FACTORS.get("highest" if dtype == "float32" else dtype, 2.0**-9)
    for units, expected in ((8, []), (200, ["accuracy gradient of q"])):

        def change(outputs: list[Tensor], gradients: list[Tensor], units: int = units) -> None:
            assert not gradients[0].any()
            gradients[0] += units * unit

        replace_run(monkeypatch, change)
        assert faults_of(call) == expected


DEGENERATE = {"numbers": "degenerate", "B": 2, "N": 5, "H": 3, "angles": 4, "x.grad": True, "x.size": 30.0}


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda out: out, []),
        (lambda out: 2 * out, []),
        (lambda out: out.masked_fill(torch.arange(out.shape[-1]) == 2, torch.nan), ["NaN output"]),
        (lambda out: out.masked_fill(torch.arange(out.shape[-1]) == 2, torch.inf), ["infinity output"]),
        (lambda out: out.double(), ["dtype output"]),
        (lambda out: out[:, 1:], ["shape"]),
        (lambda out: out.detach(), ["requires_grad output"]),
        (lambda out: out @ out, ["RuntimeError Expected size for first two"]),
    ],
)
def test_a_degenerate_call_must_be_finite(
    change: Callable[[Tensor], Tensor], expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its errors are not judged; its form and memory are."""
    plant(monkeypatch, lambda out, named: change(out))
    call = make_call("lrpe_cosine", Choices(given=DEGENERATE))
    assert call.arrays["x"].scale == 30.0
    assert faults_of(call) == expected


def test_a_degenerate_call_is_asked_for_no_more_than_its_definition_has() -> None:
    call = make_call("lrpe_cosine", Choices(given=DEGENERATE))
    exact = torch.tensor([1.0, 1e6, float("nan"), 2.0], dtype=torch.float64)
    eager = torch.tensor([1.0, 1.0, 1.0, float("inf")]).half()
    for found, ok in (([2.0, float("inf"), 0.0, float("nan")], True), ([float("nan"), 1.0, 1.0, 1.0], False)):
        assert judging._compare_one(call, False, torch.tensor(found).half(), exact, eager).ok == ok


def test_a_result_that_is_unlucky_is_drawn_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """One number has an error that is small beside that of most draws; the budget of a draw may be smaller."""
    generator = torch.Generator().manual_seed(0)

    def noisy(out: Tensor, named: dict[str, Any]) -> Tensor:
        noise = torch.randn(out.shape, generator=generator, dtype=torch.float64) * 2.0**-9
        return out if out.dtype == torch.float32 else out + (out.double().abs() * noise).detach().to(out.dtype)

    plant(monkeypatch, noisy)
    given = {"angles": 1, "activation": "sigmoid", "offset": 5, "dtype": "bfloat16"}
    call = make_call("lrpe_rotate", Choices(given=given))
    tally = families.Tally()
    for seed in range(60):
        one, faults = run_calls([replace(call, seed=seed)], CPU, None, rounds=1)
        tally.add(one)
        assert not faults, faults[0].detail
    assert tally.redrawn > 0


@pytest.mark.parametrize(("off", "ok"), [(1e4, False), (4e4, True)])
@pytest.mark.parametrize("found", [float("inf"), 65504.0])
def test_a_gradient_may_overflow_where_the_definition_is_off_by_as_much(found: float, off: float, ok: bool) -> None:
    """Its numbers in float16 end with the largest."""
    call = make_call("lrpe_rotate", Choices(given={"dtype": "float16"}))
    right = torch.tensor([25.0, -3.0], dtype=torch.float64)
    eager = (right - torch.tensor([off, 0.0])).half()
    assert judging._compare_one(call, True, torch.tensor([found, -3.0]).half(), right, eager).ok is ok


def test_pytorch_is_held_to_its_own_sums_of_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A matrix library may add up a batch in another order than one entry; faults are found all the same."""
    definition, function = tpa.tpa_decode, function_of("tpa_decode")

    def less_exact_of_a_batch(*factors: Tensor, **named: Any) -> Tensor:
        out = definition(*factors, **named)
        return out * (1 + 2.0**-19) if out.dtype == torch.float32 and len(out) > 1 else out

    monkeypatch.setattr(tpa, "tpa_decode", less_exact_of_a_batch)
    sizes = {"B": 4, "M": 65, "D": 40, "dtype": "float32", "backend": "torch", "positional": 3}
    call = make_call("tpa_decode", Choices(given=sizes))
    assert faults_of(call) == []
    with monkeypatch.context() as patched:
        faulty = lambda *given, **named: 1.004 * function(*given, **named)  # noqa: E731
        patched.setattr(judging, "function_of", lambda operator: faulty)
        assert faults_of(call) == ["accuracy output"]
    monkeypatch.setattr(judging.Prepared, "in_torch", False)  # kernels are held to the sums of one entry
    assert faults_of(call) == ["accuracy output"]


# ----------------------------------------------------------------------------------------------------------
# What is printed
# ----------------------------------------------------------------------------------------------------------


@pytest.mark.seldom(3, 5)
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
    for line in (repeats[0], repeats[-1]):
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
        monkeypatch.setattr(random_calls, "can_run_kernels", lambda device: False)
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
        ("--repeat 3", "no calls of an operator"),
        ("--repeat [3]", "no calls of an operator"),
    ],
)
def test_mistakes_are_status_2(words: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert random_calls.main(words.split()) == 2
    assert message in capsys.readouterr().err


@pytest.mark.seldom(4, 11)
@pytest.mark.skipif(not HAS_TRITON, reason="needs Triton")
def test_kernels_of_random_calls_are_compiled() -> None:
    tool = Path(__file__).parents[1] / "tools" / "random_calls.py"
    environment = {**os.environ, "TRITON_INTERPRET": "0"}

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, tool, "--compile", "90", *words]
        return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)

    done = run("lrpe-cosine", "--seconds", "1", "--seed", "1")
    found = re.fullmatch(r"seed 1: (\d+) variants of \d+ families for sm_90, 0 failed", done.stdout.strip())
    assert found is not None, done.stdout + done.stderr
    assert int(found[1]) > 0
    assert done.returncode == 0
    assert run("flash").returncode == 2
    assert "--compile 33: expected one of 80" in run("--compile", "33").stderr


@pytest.mark.seldom(4, 6)
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
    for _, tally, faults in results:
        assert tally.calls == 0
        assert [fault.kind for fault in faults] == ["checker"]
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

    def run_calls(calls: Sequence[Call], *rest: object) -> tuple[families.Tally, list[Fault]]:
        assert calls == source.family(7)
        runs.append(7)
        return families.Tally(3, 1), [lack] * (len(runs) <= lacking)

    monkeypatch.setattr(searching, "run_calls", run_calls)
    monkeypatch.setattr(searching.time, "sleep", lambda seconds: None)
    tally, faults = searching._run_with_memory(Plan(source, "cpu", "torch"), 7)
    assert (tally.calls, len(faults)) == (3, int(lacking > 1))  # what never has room is told
    assert runs == [7] * min(lacking + 1, len(searching.PAUSES))


@pytest.mark.parametrize("longest", [400.0, 0.0])
def test_a_process_that_dies_or_hangs_costs_its_family_alone(
    longest: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = Plan(Source(1, ("lrpe_rotate",), small=True), "cpu", "torch", seconds=0.0, workers=2)
    monkeypatch.setattr(searching, "LONGEST", longest)
    fate = functools.partial(os._exit, 1) if longest else functools.partial(time.sleep, 60)
    monkeypatch.setattr(searching, "_prepare_process", fate)
    results = list(searching._in_processes(plan))
    assert sorted(index for index, _, _ in results) == [0, FAMILIES]
    for index, tally, (fault,) in results:
        assert (tally.calls, fault.kind) == (0, "process")
        assert list(fault.calls) == plan.source.family(index)
        assert ("died" if longest else "was stopped after 0 s") in fault.detail
        assert shrink(fault, CPU, None, 1.0).calls == fault.calls[-1:]  # not run again here


@pytest.mark.gpu
def test_large_results_are_compared_where_they_are(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    call = make_call(
        "tpa_decode", Choices(given={"B": 3, "M": 7, "D": 8, "dtype": "bfloat16", "backend": "triton"})
    )
    for large in (0, 3 * 8 * 3, 10**9):
        monkeypatch.setattr(judging, "LARGE", large)
        tally, faults = run_calls([call], device, None)
        assert (tally.cases, faults) == (1, [])
