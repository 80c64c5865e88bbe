"""Other implementations of attention over several GPUs, each with its part of a sequence in zigzag."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F

from warploom.ops.spec import Case, Unsupported

Tensor = torch.Tensor
Function = Callable[..., Tensor]


def _build_gathered_sdpa(case: Case, mesh: DeviceMesh) -> Function:
    """Returns attention as a user writes it: keys and values by an all-gather, PyTorch's on chunks."""
    from torch.distributed._functional_collectives import all_gather_tensor_autograd
    from torch.nn.attention.bias import causal_lower_right

    if case["kind"] != "causal":
        raise Unsupported("written for causal attention")
    world, rank = mesh.size(), mesh.get_local_rank()
    half = case["n"] // world // 2

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        def gathered(x: Tensor) -> Tensor:
            parts = all_gather_tensor_autograd(x.transpose(0, 1).contiguous(), 0, mesh).transpose(0, 1)
            chunks = parts.unflatten(1, (world, 2, half))
            order = [chunks[:, r, 0] for r in range(world)] + [chunks[:, r, 1] for r in reversed(range(world))]
            return torch.cat(order, 1).transpose(1, 2)

        keys, values, outs = gathered(k), gathered(v), []
        for number, chunk in enumerate((rank, 2 * world - 1 - rank)):
            queries, end = q[:, number * half : (number + 1) * half].transpose(1, 2), (chunk + 1) * half
            mask = causal_lower_right(half, end)
            outs.append(
                F.scaled_dot_product_attention(
                    queries, keys[:, :, :end], values[:, :, :end], attn_mask=mask, enable_gqa=True
                )
            )
        return torch.cat(outs, 2).transpose(1, 2)

    return attend


def _build_ring_sdpa(case: Case, mesh: DeviceMesh) -> Function:
    """Returns PyTorch's own attention over several GPUs, to be called inside of `in_context`."""
    if case["kind"] != "causal":
        raise Unsupported("PyTorch's context parallelism is measured for causal attention")
    groups = case["heads"] // case["kv_heads"]

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        # Keys of every head: grouped queries were not tried with it.
        k, v = (x.repeat_interleave(groups, dim=2) for x in (k, v))
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)

    return attend


@contextlib.contextmanager
def in_context(name: str, case: Case, mesh: DeviceMesh, device: torch.device) -> Iterator[None]:
    """Enter PyTorch's context of attention over several GPUs, for the provider that needs it."""
    if name != "sdpa_context_parallel":
        yield
        return
    from torch.distributed.tensor.experimental import context_parallel
    from torch.nn.attention import SDPBackend, sdpa_kernel

    like = torch.empty(1, case["n"], device=device)
    kernels = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION]
    with (
        context_parallel(mesh, buffers=[like], buffer_seq_dims=[1], no_restore_buffers={like}),
        sdpa_kernel(kernels),
    ):
        yield


PROVIDERS: dict[str, Callable[[Case, DeviceMesh], Function]] = {
    "allgather_sdpa": _build_gathered_sdpa,
    "sdpa_context_parallel": _build_ring_sdpa,
}
