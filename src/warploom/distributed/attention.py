"""Attention over a sequence that ranks share.

Keys and values travel to the chunks that see them, those of the first chunk first. Each chunk is then a plain call
of flash attention on a prefix of the keys, or a window of them, whose results are one GPU's; nothing is merged. In
the backward keys and values travel again, so that no rank keeps more than its part, and gradients of every chunk
return to their owners, who add them up in float32 in the order of steps and ranks.

Groups of heads, of which the next travels while one is computed, made it slower on two H200: 119 ms with one group,
122 with two and 125 with four, for 65536 tokens and both passes.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple, TypedDict, Unpack, overload

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from warploom.distributed import exchange
from warploom.distributed.agreement import agree, refuse, refuse_compiled, sizes_of
from warploom.distributed.exchange import Arriving, Call, Plan, plan_of
from warploom.distributed.layout import Layout, check_layout, rows_on
from warploom.distributed.ranks import (
    Bounds,
    bounds_of,
    check_device,
    check_packed,
    group_named,
    group_of,
)
from warploom.errors import ShapeError, WarploomError, dtype_of, fault, shape_of
from warploom.ops.flash_attention import reference
from warploom.ops.flash_attention.problem import Logits, Mask, Shape
from warploom.ops.flash_attention.validation import Precision, check
from warploom.runtime.arguments import as_python
from warploom.runtime.autocast import cast_for_autocast
from warploom.runtime.backend import Backend, use_triton
from warploom.runtime.dispatch import CustomOperator, Gradient, Tensors, apply
from warploom.runtime.memory_order import empty_in_order_of
from warploom.runtime.modes import read_bounds
from warploom.runtime.names import hide_catch_alls, refuse_unknown
from warploom.runtime.plans import Plans, tensor_key

Tensor = torch.Tensor

NAME = "context_parallel_attention"


class Options(NamedTuple):
    """Options of the operator."""

    left: int | None
    right: int | None
    scale: float
    precision: str | None
    softcap: float | None
    kernels: bool
    layout: str
    group: str


class Arguments(TypedDict, total=False):
    """All arguments of `context_parallel_attention` by name but the one that decides what it returns."""

    causal: bool
    scale: float | None
    window: Sequence[int | None] | None
    softcap: float | None
    sink: Tensor | None
    cu_seqlens: Tensor | None
    layout: Layout
    float32_precision: Precision | None
    backend: Backend


@overload
def context_parallel_attention(
    q: Tensor, k: Tensor, v: Tensor, mesh: DeviceMesh, *,
    return_lse: Literal[False] = ..., **arguments: Unpack[Arguments],
) -> Tensor: ...  # fmt: skip
@overload
def context_parallel_attention(
    q: Tensor, k: Tensor, v: Tensor, mesh: DeviceMesh, *,
    return_lse: Literal[True], **arguments: Unpack[Arguments],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def context_parallel_attention(
    q: Tensor, k: Tensor, v: Tensor, mesh: DeviceMesh, *,
    return_lse: bool, **arguments: Unpack[Arguments],
) -> Tensor | tuple[Tensor, Tensor]: ...  # fmt: skip
@hide_catch_alls
def context_parallel_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mesh: DeviceMesh,
    *_others: Any,
    causal: bool = False,
    scale: float | None = None,
    window: Sequence[int | None] | None = None,
    softcap: float | None = None,
    sink: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    layout: Layout = "zigzag",
    float32_precision: Precision | None = None,
    return_lse: bool = False,
    backend: Backend = "auto",
    **_unknown: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """`warploom.flash_attention` of a sequence whose tokens are shared by the ranks of a mesh.

    Outputs and the gradient of queries have the bits of one GPU's where that cuts keys into the same tiles, which
    it does in all but short calls. Gradients of keys and values are sums of those of every chunk, in float32 in a
    fixed order. All ranks must make the same call; what one of them refuses, all refuse with the same error.

    Args:
        q: ``(B, n, Hq, D)``, this rank's part of the queries ``(B, N, Hq, D)``, as `shard_sequence` cuts them;
            dtypes and strides as in `warploom.flash_attention`.
        k: ``(B, n, Hkv, D)``, this rank's part of the keys.
        v: ``(B, n, Hkv, E)``, this rank's part of the values.
        mesh: Of one dimension, over whose ranks tokens are shared.
        causal: A query sees its own token and earlier ones.
        scale: Factor of the inner products; ``D^-½`` by default.
        window: ``(left, right)``, how many keys before and behind itself a query sees at most; None for no bound.
            Only the keys that a chunk sees are sent to it, where they are few.
        softcap: As in `warploom.flash_attention`.
        sink: ``(Hq,)``, the same on every rank. Its gradient is this rank's part, to be summed over the mesh.
        cu_seqlens: ``(S + 1,)`` int32 or int64, the same on every rank, with ``B = 1``: the bounds of packed
            sequences in the whole, ``c_S ≤ N``, as in `warploom.flash_attention`. They are read by the host, once
            for each tensor.
        layout: ``zigzag``, which gives every rank the same work in causal attention, or ``contiguous``.
        float32_precision: As in `warploom.flash_attention`.
        return_lse: Also return the logarithm of the sum of exponentials of every row; it is differentiable.
        backend: ``auto``, ``triton`` or ``torch``.

    Returns:
        ``(B, n, Hq, E)``, this rank's part of the outputs; with ``return_lse`` also that of lse, ``(B, Hq, n)``.

    Raises:
        ShapeError: A size does not fit, or parts are not those of the layout.
        DtypeError: An argument has the wrong type.
        DeviceError: A tensor is not on this rank's device of the mesh.
        ArgumentError: The mesh has more dimensions, an option is unknown, bounds are not those of the whole, or
            the ranks' calls differ.
        BackendError: ``backend="triton"`` cannot run this call.

    Source: keys and values gathered, chunks in zigzag: Llama Team, "The Llama 3 Herd of Models", 2024, arXiv
    2407.21783, section 3.3.2.

    Example:
        ```python
        import torch
        from torch.distributed.device_mesh import init_device_mesh
        from warploom.distributed import context_parallel_attention, shard_sequence

        mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))    # under torchrun
        q, k, v = (shard_sequence(torch.randn(1, 64, 8, 16), mesh) for _ in range(3))
        out = context_parallel_attention(q, k, v, mesh, causal=True)             # (1, 64 / W, 8, 16)
        ```
    """
    if _others or _unknown:
        refuse_unknown(context_parallel_attention, _others, _unknown)
    q, k, v = cast_for_autocast(q, k, v)
    tensors, given = (q, k, v, sink, cu_seqlens), (causal, scale, window, float32_precision, return_lse, softcap)
    try:
        options = _checked(tensors, given, mesh, layout, backend)
    except WarploomError as error:
        if torch.compiler.is_compiling():
            return refuse_compiled(  # type: ignore[no-any-return]
                NAME, mesh, error, tensors, lambda *tensors: _checked(tensors, given, mesh, layout, backend),
                functools.partial(_shapes, return_lse),
            )  # fmt: skip
        refuse(NAME, mesh, error)
    found = apply(OPERATOR, tensors, 0, options)
    return found[:2] if return_lse else found[0]


def _checked(tensors: Tensors, given: tuple[Any, ...], mesh: DeviceMesh, layout: str, backend: str) -> Options:
    """What a call asks for, from what this rank can see of it."""
    group = group_of(NAME, mesh).group_name
    q, k, v, sink, cu_seqlens = tensors
    causal, scale, window, precision, return_lse, softcap = given
    window = tuple(window) if isinstance(window, list) else window
    given = as_python((causal, scale, window, precision, return_lse, softcap))
    settled, limit, *_ = check(NAME, (q, k, v, sink, None, None, None, None), given, 0)
    kernels = use_triton(NAME, backend, q, limit)
    check_layout(NAME, layout)
    check_device(NAME, mesh, "q", q)
    if k.shape[1] != q.shape[1]:
        raise fault(ShapeError, NAME, "k", f"of as many tokens as q, {q.shape[1]}", shape_of(k))
    if cu_seqlens is not None:
        check_packed(NAME, cu_seqlens)
        if q.shape[0] != 1:
            raise fault(ShapeError, NAME, "q", "of batch size 1 when cu_seqlens are given", shape_of(q))
    left, right, scale, precision, softcap = settled
    return Options(left, right, scale, precision, softcap, kernels, layout, group)


def _shapes(return_lse: bool, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> list[tuple[int, ...]]:
    """Of the results of a call that may be wrong."""
    batch, tokens, heads, _features, values = sizes_of(q, k, v)
    return [(batch, tokens, heads, values), *[(batch, heads, tokens)] * bool(return_lse)]


# ----------------------------------------------------------------------------------------------------------
# Calls on chunks
# ----------------------------------------------------------------------------------------------------------


def _attend(
    q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, call: Call, options: Options
) -> tuple[Tensor, Tensor]:
    """Outputs and lse of a call, in PyTorch."""
    cu_seqlens_q, cu_seqlens_k = read_bounds(call.cu_seqlens_q, call.cu_seqlens_k)
    return reference.flash_attention(  # type: ignore[return-value]
        q, k, v, scale=options.scale, window=(call.left, call.right), softcap=options.softcap, sink=sink,
        cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, float32_precision=options.precision,
        return_lse=True,
    )  # fmt: skip


def _on_kernels(
    q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, call: Call, options: Options
) -> tuple[Mask, Logits, Plans]:
    """How the kernels know a call, and their plans of it."""
    tensors = (q, k, v, sink, call.cu_seqlens_q)
    plans = OPERATOR.plans.get((*map(tensor_key, tensors), call.left, call.right, *options), Plans)
    sink = None if sink is None else sink.resolve_neg().contiguous()
    mask = Mask(call.left, call.right, call.cu_seqlens_q, call.cu_seqlens_k)
    return mask, Logits(options.softcap, sink), plans


def _is_together(q: Tensor, k: Tensor, v: Tensor, bounds: Bounds, options: Options) -> bool:
    """Whether one GPU forms all gradients of the whole in one kernel: dq has its bits if chunks do the same."""
    from warploom.ops.flash_attention.hopper import launch, launch_varlen

    rows, sequences = bounds[-1], len(bounds) - 1
    rows = launch_varlen.spread_rows(rows, sequences) if sequences > 1 else rows
    shape = Shape.of(q, k, v)._replace(tokens=rows, keys=rows)
    return launch.is_together_faster(shape, Mask(options.left, options.right), q.device)


class _Results(NamedTuple):
    """Of a call, and the gradients of its results."""

    out: Tensor
    statistics: Tensor | None
    grad: Tensor
    grad_lse: Tensor | None
    together: bool
    """Whether the kernels form all gradients in one."""


def _gradients(
    q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, call: Call, options: Options, results: _Results,
    places: tuple[Tensor, Tensor, Tensor],
) -> Any:  # fmt: skip
    """The gradient of the sink in a call; those of q, k and v go to ``places``."""
    if options.kernels:
        from warploom.ops.flash_attention.engine import backward

        mask, logits, plans = _on_kernels(q, k, v, sink, call, options)
        statistics: Any = results.statistics
        return backward(
            results.grad, results.grad_lse, q, k, v, results.out, statistics, mask, options.scale,
            options.precision, plans, results=places, logits=logits, together=results.together,
        )[3]  # fmt: skip
    with torch.enable_grad():
        q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
        sink = None if sink is None else sink.detach().requires_grad_()
        leaves = [x for x in (q, k, v, sink) if x is not None]
        out, lse = _attend(q, k, v, sink, call, options)
        grads = (results.grad, torch.zeros_like(lse) if results.grad_lse is None else results.grad_lse)
        found = torch.autograd.grad((out, lse), leaves, grads)
    for place, gradient in zip(places, found):
        place.copy_(gradient)
    return None if sink is None else found[3]


def _planned(tensors: Tensors, options: Options, bounds: Bounds) -> tuple[Plan, Any]:
    """The plan of a call that the ranks have agreed on, and their group."""
    group = group_named(options.group)
    plan = plan_of(
        bounds, world=group.size(), rank=group.rank(), layout=options.layout, left=options.left,
        right=options.right, device=tensors[0].device,
    )  # fmt: skip
    return plan, group


def _calls_of(plan: Plan, arriving: Arriving) -> Iterator[tuple[int, Call, list[Tensor]]]:
    """A rank's calls, each with the number of its step and its keys and values, which are there when it begins."""
    for number, step in enumerate(plan.steps):
        arriving.wait(number)
        for call in step.calls:
            yield number, call, [x[call.keys].transpose(0, 1) for x in arriving.rows]


def _rows(x: Tensor) -> Tensor:
    """(B, n, H, D) as (n, B, H, D), dense."""
    return x.transpose(0, 1).contiguous()


def _read(tensors: Tensors, options: Options) -> Any:
    """The bounds of the whole, once the ranks have told each other of their calls.

    Behind those of packed sequences comes the length of the whole.
    """
    q, k, v, sink, cu_seqlens = tensors
    group = group_named(options.group)
    read = None if cu_seqlens is None else bounds_of(cu_seqlens)
    (batch, tokens, heads, features), values = q.shape, v.shape[3]
    call = {"B": batch, "Hq": heads, "Hkv": k.shape[2], "D": features, "E": values, "dtype": dtype_of(q)}
    call |= {"sink": sink is not None, **dict(zip(Options._fields[:-2], options))}
    lengths, bounds = agree(NAME, group, "q", tokens, call, read, options.layout, tail=True)
    if 0 in lengths:  # that rank sends nothing, and NCCL waits for all ranks in the first call of a group
        dist.all_reduce(q.new_zeros(1), group=group)
    return bounds if read is None else (*read, bounds[-1])


def _whole(known: Bounds, packed: bool) -> Bounds:
    """The bounds that a layout goes by, from those that `_read` returned: a tail is one more sequence."""
    return known[:-1] if packed and known[-1] == known[-2] else known


def _tail(known: Bounds, packed: bool, options: Options, device: torch.device) -> Tensor | None:
    """Which tokens of this rank's part lie behind the last packed sequence (n,), if any may."""
    if not packed or known[-1] == known[-2]:
        return None
    group = group_named(options.group)
    return rows_on(known, group.size(), options.layout, group.rank(), device) >= known[-2]


def _cleared(tail: Tensor | None, *tensors: Tensor | None, fill: float = 0.0) -> list[Any]:
    """Tensors (B, n, H, F), or (…, n), with rows of the tail filled."""
    if tail is None:
        return list(tensors)
    masks = {4: tail[:, None, None], 3: tail}
    return [None if x is None else x.masked_fill(masks[x.dim()], fill) for x in tensors]


# ----------------------------------------------------------------------------------------------------------
# The operator
# ----------------------------------------------------------------------------------------------------------


def _forward(tensors: Tensors, _: int, options: Options, plans: Plans) -> Tensors:
    """Outputs, lse, statistics for the backward, and what `_read` returns."""
    q, k, v, sink, cu_seqlens = tensors
    bounds, packed = _read(tensors, options), cu_seqlens is not None
    plan, group = _planned(tensors, options, _whole(bounds, packed))
    tail = _tail(bounds, packed, options, q.device)
    q, k, v = _cleared(tail, q, k, v)
    arriving = exchange.send_keys(plan, [_rows(x) for x in (k, v)], group)
    out, lse, statistics = _fake(tensors, options)[:3]
    for _, call, (keys, values) in _calls_of(plan, arriving):
        rows = call.queries
        chunk = q[:, rows], keys, values
        if options.kernels:
            from warploom.ops.flash_attention.engine import forward

            mask, logits, known = _on_kernels(*chunk, sink, call, options)
            scale, precision = options.scale, options.precision
            found = forward(*chunk, mask, scale, precision, known, logits=logits, out=out[:, rows])
            lse[..., rows], statistics[..., rows] = found[1:]
        else:
            out[:, rows], lse[..., rows] = _attend(*chunk, sink, call, options)
    if tail is not None:
        out.masked_fill_(tail[:, None, None], 0.0)
        lse.masked_fill_(tail, -torch.inf)
    return out, lse, statistics, torch.tensor(bounds)


def _fake(tensors: Tensors, options: Options) -> Tensors:
    q, _, v, _, cu_seqlens = tensors
    (batch, tokens, heads, _), precise = q.shape, torch.promote_types(q.dtype, torch.float32)
    lse = q.new_empty((batch, heads, tokens), dtype=precise)
    statistics = lse.new_empty((2 if options.kernels else 0, *lse.shape))
    bounds = 2 if cu_seqlens is None else cu_seqlens.shape[0] + 1
    return empty_in_order_of(q, v.shape[-1]), lse, statistics, torch.empty(bounds, dtype=torch.int64)


def _save(
    tensors: Tensors, options: Options, results: Tensors, wanted: Sequence[bool]
) -> tuple[Tensors, tuple[Any, ...]]:
    """This rank's parts alone."""
    out, _, statistics, bounds = results
    return (*tensors, out, statistics, bounds), ()


def _backward(
    grads: Tensors, saved: Tensors, _: int, options: Options, extra: tuple[Any, ...], wanted: Sequence[bool],
    plans: Plans,
) -> Tensors:  # fmt: skip
    """Gradients of q, k, v and the sink."""
    q, k, v, sink, cu_seqlens, out, statistics, bounds = saved
    grad, grad_lse = grads
    grad = torch.zeros_like(out) if grad is None else grad
    known, packed = tuple(bounds.tolist()), cu_seqlens is not None
    whole, tail = _whole(known, packed), _tail(known, packed, options, q.device)
    q, k, v, grad, grad_lse = _cleared(tail, q, k, v, grad, grad_lse)
    plan, group = _planned(saved[:5], options, whole)
    together = options.kernels and _is_together(q, k, v, whole, options)
    dq, dk, dv = (empty_in_order_of(x, x.shape[-1]) for x in (q, k, v))
    dsink = None if sink is None else torch.zeros_like(sink, dtype=torch.promote_types(sink.dtype, torch.float32))
    arriving = exchange.send_keys(plan, [_rows(x) for x in (k, v)], group)
    of_keys: list[tuple[list[Tensor], list[Tensor]]] = [([], []) for _ in plan.steps]
    for number, call, (keys, values) in _calls_of(plan, arriving):
        rows = call.queries
        results = _Results(
            out[:, rows],
            statistics[..., rows].contiguous() if options.kernels else None,
            grad[:, rows],
            None if grad_lse is None else grad_lse[..., rows],
            together,
        )
        of_k, of_v = (empty_in_order_of(x, x.shape[-1]) for x in (keys, values))
        places = dq[:, rows], of_k, of_v
        of_sink = _gradients(q[:, rows], keys, values, sink, call, options, results, places)
        for each, gradient in zip(of_keys[number], (of_k, of_v)):
            each.append(gradient)
        if dsink is not None:
            dsink += of_sink
    joined = [[_joined(each, x) for each, x in zip(of_step, (k, v))] for of_step in of_keys]
    gradients = [
        [x[step.rows] for x in joined[-1 if plan.at_once else number]] for number, step in enumerate(plan.steps)
    ]
    if plan.whole:
        for place, gradient in zip((dk, dv), joined[-1]):
            place[:, plan.shared :] = gradient[-plan.whole :].transpose(0, 1)
    shared = [x[:, : plan.shared].transpose(0, 1) for x in (dk, dv)]
    sums = [place if place.is_contiguous() else torch.empty_like(place).contiguous() for place in shared]
    exchange.return_gradients(plan, gradients, sums, group, options.kernels)
    for place, total in zip(shared, sums):
        if total is not place:
            place.copy_(total)
    return dq, dk, dv, None if dsink is None or sink is None else dsink.to(sink.dtype)


def _joined(gradients: list[Tensor], keys: Tensor) -> Tensor:
    """Gradients of the keys of a step's calls as rows (M, B, H, D)."""
    if not gradients:
        return _rows(keys[:, :0])
    return _rows(gradients[0] if len(gradients) == 1 else torch.cat(gradients, dim=1))


def _backward_fake(grads: Tensors, saved: Tensors, *_: Any) -> Tensors:
    sink = saved[3]
    dsink = None if sink is None else sink.new_empty(sink.shape)
    return *(empty_in_order_of(x, x.shape[-1]) for x in saved[:3]), dsink


_TENSORS = "Tensor q, Tensor k, Tensor v, Tensor? sink, Tensor? cu_seqlens"
OPERATOR = CustomOperator(
    name=NAME,
    any_backend=True,
    tensors=_TENSORS,
    options="SymInt? left, SymInt? right, float scale, str? precision, float? softcap, bool kernels, str layout, "
    "str group",
    num_results=4,
    options_type=Options,
    forward=_forward,
    fake=_fake,
    gradient=Gradient(
        grad_outputs="Tensor? grad, Tensor? grad_lse",
        saved=f"{_TENSORS}, Tensor out, Tensor statistics, Tensor bounds",
        num_gradients=4,
        save=_save,
        run=_backward,
        fake=_backward_fake,
    ),
)
