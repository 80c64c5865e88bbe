"""The attention function of transformers' models, by `warploom.flash_attention`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from warploom import flash_attention
from warploom.errors import ArgumentError, fault
from warploom.integrations.transformers.masks import ATTENTION, Visible, read_matrix

Tensor = torch.Tensor


def attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Visible | Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Returns attention (B, N, Hq, E) of (B, Hq, N, D), (B, Hkv, M, D) and (B, Hkv, M, E), and None for weights.

    ``s_aux`` (Hq,) are sinks, and ``position_bias`` (B or 1, Hq or 1, N or 1, M) is added to logits. A mask may be
    a matrix of the same form, boolean or added too. Without one, attention is causal if the call, or else the
    layer, says so.
    """
    refuse_options(dropout, kwargs)
    visible: Any = attention_mask
    sizes = query.shape[0], query.shape[2], key.shape[2]
    if visible is None:
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        visible = Visible(causal, _make_window(sliding_window, causal))
    elif isinstance(visible, Tensor):
        _check_matrix(visible, query, key)
        visible = read_matrix(visible, *sizes)
    elif not isinstance(visible, Visible):
        raise fault(ArgumentError, ATTENTION, "attention_mask", "(B, M), (B, H, N, M) or None", _format(visible))
    elif (visible.queries, visible.keys) != (query.shape[2], key.shape[2]):
        expected = f"of {query.shape[2]} queries and {key.shape[2]} keys, which {type(module).__name__} has"
        raise fault(ArgumentError, ATTENTION, "attention_mask", expected, f"{visible.queries} and {visible.keys}")
    if cu_seq_lens_q is not None:
        visible = _add_sequences(visible, cu_seq_lens_q, cu_seq_lens_k)
    bias = visible.bias
    if position_bias is not None:
        bias = position_bias if bias is None else position_bias + bias
    if bias is not None and not visible.in_place:
        visible = visible.spread(*sizes)
    q, k, v = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    batch, tokens = q.shape[:2]
    if visible.order_k is not None:
        k, v = (t.take_along_dim(visible.order_k[:, :, None, None], 1) for t in (k, v))
    if visible.cu_seqlens_q is not None:
        q, k, v = (t.reshape(1, -1, *t.shape[2:]) for t in (q, k, v))
    out = flash_attention(
        q, k, v,
        causal=visible.causal, scale=scaling, window=visible.window, softcap=softcap, sink=s_aux,
        cu_seqlens_q=visible.cu_seqlens_q, cu_seqlens_k=visible.cu_seqlens_k, seqused_k=visible.seqused_k,
        mask=visible.mask, bias=bias,
    )  # fmt: skip
    return out.reshape(batch, tokens, *out.shape[2:]), None


_UNKNOWN = {
    "position_bias": "a bias by position",
    "head_mask": "a mask of heads",
}


def refuse_options(dropout: float, kwargs: dict[str, Any]) -> None:
    """Refuse what transformers may ask of attention and ours does not do.

    Raises:
        ArgumentError: It is asked for.
    """
    if dropout:
        raise fault(ArgumentError, ATTENTION, "dropout", "0: weights exist nowhere to be dropped", dropout)
    if kwargs.get("output_attentions"):
        raise fault(ArgumentError, ATTENTION, "output_attentions", "False: weights exist nowhere", True)
    for argument, what in _UNKNOWN.items():
        if kwargs.get(argument) is not None:
            expected = f"None, since {what} is nothing it does"
            raise fault(ArgumentError, ATTENTION, argument, expected, _format(kwargs[argument]))


def _check_matrix(mask: Tensor, query: Tensor, key: Tensor) -> None:
    expected = (*query.shape[:3], key.shape[2])
    fits = mask.dim() == 4 and all(own in (1, size) for own, size in zip(mask.shape[:3], expected))
    if not fits or mask.shape[3] != expected[3]:
        wanted = f"(B, M), or (B or 1, H or 1, N or 1, M) = {expected}"
        raise fault(ArgumentError, ATTENTION, "attention_mask", wanted, _format(mask))
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise fault(ArgumentError, ATTENTION, "attention_mask", "boolean, or of floats to add", str(mask.dtype))


def _format(x: object) -> str:
    return f"a tensor {tuple(x.shape)}" if isinstance(x, Tensor) else repr(x)


def _make_window(sliding_window: int | None, causal: bool) -> tuple[int | None, int | None] | None:
    """Returns the window for a size, as transformers' attention does without a mask."""
    if sliding_window is None:
        return None
    return sliding_window - 1, None if causal else sliding_window - 1


def _add_sequences(visible: Visible, cu_seq_lens_q: Tensor, cu_seq_lens_k: Tensor | None) -> Visible:
    """Returns the packed sequences of the call. Padding beside them raises."""
    hidden = visible.seqused_k is not None or visible.mask is not None or visible.bias is not None
    if hidden or (visible.cu_seqlens_q is not None and not visible.positions):
        expected = "None where an attention_mask or chunks hide keys, or a cache is not full"
        raise fault(ArgumentError, ATTENTION, "cu_seq_lens_q", expected, _format(cu_seq_lens_q))
    return replace(visible, cu_seqlens_q=cu_seq_lens_q, cu_seqlens_k=cu_seq_lens_k)
