"""Kernels of random calls, compiled for a GPU that need not be there and held to what `testing.build` checks.

``python tools/random_builds.py flash_attention --seconds 600`` draws calls as `random_calls.py` does, runs nothing
of them, and compiles each variant that they would launch. One that does not compile, compiles to a trap, takes too
much shared memory or multiplies what it reads from nowhere is printed with its call. Spilled registers fail none.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch
from random_cases.calls import Call
from random_cases.command import pick_operators
from random_cases.families import Source, text_of
from random_cases.judging import Prepared

from warploom.cli.common import seconds
from warploom.errors import WarploomError
from warploom.runtime import launch
from warploom.testing.build import ARCHITECTURES, BuildError, build

EVERY = 50
"""Variants between two lines of progress."""
MULTIPROCESSORS = 132
"""Of the GPU, which some plans depend on."""


def variants_of(call: Call, arch: int) -> list[launch.Build]:
    """What a call would launch; nothing if it is refused."""
    with launch.record_builds(arch, MULTIPROCESSORS) as builds:
        try:
            Prepared(call, torch.device("cpu"), "triton").run()
        except WarploomError:
            return []
    return list(builds.values())


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="random_builds.py", description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="operators, e.g. flash_attention (default: all)")
    parser.add_argument("--arch", type=int, choices=[*ARCHITECTURES], default=90, help="of the GPU (default: 90)")
    parser.add_argument("--seconds", type=seconds, default=60.0, help="how long (default: 60)")
    parser.add_argument("--seed", type=int, metavar="N", help="where the calls come from (default: a new one)")
    options = parser.parse_args(arguments)
    try:
        operators = pick_operators([name.replace("-", "_") for name in options.names])
    except WarploomError as error:
        print(f"random_builds.py: {error}", file=sys.stderr)
        return 2
    seed = int.from_bytes(os.urandom(4)) if options.seed is None else options.seed
    source = Source(seed, operators, anything=True)
    began, index, failed = time.monotonic(), 0, 0
    seen: set[tuple[Any, ...]] = set()
    while time.monotonic() - began < options.seconds:
        for call in source.family(index):
            for variant in variants_of(call, options.arch) if call.dtype != "float64" else ():
                if variant.key in seen:
                    continue
                seen.add(variant.key)
                try:
                    build(variant, options.arch)
                except BuildError as error:
                    failed += 1
                    print(f"FAILED {error}\n  of {text_of([call])}", flush=True)
                if len(seen) % EVERY == 0:
                    print(f"{time.monotonic() - began:.0f} s: {len(seen)} variants, {failed} failed", flush=True)
        index += 1
    print(f"seed {seed}: {len(seen)} variants of {index} families for sm_{options.arch}, {failed} failed")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
