"""Valid calls of the public functions: which choices each is made of.

Every function here asks for choices by name and makes a `Call` of them, which is valid whatever the answers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from random_cases.arrays import Array, draw_memory
from random_cases.choices import Choices

__all__ = ["OPERATORS", "Call", "make_call"]

DTYPES = ("float32", "float16", "bfloat16")
NUMBERS = ("float32", "float32", "float32", "float16", "bfloat16", "float64")
"""Dtypes of what has one of its own: frequencies, decays, states."""
TILES = (16, 32, 64, 128)
SIZES = tuple(sorted({1, 2, 3, 4, 5, 7, 11, 13, 29, 67, 97, 191, 257, *(t + d for t in TILES for d in (-1, 0, 1))}))
"""Of sequences: small, prime, and about the sizes of tiles."""
_GROUPS = (1, 1, 1, 2, 3, 4, 8)
"""Query heads to a head of keys."""
LONG = (300, 511, 513, 1023, 1025, 2049, 4099)
FEATURES = (
    1, 2, 3, 5, 8, 12, 15, 16, 17, 24, 31, 32, 33, 40, 48, 64, 64, 65, 80, 96, 127, 128, 128, 129, 192, 255, 256,
)  # fmt: skip
ELEMENTS = {False: (2**14, 2**14, 2**15, 2**15, 2**16, 2**16, 2**18, 2**21), True: (2**11,)}
"""Most elements of a tensor, where sizes need not and where they must suit the interpreter: one for each call."""
PRODUCTS = {False: (2**16, 2**17, 2**18, 2**23), True: (2**12,)}
"""Most products of a query and a key, over all batch entries and heads."""
MOST_PRODUCTS = 2**25
"""The same where there are as many queries as keys: the definition holds some twenty matrices of float64."""
_FIRST = {"lrpe_rotate": 2, "lrpe_cosine": 2, "flash_attention": 3, "linear_attention": 3, "rotary_attention": 2}
"""How many arguments may be given without a name, of those that have not six."""
FARTHEST = 2**24
"""Positions up to which angles are exact; see the guide of LRPE."""


@dataclass(frozen=True)
class Call:
    """A call of a public function."""

    operator: str
    arrays: dict[str, Array]
    """Tensors, by argument."""
    options: dict[str, Any]
    """Other arguments. One that is left out is not here."""
    outputs: tuple[tuple[int, ...], ...]
    """Shapes of the results."""
    seed: int
    """Of all numbers."""
    gradients: tuple[Array | None, ...] = ()
    """Of the results; None for one of which none comes. Empty where no gradient is asked for."""
    positional: int = 0
    """How many arguments are given without a name."""
    recorded: bool = True
    """Whether gradients are being recorded."""
    matmul_precision: str = "highest"
    """PyTorch's setting for products of float32 matrices."""
    record: dict[str, Any] = field(default_factory=dict, compare=False)
    """The choices that made it, those apart that are the simplest."""
    answers: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)
    """All of them."""
    varied: dict[str, int] = field(default_factory=dict, compare=False, repr=False)
    """How many options there were, for each."""

    @property
    def dtype(self) -> str:
        """The dtype of the first tensor."""
        return next(iter(self.arrays.values())).dtype


def make_call(operator: str, choices: Choices) -> Call:
    """A call of an operator, made of choices."""
    recorded = not choices.flag("no_grad", 0.1)
    call = _MAKERS[operator](choices)
    positional = choices.number("positional", (0, 0, 0, 2, 3, 6), 0, _FIRST.get(operator, 6))
    call = replace(call, operator=operator, positional=positional, seed=_seed(choices))
    call = replace(call, recorded=recorded)
    wanted = recorded and any(array.grad for array in call.arrays.values())
    if wanted:
        call = replace(call, gradients=_gradients(choices, call))
    return replace(call, record=choices.record, answers=choices.answers, varied=choices.options)


def _seed(choices: Choices) -> int:
    return choices.number("seed", range(1000), 0, 10**9)


def _gradients(choices: Choices, call: Call) -> tuple[Array | None, ...]:
    """Incoming gradients: of any memory, and not of every result."""
    found: list[Array | None] = []
    for index, shape in enumerate(call.outputs):
        name = f"gradient{index or ''}"
        first = index == 0
        if len(call.outputs) > 1 and choices.flag(f"{name}.none", 0.25) and (not first or len(call.outputs) > 1):
            found.append(None)
            continue
        dtype = call.dtype if first or call.dtype == "float64" else "float32"
        found.append(Array(shape, dtype, draw_memory(choices, name, shape, dtype)))
    if not any(found):
        shape = call.outputs[0]
        found[0] = Array(shape, call.dtype, draw_memory(choices, "gradient", shape, call.dtype))
    return tuple(found)


# ----------------------------------------------------------------------------------------------------------
# What calls of several operators have
# ----------------------------------------------------------------------------------------------------------


def _dtype(choices: Choices) -> str:
    return choices.choice("dtype", DTYPES * 8 + ("float64",), compiled=1)


def _backend(choices: Choices, beyond: bool) -> str:
    """Which backend; the kernels are asked for by name where they can run the call."""
    options = ("torch", "auto") if beyond else ("triton",) * 6 + ("auto",) * 3 + ("torch",)
    return choices.choice("backend", options)


def _batch(choices: Choices) -> int:
    sizes = (0, *(1, 1, 2, 3) * 3) if choices.small else (0, 33, 128, *(1, 2, 3, 4, 5, 7) * 4)
    return choices.number("B", sizes, 0, 512, 1)


def _elements(choices: Choices) -> int:
    return choices.room("elements", ELEMENTS[choices.small])


def _products(choices: Choices) -> int:
    return choices.room("products", PRODUCTS[choices.small])


def _square(batch: int, heads: int) -> int:
    """The most queries that there may be as many keys of."""
    return math.isqrt(MOST_PRODUCTS // max(batch * heads, 1))


def _length(choices: Choices, name: str, most: int) -> int:
    """A length, so that a tensor or a product has at most so many elements."""
    if choices.small:
        sizes = (0, *[n for n in SIZES if n < 20] * 2, *[n for n in SIZES if 20 < n < 70])
    else:
        sizes = (0, *SIZES * 4, *LONG)
    return choices.number(name, sizes if choices.seed is None else _within(sizes, most), 0, 2**17, 1)


def _within(sizes: Sequence[int], most: int) -> Sequence[int]:
    return [size for size in sizes if size <= most] or [1]


def _heads(choices: Choices, name: str, most: int = 16, least: int = 0) -> int:
    sizes = (1, 2, 3) if choices.small else (1, 2, 3, 4, 5, 6, 7, 8, 12, 16)
    return choices.number(name, (0, *[s for s in sizes if s <= most] * 4), least, 64, 1, compiled=2)


def _features(choices: Choices, name: str, most: int) -> int:
    sizes = [size for size in FEATURES if size <= (min(most, 40) if choices.small else most)]
    return choices.number(name, sizes, 1, most, 1, compiled=1)


def _array(
    choices: Choices, name: str, shape: tuple[int, ...], dtype: str, grad: bool = False, **values: Any
) -> Array:
    return Array(shape, dtype, draw_memory(choices, name, shape, dtype), grad=grad, **values)


def _grad(choices: Choices, name: str, share: float = 0.75) -> bool:
    return choices.flag(f"{name}.grad", share, compiled=2)


def _numbers(choices: Choices, name: str, shape: tuple[int, ...], constant: bool, **values: Any) -> Array:
    """A tensor with a dtype of its own, that may want a gradient unless it is constant."""
    dtype = choices.choice(f"{name}.dtype", NUMBERS, compiled=1)
    return _array(choices, name, shape, dtype, not constant and _grad(choices, name, 0.5), **values)


def _integers(choices: Choices, name: str, numbers: Sequence[int], dtypes: Sequence[str]) -> Array:
    """A vector of integers, of any memory but expanded."""
    dtype = choices.choice(f"{name}.dtype", dtypes, compiled=2)
    kinds = ("dense", "dense", "unaligned", "sliced", "stepped")
    memory = draw_memory(choices, name, (len(numbers),), dtype, kinds=kinds)
    return Array((len(numbers),), dtype, memory, "numbers", numbers=tuple(numbers))


def _cuts(choices: Choices, name: str, count: int, length: int) -> list[int]:
    """Bounds of packed sequences, some of which are empty; there may be rows behind the last."""
    end = length - choices.number(f"{name}.tail", (0, 0, 0, 0, 1, 5, 70), 0, length)
    inner = [choices.number(f"{name}.cut{i}", range(end + 1), 0, end) for i in range(count - 1)]
    return [0, *sorted(inner), end]


def _spoilt_behind(choices: Choices, arrays: dict[str, Array], spoilt: Mapping[str, list[int]]) -> dict[str, Array]:
    """Arrays (1, N, …) with rows of NaN behind the last of their packed sequences, whose bounds come by name."""
    given = {name: cuts for name, cuts in spoilt.items() if cuts[-1] < arrays[name].shape[1]}
    if not given or not choices.flag("nan_in_tail", 0.7):
        return {}
    return {name: replace(arrays[name], ends=(cuts[-1],)) for name, cuts in given.items()}


def _sequences(choices: Choices) -> int:
    return choices.number("sequences", (1, 2, 3, 4, 5, 9), 1, 100, 1)


def _used_keys(
    choices: Choices, name: str, batch: int, keys: int, arrays: dict[str, Array], spoilt: Sequence[str]
) -> dict[str, Array]:
    """How many keys of each batch entry are used, and ``spoilt`` of the arrays, which may be NaN behind them."""
    shares = [choices.number(f"length{b}", range(9), 0, 8, 8) for b in range(batch)]
    near = [choices.number(f"length{b}.less", (0, 0, 1, 2), 0, 4) for b in range(batch)]
    ends = [max(share * keys // 8 - less, 0) for share, less in zip(shares, near)]
    found = {name: _integers(choices, name, ends, ("int64", "int32"))}
    if arrays and batch and choices.flag("nan_behind", 0.7):
        found |= {other: replace(arrays[other], ends=tuple(ends)) for other in spoilt}
    return found


def _scale(choices: Choices, name: str) -> dict[str, float]:
    """A factor, or nothing: the default."""
    value = choices.choice(name, (None, None, None, 0.3, 1.0, 0.125, -0.25, 0.0, 1, 0.7071067811865476))
    return {} if value is None else {name: value}


# ----------------------------------------------------------------------------------------------------------
# LRPE
# ----------------------------------------------------------------------------------------------------------

_ACTIVATIONS = ("none", "none", "relu", "sigmoid", "silu", "softmax", "softmax_sequence", "softmax_sequence")
_INTEGERS = ("int64", "int32", "int16", "int8", "uint8")
_HIGHEST = {"int64": FARTHEST, "int32": FARTHEST, "int16": 2**15 - 1, "int8": 127, "uint8": 255}


def _lrpe(choices: Choices, paired: bool) -> Call:
    dtype = _dtype(choices)
    single = choices.flag("three_dimensions", 0.15, compiled=2)
    heads = 1 if single else _heads(choices, "H")
    angles = _features(choices, "angles", 4096 if choices.seed is None else 128)
    if not choices.small and choices.flag("wide", 0.05, compiled=1):
        angles = choices.number("wide.angles", (257, 512, 1000, 1024, 4096), 1, 5000, 1, compiled=1)
    features = 2 * angles if paired else angles
    where = choices.choice(
        "positions",
        ("offset", "offset", "offset", "offset tensor", "position_ids", "cu_seqlens", "grid"),
        compiled=2,
    )
    batch = 1 if where == "cu_seqlens" else _batch(choices)
    most = _elements(choices) // max(batch * heads * features, 1)
    prefix = 0 if where == "position_ids" else choices.number("prefix", (0, 0, 0, 1, 2, 5, 17), 0, 64, compiled=2)
    options: dict[str, Any] = {"activation": choices.choice("activation", _ACTIVATIONS, compiled=1)}
    axes = 1
    if where == "grid":
        axes = choices.number("grid.axes", (1, 2, 2, 3, 4, 5), 1, 6, 1, compiled=1)
        side = max(1, int(max(most - prefix, 1) ** (1 / axes)))
        grid = [
            choices.number(f"grid{i}", _within((1, 2, 3, 4, 5, 7, 16, 17), side), 1, 300, 1) for i in range(axes)
        ]
        options["grid"] = (list if choices.flag("grid.list", 0.2) else tuple)(grid)
        tokens = prefix + math.prod(grid)
    else:
        tokens = _length(choices, "N", most)
        prefix = min(prefix, tokens)
    if prefix or choices.flag("prefix.given", 0.1):
        options["prefix"] = prefix
    shape = (batch, tokens, features) if single else (batch, tokens, heads, features)
    size = choices.choice("x.size", (1.0, 1.0, 1.0, 0.1, 4.0))
    nan = choices.flag("x.nan", 0.05)
    grad = not nan and _grad(choices, "x")
    x = _array(choices, "x", shape, dtype, grad, scale=size, row_of_nan=nan)
    arrays = {
        "x": x,
        "theta": _theta(choices, heads, -(-angles // axes) if where != "position_ids" else angles, nan),
    }
    most_axes = max(angles // arrays["theta"].shape[-1], 1)
    arrays |= _places(choices, where, batch, tokens, options, most_axes)
    if paired and choices.flag("interleaved", compiled=1):
        options["interleaved"] = True
    options["backend"] = _backend(choices, dtype == "float64" or features > 8192)
    return Call("", arrays, options, ((*shape[:-1], features if paired else 2 * features),), 0)


def _theta(choices: Choices, heads: int, most: int, constant: bool) -> Array:
    rows = choices.choice("theta.rows", ("vector", "shared", "per head", "per head"), compiled=1)
    kind = choices.choice("theta.length", ("full", "full", "one", "some"), compiled=1)
    length = {"full": most, "one": 1}.get(kind) or choices.number(
        "theta.E", range(1, most + 1), 1, most, 1, compiled=1
    )
    shape = {"vector": (length,), "shared": (1, length), "per head": (heads, length)}[rows]
    dtype = choices.choice("theta.dtype", NUMBERS, compiled=1)
    values = choices.choice("theta.values", ("frequencies", "frequencies", "frequencies", "uniform", "zeros"))
    grad = not constant and _grad(choices, "theta", 0.5)
    return _array(choices, "theta", shape, dtype, grad, values=values)


def _places(
    choices: Choices, where: str, batch: int, tokens: int, options: dict[str, Any], most_axes: int
) -> dict[str, Array]:
    """The arguments that say where tokens stand, and changes to ``options``; ``most_axes`` of positions."""
    reach = choices.choice("reach", (20, 20, 1000, 1_000_003, FARTHEST))
    near = max(reach - tokens, 0)
    if where == "grid":
        return {}
    if where == "position_ids":
        dtype = choices.choice("position_ids.dtype", _INTEGERS, compiled=1)
        axes = choices.number("position_ids.axes", (0, 1, 1, 1, 2, 3, 5), 0, 6, compiled=1)
        axes = min(axes, most_axes)
        sizes: tuple[tuple[int, ...], ...] = ((tokens,), (batch, tokens), (batch, tokens, axes))
        flat = choices.flag("position_ids.flat", 0.5, compiled=2) and axes == 1
        shape = sizes[0 if axes == 0 else 1 if flat else 2]
        high = min(reach, _HIGHEST[dtype])
        low = -high if dtype != "uint8" and choices.flag("position_ids.negative", 0.3) else 0
        return {
            "position_ids": _array(choices, "position_ids", shape, dtype, values="integers", numbers=(low, high))
        }
    sign = -1 if choices.flag("offset.negative", 0.2) else 1
    start = sign * choices.number("offset", (0, 0, 1, 7, 100, near, near // 2), 0, FARTHEST)
    tensor = where == "offset tensor" or (where == "cu_seqlens" and choices.flag("offset.tensor", 0.3, compiled=1))
    found: dict[str, Array] = {}
    if where == "cu_seqlens":
        cuts = _cuts(choices, "cu_seqlens", _sequences(choices), tokens)
        found["cu_seqlens"] = _integers(choices, "cu_seqlens", cuts, ("int32", "int64"))
    if tensor:
        dtype = choices.choice("offset.dtype", _INTEGERS, compiled=1)
        high = min(abs(start), _HIGHEST[dtype])
        low = -high if sign < 0 and dtype != "uint8" else 0
        each = (batch,) if choices.flag("offset.each", 0.6, compiled=2) else ()
        found["offset"] = _array(choices, "offset", each, dtype, values="integers", numbers=(low, high))
    elif start or choices.flag("offset.given", 0.1):
        options["offset"] = start
    return found


# ----------------------------------------------------------------------------------------------------------
# Flash attention
# ----------------------------------------------------------------------------------------------------------

_MOST_PAGES = 90
"""Pages of keys; batch entries share them where they have more."""


def _flash_attention(choices: Choices) -> Call:
    dtype = _dtype(choices)
    packed = choices.choice("packed", ("no",) * 4 + ("queries", "keys", "both"), compiled=1)
    batch = 1 if packed != "no" else _batch(choices)
    key_heads = _heads(choices, "Hkv", 8)
    heads = key_heads * choices.number("group", _GROUPS[: 5 if choices.small else None], 1, 32, 1, compiled=2)
    most_features = 300 if dtype == "float64" or choices.flag("wide", 0.02, compiled=1) else 256
    features = _features(choices, "D", most_features)
    values = features if choices.flag("E=D", 0.7, compiled=1) else _features(choices, "E", most_features)
    room = _elements(choices) // max(batch * max(heads, 1) * max(features, values), 1)
    square = _square(batch, heads)
    tokens = _length(choices, "N", min(room, square) if packed in ("queries", "keys") else room)
    alike = packed in ("queries", "keys") or (tokens <= square and choices.flag("M=N", 0.4))
    most = _products(choices) // max(batch * heads * tokens, 1)
    keys = tokens if alike else _length(choices, "M", min(room, most))
    used = packed == "no" and choices.flag("seqused_k", 0.2, compiled=2)
    paged = used and choices.flag("block_table", 0.3, compiled=2)
    of_keys = (batch, keys)
    if paged:
        page = choices.number("page", (16, 1, 2, 7, 16, 64), 1, 256, 16, compiled=2)
        table = (batch, -(-keys // page))
        of_keys, keys = (min(math.prod(table), _MOST_PAGES), page), table[1] * page
    size = choices.choice("size", (1.0, 1.0, 1.0, 0.1, 3.0))
    nan = choices.flag("q.nan", 0.05)
    constant = nan or (paged and not choices.answers["no_grad"])
    shapes = {
        "q": (batch, tokens, heads, features),
        "k": (*of_keys, key_heads, features),
        "v": (*of_keys, key_heads, values),
    }
    arrays = {}
    for name, shape in shapes.items():
        grad = not constant and _grad(choices, name)
        scale = size if name != "v" else 1.0
        arrays[name] = _array(choices, name, shape, dtype, grad, scale=scale, row_of_nan=nan and name == "q")
    if packed != "no":
        sequences = _sequences(choices)
        ends: dict[str, list[int]] = {}
        if packed in ("queries", "both"):
            cuts = _cuts(choices, "cu_seqlens_q", sequences, tokens)
            arrays["cu_seqlens_q"] = _integers(choices, "cu_seqlens_q", cuts, ("int32", "int64"))
            ends = dict.fromkeys("qkv", cuts)
        if packed in ("keys", "both"):
            cuts = _cuts(choices, "cu_seqlens_k", sequences, keys)
            arrays["cu_seqlens_k"] = _integers(choices, "cu_seqlens_k", cuts, ("int32", "int64"))
            ends = {"q": cuts, **ends, "k": cuts, "v": cuts}
        arrays |= _spoilt_behind(choices, arrays, ends)
    if used:
        arrays |= _used_keys(choices, "seqused_k", batch, keys, {} if paged else arrays, ("k", "v"))
    if paged:
        pages = (0, max(of_keys[0] - 1, 0))
        arrays["block_table"] = _array(choices, "block_table", table, "int32", values="integers", numbers=pages)
    if choices.flag("sink", 0.2, compiled=2):
        arrays["sink"] = _numbers(choices, "sink", (heads,), constant)
    options: dict[str, Any] = _scale(choices, "scale")
    softcap = choices.choice("softcap", (None, None, None, None, 0.5, 5, 30.0), compiled=2)
    if softcap is not None:
        options["softcap"] = softcap
    if choices.flag("causal", compiled=2):
        options["causal"] = True
    if choices.flag("window", 0.3, compiled=1):
        bounds = (None, 0, 1, 2, 5, 16, 31, 64, 100, 5000)
        window = [choices.choice(f"window{side}", bounds) for side in ("left", "right")]
        options["window"] = (list if choices.flag("window.list", 0.2) else tuple)(window)
    precision = choices.choice("float32_precision", (None, None, "highest", "high", "medium"), compiled=1)
    if precision is not None:
        options["float32_precision"] = precision
    outputs: tuple[tuple[int, ...], ...] = ((batch, tokens, heads, values),)
    if choices.flag("return_lse", compiled=2):
        options["return_lse"] = True
        outputs += ((batch, heads, tokens),)
    options["backend"] = _backend(choices, dtype == "float64" or max(features, values) > 256)
    setting = choices.choice("matmul_precision", ("highest",) * 8 + ("high", "medium"), compiled=1)
    return Call("", arrays, options, outputs, 0, matmul_precision=setting)


# ----------------------------------------------------------------------------------------------------------
# Linear attention
# ----------------------------------------------------------------------------------------------------------


def _linear_attention(choices: Choices) -> Call:
    dtype = _dtype(choices)
    encoding = choices.choice("encoding", ("none", "rotate", "rotate", "cosine"), compiled=1)
    where = choices.choice("positions", ("offset", "offset", "offset tensor", "cu_seqlens"), compiled=1)
    causal = not choices.flag("full", 0.2, compiled=1)
    batch = 1 if where == "cu_seqlens" else _batch(choices)
    heads = _heads(choices, "H", 8)
    wide = 40 if dtype == "float64" or choices.flag("wide", 0.02, compiled=1) else 0
    angles = _features(choices, "angles", {"none": 256, "rotate": 128, "cosine": 128}[encoding] + wide)
    features = 2 * angles if encoding == "rotate" else angles
    values = features if choices.flag("E=D", 0.6, compiled=1) else _features(choices, "E", 256 + wide)
    tokens = _length(choices, "N", _linear_room(choices, batch, heads, features, values, where == "cu_seqlens"))
    nan = choices.flag("q.nan", 0.05)
    arrays = {}
    for name, size in (("q", features), ("k", features), ("v", values)):
        grad = not nan and _grad(choices, name)
        shape = (batch, tokens, heads, size)
        arrays[name] = _array(choices, name, shape, dtype, grad, row_of_nan=nan and name == "q")
    activation = choices.choice("activation", ("none", "none", "relu", "sigmoid", "silu", "softmax"), compiled=1)
    options: dict[str, Any] = _scale(choices, "scale")
    if encoding != "none":
        options["encoding"] = encoding
        arrays["theta"] = _theta(choices, heads, angles, nan)
    if activation != "none":
        options["activation"] = activation
    if encoding == "rotate" and choices.flag("interleaved", compiled=1):
        options["interleaved"] = True
    arrays |= _places(choices, where, batch, tokens, options, 1)
    outputs: tuple[tuple[int, ...], ...] = ((batch, tokens, heads, values),)
    sequences = len(arrays["cu_seqlens"].numbers) - 1 if where == "cu_seqlens" else batch
    state = (sequences, heads, features * (2 if encoding == "cosine" else 1), values)
    if causal:
        decay = choices.choice("decay", (None, "head", "token", "token"), compiled=1)
        if decay is not None:
            of_decay = (heads,) if decay == "head" else (batch, tokens, heads)
            drawn = "decays" if choices.flag("decay.strong", 0.3) else "frequencies"
            arrays["decay"] = _numbers(choices, "decay", of_decay, nan, values=drawn, scale=-0.3)
        if choices.flag("initial_state", compiled=1):
            arrays["initial_state"] = _numbers(choices, "initial_state", state, nan)
        if choices.flag("return_state", compiled=1):
            options["return_state"] = True
            outputs += (state,)
    else:
        options["causal"] = False
    beyond = dtype == "float64" or max(state[2], values) > 256
    options["backend"] = _backend(choices, beyond)
    return Call("", arrays, options, outputs, 0)


def _linear_room(choices: Choices, batch: int, heads: int, features: int, values: int, packed: bool) -> int:
    """How many tokens there may be; the definition takes packed sequences as if each had all of them."""
    room = _elements(choices) // max(batch * heads * max(features, values), 1)
    return min(room, math.isqrt(_products(choices) // max(heads, 1))) if packed else room


# ----------------------------------------------------------------------------------------------------------
# Tensor-product attention
# ----------------------------------------------------------------------------------------------------------


def _factors(
    choices: Choices, dtype: str, batch: int, tokens: int, heads: int, features: int, gradients: bool, keys: int
) -> tuple[dict[str, Array], int, bool]:
    """The six factors, how many features a value has, and whether the kernels do not take them."""
    ranks: Sequence[int] = (1, 1, 1, 2, 2, 3) if choices.small else (*(1, 1, 1, 2, 2, 3, 4, 5, 8, 16) * 3, 17)
    rank_q = choices.number("Rq", (0, 1, 2, 3, 4, 6, 8, 16, 17), 0, 64, 1, compiled=1)
    rank_k = choices.number("Rk", ranks, 1, 32, 1, compiled=1)
    rank_v = rank_k if choices.flag("Rv=Rk", compiled=1) else choices.number("Rv", ranks, 1, 32, 1, compiled=1)
    values = features if choices.flag("E=D", 0.6, compiled=1) else _features(choices, "E", 256)
    size = choices.choice("size", (1.0, 1.0, 1.0, 0.1, 2.0))

    def rank_axis(name: str, rank: int) -> tuple[int, ...]:  # may be left out at rank one
        return () if rank == 1 and choices.flag(f"{name}.flat", compiled=2) else (rank,)

    shapes = {
        "aq": (batch, tokens, heads, rank_q),
        "ak": (batch, keys, heads, *rank_axis("ak", rank_k)),
        "av": (batch, keys, heads, *rank_axis("av", rank_v)),
        "bq": (batch, tokens, rank_q or heads, features),
        "bk": (batch, keys, *rank_axis("bk", rank_k), features),
        "bv": (batch, keys, *rank_axis("bv", rank_v), values),
    }
    nan = choices.flag("bq.nan", 0.05)
    arrays = {}
    for name, shape in shapes.items():
        if name != "aq" or rank_q:
            grad = gradients and not nan and _grad(choices, name)
            spoilt = nan and name == "bq"
            arrays[name] = _array(choices, name, shape, dtype, grad, scale=size, row_of_nan=spoilt)
    return arrays, values, max(rank_k, rank_v) > 16 or max(features, values) > 256


def _tpa_decode(choices: Choices) -> Call:
    dtype, batch = _dtype(choices), _batch(choices)
    heads = _heads(choices, "H", 16, 1)
    features = _features(choices, "D", 256)
    tokens = choices.number("N", (1,) * 8 + (2, 2, 3, 4, 5, 0, 17), 0, 100, 1, compiled=2)
    room = _elements(choices) // max(batch * max(heads, features), 1)
    keys = _length(choices, "M", min(room, _products(choices) // max(batch * heads * tokens, 1)))
    arrays, values, beyond = _factors(
        choices, dtype, batch, tokens, heads, features, choices.answers["no_grad"], keys
    )
    if choices.flag("cache_seqlens", compiled=2):
        arrays |= _used_keys(choices, "cache_seqlens", batch, keys, arrays, ("ak", "av", "bk", "bv"))
    options: dict[str, Any] = {}
    for name in ("scale", "scale_q", "scale_k", "scale_v"):
        options |= _scale(choices, name)
    strategy = choices.choice("strategy", ("auto", "auto", "auto", "batch", "batch_head", "split_kv"), compiled=1)
    if strategy != "auto":
        options["strategy"] = strategy
    options["backend"] = _backend(choices, beyond or dtype == "float64")
    return Call("", arrays, options, ((batch, tokens, heads, values),), 0)


def _tpa_attention(choices: Choices) -> Call:
    dtype = _dtype(choices)
    packed = choices.flag("packed", 0.3, compiled=2)
    batch = 1 if packed else _batch(choices)
    heads = _heads(choices, "H", 8, 1)
    features = _features(choices, "D", 256)
    room = _elements(choices) // max(batch * max(heads, features), 1)
    square = _square(batch, heads)
    tokens = _length(choices, "N", min(room, square) if packed else room)
    most = _products(choices) // max(batch * heads * tokens, 1)
    alike = packed or (tokens <= square and choices.flag("M=N", 0.5))
    keys = tokens if alike else _length(choices, "M", min(room, most))
    arrays, values, beyond = _factors(choices, dtype, batch, tokens, heads, features, True, keys)
    if packed:
        cuts = _cuts(choices, "cu_seqlens", _sequences(choices), tokens)
        ends = {name: cuts for name in arrays if name in ("aq", "ak", "av", "bq", "bk", "bv")}
        arrays |= _spoilt_behind(choices, arrays, ends)
        arrays["cu_seqlens"] = _integers(choices, "cu_seqlens", cuts, ("int32", "int64"))
    options: dict[str, Any] = {}
    for name in ("scale", "scale_q", "scale_k", "scale_v"):
        options |= _scale(choices, name)
    causal = choices.choice("causal", (None, None, True, False), compiled=2)
    if causal is not None:
        options["causal"] = causal
    beyond = beyond or dtype == "float64" or (dtype == "float32" and max(features, values) > 128)
    options["backend"] = _backend(choices, beyond)
    return Call("", arrays, options, ((batch, tokens, heads, values),), 0)


def _rotary_attention(choices: Choices) -> Call:
    dtype = choices.choice("dtype", DTYPES, compiled=1)
    batch = _batch(choices)
    key_heads = _heads(choices, "Hkv", 4, 1)
    heads = key_heads * choices.number("group", _GROUPS[: 5 if choices.small else None], 1, 32, 1, compiled=2)
    features = 2 * _features(choices, "D/2", 128)
    every = heads + 2 * key_heads
    room = _elements(choices) // max(batch * every * features, 1)
    most = math.isqrt(_products(choices) // max(batch * heads, 1))
    tokens = _length(choices, "N", min(room, most))
    grad = _grad(choices, "qkv")
    qkv = _array(choices, "qkv", (batch, tokens, every, features), dtype, grad)
    length = features // 2
    if choices.flag("theta.partial", 0.3, compiled=1):
        length = choices.number("theta.E", range(1, length + 1), 1, length, 1, compiled=1)
    shape = (1, length) if choices.flag("theta.row", compiled=2) else (length,)
    theta_dtype = choices.choice(
        "theta.dtype", ("float32", "float32", "bfloat16", "float16", "float64"), compiled=1
    )
    theta = _array(choices, "theta", shape, theta_dtype, _grad(choices, "theta", 0.5), values="frequencies")
    options: dict[str, Any] = {
        "heads": heads,
        "scale": choices.choice("scale", (0.3, 0.125, 1.0, -0.25), compiled=4),
    }
    if choices.flag("interleaved", compiled=1):
        options["interleaved"] = True
    return Call("", {"qkv": qkv, "theta": theta}, options, ((batch, tokens, heads, features),), 0)


_MAKERS: dict[str, Callable[[Choices], Call]] = {
    "lrpe_rotate": lambda choices: _lrpe(choices, paired=True),
    "lrpe_cosine": lambda choices: _lrpe(choices, paired=False),
    "flash_attention": _flash_attention,
    "linear_attention": _linear_attention,
    "tpa_decode": _tpa_decode,
    "tpa_attention": _tpa_attention,
    "rotary_attention": _rotary_attention,
}
OPERATORS = tuple(_MAKERS)
"""The functions that calls are made of."""
