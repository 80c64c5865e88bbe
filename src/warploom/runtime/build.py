"""What a kernel declares of its parameters, and what it takes to compile it for given arguments."""

from __future__ import annotations

import ast
import copy
import functools
import inspect
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import triton
import triton.language as tl

COMPILED_WITH = {"enable_fp_fusion": True}
"""Options of every kernel: products and sums may be one operation, whatever a version of Triton does by default."""
ALIGNMENT = 16  # bytes; what a 128-bit load or store needs of its address
CONSTANT = "constexpr"
TYPE_NAMES = {
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.int16: "i16",
    torch.int32: "i32",
    torch.int64: "i64",
}


def parameters_of(kernel: Any) -> dict[str, Any]:
    """Returns what a kernel declares of each parameter, in their order.

    `CONSTANT`; the type of a number, as Triton abbreviates it; a NamedTuple of these; None for a pointer.
    """
    form_cache_key(kernel)  # before anything asks for the kernel's hash, which is that of the key
    return _parameters_of(kernel)


@functools.cache
def _parameters_of(kernel: Any) -> dict[str, Any]:
    parameters = inspect.signature(kernel.fn, eval_str=True).parameters
    return {name: _declared(parameter.annotation) for name, parameter in parameters.items()}


def _declared(annotation: Any) -> Any:
    if isinstance(annotation, tl.dtype):
        return annotation.name.replace("uint", "u").replace("int", "i")
    if annotation is tl.constexpr:
        return CONSTANT
    if isinstance(annotation, type) and issubclass(annotation, tuple):
        return annotation(*map(_declared, typing.get_type_hints(annotation).values()))
    return None


def flatten_argument(kind: Any, value: Any) -> list[tuple[str, Any]]:
    """What a compiled kernel takes of a parameter, types and values: no tuples, no constants."""
    if isinstance(kind, tuple):
        return [each for part in zip(kind, value, strict=True) for each in flatten_argument(*part)]
    return [] if kind == CONSTANT else [(kind, value)]


def _plain(value: Any) -> Any:
    """Types and constants without the names of tuples, and without a descriptor's layout, which has versions."""
    if isinstance(value, tuple):
        return tuple(map(_plain, value))
    if isinstance(value, list):
        return list(map(_plain, value))
    return value.partition("]")[0] if isinstance(value, str) else value


def form_cache_key(function: Any, callers: tuple[Any, ...] = ()) -> None:
    """Form the keys under which Triton's cache has what a function calls, and then its own.

    Triton enters the global constants of what a function calls into its key only if the key of that was formed
    before. Left alone, a key depends on what was compiled first, and a process misses what another left on disk.
    """
    if not triton.knobs.runtime.interpret and function.hash is None:
        for called in _called(function):
            if all(called is not caller for caller in callers):
                form_cache_key(called, (*callers, function))
        _ = function.cache_key


def _called(function: Any) -> Iterator[Any]:
    """The functions of ours that a kernel or a function in a kernel names, its own name left out."""
    for node in ast.walk(function.parse()):
        value = None
        if isinstance(node, ast.Name):
            value = function.__globals__.get(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            module = function.__globals__.get(node.value.id)
            value = getattr(module, node.attr, None) if isinstance(module, types.ModuleType) else None
        for each in getattr(value, "hash_attrs", None) or (value,):  # the methods of a class, if it has any
            ours = isinstance(each, triton.runtime.jit.JITCallable) and not each.__module__.startswith("triton.")
            if ours and each is not function:
                yield each


def _as_constants(value: Any) -> Any:
    """A tuple whose fields are constants in a kernel too: shapes and ``static_range`` take nothing else."""
    return type(value)(*map(tl.constexpr, value)) if hasattr(value, "_fields") else value


@dataclass(frozen=True)
class Build:
    """One variant of a kernel: what it takes to compile it."""

    function: Any
    signature: dict[str, Any]
    """The type of each parameter; NamedTuples of types where a parameter is one."""
    constexprs: dict[str, Any]
    attrs: dict[tuple[int, ...], list[list[Any]]] = field(repr=False)
    options: dict[str, int]

    @property
    def key(self) -> tuple[Any, ...]:
        """What is the same for builds that compile to the same."""
        constants = tuple(self.constexprs.items())
        return self.function, tuple(self.signature.items()), constants, tuple(self.attrs), *self.options.items()

    @property
    def variant(self) -> str:
        """What tells it from other builds of its function, the same in every version of Triton."""
        types, constants = (_plain(list(each.values())) for each in (self.signature, self.constexprs))
        return f"{types} {constants} {sorted(self.attrs)} {sorted(self.options.items())}"

    def source(self) -> tuple[Any, dict[str, Any]]:
        """Returns what Triton compiles, and the options with which it does."""
        if self.function.is_gluon():
            from triton.experimental.gluon._runtime import GluonASTSource as Source
        else:
            from triton.compiler import ASTSource as Source
        constants = {name: _as_constants(value) for name, value in self.constexprs.items()}
        options = {
            **COMPILED_WITH,
            **self.options,
            "debug": triton.knobs.runtime.debug,
            "instrumentation_mode": triton.knobs.compilation.instrumentation_mode,
        }
        return Source(self.function, self.signature, constants, self.attrs), options

    def compile(self, target: Any = None) -> Any:
        """Returns the compiled variant, for the current GPU or another target.

        It is launched with the values of `flatten_argument`.

        It is what Triton's ``kernel[grid](...)`` comes to. That takes types of integers in tuples from values, and
        its launcher unpacks tuples and passes over constants on every call, which costs as much as the launch.
        """
        source, options = self.source()
        compiled = triton.compile(source, target=target, options=options)
        types = [kind for each in self.signature.values() for kind, _ in flatten_argument(each, each)]
        compiled.src = copy.copy(source)  # of which the launcher is made
        compiled.src.signature, compiled.src.constants = dict(enumerate(types)), {}
        return compiled
