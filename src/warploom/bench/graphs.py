"""Replays of captured CUDA graphs, as a provider is called: what is left of a call when the host does nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from warploom.ops.spec import Outputs

__all__ = ["GRAPH", "replayed"]

GRAPH = "_graph"
"""Ends the name of a mode in which a graph is replayed."""

Function = Callable[..., Outputs]
_WARM_UPS = 3


def replayed(function: Function) -> Function:
    """A function that captures ``function`` when first called, and on every call replays the capture.

    It must always be called with the same tensors; the outputs are the same ones every time, written anew.
    """
    captured: list[tuple[torch.cuda.CUDAGraph, Outputs]] = []

    def replay(**inputs: Any) -> Outputs:
        if not captured:
            captured.append(_capture(function, inputs))
        graph, outputs = captured[0]
        graph.replay()
        return outputs

    return replay


def _capture(function: Function, inputs: dict[str, Any]) -> tuple[torch.cuda.CUDAGraph, Outputs]:
    # What compiles or allocates on a first call must be over, on a stream that is not the default one.
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(_WARM_UPS):
            function(**inputs)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = function(**inputs)
    return graph, outputs
