"""Linear attention over a sequence that ranks share: states travel, and not tokens.

Every rank computes the state that its own tokens leave behind, and all of them exchange these and the decays over
their parts, whatever the length. A plain call of linear attention from the state before the part does the rest. In
the backward the gradients of states go the other way.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, Unpack, overload

import torch
from torch.distributed.device_mesh import DeviceMesh

from warploom.distributed.agreement import agree, refuse, refuse_compiled, sizes_of
from warploom.distributed.parts import LAYOUT, Part, Segment, part_of
from warploom.distributed.ranks import (
    Bounds,
    all_gather,
    as_bytes,
    bounds_of,
    check_device,
    check_packed,
    group_named,
    group_of,
)
from warploom.errors import WarploomError, dtype_of
from warploom.ops.linear_attention import reference
from warploom.ops.linear_attention.api import LinearArguments, longest_of
from warploom.ops.linear_attention.call import LinearInputs, LinearOptions
from warploom.ops.linear_attention.validation import Activation, Encoding, check
from warploom.runtime.arguments import as_python
from warploom.runtime.autocast import cast_for_autocast, disable_autocast
from warploom.runtime.backend import Backend, use_triton
from warploom.runtime.dispatch import CustomOperator, Gradient, Tensors, apply
from warploom.runtime.memory_order import empty_in_order_of, layout_of
from warploom.runtime.names import hide_catch_alls, refuse_unknown
from warploom.runtime.plans import Plans, tensor_key

Tensor = torch.Tensor

NAME = "context_parallel_linear_attention"


class Options(NamedTuple):
    """Options of the operator."""

    kind: str
    activation: str
    causal: bool
    scale: float
    return_state: bool
    kernels: bool
    group: str

    def one(self, return_state: bool) -> LinearOptions:
        """Those of a plain call."""
        return LinearOptions(self.kind, self.activation, True, self.scale, return_state)


@overload
def context_parallel_linear_attention(
    q: Tensor, k: Tensor, v: Tensor, mesh: DeviceMesh, *,
    return_state: Literal[False] = ..., **arguments: Unpack[LinearArguments],
) -> Tensor: ...  # fmt: skip
@overload
def context_parallel_linear_attention(
    q: Tensor, k: Tensor, v: Tensor, mesh: DeviceMesh, *,
    return_state: Literal[True], **arguments: Unpack[LinearArguments],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def context_parallel_linear_attention(
    q: Tensor, k: Tensor, v: Tensor, mesh: DeviceMesh, *,
    return_state: bool, **arguments: Unpack[LinearArguments],
) -> Tensor | tuple[Tensor, Tensor]: ...  # fmt: skip
@hide_catch_alls
def context_parallel_linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mesh: DeviceMesh,
    *_others: Any,
    decay: Tensor | None = None,
    theta: Tensor | None = None,
    encoding: Encoding = "none",
    activation: Activation = "none",
    interleaved: bool = False,
    offset: int | Tensor = 0,
    causal: bool = True,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    return_state: bool = False,
    cu_seqlens: Tensor | None = None,
    backend: Backend = "auto",
    **_unknown: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """`warploom.linear_attention` of a sequence whose tokens are shared by the ranks of a mesh.

    Parts are contiguous: rank ``r`` of ``W`` holds the ``r``-th of as many, of lengths that differ by one at most.
    One all-gather of states ``(S, H, F, E)`` and decays travels, and one of their gradients in the backward. All
    ranks must make the same call; what one of them refuses, all refuse with the same error.

    Args:
        q: ``(B, n, H, D)``, this rank's part of the queries, as `shard_sequence` cuts them in the layout
            ``contiguous``; dtypes and strides as in `warploom.linear_attention`.
        k: As ``q``.
        v: ``(B, n, H, E)``, this rank's part of the values.
        mesh: Of one dimension, over whose ranks tokens are shared.
        decay: ``(H,)``, the same on every rank, or ``(B, n, H)``, this rank's part.
        theta: As in `warploom.linear_attention`, the same on every rank.
        encoding: As in `warploom.linear_attention`; likewise the rest.
        activation: Of queries and keys.
        interleaved: Of ``rotate``.
        offset: Position of the first token of the whole, or of each packed sequence.
        causal: Without it every token sees all tokens of all ranks.
        scale: ``D^-½`` by default.
        initial_state: ``(S, H, F, E)``, before the whole; the same on every rank.
        return_state: Also return the state after the whole, on every rank.
        cu_seqlens: ``(S + 1,)``, the same on every rank, with ``B = 1``: the bounds of packed sequences in the
            whole, ``c_S = N``. They are read by the host, once for each tensor.
        backend: ``auto``, ``triton`` or ``torch``.

    Returns:
        ``(B, n, H, E)``, this rank's part of the outputs; with ``return_state`` also the states ``(S, H, F, E)``.
        Gradients of ``theta``, of ``decay`` per head and of ``initial_state`` are this rank's part, to be summed
        over the mesh; that of the state is summed here.

    Raises:
        ShapeError: A size does not fit, or parts are not those of the layout.
        DtypeError: An argument has the wrong type.
        DeviceError: A tensor is not on this rank's device of the mesh.
        ArgumentError: The mesh has more dimensions, an option is unknown, bounds are not those of the whole, or
            the ranks' calls differ.
        BackendError: ``backend="triton"`` cannot run this call.

    Source: Sun et al., "Linear Attention Sequence Parallelism", 2024, arXiv 2404.02882, with a gather in the place
    of its ring.

    Example:
        ```python
        import torch
        from torch.distributed.device_mesh import init_device_mesh
        from warploom.distributed import context_parallel_linear_attention, shard_sequence

        mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))    # under torchrun
        q, k, v = (shard_sequence(torch.randn(1, 64, 8, 16), mesh, layout="contiguous") for _ in range(3))
        out = context_parallel_linear_attention(q, k, v, mesh, decay=-torch.rand(8))    # (1, 64 / W, 8, 16)
        ```
    """
    if _others or _unknown:
        refuse_unknown(context_parallel_linear_attention, _others, _unknown)
    q, k, v = cast_for_autocast(q, k, v)
    offsets, offset = (offset, 0) if isinstance(offset, Tensor) else (None, as_python(offset))
    tensors = (q, k, v, theta, decay, initial_state, offsets, cu_seqlens)
    given = (encoding, activation, interleaved, causal, scale, return_state)
    try:
        options = _checked(tensors, given, offset, mesh, backend)
    except WarploomError as error:
        if torch.compiler.is_compiling():
            return refuse_compiled(  # type: ignore[no-any-return]
                NAME, mesh, error, tensors, lambda *tensors: _checked(tensors, given, offset, mesh, backend),
                functools.partial(_shapes, encoding, return_state),
            )  # fmt: skip
        refuse(NAME, mesh, error)
    out, state, *_ = apply(OPERATOR, tensors, offset, options)
    return (out, state) if return_state else out


def _checked(tensors: Tensors, given: tuple[Any, ...], offset: int, mesh: DeviceMesh, backend: str) -> Options:
    """What a call asks for, from what this rank can see of it."""
    group = group_of(NAME, mesh).group_name
    q, *_, cu_seqlens = tensors
    one, limit, *_ = check(NAME, LinearInputs(*tensors), as_python(given), offset)
    kernels = use_triton(NAME, backend, q, limit)
    check_device(NAME, mesh, "q", q)
    if cu_seqlens is not None:
        check_packed(NAME, cu_seqlens)
    kind, activation, causal, scale, return_state = one
    return Options(kind, activation, causal, scale, return_state, kernels, group)


def _shapes(kind: str, return_state: bool, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> list[tuple[int, ...]]:
    """Of the results of a call that may be wrong."""
    batch, tokens, heads, features, values = sizes_of(q, k, v)
    state = (batch, heads, features * (2 if kind == "cosine" else 1), values)
    return [(batch, tokens, heads, values), *[state] * bool(return_state)]


# ----------------------------------------------------------------------------------------------------------
# Plain calls
# ----------------------------------------------------------------------------------------------------------


_DIFFERENTIABLE = 6  # the first inputs


def _one(
    inputs: LinearInputs, offset: int, options: Options, return_state: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Outputs, and the last states where they are wanted."""
    one = options.one(return_state)
    if options.kernels:
        from warploom.ops.linear_attention.operator import OPERATOR as ONE

        out, state = ONE.op_without_autograd(*ONE.join_arguments(inputs, offset, one))
        return out, state if return_state else None
    q, k, v, theta, decay, initial_state, offsets, cu_seqlens = inputs
    with disable_autocast(q):
        found: Any = reference.linear_attention(
            q, k, v, decay=decay, theta=theta, encoding="rotate" if one.kind == "interleaved" else one.kind,
            activation=one.activation, interleaved=one.kind == "interleaved",
            offset=offset if offsets is None else offsets, scale=one.scale, initial_state=initial_state,
            return_state=return_state, cu_seqlens=cu_seqlens, longest=longest_of(cu_seqlens),
        )  # fmt: skip
    return found if return_state else (found, None)


def _gradients(
    grad: Tensor | None, grad_state: Tensor | None, inputs: LinearInputs, offset: int, options: Options,
    wanted: Sequence[bool],
) -> list[Tensor | None]:  # fmt: skip
    """Gradients of q, k, v, theta, decay and the first state, of those that are wanted and there."""
    wanted = [wants and x is not None for wants, x in zip(wanted, inputs)]
    if options.kernels:
        from warploom.ops.linear_attention.operator import OPERATOR as ONE

        backward: Any = ONE.backward_operator
        rest = (*options.one(grad_state is not None), wanted)
        found = backward.op(*backward.join_arguments((grad, grad_state, *inputs), offset, rest))
        return [gradient if wants else None for gradient, wants in zip(found, wanted)]
    with torch.enable_grad():
        leaves = [None if x is None else x.detach().requires_grad_() for x in inputs[:_DIFFERENTIABLE]]
        out, state = _one(LinearInputs(*leaves, *inputs[_DIFFERENTIABLE:]), offset, options, grad_state is not None)  # type: ignore[arg-type]
        pairs = [(x, g) for x, g in ((out, grad), (state, grad_state)) if x is not None and g is not None]
        results, given = zip(*pairs) if pairs else ((out,), (torch.zeros_like(out),))
        chosen: Any = [leaf for leaf, wants in zip(leaves, wanted) if wants]
        each = iter(torch.autograd.grad(results, chosen, given, allow_unused=True, materialize_grads=True))
    return [next(each) if wants else None for wants in wanted]


def _last_state(inputs: LinearInputs, offset: int, options: Options) -> Tensor:
    """The last states alone."""
    if options.kernels:
        from warploom.ops.linear_attention.engine import last_state

        return last_state(inputs, options.one(True), offset, OPERATOR.plans)
    state: Any = _one(inputs._replace(q=inputs.k), offset, options, True)[1]
    return state  # type: ignore[no-any-return]


# ----------------------------------------------------------------------------------------------------------
# States
# ----------------------------------------------------------------------------------------------------------


def _gathered(x: Tensor, group: Any) -> Tensor:
    """Those of all ranks, (W, …)."""
    every: Tensor = x.new_empty((group.size(), *x.shape))
    if x.numel() == 0:
        return every
    all_gather(as_bytes(every), as_bytes(x.contiguous()), group=group)
    return every


def _state_shape(tensors: Tensors, options: Options, sequences: int) -> tuple[int, ...]:
    """Of states of so many sequences."""
    q, _, v, *_ = tensors
    features = q.shape[3] * (2 if options.kind == "cosine" else 1)
    return sequences, q.shape[2], features, v.shape[3]


def _sequences(tensors: Tensors) -> int:
    q, *_, cu_seqlens = tensors
    return int(q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1)


def _precise(tensors: Tensors) -> torch.dtype:
    return torch.promote_types(tensors[0].dtype, torch.float32)


def _factor(tensors: Tensors, tokens: slice) -> Tensor:
    """By how much a state has decayed behind such tokens: (B, H), the product of their decays."""
    q, _, _, _, decay, *_ = tensors
    if decay is None:
        return torch.ones((q.shape[0], q.shape[2]), dtype=_precise(tensors), device=q.device)
    count = max(tokens.stop - tokens.start, 0)
    total = decay.double() * count if decay.dim() == 1 else decay[:, tokens].double().sum(1)
    factor: Tensor = total.expand(q.shape[0], -1).exp()
    return factor.to(_precise(tensors))


# ----------------------------------------------------------------------------------------------------------
# The operator
# ----------------------------------------------------------------------------------------------------------


def _read(tensors: Tensors, options: Options, offset: int) -> Bounds:
    """The bounds of the whole, once the ranks have told each other of their calls."""
    q, _, v, *rest, cu_seqlens = tensors
    group = group_named(options.group)
    read = None if cu_seqlens is None else bounds_of(cu_seqlens)
    (batch, tokens, heads, features), values = q.shape, v.shape[3]
    call = {"B": batch, "H": heads, "D": features, "E": values, "dtype": dtype_of(q), "offset": offset}
    call |= dict(zip(Options._fields[:-1], options))
    names = ("theta", "decay", "initial_state", "offsets")
    call |= {f"{name} of dimensions": None if x is None else x.dim() for name, x in zip(names, rest)}
    return agree(NAME, group, "q", tokens, call, read, LAYOUT).bounds


class _Run(NamedTuple):
    """A call whose ranks have agreed on it."""

    part: Part
    group: Any
    rank: int

    @classmethod
    def of(cls, tensors: Tensors, options: Options, bounds: Bounds) -> _Run:
        """A call."""
        group = group_named(options.group)
        q, *_, cu_seqlens = tensors
        part = part_of(bounds, cu_seqlens is not None, q.shape[0], group.size(), group.rank(), q.device)
        return cls(part, group, group.rank())


def _carried(tensors: Tensors, options: Options, offset: int, run: _Run) -> tuple[Tensor, Tensor]:
    """The state that comes in from the rank before, (B, H, F, E), and the decay over each rank, (W, B, H).

    The decay is 0 where the state that leaves a rank began there.
    """
    q, initial, part = tensors[0], tensors[5], run.part
    shape, precise = _state_shape(tensors, options, q.shape[0]), _precise(tensors)
    own, factor = q.new_zeros(shape, dtype=precise), q.new_ones((q.shape[0], q.shape[2]), dtype=precise)
    if part.leaving is not None:
        tokens, start, sequences = part.leaving
        first = None if initial is None or part.spans[run.rank] else initial[sequences]
        segment = Segment(tokens, start, sequences, None, False, True)
        own = _last_state(segment.of(tensors, first), offset + start, options)
        factor = _factor(tensors, tokens)
    return _exchanged(own, factor, run)


def _exchanged(own: Tensor, factor: Tensor, run: _Run) -> tuple[Tensor, Tensor]:
    """What `_carried` returns, of the states that ranks leave behind and the decays over them."""
    states, factors = _gathered(own, run.group), _gathered(factor, run.group)
    factors *= run.part.passed
    state = states[0].clone() if run.rank else torch.zeros_like(own)
    for rank in range(1, run.rank):
        state = torch.addcmul(states[rank], factors[rank, :, :, None, None], state)
    return state, factors


def _joined(
    segment: Segment, tensors: Tensors, offset: int, options: Options, run: _Run, states: Tensor
) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """Outputs and last states of a part in one sequence, on the kernels, and what `_carried` returns.

    The sums of its chunks make the state that travels, and with what comes in the states that its outputs are of,
    which are kept in ``states``.
    """
    from warploom.ops.linear_attention.engine import Continuation, forward

    initial = tensors[5]
    found: list[Tensor] = []

    def carry(own: Tensor) -> Tensor:
        factor = _factor(tensors, segment.tokens if segment.goes_on else slice(0, 0))
        if not segment.goes_on:
            own = torch.zeros_like(own)
        elif initial is not None and not segment.continued:
            own = own + factor[:, :, None, None] * initial[segment.sequences].to(own.dtype)
        found.extend(_exchanged(own, factor, run))
        before = _before(segment, initial, found[0], options)
        return torch.zeros_like(own) if before is None else before.to(own.dtype).contiguous()

    plans = OPERATOR.plans.get((*map(tensor_key, tensors), *options, "joined", segment.tokens.stop), Plans)
    more, place = Continuation(carry, states), offset + segment.start
    out, after = forward(segment.of(tensors, None), options.one(options.return_state), place, plans, more)
    state, factors = found
    return out, after, state, factors


def _forward(tensors: Tensors, offset: int, options: Options, plans: Plans) -> Tensors:
    """Outputs and last states; for the backward states before chunks and all tokens, decays over ranks, bounds."""
    bounds = _read(tensors, options, offset)
    run = _Run.of(tensors, options, bounds)
    alone = run.part.alone if options.kernels and options.causal else None
    initial, found = tensors[5], []
    states = tensors[0].new_empty(_kept_shape(tensors, options), dtype=torch.float32)
    if alone is not None:
        out, after, state, factors = _joined(alone, tensors, offset, options, run, states)
        found.append(after)
    elif options.causal:
        state, factors = _carried(tensors, options, offset, run)
    else:
        state, factors = _total(tensors, options, offset, run), _factor(tensors, slice(0, 0))[None]
    if alone is None:
        out = empty_in_order_of(tensors[0], tensors[2].shape[3])
        for segment in run.part.segments:
            inputs = segment.of(tensors, _before(segment, initial, state, options))
            inputs = inputs if options.causal else inputs._replace(v=_zeros_like(inputs.v))
            place = offset + segment.start
            out[:, segment.tokens], after = _one(inputs, place, options, options.return_state)
            found.append(after)
    last = tensors[0].new_empty(0, dtype=_precise(tensors))
    if options.return_state:
        last = last.new_empty(_state_shape(tensors, options, _sequences(tensors)))
        last.zero_() if initial is None else last.copy_(initial)
        sequences, rows = run.part.ended
        ended = torch.zeros_like(last)
        there = torch.zeros(len(last), dtype=torch.uint8, device=last.device)
        if len(sequences):
            ended[sequences] = torch.cat(found)[rows]  # type: ignore[arg-type]
            there[sequences] = 1
        every, owners = _gathered(ended, run.group), _gathered(there, run.group)
        last = torch.where(owners.bool().any(0)[:, None, None, None], every.sum(0), last)
    return out, last, states, state, factors, torch.tensor(bounds)


def _before(segment: Segment, initial: Tensor | None, state: Tensor, options: Options) -> Tensor | None:
    """The state before a segment."""
    if not options.causal:
        return state[segment.sequences]
    if segment.continued:
        return state
    return None if initial is None else initial[segment.sequences]


def _total(tensors: Tensors, options: Options, offset: int, run: _Run) -> Tensor:
    """Without causality: the states of all tokens of each sequence, (S, H, F, E)."""
    own = tensors[0].new_zeros(_state_shape(tensors, options, _sequences(tensors)), dtype=_precise(tensors))
    for segment in run.part.segments:
        own[segment.sequences] = _last_state(segment.of(tensors, None), offset + segment.start, options)
    return _gathered(own, run.group).sum(0)


def _zeros_like(x: Tensor) -> Tensor:
    """Zeros that take no memory."""
    return torch.zeros((), dtype=x.dtype, device=x.device).expand(x.shape)


def _fake(tensors: Tensors, options: Options) -> Tensors:
    q, _, v, *_, cu_seqlens = tensors
    sequences, precise = _sequences(tensors), _precise(tensors)
    last = q.new_empty(_state_shape(tensors, options, sequences) if options.return_state else 0, dtype=precise)
    carried = q.new_empty(
        _state_shape(tensors, options, q.shape[0] if options.causal else sequences), dtype=precise
    )
    ranks = group_named(options.group).size() if options.causal else 1
    factors = q.new_empty((ranks, q.shape[0], q.shape[2]), dtype=precise)
    bounds = torch.empty(2 if cu_seqlens is None else cu_seqlens.shape[0], dtype=torch.int64)
    states = q.new_empty(_kept_shape(tensors, options), dtype=torch.float32)
    return empty_in_order_of(q, v.shape[3]), last, states, carried, factors, bounds


def _kept_shape(tensors: Tensors, options: Options) -> tuple[int, ...]:
    """Of the states before chunks, where a part is in one sequence; it is the same for any number of tokens."""
    if not (options.kernels and options.causal):
        return (0,)
    from warploom.ops.linear_attention.engine import most_slots

    inputs: Any = LinearInputs(*tensors)._replace(cu_seqlens=None)
    return most_slots(inputs, options.one(True)), *_state_shape(tensors, options, 1)[1:]


def _save(
    tensors: Tensors, options: Options, results: Tensors, wanted: Sequence[bool]
) -> tuple[Tensors, tuple[Any, ...]]:
    """This rank's part, and what `_forward` returns for the backward."""
    return (*tensors, *results[2:]), ()


def _backward(
    grads: Tensors, saved: Tensors, offset: int, options: Options, extra: tuple[Any, ...], wanted: Sequence[bool],
    plans: Plans,
) -> Tensors:  # fmt: skip
    """Gradients of q, k, v, theta, decay and the first state."""
    *tensors, states, state, factors, bounds = saved
    run = _Run.of(tuple(tensors), options, tuple(bounds.tolist()))
    sums = _Sums(tensors[:_DIFFERENTIABLE])
    if options.causal:
        _causal_gradients(grads, tuple(tensors), states, state, factors, offset, options, run, sums, wanted)
    else:
        _full_gradients(grads, tuple(tensors), state, offset, options, run, sums, wanted)
    return tuple(sums.found)


class _Sums:
    """Gradients of the inputs, from those of segments."""

    def __init__(self, tensors: Sequence[Tensor | None]) -> None:
        self.found: list[Tensor | None] = [
            None if x is None else empty_in_order_of(x, x.shape[-1]) if n < 3 else torch.zeros_like(x)
            for n, x in enumerate(tensors)
        ]

    def add(self, segment: Segment, gradients: Sequence[Tensor | None]) -> None:
        """Put those of a segment in their places, or add them."""
        for number, (into, gradient) in enumerate(zip(self.found, gradients)):
            if into is None or gradient is None:
                continue
            if number < 3 or (number == 4 and into.dim() == 3):  # q, k, v, a decay for every token
                if gradient.shape == into.shape and gradient.stride() == into.stride():
                    self.found[number] = gradient
                else:
                    into[:, segment.tokens] = gradient
            elif number == 5:
                into[segment.sequences] += gradient
            else:
                into += gradient


def _causal_gradients(
    grads: Tensors, tensors: Tensors, states: Tensor, state: Tensor, factors: Tensor, offset: int,
    options: Options, run: _Run, sums: _Sums, wanted: Sequence[bool],
) -> None:  # fmt: skip
    grad, grad_last = grads
    part, initial = run.part, tensors[5]
    if options.return_state:  # on every rank, for all take part in the sum
        shape = _state_shape(tensors, options, _sequences(tensors))
        grad_last = state.new_zeros(shape) if grad_last is None else grad_last
        grad_last = _gathered(grad_last, run.group).sum(0)
    grads = (grad, grad_last)
    alone = part.alone if options.kernels else None
    if alone is not None:
        sums.add(
            alone, _joined_gradients(alone, grads, tensors, states, state, factors, offset, options, run, wanted)
        )
        _without_tokens(grad_last, tensors, run, sums)
        return
    first = next((segment for segment in part.segments if segment.continued), None)
    # The gradient of the state that came in, by this rank's own results.
    own = torch.zeros_like(state)
    if first is not None:
        of_state = None if grad_last is None or first.goes_on else grad_last[first.sequences]
        wants = [False] * (_DIFFERENTIABLE - 1) + [True]
        inputs, place = first.of(tensors, state), offset + first.start
        found = _gradients(_tokens_of(grad, first), of_state, inputs, place, options, wants)[-1]
        own = own if found is None else found.to(own.dtype)
    leaving = _exchanged_back(own, factors, run)
    for segment in part.segments:
        of_state = None if grad_last is None else grad_last[segment.sequences]
        if segment.goes_on:
            shape = _state_shape(tensors, options, len(segment.sequences))
            of_state = leaving.new_zeros(shape) if of_state is None else of_state.clone()
            of_state[-len(leaving) :] = leaving
        before = _before(segment, initial, state, options)
        wants = [*wanted[:-1], wanted[-1] and not segment.continued]
        inputs, place = segment.of(tensors, before), offset + segment.start
        sums.add(segment, _gradients(_tokens_of(grad, segment), of_state, inputs, place, options, wants))
    _without_tokens(grad_last, tensors, run, sums)


def _exchanged_back(own: Tensor, factors: Tensor, run: _Run) -> Tensor:
    """The gradient of the state that leaves this rank, of those that ranks have of the states that came in."""
    every, last = _gathered(own, run.group), run.group.size() - 1
    leaving = every[last] if run.rank < last else torch.zeros_like(own)
    for rank in range(last - 1, run.rank, -1):
        leaving = torch.addcmul(every[rank], factors[rank, :, :, None, None], leaving)
    return leaving


def _joined_gradients(
    segment: Segment, grads: tuple[Tensor | None, ...], tensors: Tensors, states: Tensor, state: Tensor,
    factors: Tensor, offset: int, options: Options, run: _Run, wanted: Sequence[bool],
) -> Sequence[Tensor | None]:  # fmt: skip
    """Those of what `_joined` computes, in the same way."""
    from warploom.ops.linear_attention.engine import Continuation, backward

    grad, grad_last = grads
    of_last = None if grad_last is None or segment.goes_on else grad_last[segment.sequences].to(state.dtype)

    def carry(own: Tensor) -> Tensor:
        if not segment.continued:
            own = torch.zeros_like(own)
        elif of_last is not None:
            own = own + _factor(tensors, segment.tokens)[:, :, None, None] * of_last
        leaving = _exchanged_back(own, factors, run)
        return (leaving if of_last is None else of_last).contiguous()

    inputs = segment.of(tensors, _before(segment, tensors[5], state, options))
    if grad is None:
        grad = torch.zeros_like(layout_of(tensors[0], tensors[2].shape[3]), device=state.device)
    wants = [wants and x is not None for wants, x in zip(wanted, inputs)]
    wants[-1] = wants[-1] and not segment.continued
    rest = ("gradients", segment.continued, segment.tokens.stop)
    plans = OPERATOR.plans.get((*map(tensor_key, tensors), *options, *rest), Plans)
    more, place = Continuation(carry, states), offset + segment.start
    return backward(grad, None, inputs, options.one(False), place, wants, plans, more)


def _without_tokens(grad_last: Tensor | None, tensors: Tensors, run: _Run, sums: _Sums) -> None:
    """The gradients of first states of sequences without a token."""
    initial = tensors[5]
    if grad_last is not None and initial is not None and run.rank == 0:
        empty = torch.tensor([a == b for a, b in _pairs(tensors, run)], device=initial.device)
        rows = empty[:, None, None, None]
        sums.found[5] = torch.where(rows, grad_last.to(initial.dtype), sums.found[5])  # type: ignore[arg-type]


def _pairs(tensors: Tensors, run: _Run) -> list[tuple[int, int]]:
    """First and last of each sequence."""
    cu_seqlens = tensors[-1]
    if cu_seqlens is None:
        return [(0, sum(run.part.lengths))] * _sequences(tensors)
    return list(itertools.pairwise(bounds_of(cu_seqlens)))


def _tokens_of(grad: Tensor | None, segment: Segment) -> Tensor | None:
    return None if grad is None else grad[:, segment.tokens]


def _full_gradients(
    grads: Tensors, tensors: Tensors, state: Tensor, offset: int, options: Options, run: _Run, sums: _Sums,
    wanted: Sequence[bool],
) -> None:  # fmt: skip
    """Without causality: outputs are products of queries and the state, which is one of keys and values."""
    grad = grads[0]
    own = torch.zeros_like(state)
    of_q, of_k, of_v, of_theta, _, _ = wanted
    of_queries = [of_q, False, False, of_theta, False, True]
    of_keys = [False, of_k, of_v, of_theta, False, False]
    first = []
    for segment in run.part.segments:
        inputs, place = segment.of(tensors, state[segment.sequences]), offset + segment.start
        inputs = inputs._replace(v=_zeros_like(inputs.v))
        found = _gradients(_tokens_of(grad, segment), None, inputs, place, options, of_queries)
        own[segment.sequences] = found[5].to(own.dtype)  # type: ignore[union-attr]
        first.append(found[:5])
    total = _gathered(own, run.group).sum(0)
    for segment, of_query in zip(run.part.segments, first):
        inputs, place = segment.of(tensors, None), offset + segment.start
        sums.add(segment, of_query)
        sums.add(segment, _gradients(None, total[segment.sequences], inputs, place, options, of_keys))


def _backward_fake(
    grads: Tensors, saved: Tensors, options: Options, extra: tuple[Any, ...], wanted: Sequence[bool]
) -> Tensors:
    rows = (empty_in_order_of(x, x.shape[3]) for x in saved[:3])
    return *rows, *(None if x is None else torch.empty_like(x) for x in saved[3:_DIFFERENTIABLE])


_TENSORS = (
    "Tensor q, Tensor k, Tensor v, Tensor? theta, Tensor? decay, Tensor? initial_state, Tensor? offsets, "
    "Tensor? cu_seqlens"
)
OPERATOR = CustomOperator(
    name=NAME,
    any_backend=True,
    tensors=_TENSORS,
    number="SymInt offset",
    options="str kind, str activation, bool causal, float scale, bool return_state, bool kernels, str group",
    num_results=6,
    options_type=Options,
    forward=_forward,
    fake=_fake,
    gradient=Gradient(
        grad_outputs="Tensor? grad, Tensor? grad_state",
        saved=f"{_TENSORS}, Tensor states, Tensor carried, Tensor factors, Tensor bounds",
        num_gradients=_DIFFERENTIABLE,
        save=_save,
        run=_backward,
        fake=_backward_fake,
    ),
)
