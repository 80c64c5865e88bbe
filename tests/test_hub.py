"""The layout of the hub's `kernels` library: built, and loaded offline."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import warploom
from warploom.integrations import hub

OPTIONAL = {"safetensors"}
"""What a function imports when it is called."""
PROGRAM = """
import importlib.util, sys
from pathlib import Path
import kernels, torch
kernel = kernels.get_local_kernel(Path(sys.argv[1]), backend="cpu")
former = Path(sys.argv[1], "build", "torch-cpu", "warploom", "__init__.py")
assert kernel.__name__ != "warploom" and "warploom" not in sys.modules
q, k, v = torch.randn(3, 2, 20, 4, 16)
expected = torch.nn.functional.scaled_dot_product_attention(
    *(x.transpose(1, 2) for x in (q, k, v)), is_causal=True
).transpose(1, 2)
for backend in ("torch", "triton"):
    torch.testing.assert_close(kernel.flash_attention(q, k, v, causal=True, backend=backend), expected)
assert hasattr(getattr(torch.ops, kernel.__name__), "flash_attention")
assert kernel.__name__.startswith("_warploom_cpu_")
kernel.nn.RotaryEmbedding(16)(q)  # of the same package
assert "warploom" not in sys.modules
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

# As older versions of the library load it: by a folder of the kernel's name.
spec = importlib.util.spec_from_file_location("former", former)
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
torch.testing.assert_close(module.flash_attention(q, k, v), kernel.flash_attention(q, k, v))
print("done")
"""


@pytest.fixture(scope="module")
def layout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hub")
    assert hub.main([str(folder)]) == 0
    return folder


@pytest.mark.seldom(4, 8)
def test_the_layout_imports_itself_torch_and_the_standard_library_alone(layout: Path) -> None:
    at_hand = {"torch", "triton", "numpy"}  # Triton and NumPy come with PyTorch
    for folder in (layout / "build" / f"torch-{backend}" for backend in hub.ARCHS):
        for path in folder.rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
                if isinstance(node, ast.ImportFrom) and node.level == 0:
                    names = [str(node.module)]
                others = {name.split(".")[0] for name in names} - at_hand - sys.stdlib_module_names
                allowed = {"transformers"} if "transformers" in path.parts else set()
                assert others <= allowed | OPTIONAL, path
    with pytest.raises(FileExistsError):
        hub.build(layout)


def test_the_metadata_is_what_the_hub_requires(layout: Path) -> None:
    identifiers = set()
    for backend in hub.ARCHS:
        metadata = json.loads((layout / "build" / f"torch-{backend}" / "metadata.json").read_text())
        identifiers.add(metadata["id"])
        assert metadata["id"].isidentifier()
        assert re.fullmatch(rf"_warploom_{backend}_[0-9a-f]{{8}}", metadata["id"])
        assert (metadata["name"], metadata["version"], metadata["backend"]["type"]) == ("warploom", 0, backend)
        text = (layout / "build" / f"torch-{backend}" / "runtime" / "dispatch.py").read_text(encoding="utf-8")
        assert f'Library("{metadata["id"]}"' in text
        assert {"__init__.py", "py.typed", "warploom/__init__.py"} < set(metadata["digest"]["files"])
    assert len(identifiers) == len(hub.ARCHS)


def test_the_hubs_own_code_reads_the_metadata_and_verifies_the_files(layout: Path) -> None:
    rust = pytest.importorskip("kernels._rust")
    for backend, archs in hub.ARCHS.items():
        folder = layout / "build" / f"torch-{backend}"
        metadata = rust.Metadata.read_from_file(folder / "metadata.json")
        assert metadata.backend.archs == (archs or None)
        metadata.digest.validate(rust.Digest.hash_variant(rust.DigestAlgorithm.SHA256, folder))
        if (Path(warploom.__file__).parents[2] / ".git").exists():
            assert re.fullmatch("[0-9a-f]{40}", metadata.provenance.kernel.commit)
            assert metadata.provenance.kernel_builder.version.startswith("warploom.integrations.hub ")
    kernels = pytest.importorskip("kernels.validate")
    for validator in kernels.default_metadata_validators():
        validator.validate_metadata(metadata=metadata, variant="torch-cpu")


def test_the_card_names_the_functions_and_what_they_need(layout: Path) -> None:
    card = (layout / "README.md").read_text(encoding="utf-8")
    public = {name for name in warploom.__all__ if name.islower() and not name.startswith("_")}
    assert set(re.findall(r"^- `(\w+)`: \S", card, re.MULTILINE)) == public
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = " ".join([f"Python{project['requires-python']}", *project["dependencies"]]).lower()
    for needed in hub.NEEDED:
        name, version = needed.lower().replace("pytorch", "torch").split()
        assert f"{name}>={version}" in wanted


@pytest.mark.seldom(6, 12)
def test_the_library_loads_it_offline(tmp_path: Path) -> None:
    for needed in ("kernels", "transformers", "triton"):
        pytest.importorskip(needed)
    hub.build(tmp_path)
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().endswith("done")
