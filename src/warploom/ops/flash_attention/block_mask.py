"""Masks of attention by tiles: which tiles of 128 queries by 128 keys see nothing, all, or some of their keys.

A mask of N queries and M keys takes 16 bytes for a tile, and 2 KiB more for one that sees some: two megabytes for a
mask of documents over 65 536 tokens, where a boolean tensor has four gigabytes. It is made on the device, a row of
tiles at a time, and kept for as many calls as see the same.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from warploom.errors import ArgumentError, DtypeError, ShapeError, dtype_of, fault, shape_of
from warploom.runtime.arguments import check_device, format_value, is_int
from warploom.runtime.modes import holds_data
from warploom.runtime.names import hide_catch_alls, refuse_missing, refuse_unknown
from warploom.runtime.values import may_be_read

Tensor = torch.Tensor
MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""A function ``(b, h, q_idx, kv_idx)`` of integer tensors without axes, which returns a boolean one."""

NAME = "block_mask"
TILE = 128
"""Queries, and keys, of a tile."""
NOTHING, EVERYTHING = -2, -1
"""Entries of `BlockMask.tiles` for tiles without bits."""
_WORDS = TILE // 32  # of the bits of a query in a tile
_CHUNK = 2**24  # pairs of a query and a key for which a function is evaluated at a time
_DRAWN = 32  # tiles of a picture, to a side


class BlockMask(NamedTuple):
    """A mask of attention by tiles of 128 queries by 128 keys, as `block_mask` makes it.

    ``R`` and ``C`` are the rows and columns of tiles. All tensors lie on one device; ``B`` and ``H`` may be 1, for
    all entries of a batch and all heads. One that is made by hand, loaded or changed is read and checked in the
    first call that takes it.

    Example:
        ```python
        from warploom import block_mask

        mask = block_mask(lambda b, h, i, j: j <= i, N=1024, M=1024)
        print(mask)  # a picture
        print(mask.tiles.shape, mask.bits.shape)  # torch.Size([1, 1, 8, 8]) torch.Size([8, 128, 4])
        ```
    """

    shape: tuple[int, int, int, int]
    """B, H, N and M."""
    tiles: Tensor
    """``(B, H, R, C)`` int32: the place of a tile in ``bits``, −1 if all its keys are seen, −2 if none is."""
    row_lists: Tensor
    """``(B, H, R, 2 + 2 C)`` int32: how many tiles of a row see something; their columns, from the first to the
    last, and then the others. Behind them how many tiles see everything; their columns, then those of tiles that
    see some of their keys, and then the others."""
    column_lists: Tensor
    """``(B, H, C, 1 + 2 R)`` int32: the same of columns; then, for each of these rows, how many of its tiles that
    see something come before."""
    bits: Tensor
    """``(P, 128, 4)`` int32: bit ``j % 32`` of word ``j // 32`` is 1 if a query of a tile sees its key ``j``."""
    column_bits: Tensor
    """``(B, H, C, 4)`` int32: the same bits of a column of tiles, 1 if any query sees the key."""

    @property
    def device(self) -> torch.device:
        """The device of all tensors."""
        return self.tiles.device

    def to(self, device: torch.device | str | int) -> BlockMask:
        """Returns the mask on another device."""
        moved = BlockMask(self.shape, *(x.to(device) for x in self[1:]))
        return _remember(moved) if _is_known(self) else moved

    def dense(self) -> Tensor:
        """Returns the mask as a boolean tensor ``(B, H, N, M)``, true where a key takes part."""
        batch, heads, queries, keys = self.shape
        rows, columns = self.tiles.shape[2:]
        seen = torch.zeros((*self.tiles.shape, TILE, TILE), dtype=torch.bool, device=self.device)
        seen = seen | (self.tiles == EVERYTHING)[..., None, None]
        if self.bits.shape[0]:
            some = unpack(self.bits[self.tiles.clamp(min=0).long()])
            seen = torch.where((self.tiles >= 0)[..., None, None], some, seen)
        seen = seen.transpose(3, 4).reshape(batch, heads, rows * TILE, columns * TILE)
        return seen[:, :, :queries, :keys]

    def __repr__(self) -> str:
        """Returns a picture of the mask of the first batch entry and head, a character for a tile or several."""
        batch, heads, queries, keys = self.shape
        title = f"BlockMask(B={batch}, H={heads}, N={queries}, M={keys}, device={self.device}"
        if self.tiles.is_meta or isinstance(self.tiles, torch._subclasses.FakeTensor) or 0 in self.shape:
            return f"{title})"
        total = self.tiles.numel()
        some, whole = int((self.tiles >= 0).sum()), int((self.tiles == EVERYTHING).sum())
        lines = [f"{title}: of {total} tiles {whole} see all, {some} some of their keys)", *self._picture()]
        return "\n".join(lines)

    def _picture(self) -> Iterator[str]:
        """Yields lines: ``█`` where all is seen, ``▒`` where something is, ``·`` where nothing is."""
        tiles = self.tiles[0, 0].cpu()
        tall, wide = (-(-size // _DRAWN) for size in tiles.shape)
        for row in tiles.split(tall):
            cells = row.split(wide, 1)
            yield "".join(
                "█" if bool((c == EVERYTHING).all()) else "·" if bool((c == NOTHING).all()) else "▒" for c in cells
            )


@hide_catch_alls
def block_mask(
    mask: Any,
    B: int | None = None,
    H: int | None = None,
    N: int | None = None,
    M: int | None = None,
    *_others: Any,
    device: torch.device | str | None = None,
    block: Sequence[int] = (TILE, TILE),
    **_unknown: Any,
) -> BlockMask:
    """Make a mask for `flash_attention`, which goes over the tiles that see something, and over no others.

    Nothing of a function is compiled: it is called here, for one row of tiles after another, and its results are
    kept as bits where a tile sees some of its keys. The memory needed meanwhile is linear in the length.

    Args:
        mask: A function ``mask_mod(b, h, q_idx, kv_idx)`` of four integer tensors without axes that returns a
            boolean one, true where a key takes part; a boolean tensor ``(B, H, N, M)``; or the ``BlockMask`` of
            `torch.nn.attention.flex_attention`. It may index other tensors, such as the document of a token.
        B: Batch entries of the mask; 1, the default, for one mask for all.
        H: Query heads of the mask; 1, the default, for one mask for all.
        N: Queries. Needed with a function alone: tensors and a ``BlockMask`` have sizes, and others raise.
        M: Keys.
        device: Where the mask is made; by default the device of a tensor or ``BlockMask``, the CPU for a function.
        block: Queries and keys of a tile. There is one size, ``(128, 128)``.

    Returns:
        A `BlockMask` for queries ``(B, N, H, D)``. Its ``repr`` is a picture, ``.to(device)`` a copy elsewhere, and
        ``.dense()`` the boolean tensor.

    Raises:
        DtypeError: ``mask`` is none of these, or a function returns numbers.
        ShapeError: A tensor has not four axes, or not the sizes given, or a function's result has axes.
        ArgumentError: A size is missing or below 1, or there are no tiles of the size ``block``.

    Source: the form of functions is that of FlexAttention; Dong et al., "Flex Attention", 2024, arXiv 2412.05496.

    Example:
        ```python
        import torch
        from warploom import block_mask, flash_attention

        document = torch.arange(512) // 200  # three packed documents
        mask = block_mask(lambda b, h, i, j: document[i] == document[j], N=512, M=512)
        print(mask)  # a picture
        q, k, v = torch.randn(3, 1, 512, 4, 64)
        out = flash_attention(q, k, v, mask=mask, causal=True)
        ```
    """
    if _others or _unknown:
        refuse_unknown(block_mask, _others, _unknown)
    refuse_missing(NAME, "mask", mask)
    if tuple(block) != (TILE, TILE):
        raise fault(ArgumentError, NAME, "block", f"({TILE}, {TILE})", format_value(tuple(block)))
    given = {"B": B, "H": H, "N": N, "M": M}
    for argument, size in given.items():
        if size is not None and not is_int(size):
            raise fault(DtypeError, NAME, argument, "an int", repr(size))
        if size is not None and size < 1:
            raise fault(ArgumentError, NAME, argument, "at least 1", format_value(size))
    if isinstance(mask, Tensor):
        _check_dense(mask)
        _check_sizes(given, tuple(mask.shape))
        return of_dense(mask if device is None else mask.to(device), compact=True)
    found: Any = mask
    if is_flex(mask):
        sizes = (*mask.kv_num_blocks.shape[:2], *mask.seq_lengths)
        _check_sizes(given, sizes)
        if device is not None:
            mask = mask.to(device)
        found, device = _visible_of_flex(mask), mask.kv_num_blocks.device
    else:
        if not callable(mask):
            expected = "a function, a boolean tensor or a BlockMask of PyTorch"
            raise fault(DtypeError, NAME, "mask", expected, type(mask).__name__)
        _check_arguments(mask)
        for argument in ("N", "M"):
            if given[argument] is None:
                raise fault(ArgumentError, NAME, argument, "given with a function", None)
        sizes = (B or 1, H or 1, N, M)
    return _of_chunks(sizes, _chunks(found, sizes, torch.device("cpu" if device is None else device)), True)


def of_dense(mask: Tensor, compact: bool) -> BlockMask:
    """Returns the mask of a boolean tensor (B, H, N, M).

    ``compact``: only tiles that see some of their keys have bits, whose number the host waits for. Without it all
    have, and nothing is waited for, so that it can be traced and captured.
    """
    shape: Any = tuple(mask.shape)
    if torch.compiler.is_compiling():  # sizes may not be known yet
        return _of_chunks(shape, iter((mask,)), compact)
    rows = max(_CHUNK // (TILE * shape[0] * shape[1] * shape[3]), 1) * TILE
    return _of_chunks(shape, iter(mask.split(rows, 2)), compact)


def check_parts(function: str, mask: BlockMask, queries: int, keys: int) -> None:
    """Raise unless the tensors of a mask are such as `block_mask` makes for so many queries and keys.

    Raises:
        ShapeError: A tensor has another shape.
        DtypeError: A tensor is not of int32.
        DeviceError: A tensor lies on another device than the tiles.
    """
    for part, given in zip(mask._fields[1:], mask[1:]):
        if not isinstance(given, Tensor):
            raise fault(DtypeError, function, f"{part} of mask", "a tensor", type(given).__name__)
    rows, columns = -(-queries // TILE), -(-keys // TILE)
    entries = tuple(mask.shape[:2])
    expected = {
        "tiles": (*entries, rows, columns),
        "row_lists": (*entries, rows, 2 + 2 * columns),
        "column_lists": (*entries, columns, 1 + 2 * rows),
        "bits": (*mask.bits.shape[:1], TILE, _WORDS),
        "column_bits": (*entries, columns, _WORDS),
    }
    for part, shape in expected.items():
        tensor: Tensor = getattr(mask, part)
        if tuple(tensor.shape) != shape:
            raise fault(ShapeError, function, f"{part} of mask", f"{shape}, as of block_mask", shape_of(tensor))
        if tensor.dtype != torch.int32:
            raise fault(DtypeError, function, f"{part} of mask", "of int32", dtype_of(tensor))
        check_device(function, f"{part} of mask", tensor, "its tiles", mask.tiles)


def check_numbers(function: str, mask: BlockMask) -> None:
    """Raise unless a mask's numbers are places of its bits, and the others such as follow from tiles and bits.

    Raises:
        ArgumentError: They are not.
    """
    least, most = NOTHING, mask.bits.shape[0] - 1
    for extreme in map(int, mask.tiles.aminmax()):
        if not least <= extreme <= most:
            expected = f"of numbers between {least} and {most}"
            raise fault(ArgumentError, function, "tiles of mask", expected, extreme)
    expected_parts = (*_all_lists(mask.tiles), _column_bits(mask))
    for part, numbers in zip(("row_lists", "column_lists", "column_bits"), expected_parts):
        if not torch.equal(getattr(mask, part), numbers):
            raise fault(ArgumentError, function, f"{part} of mask", "of its tiles, as of block_mask", "others")


def check_once(function: str, mask: BlockMask) -> None:
    """Raise unless `block_mask` made a mask, or its parts are found to be such; see `check_parts`, `check_numbers`.

    Kernels trust a mask's lists, and would wait for tiles that nobody counts. So the first call with a mask of
    another origin waits for the device and reads it, where that is possible.
    """
    if _is_known(mask):
        return
    check_parts(function, mask, *mask.shape[2:])
    if may_be_read(mask.tiles):
        check_numbers(function, mask)
        _remember(mask)
    elif mask.tiles.is_cuda and holds_data(mask.tiles) and torch.cuda.is_current_stream_capturing():
        expected = "made by block_mask, or in a call before the capture of a CUDA graph, which cannot check it"
        raise fault(ArgumentError, function, "mask", expected, "another")


_known = WeakTensorKeyDictionary()
"""Versions of all parts of the masks that `block_mask` made or `check_once` has read, by their tiles."""


def _versions(mask: BlockMask) -> tuple[list[Tensor], list[int]]:
    """Returns what changes with a mask's parts: the other tensors themselves, and how often each was written."""
    return list(mask[2:]), [0 if x.is_inference() else x._version for x in mask[1:]]


def _remember(mask: BlockMask) -> BlockMask:
    if holds_data(mask.tiles):
        _known[mask.tiles] = _versions(mask)
    return mask


def _is_known(mask: BlockMask) -> bool:
    if not isinstance(mask.tiles, Tensor) or not holds_data(mask.tiles):
        return False
    known = _known.get(mask.tiles)
    if known is None or not all(isinstance(x, Tensor) for x in mask[1:]):
        return False
    parts, written = _versions(mask)
    return written == known[1] and all(a is b for a, b in zip(parts, known[0]))


def _check_dense(mask: Tensor) -> None:
    if mask.dtype != torch.bool:
        raise fault(DtypeError, NAME, "mask", "a boolean tensor", f"one of {dtype_of(mask)}")
    if mask.dim() != 4 or 0 in mask.shape:
        raise fault(ShapeError, NAME, "mask", "(B, H, N, M), each at least 1", shape_of(mask))


def _check_sizes(given: dict[str, int | None], sizes: tuple[int, ...]) -> None:
    for (argument, wanted), size in zip(given.items(), sizes):
        if wanted is not None and wanted != size:
            raise fault(ShapeError, NAME, argument, f"that of the mask, {size}, or None", wanted)


def _check_arguments(function: Callable[..., Any]) -> None:
    try:
        signature = inspect.signature(function)
    except ValueError:  # of some functions in C
        return
    try:
        signature.bind("b", "h", "q_idx", "kv_idx")
    except TypeError as error:
        raise fault(DtypeError, NAME, "mask", "a function (b, h, q_idx, kv_idx)", f"one of {signature}") from error


def is_flex(mask: object) -> bool:
    """Returns whether a mask is FlexAttention's."""
    return type(mask).__name__ == "BlockMask" and hasattr(mask, "kv_num_blocks") and hasattr(mask, "mask_mod")


def _visible_of_flex(mask: Any) -> MaskMod:
    """Returns FlexAttention's mask as a function: its own, within the blocks that it lists."""
    tall, wide = mask.BLOCK_SIZE
    some = _listed(mask.kv_num_blocks, mask.kv_indices)
    whole = torch.zeros_like(some)
    if mask.full_kv_num_blocks is not None:
        whole = _listed(mask.full_kv_num_blocks, mask.full_kv_indices)

    def visible(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        place = (b, h, q_idx // tall, kv_idx // wide)
        inner: Tensor = mask.mask_mod(b, h, q_idx, kv_idx)
        return whole[place] | (some[place] & inner)

    return visible


def _listed(counts: Tensor, indices: Tensor) -> Tensor:
    """Returns the blocks (B, H, R, C) that are among the first of a list (B, H, R, C), as booleans."""
    there = torch.arange(indices.shape[-1], device=indices.device) < counts[..., None]
    return torch.zeros_like(there).scatter_reduce_(3, indices.long(), there, "amax")


def _chunks(function: MaskMod, sizes: Sequence[int], device: torch.device) -> Iterator[Tensor]:
    """Yields what a function says of a row of tiles after another, (B, H, 128 or fewer, M)."""

    def evaluate(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        try:
            found: Any = function(b, h, q_idx, kv_idx)
        except RuntimeError as error:
            if "control flow" not in str(error):
                raise
            expected = "a function with `&`, `|`, `~` and torch.where for `and`, `or`, `not` and `if`"
            raise fault(ArgumentError, NAME, "mask", expected, "one that asks whether a tensor is true") from error
        if isinstance(found, bool):
            found = torch.full_like(kv_idx, found, dtype=torch.bool)
        if not isinstance(found, Tensor):
            raise fault(DtypeError, NAME, "mask", "a function that returns a boolean tensor", type(found).__name__)
        if found.dtype != torch.bool:
            raise fault(DtypeError, NAME, "mask", "a function that returns booleans", dtype_of(found))
        if found.dim():
            raise fault(ShapeError, NAME, "mask", "a function whose result has no axes", shape_of(found))
        return found

    _, heads, queries, keys = sizes
    absent: Any = (None, None, None, None)
    for axis in (3, 2, 1, 0):
        evaluate = torch.vmap(evaluate, in_dims=(*absent[:axis], 0, *absent[axis + 1 :]))
    index = [torch.arange(size, device=device) for size in sizes]
    step = max(_CHUNK // (TILE * keys), 1)  # batch entries and heads at a time
    for first in range(0, queries, TILE):
        rows = index[2][first : first + TILE]
        parts = []
        for b in index[0].split(max(step // heads, 1)):
            each = [evaluate(b, h, rows, index[3]) for h in index[1].split(step)]
            parts.append(torch.cat(each, 1))
        yield torch.cat(parts)


def _of_chunks(shape: Any, chunks: Iterator[Tensor], compact: bool) -> BlockMask:
    """Returns the mask of which chunks (B, H, n, M) of whole rows of tiles are given, one after another."""
    batch, heads, _, keys = shape
    columns = -(-keys // TILE)
    states: list[Tensor] = []
    kept: list[Tensor] = []
    there, seen = 0, torch.zeros((), dtype=torch.bool)
    for chunk in chunks:
        rows = -(-chunk.shape[2] // TILE)
        # What lies behind the last query or key counts as seen for "all", and as hidden for "none".
        behind = (0, columns * TILE - keys, 0, rows * TILE - chunk.shape[2])
        padded = torch.nn.functional.pad(chunk, behind)
        tiles = padded.view(batch, heads, rows, TILE, columns, TILE).transpose(3, 4)  # (B, H, R, C, 128, 128)
        inside = torch.nn.functional.pad(torch.ones_like(chunk[:1, :1]), behind)
        inside = inside.view(1, 1, rows, TILE, columns, TILE).transpose(3, 4)
        some, whole = tiles.flatten(4).any(-1), (tiles | ~inside).flatten(4).all(-1)
        partial = some & ~whole
        words = _pack(tiles[partial] if compact else tiles.flatten(0, 3))
        place = partial.flatten().cumsum(0) - 1 if compact else torch.arange(words.shape[0], device=chunk.device)
        place = place.view(partial.shape) + there
        there += words.shape[0]
        kept.append(words)
        seen = seen.to(chunk.device) | padded.any(2)
        states.append(torch.where(partial, place, torch.where(whole, EVERYTHING, NOTHING)).int())
    tiles = torch.cat(states, 2)
    column_bits = _pack(seen.view(batch, heads, columns, TILE))
    return _remember(BlockMask(shape, tiles, *_all_lists(tiles), torch.cat(kept), column_bits))


def _all_lists(tiles: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the lists of rows and of columns: see `BlockMask`."""
    some = (tiles != NOTHING).int()
    places = (some.cumsum(3, dtype=torch.int32) - some).transpose(2, 3)
    of_columns = _lists(tiles.transpose(2, 3))
    of_rows = torch.cat((_lists(tiles), _lists(tiles, EVERYTHING)), -1)
    return of_rows, torch.cat((of_columns, places.gather(3, of_columns[..., 1:].long())), -1)


def _column_bits(mask: BlockMask) -> Tensor:
    """Returns which keys of each column of tiles some query sees, as bits."""
    keys, columns = mask.shape[3], mask.tiles.shape[3]
    found = torch.zeros((*mask.tiles.shape[:2], columns, TILE), dtype=torch.bool, device=mask.device)
    for row in mask.tiles.unbind(2):
        found |= (row == EVERYTHING)[..., None]
        if mask.bits.shape[0]:
            some = unpack(mask.bits[row.clamp(min=0).long()]).any(-2)
            found |= some & (row >= 0)[..., None]
    there = torch.arange(columns * TILE, device=mask.device) < keys
    return _pack(found & there.view(columns, TILE))


def _lists(tiles: Tensor, whole: int | None = None) -> Tensor:
    """Returns how many tiles of a row see something, and which, in front of the others, (B, H, R, 1 + C).

    ``whole``: how many have that entry, and which, in front of those that see something too.
    """
    hidden = (tiles == NOTHING).to(torch.uint8)
    if whole is not None:
        hidden = hidden + (tiles != whole)
    order = hidden.sort(dim=-1, stable=True).indices
    return torch.cat(((hidden == 0).sum(-1, keepdim=True), order), -1).int()


def _pack(tiles: Tensor) -> Tensor:
    """Returns booleans (…, 128) as bits of words (…, 4)."""
    place = torch.arange(32, device=tiles.device)
    words: Tensor = (tiles.unflatten(-1, (_WORDS, 32)).int() << place.int()).sum(-1, dtype=torch.int32)
    return words


def unpack(words: Tensor) -> Tensor:
    """Returns words (…, 128, 4) as booleans (…, 128, 128)."""
    place = torch.arange(32, device=words.device, dtype=torch.int32)
    bits: Tensor = ((words[..., None] >> place) & 1).bool()
    return bits.flatten(-2)
