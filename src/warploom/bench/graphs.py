"""Replays of captured CUDA graphs, called as a provider is: a call without the host's work."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from warploom.ops.spec import Outputs

GRAPH = "_graph"
"""The ending of the name of a mode in which a graph is replayed."""

Function = Callable[..., Outputs]
_WARM_UPS = 2


def replayed(function: Function) -> Function:
    """Returns a function that captures ``function`` when first called, and on every call replays the capture.

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
        # Once more, and it must not wait for the device: a capture that fails leaves much behind, cached memory
        # that can never be given back, for one.
        before = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("error")
        try:
            function(**inputs)
        finally:
            torch.cuda.set_sync_debug_mode(before)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            outputs = function(**inputs)
    except Exception:  # whatever stopped the capture is raised again
        # It leaves the default generator believing that it is being captured, and what draws the next random
        # number, or checks the next sampling, gets the error. A capture that succeeds ends that.
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            torch.empty(1, device="cuda").zero_()
        raise
    return graph, outputs
