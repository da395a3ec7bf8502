"""The same results on a GPU as on a CPU. Needs a GPU: pytest tests/engine tests/stress/test_kernels.py"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gradshare as gs
from gradshare.learners.graphs import GraphedPrediction, GraphedStep
from gradshare.learners.optimisers import optimiser_tensors
from gradshare.runs import checkpoints
from gradshare.runs.divergence import Diverged
from tests.support.learners import ALGORITHMS, every_algorithm, every_sharing, gradients, net, randomised, tasks
from tests.support.runs import TINY, learner, same_run

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@every_algorithm
@every_sharing
@pytest.mark.parametrize("backbone", ["user", "conv4"])
def test_the_gpu_gives_the_same_meta_gradients(algorithm: Any, sharing: Any, backbone: str) -> None:
    model = net() if backbone == "user" else gs.Conv4(ways=3, filters=4, image=(1, 16, 16)).double()
    episodes = tasks() if backbone == "user" else large_tasks()
    on_cpu = algorithm(model, steps=3, sharing=sharing)
    on_gpu, state = on_cpu.to("cuda"), randomised(on_cpu.init())
    for _ in range(2):
        expected, expected_gradients = gradients(on_cpu, state, episodes)
        found, found_gradients = gradients(on_gpu, state.to("cuda"), episodes.to("cuda"))
        assert found.loss.is_cuda
        torch.testing.assert_close(found.loss.cpu(), expected.loss, rtol=1e-10, atol=0)
        for name, gradient in expected_gradients.items():
            scale = gradient.abs().max().item() + 1e-12
            torch.testing.assert_close(found_gradients[name].cpu(), gradient, rtol=0, atol=1e-9 * scale + 1e-14)
        state.memory = expected.memory


@every_algorithm
def test_masks_and_support_statistics_are_the_same_on_the_gpu(algorithm: Any) -> None:
    drawn, on_cpu = tasks(), algorithm(net(), steps=2, sharing=gs.GradientSharing())
    query = torch.ones(drawn.query_y.shape, dtype=torch.bool)
    query[0, 1:3] = False
    episodes = gs.Episodes(*drawn.tensors(), query_mask=query)
    on_gpu, state = on_cpu.to("cuda"), randomised(on_cpu.init())
    there, of_gpu = state.to("cuda"), episodes.to("cuda")
    expected, found = on_cpu.outer_loss(state, episodes), on_gpu.outer_loss(there, of_gpu)
    torch.testing.assert_close(found.loss.cpu(), expected.loss, rtol=1e-10, atol=0)
    torch.testing.assert_close(found.accuracy.cpu(), expected.accuracy)
    fast = on_gpu.adapt(there, of_gpu.support_x, of_gpu.support_y)
    logits = on_gpu.predict(fast, of_gpu.query_x, norm_statistics="support")
    torch.testing.assert_close(
        logits.cpu(), on_cpu.logits(state, drawn, norm_statistics="support"), rtol=1e-9, atol=1e-11
    )
    module = on_gpu.module_for(fast, 1)
    torch.testing.assert_close(module(of_gpu.query_x[1]), logits[1], rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(module.cpu()(drawn.query_x[1]), logits[1].cpu(), rtol=1e-9, atol=1e-11)


@contextmanager
def default_dtype(kind: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(kind)
    yield
    torch.set_default_dtype(before)


def large_tasks() -> gs.Episodes:
    small = tasks()
    grow = (1, 1, 1, 2, 2)
    return gs.Episodes(small.support_x.repeat(grow), small.support_y, small.query_x.repeat(grow), small.query_y)


def test_tasks_drawn_on_the_gpu_are_the_same(dataset: gs.Dataset) -> None:
    here, there = (source.sample("train", gs.Shape(5, 2, 7), 3, (1, 2)) for source in (dataset, dataset.to("cuda")))
    assert there.query_x.is_cuda and there.support_y.is_cuda
    torch.testing.assert_close(here.support_x, there.support_x.cpu(), rtol=2e-7, atol=0)  # a GPU rounds x / 255 its way
    assert torch.equal(here.query_y, there.query_y.cpu())


OTHERS: dict[str, Any] = {
    "zero head": partial(gs.maml, head_start="zero"),
    "reptile": lambda model, steps, sharing: gs.reptile(model, steps=steps),  # without what nothing would learn
}


@pytest.mark.parametrize("algorithm", [*ALGORITHMS.values(), *OTHERS.values()], ids=[*ALGORITHMS, *OTHERS])
def test_a_recorded_step_is_the_step(algorithm: Any, dataset: gs.Dataset) -> None:
    model = gs.Conv4(ways=3, filters=4, image=(1, 16, 16)).double()
    with default_dtype(torch.float64):
        batches = [dataset.sample("train", gs.Shape(3, 1, 3), 2, (number,)).to("cuda") for number in range(6)]
    graphed, eager = (algorithm(model, steps=2, sharing=gs.GradientSharing()).to("cuda") for _ in range(2))
    states = [learner.init().to("cuda") for learner in (graphed, eager)]
    optimisers = [gs.optimiser(state, 1e-3) for state in states]
    step = GraphedStep(graphed, states[0], optimisers[0])
    for episodes in batches:
        found, expected = step(episodes), gs.meta_step(eager, states[1], optimisers[1], episodes)
        torch.testing.assert_close(found.loss, expected.loss.detach(), rtol=1e-9, atol=0)
    for name, tensor in states[1].tensors().items():
        torch.testing.assert_close(states[0].tensors()[name], tensor, rtol=1e-6, atol=1e-9, msg=name)


@pytest.mark.parametrize("recorded", [False, True], ids=["eager", "graph"])
def test_a_step_that_is_not_finite_is_not_taken(dataset: gs.Dataset, recorded: bool) -> None:
    on_gpu = learner().to("cuda")
    state = on_gpu.init(0).to("cuda")
    adam = gs.optimiser(state, 1e-2)
    graphed = GraphedStep(on_gpu, state, adam)
    for number in range(5):
        before = {name: t.detach().clone() for name, t in {**state.tensors(), **optimiser_tensors(state, adam)}.items()}
        episodes = dataset.sample("train", gs.Shape(3, 1, 3), 2, (number,)).to("cuda")
        poisoned = number in (2, 3)
        if poisoned:
            episodes.query_x[1] = torch.nan
        outcome = graphed(episodes) if recorded else gs.meta_step(on_gpu, state, adam, episodes)
        assert outcome.fault is not None and outcome.fault.is_cuda and outcome.fault.item() == int(poisoned)
        after = {**state.tensors(), **optimiser_tensors(state, adam)}
        same = [name for name, tensor in before.items() if torch.equal(tensor, after[name])]
        assert (same == list(before)) is poisoned
        assert all(tensor.isfinite().all() for tensor in after.values())


@pytest.mark.parametrize("engine", ["eager", "graph"])
def test_a_run_that_diverges_on_the_gpu_is_stopped(dataset: gs.Dataset, tmp_path: Path, engine: Any) -> None:
    options = TINY | {"iterations": 45, "epochs": 1}
    with pytest.raises(Diverged, match="the outer loss was not finite in epoch 1, iteration 1,"):
        gs.train(learner(inner_lr=1e20), dataset.to("cuda"), tmp_path, device="cuda", engine=engine, **options)
    note = json.loads((tmp_path / "diverged.json").read_text())
    assert note["steps"] == 21 and note["checkpoint"].endswith("iteration-0021")  # asked at iterations 1, 21, 41
    _, saved = checkpoints.load(tmp_path / note["checkpoint"])
    first = learner(inner_lr=1e20).init(0).tensors()
    assert all(torch.equal(saved[name], tensor) for name, tensor in first.items())


@pytest.mark.parametrize("engine", ["eager", "graph"])
def test_training_on_the_gpu_follows_the_cpu(dataset: gs.Dataset, tmp_path: Path, engine: Any) -> None:
    on_cpu = gs.train(learner(), dataset, tmp_path / "cpu", **TINY)
    on_gpu = gs.train(learner(), dataset.to("cuda"), tmp_path / "gpu", device="cuda", engine=engine, **TINY)
    for here, there in zip(on_cpu.metrics, on_gpu.metrics, strict=True):
        assert there["train_loss"] == pytest.approx(here["train_loss"], rel=0.05)  # float32, and small nets on noise
    again = gs.train(learner(), dataset.to("cuda"), tmp_path / "gpu", device="cuda", engine=engine, resume=True, **TINY)
    assert again.summary == on_gpu.summary


@pytest.mark.parametrize("engine", ["eager", "graph"])
@pytest.mark.parametrize("precision", ["tf32", "bf16"])
def test_our_kernels_train_the_same_run_twice(blobs: Path, tmp_path: Path, engine: str, precision: str) -> None:
    """They sum in a fixed order, so two processes on the same GPU give the same bits without any option."""
    twice(blobs, tmp_path, "--engine", engine, "--precision", precision)


@pytest.mark.parametrize("engine", ["eager", "graph"])
@pytest.mark.parametrize("method", ["maml", "metasgd", "mamlpp", "anil", "boil", "protomaml"])
def test_asked_to_pytorch_trains_the_same_run_twice(blobs: Path, tmp_path: Path, engine: str, method: str) -> None:
    output = twice(blobs, tmp_path, "--engine", engine, "--method", method, "--precision", "float32", "--deterministic")
    assert "the same bits in every run" in output


def twice(blobs: Path, folder: Path, *options: str) -> str:
    """Train a run in each of two processes with the same options; the runs must have the same bits."""
    pytest.importorskip("cyclopts", reason="the command line")
    from tests.support.commands import gradshare

    words = ["--ways", 3, "--queries", 3, "--tasks", 2, "--steps", 2, "--filters", 8]
    words += ["--val-tasks", 6, "--test-tasks", 6]
    words += ["--threads", 1, "--epochs", 2, "--iterations", 10, "--dataset", blobs, "--device", "cuda", *options]
    outputs = [gradshare("train", *words, "--out", folder / name).stdout for name in ("one", "other")]
    same_run(folder / "one", folder / "other")
    return outputs[0]


@every_algorithm
@pytest.mark.parametrize("batch", [4, 3])
def test_a_recorded_prediction_is_the_prediction(algorithm: Any, batch: int, dataset: gs.Dataset) -> None:
    model = gs.Conv4(ways=3, filters=4, image=(1, 16, 16)).double()
    on_cpu = algorithm(model, steps=2, sharing=gs.GradientSharing())
    states = [randomised(on_cpu.init()).to("cuda"), randomised(randomised(on_cpu.init())).to("cuda")]
    own = on_cpu.to("cuda")
    predict = GraphedPrediction(own)
    with default_dtype(torch.float64):
        for judged in (states[0], states[1], states):
            found, expected = (
                gs.evaluate(own, judged, dataset.to("cuda"), "val", gs.Shape(3, 1, 3), 8, 0, batch, predict=given)
                for given in (predict, None)
            )
            torch.testing.assert_close(found.losses, expected.losses, rtol=1e-9, atol=0)
            assert torch.equal(found.accuracies, expected.accuracies)


@pytest.mark.parametrize("precision", ["float32", "tf32", "bf16"])
def test_a_recorded_prediction_on_our_kernels(precision: Any, dataset: gs.Dataset) -> None:
    """The first batch is smaller than the next ones, and the last one is smaller again."""
    own = gs.maml(gs.Conv4(ways=3, filters=8, image=(1, 16, 16)), sharing=gs.GradientSharing()).to("cuda", precision)
    state, there, predict = own.init(0), dataset.to("cuda"), GraphedPrediction(own)
    for count in (2, 11):
        found, expected = (
            gs.evaluate(own, state, there, "val", gs.Shape(3, 1, 3), count, 0, 4, predict=given)
            for given in (predict, None)
        )
        torch.testing.assert_close(found.losses, expected.losses, rtol=1e-5, atol=0)


class Slashed(nn.Module):
    """Has a slash in the names of its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleDict({"in/out": nn.Linear(2, 3)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.parts["in/out"](x)


def test_any_model_and_loss_has_a_recorded_prediction() -> None:
    own = gs.maml(Slashed(), steps=2, sharing=gs.GradientSharing(), loss="mse").to("cuda")
    x, y = torch.rand(4, 5, 2, device="cuda"), torch.rand(4, 5, 3, device="cuda")
    state, episodes = own.init(), gs.Episodes(x, y, x, y)
    with torch.no_grad():
        torch.testing.assert_close(GraphedPrediction(own)(state, episodes), own.logits(state, episodes))


def test_what_cannot_be_recorded_is_an_error() -> None:
    class Asks(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) if bool(torch.ones((), device=self.weight.device).cpu() > 0) else x

    own = gs.maml(Asks(2, 3), steps=1, loss="mse").to("cuda")
    x, y = torch.rand(4, 5, 2, device="cuda"), torch.rand(4, 5, 3, device="cuda")
    with pytest.raises(gs.UserError, match="CUDA graph"):
        GraphedPrediction(own)(own.init(), gs.Episodes(x, y, x, y))


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_tasks_are_drawn_without_waiting_for_the_gpu(dataset: gs.Dataset) -> None:
    there = dataset.to("cuda")

    def draw(number: int) -> gs.Episodes:
        return there.sample("train", gs.Shape(5, 1, 5), 3, (number,)).to("cuda")

    expected = [draw(number).query_x.cpu() for number in range(20)]
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = [draw(number).query_x for number in range(20)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(torch.equal(a.cpu(), b) for a, b in zip(found, expected, strict=True))
