"""`compare` must fail on every mistake it is there to catch, and pass on rounding."""

import math

import pytest
import torch

from warploom.testing import accuracy
from warploom.testing.accuracy import compare

HALF_TYPES = (torch.float16, torch.bfloat16)


@pytest.fixture
def reference(device: torch.device) -> torch.Tensor:
    return torch.randn(7, 33, 5, dtype=torch.float64).to(device)


@pytest.mark.parametrize("dtype", [*HALF_TYPES, torch.float32])
def test_rounding_passes(reference: torch.Tensor, dtype: torch.dtype) -> None:
    rounded = reference.to(dtype)
    verdict = compare(rounded, reference, rounded)
    assert verdict.ok, verdict.describe()
    assert 0 < verdict.ratio <= 1


@pytest.mark.parametrize("dtype", HALF_TYPES)
def test_rounding_passes_beside_an_exact_eager_reference(dtype: torch.dtype) -> None:
    # A lucky eager result leaves only the rounding of the output dtype as the budget.
    reference = torch.tensor([1.0, 2.0, -4.0], dtype=torch.float64)
    verdict = compare(reference.to(dtype), reference, reference.to(dtype))
    assert verdict.ok
    assert verdict.ratio == 0


def test_three_times_the_eager_error_fails(reference: torch.Tensor) -> None:
    error = 1e-4 * torch.randn_like(reference)
    eager = (reference + error).float()
    assert compare((reference + 1.9 * error).float(), reference, eager).ok
    assert not compare((reference + 3.0 * error).float(), reference, eager).ok


def test_one_wrong_element_fails_and_is_named(reference: torch.Tensor) -> None:
    eager = reference.bfloat16()
    output = eager.clone()
    output[3, 17, 2] += 0.125
    verdict = compare(output, reference, eager)
    assert not verdict.ok
    assert verdict.worst == (3, 17, 2)
    assert "(3, 17, 2)" in verdict.describe()
    assert verdict.rms_error <= verdict.rms_budget, "this one is for the largest error to catch"


def test_a_small_bias_everywhere_fails(reference: torch.Tensor) -> None:
    eager = reference.float()
    eager[0, 0, 0] += 1e-2  # one bad element of the eager reference widens the budget of the largest error
    output = reference.float() + 5e-3
    verdict = compare(output, reference, eager)
    assert verdict.max_error <= verdict.error_budget
    assert not verdict.ok
    assert verdict.ratio > 1


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_fails(reference: torch.Tensor, value: float) -> None:
    eager = reference.float()
    output = eager.clone()
    output[6, 32, 4] = value
    verdict = compare(output, reference, eager)
    assert not verdict.ok
    assert verdict.ratio == math.inf
    assert verdict.worst == (6, 32, 4)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_missing_nan_or_infinity_fails(reference: torch.Tensor, value: float) -> None:
    output = reference.float()
    reference[0, 1, 2] = value
    eager = reference.float()
    assert compare(eager, reference, eager).ok
    verdict = compare(output, reference, eager)
    assert not verdict.ok
    assert verdict.worst == (0, 1, 2)


def test_an_infinity_of_the_wrong_sign_fails(reference: torch.Tensor) -> None:
    reference[1, 1, 1] = math.inf
    eager = reference.float()
    output = eager.clone()
    output[1, 1, 1] = -math.inf
    assert not compare(output, reference, eager).ok


def test_overflow_of_the_output_dtype_is_expected_where_the_value_does_not_fit() -> None:
    reference = torch.tensor([1.0, 1e5, -1e5], dtype=torch.float64)
    eager = reference.half()
    assert compare(eager, reference, eager).ok
    assert not compare(torch.tensor([1.0, 65504.0, -65504.0]).half(), reference, eager).ok


def test_an_eager_overflow_gives_no_licence() -> None:
    reference = torch.tensor([1.0, 2.0], dtype=torch.float64)
    eager = torch.tensor([1.0, math.inf])
    assert not compare(eager, reference, eager).ok
    assert not compare(torch.tensor([1.0, 2.1]), reference, eager).ok
    assert compare(torch.tensor([1.0, 2.0]), reference, eager).ok


def test_shape_and_dtype_are_verdicts(reference: torch.Tensor) -> None:
    eager = reference.bfloat16()
    for output, words in (
        (eager.float(), "torch.float32"),
        (eager[..., :4], "(7, 33, 4)"),
        (eager[..., :1], "(7, 33, 1)"),  # would broadcast
        ((eager, eager), "2 outputs"),
    ):
        verdict = compare(output, reference, eager)
        assert not verdict.ok
        assert words in verdict.describe()


def test_the_worst_of_several_outputs_decides(reference: torch.Tensor) -> None:
    eager = reference.float()
    verdict = compare((eager, eager + 1, eager), (reference,) * 3, (eager,) * 3)
    assert not verdict.ok
    assert verdict.output == 1
    assert "output 1" in verdict.describe()
    assert compare((eager,) * 3, (reference,) * 3, (eager,) * 3).ok


@pytest.mark.parametrize("shape", [(0,), (3, 0, 2), ()])
def test_tensors_without_elements_or_dimensions(shape: tuple[int, ...]) -> None:
    reference = torch.ones(shape, dtype=torch.float64)
    verdict = compare(reference.half(), reference, reference.half())
    assert verdict.ok
    assert verdict.ratio == 0


@pytest.mark.parametrize("layout", ["contiguous", "transposed", "expanded"])
def test_comparing_in_pieces_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, reference: torch.Tensor, layout: str
) -> None:
    if layout == "transposed":
        reference = reference.transpose(0, 2)
    if layout == "expanded":
        reference = reference[:1].expand(9, -1, -1)
    eager = reference.bfloat16()
    output = eager.clone()
    output[-1, 19, 1] += 0.5
    whole = compare(output, reference, eager)
    monkeypatch.setattr(accuracy, "CHUNK", 16)
    pieces = compare(output, reference, eager)
    assert pieces.worst == whole.worst == (output.shape[0] - 1, 19, 1)
    assert pieces.max_error == whole.max_error
    assert pieces.error_budget == whole.error_budget
    assert pieces.rms_error == pytest.approx(whole.rms_error)
    assert pieces.rms_budget == pytest.approx(whole.rms_budget)
