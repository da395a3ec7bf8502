"""From the bytes of an image file to pixels: JPEG, PNG and WebP, in every colour mode that they have."""

from __future__ import annotations

import io
from contextlib import suppress

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps, UnidentifiedImageError

from gradshare.data.sources import Transform
from gradshare.errors import UserError
from gradshare.files import reading

FORMATS = ("JPEG", "PNG", "WEBP")
MAX_PIXELS = 25_000_000
"""The largest image that is decoded, by the width and height in its header."""
MARGIN = 1.5
"""Before a crop the shorter side is this times the size of the crop: 126 for 84."""


def decode(
    content: bytes,
    name: str,
    transform: Transform,
    size: int = 84,
    channels: int = 3,
) -> NDArray[np.uint8]:  # [size, size, channels]
    """Decode an image file: upright, on white where it is transparent, and `size` x `size`.

    Args:
        name: of the file, for an error.
        transform: "crop" scales the shorter side to 1.5 x `size` and takes the centre, as Torchmeta does for CUB;
            "resize" scales the whole image. An image that has the size already is left as it is.
        channels: 3, or 1 for greyscale.

    Example:
        >>> import io
        >>> file = io.BytesIO()
        >>> Image.new("CMYK", (200, 150), "red").save(file, "JPEG")
        >>> decode(file.getvalue(), "red.jpg", "crop").shape
        (84, 84, 3)
    """
    if not content:
        raise UserError(f"image '{name}' is an empty file")
    with reading(f"image '{name}' cannot be read"), _opened(content) as image:
        scaled = _scaled(_opaque(_upright(image)), transform, size)
        pixels = np.array(scaled.convert("L" if channels == 1 else "RGB"), dtype=np.uint8)
    return pixels.reshape(size, size, channels)


def resize(
    image: NDArray[np.uint8],  # [height, width, 3]
    size: int,
) -> NDArray[np.uint8]:  # [size, size, 3]
    """Scale an image that is an array, as the transform "resize" does."""
    return np.asarray(_scaled(Image.fromarray(image), "resize", size))


def _opened(content: bytes) -> Image.Image:
    try:
        image = Image.open(io.BytesIO(content), formats=FORMATS)
    except UnidentifiedImageError:
        raise ValueError("it is not a JPEG, PNG or WebP file, or its beginning is damaged") from None
    _check_size(*image.size)
    return image


def _check_size(width: int, height: int) -> None:
    if width * height > MAX_PIXELS:
        raise ValueError(f"it has {width:,} x {height:,} pixels; at most {MAX_PIXELS:,} are decoded")


def _upright(image: Image.Image) -> Image.Image:
    image.load()  # a PNG may have its EXIF data and its transparent colour after the pixels
    with suppress(Exception):  # damaged EXIF data say nothing about the pixels
        ImageOps.exif_transpose(image, in_place=True)
    return image


def _opaque(image: Image.Image) -> Image.Image:
    """The image in mode L or RGB, on white where it is transparent."""
    if image.mode.startswith("I"):
        return _from_16_bits(image)
    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        white = Image.new("RGBA", image.size, "white")
        white.alpha_composite(image.convert("RGBA"))
        return white.convert("RGB")
    return image.convert("L" if image.mode in ("L", "1") else "RGB")


def _from_16_bits(image: Image.Image) -> Image.Image:
    values = np.asarray(image)
    grey = ((values.astype(np.uint32) * 255 + 32767) // 65535).astype(np.uint8)
    if "transparency" in image.info:
        grey[values == image.info["transparency"]] = 255
    return Image.fromarray(grey)


def _scaled(image: Image.Image, transform: Transform, size: int) -> Image.Image:
    if image.size == (size, size):
        return image
    if transform == "resize":
        return image.resize((size, size), Image.Resampling.BILINEAR)
    shorter, (width, height) = round(size * MARGIN), image.size
    scaled = int(shorter * width / min(width, height)), int(shorter * height / min(width, height))
    _check_size(*scaled)  # a very thin image would become a very long one
    left, top = (round((side - size) / 2) for side in scaled)
    return image.resize(scaled, Image.Resampling.BILINEAR).crop((left, top, left + size, top + size))
