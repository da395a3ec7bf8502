"""The regimes and the arms of benchmarks/accelerate.py: which tasks, which network, how long; and one training.

A training takes a few seconds of a CPU. Those of the paper's size are in results/queue.toml.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gradshare as gs
from gradshare.data.sources import glyphs
from gradshare.data.store import data_folder, is_store
from gradshare.method.mixing import BodyOnly
from gradshare.method.rules import InnerStep, Moved, Rule
from gradshare.method.variants import first_link, variant

PIXELS = 16
IMPORT = {
    "omniglot": "gradshare data import omniglot FILE",
    "cub28": "gradshare data import cub FILE --transform resize --size 28 --name cub28",
    "cub": "gradshare data import cub FILE",
    "mini": "gradshare data import mini FILES",
}
RATES = (0.25, 0.5, 1.0, 2.0, 4.0)
WIDER = (*RATES, 8.0)  # where a rule was best at the border
Measured = Iterator[tuple[str, float]]


@dataclass(frozen=True)
class Regime:
    """One kind of tasks, and how a training on it goes."""

    name: str
    about: str
    source: Callable[[], Any]
    model: Callable[[], nn.Module]
    rate: float  # inner; the sweep multiplies it
    shape: gs.Shape
    loss: str = "cross_entropy"
    iterations: int = 500
    tasks: int = 5
    steps: int = 5
    outer: float = 3e-3
    looks: int = 10  # at the validation tasks
    at_once: int = 14  # cells of a rule that are trained as one program, by together.py; 1: one by one
    rates: tuple[float, ...] = RATES  # factors on `rate`: the same sweep for all rules
    epochs: int = 0  # of the paper's experiments, which results/train_queue.py trains on a GPU
    level: float = math.nan  # validation in % to reach soon; nan: the original's last one
    dataset: str = ""  # that must be imported first

    @property
    def missing(self) -> str:
        """The command that imports the data set, if it is not here; or that trains, where it is not this one."""
        if self.epochs:
            return "python results/train_queue.py --parts choose confirm, on a GPU"
        return "" if not self.dataset or is_store(data_folder() / self.dataset) else IMPORT[self.dataset]

    @property
    def higher(self) -> bool:
        """Whether a higher measure is better."""
        return self.loss == "cross_entropy"


# Tasks


@dataclass(frozen=True)
class Sinusoids:
    """Tasks y = amplitude * sin(x - phase), from a range of each."""

    amplitude: tuple[float, float]
    phase: tuple[float, float]

    def sample(self, split: str, shape: gs.Shape, tasks: int, key: tuple[int, ...]) -> gs.Episodes:
        generator = np.random.default_rng((("train", "val", "test").index(split), *key))
        amplitude, phase = (generator.uniform(*ends, (tasks, 1, 1)) for ends in (self.amplitude, self.phase))

        def part(points: int) -> tuple[Tensor, Tensor]:
            x = generator.uniform(-5.0, 5.0, (tasks, points, 1))
            return torch.tensor(x).float(), torch.tensor(amplitude * np.sin(x - phase)).float()

        return gs.Episodes(*part(shape.shots), *part(shape.queries))


def drawn(mask: Any, linear: Any, shift: Any) -> Any:  # [16 * 16], 0 to 1
    """A character under an affine map, in few pixels."""
    image = glyphs.draw(mask, linear, shift).resize((PIXELS, PIXELS), resample=4)  # 4: average over the box
    return np.asarray(image, np.float32).ravel() / 255


def turned(angle: float, stretch: Any, shear: float = 0.0) -> Any:  # [2, 2]
    rotation = np.array([[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]])
    return rotation @ np.array([[1.0, shear], [0.0, 1.0]]) @ np.diag(stretch)


@cache
def poses() -> Any:
    """A task is a character; the targets are how it is turned, shifted and scaled: angle, x, y, size, each about 1."""
    generator, x, y, groups = np.random.default_rng(1), [], [], []
    characters = [code for split in glyphs.chosen().values() for code in split[:150]]
    for group, code in enumerate(characters):
        mask = glyphs.masks(code)[0]
        for _ in range(40):
            angle, size = generator.uniform(-1.0, 1.0), generator.uniform(0.6, 1.1)
            shift = generator.uniform(-4.0, 4.0, 2)
            x.append(drawn(mask, turned(angle, (size, size)), shift))
            y.append([angle / 0.58, *(shift / 2.3), (size - 0.85) / 0.145])
            groups.append(group)
    return gs.tasks(np.stack(x), np.array(y, np.float32), groups=np.array(groups), splits=(0.6, 0.2, 0.2))


@cache
def writers(shuffled: bool = False) -> Any:
    """A task is a writer: a font with a slant and a stretch of its own. The classes are the letters a to j, always.

    Shuffled: the same images, with the ten labels permuted in each task.
    """
    generator, x, y, groups = np.random.default_rng(2), [], [], []
    letters = [glyphs.masks(ord(letter)) for letter in "abcdefghij"]
    for writer in range(300):
        face = generator.integers(min(map(len, letters)))
        own = turned(generator.uniform(-0.6, 0.6), generator.uniform(0.6, 1.1, 2), generator.uniform(-0.6, 0.6))
        for label, masks in enumerate(letters):
            for _ in range(4):
                jitter = turned(generator.uniform(-0.1, 0.1), generator.uniform(0.93, 1.07, 2))
                x.append(drawn(masks[face], jitter @ own, generator.uniform(-1.5, 1.5, 2)))
                y.append(label)
                groups.append(writer)
    source = gs.tasks(np.stack(x), np.array(y), groups=np.array(groups), splits=(0.6, 0.2, 0.2))
    return Shuffled(source) if shuffled else source


@dataclass(frozen=True)
class Shuffled:
    """Tasks whose labels are permuted, each task's in its own way."""

    plain: Any

    def sample(self, split: str, shape: gs.Shape, tasks: int, key: tuple[int, ...]) -> gs.Episodes:
        batch = self.plain.sample(split, shape, tasks, key)
        order = torch.from_numpy(np.random.default_rng((9, *key)).permuted(np.tile(np.arange(10), (tasks, 1)), axis=1))
        labels = (order.gather(1, own) for own in (batch.support_y, batch.query_y))
        return replace(batch, **dict(zip(("support_y", "query_y"), labels, strict=True)))


@dataclass(frozen=True)
class Small:
    """The images of a data set in few pixels, as vectors."""

    plain: Any
    pixels: int = PIXELS

    def sample(self, split: str, shape: gs.Shape, tasks: int, key: tuple[int, ...]) -> gs.Episodes:
        batch = self.plain.sample(split, shape, tasks, key)
        inputs = (batch.support_x, batch.query_x)
        support, query = (F.adaptive_avg_pool2d(x.flatten(0, 1), self.pixels).view(*x.shape[:2], -1) for x in inputs)
        return replace(batch, support_x=support, query_x=query)


def mlp(*sizes: int) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        layers = [layer for pair in pairwise(sizes) for layer in (nn.Linear(*pair), nn.ReLU())]
        return nn.Sequential(*layers[:-1])

    return make


def conv(channels: int = 1) -> Callable[[], nn.Module]:
    return lambda: gs.Conv4(ways=5, filters=16, image=(channels, 28, 28))


# The table

REGIMES = (
    Regime(
        "sinusoid",
        "regression: y = a sin(x - p), a in [0.1, 5], p in [0, pi]; 10 points",
        lambda: Sinusoids((0.1, 5.0), (0.0, math.pi)),
        mlp(1, 40, 40, 1),
        0.01,
        gs.Shape(1, 10, 10),
        "mse",
        600,
        rates=WIDER,
    ),
    Regime(
        "sinusoid-narrow",
        "regression, a narrow family: a in [2, 3], p in [0, pi/4]",
        lambda: Sinusoids((2.0, 3.0), (0.0, math.pi / 4)),
        mlp(1, 40, 40, 1),
        0.01,
        gs.Shape(1, 10, 10),
        "mse",
        600,
        rates=WIDER,
    ),
    Regime(
        "glyphs-mlp",
        "labels at random: 5-way 1-shot characters of 16 x 16 pixels, a network without convolutions",
        lambda: Small(gs.load_dataset("glyphs")),
        mlp(PIXELS**2, 64, 32, 5),
        0.4,
        gs.Shape(5, 1, 5),
        iterations=300,
    ),
    Regime(
        "glyphs",
        "labels at random: 5-way 1-shot characters, Conv-4 with 16 filters, 28 x 28",
        lambda: gs.load_dataset("glyphs"),
        conv(),
        0.1,
        gs.Shape(5, 1, 5),
        iterations=120,
        at_once=1,
    ),
    Regime(
        "writers",
        "personalisation: ten letters with fixed labels, a task is a writer; 10 examples in all",
        writers,
        mlp(PIXELS**2, 64, 32, 10),
        0.1,
        gs.Shape(10, 10, 20),
        iterations=300,
    ),
    Regime(
        "writers-shuffled",
        "the same images, with the labels permuted in each task",
        lambda: writers(shuffled=True),
        mlp(PIXELS**2, 64, 32, 10),
        0.1,
        gs.Shape(10, 10, 20),
        iterations=300,
    ),
    Regime(
        "pose",
        "regression from pixels: angle, position and size of a character; a task is a character, 10 images",
        poses,
        mlp(PIXELS**2, 64, 32, 4),
        0.05,
        gs.Shape(1, 10, 20),
        "mse",
        300,
        rates=(*WIDER, 16.0),
    ),
    Regime(
        "omniglot-mlp",
        "labels at random: 5-way 1-shot Omniglot of 16 x 16 pixels, a network without convolutions",
        lambda: Small(gs.load_dataset("omniglot")),
        mlp(PIXELS**2, 64, 32, 5),
        0.4,
        gs.Shape(5, 1, 5),
        iterations=300,
        dataset="omniglot",
    ),
    Regime(
        "omniglot-8",
        "labels at random: 5-way 1-shot Omniglot of 8 x 8 pixels, a network without convolutions",
        lambda: Small(gs.load_dataset("omniglot"), 8),
        mlp(8 * 8, 32, 32, 5),
        0.4,
        gs.Shape(5, 1, 5),
        iterations=300,
        at_once=45,
        rates=WIDER,
        dataset="omniglot",
    ),
    Regime(
        "omniglot-20way",
        "labels at random: 20-way 1-shot Omniglot of 8 x 8 pixels, a network without convolutions, 16 features",
        lambda: Small(gs.load_dataset("omniglot"), 8),
        mlp(8 * 8, 32, 16, 20),
        3.2,
        gs.Shape(20, 1, 2),
        iterations=1500,
        at_once=45,
        rates=(0.5, 1.0, 2.0, 4.0, 8.0, 16.0),
        dataset="omniglot",
    ),
    Regime(
        "omniglot",
        "labels at random: 5-way 1-shot Omniglot, Conv-4 with 16 filters, 28 x 28",
        lambda: gs.load_dataset("omniglot"),
        conv(),
        0.1,
        gs.Shape(5, 1, 5),
        iterations=120,
        at_once=1,
        dataset="omniglot",
    ),
    Regime(
        "cub28",
        "labels at random: 5-way 1-shot CUB, Conv-4 with 16 filters, 28 x 28",
        lambda: gs.load_dataset("cub28"),
        conv(channels=3),
        0.1,
        gs.Shape(5, 1, 5),
        iterations=300,
        at_once=1,
        dataset="cub28",
    ),
)
VARIATIONS = {  # of a regime
    **{"T1": {"tasks": 1}, "T25": {"tasks": 25, "rates": (0.5, 1.0, 2.0)}, "K1": {"steps": 1}},
    "long": {"iterations": 2000, "looks": 20},
}
SHAPE = gs.Shape(5, 1, 15)
OF_THE_PAPER = (  # test: the ensemble of the five best epochs, as docs/results.md
    Regime("cub-1shot", "the paper's CUB 1-shot", lambda: None, gs.Conv4, 0.1, SHAPE, epochs=20, level=50),
    Regime("mini-1shot", "the paper's MiniImagenet 1-shot", lambda: None, gs.Conv4, 0.1, SHAPE, epochs=25, level=40),
)
KNOWN = {
    **{one.name: one for one in (*REGIMES, *OF_THE_PAPER)},
    **{
        f"{one.name}-{name}": replace(one, name=f"{one.name}-{name}", about=f"{one.about}; {name}", **fields)
        for one in REGIMES
        for name, fields in VARIATIONS.items()
    },
}


# Arms


@dataclass(frozen=True)
class Still(Rule):
    """Some weights stay where they are from an inner step on, 0 is the first. They are meta-learned all the same."""

    names: tuple[str, ...]
    since: int = 0
    name: str = field(default="still", init=False, repr=False)

    def update(self, at: InnerStep) -> Moved:
        still = self.names if at.k >= self.since else ()
        return Moved({name: own * 0 if name in still else own for name, own in at.gradients.items()})


def head_of(names: Sequence[str]) -> tuple[str, ...]:
    """The weights of the last layer."""
    return tuple(name for name in names if name.rpartition(".")[0] == names[-1].rpartition(".")[0])


@dataclass(frozen=True)
class Arm:
    """A rule by its text: a variant, then options: `length-keeping/body/zero-init/gates10/head4`."""

    text: str

    @property
    def variant(self) -> str:
        return self.text.partition("/")[0]

    @property
    def head_start(self) -> str:
        return next((part for part in self._options if part in ("zero", "zero-init")), "learned")

    @property
    def gates(self) -> float:
        """Factor on the outer rate of the gates."""
        return self._number("gates")

    @property
    def head(self) -> float:
        """Factor on the inner rate of the head."""
        return self._number("head")

    @property
    def program(self) -> tuple[Any, ...]:
        """Arms with the same one differ in fixed rates and the start of the head: together.py trains them at once."""
        return self.rule(), self.head_start == "zero", self.gates

    @property
    def _options(self) -> list[str]:
        return self.text.split("/")[1:]

    def _number(self, name: str) -> float:
        given = (part.removeprefix(name) for part in self._options if part.startswith(name))
        return float(next(given, 1))

    def check(self) -> None:
        variant(self.variant)
        known = {"zero", "zero-init", "body", "first", "anil", "boil", f"gates{self.gates:g}", f"head{self.head:g}"}
        if unknown := [part for part in self._options if part not in known]:
            raise SystemExit(
                f"{self.text}: an option is zero, zero-init, body, first, anil, boil, gates10 or head4,"
                f" not {unknown[0]}"
            )

    def rule(self) -> Rule | None:
        plain = first_link(self.variant)
        return BodyOnly(plain) if plain is not None and "body" in self._options else plain

    def learner(self, regime: Regime, model: nn.Module, factor: float) -> gs.Learner:
        inner: list[Rule] = [] if self.head == 1 else [gs.head_rate(self.head)]
        names = tuple(name for name, _ in model.named_parameters())
        head = head_of(names)
        body = tuple(name for name in names if name not in head)
        still = {"first": Still(head, since=1), "boil": Still(head), "anil": Still(body)}
        inner += [rule for option, rule in still.items() if option in self._options]
        return gs.maml(
            model,
            inner_lr=regime.rate * factor * variant(self.variant).rate,
            steps=regime.steps,
            sharing=self.rule(),
            loss=regime.loss,
            inner=inner,
            head_start=self.head_start,  # type: ignore[arg-type]
        )


# One training


class Trained(NamedTuple):
    """A training on its way."""

    learner: gs.Learner
    state: gs.MetaState
    source: Any
    iteration: int


def looks(regime: Regime, arm: Arm, factor: float, seed: int) -> Iterator[Trained]:
    """Train; yields at every look at the validation tasks."""
    source = regime.source()
    torch.manual_seed(seed)
    learner = arm.learner(regime, regime.model(), factor)
    state = learner.init(seed=seed)
    optimiser = gs.optimiser(state, regime.outer, gates=arm.gates)
    every = max(1, regime.iterations // regime.looks)
    for i in range(1, regime.iterations + 1):
        gs.meta_step(learner, state, optimiser, source.sample("train", regime.shape, regime.tasks, (0, seed, i)))
        if i % every == 0:
            yield Trained(learner, state, source, i)


def train_small(regime: Regime, arm: Arm, factor: float, seed: int) -> Measured:
    began = time.monotonic()
    for now in looks(regime, arm, factor, seed):
        validation = now.source.sample("val", regime.shape, 100, (1, 0))
        yield f"val@{now.iteration}", measure(now.learner, now.state, validation)
    yield "test", measure(now.learner, now.state, now.source.sample("test", regime.shape, 400, (2, 0)))
    yield from gates_of(now.state)
    yield "seconds", time.monotonic() - began


def measure(learner: gs.Learner, state: gs.MetaState, episodes: gs.Episodes) -> float:
    """Accuracy in %, or mean squared error, over tasks."""
    with torch.no_grad():
        outputs = learner.logits(state, episodes)
        if learner.loss == "mse":
            return float((outputs - episodes.query_y).square().mean())
        return 100 * float((outputs.argmax(-1) == episodes.query_y).float().mean())


def gates_of(state: gs.MetaState) -> Measured:
    """What is learned for each step: sig(lam), sig(m), s."""
    for name, value in state.learned.get("sharing", {}).items():
        if isinstance(value, Tensor):
            numbers = value.detach() if name in ("s", "c") else value.detach().sigmoid()
            yield from ((f"{name}@{k + 1}", float(number)) for k, number in enumerate(numbers))


def tiny(regime: Regime) -> Regime:
    """The same in seconds, to see that everything runs."""
    return replace(regime, iterations=4, looks=2)
