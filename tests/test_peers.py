"""Other libraries' functions are called right: stand-ins of the same signatures compute what the definitions do."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch

from warploom.ops.flash_attention import bench as flash_bench
from warploom.ops.flash_attention import peers as flash_peers
from warploom.ops.flash_attention import reference as attention
from warploom.ops.linear_attention import bench as linear_bench
from warploom.ops.linear_attention import peers as linear_peers
from warploom.ops.linear_attention import reference as linear
from warploom.ops.lrpe import reference as lrpe
from warploom.ops.spec import Unsupported
from warploom.testing.conformance import make_inputs

Tensor = torch.Tensor


@pytest.fixture(autouse=True)
def packages(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Puts the stand-ins where the libraries would be; returns the options of their calls."""
    calls: list[dict[str, Any]] = []

    def offer(name: str, **functions: Any) -> None:
        module = ModuleType(name)
        vars(module).update(functions)
        monkeypatch.setitem(sys.modules, name, module)

    def flash_attn_func(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, None]:
        calls.append(dict(options))
        return attend(q, k, v, **options), None

    def flash_attn_varlen_func(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, None]:
        calls.append(dict(options))
        packed = options.get("cu_seqlens_q") is not None
        assert q.dim() == (3 if packed else 4)
        on_rows = k.dim() == 3
        q, k, v = (x[None] if x.dim() == 3 else x for x in (q, k, v))
        bounds = ("cu_seqlens_q", "cu_seqlens_k") if on_rows else ("cu_seqlens_q",)
        more = {name: options[name] for name in (*bounds, "seqused_k") if options.get(name) is not None}
        if options.get("page_table") is not None:
            more["block_table"] = options["page_table"]
        if "cu_seqlens_q" in more:
            lengths = more["cu_seqlens_q"].diff()
            assert options["max_seqlen_q"] == int(lengths.max())
        out = attend(q, k, v, **{**options, **more})
        return (out[0] if packed else out), None

    def attend(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        names = ("causal", "cu_seqlens_q", "cu_seqlens_k", "seqused_k", "block_table")
        given = {name: options[name] for name in names if options.get(name) is not None}
        if options.get("window_size", (None, None)) != (None, None):
            given["window"] = options["window_size"]
        given |= {"softcap": options["softcap"]} if options.get("softcap") else {}
        if options.get("learnable_sink") is not None:
            given["sink"] = options["learnable_sink"]
        out = attention.flash_attention(q, k, v, **given)
        return out[0] if isinstance(out, tuple) else out

    def simple_gla(
        q: Tensor, k: Tensor, v: Tensor, g: Tensor | None = None, g_gamma: Tensor | None = None, *,
        scale: float | None, initial_state: Tensor | None, output_final_state: bool,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        calls.append({"g": g, "g_gamma": g_gamma})
        options: dict[str, Any] = {"decay": g_gamma if g is None else g, "initial_state": initial_state}
        out, state = linear.linear_attention(q, k, v, scale=scale, return_state=True, **options)
        return out, state if output_final_state else None

    def rotary_embedding(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        one, two = x.double().chunk(2, -1)
        cosine, sine = cosine[:, None].double(), sine[:, None].double()
        return torch.cat((one * cosine - two * sine, one * sine + two * cosine), -1).to(x.dtype)

    offer("flash_attn")
    offer("flash_attn.cute", flash_attn_func=flash_attn_func, flash_attn_varlen_func=flash_attn_varlen_func)
    offer("fla.ops.simple_gla", chunk_simple_gla=simple_gla, fused_recurrent_simple_gla=simple_gla)
    offer("fla.modules.rotary", rotary_embedding=rotary_embedding)
    for module in (flash_peers, linear_peers):
        monkeypatch.setattr(module, "need_cuda", lambda what="": None)
    return calls


_ATTENTION: dict[str, Any] = {
    "batch": 2, "n": 24, "heads": 4, "key_heads": 2, "head_dim": 16, "dtype": "float64", "causal": True,
}  # fmt: skip


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"causal": False},
        {"window": [5, None]},
        {"softcap": 2.0},
        {"sink": True},
        {"seqused_k": [24, 24]},
        {"sink": True, "window": [3, None]},
        {"packing": "two", "batch": 1, "n": 256},
    ],
    ids=str,
)
def test_flash_attention_4_gets_what_a_case_has(change: dict[str, Any]) -> None:
    case = {**_ATTENTION, **change}
    inputs = make_inputs(flash_bench.OPERATOR, case, torch.device("cpu"))
    call = flash_peers.PROVIDERS["flash_attn_4"](case)
    expected = flash_bench.OPERATOR.reference(**inputs)
    torch.testing.assert_close(call(**inputs), expected)


def test_only_the_backward_is_deterministic(packages: list[dict[str, Any]]) -> None:
    inputs = make_inputs(flash_bench.OPERATOR, _ATTENTION, torch.device("cpu"))
    call = flash_peers.PROVIDERS["flash_attn_4_deterministic"](_ATTENTION)
    call(**inputs)
    assert packages[-1]["deterministic"] is True
    with torch.no_grad(), pytest.raises(Unsupported, match="backward"):
        call(**inputs)


@pytest.mark.parametrize("cache", ["dense", "lengths", "pages"])
def test_flash_attention_4_reads_caches_where_they_lie(cache: str, packages: list[dict[str, Any]]) -> None:
    case = {**_ATTENTION, "n": 1, "m": 512, "cache": cache}
    (bench,) = (bench for bench in flash_bench.BENCHES if bench.name == "attention-decode")
    inputs = make_inputs(bench.operator, case, torch.device("cpu"))
    found = flash_peers.DECODERS["flash_attn_4"](case)(**inputs)
    torch.testing.assert_close(found, bench.operator.reference(**inputs))
    assert (packages[-1]["page_table"] is not None) == (cache == "pages")
    assert packages[-1]["num_splits"] == 0
    with pytest.raises(Unsupported, match="256 features"):
        flash_peers.DECODERS["flash_attn_4"](case | {"head_dim": 576})


@pytest.mark.parametrize("paged", [False, True])
def test_flash_attention_4_serves_a_batch(paged: bool) -> None:
    (bench,) = (bench for bench in flash_bench.BENCHES if bench.name == "attention-serving")
    mix = "prompt of 70, 3 decoding"
    counts, used = zip(*flash_peers.MIXES[mix])
    case = {**_ATTENTION, "batch": 1, "mix": mix, "n": sum(counts), "m": max(used) // 8 * 8}
    case |= {"page_size": 8} if paged else {}
    inputs = make_inputs(bench.operator, case, torch.device("cpu"))
    found = flash_peers.SERVERS["flash_attn_4"](case)(**inputs)
    torch.testing.assert_close(found, bench.operator.reference(**inputs))


_LINEAR: dict[str, Any] = {"batch": 2, "n": 40, "heads": 2, "head_dim": 16, "dtype": "float64", "theta": "vector"}


@pytest.mark.parametrize("encoding", ["none", "rotate"])
@pytest.mark.parametrize(
    "change",
    [
        {},
        {"decay": "head"},
        {"decay": "head", "decay_gradient": True},
        {"decay": "token"},
        {"decay": "head", "n": 1, "offset": 4096, "initial_state": True, "return_state": True},
    ],
    ids=str,
)
def test_fla_gets_what_a_case_has(encoding: str, change: dict[str, Any], packages: list[dict[str, Any]]) -> None:
    case = {**_LINEAR, **change, "encoding": encoding}
    if encoding == "none":
        case.pop("offset", None)
    inputs = make_inputs(linear_bench.OPERATOR, case, torch.device("cpu"))
    found = linear_peers.PROVIDERS["fla"](case)(**inputs)
    torch.testing.assert_close(found, linear_bench.OPERATOR.reference(**inputs))
    own = case.get("decay") == "head" and not case.get("decay_gradient")
    assert (packages[-1]["g_gamma"] is not None) == own
    assert (packages[-1]["g"] is not None) == ("decay" in case and not own)


def test_the_rotation_of_the_stand_in_is_the_definition_s() -> None:
    x, theta = torch.randn(1, 7, 2, 8, dtype=torch.float64), torch.rand(4, dtype=torch.float64)
    phi = torch.arange(7, dtype=torch.float64)[:, None] * theta
    rotate = sys.modules["fla.modules.rotary"].rotary_embedding
    expected = lrpe.lrpe_rotate(x, theta)
    torch.testing.assert_close(rotate(x, phi.cos(), phi.sin()), expected)
