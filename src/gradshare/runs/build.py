"""From a configuration to a run: build the learner that a RunConfig describes, and train it."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Container
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gradshare.data.dataset import Dataset, load_dataset
from gradshare.engine.backends import Precision
from gradshare.engine.choose import Choice, apply, check_memory, choose
from gradshare.engine.networks import Conv4, ResNet12, ViT
from gradshare.engine.processes import ALONE, Group
from gradshare.errors import UserError, short_repr
from gradshare.learners import algorithms
from gradshare.learners.learner import Learner
from gradshare.method.episodes import Shape
from gradshare.method.variants import VARIANTS, first_link, imported
from gradshare.runs.config import BACKBONES, TRAINING, Log, RunConfig, recorded
from gradshare.runs.display import Display
from gradshare.runs.folder import merge_with_saved
from gradshare.runs.trackers import trackers_for
from gradshare.runs.train import Trained, train

METHODS: dict[str, Callable[..., Learner]] = {
    "maml": algorithms.maml,
    "metasgd": algorithms.meta_sgd,
    "mamlpp": algorithms.maml_plus_plus,
    "fomaml": algorithms.first_order_maml,
    "anil": algorithms.anil,
    "boil": algorithms.boil,
    "protomaml": algorithms.proto_maml,
    "reptile": algorithms.reptile,
    "metacurvature": algorithms.meta_curvature,
    "sparsemaml": algorithms.sparse_maml,
    "alfa": algorithms.alfa,
}
BY_NAME = {"metacurvature": "the matrices of Meta-Curvature", "alfa": "the network of ALFA"}  # not on packed weights


def build_learner(config: RunConfig, image: tuple[int, int, int], allowed: Container[str] = ()) -> Learner:
    """The learner that a configuration describes.

    Args:
        image: channels, height and width of the images.
        allowed: arms and backbones of the user's own, `package.module:Class`, that may be imported: those that the
            user named in this program, never one that is read from a file.
    """
    make, options = METHODS[config.method], _options(config)
    if config.method == "mamlpp":
        names = ("recipe", "multi_step_epochs", "first_order_epochs", "final_outer_rate")
        options |= {name: getattr(config, name) for name in names}
    for name in options.keys() - inspect.signature(make).parameters.keys():
        raise UserError(f"{config.method} has no choice of {name}: leave {name} out")
    return make(
        build_network(config, image, allowed),
        inner_lr=config.inner_lr,
        steps=config.steps,
        sharing=first_link(config.arm, config.norm, allowed),
        inner=config.inner,
        **options,
    )


def learner_of_shapes(config: RunConfig, image: tuple[int, int, int], allowed: Container[str] = ()) -> Learner:
    """The same learner for checks: without values, unless the network is the user's own code, which may need them."""
    with torch.device("meta") if config.backbone in BACKBONES else nullcontext():
        return build_learner(config, image, allowed)


def _options(config: RunConfig) -> dict[str, Any]:
    """What the inner loop adapts and where it starts, as far as it is not by default."""
    adapt = None if config.adapt is None else [name.strip() for name in config.adapt.split(",")]
    given = {"adapt_norm": config.adapt_norm, "adapt": adapt, "head_start": config.head_start}
    return {name: value for name, value in given.items() if value != getattr(RunConfig, name)}


def build_network(config: RunConfig, image: tuple[int, int, int], allowed: Container[str] = ()) -> nn.Module:
    """The network that a configuration names; one of the user's own draws its weights from the run's seed."""
    if config.backbone == "conv4":
        return Conv4(config.ways, config.filters, image)
    if config.backbone == "resnet12":
        return ResNet12(config.ways, image=image)
    if config.backbone == "vit":
        return ViT(config.ways, image)
    make = imported("backbone", config.backbone, allowed)
    try:
        inspect.signature(make).bind(config.ways, image)
    except (TypeError, ValueError):
        raise UserError(f"the backbone {config.backbone} cannot be called with (ways, image)") from None
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        network = make(config.ways, image)
    if not isinstance(network, nn.Module):
        raise UserError(f"the backbone {config.backbone} makes {short_repr(network)}, not a torch.nn.Module")
    return network


def choice_for(config: RunConfig, group: Group = ALONE) -> Choice:
    """Where and how a configuration computes on this machine."""
    no_kernels = _no_kernels(config)
    asked = (config.device, config.engine, config.precision, config.threads, config.deterministic)
    choice = choose(*asked, processes=group.size, local_processes=group.local_size, no_kernels=no_kernels)
    return replace(choice, apart=_apart(config))


def _apart(config: RunConfig) -> str | None:
    """What of the inner rule cannot take all weights as one vector; of a rule of the user's own it is not known."""
    link = first_link(config.arm, config.norm) if config.arm in VARIANTS else None
    if config.method in BY_NAME or link is None or link.any_layout:
        return BY_NAME.get(config.method)
    return f"the directions of {config.arm}" + (" with norm tensor" if config.norm == "tensor" else "")


def with_share(choice: Choice, config: RunConfig, image: tuple[int, int, int], allowed: Container[str] = ()) -> Choice:
    """A choice that says how much of the network is in compiled programs, where there are some."""
    own_code = choice.no_kernels is None or (config.backbone == "conv4" and not choice.on_gpu)
    if choice.engine != "compiled" and (choice.precision == "float32" or own_code):
        return choice
    precision: Precision = "bf16" if choice.precision == "bf16" else "float32"
    learner = build_learner(config, image, allowed).to("cpu", precision, compiled=True)
    y = torch.arange(config.ways).repeat(config.shots)
    return replace(choice, share=learner.programs_share(torch.zeros(1, len(y), *image), y[None]))


def _no_kernels(config: RunConfig) -> str | None:
    """Why the GPU kernels cannot run a configuration; None where they can."""
    if config.backbone != "conv4":
        return f"they know the backbone conv4, not {config.backbone}"
    if config.method == "protomaml":
        return "they know a head of one size, and that of protomaml follows the task"
    norms = [name for name in (config.adapt or "").split(",") if name.strip().startswith("norms")]
    if config.adapt_norm or norms or (config.method == "reptile" and config.adapt is None):
        return "they do not adapt batch norm"
    return None


def check_memory_for(
    config: RunConfig, image: tuple[int, int, int], device: str, processes: int = 1, allowed: Container[str] = ()
) -> None:
    """Raise an error for a run that is too large for the memory, before anything of that size is allocated.

    Counted is what every run keeps at the same time: the images of a batch, and the adapted weights of each task after
    each inner step.
    """
    learner = learner_of_shapes(config, image, allowed)
    weights = sum(learner.module.get_parameter(name).numel() for name in learner.adapted)
    batch = max(config.tasks, min(config.eval_batch, max(config.val_tasks, config.test_tasks)))
    images = batch * config.ways * (config.shots + config.queries) * math.prod(image)
    check_memory(images + config.tasks * max(config.steps, 1) * weights // processes, device)


def run(
    config: RunConfig,
    folder: Path,
    resume: bool | None,
    display: Display | bool | None,
    dataset: Dataset | None = None,
    group: Group = ALONE,
    allowed: Container[str] = (),
    log: Log | None = None,
) -> Trained:
    """Train what a configuration describes.

    Args:
        resume, display, group: as `train` has them.
        allowed: as `build_learner` has it.
        log: where else the numbers go.
    """
    trackers = trackers_for(log, folder)
    config = config if resume is False else merge_with_saved(config, folder, longer=True)
    # Several processes may resume a run that one process started with a CUDA graph, which they cannot use.
    choice = choice_for(replace(config, engine="auto") if resume and group.size > 1 else config, group)
    apply(choice)
    options = _recorded(config, choice)
    data = dataset or load_dataset(config.dataset, config.pixels)
    data.check("train", Shape(config.ways, config.shots, config.queries))  # before a network of so many ways is built
    check_memory_for(config, data.image, choice.device, group.size, allowed)
    return train(
        build_learner(config, data.image, allowed),
        data,
        folder,
        resume,
        display,
        about={name: value for name, value in options.items() if name not in TRAINING},
        device=choice.device,
        engine=choice.engine,
        precision=choice.precision,
        group=group,
        trackers=trackers,
        start=config.start,
        **{name: value for name, value in options.items() if name in TRAINING},
    )


def _recorded(config: RunConfig, choice: Choice) -> dict[str, Any]:
    """The options for config.json, with the choice in place of what was left open."""
    names = [name for name in ("device", "engine", "precision") if getattr(config, name) == "auto"]
    chosen = {name: getattr(choice, name) for name in names}
    return recorded({**asdict(config), **chosen, "threads": config.threads or choice.threads})
