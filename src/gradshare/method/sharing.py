"""Gradient sharing: equations 1-4 of Chang & Lipson, as the first link of any inner loop."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor
from torch.func import vmap

from gradshare.errors import UserError
from gradshare.method.rules import InnerStep, Moved, Rule, Tree, Weights

NormScope = Literal["global", "tensor"]
TYPICAL = 0.1  # cosine of a task's gradient with the running mean, and its deviation over tasks (docs/log.md)


@dataclass(frozen=True)
class SharingRule(Rule):
    """What all ways of sharing a normalised sum have in common.

    Args:
        norm: what the normalised sum has length one over: `"global"`, all adapted weights together (the literal
            reading of equation 1), or `"tensor"`, each weight tensor for itself.
    """

    norm: NormScope = "global"
    name = "sharing"
    learns: ClassVar[tuple[str, ...]] = ("m", "lam")  # values for each step, zeros at the start

    def __post_init__(self) -> None:
        if self.norm not in get_args(NormScope):
            raise UserError(f"norm is 'global' or 'tensor', not {self.norm!r}")

    @property
    def any_layout(self) -> bool:  # type: ignore[override]
        return self.norm == "global"

    def init(self, weights: Weights, steps: int) -> tuple[Tree, Tree]:
        like = next(iter(weights.values()))
        ghat = {name: weight.new_zeros((steps, *weight.shape)) for name, weight in weights.items()}
        seen = torch.zeros((), dtype=torch.bool, device=like.device)
        return {name: like.new_zeros(steps) for name in self.learns}, {"ghat": ghat, "seen": seen}

    def update(self, at: InnerStep) -> Moved:
        if at.total is None:
            return Moved(recall_shared(at, self.mixed(at, stored_mean(at))))
        running = self.running(at)
        return Moved(self.mixed(at, running), remember=remember_shared(at, running))

    def running(self, at: InnerStep) -> Weights:
        """The running mean with this batch in it: equations 2 and 3."""
        keep_new, before = torch.sigmoid(at.now(at.learned["m"])), stored_mean(at)
        return {
            name: torch.where(at.memory["seen"], keep_new * g + (1 - keep_new) * before[name], g)
            for name, g in self.fresh(at).items()
        }

    def fresh(self, at: InnerStep) -> Weights:
        """What this batch adds to the running mean: equation 1."""
        return normalised_sum(at, self.norm)

    def mixed(self, at: InnerStep, shared: Weights) -> Weights:
        """The direction of every task, from its own gradient and the running mean: equation 4."""
        return mix(at.gradients, shared, plain_gates(at))


@dataclass(frozen=True)
class GradientSharing(SharingRule):
    r"""Mix the running mean of the normalised task gradients into every task's step.

    With G[t] task t's gradient at inner step k and sig the sigmoid,

        g    = sum_t G[t] / || sum_t G[t] ||                  (1)
        ghat = g                at the first meta-iteration    (2)
        ghat = sig(m_k) g + (1 - sig(m_k)) ghat_prev           (3)
        D[t] = sig(lam_k) ghat + (1 - sig(lam_k)) G[t]         (4)

    m and lam (shape [steps], zeros at the start) are meta-learned; ghat_prev is a constant. At test, tasks see the
    ghat stored in training and not each other; before any training there is none, and D[t] = G[t].

    Args:
        norm: `"global"`, one norm over all adapted weights together (the literal reading of equation 1), or `"tensor"`,
            one for each weight tensor.
        conditioned: one step past the paper, whose future work asks for it: a gate for every task, which also depends
            on how well the task's gradient agrees with the running mean of earlier meta-iterations:

                a[t] = cos(G[t], ghat_prev) / 0.1
                D[t] = sig(lam_k + c_k a[t]) ghat + (1 - sig(lam_k + c_k a[t])) G[t]

            c ("agreement", shape [steps]) is meta-learned and starts at zero, which is plain sharing.

    Example:
        >>> import gradshare as gs
        >>> learner = gs.maml(gs.Conv4(filters=8, image=(1, 28, 28)), sharing=gs.GradientSharing(norm="tensor"))
        >>> learner.init(seed=0).learned["sharing"]["m"].shape
        torch.Size([5])
    """

    conditioned: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.conditioned, bool):
            raise UserError(f"conditioned is True or False, not {self.conditioned!r}")

    @property
    def learns(self) -> tuple[str, ...]:  # type: ignore[override]
        return ("m", "lam", "agreement") if self.conditioned else ("m", "lam")

    def mixed(self, at: InnerStep, shared: Weights) -> Weights:
        gates = agreement_gates(at, self.norm) if self.conditioned else plain_gates(at)
        return mix(at.gradients, shared, gates)


def share_gradients(norm: NormScope = "global") -> GradientSharing:
    """The same as `GradientSharing(norm)`."""
    return GradientSharing(norm)


def share_by_agreement(norm: NormScope = "global") -> GradientSharing:
    """The same as `GradientSharing(norm, conditioned=True)`."""
    return GradientSharing(norm, conditioned=True)


def normalised_sum(at: InnerStep, norm: NormScope) -> Weights:
    """Equation 1."""
    assert at.total is not None
    return normalised(at.total(finite_part(at.gradients)), norm)


def mix(gradients: Weights, shared: Weights, gates: Weights) -> Weights:
    """Equation 4, with a gate for each weight tensor (mostly the same one)."""
    return {name: gates[name] * shared[name] + (1 - gates[name]) * own for name, own in gradients.items()}


def plain_gates(at: InnerStep) -> Weights:
    """sig(lam_k), the same for all tasks and weights."""
    return dict.fromkeys(at.gradients, torch.sigmoid(at.now(at.learned["lam"])))


def tensor_gates(at: InnerStep) -> Weights:
    """sig(gates_{k,n}), the same for all tasks, one for each weight tensor n."""
    return {name: torch.sigmoid(at.now(at.learned["gates"][name])) for name in at.gradients}


def agreement_gates(at: InnerStep, norm: NormScope) -> Weights:
    """A gate for every task, `{name: [tasks, 1, ...]}`.

    The agreement is with ghat_prev in training as at test: with one task a batch the fresh mean is that task's own
    gradient, which agrees with itself. TYPICAL is its usual size, so that a step of Adam on c moves a gate as far as
    one on lam. The gate of the memory, m, stays the same for all tasks: what a task does to the memory is not in the
    outer loss that could learn it.
    """
    lam, c = at.now(at.learned["lam"]), at.now(at.learned["agreement"])
    agreed = agreement(at.gradients, stored_mean(at), norm)
    gates = {name: torch.sigmoid(lam + c * (cosine / TYPICAL)) for name, cosine in agreed.items()}
    return {name: gates[name].view(-1, *(1 for _ in own.shape[1:])) for name, own in at.gradients.items()}


def stored_mean(at: InnerStep) -> Weights:
    """ghat_prev: the running mean of earlier meta-iterations."""
    return {name: at.now(at.memory["ghat"][name]) for name in at.gradients}


def recall_shared(at: InnerStep, mixed: Weights) -> Weights:
    """Algorithm 2: the direction with the stored running mean; without one, the task's own gradient."""
    return {name: torch.where(at.memory["seen"], mixed[name], own) for name, own in at.gradients.items()}


def remember_shared(at: InnerStep, running: Weights) -> Tree:
    """The running mean of this step, and that there is one."""
    return {"ghat": running, "seen": torch.ones_like(at.memory["seen"])}


def finite_part(gradients: Weights) -> Weights:
    """What counts in the sum over tasks: an element that is not finite does not, and has derivative zero.

    So a task that diverges does so alone: its own direction is not finite, that of all tasks and the memory are.
    """
    if all(own.is_cpu for own in gradients.values()):  # where asking costs nothing: mostly everything is finite
        sums = torch.stack([own.detach().sum() for own in gradients.values()])
        if sums.sum().isfinite():
            return gradients
    return {name: torch.where(own.detach().abs() < torch.inf, own, 0.0) for name, own in gradients.items()}


def normalised(vector: Weights, norm: NormScope) -> Weights:
    """A vector scaled to length one; a zero vector stays zero, with zero derivative."""
    vector = {name: value.nan_to_num() for name, value in vector.items()}  # a sum that overflowed: the largest number
    if norm == "tensor":
        return {name: _unit({name: value})[name] for name, value in vector.items()}
    return _unit(vector)


def _unit(vector: Weights) -> Weights:
    if not any(part.numel() for part in vector.values()):
        return vector
    # Dividing by the largest element first keeps the squares from over- and underflowing. The result does not depend
    # on it, so it is a constant for the derivative.
    largest = torch.stack([part.detach().abs().amax() for part in vector.values() if part.numel()]).amax()
    zero = largest == 0
    shrunk = {name: part / torch.where(zero, torch.ones_like(largest), largest) for name, part in vector.items()}
    square = torch.stack([part.square().sum() for part in shrunk.values()]).sum()
    length = torch.where(zero, torch.ones_like(square), square).sqrt()
    return {name: torch.where(zero, torch.zeros_like(part), part) / length for name, part in shrunk.items()}


def agreement(gradients: Weights, direction: Weights, norm: NormScope) -> dict[str, Tensor]:  # {name: [tasks]}
    """The cosine between every task's gradient and a direction; 0, with zero derivative, where either is zero.

    Over all adapted weights, or over each tensor for itself, as the norm is.
    """
    unit = normalised(direction, norm)

    def of_one(own: Weights) -> dict[str, Tensor]:
        return inner_product(normalised(own, norm), unit, norm)

    return vmap(of_one)(gradients)


def inner_product(one: Weights, other: Weights, norm: NormScope) -> dict[str, Tensor]:  # {name: []}
    """Over all weights together, the same for each name; or over each tensor."""
    parts = {name: (part * other[name]).sum() for name, part in one.items()}
    return parts if norm == "tensor" else dict.fromkeys(parts, torch.stack(list(parts.values())).sum())
