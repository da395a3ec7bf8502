"""Gradient-based meta-learning that shares gradients between tasks.

Names are imported when first used, so that the command line can answer without loading PyTorch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.2.0"

_HOME = {
    "learners.algorithms": [
        "alfa",
        "anil",
        "boil",
        "first_order_maml",
        "maml",
        "maml_plus_plus",
        "meta_curvature",
        "meta_sgd",
        "proto_maml",
        "reptile",
        "sparse_maml",
    ],
    "engine.networks": ["Conv4", "ResNet12", "ViT"],
    "runs.config": ["RunConfig", "Training"],
    "method.controls": ["BatchOnly", "GateOnly", "MemoryOnly"],
    "data.dataset": ["Dataset", "load_dataset"],
    "data.tasks": ["tasks"],
    "engine.processes": ["Group"],
    "method.episodes": ["Episodes", "Shape", "TaskSource"],
    "errors": ["UserError"],
    "runs.evaluate": ["Evaluation", "evaluate"],
    "method.inner_optimisers": ["adam", "head_rate", "momentum"],
    "method.rules": [
        "InnerRule",
        "InnerStep",
        "Moved",
        "chain",
        "rate_per_element",
        "rate_per_tensor_and_step",
        "scale",
        "stop_gradient",
    ],
    "learners.graphs": ["compiled_step"],
    "learners.learner": ["Learner", "Outcome"],
    "learners.optimisers": ["optimiser"],
    "learners.outer": ["meta_step"],
    "runs.export": ["from_pretrained", "load_run", "save_pretrained"],
    "method.sharing": ["GradientSharing", "share_by_agreement", "share_gradients"],
    "method.state": ["MetaState"],
    "runs.torchrun": ["processes"],
    "runs.train": ["train"],
}
_MODULE = {name: module for module, names in _HOME.items() for name in names}
_MODULES = {"testing": "method.testing"}  # modules that are public names themselves
__all__ = sorted([*_MODULE, *_MODULES])

if TYPE_CHECKING:
    from gradshare.data.dataset import Dataset, load_dataset
    from gradshare.data.tasks import tasks
    from gradshare.engine.networks import Conv4, ResNet12, ViT
    from gradshare.engine.processes import Group
    from gradshare.errors import UserError
    from gradshare.learners.algorithms import (
        alfa,
        anil,
        boil,
        first_order_maml,
        maml,
        maml_plus_plus,
        meta_curvature,
        meta_sgd,
        proto_maml,
        reptile,
        sparse_maml,
    )
    from gradshare.learners.graphs import compiled_step
    from gradshare.learners.learner import Learner, Outcome
    from gradshare.learners.optimisers import optimiser
    from gradshare.learners.outer import meta_step
    from gradshare.method import testing
    from gradshare.method.controls import BatchOnly, GateOnly, MemoryOnly
    from gradshare.method.episodes import Episodes, Shape, TaskSource
    from gradshare.method.inner_optimisers import adam, head_rate, momentum
    from gradshare.method.rules import (
        InnerRule,
        InnerStep,
        Moved,
        chain,
        rate_per_element,
        rate_per_tensor_and_step,
        scale,
        stop_gradient,
    )
    from gradshare.method.sharing import GradientSharing, share_by_agreement, share_gradients
    from gradshare.method.state import MetaState
    from gradshare.runs.config import RunConfig, Training
    from gradshare.runs.evaluate import Evaluation, evaluate
    from gradshare.runs.export import from_pretrained, load_run, save_pretrained
    from gradshare.runs.torchrun import processes
    from gradshare.runs.train import train


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f"gradshare.{_MODULES[name]}")
    if name not in _MODULE:
        raise AttributeError(f"module 'gradshare' has no attribute '{name}'")
    value = globals()[name] = getattr(import_module(f"gradshare.{_MODULE[name]}"), name)
    return value


def __dir__() -> list[str]:
    return [*globals(), *__all__]
