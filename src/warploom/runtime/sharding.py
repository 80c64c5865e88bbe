"""Calls on tensors that are sharded over a mesh: DTensors.

An operator names the axes of its tensors (batch entries, heads, tokens) by letters. The tensors of a call are then
redistributed to shards that match. The first tensor that is sharded along a named axis decides: all tensors with
that axis are sharded likewise, and the others are replicated, with gradients that are summed over the shards. The
operator runs on the shards, on any backend. If an axis cannot be sharded evenly, tensors are replicated.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from warploom.errors import ArgumentError, fault

Tensor = torch.Tensor

NONE = "no axis"


class Axes(NamedTuple):
    """The axes of a call's tensors and results, a letter for each, and ``.`` for an axis that is not sharded.

    Axes with the same letter are sharded together. An axis of length 1 where others are longer is broadcast.
    """

    tensors: Sequence[str]
    """The letters of each tensor; empty for a tensor with no axis to shard."""
    results: Sequence[str]
    """The letters of each result."""
    shift: Callable[[Sequence[Any], Any, Any], tuple[Sequence[Any], Any]] | None = None
    """Returns a shard's tensors and number for its place in the sequence, given the tensors, the number, and the
    index of the shard's first token. For operators with positions, whose axis of tokens is ``n``."""


def is_sharded(tensors: Sequence[Any]) -> bool:
    """Returns True if one of these is a DTensor."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and any(isinstance(x, module.DTensor) for x in tensors)


def run_on_shards(
    name: str, axes: Axes, tensors: Sequence[Any], number: Any, call: Callable[[Sequence[Any], Any], Any]
) -> Any:
    """Run a call on shards.

    Args:
        name: The public function's name, for errors.
        axes: The axes of the tensors and results.
        tensors: Tensors, DTensors of one mesh, or None. A plain tensor is the same on every rank.
        number: The operator's number.
        call: Runs the operator, from tensors and number.

    Returns:
        The results of ``call``, as DTensors.

    Raises:
        ArgumentError: DTensors are of different meshes.
    """
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

    meshes = [x.device_mesh for x in tensors if isinstance(x, DTensor)]
    mesh = meshes[0]
    for other in meshes:
        if other != mesh:
            raise fault(ArgumentError, name, "tensors", f"all on one mesh, {mesh}", other)
    sizes = _find_sizes(axes, tensors)
    letters = _choose_letters(axes, tensors, sizes, mesh)
    local: Any = []
    for letter_of, x in zip(axes.tensors, tensors):
        if x is None:
            local.append(None)
            continue
        held = [letter in letter_of and x.shape[letter_of.index(letter)] != 1 for letter in letters]
        places = [Shard(letter_of.index(letter)) if has else Replicate() for has, letter in zip(held, letters)]
        # The gradient of a tensor that all shards share is a sum over them.
        parts = [p if has or letter == NONE else Partial() for p, has, letter in zip(places, held, letters)]
        whole = (
            x if isinstance(x, DTensor) else DTensor.from_local(x, mesh, [Replicate()] * mesh.ndim, run_check=False)
        )
        local.append(whole.redistribute(mesh, places).to_local(grad_placements=parts))
    if "n" in letters and axes.shift is not None:
        local, number = axes.shift(local, number, _find_first_token(sizes["n"], letters, mesh))
    found = call(local, number)
    results = found if isinstance(found, tuple) else (found,)
    wrapped = tuple(
        DTensor.from_local(
            x, mesh, [Shard(of.index(letter)) if letter in of else Replicate() for letter in letters],
            run_check=False,
        )
        for of, x in zip(axes.results, results)
    )  # fmt: skip
    return wrapped if isinstance(found, tuple) else wrapped[0]


def _find_sizes(axes: Axes, tensors: Sequence[Any]) -> dict[str, Any]:
    """Returns the length of each axis: the longest one, as a tensor that is broadcast has 1."""
    sizes: dict[str, Any] = {}
    for letter_of, x in zip(axes.tensors, tensors):
        for letter, size in zip(letter_of, () if x is None else x.shape):
            if letter != ".":
                sizes.setdefault(letter, size)
                if sizes[letter] == 1:
                    sizes[letter] = size
    return sizes


def _choose_letters(axes: Axes, tensors: Sequence[Any], sizes: dict[str, Any], mesh: Any) -> list[str]:
    """Returns the axis that is sharded over each dimension of a mesh, or `NONE`."""
    from torch.distributed.tensor import DTensor, Shard

    found: list[str] = []
    for dim in range(mesh.ndim):
        chosen = ""
        for letter_of, x in zip(axes.tensors, tensors):
            place = x.placements[dim] if isinstance(x, DTensor) else None
            if isinstance(place, Shard) and place.dim < len(letter_of):
                chosen = letter_of[place.dim]
                break
        ranks = mesh.size(dim)
        for other, letter in enumerate(found):
            ranks = ranks * mesh.size(other) if letter == chosen else ranks
        fits = chosen not in ("", ".") and all(
            size % ranks == 0 or size == 1
            for letter_of, x in zip(axes.tensors, tensors)
            if x is not None
            for letter, size in zip(letter_of, x.shape)
            if letter == chosen
        )
        found.append(chosen if fits and sizes[chosen] > 1 else NONE)
    return found


def _find_first_token(tokens: Any, letters: Sequence[str], mesh: Any) -> Any:
    """Returns the index of this rank's first token."""
    first = 0
    for dim, letter in enumerate(letters):
        if letter == "n":
            tokens = tokens // mesh.size(dim)
            first = first + mesh.get_local_rank(dim) * tokens
    return first
