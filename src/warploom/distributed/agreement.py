"""Agreement of the ranks on a call, once for each kind of call: what one rank refuses, all refuse.

A kind of call is the function, everything that must be the same on every rank, and the length of this rank's part.
In the first call of a kind every rank writes its call into the store of the process group, or the error that it
refuses the call with, and reads what the others wrote. Later calls of that kind exchange nothing. With
``TORCH_DISTRIBUTED_DEBUG=DETAIL`` ranks compare every call.

A rank that refuses a call of a kind that the others know raises its error alone. They wait for its tokens, as in
any collective that a rank does not enter, and find the error in the store in their next call of a new kind. One
whose mesh is wrong does not know for whom to write its error: those that wait for it raise theirs, with its text,
after the timeout of the store.

Ranks must agree on what they know, and a part does not always tell how long the whole is: of 64 and of 65 tokens
the first of two ranks has 32. Calls on wholes that only some ranks can tell apart are compared every time.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from warploom import errors
from warploom.distributed.layout import chunks_of, close_bounds
from warploom.distributed.ranks import Bounds, format_bounds, group_named, group_of
from warploom.errors import ArgumentError, ShapeError, WarploomError, fault

Tensor = torch.Tensor
Lengths = tuple[int, ...]
"""The lengths of the ranks' parts of a whole."""

LONGEST_PAUSE = 0.05
"""Seconds between two looks at the store, after some that follow each other more quickly."""
MOST_KINDS = 1024
"""Kinds that are remembered for a group; then all ranks forget them together."""

_c10d: Any = dist.distributed_c10d
_agreements: dict[str, Agreements] = {}  # by name of the group


class Agreed(NamedTuple):
    """A call that the ranks have agreed on: the lengths of their parts, and the bounds of the whole."""

    lengths: Lengths
    bounds: Bounds


class Message(NamedTuple):
    """A rank's message about a call, with the length of its part."""

    length: int
    name: str  # the function, or the error that the rank refuses the call with
    text: str


class Agreements:
    """The kinds of call that the ranks of a group have agreed on. They are the same on every rank.

    Args:
        group: The ranks.
    """

    def __init__(self, group: Any) -> None:
        self.group, self.store = group, _store()
        self.kinds: dict[tuple[Any, ...], Agreed] = {}
        name = f"warploom/{group.group_name}"
        # A store may outlive a group, and have another of the same name.
        self._prefix = f"{name}/{self.store.add(f'{name}/{group.rank()}', 1)}"
        self._number = self._deleted = 0  # exchanges
        self._unread = False  # this rank wrote a message and did not read the others'
        self._wholes: dict[tuple[int, int], Lengths] = {}  # by rank and length of its part
        self._ambiguous: set[Lengths] = set()

    def remember_whole(self, lengths: Lengths) -> None:
        """Remember that there are parts of these lengths."""
        for part in enumerate(lengths):
            first = self._wholes.setdefault(part, lengths)
            if first != lengths:
                self._ambiguous |= {first, lengths}

    def known(self, kind: tuple[Any, ...]) -> Agreed | None:
        """Returns what was agreed on for a kind, if every rank knows that it was."""
        agreed = self.kinds.get(kind)
        return agreed if agreed and self._is_certain(agreed.lengths) else None

    def remember(self, kind: tuple[Any, ...], agreed: Agreed) -> None:
        """Remember a kind that all ranks have agreed on."""
        self.remember_whole(agreed.lengths)
        if self._is_certain(agreed.lengths):
            if len(self.kinds) >= MOST_KINDS:
                self.kinds.clear()
            self.kinds[kind] = agreed

    def _is_certain(self, lengths: Lengths) -> bool:
        return lengths not in self._ambiguous and _c10d.get_debug_level() != _c10d.DebugLevel.DETAIL

    def write(self, message: Message) -> None:
        """Write this rank's message of the next exchange."""
        self._unread = True
        self._number += 1
        self.store.set(self._key(self.group.rank()), json.dumps(message))

    def read(self, function: str) -> list[Message]:
        """Wait for the messages of all ranks, and return them.

        Raises:
            ArgumentError: A rank has written nothing for as long as the store waits.
        """
        self._wait(function)
        found = [Message(*json.loads(text)) for text in self.store.multi_get(self._keys())]
        for number in range(self._deleted + 1, self._number):  # all ranks have read those
            self.store.delete_key(self._key(self.group.rank(), number))
        self._deleted, self._unread = self._number - 1, False
        return found

    def await_others(self, function: str) -> None:
        """Wait for the others where this rank wrote a message, and raised an error: they may be at another call."""
        if self._unread:
            self._wait(function)
            self._unread = False

    def _wait(self, function: str) -> None:
        """Look at the store until the messages of all ranks are there."""
        keys, seconds = self._keys(), self.store.timeout.total_seconds()
        pause, end = 1e-4, time.monotonic() + seconds
        while not self.store.check(keys):
            if time.monotonic() > end:
                missing = [rank for rank, key in enumerate(keys) if not self.store.check([key])]
                got = f"no call of a new kind on ranks {missing} for {seconds:.0f} s"
                for rank in missing:
                    refused = _name_refusal(dist.get_global_rank(self.group, rank))
                    if self.store.check([refused]):
                        got += f"; rank {rank} refused one: {self.store.get(refused).decode()}"
                raise fault(ArgumentError, function, "a call", "the same on every rank", got)
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)

    def _keys(self) -> list[str]:
        return [self._key(rank) for rank in range(self.group.size())]

    def _key(self, rank: int, number: int | None = None) -> str:
        return f"{self._prefix}/{self._number if number is None else number}/{rank}"


def _store() -> Any:
    """Returns the store that all ranks write into and read."""
    return _c10d._get_default_store()


def _name_refusal(rank: int) -> str:
    """Returns where a rank writes its last error in a call whose group it did not know."""
    return f"warploom/refused/{rank}"


def _agreements_of(group: Any) -> Agreements:
    known = _agreements.get(group.group_name)
    if known is None or known.group is not group:
        known = _agreements[group.group_name] = Agreements(group)
    return known


def remember_whole(group: Any, bounds: Bounds, layout: str) -> None:
    """Remember the lengths of the parts of a whole that this rank cuts, as the others do, without a message.

    Where all are equal each rank knows the whole by its part.
    """
    if not torch.compiler.is_compiling():
        lengths = chunks_of(bounds, group.size(), layout).lengths
        if len(set(lengths)) > 1:
            _agreements_of(group).remember_whole(tuple(lengths))


def agree(
    function: str, group: Any, argument: str, length: int, call: dict[str, object], read: Bounds | None,
    layout: str, *, tail: bool = False,
) -> Agreed:  # fmt: skip
    """Compare this rank's call with those of the others, which call this too, unless its kind is known.

    Args:
        function: The public function.
        group: The ranks.
        argument: The tensor whose parts have lengths, for errors.
        length: Of this rank's part.
        call: What else must be the same on every rank, by name.
        read: The bounds of packed sequences, the same too.
        layout: Of the parts, the same too.
        tail: Whether bounds may end before the tokens do.

    Raises:
        WarploomError: Of the kind that a rank refused its own call with, on every rank.
        ArgumentError: Calls differ, or bounds are not those of the whole.
        ShapeError: Parts are not those of the layout.
    """
    ranks = _agreements_of(group)
    ranks.await_others(function)
    kind = (function, length, read, layout, *call.values())
    agreed = ranks.known(kind)
    if agreed is None:
        words = {**call, "layout": layout, "cu_seqlens": format_bounds(read)}
        text = " ".join(f"{name}={value}" for name, value in words.items())
        ranks.write(Message(length, function, text))
        lengths = _compare(function, group.rank(), ranks.read(function))
        bounds = close_bounds(function, read, sum(lengths), tail=tail)
        expected = chunks_of(bounds, group.size(), layout).lengths
        if lengths != expected:
            what = f"the ranks' parts of a {layout} layout of {sum(lengths)} tokens, of lengths {expected}"
            raise fault(ShapeError, function, argument, what, f"{lengths}")
        agreed = Agreed(tuple(lengths), bounds)
        ranks.remember(kind, agreed)
    return agreed


def _compare(function: str, rank: int, messages: list[Message]) -> list[int]:
    """Returns the lengths of all ranks' parts; raises what a rank refused its call with, or where calls differ."""
    for other, message in enumerate(messages):
        if message.name in errors.__all__:
            raise getattr(errors, message.name)(f"{message.text} (on rank {other})")
    calls = [f"{message.name}: {message.text}" for message in messages]
    for other, call in enumerate(calls):
        if call != calls[rank]:
            expected, got = f"the same on every rank, {calls[rank]}", f"{call} on rank {other}"
            raise fault(ArgumentError, function, "a call", expected, got)
    return [message.length for message in messages]


def refuse(function: str, mesh: object, error: WarploomError) -> NoReturn:
    """Raise the error that this rank found, and let ranks that call `agree` raise it.

    Args:
        function: The public function.
        mesh: What it was given as one.
        error: What is wrong.
    """
    kind = type(error)
    raise kind(_write_error(_name_of(function, mesh), kind.__name__, function, error.args[0])) from None


def refuse_compiled(
    function: str, mesh: object, error: WarploomError, tensors: Sequence[Any], check: Callable[..., Any],
    shapes: Callable[..., Sequence[Sequence[int]]],
) -> Any:  # fmt: skip
    """Refuse a call as `refuse` does, when the compiled call runs.

    Args:
        function: The public function.
        mesh: What it was given as one.
        error: What is wrong.
        tensors: Those of the call.
        check: Finds the error, from tensors.
        shapes: Of the results, from tensors: as many as are compiled behind the call, and never seen.
    """
    tensors = [_of_known_size(x) if isinstance(x, Tensor) else x for x in tensors]
    try:
        check(*tensors)
    except WarploomError as known:
        error = known
    name, kind = _name_of(function, mesh), type(error).__name__
    dtype = next((x.dtype for x in tensors if isinstance(x, Tensor)), None)
    device = mesh.device_type if isinstance(mesh, DeviceMesh) else "cpu"
    empty = [torch.empty(shape, dtype=dtype, device=device) for shape in shapes(*tensors)]
    found = tuple([_refuse(x, name, kind, function, error.args[0]) for x in empty])
    return found if len(found) > 1 else found[0]


def sizes_of(q: object, k: object, v: object) -> tuple[int, ...]:
    """Returns ``B, n, H, D, E`` of parts, as far as wrong ones tell."""
    given = [x for x in (q, k, v) if isinstance(x, Tensor) and x.dim() == 4]
    return (*given[0].shape, given[-1].shape[3]) if given else (0,) * 5


def _of_known_size(x: Tensor) -> Tensor:
    """Returns a tensor like one whose sizes a compiler takes for variables, which a text cannot name."""
    return x.new_empty([range(size).stop for size in x.shape])  # the compiler wants a range's end to be a number


def _name_of(function: str, mesh: object) -> str:
    """Returns the name of the group of a mesh; empty if it has none."""
    try:
        return str(group_of(function, mesh).group_name)
    except WarploomError:
        return ""


@torch.library.custom_op("warploom::context_parallel_refusal", mutates_args=())
def _refuse(result: Tensor, group: str, kind: str, function: str, text: str) -> Tensor:
    """Raise, in a compiled call, the error that this rank refuses it with."""
    raise getattr(errors, kind)(_write_error(group, kind, function, text))


@_refuse.register_fake
def _(result: Tensor, group: str, kind: str, function: str, text: str) -> Tensor:
    return torch.empty_like(result)


def _write_error(name: str, kind: str, function: str, text: str) -> str:
    """Write an error for the ranks of a group, or for those that wait in vain for this one where it has no name.

    Returns:
        Its text, of the function that was called in the place of the one that it calls.
    """
    text = f"{function}:{text.partition(':')[2]}"
    if name:
        ranks = _agreements_of(group_named(name))
        ranks.await_others(function)
        ranks.write(Message(0, kind, text))
    elif dist.is_initialized():
        _store().set(_name_refusal(dist.get_rank()), text)
    return text
