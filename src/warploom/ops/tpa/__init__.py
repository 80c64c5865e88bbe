"""Tensor-product attention: queries, keys and values kept as products of small factors."""
