"""Small archives in the published formats, and a checksum of drawn tasks."""

from __future__ import annotations

import hashlib
import io
import tarfile
import zipfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

import gradshare as gs
from gradshare.data import splits

Files = Mapping[str, bytes]


def picture(seed: int, width: int = 100, height: int = 90) -> Image.Image:
    """A smooth random picture, so that lossy formats keep most of it."""
    coarse = np.random.default_rng(seed).integers(0, 256, (5, 6, 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)


def encoded(image: Image.Image, form: str = "PNG") -> bytes:
    """The picture as a file."""
    file = io.BytesIO()
    image.save(file, form)
    return file.getvalue()


def direct(content: bytes, transform: str = "resize", size: int = 84) -> NDArray[np.uint8]:
    """What an import must give, by Pillow alone."""
    image = Image.open(io.BytesIO(content)).convert("RGB")
    if transform == "crop" and image.size != (size, size):
        shorter = min(image.size)
        image = image.resize([size * 3 // 2 * side // shorter for side in image.size], Image.Resampling.BILINEAR)
        left, top = (round((side - size) / 2) for side in image.size)  # as torchvision rounds
        return np.asarray(image.crop((left, top, left + size, top + size)))
    return np.asarray(image.resize((size, size), Image.Resampling.BILINEAR))


def make_zip(path: Path, files: Files) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return path


def make_tar(path: Path, files: Files, mode: str = "w:gz") -> Path:
    with tarfile.open(path, mode) as archive:  # type: ignore[call-overload]
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return path


def make_folder(path: Path, files: Files) -> Path:
    for name, content in files.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(content)
    return path


def class_folders(classes: Mapping[str, int], form: str = "PNG", **size: int) -> dict[str, bytes]:
    """`<class>/<number>.<suffix>` for so many images a class; the suffix in capitals now and then."""
    suffix = {"PNG": ".png", "JPEG": ".jpg", "WEBP": ".webp"}[form]
    return {
        f"{name}/{name.rpartition('/')[2]}_{i:04}{suffix.upper() if i == 1 else suffix}": encoded(
            picture(100 * number + i, **size), form
        )
        for number, (name, images) in enumerate(classes.items())
        for i in range(images)
    }


def few(name: str, classes: int = 2) -> splits.Split:
    """The first few classes of each split of a standard split."""
    whole = splits.standard_split(name)
    return splits.Split(whole.train[:classes], whole.val[:classes], whole.test[:classes])


def digest(dataset: gs.Dataset, shape: gs.Shape, draws: list[tuple[str, tuple[int, ...]]], tasks: int) -> str:
    """Checksum of all tensors of the drawn episodes."""
    result = hashlib.sha256()
    for split, key in draws:
        drawn = dataset.sample(split, shape, tasks, key)
        for part in (drawn.support_x, drawn.support_y, drawn.query_x, drawn.query_y):
            result.update(part.numpy().tobytes())
    return result.hexdigest()
