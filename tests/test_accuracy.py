"""The instruments themselves: each must fail on the mistakes it is there to catch, and pass on rounding."""

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from statistics import fmean

import pytest
import torch
from strided import strided_view

from warploom.errors import BackendError
from warploom.ops.spec import Case, Inputs, Operator
from warploom.testing import accuracy
from warploom.testing.accuracy import compare, mean_of
from warploom.testing.conformance import check_operator, judge, judge_draws, make_draws
from warploom.testing.poison import poison_allocations

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


def noisy(reference: torch.Tensor, error: float) -> torch.Tensor:
    """With errors in proportion to each element."""
    return (reference * (1 + error * torch.randn_like(reference))).float()


@pytest.mark.parametrize(("error", "right"), [(1e-4, True), (3e-4, False)])
def test_the_mean_of_several_draws_is_no_luck(error: float, right: bool) -> None:
    """Elements of very different sizes, few of them: one draw may judge either way, sixteen do not."""
    single, means = [], []
    for _ in range(100):
        draws = [
            torch.randn(76, dtype=torch.float64) * (torch.randn(76, dtype=torch.float64) / 2).exp()
            for _ in range(16)
        ]
        verdicts = [compare(noisy(draw, error), draw, noisy(draw, 1e-4)) for draw in draws]
        single += [verdict.ok for verdict in verdicts]
        means.append(mean_of(verdicts).ok)
    assert len(set(single)) == 2
    assert set(means) == {right}


def test_an_error_that_luck_does_not_explain_is_no_mean(reference: torch.Tensor) -> None:
    fine = compare(reference.float(), reference, noisy(reference, 1e-3))
    for factor, right in ((2.0, True), (5.0, False)):
        output = reference.clone()
        output.view(-1)[7] += factor * fine.error_budget
        verdict = compare(output.float(), reference, noisy(reference, 1e-3))
        assert not verdict.ok
        whole = mean_of([verdict, *[fine] * 15])
        assert whole.ok == right
        assert (whole.ratio <= 1) == right, "what is refused says why"


def test_an_error_is_large_beside_the_values_of_its_run() -> None:
    """Of runs on numbers of very different sizes, the largest have errors far beyond the mean budget."""
    far = []
    for _ in range(10):
        sizes = (1.2 * torch.randn(256, dtype=torch.float64)).exp()
        draws = [size * torch.randn(7, dtype=torch.float64) for size in sizes]
        verdicts = [compare(noisy(draw, 1e-4), draw, noisy(draw, 1e-4)) for draw in draws]
        assert mean_of(verdicts).ok
        budget, usual = (fmean([getattr(v, name) for v in verdicts]) for name in ("error_budget", "size"))
        far.append(max(v.max_error for v in verdicts) / budget)
        place = min(range(256), key=lambda i: abs(verdicts[i].size - usual))
        verdicts[place] = replace(verdicts[place], max_error=1.2 * accuracy.UNLUCKY * budget)
        assert not mean_of(verdicts).ok, "which is no luck in a run of usual size"
    assert max(far) > accuracy.UNLUCKY


@pytest.mark.parametrize("wrong", ["one element", "a bias"])
@pytest.mark.parametrize(
    ("times", "right"), [((0.9, 0.9), True), ((1.2, 0.6), True), ((1.3, 1.3), False), ((2.0, 0.6), False)]
)
def test_what_is_beyond_the_budget_in_the_mean_fails(wrong: str, times: tuple[float, float], right: bool) -> None:
    """By a little, in all or half of draws of different sizes: by the largest error or the mean square alone."""
    verdicts = []
    for _ in range(8):
        reference = torch.randn(300, dtype=torch.float64) * (torch.randn((), dtype=torch.float64) / 5).exp()
        eager = noisy(reference, 1e-3)
        budget = compare(reference.float(), reference, eager)
        for factor in times:
            output = reference.clone()
            if wrong == "one element":
                output[7] += factor * budget.error_budget
            else:
                output += factor * budget.rms_budget
            verdict = compare(output.float(), reference, eager)
            assert verdict.ratio == pytest.approx(factor, rel=0.01)
            other = verdict.rms_error / verdict.rms_budget
            if wrong == "a bias":
                other = verdict.max_error / verdict.error_budget
            assert other < 0.5 * factor
            verdicts.append(verdict)
    whole = mean_of(verdicts)
    assert whole.ok == right
    assert (whole.ratio <= 1) == right


@pytest.mark.parametrize(("wrong", "right"), [(3, True), (15, False)])
def test_one_large_budget_does_not_hide_what_is_wrong_with_most_draws(wrong: int, right: bool) -> None:
    verdicts = []
    for draw in range(16):
        reference = torch.randn(20, dtype=torch.float64)
        eager, output = noisy(reference, 1e-4), reference.float()
        if draw == 15:
            eager[3] += 1.0  # the budget of this one makes the mean more than a hundred times larger
        elif draw < wrong:
            output += 4e-3
        verdicts.append(compare(output, reference, eager))
        assert verdicts[-1].ok == (draw >= wrong)
    whole = mean_of(verdicts)
    assert whole.ok == right
    assert (whole.ratio <= 1) == right


def test_what_is_wrong_with_one_draw_is_wrong_with_all(reference: torch.Tensor) -> None:
    fine = compare(reference.float(), reference, reference.float())
    wrong = compare(
        reference.float().masked_fill(reference == reference.max(), math.nan), reference, reference.float()
    )
    for verdicts in ((fine, wrong, fine), (wrong, fine)):
        verdict = mean_of(verdicts)
        assert not verdict.ok
        assert "NaN" in verdict.problem
    assert mean_of((fine, fine)).ok


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


def test_a_root_mean_square_beyond_its_budget_fails_even_if_no_error_is_large(reference: torch.Tensor) -> None:
    """What a budget of three times as much would let pass: errors of one size, under eager's largest."""
    eager = (reference * (1 + 1e-3 * torch.randn_like(reference))).float()
    error = (eager.double() - reference).square().mean().sqrt()
    output = (reference + 3.5 * error * torch.randn_like(reference).sign()).float()
    verdict = compare(output, reference, eager)
    assert verdict.max_error <= verdict.error_budget
    assert not verdict.ok
    assert verdict.ratio == pytest.approx(3.5 / 2, rel=0.05)


# Blocks of rows


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lost: tuple[slice, slice] | None) -> torch.Tensor:
    """Causal attention (B, N, H, D) and its log-sum-exp (B, H, N), without some keys for some queries."""
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    seen = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).tril()
    if lost is not None:
        seen[lost] = False
    wide = torch.promote_types(q.dtype, torch.float32)
    logits = (q @ k.mT * q.shape[-1] ** -0.5).to(wide).masked_fill(~seen, -torch.inf)
    return (logits.softmax(-1).to(v.dtype) @ v).transpose(1, 2), logits.logsumexp(-1)


def attention_results(
    dtype: torch.dtype, lost: tuple[slice, slice] | None = None
) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
    """Output, lse and gradients: of a kernel (float32 inside) that loses keys, in float64, and in the dtype."""
    leaves = [torch.randn(1, 1024, 2, 32).to(dtype) for _ in range(3)]
    grad = torch.randn(1, 1024, 2, 32).to(dtype)

    def run(inside: torch.dtype, lost: tuple[slice, slice] | None, rounded: bool) -> tuple[torch.Tensor, ...]:
        inputs = [leaf.to(inside).requires_grad_() for leaf in leaves]
        out, lse = attend(*inputs, lost)
        found = (out, *torch.autograd.grad(out, inputs, grad.to(inside)))
        out, *gradients = (t.detach().to(dtype) if rounded else t.detach() for t in found)
        return out, lse.detach(), *gradients

    return run(torch.float32, lost, True), run(torch.float64, None, False), run(dtype, None, False)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_kernel_that_rounds_better_than_eager_keeps_every_block(dtype: torch.dtype) -> None:
    for output, exact, eager in zip(*attention_results(dtype)):
        verdict = compare(output, exact, eager)
        assert verdict.ok, verdict.describe()
        assert 0 < verdict.block_ratio <= 1 or output.numel() <= accuracy.BLOCK


@pytest.mark.parametrize("dtype", HALF_TYPES)
@pytest.mark.parametrize(
    "lost",
    [
        (slice(960, 1024), slice(128, 144)),
        (slice(992, 1024), slice(0, 16)),
        (slice(768, 1024), slice(640, 642)),
    ],
    ids=["16 keys of 64 late rows", "16 keys of 32 late rows", "two keys of a quarter"],
)
def test_keys_that_late_causal_rows_lose_are_found_out(lost: tuple[slice, slice], dtype: torch.dtype) -> None:
    verdicts = [compare(*results) for results in zip(*attention_results(dtype, lost))]
    out, lse, grad_q, grad_k, grad_v = verdicts
    assert not out.ok
    assert out.block[1] >= 768  # and it says where
    assert f"in the block at {out.block}" in out.describe()
    assert not lse.ok
    assert not grad_q.ok
    assert not grad_k.ok or not grad_v.ok


def test_one_maximum_and_one_mean_over_a_whole_tensor_let_a_loss_pass() -> None:
    """So that blocks are there for a reason."""
    lost = (slice(992, 1024), slice(0, 8))
    output, exact, eager = (results[0] for results in attention_results(torch.bfloat16, lost))
    verdict = compare(output, exact, eager)
    assert verdict.max_error <= verdict.error_budget
    assert verdict.rms_error <= verdict.rms_budget
    assert not verdict.ok
    assert verdict.block_ratio > 1


@pytest.mark.parametrize("shape", [(2, 3000), (3, 40, 70, 5), (1, 8192), (9, 2, 600), (5000,)])
def test_a_block_of_another_size_is_found_wherever_it_is(shape: tuple[int, ...]) -> None:
    reference = torch.randn(shape, dtype=torch.float64)
    eager = reference.float() * (1 + 1e-4 * torch.randn(shape))
    place = tuple(size - 1 for size in shape)
    corner = tuple(slice(max(size - 3, 0), size) for size in shape)
    reference[corner] *= 1e-5
    eager[corner] = reference[corner].float()
    output = reference.float()
    output[corner] *= 1 + 1e-1
    assert compare(reference.float(), reference, eager).ok
    squares = [t.double().square() for t in (output - reference, eager, reference)]
    blocks = accuracy._Blocks.of((0,) * len(shape), squares)
    assert math.prod(blocks.sizes) <= accuracy.BLOCK
    assert all(size == whole or size <= accuracy.BLOCK for size, whole in zip(blocks.sizes, shape))
    grid = blocks.squares[0].shape
    assert all(-(-whole // size) == count for whole, size, count in zip(shape, blocks.sizes, grid))
    assert float(blocks.squares[2].sum()) == pytest.approx(float(reference.square().sum()))
    assert all(
        start <= at < start + size
        for start, at, size in zip(
            [(count - 1) * size for count, size in zip(grid, blocks.sizes)], place, blocks.sizes
        )
    )


def test_a_short_rest_is_part_of_the_block_before() -> None:
    """Of 130 queries, three to a block, the last alone is one draw of what a rounded output leaves."""
    squares = torch.rand(4, 130, 2, 256, dtype=torch.float64)
    blocks = accuracy._Blocks.of((0,) * 4, [squares] * 3)
    rows = blocks.sizes[1]
    assert 0 < 130 % rows < rows / 2
    assert blocks.squares[0].shape[1] == 130 // rows
    assert torch.allclose(blocks.squares[0][:, -1].sum(), squares[:, 130 // rows * rows - rows :].sum())


@pytest.mark.parametrize(("share", "right"), [(0.02, True), (1.0, False)])
def test_where_terms_cancel_a_block_may_hold_a_little_of_the_usual_error(share: float, right: bool) -> None:
    """The gradient of queries that see one key is zero: eager may leave exactly that."""
    reference = torch.randn(64, 4, 64, dtype=torch.float64)
    reference[:16] = 0
    eager = reference.bfloat16()
    output = eager.clone()
    output[:16] = share * (eager.double() - reference).square().mean().sqrt() * torch.randn(16, 4, 64)
    assert compare(output, reference, eager).ok == right


def test_a_peers_larger_budget_is_that_many_times_ours(reference: torch.Tensor) -> None:
    eager = noisy(reference, 1e-3)
    output = (reference + 3 * (eager.double() - reference)).float()
    ours, theirs = compare(output, reference, eager), compare(output, reference, eager, 4.0)
    assert (ours.ok, theirs.ok) == (False, True)
    assert theirs.error_budget == pytest.approx(4 * ours.error_budget)


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


# ----------------------------------------------------------------------------------------------------------
# Poisoned memory
# ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [*HALF_TYPES, torch.float32, torch.float64])
def test_fresh_memory_is_nan_under_poison(dtype: torch.dtype, device: torch.device) -> None:
    like = torch.zeros(4, 6, dtype=dtype, device=device)
    with poison_allocations():
        fresh = (
            torch.empty(3, 5, dtype=dtype, device=device),
            torch.empty_like(like),
            torch.empty_like(like.t()),
            like.new_empty(7),
            like.new_empty_strided((2, 3), (1, 2)),
            torch.empty_strided((2, 3), (1, 2), dtype=dtype, device=device),
            torch.empty_permuted((2, 3), (1, 0), dtype=dtype, device=device),
        )
    assert all(bool(tensor.isnan().all()) for tensor in fresh)


@pytest.mark.parametrize("before", [False, True])
def test_poison_leaves_the_settings_as_they_were(before: bool) -> None:
    torch.use_deterministic_algorithms(before, warn_only=before)
    try:
        with pytest.raises(KeyError), poison_allocations():
            raise KeyError
        assert torch.are_deterministic_algorithms_enabled() is before
        assert torch.is_deterministic_algorithms_warn_only_enabled() is before
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int32, torch.int64])
@pytest.mark.parametrize("shape", [(), (1,), (0, 3), (5, 3, 2), (2, 3, 1, 4)])
def test_a_strided_view_is_equal_and_alone(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> None:
    tensor = torch.randint(0, 9, shape).to(device, dtype)
    generator = torch.Generator().manual_seed(1)
    for _ in range(5):
        surrounded = strided_view(tensor, generator)
        assert torch.equal(surrounded.tensor, tensor)
        assert surrounded.tensor.untyped_storage().data_ptr() == surrounded.buffer.data_ptr()
        assert surrounded.surroundings_untouched()
        surrounded.tensor.fill_(3)
        assert surrounded.surroundings_untouched()
        surrounded.buffer[-1] = 3
        assert not surrounded.surroundings_untouched()


def test_a_strided_view_of_a_leaf_is_a_leaf() -> None:
    leaf = torch.ones(3, 4, requires_grad=True)
    view = strided_view(leaf, torch.Generator().manual_seed(1)).tensor
    assert view.is_leaf
    assert view.requires_grad
    assert not view.is_contiguous()


# ----------------------------------------------------------------------------------------------------------
# The checks of all cases, on an operator that is faulty in one way at a time
# ----------------------------------------------------------------------------------------------------------


def scaled(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """The definition of the operator under test here."""
    return (x.to(torch.promote_types(x.dtype, torch.float32)) * scale).to(x.dtype)


def right(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x).copy_(scaled(x, scale))


def leaves_the_end_unwritten(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return torch.cat((scaled(x, scale)[:-1], torch.empty_like(x[-1:])))


def forgets_a_gradient(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return scaled(x, scale.detach())


def halves_a_gradient(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return scaled(x, 0.5 * scale + 0.5 * scale.detach())


def overwrites_its_input(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    x.data.zero_()  # not seen by the version counter, as a kernel's stores are not
    return x * scale


def returns_float32(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return x.float() * scale


def raises(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    raise BackendError("scaled: not today")


def make_inputs(case: Case, device: torch.device, generator: torch.Generator) -> Inputs:
    x = torch.randn(case["n"], 3, generator=generator).to(device, torch.bfloat16).requires_grad_()
    return {"x": x, "scale": torch.randn(3, generator=generator).to(device).requires_grad_()}


def operator_of(function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Operator:
    def choose(x: torch.Tensor, scale: torch.Tensor, backend: str) -> torch.Tensor:
        return function(x, scale)

    return Operator("scaled", choose, scaled, make_inputs, ({"n": 7}, {"n": 2}))


def test_a_right_operator_passes(device: torch.device) -> None:
    results = check_operator(operator_of(right), "torch", device)
    assert [(r.case["n"], r.mode, r.dtype, r.ok) for r in results] == [
        (7, "fwd", "bfloat16", True),
        (7, "bwd", "bfloat16", True),
        (2, "fwd", "bfloat16", True),
        (2, "bwd", "bfloat16", True),
    ]


def test_the_reference_runs_in_float64_and_in_the_inputs_own_dtype(device: torch.device) -> None:
    dtypes = set()

    def definition(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        dtypes.add(x.dtype)
        return scaled(x, scale)

    check_operator(replace(operator_of(right), reference=definition), "torch", device)
    assert dtypes == {torch.float64, torch.bfloat16}


@pytest.mark.parametrize(
    ("function", "mode", "word"),
    [
        (leaves_the_end_unwritten, "fwd", "NaN"),
        (forgets_a_gradient, "bwd", "output 1"),
        (halves_a_gradient, "bwd", "output 1"),
        (overwrites_its_input, "fwd", "modified its inputs: x"),
        (returns_float32, "fwd", "torch.float32"),
        (raises, "fwd", "BackendError: scaled: not today"),
    ],
)
def test_a_faulty_operator_is_found_out(
    function: Callable[..., torch.Tensor], mode: str, word: str, device: torch.device
) -> None:
    faults = [r for r in check_operator(operator_of(function), "torch", device) if not r.ok]
    assert [fault.case["n"] for fault in faults if fault.mode == mode] == [7, 2]
    assert all(word in fault.detail and fault.ratio > 1 for fault in faults if fault.mode == mode)


@pytest.mark.parametrize("place", range(3))
def test_a_fault_in_one_of_several_draws_is_found_out(place: int, device: torch.device) -> None:
    calls = itertools.count()

    def wrong_once(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return scaled(x, scale) * (1.25 if next(calls) == place else 1)

    draws = [make_inputs({"n": 7}, device, torch.Generator().manual_seed(seed)) for seed in range(3)]
    judgement = judge_draws(operator_of(wrong_once), draws, "torch")
    for verdict in (judgement.fwd, judgement.bwd):
        assert verdict is not None
        assert not verdict.ok
    assert judge_draws(operator_of(right), draws, "torch").fwd.ok


@pytest.mark.parametrize("place", [0, 11])
@pytest.mark.parametrize("kind", ["written in the place of another", "halved"])
def test_one_wrong_element_of_one_in_sixteen_draws_is_found_out(
    kind: str, place: int, device: torch.device
) -> None:
    calls = itertools.count()

    def wrong_once(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        out = scaled(x, scale)
        if next(calls) == place:
            out[2, 1] = out[2, 0] if kind != "halved" else out[2, 1] / 2
        return out

    def wrong_gradient_once(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        """That of one number of ``scale``, of three."""
        part = 0 if kind != "halved" else 0.5
        share = torch.tensor([1.0, part if next(calls) == place else 1.0, 1.0]).to(scale)
        return scaled(x, share * scale + ((1 - share) * scale).detach())

    draws = [make_inputs({"n": 7}, device, torch.Generator().manual_seed(seed)) for seed in range(16)]
    assert not judge_draws(operator_of(wrong_once), draws, "torch").fwd.ok
    calls = itertools.count()
    judgement = judge_draws(operator_of(wrong_gradient_once), draws, "torch")
    assert judgement.fwd.ok
    assert judgement.bwd is not None
    assert not judgement.bwd.ok
    assert judgement.bwd.output == 1


def test_draws_share_a_budget(device: torch.device) -> None:
    """Where the reference happens to be exact, what it errs with other inputs is a measure."""
    lucky, usual = (make_inputs({"n": 40}, device, torch.Generator().manual_seed(seed)) for seed in range(2))
    lucky["x"] = torch.zeros_like(lucky["x"], requires_grad=True)
    operator = operator_of(lambda x, scale: scaled(x, scale) + 2**-10)
    assert not judge(operator, lucky, "torch").fwd.ok
    assert judge_draws(operator, [lucky, usual], "torch").fwd.ok


def test_inputs_are_drawn_until_results_have_enough_elements(device: torch.device) -> None:
    draws = make_draws(operator_of(right), {"n": 200}, device)
    assert len(draws) == (16 if device.type == "cuda" else 1), "16 gradients of a scale have 48 elements"
    assert not any(torch.equal(a["x"], b["x"]) for a, b in itertools.pairwise(draws))
    assert len(make_draws(operator_of(right), {"n": 0}, device)) == 1


def test_reading_beside_a_view_is_found_out() -> None:
    def reads_on(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        flat = torch.as_strided(x, (x.numel(),), (1,))  # takes for granted that rows are adjacent
        return scaled(flat.view(x.shape), scale)

    operator = operator_of(reads_on)
    inputs = make_inputs({"n": 7}, torch.device("cpu"), torch.Generator().manual_seed(0))
    assert judge(operator, inputs, "torch").fwd.ok
    inputs["x"] = strided_view(inputs["x"], torch.Generator().manual_seed(0)).tensor
    assert "NaN" in judge(operator, inputs, "torch").fwd.describe()


def test_blocks_are_charged_with_what_is_beyond_a_spared_error() -> None:
    """A limit of one element excuses that element, and no other block."""
    reference = torch.randn(256, 64, dtype=torch.float64)
    reference[128:] *= 1e-6
    eager = reference.float()
    spared = torch.zeros_like(reference)
    spared[200, 7] = 1e-3
    output = eager.clone()
    output[200, 7] += 1e-3
    charged = [accuracy.compare_each(output, reference, eager, spared=given)[0] for given in (None, [spared])]
    assert [verdict.block_ratio > 1 for verdict in charged] == [True, False]
    output[130] = 0.0
    assert accuracy.compare_each(output, reference, eager, spared=[spared])[0].block_ratio > 1
