"""Time cases: whole meta-iterations as in training, from drawing the tasks to the step of Adam and the memory.

A case that fails is reported, and the others are timed.
"""

from __future__ import annotations

import gc
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Self, TypeVar

import torch
from torch import nn

from gradshare import __version__
from gradshare.bench import rivals
from gradshare.bench.cases import Case, Precision
from gradshare.bench.results import Failure, Machine, Measurement, Results
from gradshare.bench.roofline import bytes_moved, ceilings, operations, synchronise
from gradshare.data.dataset import Dataset
from gradshare.engine.networks import Conv4
from gradshare.errors import UserError
from gradshare.experiments.estimate import random_images
from gradshare.learners import algorithms
from gradshare.learners.graphs import GraphedPrediction, GraphedStep
from gradshare.learners.learner import Learner
from gradshare.learners.optimisers import optimiser
from gradshare.learners.outer import meta_step
from gradshare.method.episodes import Episodes, Shape, task_key
from gradshare.method.sharing import GradientSharing
from gradshare.method.state import MetaState
from gradshare.runs.build import METHODS as ALGORITHMS
from gradshare.runs.build import build_network, check_memory_for
from gradshare.runs.config import RunConfig
from gradshare.runs.evaluate import evaluate

METHODS: dict[str, Callable[..., Learner]] = {
    **ALGORITHMS,
    "momentum": partial(algorithms.maml, inner="momentum"),
    "adam": partial(algorithms.maml, inner="adam"),
    "adaptnorm": partial(algorithms.maml, adapt_norm=True),
}
CLASSES = {"train": 16, "test": 8}
IMAGES = 600  # of each class, as in MiniImagenet, so that drawing tasks costs the same
RATE, INNER_RATE = 1e-3, 0.1
WARM_UP = 2  # iterations after the first that are not timed
FEWEST = 3  # blocks that are always timed
EVALUATED_AT_A_TIME = 25

T = TypeVar("T")
Step = Callable[[Episodes], object]
Report = Callable[[Measurement | Failure], None]


class Timing:
    """A case that is ready to be timed block by block, so that several cases can take turns.

    A block of several iterations is timed as a whole, from an idle device to an idle device. So all work of a GPU is
    counted, and launching ahead is allowed, as in training.
    """

    def __init__(self, case: Case, each: int) -> None:
        self.case, self._each = case, each  # iterations of a block
        self.times: list[float] = []  # seconds of one iteration: the mean of each block
        gc.collect()  # frees the recorded steps of earlier cases and their buffers
        _check_memory(case)
        self._shape = Shape(case.ways, case.shots, case.queries)
        self._dataset = synthetic(case.image, case.device)
        self._memory_before = _start_counting_memory(case.device)
        started = time.perf_counter()
        self._step, self._evaluated = prepare(case)
        self._step(self._draw(0))
        synchronise(case.device)
        self.first_step_seconds = time.perf_counter() - started
        for warm_up in range(WARM_UP):
            self._step(self._draw(1 + warm_up))

    def _draw(self, iteration: int) -> Episodes:
        key = task_key(0, "train", iteration=iteration)
        return self._dataset.sample("train", self._shape, self.case.tasks, key).to(self.case.device)

    def block(self) -> Self:
        """Time one block."""
        synchronise(self.case.device)
        started = time.perf_counter()
        for iteration in range(self._each):
            self._step(self._draw(1 + WARM_UP + self._each * len(self.times) + iteration))
        synchronise(self.case.device)
        self.times.append((time.perf_counter() - started) / self._each)
        return self

    def result(self, eval_tasks: int) -> Measurement:
        """Return the measurement; `eval_tasks` as in `run`."""
        case, times = self.case, self.times
        peak_allocated, peak_reserved = _peak_memory(case.device, self._memory_before)
        quartiles = statistics.quantiles(times, n=4, method="inclusive") if len(times) > 1 else times * 3
        evaluated = self._evaluated if eval_tasks else None
        return Measurement(
            case=case,
            milliseconds=1000 * quartiles[1],
            quartiles=(1000 * quartiles[0], 1000 * quartiles[2]),
            iterations=self._each * len(times),
            operations=operations(case) if case.backbone == "conv4" else None,
            bytes_moved=bytes_moved(case) if case.backbone == "conv4" else None,
            first_step_seconds=self.first_step_seconds,
            peak_allocated=peak_allocated,
            peak_reserved=peak_reserved,
            eval_tasks=eval_tasks if evaluated else 0,
            eval_seconds=self._evaluation_seconds(*evaluated, eval_tasks) if evaluated else None,
        )

    def _evaluation_seconds(self, learner: Learner, state: MetaState, tasks: int) -> float:
        """Return the seconds of the second evaluation: the first one also compiles and loads."""
        predict = GraphedPrediction(learner) if self.case.engine == "graph" else None
        which = (learner, state, self._dataset, "test", self._shape)
        for count in (min(tasks, EVALUATED_AT_A_TIME), tasks):
            synchronise(self.case.device)
            started = time.perf_counter()
            evaluate(*which, count, seed=0, batch=EVALUATED_AT_A_TIME, predict=predict)
            synchronise(self.case.device)
        return time.perf_counter() - started


def _check_memory(case: Case) -> None:
    """Raise an error for a case that is too large for the memory, before anything of that size is allocated."""
    names = ("ways", "shots", "queries", "tasks", "steps", "filters")
    config = RunConfig(**{name: getattr(case, name) for name in names}, val_tasks=2, test_tasks=2)
    if case.backbone != "conv4":
        config = replace(config, filters=RunConfig.filters, backbone=case.backbone)
    check_memory_for(config, case.image, case.device, allowed={case.backbone})


def prepare(case: Case) -> tuple[Step, tuple[Learner, MetaState] | None]:
    """Return one meta-iteration as a function of its tasks and, for our library, learner and state."""
    if case.library != "gradshare":
        return rivals.meta_step(case, network(case), RATE, INNER_RATE), None
    learner, state = build(case)
    adam = optimiser(state, RATE)
    if case.engine == "graph":
        return GraphedStep(learner, state, adam, checkpoint=case.checkpoint), (learner, state)
    return lambda episodes: meta_step(learner, state, adam, episodes, checkpoint=case.checkpoint), (learner, state)


def build(case: Case) -> tuple[Learner, MetaState]:
    """Return our learner and its state, on the device of the case."""
    sharing = GradientSharing() if case.arm == "shared" else None
    learner = METHODS[case.method](network(case), inner_lr=INNER_RATE, steps=case.steps, sharing=sharing)
    learner = learner.to(case.device, case.precision, compiled=case.engine == "compiled")
    return learner, learner.init(seed=0)


def network(case: Case) -> nn.Module:
    """The case's network, with its own initial weights."""
    if case.backbone == "conv4":
        return Conv4(case.ways, case.filters, case.image)
    return build_network(RunConfig(ways=case.ways, backbone=case.backbone), case.image, {case.backbone})


@lru_cache(maxsize=1)
def synthetic(image: tuple[int, int, int], device: str) -> Dataset:
    """Return a data set of random images, on the device, as a real one would be."""
    return random_images(image, CLASSES, IMAGES, device)


def _start_counting_memory(device: str) -> tuple[int, int]:
    """Return the bytes that a GPU has allocated and reserved now, for the data set."""
    if torch.device(device).type != "cuda":
        return 0, 0
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated(), torch.cuda.memory_reserved()


def _peak_memory(device: str, before: tuple[int, int]) -> tuple[int, int] | tuple[None, None]:
    """Return the bytes that a GPU had allocated and reserved at the peak, without the data set; None on a CPU."""
    if torch.device(device).type != "cuda":
        return None, None
    return torch.cuda.max_memory_allocated() - before[0], torch.cuda.max_memory_reserved() - before[1]


def begin(device: str, precisions: tuple[Precision, ...], sweep: str | None = None, **sizes: int) -> Results:
    """Return results with the machine and its measured ceilings, and no case yet."""
    on_gpu = torch.device(device).type == "cuda"
    needed: tuple[Precision, ...] = (*precisions, "tf32") if on_gpu else precisions
    return Results(machine(device), ceilings(device, needed, **sizes), sweep=sweep)


def run(
    cases: list[Case],
    results: Results,
    path: Path | None = None,
    report: Report = lambda outcome: None,
    progress: Callable[[int, int], object] = lambda done, total: None,
    iterations: int = 20,
    blocks: int = 10,
    seconds: float = float("inf"),
    eval_tasks: int = 0,
) -> None:
    """Time one block of each case in turn, so that slow moments of a shared machine affect all cases.

    All cases are in memory at the same time: on a GPU, time one after the other.

    Args:
        path: JSON file for the results, written after each; None: no file.
        report: called with every outcome.
        progress: called with the number of finished rounds and of all rounds.
        iterations: the number of timed meta-iterations, divided into blocks.
        blocks: the number of blocks; median and quartiles are taken over them.
        seconds: no new round begins after this time, once three are done.
        eval_tasks: also time the evaluation of this many tasks, with our library; 0: do not.
    """
    timed = [_attempt(case, partial(Timing, case, max(1, iterations // blocks))) for case in cases]
    end = time.perf_counter() + seconds
    for done in range(blocks):
        if done >= FEWEST and time.perf_counter() >= end:
            break
        progress(done, blocks)
        timed = [one if isinstance(one, Failure) else _attempt(one.case, one.block) for one in timed]
    for one in timed:
        outcome = one if isinstance(one, Failure) else _attempt(one.case, partial(one.result, eval_tasks))
        results.add(outcome)
        report(outcome)
        if path is not None:
            results.save(path)


def _attempt(case: Case, work: Callable[[], T]) -> T | Failure:
    try:
        return work()
    except UserError as error:
        return Failure(case, str(error))
    except Exception as error:  # out of memory, or a kernel that does not compile: time the other cases
        return Failure(case, " ".join(f"{type(error).__name__}: {error}".split())[:300])


def machine(device: str) -> Machine:
    """Describe this machine."""
    on_gpu = torch.device(device).type == "cuda"
    return Machine(
        device=torch.cuda.get_device_name() if on_gpu else _processor(),
        threads=torch.get_num_threads(),
        torch=torch.__version__,
        cuda=torch.version.cuda if on_gpu else None,
        python=platform.python_version(),
        gradshare=__version__,
        rivals=rivals.versions(),
        date=time.strftime("%Y-%m-%d"),
    )


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
