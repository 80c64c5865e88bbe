"""Tell whether a change of the code leaves the kernels as they were.

``python tools/compare_builds.py save FILE`` writes a digest of each kernel variant that operators' cases launch;
``python tools/compare_builds.py compare FILE``, in the changed checkout, lists those that are gone and those that
are new. Names, files, comments and the functions that a kernel is cut into do not count: what is compared is the
first form that Triton's compiler gives a kernel after everything is inlined, and the options that it is compiled
with. Equal forms compile to equal machine code. All operators take five minutes on two cores, and no GPU.

Exit status: 0 if all are as they were, else 1.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import os
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ARCHITECTURES = (80, 90, 100)
OTHERS = "others"  # kernels that no operator's case launches
_FUNCTION = re.compile(r"public @\w+\((.*?)\) attributes", re.DOTALL)
_ARGUMENT = re.compile(r"%arg\d+")
_CONSTANT = re.compile(r"\s*(%\w+) = arith\.constant (.*)")


def first_form(build: Any, arch: int) -> str:
    """Returns a kernel variant after everything is inlined, as text without names, places and unused arguments."""
    from triton._C.libtriton import ir
    from triton.backends.compiler import GPUTarget
    from triton.compiler.compiler import make_backend

    source, options = build.source()
    target = GPUTarget("cuda", arch, 32)
    backend = make_backend(target)
    parsed = backend.parse_options(options)
    stages: dict[str, Any] = {}
    backend.add_stages(stages, parsed, source.language)
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    known = backend.get_codegen_implementation(parsed), backend.get_module_map()
    module = source.make_ir(target, parsed, *known, context)
    module = stages[source.ext](module, {})
    before, arguments, body = _FUNCTION.split(module.str_nodebug(), maxsplit=1)
    types = dict(each.split(": ", 1) for each in re.split(r", (?=%arg)", arguments))
    named = dict.fromkeys(_ARGUMENT.findall(body))
    # In the order of the signature: two pointers that a kernel mixes up are a difference.
    order = [*(name for name in types if name in named), *(name for name in named if name not in types)]
    numbers = {name: f"%arg{n}" for n, name in enumerate(order)}
    body = _ARGUMENT.sub(lambda found: numbers[found[0]], body)
    used = [f"{numbers[name]}: {kind}" for name, kind in types.items() if name in named]
    return "\n".join((before, *used, *_without_names_of_constants(body.splitlines())))


def _without_names_of_constants(lines: Sequence[str]) -> Iterator[str]:
    """Yield the lines with the values of constants where these are used, and then the values in order."""
    known: dict[str, str] = {}
    values = []
    for line in lines:
        if constant := _CONSTANT.match(line):
            known[constant[1]] = f"[{constant[2]}]"
            values.append(constant[2])
        else:
            yield re.sub(r"%\w+", lambda found: known.get(found[0], found[0]), line)
    yield from sorted(values)


def digest(build: Any, arch: int) -> str:
    """Returns a digest of a kernel variant: equal ones compile to equal machine code."""
    text = f"{first_form(build, arch)}\n{sorted(build.options.items())}"
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def digests(operator: str, arch: int) -> dict[str, str]:
    """Returns a name for each variant that an operator's cases launch on an architecture, by its digest."""
    from warploom.ops import operators
    from warploom.testing.build import record, record_others

    if operator == OTHERS:
        builds = record_others(arch)
    else:
        builds = [build for _, build in record([operators()[operator]], arch)]
    return {
        digest(build, arch): f"{build.function.__name__} sm_{arch} {operator}: {build.variant}" for build in builds
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("save", "compare"))
    parser.add_argument("file", type=Path)
    parser.add_argument("--operator", action="append", help="as in `warploom list`; may be repeated; default: all")
    parser.add_argument("--arch", nargs="+", type=int, default=[*ARCHITECTURES], metavar="SM", help="80 90")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes; default: one for each core")
    options = parser.parse_args(arguments)

    from warploom.ops import operators

    names = options.operator or [*operators(), OTHERS]
    jobs = [(name, arch) for name in names for arch in options.arch]
    with multiprocessing.get_context("spawn").Pool(options.jobs) as pool:
        of_jobs = pool.starmap(digests, jobs, chunksize=1)
    found = {f"{name} {arch}": digests for (name, arch), digests in zip(jobs, of_jobs, strict=True)}
    if options.action == "save":
        options.file.write_text(json.dumps(found, indent=1), encoding="utf-8")
        print(f"{sum(map(len, found.values()))} variants in {options.file}")
        return 0
    before = json.loads(options.file.read_text(encoding="utf-8"))
    gone, new = [], []
    for job, now in found.items():
        gone += [text for digest, text in before.get(job, {}).items() if digest not in now]
        new += [text for digest, text in now.items() if digest not in before.get(job, {})]
    for what, texts in (("gone", gone), ("new", new)):
        for text in texts:
            print(f"{what}: {text}")
    print(f"{sum(map(len, found.values()))} variants, {len(gone)} gone, {len(new)} new")
    return 1 if gone or new else 0


if __name__ == "__main__":
    sys.exit(main())
