"""The one way from a public function to kernels, and back through autograd.

A public function hands its arguments to a `Function`. There a guard knows calls like one of the last few, by a
comparison in C; a key knows all calls like an earlier one; any other call is validated, and goes to the kernels or
to the reference. What runs on kernels is an `Operator`, registered as ``torch.ops.warploom.<name>``, with a
gradient that is one as well. A plain eager call goes to its launches directly, which saves the six microseconds of
PyTorch's dispatcher. Whatever watches a call, a compiler, mode, transform or subclass, sees the registered
operator.

An operator's file says what to launch, what to save for the backward, and how to allocate results without data. It
has no cache, no autograd function and no registration of its own.
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
from warploom.runtime.autocast import without_autocast
from warploom.runtime.backend import HAS_TRITON, use_triton
from warploom.runtime.modes import (
    count_flops,
    is_differentiated,
    is_plain_backward,
    is_plain_eager,
    is_watched,
    stacked,
)
from warploom.runtime.plans import Plans, are_kept, caches, metadata, recognise
from warploom.runtime.pytorch import any_requires_grad, apply_of, forward_ad
from warploom.runtime.sharding import Axes, is_sharded, on_shards
from warploom.runtime.values import are_looked_at

__all__ = ["Checked", "Function", "Gradient", "Late", "Operator", "apply", "caches"]

Tensor = torch.Tensor
Tensors = tuple[Any, ...]
"""Tensors, each of which may be None."""
Options = tuple[Any, ...]

_is_grad_enabled = torch.is_grad_enabled
_is_traced_by_dynamo = torch.compiler.is_dynamo_compiling
_library = torch.library.Library("warploom", "FRAGMENT")


class Late:
    """A module of kernels and their launches, imported when something of it is first used: that imports Triton."""

    def __init__(self, name: str, package: str | None = None) -> None:
        """As `importlib.import_module` takes them."""
        self._name = resolve_name(name, package)

    def __getattr__(self, attribute: str) -> Any:
        if not HAS_TRITON:
            raise BackendError(f"{self._name}: Triton is not installed")
        value = getattr(import_module(self._name), attribute)
        setattr(self, attribute, value)  # the next time it is found without this function
        return value


class Gradient(NamedTuple):
    """The backward of an operator."""

    grads: str
    """Schema of the gradients of results, those of the first results: ``Tensor? grad``."""
    saved: str
    """Schema of the tensors that the forward saves."""
    gradients: int
    """It returns as many, of the operator's first tensors."""
    save: Callable[[Any, Any, Tensors, Sequence[bool]], tuple[Tensors, Options]]
    """From tensors, options, results, and of which tensors gradients are wanted: the saved tensors, and the
    ``extra`` options of the backward."""
    run: Callable[..., Sequence[Tensor | None]]
    """Computes the gradients, from those of results, saved tensors, the number, options, extra options, which
    gradients are wanted, and plans. None, or anything, in the place of one that is not wanted."""
    fake: Callable[..., Sequence[Tensor | None]]
    """Allocates them, from the same but number and plans."""
    extra: str = ""
    """Schema of the options that only the backward has."""
    flops: Callable[[Tensors, Tensors, Any], int] | None = None
    """Operations of its matrix products, from gradients of results, saved tensors, and options."""


@dataclass(eq=False)
class Operator:
    """A registered operator: what runs on kernels.

    Its arguments are tensors, at most one number that varies from call to call, and options. Launches are planned
    for shapes, strides, dtypes and options, and know neither the number nor what tensors hold.
    """

    name: str
    tensors: str
    """Schema of the tensors: ``Tensor x, Tensor? bias``."""
    options: str
    """Schema of the options."""
    results: int
    """How many tensors it returns."""
    options_type: Callable[..., Any]
    """Makes options of their values, in the order of the schema: a NamedTuple."""
    forward: Callable[[Any, int, Any, Plans], Tensors]
    """Computes the results, from tensors, number, options, and plans of calls like this one. None for a result that
    a call does not have."""
    fake: Callable[[Any, Any], Tensors]
    """Allocates the results."""
    gradient: Gradient | None = None
    refusal: str = ""
    """Why it has no gradient."""
    number: str = ""
    """Schema of the number, if it has one: ``SymInt offset``."""
    flops: Callable[[Any, Any], int] | None = None
    """Operations of its matrix products, for `torch.utils.flop_counter`."""
    differentiated: Callable[[Any, tuple[bool, ...]], Any] | None = None
    """Options of a call of which these tensors are differentiated, where launches depend on that."""

    inputs_type: Callable[..., Any] = lambda *tensors: tensors
    """Makes a call's tensors of their values, in the order of the schema: a NamedTuple, or by default a tuple."""

    anywhere: bool = False
    """Whether it runs without kernels too, as what chooses between these and PyTorch itself."""

    inputs: int = field(init=False)
    """How many tensors it takes."""
    grads: int = field(init=False, default=0)
    """How many of its results are differentiable: the first."""
    plans: Plans = field(init=False)
    """Of the registered operator's calls."""
    backward: Operator | None = field(init=False, default=None)
    op: Any = field(init=False)
    """The registered operator."""
    launch: Any = field(init=False)
    """The same without a gradient."""
    _counted: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        self.inputs, self.plans = _count(self.tensors), Plans()
        caches().append(self.plans)
        self._register()
        if self.gradient is not None:
            self.grads = _count(self.gradient.grads)
            self.backward = _backward_of(self, self.gradient)

    def arguments(self, tensors: Tensors, number: int, options: Options) -> tuple[Any, ...]:
        """Those of the registered operator."""
        return (*tensors, number, *options) if self.number else (*tensors, *options)

    def split(self, arguments: Sequence[Any]) -> tuple[Tensors, int, Any]:
        """Arguments of the registered operator as tensors, number and options."""
        tensors, rest = self.inputs_type(*arguments[: self.inputs]), arguments[self.inputs :]
        number, rest = (rest[0], rest[1:]) if self.number else (0, rest)
        return tensors, number, self.options_type(*(tuple(o) if isinstance(o, list) else o for o in rest))

    def _run(self, *arguments: Any) -> Any:
        """What the registered operator does, on a GPU or in Triton's interpreter."""
        tensors, number, options = self.split(arguments)
        first = next(t for t in tensors if t is not None)
        known = Plans()
        if are_kept(first):
            known = self.plans.get((*map(metadata, tensors), *options), Plans)
        return _filled(self.forward(tensors, number, options, known), first)

    def _run_on_cpu(self, *arguments: Any) -> Any:
        if not self.anywhere:
            use_triton(self.name, "triton", next(t for t in arguments if isinstance(t, torch.Tensor)))  # or raises
        return self._run(*arguments)

    def _fake(self, *arguments: Any) -> Any:
        tensors, _, options = self.split(arguments)
        return _filled(self.fake(tensors, options), next(t for t in tensors if t is not None))

    def _flops(self, *arguments: Any, **_: Any) -> int:
        tensors, _number, options = self.split(arguments)
        return self.flops(tensors, options) if self.flops else 0

    def count(self) -> None:
        """Let PyTorch's counter of operations know this operator, if it is in use: it imports Triton."""
        if self._counted or self.flops is None or "torch.utils.flop_counter" not in sys.modules:
            return
        self._counted = True
        for name in (self.name, f"{self.name}_launch"):
            count_flops(getattr(torch.ops.warploom, name), self._flops)
        if self.backward is not None:
            self.backward.count()

    def _differentiable(self, *arguments: Any) -> Any:
        self.count()
        if (_is_grad_enabled() and any_requires_grad(*arguments)) or forward_ad._current_level >= 0:
            return self._recorded(*arguments)  # in forward mode it may have been handed a tangent, which raises
        return self.launch(*arguments)

    def _recorded(self, *arguments: Any) -> Any:
        tensors, number, options = self.split(arguments)
        found = _Differentiable.apply(_Call(self, options, None), number, *tensors)
        return found[0] if self.results == 1 else found

    def _register(self) -> None:
        """Register it as ``name``, with a gradient, and as ``name_launch``, without.

        Compiled code has forward and backward apart and calls the second. After `torch.library.register_autograd`
        it would call the first, which enters Python twice, once to find that no gradient is wanted: half a
        launch.

        The first also works under the transforms of `torch.func`, whose ``vmap`` runs one call after another. It
        has no derivative in forward mode, and says so.
        """
        parts = ", ".join(part for part in (self.tensors, self.number, self.options) if part)
        results = ", ".join(["Tensor"] * self.results)
        for name in (self.name, f"{self.name}_launch"):
            _library.define(f"{name}({parts}) -> " + (results if self.results == 1 else f"({results})"))
            _library.impl(name, self._run, "CUDA")
            _library.impl(name, self._run_on_cpu, "CPU")  # in Triton's interpreter
            torch.library.register_fake(f"warploom::{name}", self._fake, lib=_library)
        self.op = getattr(torch.ops.warploom, self.name)
        self.launch = getattr(torch.ops.warploom, f"{self.name}_launch").default
        _library.impl(self.name, self._differentiable, "Autograd")
        _library.impl(self.name, self._recorded, "FuncTorchDynamicLayerFrontMode")


def _count(schema: str) -> int:
    return len(schema.split(",")) if schema else 0


def _filled(results: Sequence[Tensor | None], near: Tensor) -> Any:
    """Results of a registered operator, which are tensors: an empty one stands for None."""
    found = tuple(near.new_empty(0, dtype=torch.float32) if r is None else r for r in results)
    return found[0] if len(found) == 1 else found


def _backward_of(operator: Operator, gradient: Gradient) -> Operator:
    """The backward as an operator, which has no derivative itself."""
    extra = _count(gradient.extra)
    grads = operator.grads

    def split(options: Options) -> tuple[Any, Options, Sequence[bool]]:
        *rest, wanted = options
        own = len(rest) - extra
        return operator.options_type(*rest[:own]), tuple(rest[own:]), wanted

    def forward(tensors: Tensors, number: int, options: Options, plans: Plans) -> Tensors:
        found = gradient.run(tensors[:grads], tensors[grads:], number, *split(options), plans)
        return tuple(found)

    def fake(tensors: Tensors, options: Options) -> Tensors:
        return tuple(gradient.fake(tensors[:grads], tensors[grads:], *split(options)))

    def flops(tensors: Tensors, options: Options) -> int:
        return gradient.flops(tensors[:grads], tensors[grads:], split(options)[0]) if gradient.flops else 0

    return Operator(
        name=f"{operator.name}_backward",
        tensors=f"{gradient.grads}, {gradient.saved}",
        options=", ".join(part for part in (operator.options, gradient.extra, "bool[] wanted") if part),
        results=gradient.gradients,
        options_type=lambda *values: values,
        forward=forward,
        fake=fake,
        refusal=f'{operator.name} kernels have no second derivative; call with backend="torch" for one',
        number=operator.number,
        anywhere=operator.anywhere,
        flops=None if gradient.flops is None else flops,
    )


class _Call(NamedTuple):
    """Calls of one kind."""

    operator: Operator
    options: Any
    plans: Plans | None
    """Those of a plain eager call; None for one that goes through PyTorch's dispatcher."""

    def run(self, tensors: Tensors, number: int) -> Tensors:
        """All results."""
        operator, options, plans = self
        if plans is not None:
            return operator.forward(tensors, number, options, plans)
        found = operator.launch(*operator.arguments(tensors, number, options))
        return (found,) if operator.results == 1 else found


class _Differentiable(torch.autograd.Function):
    """An operator with its gradient: of every operator, plain and registered."""

    @staticmethod
    def forward(call: _Call, number: int, *tensors: Tensor | None) -> Tensors:
        return call.run(call.operator.inputs_type(*tensors), number)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensors) -> None:
        call, ctx.number = inputs[:2]
        ctx.call = call
        operator = call.operator
        gradient = operator.gradient
        if gradient is None:
            return
        tensors = operator.inputs_type(*inputs[2:])
        saved, ctx.extra = gradient.save(tensors, call.options, output, ctx.needs_input_grad[2:])
        ctx.save_for_backward(*saved)
        ctx.mark_non_differentiable(*[r for r in output[operator.grads :] if r is not None])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        call: _Call = ctx.call
        operator, options, plans = call
        gradient = operator.gradient
        if gradient is None:
            raise NotImplementedError(operator.refusal)
        grads = grads[: operator.grads]
        given = [grad for grad in grads if grad is not None]
        absent = (None,) * len(ctx.needs_input_grad)
        if not given:
            return absent
        saved = ctx.saved_tensors  # once: under activation checkpointing they can be had only once
        wanted = ctx.needs_input_grad[2 : 2 + gradient.gradients]
        if plans is not None and is_plain_backward(*given):
            found = gradient.run(grads, saved, ctx.number, options, ctx.extra, wanted, plans)
        else:
            backward: Any = operator.backward
            rest = (*options, *ctx.extra, list(wanted))
            found = backward.op(*backward.arguments((*grads, *saved), ctx.number, rest))
            found = (found,) if gradient.gradients == 1 else found
        gradients = [g if wants else None for g, wants in zip(found, wanted)]
        return None, None, *gradients, *absent[2 + gradient.gradients :]

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        name = ctx.call.operator.name
        raise NotImplementedError(
            f'{name} kernels have no derivative in forward mode; call with backend="torch" for one'
        )

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], call: _Call, number: int, *tensors: Any) -> Any:
        def run(*tensors: Any) -> Any:
            return _Differentiable.apply(call, number, *tensors)

        return stacked(run, info.batch_size, in_dims[2:], tensors)


# `torch.autograd.Function.apply` looks for function transforms, and for tensors that outlived one, before it calls
# this. Plain eager calls have none of either.
_apply_plain: Any = apply_of(_Differentiable)


def apply(operator: Operator, tensors: Tensors, number: int, options: Any, plans: Plans | None = None) -> Tensors:
    """Run an operator on kernels, differentiably, by the shortest way that a call allows.

    Args:
        operator: The operator.
        tensors: As in its schema, of its ``inputs_type``.
        number: The number that varies; 0 where it has none.
        options: As in its schema.
        plans: Those of calls like this one, if it is known to be plain and eager.

    Returns:
        All results.
    """
    if plans is None and is_plain_eager(*(t for t in tensors if t is not None)):
        plans = Plans()
    if operator.differentiated is not None:
        options = operator.differentiated(options, tuple(t is not None and is_differentiated(t) for t in tensors))
    if plans is None:
        if not _is_traced_by_dynamo():
            operator.count()
        found = operator.op(*operator.arguments(tensors, number, options))
        return (found,) if operator.results == 1 else found
    call = _Call(operator, options, plans)
    if (
        operator.gradient is not None
        and _is_grad_enabled()
        and any(t is not None and t.requires_grad for t in tensors)
    ):
        return _apply_plain(call, number, *tensors)  # type: ignore[no-any-return]
    return call.run(tensors, number)


class Checked(NamedTuple):
    """What a function's validation makes of a call."""

    options: Any
    """Of the operator."""
    limit: str | None = None
    """What the kernels do not do in this call, if anything."""
    tensors: Callable[..., Tensors] | None = None
    """Makes the operator's tensors of those of such a call; None where they are the same."""
    results: int = 1
    """How many of the operator's results the call returns."""
    numbers: tuple[int, int] = (0, 0)
    """The least and the greatest number with which the call is right as well."""

    def returned(self, results: Tensors) -> Any:
        """What the call returns of the operator's results."""
        return results[0] if self.results == 1 else results[: self.results]


class _Known(NamedTuple):
    """How a call found right runs on the kernels."""

    call: _Call
    checked: Checked
    forward: Callable[[Tensors, int, Any, Plans], Tensors] | None
    """The operator's; None where gradients are wanted."""
    look: Callable[[Tensors], None] | None
    """Checks what tensors hold; None where that is not looked at."""

    def __call__(self, tensors: Tensors, number: int) -> Any:
        call, checked, forward, look = self
        if look is not None:
            look(tensors)
        if checked.tensors is not None:
            tensors = checked.tensors(*tensors)
        if forward is None:
            results = _apply_plain(call, number, *tensors)
        else:
            results = forward(tensors, number, call.options, call.plans)  # type: ignore[arg-type]
        return checked.returned(results)


class Function:
    """A public function: what it checks, and what runs it."""

    def __init__(
        self,
        name: str,
        check: Callable[[str, Any, Any, Any], Checked],
        reference: Callable[[Any, Any, Checked, str], Any],
        operator: Operator,
        axes: Callable[[Any, Any], Axes] | None = None,
        look: Callable[[str, Any], None] | None = None,
    ) -> None:
        """A function.

        Args:
            name: Its name, for errors.
            check: Validates a call: from the name, tensors, options and number. It raises, or says what runs.
            reference: Runs a call in PyTorch, from tensors, number, what validation made of it, and the backend.
            operator: Runs a call on kernels.
            axes: Says which axes of the tensors can be sharded over ranks, from tensors and options.
            look: Checks what tensors hold, from the name and tensors, see `warploom.runtime.values`.
        """
        self.name, self.check, self.reference, self.operator = name, check, reference, operator
        self.axes, self.look = axes, None if look is None else functools.partial(look, name)
        self.plans = Plans()
        caches().append(self.plans)

    def __call__(self, backend: str, tensors: Tensors, options: Options, number: Any = 0) -> Any:
        """Run a call.

        Args:
            backend: ``auto``, ``triton`` or ``torch``.
            tensors: The arguments that should be tensors, or None, of the operator's ``inputs_type``; the one that
                decides device and dtype first.
            options: All other arguments. Of sequences that can be changed, copies.
            number: That of the operator.
        """
        if type(number) is not int:
            number = as_python(number)
        given = [tensor for tensor in tensors if tensor is not None]
        kind = key = None
        if given and type(number) is int and not is_watched():
            absent = tuple([tensor is None for tensor in tensors])
            # Types first: what is equal to nothing, or to several things at once, has a type of its own. True
            # equals 1, and is not as good.
            kind = (_types(options), absent, backend, options)
            enabled = _is_grad_enabled()
            for like, kind_, enabled_, run in self.plans.recent:
                if enabled is enabled_ and kind == kind_:
                    first, last = run.checked.numbers
                    if first <= number <= last and like(*given):
                        return run(tensors, number)
            if is_plain_eager(*given) and are_kept(given[0]):
                wanted = tuple([enabled and tensor.requires_grad for tensor in given])
                key = (kind, wanted, *map(metadata, given))
                run = self.plans.find(key)
                if run is not None and run.checked.numbers[0] <= number <= run.checked.numbers[1]:
                    like = recognise(*given)
                    if like is not None:
                        self.plans.remember((like, kind, enabled, run))
                    return run(tensors, number)
        checked = self.check(self.name, tensors, as_python(options), number)
        sharded = self.axes is not None and is_sharded(tensors)
        on_kernels = not sharded and use_triton(self.name, backend, given[0], checked.limit)
        look = self.look if self.look is not None and are_looked_at(given[0]) else None
        if look is not None:
            look(tensors)
        if self.axes is not None and sharded:
            axes = self.axes(tensors, options)
            call = functools.partial(self._on_a_shard, backend, options)
            return on_shards(self.name, axes, tensors, number, call)
        if not on_kernels:
            with without_autocast(given[0]):  # which the function has seen to
                return self.reference(tensors, number, checked, backend)
        operator = self.operator
        if key is None:
            arranged = tensors if checked.tensors is None else checked.tensors(*tensors)
            return checked.returned(apply(operator, arranged, number, checked.options))
        settled = checked.options
        wanted = tuple([enabled and tensor is not None and tensor.requires_grad for tensor in tensors])
        if operator.differentiated is not None:
            settled = operator.differentiated(settled, wanted)
        differentiated = operator.gradient is not None and any(wanted)
        forward = None if differentiated else operator.forward
        run = _Known(_Call(operator, settled, Plans()), checked, forward, look)
        self.plans.keep(key, run)
        return run(tensors, number)

    def _on_a_shard(self, backend: str, options: Options, tensors: Sequence[Any], number: Any) -> Any:
        return self(backend, self.operator.inputs_type(*tensors), options, number)


def _types(options: Options) -> tuple[Any, ...]:
    types = tuple(map(type, options))
    if tuple in types:
        return tuple([tuple(map(type, o)) if type(o) is tuple else type(o) for o in options])
    return types
