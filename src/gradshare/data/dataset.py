"""A data set: the images of a store, and drawing tasks from it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gradshare.data.drawing import Drawn, Units, picker, split_rows
from gradshare.data.sources import BUILT_IN, missing
from gradshare.data.store import Image, Index, Progress, data_folder, find_store, is_store, read_images, read_index
from gradshare.errors import UserError
from gradshare.method import SPLITS
from gradshare.method.episodes import Episodes, Shape, episodes_from, whole_shape

Pixels = Literal["unit", "imagenet"]
IMAGENET_MEAN, IMAGENET_DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@dataclass(frozen=True, repr=False)
class Dataset:
    """Images by class and split. `load_dataset` makes one.

    Example:
        >>> import gradshare as gs
        >>> glyphs = gs.load_dataset("glyphs")
        >>> glyphs.sample("train", gs.Shape(ways=5, shots=1, queries=15), tasks=4, key=(0, 0)).support_x.shape
        torch.Size([4, 5, 1, 28, 28])
    """

    index: Index
    images: Image | Tensor  # uint8 [images, H, W, C]: mapped from the file, or on a device
    pixels: Pixels = "unit"

    def __repr__(self) -> str:
        size = " x ".join(map(str, self.image))
        return f"Dataset({self.name!r}, {self.index.images:,} images of {size}, classes: {self._units.counts()})"

    @property
    def name(self) -> str:
        return self.index.name

    @property
    def image(self) -> tuple[int, int, int]:
        """Channels, height, width, as a model sees them."""
        height, width, channels = self.index.image
        return channels, height, width

    @property
    def nbytes(self) -> int:
        return self.index.bytes

    @property
    def fingerprint(self) -> str:
        """Which images are in which class and split, in short; `gs.train` records it."""
        return f"{self}, {self.pixels}, {self._units.digest()}"

    def to(self, device: torch.device | str) -> Dataset:
        """Hold the images on a device, as uint8."""
        if torch.device(device).type == "cpu":
            return self
        images = self.images if isinstance(self.images, Tensor) else torch.from_numpy(np.array(self.images))
        return Dataset(self.index, images.to(device), self.pixels)

    def check(self, split: str, shape: Shape) -> None:
        """Raise an error, with the numbers, if the split cannot give such tasks."""
        self._units.check(split, shape)

    def sample(self, split: str, shape: Shape, tasks: int, key: tuple[int, ...]) -> Episodes:
        """Draw tasks, uniformly and without replacement within each. The same arguments give the same tasks."""
        shape = whole_shape(shape)
        return episodes_from(self._pixels(self.draw(split, shape, tasks, key).rows), shape)

    def draw(self, split: str, shape: Shape, tasks: int, key: tuple[int, ...]) -> Drawn:
        """Choose the images of `sample`, without reading them."""
        return self._units.draw(split, shape, tasks, key)

    @cached_property
    def _units(self) -> Units:
        counts = [entry.images for entry in self.index.classes]
        rows = np.split(np.arange(sum(counts)), np.cumsum(counts)[:-1])
        names = np.array([entry.split for entry in self.index.classes])
        places = {split: np.flatnonzero(names == split) for split in SPLITS}
        splits = {split: split_rows(own, [rows[place] for place in own]) for split, own in places.items()}
        return Units("class", [entry.name for entry in self.index.classes], splits, self.name, "images")

    def _pixels(self, rows: NDArray[np.int64]) -> Tensor:  # [...] -> [..., C, H, W]
        chosen = picker(rows)(self.images).movedim(-1, -3)
        unit = chosen.to(torch.get_default_dtype(), memory_format=torch.contiguous_format) / 255
        if self.pixels == "unit":
            return unit
        mean, deviation = self._imagenet.to(unit.dtype)
        return (unit - mean) / deviation

    @cached_property
    def _imagenet(self) -> Tensor:  # [2, C, 1, 1], where the images are
        device: Any = self.images.device if isinstance(self.images, Tensor) else "cpu"
        return torch.tensor([IMAGENET_MEAN, IMAGENET_DEVIATION], dtype=torch.float64, device=device)[..., None, None]


def load_dataset(
    name_or_folder: str | Path,
    pixels: Pixels = "unit",
    progress: Progress = None,
) -> Dataset:
    """Open a data set by name (`"glyphs"` is built on first use) or by the folder of its store.

    Args:
        name_or_folder: a name that `gradshare data list` shows, or a folder with `images.npy` and `index.json`.
        pixels: `"unit"`, 0 to 1, or `"imagenet"`, normalised by ImageNet's mean and standard deviation.
        progress: called with (images done, images in all) while a built-in data set is being built.
    """
    folder = find_store(name_or_folder) or _built(str(name_or_folder), progress)
    index = read_index(folder)
    if pixels not in ("unit", "imagenet"):
        raise UserError(f"pixels is 'unit' or 'imagenet', not '{pixels}'")
    if pixels == "imagenet" and index.image[2] != 3:
        raise UserError(f"imagenet scaling needs 3 channels; {index.name} has {index.image[2]}")
    return Dataset(index, read_images(folder, index), pixels)


def _built(name: str, progress: Progress) -> Path:
    """Build a built-in data set."""
    if name not in BUILT_IN:
        raise missing(name)
    from gradshare.data.sources.importing import build

    folder = data_folder() / name
    try:
        build(name, [], folder, progress=progress)
    except UserError:
        if not is_store(folder):  # otherwise another process has just built it
            raise
    return folder
