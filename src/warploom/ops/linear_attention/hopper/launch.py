"""Launches of linear attention's kernels for Hopper: which calls they take."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from warploom.ops.linear_attention.call import PLACES, LinearCall
from warploom.ops.linear_attention.configs import encoder_of
from warploom.ops.linear_attention.hopper.cosine import hopper_cosine_kernel
from warploom.ops.linear_attention.hopper.encoding import BLOCK_T, Form
from warploom.ops.linear_attention.hopper.keys import hopper_key_kernel
from warploom.ops.linear_attention.hopper.parts import hopper_parts_kernel
from warploom.ops.linear_attention.hopper.product import hopper_product_kernel
from warploom.ops.linear_attention.hopper.sums import hopper_sums_kernel
from warploom.ops.linear_attention.triton.launch import ProductRows, State, scales_of, sizes_of, state_strides
from warploom.runtime.launch import INTERPRETED, Buffer, Launch, TmaTile, architecture, supports_tma

Tensor = torch.Tensor

TOKENS = BLOCK_T.value
"""Tokens of a tile."""

WIDTHS = (64, 128)
"""Features of queries, keys and values."""


def suits(call: LinearCall, *tensors: Tensor) -> bool:
    """Returns whether the kernels take a call with these tensors, apart from their addresses: products if it is causal."""
    q = call.inputs.q
    if INTERPRETED or architecture(q.device) != 90 or call.inputs.cu_seqlens is not None:
        return False
    width, tokens = int(q.shape[3]), int(q.shape[1])
    whole = (call.chunks == 1 or call.chunk % TOKENS == 0) and tokens >= TOKENS
    known = call.options.kind in ("none", "rotate", "cosine") and call.options.activation != "softmax"
    if not (whole and known and width in WIDTHS and call.values == width):
        return False
    return all(t.dtype == torch.bfloat16 and supports_tma(t) for t in tensors)


def plan_sums(call: LinearCall, b: Tensor, c: Tensor, states: Buffer, reverse: bool) -> Launch:
    """Plans the sums of chunks: see `triton.states`."""
    return Launch(
        hopper_sums_kernel,
        call.slots * call.heads,
        takes=("b_desc", "c_desc", "states", "totals", *PLACES),
        num_warps=8,
        b_desc=_boxes(b),
        c_desc=_boxes(c),
        sizes=sizes_of(call, 1),
        states_strides=state_strides(states),
        form=_form(call, "sums"),
        REVERSE=reverse,
    )


def takes_x(call: LinearCall, decoded: bool) -> bool:
    """Returns whether the product's kernel takes ``x`` and ``partial`` as `triton.product` does, each of them or None."""
    return call.options.kind == "cosine" and (decoded or call.values == 64)


def plan_product(
    call: LinearCall, rows: ProductRows, initial: State, final: State, *, decoded: bool, reverse: bool = False,
    rotates_back: bool = True,
) -> Launch:  # fmt: skip
    """Plans a product, see `triton.product`; backwards for ``cosine`` alone.

    ``rotates_back``: whether rotated rows' gradients are rotated back, which LRPE's kernel may do.
    """
    given: dict[str, Tensor | None] = {"a_desc": rows.a, "b_desc": rows.b, "c_desc": rows.c}
    if takes_x(call, decoded):
        given["x_desc"] = rows.x
    given["out_desc"] = rows.out
    if call.options.kind == "cosine" and not decoded and call.inputs.q.shape[3] == 128:
        more = {"BY_HEAD": call.decay == "head", "REVERSE": reverse}
        return _launch(hopper_parts_kernel, call, "parts", given, initial, final, reverse, **more)
    if call.options.kind == "cosine":
        more = {"DECODED": decoded, "REVERSE": reverse}
        return _launch(hopper_cosine_kernel, call, "product", given, initial, final, reverse, **more)
    kernel = "decoded" if decoded else "product"
    return _launch(
        hopper_product_kernel, call, kernel, given, initial, final, reverse, rotates_back, DECODED=decoded
    )


def plan_keys(
    call: LinearCall, tensors: tuple[Tensor, ...], initial: State, final: State, rotates_back: bool = True
) -> Launch:
    """Plans the products over (q, k, v, grad, dk, dv), where φ has one part; ``rotates_back`` as in `plan_product`."""
    given = dict(zip(("q_desc", "k_desc", "v_desc", "grad_desc", "dk_desc", "dv_desc"), tensors))
    return _launch(hopper_key_kernel, call, "keys", given, initial, final, True, rotates_back)


def _launch(
    function: Any, call: LinearCall, kernel: str, tensors: Mapping[str, Tensor | None], initial: State, final: State,
    reverse: bool, rotates_back: bool = True, **more: Any,
) -> Launch:  # fmt: skip
    more |= {name: _boxes(x) for name, x in tensors.items() if x is not None}
    states = ("initial", "final", "partial") if "x_desc" in tensors else ("initial", "final")
    return Launch(
        function,
        call.slots * call.heads,
        takes=(*tensors, *states, *PLACES),
        num_warps=4 if kernel in ("keys", "parts") else 8,
        scales=scales_of(call, initial, reverse),
        sizes=sizes_of(call, 1),
        initial_strides=state_strides(initial),
        final_strides=state_strides(final),
        form=_form(call, kernel, rotates_back),
        **more,
    )


def _boxes(x: Tensor) -> TmaTile:
    """Returns tiles of tokens of a head."""
    return TmaTile(x, (0, 2, 1, 3), (1, 1, TOKENS, int(x.shape[3])))


def _form(call: LinearCall, kernel: str, rotates_back: bool = True) -> Form:
    """Returns what a kernel is compiled for."""
    theta, decay = call.inputs.theta, call.decay
    encoder = encoder_of(kernel, decay, call.options.activation)
    if kernel == "parts" and decay == "head":  # which it treats as decays of tokens
        decay = "token"
    groups = 2 if kernel == "decoded" and rotates_back else 1  # elsewhere features of φ keep their order
    frequencies = 0 if theta is None else int(theta.shape[-1])
    return Form(call.options.kind, call.options.activation, decay, frequencies, groups, rotates_back, *encoder)
