"""Kernels and device code alone."""
