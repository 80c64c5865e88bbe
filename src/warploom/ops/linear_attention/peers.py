"""Other implementations of linear attention with positions: plain PyTorch in chunks, and flash-linear-attention.

Nothing here runs a kernel of ours, so that records of these providers outlast a change to one.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch

from warploom.ops.linear_attention.reference import linear_attention
from warploom.ops.spec import Case, Outputs, Unsupported, compile_at_best, need_cuda

Tensor = torch.Tensor
Provider = Callable[..., Outputs]


def _fla(case: Case) -> Provider:
    """Returns the package's kernel for chunks, with its rotary encoding of queries and keys in memory first."""
    need_cuda("the package")
    if case["encoding"] == "cosine" or case.get("activation", "none") != "none" or case["n"] == 1:
        raise Unsupported("it has rotations alone, and no activation")
    if case["dtype"] == "float32":
        raise Unsupported("the kernel takes float16 and bfloat16 only")
    try:
        attend = importlib.import_module("fla.ops.simple_gla").chunk_simple_gla
        rotary = importlib.import_module("fla.modules.rotary").rotary_embedding
    except (ImportError, AttributeError) as error:
        raise Unsupported("flash-linear-attention is not installed") from error
    tables: dict[str, Tensor] = {}  # a model has them from the start

    def run(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        theta, decay = options.get("theta"), options.get("decay")
        if theta is not None:
            if not tables:
                phi = torch.arange(q.shape[1], device=q.device).double()[:, None] * theta.double()
                tables["cos"], tables["sin"] = phi.cos().to(q.dtype), phi.sin().to(q.dtype)
            q, k = (rotary(x, tables["cos"], tables["sin"]) for x in (q, k))
        g = None if decay is None else decay.expand(q.shape[:3]).contiguous()
        out: Tensor = attend(q, k, v, g=g)[0]
        return out

    return run


PROVIDERS: dict[str, Callable[[Case], Provider]] = {
    "torch": lambda case: linear_attention,
    "torch_compile": lambda case: compile_at_best(linear_attention),
    "fla": _fla,
}
