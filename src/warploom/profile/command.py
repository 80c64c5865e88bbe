"""``warploom profile``: its words, and what runs for them."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from warploom.errors import ArgumentError, WarploomError

if TYPE_CHECKING:
    import torch

    from warploom.bench.tables import Section
    from warploom.profile.records import Writer

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare ``profile transformer`` and ``profile attention``; imports nothing."""
    profiles = parser.add_subparsers(required=True, metavar="PROFILE", dest="profile")

    model = profiles.add_parser(
        "transformer", help="steps of a Transformer LM: time by phase and part, memory, MFU"
    )
    model.add_argument(
        "--size", type=_words, default=["sm"], metavar="SIZE[,…]", help="sm, md, lg, xl, 2.7B (default: sm)"
    )
    model.add_argument(
        "--mode",
        type=_words,
        default=["forward", "forward-backward", "train"],
        metavar="MODE[,…]",
        help="forward, forward-backward, train: with AdamW (default: all three)",
    )
    model.add_argument(
        "--attention",
        type=_words,
        default=["flash"],
        metavar="NAME[,…]",
        help="flash, sdpa, plain, tpa; llama: transformers' model of the same shape (default: flash)",
    )
    model.add_argument("--dtype", choices=("bf16", "fp32"), help="bf16 by autocast (default on a GPU), or fp32")
    model.add_argument(
        "--compile",
        type=_words,
        nargs="?",
        const=["yes"],
        default=["no"],
        metavar="HOW[,…]",
        help="no (default), yes: under torch.compile, graphs: that with CUDA graphs",
    )
    model.add_argument("--position", choices=("rotate", "cosine", "none"), default="rotate")
    model.add_argument(
        "--context-length", type=_numbers, default=[512], metavar="N[,…]", help="tokens (default: 512)"
    )
    model.add_argument("--batch", type=_positive, default=4, metavar="B", help="sequences (default: 4)")
    model.add_argument("--layers", type=_positive, metavar="L", help="instead of the size's own")
    model.add_argument("--warm-up", type=_positive, default=5, metavar="STEPS", help="default: 5")
    model.add_argument("--steps", type=_positive, default=10, metavar="STEPS", help="measured steps (default: 10)")
    model.add_argument(
        "--in-turn",
        action="store_true",
        help="all attentions of a size at once, a few steps of each in turn",
    )
    model.add_argument("--no-parts", action="store_true", help="no pass that splits the time by parts")
    model.add_argument("--chrome-trace", type=Path, metavar="FILE", help="write a trace for Perfetto")
    model.add_argument("--memory-snapshot", type=Path, metavar="FILE", help="write a GPU's allocations of one step")
    _add_output(model)

    attention = profiles.add_parser("attention", help="plain, compiled and flash attention over the published grid")
    attention.add_argument("--head-dim", type=_numbers, metavar="D[,…]", help="default: 16,32,64,128")
    attention.add_argument("--seq-len", type=_numbers, metavar="N[,…]", help="default: 256,1024,4096,8192,16384")
    attention.add_argument(
        "--attention",
        type=_words,
        default=["plain", "plain+compile", "flash"],
        metavar="NAME[,…]",
        help="plain, plain+compile, flash, sdpa (default: the first three)",
    )
    attention.add_argument("--batch", type=_positive, default=8, metavar="B", help="default: 8")
    attention.add_argument(
        "--passes", type=_positive, metavar="P", help="forward and backward passes (default: 100)"
    )
    attention.add_argument(
        "--causal", action="store_true", help="with the causal mask, which the published grid lacks"
    )
    attention.add_argument("--quick", action="store_true", help="a few small cases (default on a CPU)")
    _add_output(attention)


def _add_output(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto", help="default: auto")
    parser.add_argument("-o", "--output", type=Path, metavar="DIR", help="default: runs/DEVICE-profile-PROFILE")


def run(options: argparse.Namespace, device: torch.device, output: Path) -> int:
    """Measure, and print tables; records and a Markdown table go to a folder.

    Returns:
        The exit status: 1 when something failed for another reason than memory or a missing package.
    """
    from warploom.bench import tables
    from warploom.bench.attempt import DeviceLostError
    from warploom.bench.storage import replace_text
    from warploom.profile.records import PROFILES, Writer

    profile: Callable[[argparse.Namespace, torch.device, Writer], list[Section]]
    profile = _transformer if options.profile == "transformer" else _attention
    writer = Writer(output, device)
    try:
        sections = profile(options, device, writer)
    except DeviceLostError as error:
        raise WarploomError(f"{error}; what was measured before is in {output / PROFILES}") from error
    print(tables.text(sections, width=160))
    table = output / f"{options.profile}.md"
    replace_text(table, tables.markdown(sections))
    print(f"table: {table}")
    print(f"records: {output / PROFILES}")
    return int(any(record.status == "error" for record in writer.records))


def _transformer(options: argparse.Namespace, device: torch.device, writer: Writer) -> list[Section]:
    import torch

    from warploom.bench.storage import probe
    from warploom.nn.transformer_lm import SIZES
    from warploom.profile import models, transformer
    from warploom.profile.tables import transformer_sections

    if options.memory_snapshot is not None and device.type != "cuda":
        raise ArgumentError("--memory-snapshot: only a GPU's allocations are recorded")
    for file in filter(None, (options.chrome_trace, options.memory_snapshot)):
        probe(file.parent, file.name)
    _known("--size", options.size, list(SIZES))
    _known("--mode", options.mode, transformer.MODES)
    _known("--attention", options.attention, models.PROVIDERS)
    _known("--compile", options.compile, list(transformer.ENDINGS))
    endings = [transformer.ENDINGS[how] for how in options.compile]
    units = itertools.starmap(
        transformer.Unit,
        itertools.product(options.size, options.context_length, options.attention, endings, options.mode),
    )
    low = options.dtype == "bf16" or (options.dtype is None and device.type == "cuda")
    plan = transformer.Plan(
        tuple(units),
        torch.bfloat16 if low else torch.float32,
        batch=options.batch,
        layers=options.layers,
        position=options.position,
        warm_up=options.warm_up,
        steps=options.steps,
        in_turn=options.in_turn,
        parts=not options.no_parts,
        chrome_trace=options.chrome_trace,
        memory_snapshot=options.memory_snapshot,
    )
    return transformer_sections(transformer.run(plan, device, writer))


def _attention(options: argparse.Namespace, device: torch.device, writer: Writer) -> list[Section]:
    from warploom.profile import attention
    from warploom.profile.tables import attention_sections

    _known("--attention", options.attention, list(attention.PROVIDERS))
    quick = options.quick or device.type == "cpu"
    grid = attention.Grid(
        tuple(options.attention),
        tuple(options.head_dim or (attention.QUICK_HEAD_DIMS if quick else attention.HEAD_DIMS)),
        tuple(options.seq_len or (attention.QUICK_LENGTHS if quick else attention.LENGTHS)),
        batch=options.batch,
        passes=options.passes or (attention.QUICK_PASSES if quick else attention.PASSES),
        causal=options.causal,
    )
    return attention_sections(attention.run(grid, device, writer))


def _known(option: str, words: Sequence[str], known: Sequence[str]) -> None:
    for word in words:
        if word not in known:
            raise ArgumentError(f"{option} {word}: there are {', '.join(known)}")


def _words(text: str) -> list[str]:
    if words := [word.strip() for word in text.split(",") if word.strip()]:
        return words
    raise argparse.ArgumentTypeError("expected names or numbers, separated by commas")


def _numbers(text: str) -> list[int]:
    return [_positive(word) for word in _words(text)]


def _positive(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = 0
    if not 0 < value < 2**63:
        raise argparse.ArgumentTypeError(f"expected a positive number, got {text!r}")
    return value
