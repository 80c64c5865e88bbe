"""Layers for models: positional encodings, attention with its caches, and a Transformer language model."""

from warploom.nn.attention import Attention
from warploom.nn.block import Block
from warploom.nn.cache import FactorCache, KVCache, StateCache
from warploom.nn.delta_attention import DeltaAttention
from warploom.nn.linear_attention import LinearAttention
from warploom.nn.mlp import SwiGLU
from warploom.nn.paged_cache import PagedKVCache, PageTable
from warploom.nn.positions import LRPE, RotaryEmbedding
from warploom.nn.tensor_product_attention import TensorProductAttention
from warploom.nn.transformer_lm import Output, TransformerConfig, TransformerLM

__all__ = [
    "LRPE",
    "Attention",
    "Block",
    "DeltaAttention",
    "FactorCache",
    "KVCache",
    "LinearAttention",
    "Output",
    "PageTable",
    "PagedKVCache",
    "RotaryEmbedding",
    "StateCache",
    "SwiGLU",
    "TensorProductAttention",
    "TransformerConfig",
    "TransformerLM",
]
