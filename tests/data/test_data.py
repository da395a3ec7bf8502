"""The store, and drawing tasks from it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.conftest import write_blobs

import gradshare as gs
from gradshare.data.store import ClassEntry, Index, building, write_store
from gradshare.data.verification import verify
from gradshare.method.episodes import Shape, choose


def test_the_same_key_gives_the_same_tasks_and_another_other_ones(dataset: gs.Dataset) -> None:
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


def test_images_carry_the_label_of_their_class_and_never_repeat(tmp_path: Path) -> None:
    index = Index("marked", (2, 2, 1), [ClassEntry(str(n), "train", 7 + n) for n in range(9)], "none", "test")
    marks = (25 * n + i for n in range(9) for i in range(7 + n))  # each image is marked by its class and its place
    write_store(tmp_path / "marked", index, (np.full((2, 2, 1), mark, np.uint8) for mark in marks))
    episodes = gs.load_dataset(tmp_path / "marked").sample("train", Shape(5, 2, 5), 40, (3,))
    marks = torch.cat([episodes.support_x, episodes.query_x], 1)[:, :, 0, 0, 0].mul(255).round().int()
    labels = torch.cat([episodes.support_y, episodes.query_y], 1)
    for task_marks, task_labels in zip(marks, labels, strict=True):
        assert len(set(task_marks.tolist())) == 35
        classes = {
            label: {m // 25 for m, y in zip(task_marks.tolist(), task_labels.tolist(), strict=True) if y == label}
            for label in range(5)
        }
        assert all(len(found) == 1 for found in classes.values()) and len(set.union(*classes.values())) == 5


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
    index = Index("rgb", (16, 16, 3), [ClassEntry("a", "train", 3), ClassEntry("b", "train", 3)], "none", "test")
    write_store(tmp_path / "rgb", index, (np.full((16, 16, 3), value, np.uint8) for value in [128] * 3 + [64] * 3))
    unit, imagenet = (
        gs.load_dataset(tmp_path / "rgb", pixels=kind).sample("train", Shape(2, 1, 2), 1, (0,))
        for kind in ("unit", "imagenet")
    )
    mean, deviation = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    expected = (unit.query_x - mean.view(3, 1, 1)) / deviation.view(3, 1, 1)
    torch.testing.assert_close(imagenet.query_x, expected)
    with pytest.raises(gs.UserError, match="imagenet scaling needs 3 channels; blobs has 1"):
        gs.load_dataset(blobs, pixels="imagenet")


ONE = Index("one", (2, 2, 1), [ClassEntry("a", "train", 1)], "none", "test")


def test_an_interrupted_build_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), building(tmp_path / "half", ONE) as store:
        store.put(0, np.zeros((2, 2, 1), np.uint8))
        raise KeyboardInterrupt
    with pytest.raises(gs.UserError, match="1 of 1 images of one were not there"), building(tmp_path / "half", ONE):
        pass
    assert list(tmp_path.iterdir()) == []


def test_two_builds_at_once_end_in_one_store(tmp_path: Path) -> None:
    with building(tmp_path / "s", ONE) as outer:
        outer.put(0, np.zeros((2, 2, 1), np.uint8))
        write_store(tmp_path / "s", ONE, [np.zeros((2, 2, 1), np.uint8)])
    assert [path.name for path in tmp_path.iterdir()] == ["s"]
    assert gs.load_dataset(tmp_path / "s").index.classes[0].images == 1


def test_what_a_killed_build_left_is_cleared_away(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys; from pathlib import Path; from gradshare.data.store import *\n"
        "index = Index('one', (2, 2, 1), [ClassEntry('a', 'train', 1)], 'none', 'test')\n"
        "with building(Path(sys.argv[1]), index): os.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "s")], check=False)
    assert len(list(tmp_path.iterdir())) == 1 and not (tmp_path / "s").exists()
    write_store(tmp_path / "s", ONE, [np.zeros((2, 2, 1), np.uint8)])
    assert [path.name for path in tmp_path.iterdir()] == ["s"]


def test_verify_finds_one_flipped_bit(tmp_path: Path) -> None:
    store = write_blobs(tmp_path / "blobs", {"train": 2}, images=3)
    assert verify(store).sha256 == gs.load_dataset(store).index.images_sha256
    content = bytearray((store / "images.npy").read_bytes())
    content[-7] ^= 1
    (store / "images.npy").write_bytes(content)
    with pytest.raises(gs.UserError, match="does not match the checksum in its index"):
        verify(store)


@pytest.mark.parametrize(
    ("classes", "message"),
    [
        ([("a", "train", 1), ("a", "test", 1)], "class 'a' of x is there twice: in the train and in the test split"),
        ([("a", "training", 1)], "class 'a' of x is in 'training'"),
        ([("a", "train", 0)], "class 'a' of x has no images"),
    ],
)
def test_impossible_classes_are_refused(tmp_path: Path, classes: list[tuple[str, str, int]], message: str) -> None:
    index = Index("x", (2, 2, 1), [ClassEntry(*entry) for entry in classes], "none", "test")
    with pytest.raises(gs.UserError, match=message), building(tmp_path / "x", index):
        pass
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda s: (s / "index.json").unlink(), "has no index.json"),
        (lambda s: (s / "images.npy").unlink(), "has no images.npy"),
        (lambda s: (s / "index.json").write_text("{"), "is damaged"),
        (lambda s: (s / "index.json").write_text("[]"), "is damaged"),
        (lambda s: (s / "index.json").write_text('{"version": 99}'), "another version"),
        (lambda s: (s / "images.npy").write_bytes((s / "images.npy").read_bytes()[:-9]), "damaged|holds"),
        (lambda s: (s / "images.npy").write_bytes(b""), "is damaged"),
        (lambda s: np.save(s / "images.npy", np.zeros((3, 16, 16, 1), np.uint8)), "but its index says"),
    ],
)  # fmt: skip
def test_a_damaged_store_is_refused_with_what_is_wrong(tmp_path: Path, damage, message: str) -> None:  # type: ignore[no-untyped-def]
    store = write_blobs(tmp_path / "blobs", {"train": 2}, images=3)
    damage(store)
    with pytest.raises(gs.UserError, match=message):
        gs.load_dataset(store)


def test_glyphs_are_built_once_and_cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADSHARE_DATA", str(tmp_path))
    steps: list[tuple[int, int]] = []
    glyphs = gs.load_dataset("glyphs", progress=lambda done, total: steps.append((done, total)))
    assert steps[-1][0] == steps[-1][1] == len(glyphs.index.classes) >= 1000
    built = (tmp_path / "glyphs" / "images.npy").stat().st_mtime_ns
    again = gs.load_dataset("glyphs", progress=lambda done, total: pytest.fail("built again"))
    assert (tmp_path / "glyphs" / "images.npy").stat().st_mtime_ns == built
    assert again.image == (1, 28, 28)
    splits = {split: {c.name for c in glyphs.index.classes if c.split == split} for split in ("train", "val", "test")}
    assert (
        not splits["train"] & splits["val"]
        and not splits["train"] & splits["test"]
        and not splits["val"] & splits["test"]
    )
    assert json.loads((tmp_path / "glyphs" / "index.json").read_text())["version"] == 1
