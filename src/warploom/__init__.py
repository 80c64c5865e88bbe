"""Fused operators for sequence models in PyTorch, written in Triton."""

from warploom.errors import (
    ArgumentError,
    BackendError,
    DeviceError,
    DtypeError,
    ShapeError,
    WarploomError,
)
from warploom.ops.flash_attention.api import flash_attention
from warploom.ops.lrpe.api import lrpe_cosine, lrpe_rotate
from warploom.ops.tpa.api import tpa_attention, tpa_decode
from warploom.version import __version__

__all__ = [
    "ArgumentError",
    "BackendError",
    "DeviceError",
    "DtypeError",
    "ShapeError",
    "WarploomError",
    "__version__",
    "flash_attention",
    "lrpe_cosine",
    "lrpe_rotate",
    "tpa_attention",
    "tpa_decode",
]
