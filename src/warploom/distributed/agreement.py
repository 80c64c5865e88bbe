"""What ranks tell each other before they compute: that their calls fit, so that an error is everybody's.

Messages go through a group of ranks between hosts, or over a board where ranks of one host all say the same. A rank
whose call is wrong sends its error in the place of its call. Where what is wrong is the mesh, it knows no group: a
rank that waits for others longer than a moment says so in the store of the process group, where such a rank looks
for the group that it is awaited in.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from warploom import errors
from warploom.distributed.board import Board, make_board
from warploom.distributed.ranks import all_gather, group_named, group_of
from warploom.errors import ArgumentError, WarploomError, fault

Tensor = torch.Tensor

SILENT_WAIT = 1.0
"""Seconds after which a rank says that it waits."""
SEARCH = 30.0
"""Seconds for which a rank that knows no group looks for one that it is awaited in."""

_MESSAGE = 1024  # bytes, of which the first eight are a length
_hosts: dict[str, tuple[Any, Any, Board | None]] = {}  # by name: a group, the same ranks of gloo, their board
_c10d: Any = dist.distributed_c10d
_SEARCHING = "warploom/searching"  # in the store: how many ranks look for a group


def _store() -> Any:
    """What all ranks can write into and read."""
    return _c10d._get_default_store()


def _waiting(name: str) -> str:
    """In the store: that somebody waits in a group of this name."""
    return f"warploom/waiting/{name}"


@contextlib.contextmanager
def _published_wait(group: Any) -> Iterator[Callable[[], None]]:
    """While the store says that this rank waits in a group; it does so again at every call of the function."""
    store, key = _store(), _waiting(group.group_name)

    def publish() -> None:
        store.set(key, "1")

    publish()
    try:
        yield publish
    finally:
        store.delete_key(key)


def _host_of(group: Any) -> tuple[Any, Board | None]:
    """A group of the same ranks whose messages are between hosts, and their board if they are on one.

    Waiting for such a message waits for no GPU.
    """
    known = _hosts.get(group.group_name)
    if known is None or known[0] is not group:
        with _published_wait(group):
            host = group
            if dist.get_backend(group) != "gloo":
                ranks = dist.get_process_group_ranks(group)
                host = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
            known = _hosts[group.group_name] = (group, host, make_board(host))
    return known[1:]


def _exchange(group: Any, length: int, message: bytes) -> tuple[list[int], list[bytes]]:
    """The length of every rank's part, and what every rank has to say."""
    host, board = _host_of(group)
    if board is not None:
        board.write(message, length)
        _wait(group, functools.partial(board.is_full, SILENT_WAIT))
        alike, lengths = board.read()
        if alike:
            return lengths, [message] * host.size()
    mine = torch.frombuffer(
        bytearray(struct.pack("<q", length) + message.ljust(_MESSAGE - 8, b"\0")), dtype=torch.uint8
    )
    everyone = mine.new_empty(host.size() * _MESSAGE)
    _wait(group, functools.partial(_is_done, all_gather(everyone, mine, group=host, async_op=True)))
    rows = [bytes(row) for row in everyone.view(-1, _MESSAGE).tolist()]
    return [struct.unpack("<q", row[:8])[0] for row in rows], [row[8:].rstrip(b"\0") for row in rows]


def _wait(group: Any, is_over: Callable[[], bool]) -> None:
    """Wait for the ranks of a group, again and again until it is over; where it takes long, the store says so."""
    if not is_over():
        with _published_wait(group) as publish:
            while not is_over():
                publish()  # another rank may just have stopped waiting


def _is_done(work: Any) -> bool:
    """Wait for messages, and whether they came in a moment."""
    try:
        work.wait(datetime.timedelta(seconds=SILENT_WAIT))
    except RuntimeError:
        if not work.is_completed():
            return False
        work.wait()  # raises, if it has failed
    return True


@functools.lru_cache(256)
def _encoded(kind: str, text: str) -> bytes:
    """A call, or the name and the text of an error."""
    return f"{kind}|{text}".encode()[: _MESSAGE - 8]


def agree(group: Any, function: str, length: int, call: str) -> list[int]:
    """Compare this rank's call with those of the others, which call this too.

    Args:
        group: The ranks.
        function: The public function, for errors.
        length: Of this rank's part.
        call: What must be the same on every rank, in words.

    Returns:
        The length of every rank's part.

    Raises:
        WarploomError: Of the kind that a rank refused its own call with, on every rank.
        ArgumentError: Calls differ.
    """
    lengths, calls = _exchange(group, length, _encoded(function, call))
    if len(set(calls)) > 1:
        texts = [each.decode(errors="replace").partition("|") for each in calls]
        for rank, (kind, _, text) in enumerate(texts):
            if kind in errors.__all__:
                raise getattr(errors, kind)(f"{text} (on rank {rank})")
        mine, other = texts[group.rank()], next(text for text in texts if text != texts[group.rank()])
        got = f"{other[0]}: {other[2]} on rank {texts.index(other)}"
        raise fault(ArgumentError, function, "a call", f"the same on every rank, {mine[0]}: {mine[2]}", got)
    return lengths


def refuse(function: str, mesh: object, error: WarploomError) -> NoReturn:
    """Raise the error that this rank found, and let ranks that call `agree` raise it.

    Args:
        function: The public function.
        mesh: What it was given as one.
        error: What is wrong.
    """
    kind = type(error)
    raise kind(_publish_error(_name_of(function, mesh), kind.__name__, function, error.args[0])) from None


def refuse_compiled(
    function: str, mesh: object, error: WarploomError, tensors: Sequence[Any], check: Callable[..., Any],
    shapes: Callable[..., Sequence[Sequence[int]]],
) -> Any:  # fmt: skip
    """What `refuse` does, when the compiled call runs.

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
    """``B, n, H, D, E`` of parts, as far as wrong ones tell."""
    given = [x for x in (q, k, v) if isinstance(x, Tensor) and x.dim() == 4]
    return (*given[0].shape, given[-1].shape[3]) if given else (0,) * 5


def _of_known_size(x: Tensor) -> Tensor:
    """A tensor like one whose sizes a compiler takes for variables, which a text cannot name."""
    return x.new_empty([range(size).stop for size in x.shape])  # the compiler wants a range's end to be a number


def _name_of(function: str, mesh: object) -> str:
    """Of the group of a mesh; empty if it has none."""
    try:
        return str(group_of(function, mesh).group_name)
    except WarploomError:
        return ""


@torch.library.custom_op("warploom::context_parallel_refusal", mutates_args=())
def _refuse(result: Tensor, group: str, kind: str, function: str, text: str) -> Tensor:
    """What a compiled call runs that this rank refuses."""
    raise getattr(errors, kind)(_publish_error(group, kind, function, text))


@_refuse.register_fake
def _(result: Tensor, group: str, kind: str, function: str, text: str) -> Tensor:
    return torch.empty_like(result)


def _publish_error(name: str, kind: str, function: str, text: str) -> str:
    """Send an error to the ranks of a group, or to those that wait for this one where its name is empty.

    Returns:
        Its text, of the function that was called in the place of the one that it calls.
    """
    text = f"{function}:{text.partition(':')[2]}"
    name = name or _waiting_group()
    if name:
        _exchange(group_named(name), 0, _encoded(kind, text))
    return text


def _waiting_group() -> str:
    """The group that others wait for this rank in, by name; empty if nobody seems to."""
    if not dist.is_initialized():
        return ""
    store, world = _store(), dist.get_world_size()
    # Where all ranks are wrong nobody waits: they count themselves, so that they need not search for long.
    all_searching = -(-store.add(_SEARCHING, 1) // world) * world
    end = time.monotonic() + SEARCH
    while time.monotonic() < end:
        for name in _c10d._world.pg_names.values():
            if store.check([_waiting(name)]):
                store.add(_SEARCHING, -1)
                return str(name)
        if store.add(_SEARCHING, 0) >= all_searching:
            return ""
        time.sleep(0.01)
    store.add(_SEARCHING, -1)
    return ""
