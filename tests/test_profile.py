"""`warploom profile`: what it measures, records and prints, on models small enough for a CPU."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from warploom.bench import limits
from warploom.bench.records import load_environments
from warploom.cli import main
from warploom.nn import TransformerConfig, TransformerLM, transformer_lm
from warploom.profile import models, parts, transformer
from warploom.profile.records import PROFILES, ProfileRecord, phase

SIZES = {
    "sm": {"d_model": 32, "d_ff": 64, "layers": 2, "heads": 2},
    "md": {"d_model": 48, "d_ff": 64, "layers": 1, "heads": 2},
}
TINY = ["--device", "cpu", "--batch", "2", "--context-length", "16", "--warm-up", "1", "--steps", "3"]
FLOPS_PER_MS = 1e8


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    for name, size in SIZES.items():
        monkeypatch.setitem(transformer_lm.SIZES, name, size)
    monkeypatch.setitem(limits._rates, torch.device("cpu"), FLOPS_PER_MS)


def read(folder: str) -> list[ProfileRecord]:
    return [ProfileRecord(**json.loads(line)) for line in Path(folder, PROFILES).read_text().splitlines()]


def test_every_configuration_and_mode_is_a_record_and_a_row(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["profile", "transformer", "--size", "sm,md", "--attention", "flash,tpa", *TINY, "-o", "out"]
    assert main(words) == 0
    out, err = capsys.readouterr()
    records = read("out")
    modes = ("forward", "forward-backward", "train")
    keys = [(r.case["size"], r.provider, r.mode) for r in records]
    assert keys == [(s, a, m) for s in ("sm", "md") for a in ("flash", "tpa") for m in modes]
    assert set(load_environments(Path("out"))) == {r.environment for r in records}
    for record in records:
        assert record.status == "ok"
        assert (record.steps, record.case["dtype"], record.case["batch"]) == (3, "float32", 2)
        expected = ["forward", "backward", "optimizer"][: 1 + modes.index(record.mode)]
        assert list(record.phases) == [*expected, "step"]
        means = {name: values["mean_ms"] for name, values in record.phases.items()}
        assert means["step"] == pytest.approx(sum(means[name] for name in expected))
        assert record.phases["step"]["total_ms"] == pytest.approx(3 * means["step"])
        assert record.tokens_per_s == pytest.approx(2 * 16 / means["step"] * 1e3)
        config = TransformerConfig.size(record.case["size"], context_length=16, attention=record.provider)
        model = TransformerLM(config)
        assert record.parameters == model.parameter_count()
        assert record.flops == 32 * model.flops_per_token(16, training=record.mode != "forward")
        assert record.mfu == pytest.approx(record.flops / means["step"] / FLOPS_PER_MS)
        assert list(record.parts_ms) == expected[:2]
        assert record.peak_memory_mib is None
    lines = out.splitlines()
    assert lines[0] == "transformer  batch 2  16 tokens  float32  position rotate"
    assert (
        sum(line.split()[:3] == ["md", "forward-backward", "tpa"] for line in lines) == 3
    )  # steps, and two phases
    assert "published, GPU not stated: sm fwd_bwd 0.0645 s a step" in out
    assert Path("out/transformer.md").read_text().startswith("**transformer")
    assert "[12/12] md 16 tpa train: " in err


def test_several_context_lengths_are_a_table_each(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["profile", "transformer", "--mode", "train", *TINY, "--context-length", "8,16", "--no-parts"]
    assert main([*words, "--chrome-trace", "step.json", "-o", "out"]) == 0
    out = capsys.readouterr().out
    assert [line for line in out.splitlines() if line.startswith("transformer")] == [
        f"transformer  batch 2  {n} tokens  float32  position rotate" for n in (8, 16)
    ]
    assert [(r.case["context_length"], r.flops) for r in read("out")] == [
        (n, models.flops_per_step(TransformerConfig.size("sm", context_length=n), 2 * n, backward=True))
        for n in (8, 16)
    ]
    assert all(Path(f"step.sm-{n}-flash-train.json").is_file() for n in (8, 16))


def test_models_take_their_steps_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[str] = []
    step = transformer.Stepper.step

    def watched(stepper: transformer.Stepper) -> None:
        name = f"{stepper.unit.size} {stepper.unit.provider}"
        taken.append(name)
        if name == "md plain" and taken.count(name) == 3:
            raise ValueError
        step(stepper)

    monkeypatch.setattr(transformer.Stepper, "step", watched)
    words = ["profile", "transformer", "--size", "sm,md", "--mode", "train", "--attention", "flash,plain", *TINY]
    assert main([*words, "--steps", "7", "--in-turn", "--no-parts", "-o", "out"]) == 1
    flash, plain = ["sm flash"], ["sm plain"]
    assert taken[:16] == flash + plain + flash * 5 + plain * 5 + flash * 2 + plain * 2
    flash, plain = ["md flash"], ["md plain"]
    assert taken[16:] == flash + plain + flash * 5 + plain * 2 + flash * 2
    assert [(r.case["size"], r.provider, r.status, r.steps) for r in read("out")] == [
        ("sm", "flash", "ok", 7),
        ("sm", "plain", "ok", 7),
        ("md", "flash", "ok", 7),
        ("md", "plain", "error", None),
    ]


def test_memory_that_runs_out_is_a_row(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    build = models.build

    def build_or_fail(provider: str, *arguments: object) -> object:
        if provider == "plain":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has …")
        return build(provider, *arguments)

    monkeypatch.setattr(models, "build", build_or_fail)
    monkeypatch.setitem(sys.modules, "transformers", None)
    words = ["profile", "transformer", "--mode", "forward", "--attention", "plain,llama,flash", *TINY, "-o", "out"]
    assert main(words) == 0
    out = capsys.readouterr().out
    assert [record.status for record in read("out")] == ["oom", "unsupported", "ok"]
    assert out.count("OOM") == 10
    assert "plain: oom: CUDA out of memory. Tried to allocate 2.00 GiB." in out
    assert "llama: unsupported: transformers is not installed: pip install 'warploom[compare]'" in out


def test_an_error_is_a_row_and_the_exit_status(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models, "build", lambda *_: 1 / 0)
    assert main(["profile", "transformer", "--mode", "forward", *TINY]) == 1
    assert "flash: error: ZeroDivisionError" in capsys.readouterr().out
    assert read("runs/cpu-profile-transformer")[0].reason == "ZeroDivisionError: division by zero"


def test_transformers_llama_is_a_model_of_the_same_shape() -> None:
    pytest.importorskip("transformers")
    config = TransformerConfig.size("sm", context_length=16)
    model, loss = models.build(models.LLAMA, config, torch.device("cpu"), "")
    assert sum(p.numel() for p in model.parameters()) == TransformerLM(config).parameter_count()
    tokens = torch.randint(100, (2, 16))
    assert loss(tokens, tokens).item() == pytest.approx(9.21, abs=0.1)  # ln 10 000: random weights know nothing


@pytest.mark.parametrize("provider", models.PROVIDERS)
def test_the_loss_is_compiled_with_the_model(provider: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if provider == models.LLAMA:
        pytest.importorskip("transformers")
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, _: list[torch.Tensor]) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    compiler = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, mode: compiler(function, backend=backend))
    torch.compiler.reset()
    attention = "flash" if provider == models.LLAMA else provider
    config = TransformerConfig(100, 8, d_model=16, d_ff=16, layers=2, heads=2, attention=attention)
    tokens = torch.randint(100, (2, 8))
    found, expected = (
        models.build(provider, config, torch.device("cpu"), ending)[1](tokens, tokens)
        for ending in ("+compile", "")
    )
    torch.testing.assert_close(found, expected)
    (graph,) = graphs
    (results,) = (node.args[0] for node in graph.graph.nodes if node.op == "output")
    assert len(results) == 1  # the loss, and no logits


@pytest.mark.parametrize("mode", ["forward", "train"])
def test_the_trace_names_phases_and_parts(mode: str) -> None:
    words = [
        "profile",
        "transformer",
        "--mode",
        mode,
        "--attention",
        "flash,sdpa",
        *TINY,
        "--no-parts",
        "-o",
        "out",
    ]
    assert main([*words, "--chrome-trace", "traces/step.json"]) == 0
    for attention in ("flash", "sdpa"):
        events = json.loads(Path(f"traces/step.sm-{attention}-{mode}.json").read_text())["traceEvents"]
        spans = {}
        for event in events:
            if "dur" in event:
                spans.setdefault(event["name"], []).append(event)
        assert len(spans["forward"]) == 2
        assert ("optimizer" in spans) == (mode == "train")
        blocks = 2 * SIZES["sm"]["layers"] * (2 if mode == "train" else 1)  # a range in each direction
        assert len(spans["mlp"]) == len(spans["attention"]) == blocks
    assert all(record.parts_ms == {} for record in read("out"))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("transformer --size xs", "--size xs: there are sm, md, lg, xl, 2.7B"),
        ("transformer --mode backward", "--mode backward: there are forward, forward-backward, train"),
        ("transformer --compile all", "--compile all: there are no, yes, graphs"),
        ("transformer --attention quick", "--attention quick: there are flash, "),
        ("transformer --memory-snapshot x", "--memory-snapshot: only a GPU's allocations are recorded"),
        (
            "transformer --attention flash,llama --position none",
            "profile: position must be rotate for llama; got 'none'",
        ),
        ("transformer --attention flash,tpa --position none", "TransformerConfig: position must be 'rotate' with"),
        ("attention --attention llama", "--attention llama: there are plain, plain+compile, flash, sdpa"),
    ],
)
def test_mistakes_are_one_line(words: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", *words.split(), "--device", "cpu"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"warploom: {message}")
    assert len(err.splitlines()) == 1


def test_the_attention_grid(capsys: pytest.CaptureFixture[str]) -> None:
    words = "profile attention --device cpu --head-dim 16,8 --seq-len 256,32 --batch 1 --passes 2 --causal -o out"
    assert main([*words.split(), "--attention", "plain,flash,sdpa"]) == 0
    out = capsys.readouterr().out
    records = read("out")
    cases = [(r.case["head_dim"], r.case["n"], r.provider) for r in records]
    assert cases == [(d, n, p) for d in (16, 8) for n in (256, 32) for p in ("plain", "flash", "sdpa")]
    for record in records:
        assert record.status == "ok"
        assert list(record.phases) == ["forward", "backward", "step"]
        assert all(values["mean_ms"] > 0 for values in record.phases.values())
    lines = out.splitlines()
    assert lines[0] == "attention  forward (ms)  batch 1  no heads  float32  causal"
    assert lines[1].split() == ["head_dim", "seq_len", "plain", "flash", "sdpa", "published"]
    assert [line.split()[-1] for line in lines if line.split()[:2] == ["16", "256"]] == ["0.12", "0.9"]
    assert "held" not in out  # nobody counts a CPU's memory


@pytest.mark.parametrize("causal", [False, True])
def test_the_grids_attentions_agree(causal: bool) -> None:
    from warploom.profile.attention import PROVIDERS

    q, k, v = (torch.randn(2, 9, 8, dtype=torch.float64) for _ in range(3))
    scores = torch.einsum("bnd,bmd->bnm", q, k) / 8**0.5
    if causal:
        scores = scores.masked_fill(torch.ones(9, 9).triu(1).bool(), -torch.inf)
    expected = torch.einsum("bnm,bmd->bnd", scores.softmax(-1), v)
    for name in ("plain", "flash", "sdpa"):
        torch.testing.assert_close(PROVIDERS[name](causal)(q, k, v), expected, msg=name)


def test_time_goes_to_the_innermost_part(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 7.0
    monkeypatch.setattr(parts, "time", SimpleNamespace(perf_counter=lambda: now))
    timeline = parts.Timeline(torch.device("cpu"))
    timeline.begin()
    for part, seconds in (("attention", 0.02), ("position", 0.04)):
        timeline.enter(part)
        now += seconds
    timeline.leave("position")
    now += 0.001
    timeline.leave("attention")
    now += 0.01
    found = timeline.end()
    assert list(found) == list(parts.PARTS)
    assert found == pytest.approx({**dict.fromkeys(parts.PARTS, 0.0), "attention": 21, "position": 40, "other": 10})


@pytest.mark.parametrize(("attention", "position", "products"), [("flash", "cosine", 2), ("tpa", "rotate", 7)])
def test_parts_cover_both_directions_of_a_model(attention: str, position: str, products: int) -> None:
    config = TransformerConfig.size("sm", attention=attention, position=position, context_length=16)
    model = TransformerLM(config)
    calls: list[tuple[str, str]] = []
    tokens = torch.randint(100, (1, 8))
    with parts.hooked(model, lambda p: calls.append(("in", p)), lambda p: calls.append(("out", p))):
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
    model(tokens, tokens)
    assert not [call for call in calls if call == ("in", "embedding")]  # the hooks are gone


def test_a_phase_is_mean_deviation_and_sum() -> None:
    found = phase([1.0, 2.0, 6.0])
    assert (found.mean_ms, found.total_ms) == (3.0, 9.0)
    assert found.std_ms == pytest.approx(7**0.5)
    assert phase([2.0]).std_ms == 0


@pytest.mark.gpu
def test_on_a_gpu_memory_is_counted_and_recorded() -> None:
    words = "profile transformer --device cuda --mode train --batch 2 --context-length 64 --steps 2 -o out"
    assert main([*words.split(), "--memory-snapshot", "memory.pickle", "--chrome-trace", "trace.json"]) == 0
    (record,) = read("out")
    assert record.case["dtype"] == "bfloat16"
    assert record.peak_memory_mib > record.held_memory_mib > record.parameters * 4 / 2**20
    assert Path("memory.pickle").stat().st_size > 0
    assert all(sum(split.values()) > 0 for split in record.parts_ms.values())
    words = "profile attention --device cuda --quick --passes 2 --attention plain,flash -o grid"
    assert main(words.split()) == 0
    held = {(r.case["head_dim"], r.case["n"], r.provider): r.held_memory_mib for r in read("grid")}
    assert held[64, 1024, "plain"] > held[64, 1024, "flash"] + 8 * 1024**2 * 4 / 2**20 - 1
