"""Omniglot: `images_background.zip` and `images_evaluation.zip` as published, or an `npz` of the same drawings.

The npz holds `images`, bits packed along the last axis, `[characters, drawings, bytes]`, 1 for paper; `names`,
`<Alphabet>/<characterNN>`; and `shape`, height and width. Both give the same store: ink is 255 on 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray
from PIL import Image as Pillow

from gradshare.data.catalogue import Progress
from gradshare.data.folder import IMAGES, ByClass, by_standard
from gradshare.data.pixels import Transform, decode
from gradshare.data.planning import Block, Paths, import_blocks, import_planned, names_of, opened, plan_classes
from gradshare.data.sources import Source
from gradshare.data.store import Image, Index
from gradshare.errors import UserError

SIZE, DRAWN = 28, 105  # pixels a side: in the store, and as published
ARRAYS = ("images", "names", "shape")
MAX_ARRAY = 512 * 2**20  # bytes; the real one has 45 million


def import_omniglot(path: Paths, folder: Path, transform: Transform = "resize", progress: Progress = None) -> Index:
    """Import the 1623 characters of Omniglot, with the split of Vinyals et al., 1028, 172 and 423.

    Args:
        path: the folder that holds the two zips, or both paths, or what they hold; or the npz.
        folder: where the store will be.
        transform: `"resize"`; the drawings are shrunk to 28 x 28 by averaging areas.
        progress: called with (images done, images in all).
    """
    if transform != "resize":
        raise UserError(f"Omniglot is imported with the transform 'resize', not '{transform}'")
    with opened(path) as sources:
        settings: dict[str, Any] = dict(image=(SIZE, SIZE, 1), transform="resize", progress=progress)
        settings["note"] = "split of Vinyals et al. 1028/172/423"
        if {f"{name}.npy" for name in ARRAYS} <= {member.name for member in sources[0].members()}:
            blocks = by_standard(_blocks(sources[0]), "omniglot", "Omniglot", names_of(sources))
            return import_blocks(sources, blocks, folder, **settings)
        by_class = by_standard(_characters(sources), "omniglot", "Omniglot", names_of(sources))
        return import_planned(sources, plan_classes(by_class), folder, _drawing, **settings)


def _characters(sources: Sequence[Source]) -> ByClass:
    """The images `.../<Alphabet>/<characterNN>/*`."""
    found: ByClass = {}
    for number, source in enumerate(sources):
        for name in (member.name for member in source.members() if member.name.lower().endswith(IMAGES)):
            found.setdefault(("", "/".join(name.split("/")[-3:-1])), []).append((number, name))
    if not found:
        raise UserError(f"there are no images in {names_of(sources)}")
    return found


def _drawing(content: bytes, name: str) -> Image:  # [28, 28, 1]
    return _shrink(255 - decode(content, name, "resize", DRAWN, 1)[:, :, 0])


def _shrink(ink: NDArray[np.uint8]) -> Image:  # [105, 105] -> [28, 28, 1]
    return np.asarray(Pillow.fromarray(ink).resize((SIZE, SIZE), Pillow.Resampling.BOX))[:, :, None]


def _blocks(source: Source) -> dict[tuple[str, str], Block]:
    images, names, shape = (_array(source, f"{name}.npy") for name in ARRAYS)
    sizes = [int(size) for size in shape.ravel()] if shape.dtype.kind in "iu" else []
    height, width = sizes if len(sizes) == 2 and all(0 < size <= 4096 for size in sizes) else (0, 0)
    expected = (len(names), -(-height * width // 8)) if names.ndim == 1 and names.dtype.kind == "U" else None
    if images.dtype != np.uint8 or images.ndim != 3 or (images.shape[0], images.shape[2]) != expected:
        raise UserError(
            f"{source.name} does not hold Omniglot: images {images.dtype} {images.shape}, names {names.dtype}"
            f" {names.shape}, shape {shape.dtype} {shape.shape}; expected uint8 [1623, 20, 1379], text [1623], [2]"
        )
    blocks = {
        ("", str(name)): Block(images.shape[1], partial(_unpack, packed, height, width))
        for name, packed in zip(names, images, strict=True)
    }
    if len(blocks) < len(names):
        raise UserError(f"{source.name} names {len(names) - len(blocks)} characters twice")
    return blocks


def _unpack(packed: NDArray[np.uint8], height: int, width: int) -> Image:  # [n, bytes] -> [n, 28, 28, 1]
    paper = np.unpackbits(packed, axis=-1, count=height * width).reshape(-1, height, width)
    return np.stack([_shrink(ink) for ink in (1 - paper) * np.uint8(255)])


def _array(source: Source, name: str) -> NDArray[Any]:
    """Read one array of an npz; its header may not claim more than the file holds, nor objects."""
    size = next(member.size for member in source.members() if member.name == name)
    stream = source.open_stream(name)
    try:
        readers = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}
        shape, _, dtype = readers[npy.read_magic(stream)](stream)
        if size > MAX_ARRAY or dtype.hasobject or math.prod(shape) * dtype.itemsize > size:
            raise ValueError(f"it claims {shape} {dtype} in {size:,} bytes")
        stream.seek(0)
        return npy.read_array(stream, allow_pickle=False)
    except (ValueError, KeyError, OSError, EOFError, MemoryError, OverflowError, SyntaxError, TypeError) as error:
        raise UserError(f"{name} in {source.name} is damaged: {error}") from None
