"""Hooks of MkDocs: pages that come from the package, so that a new operator has its pages without a word here.

The guide of an operator is the README in its folder; other texts there are pages behind it. Links lead to files of
the repository, as its host shows them. Pages have them lead to pages; what is none leaves its words alone.
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
            entry["Operators"] = [_pages(texts_of(folder)) for folder in FOLDERS]
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add the generated pages."""
    for folder in FOLDERS:
        for text in texts_of(folder):
            files.append(File.generated(config, f"operators/{_page(text)}", content=guide(text)))
    names = [name for name in warploom.__all__ if name[0].islower()]
    body = "\n".join(f"::: warploom.{name}\n" for name in names)
    files.append(File.generated(config, REFERENCE, content=f"# Operators\n\n{body}"))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Return a page of the folder ``docs`` whose links lead to pages."""
    text = ROOT / "docs" / page.file.src_uri
    return with_links(markdown, text, posixpath.dirname(page.file.src_uri)) if text.is_file() else markdown


def texts_of(folder: str) -> list[Path]:
    """The texts in an operator's folder, its README first."""
    texts = (ROOT / "src" / "warploom" / "ops" / folder).glob("*.md")
    return sorted(texts, key=lambda text: (text.name != "README.md", text.name))


def guide(text: Path) -> str:
    """A text in an operator's folder as a page under ``operators/``."""
    return with_links(text.read_text(encoding="utf-8"), text, "operators")


def with_links(markdown: str, text: Path, folder: str) -> str:
    """The words of a text of the repository, with links as a page in a folder of the site needs them."""
    return _LINK.sub(lambda link: _moved(link, text, folder), markdown)


def _pages(texts: list[Path]) -> dict[str, list[dict[str, str]]]:
    """An operator in the navigation: its guide and the texts behind it. Names say which operator."""
    operator = _title(texts[0])
    names = [f"Using {operator if operator[:2].isupper() else operator[0].lower() + operator[1:]}"]
    names += [_title(text, whole=True) for text in texts[1:]]
    return {operator: [{name: f"operators/{_page(text)}"} for name, text in zip(names, texts)]}


def _page(text: Path) -> str:
    folder = text.parent.name
    return f"{folder}.md" if text.name == "README.md" else f"{folder}-{text.name}"


def _title(text: Path, whole: bool = False) -> str:
    """The heading of a text, by default up to a colon."""
    found = _TITLE.search(guide(text))
    return (found[1] if whole else found[1].partition(":")[0]) if found else text.stem


def _moved(link: re.Match[str], text: Path, folder: str) -> str:
    """A link as the page needs it: into the documentation, to a guide, or only its words."""
    mark, words, target = link.groups()
    path, _, place = target.partition("#")
    file = (text.parent / path).resolve()
    if file.is_relative_to(ROOT / "docs"):
        path = posixpath.relpath(file.relative_to(ROOT / "docs").as_posix(), folder or ".")
    elif file.suffix == ".md" and file.parent.name in FOLDERS:
        path = posixpath.relpath(f"operators/{_page(file)}", folder or ".")
    else:
        return words
    return f"{mark}[{words}]({path}{'#' * bool(place)}{place})"
