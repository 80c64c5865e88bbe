"""Tensor-product attention, decoding."""
