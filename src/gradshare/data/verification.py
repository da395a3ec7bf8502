"""Reads a whole store and says whether it is what its index says."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from gradshare.data.catalogue import Progress
from gradshare.data.store import Index, read_images, read_index
from gradshare.errors import UserError


class Verified(NamedTuple):
    store: Index
    sha256: str  # of images.npy
    blank: dict[str, int]  # class: how many of its images are zero everywhere; only classes that have such


def verify(folder: Path, progress: Progress = None) -> Verified:
    """Check the index against the file, and read every byte of every image.

    Args:
        folder: a store.
        progress: called with (images read, images in all).
    """
    index = read_index(folder)
    images = read_images(folder, index)
    path = folder / "images.npy"
    assert isinstance(images, np.memmap)
    with path.open("rb") as file:  # read, not mapped: a failing disk is an error here, and not a crash
        digest = hashlib.sha256(file.read(images.offset))
        blank = dict(_blank(file, index, digest, progress))
    if index.images_sha256 not in ("", digest.hexdigest()):
        raise UserError(f"{path} does not match the checksum in its index; import the data set again")
    return Verified(index, digest.hexdigest(), blank)


def _blank(file: BinaryIO, index: Index, digest: Any, progress: Progress) -> Iterator[tuple[str, int]]:
    """Read class after class into the digest; the classes with blank images, and how many they have."""
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
