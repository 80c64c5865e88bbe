"""Modules for people who build models."""

from warploom.nn.tensor_product_attention import FactorCache, TensorProductAttention

__all__ = ["FactorCache", "TensorProductAttention"]
