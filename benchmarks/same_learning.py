"""Train runs that show whether bf16, TF32 and float32 learn the same: CUB, 1-shot, T = 5, 3,000 meta-iterations.

    python benchmarks/same_learning.py cub OUT --precision bf16 --arm shared
    python benchmarks/same_learning.py cub OUT --precision float32 --engine eager --arm original   # without TF32

A run is written to OUT/seed-N/PRECISION-ENGINE-ARM, and resumed if it exists. Float32 turns TF32 off for convolutions
and matrix products. `python benchmarks/same_learning.py cub OUT --compare` prints the curves of all runs.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path

import torch

import gradshare as gs
from gradshare.runs.build import run
from gradshare.runs.config import RunConfig
from gradshare.runs.display import Silent, epoch_text
from gradshare.runs.records import Epoch
from gradshare.runs.workers import Interrupted


class Lines(Silent):
    """Prints a line after every epoch."""

    def __init__(self, name: str) -> None:
        self.name = name

    def epoch(self, line: Epoch, seconds: float) -> None:
        print(f"{self.name}: epoch {line.epoch}, {epoch_text(line)}, {seconds:.0f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dataset")
    parser.add_argument("out", type=Path)
    parser.add_argument("--precision", default="bf16", choices=["float32", "tf32", "bf16"])
    parser.add_argument("--engine", default="graph", choices=["graph", "eager"])
    parser.add_argument("--arm", default="shared", choices=["original", "shared"])
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--iterations", type=int, default=500)
    parser.add_argument("--val-tasks", type=int, default=600)
    parser.add_argument("--tasks", type=int, default=5)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--compare", action="store_true")
    given = parser.parse_args()
    if given.compare:
        compare(given.out)
        return
    torch.backends.cudnn.allow_tf32 = given.precision != "float32"
    torch.backends.cuda.matmul.allow_tf32 = False
    for seed in given.seeds:
        config = RunConfig(
            dataset=given.dataset, arm=given.arm, shots=1, tasks=given.tasks, epochs=given.epochs,
            iterations=given.iterations, val_tasks=given.val_tasks, test_tasks=0, precision=given.precision,
            engine=given.engine, device=given.device, seed=seed,
        )  # fmt: skip
        name = f"{given.precision}-{given.engine}-{given.arm}"
        folder = given.out / f"seed-{seed}" / name
        try:
            run(config, folder, (folder / "config.json").exists(), Lines(f"{name}/{seed}"))
        except Interrupted as stopped:
            print(stopped)
            return


def compare(folder: Path) -> None:
    """Print every validation curve, then mean and interval over the seeds of each precision and arm."""
    curves: dict[str, list[list[float]]] = {}
    for path in sorted(folder.glob("seed-*/*/config.json")):
        lines = gs.load_run(path.parent).metrics
        curves.setdefault(path.parent.name, []).append([100 * line["val_accuracy"] for line in lines])
        values = "  ".join(f"{100 * line['val_accuracy']:5.1f} ±{100 * line['val_interval']:.1f}" for line in lines)
        print(f"{path.parent.parent.name}  {path.parent.name:<26} {values}")
    print("\nover seeds: mean, and 95 % interval of the mean by Student's t")
    for name, runs in sorted(curves.items(), key=lambda item: item[0].rpartition("-")[2]):
        epochs = zip(*runs, strict=False)  # the epochs that all runs have
        print(f"{len(runs)} x {name:<26}", "  ".join(_mean_and_interval(values) for values in epochs))


# Student's t at 97.5 %, by the number of runs.
STUDENT = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57, 7: 2.45, 8: 2.36, 9: 2.31, 10: 2.26}


def _mean_and_interval(values: tuple[float, ...]) -> str:
    mean = statistics.mean(values)
    if len(values) not in STUDENT:
        return f"{mean:5.1f}"
    return f"{mean:5.1f} ±{STUDENT[len(values)] * statistics.stdev(values) / len(values) ** 0.5:.1f}"


if __name__ == "__main__":
    main()
