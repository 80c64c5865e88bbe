"""Flash attention in the models of Hugging Face's transformers, version 5.

A model of transformers asks for two functions by one name: a mask function, once for each kind of layer, and an
attention function in every layer. What the first returns, the model hands to the second. Here it is a `Visible`:
which keys are seen, as `warploom.flash_attention` takes it, and never a matrix of queries by keys.

A batch with padding becomes packed sequences, where they lie. Only where an entry has fewer queries than keys, in
decoding, are keys moved to its front, which is a copy of keys and values.
"""

from __future__ import annotations

import functools
import warnings
from typing import Any

from warploom.errors import ArgumentError, BackendError, fault
from warploom.integrations.transformers.attention import attention
from warploom.integrations.transformers.masks import Visible, mask, masking
from warploom.integrations.transformers.rotary import patch_rotary, unpatch_rotary

__all__ = ["Visible", "patch_rotary", "register", "unpatch_rotary"]


def register(name: str = "warploom") -> None:
    """Make ``attn_implementation=name`` choose `warploom.flash_attention` in models of transformers.

    Attention and masks are both registered, so a model keeps all it does with another implementation: padding on
    either side, ``position_ids`` that start again and ``cu_seq_lens_*`` for packed sequences, sliding windows,
    capped logits, sinks, grouped queries, ``generate`` with dynamic and static caches, training with gradient
    checkpointing and with ``torch.compile``.

    Which keys a mask function shows is found out by calling it, on every query and key, and compared with what
    `warploom.flash_attention` can do: causal and full attention, a sliding window, padding, and sequences or chunks
    that see themselves alone. A model that asks for something else gets an error, at its first forward: any other
    mask, such as images that see themselves in both directions; dropout of attention weights, a mask that is given
    as a matrix, a mask with gaps between tokens, weights returned (``output_attentions``), a bias by position, keys
    that the mask does not know, the paged cache of continuous batching. Attention of a padded query is 0.

    A mask is read once in a forward for each kind of layer, and one that depends on no tensor once for each size.
    That happens on the host: ``torch.compile`` splits the model there, in front of the first layer, and
    ``fullgraph=True`` refuses it.

    A model that does not use the interface of transformers (BLOOM, Falcon) takes the name all the same, and keeps
    its own attention or fails. A warning says so when such a model is made.

    Args:
        name: Of the implementation, without ``flash``, which transformers takes for other packages.

    Raises:
        BackendError: There is no transformers with such an interface.
        ArgumentError: A name that transformers uses itself.

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
    masks = masking()
    try:
        from transformers import AttentionInterface
    except ImportError as error:
        raise BackendError(f"register: transformers has no AttentionInterface: {error}") from error
    AttentionInterface.register(name, attention)
    masks.AttentionMaskInterface.register(name, mask)
    _names.add(name)
    _watch_models()


_names: set[str] = set()
_warned: set[str] = set()


def _watch_models() -> None:
    """Let models that take the name and have attention of their own say so, once for each file of transformers."""
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
