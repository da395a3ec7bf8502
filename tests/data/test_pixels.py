"""Image files: every colour mode works, and everything else is one clear error."""

from __future__ import annotations

import io
import struct
import warnings
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from gradshare.data.sources import Transform
from gradshare.data.sources.importing import build
from gradshare.data.sources.pixels import decode
from gradshare.errors import UserError
from tests.support.archives import make_zip

Turn = Image.Transpose


def picture(width: int, height: int) -> Image.Image:
    """Smooth colours and some noise."""
    generator = np.random.default_rng(0)
    ramp = np.add.outer(np.linspace(0, 120, height), np.linspace(0, 100, width))[..., None] * (1, 0.7, 0.4)
    return Image.fromarray((ramp + generator.integers(0, 30, (height, width, 3))).astype(np.uint8))


def file(image: Image.Image, form: str = "PNG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, form, **options)
    return buffer.getvalue()


def png(width: int, height: int, depth: int = 8, colour: int = 2, data: bytes = b"") -> bytes:
    """A PNG by hand, with any header."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(data)) + chunk(b"IEND", b"")


def refused(content: bytes, *parts: str) -> None:
    for transform in ("crop", "resize"):
        with pytest.raises(UserError) as caught:
            decode(content, "birds.tgz: wren/a.jpg", transform)  # type: ignore[arg-type]
        assert "wren/a.jpg" in str(caught.value) and "\n" not in str(caught.value)
        for part in parts:
            assert part in str(caught.value), caught.value


@pytest.mark.parametrize("shape", [(500, 333), (333, 500), (200, 200), (90, 84), (40, 30), (1000, 127)])
def test_crop_is_resize_of_the_shorter_side_and_centre_crop(shape: tuple[int, int]) -> None:
    """As torchvision's Resize(126) and CenterCrop(84), which compute the whole resized image."""
    image = picture(*shape)
    width, height = (int(126 * side / min(shape)) for side in shape)
    left, top = round((width - 84) / 2), round((height - 84) / 2)
    whole = image.resize((width, height), Image.Resampling.BILINEAR).crop((left, top, left + 84, top + 84))
    result = decode(file(image), "a.png", "crop")
    assert result.shape == (84, 84, 3) and result.dtype == np.uint8
    assert np.array_equal(result, whole)


def test_resize_takes_the_whole_image() -> None:
    image = picture(500, 333)
    assert np.array_equal(decode(file(image), "a", "resize"), image.resize((84, 84), Image.Resampling.BILINEAR))
    grey = image.resize((28, 28), Image.Resampling.BILINEAR).convert("L")
    assert np.array_equal(decode(file(image), "a", "resize", size=28, channels=1)[..., 0], grey)


@pytest.mark.parametrize("transform", ["crop", "resize"])
def test_an_image_of_the_size_is_left_as_it_is(transform: Transform) -> None:
    assert np.array_equal(decode(file(picture(84, 84)), "a.png", transform), picture(84, 84))


@pytest.mark.parametrize("form", ["JPEG", "PNG", "WEBP"])
def test_formats(form: str) -> None:
    result = decode(file(picture(84, 84), form, quality=95), "a", "crop")
    assert np.abs(result.astype(int) - np.asarray(picture(84, 84)).astype(int)).mean() < 12


def test_greyscale_and_bits_and_palettes() -> None:
    grey = picture(84, 84).convert("L")
    assert np.array_equal(decode(file(grey), "a", "crop"), np.repeat(np.asarray(grey)[..., None], 3, 2))
    assert np.array_equal(decode(file(grey, "JPEG", quality=100), "a", "crop", channels=1).shape, (84, 84, 1))
    bits = grey.convert("1")
    assert np.array_equal(decode(file(bits), "a", "crop", channels=1)[..., 0], bits.convert("L"))
    palette = picture(84, 84).quantize(50)
    assert np.array_equal(decode(file(palette), "a", "crop"), palette.convert("RGB"))


def test_cmyk() -> None:
    image = Image.new("CMYK", (84, 84), (0, 255, 255, 0))
    assert np.abs(decode(file(image, "JPEG", quality=100), "a", "crop").astype(int) - (255, 0, 0)).max() <= 3


@pytest.mark.parametrize("values", [(0, 0), (65535, 255), (32768, 128), (257, 1), (128, 0), (129, 1), (256, 1)])
def test_16_bits_are_scaled(values: tuple[int, int]) -> None:
    deep, flat = values
    image = Image.fromarray(np.full((84, 84), deep, np.uint16))
    assert (decode(file(image), "a.png", "crop") == flat).all()


def test_16_bits_of_colour() -> None:
    rows = b"".join(b"\0" + struct.pack(">HHH", 65535, 32768, 0) * 84 for _ in range(84))
    assert np.abs(decode(png(84, 84, 16, 2, rows), "a", "crop").astype(int) - (255, 128, 0)).max() <= 1


def test_transparency_is_white() -> None:
    clear, half = Image.new("RGBA", (84, 84), (255, 0, 0, 0)), Image.new("RGBA", (84, 84), (0, 0, 0, 128))
    assert (decode(file(clear), "a", "crop") == 255).all()
    assert np.abs(decode(file(half), "a", "crop").astype(int) - 127).max() <= 1
    assert (decode(file(clear, "WEBP", lossless=True), "a", "crop") == 255).all()
    assert (decode(file(Image.new("LA", (84, 84), (9, 0))), "a", "crop") == 255).all()
    keyed = Image.new("P", (84, 84), 1)
    keyed.putpalette([0, 0, 0, 255, 0, 0])
    assert (decode(file(keyed, transparency=1), "a", "crop") == 255).all()
    assert (decode(file(keyed), "a", "crop") == (255, 0, 0)).all()
    colour = Image.new("RGB", (84, 84), (1, 2, 3))
    assert (decode(file(colour, transparency=(1, 2, 3)), "a", "crop") == 255).all()
    deep = Image.fromarray(np.full((84, 84), 300, np.uint16))
    assert (decode(file(deep, transparency=300), "a", "crop") == 255).all()


@pytest.mark.parametrize("form", ["JPEG", "PNG", "WEBP"])
@pytest.mark.parametrize("orientation", [1, 3, 5, 6, 7])
def test_exif_orientation(form: str, orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    content = file(picture(100, 60), form, exif=exif)
    turns = {3: Turn.ROTATE_180, 5: Turn.TRANSPOSE, 6: Turn.ROTATE_270, 7: Turn.TRANSVERSE}
    image = Image.open(io.BytesIO(content)).convert("RGB")
    upright = image.transpose(turns[orientation]) if orientation in turns else image
    expected = np.asarray(upright.resize((84, 84), Image.Resampling.BILINEAR))
    assert np.array_equal(decode(content, "a", "resize"), expected)


def test_damaged_exif_says_nothing() -> None:
    content = file(picture(84, 84), "PNG", exif=b"Exif\0\0MM\0*\xff\xff\xff\xff" + b"\xff" * 40)
    assert np.array_equal(decode(content, "a", "crop"), picture(84, 84))


@pytest.mark.parametrize("form", ["PNG", "WEBP"])
def test_the_first_frame_of_an_animation(form: str) -> None:
    second = Image.new("RGB", (84, 84), "blue")
    content = file(Image.new("RGB", (84, 84), "red"), form, save_all=True, append_images=[second], lossless=True)
    assert (decode(content, "a", "crop") == (255, 0, 0)).all()


@pytest.mark.parametrize("size", [(30_000, 30_000), (2**31 - 1, 2**31 - 1), (7100, 7100)])
def test_huge_images_are_refused_by_their_header(monkeypatch: pytest.MonkeyPatch, size: tuple[int, int]) -> None:
    monkeypatch.setattr(Image.Image, "load", lambda *_: pytest.fail("decoded"))
    refused(png(*size), "pixel")


def test_huge_webp_and_jpeg_headers() -> None:
    webp = bytearray(file(picture(20, 20), "WEBP", lossless=True))
    webp[21:25] = b"\xff\xff\xff\x0f"
    refused(bytes(webp))
    jpeg = bytearray(file(picture(20, 20), "JPEG"))
    start = jpeg.index(b"\xff\xc0")
    jpeg[start + 5 : start + 9] = struct.pack(">HH", 30_000, 30_000)
    refused(bytes(jpeg), "pixels")


def test_very_thin_and_very_small_images() -> None:
    thin = file(Image.new("RGB", (20_000, 1), "red"))
    assert (decode(thin, "a", "resize") == (255, 0, 0)).all()
    with pytest.raises(UserError, match="2,520,000 x 126 pixels"):
        decode(thin, "a", "crop")
    assert (decode(file(Image.new("RGB", (1, 1), "red")), "a", "crop") == (255, 0, 0)).all()


@pytest.mark.parametrize("form", ["JPEG", "PNG", "WEBP"])
def test_truncated_images(form: str) -> None:
    content = file(picture(120, 120), form)
    for cut in (1, 2, 4, 11, 12, 16, 20, 26, 29, 30, 50, len(content) // 2, len(content) - len(content) // 10):
        refused(content[:cut])


def test_things_that_are_no_images() -> None:
    refused(b"", "is an empty file")
    refused(b"Hello, this is text named .jpg\n" * 20, "not a JPEG, PNG or WebP file")
    for form in ("GIF", "BMP", "TIFF", "PPM"):
        refused(file(picture(20, 20), form), "not a JPEG, PNG or WebP file")


def test_warnings_of_pillow_are_silent_during_an_import(tmp_path: Path) -> None:
    odd = file(picture(84, 84), "JPEG", exif=b"Exif\0\0MM\0*\0\0\0\x08\0\x05\x01\x12\0\3\0\0\0\1")  # cut off
    files = {f"{split}/{split} class/{n}.jpg": odd for split in ("train", "val", "test") for n in range(2)}
    path = make_zip(tmp_path / "odd.zip", files)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        decode(odd, "odd.jpg", "crop")
        assert len(caught) == 1
        build("folder", [path], tmp_path / "store")
    assert len(caught) == 1
