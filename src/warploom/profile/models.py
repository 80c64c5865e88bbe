"""The models that are profiled: ours with each of its attentions, and what else of the same shape is installed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from warploom.nn import TransformerConfig, TransformerLM
from warploom.nn.transformer_lm import ATTENTIONS
from warploom.ops.spec import Unsupported
from warploom.profile.records import GRAPHS

__all__ = ["LLAMA", "PROVIDERS", "Loss", "build", "flops_per_step"]

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""From tokens (B, N) and targets (B, N) to the mean cross-entropy ()."""

LLAMA = "llama"
"""transformers' Llama with PyTorch's attention and random weights."""
PROVIDERS = (*ATTENTIONS, LLAMA)


def build(provider: str, config: TransformerConfig, device: torch.device, ending: str) -> tuple[nn.Module, Loss]:
    """A model with random weights in float32, and the function that gives its loss.

    Args:
        provider: One of `PROVIDERS`.
        config: The model's shape.
        device: Where its weights shall be.
        ending: ``+compile`` or ``+graphs`` for `torch.compile`, without or with CUDA graphs; or nothing.

    Raises:
        Unsupported: What the provider needs is not installed.
    """
    torch.manual_seed(0)
    with torch.device(device):
        model = _llama(config) if provider == LLAMA else TransformerLM(config)

    def loss(tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if provider == LLAMA:
            logits = model(input_ids=tokens, use_cache=False).logits
            return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
        out: torch.Tensor = model(tokens, targets).loss
        return out

    # The loss is compiled with the model, for all models alike.
    return model, torch.compile(loss, mode="reduce-overhead" if ending == GRAPHS else None) if ending else loss


def flops_per_step(config: TransformerConfig, tokens: int, backward: bool) -> float:
    """Operations of a step over a number of tokens in sequences of ``context_length``."""
    with torch.device("meta"):
        return tokens * TransformerLM(config).flops_per_token(training=backward)


def _llama(config: TransformerConfig) -> Any:
    try:
        from transformers import LlamaConfig, LlamaForCausalLM
    except ModuleNotFoundError as error:
        raise Unsupported("transformers is not installed: pip install 'warploom[compare]'") from error
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.d_model,
            intermediate_size=config.d_ff,
            num_hidden_layers=config.layers,
            num_attention_heads=config.heads,
            num_key_value_heads=config.heads,
            max_position_embeddings=config.context_length,
            tie_word_embeddings=False,
            attn_implementation="sdpa",
        )
    )
