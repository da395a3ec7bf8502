"""The glyphs data set: the same bits as ever, enough classes, and no two that look alike."""

from __future__ import annotations

import hashlib
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

import gradshare as gs
from gradshare.data.sources import glyphs
from tests.support.archives import digest

EVERY_37TH = slice(None, None, 37)  # enough classes to meet every split and most scripts


@pytest.fixture(scope="module")
def dataset() -> gs.Dataset:
    return gs.load_dataset("glyphs")  # built once for all tests of this process


@pytest.fixture(scope="module")
def images(dataset: gs.Dataset) -> NDArray[np.uint8]:  # [classes, 20, 28, 28]
    return np.asarray(dataset.images).reshape(-1, glyphs.IMAGES_PER_CLASS, 28, 28)


@pytest.fixture(scope="module")
def codepoints(dataset: gs.Dataset) -> list[int]:
    return [int(entry.name.split()[0][2:], 16) for entry in dataset.index.classes]


def test_images_classes_and_tasks_are_those_of_earlier_versions(dataset: gs.Dataset) -> None:
    """The checksums hold for the versions of matplotlib and Pillow in constraints.txt."""
    lines = [f"{entry.name} {entry.split} {entry.images}" for entry in dataset.index.classes]
    classes = hashlib.sha256("\n".join(lines).encode()).hexdigest()
    assert classes == "806a008160ec4f0e1b5b350d7ada409e9f89e486a6b76200d0aaf1e32c66354f"
    assert dataset.index.images_sha256 == "41f2e01a99bae3d70b51fe05b70fd19411a02baa4981f7354dba73570ed35e1d"
    draws = [("train", (0, 0, 1, 1)), ("val", (1, 1, 0, 0)), ("test", (2, 2, 0, 0))]
    expected = "d59ece1f7093784f2504010c09fb368617da8c5d78bfffe5525849cad6f51714"
    assert digest(dataset, gs.Shape(5, 1, 15), draws, 2) == expected
    assert (dataset.index.transform, dataset.index.source) == ("rendered", "fonts shipped with matplotlib")


def test_counts_and_names(dataset: gs.Dataset) -> None:
    counts = Counter(entry.split for entry in dataset.index.classes)
    assert counts["train"] >= 600 and counts["val"] >= 150 and counts["test"] >= 200
    assert len({entry.name for entry in dataset.index.classes}) == sum(counts.values())


def test_no_two_classes_look_alike(images: NDArray[np.uint8], codepoints: list[int]) -> None:
    likeness = np.corrcoef(images.mean(axis=1).reshape(len(images), -1))
    np.fill_diagonal(likeness, 0)
    assert likeness.max() < 0.97
    for lookalikes in ("A\u0391\u0410", "cC\u0441", "oO0\u03bf\u041e", "H\u0397\u041d", "<\u1438"):
        assert len(set(map(ord, lookalikes)) & set(codepoints)) <= 1


@pytest.mark.parametrize("unfit", [" ", "\n", "\u0301", "\u200b", ".", "é", "ﬁ", "²", "\u4e2d"])
def test_blanks_marks_dots_composed_and_missing_characters_are_left_out(unfit: str) -> None:
    assert not glyphs.is_drawable(ord(unfit))


def test_a_class_does_not_depend_on_those_drawn_before(images: NDArray[np.uint8], codepoints: list[int]) -> None:
    for codepoint, expected in reversed(list(zip(codepoints, images, strict=True))[EVERY_37TH]):
        np.testing.assert_array_equal(glyphs.draw_class(codepoint)[..., 0], expected)
        having = [face for face in glyphs.faces() if codepoint in face.codepoints]
        assert glyphs.MIN_FACES <= len(glyphs.masks(codepoint)) <= len(having) <= glyphs.IMAGES_PER_CLASS


def test_ink_is_inside_the_frame_and_in_its_middle(images: NDArray[np.uint8]) -> None:
    border = np.ones(images.shape[2:], bool)
    border[1:-1, 1:-1] = False
    assert (images[..., border] > 0).mean() < 0.001
    rows, columns = images.max(axis=3) > 0, images.max(axis=2) > 0
    for ink in (rows, columns):
        first, last = ink.argmax(axis=2), ink.shape[2] - 1 - ink[..., ::-1].argmax(axis=2)
        off_centre = np.abs((first + last) / 2 - (ink.shape[2] - 1) / 2)
        assert off_centre.max() <= glyphs.MAX_SHIFT + 2  # a rotated glyph may reach further on one side


def test_no_image_is_blank_and_images_of_a_class_differ(images: NDArray[np.uint8]) -> None:
    assert images.max(axis=(2, 3)).min() > 100
    assert images.sum(axis=(2, 3), dtype=np.int64).min() > 10 * 255
    assert all(len({image.tobytes() for image in one}) == glyphs.IMAGES_PER_CLASS for one in images)


def test_glyphs_are_built_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADSHARE_DATA", str(tmp_path))
    monkeypatch.setattr(glyphs, "chosen", lambda: {"train": [0x41, 0x42], "val": [0x43], "test": [0x44, 0x45]})
    steps: list[tuple[int, int]] = []
    built = gs.load_dataset("glyphs", progress=lambda *step: steps.append(step))
    assert steps == [(50, 100), (100, 100)] and [entry.split for entry in built.index.classes].count("test") == 2
    again = gs.load_dataset("glyphs", progress=lambda *_: pytest.fail("built again"))
    monkeypatch.setattr("gradshare.data.dataset.find_store", lambda _: None)  # as if built just after it was looked for
    assert gs.load_dataset("glyphs").index == built.index
    assert again.index == built.index and again.image == (1, 28, 28)
