"""Launches of the delta rule's forward on Hopper: which calls it takes."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from warploom.device.rows import Strides
from warploom.ops.delta_attention.call import DeltaCall, DeltaInputs
from warploom.ops.delta_attention.configs import CHUNKS
from warploom.ops.delta_attention.hopper import carry
from warploom.ops.delta_attention.hopper.carry import hopper_carry_back_kernel, hopper_carry_kernel
from warploom.ops.delta_attention.hopper.gradients import hopper_gradient_kernel
from warploom.ops.delta_attention.hopper.matrices import hopper_matrix_kernel
from warploom.ops.delta_attention.hopper.reverse import hopper_reverse_kernel, hopper_states_kernel
from warploom.ops.delta_attention.hopper.scan import (
    BACKWARD_FACTORS,
    BLOCK_E,
    BLOCK_T,
    FACTORS,
    hopper_scan_kernel,
)
from warploom.ops.delta_attention.triton.launch import State, arguments_of, plan_encode, state_strides
from warploom.ops.delta_attention.triton.tiles import DeltaSizes
from warploom.runtime.launch import INTERPRETED, Buffer, Launch, TmaTile, architecture, supports_tma
from warploom.runtime.layout import layout_of_entries

Tensor = torch.Tensor

TOKENS = BLOCK_T.value
"""Tokens of a chunk of `MatrixForward`."""

CARRIED = carry.BLOCK_T.value
"""Tokens of a chunk of the kernels that carry states."""

WIDTHS = (64, 128)
"""Features of queries and keys."""

FEW = 396
"""Programs of a GPU's multiprocessors at a time: with fewer heads that share a key are divided among more."""


class MatrixForward(NamedTuple):
    """Plan of a forward: matrices and factors of chunks, and the scan over these."""

    encoded: Buffer | None  # rotated queries and keys, where they are rotated
    encode_queries: Launch | None
    encode_keys: Launch | None
    matrices: Buffer
    factors: Buffer
    of_chunks: Launch
    scan: Launch

    @classmethod
    def of(cls, call: DeltaCall, out: Tensor, initial: State, final: State) -> MatrixForward:
        """Plans that of a call on chunks of `TOKENS`."""
        q, k = call.inputs.q, call.inputs.k
        encoded = encode_queries = encode_keys = None
        if call.options.kind != "none":  # all at once, for every head of values that shares them
            narrow = call._replace(chunk=CHUNKS[True])
            like = torch.empty(q.shape, dtype=q.dtype, device="meta")
            encoded, encode_queries, encode_keys = (
                Buffer.like(like), plan_encode(narrow, q, like), plan_encode(narrow, k, like)
            )  # fmt: skip
            plain = call.options._replace(kind="none", normalize=False)
            call = call._replace(inputs=call.inputs._replace(q=like, k=like), options=plain)
        matrices = Buffer.rows((call.slots, call.heads, 2 * TOKENS, TOKENS), torch.bfloat16)
        factors = Buffer.rows((call.slots, call.heads, FACTORS.value), torch.float32)
        scan = _plan_scan(call, out, initial, final)
        return cls(encoded, encode_queries, encode_keys, matrices, factors, _plan_matrices(call, False), scan)

    def __call__(self, inputs: DeltaInputs, offset: int, out: Tensor, final: Tensor | None) -> None:
        """Launches it."""
        q, k, v, beta, decay, theta, initial, offsets, cu_seqlens = inputs
        if self.encoded is not None and self.encode_queries is not None and self.encode_keys is not None:
            queries, keys = self.encoded.empty(q), self.encoded.empty(q)
            self.encode_queries(q, queries, theta, offsets, cu_seqlens, offset)
            self.encode_keys(k, keys, theta, offsets, cu_seqlens, offset)
            q, k = queries, keys
        matrices, factors = self.matrices.empty(q), self.factors.empty(q)
        self.of_chunks(q, k, beta, decay, matrices, factors)
        self.scan(q, k, v, matrices, out, factors, initial, final)


class MatrixBackward(NamedTuple):
    """Plan of the gradients of a call whose queries and keys are encoded: two scans between matrices and gradients."""

    matrices: Buffer
    factors: Buffer
    states: Buffer  # also of their gradients
    rows: Buffer  # corrected values, and their gradients
    ddecay: Buffer | None
    of_chunks: Launch
    scan: Launch
    reverse: Launch
    gradients: Launch

    @classmethod
    def of(
        cls, call: DeltaCall, grad: Tensor, grad_state: State, first: State, outs: tuple[Tensor, ...]
    ) -> MatrixBackward:
        """Plans that of a call on chunks of `TOKENS`. ``outs``, of queries, keys and values, have no memory yet."""
        decay, values = call.inputs.decay, call.values
        shape = (call.slots, call.heads)
        return cls(
            Buffer.rows((*shape, 2 * TOKENS, TOKENS), torch.bfloat16),
            Buffer.rows((*shape, BACKWARD_FACTORS.value), torch.float32),
            Buffer.rows((*shape, values, call.features), torch.bfloat16),
            Buffer.rows((*shape, TOKENS, values), torch.bfloat16),
            None if decay is None else Buffer.rows(tuple(decay.shape), torch.float32),
            _plan_matrices(call, True), _plan_states(call), _plan_reverse(call, grad, grad_state, first),
            _plan_gradients(call, grad, outs),
        )  # fmt: skip

    def __call__(
        self, queries: Tensor, keys: Tensor, inputs: DeltaInputs, grad: Tensor, grad_state: Tensor | None,
        first: Tensor | None, outs: tuple[Tensor, ...],
    ) -> Tensor | None:  # fmt: skip
        """Launches it, with ``outs`` of queries, keys, values and β. Returns the gradient of decays in float32."""
        _, _, v, beta, decay, _, initial, *_ = inputs
        dq, dk, dv, dbeta = outs
        matrices, factors = self.matrices.empty(v), self.factors.empty(v)
        self.of_chunks(queries, keys, beta, decay, matrices, factors)
        states, updates = self.states.empty(v), self.rows.empty(v)
        self.scan(keys, v, matrices, factors, initial, states, updates)
        dstates, rests = self.states.empty(v), self.rows.empty(v)
        self.reverse(queries, keys, grad, matrices, factors, grad_state, first, dstates, rests)
        ddecay = None if self.ddecay is None else self.ddecay.empty(v)
        self.gradients(queries, keys, grad, updates, rests, v, states, dstates, factors, dv, dq, dk, dbeta, ddecay)
        return ddecay


def suits_backward(call: DeltaCall, rows: tuple[Tensor, ...]) -> bool:
    """Returns whether a call takes `MatrixBackward`, apart from addresses: ``rows`` are its gradients, that given first."""
    whole = call.decay != "feature" and call.values <= 128 and _has_tiles(call, rows[0])
    return whole and all(supports_tma(x) for x in (*call.inputs[:3], *rows))


def suits(call: DeltaCall, out: Tensor) -> bool:
    """Returns whether a call takes `MatrixForward`, apart from addresses."""
    q, k, v = call.inputs.q, call.inputs.k, call.inputs.v
    return call.decay != "feature" and _has_tiles(call, out) and all(supports_tma(x) for x in (q, k, v))


def _has_tiles(call: DeltaCall, rows: Tensor) -> bool:
    """Returns whether a call's sizes and rows of values are those of the kernels."""
    q = call.inputs.q
    if INTERPRETED or architecture(call.inputs.v.device) != 90 or call.inputs.cu_seqlens is not None:
        return False
    if not (call.features in WIDTHS and call.values % BLOCK_E.value == 0 and call.values <= 256):
        return False
    return q.shape[1] >= TOKENS and q.dtype == rows.dtype == torch.bfloat16 and supports_tma(rows)


def plan_carry(call: DeltaCall, out: Tensor | None, initial: State, final: State) -> Launch | None:
    """Plans what `triton.launch.plan_scan` does, for a call on chunks of `CARRIED`; None if the kernels do not take it."""
    if not _has_tiles(call, call.inputs.v if out is None else out):
        return None
    columns, buffers = call.values // BLOCK_E.value, _chunk_tiles(call)
    if out is None:
        more = _state_tiles(call)
    else:
        more = {"out_desc": TmaTile(out, (0, 2, 1, 3), (1, 1, CARRIED, BLOCK_E.value))}
    return Launch(
        hopper_carry_kernel,
        call.sequences * call.heads * columns,
        takes=(
            *(
                "from_start_desc",
                "until_end_desc",
                "scores_desc",
                "corrected_desc",
                "predicted_desc",
                "kept",
                "initial",
            ),
            *("out_desc", "final", "states_desc", "updates_desc", "cu_seqlens"),
        ),
        unaligned=("initial",),
        num_warps=4,
        sizes=_sizes(call, columns),
        initial_strides=state_strides(initial),
        final_strides=state_strides(final),
        DECAY=call.decay,
        **buffers,
        **more,
    )


def plan_carry_back(call: DeltaCall, grad: Tensor, last: State, first: State) -> Launch | None:
    """Plans what `triton.launch.plan_reverse_scan` does; None if the kernels do not take it."""
    if not _has_tiles(call, grad):
        return None
    columns, buffers = call.values // BLOCK_E.value, _chunk_tiles(call)
    del buffers["corrected_desc"]
    return Launch(
        hopper_carry_back_kernel,
        call.sequences * call.heads * columns,
        takes=(
            *("from_start_desc", "until_end_desc", "scores_desc", "predicted_desc", "kept", "grad_desc", "last"),
            *("first", "states_desc", "updates_desc", "cu_seqlens"),
        ),
        unaligned=("last",),
        num_warps=4,
        sizes=_sizes(call, columns),
        last_strides=state_strides(last),
        first_strides=state_strides(first),
        DECAY=call.decay,
        grad_desc=TmaTile(grad, (0, 2, 1, 3), (1, 1, CARRIED, BLOCK_E.value)),
        **buffers,
        **_state_tiles(call),
    )


def _tile_of_buffer(call: DeltaCall, rows: int, columns: int, tile: tuple[int, int]) -> TmaTile:
    """Returns tiles of a buffer (slots, H, rows, columns)."""
    like = torch.empty((call.slots, call.heads, rows, columns), dtype=torch.bfloat16, device="meta")
    return TmaTile(like, (0, 1, 2, 3), (1, 1, *tile))


def _chunk_tiles(call: DeltaCall) -> dict[str, Any]:
    """Returns tiles of what chunks hold."""
    t, d, width = CARRIED, call.features, BLOCK_E.value
    rows = {
        name: _tile_of_buffer(call, t, d, (t, d))
        for name in ("from_start_desc", "until_end_desc", "predicted_desc")
    }
    return {
        **rows,
        "scores_desc": _tile_of_buffer(call, t, t, (t, t)),
        "corrected_desc": _tile_of_buffer(call, t, call.values, (t, width)),
    }


def _state_tiles(call: DeltaCall) -> dict[str, Any]:
    """Returns tiles of states and updates of chunks."""
    t, d, width = CARRIED, call.features, BLOCK_E.value
    return {
        "states_desc": _tile_of_buffer(call, call.values, d, (width, d)),
        "updates_desc": _tile_of_buffer(call, t, call.values, (t, width)),
    }


def _sizes(call: DeltaCall, columns: int) -> DeltaSizes:
    """Returns the sizes of a call whose states come in so many blocks of columns."""
    _, rest = arguments_of(call, layout_of_entries(Strides, call.inputs.q), "scan")
    sizes: DeltaSizes = rest["sizes"]._replace(columns=columns)
    return sizes


def _plan_matrices(call: DeltaCall, backward: bool) -> Launch:
    key_heads = call.heads // call.group
    programs = call.slots * key_heads
    if backward:  # what is left of the scale is in the gradients
        call = call._replace(options=call.options._replace(kind="none", normalize=False, scale=1.0))
    parts = 1 if programs >= FEW else -(-call.group // 2)
    return Launch(
        hopper_matrix_kernel,
        programs * parts,
        takes=("q_desc", "k_desc", "beta", "decay", "matrices_desc", "factors"),
        unaligned=("beta", "decay"),
        num_warps=4,
        registers=168,
        sizes=_sizes(call, parts),
        NORMALIZE=call.options.normalize,
        DECAYS=call.decay != "none",
        HEADS=min(call.group, 2),
        BACKWARD=backward,
        **_row_tiles(call),
        matrices_desc=_matrix_tiles(call),
    )


def _plan_states(call: DeltaCall) -> Launch:
    columns, initial = call.values // BLOCK_E.value, call.inputs.initial_state
    return Launch(
        hopper_states_kernel,
        call.sequences * call.heads * columns,
        takes=("k_desc", "v_desc", "matrices_desc", "factors", "initial", "states_desc", "updates_desc"),
        unaligned=("initial",),
        num_warps=4,
        sizes=_sizes(call, columns),
        initial_strides=state_strides(initial),
        DECAYS=call.decay != "none",
        k_desc=_row_tiles(call)["k_desc"],
        v_desc=_tiles_of_rows(call.inputs.v, BLOCK_E.value),
        matrices_desc=_tile_of_buffer(call, 2 * TOKENS, TOKENS, (TOKENS, TOKENS)),
        states_desc=_tile_of_buffer(call, call.values, call.features, (BLOCK_E.value, call.features)),
        updates_desc=_tile_of_buffer(call, TOKENS, call.values, (TOKENS, BLOCK_E.value)),
    )


def _plan_reverse(call: DeltaCall, grad: Tensor, last: State, first: State) -> Launch:
    columns = call.values // BLOCK_E.value
    return Launch(
        hopper_reverse_kernel,
        call.sequences * call.heads * columns,
        takes=(
            *("q_desc", "k_desc", "grad_desc", "matrices_desc", "factors", "last", "first", "states_desc"),
            "rests_desc",
        ),
        unaligned=("last",),
        num_warps=4,
        sizes=_sizes(call, columns),
        last_strides=state_strides(last),
        first_strides=state_strides(first),
        DECAYS=call.decay != "none",
        **_row_tiles(call),
        grad_desc=_tiles_of_rows(grad, BLOCK_E.value),
        matrices_desc=_matrix_tiles(call),
        states_desc=_tile_of_buffer(call, call.values, call.features, (BLOCK_E.value, call.features)),
        rests_desc=_tile_of_buffer(call, TOKENS, call.values, (TOKENS, BLOCK_E.value)),
    )


def _plan_gradients(call: DeltaCall, grad: Tensor, outs: tuple[Tensor, ...]) -> Launch:
    dq, dk, dv = outs
    e, d = call.values, call.features
    rows = _tile_of_buffer(call, TOKENS, e, (TOKENS, e))
    states = _tile_of_buffer(call, e, d, (e, d))
    return Launch(
        hopper_gradient_kernel,
        call.slots * (call.heads // call.group),
        takes=(
            *("q_desc", "k_desc", "grad_desc", "updates_desc", "rests_desc", "v_desc", "states_desc"),
            *("grad_states_desc", "factors", "dv_desc", "dq_desc", "dk_desc", "dbeta", "ddecay"),
        ),
        num_warps=8,
        sizes=_sizes(call, 1),
        DECAYS=call.decay != "none",
        **_row_tiles(call),
        grad_desc=_tiles_of_rows(grad, e),
        v_desc=_tiles_of_rows(call.inputs.v, e),
        dv_desc=_tiles_of_rows(dv, e),
        updates_desc=rows,
        rests_desc=rows,
        states_desc=states,
        grad_states_desc=states,
        dq_desc=_tiles_of_rows(dq, d),
        dk_desc=_tiles_of_rows(dk, d),
    )


def _plan_scan(call: DeltaCall, out: Tensor, initial: State, final: State) -> Launch:
    columns = call.values // BLOCK_E.value
    return Launch(
        hopper_scan_kernel,
        call.sequences * call.heads * columns,
        takes=("q_desc", "k_desc", "v_desc", "matrices_desc", "out_desc", "factors", "initial", "final"),
        unaligned=("initial",),
        num_warps=4,
        sizes=_sizes(call, columns),
        initial_strides=state_strides(initial),
        final_strides=state_strides(final),
        DECAYS=call.decay != "none",
        **_row_tiles(call),
        v_desc=_tiles_of_rows(call.inputs.v, BLOCK_E.value),
        out_desc=_tiles_of_rows(out, BLOCK_E.value),
        matrices_desc=_matrix_tiles(call),
    )


def _row_tiles(call: DeltaCall) -> dict[str, Any]:
    """Returns tiles of queries and keys."""
    rows = (("q_desc", call.inputs.q), ("k_desc", call.inputs.k))
    return {name: _tiles_of_rows(x, call.features) for name, x in rows}


def _tiles_of_rows(x: Tensor, width: int) -> TmaTile:
    """Returns tiles of rows (B, N, H, features)."""
    return TmaTile(x, (0, 2, 1, 3), (1, 1, TOKENS, width))


def _matrix_tiles(call: DeltaCall) -> TmaTile:
    """Returns tiles of the matrices of chunks."""
    return _tile_of_buffer(call, 2 * TOKENS, TOKENS, (2 * TOKENS, TOKENS))
