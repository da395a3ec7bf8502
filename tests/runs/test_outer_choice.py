"""An optimiser and a schedule of one's own, and the fingerprint of what a run is trained with."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import gradshare as gs
from gradshare.learners.fingerprint import describe, fingerprint
from gradshare.method.rules import Rule
from gradshare.runs import train as training
from gradshare.runs.config import check_same_learner
from gradshare.runs.workers import Interrupted
from tests.support.runs import TINY, StopAt, learner, rewrite, same_run

SHORT = TINY | {"iterations": 2, "val_tasks": 2, "test_tasks": 0, "display": False}
Leaves = dict[str, Tensor]


def sgd(leaves: Leaves, lr: float = 0.1) -> torch.optim.Optimizer:
    return torch.optim.SGD(leaves.values(), lr=lr, momentum=0.9)


def grouped(leaves: Leaves) -> torch.optim.Optimizer:
    gates = [leaf for name, leaf in leaves.items() if name.startswith("learned/sharing")]
    others = [leaf for name, leaf in leaves.items() if not name.startswith("learned/sharing")]
    return torch.optim.AdamW([{"params": others, "lr": 0.01}, {"params": gates, "lr": 0.1}], weight_decay=0.1)


@pytest.mark.parametrize("factory", [sgd, grouped])
def test_an_optimiser_and_a_schedule_are_resumed_exactly(
    factory: Callable[[Leaves], torch.optim.Optimizer], dataset: gs.Dataset, tmp_path: Path
) -> None:
    own: dict[str, Any] = {"optimiser": factory, "schedule": lambda epoch: 0.5**epoch}
    gs.train(learner(), dataset, tmp_path / "whole", **SHORT, **own)
    for moment in ((1, 1), (2, 2)):
        with pytest.raises(Interrupted):
            gs.train(learner(), dataset, tmp_path / "run", None, **SHORT | {"display": StopAt(*moment)}, **own)
    gs.train(learner(), dataset, tmp_path / "run", True, **SHORT, **own)
    same_run(tmp_path / "whole", tmp_path / "run")


def test_the_built_in_adam_is_adam(dataset: gs.Dataset, tmp_path: Path) -> None:
    """The same as an Adam of one's own; config.json alone differs."""
    runs = [
        gs.train(learner(), dataset, tmp_path / "built-in", outer_lr=0.01, **SHORT),
        gs.train(
            learner(),
            dataset,
            tmp_path / "own",
            **SHORT,
            optimiser=lambda leaves: torch.optim.Adam(leaves.values(), 0.01),
        ),
    ]
    assert runs[0].metrics == runs[1].metrics


def test_gates_at_another_rate_than_the_weights(dataset: gs.Dataset, tmp_path: Path) -> None:
    faster = gs.train(learner(), dataset, tmp_path / "run", gates=10, **SHORT)
    own = gs.train(
        learner(), dataset, tmp_path / "own", **SHORT, optimiser=lambda leaves: gs.optimiser(leaves, 1e-3, gates=10)
    )
    usual = gs.train(learner(), dataset, tmp_path / "usual", **SHORT)
    assert faster.metrics == own.metrics != usual.metrics
    with pytest.raises(gs.UserError, match=r"gates = 10.*, not 1.0"):
        gs.train(learner(), dataset, tmp_path / "run", True, **SHORT)


def test_a_schedule_is_a_factor_on_the_rates(dataset: gs.Dataset, tmp_path: Path) -> None:
    """With factors 1, 0, 0 everything stays as it is after the first epoch; the factor of MAML++ comes on top."""
    seen: list[list[float]] = []

    class Seen(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            seen.append([group["lr"] for group in self.param_groups])
            super().step()

    falling = learner(final_outer_rate=0.5)
    gs.train(
        falling, dataset, tmp_path / "run", **SHORT,
        optimiser=lambda leaves: Seen(leaves.values(), lr=0.4), schedule=lambda epoch: (1, 0.5, 0)[epoch],
    )  # fmt: skip
    assert [rates[0] for rates in seen[::2]] == pytest.approx([0.4, 0.2 * (0.5 + 0.5 * 0.75), 0.0])


def test_steps_that_are_not_taken_leave_the_optimiser_alone(dataset: gs.Dataset, tmp_path: Path) -> None:
    """Both optimisers see the same finite steps; one of them also a batch whose loss is not finite."""

    class Poisoned:
        def sample(self, split: str, shape: gs.Shape, tasks: int, key: tuple[int, ...]) -> gs.Episodes:
            found = dataset.sample(split, shape, tasks, key)
            if split == "train" and key[-1] == 1:
                return gs.Episodes(found.support_x, found.support_y, found.query_x * torch.nan, found.query_y)
            return found

    runs = [
        gs.train(learner(), source, tmp_path / name, optimiser=sgd, **SHORT | {"epochs": 1, "iterations": iterations})
        for name, source, iterations in (("skipped", Poisoned(), 2), ("whole", dataset, 1))
    ]
    assert runs[0].metrics[0]["skipped"] == 1
    names = runs[0].state.tensors()
    assert all(torch.equal(names[name], value) for name, value in runs[1].state.tensors().items())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"optimiser": "sgd"}, "optimiser is a function from the named leaves"),
        ({"optimiser": torch.optim.SGD}, "optimiser is a function from the named leaves, .*, not <class .*SGD"),
        ({"optimiser": lambda leaves: "sgd"}, "one of torch.optim"),
        ({"optimiser": lambda leaves: torch.optim.SGD([torch.zeros(1)], lr=1)}, "not in the state"),
        ({"optimiser": lambda leaves: torch.optim.LBFGS(leaves.values())}, "closure"),
        ({"optimiser": sgd, "outer_lr": 0.1}, "outer_lr is for the built-in Adam"),
        ({"optimiser": sgd, "gates": 10}, "gates is for the built-in Adam"),
        ({"gates": 0}, "gates is 0; it must be above 0"),
        ({"schedule": 0.5}, "schedule is a function from an epoch"),
        ({"schedule": lambda epoch: -1.0}, r"schedule\(0\) is -1.0"),
        ({"schedule": lambda epoch: torch.nan if epoch else 1}, r"schedule\(1\) is nan"),
        ({"schedule": lambda epoch: None}, r"schedule\(0\) is None; it must be a number"),
    ],
)
def test_what_cannot_be_used_is_an_error_before_anything_is_written(
    options: dict[str, Any], message: str, dataset: gs.Dataset, tmp_path: Path
) -> None:
    with pytest.raises(gs.UserError, match=message):
        gs.train(learner(), dataset, tmp_path / "run", **SHORT | options)
    assert not (tmp_path / "run").exists()


def test_only_steps_that_can_be_recorded_go_into_a_graph() -> None:
    leaf = [torch.zeros(1, requires_grad=True)]
    for optimiser, engine in (
        (torch.optim.Adam(leaf), "eager"),
        (torch.optim.SGD(leaf, lr=0.1), "graph"),
    ):
        assert training._recordable("graph", "auto", optimiser) == engine
        assert training._recordable("eager", "auto", optimiser) == "eager"
    with pytest.raises(gs.UserError, match="Adam cannot be recorded: make it with capturable=True"):
        training._recordable("graph", "graph", torch.optim.Adam(leaf))


# The fingerprint


def mlp(width: int = 4, activation: Callable[[], nn.Module] = nn.LeakyReLU) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(256, width), activation(), nn.Linear(width, 3))


def squared(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets).square()


class Halved(Rule):
    """A rule of one's own with a value."""

    name = "halved"

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def update(self, at: gs.InnerStep) -> gs.Moved:
        return gs.Moved({name: gradient * self.factor for name, gradient in at.gradients.items()})


def base() -> gs.Learner:
    return gs.maml(mlp(), inner_lr=0.4, steps=2)


OTHERS: dict[str, tuple[Callable[[], gs.Learner], str]] = {
    "rate": (lambda: gs.maml(mlp(), inner_lr=0.1, steps=2), "inner_lr 0.4, not 0.1"),
    "steps": (lambda: gs.maml(mlp(), inner_lr=0.4, steps=3), "steps 2, not 3"),
    "algorithm": (lambda: gs.meta_sgd(mlp(), inner_lr=0.4, steps=2), "algorithm maml, not meta_sgd"),
    "first order": (lambda: gs.first_order_maml(mlp(), inner_lr=0.4, steps=2), "algorithm maml, not first_order_maml"),
    "anil": (lambda: gs.anil(mlp(), inner_lr=0.4, steps=2), "algorithm maml, not anil"),
    "head start": (
        lambda: gs.maml(mlp(), inner_lr=0.4, steps=2, head_start="zero"),
        "algorithm maml, not maml, head_start zero",
    ),
    "reptile": (lambda: gs.reptile(mlp(), inner_lr=0.4, steps=2), "algorithm maml, not reptile"),
    "curvature": (lambda: gs.meta_curvature(mlp(), inner_lr=0.4, steps=2), "algorithm maml, not meta_curvature"),
    "mask": (lambda: gs.sparse_maml(mlp(), inner_lr=0.4, steps=2), "algorithm maml, not sparse_maml"),
    "alfa": (lambda: gs.alfa(mlp(), inner_lr=0.4, steps=2), "algorithm maml, not alfa"),
    "inner": (
        lambda: gs.maml(mlp(), inner_lr=0.4, steps=2, inner=gs.momentum(0.5)),
        r"rule Scale, not Momentum\(beta=0.5\), Scale",
    ),
    "sharing": (
        lambda: gs.maml(mlp(), inner_lr=0.4, steps=2, sharing=gs.GradientSharing()),
        r"rule Scale, not GradientSharing\(norm=global, conditioned=False\), Scale",
    ),
    "own rule": (lambda: gs.maml(mlp(), inner_lr=0.4, steps=2, sharing=Halved(0.5)), r"rule .*Halved\(factor=0.5\)"),
    "loss": (lambda: gs.maml(mlp(), inner_lr=0.4, steps=2, loss=squared), "loss cross_entropy, not squared"),
    "width": (
        lambda: gs.maml(mlp(5), inner_lr=0.4, steps=2),
        r"1 Linear\(.*weight \[4, 256\].*not .*weight \[5, 256\]",
    ),
    "activation": (lambda: gs.maml(mlp(4, nn.Tanh), inner_lr=0.4, steps=2), r"2 LeakyReLU\(.*\), not Tanh\(\)"),
    "slope": (
        lambda: gs.maml(mlp(4, partial(nn.LeakyReLU, 0.2)), inner_lr=0.4, steps=2),
        r"2 LeakyReLU\(negative_slope=0.01.*not LeakyReLU\(negative_slope=0.2",
    ),
}


@pytest.fixture(scope="module")
def trained(dataset: gs.Dataset, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "run"
    gs.train(base(), dataset, folder, **SHORT | {"epochs": 1})
    return folder


@pytest.mark.parametrize("kind", OTHERS)
def test_another_learner_neither_resumes_nor_opens_a_run(kind: str, trained: Path, dataset: gs.Dataset) -> None:
    make, message = OTHERS[kind]
    for use in (partial(gs.train, folder=trained, resume=True, **SHORT), partial(gs.load_run, trained)):
        with pytest.raises(gs.UserError, match=f"was trained with another learner: .*{message}"):
            use(learner=make(), dataset=dataset)
    assert len(gs.load_run(trained).metrics) == 1


def test_other_data_does_not_resume_a_run(tmp_path: Path) -> None:
    x, y = torch.rand(120, 1, 16, 16), torch.arange(120) % 12
    gs.train(base(), gs.tasks(x, y, splits=(6, 3, 3)), tmp_path / "run", **SHORT | {"epochs": 1})
    with pytest.raises(gs.UserError, match=r"another learner or on other data: data gs\.tasks"):
        gs.train(base(), gs.tasks(x, y, splits=(6, 3, 3), seed=1), tmp_path / "run", True, **SHORT)
    gs.train(base(), gs.tasks(x, y, splits=(6, 3, 3)), tmp_path / "run", True, **SHORT)


class Scaled(nn.Linear):
    """A layer of PyTorch's with a value, and perhaps a function, of its user's."""

    def __init__(self, scale: float = 1.0, function: Callable[[Tensor], Tensor] = torch.tanh) -> None:
        super().__init__(4, 4)
        self.scale, self.function = scale, function


class Applied(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function, self.head = function, nn.Linear(4, 4)


ENCODER = partial(nn.TransformerEncoderLayer, 8, dim_feedforward=8, dropout=0.0)


@pytest.mark.parametrize(("one", "other", "message"), [
    (lambda: ENCODER(nhead=2), lambda: ENCODER(nhead=4), "num_heads=2.*num_heads=4"),
    (lambda: ENCODER(nhead=2), lambda: ENCODER(nhead=2, activation="gelu"), "activation=relu.*activation=gelu"),
    (lambda: Scaled(1.0), lambda: Scaled(2.0), r"scale=1\.0.*scale=2\.0"),
    (lambda: Scaled(), lambda: Scaled(function=torch.relu), "function=tanh.*function=relu"),
    (lambda: Applied(torch.tanh), lambda: Applied(torch.relu), "function=tanh.*function=relu"),
    (lambda: Applied(partial(torch.clamp, min=0)), lambda: Applied(partial(torch.clamp, min=1)), "min': 0.*min': 1"),
])  # fmt: skip
def test_layers_of_the_same_shapes_that_compute_something_else(
    one: Callable[[], nn.Module], other: Callable[[], nn.Module], message: str
) -> None:
    recorded, again, found = (fingerprint(gs.maml(make())) for make in (one, one, other))
    check_same_learner(Path("run"), recorded, again)
    with pytest.raises(gs.UserError, match=message):
        check_same_learner(Path("run"), recorded, found)


def test_another_optimiser_or_schedule_does_not_resume_a_run(
    trained: Path, dataset: gs.Dataset, tmp_path: Path
) -> None:
    with pytest.raises(gs.UserError, match=r"optimiser Adam, not SGD\(lr=0.1, momentum=0.9\)"):
        gs.train(base(), dataset, trained, True, optimiser=sgd, **SHORT)
    with pytest.raises(gs.UserError, match=r"schedule None, not 0\.5, 0\.5, 0\.5"):
        gs.train(base(), dataset, trained, True, schedule=lambda epoch: 0.5, **SHORT)
    own: dict[str, Any] = {"optimiser": sgd, "schedule": lambda epoch: 0.5**epoch}
    gs.train(base(), dataset, tmp_path / "run", **SHORT | {"epochs": 2}, **own)
    with pytest.raises(gs.UserError, match=r"lr=0.1, momentum=0.9\), not SGD\(lr=0.2"):
        gs.train(base(), dataset, tmp_path / "run", True, **SHORT, **own | {"optimiser": partial(sgd, lr=0.2)})
    with pytest.raises(gs.UserError, match=r"schedule 1\.0, 0\.5, not 1\.0, 0\.25"):
        gs.train(base(), dataset, tmp_path / "run", True, **SHORT, **own | {"schedule": lambda epoch: 0.25**epoch})
    run = gs.train(base(), dataset, tmp_path / "run", True, **SHORT, **own)  # one epoch more
    assert len(run.metrics) == 3


def test_the_same_learner_made_again_resumes_its_run(trained: Path, dataset: gs.Dataset, tmp_path: Path) -> None:
    run = gs.train(base(), dataset, trained, True, **SHORT | {"epochs": 2})
    assert len(run.metrics) == 2
    stored = json.loads((trained / "config.json").read_text())["fingerprint"]
    assert stored["algorithm"] == "maml" and stored["adapted"] == ["1.weight", "1.bias", "3.weight", "3.bias"]


def test_a_folder_of_an_older_version_has_none_and_resumes(dataset: gs.Dataset, tmp_path: Path) -> None:
    gs.train(base(), dataset, tmp_path / "run", **SHORT | {"epochs": 1})
    path = tmp_path / "run" / "config.json"
    rewrite(path, fingerprint=None)
    with pytest.raises(gs.UserError, match="optimiser Adam, not SGD"):
        gs.train(base(), dataset, tmp_path / "run", True, optimiser=sgd, **SHORT)
    gs.train(base(), dataset, tmp_path / "run", True, **SHORT)
    gs.train(base(), dataset, tmp_path / "whole", **SHORT)
    same_run(tmp_path / "whole", tmp_path / "run")


def test_about_cannot_replace_the_fingerprint(dataset: gs.Dataset, tmp_path: Path) -> None:
    with pytest.raises(gs.UserError, match="about has fingerprint, which"):
        gs.train(base(), dataset, tmp_path / "run", about={"fingerprint": 1}, **SHORT)


def test_a_fingerprint_is_the_same_in_another_process() -> None:
    """No addresses, no order of sets: also of rules, losses and modules of one's own."""
    made = (
        "import json; from tests.runs.test_outer_choice import *;"
        "one = gs.maml_plus_plus(mlp(), sharing=Halved(0.5), loss=partial(squared));"
        "print(json.dumps(fingerprint(one, None, None)))"
    )
    other = subprocess.run([sys.executable, "-c", made], capture_output=True, text=True, check=True).stdout
    one = gs.maml_plus_plus(mlp(), sharing=Halved(0.5), loss=partial(squared))
    assert json.loads(other) == json.loads(json.dumps(fingerprint(one, None, None)))
    assert " at 0x" not in other and "squared" in other


def test_values_are_described_without_addresses() -> None:
    class Plain:
        def __init__(self) -> None:
            self.rate, self.inside, self._cached = 0.5, object(), 3

    assert describe(Plain()) == "Plain(rate=0.5, inside=object())"
    assert describe(torch.tensor(2.5)) == "Tensor(dtype=torch.float32, shape=[], value=2.5)"
    assert describe([float("nan"), sgd]) == ["nan", "sgd"]
    nested: list[Any] = []
    nested.append(nested)
    assert describe(nested) == [[[["list"]]]]
