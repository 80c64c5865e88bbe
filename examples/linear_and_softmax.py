"""Train one model with linear and with softmax attention on the same text: loss and tokens a second, by length.

    python examples/linear_and_softmax.py                              # 1k to 32k tokens on a GPU, fewer on a CPU
    python examples/linear_and_softmax.py --lengths 4096,16384 --steps 500 --size small
    python examples/linear_and_softmax.py --record lengths.jsonl --picture lengths.svg

Every step has as many tokens, in fewer sequences where these are longer. Models start from the same seed and see
the same text in the same order; other options are those of ``train_lm.py``. The loss is that on held-out text, in
nats per byte. The first steps, in which kernels are compiled, are not timed. A model is a line of the record, which
the picture is drawn from; the same command again trains only what is missing there.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
import train_lm
from loss_parity import COLOURS, drawing

ATTENTIONS = ("linear", "flash")
UNTIMED = 2  # steps
OUTPUT = "runs/linear_and_softmax"  # where nothing is written, so that every model is new


def main(words: list[str] | None = None) -> None:
    """Train every model, and print a line for each."""
    options = parse(words)
    found: list[dict[str, Any]] = []
    print(f"{'tokens':>8}  {'attention':9}  {'loss':>6}  {'tokens/s':>10}")
    for length in options.lengths:
        for attention in ATTENTIONS:
            entry = train_once(settings(options, length, attention), options.record)
            found.append(entry)
            print(f"{length:8}  {attention:9}  {entry['loss']:6.3f}  {entry['tokens_per_second']:10,}", flush=True)
    if options.picture:
        draw(found, options.picture)
        print(options.picture)


def train_once(run: argparse.Namespace, record: Path | None) -> dict[str, Any]:
    """Return a model's entry of the record; train it, and add the entry, if there is none."""
    device = torch.cuda.get_device_name(run.device) if run.device.startswith("cuda") else run.device
    key = train_lm.shaping(run) | {"device": device}
    for entry in reversed(read(record)):
        if entry.items() >= key.items():
            return entry
    loss, rate = train(run)
    entry = key | {"loss": round(loss, 4), "tokens_per_second": round(rate)}
    if record:
        with record.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")
    return entry


def read(record: Path | None) -> list[dict[str, Any]]:
    """Return the entries of a record, oldest first."""
    lines = record.read_text(encoding="utf-8").splitlines() if record and record.is_file() else []
    return [json.loads(line) for line in lines]


def draw(found: list[dict[str, Any]], picture: Path) -> None:
    """Tokens a second and loss against length."""
    with drawing(picture, (8, 3.6)) as figure:
        rate, loss = figure.subplots(1, 2)
        for colour, attention in zip(COLOURS, ATTENTIONS):
            entries = [entry for entry in found if entry["attention"] == attention]
            lengths = [entry["context_length"] for entry in entries]
            name = "softmax" if attention == "flash" else attention
            for axes, value in ((rate, "tokens_per_second"), (loss, "loss")):
                axes.plot(lengths, [entry[value] for entry in entries], "o-", color=colour, label=name)
        rate.set_ylabel("tokens a second")
        rate.set_ylim(bottom=0)
        loss.set_ylabel("loss (nats per byte)")
        for axes in (rate, loss):
            axes.set_xscale("log", base=2)
            axes.set_xlabel("tokens of a sequence")
        rate.legend(frameon=False)


def settings(options: argparse.Namespace, length: int, attention: str) -> argparse.Namespace:
    """Options of ``train_lm.py`` for sequences of one length."""
    shape = ["--size", options.size, "--context-length", str(length)]
    shape += ["--batch", str(max(options.tokens // length, 1)), "--steps", str(options.steps)]
    own = [*shape, "--attention", attention, "--device", options.device, "--output", OUTPUT]
    return train_lm.parse(["--warm-up", str(options.steps // 10), *options.training, *own])


def train(run: argparse.Namespace) -> tuple[float, float]:
    """Train a model; its loss on held-out text, and tokens a second."""
    torch.set_float32_matmul_precision("high")
    device = torch.device(run.device)
    text, held_out = train_lm.corpus(run.text, device)
    model, optimizer, _ = train_lm.prepare(run, device)
    since = 0.0
    for step in range(run.steps):
        if step == UNTIMED:
            since = time.perf_counter()
        loss = train_lm.training_step(model, optimizer, text, step, run)
        if step in (UNTIMED - 1, run.steps - 1):
            loss.item()  # waits for the device
    tokens = (run.steps - UNTIMED) * run.batch * model.config.context_length
    rate = tokens / (time.perf_counter() - since)
    return train_lm.evaluate(model, held_out, run), rate


def parse(words: list[str] | None) -> argparse.Namespace:
    """The command line: our own options, and those of ``train_lm.py`` that shape a run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--lengths", type=lambda text: [int(length) for length in text.split(",")], metavar="N,…",
        help="tokens of a sequence (default: 128,512, on a GPU 1024,4096,16384,32768)",
    )  # fmt: skip
    parser.add_argument("--tokens", type=int, help="of a step (default: 1024, on a GPU 65536)")
    parser.add_argument("--steps", type=int, help=f"default: 16, on a GPU 500; more than {UNTIMED}")
    parser.add_argument("--size", choices=tuple(train_lm.SIZES), help="default: tiny, on a GPU small")
    parser.add_argument("--record", type=Path, metavar="FILE", help="a line of JSON for each model")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draw them as SVG; needs matplotlib")
    options, options.training = parser.parse_known_args(words)
    gpu = options.device.startswith("cuda")
    options.lengths = options.lengths or ([1024, 4096, 16384, 32768] if gpu else [128, 512])
    options.tokens = options.tokens or (65536 if gpu else 1024)
    options.steps = options.steps or (500 if gpu else 16)
    options.size = options.size or ("small" if gpu else "tiny")
    if options.steps <= UNTIMED:
        parser.error(f"--steps: more than {UNTIMED}")
    return options


if __name__ == "__main__":
    main()
