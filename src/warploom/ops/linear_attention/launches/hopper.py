"""Launches of linear attention's products on Hopper: which calls they take."""

from __future__ import annotations

from typing import Any

import torch

from warploom.ops.linear_attention.configs import HOPPER, PARTS, SUMS
from warploom.ops.linear_attention.kernels.hopper.cosine import hopper_cosine_kernel
from warploom.ops.linear_attention.kernels.hopper.encoding import Form, T
from warploom.ops.linear_attention.kernels.hopper.keys import hopper_key_kernel
from warploom.ops.linear_attention.kernels.hopper.parts import hopper_parts_kernel
from warploom.ops.linear_attention.kernels.hopper.product import hopper_product_kernel
from warploom.ops.linear_attention.kernels.hopper.sums import hopper_sums_kernel
from warploom.ops.linear_attention.kernels.tiles import Scales
from warploom.ops.linear_attention.launches.calls import PLACES, Call, State, state_strides
from warploom.runtime.launch import INTERPRETED, Dense, Launch, TmaTile, architecture, supports_tma

Tensor = torch.Tensor

TOKENS = T.value
"""Of a tile."""

WIDTHS = (64, 128)
"""Features of queries, keys and values."""


def suits(call: Call, *tensors: Tensor) -> bool:
    """Whether the kernels take a call with these tensors, apart from their addresses: products if it is causal."""
    q, _, v, *_, cu_seqlens = call.inputs
    if INTERPRETED or architecture(q.device) != 90 or cu_seqlens is not None:
        return False
    width, tokens = int(q.shape[3]), int(q.shape[1])
    whole = (call.chunks == 1 or call.chunk % TOKENS == 0) and tokens >= TOKENS
    known = call.options.kind in ("none", "rotate", "cosine") and call.options.activation != "softmax"
    if not (whole and known and width in WIDTHS and v.shape[3] == width):
        return False
    return all(t.dtype == torch.bfloat16 and supports_tma(t) for t in tensors)


def plan_sums(call: Call, b: Tensor, c: Tensor, states: Dense, reverse: bool) -> Launch:
    """Plan of the sums of chunks: see `kernels.states`."""
    return Launch(
        hopper_sums_kernel,
        call.slots * int(call.inputs.q.shape[2]),
        takes=("b_desc", "c_desc", "states", "totals", *PLACES),
        num_warps=8,
        b_desc=_boxes(b),
        c_desc=_boxes(c),
        sizes=call.sizes(1),
        states_strides=state_strides(states),
        form=_form(call, "sums"),
        REVERSE=reverse,
    )


def plan_product(
    call: Call, tensors: tuple[Tensor, ...], initial: State, final: State, *, decoded: bool, reverse: bool = False,
    turns: bool = True,
) -> Launch:  # fmt: skip
    """Plan of a product over (a, b, c, out), see `kernels.product`; backwards for ``cosine`` alone.

    ``turns``: whether rotated rows' gradients are turned back, which LRPE's kernel may do.
    """
    names = ("a_desc", "b_desc", "c_desc", "out_desc")
    scale = call.state_scale if reverse else 1.0
    if call.options.kind == "cosine" and not decoded and call.inputs.q.shape[3] == 128:
        more = {"BY_HEAD": call.inputs.decay is not None and call.inputs.decay.dim() == 1, "REVERSE": reverse}
        return _launch(hopper_parts_kernel, call, "parts", names, tensors, initial, final, scale, **more)
    if call.options.kind == "cosine":
        more = {"DECODED": decoded, "REVERSE": reverse}
        return _launch(hopper_cosine_kernel, call, "product", names, tensors, initial, final, scale, **more)
    kernel = "decoded" if decoded else "product"
    return _launch(
        hopper_product_kernel, call, kernel, names, tensors, initial, final, scale, turns, DECODED=decoded
    )


def plan_keys(call: Call, tensors: tuple[Tensor, ...], initial: State, final: State, turns: bool = True) -> Launch:
    """Plan of the products over (q, k, v, grad, dk, dv), where φ has one part; ``turns`` as in `plan_product`."""
    names = ("q_desc", "k_desc", "v_desc", "grad_desc", "dk_desc", "dv_desc")
    return _launch(hopper_key_kernel, call, "keys", names, tensors, initial, final, call.state_scale, turns)


def _launch(
    function: Any, call: Call, kernel: str, names: tuple[str, ...], tensors: tuple[Tensor, ...], initial: State,
    final: State, scale: float, turns: bool = True, **more: Any,
) -> Launch:  # fmt: skip
    more |= {name: _boxes(x) for name, x in zip(names, tensors)}
    return Launch(
        function,
        call.slots * int(call.inputs.q.shape[2]),
        takes=(*names, "initial", "final", *PLACES),
        num_warps=4 if kernel in ("keys", "parts") else 8,
        scales=Scales(call.options.scale, 1.0 / scale if isinstance(initial, Tensor) else 1.0, scale),
        sizes=call.sizes(1),
        initial_strides=state_strides(initial),
        final_strides=state_strides(final),
        form=_form(call, kernel, turns),
        **more,
    )


def _boxes(x: Tensor) -> TmaTile:
    """Tiles of tokens of a head."""
    return TmaTile(x, (0, 2, 1, 3), (1, 1, TOKENS, int(x.shape[3])))


def _form(call: Call, kernel: str, turns: bool = True) -> Form:
    """What a kernel is compiled for."""
    theta, decay = call.inputs.theta, call.inputs.decay
    kind = "none" if decay is None else "head" if decay.dim() == 1 else "token"
    encoder = {"parts": PARTS, "sums": SUMS}.get(kernel) or HOPPER[kind][kernel]
    if kernel == "parts" and kind == "head":  # which it treats as decays of tokens
        kind = "token"
    groups = 2 if kernel == "decoded" and turns else 1  # elsewhere features of φ keep their order
    frequencies = 0 if theta is None else int(theta.shape[-1])
    return Form(call.options.kind, call.options.activation, kind, frequencies, groups, turns, *encoder)
