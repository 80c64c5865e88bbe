"""Linear attention on kernels, for its operator and for distributed calls: what a call allocates and launches.

What a call allocates and launches is its plan, which depends on shapes, strides, dtypes and options alone. Plans
are kept by the caller (`warploom.runtime.plans`): a call like an earlier one only allocates and launches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from warploom.ops.linear_attention.call import LinearCall, LinearInputs, LinearOptions
from warploom.ops.linear_attention.configs import DECAY_CHUNK, STEPS, chunk_of
from warploom.ops.linear_attention.hopper import launch as hopper
from warploom.ops.linear_attention.triton.launch import (
    DecayGradient,
    ProductRows,
    State,
    plan_product,
    plan_scan,
    plan_step,
    plan_sums,
)
from warploom.ops.lrpe import engine as lrpe
from warploom.ops.lrpe.call import LrpeInputs, LrpeOptions
from warploom.ops.lrpe.engine import ThetaSums
from warploom.runtime.launch import Buffer, Launch, are_aligned, multiprocessors
from warploom.runtime.memory_order import layout_of
from warploom.runtime.plans import Plans

Tensor = torch.Tensor


class Continuation(NamedTuple):
    """Arguments of a call that has a part of a sequence, of which other ranks have the rest."""

    carry: Callable[[Tensor], Tensor]
    """A function from the state (S, H, F, E) that these tokens alone would leave to the state before them: float32
    without gaps. In the backward states are their gradients, and directions the other way."""
    states: Tensor
    """Memory for states, of `most_slots`. The forward stores the states before chunks here, for the backward."""


def most_slots(inputs: LinearInputs, options: LinearOptions) -> int:
    """Returns the most chunks that a call is cut into, for any number of tokens."""
    call = LinearCall(inputs, options, 1)
    blocks = max(call.heads * -(-call.values // 128), 1)
    return call.sequences * max(multiprocessors(inputs.q.device) // blocks, 1)


def _call_of(
    inputs: LinearInputs, options: LinearOptions, decay_gradient: bool = False, summed: bool = False
) -> LinearCall:
    """Returns the call on these tensors. ``summed``: sums of its chunks are wanted in any case."""
    tokens, heads, values = inputs.q.shape[1], inputs.q.shape[2], inputs.v.shape[3]
    if decay_gradient:
        return LinearCall(inputs, options, DECAY_CHUNK)
    return LinearCall(
        inputs, options, chunk_of(tokens, heads, values, multiprocessors(inputs.q.device), summed)
    )  # fmt: skip


# ----------------------------------------------------------------------------------------------------------
# States of chunks
# ----------------------------------------------------------------------------------------------------------


class States(NamedTuple):
    """Plan of the states of chunks: in one direction, from the sequences' first or last state to the other."""

    states: Buffer
    totals: Buffer | None
    sums: Launch
    scan: Launch
    own: Buffer | None  # where the state that comes in is carried
    own_scan: Launch | None

    @classmethod
    def of(
        cls, call: LinearCall, b: Tensor, c: Tensor, initial: Tensor | None, final: Buffer | None, reverse: bool,
        aligned: bool, carried: bool = False,
    ) -> States:  # fmt: skip
        """Plans those of rows to be encoded and others; ``carried``: one end comes from elsewhere."""
        states = Buffer.rows((call.slots, *call.state_shape[1:]), torch.float32)
        totals = None if call.decay == "none" else Buffer.rows((call.slots, call.heads), torch.float32)
        if aligned and hopper.suits(call, b, c):
            sums = hopper.plan_sums(call, b, c, states, reverse)
        else:
            sums = plan_sums(call, b, c, states, reverse)
        if not carried:
            return cls(states, totals, sums, plan_scan(call, initial, final, reverse), None, None)
        own = Buffer.rows(call.state_shape, torch.float32)
        scan, own_scan = plan_scan(call, own, final, reverse), plan_scan(call, None, own, reverse)
        return cls(states, totals, sums, scan, own, own_scan)

    def __call__(
        self, b: Tensor, c: Tensor, initial: Tensor | None, final: Tensor | None, inputs: LinearInputs, offset: int,
        carry: Callable[[Tensor], Tensor] | None = None, states: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Returns states (slots, H, F, E) in float32 of rows ``b`` and ``c``; writes ``final``."""
        states = self.states.empty(b) if states is None else states
        totals = None if self.totals is None else self.totals.empty(b)
        self.sums(b, c, states, totals, *inputs.places(offset))
        if carry is not None and self.own is not None and self.own_scan is not None:
            own = self.own.empty(b)
            self.own_scan(states.clone(), totals, None, own, inputs.cu_seqlens)
            initial = carry(own)
        self.scan(states, totals, initial, final, inputs.cu_seqlens)
        return states


class ProductPlan(NamedTuple):
    """Plan of a product over rows: see `triton.product`."""

    launch: Launch
    plain: bool  # whether its kernel takes neither ``x`` nor ``partial``
    reads_x: bool = False  # whether a kernel that takes ``x`` is given it

    def __call__(
        self, a: Tensor, b: Tensor, c: Tensor, x: Tensor | None, out: Tensor, initial: Tensor | None,
        final: Tensor | None, partial: Tensor | None, places: tuple[Any, ...],
    ) -> None:  # fmt: skip
        """Launches it."""
        if self.plain:
            self.launch(a, b, c, out, initial, final, *places)
        else:
            self.launch(a, b, c, x if self.reads_x else None, out, initial, final, partial, *places)


# ----------------------------------------------------------------------------------------------------------
# Forward
# ----------------------------------------------------------------------------------------------------------


class LinearForward(NamedTuple):
    """Plan of a forward."""

    out: Buffer
    final: Buffer | None
    states: States | None
    product: ProductPlan


def forward(
    inputs: LinearInputs, options: LinearOptions, offset: int, plans: Plans, more: Continuation | None = None
) -> tuple[Tensor, Tensor | None]:
    """Returns outputs (B, N, H, E), and the last states (S, H, F, E) in float32 where they are asked for."""
    q, k, v = inputs.q, inputs.k, inputs.v
    aligned, goes_on = are_aligned(q, k, v), more is not None
    plan = plans.get(("forward", aligned, goes_on), plan_forward, inputs, options, aligned, goes_on)
    out = plan.out.empty(q)
    final = None if plan.final is None else plan.final.empty(q)
    kept = final if options.return_state else None
    before, behind = inputs.initial_state, kept
    if plan.states is not None:
        carry, memory = (None, None) if more is None else more
        before = plan.states(k, v, before, final, inputs, offset, carry=carry, states=memory)
        before, behind = (before if options.causal else final), None
    plan.product(q, k, v, None, out, before, behind, None, inputs.places(offset))
    return out, kept


def plan_forward(
    inputs: LinearInputs, options: LinearOptions, aligned: bool, goes_on: bool = False
) -> LinearForward:
    """Plans `forward`."""
    call = _call_of(inputs, options, summed=goes_on)
    q, k, v, initial = inputs.q, inputs.k, inputs.v, inputs.initial_state
    out = layout_of(q, v.shape[3])
    final = Buffer.rows(call.state_shape, torch.float32) if options.return_state or not options.causal else None
    states = None
    before: State = initial
    behind = final
    if call.chunks > 1 or not options.causal or goes_on:
        states = States.of(call, k, v, initial, final, False, aligned, goes_on)
        before, behind = (states.states if options.causal else final), None
    if states is None and q.shape[1] <= STEPS:
        product = ProductPlan(plan_step(call, out, initial, final), True)
    elif aligned and options.causal and hopper.suits(call, q, k, v, out):
        rows = ProductRows(q, k, v, None, out)
        launch = hopper.plan_product(call, rows, before, behind, decoded=False)
        product = ProductPlan(launch, not hopper.takes_x(call, False))
    else:
        rows = ProductRows(q, k, v, None, out)
        product = ProductPlan(plan_product(call, rows, before, behind, decoded=False, reverse=False), False)
    return LinearForward(Buffer.like(out), final, states, product)


def last_state(inputs: LinearInputs, options: LinearOptions, offset: int, plans: Plans) -> Tensor:
    """Returns the last states (S, H, F, E) in float32, without outputs: of keys and values alone."""
    like = [None if x is None else (x.shape, x.stride(), x.dtype, x.device) for x in inputs]
    k, v, aligned = inputs.k, inputs.v, are_aligned(inputs.k, inputs.v)

    def plan() -> tuple[Buffer, States]:
        call = _call_of(inputs, options)
        final = Buffer.rows(call.state_shape, torch.float32)
        return final, States.of(call, k, v, inputs.initial_state, final, False, aligned)

    layout, states = plans.get((*like, *options, aligned, "last state"), plan)
    final: Tensor = layout.empty(k)
    states(k, v, inputs.initial_state, final, inputs, offset)
    return final


# ----------------------------------------------------------------------------------------------------------
# Backward
# ----------------------------------------------------------------------------------------------------------


class LinearBackward(NamedTuple):
    """Plan of a backward. Launches of gradients that nobody wants are None."""

    dq: Buffer
    dk: Buffer
    dv: Buffer
    first: Buffer | None  # the gradient of the first state, or without causality of that of all tokens
    last: Buffer | None  # the state of all tokens, without causality
    forward: States | None
    reverse: States | None
    query: ProductPlan | None
    key: ProductPlan | None
    value: ProductPlan | None
    pair: Launch | None  # gradients of keys and values by one kernel
    rotated: tuple[bool, bool] | None
    """Two flags: a kernel of LRPE forms the gradients of queries, and of keys, from those of encoded rows."""
    decays: DecayGradient | None
    theta_sums: ThetaSums | None


def backward(
    grad: Tensor, grad_state: Tensor | None, inputs: LinearInputs, options: LinearOptions, offset: int,
    wanted: Sequence[bool], plans: Plans, more: Continuation | None = None,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Returns the gradients of q, k, v, theta, decay and the first state, of those that are wanted."""
    if options.scale == 0:  # gradients of states, which are kept over the scale, do not come from outputs then
        grad, options = grad * 0.0, options._replace(scale=1.0)
    # Strides, because what autograd saved may come back with others: from the host's memory, for one.
    strides = tuple([None if x is None else x.stride() for x in (grad, grad_state, *inputs)])
    q, k, v, theta, decay = inputs.q, inputs.k, inputs.v, inputs.theta, inputs.decay
    aligned = are_aligned(q, k, v, grad)
    goes_on = more is not None
    key = (grad.dtype, strides, aligned, goes_on, *wanted)
    plan = plans.get(key, plan_backward, grad, grad_state, inputs, options, wanted, aligned, goes_on)
    dq, dk, dv = plan.dq.empty(q), plan.dk.empty(q), plan.dv.empty(q)
    first = None if plan.first is None else plan.first.empty(q)
    last = None if plan.last is None else plan.last.empty(q)
    partial = of_query = of_key = dtheta = ddecay = None
    if plan.theta_sums is not None:
        partial = plan.theta_sums.empty(q)
        of_query, of_key = partial.flatten(0, 1).chunk(2) if partial.numel() else (partial, partial)
    places = inputs.places(offset)
    before, behind, own = inputs.initial_state, grad_state, first
    if plan.forward is not None:
        before = plan.forward(k, v, before, last, inputs, offset)
        before = before if options.causal else last
    elif more is not None:
        before = more.states
    if plan.reverse is not None:
        behind = plan.reverse(q, grad, grad_state, first, inputs, offset, carry=more and more.carry)
        behind, own = (behind if options.causal else first), None
    if plan.query is not None:
        plan.query(grad, v, k, q, dq, before, None, of_query, places)
    if plan.key is not None:
        plan.key(v, grad, q, k, dk, behind, None, of_key, places)
    if plan.value is not None:
        plan.value(k, q, grad, None, dv, behind, own, None, places)
    if plan.pair is not None:
        plan.pair(q, k, v, grad, dk, dv, behind, own, *places)
    if plan.rotated is not None:
        dtheta = _rotate_back(((q, dq), (k, dk)), plan.rotated, inputs, options, offset, wanted[3], plans)
    if plan.theta_sums is not None and partial is not None and theta is not None:
        dtheta = plan.theta_sums.reduce(partial, theta)
    if plan.decays is not None and decay is not None:
        ddecay = plan.decays.out.empty(grad)
        plan.decays.launch(q, k, v, grad, before, behind, ddecay, *places)
        if plan.decays.by_head:
            ddecay = ddecay.sum(0, dtype=torch.float64)
        ddecay = ddecay.to(decay.dtype)
    return dq, dk, dv, dtheta, ddecay, first if wanted[5] else None


def _rotate_back(
    rows: Sequence[tuple[Tensor, Tensor]], wanted: Sequence[bool], inputs: LinearInputs, options: LinearOptions,
    offset: int, of_theta: bool, plans: Plans,
) -> Tensor | None:  # fmt: skip
    """Rotate gradients of encoded rows back, in place; returns the gradient of theta if it is wanted.

    ``rows`` are pairs of what was encoded and these gradients.
    """
    encoding = LrpeOptions(kind=options.kind, activation=options.activation)
    dtheta: Tensor | None = None
    for (x, gradient), wants in zip(rows, wanted):
        if wants and inputs.theta is not None:
            encoded = LrpeInputs(x, inputs.theta, offsets=inputs.offsets)
            part = lrpe.backward(gradient, encoded, offset, encoding, of_theta, plans, gradient)[1]
            dtheta = part if dtheta is None or part is None else dtheta + part
    return dtheta


def plan_backward(
    grad: Tensor, grad_state: Tensor | None, inputs: LinearInputs, options: LinearOptions, wanted: Sequence[bool],
    aligned: bool, goes_on: bool = False,
) -> LinearBackward:  # fmt: skip
    """Plans `backward`."""
    q, k, v, theta, initial = inputs.q, inputs.k, inputs.v, inputs.theta, inputs.initial_state
    of_q, of_k, of_v, of_theta, of_decay, of_initial = wanted
    call = _call_of(inputs, options, of_decay, goes_on)
    dq, dk, dv = layout_of(q, q.shape[3]), layout_of(k, k.shape[3]), layout_of(v, v.shape[3])
    wants_q, wants_k = of_q or of_theta, of_k or of_theta
    # The gradient of the first state alone, as ranks hand it over, is what the sums of chunks come to.
    alone = of_initial and not any(wanted[:5])
    apart = call.chunks > 1 or not options.causal or of_decay or alone or goes_on
    first = last = None
    if not options.causal:
        first = last = Buffer.rows(call.state_shape, torch.float32)
    elif of_initial and initial is not None:
        first = Buffer.rows(call.state_shape, initial.dtype)
    forward = reverse = query = key = value = pair = decays = sums = None
    before: State = initial
    behind: State = grad_state
    if apart:
        if of_decay or (wants_q and not goes_on):  # for decays there are other chunks
            forward = States.of(call, k, v, initial, last, False, aligned)
        reverse = States.of(call, q, grad, grad_state, first, True, aligned, goes_on)
        before = last if last is not None else None if forward is None else forward.states
        if goes_on and forward is None:
            before = Buffer.rows((call.slots, *call.state_shape[1:]), torch.float32)
        behind = reverse.states if options.causal else first
    own = None if apart else first
    wants_v = of_v or own is not None
    # With theta's gradient, or an activation, what was encoded is needed as it was before. Kernels for cosines read
    # it. LRPE's rotates back in place; two gradients of theta are added up in its dtype: 16 bits are too few.
    needs_rows = of_theta or options.activation != "none"
    coarse = of_theta and theta is not None and theta.dtype.itemsize < 4
    rotated = needs_rows and options.kind == "rotate" and not coarse
    fits = aligned and options.causal and (rotated or not needs_rows or options.kind == "cosine")
    on_hopper = fits and hopper.suits(call, q, k, v, grad, dq, dk, dv)
    rotated_on_hopper = on_hopper and rotated

    def plan(rows: ProductRows, initial: State, final: Buffer | None, decoded: bool, reverse: bool) -> ProductPlan:
        if on_hopper:
            rows = rows if decoded and needs_rows else rows._replace(x=None)
            launch = hopper.plan_product(
                call, rows, initial, final, decoded=decoded, reverse=reverse, rotates_back=not rotated
            )
            return ProductPlan(launch, not hopper.takes_x(call, decoded), rows.x is not None)
        launch = plan_product(call, rows, initial, final, decoded=decoded, reverse=reverse)
        return ProductPlan(launch, False, True)

    if wants_q:
        query = plan(ProductRows(grad, v, k, q, dq), before, None, True, False)
    if on_hopper and options.kind != "cosine":
        if wants_k or wants_v:
            pair = hopper.plan_keys(call, (q, k, v, grad, dk, dv), behind, own, not rotated)
    else:
        if wants_k:
            key = plan(ProductRows(v, grad, q, k, dk), behind, None, True, True)
        if wants_v:
            value = plan(ProductRows(k, q, grad, None, dv), behind, own, False, True)
    if of_decay and forward is not None:
        decays = DecayGradient.of(call, grad, forward.states)
    if of_theta and theta is not None and not rotated_on_hopper:
        parts = 2 * call.slots * (1 if theta.dim() == 2 and theta.shape[0] > 1 else call.heads)
        sums = ThetaSums.of(parts, theta, call.features, 1)
    rotated_rows = (wants_q, wants_k) if rotated_on_hopper else None
    outs = Buffer.like(dq), Buffer.like(dk), Buffer.like(dv)
    return LinearBackward(
        *outs, first, last, forward, reverse, query, key, value, pair, rotated_rows, decays, sums
    )  # fmt: skip
