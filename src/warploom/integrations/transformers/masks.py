"""Masks of transformers: the keys that each query sees, read from the values of a mask function or of a matrix.

Most masks come down to arguments of attention: causal or full, a window, lengths, packed sequences. What does not
is a mask by tiles, and a matrix of other numbers than 0 and the lowest is a bias.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Hashable
from dataclasses import dataclass, fields, replace
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch.utils.weak import WeakIdKeyDictionary

from warploom import BlockMask, block_mask
from warploom.errors import ArgumentError, BackendError, fault
from warploom.runtime.modes import holds_data

Tensor = torch.Tensor

ATTENTION = "warploom's attention in transformers"
INSTALL = "register: needs transformers 5 (pip install warploom[transformers])"


@dataclass(frozen=True)
class Visible:
    """The keys that queries see, as arguments of attention; the result of the mask function.

    With ``cu_seqlens_q``, queries and keys of all batch entries are packed sequences, in this order. Without, the
    last query of an entry is aligned with its last key, given by ``seqused_k``. With ``mask`` all is in that. It is
    no tensor, and use as a matrix raises.
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
    mask: BlockMask | Tensor | None = None  # (B or 1, Hq or 1, N, M): of what no other argument shows
    bias: Tensor | None = None  # (B or 1, Hq or 1, N or 1, M): numbers that a matrix adds to logits

    ndim = 0  # read by transformers, which distinguishes masks of two and of four axes

    def contiguous(self) -> Visible:
        """Returns itself, for transformers, which calls this on every mask."""
        return self

    def to(self, *args: Any, **kwargs: Any) -> Visible:
        """Returns it with its tensors on another device, for models on several devices."""
        values: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(self)}
        moved: Any = {n: t.to(*args, **kwargs) for n, t in values.items() if isinstance(t, Tensor | BlockMask)}
        return replace(self, **moved)

    @property
    def in_place(self) -> bool:
        """True if queries and keys of an entry keep their places, so that a bias fits them."""
        return self.cu_seqlens_q is None and self.order_k is None

    def spread(self, batch: int, queries: int, keys: int) -> Visible:
        """Returns the same keys as a boolean mask (B, 1, N, M), in which all keep their places."""
        if self.cu_seqlens_q is not None:
            cu_seqlens_q = self.cu_seqlens_q.long()
            cu_seqlens_k = cu_seqlens_q if self.cu_seqlens_k is None else self.cu_seqlens_k.long()
            q_idx = torch.arange(batch * queries, device=cu_seqlens_q.device).view(batch, queries, 1)
            kv_idx = torch.arange(batch * keys, device=cu_seqlens_q.device).view(batch, 1, keys)
            sequence = torch.searchsorted(cu_seqlens_q, q_idx, right=True)  # from 1 on
            seen = sequence == torch.searchsorted(cu_seqlens_k, kv_idx, right=True)
            seen = seen & (sequence < len(cu_seqlens_q))  # tokens behind the last belong to none
            offset = (cu_seqlens_k - cu_seqlens_q)[sequence.clamp(max=len(cu_seqlens_q) - 1)]
        elif self.seqused_k is not None:
            used = self.seqused_k.long()[:, None, None]
            first = torch.zeros_like(used) if self.order_k is None else self.order_k[:, :1, None].long()
            q_idx = torch.arange(queries, device=used.device)[:, None]
            kv_idx = torch.arange(keys, device=used.device)
            seen = ((kv_idx >= first) & (kv_idx < first + used)).expand(batch, queries, keys)
            offset = first + used - queries
        else:
            return self
        distance = kv_idx - q_idx - offset
        left, right = self.window or (None, None)
        if left is not None:
            seen = seen & (distance >= -left)
        if self.causal or right is not None:
            seen = seen & (distance <= (right or 0))
        return Visible(False, None, queries, keys, mask=seen[:, None])

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
    if attention_mask is not None:
        attention_mask = attention_mask.bool().cpu()
        _check_gaps(attention_mask, call)
    try:
        pattern = _find_pattern(function, call, torch.device(device))
        real = None if attention_mask is None else _find_padding(attention_mask, pattern, call)
        visible = _describe(pattern, real, call)
    except _IrregularError:
        return _make_mask(function, attention_mask, call, torch.device(device))
    if hasattr(config, _BIAS_OF_POSITIONS) and not visible.in_place:
        found: Any = visible.spread(batch_size, q_length, kv_length).mask
        return Visible(False, None, q_length, kv_length, mask=found if static else block_mask(found)).to(device)
    chunked = local_size is not None and local_size == getattr(config, "attention_chunk_size", None)
    return replace(visible, positions=attention_mask is None and not chunked).to(device)


_BIAS_OF_POSITIONS = "relative_attention_num_buckets"
"""A field of configurations whose layers add a bias by position to logits: T5's and others'."""


class _IrregularError(Exception):
    """An error for masks that are none of the patterns that arguments of attention show."""


def _make_mask(
    function: Callable[..., Any], attention_mask: Tensor | None, call: _MaskCall, device: torch.device
) -> Visible:
    """Returns the keys that a mask function shows, less padding, as a mask by tiles."""
    real = None
    if attention_mask is not None:
        real = attention_mask[:, call.kv_offset : call.kv_offset + call.keys].to(device)
        real = torch.nn.functional.pad(real, (0, call.keys - real.shape[1]))

    def shows(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Any:
        seen = function(b, h, q_idx + call.q_offset, kv_idx + call.kv_offset)
        return seen if real is None else seen & real[b, kv_idx]

    batch = 1 if real is None and _find_form(function) is not None else call.batch
    made: Any = block_mask(shows, B=batch, N=call.queries, M=call.keys, device=device)
    return Visible(False, None, call.queries, call.keys, mask=made.dense() if call.static else made)


_matrices: Any = WeakIdKeyDictionary()
"""The results of `read_matrix` by matrix, which all layers of a forward are given, each with its state then."""


def read_matrix(matrix: Tensor, batch: int, queries: int, keys: int) -> Visible:
    """Returns the keys that a matrix (B or 1, H or 1, N or 1, M) shows, and what it adds to logits.

    It is read on the host, once, where that can be. A boolean matrix is true where a key takes part.
    """
    visible = Visible(False, None, queries, keys)
    shows = matrix.dtype == torch.bool
    if not _is_readable(matrix):
        if shows:
            return replace(visible, mask=matrix.expand(-1, -1, queries, -1))
        return replace(visible, bias=matrix)
    state = matrix._version, batch, queries
    if matrix not in _matrices or _matrices[matrix][0] != state:
        if shows:
            found = _read_seen(matrix, batch, visible)
        else:
            hidden = matrix <= torch.finfo(matrix.dtype).min / 2
            if bool(((matrix == 0) | hidden).all()):
                found = _read_seen(~hidden, batch, visible)
            else:  # the lowest number times log₂ e would be below all
                found = replace(visible, bias=matrix.masked_fill(hidden, -torch.inf))
        _matrices[matrix] = state, found
    kept: Visible = _matrices[matrix][1]
    return kept


def _is_readable(matrix: Tensor) -> bool:
    if not holds_data(matrix) or matrix.requires_grad or matrix.is_inference():
        return False
    return not (matrix.is_cuda and torch.cuda.is_current_stream_capturing())


def _read_seen(seen: Tensor, batch: int, visible: Visible) -> Visible:
    """Returns the keys that a boolean matrix shows."""
    queries, keys = visible.queries or 0, visible.keys or 0
    seen = seen.expand(-1, -1, queries, -1)
    if seen.shape[1] == 1 and queries <= keys:
        call = _MaskCall(batch, queries, keys, keys - queries, 0, None, False, False)
        rows = seen[:, 0].view(torch.uint8).expand(batch, -1, -1)
        try:
            return _describe(_infer(_find_ends(rows).cpu(), call), None, call).to(seen.device)
        except _IrregularError:
            pass
    return replace(visible, mask=block_mask(seen))


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
_known: dict[Hashable, _Pattern | None] = {}


def _find_pattern(function: Callable[..., Any], call: _MaskCall, device: torch.device) -> _Pattern:
    """Returns the pattern of a mask function. That of a function without tensors is read once for each call."""
    form = _find_form(function)
    if form is None:
        return _infer(_read_rows(function, call, call.batch, device), call)
    key = (form, call._replace(batch=1))
    if key not in _known:
        if len(_known) >= _MOST_KNOWN:
            _known.clear()
        on_host = call.queries * call.keys <= _PAIRS_ON_HOST
        rows = _read_rows(function, call, 1, torch.device("cpu") if on_host else device)
        try:
            _known[key] = _infer(rows, call)
        except _IrregularError:
            _known[key] = None
    found = _known[key]
    if found is None:
        raise _IrregularError
    return found


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


def _read_rows(function: Callable[..., Any], call: _MaskCall, batch: int, device: torch.device) -> Tensor:
    """Returns the first key of every query (B, N), one behind its last, and how many it sees."""
    count = max(_PAIRS // max(batch * call.keys, 1), 1)
    parts = []
    for start in range(0, call.queries, count):
        seen = import_masking().sdpa_mask(
            batch, min(count, call.queries - start), call.keys, call.q_offset + start, call.kv_offset,
            mask_function=function, allow_is_causal_skip=False, use_vmap=call.use_vmap, device=device,
        )[:, 0].contiguous().view(torch.uint8)  # fmt: skip
        parts.append(_find_ends(seen))
    return torch.cat(parts, -1).cpu()


def _find_ends(seen: Tensor) -> Tensor:
    """Returns (3, B, N) the first key of every query, one behind its last, and the number; ``seen`` are bytes."""
    end = seen.shape[-1] - seen.flip(-1).argmax(-1)
    return torch.stack((seen.argmax(-1), end, seen.sum(-1, dtype=torch.int32)))


def _infer(rows: Tensor, call: _MaskCall) -> _Pattern:
    """Returns the pattern in which every query sees exactly the keys ``first … end − 1``. A gap there raises."""
    first, end, count = rows
    if not torch.equal(end - first, count):
        raise _IrregularError
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
        raise _IrregularError
    if aligned and not torch.equal(run_end, last + 1):
        if bool((last >= call.keys).any()):
            expected = f"of {call.queries + call.q_offset - call.kv_offset} keys or more"
            raise fault(ArgumentError, ATTENTION, "past_key_values", expected, call.keys)
        raise _IrregularError
    window = None if left is None and right is None else (left, right)
    return _Pattern(causal, window, starts, run_first, run_end)


def _find_bound(distances: Tensor, bounded: Tensor) -> int | None:
    """Returns the largest distance of those that a window bounds."""
    return int(distances[bounded].max()) if bool(bounded.any()) else None


# ----------------------------------------------------------------------------------------------------------
# Arguments of attention
# ----------------------------------------------------------------------------------------------------------


def _check_gaps(real: Tensor, call: _MaskCall) -> None:
    """Refuse padding (B, M) in front of new tokens: with padding on the right generate continues a padded query."""
    before, new = real[:, : call.q_offset], real[:, call.q_offset :]
    if before.shape[1] and bool((before.any(1) & ~before[:, -1] & new.any(1)).any()):
        expected = "without gaps in front of new tokens: pad prompts on the left to generate from them"
        raise fault(ArgumentError, ATTENTION, "attention_mask", expected, "a mask with gaps")


def _find_padding(real: Tensor, pattern: _Pattern, call: _MaskCall) -> tuple[Tensor, Tensor] | None:
    """Returns the first key (B, 1) of each entry without padding, and one behind the last; None without padding.

    A gap between keys raises.
    """
    real = real[:, call.kv_offset : call.kv_offset + call.keys]
    starts = real & ~torch.nn.functional.pad(real, (1, 0))[:, :-1]
    if bool((starts.sum(1) > 1).any()):
        raise _IrregularError
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
