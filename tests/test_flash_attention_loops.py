"""How flash attention's kernels loop: in splits, in tiles, in small problems, and what is launched."""

import math
import os
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from flash_cases import assert_right, kernels, random_inputs, run
from launches import MERGING, ON_GPU, constants_of
from planned_calls import forget_plans, no_plans

from warploom import flash_attention
from warploom.ops.flash_attention.bench import OPERATOR
from warploom.testing.conformance import make_draws, make_more_draws
from warploom.testing.poison import poison_allocations

pytestmark = kernels


# ----------------------------------------------------------------------------------------------------------
# Splits
# ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def many_splits(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """KV loops cut into as many splits as there are steps."""
    from warploom.ops.flash_attention.triton import launch as launchers

    with monkeypatch.context() as patch, no_plans():
        patch.setattr(launchers, "best_splits", lambda steps, *rest: max(steps))
        yield


SPLIT_CASES: tuple[dict[str, Any], ...] = (
    {"causal": True},
    {"window": (30, 5)},
    {"causal": True, "heads": 4, "key_heads": 2, "n": 70},
    {"n": 1, "m": 300},
    {"n": 3, "causal": True, "dtype": torch.float32},
    {"sink": torch.tensor([2.0]), "softcap": 3.0, "causal": True},
    {"n": 70, "batch": 2, "seqused_k": torch.tensor([190, 75]), "causal": True},
)


@pytest.mark.usefixtures("many_splits")
@pytest.mark.parametrize("case", SPLIT_CASES, ids=str)
def test_a_split_is_right_and_gives_the_same_bits_twice(case: dict[str, Any], device: torch.device) -> None:
    inputs = random_inputs(device, **{"n": 150, "m": 190, "batch": 1, "heads": 1, "dtype": torch.bfloat16, **case})
    inputs |= {name: inputs[name].to(device) for name in ("sink", "seqused_k") if name in inputs}
    assert_right({**inputs, "return_lse": True}, "triton")
    first = run(inputs, "triton")
    with poison_allocations():
        assert all(torch.equal(a, b) for a, b in zip(first, run(inputs, "triton")))


@pytest.mark.usefixtures("many_splits")
def test_parts_of_results_whose_features_are_not_adjacent(device: torch.device) -> None:
    inputs = random_inputs(device, 70, d=24, e=5, batch=1, causal=True, return_lse=True)
    for name in ("q", "k", "v"):
        inputs[name] = inputs[name].detach().transpose(1, 3).contiguous().transpose(1, 3).requires_grad_()
    assert_right(inputs, "triton")


def test_packed_sequences_split(many_splits: None, device: torch.device) -> None:
    bounds = torch.tensor([0, 100, 100, 130, 200], device=device)
    inputs = random_inputs(device, 200, batch=1, heads=1, causal=True, cu_seqlens_q=bounds, dtype=torch.bfloat16)
    assert_right({**inputs, "return_lse": True}, "triton")


ALLOCATIONS_AND_LAUNCHES = """
import torch
from warploom import flash_attention, tpa_attention
from warploom.runtime.launch import Buffer, Launch, record_builds

def watch(owner, name, what):
    usual = getattr(owner, name)

    def call(self, *given):
        print(what(self))
        return usual(self, *given)

    setattr(owner, name, call)

watch(Buffer, "empty", lambda dense: "memory")
watch(Launch, "__call__", lambda launch: launch.kernel.__name__ if "launch_pdl" in launch.options else "launch")

def tensor(*shape, dtype=torch.bfloat16):
    return torch.zeros(shape, dtype=dtype, requires_grad=True)

def differentiate(function, *inputs, **options):
    out = function(*inputs, causal=True, backend="triton", **options)
    torch.autograd.grad(out, inputs, torch.zeros_like(out))

bounds = torch.tensor([0, 2048, 4096], dtype=torch.int32)
with record_builds(90, 132):
    a, b = tensor(1, 257, 3, 8), tensor(1, 257, 8, 127)
    differentiate(tpa_attention, a, a, a, b, b, b, scale=0.0)
    x = tensor(1, 4096, 1, 128)
    differentiate(flash_attention, x, x, x)
    differentiate(flash_attention, x, x, x, cu_seqlens_q=bounds, cu_seqlens_k=bounds)
    x = tensor(1, 4096, 1, 128, dtype=torch.float32)
    differentiate(flash_attention, x, x, x)
"""
NOT_WAITING = {"query_kernel", "hopper_query_kernel", "hopper_shared_query_kernel", "terms_kernel"}
"""Kernels that write before the launch before theirs has ended, where they are launched early."""


@pytest.mark.seldom(3, 4)
def test_no_allocation_is_before_a_launch_that_does_not_wait() -> None:
    # With deterministic algorithms PyTorch fills memory where it is allocated: parts of results became NaN again.
    command = [sys.executable, "-c", ALLOCATIONS_AND_LAUNCHES]
    environment = {**os.environ, "TRITON_INTERPRET": "0"}  # builds need compiled kernels
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    pairs = [(before, kernel) for before, kernel in pairwise(done.stdout.split()) if kernel in NOT_WAITING]
    assert {kernel for _, kernel in pairs} == NOT_WAITING
    assert [kernel for before, kernel in pairs if before == "memory"] == []


# ----------------------------------------------------------------------------------------------------------
# Tiles
# ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def long_loops(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short sequences take the loops and kernels of long ones."""
    from warploom.ops.flash_attention.triton import launch as launchers
    from warploom.ops.flash_attention.triton import launch_small as launchers_small

    monkeypatch.setattr(launchers_small, "suits_backward", lambda *arguments: False)
    monkeypatch.setattr(launchers, "is_small_for", lambda *arguments: False)
    monkeypatch.setattr(launchers, "SHORT", 0)
    forget_plans()  # none but those of this test


@pytest.mark.usefixtures("long_loops")
@pytest.mark.parametrize("case", [case for case in OPERATOR.check_cases if case["n"] > 3], ids=str)
def test_kernels_of_long_loops_on_small_problems(case: Any, device: torch.device) -> None:
    """Cases are small, and such calls have kernels or loops of their own: here they get those of large ones."""
    draws = make_draws(OPERATOR, case, device)
    assert_right(draws, "triton", lambda: make_more_draws(OPERATOR, case, device, draws))


def test_which_problems_are_small() -> None:
    from warploom.ops.flash_attention.triton import launch as launchers
    from warploom.ops.flash_attention.triton import launch_small as launchers_small

    def few(n: int, heads: int = 1, d: int = 64, dtype: torch.dtype = torch.bfloat16, **mask: Any) -> list[bool]:
        x = torch.empty(1, n, heads, d, dtype=dtype)
        call = launchers.Call.of(x, x, x, launchers.MaskSpec(**mask), 0.1)
        tiles = [launchers.is_small_for(kernel, call) for kernel in ("forward", "key", "query")]
        return [launchers_small.suits_backward(*call[:3], x, x), *tiles]

    kernel, tiles = [True, True, False, False], [False, True, True, True]
    assert few(128) == few(1024, right=0) == few(1000) == few(128, heads=16) == kernel
    assert few(128, d=128) == few(1024, d=128, right=0) == tiles
    assert few(8192) == few(4096, d=128) == [False, True, False, False]
    for other in (
        few(8200),
        few(128, heads=80),
        few(128, d=256),
        few(128, d=72),
        few(4100, d=128),
        few(128, left=3),
    ):
        assert not any(other)
    assert few(1024, dtype=torch.float32) == few(4096, dtype=torch.float32) == [False, False, True, True]
    assert not any(few(1024, d=128, dtype=torch.float32) + few(4100, dtype=torch.float32))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("n", "m", "heads", "key_heads", "d"),
    [(300, 300, 1, 1, 64), (70, 290, 2, 1, 32), (290, 70, 2, 1, 16), (17, 19, 3, 3, 128), (33, 40, 4, 2, 128)],
)
@pytest.mark.parametrize("parts", [1, 3])
def test_small_problems(
    n: int,
    m: int,
    heads: int,
    key_heads: int,
    d: int,
    parts: int,
    causal: bool,
    launches: list[Any],
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from warploom.ops.flash_attention.triton import launch as launchers

    monkeypatch.setattr(launchers, "best_splits", lambda *arguments: parts)  # more than some loops have steps
    forget_plans()  # none but those of this test
    options = {"heads": heads, "key_heads": key_heads, "d": d, "causal": causal, "batch": 1, "return_lse": True}
    with poison_allocations():
        assert_right(random_inputs(device, n, m, dtype=torch.bfloat16, **options), "triton")
    merge = ["combine_kernel"] if parts > 1 else []
    backward = ["backward_small_kernel"] if d <= 64 else ["key_kernel", "query_kernel"]
    assert {name for name, _ in launches} == {"forward_kernel", *merge, "prepare_kernel", *backward}


@pytest.mark.parametrize(
    ("case", "precision", "product"),
    [
        ({"n": 19, "m": 37, "heads": 4, "key_heads": 2, "causal": True}, "highest", "3-term"),
        ({"n": 40, "d": 32, "return_lse": True}, "highest", "3-term"),
        ({"n": 33, "m": 20, "d": 64, "heads": 1, "causal": True}, "highest", "3-term"),
        ({"n": 17, "d": 128, "batch": 1, "causal": True}, "highest", "3-term"),
        ({"n": 19, "m": 37, "d": 64, "heads": 4, "key_heads": 2, "causal": True}, "high", "2-term"),
        ({"n": 17, "d": 128, "batch": 1}, "high", "2-term"),
    ],
    ids=str,
)
@pytest.mark.parametrize("parts", [1, 2])
def test_float32_factors_in_terms_before_the_loop(
    case: dict[str, Any],
    precision: str,
    product: str,
    parts: int,
    launches: list[Any],
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Long float32 tensors are split in terms once; here short ones are, on the kernels for every GPU."""
    from warploom.ops.flash_attention.hopper import launch as launchers_hopper
    from warploom.ops.flash_attention.triton import launch as launchers

    any_length = dict.fromkeys(("forward", "backward"), dict.fromkeys((16, 32, 64, 128), 1))
    monkeypatch.setattr(launchers, "LONG", {"3-term": any_length, "2-term": any_length})
    monkeypatch.setattr(launchers_hopper, "terms_obstacle", lambda *arguments: "those in Triton are tested")
    monkeypatch.setattr(launchers, "best_splits", lambda *arguments: parts)
    forget_plans()  # none but those of this test
    with poison_allocations():
        assert_right({**random_inputs(device, **case), "float32_precision": precision}, "triton")
    assert {constants["PRECISION"] for _, constants in launches if "PRECISION" in constants} == {product}
    names = [name for name, _ in launches]
    merged = ["sum_kernel"] if parts > 1 else []
    backward = ["prepare_kernel", "terms_kernel", "key_kernel", "query_kernel", *merged]
    assert names == ["terms_kernel", "forward_kernel", *["combine_kernel"] * len(merged), *backward]


@pytest.mark.usefixtures("long_loops")
@pytest.mark.parametrize("heads", [{"heads": 3}, {"heads": 6, "key_heads": 3}], ids=str)
def test_the_last_section_of_heads_is_narrower(
    heads: dict[str, int], device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Heads are taken in sections that fit in the L2 cache: here those of two key heads, and there are three."""
    from warploom.ops.flash_attention import problem

    n, d = 140, 16
    monkeypatch.setattr(problem, "L2_SHARE", 2 * (n * 2 * d * torch.bfloat16.itemsize))
    inputs = random_inputs(device, n, d=d, batch=1, dtype=torch.bfloat16, return_lse=True, **heads)
    with poison_allocations():
        assert_right(inputs, "triton")


@pytest.mark.usefixtures("long_loops")
@pytest.mark.parametrize("bound", range(131) if ON_GPU else (1, 30, 31, 32, 33))
def test_a_window_may_begin_and_end_anywhere_in_a_tile(bound: int, device: torch.device) -> None:
    """Loops are cut where the mask begins and ends, in whole tiles: of 32 rows in float32, and of 64 at most."""
    inputs = random_inputs(device, 200 if ON_GPU else 96, batch=1, heads=1, window=(bound, bound))
    if bound == 0:  # of one key dQ and dK are differences of equals, which eager arithmetic has to the last bit
        out = flash_attention(**inputs, backend="triton")
        grad = torch.randn_like(out)
        dq, dk, dv = torch.autograd.grad(out, [inputs[name] for name in "qkv"], grad)
        assert max(dq.abs().max(), dk.abs().max()) < 2e-6
        torch.testing.assert_close((out.detach(), dv), (inputs["v"].detach(), grad), rtol=0, atol=2e-6)
        return
    assert_right({**inputs, "return_lse": True}, "triton")


# ----------------------------------------------------------------------------------------------------------
# Launches
# ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict[str, Any]]]:
    """What is launched during a test: name, and compile-time constants by name."""
    from warploom.runtime.launch import Launch

    launched, call = [], Launch.__call__

    def record(self: Launch, *given: Any) -> None:
        if not self.descriptions:
            launched.append((self.kernel.__name__, constants_of(self)))
        call(self, *given)

    monkeypatch.setattr(Launch, "__call__", record)
    forget_plans()  # plans are made anew
    return launched


@pytest.mark.parametrize("short", [0, 2**30])
@pytest.mark.seldom(3, 3)
def test_no_length_batch_window_or_scale_is_a_constant(
    short: int, launches: list[Any], device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    from warploom.ops.flash_attention.triton import launch as launchers

    monkeypatch.setattr(launchers, "SHORT", short)  # short loops and long ones differ
    kinds: list[list[dict[str, Any]]] = [
        [{"n": 20}, {"n": 17, "m": 33, "batch": 1}, {"n": 70, "scale": 0.3, "heads": 4, "key_heads": 2}],
        [{"n": 5}, {"n": 16, "m": 33, "batch": 1}, {"n": 3, "m": 600, "scale": 0.3, "heads": 4, "key_heads": 2}],
        [{"n": 20, "window": (3, 4)}, {"n": 17, "window": (100, 0)}],
        [{"n": 20, "batch": 1, "cu_seqlens_q": torch.tensor(c, device=device)} for c in ([0, 20], [0, 3, 9, 20])],
    ]
    for kind in kinds:
        launches.clear()
        for case in kind:
            run(random_inputs(device, **case), "triton")
        # Lengths decide one constant alone: whether a program of decoding takes one chunk of several, or more.
        used = {
            (name, tuple(item for item in constants.items() if item[0] != "ONE_CHUNK"))
            for name, constants in launches
            if name not in MERGING
        }
        assert len(used) == 4


@pytest.mark.parametrize("precision", ["highest", "high", "medium"])
def test_precision_of_float32_products(precision: str, launches: list[Any], device: torch.device) -> None:
    from warploom.ops.flash_attention.triton.launch import PRODUCTS
    from warploom.runtime.launch import architecture

    product = PRODUCTS[precision]
    if precision == "highest" and architecture(device) == 90:
        product = "3-term here"  # of short tensors

    def used() -> set[str]:
        return {constants["PRECISION"] for _, constants in launches if "PRECISION" in constants}

    inputs = random_inputs(device, 70)
    assert_right({**inputs, "float32_precision": precision}, "triton")
    assert used() == {product}
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision(precision)
        launches.clear()
        flash_attention(**inputs, backend="triton")
        assert used() == {product}
    finally:
        torch.set_float32_matmul_precision(before)
    launches.clear()
    run(random_inputs(device, 9, d=24, dtype=torch.bfloat16, float32_precision=precision), "triton")
    assert used() == {PRODUCTS["highest"]}  # one way only: nothing compiles twice


def test_causal_loops_skip_what_is_hidden(device: torch.device) -> None:
    """A NaN among the keys that no query sees must not be read, or at least not be felt."""
    inputs = random_inputs(device, 40, 200, window=(20, None), causal=True)
    clean = flash_attention(**inputs, backend="triton")
    with torch.no_grad():
        inputs["k"][:, :100] = math.nan
        inputs["v"][:, :100] = math.nan
    assert torch.equal(flash_attention(**inputs, backend="triton"), clean)
