"""Which host code a record's time depends on: a peer's call, and all that a step of a model runs."""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.util
import itertools
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import toy

from warploom.bench import host_code, records, runner
from warploom.bench.environment import tree_of
from warploom.bench.fingerprint import fingerprint
from warploom.bench.host_code import code_of
from warploom.bench.records import Record
from warploom.bench.runner import Selection, run
from warploom.ops import benches
from warploom.ops.spec import Bench

PEERS = """
import torch
from warploom.ops.lrpe import reference
from warploom.ops.spec import need_cuda

SIZES = {"two": [1, 2]}


def helper(x):
    return x * len(SIZES["two"])


def attend(scale, case):
    need_cuda()

    def call(x):
        return helper(reference.activate(x, "none", None)) * scale

    return call


def other(case):
    return None


LAMBDA = lambda case: attend(2.0, case)
"""
_numbers = itertools.count()


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    before = dict(sys.modules)
    yield
    for name in set(sys.modules) - set(before):
        if name.startswith(("warploom._peers", "steps_of_a_test")):
            del sys.modules[name]


def load(folder: Path, text: str, name: str) -> ModuleType:
    file = folder / f"{name.rpartition('.')[2]}.py"
    file.write_text(text)
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec
    assert spec.loader
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def peer(tmp_path: Path, text: str, way: str) -> str:
    module: Any = load(tmp_path, text, f"warploom._peers_{next(_numbers)}")
    builder = functools.partial(module.attend, 2.0) if way == "partial" else module.LAMBDA
    return code_of(toy.make_bench(peer=builder), "peer")


@pytest.mark.parametrize("way", ["partial", "lambda"])
@pytest.mark.parametrize(
    ("old", "new", "same"),
    [
        ("    need_cuda()\n", '    """Attend."""\n    need_cuda()  # at once\n', True),
        ("return None", "return 1", True),
        ("* len(", "+ len(", False),
        ("[1, 2]", "[1, 2, 3]", False),
        (") * scale", ") / scale", False),
        ('"none"', '"silu"', False),
    ],
    ids=["comments", "another peer", "a function", "a constant", "itself", "an argument"],
)
def test_a_peer_is_what_calls_it(tmp_path: Path, way: str, old: str, new: str, same: bool) -> None:
    assert old in PEERS
    assert (peer(tmp_path, PEERS, way) == peer(tmp_path, PEERS.replace(old, new), way)) == same


def test_a_peer_is_what_it_takes_from_the_definition_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before, usual = peer(tmp_path, PEERS, "lambda"), host_code._definitions
    activate = usual("warploom.ops.lrpe.reference")["encode_rotate"]  # any other function

    def definitions(module: str) -> dict[str, Any]:
        return usual(module) | ({"activate": activate} if module == "warploom.ops.lrpe.reference" else {})

    monkeypatch.setattr(host_code, "_definitions", definitions)
    assert peer(tmp_path, PEERS, "lambda") != before


def test_every_peer_has_code_and_kernels_of_ours_have_none() -> None:
    for bench in benches().values():
        if str(bench.operator.function.__module__).startswith("warploom.") and bench.measure is None:
            for name in bench.every_provider:
                assert bool(code_of(bench, name)) != bench.runs_kernels(name), (bench.name, name)
            assert code_of(bench, "limit") == ""


def test_source_is_the_same_text_for_every_python() -> None:
    """Records are made and judged by different ones: this is what 3.10 to 3.13 say."""
    (found,) = map(
        host_code._plain,
        ast.parse("def f(x: int = 3, *, y=None) -> 'a':\n    'Text.'\n    return f'{x:{y}}'\n").body,
    )
    assert found == (
        "FunctionDef(name='f', args=arguments(args=arg(arg='x', annotation=Name(id='int')), "
        "kwonlyargs=arg(arg='y'), kw_defaults=Constant(), defaults=Constant(value=3)), "
        "body=Return(value=JoinedStr(values=FormattedValue(value=Name(id='x'), conversion=-1, "
        "format_spec=JoinedStr(values=FormattedValue(value=Name(id='y'), conversion=-1))))), "
        "returns=Constant(value='a'))"
    )


STEP = """
from .parts import part


def measure(*given):
    return part(*given)
"""
PARTS = """
import triton

from warploom.runtime import dispatch


def part(*given):
    return given


@triton.jit
def kernel(x):
    pass
"""


def step(tmp_path: Path, parts: str, beside: str = "") -> str:
    name = f"steps_of_a_test_{next(_numbers)}"
    folder = tmp_path / name
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "beside.py").write_text(beside)
    sys.modules[name] = package = ModuleType(name)
    package.__path__ = [str(folder)]
    load(folder, parts, f"{name}.parts")
    module: Any = load(folder, STEP, f"{name}.step")
    return code_of(replace(toy.make_bench(), measure=functools.partial(module.measure, 1)), "torch")


def test_a_step_is_all_that_it_may_run_but_kernels(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    usual = step(tmp_path, PARTS)
    assert usual == step(tmp_path, PARTS) == step(tmp_path, PARTS.replace("    pass", "    return x"))
    assert usual == step(tmp_path, PARTS.replace("def part", "# A part.\ndef part"), beside="x = 1")
    assert usual != step(tmp_path, PARTS.replace("return given", "return given[:1]"))
    assert usual != step(tmp_path, PARTS.replace("import dispatch", "import plans"))


def test_steps_of_models_reach_the_path_of_a_call() -> None:
    pytest.importorskip("triton")
    reached = host_code._reach(importlib.import_module("warploom.nn.transformer_lm").__name__)
    assert {"warploom.runtime.dispatch", "warploom.ops.lrpe.operator", "warploom.nn.attention"} < set(reached)
    assert not [name for name in reached if name.startswith(host_code._INSTRUMENT)]


def test_a_record_is_stale_when_the_code_around_it_is_other_code(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = toy.make_bench()
    monkeypatch.setattr(records, "benches", lambda: {bench.name: bench})
    monkeypatch.setattr(records, "code_of", lambda bench, provider: "present")
    case = dict(bench.suites["quick"]("cpu")[0])
    source = fingerprint(bench, case, "torch", "fwd", "")
    record = Record(bench.record_name, "quick", case, "torch", "fwd", source, "here")
    assert not record.is_stale  # of before records had it
    assert not replace(record, code="present").is_stale
    assert replace(record, code="other").is_stale


def test_a_run_records_it_and_goes_on_only_with_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench: Bench = toy.make_bench()
    monkeypatch.setattr(runner, "others_here", lambda device: "")

    def measure(code: str) -> set[str]:
        monkeypatch.setattr(runner, "code_of", lambda bench, provider: code if provider == "torch" else "")
        found = run([bench], Selection(modes=["fwd"]), torch.device("cpu"), tmp_path, resume=True).records
        assert {record.code for record in found} == {code, None}
        return {record.run for record in found if not record.disturbed}

    first = measure("one")
    assert measure("two").isdisjoint(first)


def test_a_folder_has_the_hash_that_git_gives_it(tmp_path: Path) -> None:
    folder = tmp_path / "package"
    (folder / "a").mkdir(parents=True)
    (folder / "__pycache__").mkdir()
    (folder / "__pycache__" / "a.cpython-311.pyc").write_bytes(b"\0")
    (folder / "a" / "text.py").write_text("x = 1\n")
    (folder / "a.py").write_bytes(b"\0\xff")
    (folder / "a-b").write_text("")
    (folder / "run.sh").write_text("true\n")
    (folder / "run.sh").chmod(0o755)
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "core.excludesFile="]
    (tmp_path / ".gitignore").write_text("__pycache__/\n")
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "one"]):
        subprocess.run([*git, *words], check=True, capture_output=True)
    said = subprocess.run([*git, "rev-parse", "HEAD:package"], check=True, capture_output=True, text=True).stdout
    assert tree_of(folder) == said.strip()
    (folder / "a" / "text.py").write_text("x = 2\n")
    assert tree_of(folder) != said.strip()
