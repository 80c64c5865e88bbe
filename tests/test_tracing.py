"""Programs made from calls: compiled for any size, exported with dynamic sizes, traced. And operations counted."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import processes
import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.flop_counter import FlopCounterMode

from warploom import (
    delta_attention,
    flash_attention,
    linear_attention,
    lrpe_cosine,
    lrpe_rotate,
    short_convolution,
    tpa_attention,
    tpa_decode,
)
from warploom.nn import (
    LRPE,
    Attention,
    Block,
    DeltaAttention,
    LinearAttention,
    RotaryEmbedding,
    SwiGLU,
    TensorProductAttention,
    TransformerConfig,
    TransformerLM,
)
from warploom.runtime.backend import HAS_TRITON

Tensor = torch.Tensor
Tensors = tuple[Tensor, ...]

BACKENDS = ("torch", "triton") if HAS_TRITON else ("torch",)


class Call(NamedTuple):
    """A function of tensors, whose sizes have letters; one letter in two tensors is one size."""

    function: Callable[..., Any]
    axes: tuple[str, ...]
    options: dict[str, Any] = {}  # noqa: RUF012
    names: tuple[str, ...] = ()  # of the last tensors, which go by name

    def run(self, backend: str) -> Callable[..., Any]:
        def run(*tensors: Tensor) -> Any:
            count = len(tensors) - len(self.names)
            named = dict(zip(self.names, tensors[count:]))
            return self.function(*tensors[:count], **named, **self.options, backend=backend)

        return run

    def inputs(self, device: torch.device, **sizes: int) -> Tensors:
        sizes = {**SIZES, **sizes}
        generator = torch.Generator().manual_seed(sum(sizes.values()))
        made = [torch.randn([sizes.get(a, 1) for a in axes], generator=generator) for axes in self.axes]
        for i in range(len(self.names)):  # places in the sequence: bounds, or one for each batch entry
            made[i - len(self.names)] = PLACES[self.names[i]](sizes)
        return tuple(x.to(device) for x in made)


# No two sizes are the same: what is equal while a program is traced is taken to be equal always.
SIZES = {"B": 3, "N": 11, "M": 13, "H": 2, "R": 5, "F": 4, "D": 8, "E": 6}
OTHERS = ({"B": 7, "N": 17, "M": 19}, {"B": 9, "N": 10, "M": 23})
PLACES: dict[str, Callable[[dict[str, int]], Tensor]] = {
    "cu_seqlens_q": lambda sizes: torch.tensor([0, 4, sizes["N"]]),
    "cu_seqlens": lambda sizes: torch.tensor([0, 4, sizes["N"]]),
    "position_ids": lambda sizes: torch.arange(sizes["N"]).flip(0).expand(sizes["B"], -1),
    "offset": lambda sizes: torch.arange(sizes["B"]),
    "sink": lambda sizes: torch.linspace(-1, 1, sizes["H"]),
    "seqused_k": lambda sizes: torch.arange(sizes["B"]) + sizes["M"] - sizes["B"],
    "theta": lambda sizes: torch.linspace(0.1, 1, sizes["F"]),
    "decay": lambda sizes: torch.linspace(-0.1, -0.01, sizes["H"]),
    "initial_state": lambda sizes: torch.linspace(-1, 1, sizes["E"]).expand(*(sizes[a] for a in "BHDE")),
}
ALIKE = ("BNHD", "BNHD", "BNHE")
QKV, PACKED = ("BNHD", "BM1D", "BM1E"), ("1NHD", "1NHD", "1NHE")
FACTORS = ("BNHR", "BMH", "BMH", "BNRD", "BMD", "BME")
CALLS = {
    "flash_attention": Call(flash_attention, QKV, {"causal": True}),
    "flash_attention_full": Call(flash_attention, QKV, {"scale": 0.3, "return_lse": True}),
    "flash_attention_window": Call(flash_attention, QKV, {"window": (3, 2)}),
    "flash_attention_packed": Call(flash_attention, (*PACKED, ""), {}, ("cu_seqlens_q",)),
    "flash_attention_sink": Call(flash_attention, (*QKV, ""), {"softcap": 0.7, "causal": True}, ("sink",)),
    "flash_attention_lengths": Call(flash_attention, (*QKV, ""), {"causal": True}, ("seqused_k",)),
    "linear_attention": Call(
        linear_attention,
        (*ALIKE, "", "", ""),
        {"encoding": "rotate", "return_state": True},
        ("theta", "decay", "initial_state"),
    ),
    "delta_attention": Call(
        delta_attention,
        (*ALIKE, "BNH", "", ""),
        {"encoding": "rotate", "normalize": True, "return_state": True},
        ("theta", "initial_state"),
    ),
    "short_convolution": Call(short_convolution, ("BND", "DF"), {"activation": "silu", "return_state": True}),
    "short_convolution_packed": Call(short_convolution, ("1ND", "DF", ""), {}, ("cu_seqlens",)),
    "linear_attention_full": Call(linear_attention, ALIKE, {"causal": False, "activation": "relu"}),
    "lrpe_rotate": Call(lrpe_rotate, ("BNHD", "HF"), {"offset": 5, "activation": "silu"}),
    "lrpe_cosine": Call(lrpe_cosine, ("BNHD", "HF"), {"prefix": 2}),
    "lrpe_rotate_placed": Call(lrpe_rotate, ("BNHD", "HF", ""), {}, ("position_ids",)),
    "lrpe_rotate_offset": Call(lrpe_rotate, ("BNHD", "HF", ""), {"interleaved": True}, ("offset",)),
    "lrpe_over_the_sequence": Call(lrpe_cosine, ("BNHD", "HF"), {"activation": "softmax_sequence"}),
    "lrpe_packed": Call(lrpe_rotate, ("1NHD", "HF", ""), {"activation": "softmax_sequence"}, ("cu_seqlens",)),
    "tpa_attention": Call(tpa_attention, FACTORS, {"causal": True}),
    "tpa_attention_packed": Call(
        tpa_attention, ("1NHR", "1NH", "1NH", "1NRD", "1ND", "1NE", ""), {}, ("cu_seqlens",)
    ),
    "tpa_decode": Call(tpa_decode, FACTORS),
    "tpa_decode_lengths": Call(tpa_decode, (*FACTORS, ""), {"strategy": "split_kv"}, ("seqused_k",)),
}
calls = pytest.mark.parametrize(
    ("call", "backend"),
    [pytest.param(call, backend, id=f"{name}-{backend}") for name, call in CALLS.items() for backend in BACKENDS],
)


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def as_tuple(outputs: Any) -> Tensors:
    return (outputs,) if isinstance(outputs, Tensor) else tuple(outputs)


def assert_same(found: Any, expected: Any) -> None:
    assert len(as_tuple(found)) == len(as_tuple(expected))
    for one, other in zip(as_tuple(found), as_tuple(expected)):
        torch.testing.assert_close(one, other, equal_nan=True)


def with_gradients(run: Callable[..., Any], inputs: Tensors) -> Tensors:
    leaves = [x.clone().requires_grad_(x.is_floating_point()) for x in inputs]
    outputs = as_tuple(run(*leaves))
    wanted = [x for x in leaves if x.requires_grad]
    return *outputs, *torch.autograd.grad(outputs, wanted, [torch.cos(3 * o.detach()) for o in outputs])


# ----------------------------------------------------------------------------------------------------------
# Compiled and exported
# ----------------------------------------------------------------------------------------------------------


@pytest.mark.sample(5)
@calls
@pytest.mark.seldom(3, 5)
def test_compiled_for_any_size(call: Call, backend: str, device: torch.device) -> None:
    run, counter = call.run(backend), CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(run, fullgraph=True, dynamic=True, backend=counter)
    frames = []
    for sizes in ({}, *OTHERS):
        inputs = call.inputs(device, **sizes)
        assert_same(compiled(*inputs), run(*inputs))
        frames.append(counter.frame_count)
    assert len(set(frames)) == 1
    if call.function is tpa_decode:
        return
    torch._dynamo.reset()
    for sizes in ({}, OTHERS[0]):
        inputs = call.inputs(device, **sizes)
        assert_same(with_gradients(compiled, inputs), with_gradients(run, inputs))


class Module(nn.Module):
    """Calls a function."""

    def __init__(self, run: Callable[..., Any]) -> None:
        super().__init__()
        self.run = run

    def forward(self, *inputs: Tensor) -> Any:
        return self.run(*inputs)


def dynamic_sizes(call: Call, inputs: Tensors) -> tuple[dict[int, Any], ...]:
    dims = {letter: torch.export.Dim(letter) for letter in "BNM"}
    axes = {"position_ids": "BN", "offset": "B", "seqused_k": "B", "initial_state": "B"}
    count = len(inputs) - len(call.names)
    named = (*call.axes[:count], *(axes.get(name, "") for name in call.names))
    return tuple({i: dims[a] for i, a in enumerate(each) if a in dims} for each in named)


@pytest.mark.sample(5)
@calls
@pytest.mark.parametrize("strict", [False, True])
def test_exported_with_dynamic_sizes(strict: bool, call: Call, backend: str, device: torch.device) -> None:
    run, inputs = call.run(backend), call.inputs(device)
    sizes = dynamic_sizes(call, inputs)
    program = torch.export.export(Module(run), inputs, dynamic_shapes=(sizes,), strict=strict).module()
    for others in OTHERS:
        inputs = call.inputs(device, **others)
        assert_same(program(*inputs), run(*inputs))


class Layer(NamedTuple):
    """A layer, and the axes of its input behind batch and tokens; without any it takes tokens."""

    make: Callable[[], nn.Module]
    axes: tuple[int, ...] = (32,)

    def input(self, batch: int, tokens: int, device: torch.device) -> Tensor:
        if not self.axes:
            return torch.randint(9, (batch, tokens), device=device)
        return torch.randn(batch, tokens, *self.axes, device=device)


SMALL = {"vocab_size": 9, "d_model": 32, "d_ff": 48, "layers": 1, "heads": 2}
LAYERS = {
    "rotary_embedding": Layer(lambda: RotaryEmbedding(8, learnable=True), (4, 8)),
    "lrpe": Layer(lambda: LRPE(4, 8, kind="cosine"), (4, 8)),
    "lrpe_rotate_for_grouped_heads": Layer(lambda: LRPE(2, 8), (4, 8)),
    "attention": Layer(lambda: Attention(32, 2, kv_heads=1, causal=True, position=RotaryEmbedding(16))),
    "attention_with_lrpe": Layer(lambda: Attention(32, 2, causal=True, position=LRPE(2, 16, kind="cosine"))),
    "tensor_product_attention": Layer(lambda: TensorProductAttention(32, 2, causal=True)),
    "linear_attention": Layer(lambda: LinearAttention(32, 2)),
    "linear_attention_cosine": Layer(lambda: LinearAttention(32, 2, value_dim=8, position="cosine")),
    "delta_attention": Layer(lambda: DeltaAttention(32, 2, decay="feature", position="rotate")),
    "swiglu": Layer(lambda: SwiGLU(32, 48)),
    "block": Layer(lambda: Block(32, 48, Attention(32, 2, causal=True))),
    "transformer_flash": Layer(lambda: TransformerLM(TransformerConfig(**SMALL, attention="flash")), ()),
    "transformer_tpa": Layer(lambda: TransformerLM(TransformerConfig(**SMALL, attention="tpa")), ()),
    "transformer_linear": Layer(lambda: TransformerLM(TransformerConfig(**SMALL, attention="linear")), ()),
}


LOADED = """
import sys
import warploom  # and not torch, which this imports
torch = sys.modules["torch"]
print(sorted(name for name in dir(torch.ops.warploom) if name.endswith("_launch")))
assert "triton" not in sys.modules, "operators can be looked at without it"
x = torch.empty(2, 3, 4, 8, device="meta")
out, lse, _ = torch.ops.warploom.flash_attention(x, x, x, *[None] * 7, 0.5, None, None, "batch")
assert (out.shape, lse.shape) == (x.shape, (2, 4, 3))
assert "triton" not in sys.modules, "nor do shapes of results need it"
program = torch.export.load(sys.argv[1]).module()
torch.save(program(*torch.load(sys.argv[2])), sys.argv[2])
"""


@pytest.mark.skipif(not HAS_TRITON, reason="the registered operators run Triton kernels")
@pytest.mark.seldom(4, 6)
def test_an_exported_program_is_loaded_in_another_process(tmp_path: Path, device: torch.device) -> None:
    class Rotated(nn.Module):
        def forward(self, x: Tensor, theta: Tensor) -> Tensor:
            return lrpe_rotate(x, theta, backend="triton")

    inputs = torch.randn(1, 8, 2, 16, device=device), torch.rand(8, device=device)
    program, tensors = tmp_path / "program.pt2", tmp_path / "tensors.pt"
    torch.export.save(torch.export.export(Rotated(), inputs), program)
    torch.save(inputs, tensors)
    environment = processes.environment()
    command = [sys.executable, "-c", LOADED, str(program), str(tensors)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    operators = (
        *("append_kv", "delta_attention", "flash_attention", "flash_attention_into", "linear_attention", "lrpe"),
        *("flash_attention_jvp", "flash_attention_masked", "rotary_attention"),
        "short_convolution",
        *("tpa_attention", "tpa_decode"),
    )
    names = {f"{name}{part}_launch" for name in operators for part in ("", "_backward")}
    without_gradient = ("append_kv", "flash_attention_into", "flash_attention_jvp", "tpa_decode")
    assert done.stdout == f"{sorted(names - {f'{name}_backward_launch' for name in without_gradient})}\n"
    torch.testing.assert_close(torch.load(tensors), lrpe_rotate(*inputs, backend="torch"))


@pytest.mark.sample(6)
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("way", ["compile", "export", "export_strict"])
@pytest.mark.seldom(4, 20)
def test_layers(way: str, name: str, device: torch.device) -> None:
    made = LAYERS[name]
    layer = made.make().to(device)
    if way == "compile":
        program: Any = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    else:
        sizes = ({0: torch.export.Dim("B"), 1: torch.export.Dim("N", max=512)},)
        x = made.input(3, 11, device)
        program = torch.export.export(layer, (x,), dynamic_shapes=sizes, strict=way == "export_strict").module()
    for batch, tokens in ((3, 11), (5, 17), (2, 70)):  # the last is more than a chunk of linear attention
        x = made.input(batch, tokens, device)
        assert_same(program(x), layer(x))
        if way == "compile":
            assert_same(parameter_gradients(layer, program(x)), parameter_gradients(layer, layer(x)))
            with torch.no_grad():
                assert_same(program(x), layer(x))


def parameter_gradients(layer: nn.Module, outputs: Any) -> Tensors:
    first = as_tuple(outputs)[0]
    return torch.autograd.grad(first, list(layer.parameters()), torch.cos(3 * first.detach()))


@pytest.mark.seldom(6, 22)
def test_views_of_a_projection_compiled_for_any_size(device: torch.device) -> None:
    """Whose backward must know the memory order of gradients that it views."""

    def run(x: Tensor, weights: Tensor) -> Tensor:
        q, k, v = ((x @ weight).view(*x.shape[:2], 2, 8) for weight in weights.unbind())
        return linear_attention(q, k, v, backend="torch")

    compiled = torch.compile(run, fullgraph=True, dynamic=True, backend="aot_eager")
    for batch, tokens in ((3, 11), (2, 70)):
        inputs = torch.randn(batch, tokens, 8, device=device), torch.randn(3, 8, 16, device=device)
        assert_same(with_gradients(compiled, inputs), with_gradients(run, inputs))


@pytest.mark.sample(2)
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning")
@calls
def test_traced(call: Call, backend: str, device: torch.device) -> None:
    """By what is older than export; a trace is of its sizes."""
    run, inputs = call.run(backend), call.inputs(device)
    run(*inputs), run(*inputs), run(*inputs)  # known when it is traced
    traced = torch.jit.trace(run, inputs, check_trace=False)
    others = tuple(x * 0.5 if x.is_floating_point() else x for x in inputs)
    assert_same(traced(*others), run(*others))
    assert_same(run(*others), call.run("torch")(*others))


# ----------------------------------------------------------------------------------------------------------
# Operations of matrix products
# ----------------------------------------------------------------------------------------------------------


IN_CHUNKS = ("linear_attention", "delta_attention")
"""Calls whose operations are counted as those of the recurrence, and which PyTorch computes in chunks."""


def operations(run: Callable[..., Any], inputs: Tensors) -> int:
    with FlopCounterMode(display=False) as counter:
        run(*inputs)
    return int(counter.get_total_flops())


@pytest.mark.skipif(not HAS_TRITON, reason="in PyTorch it counts products of its own")
@pytest.mark.parametrize("name", [name for name in CALLS if "packed" not in name and name not in IN_CHUNKS])
def test_operations_are_those_of_the_definition(name: str, device: torch.device) -> None:
    call = CALLS[name]
    run, inputs = call.run("triton"), call.inputs(device)
    for _ in range(3):
        run(*inputs)  # known when it is counted
    forward = operations(call.run("torch"), inputs)
    assert operations(run, inputs) == forward
    assert (forward > 0) == (not name.startswith(("lrpe", "short_convolution")))
    if call.function is tpa_decode:
        return

    def step(*given: Tensor) -> None:
        with_gradients(run, given)

    def step_in_pytorch(*given: Tensor) -> None:
        with_gradients(call.run("torch"), given)

    # The weights are computed anew in a backward that has not kept them, and PyTorch counts that of its own.
    sizes, anew = SIZES, 0
    if name == "linear_attention_full":  # its state
        anew = 2 * sizes["B"] * sizes["H"] * sizes["N"] * sizes["D"] * sizes["E"]
    elif forward > 0:
        anew = 2 * sizes["B"] * sizes["H"] * sizes["N"] * sizes["M"] * sizes["D"]
    if call.function is tpa_attention:  # so are queries of rank R, and keys and values of rank one
        of_one_head = sizes["N"] * sizes["R"] * sizes["D"] + sizes["M"] * (sizes["D"] + sizes["E"])
        anew += 2 * sizes["B"] * sizes["H"] * of_one_head
    assert operations(step, inputs) == operations(step_in_pytorch, inputs) + anew


@pytest.mark.skipif(not HAS_TRITON, reason="needs Triton")
def test_operations_of_a_backward_alone(device: torch.device) -> None:
    q, k, v = (x.requires_grad_() for x in CALLS["flash_attention"].inputs(device))
    out = flash_attention(q, k, v, backend="triton")
    assert operations(lambda: out.sum().backward(), ()) == 2 * 3 * 2 * 11 * 13 * (3 * 8 + 2 * 6)


@pytest.mark.skipif(not HAS_TRITON, reason="needs Triton")
@pytest.mark.parametrize("features", [8, 16])
def test_operations_of_linear_attention(features: int, device: torch.device) -> None:
    """Those of the recurrence, however sequences are cut; cosines have twice the features."""
    encoding = {8: "rotate", 16: "cosine"}[features]
    call = CALLS["linear_attention"]._replace(options={"encoding": encoding, "return_state": True})
    *inputs, state = call.inputs(device)
    inputs = [x.requires_grad_() for x in (*inputs, state.repeat(1, 1, features // 8, 1))]
    product = 2 * 3 * 11 * 2 * features * 6
    assert operations(call.run("triton"), tuple(inputs)) == 2 * product
    out, _ = call.run("triton")(*inputs)
    assert operations(lambda: out.sum().backward(), ()) == 5 * product


@pytest.mark.skipif(not HAS_TRITON, reason="needs Triton")
def test_operations_of_packed_sequences_and_of_two_operators_in_one(device: torch.device) -> None:
    from warploom.ops.rotary_attention.api import rotary_attention

    pairs = 4**2 + 7**2
    packed = CALLS["flash_attention_packed"]
    assert operations(packed.run("triton"), packed.inputs(device)) == 2 * pairs * 2 * (8 + 6)
    packed = CALLS["tpa_attention_packed"]
    products = 2 * 11 * 2 * (5 * 8 + 8 + 6)
    assert operations(packed.run("triton"), packed.inputs(device)) == products + 2 * pairs * 2 * (8 + 6)
    meta = tuple(x.to("meta") for x in packed.inputs(device))  # bounds without values
    assert operations(packed.run("triton"), meta) == products + 2 * 11**2 * 2 * (8 + 6)
    qkv, theta = torch.randn(3, 11, 4, 8, device=device).requires_grad_(), torch.rand(4, device=device)
    forward = 2 * 3 * 2 * 11**2 * (8 + 8)
    assert operations(lambda: rotary_attention(qkv, theta, 2, 0.5), ()) == forward
    assert operations(lambda: rotary_attention(qkv, theta, 2, 0.5).sum().backward(), ()) == forward * 7 // 2


FIRST = """
import sys, torch, warploom
from torch.utils.flop_counter import FlopCounterMode
counter = FlopCounterMode(display=False)
q = torch.randn(1, 5, 2, 8, device=sys.argv[1])
with counter:
    warploom.flash_attention(q, q, q, backend="triton")
print(counter.get_total_flops())
"""


@pytest.mark.skipif(not HAS_TRITON, reason="needs Triton")
@pytest.mark.seldom(4, 5)
def test_operations_of_the_first_call(device: torch.device) -> None:
    """A counter that was imported and made after the operators."""
    environment = processes.environment()
    command = [sys.executable, "-W", "ignore", "-c", FIRST, device.type]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.stdout == f"{2 * 5 * 5 * 2 * 16}\n", done.stderr
