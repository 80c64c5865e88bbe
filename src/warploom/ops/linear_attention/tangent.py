"""Linear attention in forward mode, on kernels."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from warploom.ops.linear_attention.call import LinearInputs, LinearOptions
from warploom.ops.linear_attention.operator import OPERATOR
from warploom.runtime.dispatch import Tangent, apply_registered

Tensor = torch.Tensor


def _differentiate(inputs: LinearInputs, tangents: Any, offset: int, options: LinearOptions) -> tuple[Tensor, ...]:
    """Returns the tangents of outputs and the last state by the product rule: a call for each of them."""
    dq, dk, dv, dstate = tangents.q, tangents.k, tangents.v, tangents.initial_state
    calls = []
    if dq is not None:
        calls.append(inputs._replace(q=dq))
    if dk is not None:
        calls.append(inputs._replace(k=dk, initial_state=None))
    if dv is not None or dstate is not None:
        v = torch.zeros_like(inputs.v) if dv is None else dv
        calls.append(inputs._replace(v=v, initial_state=dstate))
    wide = torch.promote_types(inputs.q.dtype, torch.float32)
    outs, states = [], []
    for call in calls:
        out, state = apply_registered(OPERATOR, call, offset, options)
        outs.append(out.to(wide))
        if call.q is not dq:  # of queries a state knows nothing
            states.append(state)
    total = functools.reduce(torch.add, outs)
    if not options.return_state:
        return (total.to(inputs.q.dtype),)
    return total.to(inputs.q.dtype), functools.reduce(torch.add, states) if states else torch.zeros_like(state)


def _find_obstacle(_: LinearInputs, options: LinearOptions, given: Sequence[bool]) -> str | None:
    of: Any = LinearInputs(*given)  # type: ignore[arg-type]
    if of.theta or of.decay:
        return "the kernels differentiate neither by frequencies nor by decays"
    if options.activation != "none" and (of.q or of.k):
        return "the kernels do not differentiate an activation"
    return None


TANGENT = Tangent(_differentiate, _find_obstacle)
