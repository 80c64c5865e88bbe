"""The layout in which the Hugging Face hub's `kernels` library loads a package: a folder for each backend.

    python -m warploom.integrations.hub FOLDER

writes ``FOLDER/build/torch-cuda`` and ``FOLDER/build/torch-cpu``, with the operators, the layers and the
integration of transformers. Triton compiles the kernels where they run, so there is one build for all versions of
PyTorch and CUDA. The library imports a package under a name that it chooses. So all imports become relative, and
operators are registered in a namespace that the installed package does not use.
"""

from __future__ import annotations

import argparse
import ast
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import warploom

__all__ = ["build", "main"]

NAMESPACE = "warploom_hub"
"""The namespace of ``torch.ops``, another than that of the installed package."""
BACKENDS = ("cuda", "cpu")
_PACKAGE = Path(warploom.__file__).parent
_FOLDERS = ("runtime", "device", "ops", "nn", "integrations")
_FILES = ("__init__.py", "errors.py", "version.py", "py.typed")
_LEFT_OUT = ("bench.py", "peers.py", "spec.py", "hub.py")  # benches and checks, and this file
_REGISTRY = Path("ops/__init__.py")  # imports benches
_DISPATCH = Path("runtime/dispatch.py")  # has the namespace's name


def build(folder: Path) -> list[Path]:
    """Write the layout into a folder, made if needed. Returns the folders of the backends.

    Raises:
        FileExistsError: The folder has a build already.

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
    version = int(warploom.__version__.split(".")[0])
    built = []
    for backend in BACKENDS:
        target = folder / "build" / f"torch-{backend}"
        target.mkdir(parents=True, exist_ok=False)
        for source in _find_sources():
            path = source.relative_to(_PACKAGE)
            (target / path).parent.mkdir(parents=True, exist_ok=True)
            (target / path).write_text(_relocate(path, source.read_text(encoding="utf-8")), encoding="utf-8")
        metadata = {
            "id": f"{NAMESPACE}_{backend}",
            "name": "warploom",
            "version": version,
            "license": "Apache-2.0",
            "python-depends": [],
            "backend": {"type": backend},
        }
        (target / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n", encoding="utf-8")
        built.append(target)
    (folder / "README.md").write_text(_CARD, encoding="utf-8")
    return built


_CARD = """---
license: apache-2.0
tags: [kernels]
---

# warploom

Fused operators for sequence models, written in Triton: `flash_attention`, `linear_attention`, `lrpe_rotate`,
`lrpe_cosine`, `tpa_attention`, `tpa_decode`, `append_kv`.
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
    text = "".join(lines)
    if path == _DISPATCH:
        for found in ('Library("warploom"', "torch.ops.warploom", '"warploom::'):
            if found not in text:
                raise ValueError(f"{path}: no {found}")
            text = text.replace(found, found.replace("warploom", NAMESPACE))
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
