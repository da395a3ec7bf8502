"""Other ways to share: what vector the tasks share, and how a task mixes it into its own gradient.

Each changes one part of `GradientSharing`. `where.py` chooses the weights and the steps that share.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch.func import vmap

from gradshare.method.rules import InnerStep, Moved, Tree, Weights
from gradshare.method.sharing import (
    TYPICAL,
    SharingRule,
    finite_part,
    mix,
    normalised,
    normalised_sum,
    start_sharing,
    tensor_gates,
)

COUNT = "number of tasks"  # beside the gradients in one sum; no weight has such a name
SLOTS = 4  # batches in the bank of `Retrieval`


@dataclass(frozen=True)
class Additive(SharingRule):
    """D[t] = G[t] + s_k ghat: the step keeps the task's own gradient whole. s starts at 0, which is plain MAML."""

    def init(self, weights: Weights, steps: int) -> tuple[Tree, Tree]:
        return start_sharing(weights, steps, ("m", "s"))

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

    def init(self, weights: Weights, steps: int) -> tuple[Tree, Tree]:
        return start_sharing(weights, steps, ("m", "lam", "gate"))

    def mixed(self, at: InnerStep, shared: Weights) -> Weights:
        lam, keep = torch.sigmoid(at.now(at.learned["lam"])), 1 - torch.sigmoid(at.now(at.learned["gate"]))

        def of_one(own: Weights) -> Weights:
            unit = normalised(own, self.norm)
            turned = normalised({name: (1 - lam) * unit[name] + lam * shared[name] for name in own}, self.norm)
            lengths = self._dot(unit, own)
            return {name: keep * lengths[name] * turned[name] for name in own}

        return vmap(of_one)(dict(at.gradients))

    def _dot(self, one: Weights, other: Weights) -> Weights:
        parts = {name: (one[name] * other[name]).sum() for name in one}
        return parts if self.norm == "tensor" else dict.fromkeys(parts, torch.stack(list(parts.values())).sum())


@dataclass(frozen=True)
class TensorGatedSharing(SharingRule):
    """Sharing whose gate of equation 4 is learned for each weight tensor and step."""

    any_layout = False

    def init(self, weights: Weights, steps: int) -> tuple[Tree, Tree]:
        learned, memory = start_sharing(weights, steps, ("m",))
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

    def init(self, weights: Weights, steps: int) -> tuple[Tree, Tree]:
        learned, memory = start_sharing(weights, steps, ("s", "c"))
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
            cosines = torch.stack([(bank[name] * unit[name]).flatten(1).sum(1) for name in own]).sum(0)  # [slots]
            w = torch.where(filled, torch.where(filled, c * cosines / TYPICAL, -torch.inf).softmax(0), 0.0)
            return {name: part + s * torch.tensordot(w, bank[name], 1) for name, part in own.items()}

        direction = vmap(of_one)(dict(at.gradients))
        if at.total is None:
            return Moved(direction)
        fresh = normalised_sum(at, "global")
        newest = {name: torch.cat([fresh[name].unsqueeze(0), bank[name][:-1]]) for name in bank}
        return Moved(direction, remember={"bank": newest, "filled": torch.cat([filled.new_ones(1), filled[:-1]])})
