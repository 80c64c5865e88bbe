"""Compile every kernel variant that the operators' cases launch, for any GPU, without one.

``python -m warploom.testing.build [OPERATOR ...] --arch 80 89 90`` runs the cases on CPU tensors while
`warploom.runtime.launch.record_builds` records the builds. It compiles each distinct variant to machine code, and
prints the registers, stack and shared memory that the assembler reports. It exits with 1 if a kernel does not
compile, compiles to a trap, needs more shared memory than the GPU has, or spills more registers to the stack than
its operator's ``spills`` allow (by default none). Those are known for one version of Triton; with another, spills
are printed and fail nothing.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import re
import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.errors import TritonError

from warploom.errors import BackendError
from warploom.ops import benches, operators
from warploom.ops.spec import Case, Operator
from warploom.runtime import launch
from warploom.testing.accuracy import as_tuple
from warploom.testing.conformance import compute_gradients, find_leaves, make_inputs
from warploom.testing.descriptors import disassemble, find_lost_addresses, run_tool
from warploom.testing.specs import load_specs

ARCHITECTURES = launch.SHARED_MEMORY
"""The compute capabilities, times ten, that kernels are built for."""

SPILLS_ARE_KNOWN = triton.__version__.startswith("3.7.")
"""True if operators' ``spills`` are those of this version of Triton."""

_TRAP = re.compile(r"\btrap;")
_USAGE = re.compile(r"REG:(\d+) STACK:(\d+) .*?LOCAL:(\d+)")


class BuildError(Exception):
    """A kernel variant that does not compile. The text names it and says why."""


@dataclass(frozen=True)
class Resources:
    """The resources of one compiled kernel variant on one architecture."""

    kernel: str
    variant: str
    """Types of the pointers and values of the constants."""
    arch: int
    registers: int
    """Per thread; 255 at most."""
    stack: int
    """Bytes per thread in local memory; more than 0 if registers are spilled."""
    allowed: int
    """The largest ``stack`` that is allowed."""
    shared: int
    """Bytes of shared memory per program."""


def list_cases(operator: Operator) -> list[Case]:
    """Returns the check cases of an operator, and of its benches' CUDA cases the shortest and longest of each kind.

    A length (or a list of sizes that add up to it) compiles nothing new unless it decides how a call is divided, so
    cases of other lengths launch the same variants.
    """
    ends: dict[str, tuple[Case, Case]] = {}
    for bench in benches().values():
        if bench.operator.name != operator.name:
            continue
        for case in (case for suite in bench.suites.values() for case in suite("cuda")):
            lists = {name: len(value) for name, value in case.items() if isinstance(value, list | tuple)}
            key = json.dumps({**case, **lists, operator.length: None}, sort_keys=True)
            both = (*ends.get(key, (case, case)), case)
            ends[key] = tuple(end(both, key=lambda each: each[operator.length]) for end in (min, max))  # type: ignore[assignment]
    return [*operator.check_cases, *itertools.chain.from_iterable(ends.values())]


def record(chosen: Iterable[Operator], arch: int) -> list[tuple[Operator, launch.Build]]:
    """Record the distinct kernel variants that the cases of operators launch, forward and backward.

    Runs on the CPU and launches nothing. A case that the kernels do not support is left out. A variant that several
    operators launch belongs to the first.
    """
    owners: list[Operator] = []
    with launch.record_builds(arch) as builds:
        for operator in chosen:
            for case in list_cases(operator):
                inputs = make_inputs(operator, case, torch.device("cpu"))
                try:
                    output = operator.function(**inputs, backend="triton")
                except BackendError:
                    continue
                if find_leaves(inputs):
                    compute_gradients(output, inputs, tuple(map(torch.empty_like, as_tuple(output))))
            owners += [operator] * (len(builds) - len(owners))
    return list(zip(owners, builds.values()))


OTHER_SPILLS = {  # with a mask, a bias and slopes at once, most of them on sm_80 and sm_120
    "masked_forward_kernel": 304,
    "masked_query_kernel": 520,
    "masked_key_kernel": 144,
    "masked_bias_kernel": 248,
    "jvp_kernel": 64,  # before and behind its loops, of 128 features
}
"""Bytes a thread that kernels of `record_others` may spill."""


def record_others(arch: int) -> list[launch.Build]:
    """Record kernels that no case launches: of rotary attention, masks, forward mode, slabs, sums over ranks."""
    from warploom import flash_attention, lrpe_cosine, lrpe_rotate
    from warploom.distributed.kernels import sum_rows, sum_rows_kernel
    from warploom.ops.rotary_attention.api import rotary_attention
    from warploom.ops.rotary_attention.triton import rotate_kernel

    with launch.record_builds(arch) as builds:
        if arch == 90:  # elsewhere it is LRPE and attention, one after the other
            rotary_attention(torch.zeros(1, 2048, 12, 128, dtype=torch.bfloat16), torch.zeros(64), 4, 0.125)
        q, k, v = (torch.zeros(1, n, 2, 64, dtype=torch.bfloat16, requires_grad=True) for n in (140, 270, 270))
        bias, mask = torch.zeros(1, 1, 140, 270, requires_grad=True), torch.ones(1, 1, 140, 270, dtype=torch.bool)
        out = flash_attention(q, k, v, mask=mask, bias=bias, alibi=torch.ones(2), backend="triton")
        torch.autograd.grad(out, (q, k, v, bias), torch.zeros_like(out))
        attend = functools.partial(flash_attention, causal=True, backend="triton")
        for features, dtype in ((64, torch.bfloat16), (128, torch.bfloat16), (64, torch.float32)):
            primals = (torch.zeros(1, 300, 2, features, dtype=dtype),) * 3
            torch.func.jvp(attend, primals, primals)
        rows, numbers = torch.zeros(4, 64, dtype=torch.bfloat16), torch.zeros(4, dtype=torch.int32)
        sum_rows(rows, numbers, numbers, torch.zeros(3, 64, dtype=torch.bfloat16))
    with launch.record_builds(arch, 132) as waiting:  # on few multiprocessors others take these calls
        for function, width in ((lrpe_rotate, 128), (lrpe_cosine, 64)):
            x = torch.zeros(1, 600, 2, width, dtype=torch.bfloat16, requires_grad=True)
            out = function(x, torch.zeros(64), activation="softmax_sequence", backend="triton")
            torch.autograd.grad(out, x, torch.zeros_like(out))
    others = (rotate_kernel, sum_rows_kernel)
    return [
        b
        for b in (*builds.values(), *waiting.values())
        if b.function in others or b.function.__module__.endswith((".masked", ".jvp", ".slabs"))
    ]


def take_evenly(
    variants: Sequence[tuple[Operator | None, launch.Build]], at_most: int | None
) -> Sequence[tuple[Operator | None, launch.Build]]:
    """Returns at most so many variants of each kernel of each operator, evenly spaced in the order of the cases."""
    if at_most is None:
        return variants
    kernels: dict[tuple[str, str], list[tuple[Operator | None, launch.Build]]] = {}
    for operator, variant in variants:
        name = operator.name if operator else ""
        kernels.setdefault((name, variant.function.__name__), []).append((operator, variant))
    return [one for some in kernels.values() for one in some[:: max(1, -(-len(some) // at_most))]]


def build(variant: launch.Build, arch: int, allowed: int = 0) -> Resources:
    """Compile one kernel variant, which may spill ``allowed`` bytes a thread, for one architecture.

    Raises:
        BuildError: It does not compile, needs more shared memory than the architecture has, compiles to a trap
            (Triton's compiler can take code for unreachable without a warning), or to products that read from
            undefined addresses (`warploom.testing.descriptors`).
    """
    name, described = str(variant.function.__name__), _describe(variant)
    where = f"{name} [{described}] for sm_{arch}"
    try:
        compiled = variant.compile(GPUTarget("cuda", arch, 32))
    except (TritonError, RuntimeError) as error:
        raise BuildError(f"{where}: {_reason(error)}") from error
    if _TRAP.search(compiled.asm["ptx"]):
        raise BuildError(f"{where}: compiles to a trap")
    lost = find_lost_addresses(disassemble(compiled.asm["cubin"])) if "wgmma" in compiled.asm["ptx"] else []
    if lost:
        raise BuildError(f"{where}: {lost[0]}")
    registers, stack, local = _usage(compiled.asm["cubin"])
    shared = compiled.metadata.shared
    if shared > 1024 * ARCHITECTURES.get(arch, shared):
        raise BuildError(f"{where}: needs {shared} bytes of shared memory, of {1024 * ARCHITECTURES[arch]}")
    return Resources(name, described, arch, registers, stack + local, allowed, shared)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m warploom.testing.build", description=__doc__)
    parser.add_argument("operator", nargs="*", help="e.g. lrpe_rotate; all of them by default")
    spec_help = "a file with OPERATORS of your own, which is run as a program"
    parser.add_argument("--spec", action="append", type=Path, default=[], help=spec_help)
    parser.add_argument("--arch", nargs="+", type=int, default=[*ARCHITECTURES], metavar="SM", help="80 90")
    parser.add_argument("--at-most", type=int, metavar="N", help="N variants of each kernel; all by default")
    parser.add_argument("--part", metavar="I/N", help="the I-th variant of every N, to divide the work")
    parser.add_argument("--jobs", type=int, default=2, help="compilations at a time")
    options = parser.parse_args(arguments)
    names = options.operator or [o.name for spec in load_specs(options.spec) for o in spec.operators]
    registry = operators()
    unknown = set(options.operator) - set(registry)
    if unknown:
        parser.error(f"no operator {', '.join(sorted(unknown))}; there are {', '.join(registry)}")

    first, step = map(int, (options.part or "1/1").split("/"))
    chosen = [registry[name] for name in names or registry]
    jobs = []
    for arch in options.arch:
        recorded: list[tuple[Operator | None, launch.Build]] = [*record(chosen, arch)]
        some = take_evenly(recorded, options.at_most)[first - 1 :: step]
        if not names:
            some = [*some, *take_evenly([(None, variant) for variant in record_others(arch)], options.at_most)]
        for operator, variant in some:
            spills = operator.spills if operator else OTHER_SPILLS
            jobs.append((variant, arch, spills.get(variant.function.__name__, 0)))
    # The compiler leaves Python for nearly all of its work, so threads keep several cores busy.
    with ThreadPoolExecutor(options.jobs) as pool:
        futures = [pool.submit(build, *job) for job in jobs]
    built: list[Resources] = []
    failures: list[BuildError] = []
    for future in futures:
        try:
            built.append(future.result())
        except BuildError as error:
            failures.append(error)
    print(f"{'kernel':<24} {'arch':>6} {'registers':>9} {'stack':>6} {'allowed':>7} {'shared':>7}  variant")
    for r in sorted(built, key=lambda r: (r.kernel, r.variant, r.arch)):
        arch = f"sm_{r.arch}"
        print(f"{r.kernel:<24} {arch:>6} {r.registers:>9} {r.stack:>6} {r.allowed:>7} {r.shared:>7}  {r.variant}")
    for failure in failures:
        print(f"FAILED {failure}")
    spilled = sum(resources.stack > resources.allowed for resources in built)
    print(
        f"{len(jobs)} variants for {len(options.arch)} architectures: {len(built)} built, "
        f"{len(failures)} failed, {spilled} with more spilled registers than allowed"
    )
    return 1 if failures or (spilled and SPILLS_ARE_KNOWN) else 0


def _reason(error: BaseException) -> str:
    """Returns the text of an error, and of its first cause."""
    first = cause = error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    return str(first) if str(cause) in str(first) else f"{first}\n{cause}"


def _describe(variant: launch.Build) -> str:
    """Returns the types of pointers (``@16`` if aligned for vector access) and the values of constants, as text."""
    pointers = [
        f"{name}={kind}@{launch.ALIGNMENT}" if (index,) in variant.attrs else f"{name}={kind}"
        for index, (name, kind) in enumerate(variant.signature.items())
        if isinstance(kind, str) and kind.startswith("*")
    ]
    constants = [f"{name}={value}" for name, value in variant.constexprs.items() if value is not None]
    return " ".join([*pointers, *constants])


def _usage(cubin: bytes) -> tuple[int, int, int]:
    """Returns the registers, stack bytes and local bytes of the one kernel in a cubin."""
    report = run_tool(cubin, triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage")
    found = _USAGE.search(report)
    if found is None:
        raise BuildError(f"no resource usage in the report of cuobjdump:\n{report}")
    registers, stack, local = (int(number) for number in found.groups())
    return registers, stack, local


if __name__ == "__main__":
    sys.exit(main())
