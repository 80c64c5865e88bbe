"""Checks of values in tensors: bounds of sequences, lengths, pages, tokens, positions and decays.

Values on a CPU are checked in every call. Values on a GPU are checked on request, by `check_values`, since a check
waits for the GPU. Nothing is checked under a compiler, or of tensors without data.
"""

from __future__ import annotations

import itertools
import os
import sys
from typing import TypeGuard

import torch

from warploom.errors import ArgumentError, fault
from warploom.runtime.modes import holds_data
from warploom.runtime.plans import ALL_PLANS
from warploom.runtime.pytorch import count_dispatch_modes as _dispatch_modes

Tensor = torch.Tensor

LARGEST_POSITION = 2**53
"""The largest absolute position in a tensor. Positions are defined in float64, which holds all integers up to
it."""

_is_compiling = torch.compiler.is_compiling
_on_gpus = os.environ.get("WARPLOOM_CHECK_VALUES", "0") not in ("", "0")


def check_values(on: bool = True) -> None:
    """Turn checks of values in GPU tensors on or off. Values in CPU tensors are always checked.

    Bounds of packed sequences, lengths, numbers of pages, tokens, positions and decays are then read back and
    checked before any kernel runs, with the same errors. Each call with such tensors waits for the GPU, so this is
    for debugging. The environment variable ``WARPLOOM_CHECK_VALUES=1`` turns the checks on from the start.

    Without them a bad value on a GPU may give a wrong result, but no kernel accesses memory outside of the tensors
    of its call. Compiled code, and calls while a CUDA graph is captured, are never checked.

    Args:
        on: True to check.

    Example:
        ```python
        import warploom

        warploom.check_values(True)  # look for the bad call
        warploom.check_values(False)
        ```
    """
    global _on_gpus
    _on_gpus = bool(on)
    for plans in ALL_PLANS:  # a prepared call includes whether its values are checked
        plans.forget()


def reads_values_of(x: Tensor) -> bool:
    """Returns True if values are checked in a call on a tensor like this; not while launches are recorded."""
    return not _is_compiling() and (_on_gpus if x.is_cuda else x.is_cpu and not _is_recording())


def _is_recording() -> bool:
    # This imports no Triton: before that is imported nothing is recorded.
    launch = sys.modules.get(f"{__package__}.launch")
    return launch is not None and launch.is_recording()


def is_readable(tensor: Tensor | None) -> TypeGuard[Tensor]:
    """Returns True if a tensor is given and its values are checked."""
    if tensor is None or not holds_data(tensor):
        return False
    return tensor.is_cpu or (_on_gpus and not torch.cuda.is_current_stream_capturing())


def check_bounds(function: str, argument: str, cu_seqlens: Tensor | None, rows: int, letter: str = "N") -> None:
    """Raise unless bounds of packed sequences begin with 0, do not decrease, and end at ``rows`` at most.

    Raises:
        ArgumentError: They do not.
    """
    if not is_readable(cu_seqlens):
        return
    bounds = cu_seqlens.tolist()
    if bounds[0] != 0:
        raise fault(ArgumentError, function, argument, "of a first number 0", bounds[0])
    for earlier, later in itertools.pairwise(bounds):
        if later < earlier:
            raise fault(ArgumentError, function, argument, "of numbers that do not decrease", f"{earlier}, {later}")
    if bounds[-1] > rows:
        raise fault(ArgumentError, function, argument, f"of numbers up to {letter} = {rows}", bounds[-1])


def check_lengths(function: str, argument: str, lengths: Tensor | None, most: int) -> None:
    """Raise unless lengths are between 0 and ``most``.

    Raises:
        ArgumentError: One is not.
    """
    if not is_readable(lengths):
        return
    for length in lengths.tolist():
        if not 0 <= length <= most:
            raise fault(ArgumentError, function, argument, f"of numbers between 0 and M = {most}", length)


def is_read(tensor: Tensor) -> bool:
    """Returns whether the values of a tensor are checked: it `is_readable`, and no mode sees what is computed."""
    return is_readable(tensor) and not _dispatch_modes()


def may_be_read(tensor: Tensor) -> bool:
    """Returns whether the host can wait for values: no compiler, mode, recording or capture is at work."""
    if not holds_data(tensor) or _dispatch_modes() or _is_recording():
        return False
    return tensor.is_cpu or not torch.cuda.is_current_stream_capturing()


def check_pages(function: str, block_table: Tensor | None, seqused_k: Tensor, pages: int, page_size: int) -> None:
    """Raise unless all pages that hold used keys are in the cache.

    Raises:
        ArgumentError: One is not.
    """
    if not is_readable(block_table) or not is_readable(seqused_k):
        return
    for row, length in zip(block_table.tolist(), seqused_k.tolist()):
        for page in row[: -(-length // page_size)]:
            if not 0 <= page < pages:
                expected = f"of pages between 0 and {pages - 1} where keys are used"
                raise fault(ArgumentError, function, "block_table", expected, page)


def check_tokens(function: str, argument: str, tokens: Tensor | None, vocabulary: int, ignored: int = 0) -> None:
    """Raise unless tokens are numbers of a vocabulary, or ``ignored``.

    Raises:
        ArgumentError: One is not.
    """
    if not is_readable(tokens) or _dispatch_modes():
        return
    wrong = ((tokens < 0) | (tokens >= vocabulary)) & (tokens != ignored)
    if wrong.any():
        expected = f"of tokens ≥ 0 and below vocab_size = {vocabulary}"
        raise fault(ArgumentError, function, argument, expected, tokens[wrong][0].item())


def check_positions(function: str, argument: str, positions: Tensor | None) -> None:
    """Raise unless positions are at most `LARGEST_POSITION` in size.

    Raises:
        ArgumentError: One is not.
    """
    if not is_readable(positions) or positions.dtype != torch.int64 or positions.numel() == 0 or _dispatch_modes():
        return
    for extreme in positions.aminmax():
        if abs(int(extreme)) > LARGEST_POSITION:
            raise fault(ArgumentError, function, argument, "at most 2**53 in size", int(extreme))


def check_decays(function: str, argument: str, decay: Tensor | None) -> None:
    """Raise unless logarithms of decays are at most 0.

    Raises:
        ArgumentError: One is not.
    """
    if not is_readable(decay) or _dispatch_modes():
        return
    decay = decay.detach()
    grows = decay > 0
    if grows.any():
        expected = "of logarithms ≤ 0 (the logarithm of a factor λ ≤ 1 is λ.log())"
        raise fault(ArgumentError, function, argument, expected, decay[grows][0].item())
