"""What ranks check of context parallelism, each on its own part: run by tests/test_context_parallel.py."""

import functools

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from warploom import delta_attention, flash_attention, linear_attention, short_convolution
from warploom.distributed import (
    context_parallel_attention,
    context_parallel_delta_attention,
    context_parallel_linear_attention,
    context_parallel_short_convolution,
    local_position_ids,
    shard_sequence,
    unshard_sequence,
)

LENGTHS = (0, 1, 5, 16, 37, 64)


def mesh_of(world):
    return init_device_mesh("cpu", (world,), mesh_dim_names=("cp",))


def draw(*shapes, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float32).to(dtype) for shape in shapes]


def cu(*lengths):
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)


PACKED = (cu(64), cu(7, 0, 30, 1, 20), cu(*range(1, 11)))


# Layout


def check_parts_make_up_the_whole(world):
    mesh = mesh_of(world)
    for layout in ("zigzag", "contiguous"):
        for length in LENGTHS:
            x = torch.arange(2 * length * 3).view(2, length, 3)
            part = shard_sequence(x, mesh, layout=layout)
            assert torch.equal(unshard_sequence(part, mesh, layout=layout), x)
            places = local_position_ids(length, mesh, layout=layout)
            assert torch.equal(x[:, places], part)
        for bounds in PACKED:
            x = torch.arange(int(bounds[-1]))
            part = shard_sequence(x, mesh, dim=0, layout=layout, cu_seqlens=bounds)
            assert torch.equal(unshard_sequence(part, mesh, dim=-1, layout=layout, cu_seqlens=bounds), x)
            places = local_position_ids(len(x), mesh, layout=layout, cu_seqlens=bounds)
            sequence = torch.searchsorted(bounds[1:], part, right=True)
            assert torch.equal(part - bounds[sequence], places)


def check_what_is_remembered_fits_any_call(world):
    """Made under another default device, or in inference mode, it is of use to a gradient later."""
    mesh, bounds = mesh_of(world), cu(9, 23 * world)  # of no other check
    n = int(bounds[-1])

    def calls():
        whole = torch.ones(1, n, 1, 1, device="cpu", requires_grad=True)
        for layout in ("zigzag", "contiguous"):
            options = {"layout": layout, "cu_seqlens": bounds}
            x = shard_sequence(whole, mesh, **options) + local_position_ids(n, mesh, **options).view(1, -1, 1, 1)
            x = context_parallel_attention(x, x, x, mesh, **options)
            if layout == "contiguous":
                x = context_parallel_linear_attention(x, x, x, mesh, cu_seqlens=bounds)
            yield unshard_sequence(x, mesh, **options)

    try:
        torch.set_default_device("meta")
        with torch.inference_mode():
            for _ in calls():
                pass
    finally:
        torch.set_default_device(None)
    for out in calls():
        out.sum().backward()


def check_zigzag_shares_work_alike(world):
    mesh = mesh_of(world)
    for bounds in (cu(4096), cu(512, 1024, 96, 2000), cu(*(100 + 7 * i for i in range(30)))):
        places = local_position_ids(int(bounds[-1]), mesh, cu_seqlens=bounds)
        work = torch.tensor([float((places + 1).sum()), float(len(places))])
        every = [torch.empty_like(work) for _ in range(world)]
        dist.all_gather(every, work)
        every = torch.stack(every)
        assert (every.amax(0) / every.mean(0) < 1.02).all(), every


def check_gradients_of_layouts(world):
    mesh = mesh_of(world)
    (x,) = draw((2, 13, 3))
    x.requires_grad_()
    part = shard_sequence(x, mesh)
    (part * part).sum().backward()
    places = local_position_ids(13, mesh)
    expected = torch.zeros_like(x)
    expected[:, places] = 2 * x.detach()[:, places]
    assert torch.equal(x.grad, expected)
    part = part.detach().requires_grad_()
    whole = unshard_sequence(part, mesh)
    (whole**3).sum().backward()
    torch.testing.assert_close(part.grad, 3 * part.detach() ** 2)


def check_bounds_that_change_are_read_again(world):
    mesh, bounds = mesh_of(world), cu(3, 13)
    x = torch.arange(16)
    assert torch.equal(
        shard_sequence(x, mesh, dim=0, cu_seqlens=bounds), shard_sequence(x, mesh, dim=0, cu_seqlens=cu(3, 13))
    )
    bounds[1] = 8
    assert torch.equal(
        shard_sequence(x, mesh, dim=0, cu_seqlens=bounds), shard_sequence(x, mesh, dim=0, cu_seqlens=cu(8, 8))
    )
    with torch.inference_mode():
        part = shard_sequence(x, mesh, dim=0, cu_seqlens=cu(8, 8))
        assert torch.equal(part, shard_sequence(x, mesh, dim=0, cu_seqlens=bounds))


# Attention


CASES = [
    {"causal": True},
    {"causal": True, "layout": "contiguous"},
    {},
    {"layout": "contiguous"},
    {"causal": True, "window": (5, None)},
    {"window": (3, 4)},
    {"window": (3, 4), "layout": "contiguous"},
    {"window": (None, 2), "softcap": 2.0},
    {"window": (6, None)},
    {"causal": True, "softcap": 3.0, "sink": True, "scale": 0.3},
    {"causal": True, "window": (140, 0), "length": 300},
    {"causal": True, "length": 5},
    {"length": 5},
    {"causal": True, "length": 0},
]


def attention_case(
    world, length=37, layout="zigzag", sink=False, bounds=None, tail=0, dtype=torch.float64, **options
):
    """Outputs and gradients of all ranks, against those of one; a ``tail`` behind packed sequences is NaN."""
    mesh = mesh_of(world)
    batch, length = (2, length) if bounds is None else (1, int(bounds[-1]) + tail)
    shapes = ((batch, length, 4, 6), (batch, length, 2, 6), (batch, length, 2, 5))
    q, k, v, grad = draw(*shapes, (batch, length, 4, 5), dtype=dtype)
    (grad_lse,) = draw((batch, 4, length), dtype=dtype, seed=1)
    for x, dim in ((q, 1), (k, 1), (v, 1), (grad, 1), (grad_lse, 2)):
        x.narrow(dim, length - tail, tail).fill_(torch.nan)
    logit = draw((4,), dtype=dtype)[0] if sink else None
    wholes = [x.clone().requires_grad_() for x in (q, k, v, logit) if x is not None]
    given = {"sink": wholes[3]} if sink else {}
    packed = {} if bounds is None else {"cu_seqlens_q": bounds}
    expected = flash_attention(*wholes[:3], **given, **packed, **options, return_lse=True, backend="torch")
    torch.autograd.backward(expected, (grad, grad_lse))

    def part(x, dim=1):
        return shard_sequence(x, mesh, layout=layout, cu_seqlens=bounds, dim=dim)

    parts = [part(x).requires_grad_() for x in (q, k, v)] + ([logit.clone().requires_grad_()] if sink else [])
    given = {"sink": parts[3]} if sink else {}
    found = context_parallel_attention(
        *parts[:3], mesh, layout=layout, cu_seqlens=bounds, **given, **options, return_lse=True
    )
    torch.autograd.backward(found, (part(grad), part(grad_lse, 2)))
    close = {"rtol": 1e-9, "atol": 1e-9}
    torch.testing.assert_close(found[0], part(expected[0].detach()), **close)
    torch.testing.assert_close(found[1], part(expected[1].detach(), 2), **close)
    for mine, whole in zip(parts[:3], wholes):
        torch.testing.assert_close(mine.grad, part(whole.grad), **close)
    if sink:
        total = parts[3].grad.clone()
        dist.all_reduce(total)
        torch.testing.assert_close(total, wholes[3].grad, **close)


def check_attention(world):
    for case in CASES:
        try:
            attention_case(world, **case)
        except AssertionError as error:
            raise AssertionError(f"{case}: {error}") from error


def check_packed_attention(world):
    for bounds in PACKED:
        for case in CASES[:10]:
            try:
                attention_case(world, bounds=bounds, **case)
            except AssertionError as error:
                raise AssertionError(f"{bounds} {case}: {error}") from error
    for layout in ("zigzag", "contiguous"):
        attention_case(world, layout=layout, bounds=cu(7, 0, 30), tail=11, causal=True, sink=True)


def check_bits_are_those_of_one_rank(world):
    """On the kernels, in Triton's interpreter; a tile of one call is a tile of the other."""
    mesh = mesh_of(world)
    for options in ({"causal": True}, {"causal": True, "window": (9, 0)}) if world == 2 else ():
        q, k, v, grad = draw(
            *[(1, 80, 2, 16)] * 4
        )  # chunks of more than 16 tokens: fewer have a kernel of their own
        wholes = [x.requires_grad_() for x in (q, k, v)]
        expected = flash_attention(*wholes, **options, backend="triton")
        expected.backward(grad)
        parts = [shard_sequence(x.detach(), mesh).requires_grad_() for x in (q, k, v)]
        found = context_parallel_attention(*parts, mesh, **options, backend="triton")
        found.backward(shard_sequence(grad, mesh))
        assert torch.equal(found, shard_sequence(expected.detach(), mesh))
        assert torch.equal(parts[0].grad, shard_sequence(q.grad, mesh))
        for mine, whole in zip(parts[1:], (k, v)):
            torch.testing.assert_close(mine.grad, shard_sequence(whole.grad, mesh))


def check_sums_on_the_kernel_are_those_of_torch(world):
    from warploom.distributed.attention import exchange
    from warploom.distributed.attention.plan import make_plan

    mesh_of(world)
    rank = dist.get_rank()
    bounds = tuple(PACKED[1].tolist())
    plan = make_plan(bounds, world, rank, "zigzag", None, 0, torch.device("cpu"))
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        (received,) = draw((plan.grad_rows, 2, 3, 5), dtype=dtype)
        sums = [received.new_empty((len(plan.ends) - 1, 2, 3, 5)) for _ in range(2)]
        for total, kernels in zip(sums, (True, False)):
            exchange.sum_gradients(plan, received, total, kernels)
        assert torch.equal(*sums)
        assert sums[0].abs().sum() > 0


# Linear attention


LINEAR = [
    {},
    {"decay": "head", "encoding": "rotate"},
    {"decay": "token", "encoding": "cosine", "activation": "silu", "offset": 3},
    {"decay": "head", "initial": True, "return_state": True, "offset": torch.tensor(5), "encoding": "rotate"},
    {"decay": "token", "initial": True, "return_state": True},
    {"causal": False, "encoding": "rotate", "interleaved": True},
    {"length": 3, "decay": "token", "return_state": True},
    {"length": 0, "initial": True, "return_state": True},
    {"decay": "token", "strong": True, "initial": True, "return_state": True},
    {"decay": "head", "strong": True, "return_state": True},
]


def linear_case(
    world, length=37, decay=None, strong=False, initial=False, bounds=None, backend="torch", wanted=None, **options
):
    """Outputs, states and gradients of all ranks, against those of one.

    ``wanted``: which, all if None; ``strong``: some decays forget everything.
    """
    dtype = torch.float32 if backend == "triton" else torch.float64
    batch, length = (2, length) if bounds is None else (1, int(bounds[-1]))
    sequences = batch if bounds is None else len(bounds) - 1
    encoding = options.get("encoding", "none")
    tokens, values = (batch, length, 2, 6), (batch, length, 2, 5)
    q, k, v, grad = draw(tokens, tokens, values, values, dtype=dtype)
    state, grad_state = draw(*[(sequences, 2, 12 if encoding == "cosine" else 6, 5)] * 2, dtype=dtype, seed=1)
    named = {"q": q, "k": k, "v": v}
    if encoding != "none":
        named["theta"] = draw((2, 3), dtype=dtype, seed=2)[0]
    if decay is not None:
        shape = (2,) if decay == "head" else (batch, length, 2)
        named["decay"] = -draw(shape, dtype=dtype, seed=3)[0].abs() / 4
        if strong:
            forgets = named["decay"][0] if decay == "head" else named["decay"][:, 3::7, 0]
            forgets.fill_(-3e38)
    if initial:
        named["initial_state"] = state
    rest = {**options, "cu_seqlens": bounds, "backend": backend}
    functions = (linear_attention, context_parallel_linear_attention)
    compare_with_one_rank(world, functions, named, (grad, grad_state), rest, wanted)


def compare_with_one_rank(world, functions, named, grads, options, wanted=None):
    """Outputs, states and gradients of all ranks, against those of one.

    ``functions``: on one rank and on all; ``named``: their tensors, those of every call first.
    """
    mesh, (grad, grad_state) = mesh_of(world), grads
    bounds = options["cu_seqlens"]
    shared = {name for name, x in named.items() if name in ("theta", "initial_state") or x.dim() == 1}

    def part(x):
        return shard_sequence(x.detach(), mesh, layout="contiguous", cu_seqlens=bounds)

    def run(function, *mesh, **tensors):
        leaves = {name: x.clone().requires_grad_(wanted is None or name in wanted) for name, x in tensors.items()}
        first = [leaves.pop(name) for name in ("q", "k", "v", "beta") if name in leaves]
        found = function(*first, *mesh, **leaves, **options)
        return dict(zip(named, (*first, *leaves.values()))), found if isinstance(found, tuple) else (found,)

    wholes, expected = run(functions[0], **named)
    torch.autograd.backward(expected, (grad, grad_state)[: len(expected)])
    own = {name: x if name in shared else part(x) for name, x in named.items()}
    parts, found = run(functions[1], mesh, **own)
    # The gradient of the state comes in parts.
    torch.autograd.backward(found, (part(grad), grad_state / world)[: len(expected)])
    close = {"rtol": 1e-9, "atol": 1e-9} if grad.dtype == torch.float64 else {"rtol": 1e-4, "atol": 1e-4}
    torch.testing.assert_close(found[0], part(expected[0]), **close)
    for mine, whole in zip(found[1:], expected[1:]):
        torch.testing.assert_close(mine, whole, **close)
    for name, leaf in parts.items():
        gradient, whole = leaf.grad, wholes[name].grad
        if not leaf.requires_grad:
            continue
        if name in shared:
            dist.all_reduce(gradient)
        else:
            whole = part(whole)
        torch.testing.assert_close(gradient, whole, **close, msg=lambda text, name=name: f"{name}: {text}")


def check_linear_attention(world):
    for case in LINEAR:
        try:
            linear_case(world, **case)
        except AssertionError as error:
            raise AssertionError(f"{case}: {error}") from error


def check_packed_linear_attention(world):
    for bounds in (*PACKED, cu(1, 60, 0, 3)):
        for case in LINEAR[1:6]:
            try:
                linear_case(world, bounds=bounds, **case)
            except AssertionError as error:
                raise AssertionError(f"{bounds} {case}: {error}") from error


def check_gradients_that_are_not_wanted_are_not_computed(world):
    """Those of decays take states of many chunks."""
    from warploom.distributed.linear_attention import calls

    usual, names, asked = calls.differentiate, ("q", "k", "v", "theta", "decay", "initial_state"), set()

    def recording(*arguments):
        asked.update(name for name, wants in zip(names, arguments[-1]) if wants)
        return usual(*arguments)

    calls.differentiate = recording
    try:
        for wanted in (("q", "k", "v"), ("k",), ("decay", "q")):
            for case in ({"decay": "head"}, {"decay": "token", "initial": True}):
                asked.clear()
                linear_case(world, encoding="rotate", wanted=wanted, **case)
                assert asked - {"initial_state"} == set(wanted)  # gradients of states are what travels
        asked.clear()
        linear_case(world, encoding="rotate", causal=False, wanted=("q", "v"))
        assert asked - {"initial_state"} == {"q", "v"}
    finally:
        calls.differentiate = usual


# Delta rule attention


DELTA = [
    {},
    {"decay": "head", "encoding": "rotate", "normalize": True},
    {"decay": "feature", "key_heads": 1, "offset": 3, "encoding": "rotate", "interleaved": True, "scale": 0.3},
    {"decay": "head", "initial": True, "return_state": True, "offset": torch.tensor(5), "encoding": "rotate"},
    {"decay": "feature", "initial": True, "return_state": True},
    {"length": 3, "decay": "head", "return_state": True},
    {"length": 0, "initial": True, "return_state": True},
    {"length": 141, "decay": "feature", "strong": True, "initial": True, "return_state": True},
    {"length": 141, "decay": "head", "strong": True, "return_state": True},
]


def delta_case(
    world, length=37, decay=None, strong=False, initial=False, key_heads=2, bounds=None, backend="torch",
    wanted=None, features=(6, 5), **options,
):  # fmt: skip
    """See `linear_case`."""
    dtype = torch.float32 if backend == "triton" else torch.float64
    batch, length = (2, length) if bounds is None else (1, int(bounds[-1]))
    sequences, (d, e) = batch if bounds is None else len(bounds) - 1, features
    keys, values = (batch, length, key_heads, d), (batch, length, 2, e)
    q, k, v, grad = draw(keys, keys, values, values, dtype=dtype)
    k = k if options.get("normalize") else torch.nn.functional.normalize(k, dim=-1)
    state, grad_state = draw(*[(sequences, 2, d, e)] * 2, dtype=dtype, seed=1)
    named = {"q": q, "k": k, "v": v, "beta": draw((batch, length, 2), dtype=dtype, seed=4)[0].sigmoid()}
    if decay is not None:
        shape = (batch, length, 2) if decay == "head" else (batch, length, 2, d)
        named["decay"] = -draw(shape, dtype=dtype, seed=3)[0].abs() / 4
        if strong:
            named["decay"][:, 3::7, 0] = -3e38
    if options.get("encoding") == "rotate":
        named["theta"] = draw((key_heads, d // 2), dtype=dtype, seed=2)[0]
    if initial:
        named["initial_state"] = state
    rest = {**options, "cu_seqlens": bounds, "backend": backend}
    functions = (delta_attention, context_parallel_delta_attention)
    compare_with_one_rank(world, functions, named, (grad, grad_state), rest, wanted)


def check_delta_attention(world):
    for case in DELTA:
        try:
            delta_case(world, **case)
        except AssertionError as error:
            raise AssertionError(f"{case}: {error}") from error


def check_packed_delta_attention(world):
    for bounds in (*PACKED, cu(1, 60, 0, 3)):
        for case in DELTA[1:5]:
            try:
                delta_case(world, bounds=bounds, **case)
            except AssertionError as error:
                raise AssertionError(f"{bounds} {case}: {error}") from error


def check_delta_attention_gives_the_same_bits_again(world):
    mesh = mesh_of(world)
    q, k, v, beta = draw(*[(1, 50, 2, 8)] * 3, (1, 50, 2))
    parts = [shard_sequence(x, mesh, layout="contiguous") for x in (q, k, v, beta.sigmoid())]
    results = []
    for _ in range(2):
        leaves = [x.clone().requires_grad_() for x in parts]
        out, state = context_parallel_delta_attention(*leaves, mesh, normalize=True, return_state=True)
        (out.square().sum() + state.square().sum()).backward()
        results.append((out, state, *(x.grad for x in leaves)))
    assert all(torch.equal(a, b) for a, b in zip(*results))


def check_a_sequence_does_not_reach_another_rank_s(world):
    """NaN in one of the packed sequences stays there, in every function with a state."""
    mesh, bounds = mesh_of(world), cu(11, 20, 30, 19)
    q, k, v, beta = draw(*[(1, 80, 2, 8)] * 3, (1, 80, 2))
    v[:, 12:14] = torch.nan
    part = functools.partial(shard_sequence, mesh=mesh, layout="contiguous", cu_seqlens=bounds)
    q, k, v, beta = (part(x).requires_grad_() for x in (q, k / 3, v, beta.sigmoid()))
    there = part(torch.arange(80)[None])[0]
    clean = (there < 11) | (there >= 31)
    for out in (
        context_parallel_delta_attention(q, k, v, beta, mesh, cu_seqlens=bounds),
        context_parallel_linear_attention(q, k, v, mesh, cu_seqlens=bounds, decay=-torch.ones(2)),
    ):
        out.sum().backward()
        assert out[:, clean].isfinite().all()
        for x in (q, k, v):
            assert x.grad[:, clean].isfinite().all()
            x.grad = None


def check_delta_attention_on_the_kernels(world):
    """With four ranks also maps of their parts: by one call, and by two where features are too many for one."""
    from warploom.distributed.delta_attention import maps

    cases = [
        {"length": 41, "decay": "head", "encoding": "rotate", "initial": True, "return_state": True},
        {"bounds": cu(4, 36), "decay": "feature", "normalize": True, "initial": True, "return_state": True},
    ]
    usual = maps.MAX_FEATURES
    for case, most in zip(cases, (usual, 10)):
        maps.MAX_FEATURES = most
        try:
            delta_case(world, backend="triton", **case)
        except AssertionError as error:
            raise AssertionError(f"{case}: {error}") from error
        finally:
            maps.MAX_FEATURES = usual


# The short convolution, and layers that have one


def convolution_case(world, length=37, bounds=None, taps=4, bias=True, backend="torch", strided=False, **options):
    """Outputs and gradients of all ranks, against those of one."""
    mesh, dtype = mesh_of(world), torch.float32 if backend == "triton" else torch.float64
    batch, length = (2, length) if bounds is None else (1, int(bounds[-1]))
    x, grad, weight, shift = draw((batch, length, 6), (batch, length, 6), (6, taps), (6,), dtype=dtype)
    x = x.mT.contiguous().mT if strided else x
    rest = {**options, "cu_seqlens": bounds, "backend": backend}

    def part(x):
        return shard_sequence(x, mesh, layout="contiguous", cu_seqlens=bounds)

    def run(function, x, *mesh):
        leaves = [x.clone().requires_grad_() for x in ((x, weight, shift) if bias else (x, weight))]
        return leaves, function(*leaves[:2], *mesh, bias=leaves[2] if bias else None, **rest)

    wholes, expected = run(short_convolution, x)
    expected.backward(grad)
    parts, found = run(context_parallel_short_convolution, part(x), mesh)
    found.backward(part(grad))
    close = {"rtol": 1e-9, "atol": 1e-9} if dtype == torch.float64 else {"rtol": 1e-4, "atol": 1e-4}
    torch.testing.assert_close(found, part(expected.detach()), **close)
    torch.testing.assert_close(parts[0].grad, part(wholes[0].grad), **close)
    for mine, whole in zip(parts[1:], wholes[1:]):
        dist.all_reduce(mine.grad)
        torch.testing.assert_close(mine.grad, whole.grad, **close)


def check_short_convolution(world):
    """Of parts longer and shorter than its taps, down to none."""
    for length in (*LENGTHS, 9, 11):
        for options in ({"activation": "silu"}, {"taps": 2, "bias": False}, {"taps": 9, "strided": True}):
            try:
                convolution_case(world, length, **options)
            except AssertionError as error:
                raise AssertionError(f"{length} {options}: {error}") from error
    for bounds in (*PACKED, cu(1, 60, 0, 3), cu(3, 2, 4)):
        for options in ({"activation": "silu"}, {"taps": 7, "strided": True}):
            try:
                convolution_case(world, bounds=bounds, **options)
            except AssertionError as error:
                raise AssertionError(f"{bounds} {options}: {error}") from error
    for options in ({"length": 21}, {"bounds": cu(4, 20)}) if world == 2 else ():
        convolution_case(world, backend="triton", activation="silu", **options)


def check_layers_of_delta_attention(world):
    """Packed sequences too, compiled, and under autocast."""
    from warploom.distributed import shard_context
    from warploom.nn import DeltaAttention

    mesh, bounds = mesh_of(world), cu(5, 19, 0, 8)
    for decay, options in (("head", {"position": "rotate"}), ("feature", {"key_heads": 1}), ("none", {})):
        alone, shared = (DeltaAttention(12, 2, decay=decay, **options).double() for _ in range(2))
        shared.load_state_dict(alone.state_dict())
        shard_context(shared, mesh, layout="contiguous")
        for packed in ({}, {"cu_seqlens": bounds}):
            x, grad = draw(*[(1, 32, 12)] * 2, dtype=torch.float64)
            part = functools.partial(
                shard_sequence, mesh=mesh, layout="contiguous", cu_seqlens=packed.get("cu_seqlens")
            )
            whole, own = x.clone().requires_grad_(), part(x).requires_grad_()
            for layer in (alone, shared):
                layer.zero_grad()
            expected, found = alone(whole, **packed), shared(own, **packed)
            expected.backward(grad), found.backward(part(grad))
            torch.testing.assert_close(found, part(expected.detach()))
            torch.testing.assert_close(own.grad, part(whole.grad))
            for mine, other in zip(shared.parameters(), alone.parameters()):
                dist.all_reduce(mine.grad)
                torch.testing.assert_close(mine.grad, other.grad)
            compiled = torch.compile(shared, backend="aot_eager", fullgraph=True)
            again = part(x).requires_grad_()
            out = compiled(again, **packed)
            out.backward(part(grad))
            torch.testing.assert_close(out, found)
            torch.testing.assert_close(again.grad, own.grad)
            torch._dynamo.reset()
        with torch.autocast("cpu", torch.bfloat16):
            expected, found = alone.float()(x.float()), shared.float()(part(x.float()).detach())
        torch.testing.assert_close(found, part(expected.detach()), rtol=0.05, atol=0.05)


def check_linear_attention_on_the_kernels(world):
    if world != 2:
        return
    cases = [
        {"decay": "token", "encoding": "rotate", "return_state": True, "strong": True},
        {"decay": "head", "encoding": "cosine", "initial": True, "return_state": True},
        {"initial": True, "wanted": ("k", "v")},
        {"decay": "head", "encoding": "rotate", "offset": 7, "wanted": ("q", "theta", "decay")},
        {"bounds": cu(20), "decay": "token", "initial": True, "return_state": True},
        {"bounds": cu(4, 16), "decay": "head", "encoding": "rotate", "initial": True, "return_state": True},
    ]
    for case in cases:
        try:
            linear_case(world, length=21, backend="triton", **case)
        except AssertionError as error:
            raise AssertionError(f"{case}: {error}") from error
