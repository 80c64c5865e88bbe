"""Calls on tensors that are sharded over a mesh: DTensors.

An operator says which axes of its tensors are the same (batch entries, heads, tokens), by a letter for each. A call
is then brought to shards that fit each other. The first tensor that is sharded along such an axis decides: all that
have the axis are sharded likewise, and the others are replicated, with gradients that are sums over the shards. The
operator runs on the shards, on any backend. Where an axis cannot be sharded evenly, tensors are replicated first.
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
    """The axes of a call's tensors and results: a letter for each, ``.`` for one that is not sharded.

    Axes of one letter are sharded together. One of length 1 where others are longer is that of a tensor for all.
    """

    tensors: Sequence[str]
    """Empty for one that has no axis to be sharded."""
    results: Sequence[str]
    moved: Callable[[Sequence[Any], Any, Any], tuple[Sequence[Any], Any]] | None = None
    """Of operators that know where tokens stand, whose axis is ``n``: makes a shard's tensors and number of its
    tensors, the number, and how far behind the first token it begins."""


def is_sharded(tensors: Sequence[Any]) -> bool:
    """Whether one of these is a DTensor."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and any(isinstance(x, module.DTensor) for x in tensors)


def run_on_shards(
    name: str, axes: Axes, tensors: Sequence[Any], number: Any, call: Callable[[Sequence[Any], Any], Any]
) -> Any:
    """Run a call on shards.

    Args:
        name: Of the public function, for errors.
        axes: Of the tensors and results.
        tensors: Tensors, DTensors of one mesh, or None. What is no DTensor is the same on every rank.
        number: That of the operator.
        call: Runs the operator, from tensors and number.

    Returns:
        What ``call`` returns, as DTensors.

    Raises:
        ArgumentError: DTensors are of different meshes.
    """
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

    meshes = [x.device_mesh for x in tensors if isinstance(x, DTensor)]
    mesh = meshes[0]
    for other in meshes:
        if other != mesh:
            raise fault(ArgumentError, name, "tensors", f"all on one mesh, {mesh}", other)
    sizes = _sizes(axes, tensors)
    letters = _letters(axes, tensors, sizes, mesh)
    local: Any = []
    for letter_of, x in zip(axes.tensors, tensors):
        if x is None:
            local.append(None)
            continue
        held = [letter in letter_of and x.shape[letter_of.index(letter)] != 1 for letter in letters]
        places = [Shard(letter_of.index(letter)) if has else Replicate() for has, letter in zip(held, letters)]
        # The gradient of what all shards share comes in parts.
        parts = [p if has or letter == NONE else Partial() for p, has, letter in zip(places, held, letters)]
        whole = (
            x if isinstance(x, DTensor) else DTensor.from_local(x, mesh, [Replicate()] * mesh.ndim, run_check=False)
        )
        local.append(whole.redistribute(mesh, places).to_local(grad_placements=parts))
    if "n" in letters and axes.moved is not None:
        local, number = axes.moved(local, number, _first_token(sizes["n"], letters, mesh))
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


def _sizes(axes: Axes, tensors: Sequence[Any]) -> dict[str, Any]:
    """The length of each axis: the longest, for a tensor for all has 1."""
    sizes: dict[str, Any] = {}
    for letter_of, x in zip(axes.tensors, tensors):
        for letter, size in zip(letter_of, () if x is None else x.shape):
            if letter != ".":
                sizes.setdefault(letter, size)
                if sizes[letter] == 1:
                    sizes[letter] = size
    return sizes


def _letters(axes: Axes, tensors: Sequence[Any], sizes: dict[str, Any], mesh: Any) -> list[str]:
    """For each dimension of a mesh the axis that is sharded over it, or `NONE`."""
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


def _first_token(tokens: Any, letters: Sequence[str], mesh: Any) -> Any:
    """Where this rank's tokens begin."""
    first = 0
    for dim, letter in enumerate(letters):
        if letter == "n":
            tokens = tokens // mesh.size(dim)
            first = first + mesh.get_local_rank(dim) * tokens
    return first
