"""Where NaN and infinities in one token of attention end up: in the rows that they reach, and in no others.

The same holds of linear attention, whose tiles and whose README's "Limits" are its own.

A query reaches its own row, a key or value the rows that see it. Where a tile of pairs is multiplied, a hidden pair
takes part with the weight 0, and 0 · NaN is NaN: flash attention's README says under "Limits" what is reached so.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from flash_cases import BACKENDS
from launches import ON_GPU

from warploom import flash_attention, linear_attention
from warploom.ops.flash_attention import reference
from warploom.runtime.backend import HAS_TRITON

Tensor = torch.Tensor

NEAR = 512
"""Places beyond what a mask shows within which the kernels multiply hidden pairs."""
GROUP = 2  # heads of queries to one of keys
RESULTS = ("out", "lse", "dq", "dk", "dv")


class Setting(NamedTuple):
    """A call and the token of it that goes bad."""

    tokens: int
    keys: int
    left: int | None
    right: int | None
    bad: int
    bounds_q: tuple[int, ...] = ()  # of packed sequences
    bounds_k: tuple[int, ...] = ()
    features: int = 16
    dtype: torch.dtype = torch.bfloat16

    def sees(self, more: int = 0) -> Tensor:
        """Which keys each query sees (N, M), with a mask that shows so many places more."""
        bounds_q, bounds_k = self.bounds_q or (0, self.tokens), self.bounds_k or (0, self.keys)
        seen = torch.zeros(self.tokens, self.keys, dtype=torch.bool)
        for q0, q1, k0, k1 in zip(bounds_q, bounds_q[1:], bounds_k, bounds_k[1:]):
            distance = torch.arange(k1 - k0)[None, :] - torch.arange(q1 - q0)[:, None] - (k1 - k0) + (q1 - q0)
            part = torch.ones_like(distance, dtype=torch.bool)
            if self.left is not None:
                part &= distance >= -self.left - more
            if self.right is not None:
                part &= distance <= self.right + more
            seen[q0:q1, k0:k1] = part
        return seen

    def options(self, device: torch.device) -> dict[str, Any]:
        packed = {"cu_seqlens_q": self.bounds_q, "cu_seqlens_k": self.bounds_k}
        made = {name: torch.tensor(bounds, device=device) for name, bounds in packed.items() if bounds}
        return {"window": (self.left, self.right), **made}


FEW = {
    "full": Setting(70, 40, None, None, 30),
    "causal": Setting(70, 70, None, 0, 40, dtype=torch.float32),
    "window": Setting(80, 70, 3, 2, 50),
    "packed": Setting(70, 60, None, 0, 30, (0, 20, 50, 70), (0, 20, 40, 60), dtype=torch.float32),
}
PACKING = (0, 900, 1800, 3000)
MANY = {
    "small": Setting(500, 500, None, 0, 300, features=64),
    "split": Setting(5000, 5000, None, 0, 2100, features=64),
    "split_wide": Setting(5000, 4000, None, 0, 2100, features=128),
    "full_long": Setting(3000, 3000, None, None, 1500, features=128),
    "long_window": Setting(4000, 4000, 200, 100, 2000, features=64),
    "widest": Setting(2500, 2500, None, 0, 1200, features=256),
    "long_packed": Setting(3000, 3000, None, 0, 1500, PACKING, PACKING, 64),
    "terms": Setting(3000, 3000, None, 0, 1500, features=64, dtype=torch.float32),
    "wide_pieces": Setting(2500, 2500, None, None, 1500, features=128, dtype=torch.float32),
    "short_float32": Setting(300, 300, None, 0, 150, features=64, dtype=torch.float32),
}
SETTINGS = FEW | MANY if ON_GPU else FEW


def reached(setting: Setting, which: str, backend: str) -> dict[str, tuple[Tensor, Tensor]]:
    """Of each result, the tokens that must and those that may be reached by a number in a token of ``which``."""
    sees, near = setting.sees(), setting.sees(NEAR)
    near |= ~sees.any(1, keepdim=True) & (setting.sees(10**9))  # the loop of a query without keys is over some
    if backend == "torch":
        near = torch.ones_like(near)
    bad = setting.bad
    no_query, no_key = torch.zeros(setting.tokens, dtype=torch.bool), torch.zeros(setting.keys, dtype=torch.bool)
    query, key = no_query.clone(), no_key.clone()
    if which in ("q", "grad"):
        query[bad] = True
        seen, hidden = sees[bad], near[bad]
        if which == "grad":
            return {
                "out": (no_query, no_query), "lse": (no_query, no_query), "dq": (query, query),
                "dk": (seen, hidden), "dv": (seen, hidden),
            }  # fmt: skip
        return {
            "out": (query, query), "lse": (query, query), "dq": (query, query),
            "dk": (seen, hidden), "dv": (seen, seen),
        }  # fmt: skip
    key[bad] = True

    def beside(rows: Tensor, pairs: Tensor) -> Tensor:
        """The keys that rows are paired with, the bad one among them."""
        return (pairs & rows[:, None]).any(0) | key

    seen, hidden = sees[:, bad], near[:, bad]
    if which == "k":
        keys = beside(seen, sees) if bool(seen.any()) else no_key
        return {
            "out": (seen, seen), "lse": (seen, seen), "dq": (seen, hidden),
            "dk": (keys, beside(seen, near)), "dv": (keys, keys),
        }  # fmt: skip
    keys = beside(seen, sees) if bool(seen.any()) else no_key
    return {
        "out": (seen, hidden), "lse": (no_query, no_query), "dq": (seen, hidden),
        "dk": (keys, beside(hidden, near)), "dv": (no_key, no_key),
    }  # fmt: skip


def tensors(setting: Setting, device: torch.device, key_heads: int = 2) -> dict[str, Tensor]:
    batch = 2 if ON_GPU and not setting.bounds_q else 1  # in the interpreter, programs run one after the other
    queries, keys = (setting.tokens, GROUP * key_heads), (setting.keys, key_heads)
    shapes = {"q": queries, "k": keys, "v": keys, "grad": queries}
    return {
        name: torch.randn(batch, *shape, setting.features).to(device, setting.dtype)
        for name, shape in shapes.items()
    }


Attend = Callable[[dict[str, Tensor]], dict[str, Tensor]]


def attention(setting: Setting, backend: str, device: torch.device) -> Attend:
    def attend(made: dict[str, Tensor]) -> dict[str, Tensor]:
        leaves = [made[name].clone().requires_grad_() for name in "qkv"]
        out, lse = flash_attention(*leaves, **setting.options(device), return_lse=True, backend=backend)
        gradients = torch.autograd.grad(out, leaves, made["grad"])
        return dict(zip(RESULTS, (out.detach(), lse.detach().transpose(1, 2)[..., None], *gradients), strict=True))

    return attend


def rotary(setting: Setting, device: torch.device) -> Attend:
    """Attention by one operator with its positions; these turn nothing, so that results are those of attention."""
    from warploom.ops.rotary_attention.api import rotary_attention

    theta = torch.zeros(1, setting.features // 2, device=device)

    def attend(made: dict[str, Tensor]) -> dict[str, Tensor]:
        heads, kv_heads = 2 * GROUP, 2
        qkv = torch.cat([made[name] for name in "qkv"], dim=2).requires_grad_()
        out = rotary_attention(qkv, theta, heads, setting.features**-0.5)
        (gradient,) = torch.autograd.grad(out, qkv, made["grad"])
        dq, dk, dv = gradient.split((heads, kv_heads, kv_heads), dim=2)
        return {"out": out.detach(), "dq": dq, "dk": dk, "dv": dv}

    return attend


def assert_contained(
    attend: Attend, setting: Setting, which: str, number: float, backend: str, made: dict[str, Tensor], usual: Any
) -> None:
    """Results with a bad number differ from the usual where they may, and are NaN where they must be."""
    entry, head = 0, 1
    with_number = made[which].clone()
    with_number[entry, setting.bad, head, 3] = number
    found = attend({**made, which: with_number})
    of_queries, of_keys = slice(head, head + 1), slice(head, head + 1)
    if which in "kv":
        of_queries = slice(head * GROUP, (head + 1) * GROUP)
    else:
        of_keys = slice(head // GROUP, head // GROUP + 1)
    for name, (must, may) in reached(setting, which, backend).items():
        if name not in found:
            continue
        heads = of_keys if name in ("dk", "dv") else of_queries
        reaches = torch.zeros(found[name].shape[:3], dtype=torch.bool)
        reaches[entry, :, heads] = may[:, None]
        different = (found[name] != usual[name]).any(-1).cpu()  # NaN differs from all
        assert not (different & ~reaches).any(), f"{name}: {(different & ~reaches).nonzero()[:5].tolist()}"
        if math.isnan(number):
            lost = must[:, None] & ~found[name][entry, :, heads].isnan().any(-1).cpu()
            assert not lost.any(), f"{name}: no NaN in {lost.nonzero()[:5].tolist()}"


def check(attend: Attend, setting: Setting, which: str, backend: str, made: dict[str, Tensor]) -> None:
    usual = attend(made)
    for number in (math.nan, math.inf):
        assert_contained(attend, setting, which, number, backend, made, usual)


@pytest.mark.sample(2)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("which", ["q", "k", "v", "grad"])
def test_attention(which: str, name: str, backend: str, device: torch.device) -> None:
    setting = SETTINGS[name]
    check(attention(setting, backend, device), setting, which, backend, tensors(setting, device))


@pytest.mark.skipif(not HAS_TRITON, reason="needs Triton")
@pytest.mark.parametrize("name", ["causal", *(("small", "split", "terms") if ON_GPU else ())])
@pytest.mark.parametrize("which", ["q", "k", "v", "grad"])
def test_rotary_attention(which: str, name: str, device: torch.device) -> None:
    setting = SETTINGS[name]
    check(rotary(setting, device), setting, which, "triton", tensors(setting, device))


class LinearCall(NamedTuple):
    """A call of linear attention and the token of it that goes bad."""

    tokens: int
    bad: int
    bounds: tuple[int, ...] = ()  # of packed sequences
    causal: bool = True
    chunk: int = 2**20
    features: int = 8
    dtype: torch.dtype = torch.float32
    encoding: str = "none"

    def sees(self, more: int = 0) -> Tensor:
        """Which tokens (N, N) each sees, and so many behind it."""
        n = torch.arange(self.tokens)
        bounds = torch.tensor(self.bounds or (0, self.tokens))
        sequence = torch.searchsorted(bounds, n, right=True)
        seen = n[:, None] + more >= n if self.causal else torch.ones(self.tokens, self.tokens, dtype=torch.bool)
        return seen & (sequence[:, None] == sequence)

    def sequence(self) -> int:
        return sum(bound <= self.bad for bound in self.bounds[1:])


NEAR_IN_A_CALL = 63 if ON_GPU else 15
"""Tokens beyond what a token sees that may be in its tile."""
LINEAR_CALLS = {
    "product": LinearCall(37, 20, dtype=torch.float16, encoding="rotate"),
    "full": LinearCall(20, 7, causal=False),
    "chunks": LinearCall(40, 20, chunk=16),
    "packed": LinearCall(28, 14, bounds=(0, 5, 23, 28)),
    "steps": LinearCall(3, 1, encoding="rotate"),
}
if ON_GPU:
    LINEAR_CALLS |= {
        "hopper": LinearCall(900, 400, features=128, dtype=torch.bfloat16),
        "hopper_chunks": LinearCall(900, 400, chunk=256, features=64, dtype=torch.bfloat16),
        "long_packed": LinearCall(3000, 1500, bounds=PACKING, features=64, dtype=torch.bfloat16),
    }
IN_A_CALL = ("q", "k", "v", "decay", "grad")


def reached_in_a_call(call: LinearCall, which: str, near: int) -> dict[str, tuple[Tensor, Tensor]]:
    """Of each result, the tokens that must and those that may be reached by a number in one of ``which``."""
    none = torch.zeros(call.tokens, dtype=torch.bool)
    own = none.clone()
    own[call.bad] = True
    sees, hidden = call.sees(), call.sees(near)
    later, earlier = (sees[:, call.bad], hidden[:, call.bad]), (sees[call.bad], hidden[call.bad])
    nowhere, itself = (none, none), (own, own)
    if which == "decay":  # it stands between tokens before it and those from it on
        return {
            "out": later,
            "dq": later,
            "dk": (earlier[0] & ~own, earlier[1]),
            "dv": (earlier[0] & ~own, earlier[1]),
        }
    return {
        "q": {"out": itself, "dq": nowhere, "dk": earlier, "dv": earlier},
        "k": {"out": later, "dq": later, "dk": nowhere, "dv": itself},
        "v": {"out": later, "dq": later, "dk": itself, "dv": nowhere},
        "grad": {"out": nowhere, "dq": itself, "dk": earlier, "dv": earlier},
    }[which]


@pytest.mark.sample(3)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", LINEAR_CALLS)
@pytest.mark.parametrize("which", IN_A_CALL)
def test_linear_attention(
    which: str, name: str, backend: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    call, heads, head = LINEAR_CALLS[name], 2, 1
    if which == "decay" and not call.causal:
        pytest.skip("it has no decays")
    if HAS_TRITON:
        from warploom.ops.linear_attention import engine

        monkeypatch.setattr(engine, "chunk_of", lambda *sizes: call.chunk)
    batch = 1 if call.bounds or not ON_GPU else 2
    shape = (batch, call.tokens, heads, call.features)
    made = {each: torch.randn(shape).to(device, call.dtype) for each in ("q", "k", "v", "grad")}
    options: dict[str, Any] = {"encoding": call.encoding}
    if call.encoding != "none":
        options["theta"] = torch.rand(call.features // 2, device=device)
    if call.causal:
        made["decay"] = -0.1 * torch.rand(shape[:3], device=device)
        options["return_state"] = True
    if call.bounds:
        options["cu_seqlens"] = torch.tensor(call.bounds, device=device)

    def attend(given: dict[str, Tensor]) -> tuple[dict[str, Tensor], Tensor | None]:
        leaves = {each: given[each].clone().requires_grad_() for each in "qkv"}
        results = linear_attention(
            **leaves, **options, decay=given.get("decay"), causal=call.causal, backend=backend
        )
        out, state = (results, None) if isinstance(results, Tensor) else results
        dq, dk, dv = torch.autograd.grad(out, list(leaves.values()), given["grad"])
        return {"out": out.detach(), "dq": dq, "dk": dk, "dv": dv}, None if state is None else state.detach()

    usual, usual_state = attend(made)
    for number in (math.nan, -math.inf):  # an infinite decay above 0 is refused
        spoilt = made[which].clone()
        spoilt[(0, call.bad, head) if which == "decay" else (0, call.bad, head, 3)] = number
        found, state = attend({**made, which: spoilt})
        for each, (must, may) in reached_in_a_call(call, which, NEAR_IN_A_CALL).items():
            reaches = torch.zeros(shape[:3], dtype=torch.bool)
            rows = slice(*call.bounds[call.sequence() : call.sequence() + 2]) if call.bounds else slice(None)
            reaches[0, rows, head] = may[rows] if backend == "triton" else True
            different = (found[each] != usual[each]).any(-1).cpu()
            assert not (different & ~reaches).any(), f"{each}: {(different & ~reaches).nonzero()[:5].tolist()}"
            if math.isnan(number):
                lost = must & ~found[each][0, :, head].isnan().any(-1).cpu()
                assert not lost.any(), f"{each}: no NaN in {lost.nonzero()[:5].tolist()}"
        if state is None or usual_state is None:
            continue
        reaches = torch.zeros(state.shape[:2], dtype=torch.bool)
        if which in ("k", "v", "decay"):
            reaches[call.sequence(), head] = True
        different = (state != usual_state).flatten(2).any(-1).cpu()
        assert not (different & ~reaches).any(), "state"
        if math.isnan(number) and which in ("k", "v", "decay"):
            assert state[call.sequence(), head].isnan().any()


@pytest.mark.gpu
@pytest.mark.parametrize("features", [64, 128, 256])
@pytest.mark.parametrize("which", ["q", "k", "v", "grad"])
def test_kernels_for_hopper(which: str, features: int, launched: list[str], device: torch.device) -> None:
    setting = Setting(2100, 2100, None, 0, 1000, features=features)
    made = tensors(setting, device, key_heads=16)
    check(attention(setting, "triton", device), setting, which, "triton", made)
    assert "hopper_forward_kernel" in launched
    assert {"hopper_query_kernel", "hopper_backward_kernel"} & set(launched)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tokens", [8, 140])
def test_what_runs_by_itself_loses_no_row(
    tokens: int, dtype: torch.dtype, causal: bool, device: torch.device
) -> None:
    """On a CPU this is PyTorch's own attention for finite numbers."""
    for which in range(3):
        for number in (math.nan, math.inf):
            if device.type == "cuda" and (dtype, number) == (torch.float32, math.inf):
                continue  # of its terms in bfloat16 the second is NaN, as the README says under "Limits"
            made = [torch.randn(2, tokens, 2, 32).to(device, dtype) for _ in range(3)]
            made[which][1, tokens // 2, 0, 3] = number
            out = flash_attention(*made, causal=causal)
            expected = reference.flash_attention(*made, causal=causal)
            rows = expected.isfinite().all(-1)
            must = ~rows
            if (
                which == 2 and causal
            ):  # 0 · NaN of a hidden pair is the definition's arithmetic, and need not be here
                must[:, : tokens // 2] = False
            assert not out[must].isfinite().all(-1).any()
            if which < 2:
                assert out[rows].isfinite().all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_query_without_keys_is_empty_whatever_it_holds(backend: str, device: torch.device) -> None:
    q, k = torch.randn(1, 9, 1, 16).to(device), torch.randn(1, 4, 1, 16).to(device)
    q[0, 2] = math.nan
    out, lse = flash_attention(q, k, k, causal=True, return_lse=True, backend=backend)
    assert (out[0, :5] == 0).all()
    assert (lse[0, 0, :5] == -math.inf).all()
    assert out[0, 5:].isfinite().all()
