"""What the tests share: a small data set that needs no fonts, and one thread, so that results never differ."""

from __future__ import annotations

import signal
from pathlib import Path

import numpy as np
import pytest
import torch

import gradshare as gs
from gradshare.data.store import ClassEntry, Index, write_store

torch.set_num_threads(1)
signal.signal(signal.SIGINT, signal.default_int_handler)  # else ignored where a shell runs this in the background


def write_blobs(folder: Path, classes: dict[str, int], images: int = 20, size: int = 16) -> Path:
    """A store whose classes are fixed random patterns with noise: easy to learn, quick to make."""
    generator = np.random.default_rng(0)
    entries = [ClassEntry(f"{split}-{i}", split, images) for split, count in classes.items() for i in range(count)]
    patterns = [generator.integers(0, 256, (size, size, 1)) for _ in entries]
    noisy = (p * 0.6 + generator.integers(0, 100, p.shape) for p in patterns for _ in range(images))
    index = Index("blobs", (size, size, 1), entries, "none", "made by the tests")
    write_store(folder, index, (image.astype(np.uint8) for image in noisy))
    return folder


@pytest.fixture(scope="session")
def blobs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_blobs(tmp_path_factory.mktemp("data") / "blobs", {"train": 12, "val": 6, "test": 6})


@pytest.fixture(scope="session")
def dataset(blobs: Path) -> gs.Dataset:
    return gs.load_dataset(blobs)
