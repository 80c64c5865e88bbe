"""Where the tests run: on the GPU if there is one, else in Triton's interpreter on the CPU."""

import os
from typing import Any

import pytest
import torch


def fuse_in_the_interpreter() -> None:
    """Round a fused product and sum once, as a GPU does: Triton's interpreter rounds the product as well."""
    try:
        from triton.runtime import interpreter
    except ModuleNotFoundError:
        return

    def create_fma(self: object, x: Any, y: Any, z: Any) -> Any:
        exact = x.data.astype("float64") * y.data + z.data
        return interpreter.TensorHandle(exact.astype(z.data.dtype), z.dtype.scalar)

    interpreter.InterpreterBuilder.create_fma = create_fma


if not torch.cuda.is_available():
    # Read when a kernel is defined, so it must be set before any module with kernels is imported.
    os.environ["TRITON_INTERPRET"] = "1"
    fuse_in_the_interpreter()
    # Cases are small, and the threads of parallel workers would only wait for each other.
    torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(autouse=True)
def fixed_seed() -> None:
    torch.manual_seed(0)
