"""Train a byte-level Transformer LM on real text: the source of Python's standard library, or a text of your own.

    python examples/train_lm.py                         # a tiny model on a CPU, a small one on a GPU
    python examples/train_lm.py --text my_corpus.txt --output runs/mine
    torchrun --nproc-per-node 4 examples/train_lm.py --cp 2 --tp 2    # on several GPUs, see several_gpus.py

The same command again goes on from the last checkpoint. Step ``t`` draws its batch from a generator seeded with
the seed and ``t``, and there is no dropout: the weights, the optimizer's state and ``t`` are all that a checkpoint
needs for an interrupted run to end with the very numbers of an uninterrupted one.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import shutil
import sys
import sysconfig
import tempfile
import time
import zlib
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from several_gpus import Ranks

from warploom.errors import WarploomError
from warploom.nn import TransformerConfig, TransformerLM

BYTES = 256
SIZES = {
    "tiny": {"d_model": 128, "d_ff": 384, "layers": 4, "heads": 4, "context_length": 128},
    "small": {"d_model": 512, "d_ff": 1536, "layers": 8, "heads": 8, "context_length": 1024},
}
BATCH = {"tiny": 16}  # sequences; 32 for every other size
SUFFIXES = (".py", ".txt", ".md", ".rst")  # of files in a folder of text
KEPT = 2  # checkpoints
ALONE = Ranks()  # one process
LOG = "log.jsonl"


def main(words: list[str] | None = None) -> None:
    """Read the command line, train, and leave checkpoints and a log behind."""
    options = parse(words)
    if "WORLD_SIZE" not in os.environ:
        train(options)
        return
    with Ranks.started(options.device, options.cp, options.tp, options.output) as ranks:
        train(options, ranks)


def train(options: argparse.Namespace, ranks: Ranks = ALONE) -> None:
    """Train on the ranks, or on one GPU or CPU."""
    torch.set_float32_matmul_precision("high")
    device = ranks.device or torch.device(options.device)
    train_text, held_out = corpus(options.text, device)
    model, optimizer, start = prepare(options, device, ranks)
    called = torch.compile(model) if options.compile else model
    if ranks.is_first:
        check_files(model, options.output)
        forget(options.output, start)
    console = Console(stderr=True, quiet=not ranks.is_first)
    console.print(
        f"{model.parameter_count() / 1e6:.2f} M parameters, {len(train_text) / 1e6:.1f} MB to train on, "
        f"{len(held_out) / 1e6:.1f} MB held out, {device}" + (f", from step {start}" if start else "")
    )
    end = min(options.steps, options.stop or options.steps)
    columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, disable=not ranks.is_first) as bar:
        task = bar.add_task("", total=end, completed=start)
        since, since_step = time.perf_counter(), start
        for step in range(start, end):
            loss = training_step(called, optimizer, train_text, step, options, ranks)
            done = step + 1
            bar.update(task, completed=done)
            if done == end or done % options.log_every == 0:
                entry = {"step": done, "loss": loss.item(), "lr": rate(step, options)}  # waits for the device
                tokens = (done - since_step) * options.batch * model.config.context_length
                entry["tokens_per_s"] = tokens / (time.perf_counter() - since)
                if done == end or done % options.eval_every == 0:
                    entry["held_out_loss"] = evaluate(called, held_out, options, ranks)
                if ranks.is_first:
                    log(options.output, entry)
                console.print(*(f"{name} {value:,.4g}" for name, value in entry.items()), sep="  ", highlight=False)
                since, since_step = time.perf_counter(), done
            if done == end or done % options.save_every == 0:
                save(model, optimizer, done, options, ranks)
    if start >= end:
        console.print(f"{options.output} is at step {start} already")


# ----------------------------------------------------------------------------------------------------------
# Data
# ----------------------------------------------------------------------------------------------------------


def corpus(path: Path | None, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Text to train on and held-out text, as bytes (uint8) on the device.

    A folder is split by file, one in sixteen held out by a checksum of its name; a single file loses its last 5 %.
    """
    if path is not None and path.is_file():
        whole = path.read_bytes()
        border = len(whole) * 95 // 100
        parts = [whole[:border], whole[border:]]
    else:
        folder = Path(sysconfig.get_path("stdlib")) if path is None else path
        files: tuple[list[bytes], list[bytes]] = ([], [])
        for file in sorted(folder.rglob("*")):
            name = file.relative_to(folder).as_posix()
            if file.suffix in SUFFIXES and "-packages/" not in name:  # those that are installed differ by machine
                files[zlib.crc32(name.encode()) % 16 == 0].append(file.read_bytes())
        parts = [b"\n".join(contents) for contents in files]
    if min(map(len, parts)) < 2**14:
        sys.exit(f"{path}: too little text to train on and hold out from")
    train, held_out = (torch.frombuffer(bytearray(part), dtype=torch.uint8) for part in parts)
    return train.to(device), held_out.to(device)


def batch(text: torch.Tensor, count: int, length: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random windows of a text: tokens and targets, (count, length) each."""
    generator = torch.Generator().manual_seed(seed)
    start = torch.randint(len(text) - length, (count, 1), generator=generator)
    window = text[start.to(text.device) + torch.arange(length + 1, device=text.device)].long()
    return window[:, :-1], window[:, 1:]


# ----------------------------------------------------------------------------------------------------------
# Training
# ----------------------------------------------------------------------------------------------------------


def prepare(
    options: argparse.Namespace, device: torch.device, ranks: Ranks = ALONE
) -> tuple[TransformerLM, torch.optim.AdamW, int]:
    """The model, its optimizer and the step to begin with: from the last checkpoint, or new."""
    checkpoint = last_checkpoint(options.output)
    if checkpoint is not None and (checkpoint / "model.safetensors").is_file() == ranks.several:
        made = "by one process" if ranks.several else "under torchrun"
        sys.exit(f"{checkpoint} was made {made}; go on as it was made")
    if checkpoint is not None and not ranks.several:
        model = TransformerLM.load(checkpoint / "model.safetensors", device=device)
    else:
        torch.manual_seed(options.seed)
        names = tuple(options.attention.split(","))
        chosen = {
            "attention": names if len(names) > 1 else names[0],
            "position": options.position,
            "vocab_size": BYTES,
        }
        if options.context_length:
            chosen["context_length"] = options.context_length
        try:
            if options.size in SIZES:
                config = TransformerConfig(**{**SIZES[options.size], **chosen})
            else:
                config = TransformerConfig.size(options.size, **chosen)
        except WarploomError as error:
            sys.exit(str(error))
        model = TransformerLM(config).to(device)
    ranks.shard(model)
    # Matrices decay; the gains of norms do not.
    groups = [
        {"params": [p for p in same if (p.dim() >= 2) == decays], "weight_decay": options.weight_decay * decays}
        for same in ranks.sharded_alike(model)
        for decays in (True, False)
    ]
    groups = [group for group in groups if group["params"]]
    optimizer = torch.optim.AdamW(groups, lr=options.lr, betas=(0.9, 0.95), fused=device.type == "cuda")
    if checkpoint is None:
        return model, optimizer, 0
    if ranks.several:
        state = ranks.load(checkpoint, model, optimizer)
    else:
        state = torch.load(checkpoint / "state.pt", map_location=device, weights_only=True)
    made_with, wanted = state["options"], shaping(options)
    if made_with != wanted:
        names = [name for name in wanted if made_with.get(name) != wanted[name]]
        told = ", ".join(f"--{name.replace('_', '-')} {made_with.get(name)}" for name in names)
        sys.exit(f"{checkpoint} was made with {told}; give the same, or another --output")
    if not ranks.several:
        optimizer.load_state_dict(state["optimizer"])
    return model, optimizer, state["step"]


def training_step(
    model: TransformerLM,
    optimizer: torch.optim.Optimizer,
    text: torch.Tensor,
    step: int,
    options: argparse.Namespace,
    ranks: Ranks = ALONE,
) -> torch.Tensor:
    """One step of AdamW; its loss over all ranks, which stays on the device."""
    length = model.config.context_length
    for group in optimizer.param_groups:
        group["lr"] = rate(step, options)
    tokens, targets = batch(text, options.batch, length, seed=options.seed * 1_000_003 + step)
    with autocast(text.device):
        loss = model(**ranks.part(tokens, targets)).loss
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    ranks.clip(model, options.clip)
    optimizer.step()
    return ranks.mean(loss.detach())


@torch.no_grad()
def evaluate(model: TransformerLM, text: torch.Tensor, options: argparse.Namespace, ranks: Ranks = ALONE) -> float:
    """Loss on held-out text, in nats per byte; the same windows every time."""
    losses = []
    for index in range(options.eval_batches):
        tokens, targets = batch(text, options.batch, model.config.context_length, seed=index)
        with autocast(text.device):
            losses.append(ranks.mean(model(**ranks.part(tokens, targets)).loss))
    return torch.stack(losses).mean().item()


def rate(step: int, options: argparse.Namespace) -> float:
    """Learning rate: linear warm-up, then half a cosine down to a tenth."""
    if step < options.warm_up:
        return options.lr * (step + 1) / options.warm_up
    progress = (step - options.warm_up) / max(options.steps - options.warm_up, 1)
    return options.lr * (0.1 + 0.45 * (1 + math.cos(math.pi * min(progress, 1.0))))


def autocast(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Bfloat16 on a GPU, float32 on a CPU."""
    return torch.autocast("cuda", torch.bfloat16) if device.type == "cuda" else contextlib.nullcontext()


# ----------------------------------------------------------------------------------------------------------
# Files
# ----------------------------------------------------------------------------------------------------------


def save(
    model: TransformerLM, optimizer: torch.optim.Optimizer, step: int, options: argparse.Namespace, ranks: Ranks
) -> None:
    """Write ``OUTPUT/step-…``: all of it or nothing, then drop the oldest."""
    folder = options.output / f"step-{step:08d}"
    partial = folder.with_name(folder.name + ".partial")
    state = {"step": step, "options": shaping(options)}
    if ranks.is_first:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    if ranks.several:
        ranks.save(partial, model, optimizer, state)
    else:
        model.save(partial / "model.safetensors")
        torch.save({"optimizer": optimizer.state_dict(), **state}, partial / "state.pt")
    if not ranks.is_first:
        return
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)
    for old in checkpoints(options.output)[:-KEPT]:
        shutil.rmtree(old)


def check_files(model: TransformerLM, output: Path) -> None:
    """End before the first step, and not at the first checkpoint, where no checkpoint can be written."""
    small = TransformerLM(TransformerConfig(vocab_size=2, context_length=2, d_model=4, d_ff=4, layers=1, heads=1))
    try:
        output.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="trial-", dir=output) as folder:
            small.save(Path(folder, "model.safetensors"))
            torch.save(small.state_dict(), Path(folder, "state.pt"))
        free = shutil.disk_usage(output).free
    except (ImportError, OSError, WarploomError) as error:
        sys.exit(f"{output}: no checkpoint can be written there: {error}")
    needed = 12 * model.parameter_count() * (KEPT + 1)  # a weight and two moments in float32
    if free < needed:
        sys.exit(
            f"{output}: {KEPT + 1} checkpoints need {needed / 2**20:,.0f} MiB; {free / 2**20:,.0f} MiB are free"
        )


def checkpoints(output: Path) -> list[Path]:
    """Complete checkpoints, the oldest first."""
    return sorted(folder for folder in output.glob("step-*") if folder.suffix != ".partial")


def last_checkpoint(output: Path) -> Path | None:
    """The newest complete checkpoint, if there is one."""
    return next(reversed(checkpoints(output)), None)


def log(output: Path, entry: dict[str, float]) -> None:
    """Add a line to ``OUTPUT/log.jsonl``."""
    output.mkdir(parents=True, exist_ok=True)
    with (output / LOG).open("a", encoding="utf-8") as file:
        file.write(json.dumps(entry) + "\n")


def forget(output: Path, step: int) -> None:
    """Drop the log's lines behind a step: an interrupted run wrote them, and they come again."""
    if (output / LOG).is_file():
        lines = (output / LOG).read_text(encoding="utf-8").splitlines()
        kept = [line for line in lines if json.loads(line)["step"] <= step]
        (output / LOG).write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")


def shaping(options: argparse.Namespace) -> dict[str, object]:
    """The options that decide a run's numbers: a run that goes on must have the same."""
    names = ("size", "context_length", "attention", "position", "batch", "lr", "warm_up", "steps", "weight_decay")
    names += ("clip", "seed")
    return {name: getattr(options, name) for name in names} | {"text": str(options.text)}


def parse(words: list[str] | None) -> argparse.Namespace:
    """The command line, with defaults that depend on the device."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, help="a file or folder (default: Python's standard library)")
    parser.add_argument("--output", type=Path, default=Path("runs/lm"), help="default: runs/lm")
    parser.add_argument(
        "--size", choices=(*SIZES, "sm", "md", "lg", "xl", "2.7B"), help="default: tiny, on a GPU small"
    )
    parser.add_argument("--context-length", type=int, help="tokens of a sequence (default: by size)")
    parser.add_argument(
        "--attention", default="flash", metavar="NAME[,NAME…]",
        help="flash (default), sdpa, plain, tpa, linear or delta; several go from layer to layer, and around again",
    )  # fmt: skip
    parser.add_argument("--position", choices=("rotate", "cosine", "none"), default="rotate")
    parser.add_argument("--steps", type=int, help="over which the rate falls (default: 400, on a GPU 2000)")
    parser.add_argument("--stop", type=int, help="end at this step, and leave the rest for another time")
    parser.add_argument("--batch", type=int, help="sequences (default: by size)")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--warm-up", type=int, default=50)
    parser.add_argument("--weight-decay", type=float, default=0.1)
    parser.add_argument("--clip", type=float, default=1.0, help="largest norm of the gradient")
    parser.add_argument("--log-every", type=int, default=20)
    parser.add_argument("--eval-every", type=int, default=100, help="a multiple of --log-every")
    parser.add_argument("--eval-batches", type=int, default=8)
    parser.add_argument("--save-every", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--compile", action="store_true", help="under torch.compile")
    parser.add_argument("--cp", type=int, default=1, help="under torchrun: ranks that share a sequence")
    parser.add_argument("--tp", type=int, default=1, help="under torchrun: ranks that share matrices")
    options = parser.parse_args(words)
    gpu = options.device.startswith("cuda")
    options.size = options.size or ("small" if gpu else "tiny")
    options.steps = options.steps or (2000 if gpu else 400)
    options.batch = options.batch or BATCH.get(options.size, 32)
    return options


if __name__ == "__main__":
    main()
