"""Other implementations of delta rule attention: plain PyTorch in chunks, flash-linear-attention and FlashQLA.

Nothing here runs a kernel of ours, so that records of these providers outlast a change to one.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from typing import Any

import torch

from warploom.ops.delta_attention.reference import delta_attention
from warploom.ops.spec import Case, Outputs, Unsupported, compile_at_best, need_cuda

Tensor = torch.Tensor
Provider = Callable[..., Outputs]


def _fla(case: Case) -> Provider:
    """Returns the package's kernels for chunks: those of Gated DeltaNet, of DeltaNet, or of Kimi Delta Attention.

    With Triton 3.4 to 3.7.0 on Hopper it refuses gradients of Gated DeltaNet, which are wrong there (its issue
    640), unless it finds TileLang and nvcc, whose kernel it takes instead. Those of the others are computed with
    configurations that avoid this, and are judged as any peer's. FlashQLA, which it would call where that is
    installed, is a peer of its own.
    """
    need_cuda("the package")
    if case.get("encoding", "none") != "none" or case["n"] == 1:
        raise Unsupported("it has no positions, and no chunk for a single token")
    if case["dtype"] == "float32":
        raise Unsupported("the kernels take float16 and bfloat16 only")
    names = {None: ("delta_rule", "chunk_delta_rule"), "head": ("gated_delta_rule", "chunk_gated_delta_rule")}
    names["feature"] = ("kda", "chunk_kda")
    module, name = names[case.get("decay")]
    os.environ["FLA_FLASH_QLA"] = os.environ["FLA_FLASH_KDA"] = "0"  # read in every call
    try:
        attend = getattr(importlib.import_module(f"fla.ops.{module}"), name)
    except (ImportError, AttributeError) as error:
        raise Unsupported(f"flash-linear-attention is not installed: {error}") from error
    refuses, bounds_of = case.get("decay") == "head" and _refuses_gradients(), _remember_bounds()

    def run(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, **options: Any) -> Tensor:
        if refuses and torch.is_grad_enabled():
            raise Unsupported(
                "on Hopper with Triton 3.4 to 3.7.0 it refuses gradients, which are wrong there (its issue 640), "
                "without TileLang and nvcc"
            )
        if q.shape[2] != v.shape[2] and name == "chunk_delta_rule":
            q, k = (x.repeat_interleave(v.shape[2] // x.shape[2], 2) for x in (q, k))
        more = {} if options.get("decay") is None else {"g": options["decay"]}
        more |= bounds_of(options)
        normalize = options.get("normalize", False)
        out: Tensor = attend(q, k, v, beta=beta, use_qk_l2norm_in_kernel=normalize, **more)[0]
        return out

    return run


def _remember_bounds() -> Callable[[dict[str, Any]], dict[str, Tensor]]:
    """Returns a function of a call's options that gives bounds of packed sequences in int64, converted once."""
    known: dict[str, Tensor] = {}  # a model has them from the start

    def bounds_of(options: dict[str, Any]) -> dict[str, Tensor]:
        cu_seqlens = options.get("cu_seqlens")
        if cu_seqlens is not None and not known:
            known["cu_seqlens"] = cu_seqlens.long()
        return known

    return bounds_of


def _refuses_gradients() -> bool:
    """Returns True if the package would raise in the backward of gated chunks."""
    try:
        chunks = importlib.import_module("fla.ops.common.chunk_o")
        wrong = chunks.IS_NVIDIA_HOPPER and chunks.TRITON_ABOVE_3_4_0 and not chunks.TRITON_ABOVE_3_7_1
        tilelang = importlib.import_module("fla.ops.common.backends.tilelang").CommonTileLangBackend
        return bool(wrong and not tilelang.can_use())
    except (ImportError, AttributeError):  # another version of it: its own error says what is wrong
        return False


def _flash_qla(case: Case) -> Provider:
    """Returns FlashQLA's kernels, of Gated DeltaNet with 128 features, forward and backward."""
    need_cuda("the package")
    if case.get("encoding", "none") != "none" or case["n"] == 1:
        raise Unsupported("it has no positions, and no chunk for a single token")
    if case.get("decay") != "head" or {case["head_dim"], case.get("value_dim", 128)} != {128}:
        raise Unsupported("it has one decay for a head, and 128 features")
    if case["dtype"] == "float32":
        raise Unsupported("the kernels take float16 and bfloat16 only")
    try:
        attend = importlib.import_module("flash_qla").chunk_gated_delta_rule
    except (ImportError, AttributeError) as error:
        raise Unsupported(f"flash-qla is not installed: {error}") from error
    bounds_of = _remember_bounds()

    def run(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, **options: Any) -> Tensor:
        normalize = options.get("normalize", False)
        more = bounds_of(options)
        out: Tensor = attend(q, k, v, options["decay"], beta, use_qk_l2norm_in_kernel=normalize, **more)[0]
        return out

    return run


PROVIDERS: dict[str, Callable[[Case], Provider]] = {
    "torch": lambda case: delta_attention,
    "torch_compile": lambda case: compile_at_best(delta_attention),
    "fla": _fla,
    "flash_qla": _flash_qla,
}
