"""Delta rule attention on kernels: what a call allocates and launches.

What a call allocates and launches is its plan, which depends on shapes, strides, dtypes and options alone. Plans
are kept by the caller (`warploom.runtime.plans`): a call like an earlier one only allocates and launches.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from warploom.ops.delta_attention.call import DeltaCall, DeltaInputs, DeltaOptions
from warploom.ops.delta_attention.configs import CHUNKS, MOST_BYTES, SHORT, STEPS, in_power_of_two
from warploom.ops.delta_attention.hopper import launch as hopper
from warploom.ops.delta_attention.hopper.launch import MatrixBackward, MatrixForward
from warploom.ops.delta_attention.triton.launch import (
    ChunkBuffers,
    parts_of,
    plan_chunks,
    plan_decode,
    plan_encode,
    plan_features,
    plan_pairs,
    plan_reverse_scan,
    plan_scan,
    plan_step,
    wide_values,
    work_dtype,
)
from warploom.ops.lrpe import engine as lrpe
from warploom.ops.lrpe.call import LrpeInputs, LrpeOptions
from warploom.runtime.launch import Buffer, Launch, are_aligned
from warploom.runtime.memory_order import layout_of
from warploom.runtime.plans import Plans

Tensor = torch.Tensor


class DeltaForward(NamedTuple):
    """Plan of a forward: a step, or what chunks hold and the scan over them, on Hopper in its own way."""

    out: Buffer
    final: Buffer | None
    step: Launch | None
    entries: int  # of the batch, at a time
    hopper: MatrixForward | None
    buffers: ChunkBuffers | None
    chunks: Launch | None
    scan: Launch | None


def entries_at_once(inputs: DeltaInputs, options: DeltaOptions, backward: bool) -> int:
    """Returns the batch entries whose buffers between launches are held at a time, `MOST_BYTES` if they can be."""
    batch = int(inputs.q.shape[0])
    if batch <= 1:
        return 1
    call = DeltaCall(inputs, options, CHUNKS[inputs.q.dtype.itemsize < 4])
    buffers = [buffer for buffer in ChunkBuffers.of(call, backward) if buffer is not None]
    if backward:
        wide, shape = wide_values(call), (call.slots, call.heads)
        states = Buffer.rows((*shape, wide, in_power_of_two(call.features)), work_dtype(call))
        updates = Buffer.rows((*shape, call.chunk, wide), work_dtype(call))
        buffers += [states, states, updates, updates, updates]
        if call.encoded or call.group > 1:
            buffers += 3 * [Buffer.rows((*inputs.q.shape[:2], call.heads, call.features), torch.float32)]
        if rotated_dtype(call) != inputs.q.dtype:
            buffers.append(Buffer.rows(tuple(inputs.q.shape), rotated_dtype(call)))
    held = sum(math.prod(buffer.shape) * buffer.dtype.itemsize for buffer in buffers)
    return max(1, MOST_BYTES * batch // max(int(held), 1))


def pieces_of(inputs: DeltaInputs, entries: int) -> Iterator[tuple[slice, DeltaInputs]]:
    """Yields so many batch entries of a call at a time, and which they are."""
    batch = inputs.q.shape[0]
    for first in range(0, batch, entries):
        own = slice(first, first + entries)
        offsets = inputs.offsets
        yield (
            own,
            inputs._replace(
                q=inputs.q[own], k=inputs.k[own], v=inputs.v[own], beta=inputs.beta[own],
                decay=None if inputs.decay is None else inputs.decay[own],
                initial_state=None if inputs.initial_state is None else inputs.initial_state[own],
                offsets=offsets if offsets is None or offsets.dim() == 0 else offsets[own],
            ),
        )  # fmt: skip


def forward(inputs: DeltaInputs, options: DeltaOptions, offset: int, plans: Plans) -> tuple[Tensor, Tensor | None]:
    """Returns outputs (B, N, H, E), and the last states (S, H, D, E) in float32 where they are asked for."""
    q, k, v, beta, decay, theta, initial, offsets, cu_seqlens = inputs
    aligned = are_aligned(q, k, v)
    plan = plans.get(("whole", aligned), plan_forward, inputs, options, aligned)
    out = plan.out.empty(q)
    final = None if plan.final is None else plan.final.empty(q)
    if plan.step is not None:
        plan.step(q, k, v, out, initial, final, beta, decay, theta, offsets, offset)
    elif plan.entries < q.shape[0]:
        for own, part in pieces_of(inputs, plan.entries):
            of_part = plans.get(("forward", int(part.q.shape[0])), Plans)
            found, state = forward(part, options, offset, of_part)
            out[own].copy_(found)
            if final is not None and state is not None:
                final[own].copy_(state)
    elif plan.hopper is not None:
        plan.hopper(inputs, offset, out, final)
    elif plan.buffers is not None and plan.chunks is not None and plan.scan is not None:
        held = plan.buffers.empty(q)
        plan.chunks(q, k, v, beta, decay, theta, offsets, cu_seqlens, *held, offset)
        plan.scan(*held[:6], initial, out, final, None, None, cu_seqlens)
    return out, final


def plan_forward(inputs: DeltaInputs, options: DeltaOptions, aligned: bool) -> DeltaForward:
    """Plans `forward`."""
    tokens = int(inputs.q.shape[1])
    out = layout_of(inputs.v, inputs.v.shape[3])
    is_step = 0 < tokens <= STEPS and inputs.cu_seqlens is None
    call = DeltaCall(inputs, options, CHUNKS[inputs.q.dtype.itemsize < 4])
    final = Buffer.rows(call.state_shape, torch.float32) if options.return_state else None
    if is_step:
        step = plan_step(call._replace(chunk=STEPS), out, inputs.initial_state, final)
        return DeltaForward(Buffer.like(out), final, step, 0, None, None, None, None)
    entries = entries_at_once(inputs, options, False)
    wide = call._replace(chunk=hopper.TOKENS)
    if aligned and hopper.suits(wide, out):
        whole = MatrixForward.of(wide, out, inputs.initial_state, final)
        return DeltaForward(Buffer.like(out), final, None, entries, whole, None, None, None)
    chunks = plan_chunks(call, inputs.q, inputs.k, encoding=True)
    given = (call, out, inputs.initial_state, final)
    scan = hopper.plan_carry(*given) or plan_scan(*given)
    return DeltaForward(Buffer.like(out), final, None, entries, None, ChunkBuffers.of(call, False), chunks, scan)


def rotated_dtype(call: DeltaCall) -> torch.dtype:
    """Returns the dtype of gradients of rotated rows: float16 may not hold those of rows whose own it does."""
    dtype = call.inputs.q.dtype
    return torch.float32 if call.options.kind != "none" and dtype == torch.float16 else dtype


class EncodedRows(NamedTuple):
    """Plan of queries or keys that are not used as they come, and of their gradients."""

    encoded: Buffer | None  # None where a head of keys serves several, and nothing is encoded
    encode: Launch | None
    grads: Buffer
    rotated: Buffer | None  # gradients before they are rotated back, where this is not done in place
    decode: Launch

    @classmethod
    def of(cls, call: DeltaCall, x: Tensor, dx: Tensor, heads: int) -> EncodedRows:
        """Plans those of ``x``, whose gradient ``dx`` has no memory yet, from gradients of so many heads."""
        encoded = torch.empty(x.shape, dtype=x.dtype, device="meta") if call.encoded else x
        grads = torch.empty((*x.shape[:2], heads, x.shape[3]), dtype=torch.float32, device="meta")
        encode = plan_encode(call, x, encoded) if call.encoded else None
        to_encode = Buffer.like(encoded) if call.encoded else None
        rotated = None
        if rotated_dtype(call) != x.dtype:
            dx = torch.empty(x.shape, dtype=rotated_dtype(call), device="meta")
            rotated = Buffer.like(dx)
        decode = plan_decode(call, x, encoded, grads, dx)
        return cls(to_encode, encode, Buffer.like(grads), rotated, decode)


class ChunkedBackward(NamedTuple):
    """Plan of the gradients of a call whose queries and keys are encoded."""

    buffers: ChunkBuffers
    states: Buffer  # also of their gradients
    updates: Buffer
    corrections: Buffer
    pair_gradients: Buffer
    ddecay: Buffer | None
    chunks: Launch
    scan: Launch
    reverse: Launch
    pairs: Launch
    features: Launch

    def __call__(
        self, queries: Tensor, keys: Tensor, inputs: DeltaInputs, grad: Tensor, grad_state: Tensor | None,
        first: Tensor | None, outs: tuple[Tensor, ...],
    ) -> Tensor | None:  # fmt: skip
        """Launches it, with ``outs`` of queries, keys, values and β. Returns the gradient of decays in float32."""
        _, _, v, beta, decay, _, initial, _, cu_seqlens = inputs
        dq, dk, dv, dbeta = outs
        held = self.buffers.empty(v)
        self.chunks(queries, keys, v, beta, decay, None, None, cu_seqlens, *held, 0)
        states, updates = self.states.empty(v), self.updates.empty(v)
        self.scan(*held[:6], initial, None, None, states, updates, cu_seqlens)
        held = held._replace(corrected=None)  # each is let go when no launch needs it any more
        dstates, dupdates = self.states.empty(v), self.updates.empty(v)
        self.reverse(
            held.from_start, held.until_end, held.scores, held.predicted, held.kept, grad, grad_state, first,
            dstates, dupdates, cu_seqlens,
        )  # fmt: skip
        held = held._replace(from_start=None, until_end=None, predicted=None, kept=None)
        ddecay = None if self.ddecay is None else self.ddecay.empty(v)
        corrections, of_pairs = self.corrections.empty(v), self.pair_gradients.empty(v)
        self.pairs(
            v, beta, decay, cu_seqlens, grad, held.scores, held.inverse, held.decayed, states, updates, dupdates,
            corrections, of_pairs, dv, dbeta, ddecay,
        )  # fmt: skip
        del held, dupdates
        self.features(
            queries, keys, decay, cu_seqlens, grad, states, updates, dstates, corrections, of_pairs, dq, dk, ddecay
        )
        return ddecay.sum(-1) if ddecay is not None and decay is not None and decay.dim() == 3 else ddecay


class DeltaBackward(NamedTuple):
    """Plan of a backward."""

    dq: Buffer
    dk: Buffer
    dv: Buffer
    dbeta: Buffer
    first: Buffer | None
    queries: EncodedRows | None
    keys: EncodedRows | None
    gradients: ChunkedBackward | MatrixBackward  # of encoded rows


def backward(
    grad: Tensor, grad_state: Tensor | None, inputs: DeltaInputs, options: DeltaOptions, offset: int,
    wanted: Sequence[bool], plans: Plans,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Returns the gradients of q, k, v, beta, decay, theta and the first state, of those that are wanted."""
    if options.scale == 0:  # gradients of states, which are kept over the scale, do not come from outputs then
        grad, options = grad * 0.0, options._replace(scale=1.0)
    # Strides, because what autograd saved may come back with others: from the host's memory, for one.
    strides = tuple([None if x is None else x.stride() for x in (grad, grad_state, *inputs)])
    q, k, v, _, decay, *_ = inputs
    entries = plans.get("entries", entries_at_once, inputs, options, True)
    if entries < q.shape[0]:
        return _backward_in_pieces(grad, grad_state, inputs, options, offset, wanted, plans, entries)
    if not any(wanted[:6]):
        given = (grad, grad_state, inputs, options)
        alone = plans.get((grad.dtype, strides, "state"), plan_state_backward, *given)
        return *[None] * 6, _differentiate_state(alone, *given[:3], offset)
    aligned = are_aligned(grad, q, k, v)
    key = (grad.dtype, strides, aligned, *wanted)
    plan = plans.get(key, plan_backward, grad, grad_state, inputs, options, wanted, aligned)
    first = None if plan.first is None else plan.first.empty(q)
    queries, keys = q, k
    if plan.queries is not None and plan.keys is not None:
        queries, keys = _encode(plan.queries, q, inputs, offset), _encode(plan.keys, k, inputs, offset)
    dq, dk, dv, dbeta = plan.dq.empty(q), plan.dk.empty(q), plan.dv.empty(q), plan.dbeta.empty(q)
    of_q, of_k = dq, dk
    if plan.queries is not None and plan.keys is not None:
        of_q, of_k = plan.queries.grads.empty(q), plan.keys.grads.empty(q)
    ddecay = plan.gradients(queries, keys, inputs, grad, grad_state, first, (of_q, of_k, dv, dbeta))
    dtheta = None
    if plan.queries is not None and plan.keys is not None:
        rows = ((plan.queries, q, queries, of_q, dq), (plan.keys, k, keys, of_k, dk))
        dtheta = _decode(rows, inputs, options, offset, wanted[5], plans)
    if ddecay is not None and decay is not None:
        ddecay = ddecay.to(decay.dtype)
    return dq, dk, dv, dbeta, ddecay, dtheta, first if wanted[6] else None


class DeltaStateBackward(NamedTuple):
    """Plan of the gradient of the first state alone."""

    first: Buffer
    buffers: ChunkBuffers
    states: Buffer
    updates: Buffer
    chunks: Launch
    reverse: Launch


def plan_state_backward(
    grad: Tensor, grad_state: Tensor | None, inputs: DeltaInputs, options: DeltaOptions
) -> DeltaStateBackward:
    """Plans the gradient of the first state alone."""
    call = DeltaCall(inputs, options, CHUNKS[inputs.q.dtype.itemsize < 4])
    first, work = Buffer.rows(call.state_shape, inputs.initial_state.dtype), work_dtype(call)  # type: ignore[union-attr]
    shape, wide = (call.slots, call.heads), wide_values(call)
    states = Buffer.rows((*shape, wide, in_power_of_two(call.features)), work)
    updates = Buffer.rows((*shape, call.chunk, wide), work)
    chunks = plan_chunks(call, inputs.q, inputs.k, encoding=True)
    reverse = plan_reverse_scan(call, grad, grad_state, first)
    return DeltaStateBackward(first, ChunkBuffers.of(call, False), states, updates, chunks, reverse)


def _differentiate_state(
    plan: DeltaStateBackward, grad: Tensor, grad_state: Tensor | None, inputs: DeltaInputs, offset: int
) -> Tensor:
    """Returns the gradient of the first state: that of outputs and of the last state, carried back over chunks."""
    q, k, v, beta, decay, theta, _, offsets, cu_seqlens = inputs
    held = plan.buffers.empty(q)
    plan.chunks(q, k, v, beta, decay, theta, offsets, cu_seqlens, *held, offset)
    first, states, updates = plan.first.empty(q), plan.states.empty(q), plan.updates.empty(q)
    plan.reverse(
        held.from_start, held.until_end, held.scores, held.predicted, held.kept, grad, grad_state, first, states,
        updates, cu_seqlens,
    )  # fmt: skip
    return first


def _backward_in_pieces(
    grad: Tensor, grad_state: Tensor | None, inputs: DeltaInputs, options: DeltaOptions, offset: int,
    wanted: Sequence[bool], plans: Plans, entries: int,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Returns the gradients of `backward`, of which so many batch entries are made at a time."""
    q, k, v, beta, decay, theta, initial, *_ = inputs
    rows = [Buffer.like(layout_of(x, x.shape[3])).empty(q) for x in (q, k, v)]
    dbeta = torch.empty(beta.shape, dtype=beta.dtype, device=beta.device)
    ddecay = None if decay is None else torch.empty(decay.shape, dtype=decay.dtype, device=decay.device)
    first = None
    if wanted[6] and initial is not None:
        first = torch.empty(initial.shape, dtype=initial.dtype, device=initial.device)
    wholes = (*rows, dbeta, ddecay)
    dtheta: Tensor | None = None
    for own, part in pieces_of(inputs, entries):
        of_part = plans.get(("backward", int(part.q.shape[0])), Plans)
        last = None if grad_state is None else grad_state[own]
        *found, theta_part, state = backward(grad[own], last, part, options, offset, wanted, of_part)
        for whole, each in zip((*wholes, first), (*found, state)):
            if whole is not None and each is not None:
                whole[own].copy_(each)
        if theta_part is not None:
            wide = theta_part.to(torch.promote_types(theta_part.dtype, torch.float32))
            dtheta = wide if dtheta is None else dtheta + wide
    return *wholes, None if dtheta is None or theta is None else dtheta.to(theta.dtype), first


def _encode(plan: EncodedRows, x: Tensor, inputs: DeltaInputs, offset: int) -> Tensor:
    """Returns the encoded rows of ``x``."""
    if plan.encoded is None or plan.encode is None:
        return x
    encoded = plan.encoded.empty(x)
    plan.encode(x, encoded, inputs.theta, inputs.offsets, inputs.cu_seqlens, offset)
    return encoded


def _decode(
    rows: Sequence[tuple[EncodedRows, Tensor, Tensor, Tensor, Tensor]], inputs: DeltaInputs, options: DeltaOptions,
    offset: int, of_theta: bool, plans: Plans,
) -> Tensor | None:  # fmt: skip
    """Writes the gradients of queries and keys; returns that of theta if it is wanted.

    ``rows`` are a plan, what was encoded, what it was encoded to, the gradient of that, and where its own goes.
    Rows may be divided by their lengths before or after they are rotated.
    """
    theta, turns = inputs.theta, LrpeOptions(kind=options.kind, activation="none")
    dtheta: Tensor | None = None
    for plan, x, encoded, grads, dx in rows:
        rotated = dx if plan.rotated is None else plan.rotated.empty(x)
        plan.decode(x, encoded, grads, rotated, inputs.cu_seqlens)
        if theta is not None:
            # Two gradients of theta are added up in its dtype, for which 16 bits are too few.
            wide = theta.to(torch.promote_types(theta.dtype, torch.float32))
            given = LrpeInputs(x, wide, offsets=inputs.offsets, cu_seqlens=inputs.cu_seqlens)
            part = lrpe.backward(rotated, given, offset, turns, of_theta, plans, dx)[1]
            dtheta = part if dtheta is None or part is None else dtheta + part
    return None if dtheta is None or theta is None else dtheta.to(theta.dtype)


def plan_backward(
    grad: Tensor, grad_state: Tensor | None, inputs: DeltaInputs, options: DeltaOptions, wanted: Sequence[bool],
    aligned: bool,
) -> DeltaBackward:  # fmt: skip
    """Plans `backward`."""
    q, k, v, beta, _, _, initial, *_ = inputs
    call = DeltaCall(inputs, options, CHUNKS[q.dtype.itemsize < 4])
    dq, dk, dv = layout_of(q, q.shape[3]), layout_of(k, k.shape[3]), layout_of(v, v.shape[3])
    first = None
    if wanted[6] and initial is not None:
        first = Buffer.rows(call.state_shape, initial.dtype)
    # Of a short sequence, gradients of decays come from states for the most part, which are in float32 then.
    narrow = work_dtype(call) == torch.bfloat16 and not (wanted[4] and int(q.shape[1]) <= SHORT)
    whole = call._replace(chunk=hopper.TOKENS)
    rows, grads, decoded = (q, k), (dq, dk), None
    if call.encoded:
        rows = (torch.empty(q.shape, dtype=q.dtype, device="meta"),) * 2
        decoded = torch.empty(q.shape, dtype=torch.float32, device="meta")
    encoded = whole._replace(inputs=inputs._replace(q=rows[0], k=rows[1]))
    outs = (dq if decoded is None else decoded, dk if decoded is None else decoded, dv)
    matrices = narrow and aligned and hopper.suits_backward(encoded, (grad, *outs))
    queries = keys = None
    if call.encoded or (call.group > 1 and not matrices):
        heads = q.shape[2] if matrices else call.heads
        queries, keys = EncodedRows.of(call, q, dq, heads), EncodedRows.of(call, k, dk, heads)
        grads = (torch.empty((*q.shape[:2], heads, q.shape[3]), dtype=torch.float32, device="meta"),) * 2
    gradients: MatrixBackward | ChunkedBackward
    if matrices:
        gradients = MatrixBackward.of(encoded, grad, grad_state, first, outs)
    else:
        given = (call, rows, grad, grad_state, first, grads, dv)
        gradients = plan_chunked(*given, aligned and narrow, torch.bfloat16 if narrow else torch.float32)
    dbeta = Buffer.rows(tuple(beta.shape), beta.dtype)
    return DeltaBackward(Buffer.like(dq), Buffer.like(dk), Buffer.like(dv), dbeta, first, queries, keys, gradients)


def plan_chunked(
    call: DeltaCall, rows: tuple[Tensor, Tensor], grad: Tensor, grad_state: Tensor | None, first: Buffer | None,
    grads: tuple[Tensor, Tensor], dv: Tensor, aligned: bool, of_states: torch.dtype,
) -> ChunkedBackward:  # fmt: skip
    """Plans `ChunkedBackward`. ``rows`` are encoded queries and keys, ``grads`` their gradients, without memory."""
    decay, initial = call.inputs.decay, call.inputs.initial_state
    wide, work, shape = wide_values(call), work_dtype(call), (call.slots, call.heads)
    updates = Buffer.rows((*shape, call.chunk, wide), work)
    scan = reverse = None
    if of_states == torch.bfloat16:
        scan = hopper.plan_carry(call, None, initial, None)
        reverse = hopper.plan_carry_back(call, grad, grad_state, first) if aligned else None
    ddecay = None
    if decay is not None:  # that of a head comes in parts
        ddecay = Buffer.rows((*decay.shape, *([parts_of(call)] if decay.dim() == 3 else [])), torch.float32)
    return ChunkedBackward(
        ChunkBuffers.of(call, True), Buffer.rows((*shape, wide, in_power_of_two(call.features)), of_states),
        updates, updates, Buffer.rows((*shape, 2 * call.chunk, call.chunk), work), ddecay,
        plan_chunks(call, *rows, encoding=False), scan or plan_scan(call, None, initial, None),
        reverse or plan_reverse_scan(call, grad, grad_state, first), plan_pairs(call, grad, dv),
        plan_features(call, *rows, grad, grads),
    )  # fmt: skip
