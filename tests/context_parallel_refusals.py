"""What ranks refuse, where one of them or all are wrong: run by tests/test_context_parallel.py."""

import mmap
import time
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from context_parallel_checks import attention_case, cu, draw, mesh_of
from torch.distributed.device_mesh import init_device_mesh

import warploom
from warploom.distributed import (
    agreement,
    board,
    context_parallel_attention,
    context_parallel_linear_attention,
    local_position_ids,
    shard_sequence,
    unshard_sequence,
)


def refused(error, text, call):
    with pytest.raises(error, match=text):
        call()
    dist.barrier()  # every rank gets here


def check_what_one_rank_gets_wrong_all_refuse(world):
    mesh, rank = mesh_of(world), dist.get_rank()
    odd = rank == world - 1
    q, k, v = draw(*[(1, 8, 2, 4)] * 3)
    attend = context_parallel_attention
    refused(
        warploom.ShapeError,
        "q must be the ranks' parts",
        lambda: attend(q[:, : 8 - odd], k[:, : 8 - odd], v[:, : 8 - odd], mesh),
    )
    refused(
        warploom.DeviceError, "k must be on the device of q", lambda: attend(q, k.to("meta") if odd else k, v, mesh)
    )
    meta = [x.to("meta") for x in (q, k, v)]
    refused(
        warploom.DeviceError,
        "q must be on this rank's device of the mesh, cpu",
        lambda: attend(*(meta if odd else (q, k, v)), mesh),
    )
    refused(warploom.ArgumentError, "a call must be the same", lambda: attend(q, k, v, mesh, causal=odd))
    refused(
        warploom.ArgumentError,
        "a call must be the same",
        lambda: attend(q, k, v, mesh, layout="contiguous" if odd else "zigzag"),
    )
    refused(
        warploom.ArgumentError,
        "layout must be one of",
        lambda: attend(q, k, v, mesh, layout="ring" if odd else "zigzag"),
    )
    refused(
        warploom.ShapeError,
        "k must be of as many tokens",
        lambda: attend(q, k[:, : 8 - odd], v[:, : 8 - odd], mesh),
    )
    refused(
        warploom.BackendError, "backend", lambda: attend(q.double(), k.double(), v.double(), mesh, backend="triton")
    )
    refused(warploom.DtypeError, "mesh must be a DeviceMesh", lambda: attend(q, k, v, "cpu"))
    local = cu(3, 5)
    refused(
        warploom.ArgumentError,
        f"cu_seqlens must be the bounds of the whole, from 0 to at most {8 * world}",
        lambda: attend(q, k, v, mesh, cu_seqlens=cu(8 * world + 1)),
    )
    refused(
        warploom.ArgumentError,
        "a call must be the same",
        lambda: attend(q, k, v, mesh, cu_seqlens=cu(8, 8 * world - 8) if odd else cu(8 * world)),
    )
    refused(
        warploom.DtypeError,
        "cu_seqlens must be a tensor",
        lambda: attend(q, k, v, mesh, cu_seqlens=[0, 8] if odd else cu(8 * world)),
    )
    part = shard_sequence(q, mesh)
    refused(warploom.ShapeError, "x must be the ranks' parts", lambda: unshard_sequence(part[:, odd:], mesh))
    refused(
        warploom.ArgumentError,
        "a call must be the same",
        lambda: unshard_sequence(part.double() if odd else part, mesh),
    )
    refused(
        warploom.ArgumentError,
        "a call must be the same",
        lambda: unshard_sequence(q, mesh) if odd else attend(q, k, v, mesh),
    )
    refused(warploom.ShapeError, "dim must be an axis", lambda: shard_sequence(q, mesh, dim=4))
    refused(warploom.ArgumentError, "length must be at least 0", lambda: local_position_ids(-1, mesh))
    refused(warploom.DtypeError, "length must be an int", lambda: local_position_ids(1.0, mesh))
    attend = context_parallel_linear_attention
    refused(
        warploom.ShapeError,
        "q must be the ranks' parts",
        lambda: attend(q[:, : 8 - odd], k[:, : 8 - odd], v[:, : 8 - odd], mesh),
    )
    refused(
        warploom.ArgumentError,
        "^context_parallel_linear_attention: encoding must be",
        lambda: attend(q, k, v, mesh, encoding="none" if odd else "no"),
    )
    refused(warploom.ArgumentError, "a call must be the same", lambda: attend(q, k, v, mesh, offset=int(odd)))
    refused(
        warploom.ArgumentError, "cu_seqlens must be the bounds", lambda: attend(q, k, v, mesh, cu_seqlens=local)
    )
    refused(
        warploom.DeviceError,
        "q must be on this rank's device of the mesh, cpu",
        lambda: attend(*(meta if odd else (q, k, v)), mesh),
    )
    attention_case(world, causal=True)  # and the next call is right


def check_ranks_that_share_no_memory(world):
    """Their messages all go between hosts."""
    opened = mock.Mock(side_effect=OSError) if dist.get_rank() == world - 1 else mmap.mmap
    with mock.patch.dict(agreement._hosts, clear=True), mock.patch.object(board.mmap, "mmap", opened):
        check_what_one_rank_gets_wrong_all_refuse(world)
        attention_case(world, causal=True)
        assert all(known[2] is None for known in agreement._hosts.values())
    full = mock.patch.object(board.tempfile, "mkstemp", side_effect=OSError)
    with mock.patch.dict(agreement._hosts, clear=True), full:
        attention_case(world, causal=True)
        assert all(known[2] is None for known in agreement._hosts.values())
    attention_case(world, causal=True)
    assert all(known[2] is not None for known in agreement._hosts.values())


def check_meshes_that_are_not_of_one_dimension(world):
    mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp", "cp"))
    q, k, v = draw(*[(1, 8, 2, 4)] * 3)
    for call in (
        lambda: context_parallel_attention(q, k, v, mesh),
        lambda: context_parallel_linear_attention(q, k, v, mesh),
        lambda: shard_sequence(q, mesh),
        lambda: unshard_sequence(q, mesh),
        lambda: local_position_ids(8, mesh),
    ):
        refused(
            warploom.ArgumentError, r'mesh must be of one dimension, such as mesh\["cp"\]; got 2 dimensions', call
        )
    part = shard_sequence(q, mesh["cp"])
    assert torch.equal(unshard_sequence(part, mesh["cp"]), q)


ONE_DIMENSION = (warploom.ArgumentError, r'mesh must be of one dimension, such as mesh\["cp"\]; got 2 dimensions')


def check_a_wrong_mesh_on_one_rank(world):
    """The last rank knows no group: it is told where it is awaited, and only those that wait for it refuse."""
    every, rank = mesh_of(world), dist.get_rank()
    grid = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp", "cp"))
    q, k, v = draw(*[(1, 8, 2, 4)] * 3)
    calls = (
        lambda mesh: context_parallel_attention(q, k, v, mesh),
        lambda mesh: context_parallel_linear_attention(q, k, v, mesh),
        lambda mesh: unshard_sequence(q, mesh),
    )
    not_a_mesh = (warploom.DtypeError, "mesh must be a DeviceMesh")
    with mock.patch.object(agreement, "SILENT_WAIT", 0.1):
        for call in calls:
            for right in (every, grid["cp"]):
                for wrong, error in ((grid, ONE_DIMENSION), ("cpu", not_a_mesh)):
                    if world - 1 in right.mesh:
                        refused(*error, lambda: call(wrong if rank == world - 1 else right))  # noqa: B023
                    else:
                        call(right)
                        dist.barrier()
    assert dist.distributed_c10d._get_default_store().add(agreement._SEARCHING, 0) % world == 0
    attention_case(world, causal=True)  # and the next call is right


def check_a_wrong_mesh_in_the_first_call_of_a_group_on_gpus(world):
    """Where ranks wait for the group of their messages."""
    mesh = mesh_of(world)
    q, k, v = draw(*[(1, 8, 2, 4)] * 3)
    wrong = "cuda" if dist.get_rank() == 0 else mesh
    with mock.patch.object(dist, "get_backend", return_value="nccl"):
        refused(warploom.DtypeError, "must be a DeviceMesh", lambda: context_parallel_attention(q, k, v, wrong))
        refused(warploom.DtypeError, "must be a DeviceMesh", lambda: context_parallel_attention(q, k, v, wrong))
        context_parallel_attention(q, k, v, mesh)


def check_a_rank_that_is_late_is_awaited(world):
    mesh = mesh_of(world)
    with mock.patch.object(agreement, "SILENT_WAIT", 0.05):
        if dist.get_rank() == 0:
            time.sleep(0.3)
        x = torch.arange(8)
        assert torch.equal(unshard_sequence(shard_sequence(x, mesh, dim=0), mesh, dim=0), x)
    assert not dist.distributed_c10d._get_default_store().check([agreement._waiting(mesh.get_group().group_name)])


def check_what_one_rank_compiles_wrong_all_refuse(world):
    """Also with ``fullgraph=True``, where a rank that raises while it compiles could not tell the others."""
    if world != 2:
        return
    mesh, odd = mesh_of(world), dist.get_rank() == 1
    grid = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "cp"))
    q, k = draw(*[(1, 8, 2, 4)] * 2)
    v, weight = draw((1, 8, 2, 6), (6, 3), seed=1)
    attend, linear = context_parallel_attention, context_parallel_linear_attention
    cases = (
        (attend, {"k": k.to("meta")}, {}, warploom.DeviceError, "k must be on the device of q"),
        (attend, {"k": k[:, :7]}, {}, warploom.ShapeError, "v must be .* M = 7"),
        (attend, {"layout": "ring"}, {}, warploom.ArgumentError, "layout must be one of"),
        (attend, {"mesh": grid}, {"return_lse": True}, *ONE_DIMENSION),
        (attend, {"cu_seqlens": cu(16).float()}, {"cu_seqlens": cu(16)}, warploom.DtypeError, "cu_seqlens must be"),
        (linear, {"k": k.to("meta")}, {"return_state": True}, warploom.DeviceError, "k must be on the device of q"),
        (linear, {"encoding": "no"}, {}, warploom.ArgumentError, "linear_attention: encoding must be"),
        (linear, {"mesh": grid}, {}, *ONE_DIMENSION),
    )  # fmt: skip
    for options in ({"fullgraph": True}, {"fullgraph": True, "dynamic": True}, {}):
        for function, wrong, right, error, text in cases:
            torch._dynamo.reset()

            @torch.compile(backend="aot_eager", **options)
            def layer(given, function=function):
                found = function(**given)
                return (found[0] if isinstance(found, tuple) else found) @ weight

            given = {"q": q, "k": k, "v": v, "mesh": mesh, **right}
            with mock.patch.object(agreement, "SILENT_WAIT", 0.1):
                refused(error, text, lambda: layer(given | wrong if odd else given))  # noqa: B023
