"""MiniImagenet as arrays: the cache pickles, and the HDF5 files that Torchmeta makes of them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from importlib import import_module
from typing import IO, Any, cast

import numpy as np
from numpy.typing import NDArray

from gradshare.data.pickles import load_pickle
from gradshare.data.planning import Block
from gradshare.data.sources import Source
from gradshare.data.store import Image
from gradshare.errors import UserError

IMAGE = (84, 84, 3)
MAX_IMAGES = 100_000  # in a class; the real ones have 600
MAX_CHUNK = 64 * 2**20  # bytes of an HDF5 file that are unpacked at once
LARGE = 2**20  # bytes of a pickle that stay in the file until they are wanted


def pickled(source: Source, member: str) -> dict[str, Block]:
    """The classes of `mini-imagenet-cache-{split}.pkl`: `image_data`, uint8 [n, 84, 84, 3], and `class_dict`."""
    stream = source.open_stream(member)
    content, start = _load(stream, member)
    images = _image_data(content, member)
    classes = _class_dict(content, len(images), member)
    if start is None:
        return {name: Block(len(rows), partial(images.__getitem__, rows)) for name, rows in classes.items()}
    return {name: Block(len(rows), partial(_read_rows, stream, start, rows)) for name, rows in classes.items()}


def _load(stream: IO[bytes], member: str) -> tuple[Any, int | None]:
    """What the pickle holds, and where in the file its images are, if they were left there."""
    skimmed = _Skimmed(stream)
    with suppress(UserError):  # only protocols 3 and 4, as published, write images so that they can be left out
        content = load_pickle(cast(IO[bytes], skimmed), member)
        images = _image_data(content, member)
        start = skimmed.left_out.get(id(images.base))
        if not skimmed.left_out or (start is not None and len(skimmed.left_out) == 1 and images.flags.c_contiguous):
            return content, start
    stream.seek(0)
    return load_pickle(stream, member), None


class _Skimmed:
    """A stream of a pickle that leaves long byte strings in the file, so that 800 MB of images need no memory.

    In place of such a string it gives zeros, which take no memory until they are touched, and notes where it was.
    """

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self.left_out: dict[int, int] = {}  # id of the zeros -> place in the file
        self._zeros: list[bytes] = []

    def read(self, count: int = -1) -> bytes:
        if count < LARGE:
            return self._stream.read(count)
        start = self._stream.tell()
        zeros = bytes(self._stream.seek(count, 1) - start)
        self._zeros.append(zeros)
        self.left_out[id(zeros)] = start
        return zeros

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _image_data(content: Any, member: str) -> NDArray[np.uint8]:
    images = content.get("image_data") if isinstance(content, dict) else None
    if not isinstance(images, np.ndarray) or images.dtype != np.uint8 or images.shape[1:] != IMAGE:
        raise UserError(f"{member} does not hold image_data, uint8 [images, 84, 84, 3]")
    return images


def _class_dict(content: dict[str, Any], images: int, member: str) -> dict[str, list[int]]:
    classes = content.get("class_dict")
    if not isinstance(classes, Mapping) or not all(isinstance(name, str) for name in classes):
        raise UserError(f"{member} does not hold class_dict, the rows of each class")
    rows = {name: np.asarray(each) for name, each in classes.items()}
    for name, each in rows.items():
        if each.ndim != 1 or each.dtype.kind not in "iu" or (len(each) and not 0 <= each.min() <= each.max() < images):
            raise UserError(f"class '{name}' of {member} has rows that are not among its {images} images")
    used = np.concatenate([np.zeros(0, int), *rows.values()])
    if len(np.unique(used)) < len(used):
        raise UserError(f"{member} gives the same images to two classes, or twice to one")
    return {name: each.tolist() for name, each in rows.items()}


def _read_rows(stream: IO[bytes], start: int, rows: Sequence[int]) -> Image:
    images = np.empty((len(rows), *IMAGE), np.uint8)
    for image, row in zip(images, rows, strict=True):
        stream.seek(start + row * image.size)
        image.reshape(-1)[:] = np.frombuffer(stream.read(image.size), np.uint8)
    return images


def hdf5(source: Source, member: str) -> dict[str, Block]:
    """The classes of `{split}_data.hdf5`: a data set `datasets/<wnid>` for each, uint8 [600, 84, 84, 3]."""
    h5py = _h5py()
    stream = source.open_stream(member)
    try:
        group = h5py.File(stream, "r")["datasets"]
        return {str(name): _hdf5_block(group, name, member) for name in group}
    except UserError:
        raise
    except Exception as error:  # whatever the library makes of a damaged file
        raise UserError(f"{member} in {source.name} is not an HDF5 file of MiniImagenet: {error}") from None


def _h5py() -> Any:
    try:
        return import_module("h5py")
    except ImportError:
        raise UserError("reading HDF5 files needs h5py: pip install gradshare[hdf5]") from None


def _hdf5_block(group: Any, name: str, member: str) -> Block:
    h5py = _h5py()
    data = group.get(name) if type(group.get(name, getlink=True)) is h5py.HardLink else None
    # Links, external storage and virtual data sets lead to other files, which an archive has no business to name.
    if not isinstance(data, h5py.Dataset) or data.external or data.is_virtual:
        raise UserError(f"'{name}' in {member} is not a data set of its own")
    if data.dtype != np.uint8 or data.shape[1:] != IMAGE or data.shape[0] > MAX_IMAGES:
        raise UserError(f"class '{name}' in {member} is {data.shape} {data.dtype}, not [images, 84, 84, 3] uint8")
    if data.chunks and math.prod(data.chunks) > MAX_CHUNK:
        raise UserError(f"class '{name}' in {member} is stored in chunks of {math.prod(data.chunks):,} bytes")
    return Block(data.shape[0], partial(_hdf5_images, data, name, member))


def _hdf5_images(data: Any, name: str, member: str) -> Image:
    try:
        return data[()]
    except Exception as error:  # whatever the library makes of a damaged file
        raise UserError(f"class '{name}' in {member} cannot be read: {error}") from None
