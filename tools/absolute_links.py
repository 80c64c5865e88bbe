"""Make the README's links absolute and name the repository, before a release is built of a checkout.

``python tools/absolute_links.py https://github.com/OWNER/NAME v0.1`` rewrites ``README.md``, ``pyproject.toml``.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
_LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?://|#)([^)\s]+)\)")


def absolute(text: str, repository: str, revision: str) -> str:
    """A text of the repository's root with links that lead to a revision of it; pictures to their files."""

    def link(found: re.Match[str]) -> str:
        mark, words, path = found.groups()
        kind = "raw" if mark else "tree" if (ROOT / path).is_dir() else "blob"
        return f"{mark}[{words}]({repository}/{kind}/{revision}/{path})"

    return _LINK.sub(link, text)


def with_urls(project: str, repository: str) -> str:
    """``pyproject.toml`` with the project's URLs."""
    changes, issues = f"{repository}/blob/main/CHANGELOG.md", f"{repository}/issues"
    urls = f'[project.urls]\nSource = "{repository}"\nChangelog = "{changes}"\nIssues = "{issues}"\n\n'
    return project.replace("[project.scripts]\n", f"{urls}[project.scripts]\n")


def main(repository: str, revision: str) -> int:
    """Rewrite both files; returns the exit status."""
    readme, project = ROOT / "README.md", ROOT / "pyproject.toml"
    readme.write_text(absolute(readme.read_text(encoding="utf-8"), repository, revision), encoding="utf-8")
    project.write_text(with_urls(project.read_text(encoding="utf-8"), repository), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
