"""Launchers of linear attention's forward, and of the states of chunks. No validation, no autograd.

What a call allocates and launches is its plan, which depends on shapes, strides, dtypes and options alone. Plans
are kept by whoever calls (`warploom.runtime.plans`): a call like an earlier one only allocates and launches.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from warploom.ops.linear_attention.configs import STEPS, in_power_of_two, is_held, step_tile, tile_of
from warploom.ops.linear_attention.kernels.product import Way, product_kernel
from warploom.ops.linear_attention.kernels.states import scan_kernel, sums_kernel
from warploom.ops.linear_attention.kernels.step import step_kernel
from warploom.ops.linear_attention.kernels.tiles import Scales
from warploom.ops.linear_attention.launches import hopper
from warploom.ops.linear_attention.launches.calls import PLACES, Call, State, layout_of_rows, state_strides
from warploom.ops.linear_attention.problem import Inputs, Options
from warploom.runtime.launch import Dense, Launch, are_aligned, shared_memory
from warploom.runtime.memory_order import layout_of
from warploom.runtime.plans import Plans

Tensor = torch.Tensor


class Shared(NamedTuple):
    """What a call is given whose tokens go on with a sequence of which others hold the rest."""

    carry: Callable[[Tensor], Tensor]
    """Of the state (S, H, F, E) that tokens would leave behind if none were before them, the state before them, in
    float32 without gaps. In the backward states are their gradients, and directions the other way."""
    states: Tensor
    """(`Call.most_slots`, H, F, E) float32. The forward leaves the states before chunks here, for the backward."""


_SCAN_BLOCK = 1024
_SCAN_AHEAD = 8
"""States of which a scan has the loads under way together."""


# ----------------------------------------------------------------------------------------------------------
# States of chunks
# ----------------------------------------------------------------------------------------------------------


class States(NamedTuple):
    """Plan of the states of chunks: in one direction, from the sequences' first or last state to the other."""

    states: Dense
    totals: Dense | None
    sums: Launch
    scan: Launch
    own: Dense | None  # where the state that comes in is carried
    own_scan: Launch | None

    def __call__(
        self, b: Tensor, c: Tensor, initial: Tensor | None, final: Tensor | None, inputs: Inputs, offset: int,
        carry: Callable[[Tensor], Tensor] | None = None, states: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """States (slots, H, F, E) in float32, of rows ``b`` and ``c``, in memory for them; writes ``final``."""
        states = self.states.empty(b) if states is None else states
        totals = None if self.totals is None else self.totals.empty(b)
        self.sums(b, c, states, totals, *inputs.places(offset))
        if carry is not None and self.own is not None and self.own_scan is not None:
            own = self.own.empty(b)
            self.own_scan(states.clone(), totals, None, own, inputs.cu_seqlens)
            initial = carry(own)
        self.scan(states, totals, initial, final, inputs.cu_seqlens)
        return states


def plan_states(
    call: Call, b: Tensor, c: Tensor, initial: Tensor | None, final: Dense | None, reverse: bool, aligned: bool,
    carried: bool = False,
) -> States:  # fmt: skip
    """Plan of `States`, of rows to be encoded and others; ``carried``: one end comes from elsewhere."""
    _, heads, features, values = call.state_shape
    states = Dense.rows((call.slots, heads, features, values), torch.float32)
    totals = None if call.inputs.decay is None else Dense.rows((call.slots, heads), torch.float32)
    if aligned and hopper.suits(call, b, c):
        sums = hopper.plan_sums(call, b, c, states, reverse)
    else:
        sums = _plan_sums(call, b, c, states, reverse)
    if not carried:
        return States(states, totals, sums, _plan_scan(call, initial, final, reverse), None, None)
    own = Dense.rows(call.state_shape, torch.float32)
    scan, own_scan = _plan_scan(call, own, final, reverse), _plan_scan(call, None, own, reverse)
    return States(states, totals, sums, scan, own, own_scan)


def _plan_scan(call: Call, initial: State, final: Dense | None, reverse: bool) -> Launch:
    sequences, heads, features, values = call.state_shape
    blocks = -(-features * values // _SCAN_BLOCK)
    scale = call.state_scale if reverse else 1.0
    return Launch(
        scan_kernel,
        sequences * heads * blocks,
        takes=("states", "totals", "initial", "final", "cu_seqlens"),
        sizes=call.sizes(blocks),
        initial_strides=state_strides(initial),
        final_strides=state_strides(final),
        into=1.0 / scale,
        out_of=scale,
        F=features,
        E=values,
        BLOCK=_SCAN_BLOCK,
        AHEAD=_SCAN_AHEAD,
        REVERSE=reverse,
    )


def _plan_sums(call: Call, b: Tensor, c: Tensor, states: Dense, reverse: bool) -> Launch:
    _, heads, features, values = call.state_shape
    tile = tile_of("sums", call.half, features, values, call.inputs.q.shape[1])
    columns = -(-values // tile.columns)
    layout = layout_of_rows(b, c)
    return Launch(
        sums_kernel,
        call.slots * heads * columns,
        takes=("b", "c", "states", "totals", *PLACES),
        REVERSE=reverse,
        **layout.of("b", "c"),
        **call.on_values(layout, tile, columns, states=states),
    )


# ----------------------------------------------------------------------------------------------------------
# Products
# ----------------------------------------------------------------------------------------------------------


class Rows(NamedTuple):
    """What a product goes over: see `kernels.product`."""

    a: Tensor
    b: Tensor
    c: Tensor
    x: Tensor | None
    out: Tensor  # without memory


def plan_product(
    call: Call, rows: Rows, initial: Tensor | Dense | None, final: Dense | None, *, decoded: bool, reverse: bool,
) -> Launch:  # fmt: skip
    """Plan of a product. ``decoded``: whether the result is the gradient of what is encoded."""
    values, tokens = int(call.inputs.v.shape[3]), int(call.inputs.q.shape[1])
    if decoded:
        features = call.features
        tile = tile_of("wide" if call.wide else "decoded", call.half, values, features, tokens)
        block_f = tile.columns
        if call.options.activation == "softmax":  # whose gradient takes whole rows
            block_f = in_power_of_two(features)
        columns = -(-features // block_f)
    else:
        tile = tile_of("outputs", call.half, call.state_shape[2], values, tokens)
        columns = -(-values // tile.columns)
    layout = layout_of_rows(rows.a, rows.b, rows.c, rows.a if rows.x is None else rows.x, rows.out)
    scale = call.state_scale if reverse else 1.0
    states = {"initial": initial, "final": final}
    given = (
        call.on_features(layout, tile, columns, block_f, **states)
        if decoded
        else call.on_values(layout, tile, columns, **states)
    )
    variant = given["variant"]
    numbers = call.parts * variant.PIECES * variant.BLOCK_F * variant.BLOCK_E
    loaded = not variant.CAUSAL and not is_held(numbers, call.half, shared_memory(rows.a.device))
    return Launch(
        product_kernel,
        call.slots * call.inputs.q.shape[2] * columns,
        takes=("a", "b", "c", "x", "out", "initial", "final", "partial", *PLACES),
        scales=Scales(call.options.scale, 1.0 / scale if isinstance(initial, Tensor) else 1.0, scale),
        way=Way(decoded, reverse, loaded),
        **layout.of("a", "b", "c", "x", "out"),
        **given,
    )


# ----------------------------------------------------------------------------------------------------------
# Forward
# ----------------------------------------------------------------------------------------------------------


class Forward(NamedTuple):
    """Plan of a forward."""

    out: Dense
    final: Dense | None
    states: States | None
    product: Launch
    short: bool  # whether its kernel takes no more than tensors, states and places


def forward(
    inputs: Inputs, options: Options, offset: int, plans: Plans, shared: Shared | None = None
) -> tuple[Tensor, Tensor | None]:
    """Outputs (B, N, H, E), and the last states (S, H, F, E) in float32 where they are asked for."""
    q, k, v, *_, initial, _, _ = inputs
    aligned, is_shared = are_aligned(q, k, v), shared is not None
    plan = plans.get(("forward", aligned, is_shared), plan_forward, inputs, options, aligned, is_shared)
    out = plan.out.empty(q)
    final = None if plan.final is None else plan.final.empty(q)
    kept = final if options.return_state else None
    before, behind = initial, kept
    if plan.states is not None:
        carry, memory = (None, None) if shared is None else (shared.carry, shared.states)
        before = plan.states(k, v, initial, final, inputs, offset, carry=carry, states=memory)
        before, behind = (before if options.causal else final), None
    if plan.short:
        plan.product(q, k, v, out, before, behind, *inputs.places(offset))
    else:
        plan.product(q, k, v, None, out, before, behind, None, *inputs.places(offset))
    return out, kept


def plan_forward(inputs: Inputs, options: Options, aligned: bool, shared: bool = False) -> Forward:
    """Plan of `forward`."""
    call = Call.of(inputs, options, summed=shared)
    q, k, v, *_, initial, _, _ = inputs
    out = layout_of(q, v.shape[3])
    final = Dense.rows(call.state_shape, torch.float32) if options.return_state or not options.causal else None
    states = None
    before: Tensor | Dense | None = initial
    behind = final
    if call.chunks > 1 or not options.causal or shared:
        states = plan_states(call, k, v, initial, final, False, aligned, shared)
        before, behind = (states.states if options.causal else final), None
    short = True
    if states is None and q.shape[1] <= STEPS:
        product = _plan_step(call, out, initial, final)
    elif aligned and options.causal and hopper.suits(call, q, k, v, out):
        product = hopper.plan_product(call, (q, k, v, out), before, behind, decoded=False)
    else:
        short = False
        product = plan_product(call, Rows(q, k, v, None, out), before, behind, decoded=False, reverse=False)
    return Forward(Dense.like(out), final, states, product, short)


def _plan_step(call: Call, out: Tensor, initial: Tensor | None, final: Dense | None) -> Launch:
    q, k, v, *_ = call.inputs
    layout = layout_of_rows(q, k, v, out)
    tile = step_tile(call.parts * in_power_of_two(call.features), v.shape[3])
    columns = -(-v.shape[3] // tile.columns)
    return Launch(
        step_kernel,
        call.slots * q.shape[2] * columns,
        takes=("q", "k", "v", "out", "initial", "final", *PLACES),
        scale=call.options.scale,
        **layout.of("q", "k", "v", "out"),
        **call.common(
            layout, tile, columns, in_power_of_two(call.features), tile.columns, 1, initial=initial, final=final
        ),
    )


# ----------------------------------------------------------------------------------------------------------
# States alone
# ----------------------------------------------------------------------------------------------------------


class LastState(NamedTuple):
    """Plan of `last_state`."""

    final: Dense
    states: States


def last_state(inputs: Inputs, options: Options, offset: int, plans: Plans) -> Tensor:
    """The last states (S, H, F, E) in float32, without outputs: of keys and values alone."""
    like = [None if x is None else (x.shape, x.stride(), x.dtype, x.device) for x in inputs]
    aligned = are_aligned(inputs.k, inputs.v)
    plan = plans.get((*like, *options, aligned, "last state"), plan_last_state, inputs, options, aligned)
    final = plan.final.empty(inputs.k)
    plan.states(inputs.k, inputs.v, inputs.initial_state, final, inputs, offset)
    return final


def plan_last_state(inputs: Inputs, options: Options, aligned: bool) -> LastState:
    """Plan of `last_state`."""
    call = Call.of(inputs, options)
    final = Dense.rows(call.state_shape, torch.float32)
    return LastState(final, plan_states(call, inputs.k, inputs.v, inputs.initial_state, final, False, aligned))
