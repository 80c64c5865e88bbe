"""Launchers of linear attention's kernels: sizes, strides, tiles. No validation, no autograd.

What a call allocates and launches is its plan, which depends on shapes, strides, dtypes and options alone. Plans
are kept by whoever calls (`warploom.runtime.plans`): a call like an earlier one only allocates and launches.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from warploom.ops.flash_attention.launches.tiling import Layout, layout_for
from warploom.ops.linear_attention.configs import DECAY_CHUNK, Tile, chunk_of, in_power_of_two, piece_of, tile_of
from warploom.ops.linear_attention.kernels.decay import decay_kernel
from warploom.ops.linear_attention.kernels.states import scan_kernel, sums_kernel
from warploom.ops.linear_attention.kernels.tiles import Sizes, StateStrides, Variant
from warploom.ops.linear_attention.kernels.walk import walk_kernel
from warploom.ops.linear_attention.problem import Options
from warploom.ops.lrpe.kernels.angles import Spec
from warploom.ops.lrpe.launches import ThetaSums, theta_sums
from warploom.runtime.launch import Dense, Launch, multiprocessors
from warploom.runtime.memory_order import layout_of
from warploom.runtime.plans import Plans

Tensor = torch.Tensor

_SCAN_BLOCK = 1024


class Inputs(NamedTuple):
    """The tensors of a call."""

    q: Tensor
    k: Tensor
    v: Tensor
    theta: Tensor | None
    decay: Tensor | None
    initial_state: Tensor | None
    offsets: Tensor | None
    cu_seqlens: Tensor | None

    def places(self, offset: int) -> tuple[Any, ...]:
        """What every kernel takes behind its tensors: those that say where tokens stand, and how they decay."""
        return self.theta, self.offsets, self.cu_seqlens, self.decay, offset


_PLACES = ("theta", "offsets", "cu_seqlens", "decay", "offset")


class Call(NamedTuple):
    """A call apart from what tensors hold: sizes, and how sequences are cut into chunks."""

    inputs: Inputs
    options: Options
    chunk: int

    @classmethod
    def of(cls, inputs: Inputs, options: Options, decay_gradient: bool = False) -> Call:
        """The call on these tensors."""
        tokens, heads, values = inputs.q.shape[1], inputs.q.shape[2], inputs.v.shape[3]
        columns = -(-values // 64)
        chunk = (
            DECAY_CHUNK if decay_gradient else chunk_of(tokens, heads, columns, multiprocessors(inputs.q.device))
        )
        return cls(inputs, options, chunk)

    @property
    def features(self) -> int:
        """Of a part of φ."""
        features = int(self.inputs.q.shape[3])
        return features if self.options.kind in ("none", "cosine") else features // 2

    @property
    def parts(self) -> int:
        """Of φ."""
        return 1 if self.options.kind == "none" else 2

    @property
    def sequences(self) -> int:
        """Packed sequences, or batch entries."""
        cu_seqlens = self.inputs.cu_seqlens
        return int(self.inputs.q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1)

    @property
    def chunks(self) -> int:
        """Of a batch entry."""
        return max(-(-int(self.inputs.q.shape[1]) // self.chunk), 1)

    @property
    def slots(self) -> int:
        """Chunks of all sequences; see `warploom.device.packed`."""
        if self.inputs.cu_seqlens is None:
            return self.sequences * self.chunks
        return self.sequences if self.chunks == 1 else int(self.inputs.q.shape[1]) // self.chunk + self.sequences

    @property
    def state_shape(self) -> tuple[int, int, int, int]:
        """Of a state of every sequence."""
        heads, values = self.inputs.q.shape[2], self.inputs.v.shape[3]
        return (self.sequences, heads, self.parts * self.features, values)

    @property
    def half(self) -> bool:
        """Whether numbers have 16 bits."""
        return self.inputs.q.dtype != torch.float32

    @property
    def state_scale(self) -> float:
        """What gradients of states are kept over; without tokens or causality they are kept as they are."""
        return self.options.scale if self.options.causal and self.inputs.q.shape[1] else 1.0

    def sizes(self, columns: int) -> Sizes:
        """Sizes of a launch of so many blocks of columns."""
        q, theta, decay, cu_seqlens = self.inputs.q, self.inputs.theta, self.inputs.decay, self.inputs.cu_seqlens
        offsets = self.inputs.offsets
        return Sizes(
            tokens=q.shape[1], heads=q.shape[2], chunks=self.chunks,
            chunk=self.chunk if self.chunks > 1 else 2**30, columns=columns, sequences=self.sequences,
            cu_stride=0 if cu_seqlens is None else cu_seqlens.stride(0),
            theta_h=0 if theta is None or theta.dim() == 1 or theta.shape[0] == 1 else theta.stride(0),
            theta_f=0 if theta is None else theta.stride(-1),
            offsets_b=0 if offsets is None or offsets.dim() == 0 else offsets.stride(0),
            decay_b=0 if decay is None or decay.dim() == 1 else decay.stride(0),
            decay_n=0 if decay is None or decay.dim() == 1 else decay.stride(1),
            decay_h=0 if decay is None else decay.stride(-1),
        )  # fmt: skip

    def spec(self, layout: Layout) -> Spec:
        """What LRPE's functions for rows are compiled for. Without encoding rows are loaded as for ``cosine``."""
        theta, kind = self.inputs.theta, self.options.kind
        frequencies = 1 if theta is None else theta.shape[-1]
        return Spec("cosine" if kind == "none" else kind, 1, layout.vec, 1, layout.unit, self.features, frequencies)

    def variant(self, tile: Tile, block_f: int, block_e: int, pieces: int) -> Variant:
        """What a kernel is compiled for."""
        decay = self.inputs.decay
        kind = "none" if decay is None else "head" if decay.dim() == 1 else "token"
        options = self.options
        return Variant(
            options.kind, options.activation, kind, options.causal, self.inputs.v.shape[3], tile.tokens, block_f,
            block_e, pieces,
        )  # fmt: skip

    def on_values(self, layout: Layout, tile: Tile, columns: int) -> dict[str, Any]:
        """What kernels are launched with whose states have all features of φ in pieces, and some of a value's."""
        block = piece_of(self.features)
        return self._common(layout, tile, columns, block, tile.columns, -(-self.features // block))

    def on_features(self, layout: Layout, tile: Tile, columns: int, block_f: int) -> dict[str, Any]:
        """And those whose states have all features of a value in pieces, and some of each part of φ."""
        values = self.inputs.v.shape[3]
        block = piece_of(values)
        return self._common(layout, tile, columns, block_f, block, -(-values // block))

    def _common(
        self, layout: Layout, tile: Tile, columns: int, block_f: int, block_e: int, pieces: int
    ) -> dict[str, Any]:
        return {
            "sizes": self.sizes(columns),
            "spec": self.spec(layout),
            "variant": self.variant(tile, block_f, block_e, pieces),
            "num_warps": tile.warps,
            "num_stages": tile.stages,
        }


def _state_strides(state: Tensor | Dense | None) -> StateStrides:
    if state is None:
        return StateStrides(0, 0, 0, 0)
    return StateStrides(*(state.stride() if isinstance(state, Tensor) else state.stride))


# ----------------------------------------------------------------------------------------------------------
# States of chunks
# ----------------------------------------------------------------------------------------------------------


class States(NamedTuple):
    """Plan of the states of chunks: in one direction, from the sequences' first or last state to the other."""

    states: Dense
    totals: Dense | None
    sums: Launch
    scan: Launch

    def __call__(
        self, b: Tensor, c: Tensor, initial: Tensor | None, final: Tensor | None, inputs: Inputs, offset: int
    ) -> Tensor:
        """States (slots, H, F, E) in float32, of rows ``b`` and ``c``; writes ``final``."""
        states = self.states.empty(b)
        totals = None if self.totals is None else self.totals.empty(b)
        self.sums(b, c, states, totals, *inputs.places(offset))
        self.scan(states, totals, initial, final, inputs.cu_seqlens)
        return states


def plan_states(
    call: Call, b: Tensor, c: Tensor, initial: Tensor | None, final: Dense | None, reverse: bool
) -> States:
    """Plan of `States`, of rows to be encoded and others."""
    sequences, heads, features, values = call.state_shape
    states = Dense.rows((call.slots, heads, features, values), torch.float32)
    totals = None if call.inputs.decay is None else Dense.rows((call.slots, heads), torch.float32)
    tile = tile_of("sums", call.half, features, values, call.inputs.q.shape[1])
    columns = -(-values // tile.columns)
    layout = layout_for(b, c)
    sums = Launch(
        sums_kernel,
        call.slots * heads * columns,
        takes=("b", "c", "states", "totals", *_PLACES),
        states_strides=_state_strides(states),
        REVERSE=reverse,
        **layout.of("b", "c"),
        **call.on_values(layout, tile, columns),
    )
    blocks = -(-features * values // _SCAN_BLOCK)
    scale = call.state_scale if reverse else 1.0
    scan = Launch(
        scan_kernel,
        sequences * heads * blocks,
        takes=("states", "totals", "initial", "final", "cu_seqlens"),
        sizes=call.sizes(blocks),
        initial_strides=_state_strides(initial),
        final_strides=_state_strides(final),
        into=1.0 / scale,
        out_of=scale,
        F=features,
        E=values,
        BLOCK=_SCAN_BLOCK,
        REVERSE=reverse,
    )
    return States(states, totals, sums, scan)


# ----------------------------------------------------------------------------------------------------------
# Walks
# ----------------------------------------------------------------------------------------------------------


class Rows(NamedTuple):
    """What a walk goes over: see `kernels.walk`."""

    a: Tensor
    b: Tensor
    c: Tensor
    x: Tensor | None
    out: Tensor  # without memory


def plan_walk(
    call: Call, rows: Rows, initial: Tensor | Dense | None, final: Dense | None, *, decoded: bool, reverse: bool,
) -> Launch:  # fmt: skip
    """Plan of a walk. ``decoded``: whether the result is the gradient of what is encoded."""
    values, tokens = int(call.inputs.v.shape[3]), int(call.inputs.q.shape[1])
    if decoded:
        features = call.features
        tile = tile_of("decoded", call.half, values, features, tokens)
        block_f = tile.columns
        if call.options.activation == "softmax":  # whose gradient takes whole rows
            block_f = in_power_of_two(features)
        columns = -(-features // block_f)
    else:
        tile = tile_of("outputs", call.half, call.state_shape[2], values, tokens)
        columns = -(-values // tile.columns)
    layout = layout_for(rows.a, rows.b, rows.c, rows.a if rows.x is None else rows.x, rows.out)
    scale = call.state_scale if reverse else 1.0
    return Launch(
        walk_kernel,
        call.slots * call.inputs.q.shape[2] * columns,
        takes=("a", "b", "c", "x", "out", "initial", "final", "partial", *_PLACES),
        scale=call.options.scale,
        into=1.0 / scale if isinstance(initial, Tensor) else 1.0,
        out_of=scale,
        initial_strides=_state_strides(initial),
        final_strides=_state_strides(final),
        DECODED=decoded,
        REVERSE=reverse,
        **layout.of("a", "b", "c", "x", "out"),
        **(call.on_features(layout, tile, columns, block_f) if decoded else call.on_values(layout, tile, columns)),
    )


# ----------------------------------------------------------------------------------------------------------
# Forward
# ----------------------------------------------------------------------------------------------------------


class Forward(NamedTuple):
    """Plan of a forward."""

    out: Dense
    final: Dense | None
    states: States | None
    walk: Launch


def forward(inputs: Inputs, options: Options, offset: int, plans: Plans) -> tuple[Tensor, Tensor | None]:
    """Outputs (B, N, H, E), and the last states (S, H, F, E) in float32 where they are asked for."""
    plan = plans.get("forward", plan_forward, inputs, options)
    q, k, v, *_, initial, _, _ = inputs
    out = plan.out.empty(q)
    final = None if plan.final is None else plan.final.empty(q)
    kept = final if options.return_state else None
    places = inputs.places(offset)
    if plan.states is None:
        plan.walk(q, k, v, None, out, initial, kept, None, *places)
    else:
        states = plan.states(k, v, initial, final, inputs, offset)
        plan.walk(q, k, v, None, out, states if options.causal else final, None, None, *places)
    return out, kept


def plan_forward(inputs: Inputs, options: Options) -> Forward:
    """Plan of `forward`."""
    call = Call.of(inputs, options)
    q, k, v, *_, initial, _, _ = inputs
    out = layout_of(q, v.shape[3])
    final = Dense.rows(call.state_shape, torch.float32) if options.return_state or not options.causal else None
    rows = Rows(q, k, v, None, out)
    if call.chunks == 1 and options.causal:
        walk = plan_walk(call, rows, initial, final, decoded=False, reverse=False)
        return Forward(Dense.like(out), final, None, walk)
    states = plan_states(call, k, v, initial, final, False)
    given = states.states if options.causal else final
    walk = plan_walk(call, rows, given, None, decoded=False, reverse=False)
    return Forward(Dense.like(out), final, states, walk)


# ----------------------------------------------------------------------------------------------------------
# Backward
# ----------------------------------------------------------------------------------------------------------


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
    layout = layout_for(q, k, v, grad)
    launch = Launch(
        decay_kernel,
        call.slots * q.shape[2],
        takes=("q", "k", "v", "grad", "states", "grad_states", "out", *_PLACES),
        scale=call.options.scale,
        states_strides=_state_strides(states),
        BY_HEAD=by_head,
        **layout.of("q", "k", "v", "grad"),
        **call.on_values(layout, tile, 1),
    )
    return Decays(Dense.rows(shape, torch.float32), launch, by_head)


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
    decays: Decays | None
    theta_sums: ThetaSums | None


def backward(
    grad: Tensor, grad_state: Tensor | None, inputs: Inputs, options: Options, offset: int, wanted: Sequence[bool],
    plans: Plans,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Gradients of q, k, v, theta, decay and the first state, of those that are wanted."""
    # Strides, because what autograd saved may come back with others: from the host's memory, for one.
    strides = tuple([None if x is None else x.stride() for x in (grad, grad_state, *inputs)])
    plan = plans.get((grad.dtype, strides, *wanted), plan_backward, grad, grad_state, inputs, options, wanted)
    q, k, v, theta, decay, initial, _, _ = inputs
    dq, dk, dv = plan.dq.empty(q), plan.dk.empty(q), plan.dv.empty(q)
    first = None if plan.first is None else plan.first.empty(q)
    last = None if plan.last is None else plan.last.empty(q)
    partial = halves = None
    if plan.theta_sums is not None:
        partial = plan.theta_sums.empty(q)
        halves = partial.flatten(0, 1).chunk(2) if partial.numel() else (partial, partial)
    places = inputs.places(offset)
    before, behind, own = initial, grad_state, first
    if plan.forward is not None:
        before = plan.forward(k, v, initial, last, inputs, offset)
        before = before if options.causal else last
    if plan.reverse is not None:
        behind = plan.reverse(q, grad, grad_state, first, inputs, offset)
        behind, own = (behind if options.causal else first), None
    if plan.query is not None:
        plan.query(grad, v, k, q, dq, before, None, None if halves is None else halves[0], *places)
    if plan.key is not None:
        plan.key(v, grad, q, k, dk, behind, None, None if halves is None else halves[1], *places)
    if plan.value is not None:
        plan.value(k, q, grad, None, dv, behind, own, None, *places)
    dtheta = ddecay = None
    if plan.theta_sums is not None and partial is not None and theta is not None:
        dtheta = plan.theta_sums.reduce(partial, theta)
    if plan.decays is not None and before is not None and behind is not None and decay is not None:
        ddecay = plan.decays(inputs, grad, before, behind, offset).to(decay.dtype)
    return dq, dk, dv, dtheta, ddecay, first if wanted[5] else None


def plan_backward(
    grad: Tensor, grad_state: Tensor | None, inputs: Inputs, options: Options, wanted: Sequence[bool]
) -> Backward:
    """Plan of `backward`."""
    q, k, v, theta, _, initial, _, _ = inputs
    of_q, of_k, of_v, of_theta, of_decay, of_initial = wanted
    call = Call.of(inputs, options, of_decay)
    dq, dk, dv = layout_of(q, q.shape[3]), layout_of(k, k.shape[3]), layout_of(v, v.shape[3])
    apart = call.chunks > 1 or not options.causal or of_decay
    first = last = None
    if not options.causal:
        first = last = Dense.rows(call.state_shape, torch.float32)
    elif of_initial and initial is not None:
        first = Dense.rows(call.state_shape, initial.dtype)
    forward = reverse = query = key = value = decays = sums = None
    if apart and (of_q or of_theta or of_decay):
        forward = plan_states(call, k, v, initial, last, False)
    if apart:
        reverse = plan_states(call, q, grad, grad_state, first, True)
    before: Tensor | Dense | None = initial
    behind: Tensor | Dense | None = grad_state
    if apart:
        before = last if last is not None else None if forward is None else forward.states
        behind = first if not options.causal else None if reverse is None else reverse.states
    if of_q or of_theta:
        query = plan_walk(call, Rows(grad, v, k, q, dq), before, None, decoded=True, reverse=False)
    if of_k or of_theta:
        key = plan_walk(call, Rows(v, grad, q, k, dk), behind, None, decoded=True, reverse=True)
    if of_v or (of_initial and not apart):
        own = None if apart else first
        value = plan_walk(call, Rows(k, q, grad, None, dv), behind, own, decoded=False, reverse=True)
    if of_decay and forward is not None:
        decays = _plan_decays(call, grad, forward.states)
    if of_theta and theta is not None:
        parts = 2 * call.slots * (1 if theta.dim() == 2 and theta.shape[0] > 1 else q.shape[2])
        sums = theta_sums(parts, theta, call.features, 1)
    outs = Dense.like(dq), Dense.like(dk), Dense.like(dv)
    return Backward(*outs, first, last, forward, reverse, query, key, value, decays, sums)


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
    plan = plans.get((*like, *options, "last state"), plan_last_state, inputs, options)
    final = plan.final.empty(inputs.k)
    plan.states(inputs.k, inputs.v, inputs.initial_state, final, inputs, offset)
    return final


def plan_last_state(inputs: Inputs, options: Options) -> LastState:
    """Plan of `last_state`."""
    call = Call.of(inputs, options)
    final = Dense.rows(call.state_shape, torch.float32)
    return LastState(final, plan_states(call, inputs.k, inputs.v, inputs.initial_state, final, False))
