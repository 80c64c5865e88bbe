"""What else computes attention: plain PyTorch, its fused kernels, and other libraries'.

All get (B, N, H, D) and none copies it. Nothing here runs a kernel of ours, so that records of these providers
outlast a change to one.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable

import torch

from warploom.ops.spec import Case, Unsupported, compiled_at_best, need_cuda

Tensor = torch.Tensor
Provider = Callable[..., Tensor]


def plain(q: Tensor, k: Tensor, v: Tensor, causal: bool = False, float32_precision: str | None = None) -> Tensor:
    """What a user writes in PyTorch: the whole matrix of weights, in the dtype of the inputs."""
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], dim=1) for t in (k, v))
    logits = q @ k.mT * q.shape[-1] ** -0.5
    if causal:
        hidden = torch.ones(logits.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        logits = logits.masked_fill(hidden, -torch.inf)
    out: Tensor = logits.softmax(-1) @ v
    return out.transpose(1, 2)


def _sdpa(backend: str, case: Case) -> Provider:
    """PyTorch's fused attention with one of its kernels."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    need_cuda("the fused kernels")
    chosen = getattr(SDPBackend, backend)
    grouped = case.get("key_heads", case["heads"]) != case["heads"]
    if case["dtype"] == "float32" and backend != "EFFICIENT_ATTENTION":
        raise Unsupported("the kernel takes float16 and bfloat16 only")
    if grouped and backend == "EFFICIENT_ATTENTION":
        raise Unsupported("the kernel has no grouped-query attention")

    def attend(
        q: Tensor, k: Tensor, v: Tensor, causal: bool = False, float32_precision: str | None = None
    ) -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        with sdpa_kernel(chosen):
            try:
                out = torch.nn.functional.scaled_dot_product_attention(
                    q, k, v, is_causal=causal, enable_gqa=grouped
                )
            except RuntimeError as error:
                if "No available kernel" in str(error):
                    raise Unsupported("PyTorch says that the kernel cannot run this case") from error
                raise
        return out.transpose(1, 2)

    return attend


def _flex_attention(case: Case) -> Provider:
    """FlexAttention, compiled for the case, with a block mask made once, outside the timing."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    need_cuda("the compiled kernel")
    mask = None
    if case["causal"]:
        mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, case["n"], case["n"], device="cuda")
    grouped = case.get("key_heads", case["heads"]) != case["heads"]
    compiled = compiled_at_best(flex_attention)

    def attend(
        q: Tensor, k: Tensor, v: Tensor, causal: bool = False, float32_precision: str | None = None
    ) -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        out: Tensor = compiled(q, k, v, block_mask=mask, enable_gqa=grouped)
        return out.transpose(1, 2)

    return attend


def _flash_attn(module: str, case: Case) -> Provider:
    """The FlashAttention package: ``flash_attn`` for version 2, ``flash_attn.cute`` for version 4."""
    need_cuda("the package")
    if case["dtype"] == "float32":
        raise Unsupported("the kernel takes float16 and bfloat16 only")
    try:
        function = importlib.import_module(module).flash_attn_func
    except (ImportError, AttributeError) as error:
        raise Unsupported(f"{module} is not installed") from error

    def attend(
        q: Tensor, k: Tensor, v: Tensor, causal: bool = False, float32_precision: str | None = None
    ) -> Tensor:
        out = function(q, k, v, causal=causal)
        first: Tensor = out[0] if isinstance(out, tuple) else out
        return first

    return attend


PROVIDERS: dict[str, Callable[[Case], Provider]] = {
    "torch": lambda case: plain,
    "torch_compile": lambda case: compiled_at_best(plain),
    "sdpa_cudnn": functools.partial(_sdpa, "CUDNN_ATTENTION"),
    "sdpa_flash": functools.partial(_sdpa, "FLASH_ATTENTION"),
    "sdpa_efficient": functools.partial(_sdpa, "EFFICIENT_ATTENTION"),
    "flex_attention": _flex_attention,
    "flash_attn": functools.partial(_flash_attn, "flash_attn"),
    "flash_attn_4": functools.partial(_flash_attn, "flash_attn.cute"),
}
BUDGETS = {"sdpa_efficient": 4.0}
"""PyTorch's memory-efficient kernel rounds more than the others: up to 2.5 times our budget in float32."""
