"""Other implementations of attention with a mask, a bias or slopes. Nothing here runs a kernel of ours."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from warploom.ops.flash_attention import peers
from warploom.ops.flash_attention.block_mask import BlockMask
from warploom.ops.flash_attention.patterns import make_pattern
from warploom.ops.flash_attention.peers import Provider, attend_fused, need_device_of
from warploom.ops.spec import Case, Unsupported, compile_at_best, need_cuda

Tensor = torch.Tensor


def _with_matrix(attend: Callable[..., Tensor]) -> Provider:
    """Returns attention by `attend`, given (B, H, N, D) and a boolean matrix of what is seen, made once."""
    made: list[Tensor] = []

    def call(
        q: Tensor, k: Tensor, v: Tensor, causal: bool = False, mask: BlockMask | None = None,
        bias: Tensor | None = None, alibi: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        if not made and mask is not None:
            made.append(mask.dense())
        if not made and causal:
            made.append(torch.ones(q.shape[1], k.shape[1], dtype=torch.bool, device=q.device).tril())
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return attend(q, k, v, made[0] if made else None, bias, alibi).transpose(1, 2)

    return call


def _add(seen: Tensor | None, bias: Tensor | None, alibi: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
    """Returns what is added to logits, or a boolean matrix where that is all."""
    if alibi is not None:
        place = torch.arange(k.shape[2], device=q.device)
        bias = (alibi[:, None, None] * (place - place[: q.shape[2], None]))[None].to(q.dtype)
    if bias is None or seen is None:
        return seen if bias is None else bias
    return bias.masked_fill(~seen, -torch.inf)


def _plain(
    q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None, bias: Tensor | None, alibi: Tensor | None
) -> Tensor:
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    logits = q @ k.mT * q.shape[-1] ** -0.5
    added = _add(seen, bias, alibi, q, k)
    if added is not None:
        logits = logits.masked_fill(~added, -torch.inf) if added.dtype == torch.bool else logits + added
    out: Tensor = logits.softmax(-1) @ v
    return out


def _sdpa(backend: str, case: Case) -> Provider:
    """Returns PyTorch's fused attention with one of its kernels and a matrix for its mask."""
    need_device_of(backend)
    grouped = case.get("key_heads", case["heads"]) != case["heads"]
    if grouped and backend == "EFFICIENT_ATTENTION":
        raise Unsupported("the kernel has no grouped-query attention")

    def attend(
        q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None, bias: Tensor | None, alibi: Tensor | None
    ) -> Tensor:
        return attend_fused(backend, q, k, v, attn_mask=_add(seen, bias, alibi, q, k), enable_gqa=grouped)

    return _with_matrix(attend)


def _flex_attention(case: Case) -> Provider:
    """Returns FlexAttention, compiled for the case, with a block mask made once, outside the timing."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    need_cuda("the compiled kernel")
    n, m = case["n"], case.get("m", case["n"])
    name = case.get("pattern", "causal" if case.get("causal") else None)
    mask = None
    if name is not None:
        mask = create_block_mask(make_pattern(name, n, m, "cuda"), None, None, n, m, device="cuda")
    grouped = case.get("key_heads", case["heads"]) != case["heads"]

    def whole(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, alibi: Tensor | None) -> Tensor:
        def biased(logit: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            if alibi is not None:
                return logit + alibi[h] * (j - i)
            if bias is None:
                return logit
            return logit + (bias[0, h, i, j] if bias.shape[2] > 1 else bias[b, 0, 0, j])

        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        changed = None if bias is None and alibi is None else biased
        out: Any = flex_attention(q, k, v, score_mod=changed, block_mask=mask, enable_gqa=grouped)
        return out.transpose(1, 2)  # type: ignore[no-any-return]

    compiled = compile_at_best(whole)

    def attend(
        q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None, alibi: Tensor | None = None, **_: Any
    ) -> Tensor:
        out: Tensor = compiled(q, k, v, bias, alibi)
        return out

    return attend


PROVIDERS: dict[str, Callable[[Case], Provider]] = {
    "torch": lambda case: _with_matrix(_plain),
    "torch_compile": lambda case: _with_matrix(compile_at_best(_plain)),
    "sdpa_cudnn": functools.partial(_sdpa, "CUDNN_ATTENTION"),
    "sdpa_flash": functools.partial(_sdpa, "FLASH_ATTENTION"),
    "sdpa_efficient": functools.partial(_sdpa, "EFFICIENT_ATTENTION"),
    "flex_attention": _flex_attention,
}
BUDGETS = peers.BUDGETS | {"torch": 4.0}
"""Eager attention with a bias has logits of 16 bits, as in decoding."""
