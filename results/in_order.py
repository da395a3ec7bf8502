"""Tests a model on tasks drawn as Torchmeta draws them without shuffling, beside tasks drawn at random.

    python results/in_order.py cub-5shot-5task-maml cub                     # a model of models/, a data set
    python results/in_order.py cub-5shot-5task-maml cub --tasks 600 --device cuda

With `shuffle=False`, Torchmeta's loader takes `itertools.combinations` of the sorted classes. The first 600 of them, 5
at a time, all have the first three classes, so such a test is of few classes and says little of the others.
"""

from __future__ import annotations

import argparse
import sys
from itertools import combinations, islice

import numpy as np

import gradshare as gs
from gradshare.method.episodes import episodes_from, whole_shape

BATCH = 25


class InOrder:
    """The tasks of a data set's split, one for each combination of its sorted classes, in order."""

    def __init__(self, dataset: gs.Dataset) -> None:
        self.dataset = dataset

    def sample(self, split: str, shape: gs.Shape, tasks: int, key: tuple[int, ...]) -> gs.Episodes:
        shape, own = whole_shape(shape), self.dataset._units.splits[split]
        names = [self.dataset.index.classes[unit].name for unit in own.units]
        order = sorted(range(len(names)), key=names.__getitem__)
        first = key[-1] * BATCH  # the last part of an evaluation's key is the number of the batch
        drawn, generator = [], np.random.default_rng(key)
        for chosen in islice(combinations(order, shape.ways), first, first + tasks):
            rows = []
            for unit in generator.permutation(chosen):  # labels are given at random
                image = generator.choice(own.counts[unit], shape.shots + shape.queries, replace=False)
                rows.append(own.rows[own.starts[unit] + image])
            drawn.append(rows)
        return episodes_from(self.dataset._pixels(np.array(drawn)), shape)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a folder of save_pretrained, or the name of one in models/")
    parser.add_argument("dataset", help="a name or a folder, as for gs.load_dataset")
    parser.add_argument("--pixels", default="unit", choices=("unit", "imagenet"))
    parser.add_argument("--tasks", type=int, default=600)
    parser.add_argument("--ways", type=int, default=5)
    parser.add_argument("--shots", type=int, default=5)
    parser.add_argument("--device", default="cpu")
    given = parser.parse_args()
    learner, state = gs.from_pretrained(given.model)
    learner, state = learner.to(given.device), state.to(given.device)
    dataset = gs.load_dataset(given.dataset, given.pixels).to(given.device)
    shape = gs.Shape(given.ways, given.shots, 15)
    for name, source in (("at random", dataset), ("in order", InOrder(dataset))):
        result = gs.evaluate(learner, state, source, shape=shape, tasks=given.tasks, batch=BATCH)
        print(
            f"{name:<10} {100 * result.accuracy:.2f} ± {100 * result.interval:.2f} %  ({given.tasks} tasks)", flush=True
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
