"""An algorithm of ours beside the same one as a plain loop over tasks, and their comparison."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

import gradshare as gs
from gradshare.method.controls import TensorGates
from gradshare.method.mixing import (
    Additive,
    LengthKeeping,
    MeanSharing,
    Retrieval,
    TensorGatedSharing,
    body_sharing,
    equivariant_sharing,
    sharing_but,
)
from tests.support import reference
from tests.support.models import CONV4, REGRESSION, RELU_NORM, Model
from tests.support.reference import Method

ALGORITHMS = {
    "maml": gs.maml,
    "first order": gs.first_order_maml,
    "meta-sgd": gs.meta_sgd,
    "maml++": gs.maml_plus_plus,
    "anil": gs.anil,
    "boil": gs.boil,
    "proto-maml": gs.proto_maml,
}
FURTHER: dict[str, Any] = {  # inner optimisers and learned preconditioning, with fewer combinations
    "momentum": partial(gs.maml, inner=gs.momentum(0.9)),
    "adam": partial(gs.maml, inner=gs.adam(eps=1e-3)),  # gradients that are rounding errors move nothing
    "meta-curvature": gs.meta_curvature,
    "sparse-maml": gs.sparse_maml,
    "alfa": gs.alfa,
}
SPECIAL = {"meta-curvature": "curvature", "sparse-maml": "mask", "alfa": "alfa"}
RATES = {"meta-sgd": "element", "maml++": "tensor and step"}
LOSSES = {"cross_entropy": F.cross_entropy, "mse": F.mse_loss}
SHARING = {
    "alone": (None, "none", "global"),
    "global": (gs.GradientSharing(norm="global"), "share", "global"),
    "tensor": (gs.GradientSharing(norm="tensor"), "share", "tensor"),
    "gate only": (gs.GateOnly(), "gate", "global"),
    "batch only, global": (gs.BatchOnly(norm="global"), "batch", "global"),
    "batch only, tensor": (gs.BatchOnly(norm="tensor"), "batch", "tensor"),
    "memory only, global": (gs.MemoryOnly(norm="global"), "memory", "global"),
    "memory only, tensor": (gs.MemoryOnly(norm="tensor"), "memory", "tensor"),
    "conditioned, global": (gs.GradientSharing(norm="global", conditioned=True), "agree", "global"),
    "conditioned, tensor": (gs.GradientSharing(norm="tensor", conditioned=True), "agree", "tensor"),
    "gates by tensor only": (TensorGates(), "gate", "global"),
    "gates by tensor, global": (TensorGatedSharing(norm="global"), "share", "global"),
    "gates by tensor, tensor": (TensorGatedSharing(norm="tensor"), "share", "tensor"),
    "additive, global": (Additive(norm="global"), "add", "global"),
    "additive, tensor": (Additive(norm="tensor"), "add", "tensor"),
    "mean length": (MeanSharing(), "mean", "global"),
    "length-keeping, global": (LengthKeeping(norm="global"), "turn", "global"),
    "length-keeping, tensor": (LengthKeeping(norm="tensor"), "turn", "tensor"),
    "retrieval": (Retrieval(), "bank", "global"),
    "not first, tensor": (sharing_but("first", "tensor"), "share, not first", "tensor"),
    "not last, global": (sharing_but("last"), "share, not last", "global"),
    "body, global": (body_sharing(), "share, body", "global"),
    "equivariant, tensor": (equivariant_sharing("tensor"), "share, not first, body", "tensor"),
}
CONTROLS = [name for name in SHARING if "only" in name]
BODY = [name for name in SHARING if name.startswith(("body", "equivariant"))]
OTHER_WAYS = [name for name in list(SHARING)[10:] if name not in (*CONTROLS, *BODY)]
CONDITIONED = [name for name in SHARING if "conditioned" in name]
MATRIX = {"conv4": (CONV4, False), "batch norm net, adapted": (RELU_NORM, True), "regression": (REGRESSION, False)}


class Case(NamedTuple):
    """An algorithm of gradshare, and the same one for the reference."""

    model: nn.Module
    learner: Any
    method: Method

    def at(self, epoch: int, **method: Any) -> Case:
        return self._replace(learner=self.learner.at(epoch), method=self.method._replace(**method))


def build(
    entry: Model,
    algorithm: str = "maml",
    sharing: str = "global",
    steps: int = 2,
    adapt_norm: bool = False,
    **more: Any,
) -> Case:
    model, (link, first, norm) = entry.make(), SHARING[sharing]
    options = {} if algorithm == "anil" else {"adapt_norm": adapt_norm}
    make = (ALGORITHMS | FURTHER)[algorithm]
    learner = make(model, inner_lr=0.1, steps=steps, sharing=link, loss=entry.loss, **options, **more)
    method = Method(
        steps=steps,
        adapted=adapted_by(algorithm, model, adapt_norm),
        rates=RATES.get(algorithm, "constant"),
        first=first.partition(",")[0],
        left_out=next((step for step in ("first", "last") if f"not {step}" in first), ""),
        body_only="body" in first,
        norm=norm,
        first_order=algorithm == "first order",
        step_weights=(1 / steps,) * steps if algorithm == "maml++" else None,
        loss=LOSSES.get(entry.loss, entry.loss),
        inner=algorithm if algorithm in ("momentum", "adam") else "none",
        special=SPECIAL.get(algorithm, "none"),
        head=head_names(model) if algorithm == "proto-maml" or "body" in first else (),
        start="prototypes" if algorithm == "proto-maml" else "learned",
    )
    return Case(model, learner, method)


def adapted_by(algorithm: str, model: nn.Module, adapt_norm: bool) -> tuple[str, ...]:
    every, head = adapted_names(model, adapt_norm), head_names(model)
    return {"anil": head, "boil": tuple(name for name in every if name not in head)}.get(algorithm, every)


def classifiers(algorithms: Iterable[str], nets: dict[str, Any]) -> list[tuple[str, str]]:
    """All pairs of an algorithm and a network, but those of prototypes where the targets are not classes."""
    classes = {name for name, (entry, *_) in nets.items() if entry.loss == "cross_entropy"}
    return [(one, net) for one in algorithms for net in nets if net in classes or one != "proto-maml"]


def norm_names(model: nn.Module) -> set[str]:
    layers = {name for name, layer in model.named_modules() if isinstance(layer, _BatchNorm)}
    return {
        name for name, weight in model.named_parameters() if weight.requires_grad and name.rpartition(".")[0] in layers
    }


def adapted_names(model: nn.Module, adapt_norm: bool) -> tuple[str, ...]:
    fixed = set() if adapt_norm else norm_names(model)
    return tuple(name for name, weight in model.named_parameters() if weight.requires_grad and name not in fixed)


def head_names(model: nn.Module) -> tuple[str, ...]:
    names = [name for name, _ in model.named_parameters()]
    return tuple(name for name in names if name.rpartition(".")[0] == names[-1].rpartition(".")[0])


def randomised(state: Any, seed: int = 3) -> Any:
    """Move everything that is learned away from where it starts."""
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for path, leaf in state.trainable().items():
            noise = torch.randn(leaf.shape, generator=draw, dtype=leaf.dtype)
            if path.startswith("learned/sharing"):
                leaf.copy_(noise)
            else:
                leaf.add_(noise, alpha=0.05 if path.startswith("learned/rates") else 0.15)
    return state


def same(path: str, ours: Tensor, theirs: Tensor, scale: float) -> str:
    """Empty if equal to 1e-10 of the largest element, or to the rounding of sums of such a scale.

    Where the largest element is rounding (below 1e-12 of scale), if both are.
    """
    largest, apart = theirs.abs().max().item(), (ours - theirs).abs().max().item()
    bound = 1e-12 * scale if largest < 1e-12 * scale else max(1e-10 * largest, 1e-15 * scale)
    return "" if apart <= bound else f"{path}: differs by {apart:.2e}, largest element {largest:.2e}"


def meta_gradients(loss: Tensor, leaves: dict[str, Tensor]) -> dict[str, Tensor]:
    grads = torch.autograd.grad(loss, list(leaves.values()), materialize_grads=True)
    return dict(zip(leaves, grads, strict=True))


def disagreements(case: Case, state: Any, out: Any, expected: reference.Outer) -> Iterator[str]:
    leaves = state.trainable()
    ours, theirs = meta_gradients(out.loss, leaves), meta_gradients(expected.loss, leaves)
    scale = max(grad.abs().max().item() for grad in theirs.values())
    yield same("loss", out.loss.detach(), expected.loss.detach(), 1.0)
    yield from (same(path, ours[path], theirs[path], scale) for path in leaves)
    if expected.accuracy is not None:
        yield same("accuracy", out.accuracy, expected.accuracy, 1.0)
    if case.method.first in ("none", "gate"):
        yield "" if not out.memory else f"memory of {list(out.memory)} without sharing"
    else:
        yield from memory_disagreements(case, out.memory["sharing"], expected)


def memory_disagreements(case: Case, memory: dict[str, Any], expected: reference.Outer) -> Iterator[str]:
    newest = memory["ghat"] if "ghat" in memory else {name: bank[:, 0] for name, bank in memory["bank"].items()}
    yield "" if bool(memory["seen"] if "seen" in memory else memory["filled"][0]) else "memory: not seen"
    yield "" if set(newest) == set(case.method.shared) else f"memory of {list(newest)}"
    for name, ghat in expected.ghat.items():
        ours = newest[name]
        yield "" if not ours.requires_grad else f"memory of {name} has a gradient"
        if (
            case.method.norm == "tensor" and name in expected.rounding
        ):  # a unit vector of rounding errors: only its length is defined
            yield "" if ours.flatten(1).norm(dim=1).max() <= 1 + 1e-12 else f"memory of {name} is longer than 1"
        else:
            yield same(f"memory of {name}", ours, ghat, 1.0)


def assert_equal_to_reference(case: Case, entry: Model, tasks: int, iterations: int = 2) -> None:
    """Over consecutive meta-iterations: the second one's memory is the first's."""
    state = randomised(case.learner.init(seed=None))
    assert all(leaf.dtype == torch.float64 and leaf.requires_grad for leaf in state.trainable().values())
    theirs = state
    for i in range(iterations):
        episodes = entry.tasks(tasks, seed=10 + i)
        out = case.learner.outer_loss(state, episodes)
        expected = reference.outer_loss(case.model, theirs, episodes, case.method)
        wrong = [line for line in disagreements(case, state, out, expected) if line]
        assert not wrong, "\n".join([f"meta-iteration {i + 1}:", *wrong])
        state = dataclasses.replace(state, memory=out.memory)
        if out.memory:
            memory = reference.next_memory(theirs, expected.ghat, case.method)
            theirs = dataclasses.replace(state, memory={"sharing": memory})


def assert_adapts_alone(case: Case, entry: Model, seen: bool) -> None:
    state = randomised(case.learner.init(seed=None))
    if seen:
        state = dataclasses.replace(state, memory=case.learner.outer_loss(state, entry.tasks(3, seed=5)).memory)
    before, tasks = copy.deepcopy(state.memory), entry.tasks(3, seed=6)
    fast = case.learner.adapt(state, tasks.support_x, tasks.support_y)
    logits = case.learner.predict(fast, tasks.query_x)
    for t in range(3):
        theta, expected = reference.adapt(
            case.model, state, tasks.support_x[t], tasks.support_y[t], tasks.query_x[t], case.method
        )
        wrong = [same("logits", logits[t].detach(), expected.detach(), 1.0)]
        wrong += [
            same(name, fast[name][t].detach(), theta[name].detach(), 1.0)
            for name in theta.keys() - without_a_cosine(case, state, tasks.support_x[t], tasks.support_y[t])
        ]
        assert not any(wrong), wrong
    assert_trees_equal(before, state.memory)


def without_a_cosine(case: Case, state: Any, x: Tensor, y: Tensor) -> set[str]:
    """Tensors whose gradient is rounding agree with the memory by chance, which conditions their step, of no effect."""
    if case.method.first != "agree" or case.method.norm != "tensor":
        return set()
    theta = {name: state.params[name] for name in case.method.adapted}
    return reference.nothing_but_rounding([reference.gradient(case.model, state, theta, 0, x, y, case.method)])


def assert_trees_equal(a: Any, b: Any) -> None:
    if isinstance(a, dict):
        assert set(a) == set(b)
        for key in a:
            assert_trees_equal(a[key], b[key])
    else:
        assert torch.equal(a, b)


# Finite differences: the arbiter of both


def group_of(path: str) -> str | None:
    """Weights, m, lam, rates and values per step: a group of tensors each."""
    kind = path.split("/")
    return path if "sharing" in kind else "/".join(kind[:-1])


def assert_equal_to_finite_differences(
    case: Case, entry: Model, group: Callable[[str], str | None], h: float = 1e-3
) -> None:
    state = randomised(case.learner.init(seed=None))
    memory = case.learner.outer_loss(state, entry.tasks(2, seed=20)).memory
    state, episodes = dataclasses.replace(state, memory=memory), entry.tasks(2, seed=21)
    leaves = state.trainable()

    def loss() -> float:
        return case.learner.outer_loss(state, episodes).loss.item()

    grads = meta_gradients(case.learner.outer_loss(state, episodes).loss, leaves)
    whole = torch.sqrt(sum(g.pow(2).sum() for g in grads.values())).item()
    for name in sorted({group(path) for path in leaves} - {None}):
        paths = [path for path in leaves if group(path) == name]
        for seed in range(2):
            way = directions([leaves[path] for path in paths], seed)
            exact = sum((v * grads[path]).sum().item() for v, path in zip(way, paths, strict=True))
            slope = five_points(loss, [leaves[path] for path in paths], way, h)
            typical = torch.sqrt(sum(grads[path].pow(2).sum() for path in paths)).item()
            typical /= sum(v.numel() for v in way) ** 0.5
            assert abs(exact - slope) <= 1e-6 * max(abs(exact), typical) + 1e-11 * whole, (name, exact, slope)


def directions(tensors: list[Tensor], seed: int) -> list[Tensor]:
    draw = torch.Generator().manual_seed(seed)
    way = [torch.randn(t.shape, generator=draw, dtype=t.dtype) for t in tensors]
    length = torch.sqrt(sum(v.pow(2).sum() for v in way))
    return [v / length for v in way]


def five_points(f: Callable[[], float], tensors: list[Tensor], way: list[Tensor], h: float = 1e-3) -> float:
    """The central difference of fourth order."""
    start = [t.detach().clone() for t in tensors]

    def at(distance: float) -> float:
        with torch.no_grad():
            for t, s, v in zip(tensors, start, way, strict=True):
                t.copy_(s + distance * v)
        return f()

    slope = (8 * (at(h) - at(-h)) - (at(2 * h) - at(-2 * h))) / (12 * h)
    at(0.0)
    return slope
