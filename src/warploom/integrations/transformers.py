"""Flash attention in the models of Hugging Face's transformers, version 5.

A model of transformers asks for two functions by one name: a mask function, once for each kind of layer, and an
attention function in every layer. What the first returns, the model hands to the second. Here it is a `Visible`:
which keys are seen, as `warploom.flash_attention` takes it, and never a matrix of queries by keys.

Keys of a padded batch are moved to the front of each entry, whose length is read on the device; that is a copy of
keys and values. Where queries are padded too they are moved as well, and the entries then are packed sequences.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from types import FunctionType
from typing import Any, NamedTuple

import torch

from warploom import flash_attention, lrpe_rotate
from warploom.errors import ArgumentError, BackendError, fault

__all__ = ["Visible", "patch_rotary", "register"]

Tensor = torch.Tensor

_ATTENTION = "warploom's attention in transformers"
_INSTALL = "register: needs transformers 5 (pip install warploom[transformers])"


@dataclass(frozen=True)
class Visible:
    """Which keys the queries of a forward see: what the mask function returns, and the attention function reads.

    With ``cu_seqlens_q`` queries and keys of all batch entries are packed sequences, in this order; without, the
    last query of an entry stands at its last key, which ``seqused_k`` says. It is no tensor: what expects a matrix
    fails at once.
    """

    causal: bool
    window: tuple[int | None, int | None] | None = None
    cu_seqlens_q: Tensor | None = None  # (S + 1,) int32 over the B · N queries
    cu_seqlens_k: Tensor | None = None  # (S + 1,) int32 over the B · M keys
    order_q: Tensor | None = None  # (B, N): the queries of each entry in this order, those that count first
    place_q: Tensor | None = None  # (B, N): where each query stands in that order
    order_k: Tensor | None = None  # (B, M)
    seqused_k: Tensor | None = None  # (B,): keys of an entry
    positions: bool = False  # whether sequences are those of position_ids that start again

    ndim = 0  # asked for by transformers, which looks for masks of two axes and of four

    def contiguous(self) -> Visible:
        """Itself: transformers asks this of every mask that it makes ahead."""
        return self

    def to(self, *args: Any, **kwargs: Any) -> Visible:
        """With its tensors on another device; for models on several."""
        values: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(self)}
        moved: Any = {n: t.to(*args, **kwargs) for n, t in values.items() if isinstance(t, Tensor)}
        return replace(self, **moved)


def register(name: str = "warploom") -> None:
    """Make ``attn_implementation=name`` choose `warploom.flash_attention` in models of transformers.

    Attention and masks are both registered, so a model keeps all it does with another implementation: padding on
    either side, ``position_ids`` that start again and ``cu_seq_lens_*`` for packed sequences, sliding windows,
    capped logits, sinks, grouped queries, ``generate`` with dynamic and static caches, training with gradient
    checkpointing and with ``torch.compile``.

    A model that asks for something else gets an error, at its first forward: dropout of attention weights, a mask
    that is given as a matrix or changed by a function, a mask with gaps between tokens, weights returned
    (``output_attentions``), a bias by position, chunks shorter than the sequence, the paged cache of continuous
    batching. Attention of a padded query is 0.

    Masks are looked at on the host, once in a forward: ``torch.compile`` splits the model there, in front of the
    first layer, and ``fullgraph=True`` refuses it.

    Args:
        name: Of the implementation, without ``flash``, which transformers takes for other packages.

    Raises:
        BackendError: There is no transformers with such an interface.
        ArgumentError: A name that transformers uses itself.

    Source: `AttentionInterface` and `AttentionMaskInterface` of transformers 5.

    Example:
        ```python
        from transformers import LlamaConfig, LlamaForCausalLM

        from warploom.integrations import transformers as integration

        integration.register()
        config = LlamaConfig(hidden_size=64, num_attention_heads=4, num_hidden_layers=2, vocab_size=128)
        model = LlamaForCausalLM._from_config(config, attn_implementation="warploom")
        ```
    """
    if name in ("eager", "sdpa") or "flash" in name or "flex" in name or "|" in name:
        raise fault(ArgumentError, "register", "name", "one that transformers does not use itself", repr(name))
    masks = _masks()
    try:
        from transformers import AttentionInterface
    except ImportError as error:
        raise BackendError(f"register: transformers has no AttentionInterface: {error}") from error
    AttentionInterface.register(name, attention)
    masks.AttentionMaskInterface.register(name, mask)


def _masks() -> Any:
    """The module of transformers that makes masks."""
    try:
        from transformers import masking_utils
    except ImportError as error:
        raise BackendError(f"{_INSTALL}: {error}") from error
    if "q_offset" not in inspect.signature(masking_utils.sdpa_mask).parameters:
        raise BackendError(f"{_INSTALL}; this one is older")
    return masking_utils


# ----------------------------------------------------------------------------------------------------------
# Attention
# ----------------------------------------------------------------------------------------------------------


def attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Visible | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention function: of (B, Hq, N, D), (B, Hkv, M, D) and (B, Hkv, M, E), (B, N, Hq, E) and no weights.

    ``s_aux`` (Hq,) are sinks.
    Without a mask, whether it is causal is what the call or else the layer says.
    """
    _refuse_options(dropout, kwargs)
    visible = attention_mask
    if visible is None:
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        visible = Visible(causal, _symmetric(sliding_window, causal))
    elif not isinstance(visible, Visible):
        raise fault(ArgumentError, _ATTENTION, "attention_mask", "(B, M), or None", _shown(visible))
    if cu_seq_lens_q is not None:
        visible = _with_sequences(visible, cu_seq_lens_q, cu_seq_lens_k)
    q, k, v = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    batch, tokens = q.shape[:2]
    if visible.order_q is not None:
        q = _taken(q, visible.order_q)
    if visible.order_k is not None:
        k, v = _taken(k, visible.order_k), _taken(v, visible.order_k)
    if visible.cu_seqlens_q is not None:
        q, k, v = (t.reshape(1, -1, *t.shape[2:]) for t in (q, k, v))
    out = flash_attention(
        q, k, v,
        causal=visible.causal, scale=scaling, window=visible.window, softcap=softcap, sink=s_aux,
        cu_seqlens_q=visible.cu_seqlens_q, cu_seqlens_k=visible.cu_seqlens_k, seqused_k=visible.seqused_k,
    )  # fmt: skip
    out = out.reshape(batch, tokens, *out.shape[2:])
    return out if visible.place_q is None else _taken(out, visible.place_q), None


_UNKNOWN = {
    "position_bias": "a bias by position",
    "head_mask": "a mask of heads",
    "cache": "the paged cache of continuous batching",
}


def _refuse_options(dropout: float, kwargs: dict[str, Any]) -> None:
    if dropout:
        raise fault(ArgumentError, _ATTENTION, "dropout", "0: weights exist nowhere to be dropped", dropout)
    if kwargs.get("output_attentions"):
        raise fault(ArgumentError, _ATTENTION, "output_attentions", "False: weights exist nowhere", True)
    for argument, what in _UNKNOWN.items():
        if kwargs.get(argument) is not None:
            expected = f"None, since {what} is nothing it does"
            raise fault(ArgumentError, _ATTENTION, argument, expected, _shown(kwargs[argument]))


def _shown(x: object) -> str:
    return f"a tensor {tuple(x.shape)}" if isinstance(x, Tensor) else repr(x)


def _symmetric(sliding_window: int | None, causal: bool) -> tuple[int | None, int | None] | None:
    """The window that an attention function of transformers makes of a size, where there is no mask to say it."""
    if sliding_window is None:
        return None
    return sliding_window - 1, None if causal else sliding_window - 1


def _with_sequences(visible: Visible, cu_seq_lens_q: Tensor, cu_seq_lens_k: Tensor | None) -> Visible:
    """Packed sequences as the call gives them; padding besides is a contradiction."""
    if visible.seqused_k is not None or (visible.cu_seqlens_q is not None and not visible.positions):
        expected = "None where an attention_mask hides keys, or a cache is not full"
        raise fault(ArgumentError, _ATTENTION, "cu_seq_lens_q", expected, _shown(cu_seq_lens_q))
    other = cu_seq_lens_q if cu_seq_lens_k is None else cu_seq_lens_k
    return replace(visible, cu_seqlens_q=cu_seq_lens_q, cu_seqlens_k=other)


def _taken(x: Tensor, order: Tensor) -> Tensor:
    """Tokens (B, N, H, F) of each entry in an order (B, N)."""
    return x.take_along_dim(order[:, :, None, None], 1)


# ----------------------------------------------------------------------------------------------------------
# Masks
# ----------------------------------------------------------------------------------------------------------


class _Pattern(NamedTuple):
    """What a mask function of transformers comes down to."""

    causal: bool
    window: tuple[int | None, int | None] | None = None
    sequence: Tensor | None = None  # (B, N): which packed sequence a token belongs to


def mask(*args: Any, attention_mask: Any = None, **kwargs: Any) -> Visible:
    """The mask function: what `transformers.masking_utils.sdpa_mask` takes, and a `Visible` of it."""
    if isinstance(attention_mask, Visible):  # made ahead, for a compiled step of ``generate``
        return attention_mask
    visible: Visible = _visible(*args, attention_mask=attention_mask, **kwargs)
    return visible


@torch.compiler.disable(  # type: ignore[untyped-decorator]
    reason="masks are looked at on the host"
)
def _visible(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    device: torch.device | str = "cpu",
    **_: Any,
) -> Visible:
    """The keys that a mask function of transformers shows to the queries ``q_offset …`` among ``kv_offset …``."""
    if attention_mask is not None and attention_mask.dim() != 2:
        raise fault(ArgumentError, _ATTENTION, "attention_mask", "(B, M), or None", _shown(attention_mask))
    pattern = _pattern(mask_function, local_size, kv_offset + kv_length)
    window = pattern.window
    if window is not None and all(bound is None or bound >= kv_length - 1 for bound in window):
        window = None
    if pattern.sequence is not None:
        bounds = _bounds_of(pattern.sequence)
        return Visible(pattern.causal, window, bounds, bounds, positions=True)
    aligned = pattern.causal or window is not None
    # Keys behind the last query are not seen, or not written yet.
    used = q_offset + q_length - kv_offset if aligned else kv_length
    full = not isinstance(used, Tensor) and used == kv_length
    real = None if attention_mask is None else attention_mask[:, kv_offset : kv_offset + kv_length].bool()
    if real is not None and bool(real.all()) and real.shape[1] >= int(used):
        real = None
    if full and real is None:
        return Visible(pattern.causal, window)
    if not isinstance(used, Tensor) and not 0 <= used <= kv_length:
        raise fault(ArgumentError, _ATTENTION, "past_key_values", f"of {used} keys or more", kv_length)
    key = torch.arange(kv_length, device=device)
    there = (key < used).expand(batch_size, -1)
    if real is None or attention_mask is None:
        return Visible(pattern.causal, window, seqused_k=there.sum(1))
    _refuse_gaps(attention_mask)
    there = there & torch.nn.functional.pad(real.to(device), (0, kv_length - real.shape[1]))
    return _packed(Visible(pattern.causal, window), there, used, q_length)


def _refuse_gaps(attention_mask: Tensor) -> None:
    """Behind a gap distances are others; and of a prompt padded on the right, ``generate`` takes a padded query."""
    real = attention_mask.bool()
    starts = real & ~torch.nn.functional.pad(real, (1, 0))[:, :-1]
    if bool((starts.sum(1) > 1).any()):
        expected = "without gaps between tokens: pad prompts on the left to generate from them"
        raise fault(ArgumentError, _ATTENTION, "attention_mask", expected, "a mask with gaps")


def _packed(visible: Visible, there: Tensor, used: int | Tensor, q_length: int) -> Visible:
    """What is seen where only the keys ``there`` (B, M) are real; the last query stands at key ``used − 1``."""
    batch, kv_length = there.shape
    device = there.device
    order_k = None
    queries = torch.ones(batch, q_length, dtype=torch.bool, device=device)
    if visible.causal or visible.window is not None:
        queries = there[:, torch.arange(q_length, device=device) + (used - q_length)]
    counts = there.sum(1)
    if not bool((there == (torch.arange(kv_length, device=device) < counts[:, None])).all()):
        order_k = torch.argsort(~there, dim=1, stable=True)
    if bool(queries.all()):
        return replace(visible, order_k=order_k, seqused_k=counts)
    order_q = torch.argsort(~queries, dim=1, stable=True)
    cu_seqlens = _bounds(queries.sum(1), counts, q_length, kv_length)
    return Visible(visible.causal, visible.window, *cu_seqlens, order_q, order_q.argsort(1), order_k)


def _bounds(queries: Tensor, keys: Tensor, q_length: int, kv_length: int) -> tuple[Tensor, Tensor]:
    """Bounds of three sequences for each entry: its queries and keys, padded queries, and keys that none sees."""
    first = torch.arange(len(queries), device=queries.device)
    q_start, k_start = first * q_length, first * kv_length
    q_end, k_end = q_start + q_length, k_start + keys
    q = torch.stack((q_start, q_start + queries, q_end), 1).flatten()
    k = torch.stack((k_start, k_end, k_end), 1).flatten()
    last = torch.tensor([len(queries)], device=queries.device)
    return torch.cat((q, last * q_length)).int(), torch.cat((k, last * kv_length)).int()


def _bounds_of(sequence: Tensor) -> Tensor:
    """Bounds of packed sequences, from the sequence of every token (B, N); none goes on in the next entry."""
    starts = torch.ones_like(sequence, dtype=torch.bool)
    starts[:, 1:] = sequence[:, 1:] != sequence[:, :-1]
    first = starts.flatten().nonzero().flatten()
    return torch.cat((first, first.new_tensor([sequence.numel()]))).int()


def _pattern(mask_function: Callable[..., Any] | None, local_size: int | None, keys: int) -> _Pattern:
    """The pattern of a mask function, which is one of those that transformers makes; any other is refused."""
    masks = _masks()
    patterns = [(masks.causal_mask_function, _Pattern(True)), (masks.bidirectional_mask_function, _Pattern(False))]
    if local_size is not None:
        both = masks.sliding_window_bidirectional_mask_function(local_size)
        patterns += [
            (masks.sliding_window_causal_mask_function(local_size), _Pattern(True, (local_size - 1, None))),
            (both, _Pattern(False, (local_size, local_size))),
        ]
        if keys <= local_size:  # all in one chunk
            patterns.append((masks.chunked_causal_mask_function(local_size, _ANY), _Pattern(True)))
    for function, pattern in patterns:
        if _is_like(mask_function, function, []):
            return pattern
        found: list[Any] = []
        packed = _packed_pattern(masks, function)
        if _is_like(mask_function, packed, found):
            return pattern._replace(sequence=found[0])
    name = getattr(mask_function, "__qualname__", mask_function)
    raise BackendError(
        f"{_ATTENTION} cannot do the mask of this model ({name}): it does causal and full attention, with a "
        "sliding window, padding and packed sequences"
    )


_ANY, _SEQUENCE = object(), object()


def _packed_pattern(masks: Any, function: Any) -> Any:
    """What transformers makes of a mask function where `_SEQUENCE` says which sequence a token belongs to."""
    if hasattr(masks, "packed_sequence_compatibility_function"):
        return masks.packed_sequence_compatibility_function(function, _ANY, _SEQUENCE)
    return masks.and_masks(function, masks.packed_sequence_mask_function(_SEQUENCE))  # up to 5.17


def _is_like(given: Any, like: Any, found: list[Any]) -> bool:
    """Whether two functions are made of the same code and values; what stands for `_SEQUENCE` goes to ``found``."""
    if like is _SEQUENCE:
        found.append(given)
        return True
    if like is _ANY or given is like:
        return True
    if isinstance(given, FunctionType) and isinstance(like, FunctionType):
        if given.__code__ is not like.__code__:
            return False
        cells = [[cell.cell_contents for cell in f.__closure__ or ()] for f in (given, like)]
        return _is_like(tuple(cells[0]), tuple(cells[1]), found)
    if isinstance(given, tuple) and isinstance(like, tuple):
        return len(given) == len(like) and all(_is_like(g, x, found) for g, x in zip(given, like))
    return type(given) is type(like) and isinstance(given, int) and given == like


# ----------------------------------------------------------------------------------------------------------
# Rotary positions
# ----------------------------------------------------------------------------------------------------------


class _Turn(NamedTuple):
    """By which angles tokens turn: what a patched rotary embedding returns for cosines, and for sines."""

    theta: Tensor  # (F,), radians a position
    position_ids: Tensor  # (B or 1, N)
    scaling: float


_FIXED = ("default", "linear", "llama3", "yarn")
"""Kinds of rotary embedding whose frequencies depend on no length."""
_ROTARY = "apply_rotary_pos_emb"


def patch_rotary(model: torch.nn.Module) -> int:
    """Turn queries and keys of a model of transformers by `warploom.lrpe_rotate`.

    One kernel for queries and one for keys take the place of cosines, sines, and six elementwise operations for
    each; angles are exact at any position, in bfloat16 too. Works under gradient checkpointing and
    ``torch.compile``.

    Args:
        model: A model, or the part that holds its rotary embedding and its layers. Changed in place.

    Returns:
        How many rotary embeddings were patched.

    Raises:
        ArgumentError: There is none, its frequencies change with the length, or the model turns other pairs of
            features than ``(f, f + D/2)``. Nothing has been changed then.

    Source: Su et al., "RoFormer", 2021, arXiv 2104.09864.

    Example:
        ```python
        from transformers import LlamaConfig, LlamaForCausalLM

        from warploom.integrations.transformers import patch_rotary

        model = LlamaForCausalLM(LlamaConfig(hidden_size=64, num_attention_heads=4, num_hidden_layers=2))
        patch_rotary(model)  # 1: one rotary embedding, which all layers share
        ```
    """
    embeddings = [m for m in model.modules() if hasattr(m, "inv_freq") and hasattr(m, "attention_scaling")]
    files = {sys.modules[type(m).__module__] for m in model.modules()}
    files = {file for file in files if hasattr(file, _ROTARY)}
    if not embeddings or not files:
        raise fault(ArgumentError, "patch_rotary", "model", "one with a rotary embedding", type(model).__name__)
    for embedding in embeddings:
        kind = getattr(embedding, "rope_type", None)
        if kind not in _FIXED:
            expected = f"of a rotary embedding that is one of {', '.join(_FIXED)}"
            raise fault(ArgumentError, "patch_rotary", "model", expected, repr(kind))
        for file in files:
            _check_pairs(embedding, getattr(file, _ROTARY))
    for file in files:
        if not hasattr(getattr(file, _ROTARY), "of_cosines"):
            setattr(file, _ROTARY, _turning(getattr(file, _ROTARY)))
    for embedding in embeddings:
        embedding.forward = _embedding_of(embedding)
    return len(embeddings)


def _embedding_of(embedding: Any) -> Callable[..., tuple[_Turn, _Turn]]:
    def forward(x: Tensor, position_ids: Tensor) -> tuple[_Turn, _Turn]:
        turn = _Turn(embedding.inv_freq.to(x.device), position_ids.to(x.device), embedding.attention_scaling)
        return turn, turn

    return forward


def _turning(of_cosines: Callable[..., Any]) -> Callable[..., Any]:
    """``apply_rotary_pos_emb`` that takes a `_Turn`, and what it took before."""

    def apply_rotary_pos_emb(
        q: Tensor, k: Tensor, cos: Any, sin: Any, unsqueeze_dim: int = 1, **options: Any
    ) -> Any:
        if not isinstance(cos, _Turn):
            return of_cosines(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim, **options)
        return _turned(q, cos, unsqueeze_dim), _turned(k, cos, unsqueeze_dim)

    apply_rotary_pos_emb.of_cosines = of_cosines  # type: ignore[attr-defined]
    return apply_rotary_pos_emb


def _turned(x: Tensor, turn: _Turn, heads_axis: int) -> Tensor:
    """Tokens (B, H, N, D), or (B, N, H, D) where heads are on axis 2; of the features, the first 2·F turn."""
    theta, position_ids, scaling = turn
    x = x.transpose(1, 2) if heads_axis == 1 else x
    features = 2 * theta.shape[0]
    out = lrpe_rotate(x[..., :features], theta, position_ids=position_ids.expand(x.shape[0], -1))
    out = out if scaling == 1 else out * scaling
    if x.shape[-1] > features:
        out = torch.cat((out, x[..., features:]), -1)
    return out.transpose(1, 2) if heads_axis == 1 else out


def _check_pairs(embedding: Any, apply: Callable[..., Any]) -> None:
    """Whether a model turns features as `_turned` does, tried on some."""
    theta = embedding.inv_freq.detach().cpu()
    positions = torch.tensor([[0, 1, 7]])
    q = torch.linspace(-1, 1, 2 * 3 * 2 * len(theta)).reshape(1, 2, 3, -1)
    angles = torch.cat((theta, theta)) * positions[..., None]
    scaling = embedding.attention_scaling
    expected, _ = getattr(apply, "of_cosines", apply)(q, q, angles.cos() * scaling, angles.sin() * scaling)
    found = _turned(q, _Turn(theta, positions, scaling), 1)
    if expected.shape != found.shape or not torch.allclose(expected, found, rtol=1e-4, atol=1e-4):
        raise fault(ArgumentError, "patch_rotary", "model", "one that turns pairs (f, f + D/2)", apply.__module__)
