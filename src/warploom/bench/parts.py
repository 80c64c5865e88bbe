"""The split of a step by parts of the model, through hooks at the entrance and exit of modules.

This is a pass of its own, after the measured steps: the hooks cost host time, so a small model that waits for the
host looks slower here. On a GPU the marks are device events on one stream, and NVTX ranges for Nsight Systems.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from warploom import nn as layers

PARTS = ("embedding", "norm", "projections", "position", "attention", "mlp", "head", "other")
OTHER = "other"
"""What belongs to no part: residual additions, the loss, and in the backward the embedding's gradient.

Positions are part of attention where one operator does both, as with ``flash`` on a GPU."""


def part_of(name: str, module: nn.Module) -> str | None:
    """The part that a module of a `TransformerLM` is; ``None`` for one that lies inside another part."""
    match module:
        case nn.Embedding():
            return "embedding"
        case nn.RMSNorm():
            return "norm"
        case layers.RotaryEmbedding() | layers.LRPE():
            return "position"
        case layers.Attention() | layers.TensorProductAttention() | layers.LinearAttention():
            return "attention"
        case layers.SwiGLU():
            return "mlp"
        case nn.Linear():
            return "head" if name == "head" else "projections" if ".attention." in name else None
    return None


@contextlib.contextmanager
def hooked(model: nn.Module, enter: Callable[[str], None], leave: Callable[[str], None]) -> Iterator[None]:
    """Call ``enter`` and ``leave`` with a part's name around each of its modules' forwards and backwards.

    The backward of a module goes from the gradient of its output to that of its input. The embedding's input has
    none, so its backward is not seen.
    """
    with contextlib.ExitStack() as hooks:
        for name, module in model.named_modules():
            part = part_of(name, module)
            if part is None:
                continue
            pairs: list[tuple[Callable[..., Any], Callable[[str], None]]]
            pairs = [(module.register_forward_pre_hook, enter), (module.register_forward_hook, leave)]
            if part != "embedding":
                pairs.append((module.register_full_backward_pre_hook, enter))
                pairs.append((module.register_full_backward_hook, leave))
            for register, tell in pairs:
                hooks.callback(register(functools.partial(_tell, tell, part)).remove)
        yield


def _tell(told: Callable[[str], None], part: str, *_: Any) -> None:
    told(part)


class Timeline:
    """Time between marks, each stretch counted for the innermost part that is open, so that parts add up."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.marks: list[tuple[Any, str]] = []  # when, and which part goes on from there
        self.open = [OTHER]

    def begin(self) -> None:
        """Start over."""
        self.open = [OTHER]
        self.marks = []
        self._mark()

    def enter(self, part: str) -> None:
        """A part begins inside the one that is open."""
        self.open.append(part)
        if self.device.type == "cuda":
            torch.cuda.nvtx.range_push(part)
        self._mark()

    def leave(self, part: str) -> None:
        """The innermost open part of this name ends."""
        for place in range(len(self.open) - 1, 0, -1):
            if self.open[place] == part:
                del self.open[place]
                break
        if self.device.type == "cuda":
            torch.cuda.nvtx.range_pop()
        self._mark()

    def end(self) -> dict[str, float]:
        """Milliseconds of each part since `begin`; waits for the device."""
        self._mark()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        total = dict.fromkeys(PARTS, 0.0)
        for (start, part), (stop, _) in zip(self.marks, self.marks[1:]):
            total[part] += start.elapsed_time(stop) if self.device.type == "cuda" else (stop - start) * 1e3
        return total

    def _mark(self) -> None:
        if self.device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self.marks.append((event, self.open[-1]))
        else:
            self.marks.append((time.perf_counter(), self.open[-1]))
