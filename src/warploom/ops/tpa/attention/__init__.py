"""Tensor-product attention, training and prefill."""
