"""Strides of tensors, as kernels address them, and the order of heads and tokens that they show."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

from warploom.errors import LayoutWarning, warn

Tensor = torch.Tensor

TILE_STRIDE_LIMIT = 2**22
"""The strides of rows and features below which offsets within a tile, of at most 256 rows, fit in 32 bits."""

MOST_HEADS = 128
"""More heads than tokens are usual up to here: a short prompt, or one token."""
_LAYERS = ("nn", "integrations")  # which transpose themselves


class Layout(NamedTuple):
    """The layout of a group of tensors, by which kernels address them."""

    vec: int  # common divisor of the strides, for vector access
    unit: bool  # True if features are adjacent in all tensors
    wide: bool  # True if offsets within a tile need 64 bits
    strides: list[Any]  # strides of each tensor, divided by vec except those of features

    def at_any_address(self, *names: str) -> tuple[str, ...]:
        """Returns the names of tensors whose entries of a batch may begin anywhere: all of them, or none.

        A kernel is compiled without a word on their addresses, also where the first entry is aligned; see
        `layout_of_entries`.
        """
        return names if self.vec == 1 else ()

    def of(self, *names: str) -> dict[str, Any]:
        """Returns the strides by name, ``q_strides`` and so on, of tensors with these names."""
        return dict(zip((f"{name}_strides" for name in names), self.strides, strict=True))


def tile_width(features: int) -> int:
    """Returns the features of a tile: a power of two that matrix instructions support."""
    return max(1 << (features - 1).bit_length(), 16)


def strides_of(x: Tensor) -> tuple[int, int, int, int]:
    """Returns the strides of a tensor, with 0 for an axis of size one."""
    b, n, h, f = (stride if size > 1 else 0 for size, stride in zip(x.shape, x.stride()))
    return b, n, h, f


def layout_for(kind: type[Any], *tensors: Tensor) -> Layout:
    """Returns the layout of tensors (B, N, H, F), with strides as tuples of a ``kind``."""
    strides = [strides_of(t) for t in tensors]
    unit = all(t.shape[3] == 1 or s[3] == 1 for t, s in zip(tensors, strides))
    divisors = (16, 8, 4) if unit else ()
    vec = next((d for d in divisors if all(x % d == 0 for s in strides for x in s[:3])), 1)
    wide = any(max(abs(s[1]), abs(s[3])) >= TILE_STRIDE_LIMIT for s in strides)
    return Layout(vec, unit, wide, [kind(*(x // vec for x in s[:3]), s[3]) for s in strides])


def warn_of_heads_first(
    function: str, q: Tensor, k: Tensor, *others: Tensor, aligned: bool = False, most_heads: int = MOST_HEADS,
    few_heads: int = MOST_HEADS,
) -> None:  # fmt: skip
    """Warn if tensors (B, N, H, D) look as if they were (B, H, N, D). Only sizes and strides are compared.

    More heads than tokens, of queries and of keys, are a sign in three cases: there are more than ``most_heads``,
    or more than ``few_heads`` and than four times as many as tokens, which are several; heads lie before tokens in
    the memory of all tensors, as in ``x.view(B, N, H, D).transpose(1, 2)``; or queries are aligned with keys and
    yet more than those, as grouped heads are.

    Args:
        function: The public function, for the warning.
        q: Queries, ``(B, N, Hq, D)``.
        k: Keys, ``(B, M, Hkv, D)``; for a function of one tensor the same one.
        others: Tensors whose layout in memory is compared too.
        aligned: Each query is at the place of a key, as in a causal call without lengths.
        most_heads: The greatest number of heads that a short call has.
        few_heads: The greatest number that a very short one has.
    """
    if torch.compiler.is_compiling():  # a compiler would make a guard of the question
        return
    (_, tokens, heads, _), (_, keys, key_heads, _) = q.shape, k.shape
    if tokens >= heads or keys >= key_heads:
        return
    heads_first = tokens >= keys > 1 and all(x.stride(1) < x.stride(2) for x in (q, k, *others))
    least = min(heads, key_heads)
    many = least > most_heads or (tokens > 1 and least > max(few_heads, 4 * tokens))
    if many or heads_first or (aligned and tokens > keys):
        of_keys = "" if k is q else f" on {keys} keys of {key_heads} heads"
        warn(
            LayoutWarning,
            f"{function}: {tokens} tokens of {heads} heads{of_keys} look like tensors (B, H, N, D); "
            "the layout here is (B, N, H, D): give x.transpose(1, 2), which copies nothing",
            unless_from=_LAYERS,
        )


def layout_of_entries(kind: type[Any], *tensors: Tensor) -> Layout:
    """Returns the layout of tensors (B, N, H, F), of which the same is known for each entry of a batch.

    The compiler picks layouts by what it knows of addresses, and with them the order in which features are added
    up. So it knows nothing where entries lie at other distances than multiples of 16 bytes, also where there is one
    entry.
    """
    layout = layout_for(kind, *tensors)
    vec = math.gcd(layout.vec, *(x.stride(0) for x in tensors))
    if any(x.stride(0) * x.element_size() % 16 for x in tensors):
        vec = 1
    more = layout.vec // vec
    strides = [kind(*(n * more for n in each[:3]), each[3]) for each in layout.strides]
    return layout._replace(vec=vec, strides=strides)
