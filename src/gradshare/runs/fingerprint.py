"""The fingerprint of a learner: what a run from Python was trained with, as plain values in config.json.

It names the algorithm, the rule, the rates, the losses, the adapted weights, the optimiser and the structure of the
model; not the weights. Another process gives the same for the same learner. A run of the command line has none: its
options say it all.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gradshare.errors import UserError, short_repr

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from gradshare.learners.learner import Learner

BUILT_IN = "Adam"  # the optimiser of a run that was given none; its rate is the option outer_lr
DEPTH = 4  # of values within values
NAMED = 3  # differences that an error names
ALGORITHMS = {"RatePerElement": "meta_sgd", "RatePerTensorAndStep": "maml_plus_plus"}
PERFORMANCE = ("params", "initial_lr", "foreach", "fused", "capturable", "differentiable")  # of an optimiser's options


def fingerprint(learner: Learner, optimiser: Optimizer | None, factors: Sequence[float] | None) -> dict[str, Any]:
    """What a run is trained with.

    Args:
        optimiser: the user's own; None is the built-in Adam.
        factors: of the user's own schedule, one for each epoch.
    """
    first = learner.at(0)
    links = getattr(first.rule, "links", (first.rule,))
    rate = getattr(links[-1], "rate", None)
    last = type(links[-1]).__name__ if rate is not None else describe(links[-1])
    inner_loss = getattr(learner, "inner_loss", None)
    return {
        "algorithm": _algorithm(learner, [type(link).__name__ for link in links]),
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
        "layers": {name or "model": _layer(layer) for name, layer in learner.module.named_modules()},
    }


def _algorithm(learner: Learner, links: list[str]) -> str:
    from gradshare.engine.vmapped import BATCH_NORMS

    if links[-1] != "Scale":
        return ALGORITHMS.get(links[-1], "a rule of your own")
    owned = [
        layer.named_parameters(name) for name, layer in learner.module.named_modules() if isinstance(layer, BATCH_NORMS)
    ]
    norms = {name for names in owned for name, _ in names}
    trained = {name for name, weight in learner.module.named_parameters() if weight.requires_grad}
    if not trained - norms <= set(learner.adapted):
        return "anil"
    return "first_order_maml" if links[0] == "StopGradient" else "maml"


def _layer(layer: nn.Module) -> str:
    """The class of a layer, its plain values and the shapes of its own tensors: `Linear(...) weight [5, 32]`."""
    known = getattr(layer, "__constants__", None)  # PyTorch's layers: other attributes change with its version
    values = {
        name: value
        for name, value in vars(layer).items()
        if name in (known or vars(layer)) and name != "training" and not name.startswith("_") and _is_plain(value)
    }
    tensors = {**dict(layer.named_parameters(recurse=False)), **dict(layer.named_buffers(recurse=False))}
    shapes = [f"{name} {list(tensor.shape)}" for name, tensor in tensors.items()]
    return " ".join([_call(type(layer).__name__, values), *shapes])


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str)


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
    sizes = [len(group["params"]) for group in optimiser.param_groups]
    return (
        groups[0] if len(groups) == 1 else "; ".join(f"{n} tensors {one}" for n, one in zip(sizes, groups, strict=True))
    )


def describe(value: Any, depth: int = DEPTH) -> Any:
    """A value as JSON, the same in every process: no addresses, and of other objects the class and its plain fields.

    Example:
        >>> describe(partial(max, 3)), describe({"a": (1, 2.5)})
        ('partial(max, 3)', {'a': [1, 2.5]})
    """
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if value == value and abs(value) < float("inf") else str(value)
    if isinstance(value, partial):
        parts = [
            describe(value.func),
            *map(describe, value.args),
            *(f"{k}={describe(v)}" for k, v in value.keywords.items()),
        ]
        return f"partial({', '.join(map(str, parts))})"
    if inspect.isroutine(value) or isinstance(value, type):
        return value.__name__
    if hasattr(value, "dtype") and hasattr(value, "tolist"):  # a tensor or an array
        return (
            value.tolist()
            if getattr(value, "ndim", 1) == 0
            else f"{value.dtype} {list(value.shape)}".removeprefix("torch.")
        )
    if depth == 0:
        return type(value).__name__
    if isinstance(value, Mapping):
        return {str(key): describe(one, depth - 1) for key, one in value.items()}
    if isinstance(value, tuple | list):
        plain = [describe(one, depth - 1) for one in value]
        return (
            plain
            if not hasattr(value, "_fields")
            else _call(type(value).__name__, dict(zip(value._fields, plain, strict=True)))
        )
    return _call(type(value).__name__, {name: describe(one, depth - 1) for name, one in _own_values(value)})


def _own_values(value: Any) -> Iterator[tuple[str, Any]]:
    """The fields of an object that make it what it is."""
    if is_dataclass(value):
        yield from ((one.name, getattr(value, one.name)) for one in fields(value) if one.init)
    else:
        yield from ((name, one) for name, one in getattr(value, "__dict__", {}).items() if not name.startswith("_"))


def _call(name: str, values: Mapping[str, Any]) -> str:
    return f"{name}({', '.join(f'{key}={value!r}' for key, value in values.items())})"


def check_same_learner(folder: Path, stored: Any, wanted: Any) -> None:
    """Raise an error that says what differs, if a run is resumed with another learner than it was trained with.

    A run of an older version has no fingerprint; it was trained with the built-in Adam.
    """
    if not isinstance(wanted, dict):
        return
    has = stored if isinstance(stored, dict) else {"optimiser": BUILT_IN, "schedule": None}
    found = list(islice(_differences(has, wanted), NAMED + 1))
    if found:
        more = ", and more" if len(found) > NAMED else ""
        raise UserError(
            f"the run in {folder} was trained with another learner: {'; '.join(found[:NAMED])}{more}."
            " Give the same learner, or choose another folder"
        )


def _differences(has: dict[str, Any], want: dict[str, Any]) -> Iterator[str]:
    for name in has:
        one, other = has[name], want.get(name)
        if name == "schedule" and one and other:  # a run may become longer
            one, other = one[: len(other)], other[: len(one)]
        if one == other:
            continue
        if isinstance(one, dict) and isinstance(other, dict):
            for key in [*one, *(key for key in other if key not in one)]:
                if one.get(key) != other.get(key):
                    yield f"{key} {one.get(key, 'absent')}, not {other.get(key, 'absent')}"
        else:
            yield f"{name} {_shown(one)}, not {_shown(other)}"


def _shown(value: Any) -> str:
    text = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
    return text if len(text) <= 120 else short_repr(value, 120)
