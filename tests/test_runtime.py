"""Calls of all operators in a busy process: threads, streams, graphs, devices, many lengths, repeats.

The last runs 300 calls of each kind. ``WARPLOOM_REPEATS=10000 pytest tests/test_runtime.py -k repeated`` runs ten
times ten thousand.
"""

import gc
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import seeds
import torch
from launches import ON_GPU, ON_HOPPER, constants_of

from warploom import flash_attention, linear_attention, lrpe_cosine, lrpe_rotate, tpa_attention, tpa_decode
from warploom.runtime.backend import HAS_TRITON
from warploom.runtime.plans import Plans

if not HAS_TRITON:
    pytest.skip("needs Triton", allow_module_level=True)

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.runtime import JITFunction

from warploom.ops.rotary_attention.api import rotary_attention
from warploom.runtime import dispatch
from warploom.runtime.launch import Launch

Tensor = torch.Tensor
Results = tuple[Tensor, ...]

REPEATS = int(os.environ.get("WARPLOOM_REPEATS", "30"))
"""Calls of each kind in each of ten blocks."""
BLOCKS = 10


class Kind(NamedTuple):
    """Calls of an operator that differ in length and contents."""

    function: Callable[..., Any]
    shapes: Callable[[int], dict[str, tuple[int, ...]]]
    """Of its tensors, by length."""
    length: int
    dtype: torch.dtype = torch.bfloat16
    differentiated: tuple[str, ...] = ()
    options: Callable[[int, torch.device], dict[str, Any]] = lambda length, device: {}
    shrink: int = 1
    """Tensors are divided by it."""

    def inputs(self, device: torch.device, length: int | None = None, number: int = 0) -> dict[str, Any]:
        length, generator = self.length if length is None else length, seeds.generator(number)
        made: dict[str, Any] = {}
        for name, shape in self.shapes(length).items():
            dtype = torch.float32 if name == "theta" else self.dtype
            x = torch.randn(shape, generator=generator) / self.shrink
            made[name] = x.to(device, dtype).requires_grad_(name in self.differentiated)
        return made | self.options(length, device)

    def run(self, inputs: dict[str, Any]) -> Results:
        """Outputs, and gradients for one that is made of the outputs."""
        outputs = self.function(**inputs)
        outputs = (outputs,) if isinstance(outputs, Tensor) else outputs
        if not self.differentiated:
            return outputs
        wanted = [inputs[name] for name in self.differentiated]
        found = torch.autograd.grad(outputs, wanted, [o.detach().flip(1) for o in outputs])
        return *(o.detach() for o in outputs), *found


def attention_shapes(
    batch: int, heads: int, key_heads: int, features: int, length: int
) -> dict[str, tuple[int, ...]]:
    keys = (batch, length, key_heads, features)
    return {"q": (batch, length, heads, features), "k": keys, "v": keys}


def factor_shapes(batch: int, heads: int, rank: int, tokens: int, length: int) -> dict[str, tuple[int, ...]]:
    """For decoding some tokens, or with ``tokens = 0`` for attention of all."""
    tokens = tokens or length
    ranks = (rank,) if rank > 1 else ()
    head, feature = (batch, length, heads, *ranks), (batch, length, *ranks, 64)
    return {
        "aq": (batch, tokens, heads, 4), "ak": head, "av": head,
        "bq": (batch, tokens, 4, 64), "bk": feature, "bv": feature,
    }  # fmt: skip


def rows(batch: int, heads: int, features: int, per_row: int, length: int) -> dict[str, tuple[int, ...]]:
    return {"x": (batch, length, heads, features), "theta": (heads, features // per_row)}


def packed(length: int, device: torch.device) -> dict[str, Any]:
    return {"causal": True, "cu_seqlens_q": torch.tensor([0, length // 3, length // 2, length], device=device)}


def forgetting(length: int, device: torch.device) -> dict[str, Any]:
    return {"decay": torch.tensor([-0.1, -0.01], device=device)}


def some_valid(batch: int, length: int, device: torch.device) -> dict[str, Any]:
    return {"seqused_k": (torch.arange(batch, device=device) * 37 + 1).clamp(max=length)}


QKV, FACTORS = ("q", "k", "v"), ("aq", "ak", "av", "bq", "bk", "bv")
attend = partial(flash_attention, causal=True, backend="triton")
KINDS: dict[str, Kind] = {
    "attention": Kind(attend, partial(attention_shapes, 2, 4, 2, 64), 200, differentiated=QKV),
    "attention_tiles": Kind(attend, partial(attention_shapes, 2, 32, 8, 128), 1100, differentiated=QKV),
    "attention_in_order": Kind(attend, partial(attention_shapes, 8, 16, 16, 64), 1100, differentiated=QKV),
    "attention_split": Kind(attend, partial(attention_shapes, 1, 1, 1, 64), 5000, differentiated=QKV),
    "attention_wide": Kind(attend, partial(attention_shapes, 1, 16, 16, 256), 1500, differentiated=QKV),
    "attention_float32": Kind(
        attend, partial(attention_shapes, 1, 2, 2, 64), 2100, torch.float32, differentiated=QKV
    ),
    "attention_packed": Kind(
        partial(flash_attention, backend="triton"), partial(attention_shapes, 1, 4, 4, 64), 700,
        differentiated=QKV, options=packed,
    ),
    "attention_lse": Kind(
        partial(flash_attention, window=(100, 3), return_lse=True, backend="triton"),
        partial(attention_shapes, 2, 4, 4, 80), 500, torch.float16,
    ),
    "rotary_attention": Kind(
        partial(rotary_attention, heads=16, scale=0.125),
        lambda n: {"qkv": (2, n, 32, 64), "theta": (1, 32)}, 900, differentiated=("qkv",),
    ),
    "linear": Kind(
        partial(linear_attention, encoding="rotate", backend="triton"),
        lambda n: attention_shapes(2, 8, 8, 128, n) | {"theta": (1, 64)}, 900, differentiated=QKV,
    ),
    "linear_chunks": Kind(
        partial(linear_attention, encoding="cosine", return_state=True, backend="triton"),
        lambda n: attention_shapes(1, 2, 2, 64, n) | {"theta": (2, 64)}, 1500,
        differentiated=(*QKV, "theta"), options=forgetting,
    ),
    "linear_steps": Kind(
        partial(linear_attention, encoding="rotate", return_state=True, backend="triton"),
        lambda n: attention_shapes(n, 2, 2, 32, 1) | {"theta": (1, 16), "initial_state": (n, 2, 32, 32)}, 300,
        options=forgetting,
    ),
    "rotate": Kind(
        partial(lrpe_rotate, backend="triton"), partial(rows, 2, 8, 128, 2), 1000, differentiated=("x", "theta")
    ),
    "cosine": Kind(
        partial(lrpe_cosine, activation="silu", offset=77, backend="triton"), partial(rows, 2, 8, 64, 1), 1000,
        torch.float32, differentiated=("x", "theta"),
    ),
    "softmax": Kind(
        partial(lrpe_cosine, activation="softmax_sequence", backend="triton"), partial(rows, 2, 8, 64, 1), 1500,
        differentiated=("x", "theta"),
    ),
    "factors": Kind(
        partial(tpa_attention, causal=True, backend="triton"), partial(factor_shapes, 1, 8, 2, 0), 600,
        differentiated=FACTORS, shrink=2,
    ),
    "decode": Kind(partial(tpa_decode, backend="triton"), partial(factor_shapes, 1, 16, 1, 1), 3000),
    "decode_batch": Kind(
        partial(tpa_decode, backend="triton"), partial(factor_shapes, 128, 16, 2, 1), 300,
        options=partial(some_valid, 128),
    ),
    "decode_float32": Kind(
        partial(tpa_decode, backend="triton"), partial(factor_shapes, 3, 4, 2, 3), 900, torch.float32
    ),
    "decode_attention": Kind(
        attend, lambda n: {"q": (128, 1, 8, 128), "k": (128, n, 2, 128), "v": (128, n, 2, 128)}, 400
    ),
}  # fmt: skip
kinds = pytest.mark.parametrize("name", KINDS)


def same(found: Results, expected: Results) -> bool:
    return len(found) == len(expected) and all(map(torch.equal, found, expected))


def in_threads(works: list[Callable[[], None]]) -> None:
    """Run all at once; the first error of any is raised."""
    errors: list[BaseException] = []
    start = threading.Barrier(len(works))

    def guarded(work: Callable[[], None]) -> None:
        start.wait()
        try:
            work()
        except BaseException as error:  # not lost with its thread
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


# ----------------------------------------------------------------------------------------------------------
# Threads and streams
# ----------------------------------------------------------------------------------------------------------


def test_plans_shared_by_threads() -> None:
    """Whichever thread makes a plan, and whenever all are forgotten, a key has its own plan."""
    known = Plans()

    def work(number: int) -> None:
        draw = random.Random(number)
        for _ in range(4000):
            key = draw.randrange(2 * known.LARGEST)
            assert known.get(key, lambda key=key: ("plan", key)) == ("plan", key)
            found = known.find(key)
            assert found is None or found == ("plan", key)

    in_threads([partial(work, number) for number in range(8)])
    assert len(known.known) <= known.LARGEST + 8


def test_a_function_shared_by_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever thread knew a call first, it runs with its own options and the shapes that it was planned for."""

    def forward(tensors: Any, number: int, options: Any, plans: Plans) -> tuple[Any]:
        return ((plans.get("shape", lambda: tensors[0].shape), options, number),)

    operator = SimpleNamespace(specialize=None, gradient=None, forward=forward)
    check = lambda name, tensors, options, number: dispatch.ValidatedCall(options, numbers=(0, 9))  # noqa: E731
    function = dispatch.Function("f", check, lambda *_: None, operator)  # type: ignore[arg-type]
    monkeypatch.setattr(dispatch, "is_plain_eager", lambda *_: True)
    monkeypatch.setattr(dispatch, "keeps_plans_for", lambda _: True)
    monkeypatch.setattr(dispatch, "use_triton", lambda *_: True)
    lengths = [torch.zeros(length) for length in range(1, 5)]

    def work(number: int) -> None:
        draw = random.Random(number)
        for _ in range(2000):
            x, options, varying = draw.choice(lengths), (draw.randrange(3),), draw.randrange(10)
            assert function("triton", (x,), options, varying) == (x.shape, options, varying)
            if draw.random() < 0.01:
                function.plans.forget()

    in_threads([partial(work, number) for number in range(8)])
    assert len(function.plans.known) <= 12
    assert len(function.plans.recent) <= Plans.MOST_RECENT


def test_the_backend_for_cpus_in_threads() -> None:
    """Forward and backward of every operator by PyTorch, of other lengths in every thread."""
    cpu, works = torch.device("cpu"), []
    for number in range(6):
        calls = []
        for kind in KINDS.values():
            if kind.function.func is rotary_attention:
                continue
            short = kind._replace(function=partial(kind.function, backend="torch"), dtype=torch.float32)
            inputs = short.inputs(cpu, 5 + number, number)
            calls.append((short, inputs, short.run(inputs)))

        def work(calls: list[Any] = calls) -> None:
            for _ in range(3):
                for kind, inputs, expected in calls:
                    assert same(kind.run(inputs), expected)

        works.append(work)
    in_threads(works)


@pytest.mark.gpu
@pytest.mark.parametrize("own_streams", [False, True])
def test_threads(own_streams: bool, device: torch.device) -> None:
    """Sixteen threads run all operators, forward and backward, each with its own shapes in its own order."""
    works = []
    for number in range(16):
        calls = []
        for kind in KINDS.values():
            inputs = kind.inputs(device, kind.length - 13 * number, number)
            calls.append((kind, inputs, kind.run(inputs)))

        def work(number: int = number, calls: list[Any] = calls) -> None:
            stream = torch.cuda.Stream() if own_streams else torch.cuda.current_stream()
            draw = random.Random(number)
            with torch.cuda.stream(stream):
                for _ in range(6):
                    for kind, inputs, expected in draw.sample(calls, len(calls)):
                        assert same(kind.run(inputs), expected)
            stream.synchronize()

        works.append(work)
    torch.cuda.synchronize()
    in_threads(works)


@pytest.mark.gpu
@pytest.mark.parametrize("planned", [True, False])
@kinds
def test_a_thread_that_has_not_used_the_gpu(name: str, planned: bool, device: torch.device) -> None:
    """Descriptors of tensors at new addresses are encoded in it, before anything else there calls the driver.

    In a call that is not planned yet, the kernel's launcher is looked at there first, too.
    """
    kind = KINDS[name]
    inputs = kind.inputs(device, kind.length - (0 if planned else 11), 0)
    elsewhere = {
        each: x.detach().clone().requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x
        for each, x in inputs.items()
    }
    found: list[Results] = []
    expected = kind.run(inputs) if planned else None
    in_threads([lambda: found.append(kind.run(elsewhere))])
    assert same(found[0], expected or kind.run(inputs))


@pytest.mark.gpu
def test_streams(device: torch.device) -> None:
    """Calls of one thread on several streams, each of which gets its inputs late."""
    made = {name: (kind, kind.inputs(device), kind.inputs(device, number=1)) for name, kind in KINDS.items()}
    expected = {name: kind.run(inputs) for name, (kind, inputs, _) in made.items()}
    streams = [torch.cuda.Stream() for _ in range(4)]
    for shift in range(4):
        torch.cuda.synchronize()
        found = {}
        for index, (name, (kind, inputs, others)) in enumerate(made.items()):
            stream = streams[(index + shift) % 4]
            with torch.cuda.stream(stream):
                torch.cuda._sleep(2_000_000)
                late = {}
                for argument, value in inputs.items():
                    late[argument] = value
                    if isinstance(value, Tensor) and value.is_floating_point():
                        late[argument] = others[argument].detach().clone()
                        late[argument].copy_(value.detach())
                        late[argument].requires_grad_(value.requires_grad)
                found[name] = kind.run(late)
        torch.cuda.synchronize()
        for name, results in found.items():
            assert same(results, expected[name]), name


# ----------------------------------------------------------------------------------------------------------
# Graphs and devices
# ----------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@kinds
def test_a_graph_follows_its_inputs(name: str, device: torch.device) -> None:
    kind = KINDS[name]
    inputs = kind.inputs(device)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            kind.run(inputs)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = kind.run(inputs)
    for number in (1, 2, 0):
        changed = kind.inputs(device, number=number)
        with torch.no_grad():
            for argument, value in changed.items():
                if isinstance(value, Tensor):
                    inputs[argument].copy_(value)
        for _ in range(2):
            for result in captured:
                result.fill_(float("nan"))
            graph.replay()
            assert same(captured, kind.run(changed)), number


@pytest.mark.gpu
@kinds
def test_the_current_device_is_another(name: str) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs a second GPU")
    kind = KINDS[name]
    first, second = torch.device("cuda", 0), torch.device("cuda", 1)
    expected = kind.run(kind.inputs(first))
    for current in (0, 1):
        with torch.cuda.device(current):
            for device in (first, second, first):
                found = kind.run(kind.inputs(device))
                assert all(x.device == device for x in found)
                assert same(tuple(x.to(first) for x in found), expected)
                assert torch.cuda.current_device() == current


@pytest.mark.gpu
def test_threads_on_two_devices() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs a second GPU")
    works = []
    for number in range(8):
        device = torch.device("cuda", number % 2)
        calls = [(kind, kind.inputs(device, number=number // 2)) for kind in KINDS.values()]
        expected = [kind.run(inputs) for kind, inputs in calls]

        def work(calls: list[Any] = calls, expected: list[Results] = expected) -> None:
            for _ in range(5):
                for (kind, inputs), wanted in zip(calls, expected):
                    assert same(kind.run(inputs), wanted)

        works.append(work)
    for index in range(2):
        torch.cuda.synchronize(index)
    in_threads(works)


# ----------------------------------------------------------------------------------------------------------
# Many lengths
# ----------------------------------------------------------------------------------------------------------

LENGTHS = 4500


@pytest.fixture
def variants(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[Any]]:
    """What decides which variant of a kernel a launch takes, of all launches so far, none of which runs."""
    if ON_GPU:
        pytest.skip("there, launches run")
    seen: set[Any] = set()

    def call(self: Launch, *given: Any) -> None:
        tensors = [(x.dtype, x.data_ptr() % 16 == 0) if isinstance(x, Tensor) else type(x) for x in given]
        constants, options = constants_of(self).items(), self.options.items()
        seen.add((self.kernel.__name__, *self.takes, *tensors, *constants, *options))

    monkeypatch.setattr(Launch, "__call__", call)
    yield seen
    clear_plans()


def plans_of_process() -> list[Plans]:
    gc.collect()
    return [thing for thing in gc.get_objects() if type(thing) is Plans]


def clear_plans() -> None:
    for known in plans_of_process():
        known.known.clear()
        known.recent = ()


def assert_bounded() -> None:
    """No table of plans is beyond its bound, nor are there more launches than those hold."""
    tables = plans_of_process()
    assert max(len(known.known) for known in tables) <= Plans.LARGEST
    launches = sum(type(thing) is Launch for thing in gc.get_objects())
    top = sum(len(known.known) for known in tables if len(known.known) > 100) + 1000
    assert launches <= 6 * top, (launches, top)


BY_LENGTH = (
    "attention", "attention_lse", "rotary_attention", "linear", "linear_chunks", "rotate", "cosine", "softmax",
    "factors", "decode",
)  # fmt: skip
"""Kinds whose length changes; nothing else in them depends on it."""


@pytest.mark.parametrize("name", BY_LENGTH)
def test_lengths_take_few_variants_and_bounded_memory(name: str, variants: set[Any], device: torch.device) -> None:
    """Plans alone, of lengths far apart and beside each other: kernels differ by regime, not by length."""
    kind = KINDS[name]

    def plan(length: int) -> None:
        inputs = {}
        for argument, shape in kind.shapes(length).items():
            dtype = torch.float32 if argument == "theta" else kind.dtype
            x = torch.empty(shape, dtype=dtype)
            inputs[argument] = x.requires_grad_(argument in kind.differentiated)
        kind.run(inputs | kind.options(length, device))

    regimes = {round(1.07**i) for i in range(125)}
    for length in sorted(regimes | set(range(1, 40))):
        plan(length)
    before = set(variants)
    every = max(LENGTHS // 300, 1)
    for length in range(40, LENGTHS, every):
        plan(length)
    new = variants - before
    assert not new, new
    assert_bounded()


def test_keys_are_forgotten_in_time(
    variants: set[Any], device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Plans, "LARGEST", 64)
    kind = KINDS["attention"]
    for length in range(1, 300):
        kind.run(kind.inputs(device, length))
    assert_bounded()


@pytest.mark.gpu
@pytest.mark.parametrize("name", BY_LENGTH)
def test_4500_lengths_compile_nothing(name: str, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = KINDS[name]
    whole = {
        argument: torch.randn(shape, device=device, dtype=torch.float32 if argument == "theta" else kind.dtype)
        for argument, shape in kind.shapes(LENGTHS + 50).items()
    }

    def run(length: int) -> None:
        inputs = {}
        for argument, shape in kind.shapes(length).items():
            x = whole[argument][tuple(slice(n) for n in shape)].contiguous()
            inputs[argument] = x.requires_grad_(argument in kind.differentiated)
        kind.run(inputs | kind.options(length, device))

    for length in sorted({round(1.03**i) for i in range(285)} | set(range(1, 40))):
        run(length)
    compiled: list[str] = []
    usual = JITFunction._do_compile

    def count(self: Any, *arguments: Any, **keywords: Any) -> Any:
        compiled.append(self.__name__)
        return usual(self, *arguments, **keywords)

    monkeypatch.setattr(JITFunction, "_do_compile", count)
    for length in range(1, LENGTHS + 1):
        run(length)
    torch.cuda.synchronize()
    assert not compiled
    assert_bounded()


# ----------------------------------------------------------------------------------------------------------
# A GPU that does something else too
# ----------------------------------------------------------------------------------------------------------

HELD = 2.0
"""Seconds."""


@gluon.jit
def hold_kernel(out, nanoseconds):
    """Hold a multiprocessor for so long: beside so much shared memory no kernel of attention for Hopper fits."""
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    WORDS: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    large = gl.allocate_shared_memory(gl.int32, [2**15], WORDS)
    small = gl.allocate_shared_memory(gl.int32, [2**14], WORDS)
    i = gl.arange(0, 128, LANES)
    large.slice(0, 128).store(i)
    small.slice(0, 128).store(i)
    begin = gl.inline_asm_elementwise("mov.u64 $0, %globaltimer;", "=l", [], gl.int64, is_pure=False, pack=1)
    now = begin
    while now - begin < nanoseconds:
        now = gl.inline_asm_elementwise("mov.u64 $0, %globaltimer;", "=l", [], gl.int64, is_pure=False, pack=1)
    gl.store(out + i, large.slice(0, 128).load(LANES) + small.slice(0, 128).load(LANES))


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["attention_in_order", "attention_tiles", "softmax", "linear_chunks", "decode"])
def test_half_of_the_gpu_is_busy(name: str, device: torch.device) -> None:
    """No program waits for one that cannot begin: results are there while another stream holds half of the GPU."""
    if not ON_HOPPER:
        pytest.skip("needs a Hopper GPU")
    kind, out = KINDS[name], torch.empty(128, dtype=torch.int32, device=device)
    inputs = kind.inputs(device)
    expected = kind.run(inputs)
    half = torch.cuda.get_device_properties(device).multi_processor_count // 2
    other, held, done = torch.cuda.Stream(), torch.cuda.Event(), torch.cuda.Event()
    hold_kernel[(1,)](out, 1, num_warps=4)
    torch.cuda.synchronize()
    with torch.cuda.stream(other):
        hold_kernel[(half,)](out, int(HELD * 1e9), num_warps=4)
        held.record()
    time.sleep(0.01)
    found = kind.run(inputs)
    done.record()
    last = time.monotonic() + 30 * HELD
    while not done.query():
        assert time.monotonic() < last, "it hangs"
    if name != "softmax":  # whose programs are launched together, when all of them can run
        assert not held.query()
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


# ----------------------------------------------------------------------------------------------------------
# The same bits
# ----------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_a_kind_adds_up_in_order(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """The backward of one is the kernel in which programs wait for each other."""
    if not ON_HOPPER:
        pytest.skip("a kernel for Hopper")
    launched: set[str] = set()
    usual = Launch.__call__

    def call(self: Launch, *given: Any) -> None:
        launched.add(self.kernel.__name__)
        usual(self, *given)

    monkeypatch.setattr(Launch, "__call__", call)
    KINDS["attention_in_order"].run(KINDS["attention_in_order"].inputs(device))
    assert "hopper_backward_kernel" in launched


@pytest.mark.gpu
@pytest.mark.timeout(7200)
@kinds
def test_repeated_calls_give_the_same_bits(name: str, device: torch.device) -> None:
    """The device gathers differences and is asked once a block; blocks differ in what free memory holds."""
    kind = KINDS[name]
    inputs = kind.inputs(device)
    first = kind.run(inputs)
    assert all(result.isfinite().all() for result in first)
    for block in range(BLOCKS):
        torch.cuda.empty_cache()
        junk = [torch.full((2**22 * (block + 1) + 4 * block,), float("nan"), device=device) for _ in range(3)]
        del junk[block % 2 :]  # their memory, full of NaN, is what the next calls get
        different = torch.zeros((), dtype=torch.bool, device=device)
        for _ in range(REPEATS):
            for result, wanted in zip(kind.run(inputs), first, strict=True):
                different |= (result != wanted).any()
        assert not different, f"block {block}"


@pytest.mark.gpu
@pytest.mark.parametrize("rank", [1, 2])
@pytest.mark.parametrize("length", [17, 1000, 30000])
def test_decoding_does_not_depend_on_the_batch(length: int, rank: int, device: torch.device) -> None:
    kind = Kind(partial(tpa_decode, backend="triton"), partial(factor_shapes, 128, 16, rank, 1), length)
    inputs = kind.inputs(device)
    (whole,) = kind.run(inputs)
    for entry in (0, 77, 127):
        for _ in range(REPEATS):
            (alone,) = kind.run({name: x[entry : entry + 1] for name, x in inputs.items()})
            assert torch.equal(alone, whole[entry : entry + 1])
