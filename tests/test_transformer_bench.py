"""Steps of models as a bench, and `warploom profile`: on models small enough for a CPU."""

import json
import shlex
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import seeds
import torch

from benchmarks import _parts as parts
from benchmarks import llama, transformer
from benchmarks.transformer import BENCH, config_of
from warploom.bench import runner, traces
from warploom.bench.records import LIMIT, Record, load
from warploom.bench.runner import Selection
from warploom.cli import main
from warploom.nn import TransformerConfig, TransformerLM, transformer_lm
from warploom.ops import register
from warploom.report import render_terminal
from warploom.report.panels import arrange
from warploom.report.rivals import summarize

CPU = torch.device("cpu")
SIZES = {
    "sm": {"d_model": 32, "d_ff": 64, "layers": 2, "heads": 2},
    "md": {"d_model": 48, "d_ff": 64, "layers": 1, "heads": 2},
}
CASE = {"size": "sm", "batch": 2, "position": "rotate", "dtype": "float32", "context_length": 16}
SPEC = shlex.quote(transformer.__file__)
TRIAL = f"--spec {SPEC} --device cpu --suite trial --case size=sm"


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, quick_measurements: None, own_registry: None) -> None:
    monkeypatch.chdir(tmp_path)
    register(benches=[BENCH])
    for name, size in SIZES.items():
        monkeypatch.setitem(transformer_lm.SIZES, name, size)
    for name, value in {"WARM_UP": 1, "STEPS": 4, "STEPS_IN_A_ROW": 2}.items():
        monkeypatch.setattr(transformer, name, value)


def run(
    *cases: dict[str, object], modes: list[str] | None = None, providers: list[str] | None = None
) -> list[Record]:
    bench = replace(BENCH, suites={"quick": lambda device: list(cases)})
    outcome = runner.run([bench], Selection(modes=modes, providers=providers), CPU, Path("here"))
    assert load([Path("here")]) == outcome.records
    return outcome.records


@pytest.mark.seldom(3, 3)
def test_every_model_in_every_mode_is_a_record_and_a_row() -> None:
    records = run(CASE, CASE | {"size": "md"}, providers=["warploom", "torch", "warploom_tpa"])
    modes = ("fwd", "fwd_bwd", "train")
    names = ("warploom", "torch", "warploom_tpa", LIMIT)
    assert [(r.case["size"], r.mode, r.provider) for r in records] == [
        (size, mode, name) for size in ("sm", "md") for mode in modes for name in names
    ]
    assert len({r.run for r in records}) == 1
    for record in records:
        assert record.status == "ok"
        limit = next(r for r in records if (r.provider, r.case, r.mode) == (LIMIT, record.case, record.mode))
        assert record.limit_fraction == pytest.approx(limit.ms / record.ms)
        if record.provider == LIMIT:
            continue
        assert record.rounds == 4
        assert record.details is not None
        expected = ["forward", "backward", "optimizer"][: 1 + modes.index(record.mode)]
        assert list(record.details["phases"]) == expected
        means = sum(phase["mean_ms"] for phase in record.details["phases"].values())
        assert record.ms_p20 <= record.ms <= record.ms_p80
        assert 0.3 * means < record.ms < 3 * means
        assert record.details["tokens_per_s"] == pytest.approx(2 * 16 / record.ms * 1e3)
        model = TransformerLM(config_of(record.case, record.provider))
        assert record.details["parameters"] == model.parameter_count()
        plain = TransformerLM(config_of(record.case, "warploom"))
        assert record.flops == 32 * plain.flops_per_token(16, training=record.mode != "fwd")
    assert "transformer  fwd_bwd  fp32  batch 2  position rotate  context_length 16  ms" in render_terminal(
        records, 120
    )


def test_models_take_their_steps_in_turn_and_each_turn_begins_with_another(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[str] = []
    step = transformer.Stepper.step

    def watched(stepper: transformer.Stepper) -> None:
        name = next(n for n, m in known.items() if m is stepper.model)
        taken.append(name)
        if name == "sdpa" and taken.count(name) == 4:
            raise ValueError
        step(stepper)

    known: dict[str, torch.nn.Module] = {}
    build = transformer.build

    def remembered(name: str, *rest: object) -> object:
        known[name], loss = build(name, *rest)  # type: ignore[arg-type]
        return known[name], loss

    monkeypatch.setattr(transformer, "build", remembered)
    monkeypatch.setattr(transformer.Stepper, "step", watched)
    records = run(CASE, modes=["train"], providers=["warploom", "sdpa", "torch"])
    ours, sdpa, plain = ["warploom"], ["sdpa"], ["torch"]
    assert taken == ours + sdpa + plain + ours * 2 + sdpa * 2 + plain * 2 + sdpa + plain * 2 + ours * 2
    assert {r.provider: (r.status, r.rounds) for r in records if r.provider != LIMIT} == {
        "warploom": ("ok", 4),
        "sdpa": ("error", None),
        "torch": ("ok", 4),
    }


def test_memory_that_runs_out_and_what_is_missing_are_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    build = transformer.build

    def build_or_fail(provider: str, *arguments: object) -> object:
        if provider == "torch":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has …")
        return build(provider, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(transformer, "build", build_or_fail)
    monkeypatch.setitem(sys.modules, "transformers", None)
    records = run(CASE, modes=["fwd"], providers=["torch", "llama", "warploom", "warploom+graphs"])
    found, reasons = {r.provider: r.status for r in records}, {r.provider: r.reason for r in records}
    graphs = "ok" if torch.cuda.is_available() else "unsupported"
    assert found == {
        "torch": "oom", "llama": "unsupported", "warploom": "ok", "warploom+graphs": graphs, LIMIT: "ok"
    }, reasons  # fmt: skip
    assert reasons["torch"] == "CUDA out of memory. Tried to allocate 2.00 GiB."
    assert reasons["llama"] == "transformers is not installed: pip install 'warploom[compare]'"


def test_steps_are_compared_with_the_fastest_way_to_run_each_model() -> None:
    def made(provider: str, ms: float, spread: float) -> Record:
        return Record(
            "transformer", "quick", CASE, provider, "train", "", "e", "r",
            ms=ms, ms_p20=ms - spread, ms_p80=ms + spread,
        )  # fmt: skip

    records = [made("warploom", 160.0, 1), made("warploom+compile", 118.5, 4.4), made("sdpa+compile", 119.5, 3.2)]
    (section,) = arrange([*records, made("torch", 200.0, 1), made("warploom_tpa", 90.0, 1)])
    (found,) = summarize(section)
    assert (found.alternatives, found.ratios, found.lost, found.level) == ("sdpa+compile", "1.01", 0, 1)


def test_a_step_is_stale_when_its_kernels_are_others() -> None:
    record = Record("transformer", "quick", {**CASE}, "warploom", "train", "", "e")
    assert not record.is_stale
    assert replace(record, fingerprint="other").is_stale


def test_transformers_llama_is_a_model_of_the_same_shape() -> None:
    pytest.importorskip("transformers")
    model, loss = transformer.build(transformer.LLAMA, CASE, CPU)
    assert (
        sum(p.numel() for p in model.parameters()) == TransformerLM(config_of(CASE, "warploom")).parameter_count()
    )
    tokens = torch.randint(100, (2, 16))
    assert loss(tokens, tokens).item() == pytest.approx(9.21, abs=0.1)  # ln 10 000: random weights know nothing


@pytest.mark.sample(5)
@pytest.mark.parametrize("provider", transformer.ATTENTIONS)
def test_the_loss_is_compiled_with_the_model(provider: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if provider == transformer.LLAMA:
        pytest.importorskip("transformers")
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, _: list[torch.Tensor]) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    compiler = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, mode, dynamic: compiler(function, backend=backend))
    torch.compiler.reset()
    tokens = torch.randint(100, (2, 16))
    found, expected = (
        transformer.build(provider + ending, CASE, CPU)[1](tokens, tokens) for ending in ("+compile", "")
    )
    torch.testing.assert_close(found, expected)
    (graph,) = graphs
    (results,) = (node.args[0] for node in graph.graph.nodes if node.op == "output")
    assert len(results) == 1  # the loss, and no logits


@pytest.mark.seldom(4, 8)
def test_a_profile_is_a_timeline_and_its_sums(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if seeds.day() % 4:  # else C++ is compiled too, which takes most of the time
        compiler = torch.compile
        monkeypatch.setattr(
            torch, "compile", lambda function, mode, dynamic: compiler(function, backend="aot_eager")
        )
    words = f"profile {TRIAL} --mode train --provider warploom,sdpa,warploom+compile --output out"
    assert main(shlex.split(words)) == 0
    out = capsys.readouterr().out
    lines = [line.split() for line in out.splitlines()]
    found = [tuple(line[:2]) for line in lines if line[:1] in (["forward"], ["backward"], ["optimizer"])]
    for phase in ("forward", "backward"):
        for part in ("attention", "mlp", "norm", "projections", "head", "other"):
            assert found.count((phase, part)) >= 2, "of the two models whose modules run one by one"
    assert [line[0] for line in lines if line[1:4] and line[-2:] == ["at", "most"]] == [
        "warploom:", "sdpa:", "warploom+compile:"
    ]  # fmt: skip
    assert "aten::addmm" in out or "aten::mm" in out
    assert max(map(len, out.splitlines())) <= 80
    assert out.split()[-3:] == [f"out/trace-{name}.json" for name in ("warploom", "sdpa", "warploom+compile")]
    events = json.loads(Path("out/trace-warploom.json").read_text())["traceEvents"]
    spans = [event["name"] for event in events if "dur" in event]
    assert {spans.count(name) for name in ("forward", "backward", "optimizer")} == {5}
    assert spans.count("mlp") == spans.count("attention") == 5 * 2  # one layer, a range in each direction


def event(kind: str, name: str, ts: float, dur: float, tid: int = 1, **arguments: object) -> dict[str, object]:
    return {"cat": kind, "name": name, "ts": ts, "dur": dur, "tid": tid, "args": arguments}


def ranges(*, thread: int) -> list[dict[str, object]]:
    """Two phases of a call; in the second one, parts on a thread, as autograd's on a GPU."""
    return [
        event("user_annotation", "p train", 0, 1000),
        event("user_annotation", "forward", 0, 400),
        event("user_annotation", "attention", 100, 200),
        event("user_annotation", "position", 150, 50),
        event("user_annotation", "backward", 500, 400),
        event("user_annotation", "attention", 600, 100, thread),
    ]


def summed(events: list[dict[str, object]]) -> traces.Trace:
    Path("trace.json").write_text(json.dumps({"traceEvents": events}))
    return traces.read_trace("p", Path("trace.json"), "p train")


def test_on_a_cpu_time_goes_to_the_innermost_part_and_operator() -> None:
    operators = [event("cpu_op", "aten::linear", 110, 30), event("cpu_op", "aten::mm", 112, 20)]
    memory = [
        {"name": "[memory]", "args": {"Bytes": size, "Device Type": 0}} for size in (3 << 20, 2 << 20, -(3 << 20))
    ]
    found = summed([*ranges(thread=1), *operators, *memory])
    ms = {("forward", "other"): 0.2, ("forward", "attention"): 0.15, ("forward", "position"): 0.05}
    ms |= {("backward", "other"): 0.3, ("backward", "attention"): 0.1}
    assert found.parts == pytest.approx(ms)
    assert found.kernels == {"aten::mm": (1, pytest.approx(0.02)), "aten::linear": (1, pytest.approx(0.01))}
    assert found.peak_mib == 5


def test_on_a_gpu_a_kernels_time_goes_to_the_part_that_launched_it() -> None:
    """Whenever it ran, and whichever thread and function of the driver launched it."""
    launches = [
        event("cuda_runtime", "cudaLaunchKernel", 160, 3, correlation=1),
        event("cuda_driver", "cuLaunchKernelEx", 650, 3, 2, correlation=2),
        event("cuda_runtime", "cudaMemsetAsync", 710, 3, 2, correlation=3),
    ]
    kernels = [
        event("kernel", "a", 700, 10, 7, correlation=1),
        event("kernel", "b", 2000, 30, 7, correlation=2),
        event("gpu_memset", "Memset (Device)", 2100, 5, 7, correlation=3),
    ]
    memory = [{"name": "[memory]", "args": {"Bytes": 1 << 20, "Device Type": kind}} for kind in (0, 0, 1)]
    found = summed([*ranges(thread=2), *launches, *kernels, *memory])
    ms = {("forward", "position"): 0.01, ("backward", "attention"): 0.03, ("backward", "other"): 0.005}
    assert found.parts == pytest.approx(ms)
    assert list(found.kernels) == ["b", "a", "Memset (Device)"]
    assert found.peak_mib == 1


def test_ranges_that_a_compiler_makes_are_no_parts() -> None:
    graph = event("user_annotation", "## Call CompiledFxGraph f1 ##", 100, 200)
    operator = event("cpu_op", "aten::mm", 112, 20)
    assert not summed([event("user_annotation", "p train", 0, 1000), graph, operator]).parts
    found = summed([*ranges(thread=1), graph, operator])
    assert not any("##" in part for _, part in found.parts)


@pytest.mark.parametrize(("attention", "position", "products"), [("flash", "cosine", 2), ("tpa", "rotate", 7)])
def test_parts_cover_both_directions_of_a_model(attention: str, position: str, products: int) -> None:
    config = TransformerConfig.size("sm", attention=attention, position=position, context_length=16)
    model = TransformerLM(config)
    calls: list[tuple[str, str]] = []
    tokens = torch.randint(100, (1, 8))
    parts.hook(model, lambda p: calls.append(("in", p)), lambda p: calls.append(("out", p)))
    loss = model(tokens, tokens).loss
    forward = list(calls)
    calls.clear()
    loss.backward()
    layers = SIZES["sm"]["layers"]
    once = {"embedding": 1, "norm": 2 * layers + 1, "projections": products * layers, "position": 2 * layers}
    once |= {"attention": layers, "mlp": layers, "head": 1}
    assert {part: forward.count(("in", part)) for part in once} == once
    assert {part: calls.count(("in", part)) for part in once} == {**once, "embedding": 0}
    for events in (forward, calls):
        depth: list[str] = []
        for kind, part in events:
            if kind == "in":
                depth.append(part)
            else:
                assert depth.pop() == part  # properly nested
        assert not depth


@pytest.mark.gpu
def test_on_a_gpu_memory_is_counted_and_recorded(capsys: pytest.CaptureFixture[str]) -> None:
    bench = replace(BENCH, suites={"quick": lambda device: [CASE | {"dtype": "bfloat16"}]})
    selection = Selection(modes=["train"], providers=["warploom", "warploom+graphs"])
    ours, graphs, _ = runner.run([bench], selection, torch.device("cuda"), Path("here")).records
    assert ours.peak_memory_mib > ours.details["held_memory_mib"] > ours.details["parameters"] * 4 / 2**20
    assert graphs.status == "ok"
    words = f"profile --spec {SPEC} --device cuda --suite trial --mode train --provider warploom --output out"
    assert main(shlex.split(words)) == 0
    out = capsys.readouterr().out
    assert "kernel" in out.split()
    for phase, part in (("forward", "mlp"), ("backward", "mlp"), ("backward", "attention")):
        (row,) = [line.split() for line in out.splitlines() if line.split()[:2] == [phase, part]]
        assert float(row[2]) > 0
    assert main([*shlex.split(words), "--kind", "memory"]) == 0
    assert "transformer_lm.py:" in capsys.readouterr().out
    assert Path("out/memory-warploom.pickle").stat().st_size > 0


@pytest.mark.seldom(3, 3)
def test_requests_are_served_for_a_limited_time(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    case = llama.TRIAL
    model = llama._model(case, CPU, torch.float32)
    tokens = llama.make_inputs(case, CPU, torch.Generator().manual_seed(0))["tokens"]
    prompts = llama._prompts(tokens)[::8]
    model.set_attn_implementation("sdpa")
    answers, ms = llama._serve(model, [prompts], 8)
    assert [len(answer) for answer in answers] == [8] * len(prompts)
    assert len(ms) == 1
    assert ms[0] > 0
    alone = [llama._decode(model, torch.tensor([prompt]), 8, False)[0].tolist() for prompt in prompts]
    assert answers == alone
    monkeypatch.setattr(llama, "SECONDS", 0.05)  # while the first batches are computed
    with pytest.raises(RuntimeError, match=r"\d of 4 requests were answered in \d+\.\d s, \d+ tokens a second"):
        llama._serve(model, [prompts], 300)
