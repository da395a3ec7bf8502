"""The store: one format for every data set, a folder with `images.npy` and `index.json`.

Images are uint8 `[images, height, width, channels]`, class after class; the index names the classes in that order.
A store is built in a temporary folder beside its place and renamed, so an interrupted build leaves nothing half-made.
"""

from __future__ import annotations

import fcntl
import glob
import hashlib
import io
import json
import math
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gradshare.errors import UserError
from gradshare.files import parse_json, read_text
from gradshare.method import SPLITS

VERSION = 1
Image = NDArray[np.uint8]


class ClassEntry(NamedTuple):
    name: str
    split: str
    images: int


class Index(NamedTuple):
    """What `index.json` says."""

    name: str
    image: tuple[int, int, int]  # height, width, channels
    classes: list[ClassEntry]  # in the order of their images; every class has its images in one run
    transform: str  # what was done to the images
    source: str  # what they were made from
    sha256: str = ""  # checksum of that
    images_sha256: str = ""  # checksum of images.npy; filled in when the store is built

    @property
    def images(self) -> int:
        return sum(entry.images for entry in self.classes)


class Writer:
    """Writes the images of a store under construction, in any order."""

    def __init__(self, file: BinaryIO, index: Index) -> None:
        _write_header(file, (index.images, *index.image))
        self._file, self._index, self._start = file, index, file.tell()
        self._missing = np.ones(index.images, dtype=bool)

    def put(self, row: int, image: Image) -> None:
        """Write one image, [height, width, channels], at its row."""
        if image.shape != self._index.image or image.dtype != np.uint8:
            raise UserError(f"image {row} is {image.shape} {image.dtype}, not {self._index.image} uint8")
        self._file.seek(self._start + row * image.size)
        self._file.write(np.ascontiguousarray(image).data)
        self._missing[row] = False

    def finish(self) -> None:
        if self._missing.any():
            raise UserError(
                f"{self._missing.sum()} of {self._index.images} images of {self._index.name} were not there to be read"
            )
        _sync(self._file)


@contextmanager
def building(folder: Path, index: Index) -> Iterator[Writer]:
    """Build a store; it appears at `folder` when the block ends without an error, and not at all otherwise."""
    check_index(index)
    folder.parent.mkdir(parents=True, exist_ok=True)
    _clear_abandoned(folder)
    temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        with (temporary / "images.npy").open("w+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # held while this process lives: see _clear_abandoned
            writer = Writer(file, index)
            yield writer
            writer.finish()
            file.seek(0)
            checksum = hashlib.file_digest(file, "sha256").hexdigest()
            _write_index(temporary, index._replace(images_sha256=checksum))
            _move(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _write_index(folder: Path, index: Index) -> None:
    with (folder / "index.json").open("w", encoding="utf-8") as file:
        json.dump({"version": VERSION, **index._asdict()}, file, ensure_ascii=False, indent=1)
        _sync(file)


def _clear_abandoned(folder: Path) -> None:
    """Remove what builds of the same store left that were killed: nobody holds the lock on their images."""
    for path in folder.parent.glob(f".{glob.escape(folder.name)}-*/images.npy"):
        with suppress(OSError), path.open("rb") as file:  # BlockingIOError: a build at work
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path.parent, ignore_errors=True)


def write_store(folder: Path, index: Index, images: Iterable[Image]) -> None:
    """Build a store from its images in order."""
    with building(folder, index) as store:
        for row, image in enumerate(images):
            store.put(row, image)


def check_index(index: Index) -> None:
    """Refuse classes that stand in two splits or twice, unknown splits and empty classes."""
    if min(index.image) < 1:
        raise UserError(f"the images of {index.name} have the size {index.image}")
    splits: dict[str, str] = {}
    for entry in index.classes:
        if entry.name in splits:
            where = f"in the {splits[entry.name]} and in the {entry.split} split"
            raise UserError(f"class '{entry.name}' of {index.name} is there twice: {where}")
        if entry.split not in SPLITS:
            raise UserError(
                f"class '{entry.name}' of {index.name} is in '{entry.split}'; a split is train, val or test"
            )
        if entry.images < 1:
            raise UserError(f"class '{entry.name}' of {index.name} has no images")
        splits[entry.name] = entry.split


def _write_header(file: BinaryIO, shape: tuple[int, ...]) -> None:
    header = {"descr": "|u1", "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(file, header)


def _sync(file: Any) -> None:
    file.flush()
    os.fsync(file.fileno())


def _move(temporary: Path, folder: Path) -> None:
    try:
        temporary.rename(folder)
    except OSError:
        if not (folder / "index.json").is_file():
            raise
        # Another process finished the same store first; the builds are deterministic, so its result is ours.


def read_index(folder: Path) -> Index:
    """Read and check `index.json`."""
    path = folder / "index.json"
    try:
        content = parse_json(read_text(path))
        if content.pop("version") != VERSION:
            raise UserError(f"{path} is of another version of the format; import the data set again")
        classes = [ClassEntry(str(name), str(split), int(count)) for name, split, count in content.pop("classes")]
        height, width, channels = (int(size) for size in content.pop("image"))
        index = Index(image=(height, width, channels), classes=classes, **{k: str(v) for k, v in content.items()})
    except UserError:
        raise
    except FileNotFoundError:
        raise UserError(f"{folder} is not a data set: it has no index.json") from None
    except (KeyError, TypeError, AttributeError, ValueError, OverflowError, OSError) as error:
        raise UserError(f"{path} is damaged ({error}); import the data set again") from None
    check_index(index)
    return index


def read_images(folder: Path, index: Index) -> Image:
    """Map the images of a store into memory, after checking them against the index."""
    path, shape, header = folder / "images.npy", (index.images, *index.image), io.BytesIO()
    _write_header(header, shape)
    if path.exists() and not path.is_file():
        raise UserError(f"{path} is not a file")
    try:
        with path.open("rb") as file:  # numpy's own reader of headers fails in many ways on a damaged one
            same = file.read(header.tell()) == header.getvalue()
            size = file.seek(0, os.SEEK_END) - header.tell()
    except FileNotFoundError:
        raise UserError(f"{folder} is not a data set: it has no images.npy") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None
    if not same or size != math.prod(shape):
        raise UserError(f"{path} is damaged: it is not {shape} uint8, but its index says so; import the data set again")
    return np.memmap(path, np.uint8, "r", header.tell(), shape)
