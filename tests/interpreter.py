"""Triton's interpreter without what it does again and again to no effect: most of the time of a kernel in it."""

import dataclasses
from operator import attrgetter
from typing import Any

import triton.language as tl
from triton.runtime import interpreter


def quicken() -> None:
    """Let the interpreter do once what it does at every call and every operation; a kernel's numbers stay the same.

    A version of Triton with other insides is left as it is.
    """
    options = ("interpreter_builder.options.debug", "interpreter_builder.options.sanitize_overflow")
    insides = ("_LangPatchScope", "_get_np_dtype", "_patch_lang", *options)
    try:
        attrgetter(*insides)(interpreter)
    except AttributeError:
        return
    _prepare_the_language_once_a_launch()
    _look_up_each_dtype_once()
    _compute_no_overflow_check()


def _prepare_the_language_once_a_launch() -> None:
    """A launch begins by putting the interpreter's functions in the place of the language's.

    At each call of a function by a kernel, the interpreter would go through the whole language again, to find that
    nothing is left to do.
    """
    usual = interpreter._patch_lang

    def prepare(function: Any) -> Any:
        languages = [value for value in function.__globals__.values() if value is tl or value is tl.core]
        if languages and not any(tl.core.is_builtin(language.load) for language in languages):
            return interpreter._LangPatchScope()  # with nothing to restore
        return usual(function)

    interpreter._patch_lang = prepare


def _look_up_each_dtype_once() -> None:
    """The interpreter would build a table of all of them at each look."""
    usual = interpreter._get_np_dtype
    known: dict[str, Any] = {}

    def look_up(dtype: Any) -> Any:
        if dtype.name not in known:
            known[dtype.name] = usual(dtype)
        return known[dtype.name]

    interpreter._get_np_dtype = look_up


def _compute_no_overflow_check() -> None:
    """Each sum and product of integers is computed again in 64 bits, for an assertion made in debug mode alone."""
    options = interpreter.interpreter_builder.options
    interpreter.interpreter_builder.options = dataclasses.replace(options, sanitize_overflow=options.debug)
