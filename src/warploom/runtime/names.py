"""Names of arguments in other libraries, for errors that say what to write here.

A public function takes unknown arguments as ``*_others`` and ``**_unknown``, which costs nothing where there are
none, and passes them to `refuse_unknown`. `hide_catch_alls` hides both from its signature. It also lets a call
begin that lacks an argument, since another library's name may stand for it; `refuse_missing` ends it otherwise.
The methods of a class are looked after by `name_arguments`, outside of them.
"""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, Final, NoReturn, TypeVar

from warploom.errors import UnknownArgumentError

F = TypeVar("F", bound=Callable[..., Any])
C = TypeVar("C", bound=type)

OTHER_NAMES: tuple[tuple[str, str, str], ...] = (
    ("is_causal", "causal", "it aligns the last query with the last key"),
    ("attn_mask", "mask", "a boolean tensor, true where a key takes part; numbers are a `bias`"),
    ("attn_mask", "", "there is no mask; where there are `causal`, `window`, lengths or bounds, they hide keys"),
    ("mask", "", "there is no mask; where there are `causal`, `window`, lengths or bounds, they hide keys"),
    ("attention_mask", "mask", "a boolean tensor, true where a key takes part; numbers are a `bias`"),
    (
        "attention_mask",
        "",
        "there is no mask; where there are `causal`, `window`, lengths or bounds, they hide keys",
    ),
    ("key_padding_mask", "mask", "a boolean tensor, the other way round: true where a key takes part"),
    (
        "key_padding_mask",
        "",
        "there is no mask; where there are `causal`, `window`, lengths or bounds, they hide keys",
    ),
    ("dropout_p", "", "there is no dropout; leave it out, or apply PyTorch's to the output"),
    ("dropout", "", "there is no dropout; leave it out, or apply PyTorch's to the output"),
    ("softmax_scale", "scale", "a factor of the inner products"),
    ("sm_scale", "scale", "a factor of the inner products"),
    ("window_size", "window", "`(left, right)`, with None for no bound instead of -1"),
    ("block_mask", "mask", "what `warploom.block_mask` makes of it"),
    ("mask_mod", "mask", "what `warploom.block_mask` makes of it"),
    ("score_mod", "bias", "numbers that are added to the logits; caps are `softcap`, distances `alibi`"),
    ("Q_LEN", "N", "the number of queries"),
    ("KV_LEN", "M", "the number of keys"),
    ("BLOCK_SIZE", "block", "leave it out; there is one size"),
    ("attn_bias", "bias", "numbers that are added to the logits"),
    ("alibi_slopes", "alibi", "slopes of the heads"),
    ("alibi_slopes", "", "there are no slopes; positions are those of `lrpe_rotate`"),
    ("enable_gqa", "", "leave it out; `k` and `v` may have fewer heads"),
    ("deterministic", "", "leave it out; results always are"),
    ("return_attn_probs", "return_lse", "the second result is the logarithm of each row's sum"),
    ("return_softmax_lse", "return_lse", "the second result is the logarithm of each row's sum"),
    ("cache_seqlens", "seqused_k", "keys of each batch entry, new ones included"),
    ("page_table", "block_table", "pages of each batch entry"),
    ("slot_mapping", "block_table", "pages; places in them follow from `seqused_k`"),
    ("cu_seqlens_q", "cu_seqlens", "bounds of packed sequences, each of which attends to itself"),
    ("cu_seqlens_k", "cu_seqlens", "bounds of packed sequences, each of which attends to itself"),
    ("cu_seq_lens_q", "cu_seqlens_q", "bounds of the queries"),
    ("cu_seq_lens_q", "cu_seqlens", "bounds of packed sequences, each of which attends to itself"),
    ("cu_seq_lens_k", "cu_seqlens_k", "bounds of the keys"),
    ("cu_seq_lens_k", "cu_seqlens", "bounds of packed sequences, each of which attends to itself"),
    ("cu_seq_lens", "cu_seqlens", "bounds of packed sequences, each of which attends to itself"),
    ("max_seqlen_q", "", "leave it out; no greatest length is needed"),
    ("max_seqlen_k", "", "leave it out; no greatest length is needed"),
    ("max_seqlen", "", "leave it out; no greatest length is needed"),
    ("max_length_q", "", "leave it out; no greatest length is needed"),
    ("max_length_k", "", "leave it out; no greatest length is needed"),
    ("cos", "theta", "frequencies in radians per position; there are no tables of cosines and sines"),
    ("sin", "theta", "frequencies in radians per position; there are no tables of cosines and sines"),
    ("rotary_cos", "theta", "frequencies in radians per position; there are no tables of cosines and sines"),
    ("rotary_sin", "theta", "frequencies in radians per position; there are no tables of cosines and sines"),
    ("rotary_interleaved", "interleaved", "pairs of neighbouring features instead of halves"),
    ("freqs", "theta", "frequencies in radians per position"),
    ("seqlen_offset", "offset", "the position of the first token"),
    ("seqlen_offsets", "offset", "the position of the first token"),
    ("g", "decay", "logarithms of decays"),
    ("output_final_state", "return_state", "the second result is the last state"),
    ("use_qk_l2norm_in_kernel", "normalize", "queries and keys become as long as one"),
    ("embed_dim", "d_model", "features of a token"),
    ("hidden_size", "d_model", "features of a token"),
    ("n_embd", "d_model", "features of a token"),
    ("dim", "d_model", "features of a token"),
    ("dim", "head_dim", "features of a head"),
    ("num_heads", "heads", "the number of heads"),
    ("n_heads", "heads", "the number of heads"),
    ("n_head", "heads", "the number of heads"),
    ("nhead", "heads", "the number of heads"),
    ("num_attention_heads", "heads", "the number of heads"),
    ("num_key_value_heads", "kv_heads", "heads of keys and values"),
    ("num_kv_heads", "kv_heads", "heads of keys and values"),
    ("n_kv_heads", "kv_heads", "heads of keys and values"),
    ("num_layers", "layers", "the number of blocks"),
    ("n_layers", "layers", "the number of blocks"),
    ("n_layer", "layers", "the number of blocks"),
    ("num_hidden_layers", "layers", "the number of blocks"),
    ("intermediate_size", "d_ff", "inner features of the feed-forward layer"),
    ("hidden_dim", "d_ff", "inner features of the feed-forward layer"),
    ("dim_feedforward", "d_ff", "inner features of the feed-forward layer"),
    ("max_position_embeddings", "context_length", "the most tokens in a sequence"),
    ("max_seq_len", "context_length", "the most tokens in a sequence"),
    ("block_size", "context_length", "the most tokens in a sequence"),
    ("rope_theta", "base", "frequencies are `base ** (-f / F)`"),
    ("rope_scaling", "scaling", "of frequencies, for longer sequences"),
    ("rms_norm_eps", "norm_eps", "epsilon of the norms"),
    ("kdim", "context_dim", "features of the other sequence"),
    ("batch_first", "", "leave it out; the batch is first always"),
    ("need_weights", "", "leave it out; weights are not returned"),
    ("max_length", "max_new_tokens", "new tokens alone, without those of the prompt"),
    ("input_ids", "tokens", "`(B, N)` integers"),
    ("input_ids", "prompt", "`(B, N)` integers"),
    ("labels", "targets", "the next tokens, which are not shifted again"),
    ("past_key_values", "cache", "the cache of the layers"),
    ("do_sample", "", "leave it out; `temperature=0` takes the most likely token"),
    ("eos_token_id", "stop", "tokens that end a sequence"),
)
"""A name in another library, the argument here or an empty text, and an explanation. The first entry whose argument
a function has is taken."""

_TABLES = "theta holds frequencies in radians per position; tables of cosines and sines are not needed: {call}"


class Missing:
    """The value of an argument that a call lacks."""


MISSING: Final = Missing()


def hide_catch_alls(function: F) -> F:
    """Give a function a signature without ``*_others`` and ``**_unknown``, and `MISSING` for what a call lacks."""
    signature = inspect.signature(function, eval_str=True)
    known = []
    positional: list[Any] = []
    by_name: dict[str, Any] = {}
    for parameter in signature.parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        known.append(parameter)
        default = MISSING if parameter.default is parameter.empty else parameter.default
        if parameter.kind is parameter.KEYWORD_ONLY:
            by_name[parameter.name] = default
        else:
            positional.append(default)
    function.__defaults__, function.__kwdefaults__ = tuple(positional), by_name
    function.__signature__ = signature.replace(parameters=known)  # type: ignore[attr-defined]
    return function


def refuse_missing(function: str, argument: str, value: object) -> None:
    """Raise if a call lacks an argument.

    Raises:
        TypeError: It does, with the text of Python's own error.
    """
    if value is MISSING:
        raise TypeError(f"{function}() missing a required argument: {argument!r}")


def name_arguments(cls: C) -> C:
    """Let a class refuse arguments that its methods do not have, as functions do."""
    for method in ("__init__", "forward", "generate", "stream"):
        if method in vars(cls):
            setattr(cls, method, _refusing(vars(cls)[method]))
    return cls


def _refusing(method: F) -> F:
    suffix = "" if method.__name__ in ("__init__", "forward") else f".{method.__name__}"
    _, *parameters = inspect.signature(method).parameters.values()  # without self
    known = {p.name: p for p in parameters}
    names = frozenset(known)
    most = 1 + sum(p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters)

    @functools.wraps(method)
    def checked(*given: Any, **named: Any) -> Any:
        if len(given) > most or not names.issuperset(named):
            unknown = {x: value for x, value in named.items() if x not in known}
            _refuse(f"{type(given[0]).__name__}{suffix}", known, given[most:], unknown)
        return method(*given, **named)

    return checked  # type: ignore[return-value]


def refuse_unknown(function: Callable[..., Any], others: tuple[Any, ...], unknown: dict[str, Any]) -> NoReturn:
    """Raise for arguments that a function does not have.

    Args:
        function: The public function, see `hide_catch_alls`.
        others: The arguments by position that are too many.
        unknown: The arguments by name that it does not have.

    Raises:
        UnknownArgumentError: Always.
    """
    _refuse(function.__name__, inspect.signature(function).parameters, others, unknown)


def _refuse(
    name: str, parameters: Mapping[str, inspect.Parameter], others: tuple[Any, ...], unknown: dict[str, Any]
) -> NoReturn:
    for argument in unknown:
        raise UnknownArgumentError(f"{name}: there is no argument {argument}; {_advice(argument, parameters)}")
    positional = [p.name for p in parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    if positional[1:] == ["theta"]:
        raise UnknownArgumentError(f"{name}: {_TABLES.format(call=f'{name}({positional[0]}, theta)')}")
    named = [p.name for p in parameters.values() if p.kind is p.KEYWORD_ONLY]
    by_position = f"{name}: {', '.join(positional)} {'are' if positional[1:] else 'is'} given by position"
    if named:
        example = f"{named[0]}={others[0]!r}" if isinstance(others[0], bool | int | float) else f"{named[0]}=…"
        by_position += f", and others by name, as in {example}"
    raise UnknownArgumentError(f"{by_position}; got {len(positional) + len(others)} by position")


def _advice(argument: str, parameters: Mapping[str, inspect.Parameter]) -> str:
    for other, own, about in OTHER_NAMES:
        if other == argument and (not own or own in parameters):
            return f"here it is {own}: {about}" if own else about
    close = difflib.get_close_matches(argument, parameters, 1)
    if "config" in parameters and not close:
        return "sizes, attention and positions are in config, a `TransformerConfig`"
    return f"did you mean {close[0]}?" if close else f"there are {', '.join(parameters)}"
