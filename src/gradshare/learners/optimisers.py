"""The outer optimiser: Adam or any other of PyTorch, its rates, steps that are not taken, its state in checkpoints."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from gradshare.errors import UserError, check_number, short_repr
from gradshare.learners.learner import check_state
from gradshare.method.state import MetaState, check_fit

ADAMS = (torch.optim.Adam, torch.optim.AdamW)


def optimiser(state: MetaState | Mapping[str, Tensor], rate: float, gates: float = 1.0) -> torch.optim.Adam:
    """Adam with default hyperparameters on everything that the outer loop learns.

    Args:
        state: a state; or what it learns, by name, as `gs.train(optimiser=...)` hands it over.
        rate: the outer learning rate.
        gates: factor on the rate of what the outer loop learns beside the weights: m, lambda, learned rates.

    Example:
        >>> import gradshare as gs
        >>> learner = gs.maml(gs.Conv4(filters=8, image=(1, 28, 28)), sharing="gate-only")
        >>> [group["lr"] for group in gs.optimiser(learner.init(seed=0), rate=0.001, gates=10).param_groups]
        [0.001, 0.01]
    """
    if not isinstance(state, Mapping):
        check_state(state)
    check_number("rate", rate, 0)
    check_number("gates", gates, 0)
    leaves = state if isinstance(state, Mapping) else state.trainable()
    if any(leaf.dtype == torch.float16 for leaf in leaves.values()):
        raise UserError("float16 weights cannot be trained: Adam divides by numbers that are 0 there; use float32")
    beside = {name for name in leaves if name.startswith("learned/") and not name.startswith("learned/per_step/")}
    groups: list[dict[str, Any]] = [{"params": list(leaves.values()), "lr": rate}]
    if gates != 1 and beside:
        groups = [
            {"params": [leaf for name, leaf in leaves.items() if name not in beside], "lr": rate},
            {"params": [leaves[name] for name in leaves if name in beside], "lr": rate * gates},
        ]
    if not next(iter(leaves.values())).is_cuda:
        return torch.optim.Adam(groups, lr=rate)
    for group in groups:  # the rate in a tensor and the steps counted on the GPU, so that a step can be recorded
        group["lr"] = torch.tensor(group["lr"], device=group["params"][0].device)
    return torch.optim.Adam(groups, lr=groups[0]["lr"], capturable=True, fused=True)


def check_optimiser(optimiser: Any, state: MetaState) -> None:
    """Raise an error for what cannot take the steps of this state."""
    if not isinstance(optimiser, Optimizer):
        raise UserError(f"an optimiser is gs.optimiser(state, rate) or one of torch.optim, not {short_repr(optimiser)}")
    closure = inspect.signature(optimiser.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise UserError(f"{type(optimiser).__name__} needs a closure, which a meta-step does not have: use another one")
    own = {id(leaf) for leaf in state.trainable().values()}
    if not all(id(leaf) in own for group in optimiser.param_groups for leaf in group["params"]):
        raise UserError("the optimiser has tensors that are not in the state: make it of state.trainable().values()")


def set_rate(optimiser: Optimizer, factor: float) -> None:
    """Set every rate of an optimiser to a factor times its start, in place where it is a tensor."""
    for group in optimiser.param_groups:
        rate = group.setdefault("initial_lr", float(group["lr"])) * factor  # the name that PyTorch's schedulers use
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


def cosine(final_share: float, epoch: int, epochs: int) -> float:
    """The factor on the outer rate in an epoch, falling along half a cosine from 1 to `final_share`."""
    return final_share + (1 - final_share) * (1 + math.cos(math.pi * epoch / epochs)) / 2


def step_if(optimiser: Optimizer, taken: Tensor) -> None:
    """Take a step where `taken` is true; else leave weights and optimiser as they are.

    On a GPU the CPU does not wait for the value, so that the step can be part of a CUDA graph. It does wait where the
    optimiser keeps something on the CPU, and at a step that makes its state: mostly the first.
    """
    if fused_adam(optimiser):
        vars(optimiser)["found_inf"] = (~taken).float()  # its kernel looks at it; torch.amp.GradScaler does the same
        optimiser.step()
        del vars(optimiser)["found_inf"]
    elif taken.is_cuda:
        _step_and_undo(optimiser, taken)
    elif taken:
        optimiser.step()


def fused_adam(optimiser: Optimizer) -> bool:
    """Whether the optimiser is Adam as one kernel, which can leave everything as it is."""
    return type(optimiser) in ADAMS and all(group["fused"] for group in optimiser.param_groups)


def capturable(optimiser: Optimizer) -> bool:
    """Whether the optimiser's steps can be part of a CUDA graph."""
    sgd = isinstance(optimiser, torch.optim.SGD)  # which counts nothing, so it has no such option
    return all(group.get("capturable", sgd) for group in optimiser.param_groups)


@torch.no_grad()
def _step_and_undo(optimiser: Optimizer, taken: Tensor) -> None:
    groups = [{name: value for name, value in group.items() if name != "params"} for group in optimiser.param_groups]
    state = {leaf: dict(values) for leaf, values in optimiser.state.items()}
    before = _identities(optimiser)
    tensors = [leaf for group in optimiser.param_groups for leaf in group["params"]]
    tensors += [value for values in state.values() for value in values.values() if isinstance(value, Tensor)]
    kept = [tensor.clone() for tensor in tensors]
    optimiser.step()
    only_tensors = _identities(optimiser) == before  # so that all changes are in `tensors`
    if only_tensors and all(tensor.device == taken.device for tensor in tensors):
        chosen = [torch.where(taken, new, old) for new, old in zip(tensors, kept, strict=True)]
        torch._foreach_copy_(tensors, chosen)
    elif not taken:
        optimiser.state.clear()
        optimiser.state.update(state)
        for group, values in zip(optimiser.param_groups, groups, strict=True):
            group.update(values)
        torch._foreach_copy_(tensors, kept)


def _identities(optimiser: Optimizer) -> list[tuple[Any, ...]]:
    """Which objects an optimiser holds: another list after a step means that the step did more than fill tensors."""
    state = [(id(leaf), name, id(value)) for leaf, values in optimiser.state.items() for name, value in values.items()]
    return state + [(name, id(value)) for group in optimiser.param_groups for name, value in group.items()]


# Checkpoints


def optimiser_tensors(state: MetaState, optimiser: Optimizer) -> dict[str, Tensor]:
    """The optimiser's state by the names of the leaves, for a checkpoint: `adam/exp_avg/params/head.weight`.

    A plain number becomes a tensor, under `sgd.number/...`.
    """
    found: dict[str, Tensor] = {}
    for place, values, name in _places(state, optimiser):
        value = values[name]
        if isinstance(value, Tensor):
            found[f"{_prefix(optimiser)}/{place}"] = value
        elif isinstance(value, int | float):
            kind = torch.int64 if isinstance(value, int) else torch.float64
            found[f"{_prefix(optimiser)}.number/{place}"] = torch.tensor(value, dtype=kind)
        else:
            what = f"{type(optimiser).__name__} keeps '{name}' as {type(value).__name__}"
            raise UserError(f"{what}, which a checkpoint cannot hold: use an optimiser of tensors and numbers")
    return found


def restore_optimiser(state: MetaState, optimiser: Optimizer, tensors: Mapping[str, Tensor]) -> None:
    """Put back what `optimiser_tensors` gave."""
    leaves, prefix = state.trainable(), _prefix(optimiser)
    groups = {id(leaf): group for group in optimiser.param_groups for leaf in group["params"]}
    found: dict[str, dict[str, Any]] = {}
    for path, value in tensors.items():
        kind, _, place = path.partition("/")
        key, _, owner = place.partition("/")
        if kind in (prefix, f"{prefix}.number"):
            found.setdefault(owner, {})[key] = value if kind == prefix else value.item()
    for number, group in enumerate(optimiser.param_groups):
        group.update(found.pop(f"group {number}", {}))
    for name, values in found.items():
        if name not in leaves or id(leaves[name]) not in groups:
            raise UserError(f"the checkpoint's {type(optimiser).__name__} has {name}, which the learner does not have")
        leaf, group = leaves[name], groups[id(leaves[name])]
        _check(optimiser, group, name, leaf, values)
        on_cpu = {"step"} if not (group.get("capturable") or group.get("fused")) else {}
        optimiser.state[leaf] = {
            key: value.to("cpu" if key in on_cpu else leaf.device) if isinstance(value, Tensor) else value
            for key, value in values.items()
        }


def _check(optimiser: Optimizer, group: dict[str, Any], name: str, leaf: Tensor, values: dict[str, Any]) -> None:
    what, tensors = f"the checkpoint's {type(optimiser).__name__} of {name}", values.values()
    if type(optimiser) in ADAMS:
        step = values.get("step", leaf).new_zeros(())  # its type is the default one when it was made
        wanted = {"step": step, "exp_avg": leaf, "exp_avg_sq": leaf}
        check_fit(wanted | ({"max_exp_avg_sq": leaf} if group["amsgrad"] else {}), values, what)
    if not all(bool(torch.as_tensor(value).isfinite().all()) for value in tensors):
        raise UserError(f"{what} is not finite: restore one from a copy")


def _prefix(optimiser: Optimizer) -> str:
    return type(optimiser).__name__.lower()


def _places(state: MetaState, optimiser: Optimizer) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Everything that steps may change beside the leaves: its name, and where it is."""
    for leaf_name, leaf in state.trainable().items():
        values = optimiser.state.get(leaf, {})
        yield from ((f"{name}/{leaf_name}", values, name) for name in values)
    if type(optimiser).__module__.startswith("torch.optim"):
        return  # these keep nothing that changes in their groups
    for number, group in enumerate(optimiser.param_groups):
        numbers = [name for name, value in group.items() if isinstance(value, int | float)]
        yield from ((f"{name}/group {number}", group, name) for name in numbers if name not in ("lr", "initial_lr"))
