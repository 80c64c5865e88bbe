"""Steps of a Transformer LM as a bench: forward, forward and backward, or a whole training step with AdamW.

Every phase of every step is timed by the wall clock with the device idle before and after, as in the published
table: what a GPU waits for the host is in it. Python collects its garbage before the measured steps and not during
them, as in `timeit`. Forward alone runs without autograd; the others with it. The limit is a step's operations at
the rate of a large matrix product, measured among the steps.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from warploom import lrpe_rotate
from warploom.bench.attempt import Failure, attempt
from warploom.bench.evaluate import Unit
from warploom.bench.fingerprint import LIMIT
from warploom.bench.measure import Clock, allocated_bytes, interleave, peak_bytes, release_memory
from warploom.bench.records import Record
from warploom.nn import TransformerConfig, TransformerLM
from warploom.ops.spec import KERNELS, SEEDS, Case, Inputs, Traffic, Unsupported, compile_at_best, need_cuda

from . import _steps as steps
from ._parts import mark_parts

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""A function from tokens (B, N) and targets (B, N) to the mean cross-entropy ()."""

LLAMA = "llama"
"""transformers' Llama with PyTorch's attention and random weights."""
ATTENTIONS = {KERNELS: "flash", "sdpa": "sdpa", "torch": "plain", LLAMA: "flash", "warploom_tpa": "tpa"}
"""The attention of each model; for Llama, a model of ours of the same shape."""
GRAPHS = "+graphs"
ENDINGS = ("", "+compile", GRAPHS)
"""Endings of a provider's name: eager, under `torch.compile`, and with CUDA graphs."""
WARM_UP, STEPS, STEPS_IN_A_ROW = 5, 40, 5
"""Steps before the measured ones, the measured ones, and how many of them before another model's."""
MIB = 2**20


def config_of(case: Case, provider: str) -> TransformerConfig:
    """Returns the shape of a provider's model in a case."""
    names = ("context_length", "position", "layers")
    changes: dict[str, Any] = {name: case[name] for name in names if name in case}
    return TransformerConfig.size(case["size"], attention=ATTENTIONS[provider.partition("+")[0]], **changes)


def build(provider: str, case: Case, device: torch.device) -> tuple[nn.Module, Loss]:
    """Returns a provider's model with random weights in float32, and the function that gives its loss.

    Raises:
        Unsupported: What the provider needs is not installed, or it has no such positions.
    """
    name, _, ending = provider.partition("+")
    config = config_of(case, provider)
    if name == LLAMA and config.position != "rotate":
        raise Unsupported("transformers' Llama has rotary positions alone")
    if ending == "graphs":
        need_cuda("CUDA graphs")
    torch.manual_seed(0)
    with torch.device(device):
        if name != LLAMA:
            model: Any = TransformerLM(config)
        else:
            model = steps.llama(
                "compare",
                vocab_size=config.vocab_size,
                hidden_size=config.d_model,
                intermediate_size=config.d_ff,
                num_hidden_layers=config.layers,
                num_attention_heads=config.heads,
                num_key_value_heads=config.heads,
                max_position_embeddings=config.context_length,
            )

    def loss(tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if name == LLAMA:
            logits = model(input_ids=tokens, use_cache=False).logits
            return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
        out: torch.Tensor = model(tokens, targets).loss
        return out

    # The loss is compiled with the model, for all models alike.
    return model, compile_at_best(loss, graphs=ending == "graphs") if ending else loss


def make_inputs(case: Case, device: torch.device, generator: torch.Generator) -> Inputs:
    """Returns random tokens, and the targets behind them, (B, N) each."""
    vocabulary = config_of(case, KERNELS).vocab_size
    text = torch.randint(vocabulary, (case["batch"], case["context_length"] + 1), generator=generator).to(device)
    return {"tokens": text[:, :-1].contiguous(), "targets": text[:, 1:].contiguous()}


def count_flops(case: Case, mode: str) -> int:
    """Returns the operations of a step."""
    with torch.device("meta"):
        model = TransformerLM(config_of(case, KERNELS))
    return int(case["batch"] * case["context_length"] * model.flops_per_token(training=mode != "fwd"))


@dataclass
class Stepper:
    """A model that takes steps in a mode, and the wall time of each phase of them."""

    model: nn.Module
    loss: Loss
    inputs: Inputs
    mode: str
    dtype: torch.dtype
    device: torch.device
    optimizer: torch.optim.Optimizer | None = None
    samples_ms: dict[str, list[float]] = field(default_factory=dict)
    held_bytes: int = 0
    """Bytes that were allocated between forward and backward of the last step."""
    memory_mib: dict[str, float] = field(default_factory=dict)
    """``peak`` and ``held``, on a GPU."""

    def take_steps(self) -> list[float]:
        """Take some steps in a row, and return their milliseconds; no gradients are kept afterwards."""
        for _ in range(STEPS_IN_A_ROW):
            self.step()
        self.model.zero_grad(set_to_none=True)
        return [sum(phases) for phases in zip(*(samples[-STEPS_IN_A_ROW:] for samples in self.samples_ms.values()))]

    def step(self) -> None:
        """Take one step, and add its phases' times to ``samples_ms``."""
        self.model.zero_grad(set_to_none=True)
        torch.compiler.cudagraph_mark_step_begin()  # what the last step returned may be written anew
        grad = torch.no_grad() if self.mode == "fwd" else contextlib.nullcontext()
        low = torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32)
        with self._phase("forward"), grad, low:
            loss = self.loss(self.inputs["tokens"], self.inputs["targets"])
        self.held_bytes = allocated_bytes(self.device)
        if self.mode != "fwd":
            with self._phase("backward"):
                loss.backward()
        if self.optimizer is not None:
            with self._phase("optimizer"):
                self.optimizer.step()

    @contextlib.contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        wait = torch.get_device_module(self.device).synchronize
        wait()
        mark = torch.cuda.nvtx.range(name) if self.device.type == "cuda" else contextlib.nullcontext()
        started = time.perf_counter()
        with mark, torch.profiler.record_function(name):
            yield
            wait()
        self.samples_ms.setdefault(name, []).append((time.perf_counter() - started) * 1e3)


def measure(
    unit: Unit, providers: Sequence[str], device: torch.device, clock: Clock, blank: Record
) -> list[Record]:
    """Measure all models of a case, interleaved, as `warploom.bench.evaluate.evaluate` does providers."""
    flops = count_flops(unit.case, unit.mode)
    steppers = {name: attempt(name, functools.partial(prepare, name, unit, device)) for name in providers}
    product = steps.product_ms(flops, device, clock)
    calls: dict[str, Callable[[], list[float]] | Failure] = {
        name: stepper if isinstance(stepper, Failure) else stepper.take_steps for name, stepper in steppers.items()
    }
    calls[LIMIT] = lambda: [product() for _ in range(STEPS_IN_A_ROW)]
    gc.collect()  # now, not among the steps: what compilers leave behind takes longer to look through than a step
    enabled = gc.isenabled()
    gc.disable()
    try:
        taken = interleave(calls, dict.fromkeys(calls, -(-STEPS // STEPS_IN_A_ROW)))
    finally:
        if enabled:
            gc.enable()
    samples = {n: t if isinstance(t, Failure) else [ms for steps in t for ms in steps] for n, t in taken.items()}
    records = steps.step_records(replace(blank, flops=flops), samples)
    return [_complete(record, steppers.get(record.provider)) for record in records]


def prepare(name: str, unit: Unit, device: torch.device) -> Stepper:
    """Returns a model that has warmed up, with the memory that a step of it allocates."""
    release_memory(device)
    before = allocated_bytes(device)
    model, loss = build(name, unit.case, device)
    inputs = make_inputs(unit.case, device, torch.Generator().manual_seed(0))
    stepper = Stepper(model, loss, inputs, unit.mode, getattr(torch, unit.case["dtype"]), device)
    if unit.mode == "train":
        stepper.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=device.type == "cuda")
    for _ in range(WARM_UP):
        stepper.step()
    peak = peak_bytes(stepper.step, device)
    if peak is not None:
        stepper.memory_mib = {"peak": (peak - before) / MIB, "held": (stepper.held_bytes - before) / MIB}
    stepper.samples_ms.clear()
    return stepper


def prepare_profile(name: str, unit: Unit, device: torch.device) -> Callable[[], None]:
    """Returns a model's step with marks around its parts, where its modules are ours and run one by one."""
    stepper = prepare(name, unit, device)
    if isinstance(stepper.model, TransformerLM) and "+" not in name:
        mark_parts(stepper.model)
    return stepper.step


def _complete(record: Record, stepper: Stepper | Failure | None) -> Record:
    """Returns a record of a model that was timed, with its phases and memory."""
    if not (isinstance(stepper, Stepper) and record.ms):
        return record
    spread = {
        name: {"mean_ms": statistics.fmean(samples), "std_ms": statistics.stdev(samples)}
        for name, samples in stepper.samples_ms.items()
    }
    details: dict[str, Any] = {
        "phases": spread,
        "tokens_per_s": record.case["batch"] * record.case["context_length"] / record.ms * 1e3,
        "parameters": sum(parameter.numel() for parameter in stepper.model.parameters()),
    }
    details |= {"held_memory_mib": stepper.memory_mib["held"]} if stepper.memory_mib else {}
    return replace(record, peak_memory_mib=stepper.memory_mib.get("peak"), details=details)


def launch(case: Case, provider: str) -> None:
    """Launch the kernels of ours that the layers of a provider's model launch, forward and backward."""
    from warploom.ops.rotary_attention.api import rotary_attention

    name = provider.partition("+")[0]
    if name == LLAMA:
        raise Unsupported("launches nothing of ours")
    config = config_of(case, provider)
    heads, head_dim = config.heads, config.d_model // config.heads
    rows, theta = (3 if name == KERNELS else 2) * heads, torch.empty(head_dim // 2)
    shape = (case["batch"], case["context_length"], rows, head_dim)
    qkv = torch.empty(shape, dtype=getattr(torch, case["dtype"]), requires_grad=True)
    if name == KERNELS:
        out = rotary_attention(qkv, theta, heads, head_dim**-0.5)
    else:
        out = lrpe_rotate(qkv, theta, backend="triton")
    torch.autograd.grad([out], [qkv], [torch.empty_like(out)])


def _cases(device: str, sizes: Sequence[str], lengths: Sequence[int]) -> list[Case]:
    if device != "cuda":
        return []
    shape = {"batch": 4, "position": "rotate", "dtype": "bfloat16"}
    return [{"size": size, **shape, "context_length": n} for n in lengths for size in sizes]


def _trial(device: str) -> list[Case]:
    """Returns a case of one layer and a few tokens, for tests."""
    shape = {"batch": 1, "position": "rotate", "dtype": "float32" if device == "cpu" else "bfloat16"}
    return [{"size": "sm", **shape, "context_length": 32, "layers": 1}]


BENCH = steps.model_bench(
    "transformer",
    make_inputs,
    providers=[n + ending for ending in ENDINGS for n in ATTENTIONS if n != "warploom_tpa" or not ending],
    suites={
        "quick": functools.partial(_cases, sizes=("sm",), lengths=(512,)),
        "published": functools.partial(_cases, sizes=("sm", "md", "lg"), lengths=(512, 4096)),
        "large": functools.partial(_cases, sizes=("xl", "2.7B"), lengths=(512,)),
        SEEDS: functools.partial(_cases, sizes=("sm", "md", "lg"), lengths=(512,)),
        "trial": _trial,
    },
    traffic=lambda case, mode: Traffic(0, 0, 0, count_flops(case, mode)),
    title="Transformer LM: wall time of a step; the limit is a large matrix product's rate",
    x="size",
    modes=("fwd", "fwd_bwd", "train"),
    measure=measure,
    prepare=prepare_profile,
    launches=launch,
)
BENCHES = (BENCH,)
