"""`flash_attention` with ``out=``: results go where the caller says."""

from typing import Any

import pytest
import torch
from refusals import Wrong, assert_refused, each, ones

from warploom import ArgumentError, DtypeError, ShapeError, flash_attention
from warploom.runtime.backend import HAS_TRITON

Tensor = torch.Tensor

BACKENDS = ("torch", "auto", "triton") if HAS_TRITON else ("torch", "auto")
backends = pytest.mark.parametrize("backend", BACKENDS)


def inputs(device: torch.device, dtype: torch.dtype = torch.float32, **options: Any) -> dict[str, Any]:
    made = {name: torch.randn(1, 23, heads, 16).to(device, dtype) for name, heads in zip("qkv", (4, 2, 2))}
    return {**made, "causal": True, **options}


def places(device: torch.device, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Tensors (1, 23, 4, 16) of NaN in other memory orders, with gaps, and at an odd address."""
    whole = torch.full((4, 40, 64), torch.nan, device=device, dtype=dtype)
    flat = torch.full((23 * 64 + 1,), torch.nan, device=device, dtype=dtype)
    return {
        "dense": torch.full((1, 23, 4, 16), torch.nan, device=device, dtype=dtype),
        "heads first": whole[:, :23, :16].transpose(0, 1)[None],
        "gaps": whole[:, 5:28, ::4].transpose(0, 1)[None],
        "odd address": flat[1:].view(1, 23, 4, 16),
    }


@backends
@pytest.mark.parametrize("place", ["dense", "heads first", "gaps", "odd address"])
@pytest.mark.parametrize("bounds", [None, [0, 5, 5, 20]])
def test_results_are_those_of_a_call_without(
    bounds: list[int] | None, place: str, backend: str, device: torch.device
) -> None:
    call = inputs(device, cu_seqlens=None if bounds is None else torch.tensor(bounds, device=device))
    out = places(device)[place]
    around = out._base.clone() if out._base is not None else None
    expected, expected_lse = flash_attention(**call, return_lse=True, backend=backend)
    found, lse = flash_attention(**call, out=out, return_lse=True, backend=backend)
    assert found is out
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(lse, expected_lse)
    assert flash_attention(**call, out=out.fill_(torch.nan), backend=backend) is out
    torch.testing.assert_close(out, expected)
    if around is not None:  # nothing else is written
        out.fill_(torch.nan)
        assert torch.equal(out._base.isnan(), around.isnan())


@pytest.mark.skipif(not HAS_TRITON, reason="needs Triton")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_cache_and_few_queries(dtype: torch.dtype, device: torch.device) -> None:
    """Kernels for decoding, whole and in chunks that are joined."""
    cache = {name: torch.randn(2, 700, 1, 16).to(device, dtype) for name in "kv"}
    q = torch.randn(2, 1, 4, 16).to(device, dtype)
    used = torch.tensor([700, 3], dtype=torch.int32, device=device)
    for rest in ({"q": q}, {"q": q.transpose(0, 1), "cu_seqlens_q": torch.arange(3, device=device)}):
        call = {**cache, **rest, "seqused_k": used, "causal": True}
        out = torch.full_like(rest["q"], torch.nan)
        assert torch.equal(
            flash_attention(**call, out=out, backend="triton"), flash_attention(**call, backend="triton")
        )


@backends
def test_writing_counts_as_a_change(backend: str, device: torch.device) -> None:
    call, out = inputs(device), torch.ones(1, 23, 4, 16, device=device)
    x = torch.ones(1, 23, 4, 16, device=device, requires_grad=True)
    product = (x * out).sum()
    flash_attention(**call, out=out, backend=backend)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


@pytest.mark.skipif(not HAS_TRITON, reason="needs Triton")
@pytest.mark.seldom(3, 1)
def test_compiled(device: torch.device) -> None:
    def step(out: Tensor, **call: Any) -> Tensor:
        return flash_attention(**call, out=out, backend="triton") + 1

    call, out = inputs(device), torch.full((1, 23, 4, 16), torch.nan, device=device)
    found = torch.compile(step, backend="aot_eager", fullgraph=True)(out, **call)
    torch.testing.assert_close(out, flash_attention(**call, backend="triton"))
    assert torch.equal(found, out + 1)


GOOD: dict[str, Any] = {
    "q": ones(2, 5, 4, 8),
    "k": ones(2, 7, 2, 8),
    "v": ones(2, 7, 2, 6),
    "out": ones(2, 5, 4, 6),
}
WRONG: tuple[Wrong, ...] = (
    ({"out": ones(2, 5, 4, 8)}, ShapeError, "out", "(2, 5, 4, 6)", "(2, 5, 4, 8)"),
    ({"out": ones(2, 5, 4, 6, dtype=torch.float16)}, DtypeError, "out", "float32", "float16"),
    ({"out": 1.0}, DtypeError, "out", "a tensor", "float"),
    (
        {"out": ones(2, 5, 4, 6).requires_grad_()},
        ArgumentError,
        "out",
        "without requires_grad",
        "requires_grad=True",
    ),
    ({"k": ones(2, 7, 2, 8).requires_grad_()}, ArgumentError, "k", "without requires_grad", "requires_grad=True"),
)


@each(WRONG)
def test_wrong_calls_are_refused(wrong: Wrong, device: torch.device) -> None:
    assert_refused(flash_attention, GOOD, wrong, device)


def test_an_expanded_tensor_is_not_written(device: torch.device) -> None:
    with pytest.raises(ArgumentError, match="out must be with memory for every element; got an expanded tensor"):
        flash_attention(**inputs(device), out=torch.ones(1, 1, 4, 16, device=device).expand(1, 23, 4, 16))


@pytest.mark.skipif(not HAS_TRITON, reason="needs Triton")
def test_an_input_is_not_written(device: torch.device) -> None:
    call = inputs(device)
    with pytest.raises(ArgumentError, match="out must be memory of its own, not that of q"):
        flash_attention(**call, out=call["q"], backend="triton")
