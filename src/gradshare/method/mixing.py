"""Other ways to share: what vector the tasks share, how a task mixes it into its own gradient, and where.

Each changes one part of `GradientSharing`. `BodyOnly` and `LeftOut` are rules around any other one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch.func import vmap

from gradshare.errors import UserError
from gradshare.method.inner_optimisers import HeadRate
from gradshare.method.rules import Chain, InnerStep, Moved, Rule, Tree, Weights, Wrapper
from gradshare.method.sharing import (
    TYPICAL,
    GradientSharing,
    NormScope,
    SharingRule,
    finite_part,
    inner_product,
    mix,
    normalised,
    normalised_sum,
    tensor_gates,
)

COUNT = "number of tasks"  # beside the gradients in one sum; no weight has such a name
SLOTS = 4  # batches in the bank of `Retrieval`


@dataclass(frozen=True)
class Additive(SharingRule):
    """D[t] = G[t] + s_k ghat: the step keeps the task's own gradient whole. s starts at 0, which is plain MAML."""

    learns = ("m", "s")

    def mixed(self, at: InnerStep, shared: Weights) -> Weights:
        s = at.now(at.learned["s"])
        return {name: own + s * shared[name] for name, own in at.gradients.items()}


@dataclass(frozen=True)
class MeanSharing(SharingRule):
    """Equations 2 to 4 with the mean gradient instead of the normalised sum: g = (1/T) sum_t G[t].

    So the shared vector has the length of gradients, and shrinks with them.
    """

    norm: str = field(default="global", init=False, repr=False)  # type: ignore[assignment]  # there is none

    def fresh(self, at: InnerStep) -> Weights:
        assert at.total is not None
        one = next(iter(at.gradients.values()))
        total = dict(at.total({**finite_part(at.gradients), COUNT: one.new_ones(len(one))}))
        tasks = total.pop(COUNT)
        return {name: (value / tasks).nan_to_num() for name, value in total.items()}


@dataclass(frozen=True)
class LengthKeeping(SharingRule):
    """The direction is mixed, the length kept, and a learned gate scales it:

        D[t] = (1 - sig(gate_k)) |G[t]| unit((1 - sig(lam_k)) unit(G[t]) + sig(lam_k) ghat)

    Lengths are over all adapted weights, or over each tensor, as `norm` says.
    """

    learns = ("m", "lam", "gate")

    def mixed(self, at: InnerStep, shared: Weights) -> Weights:
        lam, keep = torch.sigmoid(at.now(at.learned["lam"])), 1 - torch.sigmoid(at.now(at.learned["gate"]))

        def of_one(own: Weights) -> Weights:
            unit = normalised(own, self.norm)
            turned = normalised({name: (1 - lam) * unit[name] + lam * shared[name] for name in own}, self.norm)
            lengths = inner_product(unit, own, self.norm)
            return {name: keep * lengths[name] * turned[name] for name in own}

        return vmap(of_one)(dict(at.gradients))


@dataclass(frozen=True)
class TensorGatedSharing(SharingRule):
    """Sharing whose gate of equation 4 is learned for each weight tensor and step."""

    learns = ("m",)

    def init(self, weights: Weights, steps: int) -> tuple[Tree, Tree]:
        learned, memory = super().init(weights, steps)
        return learned | {"gates": {name: weight.new_zeros(steps) for name, weight in weights.items()}}, memory

    def mixed(self, at: InnerStep, shared: Weights) -> Weights:
        return mix(at.gradients, shared, tensor_gates(at))


@dataclass(frozen=True)
class Retrieval(SharingRule):
    """A bank of the normalised sums of the last four batches; each task takes those that agree with its gradient:

        w[t] = softmax over b of c_k cos(G[t], bank_b) / 0.1
        D[t] = G[t] + s_k sum_b w[t]_b bank_b

    s and c (shape [steps]) start at 0, which is plain MAML. Equal weights, c = 0, make it the mean of the bank.
    """

    norm: str = field(default="global", init=False, repr=False)  # type: ignore[assignment]  # the only one
    learns = ("s", "c")

    def init(self, weights: Weights, steps: int) -> tuple[Tree, Tree]:
        learned, memory = super().init(weights, steps)
        bank = {name: weight.new_zeros((steps, SLOTS, *weight.shape)) for name, weight in weights.items()}
        filled = torch.zeros(SLOTS, dtype=torch.bool, device=memory["seen"].device)
        return learned, {"bank": bank, "filled": filled}

    def update(self, at: InnerStep) -> Moved:
        bank = {name: at.now(at.memory["bank"][name]) for name in at.gradients}  # {name: [slots, *shape]}
        filled = at.memory["filled"]
        s = torch.where(filled.any(), at.now(at.learned["s"]), 0.0)
        c = at.now(at.learned["c"])

        def of_one(own: Weights) -> Weights:
            unit = normalised(own, "global")
            cosines = torch.stack([(bank[name] * unit[name]).reshape(SLOTS, -1).sum(1) for name in own]).sum(0)
            w = torch.where(filled, torch.where(filled, c * cosines / TYPICAL, -torch.inf).softmax(0), 0.0)
            return {name: part + s * torch.tensordot(w, bank[name], 1) for name, part in own.items()}

        direction = vmap(of_one)(dict(at.gradients))
        if at.total is None:
            return Moved(direction)
        fresh = normalised_sum(at, "global")
        newest = {name: torch.cat([fresh[name].unsqueeze(0), bank[name][:-1]]) for name in bank}
        return Moved(direction, remember={"bank": newest, "filled": torch.cat([filled.new_ones(1), filled[:-1]])})


# Where: which weights share, and at which steps


@dataclass(frozen=True)
class BodyOnly(Wrapper):
    """A rule for all weights but the head's, whose gradients pass as they are: D[head] = G[head].

    Args:
        head: names of the head's weights; an algorithm puts in those of its model.
    """

    head: tuple[str, ...] = ()

    def init(self, weights: Weights, steps: int) -> tuple[Tree, Tree]:
        body = self._body(weights)
        if not body:
            raise UserError("no gradient of the body is there to share: adapt the body too, or give another rule")
        return self.plain.init(body, steps)

    def update(self, at: InnerStep) -> Moved:
        moved = self.plain.update(at._replace(gradients=self._body(at.gradients), weights=self._body(at.weights)))
        return moved._replace(direction={**at.gradients, **moved.direction})

    def _body(self, weights: Weights) -> Weights:
        return {name: weight for name, weight in weights.items() if name not in self.head}


@dataclass(frozen=True)
class LeftOut(Wrapper):
    """A rule that leaves one inner step to the task's own gradient: D[t] = G[t] there. Its memory is kept all the same.

    Args:
        step: `"first"` or `"last"` of training; at test, every step past the last one counts as the last.
    """

    step: Literal["first", "last"] = "first"

    @property
    def any_layout(self) -> bool:  # type: ignore[override]
        return getattr(self.plain, "any_layout", False)

    def update(self, at: InnerStep) -> Moved:
        moved = self.plain.update(at)
        out = at.k == 0 if self.step == "first" else at.k >= len(at.learned["lam"]) - 1
        return moved._replace(direction=at.gradients) if out else moved


def with_head(rule: Rule, head: Callable[[], tuple[str, ...]]) -> Rule:
    """The same rule, where every `BodyOnly` and `HeadRate` in it knows the head of the model."""
    if isinstance(rule, Chain):
        return replace(rule, links=tuple(with_head(link, head) for link in rule.links))
    if isinstance(rule, BodyOnly | HeadRate) and not rule.head:
        rule = replace(rule, head=head())
    return replace(rule, plain=with_head(rule.plain, head)) if isinstance(rule, Wrapper) else rule


def body_sharing(norm: NormScope = "global") -> BodyOnly:
    """Gradient sharing of the body; the head takes its own gradient, since its rows belong to the task."""
    return BodyOnly(GradientSharing(norm))


def sharing_but(step: Literal["first", "last"], norm: NormScope = "global") -> LeftOut:
    """Gradient sharing at all inner steps but one."""
    return LeftOut(GradientSharing(norm), step)


def equivariant_sharing(norm: NormScope = "global") -> BodyOnly:
    """Gradient sharing of the body from the second step on, for a head that starts at zero.

    Then the shared vector does not depend on the order in which each task numbers its classes.
    """
    return BodyOnly(sharing_but("first", norm))
