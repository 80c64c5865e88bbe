"""Rules that a reader relies on: which file knows which, what an import costs, what is documented."""

import ast
import functools
import inspect
import json
import subprocess
import sys
import typing
from graphlib import TopologicalSorter
from importlib.resources import files
from pathlib import Path

import processes
import pytest
import torch

import warploom
from warploom import errors
from warploom.ops import FOLDERS

PACKAGE = Path(warploom.__file__).parent
OPERATOR_FILES = ("README.md", "api.py", "bench.py", "reference.py", "validation.py", "__init__.py")
COMPOSED = PACKAGE / "ops" / "rotary_attention"  # of the launches of two other operators
BUILT_ON = {
    "append_kv": ("lrpe",),
    "delta_attention": ("lrpe", "flash_attention", "linear_attention"),
    "linear_attention": ("lrpe", "flash_attention"),
    "tpa": ("flash_attention",),
}
"""Operators that use parts of others."""
FACES = {"api", "reference", "validation", "call", "problem", "engine", "fallback", "tangent"}
"""Parts of an operator that others may use: what is defined, checked and called, and no kernels or launches."""
# What a part of an operator may import of warploom: parts of its own folder, and what lies outside.
ALLOWED = {
    "reference": set(),
    "peers": {"reference", "warploom.ops.spec"},  # so that no record of theirs depends on a kernel of ours
    "patterns": {"block_mask", "warploom.ops.spec"},
    "peers_masked": {"block_mask", "patterns", "peers", "warploom.ops.spec"},
    "kernels": {"kernels", "warploom.device"},
    "triton": {"triton", "warploom.device"},
    "hopper": {"hopper", "triton", "warploom.device"},
    "config": set(),
    "configs": {"call", "problem", "triton", "warploom.runtime"},
    "call": {"call", "warploom.runtime"},
    "problem": {"kernels", "problem", "triton", "warploom.device", "warploom.runtime"},
    "chunks": set(),
    "launch": {
        *("launch", "triton", "hopper", "config", "configs", "call", "problem", "chunks"),
        *("warploom.device", "warploom.runtime"),
    },
    "variants": {"launch", "problem", "warploom.runtime"},
    "choose": {"variants", "launch", "triton", "problem", "warploom.device", "warploom.runtime"},
    "engine": {
        *("choose", "variants", "engine", "launch", "triton", "config", "configs", "call", "problem", "chunks"),
        *("warploom.device", "warploom.runtime"),
    },
    "block_mask": {"warploom.errors", "warploom.runtime"},
    "validation": {"block_mask", "call", "problem", "reference", "warploom.errors", "warploom.runtime"},
    "operator": {"engine", "call", "problem", "validation", "warploom.runtime"},
    "fallback": {"reference", "validation", "warploom.errors", "warploom.runtime"},
    "tangent": {"call", "operator", "reference", "tangent", "validation", "warploom.runtime"},
    "api": {
        "block_mask",
        "fallback",
        "call",
        "operator",
        "reference",
        "tangent",
        "validation",
        "warploom.errors",
        "warploom.runtime",
    },
}


@functools.cache
def nodes_of(path: Path) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))


@functools.cache
def imported_modules(path: Path) -> frozenset[str]:
    """Absolute names of all modules that a file imports, inside functions too."""
    names = set()
    package = ".".join(("warploom", *path.relative_to(PACKAGE).parent.parts))
    for node in nodes_of(path):
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
    return frozenset(names)


@functools.cache
def operator_modules() -> list[Path]:
    return sorted(path for folder in FOLDERS for path in (PACKAGE / "ops" / folder).rglob("*.py"))


def part_of(module: str) -> str:
    """Returns the part of an operator that a module is, from its name below ``warploom.ops``."""
    names = module.split(".")
    part = next((name for name in names if name in ALLOWED), "")
    kind = names[-1].partition("_")[0]
    return kind if part in ("triton", "hopper") and kind in ("launch", "config") else part


@functools.cache
def source_files() -> tuple[Path, ...]:
    return tuple(sorted(PACKAGE.rglob("*.py")))


def relative(path: Path) -> str:
    return str(path.relative_to(PACKAGE))


@pytest.mark.parametrize("folder", FOLDERS)
def test_imports_go_one_way(folder: str) -> None:
    for path in operator_modules():
        if path.is_relative_to(PACKAGE / "ops" / folder) and path.stem not in ("__init__", "bench"):
            check_imports(path, folder)  # bench.py describes the operator from outside


def check_imports(path: Path, folder: str) -> None:
    part = part_of(".".join(path.relative_to(PACKAGE).with_suffix("").parts))
    assert part, f"{relative(path)} has no place in the order of imports"
    for name in imported_modules(path):
        if name.startswith(f"warploom.ops.{folder}."):
            assert part_of(name) in ALLOWED[part], f"{relative(path)} imports {name}"
        elif name.startswith(tuple(f"warploom.ops.{other}." for other in BUILT_ON.get(folder, ()))):
            assert part_of(name) in FACES & (ALLOWED[part] | {part}), f"{relative(path)} imports {name}"
        elif name.startswith("warploom"):
            allowed = [a for a in ALLOWED[part] if name == a or name.startswith(f"{a}.")]
            assert allowed, f"{relative(path)} imports {name}"


LEVELS = (
    "errors", "version", "runtime", "device", "ops", "nn", "distributed", "integrations", "testing", "bench",
    "report", "cli",
)  # fmt: skip
FRONT = {"bench/__init__.py", "__init__.py", "__main__.py"}  # what users import, on top of the rest


def level_of(module: str) -> int:
    return LEVELS.index(module.split(".")[1])


def test_parts_of_the_package_stand_on_those_below() -> None:
    """From the command line down: functions that import late included."""
    for path in source_files():
        if relative(path) in FRONT:
            continue
        own = LEVELS.index(path.relative_to(PACKAGE).with_suffix("").parts[0])
        above = [n for n in imported_modules(path) if n.startswith("warploom.") and level_of(n) > own]
        assert not above, f"{relative(path)} imports {above}"


def test_no_imports_go_in_circles() -> None:
    """Below the benches; functions that import late included."""
    folders = ("runtime", "device", "ops", "nn", "distributed")
    paths = {
        ".".join(("warploom", *path.relative_to(PACKAGE).with_suffix("").parts)): path
        for folder in folders
        for path in (PACKAGE / folder).rglob("*.py")
        if path.stem not in ("__init__", "bench", "peers", "spec")
    }
    imported = {name: {n for n in imported_modules(path) if n in paths} for name, path in paths.items()}
    TopologicalSorter(imported).prepare()  # raises


@pytest.mark.parametrize("folder", FOLDERS)
def test_the_reference_stands_alone(folder: str) -> None:
    imported = imported_modules(PACKAGE / "ops" / folder / "reference.py")
    imported -= {f"warploom.ops.{other}.reference" for other in BUILT_ON.get(folder, ())}
    assert {name.split(".")[0] for name in imported} & {"warploom", "triton"} == set()


@pytest.mark.parametrize("path", sorted((PACKAGE / "device").rglob("*.py")), ids=relative)
def test_device_functions_know_no_operator(path: Path) -> None:
    assert all(
        not name.startswith("warploom") or name.startswith("warploom.device") for name in imported_modules(path)
    )


@pytest.mark.parametrize("path", sorted((PACKAGE / "device").rglob("[!_]*.py")), ids=relative)
def test_device_functions_serve_several_operators(path: Path) -> None:
    """What one operator needs alone lies in its folder."""
    module = ".".join(("warploom", *path.relative_to(PACKAGE).with_suffix("").parts))
    users = {
        user.relative_to(PACKAGE / "ops").parts[0]
        for user in operator_modules()
        if module in imported_modules(user)
    }
    assert len(users) > 1, users


@pytest.mark.parametrize("path", sorted((PACKAGE / "runtime").glob("*.py")), ids=relative)
def test_the_runtime_knows_no_operator(path: Path) -> None:
    of_house = {name for name in imported_modules(path) if name.startswith("warploom.")}
    assert all(name == "warploom.errors" or name.startswith("warploom.runtime.") for name in of_house)


@pytest.mark.parametrize("folder", FOLDERS)
def test_an_operator_has_its_files(folder: str) -> None:
    missing = [name for name in OPERATOR_FILES if not (PACKAGE / "ops" / folder / name).is_file()]
    assert not missing


def test_every_operator_folder_is_registered_by_one_line() -> None:
    folders = {path.parent.name for path in (PACKAGE / "ops").glob("*/bench.py")}
    assert sorted(FOLDERS) == sorted(folders)
    assert len(set(FOLDERS)) == len(FOLDERS)
    # No file outside an operator's own folder names it, except the registry and the public names.
    known = {PACKAGE / "ops" / "__init__.py", PACKAGE / "__init__.py"}
    for path in source_files():
        above = (PACKAGE / "nn", PACKAGE / "integrations", PACKAGE / "distributed", COMPOSED)
        if path in known or any(path.is_relative_to(folder) for folder in above):
            continue
        for folder in FOLDERS:
            others = [other for other, parts in BUILT_ON.items() if folder in parts]
            if not any(path.is_relative_to(PACKAGE / "ops" / other) for other in (folder, *others)):
                named = [n for n in imported_modules(path) if n.startswith(f"warploom.ops.{folder}")]
                assert not named, f"{relative(path)} imports {named}"


MOST_PARAMETERS = {True: 20, False: 12}  # of a kernel, and of a device function
WITH_MORE = {"hopper_forward_kernel": 30, "hopper_backward_kernel": 26}
"""Kernels that take a mask's tensors too. A launch passes tensors one by one, so they are in no tuple."""


def test_what_belongs_together_comes_to_a_kernel_as_one_tuple() -> None:
    for path in source_files():
        counts = {
            node.name: len(node.args.posonlyargs + node.args.args + node.args.kwonlyargs)
            for node in nodes_of(path)
            if isinstance(node, ast.FunctionDef) and any("jit" in ast.unparse(each) for each in node.decorator_list)
        }
        most = {name: WITH_MORE.get(name, MOST_PARAMETERS[name.endswith("_kernel")]) for name in counts}
        above = {name: count for name, count in counts.items() if count > most[name]}
        assert above == {}, relative(path)


def test_the_package_is_typed() -> None:
    assert (PACKAGE / "py.typed").is_file()
    assert files("warploom").joinpath("py.typed").is_file()


def test_no_assert_guards_a_user() -> None:
    for path in source_files():
        lines = [node.lineno for node in nodes_of(path) if isinstance(node, ast.Assert)]
        assert not lines or path.is_relative_to(PACKAGE / "testing"), f"{relative(path)}, lines {lines}"


def test_every_module_says_what_it_is_for() -> None:
    for path in source_files():
        assert path.stat().st_size == 0 or ast.get_docstring(nodes_of(path)[0]), relative(path)  # type: ignore[arg-type]


RIDDLES = ("What ", "Where ", "Of ", "Whether ", "How ", "Which ", "Why ", "That of ", "The same ", "By ", "With ")
NO_VERBS = ("The ", "A ", "An ", "True ", "`")
"""Openings of a docstring that say what a function's result is, and not what the function does."""
MATHEMATICS = ("api.py", "reference.py", "triton.py", "triton", "hopper")
"""Files and folders in which a function may begin with the formula that it computes."""


def docstrings(path: Path) -> list[tuple[int, str, bool]]:
    """Lines and texts of the docstrings of a file, and of comments in strings; and whether each is a function's."""
    found = []
    for node in nodes_of(path):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        verb = isinstance(node, ast.FunctionDef) and not any(
            "property" in ast.unparse(x) for x in node.decorator_list
        )
        texts = [each.value for each in node.body if isinstance(each, ast.Expr)]
        found += [
            (x.lineno, x.value, verb) for x in texts if isinstance(x, ast.Constant) and isinstance(x.value, str)
        ]
    return found


def test_docstrings_begin_with_what_a_function_does_or_a_class_is() -> None:
    for path in source_files():
        no_verbs = () if {*MATHEMATICS} & {*path.parts} else NO_VERBS
        for line, text, verb in docstrings(path):
            opening = text.lstrip().startswith((*RIDDLES, *(no_verbs if verb else ())))
            assert not opening, f"{relative(path)}, line {line}: {text.strip().splitlines()[0]}"


def test_a_name_of_a_class_means_one_thing() -> None:
    files: dict[str, list[str]] = {}
    for path in source_files():
        for node in nodes_of(path):
            if isinstance(node, ast.ClassDef):
                files.setdefault(node.name, []).append(relative(path))
    assert not {name: paths for name, paths in files.items() if len(paths) > 1}


@pytest.mark.parametrize("name", sorted(warploom.__all__))
def test_public_names_are_documented(name: str) -> None:
    thing = getattr(warploom, name)
    if name == "__version__":
        assert isinstance(thing, str)
        return
    text = inspect.getdoc(thing)
    assert text
    if inspect.isfunction(thing) and name != "check_values":
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
start, total = time.process_time(), 0
for number in range(2_000_000):
    total += number
loop = time.process_time() - start
import warploom.nn
print(json.dumps({
    "seconds": seconds,
    "loop": loop,
    "heavy": [m for m in sys.modules if m.split(".")[0] in ("triton", "safetensors", "rich")],
    "cuda": torch.cuda.is_initialized(),
}))
"""


def import_probe() -> dict[str, object]:
    environment = processes.environment(PYTHONDONTWRITEBYTECODE="")  # compiled once, as an installed package is
    command = [sys.executable, "-c", IMPORT_PROBE]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    return json.loads(done.stdout)


def test_importing_needs_no_gpu_and_no_extras_and_is_quick() -> None:
    probe = import_probe()
    assert probe["heavy"] == []
    assert probe["cuda"] is False
    tries = [probe]
    # A busy machine is given two more tries, and one that is slow, by a loop of its own, more time.
    while tries[-1]["seconds"] >= max(0.15, 1.25 * tries[-1]["loop"]):
        assert len(tries) < 3, tries
        tries.append(import_probe())


@pytest.mark.parametrize(
    ("function", "option"),
    [
        ("flash_attention", "return_lse"),
        ("linear_attention", "return_state"),
        ("delta_attention", "return_state"),
        ("short_convolution", "return_state"),
    ],
)
def test_overloads_have_the_arguments_of_their_function(function: str, option: str) -> None:
    """What a type checker sees of a function whose result depends on an option, beside what runs."""
    runs = getattr(warploom, function)
    wanted = {name: p.annotation for name, p in inspect.signature(runs, eval_str=True).parameters.items()}
    results = {}
    for overload in typing.get_overloads(runs):
        hints = typing.get_type_hints(overload)
        results[str(hints.pop(option))] = hints.pop("return")
        (options,) = typing.get_args(hints.pop("arguments"))
        assert hints | typing.get_type_hints(options) | {option: bool} == wanted
    one, two = torch.Tensor, tuple[torch.Tensor, torch.Tensor]
    assert results == {"typing.Literal[False]": one, "typing.Literal[True]": two, "<class 'bool'>": one | two}


@pytest.mark.parametrize("name", [name for name in warploom.__all__ if name[0].islower()])
def test_options_that_are_words_are_literals(name: str) -> None:
    signature = inspect.signature(getattr(warploom, name), eval_str=True)
    for parameter in signature.parameters.values():
        assert parameter.annotation is not str, f"{parameter.name}: which words?"
        if isinstance(parameter.default, str):
            assert parameter.default in typing.get_args(parameter.annotation)
