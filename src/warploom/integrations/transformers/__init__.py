"""Flash attention in the models of Hugging Face's transformers, version 5.

A model of transformers calls two functions under one name: a mask function, once for each kind of layer, and an
attention function in every layer. The model passes the result of the first to the second. Here that is a `Visible`,
which says which keys are seen by arguments of `warploom.flash_attention`, and is no matrix of queries by keys. A
matrix that a user or a model made is read in the first layer that is given it.

A batch with padding becomes packed sequences, without a copy. Only if an entry has fewer queries than keys, in
decoding, are its keys and values copied to its front.
"""

from __future__ import annotations

import functools
import warnings
from typing import Any, TypeVar

from warploom.errors import ArgumentError, BackendError, DtypeError, fault
from warploom.integrations.transformers.attention import attention
from warploom.integrations.transformers.delta import patch_delta, unpatch_delta
from warploom.integrations.transformers.masks import Visible, import_masking, mask
from warploom.integrations.transformers.paged import paged_attention, watch_continuous_batching
from warploom.integrations.transformers.rotary import has_rotary, patch_rotary, unpatch_rotary
from warploom.integrations.transformers.unrotated import ENDING

Model = TypeVar("Model")

__all__ = ["Visible", "apply", "patch_delta", "patch_rotary", "register", "unpatch_delta", "unpatch_rotary"]


def register(name: str = "warploom") -> None:
    """Make ``attn_implementation=name`` choose `warploom.flash_attention` in models of transformers.

    Attention and masks are both registered. So a model supports padding on either side, packed sequences by
    ``position_ids`` that start again or by ``cu_seq_lens_*``, sliding windows, capped logits, sinks, grouped
    queries, ``generate`` with dynamic and static caches, training with gradient checkpointing, and
    ``torch.compile``. In continuous batching, ``generate_batch``, the packed batch is one call on the pages of
    transformers' cache, which `append_kv` writes; see `paged.paged_attention`.

    A mask function is called on every query and key, and its result is expressed by arguments of
    `warploom.flash_attention`: causal or full attention, a sliding window, padding, and sequences or chunks that
    see only themselves. Other masks, such as images that see themselves in both directions and padding between
    tokens, are masks by tiles (`block_mask`). A matrix of four axes, boolean or added to logits, is taken for what
    it shows, and a bias by position, as T5 has, is added. Not supported are dropout of attention weights, returned
    weights (``output_attentions``), and keys that are not in the mask: models raise an error at their first
    forward. Attention of a padded query is 0, but in masks by tiles, where it sees what the mask shows.

    A mask is read once in each forward for each kind of layer, and once for each size if it does not depend on a
    tensor. It is read on the host. So ``torch.compile`` breaks the graph before the first layer, and
    ``fullgraph=True`` raises.

    A model without this interface of transformers (BLOOM, Falcon) accepts the name, but keeps its own attention or
    fails. A warning says so when such a model is made.

    Args:
        name: Name of the implementation, without ``flash``, which transformers reserves for other packages.

    Raises:
        BackendError: transformers is not installed, or has no such interface.
        ArgumentError: The name is one that transformers uses itself.

    Source: `AttentionInterface` and `AttentionMaskInterface` of transformers 5.

    Example:
        ```python
        from transformers import LlamaConfig, LlamaForCausalLM

        from warploom.integrations import transformers as integration

        integration.register()
        config = LlamaConfig(hidden_size=64, num_attention_heads=4, num_hidden_layers=2, vocab_size=128)
        model = LlamaForCausalLM._from_config(config, attn_implementation="warploom")
        ```
    """
    if name in ("eager", "sdpa") or "flash" in name or "flex" in name or "|" in name:
        raise fault(ArgumentError, "register", "name", "one that transformers does not use itself", repr(name))
    masks = import_masking()
    try:
        from transformers import AttentionInterface
    except ImportError as error:
        raise BackendError(f"register: transformers has no AttentionInterface: {error}") from error
    AttentionInterface.register(name, attention)
    masks.AttentionMaskInterface.register(name, mask)
    AttentionInterface.register(name + ENDING, paged_attention)  # without a mask
    _names.add(name)
    _watch_models()
    watch_continuous_batching(_names)


def apply(model: Model, name: str = "warploom") -> Model:
    """Let a model of transformers attend and rotate queries and keys by warploom.

    It does `register`, `patch_rotary`, `patch_delta` and ``model.set_attn_implementation(name)``. To undo it, call
    `unpatch_rotary`, `unpatch_delta` and ``model.set_attn_implementation("sdpa")``.

    Args:
        model: A model of transformers. Changed in place.
        name: Name of the implementation, see `register`.

    Returns:
        The same model.

    Raises:
        BackendError: transformers is not installed, or has no interface for attention.
        DtypeError: ``model`` is no model of transformers.
        ArgumentError: The model has attention of its own, without the interface, or no rotary embedding that can be
            patched. The model has not been changed then.

    Example:
        ```python
        from transformers import LlamaConfig, LlamaForCausalLM

        from warploom.integrations import transformers as integration

        config = LlamaConfig(hidden_size=64, num_attention_heads=4, num_hidden_layers=2, vocab_size=128)
        model = LlamaForCausalLM(config)
        model = integration.apply(model)
        ```
    """
    register(name)
    from transformers import PreTrainedModel

    if not isinstance(model, PreTrainedModel):
        raise fault(DtypeError, "apply", "model", "a model of transformers", type(model).__name__)
    if not model._can_set_attn_implementation():
        expected = "one that uses transformers' attention interface"
        raise fault(ArgumentError, "apply", "model", expected, type(model).__name__)
    if patch_delta(model) and not has_rotary(model):  # Kimi Linear
        model.set_attn_implementation(name)
        return model
    try:
        patch_rotary(model)
    except ArgumentError:
        unpatch_delta(model)
        raise
    model.set_attn_implementation(name)
    return model


_names: set[str] = set()
_warned: set[str] = set()


def _watch_models() -> None:
    """Warn of models that accept the name but keep their own attention, once for each file of transformers."""
    from transformers import PreTrainedModel

    chosen_by_transformers = PreTrainedModel.get_correct_attn_implementation
    if hasattr(chosen_by_transformers, "warns_of_models"):
        return

    @functools.wraps(chosen_by_transformers)
    def get_correct_attn_implementation(self: Any, *args: Any, **options: Any) -> Any:
        chosen = chosen_by_transformers(self, *args, **options)
        kind = type(self)
        if chosen in _names and kind.__module__ not in _warned and not kind._can_set_attn_implementation():
            _warned.add(kind.__module__)
            warnings.warn(
                f"{kind.__name__} does not use transformers' attention interface: with "
                f'attn_implementation="{chosen}" it keeps its own attention, or fails. Choose "eager" or "sdpa"',
                stacklevel=2,
            )
        return chosen

    get_correct_attn_implementation.warns_of_models = True  # type: ignore[attr-defined]
    PreTrainedModel.get_correct_attn_implementation = get_correct_attn_implementation
