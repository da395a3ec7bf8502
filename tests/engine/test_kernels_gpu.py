"""The kernels at the sizes of the paper, in every precision, and as CUDA graphs. Needs a GPU.

On a GPU: pytest tests/engine tests/stress/test_kernels.py
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import gradshare as gs
from gradshare.engine.conv4.triton import convolution, device
from gradshare.learners.graphs import GraphedStep
from tests.support.kernel_tools import Batch, batch_of, cast, error, needs_gpu, on_kernels, tasks_of, varied

pytestmark = needs_gpu


@pytest.fixture(autouse=True)
def true_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Turn TF32 off in PyTorch's own convolutions."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


class Size(NamedTuple):
    filters: int
    image: tuple[int, int, int]
    tasks: int
    ways: int
    shots: int
    queries: int

    def model(self) -> gs.Conv4:
        return gs.Conv4(self.ways, self.filters, self.image)

    def draw(self, seed: int) -> gs.Episodes:
        return tasks_of(self.ways, self.shots, self.queries, self.tasks, self.image, seed)


SIZES = [
    Size(32, (1, 28, 28), 8, 20, 1, 2),
    Size(32, (1, 28, 28), 1, 2, 10, 3),
    Size(48, (3, 84, 84), 4, 5, 5, 3),
    Size(48, (3, 84, 84), 1, 5, 1, 15),
    Size(48, (3, 32, 32), 3, 10, 3, 1),
    Size(64, (3, 32, 32), 5, 5, 1, 3),
    Size(64, (3, 33, 50), 2, 3, 7, 1),
]


@pytest.fixture
def one_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use one size of tiles and few programs for all sizes: fewer variants to compile."""
    monkeypatch.setattr(convolution, "_tile", lambda x, positions: device.Tile(32, 16, 4, 2))
    monkeypatch.setattr(device, "processors", lambda place: 4)


@pytest.mark.parametrize("size", SIZES, ids=lambda size: "x".join(map(str, [size.filters, *size.image, *size[2:]])))
def test_float32_is_as_good_as_the_general_path(size: Size, one_tile: None) -> None:
    """Compare the best batch of the kernels with the worst batch of the general path.

    Rounding can make max pooling take another element, which changes gradients by far more than rounding itself. That
    is equally likely on both paths. A mistake in the kernels would be in all batches.
    """
    exact, general, fast = (
        gs.maml(model, steps=2, sharing=gs.GradientSharing())
        for model in (size.model().double(), size.model(), size.model())
    )
    exact, general, fast = exact.to("cuda"), general.to("cuda"), on_kernels(fast)
    state = varied(general.init(0))
    for iteration in range(2):
        errors: list[tuple[float, float]] = []
        for seed in range(3):
            episodes = size.draw(10 * iteration + seed)
            expected, out = batch_of(exact, cast(state, torch.float64), episodes.to(torch.float64))
            found = [batch_of(learner, state, episodes)[0] for learner in (fast, general)]
            errors.append((error(found[0], expected), error(found[1], expected)))
        best, worst = min(ours for ours, _ in errors), max(theirs for _, theirs in errors)
        assert best <= 1e-5 + 5 * worst, errors
        state = cast(gs.MetaState(state.params, state.learned, out.memory), torch.float32)


PAPER = Size(48, (3, 84, 84), 5, 5, 5, 3)
every_precision = pytest.mark.parametrize("precision", ["tf32", "bf16"])
ALIKE = {"tf32": (0.98, 0.997, 0.02), "bf16": (0.93, 0.98, 0.05)}  # cosines of gradients and memories, and losses


def cosine(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    x, y = (torch.cat([part[name].double().flatten() for name in a]) for part in (a, b))
    return (x @ y / (x.norm() * y.norm())).item()


@every_precision
def test_lower_precisions_point_the_same_way(precision: Any) -> None:
    """After one inner step: later, the errors that grow from step to step are larger than those of the precision."""
    exact = gs.maml(PAPER.model().double(), steps=1, sharing=gs.GradientSharing()).to("cuda")
    fast = gs.maml(PAPER.model(), steps=1, sharing=gs.GradientSharing()).to("cuda", precision)
    state, episodes = fast.init(0), PAPER.draw(0)
    expected, _ = batch_of(exact, cast(state, torch.float64), episodes.to(torch.float64))
    found, _ = batch_of(fast, state, episodes)
    of_gradients, of_memories, of_losses = ALIKE[precision]
    assert cosine(found.gradients, expected.gradients) > of_gradients
    assert cosine(found.memory, expected.memory) > of_memories
    torch.testing.assert_close(found.losses.double(), expected.losses, rtol=of_losses, atol=0)


ALGORITHMS = {"maml": gs.maml, "meta-sgd": gs.meta_sgd, "maml++": gs.maml_plus_plus, "fomaml": gs.first_order_maml}
ALGORITHMS |= {"sparse-maml": gs.sparse_maml, "meta-curvature": gs.meta_curvature, "alfa": gs.alfa}
ALGORITHMS["momentum"] = partial(gs.maml, inner=gs.momentum(0.9))
plain_and_conditioned = pytest.mark.parametrize(
    "sharing", [gs.GradientSharing(), gs.GradientSharing(conditioned=True)], ids=["plain", "conditioned"]
)


@every_precision
@plain_and_conditioned
@pytest.mark.parametrize("make", ALGORITHMS.values(), ids=ALGORITHMS)
def test_two_runs_give_the_same_bits(make: Any, sharing: Any, precision: Any) -> None:
    fast = make(PAPER.model(), steps=3, sharing=sharing).to("cuda", precision)
    state, episodes = fast.init(0), PAPER.draw(0)
    state.memory = batch_of(fast, state, PAPER.draw(1))[1].memory
    first, second = (batch_of(fast, state, episodes)[0] for _ in range(2))
    assert torch.equal(first.losses, second.losses)
    for part in ("gradients", "memory"):
        for name, value in getattr(first, part).items():
            assert torch.equal(value, getattr(second, part)[name]), name


@every_precision
@plain_and_conditioned
@pytest.mark.parametrize("make", ALGORITHMS.values(), ids=ALGORITHMS)
def test_a_recorded_step_is_the_step(make: Any, sharing: Any, precision: Any) -> None:
    graphed, eager = (make(PAPER.model(), steps=2, sharing=sharing).to("cuda", precision) for _ in range(2))
    states = [learner.init(0) for learner in (graphed, eager)]
    optimisers = [gs.optimiser(state, 1e-3) for state in states]
    step = GraphedStep(graphed, states[0], optimisers[0])
    for seed in range(4):
        episodes = PAPER.draw(seed)
        found, expected = step(episodes), gs.meta_step(eager, states[1], optimisers[1], episodes)
        torch.testing.assert_close(found.loss, expected.loss.detach(), rtol=1e-6, atol=0)
    for name, tensor in states[1].tensors().items():
        torch.testing.assert_close(states[0].tensors()[name], tensor, rtol=1e-5, atol=1e-7, msg=name)


@every_precision
def test_predictions_and_evaluation_follow_the_general_path(precision: Any) -> None:
    general = gs.maml(PAPER.model(), steps=1, sharing=gs.GradientSharing()).to("cuda")
    fast = gs.maml(PAPER.model(), steps=1, sharing=gs.GradientSharing()).to("cuda", precision)
    state = fast.init(0)
    options = {"shape": gs.Shape(PAPER.ways, PAPER.shots, PAPER.queries), "tasks": 12, "batch": PAPER.tasks}
    found, expected = (gs.evaluate(learner, state, Drawn(), **options) for learner in (fast, general))
    torch.testing.assert_close(found.losses, expected.losses, rtol=2 * ALIKE[precision][2], atol=0)
    assert found.accuracy is not None and found.accuracy == pytest.approx(expected.accuracy, abs=0.05)


class Drawn:
    """A source of random tasks."""

    def sample(self, split: str, shape: gs.Shape, tasks: int, key: tuple[int, ...]) -> gs.Episodes:
        return PAPER._replace(tasks=tasks).draw(sum(key))


def dead(state: gs.MetaState) -> None:
    with torch.no_grad():
        for layer in range(4):
            state.params[f"norms.{layer}.weight"][:8] = 0
            state.params[f"norms.{layer}.bias"][8:16] = -1e6
            state.params[f"convs.{layer}.weight"][16:24] = 0


HARD: dict[str, Any] = {
    "black": lambda x: torch.zeros_like(x),
    "one colour": lambda x: torch.full_like(x, 0.7),
    "a colour each": lambda x: x.mean((-1, -2, -3), keepdim=True).expand_as(x),
    "all the same": lambda x: x[:, :1].expand_as(x),
    "far from zero": lambda x: 1e4 * x + 1e5,
    "faint": lambda x: 1e-6 * x,
    "dead units": lambda x: x,
}


@every_precision
@pytest.mark.parametrize("change", HARD)
def test_hard_inputs_give_numbers(change: str, precision: Any) -> None:
    fast = gs.maml(PAPER.model(), steps=2, sharing=gs.GradientSharing()).to("cuda", precision)
    state, drawn = varied(fast.init(0)), PAPER.draw(0)
    if change == "dead units":
        dead(state)
    x = [HARD[change](part) for part in (drawn.support_x, drawn.query_x)]
    for _ in range(2):
        batch, out = batch_of(fast, state, gs.Episodes(x[0], drawn.support_y, x[1], drawn.query_y))
        assert_finite(batch)
        state.memory = out.memory


def assert_finite(batch: Batch) -> None:
    for name, tensor in {"losses": batch.losses, **batch.gradients, **batch.memory}.items():
        assert tensor.isfinite().all(), name
