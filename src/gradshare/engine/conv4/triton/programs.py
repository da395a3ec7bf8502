"""Inner rules as fused GPU programs, found by the rule's own value. Gradients are one vector per task, [tasks, P]."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gradshare.engine.conv4.triton.sharing import cosines, share
from gradshare.method.controls import BatchOnly, MemoryOnly
from gradshare.method.rules import Chain, InnerStep, Moved, Rule
from gradshare.method.sharing import (
    TYPICAL,
    GradientSharing,
    mix,
    plain_gates,
    recall_shared,
    remember_shared,
    stored_mean,
)

Program = Callable[[InnerStep], Moved]


def share_gradients(at: InnerStep) -> Moved:
    name, own, stored = _vectors(at)
    direction, running = share(own, at.learned["m"], at.learned["lam"], stored, at.memory["seen"], at.k)
    return _moved(at, name, direction, running)


def share_by_agreement(at: InnerStep) -> Moved:
    name, own, stored = _vectors(at)
    lam, c = at.learned["lam"], at.learned["agreement"]
    only_shared = torch.full_like(lam, torch.inf)
    shared, running = share(own, at.learned["m"], only_shared, stored, at.memory["seen"], at.k)
    gates = torch.sigmoid(lam[at.k] + c[at.k] * (cosines(own, stored) / TYPICAL)).unsqueeze(1)
    return _moved(at, name, mix(at.gradients, {name: shared}, {name: gates})[name], running)


def share_batch(at: InnerStep) -> Moved:
    name, own, stored = _vectors(at)
    lam, nothing_seen = at.learned["lam"], torch.zeros_like(at.memory["seen"])
    direction, fresh = share(own, lam.detach(), lam, stored, nothing_seen, at.k)
    return _moved(at, name, direction, fresh)


def share_memory(at: InnerStep) -> Moved:
    name, own, stored = _vectors(at)
    half = torch.zeros_like(at.learned["lam"])  # sig(0)
    _, running = share(own.detach(), half, half, stored, at.memory["seen"], at.k)
    return _moved(at, name, recall_shared(at, mix(at.gradients, stored_mean(at), plain_gates(at)))[name], running)


PROGRAMS: tuple[tuple[Rule, Program], ...] = (
    (GradientSharing(), share_gradients),
    (GradientSharing(conditioned=True), share_by_agreement),
    (BatchOnly(), share_batch),
    (MemoryOnly(), share_memory),
)


@dataclass(frozen=True)
class Fused(Rule):
    """A rule whose training steps run by a program; at test it runs as it is."""

    plain: Rule
    program: Program = field(repr=False)

    @property
    def name(self) -> str:  # type: ignore[override]
        return self.plain.name

    def update(self, at: InnerStep) -> Moved:
        return self.plain.update(at) if at.total is None else self.program(at)


def with_programs(rule: Rule) -> Rule:
    """The same rule, by our programs where there are some. Valid where all tasks of a batch are in this process."""
    if isinstance(rule, Chain):
        return Chain(tuple(map(with_programs, rule.links)))
    for known, program in PROGRAMS:
        if type(known) is type(rule) and known == rule:
            return Fused(rule, program)
    return rule


def _vectors(at: InnerStep) -> tuple[str, Tensor, Tensor]:
    ((name, own),) = at.gradients.items()
    return name, own, at.memory["ghat"][name][at.k]


def _moved(at: InnerStep, name: str, direction: Tensor, running: Tensor) -> Moved:
    return Moved({name: direction}, remember=remember_shared(at, {name: running}))
