"""Valid calls of the public functions: the choices that each is made of.

Every operator has a function here that asks for choices by name; the call made of them is valid, whatever they are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from random_cases.arrays import Array, draw_memory
from random_cases.choices import Choices

__all__ = ["OPERATORS", "Call", "make_call"]

_Shape = tuple[int, ...]

DTYPES = ("float32", "float16", "bfloat16")
OWN_DTYPES = ("float32", "float32", "float32", "float16", "bfloat16", "float64")
"""Dtypes of frequencies, decays and states, which have one of their own."""
TILES = (16, 32, 64, 128)
SIZES = tuple(sorted({1, 2, 3, 4, 5, 7, 11, 13, 29, 67, 97, 191, 257, *(t + d for t in TILES for d in (-1, 0, 1))}))
"""Lengths of sequences: small, prime, and about the sizes of tiles."""
LONG = (300, 511, 513, 1023, 1025, 2049, 4099)
FEATURES = (
    1, 2, 3, 5, 8, 12, 15, 16, 17, 24, 31, 32, 33, 40, 48, 64, 64, 65, 80, 96, 127, 128, 128, 129, 192, 255, 256,
)  # fmt: skip
ELEMENTS = {False: (2**14, 2**14, 2**15, 2**15, 2**16, 2**16, 2**18, 2**21), True: (2**11,)}
"""Most elements of a tensor, where sizes need not and where they must suit the interpreter: one for each call."""
PRODUCTS = {False: (2**16, 2**17, 2**18, 2**23), True: (2**12,)}
"""Most products of a query and a key, over all batch entries and heads."""
MOST_PRODUCTS = 2**25
"""Most products where there are as many queries as keys: the definition holds some twenty matrices of float64."""
POSITIONAL = {
    "lrpe_rotate": 2,
    "lrpe_cosine": 2,
    "flash_attention": 3,
    "linear_attention": 3,
    "delta_attention": 4,
    "short_convolution": 2,
    "rotary_attention": 2,
}
"""Arguments that may be given without a name, where these are not six."""
WITH_STATES = ("linear_attention", "delta_attention", "short_convolution")
"""Operators whose second result is a state."""
DEGENERATE = (1.0, 1.0, 1.0, 0.0, 1e-30, 1e-6, 1e-3, 30.0, 1e4)
"""Sizes of tensors in a degenerate call."""
FARTHEST = 2**24
"""Positions up to which angles are exact; see the guide of LRPE."""
INTEGERS = {"int64": FARTHEST, "int32": FARTHEST, "int16": 2**15 - 1, "int8": 127, "uint8": 255}
"""Dtypes of positions, and the largest of each."""
PAGES = 90
"""Pages of keys at the most; batch entries share them where they have more."""


@dataclass(frozen=True)
class Call:
    """A call of a public function."""

    operator: str
    arrays: dict[str, Array]
    """Tensors, by argument."""
    options: dict[str, Any]
    """Other arguments. One that is left out is not here."""
    outputs: tuple[_Shape, ...]
    """Shapes of the results."""
    seed: int
    """Seed of all numbers."""
    gradients: tuple[Array | None, ...] = ()
    """Incoming gradients; None for a result that gets none. Empty where no gradient is asked for."""
    forward_mode: bool = False
    """True if tensors that want a gradient have a tangent instead, and results have theirs."""
    positional: int = 0
    """The number of arguments that are given without a name."""
    recorded: bool = True
    """True if gradients are being recorded."""
    matmul_precision: str = "highest"
    """PyTorch's setting for products of float32 matrices."""
    numbers: str = "usual"
    """``usual``; ``equal`` if floating tensors may be expanded; or ``degenerate`` if they may be huge or tiny."""
    record: dict[str, Any] = field(default_factory=dict, compare=False)
    """The choices that made it, those apart that are the simplest."""
    answers: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)
    """All of them."""
    varied: dict[str, int] = field(default_factory=dict, compare=False, repr=False)
    """The number of options that each choice had."""

    @property
    def dtype(self) -> str:
        """The dtype of the first tensor."""
        return next(iter(self.arrays.values())).dtype

    @property
    def wanted(self) -> list[str]:
        """The tensors that want a gradient."""
        return [name for name, array in self.arrays.items() if array.grad]

    @property
    def lacks_aq(self) -> bool:
        """True for tensor-product attention of whole queries, where ``aq=None`` must be given."""
        return self.operator.startswith("tpa") and "aq" not in self.arrays

    @property
    def has_equal_numbers(self) -> bool:
        """True if a floating tensor is expanded."""
        arrays = (*self.arrays.values(), *(array for array in self.gradients if array is not None))
        return any(array.stored_shape != array.shape and array.is_floating for array in arrays)

    def name_of(self, index: int) -> str:
        """Returns what a result is called: an output, or the gradient of an argument."""
        outputs = ("output", "state" if self.operator in WITH_STATES else "lse")[: len(self.outputs)]
        if index < len(outputs):
            return outputs[index]
        rest = index - len(outputs)
        return f"tangent of {outputs[rest]}" if self.forward_mode else f"gradient of {self.wanted[rest]}"


def make_call(operator: str, choices: Choices) -> Call:
    """Returns a call of an operator, made of choices."""
    draft = _Draft(choices)
    _MAKERS[operator](draft)
    wanted = draft.recorded and any(array.grad for array in draft.arrays.values())
    # PyTorch gives no tangent to a tensor that is expanded.
    forward_mode = wanted and draft.numbers == "usual" and choices.flag("forward_mode", 0.15)
    return Call(
        operator,
        draft.arrays,
        draft.options,
        tuple(draft.outputs),
        seed=choices.number("seed", range(1000), 0, 10**9),
        gradients=draft.gradients() if wanted and not forward_mode else (),
        forward_mode=forward_mode,
        positional=choices.number("positional", (0, 0, 0, 2, 3, 6), 0, POSITIONAL.get(operator, 6)),
        recorded=draft.recorded,
        matmul_precision=draft.options.pop("matmul_precision", "highest"),
        numbers=draft.numbers,
        record=choices.record,
        answers=choices.answers,
        varied=choices.options,
    )


class _Draft:
    """The arguments of a call while they are drawn, with what several operators have."""

    def __init__(self, choices: Choices) -> None:
        self.choices, self.small, self.limited = choices, choices.small, choices.seed is not None
        self.choice, self.number, self.flag = choices.choice, choices.number, choices.flag
        self.numbers = choices.choice("numbers", ("usual",) * 17 + ("equal", "equal", "degenerate"))
        self.arrays: dict[str, Array] = {}
        self.options: dict[str, Any] = {}
        self.outputs: list[_Shape] = []
        self.constant = self.numbers == "equal" and choices.flag("equal.anywhere")
        """True if no tensor may want a gradient."""
        self.recorded = not choices.flag("no_grad", 0.1)
        self.dtype = "float32"

    def draw_dtype(self, *more: str) -> None:
        """Draw the dtype of the call."""
        self.dtype = self.choice("dtype", DTYPES * 8 + more, compiled=1)

    def optional(self, name: str, values: Sequence[Any], compiled: int | None = None) -> Any:
        """Draw an option, which is left out if it is None; returns it."""
        value = self.choice(name, values, compiled=compiled)
        if value is not None:
            self.options[name] = value
        return value

    def switch(self, name: str, share: float = 0.5, compiled: int = 1) -> bool:
        """Draw an option that is on or left out; returns it."""
        if self.flag(name, share, compiled=compiled):
            self.options[name] = True
        return name in self.options

    def scale(self, name: str) -> float | None:
        """Draw a factor, which is left out for the default; returns it."""
        value = self.optional(name, (None, None, None, 0.3, 1.0, 0.125, -0.25, 0.0, 1, 0.7071067811865476))
        return None if value is None else float(value)

    def backend(self, beyond: bool) -> None:
        """Draw the backend; the kernels are asked for by name where they can run the call."""
        beyond = beyond or self.dtype == "float64"
        options = ("torch", "auto") if beyond else ("triton",) * 6 + ("auto",) * 3 + ("torch",)
        self.options["backend"] = self.choice("backend", options)

    def batch(self) -> int:
        """Draw how many batch entries there are."""
        sizes = (0, *(1, 1, 2, 3) * 3) if self.small else (0, 33, 128, *(1, 2, 3, 4, 5, 7) * 4)
        return self.number("B", sizes, 0, 512, 1)

    def room(self, name: str, limits: dict[bool, tuple[int, ...]], used: int) -> int:
        """Returns how often a number of elements or products fits into a limit."""
        return self.choices.room(name, limits[self.small]) // max(used, 1)

    def elements(self, used: int) -> int:
        """Returns how many rows of so many elements a tensor may have."""
        return self.room("elements", ELEMENTS, used)

    def length(self, name: str, most: int) -> int:
        """Draw a length, so that a tensor or a product has at most so many elements."""
        if self.small:
            sizes = (0, *[n for n in SIZES if n < 20] * 2, *[n for n in SIZES if 20 < n < 70])
        else:
            sizes = (0, *SIZES * 4, *LONG)
        return self.number(name, self.within(sizes, most), 0, 2**17, 1)

    def within(self, sizes: Sequence[int], most: int) -> Sequence[int]:
        """Returns the sizes up to a bound, all of them where nothing is drawn."""
        return [size for size in sizes if size <= most] or [1] if self.limited else sizes

    def lengths(self, batch: int, heads: int, elements: int, packed: bool, alike: float) -> tuple[int, int]:
        """Draw numbers of queries and keys; where one side alone is ``packed`` there are as many, else often."""
        room, square = self.elements(elements), math.isqrt(MOST_PRODUCTS // max(batch * heads, 1))
        tokens = self.length("N", min(room, square) if packed else room)
        if packed or (tokens <= square and self.flag("M=N", alike)):
            return tokens, tokens
        return tokens, self.length("M", min(room, self.room("products", PRODUCTS, batch * heads * tokens)))

    def heads(self, name: str, most: int = 16, least: int = 0) -> int:
        """Draw how many heads there are."""
        sizes = (1, 2, 3) if self.small else (1, 2, 3, 4, 5, 6, 7, 8, 12, 16)
        return self.number(name, (0, *[s for s in sizes if s <= most] * 4), least, 64, 1, compiled=2)

    def groups(self) -> int:
        """Draw how many heads of queries share one of keys."""
        return self.number("group", (1, 1, 1, 2, 3, 4, 8)[: 5 if self.small else None], 1, 32, 1, compiled=2)

    def features(self, name: str, most: int) -> int:
        """Draw a number of features."""
        sizes = [size for size in FEATURES if size <= (min(most, 40) if self.small else most)]
        return self.number(name, sizes, 1, most, 1, compiled=1)

    def values(self, features: int, share: float, most: int) -> int:
        """Draw how many features a value has."""
        return features if self.flag("E=D", share, compiled=1) else self.features("E", most)

    def row_of_nan(self, name: str) -> bool:
        """Draw if a tensor has a row of NaN, where gradients would be NaN."""
        nan = self.flag(f"{name}.nan", 0.05)
        self.constant = self.constant or nan
        return nan

    def logit_size(self, std: float, factors: int) -> float:
        """Returns the size of the factors of a logit, whose standard deviation ``std`` is one at the most then."""
        return float(f"{min(1.0, max(abs(std), 1e-9) ** (-1 / factors)):.2g}")

    def new_array(self, name: str, shape: _Shape, dtype: str, scale: float = 1.0, **more: Any) -> Array:
        """Returns a tensor, which may be huge or tiny in a degenerate call."""
        if self.numbers == "degenerate" and "float" in dtype and more.get("values") != "shares":
            scale *= min(self.choice(f"{name}.size", DEGENERATE), 30.0 if dtype == "float16" else math.inf)
        # Tokens or features that are equal let terms of a gradient cancel; batch entries and heads do not.
        free = self.constant or self.numbers != "equal" or name.startswith("gradient") or "float" not in dtype
        memory = draw_memory(self.choices, name, shape, dtype, () if free else (1, len(shape) - 1))
        return Array(shape, dtype, memory, scale=scale, **more)

    def array(self, name: str, shape: _Shape, dtype: str | None = None, grad: float = 0.75, **more: Any) -> None:
        """Draw a tensor, which wants a gradient in so many calls."""
        wanted = not self.constant and grad > 0 and self.flag(f"{name}.grad", grad, compiled=2)
        self.arrays[name] = self.new_array(name, shape, dtype or self.dtype, grad=wanted, **more)

    def own_array(self, name: str, shape: _Shape, dtypes: Sequence[str] = OWN_DTYPES, **more: Any) -> None:
        """Draw a tensor with a dtype of its own."""
        self.array(name, shape, self.choice(f"{name}.dtype", dtypes, compiled=1), 0.5, **more)

    def positions(self, name: str, shape: _Shape, reach: int, sign: str) -> None:
        """Draw a tensor of positions, some of which may be negative if ``sign`` is chosen."""
        dtype = self.choice(f"{name}.dtype", tuple(INTEGERS), compiled=1)
        high = min(reach, INTEGERS[dtype])
        low = -high if dtype != "uint8" and self.flag(sign, 0.3) else 0
        self.array(name, shape, dtype, 0.0, values="integers", numbers=(low, high))

    def integers(self, name: str, numbers: Sequence[int]) -> None:
        """Draw a vector of these integers, of any memory but expanded."""
        dtype = self.choice(f"{name}.dtype", ("int32", "int64"), compiled=2)
        kinds = ("dense", "dense", "unaligned", "sliced", "stepped")
        memory = draw_memory(self.choices, name, (len(numbers),), dtype, (), kinds)
        self.arrays[name] = Array((len(numbers),), dtype, memory, "numbers", numbers=tuple(numbers))

    def packed(self, name: str, length: int, holders: Sequence[str]) -> int:
        """Draw bounds of packed sequences, some of which are empty; returns how many there are.

        There may be rows behind the last, which may be NaN in those that hold the sequences.
        """
        count = self.number("sequences", (1, 2, 3, 4, 5, 9), 1, 100, 1)
        end = length - self.number(f"{name}.tail", (0, 0, 0, 0, 1, 5, 70), 0, length)
        inner = [self.number(f"{name}.cut{i}", range(end + 1), 0, end) for i in range(count - 1)]
        self.integers(name, [0, *sorted(inner), end])
        if holders and end < length and self.flag("nan_in_tail", 0.7):
            self.spoil(holders, (end,))
        return count

    def spoil(self, names: Sequence[str], ends: _Shape) -> None:
        """Let rows be NaN from ``ends`` on."""
        self.arrays |= {name: replace(self.arrays[name], ends=ends) for name in names if name in self.arrays}

    def used_keys(self, name: str, batch: int, keys: int, spoilt: Sequence[str]) -> None:
        """Draw how many keys of each batch entry are used; behind them there may be NaN."""
        shares = [self.number(f"length{b}", range(9), 0, 8, 8) for b in range(batch)]
        near = [self.number(f"length{b}.less", (0, 0, 1, 2), 0, 4) for b in range(batch)]
        ends = [max(share * keys // 8 - less, 0) for share, less in zip(shares, near)]
        self.integers(name, ends)
        if spoilt and batch and self.flag("nan_behind", 0.7):
            self.spoil(spoilt, tuple(ends))

    def gradients(self) -> tuple[Array | None, ...]:
        """Returns incoming gradients: of any memory, and not of every result."""
        found: list[Array | None] = []
        for index, shape in enumerate(self.outputs):
            name = f"gradient{index or ''}"
            none = len(self.outputs) > 1 and self.flag(f"{name}.none", 0.25)
            dtype = self.dtype if index == 0 or self.dtype == "float64" else "float32"
            found.append(None if none else self.new_array(name, shape, dtype))
        if not any(found):
            found[0] = self.new_array("gradient", self.outputs[0], self.dtype)
        return tuple(found)

    def theta(self, heads: int, most: int) -> None:
        """Draw frequencies, up to so many."""
        rows = self.choice("theta.rows", ("vector", "shared", "per head", "per head"), compiled=1)
        kind = self.choice("theta.length", ("full", "full", "one", "some"), compiled=1)
        length = {"full": most, "one": 1}.get(kind) or self.number(
            "theta.E", range(1, most + 1), 1, most, 1, compiled=1
        )
        shape = {"vector": (length,), "shared": (1, length), "per head": (heads, length)}[rows]
        kinds = ["frequencies", "frequencies", "frequencies", "uniform"]
        kinds += ["zeros", "zeros"] * (self.numbers == "degenerate")
        self.own_array("theta", shape, values=self.choice("theta.values", kinds))

    def places(self, where: str, batch: int, tokens: int, axes: int = 1) -> int:
        """Draw where tokens stand, at positions of up to so many axes; returns how many sequences there are."""
        reach = self.choice("reach", (20, 20, 1000, 1_000_003, FARTHEST))
        if where == "position_ids":
            axes = min(self.number("position_ids.axes", (0, 1, 1, 1, 2, 3, 5), 0, 6, compiled=1), axes)
            flat = axes == 0 or (axes == 1 and self.flag("position_ids.flat", 0.5, compiled=2))
            shape = (tokens,) if axes == 0 else (batch, tokens) if flat else (batch, tokens, axes)
            self.positions("position_ids", shape, reach, "position_ids.negative")
        if where in ("position_ids", "grid"):
            return batch
        sequences = self.packed("cu_seqlens", tokens, ()) if where == "cu_seqlens" else batch
        near = max(reach - tokens, 0)
        start = self.number("offset", (0, 0, 1, 7, 100, near, near // 2), 0, FARTHEST)
        if where == "offset tensor" or (where == "cu_seqlens" and self.flag("offset.tensor", 0.3, compiled=1)):
            each = self.flag("offset.each", 0.6, compiled=2)
            self.positions("offset", (batch,) if each else (), start, "offset.negative")
        elif start or self.flag("offset.given", 0.1):
            self.options["offset"] = -start if self.flag("offset.negative", 0.2) else start
        return sequences


# ----------------------------------------------------------------------------------------------------------
# The operators
# ----------------------------------------------------------------------------------------------------------


def _lrpe(draft: _Draft, paired: bool) -> None:
    draft.draw_dtype("float64")
    single = draft.flag("three_dimensions", 0.15, compiled=2)
    heads = 1 if single else draft.heads("H")
    angles = draft.features("angles", 128 if draft.limited else 4096)
    if not draft.small and draft.flag("wide", 0.05, compiled=1):
        angles = draft.number("wide.angles", (257, 512, 1000, 1024, 4096), 1, 5000, 1, compiled=1)
    features = 2 * angles if paired else angles
    ways = ("offset", "offset", "offset", "offset tensor", "position_ids", "cu_seqlens", "grid")
    where = draft.choice("positions", ways, compiled=2)
    batch = 1 if where == "cu_seqlens" else draft.batch()
    most = draft.elements(batch * heads * features)
    prefix = 0 if where == "position_ids" else draft.number("prefix", (0, 0, 0, 1, 2, 5, 17), 0, 64, compiled=2)
    activations = ("none", "none", "relu", "sigmoid", "silu", "softmax", "softmax_sequence", "softmax_sequence")
    draft.options["activation"] = draft.choice("activation", activations, compiled=1)
    axes = 1
    if where == "grid":
        axes = draft.number("grid.axes", (1, 2, 2, 3, 4, 5), 1, 6, 1, compiled=1)
        sides = draft.within((1, 2, 3, 4, 5, 7, 16, 17), max(1, int(max(most - prefix, 1) ** (1 / axes))))
        grid = [draft.number(f"grid{i}", sides, 1, 300, 1) for i in range(axes)]
        draft.options["grid"] = (list if draft.flag("grid.list", 0.2) else tuple)(grid)
        tokens = prefix + math.prod(grid)
    else:
        tokens = draft.length("N", most)
        prefix = min(prefix, tokens)
    if prefix or draft.flag("prefix.given", 0.1):
        draft.options["prefix"] = prefix
    shape = (batch, tokens, features) if single else (batch, tokens, heads, features)
    size = draft.choice("size", (1.0, 1.0, 1.0, 0.1, 2.0))
    nan = draft.row_of_nan("x")
    draft.array("x", shape, scale=size, row_of_nan=nan)
    draft.theta(heads, angles if where == "position_ids" else -(-angles // axes))
    draft.places(where, batch, tokens, max(angles // draft.arrays["theta"].shape[-1], 1))
    if paired:
        draft.switch("interleaved")
    draft.backend(features > 8192)
    draft.outputs.append((*shape[:-1], features if paired else 2 * features))


def _flash_attention(draft: _Draft) -> None:
    draft.draw_dtype("float64")
    kinds = ("no",) * 4 + ("queries", "keys", "both", "alike", "queries on a cache")
    packed = draft.choice("packed", kinds, compiled=1)
    on_cache = packed == "queries on a cache"
    batch = 1 if packed != "no" else draft.batch()
    key_heads = draft.heads("Hkv", 8)
    heads = key_heads * draft.groups()
    most = 300 if draft.dtype == "float64" or draft.flag("wide", 0.02, compiled=1) else 256
    latent = (
        not draft.small
        and packed in ("no", "queries on a cache")
        and "16" in draft.dtype
        and draft.flag("latent", 0.06, compiled=1)
    )
    if latent:  # a cache of more features, whose values are most often in its keys
        features = draft.number("latent.D", (576, 576, 288, 257, 512, 575), 257, 576, 257, compiled=1)
        values = draft.number("latent.E", (512, 512, 256, 7, 300), 1, 512, 1, compiled=1)
        draft.constant = True
    else:
        features = draft.features("D", most)
        values = draft.values(features, 0.7, most)
    elements = batch * max(heads, 1) * max(features, values)
    tokens, keys = draft.lengths(batch, heads, elements, packed in ("queries", "keys", "alike"), 0.4)
    used = on_cache or (packed == "no" and draft.flag("seqused_k", 0.2, compiled=2))
    paged = used and draft.flag("block_table", 0.5 if on_cache else 0.3, compiled=2)
    draft.constant = draft.constant or ((paged or on_cache) and draft.recorded)
    size = draft.logit_size((draft.scale("scale") or 0.0) * math.sqrt(features), 2)
    size *= draft.choice("size", (1.0, 1.0, 0.1))
    nan = draft.row_of_nan("q")
    draft.array("q", (batch, tokens, heads, features), scale=size, row_of_nan=nan)
    entries = draft.packed("cu_seqlens_q", tokens, "q") if on_cache else batch
    of_keys: _Shape = (entries, keys)
    if paged:
        page = draft.number("page", (16, 1, 2, 7, 16, 64), 1, 256, 16, compiled=2)
        table = (entries, -(-keys // page))
        of_keys, keys = (min(math.prod(table), PAGES), page), table[1] * page
    draft.array("k", (*of_keys, key_heads, features), scale=size)
    if latent and values <= features and draft.flag("latent.within", 0.8, compiled=2):
        draft.arrays["v"] = replace(draft.arrays["k"], shape=(*of_keys, key_heads, values), within="k")
    else:
        draft.array("v", (*of_keys, key_heads, values))
    if on_cache:  # the first tensors may be given by position
        draft.arrays["cu_seqlens_q"] = draft.arrays.pop("cu_seqlens_q")
    if packed in ("queries", "both"):
        draft.packed("cu_seqlens_q", tokens, "q" if packed == "both" else "qkv")
    if packed in ("keys", "both"):
        draft.packed("cu_seqlens_k", keys, "kv" if packed == "both" else "qkv")
    if packed == "alike":
        draft.packed("cu_seqlens", tokens, "qkv")
    if used:
        draft.used_keys("seqused_k", entries, keys, "" if paged else "kv")
    if paged:
        pages = (0, max(of_keys[0] - 1, 0))
        draft.array("block_table", table, "int32", 0.0, values="integers", numbers=pages)
    if draft.flag("sink", 0.2, compiled=2):
        draft.own_array("sink", (heads,))
    masked = packed == "no" and not paged and not latent and _masks(draft, batch, heads, tokens, keys)
    draft.optional("softcap", (None, None, None, None, 0.5, 5, 30.0), compiled=2)
    draft.switch("causal", compiled=2)
    if draft.flag("window", 0.3, compiled=1):
        bounds = (None, 0, 1, 2, 5, 16, 31, 64, 100, 5000)
        later = (None, 0) if draft.options.get("causal") else bounds
        window = [draft.choice("windowleft", bounds), draft.choice("windowright", later)]
        draft.options["window"] = (list if draft.flag("window.list", 0.2) else tuple)(window)
    draft.optional("float32_precision", (None, None, "highest", "high", "medium"), compiled=1)
    draft.outputs.append((batch, tokens, heads, values))
    if draft.switch("return_lse", compiled=2):
        draft.outputs.append((batch, heads, tokens))
    draft.backend(max(features, values) > 256 and not latent)
    if on_cache and draft.options["backend"] == "triton":
        draft.optional("bits", (None, None, "batch", "chunks"), compiled=1)
    if not masked and not (draft.recorded and any(array.grad for array in draft.arrays.values())):
        draft.switch("out", 0.3)  # `Prepared.run` makes the tensor
    draft.optional("matmul_precision", ("highest",) * 8 + ("high", "medium"), compiled=1)


def _masks(draft: _Draft, batch: int, heads: int, tokens: int, keys: int) -> bool:
    """Draw a mask, a bias and slopes for some calls of attention; returns True if there is one."""
    if not (min(batch, heads, tokens, keys) > 0 and draft.flag("masked", 0.3, compiled=2)):
        return False

    def of_axes(name: str, sizes: _Shape) -> _Shape:
        """Returns sizes of which each may be 1, for all."""
        return tuple(1 if draft.flag(f"{name}.one{axis}", 0.3) else size for axis, size in enumerate(sizes))

    kinds = ("mask", "bias", "alibi", "mask and bias", "bias and alibi", "mask, bias and alibi")
    drawn = draft.choice("masked.by", kinds, compiled=2)
    if "mask" in drawn:
        shape = (*of_axes("mask", (batch, heads)), tokens, keys)
        draft.array("mask", shape, "bool", 0.0, values="integers", numbers=(0, 1))
    if "bias" in drawn:
        draft.own_array("bias", (*of_axes("bias", (batch, heads, tokens)), keys))
    if "alibi" in drawn:
        own = draft.flag("alibi.each")
        dtype = draft.choice("alibi.dtype", OWN_DTYPES, compiled=1)
        draft.array("alibi", (batch, heads) if own else (heads,), dtype, 0.0, values="shares")
    return True


def _linear_attention(draft: _Draft) -> None:
    draft.draw_dtype("float64")
    encoding = draft.choice("encoding", ("none", "rotate", "rotate", "cosine"), compiled=1)
    where = draft.choice("positions", ("offset", "offset", "offset tensor", "cu_seqlens"), compiled=1)
    causal = not draft.flag("full", 0.2, compiled=1)
    batch = 1 if where == "cu_seqlens" else draft.batch()
    heads = draft.heads("H", 8)
    wide = 40 if draft.dtype == "float64" or draft.flag("wide", 0.02, compiled=1) else 0
    angles = draft.features("angles", (256 if encoding == "none" else 128) + wide)
    features = 2 * angles if encoding == "rotate" else angles
    values = draft.values(features, 0.6, 256 + wide)
    most = draft.elements(batch * heads * max(features, values))
    if where == "cu_seqlens":  # the definition takes packed sequences as if each had all tokens
        most = min(most, math.isqrt(draft.room("products", PRODUCTS, heads)))
    tokens = draft.length("N", most)
    nan = draft.row_of_nan("q")
    draft.array("q", (batch, tokens, heads, features), row_of_nan=nan)
    draft.array("k", (batch, tokens, heads, features))
    draft.array("v", (batch, tokens, heads, values))
    draft.scale("scale")
    if encoding != "none":
        draft.options["encoding"] = encoding
        draft.theta(heads, angles)
    draft.optional("activation", (None, None, "relu", "sigmoid", "silu", "softmax"), compiled=1)
    if encoding == "rotate":
        draft.switch("interleaved")
    sequences = draft.places(where, batch, tokens)
    draft.outputs.append((batch, tokens, heads, values))
    state = (sequences, heads, features * (2 if encoding == "cosine" else 1), values)
    if causal:
        decay = draft.choice("decay", (None, "head", "token", "token"), compiled=1)
        if decay is not None:
            # What is the same for all tokens is rounded alike in all tiles: it fades before that adds up.
            weak = "even" if decay == "head" and tokens > 256 else "frequencies"
            strong = "infinite" if draft.numbers == "degenerate" else "decays"
            kind = strong if draft.flag("decay.strong", 0.3) else weak
            draft.own_array(
                "decay", (heads,) if decay == "head" else (batch, tokens, heads), values=kind, scale=-0.3
            )
        if draft.flag("initial_state", compiled=1):
            draft.own_array("initial_state", state)
        if draft.switch("return_state"):
            draft.outputs.append(state)
    else:
        draft.options["causal"] = False
    draft.backend(max(state[2], values) > 256)


def _delta_attention(draft: _Draft) -> None:
    draft.draw_dtype("float64")
    encoding = draft.choice("encoding", ("none", "none", "rotate"), compiled=1)
    where = draft.choice("positions", ("offset", "offset", "offset tensor", "cu_seqlens"), compiled=1)
    batch = 1 if where == "cu_seqlens" else draft.batch()
    key_heads = draft.heads("Hk", 4, 1)
    heads = key_heads * draft.groups()
    wide = 40 if draft.dtype == "float64" or draft.flag("wide", 0.02, compiled=1) else 0
    half = draft.features("D/2", 128 + wide // 2) if encoding == "rotate" else 0
    features = 2 * half or draft.features("D", 256 + wide)
    values = draft.values(features, 0.6, 256 + wide)
    most = draft.elements(batch * heads * max(features, values))
    if where == "cu_seqlens":  # the definition takes packed sequences as if each had all tokens
        most = min(most, math.isqrt(draft.room("products", PRODUCTS, heads)))
    tokens = draft.length("N", most)
    # Keys of other lengths than one make a state grow, and huge ones would make it infinite.
    normalize = draft.switch("normalize") or draft.numbers == "degenerate"
    draft.options |= {"normalize": True} if normalize else {}
    nan = draft.row_of_nan("q")
    draft.array("q", (batch, tokens, key_heads, features), row_of_nan=nan)
    length = 1.0 if normalize else float(f"{0.4 * features**-0.5:.2g}")
    draft.array("k", (batch, tokens, key_heads, features), scale=length)
    draft.array("v", (batch, tokens, heads, values))
    draft.own_array("beta", (batch, tokens, heads), values="shares")
    draft.scale("scale")
    if encoding == "rotate":
        draft.options["encoding"] = encoding
        draft.theta(key_heads, half)
        draft.switch("interleaved")
    sequences = draft.places(where, batch, tokens)
    decay = draft.choice("decay", (None, "head", "feature"), compiled=1)
    if decay is not None:
        strong = "infinite" if draft.numbers == "degenerate" else "decays"
        kind = strong if draft.flag("decay.strong", 0.3) else "frequencies"
        shape = (batch, tokens, heads) if decay == "head" else (batch, tokens, heads, features)
        draft.own_array("decay", shape, values=kind, scale=-0.3)
    draft.outputs.append((batch, tokens, heads, values))
    state = (sequences, heads, features, values)
    if draft.flag("initial_state", compiled=1):
        draft.own_array("initial_state", state)
    if draft.switch("return_state"):
        draft.outputs.append(state)
    draft.backend(max(features, values) > 256)


def _short_convolution(draft: _Draft) -> None:
    draft.draw_dtype("float64")
    packed = draft.flag("packed", 0.3, compiled=1)
    batch = 1 if packed else draft.batch()
    sizes = (1, 2, 3, 7, 8, 16, 31, 64, 65, 130, 512, 1000)
    channels = draft.number("C", sizes[: 7 if draft.small else None], 1, 10**5, 1)
    taps = draft.number("K", (2, 3, 4, 4, 4, 5, 8, 9), 2, 100, 1, compiled=1)
    tokens = draft.length("N", draft.elements(batch * channels))
    draft.array("x", (batch, tokens, channels))
    draft.own_array("weight", (channels, taps), scale=float(f"{taps**-0.5:.2g}"))
    if draft.flag("bias", compiled=1):
        draft.own_array("bias", (channels,))
    draft.optional("activation", (None, "none", "silu", "silu"), compiled=1)
    sequences = draft.packed("cu_seqlens", tokens, ("x",)) if packed else batch
    draft.outputs.append((batch, tokens, channels))
    state = (sequences, channels, taps - 1)
    if draft.flag("initial_state", compiled=1):
        draft.own_array("initial_state", state)
    if draft.switch("return_state"):
        draft.outputs.append(state)
    draft.backend(taps > 8)


def _factors(draft: _Draft, batch: int, tokens: int, keys: int, heads: int, features: int, most: int) -> None:
    """Draw the six factors, the scales and the backend; kernels take up to ``most`` features."""
    ranks: Sequence[int] = (1, 1, 1, 2, 2, 3) if draft.small else (*(1, 1, 1, 2, 2, 3, 4, 5, 8, 16) * 3, 17)
    rank_q = draft.number("Rq", (0, 1, 2, 3, 4, 6, 8, 16, 17), 0, 64, 1, compiled=1)
    rank_k = draft.number("Rk", ranks, 1, 32, 1, compiled=1)
    rank_v = rank_k if draft.flag("Rv=Rk", compiled=1) else draft.number("Rv", ranks, 1, 32, 1, compiled=1)
    values = draft.values(features, 0.6, 256)
    scales = {name: draft.scale(name) for name in ("scale", "scale_q", "scale_k", "scale_v")}
    usual = {"scale": features**-0.5, "scale_q": 1 / (rank_q or 1), "scale_k": 1 / rank_k}
    of_logits = [usual[name] if scales[name] is None else scales[name] or 0.0 for name in usual]
    size = draft.logit_size(math.prod(of_logits) * math.sqrt(features * (rank_q or 1) * rank_k), 4)
    size *= draft.choice("size", (1.0, 1.0, 1.0, 0.5))

    def rank_axis(name: str, rank: int) -> _Shape:  # may be left out at rank one
        return () if rank == 1 and draft.flag(f"{name}.flat", compiled=2) else (rank,)

    shapes = {
        "aq": (batch, tokens, heads, rank_q),
        "ak": (batch, keys, heads, *rank_axis("ak", rank_k)),
        "av": (batch, keys, heads, *rank_axis("av", rank_v)),
        "bq": (batch, tokens, rank_q or heads, features),
        "bk": (batch, keys, *rank_axis("bk", rank_k), features),
        "bv": (batch, keys, *rank_axis("bv", rank_v), values),
    }
    nan = draft.row_of_nan("bq")
    for name, shape in shapes.items():
        if name != "aq" or rank_q:
            draft.array(name, shape, scale=size, row_of_nan=nan and name == "bq")
    draft.outputs.append((batch, tokens, heads, values))
    draft.backend(max(rank_k, rank_v) > 16 or max(features, values) > most)


def _tpa_decode(draft: _Draft) -> None:
    draft.draw_dtype("float64")
    batch, heads, features = draft.batch(), draft.heads("H", 16, 1), draft.features("D", 256)
    tokens = draft.number("N", (1,) * 8 + (2, 2, 3, 4, 5, 0, 17), 0, 100, 1, compiled=2)
    room = draft.elements(batch * max(heads, features))
    keys = draft.length("M", min(room, draft.room("products", PRODUCTS, batch * heads * tokens)))
    draft.constant = draft.constant or draft.recorded
    _factors(draft, batch, tokens, keys, heads, features, 256)
    if draft.flag("seqused_k", compiled=2):
        draft.used_keys("seqused_k", batch, keys, ("ak", "av", "bk", "bv"))
    draft.optional("strategy", (None, None, None, "batch", "batch_head", "split_kv"), compiled=1)


def _tpa_attention(draft: _Draft) -> None:
    draft.draw_dtype("float64")
    packed = draft.flag("packed", 0.3, compiled=2)
    batch = 1 if packed else draft.batch()
    heads, features = draft.heads("H", 8, 1), draft.features("D", 256)
    tokens, keys = draft.lengths(batch, heads, batch * max(heads, features), packed, 0.5)
    _factors(draft, batch, tokens, keys, heads, features, 128 if draft.dtype == "float32" else 256)
    if packed:
        name = draft.choice("bounds", ("cu_seqlens", "cu_seqlens", "cu_seqlens_q", "cu_seqlens_k"), compiled=1)
        draft.packed(name, tokens, ("aq", "ak", "av", "bq", "bk", "bv"))
    draft.optional("causal", (None, True, True, False), compiled=2)


def _rotary_attention(draft: _Draft) -> None:
    draft.draw_dtype()
    batch, key_heads = draft.batch(), draft.heads("Hkv", 4, 1)
    heads, features = key_heads * draft.groups(), 2 * draft.features("D/2", 128)
    every = heads + 2 * key_heads
    room = math.isqrt(draft.room("products", PRODUCTS, batch * heads))
    tokens = draft.length("N", min(draft.elements(batch * every * features), room))
    scale = draft.choice("scale", (0.3, 0.125, 1.0, -0.25), compiled=4)
    draft.options |= {"heads": heads, "scale": scale}
    draft.array("qkv", (batch, tokens, every, features), scale=draft.logit_size(scale * math.sqrt(features), 2))
    length = features // 2
    if draft.flag("theta.partial", 0.3, compiled=1):
        length = draft.number("theta.E", range(1, length + 1), 1, length, 1, compiled=1)
    shape = (1, length) if draft.flag("theta.row", compiled=2) else (length,)
    draft.own_array("theta", shape, OWN_DTYPES[1:], values="frequencies")
    draft.switch("interleaved")
    draft.outputs.append((batch, tokens, heads, features))


_MAKERS: dict[str, Callable[[_Draft], None]] = {
    "lrpe_rotate": lambda draft: _lrpe(draft, paired=True),
    "lrpe_cosine": lambda draft: _lrpe(draft, paired=False),
    "flash_attention": _flash_attention,
    "linear_attention": _linear_attention,
    "delta_attention": _delta_attention,
    "short_convolution": _short_convolution,
    "tpa_decode": _tpa_decode,
    "tpa_attention": _tpa_attention,
    "rotary_attention": _rotary_attention,
}
OPERATORS = tuple(_MAKERS)
"""The functions that calls are made of."""
