"""Digests of host code, beside the fingerprints of kernels: of a peer's call, and of what a step of a model runs.

A kernel's time is the device's, and host code changes nothing in it. A peer is what the code around it asks for,
and a step that is timed by the wall clock has the host's time in it. Comments, docstrings and names of files do not
count.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

from warploom.bench.fingerprint import LIMIT, UNKNOWN
from warploom.ops.spec import Bench
from warploom.runtime.backend import HAS_TRITON

_INSTRUMENT = tuple(f"warploom.{name}" for name in ("bench", "cli", "report", "testing"))
"""Modules that measure, and that nothing measured calls."""
Place = tuple[str, str]
"""A module's name, and a name that it defines."""


def code_of(bench: Bench, provider: str) -> str:
    """Returns the digest of the host code that a provider's time depends on; empty where that is none of ours.

    That is everything that a step timed by the wall clock may run, kernels aside, and of another implementation the
    functions that call it. Kernels of ours, timed on the device, have none, nor has a user's own provider, whose
    source is its fingerprint.
    """
    if provider == LIMIT:
        return ""
    if bench.measure is not None:
        if not HAS_TRITON:
            return UNKNOWN
        start = _unwrap(bench.measure)[0].__module__
        return "" if _tree_of(start) is None else _of_modules(start)
    return "" if bench.runs_kernels(provider) else _of_definitions(bench.every_provider[provider])


# ----------------------------------------------------------------------------------------------------------
# What a module may run: it and all that it imports
# ----------------------------------------------------------------------------------------------------------


@functools.cache
def _of_modules(start: str) -> str:
    return _digest(*sorted(map(_text, _reach(start))))


def _reach(start: str) -> list[str]:
    """Returns a module's name and those of all that it may run, but the instrument."""
    reached = [start]
    for name in reached:  # it grows
        reached += dict.fromkeys(other for other in _imports(name) if other not in reached)
    return reached


def _imports(name: str) -> Iterator[str]:
    """Yield the modules of this package, or of the importing one's, that a module takes something from."""
    tree, module = _tree_of(name), sys.modules[name]
    packages = ("warploom", name.partition(".")[0])
    for node in ast.walk(tree) if tree else ():
        if isinstance(node, ast.Import):
            found = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            base = importlib.util.resolve_name(base, module.__package__) if node.level else base
            if base.partition(".")[0] not in packages:
                continue
            found = [_home(importlib.import_module(base), alias.name) for alias in node.names]
        else:
            continue
        for other in found:
            if other.partition(".")[0] in packages and not other.startswith(_INSTRUMENT):
                importlib.import_module(other)
                yield other


def _home(module: ModuleType, name: str) -> str:
    """Returns the name of the module that another's name stands for, or in which what it names is defined."""
    below = f"{module.__name__}.{name}"
    if hasattr(module, "__path__") and importlib.util.find_spec(below):
        return below
    value = getattr(module, name, None)
    value = getattr(value, "fn", value)
    return value.__module__ if inspect.isfunction(value) or inspect.isclass(value) else module.__name__


@functools.cache
def _text(name: str) -> str:
    """Returns a module's source without docstrings, and without kernels: these have their own fingerprints."""
    tree = _tree_of(name)
    body = [node for node in tree.body if not _is_kernel(node)] if tree else []
    return "\n".join(map(_plain, body))


def _is_kernel(node: ast.stmt) -> bool:
    return isinstance(node, ast.FunctionDef) and any("jit" in ast.unparse(each) for each in node.decorator_list)


# ----------------------------------------------------------------------------------------------------------
# What a function may call: the definitions that it names
# ----------------------------------------------------------------------------------------------------------


def _of_definitions(builder: Callable[..., Any]) -> str:
    """Returns the digest of a builder of this package's and of the functions and constants that it reaches."""
    parts, texts, reached = _unwrap(builder), list[str](), list[Place]()
    for part in parts:
        if not callable(part):
            texts.append(repr(part))
        elif not _is_ours(part):
            return ""
        elif part.__name__ != "<lambda>":
            reached.append((part.__module__, part.__qualname__.partition(".")[0]))
        elif tree := _tree_of(part.__module__):
            first = part.__code__.co_firstlineno
            lambdas = [node for node in ast.walk(tree) if isinstance(node, ast.Lambda) and node.lineno == first]
            texts += map(_plain, lambdas)
            reached += (place for node in lambdas for place in _names(part.__module__, node))
    for module, name in reached:  # it grows
        node = _definitions(module).get(name)
        if node is not None:
            texts.append(_plain(node))
            reached += dict.fromkeys(place for place in _names(module, node) if place not in reached)
    return _digest(*sorted(texts))


def _unwrap(function: Any) -> list[Any]:
    """Returns a function and the arguments that it has been given, those of functions among them too."""
    if not isinstance(function, functools.partial):
        return [function]
    given = (function.func, *function.args, *function.keywords.values())
    return [part for each in given for part in _unwrap(each)]


def _names(module: str, node: ast.AST) -> Iterator[Place]:
    """Yield what a piece of a module's source names of this package."""
    known = vars(sys.modules[module])
    for each in ast.walk(node):
        if isinstance(each, ast.Name):
            value = known.get(each.id)
            if each.id in _definitions(module):
                yield module, each.id
            elif (inspect.isfunction(value) or inspect.isclass(value)) and _is_ours(value):
                yield value.__module__, value.__name__
        elif isinstance(each, ast.Attribute) and isinstance(each.value, ast.Name):
            value = known.get(each.value.id)
            if inspect.ismodule(value) and value.__name__.startswith("warploom."):
                yield value.__name__, each.attr


def _is_ours(value: Callable[..., Any]) -> bool:
    return str(value.__module__).startswith("warploom.")


@functools.cache
def _definitions(module: str) -> dict[str, ast.stmt]:
    """Returns what a module defines at its top, by name."""
    found: dict[str, ast.stmt] = {}
    tree = _tree_of(module)
    for node in tree.body if tree else ():
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found[node.name] = node
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = [each.id for target in targets for each in ast.walk(target) if isinstance(each, ast.Name)]
            found |= dict.fromkeys(names, node)
    return found


@functools.cache
def _tree_of(module: str) -> ast.Module | None:
    """Returns the source of an imported module; None if it is in no file."""
    try:
        return ast.parse(inspect.getsource(sys.modules[module]))
    except (KeyError, OSError, SyntaxError, TypeError):
        return None


def _plain(node: ast.AST) -> str:
    """Returns source without comments, docstrings and layout: the same text for every version of Python."""
    parts = []
    for name, value in ast.iter_fields(node):
        items = value if isinstance(value, list) else [value]
        if name == "body" and isinstance(value, list):
            items = [item for item in value if not _is_text(item)]
        if isinstance(node, ast.JoinedStr):  # Python 3.12 has empty parts behind nested ones
            items = [item for item in items if not (isinstance(item, ast.Constant) and item.value == "")]
        items = items if isinstance(value, list) else [item for item in items if item is not None]
        shown = [_plain(item) if isinstance(item, ast.AST) else repr(item) for item in items]
        if shown and name not in _UNSAID:
            parts.append(f"{name}={' '.join(shown)}")
    return f"{type(node).__name__}({', '.join(parts)})"


_UNSAID = ("ctx", "kind", "type_comment")
"""Fields of nodes that change no meaning."""


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _digest(*parts: str) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]
