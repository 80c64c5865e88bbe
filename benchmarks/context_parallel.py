"""Attention over several GPUs as a bench: the command starts the ranks itself, one for each GPU.

The limit is the time of the same call on one GPU over the number of GPUs, measured in the same run: a share of the
limit is the share of an ideal speed-up. Ranks begin a repetition together, and its time is that of the slowest.
What a provider computes is checked on a shorter sequence against float64, and ours at full length against one GPU.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from warploom import delta_attention, flash_attention, linear_attention
from warploom.bench.attempt import Failure, attempt
from warploom.bench.evaluate import Unit, describe_accuracy
from warploom.bench.fingerprint import LIMIT
from warploom.bench.measure import (
    Clock,
    CudaClock,
    Sample,
    Timing,
    peak_bytes,
    release_memory,
    time_interleaved,
    wall_us,
)
from warploom.bench.records import Record
from warploom.distributed import (
    context_parallel_attention,
    context_parallel_delta_attention,
    context_parallel_linear_attention,
    shard_sequence,
    unshard_sequence,
)
from warploom.ops.spec import KERNELS, Case, Inputs, Outputs, Traffic, Unsupported, normal
from warploom.testing.accuracy import as_tuple, compare
from warploom.testing.conformance import find_leaves, upcast

from . import _context_parallel_peers as peers
from ._steps import model_bench

Tensor = torch.Tensor
Function = Callable[..., Outputs]

CHECKED = 2048
"""Tokens of the sequence on which providers are checked."""
SEQUENCES = 12
"""The number of sequences in the packed case."""
WINDOW = 4096
STATES = ("linear", "delta")
"""Kinds with a state, whose parts are contiguous."""
TIMEOUT = 900  # seconds, of all ranks


def make_inputs(case: Case, device: torch.device, generator: torch.Generator) -> Inputs:
    """Returns inputs of the whole sequence."""
    heads, n, dtype = case["heads"], case["n"], getattr(torch, case["dtype"])
    shared = (case["batch"], n, case["kv_heads"], case["head_dim"])
    shapes = ((case["batch"], n, heads, case["head_dim"]), shared, shared)
    if case["kind"] == "delta":  # whose heads of keys are fewer than those of values
        shapes = (shared, shared, shapes[0])
    q, k, v = (normal(shape, dtype, device, generator).requires_grad_() for shape in shapes)
    inputs: Inputs = {"q": q, "k": k, "v": v}
    if case["kind"] == "delta":
        gates = torch.rand((2, case["batch"], n, heads), generator=generator).to(device)
        inputs |= {"beta": gates[0].requires_grad_(), "decay": (-0.3 * gates[1].square()).requires_grad_()}
    if case["kind"] == "linear":
        inputs["decay"] = (-(2.0 ** (-8 * torch.arange(1, heads + 1) / heads))).to(device)
        inputs["theta"] = (10_000.0 ** -(torch.arange(case["head_dim"] // 2) / (case["head_dim"] // 2))).to(device)
    if case["kind"] == "packed":
        cuts = torch.randint(1, n, (SEQUENCES - 1,), generator=generator).sort().values
        inputs["cu_seqlens"] = torch.cat((torch.zeros(1), cuts, torch.full((1,), n))).to(device, torch.int32)
    return inputs


def _options(case: Case) -> dict[str, Any]:
    """Returns the options of attention in a case."""
    return {"causal": case["kind"] != "full", "window": (WINDOW, 0) if case["kind"] == "window" else None}


def attend_alone(case: Case, backend: str = "auto") -> Function:
    """Returns the call on one GPU."""
    if case["kind"] == "linear":
        return functools.partial(linear_attention, encoding="rotate", backend=backend)
    if case["kind"] == "delta":
        return functools.partial(delta_attention, normalize=True, backend=backend)
    attend: Any = functools.partial(flash_attention, **_options(case), backend=backend)
    return lambda q, k, v, cu_seqlens=None: attend(q, k, v, cu_seqlens_q=cu_seqlens)


# Providers: functions of this rank's parts


def _ours(case: Case, mesh: DeviceMesh) -> Function:
    if case["kind"] == "linear":
        return functools.partial(context_parallel_linear_attention, mesh=mesh, encoding="rotate")
    if case["kind"] == "delta":
        return functools.partial(context_parallel_delta_attention, mesh=mesh, normalize=True)
    return functools.partial(context_parallel_attention, mesh=mesh, **_options(case))


PROVIDERS: dict[str, Callable[[Case, DeviceMesh], Function]] = {KERNELS: _ours, **peers.PROVIDERS}


# A rank


class RanksClock(Clock):
    """A clock that all ranks read alike: repetitions begin together, and the slowest rank's time counts."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.cuda = CudaClock(device) if device.type == "cuda" else None
        self.token = torch.zeros(1, device=device)

    def _slowest(self, value: float) -> float:
        self.token.fill_(value)
        dist.all_reduce(self.token, dist.ReduceOp.MAX)
        return float(self.token)

    def host_us(self, call: Callable[[], object]) -> float:
        """See `Clock.host_us`."""
        self._slowest(0.0)
        return self._slowest(wall_us(call))

    def sample(self, call: Callable[[], object], host_us: float) -> Sample:
        """See `Clock.sample`."""
        if self.cuda is None:
            return Sample(self.host_us(call) / 1e3)
        clock = self.cuda
        self._slowest(0.0)
        clock.flush.zero_()
        torch.cuda._sleep(int((3 * host_us + 200) * clock.cycles_per_us))
        dist.all_reduce(self.token)  # ranks wait for each other on the device
        clock.start.record()
        call()
        clock.end.record()
        ahead = not clock.start.query()
        clock.end.synchronize()
        ms = self._slowest(float(clock.start.elapsed_time(clock.end)))
        return Sample(ms, self._slowest(float(not ahead)) == 0)


def _sharding(inputs: Inputs, case: Case) -> dict[str, Any]:
    """Returns the layout of a sequence on the ranks."""
    layout = "contiguous" if case["kind"] in STATES else "zigzag"
    return {"layout": layout, "cu_seqlens": inputs.get("cu_seqlens")}


def _shard(inputs: Inputs, grad: Tensor | None, case: Case, mesh: DeviceMesh) -> tuple[Inputs, Tensor | None]:
    """Returns this rank's parts of inputs and of the output's gradient; what has no tokens is every rank's."""

    def part(x: Tensor) -> Tensor:
        local = shard_sequence(x.detach(), mesh, **_sharding(inputs, case))
        return local.requires_grad_(x.requires_grad)

    of_tokens = {"q", "k", "v"} | ({"beta", "decay"} if case["kind"] == "delta" else set())
    parts = {name: part(x) if name in of_tokens else x for name, x in inputs.items()}
    return parts, None if grad is None else part(grad)


def _run(function: Function, inputs: Inputs, grad: Tensor | None) -> tuple[Tensor, ...]:
    """Returns the outputs, and the gradients of the inputs that require one."""
    with torch.set_grad_enabled(grad is not None):
        outputs = as_tuple(function(**inputs))
    if grad is None:
        return outputs
    return (*outputs, *torch.autograd.grad(outputs, list(find_leaves(inputs).values()), grad))


def _gather_all(results: Sequence[Tensor], inputs: Inputs, case: Case, mesh: DeviceMesh) -> tuple[Tensor, ...]:
    return tuple(unshard_sequence(x.detach(), mesh, **_sharding(inputs, case)) for x in results)


def _draw(case: Case, mode: str, device: torch.device) -> tuple[Inputs, Tensor | None]:
    generator = torch.Generator().manual_seed(0)
    inputs = make_inputs(case, device, generator)
    if mode == "fwd":
        return inputs, None
    shape = (case["batch"], case["n"], case["heads"], case["head_dim"])
    return inputs, normal(shape, inputs["q"].dtype, device, generator)


def _judge(name: str, case: Case, mode: str, mesh: DeviceMesh, device: torch.device) -> dict[str, Any]:
    """Returns the fields of a record for a provider's error against float64, on a short sequence."""
    case = {**case, "n": min(case["n"], CHECKED)}
    inputs, grad = _draw(case, mode, device)
    reference = attend_alone(case, "torch")
    exact = _run(reference, upcast(inputs), None if grad is None else grad.double())
    eager = _run(reference, inputs, grad)
    with peers.in_context(name, case, mesh, device):
        found = _run(PROVIDERS[name](case, mesh), *_shard(inputs, grad, case, mesh))
    return describe_accuracy(compare(_gather_all(found, inputs, case, mesh), exact, eager))


def _measure_all(task: dict[str, Any], device: torch.device) -> dict[str, dict[str, Any]]:
    """Returns fields of the records of all providers, and of the limit: the call on one GPU."""
    case, mode, names = task["case"], task["mode"], task["providers"]
    mesh = init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("cp",))
    clock: Clock = RanksClock(device)
    results: dict[str, dict[str, Any]] = {}
    for name in names:
        verdict = attempt(name, functools.partial(_judge, name, case, mode, mesh, device))
        results[name] = asdict(verdict) if isinstance(verdict, Failure) else verdict
    release_memory(device)
    inputs, grad = _draw(case, mode, device)
    parts = _shard(inputs, grad, case, mesh)
    one = functools.partial(_run, attend_alone(case), inputs, grad)
    fit = [name for name in names if "status" not in results[name]]
    if KERNELS in fit:
        found = _gather_all(_run(_ours(case, mesh), *parts), inputs, case, mesh)
        outputs = ("out", "dq", "dk", "dv", "dbeta", "ddecay")
        same = {n: bool(torch.equal(a, b)) for n, a, b in zip(outputs, found, one())}
        results[KERNELS]["details"] = {"bits_of_one_gpu": same}
        del found
    for name in fit:
        call = functools.partial(_run, PROVIDERS[name](case, mesh), *parts)
        with peers.in_context(name, case, mesh, device):
            peak = attempt(name, functools.partial(peak_bytes, call, device))
            timings = time_interleaved({name: call, LIMIT: one}, clock)
        if isinstance(peak, int):
            results[name]["peak_memory_mib"] = peak / 2**20
        limit = timings[LIMIT]
        if isinstance(limit, Timing):
            limit = timings[LIMIT] = limit.scaled(1 / case["gpus"])
        # Each is compared with the limit that was measured beside it, the first of which is recorded.
        for key, timing in timings.items() if LIMIT not in results else [(name, timings[name])]:
            results[key] = {**results.get(key, {}), **asdict(timing)}
            if isinstance(limit, Timing) and isinstance(timing, Timing):
                results[key] |= {"limit_ms": limit.ms, "limit_fraction": limit.ms / timing.ms}
    return results


def main(folder: str) -> None:
    """Run a rank: read the task from a folder, and write the results there."""
    device = torch.device("cpu")
    task = json.loads(Path(folder, "task.json").read_text(encoding="utf-8"))
    if task["device"] == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo", device_id=device if device.index is not None else None
    )
    results = _measure_all(task, device)
    if dist.get_rank() == 0:
        Path(folder, "results.json").write_text(json.dumps(results), encoding="utf-8")
    dist.destroy_process_group()


# The command


def measure(
    unit: Unit, providers: Sequence[str], device: torch.device, clock: Clock, blank: Record
) -> list[Record]:
    """Start the ranks of a case, and make records of what they found; see `warploom.bench.evaluate.evaluate`."""
    gpus, there = unit.case["gpus"], torch.cuda.device_count()
    found: dict[str, dict[str, Any]] = {}
    if device.type == "cuda" and there < gpus:
        missing = {"status": "unsupported", "reason": f"{gpus} GPUs are needed, and {there} are there"}
    else:
        release_memory(device)
        found, reason = _on_ranks(dict(unit.case), unit.mode, providers, device)
        missing = {"status": "error", "reason": reason or "not measured"}
    blank = replace(blank, flops=count_flops(unit.case, unit.mode))
    return [replace(blank, provider=name, **found.get(name, missing)) for name in (*providers, LIMIT)]


def _on_ranks(
    case: dict[str, Any], mode: str, providers: Sequence[str], device: torch.device
) -> tuple[dict[str, dict[str, Any]], str]:
    """Returns the results of the ranks, or the reason why there are none."""
    with tempfile.TemporaryDirectory() as folder:
        task = {"case": case, "mode": mode, "providers": list(providers), "device": device.type}
        Path(folder, "task.json").write_text(json.dumps(task), encoding="utf-8")
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(case["gpus"])]
        command = [sys.executable, *launcher, "-m", "benchmarks.context_parallel", folder]
        paths = [str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, env=environment)
        except subprocess.TimeoutExpired:
            return {}, f"the ranks took more than {TIMEOUT} s"
        file = Path(folder, "results.json")
        if not file.is_file():
            lines = [line for line in done.stderr.splitlines() if "Error" in line] or done.stderr.splitlines()
            return {}, (lines[0].strip() if lines else f"the ranks ended with {done.returncode}")[:300]
        return json.loads(file.read_text(encoding="utf-8")), ""


def count_flops(case: Case, mode: str) -> int:
    """Returns the operations of attention's products where queries see keys, on all ranks together."""
    n, features = case["n"], case["heads"] * case["head_dim"]
    if case["kind"] == "linear":
        pairs = 2 * n * case["head_dim"]
    elif case["kind"] == "delta":  # as the operator counts them: products of the size of a state
        return int(case["batch"] * (22 if mode == "fwd_bwd" else 6) * n * features * case["head_dim"])
    elif case["kind"] == "packed":
        small = {**case, "heads": 1, "kv_heads": 1, "head_dim": 1}
        bounds = make_inputs(small, torch.device("cpu"), torch.Generator().manual_seed(0))["cu_seqlens"]
        pairs = int((bounds.diff().double() ** 2).sum() / 2)
    else:
        pairs = {"causal": n * n // 2, "full": n * n, "window": n * min(WINDOW, n)}[case["kind"]]
    return int(case["batch"] * 4 * pairs * features * (3.5 if mode == "fwd_bwd" else 1))


def launch(case: Case, provider: str) -> None:
    """Launch the kernels of ours that a rank launches for its chunks, forward and backward."""
    if provider != KERNELS:
        raise Unsupported("launches nothing of ours")
    cpu, generator = torch.device("cpu"), torch.Generator()
    if case["kind"] in STATES:
        inputs = make_inputs({**case, "n": case["n"] // case["gpus"]}, cpu, generator)
        out = as_tuple(attend_alone(case, "triton")(**inputs))[0]
    else:
        from warploom.distributed.kernels import sum_rows

        inputs = make_inputs(case, cpu, generator)
        cu_seqlens = inputs.get("cu_seqlens")
        q = inputs["q"][:, : case["n"] // (2 * case["gpus"])]
        bounds: dict[str, Any] = {"cu_seqlens_q": cu_seqlens, "cu_seqlens_k": cu_seqlens}
        out = flash_attention(q, inputs["k"], inputs["v"], **bounds, **_options(case), backend="triton")
        numbers, rows = torch.zeros(2, dtype=torch.int32), inputs["k"][0].detach()
        sum_rows(rows, numbers, numbers, torch.empty_like(rows[:1]))
    torch.autograd.grad([out], list(find_leaves(inputs).values()), [torch.empty_like(out)])


def _cases(device: str, lengths: Sequence[int], kinds: Sequence[str], worlds: Sequence[int]) -> list[Case]:
    if device != "cuda":
        return []
    attention = {"batch": 1, "heads": 32, "kv_heads": 8, "head_dim": 128}
    shapes = {
        "linear": {"batch": 1, "heads": 64, "kv_heads": 64, "head_dim": 128},
        "delta": {"batch": 1, "heads": 32, "kv_heads": 16, "head_dim": 128},
    }
    return [
        {"kind": kind, "gpus": gpus, **shapes.get(kind, attention), "n": n, "dtype": "bfloat16"}
        for kind in kinds
        for gpus in worlds
        for n in lengths
    ]


def _trial(device: str) -> list[Case]:
    """Returns cases of a few tokens on two ranks, for tests."""
    shape = {"batch": 1, "heads": 2, "kv_heads": 2, "head_dim": 8, "n": 64}
    dtype = "float32" if device == "cpu" else "bfloat16"
    return [{"kind": kind, "gpus": 2, **shape, "dtype": dtype} for kind in ("causal", "delta")]


KINDS = ("causal", "packed", *STATES)
BENCH = model_bench(
    "context-parallel",
    make_inputs,
    PROVIDERS,
    suites={
        "quick": functools.partial(_cases, lengths=(16384,), kinds=("causal",), worlds=(2,)),
        "published": functools.partial(_cases, lengths=(16384, 65536), kinds=KINDS, worlds=(1, 2, 4)),
        "more": functools.partial(_cases, lengths=(65536, 262144), kinds=("full", "window"), worlds=(2, 4)),
        "trial": _trial,
    },
    traffic=lambda case, mode: Traffic(0, 0, 0, count_flops(case, mode)),
    title="Attention over several GPUs; the limit is one GPU's time over their number",
    modes=("fwd", "fwd_bwd"),
    measure=measure,
    launches=launch,
)
BENCHES = (BENCH,)

if __name__ == "__main__":
    main(sys.argv[1])
