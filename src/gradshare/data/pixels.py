"""From the bytes of an image file to the pixels of the store: JPEG, PNG and WebP, in every colour mode of theirs."""

from __future__ import annotations

import io
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

from gradshare.errors import UserError

Transform = Literal["crop", "resize"]
FORMATS = ("JPEG", "PNG", "WEBP")
MAX_PIXELS = 25_000_000
"""The largest image that is decoded, by the width and height in its header."""
MARGIN = 1.5
"""Before a crop the shorter side is this times the size of the crop: 126 for 84."""
ORIENTATION = 0x0112
TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


def decode(
    content: bytes,
    name: str,
    transform: Transform,
    size: int = 84,
    channels: int = 3,
    resample: Image.Resampling = Image.Resampling.BILINEAR,
) -> NDArray[np.uint8]:  # [size, size, channels]
    """Decode an image file, upright, on white where it is transparent, and bring it to `size` x `size`.

    name: what to call it in an error.
    transform: "crop" brings the shorter side to 1.5 x `size` and takes the centre (Torchmeta's transform of CUB; an
        image that has the size already is left as it is); "resize" brings the whole image to the size.
    channels: 3, or 1 for greyscale.
    resample: how to interpolate, with antialiasing.

    >>> import io
    >>> file = io.BytesIO()
    >>> Image.new("CMYK", (200, 150), "red").save(file, "JPEG")
    >>> decode(file.getvalue(), "red.jpg", "crop").shape
    (84, 84, 3)
    """
    if not content:
        raise UserError(f"image '{name}' is an empty file")
    try:
        with _quiet(), _opened(content) as image:
            upright = _turned(_opaque(image), _orientation(image))
            placed = _placed(upright, transform, size, resample)
            pixels = np.array(placed.convert("L" if channels == 1 else "RGB"), dtype=np.uint8)
    except Exception as error:  # decoders meet hostile bytes here; whatever they raise is the file's fault
        reason = str(error) or type(error).__name__
        raise UserError(f"image '{name}' cannot be read: {reason}") from None
    return pixels.reshape(size, size, channels)


def _opened(content: bytes) -> Image.Image:
    if content[8:12] == b"WEBP":
        _check_size(*_webp_size(content))  # Pillow makes room for the whole image when it opens one
    try:
        image = Image.open(io.BytesIO(content), formats=FORMATS)
    except UnidentifiedImageError:
        raise ValueError("it is not a JPEG, PNG or WebP file, or its beginning is damaged") from None
    _check_size(*image.size)
    return image


def _check_size(width: int, height: int) -> None:
    if width * height > MAX_PIXELS:
        raise ValueError(f"it has {width:,} x {height:,} pixels; at most {MAX_PIXELS:,} are decoded")


def _webp_size(content: bytes) -> tuple[int, int]:
    kind = content[12:16]
    if kind == b"VP8X":
        return int.from_bytes(content[24:27], "little") + 1, int.from_bytes(content[27:30], "little") + 1
    if kind == b"VP8L":
        bits = int.from_bytes(content[21:25], "little")
        return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    return int.from_bytes(content[26:28], "little") & 0x3FFF, int.from_bytes(content[28:30], "little") & 0x3FFF


def _opaque(image: Image.Image) -> Image.Image:
    """The image in mode L or RGB, on white where it is transparent."""
    if image.mode.startswith("I"):
        return _from_16_bits(image)
    image.load()  # a PNG may name its transparent colour after the pixels
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


def _orientation(image: Image.Image) -> int:
    try:
        return int(image.getexif().get(ORIENTATION, 1))
    except Exception:  # damaged EXIF data say nothing about the pixels
        return 1


def _turned(image: Image.Image, orientation: int) -> Image.Image:
    return image.transpose(TURNS[orientation]) if orientation in TURNS else image


def _placed(image: Image.Image, transform: Transform, size: int, resample: Image.Resampling) -> Image.Image:
    if image.size == (size, size):
        return image
    if transform == "resize":
        return image.resize((size, size), resample)
    shorter, (width, height) = round(size * MARGIN), image.size
    scaled = int(shorter * width / min(width, height)), int(shorter * height / min(width, height))
    _check_size(*scaled)  # a very thin image would become a very long one
    left, top = (round((side - size) / 2) for side in scaled)
    return image.resize(scaled, resample).crop((left, top, left + size, top + size))


class _Quiet:
    """Silences Pillow's warnings while any thread decodes; catch_warnings by itself is not made for threads."""

    def __init__(self) -> None:
        self._lock, self._inside = threading.Lock(), 0
        self._saved = warnings.catch_warnings()

    @contextmanager
    def __call__(self) -> Iterator[None]:
        with self._lock:
            self._inside += 1
            if self._inside == 1:
                self._saved = warnings.catch_warnings()
                self._saved.__enter__()
                warnings.filterwarnings("ignore", module=r"PIL\b")
        try:
            yield
        finally:
            with self._lock:
                self._inside -= 1
                if not self._inside:
                    self._saved.__exit__(None, None, None)


_quiet = _Quiet()
