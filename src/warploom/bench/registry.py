"""Every bench by name: those of the operators, of models, and of files and programs from outside."""

from __future__ import annotations

from warploom import ops
from warploom.ops.spec import Bench


def benches() -> dict[str, Bench]:
    """Every bench by name, in reading order."""
    from warploom.bench import context_parallel, llama, transformer

    found = (transformer.BENCH, llama.BENCH, context_parallel.BENCH)
    return {**ops.benches(), **{bench.name: bench for bench in found}}
