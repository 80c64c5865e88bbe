"""Context parallelism on two and four processes, which run context_parallel_checks and …_refusals."""

from types import SimpleNamespace
from typing import Any

import context_parallel_checks
import context_parallel_refusals
import pytest
import torch
from distributed_ranks import run_checks

import warploom
from warploom.distributed import exchange, ranks
from warploom.distributed.exchange import Pieces, Plan
from warploom.distributed.layout import chunks_of


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("checks", [context_parallel_checks, context_parallel_refusals])
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


# What travels: every rank's plan, and tokens in the place of rows


WINDOWS = ((None, None), (None, 0), (3, 0), (3, 5), (200, 0), (None, 4), (2, None))
BOUNDS = ((0, 64), (0, 37), (0, 1), (0, 0), (0, 7, 7, 37, 38, 58), (0, 5, 9, 30))


def move(pieces: Pieces, rows: torch.Tensor, into: torch.Tensor, places: tuple[slice, ...], rank: int) -> None:
    """Send to a rank what goes to it, if any: what stays does not."""
    leaving = pieces.of(rows)[rank]
    if leaving:
        assert [len(piece) for piece in leaving] == [place.stop - place.start for place in places]
    for piece, place in zip(leaving, places):
        into[place] = piece


def keys_of(plan: Plan, number: int, arrived: torch.Tensor) -> torch.Tensor:
    keys = plan.steps[number].keys
    return arrived[keys] if isinstance(keys, slice) else arrived.index_select(0, keys)


@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_rows_travel_once_and_gradients_return(world: int, layout: str) -> None:
    for bounds in BOUNDS:
        for packed in {len(bounds) > 2, True}:
            for window in WINDOWS:
                all_ranks = range(world)
                call = (bounds, packed, world)
                plans = [exchange.plan_of(*call, r, layout, *window, torch.device("cpu")) for r in all_ranks]
                parts = [chunks_of(bounds, world, layout).rows(r) for r in all_ranks]
                arrived = [torch.full((plan.arriving,), -1) for plan in plans]
                returned = [torch.full((plan.returning,), -1) for plan in plans]
                for number in range(len(plans[0].steps)):
                    steps = [plan.steps[number] for plan in plans]
                    for a, sender in enumerate(steps):
                        for b, receiver in enumerate(steps):
                            assert all((arrived[b][place] == -1).all() for place in receiver.landing[a])
                            move(sender.leaving, parts[a], arrived[b], receiver.landing[a], b)
                        sender.leaving.keep(parts[a], [arrived[a][place] for place in sender.landing[a]])
                    for a, sender in enumerate(steps):
                        tokens = keys_of(plans[a], number, arrived[a])
                        assert (tokens >= 0).all()
                        seen = [call.keys.stop - call.keys.start for call in sender.calls]
                        assert sum(seen) in (0, len(tokens))
                        assert len(bounds) > 2 or (tokens.diff() == 1).all()
                        for b, receiver in enumerate(steps):
                            move(sender.back, tokens, returned[b], receiver.returned[a], b)
                        sender.back.keep(tokens, [returned[a][place] for place in sender.returned[a]])
                for plan, part, rows in zip(plans, parts, returned):
                    each = rows[plan.order]
                    assert torch.equal(each, part.repeat_interleave(plan.ends.diff()))
