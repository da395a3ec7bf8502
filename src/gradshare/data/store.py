"""The store: one format for every data set, a folder with `images.npy` and `index.json`.

Images are uint8 `[images, height, width, channels]`, class after class; the index names the classes in that order.
A store is built in a temporary folder beside its place and renamed, so an interrupted build leaves nothing half-made.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gradshare.errors import UserError

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
    classes: list[ClassEntry]
    transform: str
    source: str


class Writer:
    """Appends classes to a store under construction."""

    def __init__(self, images: BinaryIO, image: tuple[int, int, int]) -> None:
        self._images = images
        self._image = image
        self.classes: list[ClassEntry] = []

    def add(self, split: str, name: str, images: Iterable[Image]) -> None:
        """Append all images of one class, each [height, width, channels]."""
        count = 0
        for image in images:
            if image.shape != self._image or image.dtype != np.uint8:
                raise UserError(f"class '{name}' has an image of {image.shape} {image.dtype}, not {self._image} uint8")
            self._images.write(np.ascontiguousarray(image).data)
            count += 1
        self.classes.append(ClassEntry(name, split, count))


@contextmanager
def building(folder: Path, name: str, image: tuple[int, int, int], transform: str, source: str) -> Iterator[Writer]:
    """Build a store; it appears at `folder` when the block ends without an error, and not at all otherwise."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        with (temporary / "images.npy").open("wb") as images:
            _write_header(images, (0, *image))
            writer = Writer(images, image)
            yield writer
            images.seek(0)
            _write_header(images, (sum(entry.images for entry in writer.classes), *image))
            _sync(images)
        index = Index(name, image, writer.classes, transform, source)
        with (temporary / "index.json").open("w", encoding="utf-8") as file:
            json.dump({"version": VERSION, **index._asdict()}, file, ensure_ascii=False, indent=1)
            _sync(file)
        _move(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _write_header(file: BinaryIO, shape: tuple[int, ...]) -> None:
    # NumPy pads the header so that the first axis can grow without moving the data.
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
        content = json.loads(path.read_text(encoding="utf-8"))
        if content.pop("version") != VERSION:
            raise UserError(f"{path} is of another version of the format; import the data set again")
        classes = [ClassEntry(str(name), str(split), int(count)) for name, split, count in content.pop("classes")]
        height, width, channels = (int(size) for size in content.pop("image"))
        return Index(image=(height, width, channels), classes=classes, **content)
    except FileNotFoundError:
        raise UserError(f"{folder} is not a data set: it has no index.json") from None
    except (KeyError, TypeError, AttributeError, json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is damaged ({error}); import the data set again") from None


def read_images(folder: Path, index: Index) -> Image:
    """Map the images of a store into memory, after checking them against the index."""
    path = folder / "images.npy"
    expected = (sum(entry.images for entry in index.classes), *index.image)
    try:
        images = np.load(path, mmap_mode="r", allow_pickle=False)
    except FileNotFoundError:
        raise UserError(f"{folder} is not a data set: it has no images.npy") from None
    except (ValueError, EOFError) as error:
        raise UserError(f"{path} is damaged ({error}); import the data set again") from None
    if images.shape != expected or images.dtype != np.uint8:
        raise UserError(f"{path} holds {images.shape} {images.dtype}, but its index says {expected} uint8")
    return images
