"""Fingerprints of the kernels that a case launches, and of nothing else.

A case is planned as for the GPU that it was measured on, on tensors whose memory is never touched, and its launches
are recorded instead of run. What counts of a kernel is its source without comments and docstrings, that of the
functions of ours that it calls, the constants that it reads, and how it is launched: types, compile-time values and
options. Names of files and of functions do not count, nor does the host code around a launch.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import inspect
import re
import sys
import textwrap
from collections.abc import Callable, Mapping
from typing import Any

import torch

from warploom.ops.spec import Bench, Case, Inputs, Operator, Unsupported
from warploom.runtime.backend import HAS_TRITON

LIMIT = "limit"
"""The name of the provider that is the measured limit."""
_GPU = re.compile(r"sm_(\d+)/(\d+)")
UNKNOWN = "unknown"
"""The fingerprint where launches cannot be planned: without Triton, or in its interpreter."""


def gpu_of(environment: Mapping[str, Any]) -> str:
    """Returns the properties of a GPU that plans depend on, as ``sm_90/132``; an empty text for a CPU."""
    capability = str(environment.get("compute_capability", "")).replace(".", "")
    return f"sm_{capability}/{environment['multiprocessors']}" if capability else ""


def fingerprint(bench: Bench, case: Case, provider: str, mode: str, gpu: str) -> str:
    """Returns ``sm_90/132/…`` for what a provider launches in a case and mode, or its source if it is a user's own.

    It is empty for what is PyTorch's or another package's.

    Args:
        bench: Of the case.
        case: Its parameters.
        provider: A provider's name, or `LIMIT`.
        mode: ``fwd``, ``bwd`` or ``fwd_bwd``, alone or replayed from a CUDA graph.
        gpu: From `gpu_of`, or an earlier fingerprint from the same GPU.
    """
    if provider != LIMIT and not bench.runs_kernels(provider) and bench.launches is None:
        return _of_builder(bench.every_provider.get(provider))
    run = functools.partial(_launch, bench, case, provider, mode)
    return of_calls(run if provider != LIMIT else None, gpu)


def builds_of(
    bench: Bench, case: Case, provider: str, mode: str, gpu: str, drawn: bool = True
) -> dict[tuple[Any, ...], Any]:
    """Returns what has to be compiled for a provider on a GPU, by its key, in the order of launches.

    Inputs are ``drawn``, which takes time, or have any numbers.
    """
    return _record_builds(functools.partial(_launch, bench, case, provider, mode, drawn=drawn), gpu)


def _launch(bench: Bench, case: Case, provider: str, mode: str, drawn: bool = False) -> None:
    """Launch what a provider launches, on inputs as they are drawn, or without what it takes to draw them."""
    if bench.launches is not None:
        bench.launches(case, provider)
        return
    cpu = torch.device("cpu")
    operator = bench.operator_of(provider)
    inputs = operator.make_inputs(case, cpu, torch.Generator()) if drawn else _make_untouched(operator, case)
    with torch.set_grad_enabled("bwd" in mode):
        results = bench.every_provider[provider](case)(**inputs)
    results = results if isinstance(results, tuple) else (results,)
    if outputs := [result for result in results if result.requires_grad]:
        wanted = [value for value in inputs.values() if getattr(value, "requires_grad", False)]
        torch.autograd.grad(outputs, wanted, list(map(torch.empty_like, outputs)), allow_unused=True)


def _record_builds(run: Callable[[], object], gpu: str) -> dict[tuple[Any, ...], Any]:
    from warploom.runtime import launch

    capability, multiprocessors = map(int, _GPU.match(gpu).groups())  # type: ignore[union-attr]
    with launch.record_builds(capability, multiprocessors) as builds:
        run()
    return builds


def of_calls(run: Callable[[], object] | None, gpu: str) -> str:
    """Returns the fingerprint of what a function launches on CPU tensors, in the order of first launches.

    Args:
        run: The function; None for the kernel that measures the limit.
        gpu: As in `fingerprint`; there is nothing to launch on any other.
    """
    known = _GPU.match(gpu)
    if known is None:
        return ""
    if not HAS_TRITON:
        return UNKNOWN
    from warploom.runtime import launch

    if launch.INTERPRETED:
        return UNKNOWN
    capability, multiprocessors = map(int, known.groups())
    if run is None:
        from warploom.bench.stream_kernel import CONFIGURATIONS, stream_kernel

        parts = [source_of(stream_kernel), str(CONFIGURATIONS)]
    else:
        try:
            builds = _record_builds(run, gpu)
        except Unsupported:
            return ""
        parts = [part for build in builds.values() for part in (source_of(build.function), build.variant)]
    return f"sm_{capability}/{multiprocessors}/{_digest(*parts)}"


def differs(measured: str, current: Callable[[], str]) -> bool:
    """Returns True if a case now launches other kernels than were measured; False if that cannot be found out.

    Args:
        measured: The fingerprint in a record.
        current: Works out that of today; it raises for a case that today's code does not know, an old record's.
    """
    try:
        return current() not in (measured, UNKNOWN)
    except Exception:  # the case is data from a file, and may fail anywhere in an operator
        return True


def _of_builder(builder: Any) -> str:
    """Returns the fingerprint of a provider from outside this package; empty for any other, or one typed in."""
    parts = (builder.func, *builder.args) if isinstance(builder, functools.partial) else (builder,)
    try:
        return " ".join(source_of(part) for part in parts if not part.__module__.startswith("warploom."))
    except (AttributeError, OSError, SyntaxError, TypeError):
        return ""


def _make_untouched(operator: Operator, case: Case) -> Inputs:
    """Returns the inputs of a case with undefined values: planning reads none of them."""

    def allocate(value: Any) -> Any:
        if isinstance(value, tuple) and hasattr(value, "_make"):  # of tensors, as a mask is
            return value._make(map(allocate, value))
        if not isinstance(value, torch.Tensor):
            return value
        like = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)
        return like.requires_grad_(value.requires_grad)

    with _fake():
        inputs = operator.make_inputs(case, torch.device("cpu"), torch.Generator())
    return {name: allocate(value) for name, value in inputs.items()}


@functools.cache
def _fake() -> Any:
    """Returns the mode of tensors without memory, whose operators compute nothing."""
    from torch._subclasses.fake_tensor import FakeTensorMode  # takes seconds

    return FakeTensorMode()


@functools.cache
def source_of(function: Any) -> str:
    """Returns the digest of a function or class, and of all that it uses but PyTorch, Triton and Python's own."""
    reached = [function]
    return _digest(*(_normalise(each, reached) for each in reached))


@functools.cache
def _text_of(function: Any) -> str:
    """Returns source, which it takes long to find in a file."""
    return textwrap.dedent(inspect.getsource(function))


def _normalise(function: Any, reached: list[Any]) -> str:
    """Returns source without comments, docstrings and functions' names; adds what it refers to to ``reached``."""
    plain = getattr(function, "fn", function)
    known = sys.modules[plain.__module__].__dict__
    tree = ast.parse(_text_of(plain))
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            node.name = "_"
            texts = [x for x in node.body if isinstance(x, ast.Expr) and isinstance(x.value, ast.Constant)]
            node.body = [x for x in node.body if x not in texts] or [ast.Pass()]
        elif isinstance(node, ast.Name) and node.id in known:
            node.id = _meaning(node.id, known[node.id], reached)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            module = known.get(node.value.id)
            if inspect.ismodule(module):
                node.attr = _meaning(node.attr, getattr(module, node.attr, None), reached)
    return ast.unparse(tree)


def _meaning(name: str, value: Any, reached: list[Any]) -> str:
    """Returns the meaning of a global name: a function's place in ``reached``, a constant, or the name itself."""
    if hasattr(value, "fn") or inspect.isfunction(value) or inspect.isclass(value):
        package = getattr(value, "fn", value).__module__.partition(".")[0]
        others = {"triton", "torch"} | sys.stdlib_module_names
        if package in others or (package == "warploom" and inspect.isfunction(value)):
            return name
        if value not in reached:
            reached.append(value)
        return f"_{reached.index(value)}"
    value = value.value if type(value).__name__ == "constexpr" else value
    return repr(value) if value is None or isinstance(value, bool | int | float | str | tuple) else name


def _digest(*parts: str) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]
