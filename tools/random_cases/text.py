"""A call as Python that a person can paste: its tensors in their memory, and its error against float64."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from random_cases.arrays import Array, seed_of
from random_cases.calls import Call

__all__ = ["python_of"]

_PLACE = '''
def place(numbers, shape, strides, offset, size, negated=False):
    """A tensor of this memory; the rest of the storage is NaN."""
    numbers = numbers.to(device)
    filler = float("nan") if numbers.is_floating_point() else torch.iinfo(numbers.dtype).min
    storage = torch.full((size * (2 if negated else 1),), filler, dtype=numbers.dtype, device=device)
    if negated:
        storage = torch.view_as_complex(storage.view(-1, 2))
    view = storage.as_strided(numbers.shape, strides, offset)
    view = torch.conj(view).imag if negated else view
    view.copy_(numbers)
    return view.expand(shape)


def largest(errors):
    return errors.abs().max().item() if errors.numel() else 0.0


def random(shape, seed, draw=torch.randn):
    return draw(shape, generator=torch.Generator().manual_seed(seed))
'''


def python_of(calls: Sequence[Call], device: str, backend: str | None = None) -> str:
    """A script that makes the last of these calls, after the others.

    Args:
        calls: As in a `Fault`.
        device: ``cuda`` or ``cpu``.
        backend: What every call runs on; None for its own choice.
    """
    names = sorted({call.operator for call in calls})
    lines = ["import torch", "from random_cases import function_of, reference_of", ""]
    if any(array.values == "decays" for call in calls for array in call.arrays.values()):
        lines.insert(2, "from random_cases.arrays import draw_decays, draw_frequencies")
    lines = ["import math", "", *lines] if any("nan" in _numbers_of(c) for c in calls) else lines
    lines += [f'device = "{device}"', _PLACE]
    for name in names:
        lines.append(f'{name} = function_of("{name}")')
    for number, call in enumerate(calls):
        if len(calls) > 1:
            lines.append(f"# Call {number + 1} of {len(calls)}")
        lines += _lines_of(call, backend)
    return "\n".join(lines)


def _numbers_of(call: Call) -> str:
    return "".join(line for name, array in call.arrays.items() for line in _array(name, array, call.seed))


def _lines_of(call: Call, backend: str | None) -> list[str]:
    lines: list[str] = []
    for name, array in call.arrays.items():
        lines += _array(name, array, call.seed)
    options: dict[str, Any] = dict(call.options)
    if backend is not None and "backend" in options:
        options["backend"] = backend
    tensors = [f"{name}={name}" for name in call.arrays]
    if call.operator.startswith("tpa") and "aq" not in call.arrays:
        tensors.insert(0, "aq=None")
    if call.matmul_precision != "highest":
        lines.append(f'torch.set_float32_matmul_precision("{call.matmul_precision}")')
    keywords = ", ".join([*tensors, *(f"{name}={value!r}" for name, value in options.items())])
    lines.append(f"arguments = dict({keywords})")
    run = [f"outputs = {call.operator}(**arguments)"]
    lines += run if call.recorded else ["with torch.no_grad():", *(f"    {line}" for line in run)]
    lines += [
        "exact = {n: t.detach().double() if torch.is_tensor(t) and t.is_floating_point() else t",
        '         for n, t in arguments.items() if n not in ("backend", "float32_precision")}',
        f'expected = reference_of("{call.operator}")(**exact)',
        "outputs, expected = ((r,) if torch.is_tensor(r) else r for r in (outputs, expected))",
        "for found, right in zip(outputs, expected):",
        '    print("output", tuple(found.shape), "largest error", largest(found.detach() - right))',
    ]
    if not call.gradients:
        return lines
    wanted = [name for name, array in call.arrays.items() if array.grad]
    through = []
    for index, gradient in enumerate(call.gradients):
        if gradient is not None:
            lines += _array(f"gradient{index}", gradient, call.seed, f"gradient {index}")
            through.append(index)
    lines += [
        f"wanted = {wanted!r}",
        "exact |= {n: exact[n].clone().requires_grad_() for n in wanted}",
        f'expected = reference_of("{call.operator}")(**exact)',
        "expected = (expected,) if torch.is_tensor(expected) else expected",
        f"incoming = [{', '.join(f'gradient{index}' for index in through)}]",
        f"found = torch.autograd.grad([outputs[i] for i in {through}], [arguments[n] for n in wanted], incoming,",
        "                            materialize_grads=True)",
        f"right = torch.autograd.grad([expected[i] for i in {through}], [exact[n] for n in wanted],",
        "                            [g.double() for g in incoming], materialize_grads=True)",
        "for name, one, other in zip(wanted, found, right):",
        '    print("gradient of", name, "largest error", largest(one - other))',
    ]
    return lines


def _array(variable: str, array: Array, seed: int, name: str | None = None) -> list[str]:
    """Lines that make one tensor."""
    shape, dtype = array.stored_shape, f"torch.{array.dtype}"
    number = seed_of(seed, name or variable)
    scale = "" if array.scale == 1.0 else f" * {array.scale}"
    match array.values:
        case "numbers":
            numbers = f"torch.tensor({list(array.numbers)}, dtype={dtype})"
        case "integers":
            low, high = array.numbers
            generator = f"torch.Generator().manual_seed({number})"
            numbers = f"torch.randint({low}, {high + 1}, {shape}, generator={generator}).to({dtype})"
        case "zeros":
            numbers = f"torch.zeros({shape}, dtype={dtype})"
        case "uniform":
            numbers = f"((random({shape}, {number}, torch.rand) * 2 - 1){scale}).to({dtype})"
        case "frequencies":
            geometric = f"10000.0 ** (-torch.arange({shape[-1]}) / {max(shape[-1], 1)})"
            numbers = f"({geometric} * (1 + 0.1 * random({shape}, {number}, torch.rand)){scale}).to({dtype})"
        case "decays":
            generator = f"generator := torch.Generator().manual_seed({number})"
            weak = f"draw_frequencies({shape}, ({generator}))"
            numbers = f"(draw_decays({weak}, {dtype}, {array.scale}, generator){scale}).to({dtype})"
        case _:
            numbers = f"(random({shape}, {number}){scale}).to({dtype})"
    lines = [f"numbers = {numbers}"]
    if array.ends and shape[1] == array.shape[1]:
        ends = array.ends if len(array.ends) == shape[0] else (max(array.ends),)
        lines += [f"numbers[{b}, {end}:] = math.nan" for b, end in enumerate(ends) if end < shape[1]]
    if array.row_of_nan and 0 not in shape:
        lines.append(f"numbers[{shape[0] // 2}, {shape[1] // 2}].view(-1)[-1:] = math.nan")
    memory = array.memory
    negated = ", negated=True" if memory.negated else ""
    placed = f"place(numbers, {array.shape}, {memory.strides}, {memory.offset}, {memory.size}{negated})"
    lines.append(f"{variable} = {placed}{'.requires_grad_()' if array.grad else ''}")
    return lines
