"""Where the tests run: on the GPU if there is one, else in an interpreter on the CPU."""

import dataclasses
import gc
import importlib.util
import os
import sys
import zlib
from collections.abc import Callable, Iterator
from typing import Any

# Read when NumPy is imported. Threads of parallel workers' products would only wait for each other.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import gpu_room
import known_failures
import pytest
import run_log
import seeds
import selection
import torch
from launches import ON_HOPPER

HAS_TRITON = importlib.util.find_spec("triton") is not None

# Cases are small, and the threads of parallel workers would only wait for each other.
torch.set_num_threads(1)

if not torch.cuda.is_available():
    # Read when a kernel is defined, so it must be set before any module with kernels is imported.
    os.environ["TRITON_INTERPRET"] = "1"

    if HAS_TRITON:
        import kernel_interpreter

        kernel_interpreter.use()


def pytest_addoption(parser: pytest.Parser) -> None:
    what = f"seed of what the tests draw; {seeds.NAME} in the environment, or 0, by default"
    parser.addoption("--seed", type=int, default=seeds.seed(), help=what)
    selection.add_options(parser)
    run_log.add_option(parser)


def pytest_configure(config: pytest.Config) -> None:
    from warploom.testing import conformance

    os.environ[seeds.NAME] = str(config.getoption("seed"))  # for workers, and for programs that tests run
    os.environ[seeds.TODAY] = str(seeds.day())
    conformance.SEED += 1000 * seeds.seed()
    if (path := config.getoption("--log")) and not hasattr(config, "workerinput"):
        config.pluginmanager.register(run_log.Log(config, path))


def pytest_report_header() -> str:
    return f"seed: {seeds.seed()} (--seed, or {seeds.NAME}); day: {seeds.day()} ({seeds.TODAY})"


def expect_known_failures(items: list[pytest.Item]) -> None:
    """Tests of the ledger fail; one that passes is a failure, until its entry is gone."""
    where, ledger = "gpu" if torch.cuda.is_available() else "cpu", known_failures.entries()
    for item in items:
        known = known_failures.known_test(ledger, item.nodeid, where)
        if known is not None:
            item.add_marker(pytest.mark.xfail(reason=known.what, strict=True))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Any:
    """Modules and cases stay to the end: who looks for garbage among them takes half the time, and finds none."""
    gc.disable()
    result = yield
    gc.freeze()
    gc.enable()
    return result


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    expect_known_failures(items)
    if "install" not in config.option.markexpr:
        for item in items:
            if item.get_closest_marker("install"):
                item.add_marker(pytest.mark.skip(reason="takes minutes and gigabytes: make test-install"))
    selection.select(config, items)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int | None:
    """Workers of ``-n auto``: on a GPU not more than its memory is enough for."""
    if not torch.cuda.is_available():
        return None
    return max(1, min(os.cpu_count() or 1, torch.cuda.get_device_properties(0).total_memory // gpu_room.LEAST))


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    """Nothing is compiled yet, and nothing stays."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(autouse=True)
def share_of_the_gpu(request: pytest.FixtureRequest) -> Iterator[None]:
    """A worker has its share of the memory; nothing else runs beside a test that measures time or needs more."""
    if not torch.cuda.is_available():
        yield
        return
    gpu_room.enter(alone=selection.needs_the_gpu_alone(request.node))
    yield
    gpu_room.leave()


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Any:
    """Run a test once more, alone, for which a worker's share of the GPU's memory is not enough."""
    try:
        return (yield)
    except torch.OutOfMemoryError:
        if gpu_room.is_alone():
            raise
    gpu_room.leave()
    gpu_room.enter(alone=True)
    names = pyfuncitem._fixtureinfo.argnames
    pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names})
    return True


@pytest.fixture
def gpu_memory() -> Callable[[float], None]:
    """Skips where a GPU has less memory than so many GiB, while other workers run nothing."""

    def take(gib: float) -> None:
        if not torch.cuda.is_available():
            return
        torch.cuda.empty_cache()
        if torch.cuda.mem_get_info()[0] < gib * 2**30:
            pytest.skip(f"needs {gib} GiB of free GPU memory")

    return take


@pytest.fixture(autouse=True)
def fresh_plans() -> None:
    """Nothing is known of earlier tests' calls: launchers may have been made to plan them otherwise."""
    module = sys.modules.get("warploom.runtime.plans")
    for plans in module.ALL_PLANS if module else ():
        plans.forget()


@pytest.fixture
def unchecked_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels meet bad values, as on a GPU, where nobody looks at them."""
    monkeypatch.setattr("warploom.runtime.dispatch.reads_values_of", lambda x: False)


@pytest.fixture(autouse=True)
def fixed_seed() -> None:
    # `torch.manual_seed` writes down its stack for each kind of device that is not there: milliseconds.
    torch.default_generator.manual_seed(seeds.seed())
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(seeds.seed())


@pytest.fixture(autouse=True)
def float32_precision() -> Iterator[None]:
    """Every test begins with PyTorch's default precision of float32 products, and leaves it as it was."""
    assert torch.get_float32_matmul_precision() == "highest"
    yield
    left = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    assert left == "highest"


@pytest.fixture
def quick_measurements(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bench measures a few times, for what it does and not for what it finds, as on an idle machine."""
    from warploom.bench import measure, sensors

    for name, value in {"TARGET_MS": 0.1, "MIN_ROUNDS": 3, "MAX_ROUNDS": 5}.items():
        monkeypatch.setattr(measure, name, value)
    monkeypatch.setattr(os, "getloadavg", lambda: (0.0, 0.0, 0.0), raising=False)
    monkeypatch.setattr(sensors, "read_cpu_times", lambda: None)


@pytest.fixture
def own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test registers is gone after it."""
    import warploom.ops

    for registry in ("_registered_operators", "_registered_benches"):
        monkeypatch.setattr(warploom.ops, registry, {})


@pytest.fixture
def tritons_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU kernels run in Triton's own interpreter, as for users without a GPU."""
    if not torch.cuda.is_available():
        from warploom.runtime.launch import Launch

        monkeypatch.setattr(Launch, "_interpret", kernel_interpreter.TRITONS)


@pytest.fixture(autouse=True)
def _in_tritons_interpreter(request: pytest.FixtureRequest) -> None:
    """Run cases of the stack in Triton's interpreter: one in eight, each day others; all where they are chosen."""
    case = zlib.crc32(request.node.nodeid.encode()) + seeds.day() + seeds.seed()
    chosen = "stack" in request.config.option.markexpr or case % 8 == 0
    if HAS_TRITON and chosen and request.node.get_closest_marker("stack"):
        request.getfixturevalue("tritons_interpreter")


@pytest.fixture
def checked_integers(monkeypatch: pytest.MonkeyPatch, tritons_interpreter: None) -> None:
    """An integer that wraps in a kernel without saying so raises, as it does with ``TRITON_DEBUG=1`` on a GPU."""
    if torch.cuda.is_available():
        pytest.skip("on a GPU, an assertion that fails ends the process")
    from triton.runtime import interpreter

    builder = interpreter.interpreter_builder
    options = dataclasses.replace(builder.options, debug=True, sanitize_overflow=True)
    monkeypatch.setattr(builder, "options", options)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Names of the kernels that a test launches, where those for Hopper are chosen; not of those around them."""
    if not ON_HOPPER:
        if torch.cuda.is_available():
            pytest.skip("needs a Hopper GPU")
        kernel_interpreter.choose_as_on_hopper(monkeypatch)
    from planned_calls import forget_plans

    from warploom.runtime.launch import Launch

    around = ("combine", "decay", "factor", "prepare", "product", "reduce", "round", "scan", "sum", "terms")
    names: list[str] = []
    usual = Launch.__call__

    def call(self: Launch, *given: Any) -> None:
        if not self.kernel.__name__.startswith(around):
            names.append(self.kernel.__name__)
        usual(self, *given)

    monkeypatch.setattr(Launch, "__call__", call)
    forget_plans()
    yield names
    forget_plans()
