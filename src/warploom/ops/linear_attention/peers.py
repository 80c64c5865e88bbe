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
    """Returns the package's kernel for chunks, or for a step, behind its rotary encoding of queries and keys.

    Decays of heads that want no gradient are its own argument for them, which has a number for each head.
    """
    need_cuda("the package")
    if case["encoding"] == "cosine" or case.get("activation", "none") != "none":
        raise Unsupported("it has rotations alone, and no activation")
    if case["dtype"] == "float32":
        raise Unsupported("the kernel takes float16 and bfloat16 only")
    try:
        kernels = importlib.import_module("fla.ops.simple_gla")
        attend = kernels.fused_recurrent_simple_gla if case["n"] == 1 else kernels.chunk_simple_gla
        rotary = importlib.import_module("fla.modules.rotary").rotary_embedding
    except (ImportError, AttributeError) as error:
        raise Unsupported("flash-linear-attention is not installed") from error
    tables: dict[str, Tensor] = {}  # a model has them from the start

    def run(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Outputs:
        theta, decay = options.get("theta"), options.get("decay")
        if theta is not None:
            if not tables:
                places = options.get("offset", 0) + torch.arange(q.shape[1], device=q.device)
                phi = places.double()[:, None] * theta.double()
                tables["cos"], tables["sin"] = phi.cos().to(q.dtype), phi.sin().to(q.dtype)
            q, k = (rotary(x, tables["cos"], tables["sin"]) for x in (q, k))
        more: dict[str, Any] = {"initial_state": options.get("initial_state")}
        if decay is not None and decay.dim() == 1 and not decay.requires_grad:
            more["g_gamma"] = decay
        elif decay is not None:
            more["g"] = decay.expand(q.shape[:3]).contiguous()
        stepped = options.get("return_state", False)
        out, state = attend(q, k, v, scale=options.get("scale"), output_final_state=stepped, **more)
        return (out, state) if stepped else out

    return run


PROVIDERS: dict[str, Callable[[Case], Provider]] = {
    "torch": lambda case: linear_attention,
    "torch_compile": lambda case: compile_at_best(linear_attention),
    "fla": _fla,
}
