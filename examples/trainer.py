"""Train a model of transformers with its Trainer, attention and rotary positions by warploom.

    python examples/trainer.py                        # a tiny model, under a minute on a CPU
    python examples/trainer.py --attention sdpa       # the same with PyTorch's attention, to compare

Lines of text are packed into rows: `position_ids` start again with every line, and none attends to another. On a
GPU the same program trains in bfloat16 on the kernels.
"""

from __future__ import annotations

import argparse
import inspect
import textwrap
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from warploom.integrations import transformers as integration

BYTES = 256


def main(words: list[str] | None = None) -> float:
    """Train, and return the last loss in nats per byte."""
    options = parse(words)
    integration.register()
    torch.manual_seed(options.seed)
    config = LlamaConfig(
        hidden_size=options.width,
        intermediate_size=3 * options.width,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=BYTES,
        max_position_embeddings=options.length,
        use_cache=False,
    )
    model = LlamaForCausalLM._from_config(config, attn_implementation=options.attention)
    if options.attention == "warploom":
        integration.patch_rotary(model)
    arguments = TrainingArguments(
        output_dir=str(options.output),
        max_steps=options.steps,
        per_device_train_batch_size=options.batch,
        learning_rate=3e-3,
        warmup_steps=options.steps // 10,
        bf16=torch.cuda.is_available(),
        dataloader_pin_memory=torch.cuda.is_available(),
        logging_steps=max(options.steps // 5, 1),
        save_strategy="no",
        report_to="none",
        seed=options.seed,
    )
    text = Path(options.text).read_bytes() if options.text else inspect.getsource(textwrap).encode()
    trainer = Trainer(model, arguments, train_dataset=packed(text, options.length))
    trainer.train()
    return float([line["loss"] for line in trainer.state.log_history if "loss" in line][-1])


def packed(text: bytes, length: int) -> list[dict[str, Any]]:
    """Rows of bytes, with the place of each in its line; the first byte of a line is no target."""
    tokens = torch.tensor(list(text))
    places = torch.cat([torch.arange(len(line)) for line in text.splitlines(keepends=True)])
    labels = tokens.masked_fill(places == 0, -100)
    columns = {"input_ids": tokens, "position_ids": places, "labels": labels}
    rows = len(text) // length
    return [{name: x[i * length : (i + 1) * length] for name, x in columns.items()} for i in range(rows)]


def parse(words: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--attention", default="warploom", help="warploom, or one of transformers' own")
    parser.add_argument("--text", help="a file; Python's textwrap by default")
    parser.add_argument("--output", type=Path, default=Path("runs/trainer"))
    for name, value in {"steps": 60, "batch": 8, "length": 128, "width": 64, "seed": 0}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    return parser.parse_args(words)


if __name__ == "__main__":
    print(f"{main():.3f} nats per byte")
