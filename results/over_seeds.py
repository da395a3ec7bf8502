"""The tables over seeds and the figure of docs/results.md, from the runs in results/paper: python results/over_seeds.py

The first 20 epochs of every run of CUB, 1-shot, MAML, since most have no more; tests as they were made.
"""

from __future__ import annotations

import json
from pathlib import Path
from statistics import mean
from typing import Any

import matplotlib.pyplot as plt

RESULTS = Path(__file__).parent
EPOCHS = 20
SHOWN = (1, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20)
FIVE_TASKS = ("", "+gs", "~half-rate", "~gate-only", "~batch-only", "~memory-only", "~conditioned")
ONE_TASK = ("", "+gs", "~conditioned")
NAMES = {"": "original", "+gs": "sharing"}
MARKERS = {"+gs": "o", "~gate-only": "s", "~batch-only": "v", "~memory-only": "^", "~conditioned": "D"}


class Run:
    def __init__(self, folder: Path) -> None:
        lines = (folder / "metrics.jsonl").read_text().splitlines()[:EPOCHS]
        self.epochs: list[dict[str, Any]] = [json.loads(line) for line in lines]
        self.accuracies = [100 * epoch["val_accuracy"] for epoch in self.epochs]
        self.best = max(self.accuracies)
        test = json.loads((folder / "summary.json").read_text())["test"]
        self.test = 100 * test["ensemble"]["accuracy"]

    def first_at(self, level: float) -> int | None:
        return next((at for at, value in enumerate(self.accuracies, start=1) if value >= level), None)


def runs(experiment: str, arm: str) -> list[Run]:
    rate = "-10x" if experiment.endswith("-10x") else ""
    folder = f"{experiment.removesuffix('-10x')}{arm}{rate}"
    return [Run(seed) for seed in sorted((RESULTS / "paper" / folder).glob("seed-*"))]


def table(title: str, experiment: str, arms: tuple[str, ...], level: float) -> None:
    print(f"\n{title}: validation, mean over seeds | by seed: first epoch at {level:g} % | best validation | test")
    print("epoch        ", *(f"{epoch:4}" for epoch in SHOWN))
    for arm in arms:
        seeds = runs(experiment, arm)
        means = [mean(seed.accuracies[epoch - 1] for seed in seeds) for epoch in SHOWN]
        print(f"{NAMES.get(arm, arm[1:]):13}", *(f"{value:.1f}" for value in means), end="  | ")
        print(*(str(seed.first_at(level) or "-") for seed in seeds), end=" | ")
        print(*(f"{seed.best:.1f}" for seed in seeds), f"(mean {mean(seed.best for seed in seeds):.1f})", end=" | ")
        print(*(f"{seed.test:.1f}" for seed in seeds), f"(mean {mean(seed.test for seed in seeds):.1f})")


def last_gate() -> None:
    """The gate of the last inner step after 20 epochs, and the test."""
    print(f"\nsig(lambda) of steps 1 to 5 after {EPOCHS} epochs, and test accuracy")
    _, axes = plt.subplots(figsize=(5.5, 3.6), layout="constrained")
    for arm, marker in MARKERS.items():
        seeds = runs("cub-1shot-5task-maml", arm)
        for number, seed in enumerate(seeds):
            gates = " ".join(f"{gate:.2f}" for gate in seed.epochs[-1]["lam"])
            print(f"{NAMES.get(arm, arm[1:]):12} seed {number}  {gates}  {seed.test:.1f} %")
        last = [seed.epochs[-1]["lam"][-1] for seed in seeds]
        axes.plot(last, [seed.test for seed in seeds], marker, ms=8, alpha=0.75, label=NAMES.get(arm, arm[1:]))
    axes.set(xlabel=f"σ(λ) of the last inner step after {EPOCHS} epochs", ylabel="test accuracy, %")
    axes.set_title("CUB, 5-way 1-shot, MAML/5: a dot a training", fontsize=10, loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8)
    plt.savefig(RESULTS / "last-gate.svg", metadata={"Date": None})


if __name__ == "__main__":
    plt.rcParams["svg.hashsalt"] = "gradshare"
    table("CUB 1-shot, T = 5, MAML", "cub-1shot-5task-maml", FIVE_TASKS, 50)
    table("CUB 1-shot, T = 1, MAML", "cub-1shot-1task-maml", ONE_TASK, 40)
    table("CUB 1-shot, T = 5, MAML, inner rate 1.0", "cub-1shot-5task-maml-10x", ("", "+gs"), 26)
    last_gate()
