"""Drawing tasks from a store, and finding a store by its name."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import gradshare as gs
from gradshare.data.store import ClassEntry, Index, write_store
from gradshare.method.episodes import Shape, choose
from tests.conftest import write_blobs


def test_the_same_key_gives_the_same_tasks_and_another_key_others(dataset: gs.Dataset) -> None:
    first, same, other = (
        dataset.sample("train", Shape(5, 1, 15), 3, key) for key in ((0, 0, 1, 2), (0, 0, 1, 2), (0, 0, 2, 1))
    )
    assert torch.equal(first.query_x, same.query_x) and not torch.equal(first.query_x, other.query_x)


def test_the_shape_and_layout_of_episodes(dataset: gs.Dataset) -> None:
    episodes = dataset.sample("test", Shape(ways=4, shots=2, queries=3), 6, (1,))
    assert episodes.support_x.shape == (6, 8, 1, 16, 16) and episodes.query_x.shape == (6, 12, 1, 16, 16)
    assert episodes.support_y[0].tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert episodes.query_y[5].tolist() == [0] * 3 + [1] * 3 + [2] * 3 + [3] * 3
    assert episodes.support_x.min() >= 0 and episodes.support_x.max() <= 1


def test_images_have_the_label_of_their_class_and_never_repeat(tmp_path: Path) -> None:
    classes = tuple(ClassEntry(str(n), "train", 7 + n) for n in range(9))
    marks = (25 * n + i for n in range(9) for i in range(7 + n))  # each image is marked by its class and its place
    images = (np.full((2, 2, 1), mark, np.uint8) for mark in marks)
    write_store(tmp_path / "marked", Index("marked", (2, 2, 1), classes, "none", "test"), images)
    episodes = gs.load_dataset(tmp_path / "marked").sample("train", Shape(5, 2, 5), 40, (3,))
    found = torch.cat([episodes.support_x, episodes.query_x], 1)[:, :, 0, 0, 0].mul(255).round().int()
    labels = torch.cat([episodes.support_y, episodes.query_y], 1)
    for task_marks, task_labels in zip(found.tolist(), labels.tolist(), strict=True):
        assert len(set(task_marks)) == 35
        pairs = {(label, mark // 25) for mark, label in zip(task_marks, task_labels, strict=True)}
        assert len(pairs) == len({label for label, _ in pairs}) == len({own for _, own in pairs}) == 5


def test_choosing_is_uniform_over_classes_and_unequal_counts() -> None:
    counts = np.array([4, 7, 20, 5])
    classes, images = choose(counts, Shape(2, 1, 2), 20_000, (0,))
    share = np.bincount(classes.ravel(), minlength=4) / classes.size
    assert share == pytest.approx([0.25] * 4, abs=0.01)
    for number, count in enumerate(counts):
        chosen = images[classes == number]
        assert chosen.max() == count - 1
        assert np.bincount(chosen.ravel()) / len(chosen) == pytest.approx([3 / count] * count, abs=0.04)


def test_scaling_belongs_to_the_run(tmp_path: Path, blobs: Path) -> None:
    index = Index("rgb", (4, 4, 3), (ClassEntry("a", "train", 3), ClassEntry("b", "train", 3)), "none", "test")
    write_store(tmp_path / "rgb", index, (np.full((4, 4, 3), value, np.uint8) for value in [128] * 3 + [64] * 3))
    unit, imagenet = (
        gs.load_dataset(tmp_path / "rgb", pixels=kind).sample("train", Shape(2, 1, 2), 1, (0,))  # type: ignore[arg-type]
        for kind in ("unit", "imagenet")
    )
    mean, deviation = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    expected = (unit.query_x - mean.view(3, 1, 1)) / deviation.view(3, 1, 1)
    torch.testing.assert_close(imagenet.query_x, expected)
    with pytest.raises(gs.UserError, match="3 channels"):
        gs.load_dataset(blobs, pixels="imagenet")


@pytest.mark.parametrize(
    ("split", "shape", "message"),
    [
        ("train", Shape(13, 1, 1), "13 classes"),
        (
            "val",
            Shape(5, 6, 15),
            r"needs 21 images of a class; 6 of the 6 classes of the val split of blobs.*'val-0' \(20\)",
        ),
        ("train", Shape(5, 0, 1), "shots is 0"),
        ("training", Shape(), "'training'"),
    ],
)
def test_tasks_that_a_split_cannot_give(dataset: gs.Dataset, split: str, shape: Shape, message: str) -> None:
    with pytest.raises(gs.UserError, match=message):
        dataset.sample(split, shape, 1, (0,))


def test_a_data_set_is_shown_in_one_short_line(dataset: gs.Dataset) -> None:
    assert repr(dataset) == "Dataset('blobs', 480 images of 1 x 16 x 16, classes: train 12, val 6, test 6)"


def test_a_folder_counts_only_if_it_holds_a_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADSHARE_DATA", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "shapes").mkdir()  # the images that "shapes" was imported from
    with pytest.raises(gs.UserError, match="shapes is not a data set"):
        gs.load_dataset("shapes")
    write_blobs(tmp_path / "home" / "shapes", {"train": 2}, images=2)
    (tmp_path / "shapes" / "index.json").write_text("[]")  # of other software
    assert gs.load_dataset("shapes").index.images == 4
    write_blobs(tmp_path / "mine", {"train": 3}, images=2)
    assert gs.load_dataset("mine").index.images == gs.load_dataset(tmp_path / "mine").index.images == 6
    with pytest.raises(gs.UserError, match="gradshare data import cub PATH --transform resize"):
        gs.load_dataset("cub-resize")


BLOCKED = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("fcntl", "pooch", "requests", "filelock", "platformdirs", "PIL", "matplotlib"):
            raise ImportError(name)

sys.meta_path.insert(0, Blocked())
sys.modules.pop("fcntl", None)
from gradshare.data.dataset import load_dataset
print(load_dataset(sys.argv[1]).sample("train", (3, 1, 2), 2, (0,)).query_x.shape)
"""


def test_reading_a_store_needs_torch_and_numpy_alone() -> None:
    words = [sys.executable, "-c", BLOCKED, str(Path(__file__).parent / "fixtures" / "store")]
    result = subprocess.run(words, capture_output=True, text=True, check=False)
    assert "torch.Size([2, 6, 3, 5, 6])" in result.stdout, result.stderr
