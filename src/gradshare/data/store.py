"""The store: a data set on disk, a folder with `images.npy` and `index.json`.

`images.npy` holds uint8 images, `[images, height, width, channels]`, class after class. `index.json` names the classes
in that order. A store is built in a temporary folder and then renamed, so nobody sees half of one.
"""

from __future__ import annotations

import glob
import hashlib
import io
import json
import math
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, astuple, dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gradshare.errors import UserError, path_of
from gradshare.files import add_checksum, read_json, reading, record, verify_checksum, write_synced
from gradshare.method import SPLITS

VERSION = 1
CHECKSUM = "index_sha256"  # in index.json: of all its other entries; older stores lack it
LOCK, NEW = "lock", "store"  # in the temporary folder of a build: its lock, and the store
Image = NDArray[np.uint8]
Progress = Callable[[int, int], None] | None  # images done, images in all


@dataclass(frozen=True)
class ClassEntry:
    """A class of a store."""

    name: str
    split: str  # train, val or test
    images: int


@dataclass(frozen=True)
class Index:
    """The content of `index.json`."""

    name: str
    image: tuple[int, int, int]  # height, width, channels
    classes: tuple[ClassEntry, ...]  # in the order of their images
    transform: str  # what was done to the images
    source: str  # what they were made from
    sha256: str = ""  # checksum of that
    images_sha256: str = ""  # checksum of images.npy; filled in when the store is built

    @property
    def images(self) -> int:
        return sum(entry.images for entry in self.classes)

    @property
    def bytes(self) -> int:
        """Size of the images."""
        return self.images * math.prod(self.image)


def data_folder() -> Path:
    """The folder of all stores: `GRADSHARE_DATA`, or the platform's cache folder."""
    chosen = os.environ.get("GRADSHARE_DATA")
    if chosen:
        return Path(chosen)
    from platformdirs import user_cache_path

    return user_cache_path("gradshare")


def is_store(folder: Path) -> bool:
    return (folder / "index.json").is_file()


def find_store(name: str | Path) -> Path | None:
    """The store at a path, or in the data folder under a name; None if there is none.

    A folder with an `index.json` of other software does not hide a data set.
    """
    found = [*filter(is_store, (path_of(name, "a data set"), data_folder() / str(name)))]
    return next((folder for folder in found if (folder / "images.npy").exists()), found[0] if found else None)


# Writing


class Writer:
    """Writes the images of a store that is being built, in any order."""

    def __init__(self, file: BinaryIO, index: Index) -> None:
        _write_header(file, index)
        self._file, self._index, self._start = file, index, file.tell()
        self._missing = np.ones(index.images, dtype=bool)

    def put(self, row: int, image: Image) -> None:
        """Write one image, [height, width, channels], at its row."""
        if image.shape != self._index.image or image.dtype != np.uint8:
            raise UserError(f"image {row} is {image.shape} {image.dtype}, not {self._index.image} uint8")
        self._file.seek(self._start + row * image.size)
        self._file.write(np.ascontiguousarray(image).data)
        self._missing[row] = False

    def finish(self) -> str:
        """Check that all images were written; returns the checksum of the file."""
        if self._missing.any():
            raise UserError(f"{self._missing.sum()} of {self._index.images} images of {self._index.name} are missing")
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.seek(0)
        return hashlib.file_digest(self._file, "sha256").hexdigest()  # type: ignore[arg-type]  # it is a file


@contextmanager
def building(folder: Path, index: Index, replacing: bool = False) -> Iterator[Writer]:
    """Build a store. It appears at `folder` when the block ends, and not at all if the block raises an error.

    Args:
        replacing: take the place of the store that may be there.
    """
    from filelock import FileLock

    check_index(index)
    folder.parent.mkdir(parents=True, exist_ok=True)
    _remove_abandoned(folder)
    temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        with FileLock(temporary / LOCK):
            (temporary / NEW).mkdir()
            with (temporary / NEW / "images.npy").open("w+b") as file:
                writer = Writer(file, index)
                yield writer
                checksum = writer.finish()
            _write_index(temporary / NEW, replace(index, images_sha256=checksum))
            _move(temporary / NEW, folder, replacing)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def write_store(folder: Path, index: Index, images: Iterable[Image]) -> None:
    """Build a store from its images, in the order of its classes."""
    with building(folder, index) as store:
        for row, image in enumerate(images):
            store.put(row, image)


def check_index(index: Index) -> None:
    """Check that each class has images and is in one split."""
    if len(index.image) != 3 or min(index.image) < 1:
        raise UserError(f"the images of {index.name} have the size {index.image}, not height, width and channels")
    splits: dict[str, str] = {}
    for entry in index.classes:
        if entry.name in splits:
            raise UserError(f"class '{entry.name}' of {index.name} is in {splits[entry.name]} and in {entry.split}")
        if entry.split not in SPLITS:
            raise UserError(f"class '{entry.name}' of {index.name} is in '{entry.split}', not in train, val or test")
        if entry.images < 1:
            raise UserError(f"class '{entry.name}' of {index.name} has no images")
        splits[entry.name] = entry.split


def _remove_abandoned(folder: Path) -> None:
    """Remove what earlier builds of the same store left when they were killed: nobody holds their lock."""
    from filelock import FileLock, Timeout

    for lock in folder.parent.glob(f".{glob.escape(folder.name)}-*/{LOCK}"):
        with suppress(Timeout, OSError), FileLock(lock, timeout=0):
            shutil.rmtree(lock.parent, ignore_errors=True)


def _write_header(file: BinaryIO, index: Index) -> None:
    header = {"descr": "|u1", "fortran_order": False, "shape": (index.images, *index.image)}
    np.lib.format.write_array_header_1_0(file, header)


def _write_index(folder: Path, index: Index) -> None:
    content = {"version": VERSION, **asdict(index), "classes": [astuple(entry) for entry in index.classes]}
    text = json.dumps(add_checksum(content, CHECKSUM), ensure_ascii=False, indent=1)
    write_synced(folder / "index.json", text.encode())


def _move(new: Path, folder: Path, replacing: bool) -> None:
    old = new.with_name("old")
    if replacing and folder.exists():
        folder.rename(old)
    try:
        new.rename(folder)
    except BaseException as error:
        if old.exists():
            old.rename(folder)
        elif isinstance(error, OSError) and is_store(folder):
            return  # another process built the same store first
        raise


# Reading


def read_index(folder: Path) -> Index:
    """Read and check `index.json`."""
    path = folder / "index.json"
    with reading(f"{path} cannot be read"):
        content = read_json(path)
    if isinstance(content, dict) and content.get("version") != VERSION:
        raise UserError(f"{path} has version {content.get('version')!r}, not {VERSION}; import the data set again")
    index = record(Index, _with_class_objects(content), str(path))
    check_index(index)
    try:
        if CHECKSUM in content:
            verify_checksum(content, CHECKSUM)
    except ValueError as error:
        raise UserError(f"{path} was changed after the import: {error}; import the data set again") from None
    return index


def _with_class_objects(content: Any) -> Any:
    """The file has a class as a row `[name, split, images]`."""
    if not isinstance(content, dict) or not isinstance(content.get("classes"), list):
        return content
    rows = [row if isinstance(row, list) else [] for row in content["classes"]]
    return {**content, "classes": [dict(zip(("name", "split", "images"), row, strict=False)) for row in rows]}


def read_images(folder: Path, index: Index) -> np.memmap[Any, np.dtype[np.uint8]]:
    """Map the images of a store into memory; their header and their size must be those of the index."""
    path, header = folder / "images.npy", io.BytesIO()
    _write_header(header, index)
    if path.exists() and not path.is_file():  # a pipe would wait for ever
        raise UserError(f"{path} is not a file")
    with reading(f"{path} cannot be read"), path.open("rb") as file:
        same = file.read(header.tell()) == header.getvalue()
        size = file.seek(0, os.SEEK_END) - header.tell()
    shape = (index.images, *index.image)
    if not same or size != index.bytes:
        raise UserError(f"{path} is damaged: it does not hold {shape} uint8, as its index says; import it again")
    return np.memmap(path, np.uint8, "r", header.tell(), shape)


class Verified(NamedTuple):
    """What `verify` found."""

    store: Index
    sha256: str  # of images.npy
    blank: dict[str, int]  # images that are zero everywhere, for each class that has such images


def verify(folder: Path, progress: Progress = None) -> Verified:
    """Read every byte of a store and compare it with its index."""
    index = read_index(folder)
    path, start = folder / "images.npy", read_images(folder, index).offset
    with path.open("rb") as file:  # read, not mapped: a failing disk then raises an error instead of a signal
        digest = hashlib.sha256(file.read(start))
        blank = dict(_blank_images(file, index, digest, progress))
    if index.images_sha256 not in ("", digest.hexdigest()):
        raise UserError(f"{path} does not match the checksum in its index; import the data set again")
    return Verified(index, digest.hexdigest(), blank)


def _blank_images(file: BinaryIO, index: Index, digest: Any, progress: Progress) -> Iterator[tuple[str, int]]:
    done = 0
    for entry in index.classes:
        content = file.read(entry.images * math.prod(index.image))
        digest.update(content)
        blank = entry.images - int(np.frombuffer(content, np.uint8).reshape(entry.images, -1).any(axis=1).sum())
        if blank:
            yield entry.name, blank
        done += entry.images
        if progress is not None:
            progress(done, index.images)
