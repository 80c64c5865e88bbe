"""A call as Python that a person can paste: its tensors in their memory, and its error against float64."""

from __future__ import annotations

from collections.abc import Sequence

from random_cases.calls import Call

__all__ = ["python_of"]

_HEAD = """import torch
from random_cases import function_of, gradients_of, reference_of
from random_cases.arrays import Array, Memory, place


def largest(errors):
    return errors.detach().abs().max().item() if errors.numel() else 0.0


def exact(x):
    return x.detach().double().requires_grad_(x.requires_grad) if x.is_floating_point() else x
"""


def python_of(calls: Sequence[Call], device: str, backend: str | None = None) -> str:
    """Returns a script that makes these calls, the last of which failed.

    Args:
        calls: As in a `Fault`.
        device: ``cuda`` or ``cpu``.
        backend: What every call runs on; None for its own choice.
    """
    lines = [_HEAD]
    for number, call in enumerate(calls):
        lines += [f"# Call {number + 1} of {len(calls)}"] * (len(calls) > 1) + _lines_of(call, device, backend)
    return "\n".join(lines)


def _lines_of(call: Call, device: str, backend: str | None) -> list[str]:
    arrays = [(f'"{name}"', name, array) for name, array in call.arrays.items()]
    incoming = [(f"{i}", f"gradient {i}", array) for i, array in enumerate(call.gradients) if array is not None]
    placed, gradients = (
        [f'    {key}: place({array!r}, "{name}", {call.seed}, "{device}"),' for key, name, array in some]
        for some in (arrays, incoming)
    )
    options = call.options | ({"backend": backend} if backend and "backend" in call.options else {})
    of_definition = {name: value for name, value in options.items() if name not in ("backend", "float32_precision")}
    without = '"aq": None, ' if call.lacks_aq else ""
    lines = ["placed = {", *placed, "}"]
    lines += [
        f"given = {{{without}**{{name: one.tensor for name, one in placed.items()}}}}",
        f"right = {{{without}**{{name: exact(one.dense) for name, one in placed.items()}}}}",
        f'torch.set_float32_matmul_precision("{call.matmul_precision}")',
        f"with torch.set_grad_enabled({call.recorded}):",
        f'    outputs = function_of("{call.operator}")(**given, **{options!r})',
        f'    expected = reference_of("{call.operator}")(**right, **{of_definition!r})',
        "outputs, expected = ((r,) if torch.is_tensor(r) else r for r in (outputs, expected))",
        "for found, one in zip(outputs, expected):",
        '    print("output", tuple(found.shape), "largest error", largest(found - one))',
    ]
    if not gradients:
        return lines
    return [
        *lines,
        "incoming = {",
        *gradients,
        "}",
        f"passed = [incoming[i].tensor if i in incoming else None for i in range({len(call.outputs)})]",
        "found = gradients_of(outputs, given.values(), passed)",
        "exact_ = gradients_of(expected, right.values(), [g if g is None else g.double() for g in passed])",
        f"for name, one, other in zip({call.wanted!r}, found, exact_):",
        '    print("gradient of", name, "largest error", largest(one - other))',
    ]
