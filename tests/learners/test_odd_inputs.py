"""What users bring that we did not expect: layouts, types, outputs and arguments. Right, or refused in a sentence."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gradshare as gs
from gradshare.engine.backends import check_current
from gradshare.engine.choose import choose


def batch(tasks: int = 3, n: int = 5, q: int = 4, *shape: int, ways: int = 3, kind: Any = torch.float64) -> gs.Episodes:
    generator = torch.Generator().manual_seed(0)
    shape = shape or (4,)

    def part(examples: int) -> tuple[Tensor, Tensor]:
        x = torch.randn(tasks, examples, *shape, generator=generator, dtype=torch.float64).to(kind)
        return x, torch.randint(ways, (tasks, examples), generator=generator)

    return gs.Episodes(*part(n), *part(q))


def assert_each_task_alone(module: nn.Module, episodes: gs.Episodes, tolerance: float) -> None:
    """The meta-gradient of a batch is the mean of those of its tasks."""
    learner = gs.maml(module, steps=2)
    state = learner.init()
    leaves = list(state.trainable().values())
    whole = torch.autograd.grad(learner.outer_loss(state, episodes).loss, leaves)
    alone = [
        torch.autograd.grad(learner.outer_loss(state, episodes[task : task + 1]).loss / episodes.tasks, leaves)
        for task in range(episodes.tasks)
    ]
    for found, *parts in zip(whole, *alone, strict=True):
        assert (found - sum(parts)).abs().max() <= tolerance * max(1.0, found.abs().max().item())


# Layouts


@pytest.mark.parametrize("kind, tolerance", [(torch.float32, 1e-4), (torch.float64, 1e-11)])
@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("n, q", [(3, 1), (1, 3), (1, 1)])
def test_channels_last_and_one_image(kind: Any, tolerance: float, size: int, n: int, q: int) -> None:
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 4, size, padding=size // 2), nn.Tanh(), nn.Conv2d(4, 4, size, padding=size // 2, groups=2)]
    net = nn.Sequential(*layers, nn.Tanh(), nn.Flatten(), nn.Linear(256, 3)).to(kind)
    net = net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    assert_each_task_alone(net, batch(3, n, q, 3, 8, 8, kind=kind), tolerance)


@pytest.mark.parametrize("n, q", [(3, 1), (1, 3)])
def test_conv4_with_a_gain_of_zero_and_one_image(n: int, q: int) -> None:
    net = gs.Conv4(ways=3, filters=4, image=(3, 16, 16)).double()
    with torch.no_grad():
        net.norms[1].weight[0] = 0
    assert_each_task_alone(net, batch(3, n, q, 3, 16, 16), 1e-9)


def test_conv4_with_one_filter_in_float64() -> None:
    assert_each_task_alone(gs.Conv4(ways=3, filters=1, image=(3, 16, 16)).double(), batch(2, 4, 4, 3, 16, 16), 1e-9)


@pytest.mark.parametrize("inputs_too", [False, True])
def test_group_norm_in_channels_last(inputs_too: bool) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.GroupNorm(1, 4), nn.Conv2d(4, 4, 3), nn.GroupNorm(2, 4), nn.Flatten(), nn.Linear(144, 3))
    episodes = batch(3, 5, 4, 4, 8, 8)
    if inputs_too:
        x = [x.movedim(2, -1).contiguous().movedim(-1, 2) for x in (episodes.support_x, episodes.query_x)]
        episodes = gs.Episodes(x[0], episodes.support_y, x[1], episodes.query_y)
    plain, last = (gs.maml(one, steps=2) for one in (net.double(), net.double().to(memory_format=torch.channels_last)))  # type: ignore[call-overload]
    wanted = plain.outer_loss(plain.init(), batch(3, 5, 4, 4, 8, 8)).loss
    torch.testing.assert_close(last.outer_loss(last.init(), episodes).loss, wanted)
    assert_each_task_alone(net.double().to(memory_format=torch.channels_last), episodes, 1e-10)  # type: ignore[call-overload]


def test_group_norm_of_one_example_that_all_tasks_share() -> None:
    episodes = batch(3, 1, 1, 6)
    same = episodes.query_x[:1].expand(3, 1, 6)
    net = nn.Sequential(nn.GroupNorm(1, 6), nn.Linear(6, 3)).double()
    assert_each_task_alone(net, gs.Episodes(same, episodes.support_y, same, episodes.query_y), 1e-12)


# Types and shapes of targets and outputs


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(7, 4), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.table(x).mean(-2)).squeeze(-1)


class TokenTasks:
    def sample(self, split: str, shape: gs.Shape, tasks: int, key: tuple[int, ...]) -> gs.Episodes:
        generator = torch.Generator().manual_seed(sum(key))
        x = torch.randint(7, (tasks, 6, 3), generator=generator)
        y = torch.rand(tasks, 6, generator=generator)
        return gs.Episodes(x[:, :3], y[:, :3], x[:, 3:], y[:, 3:])


def test_targets_of_tokens_keep_their_fractions() -> None:
    learner = gs.maml(Tokens(), steps=1, loss="mse")
    state, tasks = learner.init(), TokenTasks().sample("test", gs.Shape(), 4, (0, 2, 0, 0))
    moved = tasks.to("cpu")
    assert torch.equal(moved.support_y, tasks.support_y) and moved.support_x.dtype == torch.long
    judged = gs.evaluate(learner, state, TokenTasks(), tasks=4, batch=4)
    assert judged.loss == pytest.approx(learner.outer_loss(state, tasks).losses.mean().item(), rel=1e-5)
    assert tasks.to(torch.device("cpu")).query_y.dtype == torch.float32


def test_only_classes_have_an_accuracy() -> None:
    def own(outputs: Tensor, targets: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(outputs.squeeze(-1), targets.double())

    one = gs.maml(nn.Linear(4, 1).double(), steps=1, loss=own)
    assert one.outer_loss(one.init(), batch(ways=2)).accuracy is None
    places = gs.maml(nn.Sequential(nn.Linear(4, 6), nn.Unflatten(1, (3, 2))).double(), steps=1)
    x, y = torch.rand(2, 5, 4, dtype=torch.float64), torch.randint(3, (2, 5, 2))
    assert places.outer_loss(places.init(), gs.Episodes(x, y, x, y)).accuracy is None


@pytest.mark.parametrize("kind", [torch.uint8, torch.int16, torch.int32])
def test_labels_of_any_whole_type(kind: Any) -> None:
    learner, episodes = gs.maml(nn.Linear(4, 3).double()), batch()
    state = learner.init()
    other = gs.Episodes(episodes.support_x, episodes.support_y.to(kind), episodes.query_x, episodes.query_y.to(kind))
    assert torch.equal(learner.outer_loss(state, other).loss, learner.outer_loss(state, episodes).loss)


class Both(nn.Module):
    def __init__(self, make: Any) -> None:
        super().__init__()
        self.head, self.make = nn.Linear(4, 3).double(), make

    def forward(self, x: Tensor) -> Any:
        return self.make(self.head(x), x)


@pytest.mark.parametrize("who, change", [
    ("loss", lambda o, y: F.cross_entropy(o[y >= 0], y[y >= 0])),
    ("loss", lambda o, y: F.cross_entropy(o, y) * float(o.mean())),
    ("loss", lambda o, y: F.cross_entropy(o, y) if o.sum() > 0 else o.sum()),
    ("model", lambda logits, x: logits * float(x.mean())),
    ("model", lambda logits, x: logits + x[x > 0].sum()),
    ("model", lambda logits, x: logits + logits.data),
])  # fmt: skip
def test_what_cannot_run_for_many_tasks_is_told(who: str, change: Any) -> None:
    learner = gs.maml(Both(change)) if who == "model" else gs.maml(nn.Linear(4, 3).double(), loss=change)
    with pytest.raises(gs.UserError, match=f"the {who} uses an operation that cannot run for many tasks at once"):
        learner.outer_loss(learner.init(), batch())


# Weights


def test_a_weight_without_elements() -> None:
    class Empty(nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 3)
            self.empty = nn.Parameter(torch.zeros(0))

    learner = gs.maml(Empty().double(), sharing=gs.GradientSharing())
    assert learner.outer_loss(learner.init(), batch()).loss.isfinite()


@pytest.mark.parametrize("sharing", [
    gs.GradientSharing("tensor"), gs.GradientSharing("tensor", conditioned=True), gs.GradientSharing(conditioned=True),
    gs.BatchOnly("tensor"), gs.MemoryOnly("tensor"), gs.GateOnly(),
])  # fmt: skip
def test_layers_without_elements(sharing: Any) -> None:
    torch.manual_seed(0)
    full, empty = nn.Linear(4, 3), nn.Linear(3, 3, bias=False)
    empty.weight = nn.Parameter(torch.zeros(0, 3))

    class Summed(nn.Module):
        def __init__(self, *layers: nn.Module) -> None:
            super().__init__()
            self.layers = nn.ModuleList(layers)

        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = self.layers[0](x)
            return found + sum(layer(found).sum(-1, keepdim=True) for layer in self.layers[1:])

    losses = []
    for model in (Summed(full), Summed(full, empty)):
        learner = gs.maml(model.double(), steps=2, sharing=sharing)
        state = learner.init()
        adam = gs.optimiser(state, 1e-2)
        losses.append([gs.meta_step(learner, state, adam, batch()).loss.item() for _ in range(3)])
        losses[-1].append(gs.evaluate(learner, state, Source(batch), tasks=2).losses.mean().item())
    assert losses[0] == pytest.approx(losses[1], abs=1e-12)


def test_a_slash_in_a_name(tmp_path: Path) -> None:
    net = nn.ModuleDict({"in/out": nn.Linear(4, 3), "50%": nn.Linear(3, 3)})
    net.forward = lambda x: net["50%"](net["in/out"](x))  # type: ignore[method-assign]
    learner = gs.meta_sgd(net.double(), steps=1, sharing=gs.GradientSharing())
    state = learner.init()
    again = state.to("cpu")
    assert set(again.params) == {"in/out.weight", "in/out.bias", "50%.weight", "50%.bias"} == set(state.params)
    assert torch.equal(learner.outer_loss(again, batch()).loss, learner.outer_loss(state, batch()).loss)


def test_float16_is_refused() -> None:
    learner = gs.maml(nn.Linear(4, 3).half())
    with pytest.raises(gs.UserError, match="float16 weights cannot be trained"):
        gs.optimiser(learner.init(), 1e-3)


def test_batch_norm_alone() -> None:
    with pytest.raises(gs.UserError, match="no weight to adapt but batch norm's: adapt_norm=True adapts those"):
        gs.maml(nn.BatchNorm1d(4))
    assert gs.maml(nn.BatchNorm1d(4), adapt_norm=True).adapted == ("weight", "bias")
    with pytest.raises(gs.UserError, match="none requires a gradient"):
        gs.maml(nn.BatchNorm1d(4).requires_grad_(False))


def test_an_initialise_of_another_kind_is_left_alone() -> None:
    class Own(nn.Linear):
        def initialise(self) -> None:
            raise AssertionError("not ours to call")

    own = Own(4, 3)
    assert torch.equal(gs.maml(own).init(seed=3).params["weight"], own.weight)


def test_a_run_goes_on_with_its_own_learner(dataset: gs.Dataset, tmp_path: Path) -> None:
    def learner(sharing: Any) -> gs.Learner:
        return gs.maml(gs.Conv4(ways=3, filters=2, image=dataset.image), steps=1, sharing=sharing)

    sizes = {"ways": 3, "queries": 2, "iterations": 1, "val_tasks": 2, "test_tasks": 0}
    gs.train(learner(gs.GradientSharing()), dataset, tmp_path / "run", epochs=1, **sizes)
    with pytest.raises(gs.UserError, match="was trained with another learner: rule GradientSharing"):
        gs.train(learner(None), dataset, tmp_path / "run", resume=True, epochs=2, **sizes)


# Arguments


@pytest.mark.parametrize("options, reason", [
    ({"inner_lr": float("nan")}, "inner_lr is nan"), ({"inner_lr": -0.1}, "inner_lr is -0.1"),
    ({"inner_lr": "0.1"}, "inner_lr is '0.1'"), ({"inner_lr": [0.1]}, "inner_lr is"),
    ({"steps": 2.5}, "it must be a whole number"), ({"steps": True}, "steps is True; it must be a whole number"),
    ({"steps": "5"}, "it must be a whole number"), ({"inner_loss": "rms"}, "inner_loss 'rms' is not one of"),
    ({"steps": 0}, "it must be at least 1"),
    ({"loss": None}, "loss None is not one of"), ({"loss": 3}, "loss 3 is not one of"),
    ({"sharing": "global"}, "one of original"), ({"sharing": gs.GradientSharing}, "sharing is"),
    ({"model": None}, "a torch.nn.Module, not None"),
])  # fmt: skip
@pytest.mark.parametrize("make", [gs.maml, gs.meta_sgd, gs.maml_plus_plus, gs.first_order_maml, gs.anil, gs.alfa])
def test_arguments_that_cannot_be(make: Any, options: dict[str, Any], reason: str) -> None:
    with pytest.raises(gs.UserError, match=reason):
        make(**{"model": nn.Linear(4, 3), **options})


def test_numbers_of_other_kinds_are_numbers() -> None:
    learner = gs.maml(nn.Linear(4, 3), inner_lr=np.float32(0.5), steps=np.int64(2))
    assert learner.steps == 2 and type(learner.steps) is int
    assert gs.maml(nn.Linear(4, 3), inner_lr=torch.tensor(0.5)).steps == 5  # type: ignore[arg-type]


@pytest.mark.parametrize("control", [gs.BatchOnly, gs.MemoryOnly, gs.GradientSharing])
@pytest.mark.parametrize("norm", ["Tensor", "per-tensor", None])
def test_a_norm_that_there_is_not(control: Any, norm: Any) -> None:
    with pytest.raises(gs.UserError, match="norm is 'global' or 'tensor'"):
        control(norm=norm)


def test_schedules_that_cannot_be() -> None:
    with pytest.raises(gs.UserError, match="final_outer_rate is nan"):
        gs.maml_plus_plus(nn.Linear(4, 3), final_outer_rate=float("nan"))


@pytest.mark.parametrize("options, reason", [
    ({"tasks": 0}, "tasks is 0"), ({"batch": 0}, "batch is 0"), ({"seed": -1}, "seed is -1"),
    ({"shape": gs.Shape(3, -1, 3)}, "shots is -1"), ({"states": []}, "no state to evaluate"),
    ({"tasks": 5.5}, "tasks is 5.5; it must be a whole number"), ({"batch": True}, "batch is True"),
    ({"seed": "x"}, "seed is 'x'; it must be a whole number"),
    ({"shape": (3, 1)}, r"a shape is \(ways, shots, queries\)"), ({"shape": (3, 1, "2")}, "queries is '2'"),
    ({"states": None}, r"evaluate takes a run, gs\.evaluate\(run\), or"),
    ({"states": [{}]}, "a state is .*, not an instance of dict"),
    ({"learner": nn.Linear(4, 3)}, "a learner is .*, not an instance of Linear"),
])  # fmt: skip
def test_evaluations_that_cannot_be(dataset: gs.Dataset, options: dict[str, Any], reason: str) -> None:
    learner = gs.maml(gs.Conv4(ways=3, filters=2, image=dataset.image), steps=1)
    asked = {"learner": learner, "states": learner.init(), "shape": gs.Shape(3, 1, 2), "tasks": 2, **options}
    with pytest.raises(gs.UserError, match=reason):
        gs.evaluate(dataset=dataset, **asked)


class Source:
    """Tasks from a function of how many are asked for."""

    def __init__(self, make: Any) -> None:
        self.make, self.shapes = make, set[Any]()

    def sample(self, split: str, shape: gs.Shape, tasks: int, key: tuple[int, ...]) -> Any:
        self.shapes.add((shape.ways, shape.shots, shape.queries))
        return self.make(tasks)


def test_a_shape_may_be_a_plain_tuple(dataset: gs.Dataset) -> None:
    learner = gs.maml(gs.Conv4(ways=3, filters=2, image=dataset.image), steps=1)
    shape: Any = (3, 1, 2)
    assert len(gs.evaluate(learner, learner.init(), dataset, shape=shape, tasks=2).losses) == 2
    own, source = gs.maml(nn.Linear(4, 3).double(), steps=1), Source(batch)
    gs.evaluate(own, own.init(), source, shape=shape, tasks=np.int64(2))
    assert source.shapes == {(3, 1, 2)}


@pytest.mark.parametrize("source, reason", [
    (Source(lambda tasks: batch(1)), "another number of train tasks than asked for: 1, not 3"),
    (Source(lambda tasks: batch(2 * tasks)), "another number of train tasks than asked for: 2, not 1"),
    (Source(lambda tasks: None), "sample returns gs.Episodes, not None"),
    (Source(lambda tasks: (torch.zeros(2), torch.zeros(2))), "sample returns gs.Episodes, not tuple"),
    ("glyphs", "a data set is .*, not 'glyphs'"), (None, "a data set is .*, not None|evaluate takes a run"),
    (object(), "a data set is .*, not an instance of object"),
])  # fmt: skip
def test_sources_that_cannot_be(tmp_path: Path, source: Any, reason: str) -> None:
    learner = gs.maml(nn.Linear(4, 3).double(), steps=1)
    with pytest.raises(gs.UserError, match=reason):
        gs.train(learner, source, tmp_path / "run", epochs=1, iterations=1, tasks=3, val_tasks=2, test_tasks=0)
    for_test = reason.replace("train", "test").replace("2, not 1", "6, not 3")
    with pytest.raises(gs.UserError, match=for_test):
        gs.evaluate(learner, learner.init(), source, tasks=3)


@pytest.mark.parametrize("options, reason", [
    ({"ways": 0}, "ways is 0"), ({"ways": 2.0}, "ways is 2.0; it must be a whole number"),
    ({"image": (3, 84)}, r"image is \(3, 84\); it must be \(channels, height, width\)"), ({"image": 84}, "image is 84"),
    ({"image": (0, 84, 84)}, "channels is 0"), ({"image": (3, 84, 8.4)}, "width is 8.4"),
    ({"filters": 0}, "filters is 0"),
])  # fmt: skip
def test_backbones_that_cannot_be(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(gs.UserError, match=reason):
        gs.Conv4(**options)


@pytest.mark.parametrize("rate", [-1, float("nan"), float("inf"), "0.1", None])
def test_rates_that_cannot_be(rate: Any) -> None:
    with pytest.raises(gs.UserError, match="rate is"):
        gs.optimiser(gs.maml(nn.Linear(4, 3)).init(), rate)


@pytest.mark.parametrize("clamp", [-1, float("nan"), "1"])
def test_clamps_that_cannot_be(clamp: Any) -> None:
    learner = gs.maml(nn.Linear(4, 3).double(), steps=1)
    state = learner.init()
    adam = gs.optimiser(state, 1e-3)
    with pytest.raises(gs.UserError, match="clamp is"):
        gs.meta_step(learner, state, adam, batch(), clamp)
    assert gs.meta_step(learner, state, adam, batch(), None).taken


@pytest.mark.parametrize("call", [
    lambda wrong, learner: gs.optimiser(wrong, 0.1),
    lambda wrong, learner: gs.meta_step(learner, wrong, None, batch()),  # type: ignore[arg-type]
    lambda wrong, learner: gs.meta_step(wrong, learner.init(), None, batch()),  # type: ignore[arg-type]
    lambda wrong, learner: gs.save_pretrained("there", wrong, learner.init()),
    lambda wrong, learner: gs.save_pretrained("there", learner, wrong),
    lambda wrong, learner: gs.from_pretrained("there", wrong),
])  # fmt: skip
def test_a_module_is_neither_a_learner_nor_a_state(call: Any) -> None:
    with pytest.raises(gs.UserError, match=r"a (learner|state) is what .*, not an instance of Linear"):
        call(nn.Linear(4, 3), gs.maml(nn.Linear(4, 3)))


@pytest.mark.parametrize("call", [gs.load_run, gs.load_dataset, gs.from_pretrained])
@pytest.mark.parametrize("name", [None, 3])
def test_names_that_cannot_be(call: Any, name: Any) -> None:
    with pytest.raises(gs.UserError, match=f"is named by text or a path, not {name}"):
        call(name)


@pytest.mark.parametrize("options, reason", [
    ({"engine": "fast"}, "an engine is one of auto, eager, graph"), ({"device": "tpu?"}, "a device is cpu or cuda"),
    ({"engine": "graph"}, "a CUDA graph needs a GPU"), ({"device": None}, "a device is cpu or cuda, not None"),
    ({"folder": 3}, "a folder is named by text or a path, not 3"), ({"learner": nn.Linear(4, 3)}, "a learner is"),
])  # fmt: skip
def test_trainings_that_cannot_be(dataset: gs.Dataset, tmp_path: Path, options: Any, reason: str) -> None:
    learner = gs.maml(gs.Conv4(ways=3, filters=2, image=dataset.image), steps=1)
    with pytest.raises(gs.UserError, match=reason):
        gs.train(**{"learner": learner, "dataset": dataset, "folder": tmp_path / "run", **options})
    assert not (tmp_path / "run").exists()


def test_a_gpu_that_is_not_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(gs.UserError, match="PyTorch sees no GPU"):
        gs.train(gs.maml(nn.Linear(4, 3)), Source(batch), tmp_path / "run", device="cuda")


@pytest.mark.parametrize("parts, reason", [
    ([np.zeros((2, 3, 4)), torch.zeros(2, 3), torch.zeros(2, 3, 4), torch.zeros(2, 3)], "of tensors, not ndarray"),
    ([torch.zeros(0, 3, 4), torch.zeros(0, 3), torch.zeros(0, 3, 4), torch.zeros(0, 3)], "at least one task"),
])  # fmt: skip
def test_batches_that_cannot_be(parts: list[Any], reason: str) -> None:
    with pytest.raises(gs.UserError, match=reason):
        gs.Episodes(*parts)


def test_a_gpu_that_is_not_the_current_one_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    message = r"cuda:1 is not this process's current GPU: call torch\.cuda\.set_device\(1\) first"
    with pytest.raises(gs.UserError, match=message):
        choose("cuda:1")
    with pytest.raises(gs.UserError, match=message):
        check_current(torch.device("cuda:1"))  # as `learner.to` does for our kernels
    assert [choose(device).engine for device in ("cuda", "cuda:0", "cpu")] == ["graph", "graph", "eager"]
    assert choose("cuda:1", "eager").engine == "eager"  # PyTorch's own operations follow their tensors


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return self.layer(a) + self.layer(b)


class Returns(nn.Module):
    def __init__(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.layer, self.change = nn.Linear(4, 3), change

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.change(self.layer(x))


MISFITS: dict[str, tuple[nn.Module, Any, str]] = {
    "features": (nn.Linear(6, 3), torch.rand(2, 5, 4), r"cannot take the inputs of a task of shape \[5, 4\]"),
    "one of two": (Pair(), (torch.rand(2, 5, 4),), r"that are 0: \[5, 4\].*missing"),
    "three of two": (Pair(), (torch.rand(2, 5, 4),) * 3, "cannot take the inputs"),
    "another name": (Pair(), {"a": torch.rand(2, 5, 4), "c": torch.rand(2, 5, 4)}, r"c: \[5, 4\]"),
    "sizes of two": (Pair(), (torch.rand(2, 5, 4), torch.rand(2, 3, 4)), "cannot take the inputs"),
    "a number": (Returns(torch.sum), torch.rand(2, 5, 4), "returns a single number"),
    "fewer rows": (Returns(lambda y: y[:3]), torch.rand(2, 5, 4), "returns 3 outputs for the 5 examples"),
}


@pytest.mark.parametrize("case", MISFITS.values(), ids=MISFITS)
def test_inputs_and_outputs_that_do_not_fit(case: tuple[nn.Module, Any, str]) -> None:
    model, x, message = case
    learner, y = gs.maml(model, steps=1), torch.zeros(2, 5, dtype=torch.long)
    with pytest.raises(gs.UserError, match=message):
        learner.outer_loss(learner.init(), gs.Episodes(x, y, x, y))


def test_a_misfit_does_not_change_how_later_inputs_are_taken() -> None:
    learner, y, one = gs.maml(Pair(), steps=1), torch.zeros(2, 5, dtype=torch.long), torch.rand(2, 5, 4)
    state = learner.init()
    with pytest.raises(gs.UserError):
        learner.outer_loss(state, gs.Episodes((one,), y, (one,), y))
    assert learner.outer_loss(state, gs.Episodes((one, one), y, (one, one), y)).loss.isfinite()


def test_nothing_in_place_of_a_batch_a_state_or_weights() -> None:
    learner, x, y = gs.maml(nn.Linear(4, 3)), torch.rand(2, 5, 4), torch.zeros(2, 5, dtype=torch.long)
    state = learner.init()
    calls: list[Callable[[], Any]] = [
        lambda: gs.meta_step(learner, state, gs.optimiser(state, 1e-3), None),  # type: ignore[arg-type]
        lambda: learner.adapt(None, x, y),  # type: ignore[arg-type]
        lambda: learner.predict(None, x),  # type: ignore[arg-type]
        lambda: learner.module_for(None, 0),  # type: ignore[arg-type]
        lambda: gs.Episodes(x.to("meta"), y, x, y),
    ]
    for call in calls:
        with pytest.raises(gs.UserError):
            call()
