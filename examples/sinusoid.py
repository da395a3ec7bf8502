"""Regression: learn to fit a sine wave from ten points (Finn et al., 2017, section 5.1), with and without sharing.

    python examples/sinusoid.py --out runs/sinusoid

Shows what a data set of your own needs: one method, `sample`.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

import gradshare as gs
from gradshare.reports import write_report


class Sinusoids:
    """Tasks y = amplitude * sin(x - phase), with amplitude in [0.1, 5] and phase in [0, pi]."""

    def sample(self, split: str, shape: gs.Shape, tasks: int, key: tuple[int, ...]) -> gs.Episodes:
        generator = np.random.default_rng(key)  # the same key gives the same tasks
        amplitude = torch.tensor(generator.uniform(0.1, 5.0, (tasks, 1, 1)), dtype=torch.float32)
        phase = torch.tensor(generator.uniform(0.0, math.pi, (tasks, 1, 1)), dtype=torch.float32)

        def part(points: int) -> tuple[Tensor, Tensor]:
            x = torch.tensor(generator.uniform(-5.0, 5.0, (tasks, points, 1)), dtype=torch.float32)
            return x, amplitude * torch.sin(x - phase)

        return gs.Episodes(*part(shape.shots), *part(shape.queries))


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(1, 40), nn.ReLU(), nn.Linear(40, 40), nn.ReLU(), nn.Linear(40, 1))


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--out", type=Path, default=Path("runs/sinusoid"))
    options.add_argument("--epochs", type=int, default=10)
    options.add_argument("--iterations", type=int, default=200)
    chosen = options.parse_args()
    for arm, sharing in {"original": None, "shared": gs.GradientSharing()}.items():
        learner = gs.maml(model(), inner_lr=0.01, steps=5, sharing=sharing, loss="mse")
        run = gs.train(
            learner, Sinusoids(), chosen.out / arm, about={"arm": arm, "dataset": "sinusoids", "inner_lr": 0.01},
            epochs=chosen.epochs, iterations=chosen.iterations, shots=10, queries=10, val_tasks=200, test_tasks=200,
        )  # fmt: skip
        print(arm, "validation loss by epoch:", " ".join(f"{line['val_loss']:.3f}" for line in run.metrics))
        print(
            arm, f"test loss {run.summary['test']['best']['loss']:.3f} ± {run.summary['test']['best']['interval']:.3f}"
        )
    write_report(chosen.out)
    print("report:", chosen.out / "report.html")


if __name__ == "__main__":
    main()
