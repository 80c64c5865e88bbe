"""The path of a call: from a public function to the kernels, and back through autograd.

Every operator takes this path; it has no cache, no autograd function and no registration of its own. Read this file
from top to bottom to follow a call:

1. `Function` receives the call. A guard, in C, recognises a call like one of the last few; a key finds any earlier
   call like it. Either gives a `_PreparedCall`, which runs at once. Any other call is validated first, and runs on
   kernels or on the reference.
2. `apply` runs an operator with its gradient, by one `torch.autograd.Function` for all operators. A plain eager
   call skips PyTorch's dispatcher, which costs six microseconds. A call that a compiler, mode, transform or tensor
   subclass must see goes through the registered operator.
3. `CustomOperator` is the operator as PyTorch knows it, ``torch.ops.warploom.<name>``. Its `Gradient` says how the
   backward is computed, and becomes an operator too. In forward mode a `Tangent` computes tangents on kernels, and
   where there is none, the reference is differentiated.

An operator's ``operator.py`` fills in a `CustomOperator`: what to launch, what to save for the backward, and how to
allocate results without computing them.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import resolve_name
from typing import Any, NamedTuple

import torch

from warploom.errors import BackendError
from warploom.runtime.arguments import as_python
from warploom.runtime.autocast import disable_autocast
from warploom.runtime.backend import HAS_TRITON, use_triton
from warploom.runtime.modes import (
    count_flops,
    has_tangent,
    is_differentiated,
    is_forward_mode,
    is_plain_backward,
    is_plain_eager,
    is_watched,
    run_per_sample,
)
from warploom.runtime.plans import ALL_PLANS, Plans, keeps_plans_for, make_guard, tensor_key
from warploom.runtime.pytorch import any_requires_grad, find_apply, forward_ad, set_forward_enabled
from warploom.runtime.sharding import Axes, is_sharded, run_on_shards
from warploom.runtime.values import reads_values_of

__all__ = [
    "CustomOperator",
    "Function",
    "Gradient",
    "LazyModule",
    "Tangent",
    "ValidatedCall",
    "apply",
    "apply_registered",
    "differentiate_forward",
]

Tensor = torch.Tensor
Tensors = tuple[Any, ...]
"""Tensors, each of which may be None."""
Options = tuple[Any, ...]

_is_grad_enabled = torch.is_grad_enabled
_is_traced_by_dynamo = torch.compiler.is_dynamo_compiling
_library = torch.library.Library("warploom", "FRAGMENT")


# ----------------------------------------------------------------------------------------------------------
# 1. A public call
# ----------------------------------------------------------------------------------------------------------


class ValidatedCall(NamedTuple):
    """The result of a public function's validation: how a call without faults runs."""

    options: Any
    """The operator's options."""
    unsupported: str | None = None
    """The reason why the kernels cannot run this call; None if they can."""
    arrange: Callable[..., Tensors] | None = None
    """Makes the operator's tensors from the function's; None where they are the same."""
    num_results: int = 1
    """The number of the operator's results that the call returns: the first ones."""
    numbers: tuple[int, int] = (0, 0)
    """The least and the greatest number with which this validation holds as well."""
    prefers_torch: bool = False
    """True if PyTorch is faster than the kernels: ``auto`` takes it on a GPU too."""

    def select(self, results: Tensors) -> Any:
        """Returns what the caller gets of the operator's results: a tensor, or a tuple of several."""
        return results[0] if self.num_results == 1 else results[: self.num_results]


class _PreparedCall(NamedTuple):
    """A kind of call that was validated before and runs on kernels; calling it runs a call of that kind."""

    call: _OperatorCall
    validated: ValidatedCall
    forward: Callable[[Tensors, int, Any, Plans], Tensors] | None
    """The operator's forward, called without autograd; None where gradients are wanted."""
    check_values: Callable[[Tensors], None] | None
    """Checks the values in the tensors; None where they are not read."""

    def __call__(self, tensors: Tensors, number: int) -> Any:
        call, validated, forward, check_values = self
        if check_values is not None:
            check_values(tensors)
        if validated.arrange is not None:
            tensors = validated.arrange(*tensors)
        if forward is None:
            results = _apply_plain(call, number, *tensors)
        else:
            results = forward(tensors, number, call.options, call.plans)  # type: ignore[arg-type]
        return validated.select(results)


class Function:
    """A public function: validates a call, then runs it on kernels or on the reference."""

    def __init__(
        self,
        name: str,
        check: Callable[[str, Any, Any, Any], ValidatedCall],
        reference: Callable[[Any, Any, ValidatedCall, str], Any],
        operator: CustomOperator,
        axes: Callable[[Any, Any], Axes] | None = None,
        check_values: Callable[[str, Any], None] | None = None,
        tangent: Tangent | None = None,
    ) -> None:
        """Make a public function.

        Args:
            name: The function's name, for errors.
            check: Validates a call, given name, tensors, options and number. It reads no values of tensors.
            reference: Runs a call in PyTorch, given tensors, number, the validated call and the backend.
            operator: Runs a call on kernels.
            axes: Returns which axes of the tensors can be sharded over ranks, given tensors and options.
            check_values: Checks the values in tensors, given name and tensors; see `warploom.runtime.values`.
            tangent: Computes tangents on kernels; without it, the reference is differentiated in forward mode.
        """
        self.name, self.check, self.reference, self.operator = name, check, reference, operator
        operator.definition, operator.tangent = self._define, tangent
        self.axes = axes
        self.check_values = None if check_values is None else functools.partial(check_values, name)
        self.plans = Plans()  # of prepared calls
        ALL_PLANS.append(self.plans)

    def __call__(self, backend: str, tensors: Tensors, options: Options, number: Any = 0) -> Any:
        """Run a call.

        Args:
            backend: ``auto``, ``triton`` or ``torch``.
            tensors: The arguments that should be tensors, or None, as the operator's ``inputs_type``. The first
                decides device and dtype.
            options: All other arguments. Lists must be passed as tuples, since they are kept.
            number: The operator's number.
        """
        if type(number) is not int:
            number = as_python(number)
        given = [tensor for tensor in tensors if tensor is not None]
        kind = key = None
        if given and type(number) is int and not is_watched():
            absent = tuple([tensor is None for tensor in tensors])
            # Types come first, so that values of different types, such as a number and an array, are not compared.
            # And True equals 1, but is another option.
            kind = (_types_of(options), absent, backend, options)
            enabled = _is_grad_enabled()
            # (a) The guard: is this a call like one of the last few?
            for guard, kind_, enabled_, prepared in self.plans.recent:
                if enabled is enabled_ and kind == kind_:
                    first, last = prepared.validated.numbers
                    if first <= number <= last and guard(*given):
                        return prepared(tensors, number)
            # (b) The key: was there ever a call like this one?
            if is_plain_eager(*given) and keeps_plans_for(given[0]):
                wanted = tuple([enabled and tensor.requires_grad for tensor in given])
                key = (kind, wanted, *map(tensor_key, given))
                prepared = self.plans.find(key)
                if prepared is not None:
                    first, last = prepared.validated.numbers
                    if first <= number <= last:
                        guard = make_guard(*given)
                        if guard is not None:
                            self.plans.remember((guard, kind, enabled, prepared))
                        return prepared(tensors, number)
        # (c) A new call: validate it and choose the backend.
        validated = self.check(self.name, tensors, as_python(options), number)
        sharded = self.axes is not None and is_sharded(tensors)
        unsupported = validated.unsupported
        forward_mode = is_forward_mode()
        if unsupported is None and forward_mode:
            unsupported = self._find_forward_obstacle(tensors, validated)
        in_torch = sharded or (validated.prefers_torch and backend == "auto")
        on_kernels = not in_torch and use_triton(self.name, backend, given[0], unsupported)
        check_values = self.check_values if self.check_values is not None and reads_values_of(given[0]) else None
        if check_values is not None:
            check_values(tensors)
        if self.axes is not None and sharded:
            run_shard = functools.partial(self._run_shard, backend, options)
            return run_on_shards(self.name, self.axes(tensors, options), tensors, number, run_shard)
        if not on_kernels:
            with disable_autocast(given[0]):  # the public function has cast its inputs
                return self.reference(tensors, number, validated, backend)
        operator = self.operator
        if key is None:  # no plain eager call, and so none to be kept
            arranged = tensors if validated.arrange is None else validated.arrange(*tensors)
            both = _run_both(operator, arranged, number, validated.options) if forward_mode else None
            return validated.select(both or apply(operator, arranged, number, validated.options))
        # (d) Prepare it, and keep it for calls like it.
        final = validated.options
        wanted = tuple([enabled and tensor is not None and tensor.requires_grad for tensor in tensors])
        if operator.specialize is not None:
            final = operator.specialize(final, wanted)
        needs_autograd = operator.gradient is not None and any(wanted)
        forward = None if needs_autograd else operator.forward
        prepared = _PreparedCall(_OperatorCall(operator, final, Plans()), validated, forward, check_values)
        self.plans.keep(key, prepared)
        return prepared(tensors, number)

    def _find_forward_obstacle(self, tensors: Tensors, validated: ValidatedCall) -> str | None:
        """Returns why kernels do not compute the tangents of a call; None if they do, or if it has none."""
        inputs = tensors if validated.arrange is None else validated.arrange(*tensors)
        given = tuple([tensor is not None and has_tangent(tensor) for tensor in inputs])
        return self.operator.find_forward_obstacle(inputs, validated.options, given) if any(given) else None

    def _define(self, tensors: Tensors, number: int, options: Any) -> Any:
        """Returns the results of the operator that have derivatives, by the reference."""
        call = ValidatedCall(options, num_results=self.operator.num_differentiable or self.operator.num_results)
        return self.reference(tensors, number, call, "torch")

    def _run_shard(self, backend: str, options: Options, tensors: Sequence[Any], number: Any) -> Any:
        return self(backend, self.operator.inputs_type(*tensors), options, number)


def _types_of(options: Options) -> tuple[Any, ...]:
    types = tuple(map(type, options))
    if tuple in types:
        return tuple([tuple(map(type, o)) if type(o) is tuple else type(o) for o in options])
    return types


# ----------------------------------------------------------------------------------------------------------
# 2. An operator with its gradient
# ----------------------------------------------------------------------------------------------------------


class _OperatorCall(NamedTuple):
    """An operator with the options and the plans of one kind of call."""

    operator: CustomOperator
    options: Any
    plans: Plans | None
    """The launch plans of a plain eager call; None for a call through PyTorch's dispatcher."""

    def run(self, tensors: Tensors, number: int) -> Tensors:
        """Returns all results, without autograd."""
        operator, options, plans = self
        if plans is not None:
            return operator.forward(tensors, number, options, plans)
        found = operator.op_without_autograd(*operator.join_arguments(tensors, number, options))
        return (found,) if operator.num_results == 1 else found


def apply(
    operator: CustomOperator, tensors: Tensors, number: int, options: Any, plans: Plans | None = None
) -> Tensors:
    """Run an operator on kernels, with its gradient, by the shortest path that the call allows.

    Args:
        operator: The operator.
        tensors: Its tensors, as its ``inputs_type``.
        number: Its number; 0 where it has none.
        options: Its options.
        plans: The launch plans of calls like this one, if it is known to be plain and eager.

    Returns:
        All results.
    """
    if plans is None and is_plain_eager(*(t for t in tensors if t is not None)):
        plans = Plans()
    if plans is None:
        return apply_registered(operator, tensors, number, options)
    if operator.specialize is not None:
        options = operator.specialize(options, tuple(t is not None and is_differentiated(t) for t in tensors))
    call = _OperatorCall(operator, options, plans)
    if (
        operator.gradient is not None
        and _is_grad_enabled()
        and any(t is not None and t.requires_grad for t in tensors)
    ):
        return _apply_plain(call, number, *tensors)  # type: ignore[no-any-return]
    return call.run(tensors, number)


def apply_registered(operator: CustomOperator, tensors: Tensors, number: int, options: Any) -> Tensors:
    """Returns all results of an operator, run through PyTorch's dispatcher, which is right for every call."""
    if operator.specialize is not None:
        options = operator.specialize(options, tuple(t is not None and is_differentiated(t) for t in tensors))
    if not _is_traced_by_dynamo():
        operator.register_flops()
    found = operator.op(*operator.join_arguments(tensors, number, options))
    return (found,) if operator.num_results == 1 else found


def _run_both(operator: CustomOperator, tensors: Tensors, number: int, options: Any) -> Tensors | None:
    """Returns the results of a call with their tangents, computed together, or None where that cannot be.

    It cannot be within ``vmap``, nor where gradients are wanted, which the results have but not their tangents.
    """
    tangent = operator.tangent
    if tangent is None or tangent.run_both is None:
        return None
    if any(t is not None and is_differentiated(t) for t in tensors):
        return None
    try:
        parts = [(None, None) if t is None else tuple(forward_ad.unpack_dual(t, level=0)) for t in tensors]
    except RuntimeError:
        return None
    inputs, tangents = (operator.inputs_type(*each) for each in zip(*parts))
    if all(t is None for t in tangents) or tangent.obstacle(inputs, options, [t is not None for t in tangents]):
        return None
    results = zip(*tangent.run_both(inputs, tangents, number, options))
    return tuple([forward_ad.make_dual(x, dx, level=0) for x, dx in results])


class _OperatorFunction(torch.autograd.Function):
    """The autograd function of all operators, for plain calls and for calls of the registered operator."""

    @staticmethod
    def forward(call: _OperatorCall, number: int, *tensors: Tensor | None) -> Tensors:
        return call.run(call.operator.inputs_type(*tensors), number)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensors) -> None:
        call, ctx.number = inputs[:2]
        ctx.call = call
        if call.plans is None:  # a plain call has no tangents
            ctx.save_for_forward(*inputs[2:])
        operator = call.operator
        gradient = operator.gradient
        if gradient is None:
            return
        tensors = operator.inputs_type(*inputs[2:])
        saved, ctx.extra_options = tensors, ()
        if gradient.save is not None:
            saved, ctx.extra_options = gradient.save(tensors, call.options, output, ctx.needs_input_grad[2:])
        ctx.save_for_backward(*saved)
        ctx.mark_non_differentiable(*[r for r in output[operator.num_differentiable :] if r is not None])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor | None) -> tuple[Tensor | None, ...]:
        call: _OperatorCall = ctx.call
        operator, options, plans = call
        gradient = operator.gradient
        if gradient is None:
            raise NotImplementedError(operator.why_no_gradient)
        grad_outputs = grad_outputs[: operator.num_differentiable]
        given = [grad for grad in grad_outputs if grad is not None]
        absent = (None,) * len(ctx.needs_input_grad)
        if not given:
            return absent
        saved = ctx.saved_tensors  # once: activation checkpointing gives them once only
        wanted = ctx.needs_input_grad[2 : 2 + gradient.num_gradients]
        if plans is not None and is_plain_backward(*given):
            found = gradient.run(grad_outputs, saved, ctx.number, options, ctx.extra_options, wanted, plans)
        else:
            backward: Any = operator.backward_operator
            rest = (*options, *ctx.extra_options, list(wanted))
            found = backward.op(*backward.join_arguments((*grad_outputs, *saved), ctx.number, rest))
            found = (found,) if gradient.num_gradients == 1 else found
        grad_inputs = [g if wants else None for g, wants in zip(found, wanted)]
        return None, None, *grad_inputs, *absent[2 + gradient.num_gradients :]

    @staticmethod
    def jvp(ctx: Any, _: None, __: None, *tangents: Tensor | None) -> tuple[Tensor | None, ...]:
        operator, options, _plans = ctx.call
        inputs, tangents = operator.inputs_type(*ctx.saved_tensors), operator.inputs_type(*tangents)
        found = operator.differentiate_forward(inputs, tangents, ctx.number, options)
        count, num_differentiable = len(found), operator.num_differentiable or operator.num_results
        nothing = [found[0].new_zeros(0, dtype=torch.float32)] * (num_differentiable - count)  # see `_fill_missing`
        return (*found, *nothing, *[None] * (operator.num_results - num_differentiable))

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], call: _OperatorCall, number: int, *tensors: Any) -> Any:
        def run(*tensors: Any) -> Any:
            return _OperatorFunction.apply(call, number, *tensors)

        return run_per_sample(run, info.batch_size, in_dims[2:], tensors)


# `torch.autograd.Function.apply` looks for function transforms, and for tensors that outlived one, before it calls
# this. Plain eager calls have none of either.
_apply_plain: Any = find_apply(_OperatorFunction)


# ----------------------------------------------------------------------------------------------------------
# 3. An operator as PyTorch knows it
# ----------------------------------------------------------------------------------------------------------


class Gradient(NamedTuple):
    """The backward of an operator: its schema, and the functions that compute it."""

    grad_outputs: str
    """Schema of the incoming gradients, one for each of the operator's first results: ``Tensor? grad``."""
    saved: str
    """Schema of the tensors that the forward saves."""
    num_gradients: int
    """The number of gradients that the backward returns, for the first of the operator's tensors."""
    run: Callable[..., Sequence[Tensor | None]]
    """Computes the gradients, given incoming gradients, saved tensors, number, options, extra options, which
    gradients are wanted, and plans. A gradient that is not wanted may be None or any tensor."""
    fake: Callable[..., Sequence[Tensor | None]]
    """Allocates the gradients without computing them, given the arguments of ``run`` but number and plans."""
    extra_options: str = ""
    """Schema of the options that only the backward has."""
    save: Callable[[Any, Any, Tensors, Sequence[bool]], tuple[Tensors, Options]] | None = None
    """Returns the tensors to save and the backward's extra options, given the tensors, the options, the results,
    and which tensors need a gradient. Without it, all tensors are saved."""
    flops: Callable[[Tensors, Tensors, Any], int] | None = None
    """Counts the operations of the backward's matrix products, given incoming gradients, saved tensors and
    options."""


class Tangent(NamedTuple):
    """The derivative of an operator in forward mode, by operators on kernels and by functions of PyTorch."""

    run: Callable[[Any, Any, int, Any], Sequence[Tensor]]
    """Computes the tangents of the results that have gradients, given tensors, their tangents, each of which may be
    None for zero, number and options. Results that the call does not have are left out at the end."""
    obstacle: Callable[[Any, Any, Sequence[bool]], str | None] = lambda inputs, options, given: None
    """Returns why ``run`` does not compute a call, or None, given tensors, options and which tensors have one."""
    run_both: Callable[[Any, Any, int, Any], tuple[Sequence[Tensor], Sequence[Tensor]]] | None = None
    """Computes the results too, given the same as ``run``, where that is faster than one after the other."""


def differentiate_forward(
    function: Callable[..., Tensor | Sequence[Tensor]], tensors: Sequence[Any], tangents: Sequence[Tensor | None]
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Returns a function's results and their tangents, given its arguments and their tangents, each None for zero.

    It is for a derivative that a transform or level of forward mode asks for, and belongs to that.
    """
    with set_forward_enabled(True):
        # There is one level, also in compiled code, where PyTorch's Python does not know of it.
        duals = [
            x
            if tangent is None
            else forward_ad.make_dual(forward_ad.unpack_dual(x, level=0).primal, tangent, level=0)
            for x, tangent in zip(tensors, tangents)
        ]
        results = function(*duals)
        results = (results,) if isinstance(results, Tensor) else results
        found = [forward_ad.unpack_dual(x, level=0) for x in results]
    own = [torch.zeros_like(x) if tangent is None else tangent for x, tangent in found]
    return tuple([x for x, _ in found]), tuple(own)


@dataclass(eq=False)
class CustomOperator:
    """An operator of PyTorch, ``torch.ops.warploom.<name>``, that runs on kernels.

    Its arguments are tensors, at most one integer that changes from call to call (``number``), and options.
    Launches are planned for shapes, strides, dtypes and options. A plan holds neither the number nor values of
    tensors.
    """

    name: str
    tensors: str
    """Schema of the tensors: ``Tensor x, Tensor? bias``."""
    options: str
    """Schema of the options."""
    num_results: int
    """The number of tensors that the operator returns."""
    options_type: Callable[..., Any]
    """Makes the options, a NamedTuple, from their values in the order of the schema."""
    forward: Callable[[Any, int, Any, Plans], Tensors]
    """Computes the results, given tensors, number, options, and the plans of calls like this one. A result that the
    call does not have is None."""
    fake: Callable[[Any, Any], Tensors]
    """Allocates the results without computing them, given tensors and options."""
    gradient: Gradient | None = None
    why_no_gradient: str = ""
    """The text of the error for a backward, where there is no gradient."""
    number: str = ""
    """Schema of the number, ``SymInt offset``; empty if there is none."""
    flops: Callable[[Any, Any], int] | None = None
    """Counts the operations of the matrix products, given tensors and options; for `torch.utils.flop_counter`."""
    specialize: Callable[[Any, tuple[bool, ...]], Any] | None = None
    """Adapts the options to which tensors need a gradient, where launches depend on that."""
    inputs_type: Callable[..., Any] = lambda *tensors: tensors
    """Makes a call's tensors, a NamedTuple, from their values in the order of the schema; by default a tuple."""
    any_backend: bool = False
    """True if the operator also runs without kernels: it chooses a backend itself."""

    num_tensors: int = field(init=False)
    num_differentiable: int = field(init=False, default=0)
    """The number of results that have a gradient: the first ones."""
    plans: Plans = field(init=False)
    """Launch plans of calls through PyTorch's dispatcher."""
    op: Any = field(init=False)
    """The registered operator, with its gradient."""
    op_without_autograd: Any = field(init=False)
    """The registered operator ``<name>_launch``, which has no gradient and saves a level of dispatch."""
    backward_operator: CustomOperator | None = field(init=False, default=None)
    """The backward as an operator, made from ``gradient``."""
    definition: Callable[[Any, int, Any], Any] | None = field(init=False, default=None)
    """Computes the results that have derivatives by the reference, given tensors, number and options. It is
    differentiated where ``tangent`` is None or has an obstacle. The operator's `Function` sets both."""
    tangent: Tangent | None = field(init=False, default=None)
    _flops_registered: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        self.num_tensors, self.plans = _count_parts(self.tensors), Plans()
        ALL_PLANS.append(self.plans)
        self._register()
        if self.gradient is not None:
            self.num_differentiable = _count_parts(self.gradient.grad_outputs)
            self.backward_operator = _make_backward_operator(self, self.gradient)

    def join_arguments(self, tensors: Tensors, number: int, options: Options) -> tuple[Any, ...]:
        """Returns the arguments of the registered operator."""
        return (*tensors, number, *options) if self.number else (*tensors, *options)

    def split_arguments(self, arguments: Sequence[Any]) -> tuple[Tensors, int, Any]:
        """Returns tensors, number and options, given the arguments of the registered operator."""
        tensors, rest = self.inputs_type(*arguments[: self.num_tensors]), arguments[self.num_tensors :]
        number, rest = (rest[0], rest[1:]) if self.number else (0, rest)
        return tensors, number, self.options_type(*(tuple(o) if isinstance(o, list) else o for o in rest))

    def find_forward_obstacle(self, tensors: Tensors, options: Any, given: Sequence[bool]) -> str | None:
        """Returns why kernels do not compute tangents of a call, or None, given which tensors have one."""
        if self.tangent is None:
            return f"{self.name} has no kernels in forward mode"
        reason = self.tangent.obstacle(tensors, options, given)
        return None if reason is None else f"in forward mode, {reason}"

    def differentiate_forward(
        self, tensors: Tensors, tangents: Tensors, number: int, options: Any
    ) -> Sequence[Tensor]:
        """Returns the tangents of the first results, given tensors, their tangents, number and options.

        Raises:
            NotImplementedError: The operator writes a tensor that it is given, or is a backward.
        """
        given = [tangent is not None for tangent in tangents]
        if self.tangent is not None and self.tangent.obstacle(tensors, options, given) is None:
            return self.tangent.run(tensors, tangents, number, options)
        if self.definition is None or "!)" in self.tensors:
            raise NotImplementedError(
                f'{self.name} kernels have no derivative in forward mode; call with backend="torch" for one'
            )
        define = self.definition

        def run(*tensors: Any) -> Any:
            return define(self.inputs_type(*tensors), number, options)

        return differentiate_forward(run, tensors, tangents)[1]

    def register_flops(self) -> None:
        """Register ``flops`` with PyTorch's counter of operations, if that is in use: it imports Triton."""
        if self._flops_registered or self.flops is None or "torch.utils.flop_counter" not in sys.modules:
            return
        self._flops_registered = True
        for name in (self.name, f"{self.name}_launch"):
            count_flops(getattr(torch.ops.warploom, name), self._count_flops)
        if self.backward_operator is not None:
            self.backward_operator.register_flops()

    def _register(self) -> None:
        """Register the operator as ``name``, with a gradient, and as ``name_launch``, without.

        Compiled code has forward and backward apart and calls the second. After `torch.library.register_autograd`
        it would call the first, which enters Python twice, once to find that no gradient is wanted: half a
        launch.

        The first also works under the transforms of `torch.func`, whose ``vmap`` runs one call after another, and
        in forward mode.
        """
        parts = ", ".join(part for part in (self.tensors, self.number, self.options) if part)
        results = ", ".join(["Tensor"] * self.num_results)
        for name in (self.name, f"{self.name}_launch"):
            _library.define(f"{name}({parts}) -> " + (results if self.num_results == 1 else f"({results})"))
            _library.impl(name, self._run, "CUDA")
            _library.impl(name, self._run_on_cpu, "CPU")  # in Triton's interpreter
            torch.library.register_fake(f"warploom::{name}", self._run_fake, lib=_library)
        self.op = getattr(torch.ops.warploom, self.name)
        self.op_without_autograd = getattr(torch.ops.warploom, f"{self.name}_launch").default
        _library.impl(self.name, self._run_autograd, "Autograd")
        _library.impl(self.name, self._run_recorded, "FuncTorchDynamicLayerFrontMode")

    def _run(self, *arguments: Any) -> Any:
        """Run on kernels, on a GPU or in Triton's interpreter."""
        tensors, number, options = self.split_arguments(arguments)
        first = next(t for t in tensors if t is not None)
        plans = Plans()
        if keeps_plans_for(first):
            plans = self.plans.get((*map(tensor_key, tensors), *options), Plans)
        return _fill_missing(self.forward(tensors, number, options, plans), first)

    def _run_on_cpu(self, *arguments: Any) -> Any:
        if not self.any_backend:
            use_triton(self.name, "triton", next(t for t in arguments if isinstance(t, torch.Tensor)))  # or raises
        return self._run(*arguments)

    def _run_fake(self, *arguments: Any) -> Any:
        tensors, _, options = self.split_arguments(arguments)
        return _fill_missing(self.fake(tensors, options), next(t for t in tensors if t is not None))

    def _run_autograd(self, *arguments: Any) -> Any:
        self.register_flops()
        if (_is_grad_enabled() and any_requires_grad(*arguments)) or any(map(has_tangent, arguments)):
            return self._run_recorded(*arguments)
        return self.op_without_autograd(*arguments)

    def _run_recorded(self, *arguments: Any) -> Any:
        """Run and let autograd record the call."""
        tensors, number, options = self.split_arguments(arguments)
        found = _OperatorFunction.apply(_OperatorCall(self, options, None), number, *tensors)
        return found[0] if self.num_results == 1 else found

    def _count_flops(self, *arguments: Any, **_: Any) -> int:
        tensors, _number, options = self.split_arguments(arguments)
        return self.flops(tensors, options) if self.flops else 0


def _count_parts(schema: str) -> int:
    return len(schema.split(",")) if schema else 0


def _fill_missing(results: Sequence[Tensor | None], like: Tensor) -> Any:
    """Returns results with an empty tensor for each None, which a registered operator cannot return."""
    found = tuple(like.new_empty(0, dtype=torch.float32) if r is None else r for r in results)
    return found[0] if len(found) == 1 else found


def _make_backward_operator(operator: CustomOperator, gradient: Gradient) -> CustomOperator:
    """Returns the backward as an operator, which has no derivative itself."""
    num_extra = _count_parts(gradient.extra_options)
    num_grads = operator.num_differentiable

    def split(options: Options) -> tuple[Any, Options, Sequence[bool]]:
        *rest, wanted = options
        own = len(rest) - num_extra
        return operator.options_type(*rest[:own]), tuple(rest[own:]), wanted

    def forward(tensors: Tensors, number: int, options: Options, plans: Plans) -> Tensors:
        found = gradient.run(tensors[:num_grads], tensors[num_grads:], number, *split(options), plans)
        return tuple(found)

    def fake(tensors: Tensors, options: Options) -> Tensors:
        return tuple(gradient.fake(tensors[:num_grads], tensors[num_grads:], *split(options)))

    def flops(tensors: Tensors, options: Options) -> int:
        return gradient.flops(tensors[:num_grads], tensors[num_grads:], split(options)[0]) if gradient.flops else 0

    return CustomOperator(
        name=f"{operator.name}_backward",
        tensors=f"{gradient.grad_outputs}, {gradient.saved}",
        options=", ".join(part for part in (operator.options, gradient.extra_options, "bool[] wanted") if part),
        num_results=gradient.num_gradients,
        options_type=lambda *values: values,
        forward=forward,
        fake=fake,
        why_no_gradient=f'{operator.name} kernels have no second derivative; call with backend="torch" for one',
        number=operator.number,
        any_backend=operator.any_backend,
        flops=None if gradient.flops is None else flops,
    )


class LazyModule:
    """A module of kernels and launches that is imported when it is first used, since that imports Triton."""

    def __init__(self, name: str, package: str | None = None) -> None:
        """Take the arguments of `importlib.import_module`."""
        self._name = resolve_name(name, package)

    def __getattr__(self, attribute: str) -> Any:
        if not HAS_TRITON:
            raise BackendError(f"{self._name}: Triton is not installed")
        value = getattr(import_module(self._name), attribute)
        setattr(self, attribute, value)  # the next access finds it without this function
        return value
