"""What the tests of several processes compute, in one process or in each of several.

Run as `python -m tests.support.several FOLDER`.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tests.support.rules import with_momentum
from torch import Tensor, nn

import gradshare as gs
from gradshare.runs.evaluate import evaluate
from gradshare.runs.torchrun import ends_at_once
from gradshare.runs.workers import Interrupted

ALGORITHMS: dict[str, Callable[..., gs.Learner]] = {
    "maml": gs.maml,
    "first order": gs.first_order_maml,
    "meta-sgd": gs.meta_sgd,
    "maml++": gs.maml_plus_plus,
    "maml++, first order": lambda model, **more: gs.maml_plus_plus(model, first_order_epochs=2, **more),
    "maml, norm adapted": lambda model, **more: gs.maml(model, adapt_norm=True, **more),
    "anil": gs.anil,
}
SHARING: dict[str, Any] = {
    "alone": None,
    "global": gs.GradientSharing("global"),
    "tensor": gs.GradientSharing("tensor"),
    "gate only": gs.GateOnly(),
    "batch only, global": gs.BatchOnly("global"),
    "batch only, tensor": gs.BatchOnly("tensor"),
    "memory only, global": gs.MemoryOnly("global"),
    "memory only, tensor": gs.MemoryOnly("tensor"),
    "conditioned, global": gs.GradientSharing("global", conditioned=True),
    "conditioned, tensor": gs.GradientSharing("tensor", conditioned=True),
    "sharing, then momentum": with_momentum(),
}
FOR_LONG = ("tensor", "memory only, global", "conditioned, global")
RUN: dict[str, Any] = dict(
    epochs=3, iterations=4, tasks=4, ways=3, queries=3, val_tasks=7, test_tasks=5, eval_batch=2, outer_lr=1e-2
)
STOPS = {"train": (1, 2), "val": (0, 3)}  # epoch and iteration of the batch at which one of several is asked to stop


def net() -> nn.Module:
    """No bias in the convolution: under batch norm its gradient is rounding, which Adam makes large."""
    torch.manual_seed(0)
    layers = nn.Conv2d(1, 3, 3, padding=1, bias=False), nn.BatchNorm2d(3), nn.SiLU(), nn.AvgPool2d(4), nn.Flatten()
    return nn.Sequential(*layers, nn.Linear(48, 3)).double()


def batch(seed: int, count: int = 4) -> gs.Episodes:
    draw = torch.Generator().manual_seed(seed)

    def part(each: int) -> tuple[Tensor, Tensor]:
        x = torch.randn(count, 3 * each, 1, 16, 16, generator=draw, dtype=torch.float64)
        return x, torch.arange(3).repeat(each).expand(count, -1)

    return gs.Episodes(*part(2), *part(4))


def learner_of(algorithm: str, sharing: str) -> gs.Learner:
    return ALGORITHMS[algorithm](net(), steps=2, sharing=SHARING[sharing])


def moved(state: gs.MetaState) -> gs.MetaState:
    draw = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for tensor in state.trainable().values():
            tensor += 0.1 * torch.randn(tensor.shape, generator=draw, dtype=tensor.dtype)
    return state


def one_step(learner: gs.Learner, group: gs.Group) -> dict[str, Tensor]:
    """Loss, meta-gradients and memory of a batch, after another one filled the memory; and what each task scored."""
    learner, state = learner.over(group), moved(learner.init())
    state.memory = learner.outer_loss(state, batch(7)).memory
    adam = gs.optimiser(state, 0.0)
    out = gs.meta_step(learner, state, adam, batch(1))
    assert out.accuracy is not None
    gradients = {f"gradient/{name}": leaf.grad for name, leaf in state.trainable().items() if leaf.grad is not None}
    scores = {"loss": out.loss.detach(), "losses": out.losses, "accuracy": out.accuracy}
    memory = {name: tensor for name, tensor in state.tensors().items() if name.startswith("memory/")}
    return {**scores, **gradients, **memory}


def twenty_steps(learner: gs.Learner, group: gs.Group) -> dict[str, Tensor]:
    """Everything that training changes, after 20 iterations."""
    learner, state = learner.over(group), learner.init()
    adam = gs.optimiser(state, 1e-2)
    for iteration in range(20):
        gs.meta_step(learner, state, adam, batch(iteration))
    group.check_same(state.tensors(), "after 20 iterations")
    return {name: tensor.detach() for name, tensor in state.tensors().items()}


def with_a_diverging_task(group: gs.Group) -> dict[str, Tensor]:
    """Everything that training changes, after three iterations of which the second has a task that diverges."""
    learner, state = learner_of("maml", "global").over(group), learner_of("maml", "global").init()
    adam, batches, faults = gs.optimiser(state, 1e-2), [batch(number) for number in range(3)], []
    batches[1].support_x[2] = torch.nan
    for episodes in batches:
        outcome = gs.meta_step(learner, state, adam, episodes)
        assert outcome.fault is not None
        faults.append(outcome.fault)
    memory = learner.outer_loss(state, batches[1]).memory["sharing"]["ghat"]
    found = {name: tensor.detach() for name, tensor in state.tensors().items()}
    return {**found, **{f"after/{name}": value for name, value in memory.items()}, "faults": torch.stack(faults)}


def derivatives(group: gs.Group) -> dict[str, Tensor]:
    """Of sum_r a_r sum(s^4), where s is the sum over rows of x and processes hold the rows: three orders.

    Each row has a factor a of its own, and each order a vector v that its derivative is multiplied with.
    """
    draw = torch.Generator().manual_seed(3)
    rows = torch.randn(3, 4, 5, generator=draw, dtype=torch.float64)
    own = group.share(3)
    x = rows[0].new_tensor(torch.randn(3, 5, generator=draw, dtype=torch.float64).tolist())[own].requires_grad_()
    (s,) = group.sum([x.sum(0)])
    value, found = (rows[0, own, 0].sum() * s**4).sum(), {}
    for order in range(3):
        (gradient,) = torch.autograd.grad(value, x, create_graph=True)
        found[f"order {order + 1}"] = torch.cat(group.gather(gradient.detach()))
        value = (gradient * rows[order, own]).sum()
    return found


def core(group: gs.Group) -> dict[str, dict[str, Tensor]]:
    found = {"derivatives": derivatives(group), "a diverging task": with_a_diverging_task(group)}
    for algorithm in ALGORITHMS:
        for sharing in SHARING:
            found[f"step: {algorithm}, {sharing}"] = one_step(learner_of(algorithm, sharing), group)
        if "," not in algorithm:
            found[f"20 steps: {algorithm}"] = twenty_steps(learner_of(algorithm, "global"), group)
    for sharing in FOR_LONG:
        found[f"20 steps: {sharing}"] = twenty_steps(learner_of("maml", sharing), group)
    ours = gs.Conv4(3, filters=3, image=(1, 16, 16)).double()
    found["20 steps: Conv4"] = twenty_steps(gs.maml(ours, steps=2, sharing=gs.GradientSharing()), group)
    return found


def run_learner() -> gs.Learner:
    return gs.maml_plus_plus(net(), steps=2, sharing=gs.GradientSharing(), multi_step_epochs=2)


def evaluation(data: gs.Dataset, group: gs.Group, tasks: int = 7) -> dict[str, Tensor]:
    learner, state = run_learner(), moved(run_learner().init())
    state.memory = learner.outer_loss(state, batch(7)).memory
    states = [state, moved(learner.init())]
    result = evaluate(learner, states, data, "val", gs.Shape(3, 1, 3), tasks, 0, 2, group=group)
    assert result.accuracies is not None
    return {"losses": result.losses, "accuracies": result.accuracies}


class StopAt:
    """Asks this process to stop at a moment of the run, or in an evaluation."""

    def __init__(self, moment: tuple[int, int]) -> None:
        self.moment = moment

    def iteration(self, epoch: int, iteration: int, loss: float, accuracy: float | None) -> None:
        if (epoch, iteration) == self.moment:
            os.kill(os.getpid(), signal.SIGTERM)

    def evaluating(self, split: str, done: int, total: int) -> None: ...
    def epoch(self, line: Any, seconds: float) -> None: ...


class Asking:
    """A data set that asks its process to stop when a certain batch of tasks is drawn."""

    def __init__(self, data: gs.Dataset, split: str) -> None:
        self.data, self.split = data, split

    def sample(self, split: str, shape: gs.Shape, tasks: int, key: tuple[int, ...]) -> gs.Episodes:
        if split == self.split and key[2:] == STOPS[split]:
            os.kill(os.getpid(), signal.SIGTERM)
        return self.data.sample(split, shape, tasks, key)


def stopped(data: gs.Dataset, folder: Path, split: str, group: gs.Group) -> str:
    """Go on with a run until the process that draws a certain batch is asked to stop; what each of them says then."""
    last = group.rank == group.size - 1
    asking = Asking(data, split) if last or split == "val" else data  # a batch of validation is drawn by one alone
    try:
        gs.train(run_learner(), asking, folder, resume=True, group=group, **RUN)
    except Interrupted as stop:
        return str(stop)
    return "it was not stopped"


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    data = gs.load_dataset(folder / "blobs")
    with ends_at_once(), gs.processes(timeout=30) as group:
        found: dict[str, Any] = {"core": core(group), "evaluation": evaluation(data, group)}
        found["few"] = evaluation(data, group, tasks=3)  # two batches: of three processes one has none
        gs.train(run_learner(), data, folder / f"whole-{group.size}", group=group, **RUN)
        found["stops"] = [stopped(data, folder / f"hopping-{group.size}", split, group) for split in STOPS]
        torch.save(found, folder / f"found-{group.size}-{group.rank}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
