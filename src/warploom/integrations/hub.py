"""The layout in which the Hugging Face hub's `kernels` library loads a package: a folder for each backend.

    python -m warploom.integrations.hub FOLDER

writes ``FOLDER/build/torch-cuda`` and ``FOLDER/build/torch-cpu``, with the operators, the layers and the
integration of transformers, and a card. Triton compiles the kernels where they run, so there is one build for all
versions of PyTorch and CUDA. The library imports a package under its id, and several versions at once. So all
imports become relative, and operators are registered as ``torch.ops.<id>``; the id has a hash of the sources.
"""

from __future__ import annotations

import argparse
import ast
import base64
import hashlib
import inspect
import json
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import warploom

__all__ = ["build", "main"]

ARCHS = {"cuda": ["8.0+PTX"], "cpu": []}
"""The backends, and the GPUs for which Triton compiles kernels: all from compute capability 8.0."""
NEEDED = ("Python 3.11", "PyTorch 2.11", "Triton 3.6")
"""The oldest versions; a test compares them with those of the installed package."""
_PACKAGE = Path(warploom.__file__).parent
_FOLDERS = ("runtime", "device", "ops", "nn", "integrations")
_FILES = ("__init__.py", "errors.py", "version.py", "py.typed")
_LEFT_OUT = ("bench.py", "peers.py", "spec.py", "hub.py")  # benches and checks, and this file
_REGISTRY = Path("ops/__init__.py")  # imports benches
_DISPATCH = Path("runtime/dispatch.py")  # has the name of the operators' namespace
_METADATA = "metadata.json"


def build(folder: Path) -> list[Path]:
    """Write the layout into a folder, made if needed. Returns the folders of the backends.

    Raises:
        FileExistsError: The folder has a build already.

    Source: "Kernel requirements" in the documentation of `kernels`, 0.17.

    Example:
        ```python
        import tempfile
        from pathlib import Path

        from warploom.integrations import hub

        with tempfile.TemporaryDirectory() as folder:
            built = hub.build(Path(folder))
            print([path.name for path in built])  # ['torch-cuda', 'torch-cpu']
        ```
    """
    texts = {}
    for source in _find_sources():
        path = source.relative_to(_PACKAGE)
        texts[path] = _relocate(path, source.read_text(encoding="utf-8"))
    texts[Path("warploom/__init__.py")] = _BEFORE_FLAT
    sources = "".join(f"{path.as_posix()}\0{text}\0" for path, text in sorted(texts.items()))
    unique = hashlib.sha256(sources.encode()).hexdigest()[:8]
    commit = _find_commit()
    built = []
    for backend, archs in ARCHS.items():
        target = folder / "build" / f"torch-{backend}"
        target.mkdir(parents=True, exist_ok=False)
        identifier = f"_warploom_{backend}_{unique}"
        for path, text in texts.items():
            (target / path).parent.mkdir(parents=True, exist_ok=True)
            named = _register_as(identifier, text) if path == _DISPATCH else text
            (target / path).write_bytes(named.encode())
        metadata = {
            "name": "warploom",
            "id": identifier,
            "version": int(warploom.__version__.split(".")[0]),
            "license": "Apache-2.0",
            "python-depends": [],
            "backend": {"type": backend, **({"archs": archs} if archs else {})},
            "digest": _digest(target),
        }
        if commit:
            builder = {"version": f"warploom.integrations.hub {warploom.__version__}", **commit}
            metadata["provenance"] = {"kernel-builder": builder, "kernel": commit}
        (target / _METADATA).write_text(json.dumps(metadata, indent=2) + "\n", encoding="utf-8")
        built.append(target)
    (folder / "README.md").write_text(_card(commit), encoding="utf-8")
    return built


def _digest(target: Path) -> dict[str, Any]:
    """Returns the hashes of all files but the metadata's."""
    files = {}
    for path in sorted(path for path in target.rglob("*") if path.is_file()):
        hashed = hashlib.sha256(path.read_bytes()).digest()
        files[path.relative_to(target).as_posix()] = base64.b64encode(hashed).decode()
    return {"algorithm": "sha256", "files": files}


def _find_commit() -> dict[str, Any]:
    """Returns the commit of the sources and whether they have changes, if they are in a checkout."""

    def git(*words: str) -> str | None:
        done = subprocess.run(["git", "-C", str(_PACKAGE), *words], capture_output=True, text=True)
        return done.stdout.strip() if done.returncode == 0 else None

    try:
        if git("ls-files", "--error-unmatch", "version.py") is None:
            return {}
        changes = git("status", "--porcelain", "--untracked-files=no", "--", str(_PACKAGE))
        return {"sha": git("rev-parse", "HEAD"), "dirty": bool(changes)}
    except OSError:  # no git
        return {}


_BEFORE_FLAT = '''"""The same package, for versions of `kernels` that look for a folder of the kernel's name."""

import importlib.util
import sys
from pathlib import Path

_place = Path(__file__).absolute().parents[1] / "__init__.py"
_module = next((m for m in [*sys.modules.values()] if getattr(m, "__file__", None) == str(_place)), None)
if _module is None:  # it can be imported once, since it registers operators
    _spec = importlib.util.spec_from_file_location(f"_warploom_{abs(hash(_place)):x}", _place)
    _module = importlib.util.module_from_spec(_spec)
    sys.modules[_spec.name] = _module
    _spec.loader.exec_module(_module)
__all__ = _module.__all__
globals().update({name: getattr(_module, name) for name in __all__})
'''


def _card(commit: Mapping[str, Any]) -> str:
    """Returns the card: how the package is loaded, what is in it, and what it needs."""
    functions = [name for name in warploom.__all__ if inspect.isfunction(getattr(warploom, name))]
    heads = {name: str(getattr(warploom, name).__doc__).partition("\n")[0] for name in functions}
    listed = "\n".join(f"- `{name}`: {head}" for name, head in heads.items())
    origin = f"commit {commit['sha']}{', with changes' * commit['dirty']}" if commit else "an installed package"
    return f"""---
library_name: kernels
license: apache-2.0
tags:
- kernel
---

# warploom

Fused operators for sequence models in PyTorch, written in Triton. Tensors are (batch, sequence, heads, features).

```python
from kernels import get_kernel

warploom = get_kernel("OWNER/warploom", version={warploom.__version__.split(".")[0]}, trust_remote_code=True)
out = warploom.flash_attention(q, k, v, causal=True)
```

{listed}

Needed are {NEEDED[0]}, {NEEDED[1]} and {NEEDED[2]} or newer; with Python 3.9 and 3.10, which the hub knows too, the
import fails. Kernels are compiled where they run, for NVIDIA GPUs of compute capability 8.0 or later. Elsewhere the
operators run in PyTorch, as in the build for CPUs. Version {warploom.__version__}, of {origin}.
Version 0 may change.
"""


def _find_sources() -> Iterator[Path]:
    for name in _FILES:
        yield _PACKAGE / name
    for folder in _FOLDERS:
        yield from (path for path in sorted((_PACKAGE / folder).rglob("*.py")) if path.name not in _LEFT_OUT)


def _relocate(path: Path, text: str) -> str:
    """Returns the text of a file of the package with relative imports."""
    if path == _REGISTRY:
        return '"""The operators."""\n'
    lines = text.splitlines(keepends=True)
    dots = "." * len(path.parts)
    for node in ast.walk(ast.parse(text) if path.suffix == ".py" else ast.Module([], [])):
        if isinstance(node, ast.Import) and any(alias.name.split(".")[0] == "warploom" for alias in node.names):
            raise ValueError(f"{path}, line {node.lineno}: imports warploom by its name")
        if isinstance(node, ast.ImportFrom) and node.level == 0 and (node.module or "").split(".")[0] == "warploom":
            line, rest = lines[node.lineno - 1], str(node.module).removeprefix("warploom").removeprefix(".")
            lines[node.lineno - 1] = line.replace(f"from {node.module} import", f"from {dots}{rest} import", 1)
    return "".join(lines)


def _register_as(identifier: str, text: str) -> str:
    """Returns the text of the file that registers operators, in another namespace."""
    for found in ('Library("warploom"', "torch.ops.warploom", '"warploom::'):
        if found not in text:
            raise ValueError(f"{_DISPATCH}: no {found}")
        text = text.replace(found, found.replace("warploom", identifier))
    return text


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m warploom.integrations.hub", description="Build for the hub.")
    parser.add_argument("folder", type=Path)
    for built in build(parser.parse_args(arguments).folder):
        print(built)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
