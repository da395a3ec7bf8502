"""The tables over seeds and the figure of docs/results.md, from the runs in results/paper: python results/over_seeds.py

The first 20 epochs of every run of CUB, 1-shot, MAML, since most have no more; tests as they were made.
"""

from __future__ import annotations

from pathlib import Path
from statistics import mean

import matplotlib.pyplot as plt

from gradshare.reports import Run, read_run
from gradshare.runs.folder import RunFolder

RESULTS = Path(__file__).parent
EPOCHS = 20
SHOWN = (1, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20)
FIVE_TASKS = ("", "+gs", "~half-rate", "~gate-only", "~batch-only", "~memory-only", "~conditioned")
ONE_TASK = ("", "+gs", "~conditioned")
NAMES = {"": "original", "+gs": "sharing"}
MARKERS = {"+gs": "o", "~gate-only": "s", "~batch-only": "v", "~memory-only": "^", "~conditioned": "D"}


def runs(experiment: str, arm: str) -> list[Run]:
    """The seeds of an arm."""
    rate = "-10x" if experiment.endswith("-10x") else ""
    folder = f"{experiment.removesuffix('-10x')}{arm}{rate}"
    return [read_run(RunFolder(seed)) for seed in sorted((RESULTS / "paper" / folder).glob("seed-*"))]


def accuracies(run: Run) -> list[float]:
    return [100 * float(value) for value in run.val[:EPOCHS]]


def test(run: Run) -> float:
    assert run.test and run.test.ensemble.accuracy is not None
    return 100 * run.test.ensemble.accuracy


def by_seed(values: list[float]) -> str:
    return " ".join(f"{value:.1f}" for value in values) + f" (mean {mean(values):.1f})"


def table(title: str, experiment: str, arms: tuple[str, ...], level: float) -> None:
    print(f"\n{title}: validation, mean over seeds | by seed: first epoch at {level:g} % | best validation | test")
    print("epoch        ", *(f"{epoch:4}" for epoch in SHOWN))
    for arm in arms:
        seeds = runs(experiment, arm)
        curves = [accuracies(seed) for seed in seeds]
        means = [mean(curve[epoch - 1] for curve in curves) for epoch in SHOWN]
        reached = [next((at for at, value in enumerate(curve, start=1) if value >= level), "-") for curve in curves]
        print(f"{NAMES.get(arm, arm[1:]):13}", *(f"{value:.1f}" for value in means), " |", *reached, end=" | ")
        print(by_seed([max(curve) for curve in curves]), "|", by_seed([test(seed) for seed in seeds]))


def last_gate() -> None:
    """The gate of the last inner step after 20 epochs, and the test."""
    print(f"\nsig(lambda) of steps 1 to 5 after {EPOCHS} epochs, and test accuracy")
    _, axes = plt.subplots(figsize=(5.5, 3.6), layout="constrained")
    for arm, marker in MARKERS.items():
        seeds = runs("cub-1shot-5task-maml", arm)
        gates = [seed.lam[EPOCHS - 1] for seed in seeds if seed.lam is not None]
        for number, (seed, steps) in enumerate(zip(seeds, gates, strict=True)):
            print(
                f"{NAMES.get(arm, arm[1:]):12} seed {number} ",
                *(f"{gate:.2f}" for gate in steps),
                f"{test(seed):.1f} %",
            )
        axes.plot(
            [steps[-1] for steps in gates],
            [test(seed) for seed in seeds],
            marker,
            ms=8,
            alpha=0.75,
            label=NAMES.get(arm, arm[1:]),
        )
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
