"""Linear attention: its definition, states, chunks, decoding, and what its kernels are compiled to."""

from pathlib import Path
from typing import Any

import pytest
import seeds
import torch
from compiling import output_of

from warploom import linear_attention
from warploom.ops import operators
from warploom.ops.linear_attention import reference, validation
from warploom.runtime import dispatch
from warploom.runtime.backend import HAS_TRITON
from warploom.testing.conformance import check_case, compute_gradients

Tensor = torch.Tensor
BACKENDS = ("torch", "triton") if HAS_TRITON else ("torch",)
backends = pytest.mark.parametrize("backend", BACKENDS)
needs_triton = pytest.mark.skipif(not HAS_TRITON, reason="needs Triton")
ENCODINGS = ("none", "rotate", "cosine")


def tensors(
    device: torch.device,
    batch: int = 2,
    tokens: int = 37,
    heads: int = 2,
    head_dim: int = 8,
    values: int = 5,
    encoding: str = "rotate",
    decay: str | None = "head",
    dtype: torch.dtype = torch.float32,
) -> dict[str, Any]:
    """Arguments of a call, drawn anew for every test."""
    shapes = {"q": head_dim, "k": head_dim, "v": values}
    drawn: dict[str, Any] = {
        name: torch.randn(batch, tokens, heads, n).to(device, dtype) for name, n in shapes.items()
    }
    if encoding != "none":
        drawn["theta"] = torch.rand(heads, head_dim // 2 if encoding == "rotate" else head_dim).to(device)
    if decay is not None:
        shape = (heads,) if decay == "head" else (batch, tokens, heads)
        drawn["decay"] = -0.3 * torch.rand(shape).to(device)
    return drawn | {"encoding": encoding}


def of_tokens(call: dict[str, Any], first: int, last: int) -> dict[str, Any]:
    """The same call on some of its tokens."""
    cut = {name: call[name][:, first:last] for name in ("q", "k", "v")}
    decay = call.get("decay")
    if decay is not None and decay.dim() == 3:
        cut["decay"] = decay[:, first:last]
    return {**call, **cut, "offset": call.get("offset", 0) + first}


def of_entries(call: dict[str, Any], first: int, last: int) -> dict[str, Any]:
    """The same call on some entries of the batch."""
    return {**call, **{name: call[name][first:last] for name in ("q", "k", "v")}}


def assert_near(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


# ----------------------------------------------------------------------------------------------------------
# The definition
# ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("decay", [None, "head", "token"])
@pytest.mark.parametrize("tokens", [1, 64, 150])
def test_chunks_are_the_recurrence(encoding: str, decay: str | None, tokens: int, device: torch.device) -> None:
    call = tensors(device, tokens=tokens, encoding=encoding, decay=decay)
    call = {name: x.double() if isinstance(x, Tensor) else x for name, x in call.items()}
    state = torch.randn(2, 2, 16 if encoding == "cosine" else 8, 5).double().to(device)
    found = linear_attention(**call, activation="silu", scale=0.3, initial_state=state, return_state=True)
    place = {"encoding": encoding, "activation": "silu", "interleaved": False, "offset": 0, "cu_seqlens": None}
    q, k = (reference.features(call[name], theta=call.get("theta"), **place) for name in ("q", "k"))
    g = torch.zeros(2, tokens, 2).double().to(device) if decay is None else call["decay"].expand(2, tokens, 2)
    out, last = reference.recurrence(q, k, call["v"], g, state)
    torch.testing.assert_close(found[0], 0.3 * out, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(found[1], last, rtol=1e-9, atol=1e-9)


@backends
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_it_is_masked_attention_without_a_softmax(encoding: str, backend: str, device: torch.device) -> None:
    """Without decay, and pairs of tokens written out."""
    call = tensors(device, encoding=encoding, decay=None)
    place = {"encoding": encoding, "activation": "none", "interleaved": False, "offset": 0, "cu_seqlens": None}
    q, k = (reference.features(call[name], theta=call.get("theta"), **place) for name in ("q", "k"))
    pairs = torch.einsum("bnhf,bmhf->bhnm", q, k)
    for causal in (True, False):
        seen = pairs.tril() if causal else pairs
        expected = torch.einsum("bhnm,bmhe->bnhe", seen, call["v"]) * 8**-0.5
        assert_near(linear_attention(**call, causal=causal, backend=backend), expected)


@needs_triton
def test_random_cases(device: torch.device) -> None:
    """Sizes and options at random, forward and backward, against float64."""
    generator = seeds.generator(7)

    def one_of(*options: Any) -> Any:
        return options[int(torch.randint(len(options), (), generator=generator))]

    operator = operators()["linear_attention"]
    for _ in range(4):
        case = {
            "batch": one_of(1, 2), "n": one_of(1, 15, 33, 70), "heads": one_of(1, 3), "head_dim": one_of(2, 12, 34),
            "value_dim": one_of(1, 17, 40), "dtype": one_of("float32", "bfloat16", "float16"),
            "encoding": one_of(*ENCODINGS), "activation": one_of("none", "relu", "silu", "sigmoid", "softmax"),
            "initial_state": one_of(True, False), "return_state": True,
        }  # fmt: skip
        decay = one_of(None, "head", "token")
        if decay is not None:
            case |= {"decay": decay, "decay_gradient": one_of(True, False)}
        if case["encoding"] != "none":
            case["theta_gradient"] = one_of(True, False)
        for result in check_case(operator, case, "triton", device):
            assert result.ok, f"{case}: {result.mode} {result.detail}"


@needs_triton
@pytest.mark.parametrize("tokens", [1, 9, 40])
def test_decays_have_no_gradient_from_pairs_on_one_side_of_them(tokens: int, device: torch.device) -> None:
    """Not the rounding of one either: here a token's with itself, which is far larger than all others."""
    call, middle = tensors(device, tokens=tokens, encoding="none", decay="token"), tokens // 2
    call["q"][:, middle] *= 1e4
    call["k"][:, middle] *= 1e4
    grad = torch.randn(2, tokens, 2, 5).to(device)
    results = []
    for dtype, backend in ((torch.float64, "torch"), (torch.float32, "triton")):
        given = {name: x.to(dtype) if isinstance(x, Tensor) else x for name, x in call.items()}
        decay = given["decay"].requires_grad_()
        linear_attention(**given, backend=backend).backward(grad.to(dtype))
        results.append(decay.grad.double())
    exact, found = results
    assert torch.equal(found[:, 0], torch.zeros_like(found[:, 0]))
    torch.testing.assert_close(found, exact, rtol=0.0, atol=1e-5 * float(exact.abs().max()))


# ----------------------------------------------------------------------------------------------------------
# States, chunks, decoding
# ----------------------------------------------------------------------------------------------------------


@backends
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_last_token_is_not_decayed(dtype: torch.dtype, backend: str, device: torch.device) -> None:
    """Not even by the rounding of the sum of all tokens' decays, whatever order that is made in."""
    for tokens in (7, 16, 31, 32, 95):
        q, k, v = torch.zeros(3, 1, tokens, 2, 16, dtype=dtype, device=device)
        k[:, -1], v[:, -1] = 1.0, 3.0
        decay = -10 * torch.rand(1, tokens, 2, device=device)
        _, state = linear_attention(q, k, v, decay=decay, return_state=True, backend=backend)
        assert (state == 3).all(), tokens


@backends
@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("decay", [None, "head", "token"])
def test_two_halves_are_the_whole(encoding: str, decay: str | None, backend: str, device: torch.device) -> None:
    call = tensors(device, encoding=encoding, decay=decay) | {"return_state": True, "backend": backend}
    whole, last = linear_attention(**call)
    first, state = linear_attention(**of_tokens(call, 0, 21))
    second, end = linear_attention(**of_tokens(call, 21, 37), initial_state=state)
    assert_near(torch.cat((first, second), dim=1), whole)
    assert_near(end, last)


@backends
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_steps_of_a_token_are_prefill(encoding: str, backend: str, device: torch.device) -> None:
    call = tensors(device, tokens=9, encoding=encoding) | {"return_state": True, "backend": backend, "offset": 1000}
    whole, last = linear_attention(**call)
    state, steps = None, []
    for n in range(9):
        out, state = linear_attention(**of_tokens(call, n, n + 1), initial_state=state)
        steps.append(out)
    assert_near(torch.cat(steps, dim=1), whole)
    assert_near(state, last)


@needs_triton
@pytest.mark.parametrize("tokens", [1, 37])
def test_a_state_of_any_strides(tokens: int, device: torch.device) -> None:
    call = tensors(device, tokens=tokens, values=8) | {"return_state": True, "backend": "triton"}
    drawn = torch.randn(2, 2, 8, 8, device=device)
    for state in (
        drawn,
        drawn.transpose(2, 3),
        drawn[..., :1].expand(2, 2, 8, 8),
        drawn[:1, :, :1].expand(2, 2, 8, 8),
    ):
        expected = linear_attention(**call, initial_state=state.contiguous())
        for found, each in zip(linear_attention(**call, initial_state=state), expected, strict=True):
            assert_near(found, each)


@needs_triton
@pytest.mark.seldom(3, 5)
def test_chunks_handed_over_are_one_product(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few heads: a sequence is cut, states of chunks are made and handed over, forward and backward."""
    from planned_calls import forget_plans

    from warploom.ops.linear_attention import engine

    call = tensors(device, batch=1, tokens=150, encoding="cosine", decay="token")
    state = torch.randn(1, 2, 16, 5, device=device)
    cu_seqlens = torch.tensor([0, 70, 70, 150], device=device)
    states = torch.randn(3, 2, 16, 5, device=device)
    for more in ({"initial_state": state}, {"initial_state": states, "cu_seqlens": cu_seqlens}):
        results = []
        for chunk in (64, 2**20):
            forget_plans()
            monkeypatch.setattr(engine, "chunk_of", lambda *sizes, chunk=chunk: chunk)
            inputs = {
                name: x.detach().clone().requires_grad_() if isinstance(x, Tensor) and x.is_floating_point() else x
                for name, x in {**call, **more}.items()
            }
            outs = linear_attention(**inputs, return_state=True, backend="triton")
            grads = tuple(torch.ones_like(x) for x in outs)
            results.append((*outs, *compute_gradients(outs, inputs, grads).values()))
        forget_plans()
        for found, expected in zip(*results, strict=True):
            assert_near(found, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gradients_of_decays_have_the_same_bits_in_pytorch(dtype: torch.dtype, device: torch.device) -> None:
    """Of one head of one sequence, whose sums are of a single column."""
    q, k, v = (torch.randn(1, 33, 1, 2, device=device, dtype=dtype) for _ in range(3))
    decay = (-torch.rand(1, 33, 1, device=device)).requires_grad_()
    found = [
        torch.autograd.grad(linear_attention(q, k, v, decay=decay, backend="torch").sum(), decay)[0]
        for _ in range(200)
    ]
    assert all(torch.equal(found[0], each) for each in found)


def test_chunks_are_no_more_than_run_at_a_time() -> None:
    from warploom.ops.linear_attention.configs import CALL, CHUNK, LEAST_CHUNKS, chunk_of

    generator = seeds.generator()
    for _ in range(500):
        tokens, heads, values, multiprocessors = (
            int(torch.randint(1, most, (), generator=generator)) for most in (2**18, 200, 257, 200)
        )
        chunk = chunk_of(tokens, heads, values, multiprocessors)
        chunks, columns = -(-tokens // chunk), -(-values // 128)
        assert chunk % 64 == 0
        if chunks > 1:
            assert chunks * heads * columns * max(CALL // tokens, 1) <= multiprocessors
            assert chunk >= CHUNK
        else:
            few = multiprocessors // (heads * columns * max(CALL // tokens, 1)) < LEAST_CHUNKS
            assert few or tokens < 2 * CHUNK


@backends
def test_a_batch_changes_no_bits(backend: str, device: torch.device) -> None:
    call = tensors(device, batch=3, dtype=torch.bfloat16, head_dim=16) | {"backend": backend}
    together = linear_attention(**call)
    if backend == "triton":
        assert torch.equal(together, linear_attention(**call))
        for i in range(3):
            assert torch.equal(linear_attention(**of_entries(call, i, i + 1)), together[i : i + 1])


@needs_triton
@pytest.mark.parametrize("entries", [33, 160])
@pytest.mark.seldom(3, 6)
def test_a_batch_changes_no_bits_of_a_step(
    entries: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU, programs of other columns add up the features of a head in another order."""
    from planned_calls import forget_plans

    from warploom.ops.linear_attention.triton import launch as launches
    from warploom.runtime.launch import Launch

    compiled_for = []

    def launch(*arguments: Any, **named: Any) -> Launch:
        compiled_for.append((named["config"], named["num_warps"]))
        return Launch(*arguments, **named)

    monkeypatch.setattr(launches, "Launch", launch)
    forget_plans()
    call = tensors(device, batch=entries, tokens=1, heads=8, values=32) | {"backend": "triton"}
    together = linear_attention(**call)
    for i in (0, 7, entries - 1):
        assert torch.equal(linear_attention(**of_entries(call, i, i + 1)), together[i : i + 1])
    assert len(set(compiled_for)) == 1
    forget_plans()


def at_distance(x: torch.Tensor, more: int) -> torch.Tensor:
    """The same numbers, with more elements between the entries of the batch."""
    size = x[0].numel()
    wide = x.new_empty(len(x), size + more)
    return wide[:, :size].view_as(x).copy_(x)


@pytest.mark.parametrize("more", [0, 1, 4, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_same_is_known_of_addresses_of_a_batch_and_of_an_entry(dtype: torch.dtype, more: int) -> None:
    """The compiler picks by it in which order it adds up."""
    from warploom.device.rows import Strides
    from warploom.runtime.layout import layout_of_entries

    x = at_distance(torch.zeros(3, 1, 1, 64, dtype=dtype), more)
    known = layout_of_entries(Strides, x)
    assert known.vec == {0: 16, 8: 8}.get(more, 4 if more * x.element_size() == 16 else 1)
    assert known.strides[0].b * known.vec == 64 + more
    for i in range(3):
        assert layout_of_entries(Strides, x[i : i + 1]).vec == known.vec


@pytest.mark.parametrize(("more", "anywhere"), [(0, {"decay"}), (1, {"decay", "initial", "final"})])
@pytest.mark.parametrize("tokens", [1, 70])
def test_what_may_lie_anywhere_in_an_entry_tells_nothing(tokens: int, more: int, anywhere: set[str]) -> None:
    """Decays of an entry may be at any address, and states whose entries lie apart by any number of elements."""
    from warploom.ops.linear_attention.call import LinearInputs, LinearOptions
    from warploom.ops.linear_attention.engine import plan_forward

    call = tensors(torch.device("cpu"), 3, tokens, 5, 12, 12, encoding="none", decay="token")
    state = at_distance(torch.zeros(3, 5, 12, 12), more)
    inputs = LinearInputs(call["q"], call["k"], call["v"], None, call["decay"], state, None, None)
    options = LinearOptions("none", "none", causal=True, scale=1.0, return_state=False)
    assert plan_forward(inputs, options, True).product.launch.unaligned == anywhere


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("activation", ["none", "softmax"])
@pytest.mark.parametrize("tokens", [1, 70])
@pytest.mark.parametrize(
    ("moved", "heads", "head_dim"), [("q", 2, 64), ("decay", 5, 12), ("decay", 5, 64), ("initial_state", 3, 12)]
)
def test_a_sequence_at_another_address_has_the_bits_of_the_batch(
    moved: str, heads: int, head_dim: int, tokens: int, activation: str, dtype: torch.dtype, device: torch.device
) -> None:
    shape = {"batch": 3, "tokens": tokens, "heads": heads, "head_dim": head_dim, "values": head_dim}
    call = tensors(device, **shape, encoding="none", decay="token" if moved == "decay" else "head", dtype=dtype)
    call |= {"initial_state": torch.randn(3, heads, head_dim, head_dim, device=device), "activation": activation}
    if moved != "decay":  # that of another entry is at no multiple of 16 bytes, for the number of heads
        call[moved] = at_distance(call[moved], 1)
    together = linear_attention(**call, backend="triton")
    for i in range(3):
        alone = {**of_entries(call, i, i + 1), "initial_state": call["initial_state"][i : i + 1]}
        if moved == "decay":
            alone["decay"] = call["decay"][i : i + 1]
        assert torch.equal(linear_attention(**alone, backend="triton"), together[i : i + 1])


@backends
def test_positions_far_away_are_exact(backend: str, device: torch.device) -> None:
    """Only differences of positions matter: far from 0 as near it."""
    call = tensors(device, encoding="cosine", decay=None) | {"backend": backend}
    near = linear_attention(**call)
    for offset in (2**24 + 1, -(10**6), torch.tensor([5, 2**23], device=device)):
        torch.testing.assert_close(linear_attention(**call, offset=offset), near, rtol=1e-4, atol=2e-4)


@backends
def test_gradients_of_theta_by_queries_and_by_keys_are_added_before_rounding(
    backend: str, device: torch.device
) -> None:
    """Each of them is more than float16 holds, and their sum is small: a shift of all positions changes nothing."""
    call = tensors(device, tokens=20, decay=None)
    grads = []
    for offset, dtype in ((0, torch.float64), (30_003, torch.float16)):
        theta = call["theta"].half().to(dtype).requires_grad_()
        linear_attention(**{**call, "theta": theta}, offset=offset, backend=backend).sum().backward()
        grads.append(theta.grad.float())
    assert grads[0].abs().max() > 100  # where each is more than a million, of which float32 rounds off 0.1
    torch.testing.assert_close(grads[1], grads[0], rtol=0.0, atol=2.0)


# ----------------------------------------------------------------------------------------------------------
# Strong decays
# ----------------------------------------------------------------------------------------------------------


FORGETS = (-5.0, -100.0, -1e9, -3e38)
"""Logarithms of strong decays, one for each head."""


def defined(q: Tensor, k: Tensor, v: Tensor, g: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """The recurrence, differentiable."""
    found = []
    for t in range(q.shape[1]):
        state = g[:, t, :, None, None].exp() * state + k[:, t, :, :, None] * v[:, t, :, None, :]
        found.append((q[:, t, :, :, None] * state).sum(2))
    return torch.stack(found, 1) * q.shape[-1] ** -0.5, state


def values_and_gradients(function: Any, inputs: dict[str, Tensor], grads: tuple[Tensor, Tensor]) -> list[Tensor]:
    given = [x.detach().requires_grad_() for x in inputs.values()]
    results = function(*given)
    found = torch.autograd.grad(results, given, [g.to(x.dtype) for g, x in zip(grads, results)])
    return [x.detach().double() for x in (*results, *found)]


def call_with_borders(device: torch.device, dtype: torch.dtype, by_head: bool) -> dict[str, Tensor]:
    """Arguments by position of a call whose heads have borders at ends of tiles, in them, and many in a row."""
    tokens, heads = 70, len(FORGETS)
    q, k, v = (torch.randn(1, tokens, heads, n).to(device, dtype) for n in (8, 8, 5))
    forgets = torch.tensor(FORGETS, device=device)
    decay = forgets
    if not by_head:
        decay = -0.1 * torch.rand(1, tokens, heads).to(device)
        decay[:, [0, 15, 16, 31, 32, 40, 63, 64]] = forgets
        decay[:, 17:30] = torch.tensor([-30.0, -104.0, -1e4, -1e30], device=device)
    return {"q": q, "k": k, "v": v, "decay": decay, "state": torch.randn(1, heads, 8, 5).to(device)}


def assert_heads_are_near(found: list[Tensor], expected: list[Tensor], accuracy: float) -> None:
    """Outputs, states, and gradients of q, k, v, decay and the first state, each head by itself."""
    for n, (x, right) in enumerate(zip(found, expected, strict=True)):
        heads = 0 if right.dim() == 1 else 1 if n in (1, 6) else 2
        for head, (one, other) in enumerate(zip(x.unbind(heads), right.unbind(heads), strict=True)):
            size = float(other.abs().max())
            assert float((one - other).abs().max()) <= accuracy * size + 1e-30, (n, FORGETS[head])


@backends
@pytest.mark.parametrize(
    ("dtype", "by_head"),
    [
        (torch.float64, False),
        (torch.float32, False),
        (torch.float32, True),
        (torch.bfloat16, False),
        (torch.float16, False),
        (torch.float16, True),
    ],
)
def test_decays_may_be_of_any_strength(
    dtype: torch.dtype, by_head: bool, backend: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What comes behind a token that forgets everything is as exact as if a sequence began there."""
    if backend == "triton":
        if dtype == torch.float64:
            pytest.skip("the kernels have no float64")
        from warploom.ops.linear_attention import engine

        monkeypatch.setattr(engine, "chunk_of", lambda *sizes: 64)
    call = call_with_borders(device, dtype, by_head)
    grads = torch.randn_like(call["v"]), torch.randn_like(call["state"])

    def computed(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, state: Tensor) -> Any:
        return linear_attention(q, k, v, decay=decay, initial_state=state, return_state=True, backend=backend)

    def right(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, state: Tensor) -> Any:
        return defined(q, k, v, decay.expand(q.shape[:3]), state)

    exact = {name: x.double() for name, x in call.items()}
    expected = values_and_gradients(right, exact, grads)
    found = values_and_gradients(computed, exact if dtype == torch.float64 else call, grads)
    assert_heads_are_near(found, expected, {torch.float64: 1e-13, torch.float32: 2e-6}.get(dtype, 2e-2))
    forgotten = exact["decay"] < -1e8
    assert (found[5][forgotten] == 0).all()


@backends
def test_steps_may_forget_everything(backend: str, device: torch.device) -> None:
    state = torch.full((1, 1, 8, 5), 1e30, device=device)
    q, k, v = (torch.randn(1, 1, 1, n, device=device) for n in (8, 8, 5))
    for decay in (torch.full((1, 1, 1), -3e38, device=device), torch.full((1,), -1e9, device=device)):
        more = {"decay": decay, "return_state": True, "backend": backend}
        found = linear_attention(q, k, v, initial_state=state, **more)
        for x, right in zip(found, linear_attention(q, k, v, **more), strict=True):
            assert torch.equal(x, right)


# ----------------------------------------------------------------------------------------------------------
# Packed sequences
# ----------------------------------------------------------------------------------------------------------


def gradients_of(call: dict[str, Any], grad: Tensor, **more: Any) -> dict[str, Tensor]:
    """Outputs, states and gradients of a call, by name."""
    given = {
        name: x.detach().clone().requires_grad_() if isinstance(x, Tensor) and x.is_floating_point() else x
        for name, x in call.items()
    }
    out, state = linear_attention(**given, **more, return_state=True)
    of = {name: x for name, x in given.items() if isinstance(x, Tensor) and x.requires_grad}
    found = torch.autograd.grad((out, state), list(of.values()), (grad, torch.ones_like(state)))
    return {"out": out.detach(), "states": state.detach(), **dict(zip(of, found, strict=True))}


@backends
@pytest.mark.parametrize(
    ("tokens", "bounds", "decay"), [(100, [0, 30, 30, 37], "token"), (70, [0, 0], "head"), (4, [0, 1, 3], "token")]
)
def test_rows_behind_the_last_sequence_are_zero(
    tokens: int, bounds: list[int], decay: str, backend: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever they hold, and nothing of them reaches a result."""
    if backend == "triton":
        from warploom.ops.linear_attention import engine

        monkeypatch.setattr(engine, "chunk_of", lambda *sizes: 64)
    call = tensors(device, batch=1, tokens=tokens, decay=decay) | {"activation": "silu"}
    grad, last = torch.randn(1, tokens, 2, 5, device=device), bounds[-1]
    rows = [name for name in ("q", "k", "v", "decay") if call[name].dim() > 1]
    for x in (grad, *(call[name] for name in rows)):
        x[:, last:] = float("nan")
    junk = [torch.full_like(x, float("nan")) for x in (grad, call["q"]) for _ in range(8)]  # what memory may hold
    del junk
    more = {"cu_seqlens": torch.tensor(bounds, device=device), "backend": backend}
    found = gradients_of(call, grad, **more)
    expected = gradients_of({**call, **{name: call[name][:, :last] for name in rows}}, grad[:, :last], **more)
    for name, x in found.items():
        if name in ("out", *rows):
            assert (x[:, last:] == 0).all(), name
            x = x[:, :last]
        assert_near(x, expected[name])


@pytest.mark.gpu
def test_a_graph_is_replayed_with_other_bounds(device: torch.device) -> None:
    call = tensors(device, batch=1, tokens=1000, dtype=torch.bfloat16) | {"backend": "triton"}
    bounds = torch.tensor([0, 300, 1000], device=device)
    linear_attention(**call, cu_seqlens=bounds)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = linear_attention(**call, cu_seqlens=bounds)
    for new in ([0, 10, 20], [0, 0, 999], [0, 512, 1000]):
        bounds.copy_(torch.tensor(new))
        graph.replay()
        assert torch.equal(out, linear_attention(**call, cu_seqlens=bounds))
        assert (out[:, new[-1] :] == 0).all()


@backends
@pytest.mark.parametrize("causal", [True, False])
def test_packed_sequences_are_strangers(causal: bool, backend: str, device: torch.device) -> None:
    """NaN in one of them, in what it is given or in its gradient, reaches no other."""
    call = tensors(device, batch=1, tokens=24, encoding="none", decay="token" if causal else None)
    call |= {"cu_seqlens": torch.tensor([0, 7, 15, 24], device=device), "backend": backend, "causal": causal}
    grad = torch.randn(1, 24, 2, 5, device=device)
    results = []
    for bad in (False, True):
        given = {name: x.clone() if isinstance(x, Tensor) else x for name, x in call.items()}
        of = [name for name in ("q", "k", "v", "decay") if name in given]
        if bad:
            for x in (grad, *(given[name] for name in of)):
                x[:, 9] = float("nan")
        for name in of:
            given[name].requires_grad_()
        out = linear_attention(**given)
        results.append([out, *torch.autograd.grad(out, [given[name] for name in of], grad)])
    for clean, found in zip(*results, strict=True):
        for rows in (slice(0, 7), slice(15, 24)):
            assert torch.equal(found[:, rows], clean[:, rows])
    if causal:
        del given["causal"]
        _, states = linear_attention(**given, return_state=True)
        assert states[[0, 2]].isfinite().all()
        assert states[1].isnan().any()


def of_definition(call: dict[str, Any]) -> Tensor:
    """Outputs by PyTorch, without the last state."""
    out = reference.linear_attention(**call)
    assert isinstance(out, Tensor)
    return out


@pytest.mark.parametrize("activation", ["none", "silu", "softmax"])
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_auto_takes_pytorch_for_float32_without_causality(
    encoding: str, activation: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With rows encoded in memory, and gradients, theta's too, as exact as those of the definition."""
    call = tensors(device, tokens=70, encoding=encoding, decay=None)
    call |= {"activation": activation, "causal": False, "scale": -0.3}
    if encoding != "none":
        call["offset"] = torch.tensor([3, 100_003], device=device)
    call["q"] = call["q"].transpose(1, 2).contiguous().transpose(1, 2)
    leaves = [name for name in ("q", "k", "v", "theta") if name in call]
    call |= {name: call[name].requires_grad_() for name in leaves}
    exact = call | {name: call[name].detach().double().requires_grad_() for name in leaves}
    monkeypatch.setattr(validation, "LARGE", 2 * 70 * 2 * 5 * (16 if encoding == "cosine" else 8))
    asked: list[str] = []
    monkeypatch.setattr(dispatch, "use_triton", lambda name, *_: asked.append(name))
    linear_attention(**call)
    assert "linear_attention" not in asked
    linear_attention(**{**call, **{name: call[name].bfloat16() for name in "qkv"}})
    linear_attention(**{**call, "causal": True})
    linear_attention(**of_tokens(call, 0, 69))
    assert asked.count("linear_attention") == 3
    monkeypatch.setattr(dispatch, "use_triton", lambda *_: False)
    out = linear_attention(**call)
    assert out.stride() == call["q"].new_empty(2, 2, 70, 5).transpose(1, 2).stride()
    grad = torch.randn_like(out)
    results = []
    for given, one in ((call, out), (call, of_definition(call)), (exact, of_definition(exact))):
        results.append((one, *torch.autograd.grad(one, [given[name] for name in leaves], grad.to(one.dtype))))
    for found, defined, truth in zip(*results, strict=True):
        assert found.dtype == torch.float32
        off, allowed = (found - truth).abs().max(), (defined - truth).abs().max()
        assert off <= 2 * allowed + 1e-6 * truth.abs().max()


@backends
@pytest.mark.parametrize("causal", [True, False])
def test_a_scale_of_zero(causal: bool, backend: str, device: torch.device) -> None:
    """Outputs are 0, and gradients those of the last state."""
    call = tensors(device, decay="token" if causal else None) | {"scale": 0.0, "backend": backend}
    if not causal:
        assert (linear_attention(**call, causal=False) == 0).all()
        return
    grad = torch.randn(2, 37, 2, 5, device=device)
    found = gradients_of(call, grad)
    assert (found["out"] == 0).all()
    exact = {name: x.double() if isinstance(x, Tensor) else x for name, x in call.items()}
    for name, right in gradients_of({**exact, "backend": "torch"}, grad.double()).items():
        assert_near(found[name], right.float())


# ----------------------------------------------------------------------------------------------------------
# What the kernels are compiled to
# ----------------------------------------------------------------------------------------------------------


PRODUCTS = """
import torch
from triton.backends.compiler import GPUTarget
from warploom import linear_attention
from warploom.runtime import launch
from warploom.testing.descriptors import disassemble, find_lost_addresses

def zeros(*shape, dtype=torch.bfloat16):
    return torch.zeros(shape, dtype=dtype, requires_grad=True)

inputs = [zeros(1, 4096, 1, 128) for _ in range(3)]
theta, decay = (zeros(*shape, dtype=torch.float32) for shape in ((1, 64), (1, 4096, 1)))
with launch.record_builds(90, 132) as builds:
    linear_attention(*inputs, theta=theta, decay=decay, encoding="rotate", backend="triton").sum().backward()
for build in builds.values():
    built = build.compile(GPUTarget("cuda", 90, 32))
    lost = find_lost_addresses(disassemble(built.asm["cubin"])) if "wgmma" in built.asm["ptx"] else []
    print(build.function.__name__, len(lost))
"""


@pytest.mark.seldom(6, 24)
@needs_triton
def test_products_read_what_is_in_shared_memory(tmp_path: Path) -> None:
    """On Hopper products of a warp group read through addresses, which the assembler may lose."""
    printed = output_of(PRODUCTS, tmp_path)
    lost = dict(line.split() for line in printed.splitlines())
    assert lost.keys() >= {"hopper_product_kernel", "product_kernel", "sums_kernel", "decay_kernel"}
    assert set(lost.values()) == {"0"}


STATES = """
import torch
from warploom import linear_attention
from warploom.runtime import launch
from warploom.testing.build import build

with launch.record_builds(89) as builds:
    for features, theta, options in (
        (128, 64, {"encoding": "rotate"}),
        (128, 128, {"encoding": "cosine"}),
        (160, 80, {"encoding": "rotate", "activation": "softmax"}),
    ):
        inputs = [torch.zeros(1, 32, 1, features, requires_grad=True) for _ in range(3)]
        theta = torch.zeros(1, theta)
        linear_attention(*inputs, theta=theta, causal=False, backend="triton", **options).sum().backward()
for variant in builds.values():
    if variant.function.__name__ == "product_kernel":
        print(build(variant, 89))
"""


@pytest.mark.seldom(6, 28)
@needs_triton
def test_large_states_without_causality_fit_in_shared_memory(tmp_path: Path) -> None:
    """What all tiles multiply with, the compiler holds there, of any size."""
    printed = output_of(STATES, tmp_path)
    assert printed.count("Resources") >= 9


HOPPER = """
import torch
from warploom import linear_attention
from warploom.runtime import launch

def kernels(encoding="rotate", features=128, values=None, dtype=torch.bfloat16, tokens=128, theta_gradient=False,
            cut=None, theta_dtype=torch.float32, **more):
    def zeros(n):
        return torch.zeros((1, tokens, 2, n), dtype=dtype, requires_grad=True)

    theta = None
    if encoding != "none":
        shape = 1, features // (2 if encoding == "rotate" else 1)
        theta = torch.zeros(shape, dtype=theta_dtype, requires_grad=theta_gradient)
    q, k, v = zeros(features), zeros(features), zeros(values or features)
    with launch.record_builds(90, 1) as builds:
        q, k, v = (x[:, :cut] for x in (q, k, v))
        out = linear_attention(q, k, v, theta=theta, encoding=encoding, backend="triton", **more)
        out.backward(torch.zeros_like(out))
    return sorted({build.function.__name__ for build in builds.values()})

print(kernels(), kernels(encoding="none", features=64))
print(kernels(encoding="cosine", features=64), kernels(encoding="cosine"))
print(kernels(theta_gradient=True), kernels(activation="silu"))
print(kernels(theta_gradient=True, theta_dtype=torch.bfloat16), kernels(encoding="cosine", activation="silu"))
print(kernels(dtype=torch.float16), kernels(features=96), kernels(values=64))
print(kernels(cut=32), kernels(causal=False, theta_gradient=True))
print(kernels(causal=False), kernels(causal=False, features=96))
"""


@needs_triton
@pytest.mark.seldom(3, 4)
def test_which_calls_take_the_kernels_for_hopper(tmp_path: Path) -> None:
    printed = output_of(HOPPER, tmp_path)
    lines = printed.splitlines()
    assert len(lines) == 7
    products = ["hopper_key_kernel", "hopper_product_kernel"]
    cosine = ["hopper_cosine_kernel"]
    assert lines[:2] == [f"{products} {products}", f"{cosine} {[*cosine, 'hopper_parts_kernel']}"]
    turned = ["backward_kernel", *products]
    assert lines[2] == f"{[*turned, 'reduce_kernel']} {turned}"
    forward = ["hopper_product_kernel", "product_kernel", "reduce_kernel"]
    assert lines[3] == f"{forward} {[*cosine, 'hopper_parts_kernel']}"
    assert "hopper" not in lines[4]
    on_hopper = ["hopper_sums_kernel", "product_kernel", "scan_kernel"]
    elsewhere = ["product_kernel", "scan_kernel", "sums_kernel"]
    assert lines[5] == f"{['product_kernel']} {sorted([*on_hopper, 'reduce_kernel'])}"
    assert lines[6] == f"{on_hopper} {elsewhere}"
