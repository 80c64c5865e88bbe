"""Rotary positions of transformers' models, by `warploom.lrpe_rotate`."""

from __future__ import annotations

import copy
import functools
import importlib
import inspect
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any, NamedTuple

import torch

from warploom import lrpe_rotate
from warploom.errors import ArgumentError, WarploomError, fault
from warploom.integrations.transformers.unrotated import ENDING, Unrotated

Tensor = torch.Tensor

_FIXED = ("default", "linear", "llama3", "yarn", "proportional")
"""Kinds of rotary embedding whose frequencies depend on no length."""


class RotaryAngles(NamedTuple):
    """The angles of tokens, which a patched rotary embedding returns instead of cosines and sines."""

    theta: Tensor  # (F,), radians per position
    position_ids: Tensor  # (B or 1, N), or with axes (A, B or 1, N)
    scaling: float  # the factor of rotated features
    axes: Tensor | None  # (A, F): 1 for the axis of positions of a frequency, else 0
    pairs: tuple[tuple[str, str], ...]  # the layout of pairs of features for each function
    served: bool = False  # on the way to a paged cache


class PatchedRotary(torch.nn.Module):
    """A rotary embedding of transformers that returns a `RotaryAngles`, with frequencies that stay in float32."""

    def __init__(self, embedding: Any, axes: dict[str, Tensor | None], pairs: tuple[tuple[str, str], ...]) -> None:
        super().__init__()
        self.embedding = embedding
        self.pairs = pairs
        for prefix, axes_of in axes.items():
            self.register_buffer(f"{prefix}axes", axes_of, persistent=False)

    def forward(
        self, x: Tensor, position_ids: Tensor, layer_type: str | None = None
    ) -> tuple[RotaryAngles, RotaryAngles]:
        """Returns the angles of positions (B or 1, N), or (A, B or 1, N) with several axes, twice."""
        prefix = "" if hasattr(self.embedding, "inv_freq") else f"{layer_type}_"
        theta = getattr(self.embedding, f"{prefix}inv_freq").to(x.device)
        axes = getattr(self, f"{prefix}axes")
        position_ids = position_ids.to(x.device)
        if position_ids.dim() == 3 and position_ids.stride(0) == 0:
            position_ids = position_ids[0]  # text has the same position on each axis
        axes = None if axes is None or position_ids.dim() == 2 else axes.to(x.device)
        scaling = getattr(self.embedding, f"{prefix}attention_scaling")
        served = str(getattr(self.embedding.config, "_attn_implementation", None)).endswith(ENDING)
        angles = RotaryAngles(theta, position_ids, scaling, axes, self.pairs, served)
        return angles, angles

    def __getattr__(self, name: str) -> Any:
        """Returns an attribute of the embedding, such as ``inv_freq``."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "embedding":
                raise
            return getattr(self.embedding, name)

    def __setstate__(self, state: Any) -> None:
        super().__setstate__(state)
        for function, _ in self.pairs:
            _wrap(function)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> PatchedRotary:
        before = dict(self.named_buffers())
        super()._apply(fn, recurse)
        for name, buffer in before.items():
            path, _, leaf = name.rpartition(".")
            buffers = self.get_submodule(path)._buffers
            moved: Any = buffers[leaf]
            if moved.dtype != buffer.dtype:
                buffers[leaf] = buffer.to(moved.device)
        return self


def patch_rotary(model: torch.nn.Module) -> int:
    """Rotate queries and keys of a model of transformers by `warploom.lrpe_rotate`.

    One kernel for queries and one for keys replace cosines, sines, and six elementwise operations for each. Angles
    are exact at any position, in a model cast to bfloat16 too. Positions with several axes (M-RoPE) need a kernel
    for each axis, if they differ. Works with gradient checkpointing and ``torch.compile``. A patched model can be
    copied and pickled.

    Every rotary embedding is first tested on random numbers, with the function that rotates features. If the result
    differs, the embedding is not patched.

    Args:
        model: A model, or the part with its rotary embedding and its layers. Changed in place.

    Returns:
        The number of rotary embeddings that are patched.

    Raises:
        ArgumentError: No rotary embedding can be patched: the model has none, its frequencies change with the
            length, or features are rotated in another way. Nothing has been changed then.

    Source: Su et al., "RoFormer", 2021, arXiv 2104.09864; Wang et al., "Qwen2-VL", 2024, arXiv 2409.12191 (M-RoPE).

    Example:
        ```python
        from transformers import LlamaConfig, LlamaForCausalLM

        from warploom.integrations.transformers import patch_rotary

        model = LlamaForCausalLM(LlamaConfig(hidden_size=64, num_attention_heads=4, num_hidden_layers=2))
        patch_rotary(model)  # 1: one rotary embedding, which all layers share
        ```
    """
    patched = {id(m.embedding) for m in model.modules() if isinstance(m, PatchedRotary)}
    plans: list[tuple[PatchedRotary, Any]] = []
    refused: list[WarploomError] = []
    for embedding in model.modules():
        if id(embedding) in patched or not _find_prefixes(embedding):
            continue
        try:
            plans.append(_plan_patch(model, embedding))
        except WarploomError as error:
            refused.append(error)
    if not plans and not patched:
        absent = fault(ArgumentError, "patch_rotary", "model", "one with a rotary embedding", type(model).__name__)
        raise refused[0] if refused else absent
    for plan, exact in plans:
        for function, _ in plan.pairs:
            _wrap(function)
        for name, buffer in exact.named_buffers():
            old = plan.embedding._buffers[name]
            if old.dtype != buffer.dtype:
                plan.embedding._buffers[name] = buffer.to(old.device)
        _swap(model, plan.embedding, plan)
    return len(plans) + len(patched)


def has_rotary(model: torch.nn.Module) -> bool:
    """Returns True if a model has a rotary embedding."""
    return any(_find_prefixes(module) for module in model.modules())


def unpatch_rotary(model: torch.nn.Module) -> int:
    """Undo `patch_rotary`: restore a model's own rotary embeddings.

    Args:
        model: A model, or the part that was patched. Changed in place.

    Returns:
        The number of rotary embeddings that are restored.

    Example:
        ```python
        from transformers import LlamaConfig, LlamaForCausalLM

        from warploom.integrations.transformers import patch_rotary, unpatch_rotary

        model = LlamaForCausalLM(LlamaConfig(hidden_size=64, num_attention_heads=4, num_hidden_layers=2))
        patch_rotary(model)
        unpatch_rotary(model)  # 1
        ```
    """
    patched = [m for m in model.modules() if isinstance(m, PatchedRotary)]
    for module in patched:
        _swap(model, module, module.embedding)
    return len(patched)


def _swap(model: torch.nn.Module, old: torch.nn.Module, new: torch.nn.Module) -> None:
    """Replace a module by another wherever a model has it."""
    for parent in list(model.modules()):
        for name, child in parent._modules.items():
            if child is old and parent is not new:
                parent._modules[name] = new


# ----------------------------------------------------------------------------------------------------------
# Tests before anything changes
# ----------------------------------------------------------------------------------------------------------


def _find_prefixes(module: torch.nn.Module) -> list[str]:
    """Returns the prefixes of ``inv_freq`` in the names of a rotary embedding's frequencies."""
    names = [name for name, _ in module.named_buffers(recurse=False) if name.endswith("inv_freq")]
    prefixes = [name.removesuffix("inv_freq") for name in names]
    return [p for p in prefixes if hasattr(module, f"{p}attention_scaling")]


def _plan_patch(model: torch.nn.Module, embedding: Any) -> tuple[PatchedRotary, Any]:
    """Returns the replacement of a rotary embedding, if results are the same, and a float32 copy of it."""
    functions = sorted(set(_functions_for(model, embedding)))
    if not functions:
        expected = "one whose layers rotate features by a function of cosines and sines"
        raise fault(ArgumentError, "patch_rotary", "model", expected, type(model).__name__)
    trial = _in_float32(embedding)
    axes: dict[str, Tensor | None] = {}
    pairs: dict[str, str] = {}
    for prefix in _find_prefixes(embedding):
        kind = getattr(embedding, "rope_type", None)
        kind = kind.get(prefix.removesuffix("_")) if isinstance(kind, dict) else kind
        if kind not in _FIXED:
            expected = f"of a rotary embedding that is one of {', '.join(_FIXED)}"
            raise fault(ArgumentError, "patch_rotary", "model", expected, repr(kind))
        for function in functions:
            found = _try(trial, prefix, _resolve(function))
            if found is None or pairs.setdefault(function, found[0]) != found[0]:
                expected = "one that rotates pairs (f, f + D/2) or (2f, 2f + 1) of features"
                raise fault(ArgumentError, "patch_rotary", "model", expected, function)
            axes[prefix] = found[1]
    return PatchedRotary(embedding, axes, tuple(pairs.items())), trial


def _functions_for(model: torch.nn.Module, embedding: Any) -> Iterator[str]:
    """Yield the functions of cosines and sines that modules beside a rotary embedding call, by file and name."""
    for parent in model.modules():
        if all(child is not embedding for child in parent.children()):
            continue
        for kind in {kind for module in parent.modules() for kind in type(module).__mro__}:
            if kind.__module__.startswith("torch."):
                continue
            for method in vars(kind).values():
                method = inspect.unwrap(method) if callable(method) else None
                if not isinstance(method, FunctionType):
                    continue
                for name in method.__code__.co_names:
                    function = method.__globals__.get(name)
                    if callable(function) and not inspect.isclass(function) and _takes_cosines(function):
                        yield f"{method.__globals__['__name__']}:{name}"


def _takes_cosines(function: Any) -> bool:
    try:
        return {"cos", "sin"} <= set(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return False


def _resolve(function: str) -> Callable[..., Any]:
    """Returns the original function of a model's file, without our wrapper."""
    file, name = function.split(":")
    found: Any = getattr(importlib.import_module(file), name)
    return getattr(found, "of_cosines", found)  # type: ignore[no-any-return]


def _in_float32(embedding: Any) -> Any:
    """Returns a copy on the CPU, with frequencies that no cast has rounded."""
    state = [*embedding.named_parameters(), *embedding.named_buffers()]
    if not all(name.endswith("inv_freq") for name, _ in state):
        expected = "of a rotary embedding that has frequencies alone"
        raise fault(ArgumentError, "patch_rotary", "model", expected, ", ".join(name for name, _ in state))
    if all(x.dtype == torch.float32 and not x.is_meta for _, x in state):
        return copy.deepcopy(embedding).cpu()
    try:
        with torch.device("cpu"):
            fresh = type(embedding)(embedding.config).float()
    except (AttributeError, TypeError) as error:
        raise fault(ArgumentError, "patch_rotary", "model", "patched before it is cast", str(error)) from error
    for name, x in fresh.named_buffers():
        old = embedding.get_buffer(name)
        if not old.is_meta and not torch.equal(x.to(old.dtype), old.cpu()):
            expected = "patched before it is cast, since frequencies are no longer in float32"
            raise fault(ArgumentError, "patch_rotary", "model", expected, str(old.dtype))
    return fresh


def _try(embedding: Any, prefix: str, apply: Callable[..., Any]) -> tuple[str, Tensor | None] | None:
    """Returns pairs and axes (A, F) with which `rotate` has the results of a model, or None."""
    theta = getattr(embedding, f"{prefix}inv_freq")
    layer_type = {"layer_type": prefix.removesuffix("_")} if prefix else {}
    features = 2 * len(theta)
    names, heads_axis = _read_parameters(apply)

    def by_model(x: Tensor, position_ids: Tensor) -> list[Tensor]:
        cos, sin = type(embedding).forward(embedding, x, position_ids, **layer_type)
        if cos.shape[:-1] != position_ids.shape[-2:]:
            raise ValueError("positions of other axes")
        out = apply(**dict.fromkeys(names[: names.index("cos")], x), cos=cos, sin=sin)
        return list(out) if isinstance(out, tuple) else [out]

    draw = torch.Generator().manual_seed(0)
    x = torch.rand(1, 2, 5, features + 4, generator=draw).add(0.5).movedim(1, heads_axis)
    count, outs = _find_axes(by_model, x[..., :features])
    if count is None:
        return None
    position_ids = torch.randint(0, 40, (max(count, 1), 1, 5), generator=draw)
    for pairs in ("halves", "neighbours", "neighbours to halves"):
        axes = None
        if count:
            moved = [(out != outs[0])[0, 0, 0] for out in outs[1:]]
            axes = torch.stack([m[0::2] if pairs == "neighbours" else m[: features // 2] for m in moved]).float()
        angles = RotaryAngles(
            theta, position_ids if count else position_ids[0], getattr(embedding, f"{prefix}attention_scaling"),
            axes, (),
        )  # fmt: skip
        close = []
        for width in (features, features + 4):
            try:
                expected = by_model(x[..., :width], angles.position_ids)
            except Exception:  # this model does not support such a width
                close.append(width > features)
                continue
            found = rotate(x[..., :width], angles, pairs, heads_axis)
            same = [e.shape == found.shape and torch.allclose(e, found, rtol=1e-4, atol=1e-4) for e in expected]
            close.append(all(same))
        if all(close):
            return pairs, axes
    return None


def _find_axes(by_model: Callable[..., list[Tensor]], x: Tensor) -> tuple[int | None, list[Tensor]]:
    """Returns the number of axes of positions, 0 for one, and ``x`` rotated at 0 and far along each axis."""
    for count in (2, 3, 4):
        zero = torch.zeros(count, 1, 5, dtype=torch.long)
        far = 997 * torch.eye(count, dtype=torch.long)[:, :, None, None]
        try:
            return count, [by_model(x, zero + f)[0] for f in (0, *far)]
        except Exception:  # another number of axes
            continue
    try:
        return 0, by_model(x, torch.arange(5)[None])
    except Exception:  # positions, features or arguments of another form
        return None, []


# ----------------------------------------------------------------------------------------------------------
# Functions of a model's file
# ----------------------------------------------------------------------------------------------------------


def _read_parameters(function: Callable[..., Any]) -> tuple[list[str], int]:
    """Returns the names of a function's parameters, and the axis of heads that it expects."""
    parameters = inspect.signature(function).parameters
    axis = parameters["unsqueeze_dim"].default if "unsqueeze_dim" in parameters else 1
    return list(parameters), axis


def _wrap(function: str) -> None:
    """Wrap a function of cosines and sines so that it accepts a `RotaryAngles` too."""
    file, name = function.split(":")
    module = importlib.import_module(file)
    if hasattr(getattr(module, name), "of_cosines"):
        return
    of_cosines = getattr(module, name)
    names, heads_axis = _read_parameters(of_cosines)
    rotated = names[: names.index("cos")]

    @functools.wraps(of_cosines)
    def apply(*args: Any, **options: Any) -> Any:
        given = {**dict(zip(names, args)), **options}
        angles = given.get("cos")
        if not isinstance(angles, RotaryAngles):
            return of_cosines(*args, **options)
        pairs = dict(angles.pairs)[function]
        axis = given.get("unsqueeze_dim", heads_axis)
        if axis == 1 and _waits(angles, pairs, [given.get(x) for x in rotated]):
            rotate_later = functools.partial(rotate, angles=angles, pairs=pairs, heads_axis=axis)
            query, key = (given[x] for x in rotated)
            query = Unrotated(query, angles.theta, pairs != "halves", rotate_later)
            return query, Unrotated(key, angles.theta, pairs != "halves", rotate_later, query)
        out = [rotate(given[x], angles, pairs, axis) for x in rotated if given.get(x) is not None]
        return tuple(out) if len(out) > 1 else out[0]

    apply.of_cosines = of_cosines  # type: ignore[attr-defined]
    setattr(module, name, apply)


def _waits(angles: RotaryAngles, pairs: str, tensors: list[Tensor | None]) -> bool:
    """Returns True for queries and keys (1, H, N, D) on the way to a paged cache that `append_kv` can rotate."""
    if not angles.served or angles.axes is not None or angles.scaling != 1 or pairs == "neighbours to halves":
        return False
    if torch.compiler.is_compiling() or torch.is_grad_enabled():
        return False
    whole = [x is not None and x.shape[-1] == 2 * angles.theta.shape[0] for x in tensors]
    return len(whole) == 2 and all(whole)


def rotate(x: Tensor, angles: RotaryAngles, pairs: str, heads_axis: int) -> Tensor:
    """Returns tokens (B, H, N, D), or (B, N, H, D) with heads on axis 2, with the first 2·F features rotated."""
    x = x.transpose(1, 2) if heads_axis == 1 else x
    features = 2 * angles.theta.shape[0]
    out = x[..., :features]
    positions, thetas = [angles.position_ids], [angles.theta]
    if angles.axes is not None:
        positions, thetas = list(angles.position_ids), [angles.theta * axis for axis in angles.axes]
    for position_ids, theta in zip(positions, thetas):
        position_ids = position_ids.expand(x.shape[0], -1)
        out = lrpe_rotate(out, theta, position_ids=position_ids, interleaved=pairs != "halves")
    if pairs == "neighbours to halves":
        out = out.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
    out = out if angles.scaling == 1 else out * angles.scaling
    if x.shape[-1] > features:
        out = torch.cat((out, x[..., features:]), -1)
    return out.transpose(1, 2) if heads_axis == 1 else out
