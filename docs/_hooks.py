"""Hooks of MkDocs: pages that come from the package, so that a new operator has its pages without a word here.

The guide of an operator is the README in its folder. Its links are relative to that folder and may lead out of
the documentation, which a page cannot follow.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

import warploom
from warploom.ops import FOLDERS

ROOT = Path(__file__).parents[1]
REFERENCE = "reference/operators.md"
_LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?://|#)([^)\s]+)\)")
_TITLE = re.compile(r"^# (.+)$", re.MULTILINE)


def on_config(config: Any) -> Any:
    """Name the guides in the navigation, in the order of the registry."""
    for entry in config.nav:
        if "Operators" in entry and isinstance(entry["Operators"], list):
            entry["Operators"] = [{_title(folder): f"operators/{folder}.md"} for folder in FOLDERS]
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add the generated pages."""
    for folder in FOLDERS:
        files.append(File.generated(config, f"operators/{folder}.md", content=guide(folder)))
    names = [name for name in warploom.__all__ if name[0].islower()]
    body = "\n".join(f"::: warploom.{name}\n" for name in names)
    files.append(File.generated(config, REFERENCE, content=f"# Operators\n\n{body}"))
    return files


def guide(folder: str) -> str:
    """An operator's README as a page under ``operators/``."""
    readme = ROOT / "src" / "warploom" / "ops" / folder / "README.md"
    return _LINK.sub(lambda link: _moved(link, readme), readme.read_text(encoding="utf-8"))


def _title(folder: str) -> str:
    found = _TITLE.search(guide(folder))
    return found[1].partition(":")[0] if found else folder


def _moved(link: re.Match[str], readme: Path) -> str:
    """A link as the page needs it: into the documentation, to another guide, or only its words."""
    mark, words, target = link.groups()
    path, _, place = target.partition("#")
    file = (readme.parent / path).resolve()
    if file.is_relative_to(ROOT / "docs"):
        path = posixpath.relpath(file.relative_to(ROOT / "docs").as_posix(), "operators")
    elif file.name == "README.md" and file.parent.name in FOLDERS:
        path = f"{file.parent.name}.md"
    else:
        return words
    return f"{mark}[{words}]({path}{'#' * bool(place)}{place})"
