"""Masks, biases and slopes of the bench: which keys queries see, and what the calls cost at least."""

from __future__ import annotations

import functools
import itertools
import math

import torch

from warploom.ops.flash_attention.block_mask import TILE, BlockMask, MaskMod, block_mask
from warploom.ops.spec import Case, Inputs, Traffic, is_recording, normal

Tensor = torch.Tensor

DOCUMENTS = (0.37, 0.06, 0.25, 0.01, 0.21, 0.10)
"""Lengths of packed documents, as parts of the whole."""
CHILDREN = 3
"""Tokens that a smaller model proposes behind each token of a tree."""


def make_pattern(name: str, n: int, m: int, device: torch.device | str) -> MaskMod:
    """Returns a mask by its name, as a function that FlexAttention takes too.

    ``causal``; ``documents``, causal ones side by side; ``prefix``, of which the first quarter is seen by all;
    ``sliding + global``, a causal window of an eighth and a few first tokens that are seen by all later ones;
    ``tree``, of ``n`` proposed tokens behind a cache; ``random P %``, tiles of which so many see everything, and
    the others nothing.
    """
    if name == "causal":
        return lambda b, h, i, j: j <= i
    if name == "documents":
        bounds = torch.tensor([round(n * part) for part in itertools.accumulate(DOCUMENTS)][:-1], device=device)
        document = torch.bucketize(torch.arange(n, device=device), bounds, right=True)
        return lambda b, h, i, j: (document[i] == document[j]) & (j <= i)
    if name == "prefix":
        prefix = n // 4
        return lambda b, h, i, j: (j <= i) | (j < prefix)
    if name == "sliding + global":
        left, first = n // 8, n // 128
        return lambda b, h, i, j: (j <= i) & ((i - j <= left) | (j < first))
    if name == "tree":
        behind = m - n  # keys of the cache, which all see
        seen = torch.eye(n, dtype=torch.bool)
        for token in range(1, n):
            seen[token] |= seen[(token - 1) // CHILDREN]
        seen = seen.to(device)
        return lambda b, h, i, j: (j < behind) | seen[i, (j - behind).clamp(min=0)]
    share = int(name.removeprefix("random ").removesuffix(" %"))
    generator = torch.Generator().manual_seed(share)
    tiles = torch.rand(-(-n // TILE), -(-m // TILE), generator=generator) < share / 100
    tiles |= torch.eye(*tiles.shape, dtype=torch.bool)
    tiles = tiles.to(device)
    return lambda b, h, i, j: tiles[i // TILE, j // TILE]


@functools.cache
def count_pairs(name: str, n: int, m: int) -> int:
    """Returns the pairs of a query and a key in tiles that see something, of one head."""
    visible, pairs = make_pattern(name, n, m, "cpu"), 0
    zero, keys = torch.zeros((), dtype=torch.long), torch.arange(m)
    widths = torch.tensor([min(TILE, m - first) for first in range(0, m, TILE)])
    for rows in torch.arange(n).split(TILE):
        seen = visible(zero, zero, rows[:, None], keys).any(0)
        tiles = torch.nn.functional.pad(seen, (0, -m % TILE)).view(-1, TILE).any(1)
        pairs += len(rows) * int(widths[tiles].sum())
    return pairs


def add_masks(inputs: Inputs, case: Case, generator: torch.Generator) -> Inputs:
    """Returns the inputs of a case with its mask by ``pattern``, its ``bias`` and its ``alibi``.

    A bias is of all ``heads`` (1, H, N, M), or of ``keys`` (B, 1, 1, M), as of padding.
    """
    q, k = inputs["q"], inputs["k"]
    (batch, n, heads, _), m = q.shape, k.shape[1]
    if case.get("pattern") == "tree":
        inputs |= {name: inputs[name].detach() for name in ("q", "k", "v")}
    if "pattern" in case:
        inputs["mask"] = _untouched(n, m) if is_recording() else _make_mask(case["pattern"], n, m, q.device)
    if "bias" in case:
        shape = (1, heads, n, m) if case["bias"] == "heads" else (batch, 1, 1, m)
        inputs["bias"] = normal(shape, q.dtype, q.device, generator).requires_grad_()
    if "alibi" in case:
        inputs["alibi"] = torch.tensor([2.0 ** (-8 * (head + 1) / heads) for head in range(heads)], device=q.device)
    return inputs


def _make_mask(name: str, n: int, m: int, device: torch.device) -> BlockMask:
    return block_mask(make_pattern(name, n, m, device), N=n, M=m, device=device)


def _untouched(n: int, m: int) -> BlockMask:
    """Returns a mask of the sizes of another, which no launch reads."""
    rows, columns = -(-n // TILE), -(-m // TILE)
    sizes = {
        "tiles": (1, 1, rows, columns),
        "row_lists": (1, 1, rows, 2 + 2 * columns),
        "column_lists": (1, 1, columns, 1 + 2 * rows),
        "bits": (1, TILE, TILE // 32),
        "column_bits": (1, 1, columns, TILE // 32),
    }
    tensors = {name: torch.empty(shape, dtype=torch.int32) for name, shape in sizes.items()}
    return BlockMask((1, 1, n, m), **tensors)


def masked_traffic(case: Case, mode: str) -> Traffic:
    """Returns the operations of visible tiles, and the bytes of all tensors, of a bias and its gradient too.

    Of a causal call without a mask, only pairs that are seen count.
    """
    n, heads, head_dim = case["n"], case["heads"], case["head_dim"]
    m, key_heads, item = case.get("m", n), case.get("key_heads", heads), getattr(torch, case["dtype"]).itemsize
    seen = count_pairs(case["pattern"], n, m) if "pattern" in case else n * (n + 1) // 2
    forward = 4 * head_dim * seen * heads * case["batch"]
    flops = {"fwd": forward, "bwd": forward * 5 // 2, "fwd_bwd": forward * 7 // 2}[mode]
    queries, keys = (case["batch"] * head_dim * item * x for x in (n * heads, 2 * m * key_heads))
    bias = item * math.prod({"heads": (heads, n, m), "keys": (case["batch"], m)}.get(case.get("bias", ""), (0,)))
    read, written = queries + keys + bias, queries
    if mode != "fwd":  # q, k, v, the output and its gradient in, three gradients and the bias's out
        both = mode == "fwd_bwd"
        read, written = (read if both else 0) + 3 * queries + keys + bias, queries * (1 + both) + keys + bias
    return Traffic.of_bytes(read, written, flops)
