"""What flash attention's kernels are launched on, and in which order, where more than one place launches them.

A plan's launches are made for shapes and strides: whoever has a plan may launch on parts of larger tensors, and a
part that begins where the tensor does can be given as the tensor.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from warploom.runtime.launch import Launch

Tensor = torch.Tensor


def launch_forward(
    launch: Launch, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, statistics: Tensor,
    counters: Tensor,
) -> None:  # fmt: skip
    """Run the forward kernel for Hopper. It writes ``out`` and ``statistics``, or parts of them, and ``lse``.

    If it counts tiles, ``counters`` must be zero.
    """
    launch(q, k, v, out, lse, statistics, counters)


def launch_prepare(
    launch: Launch, out: Tensor, grad: Tensor, statistics: Tensor, grad_lse: Tensor | None, lse: Tensor,
    delta: Tensor, inverse: Tensor | None, counters: Tensor | None,
) -> None:  # fmt: skip
    """Run what comes before a backward's loops. It writes all from ``lse`` on; ``counters`` become zero."""
    launch(out, grad, statistics, grad_lse, lse, delta, inverse, counters)


def launch_walk(
    launch: Launch, tensors: Sequence[Tensor], gradients: Sequence[Tensor | None],
    numbers: Sequence[Tensor | None], counters: Tensor | None,
) -> None:  # fmt: skip
    """Run a backward kernel for Hopper on q, k, v and the gradient of the output, or their terms.

    It writes ``gradients``, of keys and values or of queries, or parts of them. ``numbers``: what `launch_prepare`
    wrote from ``lse`` on, None for what was not asked for.
    """
    launch(*tensors, *gradients, *[x for x in numbers if x is not None], counters)
