"""What the tests share: a small data set that needs no fonts, and one thread, so that results never differ."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import gradshare as gs
from gradshare.data.store import building

torch.set_num_threads(1)


def write_blobs(folder: Path, classes: dict[str, int], images: int = 20, size: int = 16) -> Path:
    """A store whose classes are fixed random patterns with noise: easy to learn, quick to make."""
    generator = np.random.default_rng(0)
    with building(folder, "blobs", (size, size, 1), "none", "made by the tests") as store:
        for split, count in classes.items():
            for number in range(count):
                pattern = generator.integers(0, 256, (size, size, 1))
                noisy = [pattern * 0.6 + generator.integers(0, 100, (size, size, 1)) for _ in range(images)]
                store.add(split, f"{split}-{number}", [image.astype(np.uint8) for image in noisy])
    return folder


@pytest.fixture(scope="session")
def blobs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_blobs(tmp_path_factory.mktemp("data") / "blobs", {"train": 12, "val": 6, "test": 6})


@pytest.fixture(scope="session")
def dataset(blobs: Path) -> gs.Dataset:
    return gs.load_dataset(blobs)
