"""Functions that the benches of whole models share: steps are measured in the place of calls."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch

from warploom.bench import limits
from warploom.bench.attempt import Failure
from warploom.bench.evaluate import with_times
from warploom.bench.measure import Call, Clock, Timing, wall_us
from warploom.bench.records import Record
from warploom.ops.spec import Bench, Inputs, Operator, Unsupported


def model_bench(name: str, make_inputs: Callable[..., Inputs], providers: Iterable[str], **more: Any) -> Bench:
    """Returns a bench whose ``measure`` knows its providers by name; ``more`` are other fields of `Bench`."""
    operator = Operator(name.replace("-", "_"), _undefined, _undefined, make_inputs, ())
    return Bench(name, operator, providers=dict.fromkeys(providers, _undefined), **more)


def _undefined(*_: Any, **__: Any) -> Any:
    raise Unsupported("a model has no definition to be compared with: its operators have")


def llama(extra: str, **config: Any) -> Any:
    """Returns transformers' Llama with PyTorch's attention and random weights.

    Raises:
        Unsupported: transformers, of an extra of ours, is not installed.
    """
    try:
        from transformers import LlamaConfig, LlamaForCausalLM
    except ModuleNotFoundError as error:
        raise Unsupported(f"transformers is not installed: pip install 'warploom[{extra}]'") from error
    return LlamaForCausalLM(LlamaConfig(tie_word_embeddings=False, attn_implementation="sdpa", **config))


def wall_ms(call: Call, device: torch.device) -> float:
    """Returns the milliseconds of a call by the wall clock, with the device idle before and after."""
    wait = torch.get_device_module(device).synchronize
    wait()
    return wall_us(lambda: (call(), wait())) / 1e3


def product_ms(flops: int, device: torch.device, clock: Clock) -> Callable[[], float]:
    """Returns a function that measures the ms of some operations at the rate of a large matrix product."""
    return repeated_ms(limits.product_call(device), flops / limits.product_flops(device), clock)


def repeated_ms(call: Call, times: float, clock: Clock) -> Callable[[], float]:
    """Returns a function that measures the milliseconds of a call, times a factor."""
    host_us = clock.host_us(call)
    clock.settle([lambda: clock.sample(call, host_us)])
    return lambda: times * clock.sample(call, host_us).ms


def step_records(blank: Record, samples: Mapping[str, list[float] | Failure]) -> list[Record]:
    """Returns records of steps from the milliseconds of each, by provider and limit, as copies of ``blank``."""
    records = {name: replace(blank, provider=name) for name in samples}
    return with_times(records, {n: s if isinstance(s, Failure) else Timing.of(s) for n, s in samples.items()})
