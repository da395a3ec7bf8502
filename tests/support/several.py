"""What the tests of several processes compute, in one process and in each of several, and how the results compare.

`python -m tests.support.several FOLDER quick` is what each of several processes runs; `every` computes more.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import gradshare as gs
from gradshare.method.variants import first_link
from gradshare.runs import checkpoints
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
    "boil": gs.boil,
    "proto-maml": gs.proto_maml,
    "maml, zero head": lambda model, **more: gs.maml(model, head_start="zero", **more),
    "reptile": lambda model, steps, sharing: gs.reptile(model, steps=steps),  # without what nothing would learn
    "meta-curvature": gs.meta_curvature,
    "sparse-maml": gs.sparse_maml,
    "alfa": gs.alfa,
    "momentum": partial(gs.maml, inner=gs.momentum(0.9)),
    "adam": partial(gs.maml, inner=gs.adam(eps=1e-3)),
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
    **{arm: first_link(arm, "tensor") for arm in ("shared-tensor-gates", "additive", "mean-length", "length-keeping")},
    **{arm: first_link(arm) for arm in ("tensor-gates", "retrieval", "not-first", "not-last")},
}
ROUGH = ("alfa", "adam")  # they make steps of what is rounding error (a mean that is 0), so long trainings drift apart
LONG = ("tensor", "memory only, global", "conditioned, global")
RUN: dict[str, Any] = dict(
    epochs=3, iterations=4, tasks=4, ways=3, queries=3, val_tasks=7, test_tasks=5, eval_batch=2, outer_lr=1e-2
)
STOPS = {"train": (1, 2), "val": (0, 3)}  # epoch and iteration of the batch at which one process gets a signal


def net() -> nn.Module:
    """A convolution without bias: before batch norm its gradient is rounding error, which Adam makes large."""
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


def one_step(learner: gs.Learner, group: gs.Group, micro_batch: int | None = None) -> dict[str, Tensor]:
    """Loss, meta-gradients, memory and scores of a batch, after another one that filled the memory."""
    learner, state = learner.over(group), moved(learner.init())
    state.memory = learner.outer_loss(state, batch(7)).memory
    adam = gs.optimiser(state, 0.0)
    out = gs.meta_step(learner, state, adam, batch(1), micro_batch=micro_batch)
    assert out.accuracy is not None
    gradients = {f"gradient/{name}": leaf.grad for name, leaf in state.trainable().items() if leaf.grad is not None}
    scores = {"loss": out.loss.detach(), "losses": out.losses, "accuracy": out.accuracy}
    memory = {name: tensor for name, tensor in state.tensors().items() if name.startswith("memory/")}
    return {**scores, **gradients, **memory}


def training(learner: gs.Learner, group: gs.Group, iterations: int) -> dict[str, Tensor]:
    """Everything that training changes, after some iterations."""
    learner, state = learner.over(group), learner.init()
    adam = gs.optimiser(state, 1e-2)
    for iteration in range(iterations):
        gs.meta_step(learner, state, adam, batch(iteration))
    group.check_same(state.tensors(), f"after {iterations} iterations")
    return {name: tensor.detach() for name, tensor in state.tensors().items()}


def with_a_diverging_task(group: gs.Group) -> dict[str, Tensor]:
    """Everything that training changes, after three iterations, where a task of the second one diverges."""
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
    """Three orders of derivatives of sum_r a_r sum(s^4), where s is the sum of the rows of x, shared by the processes.

    Each row has its own factor a. Each derivative is multiplied by its own vector before the next one.
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


def core(group: gs.Group, every: bool) -> dict[str, dict[str, Tensor]]:
    """Every algorithm with sharing, and every way of sharing with MAML; with `every`, all combinations, and longer."""
    found = {"derivatives": derivatives(group), "a diverging task": with_a_diverging_task(group)}
    for algorithm in ALGORITHMS:
        for sharing in SHARING:
            if every or algorithm == "maml" or sharing == "global":
                found[f"step: {algorithm}, {sharing}"] = one_step(learner_of(algorithm, sharing), group)
    for algorithm, sharing in [
        ("momentum", "global"),
        *(("maml++", name) for name in SHARING if every or name == "global"),
    ]:
        alone = group.size == 1  # in one process all tasks at once
        found[f"parts: {algorithm}, {sharing}"] = one_step(learner_of(algorithm, sharing), group, None if alone else 1)
    iterations = 20 if every else 3
    long = [name for name in ALGORITHMS if "," not in name and name not in ROUGH]
    for algorithm in long if every else ["maml++"]:
        found[f"training: {algorithm}"] = training(learner_of(algorithm, "global"), group, iterations)
    for sharing in LONG if every else ["memory only, global"]:
        found[f"training: {sharing}"] = training(learner_of("maml", sharing), group, iterations)
    ours = gs.Conv4(3, filters=3, image=(1, 16, 16)).double()
    conv4 = gs.maml(ours, steps=2, sharing=gs.GradientSharing())
    found["training: Conv4"] = training(conv4, group, iterations)
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
    """Sends this process a signal to stop at a moment of the run."""

    def __init__(self, moment: tuple[int, int]) -> None:
        self.moment = moment

    def iteration(self, epoch: int, iteration: int, loss: float, accuracy: float | None) -> None:
        if (epoch, iteration) == self.moment:
            os.kill(os.getpid(), signal.SIGTERM)

    def evaluating(self, split: str, done: int, total: int) -> None: ...
    def epoch(self, line: Any, seconds: float) -> None: ...


class Asking:
    """A data set that sends its process a signal to stop when a certain batch of tasks is drawn."""

    def __init__(self, data: gs.Dataset, split: str) -> None:
        self.data, self.split = data, split

    def sample(self, split: str, shape: gs.Shape, tasks: int, key: tuple[int, ...]) -> gs.Episodes:
        if split == self.split and key[2:] == STOPS[split]:
            os.kill(os.getpid(), signal.SIGTERM)
        return self.data.sample(split, shape, tasks, key)


def stopped(data: gs.Dataset, folder: Path, split: str, group: gs.Group) -> str:
    """Continue a run until the process that draws a certain batch gets a signal; return the message of each process."""
    last = group.rank == group.size - 1
    asking = Asking(data, split) if last or split == "val" else data  # only one process draws a batch of validation
    try:
        gs.train(run_learner(), asking, folder, resume=True, group=group, **RUN)
    except Interrupted as stop:
        return str(stop)
    return "it was not stopped"


class Found(NamedTuple):
    """What one process found, and each of several."""

    one: dict[str, Any]
    each: list[dict[str, Any]]
    folder: Path
    size: int


def in_one_process(folder: Path, every: bool) -> dict[str, Any]:
    """Results of one process; a whole run; and a run that is interrupted, for 2 and for 3 processes to continue."""
    with float64():
        data = gs.load_dataset(folder / "blobs")
        found = {"core": core(gs.Group(), every), "evaluation": evaluation(data, gs.Group())}
        found["few"] = evaluation(data, gs.Group(), tasks=3)
        gs.train(run_learner(), data, folder / "whole-1", **RUN)
        with pytest.raises(Interrupted):
            gs.train(run_learner(), data, folder / "hopping-2", display=StopAt((0, 3)), **RUN)
        shutil.copytree(folder / "hopping-2", folder / "hopping-3")
    return found


def in_several(one: dict[str, Any], folder: Path, size: int, every: bool) -> Found:
    words = ["-m", "tests.support.several", str(folder), "every" if every else "quick"]
    for code, _, errors in ended(together(size, words)):
        assert code == 0, errors
    return Found(one, [torch.load(folder / f"found-{size}-{rank}.pt") for rank in range(size)], folder, size)


@contextmanager
def float64() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


def together(size: int, words: list[str]) -> list[subprocess.Popen[str]]:
    """Start processes with the environment that torchrun would give them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    root = Path(__file__).parents[2]
    common = {
        "PYTHONPATH": os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH", "")])),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(size),
        "OMP_NUM_THREADS": "1",
    }
    return [
        subprocess.Popen(
            [sys.executable, *words],
            env={**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(size)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]


def ended(processes: list[subprocess.Popen[str]], timeout: float = 240) -> list[tuple[int, str, str]]:
    """Wait for processes; return exit code, output and errors of each."""
    try:
        texts = [process.communicate(timeout=timeout) for process in processes]
        return [(process.returncode, *text) for process, text in zip(processes, texts, strict=True)]
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def differences(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> list[str]:
    """What differs by more than 1e-12 of its largest element, or of 1e-6 of the largest of all if that is larger."""
    assert ours.keys() == theirs.keys()
    largest = max(tensor.double().abs().max().item() for tensor in theirs.values())
    found = []
    for name, tensor in theirs.items():
        apart = (ours[name].double() - tensor.double()).abs().max().item()
        if not apart <= 1e-12 * max(tensor.double().abs().max().item(), 1e-6 * largest):
            found.append(f"{name}: {apart:.1e} apart, largest {tensor.double().abs().max():.1e}")
    return found


def check_core(both: Found) -> None:
    """Losses, meta-gradients, memories and weights are those of one process, and the same bits in all processes."""
    assert both.one["core"]["a diverging task"]["faults"].tolist() == [0, 1, 0]
    for found in both.each:
        assert found["core"].keys() == both.one["core"].keys()
        apart = {name: differences(found["core"][name], tensors) for name, tensors in both.one["core"].items()}
        different = {name: each for name, each in apart.items() if each}
    assert not different, different
    for name, tensors in both.each[0]["core"].items():
        for other in both.each[1:]:
            assert all(torch.equal(other["core"][name][key], tensor) for key, tensor in tensors.items()), name


def check_evaluation(both: Found) -> None:
    """To the last bit."""
    for found in both.each:
        for name in ("evaluation", "few"):
            for key, tensor in both.one[name].items():
                assert torch.equal(found[name][key], tensor), (name, key)


def check_runs(both: Found) -> None:
    """A run of several processes is the run of one, also if one process begins it and another one finishes it."""
    whole, hopping = (both.folder / f"{name}-{both.size}" for name in ("whole", "hopping"))
    assert {path.name for path in whole.iterdir()} == {path.name for path in (both.folder / "whole-1").iterdir()}
    assert_same_run(both.folder / "whole-1", whole)
    for found in both.each:
        assert [stop.partition(";")[0] for stop in found["stops"]] == [
            "stopped in epoch 2 after iteration 3",
            "stopped in epoch 2 after iteration 4",  # in validation
        ]
    with float64():
        gs.train(run_learner(), gs.load_dataset(both.folder / "blobs"), hopping, resume=True, **RUN)
    assert_same_run(both.folder / "whole-1", hopping)


def assert_same_run(one: Path, other: Path) -> None:
    """Configuration, checkpoints and metrics, to 1e-12."""
    assert (one / "config.json").read_bytes() == (other / "config.json").read_bytes()
    for name in {path.name for path in checkpoints.listing(one / "checkpoints")}:
        paths = [folder / "checkpoints" / name for folder in (one, other)]
        (progress, tensors), (other_progress, other_tensors) = (checkpoints.load(path) for path in paths)
        assert differences(other_tensors, tensors) == []
        ours, theirs = (numbers([line.as_json() for line in each.metrics]) for each in (progress, other_progress))
        assert ours == pytest.approx(theirs, rel=1e-12)
    summaries = [json.loads((folder / "summary.json").read_text()) for folder in (one, other)]
    assert numbers(summaries[0]) == pytest.approx(numbers(summaries[1]), rel=1e-12)


def numbers(value: Any) -> list[float]:
    """All numbers of nested dicts and lists, in their order."""
    if isinstance(value, (dict, list)):
        return [x for part in (value.values() if isinstance(value, dict) else value) for x in numbers(part)]
    return [value]


def main(folder: Path, every: bool) -> None:
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    data = gs.load_dataset(folder / "blobs")
    with ends_at_once(), gs.processes(timeout=60) as group:
        found: dict[str, Any] = {"core": core(group, every), "evaluation": evaluation(data, group)}
        found["few"] = evaluation(data, group, tasks=3)  # two batches: of three processes one has none
        gs.train(run_learner(), data, folder / f"whole-{group.size}", group=group, **RUN)
        found["stops"] = [stopped(data, folder / f"hopping-{group.size}", split, group) for split in STOPS]
        torch.save(found, folder / f"found-{group.size}-{group.rank}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2] == "every")
