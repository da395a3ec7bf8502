"""Runs by configuration: build what a RunConfig describes, and train it."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import torch

from gradshare.data.dataset import Dataset, load_dataset
from gradshare.engine.conv4 import triton as kernels
from gradshare.engine.networks import Conv4
from gradshare.engine.processes import ALONE, Group
from gradshare.errors import UserError
from gradshare.learners import algorithms
from gradshare.learners.learner import Learner, Precision
from gradshare.method.controls import BatchOnly, GateOnly, MemoryOnly
from gradshare.method.sharing import GradientSharing
from gradshare.runs.config import Arm, RunConfig, Training, taken_up
from gradshare.runs.display import Display
from gradshare.runs.training import Trained, train
from gradshare.runs.workers import own_cores

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
        "conditioned": GradientSharing(norm, conditioned=True),
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
    resume: bool | None,
    display: Display,
    dataset: Dataset | None = None,
    group: Group = ALONE,
) -> Trained:
    """Train what a configuration describes; `resume` as `train` has it."""
    config = settle(config if resume is False else taken_up(config, folder, longer=True), group)
    data = (dataset or load_dataset(config.dataset, config.pixels)).to(config.device)
    names = {field.name for field in fields(Training)}
    training = {name: value for name, value in asdict(config).items() if name in names}
    about = {name: value for name, value in asdict(config).items() if name not in names}
    if not config.deterministic:
        del about["deterministic"]  # runs begun before there was this option are without it, and resumed all the same
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
    cores = max(1, own_cores() // group.local_size)
    config = replace(config, device=device, engine=engine, threads=config.threads or cores)
    reason = _lacking(config)
    if config.precision == "auto":
        config = replace(config, precision="tf32" if reason is None else "float32")
    elif config.precision != "float32" and reason is not None:
        raise UserError(f"precision {config.precision} needs the GPU kernels, and {reason}: use --precision float32")
    # Processes with more threads than cores between them spin against each other, whatever a run that one began says.
    torch.set_num_threads(config.threads if group.size == 1 else min(config.threads, cores))
    if config.device == "cuda":
        _be_deterministic(config.deterministic)
    if sys.platform == "linux" and config.device == "cpu":
        # glibc returns large blocks to the system at once, and the next use pays a page fault for every 4 KiB: twice
        # the time of a meta-iteration at 48 filters. M_MMAP_MAX = 0 and a high M_TRIM_THRESHOLD keep them.
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
        if mallopt is not None:
            mallopt(-4, 0)
            mallopt(-1, 2**31 - 1)
    return config


def _be_deterministic(asked: bool) -> None:
    """Have PyTorch choose algorithms on the GPU that give the same bits each time; or whichever it likes."""
    if asked:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS is first used
        torch.backends.cudnn.benchmark = False
    torch.use_deterministic_algorithms(asked)


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
        same = "; the same bits in every run, as always on a CPU" if config.deterministic else ""
        return f"{several}on the CPU, {threads} thread{'s' * (threads > 1)}, float32{same}"
    engine = "one CUDA graph a meta-iteration" if config.engine == "graph" else "operation by operation"
    reason = _lacking(config)
    if config.precision != "float32":
        how = f"our kernels in {config.precision}; weights, sums and statistics in float32"
    elif reason is None:
        how = "PyTorch's operations in float32, as asked"
    else:
        how = f"PyTorch's operations in float32, not our kernels: {reason}"
    same = "; the same bits in every run" if config.deterministic else ""
    return f"{several}on {torch.cuda.get_device_name()}, {engine}, {how}{same}"
