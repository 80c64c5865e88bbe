"""Builds of kernels: the declared parameters of a kernel, and its compilation for given arguments."""

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

from warploom.errors import BackendError
from warploom.runtime.halves import find_spilled_halves

COMPILED_WITH = {"enable_fp_fusion": True}
"""Options of every kernel: products and sums are fused, whatever the default of a version of Triton."""
ALIGNMENT = 16  # bytes, of an address that is read or written 128 bits at a time
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
    """Returns the declared kinds of a kernel's parameters, by name and in order.

    A kind is `CONSTANT`, a number's type in Triton's abbreviation, a NamedTuple of these, or None for a pointer.
    """
    form_cache_key(kernel)  # before anything asks for the kernel's hash, which is that of the key
    return _parameters_of(kernel)


@functools.cache
def _parameters_of(kernel: Any) -> dict[str, Any]:
    parameters = inspect.signature(kernel.fn, eval_str=True).parameters
    return {name: _read_annotation(parameter.annotation) for name, parameter in parameters.items()}


def _read_annotation(annotation: Any) -> Any:
    if isinstance(annotation, tl.dtype):
        return annotation.name.replace("uint", "u").replace("int", "i")
    if annotation is tl.constexpr:
        return CONSTANT
    if isinstance(annotation, type) and issubclass(annotation, tuple):
        return annotation(*map(_read_annotation, typing.get_type_hints(annotation).values()))
    return None


def flatten_argument(kind: Any, value: Any) -> list[tuple[str, Any]]:
    """Returns the kinds and values that a compiled kernel takes for a parameter, without tuples and constants."""
    if isinstance(kind, tuple):
        return [each for part in zip(kind, value, strict=True) for each in flatten_argument(*part)]
    return [] if kind == CONSTANT else [(kind, value)]


def _strip_names(value: Any) -> Any:
    """Returns types and constants without names of tuples, and without layouts, whose text has versions."""
    if isinstance(value, tuple):
        return tuple(map(_strip_names, value))
    if isinstance(value, list):
        return list(map(_strip_names, value))
    return value.partition("]")[0] if isinstance(value, str) else value


def form_cache_key(function: Any, callers: tuple[Any, ...] = ()) -> None:
    """Form the keys in Triton's cache of all functions that a function calls, and then its own.

    A key covers the global constants of a called function only if that function's key was formed before. Otherwise
    keys depend on the order of compilation, and a process does not find the kernels that another has compiled.
    """
    if not triton.knobs.runtime.interpret and function.hash is None:
        for called in _find_called(function):
            if all(called is not caller for caller in callers):
                form_cache_key(called, (*callers, function))
        _ = function.cache_key


def _find_called(function: Any) -> Iterator[Any]:
    """Yield the functions, Triton's own and itself excepted, that a kernel or device function names."""
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


def _make_constants(value: Any) -> Any:
    """Returns a tuple, and those in it, with constants as fields: shapes and ``static_range`` take nothing else."""
    if not hasattr(value, "_fields"):
        return value
    return type(value)(*(_make_constants(x) if hasattr(x, "_fields") else tl.constexpr(x) for x in value))


@dataclass(frozen=True)
class Build:
    """One variant of a kernel: the kernel with the types and constants to compile it for."""

    function: Any
    signature: dict[str, Any]
    """The type of each parameter; NamedTuples of types where a parameter is one."""
    constexprs: dict[str, Any]
    attrs: dict[tuple[int, ...], list[list[Any]]] = field(repr=False)
    options: dict[str, int]

    @property
    def key(self) -> tuple[Any, ...]:
        """A key that is equal for builds that compile to the same machine code."""
        constants = tuple(self.constexprs.items())
        return self.function, tuple(self.signature.items()), constants, tuple(self.attrs), *self.options.items()

    @property
    def variant(self) -> str:
        """A text that identifies this build among those of its kernel, the same in every version of Triton."""
        types, constants = (_strip_names(list(each.values())) for each in (self.signature, self.constexprs))
        return f"{types} {constants} {sorted(self.attrs)} {sorted(self.options.items())}"

    def source(self) -> tuple[Any, dict[str, Any]]:
        """Returns the source that Triton compiles, and the options to compile it with."""
        if self.function.is_gluon():
            from triton.experimental.gluon._runtime import GluonASTSource as Source
        else:
            from triton.compiler import ASTSource as Source
        constants = {name: _make_constants(value) for name, value in self.constexprs.items()}
        options = {
            **COMPILED_WITH,
            **self.options,
            "debug": triton.knobs.runtime.debug,
            "instrumentation_mode": triton.knobs.compilation.instrumentation_mode,
        }
        return Source(self.function, self.signature, constants, self.attrs), options

    def compile(self, target: Any = None) -> Any:
        """Compile this build for the current GPU or another target. Launches pass the values of `flatten_argument`.

        Triton's ``kernel[grid](...)`` compiles the same code. But it takes the types of integers in tuples from
        their values, and its launcher unpacks tuples and skips constants on every call, which costs as much as the
        launch.

        Raises:
            BackendError: LLVM compiles it wrongly (`find_spilled_halves`). If it does so with Triton's assertions
                alone, the kernel is compiled without them.
        """
        source, options = self.source()
        compiled = triton.compile(source, target=target, options=options)
        faults = find_spilled_halves(compiled.asm["ptx"])
        if faults and options["debug"]:
            compiled = triton.compile(source, target=target, options={**options, "debug": False})
            faults = find_spilled_halves(compiled.asm["ptx"])
        if faults:
            where = f"Triton {triton.__version__} compiles {self.function.__name__} wrongly ({faults[0]})"
            raise BackendError(f"{where}. Take backend='torch' or another version of Triton, and please report it.")
        types = [kind for each in self.signature.values() for kind, _ in flatten_argument(each, each)]
        compiled.src = copy.copy(source)  # the launcher is made from it
        compiled.src.signature, compiled.src.constants = dict(enumerate(types)), {}
        return compiled
