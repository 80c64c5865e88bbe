"""Where the tests run: on the GPU if there is one, else in Triton's interpreter on the CPU."""

import dataclasses
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from launches import ON_HOPPER

if not torch.cuda.is_available():
    # Read when a kernel is defined, so it must be set before any module with kernels is imported.
    os.environ["TRITON_INTERPRET"] = "1"
    # Cases are small, and the threads of parallel workers would only wait for each other.
    torch.set_num_threads(1)

    from warploom.backend import HAS_TRITON

    if HAS_TRITON:
        from interpreter import quicken

        quicken()


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


@pytest.fixture
def quick_measurements(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bench measures a few times, for what it does and not for what it finds."""
    from warploom.bench import measure

    for name, value in {"TARGET_MS": 0.1, "MIN_ROUNDS": 3, "MAX_ROUNDS": 5}.items():
        monkeypatch.setattr(measure, name, value)


@pytest.fixture
def own_registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a test registers is gone after it."""
    import warploom.ops
    from warploom.bench import records

    for registry in ("_guests", "_guest_benches"):
        monkeypatch.setattr(warploom.ops, registry, {})
    records._digests.cache_clear()
    yield
    records._digests.cache_clear()


@pytest.fixture
def checked_integers(monkeypatch: pytest.MonkeyPatch) -> None:
    """An integer that wraps in a kernel without saying so raises, as it does with ``TRITON_DEBUG=1`` on a GPU."""
    if torch.cuda.is_available():
        pytest.skip("on a GPU, an assertion that fails ends the process")
    from triton.runtime import interpreter

    builder = interpreter.interpreter_builder
    options = dataclasses.replace(builder.options, debug=True, sanitize_overflow=True)
    monkeypatch.setattr(builder, "options", options)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the kernels for Hopper that a test launches."""
    if not ON_HOPPER:
        pytest.skip("needs a Hopper GPU")
    from warploom.launch import TiledLaunch

    names: list[str] = []
    usual = TiledLaunch.__call__

    def call(self: TiledLaunch, tensors: Any, *numbers: Any) -> None:
        names.append(self.function.__name__)
        usual(self, tensors, *numbers)

    monkeypatch.setattr(TiledLaunch, "__call__", call)
    return names
