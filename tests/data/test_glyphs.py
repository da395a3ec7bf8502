"""The glyphs data set: enough classes, apart from each other in name and in look, the same on every run."""

from __future__ import annotations

from itertools import islice

import numpy as np
import pytest
from numpy.typing import NDArray

from gradshare.data import glyphs

EVERY_37TH = slice(None, None, 37)  # enough classes to meet every split and most scripts


@pytest.fixture(scope="module")
def classes() -> list[glyphs.GlyphClass]:
    return list(glyphs.render())


@pytest.fixture(scope="module")
def images(classes: list[glyphs.GlyphClass]) -> NDArray[np.uint8]:  # [classes, 20, 28, 28]
    return np.stack([one.images for one in classes])[..., 0]


@pytest.fixture(scope="module")
def codepoints() -> list[int]:
    return [codepoint for split in glyphs.chosen().values() for codepoint in split]


def test_counts_and_shapes(classes: list[glyphs.GlyphClass]) -> None:
    assert len(classes) == glyphs.count() >= 1000
    names = glyphs.class_names()
    assert len(names["train"]) >= 600
    assert len(names["val"]) >= 150
    assert len(names["test"]) >= 200
    for one in classes:
        assert one.images.shape == (glyphs.IMAGES_PER_CLASS, *glyphs.IMAGE_SHAPE)
        assert one.images.dtype == np.uint8


def test_order_is_train_val_test_and_that_of_class_names(classes: list[glyphs.GlyphClass]) -> None:
    named = [(split, name) for split, names in glyphs.class_names().items() for name in names]
    assert [(one.split, one.name) for one in classes] == named
    assert list(dict.fromkeys(one.split for one in classes)) == ["train", "val", "test"]


def test_no_name_is_there_twice(classes: list[glyphs.GlyphClass]) -> None:
    assert len({one.name for one in classes}) == len(classes)


def test_no_two_classes_look_alike_in_any_splits(codepoints: list[int]) -> None:
    looks = np.stack([glyphs.looks(codepoint) for codepoint in codepoints])  # [classes, variants, pixels]
    for index in range(1, len(looks)):
        likeness = np.max(looks[index] @ looks[:index, 0].T)
        assert likeness < glyphs.MAX_LIKENESS + 1e-5, glyphs.class_name(codepoints[index])


def test_no_two_classes_have_nearly_the_same_mean_image(images: NDArray[np.uint8]) -> None:
    means = images.mean(axis=1).reshape(len(images), -1)
    likeness = np.corrcoef(means)
    np.fill_diagonal(likeness, 0)
    assert likeness.max() < 0.97


@pytest.mark.parametrize("lookalikes", ["A\u0391\u0410", "cC\u0441", "oO0\u03bf\u041e", "H\u0397\u041d", "<\u1438"])
def test_of_lookalikes_at_most_one_is_there(lookalikes: str, codepoints: list[int]) -> None:
    assert len(set(map(ord, lookalikes)) & set(codepoints)) <= 1


@pytest.mark.parametrize("unfit", [" ", "\n", "\u0301", "\u200b", ".", "é", "ﬁ", "²", "\u4e2d"])
def test_blanks_marks_dots_composed_and_undrawn_characters_are_unfit(unfit: str) -> None:
    assert not glyphs.is_drawable(ord(unfit))


def test_rendering_again_is_bit_equal(classes: list[glyphs.GlyphClass]) -> None:
    for cached in (glyphs.faces, glyphs.masks):
        cached.cache_clear()
    for again, before in zip(islice(glyphs.render(), 5), classes, strict=False):
        assert again.name == before.name
        np.testing.assert_array_equal(again.images, before.images)


def test_a_class_does_not_depend_on_those_drawn_before(classes: list[glyphs.GlyphClass], codepoints: list[int]) -> None:
    for codepoint, one in reversed(list(zip(codepoints, classes, strict=True))[EVERY_37TH]):
        np.testing.assert_array_equal(glyphs.draw_class(codepoint), one.images)


def test_ink_is_inside_the_frame_and_in_its_middle(images: NDArray[np.uint8]) -> None:
    border = np.ones(images.shape[2:], bool)
    border[1:-1, 1:-1] = False
    assert (images[..., border] > 0).mean() < 0.001
    rows, columns = images.max(axis=3) > 0, images.max(axis=2) > 0
    for ink in (rows, columns):
        first, last = ink.argmax(axis=2), ink.shape[2] - 1 - ink[..., ::-1].argmax(axis=2)
        off_centre = np.abs((first + last) / 2 - (ink.shape[2] - 1) / 2)
        assert off_centre.max() <= glyphs.MAX_SHIFT + 2  # a glyph turned about its middle may reach further on one side


def test_no_image_is_blank(images: NDArray[np.uint8]) -> None:
    assert images.max(axis=(2, 3)).min() > 100
    assert images.sum(axis=(2, 3), dtype=np.int64).min() > 10 * 255


def test_images_of_a_class_differ(classes: list[glyphs.GlyphClass]) -> None:
    for one in classes:
        assert len({image.tobytes() for image in one.images}) == glyphs.IMAGES_PER_CLASS, one.name


def test_every_class_is_drawn_in_every_face_that_has_it(codepoints: list[int]) -> None:
    for codepoint in codepoints[EVERY_37TH]:
        having = [face for face in glyphs.faces() if codepoint in face.codepoints]
        assert glyphs.MIN_FACES <= len(glyphs.masks(codepoint)) <= len(having) <= glyphs.IMAGES_PER_CLASS
