"""Names of arguments in other libraries, for errors that say what to write here.

A public function takes unknown arguments as ``*_others`` and ``**_unknown``, which costs nothing where there are
none, and passes them to `refuse_unknown`. `hide_catch_alls` hides both from its signature. It also lets a call
begin that lacks an argument, since another library's name may stand for it; `refuse_missing` ends it otherwise.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable
from typing import Any, Final, NoReturn, TypeVar

from warploom.errors import UnknownArgumentError

F = TypeVar("F", bound=Callable[..., Any])

OTHER_NAMES: tuple[tuple[str, str, str], ...] = (
    ("is_causal", "causal", "it aligns the last query with the last key"),
    ("attn_mask", "", "there is no mask; `causal`, `window`, lengths and packed sequences hide keys"),
    ("dropout_p", "", "there is no dropout; leave it out, or apply PyTorch's to the output"),
    ("softmax_scale", "scale", "a factor of the inner products"),
    ("sm_scale", "scale", "a factor of the inner products"),
    ("window_size", "window", "`(left, right)`, with None for no bound instead of -1"),
    ("alibi_slopes", "", "there are no slopes; positions are those of `lrpe_rotate`"),
    ("enable_gqa", "", "leave it out; `k` and `v` may have fewer heads"),
    ("deterministic", "", "leave it out; results always are"),
    ("return_attn_probs", "return_lse", "the second result is the logarithm of each row's sum"),
    ("return_softmax_lse", "return_lse", "the second result is the logarithm of each row's sum"),
    ("cache_seqlens", "seqused_k", "keys of each batch entry, new ones included"),
    ("page_table", "block_table", "pages of each batch entry"),
    ("slot_mapping", "block_table", "pages; places in them follow from `seqused_k`"),
    ("cu_seqlens_q", "cu_seqlens", "bounds of packed sequences, of queries and keys alike"),
    ("cu_seqlens_k", "cu_seqlens", "bounds of packed sequences, of queries and keys alike"),
    ("max_seqlen_q", "", "leave it out; no greatest length is needed"),
    ("max_seqlen_k", "", "leave it out; no greatest length is needed"),
    ("max_seqlen", "", "leave it out; no greatest length is needed"),
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


def refuse_unknown(function: Callable[..., Any], others: tuple[Any, ...], unknown: dict[str, Any]) -> NoReturn:
    """Raise for arguments that a function does not have.

    Args:
        function: The public function, see `hide_catch_alls`.
        others: The arguments by position that are too many.
        unknown: The arguments by name that it does not have.

    Raises:
        UnknownArgumentError: Always.
    """
    parameters = inspect.signature(function).parameters
    name = function.__name__
    for argument in unknown:
        raise UnknownArgumentError(f"{name}: there is no argument {argument}; {_advice(argument, parameters)}")
    positional = [p.name for p in parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    if positional[1:] == ["theta"]:
        raise UnknownArgumentError(f"{name}: {_TABLES.format(call=f'{name}({positional[0]}, theta)')}")
    named = [p.name for p in parameters.values() if p.kind is p.KEYWORD_ONLY]
    example = f"{named[0]}={others[0]!r}" if isinstance(others[0], bool | int | float) else f"{named[0]}=…"
    raise UnknownArgumentError(
        f"{name}: {', '.join(positional)} are given by position, and others by name, as in {example}; "
        f"got {len(positional) + len(others)} by position"
    )


def _advice(argument: str, parameters: Any) -> str:
    for other, own, about in OTHER_NAMES:
        if other == argument and (not own or own in parameters):
            return f"here it is {own}: {about}" if own else about
    close = difflib.get_close_matches(argument, parameters, 1)
    return f"did you mean {close[0]}?" if close else f"there are {', '.join(parameters)}"
