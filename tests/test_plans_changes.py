"""Calls that differ in something, one after the other: none ever runs on the plan of another."""

import os
import subprocess
import sys
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from warploom import (
    DtypeError,
    WarploomError,
    flash_attention,
    linear_attention,
    lrpe_rotate,
    tpa_attention,
    tpa_decode,
)
from warploom.runtime.backend import HAS_TRITON

if not HAS_TRITON:
    pytest.skip("needs Triton", allow_module_level=True)

from planned_calls import (
    FUNCTIONS,
    OTHER_BOUNDS,
    USUAL,
    Change,
    Inputs,
    attention,
    changed,
    encoding,
    encoding_over_the_sequence,
    factors,
    factors_with_gradients,
    factors_with_lengths,
    linear,
    no_plans,
    offset_encoding,
    offset_linear,
    packed_attention,
    packed_encoding,
    packed_linear,
    placed_encoding,
    results,
    with_gaps,
)

Tensor = torch.Tensor


# ----------------------------------------------------------------------------------------------------------
# Results: those of a call that is planned anew, to the last bit
# ----------------------------------------------------------------------------------------------------------


def set_to(**values: Any) -> Change:
    return lambda inputs: {**inputs, **values}


def without_gradient(*names: str) -> Change:
    return lambda inputs: {**inputs, **{name: inputs[name].detach() for name in names}}


def heads_first(x: Tensor) -> Tensor:
    """The same values, heads before tokens in memory."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def misaligned(x: Tensor) -> Tensor:
    """The same values and strides, at an address that vectors cannot be read from."""
    return torch.cat((x.flatten()[:1], x.flatten()))[1:].view(x.shape)


def one_head(x: Tensor) -> Tensor:
    return x[:, :, :1].expand(x.shape)


def one_more_key(inputs: Inputs) -> Inputs:
    return changed(lambda x: torch.cat((x, x[:, :1]), 1), "k", "v")(inputs)


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
LINEAR: dict[str, Change] = {
    "nothing": set_to(),
    "offset": set_to(offset=7),
    "cosine": lambda inputs: changed(lambda state: torch.cat((state, state + 1), 2), "initial_state")(
        {**inputs, "encoding": "cosine"}
    ),
    "without_encoding": set_to(encoding="none", theta=None),
    "interleaved": set_to(interleaved=True),
    "activation": set_to(activation="silu"),
    "full": set_to(causal=False, decay=None, initial_state=None, return_state=False),
    "scale": set_to(scale=0.7),
    "without_last_state": set_to(return_state=False),
    "without_first_state": set_to(initial_state=None),
    "without_decay": set_to(decay=None),
    "decay_of_tokens": changed(lambda decay: decay.expand(1, 9, 1).contiguous(), "decay"),
    "dtype": changed(torch.Tensor.bfloat16, "q", "k", "v"),
    "dtype_of_theta": changed(torch.Tensor.double, "theta"),
    "dtype_of_state": changed(torch.Tensor.half, "initial_state"),
    "theta_of_all_heads": changed(lambda theta: theta[0], "theta"),
    "order_of_q": changed(lambda q: q.mT.contiguous().mT, "q"),
    "order_of_state": changed(lambda state: state.mT.contiguous().mT, "initial_state"),
    "gaps_in_v": changed(with_gaps, "v"),
    "gaps_in_state": changed(with_gaps, "initial_state"),
    "address_of_q": changed(misaligned, "q"),
    "address_of_state": changed(misaligned, "initial_state"),
    "fewer_tokens": changed(lambda x: x[:, :5], "q", "k", "v"),
    "one_token": changed(lambda x: x[:, :1], "q", "k", "v"),
    "order_of_gradients": set_to(grad_order=(0, 1, 3, 2)),
    "no_gradient_of_last_state": set_to(differentiated=1),
    "no_gradient_of_k": without_gradient("k"),
    "gradient_of_decay": lambda inputs: {**inputs, "decay": inputs["decay"].clone().requires_grad_()},
    "no_gradient_of_theta": without_gradient("theta"),
    "no_gradients": without_gradient("q", "k", "v", "theta", "initial_state"),
}
PACKED_LINEAR: dict[str, Change] = {
    "values": changed(lambda bounds: torch.tensor([0, 7, 9]).to(bounds), "cu_seqlens"),
    "dtype": changed(torch.Tensor.int, "cu_seqlens"),
    "stride": changed(with_gaps, "cu_seqlens"),
    "sequences": lambda inputs: changed(lambda state: torch.cat((state, state[:1])), "initial_state")(
        {**inputs, "cu_seqlens": torch.cat((inputs["cu_seqlens"], inputs["cu_seqlens"][-1:]))}
    ),
    "offset": set_to(offset=4),
    "none": lambda inputs: changed(lambda state: state[:1], "initial_state")({**inputs, "cu_seqlens": None}),
}
OFFSET_LINEAR: dict[str, Change] = {
    "values": changed(lambda offsets: offsets + 3, "offset"),
    "one_for_all": changed(lambda offsets: offsets[0], "offset"),
    "stride": changed(with_gaps, "offset"),
    "int": set_to(offset=4),
}
ENCODING: dict[str, Change] = {
    "nothing": set_to(),
    "offset": set_to(offset=7),
    "prefix": set_to(prefix=2),
    "grid": set_to(grid=(3, 4)),
    "grid_as_a_list": set_to(grid=[2, 6]),
    "long_grid": lambda inputs: changed(lambda theta: theta[:, :1], "theta")({**inputs, "grid": (3, 1, 2, 1, 2)}),
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

ALL_FACTORS = ("aq", "ak", "av", "bq", "bk", "bv")
DECODE: dict[str, Change] = {
    "nothing": set_to(),
    "lengths": changed(lambda lengths: lengths - 7, "seqused_k"),
    "dtype_of_lengths": changed(torch.Tensor.int, "seqused_k"),
    "stride_of_lengths": changed(with_gaps, "seqused_k"),
    "no_lengths": set_to(seqused_k=None),
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
    "causal": set_to(causal=True),
    "scale": set_to(scale=0.3),
    "order_of_bk": changed(lambda b: b.mT.contiguous().mT, "bk"),
    "no_gradient_of_bk": without_gradient("bk"),
    "no_gradients": without_gradient(*ALL_FACTORS),
    "whole_queries": lambda inputs: {
        **inputs, "aq": None, "bq": inputs["bq"].detach().repeat(1, 1, 2, 1).requires_grad_(),
    },
}  # fmt: skip

SITUATIONS = [
    pytest.param(function, make, change, id=f"{make.__name__}-{name}")
    for function, make, changes in (
        (flash_attention, attention, ATTENTION),
        (flash_attention, packed_attention, PACKED_ATTENTION),
        (linear_attention, linear, LINEAR),
        (linear_attention, packed_linear, PACKED_LINEAR),
        (linear_attention, offset_linear, OFFSET_LINEAR),
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


@pytest.mark.sample(3)
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


def test_a_list_that_is_changed_between_calls(device: torch.device) -> None:
    inputs, window = set_to(window=(3, None))(attention(device)), [3, None]
    with no_plans():
        expected = [results(flash_attention, {**inputs, "window": (left, None)}) for left in (3, 1)]
    with no_plans():
        for left, wanted in zip((3, 1) * 3, expected * 3):
            window[0] = left
            assert all(map(torch.equal, results(flash_attention, {**inputs, "window": window}), wanted))


class Sizes(Sequence[int]):
    """Hashable, and yet it can be changed."""

    def __init__(self, sizes: list[int]) -> None:
        self.sizes = sizes

    def __getitem__(self, index: Any) -> Any:
        return self.sizes[index]

    def __setitem__(self, index: int, size: int) -> None:
        self.sizes[index] = size

    def __len__(self) -> int:
        return len(self.sizes)


GRIDS = {"list": list, "array": lambda sizes: array("i", sizes), "deque": deque, "Sizes": Sizes}


@pytest.mark.parametrize("kind", GRIDS.values(), ids=GRIDS)
@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_a_grid_that_is_changed_between_calls(kind: Any, backend: str, device: torch.device) -> None:
    inputs, grid = changed(lambda theta: theta[:, :2], "theta")(encoding(device)), kind([2, 6])
    inputs["backend"] = backend
    with no_plans():
        expected = {sizes: lrpe_rotate(**inputs, grid=sizes) for sizes in ((2, 6), (3, 4))}
    assert not torch.equal(*expected.values())
    with no_plans():
        for sizes in ((2, 6), (2, 6), (2, 6), (3, 4), (3, 4), (2, 6)):
            grid[0], grid[1] = sizes
            assert torch.equal(lrpe_rotate(**inputs, grid=grid), expected[sizes])


# ----------------------------------------------------------------------------------------------------------
# What stands around a call, and changes between two: settings, modes, whether gradients are wanted
# ----------------------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("backend", ["triton", "torch"])
def test_numbers_of_numpy_are_pythons(backend: str, device: torch.device) -> None:
    numpy = pytest.importorskip("numpy")
    q, k, v = torch.randn(3, 1, 5, 2, 4).to(device)
    whole, theta = {"backend": backend}, torch.ones(2).to(device)

    def outputs(i: Any, f: Any, b: Any) -> list[Tensor]:
        place = {"theta": theta, "encoding": "rotate", "offset": i(3), "scale": f(0.5)}
        scales = {"scale": f(0.5), "scale_q": f(2), "scale_k": i(3), "scale_v": f(0.25)}
        factors = (None, k[..., 0], v[..., 0], q, k[:, :, 0], v[:, :, 0])
        return [
            flash_attention(q, k, v, causal=b(1), scale=f(0.5), window=(i(2), None), softcap=i(3), **whole),
            lrpe_rotate(q, theta, offset=i(7), prefix=i(1), **whole),
            lrpe_rotate(q, theta, grid=[i(4)], prefix=i(1), **whole),
            linear_attention(q, k, v, **place, **whole),
            tpa_attention(*factors, **scales, **whole),
            tpa_decode(*factors, **scales, **whole),
        ]

    expected = outputs(int, float, bool)
    for _ in range(2):  # planned, and known by key
        found = outputs(numpy.int64, numpy.float32, numpy.bool_)
        assert all(map(torch.equal, found, expected))
    with pytest.raises(DtypeError, match="offset must be an int"):
        lrpe_rotate(q, theta, offset=numpy.float32(3), **whole)


@pytest.fixture
def deterministic() -> Iterator[Callable[[bool], None]]:
    """Switches PyTorch's deterministic algorithms on and off, and in the end to what they were."""
    before = torch.are_deterministic_algorithms_enabled()
    yield torch.use_deterministic_algorithms
    torch.use_deterministic_algorithms(before)


@pytest.mark.parametrize("name", USUAL)
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
     (linear_attention, linear, ("q", "k", "v", "theta", "initial_state")),
     (lrpe_rotate, encoding_over_the_sequence, ("x", "theta")),
     (tpa_attention, factors_with_gradients, ("bq", "bk", "bv"))],
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


with_gradients = pytest.mark.parametrize("name", [name for name in USUAL if name != "tpa_decode"])


@pytest.mark.parametrize("wanted_first", [False, True])
@with_gradients
def test_gradients_may_be_wanted_and_not_wanted_alternately(
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
        (linear_attention, linear, {"causal": True}, {"causal": 1}),
        (linear_attention, linear, {"return_state": True}, {"return_state": 1}),
        (linear_attention, linear, {"scale": 1.0}, {"scale": True}),
        (linear_attention, linear, {"offset": 1}, {"offset": 1.0}),
        (linear_attention, linear, {"offset": 1}, {"offset": 2**31 - 8}),
        (linear_attention, linear, {"interleaved": False}, {"interleaved": 0}),
        (linear_attention, linear, {"encoding": "rotate"}, {"encoding": ["rotate"]}),
        (linear_attention, packed_linear, {}, {"cu_seqlens": torch.tensor([0.0, 3.0, 9.0])}),
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
        (tpa_decode, factors, {}, {"seqused_k": torch.tensor([1.0, 2.0])}),
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
        assert sum(len(each.plans.known) for each in FUNCTIONS) == 1


def test_an_offset_of_a_type_of_its_own_is_checked_every_time(device: torch.device) -> None:
    class Position(int):
        pass

    inputs = {**encoding(device), "backend": "triton"}
    for _ in range(3):
        assert torch.equal(lrpe_rotate(**inputs, offset=Position(5)), lrpe_rotate(**inputs, offset=5))
        with pytest.raises(WarploomError, match="offset must be such that"):
            lrpe_rotate(**inputs, offset=Position(2**31 - 11))


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


# Tensors that have no strides, or no numbers.
KINDS: dict[str, Callable[[Tensor], Tensor]] = {
    "nested": lambda x: torch.nested.nested_tensor(list(x)),
    "jagged": lambda x: torch.nested.nested_tensor(list(x if x.dim() > 1 else x[None]), layout=torch.jagged),
    "sparse": torch.Tensor.to_sparse,
    "sparse_rows": lambda x: x.reshape(-1, x.shape[-1]).to_sparse_csr(),
    "mkldnn": torch.Tensor.to_mkldnn,
    "quantized": lambda x: torch.quantize_per_tensor(x.float(), 0.1, 0, torch.quint8),
}
MAKES = {
    **USUAL,
    "packed_attention": (flash_attention, packed_attention),
    "placed_encoding": (lrpe_rotate, placed_encoding),
    "packed_encoding": (lrpe_rotate, packed_encoding),
}


def refuse_every_kind(kind: str, device: torch.device) -> None:
    """Calls with a tensor of another kind are refused, also when those like them are known."""
    for name, (function, make) in MAKES.items():
        inputs = make(device)
        for _ in range(3):
            results(function, inputs)
        for argument, value in inputs.items():
            if not isinstance(value, Tensor) or (kind == "mkldnn" and not value.is_floating_point()):
                continue
            for backend in ("triton", "torch"):
                with pytest.raises(DtypeError, match=rf"{function.__name__}: {argument} must be"):
                    function(**{**inputs, argument: KINDS[kind](value.detach())}, backend=backend)
            results(function, inputs)
        print(name)


@pytest.mark.filterwarnings("ignore")  # such tensors are prototypes, and PyTorch says so
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "nested"])
def test_tensors_of_other_kinds_are_refused(kind: str, device: torch.device) -> None:
    if kind == "mkldnn" and device.type == "cuda":
        pytest.skip("these tensors are on CPUs, and the kernels here are not")
    refuse_every_kind(kind, device)


@pytest.mark.seldom(4, 8)
def test_nested_tensors_are_refused() -> None:
    """In a process of its own: what asks such a tensor for its sizes in C ends it."""
    script = "import conftest, torch; from test_plans_changes import *; "
    script += f"refuse_every_kind('nested', torch.device('{'cuda' if torch.cuda.is_available() else 'cpu'}'))"
    path = os.pathsep.join(entry for entry in (str(Path(__file__).parent), *sys.path) if entry)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script],
        env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split() == list(MAKES)
