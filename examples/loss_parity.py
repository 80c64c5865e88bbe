"""Train one model with several attentions from the same seed, and put their loss curves side by side.

    python examples/loss_parity.py                                       # flash, sdpa and plain, 200 steps each
    python examples/loss_parity.py --output runs/parity --picture parity.svg

The attentions compute the same in different orders, so that their curves part by rounding and by nothing else. How
far rounding alone drives two curves apart, two of PyTorch's own attentions show: the distance of ``sdpa`` from
``plain`` is the noise that the distance of ``flash`` from ``plain`` is to be held against. A run's curve is a line
in ``OUTPUT/losses.jsonl``; the same command again draws from it, and trains only what is missing.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import train_lm

if TYPE_CHECKING:
    from matplotlib.figure import Figure

RECORD = "losses.jsonl"
COLOURS = ("#009e73", "#1f7fc4", "#d55e00", "#9a6bc2", "#b58900")
WINDOW = 20  # steps over which a curve is averaged before curves are compared


def main(words: list[str] | None = None) -> None:
    """Read the command line, train what is missing, print the distances and draw the curves."""
    options = parse(words)
    curves: dict[str, list[float]] = {}
    for attention in options.attention:
        run = train_lm.parse(
            [*options.training, "--attention", attention, "--output", str(options.output / attention)]
        )
        key = train_lm.shaping(run) | {"device": run.device}
        curves[attention] = recorded(options.output / RECORD, key) or train(run, key, options.output / RECORD)
    first = options.attention[0]
    for name in options.attention[1:]:
        gap = [abs(a - b) for a, b in zip(smooth(curves[name]), smooth(curves[first]))]
        said = f"{sum(gap) / len(gap):.4f} nats on average, {max(gap):.4f} at most"
        print(f"{name} from {first}: {said}, in means over {WINDOW} steps")
    for name, losses in curves.items():
        print(f"{name}: loss {losses[0]:.3f} at the start, {smooth(losses)[-1]:.3f} at the end")
    if options.picture:
        draw(curves, first, options.picture)
        print(options.picture)


def train(run: argparse.Namespace, key: dict[str, object], record: Path) -> list[float]:
    """Train one model; its loss at every step, which is written down as well."""
    torch.set_float32_matmul_precision("high")
    device = torch.device(run.device)
    text, _ = train_lm.corpus(run.text, device)
    model, optimizer, _ = train_lm.prepare(run, device)
    steps = [train_lm.training_step(model, optimizer, text, step, run) for step in range(run.steps)]
    losses: list[float] = torch.stack(steps).tolist()
    record.parent.mkdir(parents=True, exist_ok=True)
    with record.open("a", encoding="utf-8") as file:
        file.write(json.dumps(key | {"losses": [round(loss, 5) for loss in losses]}) + "\n")
    return losses


def recorded(record: Path, key: dict[str, object]) -> list[float] | None:
    """The curve of an earlier run with these options, if there is one."""
    for line in reversed(record.read_text(encoding="utf-8").splitlines() if record.is_file() else []):
        entry = json.loads(line)
        losses: list[float] = entry.pop("losses")
        if entry == key:
            return losses
    return None


def smooth(losses: list[float]) -> list[float]:
    """Means over `WINDOW` steps."""
    return [sum(losses[i : i + WINDOW]) / WINDOW for i in range(len(losses) - WINDOW + 1)]


def draw(curves: dict[str, list[float]], first: str, picture: Path) -> None:
    """The curves, and below them how far each is from the first."""
    with drawing(picture, (8, 5.5)) as figure:
        above, below = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
        for colour, (name, losses) in zip(COLOURS, curves.items()):
            above.plot(losses, color=colour, linewidth=1.2, label=name)
            gap = [a - b for a, b in zip(smooth(losses), smooth(curves[first]))]
            below.plot(range(WINDOW - 1, len(losses)), gap, color=colour, linewidth=1.5)
        above.set_ylabel("loss (nats per byte)")
        below.set_ylabel(f"minus {first},\n{WINDOW} steps' mean")
        below.set_xlabel("step")
        above.legend(frameon=False)


@contextlib.contextmanager
def drawing(picture: Path, size: tuple[float, float]) -> Iterator[Figure]:
    """A figure to be filled, which is written as SVG and can be read on a light and on a dark page."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    grey = "#787878"
    style = {f"{name}.color": grey for name in ("text", "xtick", "ytick", "grid")} | {
        f"axes.{name}": grey for name in ("labelcolor", "edgecolor", "titlecolor")
    }
    with mpl.rc_context({**style, "font.size": 12, "svg.hashsalt": picture.stem, "savefig.transparent": True}):
        figure = Figure(figsize=size, layout="constrained")
        yield figure
        for axes in figure.axes:
            axes.grid(True, alpha=0.25)
            axes.spines[["top", "right"]].set_visible(False)
        picture.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(picture, format="svg", metadata={"Date": None})


def parse(words: list[str] | None) -> argparse.Namespace:
    """The command line: our own options, and those of ``train_lm.py`` that shape a run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("runs/parity"), help="default: runs/parity")
    parser.add_argument(
        "--attention", type=lambda text: text.split(","), default=["plain", "sdpa", "flash"], metavar="NAME,…"
    )
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draw the curves as SVG; needs matplotlib")
    parser.add_argument("--steps", type=int, default=200, help=f"default: 200; at least {WINDOW}")
    options, training = parser.parse_known_args(words)
    if options.steps < WINDOW:
        sys.exit(f"--steps: at least {WINDOW}")
    options.training = [*training, "--steps", str(options.steps)]
    return options


if __name__ == "__main__":
    main()
