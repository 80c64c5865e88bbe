"""Processes that run checks together: one group for all checks of a file, and what each rank found in each."""

import contextlib
import datetime
import importlib
import json
import multiprocessing
import os
import sys
import tempfile
import traceback
from collections.abc import Iterator
from pathlib import Path

import torch

TIMEOUT = 300  # seconds, of all checks of a group


def run_checks(module: str, world: int, shared: Path | None = None) -> dict[str, str]:
    """Run every ``check_…(world)`` of a module on so many ranks; what went wrong on any of them, by check.

    ``shared`` is a folder that checks find as ``distributed_ranks.SHARED``.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["torch", "torch.distributed.tensor", "torch.testing", "warploom", "kernel_interpreter"]
    )
    with tempfile.TemporaryDirectory() as folder:
        ranks = [context.Process(target=_rank, args=(module, rank, world, folder, shared)) for rank in range(world)]
        with on_cpus():
            for process in ranks:
                process.start()
        found: dict[str, str] = {}
        for rank, process in enumerate(ranks):
            process.join(TIMEOUT)
            report = Path(folder, f"{rank}.jsonl")
            lines = [json.loads(line) for line in report.read_text().splitlines()] if report.is_file() else []
            for name, error in lines:
                if error or name not in found:
                    found[name] = found.get(name, "") + (f"rank {rank}: {error}\n" if error else "")
            if process.exitcode != 0:
                last = lines[-1][0] if lines else "the start"
                found["ranks"] = found.get("ranks", "") + f"rank {rank}: status {process.exitcode}, after {last}\n"
                process.kill()
                process.join()
        return found


@contextlib.contextmanager
def on_cpus() -> Iterator[None]:
    """What is started here sees no GPU, and runs kernels in Triton's interpreter."""
    wanted = {"CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "1"}
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value


SHARED = Path()


def _rank(module: str, rank: int, world: int, folder: str, shared: Path | None) -> None:
    import torch.distributed as dist

    torch.set_num_threads(1)
    sys.path[:0] = [str(Path(__file__).parent)]
    import kernel_interpreter

    kernel_interpreter.use()
    importlib.import_module("distributed_ranks").SHARED = shared
    checks = importlib.import_module(module)
    store = dist.FileStore(str(Path(folder, "store")), world)
    timeout = datetime.timedelta(seconds=TIMEOUT / 3)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timeout)
    names = [name for name in vars(checks) if name.startswith("check_")]
    with Path(folder, f"{rank}.jsonl").open("w") as report:
        for name in names:
            error = ""
            torch.manual_seed(0)
            try:
                getattr(checks, name)(world)
            except Exception:
                error = traceback.format_exc(limit=8)
            report.write(json.dumps([name, error]) + "\n")
            report.flush()
            with contextlib.suppress(Exception):
                dist.barrier()
    dist.destroy_process_group()
