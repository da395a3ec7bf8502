"""Runs by configuration: build what a RunConfig describes, train it, load it again."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch

from gradshare import algorithms, checkpoints, kernels
from gradshare.backbones import Conv4
from gradshare.config import Arm, RunConfig, Training, read_config, run_config
from gradshare.controls import BatchOnly, GateOnly, MemoryOnly
from gradshare.data.dataset import Dataset, load_dataset
from gradshare.distributed import ALONE, Group
from gradshare.errors import UserError
from gradshare.learner import Learner, MetaState, Precision
from gradshare.run_folder import best_epochs
from gradshare.sharing import GradientSharing
from gradshare.training import Display, Trained, train

METHODS: dict[str, Callable[..., Learner]] = {
    "maml": algorithms.maml,
    "metasgd": algorithms.meta_sgd,
    "mamlpp": algorithms.maml_plus_plus,
    "fomaml": algorithms.first_order_maml,
    "anil": algorithms.anil,
}


def first_link(arm: Arm, norm: Any) -> algorithms.FirstLink | None:
    """What the arm of a comparison has as first link of its inner loop."""
    links: dict[str, algorithms.FirstLink] = {
        "shared": GradientSharing(norm),
        "gate-only": GateOnly(),
        "batch-only": BatchOnly(norm),
        "memory-only": MemoryOnly(norm),
    }
    return links.get(arm)


def build_learner(config: RunConfig, image: tuple[int, int, int]) -> Learner:
    """The learner that a configuration describes, for images of [C, H, W]."""
    options: dict[str, Any] = {}
    if config.method == "mamlpp":
        names = ("recipe", "multi_step_epochs", "first_order_epochs", "final_outer_rate")
        options = {name: getattr(config, name) for name in names}
    if config.method != "anil":
        options["adapt_norm"] = config.adapt_norm
    elif config.adapt_norm:
        raise UserError("anil adapts the head alone: leave adapt_norm out")
    return METHODS[config.method](
        Conv4(config.ways, config.filters, image),
        inner_lr=config.inner_lr,
        steps=config.steps,
        sharing=first_link(config.arm, config.norm),
        **options,
    )


def run(
    config: RunConfig,
    folder: Path,
    resume: bool,
    display: Display,
    dataset: Dataset | None = None,
    group: Group = ALONE,
) -> Trained:
    """Train what a configuration describes."""
    config = settle(config, group)
    data = (dataset or load_dataset(config.dataset, config.pixels)).to(config.device)
    names = {field.name for field in fields(Training)}
    training = {name: value for name, value in asdict(config).items() if name in names}
    about = {name: value for name, value in asdict(config).items() if name not in names}
    learner = build_learner(config, data.image)
    engine = "eager" if resume and group.size > 1 else config.engine  # a run that one process began may have a graph
    return train(
        learner, data, folder, resume, display, about, config.device, engine, decided(config), group, **training
    )


def settle(config: RunConfig, group: Group = ALONE) -> RunConfig:
    """Decide what the configuration leaves to the machine, and set the process up for it."""
    if config.device == "cuda" and not torch.cuda.is_available():
        raise UserError("device 'cuda' is not there: PyTorch sees no GPU; use --device cpu")
    device = ("cuda" if torch.cuda.is_available() else "cpu") if config.device == "auto" else config.device
    if device == "cuda" and group.local_size > torch.cuda.device_count() and group.size > 1:
        raise UserError(f"{group.local_size} processes on {torch.cuda.device_count()} GPUs: each needs one of its own")
    recorded = device == "cuda" and group.size == 1
    engine = ("graph" if recorded else "eager") if config.engine == "auto" else config.engine
    cores = max(1, (os.cpu_count() or 1) // group.local_size)
    config = replace(config, device=device, engine=engine, threads=config.threads or cores)
    reason = _lacking(config)
    if config.precision == "auto":
        config = replace(config, precision="tf32" if reason is None else "float32")
    elif config.precision != "float32" and reason is not None:
        raise UserError(f"precision {config.precision} needs the GPU kernels, and {reason}: use --precision float32")
    # Processes with more threads than cores between them spin against each other, whatever a run that one began says.
    torch.set_num_threads(config.threads if group.size == 1 else min(config.threads, cores))
    if sys.platform == "linux" and config.device == "cpu":
        # glibc returns large blocks to the system at once, and the next use pays a page fault for every 4 KiB: twice
        # the time of a meta-iteration at 48 filters. M_MMAP_MAX = 0 and a high M_TRIM_THRESHOLD keep them.
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
        if mallopt is not None:
            mallopt(-4, 0)
            mallopt(-1, 2**31 - 1)
    return config


def _lacking(config: RunConfig) -> str | None:
    """Why our GPU kernels cannot run a configuration; None where they can. The learner has the last word."""
    if config.device != "cuda":
        return "there is no GPU in use"
    if config.method == "anil":
        return "they adapt all filters and the head, and anil the head alone"
    if config.adapt_norm:
        return "they do not adapt batch norm"
    return kernels.not_installed()


def decided(config: RunConfig) -> Precision:
    assert config.precision != "auto", "settle() decides it"
    return config.precision


def setting(config: RunConfig, group: Group = ALONE) -> str:
    """Where and how a settled configuration computes, in one line."""
    several = "" if group.size == 1 else f"{group.size} processes, each "
    if config.device == "cpu":
        threads = torch.get_num_threads()
        return f"{several}on the CPU, {threads} thread{'s' * (threads > 1)}, float32"
    engine = "one CUDA graph a meta-iteration" if config.engine == "graph" else "operation by operation"
    reason = _lacking(config)
    if config.precision != "float32":
        how = f"our kernels in {config.precision}; weights, sums and statistics in float32"
    elif reason is None:
        how = "PyTorch's operations in float32, as asked"
    else:
        how = f"PyTorch's operations in float32, not our kernels: {reason}"
    return f"{several}on {torch.cuda.get_device_name()}, {engine}, {how}"


@dataclass(frozen=True)
class SavedRun:
    """A run folder, finished or not, opened for use."""

    folder: Path
    config: dict[str, Any]
    metrics: list[dict[str, Any]]

    @property
    def best_epochs(self) -> list[int]:
        """The best epochs by validation, best first; their checkpoints are kept."""
        return best_epochs(self.metrics)

    @property
    def run_config(self) -> RunConfig:
        if "method" not in self.config:
            raise UserError(f"the model of the run in {self.folder} is your own: build its learner in code")
        return run_config(self.config, self.folder)

    def learner(self) -> Learner:
        """The learner, where the command line made the run."""
        return build_learner(self.run_config, load_dataset(self.run_config.dataset).image)

    def state(self, epoch: int | None = None) -> MetaState:
        """The state after an epoch; None is the best one."""
        if not self.metrics:
            raise UserError(f"the run in {self.folder} has not finished an epoch yet")
        epoch = self.best_epochs[0] if epoch is None else epoch
        path = checkpoints.of_epoch(self.folder / "checkpoints", epoch)
        if not path.exists():
            kept = ", ".join(kept.name for kept in checkpoints.listing(self.folder / "checkpoints"))
            raise UserError(f"the checkpoint of epoch {epoch} is not kept; there are {kept}")
        tensors = checkpoints.load(path)[1]
        return MetaState.of(
            {name: t for name, t in tensors.items() if name.startswith(("params/", "learned/", "memory/"))}
        )


def load_run(folder: str | Path) -> SavedRun:
    """Open a run folder.

    Then `run.learner()` and `run.state()` adapt and predict as in training.
    """
    folder = Path(folder)
    config = read_config(folder)
    newest = checkpoints.newest(folder / "checkpoints")
    return SavedRun(folder, config, newest[0].metrics if newest else [])
