"""Flash attention behind PyTorch's own `scaled_dot_product_attention`, by PyTorch's registry of implementations.

PyTorch's flash attention is a few operators of `aten` for CUDA. While warploom is the active implementation, these
run its kernels. They run PyTorch's own where ours do not support a call: with dropout, or on GPUs before Ampere.
PyTorch still chooses among flash, cuDNN's and efficient attention for each call without a mask. Its own flash
attention takes no masks, so calls with one are taken before that choice, where flash attention is enabled.
"""

from __future__ import annotations

from typing import Any

import torch

from warploom import flash_attention
from warploom.errors import ArgumentError, BackendError, fault
from warploom.runtime.backend import use_triton
from warploom.runtime.sharding import is_sharded

__all__ = ["register"]

Tensor = torch.Tensor

_LOG2_E = 1.4426950408889634
_MAX_FEATURES = 256  # of our kernels and PyTorch's
_DENSE, _DENSE_BACKWARD = "_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_backward"
_PACKED, _PACKED_BACKWARD = "_flash_attention_forward", "_flash_attention_backward"
_ATTENTION = "scaled_dot_product_attention"


def register(name: str = "warploom") -> None:
    """Register warploom as an implementation of PyTorch's flash attention.

    After ``torch.nn.attention.activate_flash_attention_impl(name)``, calls of `scaled_dot_product_attention` and
    `torch.nn.attention.varlen.varlen_attn` that PyTorch gives to flash attention on a GPU run on our kernels,
    forward and backward, until ``torch.nn.attention.restore_flash_attention_impl()``. Needs PyTorch 2.11 or newer.

    Calls with an ``attn_mask``, boolean or of numbers, run on our kernels too, float32 included; numbers have a
    gradient. PyTorch's own stands where a call has dropout, or flash attention is disabled.

    On Hopper and newer GPUs PyTorch may prefer cuDNN's attention to flash attention for calls without a mask. To
    choose flash attention, call under ``torch.nn.attention.sdpa_kernel(SDPBackend.FLASH_ATTENTION)``, or once
    ``torch.backends.cuda.enable_cudnn_sdp(False)``.

    Args:
        name: Name of the implementation.

    Raises:
        ArgumentError: The name is no text, or one that PyTorch uses itself.
        BackendError: This PyTorch has no such registry.

    Source: `torch.nn.attention.register_flash_attention_impl`.

    Example:
        ```python
        import torch

        from warploom.integrations import sdpa

        sdpa.register()
        if torch.cuda.is_available():
            torch.nn.attention.activate_flash_attention_impl("warploom")
            torch.nn.attention.restore_flash_attention_impl()  # and back
        ```
    """
    if not isinstance(name, str) or name in ("FA2", "FA3", "FA4"):
        raise fault(ArgumentError, "register", "name", "one that PyTorch does not use itself", repr(name))
    add = getattr(torch.nn.attention, "register_flash_attention_impl", None)
    if add is None or not hasattr(torch.library, "get_kernel"):
        raise BackendError(
            f"register: PyTorch {torch.__version__} has no registry of flash attention; 2.11 and newer do"
        )
    add(name, register_fn=_Active)


class _Active:
    """The registration of our kernels in place of PyTorch's, until `remove`."""

    def __init__(self) -> None:
        overrides = {
            _DENSE: _dense,
            _DENSE_BACKWARD: _dense_backward,
            _PACKED: _attend_packed,
            _PACKED_BACKWARD: _attend_packed_backward,
        }
        # Look them up before they are overridden. A PyTorch without CUDA has none.
        found = {name: _kernel_of(name) for name in overrides}
        self.library: Any = torch.library.Library("aten", "IMPL")
        for name, override in overrides.items():
            self.library.impl(name, _prefer(override, found[name]), "CUDA", with_keyset=True)
        # PyTorch composes this function of others, also for autograd. In inference mode there is no key for that.
        for key in ("AutogradCUDA", "CUDA"):
            self.library.impl(_ATTENTION, _attend, key)

    def remove(self) -> None:
        """Restore PyTorch's own kernels."""
        if self.library is not None:
            self.library._destroy()
        self.library = None


def _kernel_of(name: str) -> Any:
    try:
        return torch.library.get_kernel(f"aten::{name}", "CUDA")
    except RuntimeError:
        return None


def _prefer(ours: Any, theirs: Any) -> Any:
    """Returns a function that runs our kernel, or PyTorch's if ours returns None."""

    def run(keys: Any, *arguments: Any, **options: Any) -> Any:
        results = ours(*arguments, **options)
        if results is not None:
            return results
        if theirs is None:
            raise BackendError(
                "this PyTorch has no flash attention of its own, and the kernels do not support the call"
            )
        return theirs.call_boxed(keys, *arguments, **options)

    return run


def _is_supported(q: Tensor, v: Tensor, dropout_p: float) -> bool:
    """Returns True if the kernels support a call."""
    features = max(q.shape[-1], v.shape[-1])
    return dropout_p == 0 and features <= _MAX_FEATURES and use_triton("flash_attention", "auto", q)


def _make_placeholders(q: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns placeholders for the state of a random generator, and for debugging weights."""
    state = torch.zeros(2, dtype=torch.uint64, device=q.device)
    return state, torch.zeros((), dtype=torch.uint64, device=q.device), q.new_empty(0)


def _forward(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """Returns attention (B, N, Hq, E) and lse (B, Hq, N)."""
    with torch.no_grad():
        out, lse = flash_attention(q, k, v, **options, return_lse=True, backend="triton")
    return out, lse


def _backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    bounds: tuple[Tensor | None, Tensor | None], window: tuple[int | None, int | None], scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Returns the gradients of q, k and v, given the output and lse that PyTorch saved."""
    from warploom.ops.flash_attention.operator import OPERATOR, Saved
    from warploom.ops.flash_attention.validation import FlashOptions

    # Our backward reads row_max in powers of two, and row_sum relative to it. Here row_max is lse, and row_sum 1.
    seen = lse > -torch.inf
    statistics = torch.stack((lse.float() * _LOG2_E, seen.float()))
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    backward: Any = OPERATOR.backward_operator
    saved = Saved(q, k, v, out, statistics, None, *bounds, None)
    options = FlashOptions(*window, scale, precision=None)
    dq, dk, dv, _ = backward.op(grad, None, *saved, *options, [True, True, True, False])
    return dq, dk, dv


def _window(is_causal: bool, left: int | None = None, right: int | None = None) -> tuple[int | None, int | None]:
    """Returns the window of the kernels, with None for no bound instead of −1."""
    bounds = [None if bound is None or bound < 0 else bound for bound in (left, right)]
    return bounds[0], 0 if is_causal else bounds[1]


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Stands in for ``aten::scaled_dot_product_attention``, and takes calls with a mask itself."""
    if attn_mask is not None and not is_causal and torch.backends.cuda.flash_sdp_enabled():
        fits = not is_sharded((query, key, value, attn_mask)) and _is_supported(query, value, dropout_p)
        mask = _spread_mask(query, key, value, attn_mask, enable_gqa) if fits else None
        if mask is not None:
            q, k, v = (t.transpose(1, 2) for t in (query, key, value))
            option: Any = {"mask" if mask.dtype == torch.bool else "bias": mask}
            out: Tensor = flash_attention(q, k, v, scale=scale, backend="triton", **option)
            return out.transpose(1, 2)
    theirs: Any = torch.ops.aten.scaled_dot_product_attention.default.decompose
    options = {"scale": scale, "enable_gqa": enable_gqa}
    return theirs(query, key, value, attn_mask, dropout_p, is_causal, **options)  # type: ignore[no-any-return]


def _spread_mask(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, enable_gqa: bool) -> Tensor | None:
    """Returns the mask with four axes, as `flash_attention` takes it; None if the kernels do not take the call."""
    if any(t.dim() != 4 or t.numel() == 0 or t.dtype != q.dtype for t in (q, k, v)) or mask.dim() > 4:
        return None
    if mask.dtype not in (torch.bool, torch.float32, q.dtype) or mask.device != q.device:
        return None
    batch, heads, tokens, features = q.shape
    key_batch, key_heads, keys, key_features = k.shape
    grouped = enable_gqa and heads % key_heads == 0
    if (key_batch, key_features, v.shape[:3]) != (batch, features, k.shape[:3]) or not (
        key_heads == heads or grouped
    ):
        return None
    mask = mask[(None,) * (4 - mask.dim())]
    sizes = (batch, heads, tokens, keys)
    if any(own not in (1, size) for own, size in zip(mask.shape, sizes)):
        return None
    if mask.dtype == torch.bool:
        return mask.expand(-1, -1, tokens, keys)
    return mask.expand(-1, -1, -1, keys)


def _dense(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> Any:
    """Stands in for ``aten::_scaled_dot_product_flash_attention`` on (B, H, N, D)."""
    if return_debug_mask or not _is_supported(query, value, dropout_p):
        return None
    q, k, v = (t.transpose(1, 2) for t in (query, key, value))
    out, lse = _forward(q, k, v, window=_window(is_causal), scale=scale)
    return out.transpose(1, 2), lse, None, None, query.shape[2], key.shape[2], *_make_placeholders(query)


def _dense_backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor,
    cum_seq_q: Tensor | None, cum_seq_k: Tensor | None, max_q: int, max_k: int, dropout_p: float, is_causal: bool,
    philox_seed: Tensor, philox_offset: Tensor, *, scale: float | None = None,
) -> Any:  # fmt: skip
    """Stands in for ``aten::_scaled_dot_product_flash_attention_backward``."""
    if not _is_supported(query, value, dropout_p):
        return None
    grad, q, k, v, o = (t.transpose(1, 2) for t in (grad_out, query, key, value, out))
    found = _backward(grad, q, k, v, o, logsumexp, (None, None), _window(is_causal), scale)
    return tuple(t.transpose(1, 2) for t in found)


def _attend_packed(
    query: Tensor, key: Tensor, value: Tensor, cum_seq_q: Tensor | None, cum_seq_k: Tensor | None, max_q: int,
    max_k: int, dropout_p: float, is_causal: bool, return_debug_mask: bool, *, scale: float | None = None,
    window_size_left: int | None = None, window_size_right: int | None = None, seqused_k: Tensor | None = None,
    alibi_slopes: Tensor | None = None, block_table: Tensor | None = None, num_splits: int | None = None,
) -> Any:  # fmt: skip
    """Stands in for ``aten::_flash_attention_forward`` on (T, H, D) with bounds, or on (B, N, H, D)."""
    special = any(x is not None for x in (alibi_slopes, block_table, seqused_k))
    if return_debug_mask or special or not _is_supported(query, value, dropout_p):
        return None
    q, k, v = (t if t.dim() == 4 else t[None] for t in (query, key, value))
    window = _window(is_causal, window_size_left, window_size_right)
    out, lse = _forward(q, k, v, window=window, scale=scale, cu_seqlens_q=cum_seq_q, cu_seqlens_k=cum_seq_k)
    return (*((out, lse) if query.dim() == 4 else (out[0], lse[0])), *_make_placeholders(query))


def _attend_packed_backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor,
    cum_seq_q: Tensor | None, cum_seq_k: Tensor | None, max_q: int, max_k: int, dropout_p: float, is_causal: bool,
    rng_state: Tensor, unused: Tensor, *, scale: float | None = None, window_size_left: int | None = None,
    window_size_right: int | None = None,
) -> Any:  # fmt: skip
    """Stands in for ``aten::_flash_attention_backward``."""
    if not _is_supported(query, value, dropout_p):
        return None
    packed = query.dim() == 3
    tensors = (grad_out, query, key, value, out, logsumexp)
    grad, q, k, v, o, lse = (t[None] for t in tensors) if packed else tensors
    window = _window(is_causal, window_size_left, window_size_right)
    found = _backward(grad, q, k, v, o, lse, (cum_seq_q, cum_seq_k), window, scale)
    return tuple(t[0] for t in found) if packed else found
