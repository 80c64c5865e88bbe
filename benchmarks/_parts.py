"""Marks around the parts of a model, in the timeline that ``warploom profile`` writes and sums up.

They are hooks at the entrance and exit of modules. These cost host time: a small model, which waits for the host,
looks slower with them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from warploom import nn as layers


def part_of(name: str, module: nn.Module) -> str | None:
    """Returns the part that a module of a `TransformerLM` is; ``None`` for one that lies inside another part."""
    match module:
        case nn.Embedding():
            return "embedding"
        case nn.RMSNorm():
            return "norm"
        case layers.RotaryEmbedding() | layers.LRPE():
            return "position"
        case (
            layers.Attention()
            | layers.TensorProductAttention()
            | layers.LinearAttention()
            | layers.DeltaAttention()
        ):
            return "attention"
        case layers.SwiGLU():
            return "mlp"
        case nn.Linear():
            return "head" if name == "head" else "projections" if ".attention." in name else None
    return None


def hook(model: nn.Module, enter: Callable[[str], None], leave: Callable[[str], None]) -> None:
    """Call ``enter`` and ``leave`` with a part's name around each of its modules' forwards and backwards.

    The backward of a module goes from the gradient of its output to that of its input. The embedding's input has
    none, so its backward is not seen.
    """
    for name, module in model.named_modules():
        part = part_of(name, module)
        if part is None:
            continue
        module.register_forward_pre_hook(functools.partial(_tell, enter, part))
        module.register_forward_hook(functools.partial(_tell, leave, part))
        if part != "embedding":
            module.register_full_backward_pre_hook(functools.partial(_tell, enter, part))
            module.register_full_backward_hook(functools.partial(_tell, leave, part))


def _tell(told: Callable[[str], None], part: str, *_: Any) -> None:
    told(part)


def mark_parts(model: nn.Module) -> None:
    """Open a range of PyTorch's profiler around each part of a model from now on."""
    ranges: list[Any] = []

    def enter(part: str) -> None:
        ranges.append(torch.profiler.record_function(part))
        ranges[-1].__enter__()

    hook(model, enter, lambda part: ranges.pop().__exit__(None, None, None))
