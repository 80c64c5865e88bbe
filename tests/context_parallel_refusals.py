"""What ranks refuse, where one of them or all are wrong: run by tests/test_context_parallel.py."""

import contextlib
import datetime
import functools
import random
import time
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from context_parallel_checks import attention_case, cu, draw, mesh_of
from seeds import seed
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import warploom
from warploom.distributed import (
    agreement,
    context_parallel_attention,
    context_parallel_delta_attention,
    context_parallel_linear_attention,
    context_parallel_short_convolution,
    local_position_ids,
    shard_sequence,
    unshard_sequence,
)

NOT_A_MESH = (warploom.DtypeError, "mesh must be a DeviceMesh")
ONE_DIMENSION = (warploom.ArgumentError, r'mesh must be of one dimension, such as mesh\["cp"\]; got 2 dimensions')


def refused(error, text, call):
    with pytest.raises(error, match=text):
        call()
    dist.barrier()  # every rank gets here


def check_what_one_rank_gets_wrong_all_refuse(world):
    mesh, odd, n = mesh_of(world), dist.get_rank() == world - 1, 8 * world
    q, k, v = draw(*[(1, 8, 2, 4)] * 3)
    short = [x[:, : 8 - odd] for x in (q, k, v)]
    meta = [x.to("meta") if odd else x for x in (q, k, v)]
    part = shard_sequence(q, mesh)
    attend, linear = context_parallel_attention, context_parallel_linear_attention
    delta, convolve = context_parallel_delta_attention, context_parallel_short_convolution
    beta, weight = torch.ones(1, 8, 2), torch.ones(4, 3)
    x = q[:, :, 0]
    differs = (warploom.ArgumentError, "a call must be the same")
    not_here = (warploom.DeviceError, "q must be on this rank's device of the mesh, cpu")
    no_parts = (warploom.ShapeError, "q must be the ranks' parts")
    not_whole = (warploom.ArgumentError, f"cu_seqlens must be the bounds of the whole, from 0 to at most {n}")
    for error, text, function, given, options in (
        (*no_parts, attend, short, {}),
        (warploom.DeviceError, "k must be on the device of q", attend, (q, meta[1], v), {}),
        (*not_here, attend, meta, {}),
        (*differs, attend, (q, k, v), {"causal": odd}),
        (*differs, attend, (q, k, v), {"layout": "contiguous" if odd else "zigzag"}),
        (warploom.ArgumentError, "layout must be one", attend, (q, k, v), {"layout": "ring" if odd else "zigzag"}),
        (warploom.ShapeError, "k must be of as many tokens", attend, (q, *short[1:]), {}),
        (warploom.BackendError, "backend", attend, (q.double(), k.double(), v.double()), {"backend": "triton"}),
        (*not_whole, attend, (q, k, v), {"cu_seqlens": cu(n + 1)}),
        (*differs, attend, (q, k, v), {"cu_seqlens": cu(8, n - 8) if odd else cu(n)}),
        (warploom.DtypeError, "cu_seqlens must be a", attend, (q, k, v), {"cu_seqlens": [0, 8] if odd else cu(n)}),
        (warploom.ShapeError, "x must be the ranks' parts", unshard_sequence, (part[:, odd:],), {}),
        (*differs, unshard_sequence, (part.double() if odd else part,), {}),
        (*differs, *((unshard_sequence, (q,)) if odd else (attend, (q, k, v))), {}),
        (warploom.ShapeError, "dim must be an axis", shard_sequence, (q,), {"dim": 4}),
        (warploom.ArgumentError, "length must be at least 0", local_position_ids, (-1,), {}),
        (warploom.DtypeError, "length must be an int", local_position_ids, (1.0,), {}),
        (*no_parts, linear, short, {}),
        (warploom.ArgumentError, "^context_parallel_linear_attention: encoding must be", linear, (q, k, v),
         {"encoding": "none" if odd else "no"}),
        (*differs, linear, (q, k, v), {"offset": int(odd)}),
        (warploom.ArgumentError, "cu_seqlens must be the bounds", linear, (q, k, v), {"cu_seqlens": cu(3, 5)}),
        (*not_here, linear, meta, {}),
        (*no_parts, delta, (*short, beta[:, : 8 - odd]), {}),
        (warploom.ShapeError, "beta must be", delta, (q, k, v, beta[:, : 8 - odd]), {}),
        (warploom.ArgumentError, "^context_parallel_delta_attention: decay must be", delta, (q, k, v, beta),
         {"decay": beta * int(odd)}),
        (*differs, delta, (q, k, v, beta), {"decay": -beta if odd else None}),
        (*differs, delta, (q, k, v, beta), {"normalize": bool(odd)}),
        (warploom.ArgumentError, "cu_seqlens must be the bounds", delta, (q, k, v, beta), {"cu_seqlens": cu(3, 5)}),
        (*not_here, delta, (*meta, beta.to(meta[0].device)), {}),
        (warploom.ShapeError, "x must be the ranks' parts", convolve, (x[:, : 8 - odd], weight), {}),
        (warploom.ShapeError, "weight must be", convolve, (x, weight[odd:]), {}),
        (*differs, convolve, (x, weight[:, odd:]), {}),
        (*differs, convolve, (x, weight), {"activation": "silu" if odd else "none"}),
        (warploom.ArgumentError, "^context_parallel_short_convolution: activation must be", convolve, (x, weight),
         {"activation": "relu" if odd else "none"}),
        (warploom.ArgumentError, "cu_seqlens must be the bounds", convolve, (x, weight), {"cu_seqlens": cu(3, 5)}),
    ):  # fmt: skip
        refused(error, text, lambda: function(*given, mesh, **options))  # noqa: B023
    refused(*NOT_A_MESH, lambda: attend(q, k, v, "cpu"))
    attention_case(world, causal=True)  # and the next call is right


def short_mesh(world):
    """A mesh whose messages fail after a moment."""
    group = dist.new_group(timeout=datetime.timedelta(seconds=3))
    return DeviceMesh.from_group(group, "cpu", mesh_dim_names=("cp",))


def check_a_known_kind_of_call_exchanges_nothing(world):
    """But its tokens: the store is not asked, and messages are those of one call."""
    mesh = mesh_of(world)
    q, k, v = (x.requires_grad_() for x in draw(*[(1, 6, 2, 4)] * 3))
    packed = cu(5, 6 * world - 5)
    calls = (
        lambda **more: context_parallel_attention(q, k, v, mesh, causal=True, **more),
        lambda **more: context_parallel_attention(q, k, v, mesh, cu_seqlens=packed, **more),
        lambda **more: context_parallel_linear_attention(q, k, v, mesh, cu_seqlens=packed, **more),
        lambda **more: context_parallel_linear_attention(q, k, v, mesh, decay=-torch.ones(2), **more),
        lambda **more: context_parallel_delta_attention(q, k, v, torch.ones(1, 6, 2), mesh, **more),
        lambda **_more: context_parallel_short_convolution(q[:, :, 0], torch.ones(4, 3), mesh),
        lambda **_more: unshard_sequence(q, mesh),
    )
    for number, call in enumerate(calls):
        call().sum().backward()
        known = agreement._agreements[mesh.get_group().group_name]
        with mock.patch.object(known, "store", None), mock.patch.object(dist, "all_gather_object", None):
            for _ in range(3):
                call().sum().backward()
            if number < 5:
                with pytest.raises(AttributeError):  # of the store, which a new kind needs
                    call(scale=0.25 + number)
        known._number -= number < 5
        dist.barrier()
    detail = mock.patch.object(agreement._c10d, "get_debug_level", return_value=agreement._c10d.DebugLevel.DETAIL)
    with detail, mock.patch.object(known, "write", side_effect=known.write) as written:
        calls[0](), calls[0]()
        assert written.call_count == 2


def after_a_call(world):
    """Returns a call of a kind that all ranks know, what they know, and whether this is the last of them."""
    mesh = short_mesh(world)
    call = functools.partial(context_parallel_attention, *draw(*[(1, 8, 2, 4)] * 3), mesh)
    call()
    return call, agreement._agreements[mesh.get_group().group_name], dist.get_rank() == world - 1


def waits_in_vain(call):
    with pytest.raises(RuntimeError, match=r"(?i)time|clos"):
        call()


def check_an_error_in_a_call_of_a_known_kind(world):
    """The rank that makes it raises it at once, the others when their messages fail; and later they read it."""
    call, _, odd = after_a_call(world)
    began = time.monotonic()
    if odd:
        with pytest.raises(warploom.ArgumentError, match="layout must be one of"):
            call(layout="ring")
        assert time.monotonic() - began < 2
    else:
        waits_in_vain(call)
        with pytest.raises(warploom.ArgumentError, match=f"layout must be one of .* \\(on rank {world - 1}\\)"):
            call(scale=2.0)
    assert time.monotonic() - began < 30
    dist.barrier()


def check_a_rank_that_goes_on_after_an_error_does_not_mix_calls_up(world):
    """It waits for the others to have read its error, and says that they have not."""
    call, known, odd = after_a_call(world)
    if odd:
        with pytest.raises(warploom.ArgumentError, match="layout must be one of"):
            call(layout="ring")
        with waiting(known, 0.5), pytest.raises(warploom.ArgumentError, match="no call of a new kind on ranks"):
            call()
    else:
        waits_in_vain(call)
    dist.barrier()


@contextlib.contextmanager
def waiting(known, seconds):
    """Agreements that wait no longer than this for other ranks."""
    before = known.store.timeout
    known.store.set_timeout(datetime.timedelta(seconds=seconds))
    try:
        yield
    finally:
        known.store.set_timeout(before)


def check_a_kind_that_only_some_ranks_know(world):
    """The others wait for as long as the store does, and then say for whom."""
    call, known, odd = after_a_call(world)
    if odd:
        others = ", ".join(map(str, range(world - 1)))
        missing = rf"a call must be the same on every rank; got no call of a new kind on ranks \[{others}\] for 1 s"
        with waiting(known, 1.0):
            for causal in (True, False):  # tokens of the next call are not sent for those of this one
                with pytest.raises(warploom.ArgumentError, match=missing):
                    call(causal=causal)
    else:
        waits_in_vain(call)
    dist.barrier()


def check_wholes_that_only_some_ranks_can_tell_apart(world):
    """Of 8 and 9 tokens the first of two ranks has 4: none takes one for the other, in whatever order they come."""
    mesh = mesh_of(world)
    order = random.Random(seed())
    lengths = [*range(4 * world, 6 * world + 2)] * 2
    order.shuffle(lengths)
    for length in lengths:
        attention_case(world, length=length, layout=order.choice(("zigzag", "contiguous")), causal=True)
        x = torch.arange(length)
        assert torch.equal(unshard_sequence(shard_sequence(x, mesh, dim=0), mesh, dim=0), x)


def check_meshes_that_are_not_of_one_dimension(world):
    mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp", "cp"))
    q, k, v = draw(*[(1, 8, 2, 4)] * 3)
    for call in (
        lambda: context_parallel_attention(q, k, v, mesh),
        lambda: context_parallel_linear_attention(q, k, v, mesh),
        lambda: context_parallel_delta_attention(q, k, v, q[..., 0], mesh),
        lambda: context_parallel_short_convolution(q[:, :, 0], torch.ones(4, 3), mesh),
        lambda: shard_sequence(q, mesh),
        lambda: unshard_sequence(q, mesh),
        lambda: local_position_ids(8, mesh),
    ):
        refused(*ONE_DIMENSION, call)
    part = shard_sequence(q, mesh["cp"])
    assert torch.equal(unshard_sequence(part, mesh["cp"]), q)


def check_a_wrong_mesh_on_one_rank(world):
    """The last rank knows no group: those that wait for it name it and its error, in the end."""
    rank, odd = dist.get_rank(), world - 1
    grid = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp", "cp"))
    q, k, v = draw(*[(1, 8, 2, 4)] * 3)
    calls = (
        lambda mesh: context_parallel_attention(q, k, v, mesh),
        lambda mesh: context_parallel_linear_attention(q, k, v, mesh),
        lambda mesh: unshard_sequence(q, mesh),
    )
    for call, (wrong, error) in zip(calls, ((grid, ONE_DIMENSION), ("cpu", NOT_A_MESH), (grid, ONE_DIMENSION))):
        right = short_mesh(world)
        if rank == odd:
            refused(*error, lambda: call(wrong))  # noqa: B023
        else:
            named = rf"no call of a new kind on ranks \[{odd}\] for 1 s; rank {odd} refused one: .*{error[1]}"
            with waiting(agreement._agreements_of(right.get_group()), 1.0):
                refused(warploom.ArgumentError, named, lambda: call(right))  # noqa: B023
    attention_case(world, causal=True)  # and the next call of others is right


def check_a_rank_that_is_late_is_awaited(world):
    mesh = mesh_of(world)
    if dist.get_rank() == 0:
        time.sleep(0.3)
    x = torch.arange(8)
    assert torch.equal(unshard_sequence(shard_sequence(x, mesh, dim=0), mesh, dim=0), x)


def check_what_one_rank_compiles_wrong_all_refuse(world):
    """Also with ``fullgraph=True``, where a rank that raises while it compiles could not tell the others."""
    if world != 2:
        return
    mesh, odd = mesh_of(world), dist.get_rank() == 1
    grid = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "cp"))
    q, k = draw(*[(1, 8, 2, 4)] * 2)
    v, weight = draw((1, 8, 2, 6), (6, 3), seed=1)
    attend, linear = context_parallel_attention, context_parallel_linear_attention
    delta, beta = context_parallel_delta_attention, torch.ones(1, 8, 2)
    cases = (
        (attend, {"k": k.to("meta")}, {}, warploom.DeviceError, "k must be on the device of q"),
        (attend, {"k": k[:, :7]}, {}, warploom.ShapeError, "v must be .* M = 7"),
        (attend, {"layout": "ring"}, {}, warploom.ArgumentError, "layout must be one of"),
        (attend, {}, {"mesh": grid, "return_lse": True}, *ONE_DIMENSION),
        (attend, {"cu_seqlens": cu(16).float()}, {"cu_seqlens": cu(16)}, warploom.DtypeError, "cu_seqlens must be"),
        (linear, {"k": k.to("meta")}, {"return_state": True}, warploom.DeviceError, "k must be on the device of q"),
        (linear, {"encoding": "no"}, {}, warploom.ArgumentError, "linear_attention: encoding must be"),
        (linear, {}, {"mesh": grid}, *ONE_DIMENSION),
        (delta, {"k": k.to("meta")}, {"beta": beta, "return_state": True}, warploom.DeviceError, "k must be on"),
        (delta, {"encoding": "no"}, {"beta": beta}, warploom.ArgumentError, "delta_attention: encoding must be"),
    )  # fmt: skip
    for options in ({"fullgraph": True}, {"fullgraph": True, "dynamic": True}, {}):
        for function, wrong, right, error, text in cases:
            torch._dynamo.reset()

            @torch.compile(backend="aot_eager", **options)
            def layer(given, function=function):
                found = function(**given)
                return (found[0] if isinstance(found, tuple) else found) @ weight

            given = {"q": q, "k": k, "v": v, "mesh": mesh, **right}
            refused(error, text, lambda: layer(given | wrong if odd else given))  # noqa: B023
