"""Masks of transformers: the keys that each query sees, read from the values of a mask function."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Hashable
from dataclasses import dataclass, fields, replace
from types import FunctionType
from typing import Any, NamedTuple

import torch

from warploom.errors import ArgumentError, BackendError, fault

Tensor = torch.Tensor

ATTENTION = "warploom's attention in transformers"
INSTALL = "register: needs transformers 5 (pip install warploom[transformers])"


@dataclass(frozen=True)
class Visible:
    """The keys that queries see, as arguments of attention; the result of the mask function.

    With ``cu_seqlens_q``, queries and keys of all batch entries are packed sequences, in this order. Without, the
    last query of an entry is aligned with its last key, given by ``seqused_k``. It is no tensor, and use as a
    matrix raises.
    """

    causal: bool
    window: tuple[int | None, int | None] | None = None
    queries: int | None = None  # queries of an entry; None for any number
    keys: int | None = None  # keys of an entry; None for any number
    cu_seqlens_q: Tensor | None = None  # (S + 1,) int32 over the B · N queries
    cu_seqlens_k: Tensor | None = None  # (S + 1,) int32 over the B · M keys; None if equal to those of the queries
    order_k: Tensor | None = None  # (B, M): an order of the keys of each entry in which visible ones come first
    seqused_k: Tensor | None = None  # (B,): visible keys of an entry
    positions: bool = False  # True if sequences come from position_ids that start again

    ndim = 0  # read by transformers, which distinguishes masks of two and of four axes

    def contiguous(self) -> Visible:
        """Returns itself, for transformers, which calls this on every mask."""
        return self

    def to(self, *args: Any, **kwargs: Any) -> Visible:
        """Returns it with its tensors on another device, for models on several devices."""
        values: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(self)}
        moved: Any = {n: t.to(*args, **kwargs) for n, t in values.items() if isinstance(t, Tensor)}
        return replace(self, **moved)

    def __getitem__(self, key: Any) -> Any:
        raise _make_matrix_error("a slice of the mask")

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise _make_matrix_error(getattr(function, "__name__", str(function)))


def _make_matrix_error(wanted: str) -> BackendError:
    return BackendError(
        f"{ATTENTION} makes no matrix of its mask, and this model wants one ({wanted}): it has attention of its "
        'own beside that of transformers\' interface. Choose attn_implementation="eager" or "sdpa"'
    )


@functools.cache
def import_masking() -> Any:
    """Returns the module of transformers that makes masks."""
    try:
        from transformers import masking_utils
    except ImportError as error:
        raise BackendError(f"{INSTALL}: {error}") from error
    if "q_offset" not in inspect.signature(masking_utils.sdpa_mask).parameters:
        raise BackendError(f"{INSTALL}; this one is older")
    return masking_utils


def mask(*args: Any, attention_mask: Any = None, **kwargs: Any) -> Visible:
    """Returns a `Visible`, given the arguments of `transformers.masking_utils.sdpa_mask`."""
    if isinstance(attention_mask, Visible):  # made ahead, for a compiled step of ``generate``
        return attention_mask
    visible: Visible = _make_visible(*args, attention_mask=attention_mask, **kwargs)
    return visible


@torch.compiler.disable(  # type: ignore[untyped-decorator]
    reason="masks are read on the host"
)
def _make_visible(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    config: Any = None,
    **_: Any,
) -> Visible:
    """Returns which keys from ``kv_offset`` on a mask function shows to the queries from ``q_offset`` on."""
    if attention_mask is not None and attention_mask.dim() != 2:
        shown = f"a tensor {tuple(attention_mask.shape)}"
        raise fault(ArgumentError, ATTENTION, "attention_mask", "(B, M), or None", shown)
    static = isinstance(q_offset, Tensor)  # a static cache, in a compiled step, whose mask keeps its form
    call = _MaskCall(batch_size, q_length, kv_length, int(q_offset), kv_offset, local_size, use_vmap, static)
    function = import_masking().causal_mask_function if mask_function is None else mask_function
    pattern = _find_pattern(function, call, torch.device(device))
    real = None if attention_mask is None else _read_padding(attention_mask, pattern, call)
    visible = _describe(pattern, real, call)
    chunked = local_size is not None and local_size == getattr(config, "attention_chunk_size", None)
    return replace(visible, positions=attention_mask is None and not chunked).to(device)


class _MaskCall(NamedTuple):
    """The sizes and offsets of a mask."""

    batch: int
    queries: int
    keys: int
    q_offset: int
    kv_offset: int
    local_size: int | None
    use_vmap: bool
    static: bool

    @property
    def places(self) -> Tensor:
        """(N,), the index of the key at each query's position."""
        return torch.arange(self.queries) + (self.q_offset - self.kv_offset)


class _Pattern(NamedTuple):
    """The pattern of a mask: runs of neighbouring queries with their own keys, causal or windowed or neither.

    Tensors are (B, N), or (1, N) for all entries, on the CPU.
    """

    causal: bool
    window: tuple[int | None, int | None] | None
    starts: Tensor  # True if a run starts at a query
    first: Tensor  # the first key of a query's run
    end: Tensor  # one behind the last key of a query's run

    @property
    def aligned(self) -> bool:
        """True if a query's position among the keys matters."""
        return self.causal or self.window is not None


# ----------------------------------------------------------------------------------------------------------
# The pattern of a mask function
# ----------------------------------------------------------------------------------------------------------

_PAIRS = 2**24
"""The most pairs of queries and keys that are read at once."""
_PAIRS_ON_HOST = 2**18
"""The most pairs for which a mask that depends on no tensor is read on the CPU, without waiting for a GPU."""
_MOST_KNOWN = 1024
_known: dict[Hashable, _Pattern] = {}


def _find_pattern(function: Callable[..., Any], call: _MaskCall, device: torch.device) -> _Pattern:
    """Returns the pattern of a mask function. That of a function without tensors is read once for each call."""
    form = _find_form(function)
    if form is None:
        return _infer(*_read_rows(function, call, call.batch, device), call, function)
    key = (form, call._replace(batch=1))
    if key not in _known:
        if len(_known) >= _MOST_KNOWN:
            _known.clear()
        on_host = call.queries * call.keys <= _PAIRS_ON_HOST
        rows = _read_rows(function, call, 1, torch.device("cpu") if on_host else device)
        _known[key] = _infer(*rows, call, function)
    return _known[key]


def _find_form(x: Any) -> Hashable | None:
    """Returns the code and numbers of a function of transformers' masks; None if it has anything else."""
    if isinstance(x, bool | int):
        return type(x), x
    if isinstance(x, tuple):
        forms = tuple(_find_form(part) for part in x)
        return None if None in forms else forms
    if not isinstance(x, FunctionType) or x.__globals__ is not import_masking().__dict__ or x.__defaults__:
        return None
    cells = _find_form(tuple(cell.cell_contents for cell in x.__closure__ or ()))
    return None if cells is None else (x.__code__, cells)


def _read_rows(
    function: Callable[..., Any], call: _MaskCall, batch: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Returns the first key of every query (B, N), and one behind its last. A gap between them raises."""
    count = max(_PAIRS // max(batch * call.keys, 1), 1)
    parts = []
    for start in range(0, call.queries, count):
        seen = import_masking().sdpa_mask(
            batch, min(count, call.queries - start), call.keys, call.q_offset + start, call.kv_offset,
            mask_function=function, allow_is_causal_skip=False, use_vmap=call.use_vmap, device=device,
        )[:, 0].contiguous().view(torch.uint8)  # fmt: skip
        end = call.keys - seen.flip(-1).argmax(-1)
        parts.append(torch.stack((seen.argmax(-1), end, seen.sum(-1, dtype=torch.int32))))
    first, end, seen_keys = torch.cat(parts, -1).cpu()
    if not torch.equal(end - first, seen_keys):
        raise _make_unknown_error(function)
    return first, end


def _infer(first: Tensor, end: Tensor, call: _MaskCall, function: Any) -> _Pattern:
    """Returns the pattern in which every query sees exactly the keys ``first … end − 1``."""
    places = call.places.expand_as(first)
    starts = torch.ones_like(first, dtype=torch.bool)
    starts[:, 1:] = (first[:, 1:] >= places[:, 1:]) & (end[:, :-1] <= places[:, 1:])
    run = starts.flatten().cumsum(0) - 1
    heads = starts.flatten().nonzero().flatten()
    tails = torch.cat((heads[1:], heads.new_tensor([run.numel()]))) - 1
    run_first = first.flatten()[heads][run].view_as(first)
    run_end = end.flatten()[tails][run].view_as(first)
    last = places.flatten()[tails][run].view_as(first)

    left = _find_bound(places - first, first > run_first)
    # If the queries start behind a window, it reaches back from the first of them.
    back = places[0, 0] - first[:, 0]
    reach = int(back[0])
    whole = not call.static or call.local_size is None or reach in (call.local_size - 1, call.local_size)
    if whole and bool((first[:, 0] > 0).all()) and bool((back == reach).all()) and left in (None, reach):
        head = run.view_as(first) == run.view_as(first)[:, :1]
        if torch.equal(first[head], (places - reach).clamp(min=0)[head]):
            left, run_first = reach, torch.where(head, 0, run_first)

    causal = torch.equal(end, torch.minimum(places + 1, run_end)) and torch.equal(run_end, last + 1)
    right = None if causal else _find_bound(end - 1 - places, end < run_end)
    aligned = causal or left is not None or right is not None
    expected_first = run_first if left is None else torch.maximum(run_first, places - left)
    expected_end = run_end if right is None else torch.minimum(run_end, places + 1 + right)
    expected_end = torch.minimum(run_end, places + 1) if causal else expected_end
    right_numbers = all(bound is None or bound >= 0 for bound in (left, right))
    if not right_numbers or not torch.equal(first, expected_first) or not torch.equal(end, expected_end):
        raise _make_unknown_error(function)
    if aligned and not torch.equal(run_end, last + 1):
        if bool((last >= call.keys).any()):
            expected = f"of {call.queries + call.q_offset - call.kv_offset} keys or more"
            raise fault(ArgumentError, ATTENTION, "past_key_values", expected, call.keys)
        raise _make_unknown_error(function)
    window = None if left is None and right is None else (left, right)
    return _Pattern(causal, window, starts, run_first, run_end)


def _find_bound(distances: Tensor, bounded: Tensor) -> int | None:
    """Returns the largest distance of those that a window bounds."""
    return int(distances[bounded].max()) if bool(bounded.any()) else None


def _make_unknown_error(function: Any) -> BackendError:
    name = getattr(function, "__qualname__", function)
    return BackendError(
        f"{ATTENTION} cannot do the mask of this model ({name}): it does causal and full attention, with a sliding "
        "window, padding, and sequences or chunks that see themselves alone"
    )


# ----------------------------------------------------------------------------------------------------------
# Arguments of attention
# ----------------------------------------------------------------------------------------------------------


def _read_padding(attention_mask: Tensor, pattern: _Pattern, call: _MaskCall) -> tuple[Tensor, Tensor] | None:
    """Returns the first key (B, 1) of each entry without padding, and one behind the last; None without padding."""
    real = attention_mask.bool().cpu()
    starts = real & ~torch.nn.functional.pad(real, (1, 0))[:, :-1]
    if bool((starts.sum(1) > 1).any()):
        # Behind a gap distances would differ, and with padding on the right generate continues a padded query.
        expected = "without gaps between tokens: pad prompts on the left to generate from them"
        raise fault(ArgumentError, ATTENTION, "attention_mask", expected, "a mask with gaps")
    real = real[:, call.kv_offset : call.kv_offset + call.keys]
    used = int(pattern.end.max()) if pattern.aligned else call.keys
    if real.shape[1] >= used and bool(real.all()):
        return None
    first = real.byte().argmax(1, keepdim=True)
    return first, first + real.sum(1, keepdim=True)


def _describe(pattern: _Pattern, real: tuple[Tensor, Tensor] | None, call: _MaskCall) -> Visible:
    """Returns the arguments of attention for a pattern and padding, on the CPU."""
    visible = Visible(pattern.causal, pattern.window, call.queries, call.keys)
    batch = call.batch if real is not None else len(pattern.starts)
    starts, first, end = (x.expand(batch, -1) for x in pattern[2:])
    there = torch.ones_like(starts)
    if real is not None:
        if pattern.aligned:
            there = (call.places >= real[0]) & (call.places < real[1])
            starts = torch.cat((starts[:, :1], starts[:, 1:] | (there[:, 1:] != there[:, :-1])), 1)
        first = torch.maximum(first, real[0])
        end = torch.where(there, torch.minimum(end, real[1]), first).clamp(min=first)
    if bool(there.all()) and not bool(starts[:, 1:].any()):
        return _describe_entries(visible, first[:, 0], end[:, 0], call)
    cu_seqlens = _find_bounds(starts, first, end, there, call)
    return replace(visible, cu_seqlens_q=cu_seqlens[0], cu_seqlens_k=cu_seqlens[1])


def _describe_entries(visible: Visible, first: Tensor, end: Tensor, call: _MaskCall) -> Visible:
    """Returns the arguments if all queries of an entry see keys from ``first`` (B,) to ``end``."""
    if bool((first > 0).any()):
        order_k = (torch.arange(call.keys) + first[:, None]).clamp(max=call.keys - 1)
        visible = replace(visible, order_k=order_k.expand(call.batch, -1))
    elif not call.static and bool((end == call.keys).all()):
        return visible
    return replace(visible, seqused_k=(end - first).expand(call.batch).contiguous())


def _find_bounds(
    starts: Tensor, first: Tensor, end: Tensor, there: Tensor, call: _MaskCall
) -> tuple[Tensor, Tensor | None]:
    """Returns bounds of packed sequences: one for each run, and one without queries for keys that no run sees."""
    starts, first, end, there = (x.expand(call.batch, -1) for x in (starts, first, end, there))
    heads = starts.flatten().nonzero().flatten()
    entry = torch.arange(call.batch)[:, None] * call.keys
    seen = there.flatten()[heads] & (end > first).flatten()[heads]
    first, end = ((x + entry).flatten()[heads] * seen for x in (first, end))
    passed = end.cummax(0).values
    before = torch.cat((passed.new_zeros(1), passed[:-1]))
    first, end = torch.where(seen, first, before), torch.where(seen, end, before)
    queries, keys = call.batch * call.queries, call.batch * call.keys
    if not call.static and torch.equal(first, before) and int(passed[-1]) == keys:
        cu_seqlens_q = torch.cat((heads, heads.new_tensor([queries]))).int()
        cu_seqlens_k = torch.cat((first, first.new_tensor([keys]))).int()
        return cu_seqlens_q, None if torch.equal(cu_seqlens_q, cu_seqlens_k) else cu_seqlens_k
    cu_seqlens_q = torch.cat((torch.stack((heads, heads), 1).flatten(), heads.new_tensor([queries] * 2)))
    last = torch.stack((passed[-1], passed.new_tensor(keys)))
    cu_seqlens_k = torch.cat((torch.stack((before, first), 1).flatten(), last))
    return cu_seqlens_q.int(), cu_seqlens_k.int()
