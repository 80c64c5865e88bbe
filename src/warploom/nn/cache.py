"""Caches of attention layers: keys and values of earlier tokens, their factors, or a state."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch

from warploom.errors import ArgumentError, DeviceError, DtypeError, ShapeError, dtype_of, fault, shape_of
from warploom.runtime.arguments import as_python, check_tensor, is_int
from warploom.runtime.names import name_arguments

Tensor = torch.Tensor


class _Cache:
    """Tensors of the tokens of a batch, with a length for each entry.

    The longest length is kept as a size of an empty tensor, plus two. So compiled code is the same for all lengths:
    PyTorch compiles anew for each value of an int, and specializes sizes of 0 and 1. A shorter entry is kept as its
    difference to the longest, which new tokens do not change.
    """

    def __init__(self) -> None:
        self._held: tuple[Tensor, ...] = ()
        self._is_filled = False
        self._counter = _counter(0)
        self._missing: list[int] | None = None  # tokens fewer than the longest entry; None if all are equal
        self._missing_there: Tensor | None = None  # the same on the device, (B,) int32

    def __repr__(self) -> str:
        return f"{type(self).__name__}(lengths={self.lengths})"

    @property
    def length(self) -> int:
        """The largest of the entries' lengths."""
        return self._counter.shape[0] - 2

    @property
    def lengths(self) -> list[int]:
        """Tokens of each batch entry; empty before the first append."""
        length = self.length
        if self._missing is not None:
            return [length - missing for missing in self._missing]
        return [length] * self._held[0].shape[0] if self._is_filled else []

    @property
    def ragged(self) -> bool:
        """True if entries differ in length."""
        return self._missing is not None

    @property
    def seqlens(self) -> Tensor:
        """Tokens of each batch entry, (B,) int32 on the device.

        Raises:
            ArgumentError: Nothing has been appended yet.
        """
        first = self._get_filled()[0]
        if self._missing_there is not None:
            return self.length - self._missing_there
        return torch.full(first.shape[:1], self.length, dtype=torch.int32, device=first.device)

    @property
    def offset(self) -> int | Tensor:
        """Position of the next token: an int if all entries have the same length, else `seqlens`."""
        return self.seqlens if self.ragged else self.length

    def reorder(self, indices: Tensor | Sequence[int]) -> None:
        """Select batch entries by index; in beam search, the beams that continue.

        Args:
            indices: ``(B',)`` int32 or int64, or a sequence of ints, from 0 to ``B − 1``. An entry may be selected
                several times or not at all, and ``B'`` may differ from ``B``. Values on the CPU are checked.

        Raises:
            ArgumentError: The cache is empty, or an index is out of range.
            DtypeError: The indices are not integers.
            ShapeError: The indices have more than one axis, or there are none.
        """
        name, first = f"{type(self).__name__}.reorder", self._get_filled()[0]
        order = as_python(indices if isinstance(indices, Tensor) else tuple(indices))
        if isinstance(order, tuple):
            if not all(map(is_int, order)):
                raise fault(DtypeError, name, "indices", "a sequence of ints", repr(indices))
            order = torch.tensor(order, dtype=torch.int64)
        check_tensor(name, "indices", order, (torch.int32, torch.int64))
        if order.dim() != 1 or order.shape[0] == 0:
            raise fault(ShapeError, name, "indices", "(B',) with B' ≥ 1", shape_of(order))
        entries = first.shape[0]
        if order.device.type == "cpu" and not 0 <= int(order.min()) <= int(order.max()) < entries:
            raise fault(ArgumentError, name, "indices", f"from 0 to {entries - 1}", order.tolist())
        lengths = self.lengths
        with _leave_inference_mode():
            self._select(order.to(first.device, non_blocking=True))
        if self.ragged:
            self._set_lengths([lengths[entry] for entry in order.tolist()])

    def _select(self, order: Tensor) -> None:
        """Select batch entries of the tensors by index."""
        raise NotImplementedError

    def _check_lengths(self, lengths: int | Sequence[int]) -> list[int]:
        """Returns a length for each entry to truncate it to.

        Raises:
            ArgumentError: A length is out of range, or there are not as many as entries.
            DtypeError: A length is not an int.
        """
        name, have = f"{type(self).__name__}.truncate", self.lengths
        lengths = as_python(tuple(lengths) if isinstance(lengths, list) else lengths)
        if not (is_int(lengths) or (isinstance(lengths, Sequence) and all(map(is_int, lengths)))):
            raise fault(DtypeError, name, "lengths", "an int or a sequence of ints", repr(lengths))
        wanted = list(lengths) if isinstance(lengths, Sequence) else [lengths] * len(have)
        fits = len(wanted) == len(have) and all(0 <= n <= old for n, old in zip(wanted, have))
        if not fits:
            expected = f"one for each entry, at most {have}"
            raise fault(ArgumentError, name, "lengths", expected, lengths)
        return wanted

    def _set_lengths(self, lengths: list[int]) -> None:
        longest = max(lengths, default=0)
        self._counter, self._missing, self._missing_there = _counter(longest), None, None
        if min(lengths, default=0) < longest:
            self._missing = [longest - length for length in lengths]
            missing = torch.tensor(self._missing, dtype=torch.int32)
            self._missing_there = missing.to(self._held[0].device, non_blocking=True)

    def _get_filled(self) -> tuple[Tensor, ...]:
        if not self._is_filled:
            raise fault(ArgumentError, type(self).__name__, "the cache", "appended to first", "an empty one")
        return self._held


def _counter(length: int) -> Tensor:
    """Returns a tensor without elements, whose first size is a length plus two."""
    return torch.empty(length + 2, 0, device="cpu")


def _leave_inference_mode() -> contextlib.AbstractContextManager[Any]:
    """Returns a context whose tensors can also be written outside of inference mode; none in compiled code."""
    if torch.compiler.is_dynamo_compiling() or not torch.is_inference_mode_enabled():
        return contextlib.nullcontext()
    return torch.inference_mode(False)


@name_arguments
class TokenCache(_Cache):
    """Tensors ``(B, tokens, ·, ·)`` that grow along the tokens, with a length for each entry of the batch.

    Memory is allocated at the first append, with the dtype and device of the tensors. Entries of a batch may have
    different lengths: append right-padded prompts, then `truncate` each entry to its own length. The next token of
    an entry overwrites its padding. Lengths are kept on the host too, so nothing waits for the GPU.

    Args:
        capacity: Tokens to allocate for, which are then the most that fit; ``None`` to grow by doubling.

    Attributes:
        lengths: Tokens of each batch entry, as ints; empty before the first append.

    Raises:
        ArgumentError: The capacity is not positive.
        DtypeError: It is not an int.
    """

    _FIRST = 256  # tokens allocated at first where no capacity is given
    _SHAPES: ClassVar[dict[str, tuple[str, ...]]] = {}
    """The tensors that are kept, with a letter for each size. Sizes of the same letter are equal."""

    def __init__(self, capacity: int | None = None) -> None:
        capacity = as_python(capacity)
        if capacity is not None and not is_int(capacity):
            raise fault(DtypeError, type(self).__name__, "capacity", "an int or None", repr(capacity))
        if capacity is not None and capacity < 1:
            raise fault(ArgumentError, type(self).__name__, "capacity", "positive", capacity)
        super().__init__()
        # (B, allocated, ·, ·) each. As sizes of tensors, they are dynamic in compiled code.
        self._held = tuple(torch.empty(0, 0, 0, 0, device="cpu") for _ in self._SHAPES)
        self.capacity = capacity

    def __repr__(self) -> str:
        return f"{type(self).__name__}(capacity={self.capacity}, lengths={self.lengths})"

    def truncate(self, lengths: int | Sequence[int]) -> None:
        """Remove each entry's tokens behind a length.

        Args:
            lengths: One for all entries, or one for each.

        Raises:
            ArgumentError: A length is negative or beyond what the entry has, or there are not as many as entries.
            DtypeError: A length is not an int.
        """
        self._set_lengths(self._check_lengths(lengths))

    def _append(self, *new: Tensor) -> tuple[Tensor, ...]:
        """Add tokens (B, N, ·, ·) to every entry. Returns views of the first `length` tokens of all tensors."""
        self._check(new)
        batch, tokens = new[0].shape[:2]
        needed = self.length + tokens
        if self.capacity is not None and needed > self.capacity:
            name = f"{type(self).__name__}.append"
            raise fault(ArgumentError, name, "the length", f"at most the capacity {self.capacity}", needed)
        self._grow(needed, new)
        if self.ragged:
            entry = torch.arange(batch, device=new[0].device)[:, None]
            place = self.seqlens[:, None] + torch.arange(tokens, device=new[0].device)
            for store, tensor in zip(self._held, new):
                store[entry, place] = tensor
        else:
            for store, tensor in zip(self._held, new):
                store[:, self.length : needed] = tensor
        self._counter = _counter(self.length + tokens)
        return tuple(store[:, :needed] for store in self._held)

    def _select(self, order: Tensor) -> None:
        length, entries = self.length, order.shape[0]
        held = self._held
        if held[0].shape[0] != entries:
            self._held = tuple(x.new_zeros((entries, *x.shape[1:])) for x in held)
        for store, old in zip(self._held, held):
            store[:, :length] = old[:, :length].index_select(0, order)

    def _check(self, new: tuple[Tensor, ...]) -> None:
        """Raise unless new tensors fit each other and the kept ones."""
        name = f"{type(self).__name__}.append"
        first_name = next(iter(self._SHAPES))
        known: dict[str, int] = {}
        if self._is_filled:
            for store, letters in zip(self._held, self._SHAPES.values()):
                known |= dict(zip(letters, store.shape))
            del known["N"]
        for index, ((argument, letters), tensor) in enumerate(zip(self._SHAPES.items(), new)):
            if not isinstance(tensor, Tensor):
                raise fault(DtypeError, name, argument, "a tensor", type(tensor).__name__)
            if not tensor.is_floating_point():
                raise fault(DtypeError, name, argument, "a tensor of floating point", dtype_of(tensor))
            if torch.is_grad_enabled() and tensor.requires_grad:
                raise fault(ArgumentError, name, argument, "without gradient (torch.no_grad)", "one wanted")
            sizes = shape_of(tensor)
            if len(sizes) != len(letters) or any(known.get(x, size) != size for x, size in zip(letters, sizes)):
                expected = ", ".join(f"{x} = {known[x]}" for x in letters if x in known)
                expected = f"({', '.join(letters)})" + (f" with {expected}" if expected else "")
                raise fault(ShapeError, name, argument, expected, sizes)
            known |= dict(zip(letters, sizes))
            like, whose = (self._held[index], "held") if self._is_filled else (new[0], f"of {first_name}")
            if tensor.dtype != like.dtype:
                expected = f"of the dtype {whose}, {dtype_of(like)}"
                raise fault(DtypeError, name, argument, expected, dtype_of(tensor))
            if tensor.device != like.device:
                raise fault(DeviceError, name, argument, f"on the device {whose}, {like.device}", tensor.device)

    def _grow(self, needed: int, new: tuple[Tensor, ...]) -> None:
        *_, allocated = [store.shape[1] for store in self._held]  # of all: every call reads the same sizes
        if needed <= allocated and self._is_filled:
            return
        size = self.capacity or max(self._FIRST, 2 * allocated, needed)
        with _leave_inference_mode():
            # Zeros, since masked values are still multiplied, and uninitialised memory may hold a NaN.
            grown = tuple(x.new_zeros((x.shape[0], size, *x.shape[2:])) for x in new)
            if self._is_filled:
                for store, old in zip(grown, self._held):
                    store[:, :allocated] = old
        self._held, self._is_filled = grown, True


class KVCache(TokenCache):
    """Keys and values of the tokens that an `Attention` layer has seen.

    Capacity, lengths and errors are those of `TokenCache`.

    Example:
        ```python
        import torch
        from warploom.nn import KVCache

        cache = KVCache(capacity=256)
        keys, values = cache.append(*torch.randn(2, 3, 10, 2, 16))  # ten tokens of three right-padded prompts
        cache.truncate([10, 7, 9])
        print(cache.ragged, cache.lengths)  # True [10, 7, 9]
        ```
    """

    _SHAPES: ClassVar[dict[str, tuple[str, ...]]] = {"k": ("B", "N", "Hkv", "D"), "v": ("B", "N", "Hkv", "E")}

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Add the same number of tokens to every entry.

        Args:
            k: ``(B, N, Hkv, D)``.
            v: ``(B, N, Hkv, E)``.

        Returns:
            Views ``(B, length, Hkv, D)`` and ``(B, length, Hkv, E)`` of all tokens so far. Where entries differ in
            length, tokens behind an entry's own length have no meaning.

        Raises:
            ShapeError: A size is not that of the other tensor or of earlier calls.
            DtypeError: A dtype is not, or is not floating.
            DeviceError: A device is not.
            ArgumentError: More tokens than the capacity, or a gradient is wanted: the cache is for inference.
        """
        keys, values = self._append(k, v)
        return keys, values

    def packed(self) -> tuple[Tensor, Tensor, Tensor]:
        """Copy the valid tokens: ``k`` (1, ΣM, Hkv, D), ``v`` (1, ΣM, Hkv, E) and ``cu_seqlens`` (B + 1,) int32.

        Raises:
            ArgumentError: The cache is empty.
        """
        keys, values = self._get_filled()
        allocated = keys.shape[1]
        rows = [torch.arange(length) + entry * allocated for entry, length in enumerate(self.lengths)]
        index = torch.cat([torch.empty(0, dtype=torch.int64), *rows]).to(keys.device, non_blocking=True)
        starts = torch.tensor([0, *self.lengths]).cumsum(0, dtype=torch.int32)
        k, v = (stored.flatten(0, 1).index_select(0, index)[None] for stored in (keys, values))
        return k, v, starts.to(keys.device, non_blocking=True)


class FactorCache(TokenCache):
    """Factors of the keys and values that a `TensorProductAttention` layer has seen.

    They are ``R·(H + D)`` numbers a token instead of ``H·D``, twice. Capacity, lengths and errors are those of
    `TokenCache`; `seqlens` is the ``seqused_k`` of `warploom.tpa_decode`.

    Example:
        ```python
        import torch
        from warploom.nn import FactorCache

        cache = FactorCache()
        a, b = torch.randn(3, 10, 4, 2), torch.randn(3, 10, 2, 16)  # heads and ranks, ranks and features
        ak, av, bk, bv = cache.append(a, a, b, b)
        print(cache.length)  # 10
        ```
    """

    _SHAPES: ClassVar[dict[str, tuple[str, ...]]] = {
        "ak": ("B", "N", "H", "Rk"),
        "av": ("B", "N", "H", "Rv"),
        "bk": ("B", "N", "Rk", "D"),
        "bv": ("B", "N", "Rv", "E"),
    }

    def append(self, ak: Tensor, av: Tensor, bk: Tensor, bv: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Add the same number of tokens to every entry.

        Args:
            ak: ``(B, N, H, Rk)``.
            av: ``(B, N, H, Rv)``.
            bk: ``(B, N, Rk, D)``.
            bv: ``(B, N, Rv, E)``.

        Returns:
            The four factors of all tokens so far, in the same order, as views of the first `length` tokens. Tokens
            behind an entry's own length have no meaning.

        Raises:
            ShapeError: A size is not that of the other factors or of earlier calls.
            DtypeError: A dtype is not, or is not floating.
            DeviceError: A device is not.
            ArgumentError: More tokens than the capacity, or a gradient is wanted: the cache is for inference.
        """
        ak, av, bk, bv = self._append(ak, av, bk, bv)
        return ak, av, bk, bv


class StateCache(_Cache):
    """The state of a `LinearAttention` or `DeltaAttention` layer, of the same size for any number of tokens.

    A token cannot be removed from a state. So the keys and values of the last call are kept until the next, and
    entries can be truncated to any length since then: right-padded prompts may have different lengths.

    Attributes:
        lengths: Tokens of each batch entry, as ints; empty before the first call.

    Example:
        ```python
        import torch
        from warploom.nn import LinearAttention, StateCache

        layer, cache = LinearAttention(64, heads=4, head_dim=16), StateCache()
        with torch.no_grad():
            layer(torch.randn(2, 10, 64), cache)
        cache.truncate([10, 7])  # the second prompt was shorter
        print(cache.state.shape)  # torch.Size([2, 4, 16, 16])
        ```
    """

    def __init__(self) -> None:
        super().__init__()
        self._before: list[int] = []  # lengths before the last call
        self._state_after: Callable[[int, int], Tensor | tuple[Tensor, ...]] | None = None
        self._order: Tensor | None = None  # indices of the entries in the last call, if they were reordered

    @property
    def state(self) -> Tensor | None:
        """``(B, H, F, E)`` float32; None before the first call."""
        return self._held[0] if self._is_filled else None

    @property
    def inputs(self) -> Tensor | None:
        """``(B, C, K − 1)``, the last inputs of a convolution before attention; None where there are none."""
        return self._held[1] if len(self._held) > 1 else None

    def put(
        self,
        state: Tensor,
        tokens: int,
        state_after: Callable[[int, int], Tensor | tuple[Tensor, ...]],
        inputs: Tensor | None = None,
    ) -> None:
        """Replace the state by that after new tokens of every entry.

        Args:
            state: ``(B, H, F, E)``.
            tokens: The number of new tokens.
            state_after: Returns the state ``(1, H, F, E)`` of an entry after a number of its new tokens, given
                both; with ``inputs`` a tuple of both. The cache can be pickled if this can.
            inputs: ``(B, C, K − 1)``, the last inputs of a convolution.

        Raises:
            ArgumentError: The state requires a gradient.
            ShapeError: The state has another batch, heads or features than the one before.
        """
        name = f"{type(self).__name__}.put"
        if torch.is_grad_enabled() and state.requires_grad:
            raise fault(ArgumentError, name, "state", "without gradient (torch.no_grad)", "one wanted")
        if self._is_filled and state.shape != self._held[0].shape:
            raise fault(ShapeError, name, "state", f"{tuple(self._held[0].shape)}", shape_of(state))
        self._before = self.lengths or [0] * state.shape[0]
        self._held, self._is_filled = (state,) if inputs is None else (state, inputs), True
        self._state_after, self._order = state_after, None
        self._counter = _counter(self.length + tokens)

    def truncate(self, lengths: int | Sequence[int]) -> None:
        """Remove each entry's tokens behind a length, at most the tokens of the last call.

        Args:
            lengths: One for all entries, or one for each.

        Raises:
            ArgumentError: A length is before the last call or beyond what the entry has, or there are not as many
                as entries.
            DtypeError: A length is not an int.
        """
        wanted = self._check_lengths(lengths)
        if any(length < before for length, before in zip(wanted, self._before)):
            expected = f"at least {self._before}, those before the last call"
            raise fault(ArgumentError, f"{type(self).__name__}.truncate", "lengths", expected, lengths)
        if self._state_after is not None and wanted != self.lengths:
            entries = range(len(wanted)) if self._order is None else self._order.tolist()
            places = zip(entries, wanted, self._before)
            states = [self._state_after(entry, length - before) for entry, length, before in places]
            parts = zip(*(state if isinstance(state, tuple) else (state,) for state in states))
            self._held = tuple(torch.cat(part) for part in parts)
        self._set_lengths(wanted)

    def _select(self, order: Tensor) -> None:
        self._held = tuple(held.index_select(0, order) for held in self._held)
        self._order = order if self._order is None else self._order.index_select(0, order)
        before = self._before
        same = before.count(before[0]) == len(before)
        self._before = before[:1] * order.shape[0] if same else [before[entry] for entry in order.tolist()]
