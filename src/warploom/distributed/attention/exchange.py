"""Keys and values sent to the chunks that see them, and gradients sent back and added up."""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from warploom.distributed.attention.plan import ContextAttentionPlan, Slices
from warploom.distributed.ranks import as_bytes

Tensor = torch.Tensor


class PendingKeys(NamedTuple):
    """Keys and values on their way to this rank."""

    plan: ContextAttentionPlan
    sent: list[Tensor]  # kept, as their memory is not to be used again before they are sent
    rows: list[Tensor]  # all rows of each tensor that this rank sees
    works: list[list[Any]]  # the messages of each step

    def wait(self, number: int) -> None:
        """Let the current stream wait for the rows of a step.

        Each step once: some backends wait forever for what they have waited for.
        """
        for work in self.works[number]:
            work.wait()
        for source, place in self.plan.steps[number].copies:
            for x in self.rows:
                x[place].copy_(x[source])


def send_keys(plan: ContextAttentionPlan, tensors: list[Tensor], group: Any) -> PendingKeys:
    """Send rows (n, …) of this rank's part to the chunks that see them.

    What the first step needs is sent first: the rest arrives while it is computed. The kernel that sends the rest
    is launched before the first step is computed: later it would have to wait for multiprocessors, and the kernels
    of other ranks for it. Where nothing is computed before all is there, one kernel sends all.
    """
    rows = [x.new_empty((plan.seen, *x.shape[1:])) for x in tensors]
    moves = [[(x, step.send, into, step.recv) for x, into in zip(tensors, rows)] for step in plan.steps]
    if plan.single_call:
        moves = [[*itertools.chain(*moves)], *[[] for _ in moves[1:]]]
    works = [_send(each, group) for each in moves]
    if plan.whole:
        for x, into in zip(tensors, rows):
            into[-plan.whole :].copy_(x[-plan.whole :])
    return PendingKeys(plan, tensors, rows, works)


def send_gradients(
    plan: ContextAttentionPlan, gradients: list[list[Tensor]], into: list[Tensor], group: Any, kernels: bool
) -> None:
    """Send gradients to their tokens' ranks, and add those of this rank's part up, in float32 and in a fixed order.

    One kernel sends them when all are there: the rank that waits longest receives as many as if those of the first
    step had been sent before, and no multiprocessors are lost to a kernel that waits for other ranks.

    Args:
        plan: Of the call.
        gradients: By step, of each tensor those of its chunk's keys (M, …).
        into: Of each tensor where the sums of shared rows go.
        group: The ranks.
        kernels: Whether kernels compute the call.
    """
    received = [x.new_empty((plan.grad_rows, *x.shape[1:])) for x in gradients[0]]
    works = _send(
        [
            (x, step.grad_send, rows, step.grad_recv)
            for step, of_step in zip(plan.steps, gradients)
            for x, rows in zip(of_step, received)
        ],
        group,
    )
    for work in works:
        work.wait()
    for rows, sums in zip(received, into if plan.shared else ()):
        sum_gradients(plan, rows, sums, kernels)


def _send(given: list[tuple[Tensor, Slices, Tensor, Slices]], group: Any) -> list[Any]:
    """Send slices of tensors to every rank and receive others, in one kernel, without waiting for it.

    A second would begin when the computation that follows leaves multiprocessors to it. What stays is copied
    meanwhile. The memory of what is sent is not to be used again before the works are waited for.
    """
    sends = []
    for x, send, into, recv in given:
        for peer, (mine, theirs) in enumerate(zip(send, recv)):
            if peer != group.rank() and 0 not in x.shape[1:]:
                for function, tensor, pieces in ((dist.isend, x, mine), (dist.irecv, into, theirs)):
                    sends += [
                        dist.P2POp(function, as_bytes(tensor[piece]), group=group, group_peer=peer)
                        for piece in pieces
                    ]
    works = dist.batch_isend_irecv(sends) if sends else []
    for x, send, into, recv in given:
        for rows, place in zip(send[group.rank()], recv[group.rank()], strict=True):
            into[place].copy_(x[rows])
    return works


def sum_gradients(plan: ContextAttentionPlan, received: Tensor, into: Tensor, kernels: bool) -> None:
    """Add up what was received for each shared row, in float32 in the order of steps and ranks.

    Args:
        plan: Of the call.
        received: Rows (·, …), those of the first step first.
        into: ``(shared, …)``, where the sums go.
        kernels: Whether kernels compute the call.
    """
    if kernels:
        from warploom.distributed.kernels import sum_rows

        sum_rows(received, plan.order, plan.ends, into)
        return
    precise = torch.promote_types(received.dtype, torch.float32)
    total = received.new_zeros(into.shape, dtype=precise)
    of_rows = plan.ends.diff()
    for number in range(int(of_rows.max()) if len(of_rows) else 0):
        there = (of_rows > number).nonzero().flatten()
        total[there] += received[plan.order[plan.ends[there] + number]].to(precise)
    into.copy_(total)
