"""The README's table comes from the committed records."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from warploom.bench.readme import BEGIN, END, speed_table, update
from warploom.errors import ArgumentError

ROOT = Path(__file__).parents[1]


def test_the_table_is_what_the_records_say(tmp_path: Path) -> None:
    committed = (ROOT / "README.md").read_text(encoding="utf-8")
    copy = tmp_path / "README.md"
    copy.write_text(committed, encoding="utf-8")
    # In the interpreter nothing is known of what is stale.
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    program = "import sys, pathlib; from warploom.bench.readme import update; "
    program += "update(pathlib.Path(sys.argv[1]), [pathlib.Path(sys.argv[2])])"
    words = [sys.executable, "-c", program, str(copy), str(ROOT / "results" / "h200")]
    subprocess.run(words, env=environment, check=True, capture_output=True)
    assert copy.read_text(encoding="utf-8") == committed


def test_no_records_no_numbers() -> None:
    assert "no records" in speed_table([])


def test_a_file_without_marks_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "file.md"
    file.write_text(f"{END} {BEGIN}", encoding="utf-8")
    with pytest.raises(ArgumentError, match="marks"):
        update(file, [])
    assert file.read_text(encoding="utf-8") == f"{END} {BEGIN}"
