"""Descriptions of operators and benches, for tests, benches and documentation: the types of each ``bench.py``.

An operator's folder describes how inputs are made, which small cases must be right, which cases are timed, the
peers that are timed beside it, and how many bytes it must move. The conformance suite and the bench only know these
descriptions, and no operator.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

Case = Mapping[str, Any]
"""Parameters of one case; JSON values only (``{"activation": "silu", "n": 4096, ...}``)."""

Inputs = dict[str, Any]
"""Keyword arguments of the public function. Tensors that need a gradient are leaves that require it."""

Outputs = torch.Tensor | tuple[torch.Tensor, ...]


KERNELS = "warploom"
"""The provider that runs the operator's kernels. Names of variants begin with it."""
QUICK = "quick"
"""The suite for a first look, of at most a minute."""
SEEDS = "seeds"
"""The suite of the cases that earlier libraries of this kind published: every row of ``report/published``."""


class Unsupported(Exception):
    """Raised by a provider that cannot run a case (a missing package, GPU or feature). The text says why.

    Example:
        ```python
        from warploom.bench import Unsupported


        def build(case):
            if case["n"] > 2**20:
                raise Unsupported("more than 2**20 tokens")
            return lambda x: x + 1
        ```
    """


@dataclass(frozen=True)
class Operator:
    """A public function, described for the conformance suite.

    Example:
        ```python
        import torch
        from warploom.bench import Operator


        def double(x, backend="auto"):
            return x + x


        def inputs(case, device, generator):
            return {"x": torch.randn(case["n"], generator=generator).to(device).requires_grad_()}


        OPERATOR = Operator("double", double, lambda x: 2 * x, inputs, check_cases=({"n": 19}, {"n": 0}))
        ```
    """

    name: str
    """The function's name, e.g. ``lrpe_rotate``."""
    function: Callable[..., Outputs]
    """The public function, called as ``function(**inputs, backend=...)``."""
    reference: Callable[..., Outputs]
    """The definition, called as ``reference(**inputs)`` on any device and in any float dtype, float64 included."""
    make_inputs: Callable[[Case, torch.device, torch.Generator], Inputs]
    """Makes random inputs of a case, drawn from the CPU generator and moved, the same on every device."""
    check_cases: tuple[Case, ...]
    """Small cases of odd sizes that together cover every feature. Every backend must meet the error budget on
    each."""
    autocasts: tuple[str, ...] = ()
    """Names of the inputs that autocast casts."""
    length: str = "n"
    """The case parameter that is the length of a sequence. Another value of it compiles nothing new."""
    spills: Mapping[str, int] = field(default_factory=dict)
    """Kernel name to the most bytes per thread that its variants may spill, for tiles that were measured to be
    faster than those that spill nothing. A kernel without an entry may spill nothing."""
    fused: bool = False
    """True if ``backend="torch"`` does not run the reference, but PyTorch's fused attention, for example."""


@dataclass(frozen=True)
class Traffic:
    """The bytes that a case must move at least, and its operations, from which the limit of the hardware follows.

    ``reads`` and ``writes`` count equal streams of ``stream_bytes`` each. If one tensor is read, and another of
    twice its size is written, they are ``reads=1, writes=2``.

    Example:
        ```python
        from warploom.bench import Traffic

        print(Traffic(reads=1, writes=2, stream_bytes=100).min_bytes)  # 300
        print(Traffic.of_bytes(read=100, written=200).min_bytes)  # 300
        ```
    """

    reads: int
    writes: int
    stream_bytes: int
    flops: int = 0

    @property
    def min_bytes(self) -> int:
        """The bytes that any implementation must move through device memory."""
        return (self.reads + self.writes) * self.stream_bytes

    @classmethod
    def of_bytes(cls, read: int, written: int, flops: int = 0) -> Traffic:
        """Returns the traffic of so many bytes, as the closest mix of at most four reads and three writes.

        Args:
            read: Bytes read.
            written: Bytes written.
            flops: Floating-point operations.
        """
        total = read + written
        mixes = [(r, w) for r in range(5) for w in range(4) if (r or not read) and (w or not written) and r + w]
        share = read / total if total else 0.0
        reads, writes = min(mixes, key=lambda mix: (abs(mix[0] / sum(mix) - share), sum(mix)))
        return cls(reads, writes, -(-total // (reads + writes)), flops)


@dataclass(frozen=True)
class Other:
    """Another function that does the same work in a model, timed beside a bench's own in every case.

    It has its own inputs, definition and bytes. It is checked against its own reference, and not compared with the
    bench's limit.

    Example:
        ```python
        import torch
        from warploom.bench import Operator, Other, Traffic


        def inputs(case, device, generator):
            return {"x": torch.randn(case["n"], generator=generator).to(device)}


        relu = Operator("relu", torch.relu, torch.relu, inputs, check_cases=({"n": 19},))
        other = Other(relu, {"relu": lambda case: torch.relu}, lambda case, mode: Traffic(1, 1, 4 * case["n"]))
        ```
    """

    operator: Operator
    """The other function, whose inputs are made from the bench's cases."""
    providers: Mapping[str, Callable[[Case], Callable[..., Outputs]]]
    """Providers as in a `Bench`, with names that say which function they run."""
    traffic: Callable[[Case, str], Traffic]
    """Bytes and operations of a case of the bench in a mode."""


@dataclass(frozen=True)
class Bench:
    """One bench of the command line (``warploom bench NAME``): cases of an operator, timed.

    Example:
        ```python
        import torch
        from warploom.bench import Bench, Operator, Traffic


        def inputs(case, device, generator):
            return {"x": torch.randn(case["n"], generator=generator).to(device)}


        BENCH = Bench(
            "relu",
            Operator("relu", torch.relu, torch.relu, inputs, check_cases=({"n": 19},)),
            suites={"quick": lambda device: [{"n": 2**10}, {"n": 2**20}]},
            providers={"torch": lambda case: torch.relu, "clamp": lambda case: lambda x: x.clamp(min=0)},
            traffic=lambda case, mode: Traffic(reads=1, writes=1, stream_bytes=4 * case["n"]),
            title="Rectifier",
            modes=("fwd",),
        )
        ```
    """

    name: str
    """The name on the command line, with dashes: ``lrpe-cosine-md``. Records have underscores instead."""
    operator: Operator
    suites: Mapping[str, Callable[[str], Sequence[Case]]]
    """Suite name (``quick``, ``published``) to a function that returns the cases for a device type (``cuda``,
    ``cpu``)."""
    providers: Mapping[str, Callable[[Case], Callable[..., Outputs]]]
    """Provider name to a builder. Given a case, a builder returns a function called as ``f(**inputs)``, or raises
    `Unsupported`. The provider ``limit`` is added by the bench."""
    traffic: Callable[[Case, str], Traffic]
    """Bytes and operations of a case in a mode (``fwd``, ``bwd`` or ``fwd_bwd``)."""
    title: str
    """Title of its tables and of its section in the report."""
    x: str = "n"
    """The case parameter of a table's rows and of a plot's horizontal axis."""
    modes: tuple[str, ...] = ("fwd", "bwd")
    own: str = ""
    """The provider that is the operator itself. It is drawn thick and compared with the others, and the run fails
    if it fails. Empty for ``warploom``, or ``torch`` where no kernel can run."""
    command: str = ""
    """The command that runs the bench, if that is not ``warploom bench NAME``. Options are added to a command that
    begins with ``warploom bench``."""
    others: tuple[Other, ...] = ()
    """Other functions to time beside it."""
    precompiled: tuple[str, ...] = ()
    """Providers whose kernels are already compiled, as those of eager PyTorch, providers of other functions
    included. Kernels of all other providers are compiled before anything is measured."""
    quick: tuple[str, ...] = ()
    """The providers of the suite ``quick``, none of them autotuned; empty for all."""
    budgets: Mapping[str, float] = field(default_factory=dict)
    """Provider name to the factor of its error budget, for a peer that is known to round more."""
    measure: Callable[..., list[Any]] | None = None
    """Measures a unit instead of `warploom.bench.evaluate.evaluate`, for steps of models."""
    prepare: Callable[..., Callable[[], object]] | None = None
    """Returns a provider's step to profile, warmed up, given its name, unit and device; with ``measure``."""
    launches: Callable[[Case, str], object] | None = None
    """Makes the launches of our kernels in a provider's case, if a call of the provider does not; see
    `fingerprint`."""

    def runs_kernels(self, provider: str) -> bool:
        """Returns True if a provider runs kernels of ours."""
        return provider.startswith(KERNELS)

    def operator_of(self, provider: str) -> Operator:
        """Returns the operator that a provider runs: the bench's, or another function."""
        return next((other.operator for other in self.others if provider in other.providers), self.operator)

    @property
    def record_name(self) -> str:
        """The bench's name in records."""
        return self.name.replace("-", "_")

    @property
    def every_provider(self) -> dict[str, Callable[[Case], Callable[..., Outputs]]]:
        """The builders of all providers, those of other functions last."""
        return dict(self.providers) | {n: build for other in self.others for n, build in other.providers.items()}

    def providers_of(self, suite: str) -> list[str]:
        """Returns the names of the providers that a suite measures by default."""
        if suite == QUICK:
            return [name for name in self.every_provider if not self.quick or name in self.quick]
        return list(self.every_provider)

    def modes_of(self, suite: str) -> list[str]:
        """Returns the modes that a suite measures by default: ``quick`` leaves out ``fwd_bwd``."""
        return [mode for mode in self.modes if suite != QUICK or mode != "fwd_bwd" or "bwd" not in self.modes]

    @property
    def other_names(self) -> list[str]:
        """The names of the providers of other functions."""
        return [name for other in self.others for name in other.providers]


def on_gpus(cases: Callable[[str], Sequence[Case]]) -> Callable[[str], Sequence[Case]]:
    """Returns a suite's function of cases that has none for a CPU."""
    return lambda device: cases(device) if device == "cuda" else ()


def compile_at_best(function: Callable[..., Any], *, graphs: bool = False) -> Callable[..., Any]:
    """Compile a peer for its case with the compiler's autotuning.

    Args:
        function: The function to compile.
        graphs: True to replay it from CUDA graphs.
    """
    mode = "max-autotune" if graphs else "max-autotune-no-cudagraphs"
    compiled: Callable[..., Any] = torch.compile(function, dynamic=False, mode=mode)
    return compiled


_PERIOD = 2**24 - 3  # a prime


def normal(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, generator: torch.Generator
) -> torch.Tensor:
    """Returns a tensor of normal random numbers.

    On a GPU they are drawn there, which is much faster for large tensors. On a CPU a large tensor repeats them with
    a prime period, so that no two of its rows are equal. While launches are recorded, the tensor is left
    uninitialised, as nothing reads it and some cases have many GiB.
    """
    if is_recording():
        return torch.empty(shape, dtype=dtype, device=device)
    if device.type == "cuda":
        seed = int(torch.randint(2**62, (), generator=generator))
        own = torch.Generator(device).manual_seed(seed)
        return torch.randn(shape, dtype=dtype, device=device, generator=own)
    size = math.prod(shape)
    numbers = torch.randn(min(size, _PERIOD), generator=generator).to(device, dtype)
    if size > _PERIOD:
        numbers = numbers.repeat(-(-size // _PERIOD))[:size].clone()
    return numbers.view(shape)


def need_cuda(what: str = "the Triton kernels") -> None:
    """Raise unless there is an NVIDIA GPU, for builders of providers, as in ``examples/rms_norm/spec.py``.

    Raises:
        Unsupported: There is no NVIDIA GPU.
    """
    if not torch.cuda.is_available() and not is_recording():
        raise Unsupported(f"an NVIDIA GPU is needed for {what}")


def is_recording() -> bool:
    """Returns True while launches are recorded instead of made, which read no numbers."""
    launch = sys.modules.get("warploom.runtime.launch")
    return bool(launch and launch.is_recording())
