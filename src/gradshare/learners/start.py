"""Pretrained weights to begin with: a state_dict from a file, put into a learner's model. No code of a file is run."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from textwrap import shorten
from typing import Any

import torch
from safetensors import torch as safetensors
from torch import Tensor, nn

from gradshare.engine import vmapped
from gradshare.errors import LineWarning, UserError, path_of
from gradshare.learners.learner import Learner
from gradshare.method.state import unflatten

NAMED = 4  # names in a message
STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


def started(learner: Learner, start: str | Path | Mapping[str, Tensor], seed: int = 0, quiet: bool = False) -> Learner:
    """The learner with these weights in its model; `init()`, without a seed, then gives a state that has them.

    Names and shapes must fit. Only the head, the module that owns the last weight, may differ or be absent: it then
    stays as `seed` initialises it, with a warning unless `quiet`. Running statistics of batch norm are left out: it
    normalises with those of the batch at hand.

    Args:
        start: a state_dict, or the file of one.
        seed: as `learner.init` has it, for a head that stays.
    """
    if isinstance(start, Mapping):
        source, given = "start", weights_of(start, "start")
    else:
        source = str(path_of(start, "a file of weights"))
        given = weights_of(read(Path(source)), source)
    draws = vmapped.initialises(learner.module)
    module = vmapped.initialised(learner.module, seed) if draws else vmapped.prepare(learner.module).cpu()
    unused = {f"{layer}.{name}" for layer in vmapped.norms(module) for name in STATISTICS}
    given = {name: tensor for name, tensor in given.items() if name not in unused}
    own = module.state_dict()
    head = _head(module)
    left = head if any(name not in given or given[name].shape != own[name].shape for name in head) else []
    _load(source, module, given | {name: own[name] for name in left})
    if left and not quiet:
        warnings.warn(f"{_named(left)} begin as without {source}, {_other_head(left, own, given)}", LineWarning, 3)
    return replace(learner, module=module)


def read(path: Path) -> Any:
    """What is in a file of safetensors, or of `torch.save`; of the latter, tensors and plain values alone are read."""
    if not path.is_file():  # a pipe would be waited for
        raise UserError(f"{path} cannot be read: there is no such file")
    try:
        with path.open("rb") as file:
            safe = file.read(9)[8:] == b"{"  # the header is JSON, after its length
        return safetensors.load_file(path) if safe else torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None
    except Exception as error:  # a damaged file of torch.save raises errors of many kinds
        reason = str(error).partition("\n")[0] if safe else "it is damaged, or holds more than tensors"
        raise UserError(
            f"{path} is not a file of weights, of safetensors or of torch.save(model.state_dict(), FILE): {reason}"
        ) from None


def weights_of(found: Any, source: str) -> dict[str, Tensor]:
    """A state_dict; of the state of a model of ours, which `save_pretrained` wrote, it is the network's weights."""
    named = isinstance(found, Mapping) and all(isinstance(name, str) for name in found)
    if not named or not all(isinstance(value, Tensor) for value in found.values()):
        held = _named(list(map(str, found))) if isinstance(found, Mapping) else f"a {type(found).__name__}"
        raise UserError(f"{source} holds {held} instead of weights by name: give model.state_dict() alone")
    if wrong := [name for name, value in found.items() if not _is_plain(value)]:
        raise UserError(f"{source} has weights that are not real, dense, finite tensors: {_named(wrong)}")
    if any(name.startswith("params/") for name in found):
        return unflatten(dict(found))["params"]
    return dict(found)


def _is_plain(value: Tensor) -> bool:
    if value.is_complex() or value.is_quantized or value.is_meta or value.layout != torch.strided:
        return False
    return bool(value.isfinite().all())


def _head(module: nn.Module) -> list[str]:
    names = [name for name, weight in module.named_parameters() if weight.requires_grad]
    owner = names[-1].rpartition(".")[0]
    return [name for name in names if owner and name.startswith(f"{owner}.")]


def _load(source: str, module: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Put these weights into a module; a UserError says what does not fit."""
    kind, own = type(module).__name__, {name: tensor.clone() for name, tensor in module.state_dict().items()}
    try:
        module.load_state_dict(weights)
    except RuntimeError as error:
        reason = " ".join(str(error).split()).removeprefix(f"Error(s) in loading state_dict for {kind}: ")
        raise UserError(f"{source} does not fit {kind}: {shorten(reason, 300, placeholder=' …')}") from None
    trained = {name for name, weight in module.named_parameters(remove_duplicate=False) if weight.requires_grad}
    fixed = {name: tensor for name, tensor in module.state_dict().items() if name not in trained}
    if other := [name for name, tensor in fixed.items() if not torch.equal(tensor, own[name])]:
        raise UserError(
            f"{source} has other values of {_named(other)} than {kind}, which does not train them, and a run keeps only"
            " what it trains: let the model have these values when it is made"
        )


def _other_head(left: list[str], own: Mapping[str, Tensor], given: Mapping[str, Tensor]) -> str:
    name = next((name for name in left if name in given), None)
    if name is None:
        return "which has no head"
    return f"where {name} is {list(given[name].shape)}, not {list(own[name].shape)}"


def _named(names: list[str]) -> str:
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more
