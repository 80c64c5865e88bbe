"""What makes a record stale, and what does not. Launches are planned in a process of its own, not interpreted."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

from warploom.bench.fingerprint import source_of

KERNELS = """
import triton
import triton.language as tl

LIMIT = tl.constexpr(4)


@triton.jit
def half(x):
    return x * 0.5


@triton.jit
def kernel(x, n: tl.int32, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(x + i, half(tl.load(x + i, mask=i < LIMIT)), mask=i < n)
"""


def source(tmp_path: Path, text: str, name: str = "kernel") -> str:
    file = tmp_path / f"kernels_{len(list(tmp_path.iterdir()))}.py"
    file.write_text(text)
    spec = importlib.util.spec_from_file_location(file.stem, file)
    module = sys.modules[file.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return source_of(getattr(module, name))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("    i = tl", "    # Every element once.\n    i  =  tl"),
        ("constexpr):\n", 'constexpr):\n    """Halve n elements."""\n'),
        ("half(", "one_half("),
        ("LIMIT", "MOST"),
        ("import triton\n", "import math\nimport triton\n"),
    ],
    ids=["comment", "docstring", "name of a function", "name of a constant", "elsewhere in the file"],
)
def test_what_computes_the_same_is_the_same_source(tmp_path: Path, old: str, new: str) -> None:
    assert old in KERNELS
    assert source(tmp_path, KERNELS) == source(tmp_path, KERNELS.replace(old, new))


@pytest.mark.parametrize(("old", "new"), [("0.5", "0.25"), ("constexpr(4)", "constexpr(5)"), ("i < n", "i <= n")])
def test_a_change_of_a_kernel_what_it_calls_or_reads_is_another_source(tmp_path: Path, old: str, new: str) -> None:
    assert source(tmp_path, KERNELS) != source(tmp_path, KERNELS.replace(old, new))


def test_the_kernel_itself_may_be_renamed(tmp_path: Path) -> None:
    renamed = KERNELS.replace("def kernel", "def halve_kernel")
    assert source(tmp_path, KERNELS) == source(tmp_path, renamed, "halve_kernel")


MODEL = Path(__file__).parents[1] / "benchmarks" / "transformer.py"
PLAN = """
import contextlib, io, json, sys, torch
from pathlib import Path
from warploom.bench.fingerprint import fingerprint, gpu_of
from warploom.cli import main
from warploom.ops import benches
from warploom.testing.specs import load_specs

H200 = gpu_of({"compute_capability": "9.0", "multiprocessors": 132})
BIG = {"batch": 12, "heads": 12, "head_dim": 128, "dtype": "bfloat16", "activation": "none", "n": 32768}
load_specs([Path(sys.argv[1])])
rotate, model = benches()["lrpe-rotate"], benches()["transformer"]
STEP = {"size": "sm", "batch": 4, "context_length": 512, "position": "rotate", "dtype": "bfloat16"}
def of(provider="warploom", mode="fwd", gpu=H200, **case):
    return fingerprint(rotate, BIG | case, provider, mode, gpu)
def step(provider, mode="train"):
    return fingerprint(model, STEP, provider, mode, H200)
found = {
    "usual": of(), "again": of(), "earlier": of(gpu=of()), "longer": of(n=16384), "silu": of(activation="silu"),
    "backward": of(mode="bwd"), "graph": of(mode="fwd_graph"), "float32": of(dtype="float32"),
    "A100": of(gpu="sm_80/108"),
    "torch": of("torch"),
    "limit": of("limit"), "CPU": of(gpu=""), "other": of(gpu="of earlier code"),
    "model": step("warploom+compile"), "model_fwd": step("warploom", "fwd"), "sdpa": step("sdpa"),
    "llama": step("llama+graphs"),
}
delta = benches()["delta-attention"]
shape = {"batch": 1, "n": 64, "heads": 2, "key_heads": 1, "head_dim": 64, "dtype": "bfloat16", "decay": "head"}
for name in ("warploom", "warploom_linear", "warploom_softmax", "softmax_sdpa_flash"):
    found[f"delta {name}"] = fingerprint(delta, shape, name, "bwd", H200)
empty = torch.empty_strided
torch.empty_strided = lambda *sizes, **named: empty(*sizes, **named).fill_(7)  # no decay, and no bound of sequences
case = {"batch": 1, "n": 64, "heads": 1, "head_dim": 64, "dtype": "bfloat16", "encoding": "none", "theta": "vector"}
packed = {"decay": "token", "cu_seqlens": [0, 64]}
found["any values"] = fingerprint(benches()["linear-attention"], case | packed, "warploom", "fwd", H200)
torch.empty_strided = empty
common = ["list", "flash-attention", "--explain", "--suite", "shapes", "--case", "head_dim=192"]
with contextlib.redirect_stdout(io.StringIO()) as explained:
    main(common)
    main([*common, "--gpu", "sm_80/108"])
    main(["list", "attention-decode", "--explain", "--case", "batch=8"])
print(json.dumps(found | {"explained": explained.getvalue()}))
"""


@pytest.fixture(scope="module")
def planned() -> dict[str, Any]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    words = [sys.executable, "-c", PLAN, str(MODEL)]
    done = subprocess.run(words, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_a_case_is_planned_as_for_its_gpu(planned: dict[str, Any]) -> None:
    assert planned["usual"].startswith("sm_90/132/")
    assert planned["usual"] == planned["again"] == planned["earlier"] == planned["graph"]
    assert planned["model"] == planned["model_fwd"]
    assert planned["A100"].startswith("sm_80/108/")
    kinds = ("usual", "silu", "backward", "float32", "A100", "limit", "model", "sdpa")
    assert len({planned[kind] for kind in kinds}) == len(kinds)


def test_what_tensors_hold_is_not_looked_at(planned: dict[str, Any]) -> None:
    assert planned["any values"].startswith("sm_90/132/")


def test_other_functions_of_a_bench_have_their_own(planned: dict[str, Any]) -> None:
    found = {planned[f"delta {name}"] for name in ("warploom", "warploom_linear", "warploom_softmax")}
    assert len(found) == 3
    assert all(each.startswith("sm_90/132/") for each in found)


def test_what_launches_nothing_of_ours_has_none(planned: dict[str, Any]) -> None:
    for name in ("delta softmax_sdpa_flash", "torch", "CPU", "other", "llama"):
        assert planned[name] == ""


def test_the_list_says_which_kernels_a_case_takes_and_why(planned: dict[str, Any]) -> None:
    text = " ".join(planned["explained"].split())
    hopper, ampere, decode = re.split("(?:flash-attention|attention-decode) batch", text)[1:]
    assert "forward: HopperForward: The kernel in Gluon" in hopper
    assert "not FusedBackward: 192 features, not 33 to 128" in hopper
    assert "kernels: hopper_forward_kernel, prepare_kernel, hopper_shared_key_kernel, hopper_query_kernel" in hopper
    assert "not HopperForward: the GPU is no Hopper" in ampere
    assert "SeparateBackward of TritonGradient, TritonGradient" in ampere
    assert "forward: SplitDecodeForward(DecodeForward)" in decode
