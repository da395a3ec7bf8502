"""Omniglot: `images_background.zip` and `images_evaluation.zip` as published, or an `npz` of the same drawings.

The npz holds `images`, bits packed along the last axis, `[characters, drawings, bytes]`, 1 for paper; `names`,
`<Alphabet>/<characterNN>`; and `shape`, height and width. Both give the same store: 28 x 28 by default, ink 255 on 0.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray
from PIL import Image as Pillow

from gradshare.data.archive import Archive
from gradshare.data.sources import Options
from gradshare.data.sources.importing import (
    IMAGES,
    Archives,
    Block,
    ByClass,
    Found,
    by_standard,
    from_arrays,
    from_files,
    names_of,
)
from gradshare.data.sources.pixels import decode
from gradshare.data.store import Image
from gradshare.errors import UserError
from gradshare.files import reading

SIZE, DRAWN = 28, 105  # pixels a side: in the store by default, and as published
ARRAYS = ("images", "names", "shape")
NOTE = "split of Vinyals et al. 1028/172/423"


def find(archives: Archives, options: Options) -> Found:
    """Find the 1623 characters, with the split of Vinyals et al., 1028, 172 and 423."""
    size = options.size or SIZE
    if {f"{name}.npy" for name in ARRAYS} <= {member.name for member in archives[0].members()}:
        blocks = by_standard(_blocks(archives[0], size), "omniglot", archives)
        return from_arrays(blocks, (size, size, 1), "resize", NOTE)
    found = by_standard(_characters(archives), "omniglot", archives)
    return from_files(archives, found, partial(_drawing, size=size), (size, size, 1), "resize", NOTE)


def _characters(archives: Archives) -> ByClass:
    """The images `.../<Alphabet>/<characterNN>/*`."""
    found: ByClass = {}
    for number, archive in enumerate(archives):
        for name in (member.name for member in archive.members() if member.name.lower().endswith(IMAGES)):
            found.setdefault(("", "/".join(name.split("/")[-3:-1])), []).append((number, name))
    if not found:
        raise UserError(f"there are no images in {names_of(archives)}")
    return found


def _drawing(content: bytes, name: str, size: int) -> Image:  # [size, size, 1]
    return _scaled(255 - decode(content, name, "resize", DRAWN, 1)[:, :, 0], size)


def _scaled(ink: NDArray[np.uint8], size: int) -> Image:  # [105, 105] -> [size, size, 1]
    return np.asarray(Pillow.fromarray(ink).resize((size, size), Pillow.Resampling.BOX))[:, :, None]


def _blocks(archive: Archive, size: int) -> dict[tuple[str, str], Block]:
    images, names, shape = (_array(archive, f"{name}.npy") for name in ARRAYS)
    sides = shape.tolist() if shape.shape == (2,) and shape.dtype.kind in "iu" else [0, 0]
    expected = (len(names), -(-sides[0] * sides[1] // 8)) if names.ndim == 1 and names.dtype.kind == "U" else None
    if images.dtype != np.uint8 or images.ndim != 3 or images.shape[::2] != expected or min(sides) < 1:
        raise UserError(
            f"{archive.name} does not hold Omniglot: images {images.dtype} {images.shape}, names {names.dtype}"
            f" {names.shape}, shape {shape.tolist()}; expected uint8 [1623, 20, 1379], text [1623], [105, 105]"
        )
    blocks = {
        ("", str(name)): Block(images.shape[1], partial(_unpack, packed, sides, size))
        for name, packed in zip(names, images, strict=True)
    }
    if len(blocks) < len(names):
        raise UserError(f"{archive.name} names {len(names) - len(blocks)} characters twice")
    return blocks


def _unpack(packed: NDArray[np.uint8], sides: list[int], size: int) -> Image:  # [n, bytes] -> [n, size, size, 1]
    paper = np.unpackbits(packed, axis=-1, count=math.prod(sides)).reshape(-1, *sides)
    return np.stack([_scaled(ink, size) for ink in (1 - paper) * np.uint8(255)])


def _array(archive: Archive, name: str) -> NDArray[Any]:
    with reading(f"{name} in {archive.name} is damaged"):
        return npy.read_array(archive.open_stream(name), allow_pickle=False)
