"""The outer loop's step: one batch of tasks moves the initial weights, m, lambda and the learned rates."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from gradshare.engine.processes import Group
from gradshare.errors import UserError, check_number
from gradshare.learners.learner import Learner, Outcome, check_learner, check_state
from gradshare.method.episodes import Episodes
from gradshare.method.state import MetaState, check_fit, flatten, unflatten


def optimiser(state: MetaState, rate: float) -> torch.optim.Adam:
    """Adam with default hyperparameters on everything that the outer loop learns."""
    check_state(state)
    check_number("rate", rate, 0)
    leaves = list(state.trainable().values())
    if any(leaf.dtype == torch.float16 for leaf in leaves):
        raise UserError("float16 weights cannot be trained: Adam divides by numbers that are 0 there; use float32")
    if leaves[0].is_cuda:  # the rate in a tensor and the steps counted on the GPU, so that a step can be recorded
        return torch.optim.Adam(leaves, lr=torch.tensor(rate, device=leaves[0].device), capturable=True, fused=True)
    return torch.optim.Adam(leaves, lr=rate)


def set_rate(adam: torch.optim.Adam, rate: float) -> None:
    """Change the outer rate, in place where it is a tensor."""
    group = adam.param_groups[0]
    if isinstance(group["lr"], Tensor):
        group["lr"].fill_(rate)
    else:
        group["lr"] = rate


def meta_step(
    learner: Learner, state: MetaState, adam: torch.optim.Adam, episodes: Episodes, clamp: float | None = 0.0
) -> Outcome:
    """One step of the outer loop: equation 5, with Adam instead of plain gradient descent.

    Changes the state in place: params, learned values and memory. If the outer loss or a gradient is not finite,
    nothing changes, and `outcome.fault` says why: 1 is the loss, 2 and above are the tensors of `state.trainable()` in
    order. All tensors of the outcome are detached.

    Args:
        clamp: limit of each element of the gradient with respect to the network's own weights, as in the MAML++ code;
            gradients of learned rates, m and lambda are not limited. 0 and None switch it off.
    """
    check_learner(learner)
    check_state(state)
    if clamp:
        check_number("clamp", clamp, 0)
    if not torch.is_grad_enabled():
        raise UserError("a meta-step needs gradients: call it outside of torch.no_grad() and torch.inference_mode()")
    outcome = learner.outer_loss(state, episodes)
    leaves = state.trainable()
    gradients: Sequence[Tensor | None] = torch.autograd.grad(outcome.loss, list(leaves.values()), allow_unused=True)
    if learner.group.size > 1:
        outcome, gradients = _of_all(learner.group, outcome, gradients, episodes.tasks)
    outcome = outcome._replace(fault=_fault(outcome.loss, gradients))
    for (name, leaf), gradient in zip(leaves.items(), gradients, strict=True):
        network = name.startswith(("params/", "learned/per_step/"))
        leaf.grad = gradient.clamp(-clamp, clamp) if clamp and network and gradient is not None else gradient
    _take(state, adam, outcome)
    learner.accept(state)
    return outcome._replace(loss=outcome.loss.detach(), memory=state.memory)


def _fault(loss: Tensor, gradients: Sequence[Tensor | None]) -> Tensor:  # []
    """0 if everything is finite, else 1 + the position of the first that is not. No value leaves the device.

    A gradient is tested by its norm, so one whose square overflows (Adam needs the square) counts as not finite.
    """
    present = [gradient for gradient in gradients if gradient is not None]
    norms = iter(torch._foreach_norm(present))
    lengths = [loss.detach()] + [loss.new_zeros(()) if gradient is None else next(norms) for gradient in gradients]
    each = torch.stack(lengths)
    broken = (each - each).isnan()  # not finite, in fewer kernels
    return (broken.int().argmax() + 1) * broken.any()


def _take(state: MetaState, adam: torch.optim.Adam, outcome: Outcome) -> None:
    """Move the state, unless something is not finite."""
    if not adam.defaults["fused"]:
        if outcome.taken:
            adam.step()
            state.memory = outcome.memory
        return
    # On a GPU the CPU does not wait for the answer: Adam's kernel and torch.where use it there, also in a CUDA graph.
    taken = outcome.taken
    vars(adam)["found_inf"] = (~taken).float()  # as torch.amp.GradScaler does it
    adam.step()
    del vars(adam)["found_inf"]
    kept, new = flatten(state.memory, "memory"), flatten(outcome.memory, "memory")
    chosen = {name: torch.where(taken, value, kept[name]) for name, value in new.items()}
    state.memory = unflatten(chosen).get("memory", {})


def _of_all(
    group: Group, outcome: Outcome, gradients: Sequence[Tensor | None], tasks: int
) -> tuple[Outcome, Sequence[Tensor | None]]:
    """The outcome and the gradients of the whole batch, from those of each process's tasks: one reduction."""
    own = [outcome.losses] if outcome.accuracy is None else [outcome.losses, outcome.accuracy]
    used = [gradient for gradient in gradients if gradient is not None]  # the same ones in every process
    loss, *sums = group.sum([outcome.loss.detach(), *(group.placed(values, tasks) for values in own), *used])
    losses, accuracy = sums[0], sums[1] if len(own) == 2 else None
    left = iter(sums[len(own) :])
    outcome = outcome._replace(loss=loss, losses=losses, accuracy=accuracy)
    return outcome, [None if gradient is None else next(left) for gradient in gradients]


def cosine(rate: float, final_share: float, epoch: int, epochs: int) -> float:
    """The outer rate in an epoch, falling along half a cosine to `final_share` of its start."""
    return rate * (final_share + (1 - final_share) * (1 + math.cos(math.pi * epoch / epochs)) / 2)


def adam_tensors(state: MetaState, adam: torch.optim.Adam) -> dict[str, Tensor]:
    """Adam's moments by the names of the leaves, for a checkpoint."""
    return {
        f"adam/{moment}/{name}": value
        for name, leaf in state.trainable().items()
        for moment, value in adam.state.get(leaf, {}).items()
    }


def restore_adam(state: MetaState, adam: torch.optim.Adam, tensors: dict[str, Tensor]) -> None:
    """Put back what `adam_tensors` gave."""
    for name, leaf in state.trainable().items():
        moments = {
            m: tensors[f"adam/{m}/{name}"] for m in ("step", "exp_avg", "exp_avg_sq") if f"adam/{m}/{name}" in tensors
        }
        if moments:
            step = moments.get("step", leaf).new_zeros(())  # its type is the default one when it was made
            wanted = {"step": step, "exp_avg": leaf, "exp_avg_sq": leaf}
            check_fit(wanted, moments, f"the checkpoint's Adam of {name}")
            if not all(value.isfinite().all() for value in moments.values()):
                raise UserError(f"the checkpoint's Adam of {name} is not finite: restore one from a copy")
            adam.state[leaf] = {moment: value.to(leaf.device) for moment, value in moments.items()}
