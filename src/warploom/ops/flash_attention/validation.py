"""Validation of the arguments of flash attention. Only `check_values` reads data of tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, get_args

import torch

from warploom.errors import (
    ArgumentError,
    DeviceError,
    DtypeError,
    ShapeError,
    dtype_of,
    fault,
    shape_of,
)
from warploom.ops.flash_attention.block_mask import (
    BlockMask,
    check_numbers,
    check_once,
    check_parts,
    is_flex,
    of_dense,
)
from warploom.runtime.arguments import (
    COUNTS,
    FLOATS,
    LARGEST,
    check_alike,
    check_choice,
    check_cu_seqlens,
    check_device,
    check_flags,
    check_number,
    check_tensor,
    first_given,
    format_value,
    is_int,
    is_within,
)
from warploom.runtime.dispatch import Tensors, ValidatedCall
from warploom.runtime.in_place import check_memory, check_takes_part
from warploom.runtime.layout import warn_of_heads_first
from warploom.runtime.modes import is_differentiated
from warploom.runtime.values import check_bounds, check_lengths, check_pages, is_read

Tensor = torch.Tensor

NAME = "flash_attention"
Precision = Literal["highest", "high", "medium"]
PRECISIONS: tuple[str, ...] = get_args(Precision)
Bits = Literal["batch", "chunks"]
BITS: tuple[str, ...] = get_args(Bits)
MAX_FEATURES = 256
"""Features of a query, key or value that the kernels hold on chip at once."""
MOST_FEATURES, MOST_VALUES = 576, 512
"""Features of a query or key, and of a value, that the kernel for latent caches takes."""
FEW_HEADS = 48
"""Heads of keys that few models exceed, and those not in prompts of fewer tokens than a fourth of the heads."""
MAX_PLACES = 2**31 - 2**10
"""Queries and keys together, whose places the kernels count in 32 bits, and tiles, each of which is a program."""
_LEAST_TILE = 16  # rows


class FlashInputs(NamedTuple):
    """The tensors of a call, by the names of the public function."""

    q: Tensor  # (B, N, Hq, D)
    k: Tensor  # (B, M, Hkv, D), or (pages, page_size, Hkv, D)
    v: Tensor  # (B, M, Hkv, E), or (pages, page_size, Hkv, E)
    sink: Tensor | None = None  # (Hq,)
    cu_seqlens_q: Tensor | None = None  # (S + 1,)
    cu_seqlens_k: Tensor | None = None  # (S + 1,)
    seqused_k: Tensor | None = None  # (B,), or (S,) of queries packed on a cache
    block_table: Tensor | None = None  # (B, P), or (S, P)

    @property
    def on_cache(self) -> bool:
        """Returns whether queries are packed, and every sequence has its keys in a cache."""
        return self.cu_seqlens_q is not None and self.cu_seqlens_k is None and self.seqused_k is not None


class MaskedInputs(NamedTuple):
    """The tensors of a call with a mask, a bias or slopes, by a mask or by what is added to its logits."""

    q: Tensor  # (B, N, Hq, D)
    k: Tensor  # (B, M, Hkv, D)
    v: Tensor  # (B, M, Hkv, E)
    sink: Tensor | None = None  # (Hq,)
    bias: Tensor | None = None  # (B|1, Hq|1, N|1, M)
    alibi: Tensor | None = None  # (Hq,) or (B, Hq)
    cu_seqlens_q: Tensor | None = None  # (S + 1,)
    cu_seqlens_k: Tensor | None = None  # (S + 1,)
    seqused_k: Tensor | None = None  # (B,)
    tiles: Tensor | None = None  # of a `BlockMask`, as are all below
    row_lists: Tensor | None = None
    column_lists: Tensor | None = None
    bits: Tensor | None = None
    column_bits: Tensor | None = None

    @property
    def unmasked(self) -> FlashInputs:
        """The other tensors."""
        return FlashInputs(*self[:4], *self[6:9])

    def mask(self) -> BlockMask | None:
        """Returns the mask of a valid call."""
        if self.tiles is None:
            return None
        shape = (*self.tiles.shape[:2], self.q.shape[1], self.k.shape[1])
        return BlockMask(shape, *self[9:])  # type: ignore[arg-type]


class FlashOptions(NamedTuple):
    """Options of the operator; ``causal`` is a bound of the window."""

    left: int | None
    right: int | None
    scale: float
    precision: str | None
    softcap: float | None = None
    bits: str = "batch"


def check_into(name: str, tensors: Tensors, options: tuple[Any, ...], number: int) -> ValidatedCall:
    """Validate a call whose results go into the last of the tensors."""
    *given, out = tensors
    inputs = FlashInputs(*given)
    q, k, v, sink = inputs.q, inputs.k, inputs.v, inputs.sink
    call = check(name, inputs, options, number)
    check_tensor(name, "out", out, FLOATS)
    if out.dtype != q.dtype:
        raise fault(DtypeError, name, "out", f"a tensor of the dtype of q, {dtype_of(q)}", dtype_of(out))
    for argument, tensor in (("q", q), ("k", k), ("v", v), ("sink", sink), ("out", out)):
        if tensor is not None:
            check_takes_part(name, argument, tensor)
    expected = (*q.shape[:3], v.shape[3])
    if tuple(out.shape) != expected:
        raise fault(ShapeError, name, "out", f"(B, N, Hq, E) = {expected}", shape_of(out))
    check_device(name, "out", out, "q", q)
    check_memory(name, "out", out)
    return call._replace(arrange=_with_both_into) if call.arrange else call


def check(name: str, inputs: FlashInputs, options: tuple[Any, ...], _: int) -> ValidatedCall:
    """Validate a call.

    Args:
        name: Of the public function.
        inputs: Its tensors.
        options: causal, scale, window, float32_precision, return_lse, softcap and bits.
    """
    q, k, v, block_table, seqused_k = inputs.q, inputs.k, inputs.v, inputs.block_table, inputs.seqused_k
    cu_seqlens_q, cu_seqlens_k, on_cache = inputs.cu_seqlens_q, inputs.cu_seqlens_k, inputs.on_cache
    causal, scale, window, precision, return_lse, softcap, bits = options
    entries = None
    if cu_seqlens_q is not None and on_cache:
        check_tensor(NAME, "q", q, FLOATS)
        _check_bounds(q, "cu_seqlens_q", cu_seqlens_q)
        entries = cu_seqlens_q.shape[0] - 1
    _check_tensors(q, k, v, block_table is not None, entries)
    left, right = _read_window(window)
    check_flags(name, causal=causal, return_lse=return_lse)
    if causal and right:
        expected = f"of no later keys, ({left}, 0) or ({left}, None), where causal hides them"
        raise fault(ArgumentError, name, "window", expected, format_value(tuple(window)))
    if causal:
        right = 0
    scale = _settle_scale(scale, q)
    if not on_cache:
        if seqused_k is not None and (cu_seqlens_q is not None or cu_seqlens_k is not None):
            raise fault(ArgumentError, NAME, "seqused_k", "None with bounds of keys", "a tensor")
        _check_sequences(q, k, cu_seqlens_q, cu_seqlens_k, block_table)
    if softcap is not None:
        check_number(NAME, "softcap", softcap)
        if softcap <= 0:
            raise fault(ArgumentError, NAME, "softcap", "above 0, or None for no cap", softcap)
    if inputs.sink is not None:
        _check_sink(q, inputs.sink)
    if seqused_k is not None:
        _check_used(q, seqused_k, entries)
    if block_table is not None:
        _check_pages(q, block_table, seqused_k, entries)
    for argument, there in (("block_table", block_table is not None), ("cu_seqlens_q", on_cache)):
        if there and torch.is_grad_enabled() and any(t.requires_grad for t in (q, k, v)):
            expected = "None where gradients are recorded, with keys in a cache"
            raise fault(ArgumentError, NAME, argument, expected, "a tensor")
    if block_table is None:
        bounds = (cu_seqlens_q, cu_seqlens_k, seqused_k)
        aligned = causal and all(b is None for b in bounds)
        warn_of_heads_first(name, q, k, v, aligned=aligned, few_heads=FEW_HEADS)
    if precision is not None and precision not in PRECISIONS:
        expected = f"None or one of {', '.join(PRECISIONS)}"
        raise fault(ArgumentError, name, "float32_precision", expected, repr(precision))
    check_choice(name, "bits", bits, BITS)
    if bits == "chunks" and not on_cache:
        expected = "'batch', where queries are not packed on a cache (cu_seqlens_q and seqused_k)"
        raise fault(ArgumentError, name, "bits", expected, "'chunks'")
    one = not on_cache and (cu_seqlens_q is None) != (cu_seqlens_k is None)
    settled = FlashOptions(left, right, scale, precision, softcap, bits)
    (batch, tokens, heads, _), (_, keys, key_heads, _) = q.shape, k.shape
    keys *= 1 if block_table is None else block_table.shape[1]
    features = max(q.shape[-1], v.shape[-1])
    limit = _beyond_latent(inputs, features) if features > MAX_FEATURES else None
    limit = limit or beyond_kernels(batch, tokens, keys, heads, key_heads, min(features, MAX_FEATURES))
    return ValidatedCall(settled, limit, _with_both if one else None, 2 if return_lse else 1)


def masked_inputs(
    inputs: FlashInputs, mask: object, bias: Tensor | None, alibi: Tensor | None, out: object
) -> MaskedInputs:
    """Returns the tensors of a call that has a mask, a bias or slopes, with the mask checked and as tiles."""
    q, k = inputs.q, inputs.k
    argument = next(n for n, x in (("mask", mask), ("bias", bias), ("alibi", alibi)) if x is not None)
    for other, there in (
        ("block_table", inputs.block_table is not None),
        ("queries packed on a cache", inputs.on_cache),
        ("out", out is not None),
    ):
        if there:
            raise fault(ArgumentError, NAME, argument, f"None with {other}", "a value")
    _check_tensors(q, k, inputs.v, False, None)
    tiles = () if mask is None else _checked_mask(q, k, mask)[1:]
    return MaskedInputs(*inputs[:4], bias, alibi, *inputs[4:7], *tiles)


def _checked_mask(q: Tensor, k: Tensor, mask: object) -> BlockMask:
    batch, heads, sizes = q.shape[0], q.shape[2], (q.shape[1], k.shape[1])
    if not isinstance(mask, BlockMask | Tensor):
        expected = "a boolean tensor or what warploom.block_mask makes"
        if callable(mask):
            expected += f", of a function by block_mask(mask, N={sizes[0]}, M={sizes[1]}, device=q.device)"
        elif is_flex(mask):
            expected += ", of PyTorch's BlockMask by block_mask(mask)"
        raise fault(DtypeError, NAME, "mask", expected, type(mask).__name__)
    if isinstance(mask, Tensor) and mask.dtype != torch.bool:
        raise fault(DtypeError, NAME, "mask", "a boolean tensor (numbers are a bias)", f"one of {dtype_of(mask)}")
    shape = tuple(mask.shape)
    if len(shape) != 4 or shape[0] not in (1, batch) or shape[1] not in (1, heads) or shape[2:] != sizes:
        expected = f"(B or 1, Hq or 1, N, M) = {(batch, heads, *sizes)}"
        if isinstance(mask, Tensor):
            expected += _how_to_widen("mask", shape, batch, sizes)
        raise fault(ShapeError, NAME, "mask", expected, shape)
    if isinstance(mask, BlockMask) and not isinstance(mask.tiles, Tensor):
        raise fault(DtypeError, NAME, "tiles of mask", "a tensor", type(mask.tiles).__name__)
    if mask.device != q.device:
        raise fault(DeviceError, NAME, "mask", f"on the device of q, {q.device}", mask.device)
    if isinstance(mask, BlockMask):
        check_once(NAME, mask)
        return mask
    for axis in (0, 1):
        if mask.stride(axis) == 0 and mask.shape[axis] > 1:  # the same for all
            mask = mask.narrow(axis, 0, 1)
    return of_dense(mask, compact=False)


def _how_to_widen(name: str, shape: tuple[int, ...], batch: int, sizes: tuple[int, int]) -> str:
    """Returns what to write for a tensor that PyTorch's attention would take, or nothing."""
    rows = "" if name == "bias" else f".expand(-1, -1, {sizes[0]}, -1)"
    ways = {
        (batch, sizes[1]): f"{name}[:, None, None]{rows}",
        (batch, 1, 1, sizes[1]): f"{name}{rows}",
        (batch, *sizes): f"{name}[:, None]",
        sizes: f"{name}[None, None]",
    }
    return f", as {ways[shape]} is" if shape in ways else ""


def check_masked(name: str, inputs: MaskedInputs, options: tuple[Any, ...], number: int) -> ValidatedCall:
    """Validate a call that `masked_inputs` returns the tensors of; options are those of `check`."""
    q, k, bias, alibi = inputs.q, inputs.k, inputs.bias, inputs.alibi
    call = check(name, inputs.unmasked, options, number)._replace(arrange=None)
    batch, tokens, heads, _ = q.shape
    if (mask := inputs.mask()) is not None:
        check_parts(name, mask, tokens, k.shape[1])
    if bias is not None:
        check_tensor(name, "bias", bias, FLOATS)
        sizes = (batch, heads, tokens)
        right = bias.dim() == 4 and bias.shape[3] == k.shape[1]
        if not right or any(own not in (1, size) for own, size in zip(bias.shape, sizes)):
            expected = f"(B or 1, Hq or 1, N or 1, M) = {(*sizes, k.shape[1])}"
            expected += _how_to_widen("bias", shape_of(bias), batch, (tokens, k.shape[1]))
            raise fault(ShapeError, name, "bias", expected, shape_of(bias))
        check_device(name, "bias", bias, "q", q)
    if alibi is not None:
        check_tensor(name, "alibi", alibi, FLOATS)
        if tuple(alibi.shape) not in ((heads,), (batch, heads)):
            raise fault(ShapeError, name, "alibi", f"(Hq,) or (B, Hq) = {(batch, heads)}", shape_of(alibi))
        check_device(name, "alibi", alibi, "q", q)
        if alibi.requires_grad and torch.is_grad_enabled():
            expected = "without a gradient, which slopes do not have (a bias has one)"
            raise fault(ArgumentError, name, "alibi", expected, "a tensor that requires one")
    packed = inputs.cu_seqlens_q is not None or inputs.cu_seqlens_k is not None
    limit = "packed sequences with a mask, a bias or slopes have no kernels" if packed else None
    if max(q.shape[-1], inputs.v.shape[-1]) > MAX_FEATURES:
        limit = f"more than {MAX_FEATURES} features with a mask, a bias or slopes have no kernels"
    return call._replace(unsupported=call.unsupported or limit)


def check_masked_values(name: str, inputs: MaskedInputs) -> None:
    """Check what tensors of a valid call hold."""
    check_values(name, inputs.unmasked)
    if (mask := inputs.mask()) is not None and is_read(mask.tiles):
        check_numbers(name, mask)


def check_values(name: str, inputs: FlashInputs) -> None:
    """Check what tensors of a valid call hold."""
    q, k, seqused_k, block_table = inputs.q, inputs.k, inputs.seqused_k, inputs.block_table
    of_queries, of_keys = _names_of_bounds(inputs.cu_seqlens_q, inputs.cu_seqlens_k)
    check_bounds(name, of_queries, inputs.cu_seqlens_q, q.shape[1])
    check_bounds(name, of_keys, inputs.cu_seqlens_k, k.shape[1], "M")
    if seqused_k is not None:
        places = 1 if block_table is None else block_table.shape[1]
        check_lengths(name, "seqused_k", seqused_k, places * k.shape[1])
        check_pages(name, block_table, seqused_k, k.shape[0], k.shape[1])


def check_values_into(name: str, tensors: Tensors) -> None:
    """Check what tensors of a valid call hold whose results go into the last of them."""
    check_values(name, FlashInputs(*tensors[:-1]))


def _names_of_bounds(cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None) -> tuple[str, str]:
    """Returns what bounds of queries and keys are called in errors: one tensor for both is ``cu_seqlens``."""
    return ("cu_seqlens",) * 2 if cu_seqlens_q is cu_seqlens_k else ("cu_seqlens_q", "cu_seqlens_k")


def _with_both(*tensors: Any) -> FlashInputs:
    """Returns the inputs with the bounds of queries for keys too, or those of keys for queries."""
    inputs = FlashInputs(*tensors)
    given = first_given(inputs.cu_seqlens_q, inputs.cu_seqlens_k)
    return inputs._replace(cu_seqlens_q=given, cu_seqlens_k=given)


def _with_both_into(*tensors: Any) -> Tensors:
    """Returns what `_with_both` does, and the tensor that results go into behind it."""
    return (*_with_both(*tensors[:-1]), tensors[-1])


def _beyond_latent(inputs: FlashInputs, features: int) -> str | None:
    """Returns why the kernel for latent caches does not take a call with so many features at most, or None."""
    q, v = inputs.q, inputs.v
    if q.shape[-1] > MOST_FEATURES or v.shape[-1] > MOST_VALUES:
        return f"{features} features do not fit in one tile ({MOST_FEATURES} at most, {MOST_VALUES} of values)"
    limit = None
    if q.dtype == torch.float32:
        limit = "of float32"
    elif not inputs.on_cache and (inputs.cu_seqlens_q is not None or inputs.cu_seqlens_k is not None):
        limit = "of packed keys"
    elif any(is_differentiated(x) for x in inputs[:4] if x is not None):
        limit = "with gradients"
    return limit and f"{features} features {limit} have no kernels ({MAX_FEATURES} at most)"


def beyond_kernels(
    batch: int, tokens: int, keys: int, heads: int, key_heads: int, features: int
) -> str | None:  # fmt: skip
    """Returns why the Triton kernels do not take a call of these sizes, or None. Features are the most."""
    if features > MAX_FEATURES:
        return f"{features} features do not fit in one tile ({MAX_FEATURES} at most)"
    if not is_within(tokens + keys, MAX_PLACES):
        return f"{tokens} queries and {keys} keys are more than {MAX_PLACES}"
    for tiles in (batch * heads * -(-tokens // _LEAST_TILE), batch * key_heads * -(-keys // _LEAST_TILE)):
        if not is_within(tiles, MAX_PLACES):
            return f"{batch} batch entries are {tiles} tiles ({MAX_PLACES} at most)"
    return None


def _check_tensors(q: Tensor, k: Tensor, v: Tensor, paged: bool, entries: int | None) -> None:
    """Checks q, k and v; ``entries``: those of a cache on which queries are packed."""
    check_alike(NAME, q=q, k=k, v=v)
    if q.dim() != 4 or q.shape[-1] == 0:
        raise fault(ShapeError, NAME, "q", "(B, N, Hq, D) with D ≥ 1", shape_of(q))
    _, _, heads, features = q.shape
    batch, letter = (q.shape[0], "B") if entries is None else (entries, "S")
    if paged:
        if k.dim() != 4 or k.shape[1] == 0 or k.shape[3] != features:
            expected = f"(pages, page_size, Hkv, D) with D = {features}, where there is a block_table"
            raise fault(ShapeError, NAME, "k", expected, shape_of(k))
    elif k.dim() != 4 or k.shape[0] != batch or k.shape[3] != features:
        expected = f"({letter}, M, Hkv, D) with {letter} = {batch}, D = {features}"
        raise fault(ShapeError, NAME, "k", expected, shape_of(k))
    key_heads = k.shape[2]
    if heads != key_heads and (key_heads == 0 or heads % key_heads != 0):
        expected = f"(…, Hkv, D) with Hkv a divisor of Hq = {heads}, the heads of q"
        raise fault(ShapeError, NAME, "k", expected, shape_of(k))
    if v.dim() != 4 or v.shape[:3] != k.shape[:3] or v.shape[3] == 0:
        expected = f"(B, M, Hkv, E) with B = {k.shape[0]}, M = {k.shape[1]}, Hkv = {key_heads}, E ≥ 1"
        raise fault(ShapeError, NAME, "v", expected, shape_of(v))


def _read_window(window: Sequence[int | None] | None) -> tuple[int | None, int | None]:
    if window is None:
        return None, None
    if not isinstance(window, tuple | list) or len(window) != 2:
        raise fault(DtypeError, NAME, "window", "None or a pair (left, right)", repr(window))
    for bound in window:
        if bound is not None and not is_int(bound):
            raise fault(DtypeError, NAME, "window", "a pair of ints or None", format_value(window))
        if bound is not None and bound < 0:
            raise fault(ArgumentError, NAME, "window", "of bounds ≥ 0, or None for no bound", format_value(window))
    left, right = (None if isinstance(bound, int) and bound > LARGEST else bound for bound in window)
    return left, right


def _settle_scale(scale: float | None, q: Tensor) -> float:
    if scale is None:
        return 1.0 / math.sqrt(q.shape[-1])
    check_number(NAME, "scale", scale)
    return scale


def _check_sink(q: Tensor, sink: Tensor) -> None:
    check_tensor(NAME, "sink", sink, FLOATS)
    if sink.shape != (q.shape[2],):
        raise fault(ShapeError, NAME, "sink", f"(Hq,) with Hq = {q.shape[2]}", shape_of(sink))
    check_device(NAME, "sink", sink, "q", q)


def _check_used(q: Tensor, seqused_k: Tensor, entries: int | None) -> None:
    check_tensor(NAME, "seqused_k", seqused_k, COUNTS)
    number, letter = (q.shape[0], "B") if entries is None else (entries, "S")
    if seqused_k.shape != (number,):
        raise fault(ShapeError, NAME, "seqused_k", f"({letter},) with {letter} = {number}", shape_of(seqused_k))
    check_device(NAME, "seqused_k", seqused_k, "q", q)


def _check_pages(q: Tensor, block_table: Tensor, seqused_k: Tensor | None, entries: int | None) -> None:
    check_tensor(NAME, "block_table", block_table, (torch.int32,))
    number, letter = (q.shape[0], "B") if entries is None else (entries, "S")
    if block_table.dim() != 2 or block_table.shape[0] != number:
        expected = f"({letter}, P) with {letter} = {number}"
        raise fault(ShapeError, NAME, "block_table", expected, shape_of(block_table))
    check_device(NAME, "block_table", block_table, "q", q)
    if seqused_k is None:
        raise fault(ArgumentError, NAME, "seqused_k", "given where there is a block_table", None)


def _check_bounds(q: Tensor, argument: str, bounds: Tensor) -> None:
    check_cu_seqlens(NAME, argument, bounds, "q", q)
    if q.dim() == 4 and q.shape[0] != 1:
        raise fault(ShapeError, NAME, "q", "of batch size 1 when cu_seqlens is given", shape_of(q))


def _check_sequences(
    q: Tensor, k: Tensor, cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None, block_table: Tensor | None
) -> None:
    """Check bounds of packed sequences. There may be one for both if there are as many queries as keys."""
    if cu_seqlens_q is None and cu_seqlens_k is None:
        return
    if block_table is not None:
        raise fault(
            ArgumentError, NAME, "block_table", "None with bounds of keys, or without seqused_k", "a tensor"
        )
    names = _names_of_bounds(cu_seqlens_q, cu_seqlens_k)
    for argument, tensor in zip(names, (cu_seqlens_q, cu_seqlens_k)):
        if tensor is None:
            if q.shape[1] != k.shape[1]:
                expected = f"given where the other is, since N = {q.shape[1]} and M = {k.shape[1]} differ"
                raise fault(ArgumentError, NAME, argument, expected, None)
            continue
        _check_bounds(q, argument, tensor)
    if cu_seqlens_q is not None and cu_seqlens_k is not None and cu_seqlens_q.shape != cu_seqlens_k.shape:
        expected = f"of the shape of cu_seqlens_q, {shape_of(cu_seqlens_q)}"
        raise fault(ShapeError, NAME, "cu_seqlens_k", expected, shape_of(cu_seqlens_k))
