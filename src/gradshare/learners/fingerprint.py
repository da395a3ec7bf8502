"""The fingerprint of a learner: what a run from Python was trained with, as plain values in config.json.

It names the algorithm, the rule, the rates, the losses, the adapted weights, the optimiser and the structure of the
model; not the weights. Another process gives the same for the same learner. A run of the command line has none: its
options say it all.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from gradshare.learners.learner import Learner

BUILT_IN = "Adam"  # the optimiser of a run that was given none; its rate is the option outer_lr
DEPTH = 4  # of values within values
PERFORMANCE = ("params", "initial_lr", "foreach", "fused", "capturable", "differentiable")  # of an optimiser's options


def fingerprint(
    learner: Learner,
    optimiser: Optimizer | None = None,
    factors: Sequence[float] | None = None,
    data: str | None = None,
) -> dict[str, Any]:
    """What a run is trained with.

    Args:
        optimiser: the user's own; None is the built-in Adam.
        factors: of the user's own schedule, in the first epochs.
        data: which examples are in which split, if the source of tasks says so.
    """
    first = learner.at(0)
    links = getattr(first.rule, "links", (first.rule,))
    rate = getattr(links[-1], "rate", None)
    last = type(links[-1]).__name__ if rate is not None else describe(links[-1])
    inner_loss = getattr(learner, "inner_loss", None)
    return {
        "algorithm": _algorithm(learner),
        "inner_lr": describe(rate),
        "steps": learner.steps,
        "rule": [*map(describe, links[:-1]), last],
        "loss": describe(learner.loss),
        "inner_loss": describe(learner.loss if inner_loss is None else inner_loss),
        "adapted": list(learner.adapted),
        "per_step": list(learner.per_step),
        "recipe": describe(learner.schedule and getattr(learner.schedule, "plan", learner.schedule)),
        "final_outer_rate": learner.final_outer_rate,
        "optimiser": BUILT_IN if optimiser is None else describe_optimiser(optimiser),
        "schedule": None if factors is None else list(factors),
        "data": data,
        "layers": {name or "model": _layer(layer) for name, layer in learner.module.named_modules()},
    }


def _algorithm(learner: Learner) -> str:
    """What the algorithm is called; a choice that runs of older versions did not have is part of it."""
    if learner.head_start == "learned":
        return learner.algorithm
    last = [name for name, weight in learner.module.named_parameters() if weight.requires_grad][-1]
    other = "" if last in learner.head else f" ({learner.head[0].rpartition('.')[0]})"
    return f"{learner.algorithm}, head_start {learner.head_start}{other}"


def _layer(layer: nn.Module) -> str:
    """The class of a layer, its plain values and the shapes of its own tensors: `Linear(...) weight [5, 32]`."""
    known = set(vars(layer))
    if constants := getattr(layer, "__constants__", None):  # PyTorch's: its further attributes change with its version
        known = {*constants, *inspect.signature(type(layer).__init__).parameters}
    values = {
        name: describe(value) if callable(value) else value
        for name, value in vars(layer).items()
        if name in known and name != "training" and not name.startswith("_") and _is_plain(value)
    }
    tensors = {**dict(layer.named_parameters(recurse=False)), **dict(layer.named_buffers(recurse=False))}
    shapes = [f"{name} {list(tensor.shape)}" for name, tensor in tensors.items()]
    return " ".join([_call(type(layer).__name__, values), *shapes])


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str | partial) or inspect.isroutine(value)


def describe_optimiser(optimiser: Optimizer) -> str:
    """An optimiser in words: the values of its groups that are not its class's defaults.

    Example:
        >>> import torch
        >>> describe_optimiser(torch.optim.SGD([torch.zeros(2)], lr=0.1, momentum=0.9))
        'SGD(lr=0.1, momentum=0.9)'
    """
    defaults = {name: one.default for name, one in inspect.signature(type(optimiser)).parameters.items()}
    groups = []
    for group in optimiser.param_groups:
        values = {name: value for name, value in group.items() if name not in PERFORMANCE}
        values["lr"] = float(group.get("initial_lr", group["lr"]))
        kept = {name: value for name, value in values.items() if name == "lr" or value != defaults.get(name)}
        groups.append(_call(type(optimiser).__name__, {name: describe(value) for name, value in kept.items()}))
    if len(groups) == 1:
        return groups[0]
    sizes = [len(group["params"]) for group in optimiser.param_groups]
    return "; ".join(f"{size} tensors: {one}" for size, one in zip(sizes, groups, strict=True))


def describe(value: Any, depth: int = DEPTH) -> Any:
    """A value as JSON, the same in every process: of an object its class and its fields, of a function its name.

    Example:
        >>> describe(partial(max, 3)), describe({"a": (1, 2.5)})
        ('partial(func=max, args=[3], keywords={})', {'a': [1, 2.5]})
    """
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if inspect.isroutine(value) or isinstance(value, type):
        return value.__name__
    if depth == 0:
        return type(value).__name__
    if isinstance(value, Mapping):
        return {str(key): describe(one, depth - 1) for key, one in value.items()}
    if isinstance(value, tuple | list) and not hasattr(value, "_fields"):
        return [describe(one, depth - 1) for one in value]
    return _call(type(value).__name__, {name: describe(one, depth - 1) for name, one in _fields(value).items()})


def _fields(value: Any) -> dict[str, Any]:
    """What makes an object what it is, by name."""
    if isinstance(value, partial):
        return {"func": value.func, "args": value.args, "keywords": value.keywords}
    if hasattr(value, "tolist"):  # a tensor or an array
        return {"dtype": str(value.dtype), "shape": tuple(value.shape)} | (
            {} if value.ndim else {"value": value.item()}
        )
    if is_dataclass(value):
        return {one.name: getattr(value, one.name) for one in fields(value) if one.init}
    if hasattr(value, "_fields"):
        return {name: getattr(value, name) for name in value._fields}
    return {name: one for name, one in getattr(value, "__dict__", {}).items() if not name.startswith("_")}


def _call(name: str, values: Mapping[str, Any]) -> str:
    return f"{name}({', '.join(f'{key}={value}' for key, value in values.items())})"
