"""Run the sanitizers of CUDA over small calls that launch every kernel of the package.

``python tools/sanitize.py`` needs a GPU, and ``compute-sanitizer`` on the PATH. First it runs the calls of
`sanitizer_calls` as they are, and says which kernels of the package they launched, and which they did not. Then it
runs them under

    memcheck    accesses out of bounds or misaligned
    racecheck   accesses to shared memory that nothing orders
    initcheck   loads of global memory that nothing wrote
    synccheck   barriers that not all threads reach

each in processes of its own, several at a time. A finding is known if `known_findings.toml` beside this file
explains it: by tool, kernel or call, and the text of the source lines that the tool names. Those that nothing
explains are printed whole.

Exit status: 0 if every finding is known and every kernel for this GPU was launched, else 1; 2 if it cannot run.
"""

from __future__ import annotations

import argparse
import fnmatch
import importlib
import json
import os
import pkgutil
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "warploom"
KNOWN = Path(__file__).with_name("known_findings.toml")
TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
PLAIN = "plain"  # no tool
SECONDS = 240.0
MOST_REPORTS = 30_000  # of one process
MOST_BARRIERS = 1024

_HEADLINE = re.compile(r"^=========\s?(\S.*)$")
_DETAIL = re.compile(r"^=========\s\s+(.*)$")
_NOISE = re.compile(
    r"^(COMPUTE-SANITIZER|(ERROR|RACECHECK|LEAK|SYNCCHECK) SUMMARY|Target application|No \w+ found|"
    r"\(?Internal|Saved host backtrace|Host Frame)"
)
_PLACE = re.compile(r"([\w./-]+\.py):(\d+)")
_HAZARDS = re.compile(r"\[(\d+) hazards?\]")


@dataclass(frozen=True)
class Kernel:
    """A kernel of the package."""

    module: str
    name: str
    gluon: bool
    calls: tuple[str, ...] = ()
    """Which launched it."""

    @property
    def group(self) -> str:
        """The operator's folder, or the part of the package."""
        parts = self.module.split(".")
        return parts[2] if parts[1] == "ops" else parts[1]

    def __str__(self) -> str:
        return f"{self.group}/{self.name}"


@dataclass(frozen=True)
class Place:
    """A line of source that a tool names."""

    file: str
    line: int
    text: str
    """The line's text; empty where the file is not found."""


@dataclass(frozen=True)
class Finding:
    """A tool's reports of one kind and place."""

    tool: str
    group: str
    kernel: str
    """Empty where the report is not about a kernel of the package."""
    call: str
    """Empty where the process made several."""
    kind: str
    places: tuple[Place, ...]
    count: int
    report: str
    """The first of the reports, whole."""
    known: str = ""
    """Why it is none, if that is known."""


@dataclass(frozen=True)
class Explanation:
    """A known finding: everything that is given must fit."""

    tool: str
    reason: str
    group: str = "*"
    kernel: str = ""
    call: str = "*"
    kind: str = "*"
    where: tuple[str, ...] = ()
    """Every line that the report names holds one of these texts."""

    def explains(self, finding: Finding) -> bool:
        """Returns True if a finding is this one."""
        if self.tool != finding.tool:
            return False
        pairs = (
            (finding.kernel, self.kernel),
            (finding.group, self.group),
            (finding.call, self.call),
            (finding.kind, self.kind),
        )
        if not all(fnmatch.fnmatchcase(found, pattern) for found, pattern in pairs):
            return False
        lines = [place.text for place in finding.places]
        return bool(lines or not self.where) and all(any(w in line for w in self.where) for line in lines)


@dataclass(frozen=True)
class Task:
    """A process: calls of one group under one tool."""

    tool: str
    group: str
    calls: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.tool} {self.group}" + (f" {self.calls[0]}" if len(self.calls) == 1 else "")


@dataclass(frozen=True)
class Result:
    """The result of a process."""

    task: Task
    seconds: float
    compiled: dict[str, list[str]] = field(default_factory=dict)
    """Kernels, as ``module:name``, by call that ended."""
    findings: tuple[Finding, ...] = ()


# ----------------------------------------------------------------------------------------------------------
# The process that makes the calls
# ----------------------------------------------------------------------------------------------------------


def make_calls(names: Sequence[str], tool: str, log: Path) -> None:
    """Make calls on the GPU.

    Args:
        names: Of calls of `sanitizer_calls`.
        tool: Under which this process runs.
        log: Gets a line of JSON for each call that ended: its name, and the kernels it was first to launch.
    """
    import torch
    import triton
    from sanitizer_calls import CALLS

    device, kernels = torch.device("cuda"), []

    def compiled(*, src: Any, **details: Any) -> None:
        kernels.append(f"{src.fn.__module__}:{src.fn.__name__}")

    triton.knobs.compilation.listener = compiled
    for name in names:
        next(call for call in CALLS if call.name == name).run(device, read_results=tool == "initcheck")
        torch.cuda.synchronize()
        with log.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"call": name, "kernels": kernels}) + "\n")
        kernels.clear()


# ----------------------------------------------------------------------------------------------------------
# Kernels of the package
# ----------------------------------------------------------------------------------------------------------


def package_kernels() -> list[Kernel]:
    """All kernels of the package: functions of Triton and Gluon whose names end in ``_kernel``."""
    import triton

    import warploom

    found = []
    for module in pkgutil.walk_packages(warploom.__path__, "warploom."):
        if not re.search(r"kernel|\.(triton|hopper)(\.|$)", module.name):
            continue
        for name, value in vars(importlib.import_module(module.name)).items():
            compiled = isinstance(value, triton.JITFunction) and value.__module__ == module.name
            if compiled and name.endswith("_kernel"):
                found.append(Kernel(module.name, name, value.is_gluon()))
    return found


def with_calls(kernels: Iterable[Kernel], results: Iterable[Result]) -> list[Kernel]:
    """The kernels with the calls that launched them."""
    by_kernel: dict[str, list[str]] = {}
    for result in results:
        for call, compiled in result.compiled.items():
            for name in compiled:
                by_kernel.setdefault(name, []).append(call)
    return [
        replace(kernel, calls=tuple(dict.fromkeys(by_kernel.get(f"{kernel.module}:{kernel.name}", ()))))
        for kernel in kernels
    ]


# ----------------------------------------------------------------------------------------------------------
# Reports
# ----------------------------------------------------------------------------------------------------------


def reports(log: str) -> list[str]:
    """The reports in a log of compute-sanitizer, each with its indented lines."""
    found: list[list[str]] = []
    for line in log.splitlines():
        detail, headline = _DETAIL.match(line), _HEADLINE.match(line)
        if detail:
            if found:
                found[-1].append(f"    {detail[1]}")
        elif headline:
            found.append([headline[1]])
    return ["\n".join(lines) for lines in found if not _NOISE.match(lines[0])]


def places(report: str, group: str, module: str) -> tuple[Place, ...]:
    """Lines of source that a report of a kernel in a ``module`` names, in the order of the report."""
    found = ((name, int(line)) for name, line in _PLACE.findall(report))
    return tuple(dict.fromkeys(_place(name, line, group, module) for name, line in found))


def _place(name: str, line: int, group: str, module: str) -> Place:
    """A line of a file that may be known by its last name alone; the kernel's own files come first."""
    base = Path(name).name
    own = PACKAGE.joinpath(*module.split(".")[1:]).with_suffix(".py")
    files = sorted(
        PACKAGE.rglob(base), key=lambda file: (file != own, file.parent != own.parent, group not in file.parts)
    )
    file = Path(name) if Path(name).is_file() else files[0] if files else None
    if file is None:
        return Place(name, line, "")
    lines = file.read_text(encoding="utf-8").splitlines()
    text = lines[line - 1].strip() if 0 < line <= len(lines) else ""
    return Place(file.relative_to(ROOT).as_posix() if file.is_relative_to(ROOT) else base, line, text)


def findings_of(task: Task, texts: Iterable[str], kernels: Iterable[Kernel]) -> list[Finding]:
    """Reports as findings, those of one kind and place together."""
    modules = {kernel.name: kernel.module for kernel in kernels if not task.group or kernel.group == task.group}
    names = sorted(modules, key=len, reverse=True)
    found: dict[tuple[Any, ...], Finding] = {}
    for text in texts:
        kernel = next((name for name in names if re.search(rf"(?<!\w){name}(?!\w)", text)), "")
        kind = re.sub(r"\s+at \S+.*|0x[0-9a-f]+", "", _HAZARDS.sub("", text.splitlines()[0])).strip()
        kind = re.sub(r" between (\w+) access.*", r" between \1 access", kind)
        where = places(text, task.group, modules.get(kernel, ""))
        hazards = _HAZARDS.findall(text)
        count = sum(map(int, hazards)) or 1
        key = kernel, kind, where
        if key in found:
            found[key] = replace(found[key], count=found[key].count + count)
        else:
            call = task.calls[0] if len(task.calls) == 1 else ""
            found[key] = Finding(task.tool, task.group, kernel, call, kind, where, count, text)
    return list(found.values())


def read_known(path: Path = KNOWN) -> list[Explanation]:
    """The explanations of a file."""
    entries = tomllib.loads(path.read_text(encoding="utf-8")).get("finding", [])
    return [Explanation(**{**entry, "where": tuple(entry.get("where", ()))}) for entry in entries]


def explained(findings: Iterable[Finding], known: Sequence[Explanation]) -> list[Finding]:
    """The findings, with a reason where there is one."""
    return [replace(f, known=next((e.reason for e in known if e.explains(f)), "")) for f in findings]


# ----------------------------------------------------------------------------------------------------------
# Processes
# ----------------------------------------------------------------------------------------------------------


def run_task(task: Task, kernels: Sequence[Kernel], seconds: float) -> Result:
    """Run a process, and read its reports."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="sanitize-") as folder:
        done_log, tool_log = Path(folder) / "calls.jsonl", Path(folder) / "tool.log"
        command, environment = command_of(task, done_log, tool_log)
        problem = _run(command, environment, seconds)
        lines = done_log.read_text(encoding="utf-8").splitlines() if done_log.is_file() else []
        compiled = {entry["call"]: entry["kernels"] for entry in map(json.loads, lines)}
        log = tool_log.read_text(encoding="utf-8", errors="replace") if tool_log.is_file() else ""
    texts = reports(log)
    missing = [call for call in task.calls if call not in compiled]
    if missing:
        texts.append(f"The process did not get through {', '.join(missing)}: {problem or 'no reason given'}")
    return Result(task, time.monotonic() - start, compiled, tuple(findings_of(task, texts, kernels)))


def _run(command: Sequence[str], environment: dict[str, str], seconds: float) -> str:
    """Run a command; returns what went wrong in it and the processes that it starts, if anything did."""
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
        start_new_session=True,
    )  # fmt: skip
    try:
        output, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # its own group: the tool and what runs under it
        process.communicate()
        return f"not done after {seconds:.0f} s"
    return f"ended with {process.returncode}: {output.strip()[-1500:]}" if process.returncode else ""


def command_of(task: Task, done_log: Path, tool_log: Path) -> tuple[list[str], dict[str, str]]:
    """Command and environment of a process."""
    paths = [str(ROOT / "src"), str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    script = [str(Path(__file__).resolve()), "--call", ",".join(task.calls), "--log", str(done_log)]
    command = [sys.executable, *script, "--under", task.tool]
    if task.tool != PLAIN:
        # Every tensor its own allocation: what lies behind it belongs to none.
        environment["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
        command = [
            "compute-sanitizer", "--tool", task.tool, "--target-processes", "application-only",
            "--log-file", str(tool_log), "--print-limit", str(MOST_REPORTS), "--show-backtrace", "no",
            *(["--num-cuda-barriers", str(MOST_BARRIERS)] if task.tool in ("racecheck", "synccheck") else []),
            *command,
        ]  # fmt: skip
    return command, environment


def tasks_of(tool: str, calls: Sequence[tuple[str, str]], known: Sequence[Explanation]) -> list[Task]:
    """The processes of a tool. ``calls``: name and group of each; those that an explanation names run alone."""
    patterns = [(e.group, e.call) for e in known if e.tool == tool and e.call != "*"]
    tasks: list[Task] = []
    together: dict[str, list[str]] = {}
    for name, group in calls:
        named = any(fnmatch.fnmatchcase(group, g) and fnmatch.fnmatchcase(name, c) for g, c in patterns)
        if named or tool == PLAIN:
            tasks.append(Task(tool, group, (name,)))
        else:
            together.setdefault(group, []).append(name)
    return tasks + [Task(tool, group, tuple(names)) for group, names in together.items()]


# ----------------------------------------------------------------------------------------------------------
# What is printed
# ----------------------------------------------------------------------------------------------------------


def for_this_gpu(kernel: Kernel) -> bool:
    """Returns True if a kernel is for the GPU that is here: those written in Gluon are for Hopper."""
    import torch

    return not kernel.gluon or torch.cuda.get_device_capability()[0] == 9


# ----------------------------------------------------------------------------------------------------------
# The command
# ----------------------------------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tool", action="append", choices=TOOLS, help="all of them by default")
    parser.add_argument("--group", action="append", help="an operator's folder, or bench; all by default")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, metavar="N", help="processes at a time")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="limit for a process; 240 by default")
    for name in ("--call", "--log", "--under"):  # of the processes that this one starts
        parser.add_argument(name, default="", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.call:
        make_calls(options.call.split(","), options.under, Path(options.log))
        return 0

    sys.path[:0] = [str(ROOT / "src"), str(Path(__file__).parent)]
    import torch

    if not torch.cuda.is_available():
        print("sanitize: needs an NVIDIA GPU", file=sys.stderr)
        return 2
    if shutil.which("compute-sanitizer") is None:
        print("sanitize: compute-sanitizer is not on the PATH", file=sys.stderr)
        return 2
    from sanitizer_calls import CALLS

    calls = [(call.name, call.group) for call in CALLS if call.group in (options.group or call.group)]
    kernels = [k for k in package_kernels() if k.group in (options.group or k.group)]
    known = read_known()
    with ThreadPoolExecutor(options.jobs) as pool:

        def run(tools: Iterable[str]) -> list[Result]:
            tasks = [task for tool in tools for task in tasks_of(tool, calls, known)]
            futures = [pool.submit(run_task, task, kernels, options.seconds) for task in tasks]
            results = []
            for future in futures:
                results.append(result := future.result())
                print(f"{result.seconds:6.0f} s  {len(result.findings):3} findings  {result.task}", flush=True)
            return results

        results = run([PLAIN])  # which compiles the kernels for the others
        kernels = with_calls(kernels, results)
        print_launched(kernels)
        results += run(tool for tool in TOOLS if tool in (options.tool or TOOLS))
    found = explained((f for result in results for f in result.findings), known)
    print(summary(found))
    missed = [kernel for kernel in kernels if not kernel.calls and for_this_gpu(kernel)]
    return 1 if missed or any(not finding.known for finding in found) else 0


def print_launched(kernels: Sequence[Kernel]) -> None:
    """Say which kernels the calls launch, and which they do not."""
    print(f"{sum(bool(kernel.calls) for kernel in kernels)} of {len(kernels)} kernels launched:")
    for kernel in kernels:
        missing = "NOT LAUNCHED" if for_this_gpu(kernel) else "not launched: for another GPU"
        print(f"  {kernel!s:<50} {', '.join(kernel.calls) or missing}")
    print(flush=True)


def summary(findings: Sequence[Finding]) -> str:
    """Returns the findings that nothing explains, and the reasons of the others, as text."""
    unknown, lines = [finding for finding in findings if not finding.known], [""]
    for finding in unknown:
        name = finding.kernel or finding.call or finding.group
        lines += [f"{finding.tool}, {name}, {finding.count} times: {finding.report}"]
        lines += [f"      {place.file}:{place.line}: {place.text}" for place in finding.places] + [""]
    for reason in dict.fromkeys(finding.known for finding in findings if finding.known):
        same = [f for f in findings if f.known == reason]
        what = ", ".join(dict.fromkeys(f"{f.tool} {f.group}/{f.kernel or f.call}" for f in same))
        lines += [f"known, {sum(f.count for f in same)} times, {what}: {reason}", ""]
    return "\n".join([*lines, f"{len(findings)} findings, {len(unknown)} of which nothing explains"])


if __name__ == "__main__":
    sys.exit(main())
