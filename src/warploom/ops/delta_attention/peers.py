"""Other implementations of delta rule attention: plain PyTorch in chunks, and flash-linear-attention.

Nothing here runs a kernel of ours, so that records of these providers outlast a change to one.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch

from warploom.ops.delta_attention.reference import delta_attention
from warploom.ops.spec import Case, Outputs, Unsupported, compile_at_best, need_cuda

Tensor = torch.Tensor
Provider = Callable[..., Outputs]


def _fla(case: Case) -> Provider:
    """Returns the package's kernels for chunks: those of Gated DeltaNet, of DeltaNet, or of Kimi Delta Attention.

    With Triton 3.4 to 3.7.0 it refuses to compute gradients on Hopper, which are wrong there (its issues 640, 984).
    """
    need_cuda("the package")
    if case.get("encoding", "none") != "none" or case["n"] == 1:
        raise Unsupported("it has no positions, and no chunk for a single token")
    if case["dtype"] == "float32":
        raise Unsupported("the kernels take float16 and bfloat16 only")
    names = {None: ("delta_rule", "chunk_delta_rule"), "head": ("gated_delta_rule", "chunk_gated_delta_rule")}
    names["feature"] = ("kda", "chunk_kda")
    module, name = names[case.get("decay")]
    try:
        attend = getattr(importlib.import_module(f"fla.ops.{module}"), name)
    except (ImportError, AttributeError) as error:
        raise Unsupported("flash-linear-attention is not installed") from error

    def run(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, **options: Any) -> Tensor:
        if q.shape[2] != v.shape[2] and name != "chunk_gated_delta_rule":
            q, k = (x.repeat_interleave(v.shape[2] // x.shape[2], 2) for x in (q, k))
        more = {} if options.get("decay") is None else {"g": options["decay"]}
        normalize = options.get("normalize", False)
        out: Tensor = attend(q, k, v, beta=beta, use_qk_l2norm_in_kernel=normalize, **more)[0]
        return out

    return run


PROVIDERS: dict[str, Callable[[Case], Provider]] = {
    "torch": lambda case: delta_attention,
    "torch_compile": lambda case: compile_at_best(delta_attention),
    "fla": _fla,
}
