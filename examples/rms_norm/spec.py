"""What ``warploom check --spec`` and ``warploom bench --spec`` know of the operator."""

import functools
import math
from collections.abc import Callable

import torch

from warploom.bench import Bench, Case, Inputs, Operator, Outputs, Traffic, need_cuda

from . import reference
from .api import rms_norm


def make_inputs(case: Case, device: torch.device, generator: torch.Generator) -> Inputs:
    """Inputs of a case: ``batch, n, features, dtype``; ``layout`` for another order of axes in memory."""
    dtype = getattr(torch, case["dtype"])
    shape = (case["batch"], case["n"], case["features"])
    x = torch.randn(shape, generator=generator).to(device, dtype)
    if "layout" in case:
        axes = {"nbd": (0, 1), "bdn": (1, 2)}[case["layout"]]
        x = x.transpose(*axes).contiguous().transpose(*axes)
    weight = (1 + 0.1 * torch.randn(shape[-1], generator=generator)).to(device, dtype)
    return {"x": x.requires_grad_(), "weight": weight.requires_grad_()}


SMALL = {"batch": 3, "n": 19, "features": 24, "dtype": "float32"}
OPERATOR = Operator(
    name="rms_norm",
    function=rms_norm,
    reference=reference.rms_norm,
    make_inputs=make_inputs,
    # Small and odd, and together touching every feature.
    check_cases=tuple(
        SMALL | change
        for change in (
            {},
            {"dtype": "bfloat16", "features": 128},
            {"dtype": "float16", "features": 77},
            {"layout": "nbd", "features": 5},
            {"layout": "bdn", "features": 33},
            {"batch": 1, "n": 1, "features": 1},
            {"n": 0},
            {"features": 6000, "batch": 1, "n": 3},
        )
    ),
)
OPERATORS = (OPERATOR,)


def kernels(case: Case) -> Callable[..., Outputs]:
    """Our kernels."""
    need_cuda()
    return functools.partial(rms_norm, backend="triton")


def plain(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """PyTorch's own."""
    return torch.nn.functional.rms_norm(x, weight.shape, weight, 1e-6)


def cases(device: str) -> list[Case]:
    """Lengths of a batch of sequences."""
    shape = {"batch": 8, "features": 4096} if device == "cuda" else {"batch": 2, "features": 256}
    lengths = (256, 1024, 4096) if device == "cuda" else (64, 256)
    return [shape | {"dtype": "bfloat16", "n": n} for n in lengths]


def traffic(case: Case, mode: str) -> Traffic:
    """Forward reads x and writes y; backward reads x and dy and writes dx. The weight is next to nothing."""
    stream = math.prod(case[key] for key in ("batch", "n", "features")) * getattr(torch, case["dtype"]).itemsize
    return Traffic(reads=1 if mode == "fwd" else 2, writes=1, stream_bytes=stream)


BENCHES = (
    Bench(
        name="rms-norm",
        operator=OPERATOR,
        suites={"quick": cases},
        providers={
            "warploom": kernels,
            "torch": lambda case: plain,
            "torch_compile": lambda case: torch.compile(plain, dynamic=False),
        },
        precompiled=("torch",),
        traffic=traffic,
        title="Root-mean-square normalization",
    ),
)
