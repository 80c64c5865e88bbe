"""The wheel, with each extra, in an empty environment: the commands and examples that README names for it.

Installs from a package index, which takes minutes and gigabytes: ``make test-install``. ``WARPLOOM_INSTALL`` names
more requirements for all of them, such as ``torch==2.13.0``.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TRAINED = "--steps 2 --stop 2 --warm-up 1 --batch 2 --log-every 1 --eval-every 2 --eval-batches 1 --save-every 1"
# By extra: commands of README, docs/quickstart.md and examples/README.md, the measuring ones cut short.
COMMANDS = {
    "": (
        "warploom --help",
        "warploom env",
        "warploom list lrpe-rotate",
        "warploom check lrpe_rotate",
        "warploom check --spec examples/rms_norm/spec.py",
        "TRITON_INTERPRET=1 warploom check --spec examples/rms_norm/spec.py --backend triton",
        "warploom bench lrpe-rotate --mode fwd --provider torch --case n=512 --output runs/first --no-report",
    ),
    "bench": (
        "warploom check lrpe_rotate",
        "warploom bench lrpe-rotate-md --mode fwd --provider torch --time-limit 5 --output runs/first",
        "warploom report runs/first",
        "warploom compare runs/first runs/first",
        "warploom profile --spec examples/rms_norm/spec.py --mode fwd --case n=256 --provider torch",
    ),
    "lm": (
        f"python examples/train_lm.py --text text.py {TRAINED}",
        "python examples/generate.py --prompt 'def main(' --tokens 4",
        "python examples/loss_parity.py --picture a.svg --steps 20 --text text.py --batch 1 --attention sdpa,flash",
        "python examples/linear_and_softmax.py --lengths 32 --tokens 64 --picture b.svg --text text.py",
    ),
    "compare": (
        "warploom bench --spec benchmarks/transformer.py --suite trial --mode train --provider llama --output a",
    ),
    "transformers": ("python examples/trainer.py --steps 2 --width 32 --length 32",),
}
# What Python's and other packages' own code warns of is not ours to mend.
WARNINGS = ("error", "ignore::DeprecationWarning", "ignore::PendingDeprecationWarning", "ignore::ImportWarning")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder), str(ROOT)]
    subprocess.run(build, check=True)
    (built,) = folder.glob("*.whl")
    return built


@pytest.mark.install
@pytest.mark.parametrize("extra", COMMANDS)
def test_every_command_of_an_extra_runs(extra: str, wheel: Path, tmp_path: Path) -> None:
    made = tmp_path / "environment"
    more = os.environ.get("WARPLOOM_INSTALL", "").split()
    try:
        subprocess.run([sys.executable, "-m", "venv", str(made)], check=True)
        wanted = f"{wheel}[{extra}]" if extra else str(wheel)
        install = [str(made / "bin/python"), "-m", "pip", "install", "--quiet", wanted, *more]
        # What PYTHONPATH names would count as installed.
        subprocess.run(install, check=True, env={k: v for k, v in os.environ.items() if k != "PYTHONPATH"})
        run_commands(extra, made / "bin", tmp_path)
    finally:
        shutil.rmtree(made, ignore_errors=True)  # gigabytes


@pytest.mark.install
def test_the_source_distribution_makes_the_same_wheel(wheel: Path, tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "environment")], check=True)
    python = str(tmp_path / "environment" / "bin" / "python")
    subprocess.run([python, "-m", "pip", "install", "--quiet", "setuptools>=77"], check=True)
    program = "import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])"
    subprocess.run([python, "-c", program, str(tmp_path)], check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
    (archive,) = tmp_path.glob("*.tar.gz")
    build = [python, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(tmp_path), str(archive)]
    subprocess.run(build, check=True)
    (built,) = tmp_path.glob("*.whl")
    ours, theirs = (zipfile.ZipFile(each) for each in (wheel, built))
    assert sorted(ours.namelist()) == sorted(theirs.namelist())
    assert all(ours.read(name) == theirs.read(name) for name in ours.namelist())


def run_commands(extra: str, programs: Path, folder: Path) -> None:
    """Run the commands of an extra beside copies of the examples and of the benches of models."""
    for name in ("benchmarks", "examples"):
        shutil.copytree(ROOT / name, folder / name)
    (folder / "text.py").write_text("".join(f"def f{i % 11}(x):\n    return x + {i}\n" for i in range(12_000)))
    for command in COMMANDS[extra]:
        words = shlex.split(command)
        environment = {k: v for k, v in os.environ.items() if k not in ("TRITON_INTERPRET", "PYTHONPATH")}
        environment |= {"PYTHONWARNINGS": ",".join(WARNINGS), "CUDA_VISIBLE_DEVICES": ""}
        while "=" in words[0]:
            name, _, environment[name] = words.pop(0).partition("=")
        words[0] = str(programs / words[0])
        done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
        assert "Warning" not in done.stderr, f"{command}\n{done.stderr}"
