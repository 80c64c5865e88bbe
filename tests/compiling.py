"""Programs that compile kernels, which the interpreter that tests run kernels in on a CPU does not."""

import os
import subprocess
import sys
from pathlib import Path


def output_of(program: str, folder: Path) -> str:
    """What a program prints. It becomes a file there, since Triton reads a kernel's source."""
    file = folder / "program.py"
    file.write_text(program, encoding="utf-8")
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    done = subprocess.run([sys.executable, file], capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout
