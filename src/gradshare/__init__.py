"""Gradient-based meta-learning that shares gradients between tasks.

Names are imported when first used, so that the command line can answer without loading PyTorch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOME = {
    "algorithms": ["anil", "first_order_maml", "maml", "maml_plus_plus", "meta_sgd"],
    "backbones": ["Conv4"],
    "conditioned": ["share_by_agreement"],
    "config": ["RunConfig", "Training"],
    "controls": ["BatchOnly", "GateOnly", "MemoryOnly"],
    "data.dataset": ["Dataset", "load_dataset"],
    "distributed": ["Group"],
    "episodes": ["Episodes", "Shape", "TaskSource"],
    "errors": ["UserError"],
    "evaluation": ["Evaluation", "evaluate"],
    "inner": ["InnerRule", "chain", "rate_per_element", "rate_per_tensor_and_step", "scale", "stop_gradient"],
    "learner": ["Learner", "Outcome"],
    "outer": ["meta_step", "optimiser"],
    "pretrained": ["from_pretrained", "save_pretrained"],
    "saved": ["load_run"],
    "sharing": ["GradientSharing", "share_gradients"],
    "state": ["MetaState"],
    "torchrun": ["processes"],
    "training": ["train"],
}
_MODULE = {name: module for module, names in _HOME.items() for name in names}
__all__ = sorted(_MODULE)

if TYPE_CHECKING:
    from gradshare.algorithms import anil, first_order_maml, maml, maml_plus_plus, meta_sgd
    from gradshare.backbones import Conv4
    from gradshare.conditioned import share_by_agreement
    from gradshare.config import RunConfig, Training
    from gradshare.controls import BatchOnly, GateOnly, MemoryOnly
    from gradshare.data.dataset import Dataset, load_dataset
    from gradshare.distributed import Group
    from gradshare.episodes import Episodes, Shape, TaskSource
    from gradshare.errors import UserError
    from gradshare.evaluation import Evaluation, evaluate
    from gradshare.inner import InnerRule, chain, rate_per_element, rate_per_tensor_and_step, scale, stop_gradient
    from gradshare.learner import Learner, Outcome
    from gradshare.outer import meta_step, optimiser
    from gradshare.pretrained import from_pretrained, save_pretrained
    from gradshare.saved import load_run
    from gradshare.sharing import GradientSharing, share_gradients
    from gradshare.state import MetaState
    from gradshare.torchrun import processes
    from gradshare.training import train


def __getattr__(name: str) -> Any:
    if name not in _MODULE:
        raise AttributeError(f"module 'gradshare' has no attribute '{name}'")
    value = globals()[name] = getattr(import_module(f"gradshare.{_MODULE[name]}"), name)
    return value


def __dir__() -> list[str]:
    return [*globals(), *__all__]
