"""The examples run as they are; an interrupted training run ends with the numbers of an uninterrupted one."""

import json
import math
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("safetensors")
pytest.importorskip("rich")

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
WITH_HELP = ("train_lm", "generate", "serve", "loss_parity", "linear_and_softmax", "attentions")
QUICK = "--device cpu --steps 6 --warm-up 2 --batch 2 --log-every 2 --eval-every 2 --eval-batches 1 --save-every 2"


@pytest.fixture(autouse=True)
def _examples(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.chdir(tmp_path)
    # Always the same text, and easy to learn, so that no loss hangs on what a guide says today.
    functions = (f"import m{i % 7}\n\ndef f{i % 11}(x):\n    return x + {i}\n" for i in range(10**4))
    Path("text.py").write_text("".join(functions))
    precision = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(precision)


def train(*words: str) -> None:
    import train_lm

    train_lm.main([*QUICK.split(), "--text", "text.py", *words])


def entries(folder: str) -> list[dict]:
    lines = [json.loads(line) for line in Path(folder, "log.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name != "tokens_per_s"} for line in lines]


def weights(folder: str) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(Path(folder, "step-00000006", "model.safetensors"))


def test_an_interrupted_run_ends_as_an_uninterrupted_one() -> None:
    train("--output", "whole")
    train("--output", "parts", "--stop", "3")
    assert [line["step"] for line in entries("parts")] == [2, 3]
    # As if it had been killed at step 5, after the log's line and before the checkpoint was complete.
    with Path("parts/log.jsonl").open("a") as file:
        file.write('{"step": 4, "loss": 0.0}\n{"step": 5, "loss": 0.0}\n')
    Path("parts/step-00000005.partial").mkdir()
    train("--output", "parts")
    expected = entries("whole")
    assert [line["step"] for line in expected] == [2, 4, 6]
    assert [line for line in entries("parts") if line["step"] != 3] == expected
    for (name, one), other in zip(weights("whole").items(), weights("parts").values(), strict=True):
        assert torch.equal(one, other), name
    assert sorted(p.name for p in Path("whole").glob("step-*")) == ["step-00000004", "step-00000006"]


@pytest.mark.parametrize("wrong", ["package", "file", "space"])
def test_what_is_wrong_with_checkpoints_shows_before_training(
    wrong: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import train_lm

    monkeypatch.setattr(train_lm, "training_step", lambda *_: pytest.fail("a step was made"))
    text = {"package": "numpy", "file": "run", "space": r"3 checkpoints need 3. MiB; 1 MiB are free"}[wrong]
    if wrong == "package":
        monkeypatch.setitem(sys.modules, "numpy", None)
    elif wrong == "file":
        Path("run").touch()
    else:
        monkeypatch.setattr(train_lm.shutil, "disk_usage", lambda _: SimpleNamespace(free=2**20))
    with pytest.raises(SystemExit, match=rf"^run: .*{text}"):
        train("--output", "run")
    assert not Path("run").is_dir() or not list(Path("run").iterdir())


def test_another_run_is_not_gone_on_with() -> None:
    train("--output", "run", "--stop", "1")
    with pytest.raises(SystemExit, match=r"was made with --lr 0.001; give the same"):
        train("--output", "run", "--lr", "0.01")


def test_a_context_of_any_length() -> None:
    from warploom.nn import TransformerLM

    train("--output", "run", "--stop", "2", "--context-length", "40")
    model = TransformerLM.load(Path("run/step-00000002/model.safetensors"))
    assert model.config.context_length == 40
    with pytest.raises(SystemExit, match=r"was made with --context-length 40; give the same"):
        train("--output", "run", "--context-length", "48")


@pytest.mark.seldom(3, 5)
def test_the_loss_falls_and_the_model_writes(capsys: pytest.CaptureFixture[str]) -> None:
    import generate
    import train_lm

    words = "--device cpu --size tiny --steps 50 --warm-up 3 --batch 4 --log-every 10 --eval-batches 2 --lr 2e-3"
    train_lm.main([*words.split(), "--text", "text.py", "--output", "run"])
    found = entries("run")
    assert found[-1]["held_out_loss"] < math.log(256) - 2
    written = []
    for seed in ("1", "1", "2"):
        generate.main(
            ["--device", "cpu", "--output", "run", "--prompt", "import ", "--tokens", "40", "--seed", seed]
        )
        written.append(capsys.readouterr().out.rpartition("\n\n")[0])
    assert written[0].startswith("import ")
    assert written[0] == written[1] != written[2]


def test_nothing_to_sample_from_is_said() -> None:
    import generate

    with pytest.raises(SystemExit, match="nowhere: no checkpoint here"):
        generate.main(["--output", "nowhere"])


def test_the_standard_library_is_text_split_by_file() -> None:
    import train_lm

    train_text, held_out = train_lm.corpus(None, torch.device("cpu"))
    assert len(train_text) > 8 * len(held_out) > 2**20
    assert b"def " in bytes(held_out[:100_000].tolist())


def test_the_rate_warms_up_and_falls_to_a_tenth() -> None:
    import train_lm

    options = train_lm.parse(["--device", "cpu", "--steps", "100", "--warm-up", "10", "--lr", "1"])
    rates = [train_lm.rate(step, options) for step in range(101)]
    assert rates[:3] == pytest.approx([0.1, 0.2, 0.3])
    assert rates[10] == max(rates) == 1
    assert rates[55] == pytest.approx(0.55)
    assert rates[100] == pytest.approx(0.1)


@pytest.mark.sample(6)
@pytest.mark.parametrize(
    "name", ["train_lm.py", "generate.py", "serve.py", "loss_parity.py", "linear_and_softmax.py", "attentions.py"]
)
def test_help(name: str) -> None:
    command = [sys.executable, str(EXAMPLES / name), "--help"]
    environment = {"PYTHONPATH": str(ROOT / "src"), "PATH": ""}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.startswith("usage: " + name)


@pytest.mark.parametrize(("pages", "position"), [(64, "rotate"), (12, "cosine")])
def test_a_server_answers_as_generate_does(pages: int, position: str) -> None:
    """Prompts, chunks and single tokens in one call; few pages make requests wait, and prefixes share pages."""
    import serve

    from warploom.nn import TransformerConfig, TransformerLM

    sizes = {"vocab_size": 64, "context_length": 40, "d_model": 32, "d_ff": 64, "layers": 2, "heads": 4}
    torch.manual_seed(0)
    model = TransformerLM(TransformerConfig(**sizes, kv_heads=2, position=position)).eval()
    for parameter in model.parameters():  # the first weights are small, and give the same token always
        torch.nn.init.normal_(parameter, std=0.3 if parameter.dim() > 1 else 1.0)
    server = serve.Server(model, pages, page_size=4, batch=12)
    prompts = [torch.randint(64, (n,)).tolist() for n in (5, 1, 17, 9, 30, 3)]
    prompts += [[*prompts[2][:13], 7], prompts[4]]
    requests = [server.submit(prompt, 3 + i) for i, prompt in enumerate(prompts)]
    while server.step():
        assert sum(server.table.lengths.values()) > 0
    for i, (prompt, request) in enumerate(zip(prompts, requests)):
        wanted = model.generate(torch.tensor([prompt]), 3 + i, temperature=0)
        assert request.answer == wanted[0].tolist(), i
    assert server.shared >= (12 + 28 if pages > 12 else 0)
    for request in server.answered:
        server.table.remove(request.name)
    assert server.table.free_pages == pages
    with pytest.raises(ValueError, match="longer than the model's context"):
        server.submit([0] * 40, 2)


def test_a_trained_model_serves(capsys: pytest.CaptureFixture[str]) -> None:
    import serve

    train("--output", "run")
    serve.main(["--output", "run", "--device", "cpu", "--tokens", "4", "--prompts", "def ", "import os"])
    assert "[2 requests, 8 bytes in " in capsys.readouterr().out


@pytest.mark.seldom(3, 4)
def test_loss_curves_of_two_attentions(capsys: pytest.CaptureFixture[str]) -> None:
    import loss_parity

    pytest.importorskip("matplotlib")
    words = "--device cpu --batch 1 --steps 21 --attention plain,flash --output out --picture out/curves.svg"
    loss_parity.main([*words.split(), "--text", "text.py"])
    first = capsys.readouterr().out
    plain, flash = (json.loads(line) for line in Path("out/losses.jsonl").read_text().splitlines())
    assert (plain["attention"], flash["attention"]) == ("plain", "flash")
    assert len(plain["losses"]) == 21
    assert plain["losses"][0] > plain["losses"][-1]
    assert plain["losses"] == pytest.approx(flash["losses"], abs=0.01)
    assert "flash from plain: 0.00" in first
    assert Path("out/curves.svg").read_text().startswith("<?xml")
    loss_parity.main([*words.split(), "--text", "text.py"])  # drawn again from the record
    assert capsys.readouterr().out == first
    assert len(Path("out/losses.jsonl").read_text().splitlines()) == 2


@pytest.mark.seldom(3, 3)
def test_linear_and_softmax_attention_by_length(capsys: pytest.CaptureFixture[str]) -> None:
    import linear_and_softmax

    pytest.importorskip("matplotlib")
    words = "--device cpu --text text.py --eval-batches 1 --warm-up 2 --lr 2e-3 --lengths 32,80 --tokens 160"
    words += " --steps 12 --record models.jsonl --picture models.svg"
    linear_and_softmax.main(words.split())
    first = capsys.readouterr().out
    _, *lines, _ = (line.split() for line in first.splitlines())
    assert [line[:2] for line in lines] == [[n, name] for n in ("32", "80") for name in ("linear", "flash")]
    for _, _, loss, rate in lines:
        assert float(loss) < math.log(256) - 1
        assert float(rate.replace(",", "")) > 0
    assert Path("models.svg").read_text().startswith("<?xml")
    linear_and_softmax.main(words.split())  # from the record, which has their speeds
    assert capsys.readouterr().out == first
    with pytest.raises(SystemExit):
        linear_and_softmax.main(["--steps", "2"])


def test_attentions_of_one_model(capsys: pytest.CaptureFixture[str]) -> None:
    import attentions

    pytest.importorskip("matplotlib")
    words = "--device cpu --text text.py --eval-batches 1 --warm-up 2 --lr 2e-3 --context-length 32 --batch 4"
    words += " --steps 6 --attentions flash,delta+flash --seeds 0,1 --record models.jsonl --picture models.svg"
    attentions.main(words.split())
    first = capsys.readouterr().out
    rows = first.splitlines()
    assert [row.split("  ")[0] for row in rows[:2]] == ["softmax", "1 delta rule + 1 softmax"]
    entries = [json.loads(line) for line in Path("models.jsonl").read_text().splitlines()]
    assert [(e["seed"], e["attention"]) for e in entries] == [
        (seed, name) for seed in (0, 1) for name in ("flash", "delta,flash")
    ]
    assert all(e["loss"] < math.log(256) and e["tokens_per_second"] > 0 for e in entries)
    assert Path("models.svg").read_text().startswith("<?xml")
    for more in ([], ["--draw"]):  # from the record
        attentions.main([*words.split(), *more])
        assert capsys.readouterr().out == first
    assert len(Path("models.jsonl").read_text().splitlines()) == 4
    for wrong in (["--steps", "2"], ["--draw"]):
        with pytest.raises(SystemExit):
            attentions.main(wrong)


@pytest.mark.gpu
def test_flash_attention_trains_as_plain_attention_does() -> None:
    import loss_parity

    loss_parity.main(["--output", "out", "--steps", "60"])
    lines = [json.loads(line) for line in Path("out/losses.jsonl").read_text().splitlines()]
    curves = {line["attention"]: loss_parity.smooth(line["losses"]) for line in lines}
    apart = {name: max(abs(a - b) for a, b in zip(curves[name], curves["plain"])) for name in ("sdpa", "flash")}
    assert curves["flash"][-1] < curves["flash"][0] - 1
    assert apart["flash"] < 0.02 + 3 * apart["sdpa"]  # nats; rounding alone drives plain and sdpa as far apart
