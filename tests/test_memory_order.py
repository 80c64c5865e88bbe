"""Outputs lie in memory as the input does, with the same strides on every backend."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from flash_cases import BACKENDS, LAYOUTS

from warploom import flash_attention, linear_attention, lrpe_cosine, lrpe_rotate, tpa_attention, tpa_decode
from warploom.runtime.memory_order import empty_in_order_of, make_dense, reorder_like

Tensor = torch.Tensor
Make = Callable[..., Tensor]

ORDERS = {name: LAYOUTS[name] for name in ("heads_first", "tokens_first", "features_before_heads", "slice_of_qkv")}
ORDERS |= {"usual": lambda x: x, "expanded": lambda x: x[:, :, :1].expand(x.shape)}
SIZES = {"B": 2, "N": 3, "M": 4, "H": 2, "R": 3, "D": 8, "E": 4}
OTHER_SIZES: tuple[dict[str, int], ...] = (
    {}, {"B": 1}, {"H": 1}, {"N": 1}, {"E": 1}, {"R": 1}, {"N": 0}, {"H": 1, "R": 1, "E": 1}, {"D": 1},
)  # fmt: skip


def attention(make: Make, B: int, N: int, M: int, H: int, R: int, D: int, E: int) -> Iterator[dict[str, Any]]:
    inputs = {"q": make(B, N, H, D), "k": make(B, M, H, D), "v": make(B, M, H, E)}
    for options in ({"return_lse": True}, {"causal": False}, {"window": (1, 1)}):
        yield inputs | options
    yield {name: x.requires_grad_() for name, x in inputs.items()} | {"return_lse": True}


def linear(make: Make, B: int, N: int, M: int, H: int, R: int, D: int, E: int) -> Iterator[dict[str, Any]]:
    inputs = {"q": make(B, N, H, D), "k": make(B, N, H, D), "v": make(B, N, H, E)}
    yield inputs | {"return_state": True}
    yield inputs | {"initial_state": make(B, H, D, E), "return_state": True}
    yield inputs | {"causal": False}


def factors(make: Make, B: int, N: int, M: int, H: int, R: int, D: int, E: int) -> Iterator[dict[str, Any]]:
    keys = {"ak": make(B, M, H, 2), "av": make(B, M, H, 2), "bk": make(B, M, 2, D), "bv": make(B, M, 2, E)}
    yield keys | {"aq": make(B, N, H, R), "bq": make(B, N, R, D)}
    yield keys | {"aq": None, "bq": make(B, N, H, D)}


def encoding(make: Make, B: int, N: int, M: int, H: int, R: int, D: int, E: int) -> Iterator[dict[str, Any]]:
    x = make(B, N, H, max(D, 2))  # a pair
    for activation in ("none", "softmax_sequence"):
        yield {"x": x, "theta": torch.rand(1, x.shape[3] // 2, device=x.device), "activation": activation}


FUNCTIONS: dict[str, tuple[Callable[..., Any], Callable[..., Iterator[dict[str, Any]]]]] = {
    "flash_attention": (flash_attention, attention),
    "linear_attention": (linear_attention, linear),
    "tpa_decode": (tpa_decode, factors),
    "tpa_attention": (tpa_attention, factors),
    "lrpe_rotate": (lrpe_rotate, encoding),
    "lrpe_cosine": (lrpe_cosine, encoding),
}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_strides(name: str, order: str, device: torch.device) -> None:
    function, calls = FUNCTIONS[name]

    def make(*shape: int) -> Tensor:
        return ORDERS[order](torch.randn(shape)).to(device)

    for sizes in OTHER_SIZES:
        for call in calls(make, **SIZES | sizes):
            like = next(call[name] for name in ("q", "aq", "x", "bq") if call.get(name) is not None)
            for backend in ("auto", *BACKENDS):
                outputs = function(**call, backend=backend)
                out, *others = (outputs,) if isinstance(outputs, Tensor) else outputs
                case = backend, sizes, [n for n in call if not isinstance(call[n], Tensor)]
                assert out.stride() == empty_in_order_of(like, out.shape[-1]).stride(), case
                for other in others:
                    assert other.stride() == torch.empty(other.shape).stride(), case


@pytest.mark.parametrize("order", ORDERS)
def test_in_order_of(order: str) -> None:
    x = ORDERS[order](torch.randn(2, 3, 4, 6))
    for shape in ((0, 1, 2, 3), (2, 0, 1, 3), (3, 2, 1, 0)):
        out = torch.randn(2, 3, 4, 5).permute(shape).contiguous().permute([shape.index(a) for a in range(4)])
        ordered = reorder_like(x, out)
        assert torch.equal(ordered, out)
        assert ordered.stride() == empty_in_order_of(x, 5).stride()


def test_dense() -> None:
    x = torch.randn(2, 1, 3)
    assert make_dense(x) is x
    odd = x.as_strided((2, 1, 3), (3, 7, 1))
    assert odd.is_contiguous()
    assert make_dense(odd).stride() == (3, 3, 1)
    assert torch.equal(make_dense(odd), x)
    assert make_dense(x.mT).stride() == (3, 1, 1)
    assert make_dense(torch.empty(2, 0, 3).transpose(0, 2)).stride() == (2, 2, 1)
