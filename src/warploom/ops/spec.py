"""What tests, bench and documentation know of an operator: the types that each ``bench.py`` fills in.

An operator's folder says here, once, how its inputs are made, which small odd cases must be right, which
cases are timed, what stands beside it and how many bytes it must move. The conformance suite and the bench
go through these descriptions and contain nothing about any one operator.
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
"""Keyword arguments of the public function. Tensors that want a gradient are leaves that require it."""

Outputs = torch.Tensor | tuple[torch.Tensor, ...]


KERNELS = "warploom"
"""The provider that is the operator on its kernels; names of variants begin with it."""
QUICK = "quick"
"""The suite of a person's first minute."""
COMPILED_BRIEFLY = "torch_compile_default"
"""The provider that is compiled without a search for tiles: in the suite `QUICK` alone."""


class Unsupported(Exception):
    """Raised by a provider that cannot do a case (a missing package, GPU or feature); the text says why.

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
    """One public function, as the conformance suite sees it.

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
    """The public function; called as ``function(**inputs, backend=...)``."""
    reference: Callable[..., Outputs]
    """The definition; called as ``reference(**inputs)`` on any device and float dtype, float64 included."""
    make_inputs: Callable[[Case, torch.device, torch.Generator], Inputs]
    """Random inputs of a case, drawn on the CPU generator and moved, the same on every device."""
    check_cases: tuple[Case, ...]
    """Small odd cases that together touch every feature; every backend must meet the error budget on each."""
    autocasts: tuple[str, ...] = ()
    """The inputs that autocast casts, as it does those of a matrix product."""
    length: str = "n"
    """The case parameter that is a length of a sequence: another value of it compiles nothing new."""
    spills: Mapping[str, int] = field(default_factory=dict)
    """Kernel name to the bytes a thread that its variants may spill at most, for tiles that were measured to be
    faster than those that spill nothing. A kernel that is not named may spill none."""
    fused: bool = False
    """Whether ``backend="torch"`` is another computation than the reference: PyTorch's fused attention, say."""


@dataclass(frozen=True)
class Traffic:
    """The fewest bytes a case must move and operations it must do, and the mix to stream for the limit.

    ``reads`` and ``writes`` count equal streams of ``stream_bytes`` each: one tensor read and one twice its
    size written is ``reads=1, writes=2``.

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
        """Bytes that any implementation must move through device memory."""
        return (self.reads + self.writes) * self.stream_bytes

    @classmethod
    def of_bytes(cls, read: int, written: int, flops: int = 0) -> Traffic:
        """Traffic of so many bytes, in the mix of at most four reads and three writes that comes closest.

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

    It has its own inputs, definition and bytes: it is checked against its own reference, and has no share of the
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
    """Makes its inputs from the bench's cases, and defines what is right."""
    providers: Mapping[str, Callable[[Case], Callable[..., Outputs]]]
    """As those of a `Bench`, under names that say which function they are of."""
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
    """With dashes, as typed: ``lrpe-cosine-md``. Records carry it with underscores."""
    operator: Operator
    suites: Mapping[str, Callable[[str], Sequence[Case]]]
    """Suite name (``quick``, ``published``) to a function from device type (``cuda``, ``cpu``) to cases."""
    providers: Mapping[str, Callable[[Case], Callable[..., Outputs]]]
    """Name to a builder. The builder gets the case and returns a function called as ``f(**inputs)``, or
    raises `Unsupported`. The provider ``limit`` is the bench's own and not listed here."""
    traffic: Callable[[Case, str], Traffic]
    """Bytes and operations of a case in a mode (``fwd``, ``bwd`` or ``fwd_bwd``)."""
    title: str
    """One line for tables and the report."""
    x: str = "n"
    """The case parameter that runs down the rows of a table and along the axis of a plot."""
    modes: tuple[str, ...] = ("fwd", "bwd")
    own: str = ""
    """The provider that stands for the operator: drawn thick, compared with the others, and a failure of the run
    when it fails. Empty for ``warploom``, or ``torch`` where no kernel can run."""
    command: str = ""
    """What runs it, where that is not ``warploom bench NAME``: another such command line, to which a selection is
    added, or a script's, which is all there is to say."""
    others: tuple[Other, ...] = ()
    """Other functions to time beside it."""
    precompiled: tuple[str, ...] = ()
    """Providers, those of other functions included, whose kernels come compiled, as eager PyTorch's do. What the
    rest run is compiled before anything is measured."""
    quick: tuple[str, ...] = ()
    """The providers of the suite ``quick``, none of which searches for its tiles; empty for all."""
    budgets: Mapping[str, float] = field(default_factory=dict)
    """By how much the error budget of a peer is larger than ours, for one that is known to round more."""
    measure: Callable[..., list[Any]] | None = None
    """What measures a unit in the place of `warploom.bench.evaluate.evaluate`: steps of models."""
    prepare: Callable[..., Callable[[], object]] | None = None
    """With `measure`: returns the step to be profiled of a provider (its name, the unit, the device), warmed up."""
    launches: Callable[[Case, str], object] | None = None
    """Launches what a provider launches of ours in a case, where that is not to call it: see `fingerprint`."""

    def runs_kernels(self, provider: str) -> bool:
        """Whether a provider runs the operator's own kernels."""
        return provider.startswith(KERNELS)

    @property
    def record_name(self) -> str:
        """The bench's name as records carry it."""
        return self.name.replace("-", "_")

    @property
    def every_provider(self) -> dict[str, Callable[[Case], Callable[..., Outputs]]]:
        """Builders of all providers, those of other functions last."""
        return dict(self.providers) | {n: build for other in self.others for n, build in other.providers.items()}

    def providers_of(self, suite: str) -> list[str]:
        """Names of the providers that a suite measures where the user names none."""
        if suite == QUICK:
            return [name for name in self.every_provider if not self.quick or name in self.quick]
        return [name for name in self.every_provider if name != COMPILED_BRIEFLY]

    def modes_of(self, suite: str) -> list[str]:
        """Modes that a suite measures where the user names none: both passes together are left out of ``quick``."""
        return [mode for mode in self.modes if suite != QUICK or mode != "fwd_bwd" or "bwd" not in self.modes]

    @property
    def other_names(self) -> list[str]:
        """The providers of other functions."""
        return [name for other in self.others for name in other.providers]


def compiled_briefly(function: Callable[..., Any]) -> Callable[..., Any]:
    """A peer compiled for its case with the compiler's first choice of tiles: `COMPILED_BRIEFLY`."""
    compiled: Callable[..., Any] = torch.compile(function, dynamic=False)
    return compiled


def compiled_at_best(function: Callable[..., Any], *, graphs: bool = False) -> Callable[..., Any]:
    """A peer compiled for its case with the compiler's own search for tiles: it gets its best settings too.

    Args:
        function: What is compiled.
        graphs: Whether it is replayed from CUDA graphs.
    """
    mode = "max-autotune" if graphs else "max-autotune-no-cudagraphs"
    compiled: Callable[..., Any] = torch.compile(function, dynamic=False, mode=mode)
    return compiled


_PERIOD = 2**24 - 3  # a prime


def normal(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, generator: torch.Generator
) -> torch.Tensor:
    """Normal numbers. On a CPU a large tensor repeats them with a prime period: no two of its rows are alike.

    On a GPU they are drawn there: those of a large tensor would take the host longer than all that a case measures.
    While launches are recorded nothing reads them: then the memory, of many GiB in some cases, is never touched.
    """
    if _is_recording():
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
    """For the builder of a provider that runs on an NVIDIA GPU only, as in ``examples/rms_norm/spec.py``.

    Raises:
        Unsupported: There is none.
    """
    if not torch.cuda.is_available() and not _is_recording():
        raise Unsupported(f"an NVIDIA GPU is needed for {what}")


def _is_recording() -> bool:
    launch = sys.modules.get("warploom.runtime.launch")
    return bool(launch and launch.is_recording())
