"""What ranks check of operators on DTensors, and of models sharded by PyTorch: run by tests/test_sharding.py."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import warploom
from warploom import flash_attention, linear_attention, lrpe_cosine, lrpe_rotate, tpa_attention, tpa_decode

B, H = Shard(0), Shard(2)


def mesh_of(world):
    return init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))


def draw(*shapes, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator, dtype=dtype) for shape in shapes]


def same(function, mesh, places, tensors, expected_place, **options):
    """A call on DTensors against the call on whole tensors: results, where they are, and gradients."""
    wholes = [x.clone().requires_grad_(x.is_floating_point()) for x in tensors]
    expected = function(*wholes, **options)
    expected = expected if isinstance(expected, tuple) else (expected,)
    grads = draw(*(x.shape for x in expected))
    leaves = [x for x in wholes if x.requires_grad]
    whole_gradients = torch.autograd.grad(expected, leaves, grads) if expected[0].requires_grad else []
    shards = [
        x.clone() if place is None else distribute_tensor(x, mesh, place if isinstance(place, list) else [place])
        for x, place in zip(tensors, places)
    ]
    shards = [x.requires_grad_(x.is_floating_point()) for x in shards]
    found = function(*shards, **options)
    found = found if isinstance(found, tuple) else (found,)
    expected_place = expected_place if isinstance(expected_place, list) else [expected_place]
    assert list(found[0].placements) == expected_place, found[0].placements
    for mine, whole in zip(found, expected):
        torch.testing.assert_close(mine.full_tensor(), whole)
    if not expected[0].requires_grad:
        return
    grads = [distribute_tensor(g, mesh, x.placements) for g, x in zip(grads, found)]
    gradients = torch.autograd.grad(found, [x for x in shards if x.requires_grad], grads)
    for mine, whole in zip(gradients, whole_gradients):
        torch.testing.assert_close(mine.full_tensor() if isinstance(mine, DTensor) else mine, whole)


def check_flash_attention(world):
    mesh = mesh_of(world)
    q, k, v, sink = draw((4, 9, 8, 4), (4, 9, 4, 4), (4, 9, 4, 6), (8,))

    def attend(q, k, v, sink, **options):
        return flash_attention(q, k, v, sink=sink, causal=True, **options)

    same(attend, mesh, (B, B, B, None), (q, k, v, sink), B)
    same(attend, mesh, (H, H, H, Shard(0)), (q, k, v, sink), H, return_lse=True)
    same(attend, mesh, (H, Replicate(), None, Replicate()), (q, k, v, sink), H)
    same(attend, mesh, (Shard(1), Shard(1), Shard(1), None), (q, k, v, sink), Replicate())
    same(attend, mesh, (H, None, None, None), (q, k[:, :, :1], v[:, :, :1], sink), H)
    lengths = torch.tensor([3, 9, 0, 5])
    same(lambda q, k, v, n: flash_attention(q, k, v, seqused_k=n), mesh, (B, B, B, B), (q, k, v, lengths), B)
    cu = torch.tensor([0, 2, 9])
    one = [x[:1] for x in (q, k, v)]
    same(lambda q, k, v: flash_attention(q, k, v, cu_seqlens_q=cu), mesh, (H, H, H), one, H)


def check_two_dimensions(world):
    if world != 4:
        return
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    q, k, v = draw((4, 9, 8, 4), (4, 9, 4, 4), (4, 9, 4, 6))
    for places in ([B, H], [H, H], [Replicate(), H]):
        same(flash_attention, mesh, [places] * 3, (q, k, v), places)


def check_lrpe(world):
    mesh = mesh_of(world)
    x, theta = draw((4, 8, 4, 6), (4, 3))
    ids = torch.randint(100, (4, 8))
    for function in (lrpe_rotate, lrpe_cosine):
        same(function, mesh, (B, None), (x, theta), B)
        same(function, mesh, (H, Shard(0)), (x, theta), H)
        same(function, mesh, (H, None), (x, theta[:1]), H)
        same(function, mesh, (H, Replicate()), (x, theta[0]), H)
        same(function, mesh, (Shard(1), None), (x, theta), Shard(1), offset=5)
        offsets = torch.tensor([1, 2, 3, 4])
        same(
            lambda x, t, o, f=function: f(x, t, offset=o),
            mesh,
            (Shard(1), None, None),
            (x, theta, offsets),
            Shard(1),
        )
        same(
            lambda x, t, p, f=function: f(x, t, position_ids=p),
            mesh,
            (Shard(1), None, None),
            (x, theta, ids),
            Shard(1),
        )
        same(function, mesh, (Shard(1), None), (x, theta[:, :1]), Replicate(), grid=(2, 4))
        same(function, mesh, (Shard(1), None), (x, theta), Replicate(), prefix=2)
        same(function, mesh, (Shard(1), None), (x, theta), Replicate(), activation="softmax_sequence")
        same(function, mesh, (Shard(1), None), (x[:, :7], theta), Replicate())  # not even
        same(function, mesh, (Shard(1), None), (x[:, :, 0], theta[:1]), Shard(1))


def check_linear_attention(world):
    mesh = mesh_of(world)
    q, k, v, theta, decay, state = draw((4, 9, 4, 6), (4, 9, 4, 6), (4, 9, 4, 5), (4, 3), (4, 9, 4), (4, 4, 6, 5))

    def attend(q, k, v, theta, decay, state):
        options = {"encoding": "rotate", "initial_state": state, "return_state": True}
        return linear_attention(q, k, v, theta=theta, decay=decay, **options)

    tensors = (q, k, v, theta, -decay.abs(), state)
    same(attend, mesh, (B, B, B, None, B, B), tensors, B)
    same(attend, mesh, (H, H, H, None, None, Shard(1)), tensors, H)
    same(attend, mesh, (H, H, H, Shard(0), Shard(0), None), (*tensors[:4], -decay[0, 0].abs(), state), H)


def check_tpa(world):
    mesh = mesh_of(world)
    aq, bq, ak, bk, av, bv = draw((4, 5, 8, 2), (4, 5, 2, 6), (4, 5, 8), (4, 5, 6), (4, 5, 8, 2), (4, 5, 2, 6))
    tensors = (aq, ak, av, bq, bk, bv)
    same(tpa_attention, mesh, (B,) * 6, tensors, B)
    same(tpa_attention, mesh, (H, H, H, None, None, Replicate()), tensors, H)
    with torch.no_grad():
        n = torch.tensor([5, 3, 2, 1])
        tensors = (*(x.detach() for x in tensors), n)
        decode = lambda *x: tpa_decode(*(y.detach() for y in x[:6]), cache_seqlens=x[6])  # noqa: E731
        same(decode, mesh, (B,) * 7, tensors, B)
        same(decode, mesh, (H, H, H, None, None, None, None), tensors, H)


def check_what_is_pending_is_summed_first(world):
    mesh = mesh_of(world)
    x, theta = draw((2, 3, 4, 6), (3,))
    pending = DTensor.from_local(x / world, mesh, [Partial()])
    torch.testing.assert_close(lrpe_rotate(pending, theta).full_tensor(), lrpe_rotate(x, theta))


def check_errors(world):
    mesh = mesh_of(world)
    q, k = draw((4, 9, 8, 4), (4, 9, 3, 4))
    with pytest.raises(warploom.ShapeError, match="k must be of Hkv heads"):
        flash_attention(*(distribute_tensor(x, mesh, [B]) for x in (q, k, k)))
    if world == 4:
        square = init_device_mesh("cpu", (2, 2))
        with pytest.raises(warploom.ArgumentError, match="tensors must be all on one mesh"):
            flash_attention(distribute_tensor(q, mesh, [B]), distribute_tensor(q, square, [B, B]), q)


def check_compiled(world):
    if world != 2:
        return
    mesh = mesh_of(world)
    q, k, v, theta = draw((2, 9, 4, 4), (2, 9, 2, 4), (2, 9, 2, 4), (2,))

    def layer(q, k, v, theta):
        q, k = lrpe_rotate(q, theta), lrpe_rotate(k, theta)
        return flash_attention(q, k, v, causal=True)

    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    same(lambda *x: compiled(*x), mesh, (H, H, H, None), (q, k, v, theta), H)
