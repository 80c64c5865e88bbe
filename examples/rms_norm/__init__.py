"""Root-mean-square normalization: a small operator made as warploom's own are, in one folder of its own."""

from .api import rms_norm

__all__ = ["rms_norm"]
