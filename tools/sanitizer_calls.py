"""Small calls that together launch every kernel of the package, for `tools/sanitize.py`.

Each belongs to a group, an operator's folder, whose kernels have names of their own. Sizes are the smallest that a
kernel takes: a run under a sanitizer is 10 to 50 times slower. Those for Hopper are chosen for 132 multiprocessors.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from warploom import (
    append_kv,
    delta_attention,
    flash_attention,
    linear_attention,
    lrpe_cosine,
    lrpe_rotate,
    short_convolution,
    tpa_attention,
    tpa_decode,
)

__all__ = ["CALLS", "Call"]

Tensor = torch.Tensor
Inputs = dict[str, Any]
HALF = torch.bfloat16


class Call(NamedTuple):
    """A call of a public function, and of its gradients."""

    name: str
    """No other call has it."""
    group: str
    function: Callable[..., Any]
    inputs: Callable[[], Inputs]
    """On the CPU; tensors with ``requires_grad`` get gradients."""

    def run(self, device: torch.device, read_results: bool = False) -> None:
        """Make the inputs on a device, call the function, and its backward where an input wants a gradient.

        ``read_results``: copy what was computed to the host, and the outputs back before the backward reads them.
        A tool that follows which memory has been written then says once of a result that it has not, and not at
        every load of it by the backward.
        """
        generator = torch.Generator().manual_seed(1)
        inputs = {name: _moved(value, device) for name, value in self.inputs().items()}
        with torch.autograd.set_multithreading_enabled(False):  # what is set for this thread holds in the backward
            outputs = self.function(**inputs)
            outputs = (outputs,) if isinstance(outputs, Tensor) else outputs or ()
            if read_results:
                for output in outputs:
                    output.data.copy_(output.data.cpu())
            wanted = [value for value in inputs.values() if isinstance(value, Tensor) and value.requires_grad]
            if wanted:
                grads = [torch.randn(o.shape, generator=generator).to(o.dtype).to(device) for o in outputs]
                found = torch.autograd.grad(outputs, wanted, grads)
                if read_results:
                    for gradient in found:
                        gradient.cpu()


def _moved(value: Any, device: torch.device) -> Any:
    if not isinstance(value, Tensor):
        return value
    return value.detach().to(device).requires_grad_(value.requires_grad)


def _random(*shape: int, dtype: torch.dtype = torch.float32, grad: bool = True) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).to(dtype).requires_grad_(grad)


# ----------------------------------------------------------------------------------------------------------
# Inputs
# ----------------------------------------------------------------------------------------------------------


def _attention(
    n: int, m: int, heads: int, d: int, dtype: torch.dtype = HALF, key_heads: int | None = None, e: int = 0,
    **options: Any,
) -> Inputs:  # fmt: skip
    """Queries, keys and values, all of which want gradients."""
    q = _random(1, n, heads, d, dtype=dtype)
    k, v = (_random(1, m, key_heads or heads, features, dtype=dtype) for features in (d, e or d))
    return {"q": q, "k": k, "v": v, "backend": "triton", **options}


def _masked(n: int, m: int) -> Inputs:
    """Queries that a mask tells what to see, with a bias and slopes."""
    mask = (torch.arange(n)[:, None] // 50 == torch.arange(m) // 50)[None, None]
    bias = _random(1, 2, n, m, dtype=torch.float32)
    return {**_attention(n, m, 4, 48, key_heads=2), "mask": mask, "bias": bias[:, :1], "alibi": torch.rand(4)}


def _jvp(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, ...]:
    """Flash attention in forward mode."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return flash_attention(q, k, v, return_lse=True, **options)

    q, k, v = (x.detach() for x in (q, k, v))
    primals, tangents = torch.func.jvp(attend, (q, k, v), (q, k, v))[:2]
    return *primals, *tangents


def _tangents(n: int, m: int, **options: Any) -> Inputs:
    """Queries, keys and values, none of which wants a gradient."""
    inputs = _attention(n, m, 4, 48, key_heads=2, **options)
    return {name: x.detach() if isinstance(x, Tensor) else x for name, x in inputs.items()}


def _appended(page_size: int | None, dtype: torch.dtype = HALF) -> Inputs:
    """New tokens of three sequences, one of which has none, and queries to be rotated."""
    new = {name: _random(1, 33, heads, 48, dtype=dtype, grad=False) for name, heads in zip("qkv", (4, 2, 2))}
    rows = (3, 160) if page_size is None else (30, page_size)
    caches = {f"{name}_cache": torch.zeros(*rows, 2, 48, dtype=dtype) for name in "kv"}
    bounds, used = (torch.tensor(x, dtype=torch.int32) for x in ([0, 29, 29, 30], [150, 4, 160]))
    table = None if page_size is None else torch.arange(30, dtype=torch.int32).view(3, 10)
    where = {"cu_seqlens": bounds, "seqused_k": used, "block_table": table, "backend": "triton"}
    return {**new, **caches, "theta": _random(20, grad=False), **where}


def _encoding(
    n: int, d: int, dtype: torch.dtype = torch.float32, heads: int = 2, batch: int = 1, theta_grad: bool = True,
    frequencies: int | None = None, **options: Any,
) -> Inputs:  # fmt: skip
    """Vectors and frequencies."""
    x, theta = _random(batch, n, heads, d, dtype=dtype), _random(heads, frequencies or d // 2, grad=theta_grad)
    return {"x": x, "theta": theta, "backend": "triton", **options}


def _factors(
    n: int, m: int, d: int, rank: int, dtype: torch.dtype, grad: bool, heads: int = 4, batch: int = 1,
    **options: Any,
) -> Inputs:  # fmt: skip
    """The factors of tensor-product attention."""
    shapes = {
        "aq": (batch, n, heads, 3), "ak": (batch, m, heads, rank), "av": (batch, m, heads, rank),
        "bq": (batch, n, 3, d), "bk": (batch, m, rank, d), "bv": (batch, m, rank, d),
    }  # fmt: skip
    factors: Inputs = {name: _random(*shape, dtype=dtype, grad=grad) for name, shape in shapes.items()}
    return {**factors, "backend": "triton", **options}


def _latent(n: int, page: int, pages: int, heads: int) -> Inputs:
    """Packed queries of two sequences, many and one, on a latent cache in pages."""
    tensors = _on_cache(n, 576, page, pages, heads, 1)
    return {**tensors, "v": tensors["k"][..., :512]}


def _on_cache(n: int, d: int, page: int, pages: int, heads: int = 8, key_heads: int = 2) -> Inputs:
    """Packed queries of two sequences, many and one, on keys in pages."""
    rows = {"q": (1, n, heads, d), "k": (pages, page, key_heads, d), "v": (pages, page, key_heads, d)}
    tensors: Inputs = {name: _random(*shape, dtype=HALF, grad=False) for name, shape in rows.items()}
    tensors["cu_seqlens_q"] = torch.tensor([0, n - 1, n])
    tensors["seqused_k"] = torch.tensor([n, page + 1])
    tensors["block_table"] = torch.arange(pages, dtype=torch.int32).view(2, -1)
    return {**tensors, "causal": True, "backend": "triton"}


def _delta(
    n: int, d: int, dtype: torch.dtype, decay: int, heads: int = 2, grad: bool = True, **options: Any
) -> Inputs:
    """Tensors of the delta rule, with decays of so many axes; without any if there are none."""
    rows = (1, n, heads, d)
    q, k = (_random(*rows, dtype=dtype, grad=grad) for _ in range(2))
    v = _random(1, n, 2 * heads, d, dtype=dtype, grad=grad)
    beta, state = torch.full((1, n, 2 * heads), 0.5), _random(1, 2 * heads, d, d, grad=grad)
    decays = torch.full((1, n, 2 * heads, d)[:decay], -0.1)
    gates = {"beta": beta.requires_grad_(grad), "decay": decays.requires_grad_(grad) if decay else None}
    states = {} if "cu_seqlens" in options else {"initial_state": state}
    return {"q": q, "k": k, "v": v, **gates, **states, "normalize": True, "backend": "triton", **options}


def _convolution(n: int, dtype: torch.dtype, **options: Any) -> Inputs:
    """Tokens of 65 channels with everything that a convolution takes."""
    x, weight, bias = _random(1, n, 65, dtype=dtype), _random(65, 4), _random(65)
    state = _random(3 if "cu_seqlens" in options else 1, 65, 3)
    more = {"activation": "silu", "return_state": True, "backend": "triton"}
    return {"x": x, "weight": weight, "bias": bias, "initial_state": state, **more, **options}


def _rotary(qkv: Tensor, theta: Tensor) -> Tensor:
    """Attention whose queries and keys are rotated first, as layers have it."""
    from warploom.ops.rotary_attention.api import rotary_attention

    return rotary_attention(qkv, theta, qkv.shape[2] // 3, 0.1)


def _projected(n: int, heads: int, d: int) -> Inputs:
    """Queries, keys and values in one tensor, and frequencies."""
    return {"qkv": _random(1, n, 3 * heads, d, dtype=HALF), "theta": _random(1, d // 2)}


def _stream(x: Tensor) -> None:
    """The kernel that sets the memory-bound limit of a bench."""
    from warploom.bench.stream_kernel import stream

    out, scratch = torch.empty_like(x), torch.empty(8, device=x.device)
    stream((x, x), (out,), scratch, 512, 4)
    stream((x,), (), scratch, 512, 4)


def _sums(rows: Tensor) -> None:
    """Add up what ranks sent for each row."""
    from warploom.distributed.kernels import sum_rows

    order, ends = (torch.tensor(x, dtype=torch.int32, device=rows.device) for x in ([0, 3, 1, 2, 4], [0, 2, 2, 5]))
    sum_rows(rows, order, ends, torch.empty_like(rows[:3]))


_BOUNDS = torch.tensor([0, 33, 33, 70])

_rotate, _cosine = functools.partial(_encoding, d=64), functools.partial(_encoding, d=32)
_few = functools.partial(_attention, heads=1, d=64)
_many = functools.partial(_attention, heads=67, d=64)  # tiles for half of an H100's multiprocessors
_train = functools.partial(_factors, grad=True)
_decode = functools.partial(_factors, grad=False)


def _linear(
    n: int, dtype: torch.dtype = torch.float32, d: int = 32, learned: bool = True, grad: bool = True,
    **options: Any,
) -> Inputs:  # fmt: skip
    """Queries, keys, values, frequencies, and a decay of each head; the last two want gradients if ``learned``."""
    q, k, v = (_random(1, n, 2, d, dtype=dtype, grad=grad) for _ in range(3))
    theta = _random(d if options.get("encoding") == "cosine" else d // 2, grad=learned)
    decay = torch.tensor([-0.01, -0.5], requires_grad=learned)
    options = {"encoding": "rotate", **options}
    return {"q": q, "k": k, "v": v, "theta": theta, "decay": decay, "backend": "triton", **options}


CALLS: tuple[Call, ...] = tuple(
    Call(name, group, function, functools.partial(make, **options))
    for group, function, name, make, options in (
        ("lrpe", lrpe_rotate, "rotate", _rotate, {"n": 13, "batch": 3}),
        ("lrpe", lrpe_rotate, "rotate-interleaved", _rotate, {"n": 13, "dtype": HALF, "interleaved": True}),
        ("lrpe", lrpe_cosine, "cosine-grid", _cosine, {"n": 13, "grid": (2, 2, 3), "prefix": 1, "frequencies": 11}),
        ("lrpe", lrpe_cosine, "cosine-packed", _cosine, {"n": 70, "dtype": HALF, "cu_seqlens": _BOUNDS}),
        ("lrpe", lrpe_rotate, "softmax-one-part", _rotate, {"n": 40, "activation": "softmax_sequence"}),
        ("lrpe", lrpe_rotate, "softmax-packed", _rotate,
         {"n": 70, "activation": "softmax_sequence", "cu_seqlens": _BOUNDS}),
        ("lrpe", lrpe_rotate, "softmax-parts", _rotate,
         {"n": 600, "dtype": HALF, "activation": "softmax_sequence", "theta_grad": False}),
        ("lrpe", lrpe_cosine, "softmax-parts-theta", _cosine,
         {"n": 600, "dtype": HALF, "activation": "softmax_sequence"}),
        ("lrpe", lrpe_cosine, "hopper-softmax-one-part", _cosine,
         {"n": 40, "d": 64, "dtype": HALF, "activation": "softmax_sequence", "theta_grad": False}),
        ("lrpe", lrpe_rotate, "hopper-softmax-parts", _rotate,
         {"n": 600, "d": 128, "dtype": HALF, "activation": "softmax_sequence", "theta_grad": False}),
        ("flash_attention", flash_attention, "float32", _few, {"n": 70, "m": 90, "d": 16, "dtype": torch.float32}),
        ("flash_attention", flash_attention, "packed", _few,
         {"n": 70, "m": 70, "heads": 4, "key_heads": 2, "d": 24, "causal": True, "cu_seqlens_q": _BOUNDS}),
        ("flash_attention", flash_attention, "split", _few, {"n": 70, "m": 2500, "window": (2500, 2500)}),
        ("flash_attention", flash_attention, "few", _few, {"n": 70, "m": 90, "causal": True, "return_lse": True}),
        ("flash_attention", flash_attention, "terms", _few, {"n": 1100, "m": 1030, "dtype": torch.float32}),
        ("flash_attention", flash_attention, "hopper", _many, {"n": 140, "m": 200, "causal": True}),
        ("flash_attention", flash_attention, "hopper-full", _many, {"n": 140, "m": 70, "d": 128}),
        ("flash_attention", flash_attention, "hopper-together", _many, {"n": 140, "m": 1000, "causal": True}),
        ("flash_attention", flash_attention, "hopper-wide", _many, {"n": 140, "m": 140, "d": 256, "causal": True}),
        ("flash_attention", flash_attention, "hopper-pieces", _many,
         {"n": 140, "m": 200, "d": 192, "e": 128, "causal": True}),
        ("flash_attention", flash_attention, "hopper-packed", _many,
         {"n": 1100, "m": 1100, "d": 128, "causal": True, "cu_seqlens_q": torch.tensor([0, 500, 1100])}),
        ("flash_attention", flash_attention, "hopper-split", _few, {"n": 2100, "m": 9000}),
        ("flash_attention", flash_attention, "hopper-window", _many,
         {"n": 300, "m": 400, "causal": True, "window": (100, None), "softcap": 20.0, "sink": _random(67)}),
        ("flash_attention", flash_attention, "hopper-cache", _on_cache,
         {"n": 300, "d": 128, "page": 128, "pages": 8}),
        ("flash_attention", flash_attention, "latent", _latent, {"n": 70, "page": 16, "pages": 100, "heads": 16}),
        ("flash_attention", flash_attention, "hopper-latent", _latent,
         {"n": 70, "page": 16, "pages": 200, "heads": 40}),
        ("append_kv", append_kv, "append-pages", _appended, {"page_size": 16}),
        ("append_kv", append_kv, "append-rows", _appended, {"page_size": None, "dtype": torch.float32}),
        ("flash_attention", flash_attention, "masked", _masked, {"n": 140, "m": 270}),
        ("flash_attention", flash_attention, "hopper-slopes", _attention,
         {"n": 140, "m": 270, "heads": 4, "key_heads": 2, "d": 128, "causal": True, "alibi": torch.rand(4)}),
        ("flash_attention", flash_attention, "hopper-bias", _attention,
         {"n": 140, "m": 272, "heads": 4, "key_heads": 2, "d": 128, "causal": True,
          "bias": _random(1, 4, 140, 272, dtype=HALF)}),
        ("flash_attention", flash_attention, "hopper-bias-sums", _attention,
         {"n": 140, "m": 272, "heads": 4, "key_heads": 2, "d": 64, "bias": _random(1, 1, 140, 272)}),
        ("flash_attention", flash_attention, "hopper-bias-keys", _attention,
         {"n": 140, "m": 270, "heads": 4, "key_heads": 2, "d": 64, "causal": True, "bias": _random(1, 1, 1, 270)}),
        ("flash_attention", _jvp, "jvp", _tangents, {"n": 140, "m": 270, "causal": True, "sink": torch.rand(4)}),
        ("flash_attention", flash_attention, "decode", _attention,
         {"n": 2, "m": 1500, "heads": 8, "key_heads": 2, "d": 64, "causal": True}),
        ("rotary_attention", _rotary, "rotary", _projected, {"n": 140, "heads": 67, "d": 64}),
        ("linear_attention", linear_attention, "head-decay", _linear, {"n": 600, "dtype": HALF}),
        ("linear_attention", linear_attention, "linear-hopper", _linear,
         {"n": 300, "dtype": HALF, "d": 64, "learned": False}),
        ("linear_attention", linear_attention, "hopper-sums", _linear,
         {"n": 1100, "dtype": HALF, "d": 64, "learned": False}),
        ("linear_attention", linear_attention, "hopper-cosine", _linear,
         {"n": 300, "dtype": HALF, "d": 64, "learned": False, "encoding": "cosine"}),
        ("linear_attention", linear_attention, "hopper-parts", _linear,
         {"n": 300, "dtype": HALF, "d": 128, "learned": False, "encoding": "cosine", "activation": "silu"}),
        ("linear_attention", linear_attention, "step", _linear, {"n": 2, "learned": False, "grad": False}),
        ("linear_attention", linear_attention, "linear-packed", _linear,
         {"n": 70, "encoding": "cosine", "cu_seqlens": _BOUNDS}),
        ("delta_attention", delta_attention, "delta-head", _delta, {"n": 100, "d": 64, "dtype": HALF, "decay": 3}),
        ("delta_attention", delta_attention, "delta-hopper", _delta,
         {"n": 200, "d": 64, "dtype": HALF, "decay": 3, "grad": False}),
        ("delta_attention", delta_attention, "delta-hopper-gradients", _delta,
         {"n": 520, "d": 64, "dtype": HALF, "decay": 3}),
        ("delta_attention", delta_attention, "delta-hopper-carry", _delta,
         {"n": 520, "d": 64, "dtype": HALF, "decay": 4}),
        ("delta_attention", delta_attention, "delta-feature", _delta,
         {"n": 70, "d": 24, "dtype": torch.float32, "decay": 4, "cu_seqlens": _BOUNDS, "encoding": "rotate",
          "theta": _random(12)}),
        ("delta_attention", delta_attention, "delta-float16", _delta,
         {"n": 40, "d": 24, "dtype": torch.float16, "decay": 0, "encoding": "rotate", "theta": _random(12)}),
        ("delta_attention", delta_attention, "delta-hopper-rotated", _delta,
         {"n": 200, "d": 128, "dtype": HALF, "decay": 0, "grad": False, "encoding": "rotate",
          "theta": _random(64, grad=False)}),
        ("delta_attention", delta_attention, "delta-hopper-feature", _delta,
         {"n": 520, "d": 64, "dtype": HALF, "decay": 4, "heads": 1}),
        ("delta_attention", delta_attention, "delta-step", _delta,
         {"n": 2, "d": 64, "dtype": HALF, "decay": 4, "grad": False}),
        ("short_convolution", short_convolution, "convolution", _convolution, {"n": 70, "dtype": HALF}),
        ("short_convolution", short_convolution, "convolution-packed", _convolution,
         {"n": 90, "dtype": torch.float32, "cu_seqlens": _BOUNDS}),
        ("tpa", tpa_attention, "attention", _train,
         {"n": 40, "m": 40, "d": 24, "rank": 2, "dtype": torch.float32, "causal": True}),
        ("tpa", tpa_attention, "attention-16", _train,
         {"n": 150, "m": 200, "d": 128, "rank": 17, "dtype": HALF}),
        ("tpa", tpa_decode, "decode-factors", _decode,
         {"n": 2, "m": 300, "d": 24, "rank": 2, "dtype": torch.float32}),
        ("tpa", tpa_decode, "decode-split", _decode,
         {"n": 1, "m": 1200, "d": 24, "rank": 1, "dtype": torch.float32, "strategy": "split_kv"}),
        ("tpa", tpa_decode, "decode-hopper", _decode,
         {"n": 1, "m": 1200, "d": 64, "rank": 1, "dtype": HALF, "heads": 8, "strategy": "split_kv"}),
        ("tpa", tpa_decode, "decode-hopper-ranks", _decode,
         {"n": 1, "m": 2500, "d": 128, "rank": 4, "dtype": HALF, "strategy": "batch"}),
        ("distributed", _sums, "sums", lambda: {"rows": _random(5, 1500, grad=False)}, {}),
        ("bench", _stream, "stream", lambda: {"x": _random(3000, grad=False)}, {}),
    )
)  # fmt: skip
