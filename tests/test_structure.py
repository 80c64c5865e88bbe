"""Rules that a reader relies on: which file knows which, what an import costs, what is documented."""

import ast
import inspect
import json
import os
import subprocess
import sys
from importlib.resources import files
from pathlib import Path

import pytest

import warploom
from warploom import errors
from warploom.ops import FOLDERS

PACKAGE = Path(warploom.__file__).parent
OPERATOR_FILES = (
    "README.md",
    "api.py",
    "autograd.py",
    "kernels.py",
    "reference.py",
    "spec.py",
    "__init__.py",
)
# What a file of an operator may import of warploom: names inside its own folder, and outside.
ALLOWED = {
    "reference": set(),
    "peers": {"reference", "warploom.ops.spec"},  # so that no record of theirs depends on a kernel of ours
    "kernels": {"kernels", "warploom.device"},
    "launchers": {
        "kernels", "launchers", "warploom.device", "warploom.launch", "warploom.layout", "warploom.plans",
    },
    "autograd": {
        "launchers", "autograd", "warploom.eager", "warploom.launch", "warploom.layout", "warploom.plans",
        "warploom.pytorch",
    },
    "api": {
        "autograd", "launchers", "reference", "warploom.arguments",
        "warploom.backend", "warploom.eager", "warploom.errors", "warploom.layout", "warploom.plans",
    },
}  # fmt: skip


def imported_modules(path: Path) -> set[str]:
    """Absolute names of all modules that a file imports, inside functions too."""
    names = set()
    package = ".".join(("warploom", *path.relative_to(PACKAGE).parent.parts))
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*parents, *([node.module] if node.module else [])])
            for alias in node.names:
                submodule = PACKAGE.joinpath(*base.split(".")[1:], alias.name)
                is_module = base.startswith("warploom") and (
                    submodule.is_dir() or submodule.with_suffix(".py").is_file()
                )
                names.add(f"{base}.{alias.name}" if is_module else base)
    return names


def operator_modules() -> list[Path]:
    return sorted(path for folder in FOLDERS for path in (PACKAGE / "ops" / folder).glob("*.py"))


def source_files() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def relative(path: Path) -> str:
    return str(path.relative_to(PACKAGE))


@pytest.mark.parametrize("path", operator_modules(), ids=relative)
def test_imports_go_one_way(path: Path) -> None:
    kind = path.stem.split("_")[0]  # a second file of kernels is kernels_….py and follows the same rule
    if path.stem in ("__init__", "spec"):  # spec.py describes the operator from outside
        return
    assert kind in ALLOWED, f"{relative(path)} has no place in the order of imports"
    folder = f"warploom.ops.{path.parent.name}."
    for name in imported_modules(path):
        if not name.startswith("warploom"):
            continue
        if name.startswith(folder):
            local = name.removeprefix(folder).split(".")[0].split("_")[0]
            assert local in ALLOWED[kind], f"{relative(path)} imports {name}"
        else:
            allowed = [a for a in ALLOWED[kind] if name == a or name.startswith(f"{a}.")]
            assert allowed, f"{relative(path)} imports {name}"


@pytest.mark.parametrize("folder", FOLDERS)
def test_the_reference_stands_alone(folder: str) -> None:
    imported = imported_modules(PACKAGE / "ops" / folder / "reference.py")
    assert {name.split(".")[0] for name in imported} & {"warploom", "triton"} == set()


@pytest.mark.parametrize("path", sorted((PACKAGE / "device").glob("*.py")), ids=relative)
def test_device_functions_know_no_operator(path: Path) -> None:
    assert all(
        not name.startswith("warploom") or name.startswith("warploom.device") for name in imported_modules(path)
    )


def test_the_launcher_knows_no_operator() -> None:
    of_house = {name for name in imported_modules(PACKAGE / "launch.py") if name.startswith("warploom")}
    assert of_house <= {f"warploom.{name}" for name in ("backend", "entry", "interpreter", "pytorch")}


@pytest.mark.parametrize("folder", FOLDERS)
def test_an_operator_is_seven_files(folder: str) -> None:
    missing = [name for name in OPERATOR_FILES if not (PACKAGE / "ops" / folder / name).is_file()]
    assert not missing


def test_every_operator_folder_is_registered_by_one_line() -> None:
    folders = {path.parent.name for path in (PACKAGE / "ops").glob("*/spec.py")}
    assert sorted(FOLDERS) == sorted(folders)
    assert len(set(FOLDERS)) == len(FOLDERS)
    # Nobody outside an operator's own folder names it, except the registry and the public names.
    known = {PACKAGE / "ops" / "__init__.py", PACKAGE / "__init__.py"}
    for path in source_files():
        if path in known or path.is_relative_to(PACKAGE / "nn"):
            continue
        for folder in FOLDERS:
            if not path.is_relative_to(PACKAGE / "ops" / folder):
                named = [n for n in imported_modules(path) if n.startswith(f"warploom.ops.{folder}")]
                assert not named, f"{relative(path)} imports {named}"


def test_the_package_is_typed() -> None:
    assert (PACKAGE / "py.typed").is_file()
    assert files("warploom").joinpath("py.typed").is_file()


@pytest.mark.parametrize("path", source_files(), ids=relative)
def test_no_assert_guards_a_user(path: Path) -> None:
    lines = [n.lineno for n in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(n, ast.Assert)]
    assert not lines or path.is_relative_to(PACKAGE / "testing")


@pytest.mark.parametrize("path", source_files(), ids=relative)
def test_every_module_says_what_it_is_for(path: Path) -> None:
    assert path.stat().st_size == 0 or ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))


@pytest.mark.parametrize("name", sorted(warploom.__all__))
def test_public_names_are_documented(name: str) -> None:
    thing = getattr(warploom, name)
    if name == "__version__":
        assert isinstance(thing, str)
        return
    text = inspect.getdoc(thing)
    assert text
    if inspect.isfunction(thing):
        assert "(B, N" in text, "shapes"
        assert "Args:" in text
        assert "Returns:" in text
        assert "Raises:" in text
        raised = [error for error in errors.__all__ if error in text]
        assert raised, "the errors by name"
        documented = [p for p in inspect.signature(thing).parameters if f"{p}:" not in text and f"{p}," not in text]
        assert not documented, f"arguments without a word: {documented}"


IMPORT_PROBE = """
import json, sys, time
import torch
start = time.process_time()  # of this process alone, however busy the machine is
import warploom
seconds = time.process_time() - start
print(json.dumps({
    "seconds": seconds,
    "triton": [m for m in sys.modules if m.split(".")[0] == "triton"],
    "cuda": torch.cuda.is_initialized(),
}))
"""


def import_probe() -> dict[str, object]:
    environment = {**os.environ, "PYTHONPATH": str(PACKAGE.parent)}
    command = [sys.executable, "-c", IMPORT_PROBE]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    return json.loads(done.stdout)


def test_importing_starts_nothing_and_is_quick() -> None:
    probe = import_probe()
    assert probe["triton"] == []
    assert probe["cuda"] is False
    seconds = [probe["seconds"], *(import_probe()["seconds"] for _ in range(2))]
    assert min(seconds) < 0.15, seconds
