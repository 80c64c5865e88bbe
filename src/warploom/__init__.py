"""Fused operators for sequence models in PyTorch, written in Triton."""

import importlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from warploom.errors import (
    ArgumentError,
    BackendError,
    BackendWarning,
    DeviceError,
    DtypeError,
    LayoutWarning,
    ShapeError,
    UnknownArgumentError,
    WarploomError,
)
from warploom.version import __version__


def _is_command_line() -> bool:
    """Returns True if this process is the command ``warploom``, whose ``--help`` does not import PyTorch."""
    return Path(sys.argv[0]).stem == "warploom" or sys.orig_argv[1:3] == ["-m", "warploom"]


# Importing the operators registers them as ``torch.ops.warploom``, as `torch.export.load` needs.
if TYPE_CHECKING or "torch" in sys.modules or not _is_command_line():
    from warploom.ops.append_kv.api import append_kv
    from warploom.ops.delta_attention.api import delta_attention
    from warploom.ops.flash_attention.api import BlockMask, block_mask, flash_attention
    from warploom.ops.linear_attention.api import linear_attention
    from warploom.ops.lrpe.api import lrpe_cosine, lrpe_rotate
    from warploom.ops.rotary_attention.api import rotary_attention as _rotary_attention  # noqa: F401
    from warploom.ops.short_convolution.api import short_convolution
    from warploom.ops.tpa.api import tpa_attention, tpa_decode
    from warploom.runtime.values import check_values

__all__ = [
    "ArgumentError",
    "BackendError",
    "BackendWarning",
    "BlockMask",
    "DeviceError",
    "DtypeError",
    "LayoutWarning",
    "ShapeError",
    "UnknownArgumentError",
    "WarploomError",
    "__version__",
    "append_kv",
    "block_mask",
    "check_values",
    "delta_attention",
    "flash_attention",
    "linear_attention",
    "lrpe_cosine",
    "lrpe_rotate",
    "short_convolution",
    "tpa_attention",
    "tpa_decode",
]


SUBPACKAGES = ("bench", "distributed", "integrations", "nn")
"""They are imported when first asked for."""


def __dir__() -> list[str]:
    """Returns what there is for users, as completion shows it."""
    return sorted((*__all__, *SUBPACKAGES))


def __getattr__(name: str) -> Any:
    """Import a subpackage when first asked for; for the command line, whose help needs none, operators too."""
    if name in SUBPACKAGES:
        return importlib.import_module(f".{name}", __name__)
    if name not in __all__:
        raise AttributeError(f"module 'warploom' has no attribute {name!r}")
    from warploom.ops.append_kv import api as append_kv
    from warploom.ops.delta_attention import api as delta_attention
    from warploom.ops.flash_attention import api as flash_attention
    from warploom.ops.linear_attention import api as linear_attention
    from warploom.ops.lrpe import api as lrpe
    from warploom.ops.short_convolution import api as short_convolution
    from warploom.ops.tpa import api as tpa
    from warploom.runtime import values

    operators = (append_kv, delta_attention, flash_attention, linear_attention, lrpe, short_convolution, tpa)
    found = next(getattr(module, name) for module in (*operators, values) if hasattr(module, name))
    globals()[name] = found
    return found
