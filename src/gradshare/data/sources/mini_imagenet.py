"""MiniImagenet, in any of the forms in which it is passed around; an archive may also hold only a part of it.

- `mini-imagenet-cache-{train,val,test}.pkl`, the published pickles;
- `{train,val,test}_data.hdf5`, as Torchmeta writes them (needs `pip install 'gradshare[hdf5]'`);
- `{train,val,test}.csv` by Ravi, and the images that they name;
- class folders `<split>/<wnid>/*` or `<wnid>/*`.
"""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from importlib import import_module
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from gradshare.data.archive import MAX_RATIO, MAX_SMALL, Archive
from gradshare.data.sources import Options
from gradshare.data.sources.importing import (
    IMAGES,
    Archives,
    Block,
    ByClass,
    Found,
    Place,
    by_standard,
    file_name,
    find_classes,
    from_arrays,
    from_photos,
    names_of,
)
from gradshare.data.sources.pickles import PickledArray, load_pickle
from gradshare.data.sources.pixels import resize
from gradshare.data.splits import some
from gradshare.data.store import Image
from gradshare.errors import UserError
from gradshare.files import reading

IMAGE = (84, 84, 3)
NOTE = "split of Ravi & Larochelle 64/16/20"
PICKLE = re.compile(r"mini-imagenet-cache-(train|val(?=idation|\.)|test)(?:(?<=val)idation)?\.pkl")
HDF5 = re.compile(r"(train|val|test)_data\.hdf5")
CSV = re.compile(r"(train|val|test)\.csv")
MAX_CHUNK = 64 << 20  # bytes of an HDF5 file that are unpacked at once


def find(archives: Archives, options: Options) -> Found:
    """Find the 100 classes, with the split of Ravi & Larochelle, 64, 16 and 20. Arrays are 84 x 84 as published."""
    size = options.size or IMAGE[0]
    forms: list[tuple[str, re.Pattern[str], Callable[[Archive, str], dict[str, Block]]]]
    forms = [("pickles", PICKLE, pickled), ("HDF5", HDF5, hdf5)]
    for form, pattern, read in forms:
        parts = _parts(archives, pattern).items()
        blocks = {(split, n): block for split, (a, m) in parts for n, block in read(archives[a], m).items()}
        if parts:
            standard = by_standard(blocks, "mini", archives)
            if size == IMAGE[0]:
                return from_arrays(standard, IMAGE, "none, 84 x 84 as published", f"{form}, {NOTE}")
            scaled = {key: Block(block.images, partial(_scaled, block, size)) for key, block in standard.items()}
            return from_arrays(scaled, (size, size, IMAGE[2]), "resize", f"{form}, {NOTE}")
    tables = _parts(archives, CSV)
    found = _by_tables(archives, tables) if tables else find_classes(archives, below="images")
    return from_photos(archives, by_standard(found, "mini", archives), options, NOTE)


def _scaled(block: Block, size: int) -> Iterator[Image]:
    return (resize(image, size) for image in block.load())


def _parts(archives: Archives, pattern: re.Pattern[str]) -> dict[str, Place]:
    """The file of each split."""
    parts: dict[str, Place] = {}
    for number, archive in enumerate(archives):
        for place in ((number, member.name) for member in archive.members()):
            match = pattern.fullmatch(file_name(place))
            if match and parts.setdefault(match[1], place) != place:
                raise UserError(f"there are two {match[0]}: '{parts[match[1]][1]}' and '{place[1]}'")
    return parts


# CSV files


def _by_tables(archives: Archives, tables: Mapping[str, Place]) -> ByClass:
    """The images that the CSV files name, by their labels."""
    images: dict[str, Place] = {}
    for number, archive in enumerate(archives):
        for place in ((number, member.name) for member in archive.members()):
            if place[1].lower().endswith(IMAGES) and images.setdefault(file_name(place), place) != place:
                raise UserError(f"there are two images {file_name(place)}: the CSV files do not tell them apart")
    found: ByClass = {}
    for split, (number, member) in tables.items():
        rows = _read_table(archives[number], member)
        missing = [file for file, _ in rows if file not in images]
        if missing:
            where = names_of(archives)
            raise UserError(f"{len(missing)} of the {len(rows)} images of {member} are not in {where}: {some(missing)}")
        for file, label in rows:
            found.setdefault((split, label), []).append(images[file])
    return found


def _read_table(archive: Archive, member: str) -> list[tuple[str, str]]:
    """The rows of a CSV file with the header `filename,label`."""
    ((_, content),) = archive.read([member])
    with reading(f"{member} in {archive.name} is not a CSV file"):
        rows = list(csv.reader(content.decode("utf-8-sig").splitlines(), strict=True))
    if not rows or rows[0] != ["filename", "label"] or any(len(row) != 2 for row in rows if row):
        raise UserError(f"{member} in {archive.name} is not a CSV file with the columns filename,label")
    return [(row[0], row[1]) for row in rows[1:] if row]


# Pickles


def pickled(archive: Archive, member: str) -> dict[str, Block]:
    """The classes of a pickle `{"image_data": uint8 [n, 84, 84, 3], "class_dict": {class: rows}}`."""
    stream = archive.open_stream(member)
    content, left_out = load_pickle(stream, member)
    images = _image_data(content, member)
    if left_out and ([length for _, length in left_out] != [images.nbytes] or not images.flags.c_contiguous):
        content, left_out = load_pickle(stream, member, leave_out=False)
        images = _image_data(content, member)
    load = partial(_read_rows, stream, left_out[0][0]) if left_out else images.__getitem__
    classes = _class_dict(content, len(images), member)
    return {name: Block(len(rows), partial(load, rows)) for name, rows in classes.items()}


def _image_data(content: Any, member: str) -> NDArray[np.uint8]:
    found = content.get("image_data") if isinstance(content, dict) else None
    with reading(f"{member} is not a pickle of MiniImagenet"):
        images: NDArray[Any] = found.array() if isinstance(found, PickledArray) else np.zeros(0)
    if images.dtype != np.uint8 or images.shape[1:] != IMAGE:
        raise UserError(f"{member} does not hold image_data, uint8 [images, 84, 84, 3]")
    return images


def _class_dict(content: dict[str, Any], images: int, member: str) -> dict[str, list[int]]:
    """The rows of each class. They are counted before they are read: a pickle can use one list many times."""
    classes = content.get("class_dict")
    if not isinstance(classes, dict) or not all(isinstance(name, str) for name in classes):
        raise UserError(f"{member} does not hold class_dict, the rows of each class")
    free = np.ones(images, dtype=bool)
    result: dict[str, list[int]] = {}
    for name, found in classes.items():
        with reading(f"{member} is not a pickle of MiniImagenet"):
            rows = found.array().tolist() if isinstance(found, PickledArray) else found
        if not isinstance(rows, list) or len(rows) > images or not all(type(row) is int for row in rows):
            raise UserError(f"class '{name}' of {member} is not a list of at most {images} rows")
        if rows and not 0 <= min(rows) <= max(rows) < images:
            raise UserError(f"class '{name}' of {member} has rows that are not among its {images} images")
        if not free[rows].all() or len(set(rows)) < len(rows):
            raise UserError(f"class '{name}' of {member} has an image twice, or one of another class")
        free[rows] = False
        result[name] = rows
    return result


def _read_rows(stream: IO[bytes], start: int, rows: Sequence[int]) -> Image:
    images = np.empty((len(rows), *IMAGE), np.uint8)
    for image, row in zip(images, rows, strict=True):
        stream.seek(start + row * image.size)
        image.reshape(-1)[:] = np.frombuffer(stream.read(image.size), np.uint8)
    return images


# HDF5


def hdf5(archive: Archive, member: str) -> dict[str, Block]:
    """The classes of an HDF5 file: a data set `datasets/<wnid>` for each, uint8 [600, 84, 84, 3]."""
    try:
        h5py = import_module("h5py")
    except ImportError:
        raise UserError("reading HDF5 files needs h5py: pip install 'gradshare[hdf5]'") from None
    stream = archive.open_stream(member)
    limit = max(MAX_SMALL, MAX_RATIO * stream.seek(0, 2))
    with reading(f"{member} is not an HDF5 file of MiniImagenet"):
        group = h5py.File(stream, "r")["datasets"]
        blocks = {str(name): _hdf5_block(h5py, group, name, member) for name in group}
    if sum(block.images for block in blocks.values()) * math.prod(IMAGE) > limit:
        raise UserError(f"{member} claims far more images than a file of its size can hold")
    return blocks


def _hdf5_block(h5py: Any, group: Any, name: str, member: str) -> Block:
    data = group.get(name) if type(group.get(name, getlink=True)) is h5py.HardLink else None
    if not isinstance(data, h5py.Dataset) or data.external or data.is_virtual:  # these read other files
        raise UserError(f"'{name}' in {member} is not a data set of its own")
    if data.dtype != np.uint8 or data.shape[1:] != IMAGE:
        raise UserError(f"class '{name}' in {member} is {data.shape} {data.dtype}, not [images, 84, 84, 3] uint8")
    if data.chunks and math.prod(data.chunks) > MAX_CHUNK:
        raise UserError(f"class '{name}' in {member} is stored in chunks of {math.prod(data.chunks):,} bytes")
    return Block(data.shape[0], partial(_hdf5_images, data, member))


def _hdf5_images(data: Any, member: str) -> Image:
    with reading(f"{member} is not an HDF5 file of MiniImagenet"):
        images: Image = data[()]
    return images
