"""How much of a task's gradient does the shared vector explain, and how long is it beside it? By inner step.

    python benchmarks/explained.py --regime sinusoid writers glyphs-mlp   trains a model of each, a minute in all
    python benchmarks/explained.py --models cub-1shot-5task-maml+gs         models that gradshare exported

For each inner step, of the body and of the head apart, over the test tasks:

    explained  mean of cos(G[t], ghat)^2: the share of the squared length of G[t] that lies along the running mean
    length     |ghat| / |G[t]|, the median: what is mixed with equal weights at the start of sharing

ghat is the model's own, as training left it. Writes results/accelerate/explained.csv (model, step, part, measure,
value), where the rows of other models stay, and with --figure a picture of it.
"""

from __future__ import annotations

import argparse
import csv
import json
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import matplotlib
import regimes
import torch
from torch import Tensor

import gradshare as gs
from gradshare.method.rules import InnerStep, Moved, Rule
from gradshare.runs.config import RunConfig
from gradshare.runs.export import find_model

matplotlib.use("Agg")
from matplotlib import pyplot

OUT = Path(__file__).resolve().parent.parent / "results" / "accelerate" / "explained.csv"
COLUMNS = ("model", "step", "part", "measure", "value")
Row = tuple[str, int, str, str, float]


@dataclass(frozen=True)
class Watched(Rule):
    """A rule that keeps the gradients that it sees, for adaptation operation by operation."""

    plain: Rule
    seen: list[dict[str, Tensor]] = field(default_factory=list, compare=False)

    @property
    def name(self) -> str:  # type: ignore[override]
        return self.plain.name

    def init(self, weights: Any, steps: int) -> Any:
        return self.plain.init(weights, steps)

    def update(self, at: InnerStep) -> Moved:
        self.seen.append({name: own.detach() for name, own in at.gradients.items()})
        return self.plain.update(at)


def explained(model: str, learner: gs.Learner, state: gs.MetaState, tasks: gs.Episodes) -> Iterator[Row]:
    """What the memory of sharing explains of the gradients of some tasks."""
    watched = Watched(learner.rule)
    with torch.no_grad():
        replace(learner, rule=watched).logits(state, tasks)
    names = list(learner.adapted)
    head = regimes.head_of(names)
    for k, gradients in enumerate(watched.seen):
        for part in ("body", "head"):
            chosen = [name for name in names if (name in head) == (part == "head")]
            own = torch.cat([gradients[name].flatten(1) for name in chosen], 1)  # [tasks, P]
            ghat = torch.cat([state.memory["sharing"]["ghat"][name][k].flatten() for name in chosen])
            lengths = own.norm(dim=1).clamp(min=1e-30)
            cosine = (own @ ghat) / (lengths * ghat.norm().clamp(min=1e-30))
            yield model, k + 1, part, "explained", float(cosine.square().mean())
            yield model, k + 1, part, "length", float((ghat.norm() / lengths).median())


def of_regime(name: str, factor: float, seed: int) -> Iterator[Row]:
    regime = regimes.KNOWN[name]
    *_, last = regimes.looks(regime, regimes.Arm("shared"), factor, seed)
    return explained(name, last.learner, last.state, last.source.sample("test", regime.shape, 200, (2, 1)))


def of_model(name: str) -> Iterator[Row]:
    folder = find_model(name)
    learner, state = gs.from_pretrained(folder)
    options = json.loads((folder / "config.json").read_text(encoding="utf-8"))["model"]["options"]
    config = RunConfig(**{key: options[key] for key in ("dataset", "pixels", "ways", "shots") if key in options})
    data = gs.load_dataset(config.dataset, config.pixels)
    tasks = data.sample("test", gs.Shape(config.ways, config.shots, 1), 100, (2, 1))
    return explained(folder.name, learner, state, tasks)


def others(path: Path, models: set[str]) -> Iterator[Row]:
    """The rows of a file that are not of these models."""
    if path.exists():
        with path.open(newline="", encoding="utf-8") as file:
            for row in csv.DictReader(file):
                if row["model"] not in models:
                    yield row["model"], int(row["step"]), row["part"], row["measure"], float(row["value"])


def picture(rows: list[Row], path: Path) -> None:
    models = list(dict.fromkeys(row[0] for row in rows))
    figure, axes = pyplot.subplots(1, 2, figsize=(8, 3.8))
    colours = ("#d55e00", "#0072b2", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
    for axis, which in zip(axes, ("explained", "length"), strict=True):
        for model, colour in zip(models, colours, strict=False):
            for part, dashes in (("body", "-"), ("head", ":")):
                found = [(row[1], row[4]) for row in rows if row[0] == model and row[2:4] == (part, which)]
                steps, values = zip(*found, strict=True)
                scaled = [100 * value for value in values] if which == "explained" else values
                axis.plot(steps, scaled, dashes, marker="o", markersize=3, color=colour, label=f"{model}, {part}")
        axis.set_xlabel("inner step")
        axis.set_xticks(steps)
    axes[0].set_title("share of G[t] along the shared vector, %", fontsize=10)
    axes[1].set_title("length of the shared vector / |G[t]|", fontsize=10)
    axes[1].set_yscale("log")
    figure.legend(*axes[0].get_legend_handles_labels(), fontsize=8, ncols=3, loc="lower center")
    figure.tight_layout(rect=(0, 0.15, 1, 1))
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--regime", nargs="*", default=[], choices=[one.name for one in regimes.REGIMES])
    options.add_argument("--models", nargs="*", default=[], help="folders, or names in models/; with sharing")
    options.add_argument("--rate", type=float, default=1.0, help="factor on the regime's inner rate")
    options.add_argument("--seed", type=int, default=20)
    options.add_argument("--out", type=Path, default=OUT)
    options.add_argument("--figure", type=Path)
    given = options.parse_args()
    torch.set_num_threads(1)
    rows = [row for name in given.regime for row in of_regime(name, given.rate, given.seed)]
    rows += [row for name in given.models for row in of_model(name)]
    rows = [*others(given.out, {row[0] for row in rows}), *rows]
    given.out.parent.mkdir(parents=True, exist_ok=True)
    with given.out.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([COLUMNS, *((*row[:4], f"{row[4]:.4g}") for row in rows)])
    for model, step, part, what, value in rows:
        print(f"{model:18} step {step} {part}  {what:9} {value:.3g}")
    if given.figure:
        pyplot.rcParams["svg.hashsalt"] = "explained"
        picture(rows, given.figure)


if __name__ == "__main__":
    main()
