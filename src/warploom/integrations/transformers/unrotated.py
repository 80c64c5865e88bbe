"""Queries and keys whose rotation waits: on the way to a paged cache, `append_kv` does it where it writes keys."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

Tensor = torch.Tensor

ENDING = "|paged flash"
"""Ending of the name under which a model attends while it is served.

Transformers makes no mask and reserves no memory for one, and captures CUDA graphs, where ``flash`` is in the name.
"""


class Unrotated(torch.Tensor):
    """Queries or keys (1, H, N, D) of new tokens, which every operation but `append_kv` takes rotated.

    A tensor without memory of its own: what reads it past PyTorch's operations finds nothing, and nothing wrong.

    Args:
        raw: The features as they are.
        theta: (D/2,), radians per position.
        interleaved: Rotate neighbouring features, instead of those of both halves.
        rotate: Returns the rotated features.
        query: The queries of keys, which are rotated with them.
    """

    @staticmethod
    def __new__(cls, raw: Tensor, *_: Any, **__: Any) -> Unrotated:
        """Returns a tensor of the same form."""
        like: Any = {"strides": raw.stride(), "dtype": raw.dtype, "device": raw.device}
        return torch.Tensor._make_wrapper_subclass(cls, raw.shape, **like)

    def __init__(
        self,
        raw: Tensor,
        theta: Tensor,
        interleaved: bool,
        rotate: Callable[[Tensor], Tensor],
        query: Unrotated | None = None,
    ) -> None:
        self.raw, self.theta, self.interleaved, self.rotate, self.query = raw, theta, interleaved, rotate, query
        self.rotated: Tensor | None = None

    def resolve(self) -> Tensor:
        """Returns the rotated features."""
        if self.rotated is None:
            self.rotated = self.rotate(self.raw)
        return self.rotated

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        args, kwargs = tree_map_only(cls, cls.resolve, (args, kwargs or {}))
        return func(*args, **kwargs)
