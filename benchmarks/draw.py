"""How fast tasks are drawn: from a store (`Dataset.sample`) and from the same images by `gs.tasks`.

python benchmarks/draw.py                  # on a CPU
python benchmarks/draw.py --device cuda    # also on a GPU
"""

from __future__ import annotations

import argparse
import statistics
import time

import numpy as np
import torch

import gradshare as gs


def seconds(source: gs.TaskSource, shape: gs.Shape, tasks: int, draws: int) -> float:
    """The median time of a batch of tasks."""
    times = []
    for number in range(draws):
        began = time.perf_counter()
        source.sample("train", shape, tasks, (0, number))
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return statistics.median(times[draws // 10 :])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--draws", type=int, default=300)
    given = parser.parse_args()
    stored = gs.load_dataset("glyphs")
    counts = [entry.images for entry in stored.index.classes]
    names = np.repeat([entry.name for entry in stored.index.classes], counts)
    splits = {
        split: [entry.name for entry in stored.index.classes if entry.split == split]
        for split in ("train", "val", "test")
    }
    images = torch.from_numpy(np.array(stored.images)).movedim(-1, 1).float() / 255
    made = gs.tasks(images, names, splits=splits)
    for device in dict.fromkeys(["cpu", given.device]):
        for shape, tasks in ((gs.Shape(5, 1, 15), 5), (gs.Shape(5, 5, 15), 25)):
            one, other = (seconds(source.to(device), shape, tasks, given.draws) for source in (stored, made))
            print(
                f"{device}, {tasks} tasks of {shape.ways} x ({shape.shots} + {shape.queries}): Dataset.sample"
                f" {one * 1e3:.3f} ms, gs.tasks {other * 1e3:.3f} ms"
            )


if __name__ == "__main__":
    main()
