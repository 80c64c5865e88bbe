"""The layout of the hub's `kernels` library: built, and loaded offline."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import warploom
from warploom.integrations import hub

PROGRAM = """
import importlib, sys
from pathlib import Path
import kernels, torch
kernel = kernels.get_local_kernel(Path(sys.argv[1]), backend="cpu")
assert kernel.__name__ != "warploom" and "warploom" not in sys.modules
q, k, v = torch.randn(3, 2, 20, 4, 16)
expected = torch.nn.functional.scaled_dot_product_attention(
    *(x.transpose(1, 2) for x in (q, k, v)), is_causal=True
).transpose(1, 2)
for backend in ("torch", "triton"):
    torch.testing.assert_close(kernel.flash_attention(q, k, v, causal=True, backend=backend), expected)
assert hasattr(torch.ops.warploom_hub, "flash_attention")
import warploom  # the installed package, too
x, theta = torch.randn(2, 9, 4, 16), torch.rand(8)
for backend in ("torch", "triton"):
    both = (package.lrpe_rotate(x, theta, backend=backend) for package in (kernel, warploom))
    torch.testing.assert_close(*both)

from transformers import LlamaConfig, LlamaForCausalLM
integration = importlib.import_module(kernel.__name__ + ".integrations.transformers")
integration.register("from_the_hub")
config = LlamaConfig(hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4, vocab_size=9)
model = LlamaForCausalLM._from_config(config, attn_implementation="eager").eval()
ids = torch.randint(9, (2, 11))
expected = model(ids).logits
model.set_attn_implementation("from_the_hub")
torch.testing.assert_close(model(ids).logits, expected, rtol=1e-4, atol=1e-5)
print("done")
"""


def test_no_import_of_the_layout_is_absolute(tmp_path: Path) -> None:
    assert hub.main([str(tmp_path)]) == 0
    for folder in (tmp_path / "build" / f"torch-{backend}" for backend in hub.BACKENDS):
        assert (folder / "metadata.json").is_file()
        for path in folder.rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
                if isinstance(node, ast.ImportFrom) and node.level == 0:
                    names = [str(node.module)]
                assert not [name for name in names if name.split(".")[0] == "warploom"], path
    with pytest.raises(FileExistsError):
        hub.build(tmp_path)
    card = (tmp_path / "README.md").read_text(encoding="utf-8")
    public = {name for name in warploom.__all__ if name.islower() and not name.startswith("_")}
    assert set(re.findall(r"`(\w+)`", card)) == public - {"check_values"}, "the operators"


@pytest.mark.seldom(3)
def test_the_library_loads_it_offline(tmp_path: Path) -> None:
    for needed in ("kernels", "transformers", "triton"):
        pytest.importorskip(needed)
    hub.build(tmp_path)
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().endswith("done")
