"""Launches of flash attention's kernels for Hopper: which calls they take, and how these are cut into tiles.

They take 16-bit tensors whose rows the tensor memory accelerator can copy, with 33 to 256 features, with any
window, cap, sink or lengths, and any number of heads to a key head. What is missing to 64, 128 or 256 features, or
to 192 of queries and keys with 128 of values, is filled with zeros. Packed sequences come with units of rows, and
spread to the backward (`launch_varlen`). Packed queries on a cache have units too, and keys are copied page by page
(`plan_cache`). Other calls on pages, scales that are not positive and short backward loops stay with the kernels for
every GPU (`obstacle`), and so do calls of few queries (decoding) with a window, cap, sink or lengths.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

from warploom.device.rows import Strides
from warploom.ops.flash_attention.hopper.backward_dkv import hopper_key_kernel
from warploom.ops.flash_attention.hopper.backward_dq import hopper_query_kernel
from warploom.ops.flash_attention.hopper.backward_fused import hopper_backward_kernel, hopper_biased_backward_kernel
from warploom.ops.flash_attention.hopper.backward_shared import hopper_shared_key_kernel, hopper_shared_query_kernel
from warploom.ops.flash_attention.hopper.bias import VECTOR, BiasSteps, BiasSums, seen_keys_kernel, sum_bias_kernel
from warploom.ops.flash_attention.hopper.config import (
    HOPPER,
    HOPPER_BIASED,
    HOPPER_IN_PIECES,
    HOPPER_PARTS,
    HOPPER_SMALLER,
    HOPPER_TERMS,
    HopperTiles,
)
from warploom.ops.flash_attention.hopper.forward import are_counted, hopper_forward_kernel, loops_are_even
from warploom.ops.flash_attention.hopper.latent import HALF, LATENT_FEATURES, LATENT_KEYS
from warploom.ops.flash_attention.hopper.tile_mask import TILE, TileMaskSizes
from warploom.ops.flash_attention.hopper.tiles import NARROW_HEAD, ROWS, STRIDE_UNIT, SplitStrides
from warploom.ops.flash_attention.hopper.work import (
    UNIT,
    AlibiStrides,
    Config,
    Scales,
    Schedule,
    SeqLens,
    Window,
)
from warploom.ops.flash_attention.problem import (
    HOPPER_MULTIPROCESSORS,
    LOG2_E,
    Call,
    Costs,
    Masking,
    MaskSpec,
    Shape,
    best_splits,
    bounds,
    heads_of_section,
    in_powers_of_two,
    loop_steps,
    programs_at_once,
)
from warploom.ops.flash_attention.triton.tiles import ForwardStrides, Sizes, TritonConfig
from warploom.runtime.build import parameters_of
from warploom.runtime.launch import INTERPRETED, Buffer, Launch, TmaTile, architecture, supports_tma
from warploom.runtime.layout import layout_for, strides_of, tile_width

Tensor = torch.Tensor

_ROWS = ROWS.value
_NARROW = NARROW_HEAD.value
_LEAST_FEATURES = 32  # up to here, tiles of 64 features would be half empty
_SMALLER_STEP = 0.81
"""Share of the time of a step with three groups, whose tiles take the time of one more step to start; from 2 and 4 × 16
heads of 1024 and 2048 tokens on an H200."""
COSTS = {"forward": Costs(6, 5, 5e5), "key": Costs(1.5, 2, 2e5), "query": Costs(0.5, 3, 3e5)}
"""Fitted to one head of 1024 … 65536 tokens on an H200: what they choose takes at most 1.06 times as long as the
best number of splits, for the gradient of queries 1.17."""
_NARROW_WINDOW = 4096
"""Keys of a window up to which the smaller tiles are taken, which hold fewer keys beyond their queries' windows."""
FEW = 64
"""Queries of a key head (tokens times heads that read it) up to which a forward with options is a decoding step."""
_FUSED = 4.0
"""Tiles of keys for each multiprocessor from which on one kernel forms all gradients: programs that add to the same
queries wait for each other, and with fewer tiles long loops begin at the end."""
_EVEN = 0.45
"""This share of them is enough where all loops are equally long, as in full attention: 1.8 tiles. Where the last of
more keys than queries are causal, as in a chunk of a longer sequence, it lies between."""
_HALVED = 3.5
"""Tiles of a causal forward for each multiprocessor from which on heads come in two sections though the L2 cache has room
for all: the first tiles would wait for all keys and values to come from memory."""
_MOST_PARTS = 2**32
"""Bytes of parts of a bias's gradient that are written to be summed; beyond, it is formed for itself, which takes longer."""
_SHORT = 2048  # backward loops that would be split and are shorter than this stay with the kernels for every GPU


class _Kernel(NamedTuple):
    """A kernel, and the parameters that a launch takes, in their order."""

    function: Any
    inputs: tuple[str, ...]  # described
    results: tuple[str, ...]  # described as long as they are whole
    others: tuple[str, ...]
    owns_keys: bool = False  # groups of warps own keys, and loop over queries


_INPUTS = ("q_desc", "k_desc", "v_desc", "do_desc")
_OTHERS = ("lse", "delta", "counters", "seqused_k", "units")
_OF_TERMS = ("lse", "delta", "inverse", "counters")
_OF_SLOPES = ("alibi",)
_OF_BIAS = ("bias", "seen")
_OF_MASK = ("tiles", "listed", "bits", "column_bits")
_KERNELS = {
    "forward": _Kernel(
        hopper_forward_kernel, _INPUTS[:3], ("out",),
        ("lse", "statistics", "counter", "seqused_k", "block_table", "units", "shifts", "out_rows", "sink"),
    ),
    "key": _Kernel(hopper_key_kernel, _INPUTS, ("dk", "dv"), _OTHERS, True),
    "query": _Kernel(hopper_query_kernel, _INPUTS, ("dq",), _OTHERS),
    "backward": _Kernel(
        hopper_backward_kernel, _INPUTS, ("dk", "dv", "added"),
        ("lse", "delta", "counters", "tiles_added", "seqused_k", "units"), True,
    ),
    "masked forward": _Kernel(
        hopper_forward_kernel, _INPUTS[:3], ("out",), ("lse", "statistics", "counter", "sink", *_OF_MASK)
    ),
    "masked backward": _Kernel(
        hopper_backward_kernel, _INPUTS, ("dk", "dv", "added"),
        ("lse", "delta", "counters", "tiles_added", *_OF_MASK), True,
    ),
    "sloped forward": _Kernel(
        hopper_forward_kernel, _INPUTS[:3], ("out",), ("lse", "statistics", "counter", "sink", *_OF_SLOPES)
    ),
    "biased forward": _Kernel(
        hopper_forward_kernel, _INPUTS[:3], ("out",), ("lse", "statistics", "counter", "sink", *_OF_BIAS)
    ),
    "biased backward": _Kernel(
        hopper_biased_backward_kernel, _INPUTS, ("dk", "dv", "added"),
        ("lse", "delta", "counters", "tiles_added", *_OF_BIAS, "dbias"), True,
    ),
    "sloped backward": _Kernel(
        hopper_backward_kernel, _INPUTS, ("dk", "dv", "added"),
        ("lse", "delta", "counters", "tiles_added", *_OF_SLOPES), True,
    ),
    "wide key": _Kernel(hopper_shared_key_kernel, _INPUTS, ("dk", "dv"), _OTHERS, True),
    "key of terms": _Kernel(hopper_shared_key_kernel, _INPUTS, ("dk", "dv"), _OF_TERMS, True),
    "query of terms": _Kernel(hopper_shared_query_kernel, _INPUTS, ("dq",), _OF_TERMS),
}  # fmt: skip


_OPTIONAL = {
    *_OF_MASK,
    *_OF_SLOPES,
    "mask_sizes",
    "alibi_strides",
    "window",
    *_OF_BIAS,
    "bias_strides",
    "seqused_k",
    "block_table",
    "units",
    "shifts",
    "out_rows",
    "inverse",
}
"""Parameters of kernels that are None in launches without them."""


class Plan(NamedTuple):
    """A launch of a kernel, and into how many splits it cuts loops."""

    launch: Launch
    splits: int
    counted: bool  # whether its tiles are counted, with counters that must be zero


def _width(shape: Shape) -> int:
    """Returns the features of a tile."""
    features = max(shape.head_dim, shape.value_dim)
    return next(width for width in (64, 128, 256) if features <= width)


def _in_pieces(name: str, shape: Shape) -> bool:
    """Returns whether rows of queries and keys are copied in pieces: up to 192 features, with at most 128 of values.

    Rows of a single token may have any number of them, but results in pieces are stored by eights.
    """
    whole = shape.head_dim % 8 == 0 == shape.value_dim % 8
    return name in HOPPER_IN_PIECES and _NARROW < shape.head_dim <= 192 and shape.value_dim <= _NARROW and whole


def _tiles(name: str, shape: Shape, mask: MaskSpec) -> HopperTiles:
    width = _width(shape)
    if _in_pieces(name, shape):
        return HOPPER_IN_PIECES[name]
    packed = mask.units_q is not None  # units of rows are multiples of the smaller tiles
    if width == 64 and name in HOPPER_SMALLER and (packed or _smaller_are_faster(name, shape, mask)):
        return HOPPER_SMALLER[name]
    return HOPPER[name][width]


def _smaller_are_faster(name: str, shape: Shape, mask: MaskSpec) -> bool:
    """Returns whether the smaller tiles of 64 features are faster than the others."""
    tiles, smaller, programs = HOPPER[name][64], HOPPER_SMALLER[name], HOPPER_MULTIPROCESSORS
    rows = shape.batch_size * shape.heads
    count, more = (-(-shape.tokens // (x.groups * _ROWS)) * rows for x in (tiles, smaller))
    if None not in (mask.left, mask.right) and min(sum(bounds(shape, mask)), shape.keys) < _NARROW_WINDOW:
        return True
    if mask.right is None and mask.left is None:  # loops are equal, and so is every program's share: whole waves
        steps = -(-shape.keys // tiles.box)
        time = -(-count // programs) * (steps + 1)
        shorter = -(-more // programs) * steps * _SMALLER_STEP
        whole = name == "forward" and _best_splits(name, shape, mask, tiles, programs) == 1
        return whole and shorter < time
    few = 2 * programs if name == "forward" else programs // 2
    return count < few or (name == "forward" and shape.keys < 4096)


def queries_of_a_sum(shape: Shape, bias: Tensor | None = None) -> int:
    """Returns the queries of the tiles in which ``backward`` adds up their gradients."""
    return HOPPER["backward"][_width_of(shape, bias)].box


def _width_of(shape: Shape, bias: Tensor | None) -> int:
    """Returns the features of a tile of the backward with a bias. For tiles of float32 there is room beside wide ones."""
    wide = bias is not None and bias.element_size() == 4 and _steps_of(bias)[2] > 0
    return _NARROW if wide else _width(shape)


def _blocks(name: str, shape: Shape, mask: MaskSpec, block: int) -> tuple[int, int]:
    """Returns the tiles of ``block`` rows of a kernel along the sequence, and along batch entries and heads."""
    own, units, heads = shape.tokens, mask.units_q, shape.heads
    if _KERNELS[name].owns_keys:
        own, units, heads = shape.keys, mask.units_k, shape.key_heads
    if units is not None:
        own = units.shape[0] * UNIT.value
    return -(-own // block), shape.batch_size * heads


def obstacle(name: str, shape: Shape, mask: MaskSpec, scale: float, *tensors: Tensor) -> str | None:
    """Returns why the kernel ``name`` does not take a call with these tensors, apart from their addresses, if so."""
    first = tensors[0]
    features, most = max(shape.head_dim, shape.value_dim), max(HOPPER[name])
    if INTERPRETED or architecture(first.device) != 90:
        return "the GPU is no Hopper"
    if mask.cu_seqlens_q is not None:
        return "packed sequences are short, or cannot be copied"
    if mask.block_table is not None:
        return "keys lie in pages"
    if scale <= 0:
        return "the scale is not positive"
    if mask.units_q is not None and features > _NARROW:
        return f"packed sequences of more than {_NARROW} features"
    if not _LEAST_FEATURES < features <= most:
        return f"{features} features, not {_LEAST_FEATURES + 1} to {most}"
    if any(t.dtype not in (torch.float16, torch.bfloat16) or t.dtype != first.dtype for t in tensors):
        return "the dtype is not float16 or bfloat16, or not one"
    blocks, rows = _blocks(name, shape, mask, _tiles(name, shape, mask).groups * _ROWS)
    looped = shape.tokens if _KERNELS[name].owns_keys else shape.keys
    if name != "forward" and looped < _SHORT and blocks * rows < programs_at_once(first.device) // 2:
        return "loops are few and short"
    if not all(map(supports_tma, tensors)):
        return "strides are none that the tensor memory accelerator takes"
    return None


def is_fused_faster(shape: Shape, mask: MaskSpec, device: torch.device) -> bool:
    """Returns whether one kernel for all gradients is faster than two."""
    width = max(shape.head_dim, shape.value_dim)
    if width > _NARROW:
        return False
    blocks, rows = _blocks("backward", shape, mask, HOPPER["backward"][_width(shape)].groups * _ROWS)
    uneven = 1.0  # the share of keys that fewer queries see than the first
    if mask.left is None:
        uneven = 0.0 if mask.right is None else min(shape.tokens / max(shape.keys, 1), 1.0)
    return blocks * rows >= _FUSED * (_EVEN + (1 - _EVEN) * uneven) * programs_at_once(device)


def splits_of(name: str, shape: Shape, mask: MaskSpec, device: torch.device) -> int:
    """Returns into how many splits loops are cut."""
    return _best_splits(name, shape, mask, _tiles(name, shape, mask), programs_at_once(device))


def _best_splits(name: str, shape: Shape, mask: MaskSpec, tiles: HopperTiles, programs: int) -> int:
    """Returns into how many splits loops are best cut with such tiles."""
    if mask.units_q is not None:
        return 1
    steps = loop_steps(name, shape, mask, tiles.groups * _ROWS, tiles.box)
    rows = shape.batch_size * (shape.key_heads if name == "key" else shape.heads)
    elements = shape.batch_size * max(
        shape.tokens * shape.heads * (shape.value_dim if name == "forward" else shape.head_dim),
        shape.keys * shape.key_heads * (shape.head_dim + shape.value_dim),
    )
    return best_splits(steps, rows, programs, elements, COSTS[name])


def _schedule(name: str, shape: Shape, mask: MaskSpec, tiles: HopperTiles, splits: int, itemsize: int) -> Schedule:
    blocks, rows = _blocks(name, shape, mask, tiles.groups * _ROWS)
    # Heads are taken in sections: see `triton.tiles.program_order`.
    owns_keys = _KERNELS[name].owns_keys
    length = (shape.tokens if owns_keys else shape.keys) // mask.sequences
    head_bytes = length * (shape.head_dim + shape.value_dim) * itemsize
    if name == "backward":  # and the sums of their gradients
        head_bytes += length * shape.head_dim * 4
    together = 1 if owns_keys else shape.group  # heads that share keys
    halved = name == "forward" and mask.right is not None and mask.units_q is None
    halved = halved and blocks * rows >= _HALVED * HOPPER_MULTIPROCESSORS
    section = heads_of_section(rows // together, head_bytes, 2 if halved else 1) * together
    return Schedule(shape.heads, shape.group, rows, blocks, section, splits)


def _boxes(
    kernel: _Kernel, tensors: Iterable[Tensor], tiles: HopperTiles, width: int, piece: int | None = None
) -> dict[str, Any]:
    """Returns descriptors of inputs and results, by name. ``piece``: the width for queries and keys, if another."""
    widths = dict.fromkeys(("q_desc", "k_desc"), piece or width)
    looped = ("q_desc", "do_desc") if kernel.owns_keys else ("k_desc", "v_desc")  # groups own rows of the others
    return {
        each: TmaTile(x, (0, 2, 1, 3), (1, 1, tiles.box if each in looped else _ROWS, widths.get(each, width)))
        for each, x in zip((*kernel.inputs, *kernel.results), tensors)
    }


def _strides_of(results: dict[str, Tensor], splits: int, unit: int = 1) -> dict[str, Any]:
    """Returns strides of results, or of their parts, in ``unit`` elements."""
    strides = {}
    for name, x in results.items():
        part = x.numel() if splits > 1 else 0
        b, n, h, _ = (stride // unit for stride in strides_of(x))
        strides[f"{name}_strides"] = SplitStrides(part // unit, b, n, h, x.shape[3])
    return strides


def _needs_counter(name: str, mask: MaskSpec, masked: bool, tiles: int, programs: int) -> bool:
    """Returns whether programs take tiles from a counter, which must be zero."""
    if name == "backward":  # the first tile too
        return True
    uneven = (x is not None for x in (mask.right, mask.left, mask.seqused_k, mask.units_q))
    if name == "forward" and loops_are_even(*uneven, masked):
        return bool(are_counted.fn(tiles, programs))
    return tiles > programs


def _plan_launch(
    kernel: _Kernel,
    name: str,
    call: Call,
    tiles: HopperTiles,
    splits: int,
    config: dict[str, Any],
    **arguments: Any,
) -> Plan:
    """Returns the launch of a kernel with such tiles, with these compile-time choices and arguments of its own."""
    shape, mask, softcap, terms = call.shape, call.mask, call.softcap, config.get("TERMS", 1)
    itemsize = call.dtype.itemsize if terms == 1 else 2 * terms
    schedule = _schedule(name, shape, mask, tiles, splits, itemsize)
    count = schedule.blocks * schedule.rows * splits
    programs = min(programs_at_once(call.device), count)
    scale = in_powers_of_two(call.scale) if softcap is None else call.scale / softcap
    scales = {"scale": scale} if name == "forward" else {"scales": Scales(scale, call.scale)}
    takes = (*kernel.inputs, *kernel.results, *kernel.others)
    parameters = parameters_of(kernel.function)
    # What a kernel may be given, and is not in this launch.
    missing: dict[str, Any] = {x: None for x in parameters if x in _OPTIONAL - {*takes, *arguments}}
    launch = Launch(
        kernel.function,
        programs,
        takes=takes,
        pdl=name != "forward",
        lengths=SeqLens(shape.tokens, shape.keys),
        schedule=schedule,
        right=bounds(shape, mask)[1],
        config=Config(
            CAUSAL=mask.right is not None,
            STAGES=tiles.stages,
            GROUPS=tiles.groups,
            SOFTCAP=None if softcap is None else softcap * LOG2_E,
            **config,
        ),
        **scales,
        **arguments,
        **missing,
    )
    masked = "tiles" in takes
    return Plan(launch, splits, _needs_counter(name, mask, masked, count, programs))


def plan(name: str, call: Call, tensors: tuple[Tensor, ...]) -> Plan:
    """Returns the launch of a kernel for some results, ``forward``, ``key`` or ``query``, that takes the call.

    ``tensors``, (q, k, v, out), (q, k, v, grad, dk, dv) or (q, k, v, grad, dq), are like those that it will be
    launched on; if loops are split, results will be parts, all in one float32 tensor, each in its result's memory
    order. Behind them come lse and statistics, or lse and δ, then counters, lengths of entries, units of packed
    sequences, and in the forward shifts of these, the packed result again, and the sink.
    """
    shape, mask = call.shape, call.mask
    tiles = _tiles(name, shape, mask)
    splits = splits_of(name, shape, mask, call.device)
    # A group's registers hold one gradient of wide keys.
    kernel = _KERNELS["wide key" if name == "key" and _width(shape) > _NARROW else name]
    inputs = len(kernel.inputs)
    results = dict(zip(kernel.results, tensors[inputs:], strict=True))
    pieces = _in_pieces(name, shape)
    by_address = splits > 1 or (pieces and name != "forward")
    widths = (_NARROW, 64) if pieces else (_width(shape),)
    arguments = _boxes(kernel, tensors[:inputs] if by_address else tensors, tiles, *widths)
    if by_address or mask.shifts is not None:
        unit = STRIDE_UNIT.value if pieces and name != "forward" else 1
        arguments |= _strides_of(results, splits, unit)
    else:
        arguments |= {f"{each}_strides": SplitStrides(0, 0, 0, 0, 0) for each in results}
    config = {"SPLIT": by_address, "PIECES": 3 if pieces else 1}
    return _plan_launch(kernel, name, call, tiles, splits, config, window=_window(call), **arguments)


_CACHE_WIDTH = 64  # columns that are swizzled together: see `tma.boxes_in`
_CACHE_LEAST = 8  # rows of a page: those after which the pattern repeats
_LATENT_LEAST = 16  # rows of a head of a latent cache that the kernel for every GPU takes


def cache_obstacle(call: Call, block_table: Tensor | None, k: Tensor) -> str | None:
    """Returns why the forward does not take packed queries on such a cache, if so, apart from `obstacle`."""
    if block_table is None:
        return None
    size, box = k.shape[1], _tiles("forward", call.shape, call.mask).box
    if size >= _CACHE_LEAST and (size % box == 0 or box % size == 0):
        return None
    return f"pages of {size} keys"


def plan_cache(call: Call, block_table: Tensor | None, tensors: tuple[Tensor, ...]) -> Launch:
    """Returns the launch of the forward for packed queries on a cache; for ``tensors`` see `plan`.

    Behind them come lse, statistics, the counts of `varlen.cache_units_kernel`, None, the block table or None, its
    units and shifts, the output again, and the sink.
    """
    shape, mask, kernel = call.shape, call.mask, _KERNELS["forward"]
    tiles = _tiles("forward", shape, mask)
    arguments = _boxes(kernel, tensors, tiles, _width(shape))
    rows = tiles.box if block_table is None else min(tensors[1].shape[1], tiles.box)
    for name, x in zip(("k_desc", "v_desc"), tensors[1:3]):
        arguments[name] = TmaTile(x, (0, 2, 1, 3), (1, 1, rows, _CACHE_WIDTH))
    arguments |= _strides_of({"out": tensors[3]}, 1)
    return _plan_launch(
        kernel, "forward", call, tiles, 1, {"CACHE": tiles.box}, window=_window(call), **arguments
    ).launch  # fmt: skip


def latent_obstacle(call: Call, rows: int, k: Tensor, out: Tensor) -> str | None:
    """Returns why `hopper.latent` does not take a call with so many rows of a head of keys, if so."""
    shape, mask = call.shape, call.mask
    if INTERPRETED or architecture(call.device) != 90:
        return "the GPU is no Hopper"
    if (shape.head_dim, shape.value_dim) != (LATENT_FEATURES.value, 2 * HALF.value) or not call.shared:
        return "rows are not 576 features, of which the first 512 are values"
    if rows <= _LATENT_LEAST:
        return f"{rows} rows"
    if mask.left is not None or call.softcap is not None or call.scale <= 0:
        return "a window, a cap, or a scale that is not positive"
    size, keys = k.shape[1], LATENT_KEYS.value
    if mask.block_table is not None and not (size >= _CACHE_LEAST and (size % keys == 0 or keys % size == 0)):
        return f"pages of {size} keys"
    if not call.aligned or not supports_tma(k) or out.shape[3] != 2 * HALF.value:
        return "the tensor memory accelerator does not take the keys"
    return None


def latent_keys(call: Call, k: Tensor) -> TmaTile:
    """Returns the descriptor of the keys that `hopper.latent` takes."""
    rows = LATENT_KEYS.value if call.mask.block_table is None else min(k.shape[1], LATENT_KEYS.value)
    return TmaTile(k, (0, 2, 1, 3), (1, 1, rows, _CACHE_WIDTH))


def plan_fused(call: Call, tensors: tuple[Tensor, ...], added: Tensor) -> Plan:
    """Returns the launch of the kernel ``backward`` for all gradients, that takes the call.

    ``tensors`` are (q, k, v, grad, dk, dv), and ``added`` (B, H, N, D) is what it adds up to dq, in float32. Behind
    them come lse, δ, counters, how many tiles were added, and lengths of entries.
    """
    return _plan_fused("backward", call, tensors, added, window=_window(call))


def _plan_fused(
    kernel: str, call: Call, tensors: tuple[Tensor, ...], added: Tensor, bias: Tensor | None = None,
    zeros: bool = False, /, **arguments: Any,
) -> Plan:  # fmt: skip
    shape, mask = call.shape, call.mask
    width = _width_of(shape, bias)
    tiles = HOPPER["backward"][width]
    # A causal query sees nothing behind the last key, unless it sees keys behind its own place.
    shown = mask.right is None or bounds(shape, mask)[1] > 0
    ends = shown and (mask.units_k is not None or shape.keys % (tiles.groups * _ROWS) > 0)
    config: dict[str, Any] = {"ORDERED": True, "PARTS": HOPPER_PARTS[width], "ENDS": ends}
    if bias is not None:
        config["BIAS"] = 0
        if _steps_of(bias)[2] > 0:
            config |= {"PARTS": 1, "BIAS": HOPPER_BIASED[width] // bias.element_size(), "ZEROS": zeros}
    boxes = _boxes(_KERNELS["backward"], tensors, tiles, width)
    boxes["added"] = TmaTile(added, (0, 1, 2, 3), (1, 1, _ROWS, _ROWS))
    arguments |= boxes
    return _plan_launch(_KERNELS[kernel], "backward", call, tiles, 1, config, **arguments)


def mask_obstacle(name: str, call: Call, masking: Masking, *tensors: Tensor) -> str | None:
    """Returns why the kernel ``name``, forward or backward, does not take a call with a mask, a bias or slopes, if so."""
    shape, mask, mask_tiles = call.shape, call.mask, masking.tiles
    if sum(x is not None for x in (masking.bias, mask_tiles, masking.alibi)) > 1:
        return "more than one of a mask, a bias and slopes"
    if masking.bias is not None and not _is_bias_readable(masking.bias):
        return "strides or dtype of the bias"
    if masking.bias is not None and shape.tokens < _ROWS:  # keys are read once more: see `bias.seen_keys_kernel`
        return "a bias of few queries"
    if call.softcap is not None or mask.left is not None or mask.seqused_k is not None:
        return "a mask, a bias or slopes besides a cap, a window or lengths"
    if not call.aligned:
        return "an address is no multiple of 16 bytes"
    if name == "backward" and max(shape.head_dim, shape.value_dim) > _NARROW:
        return f"more than {_NARROW} features"
    if name == "backward" and shape.group > 1 and mask_tiles is not None and mask_tiles.shape[1] > 1:
        return "query heads of a key head have masks of their own"
    return obstacle("forward", shape, mask, call.scale, *tensors)


def _mask_sizes(tiles: Tensor) -> TileMaskSizes:
    entries, heads, rows, columns = tiles.shape
    return TileMaskSizes(rows, columns, heads if entries > 1 else 0, 1 if heads > 1 else 0)


def _steps_of(bias: Tensor) -> list[int]:
    """Returns strides of a bias, with 0 for an axis of size one."""
    return [0 if size == 1 else stride for size, stride in zip(bias.shape, bias.stride())]


def _is_bias_readable(bias: Tensor) -> bool:
    """Returns whether kernels read a bias: keys are adjacent, and other strides multiples of `VECTOR`."""
    *others, last = _steps_of(bias)
    small = max(others) // VECTOR.value < 2**31 and others[2] * _ROWS * 2 < 2**31
    known = bias.dtype in (torch.float16, torch.bfloat16, torch.float32)
    return known and last == 1 and small and all(x % VECTOR.value == 0 for x in others)


def _masking_arguments(masking: Masking) -> tuple[str, dict[str, Any]]:
    """Returns what kernels are called with a mask by tiles, a bias, or slopes, and sizes of it."""
    if masking.bias is not None:
        return "biased", {"bias_strides": BiasSteps(*(x // VECTOR.value for x in _steps_of(masking.bias)[:3]))}
    if masking.alibi is not None:
        *entries, heads = masking.alibi.stride()
        return "sloped", {"alibi_strides": AlibiStrides(entries[0] if entries else 0, heads)}
    tiles: Any = masking.tiles  # without slopes there are some: see `mask_obstacle`
    return "masked", {"mask_sizes": _mask_sizes(tiles)}


def plan_masked_forward(call: Call, masking: Masking, tensors: tuple[Tensor, ...]) -> Plan:
    """Returns the launch of the forward with a mask by tiles, a bias, or slopes, on q, k, v and out.

    Behind them come lse, statistics, a counter, the sink, and the mask's tiles, lists of rows, and bits, of columns too;
    or the bias and what `plan_seen_keys` finds; or the slopes.
    """
    shape, pieces = call.shape, _in_pieces("forward", call.shape)
    tiles = _tiles("forward", shape, call.mask)
    if _width(shape) == 64:  # which are as high as those of the mask, and leave registers for slopes
        tiles = HOPPER_SMALLER["forward"]
    splits = 1
    if masking.tiles is not None and shape.tokens <= TILE.value:  # few queries on a cache, of which most is seen
        steps = loop_steps("forward", shape, call.mask, tiles.groups * _ROWS, tiles.box)
        rows, programs = shape.batch_size * shape.heads, programs_at_once(call.device)
        elements = rows * shape.tokens * shape.value_dim
        splits = best_splits(steps, rows, programs, elements, COSTS["forward"])
    widths = (_NARROW, 64) if pieces else (_width(shape),)
    arguments = _boxes(_KERNELS["forward"], tensors[:3] if splits > 1 else tensors, tiles, *widths)
    if splits > 1:
        arguments |= _strides_of({"out": tensors[3]}, splits)
    else:
        arguments["out_strides"] = SplitStrides(0, 0, 0, 0, 0)
    kind, sizes = _masking_arguments(masking)
    config = {"PIECES": 3 if pieces else 1, "SPLIT": splits > 1}
    return _plan_launch(
        _KERNELS[f"{kind} forward"], "forward", call, tiles, splits, config, window=None, **sizes, **arguments
    )  # fmt: skip


def plan_seen_keys(call: Call, bias: Tensor, k: Tensor, v: Tensor) -> tuple[Launch, Buffer]:
    """Returns the launch that finds keys which a bias hides from all queries, on k, v and the bias, and its result."""
    shape, mask = call.shape, call.mask
    words = (shape.batch_size, shape.key_heads, -(-shape.keys // 128) * 4)
    layout = layout_for(Strides, k, v)
    of_k, of_v = layout.strides
    sizes = Sizes(
        shape.tokens, shape.keys, shape.heads, shape.group, 1, 1, 1, 0, 0, 0, *bounds(shape, mask), call.scale,
        shape.batch_size,
    )  # fmt: skip
    config = TritonConfig(
        False, mask.right is not None, False, layout.vec, layout.unit, layout.wide, shape.head_dim, shape.value_dim,
        "ieee", 64, 32, tile_width(shape.head_dim), tile_width(shape.value_dim), False,
    )  # fmt: skip
    launch = Launch(
        seen_keys_kernel,
        math.prod(words),
        takes=("k", "v", "bias", "seen"),
        sizes=sizes,
        strides=ForwardStrides(of_k, of_k, of_v, of_v),
        steps=BiasSteps(*(x // VECTOR.value for x in _steps_of(bias)[:3])),
        config=config,
    )
    return launch, Buffer.rows(words, torch.int32)


def plan_masked_backward(
    call: Call, masking: Masking, tensors: tuple[Tensor, ...], added: Tensor, sums: BiasSumsPlan | None = None
) -> Launch:  # fmt: skip
    """Returns the launch of the kernel for all gradients with a mask by tiles, a bias, or slopes.

    For the tensors see `plan_fused`. Behind them come lse, δ, counters, how many tiles were added, and the mask's tiles,
    lists of columns, and bits, of columns too; or the bias, what `plan_seen_keys` finds, and ``dbias`` or None; or the
    slopes.
    """
    kind, arguments = _masking_arguments(masking)
    bias = masking.bias
    if bias is not None and _steps_of(bias)[2] > 0:
        box = (1, 1, queries_of_a_sum(call.shape, bias), _ROWS)
        once = bias[tuple(slice(1 if step == 0 else None) for step in _steps_of(bias))]
        tiles = {"bias": once} if sums is None else {"bias": once, "dbias": sums.like}
        arguments |= {name: TmaTile(x, (0, 1, 2, 3), box) for name, x in tiles.items()}
    zeros = sums is not None and sums.sums is None and call.mask.right is not None
    return _plan_fused(f"{kind} backward", call, tensors, added, bias, zeros, **arguments).launch


class BiasSumsPlan(NamedTuple):
    """The parts of a bias's gradient, of which some are summed or rounded, or the gradient itself."""

    like: Tensor  # (B, H, R, M)
    parts: Buffer | None
    sums: Launch | None


def plan_bias_sums(call: Call, bias: Tensor) -> BiasSumsPlan | str:
    """Returns where `plan_masked_backward` writes the gradient of a bias, and the launch that sums it over broadcast axes.

    Gradients of logits are in the dtype of q. Of a bias of keys there are sums of tiles of queries, of all keys of whole
    tiles. Returns a reason where it writes none.
    """
    shape, mask, of_keys = call.shape, call.mask, _steps_of(bias)[2] == 0
    if of_keys and bias.shape[2] > 1:
        return "rows of the bias lie in one place"
    entries, members = shape.batch_size // bias.shape[0], shape.heads // bias.shape[1]
    rows, width, dtype = shape.tokens, -(-shape.keys // 8) * 8, call.dtype
    if of_keys:
        rows, width, dtype = -(-rows // queries_of_a_sum(shape)), -(-shape.keys // 128) * 128, torch.float32
    whole = (shape.batch_size, shape.heads, rows, width)
    like = torch.empty(whole, dtype=dtype, device="meta")[..., : shape.keys]
    if entries == members == 1 and not of_keys and width == shape.keys and dtype == bias.dtype:
        return BiasSumsPlan(like, None, None)
    if math.prod(whole) * dtype.itemsize > _MOST_PARTS:
        return "parts of the bias's gradient are too large"
    block_n = min(max(1 << (shape.keys - 1).bit_length(), 64), 1024)
    block_r = 2048 // block_n
    reach = shape.keys if mask.right is None else shape.keys - shape.tokens + bounds(shape, mask)[1]
    launch = Launch(
        sum_bias_kernel,
        -(-shape.keys // block_n) * -(-bias.shape[2] // block_r) * bias.shape[0] * bias.shape[1],
        takes=("parts", "dbias"),
        sizes=BiasSums(shape.heads, rows, width, bias.shape[2], shape.keys, reach, bias.shape[1], entries, members),
        SUM_ROWS=of_keys,
        BLOCK_R=block_r,
        BLOCK_N=block_n,
    )
    return BiasSumsPlan(like, Buffer.rows(whole, dtype), launch)


def _window(call: Call) -> Window | None:
    return None if call.mask.left is None else Window(bounds(call.shape, call.mask)[0])


_MOST_STRIDE = 2**31  # strides and places of rows in results travel in 32 bits
TERMS_COSTS = Costs(1, 2, 1e5)
_TERMS_SPLITS = (2, 3, 4, 6)
_TERMS_LEAST = 128
"""Fitted to one head of 512 … 8192 tokens with 64 and 128 features on an H200: where two splits of every loop or
more run at the same time, as many as do, up to six, of so many rows at least of the longest loop."""


def terms_obstacle(shape: Shape, terms: int, device: torch.device, results: Iterable[Tensor]) -> str | None:
    """Returns why the backward kernels for factors in terms do not take a call that is plain otherwise, if so."""
    if INTERPRETED or architecture(device) != 90:
        return "the GPU is no Hopper"
    if shape.block_d not in HOPPER_TERMS[terms]:
        return f"tiles of {shape.block_d} features"
    rows = max(shape.tokens, shape.keys)
    if all(f == 1 and max(b, rows * n, h) < _MOST_STRIDE for b, n, h, f in map(strides_of, results)):
        return None
    return "strides of gradients are too large, or their features not adjacent"


def _splits_of_terms(steps: list[int], step: int, rows: int, programs: int, elements: int) -> int:
    """Returns into how many splits loops with steps of ``step`` rows are cut; see `problem.best_splits`."""
    most = min(programs // (len(steps) * rows), max(steps) * step // _TERMS_LEAST)
    fit = [splits for splits in _TERMS_SPLITS if splits <= most]
    return max(fit) if fit else best_splits(steps, rows, programs, elements, TERMS_COSTS)


def plan_terms(name: str, call: Call, factors: tuple[Tensor, ...], terms: int, results: dict[str, Tensor]) -> Plan:
    """Returns the launch of a backward kernel, ``key`` or ``query``, on terms of q, k, v and the gradient.

    ``factors`` are like one term of each. Behind all terms come the results, in float32, or their parts, then
    lse, δ, inverse and counters.
    """
    shape, mask = call.shape, call.mask
    tiles = HOPPER_TERMS[terms][shape.block_d]
    steps = loop_steps(name, shape, mask, _ROWS, tiles.box)
    rows, elements = _blocks(name, shape, mask, _ROWS)[1], sum(x.numel() for x in results.values())
    splits = _splits_of_terms(steps, tiles.box, rows, programs_at_once(call.device), elements)
    kernel = _KERNELS[f"{name} of terms"]
    arguments = _boxes(kernel, (x.repeat(terms, 1, 1, 1) for x in factors), tiles, shape.block_d)
    arguments |= _strides_of(results, splits)
    if name == "key":
        arguments["window"] = None
    return _plan_launch(kernel, name, call, tiles, splits, {"SPLIT": True, "TERMS": terms}, **arguments)
