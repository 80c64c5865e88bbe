"""Every operator of the registry, on each of its own cases, with each backend: the contract of all operators.

Nothing here knows any one operator. A case is JSON values; four of its keys have a meaning common to all
operators: the operator's ``length`` (``n`` by default), ``batch``, the first size of whatever differs from one
batch entry to the next, ``dtype``, the dtype of the first tensor and, where there is one, an integer ``offset``,
a position.
"""

import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from launches import MERGING, ON_GPU
from strided import strided_view
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils._python_dispatch import TorchDispatchMode

from warploom.errors import ArgumentError, BackendError
from warploom.ops import operators
from warploom.ops.spec import Case, Inputs, Operator, Outputs, normal
from warploom.runtime.backend import HAS_TRITON
from warploom.testing.accuracy import Accuracy, compare, compare_each, mean_of, worst_of
from warploom.testing.conformance import (
    SEED,
    as_tuple,
    check_operator,
    compute_gradients,
    draw_like,
    find_leaves,
    judge_draws,
    make_draws,
    make_inputs,
    make_more_draws,
    upcast,
)
from warploom.testing.poison import poison_allocations

OPERATORS = tuple(operators().values())
BACKENDS = ("torch", "triton") if HAS_TRITON else ("torch",)

Tensors = tuple[torch.Tensor, ...]


def name_of(operator: Operator, case: Case) -> str:
    """What sets a case apart from the operator's first one."""
    usual = operator.check_cases[0]
    odd = [f"{key}={json.dumps(value)}" for key, value in case.items() if usual.get(key) != value]
    return ",".join(odd).replace('"', "").replace(" ", "") or "first"


def cases(
    *backends: str,
    select: Callable[[Operator, Case], bool] = lambda operator, case: True,
    at_most: int | None = None,
    stack: bool = False,
) -> pytest.MarkDecorator:
    """Parametrise over operators, their cases (spread evenly when there may be ``at_most``) and backends.

    ``stack``: every second one on the kernels runs with other versions of Triton too.
    """
    chosen = []
    for operator in OPERATORS:
        some = [case for case in operator.check_cases if select(operator, case)]
        if at_most is not None:
            some = some[:: max(1, -(-len(some) // at_most))]
        chosen += [
            pytest.param(
                operator,
                case,
                backend,
                id=f"{operator.name}-{name_of(operator, case)}-{backend}",
                marks=[pytest.mark.stack] if stack and backend == "triton" and number % 2 == 0 else [],
            )
            for number, case in enumerate(some)
            for backend in backends
        ]
    return pytest.mark.parametrize(("operator", "case", "backend"), chosen)


def small(case: Case) -> Case:
    """A case of one batch entry in the interpreter, for what runs it many times and is not about its values."""
    return case if ON_GPU else {**case, "batch": 1}


def run(operator: Operator, inputs: Inputs, backend: str) -> tuple[Tensors, Tensors]:
    """Outputs and gradients."""
    outputs = operator.function(**inputs, backend=backend)
    found = compute_gradients(outputs, inputs, draw_like(outputs)) if find_leaves(inputs) else {}
    return tuple(o.detach() for o in as_tuple(outputs)), tuple(found.values())


def same_bits(one: Tensors, other: Tensors) -> bool:
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other))


def differentiate_forward(function: Callable[..., Outputs], inputs: Inputs, tangents: Tensors) -> Tensors:
    """Outputs' tangents of a function, given those of its leaves."""
    leaves = find_leaves(inputs)

    def run(*values: torch.Tensor) -> Outputs:
        return function(**{**inputs, **dict(zip(leaves, values))})

    values = tuple(leaf.detach() for leaf in leaves.values())
    given = tuple(tangent.to(leaf.dtype) for tangent, leaf in zip(tangents, values))
    return as_tuple(torch.func.jvp(run, values, given)[1])


def tensors(inputs: Inputs) -> dict[str, torch.Tensor]:
    return {name: value for name, value in inputs.items() if isinstance(value, torch.Tensor)}


def assert_accurate(
    operator: Operator, draws: list[Inputs], backend: str, more: Callable[[], list[Inputs]], promised: float = 1.0
) -> None:
    judgement = judge_draws(operator, draws, backend, more)
    assert judgement.fwd.ok, f"fwd: {judgement.fwd.describe()}"
    bwd = judgement.bwd
    if bwd is not None and not bwd.ok:
        assert not bwd.problem, bwd.describe()
        assert bwd.ratio <= promised, f"bwd: {bwd.describe()}"
    assert not judgement.modified


def assert_case_accurate(operator: Operator, case: Case, backend: str, device: torch.device) -> None:
    draws = make_draws(operator, case, device)
    assert_accurate(operator, draws, backend, lambda: make_more_draws(operator, case, device, draws))


# ----------------------------------------------------------------------------------------------------------
# Right results
# ----------------------------------------------------------------------------------------------------------


@cases(*BACKENDS, stack=True)
def test_error_budget(operator: Operator, case: Case, backend: str, device: torch.device) -> None:
    assert_case_accurate(operator, case, backend, device)


@cases(*BACKENDS)
def test_forward_mode(operator: Operator, case: Case, backend: str, device: torch.device) -> None:
    """Tangents are within the budget of those of the reference; only a backend asked for by name may refuse."""

    def judge_tangents(draws: list[Inputs]) -> Accuracy:
        by_draw = []
        for inputs in draws:
            tangents = draw_like(tuple(find_leaves(inputs).values()))
            with poison_allocations():
                function = functools.partial(operator.function, backend=backend)
                found = differentiate_forward(function, inputs, tangents)
            exact = differentiate_forward(operator.reference, upcast(inputs), tangents)
            eager = differentiate_forward(operator.reference, inputs, tangents)
            assert [x.shape for x in found] == [x.shape for x in exact]
            by_draw.append(compare_each(found, exact, eager))
        return worst_of([mean_of(of_output) for of_output in zip(*by_draw, strict=True)])

    draws = make_draws(operator, case, device)
    if not find_leaves(draws[0]):
        pytest.skip("nothing to differentiate")
    try:
        verdict = judge_tangents(draws)
    except BackendError as error:
        if backend != "triton" or "forward mode" not in str(error):
            raise
        return
    if not verdict.ok and not verdict.problem:
        verdict = judge_tangents([*draws, *make_more_draws(operator, case, device, draws)])
    assert verdict.ok, verdict.describe()


@pytest.mark.sample(3)
@pytest.mark.skipif(not HAS_TRITON, reason="needs Triton")
@cases("triton", select=lambda operator, case: case[operator.length] < 1000, at_most=12)
@pytest.mark.seldom(3, 3)
def test_integers_wrap_where_they_are_meant_to(
    operator: Operator, case: Case, backend: str, checked_integers: None, device: torch.device
) -> None:
    run(operator, make_inputs(operator, case, device), backend)


@pytest.mark.gpu
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("operator", [operator.name for operator in OPERATORS])
def test_checks_pass_with_tritons_assertions(operator: str) -> None:
    command = [sys.executable, "-m", "warploom", "check", operator]
    environment = {**os.environ, "TRITON_DEBUG": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]


@cases(*BACKENDS, at_most=None if ON_GPU else 8)
def test_any_strides_and_nothing_outside_is_read_or_written(
    operator: Operator, case: Case, backend: str, device: torch.device
) -> None:
    generator = torch.Generator().manual_seed(SEED)
    views = []

    def surround(inputs: Inputs) -> Inputs:
        surrounded = {name: strided_view(value, generator) for name, value in tensors(inputs).items()}
        views.extend(surrounded.items())
        return {**inputs, **{name: s.tensor for name, s in surrounded.items()}}

    draws = [surround(inputs) for inputs in make_draws(operator, case, device)]
    more = lambda: [surround(inputs) for inputs in make_more_draws(operator, case, device, draws)]  # noqa: E731
    assert_accurate(operator, draws, backend, more)
    for name, s in views:
        assert s.surroundings_untouched(), name


@cases("reference")
def test_gradcheck_of_the_reference(operator: Operator, case: Case, backend: str) -> None:
    exact = upcast(make_inputs(operator, case, torch.device("cpu")))
    wanted = find_leaves(exact)
    if not wanted:
        pytest.skip("nothing to differentiate")

    def function(*values: torch.Tensor) -> Outputs:
        return operator.reference(**{**exact, **dict(zip(wanted, values))})

    # The small step suits functions that oscillate quickly, such as a cosine of a position times a frequency.
    assert torch.autograd.gradcheck(function, tuple(wanted.values()), eps=1e-9, atol=1e-4, fast_mode=True)


@cases(*BACKENDS, at_most=None if ON_GPU else 3)
def test_two_runs_give_the_same_bits(operator: Operator, case: Case, backend: str, device: torch.device) -> None:
    inputs = make_inputs(operator, case, device)
    outputs, found = run(operator, inputs, backend)
    with poison_allocations():  # other contents of fresh memory, in case a result depends on them
        outputs_again, found_again = run(operator, inputs, backend)
    assert same_bits(outputs, outputs_again)
    assert same_bits(found, found_again)


@pytest.mark.parametrize("operator", OPERATORS, ids=lambda operator: operator.name)
def test_check_operator_reports_every_case(operator: Operator, device: torch.device) -> None:
    results = check_operator(operator, "torch", device)
    assert {json.dumps(result.case) for result in results} == {json.dumps(dict(c)) for c in operator.check_cases}
    wanted = any(find_leaves(make_inputs(operator, case, device)) for case in operator.check_cases)
    assert {result.mode for result in results} == ({"fwd", "bwd"} if wanted else {"fwd"})
    assert all(result.ok and result.ratio <= 1 for result in results)


# ----------------------------------------------------------------------------------------------------------
# At home in PyTorch
# ----------------------------------------------------------------------------------------------------------


@cases(*BACKENDS, at_most=None if ON_GPU else 6)
def test_meta_tensors_have_the_layout_of_real_ones(
    operator: Operator, case: Case, backend: str, device: torch.device
) -> None:
    inputs = make_inputs(operator, case, device)
    on_meta = {name: t.detach().to("meta") for name, t in tensors(inputs).items()}
    real = as_tuple(operator.function(**inputs, backend=backend))
    meta = as_tuple(operator.function(**{**inputs, **on_meta}, backend=backend))
    for one, other in zip(real, meta, strict=True):
        assert other.is_meta
        assert (one.shape, one.dtype, one.stride()) == (other.shape, other.dtype, other.stride())


class Recorder(TorchDispatchMode):
    """Keeps the calls of warploom's registered operators that pass through the dispatcher."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...]]] = []

    def __torch_dispatch__(
        self,
        function: Any,
        types: Any,
        arguments: tuple[Any, ...] = (),
        keywords: dict[str, Any] | None = None,
    ) -> Any:
        if function.namespace == "warploom":
            self.calls.append((function, arguments))
        return function(*arguments, **(keywords or {}))


@pytest.mark.skipif(not HAS_TRITON, reason="the registered operators run Triton kernels")
@cases("triton", at_most=4 if ON_GPU else 2)
def test_opcheck_of_the_registered_operators(
    operator: Operator, case: Case, backend: str, device: torch.device
) -> None:
    inputs = make_inputs(operator, small(case), device)
    with Recorder() as recorder:
        run(operator, inputs, backend)
    assert recorder.calls, "a dispatch mode must see the registered operators, not only the eager short cut"
    for function, arguments in recorder.calls:
        differentiable = bool(find_leaves(inputs)) and "backward" not in function.name()  # no second derivatives
        fresh = tuple(
            value.detach().clone().requires_grad_(differentiable and value.is_floating_point())
            if isinstance(value, torch.Tensor)
            else value
            for value in arguments
        )
        torch.library.opcheck(function, fresh)


@pytest.mark.sample(2)
@pytest.mark.usefixtures("fresh_dynamo")
@cases(*BACKENDS, at_most=6 if ON_GPU else 3)
def test_compiled_equals_eager(operator: Operator, case: Case, backend: str, device: torch.device) -> None:
    inputs = make_inputs(operator, case, device)
    compiled = torch.compile(operator.function, fullgraph=True, backend="aot_eager")
    outputs, found = run(operator, inputs, backend)
    traced = compiled(**inputs, backend=backend)
    traced_gradients = compute_gradients(traced, inputs, draw_like(traced)) if find_leaves(inputs) else {}
    if backend == "torch":
        # Traced products may have other sizes and strides, for which a BLAS adds in other orders.
        for eager, other in zip((*outputs, *found), (*as_tuple(traced), *traced_gradients.values()), strict=True):
            tolerance = 1e-4 if eager.element_size() > 2 else 1.6e-2
            torch.testing.assert_close(other, eager, rtol=tolerance, atol=tolerance)
    else:
        assert same_bits(outputs, as_tuple(traced))
        assert same_bits(found, tuple(traced_gradients.values()))


def at_other_lengths(operator: Operator, case: Case, device: torch.device) -> list[Inputs]:
    """The inputs of a case at several lengths, and at several offsets where it has one."""
    has_offset = isinstance(case.get("offset"), int)
    offsets = [{"offset": offset} for offset in (16, 1001)] if has_offset else [{}]
    variations = [{operator.length: length} for length in (19, 37)] + [{operator.length: 24, **o} for o in offsets]
    return [make_inputs(operator, {**small(case), **variation}, device) for variation in variations]


def has_free_length(operator: Operator, case: Case) -> bool:
    """Whether the length of a case can be changed alone: nothing else in it is a list of sizes."""
    return case[operator.length] > 1 and not any(isinstance(value, list | tuple) for value in case.values())


@pytest.mark.sample(2)
@pytest.mark.usefixtures("fresh_dynamo")
@cases(*BACKENDS, select=has_free_length, at_most=4 if ON_GPU else 1)
@pytest.mark.seldom(3, 2)
def test_a_new_length_or_offset_retraces_nothing(
    operator: Operator, case: Case, backend: str, device: torch.device
) -> None:
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(operator.function, fullgraph=True, backend=counter, dynamic=True)
    frames = []
    for inputs in at_other_lengths(operator, case, device):
        outputs, found = run(operator, inputs, backend)
        traced = compiled(**inputs, backend=backend)
        if backend == "triton" or not ON_GPU:  # a traced product of matrices can be another one of cuBLAS
            assert same_bits(outputs, as_tuple(traced))
        if find_leaves(inputs):
            traced_gradients = compute_gradients(traced, inputs, draw_like(traced))
            if backend == "triton" or not ON_GPU:
                assert same_bits(found, tuple(traced_gradients.values()))
        frames.append(counter.frame_count)
    assert frames == [frames[0]] * len(frames)  # the first call's frame may be analysed twice


@cases(*BACKENDS, at_most=4 if ON_GPU else 2)
def test_torch_func_gives_the_same_gradients(
    operator: Operator, case: Case, backend: str, device: torch.device
) -> None:
    inputs = make_inputs(operator, case, device)
    wanted = find_leaves(inputs)
    if not wanted:
        pytest.skip("nothing to differentiate")
    outputs, found = run(operator, inputs, backend)

    def function(*values: torch.Tensor) -> Outputs:
        return operator.function(**{**inputs, **dict(zip(wanted, values))}, backend=backend)

    results, pull_back = torch.func.vjp(function, *(value.detach() for value in wanted.values()))
    grads = draw_like(results)
    torch.testing.assert_close(as_tuple(results), outputs)
    pulled_back = pull_back(grads[0] if isinstance(results, torch.Tensor) else grads)
    torch.testing.assert_close(pulled_back, found)  # PyTorch's own formulas differ in the last bits here


@pytest.mark.skipif(not HAS_TRITON, reason="needs Triton")
@cases("triton", at_most=4 if ON_GPU else 2)
def test_autocast_casts_inputs_or_changes_nothing(
    operator: Operator, case: Case, backend: str, device: torch.device
) -> None:
    inputs = make_inputs(operator, case, device)
    cast = {name: inputs[name] for name in operator.autocasts if inputs[name] is not None}
    low = {name: x.detach().bfloat16().requires_grad_(x.requires_grad) for name, x in cast.items()}
    outputs, found = run(operator, {**inputs, **low}, backend)
    with torch.autocast(device.type, torch.bfloat16):
        outputs_under_autocast, found_under_autocast = run(operator, inputs, backend)
    assert same_bits(outputs, outputs_under_autocast)
    assert same_bits(found, tuple(one.to(other.dtype) for one, other in zip(found_under_autocast, found)))


# ----------------------------------------------------------------------------------------------------------
# The choice of backend
# ----------------------------------------------------------------------------------------------------------


@cases("cuda", "", "Triton", at_most=1)
def test_an_unknown_backend_is_refused(operator: Operator, case: Case, backend: str, device: torch.device) -> None:
    with pytest.raises(ArgumentError, match=f"{operator.name}.*backend"):
        operator.function(**make_inputs(operator, case, device), backend=backend)


@cases("triton", at_most=1)
def test_kernels_asked_for_on_a_cpu_are_refused(
    operator: Operator, case: Case, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if HAS_TRITON:
        monkeypatch.setattr("warploom.runtime.launch.INTERPRETED", False)
    with pytest.raises(BackendError, match=operator.name):
        operator.function(**make_inputs(operator, case, torch.device("cpu")), backend=backend)


@cases("auto")
@pytest.mark.filterwarnings("ignore::warploom.BackendWarning")
def test_auto_runs_every_case(operator: Operator, case: Case, backend: str, device: torch.device) -> None:
    """Gradients of PyTorch's own attention, on a CPU, are less exact, by what flash attention's guide says."""
    draws = make_draws(operator, case, device)
    promised = 1.5 if operator.name in ("flash_attention", "tpa_attention") and not ON_GPU else 1.0
    assert_accurate(operator, draws, backend, lambda: make_more_draws(operator, case, device, draws), promised)


# ----------------------------------------------------------------------------------------------------------
# On a GPU
# ----------------------------------------------------------------------------------------------------------


def compiled_kernels() -> int:
    """Compiled kernel variants that the launcher holds, but for those that merge parts."""
    from warploom.runtime.launch import _compiled

    kernels = [kernel for _, kernel, *_ in _compiled]
    return sum(not (kernel.is_gluon() or kernel.__name__ in MERGING) for kernel in kernels)


@pytest.mark.gpu
@cases("triton", select=has_free_length)
def test_a_new_length_or_offset_compiles_nothing(
    operator: Operator, case: Case, backend: str, device: torch.device
) -> None:
    first, *others = at_other_lengths(operator, case, device)
    run(operator, first, backend)
    before = compiled_kernels()
    for inputs in others:
        run(operator, inputs, backend)
    assert compiled_kernels() == before


@pytest.mark.gpu
@pytest.mark.usefixtures("fresh_dynamo")
@cases("triton", at_most=3)
def test_inductor_equals_eager(operator: Operator, case: Case, backend: str, device: torch.device) -> None:
    inputs = make_inputs(operator, case, device)
    outputs, found = run(operator, inputs, backend)
    traced = torch.compile(operator.function, fullgraph=True)(**inputs, backend=backend)
    traced_gradients = compute_gradients(traced, inputs, draw_like(traced)) if find_leaves(inputs) else {}
    assert same_bits(outputs, as_tuple(traced))
    assert same_bits(found, tuple(traced_gradients.values()))


@pytest.mark.gpu
@cases("triton")
def test_graph_replay_follows_changed_inputs(
    operator: Operator, case: Case, backend: str, device: torch.device
) -> None:
    inputs = make_inputs(operator, case, device)
    grad_outputs = draw_like(operator.reference(**inputs))
    wanted = find_leaves(inputs)

    def step() -> tuple[Tensors, Tensors]:
        outputs = operator.function(**inputs, backend=backend)
        found = compute_gradients(outputs, inputs, grad_outputs) if wanted else {}
        return as_tuple(outputs), tuple(found.values())

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured_outputs, captured_gradients = step()
    with torch.no_grad():
        for value in wanted.values():
            value.mul_(0.5).add_(0.125)
    graph.replay()
    outputs, found = step()
    assert same_bits(captured_outputs, outputs)
    assert same_bits(captured_gradients, found)


def batch_entries(inputs: Inputs, batch: int, start: int, stop: int) -> Inputs:
    """Some entries of a batch, as leaves of their own."""
    return {
        name: (t[start:stop] if t.shape[:1] == (batch,) else t).detach().requires_grad_(t.requires_grad)
        for name, t in tensors(inputs).items()
    } | {name: value for name, value in inputs.items() if not isinstance(value, torch.Tensor)}


@pytest.mark.gpu
@cases("triton", at_most=1)
def test_more_elements_than_32_bits_count(
    operator: Operator, case: Case, backend: str, device: torch.device, gpu_memory: Callable[[float], None]
) -> None:
    gpu_memory(64)
    case = {**case, "batch": 2, "dtype": "bfloat16"}
    entry = max(t.numel() for t in tensors(make_inputs(operator, case, device)).values()) // 2
    batch = 2**31 // entry + 3
    inputs = make_inputs(operator, {**case, "batch": batch}, device)
    outputs = operator.function(**inputs, backend=backend)
    grads = tuple(torch.randn_like(output) for output in as_tuple(outputs))
    found = compute_gradients(outputs, inputs, grads) if find_leaves(inputs) else {}
    for start in (0, batch // 2, batch - 3):
        part = slice(start, start + 3)
        low = batch_entries(inputs, batch, part.start, part.stop)
        exact = upcast(low)
        eager_outputs, exact_outputs = operator.reference(**low), operator.reference(**exact)
        forward = compare(
            tuple(o[part] for o in as_tuple(outputs)), as_tuple(exact_outputs), as_tuple(eager_outputs)
        )
        assert forward.ok, f"fwd from entry {start}: {forward.describe()}"
        if not found:
            continue
        part_grads = tuple(grad[part] for grad in grads)
        eager_found = compute_gradients(eager_outputs, low, part_grads)
        exact_found = compute_gradients(exact_outputs, exact, part_grads)
        batched = [name for name, value in found.items() if value.shape[:1] == (batch,)]
        backward = compare(
            tuple(found[name][part] for name in batched),
            tuple(exact_found[name] for name in batched),
            tuple(eager_found[name] for name in batched),
        )
        assert backward.ok, f"bwd from entry {start}: {backward.describe()}"


@pytest.mark.gpu
@cases("triton", at_most=8)
def test_the_current_stream_is_used(operator: Operator, case: Case, backend: str, device: torch.device) -> None:
    inputs = make_inputs(operator, case, device)
    expected, expected_gradients = run(operator, inputs, backend)
    late = {name: torch.zeros_like(t).requires_grad_(t.requires_grad) for name, t in tensors(inputs).items()}
    late_inputs = {**inputs, **late}
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(50_000_000)  # a kernel on another stream would run now, before the inputs arrive
        with torch.no_grad():
            for name, value in late.items():
                value.copy_(inputs[name])
        outputs, found = run(operator, late_inputs, backend)
    torch.cuda.synchronize()
    assert same_bits(outputs, expected)
    assert same_bits(found, expected_gradients)


@pytest.mark.gpu
@cases("triton", at_most=8)
def test_the_device_of_the_inputs_is_used(operator: Operator, case: Case, backend: str) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs a second GPU")
    expected, expected_gradients = run(operator, make_inputs(operator, case, torch.device("cuda", 0)), backend)
    outputs, found = run(operator, make_inputs(operator, case, torch.device("cuda", 1)), backend)
    assert all(t.device == torch.device("cuda", 1) for t in (*outputs, *found))
    assert same_bits(tuple(t.to("cuda:0") for t in outputs), expected)
    assert same_bits(tuple(t.to("cuda:0") for t in found), expected_gradients)


def test_inputs_are_drawn_anew_and_the_same_for_a_seed(device: torch.device) -> None:
    def draw(seed: int) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)
        return [normal((30, 1000), torch.bfloat16, device, generator) for _ in range(2)]

    (first, second), again, others = draw(1), draw(1), draw(2)
    assert torch.equal(first, again[0])
    assert torch.equal(second, again[1])
    for other in (second, *others):
        assert (first == other).double().mean() < 0.1
    assert abs(first.double().mean()) < 0.03
    assert abs(first.double().std() - 1) < 0.03
