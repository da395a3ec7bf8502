"""Timing a case: whole meta-iterations as training does them, from drawing the tasks to Adam's step and the memory."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from functools import lru_cache

import torch

from gradshare.bench import rivals
from gradshare.bench.cases import Case
from gradshare.bench.ceilings import synchronise
from gradshare.bench.costs import bytes_moved, operations
from gradshare.bench.results import Measurement
from gradshare.data.dataset import Dataset
from gradshare.data.store import ClassEntry, Index
from gradshare.engine.networks import Conv4
from gradshare.learners import algorithms
from gradshare.learners.graphs import GraphedPrediction, GraphedStep
from gradshare.learners.learner import Learner
from gradshare.learners.outer import meta_step, optimiser
from gradshare.method.episodes import Episodes, Shape, task_key
from gradshare.method.sharing import GradientSharing
from gradshare.method.state import MetaState
from gradshare.runs.evaluate import evaluate

METHODS: dict[str, Callable[..., Learner]] = {
    "maml": algorithms.maml,
    "metasgd": algorithms.meta_sgd,
    "mamlpp": algorithms.maml_plus_plus,
}
CLASSES = {"train": 16, "test": 8}
IMAGES = 600  # of each class, as in MiniImagenet: drawing tasks costs what it costs there
RATE, INNER_RATE = 1e-3, 0.1
WARM_UP = 2  # untimed iterations after the first
FEWEST = 3  # blocks, however little time there is
EVALUATED_AT_A_TIME = 25

Step = Callable[[Episodes], object]


def measure(
    case: Case,
    iterations: int = 20,
    blocks: int = 10,
    seconds: float = float("inf"),
    eval_tasks: int = 0,
) -> Measurement:
    """Time one case.

    Args:
        iterations: timed in all, shared out over the blocks.
        blocks: the median and the quartiles are over these.
        seconds: no further block is begun after that time, if at least three are done.
        eval_tasks: also time the evaluation of a state on so many tasks; 0 leaves it out, as for other libraries.
    """
    timing = Timing(case, max(1, iterations // blocks))
    end = time.perf_counter() + seconds
    while len(timing.times) < blocks and (len(timing.times) < FEWEST or time.perf_counter() < end):
        timing.block()
    return timing.result(eval_tasks)


class Timing:
    """A case made ready, to be timed block by block; the blocks of several cases can take turns.

    A block of several iterations is timed as a whole, from an idle device to an idle device: work that a GPU has been
    asked for and not yet done is counted, and asking ahead is allowed, as in training.
    """

    def __init__(self, case: Case, each: int) -> None:
        self.case, self._each = case, each  # iterations in a block
        self.times: list[float] = []  # seconds of one iteration, as the mean of each block
        self._dataset = synthetic(case.image, case.device)
        self._memory_before = _start_counting_memory(case.device)
        started = time.perf_counter()
        self._step, self._evaluated = prepare(case)
        self._draw = _drawing(case, self._dataset)
        self._step(self._draw(0))
        synchronise(case.device)
        self._first = time.perf_counter() - started
        for warm_up in range(WARM_UP):
            self._step(self._draw(1 + warm_up))

    def block(self) -> None:
        synchronise(self.case.device)
        started = time.perf_counter()
        for iteration in range(self._each):
            self._step(self._draw(1 + WARM_UP + self._each * len(self.times) + iteration))
        synchronise(self.case.device)
        self.times.append((time.perf_counter() - started) / self._each)

    def result(self, eval_tasks: int = 0) -> Measurement:
        case, times = self.case, self.times
        peak_allocated, peak_reserved = _peak_memory(case.device, self._memory_before)
        quartiles = statistics.quantiles(times, n=4, method="inclusive") if len(times) > 1 else times * 3
        evaluated = self._evaluated if eval_tasks else None
        return Measurement(
            case=case,
            milliseconds=1000 * quartiles[1],
            quartiles=(1000 * quartiles[0], 1000 * quartiles[2]),
            iterations=self._each * len(times),
            operations=operations(case),
            bytes_moved=bytes_moved(case),
            first_step_seconds=self._first,
            peak_allocated=peak_allocated,
            peak_reserved=peak_reserved,
            eval_tasks=eval_tasks if evaluated else 0,
            eval_seconds=_evaluation_seconds(case, self._dataset, *evaluated, eval_tasks) if evaluated else None,
        )


def prepare(case: Case) -> tuple[Step, tuple[Learner, MetaState] | None]:
    """One meta-iteration as a function of its tasks; and, if ours, what can be evaluated."""
    if case.library != "gradshare":
        return rivals.meta_step(case, RATE, INNER_RATE), None
    learner, state = build(case)
    adam = optimiser(state, RATE)
    if case.engine == "graph":
        return GraphedStep(learner, state, adam), (learner, state)
    return lambda episodes: meta_step(learner, state, adam, episodes), (learner, state)


def build(case: Case) -> tuple[Learner, MetaState]:
    """Our learner and its state, on the device of the case."""
    sharing = GradientSharing() if case.arm == "shared" else None
    model = Conv4(case.ways, case.filters, case.image)
    learner = METHODS[case.method](model, inner_lr=INNER_RATE, steps=case.steps, sharing=sharing)
    learner = learner.to(case.device) if case.precision == "float32" else learner.to(case.device, case.precision)
    return learner, learner.init(seed=0)


@lru_cache(maxsize=1)
def synthetic(image: tuple[int, int, int], device: str) -> Dataset:
    """A data set of random images, held on the device as real ones are, uint8."""
    channels, height, width = image
    entries = [ClassEntry(f"{split}-{i}", split, IMAGES) for split, count in CLASSES.items() for i in range(count)]
    index = Index("synthetic", (height, width, channels), entries, "none", "random numbers")
    generator = torch.Generator(device).manual_seed(0)
    images = torch.randint(0, 256, (index.images, *index.image), dtype=torch.uint8, device=device, generator=generator)
    return Dataset(index, images.numpy() if device == "cpu" else images)


def _drawing(case: Case, dataset: Dataset) -> Callable[[int], Episodes]:
    shape = Shape(case.ways, case.shots, case.queries)

    def draw(iteration: int) -> Episodes:
        key = task_key(0, "train", iteration=iteration)
        return dataset.sample("train", shape, case.tasks, key).to(case.device)

    return draw


def _evaluation_seconds(case: Case, dataset: Dataset, learner: Learner, state: MetaState, tasks: int) -> float:
    """Time of the second evaluation: the first also loads what it needs."""
    shape = Shape(case.ways, case.shots, case.queries)
    predict = GraphedPrediction(learner) if case.engine == "graph" else None
    for count in (min(tasks, EVALUATED_AT_A_TIME), tasks):
        synchronise(case.device)
        started = time.perf_counter()
        evaluate(learner, state, dataset, "test", shape, count, seed=0, batch=EVALUATED_AT_A_TIME, predict=predict)
        synchronise(case.device)
    return time.perf_counter() - started


def _start_counting_memory(device: str) -> tuple[int, int]:
    """What is allocated and reserved on a GPU now: the data set."""
    if torch.device(device).type != "cuda":
        return 0, 0
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated(), torch.cuda.memory_reserved()


def _peak_memory(device: str, before: tuple[int, int]) -> tuple[int, int] | tuple[None, None]:
    """Bytes that a GPU had allocated and reserved at the peak, without the data set; None on a CPU."""
    if torch.device(device).type != "cuda":
        return None, None
    return torch.cuda.max_memory_allocated() - before[0], torch.cuda.max_memory_reserved() - before[1]
