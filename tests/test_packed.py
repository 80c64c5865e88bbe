"""Packed sequences are strangers to each other, and rows behind the last one belong to none.

Whatever such rows hold, NaN included, outputs and gradients there are 0 and lse is −inf, and no other row, nor the
gradient of what all rows share, changes. NaN in one sequence reaches no other.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from flash_cases import BACKENDS

from warploom import flash_attention, lrpe_cosine, lrpe_rotate, tpa_attention
from warploom.ops.flash_attention import fallback
from warploom.ops.tpa import api as tpa_api
from warploom.testing.conformance import draw_like
from warploom.testing.poison import poison_allocations

Tensor = torch.Tensor
NAN = float("nan")
QUERIES, KEYS = (0, 5, 5, 13), (0, 6, 7, 11)  # where as many keys as queries are asked for, both are the first
TAIL_Q, TAIL_K = 20, 18


class Case(NamedTuple):
    """A call on packed rows: shapes of its tensors, whose rows are ``Q`` queries, ``K`` keys, or shared by all."""

    call: Callable[..., Any]
    shapes: dict[str, tuple[int | str, ...]]
    options: dict[str, Any]
    bounds: tuple[str, ...] = ("cu_seqlens",)
    dtype: torch.dtype = torch.float32

    def lengths(self, name: str, tokens: int, keys: int) -> tuple[int, ...]:
        return tuple({"Q": tokens, "K": keys}.get(x, x) for x in self.shapes[name])  # type: ignore[misc]


ATTENTION: dict[str, tuple[int | str, ...]] = {"q": (1, "Q", 4, 16), "k": (1, "K", 2, 16), "v": (1, "K", 2, 16)}
FACTORS: dict[str, tuple[int | str, ...]] = {
    "aq": (1, "Q", 2, 2), "ak": (1, "Q", 2, 2), "av": (1, "Q", 2),
    "bq": (1, "Q", 2, 16), "bk": (1, "Q", 2, 16), "bv": (1, "Q", 16),
}  # fmt: skip
ENCODED: dict[str, tuple[int | str, ...]] = {"x": (1, "Q", 2, 16), "theta": (2, 8)}
BOTH = ("cu_seqlens_q", "cu_seqlens_k")
CASES = {
    "a sink": Case(flash_attention, {**ATTENTION, "sink": (4,)}, {"causal": True, "return_lse": True}, BOTH),
    "a window": Case(flash_attention, ATTENTION, {"window": (2, 1), "return_lse": True}, BOTH, torch.bfloat16),
    "factors": Case(tpa_attention, FACTORS, {}),
    "rotate": Case(lrpe_rotate, ENCODED, {"activation": "sigmoid"}),
    "cosine, softmax": Case(lrpe_cosine, ENCODED, {"activation": "softmax"}, dtype=torch.bfloat16),
    "softmax over the sequence": Case(lrpe_rotate, ENCODED, {"activation": "softmax_sequence"}),
}


def _made(case: Case, device: torch.device) -> dict[str, Tensor]:
    torch.manual_seed(3)
    made = {name: torch.randn(case.lengths(name, TAIL_Q, TAIL_K)) for name in case.shapes}
    return {
        name: x.to(device, torch.float32 if name in ("theta", "sink") else case.dtype) for name, x in made.items()
    }


def _rows(case: Case, name: str) -> str:
    return next((str(x) for x in case.shapes[name] if x in ("Q", "K")), "")


def _run(case: Case, backend: str, made: dict[str, Tensor], grads: tuple[Tensor, ...]) -> dict[str, Tensor]:
    """Outputs and gradients, by name, where memory is NaN before it is written."""
    bounds = dict(zip(case.bounds, (QUERIES, KEYS)))
    device = next(iter(made.values())).device
    leaves = {name: x.clone().requires_grad_() for name, x in made.items()}
    packed = {name: torch.tensor(x, device=device) for name, x in bounds.items()}
    with poison_allocations():
        found = case.call(**leaves, **packed, **case.options, backend=backend)
        outs = found if isinstance(found, tuple) else (found,)
        gradients = torch.autograd.grad(outs, list(leaves.values()), grads)
    return {**dict(zip(("out", "lse"), outs)), **{f"d{name}": x for name, x in zip(leaves, gradients)}}


def _gradients_of_results(case: Case, device: torch.device) -> tuple[Tensor, ...]:
    features = 32 if case.call is lrpe_cosine else 16
    heads = 4 if case.call is flash_attention else 2
    outs = [torch.empty(1, TAIL_Q, heads, features, dtype=case.dtype)]
    outs += [torch.empty(1, heads, TAIL_Q)] * bool(case.options.get("return_lse"))
    return tuple(x.to(device) for x in draw_like(tuple(outs)))


def _axis(name: str) -> int:
    return 2 if name == "lse" else 1


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", CASES)
def test_rows_behind_the_last_sequence_are_zero_whatever_they_hold(
    name: str, backend: str, device: torch.device
) -> None:
    case = CASES[name]
    made, grads = _made(case, device), _gradients_of_results(case, device)
    ends = {"Q": QUERIES[-1], "K": KEYS[-1]}
    alone = {n: x[:, : ends[_rows(case, n)]] if _rows(case, n) else x for n, x in made.items()}
    cut = (grads[0][:, : QUERIES[-1]], *(x[:, :, : QUERIES[-1]] for x in grads[1:]))
    expected = _run(case, backend, alone, cut)
    for n in (n for n in made if _rows(case, n)):
        made[n][:, ends[_rows(case, n)] :] = NAN
    grads[0][:, QUERIES[-1] :] = NAN
    for x in grads[1:]:
        x[:, :, QUERIES[-1] :] = NAN
    found = _run(case, backend, made, grads)
    for n, x in found.items():
        rows = "Q" if n in ("out", "lse") else _rows(case, n[1:])
        end = ends[rows] if rows else x.shape[_axis(n) % x.dim()]
        inside, tail = x.split([end, x.shape[_axis(n) % x.dim()] - end], _axis(n) % x.dim())
        torch.testing.assert_close(inside, expected[n], msg=lambda text, n=n: f"{n}: {text}")
        assert (tail == (-torch.inf if n == "lse" else 0)).all(), n


@pytest.mark.parametrize("name", ["a sink", "a window", "factors"])
def test_rows_behind_bounds_that_cannot_be_read(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler knows bounds as tensors alone: a mask keeps the tail out as well."""
    case = CASES[name]
    made, grads = _made(case, torch.device("cpu")), _gradients_of_results(case, torch.device("cpu"))
    ends = {"Q": QUERIES[-1], "K": KEYS[-1]}
    for n in (n for n in made if _rows(case, n)):
        made[n][:, ends[_rows(case, n)] :] = NAN
    grads[0][:, QUERIES[-1] :] = NAN
    expected = _run(case, "torch", made, grads)
    for module in (fallback, tpa_api):
        monkeypatch.setattr(module, "read_bounds", lambda *bounds: bounds)
    for n, x in _run(case, "torch", made, grads).items():
        torch.testing.assert_close(x, expected[n], msg=lambda text, n=n: f"{n}: {text}")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", CASES)
def test_nan_in_a_sequence_reaches_no_other(name: str, backend: str, device: torch.device) -> None:
    case = CASES[name]
    made, grads = _made(case, device), _gradients_of_results(case, device)
    expected = _run(case, backend, made, grads)
    bounds = {"Q": QUERIES, "K": KEYS}
    for n in (n for n in made if _rows(case, n)):
        made[n][:, : bounds[_rows(case, n)][1]] = NAN
    grads[0][:, : QUERIES[1]] = NAN
    found = _run(case, backend, made, grads)
    assert found["out"][:, : QUERIES[1]].isnan().all()
    for n, x in found.items():
        rows = "Q" if n in ("out", "lse") else _rows(case, n[1:])
        if rows:  # what all sequences share sees NaN
            begin, length = bounds[rows][1], x.shape[_axis(n)] - bounds[rows][1]
            others, same = (each.narrow(_axis(n), begin, length) for each in (x, expected[n]))
            torch.testing.assert_close(others, same, msg=lambda text, n=n: f"{n}: {text}")
