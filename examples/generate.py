"""Sample text from a model that ``train_lm.py`` has trained.

python examples/generate.py --prompt "def main(" --tokens 200 --temperature 0.8 --top-p 0.95
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
from train_lm import autocast, last_checkpoint

from warploom.nn import TransformerLM


def main(words: list[str] | None = None) -> None:
    """Read the command line, load the newest checkpoint, and print samples."""
    options = parse(words)
    checkpoint = last_checkpoint(options.output)
    if checkpoint is None:
        raise SystemExit(f"{options.output}: no checkpoint here; examples/train_lm.py makes one")
    device = torch.device(options.device)
    model = TransformerLM.load(checkpoint / "model.safetensors", device=device).eval()
    generator = torch.Generator(device).manual_seed(options.seed)
    prompt = torch.tensor(list(options.prompt.encode()), device=device).expand(options.samples, -1)
    room = model.config.context_length - prompt.shape[1]
    started = time.perf_counter()
    with autocast(device):
        new = model.generate(
            prompt,
            min(options.tokens, room),
            temperature=options.temperature,
            top_k=options.top_k,
            top_p=options.top_p,
            generator=generator,
        )
    samples = new.tolist()  # waits for the device
    seconds = time.perf_counter() - started
    for sample in samples:
        print(options.prompt + bytes(sample).decode(errors="replace"), end="\n\n")
    print(f"[{new.numel()} bytes in {seconds:.2f} s, {new.numel() / seconds:,.0f} per second, from {checkpoint}]")


def parse(words: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("runs/lm"), help="of train_lm.py (default: runs/lm)")
    parser.add_argument("--prompt", default="def ", help="at least one character")
    parser.add_argument("--tokens", type=int, default=200, help="bytes to sample, as far as the context reaches")
    parser.add_argument("--samples", type=int, default=1)
    parser.add_argument("--temperature", type=float, default=0.8, help="0: always the most likely byte")
    parser.add_argument("--top-k", type=int, help="so many most likely bytes (default: all)")
    parser.add_argument("--top-p", type=float, default=0.95)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args(words)


if __name__ == "__main__":
    main()
