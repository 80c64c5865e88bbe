"""Launchers of linear attention's backward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from warploom.ops.linear_attention.configs import (
    DECAY_CHUNK,
    tile_of,
)
from warploom.ops.linear_attention.kernels.decay import decay_kernel
from warploom.ops.linear_attention.launches import hopper
from warploom.ops.linear_attention.launches.calls import PLACES, Call, layout_of_rows
from warploom.ops.linear_attention.launches.forward import Rows, Shared, States, plan_product, plan_states
from warploom.ops.linear_attention.problem import Inputs, Options
from warploom.ops.lrpe import launches as lrpe
from warploom.ops.lrpe.call import LrpeInputs, LrpeOptions
from warploom.ops.lrpe.launches import ThetaSums
from warploom.runtime.launch import Dense, Launch, are_aligned
from warploom.runtime.memory_order import layout_of
from warploom.runtime.plans import Plans

Tensor = torch.Tensor


class Decays(NamedTuple):
    """Plan of the gradient of decays."""

    out: Dense
    launch: Launch
    by_head: bool

    def __call__(self, inputs: Inputs, grad: Tensor, states: Tensor, grad_states: Tensor, offset: int) -> Tensor:
        """The gradient, from states before chunks and gradients of those behind them, over the scale."""
        out = self.out.empty(grad)
        q, k, v, *_ = inputs
        self.launch(q, k, v, grad, states, grad_states, out, *inputs.places(offset))
        return out.sum(0, dtype=torch.float64) if self.by_head else out


def _plan_decays(call: Call, grad: Tensor, states: Dense) -> Decays:
    q, k, v, _, decay, *_ = call.inputs
    by_head = decay is not None and decay.dim() == 1
    shape = (call.slots, q.shape[2]) if by_head else tuple(q.shape[:3])
    tile = tile_of("decays", call.half, call.state_shape[2], v.shape[3], DECAY_CHUNK)
    layout = layout_of_rows(q, k, v, grad)
    launch = Launch(
        decay_kernel,
        call.slots * q.shape[2],
        takes=("q", "k", "v", "grad", "states", "grad_states", "out", *PLACES),
        scale=call.options.scale,
        BY_HEAD=by_head,
        **layout.of("q", "k", "v", "grad"),
        **call.on_values(layout, tile, 1, states=states),
    )
    return Decays(Dense.rows(shape, torch.float32), launch, by_head)


class OnHopper(NamedTuple):
    """Plans of the products of a backward on Hopper, of those that are wanted."""

    query: Launch | None
    key: Launch | None
    value: Launch | None
    pair: Launch | None  # gradients of keys and values
    turned: tuple[bool, bool] | None
    """Where LRPE's kernel turns gradients of encoded rows back: whether those of queries and of keys are wanted."""


class Backward(NamedTuple):
    """Plan of a backward. Launches of gradients that nobody wants are None."""

    dq: Dense
    dk: Dense
    dv: Dense
    first: Dense | None  # the gradient of the first state, or without causality of that of all tokens
    last: Dense | None  # the state of all tokens, without causality
    forward: States | None
    reverse: States | None
    query: Launch | None
    key: Launch | None
    value: Launch | None
    on_hopper: OnHopper | None
    decays: Decays | None
    theta_sums: ThetaSums | None


def backward(
    grad: Tensor, grad_state: Tensor | None, inputs: Inputs, options: Options, offset: int, wanted: Sequence[bool],
    plans: Plans, shared: Shared | None = None,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Gradients of q, k, v, theta, decay and the first state, of those that are wanted."""
    if options.scale == 0:  # gradients of states, which are kept over the scale, do not come from outputs then
        grad, options = grad * 0.0, options._replace(scale=1.0)
    # Strides, because what autograd saved may come back with others: from the host's memory, for one.
    strides = tuple([None if x is None else x.stride() for x in (grad, grad_state, *inputs)])
    q, k, v, theta, decay, initial, _, _ = inputs
    aligned = are_aligned(q, k, v, grad)
    is_shared = shared is not None
    kept = (grad.dtype, strides, aligned, is_shared, *wanted)
    plan = plans.get(kept, plan_backward, grad, grad_state, inputs, options, wanted, aligned, is_shared)
    dq, dk, dv = plan.dq.empty(q), plan.dk.empty(q), plan.dv.empty(q)
    first = None if plan.first is None else plan.first.empty(q)
    last = None if plan.last is None else plan.last.empty(q)
    partial = halves = dtheta = None
    if plan.theta_sums is not None:
        partial = plan.theta_sums.empty(q)
        halves = partial.flatten(0, 1).chunk(2) if partial.numel() else (partial, partial)
    places = inputs.places(offset)
    before, behind, own = initial, grad_state, first
    if plan.forward is not None:
        before = plan.forward(k, v, initial, last, inputs, offset)
        before = before if options.causal else last
    elif shared is not None:
        before = shared.states
    if plan.reverse is not None:
        behind = plan.reverse(q, grad, grad_state, first, inputs, offset, carry=shared and shared.carry)
        behind, own = (behind if options.causal else first), None
    if plan.on_hopper is not None:
        query, key, value, pair, turned = plan.on_hopper
        if query is not None:
            query(grad, v, k, dq, before, None, *places)
        if key is not None:
            key(v, grad, q, dk, behind, None, *places)
        if value is not None:
            value(k, q, grad, dv, behind, own, *places)
        if pair is not None:
            pair(q, k, v, grad, dk, dv, behind, own, *places)
        if turned is not None:
            dtheta = _turn_back(((q, dq), (k, dk)), turned, inputs, options, offset, wanted[3], plans)
    if plan.query is not None:
        plan.query(grad, v, k, q, dq, before, None, None if halves is None else halves[0], *places)
    if plan.key is not None:
        plan.key(v, grad, q, k, dk, behind, None, None if halves is None else halves[1], *places)
    if plan.value is not None:
        plan.value(k, q, grad, None, dv, behind, own, None, *places)
    ddecay = None
    if plan.theta_sums is not None and partial is not None and theta is not None:
        dtheta = plan.theta_sums.reduce(partial, theta)
    if plan.decays is not None and before is not None and behind is not None and decay is not None:
        ddecay = plan.decays(inputs, grad, before, behind, offset).to(decay.dtype)
    return dq, dk, dv, dtheta, ddecay, first if wanted[5] else None


def _turn_back(
    rows: Sequence[tuple[Tensor, Tensor]], wanted: Sequence[bool], inputs: Inputs, options: Options, offset: int,
    of_theta: bool, plans: Plans,
) -> Tensor | None:  # fmt: skip
    """Make of gradients of encoded rows those of the rows, in their place; the gradient of theta if it is wanted.

    ``rows`` are pairs of what was encoded and these gradients.
    """
    turns = LrpeOptions(kind=options.kind, activation=options.activation)
    dtheta: Tensor | None = None
    for (x, gradient), wants in zip(rows, wanted):
        if wants and inputs.theta is not None:
            encoded = LrpeInputs(x, inputs.theta, offsets=inputs.offsets)
            part = lrpe.backward(gradient, encoded, offset, turns, of_theta, plans, gradient)[1]
            dtheta = part if dtheta is None or part is None else dtheta + part
    return dtheta


def plan_backward(
    grad: Tensor, grad_state: Tensor | None, inputs: Inputs, options: Options, wanted: Sequence[bool],
    aligned: bool, shared: bool = False,
) -> Backward:  # fmt: skip
    """Plan of `backward`."""
    q, k, v, theta, _, initial, _, _ = inputs
    of_q, of_k, of_v, of_theta, of_decay, of_initial = wanted
    call = Call.of(inputs, options, of_decay, shared)
    dq, dk, dv = layout_of(q, q.shape[3]), layout_of(k, k.shape[3]), layout_of(v, v.shape[3])
    # The gradient of the first state alone, as ranks hand it over, is what the sums of chunks come to.
    alone = of_initial and not any(wanted[:5])
    apart = call.chunks > 1 or not options.causal or of_decay or alone or shared
    first = last = None
    if not options.causal:
        first = last = Dense.rows(call.state_shape, torch.float32)
    elif of_initial and initial is not None:
        first = Dense.rows(call.state_shape, initial.dtype)
    forward = reverse = query = key = value = decays = sums = None
    if apart and (of_decay or ((of_q or of_theta) and not shared)):  # for decays there are other chunks
        forward = plan_states(call, k, v, initial, last, False, aligned)
    if apart:
        reverse = plan_states(call, q, grad, grad_state, first, True, aligned, shared)
    before: Tensor | Dense | None = initial
    behind: Tensor | Dense | None = grad_state
    if apart:
        before = last if last is not None else None if forward is None else forward.states
        if shared and forward is None:
            before = Dense.rows((call.slots, *call.state_shape[1:]), torch.float32)
        behind = first if not options.causal else None if reverse is None else reverse.states
    own = None if apart else first
    # With theta's gradient, or an activation, what was encoded is needed as it was before. LRPE's kernel turns
    # rotations back in place then; two gradients of theta are added up in its dtype, for which 16 bits are too few.
    needs_rows = of_theta or options.activation != "none"
    coarse = of_theta and theta is not None and theta.dtype.itemsize < 4
    turned = needs_rows and options.kind == "rotate" and not coarse
    on_hopper = None
    fits = options.causal and (turned or not needs_rows)
    if aligned and fits and hopper.suits(call, q, k, v, grad, dq, dk, dv):
        on_query = on_key = on_value = on_pair = None
        wants_q, wants_k, wants_v = of_q or of_theta, of_k or of_theta, of_v or own is not None
        if wants_q:
            on_query = hopper.plan_product(call, (grad, v, k, dq), before, None, decoded=True, turns=not turned)
        if options.kind != "cosine" and (wants_k or wants_v):
            on_pair = hopper.plan_keys(call, (q, k, v, grad, dk, dv), behind, own, not turned)
        elif wants_k:
            on_key = hopper.plan_product(call, (v, grad, q, dk), behind, None, decoded=True, reverse=True)
        if options.kind == "cosine" and wants_v:
            on_value = hopper.plan_product(call, (k, q, grad, dv), behind, own, decoded=False, reverse=True)
        on_hopper = OnHopper(on_query, on_key, on_value, on_pair, (wants_q, wants_k) if turned else None)
    else:
        if of_q or of_theta:
            query = plan_product(call, Rows(grad, v, k, q, dq), before, None, decoded=True, reverse=False)
        if of_k or of_theta:
            key = plan_product(call, Rows(v, grad, q, k, dk), behind, None, decoded=True, reverse=True)
        if of_v or own is not None:
            value = plan_product(call, Rows(k, q, grad, None, dv), behind, own, decoded=False, reverse=True)
    if of_decay and forward is not None:
        decays = _plan_decays(call, grad, forward.states)
    if of_theta and theta is not None and on_hopper is None:
        parts = 2 * call.slots * (1 if theta.dim() == 2 and theta.shape[0] > 1 else q.shape[2])
        sums = ThetaSums.of(parts, theta, call.features, 1)
    outs = Dense.like(dq), Dense.like(dk), Dense.like(dv)
    return Backward(*outs, first, last, forward, reverse, query, key, value, on_hopper, decays, sums)
