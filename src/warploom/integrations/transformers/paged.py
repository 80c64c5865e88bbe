"""Attention on the paged cache of transformers' continuous batching, ``generate_batch``."""

from __future__ import annotations

import functools
from typing import Any

import torch

from warploom import append_kv, flash_attention
from warploom.integrations.transformers.attention import refuse_options
from warploom.integrations.transformers.unrotated import ENDING, Unrotated

Tensor = torch.Tensor


def watch_continuous_batching(names: set[str]) -> None:
    """Let ``generate_batch`` take models with an implementation of these names, and its cache be read in pages."""
    from transformers.generation.continuous_batching import ContinuousBatchingManager, PagedAttentionCache

    switch_by_transformers = ContinuousBatchingManager.switch_to_cb_friendly_attn
    update_by_transformers = PagedAttentionCache.update
    if hasattr(switch_by_transformers, "takes_names"):
        return

    @functools.wraps(switch_by_transformers)
    def switch_to_cb_friendly_attn(self: Any, model: Any, *args: Any, **options: Any) -> None:
        name = model.config._attn_implementation
        if name not in names:
            return switch_by_transformers(self, model, *args, **options)  # type: ignore[no-any-return]
        model.config._attn_implementation = name + ENDING
        self._original_attn_impl = name  # transformers goes back to it at the end
        return None

    @functools.wraps(update_by_transformers)
    def update(
        self: Any, key_states: Tensor, value_states: Tensor, layer_idx: int, kwargs: dict[str, Any]
    ) -> tuple[Tensor, Tensor]:
        if self.config._attn_implementation.endswith(ENDING) and _can_read_pages(self, layer_idx, kwargs):
            _append(self, key_states, value_states, layer_idx, kwargs)
            return key_states, value_states
        return update_by_transformers(self, key_states, value_states, layer_idx, kwargs)  # type: ignore[no-any-return]

    switch_to_cb_friendly_attn.takes_names = True  # type: ignore[attr-defined]
    ContinuousBatchingManager.switch_to_cb_friendly_attn = switch_to_cb_friendly_attn
    PagedAttentionCache.update = torch.compiler.disable(update)


def paged_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    cache: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Returns attention (1, N, Hq, E) of packed queries (1, Hq, N, D), and None for weights.

    Layers of full attention read the pages of the cache where they are. Of a sliding layer the cache is a ring of
    the window's size, which new keys overwrite: as in transformers, its keys are first copied together with the new
    ones, so that every sequence has the last of its keys in order. Queries and keys of a patched rotary embedding
    come `Unrotated`: `append_kv` rotates them if the layer reads pages.

    From version 5.24 on transformers' layers update the cache. Before, ``cache`` is given to do it here.
    """
    refuse_options(dropout, kwargs)
    if cache is not None:
        key, value = cache.update(key, value, module.layer_idx, kwargs)
    keys: dict[str, Any]
    if kwargs.get("block_table") is not None:
        k, v = kwargs["k_cache"], kwargs["v_cache"]
        keys = {"block_table": kwargs["block_table"], "seqused_k": kwargs["seqused_k"]}
    else:
        k, v = key.transpose(1, 2), value.transpose(1, 2)
        keys = {"cu_seqlens_k": kwargs["cu_seq_lens_k"]}
    out: Tensor = flash_attention(
        query.transpose(1, 2), k, v,
        causal=True, scale=scaling, window=None if sliding_window is None else (sliding_window - 1, 0),
        softcap=softcap, sink=s_aux, cu_seqlens_q=kwargs["cu_seq_lens_q"], **keys,
    )  # fmt: skip
    return out, None


def _can_read_pages(cache: Any, layer: int, kwargs: dict[str, Any]) -> bool:
    """Returns True for layers whose cache has pages in order, unless all sequences begin with this batch."""
    allocator = cache.layer_to_allocator[layer]
    reads: bool = kwargs["read_index"][allocator.index].numel() > 0
    return reads and bool(allocator.supports_block_table)


def _append(cache: Any, key: Tensor, value: Tensor, layer: int, kwargs: dict[str, Any]) -> None:
    """Write new keys and values (1, Hkv, N, ·) to a layer's pages, and put what attention reads in ``kwargs``.

    Keys that are not rotated yet are, and so are their queries. A token's place among the keys is its position.
    """
    rotary: dict[str, Any] = {}
    query: Any = None  # to be rotated here
    if isinstance(key, Unrotated) and key.rotated is None:
        rotary = {"theta": key.theta, "interleaved": key.interleaved}
        if key.query is not None and key.query.rotated is None:
            query = key.query
            rotary["q"] = query.raw.transpose(1, 2)
        key = key.raw
    allocator = cache.layer_to_allocator[layer]
    k, v = allocator.get_cache_for_block_table(layer)
    pages = _find_pages(cache, allocator, layer, kwargs)
    rotated = append_kv(
        key.transpose(1, 2), value.transpose(1, 2), k, v, cu_seqlens=kwargs["cu_seq_lens_q"],
        seqused_k=pages["seqused_k"], block_table=pages["block_table"], **rotary,
    )  # fmt: skip
    if rotated is not None:
        query.rotated = rotated.transpose(1, 2)
    kwargs |= {"k_cache": k, "v_cache": v, **pages}


def _find_pages(cache: Any, allocator: Any, layer: int, kwargs: dict[str, Any]) -> dict[str, Tensor]:
    """Returns the pages (S, P) int32 of each sequence, and its number of keys (S,), from the batch's slots to read.

    They are the same for all layers of the allocator, of which the first one computes them: nothing that was known
    before a forward is used in it, as it may be captured in a CUDA graph.
    """
    read_index = kwargs["read_index"][allocator.index]
    known = cache.__dict__.setdefault("_warploom_pages", {})
    if layer == allocator.layer_indices[0] or known.get(allocator.index, (None,))[0] is not read_index:
        ends = kwargs["cu_seq_lens_k"][allocator.layer_type]
        size = allocator.tokens_per_page
        count = -(-kwargs["max_length_k"][allocator.layer_type] // size)
        first_slots = ends[:-1, None] + torch.arange(0, count * size, size, device=ends.device)
        table = read_index[first_slots.clamp(max=read_index.numel() - 1)] // size
        known[allocator.index] = (read_index, {"block_table": table.int(), "seqused_k": ends.diff()})
    pages: dict[str, Tensor] = known[allocator.index][1]
    return pages
