"""Train one model with softmax, linear and delta rule attention and with hybrids, on one text: loss and speed.

    python examples/attentions.py                          # five models of three seeds, minutes on a GPU
    python examples/attentions.py --steps 1000 --attentions flash,delta+delta+delta+flash --seeds 0,1
    python examples/attentions.py --record attentions.jsonl --picture attentions.svg
    python examples/attentions.py --record attentions.jsonl --picture attentions.svg --draw    # trains nothing

A hybrid is several names with ``+``, which go from layer to layer and around again. Models of one seed see the
same text in the same order; other options are those of ``train_lm.py``. The loss is that on held-out text, in nats
per byte. The first steps, in which kernels are compiled, are not timed. A model is a line of the record, written
when it is trained; the same command again trains only what is missing there.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from statistics import mean
from typing import Any

import torch
import train_lm
from linear_and_softmax import OUTPUT, UNTIMED, read, train_once
from loss_parity import COLOURS, drawing

ATTENTIONS = ("flash", "linear", "delta", "linear+linear+linear+flash", "delta+delta+delta+flash")
NAMES = {"flash": "softmax", "delta": "delta rule"}
GPU = {"size": "small", "steps": "300"}
CPU = {"size": "tiny", "steps": "16", "context-length": "64", "batch": "8"}


def main(words: list[str] | None = None) -> None:
    """Train every model, and print a line for each."""
    options = parse(words)
    found = read(options.record) if options.draw else run_all(options)
    if not found:
        sys.exit("there is nothing to draw")
    for attention in dict.fromkeys(entry["attention"] for entry in found):
        losses, rates = (values_of(found, attention, name) for name in ("loss", "tokens_per_second"))
        spread = f"{min(losses):.3f} … {max(losses):.3f}"
        print(f"{title_of(attention):28}  {mean(losses):6.3f} ({spread})  {mean(rates):10,.0f} tokens/s")
    if options.picture:
        draw(found, options.picture)
        print(options.picture)


def run_all(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Train what the record does not have, all attentions of a seed before the next; returns all entries."""
    found = []
    for seed in options.seeds:
        for attention in options.attentions:
            own = ["--attention", attention.replace("+", ","), "--seed", str(seed), "--output", OUTPUT]
            run = train_lm.parse([*options.training, "--device", options.device, *own])
            entry = train_once(run, options.record)
            print(
                f"seed {seed}  {title_of(entry['attention']):28}  {entry['loss']:6.3f}", file=sys.stderr, flush=True
            )
            found.append(entry)
    return found


def values_of(found: list[dict[str, Any]], attention: str, name: str) -> list[float]:
    """Values of all seeds of a model."""
    return [entry[name] for entry in found if entry["attention"] == attention]


def title_of(attention: str) -> str:
    """Words for the attention of a model: layers alike are counted."""
    names = attention.split(",")
    if len(names) == 1:
        return NAMES.get(attention, attention)
    kinds = dict.fromkeys(names)
    return " + ".join(f"{names.count(kind)} {NAMES.get(kind, kind)}" for kind in kinds)


def draw(found: list[dict[str, Any]], picture: Path) -> None:
    """Loss and tokens a second of every model: a dot for each seed, a line for their mean."""
    attentions = list(dict.fromkeys(entry["attention"] for entry in found))
    with drawing(picture, (9, 1.2 + 0.55 * len(attentions))) as figure:
        panels = figure.subplots(1, 2, sharey=True)
        for axes, name in zip(panels, ("loss", "tokens_per_second")):
            for row, attention in enumerate(attentions):
                values, colour = values_of(found, attention, name), COLOURS[row % len(COLOURS)]
                axes.plot(values, [row] * len(values), "o", color=colour, alpha=0.7)
                axes.plot([mean(values)] * 2, [row - 0.3, row + 0.3], color=colour, linewidth=2)
        panels[0].set_yticks(range(len(attentions)), list(map(title_of, attentions)))
        panels[0].invert_yaxis()
        panels[0].set_xlabel("loss on held-out text (nats per byte)")
        panels[1].set_xlabel("thousand tokens a second")
        panels[1].set_xlim(left=0)
        panels[1].xaxis.set_major_formatter(lambda value, _: f"{value / 1e3:,.4g}")
        panels[1].locator_params(axis="x", nbins=5)


def parse(words: list[str] | None) -> argparse.Namespace:
    """The command line: our own options, and those of ``train_lm.py`` that shape a run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--attentions", default=",".join(ATTENTIONS), metavar="NAME,…", help="hybrids with +")
    parser.add_argument("--seeds", default="0,1,2", metavar="N,…")
    parser.add_argument("--record", type=Path, metavar="FILE", help="a line of JSON for each model")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draw them as SVG; needs matplotlib")
    parser.add_argument("--draw", action="store_true", help="draw what the record has, and train nothing")
    options, training = parser.parse_known_args(words)
    options.attentions = options.attentions.split(",")
    options.seeds = [int(seed) for seed in options.seeds.split(",")]
    usual = GPU if options.device.startswith("cuda") else CPU
    options.training = [*(word for name, value in usual.items() for word in (f"--{name}", value)), *training]
    if train_lm.parse(options.training).steps <= UNTIMED:
        parser.error(f"--steps: more than {UNTIMED}")
    return options


if __name__ == "__main__":
    main()
