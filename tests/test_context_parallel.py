"""Context parallelism on two and four processes, which run context_parallel_checks and …_refusals."""

import functools
import math
import random
from types import SimpleNamespace
from typing import Any
from unittest import mock

import context_parallel_checks
import context_parallel_refusals
import pytest
import torch
from distributed_ranks import run_checks
from seeds import seed
from torch.distributed import HashStore

import warploom
from warploom.distributed import agreement, ranks
from warploom.distributed.agreement import Agreements
from warploom.distributed.attention.plan import PlainCall, Step, make_plan
from warploom.distributed.balance import Piece, balance
from warploom.distributed.layout import chunks_of, close_bounds


@pytest.mark.sample(4)
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("checks", [context_parallel_checks, context_parallel_refusals])
@pytest.mark.seldom(6, 45)
def test_on_all_ranks(checks: Any, world: int) -> None:
    found = run_checks(checks.__name__, world)
    assert not any(found.values()), "\n".join(f"{name}: {error}" for name, error in found.items() if error)
    assert set(found) >= {name for name in vars(checks) if name.startswith("check_")}


def test_a_tensor_on_the_gpu_of_another_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    mesh: Any = SimpleNamespace(device_type="cuda")
    mine, other = (SimpleNamespace(device=torch.device("cuda", index)) for index in (1, 0))
    ranks.check_device("attend", mesh, "q", mine)  # type: ignore[arg-type]
    with pytest.raises(
        warploom.DeviceError, match="q must be on this rank's device of the mesh, cuda:1; got cuda:0"
    ):
        ranks.check_device("attend", mesh, "q", other)  # type: ignore[arg-type]


# What ranks know


def agreements_of(world: int) -> list[Agreements]:
    store = HashStore()
    groups: list[Any] = [
        SimpleNamespace(group_name="cp", rank=functools.partial(int, rank), size=functools.partial(int, world))
        for rank in range(world)
    ]
    with mock.patch.object(agreement, "_store", return_value=store):
        return [Agreements(group) for group in groups]


@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
@pytest.mark.parametrize("world", [2, 3, 4])
def test_all_ranks_know_the_same(world: int, layout: str) -> None:
    draw = random.Random(f"{seed()} {world} {layout}")
    ranks = agreements_of(world)
    known = 0
    for _ in range(500):
        n = draw.choice((draw.randrange(200), 8 * world * draw.randrange(8)))
        read = None if draw.random() < 0.7 else (0, min(n, 8 * world))  # a rank knows no more but its part's length
        bounds = close_bounds("attend", read, n, tail=True)
        agreed = agreement.Agreed(tuple(chunks_of(bounds, world, layout).lengths), bounds)
        for each in ranks:
            each.remember_whole(agreed.lengths)
        found = [each.known((read, length)) for each, length in zip(ranks, agreed.lengths)]
        assert found == [None] * world or found == [agreed] * world
        known += found[0] is not None
        for each, length in zip(ranks, agreed.lengths):
            each.remember((read, length), agreed)
    assert known


def test_kinds_are_forgotten_together() -> None:
    first, second = agreements_of(2)
    with mock.patch.object(agreement, "MOST_KINDS", 5):
        for n in (10, 11, 12, 13, 14, 16, 18, 20, 22, 24, 26, 28):
            lengths = (n // 2, n - n // 2)
            for each in (first, second):
                each.remember((n,), agreement.Agreed(lengths, (0, n)))
            assert first.kinds == second.kinds
            assert len(first.kinds) <= 5
    assert (28,) in first.kinds


def test_messages_that_all_have_read_are_deleted() -> None:
    ranks = agreements_of(3)
    draw = random.Random(seed())
    for _ in range(50):
        messages = [agreement.Message(length, "attend", "a call") for length in draw.sample(range(9), 3)]
        for rank in draw.sample(range(3), 3):
            ranks[rank].write(messages[rank])
        for rank in draw.sample(range(3), 3):
            assert ranks[rank].read("attend") == messages
        assert ranks[0].store.num_keys() <= 3 * 3


# Who has what


def tokens_of(pieces: list[Piece]) -> list[tuple[int, int]]:
    return [
        (piece.sequence, token)
        for piece in pieces
        for token in (*range(piece.low, piece.inner), *range(piece.outer, piece.high))
    ]


@pytest.mark.parametrize("world", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("sequences", [1, 2, 3, 7, 12, 40])
def test_ranks_share_packed_sequences(sequences: int, world: int) -> None:
    draw = random.Random(f"{seed()} {sequences} {world}")
    for size in (3, 60, 600):
        lengths = [draw.choice((0, 1, draw.randrange(size), draw.randrange(size))) for _ in range(sequences)]
        found = balance(lengths, world)
        every = [token for pieces in found for token in tokens_of(pieces)]
        assert sorted(every) == [(number, token) for number, n in enumerate(lengths) for token in range(n)]
        sizes = [sum(piece.tokens for piece in pieces) for pieces in found]
        assert max(sizes) - min(sizes) <= (1 if sequences >= world else 2 * sequences)
        for pieces in found:
            assert sum(piece.work for piece in pieces) == sum(token + 0.5 for _, token in tokens_of(pieces))


@pytest.mark.parametrize("world", [2, 4, 8])
def test_work_is_shared_alike_and_few_sequences_are_cut(world: int) -> None:
    draw = random.Random(f"{seed()} {world}")
    for sequences in (1, 2, 5, 12, 30, 100):
        lengths = [draw.randrange(500, 20_000) for _ in range(sequences)]
        found = balance(lengths, world)
        work = [sum(piece.work for piece in pieces) for pieces in found]
        assert max(work) * world <= 1.12 * sum(work)
        cut = [sum(piece.tokens < lengths[piece.sequence] for piece in pieces) for pieces in found]
        assert max(cut) <= max(3 * math.log2(world), 2) or sequences < world
    alike = balance([4096] * 24, world)
    assert all(piece.tokens == 4096 for pieces in alike for piece in pieces)


# What travels: every rank's plan, and tokens in the place of rows


WINDOWS = ((None, None), (None, 0), (3, 0), (3, 5), (200, 0), (None, 4), (2, None))
BOUNDS = ((0, 64), (0, 37), (0, 1), (0, 0), (0, 7, 7, 37, 38, 58), (0, 5, 9, 30), tuple(range(0, 70, 5)))


def move(rows: torch.Tensor, send: tuple[slice, ...], into: torch.Tensor, places: tuple[slice, ...]) -> None:
    """Send to a rank what goes to it, one slice for each that it expects."""
    for piece, place in zip(send, places, strict=True):
        assert len(rows[piece]) == place.stop - place.start
        into[place] = rows[piece]


def assert_sees_itself(call: PlainCall, part: torch.Tensor, seen: torch.Tensor, right: int | None) -> None:
    """Queries of each sequence of a call are among its keys, and the window ends at the right one."""
    queries, keys = part[call.queries], seen[call.keys]
    none = torch.tensor([0, len(queries)]), torch.tensor([0, len(keys)])
    cu_q, cu_k = none if call.cu_seqlens_q is None else (call.cu_seqlens_q, call.cu_seqlens_k)
    for first, last, low, high in zip(cu_q[:-1], cu_q[1:], cu_k[:-1], cu_k[1:]):
        own, of_keys = queries[first:last], keys[low:high]
        assert torch.isin(own, of_keys).all()
        assert (of_keys.diff() == 1).all()
        assert right is None or own[-1] + right == of_keys[-1] + call.right


def send_gradients(steps: list[Step], seen: list[list[torch.Tensor]], returned: list[torch.Tensor]) -> None:
    """Tokens of keys, in the place of their gradients."""
    for a, sender in enumerate(steps):
        tokens = torch.cat([*seen[a], torch.zeros(0, dtype=torch.int64)])[sender.rows]
        for b, receiver in enumerate(steps):
            move(tokens, sender.grad_send[b], returned[b], receiver.grad_recv[a])


@pytest.mark.sample(2)
@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_rows_travel_once_and_gradients_return(world: int, layout: str) -> None:
    for bounds in BOUNDS:
        for window in WINDOWS:
            all_ranks = range(world)
            plans = [make_plan(bounds, world, r, layout, *window, torch.device("cpu")) for r in all_ranks]
            parts = [chunks_of(bounds, world, layout).rows(r) for r in all_ranks]
            arrived = [torch.full((plan.seen,), -1) for plan in plans]
            returned = [torch.full((plan.grad_rows,), -1) for plan in plans]
            for plan, part, rows in zip(plans, parts, arrived):
                if plan.whole:
                    rows[-plan.whole :] = part[-plan.whole :]
            seen: list[list[torch.Tensor]] = [[] for _ in all_ranks]
            for number in range(len(plans[0].steps)):
                steps = [plan.steps[number] for plan in plans]
                for a, sender in enumerate(steps):
                    for b, receiver in enumerate(steps):
                        assert all((arrived[b][place] == -1).all() for place in receiver.recv[a])
                        move(parts[a], sender.send[b], arrived[b], receiver.recv[a])
                for rows, part, each, step in zip(arrived, parts, seen, steps):
                    for source, place in step.copies:
                        assert (rows[place] == -1).all()
                        rows[place] = rows[source]
                    if not plans[0].single_call:
                        each.clear()
                    for call in step.calls:
                        assert (rows[call.keys] >= 0).all()
                        assert_sees_itself(call, part, rows, window[1])
                        each.append(rows[call.keys])
                if not plans[0].single_call:
                    send_gradients(steps, seen, returned)
            if plans[0].single_call:
                for number in range(len(plans[0].steps)):
                    send_gradients([plan.steps[number] for plan in plans], seen, returned)
            for plan, part, rows, each in zip(plans, parts, returned, seen):
                of_rows = part[: plan.shared].repeat_interleave(plan.ends.diff())
                assert torch.equal(rows[plan.order], of_rows)
                if plan.whole:
                    assert torch.equal(torch.cat(each)[-plan.whole :], part[plan.shared :])
                assert plan.shared + plan.whole == len(part)
