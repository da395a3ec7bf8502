"""How long runs will take on this machine.

The real training is timed on random pixels, for as many of the wanted shapes (method, shots, tasks, ...) as fit into
`BUDGET` seconds, the smallest first. The others are scaled by operations from the timed shape of the nearest size.
Operations are proportional to the images that go through the convolutions. In training, a support image in an inner
step counts 5 and a query image 3; in evaluation 3 and 2. These weights fit the timings of four shapes (1 and 5 shots,
1 and 5 tasks) on a CPU.
"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Container, Iterable, Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import torch

from gradshare.data.dataset import Dataset
from gradshare.data.store import ClassEntry, Index
from gradshare.learners.algorithms import RECIPES
from gradshare.runs.build import choice_for, run
from gradshare.runs.config import RunConfig
from gradshare.runs.display import Silent
from gradshare.runs.workers import HardStop, Interrupted

BUDGET = 10.0  # seconds
Image = tuple[int, int, int]  # channels, height, width
Sized = tuple[RunConfig, Image]  # a run to be timed, and the size of its images


class Measured(NamedTuple):
    """The seconds of one shape."""

    iteration: float
    evaluated_task: float


class Stopwatch(Silent):
    """The display of a run: the time of every iteration and of every batch of evaluated tasks."""

    def __init__(self) -> None:
        self.iterations: list[tuple[int, float]] = []
        self.evaluated: list[tuple[int, float]] = []

    def iteration(self, epoch: int, iteration: int, loss: float, accuracy: float | None) -> None:
        self.iterations.append((iteration, time.monotonic()))

    def evaluating(self, split: str, done: int, total: int) -> None:
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()  # a GPU works on after the call
        self.evaluated.append((done, time.monotonic()))

    def timing(self) -> Measured:
        return Measured(_each(self.iterations), _each(self.evaluated))


def _each(moments: list[tuple[int, float]]) -> float:
    """Seconds of one, the fastest of all but the first, which includes the warm-up."""
    return min((end - start) / (after - before) for (before, start), (after, end) in pairwise(moments))


def estimates(configs: Iterable[tuple[RunConfig, Image]], allowed: Container[str] = ()) -> list[float]:
    """Seconds that each run will take on this machine, with the threads of its configuration.

    Args:
        allowed: backbones of the user's own that may be imported.
    """
    wanted = [(config, (_shape(config), image)) for config, image in configs]
    timed: dict[Sized, Measured] = {}
    started = time.monotonic()
    for size in _sizes([size for _, size in wanted]):
        spent = time.monotonic() - started
        if timed and spent + spent / len(timed) * step_work(*size) / step_work(*list(timed)[-1]) > BUDGET:
            break
        timed[size] = _time(*size, allowed)
    return [_seconds(config, size, timed) for config, size in wanted]


def _sizes(wanted: list[Sized]) -> list[Sized]:
    """The shapes to time, the smallest first. One shot of one task is added, so that the first takes little time."""
    smallest, image = min(wanted, key=lambda size: step_work(*size))
    sizes = {*wanted, (replace(smallest, shots=1, tasks=1), image)}
    return sorted(sizes, key=lambda size: step_work(*size))


def _seconds(config: RunConfig, size: Sized, timed: dict[Sized, Measured]) -> float:
    image = size[1]
    near = min(timed, key=lambda other: (other != size, abs(math.log(step_work(*other) / step_work(*size)))))
    iteration = timed[near].iteration * step_work(*size) / step_work(*near)
    evaluated = timed[near].evaluated_task * task_work(*size) / task_work(*near)
    multi = min(_multi_step_epochs(config), config.epochs)
    longer = step_work(config, image, query_passes=config.steps) / step_work(config, image)
    iterations = config.iterations * (multi * longer + config.epochs - multi)
    ensemble = min(5, config.epochs)
    tasks = config.epochs * config.val_tasks + (1 + ensemble) * config.test_tasks
    return iterations * iteration + tasks * evaluated


def _multi_step_epochs(config: RunConfig) -> int:
    if config.method != "mamlpp":
        return 0
    given = config.multi_step_epochs
    return RECIPES[config.recipe].multi_step_epochs if given is None else given


def step_work(config: RunConfig, image: Image, query_passes: int = 1) -> float:
    """Operations of a meta-iteration; `query_passes`: inner steps whose query loss counts."""
    images = 5 * config.steps * config.shots + 3 * query_passes * config.queries
    return config.tasks * config.ways * images * _forward(config, image)


def task_work(config: RunConfig, image: Image) -> float:
    """Operations of adapting to a task and evaluating it."""
    return config.ways * (3 * config.steps * config.shots + 2 * config.queries) * _forward(config, image)


def _forward(config: RunConfig, image: Image) -> float:
    """Multiplications of the four convolutions for one image; of another network than conv4, its pixels."""
    channels, height, width = image
    if config.backbone != "conv4":  # only ratios matter
        return math.prod(image)
    total = 0
    for layer in range(4):
        total += 9 * max(1, height >> layer) * max(1, width >> layer) * channels * config.filters
        channels = config.filters
    return total


def _shape(config: RunConfig) -> RunConfig:
    """What is timed for a run. Runs whose iterations cost the same have the same shape."""
    return replace(
        config, dataset="", arm="shared", norm="global", inner_lr=0.1, outer_lr=1e-3, gates=1.0, gradient_clamp=0.0,
        pixels="unit", multi_step_epochs=0, first_order_epochs=0, final_outer_rate=1.0, seed=0, epochs=1, iterations=3,
        val_tasks=2, eval_batch=1, test_tasks=0, start=None,
    )  # fmt: skip


def _time(shape: RunConfig, image: Image, allowed: Container[str] = ()) -> Measured:
    if choice_for(shape).on_gpu:  # it is fast, and displays every 20th iteration
        shape = replace(shape, iterations=21, val_tasks=50, eval_batch=25)
    stopwatch = Stopwatch()
    dataset = random_images(image, {"train": shape.ways, "val": shape.ways}, shape.shots + shape.queries)
    with tempfile.TemporaryDirectory() as folder:
        try:
            run(shape, Path(folder) / "run", False, stopwatch, dataset, allowed=allowed)
        except Interrupted:  # there is nothing worth saving
            raise HardStop from None
    return stopwatch.timing()


def random_images(image: Image, classes: Mapping[str, int], each: int, device: str = "cpu") -> Dataset:
    """A data set of random pixels with so many classes of each split, and so many images of each class."""
    channels, height, width = image
    entries = [
        ClassEntry(f"{split} {number}", split, each) for split, some in classes.items() for number in range(some)
    ]
    index = Index("random pixels", (height, width, channels), tuple(entries), "none", "random numbers")
    generator = torch.Generator(device).manual_seed(0)
    pixels = torch.randint(0, 256, (index.images, *index.image), dtype=torch.uint8, device=device, generator=generator)
    return Dataset(index, pixels.numpy() if device == "cpu" else pixels)
