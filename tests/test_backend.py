"""Which backend a call takes: on which GPUs the kernels run, and what an error says where they do not."""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from warploom.errors import BackendError
from warploom.runtime import backend, dispatch
from warploom.runtime.backend import HAS_TRITON, use_triton

pytestmark = pytest.mark.skipif(not HAS_TRITON, reason="needs Triton")

Become = Callable[..., torch.Tensor]


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch) -> Iterator[Become]:
    """A tensor on a GPU that is not here."""
    asked: list[torch.device] = []

    def clear() -> None:
        backend._examine.cache_clear()
        backend.capability.cache_clear()

    def become(
        major: int, minor: int, hip: str | None = None, here: bool = True, dtype: torch.dtype = torch.float16
    ) -> torch.Tensor:
        def ask(device: torch.device) -> tuple[int, int]:
            assert here
            asked.append(device)
            assert len(asked) == 1, "asked at every call"
            return major, minor

        clear()
        asked.clear()
        monkeypatch.setattr(torch.version, "hip", hip)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: here)
        monkeypatch.setattr(torch.cuda, "get_device_capability", ask)
        with FakeTensorMode():
            return torch.empty(2, dtype=dtype, device="cuda:0")

    yield become
    clear()


@pytest.mark.parametrize(
    ("capability", "runs"),
    [
        ((7, 0), False),
        ((7, 5), False),
        ((8, 0), True),
        ((8, 9), True),
        ((9, 0), True),
        ((10, 3), True),
        ((12, 1), True),
    ],
)
def test_kernels_run_from_compute_capability_8_on(on: Become, capability: tuple[int, int], runs: bool) -> None:
    x = on(*capability)
    for _ in range(2):
        assert use_triton("f", "auto", x) is runs
        assert not use_triton("f", "torch", x)
    if runs:
        assert use_triton("f", "triton", x)
    else:
        needs = rf"^f: backend 'triton' cannot run .*cuda:0 of compute capability 7\.{capability[1]}.* 8\.0"
        with pytest.raises(BackendError, match=needs):
            use_triton("f", "triton", x)


def test_a_gpu_of_amd_is_not_taken_for_one_of_nvidia(on: Become) -> None:
    x = on(9, 4, hip="7.1")  # what an MI300 says of itself
    assert not use_triton("f", "auto", x)
    with pytest.raises(BackendError, match=r"cuda:0, a GPU of AMD, .* NVIDIA"):
        use_triton("f", "triton", x)


def test_kernels_for_hopper_run_on_nothing_like_it(on: Become) -> None:
    from warploom.runtime.launch import architecture, has_pdl

    for capability, hip, expected in (((9, 4), "7.1", 0), ((9, 0), None, 90), ((10, 0), None, 100)):
        x = on(*capability, hip=hip)
        assert architecture(x.device) == expected
        assert not has_pdl(x.device) or expected >= 90


def test_a_fake_tensor_stands_for_one_on_a_gpu_elsewhere(on: Become) -> None:
    x = on(0, 0, here=False)
    assert use_triton("f", "auto", x)
    assert use_triton("f", "triton", x)


def test_what_else_is_missing_does_not_ask_the_gpu(on: Become) -> None:
    x = on(9, 0, dtype=torch.float64)
    assert not use_triton("f", "auto", x)
    with pytest.raises(BackendError, match="float64"):
        use_triton("f", "triton", x)
    with pytest.raises(BackendError, match="too many heads"):
        use_triton("f", "triton", x, "too many heads")
    assert backend.capability.cache_info().misses == 0


def test_compiled_code_takes_the_answer_for_a_constant(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[torch.device] = []
    monkeypatch.setattr(backend, "_examine", asked.append)

    @torch.compile(backend="eager", fullgraph=True)
    def choose(x: torch.Tensor) -> torch.Tensor:
        return x + 1 if backend._examine_device(x.device) is None else x - 1

    for _ in range(3):
        assert torch.equal(choose(torch.zeros(2)), torch.ones(2))
    assert asked == [torch.device("cpu")]


def test_a_registered_operator_says_where_it_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a function of it does; an exported program calls the operator itself."""
    from warploom.runtime import launch

    monkeypatch.setattr(launch, "runs_on_cpu", lambda: False)
    x, theta = torch.ones(1, 2, 3, 4), torch.ones(2)
    for function in (torch.ops.warploom.lrpe, torch.ops.warploom.lrpe_launch):
        with pytest.raises(
            BackendError, match=r"^lrpe: backend 'triton' cannot run this call: the tensors are on cpu"
        ):
            function(x, theta, None, None, None, 0, 0, [], "rotate", "none", True)


def test_kernels_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "HAS_TRITON", False)
    with pytest.raises(BackendError, match=r"^warploom\.none: Triton is not installed"):
        dispatch.LazyModule(".none", "warploom").forward()
