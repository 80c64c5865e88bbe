"""Delta rule attention: its definition, states, chunks, decoding, and what its kernels compute."""

from typing import Any

import pytest
import seeds
import torch

from warploom import delta_attention
from warploom.ops import operators
from warploom.ops.delta_attention import reference
from warploom.runtime.backend import HAS_TRITON
from warploom.testing.accuracy import compare
from warploom.testing.conformance import as_tuple, check_case, compute_gradients, draw_like, upcast

Tensor = torch.Tensor
BACKENDS = ("torch", "triton") if HAS_TRITON else ("torch",)
backends = pytest.mark.parametrize("backend", BACKENDS)
needs_triton = pytest.mark.skipif(not HAS_TRITON, reason="needs Triton")
decays = pytest.mark.parametrize("decay", [None, "head", "feature"])


def tensors(
    device: torch.device,
    batch: int = 2,
    tokens: int = 37,
    heads: int = 4,
    key_heads: int = 2,
    head_dim: int = 8,
    values: int = 5,
    decay: str | None = "head",
    strength: float = 0.3,
    dtype: torch.dtype = torch.float32,
    encoding: str = "rotate",
) -> dict[str, Any]:
    """Arguments of a call, drawn anew for every test; decays of all strengths up to the given one."""
    drawn: dict[str, Any] = {
        name: torch.randn(batch, tokens, key_heads, head_dim).to(device, dtype) for name in ("q", "k")
    }
    drawn["v"] = torch.randn(batch, tokens, heads, values).to(device, dtype)
    drawn["beta"] = torch.rand(batch, tokens, heads).to(device)
    if decay is not None:
        shape = (batch, tokens, heads, head_dim)[: 3 if decay == "head" else 4]
        drawn["decay"] = -strength * (torch.rand(shape) ** 8).to(device)
    if encoding == "rotate":
        drawn |= {"encoding": "rotate", "theta": torch.rand(key_heads, head_dim // 2).to(device)}
    return drawn | {"normalize": True}


def leaves(call: dict[str, Any]) -> dict[str, Any]:
    """The call with floating tensors that require gradients."""
    return {
        name: x.detach().clone().requires_grad_() if isinstance(x, Tensor) and x.is_floating_point() else x
        for name, x in call.items()
    }


def in_float64(call: dict[str, Any]) -> dict[str, Any]:
    return {name: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for name, x in call.items()}


def by_recurrence(call: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Outputs and the last state, token after token."""
    v, decay = call["v"], call.get("decay")
    place = {"theta": call.get("theta"), "encoding": call.get("encoding", "none"), "normalize": call["normalize"]}
    place |= {"interleaved": call.get("interleaved", False), "offset": call.get("offset", 0)}
    q, k = (
        reference.features(call[name], **place).repeat_interleave(v.shape[2] // call[name].shape[2], 2)
        for name in ("q", "k")
    )
    g = torch.zeros_like(call["beta"])[..., None] if decay is None else decay
    g = g[..., None] if g.dim() == 3 else g
    state = call.get("initial_state")
    if state is None:
        state = v.new_zeros((v.shape[0], v.shape[2], q.shape[3], v.shape[3]))
    rows = (x.transpose(1, 2) for x in (q, k, v, call["beta"][..., None], g))
    out, state = reference.recurrence(*rows, state)
    return out.transpose(1, 2) * call["scale"], state


@pytest.mark.parametrize("strength", [0.3, 1e3, 1e30])
@decays
@pytest.mark.parametrize("tokens", [1, 19, 64, 150])
def test_chunks_are_the_recurrence(tokens: int, decay: str | None, strength: float) -> None:
    """Values, states, and gradients of all inputs."""
    call = tensors(torch.device("cpu"), tokens=tokens, decay=decay, strength=strength)
    call |= {"initial_state": torch.randn(2, 4, 8, 5), "offset": 5, "scale": 0.3}
    call = leaves(in_float64(call))
    wanted = [x for x in call.values() if isinstance(x, Tensor)]
    found, expected = reference.delta_attention(**call, return_state=True), by_recurrence(call)
    grads = [torch.randn_like(x) for x in expected]
    found += torch.autograd.grad(found, wanted, grads)
    expected += torch.autograd.grad(expected, wanted, grads)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


def of_tokens(call: dict[str, Any], first: int, last: int) -> dict[str, Any]:
    """The same call on some of its tokens."""
    cut = {name: call[name][:, first:last] for name in ("q", "k", "v", "beta", "decay") if name in call}
    return {**call, **cut, "offset": call.get("offset", 0) + first}


def of_entries(call: dict[str, Any], first: int, last: int) -> dict[str, Any]:
    """The same call on some entries of the batch."""
    names = ("q", "k", "v", "beta", "decay", "initial_state")
    return {**call, **{name: call[name][first:last] for name in names if name in call}}


def results_of(call: dict[str, Any], backend: str) -> tuple[Tensor, ...]:
    """Outputs, states and gradients."""
    given = leaves(call)
    outs = delta_attention(**given, return_state=True, backend=backend)
    return *(x.detach() for x in outs), *compute_gradients(outs, given, draw_like(outs)).values()


def assert_near(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def assert_right(call: dict[str, Any], backend: str = "triton", reference_of: Any = None) -> None:
    """Each result and gradient against float64, by the accuracy promise."""
    exact, eager = (results_of(given, "torch") for given in (upcast(call), call))
    for number, found in enumerate(zip(results_of(call, backend), exact, eager, strict=True)):
        verdict = compare(*found)
        assert verdict.ok, f"{number}: {verdict.describe()}"


# ----------------------------------------------------------------------------------------------------------
# States, chunks, decoding
# ----------------------------------------------------------------------------------------------------------


@backends
@decays
def test_two_halves_are_the_whole(decay: str | None, backend: str, device: torch.device) -> None:
    call = tensors(device, tokens=75, decay=decay) | {"return_state": True, "backend": backend}
    whole, last = delta_attention(**call)
    first, state = delta_attention(**of_tokens(call, 0, 41))
    second, end = delta_attention(**of_tokens(call, 41, 75), initial_state=state)
    assert_near(torch.cat((first, second), dim=1), whole)
    assert_near(end, last)


@backends
@decays
@pytest.mark.parametrize("interleaved", [False, True])
def test_steps_of_a_token_are_prefill(
    interleaved: bool, decay: str | None, backend: str, device: torch.device
) -> None:
    call = tensors(device, tokens=9, decay=decay) | {"return_state": True, "backend": backend, "offset": 1000}
    call["interleaved"] = interleaved
    whole, last = delta_attention(**call)
    state, steps = None, []
    for n in range(9):
        out, state = delta_attention(**of_tokens(call, n, n + 1), initial_state=state)
        steps.append(out)
    assert_near(torch.cat(steps, dim=1), whole)
    assert_near(state, last)


@needs_triton
@pytest.mark.parametrize("tokens", [1, 40])
def test_a_state_of_any_strides(tokens: int, device: torch.device) -> None:
    call = tensors(device, tokens=tokens, values=8) | {"return_state": True, "backend": "triton"}
    drawn = torch.randn(2, 4, 8, 8, device=device)
    for state in (drawn, drawn.transpose(2, 3), drawn[..., :1].expand(2, 4, 8, 8), drawn.double()):
        expected = delta_attention(**call, initial_state=state.contiguous().float())
        for found, each in zip(delta_attention(**call, initial_state=state), expected, strict=True):
            assert_near(found, each)


@needs_triton
@decays
@pytest.mark.parametrize("of_state", [False, True])
def test_the_gradient_of_a_state_alone(of_state: bool, decay: str | None, device: torch.device) -> None:
    """Which takes fewer launches than all gradients."""
    call = tensors(device, tokens=40, decay=decay) | {"initial_state": torch.randn(2, 4, 8, 5, device=device)}
    found = []
    for names in (list(call), ["initial_state"]):
        given = {name: x.requires_grad_(name in names) if isinstance(x, Tensor) else x for name, x in call.items()}
        out, last = delta_attention(**given, return_state=True, backend="triton")
        result = out.square().sum() + (last.square().sum() if of_state else 0)
        found.append(torch.autograd.grad(result, given["initial_state"])[0])
    assert_near(*found)


@backends
@decays
@pytest.mark.seldom(3, 6)
def test_packed_sequences_are_each_alone(decay: str | None, backend: str, device: torch.device) -> None:
    """With rows of NaN behind the last, which are zero in all results, and have no gradient."""
    bounds = [0, 33, 33, 34, 70, 97]
    call = tensors(device, batch=1, tokens=120, decay=decay)
    for name in ("q", "k", "v", "beta", "decay"):
        if name in call:
            call[name][:, bounds[-1] :] = torch.nan
    states = torch.randn(len(bounds) - 1, 4, 8, 5, device=device)
    packed = call | {"initial_state": states, "cu_seqlens": torch.tensor(bounds, device=device, dtype=torch.int32)}
    given = leaves(packed)
    out, last = delta_attention(**given, return_state=True, backend=backend)
    grads = draw_like((out, last))
    found = compute_gradients((out, last), given, grads)
    assert not out[:, bounds[-1] :].any()
    summed = torch.zeros_like(call["theta"])
    for s in range(len(bounds) - 1):
        first, end = bounds[s], bounds[s + 1]
        one = leaves({**of_tokens(call, first, end), "offset": 0, "initial_state": states[s : s + 1]})
        outs = delta_attention(**one, return_state=True, backend=backend)
        assert_near(out[:, first:end], outs[0])
        assert_near(last[s : s + 1], outs[1])
        alone = compute_gradients(outs, one, (grads[0][:, first:end], grads[1][s : s + 1]))
        for name in ("q", "k", "v", "beta", "decay"):
            if name in call:
                assert_near(found[name][:, first:end], alone[name])
        assert_near(found["initial_state"][s : s + 1], alone["initial_state"])
        summed += alone["theta"]
    assert_near(found["theta"], summed)
    for name in ("q", "k", "v", "beta", "decay"):
        assert name not in call or not found[name][:, bounds[-1] :].any(), name


# ----------------------------------------------------------------------------------------------------------
# Accuracy
# ----------------------------------------------------------------------------------------------------------


@needs_triton
@pytest.mark.parametrize("part", range(8))
@pytest.mark.seldom(3, 4)
def test_random_cases(part: int, device: torch.device) -> None:
    """Sizes and options at random, forward and backward, against float64."""
    generator = seeds.generator(110 + part)

    def one_of(*options: Any) -> Any:
        return options[int(torch.randint(len(options), (), generator=generator))]

    operator = operators()["delta_attention"]
    for _ in range(3):
        heads = one_of(1, 2, 3)
        case = {
            "batch": one_of(1, 2), "n": one_of(1, 3, 15, 33, 64, 70, 130), "heads": heads * one_of(1, 2),
            "key_heads": heads, "head_dim": one_of(2, 12, 34, 64), "value_dim": one_of(1, 17, 40, 65),
            "dtype": one_of("float32", "bfloat16", "float16"), "encoding": one_of("none", "rotate"),
            "normalize": one_of(True, False), "initial_state": one_of(True, False), "return_state": True,
            "layout": one_of("bnhd", "bhnd"), "gates": one_of("float32", "bfloat16"),
        }  # fmt: skip
        decay = one_of(None, "head", "feature")
        if decay is not None:
            case |= {"decay": decay, "strength": one_of(0.05, 0.3, 3.0, 100.0)}
        if case["encoding"] != "none":
            case["interleaved"] = one_of(True, False)
        for result in check_case(operator, case, "triton", device):
            assert result.ok, f"{case}: {result.mode} {result.detail}"


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@decays
def test_sizes_of_models(decay: str | None, head_dim: int, dtype: torch.dtype, device: torch.device) -> None:
    call = tensors(
        device, tokens=1500, heads=4, key_heads=2, head_dim=head_dim, values=head_dim, decay=decay, dtype=dtype,
        strength=1.0,
    )  # fmt: skip
    call["theta"] = call["theta"] / 10
    assert_right(call | {"initial_state": torch.randn(2, 4, head_dim, head_dim, device=device)})


@pytest.mark.gpu
@decays
def test_a_long_sequence(decay: str | None, device: torch.device) -> None:
    call = tensors(
        device, batch=1, tokens=16384, heads=2, key_heads=1, head_dim=128, values=128, decay=decay,
        dtype=torch.bfloat16, encoding="none",
    )  # fmt: skip
    assert_right(call)


FORGETS = (-5.0, -100.0, -1e9, -3e38)


@backends
@pytest.mark.parametrize("decay", ["head", "feature"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_follows_a_strong_decay_is_as_exact_as_a_beginning(
    dtype: torch.dtype, decay: str, backend: str, device: torch.device
) -> None:
    """Not even the rounding is seen that many strong decays before would leave in sums of logarithms."""
    call = tensors(device, batch=1, tokens=70, heads=4, key_heads=4, decay=decay, dtype=dtype)
    call |= {"return_state": True, "backend": backend}
    for n in (1, 20, 33, 64):
        strong = call["decay"].clone()
        forgets = torch.tensor(FORGETS, device=device)
        strong[:, : n + 1] = forgets if decay == "head" else forgets[:, None]
        out, state = delta_attention(**call | {"decay": strong})
        alone, last = delta_attention(**of_tokens(call | {"decay": strong}, n, 70))
        accuracy = 1e-5 if dtype == torch.float32 else 3e-2
        for h in range(1, 4):  # the first one keeps something
            for one, other in ((out[:, n:, h], alone[:, :, h]), (state[:, h], last[:, h])):
                assert float((one - other).abs().max()) <= accuracy * float(other.abs().max()), (n, FORGETS[h])


@needs_triton
@pytest.mark.parametrize("decay", ["head", "feature"])
def test_decays_have_no_gradient_from_pairs_on_one_side_of_them(decay: str, device: torch.device) -> None:
    """Not the rounding of one either: here of a query with its own key, which is far larger than all others."""
    call = tensors(device, tokens=40, decay=decay, encoding="none") | {"normalize": False}
    call["k"] = torch.nn.functional.normalize(call["k"], dim=-1)
    call["q"][:, 20] *= 1e5
    results = []
    for given, backend in ((in_float64(call), "torch"), (call, "triton")):
        given = leaves(given)
        out = delta_attention(**given, backend=backend)
        grads = torch.randn(out.shape, generator=seeds.generator(3)).to(out)
        results.append(torch.autograd.grad(out, given["decay"], grads)[0].double())
    exact, found = results
    later = slice(21, None)
    limit = 1e-4 * float(exact[:, later].abs().max())
    torch.testing.assert_close(found[:, later], exact[:, later], rtol=0.0, atol=limit)


@backends
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_keys_that_are_all_the_same(dtype: torch.dtype, backend: str, device: torch.device) -> None:
    """β of 0 and 1: nothing is learned, or the last value alone is known. The inverse has entries of one size."""
    k = torch.full((1, 100, 1, 16), 0.25, device=device, dtype=dtype)
    v = torch.randn(1, 100, 1, 16, device=device).to(dtype)
    for beta in (torch.ones(1, 100, 1, device=device), torch.zeros(1, 100, 1, device=device)):
        out = delta_attention(k, k, v, beta, scale=1.0, backend=backend)
        # A state is a sum of up to 64 differences of values, each rounded: in bfloat16 to 2^-8 of about 2.
        accuracy = 1e-5 if dtype == torch.float32 else 8e-2
        torch.testing.assert_close(out.float(), v * beta[..., None], rtol=accuracy, atol=accuracy)


@needs_triton
def test_bits_do_not_depend_on_the_batch(device: torch.device) -> None:
    for tokens, decay in ((1, "feature"), (70, "head"), (40, "feature")):
        sizes = {"batch": 3, "tokens": tokens, "heads": 2, "key_heads": 1, "head_dim": 16, "values": 16}
        call = tensors(device, **sizes, decay=decay, dtype=torch.bfloat16)
        call["initial_state"] = torch.randn(3, 2, 16, 16, device=device)
        whole, alone = results_of(call, "triton"), results_of(of_entries(call, 1, 2), "triton")
        out, state, *_ = whole
        assert torch.equal(out[1:2], alone[0])
        assert torch.equal(state[1:2], alone[1])


@needs_triton
@pytest.mark.parametrize(("head_dim", "anywhere"), [(16, set()), (15, {"q", "k", "v"})])
@pytest.mark.parametrize("tokens", [1, 40])
def test_what_may_lie_anywhere_in_an_entry_tells_nothing(tokens: int, head_dim: int, anywhere: set[str]) -> None:
    """The compiler picks by addresses in which order it adds up the squares of a row."""
    from warploom.ops.delta_attention.call import DeltaInputs, DeltaOptions
    from warploom.ops.delta_attention.engine import plan_forward

    call = tensors(torch.device("cpu"), 3, tokens, 2, 1, head_dim, 16)
    inputs = DeltaInputs(*(call.get(name) for name in DeltaInputs._fields))
    plan = plan_forward(inputs, DeltaOptions("none", True, 1.0, False), True)
    launch = plan.step or plan.chunks
    assert launch is not None
    assert {"q", "k", "v"} & launch.unaligned == anywhere


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [15, 31, 64])
def test_a_sequence_at_another_address_has_the_bits_of_the_batch(head_dim: int, device: torch.device) -> None:
    for tokens, decay in ((1, "feature"), (70, "head"), (40, None)):
        call = tensors(device, 3, tokens, 4, 2, head_dim, head_dim, decay, encoding="none")
        call |= {"normalize": True, "backend": "triton"}
        together = delta_attention(**call)
        for i in range(3):
            assert torch.equal(delta_attention(**of_entries(call, i, i + 1)), together[i : i + 1])


@needs_triton
def test_two_runs_have_the_same_bits(device: torch.device) -> None:
    call = tensors(device, tokens=300 if device.type == "cuda" else 40, decay="feature", dtype=torch.bfloat16)
    first = results_of(call, "triton")
    for _ in range(30 if device.type == "cuda" else 1):
        for one, other in zip(results_of(call, "triton"), first, strict=True):
            assert torch.equal(one, other)


@backends
@pytest.mark.parametrize("options", [{"scale": 0.0}, {"scale": -3.0}])
def test_gradients_of_states_alone_and_any_scale(
    options: dict[str, Any], backend: str, device: torch.device
) -> None:
    call = leaves(tensors(device, decay="head") | options)
    exact = leaves(in_float64(call))
    grads = []
    for given, name in ((call, backend), (exact, "torch")):
        out, state = delta_attention(**given, return_state=True, backend=name)
        wanted = [x for x in given.values() if isinstance(x, Tensor)]
        grads.append(torch.autograd.grad((state.square().sum() + out.sum()), wanted))
    for found, expected in zip(*grads, strict=True):
        assert_near(found, expected.float())


def test_results_have_the_memory_order_of_values(device: torch.device) -> None:
    call = tensors(device)
    call["v"] = call["v"].transpose(1, 2).contiguous().transpose(1, 2)
    for backend in BACKENDS:
        (out,) = as_tuple(delta_attention(**call, backend=backend))
        assert out.transpose(1, 2).is_contiguous()


@needs_triton
@pytest.mark.seldom(3, 4)
def test_entries_of_a_large_batch_are_taken_in_pieces(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For the memory between launches: values, states and gradients are those of the whole batch at once."""
    from planned_calls import forget_plans

    from warploom.ops.delta_attention import engine

    call = tensors(device, batch=5, tokens=20, decay="head") | {"offset": torch.arange(5, device=device)}
    call["initial_state"] = torch.randn(5, 4, 8, 5, device=device)
    call["v"] = call["v"].transpose(1, 2).contiguous().transpose(1, 2)
    whole = results_of(call, "triton")
    forget_plans()
    monkeypatch.setattr(engine, "entries_at_once", lambda *call: 2)
    parts = results_of(call, "triton")
    forget_plans()
    for number, (one, other) in enumerate(zip(whole, parts, strict=True)):
        assert one.stride() == other.stride(), number
        torch.testing.assert_close(one, other)


@needs_triton
@pytest.mark.parametrize("normalize", [False, True])
def test_gradients_of_float16_near_the_largest_number(device: torch.device, normalize: bool) -> None:
    """Of a short query, of which a pair is turned by 45°: two numbers of 60 000 come from one of 84 853 and 0."""
    shape = (1, 1, 1, 4)
    call = {name: torch.zeros(shape, device=device, dtype=torch.float16) for name in ("q", "k", "v")}
    call["q"][..., 0] = 1e-2
    call["q"].requires_grad_()
    size = 600.0 if normalize else 60_000.0
    state = torch.diag(torch.tensor([1.0, size, 1.0, size], device=device))[None, None]
    beta, theta = torch.zeros(1, 1, 1, device=device), torch.tensor([[0.0, torch.pi / 4]], device=device)
    for grad in ([0.0, 0.0, 0.0, 2**0.5], [0.0, 2**0.5, 0.0, 0.0]):
        out = delta_attention(
            **call, beta=beta, encoding="rotate", theta=theta, offset=1, initial_state=state, scale=1.0,
            normalize=normalize, backend="triton",
        )  # fmt: skip
        (dq,) = torch.autograd.grad(out, call["q"], torch.tensor(grad, device=device).view(shape).half())
        torch.testing.assert_close(
            dq.float().abs().flatten()[1::2], torch.full((2,), 60e3, device=device), rtol=1e-2, atol=0
        )
