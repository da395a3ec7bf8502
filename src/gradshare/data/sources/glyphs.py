"""Glyphs: a few-shot data set like Omniglot, drawn from the fonts in matplotlib, so it needs no download.

A class is a character. Its images differ by font face and by a small random affine map. The splits hold different
scripts. Characters are chosen one by one, so that no two of them look alike, in whichever splits they are.
"""

from __future__ import annotations

import unicodedata
from functools import cache, lru_cache
from itertools import product
from pathlib import Path
from typing import NamedTuple

import matplotlib
import numpy as np
from matplotlib.ft2font import FT2Font
from numpy.typing import NDArray
from PIL import Image, ImageFilter, ImageFont

from gradshare.data.sources import Options
from gradshare.data.sources.importing import Archives, Found
from gradshare.data.store import ClassEntry

IMAGES_PER_CLASS = 20
IMAGE_SHAPE = (28, 28, 1)
SEED = 20240

# Where two scripts share a shape (A, Alpha, A) the earlier one keeps it: val and test hold what is new to training.
SCRIPTS: dict[str, dict[str, tuple[range, ...]]] = {
    "train": {
        # Basic to Extended-B with the phonetic alphabet; Phonetic Extensions; Extended-C; Extended-D.
        "Latin": (range(0x21, 0x2B0), range(0x1D00, 0x1DC0), range(0x2C60, 0x2C80), range(0xA720, 0xA800)),
        "Cyrillic": (range(0x400, 0x530), range(0xA640, 0xA6A0)),
        "currency signs": (range(0x20A0, 0x20D0),),
        "arrows": (range(0x2190, 0x2200),),
        "mathematical operators": (range(0x2200, 0x2300),),
        "technical symbols": (range(0x2300, 0x2400),),
        "miscellaneous symbols": (range(0x2600, 0x2700),),
    },
    "val": {
        "Greek and Coptic": (range(0x370, 0x400), range(0x2C80, 0x2D00)),
        "Armenian": (range(0x530, 0x590),),
        "Hebrew": (range(0x590, 0x600),),
        "Lao": (range(0xE80, 0xF00),),
        "Georgian": (range(0x10A0, 0x1100), range(0x2D00, 0x2D30)),
    },
    "test": {
        "Arabic": (range(0x600, 0x700), range(0x750, 0x780)),
        "N'Ko": (range(0x7C0, 0x800),),
        "Canadian syllabics": (range(0x1400, 0x1680),),
        "Tifinagh": (range(0x2D30, 0x2D80),),
        "Old Italic": (range(0x10300, 0x10330),),
    },
}

# A fixed list, plainest first: matplotlib's other fonts are not encoded by Unicode (cm*, STIXNonUni), draw a labelled
# box for every character there is (LastResort), or hold little but large brackets (STIXSiz*, *Display).
FACES = (
    *("DejaVuSans", "DejaVuSerif", "STIXGeneral", "DejaVuSansMono"),
    *("DejaVuSans-Bold", "DejaVuSerif-Bold", "STIXGeneralBol", "DejaVuSansMono-Bold"),
    *("DejaVuSans-Oblique", "DejaVuSerif-Italic", "STIXGeneralItalic", "DejaVuSansMono-Oblique"),
    *("DejaVuSans-BoldOblique", "DejaVuSerif-BoldItalic", "STIXGeneralBolIta", "DejaVuSansMono-BoldOblique"),
)
MIN_FACES = 2  # with one face, the images of a class would differ only by the affine map
DRAWN_PIXELS_PER_EM = 96
MIN_INK = 0.02  # of an em square: below are dots and ticks, which the size normalisation would turn into blobs
MAX_LIKENESS = 0.91  # correlation of two looks; two faces of one character have 0.93 in the median

# These five belong together: the longer side at its largest, rotated, sheared and shifted, just reaches the frame.
GLYPH_SIDE = 19.0
SCALE = (0.8, 1.05)
MAX_ROTATION = np.deg2rad(10.0)
MAX_SHEAR = 0.1
MAX_SHIFT = 1.5
OVERSAMPLING = 2  # drawn twice as large, then averaged: a bilinear map straight to 28 pixels breaks thin strokes

FloatArray = NDArray[np.float64]


class Face(NamedTuple):
    """A font at one size, and the codepoints that it has."""

    font: ImageFont.FreeTypeFont
    codepoints: frozenset[int]


def find(archives: Archives, options: Options) -> Found:
    """All classes, in the order of `chosen`; there are no archives and no options."""
    classes = [(split, codepoint) for split, codepoints in chosen().items() for codepoint in codepoints]
    entries = tuple(ClassEntry(class_name(codepoint), split, IMAGES_PER_CLASS) for split, codepoint in classes)
    rows = (row for row in enumerate(image for _, codepoint in classes for image in draw_class(codepoint)))
    return Found(entries, rows, IMAGE_SHAPE, "rendered", "fonts shipped with matplotlib")


def class_name(codepoint: int) -> str:
    return f"U+{codepoint:04X} {unicodedata.name(chr(codepoint))}"


@cache
def chosen() -> dict[str, list[int]]:
    """Choose the codepoints of each split: drawable, and unlike every one chosen before, in any split."""
    taken: dict[str, list[int]] = {split: [] for split in SCRIPTS}
    taken_looks = np.zeros((0, IMAGE_SHAPE[0] // 2 * (IMAGE_SHAPE[1] // 2)), np.float32)
    for split, scripts in SCRIPTS.items():
        for codepoint in (codepoint for blocks in scripts.values() for block in blocks for codepoint in block):
            if not is_drawable(codepoint):
                continue
            candidate = looks(codepoint)
            if np.max(candidate @ taken_looks.T, initial=-1.0) < MAX_LIKENESS:
                taken[split].append(codepoint)
                taken_looks = np.vstack([taken_looks, candidate[0]])
    return taken


def is_drawable(codepoint: int) -> bool:
    """Whether a character is not made of others, and has enough faces and enough ink."""
    character = chr(codepoint)
    # Letters, numbers, punctuation, symbols: no marks, separators or controls; Sk are accents that stand alone.
    if unicodedata.category(character)[0] not in "LNPS" or unicodedata.category(character) == "Sk":
        return False
    # An accented letter, a ligature or a superscript is a variant of other characters.
    if unicodedata.normalize("NFKD", character) != character:
        return False
    inks = [float(np.asarray(mask, np.float64).sum()) / 255 for mask in masks(codepoint)]
    return len(inks) >= MIN_FACES and min(inks) >= MIN_INK * DRAWN_PIXELS_PER_EM**2


def looks(codepoint: int) -> NDArray[np.float32]:  # [45, 14 * 14], each row of norm one
    """Draw the character in its plainest face: as it is in the first row, then a little stretched and shifted.

    The images of a class are stretched and shifted too, so two characters that a stretch makes equal must not be two
    classes. Blurred and halved, strokes that are a pixel apart still count as alike.
    """
    rows = []
    for stretch in ((1.0, 1.0), (0.8, 1.0), (1.0, 0.8), (1.25, 1.0), (1.0, 1.25)):
        image = draw(masks(codepoint)[0], np.diag(stretch), np.zeros(2)).filter(ImageFilter.GaussianBlur(1)).reduce(2)
        look = np.array(image, np.float32)
        look -= look.mean()
        look /= np.linalg.norm(look)
        rows += [np.roll(look, shift, axis=(0, 1)).ravel() for shift in product((0, -1, 1), repeat=2)]
    return np.stack(rows)


def draw_class(codepoint: int) -> NDArray[np.uint8]:  # [20, 28, 28, 1]
    """Draw the images of a class, in its faces in turn. The random numbers depend only on the codepoint."""
    rng = np.random.default_rng([SEED, codepoint])
    in_faces = masks(codepoint)
    order = rng.permutation(len(in_faces))
    images = [
        draw(in_faces[order[index % len(order)]], random_linear_map(rng), rng.uniform(-MAX_SHIFT, MAX_SHIFT, 2))
        for index in range(IMAGES_PER_CLASS)
    ]
    return np.stack([np.asarray(image) for image in images])[..., None]


def random_linear_map(rng: np.random.Generator) -> FloatArray:  # [2, 2]
    """A scale on each axis, then a shear, then a rotation."""
    angle, shear = rng.uniform(-MAX_ROTATION, MAX_ROTATION), rng.uniform(-MAX_SHEAR, MAX_SHEAR)
    rotation = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
    linear: FloatArray = rotation @ np.array([[1.0, shear], [0.0, 1.0]]) @ np.diag(rng.uniform(*SCALE, 2))
    return linear


def draw(mask: Image.Image, linear: FloatArray, shift: FloatArray) -> Image.Image:
    """Map a cropped glyph, scaled to the standard size and centred, into a frame."""
    frame = OVERSAMPLING * np.array(IMAGE_SHAPE[:2])
    # Pillow needs the inverse map, from a pixel of the frame to one of the mask.
    back = np.linalg.inv(linear) * max(mask.size) / (GLYPH_SIDE * OVERSAMPLING)
    start = np.array(mask.size) / 2 - back @ (frame / 2 + OVERSAMPLING * shift)
    coefficients = (back[0, 0], back[0, 1], start[0], back[1, 0], back[1, 1], start[1])
    size = (int(frame[1]), int(frame[0]))
    return mask.transform(size, Image.Transform.AFFINE, coefficients, Image.Resampling.BILINEAR).reduce(OVERSAMPLING)


@lru_cache(maxsize=1)  # a character is used several times in a row; all of them would take 100 MB
def masks(codepoint: int) -> list[Image.Image]:
    """The character in every face that has it, each cropped to its ink."""
    drawn = [face.font.getmask(chr(codepoint)) for face in faces() if codepoint in face.codepoints]
    images = [Image.frombytes("L", mask.size, bytes(mask)) for mask in drawn if mask.getbbox()]
    return [image.crop(image.getbbox()) for image in images]


@cache
def faces() -> list[Face]:
    """Open the fonts, with their character maps: Pillow draws a box for a character that a font does not have."""
    folder = Path(matplotlib.get_data_path(), "fonts", "ttf")
    # Basic layout: the other engine is not in every build of Pillow, and shapes Arabic differently.
    return [
        Face(
            ImageFont.truetype(str(path), DRAWN_PIXELS_PER_EM, layout_engine=ImageFont.Layout.BASIC),
            frozenset(FT2Font(str(path)).get_charmap()),
        )
        for path in (folder / f"{name}.ttf" for name in FACES)
    ]
