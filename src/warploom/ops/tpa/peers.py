"""Other implementations of tensor-product attention and of decoding: plain PyTorch, on factors and on whole keys.

Nothing here runs a kernel of ours, so that records of these providers outlast a change to one.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable

import torch

from warploom.ops.spec import Case, Inputs, Operator, Other, Traffic, Unsupported, compile_at_best, normal
from warploom.ops.tpa import reference

Tensor = torch.Tensor
Provider = Callable[..., Tensor]

# ----------------------------------------------------------------------------------------------------------
# On factors
# ----------------------------------------------------------------------------------------------------------


def naive_decode(
    aq: Tensor, ak: Tensor, av: Tensor, bq: Tensor, bk: Tensor, bv: Tensor, strategy: str = "auto"
) -> Tensor:
    """Decode as one writes it first: queries, keys and values are formed in the dtype of the factors."""
    q, k, v = (_form(a, b).transpose(1, 2) for a, b in ((aq, bq), (ak, bk), (av, bv)))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2)


def _form(a: Tensor, b: Tensor) -> Tensor:
    a, b = reference.with_rank_axis(a, b)
    return a * b / a.shape[-1] if a.shape[-1] == 1 else torch.matmul(a, b) / a.shape[-1]


def factored_decode(
    aq: Tensor, ak: Tensor, av: Tensor, bq: Tensor, bk: Tensor, bv: Tensor, strategy: str = "auto"
) -> Tensor:
    """Decode as one writes it next: one new token on the factors, by matrix products in their dtype."""
    (ak, bk), (av, bv) = reference.with_rank_axis(ak, bk), reference.with_rank_axis(av, bv)
    batch, keys, heads, rank_k = ak.shape
    rank_v, values = bv.shape[2:]
    q = _form(aq, bq)[:, 0]  # (B, H, D)
    logits = torch.matmul(bk.flatten(1, 2), q.mT).view(batch, keys, rank_k, heads).float()
    logits = (logits * ak.mT).sum(2) * (q.shape[-1] ** -0.5 / rank_k)  # (B, M, H)
    weights = torch.softmax(logits, dim=1)[..., None] * av / rank_v  # (B, M, H, R)
    spread = weights.to(bv.dtype).permute(0, 2, 1, 3).reshape(batch, heads, keys * rank_v)
    return torch.matmul(spread, bv.reshape(batch, keys * rank_v, values))[:, None]


def naive_attention(
    aq: Tensor, ak: Tensor, av: Tensor, bq: Tensor, bk: Tensor, bv: Tensor, causal: bool = False
) -> Tensor:
    """Form queries, keys and values in memory, then call PyTorch's fused attention."""
    q, k, v = (_form(a, b).transpose(1, 2) for a, b in ((aq, bq), (ak, bk), (av, bv)))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2)


DECODE: dict[str, Callable[[Case], Provider]] = {
    "torch_naive": lambda case: naive_decode,
    "torch": lambda case: factored_decode,
    "torch_compile": lambda case: compile_at_best(factored_decode),
}
ATTENTION: dict[str, Callable[[Case], Provider]] = {
    "torch_naive": lambda case: naive_attention,
    "torch_naive_compile": lambda case: compile_at_best(naive_attention),
}

# ----------------------------------------------------------------------------------------------------------
# On whole keys and values: other functions, which decode as many tokens of a model of the same width
# ----------------------------------------------------------------------------------------------------------

GROUP = 4
"""Heads that share a head of keys and values in grouped-query attention, as in many published models."""
ALL = 0
"""A group of all heads."""
_TRIALS = 5


def whole_cache_inputs(group: int, case: Case, device: torch.device, generator: torch.Generator) -> Inputs:
    """Returns queries (B, 1, H, D), keys and values (B, M, H / group, D), for a case of `tpa_decode`."""
    batch, heads, features = case["batch"], case["heads"], case["head_dim"]
    dtype = getattr(torch, case["dtype"])
    cache = (batch, case["m"], heads // (group or heads), features)
    shapes = {"q": (batch, 1, heads, features), "k": cache, "v": cache}
    return {name: normal(shape, dtype, device, generator) for name, shape in shapes.items()}


def whole_cache_traffic(group: int, case: Case, mode: str) -> Traffic:
    """Returns the bytes of keys and values, read once, and of queries and output, which are few."""
    rows = 2 * case["m"] * (case["heads"] // (group or case["heads"])) + 2 * case["heads"]
    return Traffic(1, 0, case["batch"] * rows * case["head_dim"] * getattr(torch, case["dtype"]).itemsize)


def whole_cache_definition(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Returns attention of one token on whole keys and values, one batch entry at a time: they are large."""
    entries = (_attend(*(t[b : b + 1] for t in (q, k, v))) for b in range(q.shape[0]))
    return torch.cat(list(entries))


def _attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    wide = torch.promote_types(q.dtype, torch.float32)
    keys, values = (t.to(wide).repeat_interleave(q.shape[2] // t.shape[2], 2).transpose(1, 2) for t in (k, v))
    scores = torch.matmul(q.to(wide).transpose(1, 2), keys.mT) * q.shape[-1] ** -0.5
    return torch.matmul(torch.softmax(scores, -1), values).transpose(1, 2).to(q.dtype)


def sdpa(q: Tensor, k: Tensor, v: Tensor, backend: str = "auto") -> Tensor:
    """Returns PyTorch's fused attention on the cache as it is, with the kernel that PyTorch chooses."""
    return _sdpa(None, False, q, k, v)


def _sdpa(kernel: str | None, folded: bool, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Call a kernel of PyTorch's. ``folded``: heads that share keys are given as tokens of one head."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    backends = list(SDPBackend.__members__.values()) if kernel is None else [getattr(SDPBackend, kernel)]
    batch, _, heads, features = q.shape
    queries = q.view(batch, k.shape[2], -1, features) if folded else q.transpose(1, 2)
    with sdpa_kernel([backend for backend in backends if backend != SDPBackend.ERROR]):
        out = torch.nn.functional.scaled_dot_product_attention(
            queries, k.transpose(1, 2), v.transpose(1, 2), enable_gqa=not folded and heads != k.shape[2]
        )
    return out.reshape(batch, 1, heads, -1) if folded else out.transpose(1, 2)


LATENT, ROTATED = 512, 64
"""Features of a latent cache: of values, and of keys besides, as in DeepSeek-V2 and its successors."""


def latent_inputs(case: Case, device: torch.device, generator: torch.Generator) -> Inputs:
    """Returns queries (B, 1, H, D), keys (B, M, 1, D) and, in their memory, values (B, M, 1, E)."""
    dtype, batch = getattr(torch, case["dtype"]), case["batch"]
    q, k = (
        normal((batch, *rows, LATENT + ROTATED), dtype, device, generator)
        for rows in ((1, case["heads"]), (case["m"], 1))
    )
    return {"q": q, "k": k, "v": k[..., :LATENT]}


def latent_traffic(case: Case, mode: str) -> Traffic:
    """Returns the bytes of keys, which hold the values, read once, and of queries and output."""
    numbers = (case["m"] + case["heads"]) * (LATENT + ROTATED) + case["heads"] * LATENT
    flops = 2 * case["batch"] * case["m"] * case["heads"] * (2 * LATENT + ROTATED)
    return Traffic(1, 0, case["batch"] * numbers * getattr(torch, case["dtype"]).itemsize, flops)


def _fastest_sdpa(group: int, case: Case) -> Provider:
    """Returns the PyTorch kernel, and the way to share keys, that is fastest on the first call's tensors."""
    kernels = ("CUDNN_ATTENTION", "FLASH_ATTENTION", "EFFICIENT_ATTENTION")
    ways = [(kernel, folded) for kernel in kernels for folded in ((False,) if group == 1 else (False, True))]
    chosen: list[Provider] = []

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if not q.is_cuda:
            return sdpa(q, k, v)
        if not chosen:
            timed = {}
            for way in ways:
                function = functools.partial(_sdpa, *way)
                milliseconds = _milliseconds(function, q, k, v)
                if milliseconds is not None:
                    timed[milliseconds] = function
            if not timed:
                raise Unsupported("PyTorch says that none of its fused kernels can run this case")
            chosen.append(timed[min(timed)])
        return chosen[0](q, k, v)

    return attend


def _milliseconds(function: Provider, *tensors: Tensor) -> float | None:
    """Returns the median milliseconds of a few runs on a GPU; None if the kernel cannot run."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    times: list[float] = []
    for _ in range(_TRIALS):
        start.record()
        try:
            function(*tensors)
        except RuntimeError as error:
            if "No available kernel" in str(error):
                return None
            raise
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


def _other(name: str, group: int) -> Other:
    operator = Operator(
        name=name,
        function=sdpa,
        reference=whole_cache_definition,
        make_inputs=functools.partial(whole_cache_inputs, group),
        check_cases=(),
        length="m",
    )
    return Other(
        operator=operator,
        providers={name: functools.partial(_fastest_sdpa, group)},
        traffic=functools.partial(whole_cache_traffic, group),
    )


OTHERS = (_other("sdpa_gqa", GROUP), _other("sdpa_mha", 1), _other("sdpa_mqa", ALL))
"""Attention with grouped heads, with as many heads of keys, and with one, beside `tpa_decode`."""
