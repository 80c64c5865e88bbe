"""What ranks check of operators on DTensors, and of models sharded by PyTorch: run by tests/test_sharding.py."""

import inspect
import os
import re
import sys
import textwrap
from pathlib import Path

import distributed_ranks
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
    same(tpa_attention, mesh, (B,) * 6, tensors, B, causal=True)
    same(tpa_attention, mesh, (H, H, H, None, None, Replicate()), tensors, H)
    with torch.no_grad():
        n = torch.tensor([5, 3, 2, 1])
        tensors = (*(x.detach() for x in tensors), n)
        decode = lambda *x: tpa_decode(*(y.detach() for y in x[:6]), seqused_k=x[6])  # noqa: E731
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
    with pytest.raises(warploom.ShapeError, match="Hkv a divisor of Hq"):
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


# Models


def model_of(**options):
    from warploom.nn import TransformerConfig, TransformerLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 16, "context_length": 32, "d_model": 32, "d_ff": 128, "layers": 2, "heads": 8}
    return TransformerLM(TransformerConfig(**{**sizes, "kv_heads": 4, **options})).double()


def text_of(batch=4, length=16):
    return torch.randint(16, (2, batch, length), generator=torch.Generator().manual_seed(1))


def expected_of(**options):
    model = model_of(**options)
    loss = model(*text_of()).loss
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters()}


def compare_gradients(model, expected):
    for block in model.blocks:  # back to the order of one process
        if hasattr(block.attention, "group") and block.attention.grouped:
            whole = {}
            for name in ("attention.qkv.weight", "mlp.gate_up.weight"):
                p = block.get_parameter(name)
                whole[name] = (p.grad.full_tensor(), p)
            plain = model_of(kv_heads=model.config.kv_heads).blocks[0]
            plain.attention.grouped, plain.mlp.grouped = True, block.mlp.grouped
            for name, (grad, _) in whole.items():
                with torch.no_grad():
                    plain.get_parameter(name).copy_(grad)
            plain.attention.group(False)
            plain.mlp.group(0)
            for name, (_, p) in whole.items():
                p.ungrouped = plain.get_parameter(name).detach()
    for name, p in model.named_parameters():
        found = getattr(p, "ungrouped", None)
        if found is None:
            found = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
        torch.testing.assert_close(found, expected[name], msg=lambda text, name=name: f"{name}: {text}")


def check_order_of_rows(world):
    tokens = text_of()[0]
    model = model_of()
    before = model(tokens).logits
    for block in model.blocks:
        block.attention.group()
        block.mlp.group(32)
    torch.testing.assert_close(model(tokens).logits, before)
    for block in model.blocks:
        block.attention.group(False)
        block.mlp.group(0)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), model_of().parameters()))


def check_tensor_parallel(world):
    from warploom.distributed import shard_matrices

    for options in ({}, {"position": "cosine", "learnable_positions": True}):
        loss, gradients = expected_of(**options)
        model = model_of(**options)
        shard_matrices(model, mesh_of(world))
        found = model(*text_of()).loss
        found.backward()
        torch.testing.assert_close(found.detach(), loss)
        compare_gradients(model, gradients)


def check_fsdp_and_context_parallel(world):
    from torch.distributed.fsdp import fully_shard

    from warploom.distributed import local_position_ids, shard_context, shard_sequence

    mesh = mesh_of(world)
    for layout, options in (
        ("zigzag", {"checkpoint": True}),
        ("contiguous", {"attention": "linear", "kv_heads": None}),
        ("contiguous", {"attention": "delta", "kv_heads": None}),
        ("contiguous", {"attention": ("delta", "flash"), "kv_heads": None}),
    ):
        loss, gradients = expected_of(**options)
        model = model_of(**options)
        shard_context(model, mesh, layout=layout)
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        text = shard_sequence(text_of(), mesh, dim=2, layout=layout)
        softmax = "flash" in model.config.kinds
        places = {"position_ids": local_position_ids(16, mesh, layout=layout)} if softmax else {}
        found = model(*text, **places).loss
        found.backward()
        total = found.detach().clone()
        torch.distributed.all_reduce(total)
        torch.testing.assert_close(total / world, loss)
        compare_gradients(model, gradients)


def encoding_layers():
    from warploom.nn import LRPE, Attention, LinearAttention

    torch.manual_seed(0)
    return [
        LRPE(2, 16),
        Attention(32, 2, causal=True, position=LRPE(2, 16, kind="cosine")),
        LinearAttention(32, 2),
    ]


def theta_of(layer):
    return next(p for name, p in layer.named_parameters() if name.endswith("theta"))


def check_frequencies_under_fsdp_are_float32(world):
    """Whatever FSDP casts, and whatever was cast before: values, gradients, a step, and a state dict."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh, rank, low = mesh_of(world), torch.distributed.get_rank(), torch.bfloat16
    for index in range(3):
        for policy, cast in ((MixedPrecisionPolicy(), False), (MixedPrecisionPolicy(param_dtype=low), False),
                             (MixedPrecisionPolicy(), True)):  # fmt: skip
            layer, alone = encoding_layers()[index], encoding_layers()[index]
            whole = policy.param_dtype is None and not cast
            (layer.bfloat16() if cast else layer), (alone if whole else alone.bfloat16())
            fully_shard(layer, mesh=mesh, mp_policy=policy)
            features = (32,) if index else (2, 16)
            x, grad = draw((world, 6, *features), (1, 6, *features), dtype=torch.float32)
            x, grad = (x, grad) if whole else (x.to(low), grad.to(low))
            place = {"position_ids": torch.tensor([0, 1, 2, 999, 3001, 8003])} if index < 2 else {}
            found = layer(x[rank : rank + 1], **place)
            torch.testing.assert_close(found, alone(x, **place)[rank : rank + 1])
            theta, expected = theta_of(layer), theta_of(alone)
            assert theta.requires_grad
            assert theta.dtype == torch.float32
            for _ in range(2):  # gradients add up
                layer(x[rank : rank + 1], **place).backward(grad)
                for entry in x:
                    alone(entry[None], **place).backward(grad / world)
            tight = {} if whole else {"rtol": 0.05, "atol": 0.05 * expected.grad.abs().max()}
            torch.testing.assert_close(theta.grad.full_tensor(), expected.grad, **tight)
            torch.optim.AdamW([theta], lr=1e-3).step()
            state = layer.state_dict()
            kept = state[next(name for name in state if name.endswith("theta"))].full_tensor()
            assert kept.dtype == torch.float32
            torch.testing.assert_close(kept, theta.full_tensor(), rtol=0, atol=0)
            assert (kept - expected).abs().min() > 5e-4
    with torch.device("meta"):
        late = encoding_layers()[1].bfloat16()
    fully_shard(late, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=low))
    late.to_empty(device="cpu")
    for module in (late.qkv, late.out):
        torch.nn.init.ones_(module.weight)
    layer = encoding_layers()[1]
    torch.testing.assert_close(late.position.theta.full_tensor(), layer.position.theta, rtol=0, atol=0)
    late(torch.randn(1, 3, 32, dtype=low)).sum().backward()
    assert late.position.theta.grad.full_tensor().isfinite().all()


def check_selective_checkpointing(world):
    """What is kept is not computed again; gradients are the same."""
    from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

    from warploom.distributed import context_parallel_attention, shard_sequence

    mesh = mesh_of(world)
    q, k, v = (shard_sequence(x, mesh).requires_grad_() for x in draw(*[(1, 16, 2, 4)] * 3))
    calls = []

    def policy(context, op, *arguments, **options):
        kept = op is torch.ops.warploom.context_parallel_attention_launch.default
        calls.append((kept, context.is_recompute))
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    def layer(q, k, v):
        return context_parallel_attention(q * 2, k, v, mesh, causal=True).sin()

    expected = torch.autograd.grad(layer(q, k, v).sum(), (q, k, v))
    contexts = lambda: create_selective_checkpoint_contexts(policy)  # noqa: E731
    out = checkpoint(layer, q, k, v, use_reentrant=False, context_fn=contexts)
    assert all(map(torch.equal, torch.autograd.grad(out.sum(), (q, k, v)), expected))
    assert (True, False) in calls


def check_compiled_context_parallel(world):
    if world != 2:
        return
    from warploom.distributed import context_parallel_attention, shard_sequence

    mesh = mesh_of(world)
    q, k, v = (shard_sequence(x, mesh).requires_grad_() for x in draw(*[(1, 16, 2, 4)] * 3))

    def layer(q, k, v):
        return context_parallel_attention(q.sin(), k, v, mesh, causal=True).cos()

    found, expected = torch.compile(layer, backend="aot_eager", fullgraph=True)(q, k, v), layer(q, k, v)
    torch.testing.assert_close(found, expected)
    gradients = [torch.autograd.grad(x.sum(), (q, k, v)) for x in (found, expected)]
    for mine, whole in zip(*gradients):
        torch.testing.assert_close(mine, whole)


def check_models_that_cannot_be_sharded(world):
    from warploom.distributed import shard_context, shard_matrices

    mesh = mesh_of(world)
    for call, error, text in (
        (lambda: shard_matrices(model_of(kv_heads=1), mesh), warploom.ArgumentError, "kv_heads divisible"),
        (lambda: shard_matrices(model_of(d_ff=32), mesh), warploom.ArgumentError, "d_ff divisible"),
        (lambda: shard_matrices(torch.nn.Linear(1, 1), mesh), warploom.DtypeError, "a TransformerLM"),
        (lambda: shard_context(torch.nn.Linear(1, 1), mesh), warploom.ArgumentError, "layers Attention"),
        (lambda: shard_context(model_of(attention="sdpa"), mesh), warploom.ArgumentError, "attention 'flash'"),
        (
            lambda: shard_context(model_of(attention="linear", kv_heads=None), mesh),
            warploom.ArgumentError,
            "'contiguous' for linear attention",
        ),
        (
            lambda: shard_context(model_of(attention=("flash", "delta"), kv_heads=None), mesh),
            warploom.ArgumentError,
            "'contiguous' for delta rule attention",
        ),
    ):
        with pytest.raises(error, match=text):
            call()


# Documentation


def check_examples_of_docstrings(world):
    from warploom import distributed

    for name in distributed.__all__:
        examples = re.findall(r"```python\n(.*?)```", inspect.getdoc(getattr(distributed, name)), re.DOTALL)
        assert examples, name
        for example in examples:
            exec(compile(textwrap.dedent(example), name, "exec"), {})


# Training


WORDS = "--device cpu --steps 6 --warm-up 2 --batch 2 --log-every 1 --eval-every 3 --eval-batches 1 --save-every 2"


def check_training(world):
    """Four ranks begin, and two go on from their checkpoint."""
    folder = distributed_ranks.SHARED
    sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
    import train_lm

    os.environ["WORLD_SIZE"] = str(world)
    words = [*WORDS.split(), "--text", str(folder / "text.py"), "--output", str(folder / "ranks"), "--cp", "2"]
    try:
        train_lm.main([*words, *(["--tp", "2", "--stop", "4"] if world == 4 else [])])
        if world == 2:
            with pytest.raises(SystemExit, match="2 ranks are no multiple of --cp 2 times --tp 2"):
                train_lm.main([*words, "--tp", "2"])
    finally:
        del os.environ["WORLD_SIZE"]
        torch.set_float32_matmul_precision("highest")
