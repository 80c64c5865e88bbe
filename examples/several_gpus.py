"""What train_lm.py does on several GPUs, under torchrun, on one mesh of three dimensions.

``dp``: each rank has other sequences. ``cp``: each rank has a part of every sequence. ``tp``: each rank has a part
of every matrix, its heads and inner features. Parameters, their gradients and the optimizer's state are sharded by
`fully_shard` over ``dp`` and ``cp`` together. A checkpoint fits any number of ranks and any such mesh.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoints
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from warploom.distributed import local_position_ids, shard_context, shard_matrices, shard_sequence
from warploom.nn import TransformerLM
from warploom.nn.attention import Implementation

STATE = "state.pt"
TOGETHER = 6
"""Blocks whose matrices travel together. Each journey costs the host: a step of 36 blocks takes it 94 ms with six
of them at a time and 233 with one, more than a GPU takes for 8192 tokens (two H100). One process takes 76."""


@dataclass(frozen=True)
class Ranks:
    """The ranks of a run; without a mesh there is one process, for which nothing here does anything."""

    mesh: DeviceMesh | None = None
    shards: Any = None
    """Over ``dp`` and ``cp`` together."""
    device: torch.device | None = None
    layout: str = "zigzag"
    softmax: bool = True
    """Whether the model has softmax attention, which must know where the tokens of a part stand."""

    @classmethod
    @contextlib.contextmanager
    def started(cls, device_type: str, cp: int, tp: int, output: Path) -> Iterator[Ranks]:
        """Join the other ranks; what ends one of them ends all, with a word about how to go on."""
        device = torch.device(device_type)
        if device.type == "cuda":
            device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
            torch.cuda.set_device(device)
        own = not dist.is_initialized()
        if own:
            dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
        dp, rest = divmod(dist.get_world_size(), cp * tp)
        if rest or not dp:
            sys.exit(f"{dist.get_world_size()} ranks are no multiple of --cp {cp} times --tp {tp}")
        mesh = init_device_mesh(device.type, (dp, cp, tp), mesh_dim_names=("dp", "cp", "tp"))
        try:
            yield cls(mesh, mesh["dp", "cp"]._flatten("shard"), device)
        except RuntimeError as error:
            lines = str(error).strip().splitlines() or [type(error).__name__]
            sys.exit(
                f"rank {dist.get_rank()}: {lines[0]}\nA rank has ended, this one or another. The checkpoints in "
                f"{output} are whole: the same command goes on from the last one."
            )
        if own:
            dist.destroy_process_group()

    @property
    def several(self) -> bool:
        """Whether the run is one under torchrun, be it of one rank."""
        return self.mesh is not None

    @property
    def is_first(self) -> bool:
        """Whether this process writes the log."""
        return self.mesh is None or dist.get_rank() == 0

    def shard(self, model: TransformerLM) -> None:
        """Shard a model that is the same on every rank."""
        if self.mesh is None:
            return
        kinds, softmax = {*model.config.kinds}, {*get_args(Implementation)}
        object.__setattr__(self, "layout", "contiguous" if kinds & {"linear", "delta"} else "zigzag")
        object.__setattr__(self, "softmax", bool(kinds & softmax))
        if kinds <= softmax or self.mesh["tp"].size() > 1:
            shard_matrices(model, self.mesh["tp"])
        if self.mesh["cp"].size() > 1:
            shard_context(model, self.mesh["cp"], layout=self.layout)
        # Matrices travel in the dtype that autocast gives them, once a step: gathered, 2 bytes a number each.
        sixteen_bits = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
        policy = sixteen_bits if self.device.type == "cuda" else MixedPrecisionPolicy()
        for first in range(0, len(model.blocks), TOGETHER):
            layers = model.blocks[first : first + TOGETHER].modules()
            matrices = [layer for layer in layers if isinstance(layer, torch.nn.Linear)]
            fully_shard(matrices, mesh=self.shards, mp_policy=policy, reshard_after_forward=False)
        fully_shard(model, mesh=self.shards)

    def sharded_alike(self, model: TransformerLM) -> list[list[torch.nn.Parameter]]:
        """Parameters, those together that are sharded over the same dimensions, as fused optimizers want them."""
        found: dict[int, list[torch.nn.Parameter]] = {}
        for p in model.parameters():
            found.setdefault(p.device_mesh.ndim if isinstance(p, DTensor) else 0, []).append(p)
        return list(found.values())

    def part(self, tokens: torch.Tensor, targets: torch.Tensor) -> dict[str, torch.Tensor]:
        """This rank's part of a batch, as arguments of the model."""
        if self.mesh is None:
            return {"tokens": tokens, "targets": targets}
        dp, cp = self.mesh["dp"], self.mesh["cp"]
        rows, length = len(tokens) // dp.size(), tokens.shape[1]
        if len(tokens) % dp.size() or length % (2 * cp.size()):
            sys.exit(
                f"a batch of {len(tokens)} × {length} is not divisible over dp = {dp.size()}, cp = {cp.size()}"
            )
        first = rows * dp.get_local_rank()
        found = {"tokens": tokens[first : first + rows], "targets": targets[first : first + rows]}
        if cp.size() == 1:
            return found
        found = {name: shard_sequence(x, cp, layout=self.layout) for name, x in found.items()}
        if self.softmax:
            found["position_ids"] = local_position_ids(length, cp, layout=self.layout)
        return found

    def mean(self, loss: torch.Tensor) -> torch.Tensor:
        """The mean over all ranks, which have as many tokens each."""
        if self.mesh is None:
            return loss
        group = self.shards.get_group()
        total = loss.detach().clone()
        dist.all_reduce(total, group=group)
        return total / group.size()

    def clip(self, model: TransformerLM, largest: float) -> None:
        """As `torch.nn.utils.clip_grad_norm_`, which takes no gradients of several meshes."""
        if self.mesh is None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), largest)
            return
        everywhere, over_tp = (
            [p.grad.to_local() for p in model.parameters() if (p.device_mesh.ndim == 2) == cut]
            for cut in (False, True)
        )
        none = [torch.zeros((), device=self.device)]  # of an empty list the norm is on the host, which would wait
        of_matrices, of_others = (
            torch.nn.utils.get_total_norm(found or none).square() for found in (over_tp, everywhere)
        )
        dist.all_reduce(of_matrices, group=self.mesh["tp"].get_group())
        total = of_matrices + of_others
        dist.all_reduce(total, group=self.shards.get_group())
        scale = (largest / (total.sqrt() + 1e-6)).clamp(max=1.0)
        for gradient in (*everywhere, *over_tp):
            gradient.mul_(scale)

    def save(
        self, folder: Path, model: TransformerLM, optimizer: torch.optim.Optimizer, state: dict[str, Any]
    ) -> None:
        """Write a checkpoint, each rank its part."""
        dist.barrier()  # the first has made the folder
        weights, moments = get_state_dict(model, optimizer)
        checkpoints.save({"model": weights, "optimizer": moments}, checkpoint_id=folder / "sharded")
        if self.is_first:
            torch.save(state, folder / STATE)
        dist.barrier()

    def load(self, folder: Path, model: TransformerLM, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Read a checkpoint of any number of ranks, each rank its part."""
        weights, moments = get_state_dict(model, optimizer)
        checkpoints.load({"model": weights, "optimizer": moments}, checkpoint_id=folder / "sharded")
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
        found: dict[str, Any] = torch.load(folder / STATE, weights_only=True)
        return found
