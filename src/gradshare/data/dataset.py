"""A data set: the images of a store, and drawing tasks from it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gradshare.data.sources import BUILT_IN, missing
from gradshare.data.store import Image, Index, Progress, data_folder, find_store, is_store, read_images, read_index
from gradshare.errors import UserError, check_range
from gradshare.method import SPLITS
from gradshare.method.episodes import Episodes, Shape, choose, episodes_from

Pixels = Literal["unit", "imagenet"]
IMAGENET_MEAN, IMAGENET_DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


class Drawn(NamedTuple):
    """Which classes and images the tasks of a batch have."""

    classes: NDArray[np.int64]  # [tasks, ways]: places in `index.classes`
    rows: NDArray[np.int64]  # [tasks, ways, shots + queries]: rows of the images


class _SplitRows(NamedTuple):
    """The classes of a split."""

    classes: NDArray[np.int64]  # [n]: places in `index.classes`
    starts: NDArray[np.int64]  # [n]: row of the first image
    counts: NDArray[np.int64]  # [n]: number of images


@dataclass(frozen=True)
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

    @property
    def name(self) -> str:
        return self.index.name

    @property
    def image(self) -> tuple[int, int, int]:
        """Channels, height, width, as a model sees them."""
        height, width, channels = self.index.image
        return channels, height, width

    def to(self, device: torch.device | str) -> Dataset:
        """Hold the images on a device, as uint8."""
        if torch.device(device).type == "cpu":
            return self
        images = self.images if isinstance(self.images, Tensor) else torch.from_numpy(np.array(self.images))
        return Dataset(self.index, images.to(device), self.pixels)

    def check(self, split: str, shape: Shape) -> None:
        """Raise an error, with the numbers, if the split cannot give such tasks."""
        if split not in SPLITS:
            raise UserError(f"a split is one of {', '.join(SPLITS)}, not '{split}'")
        for name, value in zip(Shape._fields, shape, strict=True):
            check_range(name, value, 1)
        classes, _, counts = self._splits[split]
        if len(counts) < shape.ways:
            raise UserError(
                f"{shape.ways}-way tasks need {shape.ways} classes; the {split} split of {self.name} has {len(counts)}"
            )
        smallest = int(counts.argmin())
        if counts[smallest] < shape.shots + shape.queries:
            raise UserError(
                f"class '{self.index.classes[classes[smallest]].name}' has {counts[smallest]} images;"
                f" {shape.shots}-shot with {shape.queries} queries needs {shape.shots + shape.queries}"
            )

    def sample(self, split: str, shape: Shape, tasks: int, key: tuple[int, ...]) -> Episodes:
        """Draw tasks, uniformly and without replacement within each. The same arguments give the same tasks."""
        shape = Shape(*shape)
        return episodes_from(self._pixels(self.draw(split, shape, tasks, key).rows), shape)

    def draw(self, split: str, shape: Shape, tasks: int, key: tuple[int, ...]) -> Drawn:
        """Choose the images of `sample`, without reading them."""
        self.check(split, shape)
        own = self._splits[split]
        classes, order = choose(own.counts, shape, tasks, key)
        return Drawn(own.classes[classes], own.starts[classes][..., None] + order)

    @cached_property
    def _splits(self) -> dict[str, _SplitRows]:
        counts = np.array([entry.images for entry in self.index.classes], dtype=np.int64)
        starts = counts.cumsum() - counts
        names = np.array([entry.split for entry in self.index.classes])
        places = {split: np.flatnonzero(names == split) for split in SPLITS}
        return {split: _SplitRows(own, starts[own], counts[own]) for split, own in places.items()}

    def _pixels(self, rows: NDArray[np.int64]) -> Tensor:  # [...] -> [..., C, H, W]
        if isinstance(self.images, Tensor):
            where = torch.from_numpy(rows)
            if self.images.is_cuda:  # pinned memory: otherwise the CPU would wait here until the GPU is idle
                where = where.pin_memory()
            chosen = self.images[where.to(self.images.device, non_blocking=True)]
        else:
            chosen = torch.from_numpy(self.images[rows])
        unit = chosen.movedim(-1, -3).to(torch.get_default_dtype(), memory_format=torch.contiguous_format) / 255
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
