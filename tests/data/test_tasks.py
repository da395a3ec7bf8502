"""Tasks from labelled data: arrays, tensors, torch Datasets; classes and groups; splits; and what is an error."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset

import gradshare as gs
from gradshare.data import tasks as tasks_module
from gradshare.method import SPLITS
from gradshare.method.episodes import Shape, choose


def marked(classes: int = 10, each: int = 20) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """An example's two features are its class and its own number; classes come mixed."""
    labels = np.arange(classes * each) % classes
    return np.stack([labels, np.arange(classes * each)], 1).astype(np.float32), labels


def everything(source: Any, split: str, shape: Shape = Shape(2, 1, 3)) -> Tensor:
    """All examples that many tasks of a split draw, [examples, ...]."""
    episodes = source.sample(split, shape, 200, (0,))
    return torch.cat([episodes.support_x, episodes.query_x], 1).flatten(0, 1)


def all_names(source: Any) -> list[Any]:
    return sorted(name for names in source.names.values() for name in names)


def as_tensors(x: Any, y: Any) -> Any:
    return torch.from_numpy(x), torch.from_numpy(y)


def as_big_endian(x: Any, y: Any) -> Any:
    """In the order of bytes that FITS and IDX files have."""
    return x.astype(">f4"), y.astype(">i2")


def as_dataset(x: Any, y: Any) -> Any:
    return TensorDataset(*as_tensors(x, y)), None


class Counted(Dataset[Any]):
    """A Dataset that counts its reads."""

    def __init__(self, x: Any, y: Any) -> None:
        self.x, self.y, self.reads = x, y, 0

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, row: int) -> Any:
        self.reads += 1
        return self.x[row], self.y[row]


def as_read(x: Any, y: Any) -> Any:
    return Counted(x, y), None


@pytest.mark.parametrize("form", [lambda x, y: (x, y), as_tensors, as_big_endian, as_dataset, as_read])
def test_every_form_gives_the_same_tasks_with_labels_by_class(form: Callable[..., Any]) -> None:
    shape = Shape(ways=3, shots=2, queries=4)
    source = gs.tasks(*form(*marked()), splits=(5, 0, 5))
    found, expected = (s.sample("train", shape, 6, (1, 2)) for s in (source, gs.tasks(*marked(), splits=(5, 0, 5))))
    assert found.support_x.shape == (6, 6, 2) and found.query_x.shape == (6, 12, 2)
    assert torch.equal(found.support_x, expected.support_x) and torch.equal(found.query_x, expected.query_x)
    assert found.query_x.dtype == torch.float32 and found.query_y.dtype == torch.int64
    assert (
        found.support_y[0].tolist() == [0, 0, 1, 1, 2, 2] and found.query_y[5].tolist() == [0] * 4 + [1] * 4 + [2] * 4
    )
    for task in range(6):
        x = torch.cat([found.support_x[task], found.query_x[task]])
        y = torch.cat([found.support_y[task], found.query_y[task]])
        assert len(set(x[:, 1].tolist())) == 18  # nothing twice
        assert len(set(zip(x[:, 0].tolist(), y.tolist(), strict=True))) == 3  # one class, one label
    if form is as_dataset:  # its tensors are used as they are
        assert repr(source).startswith("gs.tasks([200, 2] float32, ")
    other = source.sample("train", shape, 6, (1, 3))
    assert not torch.equal(found.support_x, other.support_x)


def test_rows_are_chosen_as_those_of_a_store(dataset: gs.Dataset) -> None:
    images, shape = torch.from_numpy(np.array(dataset.images)), Shape(5, 1, 15)
    classes = dataset.index.classes
    labels = np.repeat(np.arange(len(classes)), [entry.images for entry in classes])
    lists = {split: [n for n, entry in enumerate(classes) if entry.split == split] for split in SPLITS}
    source, key = gs.tasks(images.movedim(-1, 1), labels, splits=lists), (3, 1, 4)
    for split in SPLITS:
        mine, stored = source.sample(split, shape, 3, key), dataset.sample(split, shape, 3, key)
        assert mine.query_x.dtype == torch.uint8  # inputs come as they are
        assert torch.equal(mine.query_x / 255, stored.query_x) and torch.equal(mine.query_y, stored.query_y)


def test_choosing_is_what_a_full_sort_gives() -> None:
    counts, shape, key = np.array([5000, 700, 4000, 650, 900]), Shape(3, 300, 300), (5, 6)
    generator = np.random.default_rng(key)
    classes = generator.random((10, 5)).argsort(-1)[:, :3]
    order = generator.random((10, 3, 5000))
    order[np.arange(5000) >= counts[classes][..., None]] = 2.0
    found = choose(counts, shape, 10, key)
    assert np.array_equal(found[0], classes) and np.array_equal(found[1], order.argsort(-1)[..., :600])


def test_choosing_from_very_large_classes_takes_little_memory() -> None:
    counts, shape = np.array([3_000_000_000, 20, 2_000_000]), Shape(2, 1, 15)
    classes, rows = choose(counts, shape, 50, (5, 6))
    assert rows.shape == (50, 2, 16) and set(classes.ravel()) == {0, 1, 2}
    assert all(len(set(own)) == 16 for task in rows.tolist() for own in task)
    assert (rows < counts[classes][..., None]).all() and rows.min() >= 0 and rows.max() > 1_000_000_000


@pytest.mark.parametrize(
    ("splits", "expected"),
    [
        ((0.64, 0.16, 0.20), [6, 2, 2]),
        ((5, 0, 5), [5, 0, 5]),
        ((1.0, 0, 0), [10, 0, 0]),
        ((0, 0.5, 0.5), [0, 5, 5]),
        ((0.98, 0.01, 0.01), [8, 1, 1]),
        (np.array([4, 3, 2]), [4, 3, 2]),
        ({"train": [0, 1, 2], "test": np.array([7, 8])}, [3, 0, 2]),
    ],
)
def test_splits_of_ten_classes(splits: Any, expected: list[int]) -> None:
    source = gs.tasks(*marked(), splits=splits)
    assert [len(source.names[split]) for split in SPLITS] == expected
    named = all_names(source)
    assert len(set(named)) == len(named)  # no class is in two splits
    for split in SPLITS:
        if len(source.names[split]) >= 2:
            assert set(everything(source, split)[:, 0].tolist()) == set(source.names[split])
    if isinstance(splits, dict):
        assert source.names == {"train": [0, 1, 2], "val": [], "test": [7, 8]}


def test_the_seed_chooses_the_classes_of_a_split() -> None:
    first, same, other = (gs.tasks(*marked(), splits=(5, 0, 5), seed=seed).names for seed in (0, 0, 1))
    assert first == same and first != other


@pytest.mark.parametrize("splits", [(0.5, 0.25, 0.25), (10, 5, 5)])
def test_by_example_every_class_is_in_every_split_and_no_example_in_two(splits: Any) -> None:
    source = gs.tasks(*marked(), splits=splits, by="example")
    drawn = {split: everything(source, split, Shape(3, 1, 3)) for split in SPLITS}
    assert all(set(x[:, 0].tolist()) == set(range(10)) for x in drawn.values())
    other = everything(gs.tasks(*marked(), splits=splits, by="example", seed=1), "val", Shape(3, 1, 3))
    assert set(other[:, 1].tolist()) != set(drawn["val"][:, 1].tolist())
    numbers = {split: set(x[:, 1].tolist()) for split, x in drawn.items()}
    assert [len(numbers[split]) for split in SPLITS] == [100, 50, 50] and len(set.union(*numbers.values())) == 200


def test_a_group_is_a_task_and_its_targets_keep_their_meaning() -> None:
    people, each = 8, 12
    group = np.repeat([f"person {n}" for n in range(people)], each)
    x = np.stack([np.repeat(np.arange(people), each), np.arange(people * each)], 1)
    y = np.stack([x[:, 1] * 0.5, x[:, 0] * 1.0], 1)
    source = gs.tasks(x, y, groups=group, splits=(4, 2, 2))
    episodes = source.sample("train", Shape(shots=4, queries=8), 20, (0,))
    assert episodes.support_x.shape == (20, 4, 2) and episodes.query_y.shape == (20, 8, 2)
    assert episodes.support_x.dtype == torch.int64 and episodes.query_y.dtype == torch.get_default_dtype()
    assert torch.equal(episodes.query_y[..., 0], episodes.query_x[..., 1] * 0.5)
    assert all(len(set(task[:, 0].tolist())) == 1 for task in episodes.query_x)
    assert {f"person {n}" for n in episodes.query_x[..., 0].unique().tolist()} == set(source.names["train"])
    known = gs.tasks(x, y, groups=group, splits=(6, 3, 3), by="example")  # known people, new examples
    assert known.names["train"] == known.names["test"] and len(known.names["val"]) == people


@pytest.mark.parametrize(
    ("labels", "expected", "dtype"),
    [
        (np.array(["no", "yes"] * 10), [0, 1], torch.int64),
        (np.array([True, False] * 10), [1, 0], torch.int64),
        (torch.tensor([7, 3] * 10, dtype=torch.uint8), [7, 3], torch.int64),
        ([2.5, 1.0] * 10, [2.5, 1.0], torch.float32),
        (np.array([2.5, 1.0] * 10, dtype=">f4"), [2.5, 1.0], torch.float32),
        (torch.tensor([2.5, 1.0] * 10, dtype=torch.float64), [2.5, 1.0], torch.float64),
    ],
)
def test_targets_of_groups(labels: Any, expected: list[float], dtype: torch.dtype) -> None:
    x = np.arange(20) % 2
    source = gs.tasks(x, labels, groups=np.arange(20) // 10, splits=(2, 0, 0))
    episodes = source.sample("train", Shape(1, 5, 5), 4, (0,))
    assert episodes.query_y.dtype == dtype
    assert torch.equal(episodes.query_y, torch.tensor(expected, dtype=dtype)[episodes.query_x])


@pytest.mark.parametrize(
    "labels",
    [
        [f"kind {n % 4}" for n in range(40)],
        np.array([f"kind {n % 4}" for n in range(40)], dtype=object),
        np.array([(n % 4) * 1000 - 7 for n in range(40)], dtype=np.int16),
        [float(n % 4) for n in range(40)],
        torch.arange(40) % 4,
        np.array(["2020-01-01", "2021-01-01", "2022-01-01", "2023-01-01"] * 10, dtype="datetime64[D]"),
        [("a", n % 2) if n % 4 < 2 else ("b", n % 2) for n in range(40)],
    ],
)
def test_labels_of_any_kind(labels: Any) -> None:
    if isinstance(labels, list) and isinstance(labels[0], tuple):
        values = np.empty(40, dtype=object)
        values[:] = labels
        labels = values
    source = gs.tasks(np.arange(40) % 4, labels, splits=(2, 0, 2))
    assert len(source.names["train"]) == 2
    episodes = source.sample("test", Shape(2, 3, 7), 3, (0,))
    assert all(len(set(task[:7].tolist())) == 1 for task in episodes.query_x)


@pytest.mark.parametrize("read", [False, True])
def test_inputs_of_several_parts_stay_together(read: bool) -> None:
    x, y = marked()
    parts = {"features": x, "mask": torch.from_numpy(x[:, 0] > 4), "tokens": x[:, 1:].astype(np.int32)}
    for inputs in (parts, tuple(parts.values())):
        items = [{name: part[row] for name, part in parts.items()} for row in range(200)]
        data: Any = Counted(items if inputs is parts else [tuple(item.values()) for item in items], y)
        source = gs.tasks(data if read else inputs, None if read else y, splits=(10, 0, 0))
        drawn = source.sample("train", Shape(3, 1, 2), 4, (0,)).query_x
        assert type(drawn) is type(inputs)
        features, mask, tokens = drawn.values() if isinstance(drawn, dict) else drawn
        assert features.shape == (4, 6, 2) and tokens.shape == (4, 6, 1) and tokens.dtype == torch.int32
        assert torch.equal(mask, features[..., 0] > 4) and torch.equal(tokens[..., 0], features[..., 1].int())
    if not read:
        shown = "([200, 2] float32, [200] bool, [200, 1] int32)"
        assert repr(source) == f"gs.tasks({shown}, 10 classes: train 10, val 0, test 0)"


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(200, 3), nn.Linear(5, 3)

    def forward(self, features: Tensor, tokens: Tensor) -> Tensor:
        out: Tensor = self.head(torch.cat([features, self.tokens(tokens)], -1))
        return out


def test_a_model_with_two_inputs_trains(tmp_path: Path) -> None:
    x, y = marked()
    source = gs.tasks({"tokens": x[:, 1].astype(np.int64), "features": x / 200}, y, splits=(3, 3, 4))
    options: dict[str, Any] = {"ways": 3, "queries": 3, "val_tasks": 2, "test_tasks": 2, "tasks": 2}
    run = gs.train(gs.maml(TwoInputs(), steps=1), source, tmp_path / "run", epochs=1, iterations=2, **options)
    assert np.isfinite(run.metrics[0]["train_loss"])


def test_a_dataset_is_read_when_drawn_and_never_all_of_it() -> None:
    data = Counted(*marked(10, 100))
    data.targets = data.y  # type: ignore[attr-defined]  # as torchvision's have
    source = gs.tasks(data, splits=(10, 0, 0))
    assert data.reads == 0
    source.sample("train", Shape(5, 1, 3), 2, (0,))
    assert 0 < data.reads <= 40
    del data.targets  # type: ignore[attr-defined]
    data.reads = 0
    assert gs.tasks(data, marked(10, 100)[1]) is not None and data.reads == 0  # labels by y=
    groups = np.arange(1000) // 100
    by_group = gs.tasks(data, groups=groups)
    assert data.reads == 0  # targets come with the examples
    episodes = by_group.sample("train", Shape(1, 2, 3), 2, (0,))
    assert torch.equal(episodes.query_y, episodes.query_x[..., 0].long()) and data.reads <= 10
    data.reads = 0
    gs.tasks(data)
    assert data.reads == 1000  # labels are known nowhere else


class Plain:
    """A Dataset to PyTorch's loaders, though it has another parent class."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, row: int) -> Any:
        return [float(row), row % 4], f"kind {row % 4}"


def test_anything_with_a_length_and_items_is_a_dataset() -> None:
    source = gs.tasks(Plain(), splits=(4, 0, 0))
    assert repr(source) == "gs.tasks(40 examples of Plain, 4 classes: train 4, val 0, test 0)"
    episodes = source.sample("train", Shape(2, 1, 4), 3, (0,))
    assert episodes.query_x.shape == (3, 8, 2) and episodes.query_x.dtype == torch.float32
    assert torch.equal(episodes.query_x[..., 0] % 4, episodes.query_x[..., 1])
    with pytest.raises(gs.UserError, match=r"each target of the Dataset, after its transforms, must be .*, not str"):
        gs.tasks(Plain(), groups=np.arange(40) // 10, splits=(4, 0, 0)).sample("train", Shape(1, 1, 1), 1, (0,))
    given = gs.tasks(Plain(), np.arange(40.0), groups=np.arange(40) // 10, splits=(4, 0, 0))
    episodes = given.sample("train", Shape(1, 2, 3), 3, (0,))
    assert torch.equal(episodes.query_y, episodes.query_x[..., 0])


def test_labels_of_a_dataset_that_changes_or_selects_them() -> None:
    data: Any = Counted(*marked())
    data.targets = marked()[1]
    part = Subset(data, [row for row in range(200) if row % 10 < 4])
    assert all_names(gs.tasks(part, splits=(2, 0, 2))) == [0, 1, 2, 3] and data.reads == 0
    data.target_transform = lambda label: label % 3
    data.y = data.y % 3
    assert all_names(gs.tasks(data, splits=(1, 1, 1))) == [0, 1, 2] and data.reads == 200


def test_reading_labels_for_long_shows_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks_module, "QUIET", -2.0)
    with redirect_stderr(io.StringIO()) as out:
        gs.tasks(Counted(*marked()))
    assert out.getvalue() == "gs.tasks reads all labels, once (y= saves it): 1 of 200\n"


class Sine(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 1))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x)
        return out


def test_regression_by_groups_trains(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    devices = np.repeat(np.arange(40), 15)
    amplitude = generator.uniform(0.5, 2, 40)[devices]
    x = generator.uniform(-2, 2, (600, 1))
    source = gs.tasks(x, np.sin(x) * amplitude[:, None], groups=devices)
    learner = gs.maml(Sine(), inner_lr=0.05, steps=2, loss="mse")
    options: dict[str, Any] = {"iterations": 25, "shots": 5, "queries": 10, "val_tasks": 6, "test_tasks": 6}
    run = gs.train(learner, source, tmp_path / "run", epochs=2, outer_lr=0.01, **options)
    losses = [line["train_loss"] for line in run.metrics]
    assert losses[1] < 0.8 * losses[0], losses


def test_ten_classes_train_five_way_without_validation(tmp_path: Path) -> None:
    x, y = marked()
    for splits, test_tasks in (((5, 0, 5), 2), ((1.0, 0, 0), 0)):
        source = gs.tasks(x / 200, y, splits=splits)
        options: dict[str, Any] = {"queries": 3, "tasks": 2, "val_tasks": 0, "test_tasks": test_tasks}
        folder = tmp_path / f"run-{test_tasks}"
        run = gs.train(gs.maml(nn.Linear(2, 5), steps=1), source, folder, epochs=1, iterations=2, **options)
        assert np.isfinite(run.metrics[0]["train_loss"])
        with pytest.raises(gs.UserError, match="the val split has no classes; a run with val_tasks=0 does without it"):
            gs.train(gs.maml(nn.Linear(2, 5)), source, tmp_path / "other", epochs=1, queries=3)
    with pytest.raises(gs.UserError, match="classes; the val split has 1; a run with val_tasks=0 does without it"):
        gs.train(gs.maml(nn.Linear(2, 5)), gs.tasks(x, y, splits=(5, 1, 4)), tmp_path / "other", epochs=1, queries=3)


@pytest.mark.parametrize(
    ("x", "model"),
    [
        (np.random.default_rng(0).normal(size=(120, 6)), nn.Linear(6, 3)),  # float64 features
        (
            np.random.default_rng(0).integers(0, 50, (120, 7)),
            nn.Sequential(nn.Embedding(50, 2), nn.Flatten(), nn.Linear(14, 3)),
        ),
        (torch.randn(120, 2, 9), nn.Sequential(nn.Conv1d(2, 3, 3), nn.Flatten(), nn.Linear(21, 3))),  # series
    ],
)
def test_features_tokens_and_series_train(x: Any, model: nn.Module, tmp_path: Path) -> None:
    source = gs.tasks(x, [f"class {n % 9}" for n in range(120)], splits=(3, 3, 3))
    options: dict[str, Any] = {"ways": 3, "queries": 3, "val_tasks": 2, "test_tasks": 2, "tasks": 2}
    run = gs.train(gs.maml(model, steps=1), source, tmp_path / "run", epochs=1, iterations=2, **options)
    assert np.isfinite(run.metrics[0]["train_loss"])


def test_a_source_can_be_copied_pickled_and_moved() -> None:
    x, y = marked()
    source = gs.tasks({"a": x, "b": torch.from_numpy(x)}, y, splits=(5, 0, 5))
    pickled = pickle.loads(pickle.dumps(source))
    for other in (copy.deepcopy(source), pickled, source.to("cpu")):
        rows = np.array([[3, 1]])
        assert torch.equal(other._examples.take(rows)[0]["a"], source._examples.take(rows)[0]["b"])
    moved = source.to("meta")._examples.take(np.array([[3, 1]]))[0]
    assert moved["a"].is_meta and moved["b"].is_meta


def test_train_holds_a_data_set_on_its_device_unless_it_is_too_large(
    dataset: gs.Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, own = gs.tasks(*marked()), object()
    assert tasks_module.on_device(own, torch.device("meta")) is own  # type: ignore[arg-type]
    for ours in (source, dataset):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda place, size=ours.nbytes: (size, size))
        assert tasks_module.on_device(ours, torch.device("cuda")) is ours
        moved: Any = tasks_module.on_device(ours, torch.device("meta"))
        assert (moved._examples.x if ours is source else moved.images).is_meta


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(())


class Texts(Counted):
    def __getitem__(self, row: int) -> Any:
        return "some text", self.y[row]


class Triples(Counted):
    def __getitem__(self, row: int) -> Any:
        return self.x[row], self.y[row], row


class Parts(Counted):
    """A Dataset whose inputs are several."""

    def __getitem__(self, row: int) -> Any:
        return self.x(row), self.y[row]

    def __len__(self) -> int:
        return len(self.y)


X, Y = marked()
NAN = np.where(np.arange(200) == 3, np.nan, 1.0)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: gs.tasks(X), "y is missing"),
        (lambda: gs.tasks(X, Y[:199]), "y has 199 entries and x 200 examples"),
        (lambda: gs.tasks(X, X), r"y has one entry an example, \[examples\], not \[200, 2\]"),
        (lambda: gs.tasks((X, X[:100]), Y), r"same number of examples, at least 1, not \[100, 200\]"),
        (lambda: gs.tasks(X[:0], Y[:0]), "at least 1"),
        (lambda: gs.tasks([["a", "b"]] * 200, Y), "x is an array of numbers"),
        (lambda: gs.tasks([[1.0], [1.0, 2.0]], [0, 1]), "x is an array of numbers.*inhomogeneous"),
        (lambda: gs.tasks(X, X[:, 1] + 0.5), "for real-valued targets give groups="),
        (lambda: gs.tasks(X, NAN), "not whole, or NaN"),
        (lambda: gs.tasks(X, NAN, groups=Y), "y holds NaN"),
        (lambda: gs.tasks(X, torch.from_numpy(NAN), groups=Y), "y holds NaN"),
        (lambda: gs.tasks(X, np.where(Y == 3, -100, Y), groups=Y), "y holds -100"),
        (lambda: gs.tasks(X, np.where(Y == 3, -100, Y)), "y holds -100"),
        (lambda: gs.tasks(Counted(X[:0], Y[:0])), "the Dataset has no example"),
        (lambda: gs.tasks(torch.eye(200).to_sparse(), Y), "x is a dense tensor, not torch.sparse_coo"),
        (lambda: gs.tasks([torch.ones(2), torch.ones(3)], [0, 1]), "each example of x must be a tensor"),
        (lambda: gs.tasks(DataLoader(Counted(X, Y)), Y), "x is an array of numbers.*: it is DataLoader"),
        (lambda: gs.tasks(X, Y, groups=Y[:3]), "groups has 3 entries"),
        (lambda: gs.tasks(X, [None, *["a"] * 199]), "y has nothing for example 0: it is None"),
        (lambda: gs.tasks(X, Y, by="classes"), "by is 'class' or 'example', not 'classes'"),
        (lambda: gs.tasks(X, Y, seed=-1), "seed is -1"),
        (lambda: gs.tasks(X, Y, splits=(0.5, 0.5)), "splits is three numbers"),
        (lambda: gs.tasks(X, Y, splits="all"), "splits is three numbers"),
        (lambda: gs.tasks(X, Y, splits=(0.5, 0.5, 0.5)), "sum to 1.5; they must sum to 1"),
        (lambda: gs.tasks(X, Y, splits=(1.5, -0.5, 0.0)), "splits is three numbers"),
        (lambda: gs.tasks(X, Y, splits=(9, 1, 1)), "asks for 11 classes; there are 10"),
        (lambda: gs.tasks(X, Y % 2), "2 classes are too few for splits"),
        (lambda: gs.tasks(X, Y, splits={"training": [1]}), "names train, val and test, not training"),
        (lambda: gs.tasks(X, Y, splits={"train": [1, 2], "test": [2]}), "names 1 classes twice: 2"),
        (lambda: gs.tasks(X, Y, splits={"train": ["1"]}), "names 1 classes that no example has: '1'"),
        (lambda: gs.tasks(X, Y, splits={"train": "1"}), "is a list of classes, not '1'"),
        (lambda: gs.tasks(X, Y, splits={"train": [1]}, by="example"), "by='example' puts all classes"),
        (lambda: gs.tasks(X, Y, splits=(15, 5, 1), by="example"), "asks for 21 examples of 0; there are 20"),
        (lambda: draw(gs.tasks(Parts(lambda row: (X[row], (X[row], 1)), Y))), "all of one size, not tuple of 2"),
        (lambda: draw(gs.tasks(Parts(lambda row: {"a": {"b": X[row]}}, Y))), "all of one size, not dict of 1"),
        (lambda: draw(gs.tasks(Parts(lambda row: {str(row): X[row]}, Y), Y)), "must have the same parts"),
        (lambda: draw(gs.tasks(Parts(lambda row: (X[row],) * (1 + row % 2), Y), Y)), "must have the same parts"),
        (lambda: gs.tasks(X[:2], [[1], [1, 2]]), "y has one entry an example, all of one size"),
        (lambda: gs.tasks(X[:2], [[1.0], [1.0, 2.0]], groups=[0, 1]), "y has one entry an example, all of one size"),
        (lambda: gs.tasks(Endless()), "IterableDataset"),
        (lambda: gs.tasks(Triples(X, Y)), r"is a pair \(x, y\); number 0 is tuple of 3"),
        (lambda: draw(gs.tasks(Texts(X, Y))), "a tensor, an array or a number, all of one size, not str"),
        (lambda: draw(gs.tasks(X, Y), "training"), "a split is one of train, val, test, not 'training'"),
        (lambda: draw(gs.tasks(X, Y), shape=(7, 1, 1)), "7-way tasks need 7 classes; the train split has 6"),
        (lambda: draw(gs.tasks(X, Y), shape=(2, 0, 1)), "shots is 0"),
        (
            lambda: draw(gs.tasks(X, Y, splits=(10, 0, 0)), "val"),
            "the val split has no classes; a run with val_tasks=0",
        ),
        (lambda: draw(gs.tasks(X, Y, splits=(0, 5, 5))), "the train split has no classes$"),
        (
            lambda: draw(gs.tasks(X[:196], Y[:196], splits=(10, 0, 0)), shape=(5, 5, 15)),
            r"needs 20 examples of a class; 4 of the 10 classes of the train .*: 6 \(19\), 7 \(19\), 8 \(19\), \.\.\.",
        ),
        (
            lambda: draw(gs.tasks(X, Y, groups=["a"] * 3 + ["b"] * 197, splits=(2, 0, 0))),
            r"1 of the 2 groups of the train split have fewer: 'a' \(3\)",
        ),
    ],
)
def test_what_is_wrong_is_said_with_the_numbers(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(gs.UserError, match=message):
        make()


def draw(source: Any, split: str = "train", shape: Any = (5, 1, 3)) -> None:
    source.sample(split, shape, 1, (0,))
