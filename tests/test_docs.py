"""The documentation: its examples run, its commands exit with 0, and every operator has its pages."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import re
import shlex
import subprocess
import sys
import textwrap
import unittest
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import processes
import pytest
import torch
from sybil import Example, Sybil
from sybil.parsers.markdown import CodeBlockParser, PythonCodeBlockParser, SkipParser

import warploom.ops
from warploom.cli import check, main
from warploom.errors import BackendWarning, WarploomError
from warploom.ops import FOLDERS
from warploom.testing.conformance import check_operator
from warploom.testing.specs import load_specs

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted(
    [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "src/warploom/ops").glob("*/*.md")]
)


def run_console(example: Example) -> None:
    """Run the lines behind a prompt. What is printed differs from machine to machine; the status must be 0."""
    for line in str(example.parsed).splitlines():
        prompt, _, command = line.partition(" ")
        words = shlex.split(command)
        while "=" in words[0]:  # Triton's interpreter is on already where there is no GPU
            del words[0]
        assert prompt == "$", f"no prompt: {line}"
        if words[0] == "warploom":
            assert main(words[1:]) == 0, line
        else:
            known = words[:2] == ["python", "-m"] or (words[0] == "python" and words[1].startswith("tools/"))
            assert known, f"neither warploom nor python -m nor a tool: {line}"
            environment = {k: v for k, v in processes.environment().items() if k != "TRITON_INTERPRET"}
            done = subprocess.run([sys.executable, *words[1:]], env=environment, capture_output=True, text=True)
            assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"


SYBIL = Sybil([SkipParser(), PythonCodeBlockParser(), CodeBlockParser("console", run_console)])


@pytest.fixture
def _checkout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quick_measurements: None, own_registry: None
) -> Iterator[None]:
    """A folder to run in that looks like a checkout; measuring is short, checking too (elsewhere every case is
    checked); nothing stays registered, and PyTorch's attention is its own again."""
    results = check._results
    monkeypatch.setattr(check, "_results", lambda places, *others: results(places[:2], *others))
    monkeypatch.chdir(tmp_path)
    for name in ("examples", "results", "tools"):
        (tmp_path / name).symlink_to(ROOT / name)
    yield
    assert "aten/scaled_dot_product_attention/CUDA" not in torch.library._impls, "an example leaves it ours"


MEASURING = ("measuring.md", "writing-an-operator.md")
"""Pages with a bench, for which a share of a GPU is too small."""
LONG = {
    "writing-an-operator.md": 12,
    "accuracy.md": 7,
    "in-your-own-training-loop.md": 5,
    "export.md": 3,
    "integrations.md": 3,
    "measuring.md": 3,
    "tpa-with-a-small-cache.md": 2,
    "vit-with-2d-lrpe.md": 2,
}
"""Pages that do not run every day, with their seconds."""


def page(path: Path) -> Any:
    seldom = [pytest.mark.seldom(4, LONG[path.name])] if path.name in LONG else []
    return pytest.param(path, marks=[*seldom, *([pytest.mark.alone] if path.name in MEASURING else [])])


QUIET = pytest.mark.filterwarnings("error::warploom.BackendWarning")
"""Examples run on a CPU without a warning of a slow way; those of all options of attention are for kernels."""


@pytest.mark.usefixtures("_checkout")
@pytest.mark.parametrize("path", map(page, DOCUMENTS), ids=lambda path: str(path.relative_to(ROOT)))
@QUIET
def test_examples_run(path: Path) -> None:
    if path.parent.name == "flash_attention":
        warnings.simplefilter("default", BackendWarning)
    for example in SYBIL.parse(path).examples():
        try:
            example.evaluate()
        except unittest.SkipTest:
            continue


def test_an_example_that_fails_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    document = tmp_path / "page.md"
    for body in ("```python\nassert False\n```\n", "```console\n$ warploom check nobody\n```\n"):
        document.write_text(body)
        (example,) = SYBIL.parse(document).examples()
        with pytest.raises(AssertionError):
            example.evaluate()


# The example operator


@pytest.mark.usefixtures("_checkout")
def test_the_example_operator_keeps_the_promise(device: torch.device) -> None:
    (spec,) = load_specs([ROOT / "examples/rms_norm/spec.py"])
    for backend in ("triton", "torch"):
        results = check_operator(spec.operators[0], backend, device)
        assert len(results) == 2 * len(spec.operators[0].check_cases)
        assert all(result.ok for result in results), [r.detail for r in results if not r.ok]


@pytest.mark.usefixtures("_checkout")
def test_the_example_operator_refuses_what_it_does_not_define() -> None:
    (spec,) = load_specs([ROOT / "examples/rms_norm/spec.py"])
    rms_norm = spec.operators[0].function
    x = torch.randn(2, 3, 4)
    for error, arguments in {
        warploom.ShapeError: (x, torch.ones(5)),
        warploom.DtypeError: (x, torch.ones(4, dtype=torch.int32)),
        warploom.DeviceError: (x, torch.ones(4, device="meta")),
        warploom.BackendError: (x.double(), torch.ones(4).double(), "triton"),
    }.items():
        with pytest.raises(error, match="rms_norm: "):
            rms_norm(*arguments[:2], backend=(*arguments, "auto")[2])


# Links


LINK = re.compile(r"\]\((?!https?://|mailto:)([^)\s]+)\)|(?:src|href)=\"(?!https?://)([^\"]+)\"")
FENCE = re.compile(r"^( *)```.*?^\1```", re.MULTILINE | re.DOTALL)
TEXTS = sorted({*DOCUMENTS, *ROOT.glob("*.md"), *(ROOT / "examples").rglob("*.md")})


def anchors_of(text: Path) -> set[str]:
    """The places of headings, as GitHub and the site name them."""
    heads = re.findall(r"^#+ (.+)$", FENCE.sub("", text.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("text", TEXTS, ids=lambda text: str(text.relative_to(ROOT)))
def test_links_lead_to_files_of_the_repository(text: Path) -> None:
    for link in LINK.finditer(FENCE.sub("", text.read_text(encoding="utf-8"))):
        path, _, place = (link[1] or link[2]).partition("#")
        target = (text.parent / path).resolve() if path else text
        assert target.exists(), f"{link[0]} leads nowhere in the repository"
        if place and not place.startswith("warploom."):  # those are of the site, whose build checks them
            assert place in anchors_of(target), f"{link[0]}: there is no such heading"


# The site


@pytest.fixture(scope="module")
def hooks() -> ModuleType:
    pytest.importorskip("mkdocs")
    found = importlib.util.spec_from_file_location("hooks", ROOT / "docs" / "_hooks.py")
    assert found
    assert found.loader
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


@pytest.mark.parametrize("folder", FOLDERS)
def test_links_of_a_guide_lead_somewhere(folder: str, hooks: ModuleType) -> None:
    pages = {hooks._page(text) for folder in FOLDERS for text in hooks.texts_of(folder)}
    for text in hooks.texts_of(folder):
        for link in hooks._LINK.finditer(hooks.guide(text)):
            path = link[3].partition("#")[0]
            assert (ROOT / "docs" / "operators" / path).resolve().is_file() or path in pages


@pytest.mark.seldom(4, 12)
def test_the_site_builds(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs")
    environment = processes.environment(NO_MKDOCS_2_WARNING="1")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for name in (*FOLDERS, "lrpe-softmax-over-the-sequence"):
        assert (tmp_path / "operators" / name / "index.html").is_file()
    writing = (tmp_path / "writing-an-operator" / "index.html").read_text(encoding="utf-8")
    assert writing.count("forward_kernel") > 1  # the example's files are part of the page
    pages = (tmp_path / "reference").glob("*/index.html")
    reference = "".join(page.read_text(encoding="utf-8") for page in pages)
    assert all(f'id="warploom.{name}"' in reference for name in warploom.__all__ if name[0].islower())
    for module in ("warploom.nn", "warploom.distributed", "warploom.bench", "warploom.errors"):
        for name in importlib.import_module(module).__all__:
            thing = getattr(importlib.import_module(module), name)
            described = getattr(thing, "__module__", "").startswith("warploom")  # and no alias of another's type
            assert not described or f'id="{module}.{name}"' in reference, f"{module}.{name} is on no page"


# Docstrings


def public_things() -> list[tuple[str, object]]:
    """What users import, and whose docstring the reference shows."""
    modules = ("warploom", "warploom.nn", "warploom.bench", "warploom.integrations.hub")
    named = [(module, name) for module in modules for name in importlib.import_module(module).__all__]
    named += [
        ("warploom.integrations.transformers", name) for name in ("register", "patch_rotary", "unpatch_rotary")
    ]
    named += [("warploom.integrations.sdpa", "register")]
    things = [(f"{module}.{name}", getattr(importlib.import_module(module), name)) for module, name in named]
    return [(name, thing) for name, thing in things if inspect.isfunction(thing) or inspect.isclass(thing)]


WITHOUT_EXAMPLE = {
    "warploom.bench.Results": "see time_functions",
    "warploom.bench.Record": "see load",
    "warploom.bench.need_cuda": "see examples/rms_norm",
    "warploom.integrations.hub.main": "a command",
}


@pytest.mark.usefixtures("_checkout")
@pytest.mark.parametrize(
    ("name", "thing"), public_things(), ids=lambda value: value if isinstance(value, str) else ""
)
@QUIET
def test_the_example_of_a_docstring_runs(name: str, thing: object) -> None:
    text = inspect.getdoc(thing) or ""
    examples = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    described = inspect.isclass(thing) and issubclass(thing, WarploomError | Warning) and thing is not WarploomError
    assert examples or described or name in WITHOUT_EXAMPLE or thing in (dict, torch.Tensor), "no example"
    if "transformers import" in text:
        pytest.importorskip("transformers", minversion="5.0")
    for example in examples:
        exec(compile(textwrap.dedent(example), name, "exec"), {})
